"""cached_fineweb10B.py and cached_hellaswag.py against a hub on loopback that fails and lies."""

import hashlib
import json
import os
import signal
import sys

import cached_fineweb10B as script
import cached_hellaswag
import pytest
import shards
from hub import Hub, flip
from huggingface_hub import close_session, constants

import train_gpt

REPO = "kjj0/fineweb10B-gpt2"
COMMIT = "a" * 40
FIRST, SECOND = "fineweb_train_000001.bin", "fineweb_train_000002.bin"
NAMES = ["fineweb_val_000000.bin", FIRST, SECOND]
FILES = {name: shards.header(9999) + name.encode() * 700 for name in NAMES}
DIGESTS = {name: hashlib.sha256(content).hexdigest() for name, content in FILES.items()}


@pytest.fixture
def hub(monkeypatch, tmp_path):
    for key in [key for key in os.environ if key.startswith("HF_") or "proxy" in key.lower()]:
        monkeypatch.delenv(key)
    hub = Hub(REPO, {COMMIT: dict(FILES)})
    url = hub.endpoint + "/{repo_id}/resolve/{revision}/{filename}"
    settings = dict(ENDPOINT=hub.endpoint, HUGGINGFACE_CO_URL_TEMPLATE=url)
    for key in ("HF_TOKEN_PATH", "HF_HUB_CACHE", "AGENT_HARNESSES_PATH"):
        settings[key] = str(tmp_path / "home" / key)
    for key, value in settings.items():
        monkeypatch.setattr(constants, key, value)
    monkeypatch.setattr(script, "PINNED", {})
    yield hub
    hub.close()
    close_session()


@pytest.fixture
def run(hub, tmp_path, monkeypatch, capfd):
    """Runs the script in this process: its status, and what it printed last."""

    def run(count=2):
        argv = ["cached_fineweb10B.py", str(count), "--out", str(tmp_path / "out")]
        monkeypatch.setattr(sys, "argv", argv)
        monkeypatch.setattr(signal, "signal", lambda *_: None)  # this process keeps its handler
        hub.requests.clear()
        status = 0
        try:
            script.main()
        except SystemExit as stopped:
            status = stopped.code
        return status, "".join(capfd.readouterr()).splitlines()[-1]

    return run


@pytest.fixture
def out(tmp_path):
    return tmp_path / "out"


def is_complete(out):
    """The folder has the files, their MANIFEST.json and nothing else."""
    assert {path.name: path.read_bytes() for path in out.glob("*.bin")} == FILES
    assert len([*out.iterdir()]) == len(FILES) + 1
    entry = lambda name: dict(sha256=DIGESTS[name], revision=COMMIT, size=len(FILES[name]))
    listed = {name: entry(name) for name in FILES}
    about = dict(source=REPO, vocab=50257, eot=50256, files=listed)
    return json.loads((out / "MANIFEST.json").read_bytes()) == about


def test_the_record_reads_as_many_shards_as_are_fetched_and_pinned():
    record = train_gpt.PRESETS["record"]
    trained = sum(B * T for B, T, _ in train_gpt.batch_shapes("train", record))
    assert trained == 338_821_120 and len(script.PINNED) - 1 == 7  # long documents are cut
    together = hashlib.sha256("".join(script.PINNED.values()).encode()).hexdigest()
    assert together == "11170f4a2fbad23158ce0863da63cc6153dd3aff2aa93f8b8d82f42a77750bd0"


def test_files_are_fetched_once_and_a_damaged_or_missing_one_again(hub, run, out):
    assert run()[0] == 0 and is_complete(out)
    assert sorted(hub.asked("cdn")) == sorted(NAMES)
    assert run() == (0, f"{out}: 3 files are there and right") and not hub.requests
    flipped = FILES[SECOND][:-1] + bytes([FILES[SECOND][-1] ^ 1])
    for content in (flipped, FILES[SECOND][:-2], FILES[FIRST]):
        (out / SECOND).write_bytes(content)
        assert run()[0] == 0 and is_complete(out) and hub.asked("cdn") == [SECOND]
    (out / "MANIFEST.json").unlink()  # files that are right, by what the hub states, stay
    assert run()[0] == 0 and is_complete(out) and not hub.asked("cdn")


@pytest.mark.parametrize("pinned", [{}, {FIRST: "0" * 64}])
def test_other_bytes_than_those_of_the_stated_hash_are_deleted(hub, run, out, monkeypatch, pinned):
    monkeypatch.setattr(script, "PINNED", pinned)
    if not pinned:
        hub.plans["cdn", FIRST].append(flip)
    status, line = run()
    assert status == 2 and f"{FIRST}: downloaded with another sha256 and deleted; run this" in line
    assert not (out / FIRST).exists()
    monkeypatch.setattr(script, "PINNED", {})
    assert run()[0] == 0 and is_complete(out) and hub.asked("cdn") == [FIRST]


def test_without_a_network(hub, run, out, monkeypatch):
    """The pinned bytes are recognized, also if they were copied by hand. Else, one line says so."""
    monkeypatch.setattr(script, "PINNED", DIGESTS)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    out.mkdir()
    for name in NAMES:
        status, line = run()
        assert status == 2 and f"{REPO} is not all here and cannot be downloaded; run" in line
        (out / name).write_bytes(FILES[name])
    assert run() == (0, f"{out}: 3 files are there and right")
    shards.write_manifest(out, "mine", vocab=257, eot=256, files={})
    assert run()[0] == 2 and run()[1].endswith("has another data set, mine: pass another --out")
    assert run(0)[1].endswith("0 training shards are not from 1 to 103")


def test_hellaswag_is_fetched_once_and_checked(hub, monkeypatch, tmp_path, capsys):
    content = b"the bytes of a parquet file"
    hub.repo = cached_hellaswag.REPO
    hub.commits = {cached_hellaswag.COMMIT: {cached_hellaswag.NAME: content}}
    monkeypatch.setattr(cached_hellaswag, "OUT", tmp_path)
    monkeypatch.setattr(cached_hellaswag, "SHA256", hashlib.sha256(content).hexdigest())
    path = cached_hellaswag.fetch()
    assert path.read_bytes() == content and cached_hellaswag.fetch() == path
    assert hub.asked("cdn") == [cached_hellaswag.NAME]
    path.write_bytes(content[:-1])
    with pytest.raises(SystemExit, match="2"):
        cached_hellaswag.fetch()
    assert "delete it and run this again" in capsys.readouterr().err
