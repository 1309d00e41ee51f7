"""Measures the loss of a run's weights on a text, and how it falls as more of a document is read.

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
from messages import lacks_memory
from plot import STYLE, check_place, plain, plt, save


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


def draw(rows: np.ndarray, title: str, unit: str, out: Path) -> None:
    """Draws the loss over the position, from the rows of by_position()."""
    first, last, _, mean, error = rows.T
    with plt.rc_context(STYLE):
        figure, axes = plt.subplots(figsize=(5.6, 4.4), layout="constrained")
        center = (first * last) ** 0.5  # on a logarithmic axis
        axes.errorbar(center, mean, error, marker="o", markersize=4, capsize=3)
        axes.set_xscale("log", base=2)
        axes.set_title(plain(title))
        axes.set(xlabel="tokens of the document read", ylabel=f"nats per {unit}")
        save(figure, out)


@weights.shards.one_line("loss.py", status=2)
def main() -> None:
    """Prints the losses that the command line asks for, and draws them."""
    cli = weights.parser(__doc__, shards="SHARDS")
    cli.add_argument("--S", type=int, help="tokens in a short window; default: the run's")
    cli.add_argument("--L", type=int, help="tokens in a long window; default: the run's")
    cli.add_argument("--T", type=int, help="tokens in a sequence; default: as in validation")
    cli.add_argument("--tokens", type=int, help="tokens to read; default: as in validation")
    cli.add_argument("--out", type=Path, metavar="NAME", help="draw the picture NAME.svg")
    args = cli.parse_args()
    w = weights.open_weights(args.weights, args.script, checkpoints=True)
    c = w.c
    stage = c.stages[w.stage]
    out = args.out or Path(f"{args.weights.with_suffix('')}_loss")
    T = c.val_T if args.T is None else args.T
    wanted = c.val_tokens if args.tokens is None else args.tokens
    S = min(stage.short if args.S is None else args.S, T)  # a longer window sees no more
    L = min(stage.long if args.L is None else args.L, T)
    if min(S, L) < 0:
        weights.refuse(f"--S {S} --L {L}: a window has at least 0 tokens")
    if T < 2:
        weights.refuse(f"--T {T}: a sequence has at least 2 tokens")
    count = wanted // T
    if count < 1:
        weights.refuse(f"--tokens {wanted} is less than --T {T}")
    check_place(out)
    place = Path(args.shards) if args.shards else weights.data_folder(w)
    shard = weights.val_shard(w, place, T)
    if len(shard) <= count * T:
        weights.refuse(f"{shard.filename} holds {len(shard)} tokens, not {count * T + 1}: "
                       "lower --tokens or --T")  # fmt: skip
    piece = weights.tokenizer(w).piece
    lengths = np.array([0 if token == c.eot else len(piece(token)) for token in range(c.vocab)])
    unit = "byte" if lengths.max() == 1 else "token"
    try:
        tokens, losses, alone = measure(w, shard, S, L, T, count)
    except (MemoryError, RuntimeError) as error:
        if not lacks_memory(error):
            raise
        weights.refuse(f"--T {T} needs more memory than there is: lower it, because attention's "
                       "memory grows with its square")  # fmt: skip
    targets = tokens[:, 1:]
    loss = losses.mean(dtype="f8")
    size = lengths[targets].sum()
    bits = "no bits, because the text has no bytes"
    if size:
        bits = f"{loss * targets.size / np.log(2) / size:.4f} bits per byte"
    ends = np.count_nonzero(targets == c.eot)
    rows = by_position(tokens, losses, c.eot)
    print(f"{loss:.4f} nats per {unit}, {bits}")
    if weights.has_pointer(c):
        print(f"{alone.mean(dtype='f8'):.4f} nats without copies of earlier tokens")
    print(f"{targets.size} tokens, of which {ends} are end-of-text and have no bytes; {size} bytes")
    print(f"windows of {S} and {L} tokens, sequences of {T}")
    print(f"position      to    tokens {f'nats/{unit}':>11} +- standard error")
    np.savetxt(sys.stdout, rows, "%8d %7d %9d %11.4f +- %.4f")
    draw(rows, f"{args.weights.stem}: {loss:.4f} nats per {unit}", unit, out)
    print(f"{out}.svg: the loss by position")


if __name__ == "__main__":
    main()
