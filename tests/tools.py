"""What several tests need: a mesh of simulated devices, miniatures of `tiny`, weights, shards."""

import contextlib
import dataclasses
import functools
import os
import subprocess
import sys
import zlib
from collections.abc import Iterator
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import train_gpt

ROOT = Path(__file__).resolve().parent.parent
FORMATS = "compute", "mlp_forward", "head_forward", "head_backward"
FLOAT32 = dict.fromkeys(FORMATS, "float32")
MINI = dataclasses.replace(
    train_gpt.PRESETS["tiny"], plan="Spxv0 Lkqxgb Snpbv1 -<1 Sxb@2 Lkgdmv2@2", D=32, H=2, F=64, E=8,
    bigrams=512, batch=8, microbatch=8, adam_lr=0.008, head_chunk=32, dc_window=12,
    attention="xla", val_T=128, val_tokens=2048, seed=3,
    stages="10 512 8 16 0 1 0,1,.5:0 / 10 512 16 48 0 1.5 0,1 / 0 512 16 64 0 1 0,1", steps=20,
    flat=8, fallen=18, momentum_steps=5, momentum_fall=4, untie=13,
)  # fmt: skip
MINI32 = dataclasses.replace(MINI, **FLOAT32)


SMALL = (  # flags for train_gpt.py: a run of seconds
    "--D 32 --H 2 --F 64 --E 8 --bigrams 512 --head_chunk 32 --dc_window 12 --val_T 64 "
    "--val_tokens 1024 --batch 8 --target 0"
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
    return train_gpt.make_mesh(jax.devices()[:devices])


def sequences(c, T: int, seed: int = 0, documents: int = 4, count: int = 8) -> np.ndarray:
    """(count, T + 1) random tokens in which documents start at random places."""
    rng = np.random.default_rng(seed)
    tokens = rng.integers(0, c.vocab - 1, (count, T + 1)).astype(np.int32)
    tokens[tokens == c.eot] = 0
    for row in tokens:
        row[rng.choice(T, documents, replace=False)] = c.eot
    return tokens


def place_on(mesh: Mesh, tokens: np.ndarray) -> jax.Array:
    return jax.device_put(tokens, NamedSharding(mesh, PartitionSpec("fsdp")))


@contextlib.contextmanager
def unoptimized() -> Iterator[None]:
    """Programs that are compiled within compile in half the time and compute the same."""
    jax.config.update("jax_disable_most_optimizations", True)
    try:
        yield
    finally:
        jax.config.update("jax_disable_most_optimizations", False)


def noise(name: str, shape: tuple[int, ...], seed: int = 0) -> np.ndarray:
    return np.random.default_rng([zlib.crc32(name.encode()), seed]).normal(size=shape).astype("f4")


def whole_loss(weights: dict, tokens, *rest) -> jax.Array:
    """loss_fn of weights as from gather."""
    return train_gpt.loss_fn(train_gpt.read_pairs(weights, tokens, rest[1]), tokens, *rest)


def whole_weights(c: train_gpt.Config, seed: int = 0) -> dict:
    """Weights as `gather` returns them, all of them random, so that no path can hide."""
    weights = {}
    for name, row in train_gpt.param_table(c).items():
        if row.optimizer == "muon":
            matrices = jnp.asarray(c.D**-0.5 * noise(name, row.shape, seed))
            weights[name] = [*matrices]
        elif row.spec == PartitionSpec("fsdp"):
            weights[name] = jnp.asarray(0.3 * noise(name, row.stored_shape, seed))
        else:  # around their first values: some of these are there to keep the stream in bounds
            first = np.asarray(row.init(jax.random.key(seed), row.shape))
            weights[name] = jnp.asarray(first + 0.2 * noise(name, row.shape, seed))
    return weights


@functools.cache
def random_params(c: train_gpt.Config) -> dict[str, np.ndarray]:
    """Stored parameters of which none is zero: no gradient is 0 but for rounding, of which Adam
    would make full steps."""
    params = train_gpt.initial_state(np.uint32(c.seed), c).params
    params = {name: np.asarray(p) + 0.05 * noise(name, p.shape) for name, p in params.items()}
    return params | dict(embed=params["head"])


def make_random_state(c: train_gpt.Config, mesh: Mesh) -> train_gpt.State:
    """A state with these parameters; the tables are theirs, and embed is head."""
    state, params = train_gpt.make_state(c, mesh), random_params(c)
    put = lambda name, like: jax.device_put(params[name].astype(like.dtype), like.sharding)
    return state._replace(
        params={name: put(name, like) for name, like in state.params.items()},
        tables={name: put(name, like) for name, like in state.tables.items()},
    )


def basic(tmp_path: Path, name: str, *flags: str, plant: tuple[str, str] | None = None):
    """A file of basics/ run as its readers do, in a process that has to ask for its devices itself;
    if wanted with a fault (old, new) planted in its text. Returns subprocess.CompletedProcess."""
    source = (ROOT / f"basics/{name}.py").read_text(encoding="utf-8")
    if plant:
        assert source.count(plant[0]) == 1, plant
        source = source.replace(*plant)
    (tmp_path / "basics").mkdir(exist_ok=True)
    (tmp_path / "data").exists() or (tmp_path / "data").symlink_to(ROOT / "data")
    (tmp_path / f"basics/{name}.py").write_text(source, encoding="utf-8")
    hidden = "JAX_PLATFORMS", "JAX_NUM_CPU_DEVICES", "XLA_FLAGS"
    env = {key: value for key, value in os.environ.items() if key not in hidden}
    return subprocess.run([sys.executable, f"basics/{name}.py", *flags], cwd=tmp_path, env=env,
                          capture_output=True, text=True, timeout=300)  # fmt: skip
