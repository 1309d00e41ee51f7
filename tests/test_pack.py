"""pack.py packs attempts as they are, and SHA256SUMS has the hashes of what it packs."""

import json
import shutil
import subprocess
from pathlib import Path

import idea
import pack
import pytest
import runs
import verify
from fake_runs import LOSSES, SOURCE, ours, sha, write_ours, write_plan

MORE = SOURCE + "# one line more\n"


@pytest.fixture
def place(tmp_path, monkeypatch) -> Path:
    """An empty records/ in which pack.py writes."""
    here = tmp_path / "records"
    here.mkdir()
    monkeypatch.setattr(pack, "HERE", here)
    return here


@pytest.fixture
def attempt(tmp_path) -> Path:
    """An attempt that ended after its pilot; one run was interrupted."""
    folder = tmp_path / "idea"
    arms = {"baseline": sha(SOURCE), "idea": sha(MORE)}
    for hour, (name, source) in enumerate([("baseline", SOURCE), ("idea", MORE)], 13):
        losses = [loss + hour / 1000 for loss in LOSSES]
        written = write_ours(folder / "pilot" / name, losses, hour=hour, ms=hour, source=source)
        (written / "plan.json").unlink()
    write_plan(folder / "pilot", [100 + i for i in range(5)], arms=arms)
    (folder / "pilot/idea/unfinished").mkdir()
    cut = ours(100, 1.46, source=MORE).partition("step:500")[0]
    (folder / "pilot/idea/unfinished/x.txt").write_text(cut)
    rule = dict(
        created="2026-11-21T12:59:00Z", command="./run.sh attempt idea.py", rule=["A rule."]
    )
    (folder / "rule.json").write_text(json.dumps(rule))
    (folder / "ledger.jsonl").write_text("{}\n")
    (folder / "verdict.txt").write_text("Not shown.\nIt ended.\n")
    (folder / "notes.md").write_text("Less is more.\n")
    return folder


def test_an_attempt_is_packed_whole(place, attempt):
    pack.main([str(attempt)])
    folder = place / "tracks/tiny/2026-11-21_idea"
    names = "README.md ledger.jsonl notes.md pilot result.json rule.json verdict.txt"
    assert sorted(path.name for path in folder.iterdir()) == names.split()
    logs = [log.content.decode() for log in runs.log_files(folder / "pilot/idea")]
    assert len(logs) == 5 and not any(SOURCE in log for log in logs)
    text = (folder / "README.md").read_text()
    for part in ("Not shown.\n", "Less is more.", "- A rule.", "(pilot/curves.svg)"):
        assert part in text
    holds, printed = verify.judge(folder / "pilot")
    assert holds and printed.strip() in text and "| +0.0010 | 0.0000 |" in printed
    patch = folder / "pilot/idea/change.patch"
    assert idea.patched(SOURCE.encode(), patch) == MORE.encode()
    assert (folder / "pilot/baseline/train_gpt.py").read_text() == SOURCE
    assert (folder / "pilot/idea/unfinished/x.txt").is_file()


def test_the_hashes_are_those_of_the_files_and_logs(place, attempt, tmp_path):
    pack.main([str(attempt)])
    sums = (place / "SHA256SUMS").read_text()
    assert sums.count("2026-11-21_idea/") == 10 + 6 + 7  # logs, files above and of the pilot
    unpacked = shutil.copytree(place, tmp_path / "unpacked")
    for archive in unpacked.rglob("logs.tar.xz"):
        subprocess.run(["tar", "-xf", archive.name], cwd=archive.parent, check=True)
    check = subprocess.run(["sha256sum", "--strict", "--quiet", "-c", "SHA256SUMS"], cwd=unpacked)
    assert check.returncode == 0
    (place / "SHA256SUMS").unlink()
    pack.main([])
    assert (place / "SHA256SUMS").read_text() == sums


def test_packing_again_says_how_to_undo(place, attempt, capsys):
    pack.main([str(attempt)])
    (place / "tracks/tiny/2026-11-21_idea/own.txt").write_text("x")
    with pytest.raises(SystemExit, match="2"):
        pack.main([str(attempt)])
    printed = capsys.readouterr().err
    assert "is there already: undo it by  rm -r " in printed
    assert (place / "tracks/tiny/2026-11-21_idea/own.txt").is_file()
    (attempt / "verdict.txt").unlink()
    with pytest.raises(SystemExit, match="2"):
        pack.main([str(attempt)])
