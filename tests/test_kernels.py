"""The kernels for Hopper of records/ideas/, in Mosaic's interpreter, which finds races: what they
compute, and that it is noticed if a wait, a fence or a number is wrong."""

import dataclasses
import functools
import importlib
import re
from pathlib import Path

import idea
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from tests.interpreted import (
    CAN_INTERPRET,
    SUMS_OF_FP8,
    compare,
    import_source,
    interpreter,
    load,
    normal,
)
from tests.tools import make_mesh, place_on, sequences
from train_gpt import LONG, SHORT, Layer, Stage

pytestmark = [
    pytest.mark.skipif(not CAN_INTERPRET, reason="this version of JAX has no interpreter"),
    pytest.mark.filterwarnings("ignore"),
]
# What the interpreter raises if threads do not wait for each other, or read beyond an array.
NOTICED = (
    "RACE DETECTED",
    "is waiting at barrier",
    "no threads observed phase",
    "Not all copy_smem_to_gmem",
    "Out-of-bounds",
)


def modules() -> dict:
    """The files kernels_*_checks.py by the attempt that they are for."""
    found = {}
    for path in sorted(Path(__file__).parent.glob("kernels_*_checks.py")):
        short = path.stem.removeprefix("kernels_").removesuffix("_checks")
        found[f"fused_{short}"] = importlib.import_module(f"tests.{path.stem}")
    return found


MODULES = modules() if CAN_INTERPRET else {}
CHECKS = [(name, check) for name, module in MODULES.items() for check in module.CHECKS]
FAULTS = [(name, *fault) for name, module in MODULES.items() for fault in module.FAULTS]
INVISIBLE = [(name, *fault) for name, module in MODULES.items() for fault in module.INVISIBLE]


@pytest.mark.slow  # a file without kernels has no use for it
@pytest.mark.parametrize("name, check", CHECKS)
def test_kernels_compute_what_they_must(name, check):
    check(load(name))


def outcome(name: str, old: str, new: str, check) -> str:
    """What a check finds if a text of an attempt is replaced; "" if it finds nothing."""
    try:
        check(load(name, old, new))
    except AssertionError as error:
        return f"a number: {error}"
    except Exception as error:
        if not any(text in str(error) for text in NOTICED):
            raise
        return "a race"
    return ""


@pytest.mark.slow
@pytest.mark.parametrize("name, fault, old, new, check", FAULTS)
def test_a_fault_is_noticed(name, fault, old, new, check):
    assert outcome(name, old, new, check), f"{name}: {fault}"


# ---- A model -------------------------------------------------------------------------------------
STEPS = 8
LAYERS = (
    Layer(SHORT, paired_heads=True, value_table=0),
    Layer(LONG, key_offset=True, head_gate=True, bigram=True, attend_to=0, new_gates=True),
)
STAGES = (Stage(STEPS, 256, short=8, long=24, max_doc=0, lr=1.0, targets=(1.0, (0.5, 0.0))),)
SMALL = dict(D=256, H=2, F=512, R=8, vocab=257, eot=256, bigrams=512, batch=1, microbatch=1)
SMALL |= dict(head_chunk=256, dc_window=12, val_T=256, val_tokens=2048, prefixes="", seed=5)
SMALL |= dict(ngram_capacity=1.0, attention="band", adam_every=1)
SMALL |= dict(mudd_head=(("input", 0.0), ("layer0", -0.5)))
ALL = "fused_mlp fused_head fused_qkv"


@functools.cache
def losses(kernels: str, fp8: int) -> list[float]:
    """The losses of a small model's steps, with all attempts."""
    module = load(ALL)
    layers = tuple(module.Layer(**vars(layer)) for layer in LAYERS)
    stages = tuple(module.Stage(**vars(stage)) for stage in STAGES)
    model = dict(layers=layers, stages=stages, kernels=kernels, mlp_fp8=fp8, qkv_fp8=fp8)
    model |= dict(logits_fp8=int(fp8 == 2))
    c = dataclasses.replace(module.PRESETS["record"], **SMALL | model)
    mesh = make_mesh(1)
    everywhere = NamedSharding(mesh, PartitionSpec())
    found = []
    with interpreter():
        program = module.compile_train_step(0, True, c, mesh)
        state = module.make_state(c, mesh)
        for step, row in enumerate(module.schedule(c)):
            tokens = sequences(c, c.sequence_length(0), seed=step, count=c.batch)
            state, loss = program(state, place_on(mesh, tokens), jax.device_put(row, everywhere))
            found.append(float(loss))
    return found


@pytest.mark.slow
@pytest.mark.parametrize("fp8, tolerance", [(0, 2e-3), (2, 1e-2)])
def test_a_model_learns_alike_with_kernels_and_without(fp8, tolerance):
    want = losses("xla", 0)
    got = losses("mosaic", fp8)
    assert want[-1] < 0.7 * want[0], want
    np.testing.assert_allclose(got, want, rtol=tolerance)


@functools.cache
def record_92():
    """Its frozen file with kernels."""
    folder = idea.ROOT / "records/upstream92"
    frozen = (folder / "train_gpt.py").read_bytes()
    source = idea.apply(frozen, [folder / "kernels.patch"], "the frozen file").decode()
    return import_source(source, "record_92_with_kernels")


KERNELS_OF_RECORD_92 = {
    "mosaic_product", "mosaic_qkv", "mosaic_dqkv", "mosaic_sum_of_exp", "mosaic_gradient",
}  # fmt: skip


def parts_of_record_92(c) -> tuple[list, set[str]]:
    """Results and gradients of an MLP, of attention with wide heads, and of the head; and the names
    of their kernels."""
    module = record_92()
    x = normal(0, (1, 256, c.D), 1.5).astype(c.compute)
    matrices = [normal(seed, (c.D, c.D), 1 / 16, "float32") for seed in range(1, 5)]
    first = jnp.zeros((1, 256), bool).at[:, ::60].set(True)
    targets = jnp.asarray(np.random.default_rng(0).integers(-1, c.vocab, (256, 2)), jnp.int32)
    weights = jnp.float32([1, 0.5])

    def mlp(x, matrices):
        return module.mlp(x, 0, {"mlp": [matrices]}, c)

    def attention(x, matrices):
        w = {"qk": [matrices[:2]], "vo": [matrices[2:]], "vo_lambdas": jnp.ones((1, 2))}
        return module.attention(x, [], 0, w, {}, module.positions(first, c, 0), c)

    def head(x, matrices):
        w = jnp.concatenate(matrices)[: module.padded_vocab(c)]
        return module.head_loss(x[0], w, targets, weights, (), c)

    def with_gradients(function):
        y, vjp = jax.vjp(function, x, matrices)
        dy = jnp.ones_like(y) if y.ndim == 0 else 1e-3 * (y + 1)
        return jax.tree.leaves((y, vjp(dy)))

    arrays = []
    kernels = set()
    for function in mlp, attention, head:
        run = functools.partial(with_gradients, function)
        kernels |= set(re.findall(r"mosaic_\w+", str(jax.make_jaxpr(run)())))
        with interpreter():
            arrays += jax.block_until_ready(run())
    return arrays, kernels


@pytest.mark.slow
@pytest.mark.parametrize("fp8, limits", [(0, (0.012, 0.009)), (2, SUMS_OF_FP8)])
def test_record_92_computes_alike_with_kernels_and_by_xla(fp8, limits):
    """XLA computes in float32, but for the head in FP8."""
    module = record_92()
    record = module.PRESETS["record92"]
    layers = (module.Layer(module.LONG, key_offset=True),)
    stages = tuple(dataclasses.replace(stage, candidates=0) for stage in record.stages)
    changes = dict(layers=layers, stages=stages, mudd_head=(), D=256, H=2, F=256, vocab=1000)
    changes |= dict(mudd_groups=4, head_chunk=128, attention="band", seed=1)
    c = dataclasses.replace(record, **changes)
    want, none = parts_of_record_92(dataclasses.replace(c, kernels="xla", compute="float32"))
    got, kernels = parts_of_record_92(dataclasses.replace(c, mlp_fp8=fp8, qkv_fp8=fp8))
    expected = KERNELS_OF_RECORD_92 | ({"mosaic_transpose"} if fp8 else set())
    assert kernels == expected and not none
    for number, arrays in enumerate(zip(got, want, strict=True)):
        compare(f"array {number}", *arrays, limits)


def test_the_shelf_tells_how_many_faults_are_planted():
    page = (idea.ROOT / "records/ideas/README.md").read_text(encoding="utf-8")
    assert f"{len(FAULTS)} planted faults are noticed" in " ".join(page.split())


@pytest.mark.slow
@pytest.mark.parametrize("name, fault, old, new, check", INVISIBLE)
def test_the_interpreter_does_not_notice(name, fault, old, new, check):
    """If this fails, the interpreter has improved: the fault belongs in FAULTS."""
    assert not outcome(name, old, new, check), f"{name}: {fault}"
