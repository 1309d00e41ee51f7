#!/usr/bin/env bash
# Whether the package zstandard is there decides over the keys of JAX's compilation cache: after
# its installation, or on a machine without it, every program is compiled again, silently.
# Hurts: who shares a cache between machines, or wonders why a warm cache is cold.
# Seen on 2026-11-28 with zstandard 0.25.0 and jax 0.10.2 (Python 3.11) and 0.12.0.1 (Python 3.12).
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3}" -m venv "$folder"
"$folder/bin/pip" install --quiet 'jax==0.10.2; python_version < "3.12"' \
  'jax==0.12.0.1; python_version >= "3.12"'
cat > "$folder/program.py" <<'END'
import sys

import jax
import numpy as np

jax.config.update("jax_compilation_cache_dir", sys.argv[1])
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
events = []
jax.monitoring.register_event_listener(lambda event, **_: events.append(event.rpartition("/")[2]))
jax.jit(lambda x: x @ x)(np.ones((8, 8), np.float32)).block_until_ready()
events = [event for event in events if event in ("cache_hits", "cache_misses")]
print("jax", jax.__version__, *events)
END
run() { "$folder/bin/python" "$folder/program.py" "$folder/cache"; }
cold=$(run)
warm=$(run)
"$folder/bin/pip" install --quiet zstandard==0.25.0
other=$(run)
printf '%s\n' "cold: $cold" "warm: $warm" "with zstandard: $other"
expected="misses hits misses"
if [ "${cold##*_} ${warm##*_} ${other##*_}" != "$expected" ]; then
  echo "changed: it was $expected"
  exit 1
fi
