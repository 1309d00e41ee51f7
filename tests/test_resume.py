"""Runs that a signal, a kill or a fault has stopped are resumed, and end with the same bits."""

import functools
import hashlib
import itertools
import json
import os
import re
import resource
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import guard
import jax
import jax.numpy as jnp
import launch
import numpy as np
import pytest
import weights

import train_gpt
from tests import launched
from tests.launched import STAND_INS, compiled, make_folder, read, set_tiny, wait_for_line
from tests.tools import ROOT, text, write_shard

FLAGS = [*launched.FLAGS, *"--steps 30 --val_every 15 --seed 7 --stall 0".split()]
OPTIONS = SimpleNamespace(resume=None, save_every=0, stall=0)
SHARD = "x_train_000002.bin"
LAST = "0000015.state"
first_state = functools.cache(train_gpt.make_state)


@pytest.fixture
def folder(tmp_path) -> Path:
    return make_folder(tmp_path)


def go(folder: Path, *argv, hook=lambda *_: None, stop: int = 0):
    """A run by the launcher in this process, in the folder: its log and its exit status. In step
    `stop`, it gets SIGTERM. hook(done, out) gets the number of steps done and what the last one
    returned, and may return something else. Programs are not compiled before they are called."""
    steps = SimpleNamespace(done=0)
    guards = []
    real_init = guard.Guard.__init__

    def program(key, c, mesh, state, *inputs):
        out = compiled(*key, c, mesh)(state, *inputs)
        if key[1] == "val":
            return out
        steps.done += 1
        if steps.done == stop:
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(0.1)
        return hook(steps.done, out) or out

    def compile_all(c, mesh, log):
        steps.done = guards[-1].start
        keys = itertools.product(range(2), (False, True, "val"))
        return {key: functools.partial(program, key, c, mesh) for key in keys}

    def init(self, *args):
        self.lock = None
        guards.append(self)
        real_init(self, *args)

    code = 0
    mine = jax.devices()[:2]
    handlers = {name: signal.getsignal(signal.Signals[name]) for name in guard.SIGNALS}
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setattr(jax, "devices", lambda: mine)
        patch.setattr(launch, "wheels", dict)  # reading all packages takes time
        patch.setattr(train_gpt, "compile_all", compile_all)
        patch.setattr(train_gpt, "warm_up", lambda programs, c, mesh: None)
        patch.setattr(train_gpt, "make_state", lambda c, mesh, _: copy(first_state(c, mesh)))
        patch.setattr(guard.Guard, "__init__", init)
        patch.setattr(guard.Guard, "exits", [])
        set_tiny(patch)
        try:
            launch.train(train_gpt, ["train_gpt.py", *FLAGS, *map(str, argv)])
        except (SystemExit, MemoryError) as end:
            code = getattr(end, "code", 1)
    for name, handler in handlers.items():  # as at the end of a process
        signal.signal(signal.Signals[name], handler)
    if guards[-1].lock:
        guards[-1].lock.close()
    return look(folder, code=code)


def copy(state: train_gpt.State) -> train_gpt.State:
    """A state for a run, whose first step deletes it."""
    return jax.tree.map(jnp.copy, state)


def look(folder: Path, **more) -> SimpleNamespace:
    """The folder's newest log, as read() returns it, a hash of its weights (sha) and the folder's
    checkpoints (states)."""
    path = max(folder.glob("logs/*.txt"), key=os.path.getmtime)
    log = read(path)
    states = sorted(folder.glob("logs/*/*"))
    sha = hashlib.sha256()
    for name in sorted(set(log.weights or ()) - {"config", "result", "source"}):
        sha.update(log.weights[name].tobytes())
    return SimpleNamespace(**vars(log), sha=sha.hexdigest(), states=states, folder=folder, **more)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The run without a stop, with checkpoints."""
    log = go(make_folder(tmp_path_factory.mktemp("whole")), "--save_every", 7)
    assert not log.code and not log.result["resumed"]
    return log


@pytest.fixture(scope="module")
def half(tmp_path_factory):
    """The run, stopped after step 15, with an earlier checkpoint after step 8."""
    log = go(make_folder(tmp_path_factory.mktemp("half")), "--save_every", 8, stop=15)
    assert log.code == 143 and [path.name for path in log.states] == ["0000008.state", LAST]
    return log


@pytest.fixture
def stopped(half, tmp_path) -> Path:
    """A copy of the folder of `half`, for one test."""
    return shutil.copytree(half.folder, tmp_path, dirs_exist_ok=True)


# ---- Exactness -----------------------------------------------------------------------------------
def test_a_run_that_goes_on_is_the_run_in_one_go(folder, whole):
    """It is stopped after first steps, whose gradients wait, and after second steps; at the change
    of stage, before the untie, and elsewhere."""
    stops = (1, 11, 18, 29)
    logs = []
    for number, stop in enumerate([*stops, 0]):
        logs.append(go(folder, *number * ["--resume", "logs"], stop=stop))
    assert [log.code for log in logs] == [143] * len(stops) + [0]
    assert logs[-1].sha == whole.sha and logs[-1].losses == whole.losses
    same = dict.fromkeys(("train_time_ms", "weights", "resumed"))
    assert logs[-1].result | same == whole.result | same and logs[-1].result["resumed"] is True
    losses = re.findall("^step:.* train_loss:[^ ]*", whole.rest + logs[-1].rest, re.M)
    assert losses[:3] == losses[3:] and len(losses) == 6


def test_a_checkpoint_along_the_way_is_as_good(whole, tmp_path):
    """Five checkpoints were written, the fifth at the end, and the last two are left. A run that
    has ended does not go on, as by a script that is queued a second time."""
    assert [path.name for path in whole.states] == ["0000028.state", "0000030.state"]
    folder = shutil.copytree(whole.folder, tmp_path / "copy")
    assert go(folder, "--resume", whole.states[0]).code == 2
    path = folder / "logs" / whole.path.name
    path.write_text(path.read_text().replace("\nRESULT ", "\nresult "))
    log = go(folder, "--resume", whole.states[0])
    assert log.sha == whole.sha and log.losses.items() <= whole.losses.items()


def test_a_last_validation_that_dies_costs_neither_weights_nor_state(folder, whole):
    validate = train_gpt.validate

    def dies(params, step, *rest):
        if step == 30:
            raise MemoryError
        return validate(params, step, *rest)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(train_gpt, "validate", dies)
        log = go(folder, "--save_every", 14)
    assert log.code == 1 and log.result is None and list(log.losses) == [15]
    w = weights.open_weights(log.path.with_suffix(".npz"), ROOT / "train_gpt.py")  # as sample does
    assert w.stage == w.c.stage_at(30) and log.sha == whole.sha
    log = go(folder, "--resume", "logs")
    assert log.sha == whole.sha and log.losses == whole.losses
    assert json.loads(log.weights["result"].item()) == log.result


def test_the_clock_and_the_log_go_on(stopped, half, monkeypatch):
    """With the seed of the checkpoint."""
    monkeypatch.setattr(sys.modules[__name__], "FLAGS", [*FLAGS[:-4], *FLAGS[-2:]])  # no seed
    path = f"logs/{half.path.stem}"
    assert half.lines[-1] == f"INTERRUPTED by SIGTERM after step 15; add --resume {path}"
    log = go(stopped, "--resume", path)
    assert log.rest.startswith(half.rest) and log.path.name == half.path.name
    assert log.result["seed"] == 7
    times = [int(ms) for ms in re.findall(r"train_time:(\d+)ms", log.rest)]
    assert times == sorted(times) and times[-1] == round(log.result["train_time_ms"])
    seconds = guard.load_checkpoint(half.states[-1])[0]["seconds"]  # it was saved, then validated
    assert 15 not in half.times and -1 <= log.times[15] - 1000 * seconds <= 500


@pytest.mark.parametrize("change", ["--val_every", "the source", SHARD])
def test_another_run_does_not_go_on(stopped, half, monkeypatch, capsys, change):
    flags = []
    if change == "--val_every":
        flags = [change, "10"]
    elif change == "the source":
        monkeypatch.setattr(train_gpt, "SOURCE", train_gpt.SOURCE + "#\n")
    else:
        write_shard(stopped / "data" / SHARD, text(1600, 9))
    log = go(stopped, "--resume", "logs", *flags)
    assert (log.code, log.rest) == (2, half.rest)
    assert f": --resume logs: {change} was " in capsys.readouterr().err


# ---- Files ---------------------------------------------------------------------------------------
def test_a_checkpoint_is_on_the_disk_before_it_has_its_name(folder, monkeypatch):
    synced = []

    def fsync(fd):
        path = Path(os.readlink(f"/proc/self/fd/{fd}"))
        synced.append((path.suffix, len([*path.parent.glob("*.state")])))
        guard.load_checkpoint(path)  # it is whole

    monkeypatch.setattr(os, "fsync", fsync)
    go(folder, "--save_every", 20)
    assert synced == [(".part", 0), (".part", 1)]  # of step 20 and of the end


def test_damaged_checkpoints_are_passed_over(stopped, whole, capsys):
    """One byte of the newest checkpoint is changed: either that is noticed, and the one before is
    loaded, or what is loaded is the same."""
    _, bad = sorted(stopped.glob("logs/*/*"))
    before = bad.read_bytes()
    facts, arrays = guard.load_checkpoint(bad)
    # With a smaller dtype or shape, an array would have fewer bytes than the checksum is of.
    flips = [(before.index(b"'<f4'") + 3, 6), (before.index(b"(384, 32)") + 1, 1), (0, 255)]
    flips += [(place, 255) for place in range(999, len(before), len(before) // 10)]
    for place, bits in flips:
        bad.write_bytes(before[:place] + bytes([before[place] ^ bits]) + before[place + 1 :])
        found, now = guard.load_checkpoint(stopped / "logs")
        if capsys.readouterr().err.startswith(f"warning: {bad}"):
            assert found["step"] == 8
        else:
            assert found == facts and now.keys() == arrays.keys(), place
            assert all(now[name].tobytes() == x.tobytes() for name, x in arrays.items()), place
    bad.write_bytes(before[: len(before) // 2])
    assert go(stopped, "--resume", "logs").sha == whole.sha
    for path in stopped.glob("logs/*/*"):
        path.write_bytes(b"?")
    assert go(stopped, "--resume", "logs").code == 2


def test_names_of_files_decide_and_not_their_times(stopped, half):
    """A clock that was wrong, or a copy, may give earlier checkpoints later times. Of other names,
    as of a copy that a person made before an experiment, none is deleted or newer."""
    run = stopped / "logs" / half.path.stem
    first, last = half.states
    others = ["2020-01-01T00-00-00_00000000/0000029.state", f"{run.name}.bak/0000029.state"]
    others += [f"{run.name}/best.state"]
    for name in others:
        (stopped / "logs" / name).parent.mkdir(exist_ok=True)
        shutil.copy(first, stopped / "logs" / name)
    for path in (stopped / "logs" / others[0], run / first.name):
        os.utime(path, (2**32, 2**32))
    log = go(stopped, "--resume", "logs", "--save_every", 8, stop=20)
    assert log.facts["resume"] == {"step": 15}
    left = ["0000016.state", "0000020.state", "best.state"]
    assert sorted(path.name for path in run.iterdir()) == left
    # One that is written beside those of later steps is not deleted as the oldest.
    log = go(stopped, "--resume", run / "best.state", stop=10)
    assert [path.name for path in log.states if path.parent == run] == ["0000010.state", *left]


# ---- Faults --------------------------------------------------------------------------------------
def test_a_run_is_void_where_a_number_is_not_finite(folder):
    """It is noticed when the run saves, and not saved."""

    def hook(done, out):
        state, loss = out
        params = state.params | dict(qk=state.params["qk"] * np.float32("nan"))
        return (state._replace(params=params), loss) if done == 20 else None

    log = go(folder, "--save_every", 5, hook=hook)
    assert log.code == 3 and not log.weights and log.result is None
    assert log.lines[-1] == "NON-FINITE: a weight, by step 20"
    assert log.states[-1].name == "0000015.state"
    arrays = guard.load_checkpoint(log.states[-1])[1]
    assert all(np.isfinite(x).all() for x in arrays.values())


@pytest.fixture
def limit_files():
    """A function that lets this process write no file beyond so many bytes, until the test ends."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    yield lambda size: resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_checkpoint_that_finds_no_room_does_not_end_the_run(folder, whole, limit_files):
    """Nor does it leave a part of a file behind. A run that was resumed after that is the same."""
    left = []

    def hook(done, _):
        limit_files(600_000 if done < 25 else resource.RLIM_INFINITY)
        left.extend(folder.glob("logs/*/*") if done == 22 else [])

    log = go(folder, "--save_every", 10, hook=hook, stop=27)
    warnings = re.findall("warning: no checkpoint of step ([12]0): .*File too large", log.rest)
    assert warnings == ["10", "20"] and not left
    assert [path.name for path in log.states] == ["0000027.state"]
    log = go(folder, "--resume", "logs")
    assert log.code == 0 and log.sha == whole.sha


def test_a_log_that_finds_no_room_does_not_end_the_run(stopped, limit_files, capsys):
    (path,) = stopped.glob("logs/*.txt")
    hook = lambda done, _: limit_files(path.stat().st_size) if done == 27 else None
    log = go(stopped, "--resume", "logs", "--save", 0, hook=hook)
    out, err = capsys.readouterr()
    assert log.code == 0 and "step:20/30 train_loss" in log.lines[-1]
    assert json.loads(out.rpartition("RESULT ")[2])["steps"] == 30
    assert f"warning: logs/{path.name} has gaps: [Errno 27] File too large\n" in err


def test_a_log_has_one_writer(tmp_path, monkeypatch, capsys):
    """Some network disks have no locks: there a run goes on with a warning."""
    first = guard.Guard(train_gpt, OPTIONS)
    first.lock_log(tmp_path / "log.txt")
    with pytest.raises(SystemExit):
        guard.Guard(train_gpt, OPTIONS).lock_log(tmp_path / "log.txt")
    assert ": another process trains the run of " in capsys.readouterr().err
    monkeypatch.setattr(guard.fcntl, "flock", Mock(side_effect=OSError(37, "No locks available")))
    guard.Guard(train_gpt, OPTIONS).lock_log(tmp_path / "log.txt")
    assert "this disk has no locks" in capsys.readouterr().out


def test_only_a_step_that_is_under_way_can_stall(monkeypatch):
    its_guard = guard.Guard(train_gpt, OPTIONS)
    its_guard.options = SimpleNamespace(stall=3, save_every=0)
    its_guard.validates = lambda step: step % 2 == 0
    monkeypatch.setattr(guard.os, "_exit", Mock(side_effect=SystemExit))

    def stalls(seconds: int, step: int, event=lambda: None) -> bool:
        """Whether the watchdog ends the process if only events end after wants(step)."""
        sleep = Mock(side_effect=[*range(seconds), TimeoutError])
        monkeypatch.setattr(guard.time, "sleep", lambda _: (sleep(), event()))
        its_guard.wants(step)
        with pytest.raises((TimeoutError, SystemExit)) as end:
            its_guard.watch()
        return end.type is SystemExit

    assert stalls(3, step=1) and not stalls(2, step=1)
    assert stalls(1800, step=2) and not stalls(1799, step=2)  # it validates, or saves
    assert not stalls(9, step=1, event=lambda: its_guard.step_ended(1.0))
    sizes = itertools.count(1)
    compiles = lambda: jax.jit(lambda x: x + 1)(np.zeros(next(sizes)))
    assert not stalls(9, step=1, event=compiles)  # JAX reports it


# ---- Processes -----------------------------------------------------------------------------------
@pytest.fixture
def start(request, folder):
    """Starts the launcher in the folder, with code at the end of its script; waits until it prints
    step 10."""

    def start(code: str, *flags: str, **pipes) -> subprocess.Popen:
        script = launched.write_script(folder / "train_gpt.py", code)
        process = launched.start(script, *FLAGS, *flags, **pipes)
        request.addfinalizer(process.kill)
        wait_for_line(process, "step:10/30 train_loss")
        return process

    return start


def test_what_is_killed_goes_on_once_it_is_dead(start, folder, whole, capsys, monkeypatch):
    """While its process lives, even if it is stopped, no other one may resume the run."""
    process = start("", "--save_every", "7")
    process.send_signal(signal.SIGSTOP)
    monkeypatch.setattr(train_gpt, "SOURCE", (folder / "train_gpt.py").read_text())
    log = go(folder, "--resume", "logs", "--save_every", 7)
    shown = capsys.readouterr()
    assert log.code == 2 and "another process trains the run" in shown.err and shown.out == ""
    process.kill()
    process.wait()
    log = go(folder, "--resume", "logs")
    assert log.code == 0 and log.sha == whole.sha and log.result["resumed"]


NAPS = """
def HOOK(step):
    time.sleep(0.1 if step > 10 else 0)
"""


def test_ctrl_c_saves_the_run_when_the_screen_is_gone(start, folder):
    """As after `2>&1 | tee`, whose process dies first, or in a terminal that was closed."""
    process = start(STAND_INS + NAPS, stderr=subprocess.STDOUT)
    process.stdout.close()
    process.send_signal(signal.SIGINT)
    assert process.wait(60) == 130
    log = look(folder)
    step, path = re.search(r"^INTERRUPTED by SIGINT after step (\d+); .* --resume (.*)$",
                           log.lines[-1]).groups()  # fmt: skip
    assert 10 <= int(step) < 30 and log.result is None
    assert guard.load_checkpoint(folder / path)[0]["step"] == int(step)


HANGS = """
def HOOK(step):
    if step > 10:
        time.sleep(1000 if step == 22 else 0.05)
"""


def test_a_run_that_hangs_ends_and_shows_where_but_one_that_was_stopped_goes_on(start, folder):
    process = start(STAND_INS + HANGS, "--stall", "2")
    process.send_signal(signal.SIGSTOP)
    time.sleep(3.5)
    process.send_signal(signal.SIGCONT)
    wait_for_line(process, "step:20/30 train_loss")
    _, err = process.communicate(timeout=15)
    assert process.returncode == 1 and not look(folder).states
    assert err.startswith("No step has ended for 2 s (--stall")
    assert " in HOOK\n" in err and " in train\n" in err
