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
    6.1148, 4.7152, 3.2732, 3.3705, 2.7849, 2.8583, 2.8325, 2.8977, 2.8419, 2.8648,
    2.7402, 2.3488, 3.0994, 2.5017, 2.7438, 2.5981, 2.9149, 2.5417, 2.9712, 3.1822,
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
