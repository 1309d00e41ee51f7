"""Starts a training script as ./run.sh does, on one host or on several: run/hosts.md.

    python run/launch.py SCRIPT [preset] [--field value ...]

SCRIPT is train_gpt.py or a copy of it. Before its main() runs, the processes of a run connect,
compare what must be the same on all of them, and agree on a seed; the record gets flags with which
it fits the memory; and the attention kernel of a GPU is checked. While main() runs, a process that
loses another one ends instead of waiting for it.
"""

import argparse
import collections
import contextlib
import dataclasses
import errno
import functools
import hashlib
import importlib.metadata
import importlib.util
import inspect
import io
import json
import math
import os
import re
import resource
import secrets
import shlex
import shutil
import signal
import socket
import sys
import threading
import time
import tokenize
import traceback
import urllib.request
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, NoReturn

PYTHONS_HANDLER = signal.getsignal(signal.SIGINT)
if __name__ == "__main__" and PYTHONS_HANDLER == signal.default_int_handler:
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C while JAX is imported has no traceback

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402
import optax  # noqa: E402
from jax import Array  # noqa: E402
from jax.experimental.multihost_utils import process_allgather  # noqa: E402

ROOT = Path(__file__).resolve().parents[1]
sys.path.append(str(ROOT / "run"))
import clean  # noqa: E402
import fits  # noqa: E402
import machine  # noqa: E402
from cache import set_compilation_cache  # noqa: E402
from flags import GUARD_FLAGS, wrong_value  # noqa: E402
from guard import (  # noqa: E402
    SIGNALS,
    Guard,
    check_devices,
    check_documents,
    check_run,
    protect_screen,
    refuse,
    states_below,
    taken_signals,
)
from messages import one_line  # noqa: E402 - machine.py adds its folder to the path

HEARTBEAT = 30  # seconds after which JAX ends the processes that have lost another one
JOINED = threading.Event()  # whether this process is connected to the others of its run
ADVICE = (
    "With --batch 16 --head_chunk 8192, a step has as many tokens, in sequences half as long, and "
    "needs less memory; see Memory in run/README.md for more such flags"
)
CUDNN_ADVICE = (
    "the error above is cuDNN's. If it cannot build a plan for validation's 262,144 tokens, try "
    "--val_T 131072; --attention band does without cuDNN"
)
NO_HOST = re.compile("Gloo|NCCL|Connection reset|Connection closed")  # in other errors than JAX's
NO_MEMORY = re.compile("RESOURCE_EXHAUSTED|OUT_OF_MEMORY|out of memory|ALLOC_FAILED")


def main(argv: list[str]) -> None:
    """Runs a script. If it does not return, the process ends by os._exit, because an ordinary exit
    would wait for threads and for the other processes."""
    if not asks_for_help(argv):
        protect_screen()
    if threading.current_thread() is threading.main_thread():  # others cannot handle signals
        watch_signals()
    allow_many_files()
    try:
        if not argv or not Path(argv[0]).is_file():
            usage = "usage: launch.py SCRIPT [preset] [--field value ...]"
            refuse(f"{usage}, where SCRIPT is a file; got {argv[:1]}")
        set_xla_flags()
        join()
        start_jax()
        path = Path(argv[0])
        script = load_script(path)
        is_a_copy = path.resolve() != ROOT / "train_gpt.py"
        command = f"./run.sh {shlex.quote(str(path))}" if is_a_copy else "./run.sh"
        if hasattr(script, "run"):
            weights = train(script, argv[1:], command)
        elif hasattr(script, "save_checkpoint") and hasattr(script, "set_compilation_cache"):
            weights = train_frozen(script, argv[1:], command)
        else:
            refuse(f"{path} is a copy of an older train_gpt.py: make your changes in a new copy")
        print_disk_line()
        if weights:
            flag = f" --script {shlex.quote(str(path))}" if is_a_copy else ""
            print(f"a page of the run: ./run.sh look {weights}{flag}")
            print(f"next: ./run.sh sample {weights}{flag}")
        wanted = sys.stdout.isatty() and os.environ.get("JNANO_SAMPLE") != "0"
        if weights and wanted and jax.process_count() == 1:
            show_sample(weights, path)
    except SystemExit as stop:
        if isinstance(stop.code, str):
            print(stop.code, file=sys.stderr)
            leave(1)
        leave(stop.code or 0)
    except KeyboardInterrupt:
        end_interrupted(signal.SIGINT)
    except jax.errors.JaxRuntimeError as error:
        if NO_MEMORY.search(str(error)):
            why = str(error).splitlines()[0]
            print(f"launch.py: not enough memory: {why}. {ADVICE}", file=sys.stderr)
            leave(2)
        traceback.print_exc()
        if re.search("cudnn", str(error), re.IGNORECASE):
            print(f"launch.py: {CUDNN_ADVICE}", file=sys.stderr)
        if JOINED.is_set():
            time.sleep(HEARTBEAT + 5)  # JAX prints which process was lost, and ends this one
        leave(1)
    except Exception as error:
        if getattr(error, "errno", None) == errno.EMFILE:
            print(f"launch.py: {error}: type  ulimit -n 4096  and start again", file=sys.stderr)
            leave(2)
        traceback.print_exc()
        if JOINED.is_set() and NO_HOST.search(str(error)):
            time.sleep(HEARTBEAT + 5)  # JAX prints which process was lost, and ends this one
        leave(1)


def train(script: ModuleType, argv: list[str], command: str) -> Path | None:
    """Trains with a guard, after all checks. Returns the path of the weights, if they are saved."""
    if asks_for_help(argv):
        with one_line("launch.py"):
            print_help(script, argv)
        sys.exit()
    check_values(script, argv)
    options, rest = split_flags(argv)
    with Guard(script, options) as guard:
        GUARDS[:] = [guard]
        return train_guarded(script, argv, rest, command, guard)


def train_guarded(
    script: ModuleType, typed: list[str], argv: list[str], command: str, guard: Guard
) -> Path | None:
    """train(), from where the guard's watchdog runs. typed are the words of the command line, and
    argv those of them that are the script's."""
    options = guard.options
    preset, c = script.parse_config(argv)
    set_compilation_cache()  # JAX looks only once, at the first program
    several = jax.process_count() > 1
    if several:
        compare_setup(script, c, options)
        compare({"the checkpoint's step": guard.start, "its log": guard.checkpoint.get("log")})
    added = fit(argv, preset, c, device_memory())
    try:
        c = dataclasses.replace(c, **added)
    except ValueError as error:  # the larger batch may not divide the stages of a copy
        refuse(str(error))
    with contextlib.suppress(AttributeError):  # a copy may have left out what is checked
        check_run(script, c)
    devices, fitted = script.fit_devices(c)
    check_devices(preset, fitted, devices)
    check_disk(script, c, options)
    shards = script.find_data(c)
    check_documents(shards, script, c)
    data = script.data_facts(shards, c)
    if several:
        compare_tokens(script, c, data)
    if devices[0].platform == "gpu" and fitted.attention == "cudnn":
        check_attention_once(script, fitted)

    if c.seed < 0 and not options.resume:
        seed = gather(secrets.randbits(31))[0]
        c = dataclasses.replace(c, seed=seed)
        fitted = dataclasses.replace(fitted, seed=seed)
    if jax.process_index() > 0:
        sys.stdout = open(os.devnull, "w")
    words = fits.command_line(added).split()
    command = f"{command} {shlex.join([*argv, *words, *as_flags(options)])}".strip()
    c = guard.compare(c, fitted, data, devices, command)
    if preset in UNFINISHED:
        print(f"warning: {UNFINISHED[preset]}")
    print(layer_table(c))
    return script.run(preset, c, devices, shards, data, [*typed, *words], guard)


def train_frozen(script: ModuleType, argv: list[str], command: str) -> Path | None:
    """Trains with a script that protects itself, as train_gpt.py did until November 2026: that of
    record 92, and copies of it."""
    if asks_for_help(argv):
        with one_line("launch.py"):
            script.parse_config(argv)  # prints it, and ends the process
    check_values(script, argv)
    preset, c = script.parse_config(argv)
    script.set_compilation_cache()
    if jax.process_count() > 1:
        compare_setup(script, c, c)
        script.load_checkpoint = comparing(script.load_checkpoint)
    added = fit(argv, preset, c, device_memory())
    argv = [*argv, *fits.command_line(added).split()]
    preset, c = script.parse_config(argv)
    _, c = script.fit_devices(preset, c)
    if any(getattr(stage, "candidates", 0) for stage in c.stages):
        check_candidates(script, c)
    check_disk(script, c, c)
    if jax.process_count() > 1:
        compare_tokens(script, c, frozen_facts(script, c))
        check_shared_disk(script, c)
        if c.seed < 0 and not c.resume:
            argv = [*argv, "--seed", str(gather(secrets.randbits(31))[0])]
    if jax.local_devices()[0].platform == "gpu" and c.attention == "cudnn":
        check_attention_once(script, c)
    if jax.process_index() > 0:
        sys.stdout = open(os.devnull, "w")
    if preset in UNFINISHED:
        print(f"warning: {UNFINISHED[preset]}")
    print(layer_table(c))
    weights = script.main(argv, command=command)
    return None if preset == "record92" else weights  # evals/ cannot read those of record92


def asks_for_help(argv: list[str]) -> bool:
    """Whether the command line asks for help, and not for a run."""
    return bool({*machine.HELP} & {*argv})


def print_help(script: ModuleType, argv: list[str]) -> None:
    """The values of a preset, a line each with the comment in the source, its stages and layers,
    and the flags of ./run.sh. A * marks what differs from Config's default, the record's."""
    preset = argv[0] if argv and argv[0] in script.PRESETS else next(iter(script.PRESETS))
    c = script.PRESETS[preset]
    comments = field_comments(script.Config)
    print(f"{preset}: its values. All are flags, as --steps 20, but for layers, stages and tuples,")
    print("which are edited in a copy of the file. A * marks what differs from the record.\n")
    for field in dataclasses.fields(script.Config):
        value = getattr(c, field.name)
        if field.name in ("layers", "stages"):
            continue
        is_flag = field.type in (int, float, str)
        above, beside = comments.get(field.name, ([], ""))
        for line in above:
            print(f"        # {line}")
        differs = value != field.default
        if field.name == "steps":
            value = c.total_steps
        words = f"--{field.name} {spell(value)}" if is_flag else f"{field.name} {value}"
        was = f" (record: {spell(field.default)})" if differs and is_flag else ""
        print(f"{'  * ' if differs else '    '}{words:<30} {beside}{was}".rstrip())
    print("\nstages: tokens of a step on all devices, windows in positions, lr as a factor")
    print(stage_table(c))
    print(f"\n{layer_table(c).partition(chr(10))[2]}")
    print("\nFlags of ./run.sh alone:")
    for name, (_, default, what) in GUARD_FLAGS.items():
        print(f"    {f'--{name} {spell(default)}':<30} {what}")


def spell(value: Any) -> str:
    """A value as one types it, but for digits beyond the sixth."""
    return f"{value:g}" if isinstance(value, float) else str(value) if value != "" else '""'


def field_comments(config: type) -> dict[str, tuple[list[str], str]]:
    """The comments of a dataclass's fields: the lines above a field, and that beside it. Comments
    of a copy may stand elsewhere; they are left out."""
    found = {}
    above = []
    for line in inspect.getsource(config).splitlines():
        name = re.match(r"    (\w+): ", line)
        tokens = []
        with contextlib.suppress(tokenize.TokenError, SyntaxError):  # it ends inside of a tuple
            tokens += tokenize.generate_tokens(io.StringIO(line.strip() + "\n").readline)
        beside = [t.string.lstrip("# ") for t in tokens if t.type == tokenize.COMMENT]
        if name:
            found[name[1]] = above, "".join(beside)
        above = [*above, *beside] if line.lstrip().startswith("#") else []
    return found


def stage_table(c: Any) -> str:
    """The stages of a preset, a line for each, below the names of their fields."""
    if not c.stages:
        return "there are none"
    names = [field.name for field in dataclasses.fields(c.stages[0])]
    rows = [names]
    for stage in c.stages:
        rows.append([spell(getattr(stage, name)) for name in names])
    widths = [max(len(row[i]) for row in rows) for i in range(len(names))]
    lines = []
    for row in rows:
        cells = [cell.rjust(width) for cell, width in zip(row, widths, strict=True)]
        lines.append(f"    {'  '.join(cells)}")
    return "\n".join(lines)


def check_values(script: ModuleType, argv: list[str]) -> None:
    """Exits with status 2 for a value on the command line that means nothing, as --steps 0."""
    preset = script.PRESETS.get(argv[0] if argv else "record")
    stages = getattr(preset, "stages", ())
    reason = wrong_value(argv, max(1, sum(bool(stage.steps) for stage in stages)))
    if reason:
        refuse(reason)


def split_flags(argv: list[str]) -> tuple[SimpleNamespace, list[str]]:
    """The values of GUARD_FLAGS, and the other arguments, which are the script's."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.error = refuse
    for name, (kind, default, _) in GUARD_FLAGS.items():
        parser.add_argument(f"--{name}", type=kind, default=default)
    parser.set_defaults(resume=None)
    options, rest = parser.parse_known_args(argv, SimpleNamespace())
    if options.resume == "":  # as of --resume "$unset", which must not begin another run
        refuse("--resume needs the path of a checkpoint or of a folder")
    options.resume = options.resume or ""
    return options, rest


def as_flags(options: SimpleNamespace) -> list[str]:
    """The words of the flags that a resumed run needs as well."""
    words = []
    for name, (_, default, _) in GUARD_FLAGS.items():
        value = getattr(options, name)
        if name not in ("resume", "force") and value != default:
            words += [f"--{name}", str(value)]
    return words


def set_xla_flags() -> None:
    """Gives the first communication between GPUs ten minutes, not one, after which XLA aborts the
    process: on a slow host, eight GPUs may need longer to load a program. Turns off what is wrong
    on CPUs in jax 0.10.2, as run.sh does. These are no options of the compiler, or not of every
    program, and XLA aborts at flags that it does not know: these versions know them."""
    added = {}
    with_cuda = any(importlib.util.find_spec(f"jax_cuda{n}_plugin") for n in (12, 13))
    if with_cuda and (0, 10) <= jax.__version_info__[:2] <= (0, 12):
        added["--xla_gpu_first_collective_call_terminate_timeout_seconds"] = "600"
    if jax.__version__ == "0.10.2":
        added["--xla_cpu_experimental_ynn_fusion_type"] = ""
    for flag, value in added.items():
        flags = os.environ.get("XLA_FLAGS", "")
        if flag not in flags:
            os.environ["XLA_FLAGS"] = f"{flags} {flag}={value}".strip()


def allow_many_files() -> None:
    """Raises the limit of open files, of which every shard is one."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    for limit in (10240, 65536):  # macOS may allow no more than the first
        most = limit if hard == resource.RLIM_INFINITY else min(limit, hard)
        if 0 <= soft < most:
            with contextlib.suppress(OSError, ValueError):
                resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))


UNFIT = {  # options of JAX, and values with which a run would fail, some only after minutes
    "jax_enable_x64": (True,),
    "jax_disable_jit": (True,),
    "jax_transfer_guard": ("disallow", "disallow_explicit"),
    "jax_numpy_rank_promotion": ("raise",),
    "jax_numpy_dtype_promotion": ("strict",),
}
CURES = {  # what JAX's message may contain, and what helps
    "not in the list of known backends|AssertionError|Failed to open libtpu": "JAX_PLATFORMS names "
    "a device that JAX does not find: type  unset JAX_PLATFORMS",
    r"\b802\b|SYSTEM_NOT_READY|not yet initialized": "the GPUs' Fabric Manager does not run: type  "
    "systemctl status nvidia-fabricmanager",
    r"\b803\b|SYSTEM_DRIVER_MISMATCH|library version mismatch": "the driver's library and the "
    "kernel's module differ: restart the machine, or the container",
    "no CUDA-capable device|NO_DEVICE": "check CUDA_VISIBLE_DEVICES and nvidia-smi",
    "'tpu'|libtpu": "another process may use the TPU: restart the session, and import no jax in "
    "the notebook",
}


def start_jax() -> None:
    """Starts JAX on its devices. Exits with status 2, the cause and what helps, if it cannot."""
    for name, values in UNFIT.items():
        value = getattr(jax.config, name, None)
        if value in values:
            refuse(f"{name.upper()} is {value}, so no run can go: type  unset {name.upper()}")
    try:
        jax.devices()
    except (AssertionError, RuntimeError) as error:  # the first has no message
        cause = " ".join(str(error).split())[:300] or repr(error)
        helps = [cure for pattern, cure in CURES.items() if re.search(pattern, cause)]
        cure = helps[0] if helps else "see nvidia-smi, and: When it does not work, in run/README.md"
        refuse(f"JAX cannot start: {cause}; {cure}; without GPUs: JAX_PLATFORMS=cpu ./run.sh tiny")


def leave(status: int) -> NoReturn:
    """Ends the process. Process 0 leaves last, because JAX ends all others once it is gone."""
    for file in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError):
            file.flush()
    if JOINED.is_set() and jax.process_index() == 0:
        time.sleep(2)
    os._exit(status)


def load_script(path: Path) -> ModuleType:
    """Imports the script from its file, as if it had been started itself."""
    sys.path[0] = str(path.resolve().parent)
    spec = importlib.util.spec_from_file_location(path.stem, path)
    script = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = script  # dataclasses look it up
    spec.loader.exec_module(script)
    return script


UNFINISHED = {  # what to know of a preset before one waits for it
    "record92": "record92 may miss 3.28: upstream's runs with a quarter of its n-gram table, as "
    "here, ended at 3.2825 and 3.2863, and those with all of it (--bigrams 84602880) at 3.279; "
    "./run.sh record is what should reach 3.28",
    "medium": "no GPU has run medium, and nobody knows whether it reaches 2.92: see records/medium.md",
}


def check_candidates(script: ModuleType, c: Any) -> None:
    """Exits with status 2 if a sequence has more distinct targets than its stage has candidates for
    the softmax: the loss would leave out some of them in silence."""
    shards = script.find_data(c)["train"]
    shapes = script.batch_shapes("train", c)
    batches = script.read_batches(shards, shapes, c)
    for step, batch in zip(range(c.total_steps), batches, strict=False):
        candidates = c.stages[c.stage_at(step)].candidates
        most = max(np.count_nonzero(np.bincount(sequence[1:])) for sequence in batch)
        if 0 < candidates < most:
            refuse(
                f"step {step} reads {most} distinct tokens at once, but has {candidates} candidates"
            )


def check_disk(script: ModuleType, c: Any, options: Any) -> None:
    """Exits with status 2 if the disk has no room for the weights and, with --save_every, for up to
    three checkpoints: the newest two and the one that is being written; or if it cannot be
    written."""
    if jax.process_index() == 0:
        try_to_write(Path("logs"), script.SOURCE.encode())
    weights = 0
    for param in script.param_table(c).values():
        dtype = getattr(param, "dtype", "float32")  # copies of older files have no field for it
        weights += math.prod(param.shape) * jnp.dtype(dtype).itemsize
    state = jax.eval_shape(lambda: script.initial_state(np.uint32(0), c))
    arrays = jax.tree.leaves(state._replace(lookups={}))
    checkpoint = sum(x.size * x.dtype.itemsize for x in arrays)
    saves = c.total_steps // options.save_every if options.save_every else 0
    old = old_checkpoints(options)
    need = weights * bool(c.save) + checkpoint * (min(3, old + saves) - old)
    folder = Path("logs") if Path("logs").is_dir() else Path()
    free = shutil.disk_usage(folder).free
    if need > free:
        refuse(
            f"{folder.absolute()} has {free / 1e9:.1f} GB of room, but the weights take "
            f"{weights / 1e9:.1f} GB and a checkpoint {checkpoint / 1e9:.1f} GB: delete something, "
            "or add --save 0 --save_every 0"
        )
    if jax.process_index() > 0:
        return
    if saves == 0 and need + checkpoint > free:
        print(
            f"warning: an interrupted run leaves a checkpoint of {checkpoint / 1e9:.1f} GB, for "
            "which there is no room beside the weights"
        )
    if need > 10e9:
        print(f"This run will write {need / 1e9:.0f} GB to {folder}/ (--save 0: no weights).")


def try_to_write(folder: Path, content: bytes) -> None:
    """Exits with status 2 if no file can be written in a folder, which is made if need be."""
    probe = folder / f"probe-{secrets.token_hex(4)}"
    try:
        folder.mkdir(exist_ok=True)
        try:
            probe.write_bytes(content)
        finally:
            probe.unlink(missing_ok=True)
    except OSError as error:
        why = "this is no folder" if isinstance(error, FileExistsError) else error.strerror
        link = f", a link to {os.readlink(folder)}," if folder.is_symlink() else ""
        refuse(f"{folder.absolute()}{link} must be a folder for the log, but {why}")


def old_checkpoints(options: Any) -> int:
    """How many checkpoints the folder of the resumed run has. After a change (--force 1), a run has
    a new folder."""
    if not options.resume or options.force:
        return 0
    source = Path(options.resume)
    states = [source] if source.is_file() else states_below(source)
    return len([*states[-1].parent.glob("*.state")]) if states else 0


# ---- Before and after a run ----------------------------------------------------------------------
WORDS = {  # what a field of Layer adds to the layer, for a person
    "paired_heads": "paired heads",
    "key_offset": "key offset",
    "key_start": "key start",
    "xsa": "exclusive",
    "head_gate": "head gates",
    "dc": "dynamic composition",
    "x0": "x0",
    "narrow_qk": "narrow q and k",
    "narrow_v": "narrow v",
    "bigram": "bigram",
    "new_gates": "new gates",
}


def layer_table(c: Any) -> str:
    """The layers of a model in words, a line for each, below the lengths of the windows."""
    short = ", ".join(str(stage.short) for stage in c.stages)
    long = ", ".join(str(stage.long) for stage in c.stages)
    lines = [
        f"windows by stage, in positions: short {short}; long {long}",
        "attention of each layer, which also has MLPs (words: class Layer in train_gpt.py):",
    ]
    for number, layer in enumerate(c.layers):
        fields = vars(layer)  # a copy of train_gpt.py may have left some out
        words = [word for field, word in WORDS.items() if fields.get(field)]
        if fields.get("value_table") is not None:
            words.append(f"value table {layer.value_table}")
        if fields.get("attend_to") is not None:
            words.append(f"attends to layer {layer.attend_to}")
        if fields.get("skip_from") is not None:
            words.append(f"adds layer {layer.skip_from}")
        if fields.get("mudd"):
            words.append(f"mixes {', '.join(layer.mudd)}")
        if fields.get("mlps", 1) != 1:
            words.append(f"{layer.mlps or 'no'} MLPs")
        window = f"{layer.window} window" if fields.get("window") else "no attention"
        lines.append(f"layer {number:2}  {window:12}  {', '.join(words)}".rstrip())
    return "\n".join(lines)


def print_disk_line() -> None:
    """Prints what runs have left in logs/."""
    with contextlib.suppress(OSError):  # another process removes files there
        line = clean.disk_line()
        if line:
            print(line)


def show_sample(weights: Path, script: Path) -> NoReturn:
    """Replaces this process by one that generates text, so that the devices are free for it. The
    run was successful, so the exit status is 0 even if the sample fails or Ctrl-C ends it."""
    print("A sample, which Ctrl-C ends (JNANO_SAMPLE=0: none):", flush=True)
    tool = ROOT / "evals/sample.py"
    # Documents may be short; what is shown should not be.
    command = [sys.executable, str(tool), str(weights), "--script", str(script), "--go_on"]
    os.closerange(3, 4096)  # a device that is still open could not be opened by the new process
    os.execv("/bin/sh", ["sh", "-c", 'trap : INT HUP; "$@"; exit 0', "sh", *command])


# ---- Signals -------------------------------------------------------------------------------------
def watch_signals() -> None:
    """Starts a thread that reads signals, because Python runs no handler while the main thread
    waits for XLA. From here on, the first process of a container heeds them as well: Linux ignores
    signals for which that one has no handler."""
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    signal.set_wakeup_fd(writer)
    for number in taken_signals():
        if number != signal.SIGINT:
            signal.signal(number, leave_it_to_the_thread)
    threading.Thread(target=end_at_signals, args=[reader], daemon=True).start()


def leave_it_to_the_thread(number: int, frame: Any) -> None:
    """Handles a signal in end_at_signals(), until the script installs its handlers."""


INTERRUPTED = threading.Lock()


def end_interrupted(number: int) -> NoReturn:
    """Ends the process at a signal that no run handles. If both threads notice Ctrl-C, the second
    one waits for its end here."""
    INTERRUPTED.acquire()
    name = signal.Signals(number).name
    print(f"\nlaunch.py: {name}: stopped without a new checkpoint", file=sys.stderr, flush=True)
    leave(128 + number)


def end_at_signals(reader: int) -> None:
    """Ends the process at a signal or, once the script has installed its handlers, at the second
    Ctrl-C or SIGTERM. Other signals do not count: Slurm warns of its SIGTERM, and a limit of CPU
    time sends SIGXCPU every second. mpirun and timeout send a signal twice, so one within 0.3 s of
    the first is ignored."""
    first_time = None
    is_answered = False
    while True:
        number = os.read(reader, 1)[0]
        if number not in SIGNALS:
            continue
        if signal.getsignal(number) in (signal.default_int_handler, leave_it_to_the_thread):
            end_interrupted(number)
        now = time.monotonic()
        counts = number in (signal.SIGINT, signal.SIGTERM)
        if counts and first_time is not None and now > first_time + 0.3:
            end_at_second_signal(number)
        if counts and first_time is None:
            first_time = now
        if not is_answered:
            is_answered = True
            what = "finish what is under way, and save a checkpoint if steps are left"
            how = "Ctrl-C or SIGTERM, twice in all, stops it at once"
            print(f"\nlaunch.py: the run will {what}; {how}", file=sys.stderr, flush=True)


GUARDS = []  # that of the run, once it has one


def end_at_second_signal(number: int) -> NoReturn:
    """Ends the process, after a line in the log. The disk and the screen may hang, so it waits for
    them 5 s each."""
    what = "stopped without a new checkpoint"
    jobs = [functools.partial(print, f"\nlaunch.py: {what}", file=sys.stderr, flush=True)]
    jobs += [functools.partial(guard.note_end, number) for guard in GUARDS]
    for job in jobs:
        thread = threading.Thread(target=job, daemon=True)
        thread.start()
        thread.join(5)
    os._exit(128 + number)


# ---- Hosts ---------------------------------------------------------------------------------------
# The variables in which torchrun, Open MPI and Slurm give a process the number of processes and its
# rank among them, in the whole run and on its host.
LAUNCHERS = (
    ("WORLD_SIZE", "RANK", "LOCAL_WORLD_SIZE", "LOCAL_RANK"),
    tuple(f"OMPI_COMM_WORLD_{name}" for name in ("SIZE", "RANK", "LOCAL_SIZE", "LOCAL_RANK")),
    ("SLURM_STEP_NUM_TASKS", "SLURM_PROCID", "SLURM_STEP_TASKS_PER_NODE", "SLURM_LOCALID"),
)
TPU_DEVICES = ("/dev/accel0", "/dev/vfio/0")
TPU_WORKERS = "http://metadata.google.internal/computeMetadata/v1/instance/attributes/worker-network-endpoints"


def join() -> None:
    """Connects this process to the others of the run, which a launcher or JNANO_COORDINATOR,
    JNANO_PROCESSES and JNANO_PROCESS have described. A process without others connects to none."""
    env = os.environ
    names = ("", "", "", "")
    for variables in reversed(LAUNCHERS):  # the first that is set counts
        if env.get(variables[0]) and env.get(variables[1]):
            names = variables
    count_name, rank_name, local_count_name, local_rank_name = names
    count_name = "JNANO_PROCESSES" if env.get("JNANO_PROCESSES") else count_name
    rank_name = "JNANO_PROCESS" if env.get("JNANO_PROCESS") else rank_name
    count = number_in(count_name, 1, 1)
    rank = number_in(rank_name, 0)
    coordinator = env.get("JNANO_COORDINATOR")
    described = bool(count_name and rank_name)
    if (coordinator or count_name or rank_name) and not described:
        wanted = "JNANO_COORDINATOR", "JNANO_PROCESSES", "JNANO_PROCESS"
        missing = [name for name in wanted if not env.get(name)]
        there = [name for name in wanted if env.get(name)]
        refuse(f"{' and '.join(there)} without {' and '.join(missing)}: see run/hosts.md")
    settings = "no variable that describes it"
    if described:
        settings = f"{count_name}={env[count_name]} {rank_name}={env[rank_name]}"
        settings += f" (if this is the only process, type  unset {count_name} {rank_name})"
    if described and rank not in range(count):
        refuse(f"there is no such process: {settings}")
    if count < 2 and not is_tpu_pod():
        return

    # Several processes on a host take one GPU each, unless the launcher shows only one to each.
    devices = []  # for JAX, all that it sees
    alone = re.match(r"1\b", env.get(local_count_name) or "1")  # Slurm: "1(x2)" on two nodes
    visible = env.get("CUDA_VISIBLE_DEVICES")
    sees_several = visible is None or "," in visible
    if env.get(local_rank_name) and not alone and sees_several:
        devices = [number_in(local_rank_name, 0)]
    if not coordinator and env.get("MASTER_ADDR"):  # torchrun itself listens at MASTER_PORT
        coordinator = f"{env['MASTER_ADDR']}:{number_in('MASTER_PORT', 29500, 1, 65534) + 1}"
    place = {}  # if it stays empty, JAX asks the launcher or the TPU itself
    if coordinator and described:
        if rank == 0:
            try_to_listen(coordinator)
        place = {
            "coordinator_address": coordinator,
            "num_processes": count,
            "process_id": rank,
            "cluster_detection_method": "deactivate",
        }
    wait = number_in("JNANO_WAIT", 300, 1, 10**6)

    def give_up():
        text = (
            f"{count} processes were expected, but they did not all come in {wait} s (JNANO_WAIT): "
            "see what the missing ones printed, and whether they can reach process 0; this one has "
            f"{settings}"
        )
        print(f"launch.py: {text}", file=sys.stderr, flush=True)
        os._exit(2)

    timer = threading.Timer(wait, give_up)
    timer.daemon = True
    if described:  # JAX knows how many hosts a TPU has
        timer.start()
    jax.config.update("jax_enable_preemption_service", False)  # it would catch SIGTERM
    try:
        jax.distributed.initialize(
            **place,
            local_device_ids=devices,
            initialization_timeout=wait + 5,
            heartbeat_timeout_seconds=HEARTBEAT,
        )
    except Exception as error:
        cause = " ".join(str(error).split())[:300]
        cure = "set JNANO_COORDINATOR to HOST:PORT, as run/hosts.md explains"
        refuse(f"this process cannot connect to others: {cause}; {cure}; it has {settings}")
    finally:
        timer.cancel()
    JOINED.set()


def number_in(name: str, default: int, least: int = -(2**31), most: int = 2**31 - 1) -> int:
    """The number in an environment variable. Exits with status 2 if there is something else, or a
    number out of its range."""
    text = os.environ.get(name) or default
    try:
        number = int(text)
    except ValueError:
        refuse(f"{name}={text} is no number: type  unset {name}  or set it right")
    if not least <= number <= most:
        refuse(f"{name}={text} is not from {least} to {most}: type  unset {name}  or set it right")
    return number


def try_to_listen(address: str) -> None:
    """Exits with status 2 if this host cannot listen at the port: JAX would end without a word."""
    try:
        socket.create_server(("", int(address.rpartition(":")[2]))).close()
    except (OSError, OverflowError, ValueError) as error:
        refuse(f"process 0 cannot listen at {address}, which must be HOST:PORT: {error}")


def is_tpu_pod() -> bool:
    """Whether this is one of several TPU hosts. A single one, as on Colab and Kaggle, may be named
    local or localhost, and must not wait for others."""
    workers = os.environ.get("TPU_PROCESS_ADDRESSES") or os.environ.get("TPU_WORKER_HOSTNAMES")
    slices = number_in("MEGASCALE_NUM_SLICES", 1)
    has_device = any(os.path.exists(path) for path in TPU_DEVICES)
    has_tpu = has_device and bool(importlib.util.find_spec("libtpu"))
    if not has_tpu or workers in ("local", "localhost"):
        return False
    if not workers:
        request = urllib.request.Request(TPU_WORKERS, headers={"Metadata-Flavor": "Google"})
        with contextlib.suppress(OSError):  # a TPU outside Google's cloud
            workers = urllib.request.urlopen(request, timeout=5).read().decode()
    return slices > 1 or "," in (workers or "")


# ---- What must be the same -----------------------------------------------------------------------
def gather(value: Any) -> list[Any]:
    """Collects a value, which must fit into JSON, from every process, in the order of ranks."""
    text = json.dumps(value).encode()
    longest = int(process_allgather(np.int32(len(text))).max())
    texts = process_allgather(np.frombuffer(text.ljust(longest), np.uint8))
    return [json.loads(row.tobytes()) for row in texts]


def compare(facts: dict[str, Any]) -> None:
    """Exits with status 2, on all processes, if these facts are not the same on all of them."""
    hosts = gather((os.uname().nodename, facts))
    first_name, first = hosts[0]
    for number, (name, other) in enumerate(hosts):
        differences = []
        for fact in first | other:
            expected = first.get(fact)
            found = other.get(fact)
            if found != expected:
                differences.append(f"{fact} is {found!r:.60}, not {expected!r:.60}")
        if differences:
            refuse(
                f"process {number} on {name} and process 0 on {first_name} are not the same: "
                + "; ".join(differences[:3])
            )


def compare_setup(script: ModuleType, c: Any, options: Any) -> None:
    """Compares devices, source, flags and versions."""
    counts = collections.Counter(device.process_index for device in jax.devices())
    if len(set(counts.values())) > 1:
        refuse(f"processes need equally many devices, but by process these are {dict(counts)}")
    flags = {f"--{name}": value for name, value in dataclasses.asdict(c).items()}
    for name in ("--data", "--layers", "--stages", "--averages"):  # all but data are in the source
        flags.pop(name, None)
    flags |= {f"--{name}": getattr(options, name) for name in GUARD_FLAGS}
    flags["--resume"] = bool(options.resume)  # paths may differ
    facts = {}
    for number, line in enumerate(script.SOURCE.splitlines(), 1):
        facts[f"{script.__name__}.py:{number}"] = line
    facts |= flags
    facts |= {module.__name__: module.__version__ for module in (jax, np, optax)}
    facts["devices"] = jax.local_devices()[0].device_kind
    compare(facts)


def comparing(load_checkpoint: Callable) -> Callable:
    """load_checkpoint() of a script that protects itself, which then compares what it has read."""

    def load_and_compare(place):
        checkpoint, arrays = load_checkpoint(place)
        compare({f"the checkpoint's {name}": checkpoint[name] for name in ("step", "log")})
        return checkpoint, arrays

    return load_and_compare


def frozen_facts(script: ModuleType, c: Any) -> list[dict]:
    """The facts of all shards, by a script that protects itself."""
    jobs = []
    for split, shards in script.find_data(c).items():
        jobs += [(shard, script.batch_shapes(split, c)) for shard in shards]
    with ThreadPoolExecutor(8) as pool:
        return list(pool.map(lambda job: script.shard_facts(*job, c), jobs))


def compare_tokens(script: ModuleType, c: Any, data: list[dict]) -> None:
    """Compares the shards and tables that the run will read, and what fit() has made of the sizes,
    which depends on the flags that were typed."""
    facts = {shard["file"]: shard["sha256"] for shard in data}
    facts |= {f"--{name}": getattr(c, name, None) for name in fits.RECORD}
    if c.prefixes:
        facts[c.prefixes] = hashlib.sha256(script.prefix_table(c).tobytes()).hexdigest()
    if getattr(c, "canonical", ""):
        arrays = [array.tobytes() for array in script.canonical_mask(c)]
        facts[c.canonical] = hashlib.sha256(b"".join(arrays)).hexdigest()
    compare(facts)


def check_shared_disk(script: ModuleType, c: Any) -> None:
    """Exits with status 2 if several hosts would write parts of one table to disks of their own. At
    the end of the run, its weights would be lost."""
    dtypes = [getattr(param, "dtype", "float32") for param in script.param_table(c).values()]
    if "bfloat16" not in dtypes or not (c.save or c.save_every):
        return
    folder = Path("logs").absolute()
    folder.mkdir(exist_ok=True)
    mark = folder / f"shared-{gather(secrets.token_hex(8))[0]}"
    if jax.process_index() == 0:
        mark.touch()
    gather("the mark is there")
    found = gather(mark.exists())
    mark.unlink(missing_ok=True)
    if not all(found):
        refuse(
            f"all hosts write the n-gram table to {folder} together, so this must be a folder on a "
            "disk that they share; without one: --save 0 --save_every 0"
        )


# ---- Memory --------------------------------------------------------------------------------------
def fit(argv: list[str], preset: str, c: Any, memory: float) -> dict[str, int]:
    """The flags with which a large preset fits so many gigabytes of the smallest device. Where the
    command line or a copy of train_gpt.py has set one of fits.SIZES, there are none. Exits with
    status 2 if the memory is too short for any row of fits.ROWS."""
    typed = {argument.partition("=")[0] for argument in argv}
    sizes = {name: getattr(c, name, None) for name in fits.RECORD}
    names = [preset] if preset in fits.SIZES else [*fits.SIZES]  # a copy may have other presets
    matches = [name for name in names if fits.SIZES[name] == sizes]
    if not matches or typed & {f"--{name}" for name in sizes}:
        return {}
    (fitted,) = matches
    devices = min(len(jax.devices()), c.batch)
    flags = fits.fit(memory, devices, fitted)
    if flags is None:
        refuse(
            f"JAX has {memory:.1f} GB of each of {devices} devices, but {fitted} needs "
            f"{fits.least(devices, fitted)} GB: use ./run.sh tiny, or more devices; to try it all "
            f"the same: --batch {c.batch}"
        )
    if not flags:
        return {}
    remark = "as many tokens a step, in shorter sequences"
    if "bigrams" in flags:
        remark += " and with a smaller bigram table, so this is not the record"
    added = fits.command_line(flags)
    if jax.process_index() == 0:
        print(
            f"JAX has {memory:.1f} GB of each device, so {fitted} runs with {added}: {remark}. "
            f"To run it as it is: --batch {c.batch}"
        )
    return flags


def device_memory() -> float:
    """Gigabytes that JAX has of the smallest device of all processes; infinite where it does not
    state them, as on CPUs."""
    stats = [device.memory_stats() or {} for device in jax.local_devices()]
    least = min(stat.get("bytes_limit", math.inf) for stat in stats) / 1e9
    return float(process_allgather(np.float32(least)).min())


# ---- The attention kernel of GPUs ----------------------------------------------------------------
def check_attention_once(script: ModuleType, c: Any) -> None:
    """Checks the kernel, unless it has passed on this machine with the same software. Exits with
    status 2 if it is wrong."""
    gpus = []
    with contextlib.suppress(machine.NoGpu):
        gpus = machine.nvidia_smi("name,driver_version", r".+, \d[\d.]*")
    packages = {d.metadata["Name"]: d.version for d in importlib.metadata.distributions()}
    software = {k: v for k, v in packages.items() if re.match("jax|nvidia-cudnn", k or "")}
    functions = (attention_errors, script.attend, script.positions, script.rope_frequencies)
    sources = [inspect.getsource(function) for function in functions]
    is_narrow = any(getattr(layer, "narrow_v", False) for layer in c.layers)
    model = [c.D, c.H, c.attention, c.compute, is_narrow]
    facts = [os.uname().nodename, gpus, software, sources, model]
    digest = hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()
    stamp = ROOT / ".cache" / f"attention-{digest[:16]}"
    if stamp.exists():
        return
    errors = attention_errors(script, c)
    if is_narrow:
        narrow = attention_errors(script, c, narrow=True)
        errors |= {f"narrow {name}": error for name, error in narrow.items()}
    if not all(error < 0.1 for error in errors.values()):  # NaN fails as well
        refuse(
            f"attention by {c.attention} is wrong on this machine, errors {errors}; try another "
            "driver, or the versions that ./run.sh installs into a new .venv"
        )
    with contextlib.suppress(OSError):  # where nothing can be written, the next run checks again
        stamp.parent.mkdir(exist_ok=True)
        stamp.write_text(json.dumps(errors) + "\n")


def attention_errors(script: ModuleType, c: Any, narrow: bool = False) -> dict[str, float]:
    """Errors of attend() in y, dq, dk and dv, for heads of all channels or of half of them: the
    norm of the error of the worst token, divided by the root mean square of the norms of all
    tokens. The reference is XLA's kernel in float32, with a mask instead of window and document
    codes. cuDNN's faults are silent: it may ignore a window, or let tokens attend to later ones."""
    T, window = 512, 16
    # Documents of 22 tokens. Their numbers, 2^n - 1 and 2^n, change every bit of the codes.
    powers = 2 ** np.arange(13)
    document = np.repeat(np.union1d(powers - 1, powers), 22)[:T]
    query, key = np.ogrid[:T, :T]
    mask = (key <= query) & (query - key <= window) & (document[:, None] == document)
    pos = script.positions(np.diff(document, prepend=0)[None], c, 0)
    _, scale = script.rope_frequencies(c, 0, narrow) if narrow else script.rope_frequencies(c, 0)
    channels = c.D // c.H // (2 if narrow else 1)

    def with_code(x: Array, code: Any) -> Array:
        return x.at[..., -4:].set(jnp.broadcast_to(code, (*x.shape[:-1], 4)))

    def kernel(q, k, v):
        q = with_code(q, pos.doc_q)
        k = with_code(k, pos.doc_k)
        return script.attend(q, k, v, window, scale, c)

    def reference(q, k, v):
        q = with_code(q, 0).astype(jnp.float32)
        k = k.astype(jnp.float32)
        v = v.astype(jnp.float32)
        return jax.nn.dot_product_attention(q, k, v, mask=mask, scale=scale, implementation="xla")

    q, k, v, dy = jax.random.normal(jax.random.key(0), (4, 1, T, c.H, channels), c.compute)

    def value_and_gradients(function: Callable, dy: Array) -> tuple[Array, ...]:
        def together(q, k, v, dy):
            y, vjp = jax.vjp(function, q, k, v)
            return y, *vjp(dy)

        return jax.jit(together)(q, k, v, dy)  # one program: every operation alone takes long

    results = value_and_gradients(kernel, dy)
    references = value_and_gradients(reference, dy.astype(jnp.float32))
    errors = {}
    for name, x, exact in zip(("y", "dq", "dk", "dv"), results, references, strict=True):
        x = np.float32(x)
        exact = np.float32(exact)
        worst = np.square(x - exact).sum(axis=-1).max()
        errors[name] = float(worst / np.square(exact).sum(axis=-1).mean()) ** 0.5
    return errors


if __name__ == "__main__":
    signal.signal(signal.SIGINT, PYTHONS_HANDLER)
    main(sys.argv[1:])
