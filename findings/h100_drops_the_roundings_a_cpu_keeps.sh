#!/usr/bin/env bash
# A cast from float32 to bfloat16 and back rounds on a CPU, and is removed from an H100's program. A
# product of bfloat16 numbers that is cast to float32 rounds on the H100, and not on the CPU. So
# each is more exact where the other is not; xla_allow_excess_precision=False keeps both on both.
# Hurts: who rounds a residual stream by a cast, and tests it on a CPU.
# Seen on 2026-11-28 with jax 0.12.0.1, compiled by CUDA 13.5 for an H100, which is not needed.
# openxla/xla issue 41605.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3.12}" -m venv "$folder"
"$folder/bin/pip" install --quiet jax==0.12.0.1 jax-cuda13-plugin==0.12.0.1 \
  jax-cuda13-pjrt==0.12.0.1 nvidia-cuda-nvcc==13.5.37 nvidia-nvvm==13.5.37
# Describes an H100 to XLA.
export TARGET="$(dirname "$0")/../lab/h100/target.txtpb" JAX_PLATFORMS=cpu
"$folder/bin/python" - <<'END'
import os
import re
from pathlib import Path

import jax
import jax.numpy as jnp
from jax.experimental import topologies
from jax.sharding import SingleDeviceSharding

target = Path(os.environ["TARGET"]).read_text()
h100s = topologies.get_topology_desc(
    "h100", platform="cuda", topology="1x1x8", target_config=target
).devices

DEVICES = {"H100": h100s[0], "CPU": jax.devices("cpu")[0]}


def cast(x, y):
    return x.astype(jnp.bfloat16).astype(jnp.float32) + y


def product(x, y):
    return (x * y).astype(jnp.float32)


def rounds(function, dtype, device, excess):
    sharding = SingleDeviceSharding(DEVICES[device])
    x = jax.ShapeDtypeStruct((4096,), dtype, sharding=sharding)
    options = {"xla_allow_excess_precision": excess}
    if device == "H100":
        options["xla_gpu_autotune_level"] = 0
    text = jax.jit(function).lower(x, x).compile(compiler_options=options).as_text()
    return bool(re.search(r" = bf16\[\S* (convert|multiply)\(", text))


seen = {}
for device in DEVICES:
    for excess in True, False:
        seen[device, excess] = (
            rounds(cast, "float32", device, excess),
            rounds(product, "bfloat16", device, excess),
        )
expected = {
    ("H100", True): (False, True),
    ("H100", False): (True, True),
    ("CPU", True): (True, False),
    ("CPU", False): (True, True),
}
print("whether a cast and a product round, by device and xla_allow_excess_precision:")
print("jax", jax.__version__, seen)
if seen != expected:
    raise SystemExit(f"changed: it was {expected}")
END
