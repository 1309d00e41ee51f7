"""Causal attention: who sees whom, read off the Jacobian, and what a window saves.

Run     ./run.sh basics/attention.py [--draw FILE.svg]
Look    at `attend` and `apart`, which say what a token may read, and at `sees`, what it does read
Source  Vaswani et al. 2017, arXiv:1706.03762; windows: arXiv:2004.05150; documents: 2107.02027
In train_gpt.py  `attend` counts otherwise: a token sees itself and a window more. `positions` makes
        the documents' code, for four channels of q and k. `dc_attention` cuts positions into bands
"""

import sys
from argparse import ArgumentParser, RawDescriptionHelpFormatter
from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import Array

T, D, H, W, SCALE = 48, 32, 2, 8, 0.1  # tokens, width, heads, window, scale of the scores
INPUT, W_QKV = (np.random.default_rng(n).normal(size=(n, D)).astype("f4") for n in (T, 3 * D))
DOCUMENT = np.repeat([15, 16, 17], [20, 13, 15])  # of each token, the document that it is from


def plain(q: Array, k: Array, v: Array, mask: np.ndarray) -> Array:
    scores = SCALE * jnp.einsum("IHK,JHK->HIJ", q, k)  # I and J tokens, H heads, K channels
    return jnp.einsum("HIJ,JHK->IHK", jax.nn.softmax(jnp.where(mask, scores, -jnp.inf)), v)


def attend(q: Array, k: Array, v: Array, window: int | None = None, causal: bool = True) -> Array:
    """A query sees `window` keys, its own among them: window - 1 to its left, 0 to its right."""
    options = dict(is_causal=causal, local_window_size=window and (window - 1, 0))
    return jax.nn.dot_product_attention(q, k, v, scale=SCALE, **options)


def apart(q: Array, k: Array, v: Array, causal: bool = True) -> Array:
    """Documents kept apart without a T x T mask: by four more channels of q and k, whose product is
    256 * (document of k - document of q). An earlier one's scores fall by 25.6 or more, and e^-25.6
    is 8e-12; a later one's rise, so is_causal must hide it. Exact in bfloat16, as high and low."""
    high, low, one = DOCUMENT // 16, DOCUMENT % 16, np.ones_like(DOCUMENT)
    code_q = 256 * np.stack((-16 * high, -low, 16 * one, one), axis=-1)
    code_k = np.stack((one, one, high, low), axis=-1)
    wide = lambda x, code: jnp.concatenate((x, np.stack(H * [code], axis=1)), axis=-1)
    return attend(wide(q, code_q), wide(k, code_k), wide(v, code_k), causal=causal)[..., :-4]


def banded(q: Array, k: Array, v: Array, window: int) -> Array:
    """Queries in bands of `window` tokens: what a band sees is in itself and the one before it."""
    band = lambda x: x.reshape(-1, window, *x.shape[1:])
    two = lambda x: jnp.concatenate((jnp.roll(band(x), 1, axis=0), band(x)), axis=1)
    n, i, j = np.ogrid[: len(q) // window, :window, : 2 * window]  # band, query, key
    seen = (i < j) & (j <= i + window) & ((n > 0) | (j >= window))  # nothing is before band 0
    return jax.vmap(plain)(band(q), two(k), two(v), seen).reshape(v.shape)


def layers(x: Array, attention: Callable, depth: int) -> Array:
    for _ in range(depth):
        x = x + attention(*jnp.split((x @ W_QKV.T / 6).reshape(T, H, -1), 3, axis=-1)).reshape(T, D)
    return x


def sees(attention: Callable, depth: int = 1) -> tuple[np.ndarray, np.ndarray]:
    """|d out_i / d in_j|, (T, T): how much output i moves with input j; and the outputs, (T, D)."""
    both = jax.jacfwd(lambda x: 2 * (layers(x, attention, depth),), has_aux=True)
    slopes, out = jax.jit(both)(INPUT)
    return np.abs(slopes).max(axis=(1, 3)), out


def who_sees_whom() -> dict[str, np.ndarray]:
    (i, j), sizes, loose = np.indices((T, T)), {}, partial(attend, causal=False)
    exact = jax.jit(lambda mask, n: layers(INPUT, partial(plain, mask=mask), n), static_argnums=1)
    near, both = (j <= i) & (i - j < W), partial(jax.nn.dot_product_attention, scale=SCALE)
    for name, attention, mask, depth in (
        ("causal", attend, j <= i, 1),
        ("window 8", partial(attend, window=W), near, 1),
        ("two layers of it", partial(attend, window=W), near, 2),  # reach what near ones reach
        ("three documents", apart, (j <= i) & (DOCUMENT[i] == DOCUMENT[j]), 1),
        ("window 8 in bands", partial(banded, window=W), near, 1),
        ("not is_causal: (7, 0), by XLA", partial(loose, window=W), near, 1),
        ("not is_causal: 7, both sides", partial(both, local_window_size=7), abs(i - j) < W, 1),
        ("not is_causal: last document", partial(apart, causal=False), DOCUMENT[j] == 17, 1),
    ):
        sizes[name], out = sees(attention, depth)
        off = np.abs(out - exact(mask, depth)).max()
        other = sizes[name][~(reach := np.linalg.matrix_power(mask | (i == j), depth))].max()
        most, close = (1e-9, 5e-4) if "document" in name else (0, 1e-5)  # codes cost digits
        text = f"{name:<29}{reach.sum():>5}, others {other:.0e} <= {most}; off {off:.0e} < {close}"
        check(text, ((sizes[name] > 1e-6) == reach).all() and other <= most and off < close)
    return sizes


def learn(causal: bool, steps: int = 120) -> np.ndarray:
    """Losses (steps, positions) in training. The last position's next token is not in the input."""
    rng, adam = np.random.default_rng(0), optax.adam(0.03)
    texts = np.cumsum(rng.integers(1, 5, (steps, 32, T + 1)), axis=-1) % 16  # ln 4 a token
    start = [rng.normal(0, 0.5, size) for size in ((16, 3, H, 16), (T, 3, H, 16), (D, 16))]

    def losses(weights, text):  # weights: q, k and v of each token and of each position; head
        q, k, v = jnp.moveaxis(weights[0][text[:, :-1]] + weights[1], 2, 0)
        logits = attend(q, k, v, causal=causal).reshape(-1, T, D) @ weights[2]
        return optax.softmax_cross_entropy_with_integer_labels(logits, text[:, 1:]).mean(axis=0)

    def step(carry, text):
        updates, state = adam.update(jax.grad(lambda w: losses(w, text).mean())(carry[0]), carry[1])
        return (optax.apply_updates(carry[0], updates), state), losses(carry[0], text)

    return np.asarray(jax.jit(lambda w: jax.lax.scan(step, (w, adam.init(w)), texts)[1])(start))


def draw(path: str, sizes: dict[str, np.ndarray]) -> None:
    import matplotlib.pyplot as plt

    plt.rcParams.update({"svg.hashsalt": "jNanoGPT", "font.size": 9})
    figure, plots = plt.subplots(1, 4, figsize=(7.5, 2.4), sharey=True, layout="constrained")
    for plot, (name, size) in zip(plots, sizes.items(), strict=False):  # the first four
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
    cli.add_argument("--draw", metavar="FILE.svg")
    file = cli.parse_args().draw
    print(f"Pairs of {T} tokens by the Jacobian, derivative by others, off a masked softmax by")
    sizes, N, x = who_sees_whom(), 1024, jnp.ones((1024, 1, D))
    work = lambda f: jax.jit(f).lower(x, x, x).compile().cost_analysis()["flops"] / 1e6
    for w in 64, 128, 256:
        whole, bands = work(partial(attend, window=w)), work(partial(banded, window=w))
        text = f"window {w}: {N * N:,} scores, {whole:.0f} MFLOP; bands {2 * N * w:,}, {bands:.0f}"
        check(text, whole > 4e-6 * N * N * D and 0.9 < bands / whole * N / w / 2 < 1.1)
    (a, b), (c, d) = ((x[-9:, :-1].mean(), x[-9:, -1].mean()) for x in map(learn, (True, False)))
    text = f"causal {a:.2f} nats, in sampling {b:.2f}, not below ln 4; not causal {c:.3f}, {d:.2f}"
    check(text, c < 0.05 and d > b + 0.2 and abs(a - b) < 0.1 and a > 1.35)
    if file:
        draw(file, sizes)


if __name__ == "__main__":
    main()
