"""Reads the text of a program that XLA compiled: its instructions, and the kernels it launches."""

import math
import re
from collections import deque
from collections.abc import Callable, Iterator
from typing import NamedTuple

# fmt: off
BYTES = {
    "pred": 1, "s8": 1, "u8": 1, "f8e4m3fn": 1, "f8e5m2": 1,
    "s16": 2, "u16": 2, "bf16": 2, "f16": 2,
    "s32": 4, "u32": 4, "f32": 4,
    "s64": 8, "u64": 8, "f64": 8,
}
COLLECTIVES = ("all-", "reduce-scatter", "collective-", "ragged-")  # how their names begin
NO_KERNEL = {
    "parameter", "tuple", "get-tuple-element", "bitcast", "constant", "after-all", "opt-barrier",
    "partition-id", "replica-id",
}
# fmt: on
FUSIONS = {"fusion", "fusion-start"}
HEADER = re.compile(r"(?P<entry>ENTRY )?%?(?P<name>[\w.\-]+) \(.*\) -> .*\{$")  # of a computation
INSTRUCTION = re.compile(r"\s+(ROOT )?%?([\w.\-]+) = (.*?) ([\w\-]+)\(([^)]*)\)(.*)")


class Instruction(NamedTuple):
    """A line of a computation."""

    name: str
    kind: str
    shapes: list[tuple[str, tuple[int, ...]]]  # (dtype, dimensions) of every array it returns
    operands: list[str]
    attributes: str  # what follows the operands; those of a parameter begin with its number
    root: bool = False

    def dtype(self) -> str:
        """Format of its first array."""
        return self.shapes[0][0]

    def dims(self) -> tuple[int, ...]:
        """Dimensions of its first array."""
        return self.shapes[0][1]

    def elements(self) -> int:
        """Elements of all its arrays."""
        return sum(math.prod(dims) for _, dims in self.shapes)

    def array(self) -> str:
        """Format and dimensions of its first array, as text."""
        return f"{self.dtype()}[{','.join(map(str, self.dims()))}]"

    def bytes(self) -> int:
        """Bytes of all its arrays."""
        return sum(math.prod(dims) * BYTES.get(dtype, 0) for dtype, dims in self.shapes)

    def called(self) -> str:
        """The name of the computation it runs."""
        return re.search(r"(?:calls|body|to_apply)=%?([\w.\-]+)", self.attributes)[1]

    def trip_count(self) -> int | None:
        """How often a loop runs, or None if the compiler does not know it."""
        found = re.search(r'"known_trip_count":\{"n":"(\d+)"', self.attributes)
        return int(found[1]) if found else None

    def collective(self) -> str | None:
        """The collective that it is or starts, or None."""
        if not self.kind.startswith(COLLECTIVES) or self.kind.endswith("-done"):
            return None
        return self.kind.removesuffix("-start")

    def mosaic(self) -> str | None:
        """The name of a Mosaic kernel, which is that of the function that is its body, or None. In
        op_name, the name of the primitive follows it."""
        if self.kind != "custom-call" or '"mosaic_gpu' not in self.attributes:
            return None
        return re.search(r'op_name="([^"]*)"', self.attributes)[1].split("/")[-2]

    def kernel_hash(self) -> str:
        """What tells Mosaic kernels apart: a hash of the code."""
        return re.search(r'kernel_hash = "([^"]*)"', self.attributes)[1]

    def product(self) -> str | None:
        """ "gemm" for a matrix product by cuBLAS, Triton or Mosaic, "attention" for cuDNN's.
        A Mosaic kernel is a product if the code in its attributes runs the tensor cores."""
        if self.kind == "dot":
            return "gemm"
        if self.kind == "custom-call" and '"__cublas' in self.attributes:
            return "gemm"
        if self.mosaic() and "wgmma" in self.attributes:
            return "gemm"
        if '"__cudnn$fmha' in self.attributes:
            return "attention"
        return None


Computation = dict[str, Instruction]  # by name, in the order of the schedule


class Program(NamedTuple):
    """A compiled program."""

    entry: str
    computations: dict[str, Computation]
    overwritten: dict[int, str]  # number of a result -> the parameter whose memory it takes
    frames: dict[str, list[str]]  # stack frame -> functions of train_gpt.py, innermost first
    devices: int = 8
    issued: dict[str, float] = {}  # kernel -> instructions its threads issue: ptx.py, mosaic.py

    def functions(self, instruction: Instruction) -> list[str]:
        """The functions of train_gpt.py that made an instruction, innermost first."""
        frame = re.search(r"stack_frame_id=(\d+)", instruction.attributes)
        return self.frames.get(frame[1], []) if frame else []


class Kernel(NamedTuple):
    """Something the program launches."""

    kind: str  # gemm, attention, collective, done or other
    instruction: Instruction
    computation: Computation  # where it stands
    runs: int


def parse(text: str, devices: int = 8, issued: dict[str, float] | None = None) -> Program:
    """Reads the text of a compiled program."""
    entry = ""
    computations = {}
    computation = None
    parameters = {}  # number -> name; the entry comes last, so its parameters remain
    for line in text.splitlines():
        header = HEADER.match(line)
        if header:
            computation = {}
            computations[header["name"]] = computation
            if header["entry"]:
                entry = header["name"]
        elif line.startswith("}"):
            computation = None
        elif computation is not None:
            instruction = parse_instruction(line)
            if instruction:
                computation[instruction.name] = instruction
                if instruction.kind == "parameter":
                    parameters[instruction.attributes.split()[0]] = instruction.name
    # The first line has `{result}: (parameter, {}, may-alias)` for every parameter that is donated.
    first_line = text.split("\n", 1)[0]
    aliases = re.findall(r"\{(\d+)\}: \((\d+), ", first_line)
    overwritten = {int(result): parameters[number] for result, number in aliases}
    return Program(entry, computations, overwritten, parse_frames(text), devices, issued or {})


def parse_instruction(line: str) -> Instruction | None:
    """Reads `ROOT %name = shape kind(operands), attributes`; None if the line is not one."""
    found = INSTRUCTION.match(line)
    if not found:
        return None
    root, name, shape, kind, operands, attributes = found.groups()
    shapes = []
    for dtype, dims in re.findall(r"\b([a-z]\w*)\[([\d,]*)\]", shape):
        shapes.append((dtype, tuple(int(n) for n in dims.split(",") if n)))
    if kind == "parameter":
        attributes = f"{operands} {attributes}"
    names = re.findall(r"%([\w.\-]+)", operands)
    return Instruction(name, kind, shapes, names, attributes, bool(root))


def parse_frames(text: str) -> dict[str, list[str]]:
    """The functions of train_gpt.py on every stack frame, innermost first. The tables above the
    computations have them, in rows like `3 {file_name_id=1 function_name_id=3 line=9}`."""
    tables = {}
    for paragraph in text.split("\n\n"):
        title = paragraph.split("\n")[0]
        tables[title] = dict(re.findall(r"^(\d+) (.*)", paragraph, re.M))
    functions = {}
    for frame, row in tables.get("StackFrames", {}).items():
        fields = row_fields(row)
        location = row_fields(tables["FileLocations"][fields["file_location_id"]])
        # The number of a parent is written plus one; without a parent, the field is 1 or absent.
        parent = int(fields.get("parent_frame_id", 1)) - 1
        functions[frame] = functions.get(str(parent), [])
        if "train_gpt.py" in tables["FileNames"][location["file_name_id"]]:
            function = tables["FunctionNames"][location["function_name_id"]]
            name = function.strip('"').split(".<locals>")[0]
            functions[frame] = [name, *functions[frame]]
    return functions


def row_fields(row: str) -> dict[str, str]:
    """The fields of a row of these tables, by name."""
    return dict(re.findall(r"(\w+)=(\d+)", row))


# ---- Walking a program ---------------------------------------------------------------------------
Neighbors = Callable[[str, Computation], list[str]]


def operands_of(name: str, computation: Computation) -> list[str]:
    """The values that an instruction reads."""
    return computation[name].operands


def users_of(name: str, computation: Computation) -> list[str]:
    """The instructions that read a value."""
    return [other.name for other in computation.values() if name in other.operands]


def walk(
    start: str, computation: Computation, neighbors: Neighbors, through: set[str] | None = None
) -> Iterator[Instruction]:
    """Yields an instruction, its neighbors, theirs, and so on: the nearest first.

    With `through`, the walk goes on only from the start and from instructions of these kinds.
    """
    queue = deque([start])
    met = {start}
    while queue:
        name = queue.popleft()
        yield computation[name]
        if through is not None and name != start and computation[name].kind not in through:
            continue
        for neighbor in neighbors(name, computation):
            if neighbor not in met:
                met.add(neighbor)
                queue.append(neighbor)


def inner(
    program: Program, instruction: Instruction, computation: Computation
) -> list[tuple[Instruction, Computation]]:
    """The instructions that a fusion consists of, and the computation of each; for any other
    instruction, the instruction itself."""
    if instruction.kind not in FUSIONS:
        return [(instruction, computation)]
    found = []
    fused = program.computations[instruction.called()]
    for part in fused.values():
        found += inner(program, part, fused)
    return found


def kernels(program: Program, computation: str = "", runs: int = 1) -> Iterator[Kernel]:
    """Yields what the program launches, in order. A kernel in a loop comes once, with the number of
    its runs."""
    instructions = program.computations[computation or program.entry]
    for instruction in instructions.values():
        if instruction.collective():
            yield Kernel("collective", instruction, instructions, runs)
        elif instruction.kind in ("while", "call"):
            trips = instruction.trip_count() or 1
            yield from kernels(program, instruction.called(), runs * trips)
        elif instruction.kind.endswith("-done"):
            yield Kernel("done", instruction, instructions, runs)
        elif instruction.kind not in NO_KERNEL:
            products = {part.product() for part, _ in inner(program, instruction, instructions)}
            kind = "other"
            if "gemm" in products:
                kind = "gemm"
            elif "attention" in products:
                kind = "attention"
            yield Kernel(kind, instruction, instructions, runs)
