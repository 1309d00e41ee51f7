"""Spectral descent: Muon without momentum. Carlson et al. 2015, "Preconditioned spectral descent
for deep learning". The update is the orthogonal matrix U V^T nearest to the gradient U S V^T: the
steepest descent under the spectral norm.
"""

import optax
from muon import orthogonalize
from train_gpt_simple import beside_adam, cooldown

SETTINGS = {
    "tiny": dict(steps=1800, lr=0.08, decay=0.0125, start=0.0),
    "124m": dict(steps=8225, lr=0.03, decay=0.015),
}


def optimizer(params, total_steps, lr=0.04, decay=0.05, start=0.3):
    """Spectral descent for the matrices of the blocks, AdamW for everything else. The rate falls
    from the fraction `start` of the run on."""
    spectral = optax.chain(
        optax.stateless_with_tree_map(lambda update, _: orthogonalize(update)),
        optax.add_decayed_weights(decay),
        optax.scale_by_learning_rate(cooldown(lr, total_steps, start)),
    )
    return beside_adam(spectral, params, total_steps)
