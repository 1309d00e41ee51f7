#!/usr/bin/env bash
# For an H100, XLA makes FP8 products of e4m3 with e4m3 and of e4m3 with e5m2, either way round. Two
# operands in e5m2, or one in FP8 and one in bfloat16, are converted to 16 bits first: right,
# silent, and without the speed that FP8 was for. (Products are not made by Triton here.)
# Hurts: who keeps gradients and activations in e5m2, or quantises only the weights.
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
OPTIONS = {"xla_gpu_autotune_level": 0, "xla_gpu_enable_triton_gemm": False}


def product(a, b):
    return jax.lax.dot(a, b, preferred_element_type=jnp.bfloat16)


def kind(left, right):
    a = jax.ShapeDtypeStruct((4096, 1024), left, sharding=sharding)
    b = jax.ShapeDtypeStruct((1024, 4096), right, sharding=sharding)
    text = jax.jit(product).lower(a, b).compile(compiler_options=OPTIONS).as_text()
    assert "__cublas$lt$matmul" in text
    return "FP8" if "__cublas$lt$matmul$f8" in text else "16 bits"


e4, e5 = "float8_e4m3fn", "float8_e5m2"
expected = {
    (e4, e4): "FP8",
    (e4, e5): "FP8",
    (e5, e4): "FP8",
    (e5, e5): "16 bits",
    (e4, "bfloat16"): "16 bits",
}
seen = {pair: kind(*pair) for pair in expected}
print("jax", jax.__version__, seen)
if seen != expected:
    raise SystemExit(f"changed: it was {expected}")
END
