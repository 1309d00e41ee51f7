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
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import MagicMock, Mock
from zlib import crc32

import jax
import launch
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding, PartitionSpec

import train_gpt
from tests.tools import FLOAT32_FLAGS, MINI, SMALL, make_mesh, text, with_tiny, write_shard
from train_gpt import BANK, EXCHANGED, LONG, SHORT, Layer, Stage

TRAIN = Path(train_gpt.__file__).resolve()
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
    """The log and the output of a launcher's process on two devices, with fakes of git and
    nvidia-smi. start(lines) runs it once more, and closes its stdout after so many lines."""
    folder = tmp_path_factory.mktemp("real")
    git = 'test "$3 $4 $5 $6" = "describe --always --dirty --abbrev=40" && echo abc123-dirty'
    for name, script in ("git", git), ("nvidia-smi", "echo 580.65.06; echo 580.65.06"):
        (folder / name).write_text(f"#!/bin/sh\n{script}\n")
        (folder / name).chmod(0o755)
    env = os.environ | {
        "PATH": f"{folder}:{os.environ['PATH']}",
        "HOME": str(folder),
        "XLA_FLAGS": TWO_DEVICES,
        "NCCL_DEBUG": "WARN",
        "TF_CPP_MINE": f"{folder}/mine",
        "HF_TOKEN": "hidden-1",
        "JAX_SECRET_KEY": "hidden-2",
        "XLA_PASSWORD": "hidden-3",
        "TPU_ACCESS_TOKEN": "hidden-4",
    }
    env.pop("JAX_COMPILATION_CACHE_DIR", None)
    flags = ["--data", str(data), "--seed", "7"]
    argv = [*FLAGS, *flags]
    script = write_script(folder / "train_gpt.py", TWO)

    def start(lines: int = 1000) -> SimpleNamespace:
        before = set(folder.glob("logs/*.txt"))
        command = [sys.executable, launch.__file__, script, *argv]
        pipes = dict(stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        process = subprocess.Popen(command, cwd=folder, env=env, **pipes)
        out = [line.rstrip("\n") for line in itertools.islice(process.stdout, lines)]
        process.stdout.close()
        err = process.stderr.read()
        (path,) = set(folder.glob("logs/*.txt")) - before
        return SimpleNamespace(**vars(read(path)), out=out, err=err, code=process.wait())

    with pytest.MonkeyPatch.context() as patch:
        c = dataclasses.replace(parse(patch, TWO, *flags), attention="band")
    more = dict(folder=folder, script=script, argv=argv, c=c, start=start)
    first = start()
    assert (first.code, first.err) == (0, "")
    return SimpleNamespace(**vars(first), **more)


def test_a_log_is_the_source_then_facts_losses_and_the_result_as_on_the_screen(real):
    assert real.source.encode() == real.script.read_bytes()
    kinds = re.compile(rf"[a-z]+ (?=[\[{{\"\d])(.*)|{VAL}|{TRAINED}")
    assert all(kinds.fullmatch(line) for line in real.lines[:-1])
    assert real.lines[-1].startswith("RESULT {") and real.rest.endswith("\n")
    *out, disk, page, following = real.out
    assert out == [
        *launch.layer_table(real.c).splitlines(),
        f"tiny on 2 x cpu, head in float32, log in logs/{real.path.name}",
        *["compiling 6 programs ...", *real.lines[-5:]],
    ]
    assert re.fullmatch(r"left in logs/: 1 run, 0\.\d MB", disk)
    weights = f"logs/{real.path.stem}.npz --script {real.script}"
    assert page == f"a page of the run: ./run.sh look {weights}"
    assert following == f"next: ./run.sh sample {weights}"


def test_the_facts_are_what_it_takes_to_run_it_again(real, data):
    names = "data hosts versions devices driver environment git argv seed config prefixes"
    assert real.facts.keys() == {*names.split(), "parameters", "compile"}
    assert real.facts["versions"]["backend"]
    versions = dict(jax=jax.__version__, numpy=np.__version__, optax=optax.__version__)
    assert real.facts["versions"].items() >= (versions | {"python": sys.version}).items()
    config = dict(preset="tiny", **dataclasses.asdict(real.c))
    parameters = dict(  # with the head's rows of padding, which are trained
        embed=384 * 32, head=384 * 32, bigram=512 * 32, value0=257 * 32, qk=4 * 32 * 32,
        vo=4 * 32 * 32, mlp=4 * 64 * 32, vo_lambdas=4, attn_lambdas=4, mlp_lambdas=4,
        skip_lambdas=2, value_gates=2 * 2 * 12, smear_gate=12, smear_lambda=1, gate_scale=1,
        pointer_qk=3 * 8 * 32, pointer_gain=1, pointer_sink=8, pointer_sink_bias=1,
        pointer_slot=5, pointer_match=4,
    )  # fmt: skip
    parameters |= {"gates_input.w1": 8 * 32, "gates_input.w2": 3 * 8, "gates_input.b2": 3}
    assert real.facts.items() >= dict(
        devices=["cpu", "cpu"], hosts=1, driver="580.65.06\n580.65.06", git="abc123-dirty",
        argv=real.argv, seed=7, prefixes=0, config=json.loads(json.dumps(config)),
        parameters=parameters,
    ).items()  # fmt: skip
    names = [*(f"x_train_00000{i}.bin" for i in (1, 2, 3)), "x_val_000000.bin"]  # not the fourth
    assert real.facts["data"] == [dict(
        file=name, bytes=4224, sha256=hashlib.sha256((data / name).read_bytes()).hexdigest(),
        tokens=1600, documents=32, largest_token=256) for name in names]  # fmt: skip


def test_what_steers_jax_is_in_the_log_and_secrets_are_not(real):
    assert "hidden" not in real.rest and str(real.folder) not in real.rest
    environment = real.facts["environment"]
    assert environment.items() >= dict(
        XLA_FLAGS=TWO_DEVICES, JAX_PLATFORMS="cpu",
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
        ms = int(match[4])
        steps = max(1, int(match[1]))
        assert abs(ms / steps - float(match[5])) <= 0.51 / steps + 0.005
    first, second, last = [float(m[3]) for m in found]
    # The head is nearly zero, so that all tokens are alike, but the pointer copies.
    assert math.log(257) - 0.5 < first < math.log(257)
    assert last < float(trained[3]) < second < first
    assert 0 <= real.times[0] < real.times[5] < int(trained[4]) <= real.times[10]


def test_the_result_sums_the_run_up(real):
    loss = real.result["val_loss"]
    ms = real.result["train_time_ms"]
    assert (f"{loss:.4f}", f"{ms:.0f}") == (real.losses[10], str(real.times[10]))
    assert real.result == dict(
        reason="end of schedule", val_loss=loss, target=0.0, steps=10, tokens=4096, seed=7,
        devices=2, train_time_ms=ms, peak_memory_bytes=0, weights=f"{real.path.stem}.npz",
        resumed=False, lost_ngrams=0,
    )  # fmt: skip


def test_the_weights_are_the_model_and_have_the_loss_that_was_printed(real, data):
    weights = dict(real.weights)
    about = {name: json.loads(weights.pop(name).item()) for name in ("config", "result", "source")}
    assert real.result == about["result"] | dict(weights=f"{real.path.stem}.npz")
    assert about["source"] == crc32(real.script.read_bytes())
    assert real.facts["config"] == dict(preset="tiny", **about["config"])
    c = real.c
    params = {}
    for name, param in train_gpt.param_table(c).items():
        assert weights[name].shape == param.model_shape
        rows = param.shape[2:] if param.sharding in (BANK, EXCHANGED) else param.shape[1:]
        padded = np.zeros(param.shape, np.float32).reshape(-1, *rows)
        padded[: len(weights[name])] = weights[name]
        params[name] = padded.reshape(param.shape)
    assert weights.keys() == params.keys()
    shard = train_gpt.open_shard(data / "x_val_000000.bin")
    program = compiled_val_step(c.stage_at(10), program_config(c), MESH)
    places, tokens_place = program.input_shardings[0]
    batches = train_gpt.read_batches([shard], train_gpt.batch_shapes("val", c), c)
    params = jax.device_put(params, places)
    batches = train_gpt.prefetch(batches, tokens_place)
    loss = np.mean([float(program(params, batch)[0]) for batch in batches])
    assert loss == pytest.approx(real.result["val_loss"], abs=1e-4)


@pytest.fixture(scope="module")
def second(real) -> SimpleNamespace:
    """The same run once more. Its stdout is closed after a line, as by `| head -1`."""
    folder = real.folder / ".cache" / "jax"
    before = sorted(folder.glob("*-cache"))
    log = real.start(lines=1)
    return SimpleNamespace(**vars(log), before=before, after=sorted(folder.glob("*-cache")))


def test_a_second_run_finds_its_programs_in_the_cache(second, real):
    assert len(second.before) >= 7 and second.after == second.before
    assert second.losses == real.losses


def test_a_closed_screen_costs_nothing_but_lines(second, real):
    assert second.code == 0 and len(second.out) == 1
    assert second.err == "warning: <stdout> has gaps: [Errno 32] Broken pipe\n"
    assert second.result.keys() == real.result.keys() and second.weights
    assert len(second.lines) == len(real.lines)


def test_programs_depend_on_no_rate_and_on_no_number_of_steps(monkeypatch):
    """So a sweep compiles once: the programs' text, which is the key of the cache, is the same."""
    monkeypatch.setattr(jax.stages.Lowered, "compile", lambda lowered, *_: lowered.as_text())

    def programs(*flags: str) -> list[str]:
        c = dataclasses.replace(parse(monkeypatch, ONE, *flags), attention="band")
        return [REAL_TRAIN_STEP(0, SECOND, c, MESH), REAL_VAL_STEP(0, c, MESH)]

    flags = "--muon_lr 0.01 --adam_lr 0.02 --steps 20 --cooldown_start 0.2 --seed 5 --untie 0.1"
    assert programs() == programs(*flags.split())
    assert not {*programs()} & {*programs("--D", "64")}


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


@pytest.mark.parametrize("compute, precision", [("bfloat16", None), ("float32", "highest")])
def test_float32_is_float32_on_every_device(monkeypatch, compute, precision):
    """JAX's default precision of float32 is TF32 on GPUs and bfloat16 on TPUs."""
    precisions = []
    note = lambda *_: precisions.append(jax.config.jax_default_matmul_precision)
    for name in "compile_train_step", "compile_val_step":
        monkeypatch.setattr(train_gpt, name, note)
    train_gpt.compile_all(parse(monkeypatch, ONE, "--compute", compute), MESH, QUIET)
    assert set(precisions) == {precision} and jax.config.jax_default_matmul_precision is None


def test_the_target_ends_the_run_early(run):
    log = run("--target", "5.2", "--seed", "7", "--save", "0")
    result = [log.result[name] for name in ("reason", "steps", "tokens", "target")]
    assert result == ["target reached", 5, 5 * 256, 5.2] and list(log.losses) == [0, 5]
    assert log.result["val_loss"] <= 5.2 < float(log.losses[0])
    assert log.weights is None and "weights" not in log.result  # --save 0


def test_the_seed_alone_decides_a_run(run, real, monkeypatch):
    """The number of devices does not matter, nor do the calls of the programs in warm_up()."""
    warm = run("--seed", "7")
    other = run("--seed", "8")
    monkeypatch.setattr(train_gpt, "warm_up", lambda *_: None)
    cold = run("--seed", "7")
    assert warm.losses == cold.losses != other.losses
    for name in warm.weights.keys() - {"config", "result", "source"}:
        np.testing.assert_array_equal(warm.weights[name], cold.weights[name])
        same = np.array_equal(warm.weights[name], other.weights[name])
        assert same == (name == "skip_lambdas"), name  # no layer here uses them
    unused = slice(20, 250)  # tokens that are not in the data, so that their rows do not change
    table = warm.weights["value0"][unused]
    np.testing.assert_array_equal(table, real.weights["value0"][unused])
    assert len(np.unique(table)) > 1000


def test_every_run_draws_a_seed_and_logs_it(run):
    a = run("--seed", "-2")
    b = run()
    assert a.facts["seed"] != b.facts["seed"]
    for log in a, b:
        assert 0 <= log.facts["seed"] < 2**31
        assert log.facts["seed"] == log.result["seed"] == log.facts["config"]["seed"]
    assert run("--seed", str(a.facts["seed"])).losses == a.losses


def stand_in(program, run):
    """The function `run`, with the attributes of a program that train_gpt uses."""
    run.args_info = program.args_info
    run.input_shardings = program.input_shardings
    return run


# ---- Compiling -----------------------------------------------------------------------------------
def test_every_program_has_run_once_and_none_compiles_on_the_clock(run, monkeypatch):
    events = []

    def listen(name, *_, **__):
        events.append(name)

    def note(name):
        def noted(result, *_):
            events.append(name)
            return result

        return noted

    def noting(program, key):
        def noted(*args):
            events.append(key)
            return program(*args)

        return stand_in(program, noted)

    wrap(monkeypatch, "compile_train_step", lambda p, stage, kind, *_: noting(p, (stage, kind)))
    wrap(monkeypatch, "compile_val_step", lambda p, stage, *_: noting(p, (stage, "val")))
    wrap(monkeypatch, "warm_up", note("warm"))
    wrap(monkeypatch, "Stopwatch", note("clock"))  # first when the clock starts
    wrap(monkeypatch, "train", note("end"))
    jax.monitoring.register_event_duration_secs_listener(listen)
    run("--seed", "9")
    jax.monitoring.unregister_event_duration_listener(listen)
    compiles = [i for i, event in enumerate(events) if "compile" in event and "/" in event]
    assert compiles, "no event of JAX has compile in its name any more: look for the new name"
    assert not [i for i in compiles if events.index("clock") < i < events.index("end")]
    first = [event for event in events[: events.index("warm")] if isinstance(event, tuple)]
    assert first == [(0, FIRST), (0, SECOND), (0, "val"), (1, "val")]


@pytest.mark.parametrize("platform, alone", [("cpu", False), ("gpu", True)])
def test_one_program_compiles_alone_on_gpus_then_eight_at_a_time(platform, alone, monkeypatch):
    stages = [Stage(2, 256 * i, short=8, long=8, max_doc=0, lr=1.0) for i in range(1, 7)]
    c = parse(monkeypatch, tuple(stages), *"--steps 12 --val_every 1 --seed 1".split())
    lock = threading.Lock()
    active = set()
    beside = {}  # which programs were being compiled when one began
    ran = []
    place = NamedSharding(MESH, PartitionSpec("fsdp"))

    def fake_program(stage, kind):
        with lock:
            beside[stage, kind] = {*active}
            active.add((stage, kind))
        time.sleep(0.05)
        active.remove((stage, kind))
        shape = jax.ShapeDtypeStruct((8, 33 + stage), np.int32)
        info = SimpleNamespace(args_info=[(None, shape)], input_shardings=[(None, place)])

        def program(state, tokens):
            ran.append((stage, kind, tokens.shape))
            return 0.0 if kind == "val" else (state, 0.0)

        return stand_in(info, program)

    train_step = lambda stage, adam_step, *_: fake_program(stage, adam_step)
    monkeypatch.setattr(train_gpt, "compile_train_step", train_step)
    monkeypatch.setattr(train_gpt, "compile_val_step", lambda stage, *_: fake_program(stage, "val"))
    device = SimpleNamespace(platform=platform, memory_stats=lambda: None)
    mesh = SimpleNamespace(devices=np.array([device]), local_devices=[device])
    programs = train_gpt.compile_all(c, mesh, QUIET)
    train_gpt.warm_up(programs, c, MESH)
    keys = {*itertools.product(range(6), (FIRST, SECOND, "val"))}
    assert programs.keys() == beside.keys() == keys
    assert any((0, FIRST) in others for others in beside.values()) != alone
    assert max(map(len, beside.values())) == 7
    assert len(ran) == 18 and {*ran} == {(stage, kind, (8, 33 + stage)) for stage, kind in keys}


@pytest.mark.parametrize("platform, GB, threads", [("gpu", 60, 8), ("gpu", 22, 2), ("tpu", 16, 8)])
def test_small_gpus_compile_two_at_a_time(platform, GB, threads, monkeypatch):
    """Autotuning takes memory in every thread. TPUs do not tune."""
    devices = np.array([SimpleNamespace(platform=platform)])
    memory = SimpleNamespace(memory_stats=lambda: {"bytes_limit": GB * 10**9})
    mesh = SimpleNamespace(devices=devices, local_devices=[memory])
    pools = []

    def pool(threads):
        pools.append(threads)
        return ThreadPoolExecutor(1)

    monkeypatch.setattr(train_gpt, "ThreadPoolExecutor", pool)
    for name in "compile_train_step", "compile_val_step":
        monkeypatch.setattr(train_gpt, name, lambda *_: None)
    train_gpt.compile_all(parse(monkeypatch, ONE, "--steps", "2"), mesh, QUIET)
    assert pools == [threads]


def test_the_first_state_takes_the_memory_of_the_warmed_up_one():
    """With other addresses, the first call of a program on a GPU would be slow, on the clock."""
    c = dataclasses.replace(MINI, seed=5)
    old = train_gpt.make_state(dataclasses.replace(c, seed=6), MESH)
    before = {x.unsafe_buffer_pointer() for x in jax.tree.leaves(old) if x.nbytes > 4096}
    state = train_gpt.make_state(c, MESH, old)
    after = {x.unsafe_buffer_pointer() for x in jax.tree.leaves(state) if x.nbytes > 4096}
    assert before == after and all(x.is_deleted() for x in jax.tree.leaves(old))
    fresh = train_gpt.make_state(c, MESH)
    for a, b in zip(jax.tree.leaves(state), jax.tree.leaves(fresh), strict=True):
        np.testing.assert_array_equal(a, b)


def test_versions_of_the_accelerators_wheels_are_in_the_log(monkeypatch):
    installed = {"nvidia-cudnn-cu13": "9.28.0.42", "nvidia-nccl-cu13": "2.30", "libtpu": "0.0.50",
                 "nvidia-cublas": "13.1", "numpy": "2", "nvidia-cufft": "12"}  # fmt: skip
    wheels = [SimpleNamespace(metadata={"Name": n}, version=v) for n, v in installed.items()]
    monkeypatch.setattr(train_gpt.importlib.metadata, "distributions", lambda: wheels)
    expected = {n: v for n, v in installed.items() if n not in ("numpy", "nvidia-cufft")}
    assert train_gpt.accelerator_wheels() == expected
    facts = train_gpt.run_facts("tiny", MINI, jax.devices(), [])
    assert expected.items() <= facts["versions"].items()


NOISY = "#!/bin/sh\necho 580.95.05\necho 'WARNING: infoROM is corrupted at gpu 0'\nexit 14\n"


@pytest.mark.parametrize(
    "nvidia_smi, driver",
    [(NOISY, "580.95.05"), ("#!/bin/sh\nexec sleep 1000\n", ""), (None, "")],
    ids=["it warns", "it hangs", "there is none"],
)
def test_an_odd_nvidia_smi_costs_no_run(tmp_path, monkeypatch, nvidia_smi, driver):
    """It hangs where a GPU has fallen off the bus. Here a minute is short."""
    if nvidia_smi:
        (tmp_path / "nvidia-smi").write_text(nvidia_smi)
        (tmp_path / "nvidia-smi").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin")
    run = subprocess.run
    monkeypatch.setattr(subprocess, "run", lambda *args, **kw: run(*args, **kw | {"timeout": 0.5}))
    assert train_gpt.run_facts("tiny", MINI, DEVICES, [])["driver"] == driver


@pytest.mark.parametrize("folder", [".", "clone"])
def test_the_commit_is_that_of_the_files_own_repository(tmp_path, monkeypatch, folder):
    """A ZIP of the project may lie inside another repository, and GIT_DIR may name one."""
    git = "git", "-C", str(tmp_path), "-c", "user.name=x", "-c", "user.email=x"
    subprocess.run([*git, "init", "-q"], check=True)
    subprocess.run([*git, "commit", "-q", "--allow-empty", "-m", "x"], check=True)
    monkeypatch.setenv("GIT_DIR", str(tmp_path / "nowhere"))
    monkeypatch.setattr(train_gpt, "__file__", str(tmp_path / folder / "train_gpt.py"))
    found = train_gpt.run_facts("tiny", MINI, DEVICES, [])["git"]
    assert len(found) == (40 if folder == "." else 0)


@pytest.mark.parametrize(
    "home, logged",
    [
        ("/home/me", "--to=~/x:~ /mnt/home/me /home/metoo"),
        ("/", "--to=/home/me/x:/home/me /mnt/home/me /home/metoo"),
        (None, "--to=/home/me/x:/home/me /mnt/home/me /home/metoo"),
    ],
)
def test_the_home_folder_is_replaced_only_at_the_beginning_of_a_path(monkeypatch, home, logged):
    monkeypatch.delenv("HOME")
    if home:
        monkeypatch.setenv("HOME", home)
    monkeypatch.setenv("XLA_SOMETHING", "--to=/home/me/x:/home/me /mnt/home/me /home/metoo")
    facts = train_gpt.run_facts("tiny", MINI, DEVICES, [])
    assert facts["environment"]["XLA_SOMETHING"] == logged


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
    shards = train_gpt.find_data(with_data(c, data))
    train_gpt.train(state, c, MESH, programs, shards, QUIET, None)
    short = (8, 33)
    long = (8, 65)
    val = (8, 65)
    assert ran == [
        (0, "val", val), (0, FIRST, short), (0, SECOND, short), (0, FIRST, short),
        (1, "val", val), (1, SECOND, long), (1, FIRST, long), (1, SECOND, long),
        (1, "val", val), (1, FIRST, long), (2, "val", val),
    ]  # fmt: skip


def with_data(c: train_gpt.Config, data: Path) -> train_gpt.Config:
    """The configuration, with shards in another folder."""
    return dataclasses.replace(c, data=str(data))


# ---- Clock ---------------------------------------------------------------------------------------
@pytest.fixture
def now(monkeypatch):
    """The clock of a run, in now.s: it nearly stands still, and a test moves it."""

    def perf_counter() -> float:
        now.s += 1e-9
        return now.s

    now = SimpleNamespace(s=0.0)
    names = dict(
        time=time.time, perf_counter=perf_counter, strftime=time.strftime, gmtime=time.gmtime
    )
    monkeypatch.setattr(train_gpt, "time", SimpleNamespace(**names))
    return now


def test_training_and_its_reading_are_on_the_clock_and_nothing_else(run, monkeypatch, now):
    slow = []

    def slowly(seconds, result):
        now.s += seconds
        slow.append(seconds)
        return result

    def slow_batches(batches, shards, shapes, *_):
        return (slowly(1 if shapes[0][1] == 32 else 100, batch) for batch in batches)

    def slow_val(program, *_):
        return stand_in(program, lambda *args: slowly(100, program(*args)))

    for name in "compile_train_step", "compile_val_step", "shard_facts", "make_state":
        wrap(monkeypatch, name, lambda result, *_: slowly(100, result))
    wrap(monkeypatch, "read_batches", slow_batches)
    wrap(monkeypatch, "compile_val_step", slow_val)
    log = run()
    assert log.times[0] == 0 < log.times[5] <= log.times[10] == 10_000
    assert log.result["train_time_ms"] == pytest.approx(10_000)
    assert sorted(slow) == 10 * [1] + (4 + 3 + 2 + 1 + 6 + 6) * [100], "not all of it was slow"


class Device:
    """A fake device that queues steps of 10 seconds. A step is done once the host waits for it, or
    once `queue` later steps are queued. Calls are in `notes`; a loss is the number of its step."""

    def __init__(self, now, queue: int):
        self.now = now
        self.queue = queue
        self.queued = 0
        self.done = 0
        self.notes = []

    def finish(self, step: int) -> None:
        while self.done < min(step, self.queued):
            self.done += 1
            self.now.s += 10

    def train(self, state, tokens, row):
        self.notes.append("train")
        self.queued += 1
        self.finish(self.queued - self.queue)
        return self.pending(self.queued), self.pending(self.queued)

    def pending(self, step: int) -> Mock:
        """What a step returns: a loss and a state that the host may wait for."""

        def wait():
            self.notes.append("wait")
            self.finish(step)

        def value(_):
            self.finish(step)
            return float(step)

        result = MagicMock(params={}, lost_ngrams=0)
        result.block_until_ready = wait
        result.is_ready = lambda: self.done >= step
        result.__float__ = value
        return result


@pytest.mark.parametrize("queue", [3, 100])  # steps that the device lets the host run ahead
def test_the_host_runs_a_few_steps_ahead_and_logs_losses(data, monkeypatch, now, queue):
    """Where a device would queue all steps, the host waits for the oldest one."""
    device = Device(now, queue)
    c = parse(monkeypatch, ONE, *"--steps 20 --val_every 20".split())
    programs = dict.fromkeys([(0, FIRST), (0, SECOND)], device.train)

    def val(*_):
        device.notes.append("val")
        return 1.0, 0

    programs |= dict.fromkeys([(0, "val"), (1, "val")], val)
    log = SimpleNamespace(line=device.notes.append)
    shards = train_gpt.find_data(with_data(c, data))
    _, result = train_gpt.train(device.pending(0), c, MESH, programs, shards, log, None)
    assert result["train_time_ms"] == pytest.approx(200_000)  # queued steps are on the clock
    lines = [f"step:{i}/20 train_loss:{i}.0000 train_time:{i}0000ms" for i in (10, 20)]
    ahead = min(queue, train_gpt.STEPS_AHEAD)
    step = ["train"] if queue == ahead else ["train", "wait"]
    until_tenth = ["train"] * ahead + step * 10
    rest = step * (10 - ahead)
    assert device.notes == [
        *("wait", "wait", "val", "val"),
        "step:0/20 val_loss:1.0000 train_time:0ms step_avg:0.00ms",
        *[*until_tenth, lines[0], *rest, lines[1], "wait", "val", "val"],
        "step:20/20 val_loss:1.0000 train_time:200000ms step_avg:10000.00ms",
    ]


# ---- Ends ----------------------------------------------------------------------------------------
def test_a_loss_that_is_not_finite_voids_the_run(run, monkeypatch):
    """Without a guard as well: nothing is trained or reported after it."""
    nan = lambda *_: (float("nan"), 0)
    last = (1, "val")
    wrap(
        monkeypatch,
        "compile_all",
        lambda programs, *_: programs | {last: stand_in(programs[last], nan)},
    )
    log = run("--target", "1", raises=SystemExit)
    assert log.code == 3 and log.result is None
    assert log.lines[-2].startswith("step:10/10 val_loss:nan train_time:")
    assert log.lines[-1] == "NON-FINITE: the loss, by step 10" and log.weights is None


def test_a_line_is_in_the_log_before_it_is_shown(tmp_path, monkeypatch):
    """So that a screen that breaks costs no line of the log, also without a guard."""
    monkeypatch.chdir(tmp_path)
    log = train_gpt.Log()
    monkeypatch.setattr(sys, "stdout", Mock(write=Mock(side_effect=BrokenPipeError)))
    with pytest.raises(BrokenPipeError):
        log.line("the last line")
    assert log.path.read_text().endswith("=\nthe last line\n")


@pytest.mark.parametrize("trouble", [OSError, KeyboardInterrupt])
def test_a_save_that_fails_does_not_cost_the_result(run, monkeypatch, trouble):
    """After a full disk or Ctrl-C, the log has the result, but names no weights."""
    monkeypatch.setattr(np, "savez", Mock(side_effect=trouble))
    log = run(raises=trouble)
    assert log.result["steps"] == 10 and "weights" not in log.result
