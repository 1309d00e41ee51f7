"""evals/incremental.py reads texts in chunks, with the probabilities of a whole pass."""

import dataclasses
import functools
from pathlib import Path

import incremental
import numpy as np
import weights

import train_gpt
from tests.test_export import LAST, TRAIN, all_log_p, save
from tests.tools import MINI32, sequences
from train_gpt import LONG, SHORT, Layer

C = incremental.CHUNK
# Every technique: paired heads also with dc and key_offset, in the last layer.
EVERY = dataclasses.replace(MINI32, layers=(*MINI32.layers[:5], LAST))
SMALL = dataclasses.replace(
    EVERY, layers=(Layer(SHORT, ngram=True), Layer(LONG, key_offset=True)), mudd_head=()
)


def opened(folder: Path, c: train_gpt.Config) -> weights.Weights:
    """Random weights of a configuration; each call imports the script."""
    save(folder / "x.npz", c)
    return weights.open_weights(folder / "x.npz", TRAIN)


def whole(w: weights.Weights, tokens: np.ndarray) -> np.ndarray:
    """The log-probabilities (B, T, V) of a whole pass over tokens (B, T)."""
    run = weights.runner(w, functools.partial(all_log_p, w), 1)
    return run(np.pad(tokens, ((0, 0), (0, 1))))


def test_chunks_give_the_probabilities_of_a_whole_pass(tmp_path):
    """For texts of five documents, which are read in steps of one and of many tokens."""
    w = opened(tmp_path, EVERY)
    tokens = sequences(w.c, 255, documents=4, count=2)
    tokens[:, 200:220] = tokens[:, 100:120]  # a match that is far away
    expected = whole(w, tokens)
    reader = incremental.Reader(w)
    reader.can_read_chunks = True
    calls = []
    program = reader.chunks
    reader.chunks = lambda *arguments: calls.append(1) or program(*arguments)
    lengths = [1, 2, *range(C - 3, C + 9), 130, *range(205, 225), 255, 256]
    for length in lengths:
        z = reader(tokens[:, :length])
        assert np.abs(z - expected[:, length - 1]).max() < 1e-4, length
    steps = np.diff([0, *lengths])
    assert len(calls) == sum(-(-step // (C - incremental.HALO)) for step in steps)
    # A text is read from the first token that differs from the stored ones.
    mixed = np.concatenate((tokens[:, :40], tokens[:, :30]), axis=1)
    for text, z, known in (
        (tokens[:, :50], expected[:, 49], 49),
        (mixed, None, 40),
        (tokens[:, :70], expected[:, 69], 40),
        (tokens[::-1, :90], expected[::-1, 89], 0),
    ):
        calls.clear()
        found = reader(text)
        assert len(calls) == -(-(text.shape[1] - known) // (C - incremental.HALO))
        assert z is None or np.abs(found - z).max() < 1e-4


def test_with_parts_that_chunks_do_not_have_every_token_takes_a_whole_pass(tmp_path, capsys):
    w = opened(tmp_path, SMALL)
    attend = w.code.attend
    w.code.attend = lambda *arguments: 0.9 * attend(*arguments)  # also to nothing
    tokens = sequences(w.c, 98, count=1)
    z = incremental.Reader(w)(tokens)
    assert np.abs(z - whole(w, tokens)[:, -1]).max() < 1e-4
    err = capsys.readouterr().err
    assert err.count("\n") == 1 and "so every token takes a whole pass" in err
