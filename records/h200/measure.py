"""Is train_gpt.py right on this GPU, and how fast? One command, under ten minutes: see README.md.

    python records/h200/measure.py --out DIR [--small] [--parts correctness,kernels,...]

Every part is a process of its own with a deadline, so that one that fails, hangs or runs out of
memory takes no other with it. Only wrong numbers stop everything: exit status 2. Status 1 means
that something failed or was skipped for want of time, 0 that all is there.
"""

import argparse
import collections
import contextlib
import dataclasses
import functools
import gzip
import hashlib
import itertools
import json
import math
import os
import re
import resource
import shutil
import signal
import statistics
import subprocess
import sys
import sysconfig
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace as Sizes
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, P
from jax.sharding import AxisType, Mesh, NamedSharding

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import train_gpt  # noqa: E402

FLOAT32 = dict(compute="float32", head_forward="float32", head_backward="float32")
TINY = dataclasses.replace(train_gpt.PRESETS["tiny"], steps=20, window=128, seed=7)
MINI = dataclasses.replace(
    TINY, plan="Lv0", D=32, H=1, F=32, T=64, head_chunk=64, attention="xla", window=64,
    window_block=32, seed=3,
)  # fmt: skip
PEAK = 989e12  # FLOP/s of an H100 or H200 in dense bf16, as in train()
UPSTREAM_STEPS = 40  # at each window; the first 20 are not counted


def sizes(small: bool) -> Sizes:
    if small:
        return Sizes(
            check=(256, 1, 64), windows=(96, 512), head=(64, 384, 32), steps=5,
            tiny=dataclasses.replace(MINI, window=32), T=512, K=16, kernel_windows=(32, 512),
            V=384, D=32, F=64,
            chunks=(64,), banks=((1, 8, 32, 32),), rows=2, square=128, least=1e-3, record=MINI,
        )  # fmt: skip
    return Sizes(
        check=(2048, 6, 128), windows=(128, 384, 896, 1792, 2048, 4096), head=(1024, 50304, 768),
        steps=20, tiny=TINY, T=49152, K=128, kernel_windows=(128, 384, 896, 1024, 1792, 49152),
        V=50304, D=768, F=3072, chunks=(8192, 2048, 4096, 16384),
        banks=((6, 8, 768, 768), (3, 8, 3072, 768)), rows=8, square=8192, least=0.03,
        record=dataclasses.replace(train_gpt.Config(), seed=1),
    )  # fmt: skip


# ---- Log -----------------------------------------------------------------------------------------
class Log:
    """Facts of one part, a JSON object a line; knows when the part must end."""

    def __init__(self, out: Path, part: str, deadline: float):
        self.out, self.part, self.deadline = out, part, deadline
        self.began, self.failed, self.wrong = time.time(), 0, 0

    def left(self) -> float:
        return self.deadline - time.time()

    def row(self, table: str, **facts: Any) -> None:
        line = json.dumps(dict(part=self.part, table=table, **facts))
        with (self.out / "measure.jsonl").open("a", encoding="utf-8") as file:
            file.write(line + "\n")
        print(line[:400], flush=True)

    def judge(self, table: str, name: str, limits: dict[str, float], **found: float) -> None:
        """A row that is wrong if a number exceeds its limit, or is none."""
        ok = all(found[key] <= limit for key, limit in limits.items())  # false for NaN
        self.wrong += not ok
        self.row(table, name=name, ok=ok, **found, limits=limits)

    def attempt(self, name: str, do: Callable, *args: Any, need: float = 5) -> Any:
        """do(*args), or a row that says why not."""
        if self.left() < need:
            self.failed += 1
            reason = f"{self.left():.0f} s left of this part, {need:.0f} needed"
            return self.row("skipped", name=name, reason=reason)
        try:
            return do(*args)
        except (Exception, SystemExit) as error:
            self.failed += 1
            traceback.print_exc()
            self.row("failed", name=name, error=repr(error)[:300], traceback=traceback.format_exc())


# ---- Devices and clocks --------------------------------------------------------------------------
def on_gpu() -> bool:
    return jax.devices()[0].platform == "gpu"


def one_device(device: jax.Device) -> Mesh:
    return Mesh(np.array([device]), ("fsdp",), axis_types=(AxisType.Auto,))


def compiled(f: Callable, *args: Any, triton: bool = False) -> Callable:
    """As compile_stage compiles: matrix products by cuBLAS, unless Triton is asked for."""
    gpu = {device.platform for device in args[0].devices()} == {"gpu"}
    options = train_gpt.GPU_OPTIONS | dict(xla_gpu_enable_triton_gemm=triton) if gpu else None
    return jax.jit(f).lower(*args).compile(options)


def use_cache(args: argparse.Namespace, name: str = "compiled") -> Path:
    path = Path(args.work, name)
    jax.config.update("jax_compilation_cache_dir", str(path))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    return path


def timed(call: Callable, least: float, repeats: int = 7) -> dict[str, float]:
    """Milliseconds of call(), after warm-up: of each repetition the mean of as many queued calls
    as fill `least` seconds, of the repetitions the median and the extremes."""

    def seconds(count: int) -> float:
        began = time.perf_counter()
        for _ in range(count):
            out = call()
        jax.block_until_ready(out)
        return (time.perf_counter() - began) / count

    seconds(2)
    count = max(1, min(1000, math.ceil(least / seconds(2))))
    ms = [1e3 * seconds(count) for _ in range(repeats)]
    return dict(ms=statistics.median(ms), ms_min=min(ms), ms_max=max(ms), calls=count * repeats)


def draw(seed: int, shape: tuple, dtype: str = "bfloat16", scale: float = 1.0) -> Array:
    make = jax.jit(lambda key: (scale * jax.random.normal(key, shape)).astype(dtype))
    return jax.block_until_ready(make(jax.random.key(seed)))


# ---- Correctness: attention ----------------------------------------------------------------------
def layouts(T: int) -> dict[str, list[int]]:
    """Where documents start."""
    tiles = [128 * i + off for i, off in enumerate((0, 1, -1, 0, 64, 1, 0, -1)) if i]
    found = dict(one=[], few=[37, 200, 201, 350, 1500], tiles=tiles, short=range(5, T, 23),
                 pairs=range(0, T, 2))  # fmt: skip
    return {name: [t for t in starts if t < T] for name, starts in found.items()}


def planted(window: int, T: int, H: int, K: int, dtype: str) -> Array:
    """Random q, k, v and gradient, (4, 1, T, H, K), but every second query resembles the last key
    within its window, and the others the first key beyond: one key too many or too few shows."""
    x = np.random.default_rng(window).normal(size=(4, 1, T, H, K)).astype("f4")
    still = np.r_[K // 4 : K // 2, 3 * K // 4 : K - 4]  # channels that do not rotate
    t = np.arange(T)
    source = t - window + (t % 2 == 0)
    t, source = t[source >= 0], source[source >= 0]
    for channel in still:
        x[0, :, t, :, channel] = 8 / (0.12 * len(still)) * x[1, :, source, :, channel]
    return jnp.asarray(x, dtype)


def explicit(q: Array, k: Array, v: Array, first: Array, window: int) -> Array:
    """Attention by its definition, in float32: rotation by the formula, one mask for everything."""
    K, i = q.shape[-1], jnp.arange(q.shape[1])
    document = jnp.cumsum(first[0])
    seen = (i <= i[:, None]) & (i > i[:, None] - window) & (document == document[:, None])
    speed = jnp.r_[(1 / 1024) ** jnp.linspace(0, 1, K // 4), jnp.zeros(K // 4)]
    cos, sin = jnp.cos(i[:, None, None] * speed), jnp.sin(i[:, None, None] * speed)

    def turned(x):
        a, b = jnp.split(x, 2, axis=-1)
        return jnp.concatenate([a * cos + b * sin, b * cos - a * sin], axis=-1)[..., : K - 4]

    scores = 0.12 * jnp.einsum("BTHK,BSHK->BHTS", turned(q), turned(k))
    weights = jax.nn.softmax(jnp.where(seen, scores, -jnp.inf))
    return jnp.einsum("BHTS,BSHK->BTHK", weights, v)


def attention_errors(inputs: Array, first: Array, window: int, kernel: str) -> dict[str, tuple]:
    """Of y and each gradient: error over size, of the whole and of the worst row."""

    def ours(q, k, v):
        cos, sin, code_q, code_k = train_gpt.place(first, q.shape[-1], str(q.dtype))
        q, k = train_gpt.rotate(q, cos, sin, code_q), train_gpt.rotate(k, cos, sin, code_k)
        return train_gpt.attend(q, k, v, window, kernel)

    def errors(a, b):
        rows, size = jnp.linalg.norm(a - b, axis=-1), jnp.linalg.norm(b, axis=-1)
        typical = jnp.sqrt(jnp.mean(size**2))
        return jnp.linalg.norm(rows) / jnp.linalg.norm(size), jnp.max(rows / (size + typical))

    *qkv, g = inputs
    y, pull = jax.vjp(ours, *qkv)
    exact, pull_exact = jax.vjp(
        lambda *qkv: explicit(*qkv, first, window), *(x.astype("float32") for x in qkv)
    )
    found, wanted = (y, *pull(g)), (exact, *pull_exact(g.astype("float32")))
    pairs = zip(("y", "dq", "dk", "dv"), found, wanted, strict=True)
    return {name: errors(a.astype("float32"), b) for name, a, b in pairs}


def check_attention(log: Log, window: int, z: Sizes) -> None:
    (T, H, K), kernel = z.check, "cudnn" if on_gpu() else "xla"
    inputs = planted(window, T, H, K, "bfloat16")
    with jax.default_matmul_precision("highest"):
        function = functools.partial(attention_errors, window=window, kernel=kernel)
        program = compiled(function, inputs, jnp.zeros((1, T), bool))
        for name, starts in layouts(T).items():
            first = jnp.zeros((1, T), bool).at[0, np.array(starts, int)].set(True)
            found = jax.device_get(program(inputs, first))
            whole = {k: float(v[0]) for k, v in found.items()}
            rows = {f"{k}_row": float(v[1]) for k, v in found.items()}
            limits = dict.fromkeys(whole, 0.02) | dict.fromkeys(rows, 0.1)
            log.judge("attention", f"{window}/{name}", limits, **whole, **rows)


# ---- Correctness: norms with gradients written by hand -------------------------------------------
def check_norms(log: Log, z: Sizes) -> None:
    """In bfloat16 on the device, against the formula and JAX's gradient of it, in float32."""
    T, K = z.check[0], z.check[2]
    first, cpu = (
        jnp.zeros((1, T), bool).at[0, np.array([0, T // 3])].set(True),
        jax.devices("cpu")[0],
    )

    def rotated(norm_rotate, dtype, x, dy):
        cos, sin, code, _ = train_gpt.place(first, K, dtype)
        y, pull = jax.vjp(lambda x: norm_rotate(x, cos, sin, code), x)
        return y[..., :-4], *pull(dy)  # without the code, which is large and exact

    def linear(f, x, w, dy):
        y, pull = jax.vjp(f, x, w)
        return y, *pull(dy)

    relu2 = lambda y: jnp.square(jax.nn.relu(y))  # noqa: E731
    formula = lambda x, w: train_gpt.norm(x) @ w.T  # noqa: E731
    ours, plain = train_gpt.norm_rotate, lambda x, *at: train_gpt.rotate(train_gpt.norm(x), *at)
    x, dy = draw(0, (1, T, 2, K)), draw(1, (1, T, 2, K))
    a, w, da = draw(2, (1, T, K)), draw(3, (4 * K, K)), draw(4, (1, T, 4 * K))
    cases = dict(
        norm_rotate=(functools.partial(rotated, ours, "bfloat16"),
                     functools.partial(rotated, plain, "float32"), (x, dy)),
        norm_linear=(functools.partial(linear, lambda x, w: train_gpt.norm_linear(x, w, False)),
                     functools.partial(linear, formula), (a, w, da)),
        norm_linear_relu2=(
            functools.partial(linear, lambda x, w: relu2(train_gpt.norm_linear(x, w, True))),
            functools.partial(linear, lambda x, w: relu2(formula(x, w))), (a, w, da)),
    )  # fmt: skip
    for name, (f, exact, arguments) in cases.items():
        found = jax.device_get(compiled(f, *arguments)(*arguments))
        wide = jax.device_put([np.asarray(x, np.float32) for x in arguments], cpu)
        wanted = jax.device_get(compiled(exact, *wide)(*wide))
        pairs = zip(("y", "dx", "dw"), found, wanted, strict=False)
        errors = {k: float(np.linalg.norm(a.astype("f4") - b) / np.linalg.norm(b))
                  for k, a, b in pairs}  # fmt: skip
        log.judge("norms", name, dict.fromkeys(errors, 0.02), **errors)


# ---- Correctness: head ---------------------------------------------------------------------------
def plain_head(x: Array, w: Array, targets: Array, T: int) -> Array:
    s = 30 * jax.nn.sigmoid((x @ w.T) / 7.5)
    picked = jnp.take_along_axis(s, targets[:, None], axis=1)[:, 0]
    return (jax.nn.logsumexp(s, axis=1) - picked).sum() / T


def check_head(log: Log, z: Sizes) -> None:
    """FP8 on the device against float32 and against FP8 on the CPU. An entry of e4m3 is off by at
    most 1/16 and of e5m2 by 1/8, which averages out to some percent of a gradient."""
    (N, V, D), rng, cpu = z.head, np.random.default_rng(0), jax.devices("cpu")[0]
    x = jnp.asarray(rng.normal(size=(N, D)), "bfloat16")
    w = jnp.asarray(0.3 * (32 / D) ** 0.5 * rng.normal(size=(V, D)), "float32")
    data = x, w, jnp.asarray(rng.integers(0, V, N), "int32")
    c = dataclasses.replace(train_gpt.Config(), D=D, head_chunk=N // 2)

    def results(f, arguments, device):
        arguments = jax.device_put(arguments, device)
        program = compiled(jax.value_and_grad(f, (0, 1)), *arguments)
        loss, grads = jax.device_get(program(*arguments))
        return np.float64(loss), *(g.astype("f8") for g in grads)

    exact = results(functools.partial(plain_head, T=N), (x.astype("float32"), *data[1:]), cpu)
    head = lambda c: lambda x, w, targets: train_gpt.head_loss(x, w, targets, c, N)  # noqa: E731
    bf16 = dataclasses.replace(c, head_forward="bfloat16", head_backward="bfloat16")
    found = results(head(c), data, jax.devices()[0])
    cases = dict(
        fp8_to_float32=(found, exact, 1e-2, 0.1),
        fp8_to_cpu_fp8=(found, results(head(c), data, cpu), 1e-3, 0.06),
        bf16_to_float32=(results(head(bf16), data, jax.devices()[0]), exact, 1e-3, 0.02),
    )
    for name, (ours, wanted, of_loss, limit) in cases.items():
        pairs = zip(("loss", "dx", "dw"), ours, wanted, strict=True)
        errors = {k: float(np.linalg.norm(a - b) / np.linalg.norm(b)) for k, a, b in pairs}
        log.judge("head", name, dict(loss=of_loss, dx=limit, dw=limit), **errors)


# ---- Correctness: training -----------------------------------------------------------------------
def learnable(c: train_gpt.Config, count: int) -> np.ndarray:
    """A walk with small steps through the vocabulary, in documents of about 100 tokens."""
    rng = np.random.default_rng(11)
    tokens = np.cumsum(rng.integers(0, 4, count)) % (c.vocab - 1)
    tokens[rng.random(count) < 0.01] = c.eot
    return tokens.astype(np.uint16)


def batches(c: train_gpt.Config, tokens: np.ndarray, steps: int) -> list[np.ndarray]:
    shape, size = (c.sequences, c.T), c.sequences * c.T
    pieces = (tokens[i * size : i * size + size + 1].astype(np.int32) for i in range(steps))
    view = np.lib.stride_tricks.sliding_window_view
    return [view(piece, c.T + 1)[:: c.T].reshape(shape[0], -1) for piece in pieces]


def start(c: train_gpt.Config, mesh: Mesh, params: dict | None) -> train_gpt.State:
    state = train_gpt.make_state(c, mesh)
    if params:
        put = lambda old, new: jax.device_put(new, old.sharding)  # noqa: E731
        ahead = np.asarray(jnp.asarray(params["embed"], c.compute))
        params = jax.tree.map(put, state.params, params)
        state = state._replace(params=params, ahead=put(state.ahead, ahead))
    return state


def no_zeros(c: train_gpt.Config) -> dict[str, np.ndarray]:
    """Weights none of which is zero: from the real ones the first gradients of the scalars are
    rounding noise, of which Adam makes full steps."""
    params = train_gpt.make_state(c, one_device(jax.devices("cpu")[0])).params
    rng = np.random.default_rng(5)
    noisy = lambda p: np.asarray(p) + 0.05 * rng.normal(size=p.shape).astype("f4")  # noqa: E731
    return {name: noisy(params[name]) for name in sorted(params)}


def trajectory(c: train_gpt.Config, device: jax.Device, params: dict, data: list) -> np.ndarray:
    """Losses of the first steps; products of float32 in float32, not in TF32."""
    exact = jax.default_matmul_precision("highest")  # for this thread
    with exact if c.compute == "float32" else contextlib.nullcontext():
        mesh = one_device(device)
        windows = {c.window_at(step) for step in range(len(data))}
        programs = {w: train_gpt.compile_stage("train", w, c, mesh) for w in windows}
        state, losses = start(c, mesh, params), []
        for step, tokens in enumerate(data):
            tokens = jax.device_put(tokens, NamedSharding(mesh, P("fsdp")))
            state, loss = programs[c.window_at(step)](state, tokens)
            losses.append(loss)
        return np.array([float(loss) for loss in losses])


def check_training(log: Log, z: Sizes) -> None:
    """The same steps here and on the CPU, in float32 and as the preset is run."""
    c, cpu, device = z.tiny, jax.devices("cpu")[0], jax.devices()[0]
    shards = sorted(Path(train_gpt.__file__).parent.glob(f"{c.data}/*_train_*.bin"))
    stream = train_gpt.open_shard(shards[0]) if shards and c.vocab == 257 else None
    stream = learnable(c, 10**5) if stream is None or c.T < 256 else stream
    data, params = batches(c, stream, z.steps), no_zeros(c)
    xla = dataclasses.replace(c, attention="xla")
    f32, here = dataclasses.replace(xla, **FLOAT32), c if on_gpu() else xla
    with ThreadPoolExecutor(max(1, (os.cpu_count() or 1) // 4)) as pool:
        jobs = [pool.submit(trajectory, *job, params, data)
                for job in ((f32, device), (f32, cpu), (here, device), (xla, cpu))]  # fmt: skip
        exact, exact_cpu, low, low_cpu = (job.result() for job in jobs)
    log.row("losses", float32=exact.tolist(), float32_cpu=exact_cpu.tolist(),
            preset=low.tolist(), preset_cpu=low_cpu.tolist())  # fmt: skip
    for name, ours, cpus, early, late in (
        ("float32", exact, exact_cpu, 1e-4, 1e-2),
        ("preset", low, low_cpu, 1e-2, 0.1),
    ):
        apart = np.abs(ours - cpus)
        found = dict(first=apart[0], first_five=apart[:5].max(), all=apart.max())
        limits = dict(first=early, first_five=10 * early, all=late)
        log.judge("training", name, limits, **{k: float(v) for k, v in found.items()})


def correctness(log: Log, args: argparse.Namespace, z: Sizes) -> None:
    use_cache(args, "checked")
    for window in z.windows:
        log.attempt(f"attention {window}", check_attention, log, window, z)
    if not log.wrong:
        log.attempt("norms", check_norms, log, z)
    if not log.wrong:
        log.attempt("head", check_head, log, z)
    if not log.wrong:
        log.attempt("training", check_training, log, z, need=20)


# ---- Kernels -------------------------------------------------------------------------------------
def ceilings(log: Log, z: Sizes) -> None:
    n, big = z.square, draw(0, (z.rows, z.T, z.F))
    a, b = draw(1, (n, n)), draw(2, (n, n))
    for name, f, arrays, flops in (
        ("copy", jnp.copy, (big,), 0),
        ("negate", jnp.negative, (big,), 0),
        ("bf16 product", jnp.matmul, (a, b), 2 * n**3),
    ):
        call = functools.partial(compiled(f, *arrays), *arrays)
        time_ = timed(call, z.least)
        rate = dict(TFLOPs=flops / time_["ms"] / 1e9) if flops else {}
        gigabytes = 2 * big.nbytes / time_["ms"] / 1e6
        log.row("ceilings", name=name, **time_, **rate, **({} if flops else dict(GBs=gigabytes)))


def tiles(window: int, T: int) -> int:
    """Tiles of 128 queries by 128 keys that a window reaches into."""
    rows = np.arange(-(-T // 128))
    return int(np.minimum(rows + 1, -(-(window - 1) // 128) + 1).sum())


def time_attention(log: Log, window: int, z: Sizes, done: dict) -> None:
    kernel, H = "cudnn" if on_gpu() else "xla", z.D // z.K
    q, k, v, g = (draw(seed, (1, z.T, H, z.K)) for seed in range(4))
    attend = functools.partial(train_gpt.attend, window=window, kernel=kernel)
    both = lambda q, k, v, g: jax.vjp(attend, q, k, v)[1](g)  # noqa: E731
    forward = timed(functools.partial(compiled(attend, q, k, v), q, k, v), z.least)
    total = timed(functools.partial(compiled(both, q, k, v, g), q, k, v, g), z.least)
    done[window] = total["ms"]
    first = next(iter(done))
    work = 4 * H * z.K * tiles(window, z.T) * 128**2  # of whole tiles, forward
    log.row("attention", window=window, forward_ms=forward["ms"], both_ms=total["ms"],
            both_ms_max=total["ms_max"], tiles=tiles(window, z.T),
            times_first=done[window] / done[first],
            tiles_times_first=tiles(window, z.T) / tiles(first, z.T),
            TFLOPs_forward=work / forward["ms"] / 1e9,
            TFLOPs_both=3.5 * work / total["ms"] / 1e9)  # fmt: skip


def time_head(log: Log, chunk: int, head: str, triton: bool, z: Sizes) -> None:
    x, w = draw(0, (z.T, z.D)), draw(1, (z.V, z.D), "float32", 0.3 * (32 / z.D) ** 0.5)
    targets = jax.jit(lambda: jax.random.randint(jax.random.key(2), (z.T,), 0, z.V))()
    c = dataclasses.replace(train_gpt.Config(), D=z.D, head_chunk=chunk)
    if head == "bf16":
        c = dataclasses.replace(c, head_forward="bfloat16", head_backward="bfloat16")
    loss = lambda x, w, targets: train_gpt.head_loss(x, w, targets, c, z.T)  # noqa: E731
    program = compiled(jax.value_and_grad(loss, (0, 1)), x, w, targets, triton=triton)
    found = timed(functools.partial(program, x, w, targets), z.least)
    log.row("head", format=head, chunk=chunk, gemm="triton" if triton else "cublas", **found,
            TFLOPs=6 * z.T * z.V * z.D / found["ms"] / 1e9,
            temporary_GB=program.memory_analysis().temp_size_in_bytes / 1e9)  # fmt: skip


def time_newton_schulz(log: Log, shape: tuple, z: Sizes) -> None:
    bank = draw(0, shape, "float32")
    program = compiled(lambda bank: train_gpt.orthogonalize(bank, "bfloat16"), bank)
    found = timed(functools.partial(program, bank), z.least)
    short, long = sorted(shape[-2:])
    flops = 5 * math.prod(shape[:2]) * (4 * short**2 * long + 2 * short**3)
    log.row("newton_schulz", shape=list(shape), **found, TFLOPs=flops / found["ms"] / 1e9)


def time_elementwise(log: Log, name: str, f: Callable, C: int, arrays: int, z: Sizes) -> None:
    """On 8 sequences, more than a cache holds; milliseconds of one. Bytes: what must be moved."""
    x = [draw(seed, (z.rows, z.T, C)) for seed in range(arrays - 1)]
    found = timed(functools.partial(compiled(f, *x), *x), z.least)
    gigabytes = arrays * x[0].nbytes / found["ms"] / 1e6
    log.row("elementwise", name=name, C=C, ms=found["ms"] / z.rows, GBs=gigabytes)


def elementwise(z: Sizes) -> Iterator[tuple[str, Callable, int, int]]:
    """Name, function, channels, and arrays read and written."""
    relu2 = lambda x: jnp.square(jax.nn.relu(x))  # noqa: E731
    pull = lambda f: lambda x, g: jax.vjp(f, x)[1](g)[0]  # noqa: E731
    blend = lambda x, y: train_gpt.blend((jnp.float32(0.7), x), (jnp.float32(0.3), y))  # noqa: E731
    yield "norm", train_gpt.norm, z.D, 2
    yield "norm gradient", pull(train_gpt.norm), z.D, 3
    w = draw(9, (z.D, z.D))
    linear = lambda x: train_gpt.norm_linear(x, w, False)  # noqa: E731
    yield "norm_linear, with its product", linear, z.D, 2
    yield "norm_linear gradient, with two products", pull(linear), z.D, 3
    yield "blend", blend, z.D, 3
    yield "relu2", relu2, z.F, 2
    yield "relu2 gradient", pull(relu2), z.F, 3


def kernels(log: Log, args: argparse.Namespace, z: Sizes) -> None:
    done = {}
    log.attempt("ceilings", ceilings, log, z)
    for window in z.kernel_windows:
        log.attempt(f"attention {window}", time_attention, log, window, z, done)
    window = z.kernel_windows[-2]
    if {window, z.T} <= done.keys():
        ratio, ideal = done[window] / done[z.T], tiles(window, z.T) / tiles(z.T, z.T)
        skips = "skips" if ratio < min(2 * ideal, (1 + ideal) / 2) else "DOES NOT SKIP"
        log.row("verdict", text=f"attention {skips} tiles outside of the window: {window} takes "
                f"{ratio:.3f} of the time of all {z.T}, ideal {ideal:.3f}")  # fmt: skip
    cases = [("fp8", chunk, False) for chunk in z.chunks]
    cases += [("bf16", z.chunks[0], False), ("fp8", z.chunks[0], True)]
    for head, chunk, triton in cases:
        log.attempt(f"head {head} {chunk}", time_head, log, chunk, head, triton, z)
    for shape in z.banks:
        log.attempt(f"newton_schulz {shape}", time_newton_schulz, log, shape, z)
    for name, *rest in elementwise(z):
        log.attempt(name, time_elementwise, log, name, *rest, z)


# ---- Tokens --------------------------------------------------------------------------------------
def shard_path(args: argparse.Namespace) -> Path:
    return Path(args.work, "data", "fineweb10B", "fineweb_train_000001.bin")


def python_text(characters: int) -> list[str]:
    """Source files of the standard library and of installed packages, in a shuffled order."""
    roots = {sysconfig.get_path(name) for name in ("stdlib", "purelib")}
    paths = sorted(path for root in roots for path in Path(root).rglob("*.py"))
    texts, found = [], 0
    for i in np.random.default_rng(0).permutation(len(paths)):
        if found >= characters:
            break
        with contextlib.suppress(OSError):
            texts.append(paths[i].read_text(encoding="utf-8", errors="replace"))
            found += len(texts[-1])
    return texts


def gpt2_tokens(folder: str, count: int) -> np.ndarray:
    """Python source in GPT-2's tokens. Files are long, so they are cut into documents as long as
    FineWeb's (log-normal, median 403, mean 690): upstream skips what other documents hold."""
    os.environ["TIKTOKEN_CACHE_DIR"] = folder
    import tiktoken

    vocabulary, rng, pieces = tiktoken.get_encoding("gpt2"), np.random.default_rng(0), []
    threads, found = os.cpu_count() or 1, 0
    for file in vocabulary.encode_ordinary_batch(python_text(5 * count), num_threads=threads):
        while file and found < count:
            length = 1 + int(rng.lognormal(math.log(403), 1.037))
            pieces += [np.uint16([50256]), np.array(file[:length], np.uint16)]
            found += 1 + len(file[:length])
            file = file[length:]
    if found < count:
        raise ValueError(f"installed Python source makes {found} tokens of {count}")
    return np.concatenate(pieces)[:count]


def tokens(log: Log, args: argparse.Namespace, z: Sizes) -> None:
    """One shard in llm.c's format, for this script's later parts and for upstream."""
    found, kind = None, "tiktoken"
    if args.tiktoken and z.record.vocab > 50256:
        found = log.attempt("tiktoken", gpt2_tokens, args.tiktoken, args.tokens)
    if found is None:
        found, kind = learnable(z.record, args.tokens), "synthetic"
    path = shard_path(args)
    path.parent.mkdir(parents=True, exist_ok=True)
    header = np.zeros(256, np.int32)
    header[:3] = 20240520, 1, len(found)
    path.write_bytes(header.tobytes() + found.astype("<u2").tobytes())
    documents = int((found == z.record.eot).sum())
    log.row("tokens", kind=kind, count=len(found), documents=documents, bytes=path.stat().st_size)


# ---- Step ----------------------------------------------------------------------------------------
VARIANTS = dict(  # of train_gpt.GPU_OPTIONS
    default={},
    triton=dict(xla_gpu_enable_triton_gemm=True),
    fixed_fusions=dict(xla_gpu_experimental_enable_fusion_autotuner=False),
)
OPTIONS = threading.local()


def let_options() -> None:
    """Let compile_stage's own options be overruled, in threads that ask for a variant."""
    real = jax.stages.Lowered.compile

    def compile_(self, options=None, **kwargs):
        options = kwargs.pop("compiler_options", options)
        if options:
            options = options | getattr(OPTIONS, "other", {})
        return real(self, options, **kwargs)

    jax.stages.Lowered.compile = compile_


def build(c: train_gpt.Config, window: int, mesh: Mesh, variant: str = "default") -> tuple:
    OPTIONS.other, began = VARIANTS[variant], time.perf_counter()
    program = train_gpt.compile_stage("train", window, c, mesh)
    return program, time.perf_counter() - began


def memory() -> float:
    """Gigabytes, at most, of the device or, on a CPU, of the process, so far."""
    found = (jax.devices()[0].memory_stats() or {}).get("peak_bytes_in_use", 0)
    return (found or 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss) / 1e9


class Runner:
    """Steps on the shard's first tokens, again and again."""

    def __init__(self, c: train_gpt.Config, args: argparse.Namespace):
        self.c, self.mesh = c, one_device(jax.devices()[0])
        shard = train_gpt.open_shard(shard_path(args))
        count = min(4, (len(shard) - 1) // (c.sequences * c.T))
        data = jax.device_put(batches(c, shard, count), NamedSharding(self.mesh, P("fsdp")))
        self.data, self.state = itertools.cycle(data), None

    def step(self, program: Callable) -> Array:
        self.state, self.loss = program(self.state, next(self.data))
        return self.loss

    def measure(self, program: Callable, least: float) -> dict[str, float]:
        """From freshly initialised weights; the last ones may be lost in a step that failed."""
        self.state = None
        self.state = train_gpt.make_state(self.c, self.mesh)
        found = timed(functools.partial(self.step, program), least, repeats=5)
        count, rows = self.c.sequences * self.c.T, train_gpt.table(self.c)
        flops = 6 * count * sum(math.prod(rows[name].real) for name in ("attn", "mlp", "head"))
        mfu = 1e3 * flops / found["ms"] / PEAK if on_gpu() else None
        temporary = program.memory_analysis().temp_size_in_bytes / 1e9
        return dict(**found, tokens_per_s=1e3 * count / found["ms"], mfu=mfu,
                    loss=float(self.loss), temporary_GB=temporary, peak_GB=memory())  # fmt: skip


def stages(c: train_gpt.Config) -> list[int]:
    """The windows of a run: first, last and middle one, then the others."""
    windows = sorted({c.window_at(step) for step in range(c.steps)})
    chosen = [windows[0], windows[-1], windows[len(windows) // 2]]
    return list(dict.fromkeys(chosen + windows[::-1]))


def compile_alone(log: Log, c: train_gpt.Config, window: int, mesh: Mesh, cache: Path) -> tuple:
    """Cold, then from the persistent cache, as the next process would."""
    cold = build(c, window, mesh)[1]
    files = len(list(cache.glob("*")))
    jax.clear_caches()
    program, again = build(c, window, mesh)
    log.row("compile", window=window, cold_s=cold, again_s=again,
            from_cache=len(list(cache.glob("*"))) == files > 0)  # fmt: skip
    return program, again


def compile_together(log: Log, c: train_gpt.Config, cases: list[tuple], mesh: Mesh) -> dict:
    began = time.perf_counter()
    with ThreadPoolExecutor(max(2, (os.cpu_count() or 2) // 2)) as pool:
        jobs = {case: pool.submit(build, c, case[0], mesh, case[1]) for case in cases}
        found = {case: log.attempt(f"compile {case}", job.result) for case, job in jobs.items()}
    each = {f"{window} {variant}": one[1] for (window, variant), one in found.items() if one}
    log.row("compile", together=each, wall_s=time.perf_counter() - began)
    return {case: one for case, one in found.items() if one}


def time_step(log: Log, runner: Runner, case: tuple, program: Callable, least: float) -> None:
    window, variant = case
    log.row("step", window=window, sequences=runner.c.sequences, options=variant,
            **runner.measure(program, least))  # fmt: skip


def step(log: Log, args: argparse.Namespace, z: Sizes) -> None:
    """Whole steps of the record: its first, last and middle windows, one with other options of the
    compiler, and the other windows as time allows."""
    cache, c = use_cache(args), z.record
    let_options()
    runner, (first, *others) = Runner(c, args), stages(c)
    alone = log.attempt("compile", compile_alone, log, c, first, runner.mesh, cache)
    if alone:
        log.attempt("step", time_step, log, runner, (first, "default"), alone[0], z.least)
    cases = [(window, "default") for window in others[:2]]
    cases += [(others[0], variant) for variant in ("triton", "fixed_fusions")] * on_gpu()
    programs = log.attempt("compile", compile_together, log, c, cases, runner.mesh, need=30)
    for case, (program, _) in (programs or {}).items():
        log.attempt(f"step {case}", time_step, log, runner, case, program, z.least)
    for window in others[2:]:
        if log.left() < 60:
            return log.row("note", text=f"no time for window {window} and those after it")
        found = log.attempt(f"compile {window}", build, c, window, runner.mesh)
        if found:
            log.attempt("step", time_step, log, runner, (window, "default"), found[0], z.least)


def one(log: Log, args: argparse.Namespace, z: Sizes) -> None:
    """Whole steps with an update after every sequence, which is upstream's step on one GPU."""
    use_cache(args)
    c = dataclasses.replace(z.record, sequences=1, in_flight=1)
    runner, cases = Runner(c, args), [(window, "default") for window in stages(c)[:3]]
    for case, (program, _) in compile_together(log, c, cases, runner.mesh).items():
        log.attempt(f"step {case}", time_step, log, runner, case, program, z.least)


# ---- Profile -------------------------------------------------------------------------------------
CLASSES = dict(
    attention="fmha|flash|sdpa|mha|attention|cudnn.*(fprop|bprop|generated)",
    gemm="gemm|cutlass|nvjet|xmma|cublas|matmul|_dot|dot_|^dot",
    copy="memcpy|memset|copy|transpose|concatenate|slice",
    reduce="reduce", scatter="scatter|gather",
)  # fmt: skip


def class_of(name: str) -> str:
    found = (kind for kind, words in CLASSES.items() if re.search(words, name, re.I))
    return next(found, "fusion" if "fusion" in name else "other")


def device_events(path: Path) -> list[dict]:
    """What ran on the device: of a GPU the events of its streams, of a CPU those of operations."""
    with gzip.open(path, "rt", encoding="utf-8") as file:
        events = json.load(file)["traceEvents"]
    named = {
        (e["pid"], e.get("tid") if e["name"] == "thread_name" else None): e["args"]["name"]
        for e in events
        if e.get("ph") == "M" and e["name"] in ("process_name", "thread_name")
    }
    ran = [e for e in events if e.get("ph") == "X" and "dur" in e]
    streams = [e for e in ran if "GPU" in named.get((e["pid"], None), "")
               and named.get((e["pid"], e["tid"]), "").startswith("Stream")]  # fmt: skip
    return streams or [e for e in ran if "hlo_op" in e.get("args", {})]


def busy(events: list[dict]) -> tuple[float, float]:
    """Milliseconds in which something ran, and from the first to the last."""
    total = end = 0.0
    first = min(e["ts"] for e in events)
    for e in sorted(events, key=lambda e: e["ts"]):
        total += max(0.0, e["ts"] + e["dur"] - max(end, e["ts"]))
        end = max(end, e["ts"] + e["dur"])
    return total / 1e3, (end - first) / 1e3


def profile_window(log: Log, runner: Runner, window: int, args: argparse.Namespace) -> None:
    program, _ = build(runner.c, window, runner.mesh)
    runner.measure(program, 0)
    folder = Path(args.work, f"trace{window}")
    with jax.profiler.trace(str(folder)):
        jax.block_until_ready(runner.step(program))
    path = next(folder.rglob("*.trace.json.gz"))
    if path.stat().st_size < 8 * 2**20:
        shutil.copy(path, log.out / f"trace_{window}.json.gz")
    events = device_events(path)
    ran, whole = busy(events)
    log.row("profile", window=window, events=len(events), busy_ms=ran, first_to_last_ms=whole)
    for label, key in (
        ("class", class_of),
        ("kernel", lambda name: re.sub(r"[._]\d+(?=$|_)", "", name)[:90]),
    ):
        ms, calls = collections.Counter(), collections.Counter()
        for e in events:
            ms[key(e["name"])] += e["dur"] / 1e3
            calls[key(e["name"])] += 1
        for name, found in ms.most_common(25):
            share = found / sum(ms.values())
            log.row(f"by_{label}_{window}", ms=found, share=share, calls=calls[name], name=name)


def profile(log: Log, args: argparse.Namespace, z: Sizes) -> None:
    """One traced step; command buffers are off while a profiler looks, so gaps are wider."""
    use_cache(args)
    runner, (first, last, *_) = Runner(z.record, args), stages(z.record)
    for window in (last, first):
        log.attempt(f"profile {window}", profile_window, log, runner, window, args, need=10)


# ---- Side by side --------------------------------------------------------------------------------
def patches(windows: list[int]) -> dict[str, tuple[str, str, tuple[int, ...]]]:
    """What is changed in a copy of upstream's script: a pattern, what takes its place, and how
    often it must be there. Data needs none: the script runs where its paths lead to our shard."""
    total, n = UPSTREAM_STEPS * len(windows), UPSTREAM_STEPS
    return {
        "number of steps": (r"num_iterations = 1770\b", f"num_iterations = {total}", (1,)),
        "no validation": (r"if last_step or \(args\.val_loss_every[^\n]*:", "if False:", (1,)),
        "fixed windows": (
            r"window_size = next_multiple_of_n\(1728 \* [^,\n]+, n=128\)",
            f"window_size = {windows}[min(step // {n}, {len(windows) - 1})]",
            (1,),
        ),
        "wait every 10 steps": (
            r"(?m)^    (approx_\w*time\w* = training_time_ms \+ )",
            r"    step % 10 == 9 and torch.cuda.synchronize()\n    \1",
            (1,),
        ),
        "one GPU": (r"(?m)^assert world_size == 8\b.*$", "", (0, 1)),  # the oldest has no assertion
        "no hour of tuning": (
            r"(?m)^(#? ?)(torch\._inductor\.config\.coordinate_descent_tuning = )True.*$",
            r"\2False",
            (1,),
        ),
    }


def patched(text: str, windows: list[int]) -> str:
    """The script, also if it is given as the log of a run, which begins with it."""
    text = re.split(r"(?m)^={100}$", text)[0]
    for name, (pattern, new, counts) in patches(windows).items():
        text, found = re.subn(pattern, new, text)
        if found not in counts:
            raise ValueError(f"upstream's script: {name!r} is there {found} times, not {counts}")
    return text


def run_upstream(log: Log, args: argparse.Namespace, windows: list[int]) -> str:
    """Its output, in out/upstream.txt too; what it has printed when time is up also counts."""
    script = Path(args.work, "upstream.py")
    source = Path(args.upstream).read_text(encoding="utf-8")
    script.write_text(patched(source, windows), encoding="utf-8")
    alone = dict(RANK="0", WORLD_SIZE="1", LOCAL_RANK="0", LOCAL_WORLD_SIZE="1",
                 MASTER_ADDR="127.0.0.1", MASTER_PORT="29517", NCCL_SOCKET_IFNAME="lo",
                 TORCHINDUCTOR_CACHE_DIR=str(Path(args.work, "inductor")),
                 PYTHONUNBUFFERED="1")  # fmt: skip
    path, began, limit = log.out / "upstream.txt", time.time(), max(10, log.left() - 5)
    with path.open("wb") as file:
        child = subprocess.Popen([sys.executable, script.name], cwd=args.work, stdout=file,
                                 stderr=subprocess.STDOUT, env=os.environ | alone)  # fmt: skip
        try:
            status = child.wait(limit)
        except subprocess.TimeoutExpired:
            child.kill()
            status = f"stopped after {limit:.0f} s"
    log.row("upstream", status=status, seconds=time.time() - began, tuning=False,
            sha256=hashlib.sha256(source.encode()).hexdigest())  # fmt: skip
    return path.read_text(encoding="utf-8", errors="replace")


def milliseconds(output: str, windows: list[int]) -> dict[int, float]:
    """Upstream's ms a step at each window: the median over blocks of 10 steps, first two left
    out. Its clock is read after a wait at the end of every block."""
    lines = re.findall(r"(?m)^step:(\d+)/\d+ train_time:(\d+)ms", output)
    clock, found = {int(step): int(ms) for step, ms in lines}, {}
    for i, window in enumerate(windows):
        ends = range(i * UPSTREAM_STEPS + 20, (i + 1) * UPSTREAM_STEPS, 10)
        blocks = [(clock[b + 10] - clock[b]) / 10 for b in ends if b + 10 in clock and b in clock]
        if blocks:
            found[window] = statistics.median(blocks)
    return found


def side_by_side(log: Log, args: argparse.Namespace, z: Sizes) -> None:
    if not args.upstream:
        return log.row("note", text="no --upstream, so nothing to compare with")
    windows, T = sorted(stages(z.record)[:3]), z.record.T
    output = run_upstream(log, args, windows)
    theirs = milliseconds(output, windows)
    peak = re.search(r"peak memory allocated: (\d+) MiB", output)
    rows = map(json.loads, (log.out / "measure.jsonl").read_text(encoding="utf-8").splitlines())
    ours = {row["window"]: row for row in rows if row["part"] == "one" and row["table"] == "step"}
    for window in theirs:
        mine = ours.get(window, {}).get("ms", math.nan)
        log.row("side_by_side", window=window, ours_ms=mine, upstream_ms=theirs[window],
                ours_tokens_per_s=1e3 * T / mine, upstream_tokens_per_s=1e3 * T / theirs[window],
                speed_ratio=theirs[window] / mine,
                upstream_peak_GB=int(peak[1]) * 2**20 / 1e9 if peak else None)  # fmt: skip
    if missing := [window for window in windows if window not in theirs]:
        raise RuntimeError(f"upstream printed no times at windows {missing}: {output[-1500:]}")


# ---- Summary -------------------------------------------------------------------------------------
def text_of(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 1e4 else f"{value:.4g}"
    return value if isinstance(value, str) else json.dumps(value)


def summarise(out: Path) -> str:
    """Every table of measure.jsonl, in columns; of failures the message only."""
    tables, hidden = {}, ("part", "table", "limits", "traceback", "calls")
    for line in (out / "measure.jsonl").read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        shown = {k: text_of(v) for k, v in row.items() if k not in hidden}
        tables.setdefault((row["part"], row["table"]), []).append(shown)
    lines = []
    for (part, table), rows in tables.items():
        lines += ["", f"== {part}: {table}"]
        if len(rows) == 1 and sum(map(len, rows[0].values())) > 90 or "text" in rows[0]:
            lines += [f"{k}: {v}" for row in rows for k, v in row.items()]
            continue
        keys = list(dict.fromkeys(key for row in rows for key in row))
        width = {key: max(len(key), *(len(row.get(key, "")) for row in rows)) for key in keys}
        for row in [dict(zip(keys, keys, strict=True)), *rows]:
            lines.append("  ".join(row.get(key, "").ljust(width[key]) for key in keys).rstrip())
    text = "\n".join(lines[1:]) + "\n"
    (out / "summary.txt").write_text(text, encoding="utf-8")
    return text


# ---- Run -----------------------------------------------------------------------------------------
def machine(log: Log, args: argparse.Namespace, z: Sizes) -> None:
    """The first line: what was measured, and on what."""
    packages = {module.__name__: module.__version__ for module in (jax, jax.lib, np)}
    smi = "nvidia-smi --query-gpu=name,driver_version,memory.total,clocks.sm --format=csv,noheader"
    device = jax.devices()[0]
    log.row("machine", versions=dict(packages, python=sys.version.split()[0]),
            device=device.device_kind, platform=device.client.platform_version,
            nvidia_smi=subprocess.getoutput(f"{smi} 2>/dev/null"), cores=os.cpu_count(),
            sha256={path.name: hashlib.sha256(path.read_bytes()).hexdigest()
                    for path in (Path(train_gpt.__file__), Path(__file__))},
            XLA_FLAGS=os.environ.get("XLA_FLAGS"),
            argv=args.argv[: args.argv.index("--child")])  # fmt: skip


PARTS = dict(machine=machine, correctness=correctness, kernels=kernels, tokens=tokens, step=step,
             profile=profile, one=one, side_by_side=side_by_side)  # fmt: skip
ALSO = dict(step=("tokens", "step", "profile"), side_by_side=("tokens", "one", "side_by_side"))
SHARE = dict(machine=1, correctness=7, kernels=4, tokens=1.5, step=8, profile=2, one=3,
             side_by_side=6)  # of the time; what a part leaves goes to the later ones  # fmt: skip


def parse(argv: list[str]) -> argparse.Namespace:
    cli = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    cli.add_argument("--out", required=True, help="folder for measure.jsonl, summary.txt, ...")
    cli.add_argument("--parts", default="correctness,kernels,step,side_by_side")
    cli.add_argument("--small", action="store_true", help="sizes for a CPU")
    cli.add_argument("--budget", type=float, default=560, help="seconds in all")
    cli.add_argument("--tokens", type=int, help="in the shard")
    cli.add_argument("--tiktoken", help="folder with tiktoken's files; else synthetic tokens")
    cli.add_argument("--upstream", help="PyTorch script, or a log of it, of upstream's record 21")
    for internal in ("--child", "--work", "--deadline"):
        cli.add_argument(internal, help=argparse.SUPPRESS)
    args = cli.parse_args(argv)
    args.argv, args.tokens = argv, args.tokens or (20_000 if args.small else 8_000_000)
    names = [name for part in args.parts.split(",") for name in ALSO.get(part, (part,))]
    if unknown := set(names) - set(PARTS):
        cli.error(f"there is no part {', '.join(unknown)}")
    args.names = ["machine", *dict.fromkeys(names)]
    return args


def child(args: argparse.Namespace) -> int:
    log = Log(Path(args.out), args.child, float(args.deadline))
    asked = os.environ.get("JAX_PLATFORMS")
    if asked and "cpu" not in asked:  # the reference is computed there
        jax.config.update("jax_platforms", f"{asked},cpu")
    log.attempt(args.child, PARTS[args.child], log, args, sizes(args.small), need=-math.inf)
    log.row("end", seconds=time.time() - log.began, failed=log.failed, wrong=log.wrong)
    return 2 if log.wrong else 1 if log.failed else 0


def run_part(part: str, argv: list[str], out: Path, work: str, deadline: float) -> int:
    """A child's exit status; its output goes to out/log.txt too. Past its deadline it is killed."""
    own = ["--child", part, "--work", work, "--deadline", str(deadline)]
    defaults = dict(TF_CPP_MIN_LOG_LEVEL="1")
    if "XLA_PYTHON_CLIENT_MEM_FRACTION" not in os.environ:
        defaults["XLA_CLIENT_MEM_FRACTION"] = "0.92"
    if "--small" in argv:  # where compiling takes all of the time
        defaults |= dict(XLA_FLAGS="--xla_backend_optimization_level=0")
    process = subprocess.Popen(
        [sys.executable, __file__, *argv, *own], start_new_session=True, stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT, text=True, errors="replace", env=defaults | os.environ,
    )  # fmt: skip
    late = threading.Timer(deadline + 15 - time.time(), os.killpg, (process.pid, signal.SIGKILL))
    late.start()
    with (out / "log.txt").open("a", encoding="utf-8") as file:
        for line in process.stdout:
            print(line, end="", flush=True)
            file.write(line)
            file.flush()
    status = process.wait()
    late.cancel()
    with contextlib.suppress(ProcessLookupError):  # what it may have left behind
        os.killpg(process.pid, signal.SIGKILL)
    if status not in (0, 1, 2):
        log = Log(out, part, deadline)
        log.row("failed", name=part, error=f"exit status {status}; -9: killed at its deadline")
        return 1
    return status


def main(argv: list[str]) -> int:
    args = parse(argv)
    if args.child:
        return child(args)
    out, end, statuses = Path(args.out).resolve(), time.time() + args.budget, {}
    out.mkdir(parents=True, exist_ok=True)
    for name in ("measure.jsonl", "log.txt"):
        (out / name).unlink(missing_ok=True)
    with tempfile.TemporaryDirectory() as work:
        for i, part in enumerate(args.names):
            left, later = end - time.time(), sum(SHARE[name] for name in args.names[i:])
            if left < 15:
                Log(out, part, end).row("skipped", name=part, reason=f"{left:.0f} s left in all")
                statuses[part] = 1
                continue
            deadline = time.time() + max(15, left * SHARE[part] / later)
            statuses[part] = run_part(part, argv, out, work, min(deadline, end - 15))
            summarise(out)
            if statuses[part] == 2:
                break
    print("=" * 100, summarise(out), "=" * 100, f"exit statuses {statuses}", sep="\n")
    return max(statuses.values())


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
