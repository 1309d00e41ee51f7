"""Says what a preset takes on this machine, and what run.sh would do: nothing is installed.

    ./run.sh plan [PRESET] [--price DOLLARS]

PRESET is record, record92, medium, small or tiny; without one, it is what ./run.sh trains here.
--price is what an hour of the machine costs.
"""

from __future__ import annotations

import math
import os
import re
import sys
from typing import NamedTuple

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))  # for PYTHONSAFEPATH=1
import fits  # noqa: E402
import machine  # noqa: E402 - it adds the folder of messages to the path
from machine import CPU, Decision, Device, Machine  # noqa: E402
from messages import Parser, nearest, one_line  # noqa: E402

Minutes = tuple  # the least and the most


# ---- Tables --------------------------------------------------------------------------------------
class Needs(NamedTuple):
    """What a preset takes on any machine, in GB."""

    tokens: float
    weights: float
    checkpoint: float
    download: str
    programs: int  # that compile on GPUs and TPUs
    memory: str = ""  # fits.py has that of large presets


FINEWEB = "{} GB of tokens from Hugging Face, and the Python packages"
PLANNED = "the compiler's plan; never run"
SOURCE = "the Python packages, whose source code is also the text"
NEEDS = {  # run/README.md, Disk: a test compares them with the presets
    "record": Needs(1.6, 2.5, 9.6, FINEWEB.format(1.6), 12),
    "record92": Needs(1.6, 34.0, 43.0, FINEWEB.format(1.6), 27),
    "medium": Needs(5.0, 3.3, 11.5, FINEWEB.format("5.0"), 28),
    "small": Needs(0.4, 0.2, 0.8, FINEWEB.format(0.4), 6, f"5.3 GB of one device ({PLANNED})"),
    "tiny": Needs(0.006, 0.022, 0.06, SOURCE, 12, "1.4 GB of RAM"),
}

# Estimates: minutes of training on one device, which n devices divide by n, where they are linked.
# By arithmetic from rates of products and of memory, with the slack of lab/predict.py. None of
# these devices has run one of these presets.
TRAINING = {
    "record": {
        "H100 80GB HBM3": (12, 15),
        "A100": (30, 30),
        "RTX 4090": (45, 55),
        "TPU v5e": (90, 120),
        "TPU v6e": (20, 30),
    },
    "record92": {"H100 80GB HBM3": (8, 10)},
    "medium": {"H100 80GB HBM3": (168, 208)},
}
UNLINKED = ("RTX 4090",)  # nobody has estimated several of them
OTHER_DEVICES = r"\bLaptop\b|\b4090 D\b|^GRID "  # slower ones with such a name
# Estimates of compiling the 12 programs of the record: with 64 cores, with 16 cores.
COMPILING = {"gpu": ((2, 3), (3, 5)), "tpu": ((3, 6),)}
CORES = (" (64 cores)", " (16 cores)")
TINY = (1, 2)  # minutes on a CPU, all but the installation: measured on two cores
# Estimates of minutes besides: pip or uv, and a GB of tokens at 100 or 20 MB/s.
INSTALLING = {"cpu": (0.2, 1), "gpu": (1, 4), "tpu": (0.5, 2)}
FETCHING = (0.2, 0.9)
IDEAS = "./run.sh idea lists patches for this preset; records/ideas/README.md has an order"


# ---- The lines -----------------------------------------------------------------------------------
def describe(found: Machine, decision: Decision, preset: str = "", price: float = 0) -> str:
    """A line for everything that run.sh decides, and for what the preset takes. What is refused
    takes no minutes and no dollars."""
    preset = preset or decision.preset
    wheels = decision.wheels
    pinned = f"{wheels.requirement}, in the versions of {wheels.constraints}"
    needs = NEEDS[preset]
    total = wheels.disk + needs.tokens + needs.weights
    disk = f"{total:.1f} GB: .venv {wheels.disk}, tokens {needs.tokens}, weights {needs.weights}"
    refused = machine.refusal([preset], found, decision)
    if refused and wheels == CPU and not os.environ.get("JAX_PLATFORMS"):
        refused += "; run/machines.md has the plans of other machines"
    lines = {
        "machine": describe_machine(found),
        "wheels": pinned if wheels != CPU else "jax for CPUs",
        "Python": f"3.{wheels.minor} or newer",
        "preset": describe_preset(preset, decision),
        "refused": refused,
        "flags": describe_flags(preset, found, decision),
        "variables": machine.assignments(decision.environment) or "none",
        "memory": describe_memory(preset, found, decision),
        "download": needs.download,
        "disk": f"{disk}; with --save_every, up to three checkpoints of {needs.checkpoint} GB; an "
        "interrupted run leaves one",
        "minutes": "" if refused else describe_minutes(preset, found, decision),
        "ideas": IDEAS if preset == "record" and not refused else "",
    }
    if price and refused:
        lines["dollars"] = "not known where it does not run; run/machines.md has eight H100s'"
    elif price:
        lines["dollars"] = describe_dollars(preset, found, decision, price)
        lines["paying"] = "ends when you hand the machine back; copy logs/ first: log and weights"
    return "\n".join(f"{title:<11}{text}" for title, text in lines.items() if text)


def describe_machine(found: Machine) -> str:
    """What was found. Of GPUs that differ, the facts are the first one's."""
    if not found.devices:
        return "no GPU or TPU for jax"
    first = found.devices[0]
    parts = [machine.counted(found.devices)]
    if first.mib:
        parts.append(f"{first.gigabytes:.1f} GB")
    if found.driver:
        parts.append(f"compute capability {first.capability}, driver {found.driver}")
    return ", ".join(parts)


def describe_preset(preset: str, decision: Decision) -> str:
    """Which one, and why; and what runs without a name, where that is another."""
    if preset == decision.preset:
        return f"{preset}, because {decision.why}"
    alone = f"./run.sh alone would train {decision.preset}, because {decision.why}"
    return f"{preset}, which you named; {alone}"


def describe_flags(preset: str, found: Machine, decision: Decision) -> str:
    """What the fit adds to the command line."""
    if preset not in fits.ROWS or decision.wheels == CPU:
        return "none"
    if decision.memory is None:
        return "those for the memory that JAX finds"
    flags = fits.fit(decision.memory, len(found.devices), preset)
    if flags is None:
        return "none with which it fits"
    title = "the record" if preset == "record" else preset
    if not flags:
        return f"none: {title} fits as it is"
    line = f"{fits.command_line(flags)}: JAX has {decision.memory:.1f} GB of each device"
    if "bigrams" in flags:
        line += f"; with a smaller bigram table, so this is not {title}"
    return line


def describe_memory(preset: str, found: Machine, decision: Decision) -> str:
    """What the preset needs of each device, as it is and with the last row of flags, and what JAX
    has. Without devices, what it needs of one and of eight."""
    needs = NEEDS[preset].memory
    if not needs:
        counts = [fits.listed(len(found.devices))] if found.devices else [1, 8]
        parts = []
        for count in counts:
            whole = fits.ROWS[preset][0][1][count]
            least = fits.least(count, preset)
            place = "one device" if count == 1 else f"each of {count} devices"
            fewer = f", or {least} with flags" if least < whole else ""
            parts.append(f"{whole} GB of {place}{fewer}")
        needs = "; ".join(parts)
    return needs + (f"; JAX may use {decision.memory:.1f} GB" if decision.memory else "")


def describe_minutes(preset: str, found: Machine, decision: Decision) -> str:
    """How long it takes, besides pip and the download."""
    if preset == "tiny":
        if decision.wheels == CPU:
            return "1 to 2, a third of one to train: measured on two cores of a CPU"
        return "not known: tiny has run on CPUs only, where it takes 1 to 2"
    if decision.wheels == CPU:
        return "more than a day (estimate)" if preset == "small" else "not known on a CPU"
    compiling = []
    for minutes, cores in zip(compiling_minutes(preset, found), CORES):  # noqa: B905 (Python 3.8)
        compiling.append(span(minutes) + (cores if found.driver else ""))
    training = training_minutes(preset, found.devices)
    known = span(training) if training else "not known"
    return f"training: {known}; compiling: {' or '.join(compiling)}; all are estimates"


def describe_dollars(preset: str, found: Machine, decision: Decision, price: float) -> str:
    """What the machine costs from the start of run.sh to the end of the run, and what is counted.
    Where nobody knows the minutes of training, what comes before it."""
    needs = NEEDS[preset]
    kind = "cpu" if decision.wheels == CPU else "gpu" if found.driver else "tpu"
    tokens = 0 if preset == "tiny" else needs.tokens
    setup = [a + b * tokens for a, b in zip(INSTALLING[kind], FETCHING)]  # noqa: B905 (Python 3.8)
    known = None
    if kind == "cpu":
        known = TINY if preset == "tiny" else None
    else:
        compiling = compiling_minutes(preset, found)
        setup = [setup[0] + compiling[0][0], setup[1] + compiling[-1][1]]
        known = training_minutes(preset, found.devices)
    counted = "installing, downloading" + (", compiling" if kind != "cpu" or known else "")
    if not known:
        counted = " and ".join(counted.rsplit(", ", 1))
    before = f"{dollar_span(setup, price)} at ${price:.2f} an hour (estimate)"
    if not known:
        return f"not known for training; {counted} cost {before}"
    whole = [setup[0] + known[0], setup[1] + known[1]]
    rounded = [round(x) for x in whole] if whole[0] > 10 else whole
    dollars = f"{dollar_span(whole, price)} at ${price:.2f} an hour (estimate)"
    return f"{dollars}: {span(rounded)} minutes of {counted} and training"


def compiling_minutes(preset: str, found: Machine) -> list[Minutes]:
    """Estimates of compiling a preset's programs, by their number: see COMPILING."""
    share = NEEDS[preset].programs / NEEDS["record"].programs
    rows = COMPILING["gpu" if found.driver else "tpu"]
    return [(low * share, high * share) for low, high in rows]


def training_minutes(preset: str, devices: list[Device]) -> Minutes | None:
    """An estimate of training on these devices; None where there is none: for devices that differ,
    slices of a GPU, and names and numbers that TRAINING does not have."""
    if len(set(devices)) != 1 or devices[0].mib is None:
        return None
    number = fits.listed(len(devices))
    title = devices[0].name
    for name, (low, high) in TRAINING.get(preset, {}).items():
        is_other = re.search(OTHER_DEVICES, title) or (number > 1 and name in UNLINKED)
        if name in title and not is_other:
            return (low / number, high / number)
    return None


def span(minutes: Minutes) -> str:
    """As "2 to 3", or "30" where both are equal."""
    words = [f"{round(x, 1):g}" for x in minutes]
    return " to ".join(dict.fromkeys(words))


def dollar_span(minutes: Minutes, price: float) -> str:
    """What so many minutes cost, as "about $1.10 to $2.30"."""
    words = [f"${max(price * x / 60, 0.01):.2f}" for x in minutes]
    return "about " + " to ".join(dict.fromkeys(words))


# ---- The command line ----------------------------------------------------------------------------
def price_of(text: str) -> float:
    """The number in --price. Raises ValueError."""
    price = float(text.lstrip("$"))
    if not 0 < price < math.inf:
        raise ValueError
    return price


def main(argv: list[str]) -> None:
    """Prints the plan."""
    cli = Parser(prog="./run.sh plan", description=__doc__)
    cli.add_argument("preset", nargs="?", default="", metavar="PRESET")
    cli.add_argument("--price", metavar="DOLLARS", help="what an hour costs")
    args = cli.parse_args(argv)
    if args.preset and args.preset not in NEEDS:
        near = nearest(args.preset, [*NEEDS]) or f": there are {', '.join(NEEDS)}"
        cli.error(f"there is no preset {args.preset!r}{near}")
    try:
        price = 0.0 if args.price is None else price_of(args.price)
    except ValueError:
        cli.error(f"--price {args.price!r} is no price: an hour costs more than 0 dollars, as 20")
    found = machine.find_machine()
    print(describe(found, machine.decide(found), args.preset, price))


if __name__ == "__main__":
    with one_line("run.sh plan"):
        main(sys.argv[1:])
