"""n-grams have rows and seeds of signs of record 92, devices exchange the rows that they read, and
copies are what a slow search finds.

The golden file has numbers of the original record's own functions, in float32: tokens (T,); for
pairs and trigrams their rows in a table of 84,602,880 rows, the rows in a small table, and the
rows of signs, (2, T) each.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import P

import train_gpt
from records.upstream92.golden_r92 import GOLDEN
from tests.tools import (
    MINI32,
    make_mesh,
    make_random_state,
    place_on,
    schedule_row,
)
from train_gpt import SHORT, Layer, Stage

TOKENS = jnp.asarray(GOLDEN["ngram/tokens"])[None]
SMALL_TABLE = GOLDEN["ngram/rows_small_of"].item()
FULL = dataclasses.replace(train_gpt.PRESETS["record"], ngram_buckets=84_602_880, ngrams=(2, 3))
SMALL = dataclasses.replace(
    MINI32, layers=(Layer(SHORT, ngram=True),), mudd_head=(), vocab=50257, eot=50256,
    ngram_buckets=SMALL_TABLE, ngrams=(2, 3), pointer=0,
)  # fmt: skip


def test_rows_and_signs_are_those_of_record_92():
    hashes = train_gpt.hash_ngrams(TOKENS, FULL)
    for n in 0, 1:
        np.testing.assert_array_equal(hashes[n][0][0], GOLDEN["ngram/rows"][n])
        np.testing.assert_array_equal(hashes[n][1][0], GOLDEN["ngram/sign_rows"][n])
        small = train_gpt.hash_ngrams(TOKENS, SMALL)[n][0][0]
        np.testing.assert_array_equal(small, GOLDEN["ngram/rows_small"][n])


def test_every_length_has_its_part_of_the_table():
    c = dataclasses.replace(SMALL, ngram_buckets=400, ngrams=(2, 3, 4, 5))
    hashes = train_gpt.hash_ngrams(TOKENS, c)
    for number, (n, (index, seed)) in enumerate(zip(c.ngrams, hashes, strict=True)):
        assert index.shape == seed.shape == TOKENS.shape
        assert index.min() >= 100 * number and index.max() < 100 * (number + 1)
        assert (index[0, : n - 1] == 100 * number + 99).all() and not seed[0, : n - 1].any()
        assert len(np.unique(index)) > 50


# ---- Exchange ------------------------------------------------------------------------------------
T = 29
EXCHANGE = dataclasses.replace(SMALL, D=32, vocab=257, eot=256, ngram_buckets=400)
R = 64  # rows in an eighth of its table, padding included
# Eight sequences of few different tokens, so that n-grams occur more than once.
TEXT = np.random.default_rng(5).integers(0, 6, (8, T)).astype(np.int32)
NUMBERS = np.random.default_rng(6)
TABLE = NUMBERS.normal(size=(R, 8, EXCHANGE.D)).astype("f4")
# Sums of whole numbers do not depend on their order.
GRADIENTS = NUMBERS.integers(-9, 10, (8, 2 * T, EXCHANGE.D)).astype("f4")


def exchange(devices: int, c: train_gpt.Config) -> tuple:
    """What devices exchange for TEXT, with GRADIENTS of the rows: the rows, the dense gradient, how
    many n-grams are lost, and for each sequence and eighth the rows that it asks for."""

    def on_device(tokens, table, gradients):
        request = train_gpt.request_rows(tokens, table, c)
        rows = train_gpt.pull_rows(table, request, c)
        pushed = train_gpt.push_gradients(gradients, request, c)
        dense = train_gpt.table_gradient(pushed, table)
        lost = jax.lax.psum(train_gpt.lost_ngrams(request), "fsdp")
        return rows, dense, lost, request.wanted_QpC

    eighths = P(None, "fsdp")
    specs = P("fsdp"), eighths, P("fsdp")
    results = P("fsdp"), eighths, P(), eighths
    mesh = make_mesh(devices)
    program = jax.jit(jax.shard_map(on_device, mesh=mesh, in_specs=specs, out_specs=results))
    return jax.tree.map(np.asarray, program(TEXT, TABLE, GRADIENTS))


def read_rows(c: train_gpt.Config) -> np.ndarray:
    """The rows that the n-grams of TEXT read, (8, 2 T)."""
    return np.asarray(train_gpt.ngram_rows(jnp.asarray(TEXT), c))


def slow_exchange(slots: int, c: train_gpt.Config) -> tuple:
    """The same, one n-gram after the other. Of the rows that a sequence reads in an eighth, the
    first ones get its slots."""
    rows = np.zeros_like(GRADIENTS)
    dense = np.zeros_like(TABLE)
    lost = 0
    asked = []
    for q, numbers in enumerate(read_rows(c)):
        read = [sorted({row // 8 for row in numbers if row % 8 == eighth}) for eighth in range(8)]
        asked.append([rows_of_eighth[:slots] for rows_of_eighth in read])
        for n, row in enumerate(numbers):
            place = row // 8, row % 8
            if place[0] in asked[q][place[1]]:
                rows[q, n] = TABLE[place]
                dense[place] += GRADIENTS[q, n]
            else:
                lost += 1
    return rows, dense, lost, asked


@pytest.mark.parametrize("capacity, slots, counts", [(0.08, 5, [1, 4, 8]), (1.0, 58, [8])])
def test_devices_exchange_the_rows_for_which_there_are_slots(capacity, slots, counts):
    """Other n-grams read zeros, their gradients are dropped, and they are counted."""
    c = dataclasses.replace(EXCHANGE, ngram_capacity=capacity)
    assert c.ngram_slots(T) == slots
    rows, dense, lost, asked = slow_exchange(slots, c)
    zeros = ~rows.any(axis=-1)
    assert lost == zeros.sum() and (lost > 0) == (capacity < 1)
    for devices in counts:
        found = exchange(devices, c)
        np.testing.assert_array_equal(found[0], rows)
        np.testing.assert_array_equal(found[1], dense)
        assert found[2] == lost
        for wanted_8C, asked_8 in zip(found[3], asked, strict=True):
            assert [[row for row in wanted if row < R] for wanted in wanted_8C] == asked_8
    assert sum(len(numbers) - len(np.unique(numbers)) for numbers in read_rows(c)) > 50


def test_training_and_validation_count_what_is_lost():
    """Two steps on the same tokens, a sequence for each device."""
    stages = (Stage(2, 8 * T, short=8, long=8, max_doc=0, lr=1.0),)
    c = dataclasses.replace(
        EXCHANGE, stages=stages, batch=8, adam_every=1, ngram_capacity=0.08, head_chunk=T,
        R=0, val_T=T, val_tokens=8 * T,
    )  # fmt: skip
    _, _, lost, _ = slow_exchange(5, c)
    mesh = make_mesh(8)
    tokens = place_on(mesh, np.pad(TEXT, ((0, 0), (0, 1))))
    program = train_gpt.compile_train_step(0, True, c, mesh)
    state = make_random_state(c, mesh)
    for step in 0, 1:
        state, _ = program(state, tokens, schedule_row(c, step, mesh))
        assert int(state.lost_ngrams) == (step + 1) * lost
    val = train_gpt.compile_val_step(0, c, mesh)
    assert int(val(state.params, tokens, np.int32(0))[1]) == lost
