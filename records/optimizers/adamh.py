"""AdamH: Adam on a sphere. Wen et al. 2026, "Hyperball optimization", arXiv:2606.16899.

A step goes along Adam's direction U. After it, the weight is scaled back to its first norm R:
    V = W - rate R U / |U|,   W <- R V / |V|
There is no decay. The rate is the angle of a step, in radians.
"""

import optax
from muonh import hyperball, initial_value  # noqa: F401 - it replaces the plain one
from train_gpt_simple import beside_adam, cooldown

SETTINGS = {"tiny": dict(steps=2685, lr=0.01, b1=0.95, b2=0.9), "124m": dict(steps=4875, lr=0.018)}


def optimizer(params, total_steps, lr=0.01, b1=0.9, b2=0.95):
    """AdamH for the matrices of the blocks, AdamW for everything else."""
    adamh = optax.chain(
        optax.scale_by_adam(b1, b2, eps=1e-15),
        hyperball(cooldown(lr, total_steps, start=0.0, warmup=0.05)),
    )
    return beside_adam(adamh, params, total_steps)
