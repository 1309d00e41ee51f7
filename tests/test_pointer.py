"""[pointer] is the mixture that its formula says, in training and in the tools of evals/."""

import dataclasses
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import law
import numpy as np
import pytest
import weights

import train_gpt
from tests.test_export import TRAIN, all_log_p, save
from tests.tools import FLOAT32, MINI32, noise, whole_loss, whole_weights
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
    a_BT = jax.nn.sigmoid(z_BTV[..., c.vocab] - total_BT + w["pointer_slot"][longest_BT])
    a_BT1 = a_BT[..., None]
    terms = jnp.concatenate((jnp.zeros(1), jnp.cumsum(w["pointer_match"])))
    scores_BTT = q_BTE @ k_BTE.transpose(0, 2, 1) * c.pointer_D**-0.5 + terms[lengths]
    scores_BTT = jnp.where(sees, scores_BTT, -jnp.inf)
    sink_BT1 = q_BTE @ w["pointer_sink"][:, None] * c.pointer_D**-0.5 + w["pointer_sink_bias"]
    shares = jax.nn.softmax(jnp.concatenate((scores_BTT, sink_BT1), axis=-1))
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


@pytest.mark.parametrize("band", [5, 2048])
def test_the_loss_and_its_gradients_are_those_of_the_formula(band):
    tokens_BS, targets_NJ = some_text()
    c = dataclasses.replace(C, pointer_band=band)

    def ours(x_BTD, head_VD, w):
        votes_N3 = train_gpt.pointer_votes(x_BTD, tokens_BS, w, c).reshape(B * T, -1)
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


@pytest.mark.parametrize("band", [5, 2048])
def test_the_tools_predict_what_the_formula_says(band):
    tokens_BS, _ = some_text()
    c = dataclasses.replace(C, pointer_band=band)
    x_BTD, head_VD, w = some_weights()
    of = jax.jit(lambda *arguments: formula(*arguments, tokens_BS, c))
    log_p_BTV, alone_BTV = of(x_BTD, head_VD, w)
    assert np.abs(log_p_BTV - alone_BTV).max() > 1
    model = SimpleNamespace(code=train_gpt, c=c)
    whole = w | {"head": head_VD}
    read = lambda prediction, _: prediction.log_p
    found_BTV = weights.predict_all(model, whole, x_BTD, jnp.asarray(tokens_BS[:, :-1]), read)
    np.testing.assert_allclose(found_BTV, log_p_BTV, atol=1e-4)
    of_targets = weights.target_log_p(model, whole, x_BTD, jnp.asarray(tokens_BS), chunk=7)
    for some_BT, all_BTV in zip(of_targets, (log_p_BTV, alone_BTV), strict=True):
        chosen_BT1 = np.take_along_axis(all_BTV, tokens_BS[:, 1:, None], axis=-1)
        np.testing.assert_allclose(some_BT, chosen_BT1[..., 0], atol=1e-4)


def test_without_a_pointer_the_padding_is_part_of_the_softmax_or_not():
    tokens_BS, targets_NJ = some_text()
    x_BTD, head_VD, _ = some_weights()
    c = dataclasses.replace(C, pointer=0)
    model = SimpleNamespace(code=train_gpt, c=c)
    arguments = model, {"head": head_VD}, x_BTD, jnp.asarray(tokens_BS)
    log_p_BT, alone_BT = weights.target_log_p(*arguments, chunk=7)
    x_ND = x_BTD.reshape(-1, C.D)
    loss = train_gpt.head_loss(x_ND, head_VD, targets_NJ[:, :1], jnp.ones(1), None, c)
    assert -log_p_BT.sum() == pytest.approx(float(loss), rel=1e-5)
    np.testing.assert_array_equal(log_p_BT, alone_BT)
    p = lambda prediction, _: jnp.exp(prediction.log_p)
    p_BTV = weights.predict_all(*arguments[:3], jnp.asarray(tokens_BS[:, :-1]), p, padding=False)
    np.testing.assert_allclose(p_BTV.sum(axis=-1), 1, rtol=1e-5)


# ---- The law of mixtures -------------------------------------------------------------------------
def test_probabilities_obey_the_law(tmp_path):
    """Of a model with every technique, over more than two bands."""
    save(tmp_path / "a.npz", MINI32)
    w = weights.open_weights(tmp_path / "a.npz", TRAIN)
    assert w.c.pointer_band == 2 * MINI32.pointer_band
    w.arrays["head"][w.c.vocab] *= 20  # so copies have much of the probability
    whole = whole_weights(MINI32) | {"head": jnp.asarray(w.arrays["head"])}
    tokens_BS = law.text(w.c, T=127, count=8)
    assert tokens_BS.shape[1] > 3 * w.c.pointer_band
    run = weights.runner(w, lambda *read: all_log_p(w, *read), 1)

    def probabilities(tokens_BT):
        return np.exp(run(np.pad(tokens_BT, ((0, 0), (0, 1)))))

    loss = jax.jit(lambda tokens: whole_loss(whole, tokens, {1: 1.0}, w.c, w.stage))
    law.check(probabilities, tokens_BS, w.c.vocab, loss)
