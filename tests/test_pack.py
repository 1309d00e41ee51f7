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
from messages import Fault

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


def refusal(folder: Path, *flags) -> str:
    """Returns the message with which pack.py refuses a folder."""
    with pytest.raises(Fault) as fault:
        make_record(folder, *flags)
    return str(fault.value)


def test_a_record_and_the_next(place, tmp_path):
    first = write_ours(tmp_path / "first")
    (first / "unfinished").mkdir()
    (first / "unfinished" / "x.txt").write_text(ours(100, 1.46).partition("step:500")[0])
    make_record(first)
    record = place / "tracks/tiny" / "2026-11-21_first"
    names = "README.md curves.svg logs.tar.xz plan.json result.json train_gpt.py unfinished"
    assert sorted(path.name for path in record.iterdir()) == names.split()
    assert (record / "train_gpt.py").read_text() == SOURCE
    logs = [log.read_text() for log in runs.log_files(record)]
    assert len(logs) == 5 and not any(SOURCE in log for log in logs)
    assert verify.main([str(record)]) == 0
    text = (record / "README.md").read_text()
    assert "Less is more" in text and "## PASS: first" in text and "(curves.svg)" in text

    new = write_ours(tmp_path / "second", steps=450, source=MORE, seed=300, hour=15)
    old = write_ours(tmp_path / "old", seed=300, hour=16)
    assert "a record needs --baseline" in refusal(new, "--baseline", old)  # of another plan
    plan_together(old, new)
    make_record(new, "--baseline", old)
    parent = record / "train_gpt.py"
    record = place / "tracks/tiny" / "2026-11-21_second"
    assert json.loads((record / "result.json").read_text())["parent"] == "2026-11-21_first"
    assert verify.main([str(record), str(record / "baseline")]) == 0
    assert idea.apply(parent.read_bytes(), [record / "change.patch"]) == MORE.encode()
    assert "no `change.patch`" not in (record / "README.md").read_text()
    assert (record / "train_gpt.py").read_text() == MORE
    names = "logs.tar.xz plan.json train_gpt.sha256"  # the baseline's file is that of the first one
    assert sorted(path.name for path in (record / "baseline").iterdir()) == names.split()
    assert runs.source_file(record / "baseline").samefile(parent)
    line = f"{sha(SOURCE)}  ../../2026-11-21_first/train_gpt.py\n"
    assert (record / "baseline/train_gpt.sha256").read_text() == line

    table = (place / "README.md").read_text()
    first_row = (
        "| [first](tracks/tiny/2026-11-21_first/) | 1,024,000 tokens | 1.4597 ± 0.0097 | 5 |"
    )
    assert first_row in table
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


def test_a_record_beats_the_last_and_does_not_change(place, tmp_path):
    make_record(write_ours(tmp_path / "first", steps=450))
    before = {path: path.read_bytes() for path in place.rglob("*") if path.is_file()}
    message = "2026-11-21_first takes 921,600 tokens"
    assert message in refusal(write_ours(tmp_path / "same", steps=450, seed=300))
    assert message in refusal(tmp_path / "first")
    new = write_ours(tmp_path / "x" / "first", steps=400, seed=400)
    old = write_ours(tmp_path / "old", seed=400)
    plan_together(old, new)
    assert "is there already" in refusal(new, "--baseline", old)
    assert {path: path.read_bytes() for path in place.rglob("*") if path.is_file()} == before


def test_a_source_of_other_bytes_is_packed_as_the_logs_state_it(tmp_path):
    """It has a coding line, and an editor gave it CRLF. Without the file, nothing is packed."""
    old = write_ours(tmp_path / "old")
    new = write_ours(tmp_path / "new", source=MORE)
    latin = (MORE + "# caf\xe9\n").encode("latin-1")
    (new / "train_gpt.py").write_bytes(latin.replace(b"\n", b"\r\n"))
    packed = tmp_path / "packed"
    pack.copy_set(verify.collect(new), packed, pack.difference(old, new))
    pack.copy_source(pack.read_source(new), packed, packed)
    assert (packed / "train_gpt.py").read_bytes() == latin
    assert idea.apply(SOURCE.encode(), [packed / "change.patch"]) == latin
    (new / "train_gpt.py").unlink()
    with pytest.raises(Fault, match="train_gpt.py is missing: put the file there"):
        pack.read_source(new)


def test_what_does_not_hold_is_not_packed(place, tmp_path, capsys):
    folder = write_ours(tmp_path / "new")
    base = write_ours(tmp_path / "old", seed=300)
    with pytest.raises(Fault, match="answer the questions in"):
        pack.main([str(folder), "--name", "new"])
    assert (folder / "notes.md").read_text() == pack.NOTES
    assert "the runs fail as shown above" in refusal(folder, "--baseline", base)
    assert "no fewer tokens than the baseline" in capsys.readouterr().out
    log, *_ = sorted((folder / "logs").iterdir())
    log.write_text(ours(100, 1.4633, source="#\n"))
    assert "the runs fail as shown above" in refusal(folder)
    assert "2 different sources" in capsys.readouterr().out
    assert not list(place.glob("*/*/*")) and not (place / "SHA256SUMS").exists()


def test_time_is_compared_with_the_record_in_one_plan(place, tmp_path, capsys):
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
    message = "a record needs --baseline, with 2026-11-21_first in the same plan"
    assert message in refusal(new)
    assert message in refusal(new, "--baseline", runs_of("straw", 900_000, 2 * MORE, arms=arms))
    assert message in refusal(new, "--baseline", runs_of("other_plan", 160_000))
    make_record(new, "--baseline", runs_of("old", 160_000, arms=arms))
    readme = (place / "README.md").read_text()
    assert "| [new](tracks/8xh100/2026-11-21_new/) | 140.00 s |" in readme
    record = place / "tracks/8xh100/2026-11-21_new"
    assert verify.main([str(record), str(record / "baseline")]) == 0
    assert "were not interleaved" not in capsys.readouterr().out


def test_a_comparison(place, tmp_path, capsys):
    """A plan has three variants that share their seeds. The first one is a record; the last one
    changes nothing in the loss, but every line of the file."""
    make_record(write_ours(tmp_path / "first", seed=300))
    capsys.readouterr()
    sources = dict(base=SOURCE, worse=SOURCE.replace("not executed", "worse"), same="x = 1\n" * 21)
    for hour, (name, source) in enumerate(sources.items(), 13):
        losses = list(LOSSES)
        if name == "worse":
            losses = [loss + 0.03 + i % 2 / 1000 for i, loss in enumerate(LOSSES)]
        folder = write_ours(tmp_path / "all" / name, losses, hour=hour, ms=hour, source=source)
        (folder / "plan.json").unlink()
    arms = {name: sha(source) for name, source in sources.items()}
    write_plan(tmp_path / "all", [100 + i for i in range(5)], arms=arms)
    make_record(tmp_path / "all")
    folder = place / "tracks/tiny" / "2026-11-21_all"
    kinds = "train_gpt.py", "train_gpt.sha256", "change.patch"
    files = [path for path in folder.glob("*/*") if path.name in kinds]
    names = "base/train_gpt.sha256 same/train_gpt.py worse/change.patch"
    assert sorted(str(path.relative_to(folder)) for path in files) == names.split()
    base = runs.source_file(folder / "base")
    assert base == folder / "base/../../2026-11-21_first/train_gpt.py"
    patched = idea.apply(base.read_bytes(), [folder / "worse" / "change.patch"])
    assert patched == sources["worse"].encode()
    assert (folder / "same" / "train_gpt.py").read_text() == sources["same"]
    assert capsys.readouterr().out == f"packed {folder}\n"
    assert verify.main([str(folder)]) == 0
    printed = capsys.readouterr().out
    text = (folder / "README.md").read_text()
    assert printed.strip() in text
    assert "\nThere is no `change.patch` of same, because it would be longer than half of" in text
    assert "| worse | 5 | 1.4901 ± 0.0097 | +0.0304 | 0.0005 | 2.5e-08 |\n" in printed
    assert "| same | 5 | 1.4597 ± 0.0097 | +0.0000 | 0.0000 | – |\n" in printed
    assert "| worse | +0.030 +0.031 +0.030 +0.031 +0.030 |\n" in printed
    path, *_ = sorted((tmp_path / "all" / "same" / "logs").iterdir())
    path.write_text(path.read_text().replace('"jax": "0.12.0.1"', '"jax": "0.10.2"'))
    assert "the runs fail as shown above" in refusal(tmp_path / "all")
    assert "- same: **FAIL** different versions: jax" in capsys.readouterr().out


def test_what_cannot_be_read_is_named(place, tmp_path):
    folder = write_ours(tmp_path / "new")
    (folder / "notes.md").write_bytes(b"## Idea\n\ncaf\xe9\n")
    with pytest.raises(Fault, match="notes.md is not UTF-8"):
        pack.main([str(folder), "--name", "new"])
    earlier = place / "tracks/tiny/2026-11-20_old/result.json"
    earlier.parent.mkdir(parents=True)
    for content, message in (
        ("[]", r"result.json cannot be \[\]"),
        ('{"kind": "record", "number": "1"}', "result.json has no name"),
        ('{"kind": "record"', "result.json is broken"),
    ):
        earlier.write_text(content)
        with pytest.raises(Fault, match=message):
            pack.main([str(folder), "--name", "new"])
    plan = write_ours(tmp_path / "all" / "a").parent / "plan.json"
    plan.write_text('{"n": 5')
    with pytest.raises(Fault, match="plan.json is broken"):
        pack.main([str(plan.parent), "--name", "all"])
