"""The optimizer benchmark's model, Muon and AdamW against upstream's modules, in float32.

The numbers are in simple_small.npz, or in the file that GOLDEN_SIMPLE_NPZ names. Every size is read
from it, and so is the base of the random seeds. Upstream's weights are (outputs, inputs) and ours
(inputs, outputs); upstream differentiates the sum over all tokens in its runs, and we the mean.
"""

import dataclasses
import functools
import inspect
import json
import os
import zlib
from pathlib import Path

import jax
import numpy as np
import optax
import pytest
from jax.sharding import Mesh

from tests.simple import muon, simple

PATH = os.environ.get("GOLDEN_SIMPLE_NPZ", Path(__file__).with_name("simple_small.npz"))
GOLDEN = np.load(PATH, allow_pickle=False)
META = json.loads(str(GOLDEN["meta/json"]))
D = META["D"]
B = META["B"]
T = META["T"]
STEPS = META["steps"]  # of the runs
TRAIN_STEPS = META["train_steps"]  # of the schedule, which the runs do not finish
# A microbatch of one sequence: the mean over microbatches is compared as well.
SIZE = dataclasses.replace(
    simple.SIZES["tiny"], vocab=META["vocab"], layers=META["layers"], D=D, K=META["head_dim"], T=T,
    batch=B, microbatch=1, val_tokens=B * T, compute="float32",
)  # fmt: skip
SHAPES = simple.parameter_shapes(SIZE)
MESH = Mesh(np.array(jax.devices()[:1]), ("devices",))


# ---- Upstream's numbers --------------------------------------------------------------------------
def transposed(name: str, array: np.ndarray) -> np.ndarray:
    """An array of a parameter in upstream's axes, if it is in ours; and the other way around."""
    return array.T if name.endswith("weight") and name != "embed.weight" else array


def normal(key: str, shape: tuple) -> np.ndarray:
    """Standard normal numbers that follow from their name, float64: N of the golden file."""
    seed = (zlib.crc32(key.encode()) + META["base"]) % 2**32
    return np.random.Generator(np.random.PCG64(seed)).standard_normal(shape)


def random_param(prefix: str, name: str) -> np.ndarray:
    """Standard normal numbers of a parameter, in our axes."""
    shape = transposed(name, np.empty(SHAPES[name])).shape
    return transposed(name, normal(f"{prefix}/{name}", shape))


def any_params() -> dict[str, np.ndarray]:
    """Parameters of which none is 0, in our axes: those of the gradients."""
    params = {}
    for name, shape in SHAPES.items():
        params[name] = random_param("any", name)
        if name.endswith("gains"):
            params[name] = 1 + 0.1 * params[name]
        elif name.endswith("bias"):
            params[name] *= 0.02
        elif name != "embed.weight":
            params[name] *= 0.5 / shape[0] ** 0.5
    return {name: np.float32(param) for name, param in params.items()}


def first_params() -> dict[str, np.ndarray]:
    """Upstream's initial values, in our axes: those of the runs."""
    params = {}
    for name, shape in SHAPES.items():
        if name.endswith("gains"):
            params[name] = np.ones(shape)
        elif name.endswith("bias") or name.endswith("proj.weight"):
            params[name] = np.zeros(shape)
        elif name == "embed.weight":
            params[name] = random_param("start", name)
        else:
            params[name] = (0.33 / shape[0]) ** 0.5 * random_param("start", name)
    return {name: np.float32(param) for name, param in params.items()}


def batch(step: int) -> jax.Array:
    """The tokens of a step on the device, (microbatches, sequences, T + 1)."""
    return simple.read_batch((GOLDEN["tokens"], step * B * T), SIZE, MESH)


def relative(a, b) -> float:
    """The norm of a - b, as a share of that of b."""
    a = np.asarray(a, np.float64)
    assert a.shape == b.shape, (a.shape, b.shape)
    return float(np.linalg.norm(a - b) / np.linalg.norm(b))


# ---- Model ---------------------------------------------------------------------------------------
def test_loss_and_gradients():
    loss, grads = jax.jit(simple.gradients, static_argnums=(2, 3))(
        any_params(), batch(0), SIZE, MESH
    )
    assert float(loss) == pytest.approx(float(GOLDEN["any/loss"]), rel=1e-6)
    names = {key.removeprefix("any/grad_norm/") for key in GOLDEN if "any/grad_norm/" in key}
    assert grads.keys() == names
    for name in names:
        grad = transposed(name, np.asarray(grads[name]))
        assert grad.dtype == np.float32, name
        norm = GOLDEN[f"any/grad_norm/{name}"]
        assert np.linalg.norm(grad) == pytest.approx(norm, rel=1e-5), name
        if f"any/grad/{name}" in GOLDEN:
            assert relative(grad, GOLDEN[f"any/grad/{name}"]) < 1e-5, name
        if f"any/grad_rows/{name}" in GOLDEN:
            assert relative(grad[:4], GOLDEN[f"any/grad_rows/{name}"]) < 1e-5, name


def test_first_values_have_upstreams_spread():
    """The numbers are others, but their norm is the same within its chance: of n numbers, a
    standard deviation of 1 / sqrt(2 n)."""
    params = simple.make_params(SIZE, 0)
    expected = first_params()
    assert params.keys() == expected.keys()
    for name, param in params.items():
        assert param.shape == expected[name].shape, name
        assert param.dtype == np.float32, name
        norm = np.linalg.norm(expected[name])
        assert np.linalg.norm(param) == pytest.approx(norm, rel=6 / (2 * param.size) ** 0.5), name


# ---- Optimizers ----------------------------------------------------------------------------------
def golden_muon(params: dict) -> optax.GradientTransformation:
    """muon.py with upstream's numbers; those of AdamW are the defaults of beside_adam(), but the
    head's is that of a width of 768, which upstream has at this width as well."""
    head = inspect.signature(simple.beside_adam).parameters["head"].default * (D / 768) ** 0.5
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(muon, "beside_adam", functools.partial(simple.beside_adam, head=head))
        return muon.optimizer(params, TRAIN_STEPS, lr=0.025, decay=0.05)


def golden_adamw(params: dict) -> optax.GradientTransformation:
    """AdamW without warm-up. Epsilon is added to gradients of the mean: upstream's is 1e-10."""
    schedule = simple.cooldown(0.0015, TRAIN_STEPS)
    return optax.adamw(schedule, b1=0.9, b2=0.95, eps=1e-10 / (B * T), weight_decay=0.1)


@pytest.mark.parametrize("name, make", [("muon", golden_muon), ("adamw", golden_adamw)])
def test_a_run(name, make):
    """The losses of a run, the last of which is that of the validation program, and the norms of
    all parameters after it."""
    start = first_params()
    begin, step, validation = simple.compile_programs(make(start), SIZE, MESH)
    _, state = begin(0)  # the state does not depend on the parameters' values
    params = jax.device_put(start, simple.shardings(start, MESH))
    losses = []
    for i in range(STEPS):
        params, state, loss = step(params, state, batch(i))
        losses.append(loss)
    losses.append(validation(params, state, batch(STEPS)))
    np.testing.assert_allclose(losses, GOLDEN[f"{name}/losses"], rtol=1e-5)
    for parameter, value in params.items():
        norm = GOLDEN[f"{name}/norm/{parameter}"]
        assert np.linalg.norm(value) == pytest.approx(norm, rel=2e-5), parameter
