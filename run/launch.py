"""Starts a training script as ./run.sh does, on one host or on several: run/hosts.md.

    python run/launch.py SCRIPT [preset] [--field value ...]

SCRIPT is train_gpt.py or a copy of it. Before the run, its processes connect, compare what must be
the same on all of them and agree on a seed; a large preset gets flags with which it fits the
memory; and what would be wrong in silence, or lost at the end of the run, is refused.
"""

import argparse
import dataclasses
import functools
import gc
import importlib.metadata
import importlib.util
import math
import os
import re
import secrets
import signal
import sys
import time
import traceback
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn, TextIO
from zlib import crc32

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.experimental.multihost_utils import broadcast_one_to_all, process_allgather

ROOT = Path(__file__).resolve().parents[1]
sys.path += [str(ROOT / "run"), str(ROOT / "data")]
import machine  # noqa: E402
from guard import Forgiving, Guard, identity  # noqa: E402
from messages import refuse  # noqa: E402
from shards import check as check_shards  # noqa: E402

NEXT = "ready for the next run"  # what train_in_turn() prints
HEARTBEAT = 30  # seconds after which JAX ends the processes that have lost another one
MAX_DOCUMENTS = 4095  # of a sequence: positions() in train_gpt.py cannot tell more apart
# Variables of torchrun, Open MPI and Slurm: processes and rank, in the run and on the host.
LAUNCHERS = (
    ("WORLD_SIZE", "RANK", "LOCAL_WORLD_SIZE", "LOCAL_RANK"),
    tuple(f"OMPI_COMM_WORLD_{name}" for name in ("SIZE", "RANK", "LOCAL_SIZE", "LOCAL_RANK")),
    ("SLURM_STEP_NUM_TASKS", "SLURM_PROCID", "SLURM_STEP_TASKS_PER_NODE", "SLURM_LOCALID"),
)


def main(argv: list[str]) -> NoReturn:
    """Runs a script. Ends the process by os._exit, because an ordinary exit would wait for threads
    and for the other processes."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Python's handler would wait for the compiler
    gc.set_threshold(1_000_000)  # objects; by default, a fifth of tracing is garbage collection
    for name in ("stdout", "stderr"):
        setattr(sys, name, Forgiving(getattr(sys, name) or open(os.devnull, "w")))
    status = 0
    try:
        start_jax()
        script = load_script(Path(argv[0]))
        if argv[-1] == "-":
            train_in_turn(script, argv[:-1], sys.stdin)
        else:
            train(script, argv)
    except SystemExit as end:
        status = end.code
    except Exception:
        status = 1
        traceback.print_exc()
    if jax.process_count() > 1 and jax.process_index() == 0:
        time.sleep(2)  # JAX ends all other processes once this one is gone
    os._exit(status or 0)


def train_in_turn(script: ModuleType, argv: list[str], lines: TextIO) -> None:
    """Trains once for each line, a seed and flags that may cut the run short, and prints NEXT after
    it: `--seed -`, for attempt.py. Programs are compiled once: one that reads c.seed fails."""
    _, c = script.parse_config(argv[1:-1])
    same = {"steps": c.steps, "val_tokens": c.val_tokens, "save": c.save, "seed": object()}

    def compile_once(compiled, *arguments):
        *key, c, mesh = arguments
        return compiled(*key, dataclasses.replace(c, **same), mesh)

    for name in ("compile_train_step", "compile_val_step"):
        compiled = functools.cache(getattr(script, name))
        setattr(script, name, functools.partial(compile_once, compiled))
    for line in lines:
        train(script, [*argv, *line.split()])
        print(f"\n{NEXT}")  # on a line of its own


def train(script: ModuleType, argv: list[str]) -> None:
    """Trains with a guard, after all checks. argv are the words of the command line, the script's
    name first."""
    cli = argparse.ArgumentParser(prog="./run.sh", allow_abbrev=False, add_help=False)
    cli.error = refuse
    add = cli.add_argument
    add("--save_every", type=int, default=0, help="steps between checkpoints; 0: none")
    add("--resume", type=Path, help="a checkpoint, or a folder, for its newest intact one")
    add("--stall", type=int, default=300, help="seconds without a step that end the run; 0: never")
    options, words = cli.parse_known_args(argv)
    if {"-h", "--help"} & {*words}:
        cli.print_help()
    preset, c = script.parse_config(words[1:])
    set_compilation_cache()  # JAX looks only once, at the first program
    guard = Guard(script, options)
    added = fit(preset, words).split()
    preset, c = script.parse_config(words[1:] + added)
    devices, fitted = script.fit_devices(c)
    check_attention(script, fitted, devices[0])
    shards = script.find_data(c)
    data = script.data_facts(shards, c)
    check_data(script, shards, data, c)
    if c.seed < 0:
        seed = guard.checkpoint["identity"]["--seed"] if guard.checkpoint else secrets.randbits(31)
        c = dataclasses.replace(c, seed=int(broadcast_one_to_all(np.uint32(seed))))
    its_identity = identity(script, c, data)
    versions = [module.__version__ for module in (jax, np, optax)]
    same = its_identity, c.save, options.save_every, guard.start, versions, jax.local_device_count()
    sums = process_allgather(np.uint32(crc32(repr(same).encode())))
    if np.any(sums != sums.flat[0]):
        refuse("the hosts differ in source, flags, tokens, checkpoint, versions or devices")
    if jax.process_index() > 0:
        sys.stdout = open(os.devnull, "w")
    guard.compare(its_identity)
    guard.facts |= machine_facts()
    c = dataclasses.replace(fitted, seed=c.seed)
    weights = script.run(preset, c, devices, shards, data, argv[1:] + added, guard)
    guard.limit = math.inf  # for its watchdog, if another run follows
    if weights:
        print(f"next: ./run.sh look {weights}, or ./run.sh sample {weights}")


# ---- What evals/, records/ and lab/ use as well --------------------------------------------------
def load_script(path: Path) -> ModuleType:
    """Imports a script from its file, as if it had been started itself."""
    sys.path.insert(0, str(path.resolve().parent))
    spec = importlib.util.spec_from_file_location(path.stem, path)
    script = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = script  # dataclasses look it up
    spec.loader.exec_module(script)
    return script


def set_compilation_cache() -> None:
    """Lets JAX keep compiled programs in .cache/jax, unless JAX_COMPILATION_CACHE_DIR names another
    folder. They contain plans of cuDNN, whose version is not in JAX's key, so it is in the path.
    Several processes keep none: in the second run, only process 0 would find its programs."""
    if not jax.config.jax_compilation_cache_dir and jax.process_count() == 1:
        versions = [version for name, version in wheels().items() if "cudnn" in name]
        jax.config.update("jax_compilation_cache_dir", "/".join([".cache/jax", *versions]))


def wheels() -> dict[str, str]:
    """Versions of the installed wheels of cuDNN, cuBLAS with cuBLASLt, NCCL and libtpu, by name."""
    installed = {wheel.name or "": wheel.version for wheel in importlib.metadata.distributions()}
    wanted = re.compile("nvidia-(cudnn|cublas|nccl)|libtpu")
    return {name: installed[name] for name in sorted(installed) if wanted.match(name)}


def start_jax() -> None:
    """Connects this process to the others of the run that a launcher or JNANO_COORDINATOR,
    JNANO_PROCESSES and JNANO_PROCESS describe, if there are any: run/hosts.md."""
    env = os.environ
    names = next((row for row in LAUNCHERS if env.get(row[0]) and env.get(row[1])), ("",) * 4)
    count = int(env.get("JNANO_PROCESSES") or env.get(names[0]) or 1)
    rank = int(env.get("JNANO_PROCESS") or env.get(names[1]) or 0)
    coordinator = env.get("JNANO_COORDINATOR")
    if count < 2 and coordinator != "auto":
        return
    if not coordinator and env.get("MASTER_ADDR"):  # torchrun itself listens at MASTER_PORT
        coordinator = f"{env['MASTER_ADDR']}:{int(env.get('MASTER_PORT', 29500)) + 1}"
    place = {}  # where it stays empty, JAX asks the launcher or the TPU itself
    if coordinator and coordinator != "auto":
        place = {"coordinator_address": coordinator, "num_processes": count, "process_id": rank}
        place["cluster_detection_method"] = "deactivate"
    # Several processes on a host take one GPU each, unless the launcher shows only one to each.
    alone = re.match(r"1\b", env.get(names[2], "1"))  # Slurm: "1(x2)" on two nodes
    sees_several = "," in env.get("CUDA_VISIBLE_DEVICES", ",")
    several = env.get(names[3]) and not alone and sees_several
    jax.config.update("jax_enable_preemption_service", False)  # it would catch SIGTERM
    jax.distributed.initialize(
        **place,
        local_device_ids=[int(env[names[3]])] if several else [],  # []: all that JAX sees
        heartbeat_timeout_seconds=HEARTBEAT,
    )


# ---- Checks --------------------------------------------------------------------------------------
def check_attention(script: ModuleType, c: Any, device: jax.Device) -> None:
    """Exits with status 2 if cuDNN's attention is wrong on this machine."""
    if c.attention == "cudnn" and device.platform == "gpu":
        errors = attention_errors(script, c)
        if not all(error < 0.1 for error in errors):  # NaN fails as well
            refuse(f"cuDNN's attention is wrong on this machine, errors {errors}: another driver?")


def check_data(script: ModuleType, shards: dict[str, list], data: list[dict], c: Any) -> None:
    """Exits with status 2 if the shards are not right, or if a sequence would hold more documents
    than the codes tell apart."""
    check_shards(Path(c.data), {facts["file"]: facts["sha256"] for facts in data})
    for split in shards:
        shapes = {(T, max_doc) for _, T, max_doc in script.batch_shapes(split, c)}
        for shard in shards[split]:
            starts = np.flatnonzero(shard == c.eot)
            sizes = np.diff(starts, append=len(shard))
            for T, max_doc in shapes:
                taken = np.minimum(sizes, max_doc or len(shard))
                begins = np.cumsum(taken) - taken
                if np.any(begins[MAX_DOCUMENTS:] - begins[:-MAX_DOCUMENTS] < T):
                    refuse(f"{shard.filename}: more than {MAX_DOCUMENTS} documents in {T} tokens")


def fit(preset: str, words: list[str]) -> str:
    """The flags with which a large preset fits the memory of the smallest device; "" if the user
    has typed such flags. Exits with status 2 if the memory is too small for all of them."""
    stats = [device.memory_stats() or {} for device in jax.local_devices()]
    memory = min(stat.get("bytes_limit", math.inf) for stat in stats) / 1e9  # inf: not stated
    memory = float(process_allgather(np.float32(memory)).min())
    flags = machine.fit(preset, memory, len(jax.devices()))
    if re.search("--(batch|microbatch|head_chunk|val_T|ngram_buckets)", " ".join(words)):
        return ""
    if flags is None:
        refuse(f"JAX has {memory:.1f} GB of each device, too little for {preset}: ./run.sh tiny")
    if flags and jax.process_index() == 0:
        print(f"To fit {memory:.1f} GB, {preset} runs with {flags}")
    return flags


def attention_errors(script: ModuleType, c: Any) -> list[float]:
    """Errors of attend() in y, dq, dk and dv: the norm of the error of the worst token, divided by
    the root mean square of the norms of all tokens. attend() in plain JAX and float32 is right.
    cuDNN's faults are silent: it may ignore a window, or let tokens attend to later ones."""
    T, window = 512, 16
    # Documents of 22 tokens. Their numbers, 2^n - 1 and 2^n, change every bit of the codes.
    powers = 2 ** np.arange(13)
    document = np.repeat(np.union1d(powers - 1, powers), 22)[:T]
    pos = script.positions(np.diff(document, prepend=0)[None], c, 0)
    _, scale = script.rope_frequencies(c, 0)
    q, k, v, dy = jax.random.normal(jax.random.key(0), (4, 1, T, c.H, c.D // c.H), c.compute)
    q = q.at[..., -4:].set(pos.doc_q)
    k = k.at[..., -4:].set(pos.doc_k)

    def value_and_gradients(c, q, k, v):
        attend = jax.jit(lambda q, k, v: script.attend(q, k, v, window, scale, c))
        y, vjp = jax.vjp(attend, q, k, v)
        return y, *vjp(dy.astype(y.dtype))

    results = value_and_gradients(c, q, k, v)
    c = dataclasses.replace(c, attention="band")
    references = value_and_gradients(c, *(x.astype(jnp.float32) for x in (q, k, v)))
    errors = []
    for x, exact in zip(results, references, strict=True):
        gap = np.square(x - exact)[..., :-4].sum(axis=-1)  # without the codes
        errors.append(float(gap.max() / np.square(exact)[..., :-4].sum(axis=-1).mean()) ** 0.5)
    return errors


# ---- Facts for the log ---------------------------------------------------------------------------
def machine_facts() -> dict[str, Any]:
    """The environment without secrets, versions of wheels, and the driver, "" without a GPU."""
    secret = re.compile("TOKEN|KEY|SECRET|PASS")
    relevant = re.compile("JAX|XLA|(LIB)?TPU|CUD|NVI|NCCL|TF_CPP|GLIBC_TUNABLES")
    home = re.compile(rf"(?<![\w./-]){re.escape(os.path.expanduser('~'))}(?![\w.-])")
    environment = {}
    for name, value in os.environ.items():
        if relevant.match(name) and not secret.search(name):
            environment[name] = home.sub("~", value)
    return {"environment": environment, "wheels": wheels(), "driver": machine.nvidia()[1]}


if __name__ == "__main__":
    main(sys.argv[1:])
