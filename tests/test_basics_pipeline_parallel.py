"""The exercises of basics/pipeline_parallel.py have these answers."""

import jax
import numpy as np
import pipeline_parallel as pp
from jax.sharding import AxisType


def error(table: np.ndarray) -> float:
    """The largest of loss and gradients by this table, as a share of one device's."""
    mesh = jax.make_mesh((pp.S,), ("stage",), axis_types=(AxisType.Auto,))
    arrays = pp.example(table[..., 1].max() + 1)
    found = pp.pipeline(table, mesh)(*arrays)
    errors = jax.tree.map(pp.largest_error, found, pp.one_device(*arrays))
    return max(jax.tree.leaves(errors))


def test_exercise_1_gpipe_in_two_halves_has_half_the_memory_and_more_bubble():
    M = 8
    half = pp.gpipe(M // 2)
    later = half + np.where(half[..., :1] == pp.IDLE, 0, [0, M // 2])
    table = np.concatenate((half, later))
    assert pp.depth(table) == M // 2 and (pp.in_flight(table).max(axis=0) == M // 2).all()
    assert np.isclose((table[..., 0] == pp.IDLE).mean(), 3 / 7)
    assert np.isclose((pp.gpipe(M)[..., 0] == pp.IDLE).mean(), 3 / 11)


def test_exercise_2_forwards_at_every_second_tick_need_a_slot_less_and_no_more_time():
    M = 8
    S = pp.S
    table = np.zeros_like(pp.one_f_one_b(M))
    for s, m in np.ndindex(S, M):
        table[s + 2 * m, s] = pp.FORWARD, m
        table[S + (S - 1 - s) + 2 * m, s] = pp.BACKWARD, m
    assert (pp.depth(pp.one_f_one_b(M)), pp.depth(table)) == (S, S - 1)
    assert error(table) < 1e-5
