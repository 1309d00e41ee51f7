"""Lab's tests: what the records' ideas and their kernels compute, and what lab's tools count.

    .venv/bin/python -m pytest lab/tests             .ci/run does so after the suite
    .venv/bin/python -m pytest lab/tests -k kernel   with jax 0.12 or newer, also interprets kernels

They run on 8 simulated devices of a CPU, with programs that compile fast and are cached.
"""

import os
import sys
from importlib.metadata import version
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
sys.path[:0] = [str(ROOT / folder) for folder in ("", "data", "lab", "records", "run")]

# These are variables, not jax.config, because processes that tests start inherit them.
os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["JAX_DISABLE_MOST_OPTIMIZATIONS"] = "1"  # LLVM's took most of the time
if int(version("jax").split(".")[1]) < 11:  # later versions abort at the first flag
    os.environ["XLA_FLAGS"] = (
        "--xla_cpu_use_fusion_emitters=false --xla_cpu_parallel_codegen_split_count=1 "
        "--xla_cpu_experimental_ynn_fusion_type="  # it computes some sums wrong
    )
os.environ["JAX_COMPILATION_CACHE_DIR"] = str(ROOT / ".cache" / "tests")
os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"

import jax  # noqa: E402
import pytest  # noqa: E402

jax.config.update("jax_num_cpu_devices", 8)


@pytest.fixture(autouse=True, scope="module")
def clear_programs():
    """Drops a file's programs after it: with all of them, a worker would grow to 5 GB."""
    yield
    jax.clear_caches()
