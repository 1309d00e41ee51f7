"""basics/attention.py runs, finds faults that people make, and its exercises have these answers."""

from functools import partial

import attention
import jax
import jax.numpy as jnp
import numpy as np

from tests.tools import basic


def test_it_runs(tmp_path):
    run = basic(tmp_path, "attention", "--draw", "attention.svg")
    assert run.returncode == 0 and run.stderr == "", run.stderr
    assert run.stdout.count("ok   ") == 12 and "WRONG" not in run.stdout
    assert (tmp_path / "attention.svg").stat().st_size < 80_000


def test_exercise_1_seven_layers_of_window_8_reach_the_first_of_48_tokens():
    """A layer reaches 7 tokens further back: token 47 sees 40, with 6 layers 5, with 7 layers 0."""
    window = partial(attention.attend, window=8)
    first = []
    for depth in 1, 6, 7:
        sizes, _ = attention.jacobian(window, depth)
        first.append(np.flatnonzero(sizes[-1])[0])
    assert first == [40, 5, 0]


def test_exercise_2_bands_of_half_a_window_need_three_quarters_of_the_scores():
    """A half band sees itself and the two before it: 1.5 windows for each token, not 2."""
    counts = []

    def halves(q, k, v, window):
        W = window // 2
        band = lambda x: x.reshape(-1, W, *x.shape[1:])
        three = lambda x: jnp.concatenate([jnp.roll(band(x), r, axis=0) for r in (2, 1, 0)], axis=1)
        n, i, j = np.ogrid[: len(q) // W, :W, : 3 * W]
        mask = (i < j) & (j <= i + window) & (j >= (2 - n) * W)
        counts.append(mask.size)
        return jax.vmap(attention.plain)(band(q), three(k), three(v), mask).reshape(v.shape)

    expected_sizes, expected = attention.jacobian(partial(attention.banded, window=8))
    sizes, out = attention.jacobian(partial(halves, window=8))
    assert np.allclose(out, expected, atol=1e-5)
    assert np.array_equal(sizes > 0, expected_sizes > 0)
    assert counts[0] == 1.5 * 8 * attention.T
