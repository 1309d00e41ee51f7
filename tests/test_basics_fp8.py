"""The exercises of basics/fp8.py have these answers."""

import fp8
import jax.numpy as jnp
import numpy as np


def rows(seed: int = 0, size: int = fp8.SIZE):
    rng = np.random.default_rng(seed)
    x, w = rng.normal(size=(2, size, size)).astype("f4")
    return x, 0.02 * w, rng.integers(size, size=size)


def test_exercise_1_a_scale_that_each_tensor_sets_itself():
    """The largest power of two that keeps all numbers in the format, whatever their size."""

    def scale_of(x, dtype):
        return 2.0 ** jnp.floor(jnp.log2(float(jnp.finfo(dtype).max) / jnp.abs(x).max()))

    for seed, factor in ((0, 1.0), (1, 1e-6), (2, 3e5)):
        x, w, targets = rows(seed)
        scale = scale_of(factor * x, fp8.E4M3)
        assert 224 < np.abs(factor * x).max() * scale <= 448
        eight_bits = fp8.quantize(factor * x, scale, fp8.E4M3, clip=False)
        assert 0.025 < fp8.error(eight_bits.astype(jnp.float32) / scale, factor * x) < 0.028
    scales = dict(x=scale_of(x, fp8.E4M3), w=scale_of(w, fp8.E4M3), g=fp8.SCALES["g"])
    (_, z), _ = fp8.run(x, w, targets, scales, fp8.FP8)
    assert fp8.error(z, x @ w.T) < 0.045
