#!/usr/bin/env bash
# On CPUs, a program that came out of JAX's compilation cache can be serialized and loaded, and then
# raises at its first call: kernels are missing. The same program, freshly compiled, is whole.
# Hurts: who ships compiled programs, or saves them to skip tracing at the next start.
# Seen on 2026-11-29 with jax 0.10.2 (Python 3.11) and jax 0.12.0.1 (Python 3.12).
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3}" -m venv "$folder"
"$folder/bin/pip" install --quiet 'jax==0.10.2; python_version < "3.12"' \
  'jax==0.12.0.1; python_version >= "3.12"'
cat >"$folder/program.py" <<'END'
import pickle
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
from jax.experimental import serialize_executable

_, task, folder = sys.argv
file = Path(folder, "program")
x = jnp.ones((64, 64))


def many_kernels(x):
    for n in range(24):
        x = jnp.sin(x @ x) / (n + 1) + jnp.cumsum(x * n, axis=0)
    return x


if task == "load":
    program = serialize_executable.deserialize_and_load(*pickle.loads(file.read_bytes()))
    try:
        jax.block_until_ready(program(x))
        print("runs")
    except jax.errors.JaxRuntimeError as error:
        print(str(error)[:90], file=sys.stderr)
        print("lacks a kernel" if "not found" in str(error) else "raises")
    sys.exit()
jax.config.update("jax_compilation_cache_dir", f"{folder}/cache")
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
program = jax.jit(many_kernels).lower(x).compile()
file.write_bytes(pickle.dumps(serialize_executable.serialize(program)))
END
run() {
  "$folder/bin/python" "$folder/program.py" "$1" "$folder"
}
run save
fresh=$(run load)
run save # now the program comes out of the cache
cached=$(run load)
seen="fresh: $fresh; from the cache: $cached"
echo "$("$folder/bin/python" -c 'import jax; print("jax", jax.__version__)'), $seen"
[ "$seen" = "fresh: runs; from the cache: lacks a kernel" ]
