"""Protects a run of train_gpt.py: checkpoints, resume, signals and stalls.

dev/launch.py makes a Guard and passes it to run() of train_gpt.py, which trains without one as well
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
import signal
import sys
import threading
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, NoReturn
from zlib import crc32

import jax
import numpy as np
from jax.experimental.multihost_utils import process_allgather

MAX_DOCUMENTS = 4095  # of a sequence: positions() in train_gpt.py cannot tell more apart


def refuse(message: str) -> NoReturn:
    """Ends the process with one line and exit status 2."""
    print(f"launch.py: {message}", file=sys.stderr)
    sys.exit(2)


def warn(message: str) -> None:
    """Prints a warning."""
    print(f"warning: {message}", file=sys.stderr)


# ---- Refusals ------------------------------------------------------------------------------------
def check_run(script: ModuleType, c: Any) -> None:
    """Exits with status 2 for layers, stages or flags with which a run would fail while it is
    compiled. Those with which it would be wrong in silence, Config refuses itself."""
    streams = ["x0", "bigram", "input", *(f"value{n}" for n in c.value_tables())]
    tables = c.value_tables()
    lengths = [c.val_T, *(c.sequence_length(stage) for stage in range(len(c.stages)))]
    divisor = math.gcd(c.head_chunk, *lengths)
    rules = [
        (c.attention in ("cudnn", "band"), f"--attention {c.attention} is not cudnn or band"),
        (
            divisor == c.head_chunk,
            f"--head_chunk {c.head_chunk} does not divide sequences of {lengths} tokens, "
            f"but {divisor} does",
        ),
        (tables == list(range(len(tables))), f"value tables are {tables}: leave no gaps"),
        (c.val_every > 0, "--val_every must be at least 1"),
        (c.bigrams >= 2 * len(c.ngrams), f"--bigrams {c.bigrams}: too few for {c.ngrams}"),
        (
            0 < c.ngram_capacity <= 1,
            f"--ngram_capacity {c.ngram_capacity} is not in (0, 1]",
        ),
    ]
    for i, layer in enumerate(c.layers):
        windows = (script.SHORT, script.LONG, None)
        rules.append((layer.window in windows, f"layer {i}: no window {layer.window!r}"))
        for name in ("attend_to", "skip_from"):
            source = getattr(layer, name)
            earlier = source is None or 0 <= source < i
            rules.append((earlier, f"layer {i}: {name}={source} is not an earlier layer"))
        for name in layer.mudd:
            message = f"layer {i}: mudd reads {name!r}, there are only {streams}"
            rules.append((name in streams, message))
        streams.append(f"layer{i}")
    for name, _ in c.mudd_head:
        rules.append((name in streams, f"mudd_head reads {name!r}, there are only {streams}"))
    for i, stage in enumerate(c.stages):
        weights = script.target_weights(stage)
        rules.append((bool(weights), f"stage {i}: all weights in targets and prefix are 0"))
        has_table = script.PREFIX not in weights or bool(c.prefixes)
        message = f"stage {i}: prefix has a weight, but --prefixes names no table"
        rules.append((has_table, message))
    for holds, message in rules:
        if not holds:
            refuse(message)


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


def step_of(path: Path) -> tuple[str, int]:
    """Sort key of checkpoints: the run, whose name begins with its date, and the step. Times of
    files are no key, because copies change them."""
    step = int(path.stem) if path.stem.isdigit() else -1
    return path.parent.name, step


def save_checkpoint(state: Any, facts: dict[str, Any], path: Path) -> bool:
    """Writes a checkpoint under another name, renames it, and deletes all others but the two of the
    latest steps. Returns False, and writes nothing, if a number is not finite."""
    leaves = saved_arrays(state)
    arrays = {key: process_allgather(x, tiled=True) for key, x in leaves.items()}
    if not all(np.isfinite(x).all() for x in arrays.values()):
        return False
    if jax.process_index() > 0:
        return True
    path.parent.mkdir(exist_ok=True)
    part = path.with_name("next.part")
    try:
        with part.open("wb") as file:
            np.savez(file, facts=json.dumps(facts), **arrays)
            file.flush()
            os.fsync(file.fileno())
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)
    for old in sorted(path.parent.glob("*.state"), key=step_of)[:-2]:
        if old != path:  # a run that was resumed from an earlier step may write beside later ones
            old.unlink()
    return True


def load_checkpoint(source: Path) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """Facts and arrays of a checkpoint, or of the newest intact one below a folder. The facts are
    step, seconds, log, identity, command and machine."""
    if source.suffix == ".npz" or not source.exists():
        refuse(f"--resume {source} is not a .state file, and not a folder with some")
    paths = [source] if source.is_file() else sorted(source.rglob("*.state"), key=step_of)
    for path in reversed(paths):
        try:
            with np.load(path) as file:
                if file.zip.testzip():  # np.load compares the checksums only of what it reads whole
                    raise ValueError("a checksum is wrong")
                arrays = dict(file)
            return json.loads(arrays.pop("facts").item()), arrays
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


# ---- A screen or a log that breaks ---------------------------------------------------------------
class Forgiving:
    """A file whose faults cost lines, but not the run: a full disk, or a terminal that is gone."""

    def __init__(self, file: Any, name: str):
        self.file = file
        self.name = name
        self.warned = False

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
            return write(*arguments)
        except (OSError, ValueError) as error:  # ValueError: the file is closed
            if not self.warned:
                self.warned = True
                with contextlib.suppress(OSError, ValueError):
                    print(f"warning: {self.name} has gaps: {error}", file=sys.__stderr__)
        return None


def protect_screen() -> None:
    """Lets a run go on where its screen is closed or gone."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name) or open(os.devnull, "w")
        setattr(sys, name, Forgiving(stream, f"<{name}>"))


# ---- Stalls --------------------------------------------------------------------------------------
DEBUGGERS = ("bdb", "pdb", "pydevd")


class Watchdog:
    """A thread that ends the process, with exit status 1 and the stacks of all threads, if a step
    is under way and none ends for so many seconds (0: never). It counts seconds one by one, so that
    time in which the process was stopped does not count, nor does time in a debugger."""

    def __init__(self, seconds: int):
        self.seconds = seconds
        self.begun = 0  # steps
        self.ended = 0
        self.idle = 0  # seconds since a step ended
        self.closed = threading.Event()
        if seconds:
            threading.Thread(target=self.watch, daemon=True).start()

    def watch(self) -> None:
        """Counts, until it is closed."""
        while not self.closed.wait(1.0):
            if self.ended >= self.begun or in_debugger():
                self.idle = 0
                continue
            self.idle += 1
            if self.idle >= self.seconds:
                try:
                    print(f"No step has ended for {self.seconds} s (--stall).", file=sys.__stderr__)
                    faulthandler.dump_traceback(sys.__stderr__)
                finally:
                    os._exit(1)  # also where the screen is gone


def in_debugger() -> bool:
    """Whether the main thread waits in a debugger."""
    frame = sys._current_frames().get(threading.main_thread().ident)
    while frame:
        if frame.f_globals.get("__name__") in DEBUGGERS:
            return True
        frame = frame.f_back
    return False


# ---- The guard -----------------------------------------------------------------------------------
class Guard:
    """Protects one run. `with` gives back what it takes of the process: signal handlers, the
    watchdog and the lock of the log.

    options has the values of GUARD_FLAGS in dev/flags.py by name.
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
        self.status = 0  # that on which all processes have agreed
        self.old_handlers = {}
        self.watchdog = None
        self.lock = None
        self.log = None
        self.saved = None  # the checkpoint that this process has written last

    def __enter__(self) -> "Guard":
        return self

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        if self.watchdog:
            self.watchdog.closed.set()
        for number, handler in self.old_handlers.items():
            signal.signal(number, handler)
        if isinstance(error, SystemExit) and error.code == self.script.NON_FINITE and self.log:
            self.log.line(self.how_to_resume())
        if self.lock:
            self.lock.close()

    # -- before the run
    def compare(self, c: Any, fitted: Any, data: list[dict], devices: list, command: str) -> Any:
        """Compares the run with the checkpoint that it resumes, if there is one. c has the flags,
        and `fitted` also the kernels of these devices; command is how to start the run, without
        --resume. Returns `fitted` with the checkpoint's seed. Exits with status 2 if the run cannot
        be resumed; --force 1 allows another source, other flags or tokens, but no other shapes."""
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
        if not changes:  # after a change, it is another run, with a log of its own
            self.log_path = self.checkpoint["log"]
            self.lock_log(Path(self.log_path))
        print(f"resuming {self.checkpoint['log']} after step {self.start}")
        return dataclasses.replace(fitted, seed=c.seed)

    def lock_log(self, path: Path) -> None:
        """Makes this process the only one that writes to a log and its checkpoints. Exits with
        status 2 if another one does. Some network disks know no locks."""
        if jax.process_index() > 0:
            return
        with contextlib.suppress(FileNotFoundError):
            self.lock = path.open("ab")  # NFS locks only what is open for writing
            try:
                fcntl.flock(self.lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                refuse(f"another process trains the run of {path}: wait for its end, or stop it")
            except OSError:
                pass

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
            for number in (signal.SIGINT, signal.SIGTERM):
                handler = signal.signal(number, self.note_signal)
                self.old_handlers[number] = handler
        self.watchdog = Watchdog(self.options.stall)
        self.watchdog.ended = self.start
        self.watched = c.validates_before
        return state

    def wants(self, step: int) -> bool:
        """Whether to save the state before a step: a checkpoint is due, or a signal has come."""
        self.status = self.agreed_exit(step)
        every = self.options.save_every
        is_due = every > 0 and step > self.start and step % every == 0
        saves = bool(self.status or is_due)
        waits = saves or self.watched(step)  # until all steps before have ended
        self.watchdog.begun = step if waits else step + 1
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
        self.watchdog.idle = 0

    # -- their parts
    def note_signal(self, number: int, frame: Any) -> None:
        """Handles a signal: the run ends before its next step."""
        self.exits.append(128 + number)

    def agreed_exit(self, step: int) -> int:
        """The first exit status, or 0. Several processes agree on one every ten steps."""
        first = self.exits[0] if self.exits else 0
        if jax.process_count() == 1:
            return first
        return 0 if step % 10 else int(process_allgather(np.int32(first)).max())

    def folder(self) -> Path:
        """The folder of the run's checkpoints."""
        return self.log.path.with_suffix("")

    def how_to_resume(self) -> str:
        """The command that resumes the run from its last checkpoint."""
        last = self.saved or max(self.folder().glob("*.state"), key=step_of, default=None)
        return f"to resume: {self.command} --resume {last}" if last else "there is no checkpoint"
