"""n-grams have rows and seeds of signs of record 92, and copies are what a slow search finds.

The golden file has numbers of the original record's own functions, in float32: tokens (T,); for
bigrams and trigrams their rows in a table of 84,602,880 rows, the rows in a small table, and the
rows of signs, (2, T) each; and, from a small table and signs of random numbers, the embedding
(T, 8), and the norm of every row's gradient.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

import train_gpt
from tests.golden_r92 import GOLDEN, META, normal
from tests.tools import MINI32
from train_gpt import SHORT, Layer

TOKENS = jnp.asarray(GOLDEN["ngram/tokens"])[None]
SMALL_TABLE = GOLDEN["ngram/rows_small_of"].item()
FULL = dataclasses.replace(train_gpt.PRESETS["record"], bigrams=84_602_880, ngrams=(2, 3))
SMALL = dataclasses.replace(
    MINI32, layers=(Layer(SHORT, bigram=True),), mudd_head=(), D=META["Dt"], vocab=50257, eot=50256,
    bigrams=SMALL_TABLE, ngrams=(2, 3), copy=0,
)  # fmt: skip


def test_rows_and_signs_are_those_of_record_92():
    hashes = train_gpt.hash_ngrams(TOKENS, FULL)
    for n in 0, 1:
        np.testing.assert_array_equal(hashes[n][0][0], GOLDEN["ngram/rows"][n])
        np.testing.assert_array_equal(hashes[n][1][0], GOLDEN["ngram/sign_rows"][n])
        small = train_gpt.hash_ngrams(TOKENS, SMALL)[n][0][0]
        np.testing.assert_array_equal(small, GOLDEN["ngram/rows_small"][n])


def test_every_length_has_its_part_of_the_table():
    c = dataclasses.replace(SMALL, bigrams=400, ngrams=(2, 3, 4, 5))
    hashes = train_gpt.hash_ngrams(TOKENS, c)
    for number, (n, (index, seed)) in enumerate(zip(c.ngrams, hashes, strict=True)):
        assert index.shape == seed.shape == TOKENS.shape
        assert index.min() >= 100 * number and index.max() < 100 * (number + 1)
        assert (index[0, : n - 1] == 100 * number + 99).all() and not seed[0, : n - 1].any()
        assert len(np.unique(index)) > 50


def test_the_embedding_and_its_gradient_are_those_of_record_92(monkeypatch):
    signs = jnp.asarray(np.sign(normal("ngram/pool", (8192, SMALL.D))))
    monkeypatch.setattr(train_gpt, "random_signs", lambda seed, c: signs[seed])
    weights = {
        "embed": jnp.zeros((50304, SMALL.D)),
        "smear_gate": jnp.zeros(SMALL.D),
        "smear_lambda": 0.0,
    }

    def embedding(table):
        hashes = train_gpt.hash_ngrams(TOKENS, SMALL)
        rows = [train_gpt.take_rows(table, index) for index, _ in hashes]
        saved = train_gpt.embed_tokens(weights | {"bigram_rows": rows}, TOKENS, SMALL)
        return saved["bigram"][0]

    found, vjp = jax.vjp(embedding, jnp.asarray(normal("ngram/table", (SMALL_TABLE, SMALL.D))))
    np.testing.assert_allclose(found, GOLDEN["ngram/embedding"], atol=1e-6)
    (gradient,) = vjp(jnp.asarray(normal("ngram/dy", found.shape)))
    norms = np.linalg.norm(gradient, axis=1)
    np.testing.assert_allclose(norms, GOLDEN["ngram/embedding_drows_sum"], atol=1e-5)


def slow_copy(tokens: list[int], t: int, first: int, longest: int) -> tuple[int, int]:
    """What copied_term finds for token t, whose document begins at `first`."""
    length, follows = 0, t
    for j in range(first, t):
        n = 0
        while n < longest and j - n >= first and tokens[j - n] == tokens[t - n]:
            n += 1
        if n and n >= length:
            length, follows = n, j + 1
    return tokens[follows], length


def test_copies_are_those_of_a_slow_search():
    c = dataclasses.replace(MINI32, copy=5, eot=9)
    tokens = np.random.default_rng(0).integers(0, 3, (4, 80))
    starts = [0, 33, 34]
    tokens[:, starts] = c.eot
    tokens[0, 1:33] = 2
    # Matches are cut to 5 tokens, so the second place counts, where the token before is another.
    tokens[1, 1:21] = [1, 0, 0, 1, 2, 2, 0, 2, 0, 0, 1, 2, 2, 1, 1, 0, 0, 1, 2, 2]
    # The gain of a length is the length, and the row of a token has its largest number there.
    w = {"head": jnp.eye(10), "copy_gains": jnp.arange(6.0)}
    gains, rows = train_gpt.copied_term(jnp.asarray(tokens), w, c)
    assert gains.max() == 5
    found = zip(tokens.tolist(), rows.argmax(axis=-1), gains[..., 0], strict=True)
    for row, candidates, lengths in found:
        for t in range(len(row)):
            first = max(start for start in starts if start <= t)
            assert (candidates[t], lengths[t]) == slow_copy(row, t, first, 5)
