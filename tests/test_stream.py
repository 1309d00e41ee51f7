"""The one place that yields batches: which tokens, and in which order. That any number of devices
gets the same is in test_devices.py."""

import dataclasses
import itertools

import numpy as np
import pytest

import train_gpt
from tests.tools import MINI, write_shard

EOT = MINI.eot
LENGTHS = [
    [1000],
    [2],
    [2, 2, 2],
    [1000, 2, 500],
    [2, 1000],
    [65, 66, 67],  # a step of (2, 32) needs 65
    [129, 130, 131, 64, 0x101],
    [1, 0, 300],
]
# Shards of documents: the size of each, after that of the text before the first start.
DOCUMENTS = dict(
    some=[(0, *range(1, 40)), (0, *range(40, 1, -1))],
    long=[(0, 300, 1, 200, 33, 34, 35, 500), (0, 8, 300)],
    cut_from_another=[(20, 5, 70, 3, 3, 90, 40), (99,), (1, 64, 64, 64)],
    empty=[(0,), (7, 90), (0,)],
    of_one_token=[(0, *[1] * 300, 500), (0, *[2] * 200)],
)
FILLS = dict(  # sequences, T, longest document
    one=[(1, 32, 16)] * 99,
    two=[(2, 32, 20)] * 99,
    never_cut=[(2, 32, 10**6)] * 99,
    as_long_as_the_sequence=[(3, 20, 21), (3, 20, 20)] * 20,
    growing=[(2, 16, 9)] * 4 + [(2, 32, 40)] * 4 + [(1, 64, 8)] * 99,
    joined_later=[(2, 16, 9)] * 3 + [(2, 32, 0)] * 99,
    joined_first=[(2, 16, 0)] * 3 + [(1, 32, 12)] * 3 + [(2, 8, 0), (2, 8, 7)] * 40,
    few=[(2, 16, 9), (1, 64, 0)],
)


def joined(batch: int, T: int, steps: int = 10**4) -> list[tuple[int, int, int]]:
    """Steps in which documents go on in the next sequence."""
    return [(batch, T, 0)] * steps


def make(lengths) -> list[np.ndarray]:
    """Shards of tokens that name their place: no two are equal."""
    starts = np.cumsum([0, *lengths])
    return [np.arange(a, b, dtype="<u2") for a, b in itertools.pairwise(starts)]


def shards_of(name: str) -> list[np.ndarray]:
    """Tokens that name their place, but for the starts of documents."""
    shards = [tokens + 1000 for tokens in make(map(sum, DOCUMENTS[name]))]
    for tokens, (before, *sizes) in zip(shards, DOCUMENTS[name], strict=True):
        tokens[[*itertools.accumulate([before, *sizes[:-1]])] if sizes else []] = EOT
    return shards


# ---- Steps of consecutive text -------------------------------------------------------------------
def upstream(shards, batch: int, T: int):
    """Its rule: while fewer than a step and a token are left, take the next shard. (It wants one
    more token than it reads; we do not.)"""
    shard = token = 0
    while True:
        while shard < len(shards) and token + batch * T + 1 > len(shards[shard]):
            shard, token = shard + 1, 0
        if shard == len(shards):
            return
        tokens = shards[shard][token : token + batch * T + 1]
        yield tokens[:-1].reshape(batch, T), tokens[1:].reshape(batch, T)
        token += batch * T


@pytest.mark.parametrize("batch, T", [(1, 1), (2, 32), (8, 8), (1, 64), (8, 1)])
@pytest.mark.parametrize("lengths", LENGTHS)
def test_steps_of_joined_text_are_those_of_upstream(lengths, batch, T):
    shards = make(lengths)
    steps, expected = train_gpt.stream(shards, joined(batch, T), MINI), upstream(shards, batch, T)
    for tokens, (inputs, targets) in zip(steps, expected, strict=True):
        assert tokens.dtype == np.int32
        assert np.array_equal(tokens[:, :-1], inputs) and np.array_equal(tokens[:, 1:], targets)


def test_it_ends_after_the_steps_that_are_asked_for():
    shards = make([1000, 1000])
    for steps in (0, 1, 15, 16, 30):
        assert len(list(train_gpt.stream(shards, joined(2, 32, steps), MINI))) == steps
    assert len(list(train_gpt.stream(shards, joined(2, 32, 31), MINI))) == 30  # find_data refuses


def test_a_document_longer_than_a_window_is_cut_into_sequences_that_join():
    tokens = np.arange(400, dtype="<u2") % 200
    tokens[[0, 300]] = EOT  # one document of 300 tokens over sequences of 32
    (step,) = train_gpt.stream([tokens], joined(8, 32), MINI)
    assert (step == EOT).sum() == 1  # no sequence is given a start that the text has not
    assert step[:, 0].tolist() == tokens[0:256:32].tolist()
    assert step[:, -1].tolist() == tokens[32:257:32].tolist()  # a target is the next one's input


# ---- Steps of whole documents --------------------------------------------------------------------
def naive(shards, fills):
    """The rules, a token at a time, by a reader that stands somewhere in a shard."""
    fills = [*fills]
    for shard in (shard.tolist() for shard in shards):
        at = 0
        while fills:
            step, (sequences, T, longest) = [], fills[0]
            try:
                for _ in range(sequences):
                    sequence = []
                    if not longest:  # the text as it goes on; its last token is read again
                        sequence = [shard[at + i] for i in range(T + 1)]
                        at += T
                    while len(sequence) < T + 1:
                        at = shard.index(EOT, at)  # of the next document, or there is none
                        taken = 0
                        while taken == 0 or (at < len(shard) and shard[at] != EOT):
                            if taken < longest and len(sequence) < T + 1:
                                sequence.append(shard[at])
                            taken, at = taken + 1, at + 1
                    step.append(sequence)
            except (ValueError, IndexError):
                break  # the shard's tail is dropped, and the step is that of the next shard
            yield step
            del fills[0]


@pytest.mark.parametrize("fills", FILLS)
@pytest.mark.parametrize("name", DOCUMENTS)
def test_steps_are_those_of_a_naive_reader(name, fills):
    shards = shards_of(name)
    steps = [step.tolist() for step in train_gpt.stream(shards, FILLS[fills], MINI)]
    assert steps == list(naive(shards, FILLS[fills]))


def test_what_becomes_of_documents_by_example():
    #         text before, then documents of 4, 9, 3, 6, 2 and 8 tokens
    text = "12E345E6789abcdE12E34567E1E1234567"
    shard = np.array([EOT if t == "E" else int(t, 16) for t in text], "<u2")
    E = EOT
    steps = train_gpt.stream([shard], [(2, 9, 5)] * 2, MINI)
    assert [step.tolist() for step in steps] == [
        [
            [
                E,
                3,
                4,
                5,
                E,
                6,
                7,
                8,
                9,
                E,
            ],  # the second is cut to 5; the last one ends with the room
            [E, 3, 4, 5, 6, E, 1, E, 1, 2],  # what is left of the third is dropped
        ]
    ]  # and nothing is left for another step


def test_layout_names_the_pieces_that_are_read():
    """Also of a shard of many millions: the places are no 16-bit numbers."""
    shard = np.zeros(200_000, "<u2")
    shard[[0, 70_000, 150_000]] = EOT
    pieces = list(train_gpt.layout(shard, [(1, 99_999, 60_000)], MINI))
    assert pieces == [[[(0, 60_000), (70_000, 110_000)]]]


# ---- Stages --------------------------------------------------------------------------------------
def test_stages_follow_each_other_at_their_steps(tmp_path):
    """Each in its shape from its first step on; within one shard as well as from one to another."""
    stages = "3 64 8 8 5 1 0,1 / 4 128 8 8 0 1 0,1 / 2 256 8 8 8 1 0,1 / 0 512 8 8 64 1 0,1"
    c = dataclasses.replace(MINI, stages=stages, steps=9, batch=4, data=str(tmp_path))
    assert c.fills("train") == [(4, 16, 5)] * 3 + [(4, 32, 0)] * 4 + [(4, 64, 8)] * 2
    assert c.fills("val") == [(8, 128, 0)] * 2
    twice = dataclasses.replace(c, steps=18)
    assert twice.fills("train") == [fill for fill in c.fills("train") for _ in range(2)]
    tokens = np.arange(900, dtype="<u2") % 200
    tokens[::9] = EOT
    shards = [np.roll(tokens, -i) for i in range(3)]
    for steps in c, twice:
        got = list(train_gpt.stream(5 * shards, steps.fills("train"), c))
        want = list(naive(5 * shards, steps.fills("train")))
        assert [step.tolist() for step in got] == want and len(want) == steps.steps
        assert [step.shape for step in got] == [(n, T + 1) for n, T, _ in steps.fills("train")]
    for i in range(3):
        write_shard(tmp_path / f"x_train_{i}.bin", shards[i])
    write_shard(tmp_path / "x_val_0.bin", np.resize(tokens, 3000))
    *train, val = train_gpt.find_data(c)
    assert len(list(train_gpt.stream(train, c.fills("train"), c))) == 9
    (first, second) = train_gpt.stream([val], c.fills("val"), c)
    assert [*first[:, 0], *second[:, 0]] == val[: 16 * 128 : 128].tolist()
