"""Reads documents out of files, and refuses files that hold something else than text or rows.

What a file is, its first bytes say; a name says little. Text is UTF-8, but bytes that decode are no
text yet: a CSV file is ASCII, UTF-16 of English is valid UTF-8 with zero bytes, a hole in a file is
zero bytes. A training run would learn them without a word, so they are refused here.
"""

import bz2
import codecs
import dataclasses
import hashlib
import itertools
import json
import lzma
import re
import zlib
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from messages import refuse

SUFFIXES = (".txt", ".md", ".jsonl", ".parquet")  # what is read of a folder
PACKING = (".gz", ".bz2", ".xz", ".zst")
CHUNK = 2**16  # bytes to read at once; zstd may expand them a thousandfold
MARK = "<|endoftext|>"  # as a separator, it also divides a line
FEW = 8  # stray zero bytes of a chunk, or of a row, are fewer

Parts = Iterator[str | None]  # strings that together are a document; None ends each document
Rows = Iterator[tuple[str, Any]]  # where a row is, and what it is: a dict, if it is right


# ---- What a file is, by its first bytes ----------------------------------------------------------
def zstd() -> Any:
    import zstandard  # here, because only .zst needs it

    return zstandard.ZstdDecompressor(max_window_size=2**31).decompressobj()  # as --long=31


PARQUET = "python -c 'from pyarrow import feather, ipc, parquet as p; p.write_table("
CSV = "python -c 'import csv, json, sys; csv.field_size_limit(2**30); "
CSV += "[print(json.dumps(row)) for row in csv.DictReader(sys.stdin)]' < FILE > NEW.jsonl"
# What unpacks a file, or what it is and the command that makes text or rows of it.
KINDS: dict[bytes, Callable | str] = {
    rb"\x1f\x8b": lambda: zlib.decompressobj(wbits=31),  # gzip
    rb"BZh[1-9](1AY|\x17rE)": bz2.BZ2Decompressor,
    rb"\xfd7zXZ\0": lzma.LZMADecompressor,
    rb"\x28\xb5\x2f\xfd|[\x50-\x5f]\x2a\x4d\x18": zstd,
    rb"PK\x03\x04": "a zip archive:  unzip FILE -d NEW",
    rb".{257}ustar": "a tar archive:  tar -xf FILE -C NEW",
    rb"ARROW1\0": f"""Arrow:  {PARQUET}feather.read_table("FILE"), "NEW.parquet")'""",
    rb"\xff{4}": f"""Arrow:  {PARQUET}ipc.open_stream("FILE").read_all(), "NEW.parquet")'""",
    rb"WARC/[01]": "a web archive: extract its text, for instance by datatrove, as JSON lines",
    rb"%PDF-": "PDF:  pdftotext FILE NEW.txt",
    rb"version https://git-lfs|/annex/objects/": "a pointer:  git lfs pull  or  git annex get",
    rb"(<[?]xml[^>]*>\s*)?<mediawiki": "a wiki's dump:  wikiextractor --json FILE -o NEW",
    rb"\{\\rtf": "RTF:  textutil -convert txt FILE  or  unrtf --text FILE > NEW.txt",
    rb'(?=.*\\n)("([^"\\\n]|\\.)*"\r?\n){3}': "JSON strings:  jq -c '{text: .}' FILE > NEW.jsonl",
    rb'\[\s*["{]': "a JSON array:  jq -c '.[] | objects // {text: .}' FILE > NEW.jsonl",
    rb'\{\s*\n\s*"': "JSON of several lines:  jq -c . FILE > NEW.jsonl",
}
JSON_LINE = re.compile(rb"""^[\x1e,]?\{\s*["'}]""", re.MULTILINE)


def kind(start: bytes) -> Callable | str | None:
    """The entry of KINDS for the first bytes of a file, but for white space."""
    start = start.removeprefix(codecs.BOM_UTF8).lstrip()
    return next((what for first, what in KINDS.items() if re.match(first, start, re.DOTALL)), None)


def has_rows(path: Path, start: bytes, column: str) -> bool:
    """Whether a file has JSON lines: by its name, or because the first or most lines look so. Ends
    the tool if it is CSV, by its name or by the column in its first line, or a web page as .txt."""
    start = start.removeprefix(codecs.BOM_UTF8).lstrip()
    first = start.split(b"\n")[0].strip()
    most = 2 * len(JSON_LINE.findall(start)) > start.count(b"\n")
    suffix = plain_suffix(path)
    if suffix in (".jsonl", ".json") or JSON_LINE.match(start) or most:
        return True
    names = [name.strip(b"\"'") for name in re.split(rb"[,;\t]", first)]
    if suffix in (".csv", ".tsv") or column.encode() in names:
        refuse(f"{path} is CSV:  {CSV} (DictReader takes delimiter=, too)")
    if suffix in ("", *SUFFIXES) and re.match(rb"(?i)<(!doctype html|html|[?]xml)", start):
        refuse(f"{path} is a web page or XML: get the file itself, or extract its text")
    return False


# ---- Files ---------------------------------------------------------------------------------------
def find(paths: list[Path], also: tuple[str, ...] = ()) -> list[Path]:
    """The input files in their order, each once: those that are named themselves, and of a folder
    those with SUFFIXES or one of `also`, packed or not."""
    found = {}  # by the file's real path: the hub's cache has several links to one file
    for path in paths:
        if not path.exists():
            refuse(f"there is no {path}:  hf download OWNER/NAME --repo-type dataset  gets a set")
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
    name = Path(path.name.lower())
    return Path(name.stem).suffix if name.suffix in PACKING else name.suffix


# ---- Bytes and text ------------------------------------------------------------------------------
def unpack(path: Path) -> Iterator[bytes]:
    """Yields the bytes of a file in chunks, decompressed if they are packed, also of several frames
    or members. Raises EOFError if the last one is cut off."""
    with path.open("rb") as file:
        new = kind(file.peek(8))
        chunks = iter(lambda: file.read(CHUNK), b"")
        if not callable(new):
            yield from chunks
            return
        frame = None
        for data in chunks:
            while data:
                frame = frame or new()
                yield frame.decompress(data)
                data = frame.unused_data
                if frame.eof:
                    frame = None
        if frame is not None:
            raise EOFError(f"{path} ends within a frame")


def decode(path: Path, chunks: Iterable[bytes], errors: str = "strict") -> Iterator[str]:
    """Yields the text of a file in chunks, without a byte order mark in front. Ends the tool with
    the place of the first byte that is no text."""
    decoder = codecs.getincrementaldecoder("utf-8-sig")(errors)
    size = 0
    for data in itertools.chain(filter(None, chunks), [b""]):
        if data.count(0) >= FEW:
            place = size + data.index(0)
            refuse(f"{path}: byte {place} and others are NUL: UTF-16, binary, or cut by a crash")
        size += len(data)
        try:
            yield decoder.decode(data, final=not data)
        except UnicodeDecodeError as error:
            place = size - len(error.object) + error.start
            refuse(f"{path}: byte {place} is no UTF-8: binary, or text for  iconv -f ENCODING")


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
@dataclasses.dataclass
class Counts:
    """What has been read."""

    documents: int = 0
    separators: int = 0
    marks: int = 0
    rows: int = 0  # of JSON lines and parquet
    skipped: int = 0  # rows without text
    first: str = ""  # where the first of these is, and what is wrong with it

    def skip(self, why: str) -> None:
        """Counts a row without text."""
        self.first = self.first or why
        self.skipped += 1


def documents(path: Path, column: str, separator: str | None, counts: Counts) -> Parts:
    """Reads the documents of a file by the reader for its first bytes."""
    chunks = filter(None, unpack(path))
    start = next(chunks, b"")
    what = kind(start)
    if isinstance(what, str):
        refuse(f"{path} is {what}")
    if plain_suffix(path) == ".parquet" or re.match(rb"PAR1[^ -~]", start):
        return row_texts(parquet(path, column), column, counts)
    rows = has_rows(path, start, column)
    errors = "surrogateescape" if rows else "strict"  # one bad row does not end the tool
    texts = decode(path, itertools.chain([start], chunks), errors)
    if rows:
        return row_texts(jsonl(path, texts), column, counts)
    if separator is None:
        return itertools.chain(texts, [None])
    return separated(texts, separator, counts)


def separated(texts: Iterable[str], separator: str, counts: Counts) -> Parts:
    """Reads documents that end at a line equal to `separator`, but for spaces around it, or at each
    MARK if that is the separator. What comes after the last one is a document, too. Counts the
    separators."""
    for line in lines(texts):
        if separator == MARK and MARK in line:
            *whole, rest = line.split(MARK)
            for text in whole:
                yield text
                yield None
            counts.separators += len(whole)
            if rest.strip():  # otherwise the end of the line belongs to the separator
                yield rest
        elif line.removeprefix("\ufeff").strip() == separator.strip():
            yield None
            counts.separators += 1
        else:
            yield line
    yield None


def jsonl(path: Path, texts: Iterable[str]) -> Rows:
    """Reads the lines that are not blank."""
    for number, line in enumerate(lines(texts), 1):
        if not line.isspace():
            try:
                line.encode()  # fails at bytes that are no UTF-8
                row = json.loads(line, strict=False)  # control characters may be in strings
            except (ValueError, RecursionError) as error:
                row = error
            yield f"{path}: line {number}", row


def parquet(path: Path, column: str) -> Rows:
    """Reads a column."""
    from pyarrow.parquet import ParquetFile  # here, because only .parquet needs it

    file = ParquetFile(path, buffer_size=CHUNK, pre_buffer=False)  # else memory holds the file
    names = [file.schema.column(i).path for i in range(len(file.schema))]
    if column not in names:
        refuse(f'{path} has no column "{column}", but {names}: --column names another')
    batches = file.iter_batches(64, columns=[column])
    rows = itertools.chain.from_iterable(batch.to_pylist() for batch in batches)
    for number, row in enumerate(rows, 1):
        yield f"{path}: row {number}", row


def row_texts(rows: Rows, column: str, counts: Counts) -> Parts:
    """The text of each row; a row without any is counted and skipped. A name with a dot is that of
    a field within a field."""
    for place, row in rows:
        counts.rows += 1
        text = row
        whole = isinstance(row, dict) and column in row
        for name in [column] if whole else column.split("."):
            text = text.get(name) if isinstance(text, dict) else None
        if not isinstance(text, str):
            there = ", ".join(row) if isinstance(row, dict) else repr(row)[:200]
            counts.skip(f'{place} has no string "{column}", but {there}; --column a.b is b in a')
        elif text.count("\0") >= FEW:
            counts.skip(f"{place} has NUL characters in place of text")
        else:  # half of a surrogate pair becomes U+FFFD, as in tiktoken
            yield text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
            yield None
