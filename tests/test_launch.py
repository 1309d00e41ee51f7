"""run/launch.py: how processes find each other, flags, memory, and the check of the attention."""

import dataclasses
import os
import re
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import guard
import jax
import jax.numpy as jnp
import launch
import numpy as np
import pytest
import shards

import train_gpt
from tests.tools import write_shard

RECORD = train_gpt.PRESETS["record"]


# ---- How processes find each other ---------------------------------------------------------------
def slurm(count: int, rank: int, job: int = 0, port: int = 1) -> dict[str, str]:
    """The variables of task `rank` of a job step with `count` tasks, one on each node. The job has
    `job` tasks, if not as many."""
    one = dict(JOB_ID=port, STEP_NODELIST="localhost", PROCID=rank, NTASKS=job or count,
               STEP_NUM_TASKS=count, LOCALID=0, STEP_TASKS_PER_NODE=f"1(x{count})")  # fmt: skip
    return {f"SLURM_{name}": str(value) for name, value in one.items()}


MPI = dict(
    OMPI_COMM_WORLD_SIZE="2", OMPI_COMM_WORLD_RANK="1", OMPI_MCA_orte_hnp_uri="1.0;tcp://a:1"
)
TORCH = dict(MASTER_ADDR="a", MASTER_PORT="29500", RANK="1", WORLD_SIZE="2", LOCAL_RANK="1")
OURS = dict(JNANO_COORDINATOR="a:7", JNANO_PROCESSES="2", JNANO_PROCESS="1")
LOCAL = dict(OMPI_COMM_WORLD_LOCAL_RANK="1", OMPI_COMM_WORLD_LOCAL_SIZE="2")
SHARED = slurm(2, 1) | dict(SLURM_LOCALID="1", SLURM_STEP_TASKS_PER_NODE="2")
# Arguments of jax.distributed.initialize.
NONE = dict(coordinator_address=None, num_processes=None, process_id=None)  # JAX finds them itself
ALL = dict(local_device_ids=[])
ONE = dict(local_device_ids=[1])
SECOND = dict(num_processes=2, process_id=1)


@pytest.fixture
def initialize(monkeypatch):
    """A fake of jax.distributed.initialize, in an environment without a launcher's variables."""
    for name in [*os.environ]:
        if re.match("SLURM_|OMPI_|JNANO_|MASTER_|RANK$|WORLD_SIZE$|LOCAL_|CUDA_VIS", name):
            monkeypatch.delenv(name)
    call = Mock()
    monkeypatch.setattr(jax.distributed, "initialize", call)
    monkeypatch.setattr(jax.config, "update", Mock())
    return call


@pytest.mark.parametrize("env, expected", [
    ({}, None),
    (slurm(1, 0, job=8), None),  # an interactive shell of a job of eight tasks
    (slurm(2, 1), NONE | ALL),
    (SHARED, NONE | ONE),
    (SHARED | dict(CUDA_VISIBLE_DEVICES="0"), NONE | ALL),
    (MPI | LOCAL, NONE | ONE),
    (TORCH | dict(LOCAL_WORLD_SIZE="1"), SECOND | dict(coordinator_address="a:29501") | ALL),
    (TORCH | dict(LOCAL_WORLD_SIZE="2"), SECOND | dict(coordinator_address="a:29501") | ONE),
    (OURS, SECOND | dict(coordinator_address="a:7") | ALL),
    (dict(JNANO_COORDINATOR="auto"), NONE | ALL),  # of a TPU pod
])  # fmt: skip
def test_the_variables_of_launchers(env, expected, initialize, monkeypatch):
    """A host's only task takes all of its devices; if a host has several, each takes one."""
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    launch.start_jax()
    assert initialize.called == bool(expected)
    if expected:
        passed = initialize.call_args.kwargs
        assert {name: passed.get(name) for name in expected} == expected
        assert passed["heartbeat_timeout_seconds"] == launch.HEARTBEAT == 30  # as in run/hosts.md
        jax.config.update.assert_called_with("jax_enable_preemption_service", False)


def test_compiled_programs_are_kept_by_the_version_of_cudnn(monkeypatch):
    """They have plans of cuDNN, which JAX's key does not know; several processes keep none."""
    versions = {"libtpu": "0.1", "nvidia-cudnn-cu13": "9.28.0", "nvidia-cufft": "12"}
    installed = [SimpleNamespace(name=n, version=v) for n, v in versions.items()]
    assert jax.process_count() == 1  # which looks for plugins among what is really installed
    monkeypatch.setattr(launch.importlib.metadata, "distributions", lambda: installed)
    config = Mock(jax_compilation_cache_dir="")
    monkeypatch.setattr(jax, "config", config)
    launch.set_compilation_cache()
    config.update.assert_called_once_with("jax_compilation_cache_dir", ".cache/jax/9.28.0")
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    launch.set_compilation_cache()
    config.update.assert_called_once()


# ---- A run that cannot work ----------------------------------------------------------------------
@pytest.fixture
def refusal(capsys, monkeypatch, tmp_path):
    """A function that starts a run, which must be refused, and returns the line on stderr."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(train_gpt, "run", lambda *_: pytest.fail("it ran"))
    before = jax.config.jax_compilation_cache_dir

    def refusal(line: str) -> str:
        with pytest.raises(SystemExit) as stopped:
            launch.train(train_gpt, ["train_gpt.py", *line.split(), "--stall=0"])
        out, err = capsys.readouterr()
        assert stopped.value.code == 2 and err.count("\n") == 1 and not Path("logs").exists()
        return err

    yield refusal
    jax.config.update("jax_compilation_cache_dir", before)


@pytest.mark.parametrize("line, message", [
    ("huge", "'huge'.*record.*tiny"),
    ("tiny --step 3", "--step "),  # a typo must not become another flag
    ("record --steps 3", "--steps 3 is less than 4 stages"),
    ("tiny --val_tokens 66560", "--val_tokens 66560 is not a multiple of 8192"),
    ("tiny --resume=", "--resume .: there is no intact checkpoint"),  # of an unset variable
])  # fmt: skip
def test_what_cannot_be_is_one_line(line, message, refusal):
    assert re.search(message, refusal(line))


def test_a_shard_that_is_not_that_of_the_manifest_is_refused(refusal, tmp_path):
    """One bit of a token is flipped, and the token still is in the vocabulary."""
    files = {}
    for name in "x_train_000001.bin", "x_val_000000.bin":
        path = write_shard(tmp_path / name, np.arange(300_000) % 257)
        files[name] = {"sha256": shards.sha256(path)}
    shards.write_manifest(tmp_path, "test", 257, 256, files)
    damaged = bytearray(path.read_bytes())
    damaged[5000] ^= 1
    path.write_bytes(damaged)
    message = f"{path.name} is damaged: its sha256 is not MANIFEST.json's"
    assert message in refusal(f"tiny --steps 9 --data {tmp_path}")


def devices_of(platform: str, GB: float, count: int = 1, capability: str = "9.0") -> list:
    """Devices of which JAX has so much memory; infinite: it does not state it."""
    stats = lambda: {"bytes_limit": GB * 1e9} if GB < float("inf") else None
    kind = dict(platform=platform, device_kind="any", memory_stats=stats, process_index=0, id=0)
    return [SimpleNamespace(**kind, compute_capability=capability)] * count


@pytest.mark.parametrize("line, GB, added", [
    ("record", 24.0, "--batch 32 --head_chunk 4096 --val_T 65536"),
    ("record --batch 8", 24.0, ""),  # what the user has chosen stays
    ("medium", 48.0, "--batch 16 --head_chunk 8192"),
    ("record", float("inf"), ""),
])  # fmt: skip
def test_the_run_and_its_command_have_the_flags_of_the_fit(line, GB, added, monkeypatch):
    """The log has them after those that were typed."""
    ran = []
    devices = devices_of("gpu", GB)
    before = jax.config.jax_compilation_cache_dir
    monkeypatch.setattr(jax, "devices", lambda: devices)
    monkeypatch.setattr(jax, "local_devices", lambda: devices)
    monkeypatch.setattr(train_gpt, "find_data", lambda c: {})
    monkeypatch.setattr(train_gpt, "data_facts", lambda shards, c: [])
    monkeypatch.setattr(train_gpt, "run", lambda *args: ran.append(args))
    monkeypatch.setattr(launch, "check_data", lambda *_: None)
    monkeypatch.setattr(launch, "attention_errors", lambda *_: [0.01])
    launch.train(train_gpt, ["train_gpt.py", *line.split(), "--stall", "0", "--save_every", "9"])
    jax.config.update("jax_compilation_cache_dir", before)
    ((_, c, _, _, _, argv, _),) = ran
    assert " ".join(argv) == f"{line} --stall 0 --save_every 9 {added}".strip()
    assert 0 <= c.seed < 2**31
    for flag, value in re.findall(r"--(\w+) (\d+)", added):
        assert getattr(c, flag) == int(value)


@pytest.mark.parametrize("first, max_doc, most", [  # tokens of a sequence
    (0, 0, 8190), (1, 0, 8190), (20_000, 0, 8190), (5, 2, 8190), (5, 1, 4095),
])  # fmt: skip
def test_documents_must_be_few_enough_for_the_code(first, max_doc, most, tmp_path, capsys):
    """A document code has room for 4,095 documents in a sequence, of each stage. Packing cuts
    every document to max_doc, so that more of them fit in."""
    tokens = np.full(30_000, 7)
    tokens[first : first + 2 * 4096 : 2] = 256
    for name in "a_train_000001.bin", "a_val_000000.bin":
        shard = train_gpt.open_shard(write_shard(tmp_path / name, tokens))
    shapes = [(8, 100, 0), (8, most, max_doc)]
    reads = SimpleNamespace(batch_shapes=lambda split, c: shapes)
    tiny = dataclasses.replace(train_gpt.PRESETS["tiny"], data=str(tmp_path))
    launch.check_data(reads, {"val": [shard]}, [], tiny)
    shapes.append((8, most + 1, max_doc))
    with pytest.raises(SystemExit):
        launch.check_data(reads, {"val": [shard]}, [], tiny)
    assert "a_val_000000.bin: more than 4095 documents in" in capsys.readouterr().err


def test_a_damaged_shard_is_refused(tmp_path, capsys):
    for name in "a_train_000001.bin", "a_val_000000.bin":
        write_shard(tmp_path / name, [256, 0, 1, 0])
    tiny = dataclasses.replace(train_gpt.PRESETS["tiny"], data=str(tmp_path))
    facts = dict(file="a_val_000000.bin", sha256="")
    with pytest.raises(SystemExit, match="2"):
        launch.check_data(train_gpt, {}, [facts], tiny)
    assert "a_val_000000.bin has tokens of 32 bits" in capsys.readouterr().err


# ---- The attention kernel ------------------------------------------------------------------------
xla_kernel = jax.nn.dot_product_attention


def kernel(*qkv, **options):
    """XLA's kernel, in the place of cuDNN's."""
    return xla_kernel(*qkv, **options | {"implementation": "xla"})


def changed(left=0, right=0, **changes):
    """The kernel with other options, and with a window that reaches further by left and right."""

    def attend(q, k, v, local_window_size, **options):
        ends = local_window_size[0] + left, local_window_size[1] + right
        return kernel(q, k, v, **{"local_window_size": ends} | options | changes)

    return attend


def wrong_gradients(*qkv, **options):
    """The kernel with gradients that are too long by a twentieth."""
    attend = jax.custom_vjp(lambda *qkv: kernel(*qkv, **options))
    pull = lambda *qkv: jax.vjp(lambda *qkv: kernel(*qkv, **options), *qkv)[1]
    longer = lambda pull, g: tuple(1.05 * gradient for gradient in pull(g))
    attend.defvjp(lambda *qkv: (attend(*qkv), pull(*qkv)), longer)
    return attend(*qkv)


KERNELS = dict(
    one_key_more=changed(left=1),
    sees_the_future=changed(right=1, is_causal=False),
    no_documents=lambda q, k, v, **options: kernel(q.at[..., -4:].set(0), k, v, **options),
    one_wrong_token=lambda *qkv, **options: kernel(*qkv, **options).at[0, 300, 1].set(1.0),
    not_a_number=lambda *qkv, **options: kernel(*qkv, **options).at[0, 300, 1, 5].set(jnp.nan),
    wrong_gradients=wrong_gradients,
)
NARROW = dataclasses.replace(RECORD, D=256, H=2)  # with heads as those of the record


@pytest.mark.parametrize("fault", KERNELS)
def test_a_wrong_kernel_is_refused(fault, monkeypatch, capsys):
    monkeypatch.setattr(jax.nn, "dot_product_attention", KERNELS[fault])
    with pytest.raises(SystemExit, match="2"):
        launch.check_attention(train_gpt, NARROW, devices_of("gpu", 80)[0])
    line = r".*: cuDNN's attention is wrong on this machine, errors \[(.*)\].*\n"
    errors = re.fullmatch(line, capsys.readouterr().err)[1].split(", ")
    if fault == "wrong_gradients":
        assert float(errors[0]) < 0.03 and all(float(error) > 0.1 for error in errors[1:])


def test_a_right_kernel_passes_with_a_margin(monkeypatch):
    monkeypatch.setattr(jax.nn, "dot_product_attention", kernel)
    launch.check_attention(train_gpt, NARROW, devices_of("gpu", 80)[0])
    assert all(0 < error < 0.03 for error in launch.attention_errors(train_gpt, NARROW))


def test_ignored_signals_stay_so_but_for_ctrl_c(monkeypatch):
    """As SIGHUP after nohup. A shell lets its background jobs ignore Ctrl-C."""
    taken = []
    monkeypatch.setattr(guard.signal, "getsignal", lambda number: guard.signal.SIG_IGN)
    monkeypatch.setattr(guard.signal, "signal", lambda number, handler: taken.append(number))
    options = SimpleNamespace(resume=None, save_every=0, stall=0)
    guard.Guard(train_gpt, options).take_signals()
    assert taken == [guard.signal.SIGINT]
