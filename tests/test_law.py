"""law.py passes a mixture that is right, and finds faults that were planted in it."""

from types import SimpleNamespace

import law
import numpy as np
import pytest

C = SimpleNamespace(vocab=17, eot=16)
TOKENS_BS = law.text(C, T=127, count=8)
MASS = 0.3  # that the mixture gives to copies
SINK = 2.0  # the weight of a key that votes for nothing


def mixture(tokens_BT: np.ndarray, fault: str = "") -> np.ndarray:
    """A bigram model, mixed with votes of all earlier tokens that equal the last one, each for the
    token that followed it."""
    B, T = tokens_BT.shape
    rng = np.random.default_rng(5)
    logits_VV = rng.normal(size=(C.vocab, C.vocab))
    p_VV = np.exp(logits_VV) / np.exp(logits_VV).sum(axis=1, keepdims=True)
    p_lm_BTV = p_VV[tokens_BT]
    if fault == "fitted":  # on the text that it predicts
        counts_BV = np.stack([np.bincount(row_T, minlength=C.vocab) for row_T in tokens_BT])
        p_lm_BTV = 0.9 * p_lm_BTV + 0.1 * (counts_BV / T)[:, None]
    position_T = np.arange(T)
    is_earlier_TT = position_T[None, :] < position_T[:, None]
    if fault == "next token":  # the token itself votes for the one that follows it
        is_earlier_TT = position_T[None, :] <= position_T[:, None]
    votes_BTT = is_earlier_TT & (tokens_BT[:, :, None] == tokens_BT[:, None, :])
    next_BTV = np.eye(C.vocab)[np.roll(tokens_BT, -1, axis=1)]
    total_BT1 = votes_BTT.sum(axis=2, keepdims=True) + SINK
    p_copy_BTV = votes_BTT @ next_BTV / total_BT1
    sink_BT1 = SINK / total_BT1
    if fault == "sink":  # its mass is lost
        sink_BT1 = 0.0
    return (p_lm_BTV * (1 - MASS * (1 - sink_BT1)) + MASS * p_copy_BTV).astype("f4")


def test_a_mixture_that_is_right_passes():
    law.check(mixture, TOKENS_BS, C.vocab)


@pytest.mark.parametrize("fault, message", [
    ("sink", "sum to 1 only within"),
    ("next token", "change the probabilities after token"),
    ("fitted", "change the probabilities after token"),
])  # fmt: skip
def test_planted_faults_are_found(fault, message):
    with pytest.raises(AssertionError, match=message):
        law.check(lambda tokens_BT: mixture(tokens_BT, fault), TOKENS_BS, C.vocab)
