"""Generates text with trained weights, and prints it while it is made.

The text continues PROMPT, or begins a new document where there is none. It stops where the model
ends the document, after --tokens, or at Ctrl-C. A word that names a file is WEIGHTS, another one is
PROMPT."""

import argparse
import codecs
import contextlib
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent))  # for PYTHONSAFEPATH=1
import incremental
import weights
from messages import one_line, refuse

NO_REPEAT = 16  # the default of --no_repeat
SPACE = 17  # tokens of white space that follow each other at most
LINE = 88  # tokens that a candidate for a line has at most
PROMPT = 300  # characters of text that the model has not seen
RULE = "---- above: text that the model has not seen; below: how the model goes on"


def draw(log_p_V: np.ndarray, args: argparse.Namespace, rng: np.random.Generator) -> int:
    """Draws a token by its probability from the top_k likeliest (0: all), and among these from the
    smallest set with top_p of their probability (Holtzman et al. 2020, arXiv:1904.09751).
    Temperature 0 takes the likeliest."""
    order = np.argsort(-log_p_V, kind="stable")  # likeliest first
    if args.top_k:
        order = order[: args.top_k]
    if args.temperature == 0:
        return int(order[0])
    with np.errstate(over="ignore"):  # a tiny temperature makes them -inf
        p = np.exp((log_p_V[order] - log_p_V[order[0]]).astype("f8") / args.temperature)
    p /= p.sum()
    p_before = np.cumsum(p) - p  # of all likelier tokens together
    p = np.where(p_before < args.top_p, p, 0)
    return int(rng.choice(order, p=p / p.sum()))


def allowed(log_p_V: np.ndarray, made: np.ndarray, args: argparse.Namespace) -> np.ndarray:
    """The log-probabilities, in which those tokens are impossible that would complete a run of
    `args.no_repeat` tokens a second time in what the model has made (Paulus et al. 2017,
    arXiv:1705.04304; 0: none is), or make white space longer than SPACE. Runs are compared without
    white space, which is repeated in every text. With --go_on, the document cannot end."""
    banned = [args.eot] if args.go_on else []
    n = args.no_repeat
    is_white = args.white_V[made]
    text = made[~is_white]
    if 0 < n < len(text):
        runs = np.lib.stride_tricks.sliding_window_view(text, n)
        # The last n - 1 tokens of the text with the token that followed them earlier.
        is_repeated = (runs[:, :-1] == text[len(text) - n + 1 :]).all(axis=1)
        banned += runs[is_repeated, -1].tolist()
    if n and len(made) >= SPACE and is_white[-SPACE:].all():
        banned += np.flatnonzero(args.white_V).tolist()
    if len({*banned}) == len(log_p_V):
        return log_p_V
    log_p_V = log_p_V.copy()
    log_p_V[banned] = -np.inf
    return log_p_V


def generate(read: Callable, tokens: list[int], args: argparse.Namespace, context: int,
             coder: SimpleNamespace) -> Iterator[list[int]]:  # fmt: skip
    """Yields the next tokens, one or a line of them, until `args.tokens` are made. read(rows, most)
    returns the log-probabilities (B, V) of the tokens that follow the rows (B, n), which may grow
    to `most` tokens. Where the text outgrows the context, a line on stderr tells it once."""
    rng = np.random.default_rng([args.seed, 0])
    text = np.array([tokens], np.int32)
    first = 0  # where the model begins to read
    end = len(tokens) + args.tokens
    most = min(end - 1, context)

    def log_p_after(rows: np.ndarray) -> np.ndarray:
        return read(rows[:, first:], most)

    while text.shape[1] < end:
        size = min(LINE, end - text.shape[1]) if args.best > 1 else 1
        if text.shape[1] + size - 1 - first > context:  # the window moves on
            if first == 0:
                weights.tell(f"the model reads {context:,} tokens: the text gets longer, and goes "
                             "on from the last half of them")  # fmt: skip
            first = text.shape[1] - context // 2
        if args.best > 1:
            new = best_line(log_p_after, text, len(tokens), size, args, rng, coder)
        else:
            (log_p_V,) = log_p_after(text)
            new = [draw(allowed(log_p_V, text[0, len(tokens) :], args), args, rng)]
        yield new
        text = np.append(text, [np.int32(new)], axis=1)


def best_line(log_p_after: Callable, text: np.ndarray, prompt: int, size: int,
              args: argparse.Namespace, rng: np.random.Generator,
              coder: SimpleNamespace) -> list[int]:  # fmt: skip
    """The next line of a text (1, n), of at most `size` tokens: of `args.best` candidates, the one
    with the highest mean log-probability of its tokens. The model has made all but the first
    `prompt` tokens of the text. Lines whose brackets do not close come after all others, and after
    them those that are there already, that do not end, and those of white space alone, but for an
    empty line between two others."""
    made = [coder.piece(token) for token in text[0, prompt:].tolist() if token != args.eot]
    before = b"".join(made)
    lines = [line.strip() for line in before.split(b"\n")]

    def is_new(piece: bytes) -> bool:
        """Whether a piece is a whole line that is not there already, or an empty line after one
        that is not."""
        if piece == b"\n":
            return not before.endswith(b"\n\n")
        return b"\n" in piece and bool(piece.strip()) and piece.strip() not in lines

    rows = np.repeat(text, args.best, axis=0)
    pieces = [b""] * args.best
    nats = np.zeros(args.best)
    lengths = np.zeros(args.best, int)
    for _ in range(size):
        log_p_BV = log_p_after(rows)
        step = []
        for i, log_p_V in enumerate(log_p_BV):
            token = draw(allowed(log_p_V, rows[i, prompt:], args), args, rng)
            step.append(token)
            if b"\n" not in pieces[i]:
                pieces[i] += b"\n" if token == args.eot else coder.piece(token)
                nats[i] += log_p_V[token]
                lengths[i] += 1
        rows = np.column_stack((rows, np.int32(step)))
        if 2 * sum(map(is_new, pieces)) >= args.best:
            break  # the others are long, or no choice

    def quality(i: int) -> tuple[bool, int, bool, float]:
        """What counts, in this order."""
        line = pieces[i].strip()
        opened = sum(line.count(bracket) for bracket in b"([{")
        closed = sum(line.count(bracket) for bracket in b")]}")
        return is_new(pieces[i]), -lines.count(line), opened == closed, nats[i] / lengths[i]

    best = max(range(args.best), key=quality)
    return rows[best, text.shape[1] : text.shape[1] + lengths[best]].tolist()


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


def continue_text(w: weights.Weights, coder: SimpleNamespace, prompt: str, *flags: str) -> str:
    """The text that follows a prompt, which begins a document, by flags as they are typed."""
    args = parser().parse_args(flags)
    choose_defaults(args, w, coder)
    sample = Sample(w.c.eot, coder)
    tokens = [w.c.eot, *coder.encode(prompt)]
    for new in generate(incremental.Reader(w), tokens, args, context(w), coder):
        for token in new:
            sample.add(token)
        if sample.ended:
            break
    return sample.text


def unseen(w: weights.Weights, coder: SimpleNamespace) -> str:
    """The beginning of the first long document of the run's validation text, at most PROMPT
    characters, up to the end of a line. "": there is no text in this model's tokens."""
    found = sorted((weights.ROOT / w.config["data"]).glob("[!.]*_val_*.bin"))
    shard = w.code.open_shard(found[0])[:1_000_000] if found else np.zeros(0, int)
    starts = np.flatnonzero(shard == w.c.eot)
    if len(starts) == 0 or shard.max() >= w.c.vocab:
        return ""
    for start in starts.tolist():
        tokens = shard[start + 1 : start + 1 + PROMPT].tolist()
        if w.c.eot not in tokens:
            text = b"".join(map(coder.piece, tokens)).decode("utf-8", "replace")[:PROMPT]
            return text[: text.rfind("\n") + 1] or text[: text.rfind(" ")]
    return ""


def context(w: weights.Weights) -> int:
    """The tokens that the model reads at most: those of a validation sequence, but at least 256."""
    return max(256, w.c.val_T)


def print_sample(prompt: str, read: Callable, w: weights.Weights, coder: SimpleNamespace,
                 args: argparse.Namespace, shown: str = "") -> None:  # fmt: skip
    """Prints the prompt, or what is `shown` in its place, and how it goes on, while it is made.
    Ctrl-C ends it. The rate excludes the first token or line, for which programs compile and the
    prompt is read."""
    tokens = [w.c.eot, *coder.encode(prompt)]
    sample = Sample(w.c.eot, coder)
    times = []
    made = []  # tokens, by the time
    print(shown or prompt, end="", flush=True)
    with contextlib.suppress(KeyboardInterrupt):
        for new in generate(read, tokens, args, context(w), coder):
            times.append(time.perf_counter())
            made.append(len(new))
            for token in new:
                print(sample.add(token), end="", flush=True)
            if sample.ended:
                break
    print()
    rate = sum(made[1:]) / (times[-1] - times[0]) if len(times) > 1 else 0.0
    print(f"[{sum(made)} tokens, {rate:.1f} a second]", file=sys.stderr)


def parser() -> argparse.ArgumentParser:
    """The command line."""
    cli = weights.parser(__doc__)
    cli.add_argument("--tokens", type=int, help="the largest number; default: 640 if "
                     "they are bytes, else 256")  # fmt: skip
    cli.add_argument("--seed", type=int, default=0, help="equal seeds make equal texts")
    cli.add_argument("--temperature", type=float, default=0.8, help="0: take the likeliest token")
    cli.add_argument("--top_k", type=int, default=0, help="draw from this many likeliest; 0: all")
    cli.add_argument("--top_p", type=float, default=0.95, help="draw from the smallest set of "
                     "likeliest tokens with this probability together")  # fmt: skip
    cli.add_argument("--best", type=int, help="candidates for the next line, of which the one "
                     "with the likeliest tokens is taken; default: 6 for bytes, whose models make "
                     "few lines that one would read, else 1")  # fmt: skip
    cli.add_argument("--no_repeat", type=int, default=NO_REPEAT, help="make no run of this many "
                     "tokens twice, not counting white space, of which at most 17 tokens follow "
                     "each other; 0: any run")  # fmt: skip
    cli.add_argument("--go_on", action="store_true", help="the model cannot end the document")
    return cli


def choose_defaults(args: argparse.Namespace, w: weights.Weights, coder: SimpleNamespace) -> None:
    """Sets what the model decides: tokens and best, unless they are typed; eot; and white_V, (V,),
    whether each token is white space alone. Exits with status 2 for a value that cannot be."""
    is_of_bytes = w.c.vocab == 257
    if args.tokens is None:
        args.tokens = 640 if is_of_bytes else 256
    if args.best is None:
        args.best = 6 if is_of_bytes else 1
    args.eot = w.c.eot
    is_white = [coder.piece(token).isspace() for token in range(w.c.vocab) if token != w.c.eot]
    args.white_V = np.insert(is_white, w.c.eot, False)
    if min(args.tokens, args.best) < 1:
        refuse("--tokens and --best begin at 1")
    if min(args.top_k, args.seed, args.no_repeat) < 0 or not args.temperature >= 0:
        refuse("--temperature, --top_k, --seed and --no_repeat begin at 0")
    if not 0 < args.top_p <= 1:
        refuse(f"--top_p {args.top_p} is not above 0 and at most 1")


@one_line("sample.py")
def main() -> None:
    """Prints the sample that the command line asks for."""
    args = weights.parse(parser(), has_word=True)
    w = weights.open_weights(args.weights, args.script)
    coder = weights.tokenizer(w)
    choose_defaults(args, w, coder)
    sys.stdout.reconfigure(errors="replace")  # a terminal may lack characters of the text
    read = incremental.Reader(w)
    prompt = args.word
    shown = ""
    if prompt is None:
        prompt = unseen(w, coder)
        shown = prompt and "\n".join((prompt.rstrip("\n"), RULE, ""))
    print_sample(prompt, read, w, coder, args, shown)


if __name__ == "__main__":
    main()
