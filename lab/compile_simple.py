"""Compiles the optimizer benchmark's 124m for H100s and TPUs that this machine does not have.

    python lab/compile_simple.py NAME --chip h100-8 h100-1 [--microbatch N]    with jax[cuda13]
    python lab/compile_simple.py NAME --chip v6e-8 v5e-8   [--microbatch N]    with jax[tpu]

NAME is a contestant in records/optimizers/, or a path of one. Each chip is a row of a table, in 1
to 10 minutes: those of records/optimizers/compile.md. Milliseconds are estimated as in
compile_8xh100.py, for H100s alone.
"""

import argparse
import importlib.util
import re
import shutil
import sys
import tempfile
from collections import Counter
from importlib.metadata import distributions, version
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / name) for name in ("", "data", "lab", "records", "run")]

import compile_8xh100  # noqa: E402
import compile_tpu  # noqa: E402
import jax  # noqa: E402
from h100.estimate import PARTS, step_ms, transfers  # noqa: E402
from h100.hlo import kernels, parse  # noqa: E402
from h100.ptx import read_dump  # noqa: E402
from h100.report import table  # noqa: E402
from jax.sharding import Mesh  # noqa: E402
from optimizers import contest  # noqa: E402

H100S = {"h100-8": 8, "h100-1": 1}
ESTIMATES = ("sent GB", *PARTS, "ms", "minutes")
HEADS = ("optimizer", "chip", "microbatch", "state GB", "step GB", "validation GB", *ESTIMATES,
         "collectives")  # fmt: skip


def load(name: str) -> ModuleType:
    """train_gpt_simple.py with this contestant, as a module."""
    contestant = Path(name) if "/" in name else ROOT / f"records/optimizers/{name}.py"
    source = contest.assemble(contestant.read_text("utf-8"))
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "train_gpt_simple.py")
        path.write_text(source, "utf-8")
        spec = importlib.util.spec_from_file_location(f"simple_{Path(name).stem}", path)
        module = importlib.util.module_from_spec(spec)
        sys.modules[spec.name] = module  # dataclasses look it up
        spec.loader.exec_module(module)
    return module


def lower(module: ModuleType, flags: list[str], chip: str) -> tuple:
    """The size, and begin, step and validation as compile_programs() lowers them for this chip."""
    size, _, numbers = module.parse_config(["124m", *flags])
    shapes = jax.eval_shape(lambda: module.make_params(size, 0))
    tx = module.optimizer(shapes, size.steps, **numbers)
    if chip in H100S:
        mesh = compile_8xh100.make_mesh(H100S[chip])
    else:
        mesh = compile_tpu.make_mesh(compile_tpu.CHIPS[chip])
    backend = "gpu" if chip in H100S else "tpu"
    with (
        mock.patch.object(jax, "default_backend", lambda: backend),
        mock.patch.object(jax.stages.Lowered, "compile", lambda lowered, _: lowered),
    ):
        return size, module.compile_programs(tx, size, Mesh(mesh.devices.ravel(), ("devices",)))


def row(name: str, chip: str, flags: list[str]) -> list[str]:
    """Compiles the programs of a step and of a validation, and returns a row of the table."""
    size, (_, step, validation) = lower(load(name), flags, chip)
    begin = [name, chip, str(size.microbatch)]
    try:
        val_memory = validation.compile().memory_analysis()
        shutil.rmtree(compile_8xh100.DUMP, ignore_errors=True)
        result = step.compile()
    except jax.errors.JaxRuntimeError as error:  # TPUs' compiler knows how much memory there is
        needed = re.search(r"Used \S+ of \S+ hbm", str(error))
        if not needed:
            raise
        return [*begin, *("" for _ in HEADS[4:]), f"too large: {needed[0]}"]
    memory = result.memory_analysis()
    sizes = memory.argument_size_in_bytes, memory.temp_size_in_bytes, val_memory.temp_size_in_bytes
    begin += [f"{n / 1e9:.1f}" for n in sizes]
    if chip in H100S:
        estimates, counts = estimate(result, H100S[chip], size.steps)
    else:
        found = compile_tpu.collectives(result.as_text())
        counts = {kind: len(arrays) for kind, arrays in found.items()}
        estimates = ["" for _ in ESTIMATES]
    return [
        *begin,
        *estimates,
        ", ".join(f"{n} {kind}" for kind, n in counts.items() if n) or "none",
    ]


def estimate(result: Any, devices: int, steps: int) -> tuple[list[str], Counter]:
    """ESTIMATES of a compiled step and of a run of so many, and its collectives."""
    program = parse(result.as_text(), devices, read_dump(compile_8xh100.DUMP))
    # The parameters behind a collective are looked up in the entry alone, not in a loop.
    with mock.patch("h100.estimate.collective_name", lambda _, kernel: kernel.instruction.kind):
        sent = transfers(program)
    parts = step_ms(program, sent)
    ms = sum(parts.values())
    counts = Counter()
    for kernel in kernels(program):
        if kernel.kind == "collective":
            counts[kernel.instruction.collective()] += kernel.runs
    sent_GB = sum(transfer.bytes for transfer in sent) / 1e9
    numbers = [f"{sent_GB:.2f}", *(f"{parts[name]:.1f}" for name in PARTS)]
    return [*numbers, f"{ms:.0f}", f"{ms * steps / 60000:.1f}"], counts


def main(argv: list[str]) -> None:
    """Runs the command line."""
    cli = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    cli.add_argument("name", help="a contestant in records/optimizers/, or its path")
    cli.add_argument("--chip", nargs="+", choices=[*H100S, *compile_tpu.CHIPS], required=True)
    cli.add_argument("--microbatch", type=int, help="sequences that a device runs at once")
    args = cli.parse_args(argv)
    flags = ["--microbatch", str(args.microbatch)] if args.microbatch else []
    if H100S.keys() & {*args.chip}:
        if compile_8xh100.cudnn_version() is None:
            cli.error(compile_8xh100.MISSING)
        compile_8xh100.prepare("record")
    if compile_tpu.CHIPS.keys() & {*args.chip} and not any(distributions(name="libtpu")):
        cli.error(compile_tpu.MISSING)
    jax.config.update("jax_enable_compilation_cache", False)
    names = ("jax", "libtpu", "nvidia-cudnn-cu12", "nvidia-cudnn-cu13", "optax")
    versions = [f"{name} {version(name)}" for name in names if any(distributions(name=name))]
    print(f"compile_simple.py {' '.join(argv)}\n{', '.join(versions)}\n")
    print(table(HEADS, *(row(args.name, chip, flags) for chip in args.chip)))


if __name__ == "__main__":
    main(sys.argv[1:])
