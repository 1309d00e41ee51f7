"""Anvil around Muon: a second, slow momentum. modded-nanogpt's record 92, 2026.

With the gradient G, a fast average F and a slow one S, of which late in the run F forgets faster:
    F <- b F + (1 - b) G,   S <- .98 S + .02 G,   M = w F + (1 - w) S
    U = orthogonalize(G + momentum (M - G)),   W <- W - rate (U + decay W [S W >= 0])
In the first 43 % of the run b = momentum and w = 1, after that b = .85 and w = .4385. The record
also has NorMuon's rates for neurons and other polynomials.
"""

import jax
import jax.numpy as jnp
import optax
from muon import orthogonalize
from train_gpt_simple import beside_adam, cooldown

# Upstream has no run of this technique alone: Muon's numbers.
SETTINGS = {
    "tiny": dict(steps=1290, lr=0.02, decay=0.025, momentum=0.9),
    "124m": dict(steps=3250, lr=0.025, decay=0.05),
}


def optimizer(params, total_steps, lr=0.02, decay=0.1, momentum=0.95):
    """Anvil for the matrices of the blocks, AdamW for everything else."""
    matrices = optax.chain(
        anvil(total_steps, decay, momentum),
        optax.scale_by_learning_rate(cooldown(lr, total_steps)),
    )
    return beside_adam(matrices, params, total_steps)


def anvil(total_steps, decay, momentum):
    """Updates by two momenta, and decay where the slow one shrinks a weight. State: steps, F, S."""

    def init(params):
        zeros = jax.tree.map(jnp.zeros_like, params)
        return jnp.zeros((), jnp.int32), zeros, zeros

    def update(grads, state, params):
        step, fast, slow = state
        is_late = step >= 0.43 * total_steps
        b = jnp.where(is_late, 0.85, momentum)
        w = jnp.where(is_late, 0.4385, 1.0)
        fast = jax.tree.map(lambda f, g: b * f + (1 - b) * g, fast, grads)
        slow = jax.tree.map(lambda s, g: 0.98 * s + 0.02 * g, slow, grads)

        def matrix_update(grad, fast, slow, param):
            mixed = w * fast + (1 - w) * slow
            u = orthogonalize(grad + momentum * (mixed - grad))
            return u + decay * jnp.where(slow * param >= 0, param, 0.0)

        return jax.tree.map(matrix_update, grads, fast, slow, params), (step + 1, fast, slow)

    return optax.GradientTransformation(init, update)
