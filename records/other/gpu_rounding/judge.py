"""Prints the table and the verdicts of rule.md from the logs of the three arms.

python records/other/gpu_rounding/judge.py
"""

import sys
from pathlib import Path
from statistics import fmean, stdev

HERE = Path(__file__).resolve().parent
sys.path += [str(HERE.parents[1]), str(HERE.parents[2] / "data")]
import runs  # noqa: E402
import stats  # noqa: E402

MARGIN = 0.005  # nats
COUNTED = {"ab": 8, "abc": 3}  # seeds that count by rule.md, from 1 on


def losses(arm: str) -> dict[int, float]:
    """The last validation loss of every run by its seed."""
    logs = map(runs.read, runs.log_files(HERE / arm))
    return {log.seed: log.loss for log in logs if log.complete}


def verdict(name: str, found: list[float]) -> None:
    """Prints what rule.md says of an arm's differences from `now`."""
    n = len(found)
    error = stdev(found) / n**0.5
    half = stats.quantile(0.025, n - 1) * error
    low, high = fmean(found) - half, fmean(found) + half
    p = stats.paired(found).p
    word = "undecided"
    if p < 0.01:
        word = "affected"
    elif -MARGIN <= low and high <= MARGIN:
        word = "not affected"
    print(f"{name}: {fmean(found):+.4f} ± {error:.4f}, n = {n}, p = {p:.2g}, ", end="")
    print(f"95 %: {low:+.4f} to {high:+.4f}: {word}")


def main() -> None:
    """Prints a row for each seed, then the verdicts."""
    now = losses("now")
    arms = {arm: losses(arm) for arm in ("ab", "abc")}
    print("| seed | `now` | `ab` | difference | `abc` | difference |")
    print("|---|---|---|---|---|---|")
    for seed in sorted(now):
        row = [f"{seed}", f"{now[seed]:.4f}"]
        for arm in arms.values():
            loss = arm.get(seed)
            row += [f"{loss:.4f}", f"{loss - now[seed]:+.4f}"] if loss else ["", ""]
        print(f"| {' | '.join(row)} |")
    print()
    for name, arm in arms.items():
        found = [arm[seed] - now[seed] for seed in sorted(arm)]
        verdict(name, found[: COUNTED[name]])
        if len(found) > COUNTED[name]:
            verdict(f"{name}, with seeds begun after the rule's time", found)


if __name__ == "__main__":
    main()
