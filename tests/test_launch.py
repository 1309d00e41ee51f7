"""run/launch.py: how processes find each other, how a run ends, and the check of the attention."""

import contextlib
import dataclasses
import io
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections import namedtuple
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import cache
import fits
import guard
import jax
import jax.numpy as jnp
import launch
import numpy as np
import pytest

import train_gpt
from tests import launched
from tests.launched import HUNG, STAND_INS, end
from tests.record92 import PATH, frozen
from tests.tools import FLOAT32_FLAGS, ROOT, SMALL, text, write_shard

RECORD = train_gpt.PRESETS["record"]
RECORD92 = frozen.PRESETS["record92"]
CHECK_DISK = launch.check_disk
FLAGS = ["tiny", *SMALL, *FLOAT32_FLAGS, *"--steps 30 --save 0 --data data".split()]


@pytest.fixture(autouse=True)
def any_disk(monkeypatch):
    """The scripts here are stand-ins. Tests of the room on the disk call CHECK_DISK."""
    monkeypatch.setattr(launch, "check_disk", lambda script, c, options: None)


@pytest.fixture
def script(monkeypatch):
    """What launch.main() loads: train_gpt.py, without data, that trains nothing. Where a process
    would end, this raises SystemExit."""
    script = SimpleNamespace(**vars(train_gpt), runs=[])

    def run(preset, c, devices, shards, data, argv, guard):
        script.runs.append((c, argv, guard))
        return script.weights

    script.run = run
    script.weights = None
    script.find_data = lambda c: {}
    script.data_facts = lambda shards, c: []
    stand_in(monkeypatch, script)
    return script


def stand_in(monkeypatch, script) -> None:
    """Lets launch.main() load this script, and leave the process as it is."""
    monkeypatch.setattr(launch, "load_script", lambda path: script)
    monkeypatch.setattr(launch, "leave", sys.exit)
    for name in "watch_signals", "protect_screen":
        monkeypatch.setattr(launch, name, lambda: None)


def status(*argv) -> int:
    """The exit status with which the launcher ends the process."""
    with pytest.raises(SystemExit) as stopped:
        launch.main([train_gpt.__file__, *argv])
    return stopped.value.code


# ---- Flags ---------------------------------------------------------------------------------------
def test_flags_of_the_guard_are_not_the_scripts():
    line = "tiny --stall 9 --seed -1 --resume=a/b --data x --save_every 7 --D=8"
    options, rest = launch.split_flags(line.split())
    assert vars(options) == dict(save_every=7, resume="a/b", force=0, stall=9)
    assert rest == "tiny --seed -1 --data x --D=8".split()
    assert launch.as_flags(options) == "--save_every 7 --stall 9".split()  # to resume it, too
    options, rest = launch.split_flags([])
    assert vars(options) == dict(save_every=0, resume="", force=0, stall=300) and rest == []
    assert launch.as_flags(options) == []


@pytest.mark.parametrize("argv, message", [
    ("--stall -1", "--stall is at least 0"), ("--save_every=-5", "--save_every is at least 0"),
    ("--stall 1.5", "--stall.*'1.5'"), ("--force", "--force"),
])  # fmt: skip
def test_wrong_flags_of_the_guard_are_refused(argv, message, script, capsys):
    assert status("tiny", *argv.split()) == 2 and not script.runs
    assert re.fullmatch(rf"launch\.py: .*{message}.*\n", capsys.readouterr().err)


@pytest.mark.parametrize("line", ["--help", "tiny --stall x -h", "record --bogus --help"])
def test_help_lists_the_flags_of_both_and_trains_nothing(line, script, capsys):
    assert status(*line.split()) == 0
    shown = capsys.readouterr().out
    assert re.search("--save_every 0 +steps between", shown) and re.search("--D (768|160) ", shown)
    assert not script.runs


@pytest.mark.parametrize("name", launch.GUARD_FLAGS)
def test_train_gpt_alone_does_not_know_them(name, capsys):
    """Nor would a run without a guard heed them."""
    with pytest.raises(SystemExit):
        train_gpt.main(["tiny", f"--{name}", "1"])
    assert f"train_gpt.py: unrecognized arguments: --{name}" in capsys.readouterr().err


# ---- How a run ends ------------------------------------------------------------------------------
HANGS = """
def HOOK(step):
    if step == 12:
        HANG()
"""
NAPS = """
def HOOK(step):
    time.sleep(0.05)
"""
SLEEPS = """
def compile_train_step(*_):
    print("in the compiler", flush=True)
    time.sleep(20)
"""


@pytest.fixture
def start(tmp_path, request):
    """Starts the launcher in a folder with a script that has `code` at its end; waits until it
    prints a line with the text `until`."""
    (tmp_path / "data").mkdir()
    write_shard(tmp_path / "data/x_train_1.bin", text(40_000))
    write_shard(tmp_path / "data/x_val_1.bin", text(1600))

    def start(code: str, until: str, script: str = "train_gpt.py") -> subprocess.Popen:
        (tmp_path / script).write_text(launched.with_code(train_gpt.SOURCE, code))
        process = launched.start(tmp_path, script, *FLAGS, devices=2)
        request.addfinalizer(process.kill)
        launched.wait_for_line(process, until)
        return process

    return start


def test_a_second_signal_ends_a_run_that_hangs(start, tmp_path):
    """Ctrl-C or SIGTERM after another signal is not the second one. The log has a last line."""
    process = start(STAND_INS + HUNG + HANGS, until="step:10/30 train_loss")
    time.sleep(0.5)
    process.send_signal(signal.SIGUSR1)  # as Slurm, before its limit
    time.sleep(0.4)
    process.send_signal(signal.SIGTERM)
    time.sleep(0.1)  # as mpirun, which sends a signal twice: that counts as one
    process.send_signal(signal.SIGTERM)
    time.sleep(0.5)
    assert process.poll() is None
    process.send_signal(signal.SIGINT)
    code, _, err = end(process)
    assert code == 130 and err.endswith("stopped without a new checkpoint\n")
    (log,) = tmp_path.glob("logs/*.txt")
    line = "INTERRUPTED by SIGINT without a new checkpoint; there is no checkpoint"
    assert log.read_text().splitlines()[-1] == line


@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM"])
def test_a_signal_ends_compiling_at_once(name, start, tmp_path):
    """By a handler, without which Linux would ignore SIGTERM in the first process of a container:
    hence the status, which is not -15."""
    process = start(SLEEPS, until="in the compiler")
    process.send_signal(signal.Signals[name])
    code, _, err = end(process)
    assert code == 128 + signal.Signals[name]
    assert err == f"\nlaunch.py: {name}: stopped without a new checkpoint\n"
    assert not [*tmp_path.glob("logs/*/*")]


def test_ctrl_c_while_jax_is_imported_shows_no_traceback(tmp_path):
    (tmp_path / "jax.py").write_text("import os\nos.kill(os.getpid(), 2)\n")
    heed = lambda: signal.signal(signal.SIGINT, signal.default_int_handler)
    env = os.environ | {"PYTHONPATH": str(tmp_path)}
    command = [sys.executable, launched.LAUNCH, "train_gpt.py"]
    done = subprocess.run(command, env=env, capture_output=True, text=True, preexec_fn=heed)
    assert (done.returncode, done.stdout, done.stderr) == (-signal.SIGINT, "", "")


def test_signals_that_are_ignored_stay_so_but_for_ctrl_c(monkeypatch):
    """As SIGHUP after nohup. A shell lets its background jobs ignore Ctrl-C."""
    assert guard.taken_signals() == guard.SIGNALS
    monkeypatch.setattr(guard.signal, "getsignal", lambda number: signal.SIG_IGN)
    assert guard.taken_signals() == [signal.SIGINT]


def test_a_copy_beside_train_gpt_runs_until_sigterm(start, tmp_path):
    """It logs its own source, and prints how to resume it."""
    (tmp_path / "train_gpt.py").write_text("raise ImportError('this is not the script')")
    process = start(STAND_INS + NAPS, until="step:10/30 train_loss", script="my idea.py")
    process.terminate()
    code, out, err = end(process)
    assert code == 143 and "and save a checkpoint if steps are left; Ctrl-C or SIGTERM, " in err
    words = r"; to resume: \./run\.sh 'my idea\.py' tiny .* --resume logs/"
    assert re.search(words, out.splitlines()[-1])
    (log,) = tmp_path.glob("logs/*.txt")
    assert log.read_text().startswith((tmp_path / "my idea.py").read_text())
    assert log.read_text().splitlines()[-1] == out.splitlines()[-1]


def test_messages_of_a_copy_have_its_name(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setitem(sys.modules, "my_idea", None)
    (tmp_path / "my_idea.py").write_text(train_gpt.SOURCE)
    script = launch.load_script(tmp_path / "my_idea.py")
    with pytest.raises(SystemExit):
        script.parse_config(["--D", "no"])
    assert capsys.readouterr().err.startswith("my_idea.py: argument --D")


def fail(script, message: str) -> int:
    """The exit status of a run that fails with this message of JAX."""
    script.run = Mock(side_effect=jax.errors.JaxRuntimeError(f"{message}\nmore"))
    return status("tiny")


def test_lack_of_memory_is_explained(script, capsys):
    assert fail(script, "RESOURCE_EXHAUSTED: no 9 GB") == 2
    err = capsys.readouterr().err
    assert re.fullmatch(r"launch\.py: not enough memory: RESOURCE_.* 9 GB\. .*--batch.*\n", err)


def test_any_other_error_is_shown(script, capsys):
    assert fail(script, "INTERNAL: no luck") == 1
    err = capsys.readouterr().err
    assert "Traceback" in err and "no luck\nmore" in err and "memory" not in err
    assert "--val_T" not in err


def test_a_plan_that_cudnn_refuses_names_what_to_try(script, capsys):
    assert fail(script, "INTERNAL: CUDNN_STATUS_NOT_SUPPORTED: no valid plan") == 1
    err = capsys.readouterr().err
    assert "Traceback" in err and "try --val_T 131072" in err.splitlines()[-1]


@pytest.mark.parametrize("message", [
    "RESOURCE_EXHAUSTED: cannot allocate", "CUDNN_STATUS_ALLOC_FAILED", "out of memory",
    "CUDA_ERROR_OUT_OF_MEMORY",
])  # fmt: skip
def test_what_counts_as_lack_of_memory(message):
    assert launch.NO_MEMORY.search(message)


@pytest.mark.parametrize("argv", [[], ["absent.py", "tiny"]])
def test_without_a_script_it_says_how_it_is_used(argv, script, capsys):
    with pytest.raises(SystemExit) as stopped:
        launch.main(argv)
    assert stopped.value.code == 2
    assert capsys.readouterr().err.startswith("launch.py: usage: launch.py SCRIPT")


def test_a_copy_may_have_left_out_what_is_checked(script):
    del script.SHORT
    launch.main([train_gpt.__file__, "tiny"])
    assert len(script.runs) == 1


def test_a_process_without_a_screen_can_print(monkeypatch):
    """As a service, or with >&- in a shell."""
    for name in "stdout", "stderr":
        monkeypatch.setattr(sys, name, None)
    guard.protect_screen()
    print("step")
    print("warning", file=sys.stderr)
    assert not sys.stdout.isatty()


def test_no_file_gets_the_number_of_a_screen_that_is_closed(monkeypatch):
    """Libraries in C would print into it."""
    for name in "stdout", "stderr":  # to be as before at the end
        monkeypatch.setattr(sys, name, getattr(sys, name))
    before = os.dup(0)
    os.close(0)
    guard.protect_screen()
    try:
        assert os.fstat(0).st_rdev == os.stat(os.devnull).st_rdev
    finally:
        os.dup2(before, 0)
        os.close(before)


def test_too_many_files_is_one_line(script, capsys):
    script.find_data = Mock(side_effect=OSError(24, "Too many open files", "x.bin"))
    assert status("tiny") == 2
    line = (
        "launch.py: [Errno 24] Too many open files: 'x.bin': type  ulimit -n 4096  and start again"
    )
    assert capsys.readouterr().err.strip() == line


@pytest.mark.parametrize("before, after", [
    ((256, 1048576), 65536), ((256, 4096), 4096), ((256, -1), 65536), ((-1, -1), -1),
    ((100_000, 1048576), 100_000),
])  # fmt: skip
def test_as_many_files_as_the_system_allows_may_be_open(before, after, monkeypatch):
    """macOS allows 10,240 at most, whatever it says, and 256 without this."""
    limits = [*before]
    monkeypatch.setattr(launch.resource, "getrlimit", lambda _: before)
    monkeypatch.setattr(launch.resource, "setrlimit", lambda _, new: limits.__setitem__(0, new[0]))
    launch.allow_many_files()
    assert limits == [after, before[1]]


def test_a_copy_of_an_older_train_gpt_is_refused(monkeypatch, capsys):
    stand_in(monkeypatch, SimpleNamespace(main=None))
    assert status("tiny") == 2
    assert "is a copy of an older train_gpt.py" in capsys.readouterr().err


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
        if re.match("SLURM_|OMPI_|JNANO_|MASTER_|RANK$|WORLD_SIZE$|LOCAL_|CUDA_VIS|TPU|MEG", name):
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
])  # fmt: skip
def test_the_variables_of_launchers(env, expected, initialize, monkeypatch):
    """A host's only task takes all of its devices; if a host has several, each takes one."""
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    launch.join()
    assert initialize.called == bool(expected)
    if expected:
        passed = initialize.call_args.kwargs
        assert {name: passed.get(name) for name in expected} == expected
        assert passed["heartbeat_timeout_seconds"] == launch.HEARTBEAT == 30  # as in run/hosts.md
        jax.config.update.assert_called_with("jax_enable_preemption_service", False)


def test_a_coordinator_alone_is_refused(initialize, monkeypatch):
    monkeypatch.setenv("JNANO_COORDINATOR", "a:7")
    with pytest.raises(SystemExit):
        launch.join()
    assert not initialize.called


ADVICE = r"\(if this is the only process, type  unset WORLD_SIZE RANK\)\n"


@pytest.mark.parametrize("env, message", [
    (TORCH | dict(RANK="2"), "there is no such process: WORLD_SIZE=2 RANK=2 " + ADVICE),
    (TORCH | dict(RANK="-1"), "there is no such process: WORLD_SIZE=2 RANK=-1 " + ADVICE),
    (TORCH | dict(RANK="first"), "RANK=first is no number: type  unset RANK  or set it right"),
    (TORCH | dict(WORLD_SIZE="2.0"), "WORLD_SIZE=2.0 is no number"),
    (TORCH | dict(MASTER_PORT="http"), "MASTER_PORT=http is no number"),
    (TORCH | dict(LOCAL_WORLD_SIZE="2", LOCAL_RANK="x"), "LOCAL_RANK=x is no number"),
    (TORCH | dict(JNANO_WAIT="5 min"), "JNANO_WAIT=5 min is no number"),
    (TORCH | dict(JNANO_WAIT="0"), "JNANO_WAIT=0 is not from 1 to 1000000"),
    (TORCH | dict(JNANO_WAIT="1e9"), "JNANO_WAIT=1e9 is no number"),
    (TORCH | dict(JNANO_WAIT="9" * 12), "JNANO_WAIT=9+ is not from 1 to"),
    (TORCH | dict(MASTER_PORT="99999"), "MASTER_PORT=99999 is not from 1 to 65534"),
    (TORCH | dict(MASTER_PORT="-1"), "MASTER_PORT=-1 is not from 1 to 65534"),
    (dict(JNANO_PROCESSES="0", JNANO_PROCESS="0"), "JNANO_PROCESSES=0 is not from 1 to"),
    (dict(JNANO_PROCESSES="1", JNANO_PROCESS="1"), "there is no such process: JNANO_PROCESSES=1 "),
    (dict(JNANO_PROCESSES="2"), "JNANO_PROCESSES without JNANO_COORDINATOR and JNANO_PROCESS: see"),
    (dict(JNANO_PROCESS="1"), "JNANO_PROCESS without JNANO_COORDINATOR and JNANO_PROCESSES: see"),
    (dict(JNANO_COORDINATOR="a:7", JNANO_PROCESS="1"), ".* without JNANO_PROCESSES: see run/hosts"),
    (OURS | dict(JNANO_PROCESS="0", JNANO_COORDINATOR="a"), "process 0 cannot listen at a, which"),
    (OURS | dict(JNANO_PROCESS="0", JNANO_COORDINATOR="a:99999"), "process 0 cannot listen at a:9"),
])  # fmt: skip
def test_variables_that_describe_no_process_are_named(
    env, message, initialize, monkeypatch, capsys
):
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(SystemExit) as stopped:
        launch.join()
    assert stopped.value.code == 2 and not initialize.called
    assert re.match(f"launch.py: {message}", capsys.readouterr().err)


def test_a_port_that_is_taken_is_named(initialize, monkeypatch, capsys):
    with socket.create_server(("", 0)) as taken, pytest.raises(SystemExit):
        launch.try_to_listen(f"localhost:{taken.getsockname()[1]}")
    assert "Address already in use" in capsys.readouterr().err


@pytest.mark.parametrize("error", [ValueError("no address"), IndexError("list index")])
def test_left_over_variables_are_named_if_jax_cannot_connect(
    error, initialize, monkeypatch, capsys
):
    initialize.side_effect = error
    timer = Mock()
    monkeypatch.setattr(launch.threading, "Timer", lambda *_: timer)
    for name, value in dict(WORLD_SIZE="2", RANK="0").items():
        monkeypatch.setenv(name, value)
    with pytest.raises(SystemExit):
        launch.join()
    wanted = f"launch.py: this process cannot connect to others: {error}; .*; it has WORLD_SIZE=2 "
    assert re.match(wanted + "RANK=0 " + ADVICE, capsys.readouterr().err)
    timer.start.assert_called()
    timer.cancel.assert_called()  # otherwise it would end this process later


@pytest.mark.parametrize("endpoints, env, pod", [
    ("one:0:10.0.0.1", {}, False),
    ("one", {}, False),
    ("one:0:10.0.0.1,two:1:10.0.0.2", {}, True),
    ("one,two", {}, True),
    (None, {}, False),  # no metadata server
    (None, dict(TPU_WORKER_HOSTNAMES="localhost"), False),
    (None, dict(TPU_WORKER_HOSTNAMES="one,two"), True),
    (None, dict(TPU_PROCESS_ADDRESSES="local", MEGASCALE_NUM_SLICES="2"), False),  # Kaggle
    ("one", dict(MEGASCALE_NUM_SLICES="2"), True),
])  # fmt: skip
def test_a_tpu_host_is_a_pod_only_with_others(endpoints, env, pod, initialize, monkeypatch):
    def urlopen(request, timeout):
        if endpoints is None:
            raise OSError("no such host")
        assert request.get_header("Metadata-flavor") == "Google"
        return io.BytesIO(endpoints.encode())

    for name, value in env.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(launch.urllib.request, "urlopen", urlopen)
    monkeypatch.setattr(launch, "TPU_DEVICES", ["/no", __file__])
    monkeypatch.setattr(launch.importlib.util, "find_spec", lambda name: name == "libtpu")
    launch.join()
    assert initialize.called == pod
    if pod:
        passed = initialize.call_args.kwargs
        assert {name: passed.get(name) for name in NONE | ALL} == NONE | ALL


def test_a_machine_without_tpus_asks_nobody(initialize, monkeypatch):
    monkeypatch.setattr(launch.urllib.request, "urlopen", Mock())
    monkeypatch.setenv("TPU_WORKER_HOSTNAMES", "one,two")
    launch.join()
    assert not initialize.called and not launch.urllib.request.urlopen.called


# ---- Starting JAX --------------------------------------------------------------------------------
@pytest.mark.parametrize("error, cure", [
    ("Unable to initialize backend 'cuda': INTERNAL: cuInit: error 802 SYSTEM_NOT_READY", "fabric"),
    ("operation cuInit(0) failed: CUDA_ERROR_SYSTEM_DRIVER_MISMATCH", "restart the machine"),
    ("Unable to initialize backend 'cuda': no CUDA-capable device", "CUDA_VISIBLE_DEVICES"),
    ("Backend 'CPU' is not in the list of known backends: ['cpu', 'tpu']", "unset JAX_PLATFORMS"),
    ("Unable to initialize backend 'tpu': INTERNAL: Failed to open libtpu.so", "JAX_PLATFORMS"),
    ("Unable to initialize backend 'tpu': already in use by process 7", "restart the session"),
    ("something\nnew", "run/README.md"),
])  # fmt: skip
def test_a_backend_that_does_not_start_is_one_line_with_a_cure(error, cure, monkeypatch, capsys):
    monkeypatch.setattr(jax, "devices", Mock(side_effect=RuntimeError(error)))
    with pytest.raises(SystemExit) as stopped:
        launch.start_jax()
    line = capsys.readouterr().err
    assert stopped.value.code == 2 and line.count("\n") == 1
    assert " ".join(error.split()) in line and cure in line


def test_a_device_that_jax_does_not_find_is_one_line(monkeypatch, capsys):
    """JAX_PLATFORMS=cuda without CUDA is an AssertionError without a message."""
    monkeypatch.setattr(jax, "devices", Mock(side_effect=AssertionError))
    with pytest.raises(SystemExit):
        launch.start_jax()
    line = capsys.readouterr().err
    assert re.fullmatch(r"launch\.py: JAX cannot start: .*  unset JAX_PLATFORMS; .*\n", line)


def test_the_launcher_starts_in_any_thread(monkeypatch):
    """Only the main thread can handle signals."""
    monkeypatch.setattr(launch, "protect_screen", Mock())
    monkeypatch.setattr(launch, "leave", Mock())
    with ThreadPoolExecutor(1) as pool:
        pool.submit(launch.main, ["--bogus"]).result()
    launch.leave.assert_called_once_with(2)


def test_options_of_jax_with_which_no_run_can_go_are_named(monkeypatch, capsys):
    pairs = [(name, value) for name, values in launch.UNFIT.items() for value in values]
    for name, value in pairs:
        monkeypatch.setattr(jax, "config", SimpleNamespace(**{name: value}))
        with pytest.raises(SystemExit):
            launch.start_jax()
        shown = capsys.readouterr().err
        assert shown.startswith(
            f"launch.py: {name.upper()} is {value}, so no run can go: type  unset"
        )


@pytest.mark.parametrize("plugin, flags, version, expected", [
    ("jax_cuda13_plugin", None, (0, 12, 0, 1), "FLAG=600"),
    ("jax_cuda12_plugin", "--xla_x=1", (0, 11, 2), "--xla_x=1 FLAG=600"),
    ("jax_cuda13_plugin", "FLAG=90", (0, 12, 0, 1), "FLAG=90"),
    ("jax_cuda13_plugin", None, (0, 13, 0), None),  # nobody has tried whether it knows the flag
    ("", None, (0, 12, 0, 1), None),
    ("", None, (0, 10, 2), "WRONG="),
    ("", "WRONG=-reduce", (0, 10, 2), "WRONG=-reduce"),
])  # fmt: skip
def test_communication_gets_ten_minutes_to_start_and_what_is_wrong_is_off(
    plugin, flags, version, expected, monkeypatch
):
    names = {
        "FLAG": "--xla_gpu_first_collective_call_terminate_timeout_seconds",
        "WRONG": "--xla_cpu_experimental_ynn_fusion_type",
    }

    def whole(text):
        for short, name in names.items():
            text = text and text.replace(short, name)
        return text

    monkeypatch.setattr(launch.importlib.util, "find_spec", lambda module: module == plugin)
    monkeypatch.setattr(jax, "__version_info__", version)
    monkeypatch.setattr(jax, "__version__", ".".join(map(str, version)))
    monkeypatch.delenv("XLA_FLAGS", raising=False)
    if flags:
        monkeypatch.setenv("XLA_FLAGS", whole(flags))
    launch.set_xla_flags()
    assert os.environ.get("XLA_FLAGS") == whole(expected)


def test_this_jax_knows_the_flag():
    """XLA ends the process at a flag that it does not know."""
    flag = "--xla_gpu_first_collective_call_terminate_timeout_seconds=600"
    env = os.environ | {"XLA_FLAGS": flag, "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-c", "import jax; jax.devices()"]
    assert subprocess.run(command, env=env, capture_output=True).returncode == 0


@pytest.mark.parametrize("configured, wheels, processes, folder", [
    ("", {}, 1, ".cache/jax"),
    ("", {"libtpu": "0.1", "nvidia-cudnn-cu13": "9.28.0"}, 1, ".cache/jax/cudnn-9.28.0"),
    ("mine", {"nvidia-cudnn-cu13": "9.28.0.42"}, 1, "mine"),
    ("", {}, 2, ""),
    ("mine", {}, 2, "mine"),
])  # fmt: skip
def test_where_compiled_programs_are_kept(configured, wheels, processes, folder, monkeypatch):
    """They have plans of cuDNN, which JAX's key does not know; several processes keep none."""
    installed = [SimpleNamespace(metadata={"Name": n}, version=v) for n, v in wheels.items()]
    monkeypatch.setattr(cache.importlib.metadata, "distributions", lambda: installed)
    monkeypatch.setattr(jax, "process_count", lambda: processes)
    before = jax.config.jax_compilation_cache_dir
    jax.config.update("jax_compilation_cache_dir", configured)
    try:
        cache.set_compilation_cache()
        assert (jax.config.jax_compilation_cache_dir or "") == folder
    finally:
        jax.config.update("jax_compilation_cache_dir", before)


# ---- The attention kernel ------------------------------------------------------------------------
C = train_gpt.PRESETS["record"]
TINY = train_gpt.PRESETS["tiny"]
xla_kernel = jax.nn.dot_product_attention
positions = train_gpt.positions


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


def code(change=lambda high, low: (high, low), a=4096, b=256):
    """positions() with other document codes: of change(high, low), with the weights a and b."""

    def wrong(starts, c, stage):
        pos = positions(starts, c, stage)
        one, _, high, low = jnp.moveaxis(pos.doc_k.astype(jnp.int32), -1, 0)
        high, low = change(high, low)
        doc_q = jnp.stack((-a * high, -b * low, a * one, b * one), axis=-1).astype(c.compute)
        doc_k = jnp.stack((one, one, high, low), axis=-1).astype(c.compute)
        return pos._replace(doc_q=doc_q, doc_k=doc_k)

    return wrong


KERNELS = dict(
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
CODES = dict(
    sign_of_high=code(a=-4096),
    no_highest_bit=code(lambda high, low: (high & ~128, low)),
    no_lowest_bit=code(lambda high, low: (high, low & ~1)),
)


@pytest.fixture
def stamps(monkeypatch, tmp_path) -> Path:
    """The folder in which launch.py remembers a passed check."""
    monkeypatch.setattr(launch, "ROOT", tmp_path)
    return tmp_path / ".cache"


@pytest.mark.parametrize("c, codes", [(C, positions), (C, code()), (TINY, positions)])
def test_the_kernel_of_this_machine_passes_with_a_margin(c, codes, monkeypatch):
    monkeypatch.setattr(jax.nn, "dot_product_attention", kernel)
    monkeypatch.setattr(train_gpt, "positions", codes)
    errors = launch.attention_errors(train_gpt, c)
    assert list(errors) == ["y", "dq", "dk", "dv"]
    assert all(0 < error < 0.03 for error in errors.values())


def test_the_kernel_passes_for_the_narrow_heads_of_record_92(monkeypatch):
    monkeypatch.setattr(jax.nn, "dot_product_attention", kernel)
    errors = launch.attention_errors(frozen, RECORD92, narrow=True)
    assert all(0 < error < 0.03 for error in errors.values())


@pytest.mark.parametrize("fault", [*KERNELS, *CODES])
def test_a_wrong_kernel_or_document_code_is_refused(fault, monkeypatch, capsys, stamps):
    def attend(*qkv, **options):
        if "mask" in options:  # the reference stays right
            return kernel(*qkv, **options)
        return KERNELS.get(fault, kernel)(*qkv, **options)

    monkeypatch.setattr(jax.nn, "dot_product_attention", attend)
    monkeypatch.setattr(train_gpt, "positions", CODES.get(fault, positions))
    with pytest.raises(SystemExit) as stopped:
        launch.check_attention_once(train_gpt, C)
    assert stopped.value.code == 2 and not stamps.exists()
    line = r"launch\.py: attention by cudnn is wrong on this machine, errors \{.*\}; try.*\n"
    assert re.fullmatch(line, capsys.readouterr().err)


def test_heads_of_half_the_channels_are_checked_where_a_layer_has_them(monkeypatch, stamps):
    widths = []

    def attention_errors(script, c, narrow=False):
        widths.append(narrow)
        return {"y": 0.0}

    monkeypatch.setattr(launch, "attention_errors", attention_errors)
    launch.check_attention_once(frozen, RECORD92)
    launch.check_attention_once(train_gpt, RECORD)
    assert widths == [False, True, False]


def test_a_pass_is_remembered_until_something_changes(monkeypatch, stamps):
    errors = Mock(return_value={"y": 0.01})
    monkeypatch.setattr(launch, "attention_errors", errors)
    monkeypatch.setattr(launch.inspect, "getsource", lambda function: function and "source")
    for _ in range(2):
        launch.check_attention_once(train_gpt, C)
    assert errors.call_count == 1 and len([*stamps.iterdir()]) == 1
    changes = [
        (launch.inspect, "getsource", lambda function: "other source"),
        (launch.machine, "nvidia_smi", lambda *_: ["H100, other driver"]),
        (launch.os, "uname", lambda: Mock(nodename="other machine")),
        (launch.importlib.metadata, "distributions", lambda: []),
    ]
    for n, change in enumerate(changes, 2):
        monkeypatch.setattr(*change)
        for _ in range(2):
            launch.check_attention_once(train_gpt, C)
        assert errors.call_count == n


@pytest.mark.parametrize("platform, attention, checked", [
    ("gpu", "cudnn", True), ("gpu", "band", False), ("cpu", "cudnn", False),
])  # fmt: skip
def test_cudnn_is_checked_before_a_run_on_gpus(platform, attention, checked, monkeypatch, script):
    check = Mock(side_effect=SystemExit(2))
    device = SimpleNamespace(platform=platform, device_kind="any")
    script.fit_devices = lambda c: ([device], dataclasses.replace(c, attention=attention))
    monkeypatch.setattr(launch, "check_attention_once", check)
    with pytest.raises(SystemExit) if checked else contextlib.nullcontext():
        launch.main([train_gpt.__file__, "tiny"])
    assert check.called == checked and len(script.runs) == (not checked)


# ---- Before and after a run ----------------------------------------------------------------------
def test_the_table_of_layers_has_a_line_for_each_and_a_word_for_every_field():
    lines = launch.layer_table(RECORD).splitlines()
    assert lines[0].endswith("short 128, 384, 640, 768, 768; long 384, 896, 1408, 1664, 2560")
    layers = lines[2:]
    assert len(layers) == 11
    assert layers[6] == "layer  6  no attention  adds layer 3"
    assert layers[10].startswith("layer 10  long window   key offset, head gates, dynamic compos")
    lines = launch.layer_table(RECORD92).splitlines()
    assert lines[9] == "layer  7  no attention  x0, no MLPs"
    words = "narrow q and k, narrow v, value table 2, attends to layer 7, 2 MLPs"
    assert lines[10] == f"layer  8  short window  {words}"
    layer = SimpleNamespace(window=None)  # a copy may have fewer fields
    bare = SimpleNamespace(layers=[layer], stages=RECORD.stages)
    assert launch.layer_table(bare).endswith("layer  0  no attention")
    switches = {f.name for f in dataclasses.fields(frozen.Layer) if f.type is bool}
    switches |= {f.name for f in dataclasses.fields(train_gpt.Layer) if f.type is bool}
    assert switches == {*launch.WORDS}


@pytest.mark.parametrize("is_terminal, wish, shown", [
    (True, None, True), (False, None, False), (True, "0", False),
])  # fmt: skip
def test_on_a_terminal_a_run_ends_with_a_sample(
    is_terminal, wish, shown, tmp_path, monkeypatch, script
):
    """The process is replaced, so that the devices are free."""
    if wish:
        monkeypatch.setenv("JNANO_SAMPLE", wish)
    monkeypatch.setattr(launch.os, "closerange", lambda low, high: None)
    started = Mock(side_effect=SystemExit)
    script.weights = tmp_path / "w"
    monkeypatch.setattr(launch.os, "execv", started)
    monkeypatch.setattr(sys.stdout, "isatty", lambda: is_terminal, raising=False)
    with pytest.raises(SystemExit) if shown else contextlib.nullcontext():
        launch.main([train_gpt.__file__, "tiny"])
    assert started.call_count == shown
    if shown:
        command = started.call_args[0][1]
        tool = str(ROOT / "evals/sample.py")
        weights = str(tmp_path / "w")
        assert command[-5:] == [tool, weights, "--script", train_gpt.__file__, "--go_on"]


@pytest.mark.parametrize("tool", ["import sys; sys.exit(2)", "import os; os.kill(0, 2)"])
def test_the_sample_does_not_change_the_status_of_the_run(tool, tmp_path):
    """Not if it fails, nor if Ctrl-C, which reaches all processes of a terminal, ends it."""
    (tmp_path / "evals").mkdir()
    (tmp_path / "evals/sample.py").write_text(tool)
    code = f"import launch, pathlib; launch.ROOT = pathlib.Path({str(tmp_path)!r}); "
    code += "launch.show_sample(pathlib.Path('w'), pathlib.Path('s'))"
    env = os.environ | {"PYTHONPATH": str(ROOT / "run")}
    done = subprocess.run([sys.executable, "-c", code], env=env, start_new_session=True)
    assert done.returncode == 0


@pytest.mark.parametrize("shared", [True, False])
def test_hosts_that_write_one_table_share_a_disk(shared, monkeypatch, tmp_path, capsys):
    """Presets without such a table need not."""
    monkeypatch.chdir(tmp_path)
    other = lambda value: value and shared if isinstance(value, bool) else value
    monkeypatch.setattr(launch, "gather", lambda value: [value, other(value)])
    launch.check_shared_disk(train_gpt, RECORD)
    assert not list(tmp_path.iterdir())
    stopped = contextlib.nullcontext() if shared else pytest.raises(SystemExit)
    with stopped:
        launch.check_shared_disk(frozen, RECORD92)
    assert ("a disk that they share" in capsys.readouterr().err) == (not shared)
    assert not list((tmp_path / "logs").iterdir())
    launch.check_shared_disk(frozen, dataclasses.replace(RECORD92, save=0))


@pytest.mark.parametrize("kind", ["link", "file", "parent", "new", "there"])
def test_a_log_that_cannot_be_written_is_refused_before_the_run(kind, tmp_path, capsys):
    """It is tried, because rights say little, and leaves no file."""
    folder = tmp_path / "logs"
    if kind == "link":
        folder.symlink_to(tmp_path / "gone")
    elif kind == "file":
        folder.touch()
    elif kind == "parent":
        folder = tmp_path / "gone/logs"
    elif kind == "there":
        folder.mkdir()
    before = {*tmp_path.rglob("*")}
    with contextlib.nullcontext() if kind in ("new", "there") else pytest.raises(SystemExit):
        launch.try_to_write(folder, b"log")
    assert {*tmp_path.rglob("*")} == (before | {folder} if kind == "new" else before)
    shown = capsys.readouterr().err
    link = f", a link to {tmp_path / 'gone'}," if kind == "link" else ""
    why = "No such file or directory" if kind == "parent" else "this is no folder"
    line = f"launch.py: {folder}{link} must be a folder for the log, but {why}\n"
    assert shown == ("" if kind in ("new", "there") else line)


# ---- Room on the disk ----------------------------------------------------------------------------
Usage = namedtuple("Usage", "free")


def test_room_for_weights_and_checkpoints_is_asked_for_before_the_run(monkeypatch, capsys):
    """Record 92 has 33.7 GB of weights and 43.2 GB in a checkpoint, record 89 has 2.6."""

    def check(free_GB, script=frozen, c=RECORD92, refused=False, save_every=0, save=1):
        monkeypatch.setattr(launch.shutil, "disk_usage", lambda _: Usage(free_GB * 1e9))
        options = SimpleNamespace(save_every=save_every, resume="")
        with pytest.raises(SystemExit) if refused else contextlib.nullcontext():
            CHECK_DISK(script, dataclasses.replace(c, save=save), options)
        out, err = capsys.readouterr()
        return err if refused else out

    shown = check(34)
    assert "an interrupted run leaves a checkpoint of 43.2 GB" in shown
    assert "This run will write 34 GB" in shown
    assert "This run will write" not in check(34, save=0)
    assert "This run will write 77 GB" in check(78, save_every=1000)  # one checkpoint
    room = "GB of room, but the weights take 33.7 GB"
    for changes in dict(save_every=100), dict(save=0, save_every=100):
        assert room in check(34, refused=True, **changes)
    assert room in check(33, refused=True)
    assert "the weights take 2.6 GB" in check(2, train_gpt, RECORD, refused=True)
    monkeypatch.setattr(launch, "old_checkpoints", lambda c: 2)
    check(78, save_every=100)
    monkeypatch.setattr(launch, "old_checkpoints", lambda c: 1)
    check(78, save_every=100, refused=True)


def test_the_checkpoints_of_the_resumed_run_are_counted(tmp_path):
    """Those of the run that began last, whatever the times of its files are."""
    for name in ("a/4.state", "b/3.state", "b/2.state", "b/3.bigram.bin", "b.npz"):
        file = tmp_path / name
        file.parent.mkdir(exist_ok=True)
        file.touch()
    os.utime(tmp_path / "a/4.state", (2**32, 2**32))
    for resume, count in ("", 0), (tmp_path, 2), (tmp_path / "a/4.state", 1), (tmp_path / "b", 2):
        c = SimpleNamespace(resume=str(resume), force=0)
        assert launch.old_checkpoints(c) == count
        assert launch.old_checkpoints(SimpleNamespace(resume=str(resume), force=1)) == 0


# ---- Candidates ----------------------------------------------------------------------------------
def test_too_few_candidates_are_refused_before_the_run(monkeypatch, capsys):
    """Of record 92's softmax: the loss would leave out targets in silence."""
    tokens = np.arange(50_000, dtype=np.uint16) % 250
    monkeypatch.setattr(frozen, "find_data", lambda c: {"train": [tokens]})

    def check(candidates):
        stage = dataclasses.replace(
            RECORD92.stages[0], steps=1, tokens=2048, candidates=candidates, max_doc=0
        )
        c = dataclasses.replace(RECORD92, stages=(stage,), head_chunk=256, val_T=1024)
        launch.check_candidates(frozen, c)

    check(250)
    with pytest.raises(SystemExit):
        check(249)
    line = "step 0 reads 250 distinct tokens at once, but has 249 candidates"
    assert line in capsys.readouterr().err


# ---- Memory --------------------------------------------------------------------------------------
def script_of(preset: str):
    """The script that has a preset."""
    return frozen if preset == "record92" else train_gpt


def have(monkeypatch, *gigabytes: float):
    """Devices of which JAX has so much memory; None: it does not state it."""
    devices = []
    for GB in gigabytes:
        stats = {"bytes_limit": int(1e9 * GB)} if GB else None
        devices.append(Mock(memory_stats=lambda stats=stats: stats))
    monkeypatch.setattr(jax, "devices", lambda: devices)
    monkeypatch.setattr(jax, "local_devices", lambda: devices)


def fitted(line: str) -> list[str]:
    """The flags that the launcher adds to a command line."""
    argv = line.split()
    preset, c = script_of(argv[0]).parse_config(argv)
    added = launch.fit(argv, preset, c, launch.device_memory())
    return fits.command_line(added).split()


@pytest.mark.parametrize("preset", fits.ROWS)
def test_what_is_fitted_is_the_preset_as_it_is(preset):
    """And the preset can have the flags of every row."""
    c = script_of(preset).PRESETS[preset]
    assert {name: getattr(c, name) for name in fits.RECORD} == fits.SIZES[preset]
    for flags, _ in fits.ROWS[preset]:
        dataclasses.replace(c, **flags)


# Gigabytes that JAX has: all of a card's 10^9 bytes, times the fraction that run.sh sets.
@pytest.mark.parametrize("machine, count, GB, row", [
    ("8 x H100", 8, 85.5 * 0.75, 0),
    ("1 x H100", 1, 85.5 * 0.75, 0),
    ("1 x L40S", 1, 48.3 * 0.75, 0),
    ("1 x A100, 40 GB", 1, 42.4 * 0.92, 0),
    ("1 x V100, 32 GB", 1, 34.1 * 0.92, 1),
    ("1 x RTX 4090", 1, 25.7 * 0.92, 2),
    ("8 x RTX 4090", 8, 25.7 * 0.92, 0),
    ("2 x RTX 3090", 2, 25.4 * 0.92, 1),
    ("1 x RTX 4080", 1, 17.1 * 0.92, 3),
    ("v5e-8", 8, 16.9, 2),
    ("v5e-1", 1, 16.9, 3),
    ("v6e-1", 1, 33.5, 1),
    ("a CPU", 1, None, 0),
])  # fmt: skip
def test_the_memory_of_the_smallest_device_chooses(machine, count, GB, row, monkeypatch, capsys):
    have(monkeypatch, *[100] * (count - 1), GB)
    flags = fits.FITS[row][0]
    assert fitted("record --seed 1") == fits.command_line(flags).split()
    line = capsys.readouterr().out
    assert fits.command_line(flags) in line
    assert ("as it is: --batch 8" in line) == bool(flags) and ("not the rec" in line) == (row == 3)


@pytest.mark.parametrize("preset, machine, devices, GB, row", [
    ("medium", "8 x H100", 8, 85.5 * 0.75, 0), ("medium", "1 x H100", 1, 85.5 * 0.75, 1),
    ("medium", "8 x A100, 40 GB", 8, 42.4 * 0.92, 1), ("medium", "8 x 4090", 8, 25.7 * 0.92, 2),
    ("record92", "8 x H100", 8, 85.5 * 0.75, 0), ("record92", "1 x H200", 1, 150 * 0.75, 0),
    ("record92", "2 x H100", 2, 85.5 * 0.75, 0),
])  # fmt: skip
def test_larger_presets_have_rows_of_their_own(
    preset, machine, devices, GB, row, monkeypatch, capsys
):
    have(monkeypatch, *[GB] * devices)
    assert fitted(preset) == fits.command_line(fits.ROWS[preset][row][0]).split()
    assert (f"so {preset} runs with" in capsys.readouterr().out) == (row > 0)


@pytest.mark.parametrize("line", [
    "record --batch 8", "record --microbatch=1", "record --head_chunk 8192",
    "record --val_T 131072", "record --bigrams 1024", "tiny",
])  # fmt: skip
def test_what_the_user_has_chosen_stays(line, monkeypatch):
    have(monkeypatch, 20)
    assert fitted("record") and not fitted(line)


def test_a_preset_of_a_copy_is_fitted_by_its_sizes(monkeypatch):
    have(monkeypatch, 50)
    flags = fits.FITS_MEDIUM[1][0]
    assert launch.fit(["mine"], "mine", train_gpt.PRESETS["medium"], 50) == flags


def test_what_a_copy_has_changed_stays(monkeypatch):
    have(monkeypatch, 20)
    changed = dataclasses.replace(RECORD, bigrams=1024)
    assert launch.fit(["record"], "record", changed, 20) == {}
    without_a_field = SimpleNamespace(batch=8)
    assert launch.fit(["record"], "record", without_a_field, 20) == {}


def test_the_run_and_its_command_have_the_flags_of_the_fit(monkeypatch, script):
    """The log has them after those that were typed."""
    have(monkeypatch, 24)
    device = SimpleNamespace(platform="gpu", device_kind="any")
    script.fit_devices = lambda c: ([device], c)
    line = "record --attention band --save_every 9"
    launch.main([train_gpt.__file__, *line.split()])
    ((c, argv, its_guard),) = script.runs
    flags = fits.fit(24, 1)
    added = fits.command_line(flags)
    assert argv == f"{line} {added}".split()
    assert its_guard.command == f"./run.sh record --attention band {added} --save_every 9"
    assert {name: getattr(c, name) for name in flags} == flags


@pytest.mark.parametrize("copy, last", [
    (False, "next: ./run.sh sample logs/x.npz"),
    (True, "next: ./run.sh sample logs/x.npz --script '{}'"),
])  # fmt: skip
def test_a_run_ends_with_the_command_that_samples_it(copy, last, script, tmp_path, capsys):
    path = tmp_path / "my idea.py" if copy else Path(train_gpt.__file__)
    path.touch()
    script.weights = Path("logs/x.npz")
    launch.main([str(path), "tiny"])
    assert capsys.readouterr().out.splitlines()[-1] == last.format(path)


def test_the_end_of_record_92_names_no_tool_that_cannot_read_its_weights(monkeypatch, capsys):
    script = SimpleNamespace(**vars(frozen))
    script.parse_config = lambda argv: ("record92", RECORD92)
    script.fit_devices = lambda preset, c: ([], c)
    script.main = lambda argv, command: Path("logs/x.npz")
    stand_in(monkeypatch, script)
    monkeypatch.setattr(launch, "check_candidates", lambda script, c: None)
    launch.main([str(PATH), "record92"])
    shown = capsys.readouterr().out
    assert shown.startswith("warning: record92 may miss 3.28") and "next: " not in shown


def test_hosts_that_were_fitted_otherwise_are_refused(monkeypatch):
    """The same values, typed on one host only, leave nothing to fit there."""
    compared = {}
    monkeypatch.setattr(launch, "compare", compared.update)
    script = Mock(prefix_table=train_gpt.prefix_table)
    launch.compare_tokens(script, dataclasses.replace(RECORD, batch=16, head_chunk=8192), [])
    assert compared["--batch"] == 16 and {f"--{name}" for name in fits.RECORD} <= compared.keys()


def test_masks_of_other_hosts_are_compared(monkeypatch):
    """Record 92: a host that validates with another mask would have another loss."""
    found = []
    for bit in False, True:
        compared = {}
        monkeypatch.setattr(launch, "compare", compared.update)
        script = Mock(prefix_table=frozen.prefix_table)
        script.canonical_mask = lambda c, bit=bit: (np.array([bit]),)
        launch.compare_tokens(script, RECORD92, [])
        found.append(compared)
    first, second = found
    assert first.keys() == second.keys() and first != second


@pytest.mark.parametrize("preset, GB", [("record", 8), ("record92", 39), ("medium", 11.5)])
def test_too_little_memory_for_any_row_is_refused(preset, GB, monkeypatch, capsys):
    have(monkeypatch, 80, GB)
    with pytest.raises(SystemExit) as stopped:
        fitted(preset)
    assert stopped.value.code == 2
    line = (
        f"JAX has {GB:.1f} GB of each of 2 devices, but {preset} needs {fits.least(2, preset)} GB"
    )
    assert line in capsys.readouterr().err
