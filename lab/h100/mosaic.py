"""Reads what Mosaic dumps of its kernels, and counts the instructions that their threads issue.

A kernel goes over many tiles in loops. So one thread of each warpgroup is followed through the PTX,
from jump to jump, in a few blocks that stand for all. Only the arithmetic that a jump depends on is
interpreted: that of integers. A jump that depends on anything else, such as a number from memory,
is not taken, but counted, so that a table can say so. The thread waits for nothing.

Tensor cores multiply while threads issue other instructions. So of a kernel that multiplies, only
those instructions count that a thread issues while none of its products is under way: from a wait
for all of them to the next product. They are the epilogue. A warpgroup that does not multiply loads
tiles for the others meanwhile, and does not count.
"""

import math
import operator
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

from h100.estimate import gemm_flops
from h100.hlo import Kernel, Program, kernels
from h100.ptx import COMPARE

WARPGROUP = 128  # threads
BLOCKS = 31  # that stand for all: a prime, or they might all be at the same place in a row
MOST_STOPS = 10**7  # at which a thread is looked at, before something must be wrong


class Counts(NamedTuple):
    """What threads do."""

    instructions: int = 0  # that count
    flops: int = 0  # of products: two for each pair of numbers
    unknown: int = 0  # jumps that depend on what is not interpreted

    def plus(self, other: "Counts") -> "Counts":
        """The sum of two counts."""
        return Counts(*(a + b for a, b in zip(self, other, strict=True)))


class MosaicKernel(NamedTuple):
    """A Mosaic kernel, as ptxas has compiled it."""

    name: str  # of the function that is its body
    registers: int  # of a thread
    spilled: int  # bytes of a thread's registers that it has to store in memory
    shared: int  # bytes of shared memory of a block
    blocks: int
    threads: int  # of a block
    counts: Counts  # of all threads together


# ---- The code of a kernel ------------------------------------------------------------------------
# add.s32 %r1, %r2, 3;  or  @%p1 bra $L__BB0_1;  or  @!%p1 bra $L__BB0_1;
INSTRUCTION = re.compile(
    r"(?:@(?P<negated>!?)(?P<predicate>%p\d+) )?(?P<kind>[a-z][\w.]*)(?: (?P<operands>.*))?;"
)
PRODUCT = re.compile(r"wgmma\.mma_async.*?\.m(\d+)n(\d+)k(\d+)")
WAIT_FOR_ALL = "wgmma.wait_group.sync.aligned 0;"


class Line(NamedTuple):
    """An instruction. All fields are empty if it neither computes with integers nor jumps, ends,
    multiplies or waits for all products."""

    kind: str = ""  # such as add.s32
    out: str = ""  # the register that it writes
    operands: tuple[int | str, ...] = ()  # numbers, and the registers that it reads
    predicate: str = ""  # a jump is taken if this register is true
    negated: bool = False  # or if it is false
    label: str = ""  # where a jump goes
    flops: int = 0  # of a product
    waits: bool = False  # for all products


class Code(NamedTuple):
    """The code of a kernel."""

    lines: list[Line]
    labels: dict[str, int]  # the number of the line behind each label
    stops: list[int]  # for every line, the number of the next one that must be looked at


def read_code(ptx: str) -> Code:
    """Reads the PTX of a kernel."""
    body = re.search(r"\.entry .*?\n\{\n(.*)\n\}", ptx, re.S)[1]
    lines = []
    labels = {}
    for text in map(str.strip, body.splitlines()):
        label = re.match(r"(\$\w+):", text)
        if label:
            labels[label[1]] = len(lines)
        elif re.match(r"[a-z@]|\{.*;", text):
            lines.append(read_line(" ".join(text.split())))
    lines.append(Line("ret"))
    decisive = decisive_registers(lines)
    stops = []
    stop = len(lines) - 1
    for number in reversed(range(len(lines))):
        line = lines[number]
        ends = line.kind == "ret"
        if ends or line.out in decisive or line.label or line.flops or line.waits:
            stop = number
        stops.append(stop)
    return Code(lines, labels, stops[::-1])


def read_line(text: str) -> Line:
    """Reads an instruction."""
    product = PRODUCT.search(text)
    if product:
        return Line(flops=2 * math.prod(map(int, product.groups())))
    if text == WAIT_FOR_ALL:
        return Line(waits=True)
    found = INSTRUCTION.match(text)
    if not found:
        return Line()
    kind = found["kind"]
    predicate = found["predicate"] or ""
    out, *operands = (found["operands"] or "").split(", ")
    if kind in ("bra", "bra.uni") and out.startswith("$"):
        return Line(kind, predicate=predicate, negated=found["negated"] == "!", label=out)
    if predicate:
        return Line()
    if kind == "ret":
        return Line(kind)
    if kind == "elect.sync":  # %r1|%p1: which thread is elected, and whether it is this one
        return Line(kind, out.partition("|")[2])
    if is_interpreted(kind):
        return Line(kind, out.partition("|")[0], tuple(map(number_or_name, operands)))
    return Line()


def number_or_name(operand: str) -> int | str:
    """A number as a number, which is that of 64 bits if it is negative."""
    return int(operand) % 2**64 if re.fullmatch(r"-?\d+", operand) else operand


def decisive_registers(lines: list[Line]) -> set[int | str]:
    """The registers, and the numbers, that a jump depends on."""
    decisive = {line.predicate for line in lines if line.predicate}
    size = 0
    while len(decisive) > size:
        size = len(decisive)
        for line in lines:
            if line.out in decisive:
                decisive.update(line.operands)
    return decisive


# ---- Arithmetic ----------------------------------------------------------------------------------
COMBINE = {"and": operator.and_, "or": operator.or_, "xor": operator.xor}
COMPUTE = {
    "mov": operator.pos,
    "cvt": operator.pos,
    "not": operator.invert,
    "neg": operator.neg,
    "add": operator.add,
    "sub": operator.sub,
    "mul": operator.mul,
    "mad": lambda a, b, c: a * b + c,
    "shl": lambda a, b: a << min(b, 64),
    "shr": lambda a, b: a >> min(b, 64),
    "min": min,
    "max": max,
    **COMBINE,
}


def is_interpreted(kind: str) -> bool:
    """Whether we know how an instruction computes with integers or predicates."""
    name, *hows = kind.split(".")
    types = [how for how in hows if re.fullmatch(r"[a-z]+\d+\w*|pred", how)]
    are_integers = bool(types) and all(re.fullmatch(r"[usb]\d+|pred", how) for how in types)
    return are_integers and (name in COMPUTE or name in ("setp", "selp", "shfl"))


def compute(kind: str, operands: list[int]) -> int:
    """What an instruction computes. Registers have numbers from 0 to 2**64 - 1."""
    name, *hows = kind.split(".")
    if name == "selp":
        yes, no, condition = operands
        return yes if condition else no
    if name == "shfl":  # a thread reads another one's register, which is like its own
        return operands[0]
    numbers = [typed(operand, hows[-1]) for operand in operands]
    if name == "setp":
        holds = int(COMPARE[hows[0]](*numbers[:2]))
        return COMBINE[hows[1]](holds, operands[2]) if hows[1] in COMBINE else holds
    if name in ("shl", "shr"):
        numbers[1] = operands[1]
    result = COMPUTE[name](*numbers)
    width = bits(hows[-2] if name == "cvt" else hows[-1])
    if hows[0] == "wide":
        width *= 2
    elif hows[0] == "hi":
        result >>= width
    return result % 2**width


def bits(type_: str) -> int:
    """How many bits a type like u32 has."""
    return 1 if type_ == "pred" else int(type_[1:])


def typed(number: int, type_: str) -> int:
    """The number that a register has as a number of some type."""
    width = bits(type_)
    number %= 2**width
    is_negative = type_.startswith("s") and number >= 2 ** (width - 1)
    return number - 2**width if is_negative else number


# ---- Following threads ---------------------------------------------------------------------------
def follow(code: Code, registers: dict[str, int | None]) -> Counts:
    """Follows a thread to its end, and counts the instructions that it issues while none of its
    products is under way. `registers` has what it starts with, such as %tid.x."""
    number = 0  # of the line
    multiplies = False
    instructions = 0
    flops = 0
    unknown = 0
    for _ in range(MOST_STOPS):
        stop = code.stops[number]
        line = code.lines[stop]
        if not multiplies:
            instructions += stop + 1 - number
        number = stop + 1
        if line.kind == "ret":
            return Counts(instructions, flops, unknown)
        if line.flops:
            multiplies = True
            flops += line.flops
        elif line.waits:
            multiplies = False
        elif line.label:
            holds = registers.get(line.predicate) if line.predicate else 1
            if holds is None:
                unknown += 1
            elif bool(holds) != line.negated:
                number = code.labels[line.label]
        elif line.kind == "elect.sync":
            registers[line.out] = 1
        else:
            values = [x if isinstance(x, int) else registers.get(x) for x in line.operands]
            registers[line.out] = None if None in values else compute(line.kind, values)
    raise ValueError(f"a thread has not come to its end after {MOST_STOPS} stops")


def count_all(code: Code, grid: list[int], threads: int) -> Counts:
    """What all threads of a kernel do, by what some of its blocks do. The products are those of
    warpgroups, whose threads compute them together."""
    blocks = math.prod(grid)
    chosen = {i * blocks // BLOCKS for i in range(BLOCKS)}
    total = Counts()
    for block in chosen:
        place = {
            "%ctaid.x": block % grid[0],
            "%ctaid.y": block // grid[0] % grid[1],
            "%ctaid.z": block // (grid[0] * grid[1]),
        }
        warpgroups = []
        for thread in range(0, threads, WARPGROUP):
            warpgroups.append(follow(code, place | {"%tid.x": thread}))
        multipliers = [counts for counts in warpgroups if counts.flops]
        for counts in multipliers or warpgroups:
            total = total.plus(counts)
    for_all = blocks / len(chosen)
    return Counts(
        instructions=round(for_all * WARPGROUP * total.instructions),
        flops=round(for_all * total.flops),
        unknown=total.unknown,
    )


# ---- Dumps ---------------------------------------------------------------------------------------
# In what Mosaic's compiler prints after each of its passes: a constant, and how a kernel starts,
#     gpu.launch ... blocks(...) in (%a = %x, ...) threads(...) in (...) ... _size %n
# in a grid of %x blocks, with %n bytes of shared memory.
CONSTANT = re.compile(r"(%\w+) = arith\.constant (\d+) :")
LAUNCH = re.compile(
    r"gpu\.launch .*blocks\(.*?\) in \((?P<grid>.*?)\) threads\(.*?\) in \((?P<block>.*?)\)"
    r".* dynamic_shared_memory_size (?P<shared>%\w+)"
)


class Launch(NamedTuple):
    """How a kernel starts."""

    grid: list[int]  # blocks in x, y and z
    threads: int  # of a block
    shared: int  # bytes of shared memory of a block


def read_launch(lines: Iterable[str]) -> Launch:
    """Finds how a kernel starts, before its first pass."""
    constants = {}
    for line in lines:
        constant = CONSTANT.search(line)
        if constant:
            constants[constant[1]] = int(constant[2])
        launch = LAUNCH.search(line)
        if launch:
            grid = [constants[name] for name in re.findall(r"= (%\w+)", launch["grid"])]
            block = [constants[name] for name in re.findall(r"= (%\w+)", launch["block"])]
            return Launch(grid, math.prod(block), constants[launch["shared"]])
    raise ValueError("no kernel is launched")


def read_kernel(path: Path) -> MosaicKernel:
    """Reads a dumped kernel. The path is that of its PTX, such as mosaic_product_3.ptx, beside
    which are its passes and what ptxas has printed."""
    with path.with_suffix(".mlir-passes.log").open(encoding="utf-8") as passes:
        launch = read_launch(passes)
    log = path.with_suffix(".ptxas").read_text(encoding="utf-8")
    code = read_code(path.read_text(encoding="utf-8"))
    return MosaicKernel(
        name=path.stem.rpartition("_")[0],
        registers=int(re.search(r"Used (\d+) registers", log)[1]),
        spilled=int(re.search(r"(\d+) bytes spill stores", log)[1]),
        shared=launch.shared,
        blocks=math.prod(launch.grid),
        threads=launch.threads,
        counts=count_all(code, launch.grid, launch.threads),
    )


def calls(program: Program) -> Iterator[Kernel]:
    """The Mosaic kernels that a program launches, in order."""
    return (kernel for kernel in kernels(program) if kernel.instruction.mosaic())


def read_dump(folder: Path, program: Program, known: dict[str, MosaicKernel]) -> None:
    """Adds a program's kernels to the known ones, which are found by the hashes of their code.

    A process compiles every code once, in the order of the program, and numbers the files. Raises
    ValueError if these do not have the names and the operations of the program's kernels.
    """
    new = {}  # hash -> the first call
    for call in calls(program):
        code = call.instruction.kernel_hash()
        if code not in known:
            new.setdefault(code, call)
    paths = sorted(folder.glob("*.ptx"), key=lambda path: int(path.stem.rpartition("_")[2]))
    if len(paths) != len(new):
        raise ValueError(f"Mosaic wrote {len(paths)} kernels, but {len(new)} are new")
    for path, (code, call) in zip(paths, new.items(), strict=True):
        kernel = read_kernel(path)
        name = call.instruction.mosaic()
        is_product = call.instruction.product() == "gemm"
        flops = gemm_flops(call.instruction, call.computation) if is_product else 0
        # Some blocks have a tile more than others, so this is not exact.
        if kernel.name != name or not math.isclose(kernel.counts.flops, flops, rel_tol=0.1):
            found = f"{path.name}, of {kernel.counts.flops} operations"
            raise ValueError(f"{found}, is not {name}, of {flops} operations")
        known[code] = kernel


def issued(program: Program, known: dict[str, MosaicKernel]) -> dict[str, float]:
    """The instructions of every Mosaic kernel of a program, as in Program.issued."""
    found = {}
    for call in calls(program):
        kernel = known[call.instruction.kernel_hash()]
        found[call.instruction.name] = kernel.counts.instructions
    return found
