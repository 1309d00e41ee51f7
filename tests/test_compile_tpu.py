"""compile_tpu.py: that its flags make the record's batch, and that they compile."""

import importlib.util
import re
import shlex
import subprocess
import sys

import compile_tpu
import pytest

import train_gpt


@pytest.mark.parametrize("chip", compile_tpu.CHIPS)
def test_a_step_is_the_same_tokens(chip):
    c = train_gpt.parse_config(shlex.split(compile_tpu.CHIPS[chip][1]))[1]
    T = c.rows[c.stage_at(c.steps - 1)].T
    assert (c.batch * T, T) == (393_216, 2048)


def test_the_program_compiles_for_tpus_or_the_script_says_what_is_missing():
    command = [sys.executable, compile_tpu.__file__]
    done = subprocess.run(command, capture_output=True, text=True, timeout=7200)
    if importlib.util.find_spec("libtpu"):
        assert done.returncode == 0, done.stdout + done.stderr
        assert len(re.findall("^v[56]e +(?:odd|val) ", done.stdout, re.M)) == 4
    else:
        assert (done.returncode, done.stdout) == (2, "")
        assert done.stderr == f"compile_tpu.py: {compile_tpu.MISSING}\n"
