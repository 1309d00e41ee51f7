"""basics/context_parallel.py runs, finds faults that people make, and its exercises' answers."""

import math
import types
from pathlib import Path

import context_parallel as cp
import jax
import jax.numpy as jnp
import numpy as np
from jax import P, lax
from jax.sharding import AxisType

from tests.tools import basic


def test_it_runs(tmp_path):
    ran = basic(tmp_path, "context_parallel")
    assert (ran.returncode, ran.stderr) == (0, "")
    assert ran.stdout.count("ok   ") == 6 and "WRONG" not in ran.stdout


def spread(attention):
    """The program of attention on 8 devices, tokens in plain order; and its arguments."""
    mesh = jax.make_mesh((cp.N,), ("seq",), axis_types=(AxisType.Auto,))
    program = jax.jit(jax.shard_map(attention, mesh=mesh, in_specs=P("seq"), out_specs=P("seq")))
    qkv = np.random.default_rng(1).normal(size=(3, cp.T, cp.H, cp.K)).astype("f4")
    return program.lower(*qkv).compile(), qkv


def changed(*edits):
    """The file as a module, with these texts replaced."""
    source = Path(cp.__file__).read_text(encoding="utf-8")
    module = types.ModuleType("changed")
    for old, new in edits:
        assert source.count(old) == 1
        source = source.replace(old, new)
    exec(source, module.__dict__)
    return module


def test_exercise_1_a_window_needs_one_neighbour():
    """A token sees itself and the T / 8 before it, which are on its device and the one before."""
    near = changed(
        (
            "    visible = jnp.arange(C)[:, None] + behind >= jnp.arange(C)\n",
            "    back = jnp.arange(C)[:, None] + behind - jnp.arange(C)\n"
            "    visible = (back >= 0) & (back <= T // N)\n",
        ),
        ("jnp.arange(1, N))", "jnp.arange(1, 2))"),
    )
    program, qkv = spread(lambda *qkv: near.ring_attention(*qkv, jnp.asarray(near.PLAIN))[0])
    window = cp.T // cp.N, 0
    expected = jax.nn.dot_product_attention(*qkv, is_causal=True, local_window_size=window)
    assert np.abs(program(*qkv) - expected).max() < 1e-5
    text = program.as_text()
    assert text.count(" collective-permute(") == 1 and "known_trip_count" not in text  # sent once


def test_exercise_2_all_keys_at_once():
    """all_gather instead of the ring: the same numbers, and every device holds all keys."""

    def attention(q, k, v):
        k, v = (lax.all_gather(x, "seq", tiled=True) for x in (k, v))
        position = lax.axis_index("seq") * len(q) + jnp.arange(len(q))
        scores = jnp.einsum("QHK,SHK->HQS", q, k) / math.sqrt(cp.K)
        scores = jnp.where(position[:, None] >= jnp.arange(cp.T), scores, -jnp.inf)
        return jnp.einsum("HQS,SHK->QHK", jax.nn.softmax(scores), v)

    program, qkv = spread(attention)
    assert np.abs(program(*qkv) - cp.plain(*qkv)[0]).max() < 1e-5
    ring, _ = spread(lambda *qkv: cp.ring_attention(*qkv, jnp.asarray(cp.PLAIN))[0])
    bytes_of_keys_and_values = 2 * 4 * cp.T * cp.H * cp.K
    assert program.memory_analysis().temp_size_in_bytes > bytes_of_keys_and_values
    assert ring.memory_analysis().temp_size_in_bytes < bytes_of_keys_and_values
