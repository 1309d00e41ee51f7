"""run/launch.py: how processes find each other, flags, memory, and the check of the attention."""

import dataclasses
import os
import re
import socket
import sys
from collections import namedtuple
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import guard
import jax
import jax.numpy as jnp
import launch
import numpy as np
import pytest

import train_gpt
from tests.tools import ROOT, write_shard

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
    (SHARED | dict(CUDA_VISIBLE_DEVICES="0,1"), NONE | ONE),
    (MPI | LOCAL | dict(OMPI_COMM_WORLD_LOCAL_SIZE="1"), NONE | ALL),
    (MPI | LOCAL, NONE | ONE),
    (MPI | LOCAL | dict(JNANO_COORDINATOR="b:9"), SECOND | dict(coordinator_address="b:9") | ONE),
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


def test_a_port_that_is_taken_is_named(initialize, monkeypatch):
    """torchrun itself listens at MASTER_PORT."""
    with socket.create_server(("", 0)) as taken:
        address = f"localhost:{taken.getsockname()[1]}"
        for name, value in (OURS | dict(JNANO_PROCESS="0", JNANO_COORDINATOR=address)).items():
            monkeypatch.setenv(name, value)
        with pytest.raises(OSError, match="Address already in use"):
            launch.start_jax()
    assert not initialize.called


@pytest.mark.parametrize("configured, wheels, processes, folder", [
    ("", {"libtpu": "0.1"}, 1, ".cache/jax"),
    ("", {"libtpu": "0.1", "nvidia-cudnn-cu13": "9.28.0"}, 1, ".cache/jax/9.28.0"),
    ("mine", {"nvidia-cudnn-cu13": "9.28.0.42"}, 1, "mine"),
    ("", {}, 2, ""),
])  # fmt: skip
def test_where_compiled_programs_are_kept(configured, wheels, processes, folder, monkeypatch):
    """They have plans of cuDNN, which JAX's key does not know; several processes keep none."""
    wheels = wheels | {"numpy": "2", "nvidia-cufft": "12"}
    installed = [SimpleNamespace(metadata={"Name": n}, version=v) for n, v in wheels.items()]
    monkeypatch.setattr(launch.importlib.metadata, "distributions", lambda: installed)
    monkeypatch.setattr(jax, "process_count", lambda: processes)
    before = jax.config.jax_compilation_cache_dir
    jax.config.update("jax_compilation_cache_dir", configured)
    try:
        launch.set_compilation_cache()
        assert (jax.config.jax_compilation_cache_dir or "") == folder
    finally:
        jax.config.update("jax_compilation_cache_dir", before)


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
    ("tiny --bogus 1", "unrecognized arguments: --bogus"),
    ("tiny --step 3", "--step "),  # a typo must not become another flag
    ("tiny --steps 0", "--steps is at least 1, and below .*: it cannot be 0"),
    ("tiny --steps=-1", "-1|--steps is at least 1"),
    ("record --steps 3", "--steps 3 is less than 4 stages"),
    ("tiny --muon_lr nan", "--muon_lr is at least 0, .* cannot be nan"),
    ("tiny --target inf", "--target is"),
    ("tiny --save_every -5", "--save_every is at least 0"),
    ("tiny --seed 4294967296", "--seed is at least 0, and below"),
    ("tiny --val_tokens 66560", "--val_tokens 66560 is not a multiple of 8192"),
    ("tiny --H 32", "K|a head has 5 channels"),  # they would only hold the document's code
    ("tiny --resume=", "--resume needs the path"),  # of an unset variable
    ("tiny --resume nope", "--resume nope: there is no intact checkpoint"),
    ("tiny --data nope", "there is no folder .*nope"),
])  # fmt: skip
def test_what_cannot_be_is_one_line(line, message, refusal):
    assert re.search(message, refusal(line))


def test_help_lists_the_flags_of_both(capsys):
    with pytest.raises(SystemExit) as end:
        launch.train(train_gpt, ["train_gpt.py", "tiny", "--help"])
    shown = capsys.readouterr().out
    assert end.value.code == 0 and "--muon_lr" in shown
    assert re.search(r"--save_every SAVE_EVERY\s+steps between checkpoints", shown)


def devices_of(platform: str, GB: float, count: int = 1, capability: str = "9.0") -> list:
    """Devices of which JAX has so much memory; infinite: it does not state it."""
    stats = lambda: {"bytes_limit": GB * 1e9} if GB < float("inf") else None
    kind = dict(platform=platform, device_kind="any", memory_stats=stats, process_index=0, id=0)
    return [SimpleNamespace(**kind, compute_capability=capability)] * count


@pytest.mark.parametrize("line, GB, added", [
    ("record", 64.0, ""),
    ("record", 24.0, "--batch 32 --head_chunk 4096 --val_T 65536"),
    ("record --batch 8", 24.0, ""),  # what the user has chosen stays
    ("medium", 48.0, "--batch 16 --head_chunk 8192"),
    ("tiny", 1.0, ""),
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
    monkeypatch.setattr(launch, "attention_errors", lambda *_: [0.01])
    launch.train(train_gpt, ["train_gpt.py", *line.split(), "--stall", "0", "--save_every", "9"])
    jax.config.update("jax_compilation_cache_dir", before)
    ((_, c, _, _, _, argv, its_guard),) = ran
    assert " ".join(argv) == f"{line} --stall 0 --save_every 9 {added}".strip()
    command = " ".join(f"./run.sh train_gpt.py {line} {added} --save_every 9".split())
    assert its_guard.command == command and 0 <= c.seed < 2**31
    for flag, value in re.findall(r"--(\w+) (\d+)", added):
        assert getattr(c, flag) == int(value)


def test_a_gpu_that_is_too_small_is_refused(refusal, monkeypatch):
    devices = devices_of("gpu", 80.0) + devices_of("gpu", 8.0)
    monkeypatch.setattr(jax, "devices", lambda: devices)
    monkeypatch.setattr(jax, "local_devices", lambda: devices)
    assert "JAX has 8.0 GB of each device, too little for record" in refusal("record")


def test_large_presets_do_not_start_on_a_cpu_that_was_not_asked_for(refusal):
    before = jax.config.jax_platforms
    jax.config.update("jax_platforms", None)
    try:
        for preset in "record", "medium":
            assert f"JAX sees only a CPU, but {preset} needs" in refusal(f"{preset} --batch 8")
    finally:
        jax.config.update("jax_platforms", before)


def test_a_length_that_cudnn_gets_wrong_is_refused(capsys):
    """Its gradient had NaN for some lengths that are no multiple of 128."""
    c = dataclasses.replace(RECORD, head_chunk=64, val_T=320)
    with pytest.raises(SystemExit):
        launch.check_run(train_gpt, "record", c, devices_of("gpu", 80))
    assert "sequences of [320, 16384, 32768, 49152] tokens: cuDNN" in capsys.readouterr().err


def test_a_disk_without_room_for_the_weights_is_refused_before_the_run(monkeypatch, capsys):
    c = dataclasses.replace(RECORD, attention="band")
    usage = namedtuple("Usage", "free")
    monkeypatch.setattr(launch.shutil, "disk_usage", lambda _: usage(2e9))
    launch.check_run(train_gpt, "x", dataclasses.replace(c, save=0), jax.devices())
    with pytest.raises(SystemExit):
        launch.check_run(train_gpt, "x", c, jax.devices())
    assert "the weights take 2.6 GB, the disk has 2.0: or --save 0" in capsys.readouterr().err


@pytest.mark.parametrize("first, max_doc, most", [  # tokens of a sequence
    (0, 0, 8190), (1, 0, 8190), (20_000, 0, 8190), (5, 2, 8190), (5, 1, 4095),
])  # fmt: skip
def test_documents_must_be_few_enough_for_the_code(first, max_doc, most, tmp_path, capsys):
    """A document code has room for 4,095 documents in a sequence, of each stage. Packing cuts
    every document to max_doc, so that more of them fit in."""
    tokens = np.full(30_000, 7)
    tokens[first : first + 2 * 4096 : 2] = 256
    shard = train_gpt.open_shard(write_shard(tmp_path / "a.bin", tokens))
    shapes = [(8, 100, 0), (8, most, max_doc)]
    reads = SimpleNamespace(batch_shapes=lambda split, c: shapes)
    tiny = train_gpt.PRESETS["tiny"]
    launch.check_documents(reads, {"val": [shard]}, tiny)
    shapes.append((8, most + 1, max_doc))
    with pytest.raises(SystemExit):
        launch.check_documents(reads, {"val": [shard]}, tiny)
    assert "a.bin: more than 4095 documents in" in capsys.readouterr().err


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


def spoiled(forward=lambda y: y, backward=lambda *grads: grads):
    """The kernel with a fault in its output or in its gradients."""

    def attend(*qkv, **options):
        wrong = jax.custom_vjp(lambda *qkv: forward(kernel(*qkv, **options)))
        pull = lambda *qkv: jax.vjp(lambda *qkv: kernel(*qkv, **options), *qkv)[1]
        wrong.defvjp(lambda *qkv: (wrong(*qkv), pull(*qkv)), lambda pull, g: backward(*pull(g)))
        return wrong(*qkv)

    return attend


KERNELS = dict(
    right=kernel,
    no_window=changed(local_window_size=None),
    one_key_less=changed(left=-1),
    one_key_more=changed(left=1),
    other_scale=changed(scale=0.125),
    sees_the_future=changed(right=1, is_causal=False),
    no_documents=lambda q, k, v, **options: kernel(q.at[..., -4:].set(0), k, v, **options),
    one_wrong_token=spoiled(lambda y: y.at[0, 300, 1].set(y[0, 299, 1])),
    not_a_number=spoiled(lambda y: y.at[0, 300, 1, 5].set(jnp.nan)),
    wrong_dq=spoiled(backward=lambda dq, dk, dv: (1.05 * dq, dk, dv)),
    wrong_dk=spoiled(backward=lambda dq, dk, dv: (dq, 1.05 * dk, dv)),
    wrong_dv=spoiled(backward=lambda dq, dk, dv: (dq, dk, 1.05 * dv)),
)


@pytest.mark.parametrize("fault", KERNELS)
def test_a_wrong_kernel_is_refused_and_a_right_one_passes_with_a_margin(fault, monkeypatch, capsys):
    monkeypatch.setattr(jax.nn, "dot_product_attention", KERNELS[fault])
    devices = devices_of("gpu", 80)
    if fault == "right":
        launch.check_run(train_gpt, "record", RECORD, devices)
        assert all(0 < error < 0.03 for error in launch.attention_errors(train_gpt, RECORD))
        return
    with pytest.raises(SystemExit) as stopped:
        launch.check_run(train_gpt, "record", RECORD, devices)
    line = r".*: cuDNN's attention is wrong on this machine, errors \[.*\n"
    assert stopped.value.code == 2 and re.fullmatch(line, capsys.readouterr().err)


# ---- Before and after a run ----------------------------------------------------------------------
def test_on_a_terminal_a_run_ends_with_a_sample(monkeypatch, capsys):
    """The process is replaced, so that the devices are free."""
    started = Mock()
    monkeypatch.setattr(launch.os, "closerange", lambda low, high: None)
    monkeypatch.setattr(launch.os, "execv", started)
    launch.show_next(Path("logs/x.npz"), "train_gpt.py")
    assert not started.called
    assert capsys.readouterr().out.endswith("\nnext: ./run.sh sample logs/x.npz\n")
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    launch.show_next(Path("logs/x.npz"), "my idea.py")
    tool = [str(ROOT / "evals/sample.py"), "logs/x.npz", "--script", "my idea.py", "--go_on"]
    assert started.call_args[0][1] == [sys.executable, *tool]


def test_a_driver_that_hangs_and_a_repository_around_cost_nothing(tmp_path, monkeypatch):
    """A ZIP of the project may lie inside another repository, and GIT_DIR may name one."""
    (tmp_path / "nvidia-smi").write_text("#!/bin/sh\nexec sleep 1000\n")
    (tmp_path / "nvidia-smi").chmod(0o755)
    run = launch.subprocess.run
    run(["git", "init", "-q", tmp_path], check=True)
    user = ["-c", "user.name=x", "-c", "user.email=x"]
    run(["git", "-C", tmp_path, *user, "commit", "-q", "--allow-empty", "-m", "x"], check=True)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setenv("GIT_DIR", str(tmp_path / "nowhere"))
    short = lambda *args, **options: run(*args, **options | {"timeout": 0.5})
    monkeypatch.setattr(launch.subprocess, "run", short)
    for folder, digits in (".", 40), ("clone", 0):
        script = SimpleNamespace(__file__=str(tmp_path / folder / "train_gpt.py"))
        facts = launch.machine_facts(script)
        assert len(facts["git"]) == digits and facts["driver"] == ""


def test_ignored_signals_stay_so_but_for_ctrl_c(monkeypatch):
    """As SIGHUP after nohup. A shell lets its background jobs ignore Ctrl-C."""
    taken = []
    monkeypatch.setattr(guard.signal, "getsignal", lambda number: guard.signal.SIG_IGN)
    monkeypatch.setattr(guard.signal, "signal", lambda number, handler: taken.append(number))
    options = SimpleNamespace(resume="", force=0, save_every=0, stall=0)
    its_guard = guard.Guard(train_gpt, options)
    its_guard.take_signals()
    assert taken == [guard.signal.SIGINT]
