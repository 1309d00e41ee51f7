"""The model: which tokens attend to which, by causality, documents and windows. Its numbers and the
gradients that are written by hand are golden: test_golden.py."""

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
    ngram_rows,
    noise,
    sequences,
    whole_loss,
    whole_weights,
)
from train_gpt import LONG, SHORT, Layer

T = 64
RECORD = train_gpt.PRESETS["record"]
# Every technique, and every kind of source of a MUDD layer, in as few layers as possible. The layer
# with key offsets is the first, so that a key has only the token before it from another document.
SMALL_LAYERS = (
    Layer(LONG, key_offset=True, head_gate=True, xsa=True, value_table=1, ngram=True),
    Layer(None, skip_from=0, x0=False),
    Layer(SHORT, paired_heads=True, dc=True, xsa=True, new_gates=True, attend_to=0, value_table=0,
          x0=False, ngram=True, mudd=("input", "layer0")),
)  # fmt: skip
SMALL_HEAD = (("input", 0.0), ("layer0", -0.5), ("layer1", 0.0), ("value0", 0.0))
SMALL = dataclasses.replace(MINI32, layers=SMALL_LAYERS, mudd_head=SMALL_HEAD)
ONE = dataclasses.replace(MINI32, layers=(Layer(SHORT),), mudd_head=())


# ---- The whole model -----------------------------------------------------------------------------
@functools.cache
def program():
    """A compiled function of tokens (8, T + 1): the final activations (8 T, D)."""
    weights = whole_weights(SMALL)

    def final(tokens):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(train_gpt, "head_loss", lambda x, *_: x)
            return whole_loss(weights, tokens, {1: 1.0}, SMALL, 1)

    return jax.jit(final).lower(sequences(SMALL, T)).compile()


def moved(tokens, t: int) -> np.ndarray:
    """(8, T): which activations differ where token t is another one, but no other document."""
    other = tokens.copy()
    other[:, t] = (other[:, t] + 1) % (SMALL.vocab - 1)
    other[tokens[:, t] == SMALL.eot, t] = SMALL.eot
    difference = np.asarray(program()(other) - program()(tokens))
    return np.abs(difference).max(axis=-1).reshape(8, T) > 1e-5


def test_this_jax_computes_right_on_cpus():
    """0.10.2 does not, and other versions may not: jax issue 39103."""
    rows = np.zeros((32_769, 3), np.float32)
    rows[:, 0] = np.arange(len(rows))

    def squares(rows):
        return jax.vmap(lambda row: jnp.sum((jnp.eye(3) @ row) ** 2))(rows)

    assert jax.jit(squares)(rows)[-1] == 32_768**2


def test_no_token_sees_a_later_one():
    tokens = sequences(SMALL, T, documents=1)
    for t in (1, 17, 40, 63):
        found = moved(tokens, t)
        assert not found[:, :t].any()
        assert found[:, t][tokens[:, t] != SMALL.eot].all()


def test_no_token_sees_another_document():
    """But its last two tokens, which key offsets, n-grams and the smear carry over the border."""
    tokens = sequences(SMALL, T, documents=1)
    starts = [0, 9, 10, 32, 50]
    tokens[:, :-1][tokens[:, :-1] == SMALL.eot] = 0
    tokens[:, starts] = SMALL.eot
    document = np.cumsum(tokens[0, :-1] == SMALL.eot)
    for t in (3, 20, 33, 51):
        found = moved(tokens, t)
        assert not found[:, document != document[t]].any()
        assert found[:, t].all()
        assert found[:, t + 1].any()  # its own document does see it


def test_a_gate_that_nothing_reads_is_refused(monkeypatch):
    """It would train nothing, in silence."""
    gates = train_gpt.layer_gates
    monkeypatch.setattr(train_gpt, "layer_gates", lambda layer, H: gates(layer, H) | {"mlp": [0.0]})
    tokens = jnp.asarray(sequences(SMALL, T))
    with pytest.raises(ValueError, match="layer 0 has gates that nothing reads: mlp"):
        jax.eval_shape(lambda w: whole_loss(w, tokens, {1: 1.0}, SMALL, 1), whole_weights(SMALL))


def test_the_gradient_of_an_mlp_is_summed_in_float32():
    """Only the result is rounded to bfloat16. jax 0.12 would sum JAX's own gradient of proj in it,
    with ten times the error."""
    x, dy = (jnp.bfloat16(noise(name, (1, 256, 64))) for name in ("x", "dy"))
    fc, proj = (jnp.bfloat16(noise(name, (96, 64))) for name in ("fc", "proj"))

    @jax.jit
    def hidden_and_gradient(proj):
        _, vjp = jax.vjp(lambda proj: train_gpt.mlp(x, 0, {"mlp": [(fc, proj)]}, MINI), proj)
        hidden = jnp.square(jax.nn.relu(train_gpt.norm_linear(x, fc, "y")))
        return hidden[0], vjp(dy)[0]

    hidden, gradient = (np.float32(array) for array in hidden_and_gradient(proj))
    exact = hidden.T @ np.float32(dy[0])
    assert np.linalg.norm(gradient - exact) < 0.004 * np.linalg.norm(exact)


# ---- Windows -------------------------------------------------------------------------------------
def test_every_attention_is_asked_for_causality_and_its_window_at_once(monkeypatch):
    """cuDNN needs both: for it, a window without is_causal is open to the right. On a CPU, the
    window alone would do."""
    asked = []

    def spy(q, k, v, **options):
        asked.append((q.shape, options))
        return q

    monkeypatch.setattr(jax.nn, "dot_product_attention", spy)
    c = dataclasses.replace(MINI32, attention="cudnn")
    tokens = jnp.asarray(sequences(c, T))
    stage = 1
    jax.eval_shape(lambda w: whole_loss(w, tokens, {1: 1.0}, c, stage), whole_weights(c))
    _, scale = train_gpt.rope_frequencies(c, stage)
    options = dict(scale=scale, is_causal=True, implementation="cudnn")
    layers = [layer for layer in c.layers if layer.window]
    assert len(asked) == len(layers) == 5
    for (shape, given), layer in zip(asked, layers, strict=True):
        window = getattr(c.stages[stage], layer.window)
        assert given == options | {"local_window_size": (window, 0)}
        assert shape == ((8, 2 * T, 1, 16) if layer.paired_heads else (8, T, 2, 16))


def test_one_program_validates_with_the_windows_of_the_last_two_stages():
    """Where attention is in bands and the last stage has no steps."""
    c = MINI32
    on_gpus = dataclasses.replace(c, attention="cudnn")
    steps = (10, 19, c.total_steps)
    assert [c.val_stage(step) for step in steps] == [1, 1, 1]
    assert [on_gpus.val_stage(step) for step in steps] == [1, 1, 2]
    tokens = jnp.asarray(sequences(c, c.val_T))
    w = ngram_rows(whole_weights(c), tokens[:, :-1], c)
    both = jax.jit(lambda last: train_gpt.loss_fn(w, tokens, {1: 1.0}, c, 1, last))
    narrow, wide = [float(whole_loss(whole_weights(c), tokens, {1: 1.0}, c, n)) for n in (1, 2)]
    assert [float(both(0)), float(both(1))] == pytest.approx([narrow, wide], rel=1e-6)
    assert abs(wide - narrow) > 1e-5 * narrow


# ---- Documents and bands -------------------------------------------------------------------------
@pytest.mark.parametrize("compute, error", [("float32", 2e-3), ("bfloat16", 0.02)])
def test_the_document_code_is_an_exact_mask(compute, error):
    """Up to 4,095 documents, of three tokens each; of them, these are the last ones."""
    T = 600
    c = dataclasses.replace(ONE, compute=compute)
    starts = np.arange(3 * 4095)[None] % 3 == 0
    q, k, v = jax.random.normal(jax.random.key(2), (3, 1, T, 2, 16)).astype(compute)
    pos = train_gpt.positions(jnp.asarray(starts), c, 0)
    rope = [x[-T:] for x in pos.rope[False]]

    def rotated(code):
        return [
            train_gpt.norm_rotate(x, *rope, code * codes[:, -T:])
            for x, codes in ((q, pos.doc_q), (k, pos.doc_k))
        ]

    by_code = train_gpt.attend(*rotated(1), v, T, pos.score_scale, c)
    i, j = np.indices((T, T))
    mask = (j <= i) & (i // 3 == j // 3)
    by_mask = jax.nn.dot_product_attention(*rotated(0), v, scale=pos.score_scale, mask=mask)
    difference = np.linalg.norm(np.float32(by_code) - np.float32(by_mask))
    assert difference < error * np.linalg.norm(np.float32(by_mask))


def gradients(function, arguments, cotangent):
    """The function's value, and the gradients of its arguments."""
    out, pull = jax.vjp(jax.jit(function), *arguments)
    return [np.asarray(x, np.float32) for x in (out, *pull(cotangent))]


@pytest.mark.parametrize("T, window", [(37, 0), (37, 5), (37, 100)])
def test_banded_attention_is_attention_with_a_mask(T, window, monkeypatch):
    """Values and gradients, for windows from 0 to beyond T. And the
    kernel of GPUs, in whose place is XLA's, sees the same tokens."""
    q, k, v, dy = jax.random.normal(jax.random.key(5), (4, 2, T, 3, 8))
    kernel = jax.nn.dot_product_attention

    def masked(q, k, v):
        i, j = np.indices((T, T))
        mask = (j <= i) & (i - j <= window)
        return kernel(q, k, v, scale=0.3, mask=mask)

    def xla_kernel(*qkv, **options):
        return kernel(*qkv, **options | {"implementation": "xla"})

    def on_gpus(q, k, v):
        return train_gpt.attend(q, k, v, window, 0.3, dataclasses.replace(MINI, attention="cudnn"))

    def banded(q, k, v):
        return train_gpt.band_attention(q, k, v, window, 0.3)

    expected = gradients(masked, (q, k, v), dy)
    monkeypatch.setattr(jax.nn, "dot_product_attention", xla_kernel)
    for function in (banded, on_gpus):
        for a, b in zip(gradients(function, (q, k, v), dy), expected, strict=True):
            np.testing.assert_allclose(a, b, atol=1e-6, rtol=1e-5)


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


# ---- Signs ---------------------------------------------------------------------------------------
def test_signs_are_balanced_and_differ():
    signs = np.asarray(train_gpt.random_signs(jnp.arange(8192)[None], RECORD)[0], np.float32)
    assert signs.shape == (8192, 768) and set(np.unique(signs)) == {-1, 1}
    few = np.r_[:300, 4000:4100, 8100:8192]
    products = signs[few] @ signs[few].T - 768 * np.eye(len(few))
    assert np.abs(products).max() < 6 * 768**0.5  # of any two rows, 120,000 pairs
    assert np.abs(signs.mean(axis=0)).max() < 5 / 8192**0.5  # of every channel
    assert abs((signs[:, 1:] * signs[:, :-1]).mean()) < 5 / signs.size**0.5  # of neighbours
