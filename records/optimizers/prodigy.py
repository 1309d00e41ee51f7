"""Prodigy: AdamW that finds its rate. Mishchenko and Defazio, arXiv:2306.06101.

update = -lr d (m / sqrt(v) + decay w), with Adam's averages m of g and v of g^2
d = the largest so far of sum(d^2 <g, w0 - w>) / |sum(d^2 g)|_1, sums weighted towards new steps:
a lower bound of the distance between the first parameters w0 and the best ones, from `first` on
(1e-6 in the paper, which takes hundreds of steps to leave).
"""

import optax
from sophia import for_matrices
from train_gpt_simple import cooldown

SETTINGS = {"tiny": dict(steps=3305, lr=2.0, decay=0.03)}


def optimizer(params, total_steps, lr=1.0, decay=0.1, first=1e-4):
    """Prodigy for the matrices of the blocks, AdamW for everything else. lr is a factor of the rate
    that Prodigy finds, first the rate of the first step. The sums of d are over all parameters,
    also those that AdamW moves."""
    schedule = cooldown(lr, total_steps, warmup=0.04)
    prodigy = optax.contrib.prodigy(
        schedule, betas=(0.9, 0.99), estim_lr0=first, weight_decay=decay, safeguard_warmup=True
    )
    # The first gradients of the matrices are zero: of them alone, d would be 0 / 0.
    return for_matrices(optax.with_extra_args_support(prodigy), params, total_steps)
