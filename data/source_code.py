"""The embedded data set: the Python source of two pinned dependencies, as byte-level tokens.

    python data/source_code.py [--out DIR]

It needs no download: pip has already installed the text. A token is a byte of UTF-8 (0..255) or
EOT (256), which begins every document. A document is one function, one method, or the text between
two of them, up to 2,048 bytes. Some files are used for validation only. The shards are in llm.c's
format, like FineWeb's, and must have the sha256 in SHARDS below.
"""

import argparse
import ast
import collections
import hashlib
import importlib.util
import pathlib
import sys

import numpy as np

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent))  # for PYTHONSAFEPATH=1
import shards
from messages import one_line, refuse

PACKAGES = {"optax": "0.2.8", "huggingface_hub": "2.4.0"}  # the pins of requirements.txt
SOURCE = " ".join(map("==".join, PACKAGES.items()))
SHARDS = {  # name: sha256
    "source_train_000001.bin": "1a9b61a147d894ec0ee7289c1f88f6725355af3218985db9b4dc21d7e345a063",
    "source_train_000002.bin": "74c2d9b68d4d17bda99679cbd11744f046adc966967cfb7edb80433a0a708c75",
    "source_val_000000.bin": "eb0c3850de1d7907726f5284d57b12f871789a36f2f8255625e055ee5e205534",
}
EOT = 256
FOLDER = pathlib.Path(__file__).resolve().parent / "source_code"
MAX_BYTES = 2048  # of a document: otherwise one list of names would have 34,000
FIRST_SHARD_TOKENS = 600_000  # the rest is in the second shard, which longer runs of tiny read

# A file may be used for validation if few of its lines are in other files, too. This excludes twins
# such as inference/_client.py and inference/_generated/_async_client.py, and families such as
# optax's aliases: their loss would measure recall.
LONG_LINE = 40  # bytes; shorter lines are not compared, because many files have them
MAX_SHARED_LINES = 0.1  # of the long lines
HELD_OUT = 0.14  # the share of all files from which validation files are chosen


def read_files() -> dict[str, bytes]:
    """{path: source} of all modules. The comment at the top of a file, its licence, is left out
    because it is the same everywhere."""
    files = {}
    for package in PACKAGES:
        folder = pathlib.Path(importlib.util.find_spec(package).origin).parent
        for path in folder.rglob("*.py"):
            lines = path.read_bytes().splitlines(keepends=True)
            while lines and lines[0].startswith(b"#"):
                lines.pop(0)
            files[f"{package}/{path.relative_to(folder).as_posix()}"] = b"".join(lines)
    return dict(sorted(files.items()))


def held_out(files: dict[str, bytes]) -> set[str]:
    """The validation files: chosen by a hash of their path, so that the choice never changes, from
    those that share few long lines with any other file."""
    long_lines = {
        path: {line for line in map(bytes.strip, text.splitlines()) if len(line) > LONG_LINE}
        for path, text in files.items()
    }
    count = collections.Counter(line for lines in long_lines.values() for line in lines)
    chosen = set()
    for path, lines in long_lines.items():
        draw = int(hashlib.sha256(path.encode()).hexdigest()[:8], 16) / 2**32
        shared = sum(count[line] > 1 for line in lines)
        if draw < HELD_OUT and shared <= MAX_SHARED_LINES * len(lines):
            chosen.add(path)
    return chosen


def definitions(text: bytes) -> list[ast.stmt]:
    """The functions, classes and methods of a file, without functions inside functions."""
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
    top = [node for node in ast.parse(text).body if isinstance(node, kinds)]
    classes = [node for node in top if isinstance(node, ast.ClassDef)]
    methods = [node for owner in classes for node in owner.body if isinstance(node, kinds)]
    return top + methods


def documents(text: bytes) -> list[bytes]:
    """Cuts a file before and after every definition, with the comments right above it. Each piece
    is cut off at MAX_BYTES, as modded-nanogpt since its record 29 cuts documents at 2,048
    tokens."""
    lines = text.splitlines(keepends=True)  # bytes split at newlines only, as ast counts lines
    cuts = {0, len(lines)}
    for node in definitions(text):
        start = min(part.lineno for part in [node, *node.decorator_list]) - 1
        while start > 0 and lines[start - 1].lstrip().startswith(b"#"):
            start -= 1
        cuts |= {start, node.end_lineno}
    cuts = sorted(cuts)
    pieces = [b"".join(lines[a:b]) for a, b in zip(cuts, cuts[1:], strict=False)]
    return [(piece.strip(b"\n") + b"\n")[:MAX_BYTES] for piece in pieces if piece.strip()]


def build() -> dict[str, list[bytes]]:
    """The documents of each shard, by its name: without duplicates, and in the order of their
    hashes, which is as good as random."""
    files = read_files()
    val_files = held_out(files)
    in_train = set()
    in_val = set()
    for path, text in files.items():
        if path in val_files:
            in_val.update(documents(text))
        else:
            in_train.update(documents(text))
    by_hash = lambda document: hashlib.sha256(document).digest()
    train = sorted(in_train - in_val, key=by_hash)
    val = sorted(in_val, key=by_hash)
    ends = np.cumsum([1 + len(document) for document in train])  # in tokens
    cut = int(np.searchsorted(ends, FIRST_SHARD_TOKENS))
    return dict(zip(SHARDS, (train[:cut], train[cut:], val), strict=True))


def encode(shard: list[bytes]) -> bytes:
    """A shard in llm.c's format: 256 int32 of header, then the tokens as uint16."""
    parts = []
    for document in shard:
        parts += [[EOT], np.frombuffer(document, np.uint8)]
    tokens = np.concatenate(parts).astype("<u2")
    return shards.header(len(tokens)) + tokens.tobytes()


def make(out: pathlib.Path) -> None:
    """Makes the shards and their manifest in `out`, unless they are there with the right sha256.
    Ends the tool if the packages are not the pinned ones."""
    if {name: shards.sha256(out / name) for name in SHARDS} != SHARDS:
        encoded = {name: encode(documents) for name, documents in build().items()}
        if {name: hashlib.sha256(data).hexdigest() for name, data in encoded.items()} != SHARDS:
            refuse(f"this is not the source of the pinned packages: install {SOURCE} again")
        for name, data in encoded.items():
            shards.write(out / name, [data])
            print(f"made {out / name}, sha256 {SHARDS[name]}")
    files = {name: dict(sha256=digest) for name, digest in SHARDS.items()}
    shards.write_manifest(out, SOURCE, vocab=257, eot=EOT, files=files)


@one_line("source_code.py")
def main() -> None:
    cli = argparse.ArgumentParser(description="Makes the shards of the embedded data set.")
    cli.error = refuse
    cli.add_argument("--out", type=pathlib.Path, default=FOLDER, help="folder for the shards")
    make(cli.parse_args().out)


if __name__ == "__main__":
    main()
