"""Generates text with trained weights, and prints it token by token.

The text continues the prompt, or begins a new document where there is none. It stops where the
model ends the document, after --tokens, or at Ctrl-C. With several samples, the first is printed
while it is made and the others after it. Every token takes a whole forward pass over a padded
length, without a cache of keys and values that could be wrong."""

import argparse
import codecs
import contextlib
import itertools
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

if __name__ == "__main__":  # Ctrl-C while JAX is imported shows no traceback
    signal.signal(signal.SIGINT, signal.SIG_DFL)

import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402

sys.path.insert(0, str(Path(__file__).resolve().parent))  # for PYTHONSAFEPATH=1
import weights  # noqa: E402
from weights import refuse, shards  # noqa: E402


def draw(logits_V: np.ndarray, args: argparse.Namespace, rng: np.random.Generator) -> int:
    """Draws a token by its probability from the top_k likeliest (0: all), and among these from the
    smallest set with top_p of their probability (Holtzman et al. 2020, arXiv:1904.09751).
    Temperature 0 takes the likeliest."""
    order = np.argsort(-logits_V, kind="stable")  # likeliest first
    if args.top_k:
        order = order[: args.top_k]
    if args.temperature == 0:
        return int(order[0])
    with np.errstate(over="ignore"):  # a tiny temperature makes them -inf
        p = np.exp((logits_V[order] - logits_V[order[0]]).astype("f8") / args.temperature)
    p /= p.sum()
    p_before = np.cumsum(p) - p  # of all likelier tokens together
    p = np.where(p_before < args.top_p, p, 0)
    return int(rng.choice(order, p=p / p.sum()))


def generate(run: Callable, tokens: list[int], args: argparse.Namespace, longest: int,
             number: int) -> Iterator[list[int]]:  # fmt: skip
    """Yields the next token of every sample, until `args.tokens` are made or `longest` is reached.
    `number` counts the prompts, so that equal ones get different text."""
    rngs = [np.random.default_rng([args.seed, number, i]) for i in range(args.samples)]
    rows = np.array([tokens] * args.samples)
    while rows.shape[1] < min(len(tokens) + args.tokens, longest):
        length = rows.shape[1]
        T = max(256, 1 << (length - 1).bit_length())  # powers of two: few programs compile
        # Attention is causal, so that the padding after the text has no effect on it.
        padded = np.pad(rows, ((0, 0), (0, T + 1 - length)))
        logits_BV = np.asarray(run(padded, np.full(args.samples, length - 1)))
        step = [draw(logits, args, rng) for logits, rng in zip(logits_BV, rngs, strict=True)]
        yield step
        rows = np.concatenate((rows, np.array(step)[:, None]), axis=1)


class Sample:
    """One continuation, as text."""

    def __init__(self, eot: int, coder: SimpleNamespace):
        self.eot = eot
        self.coder = coder
        self.decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self.text = ""
        self.ended = False

    def add(self, token: int) -> str:
        """Appends a token; returns the characters that it completes. Tokens after the end of the
        document are ignored."""
        self.ended = self.ended or token == self.eot
        piece = b"" if self.ended else self.coder.piece(token)
        characters = self.decoder.decode(piece)
        self.text += characters
        return characters


def print_samples(prompt: str, run: Callable, w: weights.Weights, coder: SimpleNamespace,
                  args: argparse.Namespace, number: int = 0) -> None:  # fmt: skip
    """Prints the prompt and its continuations: the first while it is made, the others at the end.
    The rate excludes the first token, for which a program compiles."""
    tokens = [w.c.eot, *coder.encode(prompt)]
    longest = max(256, w.c.val_T)
    if len(tokens) >= longest:
        refuse(f"the prompt has {len(tokens) - 1} tokens, more than {longest - 2}: make it shorter")
    samples = [Sample(w.c.eot, coder) for _ in range(args.samples)]
    heading = "=" * 20 + " {}\n" if args.samples > 1 else ""
    times = []
    print(heading.format(1) + prompt, end="", flush=True)
    with contextlib.suppress(KeyboardInterrupt):
        for step in generate(run, tokens, args, longest, number):
            times.append(time.perf_counter())
            pieces = [sample.add(token) for sample, token in zip(samples, step, strict=True)]
            print(pieces[0], end="", flush=True)
            if all(sample.ended for sample in samples):
                break
    print()
    for i, sample in enumerate(samples[1:], 2):
        print(f"{heading.format(i)}{prompt}{sample.text}")
    left = longest - len(tokens)
    if len(times) == left < args.tokens and not all(sample.ended for sample in samples):
        print(f"The context of {longest:,} tokens is full: a prompt of {len(tokens) - 1:,} leaves "
              f"room for {left:,}, not for {args.tokens:,}.", file=sys.stderr)  # fmt: skip
    rate = 0.0
    if len(times) > 1:
        rate = args.samples * (len(times) - 1) / (times[-1] - times[0])
    print(f"[{args.samples} x {len(times)} tokens, {rate:.1f} a second]", file=sys.stderr)


@shards.one_line("sample.py", status=2, replacement="replace")
def main() -> None:
    """Prints the samples that the command line asks for."""
    cli = weights.parser(__doc__)
    cli.add_argument("prompt", nargs="?", default="", help="the beginning of the text")
    cli.add_argument("--tokens", type=int, default=256, help="largest number for each sample")
    cli.add_argument("--samples", type=int, default=1, help="how many texts to make at once")
    cli.add_argument("--seed", type=int, default=0, help="equal seeds make equal texts")
    cli.add_argument("--temperature", type=float, default=0.8, help="0: take the likeliest token")
    cli.add_argument("--top_k", type=int, default=0, help="draw from this many likeliest; 0: all")
    cli.add_argument("--top_p", type=float, default=0.95, help="draw from the smallest set of "
                     "likeliest tokens with this probability together")  # fmt: skip
    cli.add_argument("--interactive", action="store_true", help="ask for prompts")
    args = cli.parse_intermixed_args()  # the prompt may come after options
    if min(args.tokens, args.samples) < 1 or min(args.top_k, args.seed) < 0:
        refuse("--tokens and --samples begin at 1, --top_k and --seed at 0")
    if args.samples > 10_000:
        refuse("--samples is at most 10,000: make more with another --seed")
    if not args.temperature >= 0 or not 0 < args.top_p <= 1:  # refuses nan, too
        refuse("--temperature begins at 0; --top_p is above 0 and at most 1")
    if args.prompt and args.interactive:
        refuse("give a prompt or --interactive, not both")
    w = weights.open_weights(args.weights, args.script, checkpoints=True)
    coder = weights.tokenizer(w)

    def last_logits(x, head, _, last):
        return weights.logits(w, x[jnp.arange(len(x)), last], head[: w.c.vocab])

    run = weights.runner(w, last_logits, 1)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # ends the text, not the process
    if not args.interactive:
        print_samples(args.prompt, run, w, coder, args)
        return
    sys.stdin.reconfigure(errors="surrogateescape")  # as in a prompt on the command line
    with contextlib.suppress(EOFError, KeyboardInterrupt):
        for number in itertools.count():
            prompt = input("\n> ") or "\n"
            with contextlib.suppress(SystemExit):  # of a prompt that is too long: ask for another
                print_samples(prompt, run, w, coder, args, number)


if __name__ == "__main__":
    main()
