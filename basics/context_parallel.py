"""Context parallel: one long sequence over all devices, attention by keys that go round a ring.

Run     ./run.sh basics/context_parallel.py [--draw FILE.svg]
Look    at `attend`, the online softmax: it takes keys a chunk at a time and never holds a row of
        scores. At `ring_attention`: queries stay, keys and values travel. And at who has work in
        which round: a device waits for the slowest one, unless the order of tokens is a zigzag
Source  Ring attention: Liu et al. 2023, arXiv:2310.01889; online softmax: Milakov and Gimelshein
        2018, arXiv:1805.02867; zigzag: section 3.3.2 of Llama 3, arXiv:2407.21783
In train_gpt.py  `prefetch` gives every device whole sequences: they fit, as `attend` looks back
        one window and cuDNN makes no scores outside of it. Keys are never sent
"""

import argparse
import functools
import math
import re
import sys
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, P, lax
from jax.sharding import AxisType

N, T, H, K = 8, 512, 2, 16  # devices, tokens, heads, channels of a head
C = T // (2 * N)  # tokens in a chunk: a device holds two chunks
PLAIN = np.arange(2 * N).reshape(N, 2)  # chunks by device: 0 1, 2 3, ..
ZIGZAG = np.stack((np.arange(N), 2 * N - 1 - np.arange(N)), axis=1)  # 0 15, 1 14, ..


def attend(state: tuple, q: Array, kv: Array, behind: Array) -> tuple:
    """Queries take in a chunk of keys and values, `behind` tokens before theirs. state, float32: of
    each query the greatest score, the sum of exp(score - peak), that of exp(score - peak) v."""
    (peak, total, y, done), (k, v) = state, kv
    seen = jnp.arange(C)[:, None] + behind >= jnp.arange(C)
    scores = jnp.where(seen, jnp.einsum("QHK,SHK->HQS", q, k) / math.sqrt(K), -jnp.inf)
    higher = jnp.maximum(peak, lax.stop_gradient(scores).max(axis=-1))
    # What was summed so far is divided by exp(peak), what comes now by exp(higher), so that no exp
    # overflows. One factor brings the old sums to the new measure: exp(peak - higher), at most 1.
    rescale, weight = jnp.exp(peak - higher), jnp.exp(scores - higher[..., None])
    total = rescale * total + weight.sum(axis=-1)
    y = rescale[..., None] * y + jnp.einsum("HQS,SHK->HQK", weight, v)
    return higher, total, y, done + 1


@jax.checkpoint  # the backward pass computes scores again: kept, they would fill T x T / 8
def visit(states: list, q: Array, kv: Array, mine: Array, theirs: Array) -> list:
    """Both chunks of queries meet both of a visitor's keys, but for those wholly in the future."""
    skip, states = (lambda state, *_: state), list(states)
    for i, j in (0, 0), (0, 1), (1, 0), (1, 1):
        behind = (mine[i] - theirs[j]) * C
        states[i] = lax.cond(behind >= 0, attend, skip, states[i], q[i], kv[:, j], behind)
    return states


def ring_attention(q: Array, k: Array, v: Array, chunks: Array) -> tuple[Array, Array]:
    """On one device, of its own tokens. chunks: which ones each device holds, (N, 2)."""
    me, halves = lax.axis_index("seq"), lambda x: x.reshape(2, C, H, K)
    q, kv = halves(q), jnp.stack((halves(k), halves(v)))
    start = jnp.full((H, C), -jnp.inf), jnp.zeros((H, C)), jnp.zeros((H, C, K)), jnp.int32(0)
    states = visit([lax.pcast(start, "seq", to="varying")] * 2, q, kv, chunks[me], chunks[me])
    met = lambda states: sum(done for *_, done in states)

    def one_round(carry, r):
        states, kv = carry
        kv = lax.ppermute(kv, "seq", [(i, (i + 1) % N) for i in range(N)])  # gradients go back
        states = visit(states, q, kv, chunks[me], chunks[(me - r) % N])
        return (states, kv), met(states)

    (end, _), later = lax.scan(one_round, (states, kv), jnp.arange(1, N))
    y = jnp.stack([y / total[..., None] for _, total, y, _ in end])  # (2, H, C, K)
    return y.swapaxes(1, 2).reshape(2 * C, H, K), jnp.append(met(states), later)


def plain(q: Array, k: Array, v: Array) -> tuple[Array, int]:
    scores = jnp.einsum("QHK,SHK->HQS", q, k) / math.sqrt(K)
    share = jax.nn.softmax(jnp.where(jnp.tri(T, dtype=bool), scores, -jnp.inf))
    return jnp.einsum("HQS,SHK->QHK", share, v), 0


def with_gradients(attention: Callable, q: Array, k: Array, v: Array, g: Array, *rest) -> tuple:
    """Attention's output, and the gradients of q, k, v if g is that of the output: (4, T, H, K)."""
    y, backward, met = jax.vjp(lambda *qkv: attention(*qkv, *rest), q, k, v, has_aux=True)
    return jnp.stack((y, *backward(g))), met


def check(what: str, right: bool) -> None:
    print("ok   " if right else "WRONG", what)
    if not right:
        sys.exit(1)


def draw(work: dict[str, np.ndarray], path: str) -> None:
    import matplotlib.pyplot as plt

    plt.rcParams.update({"svg.hashsalt": "jNanoGPT", "font.size": 9})
    figure, panels = plt.subplots(1, 2, figsize=(7, 3.5), layout="constrained", sharey=True)
    for panel, (name, met) in zip(panels, work.items(), strict=True):
        image = panel.imshow(met, cmap="Blues", vmin=0, vmax=8)  # light enough for black digits
        for me, r in np.ndindex(N, N):
            panel.text(r, me, (me - r) % N, ha="center", va="center")
        panel.set(title=f"{name}: {N} rounds take {met.max(axis=0).sum()}", xlabel="round")
    panels[0].set(ylabel="device; in its row: whose keys visit it")
    figure.colorbar(image, ax=panels, label="work, pairs of chunks", values=range(5))
    figure.savefig(path, metadata={"Date": None})


def main() -> None:
    jax.config.update("jax_platforms", "cpu")  # with 8 TPUs or GPUs, delete these two lines
    jax.config.update("jax_num_cpu_devices", 8)
    cli = argparse.ArgumentParser(description=__doc__)
    cli.formatter_class = argparse.RawDescriptionHelpFormatter
    cli.add_argument("--draw", metavar="FILE.svg")
    path = cli.parse_args().draw
    mesh, seq = jax.make_mesh((N,), ("seq",), axis_types=(AxisType.Auto,)), P("seq")
    ring = jax.shard_map(ring_attention, mesh=mesh, in_specs=(*[seq] * 3, P()), out_specs=seq)
    library = lambda *qkv: (jax.nn.dot_product_attention(*qkv, is_causal=True), 0)
    program = lambda attention: jax.jit(functools.partial(with_gradients, attention))
    qkvg = np.random.default_rng(0).normal(size=(4, T, H, K)).astype("f4")
    ours, one = program(ring).lower(*qkvg, PLAIN).compile(), program(plain).lower(*qkvg).compile()
    exact, work = np.stack((one(*qkvg)[0], program(library)(*qkvg)[0])), {}
    print(f"{T} tokens over {N} devices in {2 * N} chunks, {H} heads of {K} channels")
    for name, chunks in dict(contiguous=PLAIN, zigzag=ZIGZAG).items():
        order = (chunks[:, :, None] * C + np.arange(C)).reshape(-1)  # tokens, device by device
        results, met = map(np.asarray, ours(*qkvg[:, order], chunks))
        off = np.abs(results - exact[:, :, order]).max() / np.abs(exact).max(axis=(2, 3, 4)).min()
        check(f"{name}: y and gradients off by {off:.1e} of the largest, below 2e-5", off < 2e-5)
        work[name] = np.diff(met.reshape(N, N), prepend=0)
        mask, (me, r) = (order[:, None] >= order).reshape(N, 2, C, N, 2, C), np.ogrid[:N, :N]
        needed = mask.any(axis=(2, 5)).sum(axis=(1, 3))[me, me - r]  # pairs of chunks with a score
        slow, busy = work[name].max(axis=0), (work[name] > 0).sum(axis=1)
        says = f"slowest device, by round: {slow}, sum {slow.sum()}; mean {needed.sum() // N}"
        check(f"  pairs of chunks, {says}", np.array_equal(work[name], needed))
        print(f"        rounds with work, by device: {busy}")
    shapes = re.findall(r" = f32\[(.*?)\]\S* collective-permute\(", ours.as_text())
    sent = [4 * math.prod(map(int, shape.split(","))) for shape in shapes]
    rounds = re.findall(r'known_trip_count":\{"n":"(\d+)"', ours.as_text())
    right = sent == 2 * [4 * 2 * T // N * H * K] and rounds == 2 * [str(N - 1)]
    check(f"messages forward, back: {rounds}, each k and v of T / {N} tokens, {sent} bytes", right)
    here, alone = (p.memory_analysis().temp_size_in_bytes / 1000 for p in (ours, one))
    check(f"works in {here:.0f} kB, alone in {alone:.0f} kB: over 8 times that", alone > 8 * here)
    kB = lambda n: f"{4 * H * n * n / 1000:.1f} kB"
    print(f"  scores: {kB(T)} of T x T, {kB(T // N)} of (T / {N})^2, {kB(C)} of those held at once")
    if path:
        draw(work, path)


if __name__ == "__main__":
    main()
