"""basics/muon.py runs, finds faults that people make, and its exercises have these answers."""

import re

import jax
import jax.numpy as jnp
import muon
import numpy as np
import pytest

from tests.tools import basic


def test_it_runs(tmp_path):
    done = basic(tmp_path, "muon")
    assert (done.returncode, done.stderr) == (0, ""), done.stderr
    assert done.stdout.count("ok   ") == 5 and "WRONG" not in done.stdout
    (loss,) = re.findall(r"AdamW, (\S+) with Muon", done.stdout)
    assert float(loss) < 2.19  # 2.144 here


def polar(G):
    U, _, Vt = np.linalg.svd(np.float64(G), full_matrices=False)
    return U @ Vt


@pytest.mark.parametrize("shape", [(64, 128), (128, 64)])
def test_two_updates_are_those_of_the_formula(shape):
    """Nesterov momentum of 0.95, U V^T of that, and a larger factor for tall matrices."""
    optimizer = muon.muon()
    mean = np.zeros(shape)
    state = optimizer.init(jnp.zeros(shape))
    for seed in 0, 1:
        G = np.random.default_rng(seed).normal(size=shape) + 3 * seed
        update, state = optimizer.update(jnp.float32(G), state)
        mean = 0.95 * mean + 0.05 * G
        exact = polar(0.95 * mean + 0.05 * G) * max(1, shape[0] / shape[1]) ** 0.5
        assert np.linalg.norm(update - exact) < 0.2 * np.linalg.norm(exact)
    np.testing.assert_allclose(state, mean, atol=1e-6)


def test_exercise_1_rows_that_are_orthogonalized_alone():
    """Each of 8 devices takes its rows for a whole matrix: no collective, and another update."""
    G = jax.random.normal(jax.random.key(0), (16, 64, 128))
    alone = muon.orthogonalize(G.reshape(16 * 8, 8, 128)).reshape(G.shape)
    whole = muon.orthogonalize(G)
    assert 0.3 < jnp.linalg.norm(alone - whole) / jnp.linalg.norm(whole) < 0.5


def test_exercise_2_as_many_steps_as_it_takes():
    """Newton and Schulz's cubic, 1.5 x - 0.5 x^3, has its fixed point at 1 and converges, slowly:
    a small singular value grows by 1.5 a step, where Jordan's quintic makes 3.4445 of it."""
    G = np.random.default_rng(0).normal(size=(24, 24))
    U, _, Vt = np.linalg.svd(G)
    G = jnp.float32(U * np.geomspace(1, 1e-2, 24) @ Vt)
    cubic = (1.5, -0.5, 0.0)

    def error(polynomials):
        return np.abs(muon.orthogonalize(G, polynomials) - polar(G)).max()

    assert error(5 * (cubic,)) > 0.2
    assert error(20 * (cubic,)) < 1e-4
    assert error(muon.JORDAN) < error(5 * (cubic,))
    # Jordan's stays between 0.68 and 1.13, however many steps it takes.
    assert error(4 * muon.JORDAN) > 0.05
