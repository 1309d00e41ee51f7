"""Draws the model of the preset `record`, layer by layer, from its Config in train_gpt.py.

    .venv/bin/python dev/draw_model.py [--out dev/pictures/model.svg]

Needs matplotlib, which evals/requirements.txt installs. Run it again when RECORD_LAYERS changes:
tests/test_draw_model.py compares the picture in the repository with the layers.
"""

import argparse
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import matplotlib  # noqa: E402

matplotlib.use("Agg")
import matplotlib.pyplot as plt  # noqa: E402
from matplotlib.patches import FancyBboxPatch  # noqa: E402

import train_gpt  # noqa: E402
from dev import launch  # noqa: E402
from train_gpt import LONG, Config, Layer  # noqa: E402

# Text stays text, which is a fifth of the size of its outlines, and can be searched.
STYLE = {"font.size": 9, "svg.hashsalt": "jNanoGPT", "svg.fonttype": "none"}
# What a mark in a layer means, by field of Layer, in the order of the notes.
MARKS = {
    "narrow_qk": "queries and keys have half of a head's channels",
    "narrow_v": "and so have values",
    "key_offset": "half of a key comes from the token before",
    "key_start": "key weights start as copies of the query weights",
    "paired_heads": "two heads see each other's keys, over half as many tokens",
    "value_table": "one more embedding of each token, added to the values",
    "xsa": "a head may remove its own token's value from its output",
    "head_gate": "each token scales the output of each head",
    "dc": "adds one attention map, mixed from those of all heads",
    "mudd": "each token mixes the STREAMS into its values and its stream",
    "new_gates": "from here on, a new small net computes the gates for each token",
}
WORDS = launch.WORDS | {"value_table": "value table", "mudd": "MUDD"}  # of the marks
BLUE = "#8fbdea"
PALE_BLUE = "#d9e9f8"
DARK = "#1f4e79"
GREY = "#f2f2f2"
ORANGE = "#d9730d"
GREEN = "#2e8b57"
RED = "#c0392b"
PURPLE = "#7d3c98"
# All positions are in inches.
WIDTH = 8.0
PITCH = 0.57  # height of a layer with the gap above it
BOX = 0.44  # without the gap
LEFT = 1.2  # attention is from here
MIDDLE = 5.45  # to here, and the MLP from here
RIGHT = 6.3  # to here
X0 = 0.75  # where the line of x0 is
BIGRAM = 0.35  # where the line of the bigrams is
ENTRY = 0.08  # height in a layer, below its MLP, at which lines from the right enter
NOTES = 2.4  # height of the notes at the bottom


def stream_words(name: str) -> str:
    """A stream's name in words: "layer7" is "layer 7", "value0" is "value table 0"."""
    for prefix, words in ("layer", "layer"), ("value", "value table"):
        number = name.removeprefix(prefix)
        if number.isdigit():
            return f"{words} {number}"
    return name


def marks(layer: Layer) -> list[str]:
    """The marks of a layer in words, in the order of MARKS."""
    found = []
    for field in MARKS:
        value = getattr(layer, field)
        if field == "value_table" and value is not None:
            found.append(f"{WORDS[field]} {value}")
        elif value is True or field == "mudd" and value:
            found.append(WORDS[field])
    return found


def window_tokens(layer: Layer, c: Config) -> int:
    """How many tokens back a layer sees in the last stage."""
    stage = c.stages[-1]
    positions = stage.long if layer.window == LONG else stage.short
    return positions // 2 if layer.paired_heads else positions


def box(ax, x: float, y: float, right: float, height: float, color: str) -> None:
    """Draws a rounded box from (x, y) to (right, y + height)."""
    shape = "round,pad=0,rounding_size=0.07"
    ax.add_patch(FancyBboxPatch((x, y), right - x, height, shape, fc=color, ec="#555555", lw=0.8))


def arrow(ax, start: tuple, end: tuple, color: str = "black", name: str | None = None) -> None:
    """Draws an arrow; the SVG has it under this name."""
    style = dict(arrowstyle="-|>,head_width=0.12,head_length=0.25", color=color, lw=1.3,
                 shrinkA=0, shrinkB=0)  # fmt: skip
    ax.annotate("", end, start, arrowprops=style).arrow_patch.set_gid(name)


def reads_x0(layer: Layer) -> bool:
    """Whether the layer adds x0. A MUDD layer weighs "input" instead."""
    return bool(layer.x0 and not layer.mudd)


def reads_bigram(layer: Layer) -> bool:
    """Whether the layer adds the bigram embedding, as each MUDD layer does."""
    return bool(layer.bigram or layer.mudd)


def layer_bottom(i: int) -> float:
    """Where the box of layer i begins, in inches from the bottom."""
    return NOTES + 2.0 + PITCH * i


def draw_layer(ax, i: int, c: Config) -> None:
    """Draws layer i: attention, whose bar is as long as its window, then its MLPs."""
    layer = c.layers[i]
    y = layer_bottom(i)
    upper = y + 0.69 * BOX
    lower = y + 0.27 * BOX
    if layer.window:
        box(ax, LEFT, y, RIGHT, BOX, BLUE if layer.window == LONG else PALE_BLUE)
        tokens = window_tokens(layer, c)
        title = f"attention, {layer.window} window: {tokens:,} tokens"
        bar = 0.8 * tokens / max(window_tokens(other, c) for other in c.layers if other.window)
        ax.plot([MIDDLE - bar, MIDDLE], [upper] * 2, color=DARK, lw=4, solid_capstyle="butt")
    else:
        box(ax, LEFT, y, RIGHT, BOX, "white")
        title = "no attention"
    ax.text(LEFT + 0.1, upper, f"layer {i}", va="center", weight="bold")
    ax.text(LEFT + 0.72, upper, title, va="center")
    ax.text(LEFT + 0.1, lower, " · ".join(marks(layer)), va="center", fontsize=8.5)
    if layer.mlps:
        words = "MLP" if layer.mlps == 1 else f"{layer.mlps} MLPs"
        box(ax, MIDDLE + 0.1, y + 0.16, RIGHT - 0.06, 0.23, GREY)
        ax.text((MIDDLE + RIGHT) / 2 + 0.02, y + 0.275, words, ha="center", va="center")
    arrow(ax, (LEFT + 2, y + BOX), (LEFT + 2, y + PITCH), name=f"from layer {i}")
    if reads_x0(layer):
        arrow(ax, (X0, upper), (LEFT, upper), ORANGE, f"x0 to layer {i}")
    if reads_bigram(layer):
        arrow(ax, (BIGRAM, lower), (LEFT, lower), GREEN, f"bigram to layer {i}")


def draw_side(ax, source: int, readers: list[int], color: str, words: str) -> None:
    """Draws a line on the right, from a layer's output to where others begin: left of their MLP."""
    x = RIGHT + 0.35
    start = layer_bottom(source) + BOX - 0.08
    end = layer_bottom(readers[-1]) + ENTRY
    ax.plot([RIGHT, x, x], [start, start, end], color=color, lw=1.3, solid_joinstyle="round")
    for i in readers:
        y = layer_bottom(i) + ENTRY
        arrow(ax, (x, y), (MIDDLE + 0.06, y), color, f"layer {source} to layer {i}")
    ax.text(x + 0.08, (start + end) / 2, words, color=color, va="center", fontsize=8.5)


def draw_embeddings(ax, c: Config) -> None:
    """Draws the tokens, the two embeddings, and the lines that bring them to all layers."""
    y = NOTES + 0.15
    center = LEFT + 2
    ax.text(RIGHT - 0.5, y, "tokens", ha="center", weight="bold")
    box(ax, 0.2, y + 0.3, 5.2, 0.36, "#dff0e4")
    ax.text(0.35, y + 0.48, f"bigram: embedding of each pair of tokens, {c.bigrams:,} hashed rows",
            va="center")  # fmt: skip
    box(ax, X0 - 0.2, y + 0.85, RIGHT, 0.36, "#fbe6d0")
    ax.text(X0 - 0.05, y + 1.03, "x0: embedding of the token, plus a share of the one before, "
            "normalized", va="center")  # fmt: skip
    box(ax, LEFT, y + 1.39, RIGHT, 0.28, "white")
    ax.text(LEFT + 0.1, y + 1.53, "input: x0 + gate × bigram", va="center")
    arrow(ax, (RIGHT - 0.5, y + 0.16), (RIGHT - 0.5, y + 0.85))
    ax.plot([RIGHT - 0.5, 5.6], [y + 0.48] * 2, color="black", lw=1.3)
    arrow(ax, (5.6, y + 0.48), (5.2, y + 0.48))
    top = layer_bottom(len(c.layers) - 1) + BOX
    last_x0 = max(i for i, layer in enumerate(c.layers) if reads_x0(layer))
    last_bigram = max(i for i, layer in enumerate(c.layers) if reads_bigram(layer))
    ax.plot([X0] * 2, [y + 1.21, layer_bottom(last_x0) + 0.69 * BOX], color=ORANGE, lw=1.3)
    ax.plot([BIGRAM] * 2, [y + 0.66, layer_bottom(last_bigram) + 0.27 * BOX], color=GREEN, lw=1.3)
    arrow(ax, (X0, y + 1.6), (LEFT, y + 1.6), ORANGE)
    arrow(ax, (BIGRAM, y + 1.46), (LEFT, y + 1.46), GREEN)
    arrow(ax, (center, y + 1.67), (center, layer_bottom(0)))
    for x, words, color in (X0, "x0", ORANGE), (BIGRAM, "bigram", GREEN):
        ax.text(x, top + 0.05, words, color=color, ha="center", va="bottom", weight="bold")


def draw_head(ax, c: Config) -> float:
    """Draws what happens after the last layer, and returns the height of the top."""
    y = layer_bottom(len(c.layers))
    if c.mudd_head:
        names = ", ".join(stream_words(name) for name, _ in c.mudd_head)
        box(ax, LEFT, y, RIGHT, BOX, "#ecdff2")
        ax.text(LEFT + 0.1, y + 0.69 * BOX, "each token adds its own mix of", va="center")
        ax.text(LEFT + 0.1, y + 0.27 * BOX, names, va="center", fontsize=8.5)
        arrow(ax, (LEFT + 2, y + BOX), (LEFT + 2, y + PITCH))
        y += PITCH
    box(ax, LEFT, y, RIGHT, 0.36, GREY)
    ax.text(LEFT + 0.1, y + 0.18, f"head: {c.vocab:,} logits, bounded by a sigmoid", va="center")
    return y + 0.5


def draw_notes(ax, c: Config) -> None:
    """Draws the meaning of every mark that the model has."""
    last = c.stages[-1]
    first = c.stages[0]
    notes = {
        "layer": f"as in GPT-2, attention and MLP add to the stream; width {c.D}, {c.H} heads",
        "window": f"the dark bar; grows in training, from {first.short} and {first.long} to "
                  f"{last.short} and {last.long:,} positions",
        "MLP": "the activation is the square of ReLU",
    }  # fmt: skip
    used = [field for field in MARKS if any(getattr(layer, field) not in (None, False, ())
                                            for layer in c.layers)]  # fmt: skip
    notes |= {WORDS[field]: MARKS[field] for field in used}
    mixed = {stream_words(name): None for layer in c.layers for name in layer.mudd}
    notes = {word: text.replace("STREAMS", " and ".join(mixed)) for word, text in notes.items()}
    pitch = (NOTES - 0.1) / len(notes)
    for row, (words, meaning) in enumerate(notes.items()):
        y = NOTES - 0.15 - pitch * row
        ax.text(1.7, y, words, ha="right", va="center", weight="bold", fontsize=8.5)
        ax.text(1.85, y, meaning, va="center", fontsize=8.5)


def draw(out: Path, c: Config) -> None:
    """Draws the model of a Config as an SVG file. The same model makes the same bytes."""
    with plt.rc_context(STYLE):
        figure = plt.figure()
        ax = figure.add_axes((0, 0, 1, 1))
        draw_notes(ax, c)
        draw_embeddings(ax, c)
        for i, layer in enumerate(c.layers):
            draw_layer(ax, i, c)
            if layer.skip_from is not None:
                words = f"layer {i} begins by\nadding the output\nof layer {layer.skip_from}"
                draw_side(ax, layer.skip_from, [i], PURPLE, words)
        for source in sorted({layer.attend_to for layer in c.layers} - {None}):
            readers = [i for i, layer in enumerate(c.layers) if layer.attend_to == source]
            words = f"attention reads\nlayer {source} instead\nof the stream"
            draw_side(ax, source, readers, RED, words)
        height = draw_head(ax, c)
        figure.set_size_inches(WIDTH, height)
        ax.set(xlim=(0, WIDTH), ylim=(0, height))
        ax.axis("off")
        figure.savefig(out, metadata={"Date": None})
        plt.close(figure)


def main() -> None:
    """Draws the picture that the command line names."""
    cli = argparse.ArgumentParser(description=__doc__, allow_abbrev=False,
                                  formatter_class=argparse.RawDescriptionHelpFormatter)  # fmt: skip
    cli.add_argument("--out", type=Path, default=ROOT / "dev/pictures/model.svg")
    args = cli.parse_args()
    draw(args.out, train_gpt.PRESETS["record"])


if __name__ == "__main__":
    main()
