"""pack.py makes records and comparisons, refuses what does not hold, and renews the tables."""

import json
import shutil
import subprocess
from pathlib import Path

import idea
import pack
import pytest
import runs
import verify
from fake_runs import LOSSES, SOURCE, data, ours, plan_together, sha, write_ours, write_plan

MORE = SOURCE + "# one line more\n"


@pytest.fixture
def place(tmp_path, monkeypatch) -> Path:
    """An empty records/ in which pack.py writes."""
    here = tmp_path / "records"
    here.mkdir()
    table = "<!-- history {0}: begin -->\n<!-- history {0}: end -->\n"
    (here / "README.md").write_text(f"{table.format('tiny')}{table.format('8xh100')}end\n")
    monkeypatch.setattr(pack, "HERE", here)
    return here


def make_record(folder: Path, *flags) -> None:
    """Packs a folder under its name, with notes."""
    (folder / "notes.md").write_text("## Idea\n\nLess is more.\n")
    pack.main([str(argument) for argument in (folder, "--name", folder.name, *flags)])


@pytest.fixture
def refusal(capsys):
    """A function that returns the message with which pack.py refuses a folder."""

    def refusal(folder: Path, *flags) -> str:
        with pytest.raises(SystemExit, match="2"):
            make_record(folder, *flags)
        return "".join(capsys.readouterr())

    return refusal


def test_a_record_and_the_next(place, tmp_path, refusal):
    first = write_ours(tmp_path / "first")
    (first / "unfinished").mkdir()
    (first / "unfinished" / "x.txt").write_text(ours(100, 1.46).partition("step:500")[0])
    make_record(first)
    record = place / "tracks/tiny" / "2026-11-21_first"
    names = "README.md curves.svg logs.tar.xz plan.json result.json train_gpt.py unfinished"
    assert sorted(path.name for path in record.iterdir()) == names.split()
    logs = [log.content.decode() for log in runs.log_files(record)]
    assert len(logs) == 5 and not any(SOURCE in log for log in logs)
    assert verify.judge(record)[0]
    text = (record / "README.md").read_text()
    assert "Less is more" in text and "## PASS: first" in text and "(curves.svg)" in text

    before = {path: path.read_bytes() for path in place.rglob("*") if path.is_file()}
    message = "2026-11-21_first takes 1,024,000 tokens"
    assert message in refusal(write_ours(tmp_path / "same", seed=300))
    new = write_ours(tmp_path / "second", steps=450, source=MORE, seed=300, hour=15)
    old = write_ours(tmp_path / "old", seed=300, hour=16)
    assert "a record needs --baseline" in refusal(new, "--baseline", old)  # of another plan
    plan_together(old, new)
    assert {path: path.read_bytes() for path in place.rglob("*") if path.is_file()} == before
    make_record(new, "--baseline", old)
    record = place / "tracks/tiny" / "2026-11-21_second"
    assert json.loads((record / "result.json").read_text())["parent"] == "2026-11-21_first"
    assert verify.judge(record, record / "baseline")[0]
    assert "+# one line more\n" in (record / "change.patch").read_text()
    assert (record / "train_gpt.py").read_text() == MORE
    table = (place / "README.md").read_text()
    link = "[first](tracks/tiny/2026-11-21_first/)"
    assert f"| {link} | 1,024,000 tokens | 1.4597 ± 0.0097 | 5 |" in table
    assert "[second](tracks/tiny/2026-11-21_second/) | 921,600 tokens |" in table
    assert table.index("[first]") < table.index("[second]")
    assert "No record yet." in table and table.endswith("end\n")
    sums = (place / "SHA256SUMS").read_text()
    assert sums.count("2026-11-21_first/") == 11  # 5 logs and 6 other files
    unpacked = shutil.copytree(place, tmp_path / "unpacked")
    for archive in unpacked.rglob("logs.tar.xz"):
        subprocess.run(["tar", "-xf", archive.name], cwd=archive.parent, check=True)
    check = subprocess.run(["sha256sum", "--strict", "--quiet", "-c", "SHA256SUMS"], cwd=unpacked)
    assert check.returncode == 0
    (place / "SHA256SUMS").unlink()
    pack.main(["--tables"])
    assert (place / "SHA256SUMS").read_text() == sums


def test_what_does_not_hold_is_not_packed(place, tmp_path, refusal):
    folder = write_ours(tmp_path / "new")
    base = write_ours(tmp_path / "old", seed=300)
    found = refusal(folder, "--baseline", base)
    assert "the runs fail as shown above" in found and "no fewer tokens than the" in found
    assert not list(place.glob("*/*/*")) and not (place / "SHA256SUMS").exists()


def test_time_is_compared_with_the_record_in_one_plan(place, tmp_path, refusal):
    arguments = ["record", "--target", "0"]
    arms = dict(old=sha(SOURCE), new=sha(MORE), straw=sha(2 * MORE))

    def runs_of(name, ms, source=SOURCE, **plan):
        folder = write_ours(
            tmp_path / name, [3.2781, 3.2785, 3.2779], ms=ms, source=source, argv=arguments,
            config=dict(preset="record", val_tokens=10485760),
            data=data(verify.TRACKS["8xh100"].shards), devices=["NVIDIA H100 80GB HBM3"] * 8,
        )  # fmt: skip
        write_plan(folder, [100, 101, 102], source, arguments=arguments, **plan)
        return folder

    make_record(runs_of("first", 150_000))
    new = runs_of("new", 140_000, MORE, arms=arms)
    for baseline in (
        [], ["--baseline", runs_of("straw", 900_000, 2 * MORE, arms=arms)],
        ["--baseline", runs_of("other_plan", 160_000)],
    ):  # fmt: skip
        found = refusal(new, *baseline)
        assert "a record needs --baseline, with 2026-11-21_first in the same plan" in found
    make_record(new, "--baseline", runs_of("old", 160_000, arms=arms))
    record = place / "tracks/8xh100/2026-11-21_new"
    assert verify.judge(record, record / "baseline")[0]
    link = "[new](tracks/8xh100/2026-11-21_new/)"
    assert f"| {link} | 140.00 s |" in (place / "README.md").read_text()


def test_a_comparison(place, tmp_path, refusal):
    """A plan has three variants that share their seeds. The last one has the source of the first,
    as a variant with flags has."""
    sources = dict(base=SOURCE, worse=SOURCE.replace("not executed", "worse"), same=SOURCE)
    for hour, (name, source) in enumerate(sources.items(), 13):
        losses = [loss + 0.03 * (name == "worse") + hour / 1000 for loss in LOSSES]
        folder = write_ours(tmp_path / "all" / name, losses, hour=hour, ms=hour, source=source)
        (folder / "plan.json").unlink()
    arms = {name: sha(source) for name, source in sources.items()}
    write_plan(tmp_path / "all", [100 + i for i in range(5)], arms=arms)
    make_record(tmp_path / "all")
    folder = place / "tracks/tiny" / "2026-11-21_all"
    kinds = "train_gpt.py", "change.patch"
    files = [path for path in folder.glob("*/*") if path.name in kinds]
    names = "base/train_gpt.py same/train_gpt.py worse/change.patch"
    assert sorted(str(path.relative_to(folder)) for path in files) == names.split()
    patch = folder / "worse/change.patch"
    assert idea.patched(SOURCE.encode(), patch) == sources["worse"].encode()
    holds, printed = verify.judge(folder)
    assert holds and printed.strip() in (folder / "README.md").read_text()
    assert "is there already" in refusal(tmp_path / "all")
    path = min((tmp_path / "all" / "same" / "logs").iterdir())
    path.write_text(path.read_text().replace('"jax": "0.12.0.1"', '"jax": "0.10.2"'))
    assert "- same: **FAIL** different versions: jax" in refusal(tmp_path / "all")
