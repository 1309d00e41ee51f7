"""dev/check_gpu.py, with --small: every part of it finds the faults that are planted for it."""

import dataclasses
import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import train_gpt
from dev import check_gpu
from tests.tools import make_mesh
from train_gpt import LONG, Layer, Stage

ROOT = Path(__file__).resolve().parent.parent
C = dataclasses.replace(check_gpu.SMALL, attention="band")
STAGES = (
    Stage(200, 1024, short=8, long=16, max_doc=0, lr=1.0, targets=(1.0, (0.5, 0.0))),
    Stage(200, 2048, short=16, long=48, max_doc=0, lr=1.5),
    Stage(0, 2048, short=16, long=64, max_doc=0, lr=1.0),
)
TWO_STAGES = dataclasses.replace(C, stages=STAGES)
kernel = jax.nn.dot_product_attention
SMI = """#!/bin/sh
case "$*" in
  *--id=1*) sed -n 2p "$0.csv" ;;
  *query*) cat "$0.csv" ;;
  *) printf 'GPU0\\tNV18\\n\\nLegend:\\n  NV# = links\\n' ;;
esac
"""


def passes(part, *arguments) -> dict[str, bool]:
    """For each line of a part, whether it passes, by name."""
    return {name: bool(passed) for passed, name, *_ in part(*arguments)}


def failed(part, *arguments) -> list[str]:
    """The names of the lines of a part that fail."""
    return [name for name, passed in passes(part, *arguments).items() if not passed]


# ---- All of it -----------------------------------------------------------------------------------
@pytest.mark.slow  # the other tests check the parts
def test_all_parts_pass_here_and_leave_a_line_of_json():
    env = os.environ | dict(JAX_NUM_CPU_DEVICES="2")
    command = [sys.executable, "-m", "dev.check_gpu", "--small"]
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True)
    *lines, end, facts = done.stdout.splitlines()
    assert (done.returncode, end, facts[:6]) == (0, "all pass", "CHECK "), done.stdout + done.stderr
    facts = json.loads(facts[6:])
    passed = [line[5:].split(": ")[0] for line in lines if line.startswith("PASS ")]
    more = {"failed", "argv", "seconds", "jax", "backend", "git"}
    assert {*passed} == facts.keys() - more and len(passed) == 21
    assert facts["failed"] == [] and facts["predicted time to 3.28"] > 0
    assert not any(line.startswith("FAIL") for line in lines)


def test_a_machine_without_gpu_is_told_what_there_is(monkeypatch, capsys):
    monkeypatch.setattr(check_gpu.train_gpt, "fit_devices", lambda _, c: (jax.devices(), c))
    assert check_gpu.main([]) == 2 and "./run.sh check --small" in capsys.readouterr().out


def test_a_part_that_breaks_has_failed_and_the_next_ones_go_on(monkeypatch, capsys):
    def breaks(*_):
        raise SystemExit("no luck\nat all")

    good = lambda *_: iter([(True, "good", "text", 1)])
    for name in [name for name in vars(check_gpu) if name.startswith("check_")]:
        monkeypatch.setattr(check_gpu, name, breaks if name == "check_speed" else good)
    monkeypatch.setattr(jax.config, "update", lambda *_: None)
    assert check_gpu.main(["--small"]) == 1
    shown = capsys.readouterr().out
    assert "FAIL breaks: SystemExit: no luck\n" in shown and shown.count("PASS good") == 7


# ---- The machine ---------------------------------------------------------------------------------
@pytest.mark.parametrize(
    "gpus, good, pattern",
    [
        ("H100, 580.1, 81559, 4, 700, 1980\n" * 8, True, "8 x H100, 81559 MiB, 700 W.*NVLink$"),
        ("H100, 580.1, 81559, 18000, 700, 1980\n", False, r"in use.*\[0\]"),
        ("GB10, 580.1, [N/A], [N/A], [N/A], 2411\n", True, "1 x GB10"),
        ("H100, 580.1, 81559, 4, 700, 1980\nA100, 580.1, 40960, 4, 400, 1410\n", False, "one kind"),
        ("H100, 580.1, 81559, 4, 700, 1980\nH100, 580.1, 81559, 4, 350, 1980\n", False, "one kind"),
        ("No devices were found\n", True, "0 x GPU"),
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
        (H100, [2.9, 2.8, 1.4, 2.9], "[2] below 2.56"),
        (H100, [2.4] * 4, "[0, 1, 2, 3] below 2.5"),
        (OTHER, [0.8, 0.8, 0.7], "[2] below 0.72"),
        (OTHER, [0.8, 0.8, 0.8], None),
    ],
)
def test_a_slow_card_shows(device, rates, slow):
    passed, _, text, _ = check_gpu.rated("copy, TB/s", [1e12 * rate for rate in rates], device)
    assert passed is (slow is None) and text.partition("; ")[2] == (slow or "")


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


# ---- Values --------------------------------------------------------------------------------------
def changed(left=0, right=0, **changes):
    """The kernel with other options, and with a window that reaches further by left and right."""

    def attend(q, k, v, local_window_size, **options):
        ends = local_window_size[0] + left, local_window_size[1] + right
        return kernel(q, k, v, **dict(local_window_size=ends) | options | changes)

    return attend


def spoiled(forward=lambda y: y, backward=lambda *grads: grads):
    """The kernel with a fault in its output or in its gradients."""

    def attend(*qkv, **options):
        def residuals(*qkv):
            return jax.vjp(lambda *qkv: kernel(*qkv, **options), *qkv)[1]

        wrong = jax.custom_vjp(lambda *qkv: forward(kernel(*qkv, **options)))
        wrong.defvjp(
            lambda *qkv: (wrong(*qkv), residuals(*qkv)),
            lambda pull, g: backward(*pull(g)),
        )
        return wrong(*qkv)

    return attend


def late(q, k, v, **options):
    """A kernel that is wrong from the 200th token on, which no short sequence shows."""
    right = kernel(q, k, v, **options)
    wrong = kernel(q, k, v, **options | dict(scale=0.2))
    return jnp.where(jnp.arange(q.shape[1])[:, None, None] < 200, right, wrong)


ATTENTION = dict(
    late=late, no_window=changed(local_window_size=None), one_key_less=changed(left=-1),
    one_key_more=changed(left=1), sees_the_future=changed(right=1, is_causal=False),
    no_documents=lambda q, k, v, **options: kernel(q.at[..., -4:].set(0), k, v, **options),
    one_wrong_token=spoiled(lambda y: y.at[0, -1].set(y[0, -2])),
    not_a_number=spoiled(lambda y: y.at[0, -9, 1, 5].set(jnp.nan)),
    wrong_dk=spoiled(backward=lambda dq, dk, dv: (dq, 1.05 * dk, dv)),
    wrong_dv=spoiled(backward=lambda dq, dk, dv: (dq, dk, dv.at[0, -20].set(0))),
)  # fmt: skip


@pytest.mark.parametrize("fault", ATTENTION)
def test_a_wrong_attention_fails(monkeypatch, fault):
    def attend(*qkv, **options):
        if "mask" in options:  # the reference stays right
            return kernel(*qkv, **options)
        return ATTENTION[fault](*qkv, **options)

    monkeypatch.setattr(check_gpu, "seconds", lambda *_: 1.0)
    monkeypatch.setattr(jax.nn, "dot_product_attention", attend)
    (name,) = failed(check_gpu.check_attention, TWO_STAGES, TWO_STAGES.sequence_length(2), True)
    assert name.startswith("attention at 256")


@pytest.mark.parametrize("ms, slow", [((1, 2, 3.1), []), ((3, 3, 3), ["its ms by window"])])
def test_a_kernel_that_leaves_nothing_out_fails_on_gpus(monkeypatch, ms, slow):
    times = iter(ms)
    good = lambda *_, **__: (True, "good", "", 0)
    monkeypatch.setattr(check_gpu, "compare", good)
    monkeypatch.setattr(check_gpu, "seconds", lambda *_: next(times))
    cudnn = dataclasses.replace(C, attention="cudnn")
    assert failed(check_gpu.check_attention, cudnn, C.sequence_length(0), True) == slow


def test_attention_is_checked_at_the_length_of_validation():
    expected = {"attention at 1024, 137 documents": True}
    assert passes(check_gpu.check_attention, C, C.val_T, False) == expected


def wrong(name, place, change):
    """A function of train_gpt.py that changes its argument at this place."""
    right = getattr(train_gpt, name)

    def wrong_function(*arguments):
        arguments = [*arguments]
        arguments[place] = change(arguments[place])
        return right(*arguments)

    return wrong_function


GRADIENTS = {
    "head in float8_e4m3fn": ("head_loss", wrong("head_loss", 1, lambda w: 1.2 * w)),
    "norm and product, from x": ("norm_linear", wrong("norm_linear", 0, lambda x: x + 0.05)),
    "norm and rotation": ("norm_rotate", wrong("norm_rotate", 1, lambda cos: cos.at[9:].set(1))),
}


@pytest.mark.parametrize("name", GRADIENTS)
def test_a_wrong_value_fails(monkeypatch, name):
    monkeypatch.setattr(train_gpt, *GRADIENTS[name])
    assert name in failed(check_gpu.check_gradients, C)


@pytest.mark.parametrize(
    "backward, name",
    [("head_loss", "head in float8_e4m3fn"), ("norm_linear", "norm and product, from y"),
     ("norm_rotate", "norm and rotation, with key_offset")],
)  # fmt: skip
def test_a_wrong_gradient_fails(monkeypatch, backward, name):
    """The value is right, and only the gradient is larger by a fifth."""
    right = getattr(train_gpt, backward)
    more = jax.custom_vjp(lambda x: x)
    more.defvjp(lambda x: (x, None), lambda _, g: (1.2 * g,))
    monkeypatch.setattr(train_gpt, backward, lambda x, *rest: right(more(x), *rest))
    assert name in failed(check_gpu.check_gradients, C)


# ---- Training ------------------------------------------------------------------------------------
def test_tiny_on_several_devices_must_be_that_of_one(monkeypatch):
    c = dataclasses.replace(C, layers=(Layer(LONG),), D=32)
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


def fake_record(monkeypatch, losses=(5.0, 4.0)):
    """Programs that take no time. The first step returns losses[0], all others losses[1]."""
    memory = SimpleNamespace(argument_size_in_bytes=2e9, temp_size_in_bytes=1e9)

    class Program(SimpleNamespace):
        def __call__(self, state, tokens, row):
            assert tokens.shape == (8, self.T + 1) and 0 <= tokens.min() < tokens.max() < C.vocab
            assert len(row.loss_weights) == self.targets
            assert row.momentum == np.float32(C.momentum_low)
            return state + 1, losses[0] if state == 0 else losses[1]

    programs = {
        (stage, second): Program(
            T=TWO_STAGES.sequence_length(stage),
            targets=len(train_gpt.target_weights(STAGES[stage])),
            memory_analysis=lambda: memory,
        )
        for stage in (0, 1)
        for second in (False, True)
    }
    programs[1, "val"] = None

    def compile_all(c, mesh, log):
        log.facts({"compile": {"seconds": 3.0}})
        return programs

    monkeypatch.setattr(train_gpt, "compile_all", compile_all)
    monkeypatch.setattr(train_gpt, "make_state", lambda *_: 0)


def test_the_time_of_the_run_is_that_of_its_stages(monkeypatch):
    fake_record(monkeypatch)
    monkeypatch.setattr(check_gpu, "step_ms", lambda pair, c, stage, mesh: 100.0 * (stage + 1))
    first = dataclasses.replace(STAGES[0], steps=300)
    c = dataclasses.replace(C, stages=(first, *STAGES[1:]))
    lines = {name: facts for _, name, _, facts in check_gpu.check_record(c, make_mesh(2))}
    assert lines["predicted time to 3.28"] == pytest.approx(300 * 0.1 + 200 * 0.2)
    assert [*lines][1:] == ["stage 0", "stage 1", "memory", "predicted time to 3.28"]
    # Per token: 6 for every weight, which are 4 D D + 2 D F in each of two layers and 384 D in the
    # head; and 12 D for every key in the windows of 8 and 16.
    work = 6 * (2 * (4 * 64**2 + 2 * 64 * 128) + 384 * 64) + 12 * 64 * (8 + 16)
    assert lines["stage 0"] == pytest.approx([100, 10_240, 10_240 * work / 989e12 / 2])


@pytest.mark.parametrize("losses", [(5.0, 4.9), (5.0, float("nan")), (float("nan"), 4.0)])
def test_a_stage_that_does_not_learn_fails(monkeypatch, losses):
    fake_record(monkeypatch, losses)
    expected = ["stage 0", "stage 1", "predicted time to 3.28"]
    assert failed(check_gpu.check_record, TWO_STAGES, make_mesh(2)) == expected


@pytest.mark.parametrize(
    "usual, times, use",
    [(10.0, (10.0, 9.95), "usual"), (10.0, (9.0, 11.0), "command_buffer': ''"),
     (float("nan"), (float("nan"), 9.0), "slice_fusion': True")],
)  # fmt: skip
def test_the_faster_setting_is_named_and_options_stay_as_they_were(monkeypatch, usual, times, use):
    compiled = []
    before = dict(train_gpt.OPTIONS)
    times = iter(times)

    def compile_train_step(stage, second, *_):
        compiled.append((stage, second, train_gpt.OPTIONS["gpu"]))

    monkeypatch.setattr(train_gpt, "compile_train_step", compile_train_step)
    monkeypatch.setattr(check_gpu, "step_ms", lambda *_: next(times))
    facts = {"stage 1": [usual]}
    ((_, _, text, _),) = check_gpu.check_settings(TWO_STAGES, make_mesh(1), facts)
    assert use in text.partition("use: ")[2] and train_gpt.OPTIONS == before
    fusion = [options["xla_gpu_enable_dynamic_slice_fusion"] for *_, options in compiled]
    buffers = [options.get("xla_gpu_enable_command_buffer") for *_, options in compiled]
    assert (fusion, buffers) == ([False, False, True, True], ["", "", None, None])
    assert {(stage, second) for stage, second, _ in compiled} == {(1, False), (1, True)}


def test_a_stage_does_not_pass_with_weights_that_stay(monkeypatch):
    c = dataclasses.replace(C, layers=(Layer(LONG),), muon_lr=0.0, adam_lr=0.0)
    pair = 2 * [train_gpt.compile_train_step(0, True, c, make_mesh(1))]
    assert np.isnan(check_gpu.step_ms(pair, c, 0, make_mesh(1)))


@pytest.mark.parametrize("option", ["command_buffer", "dynamic_slice_fusion"])
def test_the_compiler_knows_the_options(option):
    add = jax.jit(lambda x: x + 1).lower(1.0)
    add.compile({f"xla_gpu_enable_{option}": "" if option == "command_buffer" else True})
    with pytest.raises(jax.errors.JaxRuntimeError):
        add.compile({f"xla_gpu_enable_{option}s": ""})
