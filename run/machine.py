"""What this machine is, and what ./run.sh does on it. There is no JAX when this is asked:
`decide` prints a line for run.sh, with wheels, preset, fraction and why, and `plan [PRESET]` the
same for a person, in three lines.
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
# Flags, and the gigabytes that JAX must have of each of 1, 2, 4 and 8 devices with them. They were
# compiled by `lab/compile_8xh100.py --memory`, and never ran. With twice the batch, a step has as
# many tokens, in sequences half as long. The record's last row is another model, because its n-gram
# table is smaller.
FITS = {
    "record": (
        ("", (34.5, 28.5, 26, 22)),
        ("--batch 16 --head_chunk 8192", (28.5, 23.3, 21, 17.5)),
        ("--batch 32 --head_chunk 4096 --val_T 65536", (20.5, 14.5, 12, 11)),
        ("--batch 64 --head_chunk 2048 --val_T 32768 --ngram_buckets 65536", (14.5, 11, 9, 8)),
    ),
    "medium": (
        ("", (67, 58.5, 55, 48.5)),
        ("--batch 16 --head_chunk 8192", (44, 36, 32, 30.5)),
        ("--batch 32 --head_chunk 4096 --val_T 65536", (32.5, 24.5, 21, 19)),
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
def fit(preset: str, memory_gb: float, devices: int) -> str | None:
    """The flags of the preset's first row in FITS for which so many gigabytes of each device are
    enough; "" for a preset without rows; None if the memory is too small for all of them."""
    column = sum(number <= devices for number in (2, 4, 8))
    for flags, gigabytes in FITS.get(preset, [("", (0, 0, 0, 0))]):
        if memory_gb >= gigabytes[column]:
            return flags
    return None


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
    tpus = [*Path("/dev").glob("accel[0-9]*"), *Path("/dev/vfio").glob("[0-9]*")]
    devices = gpus or [Device("TPU", math.inf) for _ in tpus]  # JAX knows their memory
    if not devices or os.environ.get("JAX_PLATFORMS") == "cpu":
        why = "no GPU or TPU is there, or JAX_PLATFORMS or CUDA_VISIBLE_DEVICES hides it"
        return Machine([], "cpu", 1.0, math.inf, "tiny", why)
    smallest = min(device.gigabytes for device in devices)
    capability = min(device.capability for device in devices)
    fraction = 0.92 if smallest < SMALL else 0.75
    memory = USABLE * smallest
    wheels = "tpu"
    if gpus:
        memory *= fraction
        fitting = [name for name, oldest in DRIVERS if int(driver.split(".")[0]) >= oldest]
        wheels = fitting[0] if fitting and capability >= TURING else "cpu"
    preset = "record"
    why = f"this machine has {len(devices)} x {devices[0].name}"
    if wheels == "cpu" or capability < AMPERE or fit("record", memory, len(devices)) is None:
        preset = "tiny"
        why += ": driver, compute capability or memory is too little for the record"
    return Machine(devices, wheels, fraction, memory, preset, why)


def nvidia() -> tuple[list[Device], str]:
    """The GPUs that nvidia-smi lists and CUDA_VISIBLE_DEVICES shows, and the driver; "" for none.
    A lost GPU has words where others have numbers, and does not count."""
    fields = "index,uuid,name,compute_cap,driver_version,memory.total"
    command = ["nvidia-smi", f"--query-gpu={fields}", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    except (OSError, subprocess.TimeoutExpired):
        return [], ""
    rows = re.findall(r"(?m)^(\d+), (.+), (.+), ([\d.]+), ([\d.]+), (.+)$", done.stdout)
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    names = tuple((visible or "none").split(","))
    devices = []
    for index, uuid, name, capability, _, mib in rows:
        gigabytes = float(mib) * 2**20 / 1e9 if mib.isdigit() else math.inf
        # CUDA takes an index, the beginning of a UUID, or MIG-UUID for a part of some GPU.
        if visible is None or index in names or uuid.startswith(names) or "MIG-" in visible:
            devices.append(Device(name, gigabytes, float(capability)))
    return devices, rows[0][4] if rows else ""


# ---- The command line ----------------------------------------------------------------------------
def plan(machine: Machine, preset: str) -> str:
    """Three lines on what ./run.sh PRESET does on a machine, and what that takes."""
    size, memory, minutes = NEEDS[preset]
    count = len(machine.devices)
    names = "no GPU or TPU that JAX can use"
    if count:
        names = f"{count} x {machine.devices[0].name}, JAX has {machine.memory:.1f} GB of each"
    flags = fit(preset, machine.memory if machine.wheels != "cpu" else 0, count)
    does = "does not fit" if flags is None else f"with {flags or 'its own flags'}"
    return (
        f"machine  {names}; packages for {machine.wheels}\n"
        f"run      {preset} {does}; ./run.sh alone trains {machine.preset}, as {machine.why}\n"
        f"needs    {DISK[machine.wheels] + size:.1f} GB of disk; {memory}; minutes: {minutes}"
    )


def main(argv: list[str]) -> None:
    """Prints the decision, or the plan of a preset."""
    machine = find_machine()
    preset = (argv[1:] or [machine.preset])[0]
    if argv[0] == "decide":
        print(machine.wheels, machine.preset, machine.fraction, machine.why)
    else:
        print(plan(machine, preset))


if __name__ == "__main__":
    main(sys.argv[1:])
