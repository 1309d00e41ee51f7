"""Schedule-free AdamW. Defazio et al., arXiv:2405.15682.

y = (1 - b1) z + b1 x, where gradients are taken; z = z - lr (g / sqrt(v) + decay y)
x = weighted mean of all z, which is validated; v = average of g^2, by b2
The rate is constant after a warm-up.
"""

import optax
from train_gpt_simple import beside_adam, kinds

SETTINGS = {"tiny": dict(steps=2055, lr=0.02, decay=0.3, b1=0.9)}


def optimizer(params, total_steps, lr=0.005, decay=0.1, b1=0.95):
    """Schedule-free AdamW for the matrices of the blocks, AdamW for everything else.
    Schedule-free AdamW's rate rises in the first 4% of the run, and does not fall."""
    warmup = max(1, round(0.04 * total_steps))
    schedule_free = optax.contrib.schedule_free_adamw(
        lr, warmup_steps=warmup, b1=b1, b2=0.95, eps=1e-15, weight_decay=decay
    )
    return beside_adam(schedule_free, params, total_steps)


def validated_params(params, state):
    """x of the matrices, from y, which params has, and z."""
    matrices = [name for name, kind in kinds(params).items() if kind == "matrix"]
    y = {name: params[name] for name in matrices}
    state = state.inner_states["matrix"].inner_state
    state = state._replace(z={name: state.z[name] for name in matrices})
    return params | optax.contrib.schedule_free_eval_params(state, y)
