"""The exercise of basics/cluster.py has this answer, and no process is left."""

import subprocess

from tests.tools import basic

FEED = """parts = [np.split(rows, jax.process_count())[part] for rows in data]
        arrays = [jax.make_array_from_process_local_data(spread, rows) for rows in parts]"""


def test_exercise_1_a_process_that_has_all_rows_says_how_many_there_are(tmp_path):
    whole = "jax.make_array_from_process_local_data(spread, rows, rows.shape) for rows in data"
    ran = basic(tmp_path, "cluster", plant=(FEED, f"arrays = [{whole}]"))
    assert "ok    every row" in ran.stdout and "ok    losses, weights" in ran.stdout
    assert "WRONG the same half twice" in ran.stdout  # both processes have all rows
    left = subprocess.run(["ps", "-A", "-o", "args"], capture_output=True, text=True).stdout
    assert f"{tmp_path.name}/basics/cluster.py" not in left
