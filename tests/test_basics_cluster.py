"""basics/cluster.py runs, sees planted faults, leaves no process, and its exercises have these
answers."""

import os
import socket
import subprocess
import sys

import pytest

from tests.tools import ROOT, basic

FEED = """parts = [np.split(rows, jax.process_count())[part] for rows in data]
        arrays = [jax.make_array_from_process_local_data(spread, rows) for rows in parts]"""


@pytest.fixture
def run(tmp_path):
    yield lambda plant=None: basic(tmp_path, "cluster", plant=plant)
    left = subprocess.run(["ps", "-A", "-o", "args"], capture_output=True, text=True).stdout
    assert f"{tmp_path.name}/basics/cluster.py" not in left


def test_it_runs(run):
    ran = run()
    assert (ran.returncode, ran.stderr) == (0, "")
    assert ran.stdout.count("ok   ") == 5 and "WRONG" not in ran.stdout


def test_exercise_1_a_process_that_has_all_rows_says_how_many_there_are(run):
    whole = "jax.make_array_from_process_local_data(spread, rows, rows.shape) for rows in data"
    ran = run((FEED, f"arrays = [{whole}]"))
    assert "ok    every row" in ran.stdout and "ok    losses, weights" in ran.stdout
    assert "WRONG the same half twice" in ran.stdout  # both processes have all rows


def test_exercise_2_who_is_left_ends_too():
    with socket.create_server(("localhost", 0)) as free:
        port = free.getsockname()[1]
    hidden = "JAX_PLATFORMS", "JAX_NUM_CPU_DEVICES", "XLA_FLAGS"
    env = {k: v for k, v in os.environ.items() if k not in hidden and "proxy" not in k.lower()}
    env |= dict(MASTER_ADDR="localhost", MASTER_PORT=str(port - 1), WORLD_SIZE="2")

    def start(rank, *flags):
        return subprocess.Popen(
            [sys.executable, ROOT / "basics/cluster.py", "--join", *flags],
            env=env | dict(RANK=rank),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )

    survivor = start("0")
    killed = start("1", "", "dies")
    try:
        assert killed.wait(timeout=300) == -9
        # 1 if gloo has noticed that its peer is lost, 134 if the heartbeat has
        assert survivor.wait(timeout=300) not in (0, -9)
    finally:
        survivor.kill()
        killed.kill()
