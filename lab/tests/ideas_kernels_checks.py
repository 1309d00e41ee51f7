"""What the attempts with kernels for Hopper compute where there is no Hopper. test_kernels.py is
about the kernels themselves."""

import dataclasses
from types import SimpleNamespace
from unittest import mock

import jax
import numpy as np
import pytest

import train_gpt
from lab.tests.tools import train


def check_other_devices(module, c) -> None:
    """Only Hopper takes the kernels, with sizes that they can have; elsewhere, no bit changes."""
    record = module.PRESETS["record"]
    odd_stage = dataclasses.replace(record.stages[0], tokens=8 * 1000)
    odd = dataclasses.replace(record, stages=(odd_stage, *record.stages[1:]))
    for capability, config, kernels in (
        ("9.0", record, "mosaic"),
        ("8.0", record, "xla"),
        ("9.0", dataclasses.replace(record, compute="float32"), "xla"),
        ("9.0", dataclasses.replace(record, D=192, H=2), "xla"),
        ("9.0", odd, "xla"),
    ):
        device = SimpleNamespace(
            compute_capability=capability, platform="gpu", device_kind="NVIDIA H100 80GB HBM3"
        )
        with mock.patch.object(jax, "__version_info__", (0, 12, 0)):
            assert module.fit_kernels(device, config).kernels == kernels
        with mock.patch.object(jax, "__version_info__", (0, 10, 2)):
            assert module.fit_kernels(device, config).kernels == "xla"
    assert module.fit_kernels(jax.devices()[0], c).kernels == "xla"
    names = {field.name for field in dataclasses.fields(train_gpt.Config)}
    values = {name: value for name, value in vars(c).items() if name in names}
    layers = tuple(train_gpt.Layer(**vars(layer)) for layer in c.layers)
    stages = tuple(train_gpt.Stage(**vars(stage)) for stage in c.stages)
    as_it_is = train_gpt.Config(**values | {"layers": layers, "stages": stages})
    jax.tree.map(np.testing.assert_array_equal, train(module, c), train(train_gpt, as_it_is))


def check_fused_mlp(module, c) -> None:
    """Other devices compute what they did. Validation takes no FP8."""
    check_other_devices(module, c)
    assert dataclasses.replace(c, mlp_fp8=2).for_validation().mlp_fp8 == 0


def check_fused_head(module, c) -> None:
    """Other devices compute what they did. They refuse logits in 8 bits, for which they have no
    kernel; without FP8, they ignore the flag."""
    check_other_devices(module, c)
    eight = dataclasses.replace(module.PRESETS["record"], logits_fp8=1)
    assert eight.for_validation().logits_fp8 == 0
    for changes in {"kernels": "xla"}, {"head_forward": "bfloat16"}, {"head_backward": "bfloat16"}:
        with pytest.raises(ValueError, match="^--logits_fp8 needs our kernels, and the head in"):
            dataclasses.replace(eight, **changes)
    a100 = SimpleNamespace(platform="gpu", compute_capability="8.0", device_kind="A100")
    without_fp8 = module.fit_kernels(a100, eight)
    assert (without_fp8.kernels, without_fp8.logits_fp8) == ("xla", 0)


def check_fused_qkv(module, c) -> None:
    """Other devices compute what they did, and refuse FP8, for which they have no kernels."""
    check_other_devices(module, c)
    wide = dataclasses.replace(module.PRESETS["record"], qkv_fp8=2)
    assert wide.for_validation().qkv_fp8 == 0
    for changes in {"kernels": "xla"}, {"D": 384, "kernels": "mosaic"}:
        with pytest.raises(ValueError, match="^--qkv_fp8 needs our kernels for Hopper, and heads"):
            dataclasses.replace(wide, **changes)
