"""How fast tokens are read, checked and made, on one core; writes records/data_throughput.md.

    TIKTOKEN_CACHE_DIR=... python tests/benchmark_data.py TEXT... [--out FILE]

TEXT are .txt files, repeated to 64 MB. Each figure is the best of several, all from one run of an
otherwise idle machine; tokenize_text.py is measured beside tiktoken's own encode_ordinary_batch.
"""

import argparse
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

TOKENS = 100_000_000  # of a shard of FineWeb
TEXT_BYTES = 64_000_000
RECORD = train_gpt.PRESETS["record"]


def best(work: Callable[[], int], times: int = 3) -> float:
    """Millions of what `work` returns, a second."""
    rates = []
    for _ in range(times):
        began = time.perf_counter()
        count = work()
        rates.append(count / (time.perf_counter() - began) / 1e6)
    return max(rates)


def forget(path: pathlib.Path) -> None:
    """Drop a file from the page cache."""
    with path.open("rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def read(path: pathlib.Path, cold: bool = False) -> int:
    """Through the stream of the record, every token of a step once."""
    if cold:
        forget(path)
    rows, T = RECORD.batch("train")
    steps = train_gpt.stream([train_gpt.open_shard(path)], rows, T, RECORD.steps)
    return sum(step[:, :-1].size for step in steps)


def inspect(path: pathlib.Path) -> int:
    found = train_gpt.inspect(train_gpt.open_shard(path), RECORD.T, RECORD.eot)
    return found["tokens"]


def reader_rates(folder: pathlib.Path) -> dict[str, float]:
    path = folder / "x_train_000001.bin"
    tokens = np.random.default_rng(0).integers(0, 50257, TOKENS, dtype="<u2")
    shards.write(path, [shards.header(TOKENS), tokens])
    cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(cores)})
    rates = {
        "stream of the record, shard in memory": best(lambda: read(path)),
        "the same, shard on the disk": best(lambda: read(path, cold=True)),
        "pass over the bytes (sha256, range, documents)": best(lambda: inspect(path)),
    }
    os.sched_setaffinity(0, cores)
    return rates


def tokenizer_rates(folder: pathlib.Path, paths: list[pathlib.Path]) -> dict[str, float]:
    """Per core; a document is one of the files, cut to a hundredth."""
    text = "".join(path.read_text(encoding="utf-8") for path in paths)
    pieces = [text[i * len(text) // 100 : (i + 1) * len(text) // 100] for i in range(100)]
    documents = pieces * (TEXT_BYTES // len(text.encode()) + 1)
    source, cores = folder / "text", len(os.sched_getaffinity(0))
    source.mkdir()
    for i, document in enumerate(documents):
        (source / f"{i:06}.txt").write_text(document, encoding="utf-8", newline="")
    encoding = tiktoken.get_encoding("gpt2")
    script, runs = (
        [sys.executable, ROOT / "data" / "tokenize_text.py", source, "--out"],
        iter("abc"),
    )

    def tokenize() -> int:
        out = folder / next(runs)
        subprocess.run([*script, out], check=True, capture_output=True)
        found = [train_gpt.open_shard(path) for path in out.glob("*.bin")]
        return sum(map(len, found)) - len(documents)  # without EOT, which costs nothing

    def batch() -> int:
        return sum(map(len, encoding.encode_ordinary_batch(documents, num_threads=cores)))

    return {
        f"tiktoken's encode_ordinary_batch, {cores} threads": best(batch) / cores,
        f"tokenize_text.py, {cores} workers, from start to end": best(tokenize) / cores,
    }


def main():
    cli = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    cli.add_argument("text", type=pathlib.Path, nargs="+")
    cli.add_argument("--out", type=pathlib.Path, default=ROOT / "records" / "data_throughput.md")
    args = cli.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        rates = reader_rates(pathlib.Path(folder))
        rates |= tokenizer_rates(pathlib.Path(folder), args.text)
    cpu = platform.processor() or platform.machine()
    for line in pathlib.Path("/proc/cpuinfo").read_text().splitlines():
        cpu = line.split(":")[1].strip() if line.startswith("model name") else cpu
    versions = f"Python {platform.python_version()}, numpy {np.__version__}"
    lines = [
        "# Tokens read and made, millions a second and core",
        "",
        f"By `tests/benchmark_data.py`: {cpu}, {len(os.sched_getaffinity(0))} cores, {versions},",
        f"tiktoken {tiktoken.__version__}; the best of three each, one run.",
        "",
        "| what | Mtok/s and core |",
        "|---|---|",
        *(f"| {what} | {rate:.2f} |" for what, rate in rates.items()),
        "",
        "8×H100 at the speed of record 21, 393,216 tokens in 101.6 ms, eat 3.9 Mtok/s.",
    ]
    args.out.write_text("\n".join(lines) + "\n", encoding="utf-8")
    print("\n".join(lines))


if __name__ == "__main__":
    main()
