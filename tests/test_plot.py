"""plot.py draws what it should, and the same bytes from the same logs."""

import os
import re
import shutil
import subprocess
import sys

import plot
import pytest
import verify
from fake_runs import LOSSES, plan_together, write_ours, write_upstream


@pytest.fixture
def drawn(tmp_path):
    """Runs plot.py and returns the texts in its picture. The SVG has them in comments, as their
    glyphs are paths."""

    def draw(*arguments) -> str:
        out = tmp_path / "out"
        plot.main([*map(str, arguments), "--out", str(out)])
        return "\n".join(re.findall("<!-- (.*?) -->", out.with_suffix(".svg").read_text()))

    return draw


def test_curves(tmp_path, drawn, capsys):
    folder = write_upstream(tmp_path / "runs", [(3.2791, 79536), (3.2773, 79740)])
    arguments = f"a$x_{{$={folder} --x steps time --target 3.28 --upstream --title Curves".split()
    text = drawn(*arguments)
    assert capsys.readouterr().out == f"drew a$x_{{$ in {tmp_path}/out.svg\n"
    svg = (tmp_path / "out.svg").read_bytes()
    parts = ["a$x_{$ (n = 2)", "record 21 (n = 9)", "target 3.28", "Curves", "time, seconds"]
    for part in (*parts, "validation loss, nats per token"):
        assert part in text
    # The same in a notebook, with settings of a user.
    (tmp_path / "matplotlibrc").write_text("text.usetex: True\nfont.size: 20\nbackend: TkAgg\n")
    settings = dict(MPLBACKEND="module://matplotlib_inline.backend_inline",
                    MATPLOTLIBRC=str(tmp_path))  # fmt: skip
    command = [sys.executable, plot.__file__, *arguments]
    done = subprocess.run(command, cwd=tmp_path, env=os.environ | settings, capture_output=True)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "curves.svg").read_bytes() == svg


def test_a_curve_is_the_mean_in_its_band(tmp_path, drawn):
    folder = write_ours(tmp_path / "runs", ms=90000, config=dict(vocab=257))
    c = plot.curve("x", verify.collect(folder))
    assert c.x == dict(steps=[0, 250, 500], tokens=[0, 0.512, 1.024], time=[0, 45.001, 90.002])
    assert c.mean[2] == pytest.approx(sum(LOSSES) / 5, abs=5e-5)
    assert c.sd[2] == pytest.approx(0.0096949, abs=5e-5)
    assert "validation loss, nats per byte" in drawn(folder)
    c = plot.upstream()  # record 21
    assert c.x["steps"][-1] == 1770 and c.mean[-1] == 3.2793 and c.x["time"][-1] == 179.828
    assert c.x["tokens"] == pytest.approx([step * 0.393216 for step in c.x["steps"]])


def test_a_loss_that_rises_at_the_end_is_in_the_picture():
    axes = plot.plt.subplots()[1]
    steps = dict(steps=[0, 1, 2, 3])
    plot.draw_curves(axes, [plot.Curve("x", steps, [9, 3, 2, 5], [0] * 4)], "steps", target=None)
    low, high = axes.get_ylim()
    plot.plt.close()
    assert 1.5 < low < 2 and 5 < high < 5.5


def test_a_plan_draws_its_variants_and_their_differences(tmp_path, drawn):
    folders = []
    for name, shift in dict(base=0, better=-0.01, worse=0.02).items():
        losses = [loss + shift + 0.001 * (len(name) * j % 3) for j, loss in enumerate(LOSSES)]
        folders.append(write_ours(tmp_path / "plan" / name, losses, hour=10 + len(folders)))
    log = min((folders[0] / "logs").iterdir())
    plan_together(*folders)
    for folder in folders[1:]:
        (folder / "plan.json").unlink()
    shutil.move(folders[0] / "plan.json", tmp_path / "plan")
    text = drawn(tmp_path / "plan", f"a={tmp_path / 'plan'}", log)
    for name in "base (n = 5)", "worse (n = 5)", "a better (n = 5)", f"{log.stem} (n = 1)":
        assert name in text
    text = drawn(tmp_path / "plan", "--differences").replace("\N{MINUS SIGN}", "-")
    assert re.findall("^(better|worse)$", text, re.M) == ["better", "worse"]  # by the mean
    changes = verify.changes(verify.collect(folders[2]), verify.collect(folders[0]))
    label = "final validation loss minus that of base, nats per token"
    for part in f"{sum(changes) / 5:+.4f}", label:
        assert part in text
    # Curves of three points are left out, unless a longer one is beside them.
    assert "(n = 5)" not in text and "training steps" not in text
    text = drawn(tmp_path / "plan", "--differences", "--upstream")
    assert "worse (n = 5)" in text and "training steps" in text


def test_what_is_not_in_the_picture_is_named(tmp_path, drawn, capsys):
    ours = write_ours(tmp_path / "lr=0.1")
    others = write_ours(tmp_path / "others", seed=900, hour=15)
    theirs = write_upstream(tmp_path / "theirs", [(3.2791, 79536)])
    in_bytes = write_ours(tmp_path / "bytes", config=dict(vocab=257))
    for arguments, message in {
        f"{ours} {theirs} --x steps tokens": "theirs (n = 1) has no curve over tokens",
        f"{ours} {others} --differences": "others has no seed in common with lr=0.1",
        f"{ours} {in_bytes}": "(n = 5) is in nats per token, and bytes (n = 5) per byte",
        f"{ours}/logs/x": "/logs/x' names no folder",
    }.items():
        with pytest.raises(SystemExit, match="2"):
            drawn(*arguments.split())
        assert message in capsys.readouterr().err
    log = min((ours / "logs").iterdir())
    log.write_text(log.read_text().partition("RESULT")[0])
    (ours / "logs/notes.txt").write_text("")
    drawn(ours)
    lines = capsys.readouterr().out.splitlines()[1:]
    assert lines[0] == f"left out of lr=0.1: {log.name}: incomplete"
    assert lines[1].startswith("left out of lr=0.1: notes.txt: it has no line of 100 =")


def test_smoothing_is_the_mean_of_seven_batches_and_keeps_the_first():
    steep = [8.0, 4, 2, 1, 1, 1, 1, 1, 1]
    assert plot.smooth(steep)[:3] == [8, 14 / 3, 16 / 5]
    jumps = [0.0, 7] * 10
    assert plot.smooth(jumps)[3:17] == [3, 4] * 7  # 3 or 4 of the 7 numbers are sevens
    assert plot.smooth(jumps)[-1] == 3.5  # the last one and the 3 before it
