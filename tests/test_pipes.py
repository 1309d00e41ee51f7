"""No tool prints a traceback where nobody reads what it prints, as behind `| head` or `| true`."""

import os
import subprocess
import sys

import pytest

from tests.tools import ROOT

RECORD = "records/tracks/tiny-2k/2026-11-25_n_grams_and_copies"


@pytest.mark.parametrize("tool, argument", [
    ("data/check.py", "nowhere"), ("records/verify.py", RECORD),
])  # fmt: skip
def test_a_reader_who_leaves_gets_no_traceback(tool, argument):
    reader, pipe = os.pipe()
    os.close(reader)
    command = [sys.executable, tool, argument]
    done = subprocess.run(command, cwd=ROOT, stdout=pipe, stderr=subprocess.PIPE, text=True)
    os.close(pipe)
    status = done.returncode if done.returncode >= 0 else 128 - done.returncode
    assert (status, done.stderr) == (141, "")
