"""Compiles the record for 8 and for 1 H100 without a GPU, checks what the compiler made of it, and
estimates the milliseconds of a step.

    python dev/compile_8xh100.py [--write]             about 18 minutes on two idle cores
    python dev/compile_8xh100.py --lowered [--write]   seconds: are they the programs of the record?

The first needs jax[cuda12] or jax[cuda13], but no GPU and no driver; --write renews
records/gpu/h100_compile.md. The second needs nothing: it lowers some programs without compiling
them, and compares a digest of their text. An edit that changes no text needs no new compilation.
The text differs between versions of JAX; with --write, it adds the digest of the version that runs
it, if train_gpt.py is as it was when it was compiled.

What comes out: kernels, collectives and their order, memory, instructions. What does not: speed and
results. Products are not tuned, and cuDNN builds its plans only on a real GPU. The parts are in
dev/h100/; how bytes and milliseconds are counted stands at the head of dev/h100/estimate.py.
"""

import argparse
import dataclasses
import functools
import hashlib
import importlib.util
import os
import re
import shutil
import sys
import tempfile
import time
import zlib
from collections.abc import Callable
from importlib.metadata import distributions, version
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

os.environ["JAX_PLATFORMS"] = "cpu"  # also keeps the plugin from looking for a driver
ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import jax  # noqa: E402
import numpy as np  # noqa: E402
from h100 import report  # noqa: E402
from h100.checks import KINDS, Result, check, expected_program  # noqa: E402
from h100.estimate import cost_by_cause, step_ms, transfers  # noqa: E402
from h100.hlo import Program, parse  # noqa: E402
from h100.ptx import read_dump  # noqa: E402
from jax.experimental import topologies  # noqa: E402
from jax.sharding import AxisType, Mesh  # noqa: E402

import train_gpt  # noqa: E402

RECORD = ROOT / "records/gpu/h100_compile.md"
MISSING = "no CUDA plugin for JAX here: install jax[cuda12] or jax[cuda13]; a GPU is not needed"
RECORD_21 = ROOT / "records/tracks/tiny-2k/2026-11-22_baseline/train_gpt.py"
RECORD_21_MS = 103, 113  # what the rates must give for it
DUMP = Path(tempfile.gettempdir(), f"compile_8xh100_{os.getpid()}")


class Setting(NamedTuple):
    """Flags for one GPU, and whether they are enough."""

    GB: int
    flags: dict[str, Any]
    fits: bool


SETTINGS = (
    Setting(80, {}, True),
    Setting(40, {}, True),
    Setting(
        40,
        dict(batch=16, head_chunk=8192, head_forward="bfloat16", head_backward="bfloat16"),
        True,
    ),
    Setting(24, dict(batch=32, head_chunk=4096, val_T=65536), True),
    Setting(16, dict(batch=64, head_chunk=2048, val_T=65536), False),
)


# ---- The record's programs -----------------------------------------------------------------------
def compile_step(kind: str, stage: int, c: train_gpt.Config, mesh: Mesh) -> Any:
    """Compiles a program of train_gpt.py."""
    if kind == "val":
        return train_gpt.compile_val_step(stage, c, mesh)
    return train_gpt.compile_train_step(stage, kind == "second", c, mesh)


def record_config(attention: str) -> train_gpt.Config:
    """The record with a kernel for attention."""
    return dataclasses.replace(train_gpt.PRESETS["record"], attention=attention, seed=1)


def any_prefixes(c: train_gpt.Config) -> np.ndarray:
    """In place of train_gpt.prefix_table: any numbers compile to the same program, so that the file
    of the right ones is not needed."""
    return np.arange(c.vocab, dtype="int32")


# ---- Whether the record is of this train_gpt.py --------------------------------------------------
# One program with all targets, one with all updates, one of validation.
LOWERED = ("first", 0), ("second", 3), ("val", 4)


def lowered_digest() -> str:
    """sha256 of what XLA gets to compile: the text of LOWERED for 8 CPUs, with banded attention
    in place of cuDNN's, the options, and what tells the other stages' programs from these."""
    c = record_config("band")
    mesh = train_gpt.make_mesh(jax.devices()[:8])
    stages = [(s.tokens, s.short, s.long, list(train_gpt.target_weights(s))) for s in c.stages]
    digest = hashlib.sha256(repr((stages, train_gpt.OPTIONS["gpu"])).encode())

    def as_text(lowered, *_):
        return lowered.as_text()

    with (
        mock.patch.object(train_gpt, "prefix_table", any_prefixes),
        mock.patch.object(jax.stages.Lowered, "compile", as_text),
    ):
        for kind, stage in LOWERED:
            digest.update(compile_step(kind, stage, c, mesh).encode())
    return digest.hexdigest()


def digest_line() -> str:
    """The line of records/gpu/h100_compile.md about the programs' text."""
    return f"- sha256 of the programs as lowered by jax {jax.__version__}: {lowered_digest()}"


def source_line() -> str:
    """The line of records/gpu/h100_compile.md about train_gpt.py as it was compiled."""
    return f"- crc32 of train_gpt.py when it was compiled: {zlib.crc32(train_gpt.SOURCE.encode())}"


def check_lowered(write: bool) -> int:
    """Whether the programs are those of the record; the exit status."""
    line = digest_line()
    print(line)
    record = RECORD.read_text(encoding="utf-8")
    name = RECORD.relative_to(ROOT)
    if line in record.splitlines():
        print(f"{name} is of these programs")
        return 0
    if not write or source_line() not in record.splitlines():
        print(f"{name} is not of these programs, or not by this version of JAX")
        return 1
    start = re.escape(line.rpartition(": ")[0])
    record = re.sub(f"{start}: .*\n", "", record)
    record = record.replace(source_line(), f"{source_line()}\n{line}")
    RECORD.write_text(record, encoding="utf-8")
    print(f"added to {name}")
    return 0


# ---- Compiling for H100s -------------------------------------------------------------------------
def cudnn_version() -> str | None:
    """The version of the cuDNN that comes with JAX's CUDA plugin, if there is one."""
    for cuda in ("12", "13"):
        if any(distributions(name=f"jax-cuda{cuda}-plugin")):
            return version(f"nvidia-cudnn-cu{cuda}")
    return None


def answer_for_hopper() -> None:
    """JAX asks the machine for its chip and its cuDNN; there is no chip here, so this answers."""
    from jax._src.cudnn import fused_attention_stablehlo as fused

    major, minor, patch = (int(number) for number in cudnn_version().split(".")[:3])

    def has_capability(least: str) -> bool:
        """H100s have 9.0."""
        return tuple(int(number) for number in least.split(".")) <= (9, 0)

    fused.check_cudnn_version = lambda: 10000 * major + 100 * minor + patch
    fused.check_compute_capability = has_capability
    fused.is_cuda_compute_capability_equal = lambda version: version == "9.0"


def make_mesh(devices: int) -> Mesh:
    """H100s in one host."""
    target = Path(__file__).parent.joinpath("h100/target.txtpb").read_text()
    topology = topologies.get_topology_desc(
        "h100", platform="cuda", topology=f"1x1x{devices}", target_config=target
    )
    return Mesh(np.array(topology.devices), ("fsdp",), axis_types=(AxisType.Auto,))


class Compiled(NamedTuple):
    """What XLA made of a program."""

    memory: Any  # its memory_analysis
    program: Program
    seconds: float  # that compiling took


def compile_for_h100(compiler: Callable, *arguments: Any, devices: int) -> Compiled:
    """Compiles a program, by compile_step or record 21's, and reads it."""
    shutil.rmtree(DUMP, ignore_errors=True)
    mesh = make_mesh(devices)
    start = time.perf_counter()
    result = compiler(*arguments, mesh)
    seconds = time.perf_counter() - start
    program = parse(result.as_text(), devices, read_dump(DUMP))
    return Compiled(result.memory_analysis(), program, seconds)


def record_21_ms() -> float:
    """Milliseconds of record 21's file, the mean of its first and last window. It checks the
    rates."""
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


@functools.cache  # some settings of memory_table are compiled already
def measure(kind: str, stage: int, c: train_gpt.Config, devices: int) -> Result:
    """Compiles a program and counts."""
    memory, program, seconds = compile_for_h100(compile_step, kind, stage, c, devices=devices)
    expected = expected_program(kind, stage, c, devices)
    sent = transfers(program)
    weights = sum(t.bytes for t in sent if not t.name.startswith("all-reduce"))
    ideal = 2 * expected.ideal * (devices - 1) / devices
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


def measure_settings(c: train_gpt.Config) -> tuple[str, list[str]]:
    """A table of what one GPU needs in each setting, and what is not as expected. It counts all of
    the state, which validation does not read."""
    rows = [("GPU", "flags", "state GB", "training GB", "validation GB", "together GB", "fits")]
    wrong = []
    tokens = [stage.tokens if stage.steps else 0 for stage in c.stages]
    largest = tokens.index(max(tokens))
    for GB, flags, fits in SETTINGS:
        small = dataclasses.replace(c, **flags)
        first, second, val = (measure(kind, largest, small, 1) for kind in KINDS)
        state = second.arguments_GB
        training = max(first.temporaries_GB, second.temporaries_GB)
        validation = val.temporaries_GB
        together = state + max(training, validation)
        words = " ".join(f"--{name} {value}" for name, value in flags.items()) or "none"
        numbers = [f"{n:.1f}" for n in (state, training, validation, together)]
        rows.append((f"{GB} GB", words, *numbers, "yes" if fits else "no"))
        if (together <= 0.9 * GB) != fits:
            wrong.append(f"{words}: {together:.1f} GB of {GB} GB, expected to fit: {fits}")
    return report.table(*rows), wrong


def record_programs(c: train_gpt.Config) -> list[tuple[str, int]]:
    """Kind and stage of every program of a run, in the order of their first use."""
    programs = []
    for step in range(c.total_steps):
        programs.append((KINDS[step % 2], c.stage_at(step)))
    for step in range(c.total_steps + 1):
        if c.validates_before(step):
            programs.append(("val", c.stage_at(step)))
    return list(dict.fromkeys(programs))


def compile_everything(timed: bool) -> tuple[str, list[str]]:
    """The text of the page, and what is wrong."""
    # Without tuning, which would compile variants that nobody times.
    dump = f"--xla_dump_to={DUMP} --xla_dump_emitter_re=ptx"
    os.environ["XLA_FLAGS"] = f"--xla_gpu_autotune_level=0 {dump}"
    answer_for_hopper()
    train_gpt.prefix_table = any_prefixes
    c = record_config("cudnn")
    results = []
    wrong = []
    old_ms = record_21_ms()
    print(f"record 21 by these rates: {old_ms:.1f} ms", flush=True)
    if not RECORD_21_MS[0] <= old_ms <= RECORD_21_MS[1]:
        wrong.append(f"record 21 takes {old_ms:.1f} ms by these rates, not {RECORD_21_MS}")
    for devices in (8, 1):
        for kind, stage in record_programs(c):
            result = measure(kind, stage, c, devices)
            results.append(result)
            print(f"{devices} x H100, {kind}, stage {stage}: {result.compile_s:.1f} s", flush=True)
            for fault in check(result, timed):
                print(f"  FAIL {fault}", flush=True)
                wrong.append(fault)
    memory_table, exceeded = measure_settings(c)
    shutil.rmtree(DUMP, ignore_errors=True)
    facts = f"- jax {jax.__version__}, cuDNN {cudnn_version()}\n{source_line()}\n{digest_line()}"
    page = report.page(facts, results, memory_table, old_ms, timed)
    return page, wrong + exceeded


def main(argv: list[str]) -> int:
    """Runs the command line and returns the exit status."""
    cli = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    cli.add_argument("--write", action="store_true", help=f"write {RECORD.relative_to(ROOT)}")
    cli.add_argument("--untimed", action="store_true", help="do not judge seconds")
    cli.add_argument("--lowered", action="store_true", help="compare the programs' text alone")
    arguments = cli.parse_args(argv)
    jax.config.update("jax_num_cpu_devices", 8)
    jax.config.update("jax_enable_compilation_cache", False)
    if arguments.lowered:
        return check_lowered(arguments.write)
    if cudnn_version() is None:
        print(f"compile_8xh100.py: {MISSING}", file=sys.stderr)
        return 2
    page, wrong = compile_everything(not arguments.untimed)
    print(f"\n{page}")
    print("\n".join(wrong) or "every check passed")
    if wrong:
        return 1
    if arguments.write:
        RECORD.write_text(page, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
