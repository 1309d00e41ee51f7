"""Several hosts, here processes on one machine: they train as one host would, they refuse to begin
with different settings, and no host waits for one that is gone."""

import dataclasses
import os
import re
import signal
import socket
import subprocess
import sys
import time
from types import SimpleNamespace

import jax
import numpy as np
import pytest

import train_gpt
from tests.launched import LAUNCH, LAYERS, heed_ctrl_c, read, set_tiny, with_code
from tests.test_launch import slurm
from tests.tools import FLOAT32_FLAGS, SMALL, text, with_tiny, write_shard
from train_gpt import Stage

STAGE = Stage(10, 256, short=8, long=16, max_doc=0, lr=1.0)
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


REAL = with_tiny(train_gpt.SOURCE, repr(LAYERS)[1:-2], repr(STAGE))
LONGER = dataclasses.replace(STAGE, steps=5000)
SCRIPTS = {
    "train_gpt.py": REAL,
    # A node has two devices, where those of train_gpt.py have eight.
    "nodes.py": REAL.replace("(devices) <= 8", "(devices) <= 2").replace("(-1, 8)", "(-1, 2)"),
    "sums.py": with_code(with_tiny(train_gpt.SOURCE, repr(LAYERS)[1:-2], repr(LONGER)), SUMS),
}
FLAGS = ["tiny", *SMALL, *FLOAT32_FLAGS, *"--pointer 0 --adam_every 1 --val_every 5".split()]
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
    write_shard(data / "x_train_000001.bin", text(1_300_000))
    write_shard(data / "x_val_000000.bin", text(1600))
    for name, source in SCRIPTS.items():
        (data / name).write_text(source)
    started = []

    def start(devices, *flags, each=((), ()), by_slurm=False, script="train_gpt.py", **env):
        """A run of two hosts. By rank: further flags (`each`)."""
        folder = tmp_path_factory.mktemp("run")
        hosts = []
        with socket.socket() as free:
            free.bind(("localhost", 0))
            port = free.getsockname()[1]
        for rank in range(2):
            variables = {"JAX_NUM_CPU_DEVICES": str(devices)}
            if by_slurm:
                variables |= slurm(2, rank, port=port)
            else:
                variables |= {"JNANO_COORDINATOR": f"localhost:{port}"}
                variables |= {"JNANO_PROCESSES": "2", "JNANO_PROCESS": str(rank)}
            argv = [sys.executable, "-c", LAUNCHER, data / script, *FLAGS]
            argv += ["--data", data, *flags, *each[rank]]
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
    return SimpleNamespace(**vars(run) | vars(newest(run.folder)))


def newest(folder) -> SimpleNamespace:
    """The newest log, with weights that are only weights."""
    log = read(max(folder.glob("logs/*.txt"), key=os.path.getmtime))
    for name in "config", "result", "source":
        del log.weights[name]
    return log


# ---- As one host ---------------------------------------------------------------------------------
@pytest.fixture(scope="module")
def pair(start) -> SimpleNamespace:
    return finish(start(1, "--save_every", "4"))


@pytest.fixture(scope="module")
def one(pair, tmp_path_factory) -> SimpleNamespace:
    """The run on one device of this process, with the seed of `pair`."""
    folder = tmp_path_factory.mktemp("one")
    mine = jax.devices()[:1]
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setattr(jax, "devices", lambda: mine)
        set_tiny(patch, (STAGE,))
        train_gpt.main([*FLAGS, "--data", str(pair.data), "--seed", str(pair.facts["seed"])])
    return newest(folder)


def assert_alike(run, other) -> None:
    """Equal losses and weights, but for rounding."""
    for step in run.losses.keys() | other.losses.keys():
        assert float(run.losses[step]) == pytest.approx(float(other.losses[step]), abs=5e-4), step
    assert run.weights.keys() == other.weights.keys()
    for name, weight in run.weights.items():
        # Not element by element: Adam may turn the rounding of one tiny gradient into a step.
        gap = np.linalg.norm(weight - other.weights[name])
        assert gap <= 1e-3 * np.linalg.norm(other.weights[name]) + 1e-3, name


def test_two_hosts_train_as_one_with_the_seed_of_the_first(pair, one):
    """The first host alone writes."""
    assert_alike(pair, one)
    assert (pair.facts["hosts"], one.facts["hosts"]) == (2, 1)
    assert len([*pair.folder.glob("logs/*.txt")]) == 1 and pair.out[1] == ""
    assert "RESULT {" in pair.out[0]


def test_nodes_that_have_all_weights_each_train_as_one(start, pair, one):
    """As with 16 devices: each of the two hosts is a node."""
    nodes = finish(start(2, "--seed", str(pair.facts["seed"]), script="nodes.py"))
    assert "(devices) <= 2" in nodes.source and "reshape(-1, 2)" in nodes.source
    assert len(nodes.facts["devices"]) == 4
    assert_alike(nodes, one)


def test_a_checkpoint_goes_on_to_the_bit(start, pair):
    """The run finds its hosts by Slurm's variables."""
    (path,) = pair.folder.glob("logs/*/*08.state")
    (log,) = pair.folder.glob("logs/*.txt")
    log.unlink()  # its run has ended
    flags = "--resume", str(path), "--save_every", "4"
    again = finish(start(1, *flags, "--seed", str(pair.facts["seed"]), by_slurm=True))
    for name, weight in pair.weights.items():
        assert np.array_equal(again.weights[name], weight), name


def test_hosts_that_are_not_the_same_end_at_once_with_one_line(start, pair):
    """They differ in a flag, or in the checkpoint that they resume."""
    states = sorted(pair.folder.glob("logs/*/*.state"))
    for each in ([[], ["--adam_lr", "0.01"]], [["--resume", str(path)] for path in states]):
        run = end(start(1, each=each))
        assert run.codes == [2, 2] and "compiling" not in "".join(run.out), run.err
        for err in run.err:
            assert re.search(r"^.*: the hosts differ in source, flags, tokens, check", err, re.M)


# ---- How they end --------------------------------------------------------------------------------
@pytest.mark.parametrize("name, codes", [
    ("TERM", [143, 143]), ("KILL", [None, -9]), ("", [3, 3]),  # "": the loss is not finite
])  # fmt: skip
def test_no_host_waits_for_one_that_is_gone(start, name, codes):
    """After a signal to the second host, both save the run at the same step."""
    flags = "--R 0 --val_every 5000 --save 0".split()
    run = start(1, *flags, script="sums.py", CHANGE="" if name else "nan")
    out = run.folder / "0.out"
    while "train_loss" not in out.read_text() and all(host.poll() is None for host in run.hosts):
        time.sleep(0.1)
    if name:
        run.hosts[1].send_signal(signal.Signals[f"SIG{name}"])
    run = end(run, time.time())
    assert all(run.codes) and run.seconds < HEARTBEAT + 30  # 0: it ended well
    assert codes == [codes[0] and run.codes[0], run.codes[1]], run.err
    if name == "TERM":
        (path,) = run.folder.glob("logs/*/*.state")
        assert f"INTERRUPTED by SIGTERM after step {int(path.stem)}" in run.out[0]
        assert run.out[1] == "" and run.err == ["", ""]
