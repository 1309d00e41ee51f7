"""What only record92 has: the same training on 1, 2, 4 and 8 devices, programs that stages share,
averages in checkpoints, and candidates and masks against slow definitions."""

import dataclasses
import functools
import json
from collections import Counter

import jax
import jax.numpy as jnp
import launch
import numpy as np
import pytest

import train_gpt
from tests.golden import on_one_device
from tests.small92 import with_files
from tests.test_run import signal_handlers
from tests.tools import (
    FLOAT32,
    MINI,
    bigram_rows,
    make_mesh,
    make_random_state,
    noise,
    place_on,
    random_params,
    schedule_row,
    sequences,
    text,
    write_shard,
)
from train_gpt import LONG, SHORT, Average, Layer, Stage

RECORD92 = train_gpt.PRESETS["record92"]
LAYERS = (
    Layer(SHORT, paired_heads=True, narrow_qk=True, bigram=True, value_table=0),
    Layer(SHORT, narrow_qk=True, narrow_v=True, xsa=True, mlps=2, x0=False),
    Layer(None, bigram=True, mlps=0),
    Layer(LONG, key_offset=True, head_gate=True, value_table=1, attend_to=0,
          mudd=("input", "layer0"), new_gates=True),
)  # fmt: skip
STAGES = (
    Stage(2, 512, short=4, long=12, max_doc=0, lr=1.0, targets=(1.0, (0.5, 0.0)), candidates=128),
    Stage(2, 512, short=4, long=12, max_doc=0, lr=1.5, candidates=192),
)
AVERAGES = (
    Average(("embed", "head", "value0"), start=2 / 4, every=1, memory=0.8, blend=0.65),
    Average(("qk", "vo", "mlp"), start=2 / 4, every=1, memory=2.5, blend=0.5),
)
# Four steps: the tables' gradients of the first wait, and so do those of the third. Engagement, the
# averages and the untie begin in the middle.
C = dataclasses.replace(
    MINI, layers=LAYERS, stages=STAGES, averages=AVERAGES, D=48, F=88, mudd_groups=12,
    mudd_head=(("input", 0.0), ("value1", 0.0), ("norm(middle3)", 0.0), ("norm(layer0)", -0.5)),
    ngram_optimizer="row_adam", segment=20, batch=8, microbatch=1, copy=0, adam_every=1,
    table_every=2, matrix_optimizer="anvil", engage=2 / 4, untie=1 / 4, cooldown_start=1 / 4,
    cooldown_end=3 / 4, **FLOAT32,
)  # fmt: skip
T = C.sequence_length(0)


@functools.cache
def program(stage: int, updates: train_gpt.Updates, devices: int):
    return train_gpt.compile_train_step(stage, updates, C, make_mesh(devices))


@functools.cache
def run(devices: int) -> tuple[list[float], dict, dict]:
    """The losses of the steps, the last parameters and what is validated. Even steps are of the
    first stage and odd ones of the second, so that two programs suffice."""
    mesh = make_mesh(devices)
    state = make_random_state(C, mesh)
    losses = []
    for step in range(C.total_steps):
        stage = step % 2
        first = schedule_row(C, 2 * stage, mesh)
        row = schedule_row(C, step, mesh)._replace(loss_weights=first.loss_weights)
        tokens = place_on(mesh, sequences(C, T, seed=step))
        state, loss = program(stage, C.updates(step), devices)(state, tokens, row)
        losses.append(float(loss))
    weights = train_gpt.validated(state, C)
    return losses, train_gpt.unpad(state.params, C), train_gpt.unpad(weights, C)


@pytest.mark.parametrize("devices", [8, *(pytest.param(n, marks=pytest.mark.slow) for n in (2, 4))])
def test_any_number_of_devices_trains_alike(devices):
    assert C.updates(0) == C.updates(2) and C.updates(1) == C.updates(3)
    losses, _, weights = run(devices)
    one, _, weights_of_one = run(1)
    assert losses[0] == pytest.approx(one[0], rel=1e-6)
    np.testing.assert_allclose(losses, one, rtol=5e-4)
    for name, expected in weights_of_one.items():
        difference = np.linalg.norm(weights[name] - expected)
        assert difference < 5e-3 * np.linalg.norm(expected), name


def test_the_first_loss_is_the_mean_over_single_sequences():
    """Each has its own candidates, from a sweep that begins an eighth of all tokens further on."""
    V = train_gpt.padded_vocab(C)
    params = jax.tree.map(jnp.asarray, random_params(C))
    row = train_gpt.schedule(C)[0]

    @jax.jit
    def loss(tokens_1S, number):
        with pytest.MonkeyPatch.context() as patch:  # outside shard_map there are no collectives
            patch.setattr(train_gpt.lax, "all_gather", lambda x, *_, **__: x)
            patch.setattr(train_gpt.lax, "pcast", lambda x, *_, **__: x)
            w = bigram_rows(train_gpt.whole_weights(params, C), tokens_1S[:, :-1], C)
        sweep_start = row.sweep_start + number * V // 8
        return train_gpt.loss_fn(w, tokens_1S, {1: 1.0, 2: 0.5}, C, 0, sweep_start)

    batch = sequences(C, T)
    losses = [float(loss(batch[i : i + 1], i)) for i in range(8)]
    assert run(1)[0][0] == pytest.approx(np.mean(losses) / T, rel=1e-6)


def test_narrow_heads_use_and_change_half_of_their_channels():
    """Also of the first layer, whose heads are paired. Other layers change all of them."""
    first = train_gpt.unpad(make_random_state(C, make_mesh(1)).params, C)
    _, last, _ = run(1)
    K = C.D // C.H
    narrow = K // 2
    table = train_gpt.param_table(C)
    changed = {name: last[name] != first[name] for name in ("qk", "vo")}
    for i, matrix in zip(table["qk"].layers, changed["qk"], strict=True):
        share = matrix.reshape(2, K, C.D).mean(axis=(0, 2))  # of a matrix's two heads
        used = narrow if C.layers[i].narrow_qk else K
        assert share[:used].min() > 0.9 and not share[used:].any(), i
    for n, (i, matrix) in enumerate(zip(table["vo"].layers, changed["vo"], strict=True)):
        channels = matrix.T if n % 2 else matrix  # w_v has a row for each channel, w_o a column
        share = channels.reshape(C.H, K, C.D).mean(axis=(0, 2))
        used = narrow if C.layers[i].narrow_v else K
        assert share[:used].min() > 0.9 and not share[used:].any(), i


# ---- Updates -------------------------------------------------------------------------------------
# The smallest model with a matrix and a table. Adam works in every second step and moves the tables
# in every fourth.
SLOW = dataclasses.replace(
    C, layers=(Layer(LONG, value_table=0),), mudd_head=(), mudd_groups=0, averages=(),
    stages=(dataclasses.replace(STAGES[0], steps=8),), adam_every=2, untie=0.0, engage=1.0,
    ngram_optimizer="adam",
)  # fmt: skip


@functools.cache
def four_steps() -> tuple[dict, list[train_gpt.State]]:
    """Gradients that do not change, and the states before the first and after every step."""
    state = train_gpt.initial_state(np.uint32(0), SLOW)
    params = {name: jnp.asarray(p) for name, p in random_params(SLOW).items()}
    states = [state._replace(params=params)]
    grads = {name: jnp.asarray(noise(name, p.shape, 1)) for name, p in params.items()}
    for step in range(4):
        update = functools.partial(
            train_gpt.update_parameters, c=SLOW, updates=SLOW.updates(step)
        )  # fmt: skip
        row = train_gpt.schedule(SLOW)[step]
        states.append(on_one_device(update)(states[-1], grads, row))
    return grads, states


def test_gradients_wait_for_the_step_that_updates():
    grads, states = four_steps()
    matrices = {"qk", "vo", "mlp"}
    small = grads.keys() - {"bigram", "value0"}
    for step, expected in enumerate([set(), matrices, small, small, grads.keys()]):
        now = states[step].params
        moved = {name for name, p in now.items() if np.any(p != states[0].params[name])}
        assert moved == expected, step
    # Means of Adam begin at 0: head has got 2 gradients, then again 2, the value table 4 at once.
    adam, table = states[4].opt_state["head"], states[4].opt_state["value0"]
    np.testing.assert_allclose(adam.mu, (0.5 + 0.25) * 2 * grads["head"], rtol=1e-5)
    np.testing.assert_allclose(table.mu, (1 - 0.75**2) * 4 * grads["value0"], rtol=1e-5)
    np.testing.assert_allclose(table.nu, (1 - 0.95**2) * (4 * grads["value0"]) ** 2, rtol=1e-5)


def test_the_decay_of_tables_that_are_updated_half_as_often_is_doubled():
    grads, states = four_steps()
    rate = train_gpt.schedule(SLOW)[3].adam_lr
    p = np.asarray(states[0].params["value0"], np.float64)
    sign = np.sign(grads["value0"])  # what Adam's first update is
    lr = rate * SLOW.table_lr
    decay = lr**2 * 0.005 * 5 * 2
    expected = p - lr * sign - decay * np.where(sign * p > 0, p, 0)
    found = np.asarray(states[4].params["value0"])
    rows = train_gpt.param_table(SLOW)["value0"].rows
    assert np.abs(found - expected)[:rows].max() < 1e-5


def test_matrices_decay_where_the_slow_rail_shrinks_them():
    """That is not where the update does, because the slow rail goes on after the gradient turns."""
    param = train_gpt.param_table(SLOW)["qk"]
    p = jnp.asarray(noise("qk", param.shape))
    slow = jnp.asarray(noise("slow", param.shape))
    state = train_gpt.initial_state(np.uint32(0), SLOW)
    _, first_squares = train_gpt.normuon(SLOW).init(p)
    opt_state = state.opt_state | {"qk": train_gpt.Rails(slow, slow, first_squares)}
    state = state._replace(params=state.params | {"qk": p}, opt_state=opt_state)
    grads = {name: jnp.asarray(noise(name, x.shape, 1)) for name, x in state.params.items()}
    row = train_gpt.schedule(SLOW)[0]
    found = {}
    for name, decay in ("with", 2.25), ("without", 0.0):
        table = train_gpt.param_table(SLOW)
        table["qk"] = table["qk"]._replace(weight_decay=decay)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(train_gpt, "param_table", lambda c, table=table: table)
            update = functools.partial(
                train_gpt.update_parameters, c=SLOW, updates=SLOW.updates(0)
            )  # fmt: skip
            found[name] = on_one_device(update)(state, grads, row)
    after = found["with"].opt_state["qk"].slow
    decayed = np.asarray(found["with"].params["qk"] != found["without"].params["qk"])
    used = np.broadcast_to(param.lr > 0, p.shape)
    np.testing.assert_array_equal(decayed[used], np.asarray(after * p > 0)[used])


def test_averages_change_what_is_validated_but_not_its_norm():
    _, params, weights = run(1)
    averaged = {name for row in AVERAGES for name in row.params}
    assert averaged < params.keys()
    for name, p in params.items():
        assert np.any(weights[name] != p) == (name in averaged), name
        if name in averaged:
            assert np.linalg.norm(weights[name]) == pytest.approx(np.linalg.norm(p), rel=1e-4)


def test_a_run_resumes_and_saves_what_it_has_validated(tmp_path, monkeypatch):
    """With averages in the checkpoint and a mask in validation. Two layers are enough."""
    c = with_files(tmp_path, C)
    c = dataclasses.replace(
        c,
        layers=(LAYERS[0], LAYERS[-1]),
        mudd_head=C.mudd_head[:2],
        val_every=4,
        val_T=64,
        val_tokens=1024,
        data=str(tmp_path),
        target=0.0,
        stall=0,
    )
    for name in "train_000001", "val_000000":
        write_shard(tmp_path / f"x_{name}.bin", text(4000))
    mine = jax.devices()[:2]
    monkeypatch.setattr(jax, "devices", lambda: mine)
    monkeypatch.setitem(train_gpt.PRESETS, "record92", c)
    monkeypatch.chdir(tmp_path)

    found = []  # what validated() returns, in turn

    def validated(state, c, real=train_gpt.validated):
        found.append(real(state, c))
        return found[-1]

    monkeypatch.setattr(train_gpt, "validated", validated)

    def weights_of(*flags):
        with signal_handlers():
            path = train_gpt.main(["record92", "--seed", "3", *flags])
        with np.load(path) as file:
            return dict(file), json.loads(file["result"].item())

    whole, result = weights_of("--save_every", "2")
    (state,) = tmp_path.glob("logs/*/0000002.state")
    resumed, _ = weights_of("--resume", str(state))
    names = train_gpt.param_table(c).keys()
    last = train_gpt.unpad(found[-1], c)
    for name in names:
        np.testing.assert_array_equal(resumed[name], whole[name])
        np.testing.assert_array_equal(whole[name], last[name])

    # The loss of the saved weights is the one that the run has printed.
    mesh = make_mesh(1)
    params = {}
    for name, like in train_gpt.state_shapes(c, mesh).params.items():
        shape = train_gpt.param_table(c)[name].model_shape
        padded = np.zeros(like.shape, np.float32)
        padded.reshape(-1, *shape[1:])[: shape[0]] = whole[name]
        params[name] = jax.device_put(padded, like.sharding)
    shards = {"val": [train_gpt.open_shard(tmp_path / "x_val_000000.bin")]}
    programs = {(c.program_stage(4), "val"): train_gpt.compile_val_step(1, c, mesh)}
    loss, _ = train_gpt.validate(params, 4, c, mesh, programs, shards)
    assert loss == pytest.approx(result["val_loss"], rel=1e-5)


# ---- Programs ------------------------------------------------------------------------------------
def test_stages_of_equal_shapes_share_programs():
    c = RECORD92
    train = {(c.program_stage(step), c.updates(step)) for step in range(c.total_steps)}
    val = {c.program_stage(step) for step in range(c.total_steps + 1) if c.validates_before(step)}
    assert Counter(stage for stage, _ in train) == {0: 2, 1: 4, 5: 4, 6: 4, 7: 4, 8: 4}
    assert sorted(val) == [0, 1, 5, 6, 9]


def test_record_89_has_neither_averages_nor_their_arguments():
    c = train_gpt.PRESETS["record"]
    state = jax.eval_shape(lambda: train_gpt.initial_state(np.uint32(0), c))
    assert state.averages == []
    row = train_gpt.schedule(c)[0]
    used = [name for name, number in zip(row._fields, row, strict=True) if jax.tree.leaves(number)]
    assert used == ["adam_lr", "muon_lr", "momentum", "tied", "loss_weights", "table_step"]


# ---- Candidates and mask -------------------------------------------------------------------------
def test_candidates_are_all_targets_and_the_first_others_of_the_sweep():
    V = train_gpt.padded_vocab(C)
    for first, P in (0, 100), (301, 200), (7, V):
        targets = sequences(C, T, seed=first, count=1)[:, 1:]
        tokens, place = train_gpt.candidate_tokens(jnp.asarray(targets), first, P, C)
        chosen = set(targets.flat)
        k = first
        while len(chosen) < P:
            chosen.add(20011 * k % V)
            k += 1
        assert tokens.tolist() == sorted(chosen)
        assert [int(place[token]) for token in tokens] == list(range(P))
        assert np.sum(np.asarray(place) >= 0) == P


def test_sweeps_begin_at_eighths_and_move_on():
    """So all tokens are candidates in some step."""
    rows = train_gpt.schedule(RECORD92)
    V = train_gpt.padded_vocab(RECORD92)
    seen = np.zeros(V, bool)
    for step in range(24):
        for sequence in range(8):
            first = int(rows[step].sweep_start) + sequence * V // 8
            k = first + np.arange(4000)
            seen[20011 * (k % V) % V] = True
    assert seen.all()
    assert len({int(row.sweep_start) for row in rows[:320]}) == 320


def test_too_few_candidates_are_refused_before_the_run(monkeypatch, capsys):
    tokens = np.arange(5000, dtype=np.uint16) % 250
    monkeypatch.setattr(train_gpt, "find_data", lambda c: {"train": [tokens]})

    def check(P):
        stage = dataclasses.replace(STAGES[0], candidates=P)
        launch.check_candidates(train_gpt, dataclasses.replace(C, stages=(stage,)))

    check(T)
    with pytest.raises(SystemExit):
        check(T - 1)
    assert f"step 0 reads {T} distinct tokens at once, but has {T - 1}" in capsys.readouterr().err


def test_masked_tokens_have_no_probability_in_validation(monkeypatch):
    """They depend on the token before. A target that is masked is not an exception: that would be a
    look at the answer."""
    N, V = 32, 64
    rng = np.random.default_rng(0)
    x, head = (jnp.asarray(rng.normal(size=(n, C.D)), "float32") for n in (N, V))
    tokens = rng.integers(0, V, N + 1).astype(np.int32)
    bits = rng.random((5, 16)) < 0.3
    row_of = rng.integers(0, 5, V).astype(np.uint16)
    column_of = rng.integers(0, 16, V).astype(np.uint16)
    never = bits[:, column_of]
    arrays = row_of, column_of, np.packbits(bits, axis=1, bitorder="little")
    mask = tuple(jnp.asarray(array) for array in arrays)
    monkeypatch.setattr(train_gpt, "forward", lambda *_: x[None])
    monkeypatch.setattr(train_gpt, "norm", lambda x: x)
    c = dataclasses.replace(C, head_chunk=8).for_validation()
    found = train_gpt.loss_fn({"head": head}, jnp.asarray(tokens)[None], {1: 1.0}, c, 1, mask=mask)
    s = np.asarray(train_gpt.softcap(x @ head.T), np.float64)
    s[never[row_of[tokens[:-1]]]] = -60
    log_p = s - np.log(np.exp(s).sum(axis=1, keepdims=True))
    expected = -np.take_along_axis(log_p, tokens[1:, None], axis=1)
    assert (expected > 50).any() and (expected < 50).any()
    assert float(found) == pytest.approx(expected.sum(), rel=1e-6)
