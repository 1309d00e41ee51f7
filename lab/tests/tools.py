"""What several test files need: copies of train_gpt.py as modules, random weights and tokens."""

import importlib.util
import sys
import tempfile
import zlib
from pathlib import Path
from types import ModuleType

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import train_gpt
from train_gpt import BANK, EXCHANGED, LOOKUP

ROOT = Path(__file__).resolve().parent.parent.parent
UPSTREAM92 = ROOT / "records/upstream92"
FORMATS = "compute", "head_forward", "head_backward"
FLOAT32 = dict.fromkeys(FORMATS, "float32")


def import_source(source: str, name: str) -> ModuleType:
    """Imports a copy of train_gpt.py."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "train_gpt.py")
        path.write_text(source, encoding="utf-8")
        spec = importlib.util.spec_from_file_location(name, path)
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module  # dataclasses look it up
        spec.loader.exec_module(module)
    return module


def make_mesh(devices: int) -> Mesh:
    """A mesh of some devices."""
    return train_gpt.make_mesh(jax.devices()[:devices])


def sequences(c, T: int, seed: int = 0, documents: int = 4, count: int = 8) -> np.ndarray:
    """(count, T + 1) random tokens in which documents start at random places. Six tokens are there
    twice, for [pointer]."""
    rng = np.random.default_rng(seed)
    tokens = rng.integers(0, c.vocab - 1, (count, T + 1)).astype(np.int32)
    tokens[tokens == c.eot] = 0
    if T >= 12:
        tokens[:, 6:12] = tokens[:, :6]
    for row in tokens:
        row[rng.choice(T, documents, replace=False)] = c.eot
    return tokens


def place_on(mesh: Mesh, tokens: np.ndarray) -> jax.Array:
    """A batch, shared among the devices."""
    return jax.device_put(tokens, NamedSharding(mesh, PartitionSpec("fsdp")))


def noise(name: str, shape: tuple[int, ...], seed: int = 0) -> np.ndarray:
    """Normal numbers that depend on the name and the seed alone."""
    return np.random.default_rng([zlib.crc32(name.encode()), seed]).normal(size=shape).astype("f4")


def ngram_rows(w: dict, tokens: jax.Array, c) -> dict:
    """Weights as forward() takes them: with the rows of the n-gram table that tokens (B, T) use."""
    table = w["ngram"].reshape(-1, c.D)
    return w | {"ngram_rows": train_gpt.take_rows(table, train_gpt.ngram_rows(tokens, c))}


def bank_matrices(name: str, matrices, c) -> dict[int, list]:
    """The matrices [N, rows, cols] of a bank, grouped by layer as train_gpt.whole_weights does."""
    by_layer = {}
    for layer, matrix in zip(train_gpt.param_table(c)[name].layers, matrices, strict=True):
        by_layer.setdefault(layer, []).append(matrix)
    return by_layer


def whole_weights(c) -> dict:
    """Weights as train_gpt.whole_weights returns them. All are random, because a weight that is
    zero would hide an error in what it multiplies."""
    weights = {}
    for name, param in train_gpt.param_table(c).items():
        if param.kind == BANK:
            matrices = jnp.asarray(c.D**-0.5 * noise(name, param.model_shape))
            weights[name] = bank_matrices(name, matrices, c)
        elif param.kind in (LOOKUP, EXCHANGED):
            weights[name] = jnp.asarray(0.3 * noise(name, param.shape))
        else:  # near their first values, some of which keep the residual stream small
            first = np.asarray(param.init(jax.random.key(0), param.shape))
            weights[name] = jnp.asarray(first + 0.2 * noise(name, param.shape))
    return weights
