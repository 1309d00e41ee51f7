"""What a preset's programs must gather, scatter and launch, and whether a compiled one does."""

import dataclasses
import math
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import NamedTuple

import train_gpt
from h100.estimate import Cost, Transfer, exposed_ms, traffic
from h100.hlo import Instruction, Program, inner, kernels, operands_of, users_of, walk

# The kinds of programs.
FIRST = "first"  # of two steps, the one that updates only the matrices
SECOND = "second"  # and the one that updates everything
VAL = "val"


class Limits(NamedTuple):
    """Limits of a preset's programs."""

    memory_GB: float
    traffic_GB: float  # outside of products and attention
    waiting: int  # all-gathers beside which nothing runs


# A little above what was reached. One GPU needs the most memory.
LIMITS = {
    "record": Limits(memory_GB=40, traffic_GB=95, waiting=1),
    "medium": Limits(memory_GB=67, traffic_GB=222, waiting=3),
}
MOST_COMPILE_SECONDS = 40
MOST_SENT = 1.04  # bytes sent / bytes that must be sent
MOST_WITHOUT_PTX = 0.02  # fraction of the traffic
MOST_EXPOSED_MS = 3.5


# ---- What a program must be ----------------------------------------------------------------------
class Expected(NamedTuple):
    """What a program must be. Padding counts among the elements, but for `ideal`."""

    train: bool
    devices: int
    attention_layers: int
    microbatches: int  # that each device runs, one after the other
    activation: int  # elements of x in a microbatch
    head: tuple[int, int, int]  # tokens in a chunk, rows of the table, width
    chunks: int  # for which each device runs the head, one after the other
    gathered: int  # elements of weights
    scattered: int  # elements of gradients
    reduced: int  # elements of gradients that every device needs whole
    exchanged: int  # elements that a device sends to the owners of n-grams, and back
    ideal: int  # elements of what is gathered, scattered and exchanged, without padding


def expected_program(kind: str, stage: int, c: train_gpt.Config, devices: int) -> Expected:
    """Counts, from the table of parameters, what a program must gather, scatter and launch.

    Every training step gathers the banks and scatters the gradients of all parameters but n-grams.
    Of those, the devices exchange which rows they read, the rows, and their gradients. Lookups are
    gathered at the end of the steps that update them. Validation gathers all weights but n-grams.
    """
    train = kind != VAL
    params = train_gpt.param_table(c)
    banks = [p for p in params.values() if p.kind == train_gpt.BANK]
    lookups = [p for p in params.values() if p.kind == train_gpt.LOOKUP]
    replicated = [p for p in params.values() if p.kind == train_gpt.REPLICATED]
    gathered = banks if kind == FIRST else banks + lookups
    if train:
        scattered = banks + lookups
        sequences = c.batch
        T = c.sequence_length(stage)
        microbatch = math.gcd(c.microbatch, sequences // devices)
        times = 2  # rows are sent, and their gradients
    else:
        scattered = []
        sequences = train_gpt.VAL_SEQUENCES
        T = c.val_T
        microbatch = math.gcd(c.for_validation().microbatch, sequences // devices)
        times = 1
    device_sequences = sequences // devices
    chunk = math.gcd(c.head_chunk, microbatch * T)
    slots = device_sequences * train_gpt.GROUP * c.ngram_slots(T)
    return Expected(
        train=train,
        devices=devices,
        attention_layers=len(c.attention_layers()),
        microbatches=device_sequences // microbatch,
        activation=microbatch * T * c.D,
        head=(chunk, params["head"].shape[0], c.D),
        chunks=device_sequences * T // chunk,
        gathered=stored_elements(gathered),
        scattered=stored_elements(scattered),
        reduced=stored_elements(replicated) if train else 0,
        # A row's number is an int32: in `ideal`, which counts elements of two bytes, it is two.
        exchanged=slots * (times * c.D + 1),
        ideal=model_elements(gathered) + model_elements(scattered) + slots * (times * c.D + 2),
    )


def stored_elements(params: Iterable[train_gpt.Param]) -> int:
    """Elements of parameters as they are stored, with padding."""
    return sum(math.prod(p.shape) for p in params)


def model_elements(params: Iterable[train_gpt.Param]) -> int:
    """Elements of parameters as the model has them."""
    return sum(math.prod(p.model_shape) for p in params)


# ---- Checks --------------------------------------------------------------------------------------
def check_loops(program: Program) -> Iterator[str]:
    """The compiler must know how often every loop runs."""
    for computation in program.computations.values():
        for instruction in computation.values():
            if instruction.kind == "while" and instruction.trip_count() is None:
                yield f"{instruction.name} is a loop without a known trip count: it counts once"


def check_attention(program: Program, expected: Expected) -> Iterator[str]:
    """cuDNN must run once forward and once backward for every layer with attention and every
    microbatch, and nothing may copy its operands or results."""
    backward = expected.attention_layers if expected.train else 0
    for target, calls in (
        ("fmhaSoftmax", expected.attention_layers),
        ("fmhaSoftmaxBackward", backward),
    ):
        found = []
        for kernel in kernels(program):
            if f'"__cudnn${target}"' in kernel.instruction.attributes:
                found.append(kernel.runs)
        if found != [expected.microbatches] * calls:
            wanted = f"{calls} calls that run {expected.microbatches} times"
            yield f"cuDNN {target} has calls that run {found} times, expected {wanted}"
    yield from copies_beside_attention(program, expected.activation)


def copies_beside_attention(program: Program, activation: int) -> Iterator[str]:
    """Finds kernels that only change the layout of an activation before or after attention."""
    moves = {"copy", "transpose", "copy-start"}
    free = {"parameter", "bitcast", "reshape", "tuple"}  # these neither move nor compute anything
    # What may stand between attention and such a kernel.
    views = {"bitcast", "get-tuple-element", "copy-done", "fusion-done", "opt-barrier"}
    for computation in program.computations.values():
        for call in computation.values():
            if call.product() != "attention":
                continue
            before = walk(call.name, computation, operands_of, views)
            after = walk(call.name, computation, users_of, views)
            for beside in (*before, *after):
                kinds = {part.kind for part, _ in inner(program, beside, computation)}
                has_a_move = not kinds.isdisjoint(moves)
                computes_nothing = kinds <= moves | free
                is_large = beside.elements() >= activation
                if has_a_move and computes_nothing and is_large:
                    yield f"{beside.name} changes only the layout, beside {call.name}"


HEAD = {"head_loss", "head_loss_fwd"}  # the functions of train_gpt.py that have its products


class Fp8Product(NamedTuple):
    """A matrix product with an operand in FP8."""

    formats: list[str]  # of both operands, sorted
    instruction: Instruction
    runs: int


def fp8_products(program: Program) -> Iterator[Fp8Product]:
    """Finds the matrix products that have an operand in FP8."""
    for kernel in kernels(program):
        for part, computation in inner(program, kernel.instruction, kernel.computation):
            if part.product() == "gemm":
                formats = sorted(computation[name].dtype() for name in part.operands[:2])
                if any(dtype.startswith("f8") for dtype in formats):
                    yield Fp8Product(formats, part, kernel.runs)


def check_head(program: Program, expected: Expected) -> Iterator[str]:
    """Training must have three FP8 products for every chunk of the head: the logits z, and the
    gradients dx and dw. Validation must have none. In training, other functions may have some."""
    N, V, D = expected.head
    e4 = "f8e4m3fn"
    e5 = "f8e5m2"
    found = Counter()  # (format, format, size, size), in ascending order -> runs
    for product in fp8_products(program):
        functions = program.functions(product.instruction)
        if expected.train and functions and not HEAD.intersection(functions):
            continue
        sizes = sorted(n for n in product.instruction.dims() if n > 1)
        found[(*product.formats, *sizes)] += product.runs
    wanted = {}
    if expected.train:
        z = (e4, e4, *sorted((N, V)))
        dx = (e4, e5, *sorted((N, D)))
        dw = (e4, e5, *sorted((V, D)))
        wanted = dict.fromkeys((z, dx, dw), expected.chunks)
    if found != wanted:
        yield f"GEMMs in FP8 run {dict(found)} times, expected {wanted}"


def check_collectives(program: Program, expected: Expected, waiting: int = 1) -> Iterator[str]:
    """All-gathers must be asynchronous, but for so many, which may have no work to run beside them.
    Gradients must be reduce-scattered. Only small arrays may be all-reduced."""
    elements = Counter()
    synchronous = []
    for kernel in kernels(program):
        if kernel.kind != "collective":
            continue
        instruction = kernel.instruction
        kind = instruction.collective()
        n = sum(kernel.computation[name].elements() for name in instruction.operands)
        elements[kind] += n
        is_synchronous = '"is_sync":true' in instruction.attributes
        if not instruction.kind.endswith("-start"):
            is_synchronous = True
        if kind == "all-gather" and is_synchronous:
            synchronous.append(instruction.name)
        if kind == "all-reduce" and n > expected.reduced + 1:  # the loss is one element
            yield f"{instruction.name} all-reduces {n} elements: loss and small gradients are fewer"
        if kind not in ("all-gather", "all-reduce", "reduce-scatter", "all-to-all"):
            yield f"{instruction.name} is {kind}: nothing here needs one"
    if len(synchronous) > waiting:
        yield f"{' '.join(synchronous)} are synchronous all-gathers: only {waiting} may be"
    for kind, n in (
        ("all-gather", expected.gathered // expected.devices),
        ("reduce-scatter", expected.scattered),
        ("all-to-all", expected.exchanged),
    ):
        if elements[kind] != n:
            yield f"{kind} of {elements[kind]} elements in all, expected {n}"


@dataclasses.dataclass(frozen=True)
class Result:
    """The figures of a compiled program."""

    kind: str
    stage: int
    expected: Expected
    compile_s: float
    temporaries_GB: float
    arguments_GB: float
    program: Program
    costs: dict[tuple[str, str], Cost]
    transfers: list[Transfer]
    sent_ratio: float  # bytes sent / bytes that must be sent
    parts: dict[str, float]  # estimated milliseconds of a step

    def traffic_GB(self) -> float:
        """Bytes of the kernels that XLA generates."""
        return sum(cost.bytes for cost in self.costs.values()) / 1e9

    def sent_GB(self) -> float:
        """Bytes that a device sends."""
        return sum(transfer.bytes for transfer in self.transfers) / 1e9

    def ms(self) -> float:
        """Estimated milliseconds of a step."""
        return sum(self.parts.values())


def check(result: Result, limits: Limits, timed: bool = True) -> Iterator[str]:
    """Yields a message for everything that is not as it must be, or is above its limit. Without
    `timed`, the seconds of compiling are not limited."""
    program = result.program
    communicates = result.expected.devices > 1
    yield from check_loops(program)
    yield from check_attention(program, result.expected)
    yield from check_head(program, result.expected)
    if communicates:
        yield from check_collectives(program, result.expected, limits.waiting)
    if timed and result.compile_s > MOST_COMPILE_SECONDS:
        yield (
            f"{result.compile_s:.0f} s to compile, limit {MOST_COMPILE_SECONDS}: --untimed accepts "
            "it on a machine that is not idle"
        )
    memory = result.arguments_GB + result.temporaries_GB
    if memory > limits.memory_GB:
        yield f"{memory:.2f} GB of arguments and temporaries, limit {limits.memory_GB:.2f}"
    limit = MOST_WITHOUT_PTX * result.traffic_GB()
    unknown = traffic_without_ptx(program)
    if unknown > limit:
        yield f"{unknown:.2f} GB of traffic are of kernels without PTX, limit {limit:.2f} GB"
    if communicates and result.sent_ratio > MOST_SENT:
        yield f"{result.sent_ratio:.2f} times the ideal bytes are sent, limit {MOST_SENT}"
    if communicates and result.expected.train and result.traffic_GB() > limits.traffic_GB:
        yield f"{result.traffic_GB():.2f} GB of non-GEMM traffic, limit {limits.traffic_GB}"
    exposed = exposed_ms(result.transfers)
    if communicates and exposed > MOST_EXPOSED_MS:
        yield f"{exposed:.2f} ms of communication are exposed (estimate), limit {MOST_EXPOSED_MS}"


def traffic_without_ptx(program: Program) -> float:
    """Traffic in GB of the kernels whose instructions are not known."""
    unknown = 0
    for kernel in kernels(program):
        if kernel.kind == "other" and kernel.instruction.name not in program.issued:
            unknown += traffic(program, kernel)
    return unknown / 1e9
