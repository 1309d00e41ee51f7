"""data/check.py, and the reader it shares with train_gpt.py: on good shards, bad ones and noise."""

import json
import os
import re
import resource
import subprocess
import sys
import time
from pathlib import Path

import check
import numpy as np
import pytest
from test_guards import sha, text, write_manifest, write_shard

import train_gpt

CHECK = Path(check.__file__)
FLAGS = ["--vocab", "257", "--eot", "256"]


@pytest.fixture
def data(tmp_path) -> Path:
    """Three train shards and one of validation, with 22 documents in each."""
    folder = tmp_path / "d"
    folder.mkdir()
    for i in range(3):
        write_shard(folder / f"x_train_00000{i + 1}.bin", text(1100, i))
    write_shard(folder / "x_val_000000.bin", text(1100, 3))
    return folder


@pytest.fixture
def run(monkeypatch, capsys):
    """Runs it in this process: exit status, table, stderr."""

    def run(*argv) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["check.py", *map(str, argv)])
        status = 0
        try:
            check.main()
        except SystemExit as stopped:
            status = stopped.code if isinstance(stopped.code, int) else 1
            print(stopped.code, file=sys.stderr)
        return status, *capsys.readouterr()

    return run


def test_good_shards_and_their_table(data, run):
    write_manifest(data)
    status, out, err = run(data)
    assert (status, err) == (0, "")
    first, *rows, last = out.splitlines()[0:1] + out.splitlines()[2:]
    assert first == f"{data}: --vocab 257 --eot 256"
    names = ["x_train_000001.bin", "x_train_000002.bin", "x_train_000003.bin", "x_val_000000.bin"]
    assert [row.split() for row in rows] == [[name, "1,100", "22", "50", "ok"] for name in names]
    assert last == "4 shards, 4,400 tokens, 88 documents"


def test_without_a_manifest_it_says_so_and_takes_the_record_s_vocabulary(data, run):
    status, out, _ = run(data)
    assert status == 1 and "--vocab 50257 --eot 50256, no MANIFEST.json\n" in out
    assert out.count("has no token 50256") == 4
    assert run(data, *FLAGS)[0] == 0


def test_flags_overrule_the_manifest(data, run):
    write_manifest(data)
    status, _, err = run(data, "--vocab", "256")
    assert status == 1 and err.count("has token 256; --vocab is 256") == 4


def flip(path: Path, at: int) -> None:
    raw = bytearray(path.read_bytes())
    raw[at] ^= 1
    path.write_bytes(raw)


def tokens(path: Path, at: int, value: int) -> None:
    changed = text(1100, 1)
    changed[at] = value
    write_shard(path, changed)


FAULTS = dict(
    magic=(lambda p: write_shard(p, text(1100, 1), magic=0), "is no token shard"),
    version=(lambda p: write_shard(p, text(1100, 1), version=2), "is no token shard"),
    negative=(lambda p: write_shard(p, text(1100, 1), count=-5), "is no token shard"),
    huge=(lambda p: write_shard(p, text(1100, 1), count=2**31 - 1), "has 3224 bytes where its"),
    one_byte_less=(lambda p: os.truncate(p, 3223), "has 3223 bytes where its header promises 3224"),
    half=(lambda p: os.truncate(p, 1612), "has 1612 bytes where its header promises 3224"),
    empty=(lambda p: os.truncate(p, 0), "is no token shard"),
    header_only=(lambda p: os.truncate(p, 1024), "has 1024 bytes where its"),
    more=(lambda p: os.truncate(p, 3224 + 2000), "has 5224 bytes where its"),
    one_byte_more=(lambda p: os.truncate(p, 3225), "has 3225 bytes where its"),
    token=(lambda p: tokens(p, 700, 60000), "has token 60000; --vocab is 257"),
    no_start=(lambda p: write_shard(p, np.arange(1100) % 97), "has no token 256, which starts"),
    twin=(lambda p: write_shard(p, text(1100)), "has the bytes of x_train_000001.bin"),
    folder=(lambda p: (p.unlink(), p.mkdir()), "is no file"),
    gone=(lambda p: p.unlink(), "x_train_000002.bin is missing, x_train_000003.bin stands in its"),
    named=(
        lambda p: p.rename(p.with_name("x_train_000002 (1).bin")),
        "x_train_000002.bin is missi",
    ),
)


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_named_with_its_file_and_the_rest_is_still_checked(data, run, fault):
    change, says = FAULTS[fault]
    change(data / "x_train_000002.bin")
    status, out, err = run(data, *FLAGS)
    assert status == 1
    assert re.search(rf"^check.py: {data}/x_train_00000[23].*{re.escape(says)}", err, re.M)
    assert says in out and re.search("x_train_000001.bin .* ok\n", out)
    assert re.search("x_val_000000.bin .* ok\n", out)


@pytest.mark.parametrize("at", [20, 1024, 3223])
def test_one_changed_bit_is_found_by_the_manifest(data, run, at):
    """Of a byte that nobody reads, too: the hash is of all bytes."""
    about = write_manifest(data)
    path = data / "x_train_000002.bin"
    flip(path, at)
    status, _, err = run(data)
    old = about["files"][path.name]["sha256"]
    expected = f"{path}: has sha256 {sha(path)}, but in MANIFEST.json {old}; get it again"
    assert status == 1 and err == f"check.py: {expected}\n"


@pytest.mark.parametrize("name", ["x_train_000001.bin", "x_train_000003.bin", "x_val_000000.bin"])
def test_a_file_that_the_manifest_lists_must_be_there(data, run, name):
    write_manifest(data)
    (data / name).unlink()
    status, _, err = run(data)
    assert status == 1 and f"check.py: {data / name}: is missing\n" in err


def test_a_file_that_the_manifest_does_not_list(data, run):
    about = write_manifest(data)
    del about["files"]["x_train_000003.bin"]
    write_manifest(data, files=about["files"])
    status, _, err = run(data)
    assert (status, err) == (1, f"check.py: {data}/x_train_000003.bin: is not in MANIFEST.json\n")


def test_a_broken_manifest(data, run):
    (data / "MANIFEST.json").write_text("{")
    assert run(data) == (
        1,
        "",
        f"check.py: {data} has a broken MANIFEST.json; get the data again\n",
    )


@pytest.mark.parametrize("split", ["train", "val"])
def test_a_split_without_shards(data, run, split):
    for path in data.glob(f"*_{split}_*"):
        path.unlink()
    status, out, err = run(data, *FLAGS)
    assert (status, err) == (1, f"check.py: {data} has no {split} shard\n")
    assert "ok" in out


def test_two_sets_in_one_folder(data, run):
    write_shard(data / "aaa_val_000000.bin", text(1100, 9))
    status, _, err = run(data, *FLAGS)
    says = "has shards of several sets: aaa, x; give each its own folder"
    assert (status, err) == (1, f"check.py: {data} {says}\n")


def test_a_file_given_as_a_folder(data, run):
    status, _, err = run(data / "x_val_000000.bin")
    assert status == 1 and "x_val_000000.bin cannot be read: [Errno 20] Not a directory" in err


def test_ctrl_c_ends_it_at_once(data, monkeypatch, capsys):
    def interrupt(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(check, "check_all", interrupt)
    monkeypatch.setattr(sys, "argv", ["check.py", str(data)])
    monkeypatch.setattr(os, "_exit", sys.exit)
    with pytest.raises(SystemExit) as stopped:
        check.main()
    assert stopped.value.code == 130 and capsys.readouterr().err == "check.py: stopped by Ctrl-C\n"


def test_a_folder_that_is_not_there(tmp_path, run):
    status, _, err = run(tmp_path / "nowhere")
    assert status == 1 and f"check.py: {tmp_path}/nowhere has no train shard" in err


def test_all_folders_beside_the_script_are_checked(data, run, monkeypatch):
    monkeypatch.setattr(check, "HERE", data.parent)
    write_manifest(data)
    (data.parent / "empty").mkdir()
    status, out, _ = run()
    assert status == 0 and f"{data}: --vocab 257" in out and "empty" not in out
    monkeypatch.setattr(check, "HERE", data)
    status, _, err = run()
    assert (
        status == 1 and "there are no shards in data/; data/README.md says how to get some" in err
    )


def test_the_process_exits_with_1_also_under_O(data):
    """No check may be an assert, which python -O leaves out."""
    command = [sys.executable, "-O", CHECK, data, *FLAGS]
    env = os.environ | {"JAX_PLATFORMS": "cpu"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, env=env)
    assert (done.returncode, done.stderr) == (0, "")
    os.truncate(data / "x_val_000000.bin", 3000)
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, env=env)
    assert done.returncode == 1 and "x_val_000000.bin: has 3000 bytes" in done.stderr


def test_it_agrees_with_training(data, run, monkeypatch):
    """On the shards a run reads, both accept or both refuse, for the same reason."""
    argv = "tiny --T 32 --head_chunk 32 --steps 12 --val_T 64 --val_tokens 1024 --data".split()
    _, c = train_gpt.parse_config([*argv, str(data)])
    for fault in FAULTS:
        for i in range(3):
            write_shard(data / f"x_train_00000{i + 1}.bin", text(1100, i))
        path = data / "x_train_000002.bin"
        FAULTS[fault][0](path)
        with pytest.raises(SystemExit) as stopped:
            contents = [train_gpt.inspect(s, 32, 256) for s in train_gpt.find_data(c)]
            train_gpt.check_contents(c, contents)
        assert stopped.value.code == 2 and run(data, *FLAGS)[0] == 1
        for left in (*data.glob("*(1)*"), path):
            left.rmdir() if left.is_dir() else left.unlink(missing_ok=True)


# ---- Noise ---------------------------------------------------------------------------------------
def noise(rng: np.random.Generator) -> bytes:
    """A file of up to 3 kB that is nearly a shard: some of its header is right, some random."""
    header = rng.integers(-(2**31), 2**31, 256, dtype=np.int64).astype("<i4")
    if rng.random() < 0.8:
        header[0] = 20240520
    if rng.random() < 0.8:
        header[1] = 1
    count = int(rng.integers(0, 1000))
    extremes = [-(2**31), -1, 0, 1, 2, 2**15, 2**31 - 1, count + 1, count - 1]
    header[2] = rng.choice(extremes) if rng.random() < 0.4 else count
    body = rng.integers(0, rng.choice([200, 257, 258, 2**16]), count).astype("<u2")
    raw = header.tobytes() + body.tobytes()
    return raw[: rng.integers(0, len(raw))] if rng.random() < 0.2 else raw


def test_ten_thousand_random_headers(tmp_path, capsys):
    """Never anything but success or exit 2, each in under a second, in under 500 MB."""
    argv = "tiny --T 4 --head_chunk 4 --steps 1 --val_T 4 --val_tokens 32 --data".split()
    _, c = train_gpt.parse_config([*argv, str(tmp_path)])
    write_shard(tmp_path / "x_val_000000.bin", text(1100))
    path, rng, ends = tmp_path / "x_train_000001.bin", np.random.default_rng(0), {}
    unit = 1 if sys.platform == "darwin" else 1024
    before = unit * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for _ in range(10_000):
        path.write_bytes(noise(rng))
        began = time.perf_counter()
        try:
            shards = train_gpt.find_data(c)
            train_gpt.check_contents(c, [train_gpt.inspect(s, 4, 256) for s in shards])
            end = "good"
        except SystemExit as stopped:
            assert stopped.code == 2
            end = re.sub(r"[0-9a-f]{64}|\d+", "N", capsys.readouterr().err.split("x_train_")[-1])
        assert time.perf_counter() - began < 1
        ends[end] = ends.get(end, 0) + 1
    grown = unit * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    assert grown < 100e6  # of this process, in which much else has been tested
    reasons = ["is no token shard", "has N bytes where", "has token N", "hold N of N", "no token N"]
    for reason in ["good", *reasons]:
        assert any(reason in end for end in ends), (reason, ends)
    assert sum(ends.values()) == 10_000 and not any("Traceback" in end for end in ends)


def test_a_huge_promise_takes_no_memory(tmp_path):
    """In a process of its own that may have 500 MB more than what importing takes."""
    write_shard(tmp_path / "a.bin", text(1100), count=2**31 - 1)
    code = (
        "import resource, sys, pathlib, train_gpt\n"
        "used = int(open('/proc/self/statm').read().split()[0]) * resource.getpagesize()\n"
        "resource.setrlimit(resource.RLIMIT_AS, (used + 500 * 2**20,) * 2)\n"
        "print(train_gpt.open_shard(pathlib.Path(sys.argv[1])))\n"
    )
    command = [sys.executable, "-c", code, tmp_path / "a.bin"]
    env = os.environ | {"PYTHONPATH": str(CHECK.parent.parent)}
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, env=env)
    assert done.stdout == "has 3224 bytes where its header promises 4294968318\n", done.stderr


def test_a_manifest_of_our_scripts_is_one_that_is_read(data):
    import shards

    files = {p.name: dict(size=3224, sha256=shards.sha256(p)) for p in data.glob("*.bin")}
    shards.write_manifest(data, "a test", 257, 256, files)
    about, _ = train_gpt.read_folder(data)
    assert about == dict(source="a test", vocab=257, eot=256, files=files)
    assert list(json.loads((data / "MANIFEST.json").read_text())["files"]) == sorted(files)
