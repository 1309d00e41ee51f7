"""Run versions of train_gpt.py side by side, as evidence: see records/README.md.

    python records/run_ab.py ARM [ARM ...] -n RUNS [--out DIR] [-- preset and flags]
    python records/run_ab.py --resume DIR

An arm is a train_gpt.py, a folder that holds one, or a .patch of the first arm's; NAME=PATH gives
it a name. DIR/plan.json says how many runs, with which seeds, before the first one. Then every seed
is run by every arm in turn (A B A B), for the whole schedule: --target 0. What was interrupted is
run again by --resume; nothing else is. At the end verify.py judges.
"""

import argparse
import datetime
import fcntl
import hashlib
import importlib.util
import json
import os
import re
import secrets
import signal
import socket
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NoReturn

import runs
import verify

ROOT = Path(__file__).resolve().parents[1]
STEERS = re.compile("JAX|XLA|(LIB)?TPU|CUD|NVI|NCCL|TF_CPP|GLI")  # the variables that a log states
TAKEN = {"cache", "lock", "logs", "plan.json", "plan.part"}  # in the folder of a plan


def refuse(message: str) -> NoReturn:
    print(f"run_ab.py: {message}", file=sys.stderr)
    sys.exit(2)


def machine(salt: str) -> str:
    """Equal for one plan on one machine; tells nothing about either."""
    return hashlib.sha256(f"{salt} {socket.gethostname()}".encode()).hexdigest()[:16]


def parse(argv: list[str]) -> argparse.Namespace:
    split = argv.index("--") if "--" in argv else len(argv)
    cli = argparse.ArgumentParser(description=__doc__, allow_abbrev=False,
                                  formatter_class=argparse.RawDescriptionHelpFormatter)  # fmt: skip
    cli.error = refuse
    cli.add_argument("arms", nargs="*", metavar="ARM", help="[NAME=]train_gpt.py, folder or patch")
    cli.add_argument("-n", type=int, help="runs of each arm")
    cli.add_argument("--out", type=Path, help="a new folder; default logs/ab_<time>")
    cli.add_argument("--resume", type=Path, metavar="DIR", help="go on with the plan in DIR")
    args = cli.parse_args(argv[:split])
    args.flags = argv[split + 1 :]
    if args.resume and (args.arms or args.n or args.out or args.flags):
        refuse("--resume takes its arms, number and flags from the plan; give nothing else")
    if not args.resume and not args.arms:
        refuse("name at least one train_gpt.py; --help shows how")
    if not args.resume and (args.n is None or not 2 <= args.n <= 1000):
        refuse("-n must be at least 2: one run says nothing about the next")
    for flag in ("--target", "--seed"):
        if any(word.split("=")[0] == flag for word in args.flags):
            refuse(f"{flag} is run_ab.py's: all runs go to the end of the schedule (--target 0), "
                   "with the seeds of the plan")  # fmt: skip
    return args


def read_arms(specs: list[str]) -> dict[str, bytes]:
    """Of every arm its name and its source."""
    arms, first = {}, b""
    for spec in specs:
        name, _, path = spec.rpartition("=")
        path = Path(path)
        source = path / "train_gpt.py" if path.is_dir() else path
        if not source.is_file():
            refuse(f"{source} is not there")
        is_patch = path.suffix == ".patch"
        if is_patch and not first:
            refuse(f"{path}: the first arm must be a train_gpt.py, which patches change")
        inside = source.resolve().parent.name if source.name == "train_gpt.py" else source.stem
        name = name or inside
        if not re.fullmatch("[A-Za-z0-9][A-Za-z0-9_.-]*", name) or name in arms or name in TAKEN:
            refuse(f"{name!r} is taken or cannot name a folder; write NAME={path}")
        text = patched(first, path) if is_patch else source.read_bytes()
        if not text.endswith(b"\n") or b"\n" + runs.BORDER in text:
            refuse(f"{source}: its end could not be seen in a log; it must end with a newline and "
                   "have no line of 100 =")  # fmt: skip
        first = first or text
        arms[name] = text
    return arms


def patched(first: bytes, patch: Path) -> bytes:
    """A train_gpt.py with the patch applied, by git."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "train_gpt.py")
        file.write_bytes(first)
        # Should the folder lie in a repository, git would look for the file at its top.
        alone = os.environ | {"GIT_CEILING_DIRECTORIES": str(Path(folder).resolve().parent)}
        done = subprocess.run(["git", "apply", str(patch.resolve())], cwd=folder, env=alone,
                              capture_output=True, text=True)  # fmt: skip
        text = file.read_bytes()
    if done.returncode or text == first:
        refuse(f"{patch} does not apply to the first arm: {done.stderr.strip()}")
    return text


def make_plan(args: argparse.Namespace) -> Path:
    """DIR/plan.json, and of every arm DIR/<arm>/train_gpt.py."""
    arms, now = read_arms(args.arms), datetime.datetime.now(datetime.UTC)
    out = args.out or ROOT / "logs" / now.strftime("ab_%Y-%m-%dT%H-%M-%S")
    try:
        out.mkdir(parents=True)
    except OSError as error:
        refuse(f"{out} cannot be made ({error.strerror}); to go on with its plan: --resume {out}")
    for name, text in arms.items():
        (out / name / "logs").mkdir(parents=True)
        (out / name / "train_gpt.py").write_bytes(text)
        (out / name / "data").symlink_to(ROOT / "data")  # a relative path in the log
    salt, seeds = secrets.token_hex(8), []
    while len(seeds) < args.n:
        seeds += {secrets.randbits(31)} - set(seeds)
    plan = dict(
        created=now.strftime("%Y-%m-%dT%H:%M:%SZ"), n=args.n, seeds=seeds,
        arguments=[*(args.flags or ["record"]), "--target", "0"], salt=salt, machine=machine(salt),
        arms={name: hashlib.sha256(text).hexdigest() for name, text in arms.items()},
    )  # fmt: skip
    part = out / "plan.part"
    part.write_text(json.dumps(plan, indent=1) + "\n")
    part.replace(out / "plan.json")
    return out


def done(arm: Path) -> set[int]:
    """Seeds whose run came to its end, good or bad; logs of others move to DIR/<arm>/unfinished."""
    seeds = set()
    for path in sorted((arm / "logs").glob("*.txt")):
        try:
            run = runs.read(path)
        except runs.Unreadable:  # interrupted before its facts were written
            run = None
        if run and (run.complete or run.ended == "not finite"):
            seeds.add(run.seed)
        else:
            (arm / "unfinished").mkdir(exist_ok=True)
            path.rename(arm / "unfinished" / path.name)
    return seeds


def interpreter() -> str:
    """This Python if it has jax, else that of run.sh."""
    if importlib.util.find_spec("jax"):
        return sys.executable
    python = ROOT / ".venv/bin/python"
    if not python.exists():
        refuse("this Python has no jax, and there is no .venv: run ./run.sh tiny once")
    return str(python)


def run(python: str, arm: Path, words: list[str], lock: int) -> int:
    """One training; its exit status. SIGINT and SIGTERM are passed on, and then waited for."""
    env = {"JAX_COMPILATION_CACHE_DIR": "../cache"} | os.environ  # later runs start sooner
    if words[0] == "tiny":  # as run.sh does where there is no GPU
        env = {"GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"} | env
    source = (arm / "train_gpt.py").read_text(encoding="utf-8")
    words = ["train_gpt.py", *words]
    if re.search(r"^def main\(.*\bcommand\b", source, re.M):  # older versions start themselves
        words = [str(ROOT / "dev/launch.py"), *words]
    # In a session of its own a terminal's Ctrl-C reaches it once, through here; and it holds the
    # lock, so that nobody starts a second one beside it should this process die.
    child = subprocess.Popen(
        [python, *words], cwd=arm, env=env, pass_fds=[lock], start_new_session=True
    )
    stopped = None
    while True:
        try:
            status = child.wait()
            break
        except KeyboardInterrupt as error:
            stopped = error
            child.send_signal(error.args[0])
    if stopped:
        raise stopped
    return status


def stop(number: int, _) -> NoReturn:
    """Handles a signal."""
    raise KeyboardInterrupt(number)


def run_plan(out: Path) -> None:
    """All runs of the plan that have not come to their end yet."""
    lock = os.open(out / "lock", os.O_CREAT | os.O_RDWR)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        refuse(f"{out} is in use: one of its runs is going on")
    plan, python = json.loads((out / "plan.json").read_text()), interpreter()
    if plan["machine"] != machine(plan["salt"]):
        refuse(f"{out} was begun on another machine; runs of two machines are not comparable")
    for name, sha in plan["arms"].items():
        source = out / name / "train_gpt.py"
        if not source.is_file() or hashlib.sha256(source.read_bytes()).hexdigest() != sha:
            refuse(f"{source} was changed after the plan was made; make another")
    turns = [(seed, name) for seed in plan["seeds"] for name in plan["arms"]]
    for i, (seed, name) in enumerate(turns, 1):
        if seed in done(out / name):
            continue
        print(f"\n[{i}/{len(turns)}] {name}, seed {seed}", flush=True)
        status = run(python, out / name, [*plan["arguments"], "--seed", str(seed)], lock)
        if seed not in done(out / name):
            print(f"run_ab.py: this run ended with status {status} and counts as none; when its "
                  f"cause is gone: --resume {out}", file=sys.stderr)  # fmt: skip
            sys.exit(1)
        for weights in (out / name / "logs").glob("*.npz"):
            weights.unlink()  # of no use as evidence, and large


def main() -> None:
    args = parse(sys.argv[1:])
    if not args.resume:
        interpreter()
    for name in sorted(os.environ):
        if STEERS.match(name) and not verify.NEUTRAL.fullmatch(name):
            print(f"{name} is set: these runs will not count as a record")
    out = args.resume or make_plan(args)
    if not (out / "plan.json").is_file():
        refuse(f"{out}/plan.json is not there")
    print(f"planned in {out}/plan.json")
    for number in (signal.SIGINT, signal.SIGTERM):
        if signal.getsignal(number) != signal.SIG_IGN:  # as in a job in the background
            signal.signal(number, stop)
    try:
        run_plan(out)
    except KeyboardInterrupt as error:
        print(f"\nrun_ab.py: interrupted; to go on: --resume {out}", file=sys.stderr)
        sys.exit(128 + error.args[0])
    plan = json.loads((out / "plan.json").read_text())
    arms = [out / name for name in plan["arms"]]
    # With flags no arm can be a record; then the question is what differs.
    _, *flags = plan["arguments"]
    could_be_record = flags == ["--target", "0"]
    if len(arms) == 1:
        judged = arms
    elif len(arms) == 2 and could_be_record:
        judged = [arms[1], arms[0]]
    else:
        judged = [out]
    words = [sys.executable, str(ROOT / "records/verify.py"), *map(str, judged)]
    print(f"\n{' '.join(['verify.py', *words[2:]])}\n", flush=True)
    sys.exit(subprocess.run(words).returncode)


if __name__ == "__main__":
    main()
