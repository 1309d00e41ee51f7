"""run/cache.py: a damaged entry is written anew, and no fault of the cache ends a run."""

import errno
import warnings
from pathlib import Path

import cache
import jax
import numpy as np
import pytest
from jax.experimental.compilation_cache import compilation_cache


@pytest.fixture
def folder(tmp_path):
    """A folder for the cache, which JAX does not use yet. Its name is new, because a warning comes
    once for each folder."""
    before = jax.config.jax_compilation_cache_dir
    compilation_cache.reset_cache()
    path = tmp_path / "programs"
    jax.config.update("jax_compilation_cache_dir", str(path))
    yield path
    compilation_cache.reset_cache()
    jax.config.update("jax_compilation_cache_dir", before)


def compile_program():
    """Compiles a program, or finds it. Returns JAX's warnings."""
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        assert float(jax.jit(lambda x: 3 * x + 1)(np.float32(2))) == 7
    # JAX's are of this category. Others, of files that an earlier test left open, come at any time.
    return [str(warning.message) for warning in found if warning.category is UserWarning]


@pytest.mark.parametrize("size", [0, 1, -1])
def test_a_cut_entry_costs_one_warning_and_is_written_anew(size, folder):
    cache.set_compilation_cache()
    assert compile_program() == []
    (entry,) = folder.iterdir()
    whole = entry.read_bytes()
    entry.write_bytes(whole[:size])
    (message,) = compile_program()
    assert message.startswith("Error reading persistent compilation cache entry for 'jit__lambda'")
    assert compile_program() == []
    assert [*folder.iterdir()] == [entry] and abs(entry.stat().st_size - len(whole)) < 100


@pytest.mark.parametrize("size", [0, 1])
def test_a_full_disk_costs_one_line_and_leaves_no_part(size, folder, monkeypatch, capsys):
    def write(path, value):
        with path.open("wb") as file:
            file.write(value[:size])
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", write)
    cache.set_compilation_cache()
    assert compile_program() + compile_program() == []
    err = capsys.readouterr().err
    assert err.count("\n") == 1 and err.endswith("again: No space left on device\n")
    assert [*folder.iterdir()] == []


def test_an_entry_of_another_user_costs_one_line(folder, monkeypatch, capsys):
    def read(path):
        raise PermissionError(errno.EACCES, "Permission denied", str(path))

    cache.set_compilation_cache()
    assert compile_program() == []
    monkeypatch.setattr(Path, "read_bytes", read)
    assert compile_program() + compile_program() == []
    err = capsys.readouterr().err
    assert err.count("\n") == 1 and err.endswith("compiled again: Permission denied\n")


@pytest.mark.parametrize("make", [
    lambda folder: folder.symlink_to("nowhere"),
    lambda folder: folder.write_text("a file"),
    lambda folder: folder.symlink_to(folder),
])  # fmt: skip
def test_what_is_no_folder_costs_one_warning(make, folder):
    """JAX's, which goes on without a cache."""
    make(folder)
    cache.set_compilation_cache()
    (message,) = compile_program()
    assert message.endswith(f": '{folder}'") and compile_program() == []
