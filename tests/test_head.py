"""The head and its loss against float64, in float32 and in the record's FP8."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import train_gpt
from tests.tools import FLOAT32, MINI

N = 64  # tokens
D = 32
V = 128
SHARES = np.float32([1.0, 0.5, 0.25])
FP8 = dataclasses.replace(MINI, D=D, pointer=0, head_chunk=16, g_scale=2.0**12)
F32 = dataclasses.replace(FP8, **FLOAT32)


def operands(dtype: str, seed: int = 0):
    """x (N, D), w (V, D), targets (N, 3) and their shares; -1 is no target."""
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(N, D))
    x /= np.sqrt(np.mean(x**2, axis=-1, keepdims=True))  # as it leaves the last norm
    w = 0.3 * rng.normal(size=(V, D))
    targets = rng.integers(0, V, (N, 3)).astype(np.int32)
    targets[:9, 1] = -1
    targets[5:20, 2] = -1
    targets[20:25, 1] = targets[20:25, 0]  # one token may be two targets
    return jnp.asarray(x, dtype), jnp.asarray(w, "float32"), targets, SHARES


def reference(x, w, targets, shares):
    """Loss, dx and dw in float64: 23 sigmoid((z + 5) / 7.5), cross-entropy to each target."""
    x, w = np.asarray(x, np.float64), np.asarray(w, np.float64)
    s = 1 / (1 + np.exp(-(x @ w.T + 5) / 7.5))
    p = np.exp(23 * s)
    p /= p.sum(axis=1, keepdims=True)
    loss = 0.0
    ds = np.zeros_like(p)
    for n, k in zip(*np.nonzero(targets >= 0), strict=True):
        loss -= shares[k] * np.log(p[n, targets[n, k]])
        ds[n] += shares[k] * p[n]
        ds[n, targets[n, k]] -= shares[k]
    dz = ds * 23 / 7.5 * s * (1 - s)
    return loss, dz @ w, dz.T @ x


def ours(x, w, targets, shares, c):
    """Loss, dx and dw of head_loss(), as a third of thrice the loss."""

    def thrice(x, w):
        return 3 * train_gpt.head_loss(x, w, targets, shares, None, c)

    loss, (dx, dw) = jax.jit(jax.value_and_grad(thrice, (0, 1)))(x, w)
    assert dx.dtype == x.dtype and dw.dtype == jnp.float32
    return float(loss) / 3, np.asarray(dx, np.float64) / 3, np.asarray(dw, np.float64) / 3


def relative(a, b):
    return np.linalg.norm(a - b) / np.linalg.norm(b)


def test_float32_head_is_the_formula():
    given = operands("float32")
    for got, expected in zip(ours(*given, F32), reference(*given), strict=True):
        assert relative(got, expected) < 1e-5


def test_fp8_head_is_the_formula_to_the_precision_of_its_formats():
    """e4m3 has 3 bits of mantissa and e5m2 has 2: the errors of entries, at most 2^-4 and 2^-3,
    average out. The loss is computed in bfloat16, which has 8."""
    given = operands("bfloat16")
    loss, dx, dw = ours(*given, FP8)
    exact = reference(*given)
    assert loss == pytest.approx(exact[0], rel=2e-3)
    assert 1e-3 < relative(dx, exact[1]) < 0.07
    assert 1e-3 < relative(dw, exact[2]) < 0.07


def test_numbers_beyond_fp8_are_clipped():
    """A cast alone would make e4m3 NaN above 464 and e5m2 infinite."""
    x, w, *rest = operands("bfloat16")
    loss, dx, dw = ours(1e4 * x, 1e4 * w, *rest, dataclasses.replace(FP8, g_scale=2.0**40))
    assert np.isfinite([loss, np.abs(dx).max(), np.abs(dw).max()]).all()
    for dtype in ("float8_e4m3fn", "float8_e5m2", "bfloat16", "float32"):
        ends = np.asarray(train_gpt.quantize(jnp.array([-3e38, 3e38]), 2.0, dtype), np.float64)
        limit = float(jnp.finfo(dtype).max)
        np.testing.assert_array_equal(ends, [-limit, limit])


@pytest.mark.parametrize("c", [train_gpt.PRESETS["record"], train_gpt.PRESETS["tiny"]])
def test_the_gradient_of_the_logits_fits_its_format(c):
    """It is at most the sum of the weights of a token's targets, times 23 / 7.5 / 4, the largest
    slope of the soft cap."""
    sums = []
    for stage in c.stages:
        sums.append(sum(max(ends) for ends in train_gpt.target_weights(stage).values()))
    largest = 23 / 7.5 / 4 * max(sums) / c.batch
    assert largest * c.g_scale * c.batch < float(jnp.finfo(c.head_backward).max)
