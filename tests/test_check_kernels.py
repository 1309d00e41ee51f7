"""lab/check_kernels.py: a wrong kernel is not to be used, nor is a slow one, and what breaks stops
nothing else."""

import dataclasses
import itertools
import json
import math
import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import train_gpt
from lab import check_gpu, check_kernels
from lab.check_kernels import ATTEMPTS, SMALL, STEPS
from tests.interpreted import CAN_INTERPRET

ROOT = Path(__file__).resolve().parent.parent
C = dataclasses.replace(SMALL, attention="band")
FORMS_OF_MLP = ["fused_mlp", "fused_mlp --mlp_fp8 1", "fused_mlp --mlp_fp8 2"]
GOOD = {
    "errors": {"result": (0.01, 0.004), "dx": (0.005, 0.006)}, "limits": (0.02, 0.01),
    "result_limit": math.inf,
    "ms": 4.0, "xla_ms": 5.0, "cublas_ms": 3.5, "tflops": 400.0, "share": 0.4,
}  # fmt: skip


# ---- Verdicts ------------------------------------------------------------------------------------
@pytest.mark.parametrize("changes, is_small, passes, text", [
    ({}, False, True, "x is right and faster: 4 ms (400 TFLOP/s, 40% of the bfloat16 peak), by XLA "
     "5 ms, its products alone by cuBLAS 3.5 ms; largest error 1 %, rms 0.6 %, expected at most "
     "2 % and 1 %"),
    ({"share": math.nan}, False, True, "4 ms (400 TFLOP/s), by XLA"),
    ({"ms": 5.0}, False, None, "x is right, but slower: 5 ms"),
    ({"ms": math.nan}, False, None, "x is right, but slower"),
    ({"ms": 5.0}, True, True, "expected at most 2 % and 1 %; a CPU does not show its speed"),
    ({"errors": {"result": (0.01, 0.004), "dw": (0.021, 0.006)}}, False, False,
     "x is wrong: dw by 2.1 % (rms 0.6 %), expected at most 2 % and 1 %"),
    ({"errors": {"dw": (0.01, 0.011)}}, True, False, "x is wrong: dw by 1 % (rms 1.1 %)"),
    ({"errors": {"dw": (math.nan, math.nan)}}, False, False, "x is wrong: dw by nan %"),
    ({"result_limit": 0.001}, True, False, "x is wrong: result by 1 % (rms 0.4 %)"),
])  # fmt: skip
def test_an_attempt_must_be_right_and_faster(changes, is_small, passes, text):
    found = check_kernels.judged("x", GOOD | changes, is_small)
    assert found[0] is passes and text in found[1]


def test_forms_with_more_fp8_are_not_used():
    def verdict(ms, word=check_kernels.USE):
        return {"verdict": word, "ms": ms}

    facts = {
        "fused_mlp": verdict(4.0),
        "fused_mlp --mlp_fp8 1": verdict(2.0),
        "fused_mlp --mlp_fp8 2": verdict(1.0, check_kernels.LEAVE),
        "fused_head": {"end": "was killed by SIGABRT", "output": []},
        "fused_qkv": verdict(3.0),
    }
    assert check_kernels.to_use(facts) == ["fused_mlp", "fused_qkv"]
    assert check_kernels.to_use({"fused_head": "ended with an error", "machine": []}) == []


@pytest.mark.parametrize("version, capabilities, is_small, why", [
    ((0, 11, 2), [9.0] * 8, False, ""),
    ((0, 12, 0), [], True, ""),
    ((0, 11, 2), [], True, "need jax 0.12, which needs Python 3.12"),
    ((0, 10, 2), [9.0], False, "need jax 0.11.2, which"),
    ((0, 10, 2), [], True, "need jax 0.12, which"),
    ((0, 12, 0), [], False, "this machine has none; ./run.sh check --kernels --small"),
    ((0, 12, 0), [0.0], False, "this machine has none;"),
    ((0, 12, 0), [8.0, 9.0], False, "this machine has 8 and 9;"),
    ((0, 12, 0), [10.0], False, "this machine has 10;"),
])  # fmt: skip
def test_only_hopper_and_a_new_jax_have_kernels(monkeypatch, version, capabilities, is_small, why):
    monkeypatch.setattr(jax, "__version_info__", version)
    found = check_kernels.why_not(capabilities, is_small)
    assert why in found and bool(why) == bool(found)


# ---- Functions -----------------------------------------------------------------------------------
@pytest.mark.parametrize("name", ATTEMPTS)
def test_functions_run_and_their_products_are_counted(name):
    """In the copy that has only XLA, train_gpt.py itself. Without attention's scores, there are two
    operations for a weight in the forward pass and four in the backward pass."""
    attempt = ATTEMPTS[name]
    subject = attempt.subject(C, 0, *attempt.fields.values())
    arrays = [*subject.arrays.values()]
    run = check_kernels.with_gradients(subject, train_gpt, C)
    y = jax.eval_shape(lambda *arrays: subject.run(train_gpt, C, *arrays), *arrays)
    found, *gradients = jax.eval_shape(run, y, *arrays)
    assert [g.shape for g in gradients] == [x.shape for x in arrays] and found.shape == y.shape
    weights = sum(x.size for name, x in subject.arrays.items() if name != "x")
    products = sum(2 * M * N * K for M, N, K, *_ in subject.products)
    assert products == 6 * weights * C.sequence_length(0)
    formats = {a for *_, a, _ in subject.products}
    assert ("float8_e5m2" in formats) == (name.startswith("fused_head") or name.endswith("_fp8 2"))


def test_an_error_in_the_softmax_shows(monkeypatch):
    """Of 10 % in the gradient of the logits. With equally probable tokens it would not."""
    subject = check_kernels.head_subject(C, 0)
    arrays = [*subject.arrays.values()]
    run = check_kernels.with_gradients(subject, train_gpt, C)
    y = subject.run(train_gpt, C, *arrays)
    right = run(y, *arrays)
    exp = train_gpt.exp_of_tokens
    factors = itertools.cycle([1, 0.9])  # of the sum, and of the gradient
    monkeypatch.setattr(train_gpt, "exp_of_tokens", lambda s, c: next(factors) * exp(s, c))
    errors = [check_kernels.errors_of(*pair) for pair in zip(run(y, *arrays), right, strict=True)]
    assert all(rms > ATTEMPTS["fused_head"].limits[1] for _, rms in errors[1:]), errors


def test_errors_are_relative():
    right = jnp.array([4.0, 0.0, 3.0, 0.0])
    assert check_kernels.errors_of(right, right) == (0, 0)
    assert check_kernels.errors_of(right + jnp.array([0, 1.0, 0, 0]), right) == pytest.approx(
        (0.25, 0.2)
    )
    assert all(map(math.isnan, check_kernels.errors_of(right * math.nan, right)))
    assert check_kernels.errors_of(jnp.float32(11), jnp.float32(10)) == pytest.approx((0.1, 0.1))


def attempt_with(error: float) -> check_kernels.Attempt:
    """An attempt whose kernel is wrong by so much."""

    def subject(c, stage):
        def run(script, c, x):
            return x * (1 + (error if c.kernels == "mosaic" else 0))

        x = jnp.ones((4, 4))
        return check_kernels.Subject(run, {"x": x}, [(4, 4, 8, "bfloat16", "bfloat16")] * 3)

    return check_kernels.Attempt(subject, (0.02, 0.01), {})


@pytest.mark.parametrize("error, passes", [(0.0, True), (0.009, True), (0.011, False)])
def test_kernels_are_compared_with_xla(monkeypatch, error, passes):
    monkeypatch.setitem(ATTEMPTS, "fused_mlp", attempt_with(error))
    ((passed, name, text, facts),) = check_kernels.check_attempt("fused_mlp", C, 0, True)
    word = "use it" if passes else "leave it"
    assert (passed, name, facts["verdict"]) == (passes, "fused_mlp", word)
    assert text == f"{word}: {facts['why']}" and facts["errors"].keys() == {"result", "dx"}
    assert facts["errors"]["dx"] == pytest.approx((error, error), abs=1e-6)
    assert facts["tflops"] == pytest.approx(3 * 2e-9 * 4 * 4 * 8 / facts["ms"])
    assert min(facts["ms"], facts["xla_ms"], facts["cublas_ms"]) > 0
    json.dumps(facts)


def test_a_large_size_has_times(monkeypatch):
    monkeypatch.setitem(ATTEMPTS, "fused_mlp", attempt_with(0.0))
    monkeypatch.setattr(check_kernels, "why_xla", lambda *_: "")
    ((passed, _, text, facts),) = check_kernels.check_attempt("fused_mlp", C, 0, False)
    assert passed is (True if facts["ms"] < facts["xla_ms"] else None)
    assert "TFLOP/s), by XLA" in text and math.isnan(facts["share"])  # a CPU's peak is unknown


def test_sizes_without_kernels_are_no_fault_of_a_kernel(monkeypatch):
    hopper = SimpleNamespace(platform="gpu", compute_capability="9.0")
    monkeypatch.setattr(jax, "devices", lambda: [hopper])
    monkeypatch.setattr(jax, "__version_info__", (0, 12, 0))
    script = check_kernels.load(["fused_mlp"], is_small=False)
    if CAN_INTERPRET:
        assert not check_kernels.why_xla(script, C, ATTEMPTS["fused_mlp"], 0)
    for name, changes, why in (
        ("fused_mlp", {"F": 384}, "they need bfloat16, and sizes that are multiples of 256"),
        ("fused_qkv", {"H": 4}, "these sizes take XLA's path"),
        ("fused_qkv --qkv_fp8 2", {"H": 4}, "--qkv_fp8 needs our kernels"),
        ("fused_head --logits_fp8 1", {"head_backward": "bfloat16"}, "--logits_fp8 needs our"),
    ):
        c = dataclasses.replace(C, **changes)
        ((passed, _, text, facts),) = check_kernels.check_attempt(name, c, 0, False)
        assert passed is None and facts["verdict"] == "leave it"
        assert text.startswith(f"leave it: a run with these flags has no kernels of {name}: {why}")


@pytest.mark.parametrize("error, text", [
    (ValueError("no kernel for this\nand more"), "ValueError: no kernel for this"),
    (RuntimeError("failed\n\nTraceback (most recent)\n  File x\nAssertionError: a race\n"),
     "RuntimeError: AssertionError: a race"),
    (NotImplementedError(), "NotImplementedError: "),
])  # fmt: skip
def test_what_does_not_compile_is_left(monkeypatch, error, text):
    def breaks(c, stage):
        raise error

    monkeypatch.setitem(ATTEMPTS, "fused_mlp", check_kernels.Attempt(breaks, (0, 0), {}))
    ((passed, name, found, facts),) = check_kernels.check_attempt("fused_mlp", C, 0, True)
    assert passed is False and found == f"leave it: fused_mlp does not compile or run: {text}"
    assert facts["verdict"] == "leave it" and facts["why"] in found


# ---- Steps ---------------------------------------------------------------------------------------
@pytest.mark.parametrize("apart, passes", [(0.01, True), (0.06, False), (math.nan, False)])
def test_steps_with_and_without_have_the_same_losses(monkeypatch, apart, passes):
    def train(script, c, steps):
        assert steps == 20
        with_kernels = script is not train_gpt
        assert not with_kernels or (c.kernels, c.mlp_fp8, c.D) == ("mosaic", 0, C.D)
        losses = np.array([10.0, 9.0 + (apart if with_kernels else 0)])
        return losses, 100.0 - 10 * with_kernels

    use = ["fused_mlp"]
    ((passed, name, text, facts),) = check_kernels.check_steps(C, use, False, train)
    assert bool(passed) is passes and name == STEPS
    assert "20 steps with fused_mlp and without: 90 ms each, and 100; the losses" in text
    assert ("To train with them:  ./run.sh idea fused_mlp  and then" in text) is passes
    assert facts["use"] == use and facts["xla_losses"] == [10.0, 9.0]
    ((passed, _, text, _),) = check_kernels.check_steps(C, [], False, train)
    assert passed is None and text.startswith("no attempt is to be used")


# ---- The command ---------------------------------------------------------------------------------
def test_parts_are_those_attempts_that_are_on_the_shelf(monkeypatch, tmp_path):
    monkeypatch.setattr(check_kernels.idea, "SHELF", tmp_path)
    (tmp_path / "fused_head.patch").write_text("# The head, on top of base/hopper.patch.\n---\n")
    (tmp_path / "fused_mlp.patch").write_text("# Without a base.\n---\n")
    (tmp_path / "other.patch").write_text("# Of another kind, on top of base/hopper.patch.\n---\n")
    forms = ["fused_head", "fused_head --logits_fp8 1"]
    assert check_kernels.part_names() == [*forms, STEPS]
    options = check_gpu.parse_arguments(["--kernels"])
    assert options.parts == ["machine", *forms, STEPS]
    options = check_gpu.parse_arguments(["--kernels", "--only", "fused_head"])
    assert options.parts == ["fused_head"]


def test_the_shelf_has_the_attempts():
    assert {*FORMS_OF_MLP} <= {*check_kernels.part_names()}


@pytest.mark.parametrize("argv, text", [
    (["--kernels", "--full"], "--full is for the other parts"),
    (["--kernels", "--only", STEPS], "--only steps needs attempts to train with"),
])  # fmt: skip
def test_what_makes_no_sense_is_refused_in_one_line(capsys, argv, text):
    with pytest.raises(SystemExit, match="2"):
        check_gpu.main(argv)
    error = capsys.readouterr().err
    assert text in error and error.count("\n") == 1


def test_parts_of_the_other_checks_are_not_among_these(capsys):
    for argv in ["--kernels", "--only", "head"], ["--only", "fused_mlp"]:
        with pytest.raises(SystemExit, match="2"):
            check_gpu.main(argv)
        assert f"--only: there is no part {argv[-1]!r}" in capsys.readouterr().err


@pytest.mark.parametrize("capability, version, text", [
    (8.0, (0, 12, 0), "this machine has 8;"),
    (9.0, (0, 10, 2), "need jax 0.11.2, which"),
])  # fmt: skip
def test_other_machines_are_refused_in_one_line(monkeypatch, capfd, capability, version, text):
    gpu = SimpleNamespace(capability=capability)
    monkeypatch.delenv("JAX_PLATFORMS", raising=False)
    monkeypatch.setattr(jax, "__version_info__", version)
    monkeypatch.setattr(check_gpu, "CHILD", ["no such program"])
    monkeypatch.setattr(check_gpu.machine, "find_machine", lambda: SimpleNamespace(devices=[gpu]))
    with pytest.raises(SystemExit, match="2"):
        check_gpu.main(["--kernels"])
    shown = capfd.readouterr()
    assert shown.out == "" and shown.err.count("\n") == 1
    assert "there is nothing to check here" in shown.err and text in shown.err


CHILD = """
import json, os, sys, time
def send(*message):
    print("\x1e" + json.dumps(message), flush=True)
part = sys.argv[-1]
use = sys.argv[sys.argv.index("--use") + 1]
send("JAX")
send("JAX", None, "JAX", "jax runs", {"jax": "0.12"})
send(part)
if part == BREAKS:
    os.abort()
word = "use it"
ms = float("nan") if part == "steps" else 1.0
send(part, True, part, f"{word}: {part}", {"verdict": word, "ms": ms, "use": use})
"""


@pytest.fixture
def child(monkeypatch, tmp_path):
    """Lets parts be those of CHILD, of which one may break."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(check_kernels, "why_not", lambda *_: "")
    monkeypatch.setattr(check_kernels, "part_names", lambda: [*FORMS_OF_MLP, STEPS])

    def breaks(part: str):
        program = f"BREAKS = {part!r}\n{CHILD}"
        monkeypatch.setattr(check_gpu, "CHILD", [sys.executable, "-c", program])

    return breaks


def test_every_part_has_a_process_and_steps_use_what_the_others_found(child, capfd, monkeypatch):
    child("fused_mlp --mlp_fp8 1")
    monkeypatch.setenv("JAX_PLATFORMS", "cuda")
    assert check_gpu.main(["--kernels"]) == 1
    lines = capfd.readouterr().out.splitlines()
    assert lines.count("INFO  jax runs") == 1
    assert "FAIL  fused_mlp --mlp_fp8 1 was killed by SIGABRT" in lines
    facts = json.loads(lines[-2].removeprefix("CHECK "))
    assert facts["failed"] == ["fused_mlp --mlp_fp8 1"]
    assert facts[STEPS] == {"verdict": "use it", "ms": "NaN", "use": "fused_mlp"}
    assert json.loads(check_kernels.FILE.read_text()) == facts


def test_without_a_free_machine_nothing_is_tried(child, capfd, monkeypatch):
    child("machine")
    assert check_gpu.main(["--kernels", "--small"]) == 1
    shown = capfd.readouterr().out
    assert "not tried, because machine must pass first: fused_mlp, " in shown
    assert "use it" not in shown
    assert not check_kernels.FILE.exists(), "the numbers of a CPU"


def test_a_part_whose_process_does_not_start_leaves_the_others(child, capfd, monkeypatch):
    child("none")
    program = "import sys\nif sys.argv[-1] == BAD: sys.exit(3)\n" + check_gpu.CHILD[-1]
    program = f"BAD = {FORMS_OF_MLP[1]!r}\n{program}"
    monkeypatch.setattr(check_gpu, "CHILD", [sys.executable, "-c", program])
    assert check_gpu.main(["--kernels", "--small"]) == 1
    shown = capfd.readouterr().out
    assert "FAIL  fused_mlp --mlp_fp8 1: the process of the check ended with" in shown
    assert "use it: fused_mlp --mlp_fp8 2" in shown and "use it: steps" in shown


def test_if_the_first_process_does_not_start_nothing_is_tried(child, capfd, monkeypatch):
    child("none")
    monkeypatch.setattr(check_gpu, "CHILD", [sys.executable, "-c", "import sys; sys.exit(3)"])
    assert check_gpu.main(["--kernels", "--small"]) == 1
    shown = capfd.readouterr().out
    assert "FAIL  machine: the process of the check ended with" in shown
    assert "not tried, because machine must pass first: fused_mlp, " in shown


PLANTED = """
import sys
from lab import check_gpu, check_kernels

OLD = "store_transposed(values, out_s.at[tile.warpgroup, :, strip])"
NEW = "out_s[tile.warpgroup, strip] = values.astype(out.dtype)"
copy_of = check_kernels.idea.copy_of

def spoiled(names):
    source = copy_of(names).decode()
    assert source.count(OLD) == 1
    return source.replace(OLD, NEW).encode()

check_kernels.idea.copy_of = spoiled
check_kernels.part_names = lambda: [*PARTS, check_kernels.STEPS]
check_gpu.CHILD = [sys.executable, __file__, "--child"]
sys.exit(check_gpu.main(sys.argv[1:]))
"""


@pytest.mark.slow  # it interprets kernels for a minute
@pytest.mark.skipif(not CAN_INTERPRET, reason="this version of JAX has no interpreter")
def test_a_wrong_kernel_is_left_and_a_right_one_is_trained_with(tmp_path):
    """The transposed results, which only FP8 in both passes needs, are not transposed."""
    parts = ["fused_mlp", "fused_mlp --mlp_fp8 2"]
    (tmp_path / "planted.py").write_text(f"PARTS = {parts}\n{PLANTED}")
    done = subprocess.run(
        [sys.executable, "planted.py", "--kernels", "--small"], cwd=tmp_path, text=True,
        env=os.environ | {"PYTHONPATH": str(ROOT)}, capture_output=True, timeout=900,
    )  # fmt: skip
    lines = done.stdout.splitlines()
    (line,) = [line for line in lines if line.startswith("CHECK ")]
    facts = json.loads(line.removeprefix("CHECK "))
    assert done.returncode == 1 and facts["failed"] == parts[1:], done.stderr + done.stdout
    verdicts = [line for line in lines if re.search(" (use|leave) it: ", line)]
    assert verdicts[0].startswith("PASS  use it: fused_mlp is right")
    assert verdicts[1].startswith("FAIL  leave it: fused_mlp --mlp_fp8 2 is wrong: d")
    assert facts[STEPS]["use"] == ["fused_mlp"] and len(facts[STEPS]["losses"]) == 2
    np.testing.assert_allclose(facts[STEPS]["losses"], facts[STEPS]["xla_losses"], atol=0.01)
