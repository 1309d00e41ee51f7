"""cached_fineweb10B.py against a hub on loopback that cuts, lies, stalls, refuses and vanishes."""

import fcntl
import hashlib
import json
import os
import pathlib
import pty
import re
import signal
import struct
import subprocess
import sys
import termios
import threading
import time
import types

import cached_fineweb10B as script
import numpy as np
import pytest
import shards
from hub import Hub, cut, flip, header, promises, says, sends, stall, states
from huggingface_hub import close_session, constants, errors, file_download
from huggingface_hub.utils import _http

import train_gpt

REPO = "kjj0/fineweb10B-gpt2"
OLD, NEW = "a" * 40, "b" * 40  # commits; main is OLD
DATA = pathlib.Path(script.__file__).parent
# huggingface_hub's own pauses are cut short; its chunks are so small that a cut one leaves some.
QUICK = types.SimpleNamespace(**vars(time) | dict(sleep=lambda seconds: time.sleep(0.005)))
DRIVER = """
import sys, time, types
import cached_fineweb10B as script
from huggingface_hub import constants, file_download
from huggingface_hub.utils import _http
quick = types.SimpleNamespace(**vars(time) | dict(sleep=lambda seconds: time.sleep(0.005)))
file_download.time = _http.time = quick
constants.DOWNLOAD_CHUNK_SIZE, script.PINNED, script.PAUSES = 4096, {}, (0.01, 0.01, 0.01)
"""


def shard(seed, count=20_000):
    tokens = np.random.default_rng(seed).integers(0, 50257, count).astype("<u2")
    return shards.header(count) + tokens.tobytes()


def names(count, prefix="fineweb"):
    train = [f"{prefix}_train_{i:06d}.bin" for i in range(1, count + 1)]
    return [f"{prefix}_val_000000.bin", *train]


VAL, FIRST, SECOND, THIRD = names(3)
FILES = {name: shard(i) for i, name in enumerate(names(8))}
NEW_FILES = {name: shard(i + 100) for i, name in enumerate(names(8))}


def entry(content, revision=OLD):
    return dict(size=len(content), sha256=hashlib.sha256(content).hexdigest(), revision=revision)


def make_hub(monkeypatch, tmp_path):
    hub = Hub(REPO, {OLD: dict(FILES), NEW: dict(NEW_FILES)})
    monkeypatch.setattr(constants, "ENDPOINT", hub.endpoint)
    url = hub.endpoint + "/{repo_id}/resolve/{revision}/{filename}"
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", url)
    for key in ("HF_TOKEN_PATH", "HF_HUB_CACHE", "AGENT_HARNESSES_PATH"):
        monkeypatch.setattr(constants, key, str(tmp_path / "home" / key))
    return hub


@pytest.fixture
def hub(monkeypatch, tmp_path):
    for key in [key for key in os.environ if key.startswith("HF_") or "proxy" in key.lower()]:
        monkeypatch.delenv(key)
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)  # as where the script comes first
    monkeypatch.setattr(constants, "HF_HUB_DOWNLOAD_TIMEOUT", 1)
    monkeypatch.setattr(constants, "DOWNLOAD_CHUNK_SIZE", 4096)
    monkeypatch.setattr(file_download, "time", QUICK)
    monkeypatch.setattr(_http, "time", QUICK)
    monkeypatch.setattr(script, "PAUSES", (0.01, 0.01, 0.01))
    monkeypatch.setattr(script, "PINNED", {})
    hub = make_hub(monkeypatch, tmp_path)
    yield hub
    hub.close()
    close_session()


@pytest.fixture
def run(hub, tmp_path, monkeypatch, capfd):
    """Runs the script in this process, on tmp_path/out unless --out is given."""

    def run(*argv):
        argv = list(map(str, argv))
        argv += [] if "--out" in argv else ["--out", str(tmp_path / "out")]
        monkeypatch.setattr(sys, "argv", ["cached_fineweb10B.py", *argv])
        capfd.readouterr()
        monkeypatch.setattr(os, "_exit", sys.exit)
        try:
            script.main()
            status = 0
        except SystemExit as stopped:
            status = stopped.code
            if isinstance(status, str):
                print(status, file=sys.stderr)
                status = 1
        out, err = capfd.readouterr()
        return types.SimpleNamespace(status=status, out=out, err=err)

    return run


@pytest.fixture
def start(hub, tmp_path):
    """Starts the script as a process; `set_up` is Python that comes before."""
    running = []

    def start(*argv, set_up="", env=None, **options):
        env = dict(HF_ENDPOINT=hub.endpoint, HF_HUB_DOWNLOAD_TIMEOUT="1") | (env or {})
        env = dict(HF_HOME=str(tmp_path / "home"), HF_HUB_ETAG_TIMEOUT="1") | env
        env = os.environ | dict(PYTHONPATH=str(DATA), PYTHONUNBUFFERED="") | env
        argv = ["--out", str(tmp_path / "out"), *map(str, argv)]
        command = [sys.executable, "-c", DRIVER + set_up + "\nscript.main()", *argv]
        pipes = dict(stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        running.append(subprocess.Popen(command, env=env, **pipes | options))
        return running[-1]

    yield start
    for process in running:
        process.kill()
        process.communicate()


def finish(process, seconds=30):
    out, err = process.communicate(timeout=seconds)
    return types.SimpleNamespace(status=process.returncode, out=out, err=err)


def is_complete(out, count, files=FILES, revision=OLD):
    """The folder holds the files, their MANIFEST.json, the lock and nothing else."""
    expected = {name: files[name] for name in names(count)}
    assert {path.name for path in out.iterdir()} == {*expected, "MANIFEST.json", ".lock"}
    for name, content in expected.items():
        assert (out / name).read_bytes() == content, name
    listed = {name: entry(content, revision) for name, content in expected.items()}
    about = dict(source=REPO, vocab=50257, eot=50256, files=listed)
    assert json.loads((out / "MANIFEST.json").read_bytes()) == about
    return True


def is_one_line(done, *parts, status=1):
    """It failed with one line that has these parts."""
    assert done.status == status, done
    assert done.err.startswith("cached_fineweb10B.py: ") and done.err.count("\n") == 1, done.err
    assert done.err.rstrip("\n").isprintable() and len(done.err) < 700
    for part in parts:
        assert part in done.err, (part, done.err)
    return True


def listed(out):
    return json.loads((out / "MANIFEST.json").read_bytes())["files"]


@pytest.fixture
def out(tmp_path):
    return tmp_path / "out"


# ---- What is fetched -----------------------------------------------------------------------------
def test_files_are_fetched_checked_and_listed(hub, start, out, tmp_path):
    done = finish(start(3, env=dict(HF_TOKEN="good")))
    assert (done.status, done.err) == (0, "")
    assert is_complete(out, 3)
    assert train_gpt.read_folder(out)[0]["files"] == listed(out)
    assert "4 files are there and right, 4 of them fetched" in done.out
    what = f"{out}: validation shard and 3 train shards, 0.0 GB, revision {OLD[:12]}, all verified"
    assert f"{what} (sha256 in MANIFEST.json)\n" in done.out
    assert hub.asked("info") == ["main"]
    for request in hub.requests:  # a token is for the hub, not for the servers that it sends us to
        given = request.headers.get("authorization")
        assert given == (None if request.kind == "cdn" else "Bearer good"), vars(request)
    assert {r.revision for r in hub.requests if r.kind != "info"} == {OLD}
    left = [path.name for path in (tmp_path / "home").rglob("*") if path.is_file()]
    assert not [name for name in left if name.endswith(".bin")]  # no second copy in a cache


def test_files_that_are_not_of_xet_are_fetched(hub, run, out):
    hub.xet = False
    assert run(3).status == 0 and is_complete(out, 3)
    assert sorted(hub.asked("cdn")) == sorted(names(3)) and not hub.asked("get")


def test_second_run_asks_nobody(hub, run, out):
    run(3)
    hub.requests.clear()
    before = {path: path.stat().st_mtime_ns for path in out.iterdir()}
    done = run(3)
    assert done.status == 0 and "4 files are there and right, 0 of them" in done.out
    assert not hub.requests
    assert {path: path.stat().st_mtime_ns for path in out.iterdir()} == before


def test_the_record_needs_seven_shards(hub, run, out):
    done = run()
    assert "the record reads 1770 steps of 393,216 tokens: 7 train shards\n" in done.out
    assert done.status == 0 and is_complete(out, 7)
    assert "the record reads" not in run(7).out


@pytest.mark.parametrize(
    "flags, repo, prefix, folder, count",
    [
        ([], REPO, "fineweb", "fineweb10B", 103),
        (["--edu"], "kjj0/finewebedu10B-gpt2", "finewebedu", "finewebedu10B", 99),
        (["--100B"], "kjj0/fineweb100B-gpt2", "fineweb", "fineweb100B", 1030),
    ],
)
def test_variants(monkeypatch, capsys, flags, repo, prefix, folder, count):
    monkeypatch.setattr(sys, "argv", ["script", str(count), *flags])
    expected = repo, names(count, prefix), None, DATA / folder
    assert script.arguments() == expected
    monkeypatch.setattr(sys, "argv", ["script", *flags])
    assert script.arguments()[1] == names(7, prefix)
    for n in (0, count + 1, -1, "many"):
        monkeypatch.setattr(sys, "argv", ["script", str(n), *flags])
        with pytest.raises(SystemExit) as stopped:
            script.arguments()
        assert stopped.value.code == 2 and str(n) in capsys.readouterr().err


def test_two_variants_at_once_are_refused(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["script", "--edu", "--100B"])
    with pytest.raises(SystemExit) as stopped:
        script.arguments()
    assert stopped.value.code == 2 and "not allowed with" in capsys.readouterr().err


def test_metadata_of_a_thousand_files_is_asked_for_in_parts(hub):
    many = names(1030)
    hub.commits[OLD] = {name: name.encode() for name in many}
    stated = script.ask(REPO, many, OLD)
    assert list(stated) == many and stated[many[-1]] == entry(many[-1].encode())
    assert 2 <= len(hub.asked("paths")) <= 5


# ---- What is there -------------------------------------------------------------------------------
def broken_files():
    content = FILES[SECOND]
    middle = len(content) // 2
    flipped = content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1 :]
    return dict(flipped=flipped, short=content[:-2], long=content + b"xx", foreign=FILES[FIRST])


@pytest.mark.parametrize("manifest", ["with manifest", "without"])
@pytest.mark.parametrize("kind", broken_files())
def test_a_file_that_is_there_is_not_trusted(hub, run, out, kind, manifest):
    run(3)
    hub.requests.clear()
    (out / SECOND).write_bytes(broken_files()[kind])
    if manifest == "without":
        (out / "MANIFEST.json").unlink()
    done = run(3)
    assert done.status == 0 and "4 files are there and right, 1 of them fetched" in done.out
    assert is_complete(out, 3) and hub.asked("cdn") == [SECOND]


def test_right_files_without_manifest_are_kept(hub, run, out):
    out.mkdir()
    for name in names(3):
        (out / name).write_bytes(FILES[name])
    assert run(3).status == 0 and is_complete(out, 3)
    assert hub.asked("paths") and not hub.asked("head")


def test_missing_files_are_fetched_and_others_stay_listed(hub, run, out):
    run(3)
    (out / FIRST).unlink()
    hub.requests.clear()
    assert run(2).status == 0 and is_complete(out, 3)
    assert hub.asked("cdn") == [FIRST]


def test_broken_manifest_is_written_anew(hub, run, out):
    good = dict(source=REPO, vocab=50257, eot=50256, files={VAL: entry(FILES[VAL])})
    odd = [dict(size="1"), dict(size=True), dict(sha256=None), dict(sha256="A"), dict(revision=1)]
    odd += [dict(revision=int("1" * 40)), dict(size=0), dict(size=10**400)]
    texts = [b"", b"{", b"[]", b"null", b"\xff", b"[" * 100_000, b'{"source": 1, "files": {}}']
    texts += [json.dumps(good | change).encode() for change in (dict(files=[1]), dict(files=None))]
    texts += [json.dumps(good | dict(files={VAL: good["files"][VAL] | o})).encode() for o in odd]
    texts += [json.dumps({k: good[k] for k in good if k != "source"}).encode()]
    run(1)
    for text in texts:
        (out / "MANIFEST.json").write_bytes(text)
        hub.requests.clear()
        done = run(1)
        assert (done.status, done.err) == (0, ""), (text[:99], done)
        assert "MANIFEST.json is broken" in done.out, text[:99]
        assert is_complete(out, 1) and not hub.asked("cdn")


def test_manifest_of_another_data_set_is_respected(hub, run, out):
    shards.write_manifest(out, "mine\x1b[2J", vocab=257, eot=256, files={})
    before = (out / "MANIFEST.json").read_bytes()
    assert is_one_line(run(1), str(out), "another data set", "mine", "--out")
    assert (out / "MANIFEST.json").read_bytes() == before and not hub.requests


def test_shards_of_ones_own_are_not_replaced(hub, run, out):
    """Of tokenize_text.py: its manifest has no revisions, and one name may be the same."""
    content = shard(7)
    files = {name: shards.write(out / name, [content]) | dict(documents=3) for name in names(1)}
    shards.write_manifest(out, "GPT-2 BPE of 1 files", vocab=50257, eot=50256, files=files)
    before = {path: path.read_bytes() for path in out.iterdir()}
    assert is_one_line(run(1), str(out), "another data set", "GPT-2 BPE of 1 files", "--out")
    assert {path: path.read_bytes() for path in before} == before and not hub.requests


def test_the_cache_of_huggingface_hub_is_not_trusted(hub, run, out):
    """It may hold the file, and would hand it over as it is."""
    repo = pathlib.Path(constants.HF_HUB_CACHE) / "datasets--kjj0--fineweb10B-gpt2"
    (repo / "snapshots" / OLD).mkdir(parents=True)
    (repo / "snapshots" / OLD / FIRST).write_bytes(broken_files()["flipped"])
    assert run(1).status == 0 and is_complete(out, 1)


def test_what_a_killed_run_left_is_deleted(run, out):
    (out / ".part-old").mkdir(parents=True)
    (out / ".part-old" / "x.incomplete").write_bytes(bytes(100))
    (out / ".part-7-MANIFEST.json").write_bytes(b"{")
    assert run(1).status == 0 and is_complete(out, 1)


# ---- Revisions -----------------------------------------------------------------------------------
def test_revision_is_recorded_and_used_again(hub, run, out):
    hub.main = NEW
    assert run(1, "--revision", OLD).status == 0 and is_complete(out, 1)
    hub.requests.clear()
    assert run(1, "--revision", OLD).status == 0 and not hub.requests
    assert run(2).status == 0 and is_complete(out, 2)  # not mixed with main
    assert hub.asked("info") == [OLD] and hub.asked("cdn") == [SECOND]


def test_another_revision_replaces_the_files(hub, run, out):
    run(2)
    assert run(2, "--revision", NEW).status == 0
    assert is_complete(out, 2, NEW_FILES, NEW)
    assert run(2, "--revision", "main").status == 0 and is_complete(out, 2)
    assert hub.asked("info") == ["main", NEW, "main"]


def test_files_of_several_revisions_lead_to_main(hub, run, out):
    run(1)
    hub.commits[NEW][FIRST] = FILES[FIRST]
    assert run(1, "--revision", NEW).status == 0
    files = listed(out)
    assert {e["revision"] for e in files.values()} == {NEW}
    files[FIRST] = entry(FILES[FIRST])
    shards.write_manifest(out, REPO, 50257, 50256, files)
    hub.requests.clear()
    assert run(1).status == 0 and not hub.requests
    (out / FIRST).unlink()
    assert run(1).status == 0 and hub.asked("info") == ["main"] and is_complete(out, 1)


def test_unknown_revision(hub, run, out):
    assert is_one_line(run(1, "--revision", "nowhere"), REPO, "no revision nowhere")
    assert not hub.asked("cdn")


# ---- Pinned --------------------------------------------------------------------------------------
def test_the_pinned_files_are_those_of_the_record():
    assert list(script.PINNED) == names(7)
    together = hashlib.sha256("".join(script.PINNED.values()).encode()).hexdigest()
    assert together == PINNED_TOGETHER


PINNED_TOGETHER = "11170f4a2fbad23158ce0863da63cc6153dd3aff2aa93f8b8d82f42a77750bd0"


def test_other_bytes_than_the_pinned_ones_are_refused(hub, run, out, monkeypatch):
    run(2)
    (out / FIRST).unlink()
    other = "0" * 64
    monkeypatch.setattr(script, "PINNED", {VAL: entry(FILES[VAL])["sha256"], FIRST: other})
    hub.requests.clear()
    said = is_one_line(
        run(2), FIRST, other, entry(FILES[FIRST])["sha256"], "not the bytes that records are run on"
    )
    assert said and not hub.asked("cdn") and not (out / FIRST).exists()
    monkeypatch.setitem(script.PINNED, FIRST, entry(FILES[FIRST])["sha256"])
    assert run(2).status == 0 and is_complete(out, 2)


def test_a_manifest_that_is_not_the_pinned_one_is_not_enough(hub, run, out, monkeypatch):
    run(1, "--revision", NEW)
    monkeypatch.setattr(script, "PINNED", {FIRST: entry(FILES[FIRST])["sha256"]})
    hub.requests.clear()
    assert is_one_line(run(1), FIRST, "not the bytes") and hub.asked("info") == [NEW]
    assert run(1, "--revision", OLD).status == 0 and is_complete(out, 1)


def test_only_the_default_data_set_is_pinned(hub, run, monkeypatch, out):
    monkeypatch.setattr(script, "PINNED", dict.fromkeys(names(7), "0" * 64))
    hub.repo = "kjj0/fineweb100B-gpt2"
    assert run(1, "--100B").status == 0
    assert json.loads((out / "MANIFEST.json").read_bytes())["source"] == hub.repo


# ---- Passing troubles ----------------------------------------------------------------------------
KINDS = "info", "paths", "head", "get", "cdn"
PASSING = dict(
    cut=("cdn", cut), flipped=("cdn", flip), too_much_promised=("cdn", promises(10)),
    too_little_promised=("cdn", promises(-10)), size=("head", header("X-Linked-Size", "9")),
    **{f"{status}_{kind}": (kind, says(status)) for kind in KINDS for status in (503, 429)},
)  # fmt: skip


def plan(hub, kind, trouble, always=False):
    name = None if kind in ("info", "paths") else FIRST
    if always:
        hub.always[kind, name] = trouble
    else:
        hub.plan(kind, name, trouble)


@pytest.mark.parametrize("which", PASSING)
def test_what_passes_is_tried_again(hub, run, out, which):
    plan(hub, *PASSING[which])
    done = run(3)
    assert (done.status, done.err) == (0, "")
    assert is_complete(out, 3) and not any(hub.plans.values())


@pytest.mark.parametrize("which", PASSING)
def test_what_does_not_pass_is_one_line(hub, run, out, which):
    kind, trouble = PASSING[which]
    out.mkdir()
    (out / FIRST).write_bytes(b"what was there before")
    plan(hub, kind, trouble, always=True)
    done = run(3)
    assert is_one_line(done, re.sub("[^0-9]", "", which))
    assert (out / FIRST).read_bytes() == b"what was there before"
    if kind in ("info", "paths"):
        assert {path.name for path in out.iterdir()} == {FIRST, ".lock"}
    else:
        assert "1 of 4 files" in done.err and FIRST in done.err
        rest = {name: entry(FILES[name]) for name in (VAL, SECOND, THIRD)}
        assert {path.name for path in out.iterdir()} == {FIRST, *rest, "MANIFEST.json", ".lock"}
        assert listed(out) == rest
    asked = hub.asked(kind)
    assert 4 <= (asked.count(FIRST) if kind not in ("info", "paths") else len(asked)) <= 40


def test_a_size_that_is_not_that_of_the_file(hub, run, out):
    plan(hub, "paths", states(size=1024), always=True)
    assert is_one_line(run(1), "2 of 2", "41024 bytes where 1024 are stated")
    assert {path.name for path in out.iterdir()} == {".lock"}


def test_a_cut_download_goes_on_where_it_was_cut(hub, run, out):
    plan(hub, "cdn", cut)
    assert run(1).status == 0
    ranges = [r.headers.get("range") for r in hub.requests if (r.kind, r.name) == ("get", FIRST)]
    assert ranges[0] is None and ranges[1].startswith("bytes=")


def test_a_hub_without_ranges(hub, run, out):
    hub.ranges = False
    plan(hub, "cdn", cut)
    assert run(1).status == 0 and is_complete(out, 1)


def test_each_kind_of_request_may_stall(hub, start, out):
    for kind in ("info", "paths", "head", "cdn"):
        plan(hub, kind, stall)
    hub.plan("head", FIRST, stall)
    begun = time.monotonic()
    done = finish(start(3))
    assert (done.status, done.err) == (0, "") and is_complete(out, 3)
    assert not any(hub.plans.values()) and time.monotonic() - begun > 3


def test_pauses_grow_and_end(monkeypatch):
    assert list(script.PAUSES) == sorted(script.PAUSES) and 5 <= sum(script.PAUSES) <= 30
    calls = []

    def call():
        calls.append(time.monotonic())
        raise OSError("came short")

    monkeypatch.setattr(script, "PAUSES", (0.1, 0.2))
    with pytest.raises(OSError, match="came short"):
        script.persistently(call)
    assert calls[1] - calls[0] >= 0.1 and calls[2] - calls[1] >= 0.2 and len(calls) == 3


def test_what_passes():
    """RuntimeError: huggingface_hub closes the client of all threads where one cannot connect."""
    assert script.passes(RuntimeError("Cannot send a request, as the client has been closed."))
    assert script.passes(OSError("came short")) and script.passes(errors.HTTPError("reset"))
    assert not script.passes(errors.OfflineModeIsEnabled())
    assert not script.passes(errors.FileMetadataError())
    for error in (RecursionError(), KeyError(), ValueError(), OSError(28, "full")):
        assert not script.passes(error), error


def test_one_file_that_fails_does_not_stop_the_others(hub, run, out):
    for name in names(7):
        hub.always["cdn", name] = lambda reply: time.sleep(0.1)
    hub.always["head", FIRST] = says(404, message="gone")
    assert is_one_line(run(7), "1 of 8 files", FIRST, "gone")
    assert {path.name for path in out.glob("*.bin")} == listed(out).keys() == {*names(7)} - {FIRST}


def test_a_hub_that_is_gone_for_all_files_is_left_soon(hub, run, out):
    def slowly_gone(reply):
        time.sleep(0.05)
        says(404, message="gone")(reply)

    hub.commits[OLD] = {name: shard(0, 10) for name in names(50)}
    for name in names(50):
        hub.always["get", name] = slowly_gone
    done = run(50)
    assert is_one_line(done, "51 of 51 files", VAL, ", ...", "404", "gone")
    assert 4 <= len(hub.asked("get")) <= 20 and not any(out.glob("*.bin"))


# ---- Troubles that do not pass -------------------------------------------------------------------
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "status, code", [(401, None), (403, None), (403, "GatedRepo"), (404, None)]
)
def test_refusals_end_at_once(hub, run, out, kind, status, code):
    plan(hub, kind, says(status, code), always=True)
    done = run(1)
    assert is_one_line(done, "set HF_TOKEN" if code or status == 401 else str(status))
    assert len([name for name in hub.asked(kind) if name in (FIRST, None, "main", OLD)]) == 1


def test_private_or_missing_repository(hub, run):
    hub.repo = "somebody/else"
    assert is_one_line(run(1), f"{REPO} does not exist or is private", "HF_TOKEN")


def test_bad_token(hub, run, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "bad")
    assert is_one_line(run(1), "refuses the token", "HF_TOKEN")


@pytest.mark.parametrize("token", ["secret\x01", "secr\xe9t", "secret\x7f", "sec\nret"])
def test_token_that_cannot_stand_in_a_header_is_not_shown(hub, run, monkeypatch, token):
    monkeypatch.setenv("HF_TOKEN", token)
    done = run(1)
    assert is_one_line(done, "HF_TOKEN")
    assert "secr" not in done.err.replace("HF_TOKEN", "") and "sec" not in done.out


def test_file_that_is_missing_at_the_revision(hub, run, out):
    del hub.commits[OLD][THIRD]
    assert is_one_line(run(3), REPO, f"has no {THIRD}", "--revision")
    assert not hub.asked("head")


ODD = [dict(lfs=None), dict(type="directory"), *(dict(size=n) for n in ("9", 0, -1, 10**400))]


@pytest.mark.parametrize("change", ODD)
def test_file_without_size_and_sha256(hub, run, change):
    plan(hub, "paths", states(**change), always=True)
    assert is_one_line(run(1), VAL, "sha256")


def test_right_file_that_is_no_shard(hub, run, out):
    hub.commits[OLD][FIRST] = b"right, but no shard " * 1000
    assert is_one_line(run(3), "1 of 4", FIRST, "is no token shard")
    assert not (out / FIRST).exists()
    (out / FIRST).write_bytes(hub.commits[OLD][FIRST])
    assert is_one_line(run(3), "1 of 4", FIRST, "is no token shard")


def test_no_connection(hub, run):
    hub.close()
    close_session()
    assert is_one_line(run(1), "no connection to", hub.endpoint, "refused")


@pytest.mark.parametrize("endpoint", ["http://nowhere.invalid", "nonsense", "http://[", "http://"])
def test_endpoint_that_is_nowhere(hub, run, monkeypatch, endpoint):
    monkeypatch.setattr(constants, "ENDPOINT", endpoint)
    assert is_one_line(run(1), "HF_ENDPOINT", endpoint)


def test_proxy_that_is_not_there(hub, run, monkeypatch):
    close_session()
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    assert is_one_line(run(1), "no connection to", "proxy")


@pytest.mark.parametrize("proxy", ["nonsense://x", "http://[", "http://127.0.0.1:port"])
def test_proxy_that_is_none(hub, run, monkeypatch, proxy):
    close_session()
    monkeypatch.setenv("http_proxy", proxy)
    assert is_one_line(run(1), "proxy")


def test_offline_mode(hub, run, monkeypatch):
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert is_one_line(run(1), "HF_HUB_OFFLINE is set")
    assert not hub.requests


NO_HUB = [b"<html>\x1b[31mlogin", {}, [], None, 3, "x", {"sha": 1}, {"id": REPO, "sha": "main"}]


@pytest.mark.parametrize("body", NO_HUB)
@pytest.mark.parametrize("kind", ["info", "paths"])
def test_endpoint_that_is_no_hub(hub, run, kind, body):
    plan(hub, kind, sends(body), always=True)
    done = run(1)
    like_a_hub = [("info", NO_HUB[-1]), ("paths", {}), ("paths", [])]
    assert is_one_line(done, "has no" if (kind, body) in like_a_hub else "HF_ENDPOINT")


@pytest.mark.parametrize("kind", ["head", "get"])
def test_endpoint_that_is_no_hub_for_files(hub, run, out, kind):
    plan(hub, kind, sends(b"<html>" * 9), always=True)
    assert is_one_line(run(1), "1 of 2", FIRST)
    assert not (out / FIRST).exists() and (kind == "get" or hub.asked("head").count(FIRST) == 1)


def test_what_a_server_says_cannot_move_the_cursor(hub, run):
    words = "\x1b[31mred\x1b[2J\r\n\x07bell\u202eback " + "long " * 1000
    plan(hub, "info", says(500, message="x"), always=True)
    body = json.dumps({"error": words}).encode()
    hub.always["info", None] = lambda reply: vars(reply).update(status=500, body=body)
    done = run(1)
    assert is_one_line(done, "500", "red", "bell") and len(done.err) < 500


@pytest.mark.parametrize(
    "variable, value", [("HF_HUB_DOWNLOAD_TIMEOUT", "soon"), ("HF_ENDPOINT", "http://[")]
)
def test_variable_that_huggingface_hub_cannot_read(start, variable, value):
    done = finish(start(1, env={variable: value}))
    assert is_one_line(done, "HF_")


def test_missing_package(start, tmp_path):
    (tmp_path / "tqdm.py").write_text("import nothing_of_this_name\n")
    path = f"{tmp_path}{os.pathsep}{DATA}"
    assert is_one_line(
        finish(start(1, env=dict(PYTHONPATH=path))), "nothing_of_this", "pip install"
    )


# ---- Disk ----------------------------------------------------------------------------------------
def test_space_is_looked_at_before_the_first_byte(hub, run, out, monkeypatch):
    need = 4 * len(FILES[VAL])
    free = script.MARGIN + need
    usage = lambda folder: types.SimpleNamespace(free=free)  # noqa: E731
    monkeypatch.setattr(script.shutil, "disk_usage", usage)
    assert run(3).status == 0
    for path in out.iterdir():
        path.unlink()
    free, hub.requests[:] = free - 1, []
    done = run(3)
    assert is_one_line(done, "needs 0.1 GB", "has 0.1 GB free", str(out))
    assert not hub.asked("head") and {path.name for path in out.iterdir()} == {".lock"}


def test_space_is_looked_at_before_each_file(hub, run, out, monkeypatch):
    left = [10**9, 10**9, 0, 0, 0, 0, 0, 0]
    usage = lambda folder: types.SimpleNamespace(free=left.pop(0))  # noqa: E731
    monkeypatch.setattr(script.shutil, "disk_usage", usage)
    monkeypatch.setattr(script, "THREADS", 1)
    monkeypatch.setattr(file_download, "_check_disk_space", lambda *_: None)
    assert is_one_line(run(3), "3 of 4", FIRST, "0.0 GB free")
    assert listed(out) == {VAL: entry(FILES[VAL])} and hub.asked("cdn") == [VAL]


def test_disk_that_is_full_in_the_middle(hub, start, out):
    out.mkdir()
    (out / FIRST).write_bytes(b"what was there before")
    limit = "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))"
    assert is_one_line(finish(start(1, set_up=limit)), "2 of 2", VAL, FIRST, "File too large")
    assert (out / FIRST).read_bytes() == b"what was there before"
    assert {path.name for path in out.iterdir()} == {FIRST, ".lock"}
    assert len(hub.asked("cdn")) == 2  # it was not tried again


@pytest.mark.parametrize("where", ["file", "file/below"])
def test_folder_that_cannot_be_written(hub, run, tmp_path, where):
    (tmp_path / "file").touch()
    assert is_one_line(run(1, "--out", tmp_path / where), str(tmp_path / where), "cannot be used")
    assert not hub.requests


def test_name_that_is_taken_by_a_folder(run, out):
    (out / FIRST).mkdir(parents=True)
    assert is_one_line(run(1), FIRST, "directory")


def test_manifest_that_cannot_be_written(run, out):
    (out / "MANIFEST.json").mkdir(parents=True)
    assert is_one_line(run(1), "MANIFEST.json", "cannot be used")


def test_a_file_is_on_the_disk_before_it_has_its_name(run, out, monkeypatch):
    on_disk, named, replace, fsync = set(), set(), os.replace, os.fsync
    monkeypatch.setattr(os, "fsync", lambda f: (fsync(f), on_disk.add(os.fstat(f).st_ino)))

    def watched(source, target):
        assert os.stat(source).st_ino in on_disk
        named.add(target)
        replace(source, target)

    monkeypatch.setattr(os, "replace", watched)
    assert run(1).status == 0 and {out / VAL, out / FIRST} <= named


# ---- Processes -----------------------------------------------------------------------------------
INTERRUPTIBLE = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)\n"


def interrupt(process):
    begun = time.monotonic()
    process.send_signal(signal.SIGINT)
    done = finish(process)
    assert time.monotonic() - begun < 2
    assert is_one_line(done, "interrupted", status=130)
    return done


@pytest.mark.parametrize("kind", ["info", "cdn"])
def test_ctrl_c(hub, start, out, kind):
    for name in names(7):
        hub.always[kind, None if kind == "info" else name] = stall
    process = start(set_up=INTERRUPTIBLE, env=dict(HF_HUB_DOWNLOAD_TIMEOUT="60"))
    hub.wait_for(kind, 1 if kind == "info" else script.THREADS)
    time.sleep(0.2)
    assert len(list(out.glob(".part-*"))) == 1
    assert "7 train shards" in interrupt(process).out  # what it had said is not lost
    assert {path.name for path in out.iterdir()} == {".lock"}


def test_ctrl_c_while_files_are_read(start, run, out):
    run(3)
    slow = "def sha256(path): print('reads', flush=True), time.sleep(60)\n"
    process = start(3, set_up=INTERRUPTIBLE + slow + "script.shards.sha256 = sha256")
    assert process.stdout.readline() == "reads\n"
    assert interrupt(process) and is_complete(out, 3)


def test_ctrl_c_while_it_starts(start, tmp_path):
    (tmp_path / "tqdm.py").write_text("raise KeyboardInterrupt\n")
    path = f"{tmp_path}{os.pathsep}{DATA}"
    assert is_one_line(finish(start(1, env=dict(PYTHONPATH=path))), "interrupted", status=130)


def test_a_killed_run_is_continued(hub, start, out):
    hub.plan("cdn", SECOND, stall)
    process = start(3, env=dict(HF_HUB_DOWNLOAD_TIMEOUT="60"))
    hub.wait_for("cdn", 4)
    end = time.monotonic() + 10
    while not (out / "MANIFEST.json").is_file() or len(listed(out)) < 3:
        assert time.monotonic() < end
        time.sleep(0.05)
    process.kill()
    process.wait()
    left = [path for path in out.glob(".part-*/**/*.incomplete")]
    assert left and not (out / SECOND).exists()
    assert listed(out) == {name: entry(FILES[name]) for name in (VAL, FIRST, THIRD)}
    hub.requests.clear()
    done = finish(start(3))
    assert done.status == 0 and is_complete(out, 3) and hub.asked("cdn") == [SECOND]


def test_two_processes_at_once(hub, start, out):
    hub.plan("cdn", SECOND, stall)
    patient = dict(HF_HUB_DOWNLOAD_TIMEOUT="60")
    first = start(3, env=patient)
    hub.wait_for("cdn", 4)
    second, third = start(3, env=patient), start(3, set_up=INTERRUPTIBLE, env=patient)
    for process in (second, third):
        assert "another process is at work" in process.stdout.readline()
    assert interrupt(third)
    hub.released.set()
    both = finish(first), finish(second)
    assert [(done.status, done.err) for done in both] == [(0, "")] * 2
    assert "4 of them fetched" in both[0].out and "0 of them fetched" in both[1].out
    assert is_complete(out, 3) and sorted(hub.asked("cdn")) == sorted(names(3))
    assert hub.asked("info") == ["main"]  # the second found all there


# ---- Progress ------------------------------------------------------------------------------------
def test_progress_without_terminal_is_few_lines(hub, run, monkeypatch):
    assert script.REPORT >= 10
    assert run(3).err == ""
    monkeypatch.setattr(script, "REPORT", 0)
    hub.commits[NEW][FIRST] = shard(9, 400_000)  # more than what Python keeps before it writes
    plan(hub, "cdn", stall)
    done = run(3, "--revision", NEW)
    assert done.status == 0
    lines = done.err.splitlines()
    assert 3 <= len(lines) < 30 and all(re.fullmatch(r"\d+% of 0.0 GB", line) for line in lines)
    shares = [int(line.split("%")[0]) for line in lines]
    assert any(30 < share < 80 for share in shares) and shares[-1] == 100
    assert type(script.tqdm.get_lock()) is type(threading.RLock())  # no semaphore is left by exits


def test_one_bar_on_a_terminal(hub, start):
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("4H", 24, 80, 0, 0))
    hub.commits[OLD][FIRST] = shard(9, 400_000)
    plan(hub, "cdn", stall)
    process = start(3, stderr=theirs)
    os.close(theirs)
    shown = b""
    while True:
        try:
            shown += os.read(ours, 9999)
        except OSError:  # all is read and the other end closed
            break
    os.close(ours)
    assert process.wait(30) == 0
    assert b"100%" in shown and b"fineweb" not in shown and shown.count(b"\n") == 1
    assert any(30 < int(share) < 80 for share in re.findall(rb"(\d+)%", shown))
