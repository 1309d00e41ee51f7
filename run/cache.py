"""Where JAX keeps the programs that it has compiled, and how."""

import contextlib
import functools
import importlib.metadata
import secrets
import sys
from pathlib import Path

import jax


def set_compilation_cache() -> None:
    """Lets JAX keep compiled programs in .cache/jax, unless JAX_COMPILATION_CACHE_DIR names another
    folder. They contain plans of cuDNN, whose version is not in JAX's key, so it is in the path.
    Several processes keep none: in the second run, only process 0 would find its programs, and the
    others would wait for it to tune theirs."""
    replace_entries()
    if jax.config.jax_compilation_cache_dir or jax.process_count() > 1:
        return
    wheels = {wheel.metadata["Name"]: wheel.version for wheel in importlib.metadata.distributions()}
    versions = [wheels[name] for name in wheels if (name or "").startswith("nvidia-cudnn")]
    folder = f".cache/jax/cudnn-{versions[0]}" if versions else ".cache/jax"
    jax.config.update("jax_compilation_cache_dir", folder)


@functools.cache  # once is enough
def replace_entries() -> None:
    """Lets JAX write a program where there is an entry already. It compiles a program again if it
    cannot read the entry, but its put() leaves a file that exists as it is, so one that a killed
    process or a full disk has cut off would cost a warning and a compilation in every run."""
    try:
        from jax._src.lru_cache import LRUCache
    except ImportError:  # a later JAX may have another cache
        return
    jax_get = LRUCache.get
    jax_put = LRUCache.put

    def get(cache, key: str) -> bytes | None:
        """Reads an entry. Warns if it is there, but cannot be read, as one of another user."""
        try:
            return jax_get(cache, key)
        except OSError as error:
            warn(str(cache._path), error.strerror)
            return None

    def put(cache, key: str, value: bytes) -> None:
        """Writes an entry under another name and renames it. Warns if it cannot."""
        folder = str(cache._path)
        if cache.eviction_enabled or "://" in folder:
            jax_put(cache, key, value)
            return
        path = Path(folder, f"{key}-cache")
        part = path.with_name(f"{key}.{secrets.token_hex(4)}.part")
        try:
            part.write_bytes(value)
            part.replace(path)
        except OSError as error:
            warn(folder, error.strerror)
            with contextlib.suppress(OSError):
                part.unlink()

    LRUCache.get = get
    LRUCache.put = put


@functools.cache  # once for each folder and reason
def warn(folder: str, why: str) -> None:
    """Says that programs will be compiled again."""
    what = "cannot be used for all compiled programs, so some are compiled again"
    print(f"warning: {folder} {what}: {why}", file=sys.stderr)
