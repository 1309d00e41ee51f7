"""plot.py draws what it should, and the same bytes from the same logs."""

import re

import plot
import verify
from fake_runs import write_ours


def test_the_same_logs_draw_the_same_bytes(tmp_path):
    sets = {name: verify.collect(write_ours(tmp_path / name)).ended for name in ("base", "new")}
    pictures = []
    for out in (tmp_path / "one.svg", tmp_path / "two.svg"):
        plot.plot(sets, out, 1.4)
        pictures.append(out.read_text())
    assert pictures[0] == pictures[1]
    text = "\n".join(re.findall("<!-- (.*?) -->", pictures[0]))  # its glyphs are paths
    for part in ("base (n = 5)", "new (n = 5)", "target 1.4", "validation loss, nats"):
        assert part in text
