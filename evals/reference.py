"""jNanoGPT in plain NumPy: probabilities and text from the model.safetensors and config.json that
are in the same folder.

    python reference.py "prompt" [--tokens N] [--temperature T] [--seed S]

Written to be read from the top down, not to be fast: one sequence, float32, no cache. It has no
limit of length, but nobody has measured the model beyond val_T tokens (see config.json).
Names end in their dimensions: T position, S position of a key, D model, R hidden of a gate net,
H head, K head channel, F hidden of the MLP, V token, N term of a sum. x is the residual stream.
"""

import argparse
import json
import math
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np


def load(folder):
    """(c, weights): config.json with its keys as attributes, and a dict of float32 arrays."""
    text = (Path(folder) / "config.json").read_text(encoding="utf-8")
    c = json.loads(text, object_hook=lambda entries: SimpleNamespace(**entries))
    # safetensors: the header's length as uint64, the header as JSON, arrays; all little-endian.
    file = np.asarray(np.memmap(Path(folder) / "model.safetensors", np.uint8, "r"))
    start = 8 + int(file[:8].view("<u8")[0])
    header = json.loads(bytes(file[8:start]))
    weights = {}
    for name in header.keys() - {"__metadata__"}:
        first, last = header[name]["data_offsets"]
        values = file[start + first : start + last]
        if header[name]["dtype"] != "F32":
            raise ValueError(f"{name} is {header[name]['dtype']}, and only F32 is read")
        weights[name] = values.view("<f4").reshape(header[name]["shape"])
        if not np.isfinite(weights[name]).all():
            raise ValueError(f"{name} has numbers that are not finite")
    return c, weights


def log_p(tokens, c, weights):
    """(T, V): log-probabilities. Row t is for the token that follows tokens[t]. tokens is (T,);
    c.eot starts a document."""
    tokens_T = np.asarray(tokens, np.int32)
    x = norm(forward(tokens_T, c, weights))
    z = 23 * sigmoid((x @ weights["head"].T + 5) / 7.5)  # its rows beyond the vocabulary are no
    exp_TV = np.exp(z[:, : c.vocab])  # tokens, but the first one decides about copies
    total_T1 = exp_TV.sum(axis=1, keepdims=True)
    p_TV = exp_TV / total_T1
    if not getattr(c, "pointer", 0):  # frozen files do not have the field
        return np.log(p_TV)
    copied_TV, longest_T = copied(x, tokens_T, c, weights)
    bias_T1 = weights["pointer_slot"][longest_T, None]
    share_T1 = sigmoid(z[:, [c.vocab]] - np.log(total_T1) + bias_T1)
    p_TV = p_TV * (1 - share_T1 * copied_TV.sum(axis=1, keepdims=True)) + share_T1 * copied_TV
    return np.log(p_TV + 1e-9)


def forward(tokens_T, c, weights):
    """(T, D): the residual stream after the last layer."""
    saved = embed_tokens(tokens_T, c, weights)  # streams of (T, D), by name
    document_T = np.cumsum(tokens_T == c.eot)
    gates = run_net("gates_input", saved["x0"], c, weights, weights["gate_scale"])
    x = saved["x0"] + gates["input.bigram"] * saved["bigram"]
    saved["input"] = x
    for i, layer in enumerate(c.layers):
        if layer.new_gates:  # of this layer and the next ones, until they are renewed
            gates |= run_net(f"gates{i}", x, c, weights, weights["gate_scale"])
        gate = {name.split(".")[1]: g for name, g in gates.items() if name.startswith(f"layer{i}.")}
        if layer.skip_from is not None:
            early = saved[f"layer{layer.skip_from}"]
            x = x + sigmoid(weights["skip_lambdas"][i]) * gate["skip"] * early
        if layer.mudd:
            x = mudd_block(x, i, gate, saved, document_T, c, weights)
        else:
            x = block(x, i, gate, saved, document_T, c, weights)
        saved[f"layer{i}"] = x
    if c.mudd_head:  # the head also reads earlier streams
        net = run_net("mudd_head", x, c, weights, 0.1)
        x = x + mix(net["x"], [saved[name] for name, _ in c.mudd_head])
    return x


def run_net(name, x, c, weights, scale):
    """A small net's outputs of shape (T, n), by name: scale * (w2 gelu(w1 x) + b2)."""
    z_TR = x @ weights[f"{name}.w1"].T
    hidden_TR = z_TR * (1 + np.vectorize(math.erf, "f")(z_TR / 2**0.5)) / 2  # GELU
    y_TN = scale * (hidden_TR @ weights[f"{name}.w2"].T + weights[f"{name}.b2"])
    outputs = {}
    first = 0
    for output, size in vars(c.nets)[name]:
        outputs[output] = y_TN[:, first : first + size]
        first += size
    return outputs


def embed_tokens(tokens_T, c, weights):
    """Streams of (T, D) by name: x0, the token's embedding; bigram, the embedding of the n-grams
    that end with the token; the token's row of every value table."""
    saved = {}
    for name in weights:
        if name[:5] == "value" and name[5:].isdigit():
            saved[name] = weights[name][tokens_T]
    embed = weights["embed"][tokens_T]
    smear_T = weights["smear_lambda"] * sigmoid(embed[:, :12] @ weights["smear_gate"])
    embed_before = np.concatenate((0 * embed[:1], embed[:-1]))
    saved["x0"] = norm(embed + smear_T[:, None] * embed_before)
    saved["bigram"] = np.zeros_like(embed)
    part = c.bigrams // len(c.ngrams)  # rows of the table for every length of n-grams
    for number, n in enumerate(c.ngrams):
        for t in range(len(tokens_T)):
            row, sign_D = hash_ngram(tokens_T, t, n, part, c)
            saved["bigram"][t] += weights["bigram"][number * part + row] * sign_D
    return saved


# By the length of an n-gram: factors of its last token, of the one before it, and so on; first for
# the row, then for the signs.
NGRAM_FACTORS = {
    2: ([36313, 27191], [48271, 30011]),
    3: ([17351, 60961, 45259], [58699, 39779, 26801]),
    4: ([52361, 31847, 64901, 22541], [33769, 61403, 24877, 50101]),
    5: ([41077, 57413, 19609, 35251, 62989], [55057, 28019, 63841, 37123, 44651]),
}


def hash_ngram(tokens_T, t, n, rows, c):
    """The row, below `rows`, and the signs, (D,), of the n tokens that end with token t. The first
    n - 1 tokens of a sequence have the last row. Products of int32 may wrap around."""
    if t < n - 1:
        return rows - 1, signs(0, c)
    ngram = tokens_T[t - n + 1 : t + 1][::-1].copy()
    row_factors, sign_factors = NGRAM_FACTORS[n]
    if len(c.ngrams) == 1:  # record 89, with bigrams alone, has no factors for its signs
        sign_factors = [1, 1]
    seed = np.bitwise_xor.reduce(np.int32(sign_factors) * ngram) % 8192
    if n == 2 and t == 1:  # as upstream, the second token hashes the last row for the first token
        ngram[1] = rows - 1
    return np.bitwise_xor.reduce(np.int32(row_factors) * ngram) % (rows - 1), signs(seed, c)


def signs(seed, c):
    """-1 and 1, (D,), the same for a seed in every run: the highest bit of a hash."""
    bits_D = (seed * c.D + np.arange(c.D)).astype(np.uint32) * np.uint32(0x9E3779B1)
    bits_D = (bits_D ^ (bits_D >> 15)) * np.uint32(0x85EBCA77)
    return 1 - 2 * (bits_D >> 31).astype(np.float32)


def copied(x, tokens_T, c, weights):
    """(T, V): a token's attention to earlier tokens of its document, each of which counts for the
    token after it; what is missing to 1 is the share of a sink. And the length of the longest match
    with an earlier token, (T,), up to c.pointer. A learned term is added to a score for every token
    of such a match."""
    w_q, w_k, w_previous = weights["pointer_qk"]
    x_previous = np.concatenate((0 * x[:1], x[:-1]))
    q = c.pointer_D**-0.5 * weights["pointer_gain"] * norm(x @ w_q.T)
    k = norm(x @ w_k.T + x_previous @ w_previous.T)
    sinks = q @ weights["pointer_sink"] + weights["pointer_sink_bias"]
    terms = np.append(0, np.cumsum(weights["pointer_match"]))
    document_T = np.cumsum(tokens_T == c.eot)
    band = 2 * c.pointer_band  # as in validation
    length_T = np.zeros(len(x), int)  # of the equal tokens that end at t and at an earlier token
    copied_TV = np.zeros((len(x), c.vocab), np.float32)
    longest_T = np.zeros(len(x), int)
    for t, token in enumerate(tokens_T):
        is_equal = (tokens_T == token) & (document_T == document_T[t])
        length_T = np.where(is_equal, np.append(0, length_T[:-1]) + 1, 0)
        earlier = np.arange(max(0, (t // band - 1) * band), t)
        earlier = earlier[document_T[earlier] == document_T[t]]
        lengths = np.minimum(length_T[earlier], c.pointer)
        longest_T[t] = lengths.max(initial=0)
        scores = k[earlier] @ q[t] + terms[lengths]
        scores = np.append(scores, sinks[t])
        weights_of = np.exp(scores - scores.max())
        weights_of /= weights_of.sum()
        np.add.at(copied_TV[t], tokens_T[earlier + 1], weights_of[:-1])
    return copied_TV, longest_T


def matrices(name, i, c, weights):
    """Layer i's matrices in a bank, an array of the matrices of all layers."""
    return [weights[name][n] for n in vars(c.layers[i].matrices)[name]]


def block(x, i, gate, saved, document_T, c, weights):
    """One layer, (T, D) to (T, D); gate has the layer's gates of shape (T, n), by name."""
    layer = c.layers[i]
    y = 0
    if layer.window is not None:
        source = x if layer.attend_to is None else saved[f"layer{layer.attend_to}"]
        extra = 0
        if layer.value_table is not None:  # v also reads a token table, by a gate for each head
            value = saved[f"value{layer.value_table}"]
            gate_input = np.concatenate((norm(source)[:, :6], value[:, :6]), axis=1)
            gate_TH = 2 * sigmoid(gate_input @ weights["value_gates"][i].T)
            extra = np.repeat(gate_TH, c.D // c.H, axis=1) * value
        y = attention(source, extra, i, gate, document_T, c, weights)
    embeddings = [gate[name] * saved[name] for name in ("x0", "bigram") if name in gate]
    if layer.window is not None or embeddings:
        keep, add = weights["attn_lambdas"][i]
        x = keep * x + add * y + sum(embeddings)
    keep, add = weights["mlp_lambdas"][i]
    return keep * x + add * mlp(x, i, c, weights)


def mudd_block(x, i, gate, saved, document_T, c, weights):
    """A layer with MUDD (arXiv:2502.12170): v, the layer's input and its sums mix several streams
    with weights that a net computes for each token."""
    layer = c.layers[i]
    mudd = run_net(f"mudd{i}", x, c, weights, 0.1)
    source = x if layer.attend_to is None else saved[f"layer{layer.attend_to}"]
    streams = [*(saved[name] for name in layer.mudd), x]
    extra = mix(mudd["v"], streams)
    if layer.value_table is not None:  # one weight for each half of the heads
        value = saved[f"value{layer.value_table}"]
        extra = extra + np.repeat(mudd["value"], c.D // 2, axis=1) * value
    y = attention(source, extra, i, gate, document_T, c, weights)
    x = x + mix(mudd["x"], streams)
    x = mix(mudd["attn"], [x, y, saved["input"], saved["bigram"]])
    return mix(mudd["mlp"], [x, mlp(x, i, c, weights)])


def attention(x, extra, i, gate, document_T, c, weights):
    """(T, D); extra is added to v, beside the product with x."""
    layer = c.layers[i]
    T = len(x)
    h = norm(x)
    w_v, w_o = matrices("vo", i, c, weights)
    v_lambda, o_lambda = weights["vo_lambdas"][i]
    w_qk = np.concatenate(matrices("qk", i, c, weights))
    qk = (h @ w_qk.T).reshape(T, 2, c.H, -1)
    v = (h @ (v_lambda * w_v).T + extra).reshape(T, c.H, -1)
    q = rotate(norm(qk[:, 0]), layer)
    k = rotate(norm(qk[:, 1]), layer, offset=layer.key_offset)
    # Two paired heads see each other's keys: they become one head with twice the positions.
    pair = 1 + layer.paired_heads
    fold = lambda y_THK: y_THK.reshape(pair * T, c.H // pair, -1)
    A_HTS = attend(fold(q), fold(k), layer.window, np.repeat(document_T, pair), layer)
    y = np.einsum("HTS,SHK->THK", A_HTS, fold(v)).reshape(v.shape)
    if layer.dc:  # all heads also read v through one mixture of their attention to near keys
        A_HTS = attend(q, k, c.dc_window - 1, document_T, layer)
        A_TS = np.einsum("HTS,TH->TS", A_HTS, norm(gate["dc_in"], 1e-6))
        y = y + gate["dc_out"][..., None] * np.einsum("TS,SHK->THK", A_TS, v)
    if layer.xsa:  # each head may remove from y what is parallel to v of the same position
        dot = lambda a, b: (a * b).sum(axis=-1, keepdims=True)
        y = y - np.tanh(gate["xsa"])[..., None] * dot(y, v) / np.maximum(dot(v, v), 1e-8) * v
    if layer.head_gate:
        y = gate["head"][..., None] * y
    return y.reshape(T, -1) @ (o_lambda * w_o).T


def rotate(h_THK, layer, offset=False):
    """RoPE of the pairs of channels j and j + F, for F frequencies. With offset, the other channels
    come from the previous position. In training, the last four channels of q and k hold document
    codes. Here they are 0, and attend() masks other documents."""
    T, H, K = h_THK.shape
    pair = 1 + layer.paired_heads
    t_TH = pair * np.arange(T)[:, None] + np.arange(H) % pair  # positions of paired heads alternate
    angle = t_TH[..., None].astype(np.float32) * np.float32(layer.rotation.frequencies)
    cos, sin = np.cos(angle), np.sin(angle)
    F = len(layer.rotation.frequencies)
    a, b, rest = np.split(h_THK, [F, 2 * F], axis=2)
    rest = np.concatenate((rest[:1], rest[:-1])) if offset else rest
    rotated = np.concatenate((a * cos + b * sin, b * cos - a * sin, rest), axis=-1)
    return np.where(np.arange(K) < K - 4, rotated, 0)


def attend(q_THK, k_SHK, window, document, layer):
    """(H, T, S): a query attends to itself and the `window` keys before it, if they are of the same
    document."""
    back = np.arange(len(q_THK))[:, None] - np.arange(len(k_SHK))
    sees = (back >= 0) & (back <= window) & (document[:, None] == document)
    scores = layer.rotation.score_scale * np.einsum("THK,SHK->HTS", q_THK, k_SHK)
    A_HTS = np.where(sees, np.exp(scores), 0)  # does not overflow, because q and k are normalised
    return A_HTS / A_HTS.sum(axis=-1, keepdims=True)


def mlp(x, i, c, weights):
    """(T, D); the activation is a squared ReLU."""
    fc_FD, proj_FD = matrices("mlp", i, c, weights)
    return np.maximum(norm(x) @ fc_FD.T, 0) ** 2 @ proj_FD


def sigmoid(x):
    """1 / (1 + exp(-x)), without overflow."""
    return (1 + np.tanh(x / 2)) / 2


def norm(x, epsilon=2**-23):
    """x / rms(x), over the last axis."""
    return x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + epsilon)


def mix(weights_TN, streams):
    """The sum of N streams (T, D), with N weights for each token."""
    return sum(w[:, None] * x for w, x in zip(weights_TN.T, streams, strict=True))


def pieces(args):
    """Yields the bytes of the prompt, and those of each token of its continuation."""
    c, weights = load(Path(__file__).resolve().parent)
    encode = lambda text: [*text.encode("utf-8", "surrogateescape")]
    piece = lambda token: bytes([token])
    if c.tokenizer != "bytes":
        import tiktoken  # its vocabulary comes from the network, or TIKTOKEN_CACHE_DIR

        vocabulary = tiktoken.get_encoding(c.tokenizer)
        encode = vocabulary.encode_ordinary
        piece = vocabulary.decode_single_token_bytes
    tokens = [c.eot, *encode(args.prompt)]
    yield args.prompt.encode("utf-8", "surrogateescape")  # the bytes that were typed
    rng = np.random.default_rng(args.seed)
    for _ in range(args.tokens):
        log_p_V = log_p(tokens, c, weights)[-1]
        # The token with the largest sum is a sample of softmax(log_p / temperature) (Gumbel, 1954).
        noise_V = rng.gumbel(size=len(log_p_V))
        tokens.append(int(np.argmax(log_p_V + args.temperature * noise_V)))
        if tokens[-1] == c.eot:
            break
        yield piece(tokens[-1])
    yield b"\n"


def main():
    cli = argparse.ArgumentParser(description="Continues a prompt.")
    cli.error = lambda message: cli.exit(2, f"reference.py: {message}\n")
    cli.add_argument("prompt")
    cli.add_argument("--tokens", type=int, default=100, help="of the continuation, at most")
    cli.add_argument("--temperature", type=float, default=0.7, help="0: the likeliest tokens")
    cli.add_argument("--seed", type=int, default=0, help="another one makes another text")
    args = cli.parse_args()
    if args.tokens < 1 or args.seed < 0:
        cli.error("--tokens begins at 1, --seed at 0")
    if not 0 <= args.temperature <= 1e6:  # refuses nan, too
        cli.error("--temperature is from 0 to 1e6")
    try:
        out = open(1, "wb", buffering=0, closefd=False)  # stdout, unbuffered: tokens show at once
        for piece in pieces(args):
            out.write(piece)
    except BrokenPipeError:
        sys.exit(141)  # nobody reads the text, as after `| head`
    except KeyboardInterrupt:
        sys.exit(130)
    except Exception as error:  # from the files, the vocabulary, the prompt or the disk
        cli.error(f"{type(error).__name__}: {' '.join(str(error).split())}")


if __name__ == "__main__":
    main()
