"""runs.py reads logs of all eras, and names the line and the reason where it reads none."""

import importlib
import io
import json
import lzma
import os
import sys
import tarfile
from pathlib import Path

import pytest
import runs
from fake_runs import BORDER, SOURCE, ours, sha

SMI = "|   0  NVIDIA H100 80GB HBM3          On  |   00000000:8D:00.0 Off |              0 |\n"
# The first logs have the loss of every batch.
OF_2024 = f"""{SOURCE}
{BORDER}Running pytorch 2.4.1 compiled for CUDA 12.1
{SMI}{BORDER}step:0/250 val_loss:11.0149 train_time:305ms step_avg:nanms
step:1/250 train_loss:11.0091 train_time:24179ms step_avg:nanms
step:250/250 train_loss:4.4305 train_time:90390ms step_avg:363.34ms
step:250/250 val_loss:4.2763 train_time:90424ms step_avg:363.34ms
"""
OF_2025 = f"""{SOURCE}
{BORDER}Running Python 3.12.7 (main)
{SMI}{BORDER}step:0/250 val_loss:10.8258 train_time:0ms step_avg:0.03ms
step:1/250 train_time:73ms step_avg:73.06ms
step:250/250 val_loss:4.1234 train_time:11200ms step_avg:44.80ms
peak memory allocated: 31 MiB reserved: 46 MiB
"""
MEDIUM = OF_2025.replace("250/250 val_loss:4.1", "5960/5960 val_loss:2.9").replace("/250", "/5960")
RUN = """\
step:0/250 val_loss:10.82584 train_time:0.001s step_avg:nanms
step:250/250 val_loss:4.12440 train_time:41.354s step_avg:147.87ms
"""
TRACK_3 = f"""{SOURCE}
{BORDER}Running PyTorch 2.10.0 compiled for CUDA 12.8
Running on device_name=NVIDIA H100 80GB HBM3 with world_size=8
{BORDER}{RUN}"""
OLDER_TRACK_3 = f"""{SOURCE}
{BORDER}Running PyTorch 2.11.0 compiled for CUDA 12.8 on NVIDIA H100 80GB HBM3 with world_size 8
{BORDER}{RUN}"""
ERAS = {  # name: (log, what is read: end, final loss, seconds, devices; or why not)
    "2024": (OF_2024, ("end of schedule", 4.2763, 90.424, 1)),
    "2025": (OF_2025, ("end of schedule", 4.1234, 11.2, 1)),
    "medium": (MEDIUM, ("end of schedule", 2.9234, 11.2, 1)),
    "track 3": (TRACK_3, ("end of schedule", 4.1244, 41.354, 8)),
    "older track 3": (OLDER_TRACK_3, ("end of schedule", 4.1244, 41.354, 8)),
    "fields after": (
        TRACK_3.replace("ms\n", "ms ema_beta:0.3 rel:9.9e-04 handoff:none\n"),
        ("end of schedule", 4.1244, 41.354, 8)),
    "fields between": (
        TRACK_3.replace(" train_t", " val_avg_loss:4.1 val_ema_loss:4.2 train_t"),
        ("end of schedule", 4.1244, 41.354, 8)),
    "ended early": (TRACK_3.replace("/250", "/300"), ("incomplete", 4.1244, 41.354, 8)),
    "a loss twice": (
        TRACK_3.replace("step_avg", "val_loss:3.1 step_avg"),
        "line 27: a loss or RESULT has another form, or other text beside it: 'step:0/250"),
    "two lines in one": (
        TRACK_3.replace(" step_avg:nanms\n", "\n"), "line 27: a loss or RESULT has another form"),
    "three runs": (TRACK_3 + 2 * RUN, "it has 3 runs: split it into logs of one run"),
    "llm.c": ("s:0 tel:10.9689\ns:0 trl:10.9656 lr:0.1\n", "the source: it is a log of llm.c"),
    "a terminal": (RUN, "ends the source: it has losses as a terminal shows them"),
    "UTF-16": (ours(1, 1.46).encode("utf-16-le"), "it is UTF-16: save it as UTF-8"),
    "CR": (ours(1, 1.46).replace("\n", "\r"), "its lines end in CR: restore the file"),
    "a packed log with a blank": (
        f"source {'0' * 64} \n{BORDER}x\n", "line 1 is not `source <sha256>`, alone"),
    "a packed log with a byte-order mark": (
        f"\ufeffsource {'0' * 64}\n{BORDER}x\n", "line 1 is not `source <sha256>`, alone"),
    "words of another program": (
        f"{OF_2025}data loaded in 3 s\nenvironment ready\n",
        ("end of schedule", 4.1234, 11.2, 1)),
    "no log": ("numpy\ntqdm\n", "it has no line of 100 =, which ends the source, and no losses"),
    "ours": (ours(1, 1.46), ("end of schedule", 1.46, 90.0004, 1)),
    "ours, with colours": (
        ours(1, 1.46).replace("RESULT", "\x1b[1mRESULT"), r"text beside it: '\x1b[1mRESULT {"),
    "after a progress bar": (
        ours(1, 1.46).replace("step:250", " 50 %\rstep:250"),
        r"line 39: a loss or RESULT has another form, or other text beside it: ' 50 %\rstep:250"),
    "damaged": (ours(1, 1.46).replace("step:10/", "st:10/"), "line 37: a loss or RESULT has ano"),
    "of srun -l": (ours(1, 1.46).replace("step:", "0: step:"), "line 36: a loss or RESULT has ano"),
    "with what came after it": (
        ours(1, 1.46) + "\n  \nslurmstepd: done\n\n", ("end of schedule", 1.46, 90.0004, 1)),
    "with a run after it": (
        ours(1, 1.46) + "step:500/500 val_loss:1.2000 train_time:9ms step_avg:1.00ms\n",
        "line 42: a log has one run, but this follows its RESULT: 'step:500/500"),
}  # fmt: skip


def read(tmp_path: Path, text: str | bytes) -> runs.Run:
    """Reads a log of this content."""
    path = tmp_path / "2026-11-21T13-00-00_1.txt"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return runs.read(path)


def why_not(tmp_path: Path, text: str | bytes) -> str:
    """Returns why a log of this content is not read."""
    with pytest.raises(runs.Unreadable) as fault:
        read(tmp_path, text)
    return str(fault.value)


@pytest.mark.parametrize("era", ERAS)
def test_a_log_of_every_era_is_read_or_refused_for_the_true_reason(tmp_path, era):
    text, right = ERAS[era]
    if isinstance(right, str):
        assert right in why_not(tmp_path, text)
        return
    run = read(tmp_path, text)
    assert (run.ended, run.loss, run.seconds, len(run.devices)) == right


def stating(name: str, value: str) -> str:
    """Returns a log of ours with another value of a fact, as JSON."""
    lines = ours(1, 1.46).split("\n")
    return "\n".join(f"{name} {value}" if line.startswith(f"{name} ") else line for line in lines)


@pytest.mark.parametrize("name, value, reason", [
    ("config", "null", "line 32: config cannot be null"),
    ("config", '{"preset": "tiny", "preset": "record"}', "config is broken: preset is there twice"),
    ("config", '{"preset": "tiny", "target": "0"}', 'target of config cannot be "0"'),
    ("config", "{}\nconfig {}", "config has no preset"),
    ("seed", '"7"', 'seed cannot be "7"'),
    ("seed", "true", "seed cannot be true"),
    ("seed", "7", "its config has another seed"),
    ("seed", "7\nseed 8", "seed is stated twice"),
    ("data", '["a", "b"]', 'a part of data cannot be "a"'),
    ("data", "{}", "data cannot be {}"),
    ("devices", "8", "devices cannot be 8"),
    ("driver", "[" * 100_000, "driver is nested too deeply"),
    ("argv", '{"tiny": 1}', "argv cannot be"),
    ("environment", '{"A": 1}', "A of environment cannot be 1"),
    ("parameters", '{"a": -1}', "a of parameters cannot be -1"),
    ("parameters", f'{{"a": 1{"0" * 5000}}}', "parameters is broken: Exceeds the limit"),
    ("versions", "", "versions is broken: Expecting value"),
    ("RESULT", "null", "line 41: RESULT cannot be null"),
    ("RESULT", "{}\nRESULT {}", "RESULT has no reason"),
])  # fmt: skip
def test_a_fact_of_another_form_is_named(tmp_path, name, value, reason):
    assert reason in why_not(tmp_path, stating(name, value))


@pytest.mark.parametrize("name, value, reason", [
    ("val_loss", '"1.46"', 'val_loss of RESULT cannot be "1.46"'),
    ("val_loss", "NaN", "NaN is not a number"),
    ("val_loss", "1e999", "val_loss of RESULT cannot be Infinity"),
    ("val_loss", "true", "val_loss of RESULT cannot be true"),
    ("val_loss", "1.3", "does not agree with its last validation"),
    ("train_time_ms", "Infinity", "Infinity is not a number"),
    ("train_time_ms", "1" + "0" * 400, "train_time_ms of RESULT cannot be 1000"),
    ("tokens", "1e3", "tokens of RESULT cannot be 1000.0"),
    ("tokens", "0", "RESULT has no tokens"),
    ("steps", "499", "does not agree with its last validation"),
    ("seed", "2", "does not agree with its seed"),
    ("devices", "8", "or its devices"),
    ("reason", '"incomplete"', "an unknown reason"),
])  # fmt: skip
def test_a_result_that_is_no_number_or_another_one_does_not_count(tmp_path, name, value, reason):
    text, _, result = ours(1, 1.46).rpartition("RESULT ")
    stated = json.loads(result)
    stated[name] = "here"
    result = json.dumps(stated).replace('"here"', value)
    assert reason in why_not(tmp_path, f"{text}RESULT {result}\n")


def test_a_result_counts_once_and_not_after_a_break(tmp_path):
    text = ours(1, 1.46)
    result = text[text.index("RESULT") :]
    assert "line 42: a log has one run" in why_not(tmp_path, text + result)
    assert read(tmp_path, text + "INTERRUPTED by SIGTERM\n").ended == "interrupted"
    stopped = text.replace("RESULT", "INTERRUPTED by SIGTERM after step 500\nRESULT")
    assert "line 42: RESULT follows the line by which" in why_not(tmp_path, stopped)
    resumed = read(tmp_path, text + 'resume {"step": 250}\n')
    assert (resumed.ended, resumed.tokens) == ("incomplete", None)


def test_the_last_line_of_a_run_that_was_killed_may_be_cut(tmp_path):
    text = ours(1, 1.46)
    end = text.index("train_time:", text.index("step:250"))
    assert read(tmp_path, text[:end]).ended == "incomplete"
    went_on = f'{text[:end]}\nresume {{"step": 20}}\n{text[text.index("step:250") :]}'
    run = read(tmp_path, went_on)
    assert run.complete and [v.step for v in run.validations] == [0, 250, 500]
    assert "line 39: a loss" in why_not(tmp_path, f"{text[:end]}\n{text[end:]}")
    assert read(tmp_path, text.removesuffix("\n")).complete


def test_a_log_with_crlf_is_read_as_it_was_written(tmp_path):
    """The source has the hash that it had. No hash is right where only some lines end in CRLF."""
    text = ours(1, 1.46)
    crlf = text.replace("\n", "\r\n")
    assert read(tmp_path, crlf) == read(tmp_path, text)
    assert read(tmp_path, crlf).source_sha256 == sha(SOURCE)
    (tmp_path / "train_gpt.py").write_bytes(SOURCE.replace("\n", "\r\n").encode())
    assert runs.source_hash(tmp_path / "train_gpt.py") == sha(SOURCE)
    assert "some of its lines end in CRLF" in why_not(tmp_path, crlf + "x\n")
    assert "line 36: a loss" in why_not(tmp_path, text.replace("0ms\n", "0ms\r\n"))


def tar(names: dict[str, bytes], end: bool = True) -> bytes:
    """Returns an archive of logs of 512 bytes. A type follows each name."""
    content = io.BytesIO()
    with tarfile.open(fileobj=content, mode="w") as archive:
        for name, kind in names.items():
            member = tarfile.TarInfo(name)
            member.type = kind
            member.size = 512 * (kind == tarfile.REGTYPE)
            archive.addfile(member, io.BytesIO(b"x" * member.size))
    return content.getvalue() if end else content.getvalue()[: 1024 * len(names)]


TWO = {"logs/a.txt": tarfile.REGTYPE, "logs/b.txt": tarfile.REGTYPE}
WHOLE = tar(TWO)
ARCHIVES = {  # name: (content, the message, or the names of its logs)
    "whole": (lzma.compress(WHOLE), ["a.txt", "b.txt"]),
    "with folders and files of macOS": (
        lzma.compress(tar({"logs": tarfile.DIRTYPE, "logs/._a.txt": tarfile.REGTYPE} | TWO)),
        ["a.txt", "b.txt"]),
    "without its end": (lzma.compress(tar(TWO, end=False)), "or has something behind its end"),
    "a damaged header": (
        lzma.compress(WHOLE[:1024] + b"X" + WHOLE[1025:]), "or has something behind its end"),
    "two archives in one": (lzma.compress(WHOLE + WHOLE), "or has something behind its end"),
    "two, one after another": (2 * lzma.compress(WHOLE), "or has something behind its end"),
    "cut": (lzma.compress(WHOLE)[:-20], "or has something behind its end"),
    "a link": (
        lzma.compress(tar(TWO | {"logs/c.txt": tarfile.LNKTYPE})), "c.txt is a link or a device"),
    "a symbolic link": (
        lzma.compress(tar(TWO | {"logs/c.txt": tarfile.SYMTYPE})), "c.txt is a link or a device"),
    "two folders": (
        lzma.compress(tar(TWO | {"b/a.txt": tarfile.REGTYPE})), "b/a.txt is there twice, or in"),
    "empty": (b"", "is damaged: empty file"),
    "a pointer": (b"version https://git-lfs.github.com/spec/v1\n", "type git lfs pull"),
}  # fmt: skip


@pytest.mark.parametrize("name", ARCHIVES)
def test_an_archive_that_lost_a_log_is_named(tmp_path, name):
    content, right = ARCHIVES[name]
    (tmp_path / "logs.tar.xz").write_bytes(content)
    if isinstance(right, list):
        assert [log.name for log in runs.log_files(tmp_path)] == right
        return
    with pytest.raises(runs.Unreadable, match=right):
        runs.log_files(tmp_path)


def test_what_is_no_log_by_its_name_is_left_alone(tmp_path):
    for name in "a.txt", "._a.txt", "b.TXT", "c.log", "out.log", "d.txt.gz":
        (tmp_path / name).write_text("no log" if name == "out.log" else ours(1, 1.46))
    os.mkfifo(tmp_path / "e.txt")
    (tmp_path / "f.txt").mkdir()
    (tmp_path / ".#a.txt").symlink_to("me@host.1")
    assert [path.name for path in runs.log_files(tmp_path)] == ["a.txt"]
    assert [path.name for path in runs.left_out(tmp_path)] == ["b.TXT", "c.log", "d.txt.gz"]
    (tmp_path / "g.txt").symlink_to("gone")  # a log that is gone is not passed over
    assert [path.name for path in runs.log_files(tmp_path)] == ["a.txt", "g.txt"]


def test_logs_that_were_unpacked_beside_their_archive_are_not_left_out(tmp_path):
    (tmp_path / "logs.tar.xz").write_bytes(lzma.compress(WHOLE))
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs/a.txt").write_bytes(b"x" * 512)
    assert runs.left_out(tmp_path) == []
    (tmp_path / "logs/a.txt").write_text(ours(1, 1.46))
    assert runs.left_out(tmp_path) == [tmp_path / "logs/a.txt"]


def test_what_is_not_utf8_is_named_by_its_line(tmp_path):
    text = ours(1, 1.46).encode().replace(b"RESULT", b"caf\xe9\nRESULT")
    assert why_not(tmp_path, text) == "line 41 is not UTF-8"
    assert why_not(tmp_path, SOURCE + BORDER) == "it ends with the source"


def test_an_older_python_is_no_verdict(monkeypatch):
    monkeypatch.setattr(sys, "version_info", (3, 10, 0))
    with pytest.raises(SystemExit, match="2"):
        importlib.reload(runs)
