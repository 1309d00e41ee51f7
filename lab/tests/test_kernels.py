"""The kernels for Hopper of records/ideas/, in Mosaic's interpreter, which finds races: what they
compute, and that it is noticed if a wait, a fence or a number is wrong (kernel_faults.toml)."""

import dataclasses
import functools
import importlib
import tomllib
from pathlib import Path

import idea
import numpy as np
import pytest

from lab.tests.interpreted import CAN_INTERPRET, interpreter, load
from lab.tests.tools import UPSTREAM92, train
from train_gpt import LONG, SHORT, Layer, Stage

pytestmark = pytest.mark.filterwarnings("ignore")
interprets = pytest.mark.skipif(not CAN_INTERPRET, reason="this version of JAX has no interpreter")
# What the interpreter raises if threads do not wait for each other, or read beyond an array.
NOTICED = (
    "RACE DETECTED",
    "is waiting at barrier",
    "no threads observed phase",
    "threads must observe each barrier completion",
    "Not all copy_smem_to_gmem",
    "Out-of-bounds",
)
ATTEMPTS = "fused_mlp", "fused_head", "fused_qkv"
MODULES = {}  # what each attempt must compute
for name in ATTEMPTS:
    path = f"lab.tests.kernels_{name.removeprefix('fused_')}_checks"
    MODULES[name] = importlib.import_module(path)
CHECKS = [(name, check) for name, module in MODULES.items() for check in module.CHECKS]
TABLE = tomllib.loads(Path(__file__).with_name("kernel_faults.toml").read_text(encoding="utf-8"))
FAULTS = {f"{fault['attempt']}: {fault['name']}": fault for fault in TABLE["fault"]}


@interprets
@pytest.mark.parametrize("name, check", CHECKS)
def test_kernels_compute_what_they_must(name, check):
    check(load(name))


@interprets
@pytest.mark.parametrize("title", FAULTS)
def test_a_fault_is_noticed(title):
    fault = FAULTS[title]
    check = getattr(MODULES[fault["attempt"]], fault["check"])
    with pytest.raises(Exception) as caught:  # noqa: B017 - of many kinds
        check(load(fault["attempt"], fault["old"], fault["new"]))
    is_number = isinstance(caught.value, AssertionError)
    assert is_number or any(text in str(caught.value) for text in NOTICED), caught.value


def test_every_fault_can_be_planted_and_the_shelf_tells_how_many_there_are():
    for title, fault in FAULTS.items():
        source = idea.copy_of([fault["attempt"]]).decode()
        assert source.count(fault["old"]) == 1 and fault["old"] != fault["new"], title
        assert hasattr(MODULES[fault["attempt"]], fault["check"]), title
    page = (idea.SHELF / "README.md").read_text(encoding="utf-8")
    assert f"{len(FAULTS)} planted faults" in " ".join(page.split())


def test_the_patch_of_record_92_has_the_kernels_of_the_attempts():
    frozen = (UPSTREAM92 / "train_gpt.py").read_bytes()
    patched = idea.apply(frozen, [UPSTREAM92 / "kernels.patch"]).decode()
    ours = idea.copy_of([*ATTEMPTS]).decode()
    for name in "mosaic_product", "multiply_tiles", "mosaic_qkv", "mosaic_dqkv":
        start = f"def {name}("
        texts = [start + source.split(start)[1].split("\n\n\n")[0] for source in (patched, ours)]
        assert texts[0] == texts[1], name


# ---- A model -------------------------------------------------------------------------------------
LAYERS = (
    Layer(SHORT, paired_heads=True, value_table=0),
    Layer(LONG, key_offset=True, head_gate=True, ngram=True, attend_to=0, new_gates=True),
)
STAGES = (Stage(4, 256, short=8, long=24, max_doc=0, lr=1.0, targets=(1.0, (0.5, 0.0))),)
SMALL = dict(D=256, H=2, F=512, R=8, vocab=257, eot=256, ngram_buckets=512, batch=1, microbatch=1)
SMALL |= dict(head_chunk=256, dc_window=12, val_T=256, val_tokens=2048, prefixes="", seed=5)
SMALL |= dict(ngram_capacity=1.0, attention="band", adam_every=1)
SMALL |= dict(mudd_head=(("input", 0.0), ("layer0", -0.5)))


@functools.cache
def losses(kernels: str, fp8: int) -> list[float]:
    """The losses of a small model's steps, with all attempts."""
    module = load(" ".join(ATTEMPTS))
    layers = tuple(module.Layer(**vars(layer)) for layer in LAYERS)
    stages = tuple(module.Stage(**vars(stage)) for stage in STAGES)
    model = dict(layers=layers, stages=stages, kernels=kernels, mlp_fp8=fp8, qkv_fp8=fp8)
    model |= dict(logits_fp8=int(fp8 == 2))
    c = dataclasses.replace(module.PRESETS["record"], **SMALL | model)
    with interpreter():
        return train(module, c)[0]


@interprets
@pytest.mark.parametrize("fp8, tolerance", [(0, 2e-3), (2, 1e-2)])
def test_a_model_learns_alike_with_kernels_and_without(fp8, tolerance):
    want = losses("xla", 0)
    got = losses("mosaic", fp8)
    assert want[-1] < 0.7 * want[0], want
    np.testing.assert_allclose(got, want, rtol=tolerance)
