"""What the scripts of data/ share: whole files or none, MANIFEST.json, one process at a time.

The reader of shards and of MANIFEST.json is the one of train_gpt.py.
"""

import contextlib
import fcntl
import hashlib
import json
import os
import pathlib
import shutil
import struct
import tempfile
from collections.abc import Iterable, Iterator

MAGIC, VERSION = 20240520, 1  # llm.c's dev/data/data_common.py


def header(count: int) -> bytes:
    """The first 1024 bytes of a shard of `count` tokens, all numbers little-endian."""
    return struct.pack("<3i1012x", MAGIC, VERSION, count)


def sha256(path: pathlib.Path) -> str:
    """Of all bytes of a file: the one hash of MANIFEST.json, of logs and of check.py."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def write(path: pathlib.Path, parts: Iterable[bytes]) -> dict:
    """Writes a file whole or not at all, also where two processes write at once, and returns its
    size and sha256. `parts` may be anything with a buffer; a numpy array must be contiguous."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".part-{os.getpid()}-{path.name}")
    digest, size = hashlib.sha256(), 0
    try:
        with temporary.open("wb") as file:
            for part in parts:
                digest.update(part)
                size += file.write(part)
            file.flush()
            os.fsync(file.fileno())  # the name must not outlive a power cut without the bytes
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
    return dict(size=size, sha256=digest.hexdigest())


def has_manifest(folder: pathlib.Path, text: bytes) -> bool:
    path = folder / "MANIFEST.json"
    return path.is_file() and path.read_bytes() == text


def manifest(source: str, vocab: int, eot: int, files: dict) -> bytes:
    """MANIFEST.json: where the tokens come from, what they are, and of each file its `size` and
    `sha256`, `revision` if a hub states one, `documents` (starts of) if we counted them."""
    about = dict(source=source, vocab=vocab, eot=eot, files=dict(sorted(files.items())))
    return json.dumps(about, indent=1).encode() + b"\n"


def write_manifest(folder: pathlib.Path, source: str, vocab: int, eot: int, files: dict) -> None:
    """Writes MANIFEST.json, unless it is the same already."""
    if not has_manifest(folder, text := manifest(source, vocab, eot, files)):
        write(folder / "MANIFEST.json", [text])


@contextlib.contextmanager
def workplace(out: pathlib.Path) -> Iterator[pathlib.Path]:
    """A folder inside `out` for what is not finished. One process at a time is at work in `out`, a
    second one waits; what a killed one has left is deleted."""
    out.mkdir(parents=True, exist_ok=True)
    with (out / ".lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            print(f"another process is at work in {out}; waiting for it to end ...", flush=True)
            fcntl.flock(lock, fcntl.LOCK_EX)
        except OSError:  # a file system without locks, where what is left may be in use
            lock = None
        for left in out.glob(".part-*") if lock else ():
            shutil.rmtree(left) if left.is_dir() else left.unlink(missing_ok=True)
        part = pathlib.Path(tempfile.mkdtemp(prefix=".part-", dir=out))
        try:
            yield part
        finally:
            shutil.rmtree(part, ignore_errors=True)
