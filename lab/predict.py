"""Predicts how long a large preset trains on GPUs, from their rates alone: nothing is compiled.

records/gpu/h100_compile.md has the milliseconds that each step of the compiled program takes on
eight H100s, by kind of work, at the rates that lab/h100/estimate.py assumes. This scales them to
rates that were measured, and to another number of devices. It is a prediction: no step was timed.
"""

from __future__ import annotations

import collections
import math
import re
import sys
from pathlib import Path
from typing import NamedTuple

FOLDER = Path(__file__).resolve().parent
sys.path.append(str(FOLDER))  # for h100
from h100 import estimate  # noqa: E402

import train_gpt  # noqa: E402
from train_gpt import Config  # noqa: E402

PAGES = {"record": "h100_compile.md", "medium": "h100_compile_medium.md"}
DEVICES = 8  # for which the pages have the work of a step
# What decides how much work a step is. Other fields, and how a step is cut into sequences, do not.
SIZES = ("layers", "D", "H", "F", "R", "vocab", "ngrams")
# Upstream's steps are faster than the estimate and other things may be slower: zeros that XLA
# writes, products that miss their rates, clocks that fall. run/README.md and run/plan.py have the
# same slack: 90 to 115 s where the estimate is 93 s.
SLOWER = 1.2


class Rates(NamedTuple):
    """What the slowest device does in a second."""

    product: float  # operations in bfloat16
    head: float  # operations in the format of the head
    memory: float  # bytes read and written
    links: float  # bytes received while all devices gather; not used for one device


def tables(page: str) -> dict[str, list[dict[str, str]]]:
    """The rows of a Markdown page's tables by the title of their section, each row by its column's
    title."""
    found = collections.defaultdict(list)
    section = ""
    columns = []
    for line in page.splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if line.startswith("#"):
            section = line.strip("# ")
        if not line.startswith("|"):
            columns = []
        elif not columns:
            columns = cells
        elif not re.fullmatch(r"[\s|:-]+", line):
            found[section].append(dict(zip(columns, cells, strict=True)))
    return found


def work_of_steps(preset: str) -> dict[tuple[int, str], dict[str, float]]:
    """For a stage and the kind of a step, "first" or "second", the milliseconds of its work on
    DEVICES H100s by estimate.PARTS, and "sent", the gigabytes that a device sends."""
    page = (FOLDER.parent / "records/gpu" / PAGES[preset]).read_text()
    found = tables(page)
    steps = {}
    for row in found["Milliseconds of a step, estimated"]:
        if row["step"] in ("first", "second"):
            key = int(row["stage"]), row["step"]
            steps[key] = {part: float(row[part]) for part in estimate.PARTS}
    for row in found["Programs"]:
        for stage in row["stages"].split(", "):
            step = steps.get((int(stage), row["program"]))
            if step and int(row["devices"]) == DEVICES:
                step["sent"] = float(row["sent GB"])
    return steps


def compiled_preset(c: Config) -> str:
    """The preset whose programs were compiled and do as much work as this configuration's; "" if
    there is none."""
    for preset in PAGES:
        of_preset = train_gpt.PRESETS[preset]
        same_sizes = all(getattr(c, name) == getattr(of_preset, name) for name in SIZES)
        tokens = [[stage.tokens for stage in config.stages] for config in (c, of_preset)]
        if same_sizes and tokens[0] == tokens[1]:
            return preset
    return ""


def training_seconds(c: Config, devices: int, rates: Rates) -> dict[str, float] | None:
    """The seconds of a whole run by kind of work; None if no such program was compiled."""
    preset = compiled_preset(c)
    if not preset:
        return None
    work = work_of_steps(preset)
    numbers = collections.Counter()
    for step in range(c.total_steps):
        kind = "second" if c.is_adam_step(step) else "first"
        numbers[int(c.stage_at(step)), kind] += 1
    total = collections.Counter()
    for (stage, kind), number in numbers.items():
        tokens = c.stages[stage].tokens
        parts = step_seconds(c, work[stage, kind], tokens, devices, rates)
        for part, seconds in parts.items():
            total[part] += number * seconds
    return dict(total)


def step_seconds(
    c: Config, work: dict[str, float], tokens: int, devices: int, rates: Rates
) -> dict[str, float]:
    """The seconds of a step by kind of work. Fewer devices do more each. What is sent is hidden
    behind the work, unless it takes longer than all of it."""
    share = DEVICES / devices
    product = estimate.BFLOAT16 / rates.product
    head_ms = head_seconds(c, tokens / DEVICES, estimate.FP8, True) * 1e3
    parts = {
        "products": share * (work["gemm"] - head_ms) * product / 1e3,
        "head": head_seconds(c, tokens / devices, rates.head, "float8" in c.head_forward),
        "attention": share * work["attention"] * product / 1e3,
        "other kernels": share * work["other"] * (estimate.MEMORY / rates.memory) / 1e3,
        "launches": share * work["launches"] / 1e3,
    }
    if devices > 1:
        # An array that is gathered comes from all devices but one.
        sent = (1 - 1 / devices) / (1 - 1 / DEVICES)
        waiting = work["exposed"] * estimate.LINKS / rates.links + work["stolen"]
        links = 1e9 * work["sent"] * sent / rates.links
        parts["links"] = max(sent * waiting / 1e3, links - sum(parts.values()))
    return parts


def head_seconds(c: Config, tokens: float, rate: float, is_fp8: bool) -> float:
    """The seconds of the head's three products. In FP8, the two of the backward pass have operands
    of two formats, which is slower."""
    flops = 2 * tokens * train_gpt.padded_vocab(c) * c.D
    backward = rate * estimate.FP8_MIXED / estimate.FP8 if is_fp8 else rate
    return flops / rate + 2 * flops / backward


def sentence(c: Config, devices: int, parts: dict[str, float]) -> str:
    """What training_seconds() found, in words."""
    seconds = sum(parts.values())
    shares = [f"{part} {value / seconds:.0%}" for part, value in parts.items() if value > 0]
    number = "1 device" if devices == 1 else f"{devices} devices"
    goal = f"the end of its {c.total_steps} steps"
    if c.target and c.total_steps == train_gpt.PRESETS[compiled_preset(c)].total_steps:
        goal = f"validation loss {c.target:g}"
    return (
        f"predicted time of training to {goal}: {interval(seconds)} on {number}, from these rates "
        f"and the compiled program's work ({', '.join(shares)}); no step was timed"
    )


def interval(seconds: float) -> str:
    """From an estimate to SLOWER times as much, as "90 to 115 s" or "12 to 15 minutes"."""
    step, unit, name = (5, 1, "s") if seconds < 300 else (60, 60, "minutes")
    least = math.floor(seconds / step) * step // unit
    most = math.ceil(SLOWER * seconds / step) * step // unit
    return f"{least} to {most} {name}"
