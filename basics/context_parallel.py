"""Context parallel: one long sequence over all devices, attention by keys that go round a ring.

Run     ./run.sh basics/context_parallel.py [--draw FILE.svg]
Look    at `attend`, the online softmax: it takes keys a chunk at a time and never has a row of
        scores. At `ring_attention`: queries stay, keys and values travel. And at who has work in
        which round: a device waits for the slowest one, unless the order of tokens is a zigzag
Source  Ring attention: Liu et al. 2023, arXiv:2310.01889; online softmax: Milakov and Gimelshein
        2018, arXiv:1805.02867; zigzag: section 3.3.2 of Llama 3, arXiv:2407.21783
In train_gpt.py  `prefetch` gives every device whole sequences: they fit, as `attend` looks back
        one window and cuDNN makes no scores outside of it. Keys are never sent
"""

import math
import re
import sys
from argparse import ArgumentParser, RawDescriptionHelpFormatter
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, P, lax
from jax.sharding import AxisType

N = 8  # devices
T = 512  # tokens
H = 2  # heads
K = 16  # channels of a head
C = T // (2 * N)  # tokens in a chunk: a device has two chunks
PLAIN = np.arange(2 * N).reshape(N, 2)  # chunks by device: 0 1, 2 3, ..
ZIGZAG = np.stack((np.arange(N), 2 * N - 1 - np.arange(N)), axis=1)  # 0 15, 1 14, ..


# ---- The idea ------------------------------------------------------------------------------------
class Softmax(NamedTuple):
    """What a chunk of queries remembers of the keys it has met, float32."""

    peak: Array  # the greatest score, (H, C)
    total: Array  # sum of exp(score - peak), (H, C)
    y: Array  # sum of exp(score - peak) v, (H, C, K)
    met: Array  # chunks of keys


def attend(state: Softmax, q: Array, kv: Array, behind: Array) -> Softmax:
    """Queries meet a chunk of keys and values that begins `behind` tokens before theirs."""
    k, v = kv
    visible = jnp.arange(C)[:, None] + behind >= jnp.arange(C)
    scores = jnp.einsum("QHK,SHK->HQS", q, k) / math.sqrt(K)
    scores = jnp.where(visible, scores, -jnp.inf)
    peak = jnp.maximum(state.peak, lax.stop_gradient(scores).max(axis=-1))
    # What was summed so far is divided by exp(old peak), what comes now by exp(peak), so that no
    # exp overflows. The factor exp(old peak - peak), at most 1, brings the old sums to the new one.
    rescale = jnp.exp(state.peak - peak)
    weight = jnp.exp(scores - peak[..., None])
    total = rescale * state.total + weight.sum(axis=-1)
    y = rescale[..., None] * state.y + jnp.einsum("HQS,SHK->HQK", weight, v)
    return Softmax(peak, total, y, state.met + 1)


def skip(state: Softmax, q: Array, kv: Array, behind: Array) -> Softmax:
    """In place of attend, for keys that are all in the future."""
    return state


@jax.checkpoint  # the backward pass computes scores again: stored, they would fill T x T / 8
def visit(states: list, q: Array, kv: Array, mine: Array, theirs: Array) -> list:
    """Both chunks of a device's queries meet both chunks of a visitor's keys."""
    states = list(states)
    for i, j in (0, 0), (0, 1), (1, 0), (1, 1):
        behind = (mine[i] - theirs[j]) * C
        states[i] = lax.cond(behind >= 0, attend, skip, states[i], q[i], kv[:, j], behind)
    return states


def ring_attention(q: Array, k: Array, v: Array, chunks: Array) -> tuple[Array, Array]:
    """Runs on every device, with its tokens. chunks: which ones each device has, (N, 2). Returns
    the output, and how many pairs of chunks have met after each round."""
    device = lax.axis_index("seq")
    q = q.reshape(2, C, H, K)
    kv = jnp.stack((k.reshape(2, C, H, K), v.reshape(2, C, H, K)))
    start = Softmax(
        peak=jnp.full((H, C), -jnp.inf),
        total=jnp.zeros((H, C)),
        y=jnp.zeros((H, C, K)),
        met=jnp.int32(0),
    )
    start = lax.pcast(start, "seq", to="varying")
    first = visit([start, start], q, kv, chunks[device], chunks[device])

    def one_round(carry, r):
        states, kv = carry
        kv = lax.ppermute(kv, "seq", [(i, (i + 1) % N) for i in range(N)])  # gradients go back
        states = visit(states, q, kv, chunks[device], chunks[(device - r) % N])
        return (states, kv), states[0].met + states[1].met

    (states, _), met = lax.scan(one_round, (first, kv), jnp.arange(1, N))
    y = jnp.stack([state.y / state.total[..., None] for state in states])  # (2, H, C, K)
    met = jnp.append(first[0].met + first[1].met, met)
    return y.swapaxes(1, 2).reshape(2 * C, H, K), met


def plain(q: Array, k: Array, v: Array) -> tuple[Array, int]:
    """Attention by a whole matrix of scores."""
    scores = jnp.einsum("QHK,SHK->HQS", q, k) / math.sqrt(K)
    share = jax.nn.softmax(jnp.where(jnp.tri(T, dtype=bool), scores, -jnp.inf))
    return jnp.einsum("HQS,SHK->QHK", share, v), 0


def library(q: Array, k: Array, v: Array) -> tuple[Array, int]:
    """Attention by JAX's function."""
    return jax.nn.dot_product_attention(q, k, v, is_causal=True), 0


def with_gradients(attention: Callable) -> Callable:
    """A program that returns attention's output and the gradients of q, k, v, (4, T, H, K), if g is
    the gradient of the output; and what else attention returns."""

    def run(q, k, v, g, *rest):
        y, backward, met = jax.vjp(lambda *qkv: attention(*qkv, *rest), q, k, v, has_aux=True)
        return jnp.stack((y, *backward(g))), met

    return jax.jit(run)


# ---- What the ring does --------------------------------------------------------------------------
def token_order(chunks: np.ndarray) -> np.ndarray:
    """The tokens, device by device."""
    return (chunks[:, :, None] * C + np.arange(C)).reshape(-1)


def pairs_needed(order: np.ndarray) -> np.ndarray:
    """Pairs of chunks with a score that counts, by device and round."""
    causal = (order[:, None] >= order).reshape(N, 2, C, N, 2, C)
    by_devices = causal.any(axis=(2, 5)).sum(axis=(1, 3))  # of queries, of keys
    needed = np.zeros((N, N), int)
    for device, r in np.ndindex(N, N):
        needed[device, r] = by_devices[device, device - r]
    return needed


def check_order(
    name: str, chunks: np.ndarray, ring: Callable, qkvg: np.ndarray, exact: np.ndarray
) -> np.ndarray:
    """Compares numbers and work in an order of tokens; returns the work, by device and round."""
    order = token_order(chunks)
    results, met = ring(*qkvg[:, order], chunks)
    smallest = np.abs(exact).max(axis=(2, 3, 4)).min()
    error = np.abs(np.asarray(results) - exact[:, :, order]).max() / smallest
    check(f"{name}: y and gradients off by {error:.1e} of the largest, below 2e-5", error < 2e-5)
    work = np.diff(np.asarray(met).reshape(N, N), prepend=0)
    needed = pairs_needed(order)
    slowest = work.max(axis=0)
    mean = needed.sum() // N
    text = f"slowest device, by round: {slowest}, sum {slowest.sum()}; mean {mean}"
    check(f"  pairs of chunks, {text}", np.array_equal(work, needed))
    print(f"        rounds with work, by device: {(work > 0).sum(axis=1)}")
    return work


def check_messages(program_text: str) -> None:
    """In every round forward and back, one message with keys and values of a device's tokens."""
    shapes = re.findall(r" = f32\[(.*?)\]\S* collective-permute\(", program_text)
    sent = [4 * math.prod(int(n) for n in shape.split(",")) for shape in shapes]
    rounds = re.findall(r'known_trip_count":\{"n":"(\d+)"', program_text)
    right = sent == 2 * [4 * 2 * T // N * H * K] and rounds == 2 * [str(N - 1)]
    check(f"messages forward, back: {rounds}, each k and v of T / {N} tokens, {sent} bytes", right)


# ---- Plumbing ------------------------------------------------------------------------------------
def draw(work: dict[str, np.ndarray], path: str) -> None:
    import matplotlib.pyplot as plt

    plt.rcParams.update({"svg.hashsalt": "jNanoGPT", "font.size": 9})
    figure, panels = plt.subplots(1, 2, figsize=(7, 3.5), layout="constrained", sharey=True)
    for panel, (name, met) in zip(panels, work.items(), strict=True):
        image = panel.imshow(met, cmap="Blues", vmin=0, vmax=8)  # light enough for black digits
        for device, r in np.ndindex(N, N):
            panel.text(r, device, (device - r) % N, ha="center", va="center")
        panel.set(title=f"{name}: {N} rounds take {met.max(axis=0).sum()}", xlabel="round")
    panels[0].set(ylabel="device; in its row: whose keys visit it")
    figure.colorbar(image, ax=panels, label="work, pairs of chunks", values=range(5))
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
    flags = cli.parse_args()
    mesh = jax.make_mesh((N,), ("seq",), axis_types=(AxisType.Auto,))
    seq = P("seq")
    in_specs = seq, seq, seq, P()
    sharded = jax.shard_map(ring_attention, mesh=mesh, in_specs=in_specs, out_specs=seq)
    qkvg = np.random.default_rng(0).normal(size=(4, T, H, K)).astype(np.float32)
    ring = with_gradients(sharded).lower(*qkvg, PLAIN).compile()
    alone = with_gradients(plain).lower(*qkvg).compile()
    exact = np.stack((alone(*qkvg)[0], with_gradients(library)(*qkvg)[0]))
    print(f"{T} tokens over {N} devices in {2 * N} chunks, {H} heads of {K} channels")
    work = {}
    for name, chunks in dict(contiguous=PLAIN, zigzag=ZIGZAG).items():
        work[name] = check_order(name, chunks, ring, qkvg, exact)
    check_messages(ring.as_text())
    here = ring.memory_analysis().temp_size_in_bytes / 1000
    one = alone.memory_analysis().temp_size_in_bytes / 1000
    check(f"works in {here:.0f} kB, alone in {one:.0f} kB: over 8 times that", one > 8 * here)
    kB = lambda n: f"{4 * H * n * n / 1000:.1f} kB"
    print(f"  scores: {kB(T)} of T x T, {kB(T // N)} of (T / {N})^2, {kB(C)} of those at a time")
    if flags.draw:
        draw(work, flags.draw)


if __name__ == "__main__":
    main()
