"""Curves of validation loss, from logs: see records/README.md. Needs matplotlib.

    ./run.sh plot [NAME=]FOLDER ... [--out curves] [--x steps tokens time] [--target LOSS]
                  [--title TEXT] [--upstream] [--differences]

Every folder makes one curve: the mean of its runs, in a band of one standard deviation to either
side. A log makes one, too, and the folder of a whole plan of ./run.sh compare makes one for each
variant. --upstream adds the curve of modded-nanogpt's record 21. --differences adds a panel of the
final losses minus those of the first folder, for every seed that both have run, and their mean;
beside it, curves of fewer than 4 points are left out, because they do not show a shape. Writes
OUT.svg.
"""

import argparse
import csv
import math
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from statistics import fmean, stdev
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parent))  # for PYTHONSAFEPATH=1
import verify
from messages import one_line, refuse
from runs import Validation

# A notebook's backend cannot be imported here, and a user's settings would change the picture.
os.environ.update(MPLBACKEND="agg", MATPLOTLIBRC=os.devnull)
import matplotlib.pyplot as plt  # noqa: E402

plt.style.use("default")  # without the settings in a file matplotlibrc of the current folder
# Losses of record 21 are means of nine runs, of it and of scripts like it; times are of one run.
UPSTREAM = Path(__file__).parent / "other/upstream_record21.csv"
FEWEST_POINTS = 4  # of a curve that is worth a panel beside the differences
LABELS = dict(steps="training steps", tokens="training tokens, millions",
              time="training time, seconds")  # fmt: skip
BYTES = 257  # the size of the vocabulary in which a token is a byte: 256 and the end of text
STYLE = {
    "figure.dpi": 130, "savefig.dpi": 130, "font.size": 9, "axes.grid": True, "grid.alpha": 0.25,
    "axes.spines.top": False, "axes.spines.right": False, "axes.axisbelow": True,
    "svg.hashsalt": "jNanoGPT", "svg.fonttype": "path", "legend.frameon": False,
}  # fmt: skip


def plain(name: str) -> str:
    """A name as matplotlib shows it without change: it would take $ for the start of a formula."""
    return name.replace("$", r"\$")


class Curve(NamedTuple):
    """Losses of a set of runs, at every step for which all of them have one."""

    name: str
    x: dict[str, list[float]]  # by unit, which is a key of LABELS
    mean: list[float]
    sd: list[float]
    per: str = "token"  # or "byte": losses are in nats per token or per byte


def curve(name: str, evidence: verify.Evidence) -> Curve:
    """Returns the curve of a folder's complete runs."""
    runs = evidence.ended
    if not runs:
        refuse(f"{evidence.folder} has no complete run")
    of_runs = [{v.step: v for v in run.validations} for run in runs]
    steps = sorted(set.intersection(*map(set, of_runs)))
    means = []
    deviations = []
    times = []
    for step in steps:
        points = [by_step[step] for by_step in of_runs]
        losses = [v.loss for v in points]
        means.append(fmean(losses))
        deviations.append(stdev(losses) if len(losses) > 1 else 0.0)
        times.append(fmean(v.ms for v in points) / 1000)
    x = dict(steps=steps, time=times)
    if runs[0].tokens:
        x["tokens"] = [step * runs[0].tokens / runs[0].steps / 1e6 for step in steps]
    vocab = (runs[0].config or {}).get("vocab")
    per = "byte" if vocab == BYTES else "token"
    return Curve(f"{name} (n = {len(runs)})", x, means, deviations, per)


def drawable(losses: list[Validation]) -> list[Validation]:
    """Returns the losses that have a place on a logarithmic axis."""
    return [v for v in losses if 0 < v.loss < math.inf]


def smooth(losses: list[float]) -> list[float]:
    """Returns for every batch the mean of it, the 3 logged batches before and the 3 after it. Near
    the first batch, where the loss falls fast, it takes as many after it as there are before it."""
    means = []
    for i in range(len(losses)):
        reach = min(3, i)
        means.append(fmean(losses[i - reach : i + reach + 1]))
    return means


def upstream() -> Curve:
    """Returns the curve of modded-nanogpt's record 21."""
    with UPSTREAM.open() as file:
        rows = [{key: float(value) for key, value in line.items()} for line in csv.DictReader(file)]
    x = dict(
        steps=[row["step"] for row in rows],
        tokens=[row["tokens"] / 1e6 for row in rows],
        time=[row["seconds"] for row in rows],
    )
    name = "modded-nanogpt, record 21 (n = 9)"
    return Curve(name, x, [row["mean"] for row in rows], [row["sd"] for row in rows])


def draw_curves(axes, curves: list[Curve], unit: str, target: float | None) -> None:
    """Draws the later part of training, where curves differ: the y axis ends at the highest of the
    losses after a third of the validations."""
    colors = plt.get_cmap("tab20").colors
    lowest = []
    highest = []
    for i, c in enumerate(curves):
        color = colors[2 * i % 19]  # the strong colors first
        axes.plot(c.x[unit], c.mean, ".-", color=color, label=plain(c.name), lw=1.4, ms=4)
        low = [mean - sd for mean, sd in zip(c.mean, c.sd, strict=True)]
        high = [mean + sd for mean, sd in zip(c.mean, c.sd, strict=True)]
        axes.fill_between(c.x[unit], low, high, color=color, alpha=0.18, linewidth=0)
        lowest.append(min(low))
        highest.append(max(c.mean[len(c.mean) // 3 :]))
    if target:
        axes.axhline(target, color="black", lw=0.9, ls=":", label=f"target {target:g}")
        lowest.append(target)
    room = 0.06 * (max(highest) - min(lowest)) or 0.1  # one point has no height
    axes.set_ylim(min(lowest) - room, max(highest) + room)
    axes.set_xlim(left=0)
    axes.set_xlabel(LABELS[unit])
    axes.set_ylabel(f"validation loss, nats per {curves[0].per}")
    axes.legend(fontsize=8, loc="upper right")


def draw_differences(axes, variants: list[tuple[str, verify.Evidence]], per: str) -> None:
    """Draws a row for each variant, sorted by the mean: the difference for every seed, and their
    mean."""
    first_name, first = variants[0]
    rows = []
    for name, variant in variants[1:]:
        changes = verify.changes(variant, first)
        if not changes:
            refuse(f"{name} has no seed in common with {first_name}")
        rows.append((fmean(changes), changes, plain(name)))
    rows.sort()
    for y, (mean, changes, _) in enumerate(rows):
        axes.text(1.02, y, f"{mean:+.4f}", transform=axes.get_yaxis_transform(), va="center")
        axes.plot(changes, [y] * len(changes), "o", color="tab:blue", alpha=0.45, ms=5)
        axes.plot(mean, y, "D", color="black", ms=4)
    axes.axvline(0, color="black", linewidth=0.9)
    axes.set_yticks(range(len(rows)), [name for _, _, name in rows])
    axes.set_ylim(-0.6, len(rows) - 0.4)
    axes.set_xlabel(f"final validation loss minus that of {plain(first_name)}, nats per {per}")
    axes.grid(axis="y", visible=False)


def plot(
    variants: list[tuple[str, verify.Evidence]], out: Path, units: list[str],
    target: float | None, title: str = "", with_upstream: bool = False, differences: bool = False,
) -> None:  # fmt: skip
    """Draws OUT.svg: a panel for each unit of the x axis, and one of the differences if wanted."""
    curves = [curve(name, evidence) for name, evidence in variants]
    if with_upstream:
        curves.append(upstream())
    if differences and max(len(c.mean) for c in curves) < FEWEST_POINTS:
        units = []
    for c in curves:
        if c.per != curves[0].per:
            refuse(f"{curves[0].name} is in nats per {curves[0].per}, and {c.name} per {c.per}")
        for unit in units:
            if unit not in c.x:
                refuse(f"{c.name} has no curve over {unit}, which its logs do not state")
    panels = len(units) + (1 if differences else 0)
    with plt.rc_context(STYLE):
        height = max(4.4, 1 + 0.12 * len(variants))  # so that rows of differences have room
        figure, axes = plt.subplots(1, panels, figsize=(5.6 * panels, height), squeeze=False,
                                    layout="constrained")  # fmt: skip
        for i, unit in enumerate(units):
            draw_curves(axes[0, i], curves, unit, target)
        if differences:
            draw_differences(axes[0, -1], variants, curves[0].per)
        figure.suptitle(plain(title))
        save(figure, out)


def save(figure, out: Path) -> None:
    """Writes OUT.svg. The same picture makes the same bytes."""
    figure.savefig(out.with_name(f"{out.name}.svg"), metadata={"Date": None})
    plt.close(figure)


def read_variants(argument: str) -> Iterator[tuple[str, verify.Evidence]]:
    """Yields the name and the runs of what [NAME=]FOLDER names: of every variant, if that is the
    folder of a whole plan."""
    name, _, path = argument.rpartition("=")
    if Path(argument).exists():  # a path may have a =
        name, path = "", argument
    folder = Path(path)
    if not folder.exists():
        refuse(f"{argument!r} names no folder and no log")
    if not folder.is_dir() or not verify.is_plan(folder):
        yield name or folder.resolve().name.removesuffix(".txt"), verify.collect(folder)
        return
    for variant in verify.read_plan_file(folder / "plan.json")["arms"]:
        yield f"{name} {variant}".strip(), verify.collect(folder / variant)


def main(argv: list[str]) -> None:
    """Draws the curves of the folders that the command line names."""
    form = argparse.RawDescriptionHelpFormatter
    cli = argparse.ArgumentParser(prog="./run.sh plot", description=__doc__, formatter_class=form)
    cli.error = refuse
    cli.add_argument("folders", nargs="+", metavar="[NAME=]FOLDER")
    cli.add_argument("--out", type=Path, default=Path("curves"), help="picture, without .svg")
    cli.add_argument("--x", nargs="+", choices=LABELS, default=["steps"], help="a panel for each")
    cli.add_argument("--target", type=float, help="loss at which to draw a line")
    cli.add_argument("--title", default="")
    cli.add_argument("--upstream", action="store_true")
    cli.add_argument("--differences", action="store_true")
    args = cli.parse_args(argv)
    variants = [variant for argument in args.folders for variant in read_variants(argument)]
    plot(variants, args.out, args.x, args.target, args.title, args.upstream, args.differences)
    print(f"drew {', '.join(name for name, _ in variants)} in {args.out}.svg")
    for name, evidence in variants:
        broken = [f"{run.name}: {run.ended}" for run in evidence.runs if not run.complete]
        for reason in broken + evidence.unreadable:
            print(f"left out of {name}: {reason}")


if __name__ == "__main__":
    with one_line("plot.py"):
        main(sys.argv[1:])
