#!/usr/bin/env bash
# On a CPU, neither the precision "bfloat16" nor the algorithm BF16_BF16_F32 of a product rounds
# anything: they give the bits of float32. Only a cast of the operands does.
# Hurts: who asks for a GPU's precision in a test on a CPU, and believes to have tested it.
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

a, b = (jax.random.normal(key, (256, 256)) for key in jax.random.split(jax.random.key(0)))
preset = jax.lax.DotAlgorithmPreset.BF16_BF16_F32
plain = jnp.dot(a, b)
rounded = jnp.dot(
    a.astype(jnp.bfloat16), b.astype(jnp.bfloat16), preferred_element_type=jnp.float32
)
others = {
    "precision bfloat16": jnp.dot(a, b, precision="bfloat16"),
    "BF16_BF16_F32": jax.lax.dot(a, b, precision=preset),
    "cast": rounded,
}
for name, other in others.items():
    print(f"{name}: largest difference {jnp.abs(other - plain).max():.1e}")
seen = {name: bool((other == plain).all()) for name, other in others.items()}
expected = {"precision bfloat16": True, "BF16_BF16_F32": True, "cast": False}
print("jax", jax.__version__, seen)
if seen != expected:
    raise SystemExit(f"changed: it was {expected}")
END
