"""Lists what runs have left on the disk, asks, and removes it.

    ./run.sh clean [--yes] [--all]

Logs and the newest weights of each preset stay, and so does everything of a run that is still
going. So do the checkpoints of runs that were interrupted, which --all removes as well. In logs/ it
lists only what has the name of a run. It also lists copies that ./run.sh idea has made and nobody
has edited, .cache/jax, .pytest_cache and .ruff_cache. It touches nothing else, and nothing outside
of this folder, to which a link may lead.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import shutil
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "data"))
sys.path.append(str(ROOT / "records"))
import idea  # noqa: E402
from messages import Fault, Parser, one_line  # noqa: E402

RUN = re.compile("[0-9]{4}-[0-9]{2}-[0-9]{2}T[0-9]{2}-[0-9]{2}-[0-9]{2}_[0-9a-f]{8}")  # a date
SEPARATOR = b"\n" + 100 * b"=" + b"\n"  # between the source and the rest of a log
PRESET = rb'\nconfig {"preset": "(\w+)"'  # in the facts of a log
TAIL = 2**16  # bytes at the end of a log, which have its RESULT
PICTURES = (".svg", ".png", ".html")
# What follows the name of a run, and what it is. record92 has files of tables beside its weights.
KINDS = {
    r"[.]npz": "weights",
    r"[.]\w+[.](bin|part)": "weights",
    r"_\w+[.](svg|png|html)": "picture",
    r"_look": "pictures",
    "": "checkpoints",
}
CHECKPOINT = r"[0-9]{7}[.](state|\w+[.](bin|part))"
CACHES = {
    ".cache/jax": "compiled programs, which the next run compiles anew",
    ".pytest_cache": "cache of the tests",
    ".ruff_cache": "cache of the linter",
}
RESUMABLE = "checkpoint to resume from"
HOUR = 3600  # a log without an end that was written later is that of a run that may go on


class Item(NamedTuple):
    """A file or a folder that can be removed."""

    path: Path
    what: str
    size: int  # bytes


# ---- What is there -------------------------------------------------------------------------------
def is_within(path: Path, folder: Path) -> bool:
    """Whether a path, with all links followed, is below a folder."""
    path, folder = os.path.realpath(path), os.path.realpath(folder)
    return os.path.commonpath([path, folder]) == folder


def size_of(path: Path) -> int:
    """Bytes of a file, or of all files below a folder; links count as nothing."""
    if path.is_symlink():
        return 0
    if not path.is_dir():
        return path.stat().st_size
    total = 0
    for folder, _, names in os.walk(path):
        for name in names:
            with contextlib.suppress(OSError):  # deleted meanwhile
                total += os.lstat(os.path.join(folder, name)).st_size
    return total


def runs_in(logs: Path) -> list[str]:
    """The names of runs that have a log, the oldest first. Names begin with their dates."""
    return sorted(path.stem for path in logs.glob("*.txt") if RUN.fullmatch(path.stem))


def end_of(log: Path) -> bytes:
    """The last bytes of a log, without the source with which it begins; b"" if there is none, as on
    another host."""
    try:
        with open(log, "rb") as file:
            file.seek(max(0, log.stat().st_size - TAIL))
            return file.read().rpartition(SEPARATOR)[2]
    except OSError:
        return b""


def has_result(log: Path) -> bool:
    """Whether a log has a RESULT, after the source with which it begins."""
    return b"\nRESULT {" in b"\n" + end_of(log)


def preset_of(log: Path) -> str:
    """The preset of a run by its log; "" where none is known."""
    try:
        found = re.search(PRESET, b"\n" + log.read_bytes().partition(SEPARATOR)[2])
    except OSError:
        return ""
    return found[1].decode() if found else ""


def is_going(logs: Path, run: str) -> bool:
    """Whether a run still goes on: run/guard.py locks its folder, or its log. On a disk that knows
    no locks, and for the frozen script, a log without an end counts that was written in the last
    hour."""
    log = logs / f"{run}.txt"
    if is_locked(logs / run) or is_locked(log):
        return True
    try:
        if abs(time.time() - log.stat().st_mtime) > HOUR:
            return False
    except OSError:  # no log
        return False
    stops = (b"RESULT {", b"INTERRUPTED by ", b"NON-FINITE: ", b"to resume: ")
    return not any(line.startswith(stops) for line in end_of(log).splitlines()[-2:])


def is_locked(path: Path) -> bool:
    """Whether another process has locked a file or a folder, or may have, as where this one may not
    look. Nothing is written. Processes that ask at the same time do not disturb each other."""
    try:
        number = os.open(path, os.O_RDONLY)
    except PermissionError:
        return True
    except OSError:
        return False
    try:
        fcntl.flock(number, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):
        return True
    except OSError:  # a disk without locks
        return False
    finally:
        os.close(number)  # also unlocks it
    return False


def newest_weights(logs: Path) -> dict[str, str]:
    """The runs with the newest weights of each preset, by name, which begins with a date, and by
    time, with their presets."""
    by_preset = {}
    for path in logs.glob("*.npz"):
        if RUN.fullmatch(path.stem):
            by_preset.setdefault(preset_of(path.with_suffix(".txt")), []).append(path)
    newest = {}
    for preset, paths in by_preset.items():
        latest = max(paths, key=lambda path: path.lstat().st_mtime)
        newest.update({max(paths).stem: preset, latest.stem: preset})
    return newest


def left_by_runs(logs: Path) -> list[Item]:
    """All that has the name of a run, but for logs, the newest weights, and runs that go on."""
    items = []
    newest = newest_weights(logs)
    matches = {path: RUN.match(path.name) for path in sorted(logs.iterdir())}
    runs = {run[0] for run in matches.values() if run}
    going = {run for run in runs if is_going(logs, run)}
    for path, run in matches.items():
        if not run or path.is_symlink() or run[0] in going:
            continue
        rest = path.name[run.end() :]
        kinds = [what for pattern, what in KINDS.items() if re.fullmatch(pattern, rest)]
        what = kinds[0] if kinds else ""
        if path.is_dir():
            if what == "checkpoints":
                items += left_in_folder(path)
            if what == "pictures" and has_only_pictures(path):
                items.append(Item(path, what, size_of(path)))
        elif what == "picture":
            items.append(Item(path, what, size_of(path)))
        elif what == "weights" and run[0] not in newest:
            preset = preset_of(logs / f"{run[0]}.txt")
            what += f" of a run of {preset}" if preset else ""
            items.append(Item(path, what, size_of(path)))
    return items


def has_only_pictures(folder: Path) -> bool:
    """Whether all files below a folder are pictures or pages, as those of look are."""
    names = [name for _, folders, files in os.walk(folder) for name in (*folders, *files)]
    return bool(names) and all(name.endswith(PICTURES) for name in names)


def left_in_folder(folder: Path) -> list[Item]:
    """The checkpoints of a run that does not go on."""
    ended = has_result(folder.with_suffix(".txt"))
    items = []
    for path in sorted(folder.iterdir()):
        is_known = re.fullmatch(CHECKPOINT, path.name) or path.name == "next.part"
        if path.is_symlink() or not is_known:
            continue
        what = "checkpoint of a run that has ended" if ended else RESUMABLE
        if path.name == "next.part":
            what = "a part of a checkpoint"
        items.append(Item(path, what, size_of(path)))
    return items


def everything(root: Path) -> list[Item]:
    """All that could be removed in a folder."""
    items = []
    logs = root / "logs"
    if logs.is_dir() and is_within(logs, root):
        items += left_by_runs(logs)
    for path in sorted(root.glob("idea_*.py")):
        if path.is_file() and not path.is_symlink() and idea.is_as_made(path):
            items.append(Item(path, "copy that ./run.sh idea makes anew", size_of(path)))
    for name, what in CACHES.items():
        path = root / name
        if path.is_dir() and not path.is_symlink() and is_within(path, root):
            items.append(Item(path, what, size_of(path)))
    return [item for item in items if item.size]


# ---- In words ------------------------------------------------------------------------------------
def megabytes(size: int) -> str:
    """As "0.3 MB", "261 MB" or "12,400 MB"."""
    digits = 1 if size < 10e6 else 0
    return f"{size / 1e6:,.{digits}f} MB"


def disk_line(root: Path = Path()) -> str:
    """What runs have left in logs/, in a line; "" if there is nothing."""
    logs = root / "logs"
    runs = runs_in(logs)
    if not runs:
        return ""
    count = "1 run" if len(runs) == 1 else f"{len(runs)} runs"
    line = f"left in logs/: {count}, {megabytes(sum(size_of(path) for path in logs.iterdir()))}"
    items = left_by_runs(logs) if is_within(logs, root) else []
    can_go = any(item.what != RESUMABLE for item in items)
    return f"{line}; ./run.sh clean lists what can go" if can_go else line


def table(items: list[Item], root: Path) -> str:
    """A line for each item, and their sum."""
    lines = []
    for item in items:
        lines.append(f"{megabytes(item.size):>12}  {item.path.relative_to(root)}  ({item.what})")
    lines.append(f"{megabytes(sum(item.size for item in items)):>12}  together")
    return "\n".join(lines)


def remarks(root: Path, kept: list[Item]) -> Iterator[str]:
    """What stays, and why."""
    logs = root / "logs"
    if logs.is_dir() and not is_within(logs, root):
        yield f"logs/ leads to {os.path.realpath(logs)}, where nothing is removed"
        return
    for run in runs_in(logs):
        if is_going(logs, run):
            yield f"stays: all of {run}, which may still be going"
    if kept:
        size = megabytes(sum(item.size for item in kept))
        yield f"stays: {size} of checkpoints to resume from; with --all, they go as well"
    for run, preset in sorted(newest_weights(logs).items()):
        of_preset = f" of {preset}" if preset else ""
        yield f"stays: logs/{run}.npz, the newest weights{of_preset}"


# ---- Removing ------------------------------------------------------------------------------------
def remove(item: Item) -> str:
    """Removes it, unless a run has begun meanwhile that needs it. Returns why it stays, or ""."""
    path = item.path
    run = RUN.match(path.name) or RUN.match(path.parent.name)
    if run:
        logs = path.parent if RUN.match(path.name) else path.parent.parent
        if is_going(logs, run[0]):
            return "its run may be going"
    try:
        if path.is_symlink():
            return "it is a link"
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink()
    except OSError as error:
        return error.strerror or str(error)
    if run and path.parent.name == run[0]:
        with contextlib.suppress(OSError):  # other files are in it
            path.parent.rmdir()
    return ""


def agrees() -> bool:
    """Asks. Raises Fault where nobody can answer."""
    sys.stdout.flush()  # the list comes first, also where nobody reads it
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        raise Fault("nobody can answer here: nothing was removed; --yes removes it without asking")
    print("Remove these? [y/N] ", end="", flush=True)
    return sys.stdin.readline().strip().lower() in ("y", "yes")


def main(argv: list[str], root: Path = ROOT) -> int:
    """Runs the command line; the exit status is 1 if something could not be removed."""
    cli = Parser(prog="./run.sh clean", description=__doc__)
    cli.add_argument("--yes", action="store_true", help="do not ask")
    cli.add_argument("--all", action="store_true", help="also checkpoints to resume from")
    args = cli.parse_args(argv)
    items = everything(root)
    kept = [item for item in items if item.what == RESUMABLE and not args.all]
    items = [item for item in items if item not in kept]
    print(table(items, root) if items else "There is nothing to remove.")
    for line in remarks(root, kept):
        print(line)
    if not items:
        return 0
    if not (args.yes or agrees()):
        print("Nothing was removed.")
        return 0
    status = 0
    for item in items:
        why = remove(item)
        if why:
            status = 1
            print(f"run.sh clean: {item.path.relative_to(root)} stays: {why}", file=sys.stderr)
    print("Removed." if not status else "Removed the rest.")
    return status


if __name__ == "__main__":
    with one_line("run.sh clean"):
        sys.exit(main(sys.argv[1:]))
