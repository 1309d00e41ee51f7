"""A small model with all that the preset record92 has, for tests.

Its sequences are a 256th as long as the preset's, its windows and documents a 16th. Every
stage has the preset's steps, but at most two.
"""

import dataclasses
from pathlib import Path

import numpy as np

import train_gpt
from tests.tools import FLOAT32

RECORD92 = train_gpt.PRESETS["record92"]
CANDIDATES = {10240: 128, 14336: 192, 24576: 288, 0: 0}  # no less than the tokens of a sequence


def small_stages() -> tuple[train_gpt.Stage, ...]:
    """The preset's stages, of two steps at most."""
    stages = []
    for stage in RECORD92.stages:
        small = dataclasses.replace(
            stage,
            steps=min(2, stage.steps),
            tokens=stage.tokens // 256,
            short=stage.short // 16,
            long=stage.long // 16,
            max_doc=stage.max_doc // 16,
            candidates=CANDIDATES[stage.candidates],
        )
        stages.append(small)
    return tuple(stages)


def small_averages() -> tuple[train_gpt.Average, ...]:
    """The preset's averages, which here move at least in every second step, and far."""
    return tuple(
        dataclasses.replace(average, every=min(2, average.every), memory=0.1)
        for average in RECORD92.averages
    )


# For training, it needs the files of with_files().
SMALL92 = dataclasses.replace(
    RECORD92, stages=small_stages(), averages=small_averages(), D=48, H=2, F=88, R=8,
    vocab=257, eot=256, bigrams=512, ngram_capacity=1.0, head_chunk=64, dc_window=12,
    attention="band", val_T=64, val_tokens=1024, val_every=6, canonical="", target=0.0, seed=3,
    **FLOAT32,
)  # fmt: skip


def with_files(folder: Path, c: train_gpt.Config = SMALL92) -> train_gpt.Config:
    """A Config that reads a table of prefixes and a canonical mask, which this writes: every second
    token has a prefix, and about one token in ten cannot follow another."""
    token = np.arange(c.vocab, dtype="<i4")
    np.where(token % 2, token // 2, -1).astype("<i4").tofile(folder / "prefixes.bin")
    never = np.random.default_rng(0).random((7, train_gpt.padded_vocab(c))) < 0.1
    write_mask(folder / "canonical.npz", never)
    paths = dict(prefixes=folder / "prefixes.bin", canonical=folder / "canonical.npz")
    return dataclasses.replace(c, **{name: str(path) for name, path in paths.items()})


def write_mask(path: Path, never: np.ndarray) -> None:
    """Writes a canonical mask. `never`, (R, V) of bool, tells which tokens cannot follow another;
    after token p this is row p % R."""
    R, V = never.shape
    token = np.arange(V, dtype=np.uint16)
    bits = np.packbits(never, axis=1, bitorder="little")
    np.savez(path, bits=bits, row_of=token % R, column_of=token)
