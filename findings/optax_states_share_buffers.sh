#!/usr/bin/env bash
# Six of optax's optimizers start with states that share buffers with the parameters or each other,
# so the first jitted step that donates both raises "Attempt to donate the same buffer twice".
# jax.jit(tx.init) separates them. adam, muon, ademamix and schedule_free_adamw work either way.
# Hurts: who tries another optimizer in a training loop that donates.
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
from optax import contrib

OPTIMIZERS = {
    "prodigy": contrib.prodigy(),
    "dog": contrib.dog(1.0),
    "dowg": contrib.dowg(1.0),
    "cocob": contrib.cocob(),
    "mechanize": contrib.mechanize(optax.adam(1e-3)),
    "lookahead": optax.lookahead(optax.adam(1e-3), 5, 0.5),
    "adam": optax.adam(1e-3),
    "muon": contrib.muon(1e-3),
    "ademamix": contrib.ademamix(1e-3),
    "schedule_free_adamw": contrib.schedule_free_adamw(1e-3),
}


def first_step(name, jit_init):
    tx = OPTIMIZERS[name]

    def make():
        params = {"w": jnp.ones((8, 8)), "b": jnp.ones(8)}
        if name == "lookahead":
            params = optax.LookaheadParams.init_synced(params)
        return params, tx.init(params)

    def step(params, state):
        fast = params.fast if name == "lookahead" else params
        updates, state = tx.update(fast, state, params)
        return optax.apply_updates(params, updates), state

    params, state = jax.jit(make)() if jit_init else make()
    try:
        jax.jit(step, donate_argnums=(0, 1))(params, state)
    except jax.errors.JaxRuntimeError as error:
        assert "donate the same buffer twice" in str(error)
        return "raises"
    return "works"


seen = {name: (first_step(name, False), first_step(name, True)) for name in OPTIMIZERS}
expected = {name: ("works", "works") for name in OPTIMIZERS}
for name in "prodigy", "dog", "dowg", "cocob", "mechanize", "lookahead":
    expected[name] = "raises", "works"
print("a donated step, started as it is and by jit:")
print("optax", optax.__version__, "jax", jax.__version__, seen)
if seen != expected:
    raise SystemExit(f"changed: it was {expected}")
END
