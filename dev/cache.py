"""Where JAX keeps the programs that it has compiled."""

import importlib.metadata

import jax


def set_compilation_cache() -> None:
    """Lets JAX keep compiled programs in .cache/jax, unless JAX_COMPILATION_CACHE_DIR names another
    folder. They contain plans of cuDNN, whose version is not in JAX's key, so it is in the path.
    Several processes keep none: in the second run, only process 0 would find its programs, and the
    others would wait for it to tune theirs."""
    if jax.config.jax_compilation_cache_dir or jax.process_count() > 1:
        return
    wheels = {wheel.metadata["Name"]: wheel.version for wheel in importlib.metadata.distributions()}
    versions = [wheels[name] for name in wheels if (name or "").startswith("nvidia-cudnn")]
    folder = f".cache/jax/cudnn-{versions[0]}" if versions else ".cache/jax"
    jax.config.update("jax_compilation_cache_dir", folder)
