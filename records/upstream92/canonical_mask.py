"""Makes data/gpt2_canonical.npz: pairs of tokens that GPT-2's tokenizer never writes side by side.

    python records/upstream92/canonical_mask.py

In validation, the preset record92 gives the second token of such a pair next to no probability, as
record 91 of modded-nanogpt does. Upstream builds the table during the run. We read it from a file,
because it is a property of the vocabulary. A test compares its bits with those of upstream.

The tokenizer first cuts text into words. Within a word, it begins with single bytes, and merges
pieces that stand side by side if together they are a token. It always merges the pair whose token
has the lowest number, and the leftmost of equal pairs, until no two pieces make a token.

Let token p be followed by token x. Some merge may join the last piece of p with the first piece of
x. Then the tokenizer never writes x directly after p, unless it cuts the text between them.

To find these pairs, we need to know when each piece exists. The number of a token is also the time
of the merge that makes it, because merges go in the order of these numbers. Just before p is
complete, it has two halves, and its last piece is the right half. Before that, its last piece was
the right half of this right half, and so on, down to the last byte of p. So each last piece appears
at the time that is its own number, and goes at the time that is the number of the next one. In the
same way, the first pieces of x are x, the left half of x, the left half of that, and so on.
"""

import hashlib
import itertools
import unicodedata
from collections.abc import Iterable, Mapping
from pathlib import Path

import numpy as np

NEVER = 1 << 30  # a time after all merges
CONTRACTIONS = (b"'s", b"'t", b"'re", b"'ve", b"'m", b"'ll", b"'d")
OUT = Path(__file__).resolve().parents[2] / "data/gpt2_canonical.npz"


# ---- Merges --------------------------------------------------------------------------------------
def halves(token: bytes, ranks: Mapping[bytes, int]) -> tuple[bytes, bytes]:
    """The two pieces that the last merge makes `token` of, which has at least two bytes."""
    pieces = [bytes([byte]) for byte in token]
    while len(pieces) > 2:
        times = [ranks.get(a + b, NEVER) for a, b in itertools.pairwise(pieces)]
        place = times.index(min(times))  # the leftmost of equal ones
        pieces[place : place + 2] = [pieces[place] + pieces[place + 1]]
    return pieces[0], pieces[1]


def all_halves(ranks: Mapping[bytes, int]) -> tuple[np.ndarray, np.ndarray]:
    """The left half and the right half of every token, both (N,), as numbers of tokens; -1 for
    tokens of one byte. Both halves have lower numbers than the token."""
    left = np.full(len(ranks), -1)
    right = np.full(len(ranks), -1)
    for token, number in ranks.items():
        if len(token) > 1:
            a, b = halves(token, ranks)
            left[number] = ranks[a]
            right[number] = ranks[b]
            if max(ranks[a], ranks[b]) >= number:
                raise ValueError(f"token {number} is older than one of its halves")
    return left, right


def beginnings(left: np.ndarray) -> list[tuple[np.ndarray, np.ndarray]]:
    """For every token f, the tokens that have f as their first piece at some time, (n,), and the
    times when that piece goes, (n,). They are sorted by time; f itself is the last one."""
    found = [[] for _ in left]
    for token in range(len(left)):
        piece = token
        end = NEVER
        while piece >= 0:
            found[piece].append((end, token))
            end = piece
            piece = left[piece]
    pairs = [np.array(sorted(entries)) for entries in found]
    return [(entries[:, 1], entries[:, 0]) for entries in pairs]


def joins(ranks: Mapping[bytes, int]) -> list[list[tuple[int, int]]]:
    """For every token l, all pairs (time, f) where l and token f together are a token, the latest
    time first. At this time they are merged if both are there and stand side by side: it is the
    number of the token that they make, but not before both have appeared."""
    found = [[] for _ in ranks]
    for token, number in ranks.items():
        for cut in range(1, len(token)):
            last = ranks.get(token[:cut])
            first = ranks.get(token[cut:])
            if last is not None and first is not None:
                found[last].append((max(number, last, first), first))
    return [sorted(entries, reverse=True) for entries in found]


def crossed_pairs(ranks: Mapping[bytes, int], left: np.ndarray, right: np.ndarray) -> np.ndarray:
    """Bits, (V, V / 8) uint8: bit x of row p tells whether a merge joins p's last piece with x's
    first piece. V is the number of tokens and end-of-text, rounded up to a multiple of 128.

    The row of p is made of parts, one for each of its last pieces. Tokens whose right half is l
    share the parts of l's own last pieces, so they begin with these. We then go through the times
    at which l is merged with something, from the first to the last. Whenever l becomes the right
    half of another token, that token receives what has been found so far.

    If two merges have the same time, the leftmost goes first. So l must still be there after this
    time, while x's first piece may go at this time."""
    size = -(-(len(ranks) + 1) // 128) * 128
    table = np.zeros((size, size // 8), np.uint8)
    beginning_with = beginnings(left)
    joined = joins(ranks)
    wholes = [[] for _ in right]  # tokens with this right half, in the order of their times
    for token in range(len(right)):
        if right[token] >= 0:
            wholes[right[token]].append(token)

    for last in range(len(right)):
        shared = table[last].copy()
        crossed = np.zeros(size, bool)
        for token in [*wholes[last], last]:
            end = NEVER if token == last else token
            while joined[last] and joined[last][-1][0] < end:
                time, first = joined[last].pop()
                tokens, ends = beginning_with[first]
                gone_later = np.searchsorted(ends, time)
                crossed[tokens[gone_later:]] = True
            table[token] = shared | np.packbits(crossed, bitorder="little")
    return table


# ---- Words ---------------------------------------------------------------------------------------
def kind(character: str) -> str:
    """What the tokenizer takes a character for: "space", "letter", "number" or "other"."""
    if character.isspace() and not "\x1c" <= character <= "\x1f":  # only Python says these are
        return "space"
    return {"L": "letter", "N": "number"}.get(unicodedata.category(character)[0], "other")


def edge(token: bytes, at_end: bool) -> str:
    """The kind of the token's first character or, with `at_end`, of its last one; "part" if the
    token does not have all bytes of this character."""
    for count in range(1, 5):  # a character has one to four bytes in UTF-8
        try:
            return kind((token[-count:] if at_end else token[:count]).decode())
        except UnicodeDecodeError:
            pass
    return "part"


def ends_in_contraction(token: bytes) -> bool:
    """Whether the token ends like "'s", after a letter, a number or nothing."""
    for contraction in CONTRACTIONS:
        if token.endswith(contraction):
            before = token.removesuffix(contraction)
            return not before or edge(before, at_end=True) in ("letter", "number")
    return False


def allow_cuts(table: np.ndarray, tokens: list[bytes]) -> None:
    """Clears the bits of `table`, (V, V / 8), for pairs that may stand side by side after all.

    Text is cut after a contraction. It may be cut between two white spaces, because the last one
    belongs to the word after it. It may be cut before a letter that follows a sign, because only
    contractions join the two. And if a token begins inside a character, we cannot tell of which
    kind this character is."""
    firsts = np.full(len(table), "part", "<U6")  # rows after the last token stay "part"
    firsts[: len(tokens)] = [edge(token, at_end=False) for token in tokens]
    masks = {}  # for each kind of last character, (V / 8,) bits: 0 for tokens that may follow it
    for last in ("space", "letter", "number", "other", "part"):
        keep = firsts != "part"
        if last == "space":
            keep &= firsts != "space"
        if last == "other":
            keep &= firsts != "letter"
        masks[last] = np.packbits(keep, bitorder="little")
    for number, token in enumerate(tokens):
        if ends_in_contraction(token):
            table[number] = 0
        else:
            table[number] &= masks[edge(token, at_end=True)]


def build(ranks: Mapping[bytes, int]) -> np.ndarray:
    """The table of masked pairs, (V, V / 8) uint8, for `ranks`: {bytes of a token: its number}. Bit
    x of row p is 1 if the tokenizer never writes x directly after p. Bits are little-endian: x is
    bit x % 8 of byte x // 8. Rows and columns of end-of-text, and those after it, are 0."""
    left, right = all_halves(ranks)
    table = crossed_pairs(ranks, left, right)
    allow_cuts(table, sorted(ranks, key=ranks.get))
    return table


# ---- The file ------------------------------------------------------------------------------------
def by_relatives(half: np.ndarray, size: int) -> list[int]:
    """All numbers below `size`, in an order where tokens stand together if they have the same
    pieces at their left (or right) end, by their left (or right) halves, (N,). Rows of such tokens
    are alike; in this order the file is compressed to a thirtieth of what it would be."""
    pieces = []
    for token in range(len(half)):
        smaller = pieces[half[token]] if half[token] >= 0 else ()
        pieces.append((*smaller, token))
    order = sorted(range(len(half)), key=lambda token: (*pieces[token], NEVER))
    return [*order, *range(len(half), size)]


def distinct(lines: np.ndarray, order: Iterable[int]) -> tuple[np.ndarray, np.ndarray]:
    """Finds equal lines of `lines`, (V, bytes), and numbers them in `order`. Returns the first
    place of each distinct line, (n,), and for each line the number of its distinct one, (V,)."""
    numbers = {}
    places = []
    number_of = np.zeros(len(lines), np.uint16)
    for place in order:
        number_of[place] = numbers.setdefault(lines[place].tobytes(), len(numbers))
        if len(numbers) > len(places):
            places.append(place)
    return np.array(places), number_of


def transpose(bits: np.ndarray) -> np.ndarray:
    """Bits of (A, B / 8) bytes as (B, A / 8) bytes, with zeros where A is no multiple of 8."""
    parts = []
    for part in np.array_split(bits, min(100, bits.shape[1]), axis=1):  # to need little memory
        unpacked = np.unpackbits(part, axis=1, bitorder="little")
        parts.append(np.packbits(unpacked, axis=0, bitorder="little").T)
    return np.concatenate(parts)


def save(path: str | Path, table: np.ndarray, ranks: Mapping[bytes, int]) -> None:
    """Writes a table, (V, V / 8), as three arrays: `bits` (R, C / 8) has only its R distinct rows
    and C distinct columns; `row_of` and `column_of`, (V,) uint16, tell which one a token has."""
    left, right = all_halves(ranks)
    rows, row_of = distinct(table, by_relatives(right, len(table)))
    columns = transpose(table[rows])
    some, column_of = distinct(columns, by_relatives(left, len(table)))
    bits = transpose(columns[some])[: len(rows)]
    np.savez_compressed(path, bits=bits, row_of=row_of, column_of=column_of)


def load(path: str | Path) -> tuple[np.ndarray, np.ndarray]:
    """Reads a file of `save`. Returns `row_of`, (V,) uint16, and `rows`, (R, V / 8) uint8: the row
    of token p in the table is rows[row_of[p]]."""
    with np.load(path) as file:
        column_of = file["column_of"].astype(int)
        rows = []
        for part in np.array_split(file["bits"], 200):  # to need little memory
            bits = np.unpackbits(part, axis=1, bitorder="little").take(column_of, axis=1)
            rows.append(np.packbits(bits, axis=1, bitorder="little"))
        return file["row_of"], np.concatenate(rows)


if __name__ == "__main__":
    import tiktoken

    ranks = tiktoken.get_encoding("gpt2")._mergeable_ranks
    table = build(ranks)
    save(OUT, table, ranks)
    size = OUT.stat().st_size
    count = sum(int(np.bitwise_count(row).sum()) for row in table)
    print(f"{OUT.name}: {size:,} bytes; {count:,} bits, sha256 {hashlib.sha256(table).hexdigest()}")
