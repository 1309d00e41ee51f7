"""What the scripts of data/ share: reading, checking and writing shards and folders of shards, and
the messages of messages.py."""

import codecs
import contextlib
import errno
import fcntl
import hashlib
import json
import os
import pathlib
import re
import shutil
import stat
import struct
import tempfile
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any, BinaryIO

import numpy as np
from messages import (  # noqa: F401 - the scripts have them as shards.one_line and so on
    Fault,
    certificate_fault,
    folder_name,
    install_command,
    is_of_system,
    one_line,
    reason,
)

MAGIC, VERSION = 20240520, 1  # llm.c's dev/data/data_common.py
HEADER = 1024  # bytes
GPT2 = dict(vocab=50257, eot=50256)
NAME = re.compile(r"([^./][^/]*)_(train|val)_([0-9]{6})[.]bin")  # of a shard
STAMP = ".checked.json"
FACTS = dict(size=int, mtime_ns=int, eot=int | None, tokens=int, sha256=str, documents=int,
             largest_token=int)  # what inspect() finds  # fmt: skip
BARE = "data/README.md says how to put a header before tokens"
PACKED = b"\x1f\x8b", b"PK\3\4", b"BZh", b"\xfd7zXZ", b"\x28\xb5\x2f\xfd"
OTHERS = {  # how files begin that are no shards: what they are, and what to do about it
    (b"version https://git-lfs",): "a Git LFS pointer: type git lfs pull in the clone it is from",
    (struct.pack("<2i", 20240801, 7),): "one of Llama 3's tokens of 32 bits, and only tokens of 16 "
    "bits are read: make shards of the text by ./run.sh tokenize",
    (struct.pack(">2i", MAGIC, VERSION),): "one of big-endian numbers: write little-endian ones",
    (b"\x93NUMPY", b"MMIDIDX", b"LITPKDS"): f"a file of NumPy, Megatron or lit-gpt: {BARE}",
    PACKED: "packed by gzip, ZIP, bzip2, xz or zstd: unpack it",
    (b"PAR1",): "a parquet file: make shards of its text by ./run.sh tokenize",
    (bytes(16),): "zeros, which a power cut or a full disk leaves: get it again",
}


# ---- Tokenizers ----------------------------------------------------------------------------------
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
    except Exception as error:  # from the package, the network, the cache, or another file's hash
        what = f"tiktoken cannot load GPT-2's vocabulary ({type(error).__name__})"
        raise Fault(f"{what}: {no_vocabulary(error)}") from None


def no_vocabulary(error: Exception) -> str:
    """Why tiktoken cannot load GPT-2's vocabulary, and what to do about it."""
    if isinstance(error, ImportError):
        return f"{error}: run ./run.sh install"
    if isinstance(error, OSError) and error.errno and error.filename:
        return f"TIKTOKEN_CACHE_DIR: {reason(error)}"
    fault = certificate_fault("REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE")
    if fault:
        return fault
    while error.__cause__ or error.__context__:  # the first one says most
        error = error.__cause__ or error.__context__
    why = " ".join(str(error).split())[:300].rstrip(".") or type(error).__name__
    if "SOCKS" in why:
        return f"{why}: type  {install_command('pysocks')},  or unset ALL_PROXY"
    if os.environ.get("TIKTOKEN_CACHE_DIR"):
        why += f", and TIKTOKEN_CACHE_DIR, {os.environ['TIKTOKEN_CACHE_DIR']}, has no right copy"
    get = "TIKTOKEN_CACHE_DIR=gpt2 .venv/bin/python -c "
    get += "'import tiktoken; tiktoken.get_encoding(\"gpt2\")'"
    where = "check the network and the proxy, or, on a machine where they work,"
    return f"{why}: {where} run {get}, copy the folder gpt2 here and set TIKTOKEN_CACHE_DIR to it"


# ---- Reading -------------------------------------------------------------------------------------
def inspect(path: pathlib.Path, eot: int | None) -> dict[str, Any]:
    """Reads every byte of a shard and returns the facts that the last line lists. Without `eot`,
    `documents` is 0. Raises Fault if the file is no shard, OSError if it cannot be read."""
    with open_file(path) as file:
        status = os.fstat(file.fileno())
        count = token_count(file)
        digest = hashlib.sha256()
        file.seek(0)
        digest.update(file.read(HEADER))
        largest = 0
        documents = 0
        while True:
            piece = file.read(2**23)
            if not piece:
                break
            digest.update(piece)
            tokens = np.frombuffer(piece, "<u2", len(piece) // 2)
            largest = max(largest, int(tokens.max(initial=0)))
            if eot is not None:
                documents += int(np.count_nonzero(tokens == eot))
        if file.tell() != status.st_size:
            raise Fault("changes while it is read: wait for the end of its copy")
    return dict(size=status.st_size, mtime_ns=status.st_mtime_ns, eot=eot, tokens=count,
                sha256=digest.hexdigest(), documents=documents, largest_token=largest)  # fmt: skip


def open_file(path: pathlib.Path) -> BinaryIO:
    """Opens a file for reading. Raises OSError, also for a pipe, which would be waited for."""
    if not stat.S_ISREG(path.stat().st_mode) and not path.is_dir():
        raise OSError(errno.EINVAL, "It is a pipe or a device, not a file", str(path))
    return path.open("rb")


def token_count(file: BinaryIO) -> int:
    """The number of tokens of a shard, of which it reads the header. Raises Fault if it is none."""
    header = file.read(HEADER)
    size = os.fstat(file.fileno()).st_size
    if len(header) < HEADER or header[:8] != struct.pack("<2i", MAGIC, VERSION):
        raise Fault(f"is no token shard, but {recognise(header)}")
    (count,) = struct.unpack_from("<i", header, 8)
    if count > 0 and size == HEADER + 4 * count:
        raise Fault("has 4 bytes for each token, but only 16-bit tokens are read: write uint16")
    promised = HEADER + 2 * count
    if count <= 0 or size != promised:
        raise Fault(f"has {size} bytes where its header promises {promised}: get it again")
    return count


def recognise(beginning: bytes) -> str:
    """What a file is whose first 1024 bytes are not those of a shard, and what to do about it."""
    for firsts, what in OTHERS.items():
        if beginning.startswith(firsts):
            return what
    with contextlib.suppress(UnicodeDecodeError):
        text = " ".join(codecs.getincrementaldecoder("utf-8")().decode(beginning[:200]).split())
        if text and text.isprintable():
            return f"text, {text[:40]}: get the file itself, or make shards by ./run.sh tokenize"
    if len(beginning) < HEADER:
        return f"{len(beginning)} bytes, which hold no header: get it again"
    numbers = "{} and {}".format(*struct.unpack_from("<2i", beginning))
    return (
        f"begins with {numbers}, not with {MAGIC} and {VERSION}: it has another format, or bare "
        f"tokens, as nanoGPT and Megatron write them; {BARE}"
    )


def read_stamp(folder: pathlib.Path) -> dict[str, dict]:
    """What inspect() found in a folder's files when it read them last: {} if nothing was saved."""
    try:
        with open_file(folder / STAMP) as file:
            saved = json.load(file)
        return {name: found for name, found in saved.items() if has_facts(found)}
    except (OSError, ValueError, AttributeError, RecursionError):  # it may hold anything
        return {}


def has_facts(found: Any) -> bool:
    """Whether this is what inspect() returns, and not what another version of it did."""
    if type(found) is not dict or found.keys() != FACTS.keys():
        return False
    return all(isinstance(found[key], kind) for key, kind in FACTS.items())


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
            if isinstance(error, FileNotFoundError) and not (folder / name).is_symlink():
                return dict(fault="is missing: get it again")
            return dict(fault=f"cannot be read: {reason(error, folder / name)}")
        except Fault as fault:
            return dict(fault=str(fault))

    pool = ThreadPoolExecutor()  # without `with`, where Ctrl-C would wait for all threads
    names = list(names)
    good = {}
    for name, found in zip(names, pool.map(look, names), strict=True):
        if "fault" not in found:
            good[name] = found
        yield name, found
    stamp(folder, good)


def tokens(folder: pathlib.Path, split: str) -> np.ndarray:
    """All tokens of the train or val shards of read_folder() in order, (N,) of uint16. One shard is
    mapped; several are copied into memory, 200 MB for each shard of FineWeb. Raises Fault, or
    OSError."""
    counts = {}
    for name in read_folder(folder)[1]:
        if NAME.fullmatch(name)[2] == split:
            with open_file(folder / name) as file:
                try:
                    counts[folder / name] = token_count(file)
                except Fault as fault:
                    raise Fault(f"has {name}, which {fault}") from None
    if len(counts) == 1:
        ((path, count),) = counts.items()
        return np.memmap(path, "<u2", "r", offset=HEADER, shape=(count,))
    joined = np.empty(sum(counts.values()), "<u2")  # maps would need a descriptor each
    end = 0
    for path, count in counts.items():
        start = end
        end += count
        joined[start:end] = np.fromfile(path, "<u2", count, offset=HEADER)
    return joined


# ---- Folders -------------------------------------------------------------------------------------
def read_manifest(folder: pathlib.Path) -> dict[str, Any]:
    """MANIFEST.json, or {} if there is none. Raises Fault if it is broken, OSError if it cannot be
    read."""
    path = folder / "MANIFEST.json"
    try:
        with open_file(path) as file:
            content = file.read()
    except FileNotFoundError:
        if path.is_symlink():
            raise
        return {}
    try:
        about = json.loads(content)
        checks = [type(about["vocab"]) is int, type(about["eot"]) is int]
        checks.append(type(about["source"]) is str)
        for name, file in about["files"].items():
            checks.append(NAME.fullmatch(name))  # a path could lead out of the folder
            checks.append(type(file["size"]) is int)
            checks.append(re.fullmatch("[0-9a-f]{64}", file["sha256"]))
    except Exception:  # the file may hold anything
        checks = [False]
    if not all(checks):
        raise Fault("has a broken MANIFEST.json: delete it and make or get the data again")
    return about


def read_folder(folder: pathlib.Path) -> tuple[dict[str, Any], list[str]]:
    """MANIFEST.json, and the names of the shards that it lists or that are in the folder, train
    before validation. Raises Fault unless they are one set, numbered without a gap, and no other
    file is a shard."""
    try:
        present = [path.name for path in folder.iterdir() if path.name[0] != "."]
        about = read_manifest(folder)
    except OSError as error:
        raise Fault(f"cannot be read: {reason(error, folder)}") from None
    prefixes = set()
    shards = {"train": [], "val": []}
    for name in sorted({*present, *about.get("files", ())}):
        match = NAME.fullmatch(name)
        if match:
            prefixes.add(match[1])
            shards[match[2]].append(name)
    if len(prefixes) > 1:
        sets = ", ".join(sorted(prefixes))
        raise Fault(f"has shards of several sets, {sets}: give each its own folder")
    prefix = "".join(prefixes)  # the only one
    refuse_other_names(folder, prefix, present)
    for split, names in shards.items():
        if not names:
            raise Fault(f"has no {split} shard{hint(folder, split)}")
        first = 0 if names[0].endswith("_000000.bin") else 1
        for number, name in enumerate(names, first):
            expected = f"{prefix}_{split}_{number:06}.bin"
            if name != expected:
                raise Fault(f"lacks {expected}: get it, or rename {name} if that is it")
    return about, shards["train"] + shards["val"]


def refuse_other_names(folder: pathlib.Path, prefix: str, present: list[str]) -> None:
    """Raises Fault if some of the files in a folder are shards, or match the pattern of
    train_gpt.py, but do not have a shard's name: training would miss them, or read them unchecked.
    `prefix` is that of the files that have a shard's name, or "" if there are none."""
    cures = []
    taken = {*present}
    for name in sorted(present):
        if NAME.fullmatch(name):
            continue
        try:
            with open_file(folder / name) as file:
                token_count(file)
        except (OSError, Fault):
            if re.search("_(train|val)_.*[.]bin$", name):
                cures.append(f"move {name} away, which is no shard")
            continue
        new = shard_name(name, folder, prefix, present)
        if new in taken:
            cures.append(f"remove {name} if it is a copy of {new}, or give it another number")
        else:
            cures.append(f"rename {name} to {new}, or move it away")
        prefix = NAME.fullmatch(new)[1]
        taken.add(new)
    if len(cures) > 4:
        cures[4:] = [f"and {len(cures) - 4} more"]
    if cures:
        names = "NAME_train_NNNNNN.bin or NAME_val_NNNNNN.bin"
        raise Fault(f"has shards that are not called {names}: {'; '.join(cures)}")


def shard_name(name: str, folder: pathlib.Path, prefix: str, present: list[str]) -> str:
    """The name that a shard of another name may be meant to have: with `prefix`, if there is one,
    and with the split and the number that are in its name. Without a split, it is one of training,
    unless only that of validation is not `present`."""
    stem = re.split("(?i)[.](bin|npy)", name)[0]
    match = re.fullmatch("(?i)(.*)(train|val|test)(.*)", stem)
    if match:
        before, word, after = match.groups()
        split = "train" if word.lower() == "train" else "val"
    else:
        before = after = stem
        splits = {found[2] for found in map(NAME.fullmatch, present) if found}
        split = "val" if splits == {"train"} else "train"
    alone = r"(?<![^\W_])[0-9]{1,6}(?![^\W_])"
    numbers = re.findall(alone, after) or re.findall(alone.replace("1,", ""), before)
    number = int(numbers[0]) if numbers else int(split == "train")
    prefix = prefix or before.strip("._- ") or folder.resolve().name.strip("._- ") or "mine"
    return f"{prefix}_{split}_{number:06}.bin"


def hint(folder: pathlib.Path, split: str) -> str:
    """How a folder gets the shard of a split that it lacks, as the end of a sentence."""
    for path in sorted(folder.glob("[!.]*")):
        unnamed = path.suffix == ".bin" and not re.search("train|val", path.name)
        if path.is_file() and (split in path.name or unnamed):
            try:
                with path.open("rb") as file:
                    token_count(file)
            except Fault as fault:
                return f", and {path.name} {fault}"
    for path in folder.glob(f"*/[!.]*_{split}_*.bin"):
        return f", but {path.parent} has: name that folder, or move its files here"
    return ": data/README.md says how to make some"


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
    except OSError as error:
        error.filename = error.filename or str(path)  # writing and syncing do not name it
        raise
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
    works in `out`; others wait for it. What a killed process left is deleted, and so are folders
    that were made here, if nothing is in them at the end."""
    new = [folder for folder in (out, *out.parents) if not folder.exists()]
    file, has_lock = lock(out)
    with file:
        part = None
        try:
            if has_lock:  # otherwise another process may be using these folders
                for abandoned in out.glob(".part-*"):
                    shutil.rmtree(abandoned, ignore_errors=True)
            part = pathlib.Path(tempfile.mkdtemp(prefix=".part-", dir=out))
            yield part
        finally:
            if part:
                shutil.rmtree(part, ignore_errors=True)
            with contextlib.suppress(OSError):  # of the first folder with files
                if os.path.samestat(os.fstat(file.fileno()), (out / ".lock").lstat()):
                    (out / ".lock").unlink()
                for folder in new:
                    folder.rmdir()


def lock(out: pathlib.Path) -> tuple[BinaryIO, bool]:
    """Makes a folder, and waits for its lock. Returns the open file .lock, and whether the file
    system has locks. Its last owner may have deleted what was waited for: then it begins anew."""
    announced = False
    while True:
        out.mkdir(parents=True, exist_ok=True)
        try:
            file = (out / ".lock").open("ab+")  # "w" would wait if it were a pipe
        except FileNotFoundError:  # its last owner has just deleted the folder
            if out.is_dir():
                raise
            continue
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if not announced:
                print(f"another process is at work in {out}; waiting for it to end ...", flush=True)
            announced = True
            fcntl.flock(file, fcntl.LOCK_EX)
        except OSError:
            return file, False
        with contextlib.suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(file.fileno()), (out / ".lock").stat()):
                return file, True
        file.close()
