"""Tunes contestants on tiny, all with the same number of runs: see README.md.

    python records/optimizers/tune.py NAME [NAME ...] [--out search.tsv]

A contestant's grid, below, was fixed before its first run: five values of its rate, with the
default in the middle, and two other values of each of two other numbers. Nine runs of 750 steps go
through them number by number: the rates, and then, with the best numbers so far, the other two. Two
more runs find the steps to the target. A run that FILE has is not repeated.
"""

import argparse
import json
import math
import os
import re
import subprocess
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from optimizers import contest  # noqa: E402

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
TARGET = 1.84  # of the track optimizers-tiny, nats
MOST = 5900  # steps for which there is text
STEPS = 750  # of the nine runs: half of Muon's first
SEED = 1
MARGIN = 0.04  # below the target, nats: 0.02 for p < 0.01 with eight runs, and 0.02 for the seed
SLOPE = 0.25  # nats by which the loss falls when the steps grow by a factor e: a first guess
FACTORS = (0.25, 0.5, 1.0, 2.0, 4.0)  # of the default of the rate, lr
OTHERS = {  # values of the two other numbers
    "muon": dict(decay=(0.0125, 0.2), momentum=(0.9, 0.98)),
    "spectral": dict(decay=(0.0125, 0.2), start=(0.0, 0.6)),
    "normuon": dict(decay=(0.0125, 0.2), momentum=(0.9, 0.98)),
    "muon_squared": dict(decay=(0.0125, 0.2), momentum=(0.9, 0.98)),
    "muonh": dict(momentum=(0.9, 0.98), start=(0.3, 0.6)),
    "adamh": dict(b1=(0.8, 0.95), b2=(0.9, 0.99)),
    "ema_nesterov": dict(decay=(0.0125, 0.2), ahead=(0.3, 0.9)),
    "cautious": dict(decay=(0.025, 0.4), momentum=(0.9, 0.98)),
    "anvil": dict(decay=(0.025, 0.4), momentum=(0.9, 0.98)),
    "dynmuon": dict(decay=(0.0125, 0.2), power=(0.125, 0.5)),
    "pmuon": dict(decay=(0.0125, 0.2), power=(0.15, 0.5)),
    "muown": dict(momentum=(0.9, 0.98), stretch=(1.35, 5.4)),
    "adamw": dict(decay=(0.03, 0.3), b2=(0.9, 0.99)),
    "lion": dict(decay=(0.1, 1.0), b2=(0.95, 0.99)),
    "adafactor": dict(decay=(0.03, 0.3), power=(0.6, 1.0)),
    "sophia": dict(decay=(0.03, 0.3), gamma=(0.01, 0.1)),
    "prodigy": dict(decay=(0.03, 0.3), first=(1e-5, 1e-3)),
    "ademamix": dict(alpha=(2.0, 8.0), memory=(0.05, 0.2)),
    "schedule_free": dict(decay=(0.03, 0.3), b1=(0.9, 0.98)),
    "optax_muon": dict(decay=(0.025, 0.1), momentum=(0.9, 0.97)),
    "adan": dict(decay=(0.03, 0.3), b3=(0.95, 0.98)),
    "shampoo": dict(decay=(0.1, 0.4), b2=(0.9, 0.98)),
    "soap_h": dict(b1=(0.9, 0.97), b2=(0.8, 0.95)),
    "kl_soap_h": dict(b1=(0.9, 0.97), b2=(0.8, 0.95)),
    "psgd_h": dict(b1=(0.9, 0.97), fit=(0.3, 0.6)),
}


def grid(name: str) -> dict[str, tuple[float, ...]]:
    """Returns the values of each of a contestant's numbers."""
    rate = contest.defaults(name)["lr"]
    return {"lr": tuple(factor * rate for factor in FACTORS)} | OTHERS[name]


def run(name: str, steps: int, numbers: dict[str, float]) -> float:
    """Trains a contestant on tiny, with its defaults for all other numbers. Returns the final loss;
    infinite if it is not finite."""
    file = ROOT / "logs" / "tune" / f"{name}_{os.getpid()}.py"
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(contest.assemble((HERE / f"{name}.py").read_text("utf-8")), "utf-8")
    command = [sys.executable, str(file), "tiny", "--steps", str(steps), "--seed", str(SEED)]
    for number, value in (contest.defaults(name) | numbers).items():  # not those of SETTINGS
        command += [f"--{number}", str(value)]
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    if done.returncode == 3:
        return math.inf
    done.check_returncode()
    return float(re.findall(rf"^step:{steps}/{steps} val_loss:(\S+)", done.stdout, re.M)[-1])


def loss_of(name: str, steps: int, numbers: dict[str, float], out: Path) -> float:
    """Returns the loss of a run: from the file `out` if it has a line of this run, else from a run,
    whose line is added: name, steps, seed, numbers, loss."""
    key = f"{name}\t{steps}\t{SEED}\t{json.dumps(numbers, sort_keys=True)}\t"
    for line in out.read_text().splitlines() if out.exists() else []:
        if line.startswith(key):
            return float(line.removeprefix(key))
    loss = run(name, steps, numbers)
    with out.open("a") as file:
        print(f"{key}{loss}", file=file)
    print(f"{key}{loss}", flush=True)
    return loss


def best_numbers(name: str, out: Path) -> tuple[dict[str, float], float]:
    """Returns the best of nine settings, and its loss."""
    best = {}
    lowest = math.inf
    for number, values in grid(name).items():
        around = best
        for value in values:
            loss = loss_of(name, STEPS, around | {number: value}, out)
            if loss < lowest:
                best = around | {number: value}
                lowest = loss
    return best, lowest


def steps_to(target: float, name: str, numbers: dict, loss: float, out: Path) -> int:
    """Returns the steps to a loss, a multiple of 5, by two more runs. loss is that of STEPS steps.
    The loss is a linear function of the logarithm of the steps, near enough."""
    points = [(math.log(STEPS), loss)]
    slope = -SLOPE
    for _ in range(2):
        x, y = min(points, key=lambda point: abs(point[1] - target))
        steps = 5 * round(math.exp(x + (target - y) / slope) / 5)
        steps = min(max(steps, STEPS // 4), MOST)
        if math.log(steps) in dict(points):
            break
        points.append((math.log(steps), loss_of(name, steps, numbers, out)))
        points.sort(key=lambda point: abs(point[1] - target))
        (x1, y1), (x2, y2) = points[:2]
        if abs(x1 - x2) > 0.1:
            slope = min((y1 - y2) / (x1 - x2), -SLOPE / 4)
    x, y = points[0]
    return 5 * math.ceil(math.exp(x + (target - y) / slope) / 5)


def main() -> None:
    """Tunes the contestants that the command line names."""
    cli = argparse.ArgumentParser(allow_abbrev=False)
    cli.add_argument("names", nargs="+", choices=OTHERS, metavar="NAME")
    cli.add_argument("--out", type=Path, default=Path("search.tsv"))
    args = cli.parse_args()
    for name in args.names:
        numbers, loss = best_numbers(name, args.out)
        steps = steps_to(TARGET - MARGIN, name, numbers, loss, args.out)
        print(f"{name}: {json.dumps({'steps': steps} | numbers)}", flush=True)


if __name__ == "__main__":
    main()
