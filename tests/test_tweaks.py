"""A reader copies one file and changes it: the patches of records/changes/ are applied and run."""

import importlib.util
import os
import re
import subprocess
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
SMALL = FLOAT32 | dict(
    D=32, H=2, F=64, R=8, ngram_buckets=512, head_chunk=32, dc_window=12, batch=8
)
SMALL |= dict(microbatch=8, val_T=64, val_tokens=1024, steps=2, seed=5, attention="band", pointer=0)


def load(source: str, folder: Path) -> ModuleType:
    """Imports a source as a module."""
    path = folder / "tweaked.py"
    path.write_text(source, encoding="utf-8")
    spec = importlib.util.spec_from_file_location("tweaked", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def patched(name: str, folder: Path) -> ModuleType:
    """train_gpt.py after `git apply` of a patch, as a module."""
    (folder / "train_gpt.py").write_text(train_gpt.SOURCE, encoding="utf-8")
    command = ["git", "apply", str(ROOT / f"records/changes/{name}.patch")]
    # Outside of every repository, where git would leave out paths that it does not know.
    environment = os.environ | {"GIT_CEILING_DIRECTORIES": str(folder.parent)}
    subprocess.run(command, cwd=folder, check=True, env=environment)
    return load((folder / "train_gpt.py").read_text(encoding="utf-8"), folder)


def config(module: ModuleType, *layers):
    """A module's `tiny`, small and in float32, with these layers."""
    return module.dataclasses.replace(module.PRESETS["tiny"], layers=layers, **SMALL)


def two_steps(module: ModuleType, c) -> list[dict]:
    """The parameters before, between and after two steps; they begin with noise, for in a fresh
    model many gradients are 0."""
    mesh = make_mesh(1)
    program = module.compile_train_step(0, True, c, mesh)
    state = module.make_state(c, mesh)
    noisy = {n: np.asarray(p) + 0.05 * noise(n, p.shape) for n, p in state.params.items()}
    noisy["embed"] = noisy["head"]
    for name, param in module.param_table(c).items():
        if param.kind == module.BANK:  # padding stays 0
            is_real = np.arange(param.shape[0] * param.shape[1]) < param.model_shape[0]
            noisy[name] = noisy[name] * is_real.reshape(*param.shape[:2], 1, 1)
    put = lambda name, like: jax.device_put(noisy[name].astype(like.dtype), like.sharding)
    state = state._replace(
        params={name: put(name, p) for name, p in state.params.items()},
        lookups={name: put(name, p) for name, p in state.lookups.items()},
    )
    params = [jax.tree.map(np.asarray, state.params)]
    for step, row in enumerate(module.schedule(c)):
        tokens = place_on(mesh, sequences(c, c.sequence_length(0), seed=step))
        row = jax.device_put(row, NamedSharding(mesh, PartitionSpec()))
        state, _ = program(state, tokens, row)
        params.append(jax.tree.map(np.asarray, state.params))
    return params


# ---- The patches ---------------------------------------------------------------------------------
def test_the_pages_show_the_patches_as_they_are():
    """But for the numbers of lines."""
    page = (ROOT / "records/changes/README.md").read_text(encoding="utf-8")
    assert set(re.findall(r"\((\w+\.patch)\)", page)) == {path.name for path in PATCHES}
    shown = FENCE.findall(page + (ROOT / "README.md").read_text(encoding="utf-8"))
    numbers = re.compile("^@@.*@@$", re.M)
    patches = {numbers.sub("", path.read_text(encoding="utf-8")) for path in PATCHES}
    assert shown and {numbers.sub("", text) for text in shown} <= patches


@pytest.mark.parametrize("name", [path.stem for path in PATCHES if path.stem != "two_stages"])
def test_a_patch_runs(name, tmp_path):
    module = patched(name, tmp_path)
    layers = [module.Layer(module.SHORT)]
    if name == "value_residual":
        layers = [*layers, *layers, module.Layer("long", x0=False, ngram=True, mudd=("input",))]
    c = config(module, *layers)
    params = two_steps(module, c)
    for step in (1, 2):
        # Every matrix of the MLP moves at every step; padding never does.
        moves = np.any(params[step]["mlp"] != params[step - 1]["mlp"], axis=(-2, -1)).ravel()
        matrices = len(module.param_table(c)["mlp"].layers)
        assert moves[:matrices].all() and not moves[matrices:].any()
    if name == "value_residual":
        gates = params[2]["v_first_gates"] != params[0]["v_first_gates"]
        assert np.any(gates, axis=(1, 2)).tolist() == [False, True, True]


def test_another_stage(tmp_path):
    """Two stages train; the last stage sets the windows of the last validation alone."""
    module = patched("two_stages", tmp_path)
    tiny = module.PRESETS["tiny"]
    assert tiny.total_steps == 187 and tiny.stage_ends.tolist() == [147, 187, 187]
    starts = jnp.zeros((1, 8), bool)
    windows = [module.positions(starts, tiny, stage).windows[module.LONG] for stage in range(3)]
    assert windows == [192, 256, 384]
    frequencies = [module.rope_frequencies(tiny, stage)[0] for stage in range(3)]
    assert np.any(frequencies[1] != frequencies[0])
    assert np.array_equal(frequencies[2], frequencies[1])
