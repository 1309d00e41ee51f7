"""Several hosts, here processes on one machine: they train as one host would, they refuse to begin
with different settings, and no host waits for one that is gone."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from unittest.mock import Mock

import numpy as np
import pytest

import train_gpt
from tests.launched import LAUNCH, with_code
from tests.test_launch import slurm
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
# Models of one layer, which compile soon. Two of them train for many steps.
SMALL_TINY = with_tiny(train_gpt.SOURCE, "Layer(LONG, value_table=0)", STAGES)
LONG_TINY = with_tiny(train_gpt.SOURCE, "Layer(SHORT)", STAGES.replace("10", "5000", 1))
SCRIPTS = {
    "train_gpt.py": SMALL_TINY,
    "long.py": LONG_TINY,
    "sums.py": with_code(LONG_TINY, SUMS),
}
FLAGS = ["tiny", *SMALL, *FLOAT32_FLAGS, "--val_every", "5"]
# What the other host prints when the first or the second host is lost.
LOST = {0: "leader task was preempted/died", 1: r"Task 1 heartbeat timeout|heartbeats\):\s+1\b"}
# At the end of a script, this changes a run in a way that the variable CHANGE names.
CHANGES = """
def changed_batches(*args, unchanged=read_batches):
    for n, rows in enumerate(unchanged(*args)):
        if os.environ["CHANGE"] == "count":
            print("rows", len(rows), file=sys.stderr)
        if os.environ["CHANGE"] == "fail" and n == 35 and jax.process_index():
            raise OSError("the disk is gone")
        yield rows


if "CHANGE" in os.environ:
    read_batches = changed_batches
if os.environ.get("CHANGE") == "version" and os.environ["JNANO_PROCESS"] == "1":
    jax.__version__ = "0.0.1"
"""
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
        source = source.replace("mudd_head=())", "mudd_head=(), head_chunk=32)")
        (data / name).write_text(with_code(source, CHANGES))
    started = []

    def start(count, devices, *flags, each=(), of=None, by_slurm=False, scripts=(), **env):
        """A run of `count` hosts. By rank: further flags (`each`) and scripts. `of`: the ranks to
        start, if not all."""
        folder = tmp_path_factory.mktemp("run")
        hosts = []
        with socket.socket() as free:
            free.bind(("localhost", 0))
            port = free.getsockname()[1]
        for rank in range(count) if of is None else of:
            variables = {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": str(devices)}
            if by_slurm:
                variables |= slurm(count, rank, port=port)
            elif count > 1:
                variables |= {"JNANO_COORDINATOR": f"localhost:{port}"}
                variables |= {"JNANO_PROCESSES": str(count), "JNANO_PROCESS": str(rank)}
            script = scripts[rank] if scripts else "train_gpt.py"
            argv = [sys.executable, "-c", LAUNCHER, data / script, *FLAGS, "--data", data, *flags]
            argv += each[rank] if each else ()
            # A shell's background job ignores Ctrl-C, and its children inherit that.
            with (
                (folder / f"{rank}.out").open("w") as out,
                (folder / f"{rank}.err").open("w") as err,
            ):
                hosts.append(
                    subprocess.Popen(
                        argv,
                        cwd=folder,
                        env=os.environ | variables | env,
                        stdout=out,
                        stderr=err,
                        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
                    )
                )
        started.extend(hosts)
        return SimpleNamespace(hosts=hosts, folder=folder, data=data, port=port)

    yield start
    for host in started:
        host.kill()


def end(run, since=0.0) -> SimpleNamespace:
    """Waits for the hosts: their exit codes, what they printed, and the seconds since `since`."""
    last = time.time() + 400
    while any(host.poll() is None for host in run.hosts) and time.time() < last:
        time.sleep(0.1)
    seconds = time.time() - since
    codes = [host.poll() for host in run.hosts]
    read = lambda suffix: [path.read_text() for path in sorted(run.folder.glob(f"?.{suffix}"))]
    out = [re.sub(r".*peer ranks.*\n", "", text) for text in read("out")]  # gloo prints them
    return SimpleNamespace(codes=codes, out=out, err=read("err"), seconds=seconds, **vars(run))


def finish(run) -> SimpleNamespace:
    """Waits for hosts that must end well: the facts, losses and weights of the newest log."""
    run = end(run)
    assert {*run.codes} == {0}, (run.codes, run.err)
    log = max(run.folder.glob("logs/*.txt"), key=os.path.getmtime)
    rest = log.read_text().split("=" * 100 + "\n")[-1]
    facts = {name: json.loads(value) for name, value in re.findall(r"^([a-z]+) (.*)$", rest, re.M)}
    losses = re.findall(r"^step:(\d+)/\d+ val_loss:(\S+)", rest, re.M)
    weights = dict(np.load(log.with_suffix(".npz")))
    for name in "config", "result", "source":
        del weights[name]
    return SimpleNamespace(
        **vars(run), log=log, facts=facts, weights=weights,
        losses={int(step): float(loss) for step, loss in losses},
    )  # fmt: skip


def assert_alike(run, other) -> None:
    """Equal losses and weights, but for rounding."""
    assert run.losses and run.losses.keys() <= other.losses.keys()
    for step in run.losses:
        assert run.losses[step] == pytest.approx(other.losses[step], abs=5e-4), step
    assert run.weights.keys() == other.weights.keys()
    for name, weight in run.weights.items():
        # Not element by element: Adam may turn the rounding of one tiny gradient into a step.
        gap = np.linalg.norm(weight - other.weights[name])
        assert gap <= 1e-3 * np.linalg.norm(other.weights[name]) + 1e-3, name


# ---- As one host ---------------------------------------------------------------------------------
@pytest.fixture(scope="module")
def pair(start) -> SimpleNamespace:
    return finish(start(2, 4, "--save_every", "4", CHANGE="count"))


def test_two_hosts_train_as_one_with_the_seed_of_the_first(start, pair):
    one = finish(start(1, 8, "--seed", str(pair.facts["seed"])))
    assert_alike(pair, one)
    assert pair.facts["parameters"] == one.facts["parameters"]
    assert (pair.facts["hosts"], one.facts["hosts"]) == (2, 1)


def test_the_first_host_alone_writes(pair):
    assert [path.suffix for path in pair.folder.glob("logs/*.*")].count(".txt") == 1
    assert len([*pair.folder.glob("logs/*.npz")]) == 1 and pair.out[1] == ""
    assert pair.out[0].splitlines()[-4].startswith("RESULT {")


def test_each_host_makes_only_its_own_rows(pair):
    counts = [re.findall(r"^rows (\d+)$", err, re.M) for err in pair.err]
    assert {*counts[0], *counts[1]} == {"4"}
    batches = 10 + 3 * 2  # of steps, and two of each validation
    assert [len(rows) for rows in counts] == [batches, batches]


def test_a_checkpoint_goes_on_to_the_bit(start, pair):
    """The run finds its hosts by Slurm's variables."""
    (path,) = pair.folder.glob("logs/*/*04.state")
    as_many = finish(start(2, 4, "--resume", str(path), by_slurm=True))
    assert_alike(as_many, pair)
    for name, weight in pair.weights.items():
        assert np.array_equal(as_many.weights[name], weight), name


# ---- More than 8 devices -------------------------------------------------------------------------
@pytest.mark.parametrize("axes", [dict(fsdp=1), dict(fsdp=8), dict(nodes=2, fsdp=8)])
def test_beyond_eight_devices_the_mesh_has_nodes(axes):
    count = axes["fsdp"] * axes.get("nodes", 1)
    mesh = train_gpt.make_mesh([Mock(process_index=0, id=i) for i in range(count)])
    assert mesh.shape == axes


@pytest.mark.slow  # eight devices are tested in test_devices.py, two hosts below
def test_sixteen_devices_train_as_one(start):
    """The batch has twice the sequences, of half the length, as run/hosts.md recommends."""
    flags = ["--batch", "16", "--head_chunk", "16", "--seed", "1"]
    one = finish(start(1, 1, *flags))
    sixteen = finish(start(2, 8, *flags))
    assert one.facts["config"]["batch"] == sixteen.facts["config"]["batch"] == 16
    assert (len(one.facts["devices"]), len(sixteen.facts["devices"])) == (1, 16)
    assert_alike(sixteen, one)


# ---- What must be the same -----------------------------------------------------------------------
def assert_refused(run, *patterns: str) -> None:
    """The run ended before it began, and every process printed what differs."""
    run = end(run)
    assert run.codes == [2, 2] and "compiling" not in "".join(run.out), run.err
    for err in run.err:
        (line,) = re.findall(r"^launch\.py: process 1 on \S+ and process 0 .*", err, re.M)
        assert all(re.search(pattern, line) for pattern in patterns), line


def test_a_mixed_run_ends_at_once_and_says_what_differs(start):
    """The message names three differences. Tokens are compared once everything else is the same."""
    run = start(1, 1, of=())
    folder = run.folder
    other = folder / "train_gpt.py"
    source = (run.data / "train_gpt.py").read_text()
    other.write_text(source.replace("import json\n", "import json  # changed\n", 1))
    write_shard(folder / "x_train_1.bin", text(3000, 1))
    write_shard(folder / "x_val_1.bin", text(1600))
    patterns = [r"train_gpt\.py:\d+ is '.*import json", "--adam_lr is 0.01", "jax is '0.0.1'"]
    flags = [[], ["--adam_lr", "0.01"]]
    scripts = ["train_gpt.py", other]
    assert_refused(start(2, 1, each=flags, scripts=scripts, CHANGE="version"), *patterns)
    tokens = [[], ["--data", str(folder)]]
    assert_refused(start(2, 1, each=tokens), r"x_train_1.bin is '\w+'?")


def test_hosts_that_go_on_from_different_checkpoints_are_refused(start, pair):
    states = sorted(pair.folder.glob("logs/*/*.state"))
    run = start(2, 4, each=[["--resume", str(path)] for path in states])
    assert_refused(run, "the checkpoint's step is 8, not 4")


# ---- How they end --------------------------------------------------------------------------------
# For each end: the number of hosts; options of start(); the text after which a host gets a signal,
# or LISTENS: as soon as the first host accepts connections; that host's rank; the signal, if any;
# exit codes by rank; patterns of what is printed on stderr, by rank. The slow ones come first.
LISTENS = None
COMPILING = dict(JAX_ENABLE_COMPILATION_CACHE="0", scripts=2 * ["long.py"])
ENDS = {
    "refused": (2, dict(each=[[], ["--data", "/no"]]), "/no", 0, None, {1: 2}, {1: "/no"}),
    "interrupted while compiling": (2, COMPILING, "compiling", 1, "INT", {1: 130}, {}),
    "first ended while compiling": (2, COMPILING, "compiling", 0, "TERM", {0: 143}, {1: LOST[0]}),
    "missing": (
        3, dict(of=[0, 1], JNANO_WAIT="5"), "3 processes were", 0, None, {0: 2},
        {0: r"3 processes were expected, but they did not all come in 5 s \(JNANO_WAIT\)"}),
    "not finite": (2, dict(CHANGE="nan"), "FINITE", 0, None, {0: 3, 1: 3}, {}),
    "ended": (2, {}, "train_loss", 1, "TERM", {0: 143, 1: 143}, {}),
    "lost": (2, {}, "train_loss", 1, "KILL", {1: -9}, {0: LOST[1]}),
    "failed": (2, dict(CHANGE="fail"), "is gone", 0, None, {1: 1}, {1: "the disk is gone"}),
    "first lost": (2, {}, "train_loss", 0, "KILL", {0: -9}, {1: LOST[0]}),
    "interrupted while waiting": (2, dict(of=[0]), LISTENS, 0, "INT", {0: 130}, {}),
}  # fmt: skip


# Other ends check the same: a process that ends by itself, and one that is gone while compiling.
SLOW_ENDS = "failed", "first ended while compiling", "interrupted while waiting"


def has_come(run, moment) -> bool:
    """Whether a host has printed this text or, for LISTENS, the first host accepts connections."""
    if moment is not LISTENS:
        return any(moment in path.read_text() for path in run.folder.glob("?.*"))
    with socket.socket() as connection:
        return connection.connect_ex(("localhost", run.port)) == 0


@pytest.fixture(scope="module")
def ends(start, request) -> dict[str, SimpleNamespace]:
    """How the runs of ENDS ended; four run at a time, for they mostly wait."""
    slow = request.config.option.all
    wanted = {how: end for how, end in ENDS.items() if slow or how not in SLOW_ENDS}

    def go(how: tuple) -> SimpleNamespace:
        count, options, moment, rank, name, *_ = how
        flags = ["--R", "0", "--val_every", "5000", "--save", "0"]
        run = start(count, 1, *flags, **{"scripts": 3 * ["sums.py"], **options})
        while not has_come(run, moment) and any(host.poll() is None for host in run.hosts):
            time.sleep(0.1)
        if name:
            run.hosts[rank].send_signal(signal.Signals[f"SIG{name}"])
        return end(run, time.time())

    with ThreadPoolExecutor(4) as pool:
        return dict(zip(wanted, pool.map(go, wanted.values()), strict=True))


@pytest.mark.parametrize("how", [
    pytest.param(how, marks=pytest.mark.slow if how in SLOW_ENDS else ()) for how in ENDS
])  # fmt: skip
def test_no_host_waits_for_one_that_is_gone(ends, how):
    *_, codes, printed = ENDS[how]
    print(f"{how}: {ends[how].codes} after {ends[how].seconds:.1f} s")
    assert all(ends[how].codes), ends[how].codes  # None: a host still waits; 0: it ended well
    assert {rank: ends[how].codes[rank] for rank in codes} == codes, ends[how].err
    assert ends[how].seconds < HEARTBEAT + 30  # HEARTBEAT + 2 were measured (run/hosts.md)
    for rank, pattern in printed.items():
        assert re.search(pattern, ends[how].err[rank]), ends[how].err[rank]


def test_a_signal_to_one_host_saves_the_run_of_all(ends):
    run = ends["ended"]
    (path,) = run.folder.glob("logs/*/*.state")
    assert f"INTERRUPTED by SIGTERM after step {int(path.stem)}" in run.out[0]
    asked = "launch.py: the run will finish what is under way"
    errors = [line for err in run.err for line in err.splitlines() if line]
    assert len(errors) == 1 and errors[0].startswith(asked) and run.out[1] == ""
