"""The update of basics/muon.py is that of the formula."""

import jax.numpy as jnp
import muon
import numpy as np


def polar(G):
    U, _, Vt = np.linalg.svd(np.float64(G), full_matrices=False)
    return U @ Vt


def test_two_updates_are_those_of_the_formula():
    """Nesterov momentum of 0.95, U V^T of that, and a larger factor for tall matrices."""
    shape = 128, 64
    optimizer = muon.muon()
    mean = np.zeros(shape)
    state = optimizer.init(jnp.zeros(shape))
    for seed in 0, 1:
        G = np.random.default_rng(seed).normal(size=shape) + 3 * seed
        update, state = optimizer.update(jnp.float32(G), state)
        mean = 0.95 * mean + 0.05 * G
        exact = polar(0.95 * mean + 0.05 * G) * 2**0.5
        assert np.linalg.norm(update - exact) < 0.2 * np.linalg.norm(exact)
    np.testing.assert_allclose(state, mean, atol=1e-6)
