"""Curves of validation loss, for records/pack.py and evals/look.py. Needs matplotlib."""

import math
import os
from pathlib import Path
from typing import IO

from runs import Run

os.environ["MPLBACKEND"] = "agg"  # a notebook's cannot be imported here
import matplotlib.pyplot as plt  # noqa: E402

STYLE = {
    "figure.dpi": 130, "savefig.dpi": 130, "font.size": 9, "axes.grid": True, "grid.alpha": 0.25,
    "axes.spines.top": False, "axes.spines.right": False, "axes.axisbelow": True,
    "svg.hashsalt": "jNanoGPT", "svg.fonttype": "path", "legend.frameon": False,
}  # fmt: skip


def plot(variants: dict[str, list[Run]], out: Path | IO, target: float | None) -> None:
    """Draws OUT as SVG: a line for every run, in the color of its variant, for the later part of
    training, where they differ. The same logs make the same bytes."""
    with plt.rc_context(STYLE):
        figure, axes = plt.subplots(figsize=(5.6, 4.4), layout="constrained")
        later = []
        for i, (name, runs) in enumerate(variants.items()):
            axes.plot([], [], color=f"C{i}", label=f"{name} (n = {len(runs)})")
            for run in runs:
                steps = [v.step for v in run.validations]
                losses = [v.loss for v in run.validations]
                axes.plot(steps, losses, ".-", color=f"C{i}", lw=0.8, ms=3)
                later += [loss for loss in losses[len(losses) // 3 :] if math.isfinite(loss)]
        if target:
            axes.axhline(target, color="black", lw=0.9, ls=":", label=f"target {target:g}")
            later.append(target)
        room = 0.06 * (max(later) - min(later)) or 0.1  # one point has no height
        axes.set_ylim(min(later) - room, max(later) + room)
        axes.set_xlabel("training steps")
        axes.set_ylabel("validation loss, nats per token")
        axes.legend(fontsize=8, loc="upper right")
        figure.savefig(out, format="svg", metadata={"Date": None})
        plt.close(figure)
