"""GPT-2 (basics/gpt2.py) and `tiny` on the same text: the table in basics/README.md, its picture.

    python records/other/basics/compare.py [--draw FILE.svg]

Reads the logs here and those of `tiny`'s record. README.md says how they were made.
"""

import argparse
import ast
import os
import re
import sys
from pathlib import Path
from statistics import fmean, stdev

HERE = Path(__file__).resolve().parent
RECORDS = HERE.parents[1]
sys.path.append(str(RECORDS))
import runs  # noqa: E402

RECORD = RECORDS / "tracks/tiny-2k/2026-11-25_n_grams_and_copies"
LENGTHS = ("brief", "short", "long")  # runs of gpt2.py: 92,160, 376,832 and 3,768,320 tokens
COLORS = {"brief": "C3", "short": "C0", "long": "C9"}
Curve = dict[int, float]  # tokens -> validation loss


def read(log: runs.ArchivedLog) -> tuple[dict, Curve]:
    """A log of gpt2.py: its flags, its curve."""
    text = log.read_bytes().decode()
    found = re.findall(r"^step:\d+/\d+ tokens:(\d+) val_loss:(\S+) ", text, re.M)
    flags = ast.literal_eval(re.search(r"^gpt2\.py (\{.*\})$", text, re.M)[1])
    return flags, {int(tokens): float(loss) for tokens, loss in found}


def tiny(folder: Path) -> list[Curve]:
    """Logs of train_gpt.py, a curve each."""
    curves = []
    for path in runs.log_files(folder):
        log = runs.read(path)
        tokens = log.tokens // log.validations[-1].step  # of a step
        curves.append({tokens * v.step: v.loss for v in log.validations})
    return curves


def crossing(curve: Curve, loss: float) -> float | None:
    """Tokens at which the curve first falls to this loss, between two validations by a line."""
    points = [*curve.items()]
    for (n, above), (m, below) in zip(points, points[1:], strict=False):
        if below <= loss:
            return n + (m - n) * (above - loss) / (above - below)
    return None


def logs(name: str) -> list[runs.ArchivedLog]:
    """The logs of gpt2.py whose names begin with this one."""
    return [log for log in runs.log_files(HERE) if log.name.startswith(f"{name}_")]


def searched(name: str) -> dict[float, list[float]]:
    """The last losses of a search by rate: "rate" after 376,832 tokens, "brief_rate" after
    92,160."""
    losses = {}
    for flags, curve in map(read, logs(name)):
        losses.setdefault(flags["lr"], []).append(list(curve.values())[-1])
    return dict(sorted(losses.items()))


def last(curves: list[Curve]) -> list[float]:
    """Their last losses."""
    return [list(curve.values())[-1] for curve in curves]


def spread(values: list[float], form: str = ".4f") -> str:
    """mean ± standard deviation (n = ..)"""
    return f"{fmean(values):{form}} ± {stdev(values):{form}} (n = {len(values)})"


def table() -> list[str]:
    """The rows of basics/README.md, and those of the search."""
    gpt2 = {name: [read(log)[1] for log in logs(f"{name}_seed")] for name in LENGTHS}
    ours = tiny(RECORD)
    early = tiny(HERE / "tiny")
    end = fmean(last(ours))
    losses = []
    tokens = []
    for name in LENGTHS:
        curves = gpt2[name]
        length = max(curves[0])
        level = fmean(last(curves))
        of_tiny = spread(last(ours)) if length == max(ours[0]) else ""
        losses.append(f"| loss after {length:,} tokens | {spread(last(curves))} | {of_tiny} |")
        needed = spread([crossing(curve, level) for curve in early], ",.0f")
        tokens.append(f"| tokens to {level:.4f} | {length:,} | {needed} |")
        assert not any(crossing(curve, end) for curve in curves)
    rates = []
    brief, short = searched("brief_rate"), searched("rate")
    for rate in short:
        cells = [", ".join(f"{loss:.4f}" for loss in of.get(rate, [])) for of in (brief, short)]
        rates.append(f"| {rate:g} | {cells[0]} | {cells[1]} |")
    return [
        "| | GPT-2, AdamW | `tiny` |",
        "|---|---|---|",
        *losses,
        *tokens,
        f"| tokens to {end:.4f} | more than {length:,} | {max(ours[0]):,} |",
        "",
        "| rate | after 92,160 tokens | after 376,832 |",
        "|---|---|---|",
        *rates,
    ]


def draw(path: str) -> None:
    """The picture in basics/README.md and in the main README. An arrow goes from the tokens at
    which GPT-2's short runs end to those at which `tiny` has the same loss."""
    os.environ.update(MPLBACKEND="agg", MATPLOTLIBRC=os.devnull)  # not a notebook's
    import matplotlib.pyplot as plt

    plt.style.use(["default", {"svg.hashsalt": "jNanoGPT", "font.size": 10}])
    figure, axes = plt.subplots(figsize=(7, 3.5), layout="constrained")
    axes.spines[["top", "right"]].set_visible(False)
    gpt2 = {name: [read(log)[1] for log in logs(f"{name}_seed")] for name in LENGTHS}
    early = tiny(HERE / "tiny")
    whole = tiny(RECORD)
    groups = [(COLORS[name], gpt2[name]) for name in LENGTHS] + [("C1", whole), ("C1", early)]
    for color, curves in groups:
        for curve in curves:
            points = [(n, loss) for n, loss in curve.items() if n]
            axes.plot(*zip(*points, strict=True), color=color, linewidth=1, alpha=0.8)
    for name in LENGTHS:
        level = fmean(last(gpt2[name]))
        tokens = max(gpt2[name][0])
        ours = fmean(crossing(curve, level) for curve in early)
        style = {"arrowstyle": "<-", "linewidth": 1.2, "shrinkA": 0, "shrinkB": 0}
        axes.annotate("", (tokens, level), (ours, level), arrowprops=style)
        text = f"{level:.2f}: {tokens / ours:.0f} times fewer"
        above = 0.05 if name != "short" else -0.2  # the other two arrows have their text above
        axes.text(1.3 * ours, level + above, text, size=9, weight="bold", color=COLORS[name])
    end = fmean(last(whole))
    axes.text(1.07 * max(whole[0]), end - 0.1, f"{end:.2f}", color="C1")
    axes.text(1.0e4, 1.6, "tiny", color="C1", weight="bold")
    axes.text(1.2e5, 3.2, "GPT-2 with AdamW, three lengths", color="C0", weight="bold")
    axes.set(xscale="log", xlabel="tokens trained on", ylabel="validation loss, nats per byte")
    figure.savefig(path, metadata={"Date": None})


if __name__ == "__main__":
    cli = argparse.ArgumentParser(description=__doc__)
    cli.add_argument("--draw", metavar="FILE.svg")
    args = cli.parse_args()
    if args.draw:
        draw(args.draw)
    print(*table(), sep="\n")
