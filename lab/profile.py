"""Traces five steps of a run, for Perfetto.

    .venv/bin/python lab/profile.py [preset] [--field value ...]   with the flags of the run

The steps are from the longest stage, on random tokens. Two steps run first and are not in the
trace. While it traces, XLA starts kernels one by one, which takes longer than the CUDA graphs of a
run. To see those as well, set XLA_FLAGS=--xla_enable_command_buffers_during_profiling=true.
"""

import os
import sys
from pathlib import Path

import jax

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # for PYTHONSAFEPATH=1
import train_gpt
from lab import check
from run import launch

FOLDER = Path("logs/profile")


def main(argv: list[str]) -> None:
    """Compiles a stage, runs seven steps of it, and prints where the trace of five of them is."""
    preset, c = train_gpt.parse_config(argv)
    launch.start_jax()
    launch.set_compilation_cache()
    c = train_gpt.parse_config([*argv, *launch.fit(preset, argv).split()])[1]
    devices, c = train_gpt.fit_devices(c)
    mesh = train_gpt.make_mesh(devices)
    stage = check.longest_stage(c)
    print(f"compiling the steps of stage {stage} ...", flush=True)
    programs = check.compile_cycle(c, stage, mesh)
    losses = check.training(programs, c, stage, mesh)
    for _ in range(2):
        jax.block_until_ready(next(losses))

    options = jax.profiler.ProfileOptions()
    options.python_tracer_level = 0  # or calls of Python fill the trace
    with jax.profiler.trace(FOLDER, create_perfetto_trace=True, profiler_options=options):
        for number in range(5):
            with jax.profiler.StepTraceAnnotation("step", step_num=number):
                loss = next(losses)
        jax.block_until_ready(loss)
    trace = max(FOLDER.glob("**/perfetto_trace.json.gz"), key=os.path.getmtime)
    print(f"The trace is {trace}. To see it, open https://ui.perfetto.dev and drop the file there.")


if __name__ == "__main__":
    main(sys.argv[1:])
