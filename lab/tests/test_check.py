"""lab/check.py: its parts pass on a CPU and notice faults that are planted for them; a wrong kernel
is not to be used."""

import dataclasses
import itertools
import json
import math
import sys

import jax
import pytest

import train_gpt
from lab import check, check_kernels
from lab.check_kernels import ATTEMPTS

C = dataclasses.replace(check.SMALL, attention="band")
GOOD = {
    "errors": {"result": (0.01, 0.004), "dx": (0.005, 0.006)}, "limits": (0.02, 0.01),
    "result_limit": math.inf,
    "ms": 4.0, "xla_ms": 5.0, "cublas_ms": 3.5, "tflops": 400.0, "share": 0.4,
}  # fmt: skip


def test_the_parts_pass_here_and_leave_a_line_of_json(capsys, monkeypatch):
    monkeypatch.setattr(check.faulthandler, "dump_traceback_later", lambda *_, **__: None)
    monkeypatch.setattr(check.launch, "start_jax", lambda: None)
    monkeypatch.setattr(check.launch, "set_compilation_cache", lambda: None)
    monkeypatch.setattr(jax.config, "update", lambda *_: None)
    assert check.main(["--small"]) == 0
    *lines, last = capsys.readouterr().out.splitlines()
    assert [line[:4] for line in lines].count("PASS") == 5 and "FAIL" not in "".join(lines)
    facts = json.loads(last.removeprefix("CHECK "))
    assert facts["failed"] == [] and facts["devices"] == 8 and len(facts[check.COPY]) == 8


@pytest.mark.parametrize("argv, text", [
    (["--only", "sped"], "there is no part 'sped'"),
    (["--small", "medium"], "--small sets all sizes itself"),
    (["tiny"], "there is no check of 'tiny'"),
    ([], "JAX sees neither a GPU nor a TPU to check"),
])  # fmt: skip
def test_what_cannot_be_checked_is_one_line(argv, text, capsys):
    with pytest.raises(SystemExit, match="2"):
        check.main(argv)
    shown = capsys.readouterr()
    assert text in shown.err and shown.err.count("\n") == 1 and shown.out == ""


def test_an_attention_without_its_window_and_a_wrong_softmax_show(monkeypatch):
    attend = train_gpt.attend
    exp = train_gpt.exp_of_tokens
    factors = itertools.cycle([1, 0.7])  # of the sum, and of the gradient

    def widened(q, k, v, window, scale, c):
        return attend(q, k, v, window if c.compute == "float32" else 2 * window, scale, c)

    monkeypatch.setattr(train_gpt, "attend", widened)

    def weaker(s, c):
        return exp(s, c) * (1 if c.compute == "float32" else next(factors))

    monkeypatch.setattr(train_gpt, "exp_of_tokens", weaker)
    for name, subject, limits in (
        ("attention", check_kernels.attention_subject, (0.02, 0.05)),
        ("head", check_kernels.head_subject, (0.01, 0.15)),
    ):
        (line,) = check.check_function(C, name, subject, limits)
        assert line.passes is False and "differs from float32" in line.text, line


def test_the_time_follows_the_rates_and_the_number_of_devices():
    record = train_gpt.PRESETS["record"]
    assumed = check.estimate
    rates = {check.PRODUCT: assumed.BFLOAT16, check.COPY: assumed.MEMORY}
    rates |= {check.GATHER: assumed.LINKS}
    eight = check.predicted(record, 8, rates)
    assert 92 < eight.fact < 94 and "93 to 111 s on 8 devices" in eight.text  # the page's sum
    slower = check.predicted(record, 8, rates | {check.PRODUCT: assumed.BFLOAT16 / 2})
    one = check.predicted(record, 1, rates)
    assert slower.fact > 1.5 * eight.fact and 7 < one.fact / eight.fact < 8
    assert check.predicted(dataclasses.replace(record, F=1024), 8, rates).fact is None


# ---- Kernels -------------------------------------------------------------------------------------
@pytest.mark.parametrize("changes, passes, text", [
    ({}, True, "x is right and faster: 4 ms (400 TFLOP/s, 40% of the bfloat16 peak), by XLA 5 ms"),
    ({"ms": 5.0}, None, "x is right, but slower: 5 ms"),
    ({"errors": {"dw": (math.nan, math.nan)}}, False, "x is wrong: dw by nan %"),
    ({"result_limit": 0.001}, False, "x is wrong: result by 1 % (rms 0.4 %)"),
])  # fmt: skip
def test_a_kernel_must_be_right_and_faster(changes, passes, text):
    found = check_kernels.judged("x", GOOD | changes, False)
    assert found[0] is passes and text in found[1]


@pytest.mark.parametrize("name", ATTEMPTS)
def test_the_products_of_kernels_are_counted(name):
    """In the copy that has only XLA, train_gpt.py itself. Without attention's scores, there are two
    operations for a weight in the forward pass and four in the backward pass."""
    c = dataclasses.replace(check_kernels.SMALL, attention="band")
    subject = ATTEMPTS[name].subject(c, 0, *ATTEMPTS[name].fields.values())
    arrays = [*subject.arrays.values()]
    y = jax.eval_shape(lambda *arrays: subject.run(train_gpt, c, *arrays), *arrays)
    run = check_kernels.with_gradients(subject, train_gpt, c)
    found, *gradients = jax.eval_shape(run, y, *arrays)
    assert [g.shape for g in gradients] == [x.shape for x in arrays] and found.shape == y.shape
    weights = sum(x.size for name, x in subject.arrays.items() if name != "x")
    products = sum(2 * M * N * K for M, N, K, *_ in subject.products)
    assert products == 6 * weights * c.sequence_length(0)


CHILD = """
import json, os, sys
name, use = sys.argv[sys.argv.index("--attempt") + 1], sys.argv[sys.argv.index("--use") + 1]
if name == "fused_head":
    os.abort()
print(f"PASS  {name}")
print("CHECK", json.dumps({name: {"verdict": "use it", "use": use}, "failed": []}))
"""


def test_a_kernel_that_aborts_stops_nothing_else(monkeypatch, tmp_path, capfd):
    run = check_kernels.subprocess.run
    monkeypatch.setattr(check_kernels, "FILE", tmp_path / "logs/kernels.json")
    monkeypatch.setattr(
        check_kernels.subprocess,
        "run",
        lambda command, **options: run([sys.executable, "-c", CHILD, *command[3:]], **options),
    )
    assert check_kernels.check_all([], is_small=False) == 1
    facts = json.loads(check_kernels.FILE.read_text())
    assert facts["failed"] == [name for name in ATTEMPTS if name == "fused_head"]
    assert facts[check_kernels.STEPS]["use"] == "fused_mlp,fused_qkv"  # none with flags
    assert "FAIL  fused_head ended with exit status -6" in capfd.readouterr().out
