"""The frozen file of record 92 is what it was, and the mask that it reads is upstream's. What it
computes is checked in the patches that have it: see ideas_*_checks.py."""

import hashlib

import numpy as np

from lab.tests.record92 import SOURCE
from records.upstream92 import canonical_mask
from records.upstream92.golden_r92 import GOLDEN

SHA256 = "d3695f406f51a6dc6d1ee02a0d16111d723e9db180ec936d612e5a85aec27fed"


def test_the_file_is_frozen():
    assert hashlib.sha256(SOURCE.encode()).hexdigest() == SHA256


def test_the_mask_is_that_of_the_original_record():
    """The golden file has the sha256 of its table, and the number of bits in it."""
    row_of, rows = canonical_mask.load(canonical_mask.OUT)
    counts = np.bitwise_count(rows).sum(axis=1, dtype=np.int64)
    assert counts[row_of].sum() == GOLDEN["mask/total"].item()
    found = hashlib.sha256()
    for part in np.array_split(row_of, 100):  # the whole table has 316 MB
        found.update(rows[part])
    assert found.digest() == GOLDEN["mask/sha256"].tobytes()
