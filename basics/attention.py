"""Causal attention: who sees whom, read off the Jacobian, and what a window saves.

Run     ./run.sh basics/attention.py [--draw FILE.svg]
Look    at `attend` and `apart`, which decide what a token may read, and at `sees`: the derivative
        of output i by input j is what i really reads of j, whatever a mask or a comment says
Source  Vaswani et al. 2017, arXiv:1706.03762; windows: Beltagy et al. 2020, arXiv:2004.05150;
        documents in one sequence: Krell et al. 2021, arXiv:2107.02027
In train_gpt.py  `attend` counts otherwise: the token itself and `window` more. `positions` makes
        the documents' code; `norm_rotate` writes it over the last four channels of q and k, where
        this file adds four. `compose` reads in bands. `check_attention` tests the GPU's kernel
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
DOCUMENT = np.repeat([15, 16, 17], [20, 13, 15])  # of each token, the document that it is from


def plain(q: Array, k: Array, v: Array, mask: np.ndarray) -> Array:
    """The formula. Here and below, q, k and v are (tokens, heads, channels)."""
    scores = SCALE * jnp.einsum("IHK,JHK->HIJ", q, k)
    return jnp.einsum("HIJ,JHK->IHK", jax.nn.softmax(jnp.where(mask, scores, -jnp.inf)), v)


def attend(q: Array, k: Array, v: Array, window: int | None = None, causal: bool = True) -> Array:
    """A query sees `window` keys, its own among them: window - 1 to its left, 0 to its right."""
    options = dict(is_causal=causal, local_window_size=window and (window - 1, 0))
    return jax.nn.dot_product_attention(q, k, v, scale=SCALE, **options)


def apart(q: Array, k: Array, v: Array, causal: bool = True) -> Array:
    """Documents kept apart without a mask, which would be T x T and which fast kernels lack. Four
    more channels of q and k hold numbers whose product is 256 * (document of k - document of q): 0
    within one; an earlier one's scores fall by 25.6 or more, of which the softmax leaves e^-25.6 =
    8e-12. A later one's rise: is_causal must hide it. By sixteens all is exact in bfloat16."""
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
    back = window + i - j  # so far is the key before the query
    seen = (0 <= back) & (back < window) & ((j >= window) | (n > 0))  # nothing is before band 0
    return jax.vmap(plain)(band(q), two(k), two(v), seen).reshape(v.shape)


def layers(x: Array, w: Array, attention: Callable, depth: int = 1) -> Array:
    for _ in range(depth):
        q, k, v = jnp.split((x @ w).reshape(T, H, -1), 3, axis=-1)
        x = x + attention(q, k, v).reshape(x.shape)
    return x


def sees(attention: Callable, depth: int, jacobian: bool = True) -> np.ndarray:
    """|d out_i / d in_j|, (T, T), of random layers: how much output i moves with input j."""
    x, w = (np.float32(np.random.default_rng(n).normal(size=(n, D))) for n in (T, 3 * D))
    run = partial(layers, w=w.T * D**-0.5, attention=attention, depth=depth)
    size = lambda x: jnp.abs(jax.jacfwd(run)(x)).max(axis=(1, 3))
    return np.asarray(jax.jit(size if jacobian else run)(x))


def who_sees_whom() -> dict[str, np.ndarray]:
    (i, j), sizes, loose = np.indices((T, T)), {}, partial(attend, causal=False)
    near, both = (j <= i) & (i - j < W), partial(jax.nn.dot_product_attention, scale=SCALE)
    for name, attention, mask, depth in (
        ("causal", attend, j <= i, 1),
        ("window 8", partial(attend, window=W), near, 1),
        ("two layers of them", partial(attend, window=W), near, 2),
        ("three documents", apart, (j <= i) & (DOCUMENT[i] == DOCUMENT[j]), 1),
        ("window 8 in bands", partial(banded, window=W), near, 1),
        ("not is_causal: all", loose, j >= 0, 1),
        ("not is_causal: (7, 0), by XLA", partial(loose, window=W), near, 1),
        ("not is_causal: 7, both sides", partial(both, local_window_size=7), abs(i - j) < W, 1),
        ("not is_causal: last document", partial(apart, causal=False), DOCUMENT[j] == 17, 1),
    ):
        sizes[name], exact = sees(attention, depth), partial(plain, mask=mask)
        off = np.abs(sees(attention, depth, False) - sees(exact, depth, False)).max()
        reach = np.linalg.matrix_power(mask | (i == j), depth)  # what is seen by what is seen
        other = sizes[name][~reach].max(initial=0)
        # The code leaves e^-25.6, and beside its 256 * 16 * 16 float32 rounds a score more.
        most, close = (1e-9, 5e-4) if "document" in name else (0, 5e-6)
        text = f"{name:<30}{reach.sum():>11}{other:>12.0e} <= {most:<6}{off:>10.0e} < {close}"
        check(text, ((sizes[name] > 1e-6) == reach).all() and other <= most and off < close)
    return sizes


def learn(causal: bool, steps: int = 120) -> np.ndarray:
    """The losses, (steps, positions), of one layer that learns to tell the next of 16 tokens. It is
    1 to 4 above the last one, at random: nobody who does not see it gets below ln 4 = 1.386."""
    rng, adam, attention = np.random.default_rng(0), optax.adam(0.03), partial(attend, causal=causal)
    texts = np.cumsum(rng.integers(1, 5, (steps, 32, T + 1)), axis=-1) % 16
    sizes = (16, D), (T, D), (D, 3 * D), (D, 16)
    start = [0.5 * np.float32(rng.normal(size=size)) for size in sizes]

    def losses(weights, text):
        embed, place, qkv, head = weights
        x = jax.vmap(partial(layers, w=qkv, attention=attention))(embed[text[:, :-1]] + place)
        each = optax.softmax_cross_entropy_with_integer_labels(x @ head, text[:, 1:])
        return each.mean(), each.mean(axis=0)

    def step(carry, text):
        grads, each = jax.grad(losses, has_aux=True)(carry[0], text)
        updates, state = adam.update(grads, carry[1])
        return (optax.apply_updates(carry[0], updates), state), each

    return np.asarray(jax.jit(lambda w: jax.lax.scan(step, (w, adam.init(w)), texts)[1])(start))


def draw(path: str, sizes: dict[str, np.ndarray]) -> None:
    import matplotlib.pyplot as plt

    plt.rcParams.update({"svg.hashsalt": "jNanoGPT", "font.size": 9})
    figure, plots = plt.subplots(1, 4, figsize=(7.5, 2.4), sharey=True, layout="constrained")
    for plot, (name, size) in zip(plots, sizes.items(), strict=False):  # the first four
        image = plot.imshow(size, norm="log", vmin=1e-12, vmax=10, interpolation="none")
        plot.set(title=name, xlabel="input j, token", ylabel="output i, token")
        plot.label_outer()
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
    print("Who sees whom of 48 tokens          pairs   derivative of others   off the mask")
    sizes = who_sees_whom()
    print("At 1024 tokens      scores: by XLA   in bands     needed   MFLOP: XLA  in bands")
    x = jnp.ones((1024, 1, D))
    work = lambda f: jax.jit(f).lower(x, x, x).compile().cost_analysis()["flops"] / 1e6
    for w in 64, 128, 256:
        all_, some = work(partial(attend, window=w)), work(partial(banded, window=w))
        counts = 1024**2, 2 * 1024 * w, sum(min(i + 1, w) for i in range(1024))
        text = f"window {w:>3}{counts[0]:>24,}{counts[1]:>11,}{counts[2]:>11,}{all_:>13.0f}{some:>10.0f}"
        check(text, all_ > 4 * counts[0] * D / 1e6 and 0.9 < some / all_ * 1024 / (2 * w) < 1.1)
    honest, leaky = learn(True), learn(False)
    print("Loss of each 20th step, causal:", honest[::20].mean(axis=1).round(2), "and not:", leaky[::20].mean(axis=1).round(2))
    (a, b), (c, d) = ((x[-9:, :-1].mean(), x[-9:, -1].mean()) for x in (honest, leaky))
    check(f"causal: {a:.2f} nats, where the next token is not in the input {b:.2f}; not causal: {c:.3f} "
          f"and {d:.2f}, which is what sampling would get", c < 0.05 and d > b + 0.2 > 1.386 and abs(a-b)<0.1)
    if file:
        draw(file, sizes)


if __name__ == "__main__":
    main()
