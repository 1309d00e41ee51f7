#!/usr/bin/env bash
# optax's Muon takes rows as inputs. A matrix in torch's orientation, (outputs, inputs), gets
# another scale: half for a layer that widens four times, double for one that narrows. Shapes and
# losses look right. weight_dimension_numbers says which axis is which; consistent_rms=0.2 does not
# ask.
# Hurts: who ports a PyTorch trainer with its weights as they are.
# Seen on 2026-11-28 with optax 0.2.8 and jax 0.10.2 (Python 3.11) and 0.12.0.1 (Python 3.12).
# google-deepmind/optax PR 1249.
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
from optax import contrib

torch_axes = contrib.MuonDimensionNumbers(reduction_axis=1, output_axis=0)


def norm(gradient, **options):
    tx = contrib.muon(1.0, **options)
    return float(jnp.linalg.norm(tx.update(gradient, tx.init(gradient), gradient)[0]))


seen = {}
for outputs, inputs in (256, 64), (64, 256):
    gradient = jax.random.normal(jax.random.key(0), (outputs, inputs))
    right = norm(gradient.T)  # in the orientation that optax wants
    ratios = (
        norm(gradient) / right,
        norm(gradient, muon_weight_dimension_numbers=torch_axes) / right,
        norm(gradient, consistent_rms=0.2) / norm(gradient.T, consistent_rms=0.2),
    )
    seen[outputs, inputs] = tuple(round(ratio, 2) for ratio in ratios)
expected = {(256, 64): (0.5, 1.0, 1.0), (64, 256): (2.0, 1.0, 1.0)}
print("update of (outputs, inputs) over that of its transpose; with axes named; consistent_rms:")
print("optax", optax.__version__, "jax", jax.__version__, seen)
if seen != expected:
    raise SystemExit(f"changed: it was {expected}")
END
