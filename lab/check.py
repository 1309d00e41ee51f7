"""Measures how fast a machine is, and whether it computes right, before you pay for a run.

    ./run.sh check [PRESET] [--field value ...]   with the flags of the run that you plan
    ./run.sh check --only rates,head [PRESET ...] only these parts
    ./run.sh check --small                        all parts at a size for a CPU
    ./run.sh check --kernels [PRESET] [...]       whether the kernels for Hopper of records/ideas/
                                                  are right, and faster than XLA

PRESET is record, which is the default, or medium. The parts are rates (of memory, products, head
and links, in two minutes; a time is predicted from them); attention and head (values and gradients,
against float32); steps (20 of a small model, against a CPU); and memory (what the longest stage
needs; 20 of its steps are timed). Each line is PASS, FAIL, or INFO, which tests nothing. The last
line is CHECK, with all numbers as JSON to paste into an issue. The exit status is 0 if everything
passes, 1 if something fails, and 2 if there is nothing to check. A part that hangs ends the check,
with the stacks of all threads. No GPU has run this; all minutes are estimates.
"""

import argparse
import collections
import dataclasses
import faulthandler
import functools
import itertools
import os
import sys
import time
import timeit
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import jax
import numpy as np
from jax import Array, P, lax
from jax.sharding import Mesh, NamedSharding

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / name) for name in ("", "data", "lab", "records", "run")]
import launch  # noqa: E402
from h100 import estimate  # noqa: E402
from messages import one_line, refuse  # noqa: E402

import train_gpt  # noqa: E402
from lab import check_kernels  # noqa: E402
from lab.check_kernels import LIMIT, percent  # noqa: E402
from train_gpt import LONG, Config, Layer, Stage  # noqa: E402

PARTS = "rates", "attention", "head", "steps", "memory"
WORDS = {True: "PASS", False: "FAIL", None: "INFO"}
SMALL = dataclasses.replace(
    train_gpt.PRESETS["record"],
    layers=(Layer(LONG, paired_heads=True, key_offset=True, ngram=True, value_table=0),),
    stages=(Stage(400, 1024, short=8, long=16, max_doc=0, lr=1.0, targets=(1.0, (0.5, 0.0))),),
    mudd_head=(), D=64, H=2, F=128, R=8, vocab=257, eot=256, ngram_buckets=512, head_chunk=128,
    dc_window=12, val_T=1024, val_tokens=8192, prefixes="", seed=1,
)  # fmt: skip
# What healthy GPUs of these kinds reach in a node with NVLink, in 1e12 of the unit.
HOPPER = "NVIDIA H100 80GB HBM3", "NVIDIA H200"
COPY, PRODUCT, HEAD, GATHER = "copy, B/s", "product, FLOP/s", "head, FLOP/s", "gather, B/s"
FLOORS = {COPY: 2.5, PRODUCT: 500, HEAD: 600, GATHER: 0.25}


class Line(NamedTuple):
    """What a part has found."""

    passes: bool | None  # None: it tests nothing
    name: str
    text: str
    fact: Any  # for JSON


# ---- The command ---------------------------------------------------------------------------------
def main(argv: list[str]) -> int:
    """Runs the parts that are asked for, and returns the exit status."""
    options = parse_arguments(argv)
    if options.kernels and not options.attempt:
        return check_kernels.check_all(options.flags, options.small)
    c, mesh, facts = start(options)
    print(f"INFO  jax {jax.__version__} on {mesh.size} x {facts['device']}", flush=True)
    failed = []
    for name, part in make_parts(options, c, mesh).items():
        faulthandler.dump_traceback_later(LIMIT, exit=True)
        for line in run_part(name, part):
            print(f"{WORDS[line.passes]}  {line.text}", flush=True)
            facts[line.name] = line.fact
            failed += [line.name] * (line.passes is False)
    faulthandler.cancel_dump_traceback_later()
    check_kernels.print_facts(facts | {"failed": failed})
    return 1 if failed else 0


def parse_arguments(argv: list[str]) -> argparse.Namespace:
    """The options, with the parts to run, and with the preset and flags of the run. Exits with
    status 2 for what does not exist."""
    form = argparse.RawDescriptionHelpFormatter
    cli = argparse.ArgumentParser(description=__doc__, formatter_class=form, allow_abbrev=False)
    cli.error = refuse
    cli.add_argument("--only", default=",".join(PARTS), help="run only these parts, as rates,head")
    cli.add_argument("--small", action="store_true", help="run at a size for a CPU")
    cli.add_argument("--kernels", action="store_true", help="check the kernels for Hopper")
    cli.add_argument("--attempt", default="", help=argparse.SUPPRESS)  # in a process of its own
    cli.add_argument("--use", default="", help=argparse.SUPPRESS)  # attempts, for the last one
    options, options.flags = cli.parse_known_args(argv)
    options.parts = options.only.split(",")
    unknown = [name for name in options.parts if name not in PARTS]
    if unknown:
        refuse(f"--only: there is no part {unknown[0]!r}; the parts are {', '.join(PARTS)}")
    if options.small and options.flags:
        refuse(f"--small sets all sizes itself: leave out {' '.join(options.flags)}")
    run_config(options.flags)
    return options


def run_config(flags: list[str]) -> tuple[str, Config]:
    """The preset and the configuration of a run. The first flag may be the preset. Exits with
    status 2 if there is no such preset or flag."""
    preset = "record"
    if flags and not flags[0].startswith("-"):
        preset, *flags = flags
    if preset not in PAGES:
        refuse(f"there is no check of {preset!r}; there are those of {', '.join(PAGES)}")
    return train_gpt.parse_config([preset, "--seed", "1", *flags])


def start(options: argparse.Namespace) -> tuple[Config, Mesh, dict[str, Any]]:
    """Starts JAX. Returns the configuration as it fits this machine, the mesh, and facts."""
    if options.small:
        jax.config.update("jax_platforms", "cpu")
        jax.config.update("jax_disable_most_optimizations", True)  # they take most of the time
    launch.start_jax()
    if jax.devices()[0].platform == "cpu" and not options.small:
        refuse("JAX sees neither a GPU nor a TPU to check; on a CPU: ./run.sh check --small")
    launch.set_compilation_cache()
    c = check_kernels.SMALL if options.attempt else SMALL
    added = []
    if not options.small:
        preset, c = run_config(options.flags)
        added = launch.fit(preset, options.flags).split()
        c = run_config([*options.flags, *added])[1]
    devices, c = train_gpt.fit_devices(c)
    if options.attempt:
        reason = check_kernels.why_not(devices, options.small)
        if reason:
            refuse(f"there is nothing to check here: {reason}")
        if options.small:
            devices = devices[:1]  # with more, the interpreter fails inside shard_map
            check_kernels.interpret()
    facts = {"argv": sys.argv[1:], "jax": jax.__version__, "device": devices[0].device_kind}
    facts |= {"devices": len(devices), "fit": added, "flags": os.environ.get("XLA_FLAGS")}
    return c, train_gpt.make_mesh(devices), facts


def make_parts(options: argparse.Namespace, c: Config, mesh: Mesh) -> dict[str, Callable]:
    """The parts that are asked for, by name, ready to run. Each yields lines."""
    if options.attempt == check_kernels.STEPS:
        use = [name for name in options.use.split(",") if name]
        stage = longest_stage(c)

        def train(script, c, steps):
            return train_steps(c, stage, mesh, steps, script)

        steps = functools.partial(check_kernels.check_steps, c, use, options.small, train)
        return {options.attempt: steps}
    if options.attempt:
        arguments = options.attempt, c, longest_stage(c), options.small
        return {options.attempt: functools.partial(check_kernels.check_attempt, *arguments)}
    model, n = (SMALL, 256) if options.small else (train_gpt.PRESETS["tiny"], 8192)
    head = check_kernels.head_subject, (0.01, 0.15)
    attention = check_kernels.attention_subject, (0.02, 0.05)
    parts = {
        "rates": functools.partial(check_rates, c, mesh, n),
        "attention": functools.partial(check_function, c, "attention", *attention),
        "head": functools.partial(check_function, c, "head", *head),
        "steps": functools.partial(check_steps, model, mesh),
        "memory": functools.partial(check_memory, c, mesh),
    }
    return {name: part for name, part in parts.items() if name in options.parts}


def run_part(name: str, part: Callable[[], Iterator]) -> Iterator[Line]:
    """Yields the lines of a part, and one that fails if it ends with an error."""
    try:
        for line in part():
            yield Line(*line)
    except Exception as error:  # the next part may work
        why = f"{type(error).__name__}: {error}".splitlines()[0]
        yield Line(False, name, f"{name} ended with {why}", why)


# ---- Rates ---------------------------------------------------------------------------------------
def check_rates(c: Config, mesh: Mesh, n: int) -> Iterator[Line]:
    """Measures the rates of every device, so that one slow card shows. Products have n x n
    matrices, and copies 8 n^2 numbers, which is a gigabyte for n = 8192."""
    V = train_gpt.padded_vocab(c)
    tokens = c.head_chunk
    head = functools.partial(
        train_gpt.scaled_matmul, axes=(1, 1), scale=1.0, dtype=c.compute, precision=None
    )
    works = {  # bytes or operations; the function, its arguments' shapes and their format
        COPY: (32 * n * n, lambda x: x + 1, [(8 * n * n,)], c.compute),
        PRODUCT: (2 * n**3, lambda a, b: a @ b, [(n, n)] * 2, c.compute),
        HEAD: (2 * tokens * V * c.D, head, [(tokens, c.D), (V, c.D)], c.head_forward),
    }
    slowest = {}
    for name, (work, run, shapes, dtype) in works.items():
        arrays = [normal(i, *shape, dtype=dtype) for i, shape in enumerate(shapes)]
        rates = []
        for device in mesh.devices.flat:
            rates.append(work / seconds(jax.jit(run), *jax.device_put(arrays, device)))
        slowest[name] = min(rates)
        yield rated(name, rates, mesh)
    if mesh.size > 1:
        slowest[GATHER] = gathered(mesh, n)
        yield rated(GATHER, [slowest[GATHER]], mesh)
    if mesh.devices.flat[0].platform == "gpu":  # the programs were not compiled for others
        yield predicted(c, mesh.size, slowest)


def normal(seed: int, *shape: int, dtype: str = "bfloat16") -> Array:
    """An array of random numbers."""
    return jax.random.normal(jax.random.key(seed), shape).astype(dtype)


def seconds(run: Callable, *arrays: Array) -> float:
    """Seconds per call: the best of four rounds of five calls. The first round compiles."""

    def five_calls():
        jax.block_until_ready([run(*arrays) for _ in range(5)])

    return min(timeit.repeat(five_calls, number=1, repeat=4)) / 5


def gathered(mesh: Mesh, n: int) -> float:
    """Bytes per second that a device receives while all devices collect 8 n^2 numbers."""

    def gather(x):
        return lax.all_gather(x, "fsdp", tiled=True, to="invarying")

    x = jax.device_put(normal(0, 8 * n * n), NamedSharding(mesh, P("fsdp")))
    run = jax.jit(jax.shard_map(gather, mesh=mesh, in_specs=P("fsdp"), out_specs=P()))
    return x.nbytes * (mesh.size - 1) / mesh.size / seconds(run, x)


def rated(name: str, rates: list[float], mesh: Mesh) -> Line:
    """A line that fails for rates below the floor of their kind, or a tenth below the median. Of
    CPUs, and of a single device of an unknown kind, nothing is expected."""
    device = mesh.devices.flat[0]
    rates = [float(f"{rate / 1e12:.3g}") for rate in rates]
    what, unit = name.split(", ")
    text = f"{what}: {min(rates):g} to {max(rates):g} T{unit} on {mesh.size} devices"
    floor = FLOORS[name] if device.device_kind in HOPPER else 0
    if len(rates) > 1:
        floor = max(floor, 0.9 * float(np.median(rates)))
    if device.platform == "cpu" or not floor:
        return Line(None, name, text, rates)
    slow = [i for i, rate in enumerate(rates) if rate < floor]
    text += f", expected at least {floor:.3g}"
    text += f": devices {slow} are too slow" if slow else ""
    return Line(not slow, name, text, rates)


# ---- The predicted time --------------------------------------------------------------------------
# The tables with the milliseconds of each step on eight H100s, by kind of work.
PAGES = {"record": "h100_compile.txt", "medium": "h100_compile_medium.txt"}
DEVICES = 8
# What decides how much work a step is. Other fields, and how a step is cut into sequences, do not.
SIZES = "layers", "stages", "D", "H", "F", "R", "vocab", "ngrams"
# Upstream's steps are faster than the estimate and other things may be slower: zeros that XLA
# writes, products that miss their rates, clocks that fall, a head without FP8.
SLOWER = 1.2


def predicted(c: Config, devices: int, rates: dict[str, float]) -> Line:
    """A line on the time of the run: the page's milliseconds, scaled from the rates that
    lab/h100/estimate.py assumes to those of the slowest device. No step is timed."""
    name = "predicted from rates"
    preset = ""
    for known in PAGES:
        same = [getattr(c, size) == getattr(train_gpt.PRESETS[known], size) for size in SIZES]
        preset = known if all(same) else preset
    if not preset:
        return Line(None, name, "no time is predicted: no such program was compiled", None)
    work = work_of_steps(preset)
    ms = 0.0
    for step in range(c.total_steps):
        of_step = work[int(c.stage_at(step)), "second" if c.is_adam_step(step) else "first"]
        parts = (of_step["gemm"] + of_step["attention"]) * estimate.BFLOAT16 / rates[PRODUCT]
        parts += of_step["other"] * estimate.MEMORY / rates[COPY] + of_step["launches"]
        ms += parts * DEVICES / devices  # fewer devices do more each
        if devices > 1:
            ms += of_step["exposed"] * estimate.LINKS / rates[GATHER] + of_step["stolen"]
    text = f"predicted time of training: {ms / 1e3:.0f} to {SLOWER * ms / 1e3:.0f} s on {devices} "
    text += "devices, from these rates and the compiled programs' work; no step was timed"
    return Line(None, name, text, ms / 1e3)


def work_of_steps(preset: str) -> dict[tuple[int, str], dict[str, float]]:
    """For a stage and the kind of a step, the milliseconds of its work by estimate.PARTS."""
    page = (ROOT / "records/gpu" / PAGES[preset]).read_text(encoding="utf-8")
    section = page.partition("## Milliseconds of a step")[2].partition("\n## ")[0]
    steps = {}
    for line in section.splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if len(cells) > 2 and cells[1] in ("first", "second"):
            numbers = map(float, cells[2:8])
            steps[int(cells[0]), cells[1]] = dict(zip(estimate.PARTS, numbers, strict=True))
    return steps


# ---- Values and gradients ------------------------------------------------------------------------
def check_function(c: Config, name: str, subject_of: Callable, limits: tuple) -> Iterator[Line]:
    """Compares a function of train_gpt.py and its gradients, in the shapes of the last stage, with
    the same in float32, by the rms of errors relative to that of values. The limits are those of
    the result and of gradients. cuDNN's faults raise no error: it may ignore a window."""
    subject = subject_of(c, len(c.stages) - 1)
    arrays = list(subject.arrays.values())
    exact = dataclasses.replace(c, compute="float32", attention="band").without_fp8()
    y = jax.jit(functools.partial(subject.run, train_gpt, c))(*arrays)
    dy = (y + 1).astype(y.dtype)
    found = jax.jit(check_kernels.with_gradients(subject, train_gpt, c))(dy, *arrays)
    with jax.default_matmul_precision("highest"):  # or GPUs round what they multiply
        run = jax.jit(check_kernels.with_gradients(subject, train_gpt, exact))
        right = run(*(array.astype("float32") for array in (dy, *arrays)))
    errors = [check_kernels.errors_of(a, b)[1] for a, b in zip(found, right, strict=True)]
    largest = float(np.max(errors[1:]))
    passes = errors[0] < limits[0] and largest < limits[1]
    text = f"{name} {'agrees with' if passes else 'differs from'} float32: error "
    text += f"{percent(errors[0])}, expected below {percent(limits[0])}; largest error in a "
    text += f"gradient {percent(largest)}, expected below {percent(limits[1])}"
    yield Line(passes, name, text, errors)


# ---- Steps of training ---------------------------------------------------------------------------
STEPS = 20
LEARNS = 0.95  # of its first value, to which a loss must fall in so many steps
APART = 2e-3  # nats, by which losses in float32 may differ


def longest_stage(c: Config) -> int:
    """The stage whose steps read the most tokens together."""
    tokens = collections.Counter()
    for step in range(c.total_steps):
        stage = int(c.stage_at(step))
        tokens[stage] += c.stages[stage].tokens
    return max(tokens, key=tokens.get)


def compile_cycle(
    c: Config, stage: int, mesh: Mesh, script: ModuleType = train_gpt
) -> list[Callable]:
    """The programs of a stage's successive steps, until they repeat. The script is train_gpt.py, or
    a copy of it."""
    kinds = [c.is_adam_step(step) for step in range(c.adam_every)]
    return [script.compile_train_step(stage, kind, c, mesh) for kind in kinds]


def training(
    programs: list[Callable], c: Config, stage: int, mesh: Mesh, script: ModuleType = train_gpt
) -> Iterator[Array]:
    """Trains from fresh weights, with the programs of a stage's cycle in turn, without end, on four
    batches in which a few tokens are frequent, and documents have 400 tokens. Rates are those of
    the run's first step. Yields the loss of every step, which the devices may still compute."""
    rows = script.schedule(c)
    first_step = int([0, *c.stage_ends][stage])
    row = rows[0]._replace(loss_weights=rows[first_step].loss_weights)
    rng = np.random.default_rng(1)
    batches = []
    for _ in range(4):
        tokens = rng.random((c.batch, c.sequence_length(stage) + 1)) ** 4 * c.vocab
        tokens[:, ::400] = c.eot
        batches.append((tokens.astype(np.int32), row))
    whole = NamedSharding(mesh, P())
    shardings = NamedSharding(mesh, P(mesh.axis_names)), jax.tree.map(lambda _: whole, row)
    on_devices = train_gpt.prefetch(itertools.cycle(batches), shardings)
    state = script.make_state(c, mesh)
    for program, (tokens, row) in zip(itertools.cycle(programs), on_devices, strict=False):
        state, loss = program(state, tokens, row)
        yield loss


def train_steps(
    c: Config, stage: int, mesh: Mesh, steps: int = STEPS, script: ModuleType = train_gpt
) -> tuple[np.ndarray, float]:
    """The losses of some steps, and the mean milliseconds of the later half. The host waits for a
    loss only when two later steps have started, so that the devices always have work."""
    losses = []
    times = []
    programs = compile_cycle(c, stage, mesh, script)
    for loss in itertools.islice(training(programs, c, stage, mesh, script), steps):
        losses.append(loss)
        if len(losses) > 2:
            jax.block_until_ready(losses[-3])
            times.append(time.perf_counter())
    for loss in losses[-2:]:
        jax.block_until_ready(loss)
        times.append(time.perf_counter())
    ms = 1e3 * np.diff(times)[-(steps // 2) :]
    return np.array([float(loss) for loss in losses]), float(np.mean(ms))


def check_steps(c: Config, mesh: Mesh) -> Iterator[Line]:
    """STEPS steps of a small model in float32, on a CPU, on one device and on all of them."""
    c = dataclasses.replace(c, compute="float32", attention="band", seed=1).without_fp8()
    stage = Stage(STEPS, 2048, short=64, long=192, max_doc=0, lr=1.0)
    c = dataclasses.replace(c, stages=(stage,), batch=8, pointer=0)
    cpu = tuple(jax.local_devices(backend="cpu")[:1])
    devices = tuple(mesh.devices.flat)
    right = None
    for some in dict.fromkeys((cpu, devices[:1], devices)):
        name = f"steps, {len(some)} {some[0].platform}"
        of_some = train_gpt.make_mesh(some)
        with jax.default_matmul_precision("highest"):
            found, _ = train_steps(c, 0, of_some)
        if right is None:
            right = found
            yield learns(found, name, f"{STEPS} steps of a small model on a CPU")
            continue
        apart = float(np.abs(found - right).max())
        text = f"on {len(some)} x {some[0].platform} they have the same losses: largest difference "
        text += f"{apart:.1g}, expected below {APART:g}"
        yield Line(apart < APART, name, text, apart)


def learns(losses: np.ndarray, name: str, what: str) -> Line:
    """A line on whether the loss falls by a twentieth."""
    most = LEARNS * losses[0]
    text = f"{what} bring the loss from {losses[0]:.4f} to {losses[-1]:.4f}, expected at most "
    return Line(bool(losses[-1] < most), name, f"{text}{most:.4f}", losses.tolist())


def check_memory(c: Config, mesh: Mesh) -> Iterator[Line]:
    """Says how much memory the longest stage needs, and times STEPS steps of it."""
    stage = longest_stage(c)
    plans = [program.memory_analysis() for program in compile_cycle(c, stage, mesh)]
    planned = max(plan.argument_size_in_bytes + plan.temp_size_in_bytes for plan in plans) / 1e9
    losses, ms = train_steps(c, stage, mesh)
    stats = [device.memory_stats() or {} for device in mesh.devices.flat]
    used = max(stat.get("peak_bytes_in_use", 0) for stat in stats) / 1e9
    text = f"for stage {stage}, the compiler plans {planned:.2f} GB of each device, and at most "
    yield Line(None, "memory", f"{text}{used:.2f} GB were in use", [planned, used])
    yield Line(None, "ms", f"a step of stage {stage} takes {ms:.2f} ms", ms)
    yield learns(losses, f"stage {stage}", f"{STEPS} such steps")


if __name__ == "__main__":
    with one_line("check"):
        status = main(sys.argv[1:])
    sys.exit(status)
