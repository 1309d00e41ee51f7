"""MuonH: Muon on a sphere. Wen et al. 2026, "Hyperball optimization", arXiv:2606.16899.

A step goes along Muon's orthogonal matrix. After it, the weight is scaled back to its first norm R:
    V = W - rate R U / |U|,   W <- R V / |V|
There is no decay. The rate is the angle of a step, in radians.
"""

import jax
import jax.numpy as jnp
import optax
from muon import orthogonalize
from train_gpt_simple import beside_adam, cooldown

SETTINGS = {
    "tiny": dict(steps=1730, lr=0.02, momentum=0.9, start=0.6),
    "124m": dict(steps=3325, lr=0.018),
}


def optimizer(params, total_steps, lr=0.02, momentum=0.95, start=0.0):
    """MuonH for the matrices of the blocks, AdamW for everything else. The rate of MuonH falls from
    the fraction `start` of the run on."""
    muonh = optax.chain(
        optax.trace(momentum, nesterov=True),
        optax.stateless_with_tree_map(lambda update, _: orthogonalize(update)),
        hyperball(cooldown(lr, total_steps, start)),
    )
    return beside_adam(muonh, params, total_steps)


def initial_value(name, shape, key):
    """A parameter before the first step. A matrix of zeros has no norm to keep, so the projections
    of the blocks begin at random as well; factors are those of upstream's hyperball runs."""
    if name.endswith("gains"):
        return jnp.ones(shape)
    if name.endswith("bias") or name == "proj.weight":
        return jnp.zeros(shape)
    factors = {"attn.proj.weight": 1.25, "mlp.proj.weight": 3.0, "mlp.fc.weight": 1.5}
    factor = factors.get(name.split(".", 2)[-1], 1.0)
    deviation = 1.0 if name == "embed.weight" else factor * (0.33 / shape[0]) ** 0.5
    return deviation * jax.random.normal(key, shape)


def hyperball(rate):
    """Steps along a direction U that leave the Frobenius norm of a matrix W at its first value R:
    W <- R V / |V|, V = W - rate R U / |U|."""

    def init(params):
        return jnp.zeros((), jnp.int32), jax.tree.map(jnp.linalg.norm, params)

    def update(directions, state, params):
        step, radii = state

        def change(direction, radius, param):
            length = jnp.maximum(jnp.linalg.norm(direction), 1e-15)
            moved = param - rate(step) * radius * direction / length
            return radius * moved / jnp.maximum(jnp.linalg.norm(moved), 1e-15) - param

        return jax.tree.map(change, directions, radii, params), (step + 1, radii)

    return optax.GradientTransformation(init, update)
