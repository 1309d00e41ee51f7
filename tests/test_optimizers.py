"""./run.sh optimizers, and what verify.py, run_ab.py and pack.py know of contestants."""

import dataclasses
import hashlib
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import fake_machine
import machine
import pack
import pytest
import run_ab
import runs
import verify
from fake_runs import data, write_ours, write_plan
from messages import Fault
from optimizers import contest, run

from tests.tools import ROOT, text, write_shard

GOOD = '''\
"""A contestant."""

import jax
import jax.numpy as jnp
import optax
from train_gpt_simple import (
    cooldown,
)


def optimizer(params, total_steps, lr=0.01):
    """AdamW."""
    return optax.adamw(cooldown(lr, total_steps))
'''
# A transform of one's own: change replaces `update` or `state`, in init or update.
OWN = """\
import jax
import jax.numpy as jnp
import optax


def optimizer(params, total_steps, lr=0.01):
    def init(params):
        return {INIT}

    def update(grads, state, params=None):
        return {UPDATES}, {STATE}

    return optax.GradientTransformation(init, update)
"""
ADAMW = "optax.adamw(cooldown(lr, total_steps))"


def own(updates="grads", init="jnp.zeros(2)", state="state") -> str:
    """A contestant whose transform returns these."""
    parts = {"{INIT}": init, "{UPDATES}": updates, "{STATE}": state}
    source = OWN
    for name, value in parts.items():
        source = source.replace(name, value)
    return source


@pytest.fixture
def small(tmp_path, monkeypatch):
    """train_gpt_simple.py with a small `tiny`, for contestants that are trained or computed."""
    source = contest.PLAIN.read_text("utf-8")
    sizes = dict(layers=1, D=32, K=16, T=16, batch=8, microbatch=8, val_tokens=256)
    for name, value in sizes.items():
        source = re.sub(rf"\b{name}=\d+", f"{name}={value}", source, count=1)  # tiny is the first
    (tmp_path / "plain").mkdir()
    path = tmp_path / "plain" / "train_gpt_simple.py"
    path.write_text(source)
    monkeypatch.setattr(contest, "PLAIN", path)
    monkeypatch.chdir(tmp_path)  # which gets logs/optimizers/x.py
    return tmp_path


# ---- Contestants ---------------------------------------------------------------------------------
@pytest.mark.parametrize("old, new, message", [
    ("def optimizer", "def optimiser", "x.py has no function optimizer: write  def optimizer("),
    ("lr=0.01)", "lr=0.01)x", "x.py, line 11: expected ':': correct it"),
    ("import optax", "import optax\nlinear = 1", "line 6: linear would replace that of"),
    ("import jax\n", "import optax as jax\n", "line 3: jax would replace that of"),
    ("import jax\n", "from __future__ import annotations\n", "line 3: leave out __future__"),
    ("import jax\n", "import train_gpt_simple as t\n", "line 3: import names as they are"),
    ("    cooldown,", "    cooldown as c,", "line 6: import names as they are"),
    ("import jax\n", "from muon import no_such\n", "line 3: muon.py defines no no_such: import it"),
    ("import jax\n", "import muon\n", "line 3: import names as they are"),
    ("import jax\n", "from jax.numpy import *\n", "line 3: import names as they are"),
    ("import jax\n", "from muon import orthogonalize\n\northogonalize = 1\n",
     "line 5: orthogonalize comes from another contestant: rename this"),
    (")\n\n", "); EPS = 1\n\n", "line 8: write one statement on a line"),
    ('    """AdamW."""', "    global mean_loss", "line 12: mean_loss would replace that of"),
    ('    """AdamW."""', "    forward.__code__ = None", "line 12: __code__ can change the model"),
    ('    """AdamW."""', "    globals()['forward'] = 1", "line 12: globals can change the model"),
    ("import jax\n", "if __name__ == '__main__':\n    pass\n", "line 3: leave this out"),
    ("import jax\n", "'''\n" + "=" * 100 + "\n'''\n", "line 4: a log ends its source there"),
])  # fmt: skip
def test_what_its_text_has_wrong_is_named_with_its_line(old, new, message):
    contest.check_text(GOOD, Path("x.py"))
    assert GOOD.count(old) >= 1
    with pytest.raises(Fault) as fault:
        contest.check_text(GOOD.replace(old, new, 1), Path("x.py"))
    assert message in str(fault.value)


@pytest.mark.parametrize("source, message", [
    (GOOD.replace("import jax\n", "import no_such\n"),
     "x.py, line 3: cannot be imported: ModuleNotFoundError: No module named 'no_such'"),
    (GOOD.replace(ADAMW, "optax.adam(1 / 0)"),
     "x.py, line 13: optimizer cannot be made: ZeroDivisionError: division by zero: correct it"),
    (GOOD.replace(ADAMW, "optax.no_such"), "x.py, line 13: optimizer cannot be made: Attribute"),
    (GOOD.replace(ADAMW, "params"), "x.py: init fails: AttributeError: 'dict' object has no"),
    (own(init="params['no_such']"), "x.py, line 8: init fails: KeyError: 'no_such': correct it"),
    (own("grads @ grads"), "x.py, line 11: update fails: TypeError: unsupported operand"),
    (own("list(grads.values())"), "an update has nothing at ['blocks.0.attn.k.bias'], not float32"),
    (own("{k: g[None] for k, g in grads.items()}"),
     "an update has float32 (1, 32) at ['blocks.0.attn.k.bias'], not float32 (32,): return"),
    (own("jax.tree.map(lambda g: g.astype('bfloat16'), grads)"), "has bfloat16 (32,) at ["),
    (own(state="state.astype(int)"), "state after an update has int32 (2,), not float32 (2,)"),
    (own(state="(state, state)"), "the state after an update has nothing, not float32 (2,)"),
    (own(state="list(state)", init="(jnp.zeros(2),)"), "after an update has another structure"),
    (own("jax.tree.map(lambda g: g / jnp.linalg.norm(g), grads)"),
     "its update 1 of blocks.0.attn.k.bias is NaN or infinite, if gradients begin as zeros"),
    (own("jax.tree.map(lambda g: g / (1 - state[0]), grads)", state="state + 1"),
     "its update 2 of blocks.0.attn.k.bias is NaN or infinite"),
    (own("{k: jax.pure_callback(lambda x: 1 / 0, g, g) for k, g in grads.items()}"),
     "x.py: update fails: JaxRuntimeError: ZeroDivisionError: division by zero"),
    (GOOD.replace(", lr=0.01", ""), "line 13: optimizer cannot be made: NameError: name 'lr'"),
    (GOOD.replace("lr=0.01", "lr"), "x.py: lr needs a number as its default"),
    (GOOD.replace("lr=0.01", "lr='x'"), "x.py: lr needs a number as its default"),
    (GOOD.replace("lr=0.01", "nesterov=True"), "nesterov needs a number as its default"),
    (GOOD.replace("lr=0.01", "steps=9"), "x.py: --steps is a flag of all optimizers: rename"),
    ("SETTINGS = {'tiny': 5}\n" + GOOD, "SETTINGS is wrong: write  SETTINGS = {'tiny': dict("),
    ("SETTINGS = {'tiny': dict(rl=1)}\n" + GOOD, "SETTINGS of tiny has an unknown 'rl'"),
    ("SETTINGS = {'tiny': dict(steps=1.5)}\n" + GOOD, "SETTINGS of tiny has steps=1.5: write a"),
    ("SETTINGS = {'small': dict(lr=1)}\n" + GOOD, "SETTINGS has 'small': its keys are tiny and"),
    (GOOD + "\n\ndef initial_value(name, shape, key):\n    return jax.numpy.zeros(shape)[None]\n",
     "initial_value has float32 (1, 32) at ['blocks.0.attn.k.bias'], not float32 (32,): return"),
    (GOOD + "\n\ndef validated_params(params, state):\n    return state\n",
     "x.py: validated_params has "),
])  # fmt: skip
def test_what_its_functions_do_wrong_is_named(source, message, small):
    with pytest.raises(Fault) as fault:
        checked(source)
    assert message in str(fault.value) and "x.py" in str(fault.value)


def checked(source: str, size="tiny") -> None:
    """Checks a contestant as run.py does."""
    path = Path("x.py")
    contest.check_text(source, path)
    module = run.load(path, source)
    run.check_numbers(module, path)
    size, _, numbers = module.parse_config([size])
    run.check(module, path, size, numbers)


def test_a_contestant_for_large_matrices_is_not_refused(small, capsys):
    """Its updates are not computed on tiny, which it does not fit."""
    rows = "g.reshape(-1, 768).reshape(g.shape) if k.startswith('blocks') else g"
    checked(own(f"{{k: {rows} for k, g in grads.items()}}"), "124m")
    assert "not looked at, because tiny does not fit: x.py, line 11" in capsys.readouterr().out


def test_a_contestant_is_trained(small, monkeypatch, capsys):
    """Its log can be read, and states its numbers and its whole source."""
    (small / "data").symlink_to(ROOT / "data")
    (small / "x.py").write_text(GOOD)
    shards = small / "shards"
    shards.mkdir()
    for first, name in enumerate(("train_000001", "val_000000")):
        write_shard(shards / f"x_{name}.bin", text(1000, first))
    monkeypatch.setattr(run, "ROOT", small)
    flags = "x.py --size=tiny --steps 4 --seed 7 --lr 0.02 --data shards"
    run.main(flags.split())
    printed = capsys.readouterr().out
    assert "x.py is right; with the model and the loop it is logs/optimizers/x.py" in printed
    assert printed.splitlines()[-1].startswith("steps 4, loss ")
    (log,) = (small / "logs").glob("*.txt")
    found = runs.read(log)
    assert found.complete and found.tokens == 4 * 8 * 16 and found.seed == 7
    assert found.config["numbers"] == {"lr": 0.02}
    program = small / "logs/optimizers/x.py"
    assert found.source_sha256 == runs.source_hash(program)
    assert contest.outside(program.read_text()) == contest.outside(contest.PLAIN.read_text())
    with pytest.raises(Fault, match="must be above 0, and --seed from 0 to"):
        run.main([*flags.split(), "--microbatch", "0"])
    twelve = dataclasses.replace(run.load(Path("x.py"), GOOD).SIZES["tiny"], batch=12)
    with pytest.raises(Fault, match="12 sequences cannot be split .* on 8 devices: choose another"):
        run.check_run(twelve, 0)
    with pytest.raises(SystemExit, match="2"):
        run.main([*flags.split(), "--rl", "3"])
    assert "unrecognized arguments: --rl 3" in capsys.readouterr().err


def test_the_assembled_file_differs_in_its_section_alone():
    begin_in_a_line = GOOD.replace("import jax\n", f"import jax  # between {contest.BEGIN}\n\f\n")
    for contestant in (GOOD, begin_in_a_line):
        source = contest.assemble(contestant)
        assert contest.outside(source) == contest.outside(contest.PLAIN.read_text())
        assert "SETTINGS = {}\n" in source and "from train_gpt_simple" not in source
        assert "import optax\n" in contest.parts(source)[1]
    assert machine.is_contestant(GOOD) and not machine.is_contestant(source)
    assert contest.assemble("SETTINGS = {'tiny': {}}\n" + GOOD).count("\nSETTINGS = {") == 1


def test_functions_of_other_contestants_come_with_what_they_name(tmp_path, monkeypatch):
    (tmp_path / "one.py").write_text("def cube(x):\n    return x**3\n\n\ndef other():\n    pass\n")
    two = (
        "from one import cube\n\nEPS = 2\n\n\n@abs\ndef ninth(x, e=EPS):\n    return cube(x) ** 3\n"
    )
    (tmp_path / "two.py").write_text(two)
    monkeypatch.setattr(contest, "HERE", tmp_path)
    borrows = GOOD.replace("import jax\n", "from two import ninth\nfrom two import cube\n")
    _, borrowed = contest.pieces(borrows)
    assert [*borrowed] == ["cube", "EPS", "ninth"]
    assert borrowed["ninth"] == two[two.index("@abs") :].rstrip()
    section = contest.parts(contest.assemble(borrows))[1]
    assert section.index("\ndef cube") < section.index("\nEPS = 2") < section.index("\n@abs\n")
    (tmp_path / "one.py").write_text("def EPS():\n    pass\n")
    both = GOOD.replace("import jax\n", "from two import EPS\nfrom one import EPS\n")
    with pytest.raises(Fault, match="x.py, line 4: this brings a second EPS: leave out one"):
        contest.check_text(both, Path("x.py"))


def test_all_contestants_are_listed_and_their_texts_are_right(capsys):
    run.main(["--help"])
    printed = capsys.readouterr().out
    names = machine.optimizer_names(run.HERE)
    assert "muon" in names and not {"train_gpt_simple", "run", "contest"} & {*names}
    for name in names:
        contest.read(run.HERE / f"{name}.py")
        assert f"\n    {name} " in printed
    assert "lr=0.0" in printed and "--microbatch N" in printed


# ---- run.sh --------------------------------------------------------------------------------------
def test_run_sh_starts_it_or_refuses_in_one_line(tmp_path):
    fake = fake_machine.Machine(tmp_path)
    fake.python(12)
    (fake.root / "records/optimizers").mkdir(parents=True)
    shutil.copy(run.HERE / "muon.py", fake.root / "records/optimizers")
    near = "run.sh: there is no optimizer 'moun': did you mean muon?\n"
    assert fake.refusal("optimizers", "moun", status=2) == near
    refusal = fake.refusal("optimizers", "my/own.py", status=2)
    assert "there is no file my/own.py in " in refusal
    large = "optimizers", "muon", "--size", "124m"
    assert "run.sh: 124m does not run here: this machine has no" in fake.refusal(*large, status=2)
    refusal = fake.refusal("optimizers", WORLD_SIZE="2", RANK="0", status=2)
    assert "one of several processes" in refusal
    arguments = "optimizers", "muon", "--steps", "9"
    assert fake.run(*arguments)[-1] == "python3.12 records/optimizers/run.py muon --steps 9"
    assert fake.run(*large, JAX_PLATFORMS="cpu") == [f"python3.12 {run_py(large)}"]


def run_py(arguments) -> str:
    """The command that run.sh runs."""
    return " ".join(["records/optimizers/run.py", *arguments[1:]])


@pytest.mark.parametrize("steps, shards", [(1, "1"), (190, "1"), (191, "2"), (3250, "18")])
def test_as_many_shards_are_fetched_as_the_steps_need(steps, shards, tmp_path, monkeypatch):
    """A shard of FineWeb has 190 whole batches."""
    commands = []

    def start(command):
        commands.append(command[1:])
        return type("Done", (), {"returncode": 0})

    monkeypatch.setattr(run.subprocess, "run", start)
    monkeypatch.chdir(tmp_path)
    size = run.load(Path("x.py"), GOOD).SIZES["124m"]
    run.fetch_data(dataclasses.replace(size, steps=steps), size.data)
    check = ["data/check.py", "--quick", "--", "data/fineweb10B"]
    assert commands == [["data/cached_fineweb10B.py", shards], check]


# ---- Evidence ------------------------------------------------------------------------------------
TRACK = verify.TRACKS["optimizers-tiny"]
LOSSES = [TRACK.target - 0.05 + i / 1000 for i in range(8)]


def write_runs(folder: Path, source=GOOD, steps=100, losses=LOSSES, **facts) -> Path:
    """Made-up runs of a contestant; facts replace what their logs would state."""
    config = dict(preset="optimizers-tiny", val_tokens=TRACK.val_tokens, **TRACK.model)
    config |= facts.pop("config", {})
    whole = facts.pop("whole", contest.assemble(source))
    return write_ours(folder, losses, steps=steps, tokens=steps * 1024, source=whole,
                      data=data(TRACK.shards), config=config, **facts)  # fmt: skip


def other_model() -> str:
    """A source with a model that has another activation."""
    source = contest.assemble(GOOD)
    assert "jax.nn.relu(" in source
    return source.replace("jax.nn.relu(", "jax.nn.gelu(")


def fails(folder: Path, *base: Path) -> str:
    """What verify.py finds, all lines of FAIL."""
    evidence = [verify.collect(path) for path in (folder, *base)]
    holds, printed = verify.report(evidence[0], *(evidence[1:] or [None]), TRACK, TRACK.target)
    found = "\n".join(line for line in printed.splitlines() if "FAIL**" in line)
    assert holds == (not found)
    return found


def test_eight_runs_of_a_contestant_hold(tmp_path):
    folder = write_runs(tmp_path / "x")
    assert verify.infer_track(verify.collect(folder)) == "optimizers-tiny" and fails(folder) == ""
    fewer = write_runs(tmp_path / "fewer", steps=90, ms=9e6)  # however long it takes
    assert fails(fewer, folder) == ""
    assert "no fewer steps than the baseline: 100 against 90" in fails(folder, fewer)


@pytest.mark.parametrize("facts, message", [
    (dict(config=dict(D=256)), f"D is 256, not the track's {TRACK.model['D']}"),
    (dict(config=dict(batch=16)), f"batch is 16, not the track's {TRACK.model['batch']}"),
    (dict(config=dict(val_tokens=1024)), "validated on 1024 tokens, not 32,768"),
    (dict(devices=["NVIDIA H100"]), "not the track's devices"),
    (dict(argv=["tiny", "--target", "0", "--lr", "1"]), "a record is what the file does with tiny"),
    (dict(whole="print()\n" * 9), "nothing shows which model ran: there is no section Optimizer"),
    (dict(source=GOOD + "\n\ndef linear(w, name, x):\n    return x\n"),
     "linear would replace that of train_gpt_simple.py"),
    (dict(whole=other_model()), "outside its section Optimizer, the source is not records/optim"),
    (dict(losses=[x + 0.2 for x in LOSSES]), "for a mean below"),
])  # fmt: skip
def test_runs_with_another_model_or_loop_fail(tmp_path, facts, message):
    assert message in fails(write_runs(tmp_path / "x", **facts))


def test_verify_knows_todays_file(tmp_path, monkeypatch):
    """Its model, its targets, and the hash of all that contestants share."""
    shared = contest.outside(contest.PLAIN.read_text("utf-8"))
    sha256 = hashlib.sha256(shared.encode()).hexdigest()
    assert sha256 in verify.PLAIN, f"train_gpt_simple.py has changed: add {sha256} to PLAIN"
    monkeypatch.chdir(tmp_path)
    sizes = run.load(Path("x.py"), GOOD).SIZES
    for name, size in sizes.items():
        track = verify.TRACKS[size.preset]
        facts = dataclasses.asdict(size)
        assert {key: facts[key] for key in track.model} == track.model
        assert (track.word, track.target, track.val_tokens) == (name, size.goal, size.val_tokens)
        assert (track.presets, track.metric) == ((size.preset,), "steps")


def test_contestants_of_different_steps_are_compared_and_packed(tmp_path, monkeypatch, capsys):
    """The model of a packed variant is that of the first one with its patch."""
    arms = {}
    for hour, (name, steps) in enumerate({"muon": 90, "slow": 120}.items(), 13):
        source = GOOD.replace("0.01", f"0.0{hour}")
        folder = write_runs(tmp_path / "board" / name, source, steps, hour=hour)
        (folder / "plan.json").unlink()
        arms[name] = runs.source_hash(folder / "train_gpt.py")
    write_plan(tmp_path / "board", [100 + i for i in range(8)], arms=arms)
    (tmp_path / "board/notes.md").write_text("## Idea\n")
    assert verify.main([str(tmp_path / "board")]) == 0
    table = capsys.readouterr().out
    assert "| variant | runs | steps | final loss" in table
    assert re.search(
        r"\| slow \| 8 \| 120 \| 1.\d{4} ± 0.0024 \| \+0.0000 \| 0.0000 \| – \| \d", table
    )
    (tmp_path / "records").mkdir()
    monkeypatch.setattr(pack, "HERE", tmp_path / "records")
    monkeypatch.setattr("plot.plot", lambda *args, **kwargs: None)
    pack.make(tmp_path / "board", "board", None)
    (packed,) = (tmp_path / "records/tracks/optimizers-tiny").iterdir()
    assert not (packed / "slow/train_gpt.py").exists() and verify.main([str(packed)]) == 0
    for name in arms:
        assert fails(packed / name) == ""
    patch = packed / "slow/change.patch"
    whole = patch.read_bytes()
    patch.write_bytes(whole.replace(b"lr=0.014", b"lr=0.015"))
    assert "is not the source that the logs state" in fails(packed / "slow")
    patch.write_bytes(whole.replace(b"lr=0.013", b"lr=0.012"))
    assert "does not fit the source that it changes" in fails(packed / "slow")
    patch.unlink()
    assert "nothing shows which model ran" in fails(packed / "slow")


def test_run_ab_takes_contestants(tmp_path):
    """As programs, with their numbers as flags; what is wrong is refused before a plan is made."""
    (tmp_path / "x.py").write_text(GOOD)
    specs = [f"muon={run.HERE}/muon.py", f"{tmp_path}/x.py", "hot=--lr 0.06"]
    variants = run_ab.read_variants(specs, first=b"", taken=set())
    assert [*variants] == ["muon", "x", "hot"] and variants["hot"].flags == ["--lr", "0.06"]
    assert variants["x"].source.decode() == contest.assemble(GOOD)
    wrong = contest.assemble("SETTINGS = {'tiny': dict(rl=1)}\n" + GOOD)
    one = {"x": run_ab.Variant(wrong.encode(), [])}
    with pytest.raises(
        Fault, match="x cannot run with tiny: its optimizer: SETTINGS of tiny has an"
    ):
        run_ab.check_arguments(one, ["tiny"])
    (tmp_path / "x.py").write_text(GOOD.replace("def optimizer(", "linear = 1\n\n\ndef optimizer("))
    with pytest.raises(Fault, match="x.py, line 11: linear would replace"):
        run_ab.read_variants([f"{tmp_path}/x.py"], first=b"", taken=set())


@pytest.mark.slow
def test_a_plan_of_contestants(small, monkeypatch):
    """It runs, is interrupted, and goes on."""
    (small / "x.py").write_text(GOOD)
    for name in "train_000001", "val_000000":
        write_shard(small / f"x_{name}.bin", text(1000))
    flags = f"-- tiny --steps 3 --data {small}".split()
    arguments = [f"x={small}/x.py", "hot=--lr 0.1", "-n", "2", "--out", f"{small}/out", *flags]
    out = run_ab.make_plan(run_ab.parse(arguments))
    resume = [sys.executable, run_ab.__file__, "--resume", str(out)]
    assert subprocess.run(resume).returncode == 1  # it is another model than the track's
    hot = verify.collect(out / "hot")
    assert [run.config["numbers"] for run in hot.ended] == [{"lr": 0.1}] * 2
    hot.runs[0].path.unlink()
    assert subprocess.run(resume).returncode == 1
    assert len(verify.collect(out / "hot").ended) == 2
    plan = json.loads((out / "plan.json").read_text())
    assert plan["arguments"][0] == "tiny" and plan["flags"] == {"hot": ["--lr", "0.1"]}
    _, report = verify.study(out)
    assert "layers is 1, not the track's" in report and "| hot | 2 | 3 |" in report
