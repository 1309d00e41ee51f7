"""verify.py has upstream's published numbers, and fails runs for every fault in the evidence."""

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from statistics import fmean, stdev

import cached_fineweb10B
import fake_runs
import fits
import messages
import pytest
import runs
import source_code
import stats
import verify
from fake_runs import (
    LOSSES,
    SOURCE,
    data,
    name_source,
    ours,
    plan_together,
    sha,
    write_ours,
    write_plan,
    write_upstream,
)

import train_gpt
from tests.record92 import frozen


def judged(capsys, *arguments) -> tuple[int, str]:
    """Returns the exit status of verify.py and what it prints."""
    try:
        with messages.one_line("verify.py", status=2):
            status = verify.main([str(argument) for argument in arguments])
    except SystemExit as end:
        status = end.code
    printed = capsys.readouterr()
    return status, printed.out + printed.err


def fails(capsys, *arguments) -> list[str]:
    """Returns the findings by which verify.py fails the runs."""
    _, printed = judged(capsys, *arguments)
    return re.findall(r"\*\*FAIL\*\* (.*?)(?:<br>| \|)", printed)


def test_pull_request_322_in_full(tmp_path, capsys):
    """It has n = 13, mean 3.27893, sd 0.00137, p = 0.0078; upstream's verifier printed t = -2.815,
    p = 0.007803, time = 77.34 ± 0.20 s."""
    folder = write_upstream(tmp_path / "this_pr", fake_runs.RECURSIVE, steps=1398)
    status, text = judged(capsys, folder, *ON_8XH100)
    assert status == 0 and "FAIL" not in text and text.startswith("## PASS: this_pr\n")
    for line in (
        "| runs | 13 |", "| steps | 1,398 |", "| milliseconds per step | 55.32 |",
        "| final loss, mean ± standard deviation | 3.27893 ± 0.00137 |",
        "| training time, s | 77.34 ± 0.20 |", "| margin: target minus mean | 0.00107 |",
        "| p of a t-test: mean below 3.28 | 0.0078 (t = -2.815) |",
        "| z-test with the track's standard deviation "
        "| margin · √runs = 0.0039; p < 0.001 needs 0.004 |",
        "| runs needed for an 80 % chance to pass | 20 |", "| run00.txt | – | 3.27910 | 77.93 |",
    ):  # fmt: skip
        assert line in text.splitlines()
    assert stats.below(verify.collect(folder).losses, 3.28).p == pytest.approx(0.007802956)


def test_fp8_down_projection(tmp_path):
    """Its statistics.md has p = 0.0006690604, a mean time of 79.684923 s, sd 0.182767."""
    e = verify.collect(write_upstream(tmp_path / "a", fake_runs.FP8_DOWN))
    assert stats.below(e.losses, 3.28).p == pytest.approx(0.0006690604, abs=1e-10)
    assert fmean(e.losses) == pytest.approx(3.2783692308, abs=1e-10)
    assert stdev(e.losses) == pytest.approx(0.0014156180, abs=1e-10)
    assert fmean(e.seconds) == pytest.approx(79.684923, abs=1e-6)
    assert stdev(e.seconds) == pytest.approx(0.182767, abs=1e-6)


def test_xsa_gated_layers_against_its_baseline(tmp_path, capsys):
    """Its README has p = 0.00561; Welch on time t = -20.36, df = 13.1, p = 1.36e-11, -0.68 s."""
    this = write_upstream(tmp_path / "xsa", fake_runs.XSA, steps=1450)
    base = write_upstream(tmp_path / "master", fake_runs.XSA_MASTER, steps=1480)
    status, text = judged(capsys, this, base, *ON_8XH100)
    assert status == 0 and "FAIL" not in text
    assert "| p of a t-test: mean below 3.28 | 0.0056 (t = -3.101) | 0.2644 (t = -0.668) |" in text
    welch = "Welch's t-test, one-sided (this is less): p = 1.4e-11, t = -20.36, df = 13.1"
    assert f"| training time, s | -0.684 | {welch} |" in text
    p, time = fails(capsys, base, this, *ON_8XH100)
    assert "0.2644 for a mean below 3.28" in p and "not faster than the baseline" in time


def test_pull_request_139(tmp_path):
    """Its text has 'over 10 runs', mean 2.9194, deviation 0.00069, p = 0.0001256: they are 22."""
    results = [(loss, 1384256 + i) for i, loss in enumerate(fake_runs.MEDIUM)]
    losses = verify.collect(write_upstream(tmp_path / "pr139", results)).losses
    assert len(losses) == 22
    assert stats.below(losses, 2.92).p == pytest.approx(0.0001256, abs=5e-8)
    assert round(fmean(losses), 4) == 2.9194
    assert round(stdev(losses), 5) == 0.00069


def test_runs_of_ours_that_hold(tmp_path, capsys):
    folder = write_ours(tmp_path / "good")
    rewrite(folder, argv=["tiny", "--seed=101", "--target", "0"])  # a seed is no flag that counts
    status, text = judged(capsys, folder)
    assert status == 0 and "FAIL" not in text
    assert "| runs | 5 of 5 planned |" in text and "| tokens | 1,024,000 |" in text
    assert "| final loss, mean ± standard deviation | 1.45968 ± 0.00969 |" in text
    assert text.count("| ok |") == len(verify.CHECKS) + 1
    name_source(folder)
    assert judged(capsys, folder) == (status, text)
    status, text = judged(capsys, write_ours(tmp_path / "low", [1.485 + i / 10000 for i in EVERY]))
    assert status == 0 and "note: the margin is less than 0.005" in text


def test_a_baseline_with_more_tokens(tmp_path, capsys):
    """Pairs are of equal seeds, in whatever order their runs began."""
    this = write_ours(tmp_path / "new", steps=450)
    base = write_ours(tmp_path / "old")
    for i in EVERY:
        rewrite(base, i, seed=104 - i, loss=LOSSES[4 - i] - 0.01)
    status, text = judged(capsys, this, base)
    assert status == 0 and "FAIL" not in text
    assert "| tokens | 921,600 | 1,024,000 |" in text
    assert "| final loss, paired by seed | 0.01000 ± 0.00000 |" in text
    assert "not interleaved" in text  # a note: they have different plans
    same = write_ours(tmp_path / "same", seed=200)
    found = "no fewer tokens than the baseline: 1,024,000 against"
    assert fails(capsys, base, this) == [f"{found} 921,600"]
    assert fails(capsys, base, same) == [f"{found} 1,024,000"]


def test_on_a_track_of_tokens_a_run_takes_no_longer_than_the_baselines(tmp_path, capsys):
    base = write_ours(tmp_path / "old")
    for name, ms in ("slower", 99_000), ("faster", 80_000):
        this = write_ours(tmp_path / name, steps=450, ms=ms)
        assert fails(capsys, this, base) == []  # of another plan: the times are not comparable
        plan_together(base, this)
        slower = ["a run takes longer than the baseline's: 99.0 s against 90.0"]
        assert fails(capsys, this, base) == (slower if name == "slower" else [])


def test_upstreams_logs_are_read(tmp_path):
    text = fake_runs.upstream(3.28, 80000)  # its third track writes seconds
    (tmp_path / "a.txt").write_text(text.replace("train_time:80000ms", "train_time:80.123s"))
    run = runs.read(tmp_path / "a.txt")
    assert run.devices == ["NVIDIA H100 80GB HBM3"] * 8 and run.driver == "580.159.04"
    assert run.versions["PyTorch"].startswith("2.10.0") and run.seconds == 80.123


def test_every_loss_of_a_resumed_run_counts_once(tmp_path):
    def read(text: str) -> runs.Run:
        path = tmp_path / "x"
        path.write_text(text)
        return runs.read(path)._replace(log_sha256="")

    start, middle, end = re.split("(?=step:[25][05]0/)", ours(1, 1.46))
    lost_middle = re.sub("loss:.", "loss:9", middle)
    lost_end = re.sub("loss:.", "loss:9", end.partition("RESULT")[0])
    # GOODPUT, STALLED and the "log" of resume are in logs of earlier versions.
    resume_20 = (
        f'GOODPUT 9 %: x\n{STOPPED}\nresume {{"step": 20, "log": "x"}}\nhosts 1\nwarning: x\n'
    )
    resume_250 = resume_20.replace("20", "250")
    text = start + lost_middle + resume_20 + lost_middle + lost_end + resume_250 + middle
    assert read(text + end) == read(start + middle + end)._replace(resumed=True)
    assert read(text + "STALLED: no step in 9 s\nThread 0x7f:\n  File x\n").ended == "incomplete"


def log(folder: Path, which: int = 1) -> Path:
    """Returns one of a folder's logs."""
    return sorted((folder / "logs").iterdir())[which]


def add_log(folder: Path, text: str) -> None:
    """Adds a log, later than the others."""
    (folder / "logs" / "2026-11-21T23-00-00_1.txt").write_text(text)


def replace_in(folder: Path, old: str, new: str) -> None:
    """Replaces what a regular expression matches first in one log."""
    log(folder).write_text(re.sub(old, new, log(folder).read_text(), count=1, flags=re.S))


def rewrite(folder: Path, which: int = 1, **changes) -> None:
    """Writes a log with other facts."""
    seed = changes.pop("seed", 100 + which)
    loss = changes.pop("loss", LOSSES[which])
    log(folder, which).write_text(ours(seed, loss, **changes))


def rewrite_all(folder: Path, first_seed: int = 100, **changes) -> None:
    """Writes all logs with other facts."""
    for i in EVERY:
        rewrite(folder, i, seed=first_seed + i, **changes)


ON_8XH100 = "--track", "8xh100"
EVERY = range(5)
SEEDS = [100 + i for i in EVERY]
PACKED = f"source {sha(SOURCE)}\n"
TRAIN_1, TRAIN_2, VAL = verify.TRACKS["tiny"].shards.split()
OTHER = data(f"{TRAIN_1} {TRAIN_2} 0")  # another validation shard
SWAPPED = data(f"{TRAIN_2} {TRAIN_1} {VAL}")
REACHED = ["end of schedule", "target reached"]  # to replace
GO_ON = "to resume: ./run.sh tiny --resume logs/x/0000250.state\n"
NAN = "NON-FINITE: the loss, by step 500\n"
OLDER_NAN = f"NON-FINITE: the loss or a weight, by step 500; {GO_ON}"
STOPPED = f"INTERRUPTED by SIGTERM after step 250; {GO_ON}"
RESULT = "RESULT.*"
FLAGS = ["tiny", "--target", "0", "--steps", "500"]


def stop_early(folder: Path) -> None:
    """One run stops at its target before the end of the schedule."""
    replace_in(folder, *REACHED)
    replace_in(folder, "500/500", "300/500")


def throw_away(folder: Path) -> None:
    """One run, whose final loss is known, is declared to be interrupted."""
    replace_in(folder, RESULT, "")
    (folder / "unfinished").mkdir()
    log(folder).rename(folder / "unfinished" / "x.txt")


def damage_and_throw_away(folder: Path) -> None:
    """The same, and an editor has saved the log as UTF-16."""
    (folder / "unfinished").mkdir()
    text = log(folder).read_text()
    log(folder).rename(folder / "unfinished" / "x.txt").write_text(text, "utf-16")


def rename(folder: Path, suffix: str) -> None:
    """One log has another suffix."""
    log(folder).rename(log(folder).with_suffix(suffix))


def shorten_name(folder: Path) -> None:
    """The hash in train_gpt.sha256 is cut, as in a line that was copied by hand."""
    name_source(folder)
    pointer = folder / "train_gpt.sha256"
    pointer.write_text(pointer.read_text()[4:])


def name_twice(folder: Path) -> None:
    """A folder has a file, and names another one."""
    (folder / "train_gpt.py").write_bytes(name_source(folder).read_bytes())


def raise_losses(folder: Path) -> None:
    """The mean is still below the target, but not at p < 0.01."""
    for i in EVERY:
        rewrite(folder, i, loss=LOSSES[i] + 0.019)


FAULTS = {  # name: (what changes the folder of runs that hold, what verify.py then prints)
    "a log twice": (lambda f: add_log(f, log(f).read_text()), "is the same log as"),
    "a log twice, once packed": (
        lambda f: add_log(f, log(f).read_text().replace(SOURCE, PACKED)), "is the same log as"),
    "a log twice, with blank lines": (
        lambda f: add_log(f, log(f).read_text() + "\n \n"), "is the same log as"),
    "a compressed log": (lambda f: rename(f, ".txt.gz"), ".txt.gz: it may be a log, but its name"),
    "a log in capitals": (lambda f: rename(f, ".TXT"), ".TXT: it may be a log, but its name"),
    "another suffix": (lambda f: rename(f, ".log"), ".log: it may be a log, but its name"),
    "a log above logs/": (
        lambda f: log(f).rename(f / "x.txt"), "unreadable log x.txt: it may be a log, but"),
    "a seed twice": (lambda f: rewrite(f, seed=100), "has the seed of"),
    "a run twice, as two seeds": (lambda f: rewrite(f, loss=LOSSES[0]), "the losses of"),
    "no RESULT": (lambda f: replace_in(f, RESULT, ""), "incomplete"),
    "a RESULT too early": (
        lambda f: replace_in(f, "step:500/500", "step:490/500"), "incomplete, after the loss of"),
    "interrupted": (lambda f: replace_in(f, RESULT, STOPPED), "interrupted"),
    "NaN": (lambda f: replace_in(f, RESULT, NAN), "not finite"),
    "NaN after a checkpoint": (lambda f: replace_in(f, RESULT, NAN + GO_ON), "not finite"),
    "NaN before a checkpoint": (
        lambda f: replace_in(f, RESULT, NAN + "there is no checkpoint\n"), "not finite"),
    "NaN, in older logs": (lambda f: replace_in(f, RESULT, OLDER_NAN), "not finite"),
    "NaN in RESULT": (lambda f: rewrite(f, loss=float("nan")), "NaN is not a number"),
    "resumed": (
        lambda f: replace_in(f, 'resumed": false', 'resumed": true'), "over several processes"),
    "no log": (lambda f: add_log(f, "hello"), "it has no line of 100 ="),
    "cut within a fact": (lambda f: replace_in(f, '"val_tokens".*', ""), "not state config, param"),
    "cut before a fact": (lambda f: replace_in(f, "config.*", ""), "it does not state config"),
    "two runs in a log": (lambda f: log(f).write_text(2 * log(f).read_text()), "it has 2 runs"),
    "two mixed runs": (lambda f: replace_in(f, "step:10/500", "step:30/500"), "out of order at"),
    "a step too many": (
        lambda f: replace_in(f, "step:250/500", "step:750/500"), "line 39: there is no step 750"),
    "a byte of the source": (lambda f: replace_in(f, "not exec", "Not exec"), "different sources"),
    "every source": (lambda f: rewrite_all(f, source="#\n"), "not the source that"),
    "a named file of another source": (lambda f: name_source(f, "#\n"), "not the source that"),
    "a named file that changed": (
        lambda f: name_source(f).write_text("#\n"), "train_gpt.py, which has another sha256"),
    "a named file that is gone": (
        lambda f: name_source(f).unlink(), "names ../record/train_gpt.py, which is missing"),
    "a hash that is cut": (shorten_name, "train_gpt.sha256 is not one line of sha256sum"),
    "a file and a named file": (name_twice, "has a train_gpt.py and a train_gpt.sha256; delete"),
    "stopped by itself": (stop_early, "incomplete"),
    "stopped at its end": (lambda f: replace_in(f, *REACHED), "could have stopped"),
    "finished, damaged, thrown away": (damage_and_throw_away, "in unfinished/, has a RESULT, but"),
    "a loss that is rounded differently": (
        lambda f: replace_in(f, "(500/500 val_loss:1.465)5", r"\g<1>7"), "does not agree"),
    "another loss in RESULT": (lambda f: replace_in(f, 'loss": 1', 'loss": 2'), "does not agree"),
    "another time in RESULT": (lambda f: replace_in(f, 'ms": 9', 'ms": 8'), "does not agree"),
    "no tokens": (lambda f: rewrite(f, tokens=-1), "tokens of RESULT cannot be -1"),
    "stopped early": (lambda f: rewrite_all(f, config=dict(target=1.49)), "could have stopped at"),
    "a shorter run": (lambda f: rewrite(f, steps=400), "validate at different steps"),
    "fewer tokens in one": (lambda f: rewrite(f, tokens=600), "count different tokens"),
    "another device": (lambda f: rewrite(f, devices=["gpu"]), "different devices"),
    "another jax": (lambda f: rewrite(f, versions={"jax": "0.10.2"}), "different versions: jax"),
    "another driver": (lambda f: rewrite(f, driver="580"), "different driver"),
    "a variable in one": (lambda f: rewrite(f, environment={"XLA_A": ""}), "environment: TF_CPP"),
    "other flags": (lambda f: rewrite(f, argv=FLAGS), "different argv"),
    "other configuration": (lambda f: rewrite(f, config=dict(lr=1)), "different config: lr"),
    "other layers": (
        lambda f: rewrite(f, config=dict(layers=[])), "different config: layers"),
    "other data": (lambda f: rewrite(f, data=OTHER), "different data"),
    "a variable": (lambda f: rewrite_all(f, environment={"XLA_FLAGS": "--x"}), "XLA_FLAGS is set"),
    "more than the time-out": (
        lambda f: rewrite_all(f, environment={"XLA_FLAGS": f"{min(verify.NEUTRAL_XLA_FLAGS)} --x"}),
        "XLA_FLAGS is set"),
    "flags in all": (lambda f: rewrite_all(f, argv=FLAGS), "a record is what the file does"),
    "a GPU on tiny": (lambda f: rewrite_all(f, devices=["NVIDIA H100"]), "not the track's devices"),
    "other validation": (lambda f: rewrite_all(f, data=OTHER), "validated on another text"),
    "another order": (lambda f: rewrite_all(f, data=SWAPPED), "another stream of tokens"),
    "shorter validation": (
        lambda f: rewrite_all(f, config=dict(val_T=256)), "sequences of 256 tokens, not 1,024"),
    "a larger model": (
        lambda f: rewrite_all(f, parameters={"a": 5_000_000, "b": 1}), "5,000,001 parameters"),
    "less validation": (lambda f: rewrite_all(f, config=dict(val_tokens=8)), "validated on 8"),
    "one left out": (lambda f: log(f).unlink(), "planned 5 runs with 5 seeds, found 4"),
    "one more": (lambda f: add_log(f, ours(99, 1.46)), "planned 5 runs with 5 seeds, found 6"),
    "seeds to choose from": (
        lambda f: write_plan(f, [*SEEDS, 7], n=5), "planned 5 runs with 6 seeds, found 5"),
    "an unplanned seed": (lambda f: rewrite(f, seed=99), "seeds that were not planned: 99"),
    "no plan": (lambda f: (f / "plan.json").unlink(), "no plan"),
    "another's plan": (
        lambda f: write_plan(f, SEEDS, arms={"x": "", "y": ""}), "no variant good, only x, y"),
    "a late plan": (lambda f: write_plan(f, SEEDS, created="2026-11-21T13:00:01Z"), "run began"),
    "added later": (
        lambda f: write_plan(f, SEEDS, added={f.name: "2026-11-21T12:59:30Z"}), "had been used"),
    "added too late": (
        lambda f: write_plan(f, SEEDS, added={f.name: "2026-11-21T13:00:01Z"}), "run began"),
    "planned flags": (lambda f: write_plan(f, SEEDS, arguments=["tiny"]), "flags than planned"),
    "planned source": (lambda f: write_plan(f, SEEDS, source="#\n"), "source than planned"),
    "a renamed log": (lambda f: log(f).rename(f / "logs" / "r.txt"), "name does not give the time"),
    "finished, then thrown away": (
        throw_away, "had its final loss: it counts"),
    "a margin of luck": (raise_losses, "p = 0.0297 for a mean below 1.49, and it takes p < 0.01"),
    "equal losses": (lambda f: rewrite_all(f, loss=1.46), "do not vary, so there is no p-value"),
}  # fmt: skip


@pytest.mark.parametrize("preset", ["record", "record92"])
@pytest.mark.parametrize("track, added, complaints", [
    ("8xh100", "", 0),
    ("8xh100", "--batch 16 --head_chunk 8192", 1),
    ("1xgpu", fits.command_line(fits.FITS[-1][0]), 1),  # another model
    ("1xgpu", "--batch 32 --head_chunk 4096 --val_T 65536", 0),
    ("1xgpu", "--batch 32", 2),  # no row of FITS
])  # fmt: skip
def test_the_launcher_may_add_flags_for_memory_on_one_gpu(
    tmp_path, preset, track, added, complaints
):
    """Its time-out changes nothing that a run does, nor does the order of GPUs."""
    argv = [preset, "--target", "0", "--seed", "100", *added.split()]
    flags = " ".join(verify.NEUTRAL_XLA_FLAGS)
    environment = {"XLA_FLAGS": flags, "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
    folder = write_ours(tmp_path / "x", losses=LOSSES[:1], environment=environment, argv=argv)
    write_plan(folder, [100], arguments=argv[:3])
    evidence = verify.collect(folder)
    found = [*verify.check_flags(evidence, verify.TRACKS[track])]
    found += verify.check_plan(evidence, verify.TRACKS[track])
    assert len(found) == complaints
    write_plan(folder, [100], arguments=argv[:3], flags={"x": added.split()})
    found = [*verify.check_flags(verify.collect(folder), verify.TRACKS[track])]
    assert bool(found) == bool(added)


@pytest.mark.parametrize("fault", FAULTS)
def test_what_is_no_evidence_fails(tmp_path, capsys, fault):
    folder = write_ours(tmp_path / "good")
    plant, message = FAULTS[fault]
    plant(folder)
    status, text = judged(capsys, folder)
    assert status == 1 and text.startswith("## FAIL: good\n")
    assert any(message in found for found in fails(capsys, folder)), text


def test_runs_that_stopped_at_their_target_have_no_p_value(tmp_path, capsys):
    folder = write_ours(tmp_path / "early", config=dict(target=1.49))
    for path in (folder / "logs").iterdir():
        path.write_text(path.read_text().replace("end of schedule", "target reached"))
    _, text = judged(capsys, folder)
    assert "| p of a t-test: mean below 1.49 | none: the length of the runs is not fixed |" in text
    assert "no p-value over runs whose length is not fixed" in text
    assert not re.search(r"p = 0|t = ", text)


def test_nothing_to_judge(tmp_path, capsys):
    outer = tmp_path
    tmp_path = outer / "inner"
    tmp_path.mkdir()
    two = write_ours(tmp_path / "x", config=dict(preset="record"), devices=["NVIDIA H100"] * 2)
    (tmp_path / "y").mkdir()
    no_log = SOURCE + fake_runs.BORDER + "hello\n"
    for folder, text, message in (
        (two, "x", "these runs do not fit any track"),
        (tmp_path, fake_runs.upstream(3.27, 90000), "do not state their track: add --track"),
        (tmp_path, "x", "a.txt: it has no line of 100 ="),
        (tmp_path, no_log, "it is not a log of train_gpt.py or modded-nanogpt"),
        (tmp_path / "a.txt", "x", "a.txt is no log: it has no line of 100 ="),
        (tmp_path / "y", "x", "y has no logs, which are files *.txt: name a folder that has some"),
        (outer, "x", f"has no logs, which are files *.txt: name {tmp_path}"),
        (tmp_path / "a\ntypo", "x", "does not exist: name a folder with logs, or a log"),
    ):
        (tmp_path / "a.txt").write_text(text)
        status, printed = judged(capsys, folder)
        assert status == 2 and message in printed and printed.count("\n") == 1


def test_a_run_of_modded_nanogpt_counts_once(tmp_path, capsys):
    """Its log states no seed, but has the same loss and time at every step."""
    folder = write_upstream(tmp_path / "x", [(3.278, 80000), (3.279, 80100), (3.2779, 80050)])
    text = (folder / "run00.txt").read_text()
    (folder / "run03.txt").write_text(text.replace("peak memory", "the peak of memory"))
    found = fails(capsys, folder, *ON_8XH100)
    assert found == ["run03.txt has, at every step, the loss and the time of run00.txt"]


def test_the_report_names_the_track_and_a_whole_plan_takes_none(tmp_path, capsys):
    folder = write_ours(tmp_path / "all" / "a")
    text = "\nThe track is tiny, which fits these runs: --track names another.\n"
    assert text in judged(capsys, folder)[1]
    assert "\nThe track is tiny, as --track" in judged(capsys, folder, "--track", "tiny")[1]
    (folder / "plan.json").rename(folder.parent / "plan.json")
    assert "- note: the rules are those of track tiny" in judged(capsys, folder.parent)[1]
    for option in ("--track", "tiny"), ("--target", "1.4"):
        status, text = judged(capsys, folder.parent, *option)
        assert status == 2 and "is a whole plan, which takes no --track and no --target" in text


def test_logs_may_lie_beside_the_plan_of_their_variant(tmp_path, capsys):
    folder = write_ours(tmp_path / "x")
    for path in (folder / "logs").iterdir():
        path.rename(folder / path.name)
    (folder / "logs").rmdir()
    assert judged(capsys, folder)[0] == 0
    (folder / "plan.json").unlink()
    (folder / "plan.json").symlink_to("gone.json")
    status, text = judged(capsys, folder)
    assert status == 2 and "plan.json is a link to gone.json, which is not there" in text


def test_two_sets(tmp_path, capsys):
    this = write_ours(tmp_path / "new", steps=450)
    base = write_ours(tmp_path / "old", seed=200)
    for changes, message in (
        (dict(devices=["NVIDIA H100"]), "different devices"),
        (dict(versions={"jax": "0.10.2"}), "different versions"),
        (dict(environment={"JAX_PLATFORMS": "cpu"}), "different environment: JAX_PLATFORMS"),
        (dict(driver="580"), "different driver"),
        (dict(data=OTHER), "different data"),
        (dict(data=SWAPPED), "different data"),
        (dict(data=OTHER), "baseline: validated on another text than the track's"),
        (dict(argv=FLAGS), "different argv"),
    ):
        rewrite_all(base, 200, **changes)
        assert any(message in found for found in fails(capsys, this, base)), message
    rewrite_all(base, 200)
    rewrite_all(this, steps=450, data=data(f"{TRAIN_1} {VAL}"))
    assert fails(capsys, this, base) == []  # fewer steps may need fewer shards
    for path in (base / "logs").iterdir():
        path.rename(path.with_name(path.name.replace("11-21", "11-23")))
    assert "the runs are from 2 days" in judged(capsys, this, base)[1]
    add_log(base, log(this).read_text())
    assert "a log is in both sets" in fails(capsys, this, base)


def test_flags_of_one_variant_are_no_difference(tmp_path, capsys):
    """But those that the launcher adds to one of them are, because they are not in the plan."""
    arms = {"old": sha(SOURCE), "new": sha(SOURCE)}
    folders = [write_ours(tmp_path / name) for name in arms]
    for folder in folders:
        write_plan(folder, SEEDS, arms=arms, flags={"new": ["--lr", "3"]})
    base, this = map(verify.collect, folders)
    assert "other flags than planned" in fails(capsys, this.folder)
    rewrite_all(this.folder, argv=["tiny", "--target", "0", "--lr", "3"])
    this = verify.collect(this.folder)
    assert list(verify.check_baseline(this, base)) == []
    rewrite_all(this.folder, argv=["tiny", "--target", "0", "--lr", "3", "--batch", "16"])
    this = verify.collect(this.folder)
    assert "different argv" in str(list(verify.check_baseline(this, base)))


def test_time_needs_p_below_a_hundredth(tmp_path, capsys):
    """A difference of 0.4 standard deviations has p = 0.027 by Welch."""
    faster = [(loss, ms - 100) for loss, ms in fake_runs.RECURSIVE]
    slower = [(loss, ms + 60) for loss, ms in fake_runs.RECURSIVE[1:]]
    this = write_upstream(tmp_path / "new", faster)
    base = write_upstream(tmp_path / "old", slower)
    _, printed = judged(capsys, this, base, *ON_8XH100)
    (p,) = re.findall(r"time, s \| -0\.\d+ \| Welch[^|]* p = (0\.\d+)", printed)
    assert 0.01 < float(p) < 0.05
    message = f"not faster than the baseline: p = {p}"
    assert any(message in found for found in fails(capsys, this, base, *ON_8XH100))


def test_a_target_instead_of_a_track(tmp_path, capsys):
    """No track's rules are checked, but the evidence is."""
    folder = write_ours(tmp_path / "x", environment={"XLA_FLAGS": "--x"})
    assert judged(capsys, folder, "--target", "1.49")[0] == 0
    assert "for a mean below 1.45" in fails(capsys, folder, "--target", "1.45")[0]
    rewrite(folder, seed=100)
    assert "has the seed of" in judged(capsys, folder, "--target", "1.49")[1]


def test_a_record_of_8xh100_has_eight(tmp_path, capsys):
    folder = write_upstream(tmp_path / "x", fake_runs.RECURSIVE)
    assert fails(capsys, folder, "--track", "8xh100") == []
    assert "not the track's devices" in fails(capsys, folder, "--track", "1xgpu")[0]
    assert "do not state data, flags" in fails(capsys, folder, "--track", "tiny")[1]
    for path in folder.iterdir():
        path.write_text(re.sub("^[|]   [1-7].*\n", "", path.read_text(), flags=re.M))
    found = fails(capsys, folder, "--track", "8xh100")
    assert found == ["not the track's devices: 1 x NVIDIA H100 80GB HBM3"]


def write_8xh100(folder: Path, preset: str, target=3.28, further=()) -> Path:
    """Writes runs of a preset that have all that its track on 8 H100s wants. They have read
    further shards of training."""
    argv = [preset, "--target", "0"]
    *train, val = verify.TRACKS["8xh100"].shards.split()
    write_ours(
        folder, [target - margin for margin in (0.0039, 0.0036, 0.0041, 0.0032, 0.0037)], argv=argv,
        config=dict(preset=preset, val_tokens=10485760), devices=["NVIDIA H100 80GB HBM3"] * 8,
        data=data(" ".join([*train, *further, val])),
    )  # fmt: skip
    write_plan(folder, SEEDS, arguments=argv)
    return folder


def test_8xh100_takes_both_records_and_no_other_preset(tmp_path, capsys):
    both = [write_8xh100(tmp_path / name, name) for name in ("record", "record92")]
    for folder in both:
        assert verify.infer_track(verify.collect(folder)) == "8xh100"
        status, text = judged(capsys, folder)
        assert status == 0 and "FAIL" not in text
    found = fails(capsys, *both)  # as if one were a version of the other
    assert found[0].startswith("different argv: record --target 0 / record92 ")
    tiny = write_8xh100(tmp_path / "tiny", "tiny")
    assert fails(capsys, tiny, "--track", "8xh100") == [
        "run with tiny --target 0; a record is what the file does with record or record92 "
        "--target 0"
    ]
    shutil.copy(log(both[0], 0), log(both[1], 0))
    found = " ".join(fails(capsys, both[1]))
    assert "different argv: record --target 0 / record92 " in found
    assert "different config: preset" in found


def test_medium_has_a_track_of_its_own_and_reads_more_shards(tmp_path, capsys):
    """Nobody here knows the sha256 of the further ones, so the judge names them."""
    further = [f"{n:016}" for n in range(8, 25)]
    folder = write_8xh100(tmp_path / "medium", "medium", 2.92, further)
    assert verify.infer_track(verify.collect(folder)) == "8xh100-medium"
    status, text = judged(capsys, folder)
    assert status == 0 and "FAIL" not in text and "mean below 2.92" in text
    assert "compare the sha256 of training shards 8 to 24 with the data set's page" in text
    other = write_8xh100(tmp_path / "other", "medium", 2.92, further)
    for path in runs.log_files(other):
        path.write_text(path.read_text().replace("771fa4a99b9fe094", "0" * 16))
    assert fails(capsys, other) == ["trained on another stream of tokens than the track's"]
    repeated = write_8xh100(tmp_path / "repeated", "medium", 2.92, [*further, further[0]])
    assert fails(capsys, repeated) == ["trained on another stream of tokens than the track's"]
    record = write_8xh100(tmp_path / "record", "record", 3.28, further[:1])
    assert fails(capsys, record) == ["trained on another stream of tokens than the track's"]


def test_two_equal_losses_of_four_digits_are_no_repeat(tmp_path, capsys):
    """They are one where a log has more losses. NaN is no loss."""
    folder = write_upstream(tmp_path / "x", [(3.278, 80000), (3.279, 80100), (3.2779, 80050)])
    (folder / "run01.txt").write_text(fake_runs.upstream(3.278, 80100))
    assert fails(capsys, folder, *ON_8XH100) == []
    end = "step:1390/1390 train"
    more = "step:300/1390 val_loss:4 train_time:9300ms step_avg:36ms\n"
    for path in folder.iterdir():
        path.write_text(path.read_text().replace(end, more + end))
    found = fails(capsys, folder, *ON_8XH100)
    assert found == ["run01.txt has, at every step, the losses of run00.txt"]
    (folder / "run01.txt").write_text(fake_runs.upstream(float("nan"), 80100))
    assert "run01.txt: not finite" in fails(capsys, folder, *ON_8XH100)


def test_the_judge_needs_no_packages_and_executes_no_source(tmp_path):
    flag = tmp_path / "executed"
    evil = f"import pathlib; pathlib.Path({str(flag)!r}).touch()\n"
    folder = write_ours(tmp_path / "evil", source=evil)
    for name in "runs.py", "messages.py", "fits.py":
        (folder / name).write_text(evil)
    command = [sys.executable, "-S", verify.__file__, "."]  # -S: without site-packages
    env = {"PYTHONPATH": str(folder)}
    done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=300)
    assert (done.returncode, done.stderr) == (0, "") and not flag.exists()


def test_the_tracks_are_what_the_presets_and_data_are(tmp_path):
    """Runs are judged by the track with their text, else by the open one."""
    for text, name in (OTHER, "tiny-2k"), (data(f"{TRAIN_1} {VAL}"), "tiny"):
        folder = write_ours(tmp_path / name, data=text)
        assert verify.infer_track(verify.collect(folder)) == name
    fineweb = cached_fineweb10B.PINNED
    pins = dict(record=fineweb, record92=fineweb, medium=fineweb, tiny=source_code.SHARDS)
    today = {name: track for name, track in verify.TRACKS.items() if not track.model}
    del today["tiny"]  # it is closed
    assert set(today) == {"8xh100", "1xgpu", "8xh100-medium", "tiny-2k"}
    pairs = [(track, preset) for track in today.values() for preset in track.presets]
    for track, preset in pairs:
        script = frozen if preset == "record92" else train_gpt
        c = script.PRESETS[preset]
        known = pins[preset]
        assert (track.target, track.val_tokens) == (c.target, c.val_tokens)
        names = sorted(known, key=lambda name: ("_val_" in name, name))
        assert track.shards.split() == [known[name][:16] for name in names]


def refused_plan(capsys, folder: Path) -> str:
    """Returns the line with which verify.py refuses to judge a folder, because of its plan."""
    status, printed = judged(capsys, folder)
    assert status == 2 and printed.count("\n") == 1
    assert str(folder / "plan.json") in printed
    return printed


@pytest.mark.parametrize("content", [
    "null", "[]", "7", "", '{"n": 5', '\ufeff{"n": 5}', "[" * 100_000, "{}", "NaN",
    '{"n": 5, "n": 3}',
])  # fmt: skip
def test_what_is_no_plan_is_one_line(tmp_path, capsys, content):
    folder = write_ours(tmp_path / "x", LOSSES[:1])
    (folder / "plan.json").write_text(content)
    refused_plan(capsys, folder)
    (folder / "plan.json").write_bytes(b"caf\xe9")
    assert "it is not UTF-8" in refused_plan(capsys, folder)


@pytest.mark.parametrize("name, value, why", [
    ("seeds", None, "seeds of .* cannot be null"),
    ("seeds", ["7"], "a part of seeds of .* cannot be \"7\""),
    ("n", "5", " n of .* cannot be \"5\""),
    ("n", True, " n of .* cannot be true"),
    ("arms", {}, "has no variants"),
    ("arms", ["x"], "arms of .* cannot be"),
    ("arm", [], "arm of .* cannot be"),
    ("flags", {"x": "--lr 3"}, "x of flags of .* cannot be \"--lr 3\""),
    ("added", [], "added of .* cannot be"),
    ("created", 1, "created of .* cannot be 1"),
    ("created", "11/21/2026", "has '11/21/2026' for a time like"),
    ("arguments", ["a\0b"], "has a character that no argument"),
    ("arms", {"\ud800": ""}, "has a character that no argument"),
    ("arguments", [1], "a part of arguments of .* cannot be 1"),
])  # fmt: skip
def test_a_plan_of_another_form_is_one_line(tmp_path, capsys, name, value, why):
    folder = write_ours(tmp_path / "x", LOSSES[:1])
    file = folder / "plan.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {name: value}))
    assert re.search(why, refused_plan(capsys, folder))


@pytest.mark.parametrize("encoding, output, status", [
    ("ascii", "| cat", 0), ("utf-8", ">&-", 2), ("utf-8", ">/dev/full", 2),
])  # fmt: skip
def test_only_a_report_has_the_status_of_a_verdict(tmp_path, encoding, output, status):
    """On every terminal and pipe. A report that is printed nowhere is none."""
    folder = write_ours(tmp_path / "x")
    command = f"{sys.executable} -S {verify.__file__} {folder} {output}"
    environment = {"PATH": "/usr/bin:/bin", "PYTHONIOENCODING": encoding}
    done = subprocess.run(
        ["bash", "-o", "pipefail", "-c", command],
        env=environment,
        capture_output=True,
        encoding=encoding,
    )
    assert (done.returncode, done.stderr.count("\n")) == (status, min(status, 1))
    assert ("## PASS: x" in done.stdout) == (output == "| cat")


def test_what_nobody_expected_is_no_verdict(tmp_path, monkeypatch, capsys):
    def explode(*_):
        raise RecursionError("x")

    monkeypatch.setattr(verify, "report", explode)
    assert judged(capsys, write_ours(tmp_path / "x"))[0] == 2


def test_a_run_without_devices_has_none_of_its_track(tmp_path, capsys):
    folder = write_ours(tmp_path / "x", devices=[])
    assert fails(capsys, folder) == ["the logs do not state devices"]


def test_without_a_complete_run_they_fail_against_a_baseline_as_well(tmp_path, capsys):
    this = write_ours(tmp_path / "x")
    base = write_ours(tmp_path / "y")
    plan_together(this, base)
    for path in (this / "logs").iterdir():
        path.write_text(path.read_text().replace("RESULT", "INTERRUPTED"))
    status, printed = judged(capsys, this, base)
    assert status == 1 and "no complete run, so there is no p-value" in printed


def test_one_log_is_judged_as_one_run(tmp_path, capsys):
    log = min((write_ours(tmp_path / "x") / "logs").iterdir())
    status, text = judged(capsys, log)
    assert status == 1 and text.startswith(f"## FAIL: {log.name}\n") and "| runs | 1 |" in text
    assert "there is no plan, so nothing shows that n was fixed beforehand; use ./run.sh" in text
    assert "1 complete run, so there is no p-value" in text
