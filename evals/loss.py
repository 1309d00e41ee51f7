"""The loss of a run's weights on a text, and how it falls while more of a document is read.

    ./run.sh loss logs/<run>.npz data/source_code [--S N] [--L N] [--T N] [--tokens N]

Without flags it is the loss of the run's last validation. End-of-text tokens have no bytes, but
their nats count. At position n a token is predicted from n: those of its document, end-of-text
first, that its sequence holds.
"""

import argparse
import dataclasses
import os
import sys
from pathlib import Path

import numpy as np
import weights
from jax import Array, lax
from optax import softmax_cross_entropy_with_integer_labels as cross_entropy

# isort: split
from plot import STYLE, plt, save


def measure(w: weights.Weights, shard: np.ndarray, S: int, L: int, T: int, count: int, devices=8):
    """Of the shard's first sequences tokens (count, T + 1) and losses (count, T), nats.
    Windows are those of a stage without steps, so that rotations stay as they were trained."""
    stages = w.c.stages[: w.stage + 1]
    windows = dataclasses.replace(stages[-1], steps=0, short=S, long=L)
    c = dataclasses.replace(w.c, stages=(*stages, windows))

    def losses_of(x: Array, head: Array, tokens: Array) -> Array:
        one = lambda pair: cross_entropy(weights.logits(w, pair[0], head), pair[1])
        pairs = x.reshape(-1, x.shape[-1]), tokens[:, 1:].reshape(-1)
        return lax.map(one, pairs, batch_size=c.head_chunk).reshape(x.shape[:2])

    run = weights.runner(w._replace(c=c, stage=w.stage + 1), losses_of, devices)
    tokens, B = next(w.code.read_batches([shard], [(count, T, 0)], c)), len(w.devices[:devices])
    steps = np.pad(tokens, ((0, -count % B), (0, 0))).reshape(-1, B, T + 1)  # one on each device
    return tokens, np.concatenate([*map(run, steps)])[:count]


def by_position(tokens: np.ndarray, losses: np.ndarray, eot: int) -> np.ndarray:
    """A row for positions 1, 2, 3-4, 5-8, ...: first, last, tokens, mean loss, standard error."""
    at = np.arange(losses.shape[1])
    begun = np.maximum.accumulate(np.where(tokens[:, :-1] == eot, at, 0), axis=1)
    bits = np.frexp(at - begun)[1].ravel()  # of position - 1
    nats, n, end = np.float64(losses.ravel()), np.bincount(bits), 2 ** np.arange(bits.max() + 1)
    mean, square = np.bincount(bits, nats) / n, np.bincount(bits, nats**2) / n
    return np.stack((end // 2 + 1, end, n, mean, (np.maximum(square - mean**2, 0) / n) ** 0.5), 1)


def draw(rows: np.ndarray, title: str, out: Path) -> None:
    first, last, _, mean, error = rows.T
    with plt.rc_context(STYLE):
        figure, axes = plt.subplots(figsize=(5.6, 4.4), layout="constrained")
        axes.errorbar((first * last) ** 0.5, mean, error, marker="o", markersize=4, capsize=3)
        axes.set_xscale("log", base=2)
        axes.set(title=title, xlabel="tokens of the document read", ylabel="nats per token")
        save(figure, out)


def main() -> None:
    cli = weights.parser(__doc__)
    cli.add_argument("shards", type=Path, metavar="SHARDS", help="one, or a folder: its *_val_*")
    for name, what in dict(S="short windows", L="long ones", T="a sequence", tokens="all").items():
        cli.add_argument(f"--{name}", type=int, default=argparse.SUPPRESS, help=f"tokens of {what}")
    cli.add_argument("--out", type=Path, metavar="NAME", help="of the picture, NAME.svg")
    args = cli.parse_args()
    w, given = weights.open_weights(args.weights, args.script), vars(args).get
    c, stage = w.c, w.c.stages[w.stage]
    out = args.out or Path(f"{args.weights.with_suffix('')}_loss")
    S, L = given("S", stage.short), given("L", stage.long)
    T, asked = given("T", c.val_T), given("tokens", c.val_tokens)
    S, L = min(S, T), min(L, T)  # longer ones are the same
    if min(S, L, T - 2, (count := asked // max(T, 1)) - 1) < 0:
        weights.refuse(f"--S {S} --L {L} --T {T} --tokens {asked}: at least 0, 0, 2 and --T")
    if not out.name or not os.access(out.absolute().parent, os.W_OK):
        weights.refuse(f"{out}.svg cannot be written: choose another --out")
    shard = weights.val_shard(w, args.shards, T)
    if len(shard) <= count * T:
        weights.refuse(f"{shard.filename} holds {len(shard)} tokens, not {count * T + 1}: "
                       "lower --tokens or --T")  # fmt: skip
    piece = weights.tokenizer(c).piece
    lengths = np.array([0 if token == c.eot else len(piece(token)) for token in range(c.vocab)])
    tokens, losses = measure(w, shard, S, L, T, count)
    targets, loss, rows = tokens[:, 1:], losses.mean(dtype="f8"), by_position(tokens, losses, c.eot)
    size, ends = lengths[targets].sum(), np.count_nonzero(targets == c.eot)
    print(f"{loss:.4f} nats per token, {loss * targets.size / np.log(2) / size:.4f} bits per byte\n"
          f"{targets.size} tokens, {ends} of them end-of-text, without bytes; {size} bytes\n"
          f"windows {S}, {L}; T {T}\nposition      to    tokens  nats/token")  # fmt: skip
    np.savetxt(sys.stdout, rows, "%8d %7d %9d %11.4f +- %.4f")
    draw(rows, f"{args.weights.stem}: {loss:.4f} nats per token", out)


if __name__ == "__main__":
    main()
