"""cached_fineweb10B.py against a hub on loopback that lies, refuses, stalls and vanishes."""

import fcntl
import hashlib
import json
import os
import pathlib
import resource
import signal
import subprocess
import sys
import time
import types
from unittest.mock import Mock

import cached_fineweb10B as script
import numpy as np
import pytest
import shards
from hub import Hub, flip, says, sends, stall
from huggingface_hub import close_session, constants
from tqdm import tqdm

import train_gpt

REPO = "kjj0/fineweb10B-gpt2"
OLD, NEW = "a" * 40, "b" * 40  # commits; main is OLD
DATA = pathlib.Path(script.__file__).parent


def shard(seed, count=20_000):
    tokens = np.random.default_rng(seed).integers(0, 50257, count).astype("<u2")
    return shards.header(count) + tokens.tobytes()


def names(count, prefix="fineweb"):
    train = [f"{prefix}_train_{i:06d}.bin" for i in range(1, count + 1)]
    return [f"{prefix}_val_000000.bin", *train]


VAL, FIRST, SECOND, THIRD = names(3)
FILES = {name: shard(i) for i, name in enumerate(names(3))}
NEW_FILES = {name: shard(i + 100) for i, name in enumerate(names(3))}


def entry(content, revision=OLD):
    return dict(size=len(content), sha256=hashlib.sha256(content).hexdigest(), revision=revision)


@pytest.fixture
def hub(monkeypatch, tmp_path):
    for key in [key for key in os.environ if key.startswith("HF_") or "proxy" in key.lower()]:
        monkeypatch.delenv(key)
    hub = Hub(REPO, {OLD: dict(FILES), NEW: dict(NEW_FILES)})
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
    """Runs the script in this process, on tmp_path/out unless another --out is given."""

    def run(*argv):
        argv = ["cached_fineweb10B.py", "--out", tmp_path / "out", *argv]
        monkeypatch.setattr(sys, "argv", list(map(str, argv)))
        monkeypatch.setattr(signal, "signal", lambda *_: None)  # this process keeps its handler
        hub.requests.clear()
        capfd.readouterr()
        status = 0
        try:
            script.main()
        except SystemExit as stopped:
            status = 1
            if isinstance(stopped.code, str):
                print(stopped.code, file=sys.stderr)
        out, err = capfd.readouterr()
        return types.SimpleNamespace(status=status, out=out, err=err)

    return run


@pytest.fixture
def out(tmp_path):
    return tmp_path / "out"


@pytest.fixture
def start(hub, tmp_path, out):
    """Starts the script as a process, which stops in the midst of SECOND."""
    running = []

    def start():
        hub.plans["cdn", SECOND].append(stall)
        ours = dict(HF_ENDPOINT=hub.endpoint, HF_HOME=str(tmp_path / "home"))
        env = os.environ | ours | dict(HF_HUB_DOWNLOAD_TIMEOUT="60", PYTHONPATH=str(DATA))
        code = "import signal, cached_fineweb10B as script\nscript.PINNED = {}\nscript.main()"
        command = [sys.executable, "-c", code, "3", "--out", str(out)]
        pipes = dict(stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        running.append(subprocess.Popen(command, env=env, **pipes))
        end = time.monotonic() + 120
        while len([*out.glob(".download/*.bin")]) < 3 or SECOND not in hub.asked("cdn"):
            assert time.monotonic() < end and running[-1].poll() is None
            time.sleep(0.01)
        return running[-1]

    yield start
    for process in running:
        process.kill()
        process.communicate()


def is_complete(out, count, files=FILES, revision=OLD):
    """The folder holds the files, their MANIFEST.json, the lock and nothing else."""
    expected = {name: files[name] for name in names(count)}
    inner = {"MANIFEST.json", shards.STAMP}
    assert {path.name for path in out.iterdir()} == {*expected, *inner}
    for name, content in expected.items():
        assert (out / name).read_bytes() == content, name
    listed = {name: entry(content, revision) for name, content in expected.items()}
    about = dict(source=REPO, vocab=50257, eot=50256, files=listed)
    assert json.loads((out / "MANIFEST.json").read_bytes()) == about
    return True


def is_one_line(done, *parts):
    """It failed, and its last line, after the progress bars, has these parts."""
    line = done.err.splitlines()[-1]
    assert done.status == 1 and line.startswith("cached_fineweb10B.py: ") and len(line) < 800
    assert "Traceback" not in done.err
    assert [part for part in parts if part not in line] == [], line
    return True


# ---- What is downloaded --------------------------------------------------------------------------
def test_files_are_downloaded_once_and_then_neither_the_hub_nor_they_are_read(
    hub, run, out, monkeypatch
):
    monkeypatch.setenv("TQDM_POSITION", "-1")  # bars are shown, as on a terminal
    monkeypatch.setattr(script, "needed", lambda *_: pytest.fail("looks for what it can download"))
    done = run(3)
    assert done.status == 0 and is_complete(out, 3)
    assert "complete: 100%|" in done.err
    assert not [bar for bar in tqdm._instances if isinstance(bar, script.tqdm)]  # all are closed
    what = f"4 files, 0.0 GB, revision {OLD[:12]}, are there and right; 4 of them were downloaded"
    assert f"{out}: {what} now\n" in done.out
    assert sorted(hub.asked("cdn")) == sorted(names(3))
    monkeypatch.setattr(shards, "inspect", lambda path, eot: pytest.fail(f"reads {path}"))
    before = {path: path.stat().st_mtime_ns for path in out.iterdir()}
    assert "; 0 of them" in run(3).out and not hub.requests
    assert {path: path.stat().st_mtime_ns for path in out.iterdir()} == before


def test_the_record_reads_as_many_shards_as_are_fetched_and_pinned():
    record = train_gpt.PRESETS["record"]
    trained = sum(B * T for B, T, _ in train_gpt.batch_shapes("train", record))
    assert trained == 338_821_120 and script.RECORD_SHARDS == 7  # long documents are cut
    assert list(script.PINNED) == names(7)
    together = hashlib.sha256("".join(script.PINNED.values()).encode()).hexdigest()
    assert together == "11170f4a2fbad23158ce0863da63cc6153dd3aff2aa93f8b8d82f42a77750bd0"


@pytest.mark.parametrize("flags, repo, prefix, folder, count", [
    ([], REPO, "fineweb", "fineweb10B", 103),
    (["--edu"], "kjj0/finewebedu10B-gpt2", "finewebedu", "finewebedu10B", 99),
    (["--100B"], "kjj0/fineweb100B-gpt2", "fineweb", "fineweb100B", 1030),
])  # fmt: skip
def test_variants(monkeypatch, flags, repo, prefix, folder, count):
    for n in (count, 0, count + 1, None):
        monkeypatch.setattr(sys, "argv", ["script", *flags, *[str(n)] * (n is not None)])
        if n in (0, count + 1):
            with pytest.raises(SystemExit, match="2"):
                script.arguments()
        else:
            found = script.arguments()
            assert found == (repo, names(n or 7, prefix), None, DATA / folder)


# ---- What is there -------------------------------------------------------------------------------
FLIPPED = FILES[SECOND][:-2] + bytes([FILES[SECOND][-2] ^ 1]) + FILES[SECOND][-1:]


def test_a_folder_without_stamps_needs_no_network_until_a_file_is_broken(hub, run, out):
    """The folder is as our first script left it, and so is its MANIFEST.json."""
    out.mkdir()
    for name, content in FILES.items():
        (out / name).write_bytes(content)
    files = {name: entry(content) for name, content in FILES.items()}
    shards.write_manifest(out, REPO, **shards.GPT2, files=files)
    assert run(3).status == 0 and not hub.requests
    for content in (FLIPPED, FILES[SECOND][:-2], FILES[FIRST]):
        (out / SECOND).write_bytes(content)
        assert "; 1 of them" in run(3).out
        assert is_complete(out, 3) and hub.asked("cdn") == [SECOND]
    (out / "MANIFEST.json").unlink()
    assert "; 0 of them" in run(3).out and is_complete(out, 3)


def test_the_pinned_bytes_are_recognized_without_a_hub(hub, run, out, monkeypatch):
    """They were copied by hand, without MANIFEST.json or with one that does not list them."""
    digests = {name: entry(content)["sha256"] for name, content in FILES.items()}
    monkeypatch.setattr(script, "PINNED", digests)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    (out / "copy").mkdir(parents=True)
    for name in (VAL, FIRST):
        (out / "copy" / name).write_bytes(FILES[name])
    assert is_one_line(run(2), f"{out}/copy/{VAL} is there", f"pass --out {out}/copy")
    for name in (VAL, FIRST):
        (out / "copy" / name).rename(out / name)
    assert "2 files, 0.0 GB, revision unknown, are there and right; 0 of them" in run(1).out
    listed = json.loads((out / "MANIFEST.json").read_bytes())["files"]
    assert listed == {n: dict(size=len(FILES[n]), sha256=digests[n]) for n in (VAL, FIRST)}
    assert is_one_line(run(3), f"because {SECOND} is missing; {THIRD} is missing", f"--data {out}")
    (out / SECOND).write_bytes(FLIPPED)
    (out / THIRD).write_bytes(FILES[THIRD])
    assert is_one_line(run(3), f"because {SECOND} has other bytes. Without")
    (out / SECOND).write_bytes(FILES[SECOND])
    monkeypatch.setattr(shards, "write_manifest", Mock(side_effect=PermissionError(13, "no", "x")))
    assert "MANIFEST.json is not written: x: no" in run(3).out  # as in a read-only folder


def test_a_broken_manifest_and_that_of_another_data_set_are_refused(hub, run, out):
    shards.write_manifest(out, "mine", vocab=257, eot=256, files={})
    before = (out / "MANIFEST.json").read_bytes()
    assert is_one_line(run(1), str(out), "another data set", "mine", "--out")
    assert (out / "MANIFEST.json").read_bytes() == before and not hub.requests
    (out / "MANIFEST.json").write_text("{")
    assert is_one_line(run(1), str(out), "broken MANIFEST.json: delete it")


def test_revision_is_recorded_and_used_until_another_replaces_the_files(hub, run, out):
    hub.main = NEW
    assert run(1, "--revision", OLD).status == 0 and is_complete(out, 1)
    assert run(1, "--revision", OLD).status == 0 and not hub.requests
    assert run(2).status == 0 and is_complete(out, 2)  # not mixed with main
    assert hub.asked("info") == [OLD] and hub.asked("cdn") == [SECOND]
    assert run(2, "--revision", "main").status == 0 and is_complete(out, 2, NEW_FILES, NEW)


def test_other_bytes_than_the_pinned_ones_are_refused(hub, run, out, monkeypatch):
    run(2)
    (out / FIRST).unlink()
    other = "0" * 64
    monkeypatch.setattr(script, "PINNED", {VAL: entry(FILES[VAL])["sha256"], FIRST: other})
    assert is_one_line(run(2), FIRST, other, entry(FILES[FIRST])["sha256"], "not the bytes that")
    assert not hub.asked("cdn") and not (out / FIRST).exists()
    (out / FIRST).write_bytes(FILES[FIRST])  # nor are they used if MANIFEST.json lists them
    assert is_one_line(run(2), FIRST, "not the bytes")
    monkeypatch.setitem(script.PINNED, FIRST, entry(FILES[FIRST])["sha256"])
    assert run(2).status == 0 and not hub.requests
    monkeypatch.setitem(script.PINNED, FIRST, other)
    hub.repo = "kjj0/fineweb100B-gpt2"  # its files have the same names, and are not pinned
    assert run(1, "--100B", "--out", f"{out}100B").status == 0


def test_a_file_is_on_the_disk_before_it_has_its_name(run, out, monkeypatch):
    on_disk = []
    replace, fsync = os.replace, os.fsync
    monkeypatch.setattr(os, "fsync", lambda f: on_disk.append(os.fstat(f).st_ino) or fsync(f))

    def watched(source, target):
        assert os.stat(source).st_ino in on_disk or pathlib.Path(target).parent != out
        replace(source, target)

    monkeypatch.setattr(os, "replace", watched)
    assert run(1).status == 0


# ---- Troubles ------------------------------------------------------------------------------------
def test_bytes_that_are_not_those_of_the_stated_hash_are_deleted(hub, run, out):
    out.mkdir()
    (out / FIRST).write_bytes(b"what was there before")
    hub.plans["cdn", FIRST].append(flip)
    digest = entry(FILES[FIRST])["sha256"]
    assert is_one_line(
        run(3), f"{FIRST} has other bytes: sha256 ", digest, "deleted them, so run this again"
    )
    assert (out / FIRST).read_bytes() == b"what was there before"
    listed = json.loads((out / "MANIFEST.json").read_bytes())["files"]
    assert listed == {name: entry(FILES[name]) for name in (VAL, SECOND, THIRD)}
    assert "; 1 of them" in run(3).out and hub.asked("cdn") == [FIRST] and is_complete(out, 3)


TROUBLES = dict(
    private=(lambda h, m: setattr(h, "repo", "a/b"), f"{REPO} does not exist or is private"),
    token=(lambda h, m: m.setenv("HF_TOKEN", "bad"), "refuses the token: set HF_TOKEN"),
    letters=(lambda h, m: m.setenv("HF_TOKEN", "é"), "HF_TOKEN has a character that no token has"),
    gated=(lambda h, m: plan(h, "info", says(403, "GatedRepo")), "set HF_TOKEN"),
    revision=(lambda h, m: plan(h, "info", says(404, "RevisionNotFound")), "has no revision main"),
    missing=(lambda h, m: h.commits[OLD].pop(FIRST), f"has no {FIRST}"),
    down=(lambda h, m: plan(h, "info", says(503)), "try again later: Server error '503"),
    silent=(lambda h, m: fall_silent(h, m), "cannot reach http://127", "timed out"),
    forbidden=(lambda h, m: plan(h, "head", says(403)), "403", "Run this again"),
    gone=(lambda h, m: plan(h, "cdn", says(404, message="gone")), "404", "Run this again"),
    no_hub=(lambda h, m: plan(h, "info", sends(b"<html>")), "cannot reach http://", "HF_ENDPOINT"),
    closed=(lambda h, m: h.close() or close_session(), "cannot reach http://127", "the network"),
    offline=(lambda h, m: m.setattr(constants, "HF_HUB_OFFLINE", True), "cannot reach", "OFFLINE"),
    certificate=(lambda h, m: m.setenv("SSL_CERT_FILE", "/no.pem"), "SSL_CERT_FILE names /no.pem"),
    no_shard=(lambda h, m: h.commits[OLD].update({VAL: b"it" * 999}), f"{VAL} is no token shard"),
)  # fmt: skip


def fall_silent(hub, monkeypatch):
    monkeypatch.setattr(constants, "HF_HUB_DOWNLOAD_TIMEOUT", 0.2)
    plan(hub, "info", stall)


def plan(hub, kind, trouble):
    hub.always[kind, None if kind == "info" else FIRST] = trouble


@pytest.mark.parametrize("which", TROUBLES)
def test_each_trouble_has_its_words(hub, run, monkeypatch, out, which):
    change, *said = TROUBLES[which]
    change(hub, monkeypatch)
    assert is_one_line(run(1), *said) and not (out / VAL).exists()


# ---- Disk ----------------------------------------------------------------------------------------
def test_space_is_looked_at_before_the_first_byte(hub, run, out, monkeypatch):
    free = script.MARGIN + 4 * len(FILES[VAL]) - 1
    usage = lambda folder: types.SimpleNamespace(free=free)
    with monkeypatch.context() as patch:
        patch.setattr(script.shutil, "disk_usage", usage)
        assert is_one_line(run(3), "needs 0.1 GB", "has 0.1 GB free", str(out))
        assert not hub.asked("cdn") and not out.exists()
        free += 1
        assert run(3).status == 0


def test_a_disk_that_is_full_in_the_middle_and_a_folder_that_cannot_be_written(hub, run, tmp_path):
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, limit[1]))
    try:
        assert is_one_line(run(1), "File too large", "Run this again")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
    (tmp_path / "out" / ".download").rename(tmp_path / "elsewhere")
    (tmp_path / "out" / ".download").symlink_to("/no/disk")
    assert is_one_line(run(1), "out/.download is a link to /no/disk: remove it")
    hub.requests.clear()
    (tmp_path / "file").touch()
    assert is_one_line(
        run(1, "--out", tmp_path / "file"), f"{tmp_path}/file is a file, but a folder"
    )
    assert not hub.requests


def test_a_time_limit_that_is_no_number():
    """The package of the hub raises it when it is imported."""
    env = os.environ | dict(HF_HUB_DOWNLOAD_TIMEOUT="abc")
    command = [sys.executable, DATA / "cached_hellaswag.py", "--help"]
    done = subprocess.run(command, env=env, capture_output=True, text=True)
    line = "cached_fineweb10B.py: HF_HUB_DOWNLOAD_TIMEOUT or HF_HUB_ETAG_TIMEOUT is no whole number"
    assert done.returncode == 1 and done.stderr.startswith(line) and done.stderr.count("\n") == 1


# ---- Processes -----------------------------------------------------------------------------------
def test_ctrl_c_ends_it_at_once_and_it_is_continued(hub, start, run, out, monkeypatch):
    process = start()
    (unfinished,) = out.glob(".download/**/*.incomplete")
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert err.endswith("\ncached_fineweb10B.py: interrupted: run this again to go on\n")
    assert unfinished.exists() and not [*out.glob("*.bin")]
    hub.plans["cdn", SECOND].append(says(404))
    assert run(3).status == 1 and not unfinished.exists()
    usage = types.SimpleNamespace(free=script.MARGIN + len(FILES[SECOND]))  # enough for one file
    monkeypatch.setattr(script.shutil, "disk_usage", lambda folder: usage)
    done = run(3)
    assert "; 4 of them" in done.out and hub.asked("cdn") == [SECOND] and is_complete(out, 3)


def test_a_second_process_waits_for_the_first(hub, start, run, out, monkeypatch):
    flock = fcntl.flock

    def release(file, operation):
        if operation == fcntl.LOCK_EX:  # which waits
            hub.released.set()
        flock(file, operation)

    process = start()
    monkeypatch.setattr(fcntl, "flock", release)
    done = run(1)
    assert "another process is at work" in done.out and "; 0 of them" in done.out
    assert "; 4 of them" in process.communicate(timeout=60)[0] and is_complete(out, 3)
    assert not hub.asked("cdn")  # since the second process began
