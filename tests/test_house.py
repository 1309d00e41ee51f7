"""The law of the house, .github/CONTRIBUTING.md: how long its rooms and pages may be, and which
room may import which."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]

# Lines that the files of a room may have together. A limit is met by deleting. No limit rises.
LIMITS = {
    "train_gpt.py": 2400,
    "run.sh": 120,
    "run/*.py": 750,
    "data/*.py": 1050,
    "evals/*.py": 1650,
    "evals/page.*": 340,
    "records/*.py": 2000,
    "records/optimizers/*.py": 1750,
    "basics/*.py": 2710,
    "lab/**/*.py": 4300,  # without lab/tests
    "lab/tests/*.py": 2300,
    "tests/*.py": 8000,
}
TOOLS = ("run.sh", "run/*.py", "data/*.py", "evals/*.py", "records/*.py", "records/optimizers/*.py")

# A room may import the rooms before it, and itself. Nothing imports lab.
FLOORS = {
    "data": "",
    "run": "data",
    "records": "data run",
    "evals": "data run records",
    "basics": "data run",
}

WORDS = 18000  # of all pages
LONGEST_PAGE = 2000
LONGEST = {"README.md": 1200, "records/LOG.md": WORDS}  # pages with a limit of their own


def lines_of(pattern: str) -> int:
    """How many lines the files of a room have."""
    paths = [
        path for path in ROOT.glob(pattern) if pattern != "lab/**/*.py" or "tests" not in path.parts
    ]
    return sum(path.read_bytes().count(b"\n") for path in paths)


def pages() -> dict[str, int]:
    """The words of every page by its path; evidence and GitHub's forms are no pages."""
    words = {}
    for path in ROOT.rglob("*.md"):
        name = path.relative_to(ROOT).as_posix()
        is_evidence = name.startswith(("records/tracks/", "records/other/"))
        if not is_evidence and not any(part.startswith(".") for part in Path(name).parts):
            words[name] = len(path.read_text(encoding="utf-8").split())
    return words


@pytest.mark.parametrize("pattern", LIMITS)
def test_a_room_is_no_longer_than_the_law_allows(pattern):
    lines = lines_of(pattern)
    assert 0 < lines <= LIMITS[pattern]


def test_tools_are_three_times_the_file_and_tests_no_longer_than_both():
    file = lines_of("train_gpt.py")
    tools = sum(lines_of(pattern) for pattern in TOOLS)
    assert tools <= 3 * file
    assert lines_of("tests/*.py") <= file + tools


def test_pages_are_short():
    words = pages()
    assert {"README.md", "data/README.md", "records/LOG.md"} < set(words)
    too_long = {page: n for page, n in words.items() if n > LONGEST.get(page, LONGEST_PAGE)}
    assert too_long == {} and sum(words.values()) <= WORDS


def imported_rooms(path: Path, modules: dict[str, str]) -> set[str]:
    """The rooms whose modules a file imports, as lab.check or, from a room on the path, check."""
    rooms = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        if isinstance(node, ast.ImportFrom) and node.level == 0:
            names = [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
        for name in names:
            first = name.partition(".")[0]
            if (path.parent / f"{first}.py").is_file():  # muon is in two rooms
                continue
            room = first if first in (*FLOORS, "lab") else modules.get(first)
            if room:
                rooms.add(room)
    return rooms


def test_imports_point_down_and_none_at_the_lab():
    modules = {}
    for room in (*FLOORS, "lab"):
        for path in (ROOT / room).glob("*.py"):
            modules.setdefault(path.stem, room)  # lab/check.py is only found as lab.check
    checked = 0
    for room, below in FLOORS.items():
        for path in (ROOT / room).rglob("*.py"):
            if "tracks" in path.parts or "other" in path.parts or "upstream92" in path.parts:
                continue
            rooms = imported_rooms(path, modules)
            assert rooms <= {room, *below.split()}, path
            checked += 1
    assert checked > 40
    assert imported_rooms(ROOT / "train_gpt.py", modules) == set()


def test_an_import_of_the_lab_would_be_found(tmp_path):
    path = tmp_path / "tool.py"
    path.write_text("from lab import check\nimport faults\n")
    assert imported_rooms(path, {"faults": "lab"}) == {"lab"}
