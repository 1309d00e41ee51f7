#!/usr/bin/env bash
# optax's Adam computes the bias correction 1 - b2**t in float32, so its steps are too long, by 0.07
# % for b2 = 0.99999 and 0.7 % for 0.999999, at step 100 as at step 1. (For a constant gradient
# without eps, the exact update is 1.)
# Hurts: who compares trajectories with another trainer, or uses a long average.
# Seen on 2026-11-28 with optax 0.2.8 and jax 0.10.2 (Python 3.11) and 0.12.0.1 (Python 3.12).
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3}" -m venv "$folder"
"$folder/bin/pip" install --quiet 'jax==0.10.2; python_version < "3.12"' \
  'jax==0.12.0.1; python_version >= "3.12"' optax==0.2.8
"$folder/bin/python" - <<'END'
import jax
import jax.numpy as jnp
import optax

seen = {}
for b2 in 0.999, 0.9999, 0.99999, 0.999999:
    tx = optax.scale_by_adam(b2=b2, eps=0.0)
    gradient = jnp.ones(4)
    state = tx.init(gradient)
    errors = []
    for _ in range(100):
        update, state = tx.update(gradient, state)
        errors.append(f"{float(update[0]) - 1:.0e}")
    seen[b2] = errors[0], errors[-1]
expected = {
    0.999: ("-7e-06", "-7e-06"),
    0.9999: ("8e-05", "8e-05"),
    0.99999: ("7e-04", "7e-04"),
    0.999999: ("7e-03", "7e-03"),
}
print("error of the update at steps 1 and 100 by b2:")
print("optax", optax.__version__, "jax", jax.__version__, seen)
if seen != expected:
    raise SystemExit(f"changed: it was {expected}")
END
