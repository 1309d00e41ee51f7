#!/usr/bin/env bash
# jax.export.export of a function that donates its argument gives one that does not: call leaves the
# argument alive, also under jit. Only jit(exported.call, donate_argnums=0) donates. No warning.
# Hurts: who ships a training step by jax.export; it holds the state twice.
# Seen on 2026-11-28 with jax 0.10.2 (Python 3.11) and jax 0.12.0.1 (Python 3.12).
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3}" -m venv "$folder"
"$folder/bin/pip" install --quiet 'jax==0.10.2; python_version < "3.12"' \
  'jax==0.12.0.1; python_version >= "3.12"'
"$folder/bin/python" - <<'END'
import jax
import jax.numpy as jnp

step = jax.jit(lambda x: x + 1, donate_argnums=0)
call = jax.export.export(step)(jax.ShapeDtypeStruct((1024,), jnp.float32)).call
seen = {}
for name, function in {
    "step": step,
    "call": call,
    "jit(call)": jax.jit(call),
    "jit(call, donate_argnums=0)": jax.jit(call, donate_argnums=0),
}.items():
    x = jnp.ones(1024)
    function(x)
    seen[name] = x.is_deleted()
expected = {"step": True, "call": False, "jit(call)": False, "jit(call, donate_argnums=0)": True}
print("donated:")
print("jax", jax.__version__, seen)
if seen != expected:
    raise SystemExit(f"changed: it was {expected}")
END
