"""The head and its loss against float64, in float32 and in the record's FP8."""

import dataclasses

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import train_gpt
from tests.tools import FLOAT32, MINI

N, D, V, T = 64, 32, 128, 16  # four sequences of 16 tokens
FP8 = dataclasses.replace(MINI, D=D, T=T, batch=1, head_chunk=16, g_scale=2.0**19)
F32 = dataclasses.replace(FP8, **FLOAT32)


def operands(dtype: str, seed: int = 0):
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(N, D))
    x /= np.sqrt(np.mean(x**2, axis=-1, keepdims=True))  # as it leaves the last norm
    w = 0.3 * rng.normal(size=(V, D))
    return jnp.asarray(x, dtype), jnp.asarray(w, "float32"), rng.integers(0, V, N).astype(np.int32)


def reference(x, w, targets):
    """Loss, dx and dw in float64: 30 sigmoid(z / 7.5), cross-entropy over the tokens of a batch."""
    x, w = np.asarray(x, np.float64), np.asarray(w, np.float64)
    s = 1 / (1 + np.exp(-(x @ w.T) / 7.5))
    p = np.exp(30 * s)
    p /= p.sum(axis=1, keepdims=True)
    picked = np.arange(len(x)), targets
    loss = -np.log(p[picked]).sum() / T
    p[picked] -= 1
    dz = p * 30 / 7.5 * s * (1 - s) / T
    return loss, dz @ w, dz.T @ x


def ours(x, w, targets, c):
    function = jax.value_and_grad(train_gpt.head_loss, argnums=(0, 1))
    loss, (dx, dw) = jax.jit(function, static_argnums=3)(x, w, targets, c)
    assert dx.dtype == x.dtype and dw.dtype == jnp.float32
    return float(loss), np.asarray(dx, np.float64), np.asarray(dw, np.float64)


def relative(a, b):
    return np.linalg.norm(a - b) / np.linalg.norm(b)


def test_float32_head_is_the_formula():
    x, w, targets = operands("float32")
    for got, expected in zip(ours(x, w, targets, F32), reference(x, w, targets), strict=True):
        assert relative(got, expected) < 1e-5


def test_fp8_head_is_the_formula_to_the_precision_of_its_formats():
    """e4m3 keeps 3 bits of a mantissa and e5m2 two: errors of 2^-4 and 2^-3 an entry, at most,
    average out; the value in bfloat16 keeps 8."""
    x, w, targets = operands("bfloat16")
    loss, dx, dw = ours(x, w, targets, FP8)
    exact = reference(x, w, targets)
    assert loss == pytest.approx(exact[0], rel=2e-3)
    assert 1e-3 < relative(dx, exact[1]) < 0.07
    assert 1e-3 < relative(dw, exact[2]) < 0.07


def test_fp8_forward_is_exact_on_numbers_that_fp8_can_hold():
    x, w, targets = operands("float32")
    to8 = lambda a, s: (np.asarray(a) * s).astype(ml_dtypes.float8_e4m3fn).astype(np.float32) / s
    x, w = to8(x, FP8.x_scale), to8(w.clip(-0.8, 0.8), FP8.w_scale)
    c = dataclasses.replace(FP8, compute="float32")
    assert ours(x, w, targets, c)[0] == pytest.approx(reference(x, w, targets)[0], rel=1e-6)


@pytest.mark.parametrize("c", [F32, FP8], ids=["float32", "fp8"])
@pytest.mark.parametrize("chunk", [4, 32, 64])
def test_chunks_change_nothing(c, chunk):
    x, w, targets = operands(c.compute)
    one, other = (
        ours(x, w, targets, c),
        ours(x, w, targets, dataclasses.replace(c, head_chunk=chunk)),
    )
    for a, b in zip(one, other, strict=True):
        assert relative(a, b) < 1e-6


def test_numbers_beyond_fp8_are_clipped():
    """A cast alone would make e4m3 NaN above 464 and e5m2 infinite."""
    x, w, targets = operands("bfloat16")
    loss, dx, dw = ours(1e4 * x, 1e4 * w, targets, dataclasses.replace(FP8, g_scale=2.0**40))
    assert np.isfinite([loss, np.abs(dx).max(), np.abs(dw).max()]).all()
    for dtype in ("float8_e4m3fn", "float8_e5m2", "bfloat16", "float32"):
        ends = np.asarray(train_gpt.quantize(jnp.array([-3e38, 3e38]), 2.0, dtype), np.float64)
        limit = float(jnp.finfo(dtype).max)
        np.testing.assert_array_equal(ends, [-limit, limit])


def test_scales_cancel():
    """Powers of two: in a format wide enough for all of them they change no bit."""
    x, w, targets = operands("float32")
    scaled = dataclasses.replace(F32, x_scale=1.0, w_scale=4.0, g_scale=0.5)
    for a, b in zip(ours(x, w, targets, F32), ours(x, w, targets, scaled), strict=True):
        np.testing.assert_array_equal(a, b)


def test_validation_computes_no_gradient():
    """The compiler drops what nobody asks for: no product but that of the logits is left."""
    x, w, targets = operands("bfloat16")
    loss = jax.jit(train_gpt.head_loss, static_argnums=3)
    text = loss.lower(x, w, targets, F32).compile().as_text()
    both = jax.jit(jax.grad(train_gpt.head_loss, argnums=(0, 1)), static_argnums=3)
    products = [
        t.count(" dot(") for t in (text, both.lower(x, w, targets, F32).compile().as_text())
    ]
    assert products[0] < products[1], products
