"""Writes the page of a run, page.html, to open in a browser: its curve, a sample, and a text in
which every token shows what the model expected there, and why.

    ./run.sh look [logs/<run>.npz] [data/source_code] [--text FILE] [--out FOLDER]

The text is the first 2,048 tokens of validation shards, or a file of yours. The page needs no
network and no server: page.html, page.js and the numbers, as JSON, are one file."""

import base64
import html
import io
import json
import math
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

sys.path.insert(0, str(Path(__file__).resolve().parent))  # for PYTHONSAFEPATH=1
import sample
import weights

# isort: split
import plot
import runs
from messages import one_line, refuse

FOLDER = Path(__file__).resolve().parent
LONGEST = 1024  # tokens of a sequence
LIKELY = 5  # how many of the likeliest tokens the page names
READ = 8  # how many of the tokens that attention reads it marks
LEVELS = 0.1, 0.25, 0.5, 1.0, 2.0, 4.0, 8.0  # losses in nats at which the colour changes
SAMPLE = "--tokens", "400", "--go_on"
SIGNS = {" ": "\u2423", "\n": "\u21b5", "\t": "\u21e5", "\r": "\u240d"}  # for whitespace
END = "end-of-text"
MORE = "\u207a"  # a token that only goes on with a character which an earlier token began


# ---- Numbers -------------------------------------------------------------------------------------
class Reading(NamedTuple):
    """What a model expects in some sequences, at each position. Losses are in nats."""

    loss: np.ndarray  # (B, T): of the next token
    likely: np.ndarray  # (B, T, LIKELY): the likeliest tokens
    p: np.ndarray  # (B, T, LIKELY): their probabilities
    loss_without_ngrams: np.ndarray  # (B, T): with rows of zeros in the place of the n-grams'
    loss_without_copy: np.ndarray | None  # (B, T): of the head alone; None: there is no pointer
    # (B, T): index of the token with the largest share of the pointer's attention, of the right
    # ones if there are any; -1: none
    copied: np.ndarray | None
    share: np.ndarray | None  # (B, T): the share of the pointer's attention that this token has
    length: np.ndarray | None  # (B, T): tokens that are equal before it and before the next token
    reads: np.ndarray  # (B, T, T): the last attention, mean over its heads


def read(w: weights.Weights, tokens: np.ndarray) -> Reading:
    """Runs the file's own forward() on tokens (B, T + 1), with its n-grams and without them."""
    outputs, window, scale = run_model(w, tokens)
    # Zeros that nobody reads take no memory, so it is no second table.
    zeros = np.zeros(w.arrays["ngram"].shape, np.float32)
    bare, *_ = run_model(w._replace(arrays=w.arrays | {"ngram": zeros}), tokens)
    reads = []
    for q, k in zip(outputs.pop("q"), outputs.pop("k"), strict=True):
        reads.append(mean_attention(q, k, window, scale, tokens.shape[1] - 1))
    copies = dict.fromkeys(("loss_without_copy", "copied", "share", "length"))
    return Reading(**copies | outputs, loss_without_ngrams=bare["loss"], reads=np.stack(reads))


def run_model(w: weights.Weights, tokens: np.ndarray) -> tuple[dict, int, float]:
    """Arrays of Reading by name, with the q and k of the last attention; its window in positions
    and the scale of its scores."""
    calls = []  # the arguments of attend(), while the model is traced
    attend = w.code.attend

    def recorded(*arguments):
        calls.append(arguments)
        return attend(*arguments)

    def arrays(x: Array, whole: dict, tokens: Array) -> dict[str, Array]:
        outputs = expect(w, whole, x, tokens)
        outputs["q"], outputs["k"], *_ = calls[-1]
        return outputs

    with mock.patch.object(w.code, "attend", recorded):
        outputs = weights.runner(w, arrays, 1)(tokens)
    _, _, _, window, scale, _ = calls[-1]
    return outputs, window, scale


def mean_attention(q, k, window: int, scale: float, T: int) -> np.ndarray:
    """(T, S): the share of a query's attention that each token gets, mean over heads. q and k are
    (n T, H / n, K), where n heads are paired: position n t + i is token t of head i. The window is
    in positions; scores are multiplied by the scale."""
    P, H, _ = q.shape
    n = P // T
    back = np.arange(P)[:, None] - np.arange(P)
    scores = scale * np.einsum("PHK,SHK->HPS", np.float32(q), np.float32(k))
    is_visible = (0 <= back) & (back <= window)
    attention_HPS = np.asarray(jax.nn.softmax(np.where(is_visible, scores, -np.inf)))
    # From positions to tokens: T and S are tokens, N is the head of a group.
    return attention_HPS.reshape(H, T, n, T, n).sum(axis=-1).mean(axis=(0, 2))


def expect(w: weights.Weights, whole: dict, x: Array, tokens: Array) -> dict[str, Array]:
    """What is expected at each position of x (B, T, D), from tokens (B, T + 1): arrays of Reading
    by name. Losses are those of loss.py. Without a pointer, its softmax includes the padding."""
    targets_BT = tokens[:, 1:]  # also the successor of each token, which the pointer copies

    def one(prediction: weights.Prediction, t: Array) -> dict[str, Array]:
        log_p_likely, likely = lax.top_k(prediction.log_p, LIKELY)
        outputs = {"likely": likely, "p": jnp.exp(log_p_likely)}
        if w.c.pointer:
            # The place with the largest share, of those with the right successor if there are any.
            right_BT = jnp.where(targets_BT == targets_BT[:, t, None], prediction.pointer, 0)
            is_right_B1 = right_BT.max(axis=1, keepdims=True) > 0
            shares_BT = jnp.where(is_right_B1, right_BT, prediction.pointer)
            outputs["share"] = shares_BT.max(axis=1)
            outputs["copied"] = jnp.where(outputs["share"] > 0, shares_BT.argmax(axis=1) + 1, -1)
        return outputs

    outputs = weights.predict_all(w, whole, x, tokens[:, :-1], one)
    log_p, alone = weights.target_log_p(w, whole, x, tokens, w.c.head_chunk)
    outputs["loss"] = -log_p
    if w.c.pointer:
        outputs["loss_without_copy"] = -alone
        labels = w.code.pointer_labels(tokens[:, :-1], w.c)
        there_BT1 = jnp.maximum(outputs["copied"] - 1, 0)[..., None]
        is_equal = jnp.take_along_axis(labels, there_BT1, axis=1) == labels
        is_copy_BT = outputs["copied"] >= 0
        outputs["length"] = jnp.where(is_copy_BT, is_equal[..., 1:].sum(axis=-1), 0)
    return outputs


# ---- Text ----------------------------------------------------------------------------------------
def own_text(w: weights.Weights, path: Path, most: int) -> np.ndarray:
    """Tokens (B, T + 1) of at most two sequences of `most` tokens from a text file, behind an
    end-of-text."""
    with path.open("rb") as file:
        content = file.read(100 * most)  # two sequences of tokens that have 50 bytes
    text = content.decode(errors="surrogateescape")
    tokens = [w.c.eot, *weights.tokenizer(w).encode(text)]
    n = len(tokens) - 1
    if n < 2:
        refuse(f"{path} has {n} tokens, but a page needs 2")
    B = 2 if n > most else 1
    T = min(most, n // B)
    return np.array([tokens[i * T : i * T + T + 1] for i in range(B)])


def visible(text: str) -> str:
    """Text without characters that cannot be seen; `\\x07` is one of them, and a byte of none."""
    shown = ""
    for letter in text:
        number = ord(letter)
        if 0xDC80 <= number <= 0xDCFF:  # a byte that is no UTF-8, by "surrogateescape"
            number -= 0xDC00
        is_plain = letter.isprintable() or letter in "\n\t"
        escape = f"\\x{number:02x}" if number < 256 else f"\\u{number:04x}"
        shown += letter if is_plain else escape
    return shown


def token_texts(pieces: list[bytes]) -> list[str]:
    """What the page shows for each token, from its bytes. A character of several tokens stands at
    the first one."""
    texts = [""] * len(pieces)
    owners = [i for i, piece in enumerate(pieces) for _ in piece]  # of each byte
    place = 0
    for letter in b"".join(pieces).decode(errors="surrogateescape"):
        texts[owners[place]] += visible(letter)
        place += len(letter.encode(errors="surrogateescape"))
    return [text or MORE for text in texts]


def page_text(w: weights.Weights, coder: Any, tokens: np.ndarray, reading: Reading) -> str:
    """The text as HTML: an element for each token, whose class has the colour of its loss, and
    whose id has the numbers of its sequence, from 1, and of it, from 0, as in 2-17."""
    parts = []
    for b, row in enumerate(tokens.tolist()):
        pieces = [b"\n" if token == w.c.eot else coder.piece(token) for token in row]
        levels = np.searchsorted(LEVELS, reading.loss[b], side="right")
        colours = ["", *(f" l{level}" for level in levels)]
        if len(tokens) > 1:
            parts.append(f"<p>Sequence {b + 1}</p>")
        for t, (token, shown) in enumerate(zip(row, token_texts(pieces), strict=True)):
            kind = {" ": " space", MORE: " more"}.get(shown, " line" if "\n" in shown else "")
            if token == w.c.eot:
                kind = " end"
                shown = END
            parts.append(f'<span role="option" id="{b + 1}-{t}" class="t{colours[t]}{kind}">'
                         f"{html.escape(shown)}</span>")  # fmt: skip
    return "".join(parts)


def token_name(piece: bytes) -> str:
    """A token by itself, with signs for whitespace; as hexadecimal bytes if it is no UTF-8."""
    try:
        text = piece.decode()
    except UnicodeDecodeError:
        return f"byte{'s' * (len(piece) > 1)} {piece.hex(' ').upper()}"
    for letter, sign in SIGNS.items():
        text = text.replace(letter, sign)
    return visible(text)


def first_lines(tokens: list[int], piece: Callable, eot: int) -> int:
    """How many tokens of a sequence are a prompt: the first three lines, or as many of them as end
    within a sixth of the sequence, or else that sixth. A document's end ends it as well."""
    most = max(2, len(tokens) // 6)
    most = next((n for n in range(1, most) if tokens[n] == eot), most)
    ends = [n + 1 for n in range(1, most) if b"\n" in piece(tokens[n])]
    return ends[:3][-1] if ends else most


# ---- The page ------------------------------------------------------------------------------------
def page_data(w: weights.Weights, coder: Any, tokens: np.ndarray, reading: Reading) -> dict:
    """What page.js reads: of sequences (B, T + 1), by token from the second on. Shares of
    attention are in 1/1,000."""
    names = {}
    for token in {*tokens.ravel().tolist(), *reading.likely.ravel().tolist()}:
        names[token] = END if token == w.c.eot else token_name(coder.piece(token))
    sequences = []
    for b, row in enumerate(tokens.tolist()):
        best = np.argsort(-reading.reads[b], axis=-1, kind="stable")[:, :READ]
        shares = np.rint(1e3 * np.take_along_axis(reading.reads[b], best, axis=-1)).astype(int)
        sequence = {
            "ids": row,
            "loss": digits(reading.loss[b]),
            "bare": digits(reading.loss_without_ngrams[b]),
            "likely": reading.likely[b].tolist(),
            "p": [digits(p_t) for p_t in reading.p[b]],
            "reads": [best[t, shares[t] > 0].tolist() for t in range(len(best))],
            "shares": [shares_t[shares_t > 0].tolist() for shares_t in shares],
        }
        if reading.loss_without_copy is not None:
            sequence["alone"] = digits(reading.loss_without_copy[b])
            sequence["from"] = reading.copied[b].tolist()
            sequence["share"] = digits(reading.share[b])
            sequence["length"] = reading.length[b].tolist()
        sequences.append(sequence)
    return {
        "layer": w.c.attention_layers()[-1],
        "copy": w.c.pointer,
        "first": most_helped(reading),
        "names": names,
        "sequences": sequences,
    }


def digits(x: np.ndarray) -> list[float]:
    """Numbers with six significant digits."""
    return [float(f"{value:.6g}") for value in x.tolist()]


def most_helped(reading: Reading) -> int:
    """The token of the first sequence that the page shows at first, counted from 0: a likely one
    whose loss copying lowers much, or the n-grams in models that do not copy."""
    other = reading.loss_without_copy
    if other is None:
        other = reading.loss_without_ngrams
    return int(np.argmax(np.exp(-reading.loss[0]) * (other[0] - reading.loss[0]))) + 1


def unit_of(w: weights.Weights) -> str:
    """What a loss is counted by."""
    return "byte" if w.c.vocab == 257 else "token"


def headline(w: weights.Weights, run: runs.Run | None) -> str:
    """The run's RESULT as a title."""
    name = run.config["preset"] if run else "The model"
    loss = w.result["val_loss"]
    return f"{name} reached {loss:.3f} nats per {unit_of(w)} in {w.result['steps']:,} steps"


def facts(w: weights.Weights, run: runs.Run | None) -> str:
    """Sentences about the run and its model."""
    c = w.c
    loss = w.result["val_loss"]
    devices = f" on {w.result['devices']} \u00d7 {run.devices[0]}" if run else ""
    total = sum(x.size for x in w.arrays.values())
    return (
        f"The validation loss is {loss:.4f} nats, {loss / math.log(2):.4f} bits. Training took "
        f"{w.result['train_time_ms'] / 1000:,.0f} seconds{devices} and read {w.result['tokens']:,} "
        f"tokens. The model has {len(c.layers)} layers, {len(c.attention_layers())} of them with "
        f"attention, of width {c.D} with {c.H} heads; {total:,} parameters, of which "
        f"{w.arrays['ngram'].size:,} are rows of n-grams; {c.vocab:,} tokens."
    )


def to_json(data: dict) -> str:
    """JSON that may stand in a <script>: no text in it can end that element."""
    text = json.dumps(data, separators=(",", ":"), ensure_ascii=False)
    return text.replace("<", "\\u003c")


def curve(run: runs.Run, w: weights.Weights) -> str:
    """The validation losses of a run, as the URL of a picture."""
    file = io.BytesIO()
    plot.plot({"this run": [run]}, file, w.result["target"])
    return f"data:image/svg+xml;base64,{base64.b64encode(file.getvalue()).decode()}"


def legend(unit: str) -> str:
    """The colours of losses, as a list item each: nats, bits and probability at its beginning."""
    cells = []
    for n in range(len(LEVELS) + 1):
        low = LEVELS[n - 1] if n else 0
        cells.append(
            f'<li><i class="l{n}"></i><b>{low:g}</b><span>{low / math.log(2):.2g}</span>'
            f"<span>{float(f'{100 * math.exp(-low):.2g}'):g} %</span></li>"
        )
    heads = f"<li><i></i><b>nats</b><span>bits</span><span>probability of the {unit}</span></li>"
    return "\n".join([*cells, heads])


def write(out: Path, w: weights.Weights, run: runs.Run | None, tokens: np.ndarray,
          source: str) -> None:  # fmt: skip
    """Writes the page of a run to OUT, with sequences (B, T + 1) of a text; `source` names it."""
    coder = weights.tokenizer(w)
    reading = read(w, tokens)
    row = tokens[0].tolist()
    prompt = row[int(row[0] == w.c.eot) : first_lines(row, coder.piece, w.c.eot)]
    prompt = b"".join(map(coder.piece, prompt)).decode(errors="surrogateescape")
    loss = reading.loss.mean(dtype="f8")
    name = visible(w.path.stem)
    words = {
        "title": f"{name} - jNanoGPT",
        "name": name,
        "headline": headline(w, run),
        "facts": facts(w, run),
        "prompt": visible(prompt),
        "sample": visible(sample.continue_text(w, coder, prompt, *SAMPLE)),
        "source": visible(source),
        "tokens": f"{reading.loss.size:,}",
        "length": f"{tokens.shape[1] - 1:,}",
        "mean": f"{loss:.4f} nats, {loss / math.log(2):.4f} bits",
        "unit": unit_of(w),
        "layer": str(w.c.attention_layers()[-1]),
    }
    fields = {key: html.escape(value) for key, value in words.items()}
    fields |= {
        "curve": curve(run, w) if run else "",
        "has_curve": "" if run else "hidden",
        "legend": legend(unit_of(w)),
        "text": page_text(w, coder, tokens, reading),
        "data": to_json(page_data(w, coder, tokens, reading)),
        "script": (FOLDER / "page.js").read_text("utf-8"),
    }
    template = (FOLDER / "page.html").read_text("utf-8")
    # In one pass, so that nothing in the text of a field is taken for a field.
    page = re.sub(r"\{\{(\w+)\}\}", lambda field: fields[field[1]], template)
    out.write_text(page, "utf-8")


@one_line("look.py")
def main() -> None:
    """Writes the page of the weights on the command line."""
    cli = weights.parser(__doc__)
    cli.add_argument("--text", type=Path, help="a text file to read in the place of shards")
    cli.add_argument("--out", type=Path, help="folder for the page; default: logs/<run>_look")
    args = weights.parse(cli, has_word=True)
    w = weights.open_weights(args.weights, args.script)
    T = min(LONGEST, w.c.val_T)
    if args.text:
        tokens = own_text(w, args.text, T)
        source = f"the beginning of {args.text.name}"
    else:
        shard = weights.val_shard(w, args.word and Path(args.word), T)
        tokens = next(w.code.read_batches([shard], [(2, T, 0)], w.c))
        source = "the validation text"
    log = args.weights.with_suffix(".txt")
    run = runs.read(log) if log.exists() else None
    out = args.out or args.weights.with_name(f"{args.weights.stem}_look")
    out.mkdir(parents=True, exist_ok=True)
    write(out / "page.html", w, run, tokens, source)
    print(f"{out / 'page.html'}: open it in a browser")


if __name__ == "__main__":
    main()
