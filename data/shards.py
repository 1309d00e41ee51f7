"""What the scripts of data/ share: reading, checking and writing shards and folders of shards."""

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
    """What is wrong with a file or a folder. The text continues a sentence that begins with its
    name."""


def coder(vocab: int, eot: int) -> SimpleNamespace:
    """encode(text) -> tokens, and piece(token) -> bytes: of UTF-8 bytes (vocab 257, as `tiny` has)
    or of GPT-2's tokens. Raises Fault for any other vocabulary."""
    if (vocab, eot) == (257, 256):
        encode = lambda text: [*text.encode("utf-8", "surrogateescape")]
        return SimpleNamespace(encode=encode, piece=lambda token: bytes([token]))
    if (vocab, eot) != (GPT2["vocab"], GPT2["eot"]):
        raise Fault(f"there is a tokenizer for bytes and for GPT-2's tokens, none for {vocab}")
    bpe = gpt2()
    return SimpleNamespace(encode=bpe.encode_ordinary, piece=bpe.decode_single_token_bytes)


def gpt2() -> Any:
    """tiktoken's GPT-2 encoding; raises Fault if tiktoken or its vocabulary is missing."""
    try:
        import tiktoken

        return tiktoken.get_encoding("gpt2")
    except Exception as error:  # from the network, the cache, or a file with another hash
        get = "TIKTOKEN_CACHE_DIR=gpt2 .venv/bin/python -c "
        get += "'import tiktoken; tiktoken.get_encoding(\"gpt2\")'"
        raise Fault(
            f"tiktoken cannot load GPT-2's vocabulary ({type(error).__name__}): where there is a "
            f"network, run {get}, copy the folder gpt2 here and set TIKTOKEN_CACHE_DIR to it"
        ) from None


# ---- Reading -------------------------------------------------------------------------------------
def inspect(path: pathlib.Path, eot: int | None) -> dict[str, Any]:
    """Reads every byte of a shard and returns the facts that the last line lists. Without `eot`,
    `documents` is 0. Raises Fault if the file is no shard, OSError if it cannot be read."""
    with path.open("rb") as file:
        status = os.fstat(file.fileno())
        header = file.read(HEADER)
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
            if eot is not None:
                documents += int(np.count_nonzero(tokens == eot))
    return dict(size=status.st_size, mtime_ns=status.st_mtime_ns, eot=eot, tokens=count,
                sha256=digest.hexdigest(), documents=documents, largest_token=largest)  # fmt: skip


def read_stamp(folder: pathlib.Path) -> dict[str, dict]:
    """What inspect() found in a folder's files when it read them last: {} if nothing was saved."""
    try:
        return json.loads((folder / STAMP).read_bytes())
    except (OSError, ValueError):
        return {}


def stamp(folder: pathlib.Path, found: dict[str, dict]) -> None:
    """Saves what inspect() found, so that unchanged files need not be read again."""
    old = read_stamp(folder)
    new = old | found
    if new != old:
        with contextlib.suppress(OSError):  # files of a read-only folder are read every time
            write(folder / STAMP, [json.dumps(new, indent=1).encode()])


def examine(
    folder: pathlib.Path, names: Iterable[str], eot: int | None, quick: bool = True
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yields each file's name and what inspect() finds, or {"fault": what is wrong}. With `quick`,
    it does not read files whose size and time of change are those in the folder's stamp."""
    stamped = read_stamp(folder) if quick else {}

    def look(name: str) -> dict[str, Any]:
        try:
            status = (folder / name).stat()
            current = dict(size=status.st_size, mtime_ns=status.st_mtime_ns, eot=eot)
            known = stamped.get(name, {})
            if current.items() <= known.items():
                return known
            return inspect(folder / name, eot)
        except OSError as error:
            return dict(fault=f"cannot be read: {error.strerror}")
        except Fault as fault:
            return dict(fault=f"{fault}: get it again")

    pool = ThreadPoolExecutor()  # without `with`, where Ctrl-C would wait for all threads
    names = list(names)
    good = {}
    for name, found in zip(names, pool.map(look, names), strict=True):
        if "fault" not in found:
            good[name] = found
        yield name, found
    stamp(folder, good)


def tokens(folder: pathlib.Path, split: str) -> np.ndarray:
    """All tokens of a folder's *_train_*.bin or *_val_*.bin shards in order, (N,) of uint16. One
    shard is mapped; several are copied into memory, 200 MB for each shard of FineWeb. Raises
    Fault."""
    arrays = []
    for path in sorted(folder.glob(f"[!.]*_{split}_*.bin")):
        header = np.fromfile(path, "<i4", 3).tolist()
        count = header[2] if len(header) == 3 and header[:2] == [MAGIC, VERSION] else 0
        if count < 1 or path.stat().st_size != HEADER + 2 * count:
            raise Fault(f"{path.name} is no whole shard of tokens: python data/check.py {folder}")
        arrays.append(np.memmap(path, "<u2", "r", offset=HEADER, shape=(count,)))
    if not arrays:
        raise Fault(f"has no {split} shard: data/README.md says how to make some")
    return arrays[0] if len(arrays) == 1 else np.concatenate(arrays)


# ---- Folders -------------------------------------------------------------------------------------
def read_manifest(folder: pathlib.Path) -> dict[str, Any]:
    """MANIFEST.json, or {} if there is none. Raises Fault if it is broken, OSError if it cannot be
    read."""
    try:
        content = (folder / "MANIFEST.json").read_bytes()
    except FileNotFoundError:
        return {}
    try:
        about = json.loads(content)
        checks = [type(about["vocab"]) is int, type(about["eot"]) is int]
        checks.append(type(about["source"]) is str)
        for name, file in about["files"].items():
            checks.append(pathlib.Path(name).name == name)  # a path could lead out of the folder
            checks.append(type(file["size"]) is int)
            checks.append(re.fullmatch("[0-9a-f]{64}", file["sha256"]))
    except Exception:  # the file may hold anything
        checks = [False]
    if not all(checks):
        raise Fault("has a broken MANIFEST.json: delete it and get the data again")
    return about


def read_folder(folder: pathlib.Path) -> tuple[dict[str, Any], list[str]]:
    """MANIFEST.json, and the names of the shards that it lists or that are in the folder, train
    before validation. Raises Fault unless they are one set, numbered without a gap."""
    try:
        present = [path.name for path in folder.iterdir()]
        about = read_manifest(folder)
    except OSError as error:
        raise Fault(f"cannot be read: {error.strerror}") from None
    prefixes = set()
    shards = {"train": [], "val": []}
    for name in sorted({*present, *about.get("files", ())}):
        match = re.fullmatch(r"([^.].*)_(train|val)_[^_]*[.]bin", name)
        if match:
            prefix, split = match.groups()
            prefixes.add(prefix)
            shards[split].append(name)
    if len(prefixes) > 1:
        sets = ", ".join(sorted(prefixes))
        raise Fault(f"has shards of several sets, {sets}: give each its own folder")
    prefix = "".join(prefixes)  # the only one
    for split, names in shards.items():
        if not names:
            raise Fault(f"has no {split} shard: data/README.md says how to make some")
        first = 0 if names[0].endswith("_000000.bin") else 1
        for number, name in enumerate(names, first):
            expected = f"{prefix}_{split}_{number:06}.bin"
            if name != expected:
                raise Fault(f"lacks {expected}, the next file is {name}: get it again")
    return about, shards["train"] + shards["val"]


def check(
    folder: pathlib.Path, about: dict[str, Any], names: list[str], quick: bool = False
) -> Iterator[tuple[str, dict[str, Any], str | None]]:
    """Yields for each shard of read_folder() its name, what examine() found, and what is wrong with
    it, or None. Without a manifest, only train_gpt.py knows and checks the vocabulary."""
    first_names = {}  # by sha256, to find copies
    for name, found in examine(folder, names, about.get("eot"), quick):
        fault = found.get("fault")
        if fault is None:
            first_name = first_names.setdefault(found["sha256"], name)
            if first_name != name:
                fault = f"has the bytes of {first_name}: get it again"
            elif about:
                fault = compare(name, found, about)
        yield name, found, fault


def compare(name: str, found: dict[str, Any], about: dict[str, Any]) -> str | None:
    """What is wrong with a shard according to MANIFEST.json, or None."""
    listed = about["files"].get(name)
    if listed is None:
        return "is not in MANIFEST.json: remove it if it is of another set, or get the set again"
    if listed["sha256"] != found["sha256"]:
        stated = f"in MANIFEST.json {listed['sha256']}"
        return f"has sha256 {found['sha256']}, {stated}: get it again"
    if found["largest_token"] >= about["vocab"]:
        return f"has token {found['largest_token']}, but a vocabulary of {about['vocab']}"
    # tokenize_text.py states 0 for a shard inside one long document.
    if not found["documents"] and listed.get("documents") != 0:
        return f"has no token {about['eot']}, which starts a document"
    return None


# ---- Writing -------------------------------------------------------------------------------------
def header(count: int) -> bytes:
    """The first 1024 bytes of a shard of `count` tokens, all numbers little-endian."""
    return struct.pack("<3i1012x", MAGIC, VERSION, count)


def write(path: pathlib.Path, parts: Iterable[bytes]) -> dict[str, Any]:
    """Writes a file completely or not at all, even if two processes write it at once. Returns its
    size and sha256. Each part is bytes or a contiguous array."""
    path.parent.mkdir(parents=True, exist_ok=True)
    # Not .part-*, which workplace() of another process would delete.
    temporary = path.with_name(f".{os.getpid()}-{path.name}")
    digest = hashlib.sha256()
    size = 0
    try:
        with temporary.open("wb") as file:
            for part in parts:
                digest.update(part)
                size += file.write(part)
            file.flush()
            os.fsync(file.fileno())  # a power cut must not leave the name without the bytes
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
    return dict(size=size, sha256=digest.hexdigest())


def write_manifest(folder: pathlib.Path, source: str, vocab: int, eot: int, files: dict) -> None:
    """Writes MANIFEST.json: where the tokens come from, the vocabulary, and for each file `size`
    and `sha256`, `revision` if a hub states one, `documents` if we counted their starts. The same
    content is not written again, because the folder may be read-only."""
    about = dict(source=source, vocab=vocab, eot=eot, files=dict(sorted(files.items())))
    text = json.dumps(about, indent=1).encode() + b"\n"
    path = folder / "MANIFEST.json"
    if not path.is_file() or path.read_bytes() != text:
        write(path, [text])


@contextlib.contextmanager
def workplace(out: pathlib.Path) -> Iterator[pathlib.Path]:
    """A folder inside `out` for unfinished files, deleted at the end. Only one process at a time
    works in `out`; others wait for it. What a killed process left is deleted."""
    out.mkdir(parents=True, exist_ok=True)
    with (out / ".lock").open("w") as lock:
        has_lock = True
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            print(f"another process is at work in {out}; waiting for it to end ...", flush=True)
            fcntl.flock(lock, fcntl.LOCK_EX)
        except OSError:  # a file system without locks
            has_lock = False
        if has_lock:  # otherwise another process may be using these folders
            for abandoned in out.glob(".part-*"):
                shutil.rmtree(abandoned, ignore_errors=True)
        part = pathlib.Path(tempfile.mkdtemp(prefix=".part-", dir=out))
        try:
            yield part
        finally:
            shutil.rmtree(part, ignore_errors=True)
