"""Reads documents out of files, and refuses files that are not what they seem.

Text is UTF-8. Bytes that decode are no text yet: UTF-16 of English is valid UTF-8 with zero bytes,
a hole in a file is zero bytes, and a Git LFS pointer is ASCII.
"""

import codecs
import collections
import gzip
import hashlib
import html
import importlib
import io
import itertools
import json
import os
import pathlib
import re
import shlex
import unicodedata
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
from messages import install_command

KINDS = ("txt", "md", "jsonl", "json")
SUFFIXES = tuple(f".{kind}{how}" for kind in KINDS for how in ("", ".gz", ".zst"))
SUFFIXES += (".parquet",)
FORMATS = ".txt, .md, .jsonl, .json (all also with .gz or .zst) or .parquet"
MARK = "<|endoftext|>"  # as a separator, it also divides a line
CHUNK = 2**20  # bytes to read at once
HALF_PAIR = re.compile("[\ud800-\udfff]")

Notes = dict[str, list[pathlib.Path]]  # what is odd but no fault, and the files it is true of
Parts = Iterator[str | None]  # strings that together are a document; None ends each document


class Unreadable(Exception):
    """What is wrong with an input, and what to do about it."""

    def __init__(self, what: str, cure: str = "correct that, or leave it out"):
        super().__init__(f"{what}: {cure}")


# ---- Files ---------------------------------------------------------------------------------------
def refuse(error: OSError) -> None:
    """Raises Unreadable for a folder that cannot be listed."""
    raise Unreadable(f"{error.filename}: {error.strerror}", "make it readable")


def walk(folder: pathlib.Path) -> list[pathlib.Path]:
    """The files of a folder, without hidden ones. Their order, by the sha256 of the path in the
    folder, separates neighbours, so that the validation set is not all of one kind."""
    found = []
    for here, folders, names in os.walk(folder, onerror=refuse):
        folders[:] = [name for name in folders if not name.startswith(".")]  # os.walk visits these
        for name in folders:
            if os.path.islink(os.path.join(here, name)):
                link = os.path.join(here, name)
                raise Unreadable(f"{link} is a link", "give its target as PATH instead")
        found += [pathlib.Path(here, name) for name in names if not name.startswith(".")]
    within = {path: os.fsencode(path.relative_to(folder).as_posix()) for path in found}
    return sorted(found, key=lambda path: hashlib.sha256(within[path]).digest())


def find(
    paths: list[pathlib.Path], column: str, notes: Notes, also: tuple[str, ...] = ()
) -> list[pathlib.Path]:
    """The input files in their order: those that are named themselves, and of a folder those with
    SUFFIXES or one of `also`. Raises Unreadable unless they exist and the packages that read them
    are installed."""
    files = {}  # by device and inode: a file with several names, or links to it, is read once
    for path in paths:
        usable = 0
        others = []
        for file in walk(path) if path.is_dir() else [path]:
            if file != path and not file.name.lower().endswith(SUFFIXES + also):
                others.append(file)
                continue
            if not file.exists():
                raise missing(file)
            if not file.is_file():
                raise Unreadable(f"{file} is a pipe or a device", "copy its text to a file")
            if file != path and kind(file) == "json" and not has_json_lines(file, column):
                notes[f'ignored for lack of JSON lines with "{column}"'].append(file)
            else:
                module(file)  # raises Unreadable if its package is missing
                usable += 1
                status = file.stat()
                if files.setdefault((status.st_dev, status.st_ino), file) is not file:
                    notes["read only once, as another name of the same file"].append(file)
        if others:
            kinds, cure = as_text(others)
            if not usable:
                raise Unreadable(f"{path}: found no {FORMATS}, but {kinds}", cure)
            notes[f"ignored for the suffix; {kinds}: {cure}"] += others
        elif not usable:
            raise Unreadable(f"{path}: found no {FORMATS}", "check the path")
    return list(files.values())


def as_text(files: list[pathlib.Path]) -> tuple[str, str]:
    """The numbers of files by suffix, of the commonest, and how to read them as text."""
    counts = collections.Counter(file.suffix.lower() for file in files).most_common()
    kinds = [f"{count} {suffix or 'without a suffix'}" for suffix, count in counts[:3]]
    kinds += ["others"] * (len(counts) > 3)
    suffixes = [quote(suffix) for suffix, _ in counts if suffix]
    flag = f"add --also {suffixes[0]}, or " if suffixes else ""
    return ", ".join(kinds), f"to read them as text, {flag}name the files"


def missing(path: pathlib.Path) -> Unreadable:
    """The error for a path that leads nowhere."""
    if path.is_symlink():
        what = f"{path} is a link to {os.readlink(path)}, which does not exist"
        return Unreadable(what, "mend the link, or choose another path")
    base = "" if path.is_absolute() else f" in {os.getcwd()}, from where paths are looked for"
    return Unreadable(f"{path} does not exist{base}", "check the path")


def kind(path: pathlib.Path) -> str:
    """The suffix of a name without .gz or .zst: one of KINDS, "parquet", or one of other text."""
    _, dot, suffix = path.name.lower().removesuffix(".gz").removesuffix(".zst").rpartition(".")
    return suffix if dot else ""


def is_plain(path: pathlib.Path) -> bool:
    """Whether a file is text, and not rows of texts: so is all that is named without a suffix that
    says otherwise."""
    return kind(path) not in ("jsonl", "json", "parquet")


def has_json_lines(path: pathlib.Path, column: str) -> bool:
    """Whether the first line of a .json file that is not blank is an object with a string in this
    field. True if that is unknown, because the reader then says what is wrong."""
    try:
        with path.open("rb") as raw:
            for line in lines(decode(unpack(path, raw), False)):
                line = line.strip()
                if line:
                    row = json.loads(line) if line.startswith("{") else None
                    return isinstance(row, dict) and isinstance(row.get(column), str)
    except (ValueError, RecursionError):  # it is not JSON
        return False
    except Exception:
        pass
    return True


def module(path: pathlib.Path) -> Any:
    """The package that reads a .zst or .parquet file; raises Unreadable if it is missing. None
    for others."""
    name = {".zst": "zstandard", ".parquet": "pyarrow.parquet"}.get(path.suffix.lower())
    if name is None:
        return None
    try:
        return importlib.import_module(name)
    except ImportError:
        package = name.split(".")[0]
        cure = install_command(package)
        raise Unreadable(f"{path} needs the package {package}", cure) from None


# ---- What is no text -----------------------------------------------------------------------------
ICONV = "iconv -f {} -t UTF-8 FILE > NEW"
ENCODINGS = ", with the text's own encoding, such as CP1252 (Western), CP1251 (Russian), "
ENCODINGS += "GB18030 (Chinese) or SHIFT_JIS (Japanese)"
DROP = "most of it is UTF-8, and this drops what is not:  iconv -c -f UTF-8 -t UTF-8 FILE > NEW"
CUT_OFF = "the end is cut off: get it again"
UNPACK = "unpack it, or let its name end as its content does"
SIGNATURES = {  # what begins with these bytes, whatever its name is
    b"version https://git-lfs.github.com/spec/": ("a Git LFS pointer", "type  git lfs pull"),
    b"/annex/objects/": ("a git-annex pointer", "type  git annex get ."),
    b"\xff\xfe\0\0": ("UTF-32", ICONV.format("UTF-32")),
    b"\xff\xfe": ("UTF-16", ICONV.format("UTF-16")),
    b"\xfe\xff": ("UTF-16", ICONV.format("UTF-16")),
    b"\x1f\x8b": ("gzip data", UNPACK),
    b"\x28\xb5\x2f\xfd": ("zstd data", UNPACK),
    b"PAR1\x15": ("parquet", UNPACK),
    b"PK\x03\x04": ("a zip archive, as .docx and .epub are", "unpack it, or save it as text"),
    b"%PDF-": ("a PDF", "save it as text"),
    b"{\\rtf": ("RTF", "save it as text"),
    b"SQLite format 3\0": ("a database", "save its text"),
}
PACKED = {".gz": "gzip data", ".zst": "zstd data", ".parquet": "parquet"}  # what a suffix promises
ISO_2022 = re.compile(rb"\x1b\$(?:[@B]|\)C)")  # the switch to Japanese or Korean in 7-bit text
# Encodings with zero bytes: bytes of a character, and how far from its begin the first odd one is.
UTF = ("UTF-32LE", 4, 1), ("UTF-32BE", 4, 0), ("UTF-16LE", 2, 1), ("UTF-16BE", 2, 0)
BLOCK = 4096  # bytes, as a page of memory and a block of a disk have


def check_start(start: bytes, promised: str | None, may_be_html: bool) -> None:
    """Raises Unreadable if a file, or what it unpacks to, begins as another kind than promised."""
    for signature, (what, cure) in SIGNATURES.items():
        if start.startswith(signature):
            if what == promised:
                return
            raise Unreadable(f"it is {what}", cure)
    if start[257:262] == b"ustar":
        raise Unreadable("it is a tar archive", "unpack it, and give the folder")
    if start.lstrip()[:1] == b"<" and not may_be_html:
        raise Unreadable("it is HTML or XML, perhaps a server's error message", "get it again")
    if promised in ("gzip data", "zstd data") and start[1:4] != b"*M\x18":  # zstd skips such frames
        raise Unreadable(f"it is no {promised}", UNPACK)


def find_odd(data: bytes) -> int | None:
    """The place of the first odd byte in a block that is no text, or None. Such a block has 8 zero
    bytes (UTF-16, tar, a hole), or at least 8 control characters, which are an eighth of it. So
    stray ones pass, and so do those that some texts are full of: ANSI escapes, backspaces, ^A.
    The last block overlaps the one before, so that no short one is judged alone."""
    values = np.frombuffer(data, np.uint8)
    odd = (values < 8) & (values != 1) | (values >= 14) & (values <= 25)
    if np.count_nonzero(odd) < 8:
        return None
    last = max(0, len(data) - BLOCK)
    for first in [*range(0, last, BLOCK), last]:
        block = odd[first : first + BLOCK]
        zeros = data.count(0, first, first + BLOCK)
        if zeros >= 8 or np.count_nonzero(block) >= max(8, len(block) / 8):
            return first + int(np.argmax(block))
    return None


def no_text(data: bytes, odd: int, before: int) -> Unreadable:
    """The error for bytes that are no text, the first odd one at `odd` in `data`, which comes after
    so many bytes."""
    where = f"from byte {before + odd} on, it"
    first = min(odd - odd % BLOCK, max(0, len(data) - BLOCK) // 4 * 4)
    for name, size, step in UTF:
        for start in first, odd - step:  # the second is where another encoding may begin
            block = data[max(0, start) :][:BLOCK]
            text = re.sub("[\t\r\n]", " ", block.decode(name, "replace").replace("\ufffd", ""))
            is_whole = sum(map(str.isprintable, text)) > 0.9 * len(block) / size
            if is_whole and text.count(" ") > len(text) / 256:
                cure = ICONV.format(name)
                if before + odd >= BLOCK:
                    cure = f"convert that part alone, from {name}, or get it again"
                return Unreadable(f"{where} is {name}", cure)
    block = data[first:][:BLOCK]
    rest = block.replace(b"\0", b"")
    if find_odd(rest) is None and rest.decode("utf-8", "replace").count("\ufffd") < 3:
        cure = "get it again, or delete them: tr -d '\\000' < FILE > NEW"
        if b"\0\0" not in block and len(rest) > 0.8 * len(block):
            cure = "make them newlines: tr '\\000' '\\n' < FILE > NEW"
        return Unreadable(f"{where} has zero bytes in place of text", cure)
    return Unreadable(f"{where} has binary data in place of text")


def regroup(chunks: Iterable[bytes]) -> Iterator[bytes]:
    """Yields the same bytes in whole blocks, and at last one to two blocks, or all if there are
    fewer, so that find_odd judges the same blocks however a file is packed."""
    waiting = b""
    for data in chunks:
        waiting += data
        whole = len(waiting) // BLOCK * BLOCK - BLOCK
        if whole > 0:
            yield waiting[:whole]
            waiting = waiting[whole:]
    yield waiting


def unpacked(path: pathlib.Path, message: str) -> str:
    """A message on a file, also if it is packed, although its commands are for unpacked text."""
    is_command = " FILE > NEW" in message and path.suffix.lower() in PACKED
    return f"{message}, where FILE is unpacked" if is_command else message


def decode(chunks: Iterable[bytes], may_be_html: bool) -> Iterator[str]:
    """Decodes UTF-8, without a byte order mark in front. Raises Unreadable if it is no text."""
    decoder = codecs.getincrementaldecoder("utf-8-sig")()
    size = 0
    newlines = 0
    for data in itertools.chain(filter(None, regroup(chunks)), [b""]):
        if size == 0:
            check_start(data[:512].removeprefix(codecs.BOM_UTF8), None, may_be_html)
        odd = find_odd(data)
        switch = ISO_2022.search(data)
        if odd is not None and not (switch and data.isascii()):
            raise no_text(data, odd, size)
        if switch:
            name = "ISO-2022-KR" if switch[0].endswith(b"C") else "ISO-2022-JP"
            what = f"from byte {size + switch.start()} on, it is {name}"
            raise Unreadable(what, ICONV.format(name))
        size += len(data)
        try:
            yield decoder.decode(data, final=not data)
        except UnicodeDecodeError as error:
            bad = error.object
            first = error.start
            place = size - len(bad) + first
            if 0 in bad[first - first % BLOCK :][:BLOCK]:
                raise no_text(bad, first, place - first) from None
            line = 1 + newlines + bad.count(b"\n", 0, first)
            what = f"line {line} is not UTF-8 at byte {place}, 0x{bad[first]:02x} ({error.reason})"
            raise Unreadable(what, how_to_convert(bad) if data else CUT_OFF) from None
        newlines += data.count(b"\n")


def how_to_convert(data: bytes) -> str:
    """What to do about bytes that are not UTF-8: if most are, few characters are broken."""
    text = data.decode("utf-8", "replace")
    broken = text.count("\ufffd")
    others = sum(c > "\x7f" for c in text) - broken
    return DROP if others > broken else ICONV.format("ENCODING") + ENCODINGS


# ---- Readers -------------------------------------------------------------------------------------
def unpack(path: pathlib.Path, raw: io.BufferedReader) -> Iterator[bytes]:
    """Yields the decompressed bytes of a file, in chunks; raises EOFError if it is cut off."""
    suffix = path.suffix.lower()
    if suffix == ".zst":
        yield from unpack_zstd(path, raw)
        return
    file = gzip.GzipFile(fileobj=raw) if suffix == ".gz" else raw
    while True:
        data = file.read(CHUNK)
        if not data:
            return
        yield data


def unpack_zstd(path: pathlib.Path, raw: io.BufferedReader) -> Iterator[bytes]:
    """Yields the decompressed bytes of a zstd file, which may have several frames."""
    zstd = module(path).ZstdDecompressor(max_window_size=2**31)  # that of zstd --long=31
    frame = None
    while True:
        data = raw.read(CHUNK // 128)  # little, because it may expand a thousandfold
        if not data:
            break
        while data:
            if frame is None:
                frame = zstd.decompressobj()
            yield frame.decompress(data)
            data = frame.unused_data
            if frame.eof:
                frame = None
    if frame is not None:
        raise EOFError("it ends within a frame")


def lines(texts: Iterable[str]) -> Iterator[str]:
    """The lines of a text, with their ends. Only \\n ends a line."""
    parts = []  # of a line, which may be in many texts
    for text in texts:
        *ends, rest = text.split("\n")
        for end in ends:
            line = "".join([*parts, end, "\n"]) if parts else end + "\n"
            parts = []
            yield line
        if rest:
            parts.append(rest)
    last = "".join(parts)
    if last:
        yield last


def row_text(row: Any, column: str, where: str) -> str:
    """The text in a row of a file; raises Unreadable if there is none."""
    text = row.get(column) if isinstance(row, dict) else row
    if isinstance(row, dict) and column not in row:
        raise no_column(f"{where} has", column, row)
    if not isinstance(text, str) or text is row:
        raise Unreadable(
            f'{where} has no string "{column}", but a value of type {type(text).__name__}'
        )
    if "\0" in text and find_odd(text.encode("utf-8", "surrogatepass")) is not None:
        cure = "correct that row, or leave it out"
        raise Unreadable(f"{where} has zero bytes in place of text", cure)
    return text


def no_column(begin: str, column: str, names: Iterable[str]) -> Unreadable:
    """The error for a row or a file without a field or column, which has those called `names`."""
    there = ", ".join(names)[:200] or "nothing"
    return Unreadable(f'{begin} no "{column}", but {there}', "name the one to read with --column")


def jsonl(texts: Iterable[str], column: str) -> Parts:
    """Reads a field of every line that is not blank; raises Unreadable if a line has no such
    field."""
    for number, line in enumerate(lines(texts), 1):
        # Concatenated files have marks in the middle, and old DOS files end with ^Z.
        line = line.removeprefix("\ufeff").removesuffix("\x1a")
        if not line or line.isspace():
            continue
        where = f"line {number}"
        if number == 1 and line.startswith("["):
            raise Unreadable("it is a JSON array", "jq -c '.[]' FILE > NEW.jsonl")
        try:
            row = json.loads(line)
        except (ValueError, RecursionError):
            cure = "there must be one JSON object a line, as  jq -c . FILE > NEW.jsonl  writes them"
            raise Unreadable(f"{where} is not JSON", cure) from None
        text = row_text(row, column, where)
        if "\\u" in line and HALF_PAIR.search(text):  # it becomes U+FFFD, as in tiktoken
            text = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
        yield text
        yield None


def parquet(path: pathlib.Path, raw: io.BufferedReader, column: str) -> Parts:
    """Reads a column; raises Unreadable if the file has no such column."""
    file = module(path).ParquetFile(raw, buffer_size=CHUNK)
    names = file.schema_arrow.names
    if column not in names:
        raise no_column("it has", column, names)
    number = 0
    for batch in file.iter_batches(64, columns=[column], use_threads=False):
        for text in batch.column(0).to_pylist():
            number += 1
            yield row_text({column: text}, column, f"row {number}")
            yield None


def separated(texts: Iterable[str], separator: str, counts: collections.Counter) -> Parts:
    """Reads documents that end at a line equal to `separator`, or at each MARK if that is the
    separator. An empty file is an empty document, but an empty rest after the last separator is
    not. Counts the separators, and the lines that would be one without the spaces around them."""
    inner = separator.strip()
    ended = False
    for line in lines(texts):
        ended = False
        if separator == MARK and MARK in line:
            *whole, rest = line.split(MARK)
            for text in whole:
                yield text
                yield None
            counts["separators"] += len(whole)
            ended = not rest.strip()  # the end of the line belongs to the separator
            if not ended:
                yield rest
        elif separator in line and bare(line) == separator:
            yield None
            counts["separators"] += 1
            ended = True
        else:
            counts["nearly"] += inner in line and bare(line).strip() == inner
            yield line
    if not ended:
        yield None


def bare(line: str) -> str:
    """A line without its end and without a byte order mark, as concatenated files have them."""
    return line.removesuffix("\n").removesuffix("\r").removeprefix("\ufeff")


def documents(
    path: pathlib.Path, raw: io.BufferedReader, args: Any, counts: collections.Counter
) -> Parts:
    """Reads the documents of a file by the reader for its suffix."""
    promised = PACKED.get(path.suffix.lower())
    if promised:
        start = raw.peek(512)[:512]
        if not start:
            raise Unreadable("it is empty", "get it again, or leave it out")
        check_start(start, promised, False)
    if promised == "parquet":
        return parquet(path, raw, args.column)
    texts = decode(unpack(path, raw), is_plain(path))
    if not is_plain(path):
        return jsonl(texts, args.column)
    if args.separator is None:
        return itertools.chain(texts, [None])
    return separated(texts, args.separator, counts)


def unmatched(paths: list[pathlib.Path], separator: str) -> Unreadable:
    """The error if no line of the texts equals `separator`, with what comes closest to it."""
    if not paths:
        return Unreadable("--separator is for .txt and .md, and there are none", "leave it out")
    none = f"no line equals --separator {quote(separator)}"
    wanted = core(separator)
    inner = separator.strip()
    use_mark = f"--separator {quote(MARK)}"
    has_marks = False
    for path in paths:
        with path.open("rb") as raw:
            for number, line in enumerate(lines(decode(unpack(path, raw), True)), 1):
                where = f"line {number} of {path}"
                if core(line) == wanted:
                    cure = f"--separator {quote(bare(line))} matches that"
                    return Unreadable(f"{none}, but {where} almost does", cure)
                has_marks = has_marks or MARK in line
                if inner == "" or inner not in line:
                    continue
                place = max(0, line.index(inner) - 20)
                there = ascii(line[place : place + min(len(inner), 100) + 40])
                cure = "put it on lines of its own"
                if MARK in line:
                    cure = use_mark
                elif "\r" in bare(line):
                    cure = "end lines as Linux does: tr '\\r' '\\n' < FILE > NEW"
                what = f"{none}; {where} has it as a part, {there}"
                return Unreadable(what, unpacked(path, cure))
    if has_marks:
        return Unreadable(f"{none}, but {MARK} is there", use_mark)
    return Unreadable(none, "look at what divides the documents, or leave the flag out")


def core(line: str) -> str:
    """What remains of a line without spaces, capital letters, HTML's escapes, characters that
    cannot be seen, and forms of a character that Unicode takes for the same."""
    if not line.isascii() or "&" in line:
        line = unicodedata.normalize("NFKC", html.unescape(line))
        line = "".join(c for c in line if unicodedata.category(c) != "Cf")
    return "".join(line.split()).casefold()


def quote(text: str) -> str:
    """A text as one types it in a shell, in any locale."""
    if text.isprintable():
        return shlex.quote(text)
    quoted = ""
    for c in text:
        if c.isprintable() and c not in "\\'":
            quoted += c
        else:
            quoted += "".join(f"\\x{byte:02x}" for byte in c.encode("utf-8", "surrogateescape"))
    return f"$'{quoted}'"
