"""NorMuon: Muon with a rate for every neuron. Li et al. 2025, arXiv:2510.05491.

With Muon's update O, and for every neuron the running average v of its mean square:
    v <- b2 v + (1 - b2) mean(O^2),   update = |O| / |O'| O',   O' = O / sqrt(v)
Of an orthogonal matrix, the vectors along the longer side have equal norms, so that v is for those
along the shorter side: columns (outputs) if there are at least as many as rows.
"""

import jax
import jax.numpy as jnp
import optax
from muon import orthogonalize
from train_gpt_simple import beside_adam, cooldown

SETTINGS = {
    "tiny": dict(steps=1160, lr=0.02, decay=0.0125, momentum=0.9),
    "124m": dict(steps=3250, lr=0.035, decay=0.025),
}


def optimizer(params, total_steps, lr=0.02, decay=0.05, momentum=0.95):
    """NorMuon for the matrices of the blocks, AdamW for everything else."""
    normuon = optax.chain(
        optax.trace(momentum, nesterov=True),
        optax.stateless_with_tree_map(lambda update, _: orthogonalize(update)),
        normalize_neurons(b2=0.95),
        optax.add_decayed_weights(decay),
        optax.scale_by_learning_rate(cooldown(lr, total_steps)),
    )
    return beside_adam(normuon, params, total_steps)


def normalize_neurons(b2):
    """Divides every neuron's updates by the root mean square of its recent ones, and leaves the
    Frobenius norm of the matrix as it is."""

    def mean_square(x):
        axis = 0 if x.shape[1] >= x.shape[0] else 1
        return jnp.mean(x**2, axis=axis, keepdims=True)

    def init(params):
        return jax.tree.map(lambda p: jnp.zeros_like(mean_square(p)), params)

    def normalize(x, square):
        y = x * jax.lax.rsqrt(jnp.maximum(square, 1e-10))
        return y * (jnp.linalg.norm(x) / jnp.maximum(jnp.linalg.norm(y), 1e-10))

    def update(updates, squares, params=None):
        squares = jax.tree.map(lambda s, x: b2 * s + (1 - b2) * mean_square(x), squares, updates)
        return jax.tree.map(normalize, updates, squares), squares

    return optax.GradientTransformation(init, update)
