"""Judges runs by their logs: see records/README.md. It executes nothing that it reads.

    ./run.sh verify THIS [BASELINE] [--target LOSS]

THIS and BASELINE are folders with logs: a record, a variant of a stage of ./run.sh attempt, or any
folder with logs of train_gpt.py; or one log, whose report says what a record needs beside it.
If THIS is the folder of a whole stage, all variants are compared with the first one. The report is
Markdown. The exit status is 0 if the runs hold, 1 if they do not, and 2 if they cannot be judged.
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

sys.path.insert(0, str(Path(__file__).resolve().parent))  # for PYTHONSAFEPATH=1
import runs
import stats
from runs import Run, Unreadable

sys.path.append(str(Path(__file__).resolve().parents[1] / "data"))
import messages  # noqa: E402

ALPHA = 0.01
# What run/launch.py may add to a command where memory is short: the same text in shorter sequences.
FITS = ("", "--batch 16 --head_chunk 8192", "--batch 32 --head_chunk 4096 --val_T 65536")
# Where there is very little, it adds another size of the n-gram table, too, which is another model.
FITTED = re.compile(r"(--(batch|head_chunk|val_T|bigrams|ngram\w*) \d+ ?)*")
# Environment variables that a record's runs may have: they do not change what is computed.
NEUTRAL = re.compile(
    "JAX_COMPILATION_CACHE_DIR|JAX_PLATFORMS|CUDA_(VISIBLE_DEVICES|DEVICE_ORDER|VERSION|HOME|PATH)"
    "|NVIDIA_(VISIBLE_DEVICES|DRIVER_CAPABILITIES|REQUIRE_.*|PRODUCT_NAME)|(NCCL|CUDNN)_VERSION"
    "|TF_CPP_MIN_LOG_LEVEL|TPU_SKIP_MDS_QUERY|XLA_CLIENT_MEM_FRACTION|GLIBC_TUNABLES"
)
NEUTRAL_XLA_FLAGS = {  # run.sh sets them
    "--xla_gpu_first_collective_call_terminate_timeout_seconds=600",
    "--xla_cpu_experimental_ynn_fusion_type=",
}


class Track(NamedTuple):
    """What all records of a track share."""

    presets: tuple[str, ...]  # a run has one of them
    metric: str  # what a record has less of: "time", "tokens" or "steps"
    target: float  # nats
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
    presets=("record", "record92"), metric="time", target=3.28, margin=0.001,
    val_tokens=10485760,
    shards="771fa4a99b9fe094 d4ba8d2d740905a8 f70fa272369730fd d8d88850f89fe203 36cef3fc41863eb6 "
           "d80e5b209983e636 fa9f94dce61686b5 5b95c8e0966f0861",
)  # fmt: skip
MEDIUM = dict(presets=("medium",), target=2.92, more_shards=True)
TINY = dict(presets=("tiny",), metric="tokens", margin=0.005, devices="cpu", count=None,
            val_tokens=65536, val_T=1024, max_parameters=5_000_000)  # fmt: skip
CODE = "1a9b61a147d894ec 74c2d9b68d4d17bd eb0c3850de1d7907"  # data/source_code.py
TRACKS = {
    "8xh100": Track(**FINEWEB, devices="NVIDIA H100 80GB HBM3", count=8),
    "1xgpu": Track(**FINEWEB, devices="NVIDIA .*", count=1, may_fit=True),
    "8xh100-medium": Track(**FINEWEB | MEDIUM, devices="NVIDIA H100 80GB HBM3", count=8),
    "tiny-2k": Track(**TINY, target=1.38, shards=CODE),
    "tiny": Track(**TINY, target=1.49,  # closed; its documents were not cut
                  shards="799fdc6b6b565b8b f83ec25b395b239c f7a55403e5071ae3"),
    "optimizers-tiny": Track(
        presets=("optimizers-tiny",), word="tiny", metric="steps", target=1.84,
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
    "614d83f8a4161a5e48ab9ad7c406858f3f31e400fb30fa4220c137f2fcd2c580",
}


# ---- Reading -------------------------------------------------------------------------------------
class Evidence(NamedTuple):
    """A folder with the logs of one variant, and the files beside them; or one log."""

    folder: Path
    runs: list[Run]  # all that can be read, in the order in which they began
    unreadable: list[str]  # the other logs, with the reasons
    plan: dict[str, Any] | None  # plan.json; its "arm" is the name of this variant in its "arms"
    ended: list[Run]  # the runs that came to their end
    losses: list[float]  # their final losses
    seconds: list[float]  # their training times
    tokens: list[int]  # their numbers of training tokens, sorted, without repeats


def collect(folder: Path) -> Evidence:
    """Reads the logs of a folder and the files beside them, or one log; raises Unreadable without
    a log that can be read."""
    found = []
    unreadable = []
    for path in runs.log_files(folder) if folder.is_dir() else [folder]:
        try:
            found.append(runs.read(path))
        except Unreadable as error:
            unreadable.append(f"{path.name}: {error}")
    if not found:
        why = (
            f": {unreadable[0]}"
            if unreadable
            else ", files *.txt (of an attempt, its stages have them)"
        )
        raise Unreadable(f"{folder} has no logs that can be read{why}")
    ended = [run for run in found if run.complete]
    losses = [run.loss for run in ended]
    seconds = [run.seconds for run in ended]
    tokens = sorted({run.tokens for run in ended if run.tokens})
    return Evidence(folder, found, unreadable, read_plan(folder), ended, losses, seconds, tokens)


def read_plan(folder: Path) -> dict[str, Any] | None:
    """Returns the plan of a variant; None without one. A record has plan.json in its folder, with
    its name there as "arm"; attempt.py writes plan.json above the folders of the variants."""
    name = folder.resolve().name
    for file in (folder / "plan.json", folder.resolve().parent / "plan.json"):
        if file.is_file():
            plan = dict(arm=name, flags={}) | json.loads(file.read_text("utf-8"))
            if plan["arm"] in plan["arms"]:
                return plan
    return None


def variants_of(folder: Path) -> dict[str, Evidence]:
    """Reads the variants of a whole plan that have a log, by name."""
    plan = json.loads((folder / "plan.json").read_text("utf-8"))
    return {name: collect(folder / name) for name in plan["arms"] if runs.log_files(folder / name)}


# ---- Checks of one set of runs: they yield what they find ----------------------------------------
FAIL = "**FAIL** "


def fail(text: str) -> str:
    """Makes a finding that fails the runs; others are notes."""
    return FAIL + text


def check_complete(e: Evidence, track: Track | None) -> Iterator[str]:
    """Every run came to its end, in one process, and none with a final loss was thrown away."""
    for text in e.unreadable:
        yield fail(f"unreadable log {text}")
    for run in e.runs:
        if not run.complete:
            yield fail(f"{run.name}: {run.ended}")
        elif run.resumed:
            yield fail(f"{run.name}: resumed, so its time is a sum over several processes")
    if not (e.folder / "unfinished").is_dir():
        return
    interrupted = runs.log_files(e.folder / "unfinished")
    yield f"note: runs that were interrupted and repeated: {len(interrupted)}"
    for log in interrupted:
        if runs.has_final_loss(log):
            yield fail(f"{log.name}, in unfinished/, had its final loss: it counts")


def check_length(e: Evidence, track: Track | None) -> Iterator[str]:
    """No run could stop when its loss was low: the mean of such losses is always low."""
    for run in e.ended:
        target = run.config.get("target")
        if target != 0 or run.ended == "target reached":
            yield fail(f"{run.name} could have stopped at {target}: use --target 0")
    validated = {tuple((v.step, v.steps) for v in run.validations) for run in e.ended}
    if len(validated) > 1:
        yield fail("the runs validate at different steps, or differ in length")
    if len(e.tokens) > 1:
        yield fail(f"the runs count different tokens: {e.tokens}")


def check_twice(e: Evidence, track: Track | None) -> Iterator[str]:
    """No run is counted twice: repeats look like many runs with hardly any deviation."""
    for a, b in itertools.combinations(e.runs, 2):
        if a.log_sha256 == b.log_sha256:
            yield fail(f"{b.name} is the same log as {a.name}")
        elif a.seed == b.seed:
            yield fail(f"{b.name} has the seed of {a.name}")
        elif a.loss == b.loss:
            yield fail(f"{b.name} has the final loss of {a.name}, in all digits")


def check_source(e: Evidence, track: Track | None) -> Iterator[str]:
    """All runs have one source: train_gpt.py beside the logs, or the file of a record that
    train_gpt.sha256 names."""
    sources = sorted({run.source_sha256 for run in e.runs})
    if len(sources) > 1:
        yield fail(f"{len(sources)} different sources: {', '.join(sha[:12] for sha in sources)}")
    file = runs.source_file(e.folder)
    if file.is_file() and sources != [runs.source_hash(file)]:
        yield fail("train_gpt.py is not the source that the logs state")


def differing(several: list[Run], names: Iterable[str]) -> Iterator[str]:
    """Finds the facts of these names that are not the same in all runs."""
    for name in names:
        values = [getattr(run, name) for run in several]
        if all(value == values[0] for value in values):
            continue
        found = " / ".join(sorted({str(value)[:60] for value in values}))
        if all(isinstance(value, dict) for value in values):
            keys = sorted(set().union(*values))
            found = ", ".join(key for key in keys if len({str(v.get(key)) for v in values}) > 1)
        yield fail(f"different {name}: {found}")


def check_facts(e: Evidence, track: Track | None) -> Iterator[str]:
    """All runs are of one kind of machine, with the same versions, environment, flags and data."""
    yield from differing(e.runs, [*MACHINE, "argv", "config", "data"])
    if any(run.environment is None for run in e.runs):
        yield fail("a log does not state its environment: train by ./run.sh")


def check_track(e: Evidence, track: Track | None) -> Iterator[str]:
    """The runs have what their track fixes: devices, and tokens of training and of validation."""
    run = e.runs[0]
    if not track:
        return
    kinds = "/".join(sorted({*run.devices}))
    fits_count = track.count is None or len(run.devices) == track.count
    if not run.devices or not fits_count or not re.fullmatch(track.devices, kinds):
        yield fail(f"not the track's devices: {len(run.devices)} x {kinds}")
    n = run.config.get("val_tokens")
    if n != track.val_tokens:
        yield fail(f"validated on {n} tokens, not {track.val_tokens:,}")
    val_T = run.config.get("val_T")
    if track.val_T and val_T != track.val_T:
        yield fail(f"validated on sequences of {val_T} tokens, not {track.val_T:,}")
    if track.max_parameters and run.parameters > track.max_parameters:
        yield fail(f"{run.parameters:,} parameters, and the track allows {track.max_parameters:,}")
    train, val = shards(run)
    *known, known_val = track.shards.split()
    if val != known_val:
        yield fail("validated on another text than the track's")
    further = train[len(known) :]
    is_prefix = bool(train) and train[: len(known)] == known[: len(train)]
    repeats = len({*train, val}) <= len(train)
    if not is_prefix or repeats or (further and not track.more_shards):
        yield fail("trained on another stream of tokens than the track's")
    elif further:
        numbers = f"{len(known) + 1} to {len(train)}"
        yield f"note: compare the sha256 of training shards {numbers} with the data set's page"


def shards(run: Run) -> tuple[list[str], str]:
    """Returns the training shards that a run read, in their order, and its validation shard, named
    as a track names them."""
    *train, val = [shard["sha256"][:16] for shard in run.data]
    return train, val


def check_model(e: Evidence, track: Track | None) -> Iterator[str]:
    """On a track of optimizers, all else is that of train_gpt_simple.py. Python has ways to change
    the model from within the section, so a reviewer reads it."""
    if not track or not track.model:
        return
    for name, value in track.model.items():
        stated = e.runs[0].config.get(name)
        if stated != value:
            yield fail(f"{name} is {stated}, not the track's {value}")
    file = runs.source_file(e.folder)
    if not file.is_file() and (e.folder / "change.patch").is_file():
        return  # a variant of a packed comparison, which was checked before
    source = file.read_bytes()
    before, _, rest = source.partition(b"\n# ---- Optimizer: begin ")
    after = rest.partition(b"\n# ---- Optimizer: end ")[2]
    plain = before + b"\n# ---- Optimizer: end " + after
    if hashlib.sha256(plain).hexdigest() not in PLAIN:
        yield fail("outside its section Optimizer, the source is not records/optimizers' model")


def check_flags(e: Evidence, track: Track | None) -> Iterator[str]:
    """The file alone makes the record, without flags or variables that change what it does, with
    seeds whose losses nobody knew."""
    run = e.runs[0]
    if not track:
        return
    words = [track.word] if track.word else track.presets
    fits = FITS if track.may_fit else [""]
    allowed = [f"{word} --target 0 {added}".split() for word in words for added in fits]
    if variant_flags(e) or run.argv not in allowed:
        alone = f"a record is what the file does with {' or '.join(words)} --target 0"
        yield fail(f"run with {' '.join(run.argv)}; {alone}")
    for name, value in (run.environment or {}).items():
        if not is_neutral(name, value):
            yield fail(f"{name} is set, and no variable may change what the file does: unset it")


def is_neutral(name: str, value: str) -> bool:
    """Returns whether a record's runs may have a variable of the environment with this value."""
    by_launcher = name == "XLA_FLAGS" and NEUTRAL_XLA_FLAGS.issuperset(value.split())
    return by_launcher or bool(NEUTRAL.fullmatch(name))


def check_plan(e: Evidence, track: Track | None) -> Iterator[str]:
    """The number of runs was decided before the first: else one could stop when luck is good."""
    plan = e.plan
    if not plan:
        yield fail("there is no plan of these runs, so nothing shows that n was fixed beforehand")
        return
    n = len(e.runs) + len(e.unreadable)
    seeds = set(plan["seeds"])
    if n != plan["n"] or n != len(seeds):
        yield fail(f"planned {plan['n']} runs with {len(seeds)} seeds, found {n}")
    strange = {run.seed for run in e.runs} - seeds
    if strange:
        yield fail(f"seeds that were not planned: {sorted(strange)}")
    if {run.source_sha256 for run in e.runs} != {plan["arms"][plan["arm"]]}:
        yield fail("another source than planned")
    flags = variant_flags(e)
    if flags:
        yield f"note: run with the flags {' '.join(flags)}"
    typed = [*plan["arguments"], *flags]
    for argv in {tuple(run.argv) for run in e.runs}:
        added = " ".join(argv[len(typed) :])
        if list(argv[: len(typed)]) != typed or not FITTED.fullmatch(added):
            yield fail("other flags than planned")
    created = plan["created"].replace(":", "-")
    if any(run.began is None or run.began + "Z" < created for run in e.runs):
        yield fail("a run began before the plan was made, or its log's name does not give the time")


def variant_flags(e: Evidence) -> list[str]:
    """Returns the flags that a plan gives to the runs of this variant alone."""
    return e.plan["flags"].get(e.plan["arm"], []) if e.plan else []


MACHINE = "devices", "driver", "versions", "environment"
CHECKS = {
    "every run is complete": check_complete,
    "fixed length, same validations": check_length,
    "no run twice": check_twice,
    "one source": check_source,
    "one machine, environment, set of flags and data": check_facts,
    "the track's text and devices": check_track,
    "the track's model": check_model,
    "as many runs as planned": check_plan,
    "no flags, no environment variables, fresh seeds": check_flags,  # not for comparisons
}


# ---- Checks of two sets --------------------------------------------------------------------------
def check_baseline(this: Evidence, base: Evidence) -> Iterator[str]:
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
    if not interleaved(this, base):
        yield "note: they are not from one plan, so they were not interleaved"


def shared_argv(e: Evidence) -> list[str]:
    """Returns the arguments of the first run without those that a plan gives to this variant."""
    argv = e.runs[0].argv
    start = len(e.plan["arguments"]) if e.plan else 0
    return argv[:start] + argv[start + len(variant_flags(e)) :]


def interleaved(this: Evidence, base: Evidence) -> bool:
    """Returns whether both are variants of one plan: theirs differ in nothing but "arm"."""
    if not this.plan or not base.plan:
        return False
    return {**this.plan, "arm": None} == {**base.plan, "arm": None}


def changes(this: Evidence, base: Evidence) -> list[float]:
    """Returns the losses of this minus those of base, for every seed that both have run."""
    a = {run.seed: run.loss for run in this.ended}
    b = {run.seed: run.loss for run in base.ended}
    return [a[seed] - b[seed] for seed in sorted(a.keys() & b.keys())]


def check_result(
    this: Evidence, base: Evidence | None, track: Track | None, target: float
) -> Iterator[str]:
    """The mean is below the target, and the baseline is beaten."""
    n = len(this.losses)
    p = stats.below(this.losses, target).p
    if math.isnan(p):
        why = "the losses do not vary" if n > 1 else f"{n or 'no'} complete run"
        yield fail(f"{why}, so there is no p-value")
    elif any(check_length(this, track)):
        yield fail("there is no p-value over runs whose length is not fixed")
    elif p >= ALPHA:
        yield fail(f"p = {p_value(p)} for a mean below {target:g}, and it takes p < {ALPHA}")
    elif track and target - fmean(this.losses) < track.margin:
        yield f"note: the margin is less than {track.margin:g}, so it may fail on another machine"
    if base and track:
        yield from check_beaten(this, base, track)


def check_beaten(this: Evidence, base: Evidence, track: Track) -> Iterator[str]:
    """The runs take less time, fewer tokens or fewer steps than the baseline's."""
    if track.metric == "time":
        p = stats.welch(this.seconds, base.seconds).p
        if math.isnan(p) or p >= ALPHA:
            yield fail(f"not faster than the baseline: p = {p_value(p)}, and it takes p < {ALPHA}")
        return
    if not this.ended or not base.ended:
        return
    most = max(getattr(run, track.metric) for run in this.ended)
    least = min(getattr(run, track.metric) for run in base.ended)
    if most >= least:
        yield fail(f"no fewer {track.metric} than the baseline: {most:,} against {least:,}")
    if track.metric == "steps" or not interleaved(this, base):
        return  # a step may cost anything, and the times of two plans are not comparable
    if fmean(this.seconds) > fmean(base.seconds):
        yield fail("a run takes longer than the baseline's, in the mean")


# ---- Report --------------------------------------------------------------------------------------
def spread(values: list[float], digits: int) -> str:
    """Returns mean ± standard deviation as text; a dash without values."""
    if not values:
        return "–"
    deviation = f" ± {stdev(values):.{digits}f}" if len(values) > 1 else ""
    return f"{fmean(values):.{digits}f}{deviation}"


def p_value(p: float) -> str:
    """Returns p as text; a dash where there is none."""
    if math.isnan(p):
        return "–"
    return f"{p:.4f}" if p >= 0.001 else f"{p:.1e}"


def table(title: Iterable[str], rows: Iterable[Iterable]) -> list[str]:
    """Returns the lines of a Markdown table, with an empty line after it."""
    title = list(title)
    lines = [title, ["---"] * len(title), *rows]
    return [*(f"| {' | '.join(map(str, cells))} |".replace("\n", " ") for cells in lines), ""]


def step_counts(e: Evidence) -> str:
    """Returns the numbers of steps of the runs as text."""
    return ", ".join(f"{n:,}" for n in sorted({run.steps for run in e.ended}))


def summary(e: Evidence, track: Track | None, target: float) -> dict[str, str]:
    """Returns facts of a set of runs, by name, as text."""
    planned = f" of {e.plan['n']} planned" if e.plan else ""
    facts = {
        "runs": f"{len(e.runs) + len(e.unreadable)}{planned}",
        "steps": step_counts(e),
        "tokens": ", ".join(f"{n:,}" for n in e.tokens),
        "final loss, mean ± standard deviation": spread(e.losses, 5),
        "training time, s": spread(e.seconds, 2),
    }
    if len(e.losses) < 2 or any(check_length(e, track)):
        return facts
    name = f"p of a t-test: mean below {target:g}"
    test = stats.below(e.losses, target)
    facts[name] = f"{p_value(test.p)} (t = {test.t:.3f})"
    facts["margin: target minus mean"] = f"{target - fmean(e.losses):.5f}"
    return facts


def comparison(this: Evidence, base: Evidence) -> Iterator[tuple[str, str, str]]:
    """Yields rows of a table: what is compared, this minus baseline, the test."""
    pairs = changes(this, base)
    if len(pairs) > 1:
        p = p_value(stats.paired(pairs).p)
        what = f"t-test of {len(pairs)} pairs, two-sided: p = {p}"
        yield "final loss, paired by seed", spread(pairs, 5), what
    if this.seconds and base.seconds:
        p = p_value(stats.welch(this.seconds, base.seconds).p)
        difference = f"{fmean(this.seconds) - fmean(base.seconds):+.3f}"
        yield "training time, s", difference, f"Welch's t-test, one-sided (this is less): p = {p}"


def report(
    this: Evidence, base: Evidence | None, track: Track | None, target: float, rules: str = ""
) -> tuple[bool, str]:
    """Returns whether the runs hold, and the report with the reasons. rules is a sentence about the
    track, for the reader."""
    found = {name: list(check(this, track)) for name, check in CHECKS.items()}
    columns = {"this": summary(this, track, target)}
    if base:
        for name, check in CHECKS.items():
            found[name] += [f"{finding} (baseline)" for finding in check(base, track)]
        found["the baseline differs by its source alone"] = list(check_baseline(this, base))
        columns["baseline"] = summary(base, track, target)
    found["the result"] = list(check_result(this, base, track, target))
    holds = not any(text.startswith(FAIL) for texts in found.values() for text in texts)

    facts = []
    for name in columns["this"]:
        facts.append([name, *(column.get(name, "–") for column in columns.values())])
    checks = [[name, "<br>".join(texts) or "ok"] for name, texts in found.items()]
    rows = [[run.name, run.seed, f"{run.loss:.5f}", f"{run.seconds:.2f}"] for run in this.ended]
    lines = [f"## {'PASS' if holds else 'FAIL'}: {this.folder.resolve().name}", "", rules, ""]
    lines += table(["", *columns], facts)
    if base:
        lines += table(["this − baseline", "difference", "test"], comparison(this, base))
    lines += table(["check", "found"], checks)
    lines += table(["run", "seed", "final loss", "training time, s"], rows)
    return holds, "\n".join(lines[:-1])


def study(folder: Path) -> tuple[bool, str]:
    """Compares every variant of a plan with the first one, seed by seed. Returns whether nothing is
    wrong, and the report."""
    variants = variants_of(folder)
    first_name = list(variants)[0]
    first = variants[first_name]
    track_name = infer_track(first)
    track = TRACKS.get(track_name)
    remarks = []
    if track:
        remarks = [f"- note: the rules are those of track {track_name}, which fits {first_name}"]
    title = ["variant", "runs", "final loss, mean ± standard deviation"]
    title += [f"mean difference from {first_name}", "standard deviation of differences"]
    title.append("p of a paired t-test")
    counts_steps = bool(track) and track.metric == "steps"
    if counts_steps:
        title.insert(2, "steps")
        title.append(f"p: mean below {track.target:g}")
    rows = []
    for name, variant in variants.items():
        found = []
        for check in CHECKS.values():
            if check is not check_flags:
                found += check(variant, track)
        cells = ["", "", ""]
        if variant is not first:
            found += check_baseline(variant, first)
            pairs = changes(variant, first)
            cells = ["–", "–", "–"]
            if len(pairs) > 1:
                p = p_value(stats.paired(pairs).p)
                cells = [f"{fmean(pairs):+.4f}", f"{stdev(pairs):.4f}", p]
        row = [name, len(variant.ended), spread(variant.losses, 4), *cells]
        if counts_steps:
            row.insert(2, step_counts(variant))
            row.append(p_value(stats.below(variant.losses, track.target).p))
        rows.append(row)
        remarks += [f"- {name}: {text}" for text in found]
    holds = not any(FAIL in remark for remark in remarks)
    return holds, "\n".join(table(title, rows) + remarks)


def infer_track(this: Evidence) -> str | None:
    """Returns the track that has the runs' preset and number of devices; if there are several, the
    one whose validation text they have, else the first."""
    run = this.runs[0]
    _, val = shards(run)
    fitting = None
    for name, track in TRACKS.items():
        if run.config["preset"] in track.presets and track.count in (None, len(run.devices)):
            fitting = fitting or name
            if track.shards.endswith(val):
                return name
    return fitting


def is_plan(folder: Path) -> bool:
    """Returns whether a folder is that of a whole plan, with a folder for every variant."""
    file = folder / "plan.json"
    if not file.is_file() or runs.log_files(folder):
        return False
    return any((folder / name).is_dir() for name in json.loads(file.read_text("utf-8"))["arms"])


def judge(this: Path, baseline: Path | None = None, target: float = 0) -> tuple[bool, str]:
    """Returns whether the runs of a folder hold, and the report. The track is that which fits the
    runs, if there is no target. Raises Unreadable where they cannot be judged."""
    if is_plan(this) and not baseline and not target:
        return study(this)
    evidence = collect(this)
    base = collect(baseline) if baseline else None
    if target:
        return report(evidence, base, None, target, "There is no track.")
    name = infer_track(evidence)
    if not name:
        raise Unreadable("no track fits these runs: add --target LOSS")
    rules = f"The rules are those of track {name}."
    return report(evidence, base, TRACKS[name], TRACKS[name].target, rules)


def main(argv: list[str]) -> int:
    """Judges the runs that the command line names; returns the exit status."""
    form = argparse.RawDescriptionHelpFormatter
    cli = argparse.ArgumentParser(
        prog="./run.sh verify", description=__doc__, formatter_class=form, allow_abbrev=False
    )
    cli.error = messages.refuse
    cli.add_argument("this", type=Path, help="folder of the runs to judge, or a log")
    cli.add_argument("baseline", type=Path, nargs="?", help="folder of the runs to beat")
    cli.add_argument("--target", type=float, default=0, help="a loss, instead of a track's rules")
    args = cli.parse_args(argv)
    holds, text = judge(args.this, args.baseline, args.target)
    print(text, flush=True)
    return 0 if holds else 1


if __name__ == "__main__":
    with messages.one_line("verify.py"):
        try:
            sys.stdout.reconfigure(errors="backslashreplace")  # a terminal may lack ± and −
            status = main(sys.argv[1:])
        except Unreadable as error:
            messages.refuse(str(error))
    sys.exit(status)
