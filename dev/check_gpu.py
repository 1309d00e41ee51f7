"""Does this machine compute the right thing, and how fast will the record be?

    ./run.sh check [--field value ...]    with the flags of the run, before gigabytes are downloaded
    ./run.sh check --small                all parts at a size for a CPU; times mean nothing there

Prints PASS or FAIL for each check, cheap ones first; a part that breaks has failed, and the next
one goes on. Predicts the time to 3.28 and prints a line of JSON to paste into an issue. Exit status
0: all pass; 1: not all; 2: nothing to check. Leaves the record's programs in the compilation cache.
"""

import dataclasses
import functools
import json
import os
import subprocess
import sys
import timeit
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, P, lax
from jax.sharding import Mesh, NamedSharding

import train_gpt
from train_gpt import LONG, SHORT, Config, Layer, Stage

Lines = Iterator[tuple[bool, str, str, Any]]  # whether it passes, name, text, facts for JSON
RECORD = dataclasses.replace(train_gpt.PRESETS["record"], seed=1)
TINY = dataclasses.replace(train_gpt.PRESETS["tiny"], seed=1)
SMALL = dataclasses.replace(
    RECORD,
    layers=(
        Layer(SHORT, paired_heads=True, bigram=True, value_table=0),
        Layer(LONG, key_offset=True),
    ),
    stages=(Stage(400, 1024, short=8, long=16, max_doc=0, lr=1.0, targets=(1.0, (0.5, 0.0))),),
    mudd_head=(), D=64, H=2, F=128, R=8, vocab=257, eot=256, bigrams=512, head_chunk=128,
    dc_window=12, val_T=1024, val_tokens=8192, prefixes="",
)  # fmt: skip
# What healthy GPUs of these kinds reach in a node with NVLink.
HOPPER = "NVIDIA H100 80GB HBM3", "NVIDIA H200"
FLOORS = {"copy, TB/s": 2.5, "product, TFLOP/s": 500, "head, TFLOP/s": 600, "gather, TB/s": 0.25}
PEAK = 989e12  # operations a second of an H100 in bfloat16, by the data sheet


# ---- The machine ---------------------------------------------------------------------------------
def check_machine() -> Lines:
    """GPUs of one kind, and nobody else on them: asks nvidia-smi, before JAX takes memory."""

    def ask(arguments):
        return subprocess.getoutput(f"nvidia-smi {arguments} 2>/dev/null")

    facts = "name,driver_version,memory.total,memory.used,power.limit,clocks.max.sm"
    which = '${CUDA_VISIBLE_DEVICES:+--id="$CUDA_VISIBLE_DEVICES"}'
    lines = ask(f"--query-gpu={facts} --format=csv,noheader,nounits {which}").splitlines()
    gpus = [line.split(", ") for line in lines if line.count(", ") == 5]
    busy = [i for i, gpu in enumerate(gpus) if gpu[3].isdigit() and int(gpu[3]) > int(gpu[2]) / 5]
    kinds = {f"{gpu[0]}, {gpu[2]} MiB, {gpu[4]} W, driver {gpu[1]}" for gpu in gpus}
    text = f"{len(gpus)} x {' and '.join(sorted(kinds)) or 'GPU'}, "
    text += "NVLink" if "NV" in ask("topo -m").partition("Legend")[0] else "no NVLink"
    if busy:
        text += f"; in use by others: {busy}"
    if len(kinds) > 1:
        text += "; choose GPUs of one kind by CUDA_VISIBLE_DEVICES"
    yield len(kinds) < 2 and not busy, "machine", text, gpus


def check_speed(c: Config, mesh: Mesh, n: int) -> Lines:
    """Rates of every device, so that one slow card shows, and of its link to the next one."""
    V = -(-c.vocab // 128) * 128
    D = c.D
    tokens = c.head_chunk
    devices = list(mesh.devices.flat)
    head = functools.partial(
        train_gpt.scaled_matmul, axes=(1, 1), scale=1.0, dtype=c.compute, precision=None
    )
    works = {  # bytes or operations; the function, its arguments' shapes and their format
        "copy, TB/s": (32 * n * n, lambda x: x + 1, [(8 * n * n,)], c.compute),
        "product, TFLOP/s": (2 * n**3, lambda a, b: a @ b, [(n, n)] * 2, c.compute),
        "head, TFLOP/s": (2 * tokens * V * D, head, [(tokens, D), (V, D)], c.head_forward),
    }
    for name, (work, run, shapes, dtype) in works.items():
        arrays = [normal(i, *shape, dtype=dtype) for i, shape in enumerate(shapes)]
        rates = [work / seconds(jax.jit(run), *jax.device_put(arrays, d)) for d in devices]
        yield rated(name, rates, devices[0])
    if len(devices) > 1:
        yield rated("gather, TB/s", [gathered(mesh, n)], devices[0])
        pairs = zip(devices, [*devices[1:], devices[0]], strict=True)
        links = [float(f"{gathered(train_gpt.make_mesh(pair), n) / 1e12:.3g}") for pair in pairs]
        yield True, "links, TB/s", " ".join(map(str, links)), links  # nobody knows the topology


def normal(seed: int, *shape: int, dtype: str = "bfloat16") -> Array:
    """An array of random numbers."""
    return jax.random.normal(jax.random.key(seed), shape).astype(dtype)


def seconds(run: Callable, *arrays: Array) -> float:
    """Of one call: the best of four rounds of five, of which the first one compiles."""

    def five_calls():
        jax.block_until_ready([run(*arrays) for _ in range(5)])

    return min(timeit.repeat(five_calls, number=1, repeat=4)) / 5


def gathered(mesh: Mesh, n: int) -> float:
    """Bytes a second that a device receives, of a gigabyte that all have in the end."""

    def gather(x):
        return lax.all_gather(x, "fsdp", tiled=True, to="invarying")

    x = jax.device_put(normal(0, 8 * n * n), NamedSharding(mesh, P("fsdp")))
    run = jax.jit(jax.shard_map(gather, mesh=mesh, in_specs=P("fsdp"), out_specs=P()))
    return x.nbytes * (mesh.size - 1) / mesh.size / seconds(run, x)


def rated(name: str, rates: list[float], device: jax.Device) -> tuple:
    """A line that fails for rates below the floor of their kind, or a tenth below the median."""
    rates = [float(f"{rate / 1e12:.3g}") for rate in rates]
    floor = FLOORS.get(name, 0) if device.device_kind in HOPPER else 0
    least = max(floor, 0.9 * np.median(rates)) if device.platform == "gpu" else 0
    slow = [i for i, rate in enumerate(rates) if rate < least]
    text = " ".join(map(str, rates))
    if slow:
        text += f"; {slow} below {least:.3g}"
    return not slow, name, text, rates


# ---- Values and gradients ------------------------------------------------------------------------
def compare(
    name: str, most: float, run: Callable, exact: Callable, *x: Array, trained: bool = True
):
    """A line on run(*x) and, if trained, its gradients, against those of exact in float32."""

    def in_float32(*x):
        with jax.default_matmul_precision("highest"):  # or GPUs round what they multiply
            return exact(*(array.astype("float32") for array in x))

    def gradients(function, y):
        return jax.vjp(function, *x)[1](normal(9, *y.shape, dtype=y.dtype))

    def size(array):
        return jnp.linalg.norm(array.astype("float32"))

    run = jax.jit(run)
    y, y_exact = run(*x), in_float32(*x)
    pairs = [(y, y_exact)]
    if trained:
        pairs += zip(gradients(run, y), gradients(in_float32, y_exact), strict=True)
    errors = [float(size(a.astype("float32") - b) / size(b)) for a, b in pairs]
    text = " ".join(f"{error:.2g}" for error in errors) + f"; below 0.01, in gradients {most:g}"
    passes = errors[0] < 0.01 and all(error < most for error in errors[1:])
    return passes, name, f"errors {text}", errors


def check_attention(c: Config, T: int, trained: bool) -> Lines:
    """The last queries of a long sequence, half in a document longer than the window, half in short
    ones, with document numbers up to 500; if trained, also whether a window saves time."""
    stage = len(c.stages) - 1
    window = c.stages[stage].long
    tail = min(256, T // 4)  # queries
    near = tail + window  # the positions that they see
    documents = min(500, T // 8)  # before those
    starts = np.zeros(T, np.int32)
    starts[np.arange(documents) * (T - near) // documents] = 1
    starts[T - near] = 1  # the long document
    starts[T - tail // 2 :: tail // 16] = 1  # and the short ones
    pos = train_gpt.positions(starts[None], c, stage)

    document = np.cumsum(starts)[-near:]
    j = np.arange(near)
    i = j[-tail:, None]
    mask = (j <= i) & (i - j <= window) & (document[-tail:, None] == document)

    def with_code(x, code):
        return x.at[..., -4:].set(jnp.broadcast_to(code, (*x.shape[:-1], 4)))

    def run(q, k, v):
        q, k = with_code(q, pos.doc_q), with_code(k, pos.doc_k)
        return train_gpt.attend(q, k, v, window, pos.score_scale, c)[:, -tail:]

    def exact(q, k, v):
        q, k = with_code(q, 0)[:, -tail:], with_code(k, 0)[:, -near:]
        options = {"mask": mask, "scale": pos.score_scale, "implementation": "xla"}
        return jax.nn.dot_product_attention(q, k, v[:, -near:], **options)

    qkv = [normal(seed, 1, T, c.H, c.D // c.H, dtype=c.compute) for seed in range(3)]
    name = f"attention at {T}, {np.sum(starts)} documents"
    yield compare(name, 0.03, run, exact, *qkv, trained=trained)
    if not trained:
        return

    def total(q, k, v, window):
        return train_gpt.attend(q, k, v, window, 0.1, c).sum()

    times = {}
    short = c.stages[0].short
    for window in (short, c.stages[c.stage_at(c.total_steps - 1)].long, T // 2):
        gradients = jax.jit(jax.grad(functools.partial(total, window=window), (0, 1, 2)))
        times[window] = round(1e3 * seconds(gradients, *qkv), 3)
    fast = c.attention == "xla" or times[short] < times[T // 2] / 3  # XLA's computes every score
    yield fast, "its ms by window", str(times), times


def check_gradients(c: Config) -> Lines:
    """The head in its formats, and the other gradients that are written by hand."""
    N = c.head_chunk // 4
    V = -(-c.vocab // 128) * 128
    weights = np.float32([1, 0.5])
    targets = jax.random.randint(jax.random.key(2), (N, 2), 0, c.vocab)
    two_chunks = dataclasses.replace(c, head_chunk=N // 2)

    def head(x, w):
        return train_gpt.head_loss(x, w, targets, weights, two_chunks)

    def exact_head(x, w):
        log_p = jax.nn.log_softmax(23 * jax.nn.sigmoid((x @ w.T + 5) / 7.5))
        return -(weights * jnp.take_along_axis(log_p, targets, axis=1)).sum()

    x = normal(0, N, c.D, dtype=c.compute)
    w = 0.05 * normal(1, V, c.D, dtype="float32")
    yield compare(f"head in {c.head_forward}", 0.15, head, exact_head, x, w)

    def exact_product(x, w):
        return train_gpt.norm(x) @ w.T

    x, w = x[None], w[: c.F].astype(c.compute)
    for radial_from in "x", "y":

        def product(x, w, radial_from=radial_from):
            return train_gpt.norm_linear(x, w, c.compute, c, radial_from)

        yield compare(f"norm and product, from {radial_from}", 0.02, product, exact_product, x, w)

    x = x.reshape(1, N, c.H, -1)
    pos = train_gpt.positions(jnp.zeros((1, N), jnp.int32), c, 0)
    for key_offset in False, True:

        def rotation(x, key_offset=key_offset):
            return train_gpt.norm_rotate(x, *pos.rope, pos.doc_k, key_offset)[..., :-4]

        def exact_rotation(x, key_offset=key_offset):
            return train_gpt.rotate_and_shift(train_gpt.norm(x), *pos.rope, key_offset)[..., :-4]

        name = "norm and rotation" + (", with key_offset" if key_offset else "")
        yield compare(name, 0.02, rotation, exact_rotation, x)


# ---- Training ------------------------------------------------------------------------------------
def check_tiny(c: Config, mesh: Mesh) -> Lines:
    """20 steps in float32 on the text of train_gpt.py, with 8 sequences: one for each of 8
    devices."""
    c = dataclasses.replace(c, compute="float32", attention="xla").without_fp8()
    stage = Stage(20, 2048, short=64, long=192, max_doc=0, lr=1.0)
    c = dataclasses.replace(c, stages=(stage,), batch=8)
    shards = {"train": [np.array([c.eot, *train_gpt.SOURCE.encode()], np.uint16)]}

    def losses(devices):
        mesh = train_gpt.make_mesh(devices)
        programs = [
            train_gpt.compile_train_step(0, update_all, c, mesh) for update_all in (False, True)
        ]
        state = train_gpt.make_state(c, mesh)
        for step, (tokens, row) in enumerate(train_gpt.train_batches(c, mesh, shards, 0)):
            state, loss = programs[step % 2](state, tokens, row)
            yield float(loss)

    devices = tuple(mesh.devices.flat)
    cpu = tuple(jax.local_devices(backend="cpu")[:1])
    right = None
    for some in dict.fromkeys((cpu, devices[:1], devices)):
        with jax.default_matmul_precision("highest"):
            found = np.array(list(losses(some)))
        right = found if right is None else right
        difference = float(np.abs(found - right).max())
        text = f"losses from {found[0]:.4f} to {found[-1]:.4f}, {difference:.1g} from a CPU's"
        yield difference < 2e-3, f"tiny, {len(some)} {some[0].platform}", text, difference


def step_ms(programs: list[Callable], c: Config, stage: int, mesh: Mesh) -> float:
    """Milliseconds of a step, over 20 on one batch of few frequent tokens, at the rates of the
    run's first step; NaN unless the loss falls by a tenth."""
    tokens = np.random.default_rng(1).random((c.batch, c.sequence_length(stage) + 1)) ** 4 * c.vocab
    tokens[:, ::400] = c.eot
    rows = train_gpt.schedule(c)
    row = rows[0]._replace(loss_weights=rows[int([0, *c.stage_ends][stage])].loss_weights)
    batch = jax.device_put(
        (tokens.astype(np.int32), row),
        (NamedSharding(mesh, P(mesh.axis_names)), NamedSharding(mesh, P())),
    )
    state = train_gpt.make_state(c, mesh)
    state, first_loss = programs[0](state, *batch)
    state, loss = programs[1](state, *batch)
    first_loss, _ = float(first_loss), float(loss)  # waits for both steps
    began = timeit.default_timer()
    for step in range(20):
        state, loss = programs[step % 2](state, *batch)
    last_loss = float(loss)
    ms = 1e3 * (timeit.default_timer() - began) / 20
    return ms if last_loss < 0.9 * first_loss else np.nan


def check_record(c: Config, mesh: Mesh) -> Lines:
    """All programs; steps of each stage; the run by their times. Operations are 6 by tokens and
    weights, 12 by tokens, channels and keys in the window; PaLM, arXiv:2204.02311, appendix B."""
    facts = {}
    programs = train_gpt.compile_all(c, mesh, SimpleNamespace(facts=facts.update))
    compiled = facts["compile"]
    yield True, f"compiling {len(programs)} programs", f"{compiled['seconds']:.0f} s", compiled
    table = train_gpt.param_table(c)
    weights = sum(np.prod(table[name].model_shape) for name in ("qk", "vo", "mlp", "head"))
    steps = np.diff(c.stage_ends, prepend=0)
    total, planned = 0.0, 0
    for i in sorted({i for i, kind in programs if kind != "val"}):
        stage = c.stages[i]
        pair = [programs[i, False], programs[i, True]]
        ms = step_ms(pair, c, i, mesh)
        total += ms * float(steps[i]) / 1e3
        rate = 1e3 * stage.tokens / ms
        windows = {SHORT: stage.short, LONG: stage.long, None: 0}
        keys = sum(windows[layer.window] for layer in c.layers)
        mfu = rate * (6 * weights + 12 * c.D * keys) / PEAK / mesh.size
        text = f"{ms:.2f} ms, {rate:,.0f} tokens/s, MFU {mfu:.1%} as if of {mesh.size} x H100"
        memory = pair[1].memory_analysis()
        planned = max(planned, memory.argument_size_in_bytes + memory.temp_size_in_bytes)
        yield np.isfinite(ms), f"stage {i}", text, [ms, rate, mfu]
    memory = [device.memory_stats() or {} for device in mesh.devices.flat]
    used = [stats.get("peak_bytes_in_use", 0) for stats in memory]
    text = f"{max(used) / 1e9:.1f} GB at most, {planned / 1e9:.1f} for training by the compiler"
    yield True, "memory", text, used
    gpu = mesh.devices.flat[0].platform == "gpu"
    text = f"{total:.1f} s" + ("; upstream 73.8 s on 8 x H100" if gpu else " of a toy")
    yield np.isfinite(total), "predicted time to 3.28", text, total


def check_settings(c: Config, mesh: Mesh, facts: dict) -> Lines:
    """What may be faster in the last stage with steps, or work where the usual options do not."""
    stage = c.stage_at(c.total_steps - 1)
    usual, usual_ms = train_gpt.OPTIONS["gpu"], facts.get(f"stage {stage}", [np.nan])[0]
    times = {"usual": usual_ms}

    def compile_step(update_all):
        return train_gpt.compile_train_step(stage, update_all, c, mesh)

    for option in (
        {"xla_gpu_enable_command_buffer": ""},
        {"xla_gpu_enable_dynamic_slice_fusion": True},
    ):
        options = mock.patch.dict(train_gpt.OPTIONS, gpu=usual | option)
        with options, ThreadPoolExecutor() as pool:
            pair = list(pool.map(compile_step, (False, True)))
        times[f"OPTIONS with {option}"] = step_ms(pair, c, stage, mesh)
    most = 0.99 * usual_ms if usual_ms > 0 else np.inf
    fast = {name: ms for name, ms in times.items() if ms < most}
    text = ", ".join(f"{name} {ms:.2f} ms" for name, ms in times.items())
    text += f"; use: {min(fast, key=fast.get, default='usual')}"
    yield True, "settings", text, times


# ---- Command line --------------------------------------------------------------------------------
def main(argv: list[str]) -> int:
    """Runs the parts and returns the exit status."""
    began = timeit.default_timer()
    small = argv == ["--small"]
    failed = []
    facts = {}

    def run_part(part, *arguments):
        try:
            for passes, name, text, fact in part(*arguments):
                facts[name] = fact
                print("PASS" if passes else "FAIL", f"{name}: {text}", flush=True)
                if not passes:
                    failed.append(name)
        except (Exception, SystemExit) as error:  # the next part may work
            text = f"{part.__name__}: {type(error).__name__}: {error}".splitlines()[0]
            failed.append(text)
            advice = "; see Memory in dev/README.md" if "RESOURCE_EXHAUSTED" in text else ""
            print(f"FAIL {text}{advice}", flush=True)

    _, c = train_gpt.parse_config(["record", "--seed", "1", *([] if small else argv)])
    if small:
        jax.config.update("jax_platforms", "cpu")
        jax.config.update("jax_disable_most_optimizations", True)
    run_part(check_machine)
    if small or "machine" not in failed:
        devices, c = train_gpt.fit_devices("check", SMALL if small else c)
        if devices[0].platform == "cpu" and not small:
            print("check_gpu.py: JAX sees no GPU; there is ./run.sh check --small")
            return 2
        mesh = train_gpt.make_mesh(devices)
        minutes = max(2, 20 // os.cpu_count())  # for 20 programs
        print(f"Some minutes, and about {minutes} more if this was never compiled here", flush=True)
        run_part(check_speed, c, mesh, 256 if small else 8192)
        run_part(check_attention, c, c.sequence_length(len(c.stages) - 1), True)
        run_part(check_attention, c, c.val_T, False)
        run_part(check_gradients, c)
        run_part(check_tiny, c if small else TINY, mesh)
        run_part(check_record, c, mesh)
        if "RESOURCE_EXHAUSTED" not in str(failed):
            run_part(check_settings, c, mesh, facts)
    print("all pass" if not failed else f"FAILED: {'; '.join(failed)}")
    facts |= {"failed": failed, "argv": argv, "seconds": round(timeit.default_timer() - began)}
    facts |= {"jax": jax.__version__, "backend": jax.devices()[0].client.platform_version}
    facts["git"] = subprocess.getoutput("git describe --always --dirty 2>/dev/null")
    print("CHECK", json.dumps(json.loads(json.dumps(facts), parse_constant=str)))  # NaN is no JSON
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
