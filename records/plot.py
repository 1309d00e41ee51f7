"""Curves of validation loss, from logs: see records/README.md. Needs matplotlib.

    ./run.sh plot [NAME=]FOLDER ... [--out curves] [--x steps tokens time] [--target LOSS]
                  [--title TEXT] [--upstream] [--differences]

Every folder makes one curve: the mean of its runs, in a band of one standard deviation to either
side. A log makes one, too, and the folder of a whole plan of ./run.sh compare makes one for each
variant. --upstream adds the curve of modded-nanogpt's record 21. --differences adds a panel of the
final losses minus those of the first folder, for every seed that both have run; beside it, curves
of fewer than 4 points are left out, because they do not show a shape, and so are more than 20
curves, because colors would repeat. Writes OUT.svg.
"""

import collections
import csv
import math
import os
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from statistics import fmean, median, stdev
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parent))  # for PYTHONSAFEPATH=1
import stats
import verify
from messages import Fault, Parser, one_line
from runs import Run, Validation

# A notebook's backend cannot be imported here, and a user's settings would change the picture.
os.environ.update(MPLBACKEND="agg", MATPLOTLIBRC=os.devnull)
try:
    import matplotlib.pyplot as plt
    from matplotlib.ticker import MaxNLocator
except ImportError:
    remedy = "start this by ./run.sh, which installs it"
    print(f"{Path(sys.argv[0]).name}: matplotlib is missing: {remedy}", file=sys.stderr)
    sys.exit(2)

plt.style.use("default")  # without the settings in a file matplotlibrc of the current folder
# Losses of record 21 are means of nine runs, of it and of scripts like it; times are of one run.
UPSTREAM = Path(__file__).parent / "other/upstream_record21.csv"
MOST_CURVES = 20  # more would repeat colors and dashes
FEWEST_POINTS = 4  # of a curve that is worth a panel beside the differences
LABELS = dict(steps="training steps", tokens="training tokens, millions",
              time="training time, seconds")  # fmt: skip
SMOOTHED = "mean of 7 logged batches"  # see smooth()
# By preset: in others, the only target of a token is the next one. Upstream's logs have no preset.
TRAINING_LOSS = {
    "record": "training loss, all targets of a token together",
    "medium": "training loss, all targets of a token together",
    "record92": "training loss, all targets of a token together, over the candidates",
}
BYTES = 257  # the size of the vocabulary in which a token is a byte: 256 and the end of text
STYLE = {
    "figure.dpi": 130, "savefig.dpi": 130, "font.size": 9, "axes.grid": True, "grid.alpha": 0.25,
    "axes.spines.top": False, "axes.spines.right": False, "axes.axisbelow": True,
    "svg.hashsalt": "jNanoGPT", "svg.fonttype": "path", "legend.frameon": False,
}  # fmt: skip


def plain(name: str, longest: int = 80) -> str:
    """A name as matplotlib shows it without change, and without its middle if it is too long.
    Matplotlib would take $ for the start of a formula, leave a label that begins with _ out of the
    legend, and write control characters, which an SVG file may not contain."""
    text = "".join(letter if letter.isprintable() else "?" for letter in name)
    if len(text) > longest:
        text = f"{text[: longest // 2]}\N{HORIZONTAL ELLIPSIS}{text[-longest // 2 :]}"
    space = " " if text.startswith("_") else ""
    return space + text.replace("$", r"\$")


def check_place(out: Path) -> None:
    """Raises Fault if OUT.svg cannot be written."""
    if not out.name or not os.access(out.absolute().parent, os.W_OK):
        raise Fault(f"{out}.svg cannot be written: choose another --out, in a folder that is there")


class Curve(NamedTuple):
    """Losses of a set of runs, at every step for which all of them have one."""

    name: str
    x: dict[str, list[float]]  # by unit, which is a key of LABELS
    mean: list[float]
    sd: list[float]
    train: "Curve | None" = None  # the training losses of batches, where all logs have them
    per: str = "token"  # or "byte": losses are in nats per token or per byte


def curve(name: str, evidence: verify.Evidence) -> Curve:
    """Returns the curve of a folder's complete runs, which validated at the same steps."""
    runs = evidence.ended
    if not runs:
        raise Fault(f"{evidence.folder} has no complete run")
    if len({loss_per(run) for run in runs}) > 1:
        raise Fault(f"{evidence.folder} has runs in nats per byte and in nats per token: part them")
    mean = mean_of(runs, [run.validations for run in runs], f"{name} (n = {len(runs)})")
    if not mean.mean:
        raise Fault(f"the runs of {evidence.folder} have no common step")
    train = mean_of(runs, [drawable(run.training) for run in runs], "training loss")
    return mean._replace(train=train if train.mean else None, per=loss_per(runs[0]))


def is_drawable(v: Validation) -> bool:
    """Returns whether a loss has a place on a logarithmic axis."""
    return 0 < v.loss < math.inf


def drawable(losses: list[Validation]) -> list[Validation]:
    """Returns the losses that have a place on a logarithmic axis."""
    return [v for v in losses if is_drawable(v)]


def name_gaps(figure, series: list[tuple[str, list[Validation]]]) -> None:
    """Names the losses that are not drawable, in a line for each (name, losses), below the
    panels."""
    lines = []
    for name, losses in series:
        gaps = [f"{v.loss:g} at step {v.step}" for v in losses if not is_drawable(v)]
        more = f", and {len(gaps) - 3} more" if len(gaps) > 3 else ""
        if gaps:
            lines.append(plain(f"not drawn, {name}: {', '.join(gaps[:3])}{more}", 160))
    if lines:
        figure.supxlabel("\n".join(lines), fontsize=7, color="tab:red")


def loss_per(run: Run) -> str:
    """Returns what the losses of a run are counted by: "byte" if its tokens are bytes."""
    return "byte" if run.config and run.config.get("vocab") == BYTES else "token"


def smooth(losses: list[float]) -> list[float]:
    """Returns for every batch the mean of it, the 3 logged batches before and the 3 after it. Near
    the first batch, where the loss falls fast, it takes as many after it as there are before it."""
    means = []
    for i in range(len(losses)):
        reach = min(3, i)
        means.append(fmean(losses[i - reach : i + reach + 1]))
    return means


def mean_of(runs: list[Run], losses: list[list[Validation]], name: str) -> Curve:
    """Returns means and deviations of the losses of runs, at the steps that all runs have."""
    points = collections.defaultdict(list)
    for losses_of_run in losses:
        for v in losses_of_run:
            points[v.step].append(v)
    steps = [step for step, found in sorted(points.items()) if len(found) == len(runs)]
    x = dict(steps=steps, time=[fmean(v.ms for v in points[step]) / 1000 for step in steps])
    if runs[0].tokens:
        x["tokens"] = [step * runs[0].tokens / runs[0].steps / 1e6 for step in steps]
    means = []
    deviations = []
    for step in steps:
        values = [v.loss for v in points[step]]
        means.append(fmean(values))
        deviations.append(stdev(values) if len(values) > 1 else 0.0)
    return Curve(name, x, means, deviations)


def steps_of_some(losses: list[list[Validation]], kind: str) -> list[str]:
    """Names the steps that only some of the runs have, so that mean_of() leaves them out, and the
    steps at which the runs end, if they differ: in a line, or in none."""
    of_runs = [{v.step for v in losses_of_run} for losses_of_run in losses]
    some = sorted(set.union(*of_runs) - set.intersection(*of_runs))
    if not some:
        return []
    ends = sorted({max(steps, default=0) for steps in of_runs})
    where = f"steps {some[0]} to {some[-1]}" if len(some) > 1 else f"step {some[0]}"
    if len(some) > 2:
        where = f"{len(some)} of the {where}"
    line = f"{kind} losses at {where}, which not all of its runs have"
    if len(ends) > 1:
        line += f": they end at steps {ends[0]} to {ends[-1]}"
    return [line]


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
    colors = plt.get_cmap("tab10").colors
    lowest = []
    highest = []
    for i, c in enumerate(curves):
        x = c.x[unit]
        color = colors[i % 10]
        style = "-" if i < 10 else "--"
        axes.plot(x, c.mean, style, color=color, label=plain(c.name, 40), linewidth=1.4, marker=".",
                  markersize=4)  # fmt: skip
        # The loss of a batch jumps: a thin line without a band, and only beside few other curves.
        if c.train and len(curves) < 3:
            axes.plot(c.train.x[unit], smooth(c.train.mean), color=color, linewidth=0.8, alpha=0.7,
                      label=f"{c.train.name}, {SMOOTHED}" if i == 0 else None)  # fmt: skip
        low = [mean - sd for mean, sd in zip(c.mean, c.sd, strict=True)]
        high = [mean + sd for mean, sd in zip(c.mean, c.sd, strict=True)]
        axes.fill_between(x, low, high, color=color, alpha=0.18, linewidth=0)
        lowest.append(min(low))
        highest.append(max(c.mean[len(c.mean) // 3 :]))
    if target is not None:
        axes.axhline(
            target, color="black", linewidth=0.9, linestyle=":", label=f"target {target:g}"
        )
        lowest.append(target)
    room = 0.06 * (max(highest) - min(lowest)) or 0.1  # one point has no height
    axes.set_ylim(min(lowest) - room, max(highest) + room)
    axes.set_xlim(left=0)
    axes.set_xlabel(LABELS[unit])
    axes.set_ylabel(f"validation loss, nats per {curves[0].per}")


def draw_legend(axes, count: int) -> None:
    """Names the curves: inside the panel where it has room for their number, else beside it."""
    if count <= 4:
        axes.legend(fontsize=8, loc="upper right")
    else:
        axes.legend(fontsize=8, loc="center left", bbox_to_anchor=(1.0, 0.5))


class Difference(NamedTuple):
    """Final losses of a variant minus those of the first one, in nats."""

    mean: float
    half: float  # half the width of the mean's 95 % interval
    changes: list[float]  # for every seed that both have run
    name: str


def draw_differences(axes, variants: list[tuple[str, verify.Evidence]], per: str) -> None:
    """Draws a row for each variant, sorted by the mean: the difference for every seed, their mean,
    its 95 % interval. What is far beyond the others is an arrow, which leaves their scale alone.
    Raises Fault if a variant has no interval."""
    first_name, first = variants[0]
    rows = []
    for name, variant in variants[1:]:
        changes = verify.changes(variant, first)
        n = len(changes)
        if n < 2:
            raise Fault(f"{name} has {n} seeds in common with {first_name}, but differences need 2")
        half = stats.critical(0.025, n - 1) * stdev(changes) / n**0.5
        rows.append(Difference(fmean(changes), half, changes, plain(name.replace("_", " "), 40)))
    if not rows:
        raise Fault(f"differences need a second folder, whose seeds {first_name} has run as well")
    rows.sort()
    reach = [max(abs(row.mean) + row.half, *map(abs, row.changes)) for row in rows]
    widest = 1.1 * max(r for r in reach if r <= 4 * median(reach)) or 1.0  # of equal losses
    for y, row in enumerate(rows):
        mean = f"{row.mean:+.4f}".replace("-", "\N{MINUS SIGN}")
        axes.text(1.02, y, mean, transform=axes.get_yaxis_transform(), va="center")
        for sign in (-1, 1):
            end = sign * widest
            farthest = max(sign * row.mean + row.half, *(sign * change for change in row.changes))
            if farthest > widest:
                axes.annotate("", (end, y), (0.75 * end, y), arrowprops=dict(arrowstyle="->"))
        ys = [y] * len(row.changes)
        axes.plot(row.changes, ys, "o", color="tab:blue", alpha=0.45, markersize=5)
        axes.errorbar(row.mean, y, xerr=row.half, fmt="D", color="black", markersize=4, capsize=3,
                      linewidth=1)  # fmt: skip
    # These have no data: they are for the legend only.
    one = axes.plot([], [], "o", color="tab:blue", alpha=0.45, markersize=5)[0]
    mean = axes.errorbar([], [], xerr=[], fmt="D", color="black", markersize=4, capsize=3)
    arrow = axes.plot([], [], color="black", marker=r"$\rightarrow$", markersize=10, ls="")[0]
    handles = {"one seed": one, "mean and its 95 % interval": mean}
    if max(reach) > widest:
        handles["beyond the scale"] = arrow
    axes.legend(handles.values(), handles, fontsize=8, loc="upper center", ncols=3,
                bbox_to_anchor=(0.5, -0.14))  # fmt: skip
    axes.axvline(0, color="black", linewidth=0.9)
    axes.set_xlim(-widest, widest)
    axes.xaxis.set_major_locator(MaxNLocator(nbins=5))
    axes.set_yticks(range(len(rows)), [row.name for row in rows])
    axes.set_ylim(-0.6, len(rows) - 0.4)
    axes.set_xlabel(f"final validation loss minus that of {plain(first_name, 25)}, nats per {per}")
    axes.grid(axis="y", visible=False)


def plot(
    variants: list[tuple[str, verify.Evidence]], out: Path, units: list[str],
    target: float | None, title: str = "", with_upstream: bool = False, differences: bool = False,
) -> None:  # fmt: skip
    """Draws OUT.svg: a panel for each unit of the x axis, and one of the differences if wanted.
    Raises Fault if it cannot draw a curve."""
    curves = [curve(name, evidence) for name, evidence in variants]
    if with_upstream:
        curves.append(upstream())
    is_short = max(len(c.mean) for c in curves) < FEWEST_POINTS
    if differences and (is_short or len(curves) > MOST_CURVES):
        units = []
    if units and len(curves) > MOST_CURVES:
        count = f"{len(curves)} curves, of which it can show {MOST_CURVES}"
        raise Fault(f"this picture would have {count}: draw several pictures")
    for c in curves:
        if c.per != curves[0].per:
            both = f"{curves[0].name} in nats per {curves[0].per}, {c.name} per {c.per}"
            raise Fault(f"losses of two units need two pictures: {both}")
        for unit in units:
            if unit not in c.x:
                raise Fault(f"{c.name} has no curve over {unit}, which its logs do not state")
    panels = len(units) + (1 if differences else 0)
    with plt.rc_context(STYLE):
        height = max(4.4, 1 + 0.12 * len(variants))  # so that rows of differences have room
        figure, axes = plt.subplots(1, panels, figsize=(5.6 * panels, height), squeeze=False,
                                    layout="constrained")  # fmt: skip
        for i, unit in enumerate(units):
            draw_curves(axes[0, i], curves, unit, target)
        if units:
            draw_legend(axes[0, 0], len(curves))
        if differences:
            draw_differences(axes[0, -1], variants, curves[0].per)
        figure.suptitle(plain(title))
        if units and len(curves) < 3:  # draw_curves() draws training losses, too
            runs = [run for _, evidence in variants for run in evidence.ended]
            name_gaps(figure, [(f"training losses of {run.name}", run.training) for run in runs])
        save(figure, out)


def plot_log(run: Run, out: Path) -> None:
    """Draws the losses of one run from first to last, for evals/look.py: every logged batch as a
    dot, their smoothed curve, the validations, and the target if the run has one. Raises Fault
    without any loss."""
    training = drawable(run.training)
    validations = drawable(run.validations)
    if not training and not validations:
        raise Fault(f"{run.name} has no losses that can be drawn")
    steps = [v.step for v in training]
    batches = [v.loss for v in training]
    name = TRAINING_LOSS.get(run.config and run.config["preset"], "training loss")
    with plt.rc_context(STYLE):
        figure, axes = plt.subplots(figsize=(7, 4.4), layout="constrained")
        if training:
            axes.plot(
                steps, batches, ".", color="tab:blue", alpha=0.3, label=f"{name}, of one batch"
            )
            axes.plot(steps, smooth(batches), color="tab:blue", label=f"{name}, {SMOOTHED}")
        axes.plot([v.step for v in validations], [v.loss for v in validations], "o-",
                  color="tab:orange", markersize=5, label="validation loss")  # fmt: skip
        target = run.config and run.config["target"]
        if target:
            axes.axhline(target, color="black", lw=0.9, ls=":", label=f"target {target:g}")
        axes.legend()
        axes.set(yscale="log", xlabel="training steps", title=plain(run.name))
        axes.set_ylabel(f"loss, nats per {loss_per(run)}, logarithmic scale")
        axes.yaxis.set(major_formatter="{x:g}", minor_formatter="{x:g}")
        name_gaps(figure, [("training", run.training), ("validation", run.validations)])
        save(figure, out)


def save(figure, out: Path) -> None:
    """Writes OUT.svg. The same picture makes the same bytes. Letters that the font lacks, such as
    those of Chinese, are boxes."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph .* missing from", UserWarning)
        figure.savefig(out.with_name(f"{out.name}.svg"), metadata={"Date": None})
    plt.close(figure)


def name_and_folder(argument: str) -> tuple[str, Path]:
    """Returns the name ("" without one) and the folder, or the log, in [NAME=]FOLDER. Both may
    contain =: the longest path that exists counts."""
    parts = argument.split("=")
    for i in range(len(parts)):
        name = "=".join(parts[:i])
        folder = "=".join(parts[i:])
        if folder and Path(folder).exists():
            return name, Path(folder)
    raise Fault(f"{argument!r} names no folder and no log")


def read_variants(argument: str) -> Iterator[tuple[str, verify.Evidence]]:
    """Yields the name and the runs of what [NAME=]FOLDER names: of every variant, if that is the
    folder of a whole plan."""
    name, folder = name_and_folder(argument)
    if not folder.is_dir() or not verify.is_plan(folder):
        yield name or folder.resolve().name.removesuffix(".txt"), verify.collect(folder)
        return
    for variant in verify.read_plan_file(folder / "plan.json")["arms"]:
        yield f"{name} {variant}".strip(), verify.collect(folder / variant)


def main() -> None:
    """Draws the curves of the folders that the command line names."""
    cli = Parser(prog="./run.sh plot", description=__doc__)
    cli.add_argument("folders", nargs="+", metavar="[NAME=]FOLDER")
    cli.add_argument("--out", type=Path, default=Path("curves"), help="picture, without .svg")
    cli.add_argument("--x", nargs="+", choices=LABELS, default=["steps"], help="a panel for each")
    cli.add_argument("--target", type=float, help="loss at which to draw a line")
    cli.add_argument("--title", default="")
    cli.add_argument("--upstream", action="store_true")
    cli.add_argument("--differences", action="store_true")
    args = cli.parse_args()
    if args.target is not None and not 0 < args.target < math.inf:
        raise Fault("--target must be a loss above 0")
    check_place(args.out)
    variants = []
    for argument in args.folders:
        for name, evidence in read_variants(argument):
            if name in dict(variants):
                raise Fault(f"two curves are called {name}: name them by NAME=FOLDER")
            variants.append((name, evidence))
    plot(variants, args.out, args.x, args.target, args.title, args.upstream, args.differences)
    print(f"drew {', '.join(name for name, _ in variants)} in {args.out}.svg")
    for name, evidence in variants:
        broken = [f"{run.name}: {run.ended}" for run in evidence.runs if not run.complete]
        validations = [run.validations for run in evidence.ended]
        training = [run.training for run in evidence.ended]
        gaps = steps_of_some(validations, "validation")
        if len(variants) + args.upstream < 3:  # draw_curves() draws training losses, too
            gaps += steps_of_some(training, "training")
        for reason in broken + evidence.unreadable + gaps:
            print(f"left out of {name}: {reason}")


if __name__ == "__main__":
    with one_line("plot.py", status=2):
        main()
