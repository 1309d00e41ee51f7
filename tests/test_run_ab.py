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
from types import SimpleNamespace

import pytest
import run_ab
import verify
from fake_runs import write_ours
from messages import Fault

import train_gpt
from tests.tools import SMALL, with_tiny, write_shard
from tests.tools import text as tokens

RUN_AB = Path(run_ab.__file__)
# A train_gpt.py that writes a log without training. Empty files above its folder make it wait for a
# signal ("wait"), diverge ("nan") or fail ("refuse").
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
print("layer 0", flush=True)
print("log in", place)
print("step:0/500 of", name)
print('RESULT {{"reason": "x", "weights": "2026.npz"}}')
print("next: ./run.sh sample", place.with_suffix(".npz"))
with open("../order", "a") as file:
    file.write(f"{{pathlib.Path.cwd().name}} {{seed}}\\n")
place.with_suffix(".npz").write_text("weights")
if pathlib.Path("../wait").exists():
    place.write_text(text[: text.rindex("train_time:")])
    place.with_suffix("").mkdir()
    place.with_suffix("").joinpath("0000010.state").write_text("checkpoint")
    signals = []
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
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
STRICT = """\
import sys
def parse_config(argv):
    sys.exit(f"there is no preset {argv[0]}")
"""


@pytest.fixture
def script(tmp_path) -> Path:
    path = tmp_path / "old" / "train_gpt.py"
    path.parent.mkdir()
    path.write_text(SCRIPT)
    (tmp_path / "strict.py").write_text(STRICT)
    old = SCRIPT.splitlines(True)
    new = SCRIPT.replace("1.46", "1.44").splitlines(True)
    patch = difflib.unified_diff(old, new, "a/train_gpt.py", "b/train_gpt.py")
    (tmp_path / "better.patch").write_text("".join(patch))
    return path


def start(*arguments, **options) -> subprocess.Popen:
    """Starts run_ab.py. It would ignore SIGINT and SIGHUP if this process did, as a job of a shell
    or of nohup may."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    command = [sys.executable, RUN_AB, *map(str, arguments)]
    pipes = dict(text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    return subprocess.Popen(command, **pipes, **options)


def run(*arguments, **options) -> tuple[int, str, str]:
    process = start(*arguments, **options)
    out, err = process.communicate(timeout=300)
    return process.returncode, out, err


def order(out: Path) -> list[list[str]]:
    return [line.split() for line in (out / "order").read_text().splitlines()]


def test_two_variants_take_turns_with_the_same_seeds(script, tmp_path):
    out = tmp_path / "out"
    arguments = script, tmp_path / "better.patch", "-n", 4, "--out", out, "--", "tiny"
    status, text, err = run(*arguments, env=os.environ | {"XLA_FLAGS": "--x"})
    assert (status, err) == (1, "")  # "better" is no record: it has as many tokens
    assert "XLA_FLAGS is set, so these runs will not count as" in text.partition("[1/")[0]
    assert f'"{run_ab.LOGGED_VARIABLES.pattern}"' in train_gpt.SOURCE
    plan = json.loads((out / "plan.json").read_text())
    assert plan["n"] == len(set(plan["seeds"])) == 4 and list(plan["arms"]) == ["old", "better"]
    assert plan["arguments"] == ["tiny", "--target", "0"]
    assert order(out) == [[name, str(seed)] for seed in plan["seeds"] for name in plan["arms"]]
    assert not list(out.rglob("*.npz"))
    assert text.count("step:0/500 of 20") == 8
    assert f"old, seed {plan['seeds'][0]}, log in {out}/old/logs\n" in text
    assert text.count("/logs, about 1 min left\n") == 7
    assert text.count("layer 0\n") == 1 and text.count('\nRESULT {"reason": "x"}\n') == 8
    assert f"\n./run.sh verify {out}/better {out}/old\n" in text
    assert "log in logs/" not in text and "next:" not in text  # paths from the variant's folder
    assert "## FAIL: better" in text and "no fewer tokens than the baseline" in text
    assert text.count("FAIL") == 2  # the tokens and the title
    changes = verify.changes(verify.collect(out / "better"), verify.collect(out / "old"))
    assert changes == pytest.approx([-0.02] * 4)


def test_runs_go_on_where_nobody_reads(script, tmp_path):
    """The status is that of the verdict: one variant of 4 runs that hold."""
    reader, pipe = os.pipe()
    os.close(reader)
    command = [sys.executable, RUN_AB, script, "-n", "4", "--out", tmp_path / "out", "--", "tiny"]
    done = subprocess.run(command, stdout=pipe, stderr=subprocess.PIPE, timeout=300)
    os.close(pipe)
    assert (done.returncode, done.stderr, len(order(tmp_path / "out"))) == (0, b"", 4)


def test_the_time_left_is_that_of_runs_like_those_that_wait():
    assert run_ab.time_left(["a", "b"], {"a": [], "b": []}) == ""
    assert run_ab.time_left(["a", "b"], {"a": [60, 80], "b": []}) == ", about 3 min left"
    assert run_ab.time_left(["b"] * 60, {"a": [9], "b": [65]}) == ", about 1 h 5 min left"


def test_many_variants_or_flags_end_in_a_table(script, tmp_path):
    out, better = tmp_path / "out", tmp_path / "better.patch"
    named = tmp_path / "named"  # its file is that of another folder
    named.mkdir()
    sha256 = hashlib.sha256(script.read_bytes()).hexdigest()
    (named / "train_gpt.sha256").write_text(f"{sha256}  ../old/train_gpt.py\n")
    status, text, _ = run(f"old={named}", better, f"same={script.parent}", "-n", 3, "--out", out)
    assert status == 1  # the third variant has the logs of the first one
    assert "- same: **FAIL** a log is in both" in text
    assert "| better | 3 | " in text and "| -0.0200 | 0.0000 |" in text
    arguments = script, better, "-n", 3, "--out", tmp_path / "two", "--", "tiny", "--steps", "500"
    status, text, _ = run(*arguments)
    assert status == 0 and "FAIL" not in text and "| better | 3 | " in text


def test_flags_make_a_variant(script, tmp_path, capsys):
    """It is compared with the first one, but is no record."""
    out = tmp_path / "out"
    arguments = script, "hot=--lr 0.03 --x=1", "-n", 3, "--out", out, "--", "tiny"
    status, text, err = run(*arguments)
    assert (status, err) == (0, "") and "| hot | 3 | " in text
    assert "- hot: note: run with the flags --lr 0.03 --x=1\n" in text and "same source" not in text
    flags = ["--lr", "0.03", "--x=1"]
    assert json.loads((out / "plan.json").read_text())["flags"] == {"hot": flags}
    for hot in verify.collect(out / "hot").runs:
        assert hot.argv == ["tiny", "--target", "0", *flags]
    assert verify.main([str(out / "old")]) == 0 and verify.main([str(out / "hot")]) == 1
    assert "run with tiny --target 0 --lr 0.03 --x=1; a record is" in capsys.readouterr().out


def test_a_variant_is_added(unfinished, tmp_path, capsys):
    """It runs with the seeds of the plan, whose other runs are not repeated. It is no record."""
    out = unfinished
    before = json.loads((out / "plan.json").read_text())
    status, text, err = run("--resume", out, tmp_path / "better.patch")
    assert (status, err) == (0, "") and "| better | 3 | " in text and "-0.0200 | 0.0000" in text
    assert "or one was added to the plan later, so their runs were not interleaved" in text
    plan = json.loads((out / "plan.json").read_text())
    assert list(plan["arms"]) == ["old", "better"] and plan["seeds"] == before["seeds"]
    assert list(plan["added"]) == ["better"]
    assert plan["created"] == before["created"] <= plan["added"]["better"]
    names = [name for name, _ in order(out)]
    assert names.count("old") == 3 + 1 and names.count("better") == 3
    assert verify.main([str(out / "old")]) == 0 and verify.main([str(out / "better")]) == 1
    assert "added to a plan whose seeds had been used" in capsys.readouterr().out
    assert "'better' is taken" in run("--resume", out, tmp_path / "better.patch")[2]
    assert "there is no preset" in run("--resume", out, f"x={tmp_path}/strict.py")[2]
    assert json.loads((out / "plan.json").read_text()) == plan and not (out / "x").exists()


def test_weights_remain_on_request(script, tmp_path):
    out = tmp_path / "out"
    run(script, "-n", 2, "--out", out, "--keep_weights", "--", "tiny")
    assert len(list(out.glob("old/logs/*.npz"))) == 2
    assert '"weights": "2026.npz"' in run("--resume", out, "y=--lr 2")[1]
    assert run("--resume", out, "x=--lr 3")[0] == 0
    assert len(list(out.glob("*/logs/*.npz"))) == 6


def test_every_plan_has_fresh_seeds_and_tells_nothing_of_its_machine(script, tmp_path):
    for name in "ab":
        assert run(script, "-n", 3, "--out", tmp_path / name, "--", "tiny")[0] == 0
    a, b = (json.loads((tmp_path / name / "plan.json").read_text()) for name in "ab")
    assert not set(a["seeds"]) & set(b["seeds"])
    assert a["machine"] != b["machine"] and socket.gethostname() not in json.dumps(a)


@pytest.fixture
def unfinished(script, tmp_path) -> Path:
    """A plan of one variant and three runs, of which one has no log."""
    out = tmp_path / "out"
    run(script, "-n", 3, "--out", out, "--", "tiny")
    list((out / "old" / "logs").iterdir())[0].unlink()
    return out


def wait_for(path: Path) -> int:
    """Returns the process id in a file as soon as it is complete."""
    for _ in range(600):
        if path.exists() and path.read_text().endswith(" "):
            return int(path.read_text())
        time.sleep(0.05)
    raise TimeoutError(path)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_costs_one_run(unfinished, number):
    out = unfinished
    (out / "wait").touch()
    process = start("--resume", out, start_new_session=True)
    wait_for(out / "waiting")
    os.killpg(process.pid, number)  # as a terminal does, to all that run in it
    process.wait(timeout=60)
    *_, log = sorted((out / "old" / "logs").glob("*.txt"), key=lambda path: path.stat().st_mtime)
    assert log.read_text().endswith(f"INTERRUPTED by {number:d}\n")  # it was waited for
    assert process.returncode == 128 + number
    assert f"to continue: ./run.sh compare --resume {out}\n" in process.stderr.read()
    (out / "wait").unlink()
    status, text, _ = run("--resume", out)
    assert not list(out.rglob("*.state"))
    assert status == 0 and "runs that were interrupted and repeated: 1;" in text
    seeds = [int(seed) for _, seed in order(out)]
    assert len(seeds) == 5 and seeds[3] == seeds[4]
    assert seeds[4] in seeds[:3]
    assert sorted(run.seed for run in verify.collect(out / "old").ended) == sorted(seeds[:3])


def test_a_killed_parent_leaves_no_second_run_beside_the_first(unfinished):
    out = unfinished
    (out / "wait").touch()
    process = start("--resume", out)
    child = wait_for(out / "waiting")
    process.kill()
    process.wait(timeout=60)
    status, _, err = run("--resume", out)
    assert status == 2 and "is in use: wait for its run, or stop it" in err
    (out / "wait").unlink()
    os.kill(child, signal.SIGKILL)
    for _ in range(100):
        status, _, _ = run("--resume", out)
        if status != 2:  # 2: the killed child still has the lock
            break
    assert status == 0


def test_a_run_that_fails_stops_the_plan_and_one_that_diverges_counts(unfinished):
    """A run that diverged is not repeated until it converges."""
    (unfinished / "refuse").touch()
    status, _, err = run("--resume", unfinished)
    assert status == 2 and "ended with status 2 and does not count" in err
    (unfinished / "refuse").unlink()
    (unfinished / "nan").touch()
    status, text, _ = run("--resume", unfinished)
    assert status == 1 and "not finite" in text
    (unfinished / "nan").unlink()
    assert run("--resume", unfinished)[0] == 1 and len(order(unfinished)) == 5


@pytest.mark.parametrize("arguments, message", [
    ("", "name at least one train_gpt.py"),
    ("old -n 1", "-n must be at least 2"),
    ("old -n 2 tiny --steps 9", "--steps is no flag of ./run.sh compare: flags of train_gpt.py"),
    ("old -n 2 --ot x", "run.sh compare: there is no flag --ot: did you mean --out?"),
    ("old -n 2 tiny", "no such file: tiny; if it is a preset, it comes last, as in  -- tiny"),
    ("old -n 2 -- tiny --target 1.5", "leave out --target, because run_ab.py sets it"),
    ("old -n 2 -- tiny --seed=3", "leave out --seed, because run_ab.py sets it"),
    ("old -n 2 -- tiny --help", "leave out --help, because all runs train"),
    ("strict.py -n 2 -- tony", "strict cannot run with tony --target 0: there is no preset tony"),
    ("better.patch -n 2", "the first variant must be a train_gpt.py"),
    ("old old/train_gpt.py -n 2", "'old' is taken"),
    ("lock=old -n 2", "'lock' is taken"),
    ("hot=--lr -n 2", "hot=--lr: the first variant must be a train_gpt.py"),
    ("old hot=--seed=3 -n 2", "leave out --seed"),
    ("end.py -n 2", "must end with a newline"),
    ("border.py -n 2", "no line of 100 ="),
    ("old nothing.patch -n 2", "does not apply to the first variant"),
    ("named -n 2", "names ../old/train_gpt.py, which has another sha256"),
    ("--resume old -n 3", "leave them out"),
])  # fmt: skip
def test_what_cannot_work_is_refused(script, tmp_path, arguments, message):
    (tmp_path / "end.py").write_text("x = 1")
    (tmp_path / "border.py").write_text("x = 1\n" + "=" * 100 + "\n")
    (tmp_path / "nothing.patch").touch()
    (tmp_path / "named").mkdir()
    (tmp_path / "named/train_gpt.sha256").write_text(f"{'0' * 64}  ../old/train_gpt.py\n")
    before = sorted(tmp_path.iterdir())
    status, _, err = run(*arguments.split(), cwd=tmp_path)
    assert status == 2 and message in err and "Traceback" not in err
    assert err.count("\n") == 1 and sorted(tmp_path.iterdir()) == before


def test_the_record_is_refused_where_there_is_no_gpu(script, tmp_path, monkeypatch):
    monkeypatch.delenv("JAX_PLATFORMS")
    nothing = run_ab.machine.Machine([], why_none="this machine has no NVIDIA GPU")
    monkeypatch.setattr(run_ab.machine, "find_machine", lambda: nothing)
    for flags in "", "-- record", "-- record92", "-- --steps 9":
        with pytest.raises(Fault, match="because this machine has no NVIDIA GPU; to train"):
            run_ab.make_plan(run_ab.parse(f"{script} -n 2 --out {tmp_path}/x {flags}".split()))
    assert not (tmp_path / "x").exists()


def test_a_plan_is_not_changed(unfinished):
    source = unfinished / "old" / "train_gpt.py"
    file = unfinished / "plan.json"
    source.write_text(SCRIPT + "#\n")
    assert "has changed since the plan was made" in run("--resume", unfinished)[2]
    source.write_text(SCRIPT)
    file.write_text(json.dumps(json.loads(file.read_text()) | dict(machine="0" * 16)))
    assert "was begun on another machine" in run("--resume", unfinished)[2]


def test_a_finished_run_is_not_repeated_because_its_log_was_changed(tmp_path):
    folder = write_ours(tmp_path / "a")
    log, *_ = (folder / "logs").iterdir()
    (folder / "logs" / "._x.txt").write_bytes(b"of macOS")
    text = log.read_text()
    for changed in (
        text.replace("\nRESULT", "\nRESULT {}\nRESULT").encode(),
        text.replace("\nRESULT", "\n  RESULT").encode(),
        text.replace("\n", "\r").encode(),
        text.encode("utf-16"),
    ):
        log.write_bytes(changed)
        with pytest.raises(Fault, match="has a RESULT, but cannot be read: .*; restore this file"):
            run_ab.finished_seeds(folder)
        assert log.exists()
    other = log.rename(log.with_suffix(".TXT"))
    other.write_text(text)
    with pytest.raises(Fault, match="TXT may be the log of a run that would be repeated"):
        run_ab.finished_seeds(folder)
    other.rename(log)
    assert len(run_ab.finished_seeds(folder)) == 5 and not (folder / "unfinished").exists()


def test_a_plan_of_another_form_is_refused(unfinished_plan):
    file, plan = unfinished_plan
    assert run_ab.read_plan(file.parent)["keep_weights"] is False
    for name, value in ("salt", None), ("keep_weights", "no"), ("seeds", {}), ("flags", []):
        file.write_text(json.dumps(plan | {name: value}))
        with pytest.raises(Fault, match=f"{name} of .*plan.json cannot be"):
            run_ab.read_plan(file.parent)


@pytest.fixture
def unfinished_plan(tmp_path) -> tuple[Path, dict]:
    """A plan without runs: its file, and what it states."""
    variants = {"a": run_ab.Variant(b"\n", [])}
    plan = dict(created=run_ab.now(), n=2, seeds=[1, 2], arguments=["tiny"], salt="", machine="",
                arms={}, flags={}, added={})  # fmt: skip
    run_ab.write_plan(tmp_path, plan, variants)
    return tmp_path / "plan.json", plan


def test_flags_may_have_quotes_and_a_file_crlf(tmp_path):
    (tmp_path / "a.py").write_bytes(b"x = 1\r\n")
    specs = [f"{tmp_path}/a.py", "b=--data 'my folder' --lr=3"]
    variants = run_ab.read_variants(specs, first=b"", taken=set())
    assert variants["b"] == run_ab.Variant(b"x = 1\n", ["--data", "my folder", "--lr=3"])
    with pytest.raises(Fault, match="has a quote without its end"):
        run_ab.read_flags("--data 'my")


def test_a_judge_that_was_killed_has_no_verdict(unfinished_plan, monkeypatch):
    file, _ = unfinished_plan
    killed = SimpleNamespace(returncode=-signal.SIGKILL, stdout="")
    monkeypatch.setattr(run_ab.subprocess, "run", lambda command, **_: killed)
    assert run_ab.judge(file.parent) == 128 + signal.SIGKILL


@pytest.mark.slow
def test_the_real_script(tmp_path):
    """train_gpt.py itself is started by the launcher, reads data by a relative path, and finds the
    programs that ./run.sh has compiled. If its log changes, verify.py has to change."""
    script = tmp_path / "train_gpt.py"
    stage = "Stage(6, 1024, short=8, long=16, max_doc=0, lr=1.0)"
    script.write_text(with_tiny(train_gpt.SOURCE, "Layer(LONG, value_table=0)", stage))
    with tempfile.TemporaryDirectory(dir=RUN_AB.parents[1] / "data") as data:
        for name in ("train_000001", "train_000002", "val_000000"):
            write_shard(Path(data, f"x_{name}.bin"), tokens(4000))
        flags = ["tiny", *SMALL[:-2], "--steps", "6"]
        flags += ["--data", f"data/{Path(data).name}"]
        arguments = f"new={script}", "-n", 2, "--out", tmp_path / "out", "--", *flags
        status, text, err = run(*arguments)
    first, second = verify.collect(tmp_path / "out" / "new").runs
    assert first.ended == second.ended == "end of schedule", err
    assert status == 1 and "a record is what the file does" in text  # it has flags
    assert "| as many runs as planned | ok |" in text
    assert first.environment["GLIBC_TUNABLES"] == "glibc.malloc.hugetlb=1"
    assert (tmp_path / "out/new/.cache").resolve() == RUN_AB.parents[1] / ".cache"
    log = first.path.read_text()
    assert str(tmp_path) not in log
    result = json.loads(log.rpartition("RESULT ")[2])
    assert first.source_sha256 == hashlib.sha256(script.read_bytes()).hexdigest()
    assert first.validations[-1].step == first.steps == 6 and first.tokens == 6 * 1024
    assert (first.loss, first.seconds * 1000) == (result["val_loss"], result["train_time_ms"])
    assert first.argv == [*flags, "--target", "0"] and first.seed == result["seed"]
    assert "seed" not in first.config and first.config["target"] == 0
    assert first.data[-1]["file"] == "x_val_000000.bin" and first.name.startswith(first.began)
    assert first.devices == ["cpu"] and {"jax", "optax", "python"} <= first.versions.keys()


def test_a_gpu_gets_the_environment_of_run_sh(monkeypatch, tmp_path):
    """Without the larger fraction of the memory, 24 GB would get another model."""
    started = []

    def start(command, env, **_):
        started.append(env)
        return SimpleNamespace(stdout=[], wait=lambda: 0)

    gpu = run_ab.machine.Device("NVIDIA GeForce RTX 4090", 24564, 8.9)
    monkeypatch.setattr(run_ab.machine, "find_machine", lambda: run_ab.machine.Machine([gpu], 580))
    monkeypatch.setattr(run_ab.subprocess, "Popen", start)
    monkeypatch.delenv("JAX_PLATFORMS", raising=False)
    (tmp_path / "train_gpt.py").write_text("")
    assert run_ab.run("python", tmp_path, ["record"], 0, run_ab.Screen(False)) == 0
    assert started[0]["XLA_CLIENT_MEM_FRACTION"] == "0.92"
    assert started[0]["JAX_PLATFORMS"] == "cuda,cpu"
