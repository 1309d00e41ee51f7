"""What the scripts of data/ share: shards and folders of them, read, checked and written."""

import contextlib
import fcntl
import hashlib
import json
import os
import pathlib
import re
import shutil
import struct
import tempfile
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import numpy as np

MAGIC, VERSION = 20240520, 1  # llm.c's dev/data/data_common.py
HEADER = 1024  # bytes
GPT2 = dict(vocab=50257, eot=50256)
STAMP = ".checked.json"


class Fault(Exception):
    """What is wrong with a file or a folder: words that go on after its name."""


def coder(vocab: int, eot: int) -> SimpleNamespace:
    """encode(text) -> tokens, piece(token) -> bytes. Bytes of UTF-8 for `tiny`, else GPT-2's."""
    if (vocab, eot) == (257, 256):
        encode = lambda text: [*text.encode("utf-8", "surrogateescape")]
        return SimpleNamespace(encode=encode, piece=lambda token: bytes([token]))
    if (vocab, eot) != (GPT2["vocab"], GPT2["eot"]):
        raise Fault(f"there is a tokenizer for bytes and for GPT-2's tokens, none for {vocab}")
    of = gpt2()
    return SimpleNamespace(encode=of.encode_ordinary, piece=of.decode_single_token_bytes)


def gpt2() -> Any:
    """tiktoken's encoding; raises Fault if it, or the vocabulary, is not there."""
    try:
        import tiktoken

        return tiktoken.get_encoding("gpt2")
    except Exception as error:  # of the network, of the cache, of files that are not the right ones
        get = "TIKTOKEN_CACHE_DIR=gpt2 python -c 'import tiktoken; tiktoken.get_encoding(\"gpt2\")'"
        raise Fault(
            f"tiktoken cannot load GPT-2's vocabulary ({type(error).__name__}): where there is a "
            f"network, run {get}, copy the folder gpt2 here and set TIKTOKEN_CACHE_DIR to it"
        ) from None


# ---- Reading -------------------------------------------------------------------------------------
def inspect(path: pathlib.Path, eot: int | None) -> dict[str, Any]:
    """What one pass over every byte of a shard finds; raises Fault if it is none, or OSError."""
    with path.open("rb") as file:
        status, header = os.fstat(file.fileno()), file.read(HEADER)
        if len(header) < HEADER:
            raise Fault(f"is no token shard: {len(header)} bytes hold no header")
        magic, version, count = struct.unpack_from("<3i", header)
        if (magic, version) != (MAGIC, VERSION) or count <= 0:
            found = f"magic {magic}, version {version}, {count} tokens"
            raise Fault(f"is no token shard (llm.c's {MAGIC}, version 1): its header: {found}")
        promised = HEADER + 2 * count
        if status.st_size != promised:
            raise Fault(f"has {status.st_size} bytes where its header promises {promised}")
        digest = hashlib.sha256(header)
        largest = 0
        documents = 0
        while True:
            piece = file.read(2**23)
            if not piece:
                break
            digest.update(piece)
            tokens = np.frombuffer(piece, "<u2")
            largest = max(largest, int(tokens.max()))
            documents += int(np.count_nonzero(tokens == eot))  # none equals None
    return dict(size=status.st_size, mtime_ns=status.st_mtime_ns, eot=eot, tokens=count,
                sha256=digest.hexdigest(), documents=documents, largest_token=largest)  # fmt: skip


def read_stamp(folder: pathlib.Path) -> dict[str, dict]:
    """What inspect has found in the files of a folder, as far as was noted."""
    try:
        return json.loads((folder / STAMP).read_bytes())
    except (OSError, ValueError):
        return {}


def stamp(folder: pathlib.Path, found: dict[str, dict]) -> None:
    """Notes what inspect has found, so that unchanged files need not be read again."""
    before = read_stamp(folder)
    now = before | found
    if before != now:
        with contextlib.suppress(OSError):  # a read-only folder is read every time
            write(folder / STAMP, [json.dumps(now, indent=1).encode()])


def examine(
    folder: pathlib.Path, names: Iterable[str], eot: int | None, quick: bool = True
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Of each file its name and what inspect finds, or {"fault": what is wrong}. If `quick`, a file
    of the size and the time of change that are in the folder's stamp is not read."""
    stamped = read_stamp(folder) if quick else {}

    def look(name: str) -> dict[str, Any]:
        try:
            status, known = (folder / name).stat(), stamped.get(name, {})
            now = dict(size=status.st_size, mtime_ns=status.st_mtime_ns, eot=eot)
            return known if known and known == known | now else inspect(folder / name, eot)
        except OSError as error:
            return dict(fault=f"cannot be read: {error.strerror}")
        except Fault as fault:
            return dict(fault=f"{fault}: get it again")

    pool, whole, names = ThreadPoolExecutor(), {}, list(names)  # no `with`: Ctrl-C would wait
    for name, found in zip(names, pool.map(look, names), strict=True):
        if "fault" not in found:
            whole[name] = found
        yield name, found
    stamp(folder, whole)


def tokens(folder: pathlib.Path, split: str) -> np.ndarray:
    """All tokens of a folder's *_train_*.bin or *_val_*.bin shards, in order, (N,) of uint16: those
    of several are copied, 200 MB a shard of FineWeb. Raises Fault."""
    arrays = []
    for path in sorted(folder.glob(f"[!.]*_{split}_*.bin")):
        magic, version, count = [*np.fromfile(path, "<i4", 3).tolist(), 0, 0, 0][:3]
        if (magic, version, path.stat().st_size) != (MAGIC, VERSION, HEADER + 2 * max(1, count)):
            raise Fault(f"{path.name} is no whole shard of tokens: python data/check.py {folder}")
        arrays.append(np.memmap(path, "<u2", "r", offset=HEADER, shape=(count,)))
    if not arrays:
        raise Fault(f"has no {split} shard: data/README.md says how to make some")
    return arrays[0] if len(arrays) == 1 else np.concatenate(arrays)


# ---- Folders -------------------------------------------------------------------------------------
def read_manifest(folder: pathlib.Path) -> dict[str, Any]:
    """MANIFEST.json; {} where there is none."""
    try:
        about = json.loads((folder / "MANIFEST.json").read_bytes())
        ours = type(about["vocab"]) is type(about["eot"]) is int and type(about["source"]) is str
        for name, file in about["files"].items():
            whole = re.fullmatch("[0-9a-f]{64}", file["sha256"]) and type(file["size"]) is int
            ours = ours and whole and pathlib.Path(name).name == name
    except FileNotFoundError:
        return {}
    except OSError:
        raise
    except Exception:  # it may hold anything
        ours = False
    if not ours:
        raise Fault("has a broken MANIFEST.json: delete it and get the data again")
    return about


def read_folder(folder: pathlib.Path) -> tuple[dict[str, Any], list[str]]:
    """MANIFEST.json, and the names of the shards that it lists or that are there, validation last:
    of one set, numbered without a gap."""
    try:
        there, about = [path.name for path in folder.iterdir()], read_manifest(folder)
    except OSError as error:
        raise Fault(f"cannot be read: {error.strerror}") from None
    names = sorted({*there, *about.get("files", ())})
    found = [re.fullmatch(r"([^.].*)_(train|val)_[^_]*[.]bin", name) for name in names]
    sets = sorted({shard[1] for shard in found if shard})
    if len(sets) > 1:
        raise Fault(f"has shards of several sets, {', '.join(sets)}: give each its own folder")
    ordered = []
    for split in ("train", "val"):
        row = [shard[0] for shard in found if shard and shard[2] == split]
        if not row:
            raise Fault(f"has no {split} shard: data/README.md says how to make some")
        first = 0 if row[0].endswith("_000000.bin") else 1
        for number, name in enumerate(row, first):
            expected = f"{sets[0]}_{split}_{number:06}.bin"
            if name != expected:
                raise Fault(f"lacks {expected}, in whose place stands {name}: get it again")
        ordered += row
    return about, ordered


def check(
    folder: pathlib.Path, about: dict[str, Any], names: list[str], quick: bool = False
) -> Iterator[tuple[str, dict[str, Any], str | None]]:
    """Of each shard that read_folder has found its name, what is in it, and what is wrong with it.
    Without a manifest, the vocabulary is left to train_gpt.py, which is told it."""
    twins = {}
    for name, found in examine(folder, names, about.get("eot"), quick):
        listed, fault = about["files"].get(name) if about else {}, found.get("fault")
        if fault is None:
            twin = twins.setdefault(found["sha256"], name)
            if twin != name:
                fault = f"has the bytes of {twin}: get it again"
            elif listed is None:
                fault = "is not in MANIFEST.json: it is of another set, or get the set again"
            elif listed and listed["sha256"] != found["sha256"]:
                stated = f"in MANIFEST.json {listed['sha256']}"
                fault = f"has sha256 {found['sha256']}, {stated}: get it again"
            elif about and found["largest_token"] >= about["vocab"]:
                fault = f"has token {found['largest_token']}, but a vocabulary of {about['vocab']}"
            elif about and not found["documents"] and listed.get("documents") != 0:
                fault = f"has no token {about['eot']}, which starts a document"
        yield name, found, fault


# ---- Writing -------------------------------------------------------------------------------------
def header(count: int) -> bytes:
    """The first 1024 bytes of a shard of `count` tokens, all numbers little-endian."""
    return struct.pack("<3i1012x", MAGIC, VERSION, count)


def write(path: pathlib.Path, parts: Iterable[bytes]) -> dict[str, Any]:
    """Writes a file whole or not at all, also where two processes write at once, and returns its
    size and sha256. `parts` may be anything with a buffer; a numpy array must be contiguous."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{os.getpid()}-{path.name}")  # not .part-, see workplace
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


def write_manifest(folder: pathlib.Path, source: str, vocab: int, eot: int, files: dict) -> None:
    """MANIFEST.json: where the tokens come from, what they are, and of each file its `size` and
    `sha256`, `revision` if a hub states one, `documents` (starts of) if we counted them. It is not
    written if it is the same already: the folder may be read-only."""
    about = dict(source=source, vocab=vocab, eot=eot, files=dict(sorted(files.items())))
    text, path = json.dumps(about, indent=1).encode() + b"\n", folder / "MANIFEST.json"
    if not path.is_file() or path.read_bytes() != text:
        write(path, [text])


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
            shutil.rmtree(left, ignore_errors=True)
        part = pathlib.Path(tempfile.mkdtemp(prefix=".part-", dir=out))
        try:
            yield part
        finally:
            shutil.rmtree(part, ignore_errors=True)
