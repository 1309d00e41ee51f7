"""Shampoo for the matrices of the blocks, with the size of Adam's step. Gupta et al.,
arXiv:1802.09568; Anil et al., arXiv:2002.09018.

m = average of g (b1); L = average of g g^T, R = average of g^T g, v = average of g^2 (b2)
u = L^(-1/4) m R^(-1/4), computed from the L and R of every fifth step
update = -lr (u |m / sqrt(v)| / |u| + decay w), with the Frobenius norm | |
"""

import jax
import jax.numpy as jnp
import optax
from train_gpt_simple import beside_adam, cooldown

SETTINGS = {
    "tiny": dict(steps=1770, lr=0.01, decay=0.1, b2=0.9),
    "124m": dict(steps=4100, lr=0.0015, decay=0.2, b2=0.95),
}
EVERY = 5  # steps between roots


def optimizer(params, total_steps, lr=0.0025, decay=0.2, b2=0.95):
    """Shampoo for the matrices of the blocks, AdamW for everything else."""
    shampoo = optax.chain(
        scale_by_shampoo(0.9, b2),
        optax.add_decayed_weights(decay),
        optax.scale_by_learning_rate(cooldown(lr, total_steps)),
    )
    return beside_adam(shampoo, params, total_steps)


def scale_by_shampoo(b1, b2):
    """Shampoo's direction, as long as Adam's step. The state has an entry for every matrix."""
    adam = optax.scale_by_adam(b1, b2, eps=1e-15)

    def start(param):
        inputs, outputs = param.shape
        return {
            "left": jnp.zeros((inputs, inputs)),
            "right": jnp.zeros((outputs, outputs)),
            "left_root": jnp.eye(inputs),
            "right_root": jnp.eye(outputs),
        }

    def take_roots(pair):
        left_root = inverse_root(pair["left"])
        return pair | {"left_root": left_root, "right_root": inverse_root(pair["right"])}

    def init(params):
        return adam.init(params), jax.tree.map(start, params)

    def update(grads, state, params=None):
        adam_state, pairs = state
        is_time = adam_state.count % EVERY == 1  # not at 0: the first gradients may be zero
        lengths, adam_state = adam.update(grads, adam_state)

        def gather(g, pair):
            left = b2 * pair["left"] + (1 - b2) * g @ g.T
            right = b2 * pair["right"] + (1 - b2) * g.T @ g
            pair = pair | {"left": left, "right": right}
            return jax.lax.cond(is_time, take_roots, dict, pair)

        def direction(average, adam_step, pair):
            u = pair["left_root"] @ average @ pair["right_root"]
            return u * jnp.linalg.norm(adam_step) / (jnp.linalg.norm(u) + 1e-30)

        pairs = jax.tree.map(gather, grads, pairs)
        return jax.tree.map(direction, adam_state.mu, lengths, pairs), (adam_state, pairs)

    return optax.GradientTransformation(init, update)


def inverse_root(matrix):
    """matrix^(-1/4) of a positive semidefinite matrix, but for a factor. Eigenvalues below a
    millionth of the largest are noise in float32: they count as that."""
    scaled = matrix / (jnp.trace(matrix) + 1e-30)
    values, vectors = jnp.linalg.eigh(scaled)
    floor = 1e-6 * values[-1] + 1e-20
    return vectors * jnp.maximum(values, floor) ** -0.25 @ vectors.T
