"""jNanoGPT in plain NumPy: logits and greedy text of model.safetensors and config.json beside it.

    python reference.py "prompt" [--tokens N]

Written to be read from the top down, not to be fast: one sequence, float32, no cache.
Dims    T position  S position of a key  D model  E hidden of a gate net  H head  K head channel
        F hidden of the MLP  V token  N term of a sum; x residual stream
"""

import argparse
import json
import math
from pathlib import Path
from types import SimpleNamespace

import numpy as np


def load(folder):
    """(c, weights): config.json with its keys as attributes, and a dict of float32 arrays."""
    text = (Path(folder) / "config.json").read_text(encoding="utf-8")
    c = json.loads(text, object_hook=lambda entries: SimpleNamespace(**entries))
    # safetensors: length of the header as uint64, the header as JSON, arrays; all little-endian.
    file = np.asarray(np.memmap(Path(folder) / "model.safetensors", np.uint8, "r"))
    start = 8 + int(file[:8].view("<u8")[0])
    header, weights = json.loads(bytes(file[8:start])), {}
    for name in header.keys() - {"__metadata__"}:
        first, last = (start + offset for offset in header[name]["data_offsets"])
        weights[name] = file[first:last].view("<f4").reshape(header[name]["shape"])
    return c, weights


def logits(tokens, c, weights):
    """(T, V), between 0 and 23, of what follows each of tokens (T,); c.eot starts a document."""
    x = forward(np.asarray(tokens, np.int32), c, weights)
    z_TV = norm(x) @ weights["head"][: c.vocab].T  # the rows beyond are padding
    return 23 * sigmoid((z_TV + 5) / 7.5)


def forward(tokens_T, c, weights):
    """(T, D): the residual stream after the last layer."""
    x0, pairs, values = look_up(tokens_T, c, weights)
    gate_nets, depth_nets = iter(weights["gate_in"]), iter(weights["mudd_in"])
    gate = net(x0, next(gate_nets), weights["gate_scale"])
    x = start = x0 + gate(weights["gate_start"]) * pairs
    seen = SimpleNamespace(x0=x0, pairs=pairs, values=values, start=start, outputs=[],
                           document=np.cumsum(tokens_T == c.eot))  # fmt: skip
    for layer in c.layers:
        row = lambda name, n: [weights[name][i] for i in n] if type(n) is list else weights[name][n]
        w = {name: row(name, n) for name, n in vars(layer.rows).items()}  # the layer's own
        if layer.renews_gates:  # until the next such layer
            gate = net(x, next(gate_nets), weights["gate_scale"])
        w |= {name: gate(w[name]) for name in w if name.startswith("gate_")}
        if layer.mixes_depths:
            entry, depth = x, net(x, next(depth_nets), 0.1)
            w |= {name: depth(w[name]) for name in w if name.startswith("mudd_")}
        x = block(x, layer, w, seen, c)
        seen.outputs.append(x)
    if any(layer.mixes_depths for layer in c.layers):  # the head reads several depths, too
        early, skipped = ([seen.outputs[n] for n in ns] for ns in (c.read_again, c.skip_again))
        depths = [start, *early, entry, *values[:1], *skipped]
        x = x + mix(net(x, next(depth_nets), 0.1)(weights["mudd_head"]), depths)
    return x


def look_up(tokens_T, c, weights):
    """Of each token (T, D): its embedding, that of its pair with the token before it, and a list
    with its row of each value table."""
    embed, tables = weights["embed"][tokens_T], sorted(k for k in weights if k[:6] == "values")
    share_T = weights["smear_lambda"] * sigmoid(embed[:, :12] @ weights["smear_gate"])
    x0 = norm(embed + share_T[:, None] * np.concatenate((0 * embed[:1], embed[:-1])))
    # A pair has a row, by a hash in int32 that wraps around, and signs, by one in uint32.
    first, last, token = c.bigrams - 1, tokens_T[:-1].copy(), tokens_T[1:]
    number_T = np.append(0, (token ^ last) % 8192)
    last[:1] = first
    row_T = np.append(first, (36313 * token ^ 27191 * last) % first)
    bits_TD = (number_T[:, None] * c.D + np.arange(c.D)).astype(np.uint32) * np.uint32(0x9E3779B1)
    bits_TD = (bits_TD ^ bits_TD >> 15) * np.uint32(0x85EBCA77) >> 31
    pairs = weights["bigram"][row_T] * (1 - 2 * bits_TD.astype(np.float32))
    return x0, pairs, [weights[table][tokens_T] for table in tables]


def block(x, layer, w, seen, c):
    """One layer, (T, D) to (T, D); w has its rows of the weights, and its gates (T, n)."""
    if layer.skip is not None:
        x = x + sigmoid(w["skip_lambdas"]) * w["gate_skip"] * seen.outputs[layer.skip]
    source, extra = x if layer.reads is None else seen.outputs[layer.reads], 0
    values = None if layer.table is None else seen.values[layer.table]
    if layer.mixes_depths:
        return mixed_block(x, source, values, layer, w, seen, c)
    if values is not None:  # v also has the token's value, as much as each head wants
        looks = np.concatenate((norm(source)[:, :6], values[:, :6]), axis=1)
        gate_TH = 2 * sigmoid(looks @ w["value_gates"].T)
        extra = np.repeat(gate_TH, c.D // c.H, axis=1) * values
    if layer.window is not None:
        keep, scale = w["attn_lambdas"]
        x = keep * x + scale * attention(source, extra, layer, w, seen, c) + w["gate_x0"] * seen.x0
        x = x + w["gate_bigram"] * seen.pairs if layer.token_pairs else x
    keep, scale = w["mlp_lambdas"]
    return keep * x + scale * mlp(x, w)


def mixed_block(x, source, values, layer, w, seen, c):
    """MUDD: v, the layer's input and its sums are mixed of several depths, anew for each token."""
    depths = [seen.start, *(seen.outputs[n] for n in c.read_again), x]
    extra = mix(w["mudd_v"], depths)
    if values is not None:  # a weight for each half of the heads
        extra = extra + np.repeat(w["mudd_values"], c.D // 2, axis=1) * values
    y = attention(source, extra, layer, w, seen, c)
    x = x + mix(w["mudd_x"], depths)
    x = mix(w["mudd_attn"], [x, y, seen.start, seen.pairs])
    return mix(w["mudd_mlp"], [x, mlp(x, w)])


def attention(x, extra, layer, w, seen, c):
    """(T, D); extra is what v has beside its product with x."""
    T, h, (w_v, w_o), (scale_v, scale_o) = len(x), norm(x), w["vo"], w["vo_lambdas"]
    heads = lambda y_TD: y_TD.reshape(T, c.H, -1)
    q, k = map(heads, np.split(h @ np.concatenate(w["qk"]).T, 2, axis=1))
    v = heads(h @ (scale_v * w_v).T + extra)
    q, k = rotate(norm(q), layer, c), rotate(norm(k), layer, c, offset=layer.key_offset)
    # Of paired heads each sees the other's keys, too: twice the positions for half the heads.
    pair = 1 + layer.paired_heads
    fold = lambda y_THK: y_THK.reshape(pair * T, c.H // pair, -1)
    A_HTS = attend(fold(q), fold(k), layer.window, np.repeat(seen.document, pair), c)
    y = np.einsum("HTS,SHK->THK", A_HTS, fold(v)).reshape(v.shape)
    if layer.composes_heads:  # each also reads by one mixture of all heads' views of near keys
        A_HTS = attend(q, k, c.dc_window - 1, seen.document, c)
        A_TS = np.einsum("HTS,TH->TS", A_HTS, norm(w["gate_dc_from"], 1e-6))
        y = y + w["gate_dc_to"][..., None] * np.einsum("TS,SHK->THK", A_TS, v)
    if layer.exclusive:  # XSA: each may take out of y what lies along its own v
        dot = lambda a, b: (a * b).sum(axis=-1, keepdims=True)
        y = y - np.tanh(w["gate_xsa"])[..., None] * dot(y, v) / np.maximum(dot(v, v), 1e-8) * v
    if layer.gates_heads:
        y = w["gate_heads"][..., None] * y
    return y.reshape(T, c.D) @ (scale_o * w_o).T


def rotate(h_THK, layer, c, offset=False):
    """Channels j and j + K/4, j < K/4, are turned by an angle; the other half is, by offset, that
    of the position before. The last four are 0: in training they tell documents apart."""
    (T, H, K), pair = h_THK.shape, 1 + layer.paired_heads
    t_TH = pair * np.arange(T)[:, None] + np.arange(H) % pair  # paired heads take turns
    angle = t_TH[..., None].astype(np.float32) * np.float32(c.rotation.speeds)
    cos, sin, (a, b, rest) = np.cos(angle), np.sin(angle), np.split(h_THK, [K // 4, K // 2], axis=2)
    rest = np.concatenate((rest[:1], rest[:-1])) if offset else rest
    turned = np.concatenate((a * cos + b * sin, b * cos - a * sin, rest), axis=-1)
    return np.where(np.arange(K) < K - 4, turned, 0)


def attend(q_THK, k_SHK, window, document, c):
    """(H, T, S): a query sees itself and `window` keys before it, of its own document."""
    back = np.arange(len(q_THK))[:, None] - np.arange(len(k_SHK))
    sees = (back >= 0) & (back <= window) & (document[:, None] == document)
    scores = c.rotation.score_scale * np.einsum("THK,SHK->HTS", q_THK, k_SHK)
    A_HTS = np.where(sees, np.exp(scores), 0)  # bounded, for q and k are normalised
    return A_HTS / A_HTS.sum(axis=-1, keepdims=True)


def net(x, w_ED, scale):
    """What it says of each token, (T, N): a function of rows (N, E + 1), weights and a bias."""
    z_TE = x @ w_ED.T
    hidden_TE = z_TE * (1 + np.vectorize(math.erf, "f")(z_TE / 2**0.5)) / 2  # GELU
    return lambda rows: scale * (hidden_TE @ rows[:, :-1].T + rows[:, -1])


sigmoid = lambda x: (1 + np.tanh(x / 2)) / 2
norm = lambda x, epsilon=2**-23: x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + epsilon)
mlp = lambda x, w: np.maximum(norm(x) @ w["mlp"][0].T, 0) ** 2 @ w["mlp"][1]  # squared ReLU
mix = lambda w_TN, depths: sum(w[:, None] * x for w, x in zip(w_TN.T, depths, strict=True))


def main():
    cli = argparse.ArgumentParser(description="Prints a prompt and its greedy continuation.")
    cli.error = lambda what: cli.exit(2, f"reference.py: {what}\n")
    cli.add_argument("prompt")
    cli.add_argument("--tokens", type=int, default=100, help="of the continuation, at most")
    args, out = cli.parse_args(), open(1, "wb", buffering=0, closefd=False)
    try:
        c, weights = load(Path(__file__).resolve().parent)
        encode, piece = lambda text: [*text.encode()], lambda token: bytes([token])
        if c.tokenizer != "bytes":
            import tiktoken  # its vocabulary comes from the network, or TIKTOKEN_CACHE_DIR

            vocabulary = tiktoken.get_encoding(c.tokenizer)
            encode, piece = vocabulary.encode_ordinary, vocabulary.decode_single_token_bytes
        tokens = [c.eot, *encode(args.prompt)]
    except Exception as error:  # of the files, the vocabulary, the prompt
        cli.error(f"{type(error).__name__}: {error}")
    out.write(args.prompt.encode())
    for _ in range(args.tokens):
        tokens.append(int(logits(tokens, c, weights)[-1].argmax()))
        if tokens[-1] == c.eot:
            break
        out.write(piece(tokens[-1]))
    out.write(b"\n")


if __name__ == "__main__":
    main()
