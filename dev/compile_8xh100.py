"""Compile the record for 8 and for 1 H100 without a GPU, and check what the compiler made of it.

Run     python dev/compile_8xh100.py [--all] [--write | --untimed], by hand, on an idle machine,
        in an environment with jax[cuda12] or jax[cuda13]; neither driver nor GPU is needed
--all   every window of the schedule, not only training with the first, middle and last one and
        validation with the last
--write the tables to records/h100_compile.md, if every check passed
--untimed judges no compile seconds, for tests on a busy machine
Told    kernels, collectives, their order, memory. Not told: speed, results; GEMMs are not tuned,
        and cuDNN's plans are built on a real GPU only
Traffic is what kernels other than GEMMs, attention and collectives read and write, caches left out
        of account: of an operand, what the results need of it (a slice, the gathered rows); of an
        update in place, the update. XLA names one function of train_gpt.py for a whole kernel;
        that is the cause. The head computes its gradients in its forward pass.
Sent    by one of n devices, in a ring: (n - 1) / n of an array that is gathered or scattered.
        Ideal: that of all parameters in 2 bytes each, for training twice. More than that is
        padding: of the tables to 128 rows, of the banks to groups of 8 matrices
"""

import argparse
import collections
import dataclasses
import hashlib
import importlib.metadata
import importlib.util
import math
import os
import re
import sys
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

os.environ["JAX_PLATFORMS"] = "cpu"  # also keeps the plugin from looking for a driver
ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import jax  # noqa: E402
import numpy as np  # noqa: E402
from jax.experimental import topologies  # noqa: E402
from jax.sharding import AxisType, Mesh, PartitionSpec  # noqa: E402

import train_gpt  # noqa: E402

RECORD = ROOT / "records/h100_compile.md"
TARGET = Path(__file__).with_name("h100.txtpb")
COMMAND = "python dev/compile_8xh100.py --write"
MISSING = "no CUDA plugin for JAX here: install jax[cuda12] or jax[cuda13]; a GPU is not needed"

MAX_COMPILE_S = 12
MAX_TEMPORARIES_GB = 24
TARGET_TRAFFIC_GB = 60  # missed: told, not checked
MAX_TRAFFIC_GB = 80.5  # of a training step on 8 devices; what was reached, lest it grow again
MAX_SENT = 1.05  # times the ideal
MAX_ALL_REDUCE = 64 * 1024  # bytes: scalars, never a weight
MAX_EMBED_EXPOSED_MS = 0.05  # of the gather of the token table, before which no layer can start

BF16 = dict(head_forward="bfloat16", head_backward="bfloat16")
SETTINGS = (  # gigabytes of one GPU's memory, and the flags for it; GPUs without FP8 set BF16
    (80, {}), (40, {}), (40, BF16), (24, dict(T=24576, sequences=16)),
    (16, dict(T=12288, sequences=32, head_chunk=4096)),
)  # fmt: skip

GEMM_FLOPS, MEMORY, LINKS = 600e12, 2.6e12, 350e9  # assumed of an H100; FP8 GEMMs twice as fast
ASSUMED = (
    "Estimates, not measurements, of an assumed H100: GEMMs and attention at 600 Tflop/s (FP8 "
    "twice), other kernels at 2.6 TB/s, links at 350 GB/s, one collective at a time."
)


# ---- HLO -----------------------------------------------------------------------------------------
BYTES = dict(pred=1, s8=1, u8=1, s16=2, u16=2, bf16=2, f16=2, s32=4, u32=4, f32=4, s64=8, u64=8,
             f64=8, f8e4m3fn=1, f8e5m2=1)  # fmt: skip
COLLECTIVES = ("all-gather", "reduce-scatter", "all-reduce", "all-to-all", "collective-permute",
               "collective-broadcast", "ragged-all-to-all")  # fmt: skip
FREE = ("parameter", "tuple", "get-tuple-element", "bitcast", "constant", "after-all",
        "opt-barrier", "partition-id", "replica-id")  # fmt: skip
INSTRUCTION = re.compile(r"\s+(ROOT )?%?([\w.\-]+) = (.*?) ([\w\-]+)\((.*)")
Shape = tuple[str, tuple[int, ...]]


class Op(NamedTuple):
    """An instruction; a tuple's shapes are flat, rest is what follows the arguments."""

    name: str
    kind: str
    shapes: list[Shape]
    args: list[str]
    rest: str
    root: bool = False

    def called(self) -> str | None:
        found = re.search(r"(?:calls|body|to_apply)=%?([\w.\-]+)", self.rest)
        return found and found[1]


class Program(NamedTuple):
    scheduled: bool
    entry: str
    bodies: dict[str, dict[str, Op]]  # computations: their instructions in order, by name
    frames: dict[int, list[str]]  # stack frame -> functions of train_gpt.py, innermost first


class Kernel(NamedTuple):
    kind: str  # gemm, attention, collective, done or other
    op: Op
    body: dict[str, Op]  # the computation that it stands in
    times: int


def elements(op: Op) -> int:
    return sum(math.prod(dims) for _, dims in op.shapes)


def size(op: Op) -> int:
    return sum(math.prod(dims) * BYTES.get(dtype, 0) for dtype, dims in op.shapes)


def read_shapes(text: str) -> list[Shape]:
    found = re.findall(r"\b([a-z]\w*)\[([\d,]*)\]", text)
    return [(dtype, tuple(int(n) for n in dims.split(",") if n)) for dtype, dims in found]


def parse(text: str) -> Program:
    bodies, entry, body = {}, "", None
    for line in text.splitlines():
        if head := re.match(r"(ENTRY )?%?([\w.\-]+) \(.*\) -> .*\{$", line):
            body = bodies[head[2]] = {}
            entry = head[2] if head[1] else entry
        elif line.startswith("}"):
            body = None
        elif body is not None and (m := INSTRUCTION.match(re.sub(r"/\*.*?\*/", "", line))):
            root, name, shape, kind, rest = m.groups()
            depth, end = 1, 0
            while depth:
                depth += {"(": 1, ")": -1}.get(rest[end], 0)
                end += 1
            args = re.findall(r"%([\w.\-]+)", rest[:end])
            body[name] = Op(name, kind, read_shapes(shape), args, rest[end:], bool(root))
    return Program("is_scheduled=true" in text.split("\n", 1)[0], entry, bodies, frames(text))


def frames(text: str) -> dict[int, list[str]]:
    """The tables above the computations; a parent is written plus one, so that 1 means none."""
    tables, table = collections.defaultdict(dict), {}
    for line in text.splitlines():
        if re.fullmatch("FileNames|FunctionNames|FileLocations|StackFrames", line):
            table = tables[line]
        elif row := re.match(r"(\d+) (.*)", line):
            table[int(row[1])] = row[2]
        elif re.match("(ENTRY )?%", line):
            break
    chains = {}
    for i, text in sorted(tables["StackFrames"].items()):
        frame = {key: int(n) for key, n in re.findall(r"(\w+)=(\d+)", text)}
        place = tables["FileLocations"][frame["file_location_id"]]
        place = {key: int(n) for key, n in re.findall(r"(\w+)=(\d+)", place)}
        ours = "train_gpt.py" in tables["FileNames"][place["file_name_id"]]
        function = tables["FunctionNames"][place["function_name_id"]].strip('"')
        chain = [function.split(".<locals>")[0]] if ours else []
        chains[i] = chain + chains.get(frame.get("parent_frame_id", 1) - 1, [])
    return chains


def collective(program: Program, op: Op) -> str | None:
    """Which one an instruction is, or starts."""
    if op.kind == "async-start":
        inner = (collective(program, o) for o in program.bodies[op.called()].values())
        return next(filter(None, inner), None)
    kind = op.kind.removesuffix("-start")
    return kind if kind in COLLECTIVES else None


def inside(program: Program, op: Op, body: dict[str, Op]) -> list[tuple[Op, dict[str, Op]]]:
    """The instructions of a kernel, and what they stand in: those of a fusion, or itself."""
    if op.kind not in ("fusion", "fusion-start"):
        return [(op, body)]
    fused = program.bodies[op.called()]
    return [pair for o in fused.values() for pair in inside(program, o, fused)]


def is_gemm(op: Op) -> bool:
    return op.kind == "dot" or op.kind == "custom-call" and '"__cublas' in op.rest


def is_attention(op: Op) -> bool:
    return op.kind == "custom-call" and '"__cudnn$fmha' in op.rest


def trips(op: Op) -> int | None:
    found = re.search(r'"known_trip_count":\{"n":"(\d+)"', op.rest)
    return found and int(found[1])


def kernels(program: Program, body: str = "", times: int = 1) -> Iterator[Kernel]:
    """What the scheduled program runs, in order; what a loop runs comes once, with a count."""
    ops = program.bodies[body or program.entry]
    for op in ops.values():
        if collective(program, op):
            yield Kernel("collective", op, ops, times)
        elif op.kind in ("while", "call", "async-start"):
            yield from kernels(program, op.called(), times * (trips(op) or 1))
        elif op.kind.endswith("-done"):
            yield Kernel("done", op, ops, times)
        elif op.kind not in FREE:
            parts = [o for o, _ in inside(program, op, ops)]
            gemm, attention = any(map(is_gemm, parts)), any(map(is_attention, parts))
            kind = "gemm" if gemm else "attention" if attention else "other"
            yield Kernel(kind, op, ops, times)


# ---- Traffic -------------------------------------------------------------------------------------
def under(op: Op, body: dict[str, Op]) -> Op:
    while op.kind == "bitcast":
        op = body[op.args[0]]
    return op


def needed(op: Op, i: int, body: dict[str, Op], n: float, in_place: bool) -> float:
    """Elements of argument i that n elements of a result take; n of as many where they pair off."""
    arg = elements(body[op.args[i]])
    if op.kind in ("dynamic-update-slice", "scatter") and i == 0:
        update = elements(body[op.args[1]]) if op.kind == "dynamic-update-slice" else 0
        return 0 if in_place else max(0, n - update)
    if op.kind in ("slice", "dynamic-slice", "gather") and i == 0:
        return n
    if op.kind in ("dynamic-update-slice", "dynamic-slice") and i > 0:
        return arg
    return arg * n / max(1, elements(op))


def moved(body: dict[str, Op]) -> int:
    """Bytes that a kernel reads and writes; body is its computation, one root in it."""
    need, written = dict.fromkeys(body, 0.0), 0
    root = next(op for op in body.values() if op.root)
    outputs = [body[name] for name in root.args] if root.kind == "tuple" else [root]
    in_place = set()
    for output in outputs:
        need[output.name] += elements(output)
        source = under(output, body)
        if source.kind in ("dynamic-update-slice", "scatter"):
            if under(body[source.args[0]], body).kind == "parameter":
                in_place.add(source.name)
                update = elements(body[source.args[-1 if source.kind == "scatter" else 1]])
                each = BYTES[source.shapes[0][0]] * (2 if source.kind == "scatter" else 1)
                written += update * each  # a scatter adds: it reads what it writes
                continue
        if source.kind == "custom-call" and len(source.shapes) > 1:  # scratch memory comes last
            source = source._replace(shapes=[s for s in source.shapes if s[0] not in ("s8", "u8")])
        written += size(source) if source.kind != "parameter" else 0
    for op in reversed([op for op in body.values() if op.kind != "tuple"]):
        n = min(need[op.name], elements(op))
        for i, name in enumerate(op.args):
            need[name] += needed(op, i, body, n, op.name in in_place)
    read = 0
    for op in body.values():
        if op.kind == "parameter" and elements(op):
            read += size(op) * min(1, need[op.name] / elements(op))
    return round(read + written)


def traffic(program: Program, kernel: Kernel) -> int:
    op = kernel.op
    if op.kind in ("fusion", "fusion-start"):
        return kernel.times * moved(program.bodies[op.called()])
    args = {name: kernel.body[name]._replace(kind="parameter", args=[]) for name in op.args}
    if op.kind.endswith("-start"):  # of a copy: (result, operand, context)
        op = op._replace(kind=op.kind.removesuffix("-start"), shapes=op.shapes[:1])
    return kernel.times * moved({**args, op.name: op._replace(root=True)})


def cause(program: Program, kernel: Kernel) -> tuple[str, str]:
    """Of a kernel: forward, backward or update, and the innermost function of train_gpt.py."""
    parts = [op for op, _ in inside(program, kernel.op, kernel.body)]
    for op in (kernel.op, *parts[::-1]):
        if frame := re.search(r"stack_frame_id=(\d+)", op.rest):
            chain = program.frames.get(int(frame[1]), [])
            if not {*chain} - {"compile_stage", "<module>"}:
                continue
            name = re.search(r'op_name="([^"]*)"', op.rest)
            name = name[1] if name else ""
            forward = "jvp(" in name or {"loss_fn", "gather", "val_step"} & {*chain}
            phase = "backward" if "transpose(" in name else "forward" if forward else "update"
            return phase, chain[0]
    return "any", "not named"


def traffic_by_cause(program: Program) -> dict[tuple[str, str], tuple[int, int]]:
    """(phase, function) -> bytes and kernels, most bytes first."""
    total = collections.defaultdict(lambda: (0, 0))
    for kernel in kernels(program):
        if kernel.kind == "other":
            key = cause(program, kernel)
            n, count = total[key]
            total[key] = n + traffic(program, kernel), count + kernel.times
    return dict(sorted(total.items(), key=lambda item: -item[1][0]))


# ---- Time ----------------------------------------------------------------------------------------
def gemm_flops(op: Op, body: dict[str, Op]) -> int:
    left = body[op.args[0]].shapes[0][1]
    written = r'"lhs_contracting_dimensions":\[([^\]]*)\]|lhs_contracting_dims=\{([^}]*)\}'
    found = re.search(written, op.rest)
    axes = re.findall(r"\d+", found[1] or found[2])
    return 2 * math.prod(op.shapes[0][1]) * math.prod(left[int(axis)] for axis in axes)


def attention_flops(op: Op, body: dict[str, Op]) -> int:
    """Two products forward, five backward, of each query with the keys in its window."""
    B, T, H, K = body[op.args[0]].shapes[0][1]
    window = int(re.search(r'"sliding_window_length": ?(\d+)', op.rest)[1]) or T
    return (10 if "Backward" in op.rest else 4) * B * H * T * K * min(window, T)


def seconds(program: Program, kernel: Kernel) -> float:
    """Estimate of a kernel that is no collective."""
    if kernel.kind == "other":
        return traffic(program, kernel) / MEMORY
    total = 0.0
    for op, body in inside(program, kernel.op, kernel.body):
        if is_gemm(op):
            twice = 2 if body[op.args[0]].shapes[0][0].startswith("f8") else 1
            total += gemm_flops(op, body) / GEMM_FLOPS / twice
        elif is_attention(op):
            total += attention_flops(op, body) / GEMM_FLOPS
    return kernel.times * total


def sent(program: Program, kernel: Kernel, devices: int) -> int:
    """Bytes that a device sends in a collective; its operand is a share or the whole."""
    operand = sum(size(kernel.body[name]) for name in kernel.op.args)
    kind = collective(program, kernel.op)
    shares = dict(zip(("all-gather", "all-reduce"), (devices, 2), strict=True)).get(kind, 1)
    return kernel.times * operand * shares * (devices - 1) // devices


class Transfer(NamedTuple):
    what: str  # collective and parameters
    arrays: str
    bytes: int
    transfer: float  # seconds
    hidden: float  # work scheduled between start and done
    exposed: float


def communication(program: Program, devices: int) -> list[Transfer]:
    """Walk the schedule: kernels on one clock, collectives, one at a time, on another."""
    now, free, waiting, out = 0.0, 0.0, {}, []
    for kernel in kernels(program):
        op = kernel.op
        if kernel.kind == "collective":
            n = sent(program, kernel, devices)
            free = max(now, free) + n / LINKS
            waiting[op.name] = kernel, n, now, free
            if not op.kind.endswith("-start"):  # nothing runs beside it
                out.append(Transfer(*named(program, kernel), n, n / LINKS, 0.0, free - now))
                now = free
        elif kernel.kind == "done" and op.args and op.args[0] in waiting:
            kernel, n, started, ends = waiting.pop(op.args[0])
            hidden, exposed = now - started, max(0.0, ends - now)
            out.append(Transfer(*named(program, kernel), n, n / LINKS, hidden, exposed))
            now = max(now, ends)
        elif kernel.kind != "done":
            now += seconds(program, kernel)
    return out


def named(program: Program, kernel: Kernel) -> tuple[str, str]:
    """Of a collective: itself and its parameters, and its operands; an all-reduce has many."""
    op, body, names = kernel.op, kernel.body, []
    if collective(program, op) == "all-gather":
        names = [source(body, name) for name in op.args]
    elif collective(program, op) != "all-reduce":
        done = next((o.name for o in body.values() if op.name in o.args), op.name)
        parts = [o for o in body.values() if o.kind == "get-tuple-element" and done in o.args]
        names = [taker(body, part.name) for part in parts] or [taker(body, done)]
    count = collections.Counter(names)
    what = " ".join(name if n == 1 else f"{n} {name}" for name, n in sorted(count.items()))
    shapes = [body[name].shapes[0] for name in op.args]
    arrays = collections.Counter(f"{dtype}[{','.join(map(str, dims))}]" for dtype, dims in shapes)
    arrays = " ".join(text if n == 1 else f"{n} x {text}" for text, n in arrays.items())
    return f"{collective(program, op)} {what}".strip(), arrays


def parameter(op: Op) -> str | None:
    """The name in the table: op_name="state.params[\\'embed\\']" and the like."""
    found = re.findall(r"\[\\?'(\w+)\\?'\]", op.rest) if op.kind == "parameter" else None
    return found[-1] if found else None


def source(body: dict[str, Op], name: str) -> str:
    """The parameter that a value is made of."""
    queue, seen = [name], set()
    for name in queue:
        if found := parameter(body[name]):
            return found
        queue += [arg for arg in body[name].args if arg not in seen]
        seen |= {*body[name].args}
    return "?"


def taker(body: dict[str, Op], name: str) -> str:
    """The parameter that the first kernel to use one together with a value uses."""
    queue, seen = [name], {name}
    for name in queue:
        for op in body.values():
            if name in op.args and op.name not in seen:
                if found := next(filter(None, (parameter(body[arg]) for arg in op.args)), None):
                    return found
                queue.append(op.name)
                seen.add(op.name)
    return "?"


# ---- Checks --------------------------------------------------------------------------------------
def check_resources(compile_s: float, temporaries: int) -> Iterator[str]:
    if compile_s > MAX_COMPILE_S:
        yield f"compiled in {compile_s:.1f} s, limit {MAX_COMPILE_S} s; is the machine idle?"
    if temporaries > MAX_TEMPORARIES_GB * 1e9:
        yield f"temporaries of {temporaries / 1e9:.1f} GB, limit {MAX_TEMPORARIES_GB} GB"


def check_form(program: Program) -> Iterator[str]:
    if not program.scheduled:
        yield "the HLO is not scheduled: its order says nothing"
    for body in program.bodies.values():
        for op in body.values():
            if op.kind == "while" and trips(op) is None:
                yield f"{op.name} is a loop without a known trip count: its bytes count once"


def check_attention(program: Program, train: bool, layers: int, turns: int) -> Iterator[str]:
    """cuDNN once per attention layer and turn, and as often backward."""
    for target, wanted in ("fmhaSoftmax", layers), ("fmhaSoftmaxBackward", layers * train):
        ran = [k for k in kernels(program) if f'"__cudnn${target}"' in k.op.rest]
        runs = sum(k.times for k in ran)
        if (len(ran), runs) != (wanted, wanted * turns):
            yield (
                f"{len(ran)} calls of cuDNN {target} that run {runs} times, not {wanted} that run "
                f"{wanted * turns} times"
            )


def only_moves(program: Program, op: Op) -> bool:
    """A copy or a transpose, or a fusion that is nothing else."""
    if op.kind in ("copy", "transpose", "copy-start"):
        return True
    if op.kind not in ("fusion", "fusion-start"):
        return False
    kinds = {o.kind for o in program.bodies[op.called()].values()}
    moves = {"copy", "transpose"}
    return bool(kinds & moves) and kinds <= moves | {"parameter", "bitcast", "reshape", "tuple"}


def check_layout(program: Program, least: int) -> Iterator[str]:
    """No copy of `least` or more elements just before or after cuDNN."""
    views = ("bitcast", "get-tuple-element", "copy-done", "fusion-done", "opt-barrier")
    for body in program.bodies.values():
        users = collections.defaultdict(list)
        for op in body.values():
            for arg in op.args:
                users[arg].append(op)
        for call in filter(is_attention, body.values()):
            for beside in {op.name: [body[arg] for arg in op.args] for op in body.values()}, users:
                queue = [*beside[call.name]]
                for op in queue:
                    if only_moves(program, op) and elements(op) >= least:
                        yield f"{op.name} changes only the layout, beside {call.name}"
                    queue += beside[op.name] if op.kind in views else []


def fp8_gemms(program: Program) -> Iterator[tuple[list[str], Op, int]]:
    """Formats of both operands, the product, how often it runs; by cuBLAS or by Triton."""
    for kernel in kernels(program):
        for op, body in inside(program, kernel.op, kernel.body):
            types = sorted(body[arg].shapes[0][0] for arg in op.args[:2]) if is_gemm(op) else []
            if any(dtype.startswith("f8") for dtype in types):
                yield types, op, kernel.times


def check_head(program: Program, train: bool, c: train_gpt.Config, devices: int) -> Iterator[str]:
    """The three FP8 products of each chunk in training, none in validation."""
    V, D, N = train_gpt.table(c)["head"].shape[0], c.D, c.head_chunk
    e4, e5 = "f8e4m3fn", "f8e5m2"
    wanted = {(e4, e4, *sorted((N, V))): "forward", (e4, e5, *sorted((N, D))): "dx",
              (e4, e5, *sorted((V, D))): "dw"}  # fmt: skip
    chunks, runs = c.sequences * c.T // devices // N, collections.Counter()
    for types, op, times in fp8_gemms(program):
        runs[(*types, *sorted(n for n in op.shapes[0][1] if n > 1))] += times
    for key, name in wanted.items():
        if train and runs[key] != chunks:
            yield f"the head's {name} runs {runs[key]} times as an FP8 GEMM, not {chunks}"
    for key in runs.keys() - (wanted.keys() if train else ()):
        yield f"a GEMM in FP8 that should not be: {key}"


def check_collectives(program: Program, train: bool, c: train_gpt.Config) -> Iterator[str]:
    """Weights gathered in the background, gradients reduce-scattered, nothing else of size."""
    done = collections.Counter()
    for op, body in ((k.op, k.body) for k in kernels(program) if k.kind == "collective"):
        kind, args = collective(program, op), [body[name] for name in op.args]
        done[kind] += sum(map(elements, args))
        if kind == "all-gather" and (not op.kind.endswith("-start") or '"is_sync":true' in op.rest):
            yield f"{op.name} is a synchronous all-gather"
        if kind == "all-reduce" and (n := sum(map(size, args))) > MAX_ALL_REDUCE:
            yield f"{op.name} all-reduces {n} bytes, limit {MAX_ALL_REDUCE}"
        if kind not in ("all-gather", "all-reduce", "reduce-scatter"):
            yield f"{op.name} is {kind}: nothing here needs one"
    rows = train_gpt.table(c).values()
    whole = sum(math.prod(row.shape) for row in rows if row.spec != PartitionSpec())
    if done["all-gather"] * train_gpt.SHARES != whole:
        yield f"{done['all-gather']} elements of a device's are gathered, not {whole} / 8"
    if done["reduce-scatter"] != whole * train:
        yield f"{done['reduce-scatter']} elements are reduce-scattered, not {whole * train}"


def check_sent(ratio: float) -> Iterator[str]:
    if ratio > MAX_SENT:
        yield f"sends {ratio:.3f} times what the parameters take, limit {MAX_SENT}"


def check_exposed(transfers: Iterable[Transfer]) -> Iterator[str]:
    ms = [1e3 * t.exposed for t in transfers if re.match("all-gather.* embed", t.what)]
    if len(ms) != 1:
        yield f"{len(ms)} gathers of the token table, not 1"
    elif ms[0] > MAX_EMBED_EXPOSED_MS:
        limit = MAX_EMBED_EXPOSED_MS
        yield f"{ms[0]:.2f} ms of the token table's gather are exposed (estimate), limit {limit}"


def check_traffic(n: int) -> Iterator[str]:
    if n > MAX_TRAFFIC_GB * 1e9:
        yield f"{n / 1e9:.1f} GB of non-GEMM traffic, limit {MAX_TRAFFIC_GB} GB"


# ---- Compiling -----------------------------------------------------------------------------------
def plugin() -> str | None:
    """cuda12 or cuda13, where JAX's plugin of that name is installed."""
    if importlib.util.find_spec("jax_plugins") is None:
        return None
    names = ("cuda12", "cuda13")
    return next((n for n in names if importlib.util.find_spec(f"jax_plugins.xla_{n}")), None)


def cudnn_version() -> str:
    return importlib.metadata.version(f"nvidia-cudnn-{plugin().replace('cuda', 'cu')}")


def answer_for_hopper() -> None:
    """JAX asks the machine for its chip and its cuDNN; here is no chip to ask."""
    from jax._src.cudnn import fused_attention_stablehlo as fused

    major, minor, patch, *_ = map(int, cudnn_version().split("."))
    answers = dict(
        check_cudnn_version=lambda: 10000 * major + 100 * minor + patch,
        check_compute_capability=lambda least: tuple(map(int, least.split("."))) <= (9, 0),
        is_cuda_compute_capability_equal=lambda version: version == "9.0",
    )
    for name, answer in answers.items():
        if hasattr(fused, name):
            setattr(fused, name, answer)


def make_mesh(devices: int) -> Mesh:
    topology = topologies.get_topology_desc(
        "h100", platform="cuda", target_config=TARGET.read_text(), topology=f"1x1x{devices}"
    )
    return Mesh(np.array(topology.devices), ("fsdp",), axis_types=(AxisType.Auto,))


@dataclasses.dataclass
class Result:
    """What one program turned out to be."""

    devices: int
    kind: str
    window: int
    compile_s: float
    temporaries: int
    arguments: int
    program: Program
    causes: dict
    transfers: list[Transfer]
    ratio: float  # of what is sent to the ideal
    faults: list[str] = dataclasses.field(default_factory=list)

    @property
    def traffic(self) -> int:
        return sum(n for n, _ in self.causes.values())


def measure(kind: str, window: int, c: train_gpt.Config, devices: int) -> Result:
    mesh, began = make_mesh(devices), time.perf_counter()
    compiled = train_gpt.compile_stage(kind, window, c, mesh)
    compile_s, memory = time.perf_counter() - began, compiled.memory_analysis()
    program = parse(compiled.as_text())
    transfers = communication(program, devices)
    weights = sum(math.prod(row.real) for row in train_gpt.table(c).values())
    ideal = (2 if kind == "train" else 1) * weights * 2 * (devices - 1) / devices
    total = sum(t.bytes for t in transfers if not t.what.startswith("all-reduce"))
    return Result(
        devices, kind, window, compile_s, memory.temp_size_in_bytes, memory.argument_size_in_bytes,
        program, traffic_by_cause(program), transfers, total / ideal if ideal else 0.0,
    )  # fmt: skip


def faults(r: Result, c: train_gpt.Config) -> Iterator[str]:
    train, (rows, T) = r.kind == "train", c.batch(r.kind)
    layers = len(c.layers) - c.plan.count("-")
    at_once = train_gpt.at_once(
        c.in_flight if train else max(1, c.in_flight * c.T // T), rows // r.devices
    )
    yield from check_resources(r.compile_s, r.temporaries)
    yield from check_form(r.program)
    yield from check_attention(r.program, train, layers, rows // r.devices // at_once)
    yield from check_layout(r.program, at_once * T * c.D)
    yield from check_head(r.program, train, c, r.devices)
    if r.devices > 1:
        yield from check_collectives(r.program, train, c)
        yield from check_sent(r.ratio)
    if r.devices > 1 and train:
        yield from check_exposed(r.transfers)
        yield from check_traffic(r.traffic)


def stages(c: train_gpt.Config, every: bool) -> list[tuple[str, int]]:
    train = [*dict.fromkeys(c.window_at(s) for s in range(c.steps))]
    val = [*dict.fromkeys(c.window_at(s) for s in range(c.steps + 1) if c.validates(s))]
    if not every:
        train, val = [train[0], train[len(train) // 2], train[-1]], val[-1:]
    return [("train", w) for w in dict.fromkeys(train)] + [("val", w) for w in val]


# ---- Report --------------------------------------------------------------------------------------
def table(*rows: Iterable) -> str:
    """Markdown; the first row is the head, and words stand left, numbers right."""
    rows = [[str(cell) for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    left = [column[-1][:1].isalpha() for column in zip(*rows, strict=True)]
    rule = [":" + "-" * (n - 1) if is_left else "-" * (n - 1) + ":"
            for n, is_left in zip(widths, left, strict=True)]  # fmt: skip
    pad = [[cell.ljust(n) if is_left else cell.rjust(n)
            for cell, n, is_left in zip(row, widths, left, strict=True)]
           for row in (rows[0], rule, *rows[1:])]  # fmt: skip
    return "\n".join(f"| {' | '.join(row)} |" for row in pad)


def program_table(results: list[Result]) -> str:
    """A row per program; those that differ in window and seconds only share one."""
    head = ("program", "devices", "windows", "compile s", "temporaries GB", "arguments GB",
            "cuDNN calls", "FP8 GEMMs", "GEMMs", "traffic GB", "sent GB", "of ideal")  # fmt: skip
    groups = collections.defaultdict(list)
    for r in results:
        ran = collections.Counter(k.kind for k in kernels(r.program))
        groups[
            r.kind, r.devices, f"{r.temporaries / 1e9:.2f}", f"{r.arguments / 1e9:.2f}",
            ran["attention"], len([*fp8_gemms(r.program)]), ran["gemm"],
            f"{r.traffic / 1e9:.1f}", f"{sum(t.bytes for t in r.transfers) / 1e9:.3f}",
            f"{r.ratio:.3f}",
        ].append(r)  # fmt: skip
    rows = []
    for (kind, devices, *numbers), same in groups.items():
        windows = ", ".join(str(r.window) for r in same)
        windows = windows if len(same) < 4 else f"{same[0].window} to {same[-1].window}"
        longest = max(r.compile_s for r in same)
        rows.append((kind, devices, windows, f"{longest:.1f}", *numbers))
    return table(head, *rows)


def memory_table(c: train_gpt.Config) -> tuple[str, list[str]]:
    """What one GPU needs to train with the last window, in each setting; and what exceeds it."""
    rows, exceeded = [], []
    for GB, flags in SETTINGS:
        one = dataclasses.replace(c, **flags)
        program = train_gpt.compile_stage("train", c.window_at(c.steps), one, make_mesh(1))
        memory = program.memory_analysis()
        needed = (memory.argument_size_in_bytes + memory.temp_size_in_bytes) / 1e9
        told = " ".join(f"--{name} {value}" for name, value in flags.items()) or "none"
        rows.append((f"{GB} GB", told, f"{needed:.1f}"))
        if needed > 0.9 * GB:
            exceeded.append(f"{told}: {needed:.1f} GB do not fit {GB} GB")
    return table(("GPU", "flags", "arguments and temporaries, GB"), *rows), exceeded


def traffic_table(r: Result) -> str:
    rows = [(*key, f"{n / 1e9:.2f}", count) for key, (n, count) in r.causes.items() if n >= 5e6]
    rest = [value for value in r.causes.values() if value[0] < 5e6]
    total = sum(count for _, count in r.causes.values())
    rest = ("rest", "less each", f"{sum(n for n, _ in rest) / 1e9:.2f}", sum(n for _, n in rest))
    everything = ("all", "together", f"{r.traffic / 1e9:.2f}", total)
    return table(("pass", "function", "GB", "kernels"), *rows, rest, everything)


def transfer_table(r: Result) -> str:
    def row(what, arrays, n, *times):
        return what, arrays, f"{n / 1e6:.1f}", *(f"{1e3 * t:.3f}" for t in times)

    columns = list(zip(*r.transfers, strict=True))
    head = ("collective", "operands", "sent MB", "transfer ms", "work ms", "exposed ms")
    return table(
        head, *(row(*t) for t in r.transfers), row("all", "together", *map(sum, columns[2:]))
    )


def report(results: list[Result], memory: str) -> str:
    main = [r for r in results if r.kind == "train" and r.devices == 8][-1]
    step = f"a training step on 8 devices, window {main.window}"
    missed = main.traffic > TARGET_TRAFFIC_GB * 1e9
    embed = sum(1e3 * t.exposed for t in main.transfers if re.match("all-gather.* embed", t.what))
    return "\n\n".join((
        "# The record preset, compiled for H100s on a machine without a GPU",
        "Not run. Traffic, sent and ideal bytes, and how they are counted: see the head of "
        f"`dev/compile_8xh100.py`. `{COMMAND}` renews this file.",
        f"- jax {jax.__version__}, cuDNN {cudnn_version()}\n- train_gpt.py sha256 {digest()}",
        "## Programs", program_table(results),
        "## Memory of one GPU, window 1792, without the workspaces of cuDNN and cuBLAS", memory,
        f"## Non-GEMM traffic of {step}, by cause", traffic_table(main),
        f"Target: {TARGET_TRAFFIC_GB} GB. {'Missed' if missed else 'Reached'}.",
        f"## Communication of {step}, in the order of its end",
        f"{ASSUMED} Work is what is scheduled between start and done. Of the token table's gather, "
        f"{embed:.2f} ms are exposed.",
        transfer_table(main),
    )) + "\n"  # fmt: skip


def digest() -> str:
    return hashlib.sha256(train_gpt.SOURCE.encode()).hexdigest()


def main(argv: list[str]) -> int:
    cli = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    cli.add_argument("--all", action="store_true", help="every window of the schedule")
    cli.add_argument("--write", action="store_true", help=f"write {RECORD.relative_to(ROOT)}")
    cli.add_argument("--untimed", action="store_true", help="do not judge seconds")
    arguments = cli.parse_args(argv)
    if plugin() is None:
        print(f"compile_8xh100.py: {MISSING}", file=sys.stderr)
        return 2
    os.environ["XLA_FLAGS"] = "--xla_gpu_autotune_level=0"  # or variants compile that nobody times
    jax.config.update("jax_enable_compilation_cache", False)
    answer_for_hopper()
    print(f"load {os.getloadavg()[0]:.1f}: compile times count on an idle machine only", flush=True)
    c = dataclasses.replace(train_gpt.PRESETS["record"], attention="cudnn", seed=1)
    results = []
    for devices in (8, 1):
        for kind, window in stages(c, arguments.all):
            r = measure(kind, window, c, devices)
            r.faults += faults(dataclasses.replace(r, compile_s=0) if arguments.untimed else r, c)
            results.append(r)
            name = f"{devices} x H100, {kind}, window {window}"
            print(f"{name}: {r.compile_s:.1f} s", *r.faults, sep="\n  FAIL ", flush=True)
    memory, exceeded = memory_table(c)
    print("", text := report(results, memory), *exceeded, sep="\n")
    failed = sum(len(r.faults) for r in results) + len(exceeded)
    print(f"{failed} checks failed, see FAIL above" if failed else "every check passed")
    if arguments.write and not failed:
        RECORD.write_text(text, encoding="utf-8")
        print(f"written to {RECORD.relative_to(ROOT)}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
