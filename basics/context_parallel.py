"""Context parallel: one long sequence over all devices, whose keys go round a ring.

Run     ./run.sh basics/context_parallel.py [--draw FILE.svg]
Look    at `attend`, the online softmax: it takes one chunk of keys at a time and never stores a
        whole row of scores; at `ring_attention`: queries stay, keys and values travel; and at the
        work of each round: all devices wait for the slowest, unless tokens are in zigzag order
Source  Ring attention: Liu et al. 2023, arXiv:2310.01889; online softmax: Milakov and Gimelshein
        2018, arXiv:1805.02867; zigzag: section 3.3.2 of Llama 3, arXiv:2407.21783
In train_gpt.py  `prefetch` gives every device whole sequences. They fit, because `attend` looks
        back one window and cuDNN does not compute scores outside of it. Keys are never sent
"""

import math
import os
import re
import sys
from argparse import ArgumentParser, FileType, RawDescriptionHelpFormatter
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
    """The softmax of a chunk of queries over the keys so far, float32."""

    peak: Array  # the greatest score, (H, C)
    total: Array  # sum of exp(score - peak), (H, C)
    y: Array  # sum of exp(score - peak) v, (H, C, K)
    met: Array  # how many chunks of keys


def attend(state: Softmax, q: Array, kv: Array, behind: Array) -> Softmax:
    """Adds a chunk of keys and values, which begins `behind` tokens before the chunk of queries.
    q: (C, H, K); kv: (2, C, H, K)."""
    k, v = kv
    visible = jnp.arange(C)[:, None] + behind >= jnp.arange(C)
    scores = jnp.einsum("QHK,SHK->HQS", q, k) / math.sqrt(K)
    scores = jnp.where(visible, scores, -jnp.inf)
    peak = jnp.maximum(state.peak, lax.stop_gradient(scores).max(axis=-1))
    # Old sums are divided by exp(old peak) and new terms by exp(peak), so that no exp overflows.
    # The factor exp(old peak - peak), at most 1, makes the old sums fit the new terms.
    rescale = jnp.exp(state.peak - peak)
    weight = jnp.exp(scores - peak[..., None])
    total = rescale * state.total + weight.sum(axis=-1)
    y = rescale[..., None] * state.y + jnp.einsum("HQS,SHK->HQK", weight, v)
    return Softmax(peak, total, y, state.met + 1)


def skip(state: Softmax, q: Array, kv: Array, behind: Array) -> Softmax:
    """Replaces attend for a chunk of keys that are all in the future: nothing is added."""
    return state


@jax.checkpoint  # the backward pass computes scores again, because they would fill T x T / 8
def visit(states: list, q: Array, kv: Array, query_chunks: Array, key_chunks: Array) -> list:
    """Both chunks of this device's queries meet both chunks of another device's keys. query_chunks
    and key_chunks: which chunks of the sequence these are, (2,)."""
    states = list(states)
    for i, j in (0, 0), (0, 1), (1, 0), (1, 1):
        behind = (query_chunks[i] - key_chunks[j]) * C
        states[i] = lax.cond(behind >= 0, attend, skip, states[i], q[i], kv[:, j], behind)
    return states


def ring_attention(q: Array, k: Array, v: Array, chunks: Array) -> tuple[Array, Array]:
    """Runs on every device. q, k, v: of its tokens, (2 C, H, K); chunks: which ones each device
    has, (N, 2). Returns the output, (2 C, H, K), and how many pairs of chunks have met after each
    round, (N,)."""
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
        kv = lax.ppermute(kv, "seq", [(i, (i + 1) % N) for i in range(N)])
        states = visit(states, q, kv, chunks[device], chunks[(device - r) % N])
        return (states, kv), states[0].met + states[1].met

    (states, _), met = lax.scan(one_round, (first, kv), jnp.arange(1, N))
    y = jnp.stack([state.y / state.total[..., None] for state in states])  # (2, H, C, K)
    met = jnp.append(first[0].met + first[1].met, met)
    return y.swapaxes(1, 2).reshape(2 * C, H, K), met


def plain(q: Array, k: Array, v: Array) -> tuple[Array, int]:
    """Attention by a whole matrix of scores. 0: no chunks have met."""
    scores = jnp.einsum("QHK,SHK->HQS", q, k) / math.sqrt(K)
    share = jax.nn.softmax(jnp.where(jnp.tri(T, dtype=bool), scores, -jnp.inf))
    return jnp.einsum("HQS,SHK->QHK", share, v), 0


def library(q: Array, k: Array, v: Array) -> tuple[Array, int]:
    """Attention by JAX's function."""
    return jax.nn.dot_product_attention(q, k, v, is_causal=True), 0


def with_gradients(attention: Callable) -> Callable:
    """A program that returns attention's output and the gradients of q, k, v, (4, T, H, K), where g
    is the gradient of the output; and how many pairs of chunks have met."""

    def run(q, k, v, g, *chunks):
        y, backward, met = jax.vjp(lambda *qkv: attention(*qkv, *chunks), q, k, v, has_aux=True)
        return jnp.stack((y, *backward(g))), met

    return jax.jit(run)


# ---- What the ring does --------------------------------------------------------------------------
def token_order(chunks: np.ndarray) -> np.ndarray:
    """The positions of the tokens, device by device, (T,)."""
    return (chunks[:, :, None] * C + np.arange(C)).reshape(-1)


def pairs_needed(order: np.ndarray) -> np.ndarray:
    """Pairs of chunks in which a query sees a key, by device and round, (N, N)."""
    causal = (order[:, None] >= order).reshape(N, 2, C, N, 2, C)  # device, chunk, token; twice
    pairs = causal.any(axis=(2, 5)).sum(axis=(1, 3))  # (device of queries, device of keys)
    needed = np.zeros((N, N), int)
    for device, r in np.ndindex(N, N):
        needed[device, r] = pairs[device, (device - r) % N]
    return needed


def check_order(
    name: str, chunks: np.ndarray, ring: Callable, qkvg: np.ndarray, exact: np.ndarray
) -> np.ndarray:
    """Compares numbers and work in an order of tokens; returns the work, by device and round.
    exact: output and gradients by two other ways to compute them, (2, 4, T, H, K)."""
    order = token_order(chunks)
    results, met = ring(*qkvg[:, order], chunks)
    largest = np.abs(exact).max(axis=(2, 3, 4)).min()  # in the array where it is least
    error = np.abs(np.asarray(results) - exact[:, :, order]).max() / largest
    check(
        f"{name}: output and gradients off by {error:.1e} of the largest number, below 2e-5",
        error < 2e-5,
    )
    work = np.diff(np.asarray(met).reshape(N, N), prepend=0)
    needed = pairs_needed(order)
    slowest = work.max(axis=0)
    mean = needed.sum() // N
    check(
        f"  pairs of chunks on the slowest device, by round: {slowest}, sum {slowest.sum()}; "
        f"mean of all devices: {mean}",
        np.array_equal(work, needed),
    )
    print(f"        rounds with work, by device: {(work > 0).sum(axis=1)}")
    return work


def check_messages(program_text: str) -> None:
    """In each round of both passes, a device sends one message: k and v of its tokens, float32."""
    shapes = re.findall(r" = f32\[(.*?)\]\S* collective-permute\(", program_text)
    sent = [4 * math.prod(int(n) for n in shape.split(",")) for shape in shapes]
    rounds = re.findall(r'known_trip_count":\{"n":"(\d+)"', program_text)
    tokens = T // N
    expected = 4 * 2 * tokens * H * K
    check(
        f"messages in the forward and the backward pass: {' and '.join(rounds)}, "
        f"of {sent} bytes: k and v of {tokens} tokens",
        sent == [expected, expected] and rounds == [str(N - 1), str(N - 1)],
    )


# ---- Plumbing ------------------------------------------------------------------------------------
def draw(work: dict[str, np.ndarray], path: str) -> None:
    os.environ.update(MPLBACKEND="agg", MATPLOTLIBRC=os.devnull)  # not a notebook's
    import matplotlib.pyplot as plt

    plt.style.use(["default", {"svg.hashsalt": "jNanoGPT", "font.size": 9}])
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
    cli.add_argument("--draw", type=FileType("ab"), metavar="FILE.svg", help="also draw a picture")
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
    check(
        f"temporary memory: {here:.0f} kB on each of {N} devices, {one:.0f} kB on one alone, "
        "over 8 times as much",
        one > 8 * here,
    )
    whole, a_round, a_pair = (4 * H * tokens**2 / 1000 for tokens in (T, T // N, C))
    print(f"  kB of scores: whole {whole:.1f}, in a round {a_round:.1f}, at a time {a_pair:.1f}")
    if flags.draw:
        draw(work, flags.draw.name)


if __name__ == "__main__":
    main()
