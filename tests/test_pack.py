"""Making records and comparisons: what goes in, what is refused, which tables follow."""

import hashlib
import json
import subprocess
from pathlib import Path

import pack
import pytest
import runs
import verify
from fake_runs import LOSSES, SOURCE, ours, write_ours, write_plan

NOTES = "## Idea\n\nLess is more.\n\n## What did not work\n\nMore: 1.47.\n"


@pytest.fixture
def place(tmp_path, monkeypatch) -> Path:
    """A records/ with nothing in it."""
    here = tmp_path / "repo" / "records"
    here.mkdir(parents=True)
    tables = "".join(f"<!-- {name}: begin -->\n<!-- {name}: end -->\n" for name in
                     ("history tiny", "history 8xh100"))  # fmt: skip
    (here / "README.md").write_text(f"# Records\n{tables}end\n")
    (here.parent / "README.md").write_text("# Repo\n")
    monkeypatch.setattr(pack, "HERE", here)
    return here


def packed(*words) -> None:
    pack.main([str(word) for word in words])


def refused(capsys, *words) -> str:
    with pytest.raises(SystemExit) as end:
        packed(*words)
    assert end.value.code == 2
    printed = capsys.readouterr()
    return printed.out + printed.err


def arm(folder: Path, **changes) -> Path:
    write_ours(folder, **changes)
    (folder / "notes.md").write_text(NOTES)
    return folder


# ---- Making them ---------------------------------------------------------------------------------
def test_a_record_and_the_next(place, tmp_path):
    packed(arm(tmp_path / "first"), "--name", "first")
    record = place / "tiny" / "2026-11-21_first"
    names = {path.relative_to(record).as_posix() for path in record.rglob("*") if path.is_file()}
    logs = {name for name in names if name.startswith("logs/")}
    assert len(logs) == 5 and names - logs == {
        "README.md", "train_gpt.py", "plan.json", "result.json", "curves.svg", "curves.png",
    }  # fmt: skip
    assert (record / "train_gpt.py").read_text() == SOURCE
    assert not any(SOURCE in (record / name).read_text() for name in logs)
    assert verify.main([str(record)]) == 0
    text = (record / "README.md").read_text()
    title = "# first: 1,024,000 tokens, mean loss 1.45968, sd 0.00969, n = 5, p = 0.0011\n"
    assert text.startswith(title) and "The first of its track" in text and "Less is more" in text
    assert "![validation loss](curves.svg)" in text and "## PASS: first" in text

    source = SOURCE + "# one line more\n"
    new = arm(tmp_path / "second", steps=450, source=source, seed=300, hour=15)
    old = write_ours(tmp_path / "old", seed=300, hour=16)
    packed(new, "--name", "second", "--baseline", old, "--track", "tiny")
    record = place / "tiny" / "2026-11-21_second"
    result = json.loads((record / "result.json").read_text())
    assert result["parent"] == "2026-11-21_first" and result["baseline"]["n"] == 5
    assert verify.main([str(record), str(record / "baseline")]) == 0
    text = (record / "README.md").read_text()
    assert "Lines changed against the parent: 1 " in text and "\n+# one line more\n" in text
    parent = (place / "tiny" / "2026-11-21_first" / "train_gpt.py").read_bytes()
    assert runs.patched(parent, record / "change.patch") == source.encode()

    table = (place / "README.md").read_text()
    assert "| [first](tiny/2026-11-21_first/) | 1,024,000 tokens | 1.4597 ± 0.0097 | 5 |" in table
    assert "[second](tiny/2026-11-21_second/) | 921,600 tokens |" in table
    assert "No record yet." in table and table.endswith("end\n")
    sums = (place / "SHA256SUMS").read_text()
    check = subprocess.run(["sha256sum", "--strict", "-c", "SHA256SUMS"], cwd=place,
                           capture_output=True, text=True)  # fmt: skip
    assert check.returncode == 0 and sums.count("2026-11-21_first/") == len(names)


def test_a_record_is_not_made_twice(place, tmp_path, capsys):
    packed(arm(tmp_path / "first"), "--name", "first")
    before = {path: path.read_bytes() for path in place.rglob("*") if path.is_file()}
    assert "is there already" in refused(capsys, tmp_path / "first", "--name", "first")
    assert {path: path.read_bytes() for path in place.rglob("*") if path.is_file()} == before


def test_questions_come_first(place, tmp_path, capsys):
    folder = write_ours(tmp_path / "first")
    assert "answer the questions in" in refused(capsys, folder, "--name", "first")
    assert (folder / "notes.md").read_text() == pack.NOTES
    assert "still has questions" in refused(capsys, folder, "--name", "first")
    (folder / "notes.md").write_text("## Idea\n\nNo.\n")
    assert "lacks one of its headings" in refused(capsys, folder, "--name", "first")
    assert not list(place.glob("tiny/*"))


@pytest.mark.parametrize("plant, said", [
    (lambda f: next((f / "logs").iterdir()).write_text(ours(100, 1.4633, source="#\n")),
     "2 different sources"),
    (lambda f: [p.write_text(ours(100, 1.46)) for p in [sorted((f / "logs").iterdir())[1]]],
     "has the seed of"),
    (lambda f: (f / "plan.json").unlink(), "no plan"),
    (lambda f: (f / "train_gpt.py").write_text("#\n"), "train_gpt.py is not the source"),
    (lambda f: write_plan(f, [100 + i for i in range(6)]), "planned 6 runs, found 5"),
])  # fmt: skip
def test_what_does_not_hold_is_not_packed(place, tmp_path, capsys, plant, said):
    folder = arm(tmp_path / "first")
    plant(folder)
    text = refused(capsys, folder, "--name", "first")
    assert said in text and "no record: see what fails" in text
    assert not list(place.glob("tiny/*")) and not (place / "SHA256SUMS").exists()


@pytest.mark.parametrize("words", [
    [], ["x"], ["x", "--name", "../x"], ["x", "--name", "X Y"], ["x", "--name", "missing"],
    ["x", "--name", "y", "--track", "16xh100"],
])  # fmt: skip
def test_words_that_make_no_sense(place, tmp_path, capsys, words):
    refused(capsys, *[word.replace("x", str(tmp_path / "x")) if word == "x" else word
                      for word in words])  # fmt: skip


def test_a_record_beats_the_one_before(place, tmp_path, capsys):
    packed(arm(tmp_path / "first"), "--name", "first")
    same = arm(tmp_path / "same", seed=300)
    assert "2026-11-21_first takes 1,024,000 tokens" in refused(capsys, same, "--name", "same")
    packed(arm(tmp_path / "less", seed=400, steps=450), "--name", "less")
    middle = arm(tmp_path / "middle", seed=500, steps=470)
    assert "2026-11-21_less takes 921,600 tokens" in refused(capsys, middle, "--name", "middle")
    rows = [
        line for line in (place / "README.md").read_text().splitlines() if "2026-11-21_" in line
    ]
    assert [row.split("]")[0].split("[")[1] for row in rows] == ["first", "less"]


def test_the_same_runs_make_one_record(place, tmp_path, capsys):
    packed(arm(tmp_path / "first"), "--name", "first")
    assert "are in a record already" in refused(capsys, tmp_path / "first", "--name", "again")


def test_time_is_compared_with_the_record_in_one_plan(place, tmp_path, capsys):
    track = verify.TRACKS["8xh100"]
    shards = [dict(file=str(i), sha256=sha) for i, sha in enumerate([*track.train, track.val])]
    facts = dict(devices=["NVIDIA H100 80GB HBM3"] * 8, data=shards)
    config = dict(preset="record", val_tokens=track.val_tokens)

    def runs_of(name, seed, ms, source=SOURCE, arms=None):
        folder = tmp_path / name
        (folder / "logs").mkdir(parents=True)
        for i, loss in enumerate((3.2781, 3.2785, 3.2779, 3.2790, 3.2777)):
            argv = ["record", "--target", "0", "--seed", str(seed + i)]
            text = ours(
                seed + i, loss, ms=ms + 10 * i, argv=argv, source=source, config=config, **facts
            )
            (folder / "logs" / f"2026-11-21T13-{seed % 60:02}-{i:02}_{seed + i}.txt").write_text(
                text
            )
        (folder / "train_gpt.py").write_text(source)
        (folder / "notes.md").write_text(NOTES)
        own = {name: hashlib.sha256(source.encode()).hexdigest()}
        write_plan(folder, [seed + i for i in range(5)], source, arms=arms or own,
                   arguments=["record", "--target", "0"])  # fmt: skip
        return folder

    packed(runs_of("first", 100, 150_000), "--name", "first")
    text = (place / "8xh100" / "2026-11-21_first" / "README.md").read_text()
    assert text.startswith("# first: 150.02 s, mean loss 3.27824,")
    sources = dict(old=SOURCE, new=SOURCE + "#\n")
    arms = {name: hashlib.sha256(source.encode()).hexdigest() for name, source in sources.items()}
    new = runs_of("new", 200, 140_000, sources["new"], arms)
    assert "it takes --baseline, 2026-11-21_first" in refused(capsys, new, "--name", "new")
    straw = runs_of("straw", 200, 900_000, SOURCE + "# slow\n")
    words = new, "--name", "new", "--baseline"
    assert "it takes --baseline, 2026-11-21_first" in refused(capsys, *words, straw)
    other_plan = runs_of("other", 200, 150_000)
    assert "it takes --baseline, 2026-11-21_first" in refused(capsys, *words, other_plan)
    packed(*words, runs_of("old", 200, 150_000, arms=arms))
    record = place / "8xh100" / "2026-11-21_new"
    text = (record / "README.md").read_text()
    assert "were not interleaved" not in text
    assert verify.main([str(record), str(record / "baseline")]) == 0
    assert "were not interleaved" not in capsys.readouterr().out
    assert f"run_ab.py baseline={'records/8xh100/2026-11-21_new'}/baseline new=" in text
    assert (record / "baseline" / "train_gpt.py").read_text() == SOURCE
    assert json.loads((record / "result.json").read_text())["parent"] == "2026-11-21_first"


def test_what_was_interrupted_stays_visible(place, tmp_path):
    folder = arm(tmp_path / "first")
    (folder / "unfinished").mkdir()
    text = ours(100, 1.46).partition("step:500")[0] + "INTERRUPTED\n"
    (folder / "unfinished" / "x.txt").write_text(text)
    packed(folder, "--name", "first")
    assert (place / "tiny" / "2026-11-21_first" / "unfinished" / "x.txt").read_text() == text


def test_nothing_is_left_of_a_record_that_fails_late(place, tmp_path, monkeypatch):
    def broken(*args, **words):
        raise OSError("no space")

    monkeypatch.setattr(pack, "draw", broken)
    with pytest.raises(OSError):
        packed(arm(tmp_path / "first"), "--name", "first")
    assert list((place / "tiny").iterdir()) == [] and not (place / "SHA256SUMS").exists()


def test_missing_sums_are_added(place, tmp_path, capsys):
    packed(arm(tmp_path / "first"), "--name", "first")
    sums = (place / "SHA256SUMS").read_text()
    (place / "SHA256SUMS").unlink()
    packed("--tables")
    packed("--tables")
    assert (place / "SHA256SUMS").read_text() == sums
    (place / "README.md").write_text(
        "<!-- comparison tiny/x: begin -->\n<!-- comparison tiny/x: end -->"
    )
    assert "there is no such thing" in refused(capsys, "--tables")


def test_a_long_diff_is_a_file_only(place, tmp_path):
    packed(arm(tmp_path / "first"), "--name", "first")
    source = SOURCE + "".join(f"# {i}\n" for i in range(100))
    packed(arm(tmp_path / "long", source=source, steps=450, seed=300), "--name", "long")
    record = place / "tiny" / "2026-11-21_long"
    text = (record / "README.md").read_text()
    assert "Lines changed against the parent: 100 " in text and "```diff" not in text
    assert "+# 99\n" in (record / "change.patch").read_text()


def test_more_tokens_are_no_record_beside_a_baseline(place, tmp_path, capsys):
    folder, base = arm(tmp_path / "new"), write_ours(tmp_path / "old", seed=300)
    text = refused(capsys, folder, "--name", "new", "--baseline", base)
    assert "no fewer tokens than the baseline" in text


# ---- Comparisons ---------------------------------------------------------------------------------
def make_study(folder: Path, **facts) -> Path:
    """A plan of three arms that share their seeds; two are patches of the first."""
    folder.mkdir()
    arms, shifts = {}, dict(baseline=0.0, worse=0.03, same=0.001)
    for hour, (name, shift) in enumerate(shifts.items(), 13):
        source = SOURCE if name == "baseline" else SOURCE.replace("not executed", name)
        write_ours(folder / name, [loss + shift + 0.001 * (i % 2) * (hour - 13)
                                   for i, loss in enumerate(LOSSES)],
                   hour=hour, source=source, **facts)  # fmt: skip
        (folder / name / "plan.json").unlink()
        arms[name] = hashlib.sha256(source.encode()).hexdigest()
        if name != "baseline":
            patch = f"--- a/train_gpt.py\n+++ b/train_gpt.py\n@@ -1 +1 @@\n-{SOURCE}+{source}"
            (folder / name / "change.patch").write_text(patch)
    write_plan(folder, [100 + i for i in range(5)], arms=arms)
    (folder / "notes.md").write_text(NOTES)
    return folder


def test_a_comparison(place, tmp_path, capsys):
    name = "comparison tiny/2026-11-21_all"
    table = f"<!-- {name}: begin -->\n<!-- {name}: end -->\n"
    packed(make_study(tmp_path / "plan"), "--name", "all", "--track", "tiny")
    folder = place / "tiny" / "2026-11-21_all"
    assert not (folder / "worse" / "train_gpt.py").exists()
    assert (folder / "worse" / "change.patch").exists()
    assert verify.main([str(folder)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "| worse | 5 | 1.4901 ± 0.0097 | +0.0304 | 0.0005 | 2.5e-08 |" in lines
    assert not any("note: the source" in line for line in lines)
    result = json.loads((folder / "result.json").read_text())
    assert result["arms"]["worse"]["difference"] == pytest.approx(0.0304)
    (place.parent / "README.md").write_text(f"# Repo\n{table}end\n")
    packed("--tables")
    lines = (place.parent / "README.md").read_text().splitlines()
    seeds = "+0.030 +0.031 +0.030 +0.031 +0.030", "+0.001 +0.003 +0.001 +0.003 +0.001"
    assert lines[4:7] == [
        "| (baseline) | 1.4597 ± 0.0097 |  |  |  |",
        f"| worse | 1.4901 ± 0.0097 | +0.0304 ± 0.0005 | {seeds[0]} | 2.5e-08 |",
        f"| same | 1.4615 ± 0.0098 | +0.0018 ± 0.0011 | {seeds[1]} | 0.0213 |",
    ]
    result["arms"]["same"]["difference"] = -0.1
    (folder / "result.json").write_text(json.dumps(result))
    assert verify.main([str(folder)]) == 1
    assert "- same: **FAIL** result.json says difference = -0.1" in capsys.readouterr().out


def test_a_comparison_that_does_not_hold(place, tmp_path, capsys):
    plan = make_study(tmp_path / "plan")
    path = next((plan / "worse" / "logs").iterdir())
    path.write_text(path.read_text().replace('"val_loss": 1.4', '"val_loss": 1.3'))
    text = refused(capsys, plan, "--name", "all")
    assert "no comparison: see what fails" in text and "- worse: **FAIL** no log" in text
    assert not list(place.glob("tiny/*"))


@pytest.mark.parametrize("facts, said", [
    (dict(config=dict(val_tokens=64)), "validated on 64 tokens"),
    (dict(devices=["TPU"]), "not the track's devices"),
    (dict(data=[dict(file="0", sha256="0" * 64)] * 2), "validated on another text"),
])  # fmt: skip
def test_a_comparison_is_of_its_track(place, tmp_path, capsys, facts, said):
    plan = make_study(tmp_path / "plan", **facts)
    assert said in refused(capsys, plan, "--name", "all")
    assert "are not of track 8xh100" in refused(capsys, plan, "--name", "all", "--track", "8xh100")


def test_arms_of_a_comparison_ran_on_one_machine(place, tmp_path, capsys):
    plan = make_study(tmp_path / "plan")
    for path in (plan / "same" / "logs").iterdir():
        path.write_text(path.read_text().replace('"jax": "0.12.0.1"', '"jax": "0.10.2"'))
    assert "- same: **FAIL** different versions: jax" in refused(capsys, plan, "--name", "all")


def test_an_arm_without_effect_is_packed_and_holds(place, tmp_path, capsys):
    plan = make_study(tmp_path / "plan")
    first = sorted((plan / "baseline" / "logs").iterdir())
    for path, other in zip(sorted((plan / "same" / "logs").iterdir()), first, strict=True):
        head, _, _ = path.read_text().partition("step:0/")
        tail = "step:0/" + other.read_text().partition("step:0/")[2]
        path.write_text(head + tail.replace("90000", "90001"))
    packed(plan, "--name", "all")
    folder = place / "tiny" / "2026-11-21_all"
    assert verify.main([str(folder)]) == 0
    assert "| +0.0000 | 0.0000 | – |" in capsys.readouterr().out
    assert "NaN" not in (folder / "result.json").read_text()
