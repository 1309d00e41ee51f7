"""The exercises of basics/attention.py have these answers."""

from functools import partial

import attention
import numpy as np


def test_exercise_1_seven_layers_of_window_8_reach_the_first_of_48_tokens():
    """A layer reaches 7 tokens further back: token 47 sees 40, with 6 layers 5, with 7 layers 0."""
    window = partial(attention.attend, window=8)
    first = []
    for depth in 1, 6, 7:
        sizes, _ = attention.jacobian(window, depth)
        first.append(np.flatnonzero(sizes[-1])[0])
    assert first == [40, 5, 0]
