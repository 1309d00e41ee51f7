#!/usr/bin/env bash
# A stack of matrices in one array is one parameter for optax. adafactor factors the two largest
# axes, of which one is the stack's if it is long, as for 256 experts of 192 x 384. lamb has one
# trust ratio for all: with weights 100 times as large in one of four layers, the others' steps are
# 51 times as long. jax.vmap of the update keeps them apart.
# Hurts: who stacks layers for lax.scan, or experts.
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

state = optax.scale_by_factored_rms().init(jnp.zeros((256, 192, 384)))
seen = {"adafactor": (state.v_row.shape, state.v_col.shape)}


def steps(tx, params, gradients):
    return tx.update(gradients, tx.init(params), params)[0]


lamb = optax.lamb(1e-3, weight_decay=0.0)
keys = jax.random.split(jax.random.key(0))
params, gradients = (jax.random.normal(key, (4, 8, 8)) for key in keys)
larger = params.at[0].multiply(100)
for name, function in {
    "lamb": lambda params: steps(lamb, params, gradients),
    "lamb, vmap": lambda params: jax.vmap(lambda p, g: steps(lamb, p, g))(params, gradients),
}.items():
    ratio = jnp.linalg.norm(function(larger)[1:]) / jnp.linalg.norm(function(params)[1:])
    seen[name] = round(float(ratio))
expected = {"adafactor": ((256, 192), (192, 384)), "lamb": 51, "lamb, vmap": 1}
print("shapes of adafactor's rows and columns; growth of layers 1 to 3 if layer 0 is larger:")
print("optax", optax.__version__, "jax", jax.__version__, seen)
if seen != expected:
    raise SystemExit(f"changed: it was {expected}")
END
