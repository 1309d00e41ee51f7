"""Estimates what a compiled program costs on H100s: bytes, and milliseconds. No GPU has run it.

Traffic is the bytes that kernels other than GEMMs, attention and collectives read and write, as if
    there were no caches. An operand counts only as far as the results need it (a slice, the
    gathered rows), and an update in place counts only the update. If the updates were gathered
    from n devices, one n-th of them counts, because a device adds only those for its rows.
Cause is the function of train_gpt.py that XLA names for a kernel. It names only one, even if the
    kernel fuses several. The head computes its gradients in its forward pass.
Time: a kernel takes as long as its bytes or its instructions (ptx.py) need, whichever is longer; a
    product or attention takes as long as its operations or its bytes, cuBLAS's workspace included.
    A Mosaic kernel that multiplies takes as long as cuBLAS for its first two operands, a b^T, and
    then as long as the instructions of its epilogue (mosaic.py), because nothing is multiplied
    meanwhile.
    The rates were fixed before the first look at this program, on the file of record 21: another
    calculation had given 108 ms for a step of it, and PyTorch's took 102 ms.
Sent bytes are those of one of n devices, in a ring: (n - 1) / n of an array that is gathered or
    scattered.
"""

import math
import re
from collections import Counter, defaultdict
from collections.abc import Iterable
from typing import NamedTuple

from h100.hlo import (
    BYTES,
    FUSIONS,
    Computation,
    Instruction,
    Kernel,
    Program,
    inner,
    kernels,
    operands_of,
    users_of,
    walk,
)

# What an H100 is assumed to do.
FLOAT32 = 300e12  # operations per second in products of float32 operands
BFLOAT16 = 600e12
FP8_MIXED = 800e12  # operands in two formats of FP8, as in the head's backward pass
FP8 = 900e12  # operands in one format
ATTENTION = 560e12
MORE_KEYS = 400  # attention takes as long as if its window were so many keys longer
ISSUE = 25e12  # instructions per second, of all threads
MEMORY = 2.75e12  # bytes per second
LINKS = 350e9  # bytes per second
LAUNCH = 2.5e-6  # seconds from one kernel to the next
STOLEN = 1e-12  # seconds that a byte sent takes from kernels, because collectives need SMs too

# Where the time of a step goes. "Exposed" is communication with no work beside it.
PARTS = "gemm", "attention", "other", "launches", "exposed", "stolen"

# Functions of train_gpt.py, and of older files, that only build and compile programs.
COMPILING = {"compile_train_step", "compile_val_step", "compile_program", "compile_stage"}
# Functions whose kernels belong to the forward pass, even if XLA does not mark them.
FORWARD = {"loss_fn", "whole_weights", "val_step"}


# ---- Bytes ---------------------------------------------------------------------------------------
class Moved(NamedTuple):
    """What one run of a kernel reads and writes."""

    bytes: int
    largest: int  # elements of the largest array


class KernelBody(NamedTuple):
    """The instructions of a kernel, as a computation with parameters."""

    instructions: Computation
    operand_of: dict[str, str]  # parameter -> the value outside that it stands for
    outputs: list[str]


def kernel_body(program: Program, kernel: Kernel) -> KernelBody:
    """The computation of a fusion; for any other instruction, a computation of it alone."""
    instruction = kernel.instruction
    if instruction.kind in FUSIONS:
        body = program.computations[instruction.called()]
        operand_of = {}
        for part in body.values():
            if part.kind == "parameter":
                number = int(part.attributes.split()[0])
                operand_of[part.name] = instruction.operands[number]
    else:
        body = {}
        for name in instruction.operands:
            body[name] = kernel.computation[name]._replace(kind="parameter", operands=[])
        operand_of = {name: name for name in body}
        body[instruction.name] = instruction._replace(root=True)
    root = next(part for part in body.values() if part.root)
    outputs = root.operands if root.kind == "tuple" else [root.name]
    return KernelBody(body, operand_of, outputs)


def moved(program: Program, kernel: Kernel) -> Moved:
    """What one run of a kernel reads and writes."""
    body = kernel_body(program, kernel)
    written = 0.0
    largest = 0.0
    in_place = set()
    for output in body.outputs:
        source = behind_bitcasts(output, body.instructions)
        if updates_a_parameter(source, body.instructions):
            in_place.add(source.name)
            n = elements_updated(body, source)
            accesses = 2 if source.kind == "scatter" else 1  # it adds, so it reads first
            written += accesses * n * BYTES[source.dtype()]
            largest = max(largest, n)
        elif source.kind != "parameter":
            written += source.bytes()
            largest = max(largest, source.elements())
    read = 0.0
    needed = elements_needed(body, in_place)
    for part in body.instructions.values():
        if part.kind == "parameter":
            n = min(part.elements(), needed[part.name])
            read += part.bytes() * n / max(1, part.elements())
            largest = max(largest, n)
    return Moved(round(read + written), round(largest))


def elements_needed(body: KernelBody, in_place: set[str]) -> dict[str, float]:
    """How many elements of every value the outputs need: goes from the outputs backward."""
    needed = dict.fromkeys(body.instructions, 0.0)
    for output in body.outputs:
        needed[output] += body.instructions[output].elements()
    for part in reversed(body.instructions.values()):
        if part.kind == "tuple":
            continue
        n = min(needed[part.name], part.elements())
        for position, name in enumerate(part.operands):
            operand = body.instructions[name]
            read = elements_read(part, position, operand, n)
            is_target = position == 0 and part.name in in_place
            if is_target:
                read = 0.0
            needed[name] += read
    return needed


def elements_read(part: Instruction, position: int, operand: Instruction, n: float) -> float:
    """Elements of an operand that n elements of an instruction's result need."""
    slices = ("slice", "dynamic-slice", "dynamic-update-slice", "gather", "scatter")
    if position == 0 and part.kind in slices:
        return n
    if part.kind in ("dynamic-slice", "dynamic-update-slice"):
        return operand.elements()
    return operand.elements() * n / max(1, part.elements())


def behind_bitcasts(name: str, body: Computation) -> Instruction:
    """The instruction that makes a value, seen through bitcasts."""
    part = body[name]
    while part.kind == "bitcast":
        part = body[part.operands[0]]
    return part


def updates_a_parameter(part: Instruction, body: Computation) -> bool:
    """Whether an instruction updates some elements of a kernel's operand in place."""
    if part.kind not in ("dynamic-update-slice", "scatter"):
        return False
    return behind_bitcasts(part.operands[0], body).kind == "parameter"


def elements_updated(body: KernelBody, part: Instruction) -> float:
    """Elements of a parameter that an update in place changes."""
    position = 1 if part.kind == "dynamic-update-slice" else 2
    return body.instructions[part.operands[position]].elements()


def traffic(program: Program, kernel: Kernel) -> int:
    """Bytes that all runs of a kernel read and write."""
    return kernel.runs * moved(program, kernel).bytes


# ---- Causes --------------------------------------------------------------------------------------
class Cost(NamedTuple):
    """Sums over kernels, all their runs together."""

    bytes: int = 0
    kernels: int = 0
    instructions: float = 0.0
    seconds: float = 0.0

    def plus(self, other: "Cost") -> "Cost":
        """The sum of two costs."""
        return Cost(*(a + b for a, b in zip(self, other, strict=True)))


def cause(program: Program, kernel: Kernel) -> tuple[str, str]:
    """A kernel's pass (forward, backward or update) and its innermost function of train_gpt.py,
    which is the body of a Mosaic kernel. If XLA names none for the kernel, the last instruction
    that has one decides."""
    parts = [part for part, _ in inner(program, kernel.instruction, kernel.computation)]
    for part in (kernel.instruction, *reversed(parts)):
        functions = program.functions(part)
        if COMPILING.union(["<module>"]).issuperset(functions):
            continue
        innermost = part.mosaic() or functions[0]
        op_name = re.search(r'op_name="([^"]*)"', part.attributes)
        transforms = op_name[1] if op_name else ""
        if "transpose(" in transforms:
            return "backward", innermost
        if "jvp(" in transforms or not FORWARD.isdisjoint(functions):
            return "forward", innermost
        return "update", innermost
    return "any", "not named"


def cost_by_cause(program: Program) -> dict[tuple[str, str], Cost]:
    """(pass, function) -> cost of the kernels that XLA generates; most bytes first."""
    costs = defaultdict(Cost)
    for kernel in kernels(program):
        if kernel.kind == "other":
            cost = Cost(
                bytes=traffic(program, kernel),
                kernels=kernel.runs,
                instructions=issued(program, kernel),
                seconds=seconds(program, kernel),
            )
            key = cause(program, kernel)
            costs[key] = costs[key].plus(cost)
    return dict(sorted(costs.items(), key=lambda item: -item[1].bytes))


# ---- Seconds -------------------------------------------------------------------------------------
def issued(program: Program, kernel: Kernel) -> float:
    """Instructions that the threads of all runs of a kernel issue."""
    return kernel.runs * program.issued.get(kernel.instruction.name, 0)


def seconds(program: Program, kernel: Kernel) -> float:
    """Estimated seconds of all runs of a kernel that is not a collective, launches included."""
    if kernel.kind == "other":
        work = max(traffic(program, kernel) / MEMORY, issued(program, kernel) / ISSUE)
        return work + kernel.runs * LAUNCH
    per_run = LAUNCH
    for part, computation in inner(program, kernel.instruction, kernel.computation):
        if part.product() == "attention":
            per_run += attention_seconds(part, computation)
        elif part.product() == "gemm":
            per_run += gemm_seconds(program, part, computation)
    return kernel.runs * per_run


def attention_seconds(call: Instruction, computation: Computation) -> float:
    """Estimated seconds of a call of cuDNN's attention: two products forward, five backward, of
    every query with the keys in its window."""
    queries = computation[call.operands[0]].dims()  # (sequences, T, heads, head_dim)
    T = queries[1]
    window = int(re.search(r'"sliding_window_length": ?(\d+)', call.attributes)[1])
    keys = min(window, T) if window else T
    operations = 10 if "Backward" in call.attributes else 4  # two for each product
    flops = operations * math.prod(queries) * keys
    return flops * (1 + MORE_KEYS / keys) / ATTENTION


def gemm_seconds(program: Program, product: Instruction, computation: Computation) -> float:
    """Estimated seconds of a matrix product."""
    operands = [computation[name] for name in product.operands]
    work = gemm_flops(product, computation) / gemm_rate(operands)
    if product.mosaic():
        work += program.issued.get(product.name, 0) / ISSUE
    bytes_moved = product.bytes() + sum(operand.bytes() for operand in operands)
    return max(work, bytes_moved / MEMORY)


def gemm_flops(product: Instruction, computation: Computation) -> int:
    """Operations of a matrix product."""
    left = computation[product.operands[0]].dims()
    if product.mosaic():  # a b^T of its first two operands; its results may be anything
        right = computation[product.operands[1]]
        return 2 * math.prod(left[:-1]) * right.elements()
    # lhs_contracting_dims={1} of a dot, "lhs_contracting_dimensions":["1"] of cuBLAS
    pattern = r'lhs_contracting_dim(?:ension)?s"?[:=][\[{]([^\]}]*)'
    axes = re.findall(r"\d+", re.search(pattern, product.attributes)[1])
    contracted = math.prod(left[int(axis)] for axis in axes)
    return 2 * math.prod(product.dims()) * contracted


def gemm_rate(operands: list[Instruction]) -> float:
    """Operations per second, by the formats of both operands."""
    formats = {operand.dtype() for operand in operands[:2]}
    if "f8e4m3fn" in formats:
        return FP8 if len(formats) == 1 else FP8_MIXED
    return FLOAT32 if "f32" in formats else BFLOAT16


# ---- Communication -------------------------------------------------------------------------------
class Running(NamedTuple):
    """A collective that has started. Times are seconds since the program's start."""

    kernel: Kernel
    bytes: int  # that a device sends
    start: float
    end: float


class Transfer(NamedTuple):
    """A collective that has ended."""

    name: str  # the collective, and the parameters whose values or gradients it sends
    arrays: str
    bytes: int  # that a device sends
    seconds: float
    hidden: float  # seconds of work scheduled between its start and its end
    exposed: float  # seconds in which nothing else is done


def transfers(program: Program) -> list[Transfer]:
    """Follows the schedule with two clocks, one for kernels and one for collectives. The links send
    one collective at a time, while kernels run."""
    now = 0.0  # when the last kernel ends
    links_free = 0.0  # when the last collective ends
    running = {}  # name -> Running
    ended = []
    for kernel in kernels(program):
        instruction = kernel.instruction
        if kernel.kind == "collective":
            n = bytes_sent(kernel, program.devices)
            links_free = max(now, links_free) + n / LINKS
            running[instruction.name] = Running(kernel, n, now, links_free)
        elif kernel.kind != "done":
            now += seconds(program, kernel)
        if instruction.kind.endswith("-start"):
            continue  # it ends at its "-done"; any other collective ends at once
        name = instruction.operands[0] if kernel.kind == "done" else instruction.name
        if name in running:
            collective = running.pop(name)
            transfer = Transfer(
                name=collective_name(program, collective.kernel),
                arrays=collective_arrays(collective.kernel),
                bytes=collective.bytes,
                seconds=collective.bytes / LINKS,
                hidden=now - collective.start,
                exposed=max(0.0, collective.end - now),
            )
            ended.append(transfer)
            now = max(now, collective.end)
    return ended


def bytes_sent(kernel: Kernel, devices: int) -> int:
    """Bytes that a device sends in all runs of a collective. The operand of an all-gather is one
    n-th of its result, and an all-reduce sends everything twice."""
    factors = {"all-gather": devices, "all-reduce": 2}
    factor = factors.get(kernel.instruction.collective(), 1)
    operand = sum(kernel.computation[name].bytes() for name in kernel.instruction.operands)
    return kernel.runs * operand * factor * (devices - 1) // devices


def exposed_ms(program_transfers: Iterable[Transfer]) -> float:
    """Milliseconds of communication in which nothing else is done."""
    return 1e3 * sum(transfer.exposed for transfer in program_transfers)


def collective_name(program: Program, kernel: Kernel) -> str:
    """A collective and the parameters whose values or gradients it sends. Those of an all-reduce
    are too many to name them, and all-to-alls are of n-grams alone."""
    kind = kernel.instruction.collective()
    names = []
    if kind == "all-gather":
        operands = kernel.instruction.operands
        names = sorted(parameters_behind(program, name, kernel.computation) for name in operands)
    elif kind == "reduce-scatter":
        names = [parameters_updated_by(program, kernel.instruction.name, kernel.computation)]
    return f"{kind} {once_each(names, ' ')}".strip()


def collective_arrays(kernel: Kernel) -> str:
    """The operands of a collective, as text."""
    arrays = [kernel.computation[name].array() for name in kernel.instruction.operands]
    return once_each(arrays, " x ")


def once_each(texts: Iterable[str], times: str) -> str:
    """The texts without repetition; a text that is there n times has n in front of it."""
    counts = Counter(texts).items()
    return " ".join(text if n == 1 else f"{n}{times}{text}" for text, n in counts)


def parameters_behind(program: Program, name: str, computation: Computation) -> str:
    """The parameters that a value is computed from: the first that are met on the way back."""
    for part in walk(name, computation, operands_of):
        names = parameter_names([part.name, *part.operands], computation)
        if names:
            return names
    return "?"


def parameters_updated_by(program: Program, name: str, computation: Computation) -> str:
    """The parameters that a gradient is for: those whose state is the first to be combined with it,
    or those whose memory the result takes. A kernel updates both embedding and head, which are
    named together."""
    passed = set()
    for part in walk(name, computation, users_of):
        near = [part.name, *part.operands]
        if part.kind == "tuple":  # the results of the program
            near = []
            for number, operand in enumerate(part.operands):
                if operand in passed and number in program.overwritten:
                    near.append(program.overwritten[number])
        names = parameter_names(near, computation)
        if names:
            return names
        passed.add(part.name)
    return "?"


def parameter_names(names: list[str], computation: Computation) -> str:
    """The names, in train_gpt.py's table, of the parameters among some instructions, or "". They
    are in op_name="state.params[\\'embed\\']" and the like."""
    found = set()
    for name in names:
        part = computation[name]
        if part.kind == "parameter":
            quoted = re.findall(r"\[\\?'([\w.]+)\\?'\]", part.attributes)
            found.update(quoted[-1:])
    return "/".join(sorted(found))


# ---- A step --------------------------------------------------------------------------------------
def step_ms(program: Program, program_transfers: list[Transfer]) -> dict[str, float]:
    """Estimated milliseconds of a step, by PARTS."""
    parts = Counter()
    for kernel in kernels(program):
        if kernel.kind not in ("collective", "done"):
            launches = kernel.runs * LAUNCH
            parts[kernel.kind] += seconds(program, kernel) - launches
            parts["launches"] += launches
    parts["exposed"] = sum(transfer.exposed for transfer in program_transfers)
    parts["stolen"] = STOLEN * sum(transfer.bytes for transfer in program_transfers)
    return {name: 1e3 * parts[name] for name in PARTS}
