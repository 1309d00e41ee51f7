"""The losses of the first steps of `tiny` on its text, with three of its layers and a smaller table
of n-grams.

A refactoring may not change them. They are computed in float32, from weights without zeros (see
make_random_state), and are the same with every version of jax. A commit that is meant to change the
training changes LOSSES, and its message says so. test_golden.py does the same for the record.
"""

import dataclasses
import itertools
import subprocess
import sys
from pathlib import Path

import numpy as np

import train_gpt
from tests.tools import FLOAT32, make_mesh, make_random_state

LOSSES = [5.3602, 3.5743, 3.2768]


def test_three_steps_of_tiny(tmp_path):
    script = Path(train_gpt.__file__).parent / "data" / "source_code.py"
    subprocess.run([sys.executable, script, "--out", tmp_path], check=True)
    tiny = train_gpt.PRESETS["tiny"]
    c = dataclasses.replace(
        tiny, layers=(*tiny.layers[:2], tiny.layers[3]), ngram_buckets=4096, steps=8, **FLOAT32,
        attention="band", seed=7, data=str(tmp_path),
    )  # fmt: skip
    mesh = make_mesh(1)
    shards = train_gpt.find_data(c)
    assert all(c.is_adam_step(step) for step in range(c.total_steps))
    program = train_gpt.compile_train_step(0, True, c, mesh)
    state = make_random_state(c, mesh)
    assert not state.waiting_grads  # none has to wait for the next step
    losses = []
    batches = train_gpt.train_batches(c, mesh, shards, start=0)
    for tokens, row in itertools.islice(batches, len(LOSSES)):
        state, loss = program(state, tokens, row)
        losses.append(round(float(loss), 4))
    print(f"LOSSES = {losses}")  # shown when the test fails: to copy after a change of the training
    np.testing.assert_allclose(losses, LOSSES, atol=1e-3)
