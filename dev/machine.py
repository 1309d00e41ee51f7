"""Finds out what this machine is, and decides what run.sh does on it.

    python dev/machine.py [ARGUMENT ...]    the decisions, as lines NAME=VALUE for run.sh, or
                                            the reason why its arguments cannot work here
    ./run.sh plan                           the same for a person; nothing is installed or written

It runs before anything is installed, so Python 3.8 is enough, and there is no JAX. GPUs are
those that nvidia-smi and CUDA_VISIBLE_DEVICES list, TPUs those among /sys/bus/pci/devices
(JNANO_PCI names another folder, for tests).
"""

from __future__ import annotations

import ast
import contextlib
import difflib
import math
import os
import re
import shlex
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))  # for PYTHONSAFEPATH=1
import fits  # noqa: E402
from flags import GUARD_FLAGS  # noqa: E402


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
        """The minor version of the oldest Python: jax dropped 3.11 in 0.11.2; CPUs keep an older
        jax there."""
        return 12 if self.requirement else 11

    @property
    def constraints(self) -> str:
        """The file of versions that jax leaves open; "" if there is none."""
        return f"dev/constraints/{self.name}.txt" if self.requirement else ""


CPU = Wheels("cpu", "", 0.7)
TPU = Wheels("tpu", "jax[tpu]", 1.3)
# The first row that fits. jax's docs/installation.md: CUDA 13 wheels support compute capability 7.5
# and later, with driver 580; CUDA 12 wheels 5.2 and later, with driver 525.
# P100 (6.0) and V100 (7.0) get cuDNN 9.10.2, the oldest that these wheels accept, because cuDNN
# crashes on GPUs before 7.5 since 9.11 (conda-forge/jaxlib-feedstock, pull request 330). With it,
# tiny's programs were compiled for 6.0 and 7.0, but they never ran on such a GPU.
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

LARGE = ("record", "record92", "medium")  # presets that need GPUs or TPUs
# Presets that run.sh trains from another file than train_gpt.py.
FROZEN = {"record92": "records/upstream92/train_gpt.py"}
RECORD = 8.0  # the least compute capability: bfloat16 and cuDNN's attention begin with Ampere
# Below SMALL MiB, JAX gets FRACTION of the memory, else its default, JAX_FRACTION.
SMALL = 45_000
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
DISK = {"record": (1.6, 2.5), "tiny": (0.006, 0.018)}  # GB of tokens, of weights: dev/README.md

# Sequences in a step; one process uses no more devices than that.
BATCH = {"record": 8, "record92": 8, "medium": 8, "small": 8, "tiny": 2}
# Flags with which train_gpt.py may do without what it needs otherwise.
ADVANCED = "--batch --microbatch --head_chunk --val_T --bigrams --attention".split()
HELP = ("--help", "-h")
# The variables in which launchers give the number of processes and the rank of this one, as in
# dev/launch.py. A number without a rank is left over from something else.
PROCESSES = {
    "JNANO_PROCESSES": "JNANO_PROCESS",
    "WORLD_SIZE": "RANK",
    "OMPI_COMM_WORLD_SIZE": "OMPI_COMM_WORLD_RANK",
    "SLURM_STEP_NUM_TASKS": "SLURM_PROCID",
}
VERBS = "plan check watch optimizers tokenize sample hellaswag loss export look share test install"
VERBS = VERBS.split()
ONE_HOST = (
    "optimizers trains in one process, on all devices of one host, and this is one of several "
    "processes: start it once, without srun, mpirun or torchrun"
)
PATIENCE = 60  # seconds that a program may take
# A row of nvidia-smi: index, UUID, name, compute capability, MiB or why there are none. A GPU that
# is lost has cells like "[GPU is lost]" or "[Unknown Error]".
GPU = r"(?i)(?!.*\b(lost|error)\b)\d+,[^,]+,[^,]+,\s*\d+\.\d+\s*,[^,]+"
WARNED = []  # lines of nvidia-smi
OTHERS = "set CUDA_VISIBLE_DEVICES to the numbers of the other GPUs to do without this one"


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
    names: tuple[str, ...] = ("0", "1", "2", "3", "4", "5", "6", "7")  # in CUDA_VISIBLE_DEVICES
    differ: bool = False  # whether its GPUs, the hidden ones included, are of several kinds
    why_none: str = ""


class NoGpu(Exception):
    """There is none; the message says why."""


class NoRow(NoGpu):
    """nvidia-smi lists none."""


def output(command: list[str]) -> str:
    """What a program prints in a minute, whatever its status. It is not waited for any longer, as a
    driver that hangs keeps even a killed process. Raises OSError; subprocess.TimeoutExpired if it
    has printed nothing."""
    pipes = dict(stdout=subprocess.PIPE, stderr=subprocess.PIPE, stdin=subprocess.DEVNULL)
    process = subprocess.Popen(command, start_new_session=True, **pipes)
    try:
        printed, complaints = process.communicate(timeout=PATIENCE)
    except subprocess.TimeoutExpired as hung:
        with contextlib.suppress(OSError):  # it may be gone, and its children may not
            os.killpg(process.pid, signal.SIGKILL)
        if not hung.stdout:
            raise
        printed, complaints = hung.stdout, b"it has not ended in a minute"
    return (printed + b"\n" + complaints).decode("utf-8", "replace")


def nvidia_smi(fields: str, pattern: str) -> list[str]:
    """The lines that match a pattern, one for each GPU. Where there are some, all other lines are
    warnings: they, or the status, do not make a GPU worse that is listed. Raises NoGpu."""
    command = ["nvidia-smi", f"--query-gpu={fields}", "--format=csv,noheader,nounits"]
    try:
        lines = [line.strip() for line in output(command).splitlines() if line.strip()]
    except OSError:  # it is not there, or may not be executed
        raise NoGpu("this machine has no NVIDIA GPU and no TPU") from None
    except subprocess.TimeoutExpired:
        raise NoGpu("nvidia-smi has not answered in a minute") from None
    rows = [line for line in lines if re.fullmatch(pattern, line)]
    if not rows:
        raise NoRow(f"nvidia-smi shows no NVIDIA GPU: {(lines or ['it prints nothing'])[0]}")
    for line in lines:
        if line not in rows and line not in WARNED:
            WARNED.append(line)
            print(f"run.sh: warning: nvidia-smi says: {line}", file=sys.stderr)
    return rows


def nvidia_driver() -> int:
    """The first number of its version. Raises NoGpu, also if jax has no wheels for it, and
    SystemExit if there are GPUs all the same."""
    try:
        version = nvidia_smi("driver_version", r"\d[\d.]*")[0]
    except NoRow as reason:
        all_gpus()
        raise SystemExit(
            "run.sh: nvidia-smi lists a GPU, but not the version of its driver: restart the "
            f"machine, or set JAX_PLATFORMS=cpu ({reason})"
        ) from None
    driver = int(version.partition(".")[0])
    oldest = CUDA[-1].driver
    if driver < oldest:
        raise NoGpu(f"the NVIDIA driver {driver} is too old: jax needs {oldest}")
    return driver


def all_gpus() -> dict[tuple[str, str], Device]:
    """GPUs by index and UUID, without those that are lost. Raises NoGpu."""
    gpus = {}
    for row in nvidia_smi("index,uuid,name,compute_cap,memory.total", GPU):
        index, uuid, name, capability, mib = (cell.strip() for cell in row.split(","))
        memory = float(mib) if mib.isdigit() else None  # "[N/A]" where it is the host's, as of GB10
        gpus[index, uuid] = Device(name, memory, float(capability))
    return gpus


def names_for_cuda(gpus: dict[tuple[str, str], Device]) -> list[str]:
    """What CUDA_VISIBLE_DEVICES calls the GPUs: their indices. If one is lost, CUDA may count
    without it, so their UUIDs."""
    indices = [index for index, _ in gpus]
    if indices == [str(i) for i in range(len(gpus))]:
        return indices
    return [uuid for _, uuid in gpus]


def visible(gpus: dict[tuple[str, str], Device]) -> list[Device]:
    """The GPUs listed in CUDA_VISIBLE_DEVICES, by index or by the beginning of a UUID; all if it is
    unset. A slice of a GPU (MIG) has its own UUID, and memory that nothing lists. Raises NoGpu."""
    wanted = os.environ.get("CUDA_VISIBLE_DEVICES")
    if wanted is None:
        return list(gpus.values())
    devices = []
    for entry in wanted.replace(" ", "").split(","):
        if entry.startswith("MIG-"):
            devices.append(next(iter(gpus.values()))._replace(mib=None))
        for (index, uuid), gpu in gpus.items():
            if entry == index or (entry.startswith("GPU-") and uuid.startswith(entry)):
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
    """The machine that this runs on; where JAX_PLATFORMS is cpu, one without GPUs and TPUs."""
    if os.environ.get("JAX_PLATFORMS") == "cpu":
        return Machine([], why_none="JAX_PLATFORMS=cpu is set")
    try:
        driver = nvidia_driver()
        gpus = all_gpus()
        names = tuple(names_for_cuda(gpus))
        return Machine(visible(gpus), driver, names, len(set(gpus.values())) > 1)
    except NoGpu as reason:
        why = str(reason)
    if output(["uname"]).strip() == "Darwin":
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
    wheels = cuda_wheels(machine.driver, oldest.capability) if machine.driver else TPU
    environment, fraction = environment_for(wheels, smallest, machine.differ)
    memory = USABLE * fraction * smallest.gigabytes if smallest.mib else None
    flags = None
    if wheels != CPU:  # where nothing lists the memory, dev/launch.py asks JAX for it
        flags = fits.fit(memory or math.inf, len(devices))

    age = f"{oldest.name} has compute capability {oldest.capability}, and"
    size = f"JAX has {memory or 0:.1f} GB of {smallest.name}, and"
    reasons = (
        (wheels == CPU, f"{age} jax needs {CUDA[-1].capability}"),
        (flags is None, f"{size} the record needs {fits.least(len(devices)):.1f}"),
        (wheels in CUDA and oldest.capability < RECORD, f"{age} the record needs {RECORD}"),
    )
    for holds, why in reasons:
        if holds:
            differ = f"; {OTHERS}" if len(set(devices)) > 1 else ""
            return Decision(wheels, "tiny", why + differ, environment, memory, flags)
    why = f"this machine has {counted(devices)}"
    if len(devices) > BATCH["record"] and not several_processes():
        why += f", of which the record uses {BATCH['record']}"
    return Decision(wheels, "record", why, environment, memory, flags)


def cuda_wheels(driver: int, capability: float) -> Wheels:
    """The first row of CUDA that driver and GPU are good enough for, else those of the CPU."""
    for row in CUDA:
        if driver >= row.driver and capability >= row.capability:
            return row
    return CPU


def environment_for(wheels: Wheels, smallest: Device, differ: bool) -> tuple[dict[str, str], float]:
    """What JAX should find in the environment, and the fraction of the memory that it takes then.
    What the user has set stays. JAX refuses to find the old and the new name of the fraction."""
    environment = {}
    if wheels == CPU:
        return environment, 1.0
    if not os.environ.get("JAX_PLATFORMS"):  # else JAX may go on with the CPU in silence
        environment["JAX_PLATFORMS"] = "tpu,cpu" if wheels == TPU else "cuda,cpu"
    if wheels == TPU:
        return environment, 1.0
    if differ and "CUDA_DEVICE_ORDER" not in os.environ:  # CUDA's own order: the fastest first
        environment["CUDA_DEVICE_ORDER"] = "PCI_BUS_ID"  # that of nvidia-smi
    for name in ("XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION"):
        if os.environ.get(name):
            return environment, number_in(name)
    if smallest.mib and smallest.mib < SMALL:
        environment["XLA_CLIENT_MEM_FRACTION"] = str(FRACTION)
        return environment, FRACTION
    return environment, JAX_FRACTION


def number_in(name: str) -> float:
    """The number in an environment variable. Raises SystemExit."""
    try:
        return float(os.environ[name])
    except ValueError:
        line = f"run.sh: {name}={os.environ[name]} is no number: set it to a fraction, as 0.9"
        raise SystemExit(line) from None


# ---- Spelling ------------------------------------------------------------------------------------
def misspelt(argv: list[str]) -> str:
    """What is wrong with a word or a flag of a run of train_gpt.py or of its check, and what may be
    meant; "" if nothing is. Other verbs and basics/*.py check their own arguments, and so do copies
    of train_gpt.py, which may define presets and flags in other ways."""
    rest = list(argv)
    if rest and rest[0].endswith(".py"):
        script = os.path.normpath(rest.pop(0))
        if not os.path.isfile(script):
            return f"there is no file {script} in {os.getcwd()}, from which paths count"
        if script != "train_gpt.py":
            return ""
    elif rest and rest[0] == "optimizers":
        return unknown_optimizer(rest[1:], "records/optimizers")
    elif rest and rest[0] in VERBS and rest[0] != "check":
        return ""
    presets, fields = names_in("train_gpt.py")
    if not presets or not fields:
        return ""
    if rest and rest[0] in FROZEN:
        _, fields = names_in(FROZEN[rest[0]])
    flags = [*fields, "help"]
    if rest and rest[0] == "check":
        flags += ["small", "only"]
        if len(rest) > 1 and rest[1] in FROZEN:
            return f"check takes no {rest[1]!r}: {FROZEN[rest[1]]} is frozen, and has no check"
        if len(rest) > 1 and not rest[1].startswith("-") and rest[1] not in LARGE:
            return f"check takes no {rest[1]!r}{nearest(rest[1], flags, '--')}"
    elif rest and not rest[0].startswith("-") and rest[0] not in (*presets, *FROZEN):
        near = nearest(rest[0], [*VERBS, "train_gpt.py", *presets, *FROZEN])
        return f"there is no {rest[0]!r}{near}; see ./run.sh --help"
    if not rest or rest[0] != "check":
        flags += GUARD_FLAGS
    for argument in rest:
        name = argument.partition("=")[0]
        if name.startswith("--") and name[2:] not in flags:
            return f"there is no flag {name}{nearest(name, flags, '--')}"
    return ""


def unknown_optimizer(argv: list[str], folder: str | Path) -> str:
    """Why these arguments of `optimizers` name no file, and what may be meant; "" if they do."""
    if not argv or argv[0].startswith("-"):
        return ""
    names = optimizer_names(folder)
    is_path = argv[0].endswith(".py") or os.sep in argv[0]
    if is_path and not os.path.isfile(argv[0]):
        return f"there is no file {argv[0]} in {os.getcwd()}, from which paths count"
    if is_path or argv[0] in names:
        return ""
    near = nearest(argv[0], names) or f": there are {', '.join(names)}"
    return f"there is no optimizer {argv[0]!r}{near}"


def optimizer_names(folder: str | Path) -> list[str]:
    """The contestants among the files of a folder, without .py."""
    names = []
    for path in sorted(Path(folder).glob("*.py")):
        if is_contestant(path.read_text(encoding="utf-8", errors="replace")):
            names.append(path.stem)
    return names


def is_contestant(source: str) -> bool:
    """Whether a file defines optimizer() and is no whole program."""
    has_optimizer = re.search(r"^def optimizer\(", source, re.M)
    return bool(has_optimizer) and not re.search(r"^def main\(", source, re.M)


def lacks_folder(argv: list[str]) -> bool:
    """Whether --data is empty, as with a variable that is not set. A run would train on the
    preset's text instead."""
    following = [*argv[1:], ""]
    pairs = zip(argv, following)  # noqa: B905 (strict is not in Python 3.8)
    return "--data=" in argv or ("--data", "") in pairs


def names_in(script: str) -> tuple[list[str], list[str]]:
    """The keys of PRESETS in a script, and the fields of its Config that are flags. Both are empty
    where its text cannot be parsed, which Python explains better."""
    presets = []
    fields = []
    try:
        with open(script, encoding="utf-8") as file:
            tree = ast.parse(file.read())
    except (OSError, SyntaxError, ValueError):
        return presets, fields
    for node in tree.body:
        if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") == "PRESETS":
            presets = [key.value for key in node.value.keys]
        elif isinstance(node, ast.ClassDef) and node.name == "Config":
            for field in node.body:
                kind = getattr(getattr(field, "annotation", None), "id", "")
                if kind in ("int", "float", "str"):
                    fields.append(field.target.id)
    return presets, fields


def nearest(word: str, words: list[str], dashes: str = "") -> str:
    """A question that names the words of which this one is a part, or else the most similar one."""
    part = word.lstrip("-").lower()
    by_lower = {other.lower(): other for other in words}
    found = [other for lower, other in by_lower.items() if part in lower and len(part) > 1]
    if not found:
        found = [by_lower[lower] for lower in difflib.get_close_matches(part, by_lower, n=1)]
    return f": did you mean {' or '.join(dashes + other for other in found[:3])}?" if found else ""


# ---- Refusals ------------------------------------------------------------------------------------
def refusal(argv: list[str], machine: Machine, decision: Decision) -> str:
    """Why run.sh with these arguments would install and fetch in vain, and what to do; "" if not.
    Several processes are never refused, and where there is a GPU or a TPU, neither are copies of
    train_gpt.py and ADVANCED flags: they may fit."""
    if argv[:1] == ["optimizers"] and several_processes():
        return ONE_HOST
    preset = trained_preset(argv, decision.preset)
    flags = {argument.partition("=")[0] for argument in argv}
    if several_processes() or flags.intersection(HELP):
        return ""
    if preset == "124m" and decision.wheels == CPU and not os.environ.get("JAX_PLATFORMS"):
        return (
            f"124m does not run here: {decision.why}; leave out --size, or name what JAX should "
            "use all the same, as in  JAX_PLATFORMS=cpu ./run.sh optimizers NAME --size 124m"
        )
    large_on_cpu = decision.wheels == CPU and preset in LARGE
    may_fit = preset not in BATCH or is_copy(argv) or flags.intersection(ADVANCED)
    if may_fit and not large_on_cpu:
        return ""
    if preset == "small" and decision.wheels == CPU and not os.environ.get("JAX_PLATFORMS"):
        return (
            "small takes more than a day on a CPU (estimate): type  ./run.sh tiny,  tokenize text "
            "of your own with --bytes, or type  JAX_PLATFORMS=cpu ./run.sh small  all the same"
        )
    why = why_too_large(preset, machine, decision)
    if why and not os.environ.get("JAX_PLATFORMS"):
        title = "the record" if preset == "record" else preset
        return (
            f"{title} does not run here: {why}; type  ./run.sh tiny  or name what JAX should use "
            f"all the same, as in  JAX_PLATFORMS=cpu ./run.sh {preset}"
        )
    return odd_number(machine, decision, preset)


def why_too_large(preset: str, machine: Machine, decision: Decision) -> str:
    """Why a large preset does not run on a machine; "" if it may."""
    if preset not in LARGE:
        return ""
    memory = decision.memory
    if preset == "record" or decision.wheels == CPU or not memory:
        return decision.why if decision.flags is None else ""
    number = len(machine.devices)
    if fits.fit(memory, number, preset) is None:
        least = fits.least(number, preset)
        return f"JAX has {memory:.1f} GB of each device, and {preset} needs {least:.1f}"
    return ""


def trained_preset(argv: list[str], default: str) -> str:
    """The preset that is to be trained, by run.sh's arguments; if they are for something else, a
    word that is no preset."""
    rest = list(argv)
    if rest and os.path.dirname(os.path.normpath(rest[0])) == "basics":
        return rest[0]
    if rest[:1] == ["optimizers"]:  # its size
        text = " ".join(rest).replace("=", " ")
        return "124m" if "--size 124m" in text else "optimizers"
    if rest and rest[0].endswith(".py"):
        rest.pop(0)
    if rest and not rest[0].startswith("-"):
        return rest[0]
    return default


def is_copy(argv: list[str]) -> bool:
    """Whether run.sh's arguments name a copy of train_gpt.py."""
    names_script = bool(argv) and argv[0].endswith(".py")
    return names_script and os.path.normpath(argv[0]) != "train_gpt.py"


def several_processes() -> bool:
    """Whether this is one of several processes of a run, by what launchers set."""
    for count, rank in PROCESSES.items():
        number = os.environ.get(count, "")
        if number.isdigit() and int(number) > 1 and os.environ.get(rank):
            return True
    return False


def odd_number(machine: Machine, decision: Decision, preset: str) -> str:
    """Why the preset cannot use so many GPUs, and what to do; "" if it can."""
    if decision.wheels not in CUDA:
        return ""
    number = min(len(machine.devices), BATCH[preset])
    largest = fits.listed(number)
    if number == largest:
        return ""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES") or ",".join(machine.names)
    chosen = visible.replace(" ", "").split(",")[:largest]
    return (
        f"{number} GPUs do not divide a step of {preset}: to use {len(chosen)} of them, type  "
        f"export CUDA_VISIBLE_DEVICES={','.join(chosen)}"
    )


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
        "refused": refusal([], machine, decision),
        "flags": describe_flags(decision),
        "variables": assignments(decision.environment) or "none",
        "disk": f"{total:.1f} GB: .venv {wheels.disk}, tokens {tokens}, weights {weights}",
        "minutes": describe_minutes(machine, decision),
    }
    return "\n".join(f"{title:<11}{text}" for title, text in lines.items() if text)


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


def describe_flags(decision: Decision) -> str:
    """What the fit adds to the command line."""
    if decision.preset != "record":
        return "none"
    if decision.memory is None:
        return "those for the memory that JAX finds"
    if not decision.flags:
        return "none: the record fits as it is"
    line = f"{fits.command_line(decision.flags)}: JAX has {decision.memory:.1f} GB of each device"
    if "bigrams" in decision.flags:
        line += "; with a smaller bigram table, so this is not the record"
    return line


def describe_minutes(machine: Machine, decision: Decision) -> str:
    """How long it takes, besides pip and the download."""
    if decision.wheels == CPU:
        return "1 to 2, a third of one to train: measured on two cores of a CPU"
    if decision.preset == "tiny":
        return "not known: tiny has run on CPUs only, where it takes 1 to 2"
    training = "not known"
    for name, minutes in TRAINING.items():
        if name in machine.devices[0].name:
            number = fits.listed(len(machine.devices))
            minutes_here = [f"{round(x / number, 1):g}" for x in minutes]
            training = " to ".join(dict.fromkeys(minutes_here))
    compiling = COMPILING["gpu" if machine.driver else "tpu"]
    return f"training: {training}; compiling: {compiling}; all are estimates"


def main(argv: list[str]) -> None:
    """Prints lines for run.sh, or the plan. Raises SystemExit where the arguments cannot work."""
    if argv[:1] == ["plan"] and argv != ["plan"]:
        raise SystemExit("run.sh: plan takes no arguments")
    reason = misspelt(argv)
    if reason:
        raise SystemExit(f"run.sh: {reason}")
    if lacks_folder(argv):
        raise SystemExit("run.sh: --data has no folder behind it")
    machine = find_machine()
    decision = decide(machine)
    reason = refusal(argv, machine, decision)
    if reason:
        raise SystemExit(f"run.sh: {reason}")
    print(for_person(machine, decision) if argv == ["plan"] else for_shell(decision))


if __name__ == "__main__":
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # `./run.sh plan | head` ends quietly
    if sys.stdout:  # a service may have none
        sys.stdout.reconfigure(errors="backslashreplace")  # where a name is not ASCII, as stdout is
    main(sys.argv[1:])
