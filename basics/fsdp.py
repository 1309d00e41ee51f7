"""Fully sharded data parallel: every device keeps an eighth of everything.

Run     ./run.sh basics/fsdp.py [--draw FILE.svg]
Look    at `gather`, one line, and that no line sends gradients: its transpose does. `step` is what
        one device would do; here it sees an eighth of parameters, gradients and Adam's state
Source  Rajbhandari et al. 2019, arXiv:1910.02054
In train_gpt.py  `whole_weights` sends in bfloat16 (`compute`); `train_step` keeps the weights until
        all microbatches are done. `param_table` says how each is sharded: small ones not at all,
        banks by the matrix, because Muon, in `normuon`, needs whole ones
"""

import re
import sys
from argparse import ArgumentParser, RawDescriptionHelpFormatter
from collections import Counter
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import Array, P, lax
from jax.sharding import AxisType, Mesh, NamedSharding

LAYERS, WIDTH, HIDDEN, BATCH, STEPS = 4, 128, 512, 64, 10
PARTS = "parameters", "gradients", "Adam's state", "temporary"
ADAM = optax.adam(1e-3, eps=1e-6)  # with less, gradients of mere rounding make whole steps
ROWS, EIGHTH = P("fsdp"), P(None, "fsdp")  # of the batch; of matrices (layer, row, column)


def gather(eighths: dict) -> dict:
    """A layer's whole matrices. The transpose of an all-gather is a reduce-scatter: each device has
    a whole gradient, of its own rows of the batch; they are added, and each is sent its eighth."""
    return jax.tree.map(lambda p: lax.all_gather(p, "fsdp", axis=0, tiled=True), eighths)


def loss_of(params: dict, x: Array, y: Array, gather: Callable, twice: bool) -> Array:
    """Sum over these rows of the batch, a part of the mean over all of them. A layer's matrices are
    whole while it runs. The backward pass needs them again: kept until then, or gathered twice."""

    def layer(x, params):
        w = gather(params)
        return x + jax.nn.relu(x @ w["up"]) @ w["down"], None

    x, _ = lax.scan(jax.checkpoint(layer) if twice else layer, x, params)
    return jnp.square(x - y).sum() / (BATCH * WIDTH)


def step(params: dict, state: tuple, x: Array, y: Array, gather: Callable, twice: bool) -> tuple:
    """Adam works element by element: on an eighth of them as on all."""
    loss, grads = jax.value_and_grad(loss_of)(params, x, y, gather, twice)
    updates, state = ADAM.update(grads, state)
    return optax.apply_updates(params, updates), state, loss, grads


def both_ways(grads: Array) -> tuple[Array, Array]:
    """gather's transpose by JAX's own rule, and what it should be; grads are this device's."""
    (by_rule,) = jax.linear_transpose(gather, grads[0, ::8])(grads[0])
    return by_rule, lax.psum_scatter(grads[0], "fsdp", scatter_dimension=0, tiled=True)


def train(spec: P, gather: Callable, twice: bool, data: list, mesh: Mesh) -> tuple:
    """With parameters sharded by spec: the last loss, parameters and gradients, then the MiB that
    a device holds, and the compiled step's collectives."""

    def on_each(*arguments):
        params, state, loss, grads = step(*arguments, gather, twice)
        return params, state, lax.psum(loss, "fsdp"), grads

    put = lambda x, spec: jax.device_put(x, NamedSharding(mesh, spec))
    params, rows = put(data[0], spec), put(data[1:], ROWS)
    # Adam's means are sharded as parameters are, and so born; its count of steps is one number.
    specs = jax.tree.map(lambda x: spec if x.ndim else P(), jax.eval_shape(ADAM.init, params))
    shard = lambda f, ins, outs: jax.jit(jax.shard_map(f, mesh=mesh, in_specs=ins, out_specs=outs))
    state = shard(ADAM.init, (spec,), specs)(params)
    program = shard(on_each, (spec, specs, ROWS, ROWS), (spec, specs, P(), spec))
    program = program.lower(params, state, *rows).compile()
    for _ in range(STEPS):
        params, state, loss, grads = program(params, state, *rows)
    own = lambda tree: sum(x.addressable_shards[0].data.nbytes for x in jax.tree.leaves(tree))
    sizes = [own(params), own(grads), own(state), program.memory_analysis().temp_size_in_bytes]
    kinds = re.findall(r" (all-reduce|all-gather|reduce-scatter)(?:-start)?\(", program.as_text())
    return (loss, params, grads), [size / 2**20 for size in sizes], dict(Counter(kinds))


# ---- Plumbing ------------------------------------------------------------------------------------
def make(seed: int) -> list:
    rng = np.random.default_rng(seed)
    normal = lambda *shape: (shape[-2] ** -0.5 * rng.normal(size=shape)).astype(np.float32)
    params = dict(up=normal(LAYERS, WIDTH, HIDDEN), down=0.3 * normal(LAYERS, HIDDEN, WIDTH))
    return [params, 8 * normal(BATCH, WIDTH), 8 * normal(BATCH, WIDTH)]


def draw(path: str, table: dict[str, list[float]]) -> None:
    import matplotlib.pyplot as plt

    plt.rcParams.update({"svg.hashsalt": "jNanoGPT", "font.size": 9})
    _, axes = plt.subplots(figsize=(7, 2.4), layout="constrained")
    left = np.zeros(len(table))
    for part, sizes in zip(PARTS, zip(*table.values(), strict=True), strict=True):
        axes.barh([*table], sizes, left=left, label=part)
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
    cli.add_argument("--draw", metavar="FILE.svg")
    path = cli.parse_args().draw
    mesh = jax.make_mesh((8,), ("fsdp",), axis_types=(AxisType.Auto,))
    grads = np.random.default_rng(0).normal(size=(8, 64, 64)).astype(np.float32)  # of 8 devices
    both = jax.jit(jax.shard_map(both_ways, mesh=mesh, in_specs=ROWS, out_specs=ROWS))
    for name, result in zip(("gather's transpose", "psum_scatter"), both(grads), strict=True):
        error = np.abs(result.ravel() - grads.sum(axis=0).ravel()).max()
        check(f"{name}: gradients of 8 devices, added, within {error:.0e}", error < 1e-5)
    check("both by reduce_scatter", str(jax.make_jaxpr(both)(grads)).count("reduce_scatter") == 2)
    data, whole, one = make(0), lambda weights: weights, jax.jit(step, static_argnums=(4, 5))
    params, state, table, sent = data[0], ADAM.init(data[0]), {}, {}
    for _ in range(STEPS):
        params, state, loss, grads = one(params, state, *data[1:], whole, False)
    away = lambda a, b: float(np.linalg.norm(a - b) / np.linalg.norm(b))
    ways = {"all": (P(), whole, False), "an eighth": (EIGHTH, gather, False)}
    ways |= {"gathered twice": (EIGHTH, gather, True)}
    for name, way in ways.items():
        result, table[name], sent[name] = train(*way, data, mesh)
        error = max(jax.tree.leaves(jax.tree.map(away, result, (loss, params, grads))))
        check(f"{name}: {STEPS} steps within {error:.0e} of one device's, below 1e-5", error < 1e-5)
    print("MiB a device  ", *(f"{part:>12}" for part in PARTS), "  collectives in the program")
    for name, sizes in table.items():
        print(f"{name:14}", *(f"{size:12.2f}" for size in sizes), f"  {sent[name]}")
    whole, kept, again = map(np.array, table.values())
    check("all but the temporary is an eighth", np.allclose(whole[:3], 8 * kept[:3], rtol=1e-4))
    check("whole matrices, kept, are temporary", whole[0] < kept[3] < 1.5 * whole[0])
    check("gathered twice, they are so one by one", again[3] < 0.4 * kept[3])
    if path:
        draw(path, table)


if __name__ == "__main__":
    main()
