"""Protects a run of train_gpt.py: checkpoints, resume, signals and stalls.

run() of train_gpt.py calls begin() before the first step, wants() before every step, step_ended()
after it, and save(). It also reads start, seconds, log_path and facts. A checkpoint is a file
logs/RUN/STEP.state: a NumPy archive of raw arrays, with facts of the run as JSON.
"""

import dataclasses
import faulthandler
import fcntl
import json
import os
import re
import signal
import sys
import threading
import time
from pathlib import Path
from types import ModuleType
from typing import Any
from zlib import crc32

import jax
import jax.numpy as jnp
import numpy as np
from jax import P
from jax.experimental.multihost_utils import process_allgather
from jax.sharding import NamedSharding

sys.path.append(str(Path(__file__).resolve().parents[1] / "data"))
from messages import refuse  # noqa: E402

RUNS = "????-??-??T??-??-??_????????"  # the names of runs' folders
STATES = 7 * "[0-9]" + ".state"  # the names of checkpoints
# SIGHUP: the terminal is closed. The last three are warnings of Slurm and other queues.
SIGNALS = ("SIGINT", "SIGTERM", "SIGHUP", "SIGUSR1", "SIGUSR2", "SIGXCPU")
PATIENCE = 1800  # seconds for what is no step: compiling, validation, checkpoints


# ---- Checkpoints ---------------------------------------------------------------------------------
def save_checkpoint(state: Any, facts: dict[str, Any], path: Path) -> bool:
    """Writes a checkpoint under another name, renames it, and deletes all others but the two of the
    latest steps. Returns False, and writes nothing, if a number is not finite."""
    arrays, finite = {}, True
    # Lookups are parameters in the dtype of activations.
    for tree_path, x in jax.tree.leaves_with_path(state._replace(lookups={})):
        whole = process_allgather(x, tiled=True)
        finite = finite and bool(np.isfinite(whole).all())
        if jax.process_index() == 0:  # which writes: the others need not hold 10 GB each
            arrays[jax.tree_util.keystr(tree_path)] = whole
    if not finite:
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
    for old in checkpoints(path.parent)[:-2]:
        if old != path:  # a run that was resumed from an earlier step may write beside later ones
            old.unlink()
    return True


def checkpoints(folder: Path) -> list[Path]:
    """The checkpoints of a run, or of all runs in logs/, the latest last. Names decide, which begin
    with a date, because copying changes the times of files; other names are left alone."""
    return sorted([*folder.glob(STATES), *folder.glob(f"{RUNS}/{STATES}")])


def load_checkpoint(source: Path) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """Facts and arrays of a checkpoint, or of the newest intact one in a folder."""
    for path in reversed([source] if source.is_file() else checkpoints(source)):
        try:
            with np.load(path) as file:
                if file.zip.testzip():  # np.load compares the checksums only of what it reads whole
                    raise ValueError("a checksum is wrong")
                arrays = dict(file)
            return json.loads(arrays.pop("facts").item()), arrays
        except Exception as error:
            print(f"warning: {path} is not an intact checkpoint: {error!r}", file=sys.stderr)
    refuse(f"--resume {source}: there is no intact checkpoint (a file .state)")


def restore(arrays: dict[str, np.ndarray], shapes: Any) -> Any:
    """The state that was saved. `shapes` is that of state_shapes() in train_gpt.py."""

    def put(tree_path, x):
        key = jax.tree_util.keystr(tree_path).replace(".lookups", ".params")  # lookups are rounded

        def part(index):
            return np.asarray(arrays[key][index], order="C").astype(x.dtype)

        return jax.make_array_from_callback(x.shape, x.sharding, part)

    return jax.tree.map_with_path(put, shapes)


def identity(script: ModuleType, c: Any, data: list[dict]) -> dict[str, Any]:
    """What must not change between a checkpoint and the run that resumes it, and what must be the
    same on all hosts: the source, the flags and the tokens."""
    fields = dataclasses.asdict(c)
    flags = {f"--{name}": fields[name] for name in fields if name not in ("data", "save")}
    same = {"the source": crc32(script.SOURCE.encode()), **flags}
    same |= {shard["file"]: shard["sha256"] for shard in data}
    return json.loads(json.dumps(same))  # as it is read back from a file


class Forgiving:
    """A file whose faults cost lines, but not the run: a full disk, a pipe that nobody reads any
    more, a terminal that is gone. It warns once."""

    def __init__(self, file: Any):
        self.file = file
        self.warned = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self.file, name)

    def write(self, text: str) -> None:
        """Writes a text at once, or loses it."""
        try:
            self.file.write(text)
            self.file.flush()
        except OSError as error:
            if not self.warned:
                self.warned = True
                print(f"warning: {self.file.name} has gaps: {error}", file=sys.stderr)

    def flush(self) -> None:
        """Does nothing, because write() does it."""


# ---- The guard -----------------------------------------------------------------------------------
class Guard:
    """Protects a run. options has save_every, resume and stall."""

    exits = []  # exit statuses that signals have asked for, in the whole process

    def __init__(self, script: ModuleType, options: Any):
        self.script = script
        self.options = options
        self.checkpoint, self.arrays = {}, {}
        if options.resume:
            self.checkpoint, self.arrays = load_checkpoint(options.resume)
        # What the run reads.
        self.start = self.checkpoint.get("step", 0)  # the step to begin with
        self.seconds = self.checkpoint.get("seconds", 0.0)  # of training before it
        self.log_path = ""  # of the log to append to; "" for a new one
        self.facts = {}  # for the log
        self.lock = None
        self.limit = max(PATIENCE, 6 * options.stall)  # seconds until the watchdog ends the process
        self.idle = 0  # seconds since something ended
        jax.monitoring.register_event_duration_secs_listener(self.note)  # compiled programs
        if options.stall:
            threading.Thread(target=self.watch, daemon=True).start()

    # -- before the run
    def compare(self, its_identity: dict[str, Any]) -> None:
        """Compares the run with the checkpoint that it resumes, if there is one. Exits with status
        2 if the run has ended, or if source, flags or tokens have changed."""
        self.identity = its_identity
        if not self.checkpoint:
            return
        before = self.checkpoint["identity"]
        changes = []
        for name in before | its_identity:
            was, now = before.get(name), its_identity.get(name)
            if was != now:
                changes.append(f"{name} was {was!r:.60}, is {now!r:.60}")
        log = Path(self.checkpoint["log"])
        if changes:
            refuse(f"--resume {self.options.resume}: {'; '.join(changes[:5])}")
        if log.exists() and "\nRESULT " in log.read_text(errors="replace"):
            refuse(f"--resume {self.options.resume}: the run has ended, {log} has its RESULT")
        self.log_path = str(log)
        self.lock_log(log)
        self.facts["resume"] = {"step": self.start}

    def lock_log(self, path: Path) -> None:
        """Makes this process the only one that writes to a log and its checkpoints. Exits with
        status 2 if another one does. Some network disks know no locks."""
        if jax.process_index() > 0:
            return
        path.parent.mkdir(exist_ok=True)
        self.lock = path.open("a")
        try:
            fcntl.flock(self.lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            refuse(f"another process trains the run of {path}: wait for its end, or stop it")
        except OSError as error:
            print(f"warning: this disk has no locks ({error}): resume the run only once")

    # -- during the run: the four places
    def begin(self, state: Any, c: Any, mesh: Any, log: Any) -> Any:
        """Takes signals from here on. Returns the state to begin with: the one given, or that of
        the checkpoint, for which it deletes the one given."""
        if not self.lock:
            self.lock_log(log.path)
        self.log = log
        log.file = Forgiving(log.file)
        if sys.stdout.isatty():
            self.write = log.line
            log.line = self.line
        self.validates = c.validates_before
        self.last = c.total_steps
        tokens = [B * T for B, T, _ in self.script.batch_shapes("train", c)]
        self.tokens = np.cumsum([0, *tokens])  # before each step
        if self.arrays:
            for array in jax.tree.leaves(state):
                array.delete()  # both together might not fit the memory
            state = restore(self.arrays, self.script.state_shapes(c, mesh))
            self.arrays = {}
        self.take_signals()
        self.places = NamedSharding(mesh, P(mesh.axis_names))
        self.largest = jax.jit(jnp.max, out_shardings=NamedSharding(mesh, P()))
        self.agreed_exit(0)  # compiles it
        return state

    def take_signals(self) -> None:
        """Lets signals end the run with a checkpoint. An ignored one stays so, as SIGHUP after
        nohup, but for Ctrl-C, which a shell lets its background jobs ignore."""
        for name in SIGNALS:
            number = signal.Signals[name]
            if name == "SIGINT" or signal.getsignal(number) != signal.SIG_IGN:
                signal.signal(number, lambda number, _: self.exits.append(128 + number))

    def wants(self, step: int) -> bool:
        """Whether to save the state before a step: a checkpoint is due, or a signal has come."""
        self.status = self.agreed_exit(step)
        every = self.options.save_every
        due = every and step > self.start and (step % every == 0 or step == self.last)
        saves = bool(self.status or due)
        is_step = not saves and not self.validates(step)
        self.limit = self.options.stall if is_step else max(PATIENCE, 6 * self.options.stall)
        self.note()
        return saves

    def save(self, state: Any, step: int, seconds: float) -> None:
        """Writes a checkpoint. Ends the run if a number in it is not finite, or after a signal; and
        without a checkpoint, if several processes have found a loss that is not finite."""
        if self.status == self.script.NON_FINITE:
            self.log.line(f"NON-FINITE: the loss, by step {step}")
            sys.exit(self.status)
        facts = {"step": step, "seconds": seconds, "log": str(self.log.path)}
        facts["identity"] = self.identity
        path = self.log.path.with_suffix("") / f"{step:07}.state"
        finite = True
        try:
            finite = save_checkpoint(state, facts, path)
        except OSError as error:  # the run is worth more than a checkpoint
            self.log.line(f"warning: no checkpoint of step {step}: {error}")
        process_allgather(np.int32(0))  # the others wait for the process that writes
        if not finite:
            self.log.line(f"NON-FINITE: a weight, by step {step}")
            sys.exit(self.script.NON_FINITE)
        if self.status:
            name = signal.Signals(self.status - 128).name
            self.log.line(f"INTERRUPTED by {name} after step {step}; add --resume {path.parent}")
            sys.exit(self.status)

    def step_ended(self, loss: jax.Array) -> None:
        """Notes that a step has ended. If its loss is NaN or inf and there are several processes,
        they end together: one that ended alone would leave the others in a collective."""
        if jax.process_count() > 1 and not np.isfinite(float(loss)):
            self.exits.append(self.script.NON_FINITE)
        self.note()

    # -- their parts
    def line(self, text: str, show: bool = True) -> None:
        """Log.line() on a terminal, where losses end with tokens a second and the time left."""
        self.write(text, show=False)
        match = re.match(r"step:(\d+)/\d+ .*train_time:(\d+)ms", text)
        if match and int(match[1]) > self.start:
            done = self.tokens[int(match[1])]
            seconds = max(int(match[2]) / 1000 - self.seconds, 1e-3)
            rate = (done - self.tokens[self.start]) / seconds
            left = int((self.tokens[-1] - done) / rate)
            text += f"  {rate:,.0f} tokens/s, {left // 60}:{left % 60:02} left"
        if show:
            print(text)

    def note(self, *_: Any, **__: Any) -> None:
        """Notes for the watchdog that something has ended. JAX calls it with an event."""
        self.idle = 0

    def watch(self) -> None:
        """Ends the process, with status 1 and the stacks of all threads, if nothing has ended for
        `limit` seconds. It counts them one by one, so that time in which the process was stopped
        does not count, as it would for a timer of faulthandler."""
        while self.idle < self.limit:
            time.sleep(1)
            self.idle += 1
        print(f"No step has ended for {self.limit} s (--stall).", file=sys.stderr)
        try:
            faulthandler.dump_traceback(sys.__stderr__)
        finally:  # there may be no screen
            os._exit(1)

    def agreed_exit(self, step: int) -> int:
        """The first exit status, or 0. Several processes agree on the largest one every ten steps.
        The devices compute it after the steps that they have, so it is read five steps later, when
        it is there: that is more than STEPS_AHEAD in train_gpt.py."""
        first = self.exits[0] if self.exits else 0
        if jax.process_count() == 1:
            return first
        if step % 10 == 0:
            mine = np.full(jax.local_device_count(), np.int32(first))
            numbers = jax.make_array_from_process_local_data(self.places, mine)
            self.asked = self.largest(numbers)
        return int(self.asked) if step % 10 == 5 else 0
