"""Adan. Xie et al., arXiv:2208.06677.

m = average of g (b1); d = average of g - last g (b2); n = average of (g + c (g - last g))^2 (b3)
update = -lr ((m + c d) / sqrt(n) + decay w)
Optax 0.2.8 has c = 1 - b2 = 0.08. The paper's c is 0.92: its b2 is the weight of the new
difference, 0.08, where that of optax is the weight of the old ones.
"""

import optax
from train_gpt_simple import beside_adam, cooldown

SETTINGS = {}


def optimizer(params, total_steps, lr=0.005, decay=0.1, b3=0.99):
    """Adan for the matrices of the blocks, AdamW for everything else. Adan's rate rises in the
    first 4% of the run."""
    schedule = cooldown(lr, total_steps, warmup=0.04)
    adan = optax.adan(
        schedule, b1=0.98, b2=0.92, b3=b3, eps=1e-12, eps_root=0.0, weight_decay=decay
    )
    return beside_adam(adan, params, total_steps)
