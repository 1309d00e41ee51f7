"""Text by a trained model, as it is made. The prompt begins a document, whose end ends the text;
Ctrl-C does, too. Of several samples the first streams. Each token takes a whole forward pass, over
a padded length: there is no cache that could differ from training."""

import argparse
import codecs
import contextlib
import itertools
import signal
import sys
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace

import jax.numpy as jnp
import numpy as np
import weights
from weights import refuse


def draw(logits_V: np.ndarray, how: argparse.Namespace, rng: np.random.Generator) -> int:
    """A token by its probability, among the top_k likeliest (0: all), of these among the fewest
    that have top_p of it together (Holtzman et al. 2020, arXiv:1904.09751)."""
    order = np.argsort(-logits_V, kind="stable")[: how.top_k or None]
    if how.temperature == 0:
        return int(order[0])
    p = np.exp((logits_V[order] - logits_V[order[0]]).astype("f8") / how.temperature)
    p /= p.sum()
    p *= np.cumsum(p) - p < how.top_p
    return int(rng.choice(order, p=p / p.sum()))


def generate(run: Callable, tokens: list[int], how: argparse.Namespace, longest: int,
             number: int) -> Iterator[list[int]]:  # fmt: skip
    """The next token of every sample, again and again."""
    rngs = [np.random.default_rng([how.seed, number, i]) for i in range(how.samples)]
    rows = np.array([tokens] * how.samples)
    while rows.shape[1] < min(len(tokens) + how.tokens, longest):
        length = rows.shape[1]
        T = max(256, 1 << (length - 1).bit_length())  # so that few programs compile
        padded = np.pad(rows, ((0, 0), (0, T + 1 - length)))  # what is later has no influence
        logits_BV = np.asarray(run(padded, np.full(how.samples, length - 1)))
        step = [draw(logits, how, rng) for logits, rng in zip(logits_BV, rngs, strict=True)]
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
        """Takes in a token; returns the characters that are complete now."""
        self.ended = self.ended or token == self.eot
        piece = b"" if self.ended else self.coder.piece(token)
        characters = self.decoder.decode(piece)
        self.text += characters
        return characters


def print_samples(prompt: str, run: Callable, w: weights.Weights, coder: SimpleNamespace,
                  how: argparse.Namespace, number: int = 0) -> None:  # fmt: skip
    """Prints prompt and continuations. The first appears as it is made, the others at the end. The
    rate is without the first token, for which a program compiles."""
    tokens = [w.c.eot, *coder.encode(prompt)]
    longest = max(256, w.c.val_T)
    if len(tokens) >= longest:
        refuse(f"the prompt has {len(tokens) - 1} tokens, more than {longest - 2}: make it shorter")
    samples = [Sample(w.c.eot, coder) for _ in range(how.samples)]
    heading = "=" * 20 + " {}\n" if how.samples > 1 else ""
    times = []
    print(heading.format(1) + prompt, end="", flush=True)
    with contextlib.suppress(KeyboardInterrupt):
        for step in generate(run, tokens, how, longest, number):
            times.append(time.perf_counter())
            pieces = [sample.add(token) for sample, token in zip(samples, step, strict=True)]
            print(pieces[0], end="", flush=True)
            if all(sample.ended for sample in samples):
                break
    print()
    for i, sample in enumerate(samples[1:], 2):
        print(f"{heading.format(i)}{prompt}{sample.text}")
    rate = 0.0
    if len(times) > 1:
        rate = how.samples * (len(times) - 1) / (times[-1] - times[0])
    print(f"[{how.samples} x {len(times)} tokens, {rate:.1f} a second]", file=sys.stderr)


def main() -> None:
    cli = weights.parser(__doc__)
    cli.add_argument("prompt", nargs="?", default="")
    cli.add_argument("--tokens", type=int, default=256, help="at most")
    cli.add_argument("--samples", type=int, default=1, help="at once")
    cli.add_argument("--seed", type=int, default=0, help="the same seed makes the same text")
    cli.add_argument("--temperature", type=float, default=0.8, help="0: the likeliest token")
    cli.add_argument("--top_k", type=int, default=0, help="only so many likeliest tokens; 0: all")
    cli.add_argument("--top_p", type=float, default=0.95, help="only this share of probability")
    cli.add_argument("--interactive", action="store_true", help="prompt after prompt")
    how = cli.parse_args()
    least = min(how.tokens - 1, how.samples - 1, how.top_k, how.seed)
    if least < 0 or not how.temperature >= 0 or not 0 < how.top_p <= 1:
        refuse("--tokens and --samples begin at 1, others at 0; --top_p is above 0, 1 at most")
    if how.interactive == bool(how.prompt):
        refuse('give a prompt that is not empty, "like this", or --interactive')
    w = weights.open_weights(how.weights, how.script)
    coder = weights.tokenizer(w.c)

    def last_logits(x, head, _, last):
        return weights.logits(w, x[jnp.arange(len(x)), last], head[: w.c.vocab])

    run = weights.runner(w, last_logits, 1)
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # | head
    sys.stdout.reconfigure(errors="replace")  # what a terminal cannot show
    if how.prompt:
        print_samples(how.prompt, run, w, coder, how)
        return
    with contextlib.suppress(EOFError, KeyboardInterrupt):
        for number in itertools.count():
            prompt = input("\n> ") or "\n"
            with contextlib.suppress(SystemExit):  # a prompt that is too long, with its message
                print_samples(prompt, run, w, coder, how, number)


if __name__ == "__main__":
    main()
