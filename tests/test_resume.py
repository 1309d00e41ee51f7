"""Runs that a signal, a kill or a fault has stopped are resumed, and end with the same bits."""

import dataclasses
import functools
import hashlib
import itertools
import os
import re
import shlex
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

import train_gpt
from tests.test_run import FLAGS as RUN_FLAGS
from tests.test_run import TRAIN, read, set_tiny, signal_handlers, write_script
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
SAME = dict(data="", save=0, save_every=0, resume="", force=0, stall=0, val_every=1, seed=0)


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
    """The program of a kind, "val" or the updates of a step."""
    mesh = make_mesh(devices)
    if kind == "val":
        return train_gpt.compile_val_step(stage, c, mesh)
    return train_gpt.compile_train_step(stage, kind, c, mesh)


def go(folder: Path, *argv, hook=lambda *_: None, stop: int = 0, devices: int = 2):
    """A run in this process, in the folder: its log and its exit status. In step `stop`, it gets
    SIGTERM. hook(done, out) gets the number of steps done and what the last one returned, and may
    return something else. Programs are not compiled before they are called."""
    steps = SimpleNamespace(done=0)
    real_train = train_gpt.train

    def train(state, c, mesh, programs, shards, log, facts):
        steps.done = facts.get("step", 0)
        return real_train(state, c, mesh, programs, shards, log, facts)

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
        keys = itertools.product(range(2), (c.updates(0), c.updates(1), "val"))
        return {key: functools.partial(program, key, c) for key in keys}

    code = 0
    mine = jax.devices()[:devices]
    with pytest.MonkeyPatch.context() as patch, signal_handlers():
        patch.chdir(folder)
        patch.setattr(jax, "devices", lambda: mine)
        patch.setattr(train_gpt, "train", train)
        patch.setattr(train_gpt, "compile_all", compile_all)
        patch.setattr(train_gpt, "warm_up", lambda programs, c, mesh: None)
        set_tiny(patch, STAGES, LAYERS)
        try:
            train_gpt.main([*FLAGS, *map(str, argv)])
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
    restore = train_gpt.restore

    def forgetful(arrays, c, mesh):
        return LOST[lost](restore(arrays, c, mesh), train_gpt.make_state(c, mesh))

    if lost in LOST:
        monkeypatch.setattr(train_gpt, "restore", forgetful)
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
def test_the_command_has_the_flags_of_the_run_and_one_resume(stopped, half):
    (first,) = re.findall("; to resume: (.*)", half.lines[-1])
    path = f"logs/{half.path.stem}/{LAST}"
    assert half.lines[-1].startswith("INTERRUPTED by SIGTERM after step 15; to resume: ")
    flags = [*FLAGS, "--save_every", "8"]
    assert shlex.split(first) == ["python", "train_gpt.py", *flags, "--resume", path]
    log = go(stopped, "--save_every", 8, "--resume", "logs", stop=20)
    assert log.lines[-1].endswith(first.replace(LAST, "0000020.state"))


@pytest.mark.slow
def test_what_an_interrupted_run_prints_goes_on(folder, whole):
    """The command is run by a shell, as a user would run it."""
    script = write_script(folder / "train_gpt.py", STAGES, LAYERS)
    main = 'if __name__ == "__main__":\n'
    source = script.read_text()
    script.write_text(source.replace(main, SLOW_BATCHES + main))
    env = environment() | dict(JAX_NUM_CPU_DEVICES="2")
    env["PATH"] = f"{Path(sys.executable).parent}:{env['PATH']}"
    pipes = dict(cwd=folder, env=env, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    command = ["python", "train_gpt.py", *FLAGS]
    process = subprocess.Popen(command, **pipes)
    try:
        wait_for_line(process, TEN)
        process.terminate()
        code, out, err = end(process)
    finally:
        process.kill()
    assert (code, err) == (143, "")
    (command,) = re.findall("^INTERRUPTED by SIGTERM after step .*; to resume: (.*)", out, re.M)
    done = subprocess.run(command, shell=True, check=False, timeout=120, **pipes)
    assert (done.returncode, done.stderr) == (0, "")
    log = look(folder)
    assert log.result["resumed"] and log.result["steps"] == 30 and log.losses == whole.losses


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
    line = rf"train_gpt\.py: --resume logs: {message}.*" + advice
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
        assert re.fullmatch(r"train_gpt\.py: .+", lines[-1]) and re.search(message, lines[-1])
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
            train_gpt.load_checkpoint(path)  # it is whole

    monkeypatch.setattr(os, "fsync", slow_fsync)
    log = go(folder, "--save_every", 14)
    assert synced == [(".part", 0), (".part", 1)]
    assert log.result["train_time_ms"] / 1000 < time.perf_counter() - began - 1


def test_damaged_checkpoints_are_passed_over(stopped, whole, capsys):
    """One byte of the newest checkpoint is changed: either that is noticed, and the one before is
    loaded, or what is loaded is the same."""
    _, bad = sorted(stopped.glob("logs/*/*"))
    before = bad.read_bytes()
    facts, arrays = train_gpt.load_checkpoint(bad)
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
        found, now = train_gpt.load_checkpoint(stopped / "logs")
        warned = capsys.readouterr().err.startswith(f"warning: {bad}")
        assert (found["step"], warned) in ((8, True), (15, False)), place
        if not warned:
            assert found == facts and now.keys() == arrays.keys(), place
            assert all(now[name].tobytes() == x.tobytes() for name, x in arrays.items()), place
    for size in 0, 100, len(before) // 2, len(before) - 1:
        bad.write_bytes(before[:size])
        assert train_gpt.load_checkpoint(stopped / "logs")[0]["step"] == 8
    assert capsys.readouterr() and go(stopped, "--resume", "logs").sha == whole.sha
    assert re.fullmatch(f"warning: .*{bad.name}.*\n", capsys.readouterr().err)


def test_a_checkpoint_that_was_put_aside_goes_on(stopped):
    """A checkpoint that is written beside those of later steps is not deleted as the oldest."""
    (path,) = stopped.glob("logs/*/*08.state")
    aside = shutil.copy(path, stopped / "aside.state")
    go(stopped, "--resume", "logs", "--save_every", 7)
    log = go(stopped, "--resume", aside, stop=10)
    (path,) = re.findall("--resume ([^ ]*)", log.lines[-1])
    steps = [train_gpt.load_checkpoint(stopped / place)[0]["step"] for place in (path, "logs")]
    assert steps == [10, 10]


# ---- Faults --------------------------------------------------------------------------------------
@pytest.mark.parametrize("begin, what, bad_step, every, end_step, last", [
    ("folder", "weights", 20, 5, 20, LAST),  # noticed when it saves
    ("folder", "weights", 15, 10, 15, "0000010.state"),  # when it validates
    ("stopped", "weights", 19, 19, 19, LAST),
    ("folder", "loss", 10, 8, r"1\d", "0000008.state"),  # when a loss is logged
])  # fmt: skip
def test_a_run_is_void_where_a_number_is_not_finite(
    request, begin, what, bad_step, every, end_step, last
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
    reason = f"NON-FINITE: the loss or a weight, by step {end_step}; to resume: .* --resume (.*)"
    (path,) = re.fullmatch(reason, log.lines[-1]).groups()
    assert Path(path).name == log.states[-1].name == last
    arrays = train_gpt.load_checkpoint(folder / path)[1]
    assert all(np.isfinite(x).all() for x in arrays.values())


# The beginning of a process's code. It uses the same two of eight devices as the runs in this
# process, so that it finds their programs in the cache.
CHILD = f"""
import dataclasses, itertools, os, random, resource, signal, sys, time
from pathlib import Path
import jax, numpy as np, train_gpt
from train_gpt import Layer, Stage
signal.signal(signal.SIGINT, signal.default_int_handler)  # background jobs ignore it
changes = dict(layers={LAYERS}, stages={STAGES}, mudd_head=(), head_chunk=32)
train_gpt.PRESETS["tiny"] = dataclasses.replace(train_gpt.PRESETS["tiny"], **changes)
mine = jax.devices()[:2]
jax.devices = lambda: mine
"""
MAIN = "train_gpt.main(sys.argv[1:])\n"
# Programs that call hook(step) and compute nothing.
STAND_INS = """
steps = itertools.count(1)
def train_program(state, tokens, row):
    hook(next(steps))
    return state, np.float32(3) * jax.numpy.ones(())
def compile_all(c, *_):
    keys = itertools.product(range(2), [c.updates(0), c.updates(1)])
    programs = dict.fromkeys(keys, train_program)
    return programs | dict.fromkeys([(0, "val"), (1, "val")], lambda *_: (9.0, 0))
train_gpt.compile_all = compile_all
train_gpt.warm_up = lambda *_: None
"""
SLOW = CHILD + STAND_INS + "hook = lambda step: time.sleep(0.05)\n"
HUNG = CHILD + STAND_INS + """
import ctypes  # the thread waits in C, as in XLA, where no Python signal handler runs
lock, mutex = ctypes.CDLL(None).pthread_mutex_lock, ctypes.create_string_buffer(64)
def hook(step):
    if step in (11, 12):
        lock(mutex)
"""  # fmt: skip
SLOW_BATCHES = '''def slow(batches):
    """The batches, so slowly that a signal comes in time."""
    for batch in batches:
        time.sleep(0.05)
        yield batch


fast_batches = train_batches
train_batches = lambda *args: slow(fast_batches(*args))


'''
TEN = "step:10/30 train_loss"


def environment() -> dict[str, str]:
    """The environment of processes that tests start."""
    return os.environ | dict(PYTHONPATH=str(TRAIN.parent), JAX_NUM_CPU_DEVICES="8")


def wait_for_line(process: subprocess.Popen, text: str) -> None:
    """Reads a process's stdout up to a line with this text, which must come."""
    for line in process.stdout:
        if text in line:
            return
    pytest.fail(f"the process ended without printing {text!r}")


@pytest.fixture
def start(request):
    """Starts a process; with `until`, waits until it prints a line with that text."""

    def start(folder: Path, code: str, *flags: str, until: str = "") -> subprocess.Popen:
        command = [sys.executable, "-c", code, *FLAGS, *flags]
        pipes = dict(text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        process = subprocess.Popen(command, cwd=folder, env=environment(), **pipes)
        request.addfinalizer(process.kill)
        if until:
            wait_for_line(process, until)
        return process

    return start


def end(process: subprocess.Popen, seconds: int = 60) -> tuple[int, str, str]:
    """Waits for a process; its exit status, stdout and stderr."""
    out, err = process.communicate(timeout=seconds)
    return process.returncode, out, err


def test_what_is_killed_goes_on(start, folder, whole):
    start(folder, CHILD + MAIN, "--save_every", "7", until=TEN).kill()
    code, _, err = end(start(folder, CHILD + MAIN, "--resume", "logs"))
    log = look(folder)
    assert (code, err) == (0, "") and log.sha == whole.sha and log.result["resumed"]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_the_run_with_a_checkpoint(start, folder, number):
    process = start(folder, SLOW + MAIN, until=TEN)
    process.send_signal(number)
    code, out, err = end(process)
    log = look(folder)
    assert (code, err) == (128 + number, "") and log.result is None
    step, path = re.search(r"by SIG\w+ after step (\d+).*--resume ([^ \n]*)", out).groups()
    assert 10 <= int(step) < 20
    assert train_gpt.load_checkpoint(folder / path)[0]["step"] == int(step)
    assert out.splitlines()[-1] == log.lines[-1]


def test_a_run_that_hangs_ends_and_shows_where(start, folder):
    process = start(folder, HUNG + MAIN, "--stall", "2", until=TEN)
    code, _, err = end(process, 9)
    log = look(folder)
    assert code == 1 and not log.states
    assert err.startswith("Timeout (0:00:02)!\nThread 0x")
    assert "in hook\n" in err and " in train\n" in err


def test_a_checkpoint_that_finds_no_room_does_not_end_the_run(start, folder):
    """Nor does it leave a part of a file behind."""
    small = "resource.setrlimit(resource.RLIMIT_FSIZE, (600_000, -1))\n"
    code, out, err = end(start(folder, SLOW + small + MAIN, "--save_every", "10"))
    assert (code, err) == (0, "") and len(re.findall("warning: .*File too large", out)) == 2
    log = look(folder)
    assert log.result["steps"] == 30 and log.weights and not log.states


def test_a_log_that_finds_no_room_does_not_end_the_run(start, stopped):
    (path,) = stopped.glob("logs/*.txt")
    path.unlink()
    path.symlink_to("/dev/full")
    code, out, err = end(start(stopped, SLOW + MAIN, "--resume", "logs"))
    assert code == 0 and out.splitlines()[-1].startswith("RESULT {")
    assert re.match(f"warning: .*{path.name}.*No space", err) and "Traceback" not in err


# Twenty processes save checkpoints and are killed. All .state files must be whole; `parts` counts
# the kills in the middle of a save.
SAVES = """
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
            state = train_gpt.State(params, opt_state, dict(a=x), dict(), [dict(a=x)], x)
            train_gpt.save_checkpoint(state, dict(step=step), folder / f"{step:07}.state")
    while not list(folder.glob(f"*{step + 1}.state")):
        time.sleep(0.01)
    time.sleep(random.uniform(0, 0.15))
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    parts += len([*folder.glob("*.part")])
    states = sorted(folder.glob("*.state"))
    for path in states:
        facts, arrays = train_gpt.load_checkpoint(path)
        values = {n for x in arrays.values() for n in (x.min(), x.max())}
        assert values == {facts["step"]} == {int(path.stem)}, (path, values)
    step = facts["step"]
    assert step == train_gpt.load_checkpoint(folder)[0]["step"] and len(states) <= 3
print(parts)
"""


def test_kills_leave_whole_checkpoints(start, folder):
    saves = (
        CHILD[: CHILD.index("mine")] + SAVES
    )  # without jax.devices(): a fork would lose JAX's threads
    code, out, err = end(start(folder, saves))
    assert code == 0 and "warning: logs" not in err and int(out) > 3, (
        err
    )  # more than 3 kills were within a save


@pytest.mark.parametrize("name", ["nope", "weights.npz"])
def test_what_is_no_checkpoint_is_named_at_once(tmp_path, monkeypatch, capsys, name):
    monkeypatch.chdir(tmp_path)
    Path("weights.npz").touch()
    with pytest.raises(SystemExit) as end:
        train_gpt.load_checkpoint(Path(name))
    assert end.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert f"--resume {name} is not a .state file" in line
