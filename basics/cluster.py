"""Several processes, one mesh: a step on the devices of two machines, here two processes of 4.

Run     ./run.sh basics/cluster.py [--draw FILE.svg]    starts itself twice, with --join
        srun --nodes=2 --ntasks-per-node=1 --kill-on-bad-exit=1 python basics/cluster.py --join
        WORLD_SIZE=2 RANK=0 MASTER_ADDR=a MASTER_PORT=29500 python basics/cluster.py --join
        and with RANK=1 on the other machine; torchrun --no-python ... sets these by itself
Look    at `work`: each process must feed its own rows, and nothing tells if both feed the same
Source  docs.jax.dev, "Introduction to multi-controller JAX"
In train_gpt.py  `read_batches` cuts out a host's rows for `prefetch`. Joining is not there, but in
        dev/launch.py, which reads more launchers' variables and compares source, flags and tokens
"""

import os
import socket
import subprocess
import sys
import tempfile
import time
from argparse import ArgumentParser, RawDescriptionHelpFormatter

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, P
from jax.sharding import AxisType, NamedSharding

ROWS, WIDTH, STEPS, RATE = 64, 32, 40, 0.15


def join() -> None:
    """Makes one JAX of all processes: jax.devices() are everyone's, jax.local_devices() our own."""
    # Ends as exceptions do, but sys.exit would wait for the others, and they wait for this one.
    sys.excepthook = lambda *error: (sys.__excepthook__(*error), os._exit(1))
    jax.config.update("jax_enable_preemption_service", False)  # it swallows SIGTERM
    env, told = os.environ, dict(initialization_timeout=60, heartbeat_timeout_seconds=20)
    if "MASTER_ADDR" in env:  # at MASTER_PORT torchrun itself listens: we take the next port
        where = f"{env['MASTER_ADDR']}:{int(env['MASTER_PORT']) + 1}"
        who = dict(num_processes=int(env["WORLD_SIZE"]), process_id=int(env["RANK"]))
        told |= dict(coordinator_address=where, cluster_detection_method="deactivate", **who)
    # Else JAX finds Slurm, Open MPI 4, a TPU pod. []: all devices, of which Slurm's would take one.
    jax.distributed.initialize(local_device_ids=[], **told)


def step(params: dict, x: Array, y: Array) -> tuple[dict, Array]:
    predict = lambda params: jnp.tanh(x @ params["in"]) @ params["out"]
    loss, grads = jax.value_and_grad(lambda params: jnp.square(predict(params) - y).mean())(params)
    return jax.tree.map(lambda p, g: p - RATE * g, params, grads), loss


def train(params: dict, x: Array, y: Array, **options) -> dict[str, np.ndarray]:
    program, losses = jax.jit(step, **options), np.zeros(STEPS)
    for n in range(STEPS):
        params, losses[n] = program(params, x, y)
    return jax.tree.map(np.asarray, params) | dict(losses=losses)


def work(folder: str = "", dies: str = "") -> None:
    """What each process does: trains twice, and saves what it saw."""
    mesh = jax.make_mesh((jax.device_count(),), ("data",), axis_types=(AxisType.Auto,))
    whole, spread = NamedSharding(mesh, P()), NamedSharding(mesh, P("data"))
    params, *data = make()  # device_put compares params: all must have made the same
    for half, part in {"own": jax.process_index(), "same": 0}.items():
        parts = [np.split(rows, jax.process_count())[part] for rows in data]
        x, y, numbers = (jax.make_array_from_process_local_data(spread, rows) for rows in parts)
        saw = train(jax.device_put(params, whole), x, y, out_shardings=whole)
        saw["held"] = np.concatenate([shard.data for shard in numbers.addressable_shards])
        print(f"{half} half: loss {saw['losses'][-1]:.6f}", flush=True)
        if folder:
            np.savez(f"{folder}/{half}{jax.process_index()}.npz", **saw)
        if dies:
            os.kill(os.getpid(), 9)  # as if its machine had lost power


def start(folder: str, *dies: str) -> list[int]:
    """Two processes on this machine; their exit codes. Process 1 is told whether it dies."""
    with socket.create_server(("localhost", 0)) as free:
        port = free.getsockname()[1] - 1
    env = {key: value for key, value in os.environ.items() if "proxy" not in key.lower()}
    env |= dict(MASTER_ADDR="localhost", MASTER_PORT=str(port), WORLD_SIZE="2")
    run = lambda rank, *flags: subprocess.Popen(
        [sys.executable, __file__, "--join", folder, *flags], env=env | dict(RANK=rank),
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL if dies else None)  # fmt: skip
    processes, codes, last = [run("0"), run("1", *dies)], [None], time.monotonic() + 100
    try:
        while None in codes and not any(codes) and time.monotonic() < last:
            time.sleep(0.05)
            codes = [process.poll() for process in processes]
    finally:  # all are done, or one has died, and the other waits for it
        codes = [process.kill() or process.wait() for process in processes]
    return codes


# ---- Plumbing ------------------------------------------------------------------------------------
def make() -> tuple[dict, np.ndarray, np.ndarray, np.ndarray]:
    """Parameters; inputs, targets and numbers of all rows."""
    rng = np.random.default_rng(0)
    normal = lambda *shape: rng.normal(size=shape).astype(np.float32)
    params = {"in": WIDTH**-0.5 * normal(WIDTH, WIDTH), "out": WIDTH**-0.5 * normal(WIDTH)}
    return params, normal(ROWS, WIDTH), normal(ROWS), np.arange(ROWS, dtype=np.float32)


def draw(path: str, alone: dict, own: dict, same: dict, real: float) -> None:
    import matplotlib.pyplot as plt

    plt.rcParams.update({"svg.hashsalt": "jNanoGPT", "font.size": 9})
    _, axes = plt.subplots(figsize=(7, 3), layout="constrained")
    axes.plot(alone["losses"], "C0", lw=5, alpha=0.4, label="one device")
    axes.plot(own["losses"], "C0", label="two processes of 4 devices")
    axes.plot(same["losses"], "C1", label="two processes, fed the same half")
    axes.plot(STEPS - 1, real, "C1o", label="of its weights, on all rows")
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
    cli.add_argument("--join", metavar="FOLDER", nargs="*")
    cli.add_argument("--draw", metavar="FILE.svg")
    flags = cli.parse_args()
    if flags.join is not None:
        return join() or work(*flags.join)
    params, x, y, numbers = make()
    alone = train(params, x, y)
    with tempfile.TemporaryDirectory() as folder:
        codes = start(folder)
        check(f"two processes of 4 devices: exit codes {codes}", codes == [0, 0])
        own, other, same = (dict(np.load(f"{folder}/{n}.npz")) for n in ("own0", "own1", "same0"))
    check("every row is on one device", [*own["held"], *other["held"]] == [*numbers])
    error = max(np.abs(saw[name] - alone[name]).max() for name in alone for saw in (own, other))
    check(f"losses, weights: {error:.0e} from one device's, below 1e-5", error < 1e-5)
    told, right, real = same["losses"][-1], alone["losses"][-1], step(same, x, y)[1]
    what = f"the same half twice: loss {told:.1e}, not {right:.1e}; of all rows {real:.1e}"
    check(what, told < right < real)
    died = start("", "dies")
    check(f"one was killed, and none waits: exit codes {died}", died[1] == -9 and died[0])
    if flags.draw:
        draw(flags.draw, alone, own, same, real)


if __name__ == "__main__":
    main()
