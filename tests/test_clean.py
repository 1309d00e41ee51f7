"""run/clean.py: what it lists and removes, and what stays."""

import fcntl
import os
import re
import shutil
import sys
import time
from pathlib import Path

import clean
import guard
import idea
import pytest
from fake_machine import ROOT
from messages import Fault

OLD, STOPPED, NEW = (f"2026-11-2{day}T10-00-00_0123abcd" for day in (1, 2, 3))
LOG = "source\n" + 100 * "=" + "\nstep:1/2 train_loss:2\n"


@pytest.fixture
def root(tmp_path):
    """A clone after three runs: one that ended, one that was interrupted, and one more. What must
    stay has "keep" in it."""
    files = {
        f"logs/{OLD}.txt": LOG + "RESULT {}\n", f"logs/{OLD}.npz": "weights",
        f"logs/{OLD}.bigram.bin": "table", f"logs/{OLD}/0000009.state": "state",
        f"logs/{OLD}_look/reach.svg": "picture", f"logs/{OLD}_loss.svg": "picture",
        f"logs/{STOPPED}.txt": LOG + "INTERRUPTED by SIGINT after step 1; to resume: ...\n",
        f"logs/{STOPPED}/0000001.state": "keep", f"logs/{NEW}.txt": LOG + "RESULT {}\n",
        f"logs/{NEW}.npz": "keep", f"logs/{NEW}_look/notes.txt": "keep",
        "logs/my.npz": "keep", f"logs/{OLD}/my.txt": "keep", "data/x.bin": "keep",
        ".cache/jax/program": "programs", ".cache/attention-1": "keep", ".pytest_cache/x": "x",
    }  # fmt: skip
    for name, text in files.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return tmp_path


def left(root):
    """All files there."""
    return {str(path.relative_to(root)) for path in root.rglob("*") if path.is_file()}


def precious(root):
    """The files that must stay: logs, and those with "keep"."""
    names = {name for name in left(root) if (root / name).read_text() == "keep"}
    return names | {f"logs/{run}.txt" for run in (OLD, STOPPED, NEW)}


def test_copies_that_nobody_has_edited_go(root, monkeypatch, capsys):
    trainer = root / "trainer.py"
    trainer.write_text("x = 1\n")
    monkeypatch.setattr(idea, "TRAINER", trainer)
    idea.write_copy([], root)
    assert clean.main(["--yes"], root) == 0 and not (root / "idea_.py").exists()
    assert "idea_.py  (copy that ./run.sh idea makes anew)" in capsys.readouterr().out
    idea.write_copy([], root)
    (root / "idea_.py").write_text("x = 2\n" + (root / "idea_.py").read_text())
    clean.main(["--yes"], root)
    assert (root / "idea_.py").exists() and trainer.exists()


def test_all_but_logs_newest_weights_and_what_can_be_resumed_goes(root, capsys):
    stays = precious(root)
    assert clean.main(["--yes"], root) == 0
    assert left(root) == stays and not (root / f"logs/{OLD}_look").exists()
    shown = capsys.readouterr().out
    assert f"logs/{OLD}/0000009.state  (checkpoint of a run that has ended)" in shown
    assert f"stays: logs/{NEW}.npz, the newest weights" in shown
    assert "stays: 0.0 MB of checkpoints to resume from; with --all" in shown
    assert clean.main(["--yes"], root) == 0 and "nothing to remove" in capsys.readouterr().out
    assert clean.main(["--yes", "--all"], root) == 0
    assert left(root) == stays - {f"logs/{STOPPED}/0000001.state"}
    assert not (root / "logs" / STOPPED).exists()


def test_it_asks_and_without_a_terminal_it_removes_nothing(root, monkeypatch, capsys):
    before = left(root)
    with pytest.raises(Fault, match="nobody can answer here: nothing was removed; --yes"):
        clean.main([], root)
    for stream in sys.stdin, sys.stdout:
        monkeypatch.setattr(stream, "isatty", lambda: True, raising=False)
    for answer in "\n", "n\n", "":
        monkeypatch.setattr(sys.stdin, "readline", lambda answer=answer: answer, raising=False)
        assert clean.main([], root) == 0 and left(root) == before
        assert capsys.readouterr().out.endswith("Nothing was removed.\n")
    monkeypatch.setattr(sys.stdin, "readline", lambda: "Yes\n", raising=False)
    assert clean.main([], root) == 0 and left(root) != before


@pytest.mark.parametrize("how", ["locked folder", "locked log", "young log"])
def test_a_run_that_still_goes_is_left_alone(root, how, capsys):
    log = root / f"logs/{OLD}.txt"
    log.write_text(LOG)
    os.utime(log, (time.time() - 9999, time.time() - (9999 if "locked" in how else 60)))
    mine = {name for name in left(root) if OLD in name}
    number = os.open(log if how == "locked log" else log.with_suffix(""), os.O_RDONLY)
    if "locked" in how:
        assert guard.lock(number) is None
    assert clean.main(["--yes"], root) == 0
    assert mine <= left(root) and f"stays: all of {OLD}" in capsys.readouterr().out
    fcntl.flock(number, fcntl.LOCK_UN)
    os.close(number)
    if "locked" in how:  # the run was killed
        clean.main(["--yes"], root)
        assert f"logs/{OLD}.npz" not in left(root)


def test_a_run_that_begins_after_the_question_keeps_its_checkpoints(root):
    (item,) = [item for item in clean.everything(root) if "0000009" in item.path.name]
    number = os.open(item.path.parent, os.O_RDONLY)
    assert guard.lock(number) is None
    assert clean.remove(item) == "its run may be going" and item.path.exists()
    os.close(number)
    assert clean.remove(item) == "" and not item.path.exists()


def test_no_link_is_followed(root, tmp_path_factory, capsys):
    outside = tmp_path_factory.mktemp("drive")
    (outside / "state").write_text("keep")
    (root / "logs" / OLD / "0000005.state").symlink_to(outside / "state")
    (root / ".ruff_cache").symlink_to(outside)
    clean.main(["--yes"], root)
    assert (outside / "state").exists() and (root / ".ruff_cache").is_symlink()
    (root / "logs").rename(outside / "logs")  # as on Colab, where it leads to Drive
    (root / "logs").symlink_to(outside / "logs")
    (outside / f"logs/{OLD}.npz").write_text("weights")
    assert clean.main(["--yes"], root) == 0 and (outside / f"logs/{OLD}.npz").exists()
    assert (
        f"logs/ leads to {os.path.realpath(outside)}/logs, where nothing" in capsys.readouterr().out
    )
    assert re.fullmatch(r"left in logs/: 3 runs, 0\.0 MB", clean.disk_line(root))


def test_the_line_at_the_end_of_a_run(root):
    line = r"left in logs/: 3 runs, 0\.0 MB; \./run\.sh clean lists what can go"
    assert re.fullmatch(line, clean.disk_line(root))
    clean.main(["--yes"], root)
    assert re.fullmatch(r"left in logs/: 3 runs, 0\.0 MB", clean.disk_line(root))
    assert clean.disk_line(root / "data") == ""
    assert [clean.megabytes(x) for x in (260e6, 18.04e6, 2.54e6)] == ["260 MB", "18 MB", "2.5 MB"]


def test_a_real_log_has_a_preset_and_a_result_and_its_source_has_none():
    log = ROOT / "records/other/example/2026-11-27T22-17-13_9b2929a3.txt"
    assert clean.has_result(log) and clean.preset_of(log) == "tiny"
    assert clean.has_result(Path("none")) is False and clean.preset_of(Path("none")) == ""


def test_a_result_in_the_source_is_none(tmp_path):
    log = tmp_path / "log.txt"
    for lines in 1, clean.TAIL:  # a tail that begins in the source, and one that does not
        log.write_text("RESULT {\n" * 3 + LOG + lines * "line\n")
        assert not clean.has_result(log)
        log.write_text(log.read_text() + "RESULT {}\n")
        assert clean.has_result(log)


def test_the_newest_weights_of_each_preset_stay(root, capsys):
    for run, preset in (OLD, "record"), (NEW, "tiny"):
        facts = f'config {{"preset": "{preset}", "layers": 2}}\n'
        (root / f"logs/{run}.txt").write_text(f"{LOG}{facts}RESULT {{}}\n")
    older = f"logs/{NEW.replace('-23T', '-19T')}"
    shutil.copy(root / f"logs/{NEW}.txt", root / f"{older}.txt")
    (root / f"{older}.npz").write_text("weights")
    os.utime(root / f"{older}.npz", (0, 0))
    clean.main(["--yes"], root)
    assert f"logs/{OLD}.npz" in left(root) and f"{older}.npz" not in left(root)
    shown = capsys.readouterr().out
    assert f"{older}.npz  (weights of a run of tiny)" in shown
    assert f"stays: logs/{OLD}.npz, the newest weights of record\n" in shown


def test_of_an_old_run_the_log_is_not_read_and_two_may_ask_at_once(root, monkeypatch):
    log = root / f"logs/{OLD}.txt"
    os.utime(log, (0, 0))
    monkeypatch.setattr(clean, "end_of", None)
    with open(log) as other:
        fcntl.flock(other, fcntl.LOCK_SH)  # as another clean asks
        assert not clean.is_going(root / "logs", OLD)


def test_what_may_not_be_read_counts_as_locked(root, monkeypatch):
    def refuse(*_):
        raise PermissionError

    monkeypatch.setattr(os, "open", refuse)
    assert clean.is_locked(root)
