"""basics/fsdp.py runs, sees planted faults, and its exercises have these answers."""

import functools

import jax
import numpy as np
import optax
from fsdp import EIGHTH, ROWS, gather, loss_of, make
from jax import lax
from jax.sharding import AxisType

from tests.tools import basic


def test_it_runs(tmp_path):
    run = basic(tmp_path, "fsdp")
    assert (run.returncode, run.stderr) == (0, "")
    assert run.stdout.count("ok   ") == 9 and "WRONG" not in run.stdout


def spread(function, ins=(EIGHTH, ROWS, ROWS)):
    mesh = jax.make_mesh((8,), ("fsdp",), axis_types=(AxisType.Auto,))
    return jax.jit(jax.shard_map(function, mesh=mesh, in_specs=ins, out_specs=EIGHTH))


def gradients(gather):
    return jax.grad(functools.partial(loss_of, gather=gather, twice=False))


def test_exercise_1_a_norm_is_of_all_eighths():
    clip = 0.1

    def clip_by_norm_of_eighth(grads):
        return optax.clip_by_global_norm(clip).update(grads, optax.EmptyState())[0]

    def clip_by_global_norm(grads):
        squares = sum((g * g).sum() for g in grads.values())
        norm = lax.psum(squares, "fsdp") ** 0.5
        return jax.tree.map(lambda g: g * lax.min(1.0, clip / norm), grads)

    grads = jax.jit(gradients(lambda weights: weights))(*make(0))
    right = clip_by_norm_of_eighth(grads)  # of one device, which has all of them
    errors = {}
    for function in clip_by_norm_of_eighth, clip_by_global_norm:
        clipped = spread(function, (EIGHTH,))(grads)
        errors[function] = max(
            np.abs(clipped[k] / optax.tree.norm(right) - right[k] / clip).max() for k in right
        )
    assert errors[clip_by_global_norm] < 1e-6
    assert errors[clip_by_norm_of_eighth] > 1e-2


def test_exercise_2_the_transpose_of_a_cast_rounds_what_is_added():
    def gather_half(eighths):
        half = gather(jax.tree.map(lambda p: p.astype("bfloat16"), eighths))
        return jax.tree.map(lambda p: p.astype("float32"), half)

    data = make(0)
    text = str(jax.make_jaxpr(spread(gradients(gather_half)))(*data))
    for name in "all_gather", "reduce_scatter":
        sent = [line for line in text.splitlines() if f"= {name}" in line]
        assert len(sent) == 2 and all("bf16" in line for line in sent)
    right = spread(gradients(gather))(*data)
    rounded = spread(gradients(gather_half))(*data)
    for name in right:
        error = np.linalg.norm(rounded[name] - right[name]) / np.linalg.norm(right[name])
        assert 1e-3 < error < 0.1
