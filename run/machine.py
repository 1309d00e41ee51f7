"""What this machine is, and what ./run.sh does on it. There is no JAX when this is asked.

    python run/machine.py decide            a line for run.sh: wheels, preset, fraction and why
    python run/machine.py plan [PRESET]     the same for a person, in three lines

When a run starts, run/launch.py asks fit() for the flags with which it fits the memory.
"""

from __future__ import annotations

import math
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

# ---- Tables --------------------------------------------------------------------------------------
# Files of run/wheels/ and the oldest driver for each, by jax's docs/installation.md: the first that
# fits is installed.
DRIVERS = (("cuda13", 580), ("cuda12", 525))
DISK = {"cpu": 0.7, "tpu": 1.3, "cuda13": 4.8, "cuda12": 5.9}  # GB of .venv
TURING = 7.5  # cuDNN crashes below (conda-forge/jaxlib-feedstock, pull request 330)
AMPERE = 8.0  # the capability from which on there are bfloat16 and cuDNN's attention
USABLE = 0.98  # CUDA keeps up to 2 % of what nvidia-smi lists, libtpu about as much
SMALL = 47.0  # GB; JAX takes three quarters of a GPU's memory, and 0.92 of those below
# GiB of each TPU chip by PCI device, as in jax/_src/hardware_utils.py: v4, v5p, v5e, v6e, 7x.
TPUS = {"0x005e": 32, "0x0062": 95, "0x0063": 16, "0x006f": 32, "0x0076": 192}
# Flags, and the gigabytes that JAX must have of each of 1, 2, 4 and 8 devices with them. They were
# compiled by `lab/compile_8xh100.py --memory`, and never ran. With twice the batch, a step has as
# many tokens, in sequences half as long. The record's last row is another model, because its n-gram
# table is smaller.
FITS = {
    "record": (
        ({}, {1: 34.5, 2: 28.5, 4: 26.0, 8: 22.0}),
        ({"batch": 16, "head_chunk": 8192}, {1: 28.5, 2: 23.3, 4: 21.0, 8: 17.5}),
        ({"batch": 32, "head_chunk": 4096, "val_T": 65536}, {1: 20.5, 2: 14.5, 4: 12.0, 8: 11.0}),
        (
            {"batch": 64, "head_chunk": 2048, "val_T": 32768, "ngram_buckets": 65536},
            {1: 14.5, 2: 11.0, 4: 9.0, 8: 8.0},
        ),
    ),
    "medium": (
        ({}, {1: 67.0, 2: 58.5, 4: 55.0, 8: 48.5}),
        ({"batch": 16, "head_chunk": 8192}, {1: 44.0, 2: 36.0, 4: 32.0, 8: 30.5}),
        ({"batch": 32, "head_chunk": 4096, "val_T": 65536}, {1: 32.5, 2: 24.5, 4: 21.0, 8: 19.0}),
    ),
}
# GB of tokens and weights, of memory, and minutes, which are estimates: no GPU has run a preset.
NEEDS = {
    "record": (4.1, "22 GB of each of 8 devices, 34.5 of one", "2 on 8 H100s, 15 on one"),
    "medium": (8.3, "48.5 GB of each of 8 devices, 67 of one", "26 on 8 H100s"),
    "small": (0.6, "5.3 GB of one device", "nobody knows how many"),
    "tiny": (0.03, "1.4 GB of RAM", "1 to 2 with all that comes before, on a CPU"),
}


# ---- Memory --------------------------------------------------------------------------------------
def fit(preset: str, memory_gb: float, devices: int) -> dict[str, int] | None:
    """The flags of the preset's first row in FITS for which so many gigabytes of each device are
    enough; {} for a preset without rows; None if the memory is too small for all of them."""
    if preset not in FITS:
        return {}
    listed = max(number for number in (1, 2, 4, 8) if number <= devices)
    for flags, gigabytes in FITS[preset]:
        if memory_gb >= gigabytes[listed]:
            return flags
    return None


def command_line(flags: dict[str, int]) -> str:
    """Flags as words."""
    return " ".join(f"--{name} {value}" for name, value in flags.items())


# ---- Devices -------------------------------------------------------------------------------------
class Device(NamedTuple):
    """What JAX will count as one device."""

    name: str
    gigabytes: float  # infinite if nothing lists them
    capability: float = math.inf  # CUDA's


class Machine(NamedTuple):
    """The devices that JAX will see, and what ./run.sh does with them."""

    devices: list[Device]
    wheels: str  # a key of DISK
    fraction: float  # of a GPU's memory that JAX takes
    memory: float  # GB that JAX has of the smallest device
    preset: str
    why: str  # this preset


def find_machine() -> Machine:
    """The machine that this runs on; where JAX_PLATFORMS is cpu, one without GPUs and TPUs."""
    gpus, driver = nvidia()
    devices = gpus or tpus()
    if not devices or os.environ.get("JAX_PLATFORMS") == "cpu":
        why = "nvidia-smi and PCI show no GPU or TPU, or JAX_PLATFORMS or CUDA_VISIBLE_DEVICES"
        return Machine([], "cpu", 1.0, math.inf, "tiny", f"{why} hides it")
    smallest = min(device.gigabytes for device in devices)
    capability = min(device.capability for device in devices)
    fraction = 0.92 if smallest < SMALL else 0.75
    memory = USABLE * smallest
    wheels = "tpu"
    if gpus:
        memory *= fraction
        fitting = [name for name, oldest in DRIVERS if driver >= oldest]
        wheels = fitting[0] if fitting and capability >= TURING else "cpu"
    preset = "record"
    why = f"this machine has {len(devices)} x {devices[0].name}"
    if wheels == "cpu" or capability < AMPERE or fit("record", memory, len(devices)) is None:
        preset = "tiny"
        why += ": driver, compute capability or memory is too little for the record"
    return Machine(devices, wheels, fraction, memory, preset, why)


def nvidia() -> tuple[list[Device], int]:
    """The GPUs that nvidia-smi lists and CUDA_VISIBLE_DEVICES shows, by index or UUID, and the
    driver. A lost GPU has words where others have numbers, and does not count."""
    fields = "index,uuid,name,compute_cap,driver_version,memory.total"
    command = ["nvidia-smi", f"--query-gpu={fields}", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    except (OSError, subprocess.TimeoutExpired):
        return [], 0
    rows = re.findall(r"(?m)^(\d+), (.+), (.+), ([\d.]+), (\d+)[\d.]*, (.+)$", done.stdout)
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    devices, driver = [], 0
    for index, uuid, name, capability, version, mib in rows:
        driver = int(version)
        gigabytes = float(mib) * 2**20 / 1e9 if mib.isdigit() else math.inf
        if visible is None or index in visible.split(",") or uuid in visible:
            devices.append(Device(name, gigabytes, float(capability)))
    return devices, driver


def tpus() -> list[Device]:
    """The TPU chips on the PCI bus."""
    devices = []
    for folder in sorted(Path("/sys/bus/pci/devices").glob("*.0")):
        vendor, device = ((folder / name).read_text().strip() for name in ("vendor", "device"))
        if vendor == "0x1ae0" and device in TPUS:
            devices.append(Device(f"TPU of {TPUS[device]} GiB", TPUS[device] * 2**30 / 1e9))
    return devices


# ---- The command line ----------------------------------------------------------------------------
def plan(machine: Machine, preset: str) -> str:
    """Three lines on what ./run.sh PRESET does on a machine, and what that takes."""
    size, memory, minutes = NEEDS[preset]
    count = len(machine.devices)
    names = "no GPU or TPU that JAX can use"
    if count:
        names = f"{count} x {machine.devices[0].name}, JAX has {machine.memory:.1f} GB of each"
    flags = fit(preset, machine.memory if count else 0, max(count, 1))
    does = "does not fit" if flags is None else f"with {command_line(flags) or 'its own flags'}"
    return (
        f"machine  {names}; packages for {machine.wheels}\n"
        f"run      {preset} {does}; ./run.sh alone trains {machine.preset}, as {machine.why}\n"
        f"needs    {DISK[machine.wheels] + size:.1f} GB of disk; {memory}; minutes: {minutes}"
    )


def main(argv: list[str]) -> None:
    """Prints the decision, or the plan of a preset; status 2 if there is no such preset."""
    machine = find_machine()
    preset = (argv[1:] or [machine.preset])[0]
    if argv[0] == "decide":
        print(machine.wheels, machine.preset, machine.fraction, machine.why)
    elif preset in NEEDS:
        print(plan(machine, preset))
    else:
        print(f"run.sh: plan knows {', '.join(NEEDS)}, and no {preset!r}", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main(sys.argv[1:])
