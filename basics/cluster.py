"""Several processes, one mesh: steps on two machines' devices, here two processes with 4 each.

Run     ./run.sh basics/cluster.py [--draw FILE.svg]    starts itself twice, with --join
        srun --nodes=2 --ntasks-per-node=1 --kill-on-bad-exit=1 python basics/cluster.py --join
        WORLD_SIZE=2 RANK=0 MASTER_ADDR=a MASTER_PORT=29500 python basics/cluster.py --join
        and with RANK=1 on the other machine; torchrun --no-python ... sets these by itself
Look    at `work`: the processes must feed different rows, but JAX raises no error if both feed the
        same
Source  docs.jax.dev, "Introduction to multi-controller JAX"
In train_gpt.py  `read_batches` cuts out a host's rows for `prefetch`. run/launch.py joins the
        processes. It knows more launchers, and compares source, flags and tokens
"""

import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from argparse import ArgumentParser, FileType, RawDescriptionHelpFormatter

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, P
from jax.sharding import AxisType, NamedSharding

ROWS = 64
WIDTH = 32
STEPS = 40
RATE = 0.15
PATIENCE = 100  # seconds after which the starter gives up


# ---- What each process does ----------------------------------------------------------------------
def join() -> None:
    """Connects all processes. After it, jax.devices() lists the devices of all processes, and
    jax.local_devices() those of this one."""
    sys.excepthook = end_at_once
    jax.config.update("jax_enable_preemption_service", False)  # it swallows SIGTERM
    options = dict(initialization_timeout=60, heartbeat_timeout_seconds=20)
    if "MASTER_ADDR" in os.environ:
        port = int(os.environ["MASTER_PORT"]) + 1  # torchrun itself listens at MASTER_PORT
        options["coordinator_address"] = f"{os.environ['MASTER_ADDR']}:{port}"
        options["num_processes"] = int(os.environ["WORLD_SIZE"])
        options["process_id"] = int(os.environ["RANK"])
        options["cluster_detection_method"] = "deactivate"
    # Without these options, JAX asks Slurm, Open MPI 4 or the TPU pod. [] means all devices of this
    # machine: under Slurm, JAX would take one.
    jax.distributed.initialize(local_device_ids=[], **options)


def end_at_once(*error) -> None:
    """Handles an exception. sys.exit would wait for the other processes, and they for this one."""
    sys.__excepthook__(*error)
    os._exit(1)


def step(params: dict, x: Array, y: Array) -> tuple[dict, Array]:
    """One step of gradient descent. x: (rows, WIDTH), y: (rows,). Returns parameters and loss."""

    def loss_fn(params):
        return jnp.square(jnp.tanh(x @ params["in"]) @ params["out"] - y).mean()

    loss, grads = jax.value_and_grad(loss_fn)(params)
    return jax.tree.map(lambda p, g: p - RATE * g, params, grads), loss


def train(params: dict, x: Array, y: Array, **options) -> dict[str, np.ndarray]:
    """The parameters after all steps, and the losses."""
    program = jax.jit(step, **options)
    losses = np.zeros(STEPS)
    for n in range(STEPS):
        params, losses[n] = program(params, x, y)
    return jax.tree.map(np.asarray, params) | dict(losses=losses)


def work(folder: str = "", dies: str = "") -> None:
    """Trains twice and saves the results in a folder: first with this process's half of the rows,
    then, by mistake, with the first half in both processes. If `dies` is not empty, the process
    kills itself after the first training."""
    mesh = jax.make_mesh((jax.device_count(),), ("data",), axis_types=(AxisType.Auto,))
    whole = NamedSharding(mesh, P())
    spread = NamedSharding(mesh, P("data"))
    params, *data = make()  # device_put raises an error if processes have different params
    for name, part in {"different": jax.process_index(), "same": 0}.items():
        parts = [np.split(rows, jax.process_count())[part] for rows in data]
        arrays = [jax.make_array_from_process_local_data(spread, rows) for rows in parts]
        x, y, numbers = arrays
        result = train(jax.device_put(params, whole), x, y, out_shardings=whole)
        result["rows"] = np.concatenate([shard.data for shard in numbers.addressable_shards])
        print(f"{name} half: loss {result['losses'][-1]:.6f}", flush=True)
        if folder:
            np.savez(f"{folder}/{name}{jax.process_index()}.npz", **result)
        if dies:
            os.kill(os.getpid(), signal.SIGKILL)  # as if its machine had lost power


# ---- The starter ---------------------------------------------------------------------------------
def start(folder: str, *dies: str) -> list[int]:
    """Starts two processes on this machine and returns their exit codes. With `dies`, process 1
    kills itself while it works."""
    with socket.create_server(("localhost", 0)) as free:
        port = free.getsockname()[1] - 1  # join() adds 1
    env = {name: value for name, value in os.environ.items() if "proxy" not in name.lower()}
    env |= dict(MASTER_ADDR="localhost", MASTER_PORT=str(port), WORLD_SIZE="2")
    processes = []
    for rank, options in (0, ()), (1, dies):
        process = subprocess.Popen(
            [sys.executable, __file__, "--join", folder, *options],
            env=env | dict(RANK=str(rank)),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL if dies else None,  # process 0 reports that process 1 is gone
        )
        processes.append(process)
    return wait(processes)


def wait(processes: list[subprocess.Popen]) -> list[int]:
    """Waits until both have ended or one has failed, and kills those that still run."""
    deadline = time.monotonic() + PATIENCE
    try:
        while time.monotonic() < deadline:
            codes = [process.poll() for process in processes]
            if None not in codes or any(codes):
                break
            time.sleep(0.05)
    finally:
        for process in processes:
            process.kill()
    return [process.wait() for process in processes]


# ---- Plumbing ------------------------------------------------------------------------------------
def make() -> tuple[dict, np.ndarray, np.ndarray, np.ndarray]:
    """Parameters; inputs, targets and numbers of all rows. The numbers show which row is where."""
    rng = np.random.default_rng(0)

    def normal(*shape):
        return rng.normal(size=shape).astype(np.float32)

    params = {"in": WIDTH**-0.5 * normal(WIDTH, WIDTH), "out": WIDTH**-0.5 * normal(WIDTH)}
    return params, normal(ROWS, WIDTH), normal(ROWS), np.arange(ROWS, dtype=np.float32)


def draw(path: str, alone: dict, different: dict, same: dict, loss_on_all_rows: float) -> None:
    os.environ.update(MPLBACKEND="agg", MATPLOTLIBRC=os.devnull)  # not a notebook's
    import matplotlib.pyplot as plt

    plt.style.use(["default", {"svg.hashsalt": "jNanoGPT", "font.size": 9}])
    _, axes = plt.subplots(figsize=(7, 3), layout="constrained")
    axes.plot(alone["losses"], "C0", lw=5, alpha=0.4, label="one device")
    axes.plot(different["losses"], "C0", label="two processes of 4 devices")
    axes.plot(same["losses"], "C1", label="two processes, fed the same half")
    axes.plot(STEPS - 1, loss_on_all_rows, "C1o", label="of its weights, on all rows")
    axes.set(xlabel="step", ylabel="loss that is reported", yscale="log")
    axes.legend()
    plt.savefig(path, metadata={"Date": None})


def check(what: str, right: bool) -> None:
    print("ok   " if right else "WRONG", what)
    if not right:
        sys.exit(1)


def main() -> None:
    jax.config.update("jax_platforms", "cpu")  # with TPUs or GPUs, delete these two lines
    jax.config.update("jax_num_cpu_devices", 4)
    cli = ArgumentParser(description=__doc__, formatter_class=RawDescriptionHelpFormatter)
    cli.add_argument("--join", metavar="FOLDER", nargs="*", help="be one of several processes")
    cli.add_argument("--draw", type=FileType("ab"), metavar="FILE.svg", help="also draw a picture")
    flags = cli.parse_args()
    if flags.join is not None:
        join()
        work(*flags.join)
        return

    params, x, y, numbers = make()
    alone = train(params, x, y)
    with tempfile.TemporaryDirectory() as folder:
        codes = start(folder)
        check(f"two processes with 4 devices each: exit codes {codes}", codes == [0, 0])
        first = dict(np.load(f"{folder}/different0.npz"))
        second = dict(np.load(f"{folder}/different1.npz"))
        same = dict(np.load(f"{folder}/same0.npz"))
    check("every row is on one device", [*first["rows"], *second["rows"]] == [*numbers])
    errors = []
    for run in first, second:
        for name in alone:
            errors.append(np.abs(run[name] - alone[name]).max())
    error = np.max(errors)
    check(f"losses, weights: {error:.0e} from one device's, below 1e-5", error < 1e-5)
    reported = same["losses"][-1]
    right = alone["losses"][-1]
    _, on_all_rows = step(same, x, y)
    check(
        f"the same half twice: loss reported as {reported:.1e}, lower than the right {right:.1e}; "
        f"on all rows it is {on_all_rows:.1e}",
        reported < right < on_all_rows,
    )
    codes = start("", "dies")
    killed = codes[1] == -signal.SIGKILL
    check(
        f"process 1 was killed, and process 0 ended too: exit codes {codes}",
        killed and codes[0] != 0,
    )
    if flags.draw:
        draw(flags.draw.name, alone, first, same, on_all_rows)


if __name__ == "__main__":
    main()
