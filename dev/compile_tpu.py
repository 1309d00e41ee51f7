"""Compile the record for TPU v5e-8 and v6e-8 without a TPU, and check what the compiler made of it.

Run     python dev/compile_tpu.py > records/tpu_compile.txt, by hand, with jax[tpu]; minutes
Told    of the last stage's odd steps and of validation (even steps and earlier stages do less):
        memory, collectives, the formats of the head's operands. Not told: speed, results
A gradient whose shares are no whole tiles is scattered by a fusion, all-reduce-scatter, of padding,
all-reduce and slice, by the algorithm of a reduce-scatter; neighbors then permute the rows that
padding moved. A gather that is hidden behind kernels has a copy in each: its start counts. Float8
operands are stored as such, and unpacked in front of a bfloat16 pass: exact, and no faster.
"""

import math
import os
import re
import shlex
import sys
import time
from collections.abc import Iterator
from importlib.metadata import distributions, version
from pathlib import Path

os.environ["JAX_PLATFORMS"] = "cpu"
sys.path[:0] = [str(Path(__file__).resolve().parent.parent), str(Path(__file__).resolve().parent)]

import jax  # noqa: E402
import numpy as np  # noqa: E402
from compile_8xh100 import DIGEST  # noqa: E402
from jax.experimental import topologies  # noqa: E402
from jax.sharding import AxisType, Mesh  # noqa: E402

import train_gpt  # noqa: E402

# Attention by XLA has scores for every pair of positions: the last stage's sequences have 2,048.
STAGE = "--stages '423 393216 640 1408 2048 1.73 0,1'"  # the others do not divide by this batch
STAGE += " --untie 282"  # within it, or embedding and head stay one table
FLAGS = f"{STAGE} --batch 192 --microbatch {{}} --head_chunk 2048 --attention xla --val_T 2048"
CHIPS = dict(v5e=(16, FLAGS.format(2)), v6e=(32, FLAGS.format(6)))  # gigabytes of memory, flags
MISSING = f"no TPU compiler here: pip install 'jax[tpu]=={jax.__version__}'; a TPU is not needed"
KINDS = ("all-gather", "reduce-scatter", "all-reduce", "collective-permute", "all-to-all")
COLLECTIVE = rf" = (.*?) ({'|'.join(KINDS)})(-start)?\("


def collectives(text: str) -> dict[str, list[int]]:
    """Of each kind, elements of every array that it returns to a device."""
    found, name, kind = {kind: [] for kind in KINDS}, "", ""
    started = re.findall(r"%async-collective-start\S* = .* calls=%([\w.-]+)", text)
    pieces = {*re.findall(r"calls=%([\w.-]+)", text)} - {*started}  # fusions, but no starts
    for line in text.splitlines():
        if head := re.match(r"(?:ENTRY )?%([\w.-]+) \(.*\) -> (.*) \{$", line):
            name, returned = head.groups()
            kind = "reduce-scatter" if name.startswith("all-reduce-scatter") else ""
        elif (m := re.search(COLLECTIVE, line)) and not name.startswith("all-reduce-scatter"):
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


def faults(train: bool, c: train_gpt.Config, V: int, text: str) -> Iterator[str]:
    found = collectives(text)
    rows, T = train_gpt.param_table(c), c.rows[0].T
    whole = [row for row in rows.values() if row.spec != jax.P()]
    small = sum(math.prod(row.stored_shape) for row in rows.values() if row.spec == jax.P())
    count = sum(row.stored_shape[0] if row.spec[0] is None else 1 for row in whole)
    size = sum(math.prod(row.stored_shape) for row in whole)
    gathered, shares, reduced, *_ = found.values()
    # In training also which rows of the table of pairs were read, and their gradients.
    expected = count + 2 * train, size + train * c.batch * T * (c.D + 1)
    if (len(gathered), sum(gathered)) != expected:
        yield f"{len(gathered)} arrays of {sum(gathered)} are gathered, not {expected}"
    own = size - math.prod(rows["bigram"].stored_shape)
    padded = 8 * sum(shares) / own  # to whole tiles
    if len(shares) != (count - 1) * train or train and not 1 <= padded <= 1.05:
        yield f"{len(shares)} arrays of {padded:.3f} x {own} are reduce-scattered"
    if not 0 < sum(reduced) <= small + 1 or found["all-to-all"]:
        yield f"all-reduces {reduced}, all-to-alls {found['all-to-all']}: only small ones need them"
    x, g = (f.replace("float", "f").replace("_", "") for f in (c.head_forward, c.head_backward))
    expected = [(x, x), (x, g), (x, g)] if train else [("bf16", "bf16")]
    if (head := head_formats(text, V)) != expected:
        yield f"the head multiplies {head}, not {expected}"


def main() -> int:
    if not any(distributions(name="libtpu")):
        print(f"compile_tpu.py: {MISSING}", file=sys.stderr)
        return 2
    os.environ |= dict(TPU_SKIP_MDS_QUERY="1", TPU_WORKER_HOSTNAMES="localhost",
                       TPU_ACCELERATOR_TYPE="v5litepod-8")  # fmt: skip
    print(f"jax {jax.__version__}, libtpu {version('libtpu')}, sha256 of the code {DIGEST}")
    wrong = []
    for chip, (GB, flags) in CHIPS.items():
        devices = topologies.get_topology_desc(f"{chip}:2x4", "tpu").devices
        mesh = Mesh(np.array(devices), ("fsdp",), axis_types=(AxisType.Auto,))
        c = train_gpt.parse_config(shlex.split(flags))[1]
        V, stage = train_gpt.param_table(c)["head"].stored_shape[0], c.stage_at(c.steps - 1)
        print(f"\n{chip}-8: python train_gpt.py {flags}")
        print("chip kind  stage compile s arguments GB temporaries GB  collectives; head")
        for kind in ("odd", "val"):
            began = time.perf_counter()
            program = train_gpt.compile_stage(kind, stage, c, mesh)
            seconds, text = time.perf_counter() - began, program.as_text()
            m = program.memory_analysis()
            arguments, temporaries = m.argument_size_in_bytes / 1e9, m.temp_size_in_bytes / 1e9
            counts = [f"{len(n)} {name}" for name, n in collectives(text).items() if n]
            formats = ", ".join(map("*".join, head_formats(text, V)))
            print(f"{chip:4} {kind:5} {stage:5} {seconds:9.0f} {arguments:12.2f} "
                  f"{temporaries:14.2f}  {', '.join(counts)}; {formats}", flush=True)  # fmt: skip
            wrong += [f"{chip} {kind}: {fault}" for fault in faults(kind == "odd", c, V, text)]
            if arguments + temporaries > 0.9 * GB:
                wrong.append(f"{chip} {kind}: arguments and temporaries exceed 0.9 of {GB} GB")
    print("\n" + "\n".join(wrong or ["all checks passed"]))
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
