"""GPT-2 (basics/gpt2.py) and `tiny` on the same text: the table in basics/README.md, its picture.

    python records/other/basics/compare.py [--draw FILE.svg]

Reads the logs here and those of `tiny`'s record. README.md says how they were made.
"""

import argparse
import ast
import re
import sys
from pathlib import Path
from statistics import fmean, stdev

HERE = Path(__file__).resolve().parent
RECORDS = HERE.parents[1]
sys.path.append(str(RECORDS))
import runs  # noqa: E402

RECORD = RECORDS / "tracks/tiny-2k/2026-11-22_keys_begin_as_queries"
Curve = dict[int, float]  # tokens -> validation loss


def read(log: runs.ArchivedLog) -> tuple[dict, Curve]:
    """A log of gpt2.py: its flags, its curve."""
    text = log.read_text(encoding="utf-8")
    found = re.findall(r"^step:\d+/\d+ tokens:(\d+) val_loss:(\S+) ", text, re.M)
    flags = ast.literal_eval(re.search(r"^gpt2\.py (\{.*\})$", text, re.M)[1])
    return flags, {int(tokens): float(loss) for tokens, loss in found}


def tiny(folder: Path) -> list[Curve]:
    """Logs of train_gpt.py, a curve each; a step of tiny's has 1,024 tokens."""
    logs = [runs.read(log) for log in runs.log_files(folder)]
    return [{1024 * v.step: v.loss for v in log.validations} for log in logs]


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


def searched() -> dict[float, list[float]]:
    """Of each rate the last losses of the search."""
    losses = {}
    for flags, curve in map(read, logs("rate")):
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
    short = [read(log)[1] for log in logs("short")]
    long = [read(log)[1] for log in logs("long")]
    ours, early = tiny(RECORD), tiny(HERE / "tiny")
    level, later, end = (fmean(last(curves)) for curves in (short, long, ours))
    tokens, more = (max(curve) for curve in (short[0], long[0]))
    assert not any(crossing(curve, end) for curve in long)
    to_level = [crossing(curve, level) for curve in early]
    to_later = [crossing(curve, later) for curve in ours]
    return [
        "| | GPT-2, AdamW | `tiny` |",
        "|---|---|---|",
        f"| loss after {tokens:,} tokens | {spread(last(short))} | {spread(last(ours))} |",
        f"| loss after {more:,} tokens | {spread(last(long))} | |",
        f"| tokens to {level:.4f} | {tokens:,} | {spread(to_level, ',.0f')} |",
        f"| tokens to {later:.4f} | {more:,} | {spread(to_later, ',.0f')} |",
        f"| tokens to {end:.4f} | more than {more:,} | {tokens:,} |",
        "",
        "| rate | last losses, by seed |",
        "|---|---|",
        *(f"| {rate:g} | {', '.join(map('{:.4f}'.format, losses))} |"
          for rate, losses in searched().items()),
    ]  # fmt: skip


def draw(path: str) -> None:
    """The picture in basics/README.md and in the main README. An arrow goes from the tokens at
    which GPT-2's short runs end to those at which `tiny` has the same loss."""
    import matplotlib.pyplot as plt

    plt.rcParams.update({"svg.hashsalt": "jNanoGPT", "font.size": 10})
    figure, axes = plt.subplots(figsize=(7, 3.5), layout="constrained")
    axes.spines[["top", "right"]].set_visible(False)
    short = [read(log)[1] for log in logs("short")]
    long = [read(log)[1] for log in logs("long")]
    early = tiny(HERE / "tiny")
    whole = tiny(RECORD)
    for color, curves in ("C0", short), ("C9", long), ("C1", whole), ("C1", early):
        for curve in curves:
            points = [(n, loss) for n, loss in curve.items() if n]
            axes.plot(*zip(*points, strict=True), color=color, linewidth=1, alpha=0.8)
    # The early runs end before the first validation of the whole ones.
    early_end = max(early[0])
    whole_start = min(n for n in whole[0] if n > early_end)
    gap = [fmean(last(early)), fmean(curve[whole_start] for curve in whole)]
    axes.plot([early_end, whole_start], gap, color="C1", linewidth=1, linestyle=":")
    level = fmean(last(short))
    tokens = max(short[0])
    ours = fmean(crossing(curve, level) for curve in early)
    style = {"arrowstyle": "<-", "linewidth": 1.5, "shrinkA": 0, "shrinkB": 0}
    axes.annotate("", (tokens, level), (ours, level), arrowprops=style)
    text = f"{tokens / ours:.1f} times fewer tokens"
    axes.text(tokens, level - 0.2, text, ha="right", weight="bold")
    for color, curves in ("C0", short), ("C9", long), ("C1", whole):
        end = max(curves[0])
        axes.text(1.07 * end, fmean(last(curves)) - 0.1, f"{fmean(last(curves)):.2f}", color=color)
    axes.text(1.3e5, 3.05, "GPT-2 with AdamW", color="C0", weight="bold")
    axes.text(9e5, 2.75, "the same, ten times longer", color="C9", weight="bold")
    axes.text(1.3e5, 1.95, "tiny", color="C1", weight="bold")
    axes.set(xscale="log", xlabel="tokens trained on", ylabel="validation loss, nats per byte")
    figure.savefig(path, metadata={"Date": None})


if __name__ == "__main__":
    cli = argparse.ArgumentParser(description=__doc__)
    cli.formatter_class = argparse.RawDescriptionHelpFormatter
    cli.add_argument("--draw", metavar="FILE.svg")
    args = cli.parse_args()
    print(*table(), sep="\n")
    if args.draw:
        draw(args.draw)
