"""lab/faults/*.toml are few, can be planted, and say which tests to run."""

import shlex
from collections import Counter

import faults
import pytest

from tests.tools import ROOT

FAULTS = faults.read_faults()


def test_every_fault_has_a_place_and_a_name():
    for fault in FAULTS:
        assert faults.planted(fault) != (ROOT / fault.file).read_text(encoding="utf-8")
    assert Counter(fault.name for fault in FAULTS).most_common(1)[0][1] == 1


def test_there_are_at_most_120():
    """Beyond that, they repeat what the golden tests say."""
    assert 0 < len(FAULTS) <= 120


def test_every_fault_names_tests_that_are_there():
    """As in `tests/test_x.py -k "this and that"`: the words are in the file."""
    for fault in FAULTS:
        path, *selection = shlex.split(fault.tests)
        text = (ROOT / path).read_text(encoding="utf-8").lower()
        if not selection:
            continue
        option, expression = selection
        words = expression.lower().split(" and ")
        assert option == "-k" and all(word in text for word in words), fault


@pytest.fixture
def tree(tmp_path, monkeypatch):
    """A repository of one function and one test, in which faults.py runs."""
    monkeypatch.setattr(faults, "ROOT", tmp_path)
    monkeypatch.setattr(faults, "copy_tree", lambda folder: copy(tmp_path, folder))
    return tmp_path


def copy(source, folder):
    test = "from half import half\n\n\ndef test_half():\n    assert half(4) == 2\n"
    (folder / "conftest.py").write_text(
        "def pytest_addoption(parser):\n    parser.addoption('--all', action='store_true')\n"
    )
    (folder / "half.py").write_text((source / "half.py").read_text())
    (folder / "test_half.py").write_text(test)


@pytest.mark.parametrize("new, verdict", [
    ("x / 3", "caught"), ("x / 2.0", "SURVIVED"), ("x /", "SURVIVED"),
], ids=["a fault", "no fault", "no Python"])  # fmt: skip
def test_a_fault_is_caught_by_a_test_that_fails_and_by_nothing_else(tree, new, verdict):
    (tree / "half.py").write_text("def half(x):\n    return x / 2\n")
    fault = faults.Fault("halves", "half.py", "x / 2", new, "test_half.py")
    ((passed, line),) = faults.report([fault], jobs=1)
    assert passed == (verdict == "caught") and line.startswith(verdict), line
