"""Runs that a signal, a kill or a fault stops, and that go on where they were: bit for bit."""

import dataclasses
import functools
import hashlib
import itertools
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from jax.experimental.compilation_cache import compilation_cache

import train_gpt
from tests.test_run import MINI, TRAIN, read
from tests.tools import make_mesh, text, unoptimized, write_shard

# Stages part after step 12, embedding and head after 18; a loss is told every ten steps.
FLAGS = "--plan Lv0 --steps 30 --val_every 15 --flat 10 --fallen 28 --untie 17 --seed 7 --data data"
FLAGS = [*MINI, *FLAGS.split(), "--stages", "12 256 8 8 50 1 0,1,.5 / 18 512 8 16 0 1 0,1"]
# No program depends on these: tests share programs.
SAME = dict(data="", save=0, save_every=0, resume="", force=0, stall=0, val_every=1)


@pytest.fixture(autouse=True, scope="module")
def cache(tmp_path_factory):
    """A folder of compiled programs, for processes, too."""
    new = dict(
        jax_enable_compilation_cache=True, jax_persistent_cache_min_compile_time_secs=0,
        jax_compilation_cache_dir=str(tmp_path_factory.mktemp("cache")),
    )  # fmt: skip
    old = {name: getattr(jax.config, name) for name in new}
    with unoptimized():
        for values in new, old:
            [jax.config.update(*value) for value in values.items()]
            compilation_cache.reset_cache()
            if values is new:
                yield new["jax_compilation_cache_dir"]


def make_folder(path: Path) -> Path:
    (path / "data").mkdir()
    for i, name in enumerate([*(f"train_00000{i}" for i in range(1, 5)), "val_000000"]):
        write_shard(path / f"data/x_{name}.bin", text(4000, i))
    return path


@pytest.fixture
def folder(tmp_path) -> Path:
    return make_folder(tmp_path)


@functools.cache
def compiled(kind: str, stage: int, c: train_gpt.Config, devices: int):
    return train_gpt.compile_stage(kind, stage, c, make_mesh(devices))


def stand_ins(hook, c: train_gpt.Config, mesh, *_) -> dict:
    """What prepare returns; each program compiles when it is called. `hook` gets the steps done and
    what the last one returns, and may return something else."""
    c = dataclasses.replace(c, **SAME)

    def program(kind, stage, state, tokens):
        if kind == "val":
            return compiled(kind, stage, dataclasses.replace(c, steps=30), mesh.size)(state, tokens)
        done, out = int(state.step) + 1, compiled(kind, stage, c, mesh.size)(state, tokens)
        return hook(done, out) or out

    keys = itertools.product(("even", "odd", "val"), range(2))
    return {key: functools.partial(program, *key) for key in keys}


def go(folder: Path, *argv, hook=lambda *_: None, stop: int = 0, devices: int = 2):
    """Runs in this process and the folder, SIGTERM in step `stop`: its log, and its exit code."""

    def stopping(done, out):
        if done == stop:
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(0.1)
        return hook(done, out)

    numbers, code, mine = (signal.SIGINT, signal.SIGTERM), 0, jax.devices()[:devices]
    before = [*map(signal.getsignal, numbers)]
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setattr(jax, "devices", lambda: mine)
        patch.setattr(train_gpt, "prepare", functools.partial(stand_ins, stopping))
        try:
            train_gpt.main([*FLAGS, "--stall", "0", *map(str, argv)])
        except SystemExit as end:
            code = end.code
        finally:
            [*map(signal.signal, numbers, before)]
    return look(folder, code=code)


def look(folder: Path, **more) -> SimpleNamespace:
    """Its newest log, of one source: what `read` says of it; a hash of the weights; checkpoints."""
    path = max(folder.glob("logs/*.txt"), key=os.path.getmtime)
    log, sha, states = read(path), hashlib.sha256(), sorted(folder.glob("logs/*/*"))
    for name in sorted(set(log.weights or ()) - {"config", "result", "source"}):
        sha.update(log.weights[name].tobytes())
    return SimpleNamespace(**vars(log), sha=sha.hexdigest(), states=states, folder=folder, **more)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The run in one go, with checkpoints."""
    log = go(make_folder(tmp_path_factory.mktemp("whole")), "--save_every", 7)
    assert not log.code and not log.result.get("resumed")
    return log


@pytest.fixture(scope="module")
def half(tmp_path_factory):
    """The run, stopped after step 15, with a checkpoint before that."""
    log = go(make_folder(tmp_path_factory.mktemp("half")), "--save_every", 8, stop=15)
    assert log.code == 143 and [path.name for path in log.states] == ["0000008.state", LAST]
    assert re.match(f"INTERRUPTED by SIGTERM after step 15.*/{LAST}", log.lines[-1])
    return log


LAST = "0000015.state"


@pytest.fixture
def stopped(half, tmp_path) -> Path:
    """Its folder, for one test."""
    return shutil.copytree(half.folder, tmp_path, dirs_exist_ok=True)


# ---- Exactness -----------------------------------------------------------------------------------
@pytest.mark.parametrize("stops", [(11, 18), (1, 12, 17), (14, 29)])
def test_a_run_that_goes_on_is_the_run_in_one_go(folder, whole, stops):
    """Stopped after odd steps, whose gradients wait, and even ones, where stages and tables part,
    and not."""
    logs = [go(folder, *n * ["--resume", "logs"], stop=stop) for n, stop in enumerate([*stops, 0])]
    assert [log.code for log in logs] == [143] * len(stops) + [0]
    assert logs[-1].sha == whole.sha and logs[-1].losses == whole.losses
    same = dict.fromkeys(("train_time_ms", "weights", "resumed"))
    assert logs[-1].result | same == whole.result | same and logs[-1].result["resumed"] is True
    told = re.findall("^step:.* train_loss:[^ ]*", whole.rest + logs[-1].rest, re.M)
    assert told[:3] == told[3:] and len(told) == 6


BROKEN = dict(
    no=lambda state, fresh: state,
    moments=lambda state, fresh: state._replace(optimizer=fresh.optimizer),
    gradients=lambda state, fresh: state._replace(held=fresh.held),
    tables=lambda state, fresh: state._replace(tables=fresh.tables),
    position=lambda state, fresh: state._replace(step=state.step + 1),
)


@pytest.mark.parametrize("fault", BROKEN)
def test_nothing_of_the_state_may_be_lost(stopped, whole, monkeypatch, fault):
    restore = train_gpt.restore
    monkeypatch.setattr(train_gpt, "restore", lambda arrays, c, mesh: BROKEN[fault](
        restore(arrays, c, mesh), train_gpt.make_state(c, mesh)))  # fmt: skip
    assert (go(stopped, "--resume", "logs").sha == whole.sha) == (fault == "no")


def test_a_checkpoint_along_the_way_is_as_good(whole, folder):
    """Of the four that were written, two are kept."""
    assert [path.name for path in whole.states] == ["0000021.state", "0000028.state"]
    log = go(folder, "--resume", whole.states[0])
    assert log.sha == whole.sha and log.losses.items() <= whole.losses.items()


def test_other_devices_go_on_within_rounding(folder, whole):
    go(folder, devices=8, stop=3)
    log = go(folder, "--resume", "logs")
    assert log.result["devices"] == 2 and log.result["resumed"]
    for name in log.weights.keys() - {"config", "result", "source"}:
        x, y = log.weights[name], whole.weights[name]
        assert np.linalg.norm(x - y) <= 0.01 * np.linalg.norm(y), name


def test_at_the_last_step_it_validates(stopped, half):
    log = go(stopped, "--resume", "logs", "--steps", 15, "--force", 1)
    assert (log.code, log.losses[15], log.result["steps"]) == (0, half.losses[15], 15)
    assert log.result["resumed"] and log.weights


def test_the_clock_and_the_log_go_on(stopped, half):
    log = go(stopped, "--resume", next(stopped.glob(f"logs/*/{LAST}")), "--seed", -1)
    assert log.rest.startswith(half.rest) and log.path.name == half.path.name
    assert log.result["seed"] == 7
    times = [int(ms) for ms in re.findall(r"train_time:(\d+)ms", log.rest)]
    assert times == sorted(times) and times[-1] == round(log.result["train_time_ms"])
    assert half.times[15] <= log.times[15] <= half.times[15] + 50  # it validates again


# ---- Refusals ------------------------------------------------------------------------------------
SHARD = "data/x_train_000002.bin"
OTHER = dict(
    config=("--val_every 10", lambda _: None, "--val_every [^;]*10[^;]*15"),
    seed=("--seed 8", lambda _: None, "--seed [^;]*8[^;]*7"),
    source=("", lambda _: None, "import spam"),
    data=("", lambda folder: write_shard(folder / SHARD, text(4000, 5)), "data|tokens|000002"),
    gone=("", lambda folder: (folder / SHARD).unlink(), "train.* steps|000002"),
    broken=("", lambda folder: [x.write_bytes(b"?") for x in folder.glob("logs/*/*")], "logs"),
)


@pytest.mark.parametrize("other", OTHER)
def test_another_run_does_not_go_on(stopped, half, monkeypatch, capsys, other):
    flags, change, says = OTHER[other]
    change(stopped)
    if other == "source":
        source = train_gpt.SOURCE.replace("import json\n", "import spam\n", 1)
        monkeypatch.setattr(train_gpt, "SOURCE", source)
    log, said = go(stopped, "--resume", "logs", *flags.split()), capsys.readouterr()
    assert (log.code, log.rest, said.out) == (2, half.rest, "")
    said = said.err.splitlines()
    assert re.fullmatch(r"train_gpt\.py: .+", said[-1]) and re.search(says, said[-1])
    assert len(said) == (3 if other == "broken" else 1)
    if other not in ("gone", "broken"):
        log = go(stopped, "--resume", "logs", *flags.split(), "--force", 1)
        assert log.code == 0 and re.search(says, log.facts["resume"]["changed"])
        assert (stopped / "logs" / half.path.name).read_bytes() == half.path.read_bytes()


# ---- Files ---------------------------------------------------------------------------------------
def test_a_checkpoint_is_on_the_disk_before_it_has_its_name(folder, monkeypatch):
    """Which takes time, but not of training."""
    synced, fsync, began = [], os.fsync, time.perf_counter()

    def note(fd):
        time.sleep(0.5)
        fsync(fd)
        if (path := Path(os.readlink(f"/proc/self/fd/{fd}"))).is_file():
            synced.append((path.suffix, len([*path.parent.glob("*.state")])))
            train_gpt.load(path)  # all of it

    monkeypatch.setattr(os, "fsync", note)
    log = go(folder, "--save_every", 14)
    assert synced == [(".part", 0), (".part", 1)]
    assert log.result["train_time_ms"] / 1000 < time.perf_counter() - began - 1


def test_what_is_broken_is_passed_over(stopped, whole, capsys):
    """Wherever; or it does not matter."""
    _, bad = sorted(stopped.glob("logs/*/*"))
    before, (facts, arrays) = bad.read_bytes(), train_gpt.load(bad)
    with np.load(bad, allow_pickle=False) as file:
        assert {*arrays} < {*file} and dict(file)
    # Of another dtype or shape, an array would be shorter than the bytes that have a checksum.
    kind, shape = before.index(b"'<f4'") + 3, before.index(b"(384, 32)") + 1
    flips = [(kind, 6), (shape, 1), (0, 255), (len(before) - 1, 255)]
    places = np.random.default_rng(0).integers(0, len(before), 40)
    for at, bits in [*flips, *((at, 255) for at in places)]:
        bad.write_bytes(before[:at] + bytes([before[at] ^ bits]) + before[at + 1 :])
        found, now = train_gpt.load(stopped / "logs")
        warned = capsys.readouterr().err.startswith(f"warning: {bad}")
        assert (found["step"], warned) in ((8, True), (15, False)), at
        if not warned:
            assert found == facts and now.keys() == arrays.keys(), at
            assert all(now[name].tobytes() == x.tobytes() for name, x in arrays.items()), at
    for size in 0, 100, len(before) // 2, len(before) - 1:
        bad.write_bytes(before[:size])
        assert train_gpt.load(stopped / "logs")[0]["step"] == 8
    assert capsys.readouterr() and go(stopped, "--resume", "logs").sha == whole.sha
    assert re.fullmatch(f"warning: .*{bad.name}.*\n", capsys.readouterr().err)


def test_a_checkpoint_that_was_put_aside_goes_on(stopped):
    """Beside later ones, what it saves is not the first to go."""
    aside = shutil.copy(next(stopped.glob("logs/*/*08.state")), stopped / "aside.state")
    go(stopped, "--resume", "logs", "--save_every", 7)
    log = go(stopped, "--resume", aside, stop=10)
    (said,) = re.findall("--resume ([^ ]*)", log.lines[-1])
    assert [train_gpt.load(stopped / place)[0]["step"] for place in (said, "logs")] == [10, 10]


# ---- Faults --------------------------------------------------------------------------------------
@pytest.mark.parametrize("begin, at, every, steps, last", [
    ("folder", 20, 5, "11 to 20", LAST), ("folder", 15, 10, "11 to 15", "0000010.state"),
    ("stopped", 19, 19, "16 to 19", LAST),
])  # fmt: skip
def test_a_run_is_void_where_numbers_end(request, begin, at, every, steps, last):
    """Seen when it saves or validates: since when, and a checkpoint of before."""

    def hook(done, out):
        (state, loss), nan = out, np.float32("nan")
        params = state.params | dict(qk=state.params["qk"] * nan)
        return (state._replace(params=params), loss * nan) if done == at else None

    folder, flags = request.getfixturevalue(begin), ("--resume", "logs") * (begin == "stopped")
    log = go(folder, "--save_every", every, *flags, hook=hook)
    assert log.code == 3 and log.lines[-1].startswith("NON-FINITE: ") and not log.weights
    assert steps in log.lines[-1] and re.findall(r"'\W*(\w+)\W*'", log.lines[-1]) == ["qk"]
    assert re.search(f"logs/[^ ]*/{last}", log.lines[-1]) and log.states[-1].name == last
    assert all(np.isfinite(x).all() for x in train_gpt.load(log.states[-1])[1].values())


# A process runs this, on the same two of eight devices, so that it finds the same programs.
CHILD = """
import itertools, os, random, resource, signal, sys, time
from pathlib import Path
import jax, numpy as np, train_gpt
signal.signal(signal.SIGINT, signal.default_int_handler)  # which a job in the background ignores
mine = jax.devices()[:2]
jax.devices = lambda: mine
"""
MAIN = "train_gpt.main(sys.argv[1:])"
STAND_INS = """
@jax.jit
def move(state, tokens):
    return state._replace(step=state.step + 1), tokens.mean()
def prepare(*_):
    run = lambda state, tokens: hook(int(state.step)) or move(state, tokens)
    keys = itertools.product(["even", "odd", "val"], range(2))
    return {key: run if key[0] != "val" else lambda *_: 9.0 for key in keys}
train_gpt.prepare = prepare
"""
SLOW = CHILD + STAND_INS + "hook = lambda step: time.sleep(0.05)\n"
HUNG = CHILD + STAND_INS + """
import ctypes  # as in XLA, no handler that is written in Python runs
lock, mutex = ctypes.CDLL(None).pthread_mutex_lock, ctypes.create_string_buffer(64)
def hook(step):
    if step in (11, 12):
        lock(mutex)
"""  # fmt: skip


@pytest.fixture
def start(cache, request):
    def start(folder: Path, code: str, *flags: str, until: str = "") -> subprocess.Popen:
        env = os.environ | dict(
            PYTHONPATH=str(TRAIN.parent), JAX_COMPILATION_CACHE_DIR=cache, JAX_NUM_CPU_DEVICES="8",
            JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS="0", JAX_DISABLE_MOST_OPTIMIZATIONS="1",
        )  # fmt: skip
        command = [sys.executable, "-c", code, *FLAGS, *flags]
        pipes = dict(text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        process = subprocess.Popen(command, cwd=folder, env=env, **pipes)
        request.addfinalizer(process.kill)
        next(line for line in process.stdout if until in line) if until else None
        return process

    return start


def end(process: subprocess.Popen, seconds: int = 60) -> tuple[int, str, str]:
    out, err = process.communicate(timeout=seconds)
    return process.returncode, out, err


TEN = "step:10/30 train_loss"


def test_what_is_killed_goes_on_and_says_where_time_went(start, folder, whole):
    start(folder, CHILD + MAIN, "--save_every", "7", until=TEN).kill()
    began = time.perf_counter()
    code, out, err = end(start(folder, CHILD + MAIN, "--resume", "logs"))
    took, log = time.perf_counter() - began, look(folder)
    assert (code, err) == (0, "") and log.sha == whole.sha and log.result["resumed"]
    (goodput,) = [line for line in log.lines if line.startswith("GOODPUT ")]
    share, wall, parts = re.fullmatch(r"GOODPUT (\d+)%: (\d+\.\d) s = (.*)", goodput).groups()
    parts = [re.fullmatch(r"(.*) (\d+\.\d)", part).groups() for part in parts.split(" + ")]
    spent, wall = {name: float(seconds) for name, seconds in parts}, float(wall)
    assert goodput in out and abs(sum(spent.values()) - wall) < 0.05 * (len(parts) + 2)
    assert 0.6 * took < wall < took and abs(int(share) - 100 * spent["train"] / wall) < 2
    assert spent["compile (6 cached, 0 not)"] > 1 and min(spent.values()) >= 0


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_the_run_with_a_checkpoint(start, folder, number):
    process = start(folder, SLOW + MAIN, until=TEN)
    process.send_signal(number)
    (code, out, err), log = end(process), look(folder)
    assert (code, err) == (128 + number, "") and log.result is None
    step, path = re.search(r"by SIG\w+ after step (\d+).*--resume ([^ \n]*)", out).groups()
    assert 10 <= int(step) < 20 and train_gpt.load(folder / path)[0]["step"] == int(step)
    assert out.splitlines()[-2:] == log.lines[-2:] and log.lines[-2].startswith("GOODPUT ")


@pytest.mark.parametrize("number, codes", [(signal.SIGTERM, (-15, 143)), (signal.SIGINT, (130,))])
def test_a_signal_ends_compiling_at_once(start, folder, number, codes):
    sleep = "train_gpt.compile_stage = lambda *_: time.sleep(20)\n"
    process = start(folder, CHILD + sleep + MAIN, until="compiling")
    process.send_signal(number)
    assert end(process, 5)[0] in codes and not look(folder).states


@pytest.mark.parametrize("stall, code", [(0, 143), (2, 4)])
def test_a_run_that_hangs_ends(start, folder, stall, code):
    """By a second signal, or by itself, and shows where."""
    process = start(folder, HUNG + MAIN, "--stall", str(stall), until=TEN)
    for _ in range(0 if stall else 2):
        time.sleep(0.5)
        process.terminate()
    (ended, out, err), log = end(process, 9), look(folder)
    assert ended == code and not log.states and ("STALLED" in out) == (code == 4)
    for said in (log.rest, err) if stall else ():
        assert said.count("hread 0x") > 1 and "in hook" in said and " in train\n" in said


def test_a_checkpoint_that_finds_no_room_does_not_end_the_run(start, folder):
    """Nor does it take what room there is."""
    small = "resource.setrlimit(resource.RLIMIT_FSIZE, (600_000, -1))\n"
    code, out, err = end(start(folder, SLOW + small + MAIN, "--save_every", "10"))
    assert (code, err) == (0, "") and len(re.findall("warning: .*File too large", out)) == 2
    log = look(folder)
    assert log.result["steps"] == 30 and log.weights and not log.states


def test_a_log_that_finds_no_room_does_not_end_the_run(start, stopped, half):
    (path,) = stopped.glob("logs/*.txt")
    path.unlink()
    path.symlink_to("/dev/full")
    code, out, err = end(start(stopped, SLOW + MAIN, "--resume", "logs"))
    assert code == 0 and out.splitlines()[-2].startswith("RESULT {")
    assert re.match(f"warning: .*{path.name}.*No space", err) and "Traceback" not in err


SAVES = """
step, parts, folder = 0, 0, Path("logs/run")
folder.parent.mkdir()
for _ in range(20):
    if not (child := os.fork()):
        while True:
            step, x = step + 1, np.full(10**6, step + 1, "f4")
            state = train_gpt.State(np.int32(step), dict(a=x, b=x), (x, x), dict(a=x), dict())
            train_gpt.save(state, dict(step=step), folder / f"{step:07}.state")
    while not list(folder.glob(f"*{step + 1}.state")):
        time.sleep(0.01)
    time.sleep(random.uniform(0, 0.15))
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    parts, states = parts + len([*folder.glob("*.part")]), sorted(folder.glob("*.state"))
    for path in states:
        facts, arrays = train_gpt.load(path)
        values = {n for x in arrays.values() for n in (x.min(), x.max())}
        assert values == {facts["step"]} == {int(path.stem)}, (path, values)
    step = facts["step"]
    assert step == train_gpt.load(folder)[0]["step"] and len(states) <= 3
print(parts)
"""


def test_kills_leave_whole_checkpoints(start, folder):
    saves = CHILD[: CHILD.index("mine")] + SAVES  # before JAX begins, whose threads are not forked
    code, out, err = end(start(folder, saves))
    assert code == 0 and "warning: logs" not in err and int(out) > 3, err  # kills within a save
