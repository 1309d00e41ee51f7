"""Interleaved runs: planned before the first, none lost, none counted twice."""

import difflib
import hashlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest
import run_ab
import verify

import train_gpt
from tests.tools import SMALL, with_tiny, write_shard
from tests.tools import text as tokens

RUN_AB = Path(run_ab.__file__)
# A train_gpt.py that writes a log at once. What it does besides, files in its folder say.
SCRIPT = f"""\
import os, pathlib, random, signal, sys, time
sys.path[:0] = [{str(Path(__file__).parent)!r}, {str(RUN_AB.parent)!r}]
import fake_runs
LOSS = 1.46
seed = int(sys.argv[sys.argv.index("--seed") + 1])
name = time.strftime("%Y-%m-%dT%H-%M-%S_", time.gmtime()) + f"{{seed:08x}}.txt"
place = pathlib.Path("logs", name)
text = fake_runs.ours(seed, random.Random(seed).gauss(LOSS, 0.001), argv=sys.argv[1:],
                      source=pathlib.Path(__file__).read_text())
with open("../order", "a") as file:
    file.write(f"{{pathlib.Path.cwd().name}} {{seed}}\\n")
place.with_suffix(".npz").write_text("weights")
if pathlib.Path("../wait").exists():
    place.write_text(text[:-200])
    signals = []
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda number, _: signals.append(number))
    pathlib.Path("../waiting").write_text(f"{{os.getpid()}} ")
    while not signals:
        time.sleep(0.05)
    time.sleep(0.5)
    place.write_text(text.rpartition("step:")[0] + f"INTERRUPTED by {{signals[0]}}\\n")
    sys.exit(128 + signals[0])
if pathlib.Path("../nan").exists():
    place.write_text(text.rpartition("RESULT")[0] + "NON-FINITE: the loss is no number\\n")
    sys.exit(3)
if pathlib.Path("../refuse").exists():
    sys.exit(2)
place.write_text(text)
"""


@pytest.fixture
def script(tmp_path) -> Path:
    path = tmp_path / "old" / "train_gpt.py"
    path.parent.mkdir()
    path.write_text(SCRIPT)
    versions = (text.splitlines(True) for text in (SCRIPT, SCRIPT.replace("1.46", "1.44")))
    patch = difflib.unified_diff(*versions, "a/train_gpt.py", "b/train_gpt.py")
    (tmp_path / "better.patch").write_text("".join(patch))
    return path


def start(*words, **options) -> subprocess.Popen:
    """Where a shell has made SIGINT ignored, children would inherit that."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    command = [sys.executable, RUN_AB, *map(str, words)]
    pipes = dict(text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    return subprocess.Popen(command, **pipes, **options)


def run(*words, **options) -> tuple[int, str, str]:
    process = start(*words, **options)
    out, err = process.communicate(timeout=120)
    return process.returncode, out, err


def order(out: Path) -> list[list[str]]:
    return [line.split() for line in (out / "order").read_text().splitlines()]


def test_two_arms_take_turns_with_the_same_seeds(script, tmp_path):
    out = tmp_path / "out"
    words = script, tmp_path / "better.patch", "-n", 4, "--out", out, "--", "tiny"
    status, text, err = run(*words, env=os.environ | {"XLA_FLAGS": ""})
    assert (status, err) == (1, "")  # they hold as runs, but better has no fewer tokens
    assert "XLA_FLAGS is set: these runs will not count as a record\n" in text.partition("[1/")[0]
    assert f'"{run_ab.STEERS.pattern}"' in train_gpt.SOURCE  # the variables that a log states
    plan = json.loads((out / "plan.json").read_text())
    assert plan["n"] == len(set(plan["seeds"])) == 4 and list(plan["arms"]) == ["old", "better"]
    assert plan["arguments"] == ["tiny", "--target", "0"]
    assert order(out) == [[arm, str(seed)] for seed in plan["seeds"] for arm in plan["arms"]]
    assert not list(out.rglob("*.npz"))
    assert "## FAIL: better" in text and "no fewer tokens than the baseline" in text
    assert text.count("FAIL") == 2  # that, and the title
    changes = verify.changes(verify.collect(out / "better"), verify.collect(out / "old"))
    assert changes == pytest.approx([-0.02] * 4)


def test_many_arms_or_flags_end_in_a_table(script, tmp_path):
    out, better = tmp_path / "out", tmp_path / "better.patch"
    status, text, _ = run(script, better, f"same={script.parent}", "-n", 3, "--out", out)
    assert status == 1  # the third arm repeats the first one, run by run
    assert "- same: **FAIL** a log is in both" in text
    assert "| better | 3 | " in text and "| -0.0200 | 0.0000 |" in text
    words = script, better, "-n", 3, "--out", tmp_path / "two", "--", "tiny", "--steps", "500"
    status, text, _ = run(*words)
    assert status == 0 and "FAIL" not in text and "| better | 3 | " in text


def test_every_plan_has_fresh_seeds_and_tells_nothing_of_its_machine(script, tmp_path):
    for name in "ab":
        assert run(script, "-n", 3, "--out", tmp_path / name, "--", "tiny")[0] == 0
    a, b = (json.loads((tmp_path / name / "plan.json").read_text()) for name in "ab")
    assert not set(a["seeds"]) & set(b["seeds"])
    assert a["machine"] != b["machine"] and socket.gethostname() not in json.dumps(a)


@pytest.fixture
def unfinished(script, tmp_path) -> Path:
    """A plan of one arm and three runs, the log of the first of which is gone."""
    out = tmp_path / "out"
    run(script, "-n", 3, "--out", out, "--", "tiny")
    next((out / "old" / "logs").iterdir()).unlink()
    return out


def wait_for(path: Path) -> int:
    for _ in range(600):
        if path.exists() and path.read_text().endswith(" "):
            return int(path.read_text())
        time.sleep(0.05)
    raise TimeoutError(path)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_costs_one_run(unfinished, number):
    out = unfinished
    (out / "wait").touch()
    process = start("--resume", out, start_new_session=True)
    wait_for(out / "waiting")
    os.killpg(process.pid, number)  # as a terminal does, to all that run in it
    process.wait(timeout=30)
    *_, log = sorted((out / "old" / "logs").glob("*.txt"), key=lambda path: path.stat().st_mtime)
    assert log.read_text().endswith(f"INTERRUPTED by {number:d}\n")  # it was waited for
    assert (
        process.returncode == 128 + number and f"to go on: --resume {out}" in process.stderr.read()
    )
    (out / "wait").unlink()
    status, text, _ = run("--resume", out)
    assert status == 0 and "1 interrupted and run again" in text
    seeds = [int(seed) for _, seed in order(out)]
    assert len(seeds) == 5 and seeds[3] == seeds[4] in seeds[:3]
    assert sorted(run.seed for run in verify.collect(out / "old").ended) == sorted(seeds[:3])


def test_a_killed_parent_leaves_no_second_run_beside_the_first(unfinished):
    out = unfinished
    (out / "wait").touch()
    process = start("--resume", out)
    child = wait_for(out / "waiting")
    process.kill()
    process.wait(timeout=30)
    status, _, err = run("--resume", out)
    assert status == 2 and "is in use: one of its runs is going on" in err
    (out / "wait").unlink()
    os.kill(child, signal.SIGKILL)
    statuses = (run("--resume", out)[0] for _ in range(100))
    assert next(status for status in statuses if status != 2) == 0


def test_a_run_that_fails_stops_the_plan_and_one_that_diverges_counts(unfinished):
    """What diverged is not run again until it converges."""
    (unfinished / "refuse").touch()
    status, _, err = run("--resume", unfinished)
    assert status == 1 and "ended with status 2 and counts as none" in err
    (unfinished / "refuse").unlink()
    (unfinished / "nan").touch()
    status, text, _ = run("--resume", unfinished)
    assert status == 1 and "not finite" in text
    (unfinished / "nan").unlink()
    assert run("--resume", unfinished)[0] == 1 and len(order(unfinished)) == 5


@pytest.mark.parametrize("words, said", [
    ("", "name at least one train_gpt.py"),
    ("old -n 1", "-n must be at least 2"),
    ("old -n 2 -- tiny --target 1.5", "--target is run_ab.py's"),
    ("old -n 2 -- tiny --seed=3", "--seed is run_ab.py's"),
    ("better.patch -n 2", "the first arm must be a train_gpt.py"),
    ("old old/train_gpt.py -n 2", "'old' is taken"),
    ("lock=old -n 2", "'lock' is taken"),
    ("end.py -n 2", "it must end with a newline"),
    ("border.py -n 2", "no line of 100 ="),
    ("old nothing.patch -n 2", "does not apply to the first arm"),
    ("--resume old -n 3", "give nothing else"),
])  # fmt: skip
def test_what_cannot_work_is_refused(script, tmp_path, words, said):
    (tmp_path / "end.py").write_text("x = 1")
    (tmp_path / "border.py").write_text("x = 1\n" + "=" * 100 + "\n")
    (tmp_path / "nothing.patch").touch()
    status, _, err = run(*words.split(), cwd=tmp_path)
    assert status == 2 and said in err and "Traceback" not in err


def test_a_plan_is_not_changed(unfinished):
    source, file = unfinished / "old" / "train_gpt.py", unfinished / "plan.json"
    source.write_text(SCRIPT + "#\n")
    assert "was changed after the plan was made" in run("--resume", unfinished)[2]
    source.write_text(SCRIPT)
    file.write_text(json.dumps(json.loads(file.read_text()) | dict(machine="0" * 16)))
    assert "was begun on another machine" in run("--resume", unfinished)[2]


def test_the_real_script(tmp_path, monkeypatch):
    """With train_gpt.py itself, started by the launcher, with relative data and the compilation
    cache of its folder. Should its log change, the judge has to."""
    monkeypatch.delenv("JAX_COMPILATION_CACHE_DIR")
    script = tmp_path / "train_gpt.py"
    stage = "Stage(6, 1024, short=8, long=16, max_doc=0, lr=1.0)"
    script.write_text(with_tiny(train_gpt.SOURCE, "Layer(LONG, value_table=0)", stage))
    with tempfile.TemporaryDirectory(dir=RUN_AB.parents[1] / "data") as data:
        for name in ("train_000001", "train_000002", "val_000000"):
            write_shard(Path(data, f"x_{name}.bin"), tokens(4000))
        flags = ["tiny", *SMALL[:-2], "--steps", "6"]
        flags += ["--data", f"data/{Path(data).name}"]
        words = f"new={script}", "-n", 2, "--out", tmp_path / "out", "--", *flags
        status, text, err = run(*words)
    first, second = verify.collect(tmp_path / "out" / "new").runs
    assert first.ended == second.ended == "end of schedule", err
    assert status == 1 and "a record is what the file does" in text  # it has flags
    assert "planned" not in text.partition("as many runs as planned")[2].splitlines()[0]
    assert first.environment["JAX_COMPILATION_CACHE_DIR"] == "../cache"
    assert first.environment["GLIBC_TUNABLES"] == "glibc.malloc.hugetlb=1"
    assert (tmp_path / "out" / "cache").is_dir()
    assert str(tmp_path) not in (said := first.path.read_text())
    result = json.loads(said.rpartition("RESULT ")[2])
    assert first.source == hashlib.sha256(script.read_bytes()).hexdigest()
    assert first.validations[-1].step == first.steps == 6 and first.tokens == 6 * 1024
    assert (first.loss, first.seconds * 1000) == (result["val_loss"], result["train_time_ms"])
    assert first.argv == [*flags, "--target", "0"] and first.seed == result["seed"]
    assert "seed" not in first.config and first.config["target"] == 0
    assert first.data[-1]["file"] == "x_val_000000.bin" and first.name.startswith(first.began)
    assert first.devices == ["cpu"] and {"jax", "optax", "python"} <= first.versions.keys()
