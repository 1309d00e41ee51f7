"""Several hosts, here groups of processes on one machine: they train as one, they agree before they
begin, and none waits for one that is gone."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import jax
import numpy as np
import pytest

import train_gpt
from tests.tools import FLOAT32, SMALL, text, write_shard

TRAIN = Path(train_gpt.__file__).resolve()
FLAGS = ["tiny", *SMALL, *"--steps 10 --val_every 5 --plan Lv0 --stages".split()]
FLAGS += ["10 256 8 16 0 1 0,1"]
FLAGS += [word for name in FLOAT32.items() for word in ("--{} {}".format(*name)).split()]
LOST = {0: "leader task was preempted/died", 1: r"Task 1 heartbeat timeout|heartbeats\):\s+1\b"}
CHANGED = f"""import os, sys
sys.path.insert(0, {str(TRAIN.parent)!r})
import jax, train_gpt
stream, change = train_gpt.stream, os.environ["CHANGE"]
def changed(*args):
    for n, rows in enumerate(stream(*args)):
        if change == "count":
            print("rows", len(rows), file=sys.stderr)
        if change == "fail" and n == 35 and jax.process_index():
            raise OSError("the disk is gone")
        yield rows
train_gpt.stream = changed
if change == "version" and os.environ["JNANO_PROCESS"] == "1":
    jax.__version__ = "0.0.1"
train_gpt.main(sys.argv[1:])
"""


@pytest.fixture(scope="module")
def start(tmp_path_factory):
    """Starts hosts in a new folder, by Slurm's variables or ours."""
    data, cache = tmp_path_factory.mktemp("data"), tmp_path_factory.mktemp("cache")
    write_shard(data / "x_train_1.bin", text(1_300_000))
    write_shard(data / "x_val_1.bin", text(1600))
    (changed := data / "changed.py").write_text(CHANGED)
    started = []

    def start(count, devices, *flags, each=(), of=None, slurm=False, scripts=2 * [TRAIN], **env):
        """each: further flags of every process; of: the processes to start."""
        folder, hosts = tmp_path_factory.mktemp("run"), []
        with socket.socket() as free:
            free.bind(("localhost", 0))
            port = free.getsockname()[1]
        for rank in range(count) if of is None else of:
            own = dict(JNANO_COORDINATOR=f"localhost:{port}", JNANO_PROCESSES=str(count),
                       JNANO_PROCESS=str(rank)) if count > 1 else {}  # fmt: skip
            own = SLURM(port, count, rank) if slurm else own
            own |= dict(JAX_PLATFORMS="cpu", JAX_NUM_CPU_DEVICES=str(devices),
                JAX_DISABLE_MOST_OPTIMIZATIONS="1", JAX_COMPILATION_CACHE_DIR=str(cache),
                JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS="0")  # fmt: skip
            out, err = (open(folder / f"{rank}.{name}", "w") for name in ("out", "err"))
            script = changed if "CHANGE" in env else scripts[rank % 2]
            argv = [sys.executable, script, *FLAGS, "--data", str(data), *flags]
            argv += each[rank] if each else ()
            # A background job ignores Ctrl-C and its children inherit that, but for a handler.
            hosts.append(subprocess.Popen(
                argv, cwd=folder, env=os.environ | own | env, stdout=out, stderr=err,
                preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
            ))  # fmt: skip
        started.extend(hosts)
        return SimpleNamespace(hosts=hosts, folder=folder)

    yield start
    for host in started:
        host.kill()


def SLURM(port: int, count: int, rank: int, job: int = 0) -> dict[str, str]:
    one = dict(JOB_ID=port, STEP_NODELIST="localhost", PROCID=rank, NTASKS=job or count,
               STEP_NUM_TASKS=count, LOCALID=0, STEP_TASKS_PER_NODE=f"1(x{count})")  # fmt: skip
    return {f"SLURM_{name}": str(value) for name, value in one.items()}


def end(run, since=0.0) -> SimpleNamespace:
    """How the hosts ended, and how many seconds after that."""
    last = time.time() + 120
    while any(host.poll() is None for host in run.hosts) and time.time() < last:
        time.sleep(0.1)
    seconds = time.time() - since
    codes = [host.poll() for host in run.hosts]
    read = lambda suffix: [path.read_text() for path in sorted(run.folder.glob(f"?.{suffix}"))]
    out = [re.sub(r".*peer ranks.*\n", "", text) for text in read("out")]  # of gloo, torn at times
    return SimpleNamespace(codes=codes, out=out, err=read("err"), seconds=seconds, **vars(run))


def finish(run) -> SimpleNamespace:
    """Ended well: the facts of its newest log, its losses and its weights."""
    run = end(run)
    assert {*run.codes} == {0}, (run.codes, run.err)
    log = max(run.folder.glob("logs/*.txt"), key=os.path.getmtime)
    rest = log.read_text().split("=" * 100 + "\n")[-1]
    facts = {name: json.loads(value) for name, value in re.findall(r"^([a-z]+) (.*)$", rest, re.M)}
    losses = re.findall(r"^step:(\d+)/\d+ val_loss:(\S+)", rest, re.M)
    weights = dict(np.load(log.with_suffix(".npz")))
    for name in "config", "result", "source":
        weights.pop(name)
    return SimpleNamespace(
        **vars(run), log=log, facts=facts, weights=weights,
        losses={int(step): float(loss) for step, loss in losses},
    )  # fmt: skip


def assert_alike(run, other) -> None:
    assert run.losses and run.losses.keys() <= other.losses.keys()
    for step in run.losses:
        assert run.losses[step] == pytest.approx(other.losses[step], abs=5e-4), step
    assert run.weights.keys() == other.weights.keys()
    for name, weight in run.weights.items():
        np.testing.assert_allclose(weight, other.weights[name], rtol=5e-4, atol=5e-4, err_msg=name)


# ---- As one --------------------------------------------------------------------------------------
@pytest.fixture(scope="module")
def pair(start) -> SimpleNamespace:
    return finish(start(2, 4, "--save_every", "5", CHANGE="count"))


def test_two_hosts_train_as_one_with_the_seed_of_the_first(start, pair):
    one = finish(start(1, 8, "--seed", str(pair.facts["seed"])))
    assert_alike(pair, one)
    assert pair.facts["parameters"] == one.facts["parameters"]
    assert one.facts["hosts"][0].endswith(": 8 x cpu") and len(one.facts["hosts"]) == 1


def test_the_first_host_alone_writes(pair):
    assert [path.suffix for path in pair.folder.glob("logs/*.*")].count(".txt") == 1
    assert len([*pair.folder.glob("logs/*.npz")]) == 1 and pair.out[1] == ""
    assert pair.out[0].splitlines()[-2].startswith("RESULT {")
    assert [host.split(": ")[1] for host in pair.facts["hosts"]] == ["4 x cpu", "4 x cpu"]


def test_each_host_makes_only_its_own_rows(pair):
    counts = [re.findall(r"^rows (\d+)$", err, re.M) for err in pair.err]
    assert {*counts[0], *counts[1]} == {"4"}
    assert [len(rows) for rows in counts] == 2 * [10 + 3 * 2]  # steps, and two in a validation


def test_a_checkpoint_goes_on_on_as_many_devices_to_the_bit_and_on_fewer(start, pair):
    """As many by Slurm's variables."""
    (path,) = pair.folder.glob("logs/*/*05.state")
    for hosts, devices in (2, 4), (1, 8), (1, 2):
        run = finish(start(hosts, devices, "--resume", str(path), slurm=hosts == 2))
        assert_alike(run, pair)
        same = [np.array_equal(run.weights[name], x) for name, x in pair.weights.items()]
        assert all(same) or hosts == 1
        assert ("not bit by bit" in run.err[0]) == (hosts == 1)


# ---- More than 8 devices -------------------------------------------------------------------------
def refused(monkeypatch, capsys, count: int) -> str:
    """What two hosts of so many devices together say to a batch of 8."""
    devices = [SimpleNamespace(process_index=i // 8, id=i, platform="cpu") for i in range(count)]
    monkeypatch.setattr(jax, "devices", lambda: devices)
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    with pytest.raises(SystemExit):
        train_gpt.fit_devices(*train_gpt.parse_config(FLAGS))
    return capsys.readouterr().err


@pytest.mark.parametrize("axes", [dict(fsdp=1), dict(fsdp=8), dict(nodes=2, fsdp=8)])
def test_beyond_eight_devices_the_mesh_has_nodes(axes):
    count = axes["fsdp"] * axes.get("nodes", 1)
    mesh = train_gpt.make_mesh([Mock(process_index=0, id=i) for i in range(count)])
    assert mesh.shape == axes


def test_sixteen_devices_train_as_one(start, monkeypatch, capsys):
    """With the flags that a refusal names: twice the sequences, half as long."""
    said = refused(monkeypatch, capsys, 16)
    flags = re.search(r"16 x \[16\] tokens: (--batch 16 --head_chunk \d+)", said)
    flags = [*flags[1].split(), "--seed", "1"]
    runs = [finish(start(*shape, *flags)) for shape in ((1, 1), (1, 16), (2, 8))]
    assert [run.facts["config"]["batch"] for run in runs] == 3 * [16]
    assert [len(run.facts["devices"]) for run in runs] == [1, 16, 16]
    assert_alike(runs[1], runs[0])
    assert_alike(runs[2], runs[0])


# ---- How they find each other --------------------------------------------------------------------
MPI = dict(
    OMPI_COMM_WORLD_SIZE="2", OMPI_COMM_WORLD_RANK="1", OMPI_MCA_orte_hnp_uri="1.0;tcp://a:1"
)
TORCH = dict(MASTER_ADDR="a", MASTER_PORT="29500", RANK="1", WORLD_SIZE="2", LOCAL_RANK="1")
OURS = dict(JNANO_COORDINATOR="a:7", JNANO_PROCESSES="2", JNANO_PROCESS="1")
LOCAL = dict(OMPI_COMM_WORLD_LOCAL_RANK="1", OMPI_COMM_WORLD_LOCAL_SIZE="2")
SHARED = SLURM(1, 2, 1) | dict(SLURM_LOCALID="1", SLURM_STEP_TASKS_PER_NODE="2")
NONE = dict(coordinator_address=None, num_processes=None, process_id=None)  # JAX finds them itself
ALL, OWN = dict(local_device_ids=[]), dict(local_device_ids=[1])
THERE = dict(num_processes=2, process_id=1)


@pytest.mark.parametrize("env, told", [
    ({}, None),
    (SLURM(1, 1, 0, job=8), None),  # an interactive shell of a job of eight tasks
    (SLURM(1, 2, 1), NONE | ALL),
    (SHARED, NONE | OWN),
    (SHARED | dict(CUDA_VISIBLE_DEVICES="0"), NONE | ALL),
    (SHARED | dict(CUDA_VISIBLE_DEVICES="0,1"), NONE | OWN),
    (MPI | LOCAL | dict(OMPI_COMM_WORLD_LOCAL_SIZE="1"), NONE | ALL),
    (MPI | LOCAL, NONE | OWN),
    (TORCH | dict(LOCAL_WORLD_SIZE="1"), THERE | dict(coordinator_address="a:29501") | ALL),
    (TORCH | dict(LOCAL_WORLD_SIZE="2"), THERE | dict(coordinator_address="a:29501") | OWN),
    (OURS, THERE | dict(coordinator_address="a:7") | ALL),
])  # fmt: skip
def test_launchers_say_who_is_there(env, told, monkeypatch):
    """One task of a host takes all of its devices, several take one each."""
    for name in [*os.environ]:
        if re.match("SLURM_|OMPI_|JNANO_|MASTER_|RANK$|WORLD_SIZE$|LOCAL_|CUDA_VIS", name):
            monkeypatch.delenv(name)
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    names = "coordinator_address", "num_processes", "process_id", "local_device_ids"
    names += "cluster_detection_method", "initialization_timeout"
    seen = lambda *args, **named: dict(zip(names, args, strict=False)) | named
    call = Mock(side_effect=seen)
    monkeypatch.setattr(jax.distributed, "initialize", call)
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)
    monkeypatch.setattr(jax.config, "update", Mock())
    train_gpt.join()
    assert call.called == bool(told)
    if told:
        got = dict.fromkeys(told) | seen(*call.call_args.args, **call.call_args.kwargs)
        assert {name: got[name] for name in told} == told


def test_a_mixed_run_ends_at_once_and_says_what_differs(start):
    """Three differences are told."""
    other = start(1, 1, of=()).folder / "train_gpt.py"
    other.write_text(TRAIN.read_text().replace("import json\n", "import json  # changed\n", 1))
    write_shard(other.with_name("x_train_1.bin"), text(3000, 1))
    write_shard(other.with_name("x_val_1.bin"), text(1600))
    flags = ["--data", str(other.parent), "--adam_lr", "0.01"]
    mixed = start(2, 1, each=[[], flags], scripts=[TRAIN, other])
    for hosts, said in (mixed, CHANGES), (start(2, 1, CHANGE="version"), ["jax is '"]):
        run = end(hosts)
        assert run.codes == [2, 2] and not any(run.out), run.err
        assert all(re.search(word, err) for err in run.err for word in said), run.err


CHANGES = r"train_gpt\.py:\d+ is '.*import json", "--adam_lr is 0.01", r"x_train_1.bin is '\w+'"


# ---- How they end --------------------------------------------------------------------------------
# Less of a model compiles sooner. Of hosts, how many and which start; with which flags and
# environment; when one prints what (seconds later, of one that prints nothing) which one gets
# which signal; codes; and what one says. The slow ones first.
LONG = "--plan S --E 0 --steps 5000 --val_every 5000 --save 0".split()
ENDS = {
    "refused": (2, dict(each=[[], ["--data", "/no"]]), "/no", 0, None, {1: 2}, {1: "/no"}),
    "interrupted while compiling": (
        2, dict(JAX_ENABLE_COMPILATION_CACHE="0"), "compiling", 1, "INT", {1: 130}, {}),
    "first ended while compiling": (
        2, dict(JAX_ENABLE_COMPILATION_CACHE="0"), "compiling", 0, "TERM", {0: -15}, {1: LOST[0]}),
    "missing": (3, dict(of=[0, 1], JNANO_WAIT="15"), "1 of 3", 0, None, {0: 2}, {0: "1 of 3"}),
    "told to end": (2, {}, "train_loss", 1, "TERM", {0: 143, 1: 143}, {}),
    "lost": (2, {}, "train_loss", 1, "KILL", {1: -9}, {0: LOST[1]}),
    "failed": (2, dict(CHANGE="fail"), "is gone", 0, None, {1: 1}, {1: "the disk is gone"}),
    "first lost": (2, {}, "train_loss", 0, "KILL", {0: -9}, {1: LOST[0]}),
    "interrupted": (2, {}, "train_loss", 1, "INT", {0: 130, 1: 130}, {}),
    "interrupted while waiting": (2, dict(of=[0]), 8, 0, "INT", {0: -2}, {}),
}  # fmt: skip


@pytest.fixture(scope="module")
def ends(start) -> dict[str, SimpleNamespace]:
    """All of them, some at a time, for they mostly wait."""

    def go(how: tuple) -> SimpleNamespace:
        count, options, word, rank, name, *_ = how
        run = start(count, 1, *LONG, **options)
        if isinstance(word, int):
            time.sleep(word)
        else:
            printed = lambda: "".join(path.read_text() for path in run.folder.glob("?.*"))
            while word not in printed() and any(host.poll() is None for host in run.hosts):
                time.sleep(0.1)
        if name:
            run.hosts[rank].send_signal(signal.Signals[f"SIG{name}"])
        return end(run, time.time())

    with ThreadPoolExecutor(4) as pool:
        return dict(zip(ENDS, pool.map(go, ENDS.values()), strict=True))


@pytest.mark.parametrize("how", ENDS)
def test_no_host_waits_for_one_that_is_gone(ends, how):
    *_, codes, said = ENDS[how]
    print(f"{how}: {ends[how].codes} after {ends[how].seconds:.1f} s")
    assert all(ends[how].codes), ends[how].codes  # none is None, which waits, or 0
    assert {rank: ends[how].codes[rank] for rank in codes} == codes, ends[how].err
    assert ends[how].seconds < 60  # 40 are promised, where the machine is not busy
    for rank, words in said.items():
        assert re.search(words, ends[how].err[rank]), ends[how].err[rank]


def test_a_signal_to_one_host_saves_the_run_of_all(ends):
    for name, how in ("SIGTERM", "told to end"), ("SIGINT", "interrupted"):
        (path,) = ends[how].folder.glob("logs/*/*.state")
        assert f"INTERRUPTED by {name} after step {int(path.stem)}" in ends[how].out[0]
        assert ends[how].err == ["", ""] and ends[how].out[1] == ""
