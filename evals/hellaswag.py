"""Scores HellaSwag by completion likelihood, counted as llm.c and modded-nanogpt count it.

Only the tokens of an ending have losses; all tokens before them are given. acc chooses the
ending with the lowest sum of losses, acc_norm the one with the lowest mean. Without --file, the
validation set is downloaded to data/hellaswag."""

import functools
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import jax.numpy as jnp
import numpy as np
from jax import Array
from tqdm import tqdm

sys.path.insert(0, str(Path(__file__).resolve().parent))  # for PYTHONSAFEPATH=1
import weights

# isort: split
import cached_hellaswag
from messages import one_line

LENGTHS = [64, 128, 256, 512, 1024, 2048]  # rows are padded to these; one program compiles for each
TOKENS = 2**14  # per batch: at least 8 rows, which 1, 2, 4 and 8 devices divide
CHUNK = 2**12  # tokens whose logits a device computes at once: 0.8 GB for GPT-2's vocabulary
REMARKS = {  # size of the vocabulary: what the scores can be compared with
    257: "tokens are bytes, so no other figures can be compared with these",
    50257: "GPT-2 124M, all 10042: acc 28.59%, acc_norm 29.55% "
    "(stated by llm.c, not measured by us)",
}


def tokenize(examples: Iterable, encode: Callable) -> Iterator[tuple[list, list, int]]:
    """Yields for each example four rows of tokens, the ending's (start, stop) in each row, and the
    label."""
    for ctx, endings, label in examples:
        context = encode(ctx)
        rows = [context + encode(" " + ending) for ending in endings]
        yield rows, [(len(context), len(row)) for row in rows], label


def ending_loss(w: weights.Weights, x: Array, whole: dict, tokens: Array, spans: Array) -> Array:
    """(B,) sums of the losses, in nats, of tokens[start:stop] of each row; spans are (B, 2)."""
    log_p, _ = weights.target_log_p(w, whole, x, tokens, CHUNK, padding=False)
    losses = -log_p
    index = jnp.arange(1, tokens.shape[1])  # of the targets: the first token is not one
    return losses.sum(axis=1, where=(spans[:, :1] <= index) & (index < spans[:, 1:]))


def score(w: weights.Weights, examples: list[tuple]) -> tuple[np.ndarray, np.ndarray]:
    """(N, 4) sums of the endings' losses, and (2, N): whether the right ending has the lowest sum
    (acc), and the lowest mean (acc_norm). The longest examples are read first."""
    rows, spans, labels = zip(*examples, strict=True)
    spans = np.array(spans)  # (N, 4, 2)
    labels = np.array(labels)
    counts = spans[..., 1] - spans[..., 0]  # tokens of the endings
    longest = spans[..., 1].max(axis=1)
    run = weights.runner(w, functools.partial(ending_loss, w))
    sums = np.zeros(counts.shape)
    with tqdm(total=len(rows), unit=" examples", leave=False, disable=None) as bar:
        for T, batch in batches(longest):
            padded_rows, padded_spans = pad_batch(rows, spans, batch, T)
            losses = run(padded_rows, padded_spans)[: 4 * len(batch)]
            sums[batch] = np.reshape(losses, (-1, 4))
            bar.update(len(batch))
    return sums, np.argmin([sums, sums / counts], axis=-1) == labels


def batches(longest: np.ndarray) -> Iterator[tuple[int, np.ndarray]]:
    """Yields the padded length T of a batch and the indices of its examples, longest first."""
    order = np.argsort(-longest, kind="stable")
    while len(order):
        T = min(length for length in LENGTHS if longest[order[0]] <= length + 1)
        size = TOKENS // T // 4  # an example has four rows, all in one batch
        yield T, order[:size]
        order = order[size:]


def pad_batch(rows: tuple, spans: np.ndarray, batch: np.ndarray, T: int) -> tuple:
    """Tokens (B, T + 1) and spans (B, 2) of a batch's examples, filled up with zeros."""
    tokens = np.zeros((TOKENS // T, T + 1), np.int32)
    padded_spans = np.zeros((TOKENS // T, 2), np.int32)
    padded_spans[: 4 * len(batch)] = spans[batch].reshape(-1, 2)
    rows_of_batch = [row for example in batch for row in rows[example]]
    for i, row in enumerate(rows_of_batch):
        tokens[i, : len(row)] = row
    return tokens, padded_spans


@one_line("hellaswag.py")
def main() -> None:
    """Scores the weights of the command line."""
    cli = weights.parser(__doc__)
    cli.add_argument("--file", type=Path, help="hellaswag_val.jsonl, or its .parquet")
    args = weights.parse(cli)
    w = weights.open_weights(args.weights, args.script)
    coder = weights.tokenizer(w)
    start = time.perf_counter()
    path = args.file or cached_hellaswag.fetch()
    examples = [*tokenize(cached_hellaswag.read(path), coder.encode)]
    sums, right = score(w, examples)
    print(f"HellaSwag of {w.path}: {len(sums)} examples in {time.perf_counter() - start:.1f} s")
    for name, is_right in zip(("acc", "acc_norm"), right, strict=True):
        k = is_right.sum()
        n = len(is_right)
        error = is_right.std() / n**0.5  # binomial
        print(f"{name:8} {k / n:.2%} +- {error:.2%} (standard error), {k} of {n}")
    print(REMARKS[w.c.vocab])


if __name__ == "__main__":
    main()
