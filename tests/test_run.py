"""A whole run of a small model: its log, its weights, its clock, and how it ends."""

import dataclasses
import itertools
import json
import math
import re
import time
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import MagicMock, Mock
from zlib import crc32

import jax
import numpy as np
import pytest

import train_gpt
from tests import launched
from tests.launched import VAL, compiled, make_folder, read, set_tiny
from tests.tools import make_mesh
from train_gpt import BANK, EXCHANGED

FLAGS = [*launched.FLAGS, "--steps", "10", "--val_every", "5"]
TRAINED = r"step:(\d+)/(\d+) train_loss:(\d+\.\d{4}) train_time:(\d+)ms"
FIRST, SECOND = False, True  # of two steps, the second one is an Adam step
QUIET = SimpleNamespace(line=lambda _: None, facts=lambda _: None)
DEVICES = jax.devices()[:2]
MESH = make_mesh(2)


# ---- A real run ----------------------------------------------------------------------------------
@pytest.fixture(scope="module")
def real(tmp_path_factory) -> SimpleNamespace:
    """The log and the output of a launcher's process on two devices."""
    folder = make_folder(tmp_path_factory.mktemp("real"))
    secrets = {"HF_TOKEN": "hidden-1", "JAX_SECRET_KEY": "hidden-2", "XLA_PASSWORD": "hidden-3"}
    script = launched.write_script(folder / "my idea.py")
    argv = [*FLAGS, "--seed", "7"]
    process = launched.start(script, *argv, env=secrets | {"NCCL_DEBUG": "WARN"})
    out, err = process.communicate()
    assert (process.returncode, err) == (0, "")
    (path,) = folder.glob("logs/*.txt")
    with pytest.MonkeyPatch.context() as patch:
        set_tiny(patch)
        c = dataclasses.replace(train_gpt.parse_config(argv)[1], attention="band")
    return SimpleNamespace(
        **vars(read(path)), out=out.splitlines(), folder=folder, script=script, argv=argv, c=c
    )


def test_a_log_is_the_source_then_facts_losses_and_the_result_as_on_the_screen(real):
    assert real.source.encode() == real.script.read_bytes()
    kinds = re.compile(rf"[a-z]+ (?=[\[{{\"\d])(.*)|{VAL}|{TRAINED}")
    assert all(kinds.fullmatch(line) for line in real.lines[:-1])
    assert real.rest.endswith("\n")
    weights = f"logs/{real.path.stem}.npz"
    assert real.out == [
        f"tiny on 2 x cpu, head in float32, log in logs/{real.path.name}",
        *["compiling programs: 4 ...", *real.lines[-4:]],
        f"next: ./run.sh look {weights}, or ./run.sh sample {weights}",
    ]
    assert float(real.losses[10]) < float(real.losses[5]) < math.log(257)


def test_the_facts_are_what_it_takes_to_run_it_again_and_no_secrets(real):
    names = "data hosts versions devices driver environment argv seed config prefixes wheels"
    assert real.facts.keys() == {*names.split(), "parameters", "compile"}
    assert "hidden" not in real.rest
    expected = dict(JAX_NUM_CPU_DEVICES="8", JAX_PLATFORMS="cpu", NCCL_DEBUG="WARN")
    assert real.facts["environment"].items() >= expected.items()
    assert not {"HF_TOKEN", "HOME", "PATH"} & set(real.facts["environment"])
    assert real.facts["versions"]["jax"] == jax.__version__
    config = dict(preset="tiny", **dataclasses.asdict(real.c))
    assert real.facts.items() >= dict(
        devices=["cpu", "cpu"], hosts=1, argv=real.argv, seed=7, prefixes=0,
        config=json.loads(json.dumps(config)),
    ).items()  # fmt: skip
    files = [(f["file"], f["tokens"], f["documents"]) for f in real.facts["data"]]
    names = "x_train_000001.bin", "x_train_000002.bin", "x_val_000000.bin"  # not the third
    assert files == [(name, 1600, 32) for name in names]


def test_the_weights_are_the_model_and_have_the_loss_that_was_printed(real):
    loss, ms = real.result["val_loss"], real.result["train_time_ms"]
    assert (f"{loss:.4f}", f"{ms:.0f}") == (real.losses[10], str(real.times[10]))
    assert real.result == dict(
        reason="end of schedule", val_loss=loss, target=0.0, steps=10, tokens=2048, seed=7,
        devices=2, train_time_ms=ms, peak_memory_bytes=0,
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
    shard = train_gpt.open_shard(real.folder / "data/x_val_000000.bin")
    program = compiled(c.stage_at(10), "val", c, MESH)
    places, tokens_place, _ = program.input_shardings[0]
    batches = train_gpt.read_batches([shard], train_gpt.batch_shapes("val", c), c)
    params = jax.device_put(params, places)
    batches = train_gpt.prefetch(batches, tokens_place)
    loss = np.mean([float(program(params, batch, np.int32(1))[0]) for batch in batches])
    assert loss == pytest.approx(real.result["val_loss"], abs=1e-5)


# ---- Runs in this process ------------------------------------------------------------------------
@pytest.fixture
def run(tmp_path, monkeypatch):
    """A function that runs in this process and returns the log; `raises` is the exception with
    which the run should end."""
    monkeypatch.chdir(make_folder(tmp_path))
    monkeypatch.setattr(jax, "devices", lambda: DEVICES)
    set_tiny(monkeypatch)
    val_step = lambda stage, c, mesh: compiled(stage, "val", c, mesh)
    monkeypatch.setattr(train_gpt, "compile_train_step", compiled)
    monkeypatch.setattr(train_gpt, "compile_val_step", val_step)

    def run(*argv: str, raises=()) -> SimpleNamespace:
        before = set(Path("logs").glob("*.txt"))
        code = None
        try:
            train_gpt.main([*FLAGS, *argv])
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


def test_the_target_ends_the_run_early(run):
    log = run("--target", "5.5", "--seed", "7", "--save", "0")
    result = [log.result[name] for name in ("reason", "steps", "tokens", "target")]
    assert result == ["target reached", 5, 4 * 128 + 256, 5.5] and list(log.losses) == [5]
    assert log.result["val_loss"] <= 5.5
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


def test_the_first_state_takes_the_memory_of_the_warmed_up_one(monkeypatch):
    """With other addresses, the first call of a program on a GPU would be slow, on the clock."""
    set_tiny(monkeypatch)
    c = train_gpt.parse_config(FLAGS)[1]
    old = train_gpt.make_state(dataclasses.replace(c, seed=6), make_mesh(1))
    before = {x.unsafe_buffer_pointer() for x in jax.tree.leaves(old) if x.nbytes > 4096}
    state = train_gpt.make_state(c, make_mesh(1), old)
    after = {x.unsafe_buffer_pointer() for x in jax.tree.leaves(state) if x.nbytes > 4096}
    assert before == after and all(x.is_deleted() for x in jax.tree.leaves(old))


def test_first_and_second_steps_alternate_and_stages_follow_each_other(tmp_path, monkeypatch):
    """Every step has the shape of its stage. A validation is of the stage of the next step."""
    set_tiny(monkeypatch)
    monkeypatch.chdir(make_folder(tmp_path))
    c = train_gpt.parse_config([*FLAGS, "--val_every", "4", "--val_tokens", "512"])[1]
    c = dataclasses.replace(c, save=0)
    ran = []
    one = jax.numpy.float32(1)

    def program(stage, kind):
        def run(state, tokens, row):
            is_last = [int(row)] if kind == "val" else []
            ran.append((stage, kind, tokens.shape[1] - 1, *is_last))
            return (one, 0) if kind == "val" else (state, one)

        return run

    keys = itertools.product(range(2), (FIRST, SECOND, "val"))
    programs = {key: program(*key) for key in keys}
    state = MagicMock(params={}, lost_ngrams=0)
    train_gpt.train(state, c, make_mesh(1), programs, train_gpt.find_data(c), QUIET, None)
    val = (1, "val", 64, 0)
    assert ran == [
        *[(0, FIRST, 16), (0, SECOND, 16)] * 2, val,
        *[(1, FIRST, 32), (1, SECOND, 32)] * 2, val,
        (1, FIRST, 32), (1, SECOND, 32), (1, "val", 64, 1),
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
        return (slowly(1 if shapes[0][1] == 16 else 100, batch) for batch in batches)

    names = dict(time=time.time, strftime=time.strftime, gmtime=time.gmtime)
    clock = SimpleNamespace(**names, perf_counter=perf_counter)
    monkeypatch.setattr(train_gpt, "time", clock)
    for name in "compile_train_step", "compile_val_step", "shard_facts", "make_state", "validate":
        wrap(monkeypatch, name, lambda result, *_: slowly(100, result))
    wrap(monkeypatch, "read_batches", slow_batches)
    log = run()
    assert 0 < log.times[5] <= log.times[10] == 10_000
    assert log.result["train_time_ms"] == pytest.approx(10_000)
    # Programs, facts, the state, two validations, and two batches of each.
    assert sorted(slow) == 10 * [1] + (5 + 3 + 1 + 2 + 4) * [100], "not all of it was slow"


# ---- Ends ----------------------------------------------------------------------------------------
def test_a_loss_that_is_not_finite_voids_the_run(run, monkeypatch):
    """Without a guard as well: nothing is trained or reported after it."""
    wrap(monkeypatch, "validate", lambda *_: (float("nan"), 0))
    log = run("--target", "1", raises=SystemExit)
    assert log.code == 3 and log.result is None
    assert log.lines[-2].startswith("step:5/10 val_loss:nan train_time:")
    assert log.lines[-1] == "NON-FINITE: the loss, by step 5" and log.weights is None


def test_a_save_that_fails_does_not_cost_the_result(run, monkeypatch, capsys):
    monkeypatch.setattr(np, "savez", Mock(side_effect=OSError("the disk is full")))
    assert run().result["steps"] == 10
    shown = capsys.readouterr().err
    assert shown.count("warning: ") == 2 and ".npz is not whole: the disk is full\n" in shown
