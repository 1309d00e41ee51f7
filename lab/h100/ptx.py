"""Counts the instructions that the threads of XLA's kernels issue, from their PTX.

All branches count, so the count is an upper bound. A loop that ends in a conditional jump counts as
often as thread 0 runs it. To find out how often that is, three instructions on integers are
interpreted: mov, add and setp. A loop that depends on anything else counts once.
"""

import math
import operator
import re
from collections import defaultdict
from pathlib import Path

ROUNDS = 4096  # a loop that runs longer counts once
LABEL = "$"
# mov.b32 a, b;  add.s32 a, b, c;  setp.lt.s32 a, b, c;  where b and c are registers or numbers.
NUMBER = r"%\w+|-?\d+"
COUNTING = re.compile(
    rf"(?P<kind>mov|add|setp)\.(?P<how>\w+)(?:\.(?P<type>\w+))?\s+"
    rf"(?P<out>%\w+), (?P<a>{NUMBER})(?:, (?P<b>{NUMBER}))?;"
)
JUMP = re.compile(r"@(?P<negated>!?)(?P<predicate>%p\d+) bra\s+(?P<label>\$\w+);")
COMPARE = {
    "lt": operator.lt,
    "le": operator.le,
    "gt": operator.gt,
    "ge": operator.ge,
    "eq": operator.eq,
    "ne": operator.ne,
}


def count_instructions(lines: list[str]) -> int:
    """Instructions that a thread issues, from the lines of a kernel's code and its labels."""
    labels = {line[:-1]: i for i, line in enumerate(lines) if line.startswith(LABEL)}
    counts = [1] * len(lines)  # how often a thread runs each line
    for i, line in enumerate(lines):
        jump = JUMP.match(line)
        if jump and labels[jump["label"]] < i:
            start = labels[jump["label"]]
            repeats_if = not jump["negated"]
            rounds = count_rounds(lines[:start], lines[start:i], jump["predicate"], repeats_if)
            for inside in range(start, i + 1):
                counts[inside] *= rounds
    return sum(n for n, line in zip(counts, lines, strict=True) if not line.startswith(LABEL))


def count_rounds(before: list[str], loop: list[str], predicate: str, repeats_if: bool) -> int:
    """How often thread 0 runs a loop: it repeats while the predicate is `repeats_if`."""
    registers = defaultdict(int)
    interpret(before, registers)
    for rounds in range(1, ROUNDS):
        interpret(loop, registers)
        repeats = bool(registers[predicate]) == repeats_if
        if not repeats:
            return rounds
    return 1


def interpret(lines: list[str], registers: dict[str, int]) -> None:
    """Runs those instructions that may count the rounds of a loop."""
    for line in lines:
        found = COUNTING.match(line)
        if not found:
            continue
        a = value(found["a"], registers)
        b = value(found["b"], registers)
        type_ = found["type"] or found["how"]  # `how` is a comparison in setp.lt.s32, else the type
        width = re.search(r"\d+", type_)
        modulus = 2 ** int(width[0]) if width else 2  # a predicate (.pred) has no width
        if found["kind"] == "setp":
            signed = found["type"] is not None and found["type"].startswith("s")
            compare = COMPARE.get(found["how"], operator.lt)
            a = wrap(a, modulus, signed)
            b = wrap(b, modulus, signed)
            registers[found["out"]] = int(compare(a, b))
        else:
            registers[found["out"]] = (a + b) % modulus  # a mov has no b, which counts as 0


def value(operand: str | None, registers: dict[str, int]) -> int:
    """The value of a register or of a number; 0 where there is no operand."""
    if operand is None:
        return 0
    if operand.startswith("%"):
        return registers[operand]
    return int(operand)


def wrap(number: int, modulus: int, signed: bool) -> int:
    """What a register that can have `modulus` values makes of a number."""
    lowest = -modulus // 2 if signed else 0
    return (number - lowest) % modulus + lowest


def read_dump(folder: Path) -> dict[str, float]:
    """Instructions that all threads of a kernel issue, by kernel, from what XLA dumps of a program:
    the code of its functions, the names of its launches, and the threads of each launch."""
    per_thread = {}  # function -> instructions that one thread issues
    for path in folder.glob("*.ptx"):
        entries = re.findall(r"\.entry (\w+)\(.*?\n\{(.*?)\n\}", path.read_text(), re.S)
        for function, code in entries:
            lines = [line.strip() for line in code.splitlines()]
            lines = [line for line in lines if re.match(r"[a-z@$]", line)]
            per_thread[function] = count_instructions(lines)
    (metadata,) = folder.glob("*thunk_metadata.txt")
    (sequence,) = folder.glob("*thunk_sequence.txt")
    named = r'profile_annotation: "([^"]+)"\s+thunk_id: (\d+)'
    names = {number: name for name, number in re.findall(named, metadata.read_text())}
    launched = r"^\s*(\d+): kCustomKernel .*?\] (\w+) grid: \[(.*?)\] threads: \[(.*?)\]"
    issued = {}
    for number, function, grid, block in re.findall(launched, sequence.read_text(), re.M):
        threads = math.prod(int(n) for n in f"{grid},{block}".split(","))
        issued[names[number.lstrip("0")]] = threads * per_thread[function]
    return issued
