"""Runs versions of train_gpt.py in turn, with the same seeds, as evidence: see records/README.md.

    ./run.sh compare VARIANT [VARIANT ...] -n RUNS [--out DIR] [-- preset and flags]
    ./run.sh compare --resume DIR [VARIANT ...]

A variant is a train_gpt.py, a folder with one (or with a train_gpt.sha256, which names one), an
optimizer for optimizers/train_gpt_simple.py, or a change of the first variant: a .patch for its
file, or flags, as in "hot=--muon_lr 0.03". NAME=PATH gives a name to the others. DIR/plan.json
states the number of runs and their seeds before the first run. For each seed, all variants run in
turn (A B A B), for the whole schedule (--target 0). --resume runs what was interrupted or not
begun, and adds variants to the plan. At the end, ./run.sh verify judges all runs. Where nobody
reads what is printed, the runs go on, and the exit status is that of their verdict.
"""

import argparse
import contextlib
import datetime
import fcntl
import hashlib
import importlib.util
import json
import math
import os
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
from collections.abc import Iterable
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple, NoReturn

sys.path.insert(0, str(Path(__file__).resolve().parent))  # for PYTHONSAFEPATH=1
import runs
import verify
from optimizers import contest

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "run"))
import idea  # noqa: E402
import machine  # noqa: E402
import messages  # noqa: E402 - runs.py adds its folder to the path

ROOT = Path(__file__).resolve().parents[1]
# Variables that a log states, by how their names begin; train_gpt.py has the same pattern.
LOGGED_VARIABLES = re.compile("JAX|XLA|(LIB)?TPU|CUD|NVI|NCCL|TF_CPP|GLI")
PARSE = "import sys, train_gpt; train_gpt.parse_config(sys.argv[1:])"  # a program for python -c
CHECK = (  # for contestants, before PARSE
    f"import sys, train_gpt; sys.path.append({str(ROOT / 'records')!r}); "
    "from optimizers import run; run.check_numbers(train_gpt, 'its optimizer'); "
)
RESERVED = {"lock", "logs", "plan.json", "plan.part"}  # names of others in a plan's folder


def refuse(message: str) -> NoReturn:
    """Ends the program with one line."""
    raise messages.Fault(message)


def say(text: str) -> None:
    """Prints a line, or loses it if it cannot be printed: nobody must watch the runs."""
    try:
        print(text, flush=True)
    except OSError:
        messages.discard_output()


def typed(path: Path) -> str:
    """Returns a path as it is typed behind ./run.sh, which is in the root of the repository."""
    path = path.resolve()
    return shlex.quote(str(path.relative_to(ROOT) if path.is_relative_to(ROOT) else path))


def machine_hash(salt: str) -> str:
    """Returns a hash of a plan's salt and the machine's name, which does not reveal the name."""
    return hashlib.sha256(f"{salt} {socket.gethostname()}".encode()).hexdigest()[:16]


def parse(argv: list[str]) -> argparse.Namespace:
    """Reads the command line. Arguments after -- are flags of train_gpt.py."""
    split = argv.index("--") if "--" in argv else len(argv)
    cli = messages.Parser(prog="./run.sh compare", description=__doc__)
    cli.add_argument("variants", nargs="*", metavar="VARIANT", help="[NAME=]PATH, or NAME=FLAGS")
    cli.add_argument("-n", type=int, help="number of runs of every variant")
    cli.add_argument("--out", type=Path, help="a new folder; default: logs/ab_<time>")
    cli.add_argument("--resume", type=Path, metavar="DIR", help="continue the plan in DIR")
    cli.add_argument("--keep_weights", action="store_true", help="beside the logs, for evals/")
    args, unknown = cli.parse_known_intermixed_args(argv[:split])
    if unknown:
        flag = unknown[0].partition("=")[0]
        if messages.nearest(flag, ["out", "resume", "keep_weights", "help"]):
            cli.error(f"unrecognized arguments: {flag}")
        refuse(f"{flag} is no flag of ./run.sh compare: flags of train_gpt.py come last, after a "
               f"preset, as in  -- tiny {flag} ...")  # fmt: skip
    args.flags = argv[split + 1 :]
    if args.resume and (args.n or args.out or args.flags or args.keep_weights):
        refuse("--resume takes the number of runs and all flags from the plan; leave them out")
    if not args.resume and not args.variants:
        refuse("name at least one train_gpt.py; --help shows how")
    if not args.resume and (args.n is None or not 2 <= args.n <= 1000):
        refuse("-n must be at least 2, because one run does not show how much runs differ, "
               "and at most 1000")  # fmt: skip
    check_flags(args.flags)
    return args


def check_flags(flags: list[str]) -> None:
    """Refuses flags of train_gpt.py that the runs of a plan cannot have."""
    for flag in sorted({argument.partition("=")[0] for argument in flags}):
        if flag in ("--target", "--seed"):
            refuse(f"leave out {flag}, because run_ab.py sets it: all runs go to the end of the "
                   "schedule (--target 0), with the seeds of the plan")  # fmt: skip
        if flag in ("--resume", "--help", "-h"):
            refuse(f"leave out {flag}, because all runs train from the first step to the last one")


class Variant(NamedTuple):
    """What is compared with others."""

    source: bytes  # of train_gpt.py
    flags: list[str]  # that only its runs have


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
            variants[name] = Variant(first, read_flags(value))
            check_flags(variants[name].flags)
        else:
            variants[name] = Variant(read_source(Path(value), first), [])
        first = first or variants[name].source
    return variants


def read_flags(text: str) -> list[str]:
    """Returns flags as a shell reads them: spaces may be in quotes."""
    try:
        return shlex.split(text)
    except ValueError:
        refuse(f"{text} has a quote without its end: close it")


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
        is_word = not file.suffix and file == Path(file.name)
        more = f"; if it is a preset, it comes last, as in  -- {file}" if is_word else ""
        refuse(f"no such file: {file}{more}")
    if path.suffix == ".patch":
        source = idea.apply(first, [path], "the first variant")
    else:
        source = file.read_bytes()
    source = runs.without_cr(source)  # as a log will state it
    if machine.is_contestant(source.decode("utf-8", "replace")):
        source = contest.assemble(contest.read(file)).encode()
    if not source.endswith(b"\n") or b"\n" + runs.BORDER in source:
        refuse(f"{file} must end with a newline and have no line of 100 =, so that its end can be "
               "found in a log")  # fmt: skip
    return source


def check_arguments(variants: dict[str, Variant], arguments: list[str]) -> None:
    """Refuses arguments that a variant's parse_config() refuses, because no run could begin, and
    SETTINGS of an optimizer that no run would use."""
    for name, variant in variants.items():
        if not re.search(rb"^def parse_config\(", variant.source, re.M):
            continue
        all_arguments = [*arguments, *variant.flags]
        with tempfile.TemporaryDirectory() as folder:
            Path(folder, "train_gpt.py").write_bytes(variant.source)
            is_optimizer = b"\n" + contest.BEGIN.encode() in variant.source
            program = CHECK + PARSE if is_optimizer else PARSE
            command = [interpreter(), "-c", program, *all_arguments]
            done = subprocess.run(command, cwd=folder, capture_output=True, errors="replace")
        if done.returncode:
            _, _, why = done.stderr.strip().rpartition("\n")
            why = why.removeprefix("messages.Fault: ")
            refuse(f"{name} cannot run with {shlex.join(all_arguments)}: {why}; correct this, and "
                   "type the command again")  # fmt: skip


def check_machine(arguments: list[str]) -> None:
    """Refuses a large preset where there is no GPU, as ./run.sh does for a copy."""
    found = machine.find_machine()
    decision = machine.decide(found)
    if machine.refusal(["copy.py", *arguments], found, decision):
        refuse(f"the preset {arguments[0]} does not run here, because {decision.why}; to train "
               "tiny, end the command with  -- tiny")  # fmt: skip


def to_resume(out: Path) -> str:
    """Returns the command that continues a plan."""
    return f"./run.sh compare --resume {typed(out)}"


def make_plan(args: argparse.Namespace) -> Path:
    """Makes a plan with its folder, which it returns."""
    variants = read_variants(args.variants, first=b"", taken=set())
    arguments = [*args.flags, "--target", "0"]
    if arguments[0].startswith("--"):
        arguments.insert(0, "record")
    check_machine(arguments)
    check_arguments(variants, arguments)
    created = now()
    out = args.out or ROOT / "logs" / f"ab_{created.removesuffix('Z').replace(':', '-')}"
    try:
        out.mkdir(parents=True)
    except FileExistsError:
        refuse(f"{out} is there already: choose another --out, or continue it: {to_resume(out)}")
    salt = secrets.token_hex(8)
    seeds = []
    while len(seeds) < args.n:
        seed = secrets.randbits(31)
        if seed not in seeds:
            seeds.append(seed)
    plan = dict(
        created=created,
        n=args.n,
        seeds=seeds,
        arguments=arguments,
        salt=salt,
        machine=machine_hash(salt),
        keep_weights=args.keep_weights,
        arms={},
        flags={},
        added={},
    )
    write_plan(out, plan, variants)
    return out


def add_variants(out: Path, plan: dict[str, Any], specs: list[str]) -> None:
    """Adds variants to a plan, which states when. They will run with its seeds."""
    first, *_ = plan["arms"]
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


def read_plan(out: Path) -> dict[str, Any]:
    """Returns a plan. Plans of earlier versions lack `keep_weights`."""
    file = out / "plan.json"
    plan = dict(keep_weights=False) | verify.read_plan_file(file)
    runs.require(plan, {"salt": str, "machine": str, "keep_weights": bool}, str(file))
    return plan


def now() -> str:
    """Returns the time in UTC."""
    return datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def finished_seeds(variant: Path) -> set[int]:
    """Returns the seeds whose run came to its end or diverged; moves the logs of other runs to
    DIR/<variant>/unfinished, and deletes their checkpoints, because no run may be resumed."""
    for path in runs.left_out(variant):
        refuse(f"{path} may be the log of a run that would be repeated: rename it, or move it away")
    seeds = set()
    for path in runs.loose_logs(variant / "logs"):
        try:
            run = runs.read(path)
        except runs.Unreadable as error:  # interrupted before its facts were written, or changed
            if runs.states_result(path.read_bytes()):
                refuse(f"{path} has a RESULT, but cannot be read: {error}; restore this file")
            run = None
        if run and (run.complete or run.ended == "not finite"):
            seeds.add(run.seed)
        else:
            (variant / "unfinished").mkdir(exist_ok=True)
            path.rename(variant / "unfinished" / path.name)
            shutil.rmtree(path.with_suffix(""), ignore_errors=True)
    return seeds


def interpreter() -> str:
    """Returns this Python if it has jax, else that of run.sh."""
    if importlib.util.find_spec("jax"):
        return sys.executable
    python = ROOT / ".venv/bin/python"
    if not python.exists():
        refuse("this Python has no jax, and there is no .venv: run ./run.sh tiny once")
    return str(python)


class Screen:
    """Prints the lines of runs, except those with paths, which begin in the variant's folder. What
    comes before training, such as the table of layers, is printed once if it is the same in all."""

    def __init__(self, keep_weights: bool):
        self.keep_weights = keep_weights
        self.heads = set()  # that were printed

    def show(self, lines: Iterable[str]) -> None:
        """Prints the lines of a run."""
        head = []
        has_begun = False
        for line in lines:
            line = line.rstrip("\n")
            begins = line.startswith(("compiling ", "step:"))
            if begins and not has_begun:
                self.show_head(head)
                has_begun = True
            if " logs/" in line:
                continue
            if line.startswith("RESULT {") and not self.keep_weights:  # they are deleted
                line = re.sub(', "weights": "[^"]*"', "", line)
            if has_begun:
                say(line)
            else:
                head.append(line)
        if not has_begun:
            self.show_head(head)

    def show_head(self, head: list[str]) -> None:
        """Prints what comes before training, if it was not printed before."""
        text = "\n".join(head)
        if text and text not in self.heads:
            say(text)
        self.heads.add(text)


def run(python: str, variant: Path, arguments: list[str], lock: int, screen: Screen) -> int:
    """Trains once; returns the exit status. Signals are passed on to the training, and raised as
    KeyboardInterrupt when it has ended."""
    env = os.environ.copy()
    env |= machine.decide(machine.find_machine()).environment  # what run.sh sets for GPUs
    if arguments[0] == "tiny":  # as run.sh does where there is no GPU
        env = {"GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"} | env
    source = (variant / "train_gpt.py").read_bytes()
    if b"\n" + contest.BEGIN.encode() in source:  # run/launch.py does this for the others
        env = {"JAX_COMPILATION_CACHE_DIR": ".cache/jax"} | env
    command = [python, "train_gpt.py", *arguments]
    if re.search(rb"^def main\(.*\bcommand\b", source, re.M):  # older versions launch themselves
        command.insert(1, str(ROOT / "run/launch.py"))
    # In a new session, a terminal's Ctrl-C does not reach the training directly, but only once, by
    # send_signal below. The training inherits the lock: if this process is killed, no other
    # run_ab.py can start a run beside it. As its output is no terminal, it ends without a sample.
    output = dict(stdout=subprocess.PIPE, encoding="utf-8", errors="replace")
    child = subprocess.Popen(command, cwd=variant, env=env, pass_fds=[lock],
                             start_new_session=True, **output)  # fmt: skip
    interrupt = None
    while True:
        try:
            screen.show(child.stdout)
            status = child.wait()
            break
        except KeyboardInterrupt as error:
            interrupt = error
            child.send_signal(signal_number(error))
    if interrupt:
        raise interrupt
    return status


def time_left(waiting: list[str], seconds: dict[str, list[float]]) -> str:
    """As ", about 12 min left": for each of the variants that wait for a run, the mean of the
    seconds that its runs have taken, or of all runs if it had none. "" before the first run."""
    every = sum(seconds.values(), [])
    if not every:
        return ""
    total = sum(fmean(seconds[name] or every) for name in waiting)
    hours, minutes = divmod(math.ceil(total / 60), 60)
    return f", about {f'{hours} h ' if hours else ''}{minutes} min left"


def stop(number: int, _) -> NoReturn:
    """Handles a signal."""
    raise KeyboardInterrupt(number)


def signal_number(error: KeyboardInterrupt) -> int:
    """Returns the number of the signal that stop() handled."""
    return error.args[0]


def run_plan(out: Path, added: list[str]) -> None:
    """Adds variants to a plan, and runs everything in it that has not come to its end yet."""
    lock = os.open(out / "lock", os.O_CREAT | os.O_RDWR)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        refuse(f"{out} is in use: wait for its run, or stop it")
    plan = read_plan(out)
    python = interpreter()
    if plan["machine"] != machine_hash(plan["salt"]):
        refuse(f"{out} was begun on another machine, and runs of two machines are not comparable")
    for name, sha256 in plan["arms"].items():
        source = out / name / "train_gpt.py"
        if not source.is_file() or hashlib.sha256(source.read_bytes()).hexdigest() != sha256:
            refuse(f"{source} has changed since the plan was made; make another plan")
    if added:
        add_variants(out, plan, added)
    turns = [(seed, name) for seed in plan["seeds"] for name in plan["arms"]]
    finished = {name: finished_seeds(out / name) for name in plan["arms"]}
    waiting = [name for seed, name in turns if seed not in finished[name]]
    seconds = {name: [] for name in plan["arms"]}
    screen = Screen(plan["keep_weights"])
    for number, (seed, name) in enumerate(turns, start=1):
        if seed in finished[name]:
            continue
        place = out / name / "logs"
        left = time_left(waiting, seconds)
        say(f"\n[{number}/{len(turns)}] {name}, seed {seed}, log in {place}{left}")
        arguments = [*plan["arguments"], *plan["flags"].get(name, []), "--seed", str(seed)]
        start = time.monotonic()
        status = run(python, out / name, arguments, lock, screen)
        if seed not in finished_seeds(out / name):
            refuse(f"this run ended with status {status} and does not count; remove the cause, "
                   f"then continue: {to_resume(out)}")  # fmt: skip
        seconds[name].append(time.monotonic() - start)
        waiting.remove(name)
        if not plan["keep_weights"]:
            for weights in (out / name / "logs").glob("*.npz"):
                weights.unlink()  # they are large, and not evidence


def main() -> int:
    """Makes a plan or takes that of --resume, runs it, and returns the status of verify.py."""
    args = parse(sys.argv[1:])
    if not args.resume:
        interpreter()  # refuses before a plan is made
    for name, value in sorted(os.environ.items()):
        if LOGGED_VARIABLES.match(name) and not verify.is_neutral(name, value):
            say(f"{name} is set, so these runs will not count as a record")
    out = args.resume or make_plan(args)
    if not (out / "plan.json").is_file():
        refuse(f"no such file: {out}/plan.json; --resume needs the folder of a plan")
    say(f"the plan is in {out}/plan.json")
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) != signal.SIG_IGN:  # a shell's background job ignores SIGINT
            signal.signal(number, stop)
    try:
        run_plan(out, added=args.variants if args.resume else [])
        return judge(out)
    except KeyboardInterrupt as error:
        with contextlib.suppress(OSError):
            print(f"\nrun_ab.py: interrupted; to continue: {to_resume(out)}", file=sys.stderr)
        return 128 + signal_number(error)


def judge(out: Path) -> int:
    """Judges the runs of a plan by verify.py; returns its status."""
    plan = read_plan(out)
    variants = [out / name for name in plan["arms"]]
    # Where the second of two cannot be a record, they are compared like many.
    could_be_record = plan["arguments"][1:] == ["--target", "0"]
    if plan["flags"] or plan["added"]:
        could_be_record = False
    if len(variants) == 1:
        judged = variants
    elif len(variants) == 2 and could_be_record:
        baseline, new = variants
        judged = [new, baseline]
    else:
        judged = [out]
    say(f"\n./run.sh verify {' '.join(map(typed, judged))}\n")
    command = [sys.executable, str(ROOT / "records/verify.py"), *map(str, judged)]
    done = subprocess.run(command, stdout=subprocess.PIPE, encoding="utf-8", errors="replace")
    say(done.stdout.rstrip("\n"))
    status = done.returncode
    return status if status >= 0 else 128 - status  # as a shell states that a signal ended it


if __name__ == "__main__":
    with messages.one_line("run_ab.py", status=2):
        final_status = main()
    sys.exit(final_status)
