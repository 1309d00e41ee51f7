"""Interleaved runs: planned before the first, none lost, none counted twice."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import run_ab
import runs
import verify

import train_gpt
from tests.tools import SMALL, write_shard
from tests.tools import text as tokens

RUN_AB = Path(run_ab.__file__)
FAKE = Path(__file__).with_name("fake_runs.py")
# A train_gpt.py that writes a log at once. What it does besides, files in its folder say.
SCRIPT = f"""\
import pathlib, random, sys, time
sys.path[:0] = [{str(FAKE.parent)!r}, {str(RUN_AB.parent)!r}]
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
    pathlib.Path("../waiting").touch()
    try:
        time.sleep(60)
    except KeyboardInterrupt:
        time.sleep(0.5)
        place.write_text(text.rpartition("step:")[0] + "INTERRUPTED\\n")
        sys.exit(130)
if pathlib.Path("../nan").exists():
    place.write_text(text.rpartition("RESULT")[0] + "NON-FINITE: the loss is no number\\n")
    sys.exit(3)
if pathlib.Path("../refuse").exists():
    sys.exit(2)
place.write_text(text)
"""
PATCH = """\
--- a/train_gpt.py
+++ b/train_gpt.py
@@ -1,6 +1,6 @@
 import pathlib, random, sys, time
 sys.path[:0] = LINE
 import fake_runs
-LOSS = 1.46
+LOSS = 1.44
 seed = int(sys.argv[sys.argv.index("--seed") + 1])
"""


@pytest.fixture
def script(tmp_path) -> Path:
    (tmp_path / "old").mkdir()
    path = tmp_path / "old" / "train_gpt.py"
    path.write_text(SCRIPT)
    line = SCRIPT.splitlines()[1].partition("= ")[2]
    patch = PATCH.replace("LINE", line).replace("-1,6 +1,6", "-1,5 +1,5")
    (tmp_path / "better.patch").write_text(patch)
    return path


def start(*words, **options) -> subprocess.Popen:
    """Where a shell has made SIGINT ignored, children would inherit that."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    return subprocess.Popen(
        [sys.executable, RUN_AB, *map(str, words)], text=True, stdout=subprocess.PIPE,
        stderr=subprocess.PIPE, **options,
    )  # fmt: skip


def run(*words, **options) -> tuple[int, str, str]:
    process = start(*words, **options)
    out, err = process.communicate(timeout=120)
    return process.returncode, out, err


def order(out: Path) -> list[list[str]]:
    return [line.split() for line in (out / "order").read_text().splitlines()]


def test_two_arms_take_turns_with_the_same_seeds(script, tmp_path):
    out = tmp_path / "out"
    status, text, err = run(script, tmp_path / "better.patch", "-n", 4, "--out", out, "--", "tiny")
    assert (status, err) == (1, "")  # they hold as runs, but better has no fewer tokens
    plan = json.loads((out / "plan.json").read_text())
    assert plan["n"] == 4 and len(set(plan["seeds"])) == 4
    assert plan["arguments"] == ["tiny", "--target", "0"]
    assert list(plan["arms"]) == ["old", "better"]
    assert order(out) == [[arm, str(seed)] for seed in plan["seeds"] for arm in plan["arms"]]
    assert "LOSS = 1.44" in (out / "better" / "train_gpt.py").read_text()
    assert (out / "old" / "train_gpt.py").read_text() == SCRIPT
    assert not list(out.rglob("*.npz"))
    assert "## FAIL: better" in text and "no fewer tokens than the baseline" in text
    assert text.count("FAIL") == 2  # that, and the title
    pairs = verify.by_seed(verify.collect(out / "better"), verify.collect(out / "old"))
    assert [a - b for a, b in zip(*pairs, strict=True)] == pytest.approx([-0.02] * 4)


def test_many_arms_end_in_a_table(script, tmp_path):
    out = tmp_path / "out"
    words = script, tmp_path / "better.patch", f"same={script.parent}", "-n", 3, "--out", out
    status, text, _ = run(*words, "--", "tiny", "--steps", "500")
    assert status == 1  # the third arm repeats the first one, run by run
    assert "- same: **FAIL** a log is in both" in text
    assert "| better | 3 | " in text and "| -0.0200 | 0.0000 |" in text
    (out / "better" / "change.patch").write_text(PATCH)
    assert "does not apply to the first arm" in verify.study(out)[1]
    patch = (tmp_path / "better.patch").read_text().replace("1.44", "1.43")
    (out / "better" / "change.patch").write_text(patch)
    assert "change.patch does not make the source that the logs state" in verify.study(out)[1]


def test_with_flags_two_arms_are_compared_not_judged(script, tmp_path):
    words = script, tmp_path / "better.patch", "-n", 3, "--out", tmp_path / "out", "--", "tiny"
    status, text, _ = run(*words, "--steps", "500")
    assert status == 0 and "FAIL" not in text and "| better | 3 | " in text


def test_every_plan_has_fresh_seeds(script, tmp_path):
    for name in "ab":
        assert run(script, "-n", 3, "--out", tmp_path / name, "--", "tiny")[0] == 0
    seeds = [json.loads((tmp_path / name / "plan.json").read_text())["seeds"] for name in "ab"]
    assert not set(seeds[0]) & set(seeds[1])


def forget_one(out: Path) -> str:
    """Removes a log, as if its run were still to come; returns its seed."""
    path = next((out / "old" / "logs").iterdir())
    seed = runs.read(path).seed
    path.unlink()
    return str(seed)


def wait_for(path: Path) -> None:
    for _ in range(600):
        if path.exists():
            return
        time.sleep(0.05)
    raise TimeoutError(path)


def test_ctrl_c_costs_one_run(script, tmp_path):
    out = tmp_path / "out"
    run(script, "-n", 3, "--out", out, "--", "tiny")
    lost = forget_one(out)
    (out / "wait").touch()
    process = start("--resume", out, start_new_session=True)
    wait_for(out / "waiting")
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does, to all that run in it
    process.wait(timeout=30)
    logs = [path.read_text() for path in (out / "old" / "logs").glob("*.txt")]
    assert sum(text.endswith("INTERRUPTED\n") for text in logs) == 1  # it was waited for
    _, err = process.communicate(timeout=30)
    assert process.returncode == 130 and f"to go on: --resume {out}" in err
    (out / "wait").unlink()
    assert run("--resume", out)[0] == 0
    assert len(list((out / "old" / "unfinished").glob("*.txt"))) == 1
    seeds = [seed for _, seed in order(out)]
    assert seeds == [*seeds[:3], lost, lost]
    evidence = verify.collect(out / "old")
    assert sorted(str(run.seed) for run in evidence.ended) == sorted(seeds[:3])
    assert "1 interrupted and run again" in run("--resume", out)[1]


def test_a_killed_parent_leaves_no_second_run_beside_the_first(script, tmp_path):
    out = tmp_path / "out"
    run(script, "-n", 3, "--out", out, "--", "tiny")
    forget_one(out)
    (out / "wait").touch()
    process = start("--resume", out)
    wait_for(out / "waiting")
    process.kill()
    process.wait(timeout=30)
    status, _, err = run("--resume", out)
    assert status == 2 and "is in use: one of its runs is going on" in err
    found = subprocess.run(["pgrep", "-f", "train_gpt.py tiny --target 0 --seed"],
                           capture_output=True, text=True)  # fmt: skip
    mine = [pid for pid in found.stdout.split() if Path(f"/proc/{pid}/cwd").resolve().parent == out]
    assert len(mine) == 1
    os.kill(int(mine[0]), signal.SIGKILL)
    (out / "wait").unlink()
    for _ in range(100):
        status, _, err = run("--resume", out)
        if status != 2:
            break
        time.sleep(0.05)
    assert status == 0


def test_a_run_that_fails_stops_the_plan(script, tmp_path):
    out = tmp_path / "out"
    run(script, "-n", 3, "--out", out, "--", "tiny")
    forget_one(out)
    (out / "refuse").touch()
    status, _, err = run("--resume", out)
    assert status == 1 and "ended with status 2 and counts as none" in err
    (out / "refuse").unlink()
    assert run("--resume", out)[0] == 0


def test_a_diverged_run_counts(script, tmp_path):
    """It is not run again until it converges."""
    out = tmp_path / "out"
    run(script, "-n", 3, "--out", out, "--", "tiny")
    forget_one(out)
    (out / "nan").touch()
    status, text, _ = run("--resume", out)
    assert status == 1 and "not finite" in text
    (out / "nan").unlink()
    assert run("--resume", out)[0] == 1 and len(order(out)) == 4


@pytest.mark.parametrize("words, said", [
    ([], "name at least one train_gpt.py"),
    (["SCRIPT"], "-n must be at least 2"),
    (["SCRIPT", "-n", "1"], "-n must be at least 2"),
    (["SCRIPT", "-n", "2", "--", "tiny", "--target", "1.5"], "--target is run_ab.py's"),
    (["SCRIPT", "-n", "2", "--", "tiny", "--seed=3"], "--seed is run_ab.py's"),
    (["missing.py", "-n", "2"], "missing.py is not there"),
    (["PATCH", "-n", "2"], "the first arm must be a train_gpt.py"),
    (["SCRIPT", "SCRIPT", "-n", "2"], "'old' is taken"),
    (["a/../b=SCRIPT", "-n", "2"], "cannot name a folder"),
    (["lock=SCRIPT", "-n", "2"], "'lock' is taken"),
    (["logs=SCRIPT", "-n", "2"], "'logs' is taken"),
    (["END", "-n", "2"], "it must end with a newline"),
    (["BORDER", "-n", "2"], "no line of 100 ="),
    (["SCRIPT", "NOTHING", "-n", "2"], "does not apply to the first arm"),
    (["--resume", "BROKEN"], "plan.json is broken"),
    (["SCRIPT", "-n", "2", "--out", "OLD"], "cannot be made"),
    (["--resume", "OLD"], "plan.json is not there"),
    (["--resume", "OLD", "-n", "3"], "give nothing else"),
])  # fmt: skip
def test_what_cannot_work_is_refused(script, tmp_path, words, said):
    places = dict(SCRIPT=script, PATCH=tmp_path / "better.patch", OLD=script.parent)
    texts = dict(END="x = 1", BORDER="x = 1\n" + "=" * 100 + "\n", NOTHING="", BROKEN="{")
    for name, text in texts.items():
        (tmp_path / name).mkdir()
        file = dict(NOTHING="x.patch", BROKEN="plan.json").get(name, "train_gpt.py")
        (tmp_path / name / file).write_text(text)
        places[name] = tmp_path / name / (file if name != "BROKEN" else "")
    for key, value in places.items():
        words = [word.replace(key, str(value)) for word in words]
    status, _, err = run(*words, cwd=tmp_path)
    assert status == 2 and said in err and "Traceback" not in err


def test_flags_of_xla_are_noticed_before_the_first_run(script, tmp_path):
    env = os.environ | {"XLA_FLAGS": "--xla_force_host_platform_device_count=1"}
    out = run(script, "-n", 2, "--out", tmp_path / "out", "--", "tiny", env=env)[1]
    assert "XLA_FLAGS is set: these runs will not count as a record\n" in out.partition("[1/")[0]


def test_a_plan_tells_nothing_of_its_machine(script, tmp_path):
    import socket

    for name in "ab":
        run(script, "-n", 2, "--out", tmp_path / name, "--", "tiny")
    plans = [json.loads((tmp_path / name / "plan.json").read_text()) for name in "ab"]
    assert plans[0]["machine"] != plans[1]["machine"] and plans[0]["salt"] != plans[1]["salt"]
    assert socket.gethostname() not in json.dumps(plans)


def test_a_plan_is_not_changed(script, tmp_path):
    out = tmp_path / "out"
    run(script, "-n", 2, "--out", out, "--", "tiny")
    source = out / "old" / "train_gpt.py"
    source.write_text(SCRIPT + "#\n")
    assert "was changed after the plan was made" in run("--resume", out)[2]
    source.write_text(SCRIPT)
    plan = json.loads((out / "plan.json").read_text())
    (out / "plan.json").write_text(json.dumps(plan | dict(machine="0" * 16)))
    assert "was begun on another machine" in run("--resume", out)[2]


def test_a_patch_touches_one_file(script, tmp_path):
    outside = tmp_path / "outside.txt"
    outside.write_text("a\n")
    evil = "--- a/../outside.txt\n+++ b/../outside.txt\n@@ -1 +1 @@\n-a\n+b\n"
    (tmp_path / "evil.patch").write_text(evil)
    status, _, err = run(script, tmp_path / "evil.patch", "-n", 2, "--out", tmp_path / "out")
    assert status == 2 and "does not apply" in err and outside.read_text() == "a\n"
    assert not (tmp_path / "out").exists()


def test_the_real_script(tmp_path):
    """With train_gpt.py itself, relative data and the compilation cache of its folder."""
    data = RUN_AB.parents[1] / "data" / "test_run_ab"
    data.mkdir(exist_ok=True)
    try:
        for name in ("train_000001", "train_000002", "val_000000"):
            write_shard(data / f"x_{name}.bin", tokens(1200))
        flags = ["tiny", *SMALL[:-2], "--stages", "6 256 8 16 0 1 0,1", "--steps", "6"]
        out = tmp_path / "out"
        status, text, err = run(train_gpt.__file__, "-n", 2, "--out", out, "--", *flags,
                                "--data", f"data/{data.name}")  # fmt: skip
    finally:
        for path in data.iterdir():
            path.unlink()
        data.rmdir()
    (name,) = (path.name for path in out.iterdir() if (path / "logs").is_dir())
    found = verify.collect(out / name)
    assert [run.ended for run in found.runs] == ["end of schedule"] * 2, err
    assert status == 1 and "a record is what the file does" in text  # it has flags
    assert "planned" not in text.partition("as many runs as planned")[2].splitlines()[0]
    first = runs.read(found.runs[0].path)
    assert first.environment["JAX_COMPILATION_CACHE_DIR"] == "../cache"
    assert first.environment["GLIBC_TUNABLES"] == "glibc.malloc.hugetlb=1"
    assert (out / "cache").is_dir()
    assert str(tmp_path) not in found.runs[0].path.read_text()  # no path of this machine
