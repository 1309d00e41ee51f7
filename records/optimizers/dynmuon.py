"""DynMuon: Muon that raises singular values to a changing power, not to 0. arXiv:2605.17109.

With the momentum M = U S V^T, the update is about U S^p V^T. p falls from `power` to -power around
4 % of the run. With X = M / |M|, A = X X^T and d = p / 2, S^p is a Taylor polynomial of A around I:
    update = |M|^p (I + d (A - I) + d (d - 1) / 2 (A - I)^2) orthogonalize(M)
    p = power tanh((.04 - step / steps) / .08)
"""

import jax
import jax.numpy as jnp
import optax
from train_gpt_simple import beside_adam, cooldown

SETTINGS = {
    "tiny": dict(steps=1560, lr=0.01, decay=0.0125),
    "124m": dict(steps=3175, lr=0.02, decay=0.025),
}


def optimizer(params, total_steps, lr=0.02, decay=0.05, power=0.25):
    """DynMuon for the matrices of the blocks, AdamW for everything else."""

    def power_at(step):
        return power * jnp.tanh((0.04 - step / total_steps) / 0.08)

    dynmuon = optax.chain(
        optax.trace(0.95, nesterov=True),
        take_power(power_at),
        optax.add_decayed_weights(decay),
        optax.scale_by_learning_rate(cooldown(lr, total_steps)),
    )
    return beside_adam(dynmuon, params, total_steps)


def take_power(power_at):
    """Raises singular values to a power that depends on the step. State: the step."""

    def init(params):
        return jnp.zeros((), jnp.int32)

    def update(updates, step, params=None):
        p = power_at(step)
        return jax.tree.map(lambda m: powered(m, p), updates), step + 1

    return optax.GradientTransformation(init, update)


def powered(update, p):
    """About U S^p V^T of an update U S V^T, scaled up if it has more columns than rows."""
    inputs, outputs = update.shape
    m = update.T if inputs > outputs else update
    length = jnp.linalg.norm(m) + 1e-7
    x = m / length
    tilt = x @ x.T - jnp.eye(len(x))
    for _ in range(12):
        gram = x @ x.T
        x = 2 * x + (-1.5 * gram + 0.5 * gram @ gram) @ x
    d = p / 2
    x = length**p * (x + d * tilt @ x + d * (d - 1) / 2 * tilt @ (tilt @ x))
    x = x.T if inputs > outputs else x
    return x * max(1, outputs / inputs) ** 0.5
