"""The model: which tokens attend to which, by causality, documents and windows; what layers add to
plain attention; gradients that are written by hand. Most tests run in float32."""

import dataclasses
import functools
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import train_gpt
from tests.tools import (
    MINI,
    MINI32,
    sequences,
    whole_loss,
    whole_weights,
)
from train_gpt import LONG, SHORT, Layer, Stage

T = 64
RECORD = train_gpt.PRESETS["record"]
# Every technique, and every kind of source of a MUDD layer, in as few layers as possible.
SMALL_LAYERS = (
    Layer(SHORT, paired_heads=True, xsa=True, ngram=True, value_table=0),
    Layer(None, skip_from=0, x0=False),
    Layer(LONG, key_offset=True, head_gate=True, dc=True, xsa=True, new_gates=True, attend_to=0,
          value_table=1, x0=False, ngram=True, mudd=("input", "layer0")),
)  # fmt: skip
SMALL_HEAD = (("input", 0.0), ("layer0", -0.5), ("layer1", 0.0), ("value0", 0.0))
SMALL = dataclasses.replace(MINI32, layers=SMALL_LAYERS, mudd_head=SMALL_HEAD)


def changed(before, after):
    """Of activations (..., D), which differ."""
    return np.abs(after - before).max(axis=-1) > 1e-5


# ---- The whole model -----------------------------------------------------------------------------
@functools.cache
def activations(c: train_gpt.Config):
    """A function of tokens (8, T + 1): the final activations (8, T, D). Key offsets, n-grams and
    the smear cross the borders of documents; if no layer has a key offset, the others are off."""
    weights = whole_weights(c)
    if not any(layer.key_offset for layer in c.layers):
        weights |= dict(ngram=0 * weights["ngram"], smear_lambda=jnp.zeros(1))

    def final(tokens):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(train_gpt, "head_loss", lambda x, *_: x)
            return whole_loss(weights, tokens, {1: 1.0}, c, 1)

    program = jax.jit(final).lower(sequences(c, T)).compile()
    return lambda tokens: np.asarray(program(tokens)).reshape(8, T, c.D)


def test_this_jax_computes_right_on_cpus():
    """0.10.2 does not, and other versions may not: jax issue 39103."""
    rows = np.zeros((32_769, 3), np.float32)
    rows[:, 0] = np.arange(len(rows))

    def squares(rows):
        return jax.vmap(lambda row: jnp.sum((jnp.eye(3) @ row) ** 2))(rows)

    assert jax.jit(squares)(rows)[-1] == 32_768**2


def test_no_token_sees_a_later_one():
    tokens = sequences(SMALL, T, documents=1)
    before = activations(SMALL)(tokens)
    for t in (1, 17, 40, 63):
        other = tokens.copy()
        other[:, t] = (other[:, t] + 1) % (SMALL.vocab - 1)
        other[tokens[:, t] == SMALL.eot, t] = SMALL.eot
        moved = changed(before, activations(SMALL)(other))
        assert not moved[:, :t].any()
        assert moved[:, t][tokens[:, t] != SMALL.eot].all()


def test_no_token_sees_another_document():
    layers = [dataclasses.replace(layer, key_offset=False) for layer in SMALL.layers]
    c = dataclasses.replace(SMALL, layers=tuple(layers))
    tokens = sequences(c, T, documents=1)
    starts = [0, 9, 10, 32, 50]
    tokens[:, :-1][tokens[:, :-1] == c.eot] = 0
    tokens[:, starts] = c.eot
    before = activations(c)(tokens)
    document = np.cumsum(tokens[0, :-1] == c.eot)
    for t in (3, 20, 33, 51):
        other = tokens.copy()
        other[:, t] = (other[:, t] + 1) % (c.vocab - 1)
        moved = changed(before, activations(c)(other))
        assert not moved[:, document != document[t]].any()
        assert moved[:, t].all()
        if (document == document[t])[t + 1]:
            assert moved[:, t + 1].any()  # its own document does see it


def test_a_gate_that_nothing_reads_is_refused(monkeypatch):
    """It would train nothing, in silence."""
    gates = train_gpt.layer_gates
    monkeypatch.setattr(train_gpt, "layer_gates", lambda layer, H: gates(layer, H) | {"mlp": [0.0]})
    tokens = jnp.asarray(sequences(SMALL, T))
    with pytest.raises(ValueError, match="layer 0 has gates that nothing reads: mlp"):
        jax.eval_shape(lambda w: whole_loss(w, tokens, {1: 1.0}, SMALL, 1), whole_weights(SMALL))


# ---- Windows -------------------------------------------------------------------------------------
@pytest.mark.parametrize("window, marks, reach", [
    (16, {}, 16),
    (3, {"key_offset": True}, 4),  # half of a key is the previous token's
    (40, {"paired_heads": True}, 20),  # two positions a token
], ids=["plain", "key offset", "paired"])  # fmt: skip
def test_window_of_a_layer_by_its_jacobian(window, marks, reach):
    stages = (Stage(1, 512, window, window, 0, 1.0),)
    layer = Layer(SHORT, **marks)
    c = dataclasses.replace(MINI32, layers=(layer,), stages=stages, mudd_head=())
    w = whole_weights(c)
    pos = train_gpt.positions(jnp.zeros((1, T), bool), c, 0)
    x = jax.random.normal(jax.random.key(1), (1, T, c.D))
    sums = lambda x: train_gpt.attention(x, [], 0, w, {}, pos, c)[0].sum(axis=-1)
    depends = np.abs(np.asarray(jax.jit(jax.jacrev(sums))(x))).max(axis=(1, 3)) > 0
    q, k = np.indices((T, T))
    np.testing.assert_array_equal(depends, (k <= q) & (q - k <= reach))


@pytest.mark.parametrize("stage", [1])
def test_every_attention_is_asked_for_causality_and_its_window_at_once(monkeypatch, stage):
    """cuDNN needs both: for it, a window without is_causal is open to the right. On a CPU, the
    window alone would do."""
    asked = []

    def spy(q, k, v, **options):
        asked.append((q.shape, options))
        return q

    monkeypatch.setattr(jax.nn, "dot_product_attention", spy)
    c = dataclasses.replace(MINI32, attention="cudnn")
    tokens = jnp.asarray(sequences(c, T))
    jax.eval_shape(lambda w: whole_loss(w, tokens, {1: 1.0}, c, stage), whole_weights(c))
    _, scale = train_gpt.rope_frequencies(c, stage)
    options = dict(scale=scale, is_causal=True, implementation="cudnn")
    layers = [layer for layer in c.layers if layer.window]
    assert len(asked) == len(layers) == 5
    for (shape, given), layer in zip(asked, layers, strict=True):
        window = getattr(c.stages[stage], layer.window)
        assert given == options | {"local_window_size": (window, 0)}
        assert shape == ((8, 2 * T, 1, 16) if layer.paired_heads else (8, T, 2, 16))


# ---- The document code against an explicit mask --------------------------------------------------
WINDOW = 16
LAYOUTS = [  # where documents start
    [0],  # one document
    [5],  # the sequence begins within a document
    range(0, T, 3),
    range(T),  # every token is a document
    [0, WINDOW, 2 * WINDOW],  # documents end at the window's edge
    [0, WINDOW + 1],  # and one token past it
]


def attend(q, k, v, first, window, paired: bool, by_code: bool):
    """Attention of q, k, v (B, T, H, K) within documents, which start where `first` (B, T) is true:
    train_gpt's, by its document code, or plain attention with a mask."""
    B, T, H, K = q.shape
    layer = Layer(SHORT, paired_heads=paired)
    sizes = {"D": 2 * K, "H": 2, "layers": (layer,), "mudd_head": ()}
    c = dataclasses.replace(MINI, **sizes, compute=q.dtype.name)
    pos = train_gpt.positions(jnp.asarray(first), c, 0)
    rows = 2 if paired else 1  # positions of a token
    cos, sin = pos.rope[paired]
    codes = [code if by_code else jnp.zeros_like(code) for code in (pos.doc_q, pos.doc_k)]
    q, k = (train_gpt.norm_rotate(x, cos, sin, code)
            for x, code in zip((q, k), codes, strict=True))  # fmt: skip
    q, k, v = (x.reshape(B, rows * T, H // rows, K) for x in (q, k, v))
    if by_code:
        return train_gpt.attend(q, k, v, window, pos.score_scale, c)
    document = np.repeat(np.cumsum(first, axis=1), rows, axis=1)
    i, j = np.indices((rows * T,) * 2)
    mask = (j <= i) & (i - j <= window) & (document[:, :, None] == document[:, None, :])
    return jax.nn.dot_product_attention(q, k, v, scale=pos.score_scale, mask=mask[:, None])


@pytest.mark.parametrize("paired, dtype, tolerance", [
    (True, "float32", 2e-5), (False, "bfloat16", 2e-2),
])  # fmt: skip
def test_document_code_is_an_exact_mask(paired, dtype, tolerance):
    first = np.zeros((len(LAYOUTS), T), bool)
    for row, starts in zip(first, LAYOUTS, strict=True):
        row[[*starts]] = True
    *qkv, dy = jax.random.normal(jax.random.key(2), (4, len(LAYOUTS), T, 2, 32)).astype(dtype)
    found = []
    for by_code in True, False:
        run = lambda q, k, v, by_code=by_code: attend(q, k, v, first, WINDOW, paired, by_code)
        y, pull = jax.vjp(jax.jit(run), *qkv)
        found.append([np.asarray(x, np.float32) for x in (y, *pull(dy.reshape(y.shape)))])
    for got, expected in zip(*found, strict=True):
        for a, b in zip(got, expected, strict=True):  # in one-token documents, dq and dk are zero
            assert np.linalg.norm(a - b) < tolerance * max(np.linalg.norm(b), 1)


def test_4095_documents_are_still_apart():
    """Every token is a document, so attention returns v, but for 1e-11 of a neighbour's."""
    n = 4095
    q, k, v = jax.random.normal(jax.random.key(3), (3, 1, n, 1, 16)).astype("bfloat16")
    alone = jax.jit(lambda q, k, v: attend(q, k, v, np.ones((1, n), bool), n, False, True))
    got = np.asarray(alone(q, k, v), np.float32)
    np.testing.assert_allclose(got, np.asarray(v, np.float32), rtol=1e-6, atol=1e-9)


# ---- Banded attention against a mask -------------------------------------------------------------
@pytest.mark.parametrize("T, window", [
    (1, 0), (37, 5), (37, 100), (64, 31), (64, 32),
])  # fmt: skip
def test_banded_attention_is_attention_with_a_mask(T, window):
    """Values and gradients, for windows from 0 to beyond T, and for lengths beside bands."""
    q, k, v, dy = jax.random.normal(jax.random.key(5), (4, 2, T, 3, 8))

    def masked(q, k, v):
        i, j = np.indices((T, T))
        mask = (j <= i) & (i - j <= window)
        return jax.nn.dot_product_attention(q, k, v, scale=0.3, mask=mask)

    def banded(q, k, v):
        return train_gpt.band_attention(q, k, v, window, 0.3)

    ours = gradients(banded, (q, k, v), dy)
    for got, expected in zip(ours, gradients(masked, (q, k, v), dy), strict=True):
        np.testing.assert_allclose(got, expected, atol=1e-6, rtol=1e-5)


def test_banded_attention_makes_no_array_of_all_pairs():
    """Forward and backward, it has the scores of one band at a time, fewer numbers than q, k and
    v. XLA's attention has all scores."""
    T, window, H, K = 1024, 64, 2, 8
    q, k, v = jax.random.normal(jax.random.key(5), (3, 1, T, H, K))

    def largest(attend):
        gradient = jax.jit(jax.grad(lambda *qkv: attend(*qkv).sum(), (0, 1, 2)))
        shapes = re.findall(r"\w\[([\d,]+)\]", gradient.lower(q, k, v).compile().as_text())
        return max(math.prod(int(n) for n in shape.split(",")) for shape in shapes)

    def xla(q, k, v):
        options = dict(is_causal=True, local_window_size=(window, 0), implementation="xla")
        return jax.nn.dot_product_attention(q, k, v, **options)

    assert largest(lambda *qkv: train_gpt.band_attention(*qkv, window, 0.3)) <= 3 * T * H * K
    assert largest(xla) >= T * T


# ---- Beside plain attention ----------------------------------------------------------------------
@pytest.mark.parametrize("length, window", [(64, 12), (37, 64)])
def test_dc_attention_is_its_formula(length, window):
    """The formula, with T x T arrays: the heads' softmaxes over the window are mixed by `source`,
    applied to v, and scaled by `target`."""
    c = dataclasses.replace(MINI32, dc_window=window)
    keys = jax.random.split(jax.random.key(6), 6)
    q, k, v, dy = (jax.random.normal(key, (2, length, 3, 8)) for key in keys[:4])
    source, target = (jax.random.normal(key, (2, length, 3)) for key in keys[4:])
    i, j = np.indices((length, length))
    mask = (j <= i) & (i - j < window)

    def plain(q, k, v, source, target):
        scores = jnp.where(mask, 0.3 * jnp.einsum("bihk,bjhk->bhij", q, k), -jnp.inf)
        source /= jnp.sqrt((source**2).mean(axis=-1, keepdims=True) + 1e-6)
        mixed = jnp.einsum("bhij,bih->bij", jax.nn.softmax(scores), source)
        return target[..., None] * jnp.einsum("bij,bjhk->bihk", mixed, v)

    given = q, k, v, source, target
    ours = gradients(lambda *given: train_gpt.dc_attention(*given, 0.3, c), given, dy)
    close(ours, gradients(plain, given, dy), 1e-5)


def test_signs_are_balanced_and_differ():
    signs = np.asarray(train_gpt.random_signs(jnp.arange(8192)[None], RECORD)[0], np.float32)
    assert signs.shape == (8192, 768) and set(np.unique(signs)) == {-1, 1}
    few = np.r_[:300, 4000:4100, 8100:8192]
    products = signs[few] @ signs[few].T - 768 * np.eye(len(few))
    assert np.abs(products).max() < 6 * 768**0.5  # of any two rows, 120,000 pairs
    assert np.abs(signs.mean(axis=0)).max() < 5 / 8192**0.5  # of every channel
    assert np.abs(signs.mean(axis=1)).max() < 6 / 768**0.5  # of every row
    neighbours = (signs[:, 1:] * signs[:, :-1]).mean()
    assert abs(neighbours) < 5 / signs.size**0.5


# ---- Gradients written by hand -------------------------------------------------------------------
def plain_norm(x):
    return x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + 2.0**-23)


def gradients(function, arguments, cotangent):
    """The function's value, and the gradients of its arguments."""
    out, pull = jax.vjp(jax.jit(function), *arguments)
    return [np.asarray(x, np.float32) for x in (out, *pull(cotangent))]


def close(got, expected, tolerance):
    """Compares arrays by the norm of their difference."""
    for a, b in zip(got, expected, strict=True):
        assert np.linalg.norm(a - b) < tolerance * np.linalg.norm(b)


@pytest.mark.parametrize("radial_from, dtype, tolerance", [
    ("x", "float32", 1e-5), ("y", "float32", 1e-5), ("y", "bfloat16", 1e-2),
])  # fmt: skip
def test_norm_linear_has_the_gradients_of_its_formula(radial_from, dtype, tolerance):
    x, dy = jax.random.normal(jax.random.key(6), (2, 2, 24, 64), jnp.float32)
    x *= jnp.exp(jax.random.normal(jax.random.key(7), (2, 24, 1)))  # rows of very different length
    w = jax.random.normal(jax.random.key(8), (48, 64)) / 8
    x, w, dy = (a.astype(dtype) for a in (x, w, dy[..., :48]))
    ours = gradients(lambda x, w: train_gpt.norm_linear(x, w, radial_from), (x, w), dy)
    x, w, dy = (a.astype("float32") for a in (x, w, dy))
    close(ours, gradients(lambda x, w: plain_norm(x) @ w.T, (x, w), dy), tolerance)


@pytest.mark.parametrize("offset, paired, dtype, tolerance", [
    (False, True, "float32", 1e-5), (True, False, "float32", 1e-5), (True, True, "bfloat16", 1e-2),
])  # fmt: skip
def test_norm_rotate_has_the_gradients_of_its_formula(offset, paired, dtype, tolerance):
    """With offset, a key's channels that do not rotate come from the token before, also across
    documents; the first token keeps its own."""
    first = np.zeros((1, 40), bool)
    first[0, [0, 7, 30]] = True
    x, dy = jax.random.normal(jax.random.key(9), (2, 1, 40, 4, 32)).astype(dtype)
    sizes = {"D": 128, "H": 4, "layers": (Layer(SHORT, paired_heads=paired),), "mudd_head": ()}
    c = dataclasses.replace(MINI, **sizes, compute=dtype)
    pos = train_gpt.positions(jnp.asarray(first), c, 0)
    cos, sin = pos.rope[paired]

    def formula(x):
        turns = (jnp.tile(turn, (1, 4 // turn.shape[1], 1)) for turn in (cos, sin))
        cos_THF, sin_THF = turns
        a, b, still = jnp.split(plain_norm(x), [8, 16], axis=-1)
        if offset:
            still = still[:, np.maximum(np.arange(40) - 1, 0)]
        turned = a * cos_THF + b * sin_THF, b * cos_THF - a * sin_THF
        y = jnp.concatenate((*turned, still), axis=-1)
        code = jnp.broadcast_to(pos.doc_k.astype("float32"), (1, 40, 4, 4))
        return jnp.concatenate((y[..., :-4], code), axis=-1)

    def ours(x):
        y = train_gpt.norm_rotate(x, cos, sin, pos.doc_k)
        return train_gpt.offset_keys(y) if offset else y

    expected = gradients(formula, (x.astype("float32"),), dy.astype("float32"))
    close(gradients(ours, (x,), dy), expected, tolerance)
