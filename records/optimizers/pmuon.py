"""PMuon: Muon of a momentum that is whitened on both sides. modded-nanogpt's track 3, 2026-05-07.

With the gradient G and its Nesterov momentum M:
    L <- .95 L + G G^T,   R <- .95 R + G^T G,   update = orthogonalize(L^-power M R^-power)
The eigenvectors of L and of R come from one step of orthogonal iteration an update: Q <- qr(L Q).
"""

import jax
import jax.numpy as jnp
import optax
from muon import orthogonalize
from train_gpt_simple import beside_adam, cooldown

SETTINGS = {"124m": dict(steps=3225, lr=0.035, decay=0.025)}


def optimizer(params, total_steps, lr=0.02, decay=0.05, power=0.3):
    """PMuon for the matrices of the blocks, AdamW for everything else."""
    pmuon = optax.chain(
        whitened_momentum(power),
        optax.stateless_with_tree_map(lambda update, _: orthogonalize(update)),
        optax.add_decayed_weights(decay),
        optax.scale_by_learning_rate(cooldown(lr, total_steps)),
    )
    return beside_adam(pmuon, params, total_steps)


def whitened_momentum(power):
    """L^-power M R^-power. State: momentum, and (L, Q of L), (R, Q of R) of every matrix."""
    trace = optax.trace(0.95, nesterov=True)

    def init(params):
        def side(length):
            return jnp.zeros((length, length)), jnp.eye(length)

        return trace.init(params), jax.tree.map(lambda p: [side(n) for n in p.shape], params)

    def update(grads, state, params=None):
        ahead, momentum = trace.update(grads, state[0])
        sides = jax.tree.map(
            lambda g, two: [new_side(g.T, two[0]), new_side(g, two[1])], grads, state[1]
        )

        def whiten(m, two):
            return inverse_power(*two[0], power) @ m @ inverse_power(*two[1], power)

        return jax.tree.map(whiten, ahead, sides), (momentum, sides)

    return optax.GradientTransformation(init, update)


def new_side(grad, side):
    """A new covariance of the columns of a gradient, and its eigenvectors."""
    covariance, q = side
    covariance = 0.95 * covariance + grad.T @ grad
    floored = covariance + 1e-15 * jnp.eye(len(q))
    return covariance, jnp.linalg.qr(floored @ q)[0]


def inverse_power(covariance, q, power):
    """Q D^-power Q^T, scaled to the norm of the unit matrix. D is the diagonal of Q^T C Q."""
    values = jnp.maximum(jnp.sum(q * (covariance @ q), axis=0), 1e-15) ** -power
    return (q * values) @ q.T * (len(q) ** 0.5 / jnp.linalg.norm(values))
