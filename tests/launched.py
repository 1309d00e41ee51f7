"""Runs of run/launch.py in processes, as ./run.sh executes it, and code for their scripts."""

import os
import signal
import subprocess
import sys
from pathlib import Path

from tests.tools import ROOT

LAUNCH = ROOT / "run/launch.py"
MAIN = 'if __name__ == "__main__":'
# Programs that compute nothing, so that a run takes no time. HOOK(step) runs in every step.
STAND_INS = """
def compile_all(c, mesh, log):
    steps = itertools.count(1)
    def train_program(state, tokens, row):
        HOOK(next(steps))
        return state, jnp.float32(3)
    keys = itertools.product(range(len(c.stages)), (False, True, "val"))
    val_program = lambda params, tokens: (9.0, 0)
    return {key: val_program if key[1] == "val" else train_program for key in keys}

def warm_up(programs, c, mesh):
    return None
"""


def with_code(source: str, code: str) -> str:
    """A script with code at its end, before it calls main()."""
    assert source.count(MAIN) == 1
    return source.replace(MAIN, f"{code}\n\n{MAIN}")


def heed_ctrl_c() -> None:
    """For a child: a shell's background job ignores Ctrl-C, and its children inherit that."""
    signal.signal(signal.SIGINT, signal.default_int_handler)


def start(folder: Path, *argv, devices: int, **pipes) -> subprocess.Popen:
    """Starts the launcher in a folder. argv begins with a script."""
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, **pipes}
    env = os.environ | {"JAX_NUM_CPU_DEVICES": str(devices)}
    command = [sys.executable, LAUNCH, *argv]
    return subprocess.Popen(command, cwd=folder, env=env, preexec_fn=heed_ctrl_c, **pipes)


def wait_for_line(process: subprocess.Popen, text: str) -> None:
    """Reads what a process prints up to a line with this text, which must come."""
    for line in process.stdout:
        if text in line:
            return
    raise AssertionError(f"the process ended without printing {text!r}")
