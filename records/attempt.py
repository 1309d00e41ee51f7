"""Tries an idea in one command, from a pilot to a judged folder: AGENTS.md says how to use it.

    ./run.sh attempt IDEA [--field value ...] [PRESET [--field value ...]] [options]

IDEA is a copy of train_gpt.py, a .patch for it, names of records/ideas/, an optimizer for
records/optimizers/, or nothing but flags, as in "--muon_lr x1.25". Flags before PRESET are the
idea's, and those after it are the baseline's as well. The same command goes on where an attempt was
stopped; once that has its verdict, it begins a second attempt, which is listed beside the first.
"""

import argparse
import ast
import errno
import fcntl
import hashlib
import json
import math
import os
import random
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import fmean, stdev
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parent))  # for PYTHONSAFEPATH=1
sys.path.insert(1, str(Path(__file__).resolve().parents[1] / "run"))
import idea
import pack
import runs
import stats
import verify
from launch import NEXT, load_script
from messages import one_line, refuse
from optimizers import contest

ROOT = Path(__file__).resolve().parents[1]
HERE = ROOT / "logs/attempts"
TRAINER = ROOT / "train_gpt.py"
SHORT = 0.85  # of the steps: a second length, for the slope
LEAST, MOST = 8, 40  # pairs of a certification
# Minutes of a leg with its start, a guess until one has been measured; and what fetches the tokens.
LEGS = {
    "tiny": (0.7, "data/source_code.py"),
    "small": (20, "data/cached_fineweb10B.py 1"),
    "record": (4, "data/cached_fineweb10B.py"),
    "medium": (30, "data/cached_fineweb10B.py 24"),
    "124m": (60, "data/cached_fineweb10B.py"),
}
# Fields that no idea may change, and functions that the verdict names if an idea changes them.
FIELDS = "data eot seed target val_T val_tokens vocab goal".split()
FUNCTIONS = (
    "validate val_step compile_val_step validated_params find_data open_shard shard_facts "
    "data_facts pack_documents find_documents read_batches batch_shapes find_batches read_batch"
).split()
RULE = """\
Each seed is run by baseline and idea in turn, and every round reverses their order.
No run stops at the target. One that diverges counts, and is not repeated.
A leg that crashes twice in a row ends the attempt, and so does an idea that diverges.
The pilot, {pairs} pairs, never shows that an idea is better. The attempt ends if the pilot's mean \
is not below 0, or if by its deviation p < 0.01 (chance 80 %) takes more pairs than {most} or than \
--budget and --runs leave.
Else the idea runs {short} steps, too, with the pilot's seeds. The line through both lengths gives \
the number of steps at which the mean is below the track's target by the margin of its rules, and \
by what p < 0.01 (chance 80 %) asks.
The certification has {least} pairs of fresh seeds, or as many as the pilot's deviation asks, at \
the baseline's {steps} steps; and the idea in that number of steps, if it is less.
Better: p < 0.01, one-sided, over these fresh pairs. Worse: the same the other way, in the pilot, \
too. All else is not shown."""
UTC = "%Y-%m-%dT%H:%M:%SZ"
FULL = "the disk is full: make room, and the same command goes on; nothing that was run is lost"


class Stop(Exception):
    """The rule ends an attempt before its last leg. The message gives the reason."""


# ---- The idea ------------------------------------------------------------------------------------
class Idea(NamedTuple):
    """What is tried, and beside what."""

    name: str
    arguments: list[str]  # of both: the preset and flags
    baseline: str  # its file
    sources: dict[str, bytes]  # of "baseline" and of the idea, by name; both have these steps
    steps: int
    remarks: list[str]  # for the reader, before anything runs


def read_settings(source: bytes, words: list[str]) -> tuple[Any, Any, dict[str, Any]]:
    """Executes a source's definitions, and has it read a command line, which it may refuse. Returns
    the script, the configuration, and all values by the names of their flags."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "train_gpt.py")
        file.write_bytes(source)
        script = load_script(file)
        parsed = script.parse_config(words)
    if len(parsed) == 2:  # (preset, Config) of train_gpt.py
        c = parsed[1]
        return script, c, vars(c) | {"steps": getattr(c, "total_steps", c.steps)}
    size, _, numbers = parsed  # of train_gpt_simple.py
    return script, size, vars(size) | numbers


def with_numbers(source: bytes, preset: str, numbers: dict[str, Any]) -> bytes:
    """A source whose preset has these numbers, so that its runs need no flags."""
    if not numbers:
        return source
    values = ", ".join(f"{field}={value!r}" for field, value in numbers.items())
    place = 'if __name__ == "__main__":'
    line = f'PRESETS["{preset}"] = dataclasses.replace(PRESETS["{preset}"], {values})'
    if b"\nSETTINGS = " in source:  # an optimizer, which may only change its section
        place = contest.END
        line = f'SETTINGS["{preset}"] = dict(SETTINGS.get("{preset}", {{}}), {values})'
    before, _, after = source.decode().rpartition(f"\n{place}")
    return f"{before}\n{line}\n\n\n{place}{after}".encode()


def read_source(path: Path, baseline: bytes) -> bytes:
    """The source in a file or of a folder, or the baseline's with a patch."""
    file = runs.source_file(path) if path.is_dir() else path
    if not file.is_file():
        refuse(f"there is no file and no idea {path}: ./run.sh idea  lists the names")
    source = idea.patched(baseline, file) if file.suffix == ".patch" else file.read_bytes()
    if contest.is_contestant(source.decode()):
        source = contest.assemble(contest.read(file)).encode()
    if b"\ndef parse_config(" not in source:
        refuse(f"{file} is no copy of train_gpt.py, no patch for it and no optimizer")
    if not source.endswith(b"\n") or b"\n" + runs.BORDER in source:
        refuse(f"{file} must end with a newline and have no line of 100 =, where a log ends it")
    return source


def split_words(words: list[str]) -> tuple[list[str], list[str], list[str]]:
    """The idea's files or names, its flags, and the arguments of both, the preset first."""
    words = [part for word in words for part in shlex.split(word)]
    words = re.sub("(?m)^(--\\w+)=", r"\1\n", "\n".join(words)).split("\n")
    for word in words:
        if word in ("--target", "--seed", "--resume", "--save"):
            refuse(f"leave out {word}: all runs have all steps, and the seeds of the rule")
    first = next((i for i, word in enumerate(words) if word in LEGS), len(words))
    own = words[:first]
    flags = next((i for i, word in enumerate(own) if word[:2] == "--"), len(own))
    if not own:
        refuse('name an idea: my_idea.py, a .patch, a name of ./run.sh idea, or "--muon_lr x1.25"')
    return own[:flags], own[flags:], words[first:] or ["tiny"]


def read_idea(words: list[str], baseline: str) -> Idea:
    """Reads what the command line names; refuses what cannot be compared."""
    files, flags, arguments = split_words(words)
    optimizers = [file for file in files if file.endswith(".py") and Path(file).is_file()]
    optimizers = [file for file in optimizers if contest.is_contestant(Path(file).read_text())]
    path = baseline or (ROOT / "records/optimizers/muon.py" if optimizers else TRAINER)
    old = new = read_source(Path(path), b"")
    shelf = idea.shelf()
    if all(file in shelf for file in files):
        new = idea.apply(old, [shelf[file] for file in files])
    else:
        new = read_source(Path(files[0]), old)
    before = read_settings(old, arguments)
    flags = multiplied(flags, before[2])
    after = read_settings(new, [*arguments, *flags])
    for field in FIELDS:
        if before[2].get(field) != after[2].get(field):
            refuse(f"the idea changes {field}, and no idea may: its runs would show nothing")
    preset, steps = arguments[0], before[2]["steps"]
    if "--steps" in arguments:  # which are in the sources, as they differ between stages
        at = arguments.index("--steps")
        arguments = arguments[:at] + arguments[at + 2 :]
    own = read_settings(new, arguments)[2]
    names = [flag[2:] for flag in flags if flag[:2] == "--" and flag != "--steps"]
    numbers = {name: after[2][name] for name in names if after[2][name] != own[name]}
    new = with_numbers(new, preset, numbers)
    old, new = (
        source
        if read_settings(source, [preset])[2]["steps"] == steps
        else with_numbers(source, preset, {"steps": steps})
        for source in (old, new)
    )
    if old == new:
        refuse("in as many steps, the idea is the baseline; an attempt itself finds the steps")
    name = "_".join([*(Path(file).stem for file in files), *flags]).lower()
    name = re.sub("[^a-z0-9]+", "_", name).strip("_")
    sources = {"baseline": old, name: new}
    path = os.path.relpath(path, ROOT)  # no path of this machine gets into a rule
    return Idea(name, arguments, path, sources, steps, [*remarks(before, after, old, new)])


def multiplied(flags: list[str], values: dict[str, Any]) -> list[str]:
    """Flags in which a value like x1.25 is the baseline's times 1.25."""
    done = []
    for word in flags:
        factor = re.fullmatch(r"x(\d*\.?\d+)", word)
        old = values.get(done[-1][2:]) if done else None
        if factor and isinstance(old, (int, float)):
            number = float(f"{float(factor[1]) * old:.6g}")
            word = str(round(number) if isinstance(old, int) else number)
        done.append(word)
    return done


def remarks(before: tuple, after: tuple, old: bytes, new: bytes) -> Iterator[str]:
    """Yields what a reader of the verdict must know first, and the idea's author before a run."""
    functions = []
    for source in (old, new):
        tops = [node for node in ast.parse(source).body if isinstance(node, ast.FunctionDef)]
        functions.append({node.name: ast.dump(node) for node in tops})
    changed = [name for name in FUNCTIONS if functions[0].get(name) != functions[1].get(name)]
    if changed:
        yield f"THE IDEA CHANGES {', '.join(changed)}: read whether its loss is still the rules'."
    script, c, _ = after
    if hasattr(script, "param_table"):
        wanted, count = parameters(before, before[1].F), parameters(after, c.F)
        of_F = (count - parameters(after, c.F // 2)) / (c.F - c.F // 2)
        if count != wanted:
            F = c.F - round((count - wanted) / of_F) if of_F else c.F
            equal = f"; as many with --F {F}" if F != c.F else ""
            yield f"The idea has {count:,} parameters, and the baseline {wanted:,}{equal}."


def parameters(settings: tuple, F: int) -> int:
    """The number of parameters with an MLP of width F."""
    script, c, values = settings
    fields = {name: values[name] for name in c.__dataclass_fields__} | {"F": F}
    return sum(math.prod(row.model_shape) for row in script.param_table(type(c)(**fields)).values())


# ---- What is written before the first run --------------------------------------------------------
def write_plan(stage: Path, seeds: list[int], arguments: list[str], sources: dict) -> list[str]:
    """Writes the files of a stage's variants, and then its plan.json. Returns its arguments."""
    for name, source in sources.items():
        (stage / name / "logs").mkdir(parents=True, exist_ok=True)
        (stage / name / "train_gpt.py").write_bytes(source)
        for shared in ("data", ".cache"):  # by links, so that logs have relative paths
            (ROOT / shared).mkdir(exist_ok=True)
            (stage / name / shared).unlink(missing_ok=True)
            (stage / name / shared).symlink_to(ROOT / shared)
    arms = {name: hashlib.sha256(source).hexdigest() for name, source in sources.items()}
    arguments = [*arguments, "--target", "0"]
    created = time.strftime(UTC, time.gmtime())
    plan = dict(created=created, n=len(seeds), seeds=seeds, arguments=arguments, arms=arms)
    (stage / "plan.json").write_text(json.dumps(plan, indent=1) + "\n")
    return arguments


def write_rule(attempt: Path, tried: Idea, args: argparse.Namespace) -> None:
    """Writes the pilot's plan and rule.json, before the first run that counts."""
    seeds = random.SystemRandom().sample(range(2**31), args.pairs + MOST)
    short = round(SHORT * tried.steps)
    text = RULE.format(pairs=args.pairs, steps=tried.steps, short=short, least=LEAST, most=MOST)
    words = [Path(word).name if word.startswith("/") else word for word in sys.argv[1:]]
    write_plan(attempt / "pilot", seeds[: args.pairs], tried.arguments, tried.sources)
    rule = dict(
        created=time.strftime(UTC, time.gmtime()), name=tried.name, steps=tried.steps, short=short,
        command=shlex.join(["./run.sh", "attempt", *words]), baseline=tried.baseline,
        arguments=tried.arguments, tried=fingerprint(tried, args),
        pilot_seeds=seeds[: args.pairs], fresh_seeds=seeds[args.pairs :], budget=args.budget,
        runs=args.runs, remarks=tried.remarks, rule=text.splitlines(),
    )  # fmt: skip
    (attempt / "rule.json").write_text(json.dumps(rule, indent=1) + "\n")


def fingerprint(tried: Idea, args: argparse.Namespace) -> str:
    """The sha256 of all that an attempt depends on."""
    words = repr([tried.sources, tried.arguments, args.pairs, args.budget, args.runs])
    return hashlib.sha256(words.encode()).hexdigest()


def find_attempt(tried: Idea, args: argparse.Namespace) -> Path:
    """The folder of this idea's attempt that has no verdict yet, or a new one beside the others."""
    number = 1
    while True:
        attempt = HERE / (tried.name if number == 1 else f"{tried.name}-{number}")
        rule = attempt / "rule.json"
        if not rule.is_file():
            return attempt
        is_same = json.loads(rule.read_text())["tried"] == fingerprint(tried, args)
        if is_same and not (attempt / "verdict.txt").is_file():
            return attempt
        number += 1


# ---- Legs ----------------------------------------------------------------------------------------
def finished_seeds(variant: Path) -> dict[int, bool]:
    """The seeds whose run came to its end (True) or diverged (False). Moves the logs of other runs
    to <variant>/unfinished, and deletes their checkpoints, because no run may be resumed."""
    seeds = {}
    for path in runs.log_files(variant):
        try:
            run = runs.read(path)
        except runs.Unreadable as error:  # interrupted before its facts were written, or changed
            if runs.has_final_loss(path):
                refuse(f"{path} has its final loss, but cannot be read: {error}; restore this file")
            run = None
        if run and (run.complete or run.ended == "not finite"):
            seeds[run.seed] = run.complete
        else:
            (variant / "unfinished").mkdir(exist_ok=True)
            path.rename(variant / "unfinished" / path.name)
            shutil.rmtree(path.with_suffix(""), ignore_errors=True)
    for weights in (variant / "logs").glob("*.npz"):
        weights.unlink()  # they are large, and not evidence
    return seeds


idle = {}  # processes that can train once more, by their variants


def train(variant: Path, arguments: list[str], own: list[str], lock: int) -> int:
    """Trains once, with a seed and the flags of this run alone; returns the exit status. Ctrl-C
    reaches the training, too, which is waited for. The training inherits the lock: if this process
    is killed, no other can start a run beside it. On CPUs its process then waits for the next seed,
    because it has the programs."""
    child = idle.pop(variant, None)
    if not child or child.poll() is not None:  # there is none, or it was killed
        command = [sys.executable, "train_gpt.py", *arguments, "--seed"]
        source = (variant / "train_gpt.py").read_bytes()
        is_ours = re.search(rb"^def run\([^)]*\bguard\b", source, re.M)
        if is_ours:  # others protect themselves
            command.insert(1, str(ROOT / "run/launch.py"))
        stays = is_ours and os.environ.get("JAX_PLATFORMS", "cpu") == "cpu"
        command += ["-"] if stays else own  # a GPU has no room for two
        env = {"JAX_COMPILATION_CACHE_DIR": ".cache/jax"} | os.environ
        pipe = subprocess.PIPE
        child = subprocess.Popen(command, cwd=variant, env=env, pass_fds=[lock], text=True,
                                 errors="replace", stdin=pipe, stdout=pipe)  # fmt: skip
    try:
        print(*own, file=child.stdin, flush=True)
        for line in child.stdout:
            if line.rstrip() == NEXT:
                idle[variant] = child
                return 0
            if "val_loss:" in line and not line.startswith("RESULT"):
                print(f"  {line.rstrip()}", flush=True)
    finally:
        if variant not in idle:
            child.communicate()  # also ends what it may still write, and its wait for a seed
    return child.returncode


def ledger(attempt: Path) -> list[dict[str, Any]]:
    """What was run: an entry for every leg that ended, however it ended."""
    file = attempt / "ledger.jsonl"
    return [json.loads(line) for line in file.read_text().splitlines()] if file.is_file() else []


def run_leg(variant: Path, seed: int, arguments: list[str], lock: int) -> None:
    """Runs a leg and notes it in the ledger. Raises Stop if it crashed twice in a row, or if the
    idea diverged."""
    attempt = variant.parents[1]
    leg = f"{variant.parent.name}/{variant.name} seed {seed}"
    start = time.monotonic()
    status = "interrupted"
    try:
        status = train(variant, arguments, [str(seed)], lock)
    finally:
        entry = dict(leg=leg, status=status, seconds=round(time.monotonic() - start, 1))
        with open(attempt / "ledger.jsonl", "a") as file:
            file.write(json.dumps(entry) + "\n")
    finished = finished_seeds(variant)
    if seed in finished:
        if not finished[seed] and variant.name != "baseline":
            raise Stop(f"the idea diverged, with seed {seed}")
    elif status == 2:
        refuse("that run was refused, and does not count: the same command goes on")
    elif shutil.disk_usage(attempt).free < 5e7:
        refuse(FULL)
    elif [entry["leg"] for entry in ledger(attempt)[-2:]] == [leg, leg]:
        raise Stop(f"{variant.name} crashed twice in a row, at last with status {status}")


def waiting_legs(stage: Path) -> list[tuple[int, str]]:
    """(seed, variant) of the legs that a stage lacks: every round reverses the order."""
    plan = json.loads((stage / "plan.json").read_text())
    finished = {name: finished_seeds(stage / name) for name in plan["arms"]}
    names = list(finished)
    legs = []
    for seed in plan["seeds"]:
        legs += [(seed, name) for name in names if seed not in finished[name]]
        names.reverse()
    return legs


def run_stage(stage: Path, lock: int) -> None:
    """Runs what a stage lacks."""
    for variant in [variant for variant in idle if variant.parent != stage]:
        idle.pop(variant).communicate()
    plan = json.loads((stage / "plan.json").read_text())
    for name, sha256 in plan["arms"].items():
        if runs.source_hash(stage / name / "train_gpt.py") != sha256:
            refuse(f"{stage / name}/train_gpt.py has changed since its plan was made: restore it")
    legs = waiting_legs(stage)
    rule = json.loads((stage.parent / "rule.json").read_text())
    while legs:
        if stage.name == "pilot" and legs_left(stage.parent, rule) < 2 - len(legs) % 2:
            raise Stop("the budget is spent")
        seed, name = legs[0]
        print(f"[{stage.name}, {len(legs)} to run] {name}, seed {seed}", flush=True)
        run_leg(stage / name, seed, plan["arguments"], lock)
        legs = waiting_legs(stage)


# ---- The rule ------------------------------------------------------------------------------------
def legs_left(attempt: Path, rule: dict[str, Any]) -> float:
    """How many more legs the budget and the number of runs allow."""
    done = [entry["seconds"] / 60 for entry in ledger(attempt)]
    minutes = fmean(done) if done else LEGS[rule["arguments"][0]][0]
    by_runs = rule["runs"] - len(done) if rule["runs"] else math.inf
    by_time = (rule["budget"] - sum(done)) / minutes if rule["budget"] else math.inf
    return max(0, min(by_runs, by_time))


def evidence(folder: Path) -> verify.Evidence | None:
    """The runs of a variant; None if it has none."""
    return verify.collect(folder) if runs.log_files(folder) else None


def differences(stage: Path, new: str) -> list[float]:
    """The losses of a variant minus those of the baseline, by seed."""
    a, b = evidence(stage / new), evidence(stage / "baseline")
    return verify.changes(a, b) if a and b else []


def pairs_to_certify(pilot: list[float], legs: float) -> tuple[int, str]:
    """The pairs that a certification needs by a pilot; or why there is no path."""
    if len(pilot) < 2 or fmean(pilot) >= 0:
        return 0, "the pilot shows no gain that could be certified"
    pairs = max(LEAST, stats.pairs_needed(-fmean(pilot), stdev(pilot), MOST + 1))
    most = math.floor(min(MOST, max(0, legs) / 3))
    why = f"there is no path to p < 0.01: it takes {pairs} pairs or more, not {most}"
    return pairs, why if pairs > most else ""


def loss_per_step(short: verify.Evidence, long: verify.Evidence) -> float:
    """By how much the loss falls in a step between two lengths, with the seeds of both, nats."""
    pairs = verify.changes(short, long)
    return fmean(pairs) / (long.ended[0].steps - short.ended[0].steps) if pairs else 0.0


def chosen_steps(attempt: Path, rule: dict[str, Any], pairs: int) -> int:
    """The steps at which the idea reaches its track's target so surely that so many runs show it,
    by the line through the two lengths that were run: not less than the shorter one."""
    name = rule["name"]
    long, base = (verify.collect(attempt / "pilot" / arm) for arm in (name, "baseline"))
    short = verify.collect(attempt / "length" / name)
    track = verify.TRACKS.get(verify.infer_track(long))
    slope = loss_per_step(short, long)
    if not track or slope <= 0:
        return rule["steps"]
    sd = math.hypot(stdev(long.losses), stdev(base.losses)) / math.sqrt(2)
    # The pilot's own mean is uncertain, too.
    margin = max(track.margin, stats.shown(sd, pairs)) + sd / math.sqrt(len(long.losses))
    spare = track.target - margin - fmean(long.losses)
    return min(max(rule["steps"] - math.floor(spare / slope), rule["short"]), rule["steps"])


def go_through(attempt: Path, rule: dict[str, Any], lock: int) -> None:
    """Runs what is left of an attempt, stage by stage; raises Stop where the rule ends it."""
    name = rule["name"]
    preset = rule["arguments"][0]
    run_stage(attempt / "pilot", lock)
    base, source = (
        (attempt / "pilot" / arm / "train_gpt.py").read_bytes() for arm in ("baseline", name)
    )
    left = legs_left(attempt, rule) - len(rule["pilot_seeds"])
    pairs, stop = pairs_to_certify(differences(attempt / "pilot", name), left)
    if not (attempt / "length/plan.json").is_file():
        seeds = rule["pilot_seeds"][:1] if stop else rule["pilot_seeds"]
        shorter = {name: with_numbers(source, preset, {"steps": rule["short"]})}
        write_plan(attempt / "length", seeds, rule["arguments"], shorter)
    if legs_left(attempt, rule) >= 1:
        run_stage(attempt / "length", lock)
    if not (attempt / "certification/plan.json").is_file():
        if stop:
            raise Stop(stop)
        steps = chosen_steps(attempt, rule, pairs)
        sources = {"baseline": base, name: source}
        if steps < rule["steps"]:
            sources = {"baseline": base, "same_length": source}
            sources[name] = with_numbers(source, preset, {"steps": steps})
        seeds = rule["fresh_seeds"][:pairs]
        minutes = pairs * len(sources) * fmean(entry["seconds"] for entry in ledger(attempt)) / 60
        print(f"the pilot's mean and deviation ask for {pairs} pairs: about {minutes:.0f} minutes")
        write_plan(attempt / "certification", seeds, rule["arguments"], sources)
    run_stage(attempt / "certification", lock)


# ---- The verdict ---------------------------------------------------------------------------------
def judge(attempt: Path, rule: dict[str, Any], stop: str) -> str:
    """The sentences of the verdict."""
    stage, long = attempt / "pilot", rule["name"]
    fresh = attempt / "certification"
    if (fresh / "plan.json").is_file():
        equal = "same_length" if (fresh / "same_length").is_dir() else long
        if not stop or len(differences(fresh, equal)) > 1:
            stage, long = fresh, equal
    lines = [remark for remark in rule["remarks"] if remark.startswith("THE IDEA CHANGES")]
    pairs = differences(stage, long)
    objections = [] if waiting_legs(stage) else verify.study(stage)[1].split(verify.FAIL)[1:]
    if objections:
        lines.append(f"THE JUDGE OBJECTS: {objections[0].splitlines()[0]}.")
    if len(pairs) < 2:
        lines.append(f"Not shown: of two or more pairs that it takes, {len(pairs)} came to an end.")
    elif stdev(pairs) == 0:
        lines.append(f"Not shown: all pairs of runs differ by {pairs[0]:+.4f} nats.")
    else:
        is_fresh = not objections and not stop
        lines += sentences(attempt, rule, pairs, stage.name, is_fresh)
    if (stage / "same_length").is_dir():
        lines.append(below_target(verify.collect(stage / rule["name"])))
    if stop:
        lines.append(f"It ended because {stop}.")
    crashes = [entry for entry in ledger(attempt) if entry["status"] not in (0, "interrupted")]
    if crashes:
        lines.append(f"Legs that crashed or diverged: {len(crashes)}, see ledger.jsonl.")
    return "\n".join(lines)


def sentences(
    attempt: Path, rule: dict[str, Any], pairs: list[float], stage: str, is_fresh: bool
) -> Iterator[str]:
    """Yields the difference in nats, the same in tokens, if the idea ran at a second length, and
    what so many pairs can show. Only fresh seeds show that an idea is better."""
    n, mean, sd = len(pairs), fmean(pairs), stdev(pairs)
    one = stats.quantile(0.025, n - 1) * sd
    half = one / math.sqrt(n)
    p = stats.below(pairs, 0).p
    word = "better" if is_fresh and p < verify.ALPHA else "not shown"
    word = "worse" if 1 - p < verify.ALPHA else word
    yield (
        f"One pair of runs tells ± {one:.4f} nats, and {n} pairs tell ± {half:.4f}; the idea, at "
        f"{rule['steps']:,} steps, in {n} pairs of the {stage}: {mean:+.4f} ± {half:.4f} (95 % "
        f"interval {mean - half:+.4f} to {mean + half:+.4f}; p = {verify.p_value(p)}, one-sided): "
        f"{word}."
    )
    short, long = (evidence(attempt / part / rule["name"]) for part in ("length", "pilot"))
    if short and loss_per_step(short, long) > 0:
        a, b = short.ended[0], long.ended[0]
        slope = loss_per_step(short, long) * (b.steps - a.steps) / (b.tokens - a.tokens)
        low, middle, high = ((mean + part) / slope for part in (-half, 0, half))
        yield (
            f"In tokens that is {middle:+,.0f} of {b.tokens:,} (95 % interval {low:+,.0f} to "
            f"{high:+,.0f}), by the slope between {a.steps:,} and {b.steps:,} steps, which it ran."
        )
    yield (
        f"{n} pairs show a difference of {stats.shown(sd, n):.4f} (p < 0.01, chance 80 %); one of "
        f"{abs(mean):.4f} needs {stats.pairs_needed(abs(mean), sd, 1000):,} or more."
    )


def below_target(e: verify.Evidence) -> str:
    """What the runs of the chosen number of steps show about the track's target."""
    target = verify.TRACKS[verify.infer_track(e)].target
    p = verify.p_value(stats.below(e.losses, target).p)
    return (
        f"In {verify.step_counts(e)} steps ({e.tokens[0]:,} tokens) it ends at "
        f"{verify.spread(e.losses, 4)}, n = {len(e.losses)}; p of a mean below {target:g}: {p}."
    )


# ---- The command line ----------------------------------------------------------------------------
def check(attempt: Path, tried: Idea, lock: int) -> None:
    """Fetches the tokens, and trains both for a few steps: what cannot run costs no run, and the
    programs are compiled."""
    if "--data" not in tried.arguments:
        command = LEGS[tried.arguments[0]][1].split()
        if subprocess.run([sys.executable, *command], cwd=ROOT).returncode:
            refuse("the tokens are not there, for the reason above")
    c = read_settings(tried.sources["baseline"], tried.arguments)[1]
    stages = getattr(c, "stages", ())
    flags = ["--steps", str(max(2, len(stages)))]
    if stages:
        flags += ["--val_tokens", str(8 * c.val_T), "--save", "0"]
    pilot = attempt / "pilot"  # where the same processes will train
    arguments = write_plan(pilot, [1], tried.arguments, tried.sources)
    for name in tried.sources:
        print(f"[check] {name}, {flags[1]} steps", flush=True)
        status = train(pilot / name, arguments, ["1", *flags], lock)
        if status:
            refuse(f"{name} does not run: status {status}, see above; nothing was counted")
        for log in runs.log_files(pilot / name):
            log.unlink()  # as this run does not count


def show(tried: Idea, args: argparse.Namespace) -> None:
    """Prints the change and every leg with its time, which is a guess, and dollars."""
    sources = tried.sources.values()
    print(idea.difference(*sources).decode())
    minutes = LEGS[tried.arguments[0]][0]
    k, short = args.pairs, round(SHORT * tried.steps)
    total = 0
    for what, legs, part in (
        ("check: both, a few steps", 2, 0.5),
        (f"pilot: {k} pairs, {tried.steps:,} steps, in turn, no stop at the target", 2 * k, 1),
        (f"length: the idea, {short:,} steps, the pilot's seeds (one if it ends here)", k, SHORT),
        (f"certification, if the rule says so: {LEAST} fresh seeds or more", 3 * LEAST, 1),
    ):
        total += legs * part * minutes
        print(f"{what}: {legs} legs of {part * minutes:.1f} minutes")
    dollars = f", {total / 60 * args.price:.2f} dollars" if args.price else ""
    allowed = f"; --budget allows about {args.budget / minutes:.0f} legs" if args.budget else ""
    print(f"together about {total:.0f} minutes{dollars}{allowed}")


def main(argv: list[str]) -> None:
    """Goes through an attempt, or on with it, and prints the verdict."""
    form = argparse.RawDescriptionHelpFormatter
    cli = argparse.ArgumentParser(
        prog="./run.sh attempt", description=__doc__, formatter_class=form, allow_abbrev=False
    )
    cli.error = refuse
    add = cli.add_argument
    add("--baseline", default="", help="another file or record; default: train_gpt.py, or muon")
    add("--pairs", type=int, default=3, help="of the pilot; one does not show how much runs differ")
    add("--budget", type=float, default=0, metavar="MINUTES", help="of all runs, at most")
    add("--runs", type=int, default=0, help="how many, at most")
    add("--end", action="store_true", help="judges what was run, and runs nothing more")
    add("--dry-run", action="store_true", help="prints every leg with its time, and ends")
    add("--price", type=float, default=0, help="dollars an hour, for --dry-run")
    args, words = cli.parse_known_args(argv)
    tried = read_idea(words, args.baseline)
    print(f"{tried.name} against {tried.baseline}: {' '.join(tried.arguments)}")
    print("".join(f"{remark}\n" for remark in tried.remarks), end="")
    if args.dry_run:
        show(tried, args)
        return
    HERE.mkdir(parents=True, exist_ok=True)
    with open(HERE / "lock", "w") as file:
        lock = file.fileno()
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            refuse("another attempt runs in this clone: wait for it, or stop it")
        attempt = find_attempt(tried, args)
        if not (attempt / "rule.json").is_file() and not args.end:
            check(attempt, tried, lock)
            write_rule(attempt, tried, args)
        finish(attempt, lock, args.end)


def finish(attempt: Path, lock: int, by_hand: bool) -> None:
    """Runs the rest of an attempt, unless it is ended by hand; judges and packs it."""
    rule = json.loads((attempt / "rule.json").read_text())
    print(f"the rule is in {attempt}/rule.json")
    stop = ""
    try:
        if by_hand:
            for plan in attempt.glob("*/plan.json"):
                waiting_legs(plan.parent)  # sets aside a leg that was cut off
            raise Stop("it was ended by hand, which the rule does not know")
        go_through(attempt, rule, lock)
    except Stop as reason:
        stop = str(reason)
    verdict = judge(attempt, rule, stop)
    for path in sorted(HERE.glob(f"{rule['name']}*/verdict.txt")):
        verdict += f"\nAn earlier attempt, {path.parent.name}: {path.read_text().splitlines()[0]}"
    (attempt / "verdict.txt").write_text(f"{verdict}\n")
    packed = pack.make(attempt, to=attempt / "packed")
    print(f"\n{verdict}\n\nall of it: {packed}/README.md. Next: see Write it up in AGENTS.md")


if __name__ == "__main__":
    with one_line("attempt"):
        try:
            main(sys.argv[1:])
        except (runs.Unreadable, idea.Conflict) as error:
            refuse(str(error))
        except OSError as error:
            if error.errno != errno.ENOSPC:
                raise
            refuse(FULL)
