"""data/check.py and the reader of data/shards.py: on good shards and bad ones."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import check
import numpy as np
import pytest
import shards


def write_shard(path: Path, tokens, magic: int = 20240520, version: int = 1, count=None) -> None:
    header = np.zeros(256, "<i4")
    header[:3] = magic, version, len(tokens) if count is None else count
    path.write_bytes(header.tobytes() + np.asarray(tokens, "<u2").tobytes())


def text(first: int = 0) -> np.ndarray:
    tokens = np.arange(first, first + 1100) % 97
    tokens[::50] = 256
    return tokens


def write_manifest(folder: Path, **changes) -> dict:
    files = {p.name: shards.inspect(p, 256) for p in folder.glob("*.bin")}
    files = {n: dict(size=f["size"], sha256=f["sha256"]) for n, f in files.items()}
    shards.write_manifest(
        folder, **dict(source="a test", vocab=257, eot=256, files=files) | changes
    )
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
        status = 0
        try:
            check.main()
        except SystemExit as stopped:
            status = stopped.code if isinstance(stopped.code, int) else 1
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


def test_without_a_manifest_all_else_is_checked(data, run):
    (data / "MANIFEST.json").unlink()
    status, out, _ = run(data)
    assert status == 0 and "no MANIFEST.json" in out and out.count(" ok\n") == 4
    os.truncate(data / "x_train_000002.bin", 3222)
    assert run(data)[0] == 1


# ---- Faults --------------------------------------------------------------------------------------
SECOND = "x_train_000002.bin"
FAULTS = dict(
    magic=(lambda p: write_shard(p, text(1), magic=0), "is no token shard"),
    version=(lambda p: write_shard(p, text(1), version=2), "is no token shard"),
    negative=(lambda p: write_shard(p, text(1), count=-5), "is no token shard"),
    huge=(lambda p: write_shard(p, text(1), count=2**31 - 1), "has 3224 bytes where its"),
    one_byte_less=(lambda p: os.truncate(p, 3223), "has 3223 bytes where its header promises 3224"),
    empty=(lambda p: os.truncate(p, 0), "is no token shard: 0 bytes"),
    one_byte_more=(lambda p: os.truncate(p, 3225), "has 3225 bytes where its"),
    twin=(lambda p: write_shard(p, text()), "has the bytes of x_train_000001.bin"),
    folder=(lambda p: (p.unlink(), p.mkdir()), "cannot be read: Is a directory"),
    gone=(lambda p: p.unlink(), "cannot be read: No such file or directory"),
)


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("quick", [[], ["--quick"]])
def test_a_fault_is_named_with_its_file_and_the_rest_is_still_checked(data, run, fault, quick):
    change, says = FAULTS[fault]
    change(data / SECOND)
    status, out, err = run(data, *quick)
    assert status == 1 and err.count("\n") == 1
    assert re.search(rf"^check.py: {data}/{SECOND} .*{re.escape(says)}", err)
    assert "1 wrong" in out and (quick or says in out and out.count(" ok\n") == 3)


@pytest.mark.parametrize("at", [20, 1024, 3223])
def test_one_changed_bit_is_found_by_the_manifest(data, run, at):
    """Of a byte that nobody reads, too: the hash is of all bytes."""
    path, old = data / SECOND, shards.inspect(data / SECOND, 256)["sha256"]
    raw = bytearray(path.read_bytes())
    raw[at] ^= 1
    path.write_bytes(raw)
    sha256 = shards.inspect(path, 256)["sha256"]
    expected = f"{path} has sha256 {sha256}, in MANIFEST.json {old}: get it again"
    assert run(data)[::2] == (1, f"check.py: {expected}\n")


def test_tokens_are_those_of_the_manifest(data, run):
    tokens = text(1)
    tokens[700] = 257
    write_shard(data / SECOND, tokens)
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


def rename(folder):
    (folder / SECOND).rename(folder / "x_train_000002 (1).bin")
    (folder / "MANIFEST.json").unlink()


def unlist(folder):
    files = write_manifest(folder)
    write_manifest(folder, files={name: files[name] for name in files if name != SECOND})


def gap(folder):
    (folder / SECOND).unlink()
    write_manifest(folder)


def one_split(folder):
    (folder / "x_val_000000.bin").unlink()
    write_manifest(folder)


@pytest.mark.parametrize("change, says", [
    (rename, f"lacks {SECOND}, in whose place stands x_train_000002 (1).bin"),
    (unlist, f"{SECOND} is not in MANIFEST.json"),
    (gap, f"lacks {SECOND}, in whose place stands x_train_000003.bin"),
    (one_split, "has no val shard"),
    (lambda d: write_shard(d / "a_val_000000.bin", text(9)), "has shards of several sets, a, x"),
    (lambda d: d.rename(d.with_name("e")), "cannot be read: No such file or directory"),
    *((lambda d, t=t: (d / "MANIFEST.json").write_text(t), "has a broken MANIFEST.json: delete it")
      for t in ("{", "[]", '{"source": "x", "vocab": 2, "eot": 1, "files": {"../a": {}}}')),
])  # fmt: skip
def test_folders_in_disorder(data, run, change, says):
    change(data)
    status, _, err = run(data)
    assert status == 1 and err.count("\n") == 1 and says in err


def test_ctrl_c_ends_it_at_once(data, run, monkeypatch):
    def interrupt(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(check, "check", interrupt)
    monkeypatch.setattr(os, "_exit", sys.exit)
    status, _, err = run(data)
    assert status == 130 and err.startswith("check.py: stopped by Ctrl-C\n")


def test_all_folders_beside_the_script_are_checked(data, run, monkeypatch):
    monkeypatch.setattr(check, "HERE", data.parent)
    (data.parent / "empty").mkdir()
    status, out, _ = run()
    assert status == 0 and f"{data}: vocabulary 257" in out and "empty" not in out
    monkeypatch.setattr(check, "HERE", data)
    status, _, err = run()
    assert status == 1 and "there are no shards in data/" in err


def test_as_a_process_it_needs_no_jax(data):
    """And checks without asserts, which python -O leaves out."""
    code = "import sys, runpy; sys.modules['jax'] = None; sys.argv[:1] = []\n"
    code += "sys.path[0] = sys.argv[0].rpartition('/')[0]\n"
    code += "runpy.run_path(sys.argv[0], run_name='__main__')"
    command = [sys.executable, "-O", "-c", code, check.__file__, data]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")
    os.truncate(data / "x_val_000000.bin", 3000)
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1 and "x_val_000000.bin has 3000 bytes" in done.stderr


# ---- What was read before ------------------------------------------------------------------------
@pytest.fixture
def reads(monkeypatch) -> list[str]:
    """The names of the files that are read."""
    names, inspect = [], shards.inspect
    noted = lambda path, eot: names.append(path.name) or inspect(path, eot)  # noqa: E731
    monkeypatch.setattr(shards, "inspect", noted)
    return names


def test_quick_reads_what_is_new_or_changed(data, run, reads):
    line = f"checking {data} ... 4 shards, 4,400 tokens, 88 documents, nothing wrong\n"
    assert run(data, "--quick") == (0, line, "") and len(reads) == 4
    reads.clear()
    assert run(data, "--quick") == (0, line, "") and reads == []
    assert run(data)[0] == 0 and len(reads) == 4  # without the flag, every byte
    write_manifest(data, eot=96)  # another question about the same bytes
    reads.clear()
    assert run(data, "--quick")[0] == 0 and len(reads) == 4
    reads.clear()
    (data / SECOND).touch()
    assert run(data, "--quick")[0] == 0 and reads == [SECOND]


def test_quick_compares_what_it_knows_with_the_manifest(data, run, reads):
    assert run(data, "--quick")[0] == 0
    files = json.loads((data / "MANIFEST.json").read_text())["files"]
    files[SECOND]["sha256"] = "0" * 64
    write_manifest(data, files=files)
    reads.clear()
    status, _, err = run(data, "--quick")
    assert status == 1 and reads == [] and f"{SECOND} has sha256" in err


def test_a_size_or_a_time_is_enough_to_read_again(data, run):
    assert run(data, "--quick")[0] == 0
    path, before = data / SECOND, (data / SECOND).stat()
    path.write_bytes(path.read_bytes() + b"xx")
    os.utime(path, ns=(before.st_mtime_ns, before.st_mtime_ns))
    assert "has 3226 bytes" in run(data, "--quick")[2]
    write_shard(path, text(50))
    os.utime(path, ns=(before.st_mtime_ns, before.st_mtime_ns + 1))
    assert "has sha256" in run(data, "--quick")[2]


def test_a_folder_that_cannot_be_stamped_and_a_broken_stamp(data, run, reads, monkeypatch):
    (data / shards.STAMP).write_text("{")
    write = shards.write

    def refuses(path, parts):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(shards, "write", refuses)
    assert run(data, "--quick")[0] == 0 and run(data, "--quick")[0] == 0 and len(reads) == 8
    monkeypatch.setattr(shards, "write", write)
    assert run(data, "--quick")[0] == 0 and run(data, "--quick")[0] == 0 and len(reads) == 12
