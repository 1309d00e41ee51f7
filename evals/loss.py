"""Prints the loss of a run's weights on a text, and how it falls as more of a document is read.

    ./run.sh loss [logs/<run>.npz] [data/source_code] [--S N] [--L N] [--T N] [--tokens N]

SHARDS is a *_val_*.bin, or its folder; default: that of the run. Without it and without flags, the
loss is that of the run's last validation. An end-of-text token counts with its loss, but has no
bytes. At position n, a token is predicted from n tokens: those of its document, including the
end-of-text, that are in its sequence.
"""

import dataclasses
import sys
from pathlib import Path

import jax.numpy as jnp
import numpy as np
from jax import Array

sys.path.insert(0, str(Path(__file__).resolve().parent))  # for PYTHONSAFEPATH=1
import weights

# isort: split
from messages import one_line, refuse


def measure(w: weights.Weights, shard: np.ndarray, S: int, L: int, T: int, count: int, devices=8):
    """Tokens (count, T + 1) of the shard's first sequences, and their losses (count, T) in nats,
    with windows of S and L tokens; and the losses without [pointer]. The windows are set by one
    more stage, which has no steps: it leaves the rotations as they were trained."""
    stages = w.c.stages[: w.stage + 1]
    windows = dataclasses.replace(stages[-1], steps=0, short=S, long=L)
    c = dataclasses.replace(w.c, stages=(*stages, windows))
    longer = w._replace(c=c, stage=w.stage + 1)

    def losses_of(x: Array, whole: dict, tokens: Array) -> Array:
        log_p, alone = weights.target_log_p(longer, whole, x, tokens, c.head_chunk)
        return -jnp.stack((log_p, alone), axis=-1)

    run = weights.runner(longer, losses_of, devices)
    tokens = next(w.code.read_batches([shard], [(count, T, 0)], c))
    B = len(w.devices[:devices])  # a step reads one sequence on every device
    steps = np.pad(tokens, ((0, -count % B), (0, 0))).reshape(-1, B, T + 1)
    losses = np.concatenate([run(step) for step in steps])[:count]
    return tokens, losses[..., 0], losses[..., 1]


def by_position(tokens: np.ndarray, losses: np.ndarray, eot: int) -> np.ndarray:
    """Bins of positions 1, 2, 3-4, 5-8, ...; a row of first and last position, number of tokens,
    mean loss and its standard error for each."""
    index = np.arange(losses.shape[1])
    document_start = np.maximum.accumulate(np.where(tokens[:, :-1] == eot, index, 0), axis=1)
    position = 1 + index - document_start
    bins = np.frexp(position - 1)[1].ravel()  # the number of binary digits
    nats = np.float64(losses.ravel())
    n = np.bincount(bins)
    mean = np.bincount(bins, nats) / n
    variance = np.maximum(np.bincount(bins, nats**2) / n - mean**2, 0)
    last = 2 ** np.arange(bins.max() + 1)
    first = last // 2 + 1
    return np.stack((first, last, n, mean, (variance / n) ** 0.5), axis=1)


@one_line("loss.py")
def main() -> None:
    """Prints the losses that the command line asks for."""
    cli = weights.parser(__doc__)
    cli.add_argument("--S", type=int, help="tokens in a short window; default: the run's")
    cli.add_argument("--L", type=int, help="tokens in a long window; default: the run's")
    cli.add_argument("--T", type=int, help="tokens in a sequence; default: as in validation")
    cli.add_argument("--tokens", type=int, help="tokens to read; default: as in validation")
    args = weights.parse(cli, has_word=True)
    w = weights.open_weights(args.weights, args.script)
    c = w.c
    stage = c.stages[w.stage]
    T = c.val_T if args.T is None else args.T
    count = (c.val_tokens if args.tokens is None else args.tokens) // max(T, 1)
    S = min(stage.short if args.S is None else args.S, T)  # a longer window sees no more
    L = min(stage.long if args.L is None else args.L, T)
    if min(S, L) < 0 or T < 2 or count < 1:
        refuse("--S and --L begin at 0, --T at 2, --tokens at one sequence")
    shard = weights.val_shard(w, args.word and Path(args.word), T)
    if len(shard) <= count * T:
        refuse(f"{shard.filename} holds {len(shard)} tokens, not {count * T + 1}: lower --tokens")
    piece = weights.tokenizer(w).piece
    lengths = np.array([0 if token == c.eot else len(piece(token)) for token in range(c.vocab)])
    unit = "byte" if lengths.max() == 1 else "token"
    tokens, losses, alone = measure(w, shard, S, L, T, count)
    targets = tokens[:, 1:]
    loss = losses.mean(dtype="f8")
    size = lengths[targets].sum()
    ends = np.count_nonzero(targets == c.eot)
    bits = loss * targets.size / np.log(2) / size
    print(f"{loss:.4f} nats per {unit}, {bits:.4f} bits per byte")
    if c.pointer:
        print(f"{alone.mean(dtype='f8'):.4f} nats without copies of earlier tokens")
    print(f"{targets.size} tokens, of which {ends} are end-of-text and have no bytes; {size} bytes")
    print(f"windows of {S} and {L} tokens, sequences of {T}")
    print(f"position      to    tokens {f'nats/{unit}':>11} +- standard error")
    np.savetxt(sys.stdout, by_position(tokens, losses, c.eot), "%8d %7d %9d %11.4f +- %.4f")


if __name__ == "__main__":
    main()
