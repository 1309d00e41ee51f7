"""Judge runs by their logs: see records/README.md. Nothing that is read is executed.

    python records/verify.py THIS [BASELINE] [--track NAME] [--target LOSS]

THIS and BASELINE are folders: a record, an arm of run_ab.py, or one with logs (ours or those of
modded-nanogpt). Given the folder of a whole plan of run_ab.py, it compares all arms with the first.
Writes Markdown. Exit status 0: it holds; 1: it does not; 2: there is nothing to judge.
"""

import argparse
import hashlib
import itertools
import json
import math
import re
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from statistics import fmean, stdev
from typing import Any, NamedTuple

import runs
import stats
from runs import Run, Unreadable

ALPHA = 0.01
# Variables of those in a log that may be set: they say where things are, not what is computed.
NEUTRAL = re.compile(
    "JAX_COMPILATION_CACHE_DIR|JAX_PLATFORMS|CUDA_VISIBLE_DEVICES|CUDA_(VERSION|HOME|PATH)"
    "|NVIDIA_(VISIBLE_DEVICES|DRIVER_CAPABILITIES|REQUIRE_.*|PRODUCT_NAME)|(NCCL|CUDNN)_VERSION"
    "|TF_CPP_MIN_LOG_LEVEL|TPU_SKIP_MDS_QUERY|XLA_CLIENT_MEM_FRACTION|GLIBC_TUNABLES"
)


class Track(NamedTuple):
    """What all records of a track share."""

    preset: str
    metric: str  # "time" or "tokens"
    target: float  # nats
    z_rule: float  # (target - mean) sqrt(n) for p < 0.001 where the seeds' sd is known, nats
    margin: float  # below the target that we ask for, nats: machines differ by about as much
    devices: str  # regular expression of each
    count: int | None
    val_tokens: int
    shards: str  # the first 16 digits of the sha256 of each that data/ makes, validation last


FINEWEB = dict(
    preset="record", metric="time", target=3.28, z_rule=0.004, margin=0.001, val_tokens=10485760,
    shards="771fa4a99b9fe094 d4ba8d2d740905a8 f70fa272369730fd d8d88850f89fe203 36cef3fc41863eb6 "
           "d80e5b209983e636 fa9f94dce61686b5 5b95c8e0966f0861",
)  # fmt: skip
TINY = dict(preset="tiny", metric="tokens", margin=0.005, devices="cpu", count=None,
            val_tokens=65536)  # fmt: skip
TRACKS = {
    "8xh100": Track(**FINEWEB, devices="NVIDIA H100 80GB HBM3", count=8),
    "1xgpu": Track(**FINEWEB, devices="NVIDIA .*", count=1),
    "tiny-2k": Track(**TINY, target=1.38, z_rule=0.033,
                     shards="1a9b61a147d894ec 74c2d9b68d4d17bd eb0c3850de1d7907"),
    "tiny": Track(**TINY, target=1.49, z_rule=0.031,  # closed: its documents were whole
                  shards="799fdc6b6b565b8b f83ec25b395b239c f7a55403e5071ae3"),
}  # fmt: skip


# ---- Reading -------------------------------------------------------------------------------------
class Evidence(NamedTuple):
    """A folder with logs, and what stands beside them."""

    folder: Path
    runs: list[Run]  # all that can be read, in the order in which they began
    unreadable: list[str]
    plan: dict[str, Any] | None  # with the name that the arm has there
    source: str | None  # sha256 of train_gpt.py beside the logs

    @property
    def ended(self) -> list[Run]:
        """Runs that came to their end."""
        return [run for run in self.runs if run.complete]

    @property
    def losses(self) -> list[float]:
        """Their final losses."""
        return [run.loss for run in self.ended]

    @property
    def seconds(self) -> list[float]:
        """Their training times."""
        return [run.seconds for run in self.ended]

    @property
    def tokens(self) -> list[int]:
        """The numbers of tokens that they were trained on, without repeats."""
        return sorted({run.tokens for run in self.ended if run.tokens})


def read_logs(folder: Path) -> tuple[list[Run], list[str]]:
    """All runs of a folder, and what is wrong with the logs that cannot be read."""
    found, unreadable = [], []
    for path in runs.log_files(folder):
        try:
            found.append(runs.read(path))
        except Unreadable as error:
            unreadable.append(f"{path.name}: {error}")
    return found, unreadable


def collect(folder: Path) -> Evidence:
    """The logs of a folder and what stands beside them; raises Unreadable if there is no log."""
    found, unreadable = read_logs(folder)
    if not found:
        raise Unreadable("; ".join([f"{folder} has no log that can be read", *unreadable]))
    files = folder / "plan.json", folder.resolve().parent / "plan.json"
    texts = [file.read_text() for file in files if file.is_file()]
    plans = (dict(arm=folder.resolve().name) | json.loads(text) for text in texts)
    plan = next((plan for plan in plans if plan["arm"] in plan["arms"]), None)
    source = folder / "train_gpt.py"
    sha256 = hashlib.sha256(source.read_bytes()).hexdigest() if source.is_file() else None
    return Evidence(folder, found, unreadable, plan, sha256)


# ---- Checks of one set of runs: they yield what they find ----------------------------------------
class Finding(NamedTuple):
    """What a check has found."""

    fails: bool  # or it is only a note
    text: str

    def __str__(self) -> str:
        return f"**FAIL** {self.text}" if self.fails else f"note: {self.text}"


def fail(text: str) -> Finding:
    """A finding by which the runs do not hold."""
    return Finding(True, text)


def note(text: str) -> Finding:
    """A finding that a reader should know."""
    return Finding(False, text)


def check_complete(e: Evidence, track: Track | None) -> Iterator[Finding]:
    """Every run came to its end, in one process, and none with a final loss was thrown away."""
    yield from (fail(f"no log: {text}") for text in e.unreadable)
    yield from (fail(f"{run.name}: {run.ended}") for run in e.runs if not run.complete)
    text = "resumed, so that its clock is of several processes: run it again in one go"
    yield from (fail(f"{run.name}: {text}") for run in e.ended if run.resumed)
    interrupted, broken = read_logs(e.folder / "unfinished")
    for run in interrupted:
        if run.validations and run.validations[-1].step == run.steps:
            yield fail(f"{run.name}, in unfinished/, had its final loss: it counts")
    n = len(interrupted) + len(broken)
    if n:
        yield note(f"{n} interrupted and run again; their logs are in unfinished/")


def check_length(e: Evidence, track: Track | None) -> Iterator[Finding]:
    """A run that stops when it likes its loss has a loss that it likes."""
    for run in e.ended:
        target = run.config.get("target") if run.ours else 0
        if target != 0 or run.ended == "target reached":
            yield fail(f"{run.name} could have stopped at {target}: no p-value; use --target 0")
    if len({tuple((v.step, v.steps) for v in run.validations) for run in e.ended}) > 1:
        yield fail("the runs validate at different steps, or differ in length")
    if len(e.tokens) > 1:
        yield fail(f"the runs count different tokens: {e.tokens}")


def check_twice(e: Evidence, track: Track | None) -> Iterator[Finding]:
    """Repeats of one run look like many runs with hardly any deviation."""
    for a, b in itertools.combinations(e.runs, 2):
        traces = [[*(v.loss for v in run.validations), run.loss] for run in (a, b)]
        if a.sha256 == b.sha256:
            yield fail(f"{b.name} is the same log as {a.name}")
        elif a.seed is not None and a.seed == b.seed:
            yield fail(f"{b.name} has the seed of {a.name}")
        # Where a log has little else, two losses of four digits may be equal by chance.
        elif traces[0] == traces[1] and (a.ours or len(a.validations) > 3):
            yield fail(f"{b.name} has, at every step, the losses of {a.name}")
    if any(run.seed is None for run in e.runs):
        yield note("seeds: the logs state none")


def check_source(e: Evidence, track: Track | None) -> Iterator[Finding]:
    """All runs have the source that stands beside the logs."""
    sources = sorted({run.source for run in e.runs})
    if len(sources) > 1:
        yield fail(f"{len(sources)} different sources: {', '.join(sha[:12] for sha in sources)}")
    if e.source and sources != [e.source]:
        yield fail("train_gpt.py is not the source that the logs state")


def differing(several: list[Run], names: str) -> Iterator[Finding]:
    """Facts of these names that are not the same in all runs."""
    for name in names.split():
        values = [getattr(run, name) for run in several]
        found = " / ".join(sorted({str(value)[:60] for value in values}))
        if all(isinstance(value, dict) for value in values):
            keys = sorted(set().union(*values))
            found = ", ".join(k for k in keys if len({str(v.get(k)) for v in values}) > 1)
        if any(value != values[0] for value in values):
            yield fail(f"different {name}: {found}")


def check_track(e: Evidence, track: Track | None) -> Iterator[Finding]:
    """What a track fixes: the tokens, of training and of validation, and the devices."""
    run = e.runs[0]
    if not track:
        return
    kinds = "/".join(sorted({*run.devices}))
    if not run.devices:
        yield note("devices: the logs state none")
    elif track.count not in (None, len(run.devices)) or not re.fullmatch(track.devices, kinds):
        yield fail(f"not the track's devices: {len(run.devices)} x {kinds}")
    if not run.ours:
        text = "data, flags and environment: the logs of modded-nanogpt do not state them"
        yield Finding(track.preset != "record", text)
        return
    n = run.config.get("val_tokens")
    if n != track.val_tokens:
        yield fail(f"validated on {n} tokens, not {track.val_tokens:,}")
    *stream, text = track.shards.split()
    *train, val = shards(run) or [None]
    if val != text:
        yield fail("validated on another text than the track's")
    if not train or train != stream[: len(train)]:
        yield fail("trained on another stream of tokens than the track's")


def shards(run: Run) -> list[str]:
    """Those that a run read, validation last, as a track names them."""
    return [shard.get("sha256", "")[:16] for shard in run.data or []]


def check_flags(e: Evidence, track: Track | None) -> Iterator[Finding]:
    """That the file alone makes the record."""
    run = e.runs[0]
    if not track or not run.ours:
        return
    if run.argv != [track.preset, "--target", "0"]:
        text = f"run with {' '.join(run.argv)}; a record is what the file does"
        yield fail(f"{text} with {track.preset} --target 0")
    for name in run.environment:
        if not NEUTRAL.fullmatch(name):
            yield fail(f"{name} is set, outside of the file")


def check_plan(e: Evidence, track: Track | None) -> Iterator[Finding]:
    """How many runs is decided before the first one: otherwise one stops when luck is good."""
    plan, n = e.plan, len(e.runs) + len(e.unreadable)
    if not plan:
        text = "no plan: that n was fixed beforehand cannot be seen"
        yield fail(f"{text}; use run_ab.py") if e.runs[0].ours else note(text)
        return
    if not plan["n"] == len({*plan["seeds"]}) == n:
        yield fail(f"planned {plan['n']} runs with {len({*plan['seeds']})} seeds, found {n}")
    strange = {run.seed for run in e.runs} - set(plan["seeds"])
    if strange:
        yield fail(f"seeds that were not planned: {sorted(strange, key=str)}")
    if {run.source for run in e.runs} != {plan["arms"][plan["arm"]]}:
        yield fail("another source than planned")
    if any(run.argv != plan["arguments"] for run in e.runs):
        yield fail("other flags than planned")
    created = plan["created"].replace(":", "-")
    if any(run.began is None or run.began + "Z" < created for run in e.runs):
        yield fail("a run began before the plan was made, or its log's name does not say when")


MACHINE = "devices driver versions environment"
CHECKS = {
    "every run is complete": check_complete,
    "fixed length, same validations": check_length,
    "no run twice": check_twice,
    "one source": check_source,
    "one machine, versions, environment": lambda e, _: differing(e.runs, MACHINE),
    "one set of flags and data": lambda e, _: differing(e.runs, "argv config data"),
    "the track's text and devices": check_track,
    "nothing but the file": check_flags,
    "as many runs as planned": check_plan,
}


# ---- Checks of two sets --------------------------------------------------------------------------
def check_baseline(this: Evidence, base: Evidence) -> Iterator[Finding]:
    """Whether two sets differ by their sources alone."""
    a, b = this.runs[0], base.runs[0]
    yield from differing([a, b], MACHINE + " argv")
    if {run.sha256 for run in this.runs} & {run.sha256 for run in base.runs}:
        yield fail("a log is in both")
    x, y = shards(a), shards(b)
    if x[-1:] != y[-1:] or any(m != n for m, n in zip(x[:-1], y[:-1], strict=False)):
        yield fail("different data")  # of the training shards one may need fewer
    if a.source == b.source:
        yield note("the two have one source")
    days = {run.began and run.began[:10] for run in this.runs + base.runs}
    if None in days:
        yield note("when the runs began: the logs do not state it")
    elif len(days) > 1:
        yield note(f"the runs are of {len(days)} days: {', '.join(sorted(days))}")
    if a.ours and not interleaved(this, base):
        yield note("the two are from different plans: their runs were not interleaved")


def interleaved(this: Evidence, base: Evidence) -> bool:
    """Whether both are arms of one plan."""
    a, b = (e.plan and e.plan | dict(arm=None) for e in (this, base))
    return a is not None and a == b


def changes(this: Evidence, base: Evidence) -> list[float]:
    """this minus base, of the losses of the seeds that both have run."""
    a, b = ({run.seed: run.loss for run in e.ended if run.seed is not None} for e in (this, base))
    return [a[seed] - b[seed] for seed in sorted({*a} & {*b})]


def check_result(this: Evidence, base: Evidence | None, track: Track | None, target: float):
    """Whether the mean is below the target, and the baseline beaten."""
    n, p = len(this.losses), stats.below(this.losses, target).p
    if math.isnan(p):
        why = "the losses do not vary" if n > 1 else f"{n} complete runs"
        yield fail(f"{why}: no p-value")
    elif any(check_length(this, track)):
        yield fail("no p-value over runs whose length is not fixed")
    elif not p < ALPHA:
        yield fail(f"p = {p_value(p)} for a mean below {target:g}; it takes p < {ALPHA}")
    elif track and target - fmean(this.losses) < track.margin:
        yield note(f"the margin is less than {track.margin:g}: on another machine it may fail")
    if not base or not track:
        return
    if track.metric == "time":
        p = stats.welch(this.seconds, base.seconds).p
        if not p < ALPHA:
            yield fail(f"not faster than the baseline: p = {p_value(p)}, it takes p < {ALPHA}")
        return
    most, least = max(this.tokens, default=0), min(base.tokens, default=0)
    if most >= least:
        yield fail(f"no fewer tokens than the baseline: {most:,} against {least:,}")


# ---- Report --------------------------------------------------------------------------------------
def spread(values: list[float], digits: int) -> str:
    """mean ± standard deviation"""
    deviation = f" ± {stdev(values):.{digits}f}" if len(values) > 1 else ""
    return f"{fmean(values):.{digits}f}{deviation}" if values else "–"


def p_value(p: float | None) -> str:
    """p as text; a dash where there is none."""
    return "–" if p is None or math.isnan(p) else f"{p:.4f}" if p >= 0.001 else f"{p:.1e}"


def table(title: tuple[str, ...], rows: Iterable[tuple]) -> list[str]:
    """The lines of a Markdown table."""
    lines = title, ["---"] * len(title), *rows
    return [*(f"| {' | '.join(map(str, cells))} |" for cells in lines), ""]


def summary(e: Evidence, track: Track | None, target: float) -> dict[str, str]:
    """Facts of a set of runs, by name, as text."""
    planned = f" of {e.plan['n']} planned" if e.plan else ""
    steps = sorted({run.steps for run in e.ended})
    facts = {
        "runs": f"{len(e.runs) + len(e.unreadable)}{planned}",
        "steps": ", ".join(f"{n:,}" for n in steps),
        "tokens": ", ".join(f"{n:,}" for n in e.tokens) or "not stated",
        "final loss, mean ± sd": spread(e.losses, 5),
        "training time, s": spread(e.seconds, 2),
        "ms a step": f"{1000 * fmean(e.seconds) / steps[0]:.2f}" if steps else "–",
    }
    name = f"p(mean < {target:g}), t-test"
    if len(e.losses) < 2:
        return facts
    if any(check_length(e, track)):
        return facts | {name: "none: the length of the runs is not fixed"}
    test = stats.below(e.losses, target)
    margin, sd = target - fmean(e.losses), stdev(e.losses)
    facts |= {name: f"{p_value(test.p)} (t = {test.t:.3f})", "margin": f"{margin:.5f}"}
    if track:
        z = margin * math.sqrt(len(e.losses))
        facts["z rule"] = f"margin · √n = {z:.4f}; {track.z_rule:g} is p < 0.001"
    needed = stats.runs_needed(margin / sd) if sd else None
    facts["runs for 80 % power"] = f"{needed}" if needed else "more than 10,000, or none suffice"
    return facts


def comparison(this: Evidence, base: Evidence) -> Iterator[tuple[str, str, str]]:
    """Rows that tell the two apart; differences are this minus baseline."""
    pairs = changes(this, base)
    if len(pairs) > 1:
        test = stats.paired(pairs)
        what = f"two-sided p = {p_value(test.p)}, t = {test.t:.2f}, {len(pairs)} pairs"
        yield "final loss, paired by seed", spread(pairs, 5), what
    for name, kind, digits in ("final loss", "losses", 5), ("training time, s", "seconds", 3):
        a, b = getattr(this, kind), getattr(base, kind)
        if a and b:
            test = stats.welch(a, b)
            what = f"p = {p_value(test.p)}, t = {test.t:.2f}, df = {test.df:.1f}"
            change = f"{fmean(a) - fmean(b):+.{digits}f}"
            yield name, change, f"Welch, one-sided (this is less): {what}"


def report(this: Evidence, base: Evidence | None, track: Track | None, target: float) -> tuple:
    """Whether it holds, and the Markdown that gives reasons."""
    found = {name: list(check(this, track)) for name, check in CHECKS.items()}
    if base:
        for name, check in CHECKS.items():
            found[name] += [f._replace(text=f"baseline: {f.text}") for f in check(base, track)]
        found["the baseline differs by its source alone"] = list(check_baseline(this, base))
    found["the result"] = list(check_result(this, base, track, target))
    holds = not any(finding.fails for findings in found.values() for finding in findings)
    sets = {"this": this} | ({"baseline": base} if base else {})
    facts = [summary(e, track, target) for e in sets.values()]
    lines = [f"## {'PASS' if holds else 'FAIL'}: {this.folder.resolve().name}", ""]
    lines += table(("", *sets), [(key, *(f.get(key, "–") for f in facts)) for key in facts[0]])
    if base:
        lines += table(("this − baseline", "difference", "test"), comparison(this, base))
    lines += table(
        ("check", "found"),
        ((name, "<br>".join(map(str, findings)) or "ok") for name, findings in found.items()),
    )
    rows = [(run.name, "–" if run.seed is None else run.seed, f"{run.loss:.5f}",
             f"{run.seconds:.2f}") for run in this.ended]  # fmt: skip
    return holds, "\n".join(lines + table(("run", "seed", "final loss", "time, s"), rows)[:-1])


def study(folder: Path) -> tuple[bool, str]:
    """Every arm of a plan against its first one: losses paired by seed, and what is wrong."""
    plan = json.loads((folder / "plan.json").read_text())
    arms = {name: collect(folder / name) for name in plan["arms"]}
    first, *_ = arms.values()
    track = TRACKS.get(infer_track(first))
    rows = []
    seeds = []
    remarks = []
    holds = True
    for name, arm in arms.items():
        found = []
        for check in CHECKS.values():
            if check is not check_flags:
                found += check(arm, track)
        cells = "", "", ""
        if arm is not first:
            found += check_baseline(arm, first)
            pairs, cells = changes(arm, first), ("–", "–", "–")
            if len(pairs) > 1:
                p = p_value(stats.paired(pairs).p)
                cells = f"{fmean(pairs):+.4f}", f"{stdev(pairs):.4f}", p
            seeds.append((name, " ".join(f"{change:+.3f}" for change in pairs)))
        rows.append((name, len(arm.ended), spread(arm.losses, 4), *cells))
        holds = holds and not any(finding.fails for finding in found)
        remarks += [f"- {name}: {finding}" for finding in found]
    title = "arm", "runs", "final loss", f"minus {next(iter(arms))}", "of one pair, sd", "paired p"
    lines = [*table(title, rows), *table(("arm", "difference of each seed"), seeds), *remarks]
    return holds, "\n".join(lines)


def infer_track(this: Evidence) -> str | None:
    """The track of a set of runs, by what they are; of several the one with their text."""
    run = this.runs[0]
    preset = run.config.get("preset") if run.ours else "record"
    fits = [name for name, t in TRACKS.items()
            if t.preset == preset and t.count in (None, len(run.devices))]  # fmt: skip
    same = [name for name in fits if TRACKS[name].shards.split()[-1:] == shards(run)[-1:]]
    return next(iter(same + fits), None)


def is_plan(folder: Path) -> bool:
    """Whether it is that of a whole plan, and no arm's."""
    logs = folder / "logs", folder / "logs.tar.xz"
    return (folder / "plan.json").is_file() and not any(path.exists() for path in logs)


def main(argv: list[str]) -> int:
    """Judges what the command line names; returns the exit status."""
    cli = argparse.ArgumentParser(description=__doc__, allow_abbrev=False,
                                  formatter_class=argparse.RawDescriptionHelpFormatter)  # fmt: skip
    cli.add_argument("this", type=Path, help="folder with logs")
    cli.add_argument("baseline", type=Path, nargs="?", help="the same, of what is to be beaten")
    cli.add_argument("--track", choices=TRACKS, help="default: what the runs look like")
    cli.add_argument("--target", type=float, help="loss; judged by it alone, by no track's rules")
    args = cli.parse_args(argv)
    if args.target is not None and not args.target > 0:
        cli.error("--target must be a loss")
    try:
        if is_plan(args.this) and not args.baseline:
            holds, text = study(args.this)
        else:
            this = collect(args.this)
            base = collect(args.baseline) if args.baseline else None
            track = TRACKS.get(args.track or (None if args.target else infer_track(this)))
            if not track and not args.target:
                raise Unreadable("these runs look like those of no track: add --track or --target")
            holds, text = report(this, base, track, args.target or track.target)
    except (OSError, KeyError, ValueError, Unreadable) as error:  # of a plan, too
        broken = isinstance(error, KeyError | json.JSONDecodeError)
        print(f"verify.py: {'plan.json is broken: ' * broken}{error}", file=sys.stderr)
        return 2
    print(text)
    return 0 if holds else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
