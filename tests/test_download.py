"""cached_fineweb10B.py against a hub on loopback that cuts, lies, stalls, refuses and vanishes."""

import hashlib
import json
import os
import pathlib
import re
import signal
import subprocess
import sys
import time
import types

import cached_fineweb10B as script
import numpy as np
import pytest
import shards
from hub import Hub, cut, flip, hurry, says, sends, stall, states
from huggingface_hub import close_session, constants

import train_gpt

REPO = "kjj0/fineweb10B-gpt2"
OLD, NEW = "a" * 40, "b" * 40  # commits; main is OLD
DATA, HERE = pathlib.Path(script.__file__).parent, pathlib.Path(__file__).parent
DRIVER = "import cached_fineweb10B as script, hub\nhub.hurry(script, setattr)\n"


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


@pytest.fixture
def hub(monkeypatch, tmp_path):
    for key in [key for key in os.environ if key.startswith("HF_") or "proxy" in key.lower()]:
        monkeypatch.delenv(key)
    hub = Hub(REPO, {OLD: dict(FILES), NEW: dict(NEW_FILES)})
    hurry(script, monkeypatch.setattr)
    url = hub.endpoint + "/{repo_id}/resolve/{revision}/{filename}"
    settings = dict(ENDPOINT=hub.endpoint, HUGGINGFACE_CO_URL_TEMPLATE=url)
    settings |= dict(HF_HUB_DISABLE_XET=True, HF_HUB_DOWNLOAD_TIMEOUT=1)  # XET as in the script
    for key in ("HF_TOKEN_PATH", "HF_HUB_CACHE", "AGENT_HARNESSES_PATH"):
        settings[key] = str(tmp_path / "home" / key)
    for key, value in settings.items():
        monkeypatch.setattr(constants, key, value)
    yield hub
    hub.close()
    close_session()


@pytest.fixture
def run(hub, tmp_path, monkeypatch, capfd):
    """Runs the script in this process, on tmp_path/out unless another --out is given."""

    def run(*argv):
        argv = ["cached_fineweb10B.py", "--out", tmp_path / "out", *argv]
        monkeypatch.setattr(sys, "argv", list(map(str, argv)))
        monkeypatch.setattr(os, "_exit", sys.exit)
        capfd.readouterr()
        try:
            status = script.main() or 0
        except SystemExit as stopped:
            status = stopped.code if isinstance(stopped.code, int) else 1
            if isinstance(stopped.code, str):
                print(stopped.code, file=sys.stderr)
        out, err = capfd.readouterr()
        return types.SimpleNamespace(status=status, out=out, err=err)

    return run


@pytest.fixture
def start(hub, tmp_path):
    """Starts the script as a process; `set_up` is Python that comes before."""
    running = []

    def start(*argv, set_up="", env=None):
        ours = dict(HF_ENDPOINT=hub.endpoint, HF_HOME=str(tmp_path / "home"), PYTHONUNBUFFERED="")
        ours |= dict(HF_HUB_DOWNLOAD_TIMEOUT="1", PYTHONPATH=f"{DATA}:{HERE}")
        env = os.environ | ours | (env or {})
        argv = ["--out", str(tmp_path / "out"), *map(str, argv)]
        command = [sys.executable, "-c", DRIVER + set_up + "\nscript.main()", *argv]
        pipes = dict(stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        running.append(subprocess.Popen(command, env=env, **pipes))
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
    inner = {"MANIFEST.json", ".lock", shards.STAMP}
    assert {path.name for path in out.iterdir()} == {*expected, *inner}
    for name, content in expected.items():
        assert (out / name).read_bytes() == content, name
    listed = {name: entry(content, revision) for name, content in expected.items()}
    about = dict(source=REPO, vocab=50257, eot=50256, files=listed)
    assert json.loads((out / "MANIFEST.json").read_bytes()) == about
    return True


def is_one_line(done, *parts, status=1):
    """It failed with one line that has these parts."""
    assert done.status == status, done
    assert done.err.startswith("cached_fineweb10B.py: ") and done.err.endswith("\n"), done.err
    assert done.err[:-1].isprintable() and len(done.err) < 700
    assert [part for part in parts if part not in done.err] == [], done.err
    return True


def listed(out):
    return json.loads((out / "MANIFEST.json").read_bytes())["files"]


@pytest.fixture
def out(tmp_path):
    return tmp_path / "out"


# ---- What is fetched -----------------------------------------------------------------------------
def test_files_are_fetched_checked_and_listed(hub, start, out, tmp_path):
    done = finish(start(3, env=dict(HF_TOKEN="good")))
    assert (done.status, done.err) == (0, "") and is_complete(out, 3)
    what = f"4 files, 0.0 GB, revision {OLD[:12]}, are there and right, 4 of them fetched now"
    assert f"{out}: {what}\n" in done.out
    assert hub.asked("info") == ["main"]
    for request in hub.requests:  # a token is for the hub, not for the servers that it sends us to
        given = request.headers.get("authorization")
        assert given == (None if request.kind == "cdn" else "Bearer good"), vars(request)
    assert {r.revision for r in hub.requests if r.kind != "info"} == {OLD}
    assert not [*(tmp_path / "home").rglob("*.bin")]  # no second copy in a cache


def test_second_run_asks_nobody_and_reads_nothing(hub, run, out, monkeypatch):
    run(3)
    hub.requests.clear()
    monkeypatch.setattr(shards, "inspect", lambda path, eot: pytest.fail(f"reads {path}"))
    before = {path: path.stat().st_mtime_ns for path in out.iterdir()}
    assert "are there and right, 0 of them" in run(3).out and not hub.requests
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


def test_metadata_of_a_thousand_files_is_asked_for_in_parts(hub):
    many = names(1030)
    hub.commits[OLD] = {name: name.encode() for name in many}
    stated = script.ask(REPO, many, OLD)
    assert list(stated) == many and stated[many[-1]] == entry(many[-1].encode())
    assert 2 <= len(hub.asked("paths")) <= 5


# ---- What is there -------------------------------------------------------------------------------
FLIPPED = FILES[SECOND][:-2] + bytes([FILES[SECOND][-2] ^ 1]) + FILES[SECOND][-1:]


@pytest.mark.parametrize("content", [FLIPPED, FILES[SECOND][:-2], FILES[FIRST]])
def test_a_file_that_is_there_is_not_trusted(hub, run, out, content):
    run(3)
    hub.requests.clear()
    (out / SECOND).write_bytes(content)
    assert "are there and right, 1 of them fetched" in run(3).out
    assert is_complete(out, 3) and hub.asked("cdn") == [SECOND]


def test_a_broken_manifest_and_that_of_another_data_set_are_refused(hub, run, out):
    shards.write_manifest(out, "mine\x1b[2J", vocab=257, eot=256, files={})
    before = (out / "MANIFEST.json").read_bytes()
    assert is_one_line(run(1), str(out), "another data set", "mine", "--out")
    assert (out / "MANIFEST.json").read_bytes() == before and not hub.requests
    (out / "MANIFEST.json").write_text("{")
    assert is_one_line(run(1), str(out), "broken MANIFEST.json: delete it")


def test_the_cache_of_huggingface_hub_is_not_trusted(hub, run, out):
    """It may hold the file, and would hand it over as it is."""
    repo = pathlib.Path(constants.HF_HUB_CACHE) / "datasets--kjj0--fineweb10B-gpt2"
    (repo / "snapshots" / OLD).mkdir(parents=True)
    (repo / "snapshots" / OLD / FIRST).write_bytes(FLIPPED)
    assert run(1).status == 0 and is_complete(out, 1)


def test_revision_is_recorded_and_used_until_another_replaces_the_files(hub, run, out):
    hub.main = NEW
    assert run(1, "--revision", OLD).status == 0 and is_complete(out, 1)
    hub.requests.clear()
    assert run(1, "--revision", OLD).status == 0 and not hub.requests
    assert run(2).status == 0 and is_complete(out, 2)  # not mixed with main
    assert hub.asked("info") == [OLD] and hub.asked("cdn") == [SECOND]
    assert run(2, "--revision", "main").status == 0 and is_complete(out, 2, NEW_FILES, NEW)


def test_other_bytes_than_the_pinned_ones_are_refused(hub, run, out, monkeypatch):
    run(2)
    (out / FIRST).unlink()
    other = "0" * 64
    monkeypatch.setattr(script, "PINNED", {VAL: entry(FILES[VAL])["sha256"], FIRST: other})
    hub.requests.clear()
    assert is_one_line(run(2), FIRST, other, entry(FILES[FIRST])["sha256"], "not the bytes that")
    assert not hub.asked("cdn") and not (out / FIRST).exists()
    monkeypatch.setitem(script.PINNED, FIRST, entry(FILES[FIRST])["sha256"])
    assert run(2).status == 0 and is_complete(out, 2)
    monkeypatch.setitem(script.PINNED, FIRST, other)  # nor if MANIFEST.json lists them
    assert is_one_line(run(2), FIRST, "not the bytes")
    hub.repo = "kjj0/fineweb100B-gpt2"  # whose files are not pinned
    assert run(1, "--100B", "--out", f"{out}100B").status == 0


# ---- Troubles ------------------------------------------------------------------------------------
PASSING = dict(
    cut=("cdn", cut),
    flipped=("cdn", flip),
    **{f"503_{kind}": (kind, says(503)) for kind in ("info", "paths", "head", "get", "cdn")},
    **{"429_info": ("info", says(429))},
)


def plan(hub, kind, trouble, always=False):
    about = kind, None if kind in ("info", "paths") else FIRST
    hub.always.update({about: trouble} if always else {})
    hub.plans[about] += [trouble] * (not always)


@pytest.mark.parametrize("which", PASSING)
def test_what_passes_is_tried_again(hub, run, out, which):
    plan(hub, *PASSING[which])
    assert run(3).err == "" and is_complete(out, 3) and not any(hub.plans.values())


def test_a_hub_that_is_gone_for_all_files_is_left_soon(hub, run, out):
    hub.commits[OLD] = {name: shard(0, 10) for name in names(50)}
    for name in names(50):
        hub.always["get", name] = lambda r: time.sleep(0.05) or says(404, message="gone")(r)
    assert is_one_line(run(50), "could not fetch fineweb_", "404", "gone")
    assert 4 <= len(hub.asked("get")) <= 20 and not any(out.glob("*.bin"))


@pytest.mark.parametrize("which", ["cut", "flipped", "503_info", "503_get"])
def test_what_does_not_pass_is_one_line(hub, run, out, which):
    kind, trouble = PASSING[which]
    out.mkdir()
    (out / FIRST).write_bytes(b"what was there before")
    plan(hub, kind, trouble, always=True)
    assert is_one_line(done := run(3), re.sub("[^0-9]", "", which))
    assert (out / FIRST).read_bytes() == b"what was there before" and not [*out.glob(".part-*")]
    if kind != "info":
        rest = {name: entry(FILES[name]) for name in (VAL, SECOND, THIRD)}
        assert listed(out) == rest and f"could not fetch {FIRST}: " in done.err
    assert 4 <= len([name for name in hub.asked(kind) if name in (FIRST, "main")]) <= 40


@pytest.mark.parametrize("kind", ["info", "head", "cdn"])
@pytest.mark.parametrize("status, code", [(401, None), (403, "GatedRepo"), (404, None)])
def test_refusals_end_at_once(hub, run, kind, status, code):
    plan(hub, kind, says(status, code), always=True)
    assert is_one_line(run(1), "set HF_TOKEN" if code or status == 401 else str(status))
    assert len([name for name in hub.asked(kind) if name in (FIRST, None, "main", OLD)]) == 1


RED = {"error": "\x1b[31mred\x1b[2J\r\n\x07bell\u202eback " + "long " * 1000}
WORDS = dict(
    private=(lambda h, m: setattr(h, "repo", "a/b"), f"{REPO} does not exist or is private"),
    token=(lambda h, m: m.setenv("HF_TOKEN", "bad"), "refuses the token: set HF_TOKEN"),
    size=(lambda h, m: plan(h, "paths", states(size=1024), always=True), "where 1024 bytes"),
    no_sha256=(lambda h, m: plan(h, "paths", states(lfs=None), always=True), "no sha256"),
    cursor=(lambda h, m: plan(h, "info", sends(RED, status=500), always=True), "bell back"),
    no_hub=(lambda h, m: plan(h, "info", sends(b"<html>"), always=True), "HF_ENDPOINT"),
    closed=(lambda h, m: h.close() or close_session(), "check network, proxy, HF_ENDPOINT"),
    nowhere=(lambda h, m: m.setattr(constants, "ENDPOINT", "http://["), "HF_ENDPOINT"),
    offline=(lambda h, m: m.setattr(constants, "HF_HUB_OFFLINE", True), "HF_HUB_OFFLINE"),
    missing=(lambda h, m: h.commits[OLD].pop(FIRST), f"has no {FIRST}"),
    shard=(lambda h, m: h.commits[OLD].update({VAL: b"no shard " * 999}), "is no token shard"),
)


@pytest.mark.parametrize("which", WORDS)
def test_each_trouble_has_its_words(hub, run, monkeypatch, out, which):
    change, said = WORDS[which]
    change(hub, monkeypatch)
    assert is_one_line(run(1), said) and not (out / VAL).exists()


@pytest.mark.parametrize("token", ["secr\xe9t", "sec\nret"])
def test_token_that_cannot_stand_in_a_header_is_not_shown(hub, run, monkeypatch, token):
    monkeypatch.setenv("HF_TOKEN", token)
    assert is_one_line(done := run(1), "HF_TOKEN") and "sec" not in done.out + done.err


# ---- Disk ----------------------------------------------------------------------------------------
def test_space_is_looked_at_before_the_first_byte(hub, run, out, monkeypatch):
    free = script.MARGIN + 4 * len(FILES[VAL]) - 1
    usage = lambda folder: types.SimpleNamespace(free=free)
    monkeypatch.setattr(script.shutil, "disk_usage", usage)
    assert is_one_line(run(3), "needs 0.1 GB", "has 0.1 GB free", str(out))
    assert not hub.asked("head") and {path.name for path in out.iterdir()} == {".lock"}
    free += 1
    assert run(3).status == 0


def test_disk_that_is_full_in_the_middle(hub, start, out):
    out.mkdir()
    (out / FIRST).write_bytes(b"what was there before")
    limit = "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))"
    assert is_one_line(finish(start(1, set_up=limit)), VAL, FIRST, "File too large")
    assert (out / FIRST).read_bytes() == b"what was there before"
    assert {path.name for path in out.iterdir()} == {FIRST, ".lock"}
    assert len(hub.asked("cdn")) == 2  # it was not tried again


def test_folder_that_cannot_be_written(hub, run, tmp_path):
    (tmp_path / "file").touch()
    assert is_one_line(run(1, "--out", tmp_path / "file"), f"{tmp_path}/file cannot be used")
    assert not hub.requests


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
    process.send_signal(signal.SIGINT)
    assert is_one_line(done := finish(process, seconds=2), "interrupted", status=130)
    return done


@pytest.mark.parametrize("kind", ["info", "cdn"])
def test_ctrl_c(hub, start, out, kind):
    hub.always.update({(kind, name): stall for name in (None, *names(7))})
    process = start(set_up=INTERRUPTIBLE, env=dict(HF_HUB_DOWNLOAD_TIMEOUT="60"))
    hub.wait_for(kind, 1 if kind == "info" else script.THREADS)
    time.sleep(0.2)
    assert len(list(out.glob(".part-*"))) == 1
    said = interrupt(process).out  # what it had said is not lost
    assert kind == "info" or "fetching 8 files" in said
    assert {path.name for path in out.iterdir()} == {".lock"}


def test_a_killed_run_is_continued(hub, start, out):
    hub.plans["cdn", SECOND].append(stall)
    process = start(3, env=dict(HF_HUB_DOWNLOAD_TIMEOUT="60"))
    hub.wait_for("cdn", 4)
    while not (out / "MANIFEST.json").is_file() or len(listed(out)) < 3:
        time.sleep(0.05)
    process.kill()
    process.wait()
    assert [*out.glob(".part-*/**/*.incomplete")] and not (out / SECOND).exists()
    assert listed(out) == {name: entry(FILES[name]) for name in (VAL, FIRST, THIRD)}
    hub.requests.clear()
    done = finish(start(3))
    assert done.status == 0 and is_complete(out, 3) and hub.asked("cdn") == [SECOND]


def test_two_processes_at_once(hub, start, out):
    hub.plans["cdn", SECOND].append(stall)
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
