"""One device and eight compute the same: tokens, gradients, losses. And their compiled
programs communicate no more than they should."""

import dataclasses
import functools
import itertools
import re
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

import train_gpt
from tests import tools
from tests.tools import (
    FLOAT32,
    make_mesh,
    make_random_state,
    place_on,
    schedule_row,
    sequences,
    text,
)
from train_gpt import BANK, LONG, LOOKUP, REPLICATED, SHORT, Layer, Stage

# Two layers that use every kind of parameter. The untie is between the first second step and the
# next one.
LAYERS = (
    Layer(SHORT, paired_heads=True, xsa=True, ngram=True, value_table=0),
    Layer(LONG, key_offset=True, xsa=True, head_gate=True, dc=True, value_table=1, attend_to=0,
          x0=False, ngram=True, mudd=("input", "layer0"), skip_from=0, new_gates=True),
)  # fmt: skip
STAGES = (
    Stage(1, 512, short=4, long=12, max_doc=0, lr=1.0, targets=(1.0, (0.5, 0.0))),
    Stage(3, 512, short=8, long=24, max_doc=0, lr=1.5),
)
MINI = dataclasses.replace(
    tools.MINI,
    layers=LAYERS,
    stages=STAGES,
    mudd_head=(("input", 0.0), ("layer0", -0.5), ("value0", 0.0)),
    batch=16,
    microbatch=2,
    cooldown_start=1 / 4,
    cooldown_end=3 / 4,
    untie=2 / 4,
)
MINI32 = dataclasses.replace(MINI, **FLOAT32)
T = MINI.sequence_length(1)
TABLE = train_gpt.param_table(MINI)
LOOKUPS = sorted(name for name, param in TABLE.items() if param.kind == LOOKUP)
BANKS = [name for name, param in TABLE.items() if param.kind == BANK]
SLOTS = len(MINI.ngrams) * T  # of a sequence in each eighth of the n-gram table: none can be lost


def batch(step: int) -> np.ndarray:
    """The tokens of a step, (MINI.batch, T + 1)."""
    return sequences(MINI, T, seed=step, count=MINI.batch)


@functools.cache
def train_program(stage: int, devices: int):
    """The program of stage 0 for first steps, or of stage 1 for second steps."""
    return train_gpt.compile_train_step(stage, stage == 1, MINI32, make_mesh(devices))


@functools.cache
def run(devices: int) -> SimpleNamespace:
    """The losses of all steps, the parameters and lookups before the first and after every step,
    and the gradients of the first. First steps are of stage 0 and second steps of stage 1: so
    windows and targets change while gradients wait, and two programs suffice."""
    c = MINI32
    mesh = make_mesh(devices)
    state = make_random_state(c, mesh)
    found = SimpleNamespace(losses=[], snapshots=[])

    def note():
        params, lookups = jax.tree.map(np.array, (state.params, state.lookups))
        found.snapshots.append(SimpleNamespace(params=params, lookups=lookups))

    note()
    for step in range(c.total_steps):
        stage = step % 2
        row = schedule_row(c, step, mesh)
        if stage == 0:  # with the loss weights of the first step
            row = row._replace(loss_weights=schedule_row(c, 0, mesh).loss_weights)
        tokens = place_on(mesh, batch(step))
        state, loss = train_program(stage, devices)(state, tokens, row)
        found.losses.append(float(loss))
        note()
        if step == 0:
            # Adam's gradients wait for the next step. The banks' are in Muon's momentum, which is
            # 0.15 of them.
            grads = jax.tree.map(np.array, dict(state.waiting_grads))
            grads |= {name: np.array(state.opt_state[name][0]) / (1 - 0.85) for name in BANKS}
            found.grads = train_gpt.unpad(grads, c)
    return found


# ---- Tokens and first weights --------------------------------------------------------------------
@pytest.mark.parametrize("devices", [1, 2, 4, 8])
def test_the_stream_of_tokens_is_the_same(devices):
    """The devices have the sequences of a step in order, beside its row of the schedule."""
    stages = (
        Stage(3, 512, short=4, long=12, max_doc=40, lr=1.0, targets=(1.0, 0.5)),
        Stage(3, 256, short=4, long=12, max_doc=0, lr=1.0),
    )
    c = dataclasses.replace(MINI, stages=stages, batch=8)
    shards = [text(n).astype(np.uint16) for n in (900, 1200, 4000)]
    expected = [*train_gpt.read_batches(shards, train_gpt.batch_shapes("train", c), c)]
    assert len(expected) == c.total_steps
    for start in 0, 2:
        batches = train_gpt.train_batches(c, make_mesh(devices), {"train": shards}, start)
        expected_rows = train_gpt.schedule(c)[start:]
        pairs = zip(batches, expected[start:], expected_rows, strict=True)
        for (tokens, row), expected_tokens, expected_row in pairs:
            parts = sorted(tokens.addressable_shards, key=lambda part: part.index[0].start or 0)
            assert len(parts) == devices and tokens.dtype == jnp.int32
            np.testing.assert_array_equal(np.concatenate([p.data for p in parts]), expected_tokens)
            jax.tree.map(np.testing.assert_array_equal, row, expected_row)


def test_the_stream_is_two_steps_ahead_and_ends():
    taken = []

    def source():
        for i in range(5):
            taken.append(i)
            yield np.full((8, 3), i, np.int32)

    sharding = NamedSharding(make_mesh(2), PartitionSpec("fsdp"))
    numbers = []
    for array in train_gpt.prefetch(source(), sharding):
        numbers.append(int(array[0, 0]))
        assert len(taken) == min(5, numbers[-1] + 3)
    assert numbers == [0, 1, 2, 3, 4]


def test_the_first_state_is_the_same():
    one = train_gpt.make_state(MINI, make_mesh(1))
    eight = train_gpt.make_state(MINI, make_mesh(8))
    jax.tree.map(np.testing.assert_array_equal, one, eight)


def test_a_step_takes_the_memory_of_the_state_before_it():
    """A program gives its outputs the memory of its inputs, also that of the waiting gradients,
    which a first step overwrites without reading."""
    mesh = make_mesh(8)
    for step in 0, 1:  # of stage 0 and 1
        state = make_random_state(MINI32, mesh)
        tokens, row = place_on(mesh, batch(0)), schedule_row(MINI32, step, mesh)
        jax.block_until_ready(train_program(step, 8)(state, tokens, row))
        assert all(x.is_deleted() for x in jax.tree.leaves(state.waiting_grads))


# ---- Losses and gradients ------------------------------------------------------------------------
def test_gradients_are_the_same_to_the_factor():
    """Adam and Muon do not depend on the scale of a gradient, so a lost factor of 8 would not show
    in the weights. One device adds up the gradients of 8 microbatches, and each of 8 devices has
    one microbatch."""
    assert run(8).losses[0] == pytest.approx(run(1).losses[0], rel=1e-6)
    assert run(8).grads.keys() == run(1).grads.keys() == TABLE.keys()
    for name, expected in run(1).grads.items():
        error = np.linalg.norm(run(8).grads[name] - expected) / np.linalg.norm(expected)
        assert error < 1e-5, (name, error)


def test_losses_are_the_same_over_a_change_of_stage_and_the_untie():
    one = run(1).losses
    np.testing.assert_allclose(run(8).losses, one, rtol=1e-5)
    assert len(set(one)) == len(one)


# ---- What is updated, and when -------------------------------------------------------------------
# The rows that the model uses of parameters with a row for each layer: layer 1 is a MUDD layer.
USED_ROWS = dict(attn_lambdas=[0], mlp_lambdas=[0], value_gates=[0], skip_lambdas=[1])


@pytest.mark.parametrize("devices", [1, 8])
def test_all_of_the_model_changes_and_none_of_its_padding(devices):
    """First steps update banks, second steps everything, and lookups are copies of parameters. In
    padding, NorMuon divides 0 by 0, which must not become NaN."""
    snapshots = run(devices).snapshots
    for step in range(MINI.total_steps):
        before, after = snapshots[step : step + 2]
        assert [*after.lookups] == LOOKUPS
        for name in TABLE:
            changed = np.any(before.params[name] != after.params[name])
            assert changed == (step % 2 == 1 or name in BANKS), (step, name)
            if name in LOOKUPS:
                np.testing.assert_array_equal(after.lookups[name], after.params[name])
    first, last = snapshots[0].params, snapshots[-1].params
    padding = 0
    for name, param in TABLE.items():
        shape = param.shape[1:] if param.kind in (LOOKUP, REPLICATED) else param.shape[2:]
        changed = (last[name] != first[name]).reshape(-1, *shape)
        real = np.zeros(changed.shape, bool)
        real[: param.model_shape[0]] = True
        padding += np.sum(~real)
        assert np.isfinite(last[name]).all(), name
        assert not (changed & ~real).any(), f"padding of {name}"
        if name in BANKS:  # every matrix
            assert changed[: param.model_shape[0]].any(axis=(1, 2)).all(), name
        elif name in LOOKUPS or name == "ngram":
            assert changed.any(), name
        else:
            used = USED_ROWS.get(name, [*range(len(changed))])
            assert changed[used].mean() > 0.9, name
            assert not np.delete(changed, used, axis=0).any(), name
    assert padding


# ---- The compiled program ------------------------------------------------------------------------
def collectives(text: str, kind: str, dtype: str = "bf16|f32") -> list[list[int]]:
    """The sizes, in elements, of what each collective of a kind returns: of arrays of these dtypes.
    It may return a tuple."""
    shape = re.compile(rf"\b(?:{dtype})\[([\d,]*)\]")
    sizes = []
    for line in re.findall(rf"= (.*?) {kind}(?:-start)?\(", text):
        found = [[int(n) for n in dims.split(",") if n] for dims in shape.findall(line)]
        if found:
            sizes.append([int(np.prod(dims, initial=1)) for dims in found])
    return sizes


@pytest.mark.parametrize("step", [0, 1])
def test_each_weight_is_sent_once_and_none_is_all_reduced(step):
    """All-gathers: matrices in every step, lookups in second steps. Reduce-scatters: gradients, to
    their owners. Of the n-gram table, devices exchange the rows that they read: first the numbers
    of the rows, then the rows, then their gradients."""
    hlo = train_program(step, 8).as_text()
    sizes = {name: int(np.prod(TABLE[name].shape)) for name in TABLE}
    groups = []
    for name in BANKS:
        count = TABLE[name].shape[0]
        groups += [sizes[name] // count] * count
    lookups = [sizes[name] for name in LOOKUPS]
    sent = [*groups, *lookups] if step == 1 else groups
    assert sorted(itertools.chain(*collectives(hlo, "all-gather"))) == sorted(sent)
    owned = sum(groups + lookups)
    assert sum(itertools.chain(*collectives(hlo, "reduce-scatter"))) == owned // 8
    # Only the gradients of replicated parameters and the loss are all-reduced. They are smaller
    # than any part that a device owns.
    smallest = min(groups + lookups) // 8
    assert 0 < max(itertools.chain(*collectives(hlo, "all-reduce"))) < smallest
    # A device reads two sequences in one microbatch.
    rows = MINI.batch // 8 * 8 * SLOTS
    assert [sum(x) for x in collectives(hlo, "all-to-all", "s32")] == [rows]
    assert [sum(x) for x in collectives(hlo, "all-to-all")] == [rows * MINI.D] * 2


def test_training_is_in_fp8_and_validation_is_not_and_float32_is_exact(monkeypatch):
    """As the programs are before they are compiled."""
    monkeypatch.setattr(jax.stages.Lowered, "compile", lambda lowered, _: lowered.as_text())
    exact = train_gpt.compile_val_step(1, MINI32, make_mesh(8))
    assert 0 < exact.count("dot_general") == exact.count("precision = [HIGHEST, HIGHEST]")
    train = train_gpt.compile_train_step(1, True, MINI, make_mesh(8))
    val = train_gpt.compile_val_step(1, MINI, make_mesh(8))
    for name in "f8E4M3FN", "f8E5M2":
        assert name in train and name not in val
