"""Orthogonalization in bfloat16, first values, schedules of other lengths.

test_golden.py compares the numbers of NorMuon, Adam, rates, both kinds of steps and the record's
schedule.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import P

import train_gpt
from tests.tools import MINI, MINI32, make_mesh
from train_gpt import LONG, SHORT, Layer

RECORD, TINY = train_gpt.PRESETS["record"], train_gpt.PRESETS["tiny"]


# ---- Matrices ------------------------------------------------------------------------------------
@pytest.mark.parametrize("shape", [(64, 64), (128, 32)])
def test_in_bfloat16_singular_values_come_near_one(shape):
    G = np.random.default_rng(0).normal(size=shape).astype(np.float32)
    got = np.asarray(train_gpt.orthogonalize(G[None], "bfloat16")[0])
    s = np.linalg.svd(got, compute_uv=False)
    assert 0.5 < s.min() and s.max() < 1.25
    U, _, Vt = np.linalg.svd(G, full_matrices=False)
    assert np.trace(U.T @ got @ Vt.T) > 0.97 * s.sum()  # G's singular vectors are kept


# ---- Updates -------------------------------------------------------------------------------------
def test_a_tied_embedding_becomes_the_head():
    """By a copy, because XLA may round equal updates differently."""
    c = dataclasses.replace(MINI32, layers=(Layer(None, x0=False),), mudd_head=(), R=0)
    state = train_gpt.initial_state(np.uint32(1), c)
    state = state._replace(params=state.params | {"embed": 2 * state.params["head"]})
    grads = jax.tree.map(jnp.zeros_like, state.params)

    def update(row):
        return train_gpt.update_parameters(state, grads, row, c, adam_step=True).params

    run = jax.shard_map(update, mesh=make_mesh(1), in_specs=P(), out_specs=P(), check_vma=False)
    for tied in True, False:
        after = jax.jit(run)(train_gpt.schedule(c)[0]._replace(tied=np.bool_(tied)))
        np.testing.assert_array_equal(after["head"], state.params["head"])
        assert np.array_equal(after["embed"], after["head"]) == tied


# ---- The table and first values ------------------------------------------------------------------


def test_first_values_are_those_of_the_spec():
    sizes = {"D": 64, "H": 2, "F": 256, "vocab": 2000, "eot": 1999, "ngram_buckets": 256}
    c = dataclasses.replace(RECORD, **sizes)
    params = train_gpt.unpad(train_gpt.initial_state(np.uint32(1), c).params, c)
    bound = 0.5 * (3 / c.D) ** 0.5
    drawn = [(w, bound) for w in (*params["qk"], *params["vo"], *params["mlp"][::2])]
    drawn += [(params[f"{net}.w1"], 1 / 8) for net in train_gpt.nets(c)]
    for w, edge in drawn:  # uniform between -edge and edge
        assert 0.98 * edge < np.abs(w).max() <= edge and abs(w.mean()) < 0.03 * edge
        assert w.std() == pytest.approx(edge / 3**0.5, rel=0.05)
    assert not params["mlp"][1::2].any() and not params["ngram"].any()
    for name, std in {"head": 0.005, **{f"value{i}": 0.01 for i in range(5)}}.items():
        assert params[name].std() == pytest.approx(std, rel=0.02)
    np.testing.assert_array_equal(params["embed"], params["head"])
    first = {
        "vo_lambdas": [0.5, 1], "attn_lambdas": [1.1**0.5, 1], "mlp_lambdas": [1.1**0.5, 1],
        "skip_lambdas": -1.5, "value_gates": 0, "smear_gate": 0, "smear_lambda": 0,
        "gate_scale": 0.1,
    }  # fmt: skip
    for name, value in first.items():
        np.testing.assert_allclose(params[name], np.broadcast_to(value, params[name].shape))
    outputs = {
        "ngram": 0.05, "x0": 0, "skip": 0.5, "xsa": 0, "head": 0.25, "dc_in": 1, "dc_out": 0,
        "v": 0, "x": 0, "value": 2, "attn": [1.1**0.5, 1, 0, 0.05], "mlp": [1.1**0.5, 1],
    }  # fmt: skip
    for net, sizes in train_gpt.nets(c).items():
        assert not params[f"{net}.w2"].any()
        ends = np.cumsum([len(start) for start in sizes.values()])[:-1]
        for name, bias in zip(sizes, np.split(0.1 * params[f"{net}.b2"], ends), strict=True):
            expected = [0, -0.5, 0, 0, 0] if net == "mudd_head" else outputs[name.split(".")[-1]]
            np.testing.assert_allclose(bias, np.broadcast_to(expected, bias.shape), atol=1e-7)


def test_keys_start_as_queries_where_a_layer_wants_it():
    layers = (
        Layer(SHORT),
        Layer(LONG, key_offset=True, key_start=True),
        Layer(None),
        Layer(SHORT, key_start=True, attend_to=0),
        Layer(LONG),
    )
    c = dataclasses.replace(MINI, layers=layers, mudd_head=())
    qk = train_gpt.unpad(train_gpt.initial_state(np.uint32(1), c).params, c)["qk"]
    pairs = np.reshape(qk, (4, 2, c.D, c.D))  # q and k of the four layers with attention
    assert [n for n, (q, k) in enumerate(pairs) if np.array_equal(q, k)] == [1, 2]
    assert len(np.unique(qk)) > 5.9 * c.D**2  # two of the 8 matrices are copies, no more


def test_a_row_taken_out_does_not_reseed_the_others(monkeypatch):
    before = train_gpt.initial_state(np.uint32(1), MINI).params
    table = train_gpt.param_table
    less = lambda c: {name: row for name, row in table(c).items() if name != "value0"}
    monkeypatch.setattr(train_gpt, "param_table", less)
    after = train_gpt.initial_state(np.uint32(1), MINI).params
    assert after.keys() == before.keys() - {"value0"}
    for name, array in after.items():
        np.testing.assert_array_equal(array, before[name])
    names = ("head", "value1", "qk", "vo", "mlp")
    drawn = [np.asarray(after[name]).ravel()[:100] for name in names]
    assert len({tuple(np.sign(numbers)) for numbers in drawn}) == 5  # no two have the same key


# ---- The schedule --------------------------------------------------------------------------------
@pytest.mark.parametrize("c, share", [(RECORD, 0.05), (TINY, 0.5), (MINI, 3)])
def test_the_schedule_of_another_length_is_the_same_one_stretched(c, share):
    lengths = [stage.steps for stage in c.stages]
    total = sum(lengths)
    other = dataclasses.replace(c, steps=max(int(share * total), 4))
    rows = train_gpt.schedule(other)
    stages = [other.stage_at(step) for step in range(other.total_steps)]
    assert len(rows) == other.total_steps and stages == sorted(stages)
    assert [*dict.fromkeys(stages)] == [i for i, steps in enumerate(lengths) if steps]
    assert other.stage_at(other.total_steps) == len(c.stages) - 1
    for step, stage in enumerate(stages):
        size = stages.count(stage)
        first = stages.index(stage)
        assert abs(size - lengths[stage] * other.total_steps / total) < len(lengths)
        within = (step - first) / size
        progress = (sum(lengths[:stage]) + within * lengths[stage]) / total
        fall = (progress - c.cooldown_start) / (c.cooldown_end - c.cooldown_start)
        fall = min(1, max(0, fall))
        lr = c.stages[stage].lr * (1 - fall) + c.lr_floor * fall
        assert rows[step].adam_lr == pytest.approx(c.adam_lr * lr, rel=1e-5)
        assert rows[step].muon_lr == pytest.approx(c.muon_lr * lr, rel=1e-5)
        up = min(progress / c.momentum_warmup, 1)
        down = max(0, progress - (1 - c.momentum_cooldown)) / c.momentum_cooldown
        assert rows[step].momentum == pytest.approx(0.85 + 0.1 * (up - down), rel=1e-5)
        if abs(progress - c.untie) > 1e-9:
            assert rows[step].tied == (progress <= c.untie)
        ramps = train_gpt.target_weights(c.stages[stage]).values()
        expected = [a + (b - a) * within for a, b in ramps]
        np.testing.assert_allclose(rows[step].loss_weights, expected, rtol=1e-5)
