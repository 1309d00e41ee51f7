"""The golden numbers of parts of record 92, made in float32 by upstream's own functions.

The file is r92_parts.npz beside this one, or the one that GOLDEN_R92_NPZ names; every size is read
from it.
"""

import json
import os
import zlib
from pathlib import Path

import numpy as np

PATH = os.environ.get("GOLDEN_R92_NPZ", Path(__file__).with_name("r92_parts.npz"))
GOLDEN = np.load(PATH, allow_pickle=False)
META = json.loads(str(GOLDEN["meta/json"]))


def normal(name: str, shape: tuple[int, ...], scale: float = 1.0) -> np.ndarray:
    """The random numbers of an array, which follow from its name; float32."""
    seed = (zlib.crc32(name.encode()) + META["base"]) % 2**32
    numbers = np.random.Generator(np.random.PCG64(seed)).standard_normal(shape)
    return (scale * numbers).astype(np.float32)


def relative(a, b) -> float:
    """The norm of a - b, as a share of that of b."""
    a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
    assert a.shape == b.shape, (a.shape, b.shape)
    return float(np.linalg.norm(a - b) / (np.linalg.norm(b) or 1))
