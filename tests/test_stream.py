"""Which tokens the batches have, and in which order. test_devices.py shows that any number of
devices gets the same."""

import dataclasses
import itertools
from unittest.mock import Mock

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
    two=[(2, 32, 20)] * 99,
    never_cut=[(2, 32, 10**6)] * 99,
    as_long_as_the_sequence=[(3, 20, 21), (3, 20, 20)] * 20,
    growing=[(2, 16, 9)] * 4 + [(2, 32, 40)] * 4 + [(1, 64, 8)] * 99,
    documents_then_text=[(2, 16, 9)] * 3 + [(2, 32, 0)] * 99,
    text_then_documents=[(2, 16, 0)] * 3 + [(1, 32, 12)] * 3 + [(2, 8, 0), (2, 8, 7)] * 40,
    few=[(2, 16, 9), (1, 64, 0)],
)


def text_batches(batch: int, T: int, steps: int = 10**4) -> list[tuple[int, int, int]]:
    """Shapes of batches of unpacked text: a document continues in the next sequence."""
    return [(batch, T, 0)] * steps


def numbered_shards(lengths) -> list[np.ndarray]:
    """Shards whose tokens count on from shard to shard, so that no two are equal."""
    starts = np.cumsum([0, *lengths])
    return [np.arange(a, b, dtype="<u2") for a, b in itertools.pairwise(starts)]


def document_shards(name: str) -> list[np.ndarray]:
    """Numbered shards in which these documents start with EOT."""
    shards = [tokens + 1000 for tokens in numbered_shards(map(sum, DOCUMENTS[name]))]
    for tokens, (place, *sizes) in zip(shards, DOCUMENTS[name], strict=True):
        for size in sizes:
            tokens[place] = EOT
            place += size
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


def test_the_first_batch_reads_only_the_first_million_tokens():
    """Because it is found on the clock."""
    read = []

    class Shard(np.ndarray):
        """Notes how far it is read."""

        def __getitem__(self, index):
            read.append(min(index.stop, len(self)))
            return np.asarray(self)[index]

    tokens = np.ones(3_000_000, np.uint16)
    tokens[::50] = EOT
    documents = train_gpt.pack_documents(tokens.view(Shard), [(8, 1024, 40)] * 9999, MINI)
    next(documents)
    assert read == [1_000_000]
    assert sum(1 for _ in documents) > 100 and max(read) == 3_000_000


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
@pytest.mark.parametrize("start", [0, 1, 3, 8, 9])
def test_a_resumed_run_copies_only_the_batches_that_it_reads(start, monkeypatch):
    """They are skipped on the clock. There are 8 batches."""
    shards = numbered_shards([700, 700])
    shapes = text_batches(2, 64)[:8]
    whole = [*train_gpt.read_batches(shards, shapes, MINI)]
    copies = Mock(wraps=np.concatenate)
    monkeypatch.setattr(train_gpt.np, "concatenate", copies)
    rest = [*train_gpt.read_batches(shards, shapes, MINI, start=start)]
    assert copies.call_count == 2 * len(rest)
    np.testing.assert_array_equal(rest, whole[start:] or rest)
    assert len(rest) == max(0, 8 - start)


def test_stages_follow_each_other_at_their_steps():
    """A stage's batches have its shape from its first step on, also where the stage begins within a
    shard."""
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
    tokens = np.arange(900, dtype="<u2") % 200
    tokens[::9] = EOT
    shards = [np.roll(tokens, -i) for i in range(3)]
    for wanted in shapes, twice:
        batches = [batch.tolist() for batch in train_gpt.read_batches(5 * shards, wanted, c)]
        assert batches == list(read_naively(5 * shards, wanted))
        assert [(len(batch), len(batch[0])) for batch in batches] == [
            (sequences, T + 1) for sequences, T, _ in wanted
        ]
