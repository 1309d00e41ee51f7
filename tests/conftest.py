"""Tests run on 8 simulated devices of a CPU."""

import os
import sys
from pathlib import Path

os.environ["JAX_PLATFORMS"] = "cpu"
sys.path[:0] = [str(Path(__file__).parent.parent / folder) for folder in ("", "data", "records")]

import jax  # noqa: E402

jax.config.update("jax_num_cpu_devices", 8)
