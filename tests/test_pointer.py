"""[pointer] is the mixture that its formula says, and obeys the law of mixtures."""

import dataclasses
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import law
import numpy as np
import pytest
import weights

import train_gpt
from tests.tools import FLOAT32, MINI32, ngram_rows, noise, whole_loss, whole_weights
from train_gpt import norm, softcap

# ---- Against the formula -------------------------------------------------------------------------
B, T = 2, 23
C = dataclasses.replace(
    train_gpt.PRESETS["tiny"], D=16, H=2, F=32, vocab=20, eot=19, pointer=4, pointer_D=8,
    batch=1, head_chunk=T, g_scale=1.0, **FLOAT32,
)  # fmt: skip
WEIGHTS_J = jnp.array([1.0, 0.5])


def some_text() -> tuple[np.ndarray, np.ndarray]:
    """Tokens (B, T + 1) of three documents, and targets (B T, 2): the next two tokens, or none."""
    tokens_BS = np.random.default_rng(0).integers(0, 4, (B, T + 1)).astype(np.int32)
    tokens_BS[:, 0] = tokens_BS[0, 13] = C.eot
    after_BT = np.roll(tokens_BS, -2, axis=1)[:, :-1]
    targets_NJ = np.stack((tokens_BS[:, 1:], after_BT), axis=-1).reshape(-1, 2)
    targets_NJ[T - 1 :: T, 1] = -1
    return tokens_BS, targets_NJ


def pairs(tokens_BS: np.ndarray, c) -> tuple[np.ndarray, np.ndarray]:
    """(B, T, T) for tokens t and j: whether t sees j, and how many equal tokens end there, up to
    c.pointer; found one by one."""
    B, T = tokens_BS[:, 1:].shape
    sees = np.zeros((B, T, T), bool)
    lengths = np.zeros((B, T, T), int)
    for b, row in enumerate(tokens_BS.tolist()):
        for t in range(T):
            first = max((i for i in range(t + 1) if row[i] == c.eot), default=0)
            for j in range(first, t):
                n = 0
                while n < c.pointer and j - n >= first and row[j - n] == row[t - n]:
                    n += 1
                sees[b, t, j] = j // c.pointer_band >= t // c.pointer_band - 1
                lengths[b, t, j] = n
    return sees, lengths


def formula(x_BTD, head_VD, w: dict, tokens_BS, c) -> tuple:
    """Log-probabilities (B, T, V) by the definition, and those of the head alone."""
    z_BTV = softcap(jnp.einsum("BTD,VD->BTV", x_BTD, head_VD))
    alone_BTV = jax.nn.log_softmax(z_BTV[..., : c.vocab])
    total_BT = jax.nn.logsumexp(z_BTV[..., : c.vocab], axis=-1)
    w_q, w_k, w_p = w["pointer_qk"]
    before_BTD = jnp.pad(x_BTD[:, :-1], ((0, 0), (1, 0), (0, 0)))
    q_BTE = w["pointer_gain"] * norm(x_BTD @ w_q.T)
    k_BTE = norm(x_BTD @ w_k.T + before_BTD @ w_p.T)
    sees, lengths = pairs(np.asarray(tokens_BS), c)
    longest_BT = np.where(sees, lengths, 0).max(axis=-1)
    a_BT = jax.nn.sigmoid(z_BTV[..., c.vocab] - total_BT + w["pointer_share"][longest_BT])
    a_BT1 = a_BT[..., None]
    terms = jnp.concatenate((jnp.zeros(1), jnp.cumsum(w["pointer_match"])))
    scores_BTT = q_BTE @ k_BTE.transpose(0, 2, 1) * c.pointer_D**-0.5 + terms[lengths]
    scores_BTT = jnp.where(sees, scores_BTT, -jnp.inf)
    sentinel_BT1 = (
        q_BTE @ w["pointer_sentinel"][:, None] * c.pointer_D**-0.5 + w["pointer_sentinel_bias"]
    )
    shares = jax.nn.softmax(jnp.concatenate((scores_BTT, sentinel_BT1), axis=-1))
    copied_BTV = shares[..., :-1] @ jax.nn.one_hot(tokens_BS[:, 1:], c.vocab)
    s_BT1 = shares[..., -1:]
    p_BTV = jnp.exp(alone_BTV) * (1 - a_BT1 * (1 - s_BT1)) + a_BT1 * copied_BTV
    return jnp.log(p_BTV + 1e-9), alone_BTV


def some_weights() -> tuple[jax.Array, jax.Array, dict]:
    """x (B, T, D), head (V, D), and the pointer's weights."""
    x_BTD = norm(jnp.asarray(noise("x", (B, T, C.D))))
    head_VD = jnp.asarray(noise("head", (train_gpt.padded_vocab(C), C.D)))
    w = {}
    for name, param in train_gpt.pointer_params(C).items():
        w[name] = jnp.asarray(noise(name, param.shape))
    return x_BTD, head_VD, w


def test_the_loss_and_its_gradients_are_those_of_the_formula():
    tokens_BS, targets_NJ = some_text()
    c = dataclasses.replace(C, pointer_band=5)

    def ours(x_BTD, head_VD, w):
        votes_N3 = train_gpt.pointer_copies(x_BTD, tokens_BS, w, c).reshape(B * T, -1)
        x_ND = x_BTD.reshape(-1, C.D)
        return train_gpt.head_loss(x_ND, head_VD, targets_NJ, WEIGHTS_J, votes_N3, c)

    def theirs(x_BTD, head_VD, w):
        both = formula(x_BTD, head_VD, w, tokens_BS, c)
        loss = 0.0
        for log_p, target_N, weight in zip(both, targets_NJ.T, WEIGHTS_J, strict=True):
            found_N = log_p.reshape(B * T, -1)[np.arange(B * T), target_N]
            loss -= weight * jnp.where(target_N < 0, 0, found_N).sum()
        return loss

    arguments = some_weights()
    found, expected = [
        jax.jit(jax.value_and_grad(f, (0, 1, 2)))(*arguments) for f in (ours, theirs)
    ]
    assert found[0] == pytest.approx(float(expected[0]), rel=1e-5)
    for ours, theirs in zip(*map(jax.tree.leaves, (found[1], expected[1])), strict=True):
        size = np.linalg.norm(theirs)
        assert size > 0 and np.linalg.norm(ours - theirs) < 1e-4 * size


# ---- The law of mixtures -------------------------------------------------------------------------
def test_probabilities_obey_the_law():
    """Over more than two bands, as the tools of evals/ predict them; and the loss that is trained
    is that of these probabilities."""
    c = dataclasses.replace(MINI32, layers=MINI32.layers[1:2], mudd_head=(), vocab=65, eot=64)
    whole = whole_weights(c)
    whole["head"] = whole["head"].at[c.vocab].multiply(20)  # so copies have much of the probability
    model = SimpleNamespace(code=train_gpt, c=c)
    tokens_BS = law.text(c, T=127, count=8)
    assert tokens_BS.shape[1] > 3 * c.pointer_band

    @jax.jit
    def probabilities(tokens_BT):
        x_BTD = train_gpt.forward(ngram_rows(whole, tokens_BT, c), tokens_BT, c, 1)
        read = lambda prediction, _: jnp.exp(prediction.log_p)
        return weights.predict_all(model, whole, norm(x_BTD), tokens_BT, read)

    loss = jax.jit(lambda tokens: whole_loss(whole, tokens, {1: 1.0}, c, 1))
    law.check(probabilities, tokens_BS, c.vocab, loss)
