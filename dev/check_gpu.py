"""Does this machine compute the right thing, and how fast will the record be?

    ./run.sh check [--field value ...]    with the flags of the run, before gigabytes are downloaded
    ./run.sh check --small                all parts at a size for a CPU; times mean nothing there

PASS or FAIL a line, cheap checks first; a part that breaks has failed, and the next one goes on.
Then the time to 3.28 as predicted, and a line of JSON to paste into an issue. Exit status 0: all
pass; 1: not all; 2: nothing to check. Leaves the record's programs in the compilation cache.
"""

import dataclasses
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
from train_gpt import KINDS, Config

Lines = Iterator[tuple[bool, str, str, Any]]  # whether it passes, name, text, facts for JSON
RECORD, TINY = (dataclasses.replace(c, seed=1) for c in train_gpt.PRESETS.values())
SMALL = dataclasses.replace(
    RECORD, plan="Spbv0 Lk@0", D=64, H=2, F=128, E=8, vocab=257, eot=256, bigrams=512,
    head_chunk=128, dc_window=12, val_T=1024, val_tokens=8192, prefixes="", steps=400,
    stages="200 1024 8 16 0 1 0,1,.5:0 / 200 2048 16 48 0 1.5 0,1 / 0 2048 16 64 0 1 0,1",
)  # fmt: skip
# Of them: operations a second by the data sheet, and what healthy ones in a node with NVLink reach.
HOPPER, PEAK = ("NVIDIA H100 80GB HBM3", "NVIDIA H200"), 989e12
FLOORS = {"copy, TB/s": 2.5, "product, TFLOP/s": 500, "head, TFLOP/s": 600, "gather, TB/s": 0.25}


def normal(seed: int, *shape: int, dtype: str = "bfloat16") -> Array:
    return jax.random.normal(jax.random.key(seed), shape).astype(dtype)


def seconds(run: Callable, *arrays: Array) -> float:
    """Of one call: the best of four rounds of five, of which the first one compiles."""
    five = lambda: jax.block_until_ready([run(*arrays) for _ in range(5)])
    return min(timeit.repeat(five, number=1, repeat=4)) / 5


def check_machine() -> Lines:
    """By nvidia-smi, before JAX takes memory: GPUs of one kind, and nobody else on them."""
    ask = lambda words: subprocess.getoutput(f"nvidia-smi {words} 2>/dev/null")
    facts = "name,driver_version,memory.total,memory.used,power.limit,clocks.max.sm"
    which = '${CUDA_VISIBLE_DEVICES:+--id="$CUDA_VISIBLE_DEVICES"}'
    said = ask(f"--query-gpu={facts} --format=csv,noheader,nounits {which}").splitlines()
    gpus = [line.split(", ") for line in said if line.count(", ") == 5]
    busy = [i for i, gpu in enumerate(gpus) if gpu[3].isdigit() and int(gpu[3]) > int(gpu[2]) / 5]
    kinds = {f"{gpu[0]}, {gpu[2]} MiB, {gpu[4]} W, driver {gpu[1]}" for gpu in gpus}
    text = f"{len(gpus)} x {' and '.join(sorted(kinds)) or 'GPU'}, "
    text += "NVLink" if "NV" in ask("topo -m").partition("Legend")[0] else "no NVLink"
    text += f"; in use, says nvidia-smi: {busy}" * bool(busy)
    text += "; choose GPUs of one kind by CUDA_VISIBLE_DEVICES" * (len(kinds) > 1)
    yield len(kinds) < 2 and not busy, "machine", text, gpus


def check_speed(c: Config, mesh: Mesh, n: int) -> Lines:
    """Of each device, so that one slow card shows, and of its link to the next one."""
    V, D, tokens, devices = -(-c.vocab // 128) * 128, c.D, c.head_chunk, [*mesh.devices.flat]
    head = lambda x, w: train_gpt.matmul(x, w, (1, 1), 1.0, c.compute, None)
    works = {  # bytes or operations of each
        "copy, TB/s": (32 * n * n, lambda x: x + 1, [(8 * n * n,)], c.compute),
        "product, TFLOP/s": (2 * n**3, lambda a, b: a @ b, [(n, n)] * 2, c.compute),
        "head, TFLOP/s": (2 * tokens * V * D, head, [(tokens, D), (V, D)], c.head_forward),
    }
    for name, (work, run, shapes, dtype) in works.items():
        given = [normal(i, *shape, dtype=dtype) for i, shape in enumerate(shapes)]
        rates = [work / seconds(jax.jit(run), *jax.device_put(given, d)) for d in devices]
        yield rated(name, rates, devices[0])
    if len(devices) > 1:
        yield rated("gather, TB/s", [gathered(mesh, n)], devices[0])
        pairs = zip(devices, [*devices[1:], devices[0]], strict=True)
        links = [float(f"{gathered(train_gpt.make_mesh(pair), n) / 1e12:.3g}") for pair in pairs]
        yield True, "links, TB/s", " ".join(map(str, links)), links  # nobody knows the topology


def gathered(mesh: Mesh, n: int) -> float:
    """Bytes a second that a device receives, of a gigabyte that all have in the end."""
    x = jax.device_put(normal(0, 8 * n * n), NamedSharding(mesh, P("fsdp")))
    gather = lambda x: lax.all_gather(x, "fsdp", tiled=True, to="invarying")
    run = jax.jit(jax.shard_map(gather, mesh=mesh, in_specs=P("fsdp"), out_specs=P()))
    return x.nbytes * (mesh.size - 1) / mesh.size / seconds(run, x)


def rated(name: str, rates: list[float], device: jax.Device) -> tuple:
    """Fails what is below the floor of its kind, or a tenth below the median."""
    rates = [float(f"{rate / 1e12:.3g}") for rate in rates]
    floor = FLOORS.get(name, 0) if device.device_kind in HOPPER else 0
    least = max(floor, 0.9 * np.median(rates)) if device.platform == "gpu" else 0
    slow = [i for i, rate in enumerate(rates) if rate < least]
    text = " ".join(map(str, rates)) + f"; {slow} below {least:.3g}" * bool(slow)
    return not slow, name, text, rates


def judged(name: str, most: float, run: Callable, exact: Callable, *x: Array, trained: bool = True):
    """The value, and in training the gradients, against those of exact in float32."""

    def wide(*x: Array) -> Array:
        with jax.default_matmul_precision("highest"):  # or GPUs round what they multiply
            return exact(*(each.astype("float32") for each in x))

    functions = jax.jit(run), wide
    pairs = [[function(*x) for function in functions]]
    if trained:
        pull = lambda f, y: jax.vjp(f, *x)[1](normal(9, *y.shape, dtype=y.dtype))
        pairs += zip(*map(pull, functions, pairs[0]), strict=True)
    size = lambda x: jnp.linalg.norm(x.astype("float32"))
    errors = [float(size(a.astype("float32") - b) / size(b)) for a, b in pairs]
    text = " ".join(f"{error:.2g}" for error in errors) + f"; below 0.01, in gradients {most:g}"
    return errors[0] < 0.01 and all(e < most for e in errors[1:]), name, f"errors {text}", errors


def check_attention(c: Config, T: int, trained: bool) -> Lines:
    """The last queries of a long sequence, half in a document longer than the window, half in short
    ones, with numbers up to 500; and whether a window saves time."""
    stage, tail, many = len(c.rows) - 1, min(256, T // 4), min(500, T // 8)
    window, starts = c.rows[stage].L, np.zeros(T, np.int32)
    near = tail + window  # what the last queries see
    starts[np.arange(many) * (T - near) // many] = 1
    starts[[T - near, *range(T - tail // 2, T, tail // 16)]] = 1
    document, j = np.cumsum(starts)[-near:], np.arange(near)
    i, pos = j[-tail:, None], train_gpt.positions(starts[None], c, stage)
    mask = (j <= i) & (i - j <= window) & (document[-tail:, None] == document)
    code = lambda x, four: x.at[..., -4:].set(jnp.broadcast_to(four, (*x.shape[:-1], 4)))

    def run(q, k, v):
        q, k = code(q, pos.code_q), code(k, pos.code_k)
        return train_gpt.attend(q, k, v, window, pos.scale, c)[:, -tail:]

    def exact(q, k, v):
        q, k, how = code(q, 0)[:, -tail:], code(k, 0)[:, -near:], dict(implementation="xla")
        return jax.nn.dot_product_attention(q, k, v[:, -near:], mask=mask, scale=pos.scale, **how)

    qkv = [normal(i, 1, T, c.H, c.D // c.H, dtype=c.compute) for i in range(3)]
    times, name = {}, f"attention at {T}, {document[-1]} documents"
    yield judged(name, 0.03, run, exact, *qkv, trained=trained)
    for window in (c.rows[0].S, c.rows[-2].L, T // 2) if trained else ():
        total = lambda q, k, v, window=window: train_gpt.attend(q, k, v, window, 0.1, c).sum()
        times[window] = round(1e3 * seconds(jax.jit(jax.grad(total, (0, 1, 2))), *qkv), 3)
    if trained:  # XLA's kernel leaves nothing out
        fast = c.attention == "xla" or times[c.rows[0].S] < times[T // 2] / 3
        yield fast, "its ms by window", str(times), times


def check_gradients(c: Config) -> Lines:
    """The head in its formats, and the other gradients that are written by hand."""
    N, V, shares = c.head_chunk // 4, -(-c.vocab // 128) * 128, np.float32([1, 0.5])
    targets = jax.random.randint(jax.random.key(2), (N, 2), 0, c.vocab)
    log_p = lambda x, w: jax.nn.log_softmax(23 * jax.nn.sigmoid((x @ w.T + 5) / 7.5))
    exact = lambda x, w: -(shares * jnp.take_along_axis(log_p(x, w), targets, axis=1)).sum()
    chunked = dataclasses.replace(c, head_chunk=N // 2)
    run = lambda x, w: train_gpt.head_loss(x, w, targets, shares, chunked)
    x, w = normal(0, N, c.D, dtype=c.compute), 0.05 * normal(1, V, c.D, dtype="float32")
    yield judged(f"head in {c.head_forward}", 0.15, run, exact, x, w)
    x, w = x[None], w[: c.F].astype(c.compute)
    for by in "input", "output":
        run = lambda x, w, by=by: train_gpt.norm_linear(x, w, by, c.compute, c)
        exact = lambda x, w: train_gpt.norm(x) @ w.T
        yield judged(f"norm and product, by {by}", 0.02, run, exact, x, w)
    x, pos = x.reshape(1, N, c.H, -1), train_gpt.positions(jnp.zeros((1, N), jnp.int32), c, 0)
    for offset in False, True:
        run = lambda x, o=offset: train_gpt.norm_rotate(x, *pos.angles[0], pos.code_k, o)[..., :-4]
        exact = lambda x, o=offset: train_gpt.turn(train_gpt.norm(x), *pos.angles[0], o)[..., :-4]
        yield judged(f"norm and rotation{', keys offset' * offset}", 0.02, run, exact, x)


def check_tiny(c: Config, mesh: Mesh) -> Lines:
    """In float32 on the text of train_gpt.py, with 8 sequences: one for each of 8 devices."""
    c = dataclasses.replace(c, compute="float32", attention="xla").without_fp8()
    c = dataclasses.replace(c, stages="20 2048 64 192 0 1 0,1", steps=20, batch=8)
    tokens, fills = np.array([c.eot, *train_gpt.SOURCE.encode()], np.uint16), c.fills("train")

    def losses(mesh: Mesh) -> Iterator[float]:
        programs = [train_gpt.compile_stage(kind, 0, c, mesh) for kind in KINDS]
        state, batches = train_gpt.make_state(c, mesh), train_gpt.stream([tokens], fills, c)
        for step, batch in enumerate(train_gpt.on_devices(batches, mesh)):
            state, loss = programs[step % 2](state, batch)
            yield float(loss)

    devices, right = tuple(mesh.devices.flat), None
    for run in dict.fromkeys((tuple(jax.local_devices(backend="cpu")[:1]), devices[:1], devices)):
        with jax.default_matmul_precision("highest"):
            its = np.array([*losses(train_gpt.make_mesh(run))])
        right = its if right is None else right
        apart = float(np.abs(its - right).max())
        text = f"losses from {its[0]:.4f} to {its[-1]:.4f}, {apart:.1g} from those of a CPU"
        yield apart < 2e-3, f"tiny, {len(run)} {run[0].platform}", text, apart


def step_ms(pair: list[Callable], c: Config, stage: int, mesh: Mesh) -> float:
    """Of 20 steps on one batch of few frequent tokens; NaN unless its loss falls by a tenth."""
    tokens = np.random.default_rng(1).random((c.batch, c.rows[stage].T + 1)) ** 4 * c.vocab
    tokens[:, ::400], state = c.eot, train_gpt.make_state(c, mesh)
    (batch,) = train_gpt.on_devices([tokens.astype(np.int32)], mesh)
    state, first = pair[0](state, batch)
    state, loss = pair[1](state, batch)
    first, _, began = float(first), float(loss), timeit.default_timer()  # losses wait for steps
    for step in range(20):
        state, loss = pair[step % 2](state, batch)
    last, ms = float(loss), 1e3 * (timeit.default_timer() - began) / 20
    return ms if last < 0.9 * first else np.nan


def check_record(c: Config, mesh: Mesh) -> Lines:
    """All programs; steps of each stage; the run by their times. Operations are 6 by tokens and
    weights, 12 by tokens, channels and keys in the window; PaLM, arXiv:2204.02311, appendix B."""
    total, planned, facts, device = 0.0, 0, {}, mesh.devices.flat[0]
    programs = train_gpt.prepare(c, mesh, SimpleNamespace(facts=facts.update, lap=facts.get))
    made = facts["compile"]
    yield True, f"compiling {len(programs)} programs", f"{made['seconds']:.0f} s", made
    table = train_gpt.param_table(c)
    weights = sum(np.prod(table[name].shape) for name in ("qk", "vo", "mlp", "head"))
    for stage in sorted({stage for kind, stage in programs if kind == "odd"}):
        row, pair = c.rows[stage], [programs[kind, stage] for kind in KINDS]
        ms, memory = step_ms(pair, c, stage, mesh), pair[1].memory_analysis()
        total += ms * float(np.diff(c.ends, prepend=0)[stage]) / 1e3
        rate = 1e3 * c.batch * row.T / ms
        keys = sum(dict(L=row.L, S=row.S).get(layer.window, 0) for layer in c.layers)
        mfu = rate * (6 * weights + 12 * c.D * keys) / PEAK / mesh.size
        text = f"{ms:.2f} ms, {rate:,.0f} tokens/s, MFU {mfu:.1%} as if of {mesh.size} x H100"
        planned = max(planned, memory.argument_size_in_bytes + memory.temp_size_in_bytes)
        yield np.isfinite(ms), f"stage {stage}", text, [ms, rate, mfu]
    used = [(d.memory_stats() or {}).get("peak_bytes_in_use", 0) for d in mesh.devices.flat]
    text = f"{max(used) / 1e9:.1f} GB at most, {planned / 1e9:.1f} for training by the compiler"
    yield True, "memory", text, used
    upstream = "; upstream 73.8 s on 8 x H100" if device.platform == "gpu" else " of a toy"
    yield np.isfinite(total), "predicted time to 3.28", f"{total:.1f} s{upstream}", total


def check_settings(c: Config, mesh: Mesh, facts: dict) -> Lines:
    """What may be faster in the last stage, or work where the usual does not."""
    stage, usual = c.stage_at(c.steps - 1), train_gpt.OPTIONS["gpu"]
    times = dict(usual=(ms := facts.get(f"stage {stage}", [np.nan])[0]))
    for o in dict(xla_gpu_enable_command_buffer=""), dict(xla_gpu_enable_dynamic_slice_fusion=True):
        with mock.patch.dict(train_gpt.OPTIONS, gpu=usual | o), ThreadPoolExecutor() as pool:
            pair = [*pool.map(lambda kind: train_gpt.compile_stage(kind, stage, c, mesh), KINDS)]
        times[f"OPTIONS with {o}"] = step_ms(pair, c, stage, mesh)
    fast = {name: t for name, t in times.items() if t < (0.99 * ms if ms > 0 else np.inf)}
    text = ", ".join(f"{name} {t:.2f} ms" for name, t in times.items())
    yield True, "settings", f"{text}; use: {min(fast, key=fast.get, default='usual')}", times


def main(argv: list[str]) -> int:
    began, failed, facts, small = timeit.default_timer(), [], {}, argv == ["--small"]

    def look(part: Callable, *arguments: Any) -> None:
        try:
            for passed, name, text, facts[name] in part(*arguments):
                print("PASS" if passed else "FAIL", f"{name}: {text}", flush=True)
                failed.extend([] if passed else [name])
        except (Exception, SystemExit) as error:  # the next part may work
            failed.append(f"{part.__name__}: {type(error).__name__}: {error}".splitlines()[0])
            memory = "RESOURCE_EXHAUSTED" in failed[-1]
            print("FAIL", failed[-1] + "; see Memory in README.md" * memory, flush=True)

    _, c = train_gpt.parse_config(["record", "--seed", "1", *([] if small else argv)])
    jax.config.update("jax_platforms", "cpu" if small else jax.config.jax_platforms)
    look(check_machine)
    if small or "machine" not in failed:
        devices, c = train_gpt.fit_devices("check", SMALL if small else c)
        if devices[0].platform == "cpu" and not small:
            return print("check_gpu.py: JAX sees no GPU; there is ./run.sh check --small") or 2
        jax.config.update("jax_disable_most_optimizations", small)
        mesh, minutes = train_gpt.make_mesh(devices), max(2, 20 // os.cpu_count())  # 20 programs
        print(f"Some minutes, and about {minutes} more if this was never compiled here", flush=True)
        look(check_speed, c, mesh, 256 if small else 8192)
        look(check_attention, c, c.rows[-1].T, True)
        look(check_attention, c, c.val_T, False)
        look(check_gradients, c)
        look(check_tiny, c if small else TINY, mesh)
        look(check_record, c, mesh)
        if "RESOURCE_EXHAUSTED" not in str(failed):
            look(check_settings, c, mesh, facts)
    print("all pass" if not failed else f"FAILED: {'; '.join(failed)}")
    facts |= dict(failed=failed, argv=argv, seconds=round(timeit.default_timer() - began))
    facts |= dict(jax=jax.__version__, backend=jax.devices()[0].client.platform_version)
    facts["git"] = subprocess.getoutput("git describe --always --dirty 2>/dev/null")
    print("CHECK", json.dumps(json.loads(json.dumps(facts), parse_constant=str)))  # NaN is no JSON
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
