"""Makes gpt2_prefixes.bin: for each GPT-2 token, the longest other token that its bytes begin with.

    python data/gpt2_prefixes.py OUT

The file has 50,257 int32, little-endian, and -1 where there is no such token. The record trains to
predict the prefix, as record 88 of modded-nanogpt does. Upstream builds the table on the clock; we
read it before the clock starts, because like the tokens it is a property of the vocabulary. A test
makes it from GPT-2's merges and compares.
"""

import sys
from collections.abc import Mapping
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent))  # for PYTHONSAFEPATH=1
import shards


def prefixes(ranks: Mapping[bytes, int]) -> np.ndarray:
    """The table, (V,), for `ranks`: {bytes of a token: its number}. Its last entry is end-of-text,
    which is not in `ranks`."""
    table = np.full(len(ranks) + 1, -1, "<i4")
    for token, number in ranks.items():
        for end in range(1, len(token)):
            if token[:end] in ranks:
                table[number] = ranks[token[:end]]  # a longer prefix replaces a shorter one
    return table


if __name__ == "__main__":
    table = prefixes(shards.gpt2()._mergeable_ranks)
    shards.write(Path(sys.argv[1]), [table.tobytes()])
