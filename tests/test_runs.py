"""runs.py reads logs of all eras, and names the reason where it reads none."""

import io
import lzma
import re
import tarfile
from pathlib import Path

import fake_runs
import pytest
import runs
from fake_runs import BORDER, SOURCE, ours

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
    "track 3": (TRACK_3, ("end of schedule", 4.1244, 41.354, 8)),
    "older track 3": (OLDER_TRACK_3, ("end of schedule", 4.1244, 41.354, 8)),
    "fields after": (
        TRACK_3.replace("ms\n", "ms ema_beta:0.3 rel:9.9e-04 handoff:none\n"),
        ("end of schedule", 4.1244, 41.354, 8)),
    "fields between": (
        TRACK_3.replace(" train_t", " val_avg_loss:4.1 val_ema_loss:4.2 train_t"),
        ("end of schedule", 4.1244, 41.354, 8)),
    "ended early": (TRACK_3.replace("/250", "/300"), ("incomplete", 4.1244, 41.354, 8)),
    "three runs": (TRACK_3 + 2 * RUN, "out of order at step 0: a log has one run"),
    "a terminal": (RUN, "it has no line of 100 =, which ends the source"),
    "no losses": (SOURCE + BORDER + "hello\n", "it is not a log of train_gpt.py or modded-nanogpt"),
    "not UTF-8": (ours(1, 1.46).encode().replace(b"RESULT", b"caf\xe9\nRESULT"),
                  f"line {ours(1, 1.46).count(chr(10))} is not UTF-8"),
    "words of another program": (
        f"{OF_2025}data loaded in 3 s\nenvironment ready\n", ("end of schedule", 4.1234, 11.2, 1)),
    "ours": (ours(1, 1.46), ("end of schedule", 1.46, 90.0004, 1)),
    "with what came after it": (
        ours(1, 1.46) + "\n  \nslurmstepd: done\n\n", ("end of schedule", 1.46, 90.0004, 1)),
    "interrupted": (ours(1, 1.46) + "INTERRUPTED by SIGTERM\n", ("interrupted", 1.46, 90.0004, 1)),
    "another seed in its config": (
        ours(1, 1.46, config=dict(seed=7)), "its config has another seed"),
    "with a run after it": (ours(1, 1.46) + RUN, "out of order at step 0"),
}  # fmt: skip


def read(tmp_path: Path, text: str | bytes) -> runs.Run:
    """Reads a log of this content."""
    path = tmp_path / "2026-11-21T13-00-00_1.txt"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return runs.read(path)


@pytest.mark.parametrize("era", ERAS)
def test_a_log_of_every_era_is_read_or_refused_for_the_true_reason(tmp_path, era):
    text, right = ERAS[era]
    if isinstance(right, str):
        with pytest.raises(runs.Unreadable, match=re.escape(right)):
            read(tmp_path, text)
        return
    run = read(tmp_path, text)
    assert (run.ended, run.loss, run.seconds, len(run.devices)) == right


def test_every_loss_of_a_resumed_run_counts_once(tmp_path):
    def read_without_hash(text: str) -> runs.Run:
        return read(tmp_path, text)._replace(log_sha256="")

    start, middle, end = re.split("(?=step:[25][05]0/)", ours(1, 1.46))
    lost_middle = re.sub("loss:.", "loss:9", middle)
    lost_end = re.sub("loss:.", "loss:9", end.partition("RESULT")[0])
    stopped = "INTERRUPTED by SIGTERM after step 250; to resume: ./run.sh tiny --resume logs/x\n"
    # GOODPUT, STALLED and the "log" of resume are in logs of earlier versions.
    resume_20 = f'GOODPUT 9 %: x\n{stopped}\nresume {{"step": 20, "log": "x"}}\nhosts 1\n'
    resume_250 = resume_20.replace("20", "250")
    text = start + lost_middle + resume_20 + lost_middle + lost_end + resume_250 + middle
    right = read_without_hash(start + middle + end)._replace(resumed=True)
    assert read_without_hash(text + end) == right
    stalled = text + "STALLED: no step in 9 s\nThread 0x7f:\n  File x\n"
    assert read_without_hash(stalled).ended == "incomplete"
    resumed = read(tmp_path, ours(1, 1.46) + 'resume {"step": 250}\n')
    assert (resumed.ended, resumed.tokens) == ("incomplete", None)


def test_what_was_cut_off_or_damaged_makes_no_complete_run(tmp_path):
    """Wherever a log of ours ends, and whichever of its lines with a loss or RESULT is damaged."""
    text = ours(1, 1.46)
    end = text.index("train_time:", text.index("step:250"))
    assert read(tmp_path, text[:end]).ended == "incomplete"
    went_on = f'{text[:end]}\nresume {{"step": 20}}\n{text[text.index("step:250") :]}'
    run = read(tmp_path, went_on)
    assert run.complete and [v.step for v in run.validations] == [0, 250, 500]
    assert read(tmp_path, text.removesuffix("\n")).complete
    body = text.index("compile {")
    for cut in range(body, len(text) - 2, 7):
        assert not read(tmp_path, text[:cut]).complete
    for damaged in (
        text.replace("RESULT", "\x1b[1mRESULT"), text.replace("step:500", " 99 %\rstep:500"),
        text.replace("step:", "0: step:"), text.replace("RESULT {", "RESULT {,"),
    ):  # fmt: skip
        assert not read(tmp_path, damaged).complete


def tar(names: list[str]) -> bytes:
    """Returns an archive of logs of 512 bytes."""
    content = io.BytesIO()
    with tarfile.open(fileobj=content, mode="w") as archive:
        for name in names:
            member = tarfile.TarInfo(name)
            member.size = 512
            archive.addfile(member, io.BytesIO(b"x" * 512))
    return content.getvalue()


def test_an_archive_that_is_cut_off_is_named(tmp_path):
    whole = lzma.compress(tar(["logs/b.txt", "logs/a.txt"]))
    archive = tmp_path / "logs.tar.xz"
    archive.write_bytes(whole)
    assert [log.name for log in runs.log_files(tmp_path)] == ["a.txt", "b.txt"]
    for content in (whole[:-20], whole[:40], b"", b"version https://git-lfs.github.com/spec/v1\n"):
        archive.write_bytes(content)
        with pytest.raises(runs.Unreadable, match=r"logs.tar.xz is damaged"):
            runs.log_files(tmp_path)


def test_upstreams_facts(tmp_path):
    run = read(tmp_path, fake_runs.upstream(3.28, 80000))
    assert run.devices == ["NVIDIA H100 80GB HBM3"] * 8 and run.driver == "580.159.04"
    assert run.versions["PyTorch"].startswith("2.10.0") and run.seconds == 80
