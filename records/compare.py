"""Runs versions of train_gpt.py in turn, with the same seeds, as evidence: see records/README.md.

    ./run.sh compare NAME=VARIANT [NAME=VARIANT ...] -n RUNS [--out DIR] -- PRESET [flags]
    ./run.sh compare --resume DIR

A variant is a train_gpt.py, a folder with one (or with a train_gpt.sha256, which names one), an
optimizer for optimizers/train_gpt_simple.py, or a change of the first variant: a .patch for its
file, or flags, as in "hot=--muon_lr 0.03". DIR/plan.json states the number of runs and their seeds
before the first run. For each seed, all variants run in turn (A B A B), for the whole schedule
(--target 0). --resume runs what was interrupted or not begun. At the end, verify.py judges all
runs, and the exit status is that of its verdict.
"""

import argparse
import datetime
import fcntl
import hashlib
import json
import os
import random
import re
import secrets
import shlex
import shutil
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parent))  # for PYTHONSAFEPATH=1
import idea
import runs
import verify
from messages import refuse
from optimizers import contest

ROOT = Path(__file__).resolve().parents[1]
# Variables that a log states, by how their names begin; run/launch.py has the same pattern.
LOGGED_VARIABLES = re.compile("JAX|XLA|(LIB)?TPU|CUD|NVI|NCCL|TF_CPP|GLI")
RESERVED = {"lock", "logs", "plan.json"}  # names of others in a plan's folder


class Variant(NamedTuple):
    """What is compared with others."""

    source: bytes  # of train_gpt.py
    flags: list[str]  # that only its runs have


def machine_hash(salt: str) -> str:
    """Returns a hash of a plan's salt and the machine's name, which does not reveal the name."""
    return hashlib.sha256(f"{salt} {socket.gethostname()}".encode()).hexdigest()[:16]


# ---- Variants ------------------------------------------------------------------------------------
def read_variants(specs: list[str]) -> dict[str, Variant]:
    """Returns variants by name. specs are NAME=PATH or NAME=FLAGS."""
    variants = {}
    first = b""  # the source of the first variant
    for spec in specs:
        name, _, value = spec.partition("=")
        is_name = re.fullmatch("[A-Za-z0-9][A-Za-z0-9_.-]*", name)
        if not is_name or not value or name in variants or name in RESERVED:
            refuse(f"{spec}: write NAME=PATH, with a new name, as the variant has a folder of it")
        has_flags = value.startswith("--")
        if not first and (has_flags or value.endswith(".patch")):
            refuse(f"{spec}: the first variant must be a train_gpt.py, which the others change")
        if has_flags:
            variants[name] = Variant(first, shlex.split(value))
            check_flags(variants[name].flags)
        else:
            variants[name] = Variant(read_source(Path(value), first), [])
        first = first or variants[name].source
    return variants


def read_source(path: Path, first: bytes) -> bytes:
    """Returns the source in a file or of a folder, or the first one changed by a patch."""
    file = runs.source_file(path) if path.is_dir() else path
    if not file.is_file():
        refuse(f"no such file: {file}; a preset comes last, as in  -- tiny")
    source = file.read_bytes()
    if path.suffix == ".patch":
        try:
            source = idea.patched(first, path)
        except idea.Conflict as error:
            refuse(f"the first variant: {error}")
    if b"\ndef optimizer(" in source and b"\ndef main(" not in source:
        source = contest.assemble(contest.read(file)).encode()
    if not source.endswith(b"\n") or b"\n" + runs.BORDER in source:
        refuse(f"{file} must end with a newline and have no line of 100 =, where a log ends it")
    return source


def check_flags(flags: list[str]) -> None:
    """Refuses flags of train_gpt.py that the runs of a plan cannot have."""
    for flag in flags:
        if flag.partition("=")[0] in ("--target", "--seed", "--resume", "--help", "-h"):
            refuse(f"leave out {flag}: all runs have all steps, and the seeds of the plan")


# ---- Plans ---------------------------------------------------------------------------------------
def make_plan(specs: list[str], n: int, arguments: list[str], out: Path | None = None,
              keep_weights: bool = False) -> Path:  # fmt: skip
    """Makes the plan of n runs of every variant, in a new folder, which it returns. arguments are
    the preset and flags."""
    check_flags(arguments)
    arguments = [*arguments, "--target", "0"]
    if arguments[0].startswith("--"):
        refuse("end the command with a preset, as in  -- tiny")
    variants = read_variants(specs)
    created = datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    out = out or ROOT / "logs" / f"ab_{created.replace(':', '-')}"
    if out.exists():
        refuse(f"{out} is there already: choose another --out, or continue it by --resume {out}")
    salt = secrets.token_hex(8)
    plan = dict(
        created=created,
        n=n,
        seeds=random.SystemRandom().sample(range(2**31), n),
        arguments=arguments,
        salt=salt,
        machine=machine_hash(salt),
        keep_weights=keep_weights,
        arms={},
        flags={},
    )
    write_plan(out, plan, variants)
    return out


def write_plan(out: Path, plan: dict[str, Any], variants: dict[str, Variant]) -> None:
    """Writes DIR/<variant>/train_gpt.py, and DIR/plan.json."""
    for name, variant in variants.items():
        (out / name / "logs").mkdir(parents=True)
        (out / name / "train_gpt.py").write_bytes(variant.source)
        for shared in ("data", ".cache"):  # by links, so that logs have relative paths
            (ROOT / shared).mkdir(exist_ok=True)
            (out / name / shared).symlink_to(ROOT / shared)
        plan["arms"][name] = hashlib.sha256(variant.source).hexdigest()
        if variant.flags:
            plan["flags"][name] = variant.flags
    (out / "plan.json").write_text(json.dumps(plan, indent=1) + "\n")


def read_plan(out: Path) -> dict[str, Any]:
    """Returns the plan in a folder."""
    return json.loads((out / "plan.json").read_text("utf-8"))


# ---- Runs ----------------------------------------------------------------------------------------
def finished_seeds(variant: Path) -> set[int]:
    """Returns the seeds whose run came to its end or diverged; moves the logs of other runs to
    DIR/<variant>/unfinished, and deletes their checkpoints, because no run may be resumed."""
    seeds = set()
    for path in runs.log_files(variant):
        try:
            run = runs.read(path)
        except runs.Unreadable as error:  # interrupted before its facts were written, or changed
            if runs.has_final_loss(path):
                refuse(f"{path} has its final loss, but cannot be read: {error}; restore this file")
            run = None
        if run and (run.complete or run.ended == "not finite"):
            seeds.add(run.seed)
        else:
            (variant / "unfinished").mkdir(exist_ok=True)
            path.rename(variant / "unfinished" / path.name)
            shutil.rmtree(path.with_suffix(""), ignore_errors=True)
    return seeds


def run(variant: Path, arguments: list[str], lock: int) -> int:
    """Trains once; returns the exit status. Ctrl-C reaches the training, too, which is waited for.
    The training inherits the lock: if this process is killed, no other compare.py can start a run
    beside it. As its output is no terminal, it ends without a sample."""
    command = [sys.executable, "train_gpt.py", *arguments]
    source = (variant / "train_gpt.py").read_bytes()
    if re.search(rb"^def run\([^)]*\bguard\b", source, re.M):  # others protect themselves
        command.insert(1, str(ROOT / "run/launch.py"))
    env = {"JAX_COMPILATION_CACHE_DIR": ".cache/jax"} | os.environ
    child = subprocess.Popen(command, cwd=variant, env=env, pass_fds=[lock], text=True,
                             errors="replace", stdout=subprocess.PIPE)  # fmt: skip
    try:
        for line in child.stdout:
            if line.startswith(("step:", "RESULT ", "compiling ")):
                print(line.rstrip(), flush=True)
    finally:
        status = child.wait()
    return status


def run_plan(out: Path) -> None:
    """Runs everything in a plan that has not come to its end yet."""
    with open(out / "lock", "w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            refuse(f"{out} is in use: wait for its run, or stop it")
        run_rest(out, lock.fileno())


def run_rest(out: Path, lock: int) -> None:
    """Does so. Refuses a plan of another machine, or whose sources have changed."""
    plan = read_plan(out)
    if plan["machine"] != machine_hash(plan["salt"]):
        refuse(f"{out} was begun on another machine, and runs of two machines are not comparable")
    for name, sha256 in plan["arms"].items():
        if runs.source_hash(out / name / "train_gpt.py") != sha256:
            refuse(f"{name}/train_gpt.py has changed since the plan was made; make another plan")
    turns = [(seed, name) for seed in plan["seeds"] for name in plan["arms"]]
    finished = {name: finished_seeds(out / name) for name in plan["arms"]}
    waiting = [(seed, name) for seed, name in turns if seed not in finished[name]]
    for number, (seed, name) in enumerate(waiting, len(turns) - len(waiting) + 1):
        print(f"\n[{number}/{len(turns)}] {name}, seed {seed}, log in {out / name / 'logs'}")
        arguments = [*plan["arguments"], *plan["flags"].get(name, []), "--seed", str(seed)]
        status = run(out / name, arguments, lock)
        if seed not in finished_seeds(out / name):
            refuse(f"this run ended with status {status} and does not count: continue by --resume")
        if not plan.get("keep_weights"):
            for weights in (out / name / "logs").glob("*.npz"):
                weights.unlink()  # they are large, and not evidence


def judge(out: Path) -> tuple[bool, str]:
    """Returns whether the runs of a plan hold, and the report of verify.py: if there are two that
    could be a record and its baseline, of these, else of the whole plan."""
    plan = read_plan(out)
    *baseline, new = [out / name for name in plan["arms"]]
    has_flags = plan["flags"] or plan["arguments"][1:] != ["--target", "0"]
    if len(baseline) > 1 or (baseline and has_flags):
        return verify.judge(out)
    return verify.judge(new, *baseline)


def parse(argv: list[str]) -> argparse.Namespace:
    """Reads the command line. Arguments after -- are the preset and flags of train_gpt.py."""
    split = argv.index("--") if "--" in argv else len(argv)
    form = argparse.RawDescriptionHelpFormatter
    cli = argparse.ArgumentParser(
        prog="./run.sh compare", description=__doc__, formatter_class=form, allow_abbrev=False
    )
    cli.error = refuse
    cli.add_argument("variants", nargs="*", metavar="VARIANT", help="NAME=PATH, or NAME=FLAGS")
    cli.add_argument("-n", type=int, default=0, help="number of runs of every variant")
    cli.add_argument("--out", type=Path, help="a new folder; default: logs/ab_<time>")
    cli.add_argument("--resume", type=Path, metavar="DIR", help="continue the plan in DIR")
    cli.add_argument("--keep_weights", action="store_true", help="beside the logs, for evals/")
    args = cli.parse_intermixed_args(argv[:split])
    args.arguments = argv[split + 1 :]
    if args.resume and len(argv) > 2:
        refuse("--resume DIR takes all else from the plan: make another plan for other variants")
    if args.resume and not (args.resume / "plan.json").is_file():
        refuse(f"no such file: {args.resume}/plan.json; --resume needs the folder of a plan")
    if not args.resume and not (args.variants and args.arguments and args.n > 1):
        refuse("type  new=new.py -n 8 -- tiny: one run does not show how much runs differ")
    return args


def main(argv: list[str]) -> int:
    """Makes a plan or takes that of --resume, runs it, and returns the status of its verdict."""
    args = parse(argv)
    for name, value in sorted(os.environ.items()):
        if LOGGED_VARIABLES.match(name) and not verify.is_neutral(name, value):
            print(f"{name} is set, so these runs will not count as a record")
    out = args.resume
    if not out:
        out = make_plan(args.variants, args.n, args.arguments, args.out, args.keep_weights)
    print(f"the plan is in {out}/plan.json")
    try:
        run_plan(out)
    except KeyboardInterrupt:
        print(f"\ninterrupted; to continue: ./run.sh compare --resume {out}", file=sys.stderr)
        raise
    holds, text = judge(out)
    print(f"\n{text}")
    return 0 if holds else 1


if __name__ == "__main__":
    verify.end("compare.py", main)
