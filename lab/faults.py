"""Plants faults in copies of the repository, one at a time, and names the test that catches each.

    .venv/bin/python lab/faults.py                       all faults of lab/faults/*.toml
    .venv/bin/python lab/faults.py window evals/loss.py  those whose name or file contains a word
    .venv/bin/python lab/faults.py --out FILE            also writes a log

This finds faults that no test catches: of mathematics, data, the judge and resume. At most 130 are
there, without those that would only change a number of the golden tests. It takes half an hour, so
it is not part of the suite, and .github/workflows/faults.yml runs it every week. The exit status is
1 if a fault survived, or if a test fails without any fault.
"""

import argparse
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import date
from importlib.metadata import version
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent


class Fault(NamedTuple):
    """One entry of lab/faults/*.toml."""

    name: str  # what is wrong, in a sentence
    file: str  # relative to the repository
    old: str  # text that the file contains once
    new: str  # text that replaces it
    tests: str  # arguments for pytest; one of these tests must fail


class Outcome(NamedTuple):
    """How pytest ended in a copy."""

    failed: str  # the first test that failed; "" if all passed
    broken: str  # why there is no result: nothing was collected, or pytest itself failed
    seconds: float


def read_faults() -> list[Fault]:
    """All faults, in the order of their files."""
    faults = []
    for path in sorted((ROOT / "lab/faults").glob("*.toml")):
        with path.open("rb") as file:
            faults += [Fault(**entry) for entry in tomllib.load(file)["fault"]]
    return faults


def planted(fault: Fault) -> str:
    """The text of the fault's file with the fault in it. Raises ValueError if none can be made."""
    text = (ROOT / fault.file).read_text(encoding="utf-8")
    count = text.count(fault.old)
    if count != 1 or fault.old == fault.new:
        raise ValueError(
            f"{fault.name}: {fault.file} must contain `old` once, and `new` must be different; "
            f"{fault.old!r} is there {count} times"
        )
    return text.replace(fault.old, fault.new)


def copy_tree(folder: Path) -> None:
    """Copies what git knows or does not ignore. All copies share .cache, which has the compiled
    programs."""
    command = ["git", "ls-files", "-co", "--exclude-standard"]
    listed = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout
    for name in listed.splitlines():
        if (ROOT / name).is_file():
            target = folder / name
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, target)
    (ROOT / ".cache/tests").mkdir(parents=True, exist_ok=True)
    (folder / ".cache").symlink_to(ROOT / ".cache")


def run_tests(tests: str, fault: Fault | None = None) -> Outcome:
    """Runs tests in a copy, with a fault in it or without."""
    start = time.perf_counter()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        copy_tree(folder)
        if fault:
            (folder / fault.file).write_text(planted(fault), encoding="utf-8")
        options = ["-x", "-q", "--tb=no", "-rfE", "-p", "no:cacheprovider"]
        command = [sys.executable, "-m", "pytest", *options, *shlex.split(tests)]
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    seconds = time.perf_counter() - start
    lines = done.stdout.splitlines()
    failed = [line.split()[1] for line in lines if line.startswith(("FAILED ", "ERROR "))]
    collected = [test for test in failed if "::" in test]
    if done.returncode == 0:
        return Outcome("", "", seconds)
    if done.returncode == 1 and collected:
        return Outcome(collected[0], "", seconds)
    return Outcome("", f"pytest ended with {done.returncode}: {lines[-1:]}", seconds)


def report(faults: list[Fault], jobs: int) -> Iterator[tuple[bool, str]]:
    """Yields a verdict and a line for every selection of tests that fails without a fault, and
    after that for every fault."""
    selections = list(dict.fromkeys(fault.tests for fault in faults))
    with ThreadPoolExecutor(jobs) as pool:
        outcomes = pool.map(run_tests, selections)
        for tests, outcome in zip(selections, outcomes, strict=True):
            if outcome.failed or outcome.broken:
                why = outcome.failed or outcome.broken
                yield False, f"FAILS WITHOUT A FAULT  {tests}: {why}"
        outcomes = pool.map(run_tests, [fault.tests for fault in faults], faults)
        for fault, outcome in zip(faults, outcomes, strict=True):
            where = f"{fault.file}: {fault.name}"
            if outcome.failed:
                yield True, f"caught in {outcome.seconds:3.0f} s  {where}  by {outcome.failed}"
            else:
                yield False, f"SURVIVED  {where}  {outcome.broken or fault.tests}"


def main() -> int:
    """Runs the command line and returns the exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("words", nargs="*", help="plant only faults with one of these words")
    parser.add_argument("--jobs", type=int, default=2, help="how many tests run at once")
    parser.add_argument("--out", type=Path, help="write a log to this file")
    args = parser.parse_args()
    faults = read_faults()
    if args.words:
        chosen = []
        for fault in faults:
            if any(word in f"{fault.file}: {fault.name}" for word in args.words):
                chosen.append(fault)
        faults = chosen
    for fault in faults:
        planted(fault)  # raises ValueError before any test runs
    describe = ["git", "describe", "--always", "--dirty"]
    commit = subprocess.run(describe, cwd=ROOT, capture_output=True, text=True).stdout.strip()
    lines = [f"{len(faults)} faults, {date.today()}, commit {commit}, jax {version('jax')}"]
    print(lines[0], flush=True)
    verdicts = []
    for passed, line in report(faults, args.jobs):
        print(line, flush=True)
        verdicts.append(passed)
        lines.append(line)
    lines.append(f"{verdicts.count(True)} caught, {verdicts.count(False)} not")
    print(lines[-1])
    if args.out:
        args.out.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return 0 if all(verdicts) else 1


if __name__ == "__main__":
    sys.exit(main())
