#!/usr/bin/env bash
# With gloo and four processes on CPUs, psum_scatter is not a slice of psum: both add in float32,
# but in other orders. With four simulated devices in one process they are the same bits.
# Hurts: who compares a sharded with a replicated optimizer bit by bit in tests with processes.
# Seen on 2026-11-28 with jax 0.10.2 (Python 3.11) and jax 0.12.0.1 (Python 3.12).
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3}" -m venv "$folder"
"$folder/bin/pip" install --quiet 'jax==0.10.2; python_version < "3.12"' \
  'jax==0.12.0.1; python_version >= "3.12"'
export FOLDER=$folder
cat > "$folder/worker.py" <<'END'
import sys

import jax
import numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec

process, processes, port = (int(word) for word in sys.argv[1:])
if processes > 1:
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(f"127.0.0.1:{port}", processes, process)
else:
    jax.config.update("jax_num_cpu_devices", 4)
mesh = jax.make_mesh((4,), ("d",), axis_types=(AxisType.Auto,))
numbers = np.random.default_rng(0).normal(size=(4, 1024)).astype("float32")
mine = numbers if processes == 1 else numbers[[process]]
array = jax.make_array_from_process_local_data(
    NamedSharding(mesh, PartitionSpec("d")), mine, numbers.shape
)


def differing(x):
    whole = jax.lax.psum(x[0], "d")
    part = jax.lax.psum_scatter(x[0], "d", tiled=True)
    slice_of_whole = jax.lax.dynamic_slice_in_dim(whole, jax.lax.axis_index("d") * 256, 256)
    return (part != slice_of_whole).sum(keepdims=True)


count = jax.jit(
    jax.shard_map(differing, mesh=mesh, in_specs=PartitionSpec("d"), out_specs=PartitionSpec("d"))
)(array)
print(sum(int(shard.data[0]) for shard in count.addressable_shards))
END
"$folder/bin/python" - <<'END'
import os
import socket
import subprocess
import sys

import jax

with socket.socket() as free:
    free.bind(("127.0.0.1", 0))
    port = free.getsockname()[1]
folder = os.environ["FOLDER"]


def differing(processes):
    workers = [
        subprocess.Popen(
            [sys.executable, f"{folder}/worker.py", str(process), str(processes), str(port)],
            stdout=subprocess.PIPE,
            text=True,
        )
        for process in range(processes)
    ]
    return sum(int(worker.communicate()[0].split()[-1]) for worker in workers)


numbers = {"gloo": differing(4), "simulated": differing(1)}
print("of 1,024 numbers, these differ:", numbers)
seen = {name: number > 0 for name, number in numbers.items()}
expected = {"gloo": True, "simulated": False}
print("jax", jax.__version__, seen)
if seen != expected:
    raise SystemExit(f"changed: it was {expected}")
END
