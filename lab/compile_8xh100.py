"""Compiles the record for 8 and for 1 H100 without a GPU, checks what the compiler made of it, and
estimates the milliseconds of a step.

    python lab/compile_8xh100.py [--write]             takes about 18 minutes on two idle cores
    python lab/compile_8xh100.py --memory              only the memory of every row of FITS
    python lab/compile_8xh100.py --small               all programs of the preset small, on one GPU
    python lab/compile_8xh100.py --lowered [--write]   says, in seconds, whether the page is old
    python lab/compile_8xh100.py --idea NAME ...       milliseconds, GB and seconds of the run with
                                                       ideas of records/ideas/; --file PATH: of a
                                                       copy. --stages 0,2 compiles only these, at
                                                       about 18 s a program on an idle core;
                                                       --set NAME=VALUE sets fields of Config

All but --small, --idea and --file take --preset medium, of which one device compiles only the two
programs that need the most memory. All but --lowered need jax[cuda12] or jax[cuda13], but no GPU
and no driver. With --write, the first writes the preset's page in records/gpu/, such as
h100_compile.txt. --lowered runs with any JAX: it lowers some programs without compiling them, and
looks for a digest of their text in the page. If it is there, no program has changed. The text
differs between versions of JAX, so --write adds the digest of this version, provided that
train_gpt.py has not changed since the page was written.

The compiler shows kernels, collectives and their order, memory and instructions. It shows neither
speed nor results: products are not tuned, and cuDNN builds its plans only on a real GPU. The parts
are in lab/h100/; lab/h100/estimate.py begins with how bytes and milliseconds are counted.
"""

import argparse
import dataclasses
import hashlib
import importlib.util
import os
import re
import shutil
import sys
import tempfile
import time
import zlib
from collections import Counter
from collections.abc import Callable, Sequence
from importlib.metadata import distributions, version
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

os.environ["JAX_PLATFORMS"] = "cpu"  # also keeps the plugin from looking for a driver
ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / name) for name in ("", "data", "lab", "records", "run")]

import idea  # noqa: E402
import jax  # noqa: E402
import machine  # noqa: E402
import numpy as np  # noqa: E402
from h100 import mosaic, report  # noqa: E402
from h100.checks import FIRST, LIMITS, SECOND, VAL, Result, check, expected_program  # noqa: E402
from h100.estimate import cost_by_cause, step_ms, transfers  # noqa: E402
from h100.hlo import Program, parse  # noqa: E402
from h100.ptx import read_dump  # noqa: E402
from jax.experimental import topologies  # noqa: E402
from jax.sharding import AxisType, Mesh  # noqa: E402
from messages import one_line, refuse  # noqa: E402

import train_gpt  # noqa: E402

PAGES = {
    "record": ROOT / "records/gpu/h100_compile.txt",
    "medium": ROOT / "records/gpu/h100_compile_medium.txt",
}
SMALL_PAGE = ROOT / "records/gpu/small_compile.txt"
MISSING = "JAX has no CUDA plugin: install jax[cuda12] or jax[cuda13], which needs no GPU"
RECORD_21 = ROOT / "records/tracks/tiny-2k/2026-11-22_baseline/train_gpt.py"
RECORD_21_MS = 103, 113  # its estimate must be between these, or the rates are wrong
DUMP = Path(tempfile.gettempdir(), f"compile_8xh100_{os.getpid()}")
MOSAIC_DUMP = DUMP / "mosaic"
# The Mosaic kernels that this process has compiled, by the hashes of their code.
KERNELS: dict[str, mosaic.MosaicKernel] = {}


# What FITS in run/machine.py adds to the memory that the compiler plans, for tuning and for the
# workspaces of cuDNN and cuBLAS.
SPARE_GB = 1.0
SMALL_GB = 15.0  # what JAX has of a GPU of 16 GB, whose fraction run.sh sets to 0.92


# ---- The record's programs -----------------------------------------------------------------------
def compile_step(kind: str, stage: int, c: train_gpt.Config, mesh: Mesh) -> Any:
    """Compiles a program of train_gpt.py; `kind` is FIRST, SECOND or VAL."""
    if kind == VAL:
        return train_gpt.compile_val_step(stage, c, mesh)
    return train_gpt.compile_train_step(stage, kind == SECOND, c, mesh)


def record_config(preset: str, attention: str) -> train_gpt.Config:
    """A preset with this kernel for attention."""
    return dataclasses.replace(train_gpt.PRESETS[preset], attention=attention, seed=1)


def any_prefixes(c: train_gpt.Config) -> np.ndarray:
    """Stands in for train_gpt.prefix_table, so that its file is not needed: any numbers compile to
    the same program."""
    return np.arange(c.vocab, dtype="int32")


# ---- Whether the page describes this train_gpt.py ------------------------------------------------
# Kind and stage of a few programs: one with all targets, one with all updates, one validation. Of
# medium only the largest, because the others share their code with the record's.
LOWERED = {"record": ((FIRST, 0), (SECOND, 3), (VAL, 4)), "medium": ((SECOND, 8),)}


def lowered_digest(preset: str) -> str:
    """sha256 of what XLA gets to compile: the text of LOWERED for 8 CPUs, with banded attention
    instead of cuDNN's, the compiler's options, and the numbers in which the programs of the other
    stages differ from these."""
    c = record_config(preset, "band")
    mesh = train_gpt.make_mesh(jax.devices()[:8])
    stages = []
    for stage in c.stages:
        targets = list(train_gpt.target_weights(stage))
        stages.append((stage.tokens, stage.short, stage.long, targets))
    digest = hashlib.sha256(repr((stages, train_gpt.OPTIONS["gpu"])).encode())

    def as_text(lowered, *_):
        return lowered.as_text()

    with (
        mock.patch.object(train_gpt, "prefix_table", any_prefixes),
        mock.patch.object(jax.stages.Lowered, "compile", as_text),
    ):
        for kind, number in LOWERED[preset]:
            digest.update(compile_step(kind, number, c, mesh).encode())
    return digest.hexdigest()


def digest_line(preset: str = "record") -> str:
    """The line of a preset's page about the programs' text."""
    digest = lowered_digest(preset)
    return f"- sha256 of the programs as lowered by jax {jax.__version__}: {digest}"


def source_line() -> str:
    """The line of a page about train_gpt.py as it was compiled."""
    return f"- crc32 of train_gpt.py when it was compiled: {zlib.crc32(train_gpt.SOURCE.encode())}"


def check_lowered(preset: str, write: bool) -> int:
    """Compares a preset's programs with those of its page, and returns the exit status."""
    line = digest_line(preset)
    print(line)
    path = PAGES[preset]
    page = path.read_text(encoding="utf-8")
    name = path.relative_to(ROOT)
    if line in page.splitlines():
        print(f"{name} describes these programs, so it need not be renewed")
        return 0
    source = source_line()
    if source not in page.splitlines():
        print(f"{name} does not have this digest, and train_gpt.py has changed: --write renews it")
        return 1
    if not write:
        print(f"{name} has no digest from this version of JAX: --lowered --write adds it")
        return 1
    beginning = re.escape(line.rpartition(": ")[0])
    page = re.sub(f"{beginning}: .*\n", "", page)  # an older digest by this version of JAX
    page = page.replace(source, f"{source}\n{line}")
    path.write_text(page, encoding="utf-8")
    print(f"added this digest to {name}")
    return 0


# ---- Compiling for H100s -------------------------------------------------------------------------
def cudnn_version() -> str | None:
    """The version of the cuDNN that comes with JAX's CUDA plugin, if there is one."""
    for cuda in ("12", "13"):
        if any(distributions(name=f"jax-cuda{cuda}-plugin")):
            return version(f"nvidia-cudnn-cu{cuda}")
    return None


def answer_for_hopper() -> None:
    """Replaces what JAX asks a GPU about its compute capability and its cuDNN by an H100's
    answers."""
    from jax._src.cudnn import fused_attention_stablehlo as fused

    major, minor, patch = (int(number) for number in cudnn_version().split(".")[:3])

    def has_capability(least: str) -> bool:
        """Whether an H100, whose compute capability is 9.0, has at least this one."""
        return tuple(int(number) for number in least.split(".")) <= (9, 0)

    fused.check_cudnn_version = lambda: 10000 * major + 100 * minor + patch
    fused.check_compute_capability = has_capability
    fused.is_cuda_compute_capability_equal = lambda version: version == "9.0"


def make_mesh(devices: int) -> Mesh:
    """A mesh of H100s in one host."""
    target = Path(__file__).parent.joinpath("h100/target.txtpb").read_text()
    topology = topologies.get_topology_desc(
        "h100", platform="cuda", topology=f"1x1x{devices}", target_config=target
    )
    return Mesh(np.array(topology.devices), ("fsdp",), axis_types=(AxisType.Auto,))


class Compiled(NamedTuple):
    """What XLA made of a program."""

    memory: Any  # the result of memory_analysis()
    program: Program
    seconds: float  # that compiling took


def compile_for_h100(compiler: Callable, *arguments: Any, devices: int) -> Compiled:
    """Compiles a program and parses it. The compiler is a function like compile_step; its last
    argument, the mesh, is added here."""
    shutil.rmtree(DUMP, ignore_errors=True)
    MOSAIC_DUMP.mkdir(parents=True, exist_ok=True)
    mesh = make_mesh(devices)
    start = time.perf_counter()
    result = compiler(*arguments, mesh)
    seconds = time.perf_counter() - start
    program = parse(result.as_text(), devices, read_dump(DUMP))
    mosaic.read_dump(MOSAIC_DUMP, program, KERNELS)
    program.issued.update(mosaic.issued(program, KERNELS))
    return Compiled(result.memory_analysis(), program, seconds)


def record_21_ms() -> float:
    """Estimated milliseconds of a step of record 21's file: the mean over its first and its last
    window. They show whether the rates are still right."""
    spec = importlib.util.spec_from_file_location("record_21", RECORD_21)
    script = importlib.util.module_from_spec(spec)
    sys.modules["record_21"] = script  # dataclasses look it up
    spec.loader.exec_module(script)
    c = dataclasses.replace(script.PRESETS["record"], attention="cudnn", seed=1)
    total = 0.0
    for window in 128, 1792:
        program = compile_for_h100(script.compile_stage, "train", window, c, devices=8).program
        total += sum(step_ms(program, transfers(program)).values())
    return total / 2


def measure(kind: str, stage: int, c: train_gpt.Config, devices: int) -> Result:
    """Compiles a program and derives all its figures."""
    memory, program, seconds = compile_for_h100(compile_step, kind, stage, c, devices=devices)
    expected = expected_program(kind, stage, c, devices)
    sent = transfers(program)
    weights = sum(t.bytes for t in sent if not t.name.startswith("all-reduce"))
    ideal = 2 * expected.ideal * (devices - 1) / devices  # two bytes an element, in a ring
    return Result(
        kind=kind,
        stage=stage,
        expected=expected,
        compile_s=seconds,
        temporaries_GB=memory.temp_size_in_bytes / 1e9,
        arguments_GB=memory.argument_size_in_bytes / 1e9,
        program=program,
        costs=cost_by_cause(program),
        transfers=sent,
        sent_ratio=weights / ideal if ideal else 0.0,
        parts=step_ms(program, sent),
    )


def measure_fits(preset: str) -> tuple[str, list[str]]:
    """Returns a table of the memory that a preset needs on 1, 2, 4 and 8 devices with the flags of
    every row of run/machine.py, and a list of the numbers there that are too low. The whole state
    counts, although validation does not read all of it. On one device, GPUs without FP8 are
    measured as well."""
    rows = [("flags", "devices", "head", "state GB", "training GB", "validation GB", "together GB",
             "FITS GB")]  # fmt: skip
    wrong = []
    stages = train_gpt.PRESETS[preset].stages
    tokens = [stage.tokens if stage.steps else 0 for stage in stages]
    # Of the stages with the longest sequences, the last one, which has the longest windows.
    longest = max(range(len(tokens)), key=lambda stage: (tokens[stage], stage))
    for flags, gigabytes in machine.FITS[preset]:
        fitted = train_gpt.parse_config([preset, "--seed", "1", *flags.split()])[1]
        text = flags or "none"
        by_devices = dict(zip((1, 2, 4, 8), gigabytes, strict=True))
        for config, devices in [*((fitted, n) for n in by_devices), (fitted.without_fp8(), 1)]:
            second = planned_memory(SECOND, longest, config, devices)
            val = planned_memory(VAL, longest, config, devices)
            state = second.argument_size_in_bytes / 1e9
            training = second.temp_size_in_bytes / 1e9
            validation = val.temp_size_in_bytes / 1e9
            together = state + max(training, validation)
            numbers = [f"{n:.1f}" for n in (state, training, validation, together)]
            row = (text, str(devices), config.head_forward, *numbers, f"{by_devices[devices]:.1f}")
            rows.append(row)
            print("memory:", *row, flush=True)
            if together + SPARE_GB > by_devices[devices]:
                wrong.append(f"FITS, {text}, {devices} devices: {together:.1f} GB and {SPARE_GB}")
    return report.table(*rows), wrong


def measure_small() -> tuple[str, list[str]]:
    """Returns a table of the memory that the preset small needs on one GPU, and a list of the
    programs that need more than JAX has of 16 GB. It compiles Hopper's kernels, although such GPUs
    are older."""
    c = dataclasses.replace(train_gpt.PRESETS["small"], seed=1)
    rows = [("program", "T", "state GB", "temporaries GB", "together GB", "of GB")]
    wrong = []
    for kind, stage in record_programs(c):
        T = c.val_T if kind == VAL else c.sequence_length(stage)
        plan = planned_memory(kind, stage, c, devices=1)
        state = plan.argument_size_in_bytes / 1e9
        temporaries = plan.temp_size_in_bytes / 1e9
        together = state + temporaries
        numbers = [f"{n:.1f}" for n in (state, temporaries, together, SMALL_GB)]
        rows.append((f"{kind} {stage}", str(T), *numbers))
        print("small:", *rows[-1], flush=True)
        if together + SPARE_GB > SMALL_GB:
            wrong.append(f"small, {kind} {stage}: {together:.1f} GB, and {SPARE_GB} to spare")
    facts = f"jax {jax.__version__}, cuDNN {cudnn_version()}: compiled, not run"
    return f"{facts}\n\n{report.table(*rows)}\n", wrong


def planned_memory(kind: str, stage: int, c: train_gpt.Config, devices: int) -> Any:
    """The memory_analysis() of a program."""
    return compile_step(kind, stage, c, make_mesh(devices)).memory_analysis()


def steps_of_programs(c: train_gpt.Config) -> Counter:
    """How many steps of a run each training program takes, by its kind and its stage, in the order
    of their first use."""
    steps = Counter()
    for step in range(c.total_steps):
        kind = SECOND if c.is_adam_step(step) else FIRST
        steps[kind, int(c.stage_at(step))] += 1
    return steps


def record_programs(c: train_gpt.Config) -> list[tuple[str, int]]:
    """Kind and stage of every program of a run, in the order of their first use."""
    programs = list(steps_of_programs(c))
    for step in range(c.total_steps + 1):
        if c.validates_before(step):
            programs.append((VAL, int(c.val_stage(step))))
    return list(dict.fromkeys(programs))


def prepare(preset: str) -> train_gpt.Config:
    """Makes the compiler act as if there were an H100, and returns a preset's configuration."""
    # Tuning is off: it would compile variants that no GPU can time.
    dump = f"--xla_dump_to={DUMP} --xla_dump_emitter_re=ptx"
    os.environ["XLA_FLAGS"] = f"--xla_gpu_autotune_level=0 {dump}"
    # Mosaic then also calls nvdisasm, and complains in vain that there is none.
    os.environ["MOSAIC_GPU_DUMP_TO"] = str(MOSAIC_DUMP)
    MOSAIC_DUMP.mkdir(parents=True, exist_ok=True)  # or it would print all that
    answer_for_hopper()
    train_gpt.prefix_table = any_prefixes
    return record_config(preset, "cudnn")


# ---- Copies with ideas ---------------------------------------------------------------------------
class Program8(NamedTuple):
    """What a training program costs on each of 8 H100s."""

    ms: float  # of a step, estimated
    GB: float  # of the state and the temporaries
    program: Program | None = None  # if it has been compiled


Costs = dict[tuple[str, int], Program8]  # by the kind and the stage of the program


def use(source: str) -> None:
    """Replaces this file's train_gpt by a copy with another source."""
    global train_gpt
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "train_gpt.py")  # h100.hlo finds its functions by this name
        path.write_text(source, encoding="utf-8")
        spec = importlib.util.spec_from_file_location("train_gpt_with_ideas", path)
        train_gpt = importlib.util.module_from_spec(spec)
        sys.modules[spec.name] = train_gpt  # dataclasses look it up
        spec.loader.exec_module(train_gpt)


def page_costs(page: str) -> Costs:
    """The costs in a page that this tool has written."""
    ms = {}
    GB = {}
    for line in page.splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if len(cells) == 11 and cells[1] in (FIRST, SECOND):
            ms[cells[1], int(cells[0])] = float(cells[8])
        elif len(cells) == 12 and cells[0] in (FIRST, SECOND) and cells[1] == "8":
            for stage in cells[2].split(","):
                GB[cells[0], int(stage)] = float(cells[4]) + float(cells[5])
    return {key: Program8(ms[key], GB[key]) for key in ms}


def compiled_costs(stages: list[int], name: str, settings: Sequence[str] = ()) -> Costs:
    """The costs of the training programs of these stages, compiled from train_gpt. The settings
    are those of set_fields()."""
    c = set_fields(prepare("record"), settings)
    costs = {}
    for kind, stage in steps_of_programs(c):
        if stage in stages:
            compiled = compile_for_h100(compile_step, kind, stage, c, devices=8)
            memory = compiled.memory.temp_size_in_bytes + compiled.memory.argument_size_in_bytes
            ms = sum(step_ms(compiled.program, transfers(compiled.program)).values())
            costs[kind, stage] = Program8(ms, memory / 1e9, compiled.program)
            print(f"{name}, {kind} step of stage {stage}: {ms:.1f} ms, {memory / 1e9:.1f} GB; "
                  f"compiled in {compiled.seconds:.0f} s", flush=True)  # fmt: skip
    shutil.rmtree(DUMP, ignore_errors=True)
    return costs


def whole_run(c: train_gpt.Config, costs: Costs, page: Costs) -> dict[int, tuple[float, int]]:
    """Milliseconds of a mean step and the number of steps of every stage of a run. A stage that
    was not compiled takes the page's, times the ratio of the nearest one that was."""
    compiled = sorted({stage for _, stage in costs})
    steps = steps_of_programs(c)
    stages = {}
    for stage in sorted({stage for _, stage in steps}):
        near = min(compiled, key=lambda other: abs(other - stage))
        total = 0.0
        for kind in (FIRST, SECOND):
            if stage in compiled:
                ms = costs[kind, stage].ms if (kind, stage) in costs else 0.0
            else:
                known = kind if (kind, near) in costs else SECOND
                ms = page[kind, stage].ms * costs[known, near].ms / page[known, near].ms
            total += steps[kind, stage] * ms
        number = steps[FIRST, stage] + steps[SECOND, stage]
        stages[stage] = total / number, number
    return stages


def run_seconds(stages: dict[int, tuple[float, int]]) -> float:
    """Seconds of the steps of a run."""
    return sum(ms * steps for ms, steps in stages.values()) / 1e3


def base_costs(stages: list[int], page: str) -> Costs:
    """The costs of train_gpt.py as it is: those of the page, if this version of JAX has written it
    for this file; or else the file is compiled, because versions of JAX differ as much as ideas."""
    if f"- jax {jax.__version__}," in page and source_line() in page.splitlines():
        return page_costs(page)
    return compiled_costs(stages, "as it is")


class Copy(NamedTuple):
    """A copy of train_gpt.py."""

    name: str
    source: str
    settings: Sequence[str]  # of its Config: see set_fields()


def set_fields(c: train_gpt.Config, settings: Sequence[str]) -> train_gpt.Config:
    """Sets fields that are numbers or strings. A setting is like D=1024."""
    kinds = {field.name: field.type for field in dataclasses.fields(c)}
    fields = {}
    for setting in settings:
        name, _, text = setting.partition("=")
        kind = kinds.get(name)
        if kind not in (int, float, str):
            refuse(f"--set {setting}: Config has no number or string of this name")
        fields[name] = kind(text)
    return dataclasses.replace(c, **fields)


def measure_copy(copy: Copy, stages: list[int], base: Costs, page: Costs) -> str:
    """Compiles a copy of train_gpt.py, and returns a table of its stages and of the run, beside
    those of the file as it is. A table of Mosaic kernels follows, if the copy has some."""
    as_it_is = train_gpt.SOURCE
    base_run = whole_run(train_gpt.PRESETS["record"], base, page)
    use(copy.source)
    c = set_fields(train_gpt.PRESETS["record"], copy.settings)
    name = " ".join((copy.name, *copy.settings))
    if {stage for _, stage in steps_of_programs(c)} != base_run.keys():
        refuse(f"{name} has other stages than the record, so their times cannot be compared")
    costs = compiled_costs(stages, name, copy.settings)
    run = whole_run(c, costs, page)
    use(as_it_is)
    rows = [("stage", "steps", "ms", "as it is", "GB", "as it is", "compiled")]
    for stage, (ms, steps) in run.items():
        numbers = ms, base_run[stage][0], most_GB(costs, stage), most_GB(base, stage)
        cells = [f"{x:.1f}" if x else "" for x in numbers]
        rows.append((stage, steps, *cells, "yes" if stage in stages else "no, in proportion"))
    seconds = f"{run_seconds(run):.1f} s", f"{run_seconds(base_run):.1f} s"
    rows.append(("run", c.total_steps, *seconds, "", "", "estimates"))
    versions = f"jax {jax.__version__}, cuDNN {cudnn_version()}, 8 H100s: compiled, not run"
    programs = {stage: cost.program for (_, stage), cost in costs.items()}
    return "\n\n".join(
        (f"{name}: {versions}", report.table(*rows), *report.mosaic_section(programs, KERNELS))
    )


def most_GB(costs: Costs, stage: int) -> float:
    """What the programs of a stage need of each GPU; 0 if none was compiled."""
    return max((cost.GB for (_, other), cost in costs.items() if other == stage), default=0.0)


def measure_copies(copies: list[Copy], stages: list[int]) -> None:
    """Prints the tables of some copies."""
    page = PAGES["record"].read_text(encoding="utf-8")
    base = base_costs(stages, page)
    for copy in copies:
        print(f"\n{measure_copy(copy, stages, base, page_costs(page))}\n", flush=True)


def read_copies(arguments: argparse.Namespace) -> list[Copy]:
    """The copies that --idea and --file name."""
    copies = []
    for names in arguments.idea:
        copies.append(Copy(" ".join(names), idea.copy_of(names).decode(), arguments.set))
    if arguments.file:
        source = arguments.file.read_text(encoding="utf-8")
        copies.append(Copy(arguments.file.name, source, arguments.set))
    return copies


def read_stages(text: str, c: train_gpt.Config) -> list[int]:
    """The stages in --stages; all that have steps, if it is empty."""
    known = sorted({stage for _, stage in steps_of_programs(c)})
    words = text.split(",") if text else map(str, known)
    stages = [int(word) if word.isdecimal() else -1 for word in words]
    if not {*stages} <= {*known}:
        refuse(f"--stages {text}: the record's stages are {', '.join(map(str, known))}")
    return stages


def largest_programs(results: list[Result]) -> list[tuple[str, int]]:
    """Kind and stage of the second step and of the validation that need the most memory; of equals,
    the last."""
    programs = []
    for kind in (SECOND, VAL):
        of_kind = [result for result in results if result.kind == kind]
        largest = max(of_kind, key=lambda result: (result.temporaries_GB, result.stage))
        programs.append((kind, largest.stage))
    return programs


def compile_everything(preset: str, timed: bool) -> tuple[str, list[str]]:
    """Returns the text of a preset's page, and a list of what is wrong. Without `timed`, the
    seconds of compiling are not limited."""
    c = prepare(preset)
    results = []
    wrong = []
    old_ms = record_21_ms()
    print(f"a step of record 21, estimated with these rates: {old_ms:.1f} ms", flush=True)
    if not RECORD_21_MS[0] <= old_ms <= RECORD_21_MS[1]:
        low, high = RECORD_21_MS
        wrong.append(f"record 21 takes {old_ms:.1f} ms with these rates, not {low} to {high} ms")
    programs = record_programs(c)
    for devices in (8, 1):
        if devices == 1 and preset != "record":
            programs = largest_programs(results)
        for kind, stage in programs:
            result = measure(kind, stage, c, devices)
            results.append(result)
            print(f"{devices} x H100, {kind}, stage {stage}: {result.compile_s:.1f} s", flush=True)
            for fault in check(result, LIMITS[preset], timed):
                print(f"  FAIL {fault}", flush=True)
                wrong.append(fault)
    memory_table, too_low = measure_fits(preset)
    wrong += too_low
    shutil.rmtree(DUMP, ignore_errors=True)
    versions = f"- jax {jax.__version__}, cuDNN {cudnn_version()}"
    facts = f"{versions}\n{source_line()}\n{digest_line(preset)}"
    steps = steps_of_programs(c)
    page = report.page(preset, facts, results, steps, memory_table, old_ms, timed)
    return page, wrong


def main(argv: list[str]) -> int:
    """Runs the command line and returns the exit status."""
    cli = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    cli.add_argument("--preset", choices=PAGES, default="record")
    cli.add_argument("--write", action="store_true", help="write the preset's page")
    cli.add_argument("--memory", action="store_true", help="only measure the rows of FITS")
    cli.add_argument("--small", action="store_true", help="only measure the preset small")
    cli.add_argument("--untimed", action="store_true", help="do not limit the seconds of compiling")
    cli.add_argument("--lowered", action="store_true", help="only compare the programs' text")
    ideas = dict(nargs="+", action="append", default=[], metavar="NAME")
    cli.add_argument("--idea", **ideas, help="of records/ideas/, together; again: another table")
    cli.add_argument("--file", type=Path, help="a copy of train_gpt.py")
    cli.add_argument("--stages", default="", help="of --idea and --file, as 0,2; default: all")
    settings = dict(nargs="+", action="extend", default=[], metavar="NAME=VALUE")
    cli.add_argument("--set", **settings, help="fields of the Config of --idea and --file")
    arguments = cli.parse_args(argv)
    jax.config.update("jax_num_cpu_devices", 8)
    jax.config.update("jax_enable_compilation_cache", False)
    if arguments.lowered:
        return check_lowered(arguments.preset, arguments.write)
    if cudnn_version() is None:
        refuse(MISSING)
    if arguments.set and not (arguments.idea or arguments.file):
        refuse("--set is for --idea and --file")
    if arguments.idea or arguments.file:
        others = arguments.write, arguments.memory, arguments.small
        if arguments.preset != "record" or any(others):
            refuse("--idea and --file are for the preset record, with --stages and --set")
        stages = read_stages(arguments.stages, train_gpt.PRESETS["record"])
        measure_copies(read_copies(arguments), stages)
        return 0
    file = PAGES[arguments.preset]
    if arguments.memory:
        prepare(arguments.preset)
        page, wrong = measure_fits(arguments.preset)
    elif arguments.small:
        prepare("record")
        page, wrong = measure_small()
        file = SMALL_PAGE
    else:
        page, wrong = compile_everything(arguments.preset, not arguments.untimed)
    print(f"\n{page}")
    print("\n".join(wrong) or "every check passed")
    if wrong:
        return 1
    if arguments.write and not arguments.memory:
        file.write_text(page, encoding="utf-8")
    return 0


if __name__ == "__main__":
    with one_line("compile_8xh100.py"):
        status = main(sys.argv[1:])
    sys.exit(status)
