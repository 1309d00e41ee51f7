"""Sophia-H. Liu et al., arXiv:2305.14342.

m = average of g; h = average of z * (H z), an estimate of the Hessian's diagonal, z = +1 or -1
update = -lr (clip(m / (gamma h), -1, 1) + decay w)
The product H z of the loss of the first microbatch is computed every 10 steps. It costs more than a
second backward pass, which upstream's rule (one forward and one backward pass a step) forbids: not
a result for that board. cuDNN's attention, which 124m uses on GPUs, has no second derivative.
"""

import optax
from train_gpt_simple import beside_adam, cooldown, kinds

SETTINGS = {"tiny": dict(steps=3000, lr=0.001, gamma=0.1)}


def optimizer(params, total_steps, lr=0.001, decay=0.1, gamma=0.03):
    """Sophia for the matrices of the blocks, AdamW for everything else. Sophia's rate rises in the
    first 4% of the run. A larger gamma makes smaller steps."""
    schedule = cooldown(lr, total_steps, warmup=0.04)
    sophia = optax.contrib.sophia(
        schedule, b1=0.965, b2=0.99, eps=1e-12, gamma=gamma, weight_decay=decay
    )
    return for_matrices(sophia, params, total_steps)


def for_matrices(transform, params, total_steps):
    """Updates the matrices of the blocks by a transform that needs all parameters, and everything
    else by AdamW."""
    adam = beside_adam(optax.set_to_zero(), params, total_steps)

    def init(params):
        return transform.init(params), adam.init(params)

    def update(grads, state, params, **extra):
        for_all, transform_state = transform.update(grads, state[0], params, **extra)
        updates, adam_state = adam.update(grads, state[1], params)
        for name, kind in kinds(params).items():
            if kind == "matrix":
                updates[name] = for_all[name]
        return updates, (transform_state, adam_state)

    return optax.GradientTransformationExtraArgs(init, update)
