"""A reader copies one file and changes it: the patches of records/changes/ are applied and run."""

import functools
import importlib.util
import os
import re
import subprocess
import tempfile
from pathlib import Path
from types import ModuleType

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

import train_gpt
from tests.tools import FLOAT32, make_mesh, noise, place_on, sequences

ROOT = Path(train_gpt.__file__).parent
FENCE = re.compile(r"^```diff\n(.*?)^```", re.M | re.S)
PATCHES = sorted((ROOT / "records/changes").glob("*.patch"))
NAMES = [patch.stem for patch in PATCHES]
ONE_LAYER = "(Layer(SHORT),)"
ON_ONE_DEVICE = "value_residual", "two_stages"  # they change nothing of the sharding
MUDD = 'Layer(LONG, x0=False, bigram=True, mudd=("input",))'
LAYERS = {"value_residual": f"(Layer(SHORT), Layer(SHORT), {MUDD})"}
SMALL = FLOAT32 | dict(D=32, H=2, F=64, R=8, bigrams=512, head_chunk=32, dc_window=12, batch=8)
SMALL |= dict(microbatch=8, val_T=64, val_tokens=1024, steps=2, seed=5, attention="band")


@functools.cache
def patched(name: str) -> str:
    """The source of train_gpt.py after `git apply` of a patch."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "train_gpt.py"
        path.write_text(train_gpt.SOURCE, encoding="utf-8")
        command = ["git", "apply", str(ROOT / f"records/changes/{name}.patch")]
        # Outside of every repository, where git would leave out paths that it does not know.
        environment = os.environ | {"GIT_CEILING_DIRECTORIES": str(path.parent.parent)}
        subprocess.run(command, cwd=folder, check=True, env=environment)
        return path.read_text(encoding="utf-8")


def test_the_pages_show_the_patches_as_they_are():
    shown = FENCE.findall((ROOT / "records/changes/README.md").read_text(encoding="utf-8"))
    assert sorted(shown) == sorted(patch.read_text(encoding="utf-8") for patch in PATCHES)
    (in_readme,) = FENCE.findall((ROOT / "README.md").read_text(encoding="utf-8"))
    assert in_readme in shown


@pytest.fixture(scope="module")
def load(tmp_path_factory):
    """A function that imports a source as a module."""
    folder = tmp_path_factory.mktemp("tweaked")

    def load(source: str, name: str = "tweaked") -> ModuleType:
        path = folder / f"{name}.py"
        path.write_text(source, encoding="utf-8")
        spec = importlib.util.spec_from_file_location(name, path)
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module

    return load


def config(module: ModuleType, layers: str = ONE_LAYER):
    """A module's `tiny`, small and in float32, with these layers (as code) and its own stages."""
    layers = eval(layers, vars(module))
    return module.dataclasses.replace(module.PRESETS["tiny"], layers=layers, **SMALL)


def first_state(module: ModuleType, c, mesh):
    """The first state, with noise added: in a fresh model many gradients are 0."""
    state = module.make_state(c, mesh)
    table = module.param_table(c)
    params = {}
    for name, p in state.params.items():
        array = 0.05 * noise(name, p.shape)
        if table[name].sharding == module.BANK:  # padding stays 0
            array.reshape(-1, *p.shape[2:])[table[name].model_shape[0] :] = 0
        params[name] = array + np.asarray(p)
    params["embed"] = params["head"]

    def put(name, like):
        return jax.device_put(params[name].astype(like.dtype), like.sharding)

    return state._replace(
        params={name: put(name, p) for name, p in state.params.items()},
        lookups={name: put(name, p) for name, p in state.lookups.items()},
    )


def two_steps(module: ModuleType, c, devices: int) -> tuple[list[float], list[dict]]:
    """The losses of two steps, and the parameters before, between and after them."""
    mesh = make_mesh(devices)
    keys = [(c.stage_at(step), c.is_adam_step(step)) for step in (0, 1)]
    programs = {key: module.compile_train_step(*key, c, mesh) for key in dict.fromkeys(keys)}
    state = first_state(module, c, mesh)
    losses = []
    params = [jax.tree.map(np.asarray, state.params)]
    for step, row in enumerate(module.schedule(c)):
        tokens = sequences(c, c.sequence_length(c.stage_at(step)), seed=step)
        row = jax.device_put(row, NamedSharding(mesh, PartitionSpec()))
        state, loss = programs[keys[step]](state, place_on(mesh, tokens), row)
        losses.append(float(loss))
        params.append(jax.tree.map(np.asarray, state.params))
    return losses, params


def close(name: str, got: np.ndarray, want: np.ndarray, before: np.ndarray) -> None:
    """Both moved alike from `before`, but for rounding: SOAP divides by small singular values."""
    error = np.linalg.norm(got - want)
    moved = np.linalg.norm(want - before)
    assert error <= 3e-4 * moved + 1e-6, f"{name}: {error} after moving by {moved}"


@pytest.fixture(scope="module")
def plain(load):
    """Two steps of train_gpt.py without a change, on one device."""
    module = load(train_gpt.SOURCE)
    return two_steps(module, config(module), 1)


# ---- The patches ---------------------------------------------------------------------------------
@pytest.mark.slow  # test_devices.py checks it for the model without a patch
@pytest.mark.parametrize("name", [name for name in NAMES if name not in ON_ONE_DEVICE])
def test_a_patch_runs_alike_on_1_and_8_devices(name, load):
    module = load(patched(name))
    c = config(module, LAYERS.get(name, ONE_LAYER))
    losses, params = two_steps(module, c, 1)
    losses8, params8 = two_steps(module, c, 8)
    np.testing.assert_allclose(losses8, losses, rtol=1e-6)
    for step in (1, 2):
        for key, before in params[step - 1].items():
            close(f"{key}, step {step}", params8[step][key], params[step][key], before)


@pytest.mark.parametrize("name", NAMES)
def test_a_patch_runs(name, load, plain):
    module = load(patched(name))
    c = config(module, LAYERS.get(name, ONE_LAYER))
    losses, params = two_steps(module, c, 1)
    for step in (1, 2):
        # Every matrix of the MLP moves at every step; padding never does.
        moves = np.any(params[step]["mlp"] != params[step - 1]["mlp"], axis=(-2, -1)).ravel()
        matrices = len(module.param_table(c)["mlp"].layers)
        assert moves[:matrices].all() and not moves[matrices:].any()
    if name in ("plain_muon", "soap"):
        check_optimizer(losses, params, plain)
    if name == "value_residual":
        gates = params[2]["v_first_gates"] != params[0]["v_first_gates"]
        assert np.any(gates, axis=(1, 2)).tolist() == [False, True, True]
    if name == "swiglu":
        check_swiglu(module, c)
    if name == "two_stages":
        check_stages(module, c)


def check_optimizer(losses: list, params: list[dict], plain: tuple) -> None:
    """In the first step, the MLP moves unlike in the plain model, and all else moves alike."""
    plain_losses, plain_params = plain
    assert losses[0] == pytest.approx(plain_losses[0], rel=1e-6)
    before = plain_params[0]
    for key in before:
        if key != "mlp":
            close(key, params[1][key], plain_params[1][key], before[key])
    move = params[1]["mlp"] - before["mlp"]
    plain_move = plain_params[1]["mlp"] - before["mlp"]
    assert np.linalg.norm(move - plain_move) > 0.1 * np.linalg.norm(plain_move)
    assert 0.3 < np.linalg.norm(move) / np.linalg.norm(plain_move) < 3  # the rates fit


def check_swiglu(module: ModuleType, c) -> None:
    """The MLP and its gradients are those of the formula."""
    x = jnp.asarray(noise("x", (2, 3, c.D)))
    matrices = [jnp.asarray(noise(name, (c.F, c.D))) for name in ("fc", "gate", "proj")]

    def formula(x, matrices):
        fc, gate, proj = matrices
        h = module.norm(x)
        return ((h @ fc.T) * jax.nn.silu(h @ gate.T)) @ proj

    def changed(x, matrices):
        return module.mlp(x, 0, {"mlp": {0: matrices}}, c)

    want, want_vjp = jax.vjp(formula, x, matrices)
    got, got_vjp = jax.vjp(changed, x, matrices)
    got_leaves = jax.tree.leaves((got, got_vjp(x)))
    want_leaves = jax.tree.leaves((want, want_vjp(x)))
    for a, b in zip(got_leaves, want_leaves, strict=True):
        assert np.linalg.norm(a - b) <= 1e-5 * np.linalg.norm(b)


def check_stages(module: ModuleType, c) -> None:
    """Two stages train; the last stage sets the windows of the last validation alone."""
    assert [c.stage_at(step) for step in range(3)] == [0, 1, 2]
    tiny = module.PRESETS["tiny"]
    assert tiny.total_steps == 187 and tiny.stage_ends.tolist() == [147, 187, 187]
    starts = jnp.zeros((1, 8), bool)
    windows = [module.positions(starts, c, stage).windows[module.LONG] for stage in range(3)]
    assert windows == [192, 256, 384]
    frequencies = [module.rope_frequencies(tiny, stage)[0] for stage in range(3)]
    assert np.any(frequencies[1] != frequencies[0])
    assert np.array_equal(frequencies[2], frequencies[1])


# ---- Wrong changes -------------------------------------------------------------------------------
@pytest.mark.parametrize("old, new, message", [
    ("    Layer(None, skip_from=1,", "    Layer(None, skip_from=1, xsa=True,", "layer 3 has no"),
    ("    Layer(None, skip_from=1,", "    Layer(None, skip_form=1,", "skip_form"),
    ("mudd_head=(), D=160", "mudd_head=(), width=128", "width"),
])  # fmt: skip
def test_a_wrong_layer_stage_or_preset_fails_when_the_file_is_imported(old, new, message, load):
    assert train_gpt.SOURCE.count(old) == 1
    with pytest.raises((ValueError, TypeError), match=message):
        load(train_gpt.SOURCE.replace(old, new))


ROW = "[(bound, tall), (0, 2 * tall)], muon)"
SWIGLU_ROW = "[(bound, tall)] * 2 + [(0, 2 * tall)], muon)"


@pytest.mark.parametrize("source, message", [
    (train_gpt.SOURCE.replace(ROW, SWIGLU_ROW), "too many values to unpack"),
    (patched("swiglu").replace(SWIGLU_ROW, ROW), "not enough values to unpack"),
    (train_gpt.SOURCE.replace("F, D, range(n_layers),", "F, D, with_attention,"), r"^1\b"),
], ids=["row", "layer", "a layer without matrices"])  # fmt: skip
def test_a_bank_and_a_layer_that_do_not_match_fail_before_a_step_runs(source, message, load):
    """The change is made in only one of the two places."""
    module = load(source)
    c = config(module, "(Layer(SHORT), Layer(None))")
    with pytest.raises((ValueError, KeyError), match=message):
        module.compile_train_step(0, True, c, make_mesh(1))
