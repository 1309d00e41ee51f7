"""optax.contrib.muon with its defaults: five Newton-Schulz steps, with Jordan's coefficients.

m = average of g
update = -lr (sqrt(max(1, outputs / inputs)) orthogonal(b m + (1 - b) g) + decay w)
Optax divides m by 1 - b^(step + 1) and g by 1 - b^step, as NAdam does. muon.py has the formula in
full, with twelve steps.
"""

import optax
from train_gpt_simple import beside_adam, cooldown

SETTINGS = {}


def optimizer(params, total_steps, lr=0.02, decay=0.05, momentum=0.95):
    """Optax's Muon for the matrices of the blocks, AdamW for everything else. Optax's axes of a
    weight are (inputs, outputs) too."""
    muon = optax.contrib.muon(cooldown(lr, total_steps), beta=momentum, weight_decay=decay)
    return beside_adam(muon, params, total_steps)
