#!/usr/bin/env bash
# Compiled for an H100 without one, autotuning must be off, and then every product becomes a Triton
# kernel, in bfloat16 and in float32; cuBLAS has none. With Triton for products off, all are
# cuBLASLt's.
# Hurts: who counts kernels, memory or workspaces in a program compiled ahead of time.
# Seen on 2026-11-28 with jax 0.12.0.1, compiled by CUDA 13.5 for an H100, which is not needed.
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
from pathlib import Path

import jax
import jax.numpy as jnp
from jax.experimental import topologies
from jax.sharding import SingleDeviceSharding

target = Path(os.environ["TARGET"]).read_text()
h100s = topologies.get_topology_desc(
    "h100", platform="cuda", topology="1x1x8", target_config=target
).devices

sharding = SingleDeviceSharding(h100s[0])


def compile_product(dtype, **options):
    a, b = (jax.ShapeDtypeStruct(shape, dtype, sharding=sharding) for shape in SHAPES)
    options["xla_gpu_autotune_level"] = 0
    text = jax.jit(jnp.matmul).lower(a, b).compile(compiler_options=options).as_text()
    kinds = {"Triton": "__triton", "cuBLASLt": "__cublas$lt$matmul"}
    return [kind for kind, mark in kinds.items() if mark in text]


SHAPES = (4096, 1024), (1024, 4096)
seen = {}
for dtype in "bfloat16", "float32":
    seen[dtype] = compile_product(dtype)
    seen[f"{dtype}, Triton off"] = compile_product(dtype, xla_gpu_enable_triton_gemm=False)
expected = {}
for dtype in "bfloat16", "float32":
    expected[dtype] = ["Triton"]
    expected[f"{dtype}, Triton off"] = ["cuBLASLt"]

print("jax", jax.__version__, seen)
if seen != expected:
    raise SystemExit(f"changed: it was {expected}")
END
