"""Data parallel: every device has all parameters and a part of the batch.

Run     ./run.sh basics/data_parallel.py [--draw FILE.svg]
Look    at `by_hand`: losses, counted tokens and gradients are added over devices, then divided. And
        at what two mistakes do that raise no error: a mean of means, and a forgotten psum
Source  Li et al. 2020, arXiv:2006.15704
In train_gpt.py  `whole_weights` casts what every device has whole to "varying": the transpose of
        that cast is the psum. `train_step` divides by the number of sequences, a constant, because
        `pack_documents` leaves no padding. The axis "nodes" of `make_mesh` is data parallel
"""

import re
import sys
from argparse import ArgumentParser, RawDescriptionHelpFormatter
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import Array, P, lax
from jax.sharding import AxisType, NamedSharding

VOCAB, WIDTH, ROWS, LENGTH, STEPS, RATE = 32, 32, 32, 32, 60, 1.0
SPECS = P(), P("data")  # every device has all parameters, and its rows of the batch


def loss_sum(params: dict, tokens: Array) -> tuple[Array, Array]:
    """Next-token losses, added up, and how many tokens were counted: padding (-1) is not."""
    inputs, targets, counted = tokens[:, :-1], tokens[:, 1:], tokens[:, 1:] >= 0
    logits = jax.nn.relu(params["embed"][inputs] @ params["hidden"]) @ params["head"]
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, jnp.maximum(targets, 0))
    return losses.sum(where=counted), counted.sum()


def whole(params: dict, tokens: Array) -> tuple[Array, dict]:
    """Mean loss and its gradients. Nothing here knows of devices: where jit is given a batch that
    lies on 8 of them, the compiler sees that sums run over all of it, and adds an all-reduce."""
    return jax.value_and_grad(lambda params: jnp.divide(*loss_sum(params, tokens)))(params)


def by_hand(params: dict, tokens: Array) -> tuple[Array, dict]:
    """The same inside of shard_map, where tokens are this device's rows."""
    # "varying": each device differentiates by its own copy. By parameters that are known to be the
    # same everywhere, gradients would come out added up already, and the psum would add them again.
    own = lax.pcast(params, "data", to="varying")
    (total, count), grads = jax.value_and_grad(loss_sum, has_aux=True)(own, tokens)
    total, count, grads = lax.psum((total, count, grads), "data")
    return total / count, jax.tree.map(lambda g: g / count, grads)


def mean_of_means(params: dict, tokens: Array) -> tuple[Array, dict]:
    """Mistake 1: a device's mean weighs the same, whether it has counted 40 tokens or 120."""
    return lax.pmean(whole(lax.pcast(params, "data", to="varying"), tokens), "data")


def forgotten_psum(params: dict, tokens: Array) -> tuple[Array, dict]:
    """Mistake 2: each device keeps the gradient of its own rows. It varies over "data", and so
    check_vma=True refuses to return it as P(), the same everywhere; check_vma=False believes it."""
    return whole(lax.pcast(params, "data", to="varying"), tokens)


def train(gradients: Callable, params: dict, tokens: Array) -> tuple[Array, dict, list[float]]:
    """Steps on one batch: the loss that is reported last, device 0's parameters, and after each
    step how far the farthest device's `hidden` is from device 0's, as a share of its size."""
    drift = []
    for _ in range(STEPS):
        loss, grads = gradients(params, tokens)
        params = jax.tree.map(lambda p, g: p - RATE * g, params, grads)
        copies = np.stack([shard.data for shard in params["hidden"].addressable_shards])
        away = np.linalg.norm(copies - copies[0], axis=(1, 2)).max()
        drift.append(away / np.linalg.norm(copies[0]))
    return loss, jax.tree.map(np.asarray, params), drift


# ---- Plumbing ------------------------------------------------------------------------------------
def make(shortest: int) -> tuple[dict, np.ndarray]:
    """Parameters, and rows of a text in which mostly x + 5 comes after x, ever longer, up to LENGTH
    tokens to predict; -1 fills them up."""
    rng, shape = np.random.default_rng(0), (ROWS, LENGTH + 1)
    matrices = WIDTH**-0.5 * rng.normal(size=(3, WIDTH, WIDTH)).astype(np.float32)
    params = dict(zip(("embed", "hidden", "head"), matrices, strict=True))
    steps = np.where(rng.random(shape) < 0.8, 5, rng.integers(VOCAB, size=shape))
    lengths = np.linspace(shortest, LENGTH, ROWS).round()[:, None]
    return params, np.where(np.arange(LENGTH + 1) > lengths, -1, steps.cumsum(axis=1) % VOCAB)


def draw(path: str, errors: dict[int, float], drifts: dict[str, list[float]]) -> None:
    import matplotlib.pyplot as plt

    plt.rcParams.update({"svg.hashsalt": "jNanoGPT", "font.size": 9})
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
    cli.add_argument("--draw", metavar="FILE.svg")
    path = cli.parse_args().draw
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))
    spread = lambda data: jax.device_put(data, tuple(NamedSharding(mesh, s) for s in SPECS))
    on_each = lambda function, vma=True: jax.jit(jax.shard_map(
        function, mesh=mesh, in_specs=SPECS, out_specs=P(), check_vma=vma))  # fmt: skip
    away = lambda a, b: float(np.linalg.norm(a - b) / np.linalg.norm(b))
    farthest = lambda result, right: max(jax.tree.leaves(jax.tree.map(away, result, right)))
    one, ours, data = jax.jit(whole), on_each(by_hand), make(shortest=8)
    for name, program in {"jit": one, "by hand": ours}.items():
        error = farthest(program(*spread(data)), one(*data))
        text = program.lower(*spread(data)).compile().as_text()
        sent = re.findall(r" (all-reduce|all-gather|reduce-scatter|all-to-all)(?:-start)?\(", text)
        check(f"{name}: {error:.0e} from one device, below 3e-6, by {' and '.join(sent)}",
              error < 3e-6 and {*sent} == {"all-reduce"})  # fmt: skip
    print("mean of means: tokens in the shortest row, error of a gradient")
    errors, drifts, means = {}, {}, on_each(mean_of_means)
    for shortest in (2, 8, 14, 20, 26, 32):
        errors[shortest] = farthest(means(*spread(data := make(shortest))), one(*data))
        print(f"{shortest:9} of {LENGTH} {errors[shortest]:8.1%}")
    check("right only where all count equally many", errors[32] < 3e-6 < 0.05 < errors[8])
    print(f"forgotten psum, {STEPS} steps: loss that is reported, and of device 0's weights")
    for name, program in {"with psum": ours, "without": on_each(forgotten_psum, False)}.items():
        told, params, drifts[name] = train(program, *spread(data))
        print(f"{name:9} {told:8.2f} {(real := one(params, data[1])[0]):8.2f}")
    apart, same = drifts["without"][-1], not any(drifts["with psum"])
    right = apart > 0.3 and same and told < real - 0.5
    check(f"without, devices end {apart:.0%} apart; with, not a bit", right)
    try:
        refused = on_each(forgotten_psum).lower(*spread(data)) is None
    except ValueError as error:
        refused = "replicated across mesh axis 'data'" in str(error)
    check("check_vma=True refuses it", refused)
    if path:
        draw(path, errors, drifts)


if __name__ == "__main__":
    main()
