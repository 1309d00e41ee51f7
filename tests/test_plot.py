"""Pictures of runs: what is drawn, and that it is the same from the same logs."""

import re
from pathlib import Path

import plot
import pytest
import verify
from fake_runs import LOSSES, write_ours, write_upstream


def texts(svg: Path) -> str:
    """What is drawn as text stands in comments of the SVG, where glyphs are paths."""
    return "\n".join(re.findall("<!-- (.*?) -->", svg.read_text()))


def test_curves(tmp_path, monkeypatch):
    folder = write_upstream(tmp_path / "runs", [(3.2791, 79536), (3.2773, 79740)])
    words = [f"mine={folder}", "--x", "steps", "time", "--target", "3.28", "--upstream", "--title",
             "Three curves", "--out", tmp_path / "out"]  # fmt: skip
    monkeypatch.setattr("sys.argv", ["plot.py", *map(str, words)])
    plot.main()
    drawn = texts(tmp_path / "out.svg")
    for text in ("mine (n = 2)", "modded-nanogpt, record 21 (n = 9)", "target 3.28", "Three curves",
                 "training time, seconds", "steps", "validation loss, nats per token"):  # fmt: skip
        assert text in drawn
    assert (tmp_path / "out.png").read_bytes().startswith(b"\x89PNG")
    first = (tmp_path / "out.svg").read_bytes()
    plot.main()
    assert (tmp_path / "out.svg").read_bytes() == first  # the same bytes from the same logs


def test_a_curve_is_the_mean_in_its_band(tmp_path):
    c = plot.curve("x", verify.collect(write_ours(tmp_path / "runs")))
    assert c.x["steps"] == [0, 250, 500] and c.x["tokens"] == [0, 0.512, 1.024]
    assert c.mean[2] == pytest.approx(sum(LOSSES) / 5, abs=5e-5)
    assert c.sd[2] == pytest.approx(0.0096949, abs=5e-5)
    assert c.x["time"] == [0, 45, 90]
    assert c.train.x["steps"] == [10, 20] and c.train.mean == [4, 3]
    assert c.train.x["time"] == [1.8, 3.6] and c.train.x["tokens"] == [0.02048, 0.04096]


def test_the_reference_curve_is_record_21():
    c = plot.upstream()
    assert c.x["steps"][-1] == 1770 and c.mean[-1] == 3.2793 and c.x["time"][-1] == 179.828
    assert c.x["tokens"][-1] == pytest.approx(1770 * 393216 / 1e6)
    assert all(t == pytest.approx(s * 0.393216) for s, t in zip(c.x["steps"], c.x["tokens"],
                                                              strict=True))  # fmt: skip


def test_differences(tmp_path, monkeypatch):
    """Sorted by size, each with its number; one that is far off does not squeeze the others."""
    shifts = dict(base=0, better=-0.01, worse=0.02, nothing=0.001, awful=0.9)
    folders = []
    for i, (name, shift) in enumerate(shifts.items()):
        losses = [loss + shift + 0.001 * (i * j % 3) for j, loss in enumerate(LOSSES)]
        folders.append(str(write_ours(tmp_path / name, losses, hour=10 + i)))
    words = [*folders, "--differences", "--out", str(tmp_path / "out")]
    monkeypatch.setattr("sys.argv", ["plot.py", *words])
    plot.main()
    drawn = texts(tmp_path / "out.svg")
    order = [name for name in re.findall("^(better|worse|nothing|awful)$", drawn, re.M)]
    assert order == ["better", "nothing", "worse", "awful"]
    for number in ("+0.9008", "-0.0092", "base (n = 5)", "awful (n = 5)"):
        assert number.replace("-", "") in drawn.replace("\N{MINUS SIGN}", "").replace("-", "")
    ticks = [float(x) for x in re.findall(r"^0\.\d+$", drawn, re.M)]
    assert ticks and max(x for x in ticks if x < 1) < 0.1
