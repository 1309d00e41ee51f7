"""runs.py reads logs, and names the reason where it reads none."""

import lzma
import re
import tarfile
from pathlib import Path

import pytest
import runs
from fake_runs import BORDER, SOURCE, ours

RUN = "step:0/500 val_loss:10.8 train_time:0ms step_avg:nanms\n"
LOGS = {  # name: (log, how the run ended; or why it is not read)
    "of a run": (ours(1, 1.46), "end of schedule"),
    "with a byte of another": (ours(1, 1.46) + "\n\xe9\n\n", "end of schedule"),
    "diverged": (ours(1, 1.46).partition("RESULT")[0] + "NON-FINITE: x\n", "not finite"),
    "a run after it": (ours(1, 1.46) + RUN, "out of order at step 0: a log has one run"),
    "no facts": (SOURCE + BORDER + RUN, "it does not state versions, devices, argv, seed, config"),
    "another seed in its config": (
        ours(1, 1.46, config=dict(seed=7)), "its config has another seed"),
}  # fmt: skip


def read(tmp_path: Path, text: str) -> runs.Run:
    """Reads a log of this content."""
    path = tmp_path / "2026-11-21T13-00-00_1.txt"
    path.write_bytes(text.encode("latin-1"))
    return runs.read(path)


@pytest.mark.parametrize("name", LOGS)
def test_a_log_is_read_or_refused_for_the_true_reason(tmp_path, name):
    text, right = LOGS[name]
    if right in (*runs.COMPLETE, "not finite"):
        run = read(tmp_path, text)
        assert (run.ended, run.loss, len(run.validations)) == (right, 1.46, 3)
    else:
        with pytest.raises(runs.Unreadable, match=re.escape(right)):
            read(tmp_path, text)


def test_every_loss_of_a_resumed_run_counts_once(tmp_path):
    def read_without_hash(text: str) -> runs.Run:
        return read(tmp_path, text)._replace(log_sha256="")

    start, middle, end = re.split("(?=step:[25][05]0/)", ours(1, 1.46))
    lost_middle = re.sub("loss:.", "loss:9", middle)
    lost_end = re.sub("loss:.", "loss:9", end.partition("RESULT")[0])
    # GOODPUT, STALLED and the "log" of resume are in logs of earlier versions.
    resume_20 = 'GOODPUT 9 %: x\nINTERRUPTED\n\nresume {"step": 20, "log": "x"}\nhosts 1\n'
    resume_250 = resume_20.replace("20", "250")
    text = start + lost_middle + resume_20 + lost_middle + lost_end + resume_250 + middle
    right = read_without_hash(start + middle + end)._replace(resumed=True)
    assert read_without_hash(text + end) == right
    stalled = text + "STALLED: no step in 9 s\nThread 0x7f:\n  File x\n"
    assert read_without_hash(stalled).ended == "incomplete"
    resumed = read(tmp_path, ours(1, 1.46) + 'resume {"step": 250}\n')
    assert (resumed.ended, resumed.tokens) == ("incomplete", None)


def test_what_was_cut_off_or_damaged_makes_no_complete_run(tmp_path):
    """Wherever a log ends, and whichever of its lines with a loss or RESULT is damaged."""
    text = ours(1, 1.46)
    assert read(tmp_path, text.removesuffix("\n")).complete
    for cut in range(text.index("compile {"), len(text) - 2, 7):
        assert not read(tmp_path, text[:cut]).complete
    for damaged in (
        text.replace("RESULT", "\x1b[1mRESULT"), text.replace("step:500", " 99 %\rstep:500"),
        text.replace("step:", "0: step:"), text.replace("RESULT {", "RESULT {,"),
    ):  # fmt: skip
        assert not read(tmp_path, damaged).complete


def test_an_archive_that_is_cut_off_is_no_archive(tmp_path):
    for name in ("b.txt", "a.txt"):
        (tmp_path / name).write_text(name)
    archive = tmp_path / "logs.tar.xz"
    with tarfile.open(archive, "w:xz") as tar:
        tar.add(tmp_path / "b.txt", "logs/b.txt")
        tar.add(tmp_path / "a.txt", "logs/a.txt")
    assert [log.content for log in runs.log_files(tmp_path)] == [b"a.txt", b"b.txt"]
    archive.write_bytes(archive.read_bytes()[:-20])
    with pytest.raises(lzma.LZMAError):
        runs.log_files(tmp_path)
