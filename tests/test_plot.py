"""plot.py draws what it should, and the same bytes from the same logs."""

import re
import shutil

import plot
import pytest
import verify
from fake_runs import LOSSES, plan_together, write_ours


@pytest.fixture
def drawn(tmp_path):
    """Runs plot.py and returns the texts in its picture. The SVG has them in comments, as their
    glyphs are paths."""

    def draw(*arguments) -> str:
        out = tmp_path / "out"
        plot.main([*map(str, arguments), "--out", str(out)])
        return "\n".join(re.findall("<!-- (.*?) -->", out.with_suffix(".svg").read_text()))

    return draw


def test_a_plan_draws_its_variants(tmp_path, drawn, capsys):
    """What is not drawn is named."""
    folders = [write_ours(tmp_path / "plan" / name) for name in ("base", "new")]
    plan_together(*folders)
    folders[1].joinpath("plan.json").unlink()
    shutil.move(folders[0] / "plan.json", tmp_path / "plan")
    log = min((folders[0] / "logs").iterdir())
    arguments = f"{tmp_path}/plan a={tmp_path}/plan {log} --x steps time --target 1.4".split()
    text = drawn(*arguments)
    for part in ("base (n = 5)", "new (n = 5)", "a new (n = 5)", f"{log.stem} (n = 1)",
                 "target 1.4", "training time, seconds", "validation loss, nats"):  # fmt: skip
        assert part in text
    svg = (tmp_path / "out.svg").read_bytes()
    drawn(*arguments)
    assert (tmp_path / "out.svg").read_bytes() == svg
    log.write_text(log.read_text().partition("RESULT")[0])
    (folders[0] / "logs/notes.txt").write_text("")
    capsys.readouterr()
    drawn(folders[0])
    lines = capsys.readouterr().out.splitlines()[1:]
    assert lines[0] == f"left out of base: {log.name}: incomplete"
    assert lines[1].startswith("left out of base: notes.txt: it has no line of 100 =")
    with pytest.raises(SystemExit, match="2"):
        drawn(f"{folders[0]}/logs/x")
    assert "/logs/x' names no folder" in capsys.readouterr().err


def test_a_curve_is_the_mean_in_its_band(tmp_path):
    folder = write_ours(tmp_path / "runs", ms=90000)
    c = plot.curve("x", verify.collect(folder))
    assert c.x == dict(steps=[0, 250, 500], tokens=[0, 0.512, 1.024], time=[0, 45.001, 90.002])
    assert c.mean[2] == pytest.approx(sum(LOSSES) / 5, abs=5e-5)
    assert c.sd[2] == pytest.approx(0.0096949, abs=5e-5)


def test_a_loss_that_rises_at_the_end_is_in_the_picture():
    axes = plot.plt.subplots()[1]
    steps = dict(steps=[0, 1, 2, 3])
    plot.draw_curves(axes, [plot.Curve("x", steps, [9, 3, 2, 5], [0] * 4)], "steps", target=None)
    low, high = axes.get_ylim()
    plot.plt.close()
    assert 1.5 < low < 2 and 5 < high < 5.5


def test_smoothing_is_the_mean_of_seven_batches_and_keeps_the_first():
    steep = [8.0, 4, 2, 1, 1, 1, 1, 1, 1]
    assert plot.smooth(steep)[:3] == [8, 14 / 3, 16 / 5]
    jumps = [0.0, 7] * 10
    assert plot.smooth(jumps)[3:17] == [3, 4] * 7  # 3 or 4 of the 7 numbers are sevens
    assert plot.smooth(jumps)[-1] == 3.5  # the last one and the 3 before it
