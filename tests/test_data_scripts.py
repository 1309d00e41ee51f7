"""source_code.py makes the committed text; shards.py finds what is wrong."""

import json
import os
import re
import sys
from pathlib import Path

import cached_hellaswag
import numpy as np
import pyarrow
import pytest
import shards
import source_code
from pyarrow import parquet

from tests.tools import write_shard

SECOND = "x_train_000002.bin"


def run(module, monkeypatch, *argv):
    monkeypatch.setattr(sys, "argv", [module.__name__, *map(str, argv)])
    module.main()


# ---- source_code.py ------------------------------------------------------------------------------
def test_the_text_of_tiny_is_the_committed_one(tmp_path, monkeypatch, capsys):
    """A damaged shard is made anew, and nothing is written where all is right. Another text is
    refused, and not written."""
    out = tmp_path / "out"
    run(source_code, monkeypatch, "--out", out)
    before = {path: path.stat().st_mtime_ns for path in out.iterdir()}
    assert {path.name for path in before} == {*source_code.SHARDS, "MANIFEST.json"}
    with monkeypatch.context() as patch:
        patch.setattr(source_code, "build", lambda: pytest.fail("built again"))
        run(source_code, monkeypatch, "--out", out)
    assert {path: path.stat().st_mtime_ns for path in out.iterdir()} == before
    (out / "source_val_000000.bin").write_bytes(b"damaged")
    run(source_code, monkeypatch, "--out", out)
    assert {name: shards.sha256(out / name) for name in source_code.SHARDS} == source_code.SHARDS

    changed = source_code.read_files() | {"optax/extra.py": b"def extra(): pass\n"}
    monkeypatch.setattr(source_code, "read_files", lambda: changed)
    with pytest.raises(SystemExit, match="2"):
        run(source_code, monkeypatch, "--out", tmp_path / "other")
    assert re.fullmatch("source_code: .* optax==0.2.8 .*again\n", capsys.readouterr().err)
    assert not (tmp_path / "other").exists()


# ---- Folders -------------------------------------------------------------------------------------
def text(first: int = 0) -> np.ndarray:
    return np.where(np.arange(1100) % 50, np.arange(first, first + 1100) % 97, 256)


@pytest.fixture
def data(tmp_path) -> Path:
    """Three train shards and one of validation, and MANIFEST.json."""
    for i in range(4):
        name = f"x_train_{i:06}.bin" if i else "x_val_000000.bin"
        write_shard(tmp_path / name, text(i))
    return write_manifest(tmp_path)


def write_manifest(data: Path, vocab: int = 257) -> Path:
    files = {path.name: dict(sha256=shards.sha256(path)) for path in data.glob("*.bin")}
    shards.write_manifest(data, "a test", vocab, 256, files)
    return data


@pytest.mark.parametrize("change, says", [
    (lambda d: write_shard(d / SECOND, text(2), magic=0), "000002.bin is no token shard"),
    (lambda d: write_shard(d / SECOND, text(2).astype("<u4").view("<u2")), "has tokens of 32"),
    (lambda d: write_shard(d / SECOND, text(2).astype(">u4").view("<u2")), "has tokens of 32"),
    (lambda d: write_shard(d / SECOND, np.pad(text(2), (0, 2048))), "000002.bin has a hole: 1024"),
    (lambda d: os.truncate(d / SECOND, 3222), "2.bin has 3222 bytes, its header promises 3224"),
    (lambda d: write_shard(d / SECOND, text(9)), "000002.bin is damaged: its sha256 is not MANI"),
    (lambda d: ((d / SECOND).unlink(), write_manifest(d)), "it lacks train shard 2, before x_tr"),
    (lambda d: write_shard(d / "a_val_000000.bin", text(9)), "has shards of several sets, a, x"),
    (lambda d: write_shard(d / "x_train_000002 (1).bin", text(9)), "is not called NAME_train_NNNN"),
])  # fmt: skip
def test_what_is_wrong_with_a_folder_is_told(data, capsys, change, says):
    shards.check(data, shards.sums(data))
    change(data)
    with pytest.raises(SystemExit, match="2"):
        shards.check(data, shards.sums(data))
    assert re.search(says, capsys.readouterr().err)


# ---- cached_hellaswag.py -------------------------------------------------------------------------
def test_examples_are_read_and_a_row_that_is_none_is_named(tmp_path, capsys):
    """A label beyond the endings would make every score wrong."""
    row = dict(ind=7, ctx="a b", endings=["c", "d", "e", "f"], label="1")
    for path in tmp_path / "x.jsonl", tmp_path / "x.parquet":
        for change in {}, dict(label="4"), dict(endings=["c"]), dict(ctx=""):
            rows = [row, row | change]
            path.write_text("\n".join(map(json.dumps, rows)) + "\n")
            if path.suffix == ".parquet":
                parquet.write_table(pyarrow.Table.from_pylist(rows), path)
            if change:
                with pytest.raises(SystemExit, match="2"):
                    list(cached_hellaswag.read(path))
                assert f"{path}:2 is no example of HellaSwag" in capsys.readouterr().err
            else:
                assert list(cached_hellaswag.read(path)) == [("a b", row["endings"], 1)] * 2
