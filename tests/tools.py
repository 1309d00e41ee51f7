"""What several tests need: a mesh of simulated devices, miniatures of `tiny`, weights, shards."""

import dataclasses
import zlib
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

import train_gpt

FLOAT32 = dict(compute="float32", head_forward="float32", head_backward="float32")
MINI = dataclasses.replace(
    train_gpt.PRESETS["tiny"], plan="Lv0 S L<1 -<0 Sv0", D=32, H=2, F=64, T=64, head_chunk=32,
    window=48, window_block=8, attention="xla", steps=20, val_T=128, val_tokens=2048, seed=3,
)  # fmt: skip
MINI32 = dataclasses.replace(MINI, **FLOAT32)


SMALL = (  # flags for train_gpt.py: a run of seconds
    "--D 32 --H 2 --F 64 --T 32 --head_chunk 32 --window 16 --window_block 8 --val_T 64 "
    "--val_tokens 1024 --target 0"
).split()


def write_shard(path: Path, tokens, magic=20240520, version=1, count=None) -> Path:
    header = np.zeros(256, "<i4")
    header[:3] = magic, version, len(tokens) if count is None else count
    path.write_bytes(header.tobytes() + np.asarray(tokens, "<u2").tobytes())
    return path


def text(length: int, first: int = 0) -> np.ndarray:
    """Tokens that can be learned, of documents of 50."""
    return np.where(np.arange(length) % 50, (np.arange(length) + first) % 16, 256)


def make_mesh(devices: int) -> Mesh:
    return Mesh(np.array(jax.devices()[:devices]), ("fsdp",), axis_types=(AxisType.Auto,))


def sequences(c: train_gpt.Config, T: int, seed: int = 0, documents: int = 4) -> np.ndarray:
    """(8, T + 1) random tokens in which documents start at random places."""
    rng = np.random.default_rng(seed)
    tokens = rng.integers(0, c.vocab - 1, (8, T + 1)).astype(np.int32)
    tokens[tokens == c.eot] = 0
    for row in tokens:
        row[rng.choice(T, documents, replace=False)] = c.eot
    return tokens


def place_on(mesh: Mesh, tokens: np.ndarray) -> jax.Array:
    return jax.device_put(tokens, NamedSharding(mesh, PartitionSpec("fsdp")))


def whole_weights(c: train_gpt.Config, seed: int = 0) -> dict:
    """Weights as `gather` returns them, all of them random, so that no path can hide."""
    keys = iter(jax.random.split(jax.random.key(seed), 100))
    weights = {}
    for name, row in train_gpt.param_table(c).items():
        scale = {"embed": 1.0, "values": 1.0, "head": 0.3}.get(name, row.shape[-1] ** -0.5)
        shape = row.shape if row.optimizer == "muon" else row.stored_shape
        w = scale * jax.random.normal(next(keys), shape, jnp.float32)
        if row.spec == PartitionSpec():
            w = 0.5 + 0.1 * w  # the scalars
        weights[name] = list(w) if len(shape) == 3 else w
    return weights


def make_random_state(c: train_gpt.Config, mesh: Mesh) -> train_gpt.State:
    """A state in which no weight is zero. From the real one the first gradients of the scalars are
    zero but for rounding (x is a multiple of x0, and the last norm forgets the multiple), and Adam
    makes full steps of the sign of that noise."""
    state = train_gpt.make_state(c, mesh)
    noise = {k: np.random.default_rng(zlib.crc32(k.encode())) for k in state.params}
    params = {
        k: jax.device_put(
            np.asarray(p) + 0.05 * noise[k].normal(size=p.shape).astype("f4"), p.sharding
        )
        for k, p in state.params.items()
    }
    embed = jax.device_put(np.asarray(params["embed"].astype(c.compute)), state.embed.sharding)
    return state._replace(params=params, embed=embed)
