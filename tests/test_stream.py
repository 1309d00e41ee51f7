"""The one place that yields batches: which tokens, and in which order. That any number of devices
gets the same is in test_devices.py."""

import dataclasses
import itertools

import numpy as np
import pytest

import train_gpt
from tests.tools import MINI

LENGTHS = [
    [1000],
    [2],
    [2, 2, 2],
    [1000, 2, 500],
    [2, 1000],
    [65, 66, 67],  # no step, one step, one step of (2, 32)
    [129, 130, 131, 64, 0x101],
    [1, 0, 300],
]


def config(batch: int, T: int, steps: int = 10**6) -> train_gpt.Config:
    return dataclasses.replace(MINI, batch=batch, T=T, steps=steps)


def make(lengths) -> list[np.ndarray]:
    """Shards of tokens that name their place: no two are equal."""
    starts = np.cumsum([0, *lengths])
    return [np.arange(a, b, dtype="<u2") for a, b in itertools.pairwise(starts)]


def upstream(shards, batch: int, T: int):
    """Its rule: while fewer than a step and two tokens are left, take the next shard."""
    shard = token = 0
    while True:
        while shard < len(shards) and token + batch * T + 1 >= len(shards[shard]):
            shard, token = shard + 1, 0
        if shard == len(shards):
            return
        tokens = shards[shard][token : token + batch * T + 1]
        yield tokens[:-1].reshape(batch, T), tokens[1:].reshape(batch, T)
        token += batch * T


@pytest.mark.parametrize("batch, T", [(1, 1), (2, 32), (8, 8), (1, 64), (8, 1)])
@pytest.mark.parametrize("lengths", LENGTHS)
def test_steps_are_those_of_upstream(lengths, batch, T):
    shards, c = make(lengths), config(batch, T)
    steps, expected = list(train_gpt.stream(shards, c)), list(upstream(shards, batch, T))
    assert len(steps) == sum(train_gpt.steps_in(shard, c) for shard in shards)
    for tokens, (inputs, targets) in zip(steps, expected, strict=True):
        assert tokens.dtype == np.int32
        assert np.array_equal(tokens[:, :-1], inputs) and np.array_equal(tokens[:, 1:], targets)


def test_it_ends_after_the_steps_of_the_config():
    shards = make([1000, 1000])
    for steps in (0, 1, 15, 16, 30):
        assert len(list(train_gpt.stream(shards, config(2, 32, steps)))) == steps
    assert len(list(train_gpt.stream(shards, config(2, 32, 31)))) == 30  # find_data refuses it


def test_a_document_longer_than_a_window_is_cut_into_sequences_that_join():
    eot, tokens = 256, np.arange(400, dtype="<u2") % 200
    tokens[[0, 300]] = eot  # one document of 300 tokens over sequences of 32
    (step,) = train_gpt.stream([tokens], config(8, 32))
    assert (step == eot).sum() == 1  # no sequence is given a start that the text has not
    assert step[:, 0].tolist() == tokens[0:256:32].tolist()
    assert step[:, -1].tolist() == tokens[32:257:32].tolist()  # a target is the next one's input
