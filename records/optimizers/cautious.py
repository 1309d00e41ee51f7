"""Muon with cautious decay: only weights that the update shrinks as well decay. Chen et al. 2025,
arXiv:2510.12402.

    W <- W - rate (U + decay W [U W > 0]),   U Muon's update
"""

import jax.numpy as jnp
import optax
from muon import orthogonalize
from train_gpt_simple import beside_adam, cooldown

# Upstream has no run of this technique alone: Muon's numbers.
SETTINGS = {
    "tiny": dict(steps=1340, lr=0.02, momentum=0.9),
    "124m": dict(steps=3250, lr=0.025, decay=0.05),
}


def optimizer(params, total_steps, lr=0.02, decay=0.1, momentum=0.95):
    """Muon with cautious decay for the matrices of the blocks, AdamW for everything else."""
    muon = optax.chain(
        optax.trace(momentum, nesterov=True),
        optax.stateless_with_tree_map(lambda update, _: orthogonalize(update)),
        optax.stateless_with_tree_map(lambda u, w: u + decay * jnp.where(u * w > 0, w, 0.0)),
        optax.scale_by_learning_rate(cooldown(lr, total_steps)),
    )
    return beside_adam(muon, params, total_steps)
