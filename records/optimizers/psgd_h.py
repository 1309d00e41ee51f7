"""PSGD with a Kronecker-factored whitening matrix, on a sphere. Li, arXiv:2402.04553; the sphere
("hyperball") as on upstream's board.

m = average of g (b1), divided by 1 - b1^step; P and Q are upper triangular, z is normal noise
A = P m Q^T, B = P^-T z Q^-1
P = P - fit / |A A^T + B B^T| triu(A A^T - B B^T) P, with the spectral norm | |
Q = Q - fit / |A^T A + B^T B| triu(A^T A - B^T B) Q
u = P^T P m Q^T Q: A becomes white as P and Q fit
w = w - lr |w| u / |u|, scaled back to its first norm; no decay. Here | | is the Frobenius norm.
"""

import jax
import jax.numpy as jnp
import optax
from muonh import hyperball, initial_value  # noqa: F401 - it replaces the plain one
from train_gpt_simple import beside_adam, cooldown

SETTINGS = {
    "tiny": dict(steps=1100, lr=0.025, b1=0.9),
    "124m": dict(steps=3375, lr=0.025, b1=0.95, fit=1.0),
}


def optimizer(params, total_steps, lr=0.025, b1=0.95, fit=1.0):
    """PSGD on a sphere for the matrices of the blocks, AdamW for everything else. The rate falls
    from the first step on. fit: rate of P and Q, 1 at most."""
    psgd = optax.chain(scale_by_psgd(b1, fit), hyperball(cooldown(lr, total_steps, start=0.0)))
    return beside_adam(psgd, params, total_steps)


def scale_by_psgd(b1, fit):
    """u. The state has an entry for every matrix. P and Q begin at 10 because an entry of a
    gradient is about 1 / 10^4."""

    def start(param):
        inputs, outputs = param.shape
        return {"m": jnp.zeros_like(param), "P": 10 * jnp.eye(inputs), "Q": 10 * jnp.eye(outputs)}

    def advance(g, s, step, key):
        m = s["m"] + (1 - b1) * (g - s["m"])
        balance = jnp.sqrt(jnp.max(jnp.abs(s["Q"])) / jnp.max(jnp.abs(s["P"])))
        P = s["P"] * balance
        Q = s["Q"] / balance
        A = P @ (m / (1 - b1 ** (step + 1))) @ Q.T
        solve = jax.lax.linalg.triangular_solve
        B = solve(P, jax.random.normal(key, g.shape), left_side=True, transpose_a=True)
        B = solve(Q, B)
        return {"m": m, "P": fitted(P, A @ A.T, B @ B.T), "Q": fitted(Q, A.T @ A, B.T @ B)}

    def fitted(P, AA, BB):
        return P - fit / (spectral_norm(AA + BB) + 1e-30) * jnp.triu(AA - BB) @ P

    def direction(s):
        return s["P"].T @ (s["P"] @ s["m"] @ s["Q"].T) @ s["Q"]

    def init(params):
        return jnp.zeros((), jnp.int32), jax.tree.map(start, params)

    def update(grads, state, params=None):
        step, factors = state
        leaves, structure = jax.tree.flatten(grads)
        keys = jax.random.split(jax.random.fold_in(jax.random.key(0), step), len(leaves))
        keys = jax.tree.unflatten(structure, list(keys))
        factors = jax.tree.map(lambda g, s, key: advance(g, s, step, key), grads, factors, keys)
        return jax.tree.map(lambda _, s: direction(s), grads, factors), (step + 1, factors)

    return optax.GradientTransformation(init, update)


def spectral_norm(matrix):
    """Of a positive semidefinite matrix, from below: two steps of power iteration from its longest
    column."""
    scaled = matrix / (jnp.max(jnp.abs(matrix)) + 1e-30)
    x = scaled[:, jnp.argmax(jnp.sum(scaled**2, axis=0))]
    for _ in range(2):
        x = scaled @ (x / (jnp.linalg.norm(x) + 1e-30))
    return jnp.linalg.norm(x) * jnp.max(jnp.abs(matrix))
