"""plot.py draws what it should, and the same bytes from the same logs."""

import re
import shutil

import plot
import pytest
import verify
from fake_runs import LOSSES, plan_together, write_ours


def test_a_plan_draws_its_variants(tmp_path, capsys):
    """In the same bytes each time. What is not drawn is named."""
    folders = [write_ours(tmp_path / "plan" / name) for name in ("base", "new")]
    plan_together(*folders)
    folders[1].joinpath("plan.json").unlink()
    shutil.move(folders[0] / "plan.json", tmp_path / "plan")
    log, broken, *_ = sorted((folders[0] / "logs").iterdir())
    broken.write_text(broken.read_text().partition("RESULT")[0])
    (folders[0] / "logs/notes.txt").write_text("")
    arguments = f"{tmp_path}/plan a={tmp_path}/plan {log} --x steps time --target 1.4".split()
    pictures = []
    for out in (tmp_path / "one", tmp_path / "two"):
        plot.main([*arguments, "--out", str(out)])
        pictures.append(out.with_suffix(".svg").read_text())
    assert pictures[0] == pictures[1]
    text = "\n".join(re.findall("<!-- (.*?) -->", pictures[0]))  # its glyphs are paths
    for part in ("base (n = 4)", "new (n = 5)", "a new (n = 5)", f"{log.stem} (n = 1)",
                 "target 1.4", "training time, seconds", "validation loss, nats"):  # fmt: skip
        assert part in text
    printed = capsys.readouterr().out
    assert f"left out of base: {broken.name}: incomplete" in printed
    assert "left out of base: notes.txt: it has no line of 100 =" in printed
    with pytest.raises(SystemExit, match="2"):
        plot.main([f"{tmp_path}/x"])
    assert "/x' names no folder" in capsys.readouterr().err


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
    assert plot.smooth([8.0, 4, 2, 1, 1, 1])[:3] == [8, 14 / 3, 16 / 5]
    assert plot.smooth([0.0, 7] * 10)[3:17] == [3, 4] * 7  # 3 or 4 of the 7 numbers are sevens
