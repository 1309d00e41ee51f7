"""What a GPU run refuses before it starts, and what it says when memory is short."""

import dataclasses
import json
import re
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import pytest

import train_gpt

C, TINY = [dataclasses.replace(c, attention="xla") for c in train_gpt.PRESETS.values()]
kernel, positions = jax.nn.dot_product_attention, train_gpt.positions
NO_MEMORY = ["RESOURCE_EXHAUSTED: cannot allocate", "CUDNN_STATUS_ALLOC_FAILED", "out of memory"]


def changed(left=0, right=0, **changes):
    """The kernel with other options, and a window with other ends."""

    def attend(q, k, v, local_window_size, **options):
        ends = local_window_size[0] + left, local_window_size[1] + right
        return kernel(q, k, v, **dict(local_window_size=ends) | options | changes)

    return attend


def spoiled(forward=lambda y: y, backward=lambda *grads: grads):
    def attend(*qkv, **options):
        wrong = jax.custom_vjp(lambda *qkv: forward(kernel(*qkv, **options)))
        pull = lambda *qkv: jax.vjp(lambda *qkv: kernel(*qkv, **options), *qkv)[1]
        wrong.defvjp(lambda *qkv: (wrong(*qkv), pull(*qkv)), lambda pull, g: backward(*pull(g)))
        return wrong(*qkv)

    return attend


def code(change=lambda high, low: (high, low), a=4096, b=256):
    """positions, with codes of change(high, low), weighted by a and b."""

    def wrong(starts, c, stage):
        pos = positions(starts, c, stage)
        one, _, high, low = jnp.moveaxis(pos.code_k.astype(jnp.int32), -1, 0)
        high, low = change(high, low)
        code_q = jnp.stack((-a * high, -b * low, a * one, b * one), axis=-1).astype(c.compute)
        code_k = jnp.stack((one, one, high, low), axis=-1).astype(c.compute)
        return SimpleNamespace(angles=pos.angles, code_q=code_q, code_k=code_k, scale=pos.scale)

    return wrong


KERNELS = dict(
    no_window=changed(local_window_size=None), one_key_less=changed(left=-1),
    one_key_more=changed(left=1), other_scale=changed(scale=0.125),
    sees_the_future=changed(right=1, is_causal=False),
    no_documents=lambda q, k, v, **options: kernel(q.at[..., -4:].set(0), k, v, **options),
    one_wrong_token=spoiled(lambda y: y.at[0, 300, 1].set(y[0, 299, 1])),
    not_a_number=spoiled(lambda y: y.at[0, 300, 1, 5].set(jnp.nan)),
    wrong_dq=spoiled(backward=lambda dq, dk, dv: (1.05 * dq, dk, dv)),
    wrong_dk=spoiled(backward=lambda dq, dk, dv: (dq, 1.05 * dk, dv)),
    wrong_dv=spoiled(backward=lambda dq, dk, dv: (dq, dk, 1.05 * dv)),
)  # fmt: skip
CODES = dict(
    sign_of_high=code(a=-4096), sign_of_low=code(b=-256), no_low=code(b=0),
    **{f"high_{b}": code(lambda h, low, b=b: (h & ~(1 << b), low)) for b in range(8)},
    **{f"low_{b}": code(lambda high, x, b=b: (high, x & ~(1 << b))) for b in range(4)},
)  # fmt: skip


# ---- The attention kernel, checked at the start of a run on GPUs ---------------------------------
@pytest.mark.parametrize("c, codes", [(C, positions), (C, code()), (TINY, positions)])
def test_the_kernel_of_this_machine_passes_with_a_margin(c, codes, monkeypatch):
    monkeypatch.setattr(train_gpt, "positions", codes)
    train_gpt.check_attention(c, SimpleNamespace(facts=(log := {}).update))
    assert list(log["attention"]) == ["y", "dq", "dk", "dv"]
    assert all(0 < error < 0.03 for error in log["attention"].values())


@pytest.mark.parametrize("fault", [*KERNELS, *CODES])
def test_a_wrong_kernel_or_document_code_is_refused(fault, monkeypatch, capsys):
    def attend(*qkv, **options):  # not in the reference, which has a mask
        return (kernel if "mask" in options else KERNELS.get(fault, kernel))(*qkv, **options)

    monkeypatch.setattr(jax.nn, "dot_product_attention", attend)
    monkeypatch.setattr(train_gpt, "positions", CODES.get(fault, positions))
    with pytest.raises(SystemExit) as stopped:
        train_gpt.check_attention(C, SimpleNamespace(facts=lambda **_: None))
    assert stopped.value.code == 2
    says = r"train_gpt\.py: attention by xla is wrong on this machine, errors \[.*\]; install.*\n"
    assert re.fullmatch(says, capsys.readouterr().err)


# ---- A run whose compiling and training are replaced ---------------------------------------------
def run(monkeypatch, folder, prepare, train=None, attention="xla"):
    fit = lambda _, c: (jax.devices()[:1], dataclasses.replace(c, attention=attention))
    for part in dict(find_data=lambda c: [], fit_devices=fit, prepare=prepare, train=train).items():
        monkeypatch.setattr(train_gpt, *part)
    monkeypatch.chdir(folder)
    with pytest.raises((SystemExit, jax.errors.JaxRuntimeError)) as stopped:
        train_gpt.main(["tiny", "--seed", "1"])
    (log,) = folder.glob("logs/*.txt")
    return stopped.value, log.read_text().split("=" * 100 + "\n")[-1].splitlines()


@pytest.mark.parametrize("attention, right, checked, code", [
    ("cudnn", True, True, 7), ("cudnn", False, True, 2), ("xla", False, False, 7),
])  # fmt: skip
def test_cudnn_is_checked_first(monkeypatch, tmp_path, attention, right, checked, code):
    def attend(*qkv, implementation, **options):  # cuDNN's calls are answered here by XLA's
        assert implementation == "xla" or options["is_causal"]  # or the real one sees the future
        use = kernel if right or implementation == "xla" else KERNELS["no_documents"]
        return use(*qkv, implementation="xla", **options)

    monkeypatch.setattr(jax.nn, "dot_product_attention", attend)
    error, log = run(monkeypatch, tmp_path, lambda *_: exit(7), attention=attention)
    facts = [json.loads(line[10:]) for line in log if line.startswith("attention ")]
    assert error.code == code and [list(f) for f in facts] == [["y", "dq", "dk", "dv"]] * checked


@pytest.mark.parametrize("doing", ["compiling", "training"])
@pytest.mark.parametrize("message", [*NO_MEMORY, "CUDA_ERROR_OUT_OF_MEMORY", "INTERNAL: no luck"])
def test_lack_of_memory_is_told_and_no_other(monkeypatch, tmp_path, capsys, doing, message):
    def fail(*_):
        raise jax.errors.JaxRuntimeError(f"{message}\nmore")

    error, log = run(monkeypatch, tmp_path, fail if doing == "compiling" else lambda *_: {}, fail)
    if message == "INTERNAL: no luck":
        assert str(error) == "INTERNAL: no luck\nmore" and "OUT OF MEMORY" not in log[-1]
    else:
        assert error.code == 2 and log[-1] == f"OUT OF MEMORY while {doing}: {message}"
        says = rf"train_gpt\.py: not enough memory on 1 x cpu while {doing}: twice --batch.*\n"
        assert re.fullmatch(says, capsys.readouterr().err)
