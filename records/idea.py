"""Makes a copy of train_gpt.py with ideas from the shelf, records/ideas/, and trains it by run.sh.

    ./run.sh idea                                                lists the ideas
    ./run.sh idea NAME [NAME ...] [PRESET] [--field value ...]   trains train_gpt.py with them

The copy is idea_NAME.py, a file like any other: edit it, and train it by  ./run.sh idea_NAME.py.
Ideas that change different lines combine. records/ideas/README.md says what they should gain.
"""

import difflib
import itertools
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.append(str(ROOT / "data"))
import messages  # noqa: E402

SHELF = ROOT / "records" / "ideas"
TRAINER = ROOT / "train_gpt.py"
# In the comment of a patch, the patch in the folder base/ that it was made on top of.
BASE = re.compile(r"on top of (base/\w+\.patch)")


class Conflict(ValueError):
    """A patch does not apply, or two do not combine. The message says where."""


# ---- The shelf -----------------------------------------------------------------------------------
def shelf() -> dict[str, Path]:
    """The patches by name."""
    return {path.stem: path for path in sorted(SHELF.glob("*.patch"))}


def description(patch: Path) -> list[str]:
    """The lines of the comment with which a patch begins."""
    comment = patch.read_text("utf-8", "replace").partition("--- a/")[0]
    return [line.lstrip("# ") for line in comment.splitlines()]


def base_of(patch: Path) -> Path | None:
    """The patch that another one was made on top of, if there is one."""
    found = BASE.search(" ".join(description(patch)))
    if not found:
        return None
    beside = patch.parent / found[1]
    return beside if beside.exists() else SHELF / found[1]


# ---- Patches -------------------------------------------------------------------------------------
def git(*arguments: str, cwd: str) -> subprocess.CompletedProcess:
    """Runs git in a folder, as if that were in no repository."""
    environment = os.environ | {"GIT_CEILING_DIRECTORIES": str(Path(cwd).resolve().parent)}
    return subprocess.run(["git", *arguments], cwd=cwd, env=environment, capture_output=True)


def patched(source: bytes, patch: Path) -> bytes:
    """A source with one patch, and with the one that it was made on top of. Raises Conflict."""
    base = base_of(patch)
    source = patched(source, base) if base else source
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "train_gpt.py")
        file.write_bytes(source)
        done = git("apply", str(patch.resolve()), cwd=folder)
        new = file.read_bytes()
    if done.returncode or new == source:
        raise Conflict(f"{patch} does not apply: {done.stderr.decode('utf-8', 'replace').strip()}")
    return new


def merge(ours: bytes, base: bytes, theirs: bytes) -> bytes | None:
    """Two changes of a text in one; None if they conflict."""
    with tempfile.TemporaryDirectory() as folder:
        names = ["ours", "base", "theirs"]
        for name, text in zip(names, (ours, base, theirs), strict=True):
            Path(folder, name).write_bytes(text)
        done = git("merge-file", "--stdout", *names, cwd=folder)
    return None if done.returncode else done.stdout


def apply(source: bytes, patches: list[Path]) -> bytes:
    """A source with patches, of which each must apply to the source alone, or on top of its base:
    they are merged line by line, in any order. Raises Conflict."""
    merged = source
    for patch in patches:
        both = merge(merged, source, patched(source, patch))
        if both is None:
            names = ", ".join(path.stem for path in patches)
            raise Conflict(f"{names} do not combine: {patch.stem} changes lines of those before it")
        merged = both
    return merged


def difference(old: bytes, new: bytes) -> bytes:
    """The patch that makes one train_gpt.py of another."""
    texts = [text.decode().splitlines(keepends=True) for text in (old, new)]
    return "".join(difflib.unified_diff(*texts, "a/train_gpt.py", "b/train_gpt.py")).encode()


# ---- Copies --------------------------------------------------------------------------------------
def copy_of(names: list[str]) -> bytes:
    """train_gpt.py with these ideas. Raises Conflict."""
    patches = shelf()
    return apply(TRAINER.read_bytes(), [patches[name] for name in names])


def write_copy(names: list[str], folder: Path = ROOT) -> str:
    """Writes idea_NAME.py, and returns its name. Raises Conflict if another file is there, which
    may have been edited."""
    path = folder / f"idea_{'_'.join(names)}.py"
    text = copy_of(names)
    if path.exists() and path.read_bytes() != text:
        raise Conflict(f"{path.name} is there, edited or older: ./run.sh {path.name}, or remove it")
    path.write_bytes(text)
    return path.name


def main(argv: list[str]) -> None:
    """Prints the list, or becomes the run.sh that trains the copy."""
    names = list(itertools.takewhile(shelf().__contains__, argv))
    if not argv or argv[0] in ("-h", "--help"):
        print(__doc__)
        for name, patch in shelf().items():
            print(f"{name:<18} {description(patch)[0]}")
    elif not names:
        messages.refuse(f"there is no idea {argv[0]}: ./run.sh idea  lists them")
    else:
        copy = write_copy(names)
        print(f"{copy} is train_gpt.py with these ideas", flush=True)
        os.execv(ROOT / "run.sh", ["run.sh", copy, *argv[len(names) :]])


if __name__ == "__main__":
    with messages.one_line("run.sh idea"):
        try:
            main(sys.argv[1:])
        except Conflict as error:
            messages.refuse(str(error))
