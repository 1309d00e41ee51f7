"""Shards of tokens in llm.c's format: reading, checking and writing them, and folders of them.

A shard is a header of 1,024 bytes and tokens of 16 bits; data/README.md has the format. A folder
has one set of shards and, if our scripts made it, MANIFEST.json, which lists them with their
sha256.
"""

import hashlib
import json
import os
import re
import struct
from collections.abc import Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
from messages import refuse

MAGIC, VERSION = 20240520, 1  # llm.c's dev/data/data_common.py
HEADER = 1024  # bytes
GPT2 = dict(vocab=50257, eot=50256)
NAME = re.compile(r"([^./][^/]*)_(train|val)_([0-9]{6})[.]bin")  # of a shard


# ---- Tokenizers ----------------------------------------------------------------------------------
def coder(vocab: int, eot: int) -> SimpleNamespace:
    """encode(text) -> tokens, and piece(token) -> bytes: of UTF-8 bytes (vocab 257, as `tiny` has)
    or of GPT-2's tokens. Ends the tool for any other vocabulary."""
    if (vocab, eot) == (257, 256):
        encode = lambda text: [*text.encode("utf-8", "surrogateescape")]
        return SimpleNamespace(encode=encode, piece=lambda token: bytes([token]))
    if (vocab, eot) != (GPT2["vocab"], GPT2["eot"]):
        refuse(f"there is a tokenizer for bytes and for GPT-2's tokens, none for {vocab}")
    bpe = gpt2()
    return SimpleNamespace(encode=bpe.encode_ordinary, piece=bpe.decode_single_token_bytes)


def gpt2() -> Any:
    """tiktoken's GPT-2 encoding, which it downloads once, or takes from TIKTOKEN_CACHE_DIR."""
    import tiktoken  # here, because few tools need it

    return tiktoken.get_encoding("gpt2")


# ---- Reading -------------------------------------------------------------------------------------
def load(path: Path) -> np.memmap:
    """The tokens of a shard, (N,) of uint16, mapped. Raises ValueError with what is wrong if the
    file is no shard or not whole, or has zeros in place of tokens, which a run would learn."""
    header = np.fromfile(path, "<i4", 3).tolist()
    if header[:2] != [MAGIC, VERSION] or len(header) < 3:
        raise ValueError(f"{path.name} is no token shard (llm.c's format, version 1)")
    count = header[2]
    size = path.stat().st_size
    promised = HEADER + 2 * count
    if count < 1 or size != promised:
        raise ValueError(
            f"{path.name} has {size} bytes, its header promises {promised}: get it again"
        )
    tokens = np.memmap(path, "<u2", "r", offset=HEADER, shape=(count,))
    if count > 1 and not (tokens[: 2**20 : 2].any() and tokens[1 : 2**20 : 2].any()):
        raise ValueError(
            f"{path.name} has tokens of 32 bits: every second one is 0; write them as 16"
        )
    half = min(count, 1024)  # of a disk's block
    if not tokens[: count // half * half].reshape(-1, half).any(axis=1).all():
        raise ValueError(f"{path.name} has a hole: {half} zeros in place of tokens")
    return tokens


def sha256(path: Path) -> str:
    """The sha256 of a file's bytes, in hexadecimal; "" if there is no file."""
    if not path.is_file():
        return ""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def tokens(folder: Path, split: str) -> np.ndarray:
    """All tokens of the train or val shards of a folder in order, (N,) of uint16; several shards
    are copied into memory. Ends the tool if the folder or a shard is not right."""
    try:
        names = read_folder(folder)[1]
        parts = [load(folder / name) for name in names if NAME.fullmatch(name)[2] == split]
    except ValueError as error:
        refuse(f"{folder}: {error}")
    return parts[0] if len(parts) == 1 else np.concatenate(parts)


# ---- Folders -------------------------------------------------------------------------------------
def sums(folder: Path) -> dict[str, str]:
    """The sha256 of each shard of a folder, by name."""
    return {path.name: sha256(path) for path in sorted(folder.glob("[!.]*.bin"))}


def check(folder: Path, found: dict[str, str]) -> None:
    """Ends the tool if these shards of a folder, with the sha256 of each, are no shards, have not
    the sha256 of MANIFEST.json, or do not belong together."""
    try:
        stated = read_folder(folder)[0].get("files", {})
        for name, its_sha256 in found.items():
            load(folder / name)
            if stated.get(name, dict(sha256=its_sha256))["sha256"] != its_sha256:
                raise ValueError(f"{name} is damaged: its sha256 is not MANIFEST.json's")
    except ValueError as error:
        refuse(f"{folder}: {error}")


def read_manifest(folder: Path) -> dict[str, Any]:
    """MANIFEST.json: `source`, `vocab`, `eot` and `files`; {} if there is none."""
    path = folder / "MANIFEST.json"
    return json.loads(path.read_bytes()) if path.exists() else {}


def read_folder(folder: Path) -> tuple[dict[str, Any], list[str]]:
    """MANIFEST.json, and the names of the shards that it lists or that are in the folder, train
    before validation. Raises ValueError unless they are one set, numbered without a gap: training
    would read two sets as one, and could not see what is missing."""
    if not folder.is_dir():
        raise ValueError("there is no such folder: data/README.md says how to make or get shards")
    about = read_manifest(folder)
    present = [path.name for path in folder.glob("[!.]*.bin")]
    prefixes = set()
    shards = {"train": [], "val": []}
    for name in sorted({*present, *about.get("files", ())}):
        match = NAME.fullmatch(name)
        if not match:
            raise ValueError(f"{name} is not called NAME_train_NNNNNN.bin: rename it, or move it")
        prefixes.add(match[1])
        shards[match[2]].append(name)
    if len(prefixes) > 1:
        sets = ", ".join(sorted(prefixes))
        raise ValueError(f"it has shards of several sets, {sets}: give each its own folder")
    for split, names in shards.items():
        if not names:
            raise ValueError(f"it has no {split} shard: data/README.md says how to make some")
        first = int(names[0][-10:-4] != "000000")
        for number, name in enumerate(names, first):
            if int(name[-10:-4]) != number:
                raise ValueError(f"it lacks {split} shard {number}, before {name}: get it")
    return about, shards["train"] + shards["val"]


# ---- Writing -------------------------------------------------------------------------------------
def header(count: int) -> bytes:
    """The first 1024 bytes of a shard of `count` tokens, all numbers little-endian."""
    return struct.pack("<3i1012x", MAGIC, VERSION, count)


def write(path: Path, parts: Iterable[bytes]) -> dict[str, Any]:
    """Writes a file completely or not at all, even if two processes write it at once. Returns its
    size and sha256. Each part is bytes or a contiguous array."""
    path.parent.mkdir(parents=True, exist_ok=True)
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


def write_manifest(folder: Path, source: str, vocab: int, eot: int, files: dict) -> None:
    """Writes MANIFEST.json: where the tokens come from, the vocabulary, and for each file its
    `sha256`, `revision` if a hub states one, `documents` if we counted their starts. The same
    content is not written again, because the folder may be read-only."""
    about = dict(source=source, vocab=vocab, eot=eot, files=dict(sorted(files.items())))
    text = json.dumps(about, indent=1).encode() + b"\n"
    path = folder / "MANIFEST.json"
    if not path.is_file() or path.read_bytes() != text:
        write(path, [text])
