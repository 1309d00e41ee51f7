"""AdEMAMix: AdamW with a second, slow average. Pagliardini et al.,
arXiv:2409.03137.

update = -lr ((m1 + alpha m2) / sqrt(v) + decay w)
m1, m2 = averages of g, by b1 and by b3; v = average of g^2, by b2
alpha rises from 0, and b3 from b1 so that its half-life grows linearly, both over the whole run:
b3(t) = exp(log(b1) log(b3) / ((1 - t) log(b3) + t log(b1))), t from 0 to 1
The paper's b3 = 0.9999 is 1/25 of its longest run (256,000 steps); here memory is that fraction.
"""

import jax.numpy as jnp
import optax
from train_gpt_simple import beside_adam, cooldown

SETTINGS = {}


def optimizer(params, total_steps, lr=0.0025, alpha=4.0, memory=0.1):
    """AdEMAMix for the matrices of the blocks, AdamW for everything else. AdEMAMix's rate rises in
    the first 4% of the run. memory: steps that the slow average remembers in the end, 1 / (1 - b3),
    as a fraction of the run."""
    fast = jnp.log(0.9)
    slow = jnp.log(1 - 1 / max(10.0, memory * total_steps))

    def alpha_at(step):
        return alpha * jnp.minimum(1.0, step / total_steps)

    def b3_at(step):
        t = jnp.minimum(1.0, step / total_steps)
        return jnp.exp(fast * slow / ((1 - t) * slow + t * fast))

    schedule = cooldown(lr, total_steps, warmup=0.04)
    ademamix = optax.contrib.ademamix(
        schedule, b1=0.9, b2=0.95, b3=b3_at, alpha=alpha_at, eps=1e-15, weight_decay=0.1
    )
    return beside_adam(ademamix, params, total_steps)
