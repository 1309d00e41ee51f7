"""lab/faults/*.toml are few, can be planted, and say which tests to run."""

import shlex

import faults
import pytest

from tests.tools import ROOT

FAULTS = faults.read_faults()


def test_every_fault_has_a_place_a_name_and_tests_that_are_there():
    """As in `tests/test_x.py -k "this and that"`: the words are in the file."""
    assert 0 < len(FAULTS) <= 130, "beyond that, they repeat what the golden tests say"
    assert len({fault.name for fault in FAULTS}) == len(FAULTS)
    for fault in FAULTS:
        assert faults.planted(fault) != (ROOT / fault.file).read_text(encoding="utf-8")
        path, *selection = shlex.split(fault.tests)
        text = (ROOT / path).read_text(encoding="utf-8").lower()
        words = selection[1].lower().split(" and ") if selection else []
        assert all(word in text for word in words), fault


@pytest.mark.parametrize("new, verdict", [
    ("x / 3", "caught"), ("x / 2.0", "SURVIVED"), ("x /", "SURVIVED"),
], ids=["a fault", "no fault", "no Python"])  # fmt: skip
def test_a_fault_is_caught_by_a_test_that_fails_and_by_nothing_else(
    new, verdict, tmp_path, monkeypatch
):
    test = "from half import half\n\n\ndef test_half():\n    assert half(4) == 2\n"

    def copy(folder):
        (folder / "half.py").write_text((tmp_path / "half.py").read_text())
        (folder / "test_half.py").write_text(test)

    monkeypatch.setattr(faults, "ROOT", tmp_path)
    monkeypatch.setattr(faults, "copy_tree", copy)
    (tmp_path / "half.py").write_text("def half(x):\n    return x / 2\n")
    fault = faults.Fault("halves", "half.py", "x / 2", new, "test_half.py")
    ((passed, line),) = faults.report([fault], jobs=1)
    assert passed == (verdict == "caught") and line.startswith(verdict), line
