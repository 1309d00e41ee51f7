"""EMA-Nesterov around Muon: gradients of a point ahead of the weights. arXiv:2605.25395.

With X the weights, m a slow average of their changes, and U what Muon and Adam add to Y:
    Y = X + b m,   X' = Y + U(gradient in Y),   m <- g m + (1 - g) (X' - X)
b falls with the rate, and is zero in the first 16 % and the last 24 % of the run. m averages over
1 / (1 - g) steps, 3.2 % of the run, as upstream's 100 of 3,125. Y is trained, X is validated.
"""

import jax
import jax.numpy as jnp
import optax
from muon import orthogonalize
from train_gpt_simple import beside_adam, cooldown

SETTINGS = {
    "tiny": dict(steps=1620, lr=0.01, ahead=0.3),
    "124m": dict(steps=3125, lr=0.035, decay=0.025),
}


def optimizer(params, total_steps, lr=0.02, decay=0.05, ahead=0.6):
    """Muon for the matrices of the blocks, AdamW for everything else, EMA-Nesterov around both.
    `ahead` is b while the rate is full."""
    muon = optax.chain(
        optax.trace(0.95, nesterov=True),
        optax.stateless_with_tree_map(lambda update, _: orthogonalize(update)),
        optax.add_decayed_weights(decay),
        optax.scale_by_learning_rate(cooldown(lr, total_steps)),
    )
    return ema_nesterov(beside_adam(muon, params, total_steps), total_steps, ahead)


def ema_nesterov(inner, total_steps, ahead):
    """Moves the parameters ahead after every step of `inner`. State: steps, m, b m, inner's."""
    past = max(0.0, 1 - 1 / (0.032 * total_steps))

    def init(params):
        zeros = jax.tree.map(jnp.zeros_like, params)
        return jnp.zeros((), jnp.int32), zeros, zeros, inner.init(params)

    def update(grads, state, params):
        step, average, lead, inner_state = state
        updates, inner_state = inner.update(grads, inner_state, params)
        changes = jax.tree.map(jnp.add, lead, updates)  # X' - X = Y + U - X
        average = jax.tree.map(lambda m, x: past * m + (1 - past) * x, average, changes)
        done = (step + 1) / total_steps
        b = jnp.where((done > 0.16) & (done < 0.76), cooldown(ahead, total_steps)(step + 1), 0.0)
        lead = jax.tree.map(lambda m: b * m, average)
        return jax.tree.map(jnp.add, updates, lead), (step + 1, average, lead, inner_state)

    return optax.GradientTransformation(init, update)


def validated_params(params, state):
    """X, from Y and the state of ema_nesterov()."""
    return jax.tree.map(jnp.subtract, params, state[2])
