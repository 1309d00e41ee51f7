"""Tables in bfloat16, which are saved in files of their own: checkpoints, weights, and room for
both on the disk."""

import dataclasses
import errno
import functools
import os
from collections import namedtuple

import jax
import jax.numpy as jnp
import launch
import numpy as np
import pytest

import train_gpt
from evals import weights
from tests.tools import MINI, make_mesh, noise

C = dataclasses.replace(MINI, ngram_optimizer="row_adam", copy=0)  # which computes in bfloat16


@functools.cache
def make_state(devices: int) -> train_gpt.State:
    """A state in which every number of the n-gram table, and of what waits for it, is another."""
    state = train_gpt.make_state(C, make_mesh(devices))

    def fill(tree_path, x):
        key = jax.tree_util.keystr(tree_path)
        if "bigram" in key and x.dtype != jnp.int32:
            return jax.device_put(noise(key, x.shape).astype(x.dtype), x.sharding)
        return x

    return jax.tree.map_with_path(fill, state)


def save(tmp_path, step: int, devices: int = 2) -> bool:
    facts = {"step": step}
    return train_gpt.save_checkpoint(make_state(devices), facts, tmp_path / f"{step:07}.state")


def as_numbers(state: train_gpt.State) -> dict[str, np.ndarray]:
    leaves = jax.tree.leaves_with_path(state._replace(lookups={}))
    return {jax.tree_util.keystr(path): np.asarray(x) for path, x in leaves}


@pytest.mark.parametrize("devices", [1, 8])
def test_a_checkpoint_is_restored_on_any_number_of_devices(tmp_path, devices):
    assert save(tmp_path, 4)
    facts, arrays = train_gpt.load_checkpoint(tmp_path)
    assert facts == {"step": 4}
    state = train_gpt.restore(arrays, C, make_mesh(devices))
    expected = as_numbers(make_state(1))
    found = as_numbers(state)
    assert found.keys() == expected.keys()
    for key, x in expected.items():
        assert found[key].dtype == x.dtype
        np.testing.assert_array_equal(found[key], x, key)


def test_a_table_is_written_without_a_copy_in_float32_and_old_ones_are_deleted(tmp_path):
    for step in (2, 4, 6):
        save(tmp_path, step)
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == ["0000004.bigram.bin", "0000004.state", "0000006.bigram.bin", "0000006.state"]
    rows = -(-C.bigrams // 128) * 128
    assert (tmp_path / "0000004.bigram.bin").stat().st_size == 2 * rows * C.D
    assert "bigram" not in "".join(np.load(tmp_path / "0000004.state").files).partition("opt")[0]


def change_a_byte(path) -> None:
    content = bytearray(path.read_bytes())
    content[1001] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize("damage", [
    change_a_byte, lambda path: os.truncate(path, 1000), lambda path: path.unlink(),
])  # fmt: skip
def test_a_checkpoint_whose_table_is_damaged_is_not_intact(tmp_path, capsys, damage):
    for step in (4, 6):
        save(tmp_path, step)
    damage(tmp_path / "0000006.bigram.bin")
    facts, _ = train_gpt.load_checkpoint(tmp_path)
    assert facts["step"] == 4
    assert "0000006.state is not an intact checkpoint" in capsys.readouterr().err


def test_what_a_failed_checkpoint_has_left_is_deleted_by_the_next(tmp_path):
    for name in ("0000002.bigram.bin", "0000003.bigram.part"):
        (tmp_path / name).touch()
    save(tmp_path, 4)
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "0000004.bigram.bin", "0000004.state"
    ]  # fmt: skip


def test_a_table_that_is_not_finite_is_not_saved(tmp_path):
    state = make_state(2)
    params = dict(state.params)
    params["bigram"] = params["bigram"].at[1, 2, 3].set(jnp.nan)
    state = state._replace(params=params)
    assert not train_gpt.save_checkpoint(state, {"step": 2}, tmp_path / "0000002.state")
    assert not list(tmp_path.iterdir())


def test_a_full_disk_is_an_error_and_leaves_nothing(tmp_path, monkeypatch):
    def full(_):  # after some of the file is written
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(train_gpt, "crc32", full)
    with pytest.raises(OSError, match="No space left"):
        save(tmp_path, 2)
    assert not list(tmp_path.iterdir())


def test_hosts_without_a_common_disk_are_an_error(tmp_path, monkeypatch):
    """The file of process 0 lacks the last eighths, which another host has written elsewhere."""
    write = train_gpt.write_eighths

    def first_half(part, table, checksums):
        write(part, table, checksums)
        os.truncate(part, part.stat().st_size // 2)

    monkeypatch.setattr(train_gpt, "write_eighths", first_half)
    with pytest.raises(OSError, match="they must share its disk"):
        save(tmp_path, 2)
    assert not list(tmp_path.iterdir())


def test_if_one_process_cannot_write_all_of_them_fail(tmp_path, monkeypatch):
    monkeypatch.setattr(train_gpt, "process_allgather", lambda x: np.array([x, 1]))
    with pytest.raises(OSError, match="another process cannot write"):
        train_gpt.in_all_processes(lambda: None)


def test_weights_are_read_with_their_table(tmp_path, capsys):
    state = make_state(8)
    params = train_gpt.validated(state, C)
    path = tmp_path / "run.npz"
    tables = train_gpt.write_tables(path.with_suffix(""), params)
    result = {"steps": C.total_steps, "val_loss": 5.0}
    train_gpt.save_weights(path, train_gpt.unpad(params, C), C, result, tables)
    w = weights.open_weights(path, weights.ROOT / "train_gpt.py")
    expected = np.asarray(state.params["bigram"]).reshape(-1, C.D)[: C.bigrams]
    assert w.arrays["bigram"].dtype == jnp.bfloat16
    np.testing.assert_array_equal(w.arrays["bigram"], expected)
    (tmp_path / "run.bigram.bin").unlink()
    with pytest.raises(SystemExit):
        weights.open_weights(path, weights.ROOT / "train_gpt.py")
    assert "run.bigram.bin must be beside" in capsys.readouterr().err


Usage = namedtuple("Usage", "free")


def test_room_for_weights_and_checkpoints_is_asked_for_before_the_run(monkeypatch, capsys):
    c = train_gpt.PRESETS["record92"]
    GB = 1e9
    monkeypatch.setattr(launch.shutil, "disk_usage", lambda _: Usage(34 * GB))
    launch.check_disk(train_gpt, c)
    shown = capsys.readouterr().out
    assert "an interrupted run leaves a checkpoint of 43.2 GB" in shown
    assert "This run will write 34 GB" in shown
    launch.check_disk(train_gpt, dataclasses.replace(c, save=0))
    assert "This run will write" not in capsys.readouterr().out
    monkeypatch.setattr(launch.shutil, "disk_usage", lambda _: Usage(78 * GB))
    launch.check_disk(train_gpt, dataclasses.replace(c, save_every=1000))  # one checkpoint
    assert "This run will write 77 GB" in capsys.readouterr().out
    monkeypatch.setattr(launch.shutil, "disk_usage", lambda _: Usage(34 * GB))
    for changes in dict(save_every=100), dict(save=0, save_every=100):
        with pytest.raises(SystemExit):
            launch.check_disk(train_gpt, dataclasses.replace(c, **changes))
        assert "GB of room, but the weights take 33.7 GB" in capsys.readouterr().err
    monkeypatch.setattr(launch.shutil, "disk_usage", lambda _: Usage(78 * GB))
    monkeypatch.setattr(launch, "old_checkpoints", lambda c: 2)
    launch.check_disk(train_gpt, dataclasses.replace(c, save_every=100))
    monkeypatch.setattr(launch, "old_checkpoints", lambda c: 1)
    with pytest.raises(SystemExit):
        launch.check_disk(train_gpt, dataclasses.replace(c, save_every=100))
    launch.check_disk(train_gpt, c)
    monkeypatch.setattr(launch.shutil, "disk_usage", lambda _: Usage(33 * GB))
    with pytest.raises(SystemExit):
        launch.check_disk(train_gpt, c)


def test_the_checkpoints_of_the_resumed_run_are_counted(tmp_path):
    for name in ("a/1.state", "b/3.state", "b/2.state", "b/3.bigram.bin", "b.npz"):
        file = tmp_path / name
        file.parent.mkdir(exist_ok=True)
        file.touch()
    os.utime(tmp_path / "a/1.state", (0, 0))
    for resume, count in ("", 0), (tmp_path, 2), (tmp_path / "a/1.state", 1), (tmp_path / "b", 2):
        c = dataclasses.replace(C, resume=str(resume))
        assert launch.old_checkpoints(c) == count
        assert launch.old_checkpoints(dataclasses.replace(c, force=1)) == 0


@pytest.mark.parametrize("steps", [12, 24, 50, 333, 1194])
def test_a_program_has_room_for_all_gradients_that_wait(steps):
    """The first of the stages that share a program may be so short that it has no long cycle."""
    c = dataclasses.replace(train_gpt.PRESETS["record92"], steps=steps)
    all_blocks, all_slots = c.waiting_rows(len(c.stages) - 1)
    for step in range(0, steps, 1 if steps < 100 else 11):
        blocks, slots = c.waiting_rows(int(c.program_stage(step)))
        assert c.table_step(step) <= blocks <= all_blocks <= 3
        cycle = range(step - c.table_step(step), step + 1)
        longest = max(c.sequence_length(c.stage_at(i)) for i in cycle)
        assert c.batch * c.ngram_slots(longest) <= slots <= all_slots
