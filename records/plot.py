"""Curves of validation loss, from logs, for records/pack.py. Needs matplotlib.

Every set of runs makes one curve: the mean, in a band of one standard deviation to either side.
"""

import math
import os
import sys
from pathlib import Path
from statistics import fmean, stdev
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parent))  # for PYTHONSAFEPATH=1
import verify
from runs import Validation

# A notebook's backend cannot be imported here, and a user's settings would change the picture.
os.environ.update(MPLBACKEND="agg", MATPLOTLIBRC=os.devnull)
import matplotlib.pyplot as plt  # noqa: E402

plt.style.use("default")  # without the settings in a file matplotlibrc of the current folder
STYLE = {
    "figure.dpi": 130, "savefig.dpi": 130, "font.size": 9, "axes.grid": True, "grid.alpha": 0.25,
    "axes.spines.top": False, "axes.spines.right": False, "axes.axisbelow": True,
    "svg.hashsalt": "jNanoGPT", "svg.fonttype": "path", "legend.frameon": False,
}  # fmt: skip


class Curve(NamedTuple):
    """Losses of a set of runs, at every step for which all of them have one."""

    name: str
    steps: list[int]
    mean: list[float]
    sd: list[float]


def curve(name: str, evidence: verify.Evidence) -> Curve:
    """Returns the curve of a folder's complete runs."""
    runs = evidence.ended
    of_runs = [{v.step: v for v in run.validations} for run in runs]
    steps = sorted(set.intersection(*map(set, of_runs)))
    points = [[by_step[step] for by_step in of_runs] for step in steps]
    losses = [[v.loss for v in of_step] for of_step in points]
    means = [fmean(of_step) for of_step in losses]
    deviations = [stdev(of_step) if len(runs) > 1 else 0.0 for of_step in losses]
    return Curve(f"{name} (n = {len(runs)})", steps, means, deviations)


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


def draw_curves(axes, curves: list[Curve], target: float | None) -> None:
    """Draws the later part of training, where curves differ: the y axis ends at the highest of the
    losses after a third of the validations."""
    colors = plt.get_cmap("tab20").colors
    lowest = []
    highest = []
    for i, c in enumerate(curves):
        color = colors[2 * i % 19]  # the strong colors first
        axes.plot(c.steps, c.mean, ".-", color=color, label=c.name, lw=1.4, ms=4)
        low = [mean - sd for mean, sd in zip(c.mean, c.sd, strict=True)]
        high = [mean + sd for mean, sd in zip(c.mean, c.sd, strict=True)]
        axes.fill_between(c.steps, low, high, color=color, alpha=0.18, linewidth=0)
        lowest.append(min(low))
        highest.append(max(c.mean[len(c.mean) // 3 :]))
    if target:
        axes.axhline(target, color="black", lw=0.9, ls=":", label=f"target {target:g}")
        lowest.append(target)
    room = 0.06 * (max(highest) - min(lowest)) or 0.1  # one point has no height
    axes.set_ylim(min(lowest) - room, max(highest) + room)
    axes.set_xlim(left=0)
    axes.set_xlabel("training steps")
    axes.set_ylabel("validation loss, nats per token")
    axes.legend(fontsize=8, loc="upper right")


def plot(variants: list[tuple[str, verify.Evidence]], out: Path, target: float | None) -> None:
    """Draws the picture OUT. The same logs make the same bytes."""
    with plt.rc_context(STYLE):
        figure, axes = plt.subplots(figsize=(5.6, 4.4), layout="constrained")
        draw_curves(axes, [curve(name, evidence) for name, evidence in variants], target)
        figure.savefig(out, metadata={"Date": None})
        plt.close(figure)
