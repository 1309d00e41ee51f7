"""1, 2, 4 and 8 devices do the same: tokens, validation, gradients, losses; and how they talk."""

import dataclasses
import functools
import re
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import train_gpt
from tests.tools import (
    FLOAT32,
    MINI,
    make_mesh,
    make_random_state,
    place_on,
    random_params,
    sequences,
    text,
    unoptimized,
)

COUNTS = (1, 2, 4, 8)
# Every kind of parameter in two layers; odd steps before and after the untie.
MINI = dataclasses.replace(
    MINI, plan="Spbxv0 Lkgnxdmv1@0<0", batch=16, microbatch=16, steps=4, untie=2, flat=1,
    fallen=3, stages="1 512 4 12 0 1 0,1,.5:0 / 3 512 8 24 0 1.5 0,1",
)  # fmt: skip
MINI32, T = dataclasses.replace(MINI, **FLOAT32), 32
ROWS = train_gpt.param_table(MINI)
TABLES = sorted(name for name, row in ROWS.items() if row.spec == P("fsdp"))
BANKS = [name for name, row in ROWS.items() if row.spec == P(None, "fsdp")]


def batch(step: int) -> np.ndarray:
    return sequences(MINI, T, seed=step, count=MINI.batch)


@functools.cache
def program(kind: str, stage: int, devices: int, c: train_gpt.Config = MINI32):
    with unoptimized():
        return train_gpt.compile_stage(kind, stage, c, make_mesh(devices))


@functools.cache
def first_step(devices: int, c: train_gpt.Config = MINI32) -> tuple[float, dict]:
    """Its loss, and what reached the optimizer, of all devices together: Adam's gradients wait for
    the next step, and Muon's momentum is 0.15 of them."""
    mesh = make_mesh(devices)
    state, loss = program("even", 0, devices, c)(
        make_random_state(c, mesh), place_on(mesh, batch(0))
    )
    buffer, _ = state.optimizer.inner_states["muon"].inner_state
    muon = {name: np.asarray(buffer[name]) / (1 - 0.85) for name in BANKS}
    return float(loss), train_gpt.unpad(state.held | muon, c)


@functools.cache
def run(devices: int, c: train_gpt.Config = MINI32) -> tuple[list[float], list]:
    """Losses of all steps; parameters and tables before the first one and after each. Windows and
    targets change between an even step and the odd one that takes its gradients; then back, so that
    two programs do."""
    mesh, losses = make_mesh(devices), []
    state = make_random_state(c, mesh)
    host = lambda tree: jax.tree.map(np.array, tree)
    seen = [SimpleNamespace(params=host(state.params), tables=host(state.tables))]
    for step in range(c.steps):
        train = program(train_gpt.KINDS[step % 2], step % 2, devices, c)
        state, loss = train(state, place_on(mesh, batch(step)))
        losses.append(float(loss))
        seen.append(SimpleNamespace(params=host(state.params), tables=host(state.tables)))
    return losses, seen


# ---- What goes in --------------------------------------------------------------------------------
@pytest.mark.parametrize("devices", COUNTS)
def test_the_stream_of_tokens_is_the_same(devices):
    """Every step is on the devices in the order of its rows."""
    stages = "3 512 4 12 40 1 0,1 / 3 256 4 12 0 1 0,1"
    c = dataclasses.replace(MINI, stages=stages, batch=8)
    shards = [text(n).astype(np.uint16) for n in (900, 1200, 4000)]
    mesh, got = make_mesh(devices), 0
    batches = train_gpt.on_devices(train_gpt.stream(shards, c.fills("train"), c), mesh)
    expected = [*train_gpt.stream(shards, c.fills("train"), c)]
    for array, rows in zip(batches, expected, strict=True):
        parts = sorted(array.addressable_shards, key=lambda part: part.index[0].start or 0)
        assert len(parts) == devices and array.dtype == jnp.int32
        np.testing.assert_array_equal(np.concatenate([p.data for p in parts]), rows)
        got += 1
    assert got == c.steps


def test_the_stream_is_two_steps_ahead_and_ends():
    taken = []
    source = (taken.append(i) or np.full((8, 3), i, np.int32) for i in range(5))
    batches = train_gpt.on_devices(source, make_mesh(2))
    got = []
    for array in batches:
        got.append(int(array[0, 0]))
        assert len(taken) == min(5, got[-1] + 3)
    assert got == [0, 1, 2, 3, 4]


def test_the_first_state_is_the_same():
    with unoptimized():
        states = [train_gpt.make_state(MINI, make_mesh(n)) for n in COUNTS]
    first, *others = (jax.tree.map(np.asarray, state) for state in states)
    for other in others:
        jax.tree.map(np.testing.assert_array_equal, first, other)


@pytest.mark.parametrize("kind", train_gpt.KINDS)
def test_a_step_takes_the_memory_of_the_state_before_it(kind):
    """All of it: also the gradients that an even step overwrites without reading them."""
    mesh = make_mesh(8)
    state = make_random_state(MINI32, mesh)
    after, _ = program(kind, train_gpt.KINDS.index(kind), 8)(state, place_on(mesh, batch(0)))
    left = [path for path, x in jax.tree_util.tree_leaves_with_path(state) if not x.is_deleted()]
    assert not [path for path in left if jax.tree_util.keystr(path).startswith(".held")]


# ---- What comes out ------------------------------------------------------------------------------
@functools.cache
def by_hand() -> tuple[float, dict, float]:
    """Of one sequence at a time, with no sharding and no accumulation: loss and gradients of the
    first step, loss of a validation step."""
    params = jax.tree.map(jnp.asarray, random_params(MINI32))

    def loss(params, row, shares):
        with pytest.MonkeyPatch.context() as patch:  # gather, where there is but one device
            patch.setattr(train_gpt.lax, "all_gather", lambda x, *_, **__: x)
            patch.setattr(train_gpt.lax, "pcast", lambda x, *_, **__: x)
            weights = train_gpt.gather(params, MINI32)
        weights = train_gpt.read_pairs(weights, row, MINI32)
        return train_gpt.loss_fn(weights, row, shares, MINI32, stage=len(shares) % 2)

    with unoptimized():
        one = jax.jit(jax.value_and_grad(lambda p, row: loss(p, row, {1: 1.0, 2: 0.5})))
        parts = [one(params, row[None]) for row in batch(0)]
        add = lambda *xs: np.mean([np.asarray(x, np.float64) for x in xs], axis=0)
        total, grads = jax.tree.map(add, *parts)
        each = jax.jit(lambda row: loss(params, row, {1: 1.0}))
        val = np.mean([each(row[None]) for row in sequences(MINI, MINI.val_T)]) / MINI.val_T
    return total / T, train_gpt.unpad(grads, MINI32), val


@pytest.mark.parametrize("devices", [1, 8])
def test_validation_is_the_same(devices):
    mesh = make_mesh(devices)
    params = make_random_state(MINI32, mesh).params
    loss = program("val", 1, devices)(params, place_on(mesh, sequences(MINI, MINI.val_T)))
    assert float(loss) == pytest.approx(by_hand()[2], rel=1e-6)


@pytest.mark.parametrize("devices", COUNTS)
def test_gradients_are_the_same_to_the_factor(devices):
    """Adam and Muon hide a lost factor of 8, so compare what they are given: the mean over the
    sequences, also by hand."""
    loss, grads = first_step(devices)
    assert loss == pytest.approx(by_hand()[0], rel=1e-6)
    for name, expected in by_hand()[1].items():
        error = np.linalg.norm(grads[name] - expected) / np.linalg.norm(expected)
        assert error < 1e-5, (name, error)


def test_one_sequence_at_a_time_trains_alike():
    """Above, a device runs all of its 16, 8, 4 or 2 at once."""
    loss, grads = first_step(2, dataclasses.replace(MINI32, microbatch=1))
    assert loss == pytest.approx(first_step(1)[0], rel=1e-6)
    for name, expected in first_step(1)[1].items():
        assert np.linalg.norm(grads[name] - expected) < 1e-5 * np.linalg.norm(expected), name


@pytest.mark.parametrize("devices", COUNTS[1:])
def test_losses_are_the_same_over_a_change_of_stage_and_the_untie(devices):
    losses, one = run(devices)[0], run(1)[0]
    assert losses[0] == pytest.approx(one[0], rel=1e-6)
    np.testing.assert_allclose(losses, one, rtol=1e-5)
    assert len(set(one)) == len(one)


# ---- What moves, and when ------------------------------------------------------------------------
@pytest.mark.parametrize("devices", [1, 8])
def test_even_steps_move_the_matrices_in_the_layers_and_odd_ones_everything(devices):
    _, seen = run(devices)
    for step, (before, after) in enumerate(zip(seen, seen[1:], strict=False)):
        for name in ROWS:
            moved = np.any(before.params[name] != after.params[name])
            assert moved == (step % 2 == 1 or name in BANKS), (step, name)


@pytest.mark.parametrize("devices", [1, 8])
def test_head_and_embedding_are_one_until_the_untie(devices):
    same = [np.array_equal(at.params["head"], at.params["embed"]) for at in run(devices)[1]]
    assert same == [True, True, True, True, False]


@pytest.mark.parametrize("devices", [1, 8])
def test_all_of_the_model_moves_and_none_of_its_padding(devices):
    """Of padding, NorMuon's rows and their norm are 0 / 0."""
    first, *_, last = (at.params for at in run(devices)[1])
    padding = 0
    for name, row in ROWS.items():
        lead = len(row.stored_shape) - len(row.shape) + 1
        moved = (last[name] != first[name]).reshape(-1, *row.stored_shape[lead:])
        real = np.zeros(moved.shape, bool)
        real[tuple(map(slice, row.shape))] = True
        padding += np.sum(~real)
        assert np.isfinite(last[name]).all(), name
        assert not (moved & ~real).any(), f"padding of {name}"
        if name in BANKS:
            assert moved[: row.shape[0]].any(axis=(1, 2)).all(), name
        else:
            assert moved.any() if name in TABLES else moved.mean() > 0.9, name
    assert padding


@pytest.mark.parametrize("devices", [1, 8])
def test_tables_are_those_of_the_parameters(devices):
    for at in run(devices)[1]:
        assert [*at.tables] == TABLES
        for name, table in at.tables.items():
            np.testing.assert_array_equal(table, at.params[name])


# ---- The compiled program ------------------------------------------------------------------------
SHAPE = re.compile(r"(?:bf16|f32)\[([\d,]*)\]")


def compiled(kind: str):
    return program(kind, 1, 8, MINI)


def collectives(text: str, kind: str) -> list[int]:
    """Elements of every array that the collectives of a kind return, tuples taken apart."""
    sizes = []
    for line in re.findall(rf"= (.*?) {kind}(?:-start)?\(", text):
        for dims in SHAPE.findall(line):
            sizes.append(int(np.prod([int(n) for n in dims.split(",") if n], initial=1)))
    return sizes


@pytest.mark.parametrize("kind", train_gpt.KINDS)
def test_each_weight_is_sent_once_and_none_is_all_reduced(kind):
    """Groups of matrices in every step, tables in odd ones; each gradient to its owner alone, but
    of token pairs each token's, to all."""
    hlo, size = compiled(kind).as_text(), lambda name: int(np.prod(ROWS[name].stored_shape))
    counts = {name: ROWS[name].stored_shape[0] for name in BANKS}
    groups = [size(name) // n for name, n in counts.items() for _ in range(n)]
    tables = [size(name) for name in TABLES]
    sent = [MINI.batch * MINI.rows[1].T * MINI.D, *groups, *(tables if kind == "odd" else [])]
    assert sorted(collectives(hlo, "all-gather")) == sorted(sent)
    own = sum(groups + tables) - size("bigram")
    assert sum(collectives(hlo, "reduce-scatter")) == own // 8
    shares = [n // 8 for n in groups + tables]  # of a device
    assert 0 < max(collectives(hlo, "all-reduce")) < min(shares)  # scalars and the loss


def test_training_is_in_fp8_and_validation_is_not():
    for hlo, used in (
        (compiled("even").as_text(), True),
        (compiled("val").as_text(), False),
    ):
        assert [name in hlo for name in ("f8e4m3fn", "f8e5m2")] == [used, used]


def test_tables_are_sent_rounded_and_whole_to_every_device():
    mesh = make_mesh(8)
    state = make_random_state(MINI, mesh)
    for kind in train_gpt.KINDS:
        state, _ = compiled(kind)(state, place_on(mesh, batch(0)))
    for name, table in state.tables.items():
        assert table.dtype == jnp.bfloat16 and table.sharding.is_fully_replicated
        expected = np.asarray(state.params[name].astype(jnp.bfloat16))
        for part in table.addressable_shards:
            np.testing.assert_array_equal(np.asarray(part.data), expected)
