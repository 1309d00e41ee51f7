"""Protects a run of train_gpt.py: checkpoints, resume, signals and stalls.

run/launch.py makes a Guard and passes it to run() of train_gpt.py, which trains without one as well
and calls it in four places:

    begin(state, ...)    before the first step: returns the state to begin with
    wants(step)          before each step: whether to save the state
    save(state, ...)     saves it, and ends the run if a signal has asked for that
    step_ended(loss)     after each step

The run also reads its attributes start, seconds, log_path and facts. A checkpoint is a file
logs/RUN/STEP.state: a NumPy archive of raw arrays, with facts of the run as JSON.
"""

import contextlib
import dataclasses
import faulthandler
import fcntl
import json
import math
import os
import re
import select
import signal
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, NoReturn
from zlib import crc32

import jax
import jax.numpy as jnp
import numpy as np
from jax import P
from jax.experimental.multihost_utils import process_allgather
from jax.sharding import NamedSharding

sys.path.append(os.path.dirname(os.path.abspath(__file__)))
from clean import RUN, has_result  # noqa: E402
from flags import LARGE, MOST, RANGES, out_of_range  # noqa: E402

MAX_DOCUMENTS = 4095  # of a sequence: positions() in train_gpt.py cannot tell more apart


def refuse(message: str) -> NoReturn:
    """Ends the process with one line and exit status 2."""
    print(f"launch.py: {message}", file=sys.stderr)
    sys.exit(2)


def warn(message: str) -> None:
    """Prints a warning."""
    print(f"warning: {message}", file=sys.stderr)


# ---- Refusals ------------------------------------------------------------------------------------
STAGE_RANGES = (
    ("steps", 0, 10**6),
    ("tokens", 1, MOST),
    ("short long max_doc", 0, MOST),
    ("lr", 0.0, LARGE),
)
WIDE = "bfloat16", "float16", "float32"
NARROW = "float8_e4m3fn", "float8_e5m2"
CHOICES = {
    "attention": ("cudnn", "band"),
    "compute": WIDE,
    "head_forward": WIDE + NARROW,
    "head_backward": WIDE + NARROW,
}


def check_run(script: ModuleType, c: Any) -> None:
    """Exits with status 2 for layers, stages or flags with which a run would fail while it is
    compiled, or later. Those with which it would be wrong in silence, Config refuses itself."""
    for holds, message in rules(script, c):
        if not holds:
            refuse(message)


def rules(script: ModuleType, c: Any) -> Iterator[tuple[bool, str]]:
    """Rules, and what to print if one does not hold. A rule may need those before it."""
    fields = vars(c)  # a copy may have left out some, or may have other values in them
    for name in ("layers", "stages", "mudd_head", "ngrams"):
        is_tuple = isinstance(getattr(c, name), tuple)
        yield is_tuple, f"{name} must be a tuple: (a, b), or (a,) for one"
    for name, values in CHOICES.items():
        value = fields.get(name, values[0])
        yield value in values, f"--{name} {value} is not one of: {', '.join(values)}"
    yield from in_ranges(RANGES, fields, "--")
    yield c.eot < c.vocab, f"--eot {c.eot} is no token of --vocab {c.vocab}"
    lengths = sorted(script.NGRAM_FACTORS)
    known = c.ngrams and set(c.ngrams) <= set(lengths)
    yield known, f"ngrams are {c.ngrams}, which must be some of {lengths}"
    yield c.bigrams >= 2 * len(c.ngrams), f"--bigrams {c.bigrams}: too few for {c.ngrams}"
    yield 0 < c.ngram_capacity <= 1, f"--ngram_capacity {c.ngram_capacity} is not in (0, 1]"

    for i, stage in enumerate(c.stages):
        yield from in_ranges(STAGE_RANGES, vars(stage), f"stage {i}: ")
        what = f"stage {i}: targets must be a tuple of numbers and of pairs (a, b)"
        yield isinstance(stage.targets, tuple), what
        weights = script.target_weights(stage)
        yield all(is_number(x) for pair in weights.values() for x in pair), what
        yield bool(weights), f"stage {i}: all weights in targets and prefix are 0"
        has_table = script.PREFIX not in weights or bool(c.prefixes)
        yield has_table, f"stage {i}: prefix has a weight, but --prefixes names no table"
        mixes = not fields.get("pointer", 0) or 1 in weights  # with the first target alone
        yield mixes, f"stage {i}: the first of targets has no weight, but --pointer needs it"
    trained = [c.sequence_length(i) for i, stage in enumerate(c.stages) if stage.steps]
    yield bool(trained), "no stage has a step"
    lengths = [c.val_T, *(c.sequence_length(i) for i in range(len(c.stages)))]
    divisor = math.gcd(c.head_chunk, *lengths)
    what = f"--head_chunk {c.head_chunk} does not divide sequences of {lengths} tokens, but "
    yield divisor == c.head_chunk, f"{what}{divisor} does"
    longest = fields.get("pointer", 0)
    what = f"--pointer {longest} is more than a sequence, {min(trained)} tokens"
    yield longest <= min(trained), what

    tables = c.value_tables()
    yield tables == list(range(len(tables))), f"value tables are {tables}: leave no gaps"
    streams = ["x0", "bigram", "input", *(f"value{n}" for n in tables)]
    for i, layer in enumerate(c.layers):
        windows = (script.SHORT, script.LONG, None)
        yield layer.window in windows, f"layer {i}: no window {layer.window!r}"
        for name in ("attend_to", "skip_from"):
            source = getattr(layer, name)
            earlier = source is None or source in range(i)
            yield earlier, f"layer {i}: {name}={source} is not an earlier layer"
        yield isinstance(layer.mudd, tuple), f"layer {i}: mudd must be a tuple: (a, b), or (a,)"
        for name in layer.mudd:
            message = f"layer {i}: mudd reads {name!r}, there are only {streams}"
            yield name in streams, message
        streams.append(f"layer{i}")
    yield bool(c.layers), "there are no layers"
    for entry in c.mudd_head:
        is_pair = isinstance(entry, tuple) and len(entry) == 2 and is_number(entry[1])
        yield is_pair, f"mudd_head has {entry!r}, which is no pair (stream, weight)"
        yield entry[0] in streams, f"mudd_head reads {entry[0]!r}, there are only {streams}"


def in_ranges(ranges: tuple, fields: dict, place: str) -> Iterator[tuple[bool, str]]:
    """A rule for each field that has a range."""
    for names, least, most in ranges:
        for name in names.split():
            value = fields.get(name, least)
            if not isinstance(value, (int, float)):
                continue
            is_kind = isinstance(least, float) or isinstance(value, int)
            yield is_kind, f"{place}{name} {value} is no whole number"
            why = out_of_range(f"{place}{name}", value, least, most)
            yield not why, why


def is_number(x: Any) -> bool:
    """Whether this is a finite number."""
    return isinstance(x, (int, float)) and math.isfinite(x)


def check_devices(preset: str, c: Any, devices: list[jax.Device]) -> None:
    """Exits with status 2 if a large preset would train on a CPU, or if cuDNN's gradients may be
    wrong. c has the kernels that fit the devices."""
    on_cpu = devices[0].platform == "cpu" and jax.config.jax_platforms != "cpu"
    if on_cpu and preset in ("record", "medium"):
        refuse(
            f"JAX sees only a CPU, but {preset} needs GPUs or TPUs; without them: ./run.sh tiny; "
            "JAX_PLATFORMS=cpu trains it on the CPU all the same"
        )
    lengths = {c.val_T, *(c.sequence_length(stage) for stage in range(len(c.stages)))}
    if c.attention == "cudnn" and any(T % 128 for T in lengths):
        refuse(
            f"sequences of {sorted(lengths)} tokens: cuDNN's gradients may be NaN where this is no "
            "multiple of 128; choose another --batch or --val_T, or --attention band"
        )


def check_documents(shards: dict[str, list], script: ModuleType, c: Any) -> None:
    """Exits with status 2 if a sequence would hold more documents than the codes can tell apart."""
    for split in shards:
        shapes = {(T, max_doc) for _, T, max_doc in script.batch_shapes(split, c)}
        for shard in shards[split]:
            starts = np.flatnonzero(shard == c.eot)
            sizes = np.diff(starts, append=len(shard))
            for T, max_doc in shapes:
                taken = np.minimum(sizes, max_doc or len(shard))
                begins = np.cumsum(taken) - taken
                if np.any(begins[MAX_DOCUMENTS:] - begins[:-MAX_DOCUMENTS] < T):
                    refuse(
                        f"{shard.filename}: a sequence of {T} tokens would hold more than "
                        f"{MAX_DOCUMENTS:,} documents"
                    )


# ---- Checkpoints ---------------------------------------------------------------------------------
def saved_arrays(state: Any) -> dict[str, Any]:
    """The arrays of a checkpoint, by their path in the state. Lookups are left out: they are
    parameters in the dtype of activations."""
    leaves = jax.tree.leaves_with_path(state._replace(lookups={}))
    return {jax.tree_util.keystr(path): x for path, x in leaves}


STEP = re.compile("[0-9]{7}")  # of a checkpoint


def step_of(path: Path) -> tuple[bool, str, int, bool]:
    """Sort key of checkpoints: the run, whose name begins with its date; the step; and whether the
    folder is that of the run and not a copy, as RUN.bak. Folders and files of other names come
    first. Times of files are no key, because copies change them."""
    folder = path.parent.name
    run = RUN.match(folder)
    step = int(path.stem) if STEP.fullmatch(path.stem) else -1
    if not run:
        return False, folder, step, False
    return True, run[0], step, run[0] == folder


def save_checkpoint(state: Any, facts: dict[str, Any], path: Path) -> bool:
    """Writes a checkpoint under another name, renames it, and deletes all others but the two of the
    latest steps. Returns False, and writes nothing, if a number is not finite."""
    arrays = {}
    for key, x in saved_arrays(state).items():
        whole = process_allgather(x, tiled=True)
        # Process 0 writes. The others need not hold 10 GB each.
        arrays[key] = whole if jax.process_index() == 0 else whole[~np.isfinite(whole)]
    if not all(np.isfinite(x).all() for x in arrays.values()):
        return False
    if jax.process_index() > 0:
        return True
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name("next.part")
    try:
        with part.open("wb") as file:
            np.savez(file, facts=json.dumps(facts), **arrays)
            file.flush()
            os.fsync(file.fileno())
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)
    mine = [old for old in path.parent.glob("*.state") if STEP.fullmatch(old.stem)]
    mine = [old for old in mine if old.is_file()]
    for old in sorted(mine, key=step_of)[:-2]:
        if old != path:  # a run that was resumed from an earlier step may write beside later ones
            try:
                old.unlink()
            except OSError as error:
                warn(f"an older checkpoint stays: {error}")
    return True


FACTS = "step", "seconds", "log", "identity", "command", "machine"  # of a checkpoint


def states_below(folder: Path) -> list[Path]:
    """The checkpoints in a folder, the newest last; also in a run's folder that is a link."""
    found = {*folder.rglob("*.state"), *folder.glob("*/*.state")}
    return sorted((path for path in found if path.is_file()), key=step_of)


def load_checkpoint(source: Path) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """Facts and arrays of a checkpoint, or of the newest intact one below a folder. The facts are
    step, seconds, log, identity, command and machine."""
    if source.suffix == ".npz" or not os.path.exists(source):
        refuse(f"--resume {source} is not a .state file, and not a folder with some")
    paths = [source] if source.is_file() else states_below(source)
    for path in reversed(paths):
        try:
            with np.load(path) as file:
                if file.zip.testzip():  # np.load compares the checksums only of what it reads whole
                    raise ValueError("a checksum is wrong")
                arrays = dict(file)
            facts = json.loads(arrays.pop("facts").item())
            if not all(name in facts for name in FACTS):
                raise ValueError(f"its facts are not {', '.join(FACTS)}")
            return facts, arrays
        except Exception as error:
            warn(f"{path} is not an intact checkpoint: {error!r}")
    refuse(f"--resume {source}: there is no intact checkpoint")


def restore(arrays: dict[str, np.ndarray], shapes: Any) -> Any:
    """The state that was saved. `shapes` is that of state_shapes() in train_gpt.py."""

    def put(tree_path, x):
        key = jax.tree_util.keystr(tree_path).replace(".lookups", ".params")  # lookups are rounded

        def part(index):
            return np.asarray(arrays[key][index], order="C").astype(x.dtype)

        return jax.make_array_from_callback(x.shape, x.sharding, part)

    return jax.tree.map_with_path(put, shapes)


def identity(script: ModuleType, c: Any, data: list[dict]) -> dict[str, Any]:
    """What must not change between a checkpoint and the run that resumes it."""
    fields = dataclasses.asdict(c)
    flags = {f"--{name}": fields[name] for name in fields if name not in ("data", "save")}
    same = {"the source": crc32(script.SOURCE.encode()), **flags}
    same |= {shard["file"]: shard["sha256"] for shard in data}
    return json.loads(json.dumps(same))  # as it is read back from a file


def lock(number: int) -> OSError | None:
    """Locks an open file or folder for this process. Returns the error if that fails."""
    try:
        fcntl.flock(number, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        return error
    return None


def remove_if_empty(folder: Path) -> None:
    """Removes a folder if nothing is in it."""
    with contextlib.suppress(OSError):
        folder.rmdir()


def lock_owner(path: Path) -> str:
    """(PID) of the process that has locked a file or folder; "" where Linux does not say."""
    with contextlib.suppress(OSError):
        locks = Path("/proc/locks").read_text()
        found = re.search(rf"FLOCK .* ([1-9]\d*) \S+:{path.stat().st_ino} ", locks)
        return f" ({found[1]})" if found else ""
    return ""


# ---- A screen or a log that breaks ---------------------------------------------------------------
class Forgiving:
    """A file whose faults cost lines, but not the run: a full disk, a terminal that is gone, or one
    that nobody reads, as when the computer that shows it sleeps."""

    def __init__(self, file: Any, name: str):
        self.file = file
        self.name = name
        self.warned = False
        if hasattr(file, "reconfigure"):
            file.reconfigure(errors="backslashreplace")  # what has no letters for é prints \xe9

    def __getattr__(self, name: str) -> Any:
        return getattr(self.file, name)

    def write(self, text: str) -> int:
        """Writes a text, or loses it."""
        return self.attempt(self.file.write, text) or len(text)

    def flush(self) -> None:
        """Writes what waits in memory, or loses it."""
        self.attempt(self.file.flush)

    def attempt(self, write: Any, *arguments: Any) -> Any:
        """Calls a method of the file; warns at its first fault."""
        try:
            self.wait_for_reader()
            return write(*arguments)
        except (OSError, ValueError) as error:  # ValueError: the file is closed
            if not self.warned:
                self.warned = True
                warn(f"{self.name} has gaps: {error}")
        return None

    def wait_for_reader(self) -> None:
        """Raises TimeoutError if the screen takes no more text: the first time after 5 s."""
        try:
            number = self.file.fileno()
        except (AttributeError, OSError, ValueError):
            return
        patience = 0 if self.warned else 5
        if number in (1, 2) and not select.select([], [number], [], patience)[1]:
            raise TimeoutError("nobody reads it")


def protect_screen() -> None:
    """Lets a run go on where its screen is closed or gone. No file of the run may get the number of
    a screen that is closed, because libraries in C would print into it."""
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # has the first free number
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name) or open(os.devnull, "w")
        setattr(sys, name, Forgiving(stream, f"<{name}>"))


# ---- Stalls --------------------------------------------------------------------------------------
DEBUGGERS = ("bdb", "code", "pdb", "pydevd", "IPython.terminal.embed")
PATIENCE = 1800  # seconds for what is no step


class Watchdog:
    """A thread that ends the process, with exit status 1 and the stacks of all threads, if a step
    is under way and none ends for so many seconds (0: never). What else a run does must end, or JAX
    report something, in six times as long, at least in PATIENCE: compiling, the first run of every
    program, validation, checkpoints. It counts seconds one by one, so that time in which the
    process was stopped does not count, nor does time in a debugger. A hang in C code that does not
    release Python's lock stops this thread as well, so nothing ends it: the timer of faulthandler
    would, but it counts the time in which the process was stopped."""

    def __init__(self, seconds: int):
        self.seconds = seconds
        self.begun = 0  # steps
        self.ended = 0
        self.idle = 0  # seconds since something ended
        self.log = None
        self.closed = threading.Event()
        if seconds:
            threading.Thread(target=self.watch, daemon=True).start()

    def watch(self) -> None:
        """Counts, until it is closed."""
        while not self.closed.wait(1.0):
            limit = self.seconds
            what = "No step has"
            if self.ended >= self.begun:
                limit = max(PATIENCE, 6 * self.seconds)
                what = "Nothing has"
            self.idle = 0 if in_debugger() else self.idle + 1
            if self.idle >= limit:
                line = f"{what} ended for {limit} s (--stall 0 would wait for ever)."
                report = threading.Thread(target=self.report, args=[line], daemon=True)
                report.start()
                report.join(10)  # the screen and the disk may hang as well
                os._exit(1)

    def report(self, line: str) -> None:
        """Prints the line and the stacks of all threads, and writes the line into the log."""
        print(line, file=sys.stderr, flush=True)
        with contextlib.suppress(Exception):  # there may be no screen
            faulthandler.dump_traceback(sys.__stderr__)
        if self.log:
            self.log.line(f"warning: {line}", show=False)

    def note(self, *_: Any, **__: Any) -> None:
        """Notes that something has ended. JAX calls it with an event."""
        self.idle = 0


def in_debugger() -> bool:
    """Whether a thread waits in a debugger."""
    for frame in sys._current_frames().values():
        while frame:
            if frame.f_globals.get("__name__") in DEBUGGERS:
                return True
            frame = frame.f_back
    return False


# ---- Signals -------------------------------------------------------------------------------------
SIGNALS = [signal.SIGINT, signal.SIGTERM, signal.SIGHUP]  # SIGHUP: the terminal is closed
SIGNALS += [signal.SIGUSR1, signal.SIGUSR2, signal.SIGXCPU]  # of Slurm and other queues


def taken_signals() -> list[int]:
    """The signals that end a run with a checkpoint. An ignored one stays so, as SIGHUP after nohup,
    but for Ctrl-C, which a shell lets its background jobs ignore."""
    ignored = [number for number in SIGNALS if signal.getsignal(number) in (signal.SIG_IGN, None)]
    return [number for number in SIGNALS if number == signal.SIGINT or number not in ignored]


# ---- The guard -----------------------------------------------------------------------------------
class Guard:
    """Protects one run. `with` gives back what it takes of the process: signal handlers, the
    watchdog and the lock of the run.

    options has the values of GUARD_FLAGS in run/flags.py by name.
    """

    def __init__(self, script: ModuleType, options: SimpleNamespace):
        self.script = script
        self.options = options
        # What the run reads.
        self.start = 0  # the step to begin with
        self.seconds = 0.0  # of training before it
        self.log_path = ""  # of the log to append to; "" for a new one
        self.facts = {}  # for the log
        self.checkpoint = {}  # facts of the checkpoint
        self.arrays = {}
        if options.resume:
            self.checkpoint, self.arrays = load_checkpoint(Path(options.resume))
            self.start = self.checkpoint["step"]
            self.seconds = self.checkpoint["seconds"]
        self.exits = []  # exit statuses that signals have asked for
        self.asked = None  # what the processes are agreeing on
        self.status = 0  # that on which all processes have agreed
        self.old_handlers = {}
        self.watchdog = None
        self.lock = None
        self.log = None
        self.saved = None  # the checkpoint that this process has written last

    def __enter__(self) -> "Guard":
        self.watchdog = Watchdog(self.options.stall)
        jax.monitoring.register_event_duration_secs_listener(self.watchdog.note)
        return self

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        self.watchdog.closed.set()
        jax.monitoring.unregister_event_duration_listener(self.watchdog.note)
        for number, handler in self.old_handlers.items():
            signal.signal(number, handler)
        diverged = isinstance(error, SystemExit) and error.code == self.script.NON_FINITE
        # Process 0 alone writes the log, and may remove the folder of checkpoints at any time.
        if diverged and self.log and jax.process_index() == 0:
            self.log.line(self.how_to_resume())
        if self.lock:
            self.lock.close()

    # -- before the run
    def compare(self, c: Any, fitted: Any, data: list[dict], devices: list, command: str) -> Any:
        """Compares the run with the checkpoint that it resumes, if there is one. c has the flags,
        and `fitted` also the kernels of these devices; command is how to start the run, without
        --resume. Returns `fitted` with the checkpoint's seed. Exits with status 2 if the run cannot
        be resumed or has ended; --force 1 makes another run of it, also with another source, other
        flags or tokens, but no other shapes."""
        if self.checkpoint and c.seed < 0:
            c = dataclasses.replace(c, seed=self.checkpoint["identity"]["--seed"])
        self.identity = identity(self.script, c, data)
        self.command = command
        hardware = f"{len(devices)} x {devices[0].device_kind}"
        machine = f"{jax.process_count()} processes, {hardware}, jax {jax.__version__}"
        self.machine = machine
        if not self.checkpoint:
            return fitted
        before = self.checkpoint["identity"]
        now = self.identity
        names = [name for name in before | now if before.get(name) != now.get(name)]
        changes = []
        for name in names:
            changes.append(f"{name} was {before.get(name)!r:.60}, is {now.get(name)!r:.60}")
        why = f"--resume {self.options.resume}: {'; '.join(changes[:5])}"
        state = jax.eval_shape(lambda: self.script.initial_state(np.uint32(0), c))
        shapes = {key: x.shape for key, x in saved_arrays(state).items()}
        if shapes != {key: x.shape for key, x in self.arrays.items()}:
            refuse(f"{why}; its arrays are not those of this model: repeat the flags of its run")
        if self.start > c.total_steps:
            refuse(f"{why}; it is from step {self.start}, but the run has {c.total_steps}")
        if changes and not self.options.force:
            refuse(f"{why}; repeat the flags of its run, or add --force 1, which makes another run")
        if self.checkpoint["machine"] != machine:
            other = self.checkpoint["machine"]
            warn(f"{self.options.resume} is from {other}, this is {machine}: not equal bit by bit")
        self.facts = {"resume": {"step": self.start, "changed": "; ".join(changes)}}
        log = Path(self.checkpoint["log"])
        ended = has_result(log)
        if ended and not self.options.force:
            refuse(
                f"--resume {self.options.resume}: this run has ended: {log} has its RESULT; to "
                "train on, add --steps N --force 1, which makes another run"
            )
        if not changes and not ended:  # else it is another run, with a log of its own
            self.log_path = str(log)
            self.lock_log(log)
        print(f"resuming {self.checkpoint['log']} after step {self.start}")
        return dataclasses.replace(fitted, seed=c.seed)

    def lock_log(self, path: Path) -> None:
        """Makes this process the only one that writes to a log and its checkpoints. Exits with
        status 2 if another one does. It locks the folder of the checkpoints, because an editor may
        replace the log by a new file; NFS locks only what is open for writing, hence there the log.
        Some network disks know no locks."""
        if jax.process_index() > 0:
            return
        try:
            file = path.open("ab")
        except FileNotFoundError:  # no folder yet: begin() locks the log
            return
        except OSError as error:
            refuse(f"this run goes on in its log, which cannot be written: {error}")
        self.lock = contextlib.ExitStack()
        self.lock.callback(file.close)
        folder = path.with_suffix("")
        fault = None
        try:
            folder.mkdir(exist_ok=True)
            number = os.open(folder, os.O_RDONLY)
            self.lock.callback(os.close, number)
            fault = lock(number)
        except OSError as error:  # a full disk
            fault = error
        place = folder
        if fault and not isinstance(fault, BlockingIOError):
            place = path
            fault = lock(file.fileno())
        if isinstance(fault, BlockingIOError):
            self.lock.close()
            owner = f"another process{lock_owner(place)}"
            refuse(f"{owner} trains the run of {path}: wait for its end, or stop it")
        self.lock.callback(remove_if_empty, folder)
        if fault and self.checkpoint:
            warn(f"this disk locks no files ({fault}): no other process may resume this run")

    # -- during the run: the four places
    def begin(self, state: Any, c: Any, mesh: Any, log: Any) -> Any:
        """Takes signals and counts time from here on. Returns the state to begin with: the one
        given, or that of the checkpoint, for which it deletes the one given."""
        self.log = log
        log.file = Forgiving(log.file, log.file.name)
        if not self.lock:
            self.lock_log(log.path)
        if self.arrays:
            for array in jax.tree.leaves(state):
                array.delete()  # both together might not fit the memory
            state = restore(self.arrays, self.script.state_shapes(c, mesh))
            self.arrays = {}
        jax.block_until_ready(state)
        if threading.current_thread() is threading.main_thread():  # others cannot handle signals
            for number in taken_signals():
                self.old_handlers[number] = signal.signal(number, self.note_signal)
        self.watchdog.log = log
        self.watchdog.ended = self.start
        self.watchdog.note()
        self.watched = c.validates_before
        self.places = NamedSharding(mesh, P(mesh.axis_names))
        self.largest = jax.jit(jnp.max, out_shardings=NamedSharding(mesh, P()))
        if jax.process_count() > 1:
            int(self.ask())  # compiles it
        return state

    def wants(self, step: int) -> bool:
        """Whether to save the state before a step: a checkpoint is due, or a signal has come."""
        self.status = self.agreed_exit(step)
        every = self.options.save_every
        is_due = every > 0 and step > self.start and step % every == 0
        saves = bool(self.status or is_due)
        waits = saves or self.watched(step)  # until all steps before have ended
        self.watchdog.begun = step if waits else step + 1
        self.watchdog.note()
        return saves

    def save(self, state: Any, step: int, seconds: float) -> None:
        """Writes a checkpoint. Ends the run if a number in it is not finite, or after a signal; and
        without a checkpoint, if several processes have found a loss that is not finite."""
        if self.status == self.script.NON_FINITE:
            self.log.line(f"NON-FINITE: the loss, by step {step}")
            sys.exit(self.status)
        facts = {"step": step, "seconds": seconds, "log": str(self.log.path)}
        facts |= {"identity": self.identity, "command": self.command, "machine": self.machine}
        path = self.folder() / f"{step:07}.state"
        finite = True
        try:
            finite = save_checkpoint(state, facts, path)
            self.saved = path if finite else self.saved
        except OSError as error:  # the run is worth more than a checkpoint
            self.log.line(f"warning: no checkpoint of step {step}: {error}")
        process_allgather(np.int32(0))  # the others wait for the process that writes
        if not finite:
            self.log.line(f"NON-FINITE: a weight, by step {step}")
            sys.exit(self.script.NON_FINITE)
        if self.status:
            name = signal.Signals(self.status - 128).name
            self.log.line(f"INTERRUPTED by {name} after step {step}; {self.how_to_resume()}")
            sys.exit(self.status)

    def step_ended(self, loss: jax.Array) -> None:
        """Notes that a step has ended. If its loss is NaN or inf and there are several processes,
        they end together: one that ended alone would leave the others in a collective."""
        if jax.process_count() > 1 and not np.isfinite(float(loss)):
            self.exits.append(self.script.NON_FINITE)
        self.watchdog.ended += 1
        self.watchdog.note()

    # -- their parts
    def note_signal(self, number: int, frame: Any) -> None:
        """Handles a signal: the run ends before its next step."""
        self.exits.append(128 + number)

    def note_end(self, number: int) -> None:
        """Writes into the log that a second signal ends the process, unless the run has ended."""
        if self.log and not has_result(self.log.path):
            name = signal.Signals(number).name
            line = f"INTERRUPTED by {name} without a new checkpoint; {self.how_to_resume()}"
            self.log.line(line, show=False)

    def agreed_exit(self, step: int) -> int:
        """The first exit status, or 0. Several processes agree on one every ten steps. The devices
        compute it after the steps that they have, so it is read five steps later, when it is there:
        that is more than STEPS_AHEAD in train_gpt.py."""
        if jax.process_count() == 1:
            return self.exits[0] if self.exits else 0
        if step % 10 == 0:
            self.asked = self.ask()
        answer = self.asked if step % 10 == 5 else None
        return 0 if answer is None else int(answer)

    def ask(self) -> jax.Array:
        """The largest first exit status of all processes: an array that the devices compute."""
        first = np.int32(self.exits[0] if self.exits else 0)
        mine = np.full(jax.local_device_count(), first)
        numbers = jax.make_array_from_process_local_data(self.places, mine)
        return self.largest(numbers)

    def folder(self) -> Path:
        """The folder of the run's checkpoints."""
        return self.log.path.with_suffix("")

    def how_to_resume(self) -> str:
        """The command that resumes the run from its last checkpoint."""
        last = self.saved or max(states_below(self.folder()), key=step_of, default=None)
        return f"to resume: {self.command} --resume {last}" if last else "there is no checkpoint"
