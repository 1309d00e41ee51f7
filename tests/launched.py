"""Processes of run/launch.py, which ./run.sh executes, and code that tests add to their scripts."""

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
    print("compiling", flush=True)
    steps = itertools.count(1)
    def train_program(state, tokens, row):
        HOOK(next(steps))
        return state, jnp.float32(3)
    def val_program(params, tokens):
        return 9.0, 0
    stages = range(len(c.stages))
    programs = dict.fromkeys(itertools.product(stages, (False, True)), train_program)
    return programs | {(stage, "val"): val_program for stage in stages}

def warm_up(programs, c, mesh):
    return None

def HOOK(step):
    pass
"""
# HANG() waits in C, as in XLA, where no Python signal handler runs.
HUNG = """
import ctypes
def HANG():
    lock, mutex = ctypes.CDLL(None).pthread_mutex_lock, ctypes.create_string_buffer(64)
    lock(mutex)
    lock(mutex)
"""


def with_code(source: str, code: str) -> str:
    """A script with code at its end, before it calls main()."""
    assert source.count(MAIN) == 1
    return source.replace(MAIN, f"{code}\n\n{MAIN}")


def start(folder: Path, *argv, devices: int, **pipes) -> subprocess.Popen:
    """Starts the launcher in a folder. argv begins with a script."""
    # A shell's background job ignores Ctrl-C, and its children inherit that.
    heed = lambda: signal.signal(signal.SIGINT, signal.default_int_handler)
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, **pipes}
    env = os.environ | {"JAX_NUM_CPU_DEVICES": str(devices)}
    command = [sys.executable, LAUNCH, *argv]
    return subprocess.Popen(command, cwd=folder, env=env, preexec_fn=heed, **pipes)


def wait_for_line(process: subprocess.Popen, text: str) -> None:
    """Reads what a process prints up to a line with this text, which must come."""
    for line in process.stdout:
        if text in line:
            return
    raise AssertionError(f"the process ended without printing {text!r}")


def end(process: subprocess.Popen, seconds: int = 300) -> tuple[int, str, str]:
    """Waits for a process: its exit status, stdout and stderr."""
    out, err = process.communicate(timeout=seconds)
    return process.returncode, out, err
