#!/usr/bin/env bash
# psum and psum_scatter of bfloat16 stay bfloat16 on eight H100s, where every addition rounds, and
# are done in float32 on CPUs, where the sum is rounded once. So a test on simulated devices is
# exact where the run is not: added in turn, half of the sums of eight differ in their last bit.
# Hurts: who reduces gradients in bfloat16, and takes the CPU's agreement for the GPU's.
# Seen on 2026-11-28 with jax 0.12.0.1, compiled by CUDA 13.5 for an H100, which is not needed.
# jax-ml/jax issue 27496.
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
import ml_dtypes
import numpy as np
from jax.experimental import topologies
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

target = Path(os.environ["TARGET"]).read_text()
h100s = topologies.get_topology_desc(
    "h100", platform="cuda", topology="1x1x8", target_config=target
).devices

jax.config.update("jax_num_cpu_devices", 8)
devices = {"H100": h100s, "CPU": jax.devices("cpu")}


def dtypes(function, device):
    mesh = Mesh(np.array(devices[device]), ("d",), axis_types=(AxisType.Auto,))
    sharded = PartitionSpec("d")
    x = jax.ShapeDtypeStruct((8, 4096), jnp.bfloat16, sharding=NamedSharding(mesh, sharded))
    mapped = jax.shard_map(function, mesh=mesh, in_specs=sharded, out_specs=sharded)
    text = jax.jit(mapped).lower(x).compile().as_text()
    return re.findall(r" = \(?(\w+)\[\S* (?:all-reduce|reduce-scatter)\S*\(", text)


def all_reduce(x):
    return jax.lax.psum(x, "d")


def reduce_scatter(x):
    return jax.lax.psum_scatter(x, "d", scatter_dimension=1, tiled=True)


seen = {}
for device in devices:
    seen[device] = dtypes(all_reduce, device) + dtypes(reduce_scatter, device)
numbers = np.random.default_rng(0).normal(size=(8, 4096)).astype(ml_dtypes.bfloat16)
in_turn = numbers[0]
for row in numbers[1:]:
    in_turn = in_turn + row
once = numbers.astype(np.float32).sum(0).astype(ml_dtypes.bfloat16)
seen["sums of 4,096 that change if added in turn"] = int((in_turn != once).sum())
expected = {
    "H100": ["bf16", "bf16"],
    "CPU": ["f32", "f32"],
    "sums of 4,096 that change if added in turn": 2166,
}
print("jax", jax.__version__, seen)
if seen != expected:
    raise SystemExit(f"changed: it was {expected}")
END
