"""Pictures of runs: what is drawn, and that it is the same from the same logs."""

import re

import plot
import pytest
import verify
from fake_runs import LOSSES, write_ours, write_upstream


@pytest.fixture
def drawn(tmp_path, monkeypatch):
    """What plot.py draws as text: it stands in comments of the SVG, where glyphs are paths."""

    def draw(*words) -> str:
        out = tmp_path / "out"
        monkeypatch.setattr("sys.argv", ["plot.py", *map(str, words), "--out", str(out)])
        plot.main()
        return "\n".join(re.findall("<!-- (.*?) -->", out.with_suffix(".svg").read_text()))

    return draw


def test_curves(tmp_path, drawn):
    folder = write_upstream(tmp_path / "runs", [(3.2791, 79536), (3.2773, 79740)])
    words = f"mine={folder} --x steps time --target 3.28 --upstream --title Curves".split()
    text, svg = drawn(*words), (tmp_path / "out.svg").read_bytes()
    for part in "mine (n = 2)", "record 21 (n = 9)", "target 3.28", "Curves", "time, seconds":
        assert part in text
    drawn(*words)
    assert (tmp_path / "out.svg").read_bytes() == svg  # the same bytes from the same logs


def test_a_curve_is_the_mean_in_its_band(tmp_path):
    c = plot.curve("x", verify.collect(write_ours(tmp_path / "runs", ms=90000)))
    assert c.x == dict(steps=[0, 250, 500], tokens=[0, 0.512, 1.024], time=[0, 45.001, 90.002])
    assert (c.mean[2], c.sd[2]) == pytest.approx((sum(LOSSES) / 5, 0.0096949), abs=5e-5)
    assert c.train.x == dict(steps=[10, 20], tokens=[0.02048, 0.04096], time=[1.8, 3.6])
    assert c.train.mean == [4, 3]
    c = plot.upstream()  # record 21
    assert c.x["steps"][-1] == 1770 and c.mean[-1] == 3.2793 and c.x["time"][-1] == 179.828
    assert c.x["tokens"] == pytest.approx([step * 0.393216 for step in c.x["steps"]])


def test_differences(tmp_path, drawn):
    folders, shifts = [], dict(base=0, better=-0.01, worse=0.02, nothing=0.001, awful=0.9)
    for i, (name, shift) in enumerate(shifts.items()):
        losses = [loss + shift + 0.001 * (i * j % 3) for j, loss in enumerate(LOSSES)]
        folders.append(write_ours(tmp_path / name, losses, hour=10 + i))
    text = drawn(*folders, "--differences")
    order = re.findall("^(better|worse|nothing|awful)$", text, re.M)
    assert order == ["better", "nothing", "worse", "awful"]
    for number in "+0.9008", "-0.0092", "base (n = 5)", "awful (n = 5)":
        assert number.replace("-", "") in text.replace("\N{MINUS SIGN}", "").replace("-", "")
    ticks = [float(x) for x in re.findall(r"^0\.\d+$", text, re.M)]
    assert ticks and max(x for x in ticks if x < 1) < 0.1
