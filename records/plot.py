"""Curves of validation loss, from logs: see records/README.md. Needs matplotlib.

    python records/plot.py [NAME=]FOLDER ... [--out curves] [--x steps tokens time] [--target LOSS]
                           [--title TEXT] [--upstream] [--differences]

Every folder is one curve: the mean of its runs, in a band of a standard deviation to each side.
--upstream adds modded-nanogpt's record 21; --differences a panel of final losses against the first
folder's, pair by pair of equal seeds. Writes OUT.svg.
"""

import argparse
import collections
import csv
import sys
from pathlib import Path
from statistics import fmean, median, stdev
from typing import NamedTuple

import stats
import verify

try:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
except ImportError:
    words = "matplotlib is missing: pip install -r tests/requirements.txt, as ./run.sh look does"
    print(f"{Path(sys.argv[0]).name}: {words}", file=sys.stderr)
    sys.exit(2)

# Record 21's loss is the mean of nine runs of it and of its equals, its time that of one of them.
UPSTREAM = Path(__file__).parent / "other/upstream_record21.csv"
LABELS = dict(steps="steps", tokens="training tokens, millions", time="training time, seconds")
STYLE = {
    "figure.dpi": 130, "savefig.dpi": 130, "font.size": 9, "axes.grid": True, "grid.alpha": 0.25,
    "axes.spines.top": False, "axes.spines.right": False, "axes.axisbelow": True,
    "svg.hashsalt": "jNanoGPT", "svg.fonttype": "path", "legend.frameon": False,
}  # fmt: skip


class Curve(NamedTuple):
    """Of a set of runs, at every step at which all of them were validated."""

    name: str
    x: dict[str, list[float]]  # by unit: a key of LABELS
    mean: list[float]
    sd: list[float]
    train: "Curve | None" = None  # of the batches, where the logs have them


def curve(name: str, evidence: verify.Evidence) -> Curve:
    """The curve of a folder's complete runs."""
    runs = evidence.ended
    if not runs:
        sys.exit(f"plot.py: {evidence.folder} has no complete run")
    label = f"{name} (n = {len(runs)})".replace("$", r"\$")
    training = [run.training for run in runs]
    train = mean_of(runs, training, "training loss") if all(training) else None
    return mean_of(runs, [run.validations for run in runs], label)._replace(train=train)


def mean_of(runs: list[verify.Run], losses: list[list], name: str) -> Curve:
    """Means and deviations at the steps that all runs have."""
    points = collections.defaultdict(list)
    for of_one_run in losses:
        for v in of_one_run:
            points[v.step].append(v)
    steps = [step for step, found in sorted(points.items()) if len(found) == len(runs)]
    losses = [[v.loss for v in points[step]] for step in steps]
    x = dict(steps=steps, time=[fmean(v.ms for v in points[step]) / 1000 for step in steps])
    if runs[0].tokens:
        x["tokens"] = [step * runs[0].tokens / runs[0].steps / 1e6 for step in steps]
    deviations = [stdev(values) if len(values) > 1 else 0.0 for values in losses]
    if not steps:
        sys.exit(f"plot.py: the runs of {name} have no common step")
    return Curve(name, x, [fmean(values) for values in losses], deviations)


def upstream() -> Curve:
    """The curve of modded-nanogpt's record 21."""
    with UPSTREAM.open() as file:
        rows = [{key: float(value) for key, value in line.items()} for line in csv.DictReader(file)]
    x = dict(steps=[r["step"] for r in rows], tokens=[r["tokens"] / 1e6 for r in rows],
             time=[r["seconds"] for r in rows])  # fmt: skip
    name = "modded-nanogpt, record 21 (n = 9)"
    return Curve(name, x, [r["mean"] for r in rows], [r["sd"] for r in rows])


def draw_curves(axes, curves: list[Curve], unit: str, target: float | None, key: bool) -> None:
    """The later part of training, where curves differ; the first third goes off the top."""
    colors = plt.get_cmap("tab10").colors
    ends, tops = [], []
    for i, c in enumerate(curves):
        if unit not in c.x:
            continue
        x, style = c.x[unit], "-" if i < 10 else "--"
        axes.plot(x, c.mean, style, color=colors[i % 10], label=c.name, linewidth=1.4, marker=".",
                  markersize=4)  # fmt: skip
        if c.train and len(curves) < 3:  # a batch's loss jumps: thin, without a band, of few
            axes.plot(c.train.x[unit], c.train.mean, color=colors[i % 10], linewidth=0.5, alpha=0.6,
                      label=c.train.name if i == 0 else None)  # fmt: skip
        low, high = ([m + sign * s for m, s in zip(c.mean, c.sd, strict=True)] for sign in (-1, 1))
        axes.fill_between(x, low, high, color=colors[i % 10], alpha=0.18, linewidth=0)
        ends.append(min(low))
        tops.append(c.mean[len(c.mean) // 3])
    if target is not None:
        axes.axhline(
            target, color="black", linewidth=0.9, linestyle=":", label=f"target {target:g}"
        )
        ends.append(target)
    if ends:
        room = 0.06 * (max(tops) - min(ends))
        axes.set_ylim(min(ends) - room, max(tops) + room)
    axes.set_xlim(left=0)
    axes.set_xlabel(LABELS[unit])
    axes.set_ylabel("validation loss, nats per token")
    if key and len(curves) <= 4:
        axes.legend(fontsize=8, loc="upper right")
    elif key:
        axes.legend(fontsize=8, loc="center left", bbox_to_anchor=(1.0, 0.5))


def draw_differences(axes, arms: list[tuple[str, verify.Evidence]]) -> None:
    """A row for each arm: every pair's difference, their mean, its 95 % interval. An arm that is
    far beyond the others is an arrow with its number: on one scale with it they could not be read.
    """
    _, first = arms[0]
    rows = []
    for name, arm in arms[1:]:
        changes = verify.changes(arm, first)
        if len(changes) > 1:
            half = stats.critical(0.025, len(changes) - 1) * stdev(changes) / len(changes) ** 0.5
            rows.append((fmean(changes), half, changes, name.replace("_", " ")))
    rows.sort()
    reach = [max(abs(mean) + half, *map(abs, changes)) for mean, half, changes, _ in rows]
    widest = max((r for r in reach if r <= 4 * median(reach)), default=1.0) * 1.1
    for y, (mean, half, changes, _) in enumerate(rows):
        axes.text(1.02, y, f"{mean:+.4f}", transform=axes.get_yaxis_transform(), va="center")
        if abs(mean) > widest:
            end = widest if mean > 0 else -widest
            axes.annotate("", (end, y), (0.75 * end, y), arrowprops=dict(arrowstyle="->"))
            continue
        axes.plot(changes, [y] * len(changes), "o", color="tab:blue", alpha=0.45, markersize=5)
        axes.errorbar(mean, y, xerr=half, fmt="D", color="black", markersize=4, capsize=3,
                      linewidth=1)  # fmt: skip
    axes.axvline(0, color="black", linewidth=0.9)
    axes.set_xlim(-widest, widest)
    axes.set_yticks(range(len(rows)), [name for *_, name in rows])
    axes.set_ylim(-0.6, len(rows) - 0.4)
    axes.set_xlabel(f"final loss minus {arms[0][0]}'s, nats per token; mean, 95 % interval, pairs")
    axes.grid(axis="y", visible=False)


def plot(
    arms: list[tuple[str, verify.Evidence]], out: Path, units: list[str], target: float | None,
    title: str = "", with_upstream: bool = False, differences: bool = False,
) -> None:  # fmt: skip
    """Draws OUT.svg: a panel for each unit of the x axis."""
    curves = [curve(name, evidence) for name, evidence in arms] + [upstream()] * with_upstream
    panels = len(units) + differences
    with plt.rc_context(STYLE):
        figure, axes = plt.subplots(1, panels, figsize=(5.6 * panels, 4.4), squeeze=False,
                                    layout="constrained")  # fmt: skip
        for i, unit in enumerate(units):
            draw_curves(axes[0, i], curves, unit, target, key=i == 0)
        if differences:
            draw_differences(axes[0, -1], arms)
        figure.suptitle(title.replace("$", r"\$"))
        save(figure, out)


def plot_log(run: verify.Run, out: Path) -> None:
    """One run's losses from first to last, for evals/look.py."""
    with plt.rc_context(STYLE):
        figure, axes = plt.subplots(figsize=(7, 4.4), layout="constrained")
        for losses, style in (run.training, "-"), (run.validations, "o-"):
            axes.plot([v.step for v in losses], [v.loss for v in losses], style, linewidth=1)
        axes.legend(["training, all targets", "validation"])
        axes.set(yscale="log", xlabel="step", ylabel="loss, nats per token", title=run.name)
        axes.yaxis.set(major_formatter="{x:g}", minor_formatter="{x:g}")
        save(figure, out)


def save(figure, out: Path) -> None:
    """Writes OUT.svg, the same bytes for the same picture."""
    figure.savefig(out.with_name(f"{out.name}.svg"), metadata={"Date": None})
    plt.close(figure)


def main() -> None:
    """Draws what the command line names."""
    cli = argparse.ArgumentParser(description=__doc__, allow_abbrev=False,
                                  formatter_class=argparse.RawDescriptionHelpFormatter)  # fmt: skip
    cli.add_argument("folders", nargs="+", metavar="[NAME=]FOLDER")
    cli.add_argument("--out", type=Path, default=Path("curves"))
    cli.add_argument("--x", nargs="+", choices=LABELS, default=["steps"])
    cli.add_argument("--target", type=float)
    cli.add_argument("--title", default="")
    cli.add_argument("--upstream", action="store_true")
    cli.add_argument("--differences", action="store_true")
    args = cli.parse_args()
    if not args.out.absolute().parent.is_dir():
        sys.exit(f"plot.py: there is no folder for {args.out}")
    arms = []
    for word in args.folders:
        name, _, folder = word.rpartition("=")
        try:
            arms.append((name or Path(folder).resolve().name, verify.collect(Path(folder))))
        except verify.Unreadable as error:
            sys.exit(f"plot.py: {error}")
    plot(arms, args.out, args.x, args.target, args.title, args.upstream, args.differences)


if __name__ == "__main__":
    main()
