"""Checks of four patches in records/ideas/. Each takes the patched train_gpt.py as a module, and a
small config of its `record` in float32, and compares parts with numbers that upstream's functions
made, or with a slow search in plain Python."""

import dataclasses
import hashlib
import lzma
from types import SimpleNamespace
from unittest.mock import patch

import jax
import jax.numpy as jnp
import numpy as np

import train_gpt
from lab.tests.ideas_head_checks import with_one_layer
from lab.tests.ideas_record92_checks import one_step
from records.upstream92.golden_r92 import GOLDEN, META, normal, relative
from tests import law
from tests.tools import ROOT, ngram_rows, noise, sequences, whole_weights

VOCABULARY = ROOT / "tests/gpt2_vocab.bpe.xz"  # GPT-2's merges


# ---- normalised_ids ------------------------------------------------------------------------------
# Upstream's own, of the table's 50,257 int32: pull request 375.
SHA256_OF_IDS = "79fb57ac259495ba36f1afb9b0d5da35f3048b5067fa59c101d5a3c1ed15c2a2"


def gpt2_tokens() -> list[bytes]:
    """GPT-2's tokens by number, without the last one, <|endoftext|>: first the 256 bytes, then what
    each merge makes. In the file, a byte is a character that can be seen."""
    seen = [*range(33, 127), *range(161, 173), *range(174, 256)]
    order = seen + [byte for byte in range(256) if byte not in seen]
    characters = [*map(chr, seen), *(chr(256 + i) for i in range(256 - len(seen)))]
    byte_of = dict(zip(characters, order, strict=True))
    merges = lzma.decompress(VOCABULARY.read_bytes()).decode().splitlines()[1:]
    texts = characters + [merge.replace(" ", "") for merge in merges]
    return [bytes(byte_of[character] for character in text) for text in texts]


def check_normalised_ids(module, c) -> None:
    """GPT-2's table is upstream's. N-grams are those of the file without the patch, of tokens whose
    numbers are mapped. Nothing else reads them."""
    tokens = gpt2_tokens()
    encoding = SimpleNamespace(decode_tokens_bytes=lambda numbers: [tokens[i] for i in numbers])
    with patch.object(module.tiktoken, "get_encoding", lambda name: encoding):
        ids = module.normal_ids(50257)
    assert hashlib.sha256(ids.astype("<i4").tobytes()).hexdigest() == SHA256_OF_IDS

    of_bytes = module.normal_ids(257)
    for byte in range(257):
        same = byte
        if byte < 256 and chr(byte) in " \t\r\n":
            same = ord("\t")
        elif byte < 128 and chr(byte).islower():
            same = byte - 32
        assert of_bytes[byte] == same, byte

    tokens_BT = sequences(c, 64)[:, :-1]
    tokens_BT[:, 10:20] = np.frombuffer(b"The  THE\tt", np.uint8)
    mapped_BT = jnp.asarray(of_bytes[tokens_BT])
    tokens_BT = jnp.asarray(tokens_BT)
    weights = {
        "embed": jnp.asarray(noise("embed", (257, c.D))),
        "ngram_rows": jnp.asarray(noise("rows", (*tokens_BT.shape, c.D))),
        "smear_gate": jnp.asarray(noise("gate", (12,))),
        "smear_lambda": jnp.ones(1),
    }
    weights |= {f"value{n}": weights["embed"] for n in c.value_tables()}
    found = module.embed_tokens(weights, tokens_BT, c)
    plain = train_gpt.embed_tokens(weights, tokens_BT, c)
    mapped = train_gpt.embed_tokens(weights, mapped_BT, c)
    for name in found:
        want = mapped if name == "ngram" else plain
        np.testing.assert_array_equal(found[name], want[name], err_msg=name)
    assert (found["ngram"] != plain["ngram"]).any()
    rows_BT = train_gpt.ngram_rows(mapped_BT, c)
    np.testing.assert_array_equal(module.ngram_rows(tokens_BT, c), rows_BT)


# ---- trigrams ------------------------------------------------------------------------------------
def check_trigrams(module, c) -> None:
    """The record's n-grams and four updates of the table are upstream's. A step moves the rows that
    it reads by the gradient that they have in the file without the patch, and no others."""
    record = module.PRESETS["record"]
    of_92 = dataclasses.replace(record, ngram_buckets=84_602_880)
    hashes = module.hash_ngrams(jnp.asarray(GOLDEN["ngram/tokens"])[None], of_92)
    for n, (rows, seeds) in enumerate(hashes):
        np.testing.assert_array_equal(rows[0], GOLDEN["ngram/rows"][n])
        np.testing.assert_array_equal(seeds[0], GOLDEN["ngram/sign_rows"][n])
    check_four_updates(module, c)

    state = jax.eval_shape(lambda: module.initial_state(np.uint32(0), record))
    arrays = [state.params["ngram"], *state.opt_state["ngram"]]
    assert sum(x.size * x.dtype.itemsize for x in arrays) < 8 * 9e9  # on each of eight GPUs: 9 GB
    assert "ngram" not in state.waiting_grads

    c = dataclasses.replace(with_one_layer(module, c), adam_every=2)
    before, after, row = one_step(module, c)
    _, plain, _ = one_step(train_gpt, c)
    grad = plain.waiting_grads["ngram"]
    rms = np.sqrt(np.square(grad).mean(axis=-1, keepdims=True))
    moved = after.params["ngram"] - before.params["ngram"]
    want = -row.adam_lr * 75 * grad / np.maximum(rms, 1e-30)
    assert relative(moved, want) < 1e-4
    tokens = jnp.asarray(sequences(c, c.sequence_length(0))[:, :-1])
    is_read = np.zeros(c.ngram_buckets, bool)
    is_read[np.unique(train_gpt.ngram_rows(tokens, c))] = True
    assert 0.2 < is_read.mean() < 0.9
    np.testing.assert_array_equal(moved.any(axis=-1).reshape(-1), is_read)


def check_four_updates(module, c) -> None:
    """Updates with golden gradients of eight ranks, of which each hits some rows."""
    start = GOLDEN["table/start"]
    R = len(start) // 8
    param = module.param_table(c)["ngram"]._replace(lr=70, weight_decay=0.005 * 70 * 5)
    params = {"ngram": jnp.asarray(start.reshape(R, 8, -1))}
    opt_state = {"ngram": param.optimizer.init(params["ngram"])}
    state = module.State(params, opt_state, {}, {}, jnp.int32(0))

    @jax.jit
    def update(state, rows, gradients, adam_lr):
        once = module.sum_equal_rows(module.RowGradients(rows, gradients), R)
        row = SimpleNamespace(adam_lr=adam_lr, momentum=0.0)
        return module.update_parameters(state, {"ngram": once}, row, c, False)

    with patch.object(module, "param_table", lambda c: {"ngram": param}):
        for event, step in enumerate(GOLDEN["table/events"][:4]):
            hit = GOLDEN["table/hit"][event].reshape(8, R, 8)  # rank, row of an eighth, eighth
            rows = np.where(hit, np.arange(R)[:, None], R)  # R: none
            gradients = normal(f"table/grad/{event}", (*hit.shape, META["Dt"]), 1e-2)
            rows = np.moveaxis(rows, 2, 0).reshape(8, 8 * R)
            gradients = np.moveaxis(gradients / 8, 2, 0).reshape(8, 8 * R, META["Dt"])  # of a mean
            state = update(state, rows, gradients, 0.008 * GOLDEN["schedule/rate"][step])
            _, squares = state.opt_state["ngram"]
            assert relative(squares.reshape(-1), GOLDEN["table/second_moment"][event]) < 1e-6
            if f"table/after{event}" in GOLDEN:
                found = state.params["ngram"].reshape(start.shape)
                assert relative(found - start, GOLDEN[f"table/after{event}"] - start) < 1e-5


# ---- document_copies -----------------------------------------------------------------------------
def slow_copies(tokens_T: list[int], c, lengths) -> tuple[list[int], list[int]]:
    """document_copies() of a sequence: in a document, the latest place of all that ended so far."""
    copies = []
    matches = []
    latest = {}
    start = 0  # of the document
    for t, token in enumerate(tokens_T):
        if token == c.eot:
            start = t
            latest = {}
        copies.append(token)
        matches.append(0)
        for number, n in enumerate(lengths, 1):
            if t - n + 1 >= start:
                words = tuple(tokens_T[t - n + 1 : t + 1])
                if words in latest:
                    copies[t] = tokens_T[latest[words] + 1]
                    matches[t] = number
                latest[words] = t
    return copies, matches


def check_document_copies(module, c) -> None:
    """Copies are those of a slow search. With gains of 0, the model is that of the file without the
    patch; others have the effect that their formula says. The law holds."""
    lengths = module.COPY_LENGTHS
    assert lengths[0] == 1 and max(lengths) == 32 and sorted(set(lengths)) == [*lengths]
    rng = np.random.default_rng(0)
    find = jax.jit(module.document_copies, static_argnums=1)
    found = set()
    # Texts of one to four different tokens, and one as long as the record's shortest sequences.
    for symbols, T in (((1,), (2,), (3,), (4,)), 300), ((50,), 16384):
        B = len(symbols)
        tokens_BT = rng.integers(0, symbols, (B, T)).astype(np.int32)
        tokens_BT[:, 200:240] = tokens_BT[:, 140:180]
        tokens_BT[rng.random((B, T)) < 0.01] = c.eot
        copies_BT, match_BT = find(jnp.asarray(tokens_BT), c)
        for b in range(B):
            copies, matches = slow_copies(tokens_BT[b].tolist(), c, lengths)
            assert match_BT[b].tolist() == matches and copies_BT[b].tolist() == copies
            found |= {*matches}
    assert found == {*range(len(lengths) + 1)}
    # Copies are from a token's own document even if all labels were equal by chance.
    alike = jnp.zeros((*tokens_BT.shape, 1 + max(lengths)), jnp.int32)
    with patch.object(module, "pointer_labels", lambda *_: alike):
        _, match_BT = module.document_copies(jnp.asarray(tokens_BT), c)
    starts_BT = (tokens_BT == c.eot) | (np.arange(tokens_BT.shape[1]) == 0)
    np.testing.assert_array_equal(match_BT == 0, starts_BT)

    c = with_one_layer(module, c)
    tokens_BS = law.text(c, T=127, count=8)
    tokens_BT = jnp.asarray(tokens_BS[:, :-1])
    w = ngram_rows(whole_weights(c), tokens_BT, c)
    gain = noise("gain", (len(lengths), 2))
    plain = jax.jit(train_gpt.forward, static_argnums=(2, 3))(w, tokens_BT, c, 0)
    forward = jax.jit(module.forward, static_argnums=(2, 3))
    np.testing.assert_array_equal(forward(w | {"copy_gain": 0 * gain}, tokens_BT, c, 0), plain)
    assert not module.param_table(c)["copy_gain"].init(None, gain.shape).any()

    copies_BT, match_BT = find(tokens_BT, c)
    gain_BT2 = np.concatenate((np.zeros((1, 2)), gain))[match_BT]
    copy = np.asarray(w["embed"])[copies_BT]
    at_the_end = gain_BT2[..., 1:] * norm(copy)
    found = forward(w | {"copy_gain": gain * np.array([0, 1])}, tokens_BT, c, 0)
    np.testing.assert_allclose(found - plain, at_the_end, atol=2e-5)
    embed = np.asarray(w["embed"])[tokens_BT]
    gate = 1 / (1 + np.exp(-embed[..., :12] @ w["smear_gate"]))
    previous = np.pad(embed[:, :-1], ((0, 0), (1, 0), (0, 0)))
    x = embed + w["smear_lambda"] * gate[..., None] * previous + gain_BT2[..., :1] * copy
    x0 = module.embed_tokens(w | {"copy_gain": gain}, tokens_BT, c)["x0"]
    np.testing.assert_allclose(x0, norm(x), atol=2e-5)

    w |= {"copy_gain": jnp.asarray(gain)}

    @jax.jit
    def probabilities(tokens_BT):
        x_BTD = module.norm(module.forward(ngram_rows(w, tokens_BT, c), tokens_BT, c, 0))
        return jax.nn.softmax(module.softcap(x_BTD @ w["head"].T))

    def loss(tokens_BS):
        return module.loss_fn(w, jnp.asarray(tokens_BS), {1: 1.0}, c, 0)

    law.check(probabilities, tokens_BS, module.padded_vocab(c), loss)


# ---- pointer -------------------------------------------------------------------------------------
def check_pointer(module, c) -> None:
    """The patch changes nothing but the record's pointer. tests/ checks what a pointer computes."""
    without = dataclasses.replace(module.PRESETS["record"], pointer=0)
    assert dataclasses.asdict(without) == dataclasses.asdict(train_gpt.PRESETS["record"])


# ---- Helpers -------------------------------------------------------------------------------------
def norm(x: np.ndarray) -> np.ndarray:
    """x / rms(x)."""
    return x / np.sqrt(np.square(x).mean(axis=-1, keepdims=True))
