"""HellaSwag by completion likelihood, counted as llm.c and modded-nanogpt count it.

Losses are of an ending's tokens alone, given all before them: acc takes the ending of the least
sum, acc_norm of the least mean. Without --file, the validation set is fetched to data/hellaswag."""

import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import weights
from jax import Array, lax
from optax import softmax_cross_entropy_with_integer_labels as cross_entropy
from tqdm import tqdm

# isort: split
import cached_hellaswag
import shards

LENGTHS = [64, 128, 256, 512, 1024, 2048]  # tokens that rows are padded to: a program for each
TOKENS = 2**14  # in a batch: 8 rows at least, so that any number of devices divides them
CHUNK = 2**12  # tokens whose logits a device holds at once: 0.8 GB of GPT-2's vocabulary
REMARKS = {  # by size of the vocabulary
    257: "tokens are bytes: nobody else's figures compare with these",
    50257: "GPT-2 124M, all 10042: acc 28.59%, acc_norm 29.55% "
    "(stated by llm.c, not measured by us)",
}


def tokenize(examples: Iterable, encode: Callable) -> Iterator[tuple[list, list, int]]:
    """Of each its four rows of tokens, start and stop of the ending in each, and the label."""
    for number, (ctx, endings, label) in enumerate(examples, 1):
        context = encode(ctx)
        rows = [context + encode(" " + ending) for ending in endings]
        longest = max(len(row) for row in rows)
        if longest > LENGTHS[-1] + 1:
            raise shards.Fault(f"row {number} has {longest} tokens, more than {LENGTHS[-1] + 1}")
        yield rows, [(len(context), len(row)) for row in rows], label


def ending_loss(w: weights.Weights, x: Array, head: Array, tokens: Array, spans: Array) -> Array:
    """(B,) sums of the losses, in nats, of tokens[start:stop] of each row; spans are (B, 2)."""

    def of_row(row):
        x, targets = row
        return cross_entropy(weights.logits(w, x, head[: w.c.vocab]), targets)

    losses = lax.map(of_row, (x, tokens[:, 1:]), batch_size=CHUNK // x.shape[1])
    at = jnp.arange(1, tokens.shape[1])  # the first token is given
    return losses.sum(axis=1, where=(spans[:, :1] <= at) & (at < spans[:, 1:]))


def score(w: weights.Weights, examples: list[tuple]) -> tuple[np.ndarray, np.ndarray]:
    """(N, 4) sums of the losses of endings, and (2, N), whether acc and acc_norm are right."""
    rows, spans, labels = zip(*examples, strict=True)
    spans = np.array(spans)  # (N, 4, 2)
    labels = np.array(labels)
    counts = spans[..., 1] - spans[..., 0]
    longest = spans[..., 1].max(axis=1)
    run = weights.runner(w, lambda *given: ending_loss(w, *given))
    sums = np.zeros(counts.shape)
    done = np.zeros(len(rows), bool)
    with tqdm(total=len(rows), unit=" examples", leave=False, disable=None) as bar:
        for T, batch in batches(longest):
            tokens, ends = pad_batch(rows, spans, batch, T)
            losses = run(tokens, ends)[: 4 * len(batch)]  # the rest is padding
            sums[batch] = np.reshape(losses, (-1, 4))
            done[batch] = True
            acc, acc_norm = correct(sums[done], counts[done], labels[done]).mean(axis=1)
            bar.set_postfix_str(f"acc {acc:.2%}, acc_norm {acc_norm:.2%}", refresh=False)
            bar.update(len(batch))
    return sums, correct(sums, counts, labels)


def correct(sums: np.ndarray, counts: np.ndarray, labels: np.ndarray) -> np.ndarray:
    """(2, N): whether the least sum, and the least mean, are those of the right ending."""
    return np.argmin([sums, sums / counts], axis=-1) == labels


def batches(longest: np.ndarray) -> Iterator[tuple[int, np.ndarray]]:
    """Padded length T and examples of every batch, longest examples first."""
    order = np.argsort(-longest, kind="stable")
    while len(order):
        T = min(length for length in LENGTHS if longest[order[0]] <= length + 1)
        size = TOKENS // T // 4  # all four rows of an example are in one batch
        yield T, order[:size]
        order = order[size:]


def pad_batch(rows: tuple, spans: np.ndarray, batch: np.ndarray, T: int) -> tuple:
    """Tokens (B, T + 1) and spans (B, 2) of a batch's examples, with rows of zeros at the end."""
    tokens = np.zeros((TOKENS // T, T + 1), np.int32)
    ends = np.zeros((TOKENS // T, 2), np.int32)
    ends[: 4 * len(batch)] = spans[batch].reshape(-1, 2)
    rows_of_batch = [row for example in batch for row in rows[example]]
    for i, row in enumerate(rows_of_batch):
        tokens[i, : len(row)] = row
    return tokens, ends


def main() -> None:
    cli = weights.parser(__doc__)
    cli.add_argument("--file", type=Path, help="hellaswag_val.jsonl, or the same as .parquet")
    args = cli.parse_args()
    w = weights.open_weights(args.weights, args.script)
    coder = weights.tokenizer(w.c)
    began = time.perf_counter()
    try:
        path = args.file or cached_hellaswag.fetch()
        examples = [*tokenize(cached_hellaswag.read(path), coder.encode)]
    except shards.Fault as fault:
        weights.refuse(f"{fault}; --file names another hellaswag_val.jsonl")
    if not examples:
        weights.refuse(f"{path} is empty")
    sums, right = score(w, examples)
    print(f"HellaSwag of {w.path}: {len(sums)} examples in {time.perf_counter() - began:.1f} s")
    for name, found in zip(("acc", "acc_norm"), right, strict=True):
        k = found.sum()
        n = len(found)
        error = found.std() / n**0.5  # binomial
        print(f"{name:8} {k / n:.2%} +- {error:.2%} (standard error), {k} of {n}")
    print(REMARKS[w.c.vocab])


if __name__ == "__main__":
    main()
