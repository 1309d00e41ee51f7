"""Checks of four patches in records/ideas/. Each takes the patched train_gpt.py as a module, and a
small config of its preset `record` in float32, and compares parts with numbers that upstream's
functions made (golden_r92.py), or with formulas that are written here in a slow way."""

import dataclasses
import functools
import hashlib
from unittest.mock import patch

import jax
import jax.numpy as jnp
import numpy as np

import train_gpt
from records.upstream92.golden_r92 import GOLDEN, META, normal, relative
from tests.tools import bank_matrices, make_mesh, ngram_rows, noise, place_on, sequences


def start(module, c, devices: int) -> tuple:
    """A mesh, and the state before the first step."""
    mesh = make_mesh(devices)
    return mesh, module.make_state(c, mesh)


@functools.cache
def program_of(module, c, mesh):
    """The program of a step: all are alike."""
    return module.compile_train_step(0, True, c, mesh)


def take_step(module, c, mesh, state, step: int) -> tuple:
    """The state after a step on random tokens, and its loss."""
    tokens = sequences(c, c.sequence_length(0), seed=step)
    everywhere = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    row = jax.device_put(module.schedule(c)[step], everywhere)
    state, loss = program_of(module, c, mesh)(state, place_on(mesh, tokens), row)
    return state, float(loss)


def with_one_layer(module, c):
    """A config whose programs are traced fast."""
    layers = (module.Layer(module.LONG, ngram=True, value_table=0),)
    return dataclasses.replace(c, layers=layers, mudd_head=())


# ---- sampled_softmax -----------------------------------------------------------------------------
COUNT = 96  # candidates of the small model


def check_sampled_softmax(module, c) -> None:
    """Candidates, loss and gradients are upstream's. Validation has all tokens. Each sequence of a
    step has its own sweep. With too few candidates, the pointer keeps its row."""
    check_golden_candidates(module, c)
    check_golden_losses(module, c)
    stages = tuple(dataclasses.replace(stage, candidates=COUNT) for stage in c.stages)
    c = dataclasses.replace(with_one_layer(module, c), stages=stages, microbatch=1, pointer=4)
    check_too_few_candidates(module, c)
    check_sweeps(module, c)


def golden_config(module, c):
    """The config of the golden numbers."""
    stage = module.Stage(1, 8 * META["N"], 8, 8, max_doc=0, lr=1.0, candidates=META["P"])
    sizes = dict(D=META["Dh"], vocab=META["V"], head_chunk=META["N"] // 2, microbatch=1, pointer=0)
    return dataclasses.replace(c, stages=(stage,), **sizes)


def check_golden_candidates(module, c) -> None:
    """Candidates and places of three calls in a row on two ranks, and of the whole vocabulary."""
    small = golden_config(module, c)
    candidates = jax.jit(module.candidate_tokens, static_argnums=(2, 3))
    for rank in 0, 5:
        first = GOLDEN[f"ss/rank{rank}/offset0"]
        for call in range(3):
            key = f"ss/rank{rank}/call{call}/"
            targets = GOLDEN[key + "targets"]
            tokens, place = candidates(targets, np.int32(first), META["P"], small)
            np.testing.assert_array_equal(tokens, GOLDEN[key + "candidates"])
            np.testing.assert_array_equal(place[targets], GOLDEN[key + "target_pos"])
            first = GOLDEN[key + "offset_after"]
    record = module.PRESETS["record"]
    record = dataclasses.replace(record, pointer=0)
    targets = GOLDEN["ss/gpt2/targets_distinct"]
    tokens, _ = candidates(targets, np.int32(0), record.stages[0].candidates, record)
    sha256 = hashlib.sha256(np.asarray(tokens).astype("<i4").tobytes()).digest()
    assert sha256 == GOLDEN["ss/gpt2/candidates_sha256"].tobytes()


def check_golden_losses(module, c) -> None:
    """Losses with one target, and with three and a prefix, and their gradients. In validation, also
    of several short sequences at once, the loss of all tokens."""
    c = golden_config(module, c)
    x, head = normal("ss/x", (META["N"], META["Dh"])), normal("ss/w", (META["V"], META["Dh"]))
    tokens = np.concatenate(([0], GOLDEN["ss/rank0/call0/targets"]))[None].astype(np.int32)
    sweep_start = jnp.int32(GOLDEN["ss/rank0/offset0"])

    def loss(x, head, name, sweep_start, c):
        *ahead, prefix = (float(weight) for weight in GOLDEN[f"ss/{name}/weights"])
        weights = {k: weight for k, weight in enumerate([prefix, *ahead]) if weight}
        return module.loss_fn({"x": x, "head": head}, tokens, weights, c, 0, None, sweep_start)

    given = dict(forward=lambda w, *_: w["x"][None], norm=lambda x: x)
    given["prefix_table"] = lambda c: GOLDEN["ss/prefix_table"]
    validation = dataclasses.replace(c, val_T=META["N"] // 4).for_validation()
    assert validation.microbatch == 1
    with patch.multiple(module, **given):
        value = jax.jit(jax.value_and_grad(loss, (0, 1)), static_argnums=(2, 4))
        for name in "one", "three":
            total, (dx, dhead) = value(x, head, name, sweep_start, c)
            candidates = GOLDEN["ss/rank0/call0/candidates"]
            np.testing.assert_allclose(total, GOLDEN[f"ss/{name}/loss_sum"], rtol=1e-6)
            assert relative(dx, GOLDEN[f"ss/{name}/dx_true"]) < 1e-5
            assert relative(dhead[candidates], GOLDEN[f"ss/{name}/dw_true"]) < 1e-5
            assert not np.delete(dhead, candidates, axis=0).any()
        total, (dx, _) = value(x, head, "three", None, validation)
    np.testing.assert_allclose(total, GOLDEN["ss/full/loss"].sum(), rtol=1e-6)
    assert relative(dx, GOLDEN["ss/full/dx_true"]) < 1e-5


def check_too_few_candidates(module, c) -> None:
    """Of five different targets, the three with the lowest ids are candidates; so is the slot."""
    targets = np.array([[200, 3, 9, 5, 3, 77]])
    candidates, place = module.candidate_tokens(targets, jnp.int32(0), 4, c)
    np.testing.assert_array_equal(candidates, [3, 5, 9, c.vocab])
    want = np.full(c.vocab, -1)
    want[[3, 5, 9]] = 0, 1, 2
    np.testing.assert_array_equal(place, want)


def check_sweeps(module, c) -> None:
    """The loss of step 1, on two devices with four sequences each, is that of sequences whose
    sweeps start at 1 * COUNT + V i / 8."""
    mesh, state = start(module, c, 2)
    head = 40 * state.lookups["head"]  # or all tokens would have about the same probability
    weights = jax.tree.map(np.asarray, state.params) | {"head": np.asarray(head)}
    for name, param in module.param_table(c).items():
        if param.layers:
            matrices = weights[name].reshape(-1, *param.model_shape[1:])[: len(param.layers)]
            weights[name] = bank_matrices(name, matrices, c)
    state = state._replace(lookups=state.lookups | {"head": head})
    _, loss = take_step(module, c, mesh, state, 1)
    shares = module.schedule(c)[1].loss_weights

    @jax.jit
    def loss_of(w, tokens, sweep_start):
        w = ngram_rows(w, tokens[:, :-1], c)
        return module.loss_fn(w, tokens, {1: shares[0], 2: shares[1]}, c, 0, None, sweep_start)

    tokens = sequences(c, c.sequence_length(0), seed=1)
    starts = COUNT + np.arange(8) * module.padded_vocab(c) // 8
    losses = [loss_of(weights, tokens[i : i + 1], starts[i]) for i in range(8)]
    np.testing.assert_allclose(loss, sum(losses) / tokens[:, 1:].size, rtol=1e-5)


# ---- anchored_gradients --------------------------------------------------------------------------
def check_anchored_gradients(module, c) -> None:
    """Two steps on eight devices are those of a reference on one. Until late in the run, averages
    equal the matrices, and nothing is pushed."""
    record = module.PRESETS["record"]
    rows = module.schedule(record)
    pushes = np.array([row.anchor_push for row in rows])
    ends = np.searchsorted(pushes, [1e-9, 0.45 - 1e-6]) / len(rows)
    np.testing.assert_allclose(ends, record.anchor_ramp, atol=2e-3)
    rates = np.array([row.anchor_rate for row in rows])
    first = np.argmax(rates < 1)
    assert abs(first / len(rows) - 2040 / 2580) < 2e-3 and (rates[:first] == 1).all()
    np.testing.assert_allclose(rates[first:], 2580 / 100 / len(rows), rtol=1e-6)

    active = {"anchor_start": 0.0, "anchor_memory": 1.0, "anchor_ramp": (-1.0, 0.4)}
    c = dataclasses.replace(with_one_layer(module, c), **active)
    assert [row.anchor_push > 0.3 for row in module.schedule(c)] == [True] * 3
    mesh, state = start(module, c, 8)
    opt_state = dict(state.opt_state)
    for name in "qk", "vo", "mlp":
        anchor = opt_state[f"{name}_anchor"]
        assert anchor.sharding == state.params[name].sharding  # each device has its matrices
        far = np.asarray(state.params[name]) + 0.02 * noise(name, anchor.shape)
        opt_state[f"{name}_anchor"] = jax.device_put(far, anchor.sharding)
    state = state._replace(opt_state=opt_state)
    for step in 0, 1:
        before = jax.tree.map(np.asarray, state)
        state, _ = take_step(module, c, mesh, state, step)
        check_against_reference(module, c, before, jax.tree.map(np.asarray, state), step)


def check_against_reference(module, c, before, after, step: int) -> None:
    """A step, from what train_gpt.py without the patch computes at the matrices y."""
    row = module.schedule(c)[step]
    y, banks = dict(before.params), ("qk", "vo", "mlp")
    for name in banks:
        w, anchor = before.params[name], before.opt_state[f"{name}_anchor"]
        anchor = anchor + row.anchor_rate * (w - anchor)
        assert relative(after.opt_state[f"{name}_anchor"], anchor) < 1e-6
        y[name] = w + row.anchor_push * (w - anchor)
    base = {field.name: getattr(c, field.name) for field in dataclasses.fields(train_gpt.Config)}
    base = train_gpt.Config(**base)
    opt_state = {name: before.opt_state[name] for name in y}
    at_y = train_gpt.State(*before)._replace(params=y, opt_state=opt_state)
    mesh = make_mesh(1)
    shapes = train_gpt.state_shapes(base, mesh)
    at_y = jax.tree.map(lambda x, like: jax.device_put(x, like.sharding), at_y, shapes)
    plain, _ = take_step(train_gpt, base, mesh, at_y, step)
    for name in y:
        states = after.opt_state[name], plain.opt_state[name]
        for a, b in zip(*map(jax.tree.leaves, states), strict=True):
            assert relative(a, b) < 1e-4, name
        if name not in banks:
            assert relative(after.params[name], plain.params[name]) < 1e-4, name
    for name in banks:  # the update of y, but for its decay, updates w
        param = module.param_table(c)[name]
        rate = row.muon_lr * param.lr
        decay = row.muon_lr * param.weight_decay
        moved = (y[name] - np.asarray(plain.params[name])) / np.where(rate, rate, 1)
        update = moved - decay * np.where(moved * y[name] > 0, y[name], 0)
        w = before.params[name]
        want = w - rate * (update + decay * np.where(update * w > 0, w, 0))
        assert relative(after.params[name], want) < 1e-4


# ---- head_rows -----------------------------------------------------------------------------------
def check_head_rows(module, c) -> None:
    """The gradient for the head's weights is the formula; if each of four successive tokens is in
    turn the one that counts, the mean is the full gradient. The loss and dx are as without the
    patch, also with a pointer. In FP8, this holds to the precision of the formats."""
    fp8 = {"head_forward": "float8_e4m3fn", "head_backward": "float8_e5m2"}
    check_four_turns(module, c, 1e-5)
    check_four_turns(module, dataclasses.replace(c, pointer=4), 1e-5)
    check_four_turns(module, dataclasses.replace(c, **fp8), 0.07)


def check_four_turns(module, c, tolerance: float) -> None:
    """Compares head_loss() with that of train_gpt.py."""
    N, V = 2 * c.head_chunk, module.padded_vocab(c)
    x, w = noise("x", (N, c.D)), 0.5 * noise("w", (V, c.D))
    targets = np.random.default_rng(0).integers(-9, c.vocab, (N, 2)).clip(-1)
    targets[:, 0] = np.maximum(targets[:, 0], 0)  # the next token is never missing
    weights = np.float32([0.7, 0.3])
    copied = np.random.default_rng(1).uniform(0, 0.5, (N, 3)).cumsum(axis=1).astype("f4")

    def gradients(code, turn: int):
        """Loss, dx and dw, with all tokens `turn` places later."""
        arrays = [jnp.asarray(np.roll(a, turn, axis=0)) for a in (x, targets, copied)]
        value = jax.value_and_grad(code.head_loss, (0, 1))
        run = jax.jit(value, static_argnums=5)
        loss, (dx, dw) = run(arrays[0], w, arrays[1], weights, arrays[2], c)
        return float(loss), np.roll(dx, -turn, axis=0), np.asarray(dw)

    loss, dx, dw = gradients(train_gpt, 0)
    turns = [gradients(module, turn) for turn in range(4)]
    for one_loss, one_dx, one_dw in turns:
        assert abs(one_loss - loss) <= 1e-5 * loss and relative(one_dx, dx) <= 1e-5
        assert relative(one_dw, dw) > 0.1
    assert relative(np.mean([turn[2] for turn in turns], axis=0), dw) < tolerance
    if not c.pointer:
        s = 1 / (1 + np.exp(-(x.astype("f8") @ w.T + 5) / 7.5))
        p = np.exp(23 * s)
        counted = 4 * (np.arange(N) % 4 == 0)[:, None]
        dloss = counted * (weights * (targets >= 0)).sum(1, keepdims=True) * p / p.sum(1)[:, None]
        for token, j in zip(*np.nonzero(targets >= 0), strict=True):
            dloss[token, targets[token, j]] -= weights[j]
        want = (dloss * 23 / 7.5 * s * (1 - s)).T @ x
        assert relative(turns[0][2], want) < max(tolerance, 1e-5)


# ---- adam_every_step -----------------------------------------------------------------------------
def check_adam_every_step(module, c) -> None:
    """A run has one program for each stage, and Adam's parameters move in every step."""
    record = module.PRESETS["record"]
    programs = {(record.stage_at(i), record.is_adam_step(i)) for i in range(record.total_steps)}
    assert programs == {(stage, True) for stage, _ in programs}
    c = dataclasses.replace(with_one_layer(module, c), adam_every=record.adam_every)
    mesh, state = start(module, c, 1)
    assert state.waiting_grads == {}
    table = module.param_table(c)
    for step in 0, 1:
        before = jax.tree.map(np.asarray, state.params)
        state, _ = take_step(module, c, mesh, state, step)
        for name in "embed", "head", "ngram", "value0", "vo_lambdas", "gates_input.b2":
            assert not table[name].every_step
            assert np.any(before[name] != state.params[name]), name
    assert all(state.opt_state[name].count == 2 for name in table if not table[name].every_step)
