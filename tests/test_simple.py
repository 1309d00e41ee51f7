"""What no trainer may do in silence: sum a gradient in bfloat16; and, of the optimizer benchmark,
train with an optimizer that stands still, or end without a line in its log."""

import dataclasses
import functools
import signal
from collections import Counter

import gpt2
import jax
import numpy as np
import optax
import pytest
from jax.extend.mlir import ir
from jax.sharding import Mesh

import train_gpt
from tests import tools
from tests.simple import muon, simple

SMALL = dict(layers=1, D=32, K=16, T=16, batch=4, microbatch=2, val_tokens=64, val_every=60)
SIZE = dataclasses.replace(simple.SIZES["tiny"], data="shards", **SMALL)


# ---- Sums over tokens ----------------------------------------------------------------------------
def step_of_train_gpt():
    c = dataclasses.replace(tools.MINI, compute="bfloat16")  # with every technique
    return train_gpt.compile_train_step(0, True, c, tools.make_mesh(8))


def step_of_the_benchmark():
    size = dataclasses.replace(SIZE, compute="bfloat16")
    tx = muon.optimizer(jax.eval_shape(lambda: simple.make_params(size, 0)), 100)
    return simple.compile_programs(tx, size, Mesh(np.array(jax.devices()[:2]), ("devices",)))[1]


def gradient_of_gpt2():
    c = gpt2.Config(L=2, H=2, D=32, T=24, V=61)
    params = {
        name: jax.ShapeDtypeStruct(shape, "f4") for name, (shape, *_) in gpt2.table(c).items()
    }
    tokens = jax.ShapeDtypeStruct((4, c.T + 1), "i4")
    return jax.jit(jax.grad(functools.partial(gpt2.loss_fn, c=c))).lower(params, tokens)


@pytest.mark.parametrize("lower", [step_of_train_gpt, step_of_the_benchmark, gradient_of_gpt2])
def test_no_sum_over_tokens_is_in_less_than_float32(lower, monkeypatch):
    """A GPU adds in the dtype of the lowered program. A CPU adds bfloat16 in float32, so that no
    number of a test shows it. Sums over devices are another matter."""
    monkeypatch.setattr(jax.stages.Lowered, "compile", lambda lowered, _: lowered)
    sums = Counter()

    def visit(op):
        if op.name in ("stablehlo.reduce", "stablehlo.reduce_window", "stablehlo.scatter"):
            inner = {part.name for block in op.regions[0].blocks for part in block.operations}
            dtype = str(ir.RankedTensorType(op.results[0].type).element_type)
            if "stablehlo.add" in inner and dtype[0] in "bf":  # no integers
                sums[dtype] += 1
        return ir.WalkResult.ADVANCE

    lower().compiler_ir("stablehlo").operation.walk(visit)
    assert sums["f32"] > 20 and {*sums} == {"f32"}


# ---- The optimizer benchmark ---------------------------------------------------------------------
@pytest.fixture
def run(tmp_path, monkeypatch, capsys):
    """Trains a small model with an optimizer for so many steps. Returns the exit status, 0 if there
    is none, the screen and the log."""
    (tmp_path / "shards").mkdir()
    for name in "x_train_000001.bin", "x_val_000000.bin":
        tools.write_shard(tmp_path / "shards" / name, tools.text(20_000))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(simple.SIZES, "tiny", SIZE)
    before = signal.signal(signal.SIGTERM, lambda *_: None)  # else it would end the tests

    def train(tx, steps):
        monkeypatch.setattr(simple, "optimizer", lambda params, total_steps: tx)
        status = 0
        try:
            simple.main(["tiny", "--steps", str(steps), "--seed", "3"])
        except SystemExit as end:
            status = end.code
        (log,) = (tmp_path / "logs").iterdir()
        printed = capsys.readouterr()
        return status, printed.out + printed.err, log.read_text("utf-8").partition("=" * 100)[2]

    yield train
    signal.signal(signal.SIGTERM, before)


def test_a_step_that_is_counted_in_python_is_refused(run):
    """jit would read it once, and the rate would stay that of the first step."""
    steps = []

    def update(grads, state, params=None):
        steps.append(0)
        return jax.tree.map(lambda g: -0.01 * (1 - len(steps) / 100) * g, grads), state

    status, screen, _ = run(optax.GradientTransformation(lambda _: (), update), 100)
    assert status == 2 and "the optimizer changes each time it is traced: count steps" in screen


def test_training_losses_are_shown_and_the_first_that_is_not_finite_ends_the_run(run):
    status, screen, log = run(optax.scale(np.nan), 120)
    assert status == 3
    for text in screen, log:
        assert "\nstep:50/120 train_loss:nan train_time:" in text
        assert text.endswith("\nNON-FINITE: the loss, by step 50\n")
