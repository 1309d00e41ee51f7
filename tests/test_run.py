"""A whole run of a small model: its log, its weights, its clock, and how it ends."""

import dataclasses
import functools
import hashlib
import itertools
import json
import math
import os
import re
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import MagicMock, Mock
from zlib import crc32

import jax
import launch
import numpy as np
import pytest

import train_gpt
from tests.tools import FLOAT32_FLAGS, MINI, SMALL, make_mesh, text, with_tiny, write_shard
from train_gpt import BANK, EXCHANGED, LONG, SHORT, Layer, Stage

FLAGS = ["tiny", *SMALL, *FLOAT32_FLAGS, "--steps", "10", "--val_every", "5"]
LAYERS = (Layer(LONG, value_table=0), Layer(SHORT))
ONE = (
    Stage(10, 256, short=8, long=8, max_doc=0, lr=1.0),
    Stage(0, 256, short=8, long=16, max_doc=0, lr=1.0),  # only for the last validation
)
TWO = (
    Stage(4, 256, short=8, long=8, max_doc=50, lr=1.0, targets=(1.0, 0.5)),
    Stage(6, 512, short=8, long=16, max_doc=0, lr=1.0),
)
TWO_DEVICES = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=2".strip()
VAL = r"step:(\d+)/(\d+) val_loss:(\d+\.\d{4}) train_time:(\d+)ms step_avg:(\d+\.\d\d)ms"
TRAINED = r"step:(\d+)/(\d+) train_loss:(\d+\.\d{4}) train_time:(\d+)ms"
FIRST, SECOND = False, True  # of two steps, the second one is an Adam step
QUIET = SimpleNamespace(line=lambda _: None, facts=lambda _: None)
DEVICES = jax.devices()[:1]
MESH = make_mesh(1)
REAL_TRAIN_STEP = train_gpt.compile_train_step
REAL_VAL_STEP = train_gpt.compile_val_step


def set_tiny(monkeypatch, stages: tuple, layers: tuple = LAYERS) -> None:
    """Gives `tiny` other layers and stages, in this process."""
    changes = dict(layers=layers, stages=stages, mudd_head=(), head_chunk=32)
    changed = dataclasses.replace(train_gpt.PRESETS["tiny"], **changes)
    monkeypatch.setitem(train_gpt.PRESETS, "tiny", changed)


def write_script(path: Path, stages: tuple, layers: tuple = LAYERS) -> Path:
    """A copy of the script whose `tiny` has other layers and stages, for processes."""
    layers_code = ", ".join(map(repr, layers))
    stages_code = ", ".join(map(repr, stages))
    path.write_text(with_tiny(train_gpt.SOURCE, layers_code, stages_code))
    return path


def parse(monkeypatch, stages: tuple, *flags: str) -> train_gpt.Config:
    """The configuration of a run with these stages."""
    set_tiny(monkeypatch, stages)
    return train_gpt.parse_config([*FLAGS, *flags])[1]


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> Path:
    """A folder of four train shards, with tokens for 6 steps of 256 each, and a val shard for 2."""
    folder = tmp_path_factory.mktemp("data")
    for i, name in enumerate([*(f"train_00000{i}" for i in range(1, 5)), "val_000000"]):
        write_shard(folder / f"x_{name}.bin", text(1600, i))
    return folder


def read(path: Path) -> SimpleNamespace:
    """A log, read with `re` and `json` alone, and not with the code of this repository."""
    source, rest = re.split("^={100}\n", path.read_bytes().decode(), flags=re.M)
    lines = rest.splitlines()
    validations = re.findall(f"^{VAL}$", rest, re.M)
    facts = re.findall(r'^([a-z]+) ([\[{"\d].*)$', rest, re.M)
    result = re.fullmatch("RESULT (.*)", lines[-1])
    weights = path.with_suffix(".npz")
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
    """The log and the output of a launcher's process on two devices. start(lines) runs it once
    more, and closes its stdout after so many lines."""
    folder = tmp_path_factory.mktemp("real")
    secrets = {"HF_TOKEN": "hidden-1", "JAX_SECRET_KEY": "hidden-2", "XLA_PASSWORD": "hidden-3"}
    env = os.environ | {"XLA_FLAGS": TWO_DEVICES, "NCCL_DEBUG": "WARN"} | secrets
    env.pop("JAX_COMPILATION_CACHE_DIR", None)
    script = write_script(folder / "my idea.py", TWO)
    argv = [*FLAGS, "--data", str(data), "--seed", "7"]

    def start(lines: int = 1000) -> SimpleNamespace:
        before = set(folder.glob("logs/*.txt"))
        command = [sys.executable, launch.__file__, script.name, *argv]
        pipes = dict(stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        process = subprocess.Popen(command, cwd=folder, env=env, **pipes)
        out = [line.rstrip("\n") for line in itertools.islice(process.stdout, lines)]
        process.stdout.close()
        err = process.stderr.read()
        (path,) = set(folder.glob("logs/*.txt")) - before
        return SimpleNamespace(**vars(read(path)), out=out, err=err, code=process.wait())

    with pytest.MonkeyPatch.context() as patch:
        c = dataclasses.replace(parse(patch, TWO, *argv[len(FLAGS) :]), attention="band")
    first = start()
    assert (first.code, first.err) == (0, "")
    return SimpleNamespace(**vars(first), folder=folder, script=script, argv=argv, c=c, start=start)


def test_a_log_is_the_source_then_facts_losses_and_the_result_as_on_the_screen(real):
    assert real.source.encode() == real.script.read_bytes()
    kinds = re.compile(rf"[a-z]+ (?=[\[{{\"\d])(.*)|{VAL}|{TRAINED}")
    assert all(kinds.fullmatch(line) for line in real.lines[:-1])
    assert real.rest.endswith("\n")
    weights = f"logs/{real.path.stem}.npz"
    assert real.out == [
        f"tiny on 2 x cpu, head in float32, log in logs/{real.path.name}",
        *["compiling 5 programs ...", *real.lines[-4:]],
        f"next: ./run.sh look {weights}, or ./run.sh sample {weights}",
    ]
    assert float(real.losses[10]) < float(real.losses[5]) < math.log(257)


def test_the_facts_are_what_it_takes_to_run_it_again_and_no_secrets(real, data):
    names = "data hosts versions devices driver environment argv seed config prefixes wheels"
    assert real.facts.keys() == {*names.split(), "parameters", "compile"}
    assert "hidden" not in real.rest
    expected = dict(XLA_FLAGS=TWO_DEVICES, JAX_PLATFORMS="cpu", NCCL_DEBUG="WARN")
    assert real.facts["environment"].items() >= expected.items()
    assert not {"HF_TOKEN", "HOME", "PATH"} & set(real.facts["environment"])
    assert real.facts["versions"]["jax"] == jax.__version__
    config = dict(preset="tiny", **dataclasses.asdict(real.c))
    assert real.facts.items() >= dict(
        devices=["cpu", "cpu"], hosts=1, argv=real.argv, seed=7, prefixes=0,
        config=json.loads(json.dumps(config)),
    ).items()  # fmt: skip
    files = [*(f"x_train_00000{i}.bin" for i in (1, 2, 3)), "x_val_000000.bin"]  # not the fourth
    assert real.facts["data"] == [dict(
        file=name, bytes=4224, sha256=hashlib.sha256((data / name).read_bytes()).hexdigest(),
        tokens=1600, documents=32, largest_token=256) for name in files]  # fmt: skip


def test_the_weights_are_the_model_and_have_the_loss_that_was_printed(real, data):
    loss, ms = real.result["val_loss"], real.result["train_time_ms"]
    assert (f"{loss:.4f}", f"{ms:.0f}") == (real.losses[10], str(real.times[10]))
    assert real.result == dict(
        reason="end of schedule", val_loss=loss, target=0.0, steps=10, tokens=4096, seed=7,
        devices=2, train_time_ms=ms, peak_memory_bytes=0, weights=f"{real.path.stem}.npz",
        resumed=False, lost_ngrams=0,
    )  # fmt: skip
    weights = dict(real.weights)
    about = {name: json.loads(weights.pop(name).item()) for name in ("config", "result", "source")}
    assert about["source"] == crc32(real.script.read_bytes())
    assert real.facts["config"] == dict(preset="tiny", **about["config"])
    c = real.c
    params = {}
    for name, param in train_gpt.param_table(c).items():
        assert weights[name].shape == param.model_shape
        rows = param.shape[2:] if param.kind in (BANK, EXCHANGED) else param.shape[1:]
        padded = np.zeros(param.shape, np.float32).reshape(-1, *rows)
        padded[: len(weights[name])] = weights[name]
        params[name] = padded.reshape(param.shape)
    shard = train_gpt.open_shard(data / "x_val_000000.bin")
    program = compiled_val_step(c.stage_at(10), program_config(c), MESH)
    places, tokens_place = program.input_shardings[0]
    batches = train_gpt.read_batches([shard], train_gpt.batch_shapes("val", c), c)
    params = jax.device_put(params, places)
    batches = train_gpt.prefetch(batches, tokens_place)
    loss = np.mean([float(program(params, batch)[0]) for batch in batches])
    assert loss == pytest.approx(real.result["val_loss"], abs=1e-4)


def test_a_second_run_finds_its_programs_and_a_closed_screen_costs_only_lines(real):
    """Its stdout is closed after a line, as by `| head -1`."""
    folder = real.folder / ".cache" / "jax"
    before = sorted(folder.glob("*-cache"))
    second = real.start(lines=1)
    assert len(before) >= 6 and sorted(folder.glob("*-cache")) == before
    assert second.losses == real.losses and second.code == 0
    assert second.err == "warning: <stdout> has gaps: [Errno 32] Broken pipe\n"
    assert second.weights and len(second.lines) == len(real.lines)


# ---- Runs in this process ------------------------------------------------------------------------
compiled_train_step = functools.cache(REAL_TRAIN_STEP)
compiled_val_step = functools.cache(REAL_VAL_STEP)


def program_config(c: train_gpt.Config) -> train_gpt.Config:
    """The configuration without fields on which no program depends, so that tests share four
    programs."""
    return dataclasses.replace(c, seed=0, target=0.0, data="", save=0)


@pytest.fixture
def run(data, tmp_path, monkeypatch):
    """A function that runs in this process and returns the log; `raises` is the exception with
    which the run should end."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(jax, "devices", lambda: DEVICES)
    set_tiny(monkeypatch, ONE)

    def train_step(stage, adam_step, c, mesh):
        return compiled_train_step(stage, adam_step, program_config(c), mesh)

    def val_step(stage, c, mesh):
        return compiled_val_step(stage, program_config(c), mesh)

    monkeypatch.setattr(train_gpt, "compile_train_step", train_step)
    monkeypatch.setattr(train_gpt, "compile_val_step", val_step)

    def run(*argv: str, raises=()) -> SimpleNamespace:
        before = set(Path("logs").glob("*.txt"))
        code = None
        try:
            train_gpt.main([*FLAGS, "--data", str(data), *argv])
            assert not raises
        except raises as error:
            code = getattr(error, "code", None)
        (path,) = set(Path("logs").glob("*.txt")) - before
        return SimpleNamespace(**vars(read(path)), code=code)

    return run


def wrap(monkeypatch, name: str, change) -> None:
    """Replaces what a function of train_gpt returns by change(result, *arguments)."""
    function = getattr(train_gpt, name)
    monkeypatch.setattr(train_gpt, name, lambda *args: change(function(*args), *args))


def stand_in(program, run):
    """The function `run`, with the attributes of a program that train_gpt uses."""
    run.args_info = program.args_info
    run.input_shardings = program.input_shardings
    return run


def test_the_target_ends_the_run_early(run):
    log = run("--target", "5.2", "--seed", "7", "--save", "0")
    result = [log.result[name] for name in ("reason", "steps", "tokens", "target")]
    assert result == ["target reached", 5, 5 * 256, 5.2] and list(log.losses) == [5]
    assert log.result["val_loss"] <= 5.2
    assert log.weights is None and "weights" not in log.result  # --save 0


def test_the_seed_alone_decides_a_run(run, monkeypatch):
    """Without --seed it is drawn and logged. What warm_up() calls does not matter."""
    warm, other = run(), run()
    assert warm.facts["seed"] == warm.result["seed"] == warm.facts["config"]["seed"] < 2**31
    monkeypatch.setattr(train_gpt, "warm_up", lambda *_: None)
    cold = run("--seed", str(warm.facts["seed"]))
    assert warm.losses == cold.losses != other.losses
    for name in warm.weights.keys() - {"config", "result", "source"}:
        np.testing.assert_array_equal(warm.weights[name], cold.weights[name])


def test_the_first_state_takes_the_memory_of_the_warmed_up_one():
    """With other addresses, the first call of a program on a GPU would be slow, on the clock."""
    c = dataclasses.replace(MINI, seed=5)
    old = train_gpt.make_state(dataclasses.replace(c, seed=6), MESH)
    before = {x.unsafe_buffer_pointer() for x in jax.tree.leaves(old) if x.nbytes > 4096}
    state = train_gpt.make_state(c, MESH, old)
    after = {x.unsafe_buffer_pointer() for x in jax.tree.leaves(state) if x.nbytes > 4096}
    assert before == after and all(x.is_deleted() for x in jax.tree.leaves(old))


def test_first_and_second_steps_alternate_and_stages_follow_each_other(data, monkeypatch):
    """Every step has the shape of its stage. A validation is of the stage of the next step."""
    stages = (
        Stage(3, 256, short=8, long=8, max_doc=0, lr=1.0),
        Stage(4, 512, short=8, long=16, max_doc=40, lr=1.0),
        Stage(0, 2048, short=8, long=8, max_doc=0, lr=1.0),
    )
    c = parse(monkeypatch, stages, *"--steps 7 --val_every 3 --val_tokens 512".split())
    ran = []
    one = jax.numpy.float32(1)

    def program(stage, kind):
        def run(state, tokens, row=None):
            ran.append((stage, kind, tokens.shape))
            return (one, 0) if kind == "val" else (state, one)

        return run

    keys = itertools.product(range(3), (FIRST, SECOND, "val"))
    programs = {key: program(*key) for key in keys}
    state = MagicMock(params={}, lost_ngrams=0)
    shards = train_gpt.find_data(dataclasses.replace(c, data=str(data)))
    train_gpt.train(state, c, MESH, programs, shards, QUIET, None)
    short = (8, 33)
    long = (8, 65)
    val = (8, 65)
    assert ran == [
        (0, FIRST, short), (0, SECOND, short), (0, FIRST, short),
        (1, "val", val), (1, SECOND, long), (1, FIRST, long), (1, SECOND, long),
        (1, "val", val), (1, FIRST, long), (2, "val", val),
    ]  # fmt: skip


def test_training_and_its_reading_are_on_the_clock_and_nothing_else(run, monkeypatch):
    """The clock nearly stands still, and what is slow moves it."""
    now = SimpleNamespace(s=0.0)
    slow = []

    def perf_counter() -> float:
        now.s += 1e-9
        return now.s

    def slowly(seconds, result):
        now.s += seconds
        slow.append(seconds)
        return result

    def slow_batches(batches, shards, shapes, *_):
        return (slowly(1 if shapes[0][1] == 32 else 100, batch) for batch in batches)

    def slow_val(program, *_):
        return stand_in(program, lambda *args: slowly(100, program(*args)))

    names = dict(time=time.time, strftime=time.strftime, gmtime=time.gmtime)
    clock = SimpleNamespace(**names, perf_counter=perf_counter)
    monkeypatch.setattr(train_gpt, "time", clock)
    for name in "compile_train_step", "compile_val_step", "shard_facts", "make_state":
        wrap(monkeypatch, name, lambda result, *_: slowly(100, result))
    wrap(monkeypatch, "read_batches", slow_batches)
    wrap(monkeypatch, "compile_val_step", slow_val)
    log = run()
    assert 0 < log.times[5] <= log.times[10] == 10_000
    assert log.result["train_time_ms"] == pytest.approx(10_000)
    assert sorted(slow) == 10 * [1] + (4 + 3 + 2 + 1 + 4 + 4) * [100], "not all of it was slow"


# ---- Ends ----------------------------------------------------------------------------------------
def test_a_loss_that_is_not_finite_voids_the_run(run, monkeypatch):
    """Without a guard as well: nothing is trained or reported after it."""
    nan = lambda *_: (float("nan"), 0)
    last = (1, "val")
    change = lambda programs, *_: programs | {last: stand_in(programs[last], nan)}
    wrap(monkeypatch, "compile_all", change)
    log = run("--target", "1", raises=SystemExit)
    assert log.code == 3 and log.result is None
    assert log.lines[-2].startswith("step:10/10 val_loss:nan train_time:")
    assert log.lines[-1] == "NON-FINITE: the loss, by step 10" and log.weights is None


def test_a_save_that_fails_does_not_cost_the_result(run, monkeypatch):
    """After a full disk, the log has the result, but names no weights."""
    monkeypatch.setattr(np, "savez", Mock(side_effect=OSError))
    log = run(raises=OSError)
    assert log.result["steps"] == 10 and "weights" not in log.result
