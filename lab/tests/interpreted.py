"""Runs kernels for Hopper on a CPU, in Mosaic's interpreter, which finds races."""

import contextlib
import functools
from collections.abc import Iterator
from types import ModuleType

import idea
import jax
import jax.numpy as jnp
import numpy as np

from lab.tests.tools import import_source

CAN_INTERPRET = jax.__version_info__ >= (0, 12)  # 0.11 wants barriers to be awaited to the end
# Limits of errors().
SUMS_OF_BF16 = 0.012, 0.006
SUMS_OF_FP8 = 0.13, 0.11


@functools.cache
def load(names: str, old: str = "", new: str = "") -> ModuleType:
    """Imports train_gpt.py with attempts, whose names are separated by spaces. An old text is
    replaced by a new one. Kernels run in three blocks, so that each computes several tiles."""
    source = idea.copy_of(names.split()).decode()
    if old:
        assert source.count(old) == 1, f"{source.count(old)} times in {names}: {old}"
        source = source.replace(old, new)
    assert source.count("\nSMS = 132 ") == 1
    source = source.replace("\nSMS = 132 ", "\nSMS = 3 ")
    return import_source(source, f"with_{names.replace(' ', '_')}")


@contextlib.contextmanager
def interpreter() -> Iterator[None]:
    """Interprets kernels. Results must be awaited inside. A race raises an exception."""
    from jax._src.pallas.mosaic_gpu.interpret import interpret_pallas_call
    from jax.experimental.pallas import mosaic_gpu as plgpu

    # With the default of 5 clocks for all copies, a copy that nobody awaits may seem to be ordered.
    options = plgpu.InterpretGPUParams(detect_races=True, num_tma_threads_per_device=64)
    try:
        with plgpu.force_gpu_interpret_mode(options):
            yield
    except BaseException:
        interpret_pallas_call.reset_gpu_interpret_mode_state()
        raise


def normal(seed: int, shape: tuple, scale: float = 1.0, dtype: str = "bfloat16") -> jax.Array:
    """Random numbers."""
    return (scale * jax.random.normal(jax.random.key(seed), shape)).astype(dtype)


def spread(N: int) -> jax.Array:
    """An rms for each token, (N, 1): 0.3 to 100, shuffled."""
    return jax.random.permutation(jax.random.key(9), jnp.geomspace(0.3, 100, N))[:, None]


def errors(got, want) -> tuple[float, float]:
    """The largest error relative to the largest value, and the root mean square of the errors
    relative to that of the values."""
    got = np.asarray(got, np.float32)
    want = np.asarray(want, np.float32)
    assert got.shape == want.shape, f"{got.shape}, not {want.shape}"
    assert np.isfinite(got).all(), "not finite"
    error = got - want
    largest = np.abs(error).max() / np.abs(want).max()
    return largest, np.sqrt(np.square(error).mean() / np.square(want).mean())


def compare(name: str, got, want, limits: tuple[float, float]) -> None:
    """Fails if one of errors() is above its limit."""
    largest, rms = errors(got, want)
    assert largest <= limits[0] and rms <= limits[1], f"{name}: {largest:.1e}, {rms:.1e}"


def as_float32(*arrays: jax.Array) -> list[jax.Array]:
    """The arrays in float32."""
    return [x.astype(jnp.float32) for x in arrays]
