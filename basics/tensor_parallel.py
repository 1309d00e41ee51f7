"""Tensor parallel: the matrices of a block are split over devices, and so is its work.

Run     ./run.sh basics/tensor_parallel.py [--draw FILE.svg]
Look    at `SPLIT`: only its four lines are about parallelism, and jit does the rest. The first
        matrix of a pair is split by columns and the second by rows, so that activations between
        them stay on their device, and the pair needs one sum over devices. `theory` predicts all
        exchanges
Source  Megatron-LM: Shoeybi et al. 2019, arXiv:1909.08053
In train_gpt.py  products are not split: a device has whole sequences and, from `whole_weights`, all
        weights. The model easily fits on a GPU, and devices would wait for four sums in each block
"""

import math
import os
import re
import sys
from argparse import ArgumentParser, FileType, RawDescriptionHelpFormatter
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, P, lax
from jax.sharding import AxisType, NamedSharding

DEVICES = 8
B = 8  # sequences
T = 32  # tokens in each
D = 64  # width
H = 8  # heads
F = 256  # hidden width
# Heads are an axis of qkv. A device's columns of one (D, 3 D) matrix would be queries of some heads
# and values of others.
SHAPES = dict(qkv=(D, 3, H, D // H), out=(H, D // H, D), up=(D, F), down=(F, D))
SPLIT = dict(
    qkv=P(None, None, "model", None),  # by columns: a device has H / model heads
    out=P("model", None, None),  # by rows: a device has those that read its heads
    up=P(None, "model"),  # by columns
    down=P("model", None),  # by rows
)
WRONG = SPLIT | dict(down=P(None, "model"))  # a column reads the hidden channels of all devices


# ---- The model, as for one device: it does not mention devices -----------------------------------
def norm(x: Array) -> Array:
    return x * lax.rsqrt(jnp.square(x).mean(axis=-1, keepdims=True) + 1e-6)


def block(w: dict[str, Array], x: Array) -> Array:
    """Attention and MLP, (B, T, D) -> (B, T, D)."""
    q, k, v = jnp.einsum("BTD,DsHK->sBTHK", norm(x), w["qkv"])
    y = jax.nn.dot_product_attention(q, k, v, is_causal=True)  # head by head
    x = x + jnp.einsum("BTHK,HKD->BTD", y, w["out"])  # sums over heads, so over devices
    hidden = jnp.square(jax.nn.relu(norm(x) @ w["up"]))
    return x + hidden @ w["down"]  # sums over hidden channels, so over devices


def loss_fn(w: dict[str, Array], x: Array, target: Array) -> Array:
    return jnp.square(block(w, x) - target).mean()


step = jax.value_and_grad(loss_fn, argnums=(0, 1))  # of x, too, as for a block below this one


# ---- What devices exchange -----------------------------------------------------------------------
Exchange = tuple[str, int]  # "all-reduce over model", and the numbers of the array on a device


def theory(model: int, backward: bool) -> list[Exchange]:
    """What a device exchanges in the forward pass, or, with `backward`, in both passes."""
    data = DEVICES // model
    exchanges = [("all-reduce over data", 1)]  # the loss
    if model > 1:
        # The outputs of attention and MLP; in the backward pass also the gradients of their inputs.
        sums = 4 if backward else 2
        exchanges += sums * [("all-reduce over model", B // data * T * D)]
    if backward:
        for shape in SHAPES.values():
            exchanges.append(("all-reduce over data", math.prod(shape) // model))  # gradients
    return sorted(exchanges)


def collectives(text: str, model: int) -> list[Exchange]:
    """What a compiled program exchanges. One line of its text may exchange several arrays."""
    found = []
    kinds = "all-reduce|all-gather|reduce-scatter|all-to-all|collective-permute"
    for shapes, kind, rest in re.findall(rf" = (.*?) ({kinds})(?:-start)?\((.*)", text):
        # The two axes of these meshes differ in size, so the size of a group shows the axis.
        axis = "data" if group_size(rest) == DEVICES // model else "model"
        for shape in re.findall(r"f32\[([\d,]*)\]", shapes):
            numbers = math.prod(int(n) for n in re.findall(r"\d+", shape))
            found.append((f"{kind} over {axis}", numbers))
    return sorted(found)


def group_size(attributes: str) -> int | None:
    """How many devices take part in a collective. XLA has three ways to write it; a permute has no
    groups."""
    listed = re.search(r"groups=\{\{([\d,]+)", attributes)  # {{0,1},{2,3}}: two groups of two
    if listed:
        return listed[1].count(",") + 1
    cut = re.search(r"groups=\[\d+,(\d+)\]", attributes)  # [2,2]<=[4]: two groups of two
    if cut:
        return int(cut[1])
    named = re.search(r"('\w+')=(\d+)[^{]*\{\1\}", attributes)  # mesh['a'=2,'b'=2] {'b'}: along b
    return int(named[2]) if named else None


def kB_sent(exchanges: list[Exchange], axis: str, size: int) -> float:
    """kB that a device sends along an axis of `size` devices. In a ring, it passes on an array but
    for one of `size` parts; an all-reduce goes round the ring twice."""
    kB = 0.0
    for collective, numbers in exchanges:
        if collective.endswith(axis):
            rounds = 2 if collective.startswith("all-reduce") else 1
            kB += rounds * (1 - 1 / size) * numbers * 4 / 1000
    return kB


# ---- A step on a mesh ----------------------------------------------------------------------------
class Run(NamedTuple):
    """What a step costs a device."""

    row: dict[str, str | float]  # of the printed table, kB
    forward: list[Exchange]
    both: list[Exchange]  # of forward and backward pass


def run(model: int, split: dict[str, P], args: tuple, expected: tuple) -> Run:
    """Checks a step's numbers on a mesh of 8 / model x model devices. expected: (loss, gradients)
    of one device."""
    data = DEVICES // model
    mesh = jax.make_mesh((data, model), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
    specs = (split, P("data"), P("data"))  # of weights, inputs, targets
    shardings = jax.tree.map(lambda spec: NamedSharding(mesh, spec), specs)
    outs = None, shardings[:2]  # gradients lie where their parameters and inputs do
    forward = jax.jit(loss_fn, in_shardings=shardings).lower(*args).compile()
    both = jax.jit(step, in_shardings=shardings, out_shardings=outs).lower(*args).compile()
    loss, grads = both(*jax.device_put(args, shardings))
    errors = jax.tree.map(largest_error, (loss, grads), expected)
    error = max(jax.tree.leaves(errors))
    name = f"data {data} x model {model}"
    if split is WRONG:
        name += ", wrong split"
    text = f"{name}: loss and gradients within {error:.1e} of one device's, below 1e-5"
    check(text, error < 1e-5)
    exchanges = collectives(both.as_text(), model)
    row = {
        "mesh": name,
        "weights": sum(g.addressable_shards[0].data.nbytes for g in grads[0].values()) / 1000,
        "sent over data": kB_sent(exchanges, "data", data),
        "sent over model": kB_sent(exchanges, "model", model),
    }
    return Run(row, collectives(forward.as_text(), model), exchanges)


def largest_error(a: Array, b: Array) -> float:
    """The largest error of a number in a, as a share of the largest number in b."""
    return np.abs(np.asarray(a) - b).max() / np.abs(b).max()


def counted(exchanges: list[Exchange]) -> str:
    """Exchanges as text: "all-reduce over model 2 x 4,096" are two arrays of 4,096 numbers each."""
    parts = []
    for collective, numbers in sorted(set(exchanges)):
        times = exchanges.count((collective, numbers))
        parts.append(f"{collective} {times} x {numbers:,}")
    return ", ".join(parts)


# ---- Plumbing ------------------------------------------------------------------------------------
def make() -> tuple[dict[str, np.ndarray], np.ndarray, np.ndarray]:
    """Weights, inputs and targets."""
    rng = np.random.default_rng(0)

    def noise(*shape):
        return rng.normal(size=shape).astype(np.float32)

    weights = {name: noise(*shape) / math.sqrt(D) for name, shape in SHAPES.items()}
    return weights, noise(B, T, D), noise(B, T, D)


def draw(rows: list[dict], path: str) -> None:
    os.environ.update(MPLBACKEND="agg", MATPLOTLIBRC=os.devnull)  # not a notebook's
    import matplotlib.pyplot as plt

    plt.style.use(["default", {"svg.hashsalt": "jNanoGPT", "font.size": 9}])
    figure, (left, right) = plt.subplots(1, 2, figsize=(7, 3.5), layout="constrained")
    corners = dict(q=(0, 9), k=(5, 9), v=(10, 9), out=(16, 9), up=(0, 1), down=(16, -6))
    sizes = dict(up=(12, 4), down=(4, 12))
    for name, (x, y) in corners.items():
        w, h = sizes.get(name, (4, 4))
        device = np.arange(4).reshape((4, 1) if name in ("out", "down") else (1, 4))
        left.imshow(device, extent=(x, x + w, y, y + h), cmap="tab10", vmax=9)
        left.text(x, y + h + 0.4, name)
    left.set(xlim=(-1, 21), ylim=(-6.5, 15), title="One colour: one of 4 devices")
    left.text(0, -5, "q, k, v, up: by columns\nout, down: by rows")
    left.axis("off")
    for i, name in enumerate(("weights", "sent over data", "sent over model")):
        heights = [row[name] for row in rows]
        right.bar(np.arange(4) + i / 4, heights, 0.23, label=name, color=f"C{i + 4}")
    right.set_xticks(np.arange(4) + 1 / 4, ["8 x 1", "4 x 2", "2 x 4", "2 x 4,\nwrong split"])
    right.set(xlabel="mesh: data x model", ylabel="kB on a device, in one step")
    right.legend()
    figure.savefig(path, metadata={"Date": None})


def check(what: str, right: bool) -> None:
    print("ok   " if right else "WRONG", what)
    if not right:
        sys.exit(1)


def main() -> None:
    jax.config.update("jax_platforms", "cpu")  # with 8 TPUs or GPUs, delete these two lines
    jax.config.update("jax_num_cpu_devices", DEVICES)
    cli = ArgumentParser(description=__doc__, formatter_class=RawDescriptionHelpFormatter)
    cli.add_argument("--draw", type=FileType("ab"), metavar="FILE.svg", help="also draw a picture")
    flags = cli.parse_args()
    args = make()
    print("Below, 2 x 4,096 means: two arrays, of which every device has 4,096 numbers each")
    expected = jax.device_get(jax.jit(step)(*args))  # on one device
    rows = []
    for model in 1, 2, 4:
        row, forward, both = run(model, SPLIT, args, expected)
        rows.append(row)
        text = f"  forward pass as in theory: {counted(forward)}"
        check(text, forward == theory(model, backward=False))
        text = f"  both passes as in theory: {counted(both)}"
        check(text, both == theory(model, backward=True))
    row, forward, _ = run(4, WRONG, args, expected)
    rows.append(row)
    hidden = "all-gather over model", B // 2 * T * F
    text = f"  `down` by columns, so forward gathers the hidden layer: {counted(forward)}"
    check(text, hidden in forward)
    print("\nkB on a device                       weights   sent over data  sent over model")
    for row in rows:
        print("{:29}{:15.1f}{:17.1f}{:17.1f}".format(*row.values()))
    if flags.draw:
        draw(rows, flags.draw.name)


if __name__ == "__main__":
    main()
