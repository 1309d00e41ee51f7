"""Turns your own text into shards that train_gpt.py reads: GPT-2 tokens, or the bytes of UTF-8.

    ./run.sh tokenize PATH... --out DIR [--bytes] [--separator LINE] [--column NAME] ...

It reads .txt and .md (each file is a document, unless a separator divides it), .jsonl and JSON
lines in .json (each line has a document in its field "text"), all of these also as .gz and .zst,
and .parquet (each row has one in its column "text"). A file of another kind is read as .txt is, if
it is named itself, or if --also names its suffix. Every document begins with an end-of-text
token, and so does every shard, also where it continues a document, because train_gpt.py refuses a
shard without one. "<|endoftext|>" in a text is encoded as ordinary text, unless it is the
separator. The first tokens are the validation set, as in llm.c's FineWeb. The last line printed is
a command that trains on the shards.
"""

import argparse
import collections
import contextlib
import functools
import importlib.metadata
import itertools
import os
import pathlib
import re
import shlex
import sys
import unicodedata
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple, NoReturn

import numpy as np
from tqdm import tqdm

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent))  # missing with PYTHONSAFEPATH=1
import readers  # noqa: E402
import shards  # noqa: E402
from messages import Parser  # noqa: E402
from readers import FORMATS, MARK, Notes, Parts, Unreadable, is_plain  # noqa: E402

# A document is cut at the first safe boundary that comes PIECE to 2 * PIECE characters after the
# last one, or at 2 * PIECE. tiktoken needs some tenths of a second for that much at worst, and its
# regular expressions overflow their stack only at twice as many (a million) spaces in a row.
PIECE = 2**18
QUEUE = 8  # bundles of pieces that wait for each thread, for instance while a shard is written
MOST_DOCUMENTS = 4095  # in a training or validation sequence: run/guard.py refuses more
VAL_TOKENS = 10_485_762  # the record's validation reads all but two, which must be left over


class Preset(NamedTuple):
    """What a run of one of train_gpt.py's presets reads. A test compares the numbers with it."""

    steps: int
    step_tokens: int
    val_every: int  # steps between validations
    val_tokens: int
    val_T: int  # tokens in a validation sequence
    head_chunk: int  # divides val_T and the length of the training sequences


PRESETS = {
    "small": Preset(1500, 65536, val_every=250, val_tokens=2**20, val_T=8192, head_chunk=8192),
    "tiny": Preset(187, 384, val_every=47, val_tokens=65536, val_T=1024, head_chunk=128),
}
SMALL_STEPS = 150  # with fewer steps, `tiny` is trained instead of `small`
VAL_SEQUENCES = 8  # train_gpt.py's validations take so many sequences at once
VAL_LENGTHS = (8192, 1024, 256, 128)  # of these sequences; cuDNN needs multiples of 128
# The fewest tokens of a shard: eight validation sequences of 128, or two steps of `tiny`. One more
# is needed, because the last token that the model reads has a target, too.
SMALLEST = 1025
GUARD = "|"  # stands before the value of --separator, so that argparse takes it for no flag
MOST_PASSES = 4  # unless --passes says more: `tiny` would memorize the text (data/README.md)

# GPT-2's pattern has no match that goes on from another character to white space, or from a letter
# to something else. A text can be cut there: the tokens on both sides stay the same.
BEFORE_SPACE = re.compile(r"\S(?=[ \t\r\n])")
AFTER_WORD = re.compile(r"[^\W\d_](?=[\W\d_])")

Piece = tuple[bool, str]  # whether a document begins here, and text to encode in one call


def fail(message: str) -> NoReturn:
    """Exits with status 1 and the message in one line."""
    sys.exit("tokenize_text.py: " + " ".join(message.splitlines()))


def counted(number: int, word: str) -> str:
    """As "1 document" or "2 documents"."""
    return f"{number} {word}" if number == 1 else f"{number} {word}s"


# ---- Pieces --------------------------------------------------------------------------------------
def boundary(text: str, start: int, stop: int) -> int | None:
    """The first place between `start` and `stop` where a token of GPT-2 certainly ends, or None."""
    match = BEFORE_SPACE.search(text, start, stop)
    if match:
        return match.end()
    for match in AFTER_WORD.finditer(text, start, stop):
        end = match.end()
        # tiktoken may know more of Unicode: to it, what is unassigned here may be a letter.
        if text[end - 1].isalpha() and unicodedata.category(text[end]) != "Cn":
            return end
    return None


def pieces(parts: Parts, counts: collections.Counter) -> Iterator[Piece]:
    """Cuts documents into pieces. The cuts depend on the document, not on its parts. `counts` gets
    the number of documents, of empty ones, and of cuts where no safe boundary was found."""
    rest = ""
    begins = True
    for part in parts:
        rest += part or ""  # CPython appends in place only if this is the whole statement
        start = 0
        while len(rest) - start > 2 * PIECE:
            stop = start + 2 * PIECE
            end = boundary(rest, start + PIECE, stop)
            if end is None:
                counts["cuts"] += 1
                end = stop
            yield begins, rest[start:end]
            begins = False
            start = end
        rest = rest[start:]
        if part is None:
            if rest:
                yield begins, rest
            counts["documents" if rest else "empty"] += 1
            rest = ""
            begins = True


def read(
    path: pathlib.Path, args: Any, counts: collections.Counter, notes: Notes, bar: Any
) -> Iterator[Piece]:
    """Yields the pieces of a file; exits with one line if it cannot be read."""
    position = 0
    marks = 0
    before = counts.copy()
    try:
        with path.open("rb") as raw:
            for piece in pieces(readers.documents(path, raw, args, counts), counts):
                marks += piece[1].count(MARK)
                yield piece
                bar.update(raw.tell() - position)
                position = raw.tell()
    except Unreadable as fault:
        fail(f"{path} cannot be read: {readers.unpacked(path, str(fault))}")
    except MemoryError:
        fail(f"{path} cannot be read: it needs more memory than there is: divide its longest "
             "document, or use a larger machine")  # fmt: skip
    except Exception as error:  # from the readers above, the file system, or four libraries
        why = f"{str(error) or type(error).__name__}: correct that, or leave it out"
        if getattr(error, "errno", None):
            why = shards.reason(error, path)
        fail(f"{path} cannot be read: {why}")
    if counts["documents"] == before["documents"]:
        notes["without any text"].append(path)
    elif is_plain(path) and args.separator is not None:
        if counts["separators"] == before["separators"]:
            notes[f"without the separator {readers.quote(args.separator)}"].append(path)
        if counts["nearly"] > before["nearly"]:
            near = "with lines that have spaces beside the separator, which do not divide documents"
            notes[near].append(path)
    if marks and is_plain(path):
        cure = f"--separator {shlex.quote(MARK)} makes it divide documents"
        notes[f"with {MARK} as ordinary text; {cure}"].append(path)
    elif marks:
        notes[f"with {MARK} as ordinary text in its rows"].append(path)
    if counts["cuts"] > before["cuts"] and not args.bytes:
        cut = f"cut inside runs of more than {PIECE} characters, where tokens differ from the run's"
        notes[cut].append(path)


def bundles(all_pieces: Iterable[Piece]) -> Iterator[list[Piece]]:
    """Collects pieces until they have PIECE characters, which is enough work for one task."""
    bundle = []
    size = 0
    for piece in all_pieces:
        bundle.append(piece)
        size += len(piece[1])
        if size >= PIECE:
            yield bundle
            bundle = []
            size = 0
    if bundle:
        yield bundle


# ---- Tokens --------------------------------------------------------------------------------------
@functools.cache
def gpt2() -> Any:
    """tiktoken's GPT-2 encoding; exits if it cannot be loaded."""
    try:
        return shards.gpt2()
    except shards.Fault as fault:
        fail(f"{fault}; or use --bytes")


def encode(by_bytes: bool, bundle: list[Piece]) -> np.ndarray:
    """The tokens of all pieces, with EOT where a document begins, as uint16."""
    parts = []
    eot = np.array([256 if by_bytes else shards.GPT2["eot"]], "<u2")
    for begins, text in bundle:
        if begins:
            parts.append(eot)
        if by_bytes:
            parts.append(np.frombuffer(text.encode(), np.uint8))
        else:  # the same as encode_ordinary, but without a list of Python integers
            tokens = gpt2().encode_to_numpy(text, disallowed_special=())
            parts.append(tokens.astype("<u2"))
    return np.concatenate(parts, dtype="<u2")


def in_order(workers: int, work: Callable, tasks: Iterable) -> Iterator[np.ndarray]:
    """map(work, tasks) with `workers` threads, at most QUEUE * workers tasks ahead. Threads are
    enough, because tiktoken releases Python's lock while it works."""
    threads = ThreadPoolExecutor(workers)
    waiting = collections.deque()
    try:
        for task in tasks:
            try:
                waiting.append(threads.submit(work, task))
            except RuntimeError as error:
                fail(f"{error}: pass a smaller --workers, or raise the limit of  ulimit -u")
            if len(waiting) == QUEUE * workers:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
    finally:
        threads.shutdown(cancel_futures=True)


# ---- Shards --------------------------------------------------------------------------------------
def split(arrays: Iterable[np.ndarray], sizes: Iterator[int], eot: int) -> Iterator[list]:
    """Regroups the tokens: yields lists of arrays that have the next of `sizes` tokens together,
    and at last the rest, which may be []. A list that would begin inside a document gets an EOT in
    front, which counts."""
    taken = []
    missing = next(sizes)
    for array in arrays:
        while len(array):
            if not taken and array[0] != eot:
                taken.append(np.array([eot], "<u2"))
                missing -= 1
            taken.append(array[:missing])
            array = array[missing:]
            missing -= len(taken[-1])
            if missing == 0:
                yield taken
                taken = []
                missing = next(sizes)
    yield taken


def validation_size(arrays: Iterator[np.ndarray]) -> tuple[int, Iterator[np.ndarray]]:
    """A tenth of all tokens, but at least SMALLEST and at most VAL_TOKENS; and an iterator over the
    same arrays, because some had to be read."""
    ahead = collections.deque()
    tokens = 0
    for array in arrays:
        ahead.append(array)
        tokens += len(array)
        if tokens >= 10 * VAL_TOKENS:
            break
    first = (ahead.popleft() for _ in range(len(ahead)))  # frees every array after its use
    return max(SMALLEST, min(tokens // 10, VAL_TOKENS)), itertools.chain(first, arrays)


def choose_passes(tokens: int, args: Any) -> int:
    """How often to write the text of the first training shard, which has so many tokens. Without
    --passes, as often as `tiny` needs for all its steps, but at most MOST_PASSES. All passes must
    fit into one shard, because check.py refuses two shards with equal bytes."""
    fit = args.shard_tokens // tokens
    if args.passes is None:
        wanted = PRESETS["tiny"].steps * PRESETS["tiny"].step_tokens + 1
        return max(1, min(fit, MOST_PASSES, -(-wanted // tokens)))
    if args.passes > max(1, fit):
        fail(f"--passes {args.passes} over at least {tokens} training tokens do not fit into one "
             f"shard of {args.shard_tokens}: lower it, or raise --shard_tokens")  # fmt: skip
    return args.passes


def write(folder: pathlib.Path, arrays: Iterator[np.ndarray], args: Any) -> tuple[dict, int, bool]:
    """Writes all shards. Returns their rows of MANIFEST.json, validation first, how often the
    training text is in them, and whether a sequence of `small` could hold too many documents (those
    of `tiny` are short). Exits if there is too little text."""
    rows = {}
    dense = False
    tokens = 0
    passes = 1
    eot = args.about["eot"]
    val = args.val_tokens
    if val is None:
        val, arrays = validation_size(arrays)
    sizes = itertools.chain([val], itertools.repeat(args.shard_tokens))
    for number, taken in enumerate(split(arrays, sizes, eot)):
        count = sum(map(len, taken))
        tokens += count
        lacks_validation = number == 0 and count < val
        lacks_training = number == 1 and count < SMALLEST
        if lacks_validation or lacks_training:
            needs = f"{val} of validation and {SMALLEST} of training"
            more = "give more text" if args.bytes else "give more text, or use --bytes"
            fail(f"{tokens} tokens are too few for {needs}: {more}")
        if number == 1:
            passes = choose_passes(count, args)
            taken *= passes
        if not taken:
            break
        name = f"text_{'train' if number else 'val'}_{number:06}.bin"
        row = shards.write(folder / name, [shards.header(sum(map(len, taken))), *taken])
        taken.clear()  # otherwise they would stay in memory while the next shard is collected
        for other in rows:
            if rows[other]["sha256"] == row["sha256"]:
                fail(f"the text repeats itself, so that {other} and {name} would be equal: choose "
                     "a larger --shard_tokens, or another --val_tokens")  # fmt: skip
        starts = np.flatnonzero(np.fromfile(folder / name, "<u2", offset=shards.HEADER) == eot)
        lengths = starts[MOST_DOCUMENTS:] - starts[:-MOST_DOCUMENTS]
        dense = dense or bool(np.any(lengths < PRESETS["small"].val_T))
        rows[name] = dict(**row, documents=len(starts))
    return rows, passes, dense


def refuse_used(out: pathlib.Path) -> None:
    """Exits if the folder has shards or a manifest."""
    used = sorted([*out.glob("*.bin"), *out.glob("MANIFEST.json")])
    if used:
        fail(f"{out} has {used[0].name} already: remove the folder, or choose another --out")


def publish(part: pathlib.Path, out: pathlib.Path, names: list[str]) -> None:
    """Moves finished files from `part` to `out`, all or none."""
    refuse_used(out)
    try:
        for name in names:
            os.replace(part / name, out / name)
    except BaseException:
        for name in names:
            (out / name).unlink(missing_ok=True)
        raise


# ---- The command that trains ---------------------------------------------------------------------
def steps_in(train: list[int], preset: Preset) -> int:
    """The steps that training shards of so many tokens hold. The last target of a step is the first
    token of the next one, and train_gpt.py drops what a shard has beyond its last step."""
    return sum((tokens - 1) // preset.step_tokens for tokens in train)


def choose_preset(train: list[int], dense: bool, by_bytes: bool) -> str:
    """`small` for GPT-2 tokens if training shards of so many, without repetitions, are enough for
    it and not dense, else `tiny`."""
    enough = steps_in(train, PRESETS["small"]) >= SMALL_STEPS
    return "small" if enough and not dense and not by_bytes else "tiny"


def training_flags(name: str, val: int, train: list[int], by_bytes: bool) -> dict[str, int]:
    """The flags with which train_gpt.py trains a preset on shards of so many tokens, each at least
    SMALLEST. A flag with the preset's own value is left out."""
    preset = PRESETS[name]
    steps = min(preset.steps, steps_in(train, preset))
    fitting = [T for T in VAL_LENGTHS if T <= preset.val_T and VAL_SEQUENCES * T < val]
    val_T = fitting[0]
    batch = VAL_SEQUENCES * val_T
    fitted = preset._replace(
        steps=steps,
        val_every=min(preset.val_every, -(-steps // 4)),
        val_tokens=min(preset.val_tokens, (val - 1) // batch * batch),
        val_T=val_T,
        head_chunk=min(preset.head_chunk, val_T),
    )
    flags = {}
    if name == "tiny":
        if not by_bytes:
            flags.update(shards.GPT2)
        flags["target"] = 0  # the preset's own is the loss on another text, at which a run stops
    own = preset._asdict()
    for flag, value in fitted._asdict().items():
        if value != own[flag]:
            flags[flag] = value
    return flags


def report(rows: dict[str, dict], passes: int, dense: bool, args: Any) -> None:
    """Prints the shards, what a run reads of them, and as the last line the command that trains."""
    sizes = []
    for name, row in rows.items():
        tokens = (row["size"] - shards.HEADER) // 2
        sizes.append(tokens)
        show(f"{name} tokens:{tokens} documents:{row['documents']} sha256:{row['sha256'][:16]}...")
    val, *train = sizes
    name = choose_preset([tokens // passes for tokens in train], dense, args.bytes)
    flags = training_flags(name, val, train, args.bytes)
    most = steps_in(train, PRESETS[name])
    steps = flags.get("steps", PRESETS[name].steps)
    if passes > 1:
        show(f"The training shard holds its text {passes} times; --passes N changes that.")
        show("Where val_loss rises, the model has begun to memorize the text: pass a smaller "
              "--steps.")  # fmt: skip
    if steps < 0.9 * most:
        show(f"A run of {steps} steps reads {steps / most:.0%} of the training shards, and one "
              f"with --steps {most} all of them.")  # fmt: skip
    show("Train on it:")
    words = " ".join(f"--{flag} {value}" for flag, value in flags.items())
    out = f"./{args.out}" if str(args.out).startswith("-") else str(args.out)  # no flag
    show(f"./run.sh {name} --data {shlex.quote(out)} {words}".rstrip())


# ---- Run -----------------------------------------------------------------------------------------
def parse() -> argparse.Namespace:
    """The command line's arguments, and in `about` the vocabulary's size and its EOT."""
    about = "Turns your own text into shards that train_gpt.py reads."
    cli = Parser(prog="./run.sh tokenize", description=about)
    add = cli.add_argument
    formats = f"a folder with {FORMATS}, or a file, which may be any text, such as .py"
    add("paths", nargs="+", type=named, metavar="PATH", help=formats)
    add("--out", type=named, required=True, metavar="DIR", help="folder for the shards")
    suffix = "read files of a folder with this suffix, such as .py, as text, too (may be repeated)"
    add("--also", action="append", default=[], metavar="SUFFIX", help=suffix)
    by_bytes = "make one token per byte of UTF-8, with which a CPU trains tiny faster"
    add("--bytes", action="store_true", help=by_bytes)
    shard_size = "tokens in a training shard; the last one may have fewer (default: %(default)s)"
    add("--shard_tokens", type=int, default=10**8, metavar="N", help=shard_size)
    val_size = "tokens in the validation shard (default: a tenth of all, but at least "
    val_size += f"{SMALLEST} and at most {VAL_TOKENS})"
    add("--val_tokens", type=int, metavar="N", help=val_size)
    passes = "how often to write the training text (default: as often as the steps of tiny need, "
    passes += f"at most {MOST_PASSES})"
    add("--passes", type=int, metavar="N", help=passes)
    ends = f"in .txt and .md, a line that ends a document; {MARK} ends one within a line, too"
    add("--separator", metavar="LINE", help=ends)
    column = "the field of JSON lines, or the column of .parquet, with the text (default: text)"
    add("--column", metavar="NAME", default="text", help=column)
    threads = "number of threads, which does not change the shards (default: %(default)s)"
    add("--workers", type=int, default=os.cpu_count() or 1, metavar="N", help=threads)
    argv = protect(sys.argv[1:])
    # Paths may follow a flag, too; but Python 3.11 loses those after --.
    args = cli.parse_args(argv) if "--" in argv else cli.parse_intermixed_args(argv)
    if args.separator is not None:
        args.separator = args.separator.removeprefix(GUARD)
    for name, low in dict(shard_tokens=SMALLEST, val_tokens=SMALLEST, passes=1, workers=1).items():
        value = getattr(args, name)
        if value is not None and not low <= value < 2**31:
            cli.error(f"--{name} {value} is not from {low} to {2**31 - 1}")
    if re.fullmatch(r"(?s).*\n.*|(\\[rn])+", args.separator or ""):  # also if typed as \n
        cli.error("--separator is not one line: --separator '' is for blank lines")
    args.also = tuple(f".{suffix.lower().lstrip('.')}" for suffix in args.also)
    if "." in args.also:
        cli.error("--also has no suffix: pass one, such as .py")
    args.about = dict(vocab=257, eot=256) if args.bytes else shards.GPT2
    return args


def protect(argv: list[str]) -> list[str]:
    """The arguments with GUARD before the value of --separator, because argparse would take ---
    for a flag and -- for none at all."""
    flag = "--separator"
    protected = []
    for word in argv:
        if protected[-1:] == [flag]:
            protected[-1] = f"{flag}={GUARD}{word}"
        elif word.startswith(flag + "="):
            protected.append(word.replace("=", "=" + GUARD, 1))
        else:
            protected.append(word)
    return protected


def named(text: str) -> pathlib.Path:
    """The path that an argument names, which an unset variable does not. The shell leaves the ~ of
    --out=~/folder as it is."""
    if not text:
        raise argparse.ArgumentTypeError("an empty name")
    return pathlib.Path(os.path.expanduser(text))


def show(*lines: str) -> None:
    """Prints lines, or loses them where the reader of a pipe is gone: the shards matter more."""
    try:
        print(*lines, end="\n" * len(lines), flush=True)
    except OSError as error:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for what is left to print
        if not isinstance(error, BrokenPipeError):
            error.filename = "the screen"
            raise


def show_notes(notes: Notes) -> None:
    """Prints each note with the first of its files, and forgets it."""
    for note, paths in notes.items():
        more = f", as {paths[0]}" if len(paths) > 1 else f": {paths[0]}"
        show(f"{counted(len(paths), 'file')} {note}{more}")
    notes.clear()


def run(args: argparse.Namespace) -> None:
    """Writes the shards, and prints what they are and how to train on them."""
    refuse_used(args.out)
    notes = collections.defaultdict(list)
    try:
        paths = readers.find(args.paths, args.column, notes, args.also)
    finally:
        show_notes(notes)
    counts = collections.Counter()
    kind = "UTF-8 bytes"
    if not args.bytes:
        gpt2()  # exits if there is no vocabulary
        kind = f"GPT-2 BPE by tiktoken {importlib.metadata.version('tiktoken')}"
    size = sum(path.stat().st_size for path in paths)
    hidden = None if sys.stderr else True  # None: unless it is a terminal
    bar = tqdm(total=size, unit="B", unit_scale=True, leave=False, disable=hidden)
    tasks = bundles(piece for path in paths for piece in read(path, args, counts, notes, bar))
    work = functools.partial(encode, args.bytes)
    encoded = contextlib.closing(in_order(args.workers, work, tasks))
    with shards.workplace(args.out) as part, bar, encoded as arrays:
        refuse_used(args.out)  # another process, for which this one waited, may have filled it
        rows, passes, dense = write(part, arrays, args)
        if args.separator is not None and not counts["separators"]:
            raise readers.unmatched(list(filter(is_plain, paths)), args.separator)
        total = counted(counts["documents"], "document")
        source = f"{kind} of {counted(len(paths), 'file')}, {total}, {size} bytes"
        if passes > 1:
            source += f"; the training text is there {passes} times"
        shards.write_manifest(part, source, **args.about, files=rows)
        val, *train = rows
        publish(part, args.out, [*train, "MANIFEST.json", val])  # a run needs val: it comes last
    try:
        show_notes(notes)
        skipped = f", {counted(counts['empty'], 'empty one')} skipped" if counts["empty"] else ""
        show(f"{total}{skipped}, in {args.out.absolute()}")
        report(rows, passes, dense, args)
    except OSError as error:
        fail(f"{args.out} has all its shards, but the command that trains on them cannot be "
             f"printed ({error.strerror}): pass --data {args.out} to ./run.sh tiny")  # fmt: skip


def main() -> None:
    args = parse()
    try:
        run(args)
    except Unreadable as fault:
        fail(str(fault))
    except OSError as error:  # from the outputs, or while find() looks for inputs
        if not error.errno:
            fail(f"{args.out} cannot be used: {error}: choose another --out")
        error.filename = error.filename or str(args.out)
        fail(shards.reason(error))
    except MemoryError:  # from the threads
        fail("there is too little memory: pass a smaller --workers, or use a larger machine")


if __name__ == "__main__":
    if sys.stdout and sys.stdout.errors == "strict":  # None if it is closed
        sys.stdout.reconfigure(errors="backslashreplace")  # for names that it cannot show
    try:
        main()
    except KeyboardInterrupt:
        print("tokenize_text.py: stopped by Ctrl-C: run it again for shards", file=sys.stderr)
        sys.exit(130)
    finally:
        with contextlib.suppress(OSError):
            show()  # what argparse has printed
