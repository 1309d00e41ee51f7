"""Judges runs by their logs: see records/README.md. It executes nothing that it reads.

    ./run.sh verify THIS [BASELINE] [--track NAME] [--target LOSS]

THIS and BASELINE are folders with logs: a record, a variant of ./run.sh compare, or any folder with
logs of train_gpt.py or modded-nanogpt; or one log, whose report says what a record needs beside it.
If THIS is the folder of a whole plan of ./run.sh compare, all variants are compared with the first
one. The report is Markdown. The exit status is 0 if the runs hold, 1 if they do not, and 2 if they
cannot be judged. No error ends with 0 or 1, and neither does a report that nobody read to its end.
"""

# ruff: noqa: E402 - a handler comes before most imports
import signal

if __name__ == "__main__" and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C ends it at once, also while it imports

import argparse
import hashlib
import itertools
import json
import math
import os
import re
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parent))  # for PYTHONSAFEPATH=1
import runs
import stats
from optimizers import contest
from runs import Run, Unreadable

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "run"))
from statistics import fmean, stdev  # runs.py refuses a Python that lacks fmean

import fits
import messages  # runs.py adds its folder to the path

ALPHA = 0.01
PLAN = {  # the form of a plan: see runs.require()
    "created": str,
    "n": int,
    "seeds": [int],
    "arguments": [str],
    "arms": {str: str},
}
RECORD_FITS = [row for row in fits.FITS if "bigrams" not in row[0]]  # others are another model
# Environment variables that a record's runs may have: they do not change what is computed.
NEUTRAL = re.compile(
    "JAX_COMPILATION_CACHE_DIR|JAX_PLATFORMS|CUDA_(VISIBLE_DEVICES|DEVICE_ORDER|VERSION|HOME|PATH)"
    "|NVIDIA_(VISIBLE_DEVICES|DRIVER_CAPABILITIES|REQUIRE_.*|PRODUCT_NAME)|(NCCL|CUDNN)_VERSION"
    "|TF_CPP_MIN_LOG_LEVEL|TPU_SKIP_MDS_QUERY|XLA_CLIENT_MEM_FRACTION|GLIBC_TUNABLES"
)
NEUTRAL_XLA_FLAGS = {  # run/launch.py sets them
    "--xla_gpu_first_collective_call_terminate_timeout_seconds=600",
    "--xla_cpu_experimental_ynn_fusion_type=",
}


class Track(NamedTuple):
    """What all records of a track share."""

    presets: tuple[str, ...]  # a run has one of them
    metric: str  # what a record has less of: "time", "tokens" or "steps"
    target: float  # nats
    z_margin: float  # margin * sqrt(n) at which a z-test has p = 0.001, the sd being known; nats
    margin: float  # wanted between mean and target, nats: machines differ by about as much
    devices: str  # a regular expression that every device's name matches
    count: int | None  # of devices; None: any
    val_tokens: int
    shards: str  # the first 16 digits of the sha256 of shards of data/, validation last
    more_shards: bool = False  # training reads further ones, whose sha256 nobody here knows
    may_fit: bool = False  # run/launch.py may add flags where memory is short
    val_T: int | None = None  # tokens in a validation sequence; None: any
    max_parameters: int | None = None
    word: str | None = None  # the preset on a command line, where it is not that of the log
    model: dict[str, Any] = {}  # what the config must have, by name


FINEWEB = dict(
    presets=("record", "record92"), metric="time", target=3.28, z_margin=0.004, margin=0.001,
    val_tokens=10485760,
    shards="771fa4a99b9fe094 d4ba8d2d740905a8 f70fa272369730fd d8d88850f89fe203 36cef3fc41863eb6 "
           "d80e5b209983e636 fa9f94dce61686b5 5b95c8e0966f0861",
)  # fmt: skip
# Over 22 runs, upstream's standard deviation is 0.0007, about half of the first track's.
MEDIUM = dict(presets=("medium",), target=2.92, z_margin=0.0022, more_shards=True)
TINY = dict(presets=("tiny",), metric="tokens", margin=0.005, devices="cpu", count=None,
            val_tokens=65536, val_T=1024, max_parameters=5_000_000)  # fmt: skip
CODE = "1a9b61a147d894ec 74c2d9b68d4d17bd eb0c3850de1d7907"  # data/source_code.py
TRACKS = {
    "8xh100": Track(**FINEWEB, devices="NVIDIA H100 80GB HBM3", count=8),
    "1xgpu": Track(**FINEWEB, devices="NVIDIA .*", count=1, may_fit=True),
    "8xh100-medium": Track(**FINEWEB | MEDIUM, devices="NVIDIA H100 80GB HBM3", count=8),
    "tiny-2k": Track(**TINY, target=1.38, z_margin=0.033, shards=CODE),
    "tiny": Track(**TINY, target=1.49, z_margin=0.031,  # closed; its documents were not cut
                  shards="799fdc6b6b565b8b f83ec25b395b239c f7a55403e5071ae3"),
    "optimizers-tiny": Track(
        presets=("optimizers-tiny",), word="tiny", metric="steps", target=1.84, z_margin=0.060,
        margin=0.005, devices="cpu", count=None, val_tokens=32768, shards=CODE,
        model=dict(goal=1.84, vocab=384, layers=2, D=64, K=32, T=128, batch=4, compute="float32"),
    ),
    "optimizers-124m": Track(
        **FINEWEB | dict(presets=("optimizers-124m",), metric="steps"), word="124m",
        devices="(?!cpu).*", count=None, more_shards=True,
        model=dict(goal=3.28, vocab=50304, layers=12, D=768, K=128, T=1024, batch=512,
                   compute="bfloat16"),
    ),
}  # fmt: skip
# The sha256 of train_gpt_simple.py without its section "Optimizer", in all versions with records.
PLAIN = {
    "7d2a48d6cdd73ef06acaa1459550d79cfbb5f8dc90093b38004c4f36338b63a0",
}


# ---- Reading -------------------------------------------------------------------------------------
class Evidence(NamedTuple):
    """A folder with the logs of one variant, and the files beside them; or one log."""

    folder: Path
    runs: list[Run]  # all that can be read, in the order in which they began
    unreadable: list[str]  # the other logs, with the reasons
    plan: dict[str, Any] | None  # plan.json; its "arm" is the name of this variant in its "arms"

    @property
    def ended(self) -> list[Run]:
        """The runs that came to their end."""
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
        """Their numbers of training tokens, sorted, without repeats."""
        return sorted({run.tokens for run in self.ended if run.tokens})


def read_logs(folder: Path) -> tuple[list[Run], list[str]]:
    """Returns all runs of a folder, and what is wrong with the logs that cannot be read."""
    found = []
    unreadable = []
    for path in runs.log_files(folder):
        try:
            found.append(runs.read(path))
        except Unreadable as error:
            unreadable.append(f"{path.name}: {error}")
    for path in runs.left_out(folder):
        unreadable.append(
            f"{path.relative_to(folder)}: it may be a log, but its name or its place is not that "
            "of the others: rename it, or move it away"
        )
    return found, unreadable


def collect(folder: Path) -> Evidence:
    """Reads the logs of a folder and the files beside them, or one log; raises Unreadable without
    a log."""
    if not folder.exists():
        place = "" if folder.is_absolute() else f" in {Path.cwd()}, from where paths are looked for"
        raise Unreadable(f"{folder} does not exist{place}: name a folder with logs, or a log")
    if not folder.is_dir():
        try:
            return Evidence(folder, [runs.read(folder)], [], read_plan(folder))
        except Unreadable as error:
            raise Unreadable(f"{folder} is no log: {error}") from None
    found, unreadable = read_logs(folder)
    if not found and not unreadable:
        raise Unreadable(f"{folder} has no logs, which are files *.txt{those_below(folder)}")
    if not found:
        why = "; ".join(unreadable[:2])
        if len(unreadable) > 2:
            why += f"; and {len(unreadable) - 2} more"
        raise Unreadable(f"{folder} has no log that can be read: {why}")
    return Evidence(folder, found, unreadable, read_plan(folder))


def those_below(folder: Path) -> str:
    """Names folders of a folder that have logs, as the end of a sentence."""
    found = {path.parent for path in (*folder.glob("*/*.txt"), *folder.glob("*/logs.tar.xz"))}
    found |= {path.parent.parent for path in folder.glob("*/logs/*.txt")}
    names = [str(path) for path in sorted(found)]
    more = ", or another one" if len(names) > 3 else ""
    return f": name {' or '.join(names[:3])}{more}" if names else ": name a folder that has some"


def read_plan(folder: Path) -> dict[str, Any] | None:
    """Returns the plan of a variant; None without one. A record has plan.json in its folder, with
    its name there as "arm"; run_ab.py writes plan.json above the folders of the variants."""
    for plan in plans_near(folder):
        if plan["arm"] in plan["arms"]:
            return plan
    return None


def plans_near(folder: Path) -> Iterator[dict[str, Any]]:
    """Yields the plans in a folder and above it, with the name that the folder has in each."""
    path = folder.resolve()
    for file in (folder / "plan.json", path.parent / "plan.json"):
        if os.path.lexists(file):  # a link that leads nowhere is named when it is opened
            plan = dict(arm=path.name) | read_plan_file(file)
            runs.require(plan["arm"], str, f"arm of {file}")
            yield plan


def read_plan_file(file: Path) -> dict[str, Any]:
    """Returns a plan. Plans of earlier versions lack `flags` and `added`."""
    plan = dict(flags={}, added={}) | runs.read_json(file, PLAN)
    runs.require(plan, {"flags": {str: [str]}, "added": {str: str}}, str(file))
    if not plan["arms"]:
        raise Unreadable(f"{file} has no variants")
    text = json.dumps(plan, ensure_ascii=False)
    if r"\u0000" in text or re.search("[\ud800-\udfff]", text):
        raise Unreadable(f"{file} has a character that no argument and no file's name can have")
    for time in (plan["created"], *plan["added"].values()):
        if not re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ", time):
            raise Unreadable(f"{file} has {time!r} for a time like 2026-11-21T12:59:00Z")
    return plan


# ---- Checks of one set of runs: they yield what they find ----------------------------------------
class Finding(NamedTuple):
    """Something that a check has found."""

    fails: bool  # False: a note
    text: str

    def __str__(self) -> str:
        return f"**FAIL** {self.text}" if self.fails else f"note: {self.text}"


def fail(text: str) -> Finding:
    """Makes a finding that fails the runs."""
    return Finding(True, text)


def note(text: str) -> Finding:
    """Makes a finding that only the reader has to know of."""
    return Finding(False, text)


def check_complete(e: Evidence, track: Track | None) -> Iterator[Finding]:
    """Every run came to its end, in one process, and none with a final loss was thrown away."""
    for text in e.unreadable:
        yield fail(f"unreadable log {text}")
    for run in e.runs:
        if not run.complete:
            where = ""
            if run.validations and run.validations[-1].step < run.steps:
                where = f", after the loss of step {run.validations[-1].step} of {run.steps}"
            yield fail(f"{run.name}: {run.ended}{where}")
    for run in e.ended:
        if run.resumed:
            yield fail(f"{run.name}: resumed, so its time is a sum over several processes; repeat "
                       "it without a break")  # fmt: skip
    if os.path.lexists(e.folder / "unfinished"):
        yield from check_unfinished(e.folder / "unfinished")


def check_unfinished(folder: Path) -> Iterator[Finding]:
    """No run with a final loss was declared to be interrupted."""
    logs = runs.log_files(folder)
    for path in logs:
        try:
            run = runs.read(path)
        except Unreadable as error:
            if runs.states_result(path.read_bytes()):
                what = f"{path.name}, in unfinished/, has a RESULT"
                yield fail(f"{what}, but cannot be read: {error}")
            continue
        if run.validations and run.validations[-1].step == run.steps:
            yield fail(f"{run.name}, in unfinished/, had its final loss: it counts")
    for path in runs.left_out(folder):
        yield fail(f"{path.name}, in unfinished/, may be a log, but is not read: rename it")
    if logs:
        n = len(logs)
        yield note(f"runs that were interrupted and repeated: {n}; their logs are in unfinished/")


def check_length(e: Evidence, track: Track | None) -> Iterator[Finding]:
    """No run could stop when its loss was low: the mean of such losses is always low."""
    for run in e.ended:
        target = run.config.get("target") if run.ours else 0
        if target != 0 or run.ended == "target reached":
            yield fail(
                f"{run.name} could have stopped at {target}, so it has no p-value; use --target 0"
            )
    validated = {tuple((v.step, v.steps) for v in run.validations) for run in e.ended}
    if len(validated) > 1:
        yield fail("the runs validate at different steps, or differ in length")
    if len(e.tokens) > 1:
        yield fail(f"the runs count different tokens: {shown(e.tokens)}")


def check_twice(e: Evidence, track: Track | None) -> Iterator[Finding]:
    """No run is counted twice: repeats look like many runs with hardly any deviation."""
    for a, b in itertools.combinations(e.runs, 2):
        if a.log_sha256 == b.log_sha256:
            yield fail(f"{b.name} is the same log as {a.name}")
        elif a.seed is None and a.validations == b.validations:
            yield fail(f"{b.name} has, at every step, the loss and the time of {a.name}")
        elif a.seed is not None and a.seed == b.seed:
            yield fail(f"{b.name} has the seed of {a.name}")
        # Few losses of four decimals, as in some logs of upstream, may be equal by chance.
        elif all_losses(a) == all_losses(b) and (a.ours or len(a.validations) > 3):
            yield fail(f"{b.name} has, at every step, the losses of {a.name}")
    if any(run.seed is None for run in e.runs):
        yield note("the logs do not state seeds")


def all_losses(run: Run) -> list[float]:
    """Returns the losses of all validations, and the final loss with all its digits."""
    return [*(v.loss for v in run.validations), run.loss]


def check_source(e: Evidence, track: Track | None) -> Iterator[Finding]:
    """All runs have one source: train_gpt.py beside the logs, or the file of a record that
    train_gpt.sha256 names."""
    sources = sorted({run.source_sha256 for run in e.runs})
    if len(sources) > 1:
        yield fail(f"{len(sources)} different sources: {', '.join(sha[:12] for sha in sources)}")
    try:
        file = runs.source_file(e.folder)
    except Unreadable as error:
        yield fail(str(error))
        return
    if os.path.lexists(file) and sources != [runs.source_hash(file)]:
        yield fail("train_gpt.py is not the source that the logs state")


def differing(several: list[Run], names: Iterable[str]) -> Iterator[Finding]:
    """Finds the facts of these names that are not the same in all runs."""
    for name in names:
        values = [getattr(run, name) for run in several]
        if all(value == values[0] for value in values):
            continue
        found = " / ".join(sorted({shown(value)[:60] for value in values}))
        if all(isinstance(value, dict) for value in values):
            keys = sorted(set().union(*values))
            found = ", ".join(key for key in keys if len({str(v.get(key)) for v in values}) > 1)
        yield fail(f"different {name}: {found}")


def shown(value: Any) -> str:
    """Returns what a log states as text: the parts of a list side by side."""
    if value is None:
        return "not stated"
    if not isinstance(value, list):
        return json.dumps(value, ensure_ascii=False)
    parts = [part.get("sha256", "")[:16] if isinstance(part, dict) else str(part) for part in value]
    return " ".join(parts)


def check_machine(e: Evidence, track: Track | None) -> Iterator[Finding]:
    """All runs are of one kind of machine, with the same versions and environment."""
    yield from differing(e.runs, MACHINE)


def check_settings(e: Evidence, track: Track | None) -> Iterator[Finding]:
    """All runs have the same flags, configuration and data."""
    yield from differing(e.runs, ["argv", "config", "data"])


def check_track(e: Evidence, track: Track | None) -> Iterator[Finding]:
    """The runs have what their track fixes: devices, and tokens of training and of validation."""
    run = e.runs[0]
    if not track:
        return
    kinds = "/".join(sorted({*run.devices}))
    fits_count = track.count is None or len(run.devices) == track.count
    if not run.devices:
        text = "the logs do not state devices"
        yield fail(text) if run.ours else note(text)
    elif not fits_count or not re.fullmatch(track.devices, kinds):
        yield fail(f"not the track's devices: {len(run.devices)} x {kinds}")
    if not run.ours:
        text = "logs of modded-nanogpt do not state data, flags and environment"
        if track.metric == "time":
            yield note(text)
        else:
            yield fail(text)
        return
    n = run.config.get("val_tokens")
    if n != track.val_tokens:
        yield fail(f"validated on {n} tokens, not {track.val_tokens:,}")
    val_T = run.config.get("val_T")
    if track.val_T and val_T != track.val_T:
        yield fail(f"validated on sequences of {val_T} tokens, not {track.val_T:,}")
    if track.max_parameters and run.parameters > track.max_parameters:
        yield fail(f"{run.parameters:,} parameters, and the track allows {track.max_parameters:,}")
    train, val = shards(run)
    track_shards = track.shards.split()
    if val != track_shards[-1]:
        yield fail("validated on another text than the track's")
    known = track_shards[:-1]
    further = train[len(known) :]
    is_prefix = bool(train) and train[: len(known)] == known[: len(train)]
    repeats = len({*train, val}) <= len(train)
    if not is_prefix or repeats or (further and not track.more_shards):
        yield fail("trained on another stream of tokens than the track's")
    elif further:
        numbers = f"{len(known) + 1} to {len(train)}"
        yield note(f"compare the sha256 of training shards {numbers} with the data set's page")


def check_model(e: Evidence, track: Track | None) -> Iterator[Finding]:
    """On a track of optimizers, all else is that of train_gpt_simple.py. This finds names that the
    section replaces. Python has other ways to change the model, so a reviewer reads the section."""
    if not track or not track.model:
        return
    config = e.runs[0].config or {}
    for name, value in track.model.items():
        if config.get(name) != value:
            yield fail(f"{name} is {config.get(name)}, not the track's {value}")
    try:
        source = runs.source_text(e.folder)
        plain = contest.outside(source.decode("utf-8", "replace"))
    except messages.Fault as error:
        yield fail(f"nothing shows which model ran: {error}")
        return
    if {hashlib.sha256(source).hexdigest()} != {run.source_sha256 for run in e.runs}:
        yield fail("the source that can be compared is not the source that the logs state")
    sha256 = hashlib.sha256(plain.encode()).hexdigest()
    if sha256 not in PLAIN:
        yield fail(
            "outside its section Optimizer, the source is not records/optimizers/"
            f"train_gpt_simple.py, but has sha256 {sha256[:16]}"
        )
        return
    _, section, _ = contest.parts(source.decode("utf-8", "replace"))
    try:
        contest.check_text(section, Path("section Optimizer"), plain)
    except messages.Fault as error:
        yield fail(str(error))


def shards(run: Run) -> tuple[list[str], str | None]:
    """Returns the training shards that a run read, in their order, and its validation shard (None
    where the log states no data), named as a track names them."""
    names = [shard.get("sha256", "")[:16] for shard in run.data or []]
    if not names:
        return [], None
    return names[:-1], names[-1]


def check_flags(e: Evidence, track: Track | None) -> Iterator[Finding]:
    """The file alone makes the record, without flags or variables that change what it does."""
    run = e.runs[0]
    if not track or not run.ours:
        return
    rows = RECORD_FITS if track.may_fit else RECORD_FITS[:1]  # the first has no flags
    words = [track.word] if track.word else track.presets
    typed = [[word, "--target", "0"] for word in words]
    if variant_flags(e) or not any(is_fitted(run.argv, argv, rows) for argv in typed):
        yield fail(f"run with {' '.join(run.argv)}; a record is what the file does with "
                   f"{' or '.join(words)} --target 0")  # fmt: skip
    for name, value in run.environment.items():
        if not is_neutral(name, value):
            yield fail(
                f"{name} is set; unset it, because no variable may change what the file does"
            )


def is_neutral(name: str, value: str) -> bool:
    """Returns whether a record's runs may have a variable of the environment with this value."""
    by_launcher = name == "XLA_FLAGS" and NEUTRAL_XLA_FLAGS.issuperset(value.split())
    return by_launcher or bool(NEUTRAL.fullmatch(name))


def is_fitted(argv: list[str], typed: list[str], rows: Iterable[tuple]) -> bool:
    """Returns whether these are the arguments that were typed and the flags of one of the rows,
    which run/launch.py has added; a row may have none."""
    return any(argv == [*typed, *fits.command_line(flags).split()] for flags, _ in rows)


def check_plan(e: Evidence, track: Track | None) -> Iterator[Finding]:
    """The number of runs was decided before the first: else one could stop when luck is good."""
    plan = e.plan
    if not plan:
        text = "there is no plan, so nothing shows that n was fixed beforehand"
        for other in plans_near(e.folder):
            names = ", ".join(other["arms"])
            text = f"plan.json has no variant {other['arm']}, only {names}"
        if e.runs[0].ours:
            yield fail(f"{text}; use ./run.sh compare")
        else:
            yield note(text)
        return
    n = len(e.runs) + len(e.unreadable)
    seeds = set(plan["seeds"])
    if n != plan["n"] or n != len(seeds):
        yield fail(f"planned {plan['n']} runs with {len(seeds)} seeds, found {n}")
    strange = {run.seed for run in e.runs} - seeds
    if strange:
        yield fail(f"seeds that were not planned: {shown(sorted(strange, key=str))}")
    if {run.source_sha256 for run in e.runs} != {plan["arms"][plan["arm"]]}:
        yield fail("another source than planned")
    flags = variant_flags(e)
    if flags:
        yield note(f"run with the flags {' '.join(flags)}")
    typed = [*plan["arguments"], *flags]
    if not all(is_fitted(run.argv, typed, fits.FITS) for run in e.runs):
        yield fail("other flags than planned")
    created = plan["added"].get(plan["arm"], plan["created"]).replace(":", "-")
    if any(run.began is None or run.began + "Z" < created for run in e.runs):
        yield fail("a run began before the plan was made, or its log's name does not give the time")


def variant_flags(e: Evidence) -> list[str]:
    """Returns the flags that a plan gives to the runs of this variant alone."""
    return e.plan["flags"].get(e.plan["arm"], []) if e.plan else []


def check_seeds(e: Evidence, track: Track | None) -> Iterator[Finding]:
    """The seeds were fresh: a variant that was added to a plan has seeds with known losses."""
    if track and is_added(e):
        yield fail("it was added to a plan whose seeds had been used; make another plan with it")


def is_added(e: Evidence) -> bool:
    """Returns whether a variant was added to its plan later."""
    return bool(e.plan) and e.plan["arm"] in e.plan["added"]


MACHINE = "devices", "driver", "versions", "environment"
CHECKS = {
    "every run is complete": check_complete,
    "fixed length, same validations": check_length,
    "no run twice": check_twice,
    "one source": check_source,
    "one machine, versions, environment": check_machine,
    "one set of flags and data": check_settings,
    "the track's text and devices": check_track,
    "the track's model": check_model,
    "no flags, no environment variables": check_flags,
    "as many runs as planned": check_plan,
    "fresh seeds": check_seeds,
}
ONLY_FOR_RECORDS = check_flags, check_seeds  # not for comparisons


# ---- Checks of two sets --------------------------------------------------------------------------
def check_baseline(this: Evidence, base: Evidence) -> Iterator[Finding]:
    """Two sets of runs differ by their sources alone."""
    a = this.runs[0]._replace(argv=shared_argv(this))
    b = base.runs[0]._replace(argv=shared_argv(base))
    yield from differing([a, b], [*MACHINE, "argv"])
    if {run.log_sha256 for run in this.runs} & {run.log_sha256 for run in base.runs}:
        yield fail("a log is in both sets")
    train_a, val_a = shards(a)
    train_b, val_b = shards(b)
    both = min(len(train_a), len(train_b))  # fewer steps may need fewer training shards
    if val_a != val_b or train_a[:both] != train_b[:both]:
        yield fail("different data")
    if a.source_sha256 == b.source_sha256 and variant_flags(this) == variant_flags(base):
        yield note("both have the same source")
    runs_of_both = this.runs + base.runs
    if any(run.began is None for run in runs_of_both):
        yield note("the logs do not state when the runs began")
    else:
        days = sorted({run.began[:10] for run in runs_of_both})
        if len(days) > 1:
            yield note(f"the runs are from {len(days)} days: {', '.join(days)}")
    if a.ours and not interleaved(this, base):
        yield note("the two are from different plans, or one was added to the plan later, so their "
                   "runs were not interleaved")  # fmt: skip


def shared_argv(e: Evidence) -> list[str] | None:
    """Returns the arguments of the first run without those that a plan gives to this variant."""
    argv = e.runs[0].argv
    flags = variant_flags(e)
    if flags and argv:
        start = len(e.plan["arguments"])
        argv = argv[:start] + argv[start + len(flags) :]
    return argv


def interleaved(this: Evidence, base: Evidence) -> bool:
    """Returns whether both are variants of one plan from its beginning: their plans differ in
    nothing but "arm"."""
    if not this.plan or not base.plan or is_added(this) or is_added(base):
        return False
    return {**this.plan, "arm": None} == {**base.plan, "arm": None}


def changes(this: Evidence, base: Evidence) -> list[float]:
    """Returns the losses of this minus those of base, for every seed that both have run."""
    a = losses_by_seed(this)
    b = losses_by_seed(base)
    return [a[seed] - b[seed] for seed in sorted(a.keys() & b.keys())]


def losses_by_seed(e: Evidence) -> dict[int, float]:
    """Returns the final losses of the runs whose logs state a seed."""
    return {run.seed: run.loss for run in e.ended if run.seed is not None}


def check_result(this: Evidence, base: Evidence | None, track: Track | None, target: float):
    """The mean is below the target, and the baseline is beaten."""
    n = len(this.losses)
    p = stats.below(this.losses, target).p
    length_not_fixed = any(check_length(this, track))
    if math.isnan(p):
        why = "the losses do not vary" if n > 1 else f"{n or 'no'} complete run"
        yield fail(f"{why}, so there is no p-value")
    elif length_not_fixed:
        yield fail("there is no p-value over runs whose length is not fixed")
    elif p >= ALPHA:
        yield fail(f"p = {p_value(p)} for a mean below {target:g}, and it takes p < {ALPHA}")
    elif track and target - fmean(this.losses) < track.margin:
        yield note(f"the margin is less than {track.margin:g}, so it may fail on another machine")
    if not base or not track:
        return
    if track.metric == "time":
        p = stats.welch(this.seconds, base.seconds).p
        if math.isnan(p) or p >= ALPHA:
            yield fail(f"not faster than the baseline: p = {p_value(p)}, and it takes p < {ALPHA}")
        return
    if track.metric == "steps":  # whatever a step costs
        most = max((run.steps for run in this.ended), default=0)
        least = min((run.steps for run in base.ended), default=0)
        if most >= least:
            yield fail(f"no fewer steps than the baseline: {most:,} against {least:,}")
        return
    most = max(this.tokens, default=0)
    least = min(base.tokens, default=0)
    if most >= least:
        yield fail(f"no fewer tokens than the baseline: {most:,} against {least:,}")
    if not this.ended or not base.ended or not interleaved(this, base):
        return
    seconds = fmean(this.seconds)
    allowed = fmean(base.seconds)
    if seconds > allowed:
        yield fail(f"a run takes longer than the baseline's: {seconds:.1f} s against {allowed:.1f}")


# ---- Report --------------------------------------------------------------------------------------
def spread(values: list[float], digits: int) -> str:
    """Returns mean ± standard deviation as text; a dash without values."""
    if not values:
        return "–"
    deviation = f" ± {stdev(values):.{digits}f}" if len(values) > 1 else ""
    return f"{fmean(values):.{digits}f}{deviation}"


def p_value(p: float | None) -> str:
    """Returns p as text; a dash where there is none."""
    if p is None or math.isnan(p):
        return "–"
    return f"{p:.4f}" if p >= 0.001 else f"{p:.1e}"


def table(title: Iterable[str], rows: Iterable[Iterable]) -> list[str]:
    """Returns the lines of a Markdown table, with an empty line after it."""
    title = list(title)
    lines = [title, ["---"] * len(title), *rows]
    return [*(f"| {' | '.join(map(str, cells))} |".replace("\n", " ") for cells in lines), ""]


def summary(e: Evidence, track: Track | None, target: float) -> dict[str, str]:
    """Returns facts of a set of runs, by name, as text."""
    planned = f" of {e.plan['n']} planned" if e.plan else ""
    steps = sorted({run.steps for run in e.ended})
    facts = {
        "runs": f"{len(e.runs) + len(e.unreadable)}{planned}",
        "steps": ", ".join(f"{n:,}" for n in steps),
        "tokens": ", ".join(f"{n:,}" for n in e.tokens) or "not stated",
        "final loss, mean ± standard deviation": spread(e.losses, 5),
        "training time, s": spread(e.seconds, 2),
        "milliseconds per step": f"{1000 * fmean(e.seconds) / steps[0]:.2f}" if steps else "–",
    }
    if len(e.losses) < 2:
        return facts
    name = f"p of a t-test: mean below {target:g}"
    if any(check_length(e, track)):
        facts[name] = "none: the length of the runs is not fixed"
        return facts
    test = stats.below(e.losses, target)
    margin = target - fmean(e.losses)
    sd = stdev(e.losses)
    facts[name] = f"{p_value(test.p)} (t = {test.t:.3f})"
    facts["margin: target minus mean"] = f"{margin:.5f}"
    if track:
        z = margin * math.sqrt(len(e.losses))
        facts["z-test with the track's standard deviation"] = (
            f"margin · √runs = {z:.4f}; p < 0.001 needs {track.z_margin:g}"
        )
    needed = stats.runs_needed(margin / sd) if sd else None
    facts["runs needed for an 80 % chance to pass"] = str(needed or "over 10,000, or none suffice")
    return facts


def comparison(this: Evidence, base: Evidence) -> Iterator[tuple[str, str, str]]:
    """Yields rows of a table: what is compared, this minus baseline, the test."""
    pairs = changes(this, base)
    if len(pairs) > 1:
        test = stats.paired(pairs)
        p = p_value(test.p)
        what = f"t-test of {len(pairs)} pairs, two-sided: p = {p}, t = {test.t:.2f}"
        yield "final loss, paired by seed", spread(pairs, 5), what
    for name, kind, digits in ("final loss", "losses", 5), ("training time, s", "seconds", 3):
        a = getattr(this, kind)
        b = getattr(base, kind)
        if a and b:
            test = stats.welch(a, b)
            what = f"p = {p_value(test.p)}, t = {test.t:.2f}, df = {test.df:.1f}"
            change = f"{fmean(a) - fmean(b):+.{digits}f}"
            yield name, change, f"Welch's t-test, one-sided (this is less): {what}"


def report(
    this: Evidence, base: Evidence | None, track: Track | None, target: float, why_track: str = ""
) -> tuple[bool, str]:
    """Returns whether the runs hold, and the report with the reasons. why_track is a sentence about
    the track, for the reader."""
    found = {name: list(check(this, track)) for name, check in CHECKS.items()}
    if base:
        for name, check in CHECKS.items():
            for finding in check(base, track):
                found[name].append(finding._replace(text=f"baseline: {finding.text}"))
        found["the baseline differs by its source alone"] = list(check_baseline(this, base))
    found["the result"] = list(check_result(this, base, track, target))
    holds = not any(finding.fails for findings in found.values() for finding in findings)

    columns = {"this": summary(this, track, target)}
    if base:
        columns["baseline"] = summary(base, track, target)
    facts = []
    for name in columns["this"]:
        facts.append([name, *(column.get(name, "–") for column in columns.values())])
    checks = []
    for name, findings in found.items():
        checks.append([name, "<br>".join(map(str, findings)) or "ok"])
    runs_table = []
    for run in this.ended:
        seed = "–" if run.seed is None else run.seed
        runs_table.append([run.name, seed, f"{run.loss:.5f}", f"{run.seconds:.2f}"])

    lines = [f"## {'PASS' if holds else 'FAIL'}: {this.folder.resolve().name}", ""]
    if why_track:
        lines += [why_track, ""]
    lines += table(["", *columns], facts)
    if base:
        lines += table(["this − baseline", "difference", "test"], comparison(this, base))
    lines += table(["check", "found"], checks)
    lines += table(["run", "seed", "final loss", "training time, s"], runs_table)
    return holds, "\n".join(lines[:-1])


def study(folder: Path) -> tuple[bool, str]:
    """Compares every variant of a plan with the first one, seed by seed. Returns whether nothing is
    wrong, and the report."""
    plan = read_plan_file(folder / "plan.json")
    variants = {name: collect(folder / name) for name in plan["arms"]}
    first_name = list(variants)[0]
    first = variants[first_name]
    track_name = infer_track(first)
    track = TRACKS.get(track_name)
    rows = []
    seeds = []
    remarks = []
    if track:
        remarks = [f"- note: the rules are those of track {track_name}, which fits {first_name}"]
    holds = True
    for name, variant in variants.items():
        found = []
        for check in CHECKS.values():
            if check not in ONLY_FOR_RECORDS:
                found += check(variant, track)
        cells = ["", "", ""]
        if variant is not first:
            found += check_baseline(variant, first)
            pairs = changes(variant, first)
            cells = ["–", "–", "–"]
            if len(pairs) > 1:
                p = p_value(stats.paired(pairs).p)
                cells = [f"{fmean(pairs):+.4f}", f"{stdev(pairs):.4f}", p]
            seeds.append([name, " ".join(f"{change:+.3f}" for change in pairs)])
        row = [name, len(variant.ended), spread(variant.losses, 4), *cells]
        if track and track.metric == "steps":
            steps = sorted({run.steps for run in variant.ended})
            row.insert(2, ", ".join(f"{n:,}" for n in steps))
            row.append(p_value(stats.below(variant.losses, track.target).p))
        rows.append(row)
        holds = holds and not any(finding.fails for finding in found)
        remarks += [f"- {name}: {finding}" for finding in found]
    title = [
        "variant",
        "runs",
        "final loss, mean ± standard deviation",
        f"mean difference from {first_name}",
        "standard deviation of differences",
        "p of a paired t-test",
    ]
    if track and track.metric == "steps":
        title.insert(2, "steps")
        title.append(f"p: mean below {track.target:g}")
    lines = table(title, rows)
    lines += table(["variant", "difference, seed by seed"], seeds)
    return holds, "\n".join(lines + remarks)


def infer_track(this: Evidence) -> str | None:
    """Returns the track that has the runs' preset and number of devices; if there are several, the
    one whose validation text they have, else the first. Logs of modded-nanogpt do not state it."""
    run = this.runs[0]
    if not run.ours:
        return None
    preset = run.config.get("preset")
    fitting = []
    for name, track in TRACKS.items():
        if preset in track.presets and track.count in (None, len(run.devices)):
            fitting.append(name)
    _, val = shards(run)
    for name in fitting:
        if TRACKS[name].shards.split()[-1] == val:
            return name
    return fitting[0] if fitting else None


def is_plan(folder: Path) -> bool:
    """Returns whether a folder is that of a whole plan, with a folder for every variant."""
    file = folder / "plan.json"
    has_logs = any(os.path.lexists(folder / name) for name in ("logs", "logs.tar.xz"))
    if has_logs or not os.path.lexists(file):
        return False
    variants = [folder / name for name in read_plan_file(file)["arms"]]
    return any(path.is_dir() for path in variants) or not runs.loose_logs(folder)


def judge(args: argparse.Namespace) -> tuple[bool, str]:
    """Returns whether the runs that the command line names hold, and the report."""
    if is_plan(args.this) and not args.baseline:
        if args.track or args.target:
            raise Unreadable(
                f"{args.this} is a whole plan, which takes no --track and no --target: leave them "
                "out, or name the folder of one variant"
            )
        return study(args.this)
    this = collect(args.this)
    base = collect(args.baseline) if args.baseline else None
    name = args.track
    why = f"The track is {name}, as --track states."
    if not name and args.target:
        why = "Without --track, the rules of a track are not checked."
    elif not name:
        name = infer_track(this)
        why = f"The track is {name}, which fits these runs: --track names another."
    if not name and not args.target:
        if not this.runs[0].ours:
            raise Unreadable("logs of modded-nanogpt do not state their track: add --track 8xh100, "
                             "or another track, or --target LOSS")  # fmt: skip
        raise Unreadable("these runs do not fit any track: add --track or --target")
    track = TRACKS.get(name)
    return report(this, base, track, args.target or track.target, why)


def main(argv: list[str]) -> int:
    """Judges the runs that the command line names; returns the exit status."""
    cli = messages.Parser(prog="./run.sh verify", description=__doc__)
    cli.add_argument("this", type=Path, help="folder of the runs to judge, or a log")
    cli.add_argument("baseline", type=Path, nargs="?", help="folder of the runs to beat")
    names = f"one of {', '.join(TRACKS)}; default: the track that fits runs of train_gpt.py; those "
    names += "of modded-nanogpt need it, or --target"
    cli.add_argument("--track", choices=TRACKS, metavar="NAME", help=names)
    cli.add_argument("--target", type=float, help="loss that the mean must be below; without "
                     "--track, the rules of a track are not checked")  # fmt: skip
    args = cli.parse_args(argv)
    if args.target is not None and not 0 < args.target < math.inf:
        cli.error("--target must be a loss above 0")
    holds, text = judge(args)
    print(text)
    return 0 if holds else 1


if __name__ == "__main__":
    is_closed = sys.stdout is None
    with messages.one_line("verify.py", status=2):
        if is_closed:
            raise Unreadable("stdout is closed, so nobody could read the report: open it")
        verdict = main(sys.argv[1:])
    sys.exit(verdict)
