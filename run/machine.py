"""Finds out what this machine is, and decides what run.sh does on it.

    python run/machine.py [ARGUMENT ...]    the decisions, as lines NAME=VALUE for run.sh, or
                                            the reason why its arguments cannot work here, with
                                            status 2
    python run/machine.py --version         what is here: the commit, jax, Python
    python run/machine.py basics            the tutorials

run/plan.py tells a person the same. This file runs before anything is installed, so Python 3.8 is
enough, and there is no JAX. GPUs are those that nvidia-smi and CUDA_VISIBLE_DEVICES list, TPUs
those among /sys/bus/pci/devices (JNANO_PCI names another folder, for tests).
"""

from __future__ import annotations

import ast
import contextlib
import math
import os
import re
import shlex
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))  # for PYTHONSAFEPATH=1
sys.path.append(os.path.join(os.path.dirname(sys.path[0]), "data"))
import fits  # noqa: E402
from flags import GUARD_FLAGS, wrong_value  # noqa: E402
from messages import nearest, one_line  # noqa: E402


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
        return f"run/constraints/{self.name}.txt" if self.requirement else ""


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

# Sequences in a step; one process uses no more devices than that.
BATCH = {"record": 8, "record92": 8, "medium": 8, "small": 8, "tiny": 1}
# Flags with which train_gpt.py may do without what it needs otherwise.
ADVANCED = "--batch --microbatch --head_chunk --val_T --bigrams --attention".split()
HELP = ("--help", "-h")
# The variables in which launchers give the number of processes and the rank of this one, as in
# run/launch.py. A number without a rank is left over from something else.
PROCESSES = {
    "JNANO_PROCESSES": "JNANO_PROCESS",
    "WORLD_SIZE": "RANK",
    "OMPI_COMM_WORLD_SIZE": "OMPI_COMM_WORLD_RANK",
    "SLURM_STEP_NUM_TASKS": "SLURM_PROCID",
}
VERBS = (
    "plan check watch idea optimizers tokenize sample hellaswag loss export look share compare "
    "verify pack plot basics clean test install"
).split()
# What other projects call these, or what people try.
SYNONYMS = {
    "sample": "chat generate complete inference infer talk prompt demo",
    "loss or hellaswag": "eval evaluate evaluation perplexity",
    "hellaswag": "core",
    "optimizers": "benchmark bench optimizer optim",
    "tokenize": "prepare dataset data tokenizer",
    "plan": "cost price estimate info doctor",
    "watch": "monitor status tail logs log",
    "export": "convert",
    "share": "push upload publish hf",
    "compare": "ab run_ab ablate ablation abtest",
    "plot": "curve curves figure",
    "idea": "ideas patch patches shelf try",
    "basics": "tutorial tutorials learn examples example",
    "look": "visualize page html inspect report",
    "clean": "clear rm prune cleanup",
    "install": "setup init sync",
    "test": "tests pytest lint ruff ci format",
    "--help": "help usage commands",
    "--version": "version -v -V",
}
# Words that name a run, which needs none.
RUNS = "train run start pretrain speedrun train_gpt".split()
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
    if wheels != CPU:  # where nothing lists the memory, run/launch.py asks JAX for it
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
            return environment, fraction_in(name)
    if smallest.mib and smallest.mib < SMALL:
        environment["XLA_CLIENT_MEM_FRACTION"] = str(FRACTION)
        return environment, FRACTION
    return environment, JAX_FRACTION


def fraction_in(name: str) -> float:
    """The number in an environment variable. Raises SystemExit."""
    try:
        return float(os.environ[name])
    except ValueError:
        line = f"run.sh: {name}={os.environ[name]} is no number: set it to a fraction, as 0.9"
        raise SystemExit(line) from None


# ---- Spelling ------------------------------------------------------------------------------------
def misspelt(argv: list[str]) -> str:
    """What is wrong with a word, a flag or a value of a run of train_gpt.py or of its check, and
    what may be meant; "" if nothing is. Other verbs and basics/*.py check their own arguments, and
    so do copies of train_gpt.py, which may define presets and flags in other ways."""
    rest = list(argv)
    if rest and os.path.dirname(os.path.normpath(rest[0])) == "basics":
        return unknown_tutorial(rest, "basics")
    if rest and rest[0].endswith(".py"):
        script = os.path.normpath(rest.pop(0))
        if not os.path.isfile(script):
            return f"there is no file {script} in {os.getcwd()}, from which paths count"
        if script != "train_gpt.py":
            return ""
    elif rest and rest[0] == "optimizers":
        return unknown_optimizer(rest[1:], "records/optimizers")
    elif rest and rest[0] == "basics":
        return unknown_tutorial(rest[1:], "basics")
    elif rest and rest[0] in VERBS and rest[0] != "check":
        return ""
    presets, fields = names_in("train_gpt.py")
    if not presets or not fields:
        return ""
    if rest and rest[0] in FROZEN:
        _, fields = names_in(FROZEN[rest[0]])
    flags = [*fields, "help"]
    if rest and rest[0] == "check":
        flags += ["small", "full", "only", "kernels"]
        if len(rest) > 1 and rest[1] in FROZEN:
            return f"check takes no {rest[1]!r}: {FROZEN[rest[1]]} is frozen, and has no check"
        if len(rest) > 1 and not rest[1].startswith("-") and rest[1] not in LARGE:
            near = nearest(rest[1], flags, "--")
            return f"check takes no {rest[1]!r}, only record or medium{near}"
    elif rest and rest[0] not in (*presets, *FROZEN, *HELP):
        reason = unknown_word(rest[0], [*VERBS, "train_gpt.py", *presets, *FROZEN])
        if reason:
            return reason
    if not rest or rest[0] != "check":
        flags += GUARD_FLAGS
    for argument in rest:
        name = argument.partition("=")[0]
        if name.startswith("--") and name[2:] not in flags:
            return f"there is no flag {name}{nearest(name, flags, '--')}"
    if rest and rest[0] in (*presets, *FROZEN):
        rest = rest[1:]
    elif rest and rest[0] == "check":
        return wrong_value(rest)
    kinds = dict(fields)
    for name, (kind, _, _) in GUARD_FLAGS.items():
        kinds[name] = kind.__name__
    return wrong_kind(rest, kinds) or wrong_value(rest)


def wrong_kind(argv: list[str], kinds: dict[str, str]) -> str:
    """Which word of a run's flags and values cannot be used, as one that is no flag, a flag without
    a value, or a value that is no number; "" if none. `kinds` has the types of all flags."""
    words = list(argv)
    while words:
        name, is_joined, value = words.pop(0).partition("=")
        if name in HELP:
            continue
        if not name.startswith("--"):
            near = nearest(name, list(kinds), "--")
            return f"{name!r} is neither a flag nor the value of one{near}"
        if not is_joined and not words:
            return f"{name} needs a value"
        if not is_joined:
            value = words.pop(0)
        kind = {"int": int, "float": float}.get(kinds[name[2:]], str)
        try:
            kind(value)
        except ValueError:
            number = "a whole number" if kind is int else "a number"
            return f"{name} must be {number}, and cannot be {value!r}"
    return ""


def unknown_word(word: str, words: list[str]) -> str:
    """What may be meant by a first word that is none of these; "" if it is a flag."""
    if word.lower() in RUNS:
        return f"there is no {word!r}: ./run.sh alone trains, and ./run.sh tiny trains that preset"
    for meant, others in SYNONYMS.items():
        if word.lower() in others.split():
            return f"there is no {word!r}: did you mean {meant}?"
    if word.startswith("-"):
        return ""
    near = nearest(word, words) or ":"
    return f"there is no {word!r}{near} ./run.sh --help lists the commands"


def unknown_tutorial(argv: list[str], folder: str) -> str:
    """Why these arguments of `basics` name no tutorial, and what may be meant; "" if they do."""
    if not argv or argv[0] in HELP or os.path.isfile(tutorial(argv[0], folder)):
        return ""
    name = Path(argv[0]).stem
    near = nearest(name, [path.stem for path in Path(folder).glob("*.py")])
    return f"there is no tutorial {name!r}{near or ': ./run.sh basics lists them'}"


def tutorial(name: str, folder: str) -> str:
    """The path of a tutorial, of which the folder and .py may be left out."""
    return os.path.join(folder, Path(name).stem + ".py")


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


def list_tutorials(folder: str) -> str:
    """The tutorials, in the order of README.md, with the first lines of their docstrings."""
    lines = ["./run.sh basics NAME  runs one of these; with --help it lists its flags:", ""]
    readme = Path(folder, "README.md").read_text(encoding="utf-8")
    for name in re.findall(r"^## (\w+)\.py: ", readme, re.M):
        source = Path(folder, f"{name}.py").read_text(encoding="utf-8")
        docstring = ast.get_docstring(ast.parse(source)) or ""
        lines.append(f"{name:<19}{docstring.partition(chr(10))[0]}")
    return "\n".join(lines)


def lacks_folder(argv: list[str]) -> bool:
    """Whether --data is empty, as with a variable that is not set. A run would train on the
    preset's text instead."""
    following = [*argv[1:], ""]
    pairs = zip(argv, following)  # noqa: B905 (strict is not in Python 3.8)
    return "--data=" in argv or ("--data", "") in pairs


def names_in(script: str) -> tuple[list[str], dict[str, str]]:
    """The keys of PRESETS in a script, and the types of the fields of its Config that are flags, by
    name. Both are empty where its text cannot be parsed, which Python explains better."""
    presets = []
    fields = {}
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
                    fields[field.target.id] = kind
    return presets, fields


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
    is_check = argv[:1] == ["check"] and "--small" not in argv
    if is_check and decision.wheels == CPU and not os.environ.get("JAX_PLATFORMS"):
        return (
            f"check needs a GPU or a TPU: {decision.why}; on a CPU, type  ./run.sh tiny  or  "
            "./run.sh check --small"
        )
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
            "small takes more than a day on a CPU (estimate): type  ./run.sh tiny  instead; to "
            f"train small all the same:  JAX_PLATFORMS=cpu ./run.sh {shlex.join(argv) or preset}"
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


def assignments(environment: dict[str, str]) -> str:
    """As words NAME=VALUE."""
    return " ".join(f"{name}={value}" for name, value in environment.items())


def counted(devices: list[Device]) -> str:
    """As "8 x NVIDIA H100 80GB HBM3", name after name."""
    names = [device.name for device in devices]
    return ", ".join(f"{names.count(name)} x {name}" for name in dict.fromkeys(names))


def version() -> str:
    """The commit, and the jax and the Python of .venv, if this is that Python: run.sh asks it where
    there is one."""
    import importlib.metadata  # here, because it takes long, and every start reads this file

    commit = "no git checkout"
    if os.path.exists(".git"):  # else git may describe the repository around this folder
        commit = "(git is not installed)"
        with contextlib.suppress(OSError, subprocess.TimeoutExpired):
            lines = output(["git", "describe", "--always", "--dirty", "--tags"]).splitlines()
            commit = lines[0] or "a commit that git does not name"
    jax = "no jax yet: ./run.sh install"
    if os.path.realpath(sys.prefix) != os.path.realpath(".venv"):  # another jax would not be used
        return f"jNanoGPT {commit}, {jax}"
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        jax = f"jax {importlib.metadata.version('jax')}"
    return f"jNanoGPT {commit}, {jax}, Python {sys.version.split()[0]}"


def refuse(reason: str) -> NoReturn:
    """Ends the start of a run with one line and status 2, as run/launch.py does."""
    print(f"run.sh: {' '.join(reason.splitlines())}", file=sys.stderr)
    sys.exit(2)


def main(argv: list[str]) -> None:
    """Prints lines for run.sh. Ends with status 2 where the arguments cannot work."""
    if argv in (["--version"], ["basics"]):
        print(version() if argv == ["--version"] else list_tutorials("basics"))
        return
    reason = misspelt(argv)
    if reason:
        refuse(reason)
    if lacks_folder(argv):
        refuse("--data has no folder behind it")
    machine = find_machine()
    decision = decide(machine)
    reason = refusal(argv, machine, decision)
    if reason:
        refuse(reason)
    print(for_shell(decision))


if __name__ == "__main__":
    with one_line("run.sh"):
        main(sys.argv[1:])
