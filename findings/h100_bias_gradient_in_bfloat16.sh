#!/usr/bin/env bash
# The gradient of a bfloat16 bias is a sum over all tokens that JAX writes in bfloat16, and an
# H100's program adds it so; jnp.sum of the same numbers is added in float32. A CPU adds both in
# float32, so no test there can see it. A bias in float32, cast after the broadcast, is added in
# float32. JAX finds such sums if jax_allow_f16_reductions is False: it raises.
# Hurts: who casts all parameters to bfloat16, biases and gains of norms included.
# Seen on 2026-11-28 with jax 0.12.0.1, compiled by CUDA 13.5 for an H100, which is not needed.
# jax-ml/jax issue 38885 is the same of jnp.max.
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

TOKENS, D = 16384, 768
DEVICES = {"H100": h100s[0], "CPU": jax.devices("cpu")[0]}


def loss(bias, x):
    wide = jnp.broadcast_to(bias, x.shape).astype(x.dtype)
    return jnp.tanh(x + wide).astype(jnp.float32).sum()


def column_sums(_, x):
    return jnp.tanh(x).sum(0)


def dtypes_of_sums(function, dtype, device):
    sharding = SingleDeviceSharding(DEVICES[device])
    bias = jax.ShapeDtypeStruct((D,), dtype, sharding=sharding)
    x = jax.ShapeDtypeStruct((TOKENS, D), jnp.bfloat16, sharding=sharding)
    options = {"xla_gpu_autotune_level": 0} if device == "H100" else {}
    text = jax.jit(function).lower(bias, x).compile(compiler_options=options).as_text()
    return sorted(set(re.findall(r" = (\w+)\[[\d,]*\]\S* reduce\(", text)))


seen = {}
for device in DEVICES:
    seen[f"{device}, bfloat16 bias"] = dtypes_of_sums(jax.grad(loss), "bfloat16", device)
    seen[f"{device}, float32 bias"] = dtypes_of_sums(jax.grad(loss), "float32", device)
    seen[f"{device}, jnp.sum"] = dtypes_of_sums(column_sums, "bfloat16", device)
expected = {name: ["f32"] for name in seen} | {"H100, bfloat16 bias": ["bf16"]}
jax.config.update("jax_allow_f16_reductions", False)
try:
    jax.grad(loss)(jnp.zeros(D, jnp.bfloat16), jnp.zeros((TOKENS, D), jnp.bfloat16))
    raise SystemExit("changed: jax_allow_f16_reductions=False raised")
except ValueError as error:
    print(error)

print("jax", jax.__version__, seen)
if seen != expected:
    raise SystemExit(f"changed: it was {expected}")
END
