#!/usr/bin/env bash
# Two saves of the same weights by safetensors differ in their bytes as soon as the metadata has two
# entries, because it is written in random order, even within a process. With one entry they do not.
# Hurts: who identifies weights, or a checkpoint in a cache, by the file's hash.
# Seen on 2026-11-28 with safetensors 0.8.0. safetensors/safetensors issue 584, PR 790 (both open).
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3}" -m venv "$folder"
"$folder/bin/pip" install --quiet safetensors==0.8.0 numpy==2.4.6
"$folder/bin/python" - <<'END'
import numpy as np
import safetensors
from safetensors.numpy import save

weights = {"w": np.ones((4, 4), np.float32)}
seen = []
for entries in 0, 1, 2, 3:
    metadata = {f"key {number}": "value" for number in range(entries)}
    seen.append(len({save(weights, metadata) for _ in range(200)}))
expected = [1, 1, 2, 6]
print("safetensors", safetensors.__version__)
print("different files among 200 by entries of the metadata:", dict(enumerate(seen)))
if seen != expected:
    raise SystemExit(f"changed: it was {expected}")
END
