"""Runs that a signal, a kill or a fault has stopped are resumed, and end with the same bits."""

import dataclasses
import functools
import hashlib
import io
import itertools
import json
import os
import re
import resource
import shlex
import shutil
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import guard
import jax
import launch
import numpy as np
import pytest

import train_gpt
from tests import launched
from tests.launched import HUNG, STAND_INS, end, wait_for_line
from tests.test_run import FLAGS as RUN_FLAGS
from tests.test_run import TRAIN, read, set_tiny, write_script
from tests.tools import make_mesh, text, write_shard
from train_gpt import LONG, Layer, Stage

# Step 12 is the last of the first stage, step 18 the last with embedding and head tied.
LAYERS = (Layer(LONG, value_table=0),)
STAGES = (
    Stage(12, 256, short=8, long=8, max_doc=50, lr=1.0, targets=(1.0, 0.5)),
    Stage(18, 512, short=8, long=16, max_doc=0, lr=1.0),
)
FLAGS = [*RUN_FLAGS, *"--steps 30 --val_every 15 --cooldown_start 0.33 --cooldown_end 0.93".split()]
FLAGS += "--untie 0.58 --seed 7 --data data".split()
# No program depends on these fields, so that runs which differ in them share programs.
SAME = dict(data="", save=0, val_every=1, seed=0)


def make_folder(path: Path) -> Path:
    """A folder with data, in which runs start."""
    (path / "data").mkdir()
    for i, name in enumerate([*(f"train_00000{i}" for i in range(1, 5)), "val_000000"]):
        write_shard(path / f"data/x_{name}.bin", text(4000, i))
    return path


@pytest.fixture
def folder(tmp_path) -> Path:
    return make_folder(tmp_path)


@functools.cache
def compiled(stage: int, kind, c: train_gpt.Config, devices: int):
    """The program of a kind: "val", or whether it is an Adam step."""
    mesh = make_mesh(devices)
    if kind == "val":
        return train_gpt.compile_val_step(stage, c, mesh)
    return train_gpt.compile_train_step(stage, kind, c, mesh)


def go(
    folder: Path, *argv, hook=lambda *_: None, stop: int = 0, devices: int = 2, source: str = ""
):
    """A run by the launcher in this process, in the folder: its log and its exit status. In step
    `stop`, it gets SIGTERM. hook(done, out) gets the number of steps done and what the last one
    returned, and may return something else. Programs are not compiled before they are called.
    `source`: the source, if another script began the run."""
    steps = SimpleNamespace(done=0)
    real_train = train_gpt.train

    def train(state, c, mesh, programs, shards, log, guard):
        steps.done = guard.start
        return real_train(state, c, mesh, programs, shards, log, guard)

    def program(key, c, state, *inputs):
        out = compiled(*key, c, devices)(state, *inputs)
        if key[1] == "val":
            return out
        steps.done += 1
        if steps.done == stop:
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(0.1)
        return hook(steps.done, out) or out

    def compile_all(c, mesh, log):
        c = dataclasses.replace(c, **SAME, steps=30)
        keys = itertools.product(range(2), (False, True, "val"))
        return {key: functools.partial(program, key, c) for key in keys}

    code = 0
    mine = jax.devices()[:devices]
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setattr(jax, "devices", lambda: mine)
        patch.setattr(train_gpt, "train", train)
        patch.setattr(train_gpt, "compile_all", compile_all)
        patch.setattr(train_gpt, "warm_up", lambda programs, c, mesh: None)
        patch.setattr(train_gpt, "SOURCE", source or train_gpt.SOURCE)
        set_tiny(patch, STAGES, LAYERS)
        try:
            launch.train(train_gpt, [*FLAGS, *map(str, argv)], "./run.sh")
        except SystemExit as end:
            code = end.code
    return look(folder, code=code)


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


LAST = "0000015.state"


@pytest.fixture
def stopped(half, tmp_path) -> Path:
    """A copy of the folder of `half`, for one test."""
    return shutil.copytree(half.folder, tmp_path, dirs_exist_ok=True)


# ---- Exactness -----------------------------------------------------------------------------------
@pytest.mark.parametrize("stops", [
    pytest.param((11, 18), marks=pytest.mark.quick), (1, 14, 29),
])  # fmt: skip
def test_a_run_that_goes_on_is_the_run_in_one_go(folder, whole, stops):
    """It is stopped after first steps, whose gradients wait, and after second steps; at the change
    of stage, before the untie, and elsewhere."""
    logs = []
    for number, stop in enumerate([*stops, 0]):
        logs.append(go(folder, *number * ["--resume", "logs"], stop=stop))
    assert [log.code for log in logs] == [143] * len(stops) + [0]
    assert logs[-1].sha == whole.sha and logs[-1].losses == whole.losses
    same = dict.fromkeys(("train_time_ms", "weights", "resumed"))
    assert logs[-1].result | same == whole.result | same and logs[-1].result["resumed"] is True
    losses = re.findall("^step:.* train_loss:[^ ]*", whole.rest + logs[-1].rest, re.M)
    assert losses[:3] == losses[3:] and len(losses) == 6


def lose_step(name: str):
    """A function of train_gpt that returns a sequence: the same, with its items one step late."""
    function = getattr(train_gpt, name)

    def late(*args):
        items = [*function(*args)]
        return [items[0], *items[:-1]]

    return late


LOST = dict(
    nothing=lambda state, fresh: state,
    opt_state=lambda state, fresh: state._replace(opt_state=fresh.opt_state),
    waiting_grads=lambda state, fresh: state._replace(waiting_grads=fresh.waiting_grads),
    lookups=lambda state, fresh: state._replace(lookups=fresh.lookups),
)


@pytest.mark.parametrize("lost", [*LOST, "schedule", "read_batches"])
def test_nothing_of_the_state_may_be_lost(stopped, whole, monkeypatch, lost):
    """If a part of the state were lost, the weights that the tests compare would differ."""
    begin = guard.Guard.begin

    def forgetful(self, state, c, mesh, log):
        return LOST[lost](begin(self, state, c, mesh, log), train_gpt.make_state(c, mesh))

    if lost in LOST:
        monkeypatch.setattr(guard.Guard, "begin", forgetful)
    else:
        monkeypatch.setattr(train_gpt, lost, lose_step(lost))
    assert (go(stopped, "--resume", "logs").sha == whole.sha) == (lost == "nothing")


def test_a_checkpoint_along_the_way_is_as_good(whole, folder):
    """Four checkpoints were written, and the last two are left."""
    assert [path.name for path in whole.states] == ["0000021.state", "0000028.state"]
    log = go(folder, "--resume", whole.states[0])
    assert log.sha == whole.sha and log.losses.items() <= whole.losses.items()


def test_other_devices_go_on_within_rounding(folder, whole, capsys):
    go(folder, devices=8, stop=3)
    log = go(folder, "--resume", "logs")
    assert log.result["devices"] == 2 and log.result["resumed"]
    assert "not equal bit by bit" in capsys.readouterr().err
    for name in log.weights.keys() - {"config", "result", "source"}:
        x, y = log.weights[name], whole.weights[name]
        assert np.linalg.norm(x - y) <= 0.01 * np.linalg.norm(y), name


def test_at_the_last_step_it_validates(stopped, half):
    log = go(stopped, "--resume", "logs", "--steps", 15, "--force", 1)
    assert (log.code, log.losses[15], log.result["steps"]) == (0, half.losses[15], 15)
    assert log.result["resumed"] and log.weights


def test_the_clock_and_the_log_go_on(stopped, half):
    (path,) = stopped.glob(f"logs/*/{LAST}")
    log = go(stopped, "--resume", path, "--seed", -1)
    assert log.rest.startswith(half.rest) and log.path.name == half.path.name
    assert log.result["seed"] == 7
    times = [int(ms) for ms in re.findall(r"train_time:(\d+)ms", log.rest)]
    assert times == sorted(times) and times[-1] == round(log.result["train_time_ms"])
    assert half.times[15] <= log.times[15] <= half.times[15] + 50  # it validates a second time


# ---- The command that goes on --------------------------------------------------------------------
def test_the_command_has_the_flags_of_the_run_and_one_resume(stopped, half, whole):
    (command,) = re.findall("; to resume: (.*)", half.lines[-1])
    assert half.lines[-1].startswith("INTERRUPTED by SIGTERM after step 15; to resume: ")
    path = f"logs/{half.path.stem}/{LAST}"
    more = ["--save_every", "8", "--resume", path]
    assert shlex.split(command) == ["./run.sh", *FLAGS, *more]
    log = go(stopped, *more, stop=20)
    assert log.lines[-1].endswith(command.replace(LAST, "0000020.state"))
    more[-1] = path.replace(LAST, "0000020.state")
    assert go(stopped, *more).sha == whole.sha


# ---- Refusals ------------------------------------------------------------------------------------
SHARD = "data/x_train_000002.bin"
CHANGES = dict(  # the flags, what else is changed, the message
    config=("--val_every 10", lambda _: None, "--val_every was 15, is 10"),
    seed=("--seed 8", lambda _: None, "--seed was 7, is 8"),
    source=("", lambda _: None, r"the source was \d+, is \d+"),
    data=(
        "",
        lambda folder: write_shard(folder / SHARD, text(4000, 5)),
        f"{SHARD[5:]} was '.*, is",
    ),
)


@pytest.mark.parametrize("change", CHANGES)
def test_another_run_goes_on_only_by_force(stopped, half, monkeypatch, capsys, change):
    flags, make, message = CHANGES[change]
    make(stopped)
    if change == "source":
        source = train_gpt.SOURCE.replace("import json\n", "import spam\n", 1)
        monkeypatch.setattr(train_gpt, "SOURCE", source)
    log = go(stopped, "--resume", "logs", *flags.split())
    shown = capsys.readouterr()
    assert (log.code, log.rest, shown.out) == (2, half.rest, "")
    advice = "; repeat the flags of its run, or add --force 1, .*\n"
    line = rf"launch\.py: --resume logs: {message}.*" + advice
    assert re.fullmatch(line, shown.err)
    log = go(stopped, "--resume", "logs", *flags.split(), "--force", 1)
    assert log.code == 0 and re.search(message, str(log.facts["resume"]["changed"]))
    assert (stopped / "logs" / half.path.name).read_bytes() == half.path.read_bytes()


NEVER = dict(
    shapes=("--D 64", lambda _: None, "--D was 32, is 64; .*arrays"),
    steps=("--steps 14", lambda _: None, "--steps was 30, is 14; .*step 15, but the run has 14"),
    gone=(
        "",
        lambda folder: (folder / SHARD).unlink(),
        "the train shards hold|x_train_000002.* was",
    ),
    broken=("", lambda folder: break_all(folder), "--resume logs: there is no intact checkpoint"),
)


def test_a_run_that_has_ended_does_not_go_on(stopped, half, capsys):
    """A script that queues it a second time passes --resume logs. By force it is another run."""
    path = stopped / "logs" / half.path.name
    path.write_text(half.path.read_text() + 'RESULT {"steps": 30}\n')
    assert go(stopped, "--resume", "logs").code == 2
    line = rf"launch\.py: --resume logs: this run has ended: .*{path.name} has its RESULT; .*\n"
    assert re.fullmatch(line, capsys.readouterr().err)
    assert go(stopped, "--resume", "logs", "--force", 1, stop=16).path.name != path.name


def break_all(folder: Path) -> None:
    """Damages every checkpoint."""
    for path in folder.glob("logs/*/*"):
        path.write_bytes(b"?")


@pytest.mark.parametrize("change", NEVER)
def test_what_cannot_go_on_does_not_name_force(stopped, half, capsys, change):
    flags, make, message = NEVER[change]
    make(stopped)
    forces = [[], ["--force", 1]] if flags else [[]]
    for force in forces:
        log = go(stopped, "--resume", "logs", *flags.split(), *force)
        shown = capsys.readouterr()
        assert (log.code, log.rest, shown.out) == (2, half.rest, "")
        lines = shown.err.splitlines()
        assert re.match(r"(launch|train_gpt)\.py: ", lines[-1]) and re.search(message, lines[-1])
        assert "--force" not in shown.err or change == "gone"
        assert len(lines) == (3 if change == "broken" else 1)


# ---- Files ---------------------------------------------------------------------------------------
def test_a_checkpoint_is_on_the_disk_before_it_has_its_name(folder, monkeypatch):
    """The writing takes time, which is not on the clock."""
    synced = []
    fsync = os.fsync
    began = time.perf_counter()

    def slow_fsync(fd):
        time.sleep(0.5)
        fsync(fd)
        path = Path(os.readlink(f"/proc/self/fd/{fd}"))
        if path.is_file():
            synced.append((path.suffix, len([*path.parent.glob("*.state")])))
            guard.load_checkpoint(path)  # it is whole

    monkeypatch.setattr(os, "fsync", slow_fsync)
    log = go(folder, "--save_every", 14)
    assert synced == [(".part", 0), (".part", 1)]
    assert log.result["train_time_ms"] / 1000 < time.perf_counter() - began - 1


def test_damaged_checkpoints_are_passed_over(stopped, whole, capsys):
    """One byte of the newest checkpoint is changed: either that is noticed, and the one before is
    loaded, or what is loaded is the same."""
    _, bad = sorted(stopped.glob("logs/*/*"))
    before = bad.read_bytes()
    facts, arrays = guard.load_checkpoint(bad)
    with np.load(bad, allow_pickle=False) as file:
        assert {*arrays} < {*file} and dict(file)
    # With a smaller dtype or shape, an array would have fewer bytes than the checksum is of.
    kind = before.index(b"'<f4'") + 3
    shape = before.index(b"(384, 32)") + 1
    flips = [(kind, 6), (shape, 1), (0, 255), (len(before) - 1, 255)]
    places = np.random.default_rng(0).integers(0, len(before), 40)
    for place, bits in [*flips, *((place, 255) for place in places)]:
        flipped = bytes([before[place] ^ bits])
        bad.write_bytes(before[:place] + flipped + before[place + 1 :])
        found, now = guard.load_checkpoint(stopped / "logs")
        warned = capsys.readouterr().err.startswith(f"warning: {bad}")
        assert (found["step"], warned) in ((8, True), (15, False)), place
        if not warned:
            assert found == facts and now.keys() == arrays.keys(), place
            assert all(now[name].tobytes() == x.tobytes() for name, x in arrays.items()), place
    for size in 0, 100, len(before) // 2, len(before) - 1:
        bad.write_bytes(before[:size])
        assert guard.load_checkpoint(stopped / "logs")[0]["step"] == 8
    assert capsys.readouterr() and go(stopped, "--resume", "logs").sha == whole.sha
    assert re.fullmatch(f"warning: .*{bad.name}.*\n", capsys.readouterr().err)


def test_a_checkpoint_that_was_put_aside_goes_on(stopped):
    """A checkpoint that is written beside those of later steps is not deleted as the oldest, and
    its run names it."""
    (path,) = stopped.glob("logs/*/*08.state")
    aside = shutil.copy(path, stopped / "aside.state")
    go(stopped, "--resume", "logs", "--save_every", 7, stop=28)
    log = go(stopped, "--resume", aside, stop=10)
    (path,) = re.findall("--resume ([^ ]*)", log.lines[-1])
    assert guard.load_checkpoint(stopped / path)[0]["step"] == 10
    assert [path.name for path in log.states] == [f"00000{n}.state" for n in (10, 21, 28)]


def test_times_of_files_decide_nothing(stopped, half, capsys):
    """A clock that was wrong, or a copy, may give earlier checkpoints later times."""
    older = stopped / "logs/2020-01-01T00-00-00_00000000"
    older.mkdir()
    first, last = half.states
    shutil.copy(first, older / "0000029.state")
    for path in (older / "0000029.state", *stopped.glob(f"logs/*/{first.name}")):
        os.utime(path, (2**32, 2**32))
    log = go(stopped, "--resume", "logs", "--save_every", 8, stop=20)
    assert f"resuming logs/{half.path.name} after step 15\n" in capsys.readouterr().out
    left = [path.name for path in log.states if path.parent != older]
    assert left == ["0000016.state", "0000020.state"]
    assert log.lines[-1].endswith(left[-1])
    assert guard.load_checkpoint(stopped / "logs")[0]["step"] == 20


def test_a_copy_of_a_folder_is_not_newer_than_its_run(tmp_path):
    """As a person makes before an experiment."""
    run = "2026-11-26T23-41-00_0123abcd"
    right = [f"{run} (copy)/0000002.state", f"{run}_old/0000004.state", f"{run}.bak/0000005.state"]
    right += [f"{run}/0000005.state", f"{run}/0000006.state"]
    right.insert(0, f"zz {run}/0000009.state")
    for name in reversed(right):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    assert guard.states_below(tmp_path) == [tmp_path / name for name in right]


def test_foreign_files_are_neither_deleted_nor_a_reason_to_fail(stopped, half, capsys):
    """Beside the checkpoints, or as folders of other names, which are not later than runs."""
    (run,) = [path for path in stopped.glob("logs/*") if path.is_dir()]
    first, last = half.states
    (stopped / "logs/zz backup").mkdir()
    shutil.copy(first, stopped / "logs/zz backup/0000029.state")
    names = "best.state", "0000008 (1).state", "²²²²²²².state", "50.state", "next.part"
    foreign = [run / name for name in names]
    for path in foreign:
        shutil.copy(first, path)
    (run / "0000099.state").mkdir()
    (run / "0000098.state").symlink_to("gone")
    elsewhere = run.rename(stopped / "scratch")  # a link to another disk
    run.symlink_to(elsewhere)
    log = go(stopped, "--resume", "logs", "--save_every", 8, stop=20)
    assert f"resuming logs/{half.path.name} after step 15\n" in capsys.readouterr().out
    assert log.code == 143 and "warning" not in log.rest
    names = {path.name for path in run.iterdir()}
    left = {"0000016.state", "0000020.state", "0000098.state", "0000099.state"}
    assert names == left | {path.name for path in foreign} - {"next.part"}


def test_a_checkpoint_without_its_facts_is_passed_over(tmp_path, capsys):
    """As those of records/upstream92/train_gpt.py or of another program."""
    path = tmp_path / "0000001.state"
    with path.open("wb") as file:
        np.savez(file, facts=json.dumps({"step": 1}), x=np.zeros(3))
    with pytest.raises(SystemExit):
        guard.load_checkpoint(tmp_path)
    warning, line = capsys.readouterr().err.splitlines()
    assert "its facts are not step, seconds, log" in warning and "no intact checkpoint" in line


@pytest.mark.parametrize("number", [1.0, np.nan])
def test_only_the_first_process_writes_a_checkpoint(tmp_path, monkeypatch, number):
    """The others say whether all numbers are finite."""
    monkeypatch.setattr(jax, "process_index", lambda: 1)
    state = train_gpt.State({"a": jax.numpy.full(3, number)}, {}, {}, {}, np.int32(0))
    assert guard.save_checkpoint(state, {}, tmp_path / "run/1.state") == (number == 1.0)
    assert not [*tmp_path.iterdir()]


# ---- Faults --------------------------------------------------------------------------------------
@pytest.mark.parametrize("begin, what, bad_step, every, reason, last", [
    ("folder", "weights", 20, 5, "a weight, by step 20", LAST),  # noticed when it saves
    ("folder", "weights", 15, 10, "the loss, by step 15", "0000010.state"),  # when it validates
    ("stopped", "weights", 19, 19, "a weight, by step 19", LAST),
    ("folder", "loss", 10, 8, "the loss, by step 10", "0000008.state"),  # when a loss is logged
    ("folder", "loss", 10, 0, "the loss, by step 10", None),
])  # fmt: skip
def test_a_run_is_void_where_a_number_is_not_finite(
    request, begin, what, bad_step, every, reason, last
):
    """Its last line names the newest checkpoint from before that."""

    def hook(done, out):
        if done != bad_step:
            return None
        state, loss = out
        if what == "weights":
            params = state.params | dict(qk=state.params["qk"] * np.float32("nan"))
            return state._replace(params=params), loss
        return state, loss * np.float32("nan")

    folder = request.getfixturevalue(begin)
    flags = ["--resume", "logs"] if begin == "stopped" else []
    log = go(folder, "--save_every", every, *flags, hook=hook)
    assert log.code == 3 and not log.weights and log.result is None
    assert log.lines[-2] == f"NON-FINITE: {reason}"
    if last is None:
        assert log.lines[-1] == "there is no checkpoint" and not log.states
        return
    (path,) = re.fullmatch(r"to resume: \./run\.sh .* --resume (.*)", log.lines[-1]).groups()
    assert Path(path).name == log.states[-1].name == last
    arrays = guard.load_checkpoint(folder / path)[1]
    assert all(np.isfinite(x).all() for x in arrays.values())


@pytest.fixture
def limit_files():
    """A function that lets this process write no file beyond so many bytes, until the test ends."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    yield lambda size: resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_checkpoint_that_finds_no_room_does_not_end_the_run(folder, whole, limit_files):
    """Nor does it leave a part of a file behind."""

    def hook(done, _):
        limit_files(600_000 if done < 25 else resource.RLIM_INFINITY)

    log = go(folder, "--save_every", 10, hook=hook)
    warnings = re.findall("warning: no checkpoint of step ([12]0): .*File too large", log.rest)
    assert warnings == ["10", "20"] and not log.states
    assert log.code == 0 and log.sha == whole.sha


def test_a_log_that_finds_no_room_does_not_end_the_run(stopped, half, limit_files, capfd):
    """It says so once."""
    (path,) = stopped.glob("logs/*.txt")

    def hook(done, _):
        if done == 27:
            limit_files(path.stat().st_size)

    log = go(stopped, "--resume", "logs", "--save", 0, hook=hook)
    out, err = capfd.readouterr()
    assert log.code == 0 and "step:20/30 train_loss" in log.lines[-1]
    assert json.loads(out.rpartition("RESULT ")[2])["steps"] == 30
    assert err == f"warning: logs/{log.path.name} has gaps: [Errno 27] File too large\n"


SIGNALS = signal.SIGINT, signal.SIGTERM


def watchdogs() -> list[threading.Thread]:
    """The threads of Watchdog.watch() that are alive."""
    return [thread for thread in threading.enumerate() if thread.name.endswith("(watch)")]


def test_a_run_gives_back_what_it_takes(folder):
    """Signal handlers, the watchdog and the log's lock, also if a step raises an error."""
    before = [signal.getsignal(number) for number in SIGNALS]
    inside = []

    def hook(done, _):
        inside.append((len(watchdogs()), [signal.getsignal(number) for number in SIGNALS]))
        if done == 12:
            raise RuntimeError("my own mistake")

    with pytest.raises(RuntimeError, match="my own mistake"):
        go(folder, "--save_every", 10, hook=hook)
    count, handlers = inside[-1]
    assert count == 1 and not {*handlers} & {*before}
    assert [signal.getsignal(number) for number in SIGNALS] == before
    for thread in watchdogs():
        thread.join(5)
    assert not watchdogs()
    assert go(folder, "--save_every", 10, "--resume", "logs").code == 0


@pytest.mark.parametrize("is_nfs", [False, True])
def test_a_log_has_one_writer(is_nfs, tmp_path, monkeypatch, capsys):
    """Also where an editor has replaced the log by a new file, and where folders cannot be locked:
    NFS locks only files that are open for writing."""
    options = SimpleNamespace(resume="", force=0, save_every=0, stall=0)
    path = tmp_path / "log.txt"
    if is_nfs:
        monkeypatch.setattr(guard.os, "open", Mock(side_effect=OSError(9, "as on NFS")))
    with guard.Guard(train_gpt, options) as first:
        first.lock_log(path)
        if not is_nfs:
            path.with_name("new").touch()
            path.with_name("new").rename(path)
        with pytest.raises(SystemExit):
            guard.Guard(train_gpt, options).lock_log(path)
        assert path.with_suffix("").is_dir()  # of the run that goes on
    assert not path.with_suffix("").exists()  # because it is empty
    line = f"launch.py: another process trains the run of {path}: wait for its end, or stop it\n"
    shown = capsys.readouterr().err
    assert shown.replace(f" ({os.getpid()})", "") == line
    again = guard.Guard(train_gpt, options)
    again.lock_log(path)
    again.lock.close()
    with pytest.raises(SystemExit):
        again.lock_log(tmp_path)  # or a log that is read-only
    assert "goes on in its log, which cannot be written: [Errno 21]" in capsys.readouterr().err


def test_a_disk_without_locks_is_named(tmp_path, monkeypatch, capsys):
    """As some network disks. A new run has its log for itself."""
    monkeypatch.setattr(guard.fcntl, "flock", Mock(side_effect=OSError(37, "No locks available")))
    options = SimpleNamespace(resume="", force=0, save_every=0, stall=0)
    path = tmp_path / "log.txt"
    path.touch()
    fresh, resumed = guard.Guard(train_gpt, options), guard.Guard(train_gpt, options)
    resumed.checkpoint = {"step": 1}
    fresh.lock_log(path)
    assert capsys.readouterr().err == ""
    resumed.lock_log(path)
    assert "no other process may resume this run" in capsys.readouterr().err


def test_a_screen_that_nobody_reads_costs_lines(monkeypatch, capsys):
    """As when the computer that shows it sleeps. What it misses is in the log."""
    screen = io.StringIO()
    screen.fileno = lambda: 1
    waits = []

    def select(reads, writes, errors, seconds):
        waits.append(seconds)
        return [], [], []

    monkeypatch.setattr(guard.select, "select", select)
    forgiving = guard.Forgiving(screen, "<stdout>")
    print("one", "two", file=forgiving, flush=True)
    assert screen.getvalue() == "" and waits[0] == 5 and not any(waits[1:])
    assert capsys.readouterr().err == "warning: <stdout> has gaps: nobody reads it\n"
    monkeypatch.setattr(guard.select, "select", lambda *_: ([], [1], []))
    print("three", file=forgiving)
    assert screen.getvalue() == "three\n"


def test_letters_that_a_screen_has_not_cost_nothing():
    screen = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    print("caf\xe9 \udce9", file=guard.Forgiving(screen, "<stdout>"), flush=True)
    assert screen.buffer.getvalue() == b"caf\\xe9 \\udce9\n"


def test_a_run_in_a_thread_trains(folder, whole):
    """Only the main thread can handle signals, so there it does without."""
    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(go, folder).result().sha == whole.sha


class Clock:
    """Stands in for an event on which a watchdog waits: after each of so many seconds, it calls
    tick() instead of waiting."""

    def __init__(self, seconds: int, tick=lambda: None):
        self.left = seconds
        self.tick = tick

    def wait(self, seconds: float) -> bool:
        """Whether the watchdog is closed."""
        self.left -= 1
        self.tick()
        return self.left < 0


@pytest.fixture
def stalls(monkeypatch):
    """A function: whether a watchdog of 3 s ends the process, with status 1, if it counts for so
    many seconds after the run has begun so many steps, of which none ends."""

    def leave(status: int):
        raise SystemExit(status)

    monkeypatch.setattr(guard.os, "_exit", leave)

    def stalls(seconds: int, begun: int, tick=lambda dog: None) -> bool:
        dog = guard.Watchdog(0)
        dog.seconds = 3
        dog.begun = begun
        dog.closed = Clock(seconds, lambda: tick(dog))
        try:
            dog.watch()
        except SystemExit as end:
            assert end.code == 1
            return True
        return False

    return stalls


def test_only_a_step_that_is_under_way_can_stall(stalls, monkeypatch):
    assert stalls(3, begun=1) and not stalls(2, begun=1)
    assert stalls(1800, begun=0) and not stalls(1799, begun=0)  # it compiles, validates, or saves
    assert not stalls(9, begun=1, tick=lambda dog: setattr(dog, "idle", 0))  # steps end
    monkeypatch.setattr(guard, "in_debugger", lambda: True)
    assert not stalls(9, begun=1)


def test_a_debugger_in_any_thread_is_noticed():
    """breakpoint() in a copy waits in code of the module pdb."""
    assert not guard.in_debugger()
    look = lambda: ThreadPoolExecutor(1).submit(guard.in_debugger).result()
    assert eval("look()", {"__name__": "pdb", "look": look})
    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(eval, "look()", {"__name__": "code", "look": guard.in_debugger}).result()


def test_what_jax_reports_is_a_sign_of_life():
    """So minutes of compiling are no stall, if a program is compiled now and then."""
    options = SimpleNamespace(resume="", force=0, save_every=0, stall=0)
    with guard.Guard(train_gpt, options) as its_guard:
        its_guard.watchdog.idle = 99
        jax.jit(lambda x: x + len(options.resume))(1)
        assert its_guard.watchdog.idle == 0
    its_guard.watchdog.idle = 99
    jax.jit(lambda x: x - 1)(1)
    assert its_guard.watchdog.idle == 99


def test_a_stall_ends_the_process_also_without_a_screen(stalls, monkeypatch):
    monkeypatch.setattr(sys, "stderr", Mock(write=Mock(side_effect=BrokenPipeError)))
    monkeypatch.setattr(sys, "__stderr__", None)
    monkeypatch.setattr(threading, "excepthook", lambda _: None)
    assert stalls(3, begun=1)


def test_processes_agree_on_a_signal_without_a_wait(monkeypatch):
    """They ask every ten steps, and read the answer when the step after it has ended."""
    options = SimpleNamespace(resume="", force=0, save_every=0, stall=0)
    its_guard = guard.Guard(train_gpt, options)
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    asked = []

    def ask():
        asked.append(Mock(__int__=Mock(return_value=143)))
        return asked[-1]

    its_guard.ask = ask
    statuses = [its_guard.agreed_exit(step) for step in range(7, 26)]
    assert [step for step, status in enumerate(statuses, 7) if status] == [15, 25]
    assert 5 > train_gpt.STEPS_AHEAD and len(asked) == 2
    assert [answer.__int__.call_count for answer in asked] == [1, 1]


def test_the_largest_exit_status_of_all_devices_counts(monkeypatch):
    options = SimpleNamespace(resume="", force=0, save_every=0, stall=0)
    its_guard = guard.Guard(train_gpt, options)
    its_guard.places = jax.sharding.NamedSharding(make_mesh(8), jax.P("fsdp"))
    its_guard.largest = jax.jit(jax.numpy.max)
    assert int(its_guard.ask()) == 0
    its_guard.exits = [130, 143]
    assert int(its_guard.ask()) == 130


# ---- Processes -----------------------------------------------------------------------------------
# The same two of eight devices as those of the runs in this process, so that they share programs.
TWO_OF_EIGHT = """
mine = jax.devices()[:2]
jax.devices = lambda: mine
"""
TEN = "step:10/30 train_loss"


@pytest.fixture
def start(request, folder):
    """Starts the launcher in the folder, with code at the end of its script; waits until it prints
    step 10."""

    def start(code: str, *flags: str, **pipes) -> subprocess.Popen:
        script = write_script(folder / "train_gpt.py", STAGES, LAYERS)
        script.write_text(launched.with_code(script.read_text(), TWO_OF_EIGHT + code))
        process = launched.start(folder, script.name, *FLAGS, *flags, devices=8, **pipes)
        request.addfinalizer(process.kill)
        wait_for_line(process, TEN)
        return process

    return start


def test_what_is_killed_goes_on_once_it_is_dead(start, folder, whole, capsys):
    """While its process lives, even if it is stopped, no other one may resume the run."""
    process = start("", "--save_every", "7")
    process.send_signal(signal.SIGSTOP)
    source = (folder / "train_gpt.py").read_text()
    log = go(folder, "--resume", "logs", "--save_every", 7, source=source)
    shown = capsys.readouterr()
    owner = rf"another process( \({process.pid}\))?"  # Linux says its number
    line = rf"launch\.py: {owner} trains the run of logs/{log.path.name}: .*\n"
    assert log.code == 2 and re.fullmatch(line, shown.err) and shown.out == ""
    process.kill()
    process.wait()
    log = go(folder, "--resume", "logs", source=source)
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


HANGS_LATER = """
def HOOK(step):
    if step > 10:
        time.sleep(0.05)
    if step == 22:
        HANG()
"""


def test_a_run_that_hangs_ends_and_shows_where_but_one_that_was_stopped_goes_on(start, folder):
    process = start(STAND_INS + HUNG + HANGS_LATER, "--stall", "2")
    process.send_signal(signal.SIGSTOP)
    time.sleep(3.5)
    process.send_signal(signal.SIGCONT)
    wait_for_line(process, "step:20/30 train_loss")
    code, _, err = end(process, 15)
    assert code == 1 and not look(folder).states
    assert err.startswith("No step has ended for 2 s (--stall 0 would wait for ever).\n")
    assert " in HANG\n" in err and " in train\n" in err


# Twenty processes save checkpoints and are killed. All .state files must be whole; `parts` counts
# the kills in the middle of a save.
SAVES = """
import os, random, signal, time
from pathlib import Path
import numpy as np, train_gpt, guard
step = 0
parts = 0
folder = Path("logs/run")
folder.parent.mkdir()
for _ in range(20):
    child = os.fork()
    if not child:
        while True:
            step += 1
            x = np.full(10**6, step, "f4")
            params, opt_state = dict(a=x, b=x), dict(a=(x, x))
            state = train_gpt.State(params, opt_state, dict(a=x), dict(), x)
            facts = dict.fromkeys(guard.FACTS, step)
            guard.save_checkpoint(state, facts, folder / f"{step:07}.state")
    while not list(folder.glob(f"*{step + 1}.state")):
        time.sleep(0.01)
    time.sleep(random.uniform(0, 0.15))
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    parts += len([*folder.glob("*.part")])
    states = sorted(folder.glob("*.state"))
    for path in states:
        facts, arrays = guard.load_checkpoint(path)
        values = {n for x in arrays.values() for n in (x.min(), x.max())}
        assert values == {facts["step"]} == {int(path.stem)}, (path, values)
    step = facts["step"]
    assert step == guard.load_checkpoint(folder)[0]["step"] and len(states) <= 3
print(parts)
"""


def test_kills_leave_whole_checkpoints(folder):
    """JAX starts in the children alone, because a fork would lose its threads."""
    command = [sys.executable, "-c", SAVES]
    env = os.environ | {"PYTHONPATH": f"{TRAIN.parent}:{TRAIN.parent / 'run'}"}
    done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0 and "warning: logs" not in done.stderr, done.stderr
    assert int(done.stdout) > 3  # so many kills were within a save


@pytest.mark.parametrize("name", ["nope", "weights.npz"])
def test_what_is_no_checkpoint_is_named_at_once(tmp_path, monkeypatch, capsys, name):
    monkeypatch.chdir(tmp_path)
    Path("weights.npz").touch()
    with pytest.raises(SystemExit) as end:
        guard.load_checkpoint(Path(name))
    assert end.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert f"--resume {name} is not a .state file" in line
