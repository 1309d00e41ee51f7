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
TOLD = {257: "tokens are bytes: nobody else's figures compare with these", 50257: "GPT-2 124M, all "
        "10042: acc 28.59%, acc_norm 29.55% (stated by llm.c, not measured by us)"}  # fmt: skip


def tokenize(examples: Iterable, encode: Callable) -> Iterator[tuple[list, list, int]]:
    """Of each its four rows of tokens, start and stop of the ending in each, and the label."""
    for number, (ctx, endings, label) in enumerate(examples, 1):
        context = encode(ctx)
        rows = [context + encode(" " + ending) for ending in endings]
        if (longest := max(map(len, rows))) > LENGTHS[-1] + 1:
            raise shards.Fault(f"row {number} has {longest} tokens, more than {LENGTHS[-1] + 1}")
        yield rows, [(len(context), len(row)) for row in rows], label


def ending_loss(w: weights.Weights, x: Array, head: Array, tokens: Array, spans: Array) -> Array:
    """(B,) sums of the losses, in nats, of tokens[start:stop] of each row; spans are (B, 2)."""
    of_row = lambda row: cross_entropy(weights.logits(w, row[0], head[: w.c.vocab]), row[1])
    losses = lax.map(of_row, (x, tokens[:, 1:]), batch_size=CHUNK // x.shape[1])
    at = jnp.arange(1, tokens.shape[1])  # the first token is given
    return losses.sum(axis=1, where=(spans[:, :1] <= at) & (at < spans[:, 1:]))


def score(w: weights.Weights, examples: list[tuple]) -> tuple[np.ndarray, np.ndarray]:
    """(N, 4) sums of the losses of endings, and (2, N), whether acc and acc_norm are right."""
    rows, spans, labels = zip(*examples, strict=True)
    spans, run = np.array(spans), weights.runner(w, lambda *of: ending_loss(w, *of))
    counts, longest = spans[..., 1] - spans[..., 0], spans[..., 1].max(axis=1)
    sums, order = np.full(counts.shape, -1.0), np.argsort(-longest, kind="stable")
    with tqdm(total=len(rows), unit=" examples", leave=False, disable=None) as bar:
        while len(order):
            T = next(T for T in LENGTHS if longest[order[0]] <= T + 1)
            some, order = np.split(order, [TOKENS // T // 4])  # all four rows of an example
            tokens, ends = (np.zeros((TOKENS // T, n), np.int32) for n in (T + 1, 2))
            ends[: 4 * len(some)] = spans[some].reshape(-1, 2)
            for row, padded in zip((row for n in some for row in rows[n]), tokens, strict=False):
                padded[: len(row)] = row
            sums[some] = np.reshape(run(tokens, ends)[: 4 * len(some)], (-1, 4))
            right = np.argmin([sums, sums / counts], axis=-1) == labels
            shares = right[:, sums[:, 0] != -1].mean(axis=1)  # of those that are done
            bar.set_postfix_str("acc {:.2%}, acc_norm {:.2%}".format(*shares), refresh=False)
            bar.update(len(some))
    return sums, right


def main() -> None:
    cli = weights.parser(__doc__)
    cli.add_argument("--file", type=Path, help="hellaswag_val.jsonl, or the same as .parquet")
    args = cli.parse_args()
    w = weights.open_weights(args.weights, args.script)
    coder, began = weights.tokenizer(w.c), time.perf_counter()
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
        k, n, error = found.sum(), len(found), found.std() / len(found) ** 0.5  # binomial
        print(f"{name:8} {k / n:.2%} +- {error:.2%} (standard error), {k} of {n}")
    print(TOLD[w.c.vocab])


if __name__ == "__main__":
    main()
