"""Compiles the record for TPUs without a TPU, fitted to their memory, and checks what came out.

    python lab/compile_tpu.py [--only v5e-8 ...]       with jax[tpu]; 4 to 10 minutes per program

It compiles all programs of a run on v5e-8, which Kaggle has. For the other chips, it compiles the
longest step that updates everything and the last validation, because the others need less. Each
program is a row of records/gpu/tpu_compile.txt as soon as it is compiled. A second start keeps the
rows of programs that have not changed and compiles the rest. The compiler shows memory, collectives
and formats, but neither speed nor results.

How to read collectives: if the shares of a gradient are not whole tiles, a fusion called
all-reduce-scatter scatters it. The fusion has padding, all-reduce and slice, and works like a
reduce-scatter. Afterwards, neighbors permute the rows that padding moved. A gather that is hidden
behind kernels has a copy in each of them, so only its start counts. A single chip has no
collectives.
"""

import argparse
import math
import os
import re
import sys
import time
from collections.abc import Iterator
from importlib.metadata import distributions, version
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

os.environ["JAX_PLATFORMS"] = "cpu"
ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / name) for name in ("", "data", "lab", "records", "run")]

import jax  # noqa: E402
import machine  # noqa: E402
from compile_8xh100 import any_prefixes, compile_step, digest_line, record_programs  # noqa: E402
from h100.checks import expected_program  # noqa: E402
from jax.experimental import topologies  # noqa: E402
from jax.sharding import Mesh  # noqa: E402
from messages import refuse  # noqa: E402

import train_gpt  # noqa: E402

PAGE = ROOT / "records/gpu/tpu_compile.txt"
MISSING = f"JAX has no TPU compiler: install jax[tpu]=={jax.__version__}, which needs no TPU"
SHARE = 0.9  # of a chip's memory that a program may take
COLUMNS = (
    "chip   program       T  compile s  arguments GB  temporaries GB  with all of the state GB  "
    "collectives; operands of the head; checks"
)


class Chip(NamedTuple):
    """A TPU, or eight of them in one host."""

    kind: str  # as JAX names it
    topology: str
    devices: int
    GB: float  # memory that JAX has of each device, in 1e9 bytes
    whole_run: bool  # whether all programs of a run are compiled


CHIPS = {
    "v5e-8": Chip("TPU v5 lite", "v5e:2x4", 8, 16.9, whole_run=True),
    "v5e-1": Chip("TPU v5 lite", "v5e:1x1", 1, 16.9, whole_run=False),
    "v6e-8": Chip("TPU v6 lite", "v6e:2x4", 8, 33.5, whole_run=False),
    "v6e-1": Chip("TPU v6 lite", "v6e:1x1", 1, 33.5, whole_run=False),
}


class Program(NamedTuple):
    """One of the programs of a run; kind and stage as in compile_step()."""

    chip: str
    kind: str
    stage: int


class Compiled(NamedTuple):
    """What XLA made of a program."""

    text: str  # optimized HLO
    arguments_GB: float
    temporaries_GB: float
    seconds: float  # that compiling took


# ---- Programs ------------------------------------------------------------------------------------
def fitted_config(chip: Chip) -> train_gpt.Config:
    """The record as it is fitted to this chip's memory and kernels."""
    flags = machine.fit("record", chip.GB, chip.devices)
    c = train_gpt.parse_config(["record", "--seed", "1", *flags.split()])[1]
    device = SimpleNamespace(platform="tpu", device_kind=chip.kind)
    return train_gpt.fit_kernels(device, c)


def programs(name: str) -> list[Program]:
    """The programs of a chip that are compiled, those first that need the most memory."""
    chip = CHIPS[name]
    c = fitted_config(chip)
    run = [Program(name, kind, stage) for kind, stage in record_programs(c)]
    order = ["second", "val", "first"]
    run.sort(key=lambda program: (order.index(program.kind), -program.stage))
    if chip.whole_run:
        return run
    steps = [program for program in run if program.kind == "second"]
    validations = [program for program in run if program.kind == "val"]
    return [steps[0], validations[0]]  # of the last stages: none is longer, or has wider windows


def make_mesh(chip: Chip) -> Mesh:
    """A mesh of this chip's devices, which exist for the compiler only."""
    # So that libtpu looks for neither a TPU nor the servers that describe one.
    os.environ["TPU_SKIP_MDS_QUERY"] = "1"
    os.environ["TPU_WORKER_HOSTNAMES"] = "localhost"
    os.environ["TPU_ACCELERATOR_TYPE"] = "v5litepod-8"
    bounds = {} if chip.devices > 1 else {"chips_per_host_bounds": (1, 1, 1)}
    devices = topologies.get_topology_desc(chip.topology, "tpu", **bounds).devices
    kinds = [device.device_kind for device in devices]
    assert kinds == [chip.kind] * chip.devices, kinds
    return train_gpt.make_mesh(list(devices))


def compile_for_tpu(program: Program, c: train_gpt.Config, mesh: Mesh) -> Compiled:
    """Compiles a program of train_gpt.py."""
    start = time.perf_counter()
    result = compile_step(program.kind, program.stage, c, mesh)
    seconds = time.perf_counter() - start
    memory = result.memory_analysis()
    arguments_GB = memory.argument_size_in_bytes / 1e9
    return Compiled(result.as_text(), arguments_GB, memory.temp_size_in_bytes / 1e9, seconds)


# ---- What is in a program ------------------------------------------------------------------------
KINDS = ("all-gather", "reduce-scatter", "all-reduce", "collective-permute", "all-to-all")
COLLECTIVE = rf" = (.*?) ({'|'.join(KINDS)})(-start)?\("
SHAPE = re.compile(r"\b[a-z]\w*\[([\d,]*)\]")  # as in bf16[8,128]; one group: the axes


def elements(axes: str) -> int:
    """Elements of an array with axes like "8,128"."""
    return math.prod(int(n) for n in axes.split(",") if n)


def collectives(text: str) -> dict[str, list[int]]:
    """Of every kind, elements of all arrays that it returns to a device."""
    found = {kind: [] for kind in KINDS}
    name = ""
    kind = ""
    started = re.findall(r"%async-collective-start\S* = .* calls=%([\w.-]+)", text)
    pieces = {*re.findall(r"calls=%([\w.-]+)", text)} - {*started}  # fusions, but no starts
    for line in text.splitlines():
        head = re.match(r"(?:ENTRY )?%([\w.-]+) \(.*\) -> (.*) \{$", line)
        collective = re.search(COLLECTIVE, line)
        if head:
            name, returned = head.groups()
            kind = "reduce-scatter" if name.startswith("all-reduce-scatter") else ""
        elif collective and not name.startswith("all-reduce-scatter"):
            returned, kind, starts = collective.groups()
            if kind != "all-reduce" and name in pieces:
                kind = ""
            if starts and returned[0] == "(":  # (operand, result, ...)
                returned = returned.split("}, ")[1]
        else:
            continue
        if kind:
            found[kind] += [elements(axes) for axes in SHAPE.findall(returned)]
    return found


def head_formats(text: str, V: int) -> list[tuple[str, ...]]:
    """Formats of the operands of every matrix product that has the vocabulary in it."""
    arrays = {}
    for name, dtype, axes in re.findall(r"%([\w.-]+) = ([a-z]\w*)\[([\d,]*)\]", text):
        arrays[name] = dtype, axes.split(",")
    formats = []
    product = r"%([\w.-]+) = \S+ (?:convolution|dot)\(%([\w.-]+), %([\w.-]+)\)"
    for out, a, b in re.findall(product, text):
        if any(str(V) in arrays[name][1] for name in (out, a, b)):
            formats.append(tuple(sorted((arrays[a][0], arrays[b][0]))))
    return sorted(formats)


def pairs_of_positions(text: str, T: int, c: train_gpt.Config) -> list[str]:
    """Shapes of arrays, also of those inside of kernels, that may have an element for every pair of
    T positions: all with T * T elements or more, except those with an axis of D, 3 D or F channels
    or of the V tokens of the vocabulary, as activations, tables and logits have. Scores have none
    of these, however their positions and heads are reshaped. T must be greater than D, because
    activations may be split into heads."""
    assert T > c.D
    V = train_gpt.param_table(c)["head"].shape[0]
    known = {str(n) for n in (c.D, 3 * c.D, c.F, V)}
    shapes = sorted(set(SHAPE.findall(text)))
    large = [axes for axes in shapes if elements(axes) >= T * T]
    return [axes for axes in large if known.isdisjoint(axes.split(","))]


def state_GB(c: train_gpt.Config, mesh: Mesh) -> float:
    """Gigabytes of the state on each device: validation does not read all of it."""
    arrays = jax.tree.leaves(train_gpt.state_shapes(c, mesh))
    shares = [math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize for x in arrays]
    return sum(shares) / 1e9


# ---- Checks --------------------------------------------------------------------------------------
def faults(program: Program, c: train_gpt.Config, text: str, GB: float) -> Iterator[str]:
    """What is not as it must be. GB is what the program takes together with the state."""
    chip = CHIPS[program.chip]
    if GB > SHARE * chip.GB:
        yield f"{GB:.2f} GB are more than {SHARE} of {chip.GB} GB"
    T = c.val_T if program.kind == "val" else c.sequence_length(program.stage)
    pairs = pairs_of_positions(text, T, c)
    if pairs:
        yield f"arrays of {pairs} may have an element for every pair of {T} positions"
    yield from wrong_collectives(program, c, collectives(text))
    # In HLO, bfloat16 is bf16 and float8_e4m3fn is f8e4m3fn.
    x = c.head_forward.replace("float", "f").replace("_", "")
    g = c.head_backward.replace("float", "f").replace("_", "")
    expected = [("bf16", "bf16")] if program.kind == "val" else [(x, x), (x, g), (x, g)]
    head = head_formats(text, train_gpt.param_table(c)["head"].shape[0])
    if head != expected:
        yield f"the head multiplies {head}, not {expected}"


def wrong_collectives(program: Program, c: train_gpt.Config, found: dict) -> Iterator[str]:
    """What collectives() has found and must not be there, or is missing."""
    devices = CHIPS[program.chip].devices
    if devices == 1:
        if any(found.values()):
            yield f"collectives {found} on a single chip"
        return
    table = train_gpt.param_table(c)
    banks = [p for p in table.values() if p.kind == train_gpt.BANK]
    lookups = [p for p in table.values() if p.kind == train_gpt.LOOKUP]
    train = program.kind != "val"
    groups = sum(p.shape[0] for p in banks)  # each is sent as one array
    expected = expected_program(program.kind, program.stage, c, devices)
    # Training also gathers which rows of the ngram table were read, and their gradients.
    gathers = groups + len(lookups) * (program.kind != "first") + 2 * train
    gathered = found["all-gather"]
    if (len(gathered), sum(gathered)) != (gathers, expected.gathered):
        yield (
            f"{len(gathered)} arrays of {sum(gathered)} are gathered, not {gathers} of "
            f"{expected.gathered}"
        )
    shares = found["reduce-scatter"]
    scatters = (groups + len(lookups) - 1) * train  # of all gradients but the ngram table's
    padded = devices * sum(shares) / max(1, expected.scattered)  # to whole tiles
    if len(shares) != scatters or train and not 1 <= padded <= 1.05:
        yield f"{len(shares)} arrays of {padded:.3f} x {expected.scattered} are reduce-scattered"
    small = sum(math.prod(p.shape) for p in table.values() if p.kind == train_gpt.REPLICATED)
    reduced = found["all-reduce"]
    if not 0 < sum(reduced) <= small + 1 or found["all-to-all"]:  # 1: the loss
        yield f"all-reduces {reduced}, all-to-alls {found['all-to-all']}: only small ones need them"


# ---- The page ------------------------------------------------------------------------------------
def row(program: Program, c: train_gpt.Config, compiled: Compiled, state: float) -> str:
    """A program's line of the page; `state` is that of state_GB()."""
    text = compiled.text
    T = c.val_T if program.kind == "val" else c.sequence_length(program.stage)
    GB = max(state, compiled.arguments_GB) + compiled.temporaries_GB
    counts = [f"{len(sizes)} {kind}" for kind, sizes in collectives(text).items() if sizes]
    head = head_formats(text, train_gpt.param_table(c)["head"].shape[0])
    wrong = "; ".join(faults(program, c, text, GB))
    return (
        f"{title(program)} {T:6} {compiled.seconds:10.0f} {compiled.arguments_GB:13.2f} "
        f"{compiled.temporaries_GB:15.2f} {GB:25.2f}  {', '.join(counts) or 'none'}; "
        f"{', '.join(map('*'.join, head))}; {f'FAIL: {wrong}' if wrong else 'ok'}"
    )


def title(program: Program) -> str:
    """The beginning of a program's line."""
    return f"{program.chip:6} {program.kind:6} {program.stage}"


def heading(name: str) -> str:
    """The line above a chip's rows."""
    chip = CHIPS[name]
    fitted = fitted_config(chip)
    flags = machine.fit("record", chip.GB, chip.devices) or "no flags"
    return f"{name}, {chip.GB} GB each: {flags}, attention {fitted.attention}"


def page(facts: str, rows: dict[Program, str]) -> str:
    """The text of the page, with a line for each program that has no row yet."""
    text = f"{facts}\n"
    for name in CHIPS:
        lines = [rows.get(p, f"{title(p)} not compiled") for p in programs(name)]
        text += "\n".join(["", heading(name), COLUMNS, *lines, ""])
    return text


def finished_rows(text: str, facts: str) -> dict[Program, str]:
    """The rows of a page, if it is of the same programs and versions as these facts."""
    rows = {}
    if not text.startswith(facts):
        return rows
    for name in CHIPS:
        if heading(name) not in text:
            continue
        for program in programs(name):
            (line,) = [line for line in text.splitlines() if line.startswith(title(program))]
            if not line.endswith("not compiled"):
                rows[program] = line
    return rows


def main(argv: list[str]) -> int:
    """Compiles what has no row yet, and returns the exit status."""
    cli = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    cli.add_argument(
        "--only", nargs="+", choices=CHIPS, default=list(CHIPS), help="only these chips"
    )
    names = cli.parse_args(argv).only
    if not any(distributions(name="libtpu")):
        refuse(MISSING)
    jax.config.update("jax_num_cpu_devices", 8)
    facts = f"- jax {jax.__version__}, libtpu {version('libtpu')}\n{digest_line()}"
    train_gpt.prefix_table = any_prefixes
    rows = finished_rows(PAGE.read_text(encoding="utf-8") if PAGE.exists() else "", facts)
    for name in names:
        c = fitted_config(CHIPS[name])
        mesh = make_mesh(CHIPS[name])
        print(f"\n{heading(name)}\n{COLUMNS}", flush=True)
        for program in programs(name):
            if program not in rows:
                compiled = compile_for_tpu(program, c, mesh)
                rows[program] = row(program, c, compiled, state_GB(c, mesh))
                PAGE.write_text(page(facts, rows), encoding="utf-8")
            print(rows[program], flush=True)
    wrong = [line for line in rows.values() if "FAIL" in line]
    print(f"\n{len(rows)} programs are compiled, {len(wrong)} of them with faults")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
