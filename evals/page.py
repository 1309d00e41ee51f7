"""Writes the page of a run, page.html: its curve, a sample, and a text in which every token shows
what the model expected there and why. The page needs no network and no server: page.html, page.js
and the numbers, as JSON, are one file."""

import html
import json
import math
import re
from pathlib import Path
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
import sample
import weights
from calls import Call, attention, record_calls
from jax import Array, lax
from plot import drawable, smooth
from runs import Run

FOLDER = Path(__file__).resolve().parent
LIKELY = 5  # how many of the likeliest tokens the page names
READ = 8  # how many of the tokens that attention reads it marks
LEVELS = 0.1, 0.25, 0.5, 1.0, 2.0, 4.0, 8.0  # losses in nats at which the colour changes
SAMPLE_TOKENS = 400
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
    layer: int  # of this attention


def read(w: weights.Weights, tokens: np.ndarray) -> Reading:
    """Runs the file's own forward() on tokens (B, T + 1), with its n-grams and without them."""
    outputs, layer, window, scale = run_model(w, tokens)
    # Zeros that nobody reads take no memory, so it is no second table.
    zeros = np.zeros(w.arrays["bigram"].shape, np.float32)
    without_ngrams = w._replace(arrays=w.arrays | {"bigram": zeros})
    bare, *_ = run_model(without_ngrams, tokens)
    T = tokens.shape[1] - 1
    reads = []
    for q, k in zip(outputs.pop("q"), outputs.pop("k"), strict=True):
        reads.append(attention(q[None], k[None], window, scale, T).mean(axis=(0, 1, 3)))
    copies = dict.fromkeys(("loss_without_copy", "copied", "share", "length"))
    return Reading(**copies | outputs, loss_without_ngrams=bare["loss"], reads=np.stack(reads),
                   layer=layer)  # fmt: skip


def run_model(w: weights.Weights, tokens: np.ndarray) -> tuple[dict, int, int, float]:
    """Arrays of Reading by name, with the q and k of the last attention; its layer, its window in
    positions and the scale of its scores."""
    calls = []

    def arrays(x: Array, whole: dict, tokens: Array) -> dict[str, Array]:
        outputs = expect(w, whole, x, tokens)
        outputs["q"], outputs["k"], *_ = last_attend(calls).arguments
        return outputs

    with record_calls(w.code, calls):
        outputs = weights.runner(w, arrays, 1)(tokens)
    last = last_attend(calls)
    _, _, _, window, scale, _ = last.arguments
    return outputs, last.layer, window, scale


def expect(w: weights.Weights, whole: dict, x: Array, tokens: Array) -> dict[str, Array]:
    """What is expected at each position of x (B, T, D), from tokens (B, T + 1): arrays of Reading
    by name. Losses are those of loss.py. Without a pointer, its softmax includes the padding."""
    targets_BT = tokens[:, 1:]  # also what each token votes for, if the pointer attends to it

    def one(prediction: weights.Prediction, t: Array) -> dict[str, Array]:
        log_p_likely, likely = lax.top_k(prediction.log_p, LIKELY)
        outputs = {"likely": likely, "p": jnp.exp(log_p_likely)}
        if weights.has_pointer(w.c):
            # The place with the largest share, of those with the right vote if there are any.
            right_BT = jnp.where(targets_BT == targets_BT[:, t, None], prediction.pointer, 0)
            is_right_B1 = right_BT.max(axis=1, keepdims=True) > 0
            shares_BT = jnp.where(is_right_B1, right_BT, prediction.pointer)
            outputs["share"] = shares_BT.max(axis=1)
            outputs["copied"] = jnp.where(outputs["share"] > 0, shares_BT.argmax(axis=1) + 1, -1)
        return outputs

    outputs = weights.predict_all(w, whole, x, tokens[:, :-1], one)
    log_p, alone = weights.target_log_p(w, whole, x, tokens, w.c.head_chunk)
    outputs["loss"] = -log_p
    if weights.has_pointer(w.c):
        outputs["loss_without_copy"] = -alone
        labels = w.code.pointer_labels(tokens[:, :-1], w.c)
        there_BT1 = jnp.maximum(outputs["copied"] - 1, 0)[..., None]
        is_equal = jnp.take_along_axis(labels, there_BT1, axis=1) == labels
        is_copy_BT = outputs["copied"] >= 0
        outputs["length"] = jnp.where(is_copy_BT, is_equal[..., 1:].sum(axis=-1), 0)
    return outputs


def last_attend(calls: list[Call]) -> Call:
    """The last call of attend()."""
    return [call for call in calls if call.name == "attend"][-1]


# ---- Text ----------------------------------------------------------------------------------------
def own_text(w: weights.Weights, path: Path, most: int) -> tuple[np.ndarray, str]:
    """Tokens (B, T + 1) of at most two sequences of `most` tokens from a text file, behind an
    end-of-text; and a description of the part that was read. Exits with status 2 if it is no
    text."""
    with weights.shards.open_file(path) as file:
        content = file.read(100 * most)  # two sequences of tokens that have 50 bytes
        is_whole = not file.read(1)
    coder = weights.tokenizer(w)
    errors = "surrogateescape" if sample.is_of_bytes(w) else "strict"
    try:
        text = content.decode(errors=errors)
    except UnicodeDecodeError as error:
        if is_whole or error.start < len(content) - 3:  # not a character that was cut
            weights.refuse(
                f"{path} is not UTF-8: byte {error.start} is "
                f"0x{content[error.start]:02X}; convert it, as by iconv -t UTF-8"
            )
        text = content[: error.start].decode()
    tokens = [w.c.eot, *coder.encode(text)]
    n = len(tokens) - 1
    if n < 2:
        weights.refuse(f"{path} has {n} token{'s' * (n != 1)}, but a page needs at least 2: name a "
                       "longer text")  # fmt: skip
    B = 2 if n > most else 1
    T = min(most, n // B)
    rows = [tokens[i * T : i * T + T + 1] for i in range(B)]
    part = "" if is_whole and len(tokens) <= B * T + B else "the beginning of "
    return np.array(rows), f"{part}{path.name}"


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


def first_lines(tokens: list[int], piece: Any, eot: int) -> int:
    """How many tokens of a sequence are a prompt: the first three lines, or as many of them as end
    within a sixth of the sequence, or else that sixth. A document's end ends it as well."""
    most = max(2, len(tokens) // 6)
    lines = 0
    best = 0
    for n in range(1, most):
        if tokens[n] == eot:
            return n
        if b"\n" in piece(tokens[n]):
            lines += 1
            best = n + 1
        if lines == 3:
            break
    return best or most


# ---- The page ------------------------------------------------------------------------------------
def page_data(w: weights.Weights, coder: Any, tokens: np.ndarray, reading: Reading) -> dict:
    """What page.js reads: of sequences (B, T + 1), by token from the second on. Losses have 4
    decimals, probabilities three digits, and shares of attention are in 1/1,000."""
    names = {}
    for token in {*tokens.ravel().tolist(), *reading.likely.ravel().tolist()}:
        names[token] = END if token == w.c.eot else token_name(coder.piece(token))
    sequences = []
    for b, row in enumerate(tokens.tolist()):
        sequence = {
            "ids": row,
            "loss": rounded(reading.loss[b]),
            "bare": rounded(reading.loss_without_ngrams[b]),
            "likely": reading.likely[b].tolist(),
            "p": [[three_digits(p) for p in row] for row in reading.p[b].tolist()],
        }
        best = np.argsort(-reading.reads[b], axis=-1, kind="stable")[:, :READ]
        shares = np.rint(1e3 * np.take_along_axis(reading.reads[b], best, axis=-1)).astype(int)
        sequence["reads"] = [best_t[shares_t > 0].tolist()
                             for best_t, shares_t in zip(best, shares, strict=True)]  # fmt: skip
        sequence["shares"] = [shares_t[shares_t > 0].tolist() for shares_t in shares]
        if reading.loss_without_copy is not None:
            sequence["alone"] = rounded(reading.loss_without_copy[b])
            sequence["from"] = reading.copied[b].tolist()
            sequence["share"] = [three_digits(p) for p in reading.share[b].tolist()]
            sequence["length"] = reading.length[b].tolist()
        sequences.append(sequence)
    return {
        "layer": reading.layer,
        "copy": w.c.pointer if weights.has_pointer(w.c) else 0,
        "first": most_helped(reading, sequences[0]),
        "names": names,
        "sequences": sequences,
    }


def rounded(losses: np.ndarray) -> list[float]:
    """Losses with 4 decimals."""
    return np.round(np.float64(losses), 4).tolist()


def three_digits(p: float) -> float:
    """A probability with three significant digits."""
    return float(f"{p:.3g}")


def most_helped(reading: Reading, sequence: dict) -> int:
    """The token of the first sequence that the page shows at first, counted from 0: a likely one
    whose loss copying lowers much, from a place that is not near, if there is such a place. In
    models without copying, one whose loss the n-grams lower much."""
    loss = reading.loss[0]
    other = reading.loss_without_copy
    if other is None:
        other = reading.loss_without_ngrams
    score = np.exp(-loss) * (other[0] - loss)
    if "from" in sequence:
        place = np.array(sequence["from"])
        back = np.arange(1, len(loss) + 1) - place
        is_far = (place >= 0) & (back >= len(loss) // 8)
        if is_far.any():
            score = np.where(is_far, score, -np.inf)
    return int(np.argmax(score)) + 1


def unit_of(w: weights.Weights) -> str:
    """What a loss is counted by."""
    return "byte" if sample.is_of_bytes(w) else "token"


def how_made(w: weights.Weights) -> str:
    """How the page's sample was drawn, in sentences."""
    best = sample.best_of(w, 1)
    sentences = ["Temperature 0.8, top_p 0.95, seed\u00a00; the document cannot end, and no run of "
                 f"{sample.NO_REPEAT} tokens, white space aside, is there twice."]  # fmt: skip
    if best > 1:
        sentences.append(f"Each line is the likeliest of {best} candidates.")
    return " ".join(sentences)


def to_json(data: dict) -> str:
    """JSON that may stand in a <script>: no text in it can end that element."""
    text = json.dumps(data, separators=(",", ":"), ensure_ascii=False)
    return text.replace("<", "\\u003c")


def number(n: float) -> str:
    """A count as one says it: 4.7 million."""
    for size, name in (1e9, "billion"), (1e6, "million"):
        if n >= size:
            return f"{n / size:.3g} {name}"
    return f"{n:,}"


def headline(w: weights.Weights, run: Run | None) -> str:
    """The run's RESULT as a title."""
    preset = run.config["preset"] if run and run.config else "The model"
    loss = w.result.get("val_loss")
    steps = f"{w.result['steps']:,} step{'s' * (w.result['steps'] != 1)}"
    if loss is None:
        return f"{preset} after {steps}"
    return f"{preset} reached {loss:.3f} nats per {unit_of(w)} in {steps}"


def facts(w: weights.Weights, run: Run | None) -> list[str]:
    """Sentences about the run and its model."""
    sentences = []
    loss = w.result.get("val_loss")
    if loss is not None:
        sentence = f"The validation loss is {loss:.4f} nats, {loss / math.log(2):.4f} bits"
        if w.result.get("target"):
            reached = "reached" if loss <= w.result["target"] else "not reached"
            sentence += f"; the target, {w.result['target']:g}, was {reached}"
        sentences.append(f"{sentence}.")
    if "train_time_ms" in w.result:
        seconds = w.result["train_time_ms"] / 1000
        devices = f"{w.result['devices']} \u00d7 {run.devices[0]}" if run and run.devices else ""
        where = f" on {devices}" if devices else ""
        words = f"{seconds:.1f} seconds" if seconds < 120 else f"{seconds / 60:.1f} minutes"
        sentences.append(f"Training took {words}{where} and read {number(w.result['tokens'])} "
                         "tokens.")  # fmt: skip
    c = w.c
    total = sum(x.size for x in w.arrays.values())
    sentences.append(
        f"The model has {len(c.layers)} layers, {len(c.attention_layers())} of them with attention,"
        f" of width {c.D} with {c.H} heads; {number(total)} parameters, of which"
        f" {number(w.arrays['bigram'].size)} are rows of n-grams; {c.vocab:,} tokens."
    )
    return sentences


def curve(run: Run, w: weights.Weights) -> str:
    """The losses of a run as SVG, over the steps, on a logarithmic axis, with a mark where each
    stage begins. Its colours are classes of page.html; "" without any loss."""
    training = drawable(run.training)
    validations = drawable(run.validations)
    losses = [v.loss for v in training + validations]
    if not losses:
        return ""
    width = 560
    height = 250
    left = 40
    bottom = 34
    top = 26
    steps = max([w.c.total_steps, *(v.step for v in training + validations)])
    low = min(losses) / 1.06
    high = max(losses) * 1.06

    def x(step: float) -> float:
        return round(left + (width - left - 12) * step / steps, 1)

    def y(loss: float) -> float:
        share = math.log(loss / low) / math.log(high / low)
        return round(height - bottom - (height - bottom - top) * share, 1)

    def line(points: list, name: str) -> str:
        path = " ".join(f"{x(step)},{y(loss)}" for step, loss in points)
        return f'<polyline class="{name}" points="{path}"/>'

    parts = [f'<svg class="curve" viewBox="0 0 {width} {height}" role="img" '
             f'aria-label="Losses by step">']  # fmt: skip
    begin = 0
    for n, end in enumerate(w.c.stage_ends.tolist()):
        anchor = "start" if end > begin else "end"  # the last one may be at the right border
        words = f"stage {n + 1}" if n == 0 or end == begin else f"{n + 1}"
        parts.append(f'<line class="stage" x1="{x(begin)}" x2="{x(begin)}" y1="{top - 18}" '
                     f'y2="{y(low)}"/>')  # fmt: skip
        parts.append(f'<text x="{x(begin) + (4 if end > begin else -4)}" y="{top - 10}" '
                     f'text-anchor="{anchor}">{words}</text>')  # fmt: skip
        begin = end
    for tick in ticks(low, high):
        parts.append(f'<line class="grid" x1="{left}" x2="{width - 12}" y1="{y(tick)}" '
                     f'y2="{y(tick)}"/>')  # fmt: skip
        parts.append(f'<text class="tick y" x="{left - 8}" y="{y(tick) + 3.5}">{tick:g}</text>')
    for step in np.linspace(0, steps, 5).round().astype(int).tolist():
        parts.append(f'<text class="tick x" x="{x(step)}" y="{height - bottom + 16}">{step:,}'
                     "</text>")  # fmt: skip
    parts.append(f'<text class="tick x" x="{(left + width - 12) / 2}" y="{height - 3}">training '
                 "steps</text>")  # fmt: skip
    target = w.result.get("target")
    if target and low < target < high:
        parts.append(f'<line class="target" x1="{left}" x2="{width - 12}" y1="{y(target)}" '
                     f'y2="{y(target)}"/>')  # fmt: skip
    for v in training:
        parts.append(f'<circle class="batch" cx="{x(v.step)}" cy="{y(v.loss)}" r="2"/>')
    smoothed = smooth([v.loss for v in training])
    parts.append(line([*zip((v.step for v in training), smoothed, strict=True)], "smooth"))
    parts.append(line([(v.step, v.loss) for v in validations], "validation"))
    for v in validations:
        words = f"step {v.step:,}: {v.loss:.4f}"
        parts.append(f'<circle class="validation" cx="{x(v.step)}" cy="{y(v.loss)}" r="3.5">'
                     f"<title>{words}</title></circle>")  # fmt: skip
    return "\n".join([*parts, "</svg>"])


def ticks(low: float, high: float) -> list[float]:
    """Round losses for a logarithmic axis, at least three where the axis has so many."""
    fine = np.arange(100, 1000) / 100
    for steps in (1, 2, 3, 5), (1, 1.5, 2, 3, 4, 5, 7), fine[::10], fine:
        found = [s * size for size in (0.1, 1, 10) for s in steps if low <= s * size <= high]
        if len(found) > 2:
            return found[:: math.ceil(len(found) / 6)]
    return found


def stages(w: weights.Weights) -> list[str]:
    """A line for each stage of a run."""
    lines = []
    begin = 0
    for n, (stage, end) in enumerate(zip(w.c.stages, w.c.stage_ends.tolist(), strict=True)):
        windows = f"windows of {stage.short:,} and {stage.long:,} tokens"
        what = f"{end - begin:,} steps of {stage.tokens:,} tokens" if end > begin else "validation"
        lines.append(f"Stage {n + 1}: {what}, {windows}")
        begin = end
    return lines


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


def notes(w: weights.Weights, layer: int, copies: bool) -> str:
    """What the numbers in the panel mean."""
    sentences = [
        "All numbers are of the run's own model, with the windows of its last validation.",
        "It reads each sequence from its beginning, and knows no token before that.",
        "No n-grams: a second pass, in which all rows of n-grams are zeros.",
    ]
    if copies:
        sentences.append("No copying: the probabilities of the head alone, without the pointer's.")
    else:
        sentences.append("This model does not copy.")
    sentences.append(f"Attention: the mean over the heads of layer {layer}, counted from 0.")
    if w.c.layers[layer].dc:
        sentences.append("The map of composed attention, which this layer adds, is left out.")
    return " ".join(sentences)


def write(out: Path, w: weights.Weights, run: Run | None, tokens: np.ndarray, source: str) -> None:
    """Writes the page of a run to OUT, with sequences (B, T + 1) of a text; `source` names it."""
    coder = weights.tokenizer(w)
    reading = read(w, tokens)
    row = tokens[0].tolist()
    count = first_lines(row, coder.piece, w.c.eot)
    prompt = row[int(row[0] == w.c.eot) : count]
    prompt = b"".join(map(coder.piece, prompt)).decode(errors="surrogateescape")
    loss = reading.loss.mean(dtype="f8")
    name = visible((run.name if run else w.path.name).rsplit(".", 1)[0])
    figure = curve(run, w) if run else ""
    fields = {
        "title": html.escape(f"{name} - jNanoGPT"),
        "name": html.escape(name),
        "headline": html.escape(headline(w, run)),
        "facts": html.escape(" ".join(facts(w, run))),
        "curve": figure,
        "has_curve": "" if figure else "hidden",
        "stages": "".join(f"<li>{html.escape(line)}</li>" for line in stages(w)),
        "count": str(len(w.c.stages)),
        "prompt": html.escape(visible(prompt)),
        "sample": html.escape(
            visible(sample.continue_text(w, coder, prompt, SAMPLE_TOKENS, go_on=True))
        ),
        "made": how_made(w),
        "source": html.escape(visible(source)),
        "tokens": f"{reading.loss.size:,}",
        "sequences": f"{len(tokens)} sequence{'s' * (len(tokens) > 1)} of {tokens.shape[1] - 1:,}",
        "mean": f"{loss:.4f} nats, {loss / math.log(2):.4f} bits",
        "unit": unit_of(w),
        "notes": notes(w, reading.layer, reading.loss_without_copy is not None),
        "legend": legend(unit_of(w)),
        "text": page_text(w, coder, tokens, reading),
        "data": to_json(page_data(w, coder, tokens, reading)),
        "script": (FOLDER / "page.js").read_text("utf-8"),
    }
    template = (FOLDER / "page.html").read_text("utf-8")
    # In one pass, so that nothing in the text of a field is taken for a field.
    page = re.sub(r"\{\{(\w+)\}\}", lambda field: fields[field[1]], template)
    part = out.with_name(f"{out.name}.part")
    part.write_text(page, "utf-8")
    part.replace(out)
