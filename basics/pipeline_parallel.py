"""Pipeline parallel: every device has a few layers, and microbatches pass through all devices.

Run     ./run.sh basics/pipeline_parallel.py [--draw FILE.svg]
Look    at the two schedules, `gpipe` and `one_f_one_b`, tables of what each stage does in each
        tick, and at `pipeline`, which follows any such table. They differ in how many inputs wait
        for their backward pass, not in how long a stage is idle
Source  GPipe: Huang et al. 2018, arXiv:1811.06965; 1F1B with a flush: Narayanan et al. 2021,
        arXiv:2104.04473
In train_gpt.py  there is no pipeline, because the model fits on every device. With `whole_weights`
        each has all layers, so it does not wait for another's output. `train_step` adds up
        gradients of microbatches, as here, but to save memory: `microbatch` is how many sequences a
        device computes at once
"""

import os
import sys
from argparse import ArgumentParser, FileType, RawDescriptionHelpFormatter
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, P, lax
from jax.sharding import AxisType, Mesh

S = 4  # stages
L = 2  # layers of a stage
D = 32  # width
F = 64  # hidden width
B = 64  # rows of a microbatch
COUNTS = 4, 8, 16  # numbers of microbatches to try
IDLE, FORWARD, BACKWARD = range(3)


# A table, (ticks, stages, 2): what a stage does in a tick, and with which microbatch.
def gpipe(M: int) -> np.ndarray:
    """M microbatches go forward, one behind the other; after that, all of them go back."""
    table = np.zeros((2 * (M + S - 1), S, 2), int)
    for s, m in np.ndindex(S, M):
        table[s + m, s] = FORWARD, m
        table[M + S - 1 + (S - 1 - s) + m, s] = BACKWARD, m
    return table


def one_f_one_b(M: int) -> np.ndarray:
    """A microbatch goes back as soon as it can. Stage s first takes S - s microbatches forward.
    After that it takes one backward and one forward, in turn."""
    table = np.zeros((2 * (M + S - 1), S, 2), int)
    for s, m in np.ndindex(S, M):
        is_one_of_the_first = m < S - s
        tick = s + m if is_one_of_the_first else s + 2 * m
        table[tick, s] = FORWARD, m
        table[S + (S - 1 - s) + 2 * m, s] = BACKWARD, m
    return table


def in_flight(table: np.ndarray) -> np.ndarray:
    """Microbatches that have gone forward and not yet back, by tick and stage."""
    forward = np.cumsum(table[..., 0] == FORWARD, axis=0)
    backward = np.cumsum(table[..., 0] == BACKWARD, axis=0)
    return forward - backward


def depth(table: np.ndarray) -> int:
    """How many inputs a stage must store at a time. An input arrives when the stage before has gone
    forward, and is dropped after its backward pass. All stages run one program, so the most of any
    stage counts."""
    arrived = np.cumsum(table[:, :-1, 0] == FORWARD, axis=0)
    dropped = np.cumsum(table[:, 1:, 0] == BACKWARD, axis=0)
    return int((arrived - dropped).max())


def layers(weights: tuple, x: Array) -> Array:
    """x: (rows, D); weights: of some layers, (layers, D, F) and (layers, F, D)."""
    for w_in, w_out in zip(*weights, strict=True):
        x = x + jnp.tanh(x @ w_in) @ w_out
    return x


def pipeline(table: np.ndarray, mesh: Mesh) -> Callable:
    """A program of (weights, inputs, targets) that returns the loss and the gradients of weights.
    Each device has one stage of weights, (S, L, ..). All have inputs and targets, (M, B, D), but
    only the first stage reads inputs, and only the last one reads targets."""
    M = table[..., 1].max() + 1
    slots = depth(table)

    def run(weights, inputs, targets):
        s = lax.axis_index("stage")
        last = s == S - 1
        weights = jax.tree.map(lambda w: w[0], weights)
        zero = lax.pcast(jnp.zeros((B, D)), "stage", to="varying")

        def tick(carry, row):
            # stash: inputs by slot; to_left: the gradient that the next stage has sent here
            stash, to_left, grads, loss = carry
            action, m = row[s]
            x = jnp.where(s == 0, inputs[m], stash[m % slots])

            def output_and_error(weights, x):
                y = layers(weights, x)
                return y, jnp.square(y - targets[m]).mean()

            def backward():
                # Goes forward a second time, because only the input was stored.
                (_, error), go_back = jax.vjp(output_and_error, weights, x)
                # The last stage's gradient comes from the loss, which is a mean over microbatches.
                share = jnp.where(last, 1 / M, 0.0)
                dw, dx = go_back((jnp.where(last, 0, to_left), share))
                return zero, dx, jax.tree.map(jnp.add, grads, dw), loss + share * error

            def idle():
                return zero, zero, grads, loss

            def forward():
                return layers(weights, x), zero, grads, loss

            to_right, to_left, grads, loss = lax.switch(action, (idle, forward, backward))
            # All devices take part in each exchange, whatever they have done in this tick.
            to_right = lax.ppermute(to_right, "stage", [(i, i + 1) for i in range(S - 1)])
            to_left = lax.ppermute(to_left, "stage", [(i + 1, i) for i in range(S - 1)])
            # What the stage before did. The first stage has none before it, and reads no stash.
            action_before, m_before = row[s - 1]
            slot = m_before % slots
            stash = stash.at[slot].set(jnp.where(action_before == FORWARD, to_right, stash[slot]))
            return (stash, to_left, grads, loss), None

        stash = jnp.stack(slots * [zero])
        grads = jax.tree.map(jnp.zeros_like, weights)
        start = stash, zero, grads, zero[0, 0]
        (_, _, grads, loss), _ = lax.scan(tick, start, jnp.asarray(table))
        return lax.psum(loss, "stage"), jax.tree.map(lambda g: g[None], grads)

    in_specs = P("stage"), P(), P()
    out_specs = P(), P("stage")
    return jax.jit(jax.shard_map(run, mesh=mesh, in_specs=in_specs, out_specs=out_specs))


def example(M: int) -> tuple:
    """Weights, inputs and targets."""
    rng = np.random.default_rng(0)

    def normal(scale, *shape):
        return np.float32(scale * rng.normal(size=shape))

    weights = normal(D**-0.5, S, L, D, F), normal(F**-0.5, S, L, F, D)
    return weights, normal(1, M, B, D), normal(1, M, B, D)


@jax.jit
def one_device(weights: tuple, inputs: Array, targets: Array) -> tuple[Array, tuple]:
    """All layers, all rows at once."""

    def loss(weights):
        whole = [w.reshape(S * L, *w.shape[2:]) for w in weights]
        return jnp.square(layers(whole, inputs.reshape(-1, D)) - targets.reshape(-1, D)).mean()

    return jax.value_and_grad(loss)(weights)


NAMES = {gpipe: "GPipe", one_f_one_b: "1F1B"}


def largest_error(a: Array, b: Array) -> float:
    """The largest error of a number in a, as a share of the largest number in b."""
    return float(np.abs(a - b).max() / np.abs(b).max())


def measure(schedule: Callable, M: int, mesh: Mesh) -> int:
    """Checks a schedule of M microbatches; returns its temporary memory on a device, in bytes."""
    table = schedule(M)
    arrays = example(M)
    idle = (table[..., 0] == IDLE).mean()
    most = in_flight(table).max(axis=0).tolist()
    program = pipeline(table, mesh).lower(*arrays).compile()
    errors = jax.tree.map(largest_error, program(*arrays), one_device(*arrays))
    error = max(jax.tree.leaves(errors))
    memory = program.memory_analysis().temp_size_in_bytes
    name = NAMES[schedule]
    print(f"{name:<13}{M:>12}{len(table):>8}{idle:>8.1%}{memory / 1e3:>8.0f} kB   {most}")
    check(f"loss and gradients are one device's within {error:.1e}, below 1e-5", error < 1e-5)
    expected = (S - 1) / (M + S - 1)
    check(f"idle by the table {idle:.4f}, by formula {expected:.4f}", abs(idle - expected) < 1e-9)
    expected = [M if schedule is gpipe else min(M, S - s) for s in range(S)]
    text = f"most microbatches in flight by the table {most}, by formula {expected}"
    check(text, most == expected)
    return memory


def draw(path: str, memory: dict[Callable, list[int]], M: int = 6) -> None:
    os.environ.update(MPLBACKEND="agg", MATPLOTLIBRC=os.devnull)  # not a notebook's
    import matplotlib.pyplot as plt

    plt.style.use(["default", {"svg.hashsalt": "jNanoGPT", "font.size": 9}])
    figure = plt.figure(figsize=(7.5, 3.4), layout="constrained")
    grid = figure.add_gridspec(2, 2, width_ratios=(3, 1))
    graph = figure.add_subplot(grid[:, 1])
    center = dict(ha="center", va="center", fontsize=8)
    colors = np.array([[255, 255, 255], [158, 202, 225], [253, 174, 107]], np.uint8)
    letters = {FORWARD: "F", BACKWARD: "B"}
    markers = {gpipe: "o-", one_f_one_b: "s-"}
    for row, (schedule, name) in enumerate(NAMES.items()):
        plot = figure.add_subplot(grid[row, 0])
        table = schedule(M)
        plot.imshow(colors[table[..., 0].T], aspect="auto", interpolation="none")
        for t, s in np.argwhere(table[..., 0]):
            action, m = table[t, s]
            plot.text(t, s, f"{letters[action]}{m}", **center)
        plot.set(ylabel="stage", yticks=range(S), xlabel="tick", xticks=range(0, len(table), 3))
        plot.set_title(f"{name}: forward (F) and backward (B) of {M} microbatches")
        graph.plot(COUNTS, np.array(memory[schedule]) / 1e3, markers[schedule], label=name)
    graph.set(xlabel="microbatches", ylabel="temporary memory, kB", ylim=0, xticks=COUNTS)
    graph.legend(loc="lower right")
    figure.savefig(path, metadata={"Date": None})


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
    mesh = jax.make_mesh((S,), ("stage",), axis_types=(AxisType.Auto,))
    print(f"{S} stages     microbatches   ticks    idle     memory   most in flight, by stage")
    memory = {}
    growth = {}  # bytes for each microbatch more
    for schedule in NAMES:
        sizes = [measure(schedule, M, mesh) for M in COUNTS]
        memory[schedule] = sizes
        growth[schedule] = (sizes[-1] - sizes[0]) / (COUNTS[-1] - COUNTS[0])
    an_input = 4 * B * D  # bytes
    check(
        f"one microbatch has {an_input} bytes of inputs; with each one more, memory grows by "
        f"{growth[gpipe]:.0f} bytes in GPipe, {growth[one_f_one_b]:.0f} in 1F1B",
        growth[gpipe] > 0.9 * an_input and growth[one_f_one_b] < 0.1 * an_input,
    )
    if flags.draw:
        draw(flags.draw.name, memory)


if __name__ == "__main__":
    main()
