"""The exercise of basics/attention.py has this answer."""

from functools import partial

import attention
import numpy as np


def test_exercise_1_seven_layers_of_window_8_reach_the_first_of_48_tokens():
    """A layer reaches 7 tokens further back: token 47 sees 40, with 6 layers 5, with 7 layers 0."""
    sizes, _ = attention.jacobian(partial(attention.attend, window=8))
    sees = (sizes > 0).astype(int)
    first = [np.flatnonzero(np.linalg.matrix_power(sees, depth)[-1])[0] for depth in (1, 6, 7)]
    assert first == [40, 5, 0]
