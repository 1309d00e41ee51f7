"""Several hosts, here processes on one machine: they train as one host would, they refuse to begin
with different settings, and no host waits for one that is gone."""

import os
import re
import signal
import socket
import subprocess
import sys
import time
from types import SimpleNamespace

import numpy as np
import pytest

import train_gpt
from tests.launched import LAUNCH, heed_ctrl_c, with_code
from tests.test_launch import slurm
from tests.test_run import read
from tests.tools import FLOAT32_FLAGS, SMALL, text, with_tiny, write_shard

STAGES = "Stage(10, 256, short=8, long=16, max_doc=0, lr=1.0)"
# Programs that add up numbers of all hosts and compute nothing else: they compile at once. With
# fewer numbers, JAX would wait for their sum, which it does not do in a real step.
SUMS = """
def compile_all(c, mesh, log):
    print("compiling", flush=True)
    place = NamedSharding(mesh, P(mesh.axis_names))
    ones = lambda _: np.ones(100_000, np.float32)
    numbers = jax.make_array_from_callback((100_000 * mesh.size,), place, ones)
    total = jax.jit(jnp.sum, out_shardings=NamedSharding(mesh, P())).lower(numbers).compile()
    factor = math.nan if os.environ.get("CHANGE") == "nan" else 1.0
    def train_program(state, tokens, row):
        time.sleep(0.02)
        return state, factor * total(numbers)
    programs = dict.fromkeys([(0, False), (0, True)], train_program)
    return programs | {(0, "val"): lambda *_: (9.0, 0)}

def warm_up(programs, c, mesh):
    return None
"""
# Models of one layer, which compile soon.
SCRIPTS = {
    "train_gpt.py": with_tiny(train_gpt.SOURCE, "Layer(LONG, value_table=0)", STAGES),
    "sums.py": with_code(
        with_tiny(train_gpt.SOURCE, "Layer(SHORT)", STAGES.replace("10", "5000", 1)), SUMS
    ),
}
FLAGS = ["tiny", *SMALL, *FLOAT32_FLAGS, "--val_every", "5"]
HEARTBEAT = 8
# Runs the launcher, but a host that is lost is noticed after 8 s, not after 30.
LAUNCHER = f"""
import sys
sys.path.append({str(LAUNCH.parent)!r})
import launch
launch.HEARTBEAT = {HEARTBEAT}
launch.main(sys.argv[1:])
"""


@pytest.fixture(scope="module")
def start(tmp_path_factory):
    """Starts the launcher in processes that are the hosts of a run, in a new folder."""
    data = tmp_path_factory.mktemp("data")
    write_shard(data / "x_train_1.bin", text(1_300_000))
    write_shard(data / "x_val_1.bin", text(1600))
    for name, source in SCRIPTS.items():
        (data / name).write_text(source.replace("mudd_head=())", "mudd_head=(), head_chunk=32)"))
    started = []

    def start(count, devices, *flags, each=(), by_slurm=False, script="train_gpt.py", **env):
        """A run of `count` hosts. By rank: further flags (`each`)."""
        folder = tmp_path_factory.mktemp("run")
        hosts = []
        with socket.socket() as free:
            free.bind(("localhost", 0))
            port = free.getsockname()[1]
        for rank in range(count):
            variables = {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": str(devices)}
            if by_slurm:
                variables |= slurm(count, rank, port=port)
            elif count > 1:
                variables |= {"JNANO_COORDINATOR": f"localhost:{port}"}
                variables |= {"JNANO_PROCESSES": str(count), "JNANO_PROCESS": str(rank)}
            argv = [sys.executable, "-c", LAUNCHER, data / script, *FLAGS]
            argv += ["--data", data, *flags, *(each[rank] if each else ())]
            out = (folder / f"{rank}.out").open("w")
            err = (folder / f"{rank}.err").open("w")
            pipes = dict(stdout=out, stderr=err, env=os.environ | variables | env)
            hosts.append(subprocess.Popen(argv, cwd=folder, preexec_fn=heed_ctrl_c, **pipes))
        started.extend(hosts)
        return SimpleNamespace(hosts=hosts, folder=folder, data=data)

    yield start
    for host in started:
        host.kill()


def end(run, since=0.0) -> SimpleNamespace:
    """Waits for the hosts: their exit codes, what they printed, and the seconds since `since`."""
    codes = [host.wait(400) for host in run.hosts]
    seconds = time.time() - since
    read = lambda suffix: [path.read_text() for path in sorted(run.folder.glob(f"?.{suffix}"))]
    out = [re.sub(r".*peer ranks.*\n", "", text) for text in read("out")]  # gloo prints them
    return SimpleNamespace(codes=codes, out=out, err=read("err"), seconds=seconds, **vars(run))


def finish(run) -> SimpleNamespace:
    """Waits for hosts that must end well: the newest log."""
    run = end(run)
    assert {*run.codes} == {0}, (run.codes, run.err)
    log = read(max(run.folder.glob("logs/*.txt"), key=os.path.getmtime))
    for name in "config", "result", "source":
        del log.weights[name]
    return SimpleNamespace(**vars(run) | vars(log))


def assert_alike(run, other) -> None:
    """Equal losses and weights, but for rounding."""
    assert run.losses and run.losses.keys() <= other.losses.keys()
    for step in run.losses:
        assert float(run.losses[step]) == pytest.approx(float(other.losses[step]), abs=5e-4), step
    assert run.weights.keys() == other.weights.keys()
    for name, weight in run.weights.items():
        # Not element by element: Adam may turn the rounding of one tiny gradient into a step.
        gap = np.linalg.norm(weight - other.weights[name])
        assert gap <= 1e-3 * np.linalg.norm(other.weights[name]) + 1e-3, name


# ---- As one host ---------------------------------------------------------------------------------
@pytest.fixture(scope="module")
def pair(start) -> SimpleNamespace:
    return finish(start(2, 4, "--save_every", "4"))


def test_two_hosts_train_as_one_with_the_seed_of_the_first(start, pair):
    """The first host alone writes."""
    one = finish(start(1, 8, "--seed", str(pair.facts["seed"])))
    assert_alike(pair, one)
    assert (pair.facts["hosts"], one.facts["hosts"]) == (2, 1)
    assert len([*pair.folder.glob("logs/*.txt")]) == 1 and pair.out[1] == ""
    assert "RESULT {" in pair.out[0]


def test_a_checkpoint_goes_on_to_the_bit(start, pair):
    """The run finds its hosts by Slurm's variables."""
    (path,) = pair.folder.glob("logs/*/*04.state")
    (log,) = pair.folder.glob("logs/*.txt")
    log.unlink()  # its run has ended
    flags = "--resume", str(path), "--save_every", "4"
    as_many = finish(start(2, 4, *flags, "--seed", str(pair.facts["seed"]), by_slurm=True))
    for name, weight in pair.weights.items():
        assert np.array_equal(as_many.weights[name], weight), name


def test_sixteen_devices_train_as_one(start):
    """The batch has twice the sequences, of half the length, as run/hosts.md recommends."""
    flags = ["--batch", "16", "--head_chunk", "16", "--seed", "1"]
    one = finish(start(1, 1, *flags))
    sixteen = finish(start(2, 8, *flags))
    assert (len(one.facts["devices"]), len(sixteen.facts["devices"])) == (1, 16)
    assert_alike(sixteen, one)


def test_hosts_that_are_not_the_same_end_at_once_with_one_line(start, pair, tmp_path):
    """They differ in a flag, in tokens, in the source, or in the checkpoint that they resume."""
    write_shard(tmp_path / "x_train_1.bin", text(3000, 1))
    write_shard(tmp_path / "x_val_1.bin", text(1600))
    states = sorted(pair.folder.glob("logs/*/*.state"))
    for second in (
        [[], ["--adam_lr", "0.01"]],
        [[], ["--data", str(tmp_path)]],
        [["--resume", str(path)] for path in states],
    ):
        run = end(start(2, 4, each=second))
        assert run.codes == [2, 2] and "compiling" not in "".join(run.out), run.err
        for err in run.err:
            assert re.search(r"^.*: the hosts differ in source, flags, tokens, check", err, re.M)


# ---- How they end --------------------------------------------------------------------------------
@pytest.mark.parametrize("rank, name, codes", [
    (1, "TERM", {0: 143, 1: 143}), (1, "KILL", {1: -9}), (0, "KILL", {0: -9}),
    (0, "", {0: 3, 1: 3}),  # the loss is not finite
])  # fmt: skip
def test_no_host_waits_for_one_that_is_gone(start, rank, name, codes):
    """After a signal to one host, all save the run at the same step."""
    flags = "--R 0 --val_every 5000 --save 0".split()
    run = start(2, 1, *flags, script="sums.py", CHANGE="" if name else "nan")
    out = run.folder / "0.out"
    while "train_loss" not in out.read_text() and all(host.poll() is None for host in run.hosts):
        time.sleep(0.1)
    if name:
        run.hosts[rank].send_signal(signal.Signals[f"SIG{name}"])
    run = end(run, time.time())
    assert all(run.codes) and run.seconds < HEARTBEAT + 30  # 0: it ended well
    assert {rank: run.codes[rank] for rank in codes} == codes, run.err
    if name == "TERM":
        (path,) = run.folder.glob("logs/*/*.state")
        assert f"INTERRUPTED by SIGTERM after step {int(path.stem)}" in run.out[0]
        assert run.out[1] == "" and run.err == ["", ""]
