"""run/watch.py reads logs of all versions, counts as train_gpt.py does, and follows a run."""

import ast
import dataclasses
import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
import runs
import watch
from messages import Fault

import train_gpt
from tests.tools import MINI, ROOT
from train_gpt import PRESETS

EXAMPLE = ROOT / "records/other/example/2026-11-25T15-13-11_917ae0e6.txt"
SHORT_STAGES = [dataclasses.replace(MINI.stages[0], steps=n) for n in (1, 1, 100, 1, 1, 1, 100)]
CONFIGS = [*PRESETS.values(), MINI, dataclasses.replace(MINI, stages=(*SHORT_STAGES,))]
SIZES = {"qk": 100, "vo": 200, "mlp": 300, "head": 400, "bigram": 10**6}
HEAD = "print('source')\n" + 100 * "=" + "\ndata []\n"


def losses(*points, kind="train", steps=20):
    """Lines of these (step, loss, milliseconds)."""
    end = " step_avg:1.00ms" if kind == "val" else ""
    return "".join(
        f"step:{n}/{steps} {kind}_loss:{x:.4f} train_time:{ms}ms{end}\n" for n, x, ms in points
    )


def facts(c=MINI, devices=("NVIDIA H200", "NVIDIA H200"), **more):
    """The lines of a log before its losses."""
    stated = {"config": {"preset": "tiny", **dataclasses.asdict(c)}, "devices": devices,
              "parameters": SIZES, **more}  # fmt: skip
    return "".join(f"{name} {json.dumps(value)}\n" for name, value in stated.items())


RESULT = {
    "reason": "end of schedule",
    "val_loss": 2.5,
    "steps": 20,
    "tokens": 10240,
    "resumed": True,
}
RUN = losses((0, 6, 0), kind="val") + losses((10, 4, 1000), (20, 3, 3000))
ENDED = HEAD + facts() + RUN + f"RESULT {json.dumps(RESULT)}\n"
GOES_ON = HEAD + facts() + RUN


@pytest.fixture
def log(tmp_path, monkeypatch):
    """Writes a log into logs/ of an empty folder, where the process is."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "60")
    Path("logs").mkdir()

    def write(text, name="2026-01-01T00-00-00_0.txt"):
        path = Path("logs") / name
        path.write_text(text)
        return path

    return write


def main(capsys, *arguments, terminal=False):
    """What the program prints, on a terminal of 60 columns or elsewhere, and its exit status or
    what is wrong."""
    status = 0
    with mock.patch.object(sys.stdout, "isatty", lambda: terminal):
        try:
            watch.main([*map(str, arguments)])
        except SystemExit as end:
            status = end.code
        except Fault as fault:
            status = str(fault)
    return capsys.readouterr().out, status


# ---- Numbers -------------------------------------------------------------------------------------
@pytest.mark.parametrize("c", CONFIGS)
def test_stages_and_tokens_are_those_of_the_run(c):
    trained = sum(stage.steps > 0 for stage in c.stages)
    for steps in (0, trained, trained + 1, 7, 100, 333, 5000):
        if steps and steps < trained:
            continue
        new = dataclasses.replace(c, steps=steps)
        stages = watch.parse(EXAMPLE, facts(new)).stages
        assert [stage.end for stage in stages] == new.stage_ends.tolist()
    c = dataclasses.replace(c, steps=100)
    run = watch.parse(EXAMPLE, facts(c))
    tokens = [B * T for B, T, _ in train_gpt.batch_shapes("train", c)]
    for step in (0, 1, 34, 70, 100):
        assert watch.work(run, step)[0] == sum(tokens[:step])


def test_mfu_by_hand():
    """MINI has windows short, long, short, none, short, long; in 10 of 20 steps they are 8 and 16
    positions, in 10 they are 16 and 48. A step has 512 tokens and D is 32."""
    run = watch.parse(EXAMPLE, facts() + RUN)
    first = 6 * 1000 + 12 * 32 * (3 * 8 + 2 * 16)
    second = 6 * 1000 + 12 * 32 * (3 * 16 + 2 * 48)
    peak = 2 * 989e12
    zero, ten, twenty = run.losses
    assert watch.speed(run, zero, ten) == pytest.approx((5120, 5120 * first / peak))
    assert watch.speed(run, ten, twenty) == pytest.approx((2560, 2560 * second / peak))
    both = 5120 * (first + second) / 3 / peak
    assert watch.speed(run, zero, twenty) == pytest.approx((10240 / 3, both))


def test_mfu_counts_the_rows_of_the_head_that_are_candidates():
    """In logs of record 92."""
    stages = [dataclasses.asdict(MINI.stages[0]) | {"candidates": n} for n in (0, 64, 128)]
    config = dataclasses.asdict(MINI) | {"preset": "record92", "stages": stages}
    run = watch.parse(EXAMPLE, facts(config=config) + RUN)
    whole, some, more = (stage.flops for stage in run.stages)
    assert whole - some == 6 * (400 - 64 * 32) and more - some == 6 * 64 * 32


@pytest.mark.parametrize("kind", ["cpu", "NVIDIA H100 80GB HBM3 MIG 1g.10gb", "Tesla T4"])
def test_devices_without_a_peak_have_no_mfu(kind):
    assert "MFU n/a" in "\n".join(watch.summary(watch.parse(EXAMPLE, facts(devices=[kind]) + RUN)))


def test_the_example_by_hand(capsys, log):
    text, status = main(capsys, EXAMPLE)
    lines = text.splitlines()
    assert status == 0 and lines[1] == 40 * "█" + " step 180 of 180"
    assert lines[2:4] == [
        "target reached: validation loss 1.3650 after 180 steps",
        # 180 steps of 512 tokens; 92,160 / 17.185 s
        "92,160 tokens in 17.2 s, 5,363 tokens/s on average, MFU n/a",
    ]
    assert "180: 1.5173" in lines[4] and "180: 1.3650  target 1.38" in lines[5]

    # The same log while the run went on. Ten lines, two of them of step 90,
    # begin at step 40.
    cut = EXAMPLE.read_text().partition("step:130/")[0]
    text, _ = main(capsys, log(cut + "step:130/180 train_lo"))
    lines = text.splitlines()
    assert lines[1] == 27 * "█" + 13 * "░" + " step 120 of 180"
    # 80 steps in 12.075 - 3.903 s; all in 12.075 s; 60 steps are left
    assert lines[2] == "5,012 tokens/s and MFU n/a now, 5,088 tokens/s on average"
    assert lines[3].startswith("0:00:06 of training left; 0:00:0")


def test_time_left_counts_the_tokens_of_later_stages():
    stages = (dataclasses.replace(MINI.stages[0], tokens=512), *MINI.stages[1:])
    stages = (stages[0], dataclasses.replace(stages[1], tokens=5120), stages[2])
    run = watch.parse(
        EXAMPLE, facts(dataclasses.replace(MINI, stages=stages)) + losses((0, 6, 0), (10, 4, 1000))
    )
    assert watch.summary(run)[3].startswith("0:00:10 of training left")


# ---- Logs ----------------------------------------------------------------------------------------
def test_logs_of_all_versions():
    folders = [path.parent for path in sorted((ROOT / "records/tracks").rglob("logs.tar.xz"))]
    assert len(folders) > 20
    for folder in folders:
        archived = runs.log_files(folder)[0]
        right = runs.read(archived)
        run = watch.parse(EXAMPLE, runs.split(archived.content)[2])
        assert run.end.startswith(f"{right.ended}: validation loss {right.loss:.4f} after ")
        assert watch.work(run, run.losses[-1].step)[0] == right.tokens
        assert len(run.losses) == len(right.validations) + len(right.training)
        assert len(watch.summary(run)) > 8
        assert (run.count, run.mixed) == (1, False)


def test_a_resumed_run_replaces_what_it_repeats():
    more = 'resume {"step": 10}\n' + losses((10, 5, 1000), kind="val") + losses((20, 2, 2500))
    body = facts() + RUN.replace("step:20/", losses((10, 5, 1000), kind="val") + "step:20/")
    body += "INTERRUPTED by SIGINT after step 20; to resume: x\n\n" + more
    run = watch.parse(EXAMPLE, body)
    assert [(x.kind, x.step, x.loss) for x in run.losses] == [
        ("val", 0, 6), ("train", 10, 4), ("val", 10, 5), ("train", 20, 2),
    ]  # fmt: skip
    assert run.end == ""
    body += f"RESULT {json.dumps(RESULT)}\n"
    assert watch.parse(EXAMPLE, body).end.endswith(", resumed")
    assert watch.parse(EXAMPLE, f"{body}\n{more}").end == ""  # it trains its end a second time


@pytest.mark.parametrize("line", [
    "INTERRUPTED by SIGTERM after step 20; to resume: ./run.sh tiny --resume " + 60 * "x",
    "NON-FINITE: the loss, by step 20",
])  # fmt: skip
def test_runs_that_broke_off_say_so(capsys, log, line):
    body = facts() + RUN + losses((20, float("nan"), 3100), kind="val")
    text, status = main(capsys, log(HEAD + body + line))
    assert line in text.splitlines() and "20: nan" in text and status == 0


@pytest.mark.parametrize("text, message", [
    ("", "is not a log: it has no line of 100 ="),
    ("\0\xff" * 50, "is not a log: it has no line of 100 ="),
    (HEAD.replace("data", "number of parameters:"), "is not a log of train_gpt.py"),
    (HEAD + "config []\n", "a fact is missing or has another form: AttributeError"),
    (HEAD + 'config {"stages": [{}]}\n', "missing or has another form: KeyError('steps')"),
    (HEAD + "step:1/2 train_loss:x train_time:1ms\n", "could not convert"),
    (HEAD + facts(config={"stages": [], "steps": 9}), "another form: IndexError"),
    (GOES_ON.replace('"tokens": 512', '"tokens": "512"'), "another form: TypeError"),
    (GOES_ON.replace('"tokens": 512', '"tokens": null'), "another form: TypeError"),
    (GOES_ON.replace('"tokens": 512', '"tokens": 1' + 400 * "0"), "another form: OverflowError"),
    (GOES_ON.replace("step:20/", f"step:{400 * '9'}/"), "another form: OverflowError"),
    (GOES_ON + "RESULT " + 100_000 * "[" + "\n", "another form: RecursionError"),
    (GOES_ON + "RESULT []\n", "another form: TypeError"),
    (HEAD + facts(devices="cpu"), "devices are not a list of names: 'cpu'"),
    (HEAD + facts() + RUN.replace("ms", "s"), "no loss can be read, as in the line 'step:0/20 val"),
    (re.sub("^", "0: ", GOES_ON, flags=re.M), "with the number of a task, as by srun -l: remove"),
])  # fmt: skip
def test_what_is_not_a_log_gets_one_line(capsys, log, text, message):
    _, status = main(capsys, log(text))
    assert message in status and "\n" not in status


def test_every_part_of_a_log_can_be_read(capsys, log):
    """A log that ends anywhere after its source."""
    body = facts(dataclasses.replace(MINI, mudd_head=())) + RUN + f"RESULT {json.dumps(RESULT)}\n"
    for end in [*range(0, len(body), 97), *range(len(body) - 150, len(body))]:
        assert main(capsys, log(HEAD + body[:end]))[1] == 0


def test_files_that_are_not_there(capsys, log):
    with pytest.raises(FileNotFoundError):
        main(capsys, "logs/none.txt")
    assert main(capsys, "logs")[1] == "logs is a folder: name a log in it"
    assert main(capsys)[1] == "there is no log in logs/; ./run.sh starts a run"
    os.mkfifo("logs/pipe")
    assert main(capsys, "logs/pipe", terminal=True)[1].startswith("logs/pipe is not a regular file")
    Path("logs").rename("none")
    Path("logs").symlink_to("nowhere")
    assert main(capsys)[1] == "there is no folder logs/; ./run.sh starts a run"


@pytest.mark.parametrize("end, number", [
    ("", 1),
    (GOES_ON.replace("4.0000", "5.0000"), 2),  # as by cat
    (RUN.replace("4.0000", "5.0000"), 2),  # a script that trains twice
    (HEAD.partition("data")[0], 2),
])  # fmt: skip
def test_of_several_runs_in_a_log_the_last_is_shown(log, end, number):
    run = watch.read_run(log(ENDED + end))
    assert (run.count, run.mixed) == (number, False)
    assert ("the last of" in watch.summary(run)[0]) == (number > 1)
    losses = [6, 5, 3] if "5.0000" in end else []
    assert [loss.loss for loss in run.losses] == (losses if end else [6, 4, 3])
    assert bool(run.end) == (number == 1)


def test_lines_of_two_runs_in_turn_are_no_run():
    ahead = losses(*((n, 3, 100 * n) for n in range(60, 200, 10)), steps=200).splitlines()
    behind = losses(*((n, 3, 100 * n) for n in range(10, 150, 10)), steps=200).splitlines()
    in_turn = [line for pair in zip(ahead, behind, strict=True) for line in pair]
    text = watch.summary(watch.parse(EXAMPLE, facts() + "\n".join(in_turn)))
    assert "lines of several runs are mixed: no number here is right" in text
    assert "the last of" not in text[0]


def test_windows_line_ends_repeated_lines_more_fields_and_colors_change_nothing(log):
    right = watch.read_run(log(ENDED))
    source, border, body = ENDED.partition("\ndata ")
    twice = [line for line in f"data {body}".splitlines() for _ in range(2)]
    more = ENDED.replace(" train_time", " lr:0.1 train_time").replace("00ms", "00ms norm:1")
    colors = re.sub("^(step.*)$", "\x1b[01;32m\\1\x1b[m\x1b[K", ENDED, flags=re.M)
    for text in (ENDED.replace("\n", "\r\n"), source + "\n" + "\n".join(twice), more, colors):
        assert watch.read_run(log(text))._replace(age=right.age) == right


# ---- Curve ---------------------------------------------------------------------------------------
def points(values):
    return [watch.Loss("train", 10 * i, value, i) for i, value in enumerate(values)]


def test_the_curve_falls_from_its_top_to_its_bottom():
    lines = watch.curve(points([9, 4, 3.2, 2.4, 1.6, 0.8, float("nan")]))
    assert lines == [
        "   9.000 █",
        "         █",
        "         █",
        "         ██▄▁",
        "   0.800 ████▅▁",
        "         steps 0 to 50",
    ]


def test_a_long_curve_has_means_and_cuts_off_its_beginning():
    lines = watch.curve(points([50, *([2, 4] * 340)]))
    assert max(map(len, lines)) == 9 + 68
    low, high = float(lines[4].split()[0]), float(lines[0].split()[0])
    assert 2.5 < low <= high < 3.5 and lines[-1].endswith("steps 0 to 6800")
    assert watch.curve(points([3])) == [] and len(watch.curve(points([3, 3]))) == 6


def test_lines_fit_80_columns():
    """With the longest names and numbers of the record."""
    lines = losses(*((n, 12.5, 73 * n) for n in range(0, 1280, 10)), steps=1285)
    lines += losses(
        (1250, 3.28, 93000), (1270, 3.28, 94000), (1280, 3.28, 95000), kind="val", steps=1285
    )
    path = Path("logs", EXAMPLE.name)
    devices = 8 * ["NVIDIA H100 80GB HBM3"]
    for end in "", f"RESULT {json.dumps(RESULT | {'steps': 1285})}\n":
        run = watch.parse(EXAMPLE, facts(PRESETS["record"], devices) + lines + end)
        text = watch.summary(run._replace(path=path, age=9))
        assert [line for line in text if len(line) > 80] == [] and len(text) > 8


def test_narrow_and_low_terminals_show_what_is_newest():
    run = watch.parse(EXAMPLE, facts() + RUN)._replace(path=Path("训练" * 30))
    wide = {columns: watch.summary(run, columns, hint="Ctrl-C") for columns in range(100)}
    for columns, lines in wide.items():
        assert all(watch.cut(line, columns) == line for line in lines[1:])
        assert not lines or lines[0].endswith("训练" * 30) or columns < 30
        if columns > 6:
            assert any("3.0000" in line for line in lines)
    assert wide[60][4] == "training loss   by step  10: 4.0000  20: 3.0000"
    assert wide[40][4] == "training loss   by step  20: 3.0000"
    assert wide[30][4] == "training loss 20: 3.0000"
    assert (wide[20][4], wide[8][4]) == ("20: 3.0000", "3.0000")
    whole = watch.summary(run, hint="Ctrl-C")
    for rows in range(20):
        lines = watch.summary(run, rows=rows, hint="Ctrl-C")
        assert len(lines) <= rows and (rows < 2 or "Ctrl-C" in lines)
        assert lines == [line for line in whole if line in lines]
    assert watch.summary(run, 30, 1) == [16 * "█" + " step 20 of 20"]


def test_a_number_is_whole_or_absent_at_every_width():
    slow = [(n, 1234.5678, 12_345_678 * n) for n in range(0, 1280, 90)]
    body = facts(PRESETS["record"]) + losses(*slow, steps=1285)
    for more in "", f"RESULT {json.dumps(RESULT | {'steps': 1285})}\n":
        run = watch.parse(EXAMPLE, body + more, 17)._replace(path=Path("a/log"), age=1e6)
        whole = {*re.findall(r"[\d.,:%]*\d[\d.,:%]*", "\n".join(watch.summary(run)))}
        assert {"277:46:40", "17"} <= whole or more
        for columns in range(100):
            text = "\n".join(watch.summary(run, columns)[:6])  # without the curve
            shown = re.findall(r"[\d.,:%]*\d[\d.,:%]*", text)
            cut = {number for number in shown if number not in whole}
            assert {number + "," for number in cut} <= whole, columns


def test_what_may_be_copied_is_never_cut(capsys, log, script):
    """While it waits for the next run, too; the lines that it takes are cleared."""
    line = "INTERRUPTED by SIGINT after step 20; to resume: ./run.sh tiny --resume logs/" + 99 * "x"
    log(GOES_ON + line)
    left = script(lambda: None)
    text, _ = main(capsys, terminal=True)
    first, second = text.split("\x1b[J")
    shown, _, up = first.rpartition("\x1b[")
    assert left == [] and line in shown.splitlines() and line in second.splitlines()
    extra = watch.height(line, 60) - 1
    assert extra == 2 and up == f"{len(shown.splitlines()) + extra}A"


@pytest.mark.parametrize("text, columns, lines", [
    ("", 5, 1), ("abcde", 5, 1), ("abcdef", 5, 2), ("训练训", 3, 3), ("训练", 4, 1),
])  # fmt: skip
def test_the_height_of_a_text_is_that_on_the_terminal(text, columns, lines):
    assert watch.height(text, columns) == lines


def test_text_is_cut_by_the_columns_that_it_takes():
    for text, columns, right in [
        ("abc", 2, "ab"),
        ("训练", 3, "训"),
        ("e\N{COMBINING ACUTE ACCENT}x", 1, "e\N{COMBINING ACUTE ACCENT}"),
        ("\x1b[2J\n", 9, "?[2J?"),
    ]:
        assert watch.cut(text, columns) == right


# ---- Watching ------------------------------------------------------------------------------------
@pytest.fixture
def script(monkeypatch):
    """Replaces the seconds between two looks by steps of a script; after the last comes Ctrl-C."""

    def replace(*steps):
        left = list(steps)

        def sleep(seconds):
            if not left:
                raise KeyboardInterrupt
            left.pop(0)()

        # Of watch alone: a thread that sleeps elsewhere would take a step, or Ctrl-C.
        monkeypatch.setattr(watch, "time", SimpleNamespace(sleep=sleep, time=time.time))
        return left

    return replace


def test_it_waits_for_a_log_and_follows_it_to_its_end(capsys, log, script):
    old = HEAD + facts() + RUN + f"RESULT {json.dumps(RESULT)}\n"
    head, middle = HEAD + facts(), HEAD + facts() + RUN
    new = "2026-01-02T00-00-00_0.txt"
    left = script(
        lambda: log(old),
        lambda: log("print('the source is being", new),
        lambda: log(head, new),
        lambda: log(middle, new),
        lambda: log(f"{middle}RESULT {json.dumps(RESULT)}\n", new),
    )
    text, status = main(capsys, terminal=True)
    assert status == 0 and left == []
    screens = text.split("\x1b[J")
    assert screens[0] == "Waiting for the next run; Ctrl-C ends this.\n\x1b[1A"
    for screen in screens[1:3]:
        assert "end of schedule" in screen and "Waiting" in screen
    assert "compiled before the first loss" in screens[3] and "Waiting" not in screens[3]
    assert "step 20 of 20" in screens[4] and "end of schedule" not in screens[4]
    assert "end of schedule: validation loss 2.5000 after 20 steps, resumed\n" in screens[5]
    for before in screens[:-1]:
        above = int(before.rpartition("\x1b[")[2].rstrip("A"))
        shown = before.rpartition("\x1b[")[0].splitlines()
        assert above == sum(watch.height(line, 60) for line in shown)


@pytest.mark.parametrize("logs, right", [
    # (name, text, seconds since its last line), ...
    ([("2026-01-01.txt", GOES_ON, 5), ("2026-01-02.txt", ENDED, 90)], "2026-01-01"),  # resumed
    ([("2026-01-01.txt", GOES_ON, 5), ("2026-01-02.txt", ENDED, 1)], "2026-01-01"),
    ([("2026-01-01.txt", GOES_ON, 5), ("2026-01-02.txt", ENDED, -86400)], "2026-01-01"),
    ([("2026-01-01.txt", GOES_ON, 5), ("2026-01-02.txt", GOES_ON, -86400)], "2026-01-01"),
    ([("2026-01-01.txt", GOES_ON, 9e5), ("2026-01-02.txt", ENDED, 9e4)], "2026-01-02"),  # killed
    ([("2026-01-01.txt", ENDED, 99), ("2026-01-02.txt", ENDED, 99)], "2026-01-02"),
    ([("1970-01-01.txt", GOES_ON, 5), ("2026-01-02.txt", "no log", 1)], "1970-01-01"),
    ([("my log.txt", GOES_ON, 5), ("2026-01-02.txt", ENDED, 90)], "my log"),
])  # fmt: skip
def test_the_log_that_is_being_written_is_shown(capsys, log, logs, right):
    now = time.time()
    for name, text, age in logs:
        os.utime(log(text, name), (now - age, now - age))
    Path("logs/nowhere.txt").symlink_to("none")
    Path("logs/folder.txt").mkdir()
    text, status = main(capsys)
    assert text.splitlines()[0].endswith(f", logs/{right}.txt") and status == 0
    assert "-1 day" not in text


def test_it_waits_while_a_log_is_copied(capsys, log, script):
    for named in True, False:
        path = log("")
        arguments = [path] if named else []
        os.utime(log(ENDED, "another.txt"), (1, 1))
        left = script(
            lambda: log(GOES_ON),
            lambda: log(""),
            lambda: log(HEAD[:9]),
            lambda: log(ENDED),
        )
        text, status = main(capsys, *arguments, terminal=True)
        screens = text.split("\x1b[J")
        waits = ["Waiting until the log can be read; Ctrl-C" in screen for screen in screens]
        assert (left, status, waits) == ([], 0, [named, False, True, True, False])
        assert "step 20 of 20" in screens[2] and "end of schedule" in screens[4]
        assert not any("another.txt" in screen for screen in screens[1:])


def test_a_file_that_nobody_writes_is_not_waited_for(capsys, log, script):
    path = log("no log")
    os.utime(path, (1, 1))
    script()
    assert "is not a log" in main(capsys, path, terminal=True)[1]


def test_of_two_runs_that_go_on_the_one_that_is_shown_stays(capsys, log, script):
    first = log(GOES_ON, "1.txt")
    script(lambda: log(GOES_ON, "2.txt"), lambda: log(ENDED, "1.txt"))
    text, _ = main(capsys, terminal=True)
    assert text.count("logs/1.txt") == 2 and text.count("logs/2.txt") == 1 and first.exists()


@pytest.mark.parametrize("redirection, status, message", [
    ("", 141, ""),  # into a pipe that nobody reads, as after `| true`
    (">&-", 0, ""),
    (">/dev/full", 1, "watch: No space left on device: make room, or choose another disk\n"),
])  # fmt: skip
def test_a_closed_or_full_output(log, redirection, status, message):
    reader, pipe = os.pipe()
    os.close(reader)
    command = f"{sys.executable} {ROOT}/run/watch.py {log(ENDED)} {redirection}"
    done = subprocess.run(
        command, shell=True, stdout=pipe, stderr=subprocess.PIPE, text=True, check=False
    )
    os.close(pipe)
    assert (done.returncode, done.stderr) == (status, message)


def test_a_screen_without_blocks(log):
    cut = EXAMPLE.read_text().partition("step:130/")[0]
    command = [sys.executable, f"{ROOT}/run/watch.py", log(cut, "é.txt")]
    env = os.environ | {"PYTHONIOENCODING": "ascii"}
    lines = subprocess.run(command, env=env, capture_output=True, text=True).stdout.splitlines()
    assert lines[0].endswith("logs/?.txt")
    assert lines[1] == 27 * "#" + 13 * "." + " step 120 of 180"


def test_a_finished_log_is_shown_once(capsys, log, script):
    script()
    text, status = main(
        capsys, log(HEAD + facts() + RUN + f"RESULT {json.dumps(RESULT)}\n"), terminal=True
    )
    assert "end of schedule" in text and status == 0


def test_ctrl_c_ends_it_with_status_130(capsys, log, script, monkeypatch):
    """On a terminal that says it has no columns, as those of some containers do."""
    size = os.terminal_size((0, 0))
    monkeypatch.setattr(watch.shutil, "get_terminal_size", lambda *_, **__: size)
    script()
    text, status = main(capsys, log(HEAD + facts() + RUN), terminal=True)
    assert " step 20 of 20\n" in text and status == 130


def test_elsewhere_than_on_a_terminal_it_prints_one_summary(capsys, log, script):
    log(HEAD + facts() + RUN)
    script()
    text, status = main(capsys)
    assert text.count("step 20 of 20") == 1 and status == 0


# ---- Python --------------------------------------------------------------------------------------
def test_it_needs_python_3_8_and_nothing_else():
    tree = ast.parse((ROOT / "run/watch.py").read_text(), feature_version=(3, 8))
    names = [a.name for n in ast.walk(tree) if isinstance(n, ast.Import) for a in n.names]
    names += [n.module for n in ast.walk(tree) if isinstance(n, ast.ImportFrom)]
    names = {name.partition(".")[0] for name in names}
    assert names - sys.stdlib_module_names == {"messages"}
    text = (ROOT / "data/messages.py").read_text()
    tree = ast.parse(text, feature_version=(3, 8))
    names = [a.name for n in ast.walk(tree) if isinstance(n, ast.Import) for a in n.names]
    assert {*names} <= sys.stdlib_module_names
    assert "\nfrom __future__ import annotations\n" in text  # else 3.8 does not read `int | str`
