"""Judge runs by their logs: see records/README.md. Nothing that is read is executed.

    python records/verify.py THIS [BASELINE] [--track NAME] [--target LOSS]

THIS and BASELINE are folders: a record, an arm of run_ab.py, or one with logs (ours or those of
modded-nanogpt). Given the folder of a whole plan of run_ab.py, it compares all arms with the first.
Writes Markdown. Exit status 0: it holds; 1: it does not; 2: there is nothing to judge.
"""

import argparse
import dataclasses
import datetime
import hashlib
import json
import math
import operator
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import fmean, stdev
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parent))

import runs  # noqa: E402
import stats  # noqa: E402
from runs import Run  # noqa: E402

ALPHA = 0.01
NAME = "[A-Za-z0-9][A-Za-z0-9_.-]{0,63}"  # of an arm
STEERS = re.compile("JAX|XLA|(LIB)?TPU|CUD|NVI|NCCL|TF_CPP|GLI")  # the variables that a log states
# Those of them that may be set: they say where things are, not what is computed.
NEUTRAL = re.compile(
    "JAX_COMPILATION_CACHE_DIR|JAX_PLATFORMS|CUDA_VISIBLE_DEVICES|CUDA_(VERSION|HOME|PATH)"
    "|NVIDIA_(VISIBLE_DEVICES|DRIVER_CAPABILITIES|REQUIRE_.*|PRODUCT_NAME)|NV_.*(VERSION|PACKAGE).*"
    "|NVARCH|NCCL_VERSION|CUDNN_VERSION|TF_CPP_MIN_LOG_LEVEL|TPU_SKIP_MDS_QUERY"
    "|XLA_CLIENT_MEM_FRACTION|GLIBC_TUNABLES"
)


@dataclasses.dataclass(frozen=True)
class Track:
    """What all records of a track share; the hashes are those of data/."""

    preset: str
    metric: str  # "time" or "tokens"
    target: float  # nats
    z_rule: float  # (target - mean) sqrt(n) for p < 0.001 where the seeds' sd is known, nats
    margin: float  # below the target that we ask for, nats: machines differ by about as much
    devices: str  # regular expression of each
    count: int | None
    val_tokens: int
    val: str  # sha256
    train: tuple[str, ...]  # sha256, in order


FINEWEB = dict(
    preset="record", metric="time", target=3.28, z_rule=0.004, margin=0.001, val_tokens=10485760,
    val="5b95c8e0966f0861685b307b23dc5ae42b228ef74b28cb499784ae021f201640",
    train=(
        "771fa4a99b9fe0946ffb6e848b4ba5c6a9b0fe87860ebf03bc2c1c7e45f8178e",
        "d4ba8d2d740905a836a4222d2aff01750560e7d49a51a745a1b3235520aec2cd",
        "f70fa272369730fd9e39f1848bfe4daa3289b6e490c1e7762777f00ea8b66246",
        "d8d88850f89fe2030e866380e90d544167467d407080403b830b903543925835",
        "36cef3fc41863eb6731b41e986edde38e368853ee6deb87b928990bf445a119c",
        "d80e5b209983e636655fc738fdf281f0132f0298bf4c0848f7e7a6bea6ca06f0",
        "fa9f94dce61686b5467bc6cd3078424203db23ac254d804a6d8d5d440afc1e11",
    ),
)  # fmt: skip
TINY = dict(
    preset="tiny", metric="tokens", margin=0.005, devices="cpu", count=None, val_tokens=65536
)
TRACKS = {
    "8xh100": Track(**FINEWEB, devices="NVIDIA H100 80GB HBM3", count=8),
    "1xgpu": Track(**FINEWEB, devices="NVIDIA .*", count=1),
    "tiny-2k": Track(
        **TINY, target=1.38, z_rule=0.033,
        val="eb0c3850de1d7907726f5284d57b12f871789a36f2f8255625e055ee5e205534",
        train=(
            "1a9b61a147d894ec0ee7289c1f88f6725355af3218985db9b4dc21d7e345a063",
            "74c2d9b68d4d17bda99679cbd11744f046adc966967cfb7edb80433a0a708c75",
        ),
    ),
    "tiny": Track(  # closed: its documents were whole
        **TINY, target=1.49, z_rule=0.031,
        val="f7a55403e5071ae33147658cfd0981ec725adf2345e6147015784bcafc053046",
        train=(
            "799fdc6b6b565b8b6fdab42da2f94d0fa65d703b2f9ed85be7d590ff1383aafa",
            "f83ec25b395b239c43c6c4840677aed865ba320e59881c9d627016438960bc16",
        ),
    ),
}  # fmt: skip


class Finding(NamedTuple):
    fails: bool  # else it is only said
    text: str


def fail(text: str) -> Finding:
    return Finding(True, text)


def note(text: str) -> Finding:
    return Finding(False, text)


def printable(text: str) -> str:
    return "".join(c if c.isprintable() else "?" for c in text)


def plain(value: Any, most: int = 60) -> str:
    """Text from a log as it may stand in Markdown and on a terminal: no control, no markup."""
    if isinstance(value, list) and all(isinstance(each, str) for each in value):
        value = ", ".join(value)
    text = value if isinstance(value, str) else json.dumps(value, sort_keys=True, default=str)
    text = re.sub(r"[|`<>\[\]\\*]", "?", printable(text))
    return text if len(text) <= most else text[:most] + "…"


# ---- Reading -------------------------------------------------------------------------------------
@dataclasses.dataclass(frozen=True)
class Evidence:
    """A folder with logs, and what stands beside them."""

    folder: Path
    runs: list[Run]  # all that can be read, in the order in which they began
    unreadable: list[str]
    plan: dict[str, Any] | None
    arm: str | None  # its name in the plan
    source: str | None  # sha256 of train_gpt.py beside the logs
    result: dict[str, Any] | None  # result.json

    @property
    def ended(self) -> list[Run]:
        return [run for run in self.runs if run.ended in ("end of schedule", "target reached")]

    @property
    def losses(self) -> list[float]:
        return [run.loss for run in self.ended]

    @property
    def seconds(self) -> list[float]:
        return [run.seconds for run in self.ended]


class Unusable(Exception):
    """There is nothing to judge."""


def read_text(file: Path) -> str | None:
    """A small text beside the logs, if it is there."""
    if not file.is_file():
        return None
    try:
        if file.stat().st_size > runs.LONGEST:
            raise Unusable(f"{file} is larger than 1 MiB")
        return file.read_text(errors="replace")
    except OSError as error:
        raise Unusable(f"{file} cannot be read: {error.strerror}") from error


def read_plan(file: Path) -> dict[str, Any]:
    try:
        plan = json.loads(read_text(file))
        created = datetime.datetime.fromisoformat(plan["created"])
        n, seeds, arms, words = plan["n"], plan["seeds"], plan["arms"], plan["arguments"]
        good = [
            type(n) is int and n == len(seeds) == len(set(seeds)),
            all(type(seed) is int for seed in seeds),
            arms and all(re.fullmatch(NAME, name) for name in arms),
            all(re.fullmatch("[0-9a-f]{64}", sha) for sha in arms.values()),
            type(words) is list and all(type(word) is str for word in words),
            created.tzinfo is not None and plan.get("arm", next(iter(arms), None)) in arms,
        ]
        if not all(good):
            raise ValueError("no such plan is ours")
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise Unusable(f"{file} is broken: {type(error).__name__}") from error
    return plan | dict(created=created)


def read_result(file: Path) -> dict[str, Any] | None:
    try:
        return None if (text := read_text(file)) is None else runs.parse_json(text, dict)
    except runs.Unreadable as error:
        raise Unusable(f"{file} is broken") from error


def collect(folder: Path) -> Evidence:
    """Everything in a folder that tells of runs; raises Unusable if there is no log."""
    if not folder.is_dir():
        raise Unusable(f"{folder} is no folder")
    place = folder / "logs" if (folder / "logs").is_dir() else folder
    found, unreadable = [], []
    for path in sorted(place.glob("*.txt")):
        try:
            found.append(runs.read(path))
        except runs.Unreadable as error:
            unreadable.append(f"{plain(path.name)}: {plain(str(error), 200)}")
    if not found:
        raise Unusable(
            f"{place} has no log that can be read" + "".join(f"; {x}" for x in unreadable)
        )
    files = folder / "plan.json", folder.resolve().parent / "plan.json"
    plan = next((read_plan(file) for file in files if file.is_file()), None)
    arm = plan and plan.get("arm", folder.resolve().name)
    if plan and arm not in plan["arms"]:
        plan = arm = None
    source = folder / "train_gpt.py"
    return Evidence(
        folder, found, unreadable, plan, arm,
        hashlib.sha256(source.read_bytes()).hexdigest() if source.is_file() else None,
        read_result(folder / "result.json"),
    )  # fmt: skip


# ---- Checks of one set of runs -------------------------------------------------------------------
def check_complete(e: Evidence, track: Track | None) -> Iterator[Finding]:
    for text in e.unreadable:
        yield fail(f"no log: {text}")
    for run in e.runs:
        if run.ended not in ("end of schedule", "target reached"):
            yield fail(f"{plain(run.name)}: {run.ended}")
    interrupted = sorted((e.folder / "unfinished").glob("*.txt"))
    for path in interrupted:
        try:
            seen = runs.read(path).validations
        except runs.Unreadable:
            continue
        if seen and seen[-1].step == seen[-1].steps:
            yield fail(f"{plain(path.name)}, in unfinished/, had its final loss: it counts")
    if interrupted:
        yield note(f"{len(interrupted)} interrupted and run again; their logs are in unfinished/")


def check_length(e: Evidence, track: Track | None) -> Iterator[Finding]:
    """A run that stops when it likes its loss has a loss that it likes."""
    for run in e.ended:
        last, target = run.validations[-1], run.config and run.config.get("target")
        if run.ended == "target reached" or last.step != last.steps:
            text = f"{plain(run.name)} stopped at its target, step {last.step} of {last.steps}"
            yield fail(f"{text}: no p-value over such runs; use --target 0")
        elif run.ours and target != 0:
            yield fail(f"{plain(run.name)} could have stopped at {plain(target)}; use --target 0")
    if len({tuple((v.step, v.steps) for v in run.validations) for run in e.ended}) > 1:
        yield fail("the runs validate at different steps, or differ in length")


def check_twice(e: Evidence, track: Track | None) -> Iterator[Finding]:
    """Repeats of one run look like many runs with hardly any deviation."""
    seen: dict[Any, Run] = {}
    for run in e.runs:
        trace = *(v.loss for v in run.validations), run.result and run.loss
        if not run.result and len(trace) < 5:  # four digits of two losses may be equal by chance
            trace = None
        keys = {"is the same log as": run.sha256, "has the seed of": run.seed,
                "has, at every step, the losses of": trace}  # fmt: skip
        for text, key in keys.items():
            first = seen.setdefault((text, key), run)
            if key is not None and first is not run:
                yield fail(f"{plain(run.name)} {text} {plain(first.name)}")
                break
    if any(run.seed is None for run in e.runs):
        yield note("seeds: the logs state none")


def check_source(e: Evidence, track: Track | None) -> Iterator[Finding]:
    sources = {run.source for run in e.runs}
    if len(sources) > 1:
        yield fail(
            f"{len(sources)} different sources: {', '.join(s[:12] for s in sorted(sources))}"
        )
    if e.source and sources != {e.source}:
        yield fail("train_gpt.py is not the source that the logs state")
    is_patch = (e.folder / "change.patch").is_file()
    if not (e.source or is_patch) and any(run.packed for run in e.runs):
        yield note("the source is not beside the logs, which state its sha256 only")


def differing(several: list[Run], names: str) -> Iterator[Finding]:
    for name in names.split():
        values = [getattr(run, name) for run in several]
        if any(value != values[0] for value in values):
            if isinstance(values[0], dict) and all(isinstance(value, dict) for value in values):
                keys = {key for value in values for key in value}
                parts = [k for k in sorted(keys) if len({str(v.get(k)) for v in values}) > 1]
                yield fail(f"different {name}: {', '.join(plain(part) for part in parts)}")
            else:
                found = sorted({plain(value) for value in values})
                yield fail(f"different {name}: {' / '.join(found)}")


def check_machine(e: Evidence, track: Track | None) -> Iterator[Finding]:
    yield from differing(e.runs, "devices driver versions environment")
    if not e.runs[0].devices:
        yield note("devices: the logs state none")


def check_settings(e: Evidence, track: Track | None) -> Iterator[Finding]:
    yield from differing(e.runs, "argv config data")


def check_text(e: Evidence, track: Track | None) -> Iterator[Finding]:
    """What a track fixes: the tokens, of training and of validation, and the devices."""
    run = e.runs[0]
    if not track:
        return
    if run.devices and not (all(re.fullmatch(track.devices, device) for device in run.devices)
                            and track.count in (None, len(run.devices))):  # fmt: skip
        yield fail(f"not the track's devices: {len(run.devices)} x {plain(run.devices[0])}")
    if not run.ours:
        text = "data, flags and environment: the logs of modded-nanogpt do not state them"
        yield note(text) if track.preset == "record" else fail(text)
        return
    if run.config.get("val_tokens") != track.val_tokens:
        yield fail(f"validated on {plain(run.config.get('val_tokens'))} tokens, "
                   f"not {track.val_tokens:,}")  # fmt: skip
    shas = hashes(run)
    if shas[-1:] != [track.val]:
        yield fail("validated on another text than the track's")
    if not shas[:-1] or shas[:-1] != list(track.train[: len(shas) - 1]):
        yield fail("trained on another stream of tokens than the track's")
    for other in e.ended:
        tokens = scheduled_tokens(other.config, other.steps)
        if tokens is None:
            yield note("tokens: as RESULT states them; its configuration does not tell")
        elif other.tokens != tokens:
            yield fail(f"{plain(other.name)} counts {other.tokens:,} tokens, its schedule "
                       f"{tokens:,}")  # fmt: skip


def scheduled_tokens(config: dict[str, Any], steps: int) -> int | None:
    """Of a whole run, as its configuration has them; None: it does not tell."""
    try:
        # "sequences" is its name in logs of November 2026.
        batch = operator.index(config.get("sequences", config.get("batch")))
        if "stages" not in config:
            return batch * operator.index(config["T"]) * steps
        rows = [[int(n) for n in row.split()[:2]] for row in config["stages"].split("/")]
        rows, at, end, tokens = [row for row in rows if row[0]], 0, 0, 0
        written = sum(n for n, _ in rows)
        for i, (n, each) in enumerate(rows, 1):  # in proportion and never none, as Config.ends
            at, start = at + n, end
            share = round(at * steps / written)
            end = i + max(start - i + 1, min(max(share - i, 0), steps - len(rows)))
            tokens += (end - start) * (each // batch * batch)
        return tokens
    except (ArithmeticError, AttributeError, KeyError, TypeError, ValueError):
        return None


def hashes(run: Run) -> list[Any]:
    """sha256 of the shards that a run read, validation last."""
    return [shard.get("sha256") for shard in run.data or [] if isinstance(shard, dict)]


def check_flags(e: Evidence, track: Track | None) -> Iterator[Finding]:
    """That the file alone makes the record."""
    run = e.runs[0]
    if not track or not run.ours:
        return
    if run.argv != [track.preset, "--target", "0"]:
        yield fail(f"run with {plain(' '.join(run.argv), 200)}; a record is what the file does "
                   f"with {track.preset} --target 0")  # fmt: skip
    for name in run.environment:
        if not NEUTRAL.fullmatch(name):
            yield fail(f"{plain(name)} is set, outside of the file")


def check_plan(e: Evidence, track: Track | None) -> Iterator[Finding]:
    """How many runs is decided before the first one: otherwise one stops when luck is good."""
    plan = e.plan
    if not plan:
        text = "no plan: that n was fixed beforehand cannot be seen"
        yield fail(f"{text}; use run_ab.py") if e.runs[0].ours else note(text)
        return
    if plan["n"] != len(e.runs) + len(e.unreadable):
        yield fail(f"planned {plan['n']} runs, found {len(e.runs) + len(e.unreadable)}")
    if strange := {run.seed for run in e.runs} - set(plan["seeds"]):
        yield fail(f"seeds that were not planned: {sorted(strange, key=str)}")
    if {run.source for run in e.runs} != {plan["arms"][e.arm]}:
        yield fail("another source than planned")
    if any(run.argv != plan["arguments"] for run in e.runs):
        yield fail("other flags than planned")
    if any(run.began is None for run in e.runs):
        yield fail("the name of a log does not say when its run began")
    if any(run.began and run.began < plan["created"] for run in e.runs):
        yield fail("a run began before the plan was made")


def numbers(e: Evidence, target: float | None) -> dict[str, Any]:
    """Of two complete runs or more, all that result.json says of them."""
    p = stats.below(e.losses, target).p if target is not None else None
    return dict(n=len(e.runs), mean=fmean(e.losses), sd=stdev(e.losses), p=p, target=target,
                seconds=fmean(e.seconds), seconds_sd=stdev(e.seconds), steps=e.ended[0].steps,
                tokens=e.ended[0].tokens, seeds=[run.seed for run in e.ended],
                source=e.ended[0].source)  # fmt: skip


def differing_facts(said: Any, truth: dict[str, Any]) -> Iterator[Finding]:
    """Where a result.json differs from what the logs say."""
    for key, value in truth.items():
        claim = said.get(key) if isinstance(said, dict) else None
        if isinstance(value, float) and isinstance(claim, float):
            same = math.isclose(claim, value, rel_tol=1e-9)
        else:
            same = claim == value
        if not same:
            yield fail(f"result.json says {key} = {plain(claim)}; it is {plain(value)}")


def check_result_file(e: Evidence, target: float | None) -> Iterator[Finding]:
    """result.json against the logs."""
    if e.result is not None and len(e.losses) > 1:
        yield from differing_facts(e.result, numbers(e, target))


CHECKS: dict[str, Callable[[Evidence, Track | None], Iterator[Finding]]] = {
    "every run is complete": check_complete,
    "fixed length, same validations": check_length,
    "no run twice": check_twice,
    "one source": check_source,
    "one machine, versions, environment": check_machine,
    "one set of flags and data": check_settings,
    "the track's text and devices": check_text,
    "nothing but the file": check_flags,
    "as many runs as planned": check_plan,
}


# ---- Checks of two sets --------------------------------------------------------------------------
def check_baseline(this: Evidence, base: Evidence) -> Iterator[Finding]:
    """Whether two sets differ by their sources alone."""
    a, b = this.runs[0], base.runs[0]
    yield from differing([a, b], "devices driver versions environment argv")
    if {run.sha256 for run in this.runs} & {run.sha256 for run in base.runs}:
        yield fail("a log is in both")
    x, y = hashes(a), hashes(b)
    if x[-1:] != y[-1:]:
        yield fail("validated on different texts")
    if any(m != n for m, n in zip(x[:-1], y[:-1], strict=False)):  # one may need fewer shards
        yield fail("trained on different streams of tokens")
    if a.source == b.source:
        yield note("the two have one source")
    times = [[run.began for run in e.runs if run.began] for e in (this, base)]
    day = datetime.timedelta(days=1)
    if not all(times):
        yield note("when the runs began: the logs do not state it")
    elif max(times[0]) - min(times[1]) > day or max(times[1]) - min(times[0]) > day:
        yield note("the runs of the two are more than a day apart")
    if a.ours and not interleaved(this, base):
        yield note("the two are from different plans: their runs were not interleaved")


def interleaved(this: Evidence, base: Evidence) -> bool:
    """Whether both are arms of one plan."""
    plans = [e.plan and {k: v for k, v in e.plan.items() if k != "arm"} for e in (this, base)]
    return plans[0] is not None and plans[0] == plans[1]


def by_seed(this: Evidence, base: Evidence) -> tuple[list[float], list[float]]:
    """Losses of the seeds that both have run, in the same order."""
    a, b = ({run.seed: run.loss for run in e.ended if run.seed is not None} for e in (this, base))
    common = sorted({*a} & {*b})
    return [a[seed] for seed in common], [b[seed] for seed in common]


# ---- Report --------------------------------------------------------------------------------------
def spread(values: list[float], digits: int) -> str:
    """mean ± standard deviation"""
    deviation = f" ± {stdev(values):.{digits}f}" if len(values) > 1 else ""
    return f"{fmean(values):.{digits}f}{deviation}" if values else "–"


def row(*cells: Any) -> str:
    return f"| {' | '.join(str(cell) for cell in cells)} |"


def p_value(p: float | None) -> str:
    return "–" if p is None or math.isnan(p) else f"{p:.4f}" if p >= 0.001 else f"{p:.1e}"


def summary(e: Evidence, track: Track | None, target: float | None) -> dict[str, str]:
    """What the runs of a set say together, by name, as text."""
    done, losses = e.ended, e.losses
    planned = f" of {e.plan['n']} planned" if e.plan else ""
    steps = sorted({run.steps for run in done})
    tokens = sorted({run.tokens for run in done if run.tokens})
    facts = {
        "runs": f"{len(e.runs) + len(e.unreadable)}{planned}",
        "steps": ", ".join(f"{n:,}" for n in steps),
        "tokens": ", ".join(f"{n:,}" for n in tokens) or "not stated",
        "final loss, mean ± sd": spread(losses, 5),
        "training time, s": spread(e.seconds, 2),
        "ms a step": f"{1000 * fmean(e.seconds) / steps[0]:.2f}" if done and steps[0] else "–",
    }
    if target is None or len(losses) < 2:
        return facts
    if any(finding.fails for finding in check_length(e, track)):
        return facts | {
            f"p(mean < {target:g}), t-test": "none: the length of the runs is not fixed"
        }
    mean, sd, n = fmean(losses), stdev(losses), len(losses)
    test, margin = stats.below(losses, target), target - mean
    facts[f"p(mean < {target:g}), t-test"] = f"{p_value(test.p)} (t = {test.t:.3f})"
    facts["margin"] = f"{margin:.5f}"
    if track:
        z = margin * math.sqrt(n)
        facts["z rule"] = f"margin · √n = {z:.4f}; {track.z_rule:g} is p < 0.001"
    effect = margin / sd if sd else math.nan
    needed = stats.runs_needed(effect)
    facts["runs for 80 % power"] = f"{needed}" if needed else "more than 10,000, or none suffice"
    return facts


def comparison(this: Evidence, base: Evidence) -> list[str]:
    """Rows that tell the two apart; differences are this minus baseline."""
    lines = ["", row("this − baseline", "difference", "test"), row("---", "---", "---")]
    pairs = by_seed(this, base)
    if len(pairs[0]) > 1:
        test = stats.paired(*pairs)
        change = spread([a - b for a, b in zip(*pairs, strict=True)], 5)
        what = f"two-sided p = {p_value(test.p)}, t = {test.t:.2f}, {len(pairs[0])} pairs"
        lines.append(row("final loss, paired by seed", change, what))
    values = {"final loss": (this.losses, base.losses, 5),
              "training time, s": (this.seconds, base.seconds, 3)}  # fmt: skip
    for name, (a, b, digits) in values.items():
        if a and b:
            test = stats.welch(a, b)
            what = f"Welch, one-sided (this is less): p = {p_value(test.p)}, t = {test.t:.2f}, "
            what += f"df = {test.df:.1f}"
            lines.append(row(name, f"{fmean(a) - fmean(b):+.{digits}f}", what))
    tokens = [{run.tokens for run in e.ended} for e in (this, base)]
    if all(len(counts) == 1 and None not in counts for counts in tokens):
        (a,), (b,) = tokens
        lines.append(row("tokens", f"{a - b:+,}", f"{a / b - 1:+.1%}, no deviation"))
    return lines


def check_result(
    this: Evidence, base: Evidence | None, track: Track | None, target: float | None
) -> Iterator[Finding]:
    """Whether the mean is below the target, and the baseline beaten."""
    if target is not None:
        losses = this.losses
        test = stats.below(losses, target)
        if len(losses) < 2:
            yield fail(f"{len(losses)} complete runs: no p-value")
        elif math.isnan(test.p):
            yield fail("the losses do not vary: no p-value")
        elif any(finding.fails for finding in check_length(this, track)):
            yield fail("no p-value over runs whose length is not fixed")
        elif not test.p < ALPHA:
            yield fail(f"p = {p_value(test.p)} for a mean below {target:g}; it takes p < {ALPHA}")
        elif track and target - fmean(losses) < track.margin:
            yield note(f"the margin is less than {track.margin:g}: on another machine it may fail")
    if not base or not track:
        return
    if track.metric == "time":
        p = stats.welch(this.seconds, base.seconds).p
        if not p < ALPHA:
            yield fail(f"not faster than the baseline: p = {p_value(p)}, it takes p < {ALPHA}")
    else:
        a, b = ({run.tokens for run in e.ended} for e in (this, base))
        if not (a and b) or None in a | b:
            yield note("tokens: the logs do not state them")
        elif max(a) >= min(b):
            yield fail(f"no fewer tokens than the baseline: {max(a):,} against {min(b):,}")


def judge(
    this: Evidence, base: Evidence | None, track: Track | None, target: float | None
) -> tuple[bool, dict[str, list[Finding]]]:
    """Whether it holds, and what every check found."""
    found = {name: list(check(this, track)) for name, check in CHECKS.items()}
    if this.result is not None:
        found["result.json says what the logs say"] = list(check_result_file(this, target))
    if base:
        for name, check in CHECKS.items():
            found[name] += [Finding(fails, f"baseline: {text}")
                            for fails, text in check(base, track)]  # fmt: skip
        found["the baseline differs by its source alone"] = list(check_baseline(this, base))
    found["the result"] = list(check_result(this, base, track, target))
    return not any(x.fails for findings in found.values() for x in findings), found


def report(
    this: Evidence, base: Evidence | None, name: str | None, target: float | None
) -> tuple[bool, str]:
    """The judgement, and the Markdown that gives reasons."""
    track = TRACKS.get(name)
    holds, found = judge(this, base, track, target)
    sets = [summary(e, track, target) for e in (this, base) if e]
    lines = [f"## {'PASS' if holds else 'FAIL'}: {plain(this.folder.resolve().name)}", ""]
    lines += [row("", "this", *["baseline"] * bool(base)), row("---", *["---"] * len(sets))]
    lines += [row(key, *(facts.get(key, "–") for facts in sets)) for key in sets[0]]
    if base:
        lines += comparison(this, base)
    lines += ["", row("check", "found"), row("---", "---")]
    for check, findings in found.items():
        verdicts = [("**FAIL** " if x.fails else "note: ") + x.text for x in findings]
        lines.append(row(check, "<br>".join(verdicts) or "ok"))
    lines += ["", row("run", "seed", "final loss", "time, s"), row("---", "---", "---", "---")]
    for run in this.ended:
        seed = "–" if run.seed is None else run.seed
        lines.append(row(plain(run.name), seed, f"{run.loss:.5f}", f"{run.seconds:.2f}"))
    return holds, "\n".join(lines)


# ---- Many arms -----------------------------------------------------------------------------------
def check_patch(arm: Evidence, first: Evidence) -> Iterator[Finding]:
    """Whether the patch that stands beside an arm's logs makes its source from the first arm's."""
    patch, source = arm.folder / "change.patch", first.folder / "train_gpt.py"
    if patch.is_file() and source.is_file():
        try:
            text = runs.patched(source.read_bytes(), patch)
        except ValueError as error:
            yield fail(plain(str(error), 200))
            return
        if {hashlib.sha256(text).hexdigest()} != {run.source for run in arm.runs}:
            yield fail("change.patch does not make the source that the logs state")


def compared(arm: Evidence, first: Evidence) -> dict[str, Any]:
    """What result.json says of an arm, compared with the first one, pair by pair of equal seeds."""
    facts = numbers(arm, None)
    if arm is first:
        return facts
    pairs = by_seed(arm, first)
    changes = [a - b for a, b in zip(*pairs, strict=True)]
    if len(changes) < 2:
        return facts
    p = stats.paired(*pairs).p
    return facts | dict(difference=fmean(changes), difference_sd=stdev(changes),
                        p=None if math.isnan(p) else p)  # fmt: skip


def study(folder: Path) -> tuple[bool, str]:
    """Every arm of a plan against its first one: losses paired by seed, and what is wrong."""
    names = list(read_plan(folder / "plan.json")["arms"])
    arms = [collect(folder / name) for name in names]
    result = read_result(folder / "result.json")
    track = TRACKS.get(infer_track(arms[0]))
    lines = [row("arm", "runs", "final loss", "difference", "of one pair, sd", "p"),
             row("---", "---", "---", "---", "---", "---")]  # fmt: skip
    holds, remarks = True, []
    for name, arm in zip(names, arms, strict=True):
        found = [x for check in CHECKS.values() if check is not check_flags
                 for x in check(arm, track)]  # fmt: skip
        found += check_patch(arm, arms[0])
        cells = [name, len(arm.ended), spread(arm.losses, 4), "", "", ""]
        if arm is not arms[0]:
            found += check_baseline(arm, arms[0])
            cells[3:] = "–", "–", "–"
        if len(arm.losses) > 1:
            facts = compared(arm, arms[0])
            if "difference" in facts:
                cells[3:] = (f"{facts['difference']:+.4f}", f"{facts['difference_sd']:.4f}",
                             p_value(facts["p"]))  # fmt: skip
            if result is not None:
                found += differing_facts(result.get("arms", {}).get(name), facts)
        lines.append(row(*cells))
        holds &= not any(x.fails for x in found)
        remarks += [f"- {name}: {'**FAIL** ' if x.fails else 'note: '}{x.text}" for x in found]
    return holds, "\n".join([*lines, *[""] * bool(remarks), *remarks])


def infer_track(this: Evidence) -> str | None:
    """The track of a set of runs, by what they are; of several the one with their text."""
    run = this.runs[0]
    preset = run.config.get("preset") if run.ours else "record"
    fits = (name for name, track in TRACKS.items() if track.preset == preset
            and track.count in (None, len(run.devices)))  # fmt: skip
    return min(fits, key=lambda name: [TRACKS[name].val] != hashes(run)[-1:], default=None)


def main(argv: list[str]) -> int:
    cli = argparse.ArgumentParser(description=__doc__, allow_abbrev=False,
                                  formatter_class=argparse.RawDescriptionHelpFormatter)  # fmt: skip
    cli.add_argument("this", type=Path, help="folder with logs")
    cli.add_argument("baseline", type=Path, nargs="?", help="the same, of what is to be beaten")
    cli.add_argument("--track", choices=TRACKS, help="default: what the runs look like")
    cli.add_argument("--target", type=float, help="loss; judged by it alone, by no track's rules")
    args = cli.parse_args(argv)
    if args.target is not None and not 0 < args.target < math.inf:
        cli.error("--target must be a loss")
    try:
        is_plan = (args.this / "plan.json").is_file() and not (args.this / "logs").is_dir()
        if is_plan and not args.baseline:
            holds, text = study(args.this)
        else:
            this = collect(args.this)
            base = collect(args.baseline) if args.baseline else None
            name = args.track or (infer_track(this) if args.target is None else None)
            if name is None and args.target is None:
                raise Unusable("these runs look like those of no track: add --track or --target")
            target = TRACKS[name].target if name and args.target is None else args.target
            holds, text = report(this, base, name, target)
    except Unusable as error:
        print(f"verify.py: {printable(str(error))}", file=sys.stderr)
        return 2
    print(text)
    return 0 if holds else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
