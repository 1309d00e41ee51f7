"""plot.py draws what it should, and the same bytes from the same logs."""

import re

import plot
import pytest
import verify
from fake_runs import LOSSES, write_ours


def test_the_same_logs_draw_the_same_bytes(tmp_path):
    sets = [(name, verify.collect(write_ours(tmp_path / name))) for name in ("base", "new")]
    pictures = []
    for out in (tmp_path / "one.svg", tmp_path / "two.svg"):
        plot.plot(sets, out, 1.4)
        pictures.append(out.read_text())
    assert pictures[0] == pictures[1]
    text = "\n".join(re.findall("<!-- (.*?) -->", pictures[0]))  # its glyphs are paths
    for part in ("base (n = 5)", "new (n = 5)", "target 1.4", "validation loss, nats"):
        assert part in text


def test_a_curve_is_the_mean_in_its_band(tmp_path):
    c = plot.curve("x", verify.collect(write_ours(tmp_path / "runs", ms=90000)))
    assert c.steps == [0, 250, 500]
    assert c.mean[2] == pytest.approx(sum(LOSSES) / 5, abs=5e-5)
    assert c.sd[2] == pytest.approx(0.0096949, abs=5e-5)


def test_a_loss_that_rises_at_the_end_is_in_the_picture():
    axes = plot.plt.subplots()[1]
    plot.draw_curves(axes, [plot.Curve("x", [0, 1, 2, 3], [9, 3, 2, 5], [0] * 4)], None)
    low, high = axes.get_ylim()
    plot.plt.close()
    assert 1.5 < low < 2 and 5 < high < 5.5


def test_smoothing_is_the_mean_of_seven_batches_and_keeps_the_first():
    assert plot.smooth([8.0, 4, 2, 1, 1, 1])[:3] == [8, 14 / 3, 16 / 5]
    assert plot.smooth([0.0, 7] * 10)[3:17] == [3, 4] * 7  # 3 or 4 of the 7 numbers are sevens
