"""verify.py passes runs that hold, and fails them for every fault in the evidence."""

import os
import re
import subprocess
import sys
from pathlib import Path

import cached_fineweb10B
import pytest
import runs
import source_code
import verify
from fake_runs import LOSSES, SOURCE, data, ours, plan_together, sha, write_ours, write_plan

import train_gpt

EVERY = range(5)
SEEDS = [100 + i for i in EVERY]
TRAIN_1, TRAIN_2, VAL = verify.TRACKS["tiny"].shards.split()
OTHER = data(f"{TRAIN_1} {TRAIN_2} 0")  # another validation shard
SWAPPED = data(f"{TRAIN_2} {TRAIN_1} {VAL}")
RESULT = "RESULT.*"
FLAGS = ["tiny", "--target", "0", "--steps", "500"]


def judged(capsys, *arguments) -> tuple[int, str]:
    """Returns the exit status of verify.py and what it prints."""
    status = verify.main([str(argument) for argument in arguments])
    return status, capsys.readouterr().out


def fails(capsys, *arguments) -> list[str]:
    """Returns the findings by which verify.py fails the runs."""
    _, printed = judged(capsys, *arguments)
    return re.findall(r"\*\*FAIL\*\* (.*?)(?:<br>| \|)", printed)


# ---- Runs that hold ------------------------------------------------------------------------------
def test_runs_that_hold(tmp_path, capsys):
    folder = write_ours(tmp_path / "good")
    status, text = judged(capsys, folder)
    assert status == 0 and "FAIL" not in text
    for line in (
        "| runs | 5 of 5 planned |", "| tokens | 1,024,000 |", "| steps | 500 |",
        "| final loss, mean ± standard deviation | 1.45968 ± 0.00969 |",
        "| p of a t-test: mean below 1.49 | 0.0011 (t = -6.993) |",
        "| margin: target minus mean | 0.03032 |",
    ):  # fmt: skip
        assert line in text.splitlines()
    assert text.count("| ok |") == len(verify.CHECKS) + 1
    name_source(folder)
    assert judged(capsys, folder) == (status, text)
    status, text = judged(capsys, write_ours(tmp_path / "low", [1.485 + i / 10000 for i in EVERY]))
    assert status == 0 and "note: the margin is less than 0.005" in text
    assert "for a mean below 1.45" in fails(capsys, folder, "--target", "1.45")[0]


def test_a_baseline_with_more_tokens(tmp_path, capsys):
    """Pairs are of equal seeds, in whatever order their runs began. A run takes no longer than
    those of the baseline, if they are of one plan."""
    this = write_ours(tmp_path / "new", steps=450, ms=99_000)
    base = write_ours(tmp_path / "old")
    for i in EVERY:
        rewrite(base, i, seed=104 - i, loss=LOSSES[4 - i] - 0.01)
    status, text = judged(capsys, this, base)
    assert status == 0 and "FAIL" not in text and "were not interleaved" in text
    assert "| tokens | 921,600 | 1,024,000 |" in text
    assert "| final loss, paired by seed | 0.01000 ± 0.00000 |" in text
    assert fails(capsys, base, this) == [
        "no fewer tokens than the baseline: 1,024,000 against 921,600"
    ]
    plan_together(base, this)
    assert fails(capsys, this, base) == ["a run takes longer than the baseline's, in the mean"]
    assert len(fails(capsys, base, write_ours(tmp_path / "same", seed=200))) == 1


def write_8xh100(folder: Path, preset: str, target=3.28, further=(), ms=90_000) -> Path:
    """Writes runs of a preset that have all that its track on 8 H100s wants. They have read
    further shards of training."""
    argv = [preset, "--target", "0"]
    *train, val = verify.TRACKS["8xh100"].shards.split()
    write_ours(
        folder, [target - margin for margin in (0.0039, 0.0036, 0.0041, 0.0032, 0.0037)], argv=argv,
        config=dict(preset=preset, val_tokens=10485760), devices=["NVIDIA H100 80GB HBM3"] * 8,
        data=data(" ".join([*train, *further, val])), ms=ms,
    )  # fmt: skip
    write_plan(folder, SEEDS, arguments=argv)
    return folder


def test_8xh100_compares_times(tmp_path, capsys):
    """And takes both records."""
    old, other = [write_8xh100(tmp_path / name, name) for name in ("record", "record92")]
    for folder in (old, other):
        assert verify.infer_track(verify.collect(folder)) == "8xh100"
        assert judged(capsys, folder)[0] == 0
    assert fails(capsys, old, other)[0].startswith("different argv")  # one is no version of it
    assert fails(capsys, write_8xh100(tmp_path / "faster", "record", ms=89_000), old) == []
    new = write_8xh100(tmp_path / "equal", "record", ms=89_999)
    (found,) = fails(capsys, new, old)
    assert found == "not faster than the baseline: p = 0.1733, and it takes p < 0.01"


def test_medium_has_a_track_of_its_own_and_reads_more_shards(tmp_path, capsys):
    """Nobody here knows the sha256 of the further ones, so the judge names them."""
    further = [f"{n:016}" for n in range(8, 25)]
    folder = write_8xh100(tmp_path / "medium", "medium", 2.92, further)
    assert verify.infer_track(verify.collect(folder)) == "8xh100-medium"
    status, text = judged(capsys, folder)
    assert status == 0 and "mean below 2.92" in text
    assert "compare the sha256 of training shards 8 to 24 with the data set's page" in text
    other = write_8xh100(tmp_path / "other", "medium", 2.92, further)
    for path in runs.log_files(other):
        path.write_text(path.read_text().replace("771fa4a99b9fe094", "0" * 16))
    repeated = write_8xh100(tmp_path / "repeated", "medium", 2.92, [*further, further[0]])
    record = write_8xh100(tmp_path / "record", "record", 3.28, further[:1])
    for wrong in (other, repeated, record):
        assert fails(capsys, wrong) == ["trained on another stream of tokens than the track's"]


@pytest.mark.parametrize("track, added, complaints", [
    ("8xh100", "", 0),
    ("8xh100", "--batch 16 --head_chunk 8192", 1),
    ("1xgpu", "--batch 32 --head_chunk 4096 --val_T 65536", 0),
    ("1xgpu", "--batch 64 --head_chunk 2048 --val_T 32768 --ngram_buckets 65536", 1),  # no record
    ("1xgpu", "--steps 20", 2),  # nothing that run/launch.py adds
])  # fmt: skip
def test_the_launcher_may_add_flags_for_memory_on_one_gpu(tmp_path, track, added, complaints):
    """Its time-out changes nothing that a run does, nor does the order of GPUs."""
    argv = ["record", "--target", "0", *added.split()]
    flags = " ".join(verify.NEUTRAL_XLA_FLAGS)
    environment = {"XLA_FLAGS": flags, "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
    folder = write_ours(tmp_path / "x", losses=LOSSES[:1], environment=environment, argv=argv)
    write_plan(folder, [100], arguments=argv[:3])
    evidence = verify.collect(folder)
    found = [*verify.check_flags(evidence, verify.TRACKS[track])]
    assert len(found + [*verify.check_plan(evidence, verify.TRACKS[track])]) == complaints


def test_the_tracks_are_what_the_presets_and_data_are():
    pins = dict.fromkeys(["8xh100", "1xgpu", "8xh100-medium"], cached_fineweb10B.PINNED)
    pins["tiny-2k"] = source_code.SHARDS
    for name, known in pins.items():
        track = verify.TRACKS[name]
        c = train_gpt.PRESETS[track.presets[0]]
        assert (track.target, track.val_tokens) == (c.target, c.val_tokens)
        files = sorted(known, key=lambda file: ("_val_" in file, file))
        assert track.shards.split() == [known[file][:16] for file in files]


# ---- Runs that do not ----------------------------------------------------------------------------
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


def name_source(folder: Path, named: str = SOURCE) -> Path:
    """Replaces the train_gpt.py of a folder by a train_gpt.sha256, as of a comparison whose file is
    that of a record. Returns the named file, which is written beside the folder."""
    (folder / "train_gpt.py").unlink()
    file = folder.parent / "record" / "train_gpt.py"
    file.parent.mkdir()
    file.write_text(named)
    (folder / "train_gpt.sha256").write_text(f"{sha(named)}  ../record/train_gpt.py\n")
    return file


def throw_away(folder: Path) -> None:
    """One run, whose final loss is known, is declared to be interrupted."""
    replace_in(folder, RESULT, "")
    (folder / "unfinished").mkdir()
    log(folder).rename(folder / "unfinished" / "x.txt")


def raise_losses(folder: Path) -> None:
    """The mean is still below the target, but not at p < 0.01."""
    for i in EVERY:
        rewrite(folder, i, loss=LOSSES[i] + 0.019)


FAULTS = {  # name: (what changes the folder of runs that hold, what verify.py then prints)
    "a log twice, once packed": (
        lambda f: add_log(f, log(f).read_text().replace(SOURCE, f"source {sha(SOURCE)}\n")),
        "is the same log as"),
    "a seed twice": (lambda f: rewrite(f, seed=100), "has the seed of"),
    "a run twice, as two seeds": (lambda f: rewrite(f, loss=LOSSES[0]), "the final loss of"),
    "no RESULT": (lambda f: replace_in(f, RESULT, ""), "incomplete"),
    "NaN": (lambda f: replace_in(f, RESULT, "NON-FINITE: the loss"), "not finite"),
    "resumed": (
        lambda f: replace_in(f, 'resumed": false', 'resumed": true'), "over several processes"),
    "every source": (lambda f: rewrite_all(f, source="#\n"), "not the source that"),
    "stopped early, at its end": (
        lambda f: replace_in(f, "end of schedule", "target reached"), "could have stopped"),
    "stopped early, by itself": (lambda f: replace_in(f, "500/500", "300/500"), "incomplete"),
    "another loss in RESULT": (lambda f: replace_in(f, 'loss": 1', 'loss": 2'), "does not agree"),
    "stopped early": (lambda f: rewrite_all(f, config=dict(target=1.49)), "could have stopped at"),
    "a shorter run": (lambda f: rewrite(f, steps=400), "validate at different steps"),
    "fewer tokens in one": (lambda f: rewrite(f, tokens=600), "count different tokens"),
    "another device": (lambda f: rewrite(f, devices=["gpu"]), "different devices"),
    "another jax": (lambda f: rewrite(f, versions={"jax": "0.10.2"}), "different versions: jax"),
    "another cudnn": (lambda f: rewrite(f, wheels={"cudnn": "9.1"}), "different versions: cudnn"),
    "no environment": (
        lambda f: replace_in(f, "environment .*?\n", ""), "does not state its environment"),
    "a variable": (lambda f: rewrite_all(f, environment={"XLA_FLAGS": "--x"}), "XLA_FLAGS is set"),
    "flags in all": (lambda f: rewrite_all(f, argv=FLAGS), "a record is what the file does"),
    "a GPU on tiny": (lambda f: rewrite_all(f, devices=["NVIDIA H100"]), "not the track's devices"),
    "other validation": (lambda f: rewrite_all(f, data=OTHER), "validated on another text"),
    "another order": (lambda f: rewrite_all(f, data=SWAPPED), "another stream of tokens"),
    "shorter validation": (
        lambda f: rewrite_all(f, config=dict(val_T=256)), "sequences of 256 tokens, not 1,024"),
    "a larger model": (
        lambda f: rewrite_all(f, parameters={"a": 5_000_000, "b": 1}), "5,000,001 parameters"),
    "one left out": (lambda f: log(f).unlink(), "planned 5 runs with 5 seeds, found 4"),
    "seeds to choose from": (
        lambda f: write_plan(f, [*SEEDS, 7], n=5), "planned 5 runs with 6 seeds, found 5"),
    "an unplanned seed": (lambda f: rewrite(f, seed=99), "seeds that were not planned: [99]"),
    "no plan": (lambda f: (f / "plan.json").unlink(), "no plan"),
    "a late plan": (lambda f: write_plan(f, SEEDS, created="2026-11-21T13:00:01Z"), "run began"),
    "planned flags": (lambda f: write_plan(f, SEEDS, arguments=["tiny"]), "flags than planned"),
    "planned source": (lambda f: write_plan(f, SEEDS, source="#\n"), "source than planned"),
    "a renamed log": (lambda f: log(f).rename(f / "logs" / "r.txt"), "name does not give the time"),
    "finished, then thrown away": (throw_away, "had its final loss: it counts"),
    "a margin of luck": (raise_losses, "p = 0.0297 for a mean below 1.49, and it takes p < 0.01"),
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_what_is_no_evidence_fails(tmp_path, capsys, fault):
    folder = write_ours(tmp_path / "good")
    plant, message = FAULTS[fault]
    plant(folder)
    status, text = judged(capsys, folder)
    assert status == 1 and text.startswith("## FAIL: good\n")
    assert any(message in found for found in fails(capsys, folder)), text


def test_two_sets(tmp_path, capsys):
    this = write_ours(tmp_path / "new", steps=450)
    base = write_ours(tmp_path / "old", seed=200)
    for changes, message in (
        (dict(devices=["NVIDIA H100"]), "different devices"),
        (dict(environment={"JAX_PLATFORMS": "cpu"}), "different environment: JAX_PLATFORMS"),
        (dict(data=SWAPPED), "different data"),
        (dict(data=OTHER), "validated on another text than the track's (baseline)"),
    ):
        rewrite_all(base, 200, **changes)
        assert any(message in found for found in fails(capsys, this, base)), message
    rewrite_all(base, 200)
    rewrite_all(this, steps=450, data=data(f"{TRAIN_1} {VAL}"))
    assert fails(capsys, this, base) == []  # fewer steps may need fewer shards
    add_log(base, log(this).read_text())
    assert "a log is in both sets" in fails(capsys, this, base)


def test_flags_of_one_variant_are_no_difference(tmp_path, capsys):
    """But those that the launcher adds to one of them are, because they are not in the plan."""
    arms = {"old": sha(SOURCE), "new": sha(SOURCE)}
    base, this = [write_ours(tmp_path / name) for name in arms]
    for folder in (base, this):
        write_plan(folder, SEEDS, arms=arms, flags={"new": ["--lr", "3"]})
    assert "other flags than planned" in fails(capsys, this)
    for added, different in ([], False), (["--batch", "16"], True):
        rewrite_all(this, argv=["tiny", "--target", "0", "--lr", "3", *added])
        found = str([*verify.check_baseline(verify.collect(this), verify.collect(base))])
        assert ("different argv" in found) == different


# ---- What is no verdict --------------------------------------------------------------------------
def test_nothing_to_judge(tmp_path):
    two = write_ours(tmp_path / "x", config=dict(preset="record"), devices=["NVIDIA H100"] * 2)
    with pytest.raises(runs.Unreadable, match="no track fits these runs: add --target LOSS"):
        verify.judge(two)
    with pytest.raises(runs.Unreadable, match="has no logs that can be read, files"):
        verify.judge(tmp_path)


@pytest.mark.parametrize("output, holds", [("| cat", True), (">/dev/full", False)])
def test_only_a_report_passes(tmp_path, output, holds):
    """On every terminal and pipe; no source is executed. A report that is printed nowhere is none,
    and neither is an error."""
    flag = tmp_path / "executed"
    evil = f"import pathlib; pathlib.Path({str(flag)!r}).touch()\n"
    folder = write_ours(tmp_path / "x", source=evil)
    (folder / "messages.py").write_text(evil)
    for plan, passes in ((folder / "plan.json").read_text(), holds), ("null", False):
        (folder / "plan.json").write_text(plan)
        done = subprocess.run(
            ["bash", "-o", "pipefail", "-c", f"{sys.executable} {verify.__file__} . {output}"],
            cwd=folder, env={"PATH": os.environ["PATH"], "PYTHONIOENCODING": "ascii"},
            capture_output=True, encoding="ascii",
        )  # fmt: skip
        assert (done.returncode == 0) == passes and not flag.exists(), done.stderr
        assert ("## PASS: x" in done.stdout) == passes
