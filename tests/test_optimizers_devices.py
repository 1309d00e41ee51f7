"""The optimizer benchmark on 1 and 8 simulated devices: losses are the same in
float32, and every device has its share of the parameters, and of the state."""

import dataclasses
import functools
from types import SimpleNamespace

import jax
import numpy as np
from jax.sharding import Mesh

from tests.simple import muon, simple

STEPS = 8
# One device runs the batch in 16 microbatches, and eight in 2.
SIZE = dataclasses.replace(
    simple.SIZES["tiny"], vocab=128, layers=1, D=64, K=32, T=48, batch=16, microbatch=1,
    val_tokens=16 * 48, compute="float32",
)  # fmt: skip
TOKENS = np.random.default_rng(0).integers(0, 50, (STEPS + 1) * SIZE.batch * SIZE.T + 1)


def make_mesh(devices: int) -> Mesh:
    """The first devices, as main() has all of them."""
    return Mesh(np.array(jax.devices()[:devices]), ("devices",))


def batch(step: int, mesh: Mesh) -> jax.Array:
    """The tokens of a step on the devices, (microbatches, sequences, T + 1)."""
    return simple.read_batch((TOKENS, step * SIZE.batch * SIZE.T), SIZE, mesh)


def random_params() -> dict[str, np.ndarray]:
    """Parameters of which none is 0: with a head of zeros, every first loss is log(vocab)."""
    rng = np.random.default_rng(1)
    shapes = simple.parameter_shapes(SIZE)
    return {n: np.float32(rng.normal(0, shape[0] ** -0.5, shape)) for n, shape in shapes.items()}


@functools.cache
def run(devices: int) -> SimpleNamespace:
    """A run with Muon, and AdamW beside it, from random_params(): its losses, of which the last is
    the validation program's; the parameters and the state at the end."""
    mesh = make_mesh(devices)
    start = random_params()
    tx = muon.optimizer(start, STEPS)
    begin, step, validation = simple.compile_programs(tx, SIZE, mesh)
    _, state = begin(5)
    params = jax.device_put(start, simple.shardings(start, mesh))
    losses = []
    for i in range(STEPS):
        params, state, loss = step(params, state, batch(i, mesh))
        losses.append(float(loss))
    losses.append(float(validation(params, state, batch(STEPS, mesh))))
    return SimpleNamespace(losses=losses, params=params, state=state)


def test_losses_are_the_same():
    losses = run(8).losses
    np.testing.assert_allclose(losses, run(1).losses, rtol=1e-5)
    assert losses[-1] < losses[0] - 0.1


def test_a_device_has_an_eighth_of_parameters_and_state():
    """Only numbers, as the count of steps, are on all devices."""
    after = run(8)
    state = [x for x in jax.tree.leaves(after.state) if x.ndim > 0]
    params = [*after.params.values()]
    assert sum(x.size for x in state) >= sum(x.size for x in params)
    for x in params + state:
        assert [part.data.size for part in x.addressable_shards] == [x.size // 8] * 8, x.shape
