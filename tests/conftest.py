"""Tests run on 8 simulated devices of a CPU, with programs that compile fast and are cached."""

import fcntl
import gc
import os
import shutil
import sys
from importlib.metadata import version
from pathlib import Path

ROOT = Path(__file__).parent.parent
sys.path[:0] = [str(ROOT / room) for room in ("", "basics", "data", "evals", "records", "run")]

# These are variables, not jax.config, because processes that tests start inherit them.
os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["JAX_DISABLE_MOST_OPTIMIZATIONS"] = "1"  # LLVM's took most of the time
if int(version("jax").split(".")[1]) < 11:  # later versions abort at the first flag
    os.environ["XLA_FLAGS"] = (
        "--xla_cpu_use_fusion_emitters=false --xla_cpu_parallel_codegen_split_count=1 "
        "--xla_cpu_experimental_ynn_fusion_type="  # it computes some sums wrong
    )
# glibc keeps the memory of large arrays for the next ones, in processes that start from here on.
os.environ.setdefault("MALLOC_TRIM_THRESHOLD_", "268435456")
os.environ.setdefault("MALLOC_MMAP_THRESHOLD_", "33554432")
os.environ.setdefault("MALLOC_TOP_PAD_", "16777216")
# All workers and processes share compiled programs, and so does the next run of the suite.
os.environ["JAX_COMPILATION_CACHE_DIR"] = str(ROOT / ".cache" / "tests")
os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"

import jax  # noqa: E402
import pytest  # noqa: E402

from tests.tools import train_a_run  # noqa: E402

jax.config.update("jax_num_cpu_devices", 8)
gc.set_threshold(50_000, 20, 100)  # tracing makes many objects and little garbage

# The longest files: if a worker began one of them last, the other workers would wait for it.
LONG_FILES = "hosts golden resume run devices basics_gpt2".split()


def pytest_collection_modifyitems(items):
    """Puts the tests of LONG_FILES first."""
    items.sort(key=lambda item: item.path.stem.removeprefix("test_") not in LONG_FILES)


@pytest.fixture(scope="session")
def trained(tmp_path_factory) -> Path:
    """The folder of a run, see train_a_run(). All workers share it: the first that asks trains it.
    A file that writes into it copies it first."""
    base = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        base = base.parent  # of all workers
    folder = base / "trained"
    with open(base / "trained.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # it is free again when this process ends, however it ends
        if not folder.exists():
            shutil.rmtree(base / "training", ignore_errors=True)
            train_a_run(base / "training")
            (base / "training").rename(folder)
    return folder


@pytest.fixture(autouse=True, scope="module")
def clear_programs():
    """Drops a file's programs after it: with all of them, a worker would grow to 5 GB."""
    yield
    jax.clear_caches()
    gc.collect()
