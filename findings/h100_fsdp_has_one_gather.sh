#!/usr/bin/env bash
# For eight H100s, XLA joins the all-gathers of six layers of 2 MB, one per layer in the program,
# into one synchronous gather, and their reduce-scatters into one: nothing overlaps, and all weights
# are there at once. XLA's scheduler that hides latencies changes nothing. A threshold of one byte
# keeps six of each, of which two gathers are asynchronous.
# Hurts: who writes FSDP for a small model, and expects a layer's gather behind another's products.
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
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import topologies
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

target = Path(os.environ["TARGET"]).read_text()
h100s = topologies.get_topology_desc(
    "h100", platform="cuda", topology="1x1x8", target_config=target
).devices

LAYERS, D = 6, 1024
mesh = Mesh(np.array(h100s), ("fsdp",), axis_types=(AxisType.Auto,))


def loss(weights, x):
    for w in weights:
        x = jnp.tanh(x @ jax.lax.all_gather(w, "fsdp", tiled=True))
    return x.astype(jnp.float32).mean()


def step(weights, x):
    gradients = jax.grad(loss)(weights, x)
    return [w - g for w, g in zip(weights, gradients, strict=True)]


sharded = PartitionSpec("fsdp")
mapped = jax.shard_map(step, mesh=mesh, in_specs=(sharded, sharded), out_specs=sharded)


def collectives(**options):
    where = NamedSharding(mesh, sharded)
    weights = [jax.ShapeDtypeStruct((D, D), jnp.bfloat16, sharding=where)] * LAYERS
    x = jax.ShapeDtypeStruct((8 * 2048, D), jnp.bfloat16, sharding=where)
    options["xla_gpu_autotune_level"] = 0
    text = jax.jit(mapped).lower(weights, x).compile(compiler_options=options).as_text()
    gathers = re.findall(r"^.* = .* all-gather(?:-start)?\(.*$", text, re.M)
    waiting = sum('"is_sync":true' in line for line in gathers)
    return len(gathers), waiting, len(re.findall(r" reduce-scatter(?:-start)?\(", text))


seen = {
    "as it is": collectives(),
    "scheduler": collectives(xla_gpu_enable_latency_hiding_scheduler=True),
    "threshold": collectives(
        xla_gpu_all_gather_combine_threshold_bytes=1,
        xla_gpu_reduce_scatter_combine_threshold_bytes=1,
    ),
}
expected = {"as it is": (1, 1, 1), "scheduler": (1, 1, 1), "threshold": (6, 4, 6)}
print("gathers, those that are synchronous, reduce-scatters:")
print("jax", jax.__version__, seen)
if seen != expected:
    raise SystemExit(f"changed: it was {expected}")
END
