"""Compile the record for TPU v5e-8 and v6e-8 without a TPU, and check what the compiler made of it.

Run     python dev/compile_tpu.py, by hand, in an environment with jax[tpu]; minutes a program.
        Training with the last window, and validation; kept in records/tpu_compile.txt
Told    memory, collectives, the formats of the head's operands. Not told: speed, results
A gradient whose shares are no whole tiles is scattered by a fusion, all-reduce-scatter, of padding,
all-reduce and slice, by the algorithm of a reduce-scatter; neighbors then permute the rows that
padding moved. A gather that is hidden behind kernels has a copy in each: its start counts. Float8
operands are stored as such, and unpacked in front of a bfloat16 pass: exact, and no faster.
"""

import dataclasses
import hashlib
import importlib.util
import math
import os
import re
import sys
import time
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path

os.environ["JAX_PLATFORMS"] = "cpu"
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import jax  # noqa: E402
import numpy as np  # noqa: E402
from jax.experimental import topologies  # noqa: E402
from jax.sharding import AxisType, Mesh  # noqa: E402

import train_gpt  # noqa: E402

SPLIT = dataclasses.replace(train_gpt.Config(), T=2048, sequences=192, val_T=2048, head_chunk=2048,
                            attention="xla")  # fmt: skip
CONFIGS = dict(v5e=dataclasses.replace(SPLIT, in_flight=4),
               v6e=dataclasses.replace(SPLIT, in_flight=12))  # fmt: skip
HBM_GB = dict(v5e=16, v6e=32)
MISSING = f"no TPU compiler here: pip install 'jax[tpu]=={jax.__version__}'; a TPU is not needed"

MAX_HBM = 0.9  # share for arguments and temporaries
MAX_SCATTERED = 1.05  # times the gradients: padding to whole tiles
MAX_ALL_REDUCE = 1024  # elements: scalars, never a weight
HLO = dict(float32="f32", bfloat16="bf16", float8_e4m3fn="f8e4m3fn", float8_e5m2="f8e5m2")
KINDS = ("all-gather", "reduce-scatter", "all-reduce", "collective-permute", "all-to-all")


def flags(c: train_gpt.Config) -> str:
    default = dataclasses.asdict(train_gpt.Config())
    return " ".join(f"--{k} {v}" for k, v in dataclasses.asdict(c).items() if v != default[k])


def collectives(text: str) -> dict[str, list[int]]:
    """Of each kind, elements of every array that it returns to a device."""
    found, name, kind = {kind: [] for kind in KINDS}, "", ""
    started = re.findall(r"%async-collective-start\S* = .* calls=%([\w.-]+)", text)
    pieces = {*re.findall(r"calls=%([\w.-]+)", text)} - {*started}  # fusions, but no starts
    for line in text.splitlines():
        if head := re.match(r"(?:ENTRY )?%([\w.-]+) \(.*\) -> (.*) \{$", line):
            name, returned = head.groups()
            kind = "reduce-scatter" if name.startswith("all-reduce-scatter") else ""
        elif name.startswith("all-reduce-scatter"):
            continue
        elif m := re.search(rf" = (.*?) ({'|'.join(KINDS)})(-start)?\(", line):
            kind, returned = m[2] if m[2] == "all-reduce" or name not in pieces else "", m[1]
            if m[3] and returned[0] == "(":  # (operand, result, ...)
                returned = returned.split("}, ")[1]
        else:
            continue
        if kind:
            shapes = re.findall(r"[a-z]\w*\[([\d,]*)\]", returned)
            found[kind] += [math.prod(int(n) for n in dims.split(",") if n) for dims in shapes]
    return found


def head_formats(text: str, V: int) -> list[tuple[str, ...]]:
    """Formats of the operands of every matrix product that has the vocabulary in it."""
    arrays = {n: (t, dims.split(",")) for n, t, dims in
              re.findall(r"%([\w.-]+) = ([a-z]\w*)\[([\d,]*)\]", text)}  # fmt: skip
    products = re.findall(r"%([\w.-]+) = \S+ (?:convolution|dot)\(%([\w.-]+), %([\w.-]+)\)", text)
    return sorted(tuple(sorted((arrays[a][0], arrays[b][0]))) for out, a, b in products
                  if any(str(V) in arrays[n][1] for n in (out, a, b)))  # fmt: skip


def faults(train: bool, c: train_gpt.Config, chip: str, GB: float, text: str) -> Iterator[str]:
    table, found = train_gpt.table(c), collectives(text)
    whole = [row for row in table.values() if row.spec != jax.P()]
    count = sum(row.shape[0] if row.spec[0] is None else 1 for row in whole)
    size = sum(math.prod(row.shape) for row in whole)
    gathered, shares, reduced = (found[kind] for kind in KINDS[:3])
    if GB > MAX_HBM * HBM_GB[chip]:
        yield f"arguments and temporaries are {GB:.1f} GB, above {MAX_HBM} of {HBM_GB[chip]}"
    if (len(gathered), sum(gathered)) != (count, size):
        yield f"{len(gathered)} arrays of {sum(gathered)} are gathered, not {count} of {size}"
    padded = 8 * sum(shares) / size
    if len(shares) != count * train or train and not 1 <= padded <= MAX_SCATTERED:
        yield f"{len(shares)} arrays of {padded:.3f} x {size} are reduce-scattered"
    if not 0 < max(reduced, default=0) <= MAX_ALL_REDUCE:
        yield f"the largest all-reduce has {max(reduced, default=0)} elements"
    if found["all-to-all"]:
        yield f"all-to-alls of {found['all-to-all']} elements"
    x, g = (HLO[f if train else c.compute] for f in (c.head_forward, c.head_backward))
    expected = sorted([(x, x)] + 2 * train * [tuple(sorted((x, g)))])
    if (head := head_formats(text, table["head"].shape[0])) != expected:
        yield f"the head multiplies {head}, not {expected}"


def attempt(chip: str, kind: str, window: int, c: train_gpt.Config, mesh: Mesh) -> list[str]:
    """Compile a program, print its row of the table, return what is wrong with it."""
    began = time.perf_counter()
    try:
        program = train_gpt.compile_stage(kind, window, c, mesh)
    except jax.errors.JaxRuntimeError as error:
        return [str(error).splitlines()[0]]
    seconds, text = time.perf_counter() - began, program.as_text()
    memory, V = program.memory_analysis(), train_gpt.table(c)["head"].shape[0]
    arguments, temporaries = memory.argument_size_in_bytes / 1e9, memory.temp_size_in_bytes / 1e9
    counts = [f"{len(n)} {name}" for name, n in collectives(text).items() if n]
    print(f"{chip:4} {kind:5} {window:6} {seconds:9.0f} {arguments:12.2f} {temporaries:14.2f}",
          f"{', '.join(counts)}; {', '.join(map('*'.join, head_formats(text, V)))}",
          sep="  ", flush=True)  # fmt: skip
    return list(faults(kind == "train", c, chip, arguments + temporaries, text))


def main() -> int:
    if importlib.util.find_spec("libtpu") is None:
        print(f"compile_tpu.py: {MISSING}", file=sys.stderr)
        return 2
    os.environ |= dict(TPU_SKIP_MDS_QUERY="1", TPU_WORKER_HOSTNAMES="localhost",
                       TPU_ACCELERATOR_TYPE="v5litepod-8")  # fmt: skip
    sha256 = hashlib.sha256(train_gpt.SOURCE.encode()).hexdigest()
    print(f"jax {jax.__version__}, libtpu {version('libtpu')}, train_gpt.py sha256 {sha256}")
    wrong = []
    for chip, c in CONFIGS.items():
        devices = topologies.get_topology_desc(f"{chip}:2x4", "tpu").devices
        mesh = Mesh(np.array(devices), ("fsdp",), axis_types=(AxisType.Auto,))
        print(f"\n{chip}-8: python train_gpt.py {flags(c)}")
        print("chip kind  window compile s arguments GB temporaries GB  collectives; head")
        for kind in ("train", "val"):
            found = attempt(chip, kind, c.window_at(c.steps), c, mesh)
            wrong += [f"{chip} {kind}: {fault}" for fault in found]
    print("\n" + "\n".join(wrong or ["all checks passed"]))
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
