"""Causal attention: which tokens a token sees, as the Jacobian shows, and what a window saves.

Run     ./run.sh basics/attention.py [--draw FILE.svg]
Look    at `attend` and `separate_documents`, which decide what a token may read, and at
        `jacobian`, which measures what it does read
Source  Vaswani et al. 2017, arXiv:1706.03762; windows: arXiv:2004.05150; documents: 2107.02027
In train_gpt.py  `attend` does not count the token itself in its window. `positions` makes the
        document code, which replaces four channels of q and k. `dc_attention` computes in bands
"""

import math
import os
import sys
from argparse import ArgumentParser, FileType, RawDescriptionHelpFormatter
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import Array

T = 48  # tokens
D = 32  # width
H = 2  # heads
W = 8  # window
SCALE = 0.1  # factor of the scores
INPUT = np.random.default_rng(T).normal(size=(T, D)).astype(np.float32)
W_QKV = np.random.default_rng(3 * D).normal(size=(3 * D, D)).astype(np.float32)
DOCUMENT = np.repeat([15, 16, 17], [20, 13, 15])  # the document of each token


# ---- Attention, in four ways ---------------------------------------------------------------------
def plain(q: Array, k: Array, v: Array, mask: np.ndarray) -> Array:
    """Attention by a whole matrix of scores. q, k, v: (T, H, K); mask: True where i may see j."""
    scores = SCALE * jnp.einsum("IHK,JHK->HIJ", q, k)  # I and J tokens, H heads, K channels
    return jnp.einsum("HIJ,JHK->IHK", jax.nn.softmax(jnp.where(mask, scores, -jnp.inf)), v)


def attend(q: Array, k: Array, v: Array, window: int | None = None, causal: bool = True) -> Array:
    """With a window, a query sees `window` keys: that of its position, and those of the window - 1
    positions before it."""
    local = (window - 1, 0) if window else None
    return jax.nn.dot_product_attention(
        q, k, v, scale=SCALE, is_causal=causal, local_window_size=local
    )


def separate_documents(q: Array, k: Array, v: Array, causal: bool = True) -> Array:
    """Separates documents without a T x T mask. Four more channels of q and k add
    256 * (document of k - document of q) to q.k. Scores of earlier documents fall by 25.6 or more,
    and e^-25.6 is 8e-12. Those of later documents rise, so is_causal must hide them. Numbers of
    documents are split into high and low parts, because bfloat16 represents these exactly."""
    high = DOCUMENT // 16
    low = DOCUMENT % 16
    one = np.ones_like(DOCUMENT)
    code_q = 256 * np.stack((-16 * high, -low, 16 * one, one), axis=-1)
    code_k = np.stack((one, one, high, low), axis=-1)

    def with_code(x, code):
        return jnp.concatenate((x, np.stack(H * [code], axis=1)), axis=-1)

    # v gets as many channels as q and k have; from the output they are removed again.
    y = attend(with_code(q, code_q), with_code(k, code_k), with_code(v, code_k), causal=causal)
    return y[..., :-4]


def banded(q: Array, k: Array, v: Array, window: int) -> Array:
    """Cuts queries into bands of `window` tokens: a band sees only itself and the one before it."""

    def band(x):
        return x.reshape(-1, window, *x.shape[1:])

    def two_bands(x):
        return jnp.concatenate((jnp.roll(band(x), 1, axis=0), band(x)), axis=1)

    number, i, j = np.ogrid[: len(q) // window, :window, : 2 * window]  # of band, query, key
    in_window = (i < j) & (j <= i + window)  # the first `window` keys are of the band before
    exists = (number > 0) | (j >= window)  # there is no band before band 0
    mask = in_window & exists
    return jax.vmap(plain)(band(q), two_bands(k), two_bands(v), mask).reshape(v.shape)


# ---- Which tokens a token sees -------------------------------------------------------------------
def layers(x: Array, attention: Callable, depth: int) -> Array:
    """(T, D) -> (T, D): layers of attention, each of which adds to its input."""
    for _ in range(depth):
        qkv = (x @ W_QKV.T / 6).reshape(T, H, -1)  # 6 is about the square root of D
        q, k, v = jnp.split(qkv, 3, axis=-1)
        x = x + attention(q, k, v).reshape(T, D)
    return x


def jacobian(attention: Callable, depth: int = 1) -> tuple[np.ndarray, np.ndarray]:
    """|d out_i / d in_j|, (T, T): how much output i moves with input j; and the outputs, (T, D)."""

    def run(x):
        out = layers(x, attention, depth)
        return out, out  # the first is differentiated, the second is only returned

    slopes, out = jax.jit(jax.jacfwd(run, has_aux=True))(INPUT)
    return np.abs(slopes).max(axis=(1, 3)), out  # slopes: (T, D, T, D)


class Case(NamedTuple):
    """A kind of attention, and what its Jacobian should be."""

    attention: Callable
    mask: np.ndarray  # (T, T): True where token i may see token j in one layer
    depth: int = 1  # layers
    most_leak: float = 0  # derivative with respect to a token that should not be seen
    most_error: float = 1e-5  # of the output


def cases() -> dict[str, Case]:
    i, j = np.indices((T, T))
    causal = j <= i
    near = causal & (i - j < W)
    same_document = DOCUMENT[i] == DOCUMENT[j]
    left = partial(attend, window=W, causal=False)
    both_sides = partial(jax.nn.dot_product_attention, scale=SCALE, local_window_size=W - 1)
    no_mask = partial(separate_documents, causal=False)  # the highest number has the largest scores
    rounding = dict(most_leak=1e-9, most_error=5e-4)  # the code adds large numbers to the scores
    return {
        "causal": Case(attend, causal),
        "window 8": Case(partial(attend, window=W), near),
        "two layers of it": Case(partial(attend, window=W), near, depth=2),
        "three documents": Case(separate_documents, causal & same_document, **rounding),
        "window 8 in bands": Case(partial(banded, window=W), near),
        "not is_causal: (7, 0), by XLA": Case(left, near),
        "not is_causal: 7, both sides": Case(both_sides, abs(i - j) < W),
        "not is_causal: last document": Case(no_mask, DOCUMENT[j] == 17, **rounding),
    }


def who_sees_whom() -> dict[str, np.ndarray]:
    """Compares the Jacobian of each case with its mask; returns the Jacobians."""
    print(f"Pairs of {T} tokens where i sees j, by the Jacobian; outputs against a masked softmax")
    sizes = {}
    for name, case in cases().items():
        size, out = jacobian(case.attention, case.depth)
        expected = layers(INPUT, partial(plain, mask=case.mask), case.depth)
        error = np.abs(out - expected).max()
        # A layer adds to its input, so a token sees itself. In two layers it sees what the tokens
        # that it sees have seen, which is a product of boolean matrices.
        visible = np.linalg.matrix_power(case.mask | np.eye(T, dtype=bool), case.depth)
        leak = size.max(where=~visible, initial=0)
        as_expected = ((size > 1e-6) == visible).all()
        check(
            f"{name:<29}{visible.sum():>5} pairs, derivative of others {leak:.0e} <= "
            f"{case.most_leak}; output off by {error:.0e} < {case.most_error}",
            as_expected and leak <= case.most_leak and error < case.most_error,
        )
        sizes[name] = size
    return sizes


# ---- What it saves, and what a leak costs --------------------------------------------------------
def count_work() -> None:
    """XLA's window only masks, so it saves nothing; bands do."""
    tokens = 1024
    for window in 64, 128, 256:
        whole = megaflops(partial(attend, window=window), tokens)
        bands = megaflops(partial(banded, window=window), tokens)
        all_scores = tokens * tokens
        band_scores = 2 * tokens * window
        two_products = 4e-6 * all_scores * D  # MFLOP: q with k, weights with v
        work_by_scores = (bands / whole) / (band_scores / all_scores)
        check(
            f"window {window}: {all_scores:,} scores, {whole:.0f} MFLOP; "
            f"in bands {band_scores:,} scores, {bands:.0f} MFLOP",
            whole > two_products and 0.9 < work_by_scores < 1.1,
        )


def megaflops(attention: Callable, tokens: int) -> float:
    x = jnp.ones((tokens, 1, D))
    return jax.jit(attention).lower(x, x, x).compile().cost_analysis()["flops"] / 1e6


def learn(causal: bool, steps: int = 120) -> np.ndarray:
    """Losses (steps, positions) in training. The last position's next token is not in the input."""
    rng = np.random.default_rng(0)
    texts = np.cumsum(rng.integers(1, 5, (steps, 32, T + 1)), axis=-1) % 16  # ln 4 per token
    weights = dict(
        token=rng.normal(0, 0.5, (16, 3, H, 16)),  # q, k and v of each token
        position=rng.normal(0, 0.5, (T, 3, H, 16)),
        head=rng.normal(0, 0.5, (D, 16)),
    )
    adam = optax.adam(0.03)

    def mean_loss(weights, text):
        """The mean, and the mean of each position."""
        q, k, v = jnp.moveaxis(weights["token"][text[:, :-1]] + weights["position"], 2, 0)
        logits = attend(q, k, v, causal=causal).reshape(-1, T, D) @ weights["head"]
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, text[:, 1:])
        return losses.mean(), losses.mean(axis=0)

    def step(carry, text):
        weights, state = carry
        grads, losses = jax.grad(mean_loss, has_aux=True)(weights, text)
        updates, state = adam.update(grads, state)
        return (optax.apply_updates(weights, updates), state), losses

    @jax.jit
    def train(weights):
        _, losses = jax.lax.scan(step, (weights, adam.init(weights)), texts)
        return losses

    return np.asarray(train(weights))


def what_a_leak_costs() -> None:
    """Without a causal mask, training copies the next token; the last position has none to copy."""
    causal = learn(causal=True)[-9:]  # losses of the last nine steps
    leaking = learn(causal=False)[-9:]
    train = causal[:, :-1].mean()
    sample = causal[:, -1].mean()
    leaking_train = leaking[:, :-1].mean()
    leaking_sample = leaking[:, -1].mean()
    check(
        f"causal: {train:.2f} nats in training, {sample:.2f} in sampling, not below ln 4; "
        f"not causal: {leaking_train:.3f} in training, {leaking_sample:.2f} in sampling",
        leaking_train < 0.05
        and leaking_sample > sample + 0.2
        and abs(train - sample) < 0.1
        and train > math.log(4) - 0.04,
    )


# ---- Plumbing ------------------------------------------------------------------------------------
def draw(path: str, sizes: dict[str, np.ndarray]) -> None:
    os.environ.update(MPLBACKEND="agg", MATPLOTLIBRC=os.devnull)  # not a notebook's
    import matplotlib.pyplot as plt

    plt.style.use(["default", {"svg.hashsalt": "jNanoGPT", "font.size": 9}])
    figure, plots = plt.subplots(1, 4, figsize=(7.5, 2.4), sharey=True, layout="constrained")
    for plot, (name, size) in zip(plots, sizes.items(), strict=False):  # of the first four
        image = plot.imshow(size, norm="log", vmin=1e-12, vmax=10, interpolation="none")
        plot.set(title=name, xlabel="input j, token", ylabel="output i, token")
    figure.colorbar(image, label="|d out$_i$ / d in$_j$|; white: exactly 0", shrink=0.8)
    figure.savefig(path, metadata={"Date": None})


def check(what: str, right: bool) -> None:
    print("ok   " if right else "WRONG", what)
    if not right:
        sys.exit(1)


def main() -> None:
    jax.config.update("jax_platforms", "cpu")  # with 8 TPUs or GPUs, delete these two lines
    jax.config.update("jax_num_cpu_devices", 8)
    cli = ArgumentParser(description=__doc__, formatter_class=RawDescriptionHelpFormatter)
    cli.add_argument("--draw", type=FileType("ab"), metavar="FILE.svg", help="also draw a picture")
    flags = cli.parse_args()
    sizes = who_sees_whom()
    count_work()
    what_a_leak_costs()
    if flags.draw:
        draw(flags.draw.name, sizes)


if __name__ == "__main__":
    main()
