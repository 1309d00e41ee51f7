"""lab/check_gpu.py: every part of it finds the faults that are planted for it, on a CPU; what it
prints reads as sentences."""

import collections
import dataclasses
import functools
import itertools
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import train_gpt
from lab import check_gpu, predict
from run import plan
from tests.tools import make_mesh
from train_gpt import LONG, SHORT, Layer, Stage

ROOT = Path(__file__).resolve().parent.parent
C = dataclasses.replace(check_gpu.SMALL, attention="band")
STAGES = (
    Stage(200, 1024, short=8, long=16, max_doc=0, lr=1.0, targets=(1.0, (0.5, 0.0))),
    Stage(200, 2048, short=16, long=48, max_doc=0, lr=1.5),
    Stage(0, 2048, short=16, long=64, max_doc=0, lr=1.0),
)
TWO_STAGES = dataclasses.replace(C, stages=STAGES, layers=(Layer(SHORT), Layer(LONG)))
kernel = jax.nn.dot_product_attention
SMI = """#!/bin/sh
case "$*" in
  *--id=1*) sed -n 2p "$0.csv" ;;
  *query*) cat "$0.csv" ;;
  *) printf 'GPU0\\tNV18\\n\\nLegend:\\n  NV# = links\\n' ;;
esac
"""


def passes(part, *arguments) -> dict[str, bool | None]:
    """For each line of a part, whether it passes, by name."""
    return {name: passed for passed, name, *_ in part(*arguments)}


def failed(part, *arguments) -> list[str]:
    """The names of the lines of a part that fail."""
    found = passes(part, *arguments).items()
    return [name for name, passed in found if passed is not None and not passed]


# ---- All of it -----------------------------------------------------------------------------------
def run_check(
    *arguments: str, start: Sequence[str] = ("-m", "lab.check_gpu"), **env: str
) -> tuple[int, list[str], dict]:
    """Runs the check as its users do. Returns its exit status, its lines and the JSON of the last
    but one."""
    done = subprocess.run(
        [sys.executable, *start, *arguments],
        cwd=ROOT, env=os.environ | env, capture_output=True, text=True, timeout=600,
    )  # fmt: skip
    lines = done.stdout.splitlines()
    return done.returncode, lines, json_of(lines)


def json_of(lines: list[str]) -> dict:
    """What the line before the verdict has, if there is one."""
    (line, *_) = [*lines[-2:-1], ""]
    mark, _, facts = line.partition(" ")
    return json.loads(facts) if mark == "CHECK" else {}


@pytest.mark.slow  # the other tests check the parts
def test_all_parts_pass_here_and_leave_a_line_of_json():
    status, lines, facts = run_check("--small", JAX_NUM_CPU_DEVICES="2")
    assert (status, lines[-1][:17], facts["failed"]) == (0, "Everything passes", []), lines
    words = collections.Counter(line[:6] for line in lines)
    assert words["PASS  "] == 11 and "FAIL  " not in words
    names = facts.keys() - {"failed", "argv", "seconds"}
    assert words["PASS  "] + words["INFO  "] == len(names)
    assert len(facts["devices"]) == 2 and facts["predicted training time"] > 0
    assert not [line for line in lines if "n/a" in line or "nan" in line]
    for line in lines:
        if line.startswith("PASS  "):  # the number that was expected stands beside the other
            assert "expected" in line, line


PLANTED = """
import functools, os, sys, time
from lab import check_gpu

def hangs():
    yield True, "before", "text", 2
    time.sleep(100)

def aborts():
    os.abort()
    yield

def good():
    yield True, "after", "text", 3

check_gpu.LIMIT = 20
check_gpu.CHILD = [sys.executable, __file__, "--child"]
check_gpu.make_parts = lambda *_: dict(speed=hangs, head=aborts, tiny=good)
sys.exit(check_gpu.main(sys.argv[1:]))
"""


@pytest.mark.slow  # test_a_part_that_hangs_or_aborts has a child without JAX
def test_a_hang_and_an_abort_show_where_they_are(tmp_path):
    (tmp_path / "planted.py").write_text(PLANTED)
    command = [tmp_path / "planted.py", "--small", "--only", "speed,head,tiny"]
    status, lines, facts = run_check(*map(str, command), start=[], PYTHONPATH=str(ROOT))
    assert status == 1 and facts["failed"] == ["speed", "head"], lines
    assert [facts["before"], facts["after"]] == [2, 3]
    assert [facts["speed"]["end"][:5], facts["head"]["end"]] == ["hangs", "was killed by SIGABRT"]
    for part, function in ("speed", "hangs"), ("head", "aborts"):
        assert any(line.endswith(f" in {function}") for line in facts[part]["output"])


def test_one_part_runs_in_a_process_of_its_own():
    status, lines, facts = run_check("--small", "--only", "machine")
    assert status == 0 and lines[1].startswith("INFO  nvidia-smi lists no GPU")
    assert facts["failed"] == [] and facts["JAX"]["versions"]["jax"] == jax.__version__


CHILD = """
import json, os, sys, time
def send(*message):
    print("\x1e" + json.dumps(message), flush=True)
def good(part):
    send(part, True, f"{part}: good", f"{part} is good", {"two": 2.0})
def hangs(part):
    good(part)
    print("\\x1e[half a message")
    for _ in range(60):
        print("still waiting", flush=True)
        time.sleep(0.5)
def aborts(part):
    print("Check failed: no luck, and no end of line", end="", file=sys.stderr, flush=True)
    os.abort()
def refuses(part):
    print("JAX sees no GPU")
    sys.exit(2)
for part in "JAX", *sys.argv[-1].split(","):
    send(part)
    globals()[PLAN.get(part, "good")](part)
"""


@pytest.fixture
def child(monkeypatch):
    """Lets the parts of main() be those of CHILD; a plan says what each of them does."""
    monkeypatch.setattr(check_gpu, "LIMIT", 2)

    def plan(**parts: str):
        program = f"PLAN = {parts!r}\n{CHILD}"
        monkeypatch.setattr(check_gpu, "CHILD", [sys.executable, "-c", program])

    return plan


def test_a_part_that_hangs_or_aborts_is_named_and_the_others_go_on(child, capfd):
    child(attention="hangs", norms="aborts", devices="aborts")
    began = time.monotonic()
    assert check_gpu.main(["--small", "--only", "speed,attention,head,norms,tiny,devices"]) == 1
    assert time.monotonic() - began < 200
    lines = capfd.readouterr().out.splitlines()
    facts = json_of(lines)
    assert facts["failed"] == ["attention", "norms", "devices"]
    assert facts["attention"]["end"] == "hangs: it has not sent a result for 2 s"
    assert facts["attention"]["output"][:2] == ["[half a message", "still waiting"]
    assert facts["norms"]["end"] == "was killed by SIGABRT"
    assert "FAIL  norms was killed by SIGABRT" in lines
    assert facts["norms"]["output"] == ["Check failed: no luck, and no end of line"]
    for part in "speed", "attention", "head", "tiny":
        assert lines.count(f"PASS  {part} is good") == 1
        assert facts[part + ": good"] == {"two": 2.0}
    assert re.fullmatch(r"FAILED in \d+ s: attention; norms; devices\.", lines[-1])


def test_a_process_that_dies_before_its_parts_is_started_once(child, capfd):
    child(JAX="aborts")
    assert check_gpu.main(["--small"]) == 1
    assert capfd.readouterr().out.count("FAIL  JAX was killed by SIGABRT") == 1


def test_a_reader_who_leaves_gets_no_traceback():
    program = f"{sys.executable} -m lab.check_gpu --small --only machine"
    done = subprocess.run(
        ["bash", "-c", f"{program} | head -n 1; exit ${{PIPESTATUS[0]}}"],
        cwd=ROOT, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (141, "") and done.stdout.count("\n") == 1


def test_the_line_of_json_comes_after_ctrl_c_as_well(child, capfd, monkeypatch):
    child(attention="hangs")
    read_messages = check_gpu.read_messages

    def interrupted(process):
        for message in read_messages(process):
            yield message
            if message[0] == "attention":
                raise KeyboardInterrupt

    monkeypatch.setattr(check_gpu, "read_messages", interrupted)
    assert check_gpu.main(["--small"]) == 1
    facts = json_of(capfd.readouterr().out.splitlines())
    assert facts["failed"] == ["attention"] and facts["speed: good"]


def no_gpu(monkeypatch) -> None:
    """Lets run/machine.py find neither a GPU nor a TPU."""
    monkeypatch.delenv("JAX_PLATFORMS", raising=False)
    nothing = check_gpu.machine.Machine([], why_none="this machine has no NVIDIA GPU and no TPU")
    monkeypatch.setattr(check_gpu.machine, "find_machine", lambda: nothing)


def test_a_machine_without_gpu_is_refused_before_anything_starts(capfd, monkeypatch):
    no_gpu(monkeypatch)
    monkeypatch.setattr(check_gpu, "CHILD", ["no such program"])
    monkeypatch.setenv("JAX_PLATFORMS", "")  # which JAX reads as unset
    for argv in [], ["--full"], ["medium", "--steps", "99"], ["--only", "machine"]:
        with pytest.raises(SystemExit, match="2"):
            check_gpu.main(argv)
        shown = capfd.readouterr()
        assert shown.out == "" and shown.err.count("\n") == 1
        assert "no NVIDIA GPU and no TPU" in shown.err and "./run.sh check --small" in shown.err


def test_what_jax_does_not_find_either_is_one_line(child, capfd, monkeypatch):
    monkeypatch.setenv("JAX_PLATFORMS", "rocm")  # run/machine.py does not know such devices
    child(JAX="refuses")
    assert check_gpu.main([]) == 2 and "CHECK" not in capfd.readouterr().out
    with pytest.raises(SystemExit, match="2"):
        in_this_process(monkeypatch, "speed", small=False)
    assert "./run.sh check --small" in capfd.readouterr().out


def test_it_runs_two_parts_unless_it_is_asked_for_more(child, capfd, monkeypatch):
    monkeypatch.setenv("JAX_PLATFORMS", "cuda,cpu")
    child()
    shown = {}
    for argv in "", "--full", "--only head", "--small":
        assert check_gpu.main(argv.split()) == 0
        lines = capfd.readouterr().out.splitlines()
        shown[argv] = lines[0] + lines[-1]
        expected = {"": ["machine", "speed"], "--only head": ["head"]}.get(argv, check_gpu.PARTS)
        found = [name.removesuffix(": good") for name in json_of(lines) if ": good" in name]
        assert found == ["JAX", *expected]
    assert "two minutes" in shown[""] and "./run.sh check --full also compares" in shown[""]
    assert all(check_gpu.FULL_TAKES in shown[argv] for argv in ("", "--full"))
    assert "minutes" not in shown["--small"] + shown["--only head"]


def test_the_main_page_has_the_same_minutes():
    assert check_gpu.FULL_TAKES in (ROOT / "README.md").read_text()


def test_on_a_cpu_that_is_named_sizes_are_small(monkeypatch):
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    options = check_gpu.parse_arguments([])
    assert options.small and options.parts == [*check_gpu.PARTS]
    assert not check_gpu.parse_arguments(["medium"]).small


@pytest.mark.parametrize(
    "argv, message",
    [
        ("--only speed,sped", "--only: there is no part 'sped'; the parts are machine, speed,"),
        ("--small --batch 16", "--small sets all sizes itself: leave out --batch 16"),
        ("--small medium", "--small sets all sizes itself: leave out medium"),
        ("--batches 16", "there is no flag --batches: did you mean --batch?"),
        ("medium --batches=16", "there is no flag --batches: did you mean --batch?"),
        ("--ful", "there is no flag --ful: did you mean --full?"),
        ("tiny", "check takes no 'tiny', only record or medium"),
        ("--full tiny", "there is no check of 'tiny'; there are those of record, medium"),
    ],
)
def test_what_it_does_not_know_is_one_line(argv, message, capsys):
    with pytest.raises(SystemExit, match="2"):
        check_gpu.main(argv.split())
    shown = capsys.readouterr().err
    assert message in shown and shown.count("\n") == 1


def test_a_preset_and_flags_are_those_of_the_run():
    for preset in check_gpu.LARGE:
        for argv in [preset, "--steps", "99"], [preset, "--only", "head", "--steps", "99"]:
            flags = check_gpu.parse_arguments(argv).flags
            assert flags == [preset, "--steps", "99"]
            run = dataclasses.replace(train_gpt.PRESETS[preset], seed=1, steps=99)
            assert check_gpu.record_with(flags) == (preset, run)
    assert check_gpu.record_with([]) == ("record", check_gpu.RECORD)


def in_this_process(monkeypatch, *names: str, small: bool = True, **parts) -> None:
    """Runs parts as the child does. Each of these `parts` yields one line, or raises an error."""

    def run(outcome):
        if isinstance(outcome, BaseException):
            raise outcome
        yield outcome

    made = {name: functools.partial(run, outcome) for name, outcome in parts.items()}
    monkeypatch.setattr(check_gpu, "make_parts", lambda *_: made)
    monkeypatch.setattr(check_gpu.launch, "leave", sys.exit)
    monkeypatch.setattr(check_gpu.jax.config, "update", lambda *_: None)
    monkeypatch.setattr(check_gpu.faulthandler, "enable", lambda **_: None)
    monkeypatch.setattr(check_gpu.faulthandler, "dump_traceback_later", lambda _: None)
    check_gpu.run_parts([*names], small, [])


GOOD = (True, "good", "all is good", 1)


@pytest.mark.parametrize(
    "second, lines",
    [
        (SystemExit("no luck\nat all"), ["head ended with SystemExit: no luck", "all is good"]),
        (ValueError("no luck"), ["head ended with ValueError: no luck", "all is good"]),
        (jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: 9 GB"), ["head ended with JaxRuntime"]),
        ((np.False_, "bad", "it is bad", 1), ["it is bad", "all is good"]),
    ],
)
def test_a_part_that_breaks_has_failed_and_the_next_one_goes_on(second, lines, monkeypatch, capfd):
    """But not after one for which there was too little memory."""
    with pytest.raises(SystemExit, match="0"):
        in_this_process(monkeypatch, "speed", "head", "tiny", speed=GOOD, head=second, tiny=GOOD)
    sent = [line for line in capfd.readouterr().out.split("\n") if check_gpu.MARK in line]
    messages = [json.loads(line.partition(check_gpu.MARK)[2]) for line in sent]
    assert [part for part, *line in messages if not line][:3] == ["JAX", "speed", "head"]
    shown = [message[3] for message in messages if len(message) > 1]
    assert [text[: len(line)] for text, line in zip(shown[2:], lines, strict=True)] == lines


def test_clocks_are_asked_for_at_the_end(monkeypatch, capfd):
    row = dict(zip(check_gpu.LOAD.split(","), ["1200", "2619", "690", "85", "900"], strict=True))
    monkeypatch.setattr(check_gpu, "ask_smi", lambda fields: 2 * [row])
    with pytest.raises(SystemExit, match="0"):
        in_this_process(monkeypatch, "speed", speed=GOOD)
    last = capfd.readouterr().out.split("\n")[-2]
    _, passes, name, text, facts = json.loads(last.removeprefix(check_gpu.MARK))
    assert (passes, name, facts) == (None, "clocks", [row, row])
    assert text.endswith(": " + "; ".join(2 * ["1200 and 2619 MHz, 690 W, 85 C"]))


def test_gpus_that_are_in_use_are_left_alone(monkeypatch, capfd):
    monkeypatch.setattr(check_gpu, "check_machine", lambda: iter([(False, "machine", "busy", 1)]))
    with pytest.raises(SystemExit, match="0"):
        in_this_process(monkeypatch, "machine", "speed", small=False, speed=GOOD)
    shown = capfd.readouterr().out
    assert '"JAX"' not in shown and "not tried, because" in shown and shown.count(": speed\n") == 1


def test_every_part_has_a_name():
    assert ["machine", *check_gpu.make_parts(C, make_mesh(1), True)] == [*check_gpu.PARTS]


# ---- The machine ---------------------------------------------------------------------------------
@pytest.mark.parametrize(
    "gpus, good, pattern",
    [
        (
            "H100, 580.1, 81559, 4, 700, 1980\n" * 8,
            True,
            r"8 x H100 \(81559 MiB, 700 W, driver 580.1\), with NVLink, not in use by others$",
        ),
        ("H100, 580.1, 81559, 18000, 700, 1980\n", False, "the memory of the GPUs 0: stop"),
        ("GB10, 580.1, [N/A], [N/A], [N/A], 2411\n", True, "1 x GB10"),
        ("H100, 580.1, 81559, 4, 700, 1980\nA100, 580.1, 40960, 4, 400, 1410\n", False, "one kind"),
        ("H100, 580.1, 81559, 4, 700, 1980\nH100, 580.1, 81559, 4, 350, 1980\n", False, "one kind"),
        ("No devices were found\n", None, "lists no GPU"),
        ('Field "name" is not a valid field to query.\n', None, "lists no GPU"),
    ],
)
def test_gpus_must_be_of_one_kind_and_free(monkeypatch, tmp_path, gpus, good, pattern):
    (tmp_path / "nvidia-smi").write_text(SMI)
    (tmp_path / "nvidia-smi").chmod(0o755)
    (tmp_path / "nvidia-smi.csv").write_text(gpus)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    ((passed, _, text, facts),) = check_gpu.check_machine()
    assert passed is good and re.search(pattern, text) and len(facts) == gpus.count("580")
    if len({*gpus.splitlines()}) == 2:  # two kinds: the second GPU alone passes
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
        assert next(check_gpu.check_machine())[0]


H100 = SimpleNamespace(platform="gpu", device_kind="NVIDIA H100 80GB HBM3")
OTHER = SimpleNamespace(platform="gpu", device_kind="NVIDIA L40S")


@pytest.mark.parametrize(
    "device, rates, slow",
    [
        (H100, [2.9, 2.8, 2.9, 2.9], None),
        (H100, [2.9, 2.8, 1.4, 2.9], "2.56 TB/s: device 2 is too slow"),
        (H100, [2.4] * 4, "2.5 TB/s: devices [0, 1, 2, 3] are too slow"),
        (OTHER, [0.8, 0.8, 0.7], "0.72 TB/s: device 2 is too slow"),
        (OTHER, [0.8, 0.8, 0.8], None),
    ],
)
def test_a_slow_card_shows(device, rates, slow):
    passed, _, text, _ = check_gpu.rated("copy, TB/s", [1e12 * rate for rate in rates], device)
    what, _, expected = text.partition(", expected at least ")
    assert passed is (slow is None) and what.startswith("memory: an array is read and written at")
    assert expected == (slow or expected.partition(":")[0])


def test_of_one_device_of_an_unknown_kind_nothing_is_expected():
    cpu = SimpleNamespace(platform="cpu", device_kind="cpu")
    for device, rates, shown in (
        (OTHER, [0.8], "0.8 TB/s"),
        (cpu, [0.004, 0.003], "3 to 4 GB/s on 2 devices"),
    ):
        passed, _, text, _ = check_gpu.rated("copy, TB/s", [1e12 * rate for rate in rates], device)
        assert passed is None and text.endswith(f" at {shown}")


@pytest.mark.parametrize(
    "room, flags, good, text",
    [
        (64.1e9, {}, True, "JAX has 64.1 GB of each device, expected at least 34.5 for record ("),
        (23.2e9, check_gpu.fits.FITS[2][0], True, "at least 20.5 for record with --batch 32 --he"),
        (30e9, {"batch": 8, "head_chunk": 512}, None, "nobody knows what record needs"),
    ],
)
def test_the_room_is_that_of_the_row_of_fits(room, flags, good, text):
    c = dataclasses.replace(check_gpu.RECORD, **flags)
    passed, _, found, _ = check_gpu.room_line("record", c, flags, [int(room)])
    assert passed is good and text in found


def test_seconds_are_those_of_one_call():
    calls = []

    def nap(x):
        calls.append(x)
        time.sleep(x)

    assert 0.01 <= check_gpu.seconds(nap, 0.01) < 0.03
    assert len(calls) == 20


def test_rates_are_of_the_work_that_is_done(monkeypatch):
    """Everything takes a second, so that a rate is the amount of work."""
    shapes = []

    def one_second(run, *arrays):
        shapes.append([array.shape for array in arrays])
        return 1

    monkeypatch.setattr(check_gpu, "seconds", one_second)
    found = {
        name: rates for _, name, _, rates in check_gpu.check_speed(C, make_mesh(4), 8192 // 64)
    }
    assert [*found] == [*check_gpu.FLOORS, "links, TB/s"]
    n = 128
    V = 384
    work = [4 * 8 * n * n, 2 * n**3, 2 * C.head_chunk * V * C.D, 12 * n * n]
    for rates, amount in zip(found.values(), work, strict=False):
        np.testing.assert_allclose(rates, amount / 1e12, rtol=0.01)
    np.testing.assert_allclose(found["links, TB/s"], 4 * [8 * n * n / 1e12], rtol=0.01)
    assert shapes[0] == [(8 * n * n,)] and shapes[8] == [(C.head_chunk, C.D), (V, C.D)]


# ---- Prediction ----------------------------------------------------------------------------------
T = 1e12
ASSUMED = predict.Rates(600 * T, 900 * T, 2.75 * T, 0.35 * T)  # by lab/h100/estimate.py


@pytest.mark.parametrize("preset, seconds", [("record", 92.71), ("medium", 1254.1)])
def test_at_the_assumed_rates_the_prediction_is_the_estimate_of_the_page(preset, seconds):
    """The last row of medium's page; of the record's, the means by stage times its steps."""
    c = train_gpt.PRESETS[preset]
    parts = predict.training_seconds(c, 8, ASSUMED)
    assert sum(parts.values()) == pytest.approx(seconds, rel=1e-3)
    half = predict.training_seconds(dataclasses.replace(c, steps=c.total_steps // 2), 8, ASSUMED)
    assert sum(half.values()) == pytest.approx(seconds / 2, rel=0.02)


@pytest.mark.parametrize(
    "name, rates, fp8",
    [
        ("H100 80GB HBM3", ASSUMED, True),
        ("A100", predict.Rates(250 * T, 250 * T, 1.75 * T, 0), False),
        ("RTX 4090", predict.Rates(160 * T, 300 * T, 0.92 * T, 0), True),
    ],
)
def test_one_device_takes_as_long_as_the_plan_says(name, rates, fp8):
    """By the rates that such GPUs are known to reach."""
    c = check_gpu.RECORD if fp8 else check_gpu.RECORD.without_fp8()
    minutes = sum(predict.training_seconds(c, 1, rates).values()) / 60
    least, most = plan.TRAINING["record"][name]
    assert minutes <= most and predict.SLOWER * minutes >= least


def test_each_rate_changes_its_own_part():
    usual = predict.training_seconds(check_gpu.RECORD, 8, ASSUMED)
    changed = {"product": ["products", "attention"], "head": ["head"], "memory": ["other kernels"]}
    for rate, parts in changed.items():
        slower = ASSUMED._replace(**{rate: getattr(ASSUMED, rate) / 2})
        found = predict.training_seconds(check_gpu.RECORD, 8, slower)
        for part, seconds in usual.items():
            assert found[part] == pytest.approx(seconds * (1 + (part in parts)))


def test_slow_links_decide_how_long_a_step_takes():
    """The first and the second step of stage 3 send 0.936 and 1.409 GB."""
    c = check_gpu.RECORD
    for devices, sent in (8, 1.409), (2, 1.409 * 4 / 7):
        work = predict.work_of_steps("record")[3, "second"]
        slow = ASSUMED._replace(links=1e9)
        parts = predict.step_seconds(c, work, c.stages[3].tokens, devices, slow)
        assert sum(parts.values()) == pytest.approx(sent, rel=1e-3)
    assert "links" not in predict.step_seconds(c, work, c.stages[3].tokens, 1, ASSUMED)


def test_the_rates_of_a_gpu_end_with_a_prediction(monkeypatch):
    n = 1024
    c = check_gpu.RECORD
    head = 2 * c.head_chunk * train_gpt.padded_vocab(c) * c.D
    works = zip((32 * n * n, 2 * n**3, head), (2.75 * T, 600 * T, 900 * T), strict=True)
    times = iter([work / rate for work, rate in works])
    monkeypatch.setattr(check_gpu, "normal", lambda *_, **__: None)
    monkeypatch.setattr(check_gpu, "seconds", lambda *_: next(times))
    monkeypatch.setattr(check_gpu.jax, "device_put", lambda arrays, _: arrays)
    mesh = SimpleNamespace(devices=np.array([H100]))
    *rates, prediction = check_gpu.check_speed(c, mesh, n)
    assert [line[0] for line in rates] == [True, True, True]
    assert rates[1][2].endswith(" multiplied at 600 TFLOP/s, expected at least 500 TFLOP/s")
    assert "12 to 15 minutes on 1 device" in prediction[2]


def test_the_prediction_says_what_it_is():
    passed, _, text, _ = check_gpu.predicted_line(check_gpu.RECORD, 8, ASSUMED)
    assert passed is None and "validation loss 3.28: 90 to 115 s on 8 devices" in text
    assert text.endswith("no step was timed")
    short = dataclasses.replace(check_gpu.RECORD, steps=100)
    assert "the end of its 100 steps: " in check_gpu.predicted_line(short, 8, ASSUMED)[2]
    assert predict.interval(1263.2) == "21 to 26 minutes"
    *_, text, parts = check_gpu.predicted_line(C, 8, ASSUMED)
    assert parts is None and "no time is predicted" in text


# ---- Values --------------------------------------------------------------------------------------
def changed(left=0, right=0, **changes):
    """Attention with other options, and with a window that reaches further by left and right."""

    def attend(q, k, v, window, scale, c):
        options = dict(is_causal=True, local_window_size=(window + left, right), scale=scale)
        return kernel(q, k, v, implementation="xla", **options | changes)

    return attend


right = changed()


def spoiled(forward=lambda y: y, backward=lambda *grads: grads):
    """Attention with a fault in its output or in its gradients."""

    def attend(*qkv_and_options):
        qkv = qkv_and_options[:3]
        options = qkv_and_options[3:]

        def residuals(*qkv):
            return jax.vjp(lambda *qkv: right(*qkv, *options), *qkv)[1]

        wrong = jax.custom_vjp(lambda *qkv: forward(right(*qkv, *options)))
        wrong.defvjp(
            lambda *qkv: (wrong(*qkv), residuals(*qkv)),
            lambda pull, g: backward(*pull(g)),
        )
        return wrong(*qkv)

    return attend


def late(q, k, v, window, scale, c):
    """Attention that is wrong from the 200th token on, which no short sequence shows."""
    late_ones = changed(scale=0.2)(q, k, v, window, scale, c)
    first_ones = right(q, k, v, window, scale, c)
    return jnp.where(jnp.arange(q.shape[1])[:, None, None] < 200, first_ones, late_ones)


ATTENTION = dict(
    late=late, one_key_less=changed(left=-1), sees_the_future=changed(right=1, is_causal=False),
    no_documents=lambda q, *others: right(q.at[..., -4:].set(0), *others),
    not_a_number=spoiled(lambda y: y.at[0, -9, 1, 5].set(jnp.nan)),
    wrong_dk=spoiled(backward=lambda dq, dk, dv: (dq, 1.05 * dk, dv)),
)  # fmt: skip


@pytest.mark.parametrize("fault", [None, *ATTENTION])
def test_a_wrong_attention_fails(monkeypatch, fault):
    if fault:
        monkeypatch.setattr(train_gpt, "attend", ATTENTION[fault])
    passed, name, _, _ = check_gpu.attention_line(TWO_STAGES, 256, TWO_STAGES.H, True)
    assert passed is (fault is None) and name.startswith("attention over 256 tokens")


@pytest.mark.parametrize("ms, fast", [((1, 3.1), True), ((3, 3), False)])
def test_a_kernel_that_leaves_nothing_out_fails_on_gpus(monkeypatch, ms, fast):
    times = iter(ms)
    monkeypatch.setattr(check_gpu, "seconds", lambda *_: next(times))
    cudnn = dataclasses.replace(C, attention="cudnn")
    assert check_gpu.window_line(cudnn, C.sequence_length(0))[0] is fast


def test_attention_is_checked_at_all_lengths(monkeypatch):
    """In validation, half as many heads have twice as many positions: [paired-heads]."""
    checked = []

    def line(c, T, heads, trained):
        checked.append((T, heads, trained))
        return check_gpu.compare("", 1.0, jnp.sin, jnp.sin, jnp.ones(2), trained=False)

    monkeypatch.setattr(check_gpu, "attention_line", line)
    assert failed(check_gpu.check_attention, C) == []
    assert checked == [(128, 2, True), (C.val_T, 2, False), (2 * C.val_T, 1, False)]
    monkeypatch.undo()
    passed, name, *_ = check_gpu.attention_line(C, 1024, 1, False)
    assert passed and name == "attention over 1,024 tokens in 137 documents"


def wrong(name, place, change):
    """A function of train_gpt.py that changes its argument at this place."""
    right = getattr(train_gpt, name)

    def wrong_function(*arguments):
        arguments = [*arguments]
        arguments[place] = change(arguments[place])
        return right(*arguments)

    return wrong_function


GRADIENTS = {
    "the head in float8_e4m3fn": ("head_loss", wrong("head_loss", 1, lambda w: 1.2 * w)),
    "norm and product, with the radial gradient from x,": (
        "norm_linear",
        wrong("norm_linear", 0, lambda x: x + 0.05),
    ),
    "norm and rotation": ("norm_rotate", wrong("norm_rotate", 1, lambda cos: cos.at[9:].set(1))),
}


@pytest.mark.parametrize("name", GRADIENTS)
def test_a_wrong_value_fails(monkeypatch, name):
    monkeypatch.setattr(train_gpt, *GRADIENTS[name])
    part = check_gpu.check_head if "head" in name else check_gpu.check_norms
    assert name in failed(part, C)


@pytest.mark.parametrize(
    "backward, name",
    [("head_loss", "the head in float8_e4m3fn"),
     ("norm_linear", "norm and product, with the radial gradient from y,"),
     ("norm_rotate", "norm and rotation")],
)  # fmt: skip
def test_a_wrong_gradient_fails(monkeypatch, backward, name):
    """The value is right, and only the gradient is larger by a fifth."""
    right = getattr(train_gpt, backward)
    more = jax.custom_vjp(lambda x: x)
    more.defvjp(lambda x: (x, None), lambda _, g: (1.2 * g,))
    monkeypatch.setattr(train_gpt, backward, lambda x, *rest: right(more(x), *rest))
    part = check_gpu.check_head if backward == "head_loss" else check_gpu.check_norms
    assert name in failed(part, C)


# ---- Training ------------------------------------------------------------------------------------
@pytest.mark.parametrize("preset, cycle", [("record", [False, True]), ("tiny", [True])])
def test_cycles_have_all_programs_of_a_stage(preset, cycle):
    c = train_gpt.PRESETS[preset]
    assert check_gpu.cycle(c) == cycle
    programs = {(c.stage_at(step), c.is_adam_step(step)) for step in range(c.total_steps)}
    stages = {stage for stage, _ in programs}
    assert programs == set(itertools.product(stages, cycle))


@pytest.mark.slow
def test_tiny_on_several_devices_must_be_that_of_one(monkeypatch):
    c = dataclasses.replace(C, layers=(Layer(LONG),), D=32, F=32, R=0, adam_every=1)
    train_batches = train_gpt.train_batches

    def wrong_batches(c, mesh, shards, start):
        """On two devices, the last sequence is replaced by the first one."""
        for tokens, row in train_batches(c, mesh, shards, start):
            wrong = np.array(tokens)
            if mesh.size == 2:
                wrong[-1] = wrong[0]
            yield jax.device_put(wrong, tokens.sharding), row

    monkeypatch.setattr(train_gpt, "train_batches", wrong_batches)
    expected = {"tiny, 1 cpu": True, "tiny, 2 cpu": False}
    assert passes(check_gpu.check_tiny, c, make_mesh(2)) == expected


class Loss(float):
    """A loss, whose program may be running until somebody waits for it."""

    waited = False

    def block_until_ready(self):
        self.waited = True


def fake_programs(stage: int, losses, checks=lambda tokens, row: None) -> list:
    """Programs that take no time: they return these losses in turn, and then the last of them."""

    def program(state, tokens, row):
        assert tokens.shape == (8, TWO_STAGES.sequence_length(stage) + 1)
        assert 0 <= tokens.min() < tokens.max() < C.vocab and row.momentum == np.float32(0.85)
        assert len(row.loss_weights) == len(train_gpt.target_weights(STAGES[stage]))
        checks(tokens, row)
        return state + 1, losses[min(state, len(losses) - 1)]

    return [program, program]


@pytest.fixture
def no_state(monkeypatch):
    """A state is the number of steps that it has had."""
    monkeypatch.setattr(train_gpt, "make_state", lambda *_: 0)


def test_each_step_has_other_tokens_and_the_devices_are_never_without_work(no_state):
    seen = []
    losses = [Loss(n) for n in range(9)]

    def keep(tokens, row):
        seen.append(np.asarray(tokens))
        running = sum(not loss.waited for loss in losses[: len(seen)])
        assert running == min(len(seen), 3)  # this step, which starts, and the two before it

    found, ms = check_gpu.train_steps(
        fake_programs(1, losses, keep), TWO_STAGES, 1, make_mesh(2), steps=9
    )
    assert found.tolist() == list(range(9)) and len(ms) == 8 and ms.min() >= 0
    for i, tokens in enumerate(seen):
        same = [j for j, other in enumerate(seen) if np.array_equal(tokens, other)]
        assert same == [j for j in range(9) if j % 4 == i % 4]


def test_steps_go_on_for_some_seconds(no_state):
    programs = fake_programs(0, [1.0])
    began = time.monotonic()
    losses, ms = check_gpu.train_steps(programs, TWO_STAGES, 0, make_mesh(1), steps=3, least=0.1)
    assert time.monotonic() - began > 0.1 and len(losses) == len(ms) + 1 > 4


def test_steps_do_not_learn_where_the_weights_stay():
    c = dataclasses.replace(C, layers=(Layer(LONG),), muon_lr=0.0, adam_lr=0.0)
    programs = [train_gpt.compile_train_step(0, True, c, make_mesh(1))]
    losses, _ = check_gpu.train_steps(programs, c, 0, make_mesh(1), steps=5)
    assert not check_gpu.learns(losses)


@pytest.fixture
def fake_record(monkeypatch, no_state):
    """Lets check_record() have programs with these losses."""

    def make(losses):
        memory = SimpleNamespace(argument_size_in_bytes=2e9, temp_size_in_bytes=1e9)
        programs = {(1, "val"): None}
        for stage in 0, 1:
            for step, program in enumerate(fake_programs(stage, losses)):
                program.memory_analysis = lambda: memory
                programs[stage, TWO_STAGES.is_adam_step(step)] = program

        def compile_all(c, mesh, log):
            log.facts({"compile": {"seconds": 3.0}})
            return programs

        monkeypatch.setattr(train_gpt, "compile_all", compile_all)
        monkeypatch.setattr(train_gpt, "warm_up", lambda *_: None)

    return make


def test_the_time_of_the_run_is_that_of_its_stages(monkeypatch, fake_record):
    def train_steps(programs, c, stage, mesh, least):
        assert least == (30 if stage == 1 else 0)
        warm_up = check_gpu.WARM_UP * [1e6]
        return np.array([5.0, 4.0]), np.array([*warm_up, *(100.0 * (stage + 1) for _ in range(9))])

    fake_record([5.0, 4.0])
    monkeypatch.setattr(check_gpu, "train_steps", train_steps)
    monkeypatch.setitem(check_gpu.watch.PEAKS, "cpu", 989)
    first = dataclasses.replace(STAGES[0], steps=300)
    c = dataclasses.replace(TWO_STAGES, stages=(first, *STAGES[1:]))
    lines = {name: facts for _, name, _, facts in check_gpu.check_record(c, make_mesh(2), 30)}
    assert lines["predicted training time"] == pytest.approx(300 * 0.1 + 200 * 0.2)
    names = ["stage 0", "stage 1", "memory", "predicted training time"]
    assert [*lines][1:] == names
    # Per token: 6 for every weight, which are 4 D D + 2 D F in each of two layers and 384 D in the
    # head; and 12 D for every key in the windows of 8 and 16.
    work = 6 * (2 * (4 * 64**2 + 2 * 64 * 128) + 384 * 64) + 12 * 64 * (8 + 16)
    assert lines["stage 0"] == pytest.approx([100, 10_240, 10_240 * work / 989e12 / 2])


@pytest.mark.parametrize("losses", [(5.0, 4.9), (5.0, float("nan")), (float("nan"), 4.0)])
def test_a_stage_that_does_not_learn_fails(fake_record, losses):
    fake_record(losses)
    expected = ["stage 0", "stage 1", "predicted training time"]
    assert failed(check_gpu.check_record, TWO_STAGES, make_mesh(2), 0) == expected


@pytest.mark.parametrize(
    "ms, steady, text",
    [
        ([100] * 300, True, "stage 2 keeps its speed for 30 s: of 300 steps, the first 100 take"),
        (
            [100] * 150 + [112] * 150,
            False,
            " 112.00 ms, expected below 110.00; then the first GPU had 1200 and 2619 MHz, 690 W",
        ),
        ([900] * 20 + [905] * 21, True, "the first 20 take 900.00 ms each and the last 20 905.00"),
    ],
)
def test_a_gpu_that_gets_slower_shows(ms, steady, text):
    row = zip(check_gpu.LOAD.split(","), ["1200", "2619", "690", "85", "900"], strict=True)
    passed, _, found, _ = check_gpu.steady_line(2, np.array(ms), [dict(row)])
    assert passed is steady and text in found


# ---- One device and several ----------------------------------------------------------------------
@pytest.mark.parametrize(
    "losses, good, text",
    [
        ({1: [11.0, 10.9], 2: [11.0, 10.901]}, True, "difference 0.001"),
        ({1: [11.0, 10.9], 2: [11.0, 10.95]}, False, "difference 0.05"),
        ({1: [11.0, 10.9], 2: [11.0, np.nan]}, False, "difference nan"),
        ({1: jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED")}, None, "too little memory"),
    ],
)
def test_several_devices_must_have_the_losses_of_one(monkeypatch, losses, good, text):
    def train_steps(programs, c, stage, mesh, steps):
        found = losses[mesh.size]
        if isinstance(found, BaseException):
            raise found
        return np.array(found), None

    monkeypatch.setattr(check_gpu, "compile_cycle", lambda *_: None)
    monkeypatch.setattr(check_gpu, "train_steps", train_steps)
    ((passed, _, found, _),) = check_gpu.check_devices(C, make_mesh(2))
    assert passed in (good, np.bool_(good)) and text in found
    ((passed, _, found, _),) = check_gpu.check_devices(C, make_mesh(1))
    assert passed is None and found == "there is one device, so none can be compared with it"


# ---- Software ------------------------------------------------------------------------------------
MAPS = """7f1a-7f1b r--p 0 08:01 11 /venv/nvidia/cudnn/lib/libcudnn_graph.so.9
7f1b-7f1c r-xp 0 08:01 12 /venv/nvidia/cudnn/lib/libcudnn.so.9
7f1c-7f1d rw-p 0 00:00 0 [heap]
"""


def test_versions_are_those_of_the_libraries_that_are_loaded(tmp_path, monkeypatch):
    (tmp_path / "maps").write_text(MAPS)
    found = check_gpu.loaded_library("cudnn", tmp_path / "maps")
    assert found == "/venv/nvidia/cudnn/lib/libcudnn.so.9"
    assert check_gpu.loaded_library("nccl", tmp_path / "maps") == ""
    assert check_gpu.loaded_library("nccl", tmp_path / "no_maps") == ""

    class Library:
        def __init__(self, path):
            self.path = path

        def __getitem__(self, name):
            def function(pointer=None):
                if pointer is None:
                    return 92801
                pointer._obj.value = 23203

            return function

    monkeypatch.setattr(check_gpu.ctypes, "CDLL", Library)
    monkeypatch.setattr(check_gpu, "loaded_library", lambda name: "" if name == "cudart" else name)
    assert check_gpu.library_versions() == {"nccl": 23203, "cudnn": 92801, "cublasLt": 92801}
