"""The records of this repository hold, do not change, and agree with the histories."""

import hashlib
import json
import re
import subprocess
from pathlib import Path

import pack
import pytest
import run_ab
import runs
import verify

ROOT = Path(pack.__file__).resolve().parents[1]
PACKED = sorted(file.parent for file in (ROOT / "records/tracks").glob("*/*/result.json"))
PATCHES = sorted(patch for folder in PACKED for patch in folder.glob("*/change.patch"))


@pytest.mark.parametrize("folder", PACKED, ids=lambda folder: folder.name)
def test_a_record_holds(folder, capsys):
    """Today's verify.py passes a record, with the numbers of its README.md and its result.json."""
    result = json.loads((folder / "result.json").read_text())
    is_record = result["kind"] == "record"
    folders = [str(folder)]
    if is_record and (folder / "baseline").is_dir():
        folders.append(str(folder / "baseline"))
    assert verify.main(folders) == 0
    printed = capsys.readouterr().out
    readme = (folder / "README.md").read_text()
    # Only rows with numbers are compared: README.md stays when verify.py is worded differently.
    rows = re.findall(r"^\| [\w.-]+ \| \d.*$", printed, re.M)
    assert len(rows) >= result["n"]
    assert [row for row in rows if row not in readme] == []
    if is_record:
        track = verify.TRACKS[result["track"]]
        for key, truth in pack.describe(verify.collect(folder), track.target).items():
            assert result[key] == (pytest.approx(truth) if isinstance(truth, float) else truth)


@pytest.mark.parametrize("patch", PATCHES, ids=lambda patch: patch.parent.name)
def test_a_patch_makes_the_source_that_its_logs_state(patch):
    arms = json.loads((patch.parents[1] / "plan.json").read_text())["arms"]
    first, *_ = arms
    source = patch.parents[1] / first / "train_gpt.py"
    text = run_ab.patched(source.read_bytes(), patch)
    assert hashlib.sha256(text).hexdigest() == arms[patch.parent.name]


def test_records_do_not_change():
    """SHA256SUMS has the hashes of all files and no others, and no commit removes a hash but of a
    picture."""
    listed = (ROOT / "records" / "SHA256SUMS").read_text()
    found = "".join(line for folder in PACKED for line in pack.sums(folder))
    assert sorted(listed.splitlines()) == sorted(found.splitlines())
    assert PATCHES
    command = ["git", "show", "HEAD^:records/SHA256SUMS"]  # prints nothing without git or a parent
    committed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True).stdout
    # Pictures are drawn from the logs, and may be drawn again when records/plot.py changes.
    lines = [line for line in committed.splitlines() if not line.endswith("/curves.svg")]
    assert hashes(lines) <= hashes(listed.splitlines())


def hashes(lines: list[str]) -> set[str]:
    """Returns the first column of sha256sum's lines."""
    return {line.split()[0] for line in lines}


def test_histories_are_generated():
    text = (ROOT / "records" / "README.md").read_text()
    assert pack.fill(text) == text
    assert set(re.findall("<!-- history (.*): begin -->", text)) == set(verify.TRACKS)


def test_every_command_names_what_is_there():
    """But a track without records has a placeholder, RECORD."""
    text = (ROOT / "records" / "README.md").read_text()
    blocks = "".join(re.findall("^```bash\n(.*?)^```", text, re.M | re.S))
    paths = re.findall(r"\brecords/[\w./-]+", blocks)
    missing = {path for path in paths if not (ROOT / path).exists()}
    assert len(paths) > 8 and missing == {"records/tracks/8xh100/RECORD"}


def test_no_path_of_a_machine_is_in_a_record():
    texts = {}
    for folder in PACKED:
        for path in folder.rglob("*"):
            if path.suffix in (".txt", ".json", ".md", ".svg", ".patch"):
                texts[path] = path.read_text()
            elif path.name == "logs.tar.xz":
                texts |= {path / log.name: log.read_text() for log in runs.log_files(path.parent)}
    assert len(texts) > 150
    for path, text in texts.items():
        assert not re.search(r"/(home|root|Users|tmp|work)/", text), path
