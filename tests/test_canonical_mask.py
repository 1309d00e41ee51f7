"""data/canonical_mask.py and gpt2_canonical.npz: pairs of tokens that never stand side by side.

The golden file has numbers of the original record's own builder: the sha256 of its table and the
number of bits in it, the number of bits in some rows, some pairs with their bit (p, x, bit), and
the tokens of a text, with the bit of each next token and the number of bits in each token's row.
"""

import collections
import hashlib
import itertools
import lzma
import unicodedata
from pathlib import Path

import canonical_mask
import numpy as np
import pytest

from tests.golden_r92 import GOLDEN

HERE = Path(__file__).parent


def read_ranks():
    """GPT-2's tokens, {bytes: number}. In vocab.bpe, bytes are written as characters that can be
    seen; the bytes that cannot be seen are moved to 256 and up, and come last in the order."""
    seen = [*range(33, 127), *range(161, 173), *range(174, 256)]
    hidden = sorted(set(range(256)) - set(seen))
    byte_of = {chr(byte): byte for byte in seen}
    byte_of |= {chr(256 + i): byte for i, byte in enumerate(hidden)}
    tokens = [bytes([byte]) for byte in [*seen, *hidden]]
    merges = lzma.decompress((HERE / "gpt2_vocab.bpe.xz").read_bytes()).decode()
    for line in merges.splitlines()[1:]:
        tokens.append(bytes(byte_of[character] for character in line.replace(" ", "")))
    return {token: number for number, token in enumerate(tokens)}


RANKS = read_ranks()
TOKENS = list(RANKS)


@pytest.fixture(scope="module")
def loaded():
    """row_of, (V,), and rows, (R, V / 8), of the file in the repository."""
    return canonical_mask.load(canonical_mask.OUT)


@pytest.fixture(scope="module")
def counts(loaded):
    """How many bits the row of each token has, (V,)."""
    row_of, rows = loaded
    return np.bitwise_count(rows).sum(1, dtype=np.int64)[row_of]


def bit(table, p, x):
    """Bit x of row p, for a table that gives the row of p, (V / 8,), as table(p)."""
    return int(table(p)[x // 8]) >> (x % 8) & 1


def sample(table, n, count, seed):
    """So many pairs of tokens below n: half of them at random, half of them masked by the table."""
    draw = np.random.Generator(np.random.PCG64(seed))
    pairs = draw.integers(0, n, (count // 2, 2)).tolist()
    while len(pairs) < count:
        p = int(draw.integers(n))
        masked = np.flatnonzero(np.unpackbits(table(p), bitorder="little"))
        if len(masked):
            pairs.append((p, int(draw.choice(masked))))
    return pairs


def merge_all(text, new):
    """The pieces of a text after neighbours that make `new` are merged, from left to right."""
    found = []
    for piece in text:
        if found and found[-1] + piece == new:
            found[-1] = new
        else:
            found.append(piece)
    return found


# ---- The slow way --------------------------------------------------------------------------------
def is_merged(p, x, ranks):
    """Tokenizes the bytes of p and x as one word; whether a merge goes over the end of p."""
    word = p + x
    cuts = list(range(len(word) + 1))  # where pieces begin and end
    while len(cuts) > 2:
        spans = list(zip(cuts, cuts[1:-1], cuts[2:], strict=False))
        merges = [(ranks[word[a:b]], m) for a, m, b in spans if word[a:b] in ranks]
        if not merges:
            return False
        gone = min(merges)[1]  # of equal ranks, the first in the word
        if gone == len(p):
            return True
        cuts.remove(gone)
    return False


def kind(character):
    """L, N, S for white space, O for other characters, and ? for a piece of one."""
    if "\ud800" <= character <= "\udfff":
        return "?"
    category = unicodedata.category(character)
    if category[0] in "LN":
        return category[0]
    return "S" if category[0] == "Z" or character in "\t\n\v\f\r\x85" else "O"


def slow_bit(p, x, ranks):
    """Whether the tokenizer never writes x after p; both are the bytes of a token."""
    before = p.decode(errors="surrogateescape")
    after = x.decode(errors="surrogateescape")
    seam = kind(before[-1]) + kind(after[0])
    if seam[1] == "?" or seam in ("SS", "OL"):
        return 0
    for ending in ("s", "t", "re", "ve", "m", "ll", "d"):
        stem = before.removesuffix("'" + ending)
        if stem != before and (stem == "" or kind(stem[-1]) in "LN"):
            return 0
    return int(is_merged(p, x, ranks))


# ---- Tests ---------------------------------------------------------------------------------------
def test_the_table_is_that_of_the_original_record(loaded, counts):
    row_of, rows = loaded
    assert rows.shape[1] * 8 == len(row_of) == 50304 and rows.dtype == np.uint8
    assert counts.sum() == GOLDEN["mask/total"].item()
    found = hashlib.sha256()
    for part in np.array_split(row_of, 100):  # the whole table has 316 MB
        found.update(rows[part])
    assert found.digest() == GOLDEN["mask/sha256"].tobytes()


def test_rows_pairs_and_a_text_are_those_of_the_original_record(loaded, counts):
    row_of, rows = loaded
    table = lambda p: rows[row_of[p]]
    np.testing.assert_array_equal(counts[GOLDEN["mask/rows"]], GOLDEN["mask/rows_count"])
    for p, x, expected in GOLDEN["mask/pairs"].tolist():
        assert bit(table, p, x) == expected, (p, x)
    text = GOLDEN["mask/text_tokens"]
    np.testing.assert_array_equal(counts[text], GOLDEN["mask/text_count"])
    targets = [bit(table, p, x) for p, x in zip(text[:-1], text[1:], strict=True)]
    np.testing.assert_array_equal(targets, GOLDEN["mask/text_target_masked"])


def test_some_pairs_are_those_of_the_slow_way(loaded):
    row_of, rows = loaded
    table = lambda p: rows[row_of[p]]
    for p, x in sample(table, len(TOKENS), 200, seed=1):
        assert bit(table, p, x) == slow_bit(TOKENS[p], TOKENS[x], RANKS), (TOKENS[p], TOKENS[x])


def test_a_table_of_the_first_tokens_is_that_of_the_slow_way(tmp_path):
    n = 1500
    ranks = {token: number for token, number in RANKS.items() if number < n}
    table = canonical_mask.build(ranks)
    assert table.shape == (1536, 192) and not table[n:].any()
    for p, x in sample(table.__getitem__, n, 1000, seed=2):
        assert bit(table.__getitem__, p, x) == slow_bit(TOKENS[p], TOKENS[x], ranks), (p, x)

    files = [tmp_path / "a.npz", tmp_path / "b.npz"]
    for file in files:
        canonical_mask.save(file, table, ranks)
    assert files[0].read_bytes() == files[1].read_bytes()
    row_of, rows = canonical_mask.load(files[0])
    assert len(rows) < n and len(np.unique(rows, axis=0)) == len(rows)
    np.testing.assert_array_equal(rows[row_of], table)


def test_all_pairs_of_a_table_with_many_equal_merges():
    """Words of two letters, where most pairs meet merges of equal rank."""
    draw = np.random.Generator(np.random.PCG64(3))
    text = [bytes([byte]) for byte in draw.choice([97, 98], 2000).tolist()]
    ranks = {bytes([byte]): byte for byte in range(256)}
    while len(ranks) < 300:  # learns merges as GPT-2's were learned: the most frequent pair first
        pairs = collections.Counter(a + b for a, b in itertools.pairwise(text))
        new = max(pairs, key=lambda pair: (pair not in ranks, pairs[pair]))
        ranks[new] = len(ranks)
        text = merge_all(text, new)
    table = canonical_mask.build(ranks)
    tokens = list(ranks)
    some = [97, 98, *range(256, 300)]
    found = [bit(table.__getitem__, p, x) for p in some for x in some]
    assert found == [slow_bit(tokens[p], tokens[x], ranks) for p in some for x in some]
    assert 100 < sum(found) < len(found) - 100


def test_the_rules_of_characters():
    for token, first, last in [
        (b" the", "space", "letter"),
        (b"\xc2\xb2!", "number", "other"),
        (b"\x1c", "other", "other"),
        (b"\xe4\xb8", "part", "part"),
        (b"a\xe4\xb8", "letter", "part"),
        (b"\xb8\xad\n", "part", "space"),
        ("\u4e2d".encode(), "letter", "letter"),
    ]:
        found = [canonical_mask.edge(token, at_end) for at_end in (False, True)]
        assert found == [first, last], token
    for token in (b"'s", b"I'll", b"7'd"):
        assert canonical_mask.ends_in_contraction(token), token
    for token in (b" 's", b"!'re", b"s", b"'S", b"'"):
        assert not canonical_mask.ends_in_contraction(token), token


@pytest.mark.slow
def test_the_file_that_lies_in_the_repository_is_made_again(tmp_path):
    made = tmp_path / "made.npz"
    canonical_mask.save(made, canonical_mask.build(RANKS), RANKS)
    with np.load(made) as new, np.load(canonical_mask.OUT) as old:
        assert sorted(new) == sorted(old) == ["bits", "column_of", "row_of"]
        for name in new:
            np.testing.assert_array_equal(new[name], old[name], strict=True)
