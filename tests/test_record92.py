"""./run.sh record92 trains from the frozen file, and the mask that it reads is upstream's."""

import dataclasses
import hashlib
import json

import jax
import launch
import numpy as np
import pytest
import weights

from records.upstream92 import canonical_mask
from records.upstream92.golden_r92 import GOLDEN
from tests.record92 import FLOAT32, PATH, frozen
from tests.tools import text, write_shard

pytestmark = pytest.mark.slow
RECORD92 = frozen.PRESETS["record92"]
Layer = frozen.Layer
# A few layers with all that the preset's have.
LAYERS = (
    Layer(frozen.SHORT, paired_heads=True, narrow_qk=True, bigram=True, value_table=0),
    Layer(frozen.SHORT, narrow_qk=True, narrow_v=True, xsa=True, mlps=2, x0=False),
    Layer(None, bigram=True, mlps=0),
    Layer(frozen.LONG, key_offset=True, head_gate=True, value_table=1, attend_to=0,
          mudd=("input", "layer0"), new_gates=True),
)  # fmt: skip


def small_stage(number: int, steps: int, candidates: int) -> frozen.Stage:
    """A stage of the preset whose sequences are a 256th as long, windows and documents a 16th."""
    stage = RECORD92.stages[number]
    return dataclasses.replace(
        stage,
        steps=steps,
        tokens=stage.tokens // 256,
        short=stage.short // 16,
        long=stage.long // 16,
        max_doc=stage.max_doc // 16,
        candidates=candidates,
    )


def small_model(folder) -> frozen.Config:
    """A small model with all that the preset has. It reads a table of prefixes and a canonical
    mask, which this writes: every second token has a prefix, and one token in ten, but none of
    text(), cannot follow another."""
    stages = small_stage(0, 2, candidates=128), small_stage(5, 4, candidates=192)
    averages = []
    for row in RECORD92.averages:
        params = tuple(name for name in row.params if name not in ("value2", "value3"))
        averages.append(dataclasses.replace(row, params=params, every=2, memory=0.5))
    c = dataclasses.replace(
        RECORD92, layers=LAYERS, stages=(*stages, small_stage(9, 0, candidates=0)),
        mudd_head=(("input", 0.0), ("value1", 0.0), ("norm(middle3)", 0.0), ("norm(layer0)", -0.5)),
        averages=tuple(averages), D=48, H=2, F=88, R=8, vocab=257, eot=256, bigrams=512,
        table_start=0.0, ngram_capacity=1.0, head_chunk=64, attention="band", val_T=64,
        val_tokens=1024, target=0.0, seed=3, data=str(folder), stall=0,
        prefixes=str(folder / "prefixes.bin"), canonical=str(folder / "canonical.npz"), **FLOAT32,
    )  # fmt: skip
    token = np.arange(c.vocab, dtype="<i4")
    np.where(token % 2, token // 2, -1).astype("<i4").tofile(c.prefixes)
    V = frozen.padded_vocab(c)
    never = np.random.default_rng(0).random((7, V)) < 0.1
    never[:, [*range(16), c.eot]] = False
    bits = np.packbits(never, axis=1, bitorder="little")
    token = np.arange(V, dtype=np.uint16)
    np.savez(c.canonical, bits=bits, row_of=token % 7, column_of=token)
    for name in "train_000001", "val_000000":
        write_shard(folder / f"x_{name}.bin", text(40_000))
    return c


def test_a_small_model_trains_to_its_result(tmp_path, monkeypatch, capsys):
    c = small_model(tmp_path)
    monkeypatch.setitem(frozen.PRESETS, "record92", c)
    monkeypatch.chdir(tmp_path)
    devices = jax.devices()[:1]
    monkeypatch.setattr(jax, "devices", lambda: devices)
    monkeypatch.setattr(launch, "load_script", lambda path: frozen)
    monkeypatch.setattr(launch, "watch_signals", lambda: None)
    launch.main([str(PATH), "record92"])
    shown = capsys.readouterr().out
    result = json.loads(shown.rpartition("RESULT ")[2].splitlines()[0])
    assert result["steps"] == 6 and result["lost_ngrams"] == 0
    assert 1 < result["val_loss"] < 5
    # The tools of evals/ do not read its weights.
    for script in weights.ROOT / "train_gpt.py", PATH:
        with pytest.raises(SystemExit):
            weights.open_weights(tmp_path / "logs" / result["weights"], script)
        (line,) = capsys.readouterr().err.splitlines()
        assert "npz is of record 92's model, which this tool cannot read: see records/" in line


def test_the_mask_is_that_of_the_original_record():
    """The golden file has the sha256 of its table, and the number of bits in it."""
    row_of, rows = canonical_mask.load(canonical_mask.OUT)
    counts = np.bitwise_count(rows).sum(axis=1, dtype=np.int64)
    assert counts[row_of].sum() == GOLDEN["mask/total"].item()
    found = hashlib.sha256()
    for part in np.array_split(row_of, 100):  # the whole table has 316 MB
        found.update(rows[part])
    assert found.digest() == GOLDEN["mask/sha256"].tobytes()
