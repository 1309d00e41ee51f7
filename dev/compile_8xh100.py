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
results. Products are not tuned, and cuDNN builds its plans only on a real GPU. How it counts:

Traffic: what kernels other than GEMMs, attention and collectives read and write, without caches. Of
    an operand, what the results need of it (a slice, the gathered rows); of an update in place, the
    update; of updates that were gathered from n devices, one n-th, because a device adds up those
    of its rows. XLA names one function of train_gpt.py for a whole kernel; that is the cause. The
    head computes its gradients in its forward pass.
PTX: instructions that a kernel's threads issue, of all branches, and of loops that end in a
    conditional jump as often as thread 0 runs them, by an interpreter of the three instructions
    that count; a loop that it cannot count runs once. An element is one of the largest array that
    the kernel reads or writes. Only of kernels that XLA generates.
Time: of a kernel that of its bytes or of its instructions, whichever is longer; of products and
    attention that of their operations, or bytes (cuBLAS's workspace among them). The rates were
    fixed before the first look at this program, on record 21's file as it stands in its record:
    another calculation from rates gave 108 ms for that, PyTorch's took 102.
Sent: by one of n devices, in a ring: (n - 1) / n of an array that is gathered or scattered. Ideal
    are the parameters in 2 bytes each. Every training step gathers the banks and scatters all
    gradients but those of bigrams, of which every device gathers which rows were read and a
    gradient for each; lookups are gathered at the end of second steps, after their updates.
    Validation gathers all weights. The rest is padding.
"""

import argparse
import collections
import dataclasses
import functools
import hashlib
import importlib.util
import itertools
import math
import os
import re
import shutil
import sys
import tempfile
import time
import zlib
from collections.abc import Callable, Iterable, Iterator
from importlib.metadata import distributions, version
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

os.environ["JAX_PLATFORMS"] = "cpu"  # also keeps the plugin from looking for a driver
ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import jax  # noqa: E402
import numpy as np  # noqa: E402
from jax.experimental import topologies  # noqa: E402
from jax.sharding import AxisType, Mesh  # noqa: E402

import train_gpt  # noqa: E402

KINDS = "first", "second", "val"  # of programs; a second step updates every parameter
RECORD = ROOT / "records/gpu/h100_compile.md"
MISSING = "no CUDA plugin for JAX here: install jax[cuda12] or jax[cuda13]; a GPU is not needed"
# Assumed of an H100.
FLOAT32 = 300e12  # operations a second of a product with operands in float32
BFLOAT16 = 600e12
FP8_MIXED = 800e12  # operands in two formats of FP8, as in the head's backward pass
FP8 = 900e12  # operands in one format
ATTENTION = 560e12
MORE_KEYS = 400  # attention to a window takes as long as one with so many more keys would
ISSUE = 25e12  # instructions a second, of threads
MEMORY = 2.75e12  # bytes a second
LINKS = 350e9  # bytes a second
LAUNCH = 2.5e-6  # seconds from one kernel to the next
STOLEN = 1e-12  # seconds that a byte sent takes from kernels, because collectives need SMs, too
RECORD_21 = ROOT / "records/tracks/tiny-2k/2026-11-22_baseline/train_gpt.py"
RECORD_21_MS = 103, 113
UPSTREAM_MS = (31, 32), (57, 58), (82.6, 84), (83, 84)  # by stage; of their logs of these shapes
PARTS = "gemm", "attention", "other", "launches", "exposed", "stolen"
DUMP = Path(tempfile.gettempdir(), f"compile_8xh100_{os.getpid()}")


# ---- What train_gpt.py's programs must be --------------------------------------------------------
SETTINGS = (  # gigabytes of one GPU's memory, the flags for it, and whether they are enough
    (80, {}, True),
    (40, {}, True),
    (40, dict(batch=16, head_chunk=8192, head_forward="bfloat16", head_backward="bfloat16"), True),
    (24, dict(batch=32, head_chunk=4096, val_T=65536), True),
    (16, dict(batch=64, head_chunk=2048, val_T=65536), False),
)
# Programs whose text is compared: one with all targets, one with all updates, one of validation.
LOWERED = ("first", 0), ("second", 3), ("val", 4)


def compile_step(kind: str, stage: int, c: train_gpt.Config, mesh: Mesh) -> Any:
    """A program of train_gpt.py."""
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


def lowered_digest() -> str:
    """sha256 of what XLA gets to compile: the text of LOWERED for 8 CPUs, with XLA's attention in
    place of cuDNN's, the options, and what tells the other stages' programs from these."""
    c, mesh = record_config("xla"), train_gpt.make_mesh(jax.devices()[:8])
    stages = [(s.tokens, s.short, s.long, list(train_gpt.target_weights(s))) for s in c.stages]
    digest = hashlib.sha256(repr((stages, train_gpt.OPTIONS["gpu"])).encode())

    def text(lowered, *_):
        return lowered.as_text()

    with (
        mock.patch.object(train_gpt, "prefix_table", any_prefixes),
        mock.patch.object(jax.stages.Lowered, "compile", text),
    ):
        for kind, stage in LOWERED:
            digest.update(compile_step(kind, stage, c, mesh).encode())
    return digest.hexdigest()


def digest_line() -> str:
    """What records/gpu/h100_compile.md states of the programs' text."""
    return f"- sha256 of the programs as lowered by jax {jax.__version__}: {lowered_digest()}"


def source_line() -> str:
    """What records/gpu/h100_compile.md states of train_gpt.py when it was compiled."""
    return f"- crc32 of train_gpt.py when it was compiled: {zlib.crc32(train_gpt.SOURCE.encode())}"


def check_lowered(write: bool) -> int:
    """Whether the programs are those of the record; the exit status."""
    line, record = digest_line(), RECORD.read_text(encoding="utf-8")
    name = RECORD.relative_to(ROOT)
    if line in record.splitlines():
        print(f"{line}\n{name} is of these programs")
        return 0
    if write and source_line() in record.splitlines():
        start = re.escape(line.rpartition(": ")[0])
        record = re.sub(f"{start}: .*\n", "", record)
        RECORD.write_text(
            record.replace(source_line(), f"{source_line()}\n{line}"), encoding="utf-8"
        )
        print(f"{line}\nadded to {name}")
        return 0
    print(f"{line}\n{name} is not of these programs, or not by this version of JAX")
    return 1


class Wanted(NamedTuple):
    """What a program must be, in numbers."""

    train: bool
    devices: int
    attending: int  # layers with attention
    microbatches: int  # of a device
    activation: int  # elements of x in a microbatch
    head: tuple[int, int, int]  # tokens in a chunk, rows of the table, width
    chunks: int  # of the head
    gathered: int  # elements of weights, with padding
    scattered: int  # elements of gradients, with padding
    reduced: int  # elements of gradients that every device needs whole
    ideal: int  # elements of what is gathered and what is scattered, without padding


def wanted(kind: str, stage: int, c: train_gpt.Config, devices: int) -> Wanted:
    """The numbers of a program, counted from the table of parameters."""
    params = train_gpt.param_table(c)
    train = kind != "val"
    sequences = c.batch if train else train_gpt.VAL_SEQUENCES
    T = c.sequence_length(stage) if train else c.val_T
    rows = sequences // devices
    microbatch = c.microbatch if train else c.for_validation().microbatch
    at_once = math.gcd(microbatch, rows)
    banks = [p for p in params.values() if p.sharding == train_gpt.BANK]
    lookups = [p for p in params.values() if p.sharding == train_gpt.LOOKUP]
    replicated = [p for p in params.values() if p.sharding == train_gpt.REPLICATED]
    gathered = banks if kind == "first" else banks + lookups
    scattered = [p for p in banks + lookups if train and p is not params["bigram"]]
    bigrams = train * sequences * T  # devices exchange which rows they read, and their gradients

    def stored(params):
        """Elements, with padding."""
        return sum(math.prod(p.shape) for p in params)

    return Wanted(
        train=train,
        devices=devices,
        attending=len(c.attention_layers()),
        microbatches=rows // at_once,
        activation=at_once * T * c.D,
        head=(c.head_chunk, params["head"].shape[0], c.D),
        chunks=rows * T // c.head_chunk,
        gathered=stored(gathered) + bigrams * (c.D + 1),
        scattered=stored(scattered),
        reduced=stored(replicated) * train,
        # A row's number, in int32, counts as two elements.
        ideal=sum(math.prod(p.model_shape) for p in gathered + scattered) + bigrams * (c.D + 2),
    )


# ---- HLO -----------------------------------------------------------------------------------------
BYTES = dict(pred=1, s8=1, u8=1, s16=2, u16=2, bf16=2, f16=2, s32=4, u32=4, f32=4, s64=8, u64=8,
             f64=8, f8e4m3fn=1, f8e5m2=1)  # fmt: skip
COLLECTIVES = ("all-", "reduce-scatter", "collective-", "ragged-")  # names begin so
FREE = ("parameter", "tuple", "get-tuple-element", "bitcast", "constant", "after-all",
        "opt-barrier", "partition-id", "replica-id")  # fmt: skip
VIEWS = ("bitcast", "get-tuple-element", "copy-done", "fusion-done", "opt-barrier")
INSTRUCTION = re.compile(r"\s+(ROOT )?%?([\w.\-]+) = (.*?) ([\w\-]+)\(([^)]*)\)(.*)")


class Op(NamedTuple):
    """An instruction; a tuple's shapes are flat, rest is what follows the arguments."""

    name: str
    kind: str
    shapes: list[tuple[str, tuple[int, ...]]]
    args: list[str]
    rest: str
    root: bool = False

    def elements(self) -> int:
        """Of all its arrays."""
        return sum(math.prod(dims) for _, dims in self.shapes)

    def size(self) -> int:
        """Bytes of all its arrays."""
        return sum(math.prod(dims) * BYTES.get(dtype, 0) for dtype, dims in self.shapes)

    def called(self) -> str:
        """The name of the computation that it runs."""
        return re.search(r"(?:calls|body|to_apply)=%?([\w.\-]+)", self.rest)[1]

    def trips(self) -> int | None:
        """How often a loop runs, where the compiler knows it."""
        found = re.search(r'"known_trip_count":\{"n":"(\d+)"', self.rest)
        return found and int(found[1])

    def collective(self) -> str | None:
        """Which one it is, or starts."""
        starts = self.kind.startswith(COLLECTIVES) and not self.kind.endswith("-done")
        return self.kind.removesuffix("-start") if starts else None

    def product(self) -> str | None:
        """A matrix product by cuBLAS or by Triton, or cuDNN's attention."""
        if self.kind == "dot" or self.kind == "custom-call" and '"__cublas' in self.rest:
            return "gemm"
        return "attention" if '"__cudnn$fmha' in self.rest else None


Body = dict[str, Op]  # a computation: its instructions in order, by name


class Program(NamedTuple):
    """A compiled program, parsed."""

    entry: str
    bodies: dict[str, Body]
    overwritten: dict[int, str]  # number of a result -> the parameter whose memory it takes
    frames: dict[str, list[str]]  # stack frame -> functions of train_gpt.py, innermost first
    devices: int = 8
    instructions: dict[str, float] = {}  # PTX that a kernel's threads issue, by its name


class Kernel(NamedTuple):
    """What the program launches."""

    kind: str  # gemm, attention, collective, done or other
    op: Op
    body: Body  # that it stands in
    times: int


def parse(text: str, devices: int = 8, instructions: dict[str, float] | None = None) -> Program:
    """Reads the text of a compiled program."""
    bodies, numbers = {}, {}
    entry, body = "", None
    for line in text.splitlines():
        head = re.match(r"(ENTRY )?%?([\w.\-]+) \(.*\) -> .*\{$", line)
        instruction = INSTRUCTION.match(line)
        if head:
            body = bodies[head[2]] = {}
            entry = head[2] if head[1] else entry
        elif line.startswith("}"):
            body = None
        elif body is not None and instruction:
            root, name, shape, kind, args, rest = instruction.groups()
            arrays = re.findall(r"\b([a-z]\w*)\[([\d,]*)\]", shape)
            shapes = [(t, tuple(int(n) for n in dims.split(",") if n)) for t, dims in arrays]
            body[name] = Op(name, kind, shapes, re.findall(r"%([\w.\-]+)", args), rest, bool(root))
            if kind == "parameter":
                numbers[args] = name  # in the end those of the entry, which comes last
                body[name] = body[name]._replace(rest=f"{args} {rest}")
    aliases = re.findall(r"\{(\d+)\}: \((\d+), ", text.split("\n", 1)[0])
    overwritten = {int(result): numbers[number] for result, number in aliases}
    return Program(entry, bodies, overwritten, frames(text), devices, instructions or {})


def frames(text: str) -> dict[str, list[str]]:
    """The tables above the computations; a parent is written plus one, so that 1 means none."""
    parts = text.split("\n\n")
    tables = {p.split("\n")[0]: dict(re.findall(r"^(\d+) (.*)", p, re.M)) for p in parts}
    chains = {}
    for i, row in tables.get("StackFrames", {}).items():
        place, *parents = re.findall(r"=(\d+)", row)
        parent = parents[0] if parents else "1"
        file, function, *_ = re.findall(r"=(\d+)", tables["FileLocations"][place])
        name = tables["FunctionNames"][function].strip('"').split(".<locals>")[0]
        ours = "train_gpt.py" in tables["FileNames"][file]
        chains[i] = [name] * ours + chains.get(str(int(parent) - 1), [])
    return chains


def inside(program: Program, op: Op, body: Body) -> list[tuple[Op, Body]]:
    """The instructions of a kernel, and what they stand in: those of a fusion, or itself."""
    if op.kind not in ("fusion", "fusion-start"):
        return [(op, body)]
    fused = program.bodies[op.called()]
    return [pair for o in fused.values() for pair in inside(program, o, fused)]


def reach(name: str, body: Body, users: bool, through: Iterable[str] = ()) -> Iterator[Op]:
    """A value, what it is made of or what uses it, and on, nearest first; `through` some kinds."""
    queue = [name]
    for name in queue:
        yield body[name]
        if name == queue[0] or not through or body[name].kind in through:
            beside = [o.name for o in body.values() if name in o.args] if users else body[name].args
            queue += [n for n in dict.fromkeys(beside) if n not in queue]


def kernels(program: Program, body: str = "", times: int = 1) -> Iterator[Kernel]:
    """What the scheduled program runs, in order; what a loop runs comes once, with a count."""
    ops = program.bodies[body or program.entry]
    for op in ops.values():
        if op.collective():
            yield Kernel("collective", op, ops, times)
        elif op.kind in ("while", "call"):
            yield from kernels(program, op.called(), times * (op.trips() or 1))
        elif op.kind.endswith("-done"):
            yield Kernel("done", op, ops, times)
        elif op.kind not in FREE:
            products = {o.product() for o, _ in inside(program, op, ops)} - {None}
            yield Kernel(max(products, default="other"), op, ops, times)


# ---- Traffic and time ----------------------------------------------------------------------------
def under(name: str, body: Body) -> Op:
    """What a bitcast shows."""
    return next(op for op in reach(name, body, False) if op.kind != "bitcast")


def needed(op: Op, i: int, body: Body, n: float, in_place: bool) -> float:
    """Elements of argument i that n elements of a result take; n of as many where they pair off."""
    arg = body[op.args[i]].elements()
    if i == 0 and re.fullmatch("(dynamic-)?(update-)?slice|gather|scatter", op.kind):
        return 0 if in_place else n
    if op.kind in ("dynamic-update-slice", "dynamic-slice"):
        return arg
    return arg * n / max(1, op.elements())


def touched(program: Program, kernel: Kernel) -> tuple[int, int]:
    """Bytes that a kernel reads and writes, and the most elements of an array."""
    args = {name: kernel.body[name]._replace(kind="parameter", args=[]) for name in kernel.op.args}
    body = {**args, kernel.op.name: kernel.op._replace(root=True)}
    given = {name: name for name in args}
    if kernel.op.kind in ("fusion", "fusion-start"):
        body = program.bodies[kernel.op.called()]
        parameters = [op for op in body.values() if op.kind == "parameter"]
        given = {op.name: kernel.op.args[int(op.rest.split()[0])] for op in parameters}
    root = next(op for op in body.values() if op.root)
    need, in_place = dict.fromkeys(body, 0.0), set()
    written, most = 0, 0
    for output in root.args if root.kind == "tuple" else [root.name]:
        need[output] += body[output].elements()
        source = under(output, body)
        update, times = {"dynamic-update-slice": (1, 1), "scatter": (2, 2)}.get(source.kind, (0, 0))
        if times and under(source.args[0], body).kind == "parameter":
            in_place.add(source.name)  # a scatter adds: it reads what it writes
            n = body[source.args[update]].elements()
            n /= shared_by(program, kernel, body, source, given)
            written += times * n * BYTES[source.shapes[0][0]]
            most = max(most, n)
        elif source.kind != "parameter":
            written += source.size()
            most = max(most, source.elements())
    for op in reversed([op for op in body.values() if op.kind != "tuple"]):
        n = min(need[op.name], op.elements())
        for i, name in enumerate(op.args):
            more = needed(op, i, body, n, op.name in in_place)
            need[name] += more / shared_by(program, kernel, body, op, given) if i == 2 else more
    read = 0.0
    for op in (op for op in body.values() if op.kind == "parameter"):
        n = min(op.elements(), need[op.name])
        read += op.size() * n / max(1, op.elements())
        most = max(most, n)
    return round(read + written), round(most)


def shared_by(program: Program, kernel: Kernel, body: Body, op: Op, given: dict[str, str]) -> int:
    """By how much to divide a scatter's updates: of all devices' it uses those of its rows."""
    sources = reach(op.args[2], body, False) if op.kind == "scatter" else ()
    outer = [given[o.name] for o in sources if o.name in given]
    views = ("bitcast", "get-tuple-element", "all-gather-done")
    made = (o for name in outer for o in reach(name, kernel.body, False, views))
    return program.devices if any(o.collective() == "all-gather" for o in made) else 1


def traffic(program: Program, kernel: Kernel) -> int:
    """Bytes that all runs of a kernel read and write."""
    return kernel.times * touched(program, kernel)[0]


# Functions of train_gpt.py, and of older files, that only build and compile programs.
COMPILING = {"compile_train_step", "compile_val_step", "compile_program", "compile_stage"}
FORWARD = {"loss_fn", "whole_weights", "val_step"}


def cause(program: Program, kernel: Kernel) -> tuple[str, str]:
    """Of a kernel: forward, backward or update, and the innermost function of train_gpt.py."""
    parts = [op for op, _ in inside(program, kernel.op, kernel.body)]
    for op in (kernel.op, *parts[::-1]):
        frame = re.search(r"stack_frame_id=(\d+)", op.rest)
        chain = program.frames.get(frame[1], []) if frame else []
        if {*chain} - COMPILING - {"<module>"}:
            name = "".join(re.findall(r'op_name="([^"]*)"', op.rest))
            forward = "jvp(" in name or FORWARD & {*chain}
            phase = "backward" if "transpose(" in name else "forward" if forward else "update"
            return phase, chain[0]
    return "any", "not named"


def traffic_by_cause(program: Program) -> dict[tuple[str, str], tuple]:
    """(phase, function) -> bytes, kernels, instructions, seconds; most bytes first."""
    total = collections.defaultdict(lambda: (0, 0, 0.0, 0.0))
    for kernel in kernels(program):
        if kernel.kind == "other":
            new = (traffic(program, kernel), kernel.times, issued(program, kernel),
                   seconds(program, kernel))  # fmt: skip
            key = cause(program, kernel)
            total[key] = tuple(map(sum, zip(total[key], new, strict=True)))
    return dict(sorted(total.items(), key=lambda item: -item[1][0]))


def issued(program: Program, kernel: Kernel) -> float:
    """Instructions that the threads of all runs of a kernel issue."""
    return kernel.times * program.instructions.get(kernel.op.name, 0)


def flops(op: Op, body: Body) -> int:
    """Of a product. Attention is two forward, five backward, of queries with keys in the window."""
    left = body[op.args[0]].shapes[0][1]
    if op.product() == "attention":
        window = int(re.search(r'"sliding_window_length": ?(\d+)', op.rest)[1]) or left[1]
        return (10 if "Backward" in op.rest else 4) * math.prod(left) * min(window, left[1])
    written = r'lhs_contracting_dim(?:ension)?s"?[:=][\[{]([^\]}]*)'
    axes = re.findall(r"\d+", re.search(written, op.rest)[1])
    return 2 * math.prod(op.shapes[0][1]) * math.prod(left[int(axis)] for axis in axes)


def seconds(program: Program, kernel: Kernel) -> float:
    """Estimate of a kernel that is no collective, from the end of the one before."""
    if kernel.kind == "other":
        work = max(traffic(program, kernel) / MEMORY, issued(program, kernel) / ISSUE)
        return work + kernel.times * LAUNCH
    total = LAUNCH
    for op, body in inside(program, kernel.op, kernel.body):
        if op.product() == "attention":
            keys = body[op.args[0]].shapes[0][1][1]
            window = int(re.search(r'"sliding_window_length": ?(\d+)', op.rest)[1]) or keys
            total += flops(op, body) * (1 + MORE_KEYS / min(window, keys)) / ATTENTION
        elif op.product():
            formats = {body[arg].shapes[0][0] for arg in op.args[:2]}
            one = FP8 if len(formats) == 1 else FP8_MIXED
            rate = one if "f8e4m3fn" in formats else FLOAT32 if "f32" in formats else BFLOAT16
            moved = op.size() + sum(body[arg].size() for arg in op.args)
            total += max(flops(op, body) / rate, moved / MEMORY)
    return kernel.times * total


# ---- PTX -----------------------------------------------------------------------------------------
COUNTS = re.compile(r"(mov|add|setp)\.(\w+)(?:\.(\w+))?\s+(%\w+), (%\w+|-?\d+)(?:, (%\w+|-?\d+))?;")
COMPARE = dict(lt=int.__lt__, le=int.__le__, gt=int.__gt__, ge=int.__ge__, eq=int.__eq__,
               ne=int.__ne__)  # fmt: skip


def instructions(lines: list[str]) -> float:
    """That a thread issues, from a kernel's lines: an upper bound where its branches are apart."""
    places = {line[:-1]: i for i, line in enumerate(lines) if line[0] == "$"}
    times = [1] * len(lines)
    for i, line in enumerate(lines):
        jump = re.match(r"@(!?)(%p\d+) bra\s+(\$\w+);", line)
        if jump and places[jump[3]] < i:
            first = places[jump[3]]
            n = rounds(lines[:first], lines[first:i], jump[2], not jump[1])
            times[first : i + 1] = [n * t for t in times[first : i + 1]]
    return sum(n for n, line in zip(times, lines, strict=True) if line[0] != "$")


def rounds(before: list[str], loop: list[str], predicate: str, goes_on: bool) -> int:
    """Of a loop: moves, sums and comparisons of integers count it, and the others are left out."""
    values = collections.defaultdict(int)

    def value(operand):
        """Of a register, or the number itself."""
        return values[operand] if operand and operand[0] == "%" else int(operand or 0)

    def run(lines: list[str]) -> None:
        """Runs the instructions that count."""
        for found in filter(None, map(COUNTS.match, lines)):
            kind, how, of, out, *operands = found.groups()
            bits = int((re.search(r"\d+", of or how) or [1])[0])
            a, b = map(value, operands)
            if kind == "setp":
                half = 2 ** (bits - 1) * ((of or "")[:1] == "s")  # signed
                a, b = ((n + half) % 2**bits - half for n in (a, b))
                values[out] = int(COMPARE.get(how, int.__lt__)(a, b))
            else:
                values[out] = (a + b) % 2**bits

    run(before)
    for n in range(1, 4096):
        run(loop)
        if bool(values[predicate]) != goes_on:
            return n
    return 1  # no counter: what ends it is none of these


def dumped(folder: Path) -> dict[str, float]:
    """Instructions of every kernel, all threads together, from what XLA left there of a program."""
    code = {}
    for path in folder.glob("*.ptx"):
        entries = re.findall(r"\.entry (\w+)\(.*?\n\{(.*?)\n\}", path.read_text(), re.S)
        for name, body in entries:
            lines = (line.strip() for line in body.splitlines())
            code[name] = instructions([x for x in lines if re.match(r"[a-z@$]", x)])
    (names,) = folder.glob("*thunk_metadata.txt")
    (order,) = folder.glob("*thunk_sequence.txt")
    named = r'profile_annotation: "([^"]+)"\s+thunk_id: (\d+)'
    names = {number: name for name, number in re.findall(named, names.read_text())}
    launched = r"^\s*(\d+): kCustomKernel .*?\] (\w+) grid: \[(.*?)\] threads: \[(.*?)\]"
    out = {}
    for number, kernel, *sizes in re.findall(launched, order.read_text(), re.M):
        threads = math.prod(int(n) for size in sizes for n in size.split(","))
        out[names[number.lstrip("0")]] = threads * code[kernel]
    return out


class Transfer(NamedTuple):
    """A collective, on the estimate's clock."""

    what: str  # collective and parameters
    arrays: str
    bytes: int
    transfer: float  # seconds
    hidden: float  # work scheduled between start and done
    exposed: float


def communication(program: Program, devices: int) -> list[Transfer]:
    """Walks the schedule: kernels on one clock, collectives, one at a time, on another."""
    now, free = 0.0, 0.0  # the clock of kernels, and when the links are free
    waiting, out = {}, []
    for kernel in kernels(program):
        op = kernel.op
        if kernel.kind == "collective":  # the operand is a share or the whole
            shares = {"all-gather": devices, "all-reduce": 2}.get(op.collective(), 1)
            operand = sum(kernel.body[name].size() for name in op.args)
            n = kernel.times * operand * shares * (devices - 1) // devices
            free = max(now, free) + n / LINKS
            waiting[op.name] = kernel, n, now, free
        elif kernel.kind != "done":
            now += seconds(program, kernel)
        ended = op.args[0] if kernel.kind == "done" else op.name
        if ended in waiting and not op.kind.endswith("-start"):
            collective, n, start, end = waiting.pop(ended)
            hidden, more = now - start, max(0.0, end - now)
            out.append(Transfer(*named(program, collective), n, n / LINKS, hidden, more))
            now = max(now, end)
    return out


def named(program: Program, kernel: Kernel) -> tuple[str, str]:
    """Of a collective: itself and its parameters, and its operands; an all-reduce has many."""

    def several(texts: Iterable[str], times: str) -> str:
        """Equal texts once, with their number."""
        count = collections.Counter(texts).items()
        return " ".join(text if n == 1 else f"{n}{times}{text}" for text, n in count)

    op, body = kernel.op, kernel.body
    names = []
    if op.collective() == "all-gather":
        names = sorted(owners(program, name, body, False) for name in op.args)
    elif op.collective() != "all-reduce":  # the state that the first kernel to use it uses as well
        names = [owners(program, op.name, body, True)]
    shapes = [body[name].shapes[0] for name in op.args]
    arrays = [f"{dtype}[{','.join(map(str, dims))}]" for dtype, dims in shapes]
    return f"{op.collective()} {several(names, ' ')}".strip(), several(arrays, " x ")


def owners(program: Program, name: str, body: Body, users: bool) -> str:
    """The parameters nearest to a value, by their names in the table: op_name="params[\\'embed\\']"
    and the like. Embedding and head are updated by one kernel, and named together."""
    passed = set()
    for op in reach(name, body, users):
        near = [op.name, *op.args]
        if op.kind == "tuple":  # a value that leaves the program takes the place of its parameter
            near = [program.overwritten.get(i) for i, arg in enumerate(op.args) if arg in passed]
        texts = [body[n].rest for n in near if n and body[n].kind == "parameter"]
        names = [re.findall(r"\[\\?'([\w.]+)\\?'\]", text)[-1:] for text in texts]
        if any(names):
            return "/".join(sorted({*itertools.chain(*names)}))
        passed.add(op.name)
    return "?"


def exposed(transfers: Iterable[Transfer]) -> float:
    """Milliseconds in which nothing else is done."""
    return 1e3 * sum(t.exposed for t in transfers)


# ---- Checks --------------------------------------------------------------------------------------
def check_attention(program: Program, w: Wanted) -> Iterator[str]:
    """cuDNN once per attention layer and microbatch, and as often backward; no copy beside it."""
    backward = w.attending if w.train else 0
    for target, calls in ("fmhaSoftmax", w.attending), ("fmhaSoftmaxBackward", backward):
        times = [k.times for k in kernels(program) if f'"__cudnn${target}"' in k.op.rest]
        if times != [w.microbatches] * calls:
            expected = f"{calls} of them {w.microbatches} times"
            yield f"calls of cuDNN {target} run {times} times, not {expected}"
    moves = {"copy", "transpose", "copy-start"}
    for body in program.bodies.values():
        for call in (op.name for op in body.values() if op.product() == "attention"):
            for op in (*reach(call, body, False, VIEWS), *reach(call, body, True, VIEWS)):
                kinds = {o.kind for o, _ in inside(program, op, body)}
                only_moves = kinds <= moves | {"parameter", "bitcast", "reshape", "tuple"}
                if kinds & moves and only_moves and op.elements() >= w.activation:
                    yield f"{op.name} changes only the layout, beside {call}"


def fp8_gemms(program: Program) -> Iterator[tuple[list[str], Op, int]]:
    """Formats of both operands, the product, how often it runs."""
    for kernel in kernels(program):
        for op, body in inside(program, kernel.op, kernel.body):
            if op.product() == "gemm":
                types = sorted(body[arg].shapes[0][0] for arg in op.args[:2])
                if types[-1].startswith("f8"):
                    yield types, op, kernel.times


def check_head(program: Program, w: Wanted) -> Iterator[str]:
    """Three FP8 products for every chunk in training, z, dx and dw; none in validation."""
    N, V, D = w.head
    e4, e5 = "f8e4m3fn", "f8e5m2"
    runs = collections.Counter()
    for types, op, times in fp8_gemms(program):
        runs[(*types, *sorted(n for n in op.shapes[0][1] if n > 1))] += times
    products = ((e4, e4, *sorted((N, V))), (e4, e5, *sorted((N, D))), (e4, e5, *sorted((V, D))))
    expected = dict.fromkeys(products, w.chunks) if w.train else {}
    if runs != expected:
        yield f"GEMMs in FP8 run {dict(runs)} times, not {expected}"


def check_collectives(program: Program, w: Wanted) -> Iterator[str]:
    """Weights gathered in the background, of which one may have nothing to hide behind, gradients
    reduce-scattered, nothing else of size."""
    done, waits = collections.Counter(), []
    for op, body in ((k.op, k.body) for k in kernels(program) if k.kind == "collective"):
        kind = op.collective()
        n = sum(body[name].elements() for name in op.args)
        done[kind] += n
        if kind == "all-gather" and (not op.kind.endswith("-start") or '"is_sync":true' in op.rest):
            waits.append(op.name)
        if kind == "all-reduce" and n > w.reduced + 1:
            yield f"{op.name} all-reduces {n} elements: the loss and small gradients are fewer"
        if kind not in ("all-gather", "all-reduce", "reduce-scatter"):
            yield f"{op.name} is {kind}: nothing here needs one"
    if len(waits) > 1:
        yield f"{' '.join(waits)} are synchronous all-gathers"
    for kind, n in ("all-gather", w.gathered // w.devices), ("reduce-scatter", w.scattered):
        if done[kind] != n:
            yield f"{kind} of {done[kind]} elements in all, not {n}"


class Result(NamedTuple):
    """What one program turned out to be."""

    kind: str
    stage: int
    wanted: Wanted
    compile_s: float
    temporaries: float  # GB
    arguments: float
    program: Program
    causes: dict[tuple[str, str], tuple]
    traffic: float  # GB
    transfers: list[Transfer]
    ratio: float  # of what is sent to the ideal
    parts: dict[str, float]  # ms of a step, estimated


def faults(r: Result, timed: bool = True) -> Iterator[str]:
    """What is not as it must be, or above its limit."""
    for op in (op for body in r.program.bodies.values() for op in body.values()):
        if op.kind == "while" and op.trips() is None:
            yield f"{op.name} is a loop without a known trip count: its bytes count once"
    yield from check_attention(r.program, r.wanted)
    yield from check_head(r.program, r.wanted)
    others = [k for k in kernels(r.program) if k.kind == "other"]
    unknown = [traffic(r.program, k) for k in others if k.op.name not in r.program.instructions]
    many = r.wanted.devices > 1
    yield from check_collectives(r.program, r.wanted) if many else ()
    for limit, value, what, applies in (
        (40, r.compile_s, "s to compile; is the machine idle?", timed),
        (40, r.arguments + r.temporaries, "GB of arguments and temporaries", True),
        # A little above what was reached.
        (1.04, r.ratio, "times the ideal bytes are sent", many),
        (0.02 * r.traffic, sum(unknown) / 1e9, "GB are of kernels without PTX", True),
        (95, r.traffic, "GB of non-GEMM traffic", many and r.wanted.train),
        (3.5, exposed(r.transfers), "ms of communication are exposed (estimate)", many),
    ):  # fmt: skip
        if applies and value > limit:
            yield f"{value:.2f} {what}, limit {limit}"


# ---- Compiling -----------------------------------------------------------------------------------
def cudnn_version() -> str | None:
    """Of the cuDNN that comes with JAX's CUDA plugin, where there is one."""
    cuda = next((n for n in ("12", "13") if any(distributions(name=f"jax-cuda{n}-plugin"))), None)
    return cuda and version(f"nvidia-cudnn-cu{cuda}")


def answer_for_hopper() -> None:
    """JAX asks the machine for its chip and its cuDNN; there is no chip here, so this answers."""
    from jax._src.cudnn import fused_attention_stablehlo as fused

    major, minor, patch, *_ = map(int, cudnn_version().split("."))

    def has_capability(least: str) -> bool:
        """H100s have 9.0."""
        return tuple(map(int, least.split("."))) <= (9, 0)

    fused.check_cudnn_version = lambda: 10000 * major + 100 * minor + patch
    fused.check_compute_capability = has_capability
    fused.is_cuda_compute_capability_equal = lambda version: version == "9.0"


def make_mesh(devices: int) -> Mesh:
    """H100s in one host."""
    target = Path(__file__).with_name("h100.txtpb").read_text()
    topology = topologies.get_topology_desc(
        "h100", platform="cuda", topology=f"1x1x{devices}", target_config=target
    )
    return Mesh(np.array(topology.devices), ("fsdp",), axis_types=(AxisType.Auto,))


def compiled(compile_step: Callable, *program: Any, devices: int) -> tuple:
    """What XLA knows of a program's memory, the program, and the seconds that it took."""
    shutil.rmtree(DUMP, ignore_errors=True)
    mesh, began = make_mesh(devices), time.perf_counter()
    result = compile_step(*program, mesh)
    compile_s = time.perf_counter() - began
    return result.memory_analysis(), parse(result.as_text(), devices, dumped(DUMP)), compile_s


def step_ms(program: Program, transfers: list[Transfer]) -> dict[str, float]:
    """Estimated milliseconds of a step, by what takes them."""
    parts = collections.Counter()
    for kernel in kernels(program):
        if kernel.kind not in ("collective", "done"):
            launches = kernel.times * LAUNCH
            parts[kernel.kind] += seconds(program, kernel) - launches
            parts["launches"] += launches
    parts["exposed"] = sum(t.exposed for t in transfers)
    parts["stolen"] = STOLEN * sum(t.bytes for t in transfers)
    return {name: 1e3 * parts[name] for name in PARTS}


def record_21_ms() -> float:
    """Of record 21's file, mean of its first and last window: the check of the rates."""
    spec = importlib.util.spec_from_file_location("record_21", RECORD_21)
    script = importlib.util.module_from_spec(spec)
    sys.modules["record_21"] = script  # dataclasses look it up
    spec.loader.exec_module(script)
    c = dataclasses.replace(script.PRESETS["record"], attention="cudnn", seed=1)
    total = 0.0
    for window in 128, 1792:
        _, program, _ = compiled(script.compile_stage, "train", window, c, devices=8)
        total += sum(step_ms(program, communication(program, 8)).values())
    return total / 2


@functools.cache  # the first settings of memory_table are compiled already
def measure(kind: str, stage: int, c: train_gpt.Config, devices: int) -> Result:
    """Compiles a program and counts."""
    memory, program, compile_s = compiled(compile_step, kind, stage, c, devices=devices)
    w = wanted(kind, stage, c, devices)
    causes = traffic_by_cause(program)
    transfers = communication(program, devices)
    ideal = 2 * w.ideal * (devices - 1) / devices
    weights = sum(t.bytes for t in transfers if not t.what.startswith("all-reduce"))
    return Result(
        kind=kind,
        stage=stage,
        wanted=w,
        compile_s=compile_s,
        temporaries=memory.temp_size_in_bytes / 1e9,
        arguments=memory.argument_size_in_bytes / 1e9,
        program=program,
        causes=causes,
        traffic=sum(n for n, *_ in causes.values()) / 1e9,
        transfers=transfers,
        ratio=weights / ideal if ideal else 0.0,
        parts=step_ms(program, transfers),
    )


# ---- Report --------------------------------------------------------------------------------------
def table(*rows: Iterable) -> str:
    """Markdown; the first row is the head, words are aligned left, numbers right."""
    columns = []
    for head, *cells in zip(*([str(cell) for cell in row] for row in rows), strict=True):
        width = max(map(len, (head, *cells)))
        words = cells[-1][:1].isalpha()
        rule = ":" + "-" * (width - 1) if words else "-" * (width - 1) + ":"
        columns.append([f"{cell:{'<' if words else '>'}{width}}" for cell in (head, rule, *cells)])
    return "\n".join(f"| {' | '.join(row)} |" for row in zip(*columns, strict=True))


def program_table(results: list[Result]) -> str:
    """A row for each program; those that differ only in stage and seconds share one."""
    head = ("program", "devices", "stages", "compile s", "temporaries GB", "arguments GB",
            "cuDNN calls", "FP8 GEMMs", "GEMMs", "traffic GB", "sent GB", "of ideal")  # fmt: skip
    groups = collections.defaultdict(list)
    for r in results:
        ran = collections.Counter(k.kind for k in kernels(r.program))
        groups[
            r.kind, r.wanted.devices, f"{r.temporaries:.2f}", f"{r.arguments:.2f}",
            ran["attention"], len([*fp8_gemms(r.program)]), ran["gemm"], f"{r.traffic:.1f}",
            f"{sum(t.bytes for t in r.transfers) / 1e9:.3f}", f"{r.ratio:.3f}",
        ].append(r)  # fmt: skip
    return table(head, *(
        (kind, devices, ", ".join(str(r.stage) for r in same),
         f"{max(r.compile_s for r in same):.1f}", *numbers)
        for (kind, devices, *numbers), same in groups.items()
    ))  # fmt: skip


def memory_table(c: train_gpt.Config, exceeded: list[str]) -> str:
    """What one GPU needs in each setting, with all of the state, also where validation does not
    read it; adds to `exceeded` what is not as expected."""
    head = ("GPU", "flags", "state GB", "training GB", "validation GB", "together GB", "fits")
    rows = [head]
    tokens = [stage.tokens if stage.steps else 0 for stage in c.stages]
    largest = tokens.index(max(tokens))
    for GB, flags, enough in SETTINGS:
        small = dataclasses.replace(c, **flags)
        first, second, val = (measure(kind, largest, small, 1) for kind in KINDS)
        training = max(first.temporaries, second.temporaries)
        needs = second.arguments + max(training, val.temporaries)
        words = " ".join(f"--{name} {value}" for name, value in flags.items()) or "none"
        numbers = [f"{n:.1f}" for n in (second.arguments, training, val.temporaries, needs)]
        rows.append((f"{GB} GB", words, *numbers, "yes" if enough else "no"))
        if (needs <= 0.9 * GB) != enough:
            exceeded.append(f"{words}: {needs:.1f} GB of {GB} GB, expected to fit: {enough}")
    return table(*rows)


def traffic_table(r: Result) -> str:
    """Traffic by pass and function."""

    def row(pass_and_function, values):
        """The sums over some causes."""
        n, count, ptx, time = map(sum, zip(*values, strict=True))
        numbers = f"{n / 1e9:.2f}", count, f"{ptx / 1e9:.1f}", f"{1e3 * time:.2f}"
        return *pass_and_function, *numbers

    rows = [row(key, [value]) for key, value in r.causes.items() if value[0] >= 5e6]
    rest = row(("rest", "less each"), [value for value in r.causes.values() if value[0] < 5e6])
    everything = row(("all", "together"), r.causes.values())
    head = "pass", "function", "GB", "kernels", "PTX, 1e9", "ms"
    return table(head, *rows, rest, everything)


def kernel_table(r: Result, most: int = 40) -> str:
    """The kernels generated by XLA that take longest, and what bounds them."""
    others = [kernel for kernel in kernels(r.program) if kernel.kind == "other"]
    times = {kernel.op.name: seconds(r.program, kernel) for kernel in others}
    others.sort(key=lambda kernel: -times[kernel.op.name])
    rows = [("kernel", "pass", "function", "runs", "GB", "PTX an element", "bound by", "ms")]
    for kernel in others[:most]:
        name, runs = kernel.op.name, kernel.times
        n, ptx = traffic(r.program, kernel), issued(r.program, kernel)
        an_element = ptx / max(1, runs * touched(r.program, kernel)[1])
        bound = "instructions" if ptx / ISSUE > n / MEMORY else "bytes"
        numbers = f"{n / 1e9:.2f}", f"{an_element:.0f}", bound, f"{1e3 * times[name]:.2f}"
        rows.append((name, *cause(r.program, kernel), runs, *numbers))
    return table(*rows)


def time_table(results: list[Result]) -> str:
    """Of the steps of each stage on 8 devices, beside upstream's."""
    results = [r for r in results if r.wanted.train and r.wanted.devices == 8]
    rows = [("stage", "step", *PARTS, "ms", "upstream", "ratio")]
    for stage, (low, high) in enumerate(UPSTREAM_MS):
        both = [r for r in results if r.stage == stage]
        mean = sum(sum(r.parts.values()) for r in both) / len(both)
        for r in both:
            numbers = [f"{ms:.1f}" for ms in (*r.parts.values(), sum(r.parts.values()))]
            rows.append((stage, r.kind, *numbers, "", ""))
        ratio = f"{mean / ((low + high) / 2):.2f}"
        rows.append((stage, "mean", *[""] * len(PARTS), f"{mean:.1f}", f"{low} to {high}", ratio))
    return table(*rows)


def transfer_table(r: Result) -> str:
    """Every collective."""
    together = map(sum, list(zip(*r.transfers, strict=True))[2:])
    rows = [("collective", "operands", "sent MB", "transfer ms", "work ms", "exposed ms")]
    for what, arrays, n, *times in (*r.transfers, ("all", "together", *together)):
        rows.append((what, arrays, f"{n / 1e6:.1f}", *(f"{1e3 * t:.3f}" for t in times)))
    return table(*rows)


def assumptions(record_21: float) -> str:
    """The rates, as text."""
    T = 1e12
    return (
        f"**Estimates: no GPU has run this.** Rates: products {BFLOAT16 / T:.0f} Tflop/s in "
        f"bfloat16, {FLOAT32 / T:.0f} in float32, {FP8 / T:.0f} in FP8 ({FP8_MIXED / T:.0f} of two "
        f"formats); memory {MEMORY / T} TB/s; "
        f"{ISSUE / T:.0f}e12 PTX instructions a second; attention {ATTENTION / T:.0f} Tflop/s "
        f"of windows {MORE_KEYS} keys longer; {1e6 * LAUNCH} µs a kernel; links "
        f"{LINKS / 1e9:.0f} GB/s; and what is sent takes {T * STOLEN:.0f} ms a GB from kernels. "
        f"They were fixed on record 21's file, which takes {record_21:.1f} ms by them (108 ± 5 by "
        "another calculation; PyTorch's took 102). "
        "Upstream's are of logs of these shapes; there is none of record 89 as merged. Products "
        "that a GPU has tuned, cuDNN and NCCL may be faster or slower. Others are the kernels that "
        "XLA generates."
    )


def report(results: list[Result], memory: str, record_21: float, timed: bool) -> str:
    """The text of records/gpu/h100_compile.md."""
    main = [r for r in results if r.kind == "second" and r.wanted.devices == 8][-1]
    step = f"a second step on 8 devices, stage {main.stage}"
    busy = "" if timed else " Seconds are of a machine that did other work as well."
    return "\n\n".join((
        "# The record preset, compiled for H100s on a machine without a GPU",
        "Not run. Traffic, sent and ideal bytes, and how they are counted: see the head of "
        "`dev/compile_8xh100.py`. `python dev/compile_8xh100.py --write` renews this file; "
        "`--lowered` tells in seconds whether that is necessary.",
        f"- jax {jax.__version__}, cuDNN {cudnn_version()}\n{source_line()}\n{digest_line()}",
        "## Milliseconds of a step, estimated",
        "Every second step updates all parameters, the first of two only the matrices.",
        assumptions(record_21),
        time_table(results),
        "## Programs",
        "On two CPU cores." + busy,
        program_table(results),
        "## Memory of one GPU, without the workspaces of cuDNN and cuBLAS",
        "State is what lives between steps; training and validation are the temporaries of their "
        "programs, in the stage of the longest sequences. What fits is in nine tenths of the "
        "memory; JAX takes three quarters unless `XLA_CLIENT_MEM_FRACTION=0.92` is set.",
        memory, f"## Non-GEMM traffic of {step}, by cause", traffic_table(main),
        f"## The longest kernels generated by XLA in {step}", kernel_table(main),
        f"## Communication of {step}, in the order of its end",
        "By the same rates, one collective at a time. Work is what is scheduled between start and "
        f"done. {exposed(main.transfers):.2f} ms are exposed.",
        transfer_table(main),
    )) + "\n"  # fmt: skip


def compile_everything(timed: bool) -> tuple[str, list[str]]:
    """The report, and what is wrong."""
    # Without tuning, or variants compile that nobody times.
    dump = f"--xla_dump_to={DUMP} --xla_dump_emitter_re=ptx"
    os.environ["XLA_FLAGS"] = f"--xla_gpu_autotune_level=0 {dump}"
    answer_for_hopper()
    train_gpt.prefix_table = any_prefixes
    c = record_config("cudnn")
    steps = range(c.total_steps)
    programs = [(KINDS[step % 2], c.stage_at(step)) for step in steps]
    programs += [("val", c.stage_at(s)) for s in (*steps, len(steps)) if c.validates_before(s)]
    results, wrong = [], []
    record_21 = record_21_ms()
    print(f"record 21 by these rates: {record_21:.1f} ms", flush=True)
    if not RECORD_21_MS[0] <= record_21 <= RECORD_21_MS[1]:
        wrong.append(f"record 21 takes {record_21:.1f} ms by these rates, not {RECORD_21_MS}")
    for devices in (8, 1):
        for kind, stage in dict.fromkeys(programs):
            result = measure(kind, stage, c, devices)
            results.append(result)
            found = list(faults(result, timed))
            name = f"{devices} x H100, {kind}, stage {stage}"
            print(f"{name}: {result.compile_s:.1f} s", *found, sep="\n  FAIL ", flush=True)
            wrong += found
    text = report(results, memory_table(c, wrong), record_21, timed)
    shutil.rmtree(DUMP, ignore_errors=True)
    return text, wrong


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
    text, wrong = compile_everything(not arguments.untimed)
    print("", text, *wrong or ["every check passed"], sep="\n")
    if arguments.write and not wrong:
        RECORD.write_text(text, encoding="utf-8")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
