"""1, 2, 4 and 8 devices do the same: tokens, validation, gradients, losses; and how they talk."""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import train_gpt
from tests.tools import MINI, MINI32, make_mesh, make_random_state, place_on, sequences

COUNTS = (1, 2, 4, 8)
WINDOW = 24


@functools.cache
def stage(kind: str, devices: int, c: train_gpt.Config):
    return train_gpt.compile_stage(kind, WINDOW, c, make_mesh(devices))


def run(devices: int, c: train_gpt.Config, steps: int) -> tuple[list[float], dict]:
    mesh, step = make_mesh(devices), stage("train", devices, c)
    state, losses = make_random_state(c, mesh), []
    for i in range(steps):
        state, loss = step(state, place_on(mesh, sequences(c, c.T, seed=i)))
        losses.append(float(loss))
    return losses, {name: np.asarray(p) for name, p in state.params.items()}


@pytest.mark.parametrize("devices", COUNTS)
def test_the_stream_of_tokens_is_the_same(devices):
    """Every step is on the devices in the order of its rows."""
    shards = [np.arange(n, dtype=np.uint16) for n in (1100, 20, 2000, 513, 514)]
    mesh, c = make_mesh(devices), dataclasses.replace(MINI, T=32, steps=1000)
    batches = train_gpt.on_devices(train_gpt.stream(shards, c), mesh)
    for batch, expected in zip(batches, train_gpt.stream(shards, c), strict=True):
        parts = sorted(batch.addressable_shards, key=lambda part: part.index[0].start or 0)
        assert len(parts) == devices and batch.dtype == jnp.int32
        np.testing.assert_array_equal(np.concatenate([p.data for p in parts]), expected)


def test_the_stream_is_two_steps_ahead_and_ends():
    taken = []
    source = (taken.append(i) or np.full((8, 3), i, np.int32) for i in range(5))
    batches = train_gpt.on_devices(source, make_mesh(2))
    got = []
    for batch in batches:
        got.append(int(batch[0, 0]))
        assert len(taken) == min(5, got[-1] + 3)
    assert got == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("c, tolerance", [(MINI32, 1e-6), (MINI, 1e-3)], ids=["float32", "bf16"])
def test_validation_is_the_same(c, tolerance):
    params = run(1, c, 1)[1]
    losses = []
    for devices in COUNTS:
        mesh = make_mesh(devices)
        put = lambda p, x, mesh=mesh: jax.device_put(p, jax.sharding.NamedSharding(mesh, x.spec))
        placed = {k: put(params[k], row) for k, row in train_gpt.param_table(c).items()}
        losses.append(
            float(stage("val", devices, c)(placed, place_on(mesh, sequences(c, c.val_T))))
        )
    assert losses == pytest.approx([losses[0]] * 4, rel=tolerance)


def gradients(devices: int, c: train_gpt.Config) -> dict[str, np.ndarray]:
    """What reaches the optimizer of every device, put together: caught in place of the update."""
    mesh, caught = make_mesh(devices), train_gpt.optimizer
    with pytest.MonkeyPatch.context() as patch:
        rule = caught(c)
        spy = rule._replace(update=lambda g, state, params: (g, state))
        patch.setattr(train_gpt, "optimizer", lambda c: spy)
        patch.setattr(train_gpt.optax, "apply_updates", lambda params, g: g)
        step = train_gpt.compile_stage("train", WINDOW, c, mesh)
    c_seeded = make_random_state(c, mesh)
    state, _ = step(c_seeded, place_on(mesh, sequences(c, c.T)))
    return train_gpt.unpad(state.params, c)


def test_gradients_are_the_same_to_the_factor():
    """Adam and Muon hide a lost factor of 8, so compare what they are given: the mean over the 8
    sequences, also by hand from one sequence at a time, with no sharding and no accumulation."""
    c = dataclasses.replace(MINI32, microbatch=2)
    w = train_gpt.gather
    params = {k: np.asarray(p) for k, p in make_random_state(c, make_mesh(1)).params.items()}
    by_hand = {k: 0.0 for k in params}
    tokens = sequences(c, c.T)

    def loss(params, row):
        with pytest.MonkeyPatch.context() as patch:  # gather, where there is but one device
            patch.setattr(train_gpt.lax, "all_gather", lambda x, *_, **__: x)
            patch.setattr(train_gpt.lax, "pcast", lambda x, *_, **__: x)
            return train_gpt.loss_fn(w(params, c), row, c, WINDOW)

    one = jax.jit(jax.grad(loss))
    for row in tokens:
        grads = one(params, row[None])
        by_hand = {k: by_hand[k] + np.asarray(g, np.float64) for k, g in grads.items()}
    by_hand = train_gpt.unpad(by_hand, c)
    for devices in COUNTS:
        for name, g in gradients(devices, c).items():
            error = np.linalg.norm(g - by_hand[name]) / np.linalg.norm(by_hand[name])
            assert error < 1e-5, (devices, name, error)


def test_losses_are_the_same_in_float32():
    losses = [run(devices, MINI32, 20)[0] for devices in COUNTS]
    assert losses[0][-1] < losses[0][0] - 0.3
    for other in losses[1:]:
        np.testing.assert_allclose(other, losses[0], atol=5e-4)


def test_initial_weights_are_the_same():
    first, *others = (train_gpt.make_state(MINI, make_mesh(n)).params for n in COUNTS)
    for name in first:
        for other in others:
            np.testing.assert_array_equal(np.asarray(first[name]), np.asarray(other[name]))


# ---- The compiled program ------------------------------------------------------------------------

SHAPE = re.compile(r"(?:bf16|f32)\[([\d,]*)\]")


def collectives(text: str, kind: str) -> list[int]:
    """Elements of every array that the collectives of a kind return, tuples taken apart."""
    sizes = []
    for line in re.findall(rf"= (.*?) {kind}(?:-start)?\(", text):
        for dims in SHAPE.findall(line):
            sizes.append(int(np.prod([int(n) for n in dims.split(",") if n], initial=1)))
    return sizes


def weight_sized(c: train_gpt.Config) -> int:
    """Elements of the smallest share of a weight that one of 8 devices owns in a group."""
    matrices = [row.stored_shape for row in train_gpt.param_table(c).values() if len(row.shape) > 1]
    return min(s[-1] * s[-2] // (1 if len(s) == 4 else 8) for s in matrices if s[-1] * s[-2] > 64)


def test_eight_devices_reduce_scatter_and_all_reduce_no_weight():
    text = stage("train", 8, MINI).as_text()
    groups = sum(row.stored_shape[0] if row.spec == P(None, "fsdp") else 1
                 for row in train_gpt.param_table(MINI).values() if row.spec != P())  # fmt: skip
    stored = sum(
        int(np.prod(row.stored_shape))
        for row in train_gpt.param_table(MINI).values()
        if row.spec != P()
    )
    assert sum(collectives(text, "all-gather")) == stored
    assert len(collectives(text, "all-gather")) == groups
    assert sum(collectives(text, "reduce-scatter")) == stored // 8
    assert max(collectives(text, "all-reduce"), default=0) < weight_sized(MINI)
    assert collectives(text, "all-reduce")  # of the scalars and the loss: the search does find them


def test_training_is_in_fp8_and_validation_is_not():
    for kind, used in (("train", True), ("val", False)):
        text = stage(kind, 8, MINI).as_text()
        assert [name in text for name in ("f8e4m3fn", "f8e5m2")] == [used, used], kind


@pytest.mark.parametrize("c", [MINI32, MINI], ids=["float32", "bf16"])
@pytest.mark.parametrize("devices", [1, 8])
def test_the_prefetched_table_is_that_of_the_new_weights(devices, c):
    """At the start, and after a step, on every device; in float32 it is a buffer of its own."""
    mesh, step = make_mesh(devices), stage("train", devices, c)
    state = train_gpt.make_state(c, mesh)
    for i in range(4):  # the first step from a head of zeros moves no token
        before = np.asarray(state.params["embed"])
        expected = np.asarray(state.params["embed"].astype(c.compute))
        assert state.embed.dtype == c.compute and state.embed.sharding.is_fully_replicated
        for part in state.embed.addressable_shards:
            np.testing.assert_array_equal(np.asarray(part.data), expected)
        state, _ = step(state, place_on(mesh, sequences(c, c.T, seed=i)))
    assert np.any(before != np.asarray(state.params["embed"]))


@pytest.mark.parametrize("devices", [1, 8])
def test_the_same_sequences_three_times_give_the_same_gradients(devices):
    """Of a mean over 24 and over 8 sequences, as the momenta show: not only their directions."""
    mesh, thrice = make_mesh(devices), dataclasses.replace(MINI32, batch=24)
    once, momenta = sequences(MINI32, MINI32.T), []
    for c, tokens in (MINI32, once), (thrice, np.repeat(once, 3, axis=0)):
        state, _ = stage("train", devices, c)(make_random_state(c, mesh), place_on(mesh, tokens))
        momenta.append([np.asarray(x) for x in jax.tree.leaves(state.optimizer)])
    for a, b in zip(*momenta, strict=True):
        assert np.linalg.norm(a - b) <= 1e-4 * np.linalg.norm(a)


@pytest.mark.parametrize("devices", [1, 8])
def test_24_sequences_train_alike_however_many_run_at_once(devices):
    c = dataclasses.replace(MINI32, batch=24, T=32, steps=3)
    tokens = np.concatenate([sequences(c, c.T, seed=i) for i in range(3)])
    losses = []
    for microbatch in (1, 3 * devices):
        mesh, at_once = make_mesh(devices), dataclasses.replace(c, microbatch=microbatch)
        state = make_random_state(c, mesh)
        _, loss = stage("train", devices, at_once)(state, place_on(mesh, tokens))
        losses.append(float(loss))
    assert losses == pytest.approx([losses[0]] * 2, rel=1e-6)
    w = make_random_state(c, make_mesh(1)).params
    whole = jax.shard_map(
        lambda p, t: train_gpt.loss_fn(train_gpt.gather(p, c), t, c, WINDOW),
        in_specs=({k: row.spec for k, row in train_gpt.param_table(c).items()}, P()),
        mesh=make_mesh(1), out_specs=P(), check_vma=False,
    )  # fmt: skip
    assert losses[0] == pytest.approx(float(jax.jit(whole)(w, tokens)), rel=1e-5)
