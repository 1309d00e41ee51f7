"""The one place that yields batches: which tokens, in which order, and where it goes on. That any
number of devices gets the same is in test_devices.py."""

import itertools

import numpy as np
import pytest

import train_gpt

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


def make(lengths) -> list[np.ndarray]:
    """Shards of tokens that name their place: no two are equal."""
    starts = np.cumsum([0, *lengths])
    return [np.arange(a, b, dtype="<u2") for a, b in itertools.pairwise(starts)]


def upstream(shards, rows: int, T: int, start=(0, 0)):
    """Its rule: while fewer than a step and two tokens are left from here on, take the next shard.
    Also yields where the step stands."""
    shard, token = start
    while True:
        while shard < len(shards) and token + rows * T + 1 >= len(shards[shard]):
            shard, token = shard + 1, 0
        if shard == len(shards):
            return
        tokens = shards[shard][token : token + rows * T + 1]
        inputs, targets = tokens[:-1].reshape(rows, T), tokens[1:].reshape(rows, T)
        yield (shard, token), inputs, targets
        token += rows * T


def same(steps, expected) -> int:
    """How many steps there are, if they are the same."""
    pairs = list(zip(steps, expected, strict=True))
    for tokens, (_, inputs, targets) in pairs:
        assert tokens.dtype == np.int32
        assert np.array_equal(tokens[:, :-1], inputs) and np.array_equal(tokens[:, 1:], targets)
    return len(pairs)


@pytest.mark.parametrize("rows, T", [(1, 1), (2, 32), (8, 8), (1, 64), (8, 1)])
@pytest.mark.parametrize("lengths", LENGTHS)
def test_steps_are_those_of_upstream(lengths, rows, T):
    shards = make(lengths)
    count = same(train_gpt.stream(shards, rows, T, 10**6), upstream(shards, rows, T))
    assert count == sum(train_gpt.steps_in(shard, rows, T) for shard in shards)


def test_the_rule_in_numbers():
    """65 tokens hold a step of (2, 32) and its last target, but upstream asks for one more."""
    shards = make([65, 66, 130])
    first, second, third = train_gpt.stream(shards, 2, 32, 10)
    assert first.tolist() == [list(range(65, 98)), list(range(97, 130))]
    assert second.tolist() == [list(range(131, 164)), list(range(163, 196))]
    assert third.tolist() == [list(range(195, 228)), list(range(227, 260))]
    assert list(train_gpt.stream(make([129]), 2, 32, 10))[0][1, -1] == 64
    assert [train_gpt.steps_in(np.zeros(n), 2, 32) for n in (2, 65, 66, 129, 130)] == [
        0,
        0,
        1,
        1,
        2,
    ]


def test_nothing_is_repeated_and_nothing_between_two_steps_is_lost():
    (shard,) = make([1000])
    steps = list(train_gpt.stream([shard], 2, 32, 100))
    inputs = np.concatenate([step[:, :-1].ravel() for step in steps])
    assert inputs.tolist() == list(range(15 * 64))  # 1000 - 2 tokens are 15 whole steps
    assert [step[-1, -1] for step in steps[:-1]] == [step[0, 0] for step in steps[1:]]


def test_it_ends_after_the_steps_asked_for():
    shards = make([1000, 1000])
    for steps in (0, 1, 15, 16, 30):
        assert len(list(train_gpt.stream(shards, 2, 32, steps))) == steps
    assert len(list(train_gpt.stream(shards, 2, 32, 31))) == 30  # find_data refuses such a run


@pytest.mark.parametrize("rows, T", [(1, 1), (2, 32), (8, 8)])
@pytest.mark.parametrize("lengths", LENGTHS)
def test_it_goes_on_from_any_shard_and_token(lengths, rows, T):
    shards = make(lengths)
    everything = list(upstream(shards, rows, T))
    for i, (place, _, _) in enumerate(everything[:40]):
        assert same(train_gpt.stream(shards, rows, T, 10**6, place), everything[i:])
    for place in itertools.product(range(len(shards)), (0, 1, 7, 64, 65, 10**6)):
        rest = upstream(shards, rows, T, place)  # also from where no step of the whole begins
        same(train_gpt.stream(shards, rows, T, 10**6, place), rest)


def test_a_run_in_two_parts_with_another_batch_in_the_second():
    """As a batch size schedule has it: no token twice, none left out before a shard's end."""
    shards = make([1000])
    first = list(train_gpt.stream(shards, 2, 32, 3))
    second = list(train_gpt.stream(shards, 4, 32, 100, (0, 3 * 64)))
    inputs = np.concatenate([step[:, :-1].ravel() for step in first + second])
    assert inputs.tolist() == list(range(len(inputs))) and len(inputs) == 3 * 64 + 6 * 128


def test_a_document_longer_than_a_window_is_cut_into_sequences_that_join():
    eot, tokens = 256, np.arange(400, dtype="<u2") % 200
    tokens[[0, 300]] = eot  # one document of 300 tokens over sequences of 32
    (step,) = train_gpt.stream([tokens], 8, 32, 1)
    assert (step == eot).sum() == 1  # no sequence is given a start that the text has not
    assert step[:, 0].tolist() == tokens[0:256:32].tolist()
    assert step[:, -1].tolist() == tokens[32:257:32].tolist()  # a target is the next one's input
