"""The judge: upstream's published numbers, and every way in which evidence can be none."""

import ast
import hashlib
import json
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
from fake_runs import (
    FP8_DOWN,
    LOSSES,
    MEDIUM,
    RECURSIVE,
    SOURCE,
    XSA,
    XSA_MASTER,
    ours,
    upstream,
    write_ours,
    write_plan,
    write_upstream,
)

import train_gpt
from tests.tools import SMALL, write_shard
from tests.tools import text as tokens

RECORDS = Path(verify.__file__).parent


def judged(capsys, *words) -> tuple[int, str]:
    status = verify.main([str(word) for word in words])
    printed = capsys.readouterr()
    return status, printed.out + printed.err


def fails(text: str) -> list[str]:
    return re.findall(r"\*\*FAIL\*\* (.*?)(?:<br>| \|)", text)


# ---- Golden --------------------------------------------------------------------------------------
def test_pull_request_322_in_full(tmp_path, capsys):
    """n = 13, mean 3.27893, sd 0.00137, p = 0.0078; its own verifier said t = -2.815,
    p = 0.007803, time = 77.34 ± 0.20 s."""
    folder = write_upstream(tmp_path / "this_pr", RECURSIVE, steps=1398)
    status, text = judged(capsys, folder)
    assert status == 0 and fails(text) == []
    assert text.startswith("## PASS: this_pr\n")
    for line in (
        "| runs | 13 |", "| steps | 1,398 |", "| final loss, mean ± sd | 3.27893 ± 0.00137 |",
        "| training time, s | 77.34 ± 0.20 |", "| p(mean < 3.28), t-test | 0.0078 (t = -2.815) |",
        "| margin | 0.00107 |", "| runs for 80 % power | 20 |", "| ms a step | 55.32 |",
        "| z rule | margin · √n = 0.0039; 0.004 is p < 0.001 |",
        "| run00.txt | – | 3.27910 | 77.93 |",
    ):  # fmt: skip
        assert line in text.splitlines()
    truth = verify.numbers(verify.collect(folder), 3.28)
    assert truth["p"] == pytest.approx(0.007802956, rel=1e-6)
    assert truth["mean"] == pytest.approx(3.27893, abs=5e-6)


def test_fp8_down_projection(tmp_path):
    """Its statistics.md: p = 0.0006690604, mean time 79.684923 s with a deviation of 0.182767."""
    truth = verify.numbers(verify.collect(write_upstream(tmp_path / "a", FP8_DOWN)), 3.28)
    assert truth["p"] == pytest.approx(0.0006690604, abs=1e-10)
    assert truth["mean"] == pytest.approx(3.2783692308, abs=1e-10)
    assert truth["sd"] == pytest.approx(0.0014156180, abs=1e-10)
    assert truth["seconds"] == pytest.approx(79.684923, abs=1e-6)
    assert truth["seconds_sd"] == pytest.approx(0.182767, abs=1e-6)


def test_xsa_gated_layers_against_its_baseline(tmp_path, capsys):
    """Its README: p = 0.00561; Welch on time t = -20.36, df = 13.1, p = 1.36e-11, -0.68 s."""
    this = write_upstream(tmp_path / "xsa", XSA, steps=1450)
    base = write_upstream(tmp_path / "master", XSA_MASTER, steps=1480)
    status, text = judged(capsys, this, base)
    assert status == 0 and fails(text) == []
    assert "| p(mean < 3.28), t-test | 0.0056 (t = -3.101) | 0.2644 (t = -0.668) |" in text
    welch = "Welch, one-sided (this is less): p = 1.4e-11, t = -20.36, df = 13.1"
    assert f"| training time, s | -0.684 | {welch} |" in text
    status, text = judged(capsys, base, this)
    assert status == 1
    assert "not faster than the baseline" in text and "0.2644 for a mean below 3.28" in text


def test_pull_request_139(tmp_path):
    """Its text says 'over 10 runs', mean 2.9194, deviation 0.00069, p = 0.0001256: they are 22."""
    runs_of = [(loss, 1384256 + i) for i, loss in enumerate(MEDIUM)]
    truth = verify.numbers(verify.collect(write_upstream(tmp_path / "pr139", runs_of)), 2.92)
    assert truth["n"] == 22 and truth["p"] == pytest.approx(0.0001256, abs=5e-8)
    assert (round(truth["mean"], 4), round(truth["sd"], 5)) == (2.9194, 0.00069)


# ---- What holds ----------------------------------------------------------------------------------
def test_runs_of_ours_that_hold(tmp_path, capsys):
    status, text = judged(capsys, write_ours(tmp_path / "good"))
    assert (status, fails(text)) == (0, [])
    assert "| runs | 5 of 5 planned |" in text and "| tokens | 1,024,000 |" in text
    assert "| final loss, mean ± sd | 1.45968 ± 0.00969 |" in text
    assert text.count("| ok |") == len(verify.CHECKS) + 1


def test_a_baseline_with_more_tokens(tmp_path, capsys):
    this = write_ours(tmp_path / "new", steps=450, seed=100)
    base = write_ours(tmp_path / "old", hour=14, source=SOURCE + "#\n", seed=100,
                      losses=[loss - 0.01 for loss in LOSSES])  # fmt: skip
    status, text = judged(capsys, this, base)
    assert (status, fails(text)) == (0, [])
    assert "| tokens | -102,400 | -10.0%, no deviation |" in text
    assert "| final loss, paired by seed | 0.01000 ± 0.00000 |" in text
    assert "not interleaved" in text  # a note: they have plans of their own
    status, text = judged(capsys, base, this)
    assert fails(text) == ["no fewer tokens than the baseline: 1,024,000 against 921,600"]
    assert status == 1


def test_a_packed_log_is_the_same_log(tmp_path, capsys):
    folder = write_ours(tmp_path / "good")
    before = judged(capsys, folder)
    first, *rest = sorted((folder / "logs").iterdir())
    for path in rest:
        body = path.read_text().partition("=" * 100 + "\n")[2]
        sha = hashlib.sha256(SOURCE.encode()).hexdigest()
        path.write_text(f"source {sha}\n{'=' * 100}\n{body}")
    assert judged(capsys, folder) == before
    (folder / "logs" / "2026-11-21T20-00-00_00000000.txt").write_text(rest[0].read_text())
    first.unlink()
    assert "is the same log as" in judged(capsys, folder)[1]


def test_the_logs_of_a_real_run_are_read(tmp_path, monkeypatch):
    """Should the log change, the judge has to."""
    for name, length in ("train_000001", 6000), ("val_000000", 1200):
        write_shard(tmp_path / f"x_{name}.bin", tokens(length))
    monkeypatch.chdir(tmp_path)
    stages = "1 512 16 48 0 1 0,1 / 9 1024 16 48 0 1 0,1"
    argv = ["tiny", *SMALL, "--plan", "S", "--stages", stages]
    argv += ["--steps", "2", "--val_every", "1", "--data", "."]
    train_gpt.main([*argv, "--seed", "7"])
    (path,) = Path("logs").glob("*.txt")
    run = runs.read(path)
    result = json.loads(path.read_text().rpartition("RESULT ")[2])
    assert (run.ended, run.ours, run.seed, run.packed) == ("end of schedule", True, 7, False)
    assert run.source == hashlib.sha256(Path(train_gpt.__file__).read_bytes()).hexdigest()
    assert [v.step for v in run.validations] == [0, 1, 2]
    assert (run.loss, run.tokens) == (result["val_loss"], 512 + 1024)
    assert verify.scheduled_tokens(run.config, 2) == run.tokens
    assert run.seconds == pytest.approx(result["train_time_ms"] / 1000)
    assert run.argv == argv and "seed" not in run.config and run.config["target"] == 0
    assert [shard["file"] for shard in run.data][-1] == "x_val_000000.bin"
    assert run.devices == ["cpu"] * 8 and run.began is not None
    assert {"jax", "numpy", "optax", "python"} <= run.versions.keys()


# ---- What does not -------------------------------------------------------------------------------
def replaced(folder: Path, old: str, new: str, which: int = 1, count: int = 1) -> None:
    path = sorted((folder / "logs").iterdir())[which]
    text = path.read_text()
    assert text.count(old) >= 1, old
    path.write_text(text.replace(old, new, count) if count else text.replace(old, new))


def again(folder: Path, which: int, **changes) -> None:
    """Writes a log anew, with other facts."""
    path = sorted((folder / "logs").iterdir())[which]
    seed, loss = changes.pop("seed", 100 + which), changes.pop("loss", LOSSES[which])
    path.write_text(ours(seed, loss, **changes))


def copied(folder: Path) -> None:
    path = sorted((folder / "logs").iterdir())[0]
    path.with_name("2026-11-21T23-00-00_99999999.txt").write_bytes(path.read_bytes())


def cut(folder: Path, what: str) -> None:
    path = sorted((folder / "logs").iterdir())[1]
    path.write_text(path.read_text().partition(what)[0])


def last_line(folder: Path, text: str) -> None:
    cut(folder, "RESULT")
    path = sorted((folder / "logs").iterdir())[1]
    path.write_text(path.read_text() + text + "\n")


TINY = verify.TRACKS["tiny"]
SHARD = dict(file="val.bin", sha256=TINY.val)
OTHER = [dict(file=str(i), sha256=sha) for i, sha in enumerate([*TINY.train, "0" * 64])]
SWAPPED = [dict(file=str(i), sha256=sha) for i, sha in enumerate([*TINY.train[::-1], TINY.val])]
EVERY = range(5)
FAULTS = {
    "a log twice": (copied, "is the same log as"),
    "a seed twice": (lambda f: again(f, 1, seed=100), "has the seed of"),
    "a run twice, as two seeds": (lambda f: again(f, 1, loss=LOSSES[0]), "the losses of"),
    "no RESULT": (lambda f: cut(f, "RESULT"), "incomplete"),
    "no end": (lambda f: cut(f, "step:500"), "incomplete"),
    "interrupted": (lambda f: last_line(f, "INTERRUPTED"), "interrupted"),
    "NaN": (lambda f: last_line(f, "NON-FINITE: the loss is no number"), "not finite"),
    "NaN in RESULT": (lambda f: again(f, 1, loss=float("nan")), "not finite"),
    "a byte of the source": (lambda f: replaced(f, "not exec", "Not exec"), "2 different sources"),
    "every source": (lambda f: [again(f, i, source="#\n") for i in EVERY], "not the source that"),
    "stopped early": (lambda f: [again(f, i, config=dict(target=1.49)) for i in EVERY],
                      "could have stopped at 1.49"),
    "a shorter run": (lambda f: again(f, 1, steps=400), "validate at different steps"),
    "another device": (lambda f: again(f, 1, devices=["gpu"]), "different devices"),
    "another jax": (lambda f: again(f, 1, versions={"jax": "0.10.2", "python": "3.12.1 (main)"}),
                    "different versions: jax"),
    "another driver": (lambda f: again(f, 1, driver="580"), "different driver"),
    "another environment": (lambda f: again(f, 1, environment={"XLA_FLAGS": "--a"}),
                            "different environment: TF_CPP_MIN_LOG_LEVEL, XLA_FLAGS"),
    "other flags": (lambda f: again(f, 1, argv=["tiny", "--muon_lr", "1", "--seed", "101"]),
                    "different argv"),
    "another configuration": (lambda f: again(f, 1, config=dict(muon_lr=1.0)),
                              "different config: muon_lr"),
    "other data": (lambda f: again(f, 1, data=OTHER), "different data"),
    "XLA_FLAGS": (lambda f: [again(f, i, environment={"XLA_FLAGS": "--x"}) for i in EVERY],
                  "XLA_FLAGS is set"),
    "flags in all": (lambda f: [again(f, i, argv=["tiny", "--target", "0", "--steps", "500"])
                                for i in EVERY], "a record is what the file does"),
    "a GPU on tiny": (lambda f: [again(f, i, devices=["NVIDIA H100"]) for i in EVERY],
                      "not the track's devices"),
    "other validation": (lambda f: [again(f, i, data=OTHER) for i in EVERY],
                         "validated on another text"),
    "another order": (lambda f: [again(f, i, data=SWAPPED) for i in EVERY],
                      "another stream of tokens"),
    "a part of the validation text": (lambda f: [again(f, i, config=dict(val_tokens=8192))
                                                 for i in EVERY], "validated on 8192 tokens"),
    "one left out": (lambda f: next((f / "logs").iterdir()).unlink(), "planned 5 runs, found 4"),
    "one more": (lambda f: (f / "logs" / "2026-11-21T23-00-00_1.txt").write_text(ours(99, 1.46)),
                 "planned 5 runs, found 6"),
    "an unplanned seed": (lambda f: again(f, 1, seed=99), "seeds that were not planned: [99]"),
    "no plan": (lambda f: (f / "plan.json").unlink(), "no plan"),
    "a plan after the fact": (lambda f: write_plan(f, [100 + i for i in EVERY],
                                                   created="2026-11-21T13:02:00Z"),
                              "a run began before the plan was made"),
    "planned flags": (lambda f: write_plan(f, [100 + i for i in EVERY], arguments=["tiny"]),
                      "other flags than planned"),
    "planned source": (lambda f: write_plan(f, [100 + i for i in EVERY], source="#\n"),
                       "another source than planned"),
    "a broken log": (lambda f: (f / "logs" / "z.txt").write_text("hello"), "no log: z.txt"),
    "renamed logs": (lambda f: [path.rename(path.with_name(f"r{i}.txt")) for i, path in
                                enumerate(sorted((f / "logs").iterdir()))],
                     "does not say when its run began"),
    "counted tokens": (lambda f: [replaced(f, '"tokens": 1024000', '"tokens": 600', which=i)
                                  for i in EVERY], "counts 600 tokens, its schedule 1,024,000"),
    "finished, then thrown away": (lambda f: (
        (f / "unfinished").mkdir(), (f / "unfinished" / "x.txt").write_text(
            ours(100, 1.50).rpartition("RESULT")[0])), "had its final loss: it counts"),
    "a margin of luck": (lambda f: [again(f, i, loss=LOSSES[i] + 0.019) for i in EVERY],
                         "p = 0.0297 for a mean below 1.49; it takes p < 0.01"),
    "result.json": (lambda f: (f / "result.json").write_text('{"n": 6, "mean": 1.4}'),
                    "result.json says n = 6; it is 5"),
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_what_is_no_evidence_fails(tmp_path, capsys, fault):
    folder = write_ours(tmp_path / "good")
    assert judged(capsys, folder)[0] == 0
    plant, said = FAULTS[fault]
    plant(folder)
    status, text = judged(capsys, folder)
    assert status == 1 and text.startswith("## FAIL")
    assert any(said in found for found in fails(text)), fails(text)


@pytest.mark.parametrize("stages, steps, tokens", [
    ("100 4096 8 16 / 200 8192 8 16 / 200 16384 8 16 / 0 512 8 16", 500,
     100 * 4096 + 200 * 8192 + 200 * 16384),
    ("100 4096 8 16 / 200 8192 8 16 / 200 16384 8 16 / 0 512 8 16", 251,  # 50.2, 150.6
     50 * 4096 + 101 * 8192 + 100 * 16384),
    ("1 4096 8 16 / 498 8192 8 16 / 1 16384 8 16", 50, 4096 + 48 * 8192 + 16384),  # never none
], ids=["as written", "other steps", "a stage of less than a step"])  # fmt: skip
def test_tokens_of_a_schedule_in_stages(tmp_path, capsys, stages, steps, tokens):
    for name, counted in ("right", tokens), ("wrong", tokens + 4096):
        facts = dict(steps=steps, config=dict(stages=stages, T=None), tokens=counted)
        found = fails(judged(capsys, write_ours(tmp_path / name, **facts))[1])
        counts = [text for text in found if "tokens" in text]
        if name == "right":
            assert counts == []
        else:
            assert len(counts) == 5
            assert f"counts {counted:,} tokens, its schedule {tokens:,}" in counts[0]


def test_the_same_losses_five_times_prove_nothing(tmp_path, capsys):
    """Five repeats of one key: a t-test alone would say p = 1e-50."""
    folder = write_ours(tmp_path / "same", losses=[1.46] * 5)
    status, text = judged(capsys, folder)
    assert status == 1
    assert "the losses do not vary: no p-value" in fails(text)
    folder = write_ours(tmp_path / "nearly", losses=[1.46] * 4 + [1.4601])
    assert "the losses of" in " ".join(fails(judged(capsys, folder)[1]))


def test_runs_that_stopped_at_their_target_have_no_p_value(tmp_path, capsys):
    folder = write_ours(tmp_path / "early")
    for path in (folder / "logs").iterdir():
        text = path.read_text().replace('"target": 0.0', '"target": 1.49')
        text = text.replace("end of schedule", "target reached")
        path.write_text(text.replace('"--target", "0", ', ""))
    found = fails(judged(capsys, folder)[1])
    assert sum("stopped at its target, step 500 of 500: no p-value" in text for text in found) == 5
    _, text = judged(capsys, folder)
    assert "| p(mean < 1.49), t-test | none: the length of the runs is not fixed |" in text
    assert "no p-value over runs whose length is not fixed" in fails(text)
    assert not re.search(r"p = 0|t = ", text)


@pytest.mark.parametrize("old, new, said", [
    ('"steps": 500, "tokens"', '"steps": 499, "tokens"', "RESULT has steps 499"),
    ('"seed": 101, "devices"', '"seed": 102, "devices"', "RESULT has seed 102"),
    ('"devices": 1', '"devices": 8', "RESULT has devices 8"),
    ('"val_loss": 1.4655', '"val_loss": 1.4555', "another loss or time"),
    ('"train_time_ms": 90000.4', '"train_time_ms": 80000.4', "another loss or time"),
    ('"val_loss": 1.4655', '"val_loss": "1.4655"', "RESULT lacks one of"),
    ('"tokens": 1024000', '"tokens": 4', "does not count the tokens"),
    ("end of schedule", "luck", "no known reason"),
    ('RESULT {', 'RESULT [{', "is no JSON"),
    ("seed 101\n", "seed 101\nseed 101\n", "states seed twice"),
    ("seed 101\n", "", "does not state seed"),
    ("seed 101\n", "seed 7\n", "its configuration has another seed"),
    ("seed 101\n", "seed [" + "[" * 100_000 + "\n", "is no JSON"),
    ('argv ["tiny"', "argv [7", "argv and devices are no words"),
    ("step:250/500", "step:750/500", "out of order"),
    ("step:250/500 val_loss:2.1465", "step:250/500 val_loss:two", "val_loss:two is no number"),
    ("=" * 100, "=" * 99, "no line of 100 ="),
    ("driver", "\0driver", "zero bytes"),
    ('"train_time_ms": 90000.4', '"train_time_ms": NaN', "a number without bounds"),
    ('"seed": 101, "devices"', '"seed": "<!-- |", "devices"', "RESULT has seed '?!-- ?'"),
    ('val_loss:2.1465', 'val_loss:\x1b[2JPASS', "val_loss:??2JPASS is no number"),
    ('"steps": 500, "val_tokens"', '"steps": 501, "val_tokens"', "its configuration has others"),
    ("train_time:45000ms", "train_time:95000ms", "out of order"),
    ("step:500/500", "step:501/500", "it validates step 501 of 500"),
    ('versions {', 'vers {', "does not state versions"),
])  # fmt: skip
def test_a_log_that_contradicts_itself_is_none(tmp_path, capsys, old, new, said):
    folder = write_ours(tmp_path / "good")
    replaced(folder, old, new)
    status, text = judged(capsys, folder)
    assert status == 1
    assert any("no log: " in found and said in found for found in fails(text)), fails(text)


@pytest.mark.parametrize("make, said", [
    (lambda f: None, "is no folder"),
    (lambda f: f.mkdir(), "has no log that can be read"),
    (lambda f: (f.mkdir(), (f / "a.txt").write_text("x")), "no line of 100 ="),
    (lambda f: (write_ours(f), (f / "plan.json").write_text("{")), "plan.json is broken"),
    (lambda f: (write_ours(f), (f / "plan.json").write_text('{"n": 5}')), "plan.json is broken"),
    (lambda f: (write_ours(f), (f / "result.json").write_text("[1]")), "result.json is broken"),
    (lambda f: (write_ours(f), write_plan(f, [1, 1])), "plan.json is broken"),
    (lambda f: (write_ours(f), write_plan(f, [1, 2], arguments=[7])), "plan.json is broken"),
    (lambda f: (write_ours(f), write_plan(f, [1, 2], arms={})), "plan.json is broken"),
    (lambda f: (write_ours(f), write_plan(f, [1, 2], arms={"../x": "0" * 64}, arm="../x")),
     "plan.json is broken"),
    (lambda f: (write_ours(f), write_plan(f, [1, 2], created="2026-11-21T12:59:00")),
     "plan.json is broken"),
    (lambda f: write_ours(f, config=dict(preset="mine")), "look like those of no track"),
    (lambda f: write_ours(f, config=dict(preset="record"), devices=["NVIDIA H100 80GB HBM3"] * 2),
     "look like those of no track"),
    (lambda f: (f.mkdir(), (f / "a.txt").write_text(SOURCE + "=" * 100 + "\nhello\n")),
     "no log of train_gpt.py, nor of modded-nanogpt's"),
    (lambda f: (f.mkdir(), (f / "a.txt").symlink_to("/dev/zero")), "it is no file"),
    (lambda f: (f.mkdir(), os.mkfifo(f / "a.txt")), "it is no file"),
])  # fmt: skip
def test_nothing_to_judge(tmp_path, capsys, make, said):
    make(tmp_path / "x")
    status, text = judged(capsys, tmp_path / "x")
    assert status == 2 and said in text


def test_two_sets(tmp_path, capsys):
    this, base = write_ours(tmp_path / "new", steps=450), write_ours(tmp_path / "old", seed=200)
    track, words = verify.TRACKS["tiny"], ["tiny", "--target", "0", "--muon_lr", "9"]
    for changes, said in (
        (dict(devices=["NVIDIA H100"]), "different devices"),
        (dict(versions={"jax": "0.10.2"}), "different versions"),
        (dict(environment={"JAX_PLATFORMS": "cpu"}), "different environment: JAX_PLATFORMS"),
        (dict(driver="580"), "different driver"),
        (dict(data=OTHER), "validated on different texts"),
        (dict(data=SWAPPED), "trained on different streams of tokens"),
        (dict(data=OTHER), "baseline: validated on another text than the track's"),
        (dict(argv=words), "different argv"),
    ):
        for i in EVERY:
            again(base, i, seed=200 + i, **changes)
        assert any(said in found for found in fails(judged(capsys, this, base)[1])), said
    fewer = [dict(file="0", sha256=track.train[0]), SHARD]
    for i in EVERY:
        again(base, i, seed=200 + i)
        again(this, i, steps=450, data=fewer)
    assert fails(judged(capsys, this, base)[1]) == []  # fewer steps may need fewer shards
    shared = next((this / "logs").iterdir())
    (base / "logs" / shared.name).write_bytes(shared.read_bytes())
    assert "a log is in both" in fails(judged(capsys, this, base)[1])


def test_as_many_tokens_are_not_fewer(tmp_path, capsys):
    this, base = write_ours(tmp_path / "new"), write_ours(tmp_path / "old", seed=200)
    found = fails(judged(capsys, this, base)[1])
    assert found == ["no fewer tokens than the baseline: 1,024,000 against 1,024,000"]


def test_time_needs_p_below_a_hundredth(tmp_path, capsys):
    """A difference of 0.4 standard deviations: p = 0.027 by Welch."""
    results = [(loss, ms - 100) for loss, ms in RECURSIVE]
    this = write_upstream(tmp_path / "new", results, steps=1398)
    base = write_upstream(tmp_path / "old", [(loss, ms + 60) for loss, ms in RECURSIVE], steps=1398)
    (base / "run00.txt").unlink()
    status, text = judged(capsys, this, base)
    (p,) = re.findall(r"training time, s \| -0\.\d+ \| Welch[^|]* p = (0\.\d+)", text)
    assert 0.01 < float(p) < 0.05
    assert any(f"not faster than the baseline: p = {p}" in found for found in fails(text))


def test_a_target_of_ones_own(tmp_path, capsys):
    """It replaces the track's rules; checks of the evidence stay."""
    folder = write_ours(tmp_path / "x", environment={"XLA_FLAGS": "--x"})
    assert judged(capsys, folder)[0] == 1
    assert judged(capsys, folder, "--target", "1.49")[0] == 0
    status, text = judged(capsys, folder, "--target", "1.45")
    assert status == 1 and "for a mean below 1.45" in text
    copied(folder)
    assert "is the same log as" in judged(capsys, folder, "--target", "1.49")[1]
    for target in ("inf", "nan", "-1"):
        with pytest.raises(SystemExit):
            verify.main([str(folder), "--target", target])


def test_a_record_of_8xh100_has_eight(tmp_path, capsys):
    folder = write_upstream(tmp_path / "x", RECURSIVE, steps=1398)
    assert judged(capsys, folder, "--track", "8xh100")[0] == 0
    assert "not the track's devices" in judged(capsys, folder, "--track", "1xgpu")[1]
    for path in folder.iterdir():
        path.write_text(re.sub("^[|]   [1-7].*\n", "", path.read_text(), flags=re.M))
    found = fails(judged(capsys, folder, "--track", "8xh100")[1])
    assert found == ["not the track's devices: 1 x NVIDIA H100 80GB HBM3"]


def test_a_log_that_cannot_be_read_is_one_of_those_planned(tmp_path, capsys):
    folder = write_ours(tmp_path / "x")
    sorted((folder / "logs").iterdir())[0].write_text("x")
    (found,) = fails(judged(capsys, folder)[1])
    assert found.startswith("no log: ")


def test_a_seed_is_no_flag_that_counts():
    words = ["tiny", "--seed=3", "--target", "0", "--seed", "4"]
    assert runs.without_seed(words) == ["tiny", "--target", "0"]


def test_upstreams_logs_are_none_of_tiny(tmp_path, capsys):
    folder = write_upstream(tmp_path / "x", [(1.46, 80000), (1.461, 80001), (1.462, 80002)])
    found = fails(judged(capsys, folder, "--track", "tiny")[1])
    assert any("do not state them" in text for text in found)


def test_two_equal_losses_of_four_digits_are_no_repeat(tmp_path, capsys):
    """Where a log has nothing else, and only there."""
    folder = write_upstream(tmp_path / "x", [(3.2780, 80000), (3.2780, 80100), (3.2779, 80050)])
    assert fails(judged(capsys, folder)[1]) == []
    for path in folder.iterdir():  # with more validations that is no chance
        text = path.read_text().replace("val_loss:4.501", "val_loss:4.500")
        lines = "".join(f"step:{i}/1390 val_loss:4.4 train_time:{9000 + i}ms step_avg:36.00ms\n"
                        for i in range(300, 1300, 100))  # fmt: skip
        path.write_text(text.replace("step:1390/1390 train", lines + "step:1390/1390 train"))
    assert any("the losses of" in found for found in fails(judged(capsys, folder)[1]))


def test_upstreams_nan(tmp_path, capsys):
    folder = write_upstream(tmp_path / "x", [(3.2790, 80000), (float("nan"), 80100)])
    assert "run01.txt: not finite" in fails(judged(capsys, folder)[1])


def test_arms_of_one_plan_were_interleaved(tmp_path, capsys):
    """Whether they lie beside their plan, or each with a copy that names its arm."""
    source = SOURCE + "#\n"
    this = write_ours(tmp_path / "new", steps=450)
    base = write_ours(tmp_path / "old", hour=14, source=source)
    arms = dict(new=hashlib.sha256(SOURCE.encode()).hexdigest(),
                old=hashlib.sha256(source.encode()).hexdigest())  # fmt: skip
    assert "were not interleaved" in judged(capsys, this, base)[1]
    for folder in (this, base):
        write_plan(folder, [100 + i for i in EVERY], arms=arms)
    status, text = judged(capsys, this, base)
    assert status == 0 and "were not interleaved" not in text
    write_plan(base, [100 + i for i in EVERY], arms=arms, salt="1")
    assert "were not interleaved" in judged(capsys, this, base)[1]


PATCH = "--- a/train_gpt.py\n+++ b/train_gpt.py\n@@ -1 +1 @@\n-print('not executed')\n+{}\n"


@pytest.mark.parametrize("patch, said", [
    (PATCH.format("x = 1"), None),
    (PATCH.format("x = 1").replace("not executed", "other"), "does not apply"),
    ("diff --git a/train_gpt.py b/train_gpt.py\ndeleted file mode 100644\n--- a/train_gpt.py\n"
     "+++ /dev/null\n@@ -1 +0,0 @@\n-print('not executed')\n", "does not apply"),
    ("diff --git a/train_gpt.py b/train_gpt.py\ndeleted file mode 100644\n--- a/train_gpt.py\n"
     "+++ /dev/null\n@@ -1 +0,0 @@\n-print('not executed')\n"
     "diff --git a/train_gpt.py b/train_gpt.py\nnew file mode 120000\n--- /dev/null\n"
     "+++ b/train_gpt.py\n@@ -0,0 +1 @@\n+/dev/zero\n\\ No newline at end of file\n",
     "does not apply"),
    (PATCH.format("x = 1").replace("train_gpt.py", "../train_gpt.py"), "does not apply"),
    ("", "does not apply"),
])  # fmt: skip
def test_patches(tmp_path, patch, said):
    (tmp_path / "x.patch").write_text(patch)
    if said is None:
        assert runs.patched(SOURCE.encode(), tmp_path / "x.patch") == b"x = 1\n"
        return
    with pytest.raises(ValueError, match=said):
        runs.patched(SOURCE.encode(), tmp_path / "x.patch")


def test_a_baseline_of_another_day(tmp_path, capsys):
    this, base = write_ours(tmp_path / "new", steps=450), write_ours(tmp_path / "old", seed=200)
    for path in (base / "logs").iterdir():
        path.rename(path.with_name(path.name.replace("11-21", "11-23")))
    assert "more than a day apart" in judged(capsys, this, base)[1]


# ---- It only reads -------------------------------------------------------------------------------
def test_a_source_is_not_executed(tmp_path):
    flag = tmp_path / "executed"
    evil = f"import pathlib; pathlib.Path({str(flag)!r}).touch()\n"
    folder = write_ours(tmp_path / "evil", source=evil)
    (folder / "sitecustomize.py").write_text(evil)
    (folder / "runs.py").write_text(evil)
    command = [sys.executable, RECORDS / "verify.py", "."]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0 and not flag.exists()


def test_nothing_of_a_log_reaches_the_terminal_unescaped(tmp_path, capsys):
    folder = write_ours(tmp_path / "good")
    evil = "\x1b[31m<script>|`x`\n# PASS"
    again(folder, 1, driver=evil, versions={evil: evil, "jax": evil})
    (folder / "logs" / "a\x1b[2J|b.txt").write_text("x")
    _, text = judged(capsys, folder)
    assert "\x1b" not in text and "<script>" not in text and "\n# PASS" not in text
    assert all(line.count("|") in (0, 3, 5) for line in text.splitlines())


def test_the_judge_needs_no_packages():
    """It runs where nothing is installed; and nothing in records/ evaluates what it reads."""
    for path in RECORDS.glob("*.py"):
        tree = ast.parse(path.read_text())
        nodes = list(ast.walk(tree))
        names = [a.name for node in nodes if isinstance(node, ast.Import) for a in node.names]
        names += [node.module for node in nodes if isinstance(node, ast.ImportFrom)]
        own = {file.stem for file in RECORDS.glob("*.py")}
        foreign = {name.split(".")[0] for name in names} - sys.stdlib_module_names - own
        assert foreign == ({"matplotlib"} if path.name == "plot.py" else set()), path.name
        called = {node.id for node in nodes if isinstance(node, ast.Name)}
        assert not called & {"eval", "exec", "compile", "__import__"}, path.name
        assert not {name.split(".")[0] for name in names} & {"pickle", "marshal", "runpy"}
        keywords = {node.arg for node in nodes if isinstance(node, ast.keyword)}
        assert "shell" not in keywords


# ---- Tracks --------------------------------------------------------------------------------------
def test_the_tracks_are_what_the_presets_and_data_are():
    fineweb = cached_fineweb10B.PINNED
    pins = dict(record=fineweb, tiny=source_code.SHARDS)
    today = {name: track for name, track in verify.TRACKS.items() if name != "tiny"}  # it is closed
    assert set(today) == {"8xh100", "1xgpu", "tiny-2k"}
    for track in today.values():
        c, known = train_gpt.PRESETS[track.preset], pins[track.preset]
        assert (track.target, track.val_tokens) == (c.target, c.val_tokens)
        shards = [sha for name, sha in sorted(known.items()) if "_train_" in name]
        assert list(track.train) == shards
        assert [track.val] == [sha for name, sha in known.items() if "_val_" in name]


def test_a_text_of_no_track_is_judged_by_the_track_of_today(tmp_path):
    e = verify.collect(write_ours(tmp_path / "x", data=[SHARD | dict(sha256="0" * 64)]))
    assert verify.infer_track(e) == "tiny-2k"
    assert verify.infer_track(verify.collect(write_ours(tmp_path / "y"))) == "tiny"


def test_the_variables_that_steer_are_those_that_a_log_states():
    assert f"({verify.STEERS.pattern})" in train_gpt.SOURCE


def test_upstreams_logs_state_their_devices(tmp_path):
    (tmp_path / "a.txt").write_text(upstream(3.28, 80000))
    run = runs.read(tmp_path / "a.txt")
    assert run.devices == ["NVIDIA H100 80GB HBM3"] * 8 and run.driver == "580.159.04"
    assert run.versions["PyTorch"].startswith("2.10.0") and not run.ours
    assert (run.loss, run.seconds, run.steps, run.ended) == (3.28, 80.0, 1390, "end of schedule")
    text = upstream(3.28, 80000).replace("train_time:80000ms", "train_time:80.123s")
    (tmp_path / "b.txt").write_text(text)  # as its third track writes it
    assert runs.read(tmp_path / "b.txt").seconds == 80.123
