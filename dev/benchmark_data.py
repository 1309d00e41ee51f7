"""How fast tokens are read, checked and made; writes records/data_throughput.md.

    TIKTOKEN_CACHE_DIR=... python dev/benchmark_data.py TEXT... [--out FILE]

TEXT are .txt files, repeated to 64 MB. Every figure is the best of three, all from one run
of an otherwise idle machine.
"""

import argparse
import functools
import json
import os
import pathlib
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable

import numpy as np
import tiktoken

ROOT = pathlib.Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "data")]

import shards  # noqa: E402

import train_gpt  # noqa: E402

TOKENS = 100_000_000  # as many as a shard of FineWeb has
TEXT_BYTES = 64_000_000
RECORD = train_gpt.PRESETS["record"]


def best(work: Callable[[], int]) -> float:
    """Millions of what `work` returns, a second."""
    timed = ((time.perf_counter(), work(), time.perf_counter()) for _ in range(3))
    return max(count / (ended - began) / 1e6 for began, count, ended in timed)


def read(path: pathlib.Path, cold: bool = False) -> int:
    """Reads the batches of the record, whose steps hold more tokens than a shard; cold: not
    from the page cache."""
    if cold:
        with path.open("rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    shard = np.memmap(path, "<u2", "r", offset=shards.HEADER)
    shapes = train_gpt.batch_shapes("train", RECORD)
    return sum(batch[:, :-1].size for batch in train_gpt.read_batches([shard], shapes, RECORD))


def reader_rates(folder: pathlib.Path) -> dict[str, float]:
    """Of random tokens, on one core."""
    path = folder / "x_train_000001.bin"
    tokens = np.random.default_rng(0).integers(0, 50257, TOKENS, dtype="<u2")
    shards.write(path, [shards.header(TOKENS), tokens])
    cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(cores)})  # reading is measured on one core
    rates = {
        "stream of the record, shard in memory": best(lambda: read(path)),
        "the same, shard on the disk": best(lambda: read(path, cold=True)),
        "pass of check.py over the bytes": best(lambda: shards.inspect(path, 50256)["tokens"]),
    }
    os.sched_setaffinity(0, cores)
    return rates


def tokenizer_rates(folder: pathlib.Path, paths: list[pathlib.Path]) -> dict[str, float]:
    """Per core; a document is a hundredth of the files."""
    text = "".join(path.read_text(encoding="utf-8") for path in paths)
    size = len(text) // 100 + 1
    documents = [text[i : i + size] for i in range(0, len(text), size)]
    documents *= TEXT_BYTES // len(text.encode()) + 1
    source, threads = folder / "in.jsonl", len(os.sched_getaffinity(0))
    source.write_text("".join(json.dumps(dict(text=text)) + "\n" for text in documents))
    encoding, runs = tiktoken.get_encoding("gpt2"), iter("abc")

    def encode() -> int:
        """Tokens that tiktoken makes."""
        return sum(map(len, batch()))

    def tokenize() -> int:
        """Tokens that the script makes, without those that start documents."""
        out = folder / next(runs)
        script = [sys.executable, ROOT / "data" / "tokenize_text.py", source, "--out", out]
        subprocess.run(script, check=True, capture_output=True)
        found = shards.check(out, *shards.read_folder(out))
        return sum(facts["tokens"] for _, facts, _ in found) - len(documents)

    batch = functools.partial(encoding.encode_ordinary_batch, documents, num_threads=threads)
    return {
        f"tiktoken's encode_ordinary_batch, {threads} threads": best(encode) / threads,
        f"tokenize_text.py, {threads} threads, from start to end": best(tokenize) / threads,
    }


def main() -> None:
    """Measures and writes the table."""
    cli = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    cli.add_argument("text", type=pathlib.Path, nargs="+")
    cli.add_argument("--out", type=pathlib.Path, default=ROOT / "records" / "data_throughput.md")
    args = cli.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        rates = reader_rates(folder) | tokenizer_rates(folder, args.text)
    cpu = pathlib.Path("/proc/cpuinfo").read_text().partition("model name")[2].split("\n")[0][3:]
    versions = f"Python {platform.python_version()}, numpy {np.__version__}"
    rows = "\n".join(f"| {what} | {rate:.2f} |" for what, rate in rates.items())
    text = f"""# Tokens read and made, millions a second and core

By `dev/benchmark_data.py`: {cpu}, {len(os.sched_getaffinity(0))} cores, {versions},
tiktoken {tiktoken.__version__}; the best of three, all from one run.

| what | Mtok/s and core |
|---|---|
{rows}
"""
    args.out.write_text(text, encoding="utf-8")
    print(text)


if __name__ == "__main__":
    main()
