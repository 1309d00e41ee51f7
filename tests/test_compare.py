"""Interleaved runs are planned before the first one; none is lost, and none counts twice."""

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

import compare
import fake_runs
import pytest
import verify

import train_gpt
from tests.tools import SMALL, with_tiny, write_shard
from tests.tools import text as tokens

COMPARE = Path(compare.__file__)
# A train_gpt.py that writes a log without training. Empty files above its folder make it wait for a
# signal ("wait"), diverge ("nan") or fail ("refuse").
SCRIPT = f"""\
import os, pathlib, random, signal, sys, time
sys.path[:0] = [{str(Path(__file__).parent)!r}, {str(COMPARE.parent)!r}]
LOSS = 1.46
def main():
    import fake_runs
    seed = int(sys.argv[sys.argv.index("--seed") + 1])
    name = time.strftime("%Y-%m-%dT%H-%M-%S_", time.gmtime()) + f"{{seed:08x}}.txt"
    place = pathlib.Path("logs", name)
    text = fake_runs.ours(seed, random.Random(seed).gauss(LOSS, 0.001), argv=sys.argv[1:],
                          source=pathlib.Path(__file__).read_text())
    print("step:0/500 of", name)
    with open("../order", "a") as file:
        file.write(f"{{pathlib.Path.cwd().name}} {{seed}}\\n")
    place.with_suffix(".npz").write_text("weights")
    if pathlib.Path("../wait").exists():
        place.write_text(text[: text.rindex("train_time:")])
        place.with_suffix("").mkdir()
        place.with_suffix("").joinpath("0000010.state").write_text("checkpoint")
        signals = []
        signal.signal(signal.SIGINT, lambda number, _: signals.append(number))
        pathlib.Path("../waiting").write_text(f"{{os.getpid()}} ")
        while not signals:
            time.sleep(0.05)
        time.sleep(0.5)
        place.write_text(text.rpartition("step:")[0] + "INTERRUPTED\\n")
        sys.exit(130)
    if pathlib.Path("../nan").exists():
        place.write_text(text.rpartition("RESULT")[0] + "NON-FINITE: the loss is no number\\n")
        sys.exit(3)
    if pathlib.Path("../refuse").exists():
        sys.exit(2)
    place.write_text(text)
if __name__ == "__main__":
    main()
"""


@pytest.fixture
def script(tmp_path) -> Path:
    path = tmp_path / "old" / "train_gpt.py"
    path.parent.mkdir()
    path.write_text(SCRIPT)
    old = SCRIPT.splitlines(True)
    new = SCRIPT.replace("1.46", "1.44").splitlines(True)
    patch = difflib.unified_diff(old, new, "a/train_gpt.py", "b/train_gpt.py")
    (tmp_path / "better.patch").write_text("".join(patch))
    return path


@pytest.fixture
def run(capsys):
    """A function that runs compare.py in this process, and returns its exit status and what it
    prints to both streams."""

    def run(*arguments) -> tuple[int, str]:
        try:
            status = compare.main([str(argument) for argument in arguments])
        except SystemExit as end:
            status = end.code
        printed = capsys.readouterr()
        return status, printed.out + printed.err

    return run


def order(out: Path) -> list[list[str]]:
    return [line.split() for line in (out / "order").read_text().splitlines()]


def test_two_variants_take_turns_with_the_same_seeds(script, tmp_path, run, monkeypatch):
    out = tmp_path / "out"
    monkeypatch.setenv("XLA_FLAGS", "--x")
    variants = f"old={script}", f"better={tmp_path / 'better.patch'}"
    status, text = run(*variants, "-n", 4, "--out", out, "--", "tiny")
    assert status == 1  # "better" is no record: it has as many tokens
    assert "XLA_FLAGS is set, so these runs will not count as" in text.partition("[1/")[0]
    plan = json.loads((out / "plan.json").read_text())
    assert plan["n"] == len(set(plan["seeds"])) == 4 and list(plan["arms"]) == ["old", "better"]
    assert plan["arguments"] == ["tiny", "--target", "0"]
    assert order(out) == [[name, str(seed)] for seed in plan["seeds"] for name in plan["arms"]]
    assert not list(out.rglob("*.npz")) and text.count("step:0/500 of 20") == 8
    assert "## FAIL: better" in text and "no fewer tokens than the baseline" in text
    assert text.count("FAIL") == 2  # the tokens and the title
    changes = verify.changes(verify.collect(out / "better"), verify.collect(out / "old"))
    assert changes == pytest.approx([-0.02] * 4)
    assert socket.gethostname() not in json.dumps(plan)


def test_flags_and_files_of_others_make_variants(script, tmp_path, run):
    """They are compared with the first one; those with flags are no record. Weights remain on
    request."""
    out = tmp_path / "out"
    named = tmp_path / "named"  # its file is that of another folder
    named.mkdir()
    sha256 = hashlib.sha256(script.read_bytes()).hexdigest()
    (named / "train_gpt.sha256").write_text(f"{sha256}  ../old/train_gpt.py\n")
    variants = f"old={named}", f"better={tmp_path}/better.patch", "hot=--lr 0.03 --x='a b'"
    status, text = run(*variants, "-n", 2, "--out", out, "--keep_weights", "--", "tiny")
    assert status == 0 and "| better | 2 | " in text and "| -0.0200 | 0.0000 |" in text
    assert "- hot: note: run with the flags --lr 0.03 --x=a b\n" in text
    flags = ["--lr", "0.03", "--x=a b"]
    assert json.loads((out / "plan.json").read_text())["flags"] == {"hot": flags}
    for hot in verify.collect(out / "hot").runs:
        assert hot.argv == ["tiny", "--target", "0", *flags]
    assert "a record is what the file does" in verify.judge(out / "hot")[1]
    assert len(list(out.glob("old/logs/*.npz"))) == 2


@pytest.fixture
def unfinished(script, tmp_path, run) -> Path:
    """A plan of one variant and three runs, of which one has no log."""
    out = tmp_path / "out"
    status, _ = run(f"old={script}", "-n", 3, "--out", out, "--", "tiny")
    assert status == 0
    list((out / "old" / "logs").iterdir())[0].unlink()
    return out


def start(out: Path) -> tuple[subprocess.Popen, int]:
    """Starts compare.py in a process of its own, and waits for its run; returns the run's id, too.
    It would ignore SIGINT if this process did, as a job of a shell may."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    (out / "wait").touch()
    command = [sys.executable, COMPARE, "--resume", out]
    process = subprocess.Popen(command, text=True, stdout=subprocess.DEVNULL,
                               stderr=subprocess.PIPE, start_new_session=True)  # fmt: skip
    for _ in range(600):
        if (out / "waiting").exists() and (out / "waiting").read_text().endswith(" "):
            return process, int((out / "waiting").read_text())
        time.sleep(0.05)
    raise TimeoutError(out)


def test_ctrl_c_costs_one_run(unfinished, run):
    out = unfinished
    process, _ = start(out)
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does, to all that run in it
    process.wait(timeout=60)
    *_, log = sorted((out / "old" / "logs").glob("*.txt"), key=lambda path: path.stat().st_mtime)
    assert log.read_text().endswith("INTERRUPTED\n")  # it was waited for
    assert process.returncode == 130
    assert f"to continue: ./run.sh compare --resume {out}\n" in process.stderr.read()
    (out / "wait").unlink()
    status, text = run("--resume", out)
    assert not list(out.rglob("*.state"))
    assert status == 0 and "runs that were interrupted and repeated: 1" in text
    seeds = [int(seed) for _, seed in order(out)]
    assert len(seeds) == 5 and seeds[3] == seeds[4]
    assert sorted(run.seed for run in verify.collect(out / "old").ended) == sorted(seeds[:3])


def test_a_killed_parent_leaves_no_second_run_beside_the_first(unfinished, run):
    out = unfinished
    process, child = start(out)
    process.kill()
    process.wait(timeout=60)
    status, text = run("--resume", out)
    assert status == 2 and "is in use: wait for its run, or stop it" in text
    os.kill(child, signal.SIGKILL)


def test_a_run_that_fails_stops_the_plan_and_one_that_diverges_counts(unfinished, run):
    """A run that diverged is not repeated until it converges."""
    for name, status, message in (
        ("refuse", 2, "ended with status 2 and does not count"), ("nan", 1, "not finite"),
    ):  # fmt: skip
        (unfinished / name).touch()
        done, text = run("--resume", unfinished)
        assert done == status and message in text
        (unfinished / name).unlink()
    assert run("--resume", unfinished)[0] == 1 and len(order(unfinished)) == 5


@pytest.mark.parametrize("arguments, message", [
    ("a=old -n 1 -- tiny", "one run does not show how much runs differ"),
    ("a=old -n 2 -- tiny --target 1.5", "leave out --target"),
    ("old -n 2 -- tiny", "old: write NAME=PATH"),
    ("a=old hot=--seed=3 -n 2 -- tiny", "leave out --seed"),
    ("a=end.py -n 2 -- tiny", "must end with a newline"),
    ("a=border.py -n 2 -- tiny", "no line of 100 ="),
    ("--resume old", "--resume needs the folder of a plan"),
])  # fmt: skip
def test_what_cannot_work_is_refused(script, tmp_path, monkeypatch, run, arguments, message):
    (tmp_path / "end.py").write_text("x = 1")
    (tmp_path / "border.py").write_text("x = 1\n" + "=" * 100 + "\n")
    monkeypatch.chdir(tmp_path)
    before = sorted(tmp_path.iterdir())
    status, text = run(*arguments.split())
    assert status == 2 and message in text and sorted(tmp_path.iterdir()) == before


def test_a_plan_is_not_changed(script, tmp_path, run):
    """Nor is a finished run repeated because its log was changed."""
    out = compare.make_plan([f"old={script}"], 2, ["tiny"], tmp_path / "out")
    (out / "old/train_gpt.py").write_text(SCRIPT + "#\n")
    assert "has changed since the plan was made" in run("--resume", out)[1]
    plan = (out / "plan.json").read_text()
    (out / "plan.json").write_text(plan.replace('"machine": "', '"machine": "0'))
    assert "was begun on another machine" in run("--resume", out)[1]
    log = out / "old" / "logs" / "x.txt"
    log.write_text(fake_runs.ours(1, 1.46).replace('"seed": 1', '"seed": 2', 1))
    with pytest.raises(SystemExit, match="2"):
        compare.finished_seeds(out / "old")
    assert log.exists()


def test_the_real_script(tmp_path):
    """train_gpt.py itself is started by the launcher, and reads data by a relative path. If its log
    changes, verify.py has to change."""
    stage = "Stage(6, 1024, short=8, long=16, max_doc=0, lr=1.0)"
    source = with_tiny(train_gpt.SOURCE, "Layer(LONG, value_table=0)", stage).encode()
    compare.write_plan(tmp_path, dict(arms={}, flags={}), {"new": compare.Variant(source, [])})
    with tempfile.TemporaryDirectory(dir=COMPARE.parents[1] / "data") as data:
        for name in ("train_000001", "train_000002", "val_000000"):
            write_shard(Path(data, f"x_{name}.bin"), tokens(4000))
        flags = ["tiny", *SMALL, "--steps", "6", "--data", f"data/{Path(data).name}"]
        with open(tmp_path / "lock", "w") as lock:
            status = compare.run(tmp_path / "new", [*flags, "--seed", "7"], lock.fileno())
    evidence = verify.collect(tmp_path / "new")
    (first,) = evidence.ended
    assert status == 0 and [*verify.check_source(evidence, None)] == []
    log = first.path.read_text()
    assert str(tmp_path) not in log
    result = json.loads(log.rpartition("RESULT ")[2])
    assert first.validations[-1].step == first.steps == 6 and first.tokens == 6 * 1024
    assert (first.loss, first.seconds * 1000) == (result["val_loss"], result["train_time_ms"])
    assert first.argv == flags and first.seed == result["seed"] == 7
    assert "seed" not in first.config and first.config["target"] == 0
    assert first.devices == ["cpu"] and {"jax", "optax", "python"} <= first.versions.keys()
