"""Makes the board and its picture from the packed runs, and compares them with upstream's results.

    python records/optimizers/board.py

It prints the table and the correlation for README.md, and draws upstream.svg. A contestant that was
packed several times has the row of its newest runs.
"""

import json
import math
import sys
from pathlib import Path
from statistics import fmean, stdev
from typing import NamedTuple

import numpy as np

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))
import plot  # noqa: E402
import runs  # noqa: E402
import stats  # noqa: E402
import verify  # noqa: E402
from optimizers import tune  # noqa: E402

TRACK = "optimizers-tiny"
# Steps to 3.28 and number of runs by June 2026: modded-nanogpt, records/track_3_optimization.
UPSTREAM = {
    "spectral": (8225, 4),
    "adamw": (5625, 1),
    "adamh": (4875, 5),
    "shampoo": (4100, 4),
    "psgd_h": (3375, 5),
    "muonh": (3325, 10),
    "muon_squared": (3325, 1),
    "muon": (3250, 10),
    "normuon": (3250, 20),
    "pmuon": (3225, 9),
    "dynmuon": (3175, 25),
    "ema_nesterov": (3125, 20),
    "soap_h": (3125, 6),
    "kl_soap_h": (3125, 6),
    "muown": (3075, 30),
}
COMMON = 1.80  # the mean loss for which all steps were chosen
PERMUTATIONS = 100_000


class Row(NamedTuple):
    """A contestant's runs on tiny."""

    steps: int  # of every run
    name: str
    losses: list[float]
    numbers: dict[str, float]  # of the optimizer
    began: str  # when the first run began


def read_rows() -> list[Row]:
    """Returns the rows of the board, the fewest steps first. Variants without a file here, as those
    with flags, have none."""
    rows = {}
    for plan in HERE.parent.glob(f"tracks/{TRACK}/*/plan.json"):
        for name in json.loads(plan.read_text("utf-8"))["arms"]:
            if not (HERE / f"{name}.py").is_file():
                continue
            found = [runs.read(log) for log in runs.log_files(plan.parent / name)]
            losses = [run.loss for run in found]
            began = min(run.began for run in found)
            row = Row(found[0].steps, name, losses, found[0].config["numbers"], began)
            rows[name] = max(row, rows.get(name, row), key=lambda row: row.began)
    return sorted(rows.values())


def comparable_steps(row: Row) -> float:
    """Returns the steps at which the mean would be COMMON, if it falls by tune.SLOPE when the steps
    grow by a factor e: some rows have more steps than they need."""
    return row.steps * math.exp((fmean(row.losses) - COMMON) / tune.SLOPE)


def spearman(a: list[float], b: list[float]) -> tuple[float, float]:
    """Returns the rank correlation of pairs, and how often random pairs have one that is at least
    as large (one-sided permutation test)."""
    ranks_a = ranks(a)
    ranks_b = ranks(b)
    rho = np.corrcoef(ranks_a, ranks_b)[0, 1]
    shuffled = np.random.default_rng(0).permuted(np.tile(ranks_b, (PERMUTATIONS, 1)), axis=1)
    centered = ranks_a - ranks_a.mean()
    as_large = shuffled @ centered >= ranks_b @ centered - 1e-9
    return float(rho), (1 + int(as_large.sum())) / (1 + PERMUTATIONS)


def ranks(values: list[float]) -> np.ndarray:
    """Returns the rank of every value, from 1; equal values share their mean rank."""
    values = np.array(values)
    below = (values[:, None] > values).sum(axis=1)
    equal = (values[:, None] == values).sum(axis=1)
    return below + (equal + 1) / 2


def board(rows: list[Row]) -> str:
    """Returns the table. A star is at those whose rate is at the end of its grid."""
    cells = []
    for row in rows:
        p = stats.below(row.losses, verify.TRACKS[TRACK].target).p
        rates = tune.grid(row.name)["lr"]
        star = "*" if row.numbers["lr"] in (rates[0], rates[-1]) else ""
        link = f"[{row.name}]({row.name}.py){star}"
        loss = f"{fmean(row.losses):.4f} ± {stdev(row.losses):.4f}"
        same = f"{comparable_steps(row):.0f}"
        upstream = "{} ({})".format(*UPSTREAM[row.name]) if row.name in UPSTREAM else ""
        cells.append([link, row.steps, loss, verify.p_value(p), same, upstream])
    title = ["optimizer", "steps", "final loss", "p", f"for {COMMON:.2f}", "upstream's steps (n)"]
    return "\n".join(verify.table(title, cells))


def correlation(rows: list[Row]) -> str:
    """Returns a sentence with the rank correlation of our steps and upstream's."""
    both = [row for row in rows if row.name in UPSTREAM]
    ours = [comparable_steps(row) for row in both]
    rho, p = spearman(ours, [UPSTREAM[row.name][0] for row in both])
    return (
        f"Spearman's ρ = {rho:.2f} over {len(both)} optimizers (one-sided permutation p = {p:.2g})."
    )


def draw(rows: list[Row]) -> None:
    """Draws our comparable steps against upstream's, with names, to upstream.svg."""
    with plot.plt.rc_context(plot.STYLE):
        figure, axes = plot.plt.subplots(figsize=(7, 5.2), layout="constrained")
        highest = {"left": 0.0, "right": 0.0}  # name on either side so far
        for y, row in sorted((comparable_steps(row), row) for row in rows):
            x, _ = UPSTREAM.get(row.name, (None, 0))
            if x is None:
                continue
            axes.plot(x, y, "o", color="tab:blue", markersize=5)
            side = "right" if x < 3200 else "left"
            highest[side] = max(y, 1.03 * highest[side])  # names of near points are moved apart
            place = (x * (0.98 if side == "right" else 1.02), highest[side])
            axes.annotate(row.name, place, ha=side, va="center", fontsize=8)
        axes.set(xscale="log", yscale="log", xlim=(2500, 9800))
        axes.set_xticks([3000, 4000, 6000, 8000], ["3,000", "4,000", "6,000", "8,000"])
        axes.set_yticks([1000, 1500, 2000, 3000], ["1,000", "1,500", "2,000", "3,000"])
        axes.minorticks_off()
        axes.set_xlabel("upstream's steps to 3.28 on FineWeb, 124 million parameters")
        axes.set_ylabel(f"our steps on tiny, for a mean loss of {COMMON:.2f}")
        plot.save(figure, HERE / "upstream")


if __name__ == "__main__":
    print(board(read_rows()))
    print(correlation(read_rows()))
    draw(read_rows())
