"""lab/profile.py writes a trace of five steps."""

import gzip
import json
import re
from pathlib import Path

import jax
import jax.numpy as jnp

import train_gpt
from lab import check_gpu, profile


def test_the_trace_has_five_steps(tmp_path, monkeypatch, capsys):
    """With a step that compiles fast; lab/check_gpu.py has tests of the real ones."""
    stages = []

    def compile_cycle(c, stage, mesh):
        stages.append(stage)
        step = jax.jit(lambda state, tokens, row: (state + 1, tokens.sum() * row.momentum))
        return [step, step]

    monkeypatch.setattr(check_gpu, "compile_cycle", compile_cycle)
    monkeypatch.setattr(train_gpt, "make_state", lambda *_: jnp.zeros(()))
    monkeypatch.chdir(tmp_path)
    profile.main(["tiny", "--seed", "1"])
    (path,) = re.findall(r"The trace is (\S+)\. To see it", capsys.readouterr().out)
    events = json.loads(gzip.decompress(Path(path).read_bytes()))["traceEvents"]
    numbers = [event["args"]["step_num"] for event in events if event.get("name") == "step"]
    assert numbers == list("01234") and stages == [0]
