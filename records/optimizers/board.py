"""Prints the board for README.md: what the packed runs of the track optimizers-tiny show."""

import json
import math
import sys
from pathlib import Path
from statistics import fmean, stdev
from typing import NamedTuple

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))
import runs  # noqa: E402
import stats  # noqa: E402
import verify  # noqa: E402
from optimizers import contest  # noqa: E402

TRACK = "optimizers-tiny"
# Steps to 3.28 by June 2026: modded-nanogpt, records/track_3_optimization.
UPSTREAM = {
    "spectral": 8225,
    "adamw": 5625,
    "adamh": 4875,
    "shampoo": 4100,
    "psgd_h": 3375,
    "muonh": 3325,
    "muon_squared": 3325,
    "muon": 3250,
    "normuon": 3250,
    "dynmuon": 3175,
    "ema_nesterov": 3125,
    "soap_h": 3125,
    "kl_soap_h": 3125,
}
COMMON = 1.80  # the mean loss for which all steps were chosen
SLOPE = 0.25  # nats by which the loss falls when the steps grow by a factor e
ENDS = (0.25, 4.0)  # first and last of the rates that were tried, over the function's default


class Row(NamedTuple):
    """A contestant's runs on tiny."""

    steps: int  # of every run
    name: str
    losses: list[float]
    numbers: dict[str, float]  # of the optimizer
    began: str  # when the first run began


def read_rows() -> list[Row]:
    """Returns the rows of the board, the fewest steps first. Variants without a file have none."""
    rows = {}
    tracks = HERE.parent / "tracks" / TRACK
    for plan in [*tracks.glob("*/plan.json"), *tracks.glob("*/certification/plan.json")]:
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
    """Returns the steps at which the mean would be COMMON: some rows have more than they need."""
    return row.steps * math.exp((fmean(row.losses) - COMMON) / SLOPE)


def board(rows: list[Row]) -> str:
    """Returns the table. A star is at those whose rate is at the end of its grid."""
    cells = []
    for row in rows:
        p = stats.below(row.losses, verify.TRACKS[TRACK].target).p
        factor = row.numbers["lr"] / contest.defaults(row.name)["lr"]
        star = "*" if factor in ENDS else ""
        link = f"[{row.name}]({row.name}.py){star}"
        loss = f"{fmean(row.losses):.4f} ± {stdev(row.losses):.4f}"
        same = f"{comparable_steps(row):.0f}"
        upstream = UPSTREAM.get(row.name, "")
        cells.append([link, row.steps, loss, verify.p_value(p), same, upstream])
    title = ["optimizer", "steps", "final loss", "p", f"for {COMMON:.2f}", "upstream's steps"]
    return "\n".join(verify.table(title, cells))


if __name__ == "__main__":
    print(board(read_rows()))
