"""Fully sharded data parallel: every device stores an eighth of everything.

Run     ./run.sh basics/fsdp.py [--draw FILE.svg]
Look    at `gather`, one line. No line sends gradients, because the transpose of this one does.
        `step` is what one device would do, but on an eighth of parameters, gradients, Adam's state
Source  Rajbhandari et al. 2019, arXiv:1910.02054
In train_gpt.py  `whole_weights` sends in bfloat16 (`compute`), once for all microbatches of
        `train_step`. `param_table` says how each parameter is sharded: small ones not at all, and
        banks by whole matrices, because Muon, in `normuon`, needs whole matrices
"""

import os
import re
import sys
from argparse import ArgumentParser, FileType, RawDescriptionHelpFormatter
from collections import Counter
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import Array, P, lax
from jax.sharding import AxisType, Mesh, NamedSharding

LAYERS = 4
WIDTH = 128
HIDDEN = 512
BATCH = 64
STEPS = 10
ADAM = optax.adam(1e-3, eps=1e-6)  # a smaller eps would let rounding errors make whole steps
ROWS = P("fsdp")  # the batch is split by rows
EIGHTH = P(None, "fsdp")  # matrices, (layer, row, column), are split by rows


# ---- The idea ------------------------------------------------------------------------------------
def gather(eighths: dict) -> dict:
    """A layer's whole matrices. The transpose of an all-gather is a reduce-scatter: it adds up the
    whole gradients of all devices, each of its rows of the batch, and sends every device an eighth
    of the sum."""
    return jax.tree.map(lambda p: lax.all_gather(p, "fsdp", axis=0, tiled=True), eighths)


def loss_of(params: dict, x: Array, y: Array, gather: Callable, twice: bool) -> Array:
    """What these rows add to the mean loss of the batch. A layer's matrices are whole while it
    runs. The backward pass needs them too. They stay in memory until then, or, with `twice`, are
    gathered again."""

    def layer(x, params):
        w = gather(params)
        return x + jax.nn.relu(x @ w["up"]) @ w["down"], None

    x, _ = lax.scan(jax.checkpoint(layer) if twice else layer, x, params)
    return jnp.square(x - y).sum() / (BATCH * WIDTH)


def step(params: dict, state: tuple, x: Array, y: Array, gather: Callable, twice: bool) -> tuple:
    """One step of Adam, which works element by element, so it needs no whole matrices. Returns
    parameters, state, loss and gradients."""
    loss, grads = jax.value_and_grad(loss_of)(params, x, y, gather, twice)
    updates, state = ADAM.update(grads, state)
    return optax.apply_updates(params, updates), state, loss, grads


def gather_one(weights: dict) -> dict:
    """Replaces gather where every device has whole matrices."""
    return weights


# ---- What it costs -------------------------------------------------------------------------------
class Way(NamedTuple):
    """A way to shard."""

    spec: P  # of parameters, gradients and Adam's means
    gather: Callable
    twice: bool


WAYS = {
    "all": Way(P(), gather_one, False),
    "an eighth": Way(EIGHTH, gather, False),
    "gathered twice": Way(EIGHTH, gather, True),
}


class MiB(NamedTuple):
    """Memory of one device."""

    parameters: float
    gradients: float
    adam: float
    temporary: float


class Training(NamedTuple):
    """What a training of STEPS steps gives and costs."""

    result: tuple[Array, dict, dict]  # last loss, parameters, last gradients
    memory: MiB
    collectives: Counter  # in the compiled step


def train(way: Way, data: tuple, mesh: Mesh) -> Training:
    """Trains on 8 devices. data: parameters, inputs and targets."""
    params = jax.device_put(data[0], NamedSharding(mesh, way.spec))
    x, y = jax.device_put(data[1:], NamedSharding(mesh, ROWS))
    # Adam's means are sharded like the parameters, and its count of steps, a scalar, is not.
    shapes = jax.eval_shape(ADAM.init, params)
    state_specs = jax.tree.map(lambda leaf: way.spec if leaf.ndim else P(), shapes)

    def on_each(params, state, x, y):
        params, state, loss, grads = step(params, state, x, y, way.gather, way.twice)
        return params, state, lax.psum(loss, "fsdp"), grads

    init = jax.shard_map(ADAM.init, mesh=mesh, in_specs=(way.spec,), out_specs=state_specs)
    sharded_step = jax.shard_map(
        on_each,
        mesh=mesh,
        in_specs=(way.spec, state_specs, ROWS, ROWS),
        out_specs=(way.spec, state_specs, P(), way.spec),
    )
    state = jax.jit(init)(params)
    program = jax.jit(sharded_step).lower(params, state, x, y).compile()
    for _ in range(STEPS):
        params, state, loss, grads = program(params, state, x, y)
    temporary = program.memory_analysis().temp_size_in_bytes
    memory = MiB(
        parameters=bytes_on_device(params) / 2**20,
        gradients=bytes_on_device(grads) / 2**20,
        adam=bytes_on_device(state) / 2**20,
        temporary=temporary / 2**20,
    )
    found = re.findall(r" (all-reduce|all-gather|reduce-scatter)(?:-start)?\(", program.as_text())
    return Training((loss, params, grads), memory, Counter(found))


def bytes_on_device(tree) -> int:
    """Bytes of all arrays of a tree on the first device."""
    return sum(leaf.addressable_shards[0].data.nbytes for leaf in jax.tree.leaves(tree))


def both_transposes(grads: Array) -> tuple[Array, Array]:
    """gather's transpose as JAX derives it, and what it should be. grads: the gradient of one
    matrix on this device, (1, rows, columns)."""
    (grad,) = grads
    eighth = grad[: len(grad) // 8]  # only its shape counts, and that it varies over devices
    (by_rule,) = jax.linear_transpose(gather, eighth)(grad)
    return by_rule, lax.psum_scatter(grad, "fsdp", scatter_dimension=0, tiled=True)


# ---- Plumbing ------------------------------------------------------------------------------------
def make(seed: int) -> tuple[dict, np.ndarray, np.ndarray]:
    """Parameters, inputs and targets."""
    rng = np.random.default_rng(seed)

    def normal(*shape):
        return (shape[-2] ** -0.5 * rng.normal(size=shape)).astype(np.float32)

    params = dict(up=normal(LAYERS, WIDTH, HIDDEN), down=0.3 * normal(LAYERS, HIDDEN, WIDTH))
    return params, 8 * normal(BATCH, WIDTH), 8 * normal(BATCH, WIDTH)


def train_on_one_device(data: tuple) -> tuple:
    """The last loss, parameters and last gradients."""
    params, x, y = data
    state = ADAM.init(params)
    one_step = jax.jit(step, static_argnums=(4, 5))
    for _ in range(STEPS):
        params, state, loss, grads = one_step(params, state, x, y, gather_one, False)
    return loss, params, grads


def distance(a: Array, b: Array) -> float:
    return float(np.linalg.norm(a - b) / np.linalg.norm(b))


def draw(path: str, memory: dict[str, MiB]) -> None:
    os.environ.update(MPLBACKEND="agg", MATPLOTLIBRC=os.devnull)  # not a notebook's
    import matplotlib.pyplot as plt

    plt.style.use(["default", {"svg.hashsalt": "jNanoGPT", "font.size": 9}])
    _, axes = plt.subplots(figsize=(7, 2.4), layout="constrained")
    left = np.zeros(len(memory))
    labels = "parameters", "gradients", "Adam's state", "temporary"
    for label, sizes in zip(labels, zip(*memory.values(), strict=True), strict=True):
        axes.barh([*memory], sizes, left=left, label=label)
        left += sizes
    axes.set(xlabel="MiB on each of 8 devices", ylim=(2.5, -0.5))
    axes.legend()
    plt.savefig(path, metadata={"Date": None})


def check(what: str, right: bool) -> None:
    print("ok   " if right else "WRONG", what)
    if not right:
        sys.exit(1)


def main() -> None:
    jax.config.update("jax_platforms", "cpu")  # with 8 TPUs or GPUs, delete these two lines
    jax.config.update("jax_num_cpu_devices", 8)
    cli = ArgumentParser(description=__doc__, formatter_class=RawDescriptionHelpFormatter)
    cli.add_argument("--draw", type=FileType("ab"), metavar="FILE.svg", help="also draw a picture")
    flags = cli.parse_args()
    mesh = jax.make_mesh((8,), ("fsdp",), axis_types=(AxisType.Auto,))

    grads = np.random.default_rng(0).normal(size=(8, 64, 64)).astype(np.float32)  # of 8 devices
    both = jax.jit(jax.shard_map(both_transposes, mesh=mesh, in_specs=ROWS, out_specs=ROWS))
    for name, result in zip(("gather's transpose", "psum_scatter"), both(grads), strict=True):
        error = np.abs(result.ravel() - grads.sum(axis=0).ravel()).max()
        check(f"{name}: the sum of 8 devices' gradients, within {error:.0e}", error < 1e-5)
    operations = str(jax.make_jaxpr(both)(grads))
    check("both are a reduce_scatter", operations.count("reduce_scatter") == 2)

    data = make(0)
    expected = train_on_one_device(data)
    runs = {name: train(way, data, mesh) for name, way in WAYS.items()}
    for name, run in runs.items():
        error = max(jax.tree.leaves(jax.tree.map(distance, run.result, expected)))
        check(
            f"{name} on every device: loss, parameters and gradients after {STEPS} steps within "
            f"{error:.0e} of one device's, below 1e-5",
            error < 1e-5,
        )
    print("MiB a device     parameters   gradients Adam's state   temporary   collectives")
    for name, run in runs.items():
        sizes = "".join(f"{size:12.2f}" for size in run.memory)
        print(f"{name:15}{sizes}   {dict(run.collectives)}")
    memory = {name: run.memory for name, run in runs.items()}
    whole = memory["all"]
    eighth = memory["an eighth"]
    twice = memory["gathered twice"]
    right = np.allclose(whole[:3], 8 * np.array(eighth[:3]), rtol=1e-4)
    check("parameters, gradients and Adam's state are an eighth of all", right)
    right = whole.parameters < eighth.temporary < 1.5 * whole.parameters
    check("temporary memory stores whole matrices for the backward pass", right)
    right = twice.temporary < 0.4 * eighth.temporary
    check("gathered twice, it stores those of one layer at a time", right)
    if flags.draw:
        draw(flags.draw.name, memory)


if __name__ == "__main__":
    main()
