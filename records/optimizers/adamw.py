"""AdamW for the matrices, with a rate of their own. Loshchilov and Hutter, arXiv:1711.05101.

m = average of g (b1), v = average of g^2 (b2); update = -lr (m / sqrt(v) + decay w)
Averages are divided by 1 - b^step, because they begin at zero.
"""

import optax
from train_gpt_simple import beside_adam, cooldown

SETTINGS = {"tiny": dict(steps=2950, lr=0.005, decay=0.03), "124m": dict(steps=5625, lr=0.0015)}


def optimizer(params, total_steps, lr=0.005, decay=0.1, b2=0.95):
    """AdamW for everything, with another rate for the matrices, which rises in the first 4% of the
    run. Upstream's first run of Adam had this form."""
    schedule = cooldown(lr, total_steps, warmup=0.04)
    adamw = optax.adamw(schedule, b1=0.9, b2=b2, eps=1e-15, weight_decay=decay)
    return beside_adam(adamw, params, total_steps)
