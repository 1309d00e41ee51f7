"""The exercises of basics/fsdp.py have these answers."""

import jax
import numpy as np
import optax
from fsdp import EIGHTH, loss_of, make
from jax import lax
from jax.sharding import AxisType


def test_exercise_1_a_norm_is_of_all_eighths():
    clip = 0.1

    def clip_by_norm_of_eighth(grads):
        return optax.clip_by_global_norm(clip).update(grads, optax.EmptyState())[0]

    def clip_by_global_norm(grads):
        squares = sum((g * g).sum() for g in grads.values())
        norm = lax.psum(squares, "fsdp") ** 0.5
        return jax.tree.map(lambda g: g * lax.min(1.0, clip / norm), grads)

    def loss(*arguments):
        return loss_of(*arguments, gather=lambda weights: weights, twice=False)

    mesh = jax.make_mesh((8,), ("fsdp",), axis_types=(AxisType.Auto,))
    grads = jax.jit(jax.grad(loss))(*make(0))
    right = clip_by_norm_of_eighth(grads)  # of one device, which has all of them
    errors = {}
    for function in clip_by_norm_of_eighth, clip_by_global_norm:
        spread = jax.shard_map(function, mesh=mesh, in_specs=EIGHTH, out_specs=EIGHTH)
        clipped = jax.jit(spread)(grads)
        errors[function] = max(
            np.abs(clipped[k] / optax.tree.norm(right) - right[k] / clip).max() for k in right
        )
    assert errors[clip_by_global_norm] < 1e-6
    assert errors[clip_by_norm_of_eighth] > 1e-2
