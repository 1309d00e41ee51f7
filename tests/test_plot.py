"""plot.py draws what it should, and the same bytes from the same logs."""

import re

import plot
import verify
from fake_runs import write_ours


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


def test_smoothing_is_the_mean_of_seven_batches_and_keeps_the_first():
    assert plot.smooth([8.0, 4, 2, 1, 1, 1])[:3] == [8, 14 / 3, 16 / 5]
    assert plot.smooth([0.0, 7] * 10)[3:17] == [3, 4] * 7  # 3 or 4 of the 7 numbers are sevens
