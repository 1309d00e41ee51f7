"""Compile the record for 8 and for 1 H100 without a GPU, and check what the compiler made of it.

Run     python dev/compile_8xh100.py [--write | --untimed], by hand, on an idle machine, in an
        environment with jax[cuda12] or jax[cuda13]; neither driver nor GPU is needed
Told    kernels, collectives, their order, memory. Not told: speed, results; GEMMs are not tuned,
        and cuDNN's plans are built on a real GPU only
Traffic is what kernels other than GEMMs, attention and collectives read and write, caches left out
        of account: of an operand, what the results need of it (a slice, the gathered rows); of an
        update in place, the update. XLA names one function of train_gpt.py for a whole kernel;
        that is the cause. The head computes its gradients in its forward pass.
Sent    by one of n devices, in a ring: (n - 1) / n of an array that is gathered or scattered.
        Ideal: that of parameters in 2 bytes each. All gradients are scattered in every training
        step; all weights are gathered for odd ones and in validation, for even ones the banks
        alone: tables change, and are gathered, at the end of odd ones. The rest is padding
"""

import argparse
import collections
import dataclasses
import functools
import hashlib
import io
import math
import os
import re
import sys
import time
import tokenize
from collections.abc import Iterable, Iterator
from importlib.metadata import distributions, version
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
MISSING = "no CUDA plugin for JAX here: install jax[cuda12] or jax[cuda13]; a GPU is not needed"
GEMM_FLOPS, MEMORY, LINKS = 600e12, 2.6e12, 350e9  # assumed of an H100; FP8 GEMMs twice as fast


# ---- What train_gpt.py's programs must be --------------------------------------------------------
def program_code(source: str, record: train_gpt.Config) -> str:
    """What the record's programs are made of: the file up to its command line, without comments,
    docstrings and layout. Left out are the presets and their grammar, for which the record and
    its layers are added, and the first weights, of which programs know only the shapes."""
    source = source.split("# ---- Command line")[0]
    for unseen in r"^PRESETS = .*?^\)\)", r"^PLAN_WORD = .*?$", r"^def initial_state.*?(?=^\S)":
        source, found = re.subn(unseen, "", source, flags=re.M | re.S)
        assert found == 1, unseen
    words, begins = [], True
    for kind, word, *_ in tokenize.generate_tokens(io.StringIO(source).readline):
        if kind not in (tokenize.COMMENT, tokenize.NL) and not (begins and kind == tokenize.STRING):
            words.append({tokenize.INDENT: ">", tokenize.DEDENT: "<"}.get(kind, word))
        begins = kind in (tokenize.INDENT, tokenize.DEDENT, tokenize.NEWLINE) or (
            begins and kind in (tokenize.COMMENT, tokenize.NL)
        )
    return "".join(words) + repr((record, record.layers))


DIGEST = hashlib.sha256(
    program_code(train_gpt.SOURCE, train_gpt.PRESETS["record"]).encode()
).hexdigest()
SETTINGS = (  # gigabytes of one GPU's memory, the flags for it, and whether they are enough
    (80, {}, True), (40, {}, True),
    (40, dict(batch=16, head_forward="bfloat16", head_backward="bfloat16"), True),  # no FP8
    (24, dict(batch=32, head_chunk=4096, val_T=65536), True),
    (16, dict(batch=64, head_chunk=2048, val_T=65536), False),
)  # fmt: skip


class Wanted(NamedTuple):
    """What a program must be, in numbers."""

    train: bool
    devices: int
    attending: int  # layers with attention
    turns: int  # of the loop over a device's sequences
    activation: int  # elements of x in a turn
    head: tuple[int, int, int]  # tokens in a chunk, rows of the table, width
    chunks: int  # of the head
    gathered: int  # elements of weights, with padding
    scattered: int  # elements of gradients, with padding
    reduced: int  # elements of gradients that every device needs whole
    ideal: int  # elements of what is gathered and what is scattered, without padding


def wanted(kind: str, stage: int, c: train_gpt.Config, devices: int) -> Wanted:
    train, params = kind != "val", train_gpt.param_table(c)
    sequences, T = (c.batch, c.rows[stage].T) if train else (train_gpt.GROUP, c.val_T)
    rows = sequences // devices
    at_once = math.gcd((c if train else c.for_validation()).microbatch, rows)
    whole = [p for p in params.values() if p.spec == PartitionSpec()]
    sharded = [p for p in params.values() if p.spec != PartitionSpec()]
    sent = [p for p in sharded if p.optimizer == "muon"] if kind == "even" else sharded
    scattered = sharded * train
    stored = lambda params: sum(math.prod(p.stored_shape) for p in params)
    return Wanted(
        train, devices, len(c.layers) - c.plan.count("-"), rows // at_once, at_once * T * c.D,
        (c.head_chunk, params["head"].stored_shape[0], c.D), rows * T // c.head_chunk,
        stored(sent), stored(scattered), stored(whole) * train,
        sum(math.prod(p.shape) for p in sent + scattered),
    )  # fmt: skip


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
        return sum(math.prod(dims) for _, dims in self.shapes)

    def size(self) -> int:
        return sum(math.prod(dims) * BYTES.get(dtype, 0) for dtype, dims in self.shapes)

    def called(self) -> str:
        return re.search(r"(?:calls|body|to_apply)=%?([\w.\-]+)", self.rest)[1]

    def trips(self) -> int | None:
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
    entry: str
    bodies: dict[str, Body]
    overwritten: dict[int, str]  # number of a result -> the parameter whose memory it takes
    frames: dict[str, list[str]]  # stack frame -> functions of train_gpt.py, innermost first


class Kernel(NamedTuple):
    kind: str  # gemm, attention, collective, done or other
    op: Op
    body: Body  # that it stands in
    times: int


def parse(text: str) -> Program:
    bodies, entry, body, numbers = {}, "", None, {}
    for line in text.splitlines():
        if head := re.match(r"(ENTRY )?%?([\w.\-]+) \(.*\) -> .*\{$", line):
            body = bodies[head[2]] = {}
            entry = head[2] if head[1] else entry
        elif line.startswith("}"):
            body = None
        elif body is not None and (m := INSTRUCTION.match(line)):
            root, name, shape, kind, args, rest = m.groups()
            arrays = re.findall(r"\b([a-z]\w*)\[([\d,]*)\]", shape)
            shapes = [(t, tuple(int(n) for n in dims.split(",") if n)) for t, dims in arrays]
            body[name] = Op(name, kind, shapes, re.findall(r"%([\w.\-]+)", args), rest, bool(root))
            if kind == "parameter":
                numbers[args] = name  # those of the entry stay: it comes last
    aliases = re.findall(r"\{(\d+)\}: \((\d+), ", text.split("\n", 1)[0])
    overwritten = {int(result): numbers[number] for result, number in aliases}
    return Program(entry, bodies, overwritten, frames(text))


def frames(text: str) -> dict[str, list[str]]:
    """The tables above the computations; a parent is written plus one, so that 1 means none."""
    parts = text.split("\n\n")
    tables = {p.split("\n")[0]: dict(re.findall(r"^(\d+) (.*)", p, re.M)) for p in parts}
    chains = {}
    for i, row in tables.get("StackFrames", {}).items():
        place, parent, *_ = *re.findall(r"=(\d+)", row), "1"
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


def traffic(program: Program, kernel: Kernel) -> int:
    """Bytes that a kernel reads and writes."""
    args = {name: kernel.body[name]._replace(kind="parameter", args=[]) for name in kernel.op.args}
    body = {**args, kernel.op.name: kernel.op._replace(root=True)}
    if kernel.op.kind in ("fusion", "fusion-start"):
        body = program.bodies[kernel.op.called()]
    root = next(op for op in body.values() if op.root)
    need, written, in_place = dict.fromkeys(body, 0.0), 0, set()
    for output in root.args if root.kind == "tuple" else [root.name]:
        need[output] += body[output].elements()
        source = under(output, body)
        update, times = {"dynamic-update-slice": (1, 1), "scatter": (2, 2)}.get(source.kind, (0, 0))
        if times and under(source.args[0], body).kind == "parameter":
            in_place.add(source.name)  # a scatter adds: it reads what it writes
            written += times * body[source.args[update]].elements() * BYTES[source.shapes[0][0]]
        elif source.kind != "parameter":
            written += source.size()
    for op in reversed([op for op in body.values() if op.kind != "tuple"]):
        n = min(need[op.name], op.elements())
        for i, name in enumerate(op.args):
            need[name] += needed(op, i, body, n, op.name in in_place)
    read = (op.size() * min(1, need[op.name] / max(1, op.elements()))
            for op in body.values() if op.kind == "parameter")  # fmt: skip
    return kernel.times * round(sum(read) + written)


def cause(program: Program, kernel: Kernel) -> tuple[str, str]:
    """Of a kernel: forward, backward or update, and the innermost function of train_gpt.py."""
    parts = [op for op, _ in inside(program, kernel.op, kernel.body)]
    for op in (kernel.op, *parts[::-1]):
        frame = re.search(r"stack_frame_id=(\d+)", op.rest)
        chain = program.frames.get(frame[1], []) if frame else []
        if {*chain} - {"compile_stage", "<module>"}:
            name = "".join(re.findall(r'op_name="([^"]*)"', op.rest))
            forward = "jvp(" in name or {"loss_fn", "gather", "val_step"} & {*chain}
            phase = "backward" if "transpose(" in name else "forward" if forward else "update"
            return phase, chain[0]
    return "any", "not named"


def traffic_by_cause(program: Program) -> dict[tuple[str, str], tuple[int, int]]:
    """(phase, function) -> bytes and kernels, most bytes first."""
    total = {}
    for kernel in kernels(program):
        if kernel.kind == "other":
            n, count = total.get(key := cause(program, kernel), (0, 0))
            total[key] = n + traffic(program, kernel), count + kernel.times
    return dict(sorted(total.items(), key=lambda item: -item[1][0]))


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
    """Estimate of a kernel that is no collective."""
    if kernel.kind == "other":
        return traffic(program, kernel) / MEMORY
    total = 0.0
    for op, body in inside(program, kernel.op, kernel.body):
        if op.product():
            fp8 = body[op.args[0]].shapes[0][0].startswith("f8")
            total += flops(op, body) / GEMM_FLOPS / (2 if fp8 else 1)
    return kernel.times * total


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
            begun, n, start, end = waiting.pop(ended)
            out.append(
                Transfer(*named(program, begun), n, n / LINKS, now - start, max(0.0, end - now))
            )
            now = max(now, end)
    return out


def named(program: Program, kernel: Kernel) -> tuple[str, str]:
    """Of a collective: itself and its parameters, and its operands; an all-reduce has many."""

    def several(texts: Iterable[str], times: str) -> str:
        count = collections.Counter(texts).items()
        return " ".join(text if n == 1 else f"{n}{times}{text}" for text, n in count)

    op, body, names = kernel.op, kernel.body, []
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
        texts = (body[n].rest for n in near if n and body[n].kind == "parameter")
        if found := {names[-1] for t in texts if (names := re.findall(r"\[\\?'(\w+)\\?'\]", t))}:
            return "/".join(sorted(found))
        passed.add(op.name)
    return "?"


def exposed(transfers: Iterable[Transfer]) -> float:
    """Milliseconds in which nothing else is done."""
    return 1e3 * sum(t.exposed for t in transfers)


# ---- Checks --------------------------------------------------------------------------------------
def check_attention(program: Program, w: Wanted) -> Iterator[str]:
    """cuDNN once per attention layer and turn, and as often backward; no copy beside it."""
    backward = w.attending if w.train else 0
    for target, calls in ("fmhaSoftmax", w.attending), ("fmhaSoftmaxBackward", backward):
        times = [k.times for k in kernels(program) if f'"__cudnn${target}"' in k.op.rest]
        if times != [w.turns] * calls:
            yield f"calls of cuDNN {target} run {times} times, not {calls} of them {w.turns} times"
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
    """The three FP8 products of each chunk in training, none in validation: z, dx and dw."""
    (N, V, D), e4, e5, runs = w.head, "f8e4m3fn", "f8e5m2", collections.Counter()
    products = ((e4, e4, *sorted((N, V))), (e4, e5, *sorted((N, D))), (e4, e5, *sorted((V, D))))
    for types, op, times in fp8_gemms(program):
        runs[(*types, *sorted(n for n in op.shapes[0][1] if n > 1))] += times
    if runs != (expected := dict.fromkeys(products, w.chunks) if w.train else {}):
        yield f"GEMMs in FP8 run {dict(runs)} times, not {expected}"


def check_collectives(program: Program, w: Wanted) -> Iterator[str]:
    """Weights gathered in the background, gradients reduce-scattered, nothing else of size."""
    done = collections.Counter()
    for op, body in ((k.op, k.body) for k in kernels(program) if k.kind == "collective"):
        kind, args = op.collective(), [body[name] for name in op.args]
        done[kind] += sum(arg.elements() for arg in args)
        if kind == "all-gather" and (not op.kind.endswith("-start") or '"is_sync":true' in op.rest):
            yield f"{op.name} is a synchronous all-gather"
        if kind == "all-reduce" and (n := sum(arg.elements() for arg in args)) > w.reduced + 1:
            yield f"{op.name} all-reduces {n} elements: the loss and small gradients are fewer"
        if kind not in ("all-gather", "all-reduce", "reduce-scatter"):
            yield f"{op.name} is {kind}: nothing here needs one"
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
    causes: dict[tuple[str, str], tuple[int, int]]
    traffic: float  # GB
    transfers: list[Transfer]
    ratio: float  # of what is sent to the ideal


def faults(r: Result, timed: bool = True) -> Iterator[str]:
    for op in (op for body in r.program.bodies.values() for op in body.values()):
        if op.kind == "while" and op.trips() is None:
            yield f"{op.name} is a loop without a known trip count: its bytes count once"
    yield from check_attention(r.program, r.wanted)
    yield from check_head(r.program, r.wanted)
    many = r.wanted.devices > 1
    yield from check_collectives(r.program, r.wanted) if many else ()
    for limit, value, what, applies in (
        (40, r.compile_s, "s to compile; is the machine idle?", timed),
        (40, r.arguments + r.temporaries, "GB of arguments and temporaries", True),
        # What was reached, lest it grow again.
        (1.03, r.ratio, "times the ideal bytes are sent", many),
        (104, r.traffic, "GB of non-GEMM traffic", many and r.wanted.train),
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
    """JAX asks the machine for its chip and its cuDNN; here is no chip to ask."""
    from jax._src.cudnn import fused_attention_stablehlo as fused

    major, minor, patch, *_ = map(int, cudnn_version().split("."))
    fused.check_cudnn_version = lambda: 10000 * major + 100 * minor + patch
    fused.check_compute_capability = lambda least: tuple(map(int, least.split("."))) <= (9, 0)
    fused.is_cuda_compute_capability_equal = lambda version: version == "9.0"


def make_mesh(devices: int) -> Mesh:
    topology = topologies.get_topology_desc(
        "h100", platform="cuda", topology=f"1x1x{devices}",
        target_config=Path(__file__).with_name("h100.txtpb").read_text(),
    )  # fmt: skip
    return Mesh(np.array(topology.devices), ("fsdp",), axis_types=(AxisType.Auto,))


@functools.cache  # settings of memory_table are compiled already
def measure(kind: str, stage: int, c: train_gpt.Config, devices: int) -> Result:
    mesh, began = make_mesh(devices), time.perf_counter()
    compiled = train_gpt.compile_stage(kind, stage, c, mesh)
    compile_s, memory = time.perf_counter() - began, compiled.memory_analysis()
    w, program = wanted(kind, stage, c, devices), parse(compiled.as_text())
    causes, transfers = traffic_by_cause(program), communication(program, devices)
    ideal = 2 * w.ideal * (devices - 1) / devices
    weights = sum(t.bytes for t in transfers if not t.what.startswith("all-reduce"))
    return Result(
        kind, stage, w, compile_s, memory.temp_size_in_bytes / 1e9,
        memory.argument_size_in_bytes / 1e9, program, causes,
        sum(n for n, _ in causes.values()) / 1e9, transfers, weights / ideal if ideal else 0.0,
    )  # fmt: skip


# ---- Report --------------------------------------------------------------------------------------
def table(*rows: Iterable) -> str:
    """Markdown; the first row is the head, and words stand left, numbers right."""
    columns = []
    for head, *cells in zip(*([str(cell) for cell in row] for row in rows), strict=True):
        width, words = max(map(len, (head, *cells))), cells[-1][:1].isalpha()
        rule = ":" + "-" * (width - 1) if words else "-" * (width - 1) + ":"
        columns.append([f"{cell:{'<' if words else '>'}{width}}" for cell in (head, rule, *cells)])
    return "\n".join(f"| {' | '.join(row)} |" for row in zip(*columns, strict=True))


def program_table(results: list[Result]) -> str:
    """A row per program; those that differ in stage and seconds only share one."""
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
    read it; notes what is not as expected."""
    rows, largest = [], max(range(len(c.rows)), key=lambda i: bool(c.rows[i].steps) * c.rows[i].T)
    for GB, flags, enough in SETTINGS:
        small = dataclasses.replace(c, **flags)
        even, odd, val = (measure(kind, largest, small, 1) for kind in (*train_gpt.KINDS, "val"))
        training = max(even.temporaries, odd.temporaries)
        needs = odd.arguments + max(training, val.temporaries)
        told = " ".join(f"--{name} {value}" for name, value in flags.items()) or "none"
        parts = odd.arguments, training, val.temporaries, needs
        rows.append((f"{GB} GB", told, *(f"{n:.1f}" for n in parts), "yes" if enough else "no"))
        if (needs <= 0.9 * GB) != enough:
            exceeded.append(f"{told}: {needs:.1f} GB of {GB} GB, expected to fit: {enough}")
    head = ("GPU", "flags", "state GB", "training GB", "validation GB", "together GB", "fits")
    return table(head, *rows)


def traffic_table(r: Result) -> str:
    def row(pass_and_function, values):
        total = sum(n for n, _ in values) / 1e9
        return *pass_and_function, f"{total:.2f}", sum(count for _, count in values)

    rows = [row(key, [value]) for key, value in r.causes.items() if value[0] >= 5e6]
    rest = row(("rest", "less each"), [value for value in r.causes.values() if value[0] < 5e6])
    everything = row(("all", "together"), r.causes.values())
    return table(("pass", "function", "GB", "kernels"), *rows, rest, everything)


def transfer_table(r: Result) -> str:
    sums = map(sum, list(zip(*r.transfers, strict=True))[2:])
    rows = [
        (what, arrays, f"{n / 1e6:.1f}", *(f"{1e3 * t:.3f}" for t in times))
        for what, arrays, n, *times in (*r.transfers, ("all", "together", *sums))
    ]
    head = ("collective", "operands", "sent MB", "transfer ms", "work ms", "exposed ms")
    return table(head, *rows)


def report(results: list[Result], memory: str) -> str:
    main = [r for r in results if r.kind == "odd" and r.wanted.devices == 8][-1]
    step = f"an odd training step on 8 devices, stage {main.stage}"
    return "\n\n".join((
        "# The record preset, compiled for H100s on a machine without a GPU",
        "Not run. Traffic, sent and ideal bytes, and how they are counted: see the head of "
        "`dev/compile_8xh100.py`. `python dev/compile_8xh100.py --write` renews this file.",
        f"- jax {jax.__version__}, cuDNN {cudnn_version()}\n- sha256 of the code {DIGEST}",
        "## Programs", program_table(results),
        "## Memory of one GPU, without the workspaces of cuDNN and cuBLAS",
        "State is what lives between steps; training and validation are the temporaries of their "
        "programs, in the stage of the longest sequences. What fits is in nine tenths of the "
        "memory; JAX takes three quarters unless told `XLA_CLIENT_MEM_FRACTION=0.92`.",
        memory, f"## Non-GEMM traffic of {step}, by cause", traffic_table(main),
        f"## Communication of {step}, in the order of its end",
        "Estimates, not measurements, of an assumed H100: GEMMs and attention at 600 Tflop/s (FP8 "
        "twice), other kernels at 2.6 TB/s, links at 350 GB/s, one collective at a time. Work is "
        f"what is scheduled between start and done. {exposed(main.transfers):.2f} ms are exposed.",
        transfer_table(main),
    )) + "\n"  # fmt: skip


def main(argv: list[str]) -> int:
    cli = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    cli.add_argument("--write", action="store_true", help=f"write {RECORD.relative_to(ROOT)}")
    cli.add_argument("--untimed", action="store_true", help="do not judge seconds")
    arguments = cli.parse_args(argv)
    if cudnn_version() is None:
        print(f"compile_8xh100.py: {MISSING}", file=sys.stderr)
        return 2
    os.environ["XLA_FLAGS"] = "--xla_gpu_autotune_level=0"  # or variants compile that nobody times
    jax.config.update("jax_enable_compilation_cache", False)
    answer_for_hopper()
    # Any numbers compile to the same program; the file of the right ones is not needed.
    train_gpt.prefix_table = lambda c: np.arange(c.vocab, dtype="int32")
    c = dataclasses.replace(train_gpt.PRESETS["record"], attention="cudnn", seed=1)
    stages = dict.fromkeys((train_gpt.KINDS[s % 2], c.stage_at(s)) for s in range(c.steps))
    stages |= dict.fromkeys(("val", c.stage_at(s)) for s in range(c.steps + 1) if c.validates(s))
    results, wrong = [], []
    for devices in (8, 1):
        for kind, stage in stages:
            results.append(r := measure(kind, stage, c, devices))
            found = list(faults(r, timed=not arguments.untimed))
            name = f"{devices} x H100, {kind}, stage {stage}"
            print(f"{name}: {r.compile_s:.1f} s", *found, sep="\n  FAIL ", flush=True)
            wrong += found
    text = report(results, memory_table(c, wrong))
    print("", text, *wrong or ["every check passed"], sep="\n")
    if arguments.write and not wrong:
        RECORD.write_text(text, encoding="utf-8")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
