"""./run.sh optimizers, and what verify.py and compare know of contestants."""

import dataclasses
import hashlib
import re

import pytest
import runs
import verify
from fake_runs import data, write_ours
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


@pytest.fixture
def small(tmp_path, monkeypatch):
    """train_gpt_simple.py with a small `tiny`, for contestants that are trained or checked."""
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


def refusal(capsys, function, *arguments) -> str:
    """What a function prints when it refuses these arguments."""
    with pytest.raises(SystemExit, match="2"):
        function(*arguments)
    return capsys.readouterr().err


# ---- Contestants ---------------------------------------------------------------------------------
@pytest.mark.parametrize("old, new, message", [
    ("import jax\n", "if True:\n    def forward(w): pass\n", "forward would replace that of"),
    ("import jax\n", "from jax.numpy import *\n", "import names as they are"),
    ('    """AdamW."""', "    global mean_loss", "mean_loss would replace that of"),
    ('    """AdamW."""', "    params.n += 1", "params.n += 1 would be run once, and not in each"),
    ("import jax\n", "import jax\nimport time\n", "import time would be run once, and not in each"),
    ("import jax\n", f"'''\n{contest.BEGIN}\n'''\n", "at which a log would end its source"),
])  # fmt: skip
def test_a_text_that_would_change_the_model_or_the_log_is_refused(
    old, new, message, tmp_path, capsys
):
    path = tmp_path / "x.py"
    path.write_text(GOOD)
    assert contest.read(path) == GOOD
    path.write_text(GOOD.replace(old, new, 1))
    assert message in refusal(capsys, contest.read, path)


SHAPE = "def initial_value(name, shape, key):\n    return jax.numpy.zeros(shape)[None]\n"
VALIDATED = "def validated_params(params, state):\n    return state\n"


@pytest.mark.parametrize("source, message", [
    (f"{GOOD}\n\n{SHAPE}", "initial_value has float32 (1, 32) at ['blocks.0.attn.k.bias'], not"),
    (f"{GOOD}\n\n{VALIDATED}", "validated_params has "),
    ("SETTINGS = {'tiny': dict(rl=1)}\n" + GOOD, "no run would use SETTINGS of tiny: rl"),
])  # fmt: skip
def test_functions_and_numbers_of_another_benchmark_are_refused(source, message, small, capsys):
    assert message in refusal(capsys, checked, source)


def checked(source: str) -> None:
    """Checks a contestant as run.py does."""
    path = contest.Path("x.py")
    path.write_text(source)
    module = run.load(path)
    run.check_numbers(module, path)
    size, _, numbers = module.parse_config(["tiny"])
    numbers = {name: 0.01 if value is True else value for name, value in numbers.items()}
    run.check(module, path, size, numbers)


def test_a_contestant_is_trained(small, monkeypatch, capsys):
    """Its log can be read, and states its numbers and its whole source."""
    (small / "data").symlink_to(ROOT / "data")
    (small / "x.py").write_text(GOOD)
    shards = small / "shards"
    shards.mkdir()
    for first, name in enumerate(("train_000001", "val_000000")):
        write_shard(shards / f"x_{name}.bin", text(1000, first))
    monkeypatch.setattr(run, "ROOT", small)
    monkeypatch.setattr(run, "set_compilation_cache", lambda: None)
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
    assert "there is no optimizer and no file moun" in refusal(capsys, run.main, ["moun"])
    with pytest.raises(SystemExit, match="2"):
        run.main([*flags.split(), "--rl", "3"])
    assert "unrecognized arguments: --rl 3" in capsys.readouterr().err
    write_shard(shards / "x_val_000000.bin", [384] * 1000)  # JAX would read the last row
    assert "has token 384, and the model has 384" in refusal(capsys, run.main, flags.split())
    module = run.load(small / "x.py")  # attempt.py starts it as it is
    for tokens, count in (text(1000), 1001), ([256, 0] * 500, 1000):
        write_shard(shards / "x_train_000001.bin", tokens, count=count)
        assert "is no whole shard" in refusal(capsys, module.main, ["tiny", "--data=shards"])


# ---- Evidence ------------------------------------------------------------------------------------
TRACK = verify.TRACKS["optimizers-tiny"]
LOSSES = [TRACK.target - 0.05 + i / 1000 for i in range(8)]


def fails(folder, losses=LOSSES, steps=100, **facts) -> str:
    """What verify.py finds in made-up runs of a contestant, all lines of FAIL; facts replace what
    their logs would state."""
    config = dict(preset="optimizers-tiny", val_tokens=TRACK.val_tokens, **TRACK.model)
    config |= facts.pop("config", {})
    whole = facts.pop("whole", contest.assemble(GOOD))
    write_ours(folder, losses, steps=steps, tokens=steps * 1024, source=whole,
               data=data(TRACK.shards), config=config, **facts)  # fmt: skip
    evidence = verify.collect(folder)
    assert verify.infer_track(evidence) == "optimizers-tiny"
    holds, printed = verify.report(evidence, None, TRACK, TRACK.target)
    found = "\n".join(line for line in printed.splitlines() if "FAIL**" in line)
    assert holds == (not found)
    return found


def test_eight_runs_of_a_contestant_hold_and_those_of_another_model_do_not(tmp_path):
    assert fails(tmp_path / "0") == ""
    source = contest.assemble(GOOD)
    other = source.replace("jax.nn.relu(", "jax.nn.gelu(")
    assert other != source
    for i, (facts, message) in enumerate((
        (dict(config=dict(D=256)), f"D is 256, not the track's {TRACK.model['D']}"),
        (dict(config=dict(val_tokens=1024)), "validated on 1024 tokens, not 32,768"),
        (dict(argv=["tiny", "--target", "0", "--lr", "1"]), "a record is what the file does with"),
        (dict(whole=other), "outside its section Optimizer, the source is not"),
        (dict(losses=[x + 0.2 for x in LOSSES]), "for a mean below"),
    ), 1):  # fmt: skip
        assert message in fails(tmp_path / str(i), **facts)


def test_verify_knows_todays_file(tmp_path, monkeypatch):
    """Its model, its targets, and the hash of all that contestants share."""
    shared = contest.outside(contest.PLAIN.read_text("utf-8"))
    sha256 = hashlib.sha256(shared.encode()).hexdigest()
    assert sha256 in verify.PLAIN, f"train_gpt_simple.py has changed: add {sha256} to PLAIN"
    monkeypatch.chdir(tmp_path)
    (tmp_path / "x.py").write_text(GOOD)
    for name, size in run.load(contest.Path("x.py")).SIZES.items():
        track = verify.TRACKS[size.preset]
        facts = dataclasses.asdict(size)
        assert {key: facts[key] for key in track.model} == track.model
        assert (track.word, track.target, track.val_tokens) == (name, size.goal, size.val_tokens)
        assert (track.presets, track.metric) == ((size.preset,), "steps")
