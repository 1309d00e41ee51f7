"""Compiles the record for TPU v5e-8 and v6e-8 without a TPU, and checks what came out.

    python dev/compile_tpu.py > records/gpu/tpu_compile.txt      with jax[tpu]; minutes

Of a second step of the third stage and of validation (first steps and earlier stages do less):
memory, collectives, the formats of the head's operands. It does not measure speed or results.

A gradient whose shares are no whole tiles is scattered by a fusion, all-reduce-scatter, of padding,
all-reduce and slice, by the algorithm of a reduce-scatter; neighbors afterwards permute the rows
that padding moved. A gather that is hidden behind kernels has a copy in all of them: its start
counts. Float8 operands are stored as such, and unpacked before a bfloat16 pass: exact, and no
faster.
"""

import dataclasses
import math
import os
import re
import sys
import time
from collections.abc import Iterator
from importlib.metadata import distributions, version
from pathlib import Path

os.environ["JAX_PLATFORMS"] = "cpu"
sys.path[:0] = [str(Path(__file__).resolve().parent.parent), str(Path(__file__).resolve().parent)]

import jax  # noqa: E402
import numpy as np  # noqa: E402
from compile_8xh100 import any_prefixes, compile_step, digest_line  # noqa: E402
from jax.experimental import topologies  # noqa: E402
from jax.sharding import AxisType, Mesh  # noqa: E402

import train_gpt  # noqa: E402

# Gigabytes of memory, and sequences that a chip runs at once.
CHIPS = {"v5e": (16, 2), "v6e": (32, 6)}
MISSING = f"no TPU compiler here: pip install 'jax[tpu]=={jax.__version__}'; a TPU is not needed"
KINDS = ("all-gather", "reduce-scatter", "all-reduce", "collective-permute", "all-to-all")
COLLECTIVE = rf" = (.*?) ({'|'.join(KINDS)})(-start)?\("


def tpu_config(microbatch: int) -> train_gpt.Config:
    """The record's third stage alone, in sequences of 2,048 tokens: XLA's attention computes a
    score for every pair of positions. The other stages do not divide by this batch."""
    c = train_gpt.PRESETS["record"]
    return dataclasses.replace(
        c, stages=c.stages[2:3], batch=192, microbatch=microbatch, head_chunk=2048, val_T=2048,
        attention="xla",
    )  # fmt: skip


def collectives(text: str) -> dict[str, list[int]]:
    """Of every kind, elements of all arrays that it returns to a device."""
    found = {kind: [] for kind in KINDS}
    name, kind = "", ""
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


def faults(train: bool, c: train_gpt.Config, text: str) -> Iterator[str]:
    """What is not as it must be."""
    found, table = collectives(text), train_gpt.param_table(c)
    sharded = [p for p in table.values() if p.sharding != train_gpt.REPLICATED]
    replicated = [p for p in table.values() if p.sharding == train_gpt.REPLICATED]
    small = sum(math.prod(p.shape) for p in replicated)
    arrays = sum(p.shape[0] if p.sharding == train_gpt.BANK else 1 for p in sharded)
    size = sum(math.prod(p.shape) for p in sharded)
    gathered, shares, reduced, *_ = found.values()
    # In training also which rows of the bigram table were read, and their gradients.
    bigrams = train * c.batch * c.sequence_length(0) * (c.D + 1)
    expected = arrays + 2 * train, size + bigrams
    if (len(gathered), sum(gathered)) != expected:
        yield f"{len(gathered)} arrays of {sum(gathered)} are gathered, not {expected}"
    gradients = size - math.prod(table["bigram"].shape)
    padded = 8 * sum(shares) / gradients  # to whole tiles
    if len(shares) != (arrays - 1) * train or train and not 1 <= padded <= 1.05:
        yield f"{len(shares)} arrays of {padded:.3f} x {gradients} are reduce-scattered"
    if not 0 < sum(reduced) <= small + 1 or found["all-to-all"]:
        yield f"all-reduces {reduced}, all-to-alls {found['all-to-all']}: only small ones need them"
    x, g = (f.replace("float", "f").replace("_", "") for f in (c.head_forward, c.head_backward))
    expected = [(x, x), (x, g), (x, g)] if train else [("bf16", "bf16")]
    head = head_formats(text, table["head"].shape[0])
    if head != expected:
        yield f"the head multiplies {head}, not {expected}"


def main() -> int:
    """Compiles both programs for both chips and returns the exit status."""
    if not any(distributions(name="libtpu")):
        print(f"compile_tpu.py: {MISSING}", file=sys.stderr)
        return 2
    os.environ["TPU_SKIP_MDS_QUERY"] = "1"
    os.environ["TPU_WORKER_HOSTNAMES"] = "localhost"
    os.environ["TPU_ACCELERATOR_TYPE"] = "v5litepod-8"
    jax.config.update("jax_num_cpu_devices", 8)
    print(f"- jax {jax.__version__}, libtpu {version('libtpu')}\n{digest_line()}")
    train_gpt.prefix_table = any_prefixes
    wrong = []
    for chip, (GB, microbatch) in CHIPS.items():
        devices = topologies.get_topology_desc(f"{chip}:2x4", "tpu").devices
        mesh = Mesh(np.array(devices), ("fsdp",), axis_types=(AxisType.Auto,))
        c = tpu_config(microbatch)
        print(
            f"\n{chip}-8: the record's third stage alone, --batch {c.batch} --microbatch "
            f"{c.microbatch} --head_chunk {c.head_chunk} --val_T {c.val_T}, attention by XLA"
        )
        print("chip kind   compile s arguments GB temporaries GB  collectives; head")
        for kind in ("second", "val"):
            began = time.perf_counter()
            program = compile_step(kind, 0, c, mesh)
            seconds = time.perf_counter() - began
            text, memory = program.as_text(), program.memory_analysis()
            arguments = memory.argument_size_in_bytes / 1e9
            temporaries = memory.temp_size_in_bytes / 1e9
            counts = [f"{len(n)} {name}" for name, n in collectives(text).items() if n]
            head = head_formats(text, train_gpt.param_table(c)["head"].shape[0])
            formats = ", ".join(map("*".join, head))
            print(
                f"{chip:4} {kind:6} {seconds:9.0f} {arguments:12.2f} {temporaries:14.2f}  "
                f"{', '.join(counts)}; {formats}",
                flush=True,
            )
            wrong += [f"{chip} {kind}: {fault}" for fault in faults(kind == "second", c, text)]
            if arguments + temporaries > 0.9 * GB:
                wrong.append(f"{chip} {kind}: arguments and temporaries exceed 0.9 of {GB} GB")
    print("\n" + "\n".join(wrong or ["all checks passed"]))
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
