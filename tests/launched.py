"""Runs of a small `tiny`, in this process and, as ./run.sh executes run/launch.py, in others. They
share one configuration, and so all but a few compiled programs."""

import dataclasses
import functools
import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import jax
import numpy as np

import train_gpt
from tests.tools import FLOAT32_FLAGS, ROOT, SMALL, text, with_tiny, write_shard
from train_gpt import LONG, Layer, Stage

# Of 30 steps, step 12 is the last of the first stage, step 18 the last with embedding and head
# tied. Of 10 steps, these are steps 4 and 6.
LAYERS = (Layer(LONG, value_table=0),)
STAGES = (
    Stage(12, 128, short=8, long=8, max_doc=50, lr=1.0, targets=(1.0, 0.5)),
    Stage(18, 256, short=8, long=16, max_doc=0, lr=1.0),
)
FLAGS = ["tiny", *SMALL, *FLOAT32_FLAGS, *"--pointer 0 --untie 0.58 --data data".split()]
FLAGS += "--cooldown_start 0.33 --cooldown_end 0.93".split()
# No program depends on these fields.
SAME = dict(data="", save=0, val_every=1, seed=0, target=0.0, steps=30)
VAL = r"step:(\d+)/(\d+) val_loss:(\d+\.\d{4}) train_time:(\d+)ms step_avg:(\d+\.\d\d)ms"

LAUNCH = ROOT / "run/launch.py"
MAIN = 'if __name__ == "__main__":'
# The devices of the runs in this process, for a process that has eight: only then do they share
# programs.
TWO_OF_EIGHT = """
mine = jax.devices()[:2]
jax.devices = lambda: mine
"""
# Programs that compute nothing, so that a run takes no time. HOOK(step) runs in every step.
STAND_INS = """
def compile_all(c, mesh, log):
    steps = itertools.count(1)
    def train_program(state, tokens, row):
        HOOK(next(steps))
        return state, jnp.float32(3)
    keys = itertools.product(range(len(c.stages)), (False, True, "val"))
    val_program = lambda params, tokens, last: (9.0, 0)
    return {key: val_program if key[1] == "val" else train_program for key in keys}

def warm_up(programs, c, mesh):
    return None
"""


def make_folder(path: Path) -> Path:
    """Writes data/ into a folder in which runs start: six train shards, of which 10 steps read two
    and 30 steps all, and a val shard for two batches."""
    (path / "data").mkdir()
    for i, name in enumerate([*(f"train_00000{i}" for i in range(1, 7)), "val_000000"]):
        write_shard(path / f"data/x_{name}.bin", text(1600, i))
    return path


def set_tiny(monkeypatch, stages: tuple = STAGES) -> None:
    """Gives `tiny` other layers and stages, in this process."""
    changes = dict(layers=LAYERS, stages=stages, mudd_head=(), head_chunk=32)
    changed = dataclasses.replace(train_gpt.PRESETS["tiny"], **changes)
    monkeypatch.setitem(train_gpt.PRESETS, "tiny", changed)


def with_code(source: str, code: str) -> str:
    """A script with code at its end, before it calls main()."""
    assert source.count(MAIN) == 1
    return source.replace(MAIN, f"{code}\n\n{MAIN}")


def write_script(path: Path, code: str = "") -> Path:
    """A copy of train_gpt.py with the layers and stages, for a process."""
    source = with_tiny(train_gpt.SOURCE, repr(LAYERS)[1:-2], repr(STAGES)[1:-1])
    path.write_text(with_code(source, TWO_OF_EIGHT + code))
    return path


compile_train_step = train_gpt.compile_train_step
compile_val_step = train_gpt.compile_val_step


def compiled(stage: int, kind, c: train_gpt.Config, mesh) -> jax.stages.Compiled:
    """The program of a kind: "val", or whether it is an Adam step; compiled once."""
    return compiled_once(stage, kind, dataclasses.replace(c, **SAME), mesh)


@functools.cache
def compiled_once(stage: int, kind, c: train_gpt.Config, mesh) -> jax.stages.Compiled:
    if kind == "val":
        return compile_val_step(stage, c, mesh)
    return compile_train_step(stage, kind, c, mesh)


def read(path: Path) -> SimpleNamespace:
    """A log, read with `re` and `json` alone, and not with the code of this repository."""
    source, rest = re.split("^={100}\n", path.read_bytes().decode(), flags=re.M)
    lines = rest.splitlines()
    validations = re.findall(f"^{VAL}$", rest, re.M)
    facts = re.findall(r'^([a-z]+) ([\[{"\d].*)$', rest, re.M)
    result = re.fullmatch("RESULT (.*)", lines[-1])
    weights = path.with_suffix(".npz")
    saved = weights.exists() and weights.stat().st_size
    return SimpleNamespace(
        path=path, source=source, rest=rest, lines=lines,
        facts={name: json.loads(value) for name, value in facts},
        losses={int(step): loss for step, _, loss, *_ in validations},
        times={int(step): int(ms) for step, _, _, ms, _ in validations},
        result=result and json.loads(result[1]),
        weights=dict(np.load(weights, allow_pickle=False)) if saved else None,
    )  # fmt: skip


def heed_ctrl_c() -> None:
    """For a child: a shell's background job ignores Ctrl-C, and its children inherit that."""
    signal.signal(signal.SIGINT, signal.default_int_handler)


def start(script: Path, *argv, env=None, **pipes) -> subprocess.Popen:
    """Starts the launcher with a script, in the script's folder."""
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, **pipes}
    env = os.environ | {"JAX_NUM_CPU_DEVICES": "8"} | (env or {})
    command = [sys.executable, LAUNCH, script.name, *argv]
    return subprocess.Popen(command, cwd=script.parent, env=env, preexec_fn=heed_ctrl_c, **pipes)


def wait_for_line(process: subprocess.Popen, text: str) -> None:
    """Reads what a process prints up to a line with this text, which must come."""
    for line in process.stdout:
        if text in line:
            return
    raise AssertionError(f"the process ended without printing {text!r}")
