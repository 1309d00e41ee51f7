"""Tensor parallel: the matrices of a block are split over devices, and its work with them.

Run     ./run.sh basics/tensor_parallel.py [--draw FILE.svg]
Look    at `SPLIT`: its four lines are all that is parallel, jit does the rest. A first matrix is
        split by columns and the second one by rows: what lies between them stays on its device,
        and one sum over devices ends each pair. `theory` is held against what XLA has compiled
Source  Megatron-LM: Shoeybi et al. 2019, arXiv:1909.08053
In train_gpt.py  no product is split: a device has whole sequences and, by `whole_weights`, all
        weights. The model fits a GPU with ease, and devices would wait for four sums a block
"""

import argparse
import math
import re
import sys

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, P, lax
from jax.sharding import AxisType, NamedSharding

B, T, D, H, F = 8, 32, 64, 8, 256  # sequences, tokens in each, width, heads, hidden width
# Heads are an axis of qkv. Of one (D, 3 D) matrix a device's columns would run across q, k and v:
# some heads' queries, other heads' values.
SHAPES = dict(qkv=(D, 3, H, D // H), out=(H, D // H, D), up=(D, F), down=(F, D))
SPLIT = dict(
    qkv=P(None, None, "model", None),  # by columns: a device has H / model heads
    out=P("model", None, None),  # by rows: those that read these heads
    up=P(None, "model"),  # by columns
    down=P("model", None),  # by rows
)
WRONG = SPLIT | dict(down=P(None, "model"))  # a column of it reads the whole hidden layer
norm = lambda x: x * lax.rsqrt(jnp.square(x).mean(axis=-1, keepdims=True) + 1e-6)
loss_fn = lambda w, x, target: jnp.square(block(w, x) - target).mean()
step = jax.value_and_grad(loss_fn, argnums=(0, 1))  # a block below would need the gradient of x


def block(w: dict[str, Array], x: Array) -> Array:
    """The model as for one device: nothing in it says where anything is."""
    q, k, v = jnp.einsum("BTD,DsHK->sBTHK", norm(x), w["qkv"])
    y = jax.nn.dot_product_attention(q, k, v, is_causal=True)  # head by head
    x = x + jnp.einsum("BTHK,HKD->BTD", y, w["out"])  # sums over heads, so over devices
    hidden = jnp.square(jax.nn.relu(norm(x) @ w["up"]))
    return x + hidden @ w["down"]  # sums over hidden channels, so over devices


def theory(model: int, backward: bool) -> list[tuple[str, int]]:
    """What a device exchanges. Over model: sums where attention and MLP end, and of gradients where
    they begin. Over data: its weights' gradients, and the loss."""
    sums = [("all-reduce over model", B * model // 8 * T * D)] * (4 if backward else 2)
    grads = [("all-reduce over data", math.prod(s) // model) for s in SHAPES.values() if backward]
    return sorted([("all-reduce over data", 1), *sums * (model > 1), *grads])


def collectives(text: str, model: int) -> list[tuple[str, int]]:
    """What compiled text exchanges, and of how many numbers; one line may do so with several
    arrays. Axes are told apart by the size of the groups: on our meshes it differs."""
    found, kinds = [], "all-reduce|all-gather|reduce-scatter|all-to-all|collective-permute"
    for shapes, kind, rest in re.findall(rf" = (.*?) ({kinds})(?:-start)?\((.*)", text):
        listed = re.findall(r"groups=\{\{([\d,]+)", rest)  # as in {{0,1},{2,3}}
        cut = re.findall(r"groups=\[\d+,(\d+)\]", rest)  # [2,2]<=[4]: two groups of two
        along = re.findall(r"('\w+')=(\d+)[^{]*\{\1\}", rest)  # mesh['a'=2,'b'=2] {'b'}: along b
        sizes = [*map(int, cut), *(int(n) for _, n in along), *(s.count(",") + 1 for s in listed)]
        axis = "data" if sizes == [8 // model] else "model"  # permutes have no groups
        for shape in re.findall(r"f32\[([\d,]*)\]", shapes):
            found.append((f"{kind} over {axis}", math.prod(map(int, re.findall(r"\d+", shape)))))
    return sorted(found)


def run(model: int, split: dict[str, P], args: tuple, expected: tuple) -> tuple:
    """Checks a step's numbers on a mesh; a row of kB on a device, and what it exchanges."""
    mesh = jax.make_mesh((8 // model, model), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
    places = jax.tree.map(lambda spec: NamedSharding(mesh, spec), (split, P("data"), P("data")))
    outs = None, places[:2]  # each gradient where its parameter is
    forward = jax.jit(loss_fn, in_shardings=places).lower(*args).compile()
    both = jax.jit(step, in_shardings=places, out_shardings=outs).lower(*args).compile()
    loss, grads = both(*jax.device_put(args, places))
    distance = lambda a, b: np.abs(np.asarray(a) - b).max() / np.abs(b).max()
    off = max(jax.tree.leaves(jax.tree.map(distance, (loss, grads), expected)))
    held = sum(grad.addressable_shards[0].data.nbytes for grad in grads[0].values()) / 1000
    name = f"data {8 // model} x model {model}{', wrong split' * (split is WRONG)}"
    check(f"{name}: off one device's numbers by {off:.1e} of the largest, below 1e-5", off < 1e-5)
    row = {"mesh": name, "weights held": held, "sent over data": 0.0, "sent over model": 0.0}
    forward, both = (collectives(program.as_text(), model) for program in (forward, both))
    for what, n in both:  # in a ring of p go round n / p at a time, of an all-reduce twice
        axis, times = what.split()[-1], 2 if "all-reduce" in what else 1
        row[f"sent over {axis}"] += times * (1 - 1 / mesh.shape[axis]) * n * 4 / 1000
    return row, forward, both


def check(what: str, right: bool) -> None:
    print("ok   " if right else "WRONG", what)
    if not right:
        sys.exit(1)


def draw(rows: list[dict], path: str) -> None:
    import matplotlib.pyplot as plt

    plt.rcParams.update({"svg.hashsalt": "jNanoGPT", "font.size": 9})
    figure, (left, right) = plt.subplots(1, 2, figsize=(7, 3.5), layout="constrained")
    corners = dict(q=(0, 9), k=(5, 9), v=(10, 9), out=(16, 9), up=(0, 1), down=(16, -6))
    for name, (x, y) in corners.items():
        w, h = dict(up=(12, 4), down=(4, 12)).get(name, (4, 4))
        device = np.arange(4).reshape((4, 1) if name in ("out", "down") else (1, 4))
        left.imshow(device, extent=(x, x + w, y, y + h), cmap="tab10", vmax=9)
        left.text(x, y + h + 0.4, name)
    left.set(xlim=(-1, 21), ylim=(-6.5, 15), title="One colour: one of 4 devices")
    left.text(0, -5, "q, k, v, up: by columns\nout, down: by rows")
    left.axis("off")
    for i, name in enumerate(("weights held", "sent over data", "sent over model")):
        heights = [row[name] for row in rows]
        right.bar(np.arange(4) + i / 4, heights, 0.23, label=name, color=f"C{i + 4}")
    right.set_xticks(np.arange(4) + 1 / 4, ["8 x 1", "4 x 2", "2 x 4", "2 x 4,\nwrong split"])
    right.set(xlabel="mesh: data x model", ylabel="kB on a device, in one step")
    right.legend()
    figure.savefig(path, metadata={"Date": None})


def main() -> None:
    jax.config.update("jax_platforms", "cpu")  # with 8 TPUs or GPUs, delete these two lines
    jax.config.update("jax_num_cpu_devices", 8)
    cli = argparse.ArgumentParser(description=__doc__)
    cli.formatter_class = argparse.RawDescriptionHelpFormatter
    cli.add_argument("--draw", metavar="FILE.svg")
    path, rng, rows = cli.parse_args().draw, np.random.default_rng(0), []
    noise = lambda *shape: rng.normal(size=shape).astype("f4")
    args = {n: noise(*s) / math.sqrt(D) for n, s in SHAPES.items()}, noise(B, T, D), noise(B, T, D)
    print("Below, 2 x 4,096 are two arrays of 4,096 numbers each, on every device")
    expected = jax.device_get(jax.jit(step)(*args))  # on one device
    tell = lambda x: ", ".join(f"{what} {x.count((what, n))} x {n:,}" for what, n in sorted({*x}))
    for model, split in (1, SPLIT), (2, SPLIT), (4, SPLIT), (4, WRONG):
        row, forward, both = run(model, split, args, expected)
        rows.append(row)
        if split is SPLIT:
            check(f"  forward as in theory: {tell(forward)}", forward == theory(model, False))
            check(f"  with backward: {tell(both)}", both == theory(model, True))
    hidden = "all-gather over model", B // 2 * T * F
    check(f"  but `down` is split by columns; forward: {tell(forward)}", hidden in forward)
    print("\nkB on a device               ", *(f"{name:>16}" for name in rows[0] if name != "mesh"))
    for row in rows:
        print("{:29}{:17.1f}{:17.1f}{:17.1f}".format(*row.values()))
    if path:
        draw(rows, path)


if __name__ == "__main__":
    main()
