"""Makes a copy of train_gpt.py with ideas from the shelf, records/ideas/, which run.sh then trains.

    ./run.sh idea                                                lists the ideas
    ./run.sh idea NAME [NAME ...] [PRESET] [--field value ...]   trains train_gpt.py with them

    python records/idea.py --refresh COMMIT     makes the patches, which applied to that commit's
                                            train_gpt.py, apply to the file as it is

The copy is idea_NAME.py, a file like any other: edit it, and train it by  ./run.sh idea_NAME.py.
Ideas that change different lines combine. records/ideas/README.md says what they should gain.

run.sh executes this before anything is installed, so Python 3.8 is enough. It needs git.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
import tempfile
import zlib
from pathlib import Path

sys.path[:0] = [os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "run")]
import machine  # noqa: E402 - it adds the folder of messages to the path
from messages import Fault, nearest, one_line  # noqa: E402

ROOT = Path(__file__).resolve().parents[1]
SHELF = ROOT / "records" / "ideas"
TRAINER = ROOT / "train_gpt.py"
# In the comment of a patch, the patch in the folder base/ that it was made on top of.
BASE = re.compile(r"on top of (base/\w+\.patch)")
# The last line of a copy. As long as the checksum holds, nobody has edited the copy.
MARK = re.compile(rb"# Made by ./run.sh idea .*; crc32 of the lines above: (\d+)\n\Z")
NO_GIT = "git, which applies patches, is not installed: try  apt-get install git"


# ---- The shelf -----------------------------------------------------------------------------------
def shelf() -> dict[str, Path]:
    """The patches by name."""
    return {path.stem: path for path in sorted(SHELF.glob("*.patch"))}


def patch_of(name: str, others: list[str]) -> Path:
    """The patch of an idea. Raises Fault, which may name one of some other words as meant."""
    known = shelf()
    if name not in known:
        near = nearest(name, [*known, *others]) or ": ./run.sh idea  lists them"
        raise Fault(f"there is no idea {name!r}{near}")
    return known[name]


def description(patch: Path) -> list[str]:
    """The lines of the comment with which a patch begins."""
    lines = []
    for line in patch.read_text(encoding="utf-8", errors="replace").splitlines():
        if not line.startswith("#"):
            break
        lines.append(line.lstrip("# "))
    return lines


def listing() -> str:
    """A line for every idea."""
    lines = ["./run.sh idea NAME  trains train_gpt.py with one of these; several combine:", ""]
    for name, patch in shelf().items():
        lines.append(f"{name:<18} {' '.join(description(patch)[:1])}")
    lines += ["", "records/ideas/README.md has what they should gain, and their milliseconds"]
    return "\n".join(lines)


# ---- Patches -------------------------------------------------------------------------------------
def apply(source: bytes, patches: list[Path], what: str = "train_gpt.py") -> bytes:
    """A source with patches, of which each must apply to the source alone, or on top of its base:
    they are merged line by line, in any order. Raises Fault, also for two that change the same
    lines. what names the source in messages."""
    merged = source
    changed = {}
    for patch in patches:
        new = patched(source, patch, what)
        both = merge(merged, source, new)
        if both is None:
            for other, other_new in changed.items():
                if merge(other_new, source, new) is None:
                    place = place_of_conflict(other_new, source, new)
                    raise Fault(f"{other.stem} and {patch.stem} do not combine: both change the "
                                f"same lines {place}")  # fmt: skip
            others = ", ".join(path.stem for path in changed)
            place = place_of_conflict(merged, source, new)
            raise Fault(f"{patch.stem} does not combine with all of {others}, {place}")
        merged = both
        changed[patch] = new
    return merged


def base_of(patch: Path) -> Path | None:
    """The patch that another one was made on top of, if there is one."""
    found = BASE.search(" ".join(description(patch)))
    if not found:
        return None
    beside = patch.parent / found[1]
    return beside if beside.exists() else SHELF / found[1]


def with_base(source: bytes, patch: Path, what: str) -> bytes:
    """A source with the patch that another one was made on top of."""
    base = base_of(patch)
    return patched(source, base, what) if base else source


def patched(source: bytes, patch: Path, what: str) -> bytes:
    """A source with one patch, and with the one that it was made on top of."""
    source = with_base(source, patch, what)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "train_gpt.py")
        file.write_bytes(source)
        done = git("apply", str(patch.resolve()), cwd=folder)
        new = file.read_bytes()
    if done.returncode or new == source:
        why = done.stderr.decode("utf-8", "replace").strip()
        raise Fault(f"{patch} does not apply to {what}: {why}")
    return new


def merge(ours: bytes, base: bytes, theirs: bytes) -> bytes | None:
    """Two changes of a text in one; None if they conflict."""
    done = merge_file(ours, base, theirs)
    return None if done.returncode else done.stdout


def merge_file(ours: bytes, base: bytes, theirs: bytes) -> subprocess.CompletedProcess:
    """What git makes of two changes of a text. The status is the number of conflicts."""
    with tempfile.TemporaryDirectory() as folder:
        names = ["ours", "base", "theirs"]
        for name, text in zip(names, (ours, base, theirs)):  # noqa: B905 (Python 3.8)
            Path(folder, name).write_bytes(text)
        return git("merge-file", "--stdout", *names, cwd=folder)


def place_of_conflict(ours: bytes, base: bytes, theirs: bytes) -> str:
    """The function or the class in which two changes conflict first."""
    text = merge_file(ours, base, theirs).stdout.decode("utf-8", "replace")
    before, _, _ = text.partition("\n<<<<<<< ")
    names = re.findall(r"^(?:def|class) (\w+)", before, re.M)
    return f"in {names[-1]}, or after it" if names else "at the top of the file"


def git(*arguments: str, cwd: str) -> subprocess.CompletedProcess:
    """Runs git in a folder, as if that were in no repository and the user had set nothing."""
    parent = str(Path(cwd).resolve().parent)
    environment = {name: x for name, x in os.environ.items() if not name.startswith("GIT_")}
    environment["GIT_CEILING_DIRECTORIES"] = parent
    environment |= {"GIT_CONFIG_NOSYSTEM": "1", "GIT_CONFIG_GLOBAL": os.devnull}
    try:
        return subprocess.run(["git", *arguments], cwd=cwd, env=environment, capture_output=True)
    except FileNotFoundError:
        raise Fault(NO_GIT) from None


def refresh(old: bytes) -> None:
    """Renews all patches: they were made for an old train_gpt.py. One that conflicts with what has
    changed since, or that changes nothing any more, stays as it is, with a line that says so."""
    new = TRAINER.read_bytes()
    renewed = {}
    what = "that commit's train_gpt.py"
    for patch in [*SHELF.glob("base/*.patch"), *shelf().values()]:
        changed = patched(old, patch, what)
        merged = merge(new, old, changed)
        base = merge(new, old, with_base(old, patch, what))
        if merged is None or base is None:
            print(f"{patch.stem} conflicts {place_of_conflict(new, old, changed)}")
            continue
        if merged == base:
            print(f"{patch.stem} changes nothing any more: remove it")
            continue
        comment = "".join(f"# {line}\n" for line in description(patch))
        renewed[patch] = comment + difference(base, merged)
    for patch, text in renewed.items():
        patch.write_text(text, encoding="utf-8")


def difference(old: bytes, new: bytes) -> str:
    """The patch that makes one text of another."""
    with tempfile.TemporaryDirectory() as folder:
        for name, text in {"a": old, "b": new}.items():
            Path(folder, name).mkdir()
            Path(folder, name, "train_gpt.py").write_bytes(text)
        paths = "a/train_gpt.py", "b/train_gpt.py"
        done = git("diff", "--no-index", "--no-prefix", *paths, cwd=folder)
    text = done.stdout.decode("utf-8")
    return text[text.index("--- a/") :]


# ---- Copies --------------------------------------------------------------------------------------
def copy_of(names: list[str]) -> bytes:
    """train_gpt.py with these ideas, and a last line that says so."""
    source = apply(TRAINER.read_bytes(), [patch_of(name, []) for name in names])
    mark = f"# Made by ./run.sh idea {' '.join(names)}; crc32 of the lines above: "
    return source + f"{mark}{zlib.crc32(source)}\n".encode()


def is_as_made(path: Path) -> bool:
    """Whether a file is a copy that copy_of() has made and nobody has edited."""
    text = path.read_bytes()
    mark = MARK.search(text)
    return bool(mark) and zlib.crc32(text[: mark.start()]) == int(mark[1])


def write_copy(names: list[str], folder: Path = ROOT) -> str:
    """Writes idea_NAME.py, and returns its name. Raises Fault if it is there and was edited."""
    path = folder / f"idea_{'_'.join(names)}.py"
    text = copy_of(names)
    if path.exists() and not is_as_made(path):
        raise Fault(f"{path.name} is there, and was edited: to train it as it is, type  ./run.sh "
                    f"{path.name} ...; to have it made anew, remove it")  # fmt: skip
    if not path.exists() or path.read_bytes() != text:
        part = path.with_suffix(f".{os.getpid()}.part")  # others may do this in the same moment
        part.write_bytes(text)
        part.replace(path)
    return path.name


# ---- The command line ----------------------------------------------------------------------------
def split(argv: list[str]) -> tuple[list[str], list[str]]:
    """The names of ideas, and the arguments of the run. Raises Fault."""
    presets, _ = machine.names_in(str(TRAINER))
    words = list(argv)
    names = []
    while words and not words[0].startswith("-") and words[0] not in presets:
        patch_of(words[0], presets)
        names.append(words.pop(0))
    if not names:
        raise Fault("name an idea first, then the preset: ./run.sh idea  lists them")
    return list(dict.fromkeys(names)), words


def main(argv: list[str]) -> None:
    """Prints the list, or the arguments with which run.sh trains the copy."""
    if not argv:
        print(listing())
    elif argv[0] in machine.HELP:
        print((__doc__ or "").strip())
    elif argv[0] == "--refresh":
        if len(argv) != 2:
            raise Fault("--refresh takes one commit: that for which the patches were made")
        done = git("show", f"{argv[1]}:train_gpt.py", cwd=str(ROOT))
        if done.returncode:
            raise Fault(f"no such commit: {done.stderr.decode('utf-8', 'replace')}")
        refresh(done.stdout)
    else:
        names, words = split(argv)
        print(" ".join(shlex.quote(word) for word in [write_copy(names), *words]))


if __name__ == "__main__":
    with one_line("run.sh idea", status=2):
        main(sys.argv[1:])
