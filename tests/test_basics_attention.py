"""basics/attention.py runs, finds faults that people make, and its exercises have these answers."""

from functools import partial

import attention
import numpy as np
import pytest
from tools import basic


def test_it_runs(tmp_path):
    run = basic(tmp_path, "attention", "--draw", "attention.svg")
    assert run.returncode == 0 and run.stderr == "", run.stderr
    assert run.stdout.count("ok   ") == 13 and "WRONG" not in run.stdout
    assert (tmp_path / "attention.svg").stat().st_size < 80_000


@pytest.mark.parametrize(
    "old, new, what",
    [
        ("is_causal=causal", "is_causal=False", "WRONG causal "),
        ("(window - 1, 0)", "(window, 0)", "WRONG window 8 "),
        ("256 * np.stack", "np.stack", "WRONG three documents"),
        ("wide(k, code_k)", "wide(k, 0 * code_k)", "WRONG three documents"),
        ("& ((j >= window) | (n > 0))", "", "WRONG window 8 in bands"),
    ],
)
def test_faults_are_found(tmp_path, old, new, what):
    run = basic(tmp_path, "attention", plant=(old, new))
    assert run.returncode == 1 and run.stderr == "", run.stderr
    assert what in run.stdout.splitlines()[-1], run.stdout


def test_exercise_1_seven_layers_of_window_8_reach_the_first_of_48_tokens():
    """Each layer reaches 7 tokens further: after 6 the last of 48 sees back to token 5."""
    window = partial(attention.attend, window=8)
    first = [np.flatnonzero(attention.sees(window, depth)[-1])[0] for depth in (1, 6, 7)]
    assert first == [40, 5, 0]


def test_exercise_2_the_code_of_later_documents_needs_the_opposite_sign():
    """For a model that reads backwards (only what comes later), the product has to fall with later
    documents: the code of q changes its sign, and the mask is causal for reversed positions."""
    turned = lambda x: x[::-1]

    def apart(q, k, v):
        return turned(attention.apart(turned(q), turned(k), turned(v)))
