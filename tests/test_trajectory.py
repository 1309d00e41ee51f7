"""The first 20 steps of `tiny`, here with every net, on its text: a refactor may not change them.

In float32, from weights without zeros (see make_random_state), and the same numbers on every jax.
A commit that is meant to change the training changes this list, and says so.
"""

import dataclasses
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

import train_gpt
from tests.tools import FLOAT32, make_mesh, make_random_state

LOSSES = [
    5.8617, 5.4104, 4.4019, 4.461, 3.3668, 3.3538, 3.2224, 3.0166, 2.651, 2.7934,
    2.9614, 2.9132, 3.1564, 2.7217, 2.4583, 2.3898, 2.0507, 2.1911, 2.3652, 2.408,
]  # fmt: skip


def test_twenty_steps_of_tiny(tmp_path):
    script = Path(train_gpt.__file__).parent / "data" / "source_code.py"
    subprocess.run([sys.executable, script, "--out", tmp_path], check=True)
    c = dataclasses.replace(
        train_gpt.PRESETS["tiny"], plan="Sxbv0 Lkqxgb Snpb -<1 Sbv1@2 Lkqgdmv2@2", E=64, steps=20,
        **FLOAT32, attention="xla", seed=7, data=str(tmp_path),
    )  # fmt: skip
    mesh, shards, fills = make_mesh(1), train_gpt.find_data(c), c.fills("train")
    stages = {(train_gpt.KINDS[i % 2], c.stage_at(i)) for i in range(c.steps)}
    with ThreadPoolExecutor() as pool:
        compiling = {at: pool.submit(train_gpt.compile_stage, *at, c, mesh) for at in stages}
    programs = {stage: future.result() for stage, future in compiling.items()}
    state, losses = make_random_state(c, mesh), []
    batches = train_gpt.on_devices(train_gpt.stream(shards[:-1], fills, c), mesh)
    for i, batch in enumerate(batches):
        state, loss = programs[train_gpt.KINDS[i % 2], c.stage_at(i)](state, batch)
        losses.append(round(float(loss), 4))
    print(losses)  # what LOSSES becomes when the training is meant to change
    np.testing.assert_allclose(losses, LOSSES, atol=1e-3)
