"""The law for whatever changes the distribution of the next token, as mixtures and caches do:
probabilities sum to 1, and none of them depends on a token that comes later."""

from collections.abc import Callable

import numpy as np

CUTS = 8  # places from which on all tokens are changed


def text(c, T: int, count: int, seed: int = 0) -> np.ndarray:
    """(count, T + 1) tokens of documents of about 40 tokens. Half of the text repeats earlier text,
    also of other documents, so that mixtures find what they look for. c has vocab and eot."""
    rng = np.random.default_rng(seed)
    tokens_BS = rng.integers(0, c.vocab, (count, T + 1)).astype(np.int32)
    tokens_BS[tokens_BS == c.eot] = (c.eot + 1) % c.vocab
    for row_S in tokens_BS:
        for end in range(32, T + 1, 32):
            length = rng.integers(2, 17)
            start = rng.integers(0, end - length)
            row_S[end : end + length] = row_S[start : start + length][: T + 1 - end]
        row_S[rng.choice(T, T // 40, replace=False)] = c.eot
        row_S[0] = c.eot
    return tokens_BS


def check(probabilities: Callable, tokens_BS: np.ndarray, vocab: int, loss: Callable):
    """Asserts the law.

    probabilities(tokens_BT) returns (B, T, V): in row t, of every token that may follow token t. V
    is the vocabulary, without padding. loss(tokens_BS) returns the sum over all tokens but the
    first of -log p in nats, as the training script computes it.
    """
    tokens_BT = tokens_BS[:, :-1]
    p_BTV = np.asarray(probabilities(tokens_BT))
    assert p_BTV.shape == (*tokens_BT.shape, vocab), p_BTV.shape
    assert np.all(p_BTV >= 0), "a probability is negative, or no number"
    worst = np.abs(p_BTV.sum(axis=2, dtype="f8") - 1).max()
    assert worst <= 1e-5, f"the probabilities of a position sum to 1 only within {worst:.1e}"
    check_past(probabilities, tokens_BT, p_BTV)
    chosen_BT1 = np.take_along_axis(p_BTV, tokens_BS[:, 1:, None], axis=2)
    want = -np.log(chosen_BT1.astype("f8")).sum()
    got = float(loss(tokens_BS))
    assert abs(got - want) <= 1e-4 * want, f"the loss is {got}, and -log p adds up to {want}"


def check_past(probabilities: Callable, tokens_BT: np.ndarray, p_BTV: np.ndarray) -> None:
    """Row t is the same to the bit, whatever comes after token t, and does depend on token t: else
    this would prove nothing. Places near the beginning and the end are among those that are
    tried. Later tokens are replaced by random ones, and by earlier text, which matches."""
    B, T, V = p_BTV.shape
    rng = np.random.default_rng(1)
    inner = rng.choice(np.arange(2, T - 2), CUTS - 3, replace=False)
    for cut in [1, T // 2, *inner, T - 1]:
        random_BT = tokens_BT.copy()
        random_BT[:, cut:] = (tokens_BT[:, cut:] + rng.integers(1, V, (B, T - cut))) % V
        earlier_BT = tokens_BT.copy()
        earlier_BT[:, cut:] = np.resize(tokens_BT[:, :cut].T, (T - cut, B)).T
        one_BT = tokens_BT.copy()
        one_BT[:, cut] = (tokens_BT[:, cut] + 1) % V
        reads_the_text = False
        for changed_BT in (random_BT, earlier_BT, one_BT):
            q_BTV = np.asarray(probabilities(changed_BT))
            differs_BTV = q_BTV.view("u4") != p_BTV.view("u4")  # -0.0 is not 0.0
            assert not differs_BTV[:, :cut].any(), f"tokens from {cut} on change what is before"
            reads_the_text |= differs_BTV[:, cut].any()
        assert reads_the_text, f"nothing depends on token {cut}"
