"""gpt2_prefixes.bin: of each GPT-2 token, the longest other token that its bytes begin with.

    python data/gpt2_prefixes.py OUT

50,257 int32, little-endian, -1 where there is none. The
record trains to predict it (record 88 of modded-nanogpt, which builds the table on the clock). It
is a property of the vocabulary, like the tokens, and is read before the clock starts. A test makes
it again from GPT-2's merges.
"""

import sys
from collections.abc import Mapping
from pathlib import Path

import numpy as np


def prefixes(ranks: Mapping[bytes, int]) -> np.ndarray:
    """ranks: bytes of each token -> its number; the one after the last starts documents."""
    found = np.full(len(ranks) + 1, -1, "<i4")
    for token, number in ranks.items():
        starts = (token[:end] for end in range(len(token) - 1, 0, -1))
        found[number] = next((ranks[start] for start in starts if start in ranks), -1)
    return found


if __name__ == "__main__":
    import tiktoken

    Path(sys.argv[1]).write_bytes(
        prefixes(tiktoken.get_encoding("gpt2")._mergeable_ranks).tobytes()
    )
