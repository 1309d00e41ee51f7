"""Adafactor. Shazeer and Stern, arXiv:1804.04235.

v_ij = r_i c_j / mean(r), where r and c are averages of the means of g^2 over a row and a column
u = g / sqrt(v), scaled down to a root mean square of 1 if that is above 1
update = -lr (average of u + decay w)
The average over steps forgets by 1 - step^-power. Without the paper's scaling by the size of the
parameter: weights that begin at zero would hardly move in a short run.
"""

import optax
from train_gpt_simple import beside_adam, cooldown

SETTINGS = {"tiny": dict(steps=3100, lr=0.005, power=0.6)}


def optimizer(params, total_steps, lr=0.005, decay=0.1, power=0.8):
    """Adafactor with momentum 0.9 for the matrices of the blocks, AdamW for everything else.
    Adafactor's rate rises in the first 4% of the run."""
    schedule = cooldown(lr, total_steps, warmup=0.04)
    adafactor = optax.adafactor(
        min_dim_size_to_factor=32, multiply_by_parameter_scale=False, decay_rate=power, momentum=0.9
    )
    adafactor = optax.chain(
        adafactor,
        optax.scale(-1.0),  # it ends with this factor
        optax.add_decayed_weights(decay),
        optax.scale_by_learning_rate(schedule),
    )
    return beside_adam(adafactor, params, total_steps)
