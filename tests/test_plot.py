"""plot.py draws what it should, and the same bytes from the same logs."""

import math
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import plot
import pytest
import runs
import verify
from fake_runs import LOSSES, plan_together, upstream, write_ours, write_upstream
from messages import Fault


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
    # The same in a notebook, with settings of a user, on a terminal that has no accents.
    (tmp_path / "matplotlibrc").write_text("text.usetex: True\nfont.size: 20\nbackend: TkAgg\n")
    settings = dict(MPLBACKEND="module://matplotlib_inline.backend_inline",
                    MATPLOTLIBRC=str(tmp_path), PYTHONIOENCODING="ascii")  # fmt: skip
    command = [sys.executable, plot.__file__, *arguments, "--out", "é"]
    done = subprocess.run(command, cwd=tmp_path, env=os.environ | settings, capture_output=True)
    assert (done.stdout, done.stderr) == (b"drew mine in \\xe9.svg\n", b"")
    assert (tmp_path / "é.svg").read_bytes() == svg


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


def test_a_loss_that_rises_at_the_end_is_in_the_picture():
    steps = dict(steps=[0, 1, 2, 3])
    axes = plot.plt.subplots()[1]
    plot.draw_curves(axes, [plot.Curve("x", steps, [9, 3, 2, 5], [0] * 4)], "steps", target=None)
    low, high = axes.get_ylim()
    plot.plt.close()
    assert 1.5 < low < 2 and 5 < high < 5.5


def test_differences(tmp_path, drawn):
    folders = []
    shifts = dict(base=0, better=-0.01, worse=0.02, nothing=0.001, awful=0.9)
    for i, (name, shift) in enumerate(shifts.items()):
        losses = [loss + shift + 0.001 * (i * j % 3) for j, loss in enumerate(LOSSES)]
        folders.append(write_ours(tmp_path / name, losses, hour=10 + i))
    folders[0] = f"a$x_{{$={folders[0]}"
    text = drawn(*folders, "--differences")
    order = re.findall("^(better|worse|nothing|awful)$", text, re.M)
    assert order == ["better", "nothing", "worse", "awful"]
    text = text.replace("\N{MINUS SIGN}", "-")
    label = "final validation loss minus that of a$x_{$, nats per token"
    for part in "+0.9008", "-0.0092", label, "one seed", "beyond the scale":
        assert part in text
    ticks = [float(tick) for tick in re.findall(r"^0\.\d+$", text, re.M)]
    assert ticks and max(ticks) < 0.1  # the scale leaves out "awful", which is an arrow
    # Curves of three points are left out, unless a longer one is beside them.
    assert "(n = 5)" not in text and "training steps" not in text
    text = drawn(*folders, "--differences", "--upstream")
    assert "awful (n = 5)" in text and "training steps" in text


def test_dots_beyond_the_scale_are_arrows_wherever_their_mean_is(tmp_path):
    shifts = dict(base=0, near=0.01, middle=0.015, close=0.02, wild=0, high=0.5)
    folders = []
    for i, (name, shift) in enumerate(shifts.items()):
        swing = 0.5 if name == "wild" else 0
        changed = [loss + shift + swing * (j - 2) for j, loss in enumerate(LOSSES)]
        folders.append((name, verify.collect(write_ours(tmp_path / name, changed, hour=10 + i))))
    axes = plot.plt.subplots()[1]
    plot.draw_differences(axes, folders, "token")
    scale = axes.get_xlim()[1]
    plot.plt.close()
    assert scale < 0.1
    arrows = [text.xy for text in axes.texts if hasattr(text, "xy")]
    assert arrows == [(-scale, 0), (scale, 0), (scale, 4)]


@pytest.mark.filterwarnings("error")  # of letters that the font lacks
def test_names_may_have_any_characters(tmp_path, drawn):
    folder = write_ours(tmp_path / "runs")
    strange = ["训练", "a$x_{$", "_b", r"c\$d^\frac", "e\nf\x1b[1m\udce9", 99 * "l" + 12 * "n"]
    text = drawn(*(f"{name}={folder}" for name in strange), "--title", strange[1])
    middle = "\N{HORIZONTAL ELLIPSIS}"  # in place of it
    for name in (*strange[:2], " _b", strange[3], "e?f?[1m?", 20 * "l" + middle + 12 * "n"):
        assert f"{name} (n = 5)" in text
    assert text.endswith(strange[1])
    ElementTree.parse(tmp_path / "out.svg")  # a control character would be an error


def test_folders_may_have_equals_signs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("runs/lr=0.01").mkdir(parents=True)
    Path("0.01").mkdir()
    for argument, right in {
        "runs/lr=0.01": ("", "runs/lr=0.01"),
        "mine=runs/lr=0.01": ("mine", "runs/lr=0.01"),
        "lr=3=0.01": ("lr=3", "0.01"),
        ".": ("", "."),
    }.items():
        name, folder = plot.name_and_folder(argument)
        assert (name, str(folder)) == right


def test_the_folder_of_a_plan_draws_its_variants_and_a_log_its_run(tmp_path, drawn):
    old = write_ours(tmp_path / "plan/old")
    new = write_ours(tmp_path / "plan/new", hour=15)
    plan_together(new, old)
    (old / "plan.json").rename(tmp_path / "plan/plan.json")
    (new / "plan.json").unlink()
    log = min((old / "logs").iterdir())
    text = drawn(tmp_path / "plan", f"a={tmp_path / 'plan'}", log)
    for name in "old (n = 5)", "new (n = 5)", "a old (n = 5)", f"{log.stem} (n = 1)":
        assert name in text
    assert "minus that of new" in drawn(tmp_path / "plan", "--differences")


def test_what_is_not_in_the_picture_is_named(tmp_path, drawn, capsys):
    ours = write_ours(tmp_path / "ours")
    others = write_ours(tmp_path / "others", seed=900, hour=15)
    theirs = write_upstream(tmp_path / "theirs", [(3.2791, 79536)])
    ours_in_bytes = write_ours(tmp_path / "bytes", config=dict(vocab=257))
    mixed = write_ours(tmp_path / "mixed")
    shutil.copy(max((ours_in_bytes / "logs").iterdir()), mixed / "logs")
    (tmp_path / "out.svg").mkdir()
    for arguments, message in {
        f"{theirs} --x tokens": "theirs (n = 1) has no curve over tokens",
        f"{ours} {theirs} --x steps tokens": "theirs (n = 1) has no curve over tokens",
        f"{ours} --differences": "differences need a second folder",
        f"{ours} {others} --differences": "others has 0 seeds in common with ours",
        f"{ours} {ours_in_bytes}": "ours (n = 5) in nats per token, bytes (n = 5) per byte",
        f"{mixed}": "mixed has runs in nats per byte and in nats per token",
        " ".join(f"{i}={ours}" for i in range(21)): "21 curves, of which it can show 20",
        f"{ours} --target nan": "--target must be a loss above 0",
        f"{ours} ours={theirs}": "two curves are called ours: name them by NAME=FOLDER",
        f"{ours}/logs/x": "/logs/x' names no folder",
        "x=": "'x=' names no folder",
        f"{tmp_path}": "has no logs, which are files *.txt: name ",
        f"{theirs / 'run00.txt'}/x": "names no folder and no log",
        plot.__file__: "plot.py is no log: ",
    }.items():
        with pytest.raises(Fault, match=re.escape(message)):
            drawn(*arguments.split())
    for out in (tmp_path / "none/x", Path("")):
        with pytest.raises(Fault, match="cannot be written: choose another --out"):
            plot.check_place(out)
    (tmp_path / "out.svg").rmdir()
    log = min((ours / "logs").iterdir())
    log.write_text(log.read_text().partition("RESULT")[0])
    (ours / "logs/notes.txt").write_text("")
    diverged = max((ours / "logs").glob("2*"))
    diverged.write_text(diverged.read_text().replace("train_loss:4.0000", "train_loss:nan"))
    text = drawn(ours)
    assert f"not drawn, training losses of {diverged.name}: nan at step 10" in text
    curve = plot.curve("x", verify.collect(ours))
    assert (curve.train.x["steps"], curve.train.mean) == ([20], [3])
    lines = capsys.readouterr().out.splitlines()[1:]
    assert lines[0] == f"left out of ours: {log.name}: incomplete"
    assert lines[1].startswith("left out of ours: notes.txt: it has no line of 100 =")
    shorter = min(theirs.iterdir()).with_name("shorter.txt")
    shorter.write_text(upstream(3.28, 79000, steps=1300))
    drawn(theirs)
    where = "validation losses at steps 1300 to 1390, which not all of its runs have"
    line = f"left out of theirs: {where}: they end at steps 1300 to 1390"
    assert capsys.readouterr().out.splitlines()[1:] == [line]


def test_steps_that_one_run_lacks_are_named():
    losses = [[runs.Validation(step, 40, 2.0, 1.0) for step in steps] for steps in
              [(0, 10, 20, 30, 40), (0, 20, 40), (0, 10, 20, 40)]]  # fmt: skip
    assert plot.steps_of_some(losses[:1], "training") == []
    line = "training losses at step 10, which not all of its runs have"
    assert plot.steps_of_some(losses[1:], "training") == [line]
    line = "training losses at steps 10 to 30, which not all of its runs have"
    assert plot.steps_of_some(losses, "training") == [line]
    losses.append(losses[0][:3])
    line = (
        "training losses at 3 of the steps 10 to 40, which not all of its runs have: they end at "
    )
    assert plot.steps_of_some(losses, "training") == [line + "steps 20 to 40"]


def test_losses_that_are_no_numbers_are_named_in_the_picture(tmp_path):
    folder = write_ours(tmp_path / "runs")
    run = runs.read(min((folder / "logs").iterdir()))
    losses = enumerate((math.inf, 0, -1, math.nan, 2))
    training = [run.training[0]._replace(step=step, loss=loss) for step, loss in losses]
    plot.plot_log(run._replace(training=training, path=Path("a$x_{$")), tmp_path / "log")
    text = (tmp_path / "log.svg").read_text()
    assert "<!-- not drawn, training: inf at step 0, 0 at step 1, -1 at step 2, and 1 more" in text
    assert "<!-- a$x_{$ -->" in text
    with pytest.raises(Fault, match="has no losses that can be drawn"):
        plot.plot_log(run._replace(training=training[:4], validations=[]), tmp_path / "log")


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
