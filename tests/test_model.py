"""Which token may see which: causality, documents, windows; float32 where no test says else."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import train_gpt
from tests.tools import MINI, MINI32, sequences, whole_weights


@pytest.fixture
def activations(monkeypatch):
    """The model up to its head: (8, T, D) final activations of (8, T + 1) tokens."""
    monkeypatch.setattr(train_gpt, "head_loss", lambda x, w, targets, c: x)
    weights = whole_weights(MINI32)
    function = jax.jit(lambda tokens: train_gpt.loss_fn(weights, tokens, MINI32, window=48))
    return lambda tokens: np.asarray(function(tokens)).reshape(8, -1, MINI32.D)


def changed(before, after):
    return np.abs(after - before).max(axis=-1) > 1e-5


def test_no_token_sees_a_later_one(activations):
    tokens = sequences(MINI32, MINI32.T, documents=1)
    before = activations(tokens)
    for t in (1, 17, 40, 63):
        other = tokens.copy()
        other[:, t] = (other[:, t] + 1) % (MINI32.vocab - 1)
        other[tokens[:, t] == MINI32.eot, t] = MINI32.eot
        moved = changed(before, activations(other))
        assert not moved[:, :t].any()
        assert moved[:, t][tokens[:, t] != MINI32.eot].all()


def test_no_token_sees_another_document(activations):
    tokens = sequences(MINI32, MINI32.T, documents=1)
    starts = [0, 9, 10, 32, 50]
    tokens[:, :-1][tokens[:, :-1] == MINI32.eot] = 0
    tokens[:, starts] = MINI32.eot
    before = activations(tokens)
    document = np.cumsum(tokens[0, :-1] == MINI32.eot)
    for t in (3, 20, 33, 51):
        other = tokens.copy()
        other[:, t] = (other[:, t] + 1) % (MINI32.vocab - 1)
        moved = changed(before, activations(other))
        assert not moved[:, document != document[t]].any()
        assert moved[:, t].all()
        if (document == document[t])[t + 1]:
            assert moved[:, t + 1].any()  # its own document does see it


def test_every_layer_counts(activations):
    tokens, weights = sequences(MINI32, MINI32.T), whole_weights(MINI32)
    loss = jax.jit(lambda w: train_gpt.loss_fn(w, tokens, MINI32, window=48))
    before = np.asarray(loss(weights))
    for bank in ("attn", "mlp"):
        for i, matrix in enumerate(weights[bank]):
            other = [*weights[bank][:i], 0 * matrix, *weights[bank][i + 1 :]]
            assert np.abs(np.asarray(loss(weights | {bank: other})) - before).max() > 1e-4


STAGES = sorted({MINI32.window_at(step) for step in range(MINI32.steps + 1)})


@pytest.mark.parametrize(
    "window", sorted({w for w in STAGES} | {max(8, w // 8 // 2 * 8) for w in STAGES})
)
def test_window_of_a_layer_by_its_jacobian(window):
    """Query q depends on key k exactly where q - window < k <= q, for every window in use."""
    c, T = MINI32, 64
    w, pos = train_gpt.deal(whole_weights(c), c)[0], train_gpt.positions(jnp.zeros((1, T), bool), c)
    x = jax.random.normal(jax.random.key(1), (1, T, c.D))
    sums = lambda x: train_gpt.attention(x, None, w, window, pos, c)[0].sum(axis=-1)
    reaches = np.abs(np.asarray(jax.jit(jax.jacrev(sums))(x))).max(axis=(1, 3)) > 0
    q, k = np.indices((T, T))
    np.testing.assert_array_equal(reaches, (k <= q) & (k > q - window))


def windows_used(c: train_gpt.Config, window: int, monkeypatch) -> list[int]:
    used = []
    attend = train_gpt.attention

    def spy(x, ve, w, window, pos, c):
        used.append(window)
        return attend(x, ve, w, window, pos, c)

    monkeypatch.setattr(train_gpt, "attention", spy)
    jax.eval_shape(
        lambda w: train_gpt.loss_fn(w, jnp.zeros((1, c.T + 1), jnp.int32), c, window),
        jax.eval_shape(lambda: whole_weights(c)),
    )
    return used


def test_every_attention_is_asked_for_causality_and_a_window_at_once(monkeypatch):
    """On a CPU the window alone is causal too; cuDNN would read it as open to the right."""
    asked = []
    real = jax.nn.dot_product_attention

    def spy(q, k, v, **options):
        asked.append(options)
        return real(q, k, v, **(options | {"implementation": "xla"}))

    monkeypatch.setattr(jax.nn, "dot_product_attention", spy)
    c = dataclasses.replace(MINI32, attention="cudnn")
    train_gpt.loss_fn(whole_weights(c), sequences(c, c.T), c, window=16)
    options = dict(scale=0.12, is_causal=True, implementation="cudnn")
    assert asked == [options | {"local_window_size": (w - 1, 0)} for w in (16, 8, 16, 8)]


@pytest.mark.parametrize("step", range(0, 1771, 118))
def test_windows_of_the_record_at_each_stage(step, monkeypatch):
    """ladder: long max(1, ceil(13.5 s / 1770)) blocks of 128 in layers 0, 4, 11; short half of it,
    no attention in layer 7; validation at the window of its step."""
    record = dataclasses.replace(train_gpt.Config(), attention="xla")
    blocks = max(1, int(np.ceil(13.5 * step / 1770)))
    long, short = 128 * blocks, 128 * max(1, blocks // 2)
    assert record.window_at(step) == long
    small = dataclasses.replace(record, D=96, F=8, T=128, head_chunk=128, vocab=127, eot=126)
    expected = [long if layer in (0, 4, 11) else short for layer in range(12) if layer != 7]
    assert windows_used(small, record.window_at(step), monkeypatch) == expected


def test_the_record_grows_through_14_windows():
    c = train_gpt.Config()
    windows = [c.window_at(step) for step in range(c.steps + 1)]
    assert sorted(set(windows)) == [128 * k for k in range(1, 15)] and windows == sorted(windows)


# ---- The document code against an explicit mask --------------------------------------------------


def layouts(T: int, window: int) -> dict[str, list[int]]:
    return {
        "one document": [0],
        "starts in the middle of one": [5],
        "many": list(range(0, T, 3)),
        "every token one": list(range(T)),
        "boundary at the window's edge": [0, window, 2 * window],
        "one past the window's edge": [0, window + 1],
    }


def positions(first, x_BTHK):
    c = dataclasses.replace(MINI, D=x_BTHK.shape[-1], H=1, compute=x_BTHK.dtype.name)
    return train_gpt.positions(first, c)


def by_code(q, k, v, first, window):
    cos, sin, code_q, code_k = positions(first, q)
    q, k = train_gpt.rotate(q, cos, sin, code_q), train_gpt.rotate(k, cos, sin, code_k)
    return jax.nn.dot_product_attention(
        q, k, v, scale=0.12, is_causal=True, local_window_size=(window - 1, 0)
    )


def by_mask(q, k, v, first, window):
    cos, sin, code_q, _ = positions(first, q)
    q, k = (train_gpt.rotate(x, cos, sin, jnp.zeros_like(code_q)) for x in (q, k))
    document, (i, j) = np.cumsum(first, axis=1), np.indices((q.shape[1],) * 2)
    mask = (j <= i) & (i - j < window) & (document[:, :, None] == document[:, None, :])
    return jax.nn.dot_product_attention(q, k, v, scale=0.12, mask=mask[:, None])


def forward_and_backward(attend, q, k, v, first, window, cotangent):
    out, pull = jax.vjp(lambda q, k, v: attend(q, k, v, first, window), q, k, v)
    return [np.asarray(x, np.float32) for x in (out, *pull(cotangent))]


@pytest.mark.parametrize("layout", layouts(64, 16))
@pytest.mark.parametrize("dtype, tolerance", [("float32", 2e-5), ("bfloat16", 2e-2)])
def test_document_code_is_an_exact_mask(layout, dtype, tolerance):
    T, window = 64, 16
    first = np.zeros((1, T), bool)
    first[:, layouts(T, window)[layout]] = True
    q, k, v, cotangent = jax.random.normal(jax.random.key(2), (4, 1, T, 2, 32)).astype(dtype)
    code = forward_and_backward(by_code, q, k, v, first, window, cotangent)
    mask = forward_and_backward(by_mask, q, k, v, first, window, cotangent)
    for got, expected in zip(code, mask, strict=True):
        norm = max(np.linalg.norm(expected), 1e-3)  # dq, dk of one-token documents are zero
        assert np.linalg.norm(got - expected) / norm < tolerance


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_4095_documents_are_still_apart(dtype):
    """In a document of one token each token can only see itself: attention returns v."""
    T = 4095
    q, k, v = jax.random.normal(jax.random.key(3), (3, 1, T, 1, 16)).astype(dtype)
    out = jax.jit(lambda q, k, v: by_code(q, k, v, jnp.ones((1, T), bool), T))(q, k, v)
    np.testing.assert_array_equal(np.asarray(out, np.float32), np.asarray(v, np.float32))


def test_model_starts_at_the_loss_of_a_uniform_guess():
    """A zero head gives every one of the V columns, padding included, the same probability."""
    c = dataclasses.replace(MINI, vocab=200, eot=199)
    weights = whole_weights(c) | {"head": jnp.zeros((256, c.D))}
    loss = train_gpt.loss_fn(weights, sequences(c, c.T), c, window=16)
    assert float(loss) == pytest.approx(np.log(256), abs=1e-6)


# ---- Gradients written by hand -------------------------------------------------------------------
def plain_norm(x):
    return x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + 2.0**-23)


def gradients(function, arguments, cotangent):
    out, pull = jax.vjp(function, *arguments)
    return [np.asarray(x, np.float32) for x in (out, *pull(cotangent))]


def close(got, expected, tolerance):
    for a, b in zip(got, expected, strict=True):
        assert np.linalg.norm(a - b) < tolerance * np.linalg.norm(b)


@pytest.mark.parametrize("project_by", ["input", "output"])
@pytest.mark.parametrize("dtype, tolerance", [("float32", 1e-5), ("bfloat16", 1e-2)])
def test_norm_linear_has_the_gradients_of_its_formula(project_by, dtype, tolerance):
    x, dy = jax.random.normal(jax.random.key(6), (2, 2, 24, 64), jnp.float32)
    x *= jnp.exp(jax.random.normal(jax.random.key(7), (2, 24, 1)))  # rows of very different length
    w = jax.random.normal(jax.random.key(8), (48, 64)) / 8
    x, w, dy = (a.astype(dtype) for a in (x, w, dy[..., :48]))
    ours = gradients(lambda x, w: train_gpt.norm_linear(x, w, project_by), (x, w), dy)
    x, w, dy = (a.astype("float32") for a in (x, w, dy))
    close(ours, gradients(lambda x, w: plain_norm(x) @ w.T, (x, w), dy), tolerance)


@pytest.mark.parametrize("dtype, tolerance", [("float32", 1e-5), ("bfloat16", 1e-2)])
def test_project_has_the_gradients_of_its_formula(dtype, tolerance):
    x, dy = jax.random.normal(jax.random.key(4), (2, 2, 24, 64))
    x, w, dy = (a.astype(dtype) for a in (x, x[0].T @ x[1], dy[..., :64]))
    ours = gradients(train_gpt.project, (x, w), dy)
    x, w, dy = (a.astype("float32") for a in (x, w, dy))
    close(ours, gradients(lambda x, w: x @ w, (x, w), dy), tolerance)


@pytest.mark.parametrize("dtype, tolerance", [("float32", 1e-5), ("bfloat16", 1e-2)])
def test_norm_rotate_has_the_gradients_of_its_formula(dtype, tolerance):
    first = np.zeros((1, 40), bool)
    first[0, [0, 7, 30]] = True
    x, dy = jax.random.normal(jax.random.key(9), (2, 1, 40, 3, 32)).astype(dtype)
    cos, sin, code, _ = positions(first, x)
    ours = gradients(lambda x: train_gpt.norm_rotate(x, cos, sin, code), (x,), dy)
    formula = lambda x: train_gpt.rotate(plain_norm(x), cos, sin, code.astype("float32"))
    close(ours, gradients(formula, (x.astype("float32"),), dy.astype("float32")), tolerance)
