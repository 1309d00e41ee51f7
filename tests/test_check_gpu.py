"""./run.sh check, by --small: every part finds what was planted for it."""

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
from tests.test_gpu_guards import changed, kernel, spoiled
from tests.tools import make_mesh, unoptimized

ROOT = Path(__file__).resolve().parent.parent
C = dataclasses.replace(check_gpu.SMALL, attention="xla")
SMI = """#!/bin/sh
case "$*" in
  *--id=1*) sed -n 2p "$0.csv" ;;
  *query*) cat "$0.csv" ;;
  *) printf 'GPU0\\tNV18\\n\\nLegend:\\n  NV# = links\\n' ;;
esac
"""


def look(part, *arguments) -> dict[str, bool]:
    with unoptimized():
        return {name: bool(passed) for passed, name, *_ in part(*arguments)}


def failed(part, *arguments) -> list[str]:
    return [name for name, passed in look(part, *arguments).items() if not passed]


# ---- All of it -----------------------------------------------------------------------------------
def test_all_parts_pass_here_and_leave_a_line_of_json(tmp_path):
    env = os.environ | dict(JAX_NUM_CPU_DEVICES="2", JAX_COMPILATION_CACHE_DIR=str(tmp_path))
    command = [sys.executable, "-m", "dev.check_gpu", "--small"]
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True)
    *lines, end, facts = done.stdout.splitlines()
    assert (done.returncode, end, facts[:6]) == (0, "all pass", "CHECK "), done.stdout + done.stderr
    facts = json.loads(facts[6:])
    passed = [line[5:].split(": ")[0] for line in lines if line.startswith("PASS ")]
    more = {"failed", "argv", "seconds", "jax", "backend", "git"}
    assert {*passed} == facts.keys() - more and len(passed) == 22
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
    said = capsys.readouterr().out
    assert "FAIL breaks: SystemExit: no luck\n" in said and said.count("PASS good") == 7


# ---- The machine ---------------------------------------------------------------------------------
@pytest.mark.parametrize(
    "gpus, passes, says",
    [
        ("H100, 580.1, 81559, 4, 700, 1980\n" * 8, True, "8 x H100, 81559 MiB, 700 W.*NVLink$"),
        ("H100, 580.1, 81559, 18000, 700, 1980\n", False, r"in use.*\[0\]"),
        ("GB10, 580.1, [N/A], [N/A], [N/A], 2411\n", True, "1 x GB10"),
        ("H100, 580.1, 81559, 4, 700, 1980\nA100, 580.1, 40960, 4, 400, 1410\n", False, "one kind"),
        ("H100, 580.1, 81559, 4, 700, 1980\nH100, 580.1, 81559, 4, 350, 1980\n", False, "one kind"),
        ("No devices were found\n", True, "0 x GPU"),
    ],
)
def test_gpus_must_be_of_one_kind_and_free(monkeypatch, tmp_path, gpus, passes, says):
    (tmp_path / "nvidia-smi").write_text(SMI)
    (tmp_path / "nvidia-smi").chmod(0o755)
    (tmp_path / "nvidia-smi.csv").write_text(gpus)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    ((passed, _, text, facts),) = check_gpu.check_machine()
    assert passed is passes and re.search(says, text) and len(facts) == gpus.count("580")
    if len({*gpus.splitlines()}) == 2:  # the second one alone
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
    assert 0.01 <= check_gpu.seconds(lambda x: calls.append(time.sleep(x)), 0.01) < 0.03
    assert len(calls) == 20


def test_rates_are_of_the_work_that_is_done(monkeypatch):
    """A second each: then a rate is the work."""
    shapes = []
    monkeypatch.setattr(
        check_gpu, "seconds", lambda run, *x: shapes.append([a.shape for a in x]) or 1
    )
    found = {
        name: rates for _, name, _, rates in check_gpu.check_speed(C, make_mesh(4), 8192 // 64)
    }
    assert [*found] == [*check_gpu.FLOORS, "links, TB/s"]
    n, V = 128, 384
    work = [4 * 8 * n * n, 2 * n**3, 2 * C.head_chunk * V * C.D, 12 * n * n]
    for rates, each in zip(found.values(), work, strict=False):
        np.testing.assert_allclose(rates, each / 1e12, rtol=0.01)
    np.testing.assert_allclose(found["links, TB/s"], 4 * [8 * n * n / 1e12], rtol=0.01)
    assert shapes[0] == [(8 * n * n,)] and shapes[8] == [(C.head_chunk, C.D), (V, C.D)]


# ---- Values --------------------------------------------------------------------------------------
def late(q, k, v, **options):
    """Wrong beyond the 200th token only, as a kernel of short sequences would not show."""
    right, wrong = kernel(q, k, v, **options), kernel(q, k, v, **options | dict(scale=0.2))
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
    def attend(*qkv, **options):  # not in the reference, which has a mask
        return (kernel if "mask" in options else ATTENTION[fault])(*qkv, **options)

    monkeypatch.setattr(check_gpu, "seconds", lambda *_: 1.0)
    monkeypatch.setattr(jax.nn, "dot_product_attention", attend)
    (name,) = failed(check_gpu.check_attention, C, C.rows[-1].T, True)
    assert name.startswith("attention at 256")


@pytest.mark.parametrize("ms, slow", [((1, 2, 3.1), []), ((3, 3, 3), ["its ms by window"])])
def test_a_kernel_that_leaves_nothing_out_fails_on_gpus(monkeypatch, ms, slow):
    times, good = iter(ms), lambda *_, **__: (True, "good", "", 0)
    monkeypatch.setattr(check_gpu, "judged", good)
    monkeypatch.setattr(check_gpu, "seconds", lambda *_: next(times))
    cudnn = dataclasses.replace(C, attention="cudnn")
    assert failed(check_gpu.check_attention, cudnn, C.rows[-1].T, True) == slow


def test_attention_is_looked_at_where_validation_has_it():
    expected = {"attention at 1024, 137 documents": True}
    assert look(check_gpu.check_attention, C, C.val_T, False) == expected


def wrong(name, **changes):
    """The function of train_gpt.py with other arguments, by their numbers."""
    right = getattr(train_gpt, name)
    return lambda *x: right(*(changes.get(f"_{i}", lambda a: a)(a) for i, a in enumerate(x)))


GRADIENTS = {
    "head in float8_e4m3fn": ("head_loss", wrong("head_loss", _1=lambda w: 1.2 * w)),
    "norm and product, by input": (
        "norm_linear",
        wrong("norm_linear", _0=lambda x: 1.0 * x + 0.05),
    ),
    "norm and rotation": ("norm_rotate", wrong("norm_rotate", _1=lambda cos: cos.at[9:].set(1))),
}


@pytest.mark.parametrize("name", GRADIENTS)
def test_a_wrong_value_fails(monkeypatch, name):
    monkeypatch.setattr(train_gpt, *GRADIENTS[name])
    assert name in failed(check_gpu.check_gradients, C)


@pytest.mark.parametrize(
    "backward, name",
    [("head_loss", "head in float8_e4m3fn"), ("norm_linear", "norm and product, by output"),
     ("norm_rotate", "norm and rotation, keys offset")],
)  # fmt: skip
def test_a_wrong_gradient_fails(monkeypatch, backward, name):
    """The value is right: a fifth more of the gradient alone."""
    right = getattr(train_gpt, backward)
    more = jax.custom_vjp(lambda x: x)
    more.defvjp(lambda x: (x, None), lambda _, g: (1.2 * g,))
    monkeypatch.setattr(train_gpt, backward, lambda x, *rest: right(more(x), *rest))
    assert name in failed(check_gpu.check_gradients, C)


# ---- Training ------------------------------------------------------------------------------------
def test_tiny_on_several_devices_must_be_that_of_one(monkeypatch):
    c = dataclasses.replace(C, plan="Lk", D=32)
    right = train_gpt.on_devices  # the first sequence twice, instead of the last one
    wrong = lambda b, mesh: np.concatenate((b[: 9 - mesh.size], b[: mesh.size - 1]))
    other = lambda batches, mesh: right((wrong(b, mesh) for b in batches), mesh)
    monkeypatch.setattr(train_gpt, "on_devices", other)
    assert look(check_gpu.check_tiny, c, make_mesh(2)) == {
        "tiny, 1 cpu": True,
        "tiny, 2 cpu": False,
    }


def fake_record(monkeypatch, losses=(5.0, 4.0)):
    """Programs that take no time and say these losses: first, and from then on."""
    memory = SimpleNamespace(argument_size_in_bytes=2e9, temp_size_in_bytes=1e9)

    class Program(SimpleNamespace):
        def __call__(self, state, batch):
            assert batch.shape == (8, self.T + 1) and 0 <= batch.min() and batch.max() < C.vocab
            return state + 1, losses[state > 0]

    program = lambda stage: Program(T=C.rows[stage].T, memory_analysis=lambda: memory)
    programs = {(kind, stage): program(stage) for kind in train_gpt.KINDS for stage in (0, 1)}

    def prepare(c, mesh, log):
        log.facts(compile=dict(seconds=3.0))
        return programs

    monkeypatch.setattr(train_gpt, "prepare", prepare)
    monkeypatch.setattr(train_gpt, "make_state", lambda *_: 0)
    monkeypatch.setattr(train_gpt, "compile_stage", lambda kind, stage, *_: programs[kind, stage])


def test_the_time_of_the_run_is_that_of_its_stages(monkeypatch):
    fake_record(monkeypatch)
    monkeypatch.setattr(check_gpu, "step_ms", lambda pair, c, stage, mesh: 100.0 * (stage + 1))
    c = dataclasses.replace(C, stages=C.stages.replace("200 1024", "300 1024"), steps=500)
    lines = {name: facts for _, name, _, facts in check_gpu.check_record(c, make_mesh(2))}
    assert lines["predicted time to 3.28"] == pytest.approx(300 * 0.1 + 200 * 0.2)
    assert [*lines][1:] == ["stage 0", "stage 1", "memory", "predicted time to 3.28"]
    # Per token 6 for each weight: of two layers 4 D D and 2 D F, of the head 384 D; and 12 D for
    # each key of a window of 8 and one of 16.
    work = 6 * (2 * (4 * 64**2 + 2 * 64 * 128) + 384 * 64) + 12 * 64 * (8 + 16)
    assert lines["stage 0"] == pytest.approx([100, 10_240, 10_240 * work / 989e12 / 2])


@pytest.mark.parametrize("losses", [(5.0, 4.9), (5.0, float("nan")), (float("nan"), 4.0)])
def test_a_stage_that_does_not_learn_fails(monkeypatch, losses):
    fake_record(monkeypatch, losses)
    expected = ["stage 0", "stage 1", "predicted time to 3.28"]
    assert failed(check_gpu.check_record, C, make_mesh(2)) == expected


@pytest.mark.parametrize(
    "usual, times, use",
    [(10.0, (10.0, 9.95), "usual"), (10.0, (9.0, 11.0), "command_buffer': ''"),
     (float("nan"), (float("nan"), 9.0), "slice_fusion': True")],
)  # fmt: skip
def test_the_faster_setting_is_named_and_none_is_kept(monkeypatch, usual, times, use):
    seen, before, times = [], dict(train_gpt.OPTIONS), iter(times)
    look = lambda kind, stage, *_: seen.append((kind, stage, train_gpt.OPTIONS["gpu"]))
    monkeypatch.setattr(train_gpt, "compile_stage", look)
    monkeypatch.setattr(check_gpu, "step_ms", lambda *_: next(times))
    ((_, _, text, _),) = check_gpu.check_settings(C, make_mesh(1), {"stage 1": [usual]})
    assert use in text.partition("use: ")[2] and train_gpt.OPTIONS == before
    assert [options["xla_gpu_enable_dynamic_slice_fusion"] for *_, options in seen] == [0, 0, 1, 1]
    assert [options.get("xla_gpu_enable_command_buffer") for *_, options in seen] == [
        "",
        "",
        None,
        None,
    ]
    assert {(kind, stage) for kind, stage, _ in seen} == {("even", 1), ("odd", 1)}


def test_stages_do_not_pass_with_weights_that_stay(monkeypatch):
    """Its loss falls all the same: later targets count less and less."""
    c = dataclasses.replace(C, plan="Lk", muon_lr=0.0, adam_lr=0.0)
    with unoptimized():
        pair = 2 * [train_gpt.compile_stage("odd", 0, c, make_mesh(1))]
        assert np.isnan(check_gpu.step_ms(pair, c, 0, make_mesh(1)))


@pytest.mark.parametrize("option", ["command_buffer", "dynamic_slice_fusion"])
def test_the_compiler_knows_the_options(option):
    add = jax.jit(lambda x: x + 1).lower(1.0)
    add.compile({f"xla_gpu_enable_{option}": "" if option == "command_buffer" else True})
    with pytest.raises(jax.errors.JaxRuntimeError):
        add.compile({f"xla_gpu_enable_{option}s": ""})
