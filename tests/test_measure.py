"""records/h200/measure.py at small sizes on the CPU: all that it writes, and what stops it."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import train_gpt

SCRIPT = Path(train_gpt.__file__).parent / "records" / "h200" / "measure.py"
# What a script must have to be patched as upstream's is; 2 ms a step for a token of the window.
FAKE = """
class torch:
    class _inductor:
        class config: pass
    class cuda:
        synchronize = lambda: waited.append(step)
#torch._inductor.config.coordinate_descent_tuning = True # slow
class args:
    num_iterations = 1770 # number of steps
    val_loss_every = 125
world_size, waited, training_time_ms = 1, [], 0
assert world_size == 8 # GPUs
for step in range(args.num_iterations):
    last_step = False
    window_size = next_multiple_of_n(1728 * step / args.num_iterations, n=128)
    if last_step or (args.val_loss_every > 0 and step % args.val_loss_every == 0):
        raise SystemExit("this is the validation")
    approx_time = training_time_ms + 2 * window_size
    training_time_ms = approx_time
    print(f"step:{step+1}/{args.num_iterations} train_time:{approx_time:.0f}ms step_avg:nanms")
assert waited == list(range(9, args.num_iterations, 10))
assert torch._inductor.config.coordinate_descent_tuning is False
print("peak memory allocated: 123 MiB reserved: 456 MiB")
"""


@pytest.fixture(scope="module")
def measure():
    spec = importlib.util.spec_from_file_location("measure", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def rows_of(out: Path) -> list[dict]:
    return [json.loads(line) for line in (out / "measure.jsonl").read_text().splitlines()]


# ---- All of it -----------------------------------------------------------------------------------
def test_everything(tmp_path):
    upstream, out = tmp_path / "upstream.txt", tmp_path / "out"
    upstream.write_text(FAKE + "\n" + "=" * 100 + "\nthe log of a run\n")
    command = [sys.executable, SCRIPT, "--small", "--out", out, "--upstream", upstream]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=clean())
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr
    rows = rows_of(out)
    assert rows[0]["table"] == "machine" and len(rows[0]["sha256"]["train_gpt.py"]) == 64
    found = {(row["part"], row["table"]) for row in rows}
    parts = ["machine", "correctness", "kernels", "tokens", "step", "profile", "one"]
    assert {(part, "end") for part in [*parts, "side_by_side"]} <= found
    assert not [row for row in rows if row["table"] in ("failed", "skipped")]
    check_tables(rows, found)
    summary = (out / "summary.txt").read_text()
    assert "== kernels: attention\nwindow  forward_ms" in summary and summary in done.stdout
    assert (out / "log.txt").stat().st_size and list(out.glob("trace_*.json.gz"))
    assert "step:80/80" in (out / "upstream.txt").read_text()


def check_tables(rows: list[dict], found: set[tuple]) -> None:
    judged = [row for row in rows if "ok" in row]
    assert len(judged) == 10 + 3 + 3 + 2 and all(row["ok"] for row in judged)
    kernels = ("ceilings", "attention", "verdict", "head", "newton_schulz", "elementwise")
    assert {("kernels", table) for table in kernels} <= found
    for row in rows:
        if row["part"] in ("step", "one") and row["table"] == "step":
            assert row["ms_min"] <= row["ms"] <= row["ms_max"] and row["peak_GB"] > 0
    assert [r["sequences"] for r in rows if r["table"] == "step"] == [8, 8, 1, 1]
    (compiled,) = [r for r in rows if r["part"] == "step" and "cold_s" in r]
    assert compiled["from_cache"] and compiled["again_s"] < compiled["cold_s"]
    sides = {row["window"]: row for row in rows if row["table"] == "side_by_side"}
    assert {window: row["upstream_ms"] for window, row in sides.items()} == {32: 64, 64: 128}
    assert all(row["speed_ratio"] > 0 for row in sides.values())


def clean() -> dict[str, str]:
    """One device: the tests' own process has eight."""
    return {k: v for k, v in os.environ.items() if k not in ("XLA_FLAGS", "JAX_NUM_CPU_DEVICES")}


# ---- What stops it -------------------------------------------------------------------------------
@pytest.fixture
def run(measure, monkeypatch, tmp_path):
    """main, with its parts in this process."""

    def in_process(part, argv, out, work, deadline):
        own = ["--child", part, "--work", work, "--deadline", str(deadline)]
        return measure.main([*argv, *own])

    monkeypatch.setattr(measure, "run_part", in_process)
    monkeypatch.setattr(measure, "use_cache", lambda *_: None)
    return lambda *argv: (measure.main(["--small", "--out", str(tmp_path), *argv]), tmp_path)


def blind(first, *rest, real=train_gpt.place):
    return real(first & False, *rest)


def wide(q, k, v, window, kernel, real=train_gpt.attend):
    return real(q, k, v, window + 1, kernel)


@pytest.mark.parametrize("name, wrong", [("place", blind), ("attend", wide)])
def test_wrong_attention_ends_it(measure, run, monkeypatch, name, wrong):
    sizes = measure.sizes(True)
    sizes.windows = (96,)
    monkeypatch.setattr(measure, "sizes", lambda small: sizes)
    monkeypatch.setattr(train_gpt, name, wrong)
    status, out = run("--parts", "correctness,kernels")
    rows = rows_of(out)
    assert status == 2 and {row["part"] for row in rows} == {"machine", "correctness"}
    assert {row["table"] for row in rows[2:]} == {"attention", "end"}
    assert [row for row in rows if row.get("ok") is False]


def test_a_part_that_raises_stops_no_other(measure, run, monkeypatch):
    def broken(log, args, z):
        log.attempt("one thing", lambda: 1 / 0)
        log.row("after", fine=True)
        raise RuntimeError("planted")

    monkeypatch.setitem(measure.PARTS, "kernels", broken)
    status, out = run("--parts", "kernels,tokens")
    rows = rows_of(out)
    assert status == 1 and rows[-1]["part"] == "tokens" and rows[-1]["table"] == "end"
    failed = [row for row in rows if row["table"] == "failed"]
    assert ["ZeroDivisionError" in failed[0]["error"], "planted" in failed[1]["error"]] == [
        True
    ] * 2
    assert "planted" in failed[1]["traceback"] and {"fine": True}.items() <= rows[-5].items()


def test_short_of_time_it_says_so(run):
    status, out = run("--parts", "kernels", "--budget", "5")
    assert status == 1
    assert {row["table"] for row in rows_of(out)} == {"skipped"}


def test_a_changed_upstream_is_refused_by_name(measure):
    assert "synchronize()\n    approx_time" in measure.patched(FAKE, [32, 64])
    for name, line in {
        "number of steps": "num_iterations = 1770",
        "fixed windows": "window_size = next",
        "no validation": "if last_step or",
    }.items():
        with pytest.raises(ValueError, match=name):
            measure.patched(FAKE.replace(line, "pass"), [32, 64])
