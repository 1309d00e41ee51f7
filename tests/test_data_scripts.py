"""The scripts of data/: the text is the committed one, files are whole, a failure is one line."""

import contextlib
import errno
import fcntl
import hashlib
import os
import pathlib
import re
import shutil
import subprocess
import sys
from unittest.mock import Mock

import cached_fineweb10B
import check
import numpy as np
import pytest
import shards as shards_py
import source_code
import tiktoken
from requests.exceptions import InvalidSchema, SSLError

DATA = pathlib.Path(source_code.__file__).parent


def run(module, monkeypatch, *argv):
    monkeypatch.setattr(sys, "argv", [module.__name__, *map(str, argv)])
    module.main()


# ---- source_code.py ------------------------------------------------------------------------------
@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """Made by two processes at once, as on a machine where two runs start together."""
    out = tmp_path_factory.mktemp("source_code")
    command = [sys.executable, DATA / "source_code.py", "--out", out]
    both = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    printed = [process.communicate(timeout=300)[0] for process in both]
    assert [process.returncode for process in both] == [0, 0]
    return out, printed


@pytest.fixture(scope="module")
def shards(built):
    return [np.fromfile(built[0] / name, "<u2", offset=1024) for name in source_code.SHARDS]


def documents(tokens):
    starts = np.flatnonzero(tokens == source_code.EOT)
    return [part[1:].astype(np.uint8).tobytes() for part in np.split(tokens, starts)[1:]]


def test_shards_are_the_committed_ones(built):
    out, printed = built
    assert {path.name for path in out.glob("[!.]*")} == {*source_code.SHARDS, "MANIFEST.json"}
    for name, expected in source_code.SHARDS.items():
        assert hashlib.sha256((out / name).read_bytes()).hexdigest() == expected
    assert any(all(sha in text for sha in source_code.SHARDS.values()) for text in printed)
    about, names = shards_py.read_folder(built[0])
    assert (about["vocab"], about["eot"]) == (257, 256) and about["files"].keys() == set(names)
    assert [fault for *_, fault in shards_py.check(built[0], about, names)] == [None] * 3


def test_a_folder_that_cannot_be_written_is_one_line(tmp_path, monkeypatch, capsys):
    (tmp_path / "file").touch()
    monkeypatch.setattr(source_code, "SHARDS", {})  # so that nothing is built
    with pytest.raises(SystemExit, match="1"):
        run(source_code, monkeypatch, "--out", tmp_path / "file" / "out")
    line = "source_code.py: .*/file is a file, but a folder .*\n"
    assert re.fullmatch(line, capsys.readouterr().err)


def test_there_is_enough_of_it(shards):
    first, second, val = shards
    used = 500 * 8 * 256  # by a record: it crosses to the second shard, and no epoch ends
    assert len(first) + 8 * 256 < used < len(first) + len(second) - 8 * 256
    assert len(val) >= 131_073  # what the evaluation reads, and one token more for the last target


def test_no_document_stands_twice_and_no_validation_file_is_in_training(shards):
    first, second, val = map(documents, shards)
    assert len({*first, *second, *val}) == len(first + second + val)
    val_files = source_code.held_out(files := source_code.read_files())
    assert 0.08 < len(val_files) / len(files) < 0.1
    train = set(first + second)
    assert not any(train & set(source_code.documents(files[path])) for path in val_files)


def test_second_run_does_nothing_but_make_a_broken_shard_anew(built, monkeypatch):
    out, _ = built
    run(source_code, monkeypatch, "--out", out)
    before = {path: path.stat().st_mtime_ns for path in out.iterdir()}
    with monkeypatch.context() as patch:
        patch.setattr(source_code, "build", lambda: pytest.fail("built again"))
        patch.setattr(shards_py, "inspect", lambda *_: pytest.fail("read again"))
        run(source_code, monkeypatch, "--out", out)
    assert {path: path.stat().st_mtime_ns for path in out.iterdir()} == before
    path = out / "source_val_000000.bin"
    path.write_bytes(path.read_bytes()[:-2] + b"\0\0")
    run(source_code, monkeypatch, "--out", out)
    assert hashlib.sha256(path.read_bytes()).hexdigest() == source_code.SHARDS[path.name]


REMEDY = "install .*--force-reinstall --no-deps optax==0.2.8 huggingface_hub==2.4.0"


def test_other_or_missing_text_is_refused_and_nothing_written(tmp_path, monkeypatch):
    changed = source_code.read_files() | {"optax/extra.py": b"def extra(): pass\n"}
    with monkeypatch.context() as patch, pytest.raises(SystemExit, match=REMEDY):
        patch.setattr(source_code, "read_files", lambda: changed)
        run(source_code, monkeypatch, "--out", tmp_path / "out")
    monkeypatch.setattr(source_code.importlib.util, "find_spec", lambda package: None)
    with pytest.raises(SystemExit, match=f"optax is missing: run .* {REMEDY}"):
        run(source_code, monkeypatch, "--out", tmp_path / "out")
    assert not (tmp_path / "out").exists()


# ---- shards.py -----------------------------------------------------------------------------------
def test_what_a_killed_process_left_is_deleted(tmp_path):
    (tmp_path / ".part-dead" / "full").mkdir(parents=True)
    with shards_py.workplace(tmp_path) as part:
        (part / "y.bin").touch()
        assert list(tmp_path.glob(".part-*")) == [part]
    assert list(tmp_path.iterdir()) == []


def test_a_folder_made_for_work_that_failed_is_deleted(tmp_path, monkeypatch, capsys):
    """Not one that was there. Who waited for its lock begins anew."""
    for out in tmp_path / "a/b", tmp_path:
        with contextlib.suppress(ZeroDivisionError), shards_py.workplace(out):
            assert (out / ".lock").exists() and 1 / 0
        assert list(tmp_path.iterdir()) == []

    waits = iter([BlockingIOError, None, None])

    def wait(file, how):
        if next(waits) is BlockingIOError:
            raise BlockingIOError
        if how == fcntl.LOCK_EX:
            shutil.rmtree(tmp_path / "c")  # its owner has failed

    monkeypatch.setattr(shards_py.fcntl, "flock", wait)
    with shards_py.workplace(tmp_path / "c") as part:
        assert part.is_dir() and (tmp_path / "c/.lock").exists()
    assert capsys.readouterr().out.count("\n") == 1 and next(waits, "used") == "used"


@pytest.mark.parametrize("number, where, says", [
    (errno.ENOSPC, None, "No space left on device: make room, or choose another disk"),
    (errno.EDQUOT, "x/y", "x/y: Disk quota exceeded: make room"),
    (errno.ESTALE, "x/y", "x/y: Stale file handle: choose another disk, or mount that one again"),
    (errno.EMFILE, "x/y", "x/y: Too many open files: allow more open files: ulimit -n 4096"),
    (errno.EACCES, "x/y", "x/y: Permission denied: check the permissions"),
    (errno.EEXIST, "LINK", "LINK is a link to /no/disk, which is not there"),
    (errno.ENOENT, "LINK/y/z", "LINK is a link to /no/disk, which is not there"),
    (errno.ENOTDIR, "FILE/y/z", "FILE is a file, but a folder belongs there"),
])  # fmt: skip
def test_errors_of_the_system_have_a_place_and_a_cure(tmp_path, monkeypatch, number, where, says):
    monkeypatch.chdir(tmp_path)
    pathlib.Path("LINK").symlink_to("/no/disk")
    pathlib.Path("FILE").touch()
    assert shards_py.reason(OSError(number, os.strerror(number), where)).startswith(says)


GET = "TIKTOKEN_CACHE_DIR=gpt2 .venv/bin/python -c "


@pytest.mark.parametrize("error, variables, says", [
    (ModuleNotFoundError("No module named 'tiktoken'"), {}, "'tiktoken': run ./run.sh install"),
    (PermissionError(13, "Permission denied", "x/9b5a"), {}, "TIKTOKEN_CACHE_DIR: x/9b5a: Perm"),
    (InvalidSchema("Missing dependencies for SOCKS support."), {}, "SOCKS support: type .* pysock"),
    (OSError("invalid path: /no.pem"), {"REQUESTS_CA_BUNDLE": "/no.pem"}, "REQUESTS_CA_BUNDLE nam"),
    (OSError("invalid path: /no.pem"), {"CURL_CA_BUNDLE": __file__}, "CURL_CA_BUNDLE names "),
    (ValueError("Hash mismatch for data."), {}, f"Hash mismatch for data: check the net.*{GET}"),
    (ConnectionError("Max retries"), {}, f"Name or service not known: check the network.*{GET}"),
    (SSLError("bad"), {"TIKTOKEN_CACHE_DIR": "g"}, "and TIKTOKEN_CACHE_DIR, g, has no right"),
])  # fmt: skip
def test_why_there_is_no_vocabulary(monkeypatch, error, variables, says):
    for variable in ("TIKTOKEN_CACHE_DIR", "REQUESTS_CA_BUNDLE"):
        monkeypatch.delenv(variable, raising=False)
    for variable, value in variables.items():
        monkeypatch.setenv(variable, value)
    if isinstance(error, (ConnectionError, SSLError)):
        error.__context__ = ValueError("Retry")
        error.__context__.__cause__ = OSError("Name or service not known")
    monkeypatch.setattr(tiktoken, "get_encoding", Mock(side_effect=error))
    with pytest.raises(shards_py.Fault, match=f"load GPT-2's vocabulary .*{says}"):
        shards_py.gpt2()


@pytest.mark.parametrize("variable, value, says", [
    ("SSL_CERT_FILE", "good", "names {}/good, which has no .*Is a directory.*: correct it"),
    ("SSL_CERT_FILE", "no.pem", "No such file"),
    ("SSL_CERT_DIR", "good", ""),
    ("SSL_CERT_DIR", "no:{}/good", ""),
    ("SSL_CERT_DIR", "no:{}/empty", "no file there has the name of a hash"),
    ("REQUESTS_CA_BUNDLE", "good", ""),
    ("CURL_CA_BUNDLE", "empty", "CURL_CA_BUNDLE names {}/empty, .*the name of a hash"),
    ("CURL_CA_BUNDLE", "file", "no certificate"),
])  # fmt: skip
def test_certificates_that_a_variable_names(tmp_path, monkeypatch, variable, value, says):
    for folder in ("good", "empty"):
        (tmp_path / folder).mkdir()
    (tmp_path / "good" / "0a1b2c3d.0").touch()
    (tmp_path / "file").touch()
    monkeypatch.setenv(variable, f"{tmp_path}/{value}".format(tmp_path))
    found = shards_py.certificate_fault(variable)
    assert re.search(says.format(tmp_path), found) if says else found == ""


@pytest.mark.parametrize("module", [source_code, cached_fineweb10B, check])
def test_a_folder_without_a_name_is_refused_and_a_home_is_found(module, monkeypatch, capsys):
    with pytest.raises(SystemExit, match="2"):
        run(module, monkeypatch, *["--out"] * (module is not check), "")
    assert "the name of the folder is empty" in capsys.readouterr().err
    monkeypatch.setenv("HOME", "/home/x")
    assert shards_py.folder_name("~/d") == pathlib.Path("/home/x/d")


def test_a_file_is_written_whole_or_not_at_all(tmp_path, monkeypatch):
    path = tmp_path / "new" / "a.bin"
    with pytest.raises(ZeroDivisionError):
        shards_py.write(path, (bytes(1 // i) for i in (1, 0)))
    assert list(path.parent.iterdir()) == []
    parts = [shards_py.header(3), np.arange(3, dtype="<u2")]
    raw = np.array([20240520, 1, 3] + [0] * 253, "<i4").tobytes() + b"\0\0\1\0\2\0"
    assert shards_py.write(path, parts) == dict(size=1030, sha256=hashlib.sha256(raw).hexdigest())
    assert path.read_bytes() == raw and list(path.parent.iterdir()) == [path]
    found = dict(tokens=3, documents=1, largest_token=2, sha256=hashlib.sha256(raw).hexdigest())
    assert shards_py.inspect(path, 2).items() > found.items()
    monkeypatch.setattr(os, "replace", Mock(side_effect=KeyboardInterrupt))  # at the last moment
    with pytest.raises(KeyboardInterrupt):
        shards_py.write(path, [b"other"])
    assert path.read_bytes() == raw and list(path.parent.iterdir()) == [path]
