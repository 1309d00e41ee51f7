"""A whole run in miniature: its log, its weights, its clock, its ends."""

import dataclasses
import functools
import hashlib
import json
import math
import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import jax
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, Mesh

import train_gpt

TRAIN = Path(train_gpt.__file__).resolve()
MINI = [
    *("tiny", "--plan", "Lv0 S<0", "--D", "32", "--H", "2", "--F", "64", "--T", "32"),
    *("--head_chunk", "32", "--window", "16", "--window_block", "8", "--val_T", "64"),
    *("--val_tokens", "1024", "--steps", "6", "--val_every", "3", "--target", "0"),
    *("--compute", "float32", "--head_forward", "float32", "--head_backward", "float32"),
]
STEP = r"step:(\d+)/(\d+) val_loss:(\d+\.\d{4}) train_time:(\d+)ms step_avg:(\d+\.\d\d)ms"
DEVICES = jax.devices()[:1]
MESH = Mesh(np.array(DEVICES), ("fsdp",), axis_types=(AxisType.Auto,))


def write_shard(path: Path, n: int, first: int) -> None:
    tokens = (np.arange(n) + first) % 16
    tokens[::50] = 256
    header = np.zeros(256, "<i4")
    header[:3] = 20240520, 1, n
    path.write_bytes(header.tobytes() + tokens.astype("<u2").tobytes())


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> Path:
    """Three train shards of 4 steps each, and a val shard of 2."""
    folder = tmp_path_factory.mktemp("data")
    for i in 1, 2, 3:
        write_shard(folder / f"x_train_{i:06}.bin", 1100, i)
    write_shard(folder / "x_val_000000.bin", 1200, 4)
    return folder


def read(path: Path) -> SimpleNamespace:
    """A log, by `re` and `json` alone."""
    source, rest = re.split("^={100}\n", path.read_bytes().decode(), flags=re.M)
    lines = rest.splitlines()
    facts = {
        name: json.loads(value)
        for name, value in re.findall("^([a-z]+) (.*)$", rest, re.M)
        if name != "step"
    }
    losses = {int(m[1]): m[3] for m in map(re.compile(STEP).fullmatch, lines) if m}
    times = {int(m[1]): int(m[4]) for m in map(re.compile(STEP).fullmatch, lines) if m}
    result = re.fullmatch("RESULT (.*)", lines[-1])
    weights = path.with_suffix(".npz")
    saved = weights.exists() and weights.stat().st_size
    return SimpleNamespace(
        path=path, source=source, rest=rest, lines=lines, facts=facts, losses=losses, times=times,
        result=result and json.loads(result[1]),
        weights=dict(np.load(weights, allow_pickle=False)) if saved else None,
    )  # fmt: skip


# ---- A real run ----------------------------------------------------------------------------------
@pytest.fixture(scope="module")
def real(data, tmp_path_factory) -> SimpleNamespace:
    """What a process on two devices leaves, among a git and an nvidia-smi of ours."""
    folder = tmp_path_factory.mktemp("real")
    (folder / "bin").mkdir()
    git = 'case "$*" in "rev-parse HEAD") echo abc123;; "status --short") echo " M a"; esac'
    for name, script in dict(git=git, **{"nvidia-smi": "echo 580.65.06; echo 580.65.06"}).items():
        path = folder / "bin" / name
        path.write_text(f"#!/bin/sh\n{script}\n")
        path.chmod(0o755)
    env = {
        **os.environ, "PATH": f"{folder / 'bin'}:{os.environ['PATH']}", "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": "--xla_force_host_platform_device_count=2", "NCCL_DEBUG": "WARN",
        "JAX_DISABLE_MOST_OPTIMIZATIONS": "1", "HOME": str(folder), "TF_CPP_MINE": f"{folder}/mine",
        "HF_TOKEN": "hidden-1", "JAX_SECRET_KEY": "hidden-2", "XLA_PASSWORD": "hidden-3",
        "TPU_ACCESS_TOKEN": "hidden-4", "MY_OWN": "hidden-5",
    }  # fmt: skip
    argv = [*MINI, "--data", str(data), "--seed", "7"]
    command = [sys.executable, TRAIN, *argv]
    done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    (path,) = (folder / "logs").glob("*.txt")
    return SimpleNamespace(log=read(path), folder=folder, argv=argv, env=env, done=done)


def test_the_log_begins_with_the_source(real):
    assert real.log.source.encode() == TRAIN.read_bytes()


def test_every_line_of_the_log_is_a_fact_a_validation_or_the_result(real):
    kinds = re.compile(rf"[a-z]+ (?=[\[{{\"\d])(.*)|{STEP}|RESULT {{.*}}")
    assert all(kinds.fullmatch(line) for line in real.log.lines)


def test_the_facts_are_what_it_takes_to_run_it_again(real, data):
    _, c = train_gpt.parse_config(real.argv)
    facts = real.log.facts
    assert list(facts) == [
        *("versions", "devices", "driver", "environment", "git", "argv", "seed", "config"),
        *("parameters", "data", "compile"),
    ]
    versions = dict(jax=jax.__version__, numpy=np.__version__, optax=optax.__version__)
    assert facts["versions"].items() >= (versions | {"python": sys.version}).items()
    assert facts["versions"]["backend"]
    assert facts["devices"] == ["cpu", "cpu"]
    assert facts["driver"] == "580.65.06\n580.65.06"
    assert facts["git"] == dict(revision="abc123", changes=" M a")
    assert facts["argv"] == real.argv
    assert facts["seed"] == 7
    assert facts["config"] == dict(preset="tiny", **dataclasses.asdict(c) | {"attention": "xla"})
    assert facts["parameters"] == dict(
        embed=257 * 32, values=257 * 32, attn=8 * 32 * 32, mlp=4 * 64 * 32, head=384 * 32,
        skip=1, mix=4, v_mix=2, ve_mix=1,
    )  # fmt: skip
    assert facts["compile"]["seconds"] > 0


def test_the_data_is_named_by_size_and_hash(real, data):
    names = ["x_train_000001.bin", "x_train_000002.bin", "x_val_000000.bin"]  # not the third
    files = {name: (data / name).read_bytes() for name in names}
    expected = [(k, len(v), hashlib.sha256(v).hexdigest()) for k, v in files.items()]
    assert expected == [
        (shard["file"], shard["bytes"], shard["sha256"]) for shard in real.log.facts["data"]
    ]
    assert {shard["largest_token"] for shard in real.log.facts["data"]} == {256}


def test_what_steers_jax_is_in_the_log_and_secrets_are_not(real):
    assert "hidden" not in real.log.rest and str(real.folder) not in real.log.rest
    environment = real.log.facts["environment"]
    assert environment["XLA_FLAGS"] == "--xla_force_host_platform_device_count=2"
    assert environment["JAX_PLATFORMS"] == "cpu" and environment["NCCL_DEBUG"] == "WARN"
    assert environment["TF_CPP_MINE"] == "~/mine"
    assert not {"HF_TOKEN", "JAX_SECRET_KEY", "MY_OWN", "PATH"} & set(environment)


def test_validations_follow_the_grammar_of_upstream(real):
    found = [re.fullmatch(STEP, line) for line in real.log.lines if line.startswith("step:")]
    assert [match.group(1, 2) for match in found] == [("0", "6"), ("3", "6"), ("6", "6")]
    for match in found:
        ms, steps = int(match[4]), max(1, int(match[1]))
        assert abs(ms / steps - float(match[5])) <= 0.51 / steps + 0.005
    assert float(found[0][3]) == pytest.approx(math.log(384), abs=1e-4)  # a head of zeros
    assert float(found[2][3]) < float(found[1][3]) < float(found[0][3])
    assert 0 <= int(found[0][4]) < int(found[1][4]) < int(found[2][4])


def test_the_result_is_the_last_line(real):
    result = real.log.result
    assert (result["reason"], result["steps"], result["tokens"]) == ("end of schedule", 6, 6 * 256)
    assert (result["seed"], result["devices"], result["target"]) == (7, 2, 0.0)
    assert f"{result['val_loss']:.4f}" == real.log.losses[6]
    assert f"{result['train_time_ms']:.0f}" == str(real.log.times[6])
    assert 10**7 < result["peak_memory_bytes"] < 10**11
    assert result["mfu"] is None  # of a CPU
    assert result["weights"] == f"{real.log.path.stem}.npz"
    assert real.log.rest.endswith("\n") and real.log.rest.count("RESULT") == 1


def test_the_screen_shows_the_log_and_the_live_line(real):
    out = real.done.stdout.splitlines()
    assert f"2 x cpu, head in float32, log in logs/{real.log.path.name}" in out[0]
    assert "compiling 4 programs, reading 3 shards" in out[1]
    assert out[2:] == real.log.lines[-4:]
    live = r"step [1-6]/6  loss \d+\.\d{3}  [\d,]+ tokens/s  \d\d:\d\d:\d\d left"
    assert all(re.fullmatch(live, line) for line in real.done.stderr.splitlines())


def test_the_weights_are_the_model_under_the_names_of_the_table(real):
    files = sorted(path.name for path in (real.folder / "logs").iterdir())
    assert files == sorted([real.log.path.name, real.log.result["weights"]])
    shapes = {name: array.shape for name, array in real.log.weights.items()}
    _, c = train_gpt.parse_config(real.argv)
    assert shapes == {"config": ()} | {k: row.real for k, row in train_gpt.table(c).items()}
    assert all(np.isfinite(real.log.weights[name]).all() for name in train_gpt.table(c))


def test_the_weights_have_the_loss_that_was_printed(real, data):
    config = json.loads(real.log.weights["config"].item())
    assert real.log.facts["config"] == dict(preset="tiny", **config)
    c, params = train_gpt.Config(**config), {}
    for name, row in train_gpt.table(c).items():
        stacked = (-1, *row.shape[2:]) if row.optimizer == "muon" else row.shape
        padded = np.zeros(row.shape, np.float32).reshape(stacked)
        padded[tuple(map(slice, row.real))] = real.log.weights[name]
        params[name] = padded.reshape(row.shape)
    shard = train_gpt.open_shard(data / "x_val_000000.bin")
    program = compiled("val", c.window_at(6), program_config(c), MESH)
    tokens = train_gpt.on_devices(train_gpt.stream([shard], *c.batch("val"), c.val_steps), MESH)
    params = jax.device_put(params, program.input_shardings[0][0])
    loss = np.mean([float(program(params, batch)) for batch in tokens])
    assert loss == pytest.approx(real.log.result["val_loss"], abs=1e-4)


def test_help_shows_every_flag_with_its_comment(tmp_path):
    env = os.environ | {"COLUMNS": "1000"}
    command = [sys.executable, TRAIN, "--help"]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0 and done.stderr == ""
    entries = dict(re.findall(r"^ +--(\w+) +(.*?) \(record: .*\)$", done.stdout, re.M))
    text = train_gpt.SOURCE.replace("\n    # ", " ")
    for field in dataclasses.fields(train_gpt.Config):
        comment = re.search(rf"^    {field.name}: .*?  # (.*)$", text, re.M)[1]
        assert entries.pop(field.name) == comment
        assert len(comment) > 10
    assert not entries


# ---- Runs in this process ------------------------------------------------------------------------
REAL_COMPILE_STAGE = train_gpt.compile_stage


@functools.cache
def compiled(kind: str, window: int, c: train_gpt.Config, mesh: Mesh):
    return REAL_COMPILE_STAGE(kind, window, c, mesh)


def program_config(c: train_gpt.Config) -> train_gpt.Config:
    """Without what no program depends on, so that the tests here share four programs."""
    return dataclasses.replace(c, seed=0, target=0.0, data="")


@pytest.fixture(autouse=True, scope="module")
def compile_quickly():
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)


@pytest.fixture(autouse=True)
def workplace(tmp_path, monkeypatch):
    def compile_stage(kind, window, c, mesh):
        return compiled(kind, window, program_config(c), mesh)

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(jax, "devices", lambda: DEVICES)
    monkeypatch.setattr(train_gpt, "compile_stage", compile_stage)


@pytest.fixture
def run(data):
    """Runs, and reads the log; `raises` is how the run should end."""

    def run(*argv: str, raises=None) -> SimpleNamespace:
        before = set(Path("logs").glob("*.txt"))
        argv = [*MINI, "--data", str(data), *argv]
        if raises:
            with pytest.raises(raises) as stopped:
                train_gpt.main(argv)
        else:
            train_gpt.main(argv)
        (path,) = set(Path("logs").glob("*.txt")) - before
        log = read(path)
        log.code = stopped.value.code if raises is SystemExit else None
        return log

    return run


def wrap(monkeypatch, name: str, change) -> None:
    """Put change(result, *arguments) in the place of what a function of train_gpt returns."""
    function = getattr(train_gpt, name)
    monkeypatch.setattr(train_gpt, name, lambda *args: change(function(*args), *args))


def test_the_target_ends_the_run_early(run):
    log = run("--target", "5.5", "--seed", "7")
    assert log.result["reason"] == "target reached"
    assert list(log.losses) == [0, 3]
    assert (log.result["steps"], log.result["tokens"]) == (3, 3 * 256)
    assert log.result["val_loss"] <= log.result["target"] == 5.5 < float(log.losses[0])
    assert log.weights is not None


def test_the_same_seed_gives_the_same_run_and_another_one_another(run):
    a, b, c = run("--seed", "7"), run("--seed", "7"), run("--seed", "8")
    assert a.losses == b.losses != c.losses
    for name in a.weights.keys() - {"config"}:
        np.testing.assert_array_equal(a.weights[name], b.weights[name])
        assert not np.array_equal(a.weights[name], c.weights[name])


def test_the_seed_gives_the_same_start_in_another_process_on_other_devices(run, real):
    unseen = slice(20, 250)  # tokens that are not in the data: their rows stay as they began
    ours, theirs = run("--seed", "7").weights, real.log.weights
    np.testing.assert_array_equal(ours["embed"][unseen], theirs["embed"][unseen])
    assert len(np.unique(ours["embed"][unseen])) > 1000


def test_every_run_draws_a_seed_and_logs_it(run):
    a, b = run("--steps", "6"), run("--steps", "6")
    assert a.facts["seed"] != b.facts["seed"]
    for log in a, b:
        seed = log.facts["seed"]
        assert 0 <= seed < 2**31
        assert seed == log.result["seed"] == log.facts["config"]["seed"]
    again = run("--seed", str(a.facts["seed"]))
    assert again.losses == a.losses


def test_warming_up_leaves_no_trace(run, monkeypatch):
    warm = run("--seed", "7")

    def prepare(c, mesh, shards, log):
        stages = [(kind, window) for kind in ("train", "val") for window in (8, 16)]
        return {stage: train_gpt.compile_stage(*stage, c, mesh) for stage in stages}

    monkeypatch.setattr(train_gpt, "prepare", prepare)
    cold = run("--seed", "7")
    assert "compile" in warm.facts and "compile" not in cold.facts
    assert warm.losses == cold.losses
    for name, array in cold.weights.items():
        np.testing.assert_array_equal(warm.weights[name], array)


def test_nothing_compiles_once_the_clock_runs(run, monkeypatch):
    events = []

    def listen(name, *_, **__):
        events.append(name)

    start = train_gpt.Clock.start
    monkeypatch.setattr(
        train_gpt.Clock, "start", lambda self: events.append("start") or start(self)
    )
    wrap(monkeypatch, "train", lambda result, *_: events.append("end") or result)
    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        run("--seed", "9")
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)
    compiles = [i for i, event in enumerate(events) if "compile" in event]
    assert compiles, "none seen at all: the event has another name now"
    assert not [i for i in compiles if events.index("start") < i < events.index("end")]


# ---- Clock ---------------------------------------------------------------------------------------
@pytest.fixture
def now(monkeypatch):
    """Time as the run sees it: nearly standing still but where a test moves it."""

    def perf_counter() -> float:
        now.s += 1e-9
        return now.s

    now = SimpleNamespace(s=0.0, sleep=time.sleep)
    clock = SimpleNamespace(
        perf_counter=perf_counter, sleep=lambda s: now.sleep(s), strftime=time.strftime,
        gmtime=time.gmtime,
    )  # fmt: skip
    monkeypatch.setattr(train_gpt, "time", clock)
    return now


def slow_stream(monkeypatch, now, T: int) -> None:
    """A second for every step that is read in sequences of T tokens."""

    def slowly(steps, shards, rows, length, count):
        for step in steps:
            now.s += length == T
            yield step

    wrap(monkeypatch, "stream", slowly)


def test_reading_training_tokens_is_on_the_clock(run, monkeypatch, now):
    slow_stream(monkeypatch, now, T=32)
    log = run()
    assert log.times[0] == 0 < log.times[3] <= log.times[6] == 6000
    assert log.result["train_time_ms"] == pytest.approx(6000)


def test_compiling_warming_up_and_validating_are_not_on_the_clock(run, monkeypatch, now):
    slow_stream(monkeypatch, now, T=64)
    compiling = []

    def slowly(result, *_):
        now.s += 10
        compiling.append(threading.get_ident())
        return result

    def slow_programs(programs, *_):
        now.s += 100
        slow = lambda *args: slowly(programs["val", 8](*args))  # noqa: E731
        return programs | {stage: slow for stage in programs if stage[0] == "val"}

    for name in "compile_stage", "inspect", "make_state":
        wrap(monkeypatch, name, slowly)
    wrap(monkeypatch, "prepare", slow_programs)
    log = run()
    assert log.times == {0: 0, 3: 0, 6: 0}
    assert now.s > 100 + 10 * (4 + 3 + 2 + 6), "some of the slow functions did not run"


class Device:
    """Queues steps of 10 seconds; they get done while the host sleeps or waits, or 3 later ones
    are queued. Waits, and reads of what is not done, are noted."""

    def __init__(self, now):
        self.now, self.queued, self.done, self.notes = now, 0, 0, []
        now.sleep = lambda _: self.finish(self.done + 1)

    def finish(self, step: int) -> None:
        self.now.s += 10 * max(0, min(step, self.queued) - self.done)
        self.done = max(self.done, min(step, self.queued))

    def train(self, state, tokens):
        self.notes.append("train")
        self.queued += 1
        self.finish(self.queued - 3)
        return Pending(self, self.queued), Pending(self, self.queued)

    def val(self, params, tokens):
        self.notes.append("val")
        return 1.0


class Pending:
    """A result of a step of a Device."""

    def __init__(self, device, step):
        self.device, self.step, self.params = device, step, {}

    def is_ready(self) -> bool:
        return self.device.done >= self.step

    def block_until_ready(self):
        self.device.notes.append("wait")
        self.device.finish(self.step)
        return self

    def __float__(self) -> float:
        if not self.is_ready():
            self.device.notes.append("read")
        return 1.0

    def __format__(self, form: str) -> str:
        return format(float(self), form)


@pytest.fixture
def device(data, monkeypatch, now):
    device = Device(now)
    device.lines = []
    monkeypatch.setattr(train_gpt, "make_state", lambda *_: Pending(device, 0))
    _, c = train_gpt.parse_config([*MINI, "--steps", "12", "--val_every", "6"])
    shards = [train_gpt.open_shard(path) for path in sorted(data.iterdir())]
    programs = {(kind, w): getattr(device, kind) for kind in ("train", "val") for w in (8, 16)}
    log = SimpleNamespace(line=device.lines.append)
    device.run = lambda: train_gpt.train(c, MESH, programs, shards, log)
    return device


def test_queued_steps_are_on_the_clock(device):
    _, result = device.run()
    assert [re.fullmatch(STEP, line)[4] for line in device.lines] == ["0", "60000", "120000"]
    assert result["train_time_ms"] == pytest.approx(120_000)


def test_the_host_waits_for_the_devices_at_validations_only(device, capsys):
    device.run()
    validate, train = ["wait", "val", "val"], ["train"] * 6
    assert device.notes == ["wait", *validate, *train, *validate, *train, *validate]
    live = re.findall(r"^step (\d+)/12  loss 1.000  ", capsys.readouterr().err, re.M)
    assert {"1", "2", "3"} < set(live)  # shown in between all the same


# ---- Ends ----------------------------------------------------------------------------------------
def test_a_loss_that_is_no_number_voids_the_run(run, monkeypatch):
    def poison(programs, *_):
        def train(state, tokens):
            state, loss = programs["train", 8](state, tokens)
            return state._replace(params=jax.tree.map(lambda x: x * np.nan, state.params)), loss

        return programs | {("train", window): train for window in (8, 16)}

    wrap(monkeypatch, "prepare", poison)
    log = run("--target", "1", raises=SystemExit)
    assert log.code == 3
    assert log.lines[-2].startswith("step:3/6 val_loss:nan train_time:")
    assert log.lines[-1].startswith("NON-FINITE: ") and log.weights is None


@pytest.mark.parametrize("trouble", [OSError, KeyboardInterrupt])
def test_a_save_that_fails_does_not_cost_the_result(run, monkeypatch, trouble):
    """A full disk, or Ctrl-C: the run did come to its end, and names no weights."""

    def savez(*_, **__):
        raise trouble

    monkeypatch.setattr(np, "savez", savez)
    log = run(raises=trouble)
    assert log.result["steps"] == 6 and "weights" not in log.result
    assert log.lines[-1].startswith("RESULT ")


def test_an_interrupt_before_training_is_told(run, monkeypatch):
    def prepare(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(train_gpt, "prepare", prepare)
    log = run(raises=SystemExit)
    assert (log.code, log.lines[-1]) == (130, "INTERRUPTED")


def test_ctrl_c_in_training_ends_the_log_and_the_process(tmp_path, data):
    folder, steps = tmp_path / "data", 5000
    folder.mkdir()
    write_shard(folder / "x_train_000001.bin", steps * 256 + 2, 1)
    write_shard(folder / "x_val_000000.bin", 1200, 2)
    flags = f"--steps {steps} --val_every {steps} --window 8 --data {folder}".split()
    env = os.environ | {"JAX_PLATFORMS": "cpu", "JAX_DISABLE_MOST_OPTIMIZATIONS": "1"}
    # A background job ignores Ctrl-C and its children inherit that, but for a handler.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    process = subprocess.Popen(
        [sys.executable, TRAIN, *MINI, *flags], cwd=tmp_path, env=env, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip
    signal.signal(signal.SIGINT, before)
    try:
        live = process.stderr.readline()
        (path,) = (tmp_path / "logs").iterdir()
        assert list(read(path).losses) == [0]  # written as it happens
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=60)
    finally:
        process.kill()
    assert re.match(rf"step \d+/{steps}  loss ", live)
    assert process.returncode == 130
    assert "Traceback" not in err
    assert out.splitlines()[-1] == read(path).lines[-1] == "INTERRUPTED"
    assert list((tmp_path / "logs").iterdir()) == [path] and read(path).result is None
