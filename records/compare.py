"""Runs versions of train_gpt.py in turn, with the same seeds, as evidence: see records/README.md.

    ./run.sh compare VARIANT [VARIANT ...] -n RUNS [--out DIR] -- PRESET [flags]
    ./run.sh compare --resume DIR [VARIANT ...]

A variant is a train_gpt.py, a folder with one (or with a train_gpt.sha256, which names one), an
optimizer for optimizers/train_gpt_simple.py, or a change of the first variant: a .patch for its
file, or flags, as in "hot=--muon_lr 0.03". NAME=PATH gives a name to the others. DIR/plan.json
states the number of runs and their seeds before the first run. For each seed, all variants run in
turn (A B A B), for the whole schedule (--target 0). --resume runs what was interrupted or not
begun, and adds variants to the plan. At the end, verify.py judges all runs. Where nobody reads what
is printed, the runs go on, and the exit status is that of their verdict.
"""

import argparse
import contextlib
import datetime
import fcntl
import hashlib
import json
import math
import os
import random
import re
import secrets
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
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
# Python's -c: what refuses the arguments of a run before the first one begins.
PARSE = "import sys, train_gpt; train_gpt.parse_config(sys.argv[1:])"


class Variant(NamedTuple):
    """What is compared with others."""

    source: bytes  # of train_gpt.py
    flags: list[str]  # that only its runs have


def say(text: str) -> None:
    """Prints a line, or loses it if it cannot be printed: nobody must watch the runs."""
    try:
        print(text, flush=True)
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)


def now() -> str:
    """Returns the time in UTC."""
    return datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def machine_hash(salt: str) -> str:
    """Returns a hash of a plan's salt and the machine's name, which does not reveal the name."""
    return hashlib.sha256(f"{salt} {socket.gethostname()}".encode()).hexdigest()[:16]


# ---- Variants ------------------------------------------------------------------------------------
def read_variants(specs: list[str], first: bytes, taken: set[str]) -> dict[str, Variant]:
    """Returns variants by name. specs are [NAME=]PATH or NAME=FLAGS. first is the source of the
    plan's first variant; it is empty if that is to be read here."""
    variants = {}
    for spec in specs:
        name, equals, value = spec.partition("=")
        if not equals:
            name = name_of(Path(spec))
            value = spec
        is_name = re.fullmatch("[A-Za-z0-9][A-Za-z0-9_.-]*", name)
        if not is_name or name in variants or name in RESERVED | taken:
            refuse(f"{name!r} is taken, or cannot be the name of a folder; write NAME={value}")
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


def name_of(path: Path) -> str:
    """Returns the name of a variant without NAME=. A train_gpt.py is called after its folder."""
    path = path.resolve()
    if path.is_dir():
        return path.name
    return path.parent.name if path.name == "train_gpt.py" else path.stem


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
    if re.search(rb"^def optimizer\(", source, re.M) and not re.search(
        rb"^def main\(", source, re.M
    ):
        source = contest.assemble(contest.read(file)).encode()
    if not source.endswith(b"\n") or b"\n" + runs.BORDER in source:
        refuse(f"{file} must end with a newline and have no line of 100 =, where a log ends it")
    return source


def check_flags(flags: list[str]) -> None:
    """Refuses flags of train_gpt.py that the runs of a plan cannot have."""
    for flag in flags:
        if flag.partition("=")[0] in ("--target", "--seed", "--resume", "--help", "-h"):
            refuse(f"leave out {flag}: all runs have all steps, and the seeds of the plan")


def check_arguments(variants: dict[str, Variant], arguments: list[str]) -> None:
    """Refuses arguments that a variant's parse_config() refuses, because no run could begin, and
    numbers in the SETTINGS of an optimizer that no run would use."""
    for name, variant in variants.items():
        program = PARSE
        if b"\n" + contest.BEGIN.encode() in variant.source:
            program += "; from optimizers import run; run.check_numbers(train_gpt, 'its optimizer')"
        with tempfile.TemporaryDirectory() as folder:
            Path(folder, "train_gpt.py").write_bytes(variant.source)
            command = [sys.executable, "-c", program, *arguments, *variant.flags]
            path = os.pathsep.join([folder, str(ROOT / "records")])
            done = subprocess.run(command, cwd=folder, env=os.environ | {"PYTHONPATH": path})
        if done.returncode:
            refuse(f"{name} cannot run with {shlex.join([*arguments, *variant.flags])}")


# ---- Plans ---------------------------------------------------------------------------------------
def make_plan(specs: list[str], n: int, arguments: list[str], out: Path | None = None,
              keep_weights: bool = False) -> Path:  # fmt: skip
    """Makes the plan of n runs of every variant, with its folder, which it returns. arguments are
    the preset and flags."""
    check_flags(arguments)
    arguments = [*arguments, "--target", "0"]
    if arguments[0].startswith("--"):
        refuse("end the command with a preset, as in  -- tiny")
    variants = read_variants(specs, first=b"", taken=set())
    check_arguments(variants, arguments)
    created = now()
    out = out or ROOT / "logs" / f"ab_{created.removesuffix('Z').replace(':', '-')}"
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
        added={},
    )
    write_plan(out, plan, variants)
    return out


def add_variants(out: Path, specs: list[str]) -> None:
    """Adds variants to a plan, which states when. They will run with its seeds."""
    plan = verify.read_plan_file(out / "plan.json")
    first = list(plan["arms"])[0]
    source = (out / first / "train_gpt.py").read_bytes()
    variants = read_variants(specs, source, taken={path.name for path in out.iterdir()})
    check_arguments(variants, plan["arguments"])
    plan["added"] |= dict.fromkeys(variants, now())
    write_plan(out, plan, variants)


def write_plan(out: Path, plan: dict[str, Any], variants: dict[str, Variant]) -> None:
    """Writes DIR/<variant>/train_gpt.py for new variants, and DIR/plan.json with them."""
    for name, variant in variants.items():
        (out / name / "logs").mkdir(parents=True)
        (out / name / "train_gpt.py").write_bytes(variant.source)
        for shared in ("data", ".cache"):  # by links, so that logs have relative paths
            (ROOT / shared).mkdir(exist_ok=True)
            (out / name / shared).symlink_to(ROOT / shared)
        plan["arms"][name] = hashlib.sha256(variant.source).hexdigest()
        if variant.flags:
            plan["flags"][name] = variant.flags
    part = out / "plan.part"
    part.write_text(json.dumps(plan, indent=1) + "\n")
    part.replace(out / "plan.json")


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
    """Trains once; returns the exit status. Signals are passed on to the training, and raised as
    KeyboardInterrupt when it has ended."""
    command = [sys.executable, "train_gpt.py", *arguments]
    env = {"JAX_COMPILATION_CACHE_DIR": ".cache/jax"} | os.environ
    source = (variant / "train_gpt.py").read_bytes()
    if re.search(rb"^def run\([^)]*\bguard\b", source, re.M):  # others protect themselves
        command.insert(1, str(ROOT / "run/launch.py"))
        env = os.environ
    # In a new session, a terminal's Ctrl-C does not reach the training directly, but only once, by
    # send_signal below. The training inherits the lock: if this process is killed, no other
    # compare.py can start a run beside it. As its output is no terminal, it ends without a sample.
    child = subprocess.Popen(command, cwd=variant, env=env, pass_fds=[lock], text=True,
                             errors="replace", stdout=subprocess.PIPE,
                             start_new_session=True)  # fmt: skip
    interrupt = None
    while True:
        try:
            for line in child.stdout:
                if line.startswith(("step:", "RESULT ", "compiling ")):
                    say(line.rstrip())
            status = child.wait()
            break
        except KeyboardInterrupt as error:
            interrupt = error
            child.send_signal(error.args[0])
    if interrupt:
        raise interrupt
    return status


def run_plan(out: Path, added: list[str] = ()) -> None:
    """Adds variants to a plan, and runs everything in it that has not come to its end yet."""
    with open(out / "lock", "w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            refuse(f"{out} is in use: wait for its run, or stop it")
        check_plan(out)
        if added:
            add_variants(out, added)
        run_rest(out, lock.fileno())


def check_plan(out: Path) -> None:
    """Refuses a plan of another machine, or whose sources have changed."""
    plan = verify.read_plan_file(out / "plan.json")
    if plan["machine"] != machine_hash(plan["salt"]):
        refuse(f"{out} was begun on another machine, and runs of two machines are not comparable")
    for name, sha256 in plan["arms"].items():
        if runs.source_hash(out / name / "train_gpt.py") != sha256:
            refuse(f"{name}/train_gpt.py has changed since the plan was made; make another plan")


def run_rest(out: Path, lock: int) -> None:
    """Runs everything in a plan that has not come to its end yet."""
    plan = verify.read_plan_file(out / "plan.json")
    turns = [(seed, name) for seed in plan["seeds"] for name in plan["arms"]]
    finished = {name: finished_seeds(out / name) for name in plan["arms"]}
    waiting = [(seed, name) for seed, name in turns if seed not in finished[name]]
    began = time.monotonic()
    for number, (seed, name) in enumerate(waiting):
        left = ""
        if number:
            each = (time.monotonic() - began) / number
            left = f", about {math.ceil((len(waiting) - number) * each / 60)} min left"
        done = len(turns) - len(waiting) + number
        say(f"\n[{done + 1}/{len(turns)}] {name}, seed {seed}, log in {out / name / 'logs'}{left}")
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
    plan = verify.read_plan_file(out / "plan.json")
    variants = [out / name for name in plan["arms"]]
    has_flags = plan["flags"] or plan["added"] or plan["arguments"][1:] != ["--target", "0"]
    if len(variants) == 1:
        return verify.judge(variants[0])
    if len(variants) == 2 and not has_flags:
        baseline, new = variants
        return verify.judge(new, baseline)
    return verify.judge(out)


def parse(argv: list[str]) -> argparse.Namespace:
    """Reads the command line. Arguments after -- are the preset and flags of train_gpt.py."""
    split = argv.index("--") if "--" in argv else len(argv)
    form = argparse.RawDescriptionHelpFormatter
    cli = argparse.ArgumentParser(
        prog="./run.sh compare", description=__doc__, formatter_class=form, allow_abbrev=False
    )
    cli.error = refuse
    cli.add_argument("variants", nargs="*", metavar="VARIANT", help="[NAME=]PATH, or NAME=FLAGS")
    cli.add_argument("-n", type=int, default=0, help="number of runs of every variant")
    cli.add_argument("--out", type=Path, help="a new folder; default: logs/ab_<time>")
    cli.add_argument("--resume", type=Path, metavar="DIR", help="continue the plan in DIR")
    cli.add_argument("--keep_weights", action="store_true", help="beside the logs, for evals/")
    args = cli.parse_intermixed_args(argv[:split])
    args.arguments = argv[split + 1 :]
    if args.resume and (args.n or args.out or args.arguments or args.keep_weights):
        refuse("--resume takes the number of runs and all flags from the plan; leave them out")
    if args.resume and not (args.resume / "plan.json").is_file():
        refuse(f"no such file: {args.resume}/plan.json; --resume needs the folder of a plan")
    if not args.resume and not (args.variants and args.arguments and 2 <= args.n <= 1000):
        refuse("type  new.py -n 8 -- tiny: one run does not show how much runs differ")
    return args


def stop(number: int, _) -> None:
    """Handles a signal."""
    raise KeyboardInterrupt(number)


def main(argv: list[str]) -> int:
    """Makes a plan or takes that of --resume, runs it, and returns the status of its verdict."""
    args = parse(argv)
    for name, value in sorted(os.environ.items()):
        if LOGGED_VARIABLES.match(name) and not verify.is_neutral(name, value):
            say(f"{name} is set, so these runs will not count as a record")
    out = args.resume
    if not out:
        out = make_plan(args.variants, args.n, args.arguments, args.out, args.keep_weights)
    say(f"the plan is in {out}/plan.json")
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) != signal.SIG_IGN:  # a shell's background job ignores SIGINT
            signal.signal(number, stop)
    try:
        run_plan(out, args.variants if args.resume else [])
    except KeyboardInterrupt as error:
        with contextlib.suppress(OSError):
            print(f"\ninterrupted; to continue: ./run.sh compare --resume {out}", file=sys.stderr)
        return 128 + error.args[0]
    holds, text = judge(out)
    say(f"\n{text}")
    return 0 if holds else 1


if __name__ == "__main__":
    verify.end("compare.py", main)
