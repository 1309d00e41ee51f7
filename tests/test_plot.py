"""plot.py draws what it should, and the same bytes from the same logs."""

import re

import plot
import pytest
import verify
from fake_runs import LOSSES, write_ours, write_upstream


@pytest.fixture
def drawn(tmp_path, monkeypatch):
    """Runs plot.py and returns the texts in its picture. The SVG has them in comments, as their
    glyphs are paths."""

    def draw(*arguments) -> str:
        out = tmp_path / "out"
        monkeypatch.setattr("sys.argv", ["plot.py", *map(str, arguments), "--out", str(out)])
        plot.main()
        return "\n".join(re.findall("<!-- (.*?) -->", out.with_suffix(".svg").read_text()))

    return draw


def test_curves(tmp_path, drawn, capsys):
    folder = write_upstream(tmp_path / "runs", [(3.2791, 79536), (3.2773, 79740)])
    arguments = f"mine={folder} --x steps time --target 3.28 --upstream --title Curves".split()
    text = drawn(*arguments)
    assert capsys.readouterr().out == f"drew mine in {tmp_path}/out.svg\n"
    svg = (tmp_path / "out.svg").read_bytes()
    parts = ["mine (n = 2)", "record 21 (n = 9)", "target 3.28", "Curves", "time, seconds"]
    for part in (*parts, "validation loss, nats per token"):
        assert part in text
    drawn(*arguments)
    assert (tmp_path / "out.svg").read_bytes() == svg


def test_a_curve_is_the_mean_in_its_band(tmp_path):
    c = plot.curve("x", verify.collect(write_ours(tmp_path / "runs", ms=90000)))
    assert c.x == dict(steps=[0, 250, 500], tokens=[0, 0.512, 1.024], time=[0, 45.001, 90.002])
    assert c.mean[2] == pytest.approx(sum(LOSSES) / 5, abs=5e-5)
    assert c.sd[2] == pytest.approx(0.0096949, abs=5e-5)
    assert c.train.x == dict(steps=[10, 20], tokens=[0.02048, 0.04096], time=[1.8, 3.6])
    assert c.train.mean == [4, 3]
    c = plot.upstream()  # record 21
    assert c.x["steps"][-1] == 1770 and c.mean[-1] == 3.2793 and c.x["time"][-1] == 179.828
    assert c.x["tokens"] == pytest.approx([step * 0.393216 for step in c.x["steps"]])


def test_differences(tmp_path, drawn):
    folders = []
    shifts = dict(base=0, better=-0.01, worse=0.02, nothing=0.001, awful=0.9)
    for i, (name, shift) in enumerate(shifts.items()):
        losses = [loss + shift + 0.001 * (i * j % 3) for j, loss in enumerate(LOSSES)]
        folders.append(write_ours(tmp_path / name, losses, hour=10 + i))
    text = drawn(*folders, "--differences")
    order = re.findall("^(better|worse|nothing|awful)$", text, re.M)
    assert order == ["better", "nothing", "worse", "awful"]
    text = text.replace("\N{MINUS SIGN}", "-")
    label = "final validation loss minus that of base, nats per token"
    for part in "+0.9008", "-0.0092", label, "one seed", "the mean is beyond the scale":
        assert part in text
    ticks = [float(tick) for tick in re.findall(r"^0\.\d+$", text, re.M)]
    assert ticks and max(ticks) < 0.1  # the scale leaves out "awful", which is an arrow
    # Curves of three points are left out, unless a longer one is beside them.
    assert "base (n = 5)" not in text and "training steps" not in text
    text = drawn(*folders, "--differences", "--upstream")
    assert "awful (n = 5)" in text and "training steps" in text


def test_losses_of_bytes_are_per_byte(tmp_path, drawn):
    folder = write_ours(tmp_path / "bytes", config=dict(vocab=257))
    assert "validation loss, nats per byte" in drawn(folder)


def test_smoothing_is_the_mean_of_seven_batches_and_keeps_the_first():
    steep = [8.0, 4, 2, 1, 1, 1, 1, 1, 1]
    assert plot.smooth(steep)[:3] == [8, 14 / 3, 16 / 5]
    jumps = [0.0, 7] * 10
    assert plot.smooth(jumps)[3:17] == [3, 4] * 7  # 3 or 4 of the 7 numbers are sevens
    assert plot.smooth(jumps)[-1] == 3.5  # the last one and the 3 before it
    assert plot.smooth([]) == []
