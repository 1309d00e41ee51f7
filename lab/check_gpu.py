"""Measures in two minutes (an estimate) how fast a machine is; --full: whether it computes right.

    ./run.sh check [PRESET] [--field value ...]        versions, memory, rates, predicted time
    ./run.sh check --full [PRESET] [--field value ...] compares numbers too, and trains some steps
    ./run.sh check --only PART,PART [...]              these parts
    ./run.sh check --small                             all parts at a size for a CPU
    ./run.sh check --kernels [PRESET] [...]            whether our kernels for Hopper are right,
                                                       and faster than XLA; --small interprets them

Run it before you download gigabytes, with the flags of the run that you plan. PRESET is record,
which is the default, or medium. Each line is PASS, FAIL, or INFO, which tests nothing. Then come
CHECK, with all numbers as one line of JSON to paste into an issue, and the verdict. The exit status
is 0 if everything passes, 1 if something fails, and 2 if there is nothing to check. The programs
that --full compiles stay in the compilation cache.

The parts run in a second process, because a GPU's software may hang, and XLA may abort. The first
process reads what the second one finds, names the part that hangs or dies, and starts another
process for the parts after it.
"""

import argparse
import collections
import contextlib
import ctypes
import dataclasses
import faulthandler
import functools
import itertools
import json
import math
import os
import re
import select
import signal
import subprocess
import sys
import time
import timeit
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, NoReturn

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, P, lax
from jax.sharding import Mesh, NamedSharding

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # for PYTHONSAFEPATH=1
import train_gpt
from data.messages import Parser, one_line
from lab import check_kernels, predict
from lab.check_kernels import percent
from run import fits, launch, machine, watch
from run.cache import set_compilation_cache
from train_gpt import LONG, Config, Layer, ScheduleRow, Stage

PARTS = {  # in the order in which they run
    "machine": "all GPUs are of one kind, and nobody else uses them",
    "speed": "rates of memory, products, head and links; a time is predicted from them",
    "attention": "its values and gradients are right at the lengths of training and validation",
    "head": "its values and gradients are right in its formats",
    "norms": "the other gradients that are written by hand are right",
    "tiny": "20 steps in float32 have the same losses as on a CPU",
    "record": "trains some steps of each stage, 30 s of the longest, and predicts the run's time",
    "devices": "the record's first losses are the same on one device and on all",
}
QUICK = "machine", "speed"  # the parts that run by default
FULL_TAKES = "15 to 30 minutes"  # an estimate; it depends on the CPU, because most is compiling
NOTHING = 2  # the exit status where there is nothing to check
LIMIT = 600  # seconds; a part that sends no result for longer hangs
CHILD = [sys.executable, __file__, "--child"]  # the process that runs the parts
MARK = "\x1e"  # begins the child's lines of JSON, as in RFC 7464; what else it writes is shown

# Whether it passes (None: it tests nothing), name, text, facts for JSON.
Line = tuple[bool | None, str, str, Any]
WORDS = {True: "PASS", False: "FAIL", None: "INFO"}
LARGE = "record", "medium"  # the presets that can be checked
RECORD = dataclasses.replace(train_gpt.PRESETS["record"], seed=1)
TINY = dataclasses.replace(train_gpt.PRESETS["tiny"], seed=1)
SMALL = dataclasses.replace(
    RECORD,
    layers=(Layer(LONG, paired_heads=True, key_offset=True, bigram=True, value_table=0),),
    stages=(Stage(400, 1024, short=8, long=16, max_doc=0, lr=1.0, targets=(1.0, (0.5, 0.0))),),
    mudd_head=(), D=64, H=2, F=128, R=8, vocab=257, eot=256, bigrams=512, head_chunk=128,
    dc_window=12, val_T=1024, val_tokens=8192, prefixes="",
)  # fmt: skip
# What healthy GPUs of these kinds reach in a node with NVLink.
HOPPER = "NVIDIA H100 80GB HBM3", "NVIDIA H200"
FLOORS = {"copy, TB/s": 2.5, "product, TFLOP/s": 500, "head, TFLOP/s": 600, "gather, TB/s": 0.25}
MEASURED = {  # of the same names: what was done, and the unit
    "copy, TB/s": ("memory: an array is read and written at", "B/s"),
    "product, TFLOP/s": ("products: two large matrices in bfloat16 are multiplied at", "FLOP/s"),
    "head, TFLOP/s": ("head: its product, in FP8 where there is FP8, runs at", "FLOP/s"),
    "gather, TB/s": ("links: all devices gather an array, each receiving", "B/s"),
}


# ---- Two processes -------------------------------------------------------------------------------
def main(argv: list[str]) -> int:
    """Runs the parts that are asked for in child processes, prints what they find, and returns the
    exit status."""
    options = parse_arguments(argv)
    if options.child:
        run_parts(options.parts, options.small, options.flags, options.kernels, options.use)
    refuse_without_devices(options)
    launch.set_xla_flags()
    began = time.monotonic()
    report = Report({"argv": argv}, [], 0)
    print(announcement(options), flush=True)
    command = [*CHILD, *options.flags]
    command += [f"--{name}" for name in ("small", "kernels") if getattr(options, name)]
    at_once = 1 if options.kernels else None
    parts = options.parts
    while parts:
        use = ",".join(check_kernels.to_use(report.facts))
        parts = watch_child([*command, "--use", use], parts, report, at_once)
        if parts is None:
            return NOTHING
        if options.kernels and "machine" in report.failed:
            print_not_tried("machine must pass first", parts)
            parts = []
    seconds = round(time.monotonic() - began)
    report.facts |= {"failed": report.failed, "seconds": seconds}
    text = json.dumps(report.facts)
    text = json.dumps(json.loads(text, parse_constant=str))  # NaN is not JSON
    print("CHECK", text)
    if options.kernels and not options.small:
        check_kernels.FILE.parent.mkdir(exist_ok=True)
        check_kernels.FILE.write_text(f"{text}\n")
    print(verdict(report, options, seconds), flush=True)
    return 1 if report.failed else 0


def parse_arguments(argv: list[str]) -> argparse.Namespace:
    """Returns the names of the parts, whether they are small, and the preset, if there is one, and
    the flags of the run. Exits with status 2 if one of them is unknown."""
    names = "\n".join(f"    {name:10} {what}" for name, what in PARTS.items())
    kernels = ["machine", *check_kernels.part_names()]
    cli = Parser(
        prog="check_gpu.py",
        usage="./run.sh check [--full] [--small] [--kernels] [--only PART,PART] [PRESET] "
        "[--field value ...]",
        description=__doc__,
        epilog=f"Parts, of which {' and '.join(QUICK)} run by default:\n{names}\n"
        f"With --kernels: {', '.join(kernels)}",
    )
    cli.add_argument("--full", action="store_true", help=f"run all parts, in {FULL_TAKES}")
    cli.add_argument("--small", action="store_true", help="run all parts at a size for a CPU")
    cli.add_argument("--only", help="run only these parts")
    cli.add_argument("--kernels", action="store_true", help="check our kernels for Hopper")
    cli.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    cli.add_argument("--use", default="", help=argparse.SUPPRESS)
    options, options.flags = cli.parse_known_args(argv)
    reason = "" if options.child else machine.misspelt(["check", *argv])
    if reason:
        refuse(reason)
    if os.environ.get("JAX_PLATFORMS") == "cpu" and not options.flags:
        options.small = True
    if options.small and options.flags:
        refuse(f"--small sets all sizes itself: leave out {' '.join(options.flags)}")
    known = kernels if options.kernels else [*PARTS]
    asked = known if options.full or options.small or options.kernels else [*QUICK]
    if options.only is not None:
        asked = options.only.split(",")
    unknown = [name for name in asked if name not in known]
    if unknown:
        refuse(f"--only: there is no part {unknown[0]!r}; the parts are {', '.join(known)}")
    options.parts = [name for name in known if name in asked]
    if options.kernels and options.full:
        refuse("--full is for the other parts: leave out --kernels, or --full")
    if options.parts == [check_kernels.STEPS] and not options.child:
        refuse("--only steps needs attempts to train with, as in --only fused_mlp,steps")
    record_with(options.flags)
    return options


def refuse_without_devices(options: argparse.Namespace) -> None:
    """Exits with status 2 where there is nothing to check, before anything starts. JAX_PLATFORMS
    may name devices that run/machine.py does not find; where it names the CPU, sizes are small."""
    if options.kernels:
        devices = [] if options.small else machine.find_machine().devices
        why = check_kernels.why_not([device.capability for device in devices], options.small)
        if why:
            refuse(f"there is nothing to check here: {why}")
    if options.small or os.environ.get("JAX_PLATFORMS") not in (None, "", "cpu"):
        return
    decision = machine.decide(machine.find_machine())
    if decision.wheels == machine.CPU:
        refuse(
            f"there is nothing to check here: {decision.why}. On a CPU, ./run.sh tiny trains, and "
            "./run.sh check --small runs this program's parts at a small size"
        )


def announcement(options: argparse.Namespace) -> str:
    """What the check will do, and for how long."""
    if options.small:
        return "Small sizes, on a CPU: the numbers must be right, and the times mean nothing"
    if options.parts == [*PARTS]:
        return f"This takes {FULL_TAKES} (an estimate), mostly compiling"
    if options.parts == [*QUICK]:
        return "This takes about two minutes (an estimate)"
    if options.kernels:
        return "This takes about ten minutes (an estimate), mostly compiling"
    return f"Of all parts, this runs {', '.join(options.parts)}"


def refuse(message: str) -> NoReturn:
    """Ends the check before it begins, with one line and exit status 2."""
    print(f"check_gpu.py: {message}", file=sys.stderr)
    sys.exit(2)


def record_with(flags: list[str]) -> tuple[str, Config]:
    """A large preset and its configuration. The first flag may be the preset. Exits with status 2
    if there is no such flag."""
    preset = "record"
    if flags and not flags[0].startswith("-"):
        preset, *flags = flags
    if preset not in LARGE:
        refuse(f"there is no check of {preset!r}; there are those of {', '.join(LARGE)}")
    return train_gpt.parse_config([preset, "--seed", "1", *flags])


@dataclasses.dataclass
class Report:
    """What the check has found so far."""

    facts: dict[str, Any]  # by the name of their line
    failed: list[str]  # names of lines and of parts
    passed: int  # how many lines have passed

    def add(self, passes: bool | None, name: str, text: str, fact: Any) -> None:
        """Prints a line and remembers it. A second process repeats some that the first has sent."""
        if name in self.facts and self.facts[name] == fact:
            return
        self.facts[name] = fact
        if passes is False:
            self.failed.append(name)
        self.passed += passes is True
        print(f"{WORDS[passes]}  {text}", flush=True)


def verdict(report: Report, options: argparse.Namespace, seconds: int) -> str:
    """The last line: whether all is well, and what else can be checked."""
    if report.failed:
        text = f"FAILED in {seconds} s: {'; '.join(report.failed)}."
    elif report.passed:
        text = f"Everything passes, in {seconds} s."
    else:
        text = f"Nothing is wrong, and no rate is known that could be expected here ({seconds} s)."
    if options.parts == [*QUICK]:
        text += (
            " ./run.sh check --full also compares attention, head, gradients and a training run "
            f"with float32 and a CPU, and times steps: {FULL_TAKES} (an estimate)."
        )
    return text


def watch_child(
    command: list[str], parts: list[str], report: Report, at_once: int | None = None
) -> list[str] | None:
    """Runs the first parts, or all, in a child process and adds its lines to the report. Returns
    the parts that are left, also if one has hung or died, and None if there is nothing to check."""
    asked = parts[:at_once]
    command = [*command, "--only", ",".join(asked)]
    # Unbuffered, so that select() knows whether there is more to read.
    child = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, bufsize=0)
    running = "the process of the check"
    status = None
    output = collections.deque(maxlen=60)  # what it has written since its last line, for the JSON
    try:
        for message in read_messages(child):
            if isinstance(message, str):
                print(message, flush=True)
                output.append(message[:200])
            else:
                output.clear()
                running, *line = message
                if line:
                    report.add(*line)
        status = child.wait(60)
        end = how_it_ended(status)
    except TimeoutError:
        end = f"hangs: it has not sent a result for {LIMIT} s"
    except subprocess.TimeoutExpired:
        end = "hangs when it ends"
    except KeyboardInterrupt:
        end = "was stopped by Ctrl-C"
        parts = []
    finally:
        kill(child)
    if status == NOTHING and running == "JAX" and not report.failed:
        return None
    if not end:
        return parts[len(asked) :]
    text = f"{running} {end}"
    if at_once == 1 and running not in parts:  # JAX has not started
        text = f"{asked[0]}: {text}"
        running = asked[0]
    report.add(False, running, text, {"end": end, "output": list(output)})
    return parts[parts.index(running) + 1 :] if running in parts else []


def read_messages(child: subprocess.Popen) -> Iterator[list | str]:
    """Yields the child's lines of JSON as lists, and its other lines as they are, until it ends.
    Raises TimeoutError when it has sent no JSON for LIMIT seconds."""
    deadline = time.monotonic() + LIMIT
    while select.select([child.stdout], [], [], max(0, deadline - time.monotonic()))[0]:
        line = child.stdout.readline().decode(errors="replace")
        if not line:
            return
        text, mark, message = line.rstrip("\n").partition(MARK)
        if text:
            yield text
        if mark:
            deadline = time.monotonic() + LIMIT
            yield decoded(message)
    raise TimeoutError


def decoded(message: str) -> list | str:
    """A message, or its text as it is if a thread of XLA has written into the middle of it."""
    try:
        return json.loads(message)
    except ValueError:
        return message


def how_it_ended(status: int) -> str:
    """What an exit status means; an empty string if all is well."""
    if status >= 0:
        return f"ended with exit status {status}" if status else ""
    name = signal.Signals(-status).name
    return f"was killed by {name}" + (", as happens if RAM is short" if name == "SIGKILL" else "")


def kill(child: subprocess.Popen) -> None:
    """Ends a child if it has not ended, and waits until its devices are free."""
    child.kill()
    with contextlib.suppress(subprocess.TimeoutExpired):  # where a driver hangs, nothing helps
        child.wait(30)
    child.stdout.close()


# ---- The child -----------------------------------------------------------------------------------
def run_parts(
    names: list[str], small: bool, flags: list[str], kernels: bool = False, use: str = ""
) -> NoReturn:
    """Runs parts in this process, writes what they find for watch_child(), and ends without waiting
    for threads: where a device hangs, they never end. `use` has the attempts that are to be used,
    separated by commas."""
    faulthandler.enable(all_threads=False)  # shows where a signal has struck
    if small:
        jax.config.update("jax_platforms", "cpu")
        jax.config.update("jax_disable_most_optimizations", True)
    set_compilation_cache()
    if "machine" in names:  # before JAX takes the memory of the GPUs
        failed = run_part("machine", check_machine)
        if failed and not small:
            print_not_tried("machine must pass first", names[1:])
            launch.leave(0)
    send("JAX")
    launch.start_jax()
    if jax.devices()[0].platform == "cpu" and not small:
        print("check_gpu.py: JAX sees neither a GPU nor a TPU: type  ./run.sh check --small")
        launch.leave(NOTHING)
    c = check_kernels.SMALL if kernels else SMALL
    added = {}
    preset = ""
    if not small:
        preset, c = record_with(flags)
        added = launch.fit(flags, preset, c, launch.device_memory())
        c = dataclasses.replace(c, **added)
    devices, c = train_gpt.fit_devices(c)
    facts = software(c, devices) | {"fit": added}
    send("JAX", None, "JAX", software_text(facts), facts)
    if preset and any(facts["bytes_for_JAX"]):
        send("JAX", *room_line(preset, c, added, facts["bytes_for_JAX"]))
    if kernels and small:
        devices = devices[:1]  # with more, the interpreter fails inside shard_map
        check_kernels.interpret()
    mesh = train_gpt.make_mesh(devices)
    parts = make_kernel_parts(c, mesh, small, use) if kernels else make_parts(c, mesh, small)
    left = [name for name in names if name != "machine"]
    while left:
        name = left.pop(0)
        failed = run_part(name, parts[name])
        if launch.NO_MEMORY.search(failed):
            print_not_tried("they need as much memory", left)
            break
    if not kernels or check_kernels.STEPS in names:
        run_part("clocks", check_clocks)
    launch.leave(0)


def print_not_tried(why: str, names: list[str]) -> None:
    """Names the parts that do not run."""
    if names:
        print(f"not tried, because {why}: {', '.join(names)}")


def send(part: str, *line: Any) -> None:
    """Writes a message for read_messages(): that a part begins, or one of its lines. If the next
    one is late, the stacks of all threads are shown before watch_child() ends this process."""
    print(f"{MARK}{json.dumps([part, *line])}", flush=True)
    faulthandler.dump_traceback_later(0.98 * LIMIT)


def run_part(name: str, part: Callable[[], Iterator[Line]]) -> str:
    """Runs a part and sends its lines. Returns the text of those that fail."""
    send(name)
    failed = ""
    try:
        for passes, line, text, fact in part():
            passes = None if passes is None else bool(passes)
            send(name, passes, line, text, fact)
            if passes is False:
                failed += text
    except (Exception, SystemExit) as error:  # the next part may work
        why = f"{type(error).__name__}: {error}".splitlines()[0]
        if launch.NO_MEMORY.search(why):
            why += f"; {launch.ADVICE}"
        send(name, False, name, f"{name} ended with {why}", why)
        failed += why
    return failed


def make_parts(c: Config, mesh: Mesh, small: bool) -> dict[str, Callable[[], Iterator[Line]]]:
    """The parts by name, except machine, ready to run."""
    return {
        "speed": functools.partial(check_speed, c, mesh, 256 if small else 8192),
        "attention": functools.partial(check_attention, c),
        "head": functools.partial(check_head, c),
        "norms": functools.partial(check_norms, c),
        "tiny": functools.partial(check_tiny, c if small else TINY, mesh),
        "record": functools.partial(check_record, c, mesh, 0 if small else 30),
        "devices": functools.partial(check_devices, c, mesh),
    }


def make_kernel_parts(
    c: Config, mesh: Mesh, small: bool, use: str
) -> dict[str, Callable[[], Iterator[Line]]]:
    """The parts of --kernels by name, except machine, ready to run."""
    stage = longest_stage(c)
    parts = {
        name: functools.partial(check_kernels.check_attempt, name, c, stage, small)
        for name in check_kernels.ATTEMPTS
    }

    def train(script, c, steps):
        programs = compile_cycle(c, stage, mesh, script)
        losses, times = train_steps(programs, c, stage, mesh, steps, script=script)
        return losses, float(np.mean(times[-14:]))  # an even number, because two kinds alternate

    names = [name for name in use.split(",") if name]
    steps = functools.partial(check_kernels.check_steps, c, names, small, train)
    return parts | {check_kernels.STEPS: steps}


# ---- Machine and software ------------------------------------------------------------------------
GPU = "name,driver_version,memory.total,memory.used,power.limit,clocks.max.sm"
LOAD = "clocks.sm,clocks.mem,power.draw,temperature.gpu,memory.free"  # MHz, MHz, W, C, MiB


def ask_smi(fields: str) -> list[dict[str, str]]:
    """What nvidia-smi says of each visible GPU, by field; [] where it is missing or fails."""
    command = ["nvidia-smi", f"--query-gpu={fields}", "--format=csv,noheader,nounits"]
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible:
        command.append(f"--id={visible}")
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    except (OSError, subprocess.TimeoutExpired):
        return []
    names = fields.split(",")
    rows = [line.split(", ") for line in done.stdout.splitlines()]
    return [dict(zip(names, row, strict=True)) for row in rows if len(row) == len(names)]


def check_machine() -> Iterator[Line]:
    """Asks nvidia-smi whether all GPUs are of one kind, and unused."""
    gpus = ask_smi(GPU)
    if not gpus:
        yield None, "machine", "nvidia-smi lists no GPU, as on a TPU or a CPU", []
        return
    kinds = set()
    busy = []
    for i, gpu in enumerate(gpus):
        total = gpu["memory.total"]
        used = gpu["memory.used"]
        watts = gpu["power.limit"]
        kinds.add(f"{gpu['name']} ({total} MiB, {watts} W, driver {gpu['driver_version']})")
        if used.isdigit() and int(used) > int(total) / 5:
            busy.append(str(i))
    topology = subprocess.getoutput("nvidia-smi topo -m").partition("Legend")[0]
    links = "with NVLink" if "NV" in topology else "without NVLink"
    text = f"the machine has {len(gpus)} x {' and '.join(sorted(kinds))}, {links}"
    if len(gpus) == 1:
        text = text.removesuffix(f", {links}")
    if busy:
        text += (
            f"; other processes use the memory of the GPUs {', '.join(busy)}: stop them, or leave "
            "these GPUs out with CUDA_VISIBLE_DEVICES"
        )
    if len(kinds) > 1:
        text += "; they should be of one kind: choose with CUDA_VISIBLE_DEVICES"
    passes = len(kinds) == 1 and not busy
    yield passes, "machine", text + (", not in use by others" if passes else ""), gpus


def check_clocks() -> Iterator[Line]:
    """Shows what the GPUs do at the end, which helps to understand slow steps."""
    gpus = ask_smi(LOAD)
    if gpus:
        text = "at the end, clocks of cores and of memory, power, heat: "
        text += "; ".join(load_text(gpu) for gpu in gpus)
        yield None, "clocks", text, gpus


def load_text(gpu: dict[str, str]) -> str:
    """A row of LOAD in words."""
    clocks = f"{gpu['clocks.sm']} and {gpu['clocks.mem']} MHz"
    return f"{clocks}, {gpu['power.draw']} W, {gpu['temperature.gpu']} C"


def room_line(preset: str, c: Config, added: dict[str, int], room: list[int]) -> Line:
    """A line on whether the run fits into the bytes that JAX has of each device. fits.ROWS has what
    was compiled; launch.fit() has refused what is too small for all of them."""
    least = min(room) / 1e9
    text = f"JAX has {least:.1f} GB of each device"
    needs = [
        gigabytes[fits.listed(len(room))]
        for flags, gigabytes in fits.ROWS[preset]
        if all(getattr(c, name) == size for name, size in {**fits.SIZES[preset], **flags}.items())
    ]
    if not needs:
        text += f", and nobody knows what {preset} needs with these flags"
        return None, "room", text, None
    passes = least >= needs[0]
    flags = f" with {fits.command_line(added)}" if added else ""
    text += f", expected at least {needs[0]:.1f} for {preset}{flags} (compiled, not run)"
    return passes, "room", text, needs[0]


def software(c: Config, devices: list[jax.Device]) -> dict[str, Any]:
    """What else one has to know of a machine: versions, variables, cores and bytes of memory."""
    facts = train_gpt.run_facts("check", c, devices, sys.argv)
    names = ("versions", "devices", "driver", "git", "environment")
    memory = [device.memory_stats() or {} for device in devices]
    return {name: facts[name] for name in names} | {
        "libraries": library_versions(),
        "bytes_for_JAX": [stats.get("bytes_limit", 0) for stats in memory],
        "cores": os.cpu_count(),
        "RAM_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
    }


def library_versions() -> dict[str, int]:
    """Versions of the libraries of NVIDIA that this process has loaded, by themselves: those of the
    installed wheels, unless LD_LIBRARY_PATH hides them."""
    by_pointer = {"cudart": "cudaRuntimeGetVersion", "nccl": "ncclGetVersion"}
    by_value = {"cudnn": "cudnnGetVersion", "cublasLt": "cublasLtGetVersion"}
    versions = {}
    for name in (*by_pointer, *by_value):
        path = loaded_library(name)
        if not path:
            continue
        library = ctypes.CDLL(path)
        if name in by_value:
            function = library[by_value[name]]
            function.restype = ctypes.c_size_t
            versions[name] = function()
        else:
            number = ctypes.c_int()
            library[by_pointer[name]](ctypes.byref(number))
            versions[name] = number.value
    return versions


def loaded_library(name: str, maps: Path = Path("/proc/self/maps")) -> str:
    """The path of a shared library in this process, or an empty string. Linux only."""
    if not maps.exists():
        return ""
    found = re.search(rf"/\S*/lib{name}\.so[.\d]*$", maps.read_text(), re.M)
    return found.group() if found else ""


def software_text(facts: dict[str, Any]) -> str:
    """Facts of software() that everybody wants to see."""
    devices = " and ".join(sorted(set(facts["devices"])))
    text = f"jax {facts['versions']['jax']} runs on {len(facts['devices'])} x {devices}"
    text += "".join(f", {name} {version}" for name, version in facts["libraries"].items())
    return f"{text}; {facts['cores']} CPU cores, {facts['RAM_bytes'] / 1e9:.0f} GB of RAM"


# ---- Speed ---------------------------------------------------------------------------------------
def check_speed(c: Config, mesh: Mesh, n: int) -> Iterator[Line]:
    """Measures the rates of every device, so that one slow card shows, and of its link to the next
    one. Products have n x n matrices, and copies 8 n^2 numbers."""
    V = train_gpt.padded_vocab(c)
    D = c.D
    tokens = c.head_chunk
    devices = list(mesh.devices.flat)
    head = functools.partial(
        train_gpt.scaled_matmul, axes=(1, 1), scale=1.0, dtype=c.compute, precision=None
    )
    slowest = {}
    works = {  # bytes or operations; the function, its arguments' shapes and their format
        "copy, TB/s": (32 * n * n, lambda x: x + 1, [(8 * n * n,)], c.compute),
        "product, TFLOP/s": (2 * n**3, lambda a, b: a @ b, [(n, n)] * 2, c.compute),
        "head, TFLOP/s": (2 * tokens * V * D, head, [(tokens, D), (V, D)], c.head_forward),
    }
    for name, (work, run, shapes, dtype) in works.items():
        arrays = [normal(i, *shape, dtype=dtype) for i, shape in enumerate(shapes)]
        rates = [work / seconds(jax.jit(run), *jax.device_put(arrays, d)) for d in devices]
        slowest[name] = min(rates)
        yield rated(name, rates, devices[0])
    links = 0.0
    if len(devices) > 1:
        links = gathered(mesh, n)
        yield rated("gather, TB/s", [links], devices[0])
        pairs = zip(devices, [*devices[1:], devices[0]], strict=True)
        by_pair = [float(f"{gathered(train_gpt.make_mesh(pair), n) / 1e12:.3g}") for pair in pairs]
        text = f"links: from one device to the next, {amounts(by_pair, 'B/s')}"
        yield None, "links, TB/s", text, by_pair  # nobody knows the topology
    if devices[0].platform == "gpu":  # the programs were not compiled for others
        rates = predict.Rates(
            slowest["product, TFLOP/s"], slowest["head, TFLOP/s"], slowest["copy, TB/s"], links
        )
        yield predicted_line(c, len(devices), rates)


def predicted_line(c: Config, devices: int, rates: predict.Rates) -> Line:
    """A line on the time of the run that these rates promise."""
    parts = predict.training_seconds(c, devices, rates)
    if not parts:
        text = "no time is predicted: no program of such a size was compiled; --full times steps"
        return None, "predicted from rates", text, None
    text = predict.sentence(c, devices, parts)
    return None, "predicted from rates", text, parts


def amounts(rates: list[float], unit: str) -> str:
    """Rates in 1e12 of a unit, as "2.81 to 2.93 TB/s on 8 devices" or "4.2 GB/s"."""
    scale, prefix = (1, "T") if max(rates) >= 0.1 else (1000, "G")
    ends = [f"{float(f'{scale * rate:.3g}'):g}" for rate in (min(rates), max(rates))]
    text = f"{' to '.join(dict.fromkeys(ends))} {prefix}{unit}"
    return text if len(rates) == 1 else f"{text} on {len(rates)} devices"


def normal(seed: int, *shape: int, dtype: str = "bfloat16") -> Array:
    """An array of random numbers."""
    return jax.random.normal(jax.random.key(seed), shape).astype(dtype)


def seconds(run: Callable, *arrays: Array) -> float:
    """Seconds per call: the best of four rounds of five calls. The first round compiles."""

    def five_calls():
        jax.block_until_ready([run(*arrays) for _ in range(5)])

    return min(timeit.repeat(five_calls, number=1, repeat=4)) / 5


def gathered(mesh: Mesh, n: int) -> float:
    """Bytes per second that a device receives while all devices collect 8 n^2 numbers, which is a
    gigabyte for n = 8192."""

    def gather(x):
        return lax.all_gather(x, "fsdp", tiled=True, to="invarying")

    x = jax.device_put(normal(0, 8 * n * n), NamedSharding(mesh, P("fsdp")))
    run = jax.jit(jax.shard_map(gather, mesh=mesh, in_specs=P("fsdp"), out_specs=P()))
    return x.nbytes * (mesh.size - 1) / mesh.size / seconds(run, x)


def rated(name: str, rates: list[float], device: jax.Device) -> Line:
    """A line that fails for rates below the floor of their kind, or a tenth below the median. Of a
    single device of another kind, and of CPUs, nothing is expected."""
    rates = [float(f"{rate / 1e12:.3g}") for rate in rates]
    what, unit = MEASURED[name]
    text = f"{what} {amounts(rates, unit)}"
    floor = FLOORS[name] if device.device_kind in HOPPER else 0
    if len(rates) > 1:
        floor = max(floor, 0.9 * float(np.median(rates)))
    if device.platform == "cpu" or not floor:
        return None, name, text, rates
    text += f", expected at least {amounts([floor], unit)}"
    slow = [i for i, rate in enumerate(rates) if rate < floor]
    if slow:
        some = f"device {slow[0]} is" if len(slow) == 1 else f"devices {slow} are"
        text += f": {some} too slow"
    return not slow, name, text, rates


# ---- Values and gradients ------------------------------------------------------------------------
def compare(
    name: str, most: float, run: Callable, exact: Callable, *x: Array, trained: bool = True
) -> Line:
    """A line on run(*x) and, if trained, its gradients, against those of exact in float32. Errors
    are relative: |a - b| / |b|. That of the value must be below 0.01, those of gradients below
    `most`. The name stands in a sentence, as in "attention agrees with float32"."""

    def in_float32(*x):
        with jax.default_matmul_precision("highest"):  # or GPUs round what they multiply
            return exact(*(array.astype("float32") for array in x))

    def value_and_gradients(function, *x):
        if not trained:
            return [function(*x)]
        y, gradients = jax.vjp(function, *x)
        return [y, *gradients(normal(9, *y.shape, dtype=y.dtype))]

    found = jax.jit(functools.partial(value_and_gradients, run))(*x)
    right = jax.jit(functools.partial(value_and_gradients, in_float32))(*x)
    errors = [relative_error(a, b) for a, b in zip(found, right, strict=True)]
    passes = errors[0] < 0.01 and all(error < most for error in errors[1:])
    text = f"{name} {'agrees with' if passes else 'differs from'} float32: "
    text += f"error {percent(errors[0])}, expected below 1 %"
    if trained:
        largest = float(np.max(errors[1:]))
        text += f"; largest error in a gradient {percent(largest)}, expected below {percent(most)}"
    return passes, name, text, errors


def relative_error(found: Array, right: Array) -> float:
    """|found - right| / |right|, NaN if anything is."""
    found = np.float32(found)
    right = np.float32(right)
    return float(np.linalg.norm(found - right) / np.linalg.norm(right))


def check_attention(c: Config) -> Iterator[Line]:
    """At the length of the last stage, with gradients, and at those of validation: with paired
    heads, half as many heads have twice as many positions."""
    T = c.sequence_length(len(c.stages) - 1)
    yield attention_line(c, T, c.H, trained=True)
    yield attention_line(c, c.val_T, c.H, trained=False)
    yield attention_line(c, 2 * c.val_T, c.H // 2, trained=False)
    if c.attention == "cudnn":
        yield window_line(c, T)


def attention_line(c: Config, T: int, heads: int, trained: bool) -> Line:
    """A line on the last queries of T positions, half of them in a document longer than the window,
    half in short ones, with document numbers up to 500."""
    stage = len(c.stages) - 1
    window = c.stages[stage].long
    tail = min(256, T // 4)  # queries
    near = tail + window  # the positions that they see
    documents = min(500, T // 8)  # before those
    starts = np.zeros(T, np.int32)
    starts[np.arange(documents) * (T - near) // documents] = 1
    starts[T - near] = 1  # the long document
    starts[T - tail // 2 :: tail // 16] = 1  # and the short ones
    pos = train_gpt.positions(starts[None], c, stage)
    _, scale = train_gpt.rope_frequencies(c, stage)

    document = np.cumsum(starts)[-near:]
    j = np.arange(near)
    i = j[-tail:, None]
    mask = (j <= i) & (i - j <= window) & (document[-tail:, None] == document)

    def with_code(x, code):
        return x.at[..., -4:].set(jnp.broadcast_to(code, (*x.shape[:-1], 4)))

    def run(q, k, v):
        q = with_code(q, pos.doc_q)
        k = with_code(k, pos.doc_k)
        return train_gpt.attend(q, k, v, window, scale, c)[:, -tail:]

    def exact(q, k, v):
        q = with_code(q, 0)[:, -tail:]
        k = with_code(k, 0)[:, -near:]
        options = {"mask": mask, "scale": scale, "implementation": "xla"}
        return jax.nn.dot_product_attention(q, k, v[:, -near:], **options)

    qkv = [normal(seed, 1, T, heads, c.D // c.H, dtype=c.compute) for seed in range(3)]
    name = f"attention over {T:,} tokens in {np.sum(starts)} documents"
    return compare(name, 0.03, run, exact, *qkv, trained=trained)


def window_line(c: Config, T: int) -> Line:
    """A line on whether a short window saves time, forward and backward: cuDNN must not compute
    scores that are masked."""

    def total(q, k, v, window):
        return train_gpt.attend(q, k, v, window, 0.1, c).sum()

    qkv = [normal(seed, 1, T, c.H, c.D // c.H, dtype=c.compute) for seed in range(3)]
    short = c.stages[0].short
    times = {}
    for window in (short, T // 2):
        gradients = jax.jit(jax.grad(functools.partial(total, window=window), (0, 1, 2)))
        times[window] = round(1e3 * seconds(gradients, *qkv), 3)
    most = times[T // 2] / 3
    text = f"attention with a window of {short} takes {times[short]:.3g} ms, expected below "
    text += f"{most:.3g}, a third of what it takes with a window of {T // 2:,}"
    return times[short] < most, "attention by window", text, times


def check_head(c: Config) -> Iterator[Line]:
    """The head and its loss, whose backward pass is written by hand, in their formats."""
    N = c.head_chunk // 4
    V = train_gpt.padded_vocab(c)
    weights = np.float32([1, 0.5])
    targets = jax.random.randint(jax.random.key(2), (N, 2), 0, c.vocab)
    two_chunks = dataclasses.replace(c, head_chunk=N // 2)

    def head(x, w):
        return train_gpt.head_loss(x, w, targets, weights, None, two_chunks)

    def exact_head(x, w):
        log_p = jax.nn.log_softmax(23 * jax.nn.sigmoid((x @ w.T + 5) / 7.5))
        return -(weights * jnp.take_along_axis(log_p, targets, axis=1)).sum()

    x = normal(0, N, c.D, dtype=c.compute)
    w = 0.05 * normal(1, V, c.D, dtype="float32")
    yield compare(f"the head in {c.head_forward}", 0.15, head, exact_head, x, w)


def check_norms(c: Config) -> Iterator[Line]:
    """The other gradients that are written by hand."""
    N = c.head_chunk // 4
    x = normal(0, 1, N, c.D, dtype=c.compute)
    w = (0.05 * normal(1, c.F, c.D, dtype="float32")).astype(c.compute)

    def exact_product(x, w):
        return train_gpt.norm(x) @ w.T

    for radial_from in "x", "y":

        def product(x, w, radial_from=radial_from):
            return train_gpt.norm_linear(x, w, radial_from)

        name = f"norm and product, with the radial gradient from {radial_from},"
        yield compare(name, 0.02, product, exact_product, x, w)

    x = x.reshape(1, N, c.H, -1)
    # One layer, whose heads are not paired.
    one_layer = dataclasses.replace(c, layers=(Layer(LONG),), mudd_head=())
    pos = train_gpt.positions(jnp.zeros((1, N), jnp.int32), one_layer, 0)
    cos, sin = pos.rope[False]

    def rotation(x):
        return train_gpt.norm_rotate(x, cos, sin, pos.doc_k)[..., :-4]

    def exact_rotation(x):
        return train_gpt.rotate(train_gpt.norm(x), cos, sin)[..., :-4]

    yield compare("norm and rotation", 0.02, rotation, exact_rotation, x)


# ---- Steps of training ---------------------------------------------------------------------------
STEPS = 25  # of a measurement
WARM_UP = 4  # intervals between steps that do not count: first calls, and what follows them


def longest_stage(c: Config) -> int:
    """The stage whose steps read the most tokens together."""
    tokens = collections.Counter()
    for step in range(c.total_steps):
        stage = int(c.stage_at(step))
        tokens[stage] += c.stages[stage].tokens
    return max(tokens, key=tokens.get)


def cycle(c: Config) -> list[bool]:
    """Whether successive steps update everything, until it repeats; the last one does."""
    return [c.is_adam_step(step) for step in range(c.adam_every)]


def compile_cycle(
    c: Config, stage: int, mesh: Mesh, script: ModuleType = train_gpt
) -> list[Callable]:
    """The programs of a stage's cycle. The script is train_gpt.py, or a copy of it."""

    def compile_step(adam_step):
        return script.compile_train_step(stage, adam_step, c, mesh)

    with ThreadPoolExecutor() as pool:
        return list(pool.map(compile_step, cycle(c)))


def host_batches(c: Config, stage: int, script: ModuleType) -> list[tuple[np.ndarray, ScheduleRow]]:
    """Four batches of a stage, in the memory of the host. A few tokens are frequent, and documents
    have 400 tokens. Rates are those of the run's first step."""
    rows = script.schedule(c)
    first_step = int([0, *c.stage_ends][stage])
    row = rows[0]._replace(loss_weights=rows[first_step].loss_weights)
    rng = np.random.default_rng(1)
    batches = []
    for _ in range(4):
        tokens = rng.random((c.batch, c.sequence_length(stage) + 1)) ** 4 * c.vocab
        tokens[:, ::400] = c.eot
        batches.append((tokens.astype(np.int32), row))
    return batches


def training(
    programs: list[Callable], c: Config, stage: int, mesh: Mesh, script: ModuleType = train_gpt
) -> Iterator[Array]:
    """Trains from fresh weights, with the programs of a stage's cycle in turn, without end. Each
    step gets other tokens, which go to the devices as in training. Yields the loss of every step,
    which the devices may still be computing."""
    batches = host_batches(c, stage, script)
    whole = NamedSharding(mesh, P())
    row = jax.tree.map(lambda _: whole, batches[0][1])
    shardings = NamedSharding(mesh, P(mesh.axis_names)), row
    on_devices = train_gpt.prefetch(itertools.cycle(batches), shardings)
    state = script.make_state(c, mesh)
    for program, (tokens, row) in zip(itertools.cycle(programs), on_devices, strict=False):
        state, loss = program(state, tokens, row)
        yield loss


def train_steps(
    programs: list[Callable],
    c: Config,
    stage: int,
    mesh: Mesh,
    steps: int = STEPS,
    least: float = 0,
    script: ModuleType = train_gpt,
) -> tuple[np.ndarray, np.ndarray]:
    """Trains for `steps` steps, and for at least `least` seconds. Returns the loss of every step,
    and the milliseconds from one to the next. The host waits for a loss only when two later steps
    have started, so that the devices always have work."""
    losses = []
    times = []
    for loss in training(programs, c, stage, mesh, script):
        losses.append(loss)
        if len(losses) > 2:
            jax.block_until_ready(losses[-3])
            times.append(time.perf_counter())
        enough = least == 0 or (times and times[-1] - times[0] > least)
        if len(losses) >= steps and enough:
            break
    for loss in losses[-2:]:
        jax.block_until_ready(loss)
        times.append(time.perf_counter())
    return np.array([float(loss) for loss in losses]), 1e3 * np.diff(times)


LEARNS = 0.95  # of its first value, to which a loss must fall


def learns(losses: np.ndarray) -> bool:
    """Whether the loss has fallen by a twentieth; NaN has not. In 25 steps of 8,192 such tokens,
    always fresh ones, the loss of a small model fell by a tenth."""
    return bool(losses[-1] < LEARNS * losses[0])


# ---- Training ------------------------------------------------------------------------------------
TINY_APART = 2e-3  # nats


def check_tiny(c: Config, mesh: Mesh) -> Iterator[Line]:
    """20 steps in float32 on the text of train_gpt.py, with 8 sequences: one for each of 8
    devices."""
    c = dataclasses.replace(c, compute="float32", attention="band").without_fp8()
    stage = Stage(20, 2048, short=64, long=192, max_doc=0, lr=1.0)
    c = dataclasses.replace(c, stages=(stage,), batch=8)
    shards = {"train": [np.array([c.eot, *train_gpt.SOURCE.encode()], np.uint16)]}

    def losses(devices):
        mesh = train_gpt.make_mesh(devices)
        # In this thread, whose precision is "highest", so without compile_cycle().
        programs = [train_gpt.compile_train_step(0, kind, c, mesh) for kind in cycle(c)]
        state = train_gpt.make_state(c, mesh)
        batches = train_gpt.train_batches(c, mesh, shards, 0)
        for program, (tokens, row) in zip(itertools.cycle(programs), batches, strict=False):
            state, loss = program(state, tokens, row)
            yield float(loss)

    devices = tuple(mesh.devices.flat)
    cpu = tuple(jax.local_devices(backend="cpu")[:1])
    right = None
    for some in dict.fromkeys((cpu, devices[:1], devices)):
        with jax.default_matmul_precision("highest"):
            found = np.array(list(losses(some)))
        name = f"tiny, {len(some)} {some[0].platform}"
        if right is None:
            right = found
            text = f"{len(found)} steps in float32 on a CPU bring the loss of a small model from "
            text += f"{found[0]:.4f} to {found[-1]:.4f}, expected at most {LEARNS * found[0]:.4f}"
            yield learns(found), name, text, found.tolist()
            continue
        difference = float(np.abs(found - right).max())
        text = f"the same steps on {len(some)} x {some[0].platform} have the CPU's losses: largest "
        text += f"difference {difference:.1g}, expected below {TINY_APART:g}"
        yield difference < TINY_APART, name, text, difference


def check_record(c: Config, mesh: Mesh, least: float) -> Iterator[Line]:
    """Compiles all programs, trains some steps of each stage and the longest one for at least
    `least` seconds, and predicts the time of the run."""
    facts = {}
    programs = train_gpt.compile_all(c, mesh, SimpleNamespace(facts=facts.update))
    compiled = facts["compile"]
    text = f"{len(programs)} programs were compiled in {compiled['seconds']:.0f} s"
    yield None, "compiling", text, compiled
    train_gpt.warm_up(programs, c, mesh)
    platform = mesh.devices.flat[0].platform
    steps = collections.Counter(int(c.stage_at(step)) for step in range(c.total_steps))
    total = 0.0
    for i in steps:
        of_stage = [programs[i, adam_step] for adam_step in cycle(c)]
        is_longest = i == longest_stage(c)
        losses, times = train_steps(of_stage, c, i, mesh, least=least if is_longest else 0)
        times = times[WARM_UP:]
        yield stage_line(c, i, mesh, losses, times)
        if is_longest and platform != "cpu":
            yield steady_line(i, times, ask_smi(LOAD))
        total += float(steps[i] * np.mean(times)) / 1e3 if learns(losses) else np.nan
    yield memory_line(mesh, [program for (_, kind), program in programs.items() if kind != "val"])
    if np.isnan(total):
        text = "no time is predicted, because a stage has not learned"
        yield False, "predicted training time", text, total
        return
    text = f"predicted time of training: {total:.1f} s for all {c.total_steps} steps of this size "
    text += f"on {mesh.size} x {platform}, by the steps that were timed"
    if platform == "gpu" and c.layers == RECORD.layers:
        text += "; upstream needs 73.8 s on 8 x H100"
    yield None, "predicted training time", text, total


def stage_line(c: Config, stage: int, mesh: Mesh, losses: np.ndarray, times: np.ndarray) -> Line:
    """A line on the speed of a stage, and on whether it learns. run/watch.py has the operations
    that MFU counts, and the peaks of devices."""
    ms = float(np.mean(times))
    rate = 1e3 * c.stages[stage].tokens / ms
    table = train_gpt.param_table(c)
    sizes = {name: math.prod(param.model_shape) for name, param in table.items()}
    config = dataclasses.asdict(c)
    flops = watch.flops_per_token(config, sizes, config["stages"][stage])
    mfu = rate * flops / watch.peak(mesh.devices.flat[0].device_kind) / mesh.size
    share = "" if math.isnan(mfu) else f", MFU {mfu:.1%}"
    text = f"stage {stage}: a step takes {ms:.2f} ms ({rate:,.0f} tokens a second{share}), and the "
    text += f"loss goes from {losses[0]:.2f} to {losses[-1]:.2f}, expected at most "
    text += f"{LEARNS * losses[0]:.2f}"
    return learns(losses), f"stage {stage}", text, [ms, rate, None if math.isnan(mfu) else mfu]


def steady_line(stage: int, times: np.ndarray, gpus: list) -> Line:
    """A line on whether a stage keeps its speed: the last 100 steps may take a tenth more than the
    first 100. Where there are less than 200, it compares halves. `gpus` are rows of LOAD."""
    n = min(100, len(times) // 2)
    first = float(np.mean(times[:n]))
    last = float(np.mean(times[-n:]))
    text = f"stage {stage} keeps its speed for {np.sum(times) / 1e3:.0f} s: "
    if last >= 1.1 * first:
        text = f"stage {stage} gets slower within {np.sum(times) / 1e3:.0f} s: "
    text += f"of {len(times)} steps, the first {n} take {first:.2f} ms each and the last {n} "
    text += f"{last:.2f} ms, expected below {1.1 * first:.2f}"
    if gpus:
        text += f"; then the first GPU had {load_text(gpus[0])}"
    facts = {"steps": len(times), "first_ms": first, "last_ms": last, "GPUs": gpus}
    return last < 1.1 * first, f"stage {stage}, steadily", text, facts


def memory_line(mesh: Mesh, programs: list) -> Line:
    """A line on the memory of every device, and on what the compiler has planned for training."""
    plans = [program.memory_analysis() for program in programs]
    planned = max(plan.argument_size_in_bytes + plan.temp_size_in_bytes for plan in plans)
    stats = [device.memory_stats() or {} for device in mesh.devices.flat]
    used = [stat.get("peak_bytes_in_use", 0) for stat in stats]
    text = f"memory: for training, the compiler plans {sized(planned)} of each device"
    if any(used):
        text += f", and at most {sized(max(used))} were in use"
    return None, "memory", text, used


def sized(n: float) -> str:
    """Bytes in words."""
    return f"{n / 1e9:.1f} GB" if n >= 1e9 else f"{n / 1e6:.1f} MB"


# ---- One device and several ----------------------------------------------------------------------
def check_devices(c: Config, mesh: Mesh) -> Iterator[Line]:
    """Runs the record in its formats on one device and on all. No loss of four steps may differ by
    0.005 nats. Only the third and the fourth come after an update of all weights. In small models
    on 8 CPUs, rounding made a difference of 0.001, and leaving out the gradients of one device made
    one of 0.007."""
    if mesh.size == 1:
        yield None, "devices", "there is one device, so none can be compared with it", None
        return
    losses = {}
    for count in (1, mesh.size):
        some = train_gpt.make_mesh(tuple(mesh.devices.flat)[:count])
        try:
            programs = compile_cycle(c, 0, some)
            losses[count] = train_steps(programs, c, 0, some, steps=4)[0].round(5).tolist()
        except jax.errors.JaxRuntimeError as error:
            if count > 1 or not launch.NO_MEMORY.search(str(error)):
                raise
            text = "one device has too little memory for the record, so several are not compared"
            yield None, "devices", text, None
            return
    difference = float(np.abs(np.subtract(losses[1], losses[mesh.size])).max())
    text = f"four steps have the losses {losses[1]} on 1 device and {losses[mesh.size]} on "
    text += f"{mesh.size}: largest difference {difference:.1g}, expected below 0.005"
    yield difference < 0.005, "devices", text, losses


if __name__ == "__main__":
    with one_line("check_gpu.py"):
        sys.exit(main(sys.argv[1:]))
