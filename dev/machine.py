"""Finds out what this machine is, and decides what run.sh does on it.

    python dev/machine.py         the decisions, as lines NAME=VALUE for run.sh
    ./run.sh plan                 the same for a person; nothing is installed or written

It runs before anything is installed, so Python 3.8 is enough, and there is no JAX. GPUs are those
of nvidia-smi that CUDA_VISIBLE_DEVICES leaves, TPUs those among /sys/bus/pci/devices (JNANO_PCI
names another folder, for tests).
"""

from __future__ import annotations

import ast
import os
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parent.parent


# ---- Tables --------------------------------------------------------------------------------------
class Wheels(NamedTuple):
    """A way to install JAX, for machines with at least this driver and compute capability."""

    name: str  # of the stamp .venv/installed-NAME
    requirement: str  # what pip installs besides requirements.txt
    disk: float  # GB of .venv
    driver: int = 0
    capability: float = 0.0

    @property
    def minor(self) -> int:
        """Of the oldest Python 3: jax 0.11.2 and later, for GPUs and TPUs, have left 3.11."""
        return 12 if self.requirement else 11

    @property
    def constraints(self) -> str:
        """The file of versions that jax leaves open; "" if there is none."""
        return f"dev/constraints/{self.name}.txt" if self.requirement else ""


CPU = Wheels("cpu", "", 0.7)
TPU = Wheels("tpu", "jax[tpu]", 1.3)
# The first row that fits. jax's docs/installation.md: CUDA 13 wheels support compute capability 7.5
# and later, with driver 580; CUDA 12 wheels 5.2 and later, with driver 525. But cuDNN has no code
# for GPUs before 7.5 since 9.11, and crashes on them (conda-forge/jaxlib-feedstock, pull request
# 330), while jax's CUDA 12 wheels accept cuDNN from 9.10.2 on: P100 (6.0) and V100 (7.0) get that
# one. By documents and metadata of wheels: tiny's programs compile for 6.0 and 7.0 with them, but
# nobody has run this on such a GPU.
CUDA = (
    Wheels("cuda13", "jax[cuda13]", 4.8, driver=580, capability=7.5),
    Wheels("cuda12", "jax[cuda12]", 5.9, driver=525, capability=7.5),
    Wheels("cuda12-volta", "jax[cuda12]", 5.8, driver=525, capability=5.2),
)

# By PCI device, as in jax/_src/hardware_utils.py: devices of a chip, and GiB of each, if known.
# Google's network cards have the same vendor, so that the vendor alone says nothing.
GOOGLE = "0x1ae0"
TPUS = {
    "0x0027": ("TPU v2 or v3", 2, None),
    "0x005e": ("TPU v4", 1, 32),
    "0x0062": ("TPU v5p", 1, 95),
    "0x0063": ("TPU v5e", 1, 16),
    "0x006f": ("TPU v6e", 1, 32),
    "0x0076": ("TPU7x", 2, 96),
    "0x0083": ("TPU8i", 1, None),
    "0x007c": ("TPU8t", 1, None),
}

RECORD = 8.0  # the least compute capability: bfloat16 and cuDNN's attention begin with Ampere
SMALL = 45_000  # MiB; a GPU that has less gives JAX FRACTION of them, and not JAX_FRACTION
FRACTION = 0.92
JAX_FRACTION = 0.75
USABLE = 0.98  # CUDA keeps up to 2 % of what nvidia-smi lists, libtpu about as much

# Estimates: minutes of training on one device, which n devices divide by n. By arithmetic from
# rates of products and of memory. None of these devices has run the record.
TRAINING = {
    "H100 80GB HBM3": (12, 15),
    "A100": (30, 30),
    "RTX 4090": (45, 55),
    "TPU v5e": (90, 120),
    "TPU v6e": (20, 30),
}
COMPILING = {"gpu": "2 to 3 (64 cores) or 3 to 5 (16 cores)", "tpu": "3 to 6"}
DISK = {"record": (1.6, 2.5), "tiny": (0.006, 0.014)}  # GB of tokens, of weights: dev/README.md


def fits() -> tuple:
    """FITS of train_gpt.py: rows of flags, and of the GB that JAX must have of each of 1, 2, 4, 8
    devices. Read from the text, because importing it needs JAX."""
    for node in ast.parse((ROOT / "train_gpt.py").read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") == "FITS":
            return ast.literal_eval(node.value)
    raise SystemExit("run.sh: train_gpt.py has no FITS, from which dev/machine.py chooses flags")


# ---- Facts ---------------------------------------------------------------------------------------
class Device(NamedTuple):
    """What JAX will count as one device."""

    name: str
    mib: float | None  # of memory; None if nothing lists it
    capability: float = 0.0  # CUDA's; 0 for a TPU

    @property
    def gigabytes(self) -> float:
        """Memory in 1e9 bytes."""
        return (self.mib or 0) * 2**20 / 1e9


class Machine(NamedTuple):
    """Its devices, all of one kind, or why there are none."""

    devices: list[Device]
    driver: int = 0  # NVIDIA's, 0 without GPUs
    why_none: str = ""


class NoGpu(Exception):
    """There is none; the message says why."""


def nvidia_smi(fields: str) -> list[list[str]]:
    """A row for each GPU. Raises NoGpu."""
    command = ["nvidia-smi", f"--query-gpu={fields}", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    except FileNotFoundError:
        raise NoGpu("this machine has no NVIDIA GPU and no TPU") from None
    except subprocess.TimeoutExpired:
        raise NoGpu("nvidia-smi has not answered in a minute") from None
    lines = (done.stdout + done.stderr).strip().splitlines() or ["it prints nothing"]
    if done.returncode or not done.stdout.strip():
        raise NoGpu(f"nvidia-smi shows no NVIDIA GPU: {lines[0]}")
    return [[cell.strip() for cell in line.split(",")] for line in done.stdout.splitlines()]


def nvidia_driver() -> int:
    """The first number of its version. Raises NoGpu, and SystemExit if it is too old."""
    version = nvidia_smi("driver_version")[0][0]
    driver = version.partition(".")[0]
    if not driver.isdigit():
        raise NoGpu(f"nvidia-smi shows no NVIDIA GPU: {version}")
    oldest = CUDA[-1].driver
    if int(driver) < oldest:
        raise SystemExit(
            f"run.sh: the NVIDIA driver, {driver}, is too old: jax needs {oldest} or newer"
        )
    return int(driver)


def visible_gpus() -> list[Device]:
    """GPUs that CUDA_VISIBLE_DEVICES leaves, which has numbers, or beginnings of UUIDs. A slice of
    a GPU (MIG) is in no list of GPUs, so that its memory is not known. Raises NoGpu."""
    gpus = {}
    rows = nvidia_smi("index,uuid,name,compute_cap,memory.total")
    for index, uuid, name, capability, mib in rows:
        memory = float(mib) if mib.isdigit() else None  # "[N/A]" where it is the host's, as of GB10
        gpus[index, uuid] = Device(name, memory, float(capability))
    wanted = os.environ.get("CUDA_VISIBLE_DEVICES")
    if wanted is None:
        return list(gpus.values())
    devices = []
    for word in wanted.replace(" ", "").split(","):
        if word.startswith("MIG-"):
            devices.append(next(iter(gpus.values()))._replace(mib=None))
        for (index, uuid), gpu in gpus.items():
            if word == index or (word.startswith("GPU-") and uuid.startswith(word)):
                devices.append(gpu)
    if not devices:
        raise NoGpu(f"CUDA_VISIBLE_DEVICES={wanted} leaves no NVIDIA GPU")
    return devices


def tpus() -> list[Device]:
    """Devices of the TPU chips among the PCI devices."""
    devices = []
    for folder in sorted(Path(os.environ.get("JNANO_PCI", "/sys/bus/pci/devices")).glob("*.0")):
        vendor, device = ((folder / name).read_text().strip() for name in ("vendor", "device"))
        if vendor == GOOGLE and device in TPUS:
            name, count, gib = TPUS[device]
            devices += count * [Device(name, gib and gib * 1024)]
    return devices


def find_machine() -> Machine:
    """The machine that this runs on."""
    try:
        return Machine(driver=nvidia_driver(), devices=visible_gpus())
    except NoGpu as reason:
        why = str(reason)
    if subprocess.check_output(["uname"], text=True).strip() == "Darwin":
        why = "jax has no wheels for the GPU of a Mac"
    return Machine(tpus(), why_none=why)


# ---- Decisions -----------------------------------------------------------------------------------
class Decision(NamedTuple):
    """What run.sh does on a machine."""

    wheels: Wheels
    preset: str
    why: str  # this preset
    environment: dict[str, str]
    memory: float | None = None  # GB that JAX has of the smallest device, if known
    flags: dict[str, Any] | None = None  # with which the record fits; None if it does not


def decide(machine: Machine) -> Decision:
    """Wheels, environment and flags, then the preset: `tiny` for the first reason that holds."""
    devices = machine.devices
    if not devices:
        return Decision(CPU, "tiny", machine.why_none, {})
    oldest = min(devices, key=lambda device: device.capability)
    smallest = min(devices, key=lambda device: device.mib or float("inf"))
    rows, number = fits(), listed(len(devices))

    wheels = cuda_wheels(machine.driver, oldest.capability) if machine.driver else TPU
    environment, fraction = gpu_environment(smallest) if wheels in CUDA else ({}, 1.0)
    memory = USABLE * fraction * smallest.gigabytes if smallest.mib else None
    flags = fit(rows, number, memory) if wheels != CPU else None

    age = f"{oldest.name} has compute capability {oldest.capability}, and"
    size = f"JAX has {memory or 0:.1f} GB of {smallest.name}, and"
    reasons = (
        (wheels == CPU, f"{age} jax needs {CUDA[-1].capability}"),
        (wheels in CUDA and oldest.capability < RECORD, f"{age} the record needs {RECORD}"),
        (flags is None, f"{size} the record needs {rows[-1][1][number]:.1f}"),
    )
    for holds, why in reasons:
        if holds:
            differ = "; CUDA_VISIBLE_DEVICES leaves GPUs out" if len(set(devices)) > 1 else ""
            return Decision(wheels, "tiny", why + differ, environment, memory, flags)
    why = f"this machine has {counted(devices)}"
    return Decision(wheels, "record", why, environment, memory, flags)


def cuda_wheels(driver: int, capability: float) -> Wheels:
    """The first row of CUDA that driver and GPU are good enough for, else those of the CPU."""
    for row in CUDA:
        if driver >= row.driver and capability >= row.capability:
            return row
    return CPU


def gpu_environment(smallest: Device) -> tuple[dict[str, str], float]:
    """What JAX should find in the environment, and the fraction of the memory that it takes then.
    What the user has set stays. JAX refuses to find the old and the new name of the fraction."""
    environment = {}
    if "JAX_PLATFORMS" not in os.environ:  # else JAX goes on with the CPU if CUDA does not start
        environment["JAX_PLATFORMS"] = "cuda,cpu"
    for name in ("XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION"):
        if os.environ.get(name):
            return environment, float(os.environ[name])
    if smallest.mib and smallest.mib < SMALL:
        environment["XLA_CLIENT_MEM_FRACTION"] = str(FRACTION)
        return environment, FRACTION
    return environment, JAX_FRACTION


def fit(rows: tuple, number: int, memory: float | None) -> dict[str, Any] | None:
    """The first flags of FITS for 1, 2, 4 or 8 devices of which JAX has so many GB, or None. In the
    same way train_gpt.py chooses, which asks JAX; it alone judges memory that nothing lists."""
    for flags, needs in rows:
        if memory is None or memory >= needs[number]:
            return flags
    return None


def listed(number: int) -> int:
    """The largest number of devices in FITS that is no larger."""
    return max(n for n in (1, 2, 4, 8) if n <= number)


# ---- Printing ------------------------------------------------------------------------------------
def for_shell(decision: Decision) -> str:
    """Lines that a shell evaluates."""
    wheels = decision.wheels
    others = [row.name for row in (*CUDA, TPU) if row != wheels]
    values = {
        "wheels": wheels.name,
        "requirement": wheels.requirement,
        "constraints": wheels.constraints,
        "other_wheels": " ".join(others) if wheels != CPU else "",  # not in the same .venv
        "minor": wheels.minor,
        "environment": assignments(decision.environment),
        "preset": decision.preset,
        "why": decision.why,
        "record_fits": "no" if decision.flags is None else "yes",
    }
    return "\n".join(f"{name}={shlex.quote(str(value))}" for name, value in values.items())


def for_person(machine: Machine, decision: Decision) -> str:
    """A line for everything that run.sh decides."""
    wheels = decision.wheels
    pinned = f"{wheels.requirement}, in the versions of {wheels.constraints}"
    tokens, weights = DISK[decision.preset]
    total = wheels.disk + tokens + weights
    lines = {
        "machine": describe(machine),
        "wheels": pinned if wheels != CPU else "jax for CPUs",
        "Python": f"3.{wheels.minor} or newer",
        "preset": f"{decision.preset}, because {decision.why}",
        "flags": describe_flags(len(machine.devices), decision),
        "variables": assignments(decision.environment) or "none",
        "disk": f"{total:.1f} GB: .venv {wheels.disk}, tokens {tokens}, weights {weights}",
        "minutes": describe_minutes(machine, decision),
    }
    return "\n".join(f"{title:<11}{text}" for title, text in lines.items())


def assignments(environment: dict[str, str]) -> str:
    """As words NAME=VALUE."""
    return " ".join(f"{name}={value}" for name, value in environment.items())


def counted(devices: list[Device]) -> str:
    """As "8 x NVIDIA H100 80GB HBM3", name after name."""
    names = [device.name for device in devices]
    return ", ".join(f"{names.count(name)} x {name}" for name in dict.fromkeys(names))


def describe(machine: Machine) -> str:
    """What was found. Of GPUs that differ, the facts are the first one's."""
    if not machine.devices:
        return "no GPU or TPU for jax"
    first = machine.devices[0]
    parts = [counted(machine.devices)]
    if first.mib:
        parts.append(f"{first.gigabytes:.1f} GB")
    if machine.driver:
        parts.append(f"compute capability {first.capability}, driver {machine.driver}")
    return ", ".join(parts)


def describe_flags(number: int, decision: Decision) -> str:
    """What the fit adds to the command line."""
    if decision.preset != "record":
        return "none"
    if decision.memory is None:
        return "those for the memory that JAX finds"
    flags = " ".join(f"--{name} {value}" for name, value in decision.flags.items())
    line = f"{flags or 'none'}: JAX has {decision.memory:.1f} GB of each device"
    if "bigrams" in decision.flags:
        line += "; with a smaller bigram table, so this is not the record"
    if number < 8 and number != listed(number):
        line += f"; but {number} do not divide the batch: choose {listed(number)} of them"
    return line


def describe_minutes(machine: Machine, decision: Decision) -> str:
    """How long it takes, besides pip and the download."""
    if decision.wheels == CPU:
        return "about 3, one of them to train: measured on two cores of a CPU"
    if decision.preset == "tiny":
        return "not known: tiny has run on CPUs only, where it takes about 3"
    training = "of training not known"
    for name, minutes in TRAINING.items():
        if name in machine.devices[0].name:
            each = [f"{round(x / listed(len(machine.devices)), 1):g}" for x in minutes]
            training = " to ".join(dict.fromkeys(each)) + " to train"
    return f"{training}, {COMPILING['gpu' if machine.driver else 'tpu']} to compile: estimates"


def main(argv: list[str]) -> None:
    """Prints lines for run.sh, or the plan."""
    if argv not in ([], ["plan"]):
        raise SystemExit("run.sh: plan takes no arguments")
    machine = find_machine()
    decision = decide(machine)
    print(for_person(machine, decision) if argv else for_shell(decision))


if __name__ == "__main__":
    main(sys.argv[1:])
