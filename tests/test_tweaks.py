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

import train_gpt
from tests.tools import FLOAT32, make_mesh, noise, place_on, sequences

ROOT = Path(train_gpt.__file__).parent
FENCE = re.compile(r"^```diff\n(.*?)^```", re.M | re.S)
PATCHES = sorted((ROOT / "records/changes").glob("*.patch"))
SMALL = FLOAT32 | dict(
    D=32, H=2, F=64, R=8, ngram_buckets=512, head_chunk=32, dc_window=12, batch=8
)
SMALL |= dict(microbatch=8, val_T=64, val_tokens=1024, steps=2, seed=5, attention="band", pointer=0)


def patched(name: str, folder: Path) -> ModuleType:
    """train_gpt.py after `git apply` of a patch, as a module."""
    (folder / "train_gpt.py").write_text(train_gpt.SOURCE, encoding="utf-8")
    command = ["git", "apply", str(ROOT / f"records/changes/{name}.patch")]
    # Outside of every repository, where git would leave out paths that it does not know.
    environment = os.environ | {"GIT_CEILING_DIRECTORIES": str(folder.parent)}
    subprocess.run(command, cwd=folder, check=True, env=environment)
    spec = importlib.util.spec_from_file_location("tweaked", folder / "train_gpt.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def two_steps(module: ModuleType, *layers) -> list[dict]:
    """The parameters of a module's small `tiny` with these layers before, between and after two
    steps; they begin with noise, for in a fresh model many gradients are 0."""
    c = module.dataclasses.replace(module.PRESETS["tiny"], layers=layers, **SMALL)
    mesh = make_mesh(1)
    program = module.compile_train_step(0, True, c, mesh)
    state = module.make_state(c, mesh)
    noisy = lambda x: x + 0.05 * noise(f"{x.shape}", x.shape)
    put = lambda x: jax.device_put(noisy(x), x.sharding)
    changed = jax.tree.map(put, (state.params, state.lookups))
    state = state._replace(params=changed[0], lookups=changed[1])
    params = [jax.tree.map(np.asarray, state.params)]
    for step in range(2):
        tokens = place_on(mesh, sequences(c, c.sequence_length(0), seed=step))
        state, _ = program(state, tokens, module.schedule(c)[step])
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
    """Every matrix of the MLP moves at every step."""
    module = patched(name, tmp_path)
    layers = [module.Layer(module.SHORT)]
    if name == "value_residual":
        layers.append(module.Layer("long", x0=False, ngram=True, mudd=("input",)))
    params = two_steps(module, *layers)
    matrices = (3 if name == "swiglu" else 2) * len(layers)
    for step in (1, 2):
        moves = np.any(params[step]["mlp"] != params[step - 1]["mlp"], axis=(-2, -1))
        assert moves.sum() >= matrices
    if name == "value_residual":
        gates = params[2]["v_first_gates"] != params[0]["v_first_gates"]
        assert np.any(gates, axis=(1, 2)).tolist() == [False, True]


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
