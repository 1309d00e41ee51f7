"""Which tokens the batches have, and in which order. test_devices.py shows that any number of
devices gets the same."""

import numpy as np
import pytest

import train_gpt
from tests.tools import MINI

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
