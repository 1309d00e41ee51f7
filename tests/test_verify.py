"""The judge: upstream's published numbers, and every way in which evidence can be none."""

import re
import subprocess
import sys
from pathlib import Path
from statistics import fmean, stdev

import cached_fineweb10B
import fake_runs
import pytest
import runs
import source_code
import stats
import verify
from fake_runs import LOSSES, SOURCE, data, ours, sha, write_ours, write_plan, write_upstream

import train_gpt


def judged(capsys, *words) -> tuple[int, str]:
    status = verify.main([str(word) for word in words])
    printed = capsys.readouterr()
    return status, printed.out + printed.err


def fails(capsys, *words) -> list[str]:
    return re.findall(r"\*\*FAIL\*\* (.*?)(?:<br>| \|)", judged(capsys, *words)[1])


def test_pull_request_322_in_full(tmp_path, capsys):
    """n = 13, mean 3.27893, sd 0.00137, p = 0.0078; its own verifier said t = -2.815,
    p = 0.007803, time = 77.34 ± 0.20 s."""
    folder = write_upstream(tmp_path / "this_pr", fake_runs.RECURSIVE, steps=1398)
    status, text = judged(capsys, folder)
    assert status == 0 and "FAIL" not in text and text.startswith("## PASS: this_pr\n")
    for line in (
        "| runs | 13 |", "| steps | 1,398 |", "| final loss, mean ± sd | 3.27893 ± 0.00137 |",
        "| training time, s | 77.34 ± 0.20 |", "| p(mean < 3.28), t-test | 0.0078 (t = -2.815) |",
        "| margin | 0.00107 |", "| runs for 80 % power | 20 |", "| ms a step | 55.32 |",
        "| z rule | margin · √n = 0.0039; 0.004 is p < 0.001 |",
        "| run00.txt | – | 3.27910 | 77.93 |",
    ):  # fmt: skip
        assert line in text.splitlines()
    assert stats.below(verify.collect(folder).losses, 3.28).p == pytest.approx(0.007802956)


def test_fp8_down_projection(tmp_path):
    """Its statistics.md: p = 0.0006690604, mean time 79.684923 s with a deviation of 0.182767."""
    e = verify.collect(write_upstream(tmp_path / "a", fake_runs.FP8_DOWN))
    assert stats.below(e.losses, 3.28).p == pytest.approx(0.0006690604, abs=1e-10)
    loss, time = ((fmean(values), stdev(values)) for values in (e.losses, e.seconds))
    assert loss == pytest.approx((3.2783692308, 0.0014156180), abs=1e-10)
    assert time == pytest.approx((79.684923, 0.182767), abs=1e-6)


def test_xsa_gated_layers_against_its_baseline(tmp_path, capsys):
    """Its README: p = 0.00561; Welch on time t = -20.36, df = 13.1, p = 1.36e-11, -0.68 s."""
    this = write_upstream(tmp_path / "xsa", fake_runs.XSA, steps=1450)
    base = write_upstream(tmp_path / "master", fake_runs.XSA_MASTER, steps=1480)
    status, text = judged(capsys, this, base)
    assert status == 0 and "FAIL" not in text
    assert "| p(mean < 3.28), t-test | 0.0056 (t = -3.101) | 0.2644 (t = -0.668) |" in text
    welch = "Welch, one-sided (this is less): p = 1.4e-11, t = -20.36, df = 13.1"
    assert f"| training time, s | -0.684 | {welch} |" in text
    p, time = fails(capsys, base, this)
    assert "0.2644 for a mean below 3.28" in p and "not faster than the baseline" in time


def test_pull_request_139(tmp_path):
    """Its text says 'over 10 runs', mean 2.9194, deviation 0.00069, p = 0.0001256: they are 22."""
    runs_of = [(loss, 1384256 + i) for i, loss in enumerate(fake_runs.MEDIUM)]
    losses = verify.collect(write_upstream(tmp_path / "pr139", runs_of)).losses
    assert len(losses) == 22
    assert stats.below(losses, 2.92).p == pytest.approx(0.0001256, abs=5e-8)
    assert (round(fmean(losses), 4), round(stdev(losses), 5)) == (2.9194, 0.00069)


def test_runs_of_ours_that_hold(tmp_path, capsys):
    folder = write_ours(tmp_path / "good")
    again(folder, argv=["tiny", "--seed=101", "--target", "0"])  # a seed is no flag that counts
    status, text = judged(capsys, folder)
    assert status == 0 and "FAIL" not in text
    assert "| runs | 5 of 5 planned |" in text and "| tokens | 1,024,000 |" in text
    assert "| final loss, mean ± sd | 1.45968 ± 0.00969 |" in text
    assert text.count("| ok |") == len(verify.CHECKS) + 1
    status, text = judged(capsys, write_ours(tmp_path / "low", [1.485 + i / 10000 for i in EVERY]))
    assert status == 0 and "note: the margin is less than 0.005" in text


def test_a_baseline_with_more_tokens(tmp_path, capsys):
    """Pairs are of equal seeds, in whatever order their runs began."""
    this, base = write_ours(tmp_path / "new", steps=450), write_ours(tmp_path / "old")
    for i in EVERY:
        again(base, i, seed=104 - i, loss=LOSSES[4 - i] - 0.01)
    status, text = judged(capsys, this, base)
    assert status == 0 and "FAIL" not in text
    assert "| tokens | 921,600 | 1,024,000 |" in text
    assert "| final loss, paired by seed | 0.01000 ± 0.00000 |" in text
    assert "not interleaved" in text  # a note: they have plans of their own
    said = "no fewer tokens than the baseline: 1,024,000 against"
    assert fails(capsys, base, this) == [f"{said} 921,600"]
    assert fails(capsys, base, write_ours(tmp_path / "same", seed=200)) == [f"{said} 1,024,000"]


def test_upstreams_logs_are_read(tmp_path):
    text = fake_runs.upstream(3.28, 80000)  # its third track writes seconds
    (tmp_path / "a.txt").write_text(text.replace("train_time:80000ms", "train_time:80.123s"))
    run = runs.read(tmp_path / "a.txt")
    assert run.devices == ["NVIDIA H100 80GB HBM3"] * 8 and run.driver == "580.159.04"
    assert run.versions["PyTorch"].startswith("2.10.0") and run.seconds == 80.123


def test_of_a_run_that_went_on_every_loss_counts_once(tmp_path):
    path = tmp_path / "x"
    read = lambda text: path.write_text(text) and runs.read(path)._replace(sha256="")
    start, middle, end = re.split("(?=step:[25][05]0/)", ours(1, 1.46))
    lost = [re.sub("loss:.", "loss:9", text) for text in (middle, end.partition("RESULT")[0])]
    # GOODPUT, STALLED and the "log" of resume are in logs of earlier versions.
    again = f'GOODPUT 9 %: x\n{STOPPED}\nresume {{"step": 20, "log": "x"}}\nhosts 1\nwarning: x\n'
    text = start + lost[0] + again + "".join(lost) + again.replace("20", "250") + middle
    assert read(text + end) == read(start + middle + end)._replace(resumed=True)
    assert read(text + "STALLED: no step in 9 s\nThread 0x7f:\n  File x\n").ended == "incomplete"


def log(folder: Path, which: int = 1) -> Path:
    return sorted((folder / "logs").iterdir())[which]


def late(folder: Path, text: str) -> None:
    (folder / "logs" / "2026-11-21T23-00-00_1.txt").write_text(text)


def replaced(folder: Path, old: str, new: str) -> None:
    log(folder).write_text(re.sub(old, new, log(folder).read_text(), count=1, flags=re.S))


def again(folder: Path, which: int = 1, **changes) -> None:
    """Writes a log anew, with other facts."""
    seed, loss = changes.pop("seed", 100 + which), changes.pop("loss", LOSSES[which])
    log(folder, which).write_text(ours(seed, loss, **changes))


def each(folder: Path, first_seed: int = 100, **changes) -> None:
    for i in EVERY:
        again(folder, i, seed=first_seed + i, **changes)


EVERY = range(5)
REACHED, EARLY = ("end of schedule", "target reached"), ("500/500", "300/500")
SEEDS, PACKED = [100 + i for i in EVERY], f"source {sha(SOURCE)}\n"
A, B, VAL = verify.TRACKS["tiny"].shards.split()
OTHER, SWAPPED = data(f"{A} {B} 0"), data(f"{B} {A} {VAL}")
GO_ON = "; to resume: ./run.sh tiny --resume logs/x/0000250.state\n"
NAN = f"NON-FINITE: the loss or a weight, by step 500{GO_ON}"
STOPPED = f"INTERRUPTED by SIGTERM after step 250{GO_ON}"
RESULT, FLAGS = "RESULT.*", ["tiny", "--target", "0", "--steps", "500"]
FAULTS = {
    "a log twice": (lambda f: late(f, log(f).read_text()), "is the same log as"),
    "a log twice, once packed": (
        lambda f: late(f, log(f).read_text().replace(SOURCE, PACKED)), "is the same log as"),
    "a seed twice": (lambda f: again(f, seed=100), "has the seed of"),
    "a run twice, as two seeds": (lambda f: again(f, loss=LOSSES[0]), "the losses of"),
    "no RESULT": (lambda f: replaced(f, RESULT, ""), "incomplete"),
    "a RESULT too early": (lambda f: replaced(f, "step:500/500", "step:490/500"), "incomplete"),
    "interrupted": (lambda f: replaced(f, RESULT, STOPPED), "interrupted"),
    "NaN": (lambda f: replaced(f, RESULT, NAN), "not finite"),
    "NaN in RESULT": (lambda f: again(f, loss=float("nan")), "not finite"),
    "resumed": (lambda f: replaced(f, 'resumed": false', 'resumed": true'), "again in one go"),
    "no log": (lambda f: late(f, "hello"), "it has no line of 100 ="),
    "cut within a fact": (lambda f: replaced(f, '"val_tokens".*', ""), "off: JSONDecodeError"),
    "cut before a fact": (lambda f: replaced(f, "config.*", ""), "cut off: KeyError('config')"),
    "two runs in a log": (lambda f: replaced(f, "step:250/500", "step:750/500"), "out of order"),
    "a byte of the source": (lambda f: replaced(f, "not exec", "Not exec"), "2 different sources"),
    "every source": (lambda f: each(f, source="#\n"), "not the source that"),
    "stopped by itself": (lambda f: (replaced(f, *REACHED), replaced(f, *EARLY)), "incomplete"),
    "stopped at its end": (lambda f: replaced(f, *REACHED), "could have stopped"),
    "another loss in RESULT": (lambda f: replaced(f, 'loss": 1', 'loss": 2'), "not that of"),
    "another time in RESULT": (lambda f: replaced(f, 'ms": 9', 'ms": 8'), "not that of"),
    "no tokens": (lambda f: again(f, tokens=-1), "not that of"),
    "stopped early": (lambda f: each(f, config=dict(target=1.49)), "could have stopped at 1.49"),
    "a shorter run": (lambda f: again(f, steps=400), "validate at different steps"),
    "fewer tokens in one": (lambda f: again(f, tokens=600), "count different tokens"),
    "another device": (lambda f: again(f, devices=["gpu"]), "different devices"),
    "another jax": (lambda f: again(f, versions={"jax": "0.10.2"}), "different versions: jax"),
    "another driver": (lambda f: again(f, driver="580"), "different driver"),
    "a variable in one": (lambda f: again(f, environment={"XLA_A": ""}), "environment: TF_CPP_MI"),
    "other flags": (lambda f: again(f, argv=FLAGS), "different argv"),
    "other configuration": (lambda f: again(f, config=dict(lr=1)), "different config: lr"),
    "other layers": (
        lambda f: again(f, config=dict(layers=[])), "different config: layers"),
    "other data": (lambda f: again(f, data=OTHER), "different data"),
    "a variable": (lambda f: each(f, environment={"XLA_FLAGS": "--x"}), "XLA_FLAGS is set"),
    "flags in all": (lambda f: each(f, argv=FLAGS), "a record is what the file does"),
    "a GPU on tiny": (lambda f: each(f, devices=["NVIDIA H100"]), "not the track's devices"),
    "other validation": (lambda f: each(f, data=OTHER), "validated on another text"),
    "another order": (lambda f: each(f, data=SWAPPED), "another stream of tokens"),
    "less validation": (lambda f: each(f, config=dict(val_tokens=8)), "validated on 8 tokens"),
    "one left out": (lambda f: log(f).unlink(), "planned 5 runs with 5 seeds, found 4"),
    "one more": (lambda f: late(f, ours(99, 1.46)), "planned 5 runs with 5 seeds, found 6"),
    "seeds to choose from": (lambda f: write_plan(f, [*SEEDS, 7]), "6 seeds, found 5"),
    "an unplanned seed": (lambda f: again(f, seed=99), "seeds that were not planned: [99]"),
    "no plan": (lambda f: (f / "plan.json").unlink(), "no plan"),
    "another's plan": (lambda f: write_plan(f, SEEDS, arms={"x": sha(SOURCE)}), "no plan"),
    "a late plan": (lambda f: write_plan(f, SEEDS, created="2026-11-21T13:00:01Z"), "run began"),
    "planned flags": (lambda f: write_plan(f, SEEDS, arguments=["tiny"]), "flags than planned"),
    "planned source": (lambda f: write_plan(f, SEEDS, source="#\n"), "source than planned"),
    "a renamed log": (lambda f: log(f).rename(f / "logs" / "r.txt"), "name does not say when"),
    "finished, then thrown away": (
        lambda f: (replaced(f, RESULT, ""), (f / "unfinished").mkdir(),
                   log(f).rename(f / "unfinished" / "x.txt")), "had its final loss: it counts"),
    "a margin of luck": (lambda f: [again(f, i, loss=LOSSES[i] + 0.019) for i in EVERY],
                         "p = 0.0297 for a mean below 1.49; it takes p < 0.01"),
    "equal losses": (lambda f: each(f, loss=1.46), "the losses do not vary: no p-value"),
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_what_is_no_evidence_fails(tmp_path, capsys, fault):
    folder, (plant, said) = write_ours(tmp_path / "good"), FAULTS[fault]
    plant(folder)
    status, text = judged(capsys, folder)
    assert status == 1 and text.startswith("## FAIL: good\n")
    assert any(said in found for found in fails(capsys, folder)), text


def test_runs_that_stopped_at_their_target_have_no_p_value(tmp_path, capsys):
    folder = write_ours(tmp_path / "early", config=dict(target=1.49))
    for path in (folder / "logs").iterdir():
        path.write_text(path.read_text().replace("end of schedule", "target reached"))
    _, text = judged(capsys, folder)
    assert "| p(mean < 1.49), t-test | none: the length of the runs is not fixed |" in text
    assert "no p-value over runs whose length is not fixed" in text
    assert not re.search(r"p = 0|t = ", text)


def test_nothing_to_judge(tmp_path, capsys):
    two = write_ours(tmp_path / "x", config=dict(preset="record"), devices=["NVIDIA H100"] * 2)
    no_log = SOURCE + fake_runs.BORDER + "hello\n"
    for folder, text, said in (
        (two, "x", "these runs look like those of no track"),
        (tmp_path, "x", "a.txt: it has no line of 100 ="),
        (tmp_path, no_log, "it is no log of train_gpt.py, nor of modded-nanogpt's"),
        (tmp_path / "y", "x", "y has no log that can be read"),
    ):
        (tmp_path / "a.txt").write_text(text)
        status, printed = judged(capsys, folder)
        assert status == 2 and said in printed
    (write_ours(tmp_path / "z") / "plan.json").write_text("{}")
    assert judged(capsys, tmp_path / "z")[0] == 2


def test_two_sets(tmp_path, capsys):
    this, base = write_ours(tmp_path / "new", steps=450), write_ours(tmp_path / "old", seed=200)
    for changes, said in (
        (dict(devices=["NVIDIA H100"]), "different devices"),
        (dict(versions={"jax": "0.10.2"}), "different versions"),
        (dict(environment={"JAX_PLATFORMS": "cpu"}), "different environment: JAX_PLATFORMS"),
        (dict(driver="580"), "different driver"),
        (dict(data=OTHER), "different data"),
        (dict(data=SWAPPED), "different data"),
        (dict(data=OTHER), "baseline: validated on another text than the track's"),
        (dict(argv=FLAGS), "different argv"),
    ):
        each(base, 200, **changes)
        assert any(said in found for found in fails(capsys, this, base)), said
    each(base, 200)
    each(this, steps=450, data=data(f"{A} {VAL}"))
    assert fails(capsys, this, base) == []  # fewer steps may need fewer shards
    for path in (base / "logs").iterdir():
        path.rename(path.with_name(path.name.replace("11-21", "11-23")))
    assert "the runs are of 2 days" in judged(capsys, this, base)[1]
    late(base, log(this).read_text())
    assert "a log is in both" in fails(capsys, this, base)


def test_time_needs_p_below_a_hundredth(tmp_path, capsys):
    """A difference of 0.4 standard deviations: p = 0.027 by Welch."""
    this, base = ([(loss, ms + more) for loss, ms in fake_runs.RECURSIVE] for more in (-100, 60))
    words = write_upstream(tmp_path / "new", this), write_upstream(tmp_path / "old", base[1:])
    (p,) = re.findall(r"time, s \| -0\.\d+ \| Welch[^|]* p = (0\.\d+)", judged(capsys, *words)[1])
    assert 0.01 < float(p) < 0.05
    assert any(f"not faster than the baseline: p = {p}" in found for found in fails(capsys, *words))


def test_a_target_of_ones_own(tmp_path, capsys):
    """It replaces the track's rules; checks of the evidence stay."""
    folder = write_ours(tmp_path / "x", environment={"XLA_FLAGS": "--x"})
    assert judged(capsys, folder, "--target", "1.49")[0] == 0
    assert "for a mean below 1.45" in fails(capsys, folder, "--target", "1.45")[0]
    again(folder, seed=100)
    assert "has the seed of" in judged(capsys, folder, "--target", "1.49")[1]


def test_a_record_of_8xh100_has_eight(tmp_path, capsys):
    folder = write_upstream(tmp_path / "x", fake_runs.RECURSIVE)
    assert fails(capsys, folder, "--track", "8xh100") == []
    assert "not the track's devices" in fails(capsys, folder, "--track", "1xgpu")[0]
    assert "do not state them" in fails(capsys, folder, "--track", "tiny")[1]
    for path in folder.iterdir():
        path.write_text(re.sub("^[|]   [1-7].*\n", "", path.read_text(), flags=re.M))
    found = fails(capsys, folder, "--track", "8xh100")
    assert found == ["not the track's devices: 1 x NVIDIA H100 80GB HBM3"]


def test_two_equal_losses_of_four_digits_are_no_repeat(tmp_path, capsys):
    """Where a log has nothing else, and only there. And NaN is no loss."""
    folder = write_upstream(tmp_path / "x", [(3.278, 80000), (3.279, 80100), (3.2779, 80050)])
    (folder / "run01.txt").write_text(fake_runs.upstream(3.278, 80100))
    assert fails(capsys, folder) == []
    end, more = "step:1390/1390 train", "step:300/1390 val_loss:4 train_time:9300ms step_avg:36ms\n"
    for path in folder.iterdir():
        path.write_text(path.read_text().replace(end, more + end))
    assert fails(capsys, folder) == ["run01.txt has, at every step, the losses of run00.txt"]
    (folder / "run01.txt").write_text(fake_runs.upstream(float("nan"), 80100))
    assert "run01.txt: not finite" in fails(capsys, folder)


def test_the_judge_needs_no_packages_and_executes_no_source(tmp_path):
    flag = tmp_path / "executed"
    evil = f"import pathlib; pathlib.Path({str(flag)!r}).touch()\n"
    folder = write_ours(tmp_path / "evil", source=evil)
    (folder / "runs.py").write_text(evil)
    command = [sys.executable, "-S", verify.__file__, "."]  # -S: without site-packages
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "") and not flag.exists()


def test_the_tracks_are_what_the_presets_and_data_are(tmp_path):
    """And runs are judged by the track of their text, else by that of today."""
    for text, name in (OTHER, "tiny-2k"), (data(f"{A} {VAL}"), "tiny"):
        folder = write_ours(tmp_path / name, data=text)
        assert verify.infer_track(verify.collect(folder)) == name
    pins = dict(record=cached_fineweb10B.PINNED, tiny=source_code.SHARDS)
    today = {name: track for name, track in verify.TRACKS.items() if name != "tiny"}  # it is closed
    assert set(today) == {"8xh100", "1xgpu", "tiny-2k"}
    for track in today.values():
        c, known = train_gpt.PRESETS[track.preset], pins[track.preset]
        assert (track.target, track.val_tokens) == (c.target, c.val_tokens)
        names = sorted(known, key=lambda name: ("_val_" in name, name))
        assert track.shards.split() == [known[name][:16] for name in names]
