#!/usr/bin/env bash
# Mosaic GPU's interpreter on a CPU runs kernels, right and without a message, that the compiler for
# an H100 refuses: 1 MB of shared memory, rows of 5 numbers, sums, sorts, erf. Also with
# detect_races. It checks who may touch memory when, and nothing of what the chip has.
# Hurts: who writes a Pallas kernel without a GPU, and believes that the test will carry over.
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
import numpy as np
from jax.experimental import topologies
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.sharding import SingleDeviceSharding

target = Path(os.environ["TARGET"]).read_text()
h100s = topologies.get_topology_desc(
    "h100", platform="cuda", topology="1x1x8", target_config=target
).devices

sharding = SingleDeviceSharding(h100s[0])


def kernel(function, x):
    out = jax.eval_shape(function, x)

    def body(x, y, scratch):
        scratch[...] = function(x[...])
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(scratch, y)
        plgpu.wait_smem_to_gmem(0)

    scratch_types = [plgpu.SMEM(out.shape, out.dtype)]
    return plgpu.kernel(
        body, out_type=out, scratch_types=scratch_types, grid=(1,), grid_names=("i",)
    )(x)


def interpreted(function, shape):
    x = jnp.asarray(np.random.default_rng(0).normal(size=shape), jnp.float32)
    with plgpu.force_gpu_interpret_mode(plgpu.InterpretGPUParams(detect_races=True)):
        return np.allclose(kernel(function, x), function(x), atol=1e-5)


def compiled(function, shape):
    x = jax.ShapeDtypeStruct(shape, jnp.float32, sharding=sharding)
    try:
        jax.jit(lambda x: kernel(function, x)).lower(x).compile(
            compiler_options={"xla_gpu_autotune_level": 0}
        )
    except (ValueError, NotImplementedError) as error:
        print("   ", str(error).strip().partition("\n")[0][:90])
        return type(error).__name__
    return "compiles"


CASES = {
    "copy": (lambda x: x, (128, 256)),
    "exp": (jnp.exp, (128, 256)),
    "copy of 1 MB": (lambda x: x, (1024, 256)),
    "copy of 3 x 5": (lambda x: x, (3, 5)),
    "sum of rows": (lambda x: x.sum(1), (128, 256)),
    "sort": (lambda x: jnp.sort(x, -1), (128, 256)),
    "erf": (jax.lax.erf, (128, 256)),
}
seen = {}
for name, case in CASES.items():
    print(name)
    seen[name] = bool(interpreted(*case)), compiled(*case)
expected = {
    "copy": (True, "compiles"),
    "exp": (True, "compiles"),
    "copy of 1 MB": (True, "ValueError"),
    "copy of 3 x 5": (True, "ValueError"),
    "sum of rows": (True, "ValueError"),
    "sort": (True, "NotImplementedError"),
    "erf": (True, "NotImplementedError"),
}
print("whether the interpreter is right, and what the compiler says:")
print("jax", jax.__version__, seen)
if seen != expected:
    raise SystemExit(f"changed: it was {expected}")
END
