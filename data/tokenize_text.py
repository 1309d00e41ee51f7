"""Turns your own text into shards that train_gpt.py reads: GPT-2 tokens, or the bytes of UTF-8.

    ./run.sh tokenize PATH... --out DIR [--bytes] [--separator=LINE] [--column NAME] ...

data/README.md has the kinds of files. Every document begins with an end-of-text token, and so does
every shard, also where it continues a document, because train_gpt.py refuses a shard without one.
"<|endoftext|>" in a text is encoded as ordinary text, unless it is the separator. The first tokens
are the validation set, as in llm.c's FineWeb. The last line printed is a command that trains on the
shards.
"""

import argparse
import functools
import itertools
import os
import re
import shlex
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent))  # for PYTHONSAFEPATH=1
import readers
import shards
from messages import one_line, refuse
from readers import MARK, Counts, Parts

PIECE = 2**18  # characters: a document is cut where a token certainly ends, after so many or more
VAL_TOKENS = 10_485_762  # the record's validation reads all but two, which must be left over

# What `tiny` reads. A test compares with train_gpt.py, which would need 200 MB here, for JAX.
TINY_STEPS, TINY_BATCH = 187, 384  # of the batch, tokens
TINY_VAL, VAL_SEQUENCES = 65536, 8  # tokens; sequences of a batch
VAL_LENGTHS = (1024, 256, 128)  # of a sequence, its own first; cuDNN needs multiples of 128

# The fewest tokens of a shard: eight validation sequences of 128, or two steps of `tiny`. One more
# is needed, because the last token that the model reads has a target, too.
SMALLEST = 1025

# GPT-2's pattern has no match that goes on from another character to white space. A text can be cut
# there: the tokens on both sides stay the same.
BEFORE_SPACE = re.compile(r"\S(?=[ \t\r\n])")


# ---- Tokens --------------------------------------------------------------------------------------
def pieces(parts: Parts) -> Iterator[tuple[bool, str]]:
    """Yields whether a document begins, and text to encode in one call: a document, or a part of
    one, cut where a token certainly ends. Leaves out empty documents."""
    rest = ""
    begins = True
    for part in parts:
        rest += part or ""
        start = 0
        match = BEFORE_SPACE.search(rest, PIECE)
        while match:
            yield begins, rest[start : match.end()]
            begins = False
            start = match.end()
            match = BEFORE_SPACE.search(rest, start + PIECE)
        rest = rest[start:]
        if part is None:
            if rest:
                yield begins, rest
            rest = ""
            begins = True


def write_tokens(path: Path, inputs: list[Path], args: argparse.Namespace) -> Counts:
    """Writes the tokens of all documents to a file, uint16, each document behind an EOT."""
    counts = Counts()
    encode = lambda text: np.frombuffer(text.encode(), np.uint8)
    if not args.bytes:  # as encode_ordinary, but without a list of Python integers
        encode = functools.partial(shards.gpt2().encode_to_numpy, disallowed_special=())
    with path.open("wb") as file:
        for source in inputs:
            parts = readers.documents(source, args.column or "text", args.separator, counts)
            for begins, text in pieces(parts):
                counts.documents += begins
                counts.marks += text.count(MARK)
                if begins:
                    file.write(np.array([args.eot], "<u2"))
                file.write(encode(text).astype("<u2"))
    return counts


# ---- Shards --------------------------------------------------------------------------------------
def blocks(stream: Path, start: int, end: int) -> Iterator[np.ndarray]:
    """Reads tokens of a file, from one place to another. What is mapped would stay in memory."""
    for place in range(start, end, 2**20):
        yield np.fromfile(stream, "<u2", min(2**20, end - place), offset=2 * place)


def write_shards(folder: Path, stream: Path, args: argparse.Namespace) -> dict[str, dict]:
    """Cuts the tokens of all documents into shards. Returns their rows of MANIFEST.json, validation
    first. A shard that would begin inside a document gets an EOT in front. Ends the tool if there
    is too little text."""
    size = stream.stat().st_size // 2
    val = args.val_tokens or max(SMALLEST, min(size // 10, VAL_TOKENS))
    if size < val + SMALLEST:
        refuse(f"{size} tokens are too few for {val} of validation and {SMALLEST} of training")
    rows = {}
    cuts = [0, *range(val, size, args.shard_tokens), size]
    for number, (start, end) in enumerate(itertools.pairwise(cuts)):
        first = next(blocks(stream, start, end))[0]
        front = np.array([args.eot] * bool(first != args.eot), "<u2")
        count = len(front) + end - start
        starts = sum(int((part == args.eot).sum()) for part in blocks(stream, start, end))
        documents = len(front) + starts
        parts = itertools.chain([shards.header(count), front], blocks(stream, start, end))
        name = f"text_{'train' if number else 'val'}_{number:06}.bin"
        row = shards.write(folder / name, parts)
        rows[name] = dict(**row, documents=documents)
        print(f"{name} tokens:{count} documents:{documents} sha256:{row['sha256'][:16]}...")
    return rows


# ---- The command that trains ---------------------------------------------------------------------
def training_flags(val: int, train: list[int], args: argparse.Namespace) -> dict[str, int]:
    """The flags with which `tiny` trains on shards of so many tokens, each at least SMALLEST. A
    flag with the preset's own value is left out."""
    flags = {} if args.bytes else dict(shards.GPT2)
    flags["target"] = 0  # the preset's own is the loss on another text, at which a run stops
    # The last target of a step is the first token of the next one; the rest of a shard is dropped.
    most = sum((tokens - 1) // TINY_BATCH for tokens in train)
    if most < TINY_STEPS:
        flags["steps"] = most
    if val <= TINY_VAL:
        val_T = [T for T in VAL_LENGTHS if VAL_SEQUENCES * T < val][0]
        batch = VAL_SEQUENCES * val_T
        flags["val_tokens"] = (val - 1) // batch * batch
        if val_T != VAL_LENGTHS[0]:
            flags["val_T"] = val_T
    return flags


# ---- Run -----------------------------------------------------------------------------------------
def parse(argv: list[str]) -> argparse.Namespace:
    """The command line's arguments, and the end-of-text token as `eot`."""
    about = "Turns your own text into shards that train_gpt.py reads."
    cli = argparse.ArgumentParser(prog="./run.sh tokenize", description=about, allow_abbrev=False)
    cli.error = refuse
    add = cli.add_argument
    add("paths", nargs="+", type=Path, metavar="PATH", help="folders, or files of any text")
    add("--out", type=Path, required=True, metavar="DIR", help="new folder for the shards")
    suffix = "in folders, also read files with this suffix, such as .py, as text (may be repeated)"
    add("--also", action="append", default=[], metavar="SUFFIX", help=suffix)
    add("--bytes", action="store_true", help="make a token of each byte: tiny trains faster")
    shard_size = "tokens in a training shard; the last one may have fewer (default: %(default)s)"
    add("--shard_tokens", type=int, default=10**8, metavar="N", help=shard_size)
    val_size = "tokens in the validation shard (default: a tenth of all, within limits)"
    add("--val_tokens", type=int, metavar="N", help=val_size)
    ends = f"in .txt and .md, a line that ends a document; {MARK} ends one within a line, too"
    add("--separator", metavar="LINE", help=ends)
    column = "the field of JSON lines or column of parquet with the text; a.b is within a; [text]"
    add("--column", metavar="NAME", help=column)
    args = cli.parse_args(argv)
    args.eot = 256 if args.bytes else shards.GPT2["eot"]
    return args


@one_line("tokenize_text.py")
def main() -> None:
    args = parse(sys.argv[1:])
    out = args.out.resolve()
    if out.exists() and [*out.iterdir()]:
        refuse(f"{out} is not empty: remove it, or choose another --out")
    inputs = readers.find(args.paths, tuple(f".{suffix.lstrip('.')}" for suffix in args.also))
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".part-", dir=out.parent) as unfinished:
        stream = Path(unfinished) / "tokens"
        counts = write_tokens(stream, inputs, args)
        if args.separator is not None and not counts.separators:
            refuse(f"no line equals --separator {shlex.quote(args.separator)}")
        if args.column is not None and not counts.rows:
            refuse(f"no file has rows, with fields or columns, for --column {args.column}")
        skipped = f"{counts.skipped} of {counts.rows} rows have no text; the first: {counts.first}"
        if 100 * counts.skipped > counts.rows:
            refuse(skipped)
        part = Path(unfinished) / "shards"
        rows = write_shards(part, stream, args)
        kind = "UTF-8 bytes" if args.bytes else "GPT-2's tokens"
        source = f"{kind} of {len(inputs)} files, {counts.documents} documents"
        vocab = 257 if args.bytes else shards.GPT2["vocab"]
        shards.write_manifest(part, source, vocab, args.eot, rows)
        os.rename(part, out)  # all at once, and only if nothing is there by now
    print(f"{source}, in {args.out}")
    if counts.skipped:
        print(skipped)
    if counts.marks and args.separator != MARK:
        print(f"{MARK} is ordinary text there; --separator '{MARK}' makes it end documents")
    val, *train = [(row["size"] - shards.HEADER) // 2 for row in rows.values()]
    flags = training_flags(val, train, args)
    words = " ".join(f"--{flag} {value}" for flag, value in flags.items())
    print(f"Train on it:\n./run.sh tiny --data {shlex.quote(str(args.out))} {words}")


if __name__ == "__main__":
    main()
