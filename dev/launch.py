"""Starts a training script as ./run.sh does, on one host or on several: dev/hosts.md.

    python dev/launch.py SCRIPT [preset] [--field value ...]

SCRIPT is train_gpt.py or a copy of it. Before its main() runs, the processes of a run find each
other, compare what must be the same, and draw one seed; and a GPU's attention kernel is checked.
While it runs, a process that cannot go on ends, instead of waiting for one that is gone.
"""

import collections
import contextlib
import dataclasses
import hashlib
import importlib.metadata
import importlib.util
import inspect
import json
import os
import re
import secrets
import signal
import subprocess
import sys
import threading
import time
import traceback
import urllib.request
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import Array
from jax.experimental.multihost_utils import process_allgather

ROOT = Path(__file__).resolve().parents[1]
HEARTBEAT = 30  # seconds after which JAX ends the processes that have lost another one
ADVICE = (
    "With twice the --batch, a step has as many tokens, in sequences half as long, and needs less: "
    "see Memory in README.md"
)
NO_MEMORY = re.compile("RESOURCE_EXHAUSTED|OUT_OF_MEMORY|out of memory|ALLOC_FAILED")


def refuse(message: str) -> NoReturn:
    """Ends the process with one line and exit status 2."""
    print(f"launch.py: {message}", file=sys.stderr)
    sys.exit(2)


def main(argv: list[str]) -> None:
    """Runs a script; anything but a good end leaves by os._exit, which waits for no thread and for
    no other process."""
    watch_signals()
    try:
        if not argv or not Path(argv[0]).is_file():
            refuse(f"usage: launch.py SCRIPT [preset] [--field value ...]; got {argv[:1]}")
        set_xla_flags()
        join()
        start_jax()
        path, argv = Path(argv[0]), argv[1:]
        script = load_script(path)
        preset, c = script.parse_config(argv)
        script.set_compilation_cache()  # JAX looks only once, at the first program
        _, c = script.fit_devices(preset, c)
        if jax.process_count() > 1:
            compare_everything(script, c)
            if c.seed < 0 and not c.resume:
                argv = [*argv, "--seed", str(gather(secrets.randbits(31))[0])]
        if jax.local_devices()[0].platform == "gpu" and c.attention == "cudnn":
            check_attention_once(script, c)
        beside = path.resolve() == ROOT / "train_gpt.py"
        script.main(argv, command="./run.sh" if beside else f"./run.sh {path}")
    except SystemExit as stop:
        if isinstance(stop.code, str):
            print(stop.code, file=sys.stderr)
            leave(1)
        leave(stop.code or 0)
    except KeyboardInterrupt:
        leave(130)
    except jax.errors.JaxRuntimeError as error:
        if NO_MEMORY.search(str(error)):
            why = str(error).splitlines()[0]
            print(f"launch.py: not enough memory: {why}. {ADVICE}", file=sys.stderr)
            leave(2)
        traceback.print_exc()
        if jax.distributed.is_initialized():
            time.sleep(HEARTBEAT + 5)  # JAX will say which process was lost, and end this one
        leave(1)
    except Exception:
        traceback.print_exc()
        leave(1)


def set_xla_flags() -> None:
    """Gives the first communication between GPUs ten minutes, not one, after which XLA aborts the
    process: on a slow host, eight GPUs may need longer to load a program. There is no such option
    of the compiler, and XLA aborts at flags that it does not know: these versions know it."""
    with_cuda = any(importlib.util.find_spec(f"jax_cuda{n}_plugin") for n in (12, 13))
    if with_cuda and (0, 10) <= jax.__version_info__[:2] <= (0, 12):
        flag = "--xla_gpu_first_collective_call_terminate_timeout_seconds"
        flags = os.environ.get("XLA_FLAGS", "")
        if flag not in flags:
            os.environ["XLA_FLAGS"] = f"{flags} {flag}=600".strip()


CURES = {  # what JAX's message may contain, and what helps
    "802|SYSTEM_NOT_READY|not yet initialized": "the GPUs' Fabric Manager does not run: type  "
    "systemctl status nvidia-fabricmanager",
    "803|SYSTEM_DRIVER_MISMATCH|version mismatch": "the driver's library and the kernel's module "
    "differ: restart the machine, or the container",
    "no CUDA-capable device|NO_DEVICE": "check CUDA_VISIBLE_DEVICES and nvidia-smi",
    "libtpu|TPU": "another process may use the TPU: restart the session, and do not import jax in "
    "the notebook",
}


def start_jax() -> None:
    """Starts JAX on its devices. Exits with status 2, the cause and what helps, if it cannot."""
    try:
        jax.devices()
    except RuntimeError as error:
        cause = " ".join(str(error).split())[:300]
        helps = [cure for pattern, cure in CURES.items() if re.search(pattern, cause)]
        cure = helps[0] if helps else "see nvidia-smi, and: When it does not work, in dev/README.md"
        refuse(f"JAX cannot start: {cause}; {cure}; without GPUs: JAX_PLATFORMS=cpu ./run.sh tiny")


def leave(status: int) -> NoReturn:
    """Ends the process. Process 0 leaves last, because JAX ends all others once it is gone."""
    for file in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError):
            file.flush()
    if jax.distributed.is_initialized() and jax.process_index() == 0:
        time.sleep(2)
    os._exit(status)


def load_script(path: Path) -> ModuleType:
    """The script as a module, under its own path."""
    sys.path[0] = str(path.resolve().parent)
    spec = importlib.util.spec_from_file_location(path.stem, path)
    script = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = script
    spec.loader.exec_module(script)
    return script


# ---- Signals -------------------------------------------------------------------------------------
def watch_signals() -> None:
    """Lets a thread see signals. Python runs no handler while the main thread waits for XLA."""
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    signal.set_wakeup_fd(writer)
    threading.Thread(target=end_at_signals, args=[reader], daemon=True).start()


def end_at_signals(reader: int) -> None:
    """Ends the process at Ctrl-C, but once the script handles signals itself, only at the second.
    mpirun and timeout send a signal twice, so the second one counts after 0.3 s."""
    first = None
    while True:
        number = os.read(reader, 1)[0]
        if number not in (signal.SIGINT, signal.SIGTERM):
            continue
        if signal.getsignal(number) is signal.default_int_handler:
            os._exit(130)
        if first is None:
            first = time.monotonic()
        elif time.monotonic() > first + 0.3:
            os._exit(128 + number)


# ---- Hosts ---------------------------------------------------------------------------------------
LAUNCHERS = (  # their variables: processes, this one's number; the same among those of its host
    ("WORLD_SIZE", "RANK", "LOCAL_WORLD_SIZE", "LOCAL_RANK"),  # torchrun
    ("OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK",
     "OMPI_COMM_WORLD_LOCAL_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK"),
    ("SLURM_STEP_NUM_TASKS", "SLURM_PROCID", "SLURM_STEP_TASKS_PER_NODE", "SLURM_LOCALID"),
)  # fmt: skip

TPU_DEVICES = ("/dev/accel0", "/dev/vfio/0")
TPU_WORKERS = "http://metadata.google.internal/computeMetadata/v1/instance/attributes/worker-network-endpoints"


def join() -> None:
    """Joins the processes that a launcher or JNANO_COORDINATOR, JNANO_PROCESSES and JNANO_PROCESS
    name. One process alone joins nothing."""
    env = os.environ
    count = rank = local_count = local_rank = None
    for names in LAUNCHERS:
        if env.get(names[0]) and env.get(names[1]):
            count, rank, local_count, local_rank = (env.get(name) for name in names)
            break
    count, rank = env.get("JNANO_PROCESSES") or count, env.get("JNANO_PROCESS") or rank
    if env.get("JNANO_COORDINATOR") and not (count and rank):
        refuse("JNANO_COORDINATOR also needs JNANO_PROCESSES and JNANO_PROCESS: dev/hosts.md")
    if int(count or 1) < 2 and not is_tpu_pod():
        return

    # Several processes on a host take one GPU each, unless each one sees only its own.
    devices = []  # all
    if local_rank and not re.match(r"1\b", local_count or "1"):
        if "," in env.get("CUDA_VISIBLE_DEVICES", ","):
            devices = [int(local_rank)]
    coordinator = env.get("JNANO_COORDINATOR")
    if not coordinator and env.get("MASTER_ADDR"):  # torchrun itself listens at MASTER_PORT
        coordinator = f"{env['MASTER_ADDR']}:{int(env.get('MASTER_PORT') or 29500) + 1}"
    known = {}
    if coordinator and count and rank:
        known = {"coordinator_address": coordinator, "num_processes": int(count)}
        known |= {"process_id": int(rank), "cluster_detection_method": "deactivate"}

    def give_up():
        text = f"{count} processes were expected, but they did not all come in {wait} s"
        print(f"launch.py: {text} (JNANO_WAIT)", file=sys.stderr, flush=True)
        os._exit(2)

    wait = int(env.get("JNANO_WAIT") or 300)
    timer = threading.Timer(wait, give_up)
    timer.daemon = True
    if rank == "0":
        timer.start()
    jax.config.update("jax_enable_preemption_service", False)  # it swallows SIGTERM
    try:
        jax.distributed.initialize(
            **known,
            local_device_ids=devices,
            initialization_timeout=wait + 5,
            heartbeat_timeout_seconds=HEARTBEAT,
        )
    except ValueError as error:
        refuse(f"{count} processes cannot join: {error} Set JNANO_COORDINATOR: dev/hosts.md")
    timer.cancel()


def is_tpu_pod() -> bool:
    """Whether this is one of several TPU hosts. A single one, as on Colab and Kaggle, may be named
    local or localhost, and must not wait for others."""
    workers = os.environ.get("TPU_PROCESS_ADDRESSES") or os.environ.get("TPU_WORKER_HOSTNAMES")
    slices = int(os.environ.get("MEGASCALE_NUM_SLICES") or 1)
    has_tpu = any(map(os.path.exists, TPU_DEVICES)) and importlib.util.find_spec("libtpu")
    if not has_tpu or workers in ("local", "localhost"):
        return False
    if not workers:
        request = urllib.request.Request(TPU_WORKERS, headers={"Metadata-Flavor": "Google"})
        with contextlib.suppress(OSError):  # a TPU outside Google's cloud
            workers = urllib.request.urlopen(request, timeout=5).read().decode()
    return slices > 1 or "," in (workers or "")


# ---- What must be the same -----------------------------------------------------------------------
def gather(value: Any) -> list[Any]:
    """What every process has given, by number of process; it must fit into JSON."""
    text = json.dumps(value).encode()
    longest = int(process_allgather(np.int32(len(text))).max())
    texts = process_allgather(np.frombuffer(text.ljust(longest), np.uint8))
    return [json.loads(row.tobytes()) for row in texts]


def compare(facts: dict[str, Any]) -> None:
    """Exits with status 2, on all processes, if these facts are not the same on all of them."""
    hosts = gather((os.uname().nodename, facts))
    first_name, first = hosts[0]
    for number, (name, other) in enumerate(hosts):
        differences = []
        for fact in first | other:
            mine, theirs = first.get(fact), other.get(fact)
            if mine != theirs:
                differences.append(f"{fact} is {theirs!r:.60}, not {mine!r:.60}")
        if differences:
            refuse(
                f"process {number} on {name} and process 0 on {first_name} are not the same: "
                + "; ".join(differences[:3])
            )


def compare_everything(script: ModuleType, c: Any) -> None:
    """Compares source, flags, tokens and versions now, and the checkpoint once it is read."""
    counts = collections.Counter(device.process_index for device in jax.devices())
    if len(set(counts.values())) > 1:
        refuse(f"the processes do not have equally many devices, but {sorted(counts.items())}")
    shards = script.find_data(c)
    jobs = [(shard, script.batch_shapes(split, c)) for split in shards for shard in shards[split]]
    with ThreadPoolExecutor(8) as pool:
        tokens = list(pool.map(lambda job: script.shard_facts(*job, c), jobs))
    flags = {f"--{name}": value for name, value in dataclasses.asdict(c).items()}
    for name in ("--data", "--layers", "--stages"):  # the last two are in the source
        del flags[name]
    flags["--resume"] = bool(c.resume)  # paths may differ
    lines = script.SOURCE.splitlines()
    facts = {f"{script.__name__}.py:{n}": line for n, line in enumerate(lines, 1)} | flags
    facts |= {shard["file"]: shard["sha256"] for shard in tokens}
    facts |= {module.__name__: module.__version__ for module in (jax, np, optax)}
    facts["devices"] = jax.local_devices()[0].device_kind
    if c.prefixes:
        facts[c.prefixes] = hashlib.sha256(script.prefix_table(c).tobytes()).hexdigest()
    compare(facts)

    load_checkpoint = script.load_checkpoint

    def load_and_compare(place):
        checkpoint, arrays = load_checkpoint(place)
        compare({f"the checkpoint's {name}": checkpoint[name] for name in ("step", "log")})
        return checkpoint, arrays

    script.load_checkpoint = load_and_compare


# ---- The attention kernel of GPUs ----------------------------------------------------------------
def check_attention_once(script: ModuleType, c: Any) -> None:
    """Checks the kernel, unless this machine has passed with this software. Exits with status 2 if
    it is wrong."""
    driver = "nvidia-smi --query-gpu=name,driver_version --format=csv,noheader 2>/dev/null"
    packages = {d.metadata["Name"]: d.version for d in importlib.metadata.distributions()}
    software = {k: v for k, v in packages.items() if re.match("jax|nvidia-cudnn", k or "")}
    functions = (attention_errors, script.attend, script.positions, script.rope_frequencies)
    sources = [inspect.getsource(function) for function in functions]
    model = [c.D, c.H, c.attention, c.compute]
    facts = [os.uname().nodename, subprocess.getoutput(driver), software, sources, model]
    digest = hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()
    stamp = ROOT / ".cache" / f"attention-{digest[:16]}"
    if stamp.exists():
        return
    errors = attention_errors(script, c)
    if not all(error < 0.1 for error in errors.values()):  # NaN fails as well
        refuse(
            f"attention by {c.attention} is wrong on this machine, errors {errors}; try another "
            "driver, or the versions that ./run.sh installs into a new .venv"
        )
    with contextlib.suppress(OSError):  # where nothing can be written, the next run checks again
        stamp.parent.mkdir(exist_ok=True)
        stamp.write_text(json.dumps(errors) + "\n")


def attention_errors(script: ModuleType, c: Any) -> dict[str, float]:
    """The worst token's error of attend(), forward and backward, relative to an average token. The
    reference is XLA's kernel in float32, with a mask instead of window and document codes. cuDNN's
    faults are silent: a window that is ignored, or open to the future."""
    T, window = 512, 16
    # Documents of 22 tokens. Their numbers, 2^n - 1 and 2^n, change every bit of the codes.
    numbers = sorted({2**bit - less for bit in range(13) for less in (0, 1)})
    document = np.repeat(numbers, 22)[:T]
    query, key = np.ogrid[:T, :T]
    mask = (key <= query) & (query - key <= window) & (document[:, None] == document)
    pos = script.positions(np.diff(document, prepend=0)[None], c, 0)

    def with_code(x: Array, code: Any) -> Array:
        return x.at[..., -4:].set(jnp.broadcast_to(code, (*x.shape[:-1], 4)))

    def kernel(q, k, v):
        q, k = with_code(q, pos.doc_q), with_code(k, pos.doc_k)
        return script.attend(q, k, v, window, pos.score_scale, c)

    def reference(q, k, v):
        q, k, v = (x.astype(jnp.float32) for x in (with_code(q, 0), k, v))
        return jax.nn.dot_product_attention(
            q, k, v, mask=mask, scale=pos.score_scale, implementation="xla"
        )

    q, k, v, dy = jax.random.normal(jax.random.key(0), (4, 1, T, c.H, c.D // c.H), c.compute)

    def value_and_gradients(function: Callable, dy: Array) -> tuple[Array, ...]:
        def together(q, k, v, dy):
            y, vjp = jax.vjp(function, q, k, v)
            return y, *vjp(dy)

        return jax.jit(together)(q, k, v, dy)  # one program: every operation alone takes long

    results = value_and_gradients(kernel, dy)
    references = value_and_gradients(reference, dy.astype(jnp.float32))
    errors = {}
    for name, x, exact in zip(("y", "dq", "dk", "dv"), results, references, strict=True):
        x, exact = np.float32(x), np.float32(exact)
        worst = np.square(x - exact).sum(axis=-1).max()
        errors[name] = float(worst / np.square(exact).sum(axis=-1).mean()) ** 0.5
    return errors


if __name__ == "__main__":
    main(sys.argv[1:])
