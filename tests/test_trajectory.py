"""The first 20 steps of `tiny`, on its own text: a refactor may not change them.

In float32, from weights without zeros (see make_random_state), and the same numbers on every jax.
A commit that is meant to change the training changes this list, and says so.
"""

import dataclasses
import subprocess
import sys
from pathlib import Path

import numpy as np

import train_gpt
from tests.tools import FLOAT32, make_mesh, make_random_state

LOSSES = [
    6.1148, 4.9321, 3.7577, 3.2388, 2.8657, 3.1435, 3.1843, 2.7450, 2.4055, 2.6751,
    2.8888, 2.7824, 2.7384, 3.1420, 2.8579, 2.5989, 2.8014, 2.5809, 2.9786, 2.8846,
]  # fmt: skip


def test_twenty_steps_of_tiny(tmp_path):
    script = Path(train_gpt.__file__).parent / "data" / "source_code.py"
    subprocess.run([sys.executable, script, "--out", tmp_path], check=True)
    c = dataclasses.replace(
        train_gpt.PRESETS["tiny"], **FLOAT32, attention="xla", steps=20, seed=7, data=str(tmp_path)
    )
    mesh, shards = make_mesh(1), train_gpt.find_data(c)
    windows = {c.window_at(step) for step in range(c.steps)}
    programs = {w: train_gpt.compile_stage("train", w, c, mesh) for w in windows}
    state, losses = make_random_state(c, mesh), []
    for i, batch in enumerate(train_gpt.on_devices(train_gpt.stream(shards[:-1], c), mesh)):
        state, loss = programs[c.window_at(i)](state, batch)
        losses.append(float(loss))
    np.testing.assert_allclose(losses, LOSSES, atol=1e-3)
