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
from unittest.mock import MagicMock, Mock
from zlib import crc32

import jax
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

import train_gpt
from tests.tools import FLOAT32, SMALL, text, write_shard

TRAIN = Path(train_gpt.__file__).resolve()
MINI = ["tiny", "--plan", "Lv0 S", *SMALL, "--steps", "10", "--val_every", "5"]
MINI += ["--stall", "0"]  # for some tests move the time
MINI += [word for name in FLOAT32.items() for word in ("--{} {}".format(*name)).split()]
ONE = ["--stages", "10 256 8 8 0 1 0,1 / 0 256 8 16 0 1 0,1"]  # but for the last validation
TWO = [
    "--stages",
    "4 256 8 8 50 1 0,1,.5 / 6 512 8 16 0 1 0,1",
]  # documents are packed, then joined
VAL = r"step:(\d+)/(\d+) val_loss:(\d+\.\d{4}) train_time:(\d+)ms step_avg:(\d+\.\d\d)ms"
TRAINED = r"step:(\d+)/(\d+) train_loss:(\d+\.\d{4}) train_time:(\d+)ms"
QUIET = SimpleNamespace(line=lambda _: None, facts=lambda **_: None, lap=lambda _: None)
DEVICES = jax.devices()[:1]
MESH = Mesh(np.array(DEVICES), ("fsdp",), axis_types=(AxisType.Auto,))
REAL_COMPILE_STAGE = train_gpt.compile_stage


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> Path:
    """Four train shards of 6 steps of 256 tokens each, and a val shard of 2."""
    folder = tmp_path_factory.mktemp("data")
    for i, name in enumerate([*(f"train_00000{i}" for i in range(1, 5)), "val_000000"]):
        write_shard(folder / f"x_{name}.bin", text(1600, i))
    return folder


def read(path: Path) -> SimpleNamespace:
    """A log, by `re` and `json` alone."""
    source, rest = re.split("^={100}\n", path.read_bytes().decode(), flags=re.M)
    lines, validations = rest.splitlines(), re.findall(f"^{VAL}$", rest, re.M)
    facts = re.findall("^(?!step)([a-z]+) (.*)$", rest, re.M)
    result, weights = re.fullmatch("RESULT (.*)", lines[-1]), path.with_suffix(".npz")
    saved = weights.exists() and weights.stat().st_size
    return SimpleNamespace(
        path=path, source=source, rest=rest, lines=lines,
        facts={name: json.loads(value) for name, value in facts},
        losses={int(step): loss for step, _, loss, *_ in validations},
        times={int(step): int(ms) for step, _, _, ms, _ in validations},
        result=result and json.loads(result[1]),
        weights=dict(np.load(weights, allow_pickle=False)) if saved else None,
    )  # fmt: skip


# ---- A real run ----------------------------------------------------------------------------------
@pytest.fixture(scope="module")
def real(data, tmp_path_factory) -> SimpleNamespace:
    """What a process on two devices leaves, among a git and an nvidia-smi of ours."""
    folder = tmp_path_factory.mktemp("real")
    git = 'test "$*" = "describe --always --dirty --abbrev=40" && echo abc123-dirty'
    for name, script in ("git", git), ("nvidia-smi", "echo 580.65.06; echo 580.65.06"):
        (folder / name).write_text(f"#!/bin/sh\n{script}\n")
        (folder / name).chmod(0o755)
    env = {
        **os.environ, "PATH": f"{folder}:{os.environ['PATH']}", "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": "--xla_force_host_platform_device_count=2", "NCCL_DEBUG": "WARN",
        "JAX_DISABLE_MOST_OPTIMIZATIONS": "1", "HOME": str(folder), "TF_CPP_MINE": f"{folder}/mine",
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0", "HF_TOKEN": "hidden-1",
        "JAX_SECRET_KEY": "hidden-2", "XLA_PASSWORD": "hidden-3", "TPU_ACCESS_TOKEN": "hidden-4",
    }  # fmt: skip
    env.pop("JAX_COMPILATION_CACHE_DIR", None)
    argv = [*MINI, *TWO, "--data", str(data), "--seed", "7"]

    def start() -> SimpleNamespace:
        before, command = set(folder.glob("logs/*.txt")), [sys.executable, TRAIN, *argv]
        done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True)
        assert (done.returncode, done.stderr) == (0, "")
        (path,) = set(folder.glob("logs/*.txt")) - before
        return SimpleNamespace(**vars(read(path)), out=done.stdout.splitlines())

    _, c = train_gpt.parse_config(argv)
    return SimpleNamespace(**vars(start()), folder=folder, argv=argv, c=c, start=start)


def test_a_log_is_the_source_then_facts_losses_and_the_result_as_on_the_screen(real):
    assert real.source.encode() == TRAIN.read_bytes()
    kinds = re.compile(rf"[a-z]+ (?=[\[{{\"\d])(.*)|{VAL}|{TRAINED}|GOODPUT \d+%: .*")
    assert all(kinds.fullmatch(line) for line in real.lines[:-1])
    assert real.lines[-1].startswith("RESULT {") and real.rest.endswith("\n")
    assert real.out == [
        f"tiny on 2 x cpu, head in float32, log in logs/{real.path.name}",
        *["compiling 6 programs ...", *real.lines[-6:]],
        f"next: ./run.sh sample logs/{real.path.stem}.npz 'def '",
    ]


def test_the_facts_are_what_it_takes_to_run_it_again(real, data):
    names = (
        "hosts data versions devices driver environment git argv seed config prefixes parameters "
        "compile"
    )
    assert list(real.facts) == names.split() and real.facts["versions"]["backend"]
    versions = dict(jax=jax.__version__, numpy=np.__version__, optax=optax.__version__)
    assert real.facts["versions"].items() >= (versions | {"python": sys.version}).items()
    config = dict(preset="tiny", **dataclasses.asdict(real.c) | {"attention": "xla"})
    parameters = dict(  # the 127 rows of no token are as real as the head's columns
        embed=384 * 32, head=384 * 32, bigram=512 * 32, values0=257 * 32, qk=4 * 32 * 32,
        vo=4 * 32 * 32, mlp=4 * 64 * 32, vo_lambdas=4, attn_lambdas=4, mlp_lambdas=4,
        value_gates=2 * 12, smear_gate=12, smear_lambda=1, gate_in=8 * 32, gate_scale=1,
        gate_start=9, gate_x0=2 * 9,
    )  # fmt: skip
    none = {name: 0 for name in real.facts["parameters"].keys() - parameters}  # in such a plan
    assert none.keys() == {"skip_lambdas", "gate_bigram", "gate_skip", "gate_xsa", "gate_heads",
                           "gate_dc_from", "gate_dc_to", "mudd_in", "mudd_v", "mudd_x",
                           "mudd_values", "mudd_attn", "mudd_mlp", "mudd_head"}  # fmt: skip
    assert real.facts.items() >= dict(
        devices=["cpu", "cpu"], hosts=[f"{os.uname().nodename}: 2 x cpu"],
        driver="580.65.06\n580.65.06", git="abc123-dirty", argv=real.argv,
        seed=7, config=config, parameters=parameters | none,
    ).items()  # fmt: skip
    names = [*(f"x_train_00000{i}.bin" for i in (1, 2, 3)), "x_val_000000.bin"]  # not the fourth
    assert real.facts["data"] == [dict(
        file=name, bytes=4224, sha256=hashlib.sha256((data / name).read_bytes()).hexdigest(),
        tokens=1600, documents=32, largest_token=256) for name in names]  # fmt: skip


def test_what_steers_jax_is_in_the_log_and_secrets_are_not(real):
    assert "hidden" not in real.rest and str(real.folder) not in real.rest
    environment = real.facts["environment"]
    assert environment.items() >= dict(
        XLA_FLAGS="--xla_force_host_platform_device_count=2", JAX_PLATFORMS="cpu",
        NCCL_DEBUG="WARN", TF_CPP_MINE="~/mine",
    ).items()  # fmt: skip
    assert not {"HF_TOKEN", "JAX_SECRET_KEY", "HOME", "PATH"} & set(environment)


def test_losses_follow_the_grammar_of_upstream(real):
    start, middle, trained, end = [line for line in real.lines if line.startswith("step:")]
    found = [re.fullmatch(VAL, line) for line in (start, middle, end)]
    trained = re.fullmatch(TRAINED, trained)
    assert [m.group(1, 2) for m in found] == [("0", "10"), ("5", "10"), ("10", "10")]
    assert trained.group(1, 2) == ("10", "10")
    for match in found:
        ms, steps = int(match[4]), max(1, int(match[1]))
        assert abs(ms / steps - float(match[5])) <= 0.51 / steps + 0.005
    first, second, last = [float(m[3]) for m in found]
    assert first == pytest.approx(math.log(384), abs=0.01)  # a head of nearly nothing
    assert last < float(trained[3]) < second < first
    assert 0 <= real.times[0] < real.times[5] < int(trained[4]) <= real.times[10]


def test_the_result_sums_the_run_up(real):
    loss, ms = real.result["val_loss"], real.result["train_time_ms"]
    assert (f"{loss:.4f}", f"{ms:.0f}") == (real.losses[10], str(real.times[10]))
    assert real.result == dict(
        reason="end of schedule", val_loss=loss, target=0.0, steps=10, tokens=4096, seed=7,
        devices=2, train_time_ms=ms, peak_memory_bytes=0, weights=f"{real.path.stem}.npz",
        resumed=False,
    )  # fmt: skip


def test_the_weights_are_the_model_and_have_the_loss_that_was_printed(real, data):
    of = {
        name: json.loads(real.weights.pop(name).item()) for name in ("config", "result", "source")
    }
    assert real.result == of["result"] | dict(weights=f"{real.path.stem}.npz")
    assert of["source"] == crc32(TRAIN.read_bytes())
    assert real.facts["config"] == dict(preset="tiny", **(config := of["config"]))
    c, params = train_gpt.Config(**config), {}
    for name, row in train_gpt.param_table(c).items():
        assert real.weights[name].shape == row.shape
        stacked = (-1, *row.stored_shape[2:]) if row.optimizer == "muon" else row.stored_shape
        padded = np.zeros(row.stored_shape, np.float32).reshape(stacked)
        padded[tuple(map(slice, row.shape))] = real.weights[name]
        params[name] = padded.reshape(row.stored_shape)
    assert real.weights.keys() == params.keys()
    shard = train_gpt.open_shard(data / "x_val_000000.bin")
    program = compiled("val", c.stage_at(10), program_config(c), MESH)
    tokens = train_gpt.on_devices(train_gpt.stream([shard], c.fills("val"), c), MESH)
    params = jax.device_put(params, program.input_shardings[0][0])
    loss = np.mean([float(program(params, batch)) for batch in tokens])
    assert loss == pytest.approx(real.result["val_loss"], abs=1e-4)


def test_a_second_run_finds_its_programs_in_the_cache(real):
    cold, again = real.facts["compile"], real.start()
    warm = again.facts["compile"]
    assert cold["seconds"] > 0 and cold["cache_misses"] >= 7 and "cache_hits" not in cold
    assert warm["cache_hits"] == cold["cache_misses"] and "cache_misses" not in warm
    assert len([*(real.folder / ".cache" / "jax").glob("*-cache")]) >= 7
    assert again.losses == real.losses


# ---- Runs in this process ------------------------------------------------------------------------
@functools.cache
def compiled(kind: str, stage: int, c: train_gpt.Config, mesh: Mesh):
    return REAL_COMPILE_STAGE(kind, stage, c, mesh)


def program_config(c: train_gpt.Config) -> train_gpt.Config:
    """Without what no program depends on, so that the tests here share four programs."""
    return dataclasses.replace(c, seed=0, target=0.0, data="", save=0)


@pytest.fixture(autouse=True, scope="module")
def compile_quickly():
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)


@pytest.fixture
def run(data, tmp_path, monkeypatch):
    """Runs, and reads the log; `raises` is how the run should end."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(jax, "devices", lambda: DEVICES)
    share = lambda kind, stage, c, mesh: compiled(kind, stage, program_config(c), mesh)
    monkeypatch.setattr(train_gpt, "compile_stage", share)

    def run(*argv: str, raises=()) -> SimpleNamespace:
        before, code = set(Path("logs").glob("*.txt")), None
        try:
            train_gpt.main([*MINI, *ONE, "--data", str(data), *argv])
            assert not raises
        except raises as error:
            code = getattr(error, "code", None)
        (path,) = set(Path("logs").glob("*.txt")) - before
        return SimpleNamespace(**vars(read(path)), code=code)

    return run


def wrap(monkeypatch, name: str, change) -> None:
    """Put change(result, *arguments) in the place of what a function of train_gpt returns."""
    function = getattr(train_gpt, name)
    monkeypatch.setattr(train_gpt, name, lambda *args: change(function(*args), *args))


def test_the_target_ends_the_run_early(run):
    log = run("--target", "5.5", "--seed", "7", "--save", "0")
    result = [log.result[name] for name in ("reason", "steps", "tokens", "target")]
    assert result == ["target reached", 5, 5 * 256, 5.5] and list(log.losses) == [0, 5]
    assert log.result["val_loss"] <= 5.5 < float(log.losses[0])
    assert log.weights is None and "weights" not in log.result  # --save 0


def test_the_seed_alone_decides_a_run(run, real, monkeypatch):
    """Whatever the devices, and the warming up, which leaves no trace."""

    def prepare(c, mesh, log):
        stages = ("even", 0), ("odd", 0), ("val", 0), ("val", 1)
        return {stage: train_gpt.compile_stage(*stage, c, mesh) for stage in stages}

    warm, other = run("--seed", "7"), run("--seed", "8")
    monkeypatch.setattr(train_gpt, "prepare", prepare)
    cold = run("--seed", "7")
    assert warm.losses == cold.losses != other.losses
    for name in warm.weights.keys() - {"config", "result", "source"}:
        np.testing.assert_array_equal(warm.weights[name], cold.weights[name])
        same = np.array_equal(warm.weights[name], other.weights[name])
        assert same == (warm.weights[name].size == 0)
    unseen = slice(20, 250)  # tokens that are not in the data: their rows stay as they began
    np.testing.assert_array_equal(warm.weights["values0"][unseen], real.weights["values0"][unseen])
    assert len(np.unique(warm.weights["values0"][unseen])) > 1000


def test_every_run_draws_a_seed_and_logs_it(run):
    a, b = run("--seed", "-2"), run()
    assert a.facts["seed"] != b.facts["seed"]
    for log in a, b:
        assert 0 <= log.facts["seed"] < 2**31
        assert log.facts["seed"] == log.result["seed"] == log.facts["config"]["seed"]
    assert run("--seed", str(a.facts["seed"])).losses == a.losses


def stand_in(program, run):
    """A function in the place of a program."""
    run.args_info, run.input_shardings = program.args_info, program.input_shardings
    return run


# ---- Compiling -----------------------------------------------------------------------------------
def test_every_program_has_run_once_and_none_compiles_on_the_clock(run, monkeypatch):
    events, stop = [], train_gpt.Clock.stop
    listen = lambda name, *_, **__: events.append(name)
    note = lambda name: lambda result, *_: events.append(name) or result
    monkeypatch.setattr(train_gpt.Clock, "stop", lambda *args: listen("go") or stop(*args))
    wrap(monkeypatch, "compile_stage", lambda run, kind, stage, *_: stand_in(run, lambda *args: (
        events.append((kind, stage)) or run(*args))))  # fmt: skip
    wrap(monkeypatch, "prepare", note("prepared"))
    wrap(monkeypatch, "train", note("end"))
    jax.monitoring.register_event_duration_secs_listener(listen)
    run("--seed", "9")
    jax.monitoring.unregister_event_duration_listener(listen)
    compiles = [i for i, event in enumerate(events) if "compile" in event]
    assert compiles, "none seen at all: the event has another name now"
    assert not [i for i in compiles if events.index("go") < i < events.index("end")]
    once = [event for event in events[: events.index("prepared")] if isinstance(event, tuple)]
    assert once == [("even", 0), ("odd", 0), ("val", 0), ("val", 1)]


def test_one_program_compiles_alone_then_eight_at_a_time(monkeypatch):
    stages = " / ".join(f"2 {256 * i} 8 8 0 1 0,1" for i in range(1, 7))
    argv = [*MINI, "--stages", stages, *"--steps 12 --val_every 1 --seed 1".split()]
    _, c = train_gpt.parse_config(argv)
    lock, active, beside, ran = threading.Lock(), set(), [], []
    place = NamedSharding(MESH, PartitionSpec("fsdp"))

    def compile_stage(*stage):
        with lock:
            beside.append({*active})
            active.add(stage)
        time.sleep(0.05)
        active.remove(stage)
        shape = SimpleNamespace(shape=(8, 33 + stage[1]))
        info = SimpleNamespace(args_info=[(None, shape)], input_shardings=[(None, place)])
        note = lambda tokens: ran.append((stage[:2], tokens.shape))
        return stand_in(info, lambda state, tokens: (state, note(tokens)))

    monkeypatch.setattr(train_gpt, "compile_stage", compile_stage)
    programs = train_gpt.prepare(c, MESH, QUIET)
    assert not any(("even", 0, c, MESH) in others for others in beside)
    assert max(map(len, beside)) == 7
    stages = [(kind, stage) for kind in ("even", "odd", "val") for stage in range(6)]
    assert sorted(programs) == stages
    assert sorted(ran) == [((kind, stage), (8, 33 + stage)) for kind, stage in stages]


def test_steps_take_turns_and_stages_follow_each_other(data, monkeypatch):
    """Each in the shape of its stage; a validation is of the stage of the step after it."""
    stages = "3 256 8 8 0 1 0,1 / 4 512 8 16 40 1 0,1 / 0 2048 8 8 0 1 0,1"
    argv = [*MINI, "--stages", stages, *"--steps 7 --val_every 3 --val_tokens 512".split()]
    _, c = train_gpt.parse_config(argv)
    ran, one = [], jax.numpy.float32(1)

    def program(kind, stage):
        return lambda state, tokens: (
            ran.append((kind, stage, tokens.shape)) or (one if kind == "val" else (state, one))
        )

    programs = {(k, s): program(k, s) for k in ("even", "odd", "val") for s in range(3)}
    monkeypatch.setattr(train_gpt, "make_state", lambda *_: MagicMock(params=one))
    shards = [train_gpt.open_shard(path) for path in sorted(data.iterdir())]
    train_gpt.train(c, MESH, programs, shards, QUIET, {}, {})
    first, second, val = (8, 33), (8, 65), (8, 65)
    assert ran == [
        ("val", 0, val), ("even", 0, first), ("odd", 0, first), ("even", 0, first),
        ("val", 1, val), ("odd", 1, second), ("even", 1, second), ("odd", 1, second),
        ("val", 1, val), ("even", 1, second), ("val", 2, val),
    ]  # fmt: skip


# ---- Clock ---------------------------------------------------------------------------------------
@pytest.fixture
def now(monkeypatch):
    """Time as the run sees it: nearly standing still but where a test moves it."""

    def perf_counter() -> float:
        now.s += 1e-9
        return now.s

    now, own = SimpleNamespace(s=0.0, sleep=time.sleep), dict(perf_counter=perf_counter)
    own["process_time"] = time.process_time
    own |= dict(sleep=lambda s: now.sleep(s), strftime=time.strftime, gmtime=time.gmtime)
    monkeypatch.setattr(train_gpt, "time", SimpleNamespace(**own))
    return now


def test_training_and_its_reading_are_on_the_clock_and_nothing_else(run, monkeypatch, now):
    slow = []

    def slowly(seconds, result):
        now.s += seconds
        slow.append(seconds)
        return result

    def slow_val(program, kind, *_):
        run = lambda *args: slowly(100, program(*args))
        return stand_in(program, run) if kind == "val" else program

    for name in "compile_stage", "check_tokens", "make_state":
        wrap(monkeypatch, name, lambda result, *_: slowly(100, result))
    wrap(monkeypatch, "stream", lambda batches, shards, fills, *_: (
        slowly(1 if fills[0][1] == 32 else 100, batch) for batch in batches))  # fmt: skip
    wrap(monkeypatch, "compile_stage", slow_val)
    log = run()
    assert log.times[0] == 0 < log.times[5] <= log.times[10] == 10_000
    assert log.result["train_time_ms"] == pytest.approx(10_000)
    assert sorted(slow) == 10 * [1] + (4 + 3 + 2 + 2 + 6 + 6) * [100], "not all of it was slow"


class Device:
    """Queues steps of 10 seconds; they get done while the host sleeps or waits, or `queue` later
    ones are queued. What happens is noted; a loss is the number of its step."""

    def __init__(self, now, queue: int):
        self.now, self.queue, self.queued, self.done, self.notes = now, queue, 0, 0, []
        now.sleep = lambda _: self.finish(self.done + 1)

    def finish(self, step: int) -> None:
        while self.done < min(step, self.queued):
            self.done, self.now.s = self.done + 1, self.now.s + 10

    def train(self, state, tokens):
        self.notes.append("train")
        self.queued += 1
        self.finish(self.queued - self.queue)
        return self.pending(self.queued), self.pending(self.queued)

    def pending(self, step: int) -> Mock:
        """A result of a step."""
        wait = lambda: self.notes.append("wait") or self.finish(step)
        result = MagicMock(block_until_ready=wait, is_ready=lambda: self.done >= step)
        result.__format__ = lambda _, form: format(step if result.is_ready() else math.nan, form)
        return result


@pytest.mark.parametrize("queue", [3, 100])  # steps that the host runs ahead
def test_the_host_waits_at_validations_only_and_tells_losses(data, monkeypatch, now, queue):
    device = Device(now, queue)
    monkeypatch.setattr(train_gpt, "make_state", lambda *_: device.pending(0))
    _, c = train_gpt.parse_config([*MINI, *ONE, "--steps", "20", "--val_every", "20"])
    *shards, val = [train_gpt.open_shard(path) for path in sorted(data.iterdir())]
    programs = {(kind, 0): device.train for kind in train_gpt.KINDS}
    programs |= {("val", stage): lambda *_: device.notes.append("val") or 1.0 for stage in (0, 1)}
    log = SimpleNamespace(line=device.notes.append, lap=lambda _: None)
    _, result = train_gpt.train(c, MESH, programs, [*shards, val], log, {}, {})
    assert result["train_time_ms"] == pytest.approx(200_000)  # queued steps are on the clock
    told = [f"step:{i}/20 train_loss:{i}.0000 train_time:{i}0000ms" for i in (10, 20)]
    at = min(20, 10 + queue)
    assert device.notes == [
        *("wait", "wait", "val", "val"),
        "step:0/20 val_loss:1.0000 train_time:0ms step_avg:0.00ms",
        *[*["train"] * at, told[0], *["train"] * (20 - at), "wait", told[1], "val", "val"],
        "step:20/20 val_loss:1.0000 train_time:200000ms step_avg:10000.00ms",
    ]


# ---- Ends ----------------------------------------------------------------------------------------
def test_a_loss_that_is_no_number_voids_the_run(run, monkeypatch):
    nan = lambda *_: float("nan")
    wrap(monkeypatch, "prepare", lambda programs, *_: programs | {("val", 1): nan})
    log = run("--target", "1", raises=SystemExit)
    assert log.code == 3
    assert log.lines[-3].startswith("step:10/10 val_loss:nan train_time:")
    assert log.lines[-1].startswith("NON-FINITE: ") and log.weights is None


@pytest.mark.parametrize("trouble", [OSError, KeyboardInterrupt])
def test_a_save_that_fails_does_not_cost_the_result(run, monkeypatch, trouble):
    """A full disk, or Ctrl-C: the run did come to its end, and names no weights."""
    monkeypatch.setattr(np, "savez", Mock(side_effect=trouble))
    log = run(raises=trouble)
    assert log.result["steps"] == 10 and "weights" not in log.result


def test_ctrl_c_in_training_ends_the_log_and_the_process(tmp_path, data):
    """Until then the screen shows losses as they come; the cache lies where the user says."""
    for i in range(1, 1001):
        (tmp_path / f"x_train_{i:06}.bin").symlink_to(data / "x_train_000001.bin")
    (tmp_path / "x_val_000000.bin").symlink_to(data / "x_val_000000.bin")
    flags = [*ONE, *f"--steps 5000 --val_every 5000 --data {tmp_path}".split()]
    env = os.environ | {"JAX_PLATFORMS": "cpu", "JAX_DISABLE_MOST_OPTIMIZATIONS": "1"}
    env |= {"JAX_COMPILATION_CACHE_DIR": str(tmp_path / "mine")}
    # A background job ignores Ctrl-C and its children inherit that, but for a handler.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    process = subprocess.Popen(
        [sys.executable, TRAIN, *MINI, *flags], cwd=tmp_path, env=env, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip
    signal.signal(signal.SIGINT, before)
    try:
        shown = next(line for line in process.stdout if "train_loss" in line)
        (path,) = (tmp_path / "logs").iterdir()
        log = read(path).rest  # written as it happens, and the screen keeps up
        assert "val_loss" in log and log.count("train_loss") < 100
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=60)
    finally:
        process.kill()
    assert (process.returncode, err) == (130, "")
    assert re.fullmatch(TRAINED, shown.strip())[1] == "10"
    assert out.splitlines()[-1] == read(path).lines[-1]
    assert re.match(r"INTERRUPTED by SIGINT after step \d+; ", read(path).lines[-1])
    assert read(path).result is None
    assert (tmp_path / "mine").is_dir() and not (tmp_path / ".cache").exists()
