"""basics/fp8.py runs, finds faults that people make, and its exercises have these answers."""

import fp8
import jax
import jax.numpy as jnp
import numpy as np

from tests.tools import basic


def test_it_runs(tmp_path):
    done = basic(tmp_path, "fp8")
    assert (done.returncode, done.stderr) == (0, ""), done.stderr
    assert done.stdout.count("ok   ") == 11 and "WRONG" not in done.stdout


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


def test_exercise_2_the_gradient_in_e4m3():
    """It is twice as fine, where the scale fits: with so few tokens, no gradient is too small."""
    x, w, targets = rows()
    exact = jax.grad(lambda x, w: fp8.loss_fn(x @ w.T, targets), (0, 1))(x, w)

    def errors(dtype, scales):
        """Of dx and dw."""
        _, gradients = fp8.run(x, w, targets, scales, fp8.Formats(gradient=dtype))
        return [fp8.error(a, np.asarray(b)) for a, b in zip(gradients, exact, strict=True)]

    assert max(errors(fp8.E4M3, fp8.SCALES)) < 0.045
    assert min(errors(fp8.E5M2, fp8.SCALES)) > 0.06
    # With a scale that fits neither, the wider format loses less.
    small = fp8.SCALES | dict(g=fp8.SCALES["g"] / 2**19)
    assert errors(fp8.E4M3, small)[1] > 0.9
    assert errors(fp8.E5M2, small)[1] < 0.2
