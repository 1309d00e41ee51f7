#!/usr/bin/env bash
# On a CPU, a NumPy view of a JAX array that is still alive cancels its donation without a word: the
# array lives on, and the step needs memory for both. A copy, or a dropped view, does not.
# Hurts: who keeps np.asarray(weights), as for a checkpoint, and counts on donation.
# Seen on 2026-11-28 with jax 0.10.2 (Python 3.11) and jax 0.12.0.1 (Python 3.12).
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3}" -m venv "$folder"
"$folder/bin/pip" install --quiet 'jax==0.10.2; python_version < "3.12"' \
  'jax==0.12.0.1; python_version >= "3.12"'
"$folder/bin/python" - <<'END'
import warnings

import jax
import jax.numpy as jnp
import numpy as np

warnings.simplefilter("error")
make = jax.jit(lambda: jnp.ones(1 << 20))
step = jax.jit(lambda x: x + 1, donate_argnums=0)
seen = {}
for name, keep in {"nothing": type, "a view": np.asarray, "a copy": np.array}.items():
    x = make()
    kept = keep(x)
    step(x).block_until_ready()
    seen[name] = x.is_deleted()
x = make()
mean = np.asarray(x).mean()
step(x).block_until_ready()
seen["the mean of a view"] = x.is_deleted()
expected = {"nothing": True, "a view": False, "a copy": True, "the mean of a view": True}
print("donated while we keep:")
print("jax", jax.__version__, seen)
if seen != expected:
    raise SystemExit(f"changed: it was {expected}")
END
