"""What several test files need: copies of train_gpt.py as modules, and a run of some steps."""

import importlib.util
import sys
import tempfile
from pathlib import Path
from types import ModuleType

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from tests.tools import ROOT, make_mesh, place_on, sequences

UPSTREAM92 = ROOT / "records/upstream92"


def import_source(source: str, name: str) -> ModuleType:
    """Imports a copy of train_gpt.py."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "train_gpt.py")
        path.write_text(source, encoding="utf-8")
        spec = importlib.util.spec_from_file_location(name, path)
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module  # dataclasses look it up
        spec.loader.exec_module(module)
    return module


def train(module: ModuleType, c, devices: int = 1) -> tuple[list[float], dict]:
    """Takes a run's steps, all on the same random tokens. Returns their losses and the last
    parameters."""
    mesh = make_mesh(devices)
    keys = [(c.stage_at(step), c.is_adam_step(step)) for step in range(c.total_steps)]
    programs = {key: module.compile_train_step(*key, c, mesh) for key in dict.fromkeys(keys)}
    state = module.make_state(c, mesh)
    losses = []
    for key, row in zip(keys, module.schedule(c), strict=True):
        tokens = sequences(c, c.sequence_length(key[0]), count=c.batch)
        row = jax.device_put(row, NamedSharding(mesh, PartitionSpec()))
        state, loss = programs[key](state, place_on(mesh, tokens), row)
        losses.append(float(loss))
    return losses, jax.tree.map(np.asarray, state.params)
