"""data/check.py and the reader of data/shards.py: on good shards and bad ones."""

import os
import re
import resource
import subprocess
import sys
from pathlib import Path
from unittest.mock import Mock

import check
import numpy as np
import pytest
import shards

from tests.tools import write_shard

DATA, SECOND = Path(check.__file__).parent, "x_train_000002.bin"


def text(first: int = 0) -> np.ndarray:
    return np.where(np.arange(1100) % 50, np.arange(first, first + 1100) % 97, 256)


def write_manifest(folder: Path, **changes) -> dict:
    files = {p.name: shards.inspect(p, 256) for p in folder.glob("*.bin")}
    files = {n: dict(size=f["size"], sha256=f["sha256"]) for n, f in files.items()}
    about = dict(source="a test", vocab=257, eot=256, files=files)
    shards.write_manifest(folder, **about | changes)
    return files


@pytest.fixture
def data(tmp_path) -> Path:
    """Three train shards and one of validation, with 22 documents in each, and MANIFEST.json."""
    folder = tmp_path / "d"
    folder.mkdir()
    for i in range(3):
        write_shard(folder / f"x_train_00000{i + 1}.bin", text(i))
    write_shard(folder / "x_val_000000.bin", text(3))
    write_manifest(folder)
    return folder


@pytest.fixture
def run(monkeypatch, capsys):
    """Runs it in this process: exit status, stdout, stderr."""

    def run(*argv) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["check.py", *map(str, argv)])
        try:
            status = check.main() or 0
        except SystemExit as stopped:
            status = stopped.code if isinstance(stopped.code, int) else 1
            if isinstance(stopped.code, str):
                print(stopped.code, file=sys.stderr)
        return status, *capsys.readouterr()

    return run


def test_good_shards_and_their_table(data, run):
    status, out, err = run(data)
    assert (status, err) == (0, "")
    first, _, *rows, last = out.splitlines()
    assert first == f"{data}: vocabulary 257, EOT 256, from a test"
    names = [*(f"x_train_00000{i}.bin" for i in (1, 2, 3)), "x_val_000000.bin"]
    assert [row.split() for row in rows] == [[name, "1,100", "22", "50", "ok"] for name in names]
    assert last == "4 shards, 4,400 tokens, 88 documents, nothing wrong"
    (data / "MANIFEST.json").unlink()  # all else is checked without it
    status, out, _ = run(data)
    assert status == 0 and "no MANIFEST.json" in out and out.count(" ok\n") == 4
    os.truncate(data / SECOND, 3222)
    assert run(data)[0] == 1


# ---- Faults --------------------------------------------------------------------------------------
@pytest.mark.parametrize("quick", [[], ["--quick"]])
@pytest.mark.parametrize("change, says", [
    (lambda p: write_shard(p, text(1), magic=0), "is no token shard"),
    (lambda p: write_shard(p, text(1), version=2), "is no token shard"),
    (lambda p: write_shard(p, text(1), count=-5), "its header promises 1014: get it"),
    (lambda p: os.truncate(p, 0), "is no token shard, but 0 bytes"),
    (lambda p: os.truncate(p, 3223), "has 3223 bytes where its header promises 3224"),
    (lambda p: os.truncate(p, 3225), "has 3225 bytes where its"),
    (lambda p: write_shard(p, text()), "has the bytes of x_train_000001.bin"),
    (lambda p: p.unlink(), "is missing: get it again"),
    (lambda p: (p.unlink(), p.mkdir()), "cannot be read: Is a directory: a file belongs there"),
    (lambda p: (p.unlink(), os.mkfifo(p)), "cannot be read: It is a pipe"),
    (lambda p: (p.unlink(), p.symlink_to("/no/disk")), f"{SECOND} is a link to /no/disk, which"),
    (lambda p: write_shard(p, [256, 0] * 1100, count=1100), "has 4 bytes for each token"),
])  # fmt: skip
def test_a_fault_is_named_and_the_rest_is_still_checked(data, run, change, says, quick):
    change(data / SECOND)
    status, out, err = run(data, *quick)
    assert status == 1 and err.count("\n") == 1
    assert re.search(rf"^check.py: {data}/{SECOND} .*{re.escape(says)}", err)
    assert "1 wrong" in out and (quick or says in out and out.count(" ok\n") == 3)


@pytest.mark.parametrize("begins, says", [
    (b"version https://git-lfs.github.com/spec/v1\noid sha256:0", "a Git LFS pointer: type git"),
    (b"<!DOCTYPE html>\n<title>Sign in", "text, <!DOCTYPE html> <title>Sign in: get the file"),
    ("\xe9\u4e2d\u6587".encode() * 300, "text, "),
    (np.array([20240801, 7, 5], "<i4").tobytes(), "one of Llama 3's tokens of 32 bits"),
    (np.array([20240520, 1, 5], ">i4").tobytes(), "one of big-endian numbers"),
    (b"\x93NUMPY\1\0", "a file of NumPy"),
    (b"\x1f\x8b\x08", "packed by gzip, ZIP, bzip2, xz or zstd: unpack"),
    (b"PK\3\4", "packed by gzip, ZIP, bzip2, xz or zstd: unpack"),
    (b"PAR1", "a parquet file: make shards of its text"),
    (bytes(2000), "zeros, which a power cut"),
    (b"", "0 bytes, which hold no header: get it again"),
    (b"\xff" * 900, "900 bytes, which hold no header"),
    (b"\xff\x7f" * 600, "begins with 2147450879 and 2147450879, not with 20240520 and 1: it has"),
])  # fmt: skip
def test_a_file_that_is_no_shard_is_recognized(begins, says):
    assert shards.recognise(begins[:1024]).startswith(says)


@pytest.mark.parametrize("name, says", [
    ("tiny_shakespeare_train.bin", "rename {} to tiny_shakespeare_train_000001.bin, or move it"),
    ("train.bin", "rename {} to d_train_000001.bin"),
    ("train_000007.bin", "rename {} to d_train_000007.bin"),
    ("x_train_000001.npy", "rename {} to x_train_000001.bin"),
    ("data.bin", "rename {} to data_train_000001.bin"),
    ("0007.bin", "rename {} to 0007_train_000007.bin"),
    ("packed_train.bin.gz", "has no train shard, and {} is no token shard, but packed by gzip"),
    ("sub/x_train_000001.bin", "but {d}/sub has: name that folder, or move its files here"),
    ("packed.bin", "has no train shard, and {} is no token shard, but packed by gzip"),
    ("empty.pdf", "has no train shard: data/README.md says how to make some"),
])  # fmt: skip
def test_a_folder_without_a_train_shard_says_what_is_there(tmp_path, run, name, says):
    path = tmp_path / "d" / name
    path.parent.mkdir(parents=True)
    write_shard(path, text())
    if "packed" in name or "empty" in name:
        path.write_bytes(b"\x1f\x8b")
    status, _, err = run(tmp_path / "d")
    assert status == 1 and says.format(name, d=tmp_path / "d") in err


@pytest.mark.parametrize("names, cures", [
    (["train_000007.bin"], "rename {} to x_train_000007.bin, or move it away"),
    (["X-TRAIN-000007.BIN"], "rename {} to x_train_000007.bin"),
    (["x_train_000007 (1).bin"], "rename {} to x_train_000007.bin"),
    (["x_train_000002 (1).bin"], f"remove {{}} if it is a copy of {SECOND}, or give it another"),
    (["x_train_000002 - Copy.bin"], f"remove {{}} if it is a copy of {SECOND}"),
    (["x_train_2.bin"], f"remove {{}} if it is a copy of {SECOND}"),
    (["x_train_000002.bin.1"], f"remove {{}} if it is a copy of {SECOND}"),
    (["x_test_000007.bin"], "rename {} to x_val_000007.bin"),
    (["x_train_0000002.bin"], "remove {} if it is a copy of x_train_000001.bin"),
    (["000007_train.bin"], "rename {} to x_train_000007.bin"),
    (["fineweb10B_7.bin"], "rename {} to x_train_000007.bin"),
    (["x_train_notes.bin"], "move {} away, which is no shard"),
    (["train_5.bin", "train_05.bin"], "rename train_05.bin to x_train_000005.bin, or move it away; "
     "remove train_5.bin if it is a copy of x_train_000005.bin"),
    ([f"train_{i}.bin" for i in range(4, 9)], "x_train_000007.bin, or move it away; and 1 more"),
])  # fmt: skip
def test_a_shard_of_another_name_is_not_ignored(data, run, names, cures):
    for number, name in enumerate(names):
        write_shard(data / name, text(9 + number))
        if "notes" in name:
            (data / name).write_text("of this set")
    status, _, err = run(data)
    assert status == 1 and err.count("\n") == 1 and cures.format(names[0]) in err


def test_a_split_that_is_lacking_gets_the_prefix_of_the_other(data, run):
    (data / "x_val_000000.bin").rename(data / "mine_test_000000.bin")
    (data / "MANIFEST.json").unlink()
    assert "rename mine_test_000000.bin to x_val_000000.bin" in run(data)[2]
    (data / "mine_test_000000.bin").rename(data / "other.bin")
    assert "rename other.bin to x_val_000000.bin" in run(data)[2]


def test_many_shards_are_read_with_few_descriptors(tmp_path, run):
    for number in range(40):
        name = f"x_train_{number:06}.bin" if number else "x_val_000000.bin"
        write_shard(tmp_path / name, text(number))
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)
    lowest = os.dup(0)
    os.close(lowest)
    resource.setrlimit(resource.RLIMIT_NOFILE, (lowest + 30, limit[1]))
    try:
        assert run(tmp_path)[0] == 0
        assert len(shards.tokens(tmp_path, "train")) == 39 * 1100
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limit)


@pytest.mark.parametrize("at", [20, 1024, 3223])  # the first is of a byte that nobody reads
def test_one_changed_bit_is_found_by_the_manifest(data, run, at):
    raw = bytearray((data / SECOND).read_bytes())
    raw[at] ^= 1
    (data / SECOND).write_bytes(raw)
    fault = rf"{SECOND} has sha256 (\w{{64}}), in MANIFEST.json (?!\1)\w{{64}}: get it again\n$"
    assert re.search(fault, run(data)[2])


def test_tokens_are_those_of_the_manifest(data, run):
    write_shard(data / SECOND, [256] * 1099 + [257])
    write_shard(data / "x_train_000003.bin", np.arange(1100) % 97)
    files = write_manifest(data)
    status, _, err = run(data)
    assert status == 1 and err.splitlines() == [
        f"check.py: {data}/{SECOND} has token 257, but a vocabulary of 257",
        f"check.py: {data}/x_train_000003.bin has no token 256, which starts a document",
    ]
    files["x_train_000003.bin"]["documents"] = 0  # as in the midst of a long one
    write_manifest(data, files=files, vocab=258)
    assert run(data)[::2] == (0, "")


@pytest.mark.parametrize("change, says", [
    (lambda d: write_shard(d / "x_train_000004.bin", text(5)), "04.bin is not in MANIFEST.json"),
    (lambda d: ((d / SECOND).unlink(), write_manifest(d)), f"lacks {SECOND}: get it, or rename x_"),
    (lambda d: ((d / "x_val_000000.bin").unlink(), write_manifest(d)), "has no val shard"),
    (lambda d: write_shard(d / "a_val_000000.bin", text(9)), "has shards of several sets, a, x"),
    (lambda d: d.rename(d.with_name("e")), "cannot be read: No such file or directory"),
    (lambda d: ((d / "MANIFEST.json").unlink(), (d / "MANIFEST.json").symlink_to("/no/disk")),
     "MANIFEST.json is a link to /no/disk, which is not there"),
    *((lambda d, t=t: (d / "MANIFEST.json").write_text(t), "has a broken MANIFEST.json: delete it")
      for t in ("{", "[]", '{"source": "x", "vocab": 2, "eot": 1, "files": {"../x_val_000000.bin": '
                 f'{{"size": 1, "sha256": "{0:064}"}}}}}}')),
])  # fmt: skip
def test_folders_in_disorder(data, run, change, says):
    change(data)
    status, _, err = run(data)
    assert status == 1 and err.count("\n") == 1 and says in err


def test_ctrl_c_ends_it_at_once(data, run, monkeypatch):
    monkeypatch.setattr(check, "check", Mock(side_effect=KeyboardInterrupt))
    monkeypatch.setattr(os, "_exit", sys.exit)
    assert run(data)[::2] == (130, "check.py: stopped by Ctrl-C\n")


def test_errors_that_only_some_causes_explain(data, run, monkeypatch):
    """A process may start no thread; a pipe that broke may be another one than stdout."""
    monkeypatch.setattr(shards, "ThreadPoolExecutor", Mock(side_effect=RuntimeError("can't start "
                        "new thread")))  # fmt: skip
    assert run(data)[::2] == (1, "check.py: no new threads: raise ulimit -u\n")
    monkeypatch.setattr(shards, "ThreadPoolExecutor", Mock(side_effect=RuntimeError("other")))
    status, _, error = run(data)
    assert status == 1 and error.startswith("Traceback") and error.endswith("RuntimeError: other\n")
    broken = BrokenPipeError(32, "Broken pipe")
    monkeypatch.setattr(shards, "ThreadPoolExecutor", Mock(side_effect=broken))
    assert run(data)[::2] == (1, "check.py: Broken pipe: check that path\n")


def test_all_folders_beside_the_script_are_checked(data, run, monkeypatch):
    monkeypatch.setattr(check, "HERE", data.parent)
    (data.parent / "empty").mkdir()
    status, out, _ = run()
    assert status == 0 and f"{data}: vocabulary 257" in out and "empty" not in out
    monkeypatch.setattr(check, "HERE", data)
    assert "there are no shards in data/" in run()[2]


def test_a_closed_pipe_ends_it_quietly(data):
    read, write = os.pipe()
    os.close(read)
    done = subprocess.run([sys.executable, DATA / "check.py", data], stdout=write, stderr=-1)
    assert (done.returncode, done.stderr) == (141, b"")


def test_the_check_before_a_run_ends_with_its_verdict_where_nobody_reads(data):
    read, write = os.pipe()
    os.close(read)
    for says in b"", b"0 bytes, which hold no header":
        command = [sys.executable, DATA / "check.py", "--quick", data]
        done = subprocess.run(command, stdout=write, stderr=-1)
        assert done.returncode == bool(says) and says in done.stderr
        os.truncate(data / SECOND, 0)
    assert done.stderr.count(b"\n") == 1


def test_quick_reads_what_is_new_or_changed(data, run, monkeypatch):
    names, inspect = [], shards.inspect
    noted = lambda path, eot: names.append(path.name) or inspect(path, eot)
    monkeypatch.setattr(shards, "inspect", noted)

    def reads(status=0) -> list[str]:
        names.clear()
        assert run(data, "--quick")[0] == status
        return sorted(names)

    everything = sorted(path.name for path in data.glob("*.bin"))
    assert reads() == everything and reads() == []
    line = f"checking {data} ... 4 shards, 4,400 tokens, 88 documents, nothing wrong\n"
    assert run(data, "--quick") == (0, line, "")
    write_manifest(data, eot=96)  # another question about the same bytes
    assert reads() == everything
    (data / SECOND).touch()
    assert reads() == [SECOND]
    saved = (data / shards.STAMP).read_text()
    for old in ('"documents"', "older"), ('_token": 256', '_token": "256"'):  # of another version
        (data / shards.STAMP).write_text(saved.replace(*old))
        assert reads() == everything and (data / shards.STAMP).read_text() == saved
    (data / shards.STAMP).write_text("{")
    with monkeypatch.context() as patch:
        patch.setattr(shards, "write", Mock(side_effect=PermissionError))
        assert reads() == reads() == everything
    files = write_manifest(data)
    reads()
    files[SECOND]["sha256"] = "0" * 64
    write_manifest(data, files=files)
    assert reads(status=1) == [] and f"{SECOND} has sha256" in run(data, "--quick")[2]


def test_a_size_or_a_time_is_enough_to_read_again(data, run):
    path, time = data / SECOND, (data / SECOND).stat().st_mtime_ns
    for tokens, later in ([*text(1), 1], 0), (text(50), 1):
        run(data, "--quick")
        write_shard(path, tokens, count=1101 - later)
        os.utime(path, ns=(time, time + later))
        assert "has sha256" in run(data, "--quick")[2]
