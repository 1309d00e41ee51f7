"""Making records and comparisons: what goes in, what is refused, which tables follow."""

import hashlib
import json
import subprocess
from pathlib import Path

import pack
import pytest
import run_ab
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
    assert run_ab.patched(parent, record / "change.patch") == source.encode()

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


def test_more_tokens_are_no_record_beside_a_baseline(place, tmp_path, capsys):
    folder, base = arm(tmp_path / "new"), write_ours(tmp_path / "old", seed=300)
    text = refused(capsys, folder, "--name", "new", "--baseline", base)
    assert "no fewer tokens than the baseline" in text


# ---- Comparisons ---------------------------------------------------------------------------------
def make_study(folder: Path) -> Path:
    """A plan of three arms that share their seeds; two are patches of the first."""
    folder.mkdir()
    arms, shifts = {}, dict(baseline=0.0, worse=0.03, same=0.001)
    for hour, (name, shift) in enumerate(shifts.items(), 13):
        source = SOURCE if name == "baseline" else SOURCE.replace("not executed", name)
        write_ours(folder / name, [loss + shift + 0.001 * (i % 2) * (hour - 13)
                                   for i, loss in enumerate(LOSSES)],
                   hour=hour, source=source)  # fmt: skip
        (folder / name / "plan.json").unlink()
        arms[name] = hashlib.sha256(source.encode()).hexdigest()
        if name != "baseline":
            patch = f"--- a/train_gpt.py\n+++ b/train_gpt.py\n@@ -1 +1 @@\n-{SOURCE}+{source}"
            (folder / name / "change.patch").write_text(patch)
    write_plan(folder, [100 + i for i in range(5)], arms=arms)
    plan = json.loads((folder / "plan.json").read_text())
    del plan["arm"]
    (folder / "plan.json").write_text(json.dumps(plan))
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
    result = json.loads((folder / "result.json").read_text())
    assert result["arms"]["worse"]["difference"] == pytest.approx(0.0304)
    (place.parent / "README.md").write_text(f"# Repo\n{table}end\n")
    packed("--tables")
    lines = (place.parent / "README.md").read_text().splitlines()
    assert lines[4:7] == ["| (baseline) | 1.4597 ± 0.0097 |  |  |",
                          "| worse | 1.4901 ± 0.0097 | +0.0304 ± 0.0005 | 2.5e-08 |",
                          "| same | 1.4615 ± 0.0098 | +0.0018 ± 0.0011 | 0.0213 |"]  # fmt: skip
    result["arms"]["same"]["difference"] = -0.1
    (folder / "result.json").write_text(json.dumps(result))
    assert verify.main([str(folder)]) == 1
    assert "- same: result.json says difference = -0.1" in capsys.readouterr().out
