"""Muon^2: Adam's second moment before Muon's orthogonal matrix. arXiv:2604.09967.

    v <- b2 v + (1 - b2) G^2,   update = orthogonalize(M / (sqrt(v) + eps))
G is the gradient, M its Nesterov momentum. Bias correction would be a factor, without effect.
"""

import jax
import jax.numpy as jnp
import optax
from muon import orthogonalize
from train_gpt_simple import beside_adam, cooldown

SETTINGS = {
    "tiny": dict(steps=1175, lr=0.04, momentum=0.9),
    "124m": dict(steps=3325, lr=0.1, decay=0.0125),
}


def optimizer(params, total_steps, lr=0.02, decay=0.05, momentum=0.95):
    """Muon^2 for the matrices of the blocks, AdamW for everything else."""
    muon_squared = optax.chain(
        whitened_momentum(momentum, b2=0.95),
        optax.stateless_with_tree_map(lambda update, _: orthogonalize(update)),
        optax.add_decayed_weights(decay),
        optax.scale_by_learning_rate(cooldown(lr, total_steps)),
    )
    return beside_adam(muon_squared, params, total_steps)


def whitened_momentum(momentum, b2):
    """Nesterov's momentum, divided by the root of the average of squared gradients."""

    def init(params):
        zeros = jax.tree.map(jnp.zeros_like, params)
        return zeros, zeros

    def update(grads, state, params=None):
        average, squares = state
        average = jax.tree.map(lambda a, g: a + (1 - momentum) * (g - a), average, grads)
        squares = jax.tree.map(lambda s, g: b2 * s + (1 - b2) * g**2, squares, grads)
        ahead = jax.tree.map(lambda a, g: g + momentum * (a - g), average, grads)
        whitened = jax.tree.map(lambda a, s: a / (jnp.sqrt(s) + 1e-15), ahead, squares)
        return whitened, (average, squares)

    return optax.GradientTransformation(init, update)
