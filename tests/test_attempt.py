"""./run.sh attempt goes from an idea to a judged folder, loses no run, and is not fooled."""

import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import fmean

import attempt
import pytest
import verify
from optimizers import contest

import train_gpt
from tests.tools import SMALL, with_tiny, write_shard
from tests.tools import text as tokens

ROOM = Path(attempt.__file__).parent
# A train_gpt.py that writes a log without training: its loss is a line in the number of steps, plus
# a gain, plus what its seed draws. Empty files in the folder `switch` make it wait, diverge, crash.
SCRIPT = f"""\
import argparse, dataclasses, os, pathlib, random, signal, sys, time
sys.path[:0] = [{str(Path(__file__).parent)!r}, {str(ROOM)!r}, {str(ROOM.parent / "data")!r}]


@dataclasses.dataclass
class Config:
    steps: int = 187
    gain: float = 0.0
    data: str = "x"
    val_T: int = 1024


PRESETS = {{"tiny": Config()}}


def parse_config(argv):
    cli = argparse.ArgumentParser()
    cli.add_argument("preset")
    for name, kind in dict(steps=int, gain=float, data=str, seed=int, target=float).items():
        cli.add_argument("--" + name, type=kind, default=argparse.SUPPRESS)
    cli.add_argument("--val_tokens")
    flags = vars(cli.parse_args(argv))
    own = {{name: flags[name] for name in ("steps", "gain", "data") if name in flags}}
    return flags["preset"], dataclasses.replace(PRESETS[flags["preset"]], **own)


def validate():
    return 1


def main():
    import fake_runs
    c = parse_config(sys.argv[1:])[1]
    seed = int(sys.argv[sys.argv.index("--seed") + 1])
    switch = pathlib.Path("../../../switch")
    stage = pathlib.Path.cwd().parent.name
    if c.steps == 2:
        stage, switch = "check", pathlib.Path("none")
    arm = pathlib.Path.cwd().name
    with open("../../../order", "a") as file:
        file.write(f"{{stage}} {{arm}} {{seed}}\\n")
    shared = random.Random(seed).gauss(0, 0.005)
    own = random.Random(f"{{arm}} {{seed}}").gauss(0, 0.001)
    loss = 1.37 - c.gain + 0.0013 * (187 - c.steps) + shared + own
    name = time.strftime("%Y-%m-%dT%H-%M-%S_", time.gmtime()) + f"{{seed:08x}}{{os.getpid()}}.txt"
    place = pathlib.Path("logs", name)
    data = fake_runs.data(fake_runs.TRACKS["tiny-2k"].shards)
    text = fake_runs.ours(seed, loss, argv=sys.argv[1:], steps=c.steps, tokens=384 * c.steps,
                          source=pathlib.Path(__file__).read_text(), data=data)
    if (switch / f"crash_{{arm}}").exists():
        place.write_text(text[: text.rindex("train_time:")])
        sys.exit(1)
    if (switch / "wait").exists():
        place.write_text(text[: text.rindex("train_time:")])
        (switch / "waiting").write_text(f"{{os.getpid()}} ")
        time.sleep(20)
    if (switch / "nan").exists() and arm != "baseline":
        place.write_text(text.rpartition("RESULT")[0] + "NON-FINITE: the loss is no number\\n")
        sys.exit(3)
    place.write_text(text)
    place.with_suffix(".npz").write_text("weights")


if __name__ == "__main__":
    main()
"""


@pytest.fixture
def place(tmp_path, monkeypatch) -> Path:
    """A folder for attempts, with a train_gpt.py that does not train."""
    (tmp_path / "switch").mkdir()
    (tmp_path / "train_gpt.py").write_text(SCRIPT)
    monkeypatch.setattr(attempt, "HERE", tmp_path)
    monkeypatch.setattr(attempt, "TRAINER", tmp_path / "train_gpt.py")
    monkeypatch.setattr(attempt.random, "SystemRandom", lambda: random.Random(1))
    monkeypatch.setitem(attempt.LEGS, "tiny", (0.7, "-c pass"))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "seed.py").write_text(SCRIPT.replace("validate():", "validate():  # as before"))
    return tmp_path


@pytest.fixture
def run(place, capfd):
    """A function that runs attempt.py in this process, and returns its status and what it prints
    to both streams."""

    def run(*arguments) -> tuple[int, str]:
        try:
            attempt.main([*arguments, "tiny"])
            status = 0
        except SystemExit as end:
            status = end.code
        printed = capfd.readouterr()
        return status, printed.out + printed.err

    return run


def order(place: Path) -> list[list[str]]:
    lines = (place / "order").read_text().splitlines()
    return [line.split() for line in lines if not line.startswith("check ")]


def test_a_gain_is_shown_in_fewer_steps_and_packed(place, run):
    """By seeds that the pilot has not seen; the same command then makes a second attempt."""
    status, text = run("--gain 0.02")
    assert status == 0
    rule = json.loads((place / "gain_0_02/rule.json").read_text())
    runs_of_pilot = order(place)[:6]
    names = ["baseline", "gain_0_02", "gain_0_02", "baseline", "baseline", "gain_0_02"]
    assert [line[:2] for line in runs_of_pilot] == [["pilot", name] for name in names]
    assert not {*rule["pilot_seeds"]} & {*rule["fresh_seeds"]} and len(order(place)) == 6 + 3 + 24
    first, tokens, shows, below, *_ = text.partition("\n\n")[2].splitlines()
    pairs = verify.changes(*(verify.collect(place / "gain_0_02/certification" / arm)
                             for arm in ("same_length", "baseline")))  # fmt: skip
    assert f"in 8 pairs of the certification: {fmean(pairs):+.4f} ± " in first
    assert first.endswith("one-sided): better.") and fmean(pairs) == pytest.approx(-0.02, abs=2e-3)
    saved = -float(re.search("In tokens that is (-[0-9,]+)", tokens)[1].replace(",", ""))
    assert saved == pytest.approx(0.02 / 0.0013 * 384, rel=0.15)  # the slope of the line
    assert "8 pairs show a difference of 0.0" in shows
    steps = int(re.match("In ([0-9]+) steps", below)[1])
    assert rule["short"] <= steps < 187 and "p of a mean below 1.38: " in below
    assert not [*place.rglob("*.npz")]
    folder = place / "gain_0_02/certification"
    assert verify.judge(folder / "gain_0_02", folder / "baseline")[0]  # it is a record
    packed = place / "gain_0_02/packed"
    assert first in (packed / "README.md").read_text()
    assert "+PRESETS" in (packed / "pilot/gain_0_02/change.patch").read_text()
    assert (packed / "certification/curves.svg").is_file()
    assert not (packed / "certification/baseline/train_gpt.py").exists()  # it names the pilot's
    assert verify.judge(packed / "certification/gain_0_02", packed / "certification/baseline")[0]
    text = run("--gain 0.02")[1]
    assert (
        f"An earlier attempt, gain_0_02: {first}" in text
        and (place / "gain_0_02-2/packed").is_dir()
    )
    assert json.loads((place / "gain_0_02/rule.json").read_text()) == rule


def test_a_worthless_idea_is_not_shown(place, run, monkeypatch):
    """It is another file with the same loss. A change of what validates is the first line."""
    monkeypatch.setattr(attempt.sys, "argv", ["attempt.py", str(place / "seed.py"), "tiny"])
    text = run("seed.py")[1]
    rule = json.loads((place / "seed/rule.json").read_text())
    assert rule["command"] == "./run.sh attempt seed.py tiny"  # without a path of this machine
    verdict = (place / "seed/verdict.txt").read_text().splitlines()
    assert "not shown." in verdict[0] and "better" not in text
    changed = SCRIPT.replace("return 1", "return 2")
    (place / "seed.py").write_text(changed)
    run("seed.py", "--gain", "0.02")
    verdict = (place / "seed_gain_0_02/verdict.txt").read_text().splitlines()
    assert verdict[0].startswith("THE IDEA CHANGES validate: read whether its loss")


@pytest.mark.parametrize("switch, name, reason, legs", [
    ("crash_baseline", "baseline", "baseline crashed twice in a row, at last with status 1", 2),
    ("crash_gain_0_02", "gain_0_02", "gain_0_02 crashed twice in a row", 3),
    ("nan", "gain_0_02", "the idea diverged", 2),
])  # fmt: skip
def test_crashes_stop_the_spending_and_are_kept(place, run, switch, name, reason, legs):
    (place / "switch" / switch).touch()
    status, text = run("--gain 0.02")
    assert status == 0 and f"It ended because {reason}" in text and "takes, 0 came to" in text
    assert len(order(place)) == legs
    packed = place / "gain_0_02/packed"
    lost = 2 * switch.startswith("crash")
    assert len([*(packed / "pilot").rglob("unfinished/*.txt")]) == lost
    assert len((packed / "ledger.jsonl").read_text().splitlines()) == legs


def test_what_was_killed_goes_on_and_two_at_once_are_refused(place, run):
    """Even where only its training is left. No leg is repeated, and the rule stays."""
    (place / "switch/wait").touch()
    code = f"import attempt, pathlib; attempt.HERE = pathlib.Path({str(place)!r}); "
    code += "attempt.TRAINER = attempt.HERE / 'train_gpt.py'; "
    code += "attempt.main(['seed.py', 'tiny'])"
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.DEVNULL,
                               env=os.environ | {"PYTHONPATH": str(ROOM)}, cwd=place)  # fmt: skip
    waiting = place / "switch/waiting"
    for _ in range(1200):
        if waiting.exists() and waiting.read_text().endswith(" "):
            break
        time.sleep(0.05)
    process.kill()
    process.wait(timeout=60)
    status, text = run("seed.py")
    assert status == 2 and "another attempt runs in this clone" in text
    os.kill(int(waiting.read_text()), signal.SIGKILL)
    (place / "switch/wait").unlink()
    time.sleep(0.2)
    rule = (place / "seed/rule.json").read_text()
    assert run("seed.py")[0] == 0 and (place / "seed/rule.json").read_text() == rule
    legs = [tuple(line) for line in order(place)]
    assert legs[0] == legs[1] and len({*legs}) == len(legs) - 1  # only what was killed is repeated


def test_a_full_disk_is_one_line_and_costs_nothing(place, run, monkeypatch):
    (place / "switch/crash_baseline").touch()
    usage = attempt.shutil.disk_usage
    monkeypatch.setattr(attempt.shutil, "disk_usage", lambda path: usage(path)._replace(free=0))
    status, text = run("seed.py")
    assert status == 2 and text.splitlines()[-1].endswith(attempt.FULL)
    monkeypatch.setattr(attempt.shutil, "disk_usage", usage)
    (place / "switch/crash_baseline").unlink()
    assert run("seed.py")[0] == 0 and len(order(place)) >= 7


def test_an_attempt_ended_by_hand_is_judged_and_packed_and_shows_nothing(place, run):
    with pytest.raises(FileNotFoundError, match=r"gain_0_02/rule\.json"):
        run("--gain 0.02", "--runs", "5", "--end")  # nothing waits for its end
    assert run("--gain 0.02", "--runs", "5")[0] == 0
    first = order(place)
    (place / "gain_0_02/verdict.txt").unlink()
    text = run("--gain 0.02", "--runs", "5", "--end")[1]
    assert "not shown." in text and "It ended because it was ended by hand" in text
    assert order(place) == first and (place / "gain_0_02/packed/README.md").is_file()


def test_what_the_judge_objects_to_is_said_first_and_shows_nothing(place, run):
    run("--gain 0.02")
    (place / "gain_0_02/verdict.txt").unlink()
    log = max((place / "gain_0_02/certification/baseline/logs").glob("*.txt"))
    log.write_text(log.read_text().replace("1a9b61a147d894ec", "2a9b61a147d894ec"))
    text = run("--gain 0.02")[1]
    assert "\n\nTHE JUDGE OBJECTS: " in text and "one-sided): not shown." in text


def test_a_leg_that_was_cut_off_is_set_aside_at_an_end_by_hand(place, run):
    """And the pairs of the certification that are whole are judged."""
    run("--gain 0.02")
    stage = place / "gain_0_02/certification"
    (place / "gain_0_02/verdict.txt").unlink()
    log = max((stage / "same_length/logs").glob("*.txt"))
    log.write_text(log.read_text().rpartition("train_time:")[0])
    text = run("--gain 0.02", "--end")[1]
    assert "in 7 pairs of the certification" in text and "one-sided): not shown." in text
    assert "OBJECTS" not in text and (stage / "same_length/unfinished" / log.name).is_file()


def test_a_budget_ends_an_attempt_before_it_can_show_nothing(place, run):
    text = run("--gain 0.02", "--runs", "20")[1]
    assert "It ended because there is no path to p < 0.01: it takes 8 pairs or more, not 3" in text
    assert "one-sided): not shown." in text and len(order(place)) == 7  # one of the other length
    text = run("--gain 0.03", "--runs", "5")[1]  # no pair begins that cannot end
    assert "It ended because the budget is spent." in text and len(order(place)) == 7 + 4


def test_a_dry_run_prints_every_leg_and_runs_none(place, run):
    status, text = run("--gain 0.02", "--dry-run", "--price", "60", "--pairs", "4")
    assert status == 0 and "\n+PRESETS" in text and "pilot: 4 pairs, 187 steps" in text
    assert "together about 25 minutes, 25.48 dollars\n" in text
    assert "; --budget allows about 10 legs" in run("--gain 0.02", "--dry-run", "--budget", "7")[1]
    assert not (place / "order").exists()


@pytest.mark.parametrize("words, message", [
    ("--seed 3", "leave out --seed"),
    ("--data y", "the idea changes data, and no idea may"),
    ("--gain 0", "in as many steps, the idea is the baseline"),
    ("none.py", "there is no file and no idea none.py"),
    ("other.py", "other.py is no copy of train_gpt.py"),
    ("end.py", "must end with a newline"),
    ("", "name an idea"),
])  # fmt: skip
def test_what_cannot_be_compared_is_refused(place, run, words, message):
    (place / "other.py").write_text("x = 1\n")
    (place / "end.py").write_text(SCRIPT + "x")
    status, text = run(*words.split())
    assert status == 2 and message in text and not (place / "order").exists()


def test_numbers_of_an_idea(place):
    """They are in its file, where its runs need no flags, and may be factors."""
    values = dict(muon_lr=0.018, F=256)
    words = ["--muon_lr", "x1.25", "--F", "x0.5", "--data", "x2y"]
    assert attempt.multiplied(words, values) == ["--muon_lr", "0.0225", "--F", "128", *words[4:]]
    changed = attempt.with_numbers(train_gpt.SOURCE.encode(), "tiny", dict(steps=60, muon_lr=0.02))
    c = attempt.read_settings(changed, ["tiny"])[1]
    assert (c.total_steps, c.muon_lr) == (60, 0.02)
    source = attempt.read_source(attempt.ROOT / "records/optimizers/muon.py", b"")
    changed = attempt.with_numbers(source, "tiny", dict(steps=60))
    assert attempt.read_settings(changed, ["tiny"])[2]["steps"] == 60
    assert contest.outside(changed.decode()) == contest.outside(source.decode())


def test_the_width_that_keeps_the_parameters_is_printed(monkeypatch):
    monkeypatch.chdir(attempt.ROOT)
    patch = "records/changes/swiglu.patch"
    (found,) = attempt.read_idea([patch, "tiny"], "").remarks
    assert found.endswith("as many with --F 171.")
    assert attempt.read_idea([patch, "--F", "171", "tiny"], "").name == "swiglu_f_171"


def test_a_record_is_a_baseline_for_the_file(monkeypatch):
    monkeypatch.chdir(attempt.ROOT)
    record = "records/tracks/tiny-2k/2026-11-27_pointer"
    assert attempt.read_idea(["train_gpt.py", "tiny"], record).steps == 187


def test_the_real_script(tmp_path, monkeypatch):
    """train_gpt.py itself is started by the launcher. If its log changes, verify.py has to change.
    A run after a check of two steps in one process is that of a process of its own, also if a
    program depends on the steps; what nobody can read ends, and what keeps the first seed fails."""
    stage = "Stage(6, 1024, short=8, long=16, max_doc=0, lr=1.0)"
    source = with_tiny(train_gpt.SOURCE, "Layer(LONG, value_table=0)", stage)
    ngram = '    ngram = params.pop("ngram")\n'  # a line of val_step()
    last = "    precision = jax.config.jax_default_matmul_precision\n"  # and of compile_program()
    new = source.replace(ngram, f"{ngram}    tokens_MBS //= c.total_steps\n")
    new = new.replace(last, f"{last}    open('compiled', 'a').write('x')\n").encode()
    seedy = source.replace(ngram, f"{ngram}    np.random.default_rng(c.seed)\n").encode()
    attempt.write_plan(tmp_path, [7], ["tiny"], {"new": new, "seedy": seedy})
    with tempfile.TemporaryDirectory(dir=attempt.ROOT / "data") as data:
        for name in ("train_000001", "train_000002", "val_000000"):
            write_shard(Path(data, f"x_{name}.bin"), tokens(4000))
        flags = ["tiny", *SMALL, "--steps", "6", "--data", f"data/{Path(data).name}"]
        with open(tmp_path / "lock", "w") as lock:
            for own in ("1 --steps 2", "7", "8"):  # all in one process
                assert attempt.train(tmp_path / "new", flags, own.split(), lock.fileno()) == 0
                if "--steps" in own:
                    shutil.rmtree(tmp_path / "new/logs")
            child = attempt.idle[tmp_path / "new"]
            child.kill()
            child.communicate()
            assert attempt.train(tmp_path / "new", flags, ["8"], lock.fileno()) == 0
            assert attempt.train(tmp_path / "seedy", flags, ["7"], lock.fileno()) == 1
            monkeypatch.setattr(attempt.sys, "stdout", open("/dev/full", "w"))
            with pytest.raises(OSError, match="No space"):
                attempt.train(tmp_path / "new", flags, ["9"], lock.fileno())
            assert attempt.idle == {}
    evidence = verify.collect(tmp_path / "new")
    first, second, alone, _ = evidence.ended
    assert (tmp_path / "new/compiled").read_text() == 2 * "xxx"
    assert second.loss == alone.loss and [run.seed for run in evidence.ended] == [7, 8, 8, 9]
    assert [*verify.check_source(evidence, None)] == [*verify.check_facts(evidence, None)] == []
    log = first.path.read_text()
    assert str(tmp_path) not in log
    result = json.loads(log.rpartition("RESULT ")[2])
    assert first.validations[-1].step == first.steps == 6 and first.tokens == 6 * 1024
    assert (first.loss, first.seconds * 1000) == (result["val_loss"], result["train_time_ms"])
    assert first.argv == flags and first.seed == result["seed"] == 7
    assert "seed" not in first.config and first.config["target"] == 0
    assert first.devices == ["cpu"] and {"jax", "optax", "python"} <= first.versions.keys()
