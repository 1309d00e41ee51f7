"""The records of this repository hold, do not change, and agree with the histories."""

import hashlib
import json
import re
import subprocess
from pathlib import Path
from statistics import fmean, stdev

import idea
import pack
import pytest
import runs
import stats
import verify

ROOT = Path(pack.__file__).resolve().parents[1]
PACKED = sorted(file.parent for file in (ROOT / "records/tracks").glob("*/*/result.json"))
TEXTS = ".txt", ".json", ".md", ".svg", ".patch", ".sha256"


@pytest.mark.parametrize("folder", PACKED, ids=lambda folder: folder.name)
def test_a_record_holds(folder, capsys):
    """Today's verify.py passes it, with the numbers of its README.md and its result.json. Of an
    attempt, the table of every stage is that of its logs, whatever its verdict was."""
    result = json.loads((folder / "result.json").read_text())
    is_record = result["kind"] == "record"
    if result["kind"] == "attempt":
        for plan in folder.glob("*/plan.json"):
            assert verify.judge(plan.parent)[1].strip() in (folder / "README.md").read_text()
        return
    baseline = folder / "baseline" if is_record and (folder / "baseline").is_dir() else None
    holds, printed = verify.judge(folder, baseline)
    assert holds
    readme = (folder / "README.md").read_text()
    # Only rows with numbers are compared: README.md stays when verify.py is worded differently.
    rows = re.findall(r"^\| [\w.-]+ \| \d.*$", printed, re.M)
    variants = json.loads((folder / "plan.json").read_text())["arms"]
    assert len(rows) >= (result["n"] if is_record else len(variants))  # runs, or variants
    assert [row for row in rows if row not in readme] == []
    if is_record:
        e = verify.collect(folder)
        run = e.runs[0]
        truth = dict(n=len(e.runs), mean=fmean(e.losses), sd=stdev(e.losses), tokens=run.tokens)
        truth |= dict(seconds=fmean(e.seconds), steps=run.steps, source=run.source_sha256)
        truth["p"] = stats.below(e.losses, verify.TRACKS[result["track"]].target).p
        for key, value in truth.items():
            assert result[key] == (pytest.approx(value) if isinstance(value, float) else value)


def test_a_patch_makes_the_source_that_its_logs_state():
    patches = [patch for folder in PACKED for patch in folder.glob("*/change.patch")]
    assert patches
    for patch in patches:
        arms = json.loads((patch.parents[1] / "plan.json").read_text())["arms"]
        first = list(arms)[0]
        source = idea.patched(runs.source_file(patch.parents[1] / first).read_bytes(), patch)
        assert hashlib.sha256(source).hexdigest() == arms[patch.parent.name]


def test_records_do_not_change():
    """SHA256SUMS has the hashes of all files and no others, and no commit removes a hash, except
    for a picture's."""
    listed = (ROOT / "records" / "SHA256SUMS").read_text()
    found = "".join(line for folder in PACKED for line in pack.sums(folder))
    assert sorted(listed.splitlines()) == sorted(found.splitlines())
    command = ["git", "show", "HEAD^:records/SHA256SUMS"]  # prints nothing without git or a parent
    committed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True).stdout
    # Pictures are drawn from the logs, and may be drawn again when records/plot.py changes.
    kept = [line for line in committed.splitlines() if not line.endswith("/curves.svg")]
    assert {line.split()[0] for line in kept} <= {line.split()[0] for line in listed.splitlines()}


def test_the_page_has_the_history_of_every_record():
    page = (ROOT / "records" / "README.md").read_text()
    for folder in PACKED:
        result = json.loads((folder / "result.json").read_text())
        if result["kind"] == "record":
            track = verify.TRACKS[result["track"]]
            score = f"{result[track.metric]:,}"  # no record counts time yet
            link = f"[{result['name']}](tracks/{result['track']}/{folder.name}/)"
            loss = f"{result['mean']:.4f} ± {result['sd']:.4f} | {result['n']}"
            row = f"| {result['date']} | {link} | {score} | {loss} | "
            assert f"{row}{verify.p_value(result['p'])} |" in page


def test_no_path_of_a_machine_is_in_a_record():
    for folder in PACKED:
        for path in folder.rglob("*"):
            texts = [path.read_text()] if path.suffix in TEXTS else []
            if path.name == "logs.tar.xz":
                texts = [log.content.decode() for log in runs.unpack(path)]
            for text in texts:
                assert not re.search(r"/(home|root|Users|tmp|work)/", text), path
