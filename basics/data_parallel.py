"""Data parallel: every device has all parameters and a part of the batch.

Run     ./run.sh basics/data_parallel.py [--draw FILE.svg]
Look    at `by_hand`: losses, counts of tokens and gradients are added over devices, then divided.
        And at two mistakes that raise no error: a mean of means, and a forgotten psum
Source  Li et al. 2020, arXiv:2006.15704
In train_gpt.py  `whole_weights` casts what every device has whole to "varying": the transpose of
        this cast is the psum. `train_step` divides by the number of sequences, which is constant,
        because `pack_documents` leaves no padding. The axis "nodes" of `make_mesh` is data parallel
"""

import os
import re
import sys
from argparse import ArgumentParser, FileType, RawDescriptionHelpFormatter
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import Array, P, lax
from jax.sharding import AxisType, Mesh, NamedSharding

VOCAB = 32
WIDTH = 32
ROWS = 32
LENGTH = 32  # tokens to predict in the longest row
STEPS = 60
RATE = 1.0
SPECS = P(), P("data")  # every device has all parameters, and its rows of the batch


# ---- The idea, twice -----------------------------------------------------------------------------
def loss_sum(params: dict, tokens: Array) -> tuple[Array, Array]:
    """The sum of the next-token losses, and how many targets it counts: all but padding (-1)."""
    inputs = tokens[:, :-1]
    targets = tokens[:, 1:]
    counted = targets >= 0
    logits = jax.nn.relu(params["embed"][inputs] @ params["hidden"]) @ params["head"]
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, jnp.maximum(targets, 0))
    return losses.sum(where=counted), counted.sum()


def loss_and_grads(params: dict, tokens: Array) -> tuple[Array, dict]:
    """Mean loss and its gradients. Nothing here mentions devices: if the batch is spread over 8 of
    them, jit's compiler sees that the sums run over all of it, and inserts an all-reduce."""

    def mean_loss(params):
        total, count = loss_sum(params, tokens)
        return total / count

    return jax.value_and_grad(mean_loss)(params)


def by_hand(params: dict, tokens: Array) -> tuple[Array, dict]:
    """The same inside of shard_map, where `tokens` are this device's rows."""
    # "varying" makes each device differentiate by its copy. If JAX knows that parameters are the
    # same everywhere, it adds up the gradients itself, and the psum would add them up again.
    copy = lax.pcast(params, "data", to="varying")
    (total, count), grads = jax.value_and_grad(loss_sum, has_aux=True)(copy, tokens)
    total, count, grads = lax.psum((total, count, grads), "data")
    return total / count, jax.tree.map(lambda g: g / count, grads)


# ---- Two mistakes --------------------------------------------------------------------------------
def mean_of_means(params: dict, tokens: Array) -> tuple[Array, dict]:
    """Mistake 1: a device's mean counts the same, whether it covers 40 tokens or 120."""
    return lax.pmean(loss_and_grads(lax.pcast(params, "data", to="varying"), tokens), "data")


def forgotten_psum(params: dict, tokens: Array) -> tuple[Array, dict]:
    """Mistake 2: each device keeps the gradient of its rows. `out_specs` promise that it is the
    same on all devices: check_vma=True finds that it is not, check_vma=False trusts it."""
    return loss_and_grads(lax.pcast(params, "data", to="varying"), tokens)


def train(gradients: Callable, params: dict, tokens: Array) -> tuple[Array, dict, list[float]]:
    """Trains on one batch. Returns the last loss, device 0's parameters, and after each step how
    far the farthest device's `hidden` is from device 0's, as a share of its norm."""
    drift = []
    for _ in range(STEPS):
        loss, grads = gradients(params, tokens)
        params = jax.tree.map(lambda p, g: p - RATE * g, params, grads)
        copies = np.stack([shard.data for shard in params["hidden"].addressable_shards])
        farthest = np.linalg.norm(copies - copies[0], axis=(1, 2)).max()
        drift.append(farthest / np.linalg.norm(copies[0]))
    return loss, jax.tree.map(np.asarray, params), drift


# ---- On eight devices ----------------------------------------------------------------------------
def spread(data: tuple, mesh: Mesh) -> tuple:
    """Puts all parameters on every device, and an eighth of the batch on each."""
    return jax.device_put(data, tuple(NamedSharding(mesh, spec) for spec in SPECS))


def on_each(function: Callable, mesh: Mesh, vma: bool = True) -> Callable:
    """The function, run by each device on its rows."""
    sharded = jax.shard_map(function, mesh=mesh, in_specs=SPECS, out_specs=P(), check_vma=vma)
    return jax.jit(sharded)


def check_both(mesh: Mesh) -> None:
    """jit and shard_map give the loss and gradients of one device, with all-reduces alone."""
    data = make(shortest=8)
    one_device = jax.jit(loss_and_grads)
    expected = one_device(*data)
    for name, program in {"jit": one_device, "by hand": on_each(by_hand, mesh)}.items():
        sharded = spread(data, mesh)
        error = largest_error(program(*sharded), expected)
        text = program.lower(*sharded).compile().as_text()
        sent = re.findall(r" (all-reduce|all-gather|reduce-scatter|all-to-all)(?:-start)?\(", text)
        check(
            f"{name}: loss and gradients {error:.0e} from one device's, below 3e-6, by "
            f"{' and '.join(sent)}",
            error < 3e-6 and set(sent) == {"all-reduce"},
        )


def try_mean_of_means(mesh: Mesh) -> dict[int, float]:
    """The largest error of a gradient, by the tokens in the shortest row."""
    print("mean of means: tokens in the shortest row, largest error of a gradient")
    program = on_each(mean_of_means, mesh)
    one_device = jax.jit(loss_and_grads)
    errors = {}
    for shortest in (2, 8, 14, 20, 26, 32):
        data = make(shortest)
        errors[shortest] = largest_error(program(*spread(data, mesh)), one_device(*data))
        print(f"{shortest:9} of {LENGTH} {errors[shortest]:8.1%}")
    right = errors[32] < 3e-6 and errors[8] > 0.05
    check("it is right only where all devices count equally many tokens", right)
    return errors


def try_forgotten_psum(mesh: Mesh) -> dict[str, list[float]]:
    """How far the devices' weights move apart, with and without the psum."""
    data = make(shortest=LENGTH)
    print(f"forgotten psum, {STEPS} steps: loss as reported, and loss of device 0's weights")
    programs = {
        "with psum": on_each(by_hand, mesh),
        "without": on_each(forgotten_psum, mesh, vma=False),
    }
    drifts = {}
    gaps = {}
    for name, program in programs.items():
        reported, params, drifts[name] = train(program, *spread(data, mesh))
        real, _ = jax.jit(loss_and_grads)(params, data[1])
        gaps[name] = real - reported
        print(f"{name:9} {reported:8.2f} {real:8.2f}")
    apart = drifts["without"][-1]
    together = not any(drifts["with psum"])
    right = apart > 0.3 and together and gaps["without"] > 0.5
    check(f"without psum, devices' weights end {apart:.0%} apart; with it, they are equal", right)
    refused = False
    try:
        on_each(forgotten_psum, mesh).lower(*spread(data, mesh))
    except ValueError as error:
        refused = "replicated across mesh axis 'data'" in str(error)
    check("check_vma=True refuses the forgotten psum", refused)
    return drifts


# ---- Plumbing ------------------------------------------------------------------------------------
def make(shortest: int) -> tuple[dict, np.ndarray]:
    """Parameters, and rows of a text in which x + 5 mostly follows x. From the first row to the
    last, targets grow from `shortest` to LENGTH; -1 fills the rows up."""
    rng = np.random.default_rng(0)
    matrices = WIDTH**-0.5 * rng.normal(size=(3, WIDTH, WIDTH)).astype(np.float32)
    params = dict(zip(("embed", "hidden", "head"), matrices, strict=True))
    shape = (ROWS, LENGTH + 1)
    steps = np.where(rng.random(shape) < 0.8, 5, rng.integers(VOCAB, size=shape))
    tokens = steps.cumsum(axis=1) % VOCAB
    lengths = np.linspace(shortest, LENGTH, ROWS).round()[:, None]
    return params, np.where(np.arange(LENGTH + 1) > lengths, -1, tokens)


def largest_error(result: tuple, expected: tuple) -> float:
    """The distance of the farthest array from the expected one, as a share of its norm."""

    def distance(a, b):
        return float(np.linalg.norm(a - b) / np.linalg.norm(b))

    return max(jax.tree.leaves(jax.tree.map(distance, result, expected)))


def draw(path: str, errors: dict[int, float], drifts: dict[str, list[float]]) -> None:
    os.environ.update(MPLBACKEND="agg", MATPLOTLIBRC=os.devnull)  # not a notebook's
    import matplotlib.pyplot as plt

    plt.style.use(["default", {"svg.hashsalt": "jNanoGPT", "font.size": 9}])
    _, (left, right) = plt.subplots(1, 2, figsize=(7, 3.2), layout="constrained")
    left.plot([*errors], [100 * error for error in errors.values()], "o-")
    left.set(title="Mean of means", xlabel="tokens in the shortest row", ylabel="error, %")
    for name, drift in drifts.items():
        right.plot(100 * np.array(drift), label=name)
    right.set(title="Weights of two devices", xlabel="step", ylabel="distance, %")
    right.legend()
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
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))
    check_both(mesh)
    errors = try_mean_of_means(mesh)
    drifts = try_forgotten_psum(mesh)
    if flags.draw:
        draw(flags.draw.name, errors, drifts)


if __name__ == "__main__":
    main()
