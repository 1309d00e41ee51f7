"""Curves of validation loss, from logs, for records/pack.py. Needs matplotlib."""

import math
import os
import sys
from pathlib import Path
from statistics import fmean

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


def plot(variants: list[tuple[str, verify.Evidence]], out: Path, target: float | None) -> None:
    """Draws the picture OUT: a line for every run, in the color of its variant, for the later part
    of training, where they differ. The same logs make the same bytes."""
    with plt.rc_context(STYLE):
        figure, axes = plt.subplots(figsize=(5.6, 4.4), layout="constrained")
        later = []
        for i, (name, evidence) in enumerate(variants):
            axes.plot([], [], color=f"C{i}", label=f"{name} (n = {len(evidence.ended)})")
            for run in evidence.ended:
                steps = [v.step for v in run.validations]
                losses = [v.loss for v in run.validations]
                axes.plot(steps, losses, ".-", color=f"C{i}", lw=0.8, ms=3)
                later += losses[len(losses) // 3 :]
        if target:
            axes.axhline(target, color="black", lw=0.9, ls=":", label=f"target {target:g}")
            later.append(target)
        room = 0.06 * (max(later) - min(later)) or 0.1  # one point has no height
        axes.set_ylim(min(later) - room, max(later) + room)
        axes.set_xlabel("training steps")
        axes.set_ylabel("validation loss, nats per token")
        axes.legend(fontsize=8, loc="upper right")
        figure.savefig(out, metadata={"Date": None})
        plt.close(figure)
