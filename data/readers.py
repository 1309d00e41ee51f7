"""Reads documents out of files, and refuses files whose bytes are no text.

Text is UTF-8. Bytes that decode are no text yet: UTF-16 of English is valid UTF-8 with zero bytes,
a hole in a file is zero bytes, and a Git LFS pointer is ASCII. A training run would learn them
without a word, so they are refused here. Other broken files end with the message of the library
that reads them.
"""

import codecs
import collections
import gzip
import hashlib
import itertools
import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from messages import refuse

SUFFIXES = (".txt", ".md", ".jsonl", ".parquet")  # what is read of a folder
CHUNK = 2**16  # bytes to read at once; zstd may expand them a thousandfold
MARK = "<|endoftext|>"  # as a separator, it also divides a line
POINTERS = (b"version https://git-lfs.github.com/spec/", b"/annex/objects/")
FEW = 8  # stray zero bytes of a chunk, or of a row, are fewer

Parts = Iterator[str | None]  # strings that together are a document; None ends each document


# ---- Files ---------------------------------------------------------------------------------------
def find(paths: list[Path], also: tuple[str, ...] = ()) -> list[Path]:
    """The input files in their order, each once: those that are named themselves, and of a folder
    those with SUFFIXES or one of `also`, packed or not."""
    found = {}  # by the file's real path: the hub's cache has several links to one file
    for path in paths:
        if not path.exists():
            refuse(f"{path.absolute()} does not exist")
        for file in walk(path, SUFFIXES + also) if path.is_dir() else [path]:
            found.setdefault(file.resolve(), file)
    return [*found.values()]


def walk(folder: Path, suffixes: tuple[str, ...]) -> list[Path]:
    """The files of a folder with one of these suffixes, without hidden ones. Their order, by the
    sha256 of the path in the folder, separates neighbours, so that the validation set is not all of
    one kind."""
    found = {}
    others = 0
    for path in folder.rglob("[!.]*"):
        name = path.relative_to(folder).as_posix()
        if path.is_symlink() and path.is_dir():
            refuse(f"{path} is a link to a folder: give its target as PATH, too")
        if path.is_dir() or "/." in f"/{name}":
            continue
        if plain_suffix(path) in suffixes:
            found[hashlib.sha256(name.encode()).digest()] = path
        else:
            others += 1
    if others:
        print(f"{folder}: {others} files of other kinds are not read; --also .py adds a suffix")
    return [found[digest] for digest in sorted(found)]


def plain_suffix(path: Path) -> str:
    """The suffix of a file without that of its packing: ".txt" of a.txt.gz."""
    return Path(path.name.lower().removesuffix(".gz").removesuffix(".zst")).suffix


# ---- Bytes and text ------------------------------------------------------------------------------
def unpack(path: Path) -> Iterator[bytes]:
    """Yields the bytes of a file in chunks, decompressed if its name ends in .gz or .zst. Raises
    EOFError if it is cut off."""
    suffix = path.suffix.lower()
    with gzip.open(path) if suffix == ".gz" else path.open("rb") as file:
        chunks = iter(lambda: file.read(CHUNK), b"")
        yield from unpack_zstd(chunks) if suffix == ".zst" else chunks


def unpack_zstd(chunks: Iterable[bytes]) -> Iterator[bytes]:
    """Yields the decompressed bytes of a zstd file, which may have several frames."""
    import zstandard  # here, because only .zst needs it

    zstd = zstandard.ZstdDecompressor(max_window_size=2**31)  # that of zstd --long=31
    frame = None
    for data in chunks:
        while data:
            frame = frame or zstd.decompressobj()
            yield frame.decompress(data)
            data = frame.unused_data
            if frame.eof:
                frame = None
    if frame is not None:
        raise EOFError("it ends within a frame")


def decode(path: Path) -> Iterator[str]:
    """Yields the text of a file in chunks, without a byte order mark in front. Ends the tool with
    the place of the first byte that is no text."""
    decoder = codecs.getincrementaldecoder("utf-8-sig")()
    size = 0
    newlines = 0
    for data in itertools.chain(filter(None, unpack(path)), [b""]):
        if size == 0 and data.startswith(POINTERS):
            refuse(f"{path} is a pointer: get the text itself by  git lfs pull  or  git annex get")
        if data.count(0) >= FEW:
            place = data.index(0)
            line = 1 + newlines + data.count(b"\n", 0, place)
            what = "has NUL bytes: it is UTF-16 or binary, or a crash has cut it"
            refuse(f"{path}: line {line}, byte {size + place}, {what}")
        size += len(data)
        try:
            yield decoder.decode(data, final=not data)
        except UnicodeDecodeError as error:
            line = 1 + newlines + error.object.count(b"\n", 0, error.start)
            place = size - len(error.object) + error.start
            what = "is no UTF-8; this converts it:  iconv -f ENCODING -t UTF-8 FILE > NEW"
            refuse(f"{path}: line {line}, byte {place}, {what}")
        newlines += data.count(b"\n")


def lines(texts: Iterable[str]) -> Iterator[str]:
    """The lines of a text, with their ends. Only \\n ends a line. The time is linear, also for a
    line in many chunks."""
    parts = []  # of a line
    for text in texts:
        *ends, rest = text.split("\n")
        for end in ends:
            yield "".join([*parts, end, "\n"])
            parts = []
        parts.append(rest)
    last = "".join(parts)
    if last:
        yield last


# ---- Documents -----------------------------------------------------------------------------------
def documents(path: Path, column: str, separator: str | None, counts: collections.Counter) -> Parts:
    """Reads the documents of a file by the reader for its suffix."""
    suffix = plain_suffix(path)
    if suffix == ".parquet":
        return parquet(path, column)
    if suffix in (".jsonl", ".json"):
        return jsonl(path, column)
    if separator is None:
        return itertools.chain(decode(path), [None])
    return separated(decode(path), separator, counts)


def separated(texts: Iterable[str], separator: str, counts: collections.Counter) -> Parts:
    """Reads documents that end at a line equal to `separator`, but for spaces around it, or at each
    MARK if that is the separator. What comes after the last one is a document, too. Counts the
    separators."""
    for line in lines(texts):
        if separator == MARK and MARK in line:
            *whole, rest = line.split(MARK)
            for text in whole:
                yield text
                yield None
            counts["separators"] += len(whole)
            if rest.strip():  # otherwise the end of the line belongs to the separator
                yield rest
        elif line.removeprefix("\ufeff").strip() == separator.strip():
            yield None
            counts["separators"] += 1
        else:
            yield line
    yield None


def jsonl(path: Path, column: str) -> Parts:
    """Reads a field of every line that is not blank."""
    for number, line in enumerate(lines(decode(path)), 1):
        if line.isspace():
            continue
        try:
            row = json.loads(line)
        except ValueError as error:
            refuse(f"{path}: line {number} is not JSON ({error})")
        text = row_text(f"{path}: line {number}", row, column)
        if "\\u" in line:  # half of a surrogate pair becomes U+FFFD, as in tiktoken
            text = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
        yield text
        yield None


def parquet(path: Path, column: str) -> Parts:
    """Reads a column."""
    from pyarrow.parquet import ParquetFile  # here, because only .parquet needs it

    file = ParquetFile(path)
    names = file.schema_arrow.names
    if column not in names:
        refuse(f'{path} has no column "{column}", but {names}: --column names another')
    number = 0
    for batch in file.iter_batches(64, columns=[column]):
        for row in batch.to_pylist():
            number += 1
            yield row_text(f"{path}: row {number}", row, column)
            yield None


def row_text(place: str, row: Any, column: str) -> str:
    """The text in a row of a file. Ends the tool if there is none."""
    text = row.get(column) if isinstance(row, dict) else None
    if not isinstance(text, str):
        there = ", ".join(row) if isinstance(row, dict) else "no fields"
        refuse(f'{place} has no string "{column}", but {there}: --column names another field')
    if text.count("\0") >= FEW:
        refuse(f"{place} has NUL characters in place of text")
    return text
