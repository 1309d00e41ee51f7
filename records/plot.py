"""Curves of validation loss, from logs: see records/README.md. Needs matplotlib.

    ./run.sh plot [NAME=]FOLDER ... [--out curves] [--x steps tokens time] [--target LOSS]

Every folder makes one curve: the mean of its runs, in a band of one standard deviation to either
side. A log makes one, too, and the folder of a whole plan of ./run.sh compare makes one for each
variant. Writes OUT.svg.
"""

import argparse
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
LABELS = dict(steps="training steps", tokens="training tokens, millions",
              time="training time, seconds")  # fmt: skip
STYLE = {
    "figure.dpi": 130, "savefig.dpi": 130, "font.size": 9, "axes.grid": True, "grid.alpha": 0.25,
    "axes.spines.top": False, "axes.spines.right": False, "axes.axisbelow": True,
    "svg.hashsalt": "jNanoGPT", "svg.fonttype": "path", "legend.frameon": False,
}  # fmt: skip


class Curve(NamedTuple):
    """Losses of a set of runs, at every step for which all of them have one."""

    name: str
    x: dict[str, list[float]]  # by unit, which is a key of LABELS
    mean: list[float]
    sd: list[float]


def curve(name: str, evidence: verify.Evidence) -> Curve:
    """Returns the curve of a folder's complete runs."""
    runs = evidence.ended
    if not runs:
        refuse(f"{evidence.folder} has no complete run")
    of_runs = [{v.step: v for v in run.validations} for run in runs]
    steps = sorted(set.intersection(*map(set, of_runs)))
    points = [[by_step[step] for by_step in of_runs] for step in steps]
    losses = [[v.loss for v in of_step] for of_step in points]
    means = [fmean(of_step) for of_step in losses]
    deviations = [stdev(of_step) if len(runs) > 1 else 0.0 for of_step in losses]
    times = [fmean(v.ms for v in of_step) / 1000 for of_step in points]
    tokens = [step * runs[0].tokens / runs[0].steps / 1e6 for step in steps]
    x = dict(steps=steps, time=times, tokens=tokens)
    return Curve(f"{name} (n = {len(runs)})", x, means, deviations)


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


def draw_curves(axes, curves: list[Curve], unit: str, target: float | None) -> None:
    """Draws the later part of training, where curves differ: the y axis ends at the highest of the
    losses after a third of the validations."""
    colors = plt.get_cmap("tab20").colors
    lowest = []
    highest = []
    for i, c in enumerate(curves):
        color = colors[2 * i % 19]  # the strong colors first
        axes.plot(c.x[unit], c.mean, ".-", color=color, label=c.name, lw=1.4, ms=4)
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
    axes.set_ylabel("validation loss, nats per token")
    axes.legend(fontsize=8, loc="upper right")


def plot(variants: list[tuple[str, verify.Evidence]], out: Path, units: list[str],
         target: float | None, title: str = "") -> None:  # fmt: skip
    """Draws OUT.svg: a panel for each unit of the x axis."""
    curves = [curve(name, evidence) for name, evidence in variants]
    with plt.rc_context(STYLE):
        figure, axes = plt.subplots(1, len(units), figsize=(5.6 * len(units), 4.4), squeeze=False,
                                    layout="constrained")  # fmt: skip
        for i, unit in enumerate(units):
            draw_curves(axes[0, i], curves, unit, target)
        figure.suptitle(title)
        save(figure, out)


def save(figure, out: Path) -> None:
    """Writes OUT.svg. The same picture makes the same bytes."""
    figure.savefig(out.with_name(f"{out.name}.svg"), metadata={"Date": None})
    plt.close(figure)


def read_variants(argument: str) -> Iterator[tuple[str, verify.Evidence]]:
    """Yields the name and the runs of what [NAME=]FOLDER names: of every variant, if that is the
    folder of a whole plan."""
    name, _, path = argument.rpartition("=")
    folder = Path(path)
    if not folder.exists():
        refuse(f"{argument!r} names no folder and no log")
    if not folder.is_dir() or not verify.is_plan(folder):
        yield name or folder.resolve().name.removesuffix(".txt"), verify.collect(folder)
        return
    for variant, evidence in verify.variants_of(folder).items():
        yield f"{name} {variant}".strip(), evidence


def main(argv: list[str]) -> None:
    """Draws the curves of the folders that the command line names."""
    form = argparse.RawDescriptionHelpFormatter
    cli = argparse.ArgumentParser(prog="./run.sh plot", description=__doc__, formatter_class=form)
    cli.error = refuse
    cli.add_argument("folders", nargs="+", metavar="[NAME=]FOLDER")
    cli.add_argument("--out", type=Path, default=Path("curves"), help="picture, without .svg")
    cli.add_argument("--x", nargs="+", choices=LABELS, default=["steps"], help="a panel for each")
    cli.add_argument("--target", type=float, help="loss at which to draw a line")
    args = cli.parse_args(argv)
    variants = [variant for argument in args.folders for variant in read_variants(argument)]
    plot(variants, args.out, args.x, args.target)
    print(f"drew {', '.join(name for name, _ in variants)} in {args.out}.svg")
    for name, evidence in variants:
        broken = [f"{run.name}: {run.ended}" for run in evidence.runs if not run.complete]
        for reason in broken + evidence.unreadable:
            print(f"left out of {name}: {reason}")


if __name__ == "__main__":
    with one_line("plot.py"):
        main(sys.argv[1:])
