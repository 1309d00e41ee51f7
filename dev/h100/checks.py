"""What the record's programs must be in numbers, and whether a compiled one is."""

import dataclasses
import math
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import NamedTuple

import train_gpt
from h100.estimate import Cost, Transfer, exposed_ms, traffic
from h100.hlo import Instruction, Program, inner, kernels, operands_of, users_of, walk

KINDS = "first", "second", "val"  # of programs; a second step updates every parameter

# A little above what was reached, but for the first two.
MOST_COMPILE_SECONDS = 40
MOST_MEMORY_GB = 40
MOST_SENT = 1.04  # times the bytes that must be sent
MOST_WITHOUT_PTX = 0.02  # of the traffic
MOST_TRAFFIC_GB = 95
MOST_EXPOSED_MS = 3.5


# ---- What a program must be ----------------------------------------------------------------------
class Expected(NamedTuple):
    """What a program must be. Elements are counted with padding."""

    train: bool
    devices: int
    attention_layers: int
    microbatches: int  # of a device
    activation: int  # elements of x in a microbatch
    head: tuple[int, int, int]  # tokens in a chunk, rows of the table, width
    chunks: int  # of the head
    gathered: int  # elements of weights
    scattered: int  # elements of gradients
    reduced: int  # elements of gradients that every device needs whole
    ideal: int  # elements of what is gathered and what is scattered, without padding


def expected_program(kind: str, stage: int, c: train_gpt.Config, devices: int) -> Expected:
    """Counts, from the table of parameters, what a program must gather, scatter and launch.

    Every training step gathers the banks and scatters all gradients but those of bigrams, of which
    the devices exchange which rows they read and a gradient for each token. Lookups are gathered at
    the end of second steps, after their updates. Validation gathers all weights.
    """
    train = kind != "val"
    params = train_gpt.param_table(c)
    banks = [p for p in params.values() if p.sharding == train_gpt.BANK]
    lookups = [p for p in params.values() if p.sharding == train_gpt.LOOKUP]
    replicated = [p for p in params.values() if p.sharding == train_gpt.REPLICATED]
    gathered = banks if kind == "first" else banks + lookups
    scattered = []
    if train:
        scattered = [p for p in banks + lookups if p is not params["bigram"]]
    if train:
        sequences = c.batch
        T = c.sequence_length(stage)
        microbatch = math.gcd(c.microbatch, sequences // devices)
        bigrams = sequences * T  # a token exchanges one row
    else:
        sequences = train_gpt.VAL_SEQUENCES
        T = c.val_T
        microbatch = math.gcd(c.for_validation().microbatch, sequences // devices)
        bigrams = 0
    a_device = sequences // devices
    return Expected(
        train=train,
        devices=devices,
        attention_layers=len(c.attention_layers()),
        microbatches=a_device // microbatch,
        activation=microbatch * T * c.D,
        head=(c.head_chunk, params["head"].shape[0], c.D),
        chunks=a_device * T // c.head_chunk,
        gathered=stored_elements(gathered) + bigrams * (c.D + 1),
        scattered=stored_elements(scattered),
        reduced=stored_elements(replicated) if train else 0,
        # The number of a row, in int32, counts as two elements of two bytes.
        ideal=model_elements(gathered) + model_elements(scattered) + bigrams * (c.D + 2),
    )


def stored_elements(params: Iterable[train_gpt.Param]) -> int:
    """Elements of parameters as they are stored, with padding."""
    return sum(math.prod(p.shape) for p in params)


def model_elements(params: Iterable[train_gpt.Param]) -> int:
    """Elements of parameters as the model has them."""
    return sum(math.prod(p.model_shape) for p in params)


# ---- Checks --------------------------------------------------------------------------------------
def check_loops(program: Program) -> Iterator[str]:
    """The compiler knows how often every loop runs."""
    for computation in program.computations.values():
        for instruction in computation.values():
            if instruction.kind == "while" and instruction.trip_count() is None:
                yield f"{instruction.name} is a loop without a known trip count: it counts once"


def check_attention(program: Program, expected: Expected) -> Iterator[str]:
    """cuDNN runs once forward and once backward for every layer with attention and microbatch, and
    nothing copies its operands or results."""
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
            wanted = f"{calls} of them {expected.microbatches} times"
            yield f"calls of cuDNN {target} run {found} times, not {wanted}"
    yield from copies_beside_attention(program, expected.activation)


def copies_beside_attention(program: Program, activation: int) -> Iterator[str]:
    """Kernels that only change the layout of an activation before or after attention."""
    moves = {"copy", "transpose", "copy-start"}
    harmless = {"parameter", "bitcast", "reshape", "tuple"}
    views = {"bitcast", "get-tuple-element", "copy-done", "fusion-done", "opt-barrier"}
    for computation in program.computations.values():
        for call in computation.values():
            if call.product() != "attention":
                continue
            before = walk(call.name, computation, operands_of, views)
            after = walk(call.name, computation, users_of, views)
            for beside in (*before, *after):
                kinds = {part.kind for part, _ in inner(program, beside, computation)}
                only_moves = kinds & moves and kinds <= moves | harmless
                if only_moves and beside.elements() >= activation:
                    yield f"{beside.name} changes only the layout, beside {call.name}"


class Fp8Product(NamedTuple):
    """A matrix product with an operand in FP8."""

    formats: list[str]  # of both operands, sorted
    instruction: Instruction
    runs: int


def fp8_products(program: Program) -> Iterator[Fp8Product]:
    """The matrix products in FP8."""
    for kernel in kernels(program):
        for part, computation in inner(program, kernel.instruction, kernel.computation):
            if part.product() == "gemm":
                formats = sorted(computation[name].shapes[0][0] for name in part.operands[:2])
                if formats[-1].startswith("f8"):
                    yield Fp8Product(formats, part, kernel.runs)


def check_head(program: Program, expected: Expected) -> Iterator[str]:
    """Training has three FP8 products for every chunk of the head: the logits z, and the gradients
    dx and dw. Validation has none."""
    N, V, D = expected.head
    e4 = "f8e4m3fn"
    e5 = "f8e5m2"
    found = Counter()
    for product in fp8_products(program):
        sizes = sorted(n for n in product.instruction.shapes[0][1] if n > 1)
        found[(*product.formats, *sizes)] += product.runs
    wanted = {}
    if expected.train:
        z = (e4, e4, *sorted((N, V)))
        dx = (e4, e5, *sorted((N, D)))
        dw = (e4, e5, *sorted((V, D)))
        wanted = dict.fromkeys((z, dx, dw), expected.chunks)
    if found != wanted:
        yield f"GEMMs in FP8 run {dict(found)} times, not {wanted}"


def check_collectives(program: Program, expected: Expected) -> Iterator[str]:
    """All-gathers of weights run beside work, but for one that may have none to run beside;
    gradients are reduce-scattered; nothing else is large."""
    elements = Counter()
    synchronous = []
    for kernel in kernels(program):
        if kernel.kind != "collective":
            continue
        instruction = kernel.instruction
        kind = instruction.collective()
        n = sum(kernel.computation[name].elements() for name in instruction.operands)
        elements[kind] += n
        starts = instruction.kind.endswith("-start")
        waits = not starts or '"is_sync":true' in instruction.attributes
        if kind == "all-gather" and waits:
            synchronous.append(instruction.name)
        if kind == "all-reduce" and n > expected.reduced + 1:
            yield f"{instruction.name} all-reduces {n} elements: loss and small gradients are fewer"
        if kind not in ("all-gather", "all-reduce", "reduce-scatter"):
            yield f"{instruction.name} is {kind}: nothing here needs one"
    if len(synchronous) > 1:
        yield f"{' '.join(synchronous)} are synchronous all-gathers"
    for kind, n in (
        ("all-gather", expected.gathered // expected.devices),
        ("reduce-scatter", expected.scattered),
    ):
        if elements[kind] != n:
            yield f"{kind} of {elements[kind]} elements in all, not {n}"


@dataclasses.dataclass(frozen=True)
class Result:
    """What a program turned out to be."""

    kind: str
    stage: int
    expected: Expected
    compile_s: float
    temporaries_GB: float
    arguments_GB: float
    program: Program
    costs: dict[tuple[str, str], Cost]
    transfers: list[Transfer]
    sent_ratio: float  # bytes sent, of those that must be sent
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


def check(result: Result, timed: bool = True) -> Iterator[str]:
    """What is not as it must be, or above its limit. Without `timed`, seconds are not judged."""
    program = result.program
    many = result.expected.devices > 1
    yield from check_loops(program)
    yield from check_attention(program, result.expected)
    yield from check_head(program, result.expected)
    if many:
        yield from check_collectives(program, result.expected)
    if timed and result.compile_s > MOST_COMPILE_SECONDS:
        yield f"{result.compile_s:.0f} s to compile, limit {MOST_COMPILE_SECONDS}; is it idle?"
    memory = result.arguments_GB + result.temporaries_GB
    if memory > MOST_MEMORY_GB:
        yield f"{memory:.2f} GB of arguments and temporaries, limit {MOST_MEMORY_GB}"
    limit = MOST_WITHOUT_PTX * result.traffic_GB()
    unknown = traffic_without_ptx(program)
    if unknown > limit:
        yield f"{unknown:.2f} GB are of kernels without PTX, limit {limit:.2f}"
    if many and result.sent_ratio > MOST_SENT:
        yield f"{result.sent_ratio:.2f} times the ideal bytes are sent, limit {MOST_SENT}"
    if many and result.expected.train and result.traffic_GB() > MOST_TRAFFIC_GB:
        yield f"{result.traffic_GB():.2f} GB of non-GEMM traffic, limit {MOST_TRAFFIC_GB}"
    exposed = exposed_ms(result.transfers)
    if many and exposed > MOST_EXPOSED_MS:
        yield f"{exposed:.2f} ms of communication are exposed (estimate), limit {MOST_EXPOSED_MS}"


def traffic_without_ptx(program: Program) -> float:
    """Gigabytes of kernels whose instructions are not known."""
    unknown = 0
    for kernel in kernels(program):
        if kernel.kind == "other" and kernel.instruction.name not in program.issued:
            unknown += traffic(program, kernel)
    return unknown / 1e9
