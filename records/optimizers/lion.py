"""Lion. Chen et al., arXiv:2302.06675.

update = -lr (sign(b1 m + (1 - b1) g) + decay w); m = b2 m + (1 - b2) g
Every entry moves by lr, so the rate is about a tenth of Adam's, and the decay ten times Adam's.
"""

import optax
from train_gpt_simple import beside_adam, cooldown

SETTINGS = {"tiny": dict(steps=3050, lr=0.001, decay=1.0, b2=0.99)}


def optimizer(params, total_steps, lr=0.0005, decay=0.3, b2=0.98):
    """Lion for the matrices of the blocks, AdamW for everything else. Lion's rate rises in the
    first 4% of the run."""
    schedule = cooldown(lr, total_steps, warmup=0.04)
    lion = optax.lion(schedule, b1=0.9, b2=b2, weight_decay=decay)
    return beside_adam(lion, params, total_steps)
