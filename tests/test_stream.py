"""Which tokens the batches have, and in which order. test_devices.py shows that any number of
devices gets the same."""

import dataclasses

import numpy as np
import pytest

import train_gpt
from tests.tools import MINI
from train_gpt import Stage

EOT = MINI.eot
# For each shard, the tokens before the first document, and the size of every document.
DOCUMENTS = dict(
    some=[(0, *range(1, 40)), (0, *range(40, 1, -1))],
    long=[(0, 300, 1, 200, 33, 34, 35, 500), (0, 8, 300)],
    cut_from_another=[(20, 5, 70, 3, 3, 90, 40), (99,), (1, 64, 64, 64)],
    empty=[(0,), (7, 90), (0,)],
    of_one_token=[(0, *[1] * 300, 500), (0, *[2] * 200)],
)
SHAPES = dict(  # sequences, T, max_doc of every batch
    one=[(1, 32, 16)] * 99,
    never_cut=[(2, 32, 10**6)] * 99,
    as_long_as_the_sequence=[(3, 20, 21), (3, 20, 20)] * 20,
    documents_then_text=[(2, 16, 9)] * 3 + [(2, 32, 0)] * 99,
    text_then_documents=[(2, 16, 0)] * 3 + [(1, 32, 12)] * 3 + [(2, 8, 0), (2, 8, 7)] * 40,
)


def document_shards(name: str) -> list[np.ndarray]:
    """Shards of these documents, which start with EOT; no two other tokens are equal."""
    shards = []
    first = 1000
    for place, *sizes in DOCUMENTS[name]:
        tokens = np.arange(first, first + place + sum(sizes), dtype="<u2")
        first += len(tokens)
        for size in sizes:
            tokens[place] = EOT
            place += size
        shards.append(tokens)
    return shards


# ---- Batches of packed documents -----------------------------------------------------------------
def read_naively(shards, shapes):
    """The batches by the rules of the stream, read token by token."""
    shapes = [*shapes]
    for shard in (shard.tolist() for shard in shards):
        place = 0
        while shapes:
            batch = []
            sequences, T, max_doc = shapes[0]
            try:
                for _ in range(sequences):
                    sequence = []
                    if not max_doc:  # consecutive text; the next sequence repeats the last token
                        sequence = [shard[place + i] for i in range(T + 1)]
                        place += T
                    while len(sequence) < T + 1:
                        place = shard.index(EOT, place)  # ValueError: there is no other document
                        size = 0
                        while size == 0 or (place < len(shard) and shard[place] != EOT):
                            if size < max_doc and len(sequence) < T + 1:
                                sequence.append(shard[place])
                            size += 1
                            place += 1
                    batch.append(sequence)
            except (ValueError, IndexError):
                break  # the shard's tail is dropped, and the batch comes from the next shard
            yield batch
            del shapes[0]


@pytest.mark.parametrize("shapes", SHAPES)
@pytest.mark.parametrize("name", DOCUMENTS)
def test_batches_are_those_of_a_naive_reader(name, shapes):
    shards = document_shards(name)
    batches = [batch.tolist() for batch in train_gpt.read_batches(shards, SHAPES[shapes], MINI)]
    assert batches == list(read_naively(shards, SHAPES[shapes]))


def test_parts_of_the_stream_together_are_the_stream():
    """Every process reads a part of each batch."""
    shards = document_shards("long")
    shapes = [(4, 16, 9), (4, 24, 0)] * 3
    for parts in 1, 2, 4:
        streams = [
            train_gpt.read_batches(shards, shapes, MINI, part, parts) for part in range(parts)
        ]
        whole = train_gpt.read_batches(shards, shapes, MINI)
        for batch, *pieces in zip(whole, *streams, strict=True):
            assert {len(piece) for piece in pieces} == {4 // parts}
            np.testing.assert_array_equal(np.concatenate(pieces), batch)


# ---- Stages --------------------------------------------------------------------------------------


def test_stages_follow_each_other_at_their_steps():
    """A stage's batches have its shape from its first step on, also in a longer run."""
    stages = (
        Stage(3, 64, short=8, long=8, max_doc=5, lr=1.0),
        Stage(4, 128, short=8, long=8, max_doc=0, lr=1.0),
        Stage(2, 256, short=8, long=8, max_doc=8, lr=1.0),
        Stage(0, 512, short=8, long=8, max_doc=64, lr=1.0),
    )
    c = dataclasses.replace(MINI, stages=stages, batch=4, head_chunk=16)
    shapes = train_gpt.batch_shapes("train", c)
    assert shapes == [(4, 16, 5)] * 3 + [(4, 32, 0)] * 4 + [(4, 64, 8)] * 2
    assert train_gpt.batch_shapes("val", c) == [(8, 128, 0)] * 2
    twice = train_gpt.batch_shapes("train", dataclasses.replace(c, steps=18))
    assert twice == [shape for shape in shapes for _ in range(2)]
