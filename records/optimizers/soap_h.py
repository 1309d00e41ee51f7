"""SOAP, Adam in the eigenvectors of Shampoo's matrices, on a sphere. Vyas et al., ICLR 2025,
arXiv:2409.11321; the sphere ("hyperball") as on upstream's board.

m = average of g (b1); L = average of g g^T, R = average of g^T g (b2)
P, Q = eigenvectors of L and R: a step of power iteration from the last ones, and QR
v = average of (P^T g Q)^2 (b2); u = P ((P^T m Q) / sqrt(v)) Q^T
w = w - lr |w| u / |u|, scaled back to its first norm; no decay. | | is the Frobenius norm.
"""

import jax
import jax.numpy as jnp
import optax
from muonh import hyperball, initial_value  # noqa: F401 - it replaces the plain one
from train_gpt_simple import beside_adam, cooldown

SETTINGS = {
    "tiny": dict(steps=1395, lr=0.036, b1=0.9, b2=0.8),
    "124m": dict(steps=3125, lr=0.018, b1=0.95, b2=0.9),
}


def optimizer(params, total_steps, lr=0.018, b1=0.95, b2=0.9):
    """SOAP on a sphere for the matrices of the blocks, AdamW for everything else. The rate falls
    from the first step on."""

    def advance(g, s):
        P = s["P"]
        Q = s["Q"]
        m = b1 * s["m"] + (1 - b1) * g
        v = b2 * s["v"] + (1 - b2) * (P.T @ g @ Q) ** 2
        L = b2 * s["L"] + (1 - b2) * g @ g.T
        R = b2 * s["R"] + (1 - b2) * g.T @ g
        new = {"m": m, "v": v, "L": L, "R": R}
        return new | {"P": jnp.linalg.qr(L @ P)[0], "Q": jnp.linalg.qr(R @ Q)[0]}

    sphere = hyperball(cooldown(lr, total_steps, start=0.0))
    return beside_adam(optax.chain(rotated(start, advance), sphere), params, total_steps)


def start(param):
    """The state of a matrix before the first step."""
    inputs, outputs = param.shape
    return {
        "m": jnp.zeros_like(param),
        "v": jnp.zeros_like(param),
        "L": jnp.zeros((inputs, inputs)),
        "R": jnp.zeros((outputs, outputs)),
        "P": jnp.eye(inputs),
        "Q": jnp.eye(outputs),
    }


def rotated(start, advance):
    """u, with the m and v of this step, and the P and Q of the last one. advance(g, state) is the
    next state of a matrix."""

    def direction(new, old):
        P = old["P"]
        Q = old["Q"]
        return P @ (P.T @ new["m"] @ Q / (jnp.sqrt(new["v"]) + 1e-12)) @ Q.T

    def init(params):
        return jax.tree.map(start, params)

    def update(grads, state, params=None):
        new = jax.tree.map(advance, grads, state)
        return jax.tree.map(lambda _, s, old: direction(s, old), grads, new, state), new

    return optax.GradientTransformation(init, update)
