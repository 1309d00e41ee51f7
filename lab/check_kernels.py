"""The parts of ./run.sh check --kernels: whether the kernels for Hopper of records/ideas/ are right
and worth using.

A part is an attempt. It runs a function of train_gpt.py that has kernels, forward and backward, on
random inputs of the shapes that one device has in the longest stage, and compares results and
gradients with those of the same function without kernels. Then it times both, and the plain
products alone. The last part trains with all attempts that are to be used, and without them.

Every part runs lab/check.py in a process of its own, because a kernel that hangs, or writes where
it must not, would spoil the GPU for those after it.
"""

import collections
import dataclasses
import importlib.util
import json
import math
import statistics
import subprocess
import sys
import tempfile
import timeit
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

import train_gpt
from records import idea
from train_gpt import LONG, SHORT, Config, Layer, Stage

ROOT = Path(__file__).resolve().parent.parent
FILE = ROOT / "logs/check_kernels.json"  # the numbers of the last check on a GPU
USE, LEAVE = "use it", "leave it"
STEPS = "steps"  # the last part
LIMIT = 900  # seconds after which a part hangs
# Dense bfloat16 operations per second by NVIDIA's data sheets, by the name that JAX has.
PEAKS = {
    "NVIDIA H200": 989e12,
    "NVIDIA H100 80GB HBM3": 989e12,
    "NVIDIA H100 NVL": 835e12,
    "NVIDIA H100 PCIe": 756e12,
}
STEPS_APART = 0.05  # nats, by which losses of right kernels may differ
BF16 = "bfloat16"
E4 = "float8_e4m3fn"
E5 = "float8_e5m2"
# Sizes for Mosaic's interpreter: the kernels need heads of 128 channels, and multiples of 256.
SMALL = dataclasses.replace(
    train_gpt.PRESETS["record"],
    layers=(Layer(SHORT, paired_heads=True, value_table=0), Layer(LONG, key_offset=True)),
    stages=(Stage(8, 512, short=8, long=24, max_doc=0, lr=1.0, targets=(1.0, (0.5, 0.0))),),
    mudd_head=(), D=256, H=2, F=512, R=8, vocab=257, eot=256, ngram_buckets=512, ngram_capacity=1.0,
    batch=2, head_chunk=256, val_T=256, val_tokens=2048, prefixes="", seed=1,
)  # fmt: skip


# ---- What is checked -----------------------------------------------------------------------------
class Subject(NamedTuple):
    """A function of train_gpt.py, and what it takes."""

    run: Callable  # run(script, c, *arrays), where script is a copy of train_gpt.py
    arrays: dict[str, Array]  # gradients with respect to these are compared
    products: list[tuple]  # of both passes: M, N, K and the formats of a and b in a b^T


def stream(N: int, D: int) -> Array:
    """A residual stream, (1, N, D), whose tokens have an rms of 0.3 to 100."""
    rms = jax.random.permutation(jax.random.key(9), jnp.geomspace(0.3, 100, N))
    return (normal(0, (1, N, D)) * rms[:, None]).astype(BF16)


def mlp_subject(c: Config, stage: int, fp8: int) -> Subject:
    """The MLP. fp8 is --mlp_fp8: 1 for a forward pass in FP8, 2 for both passes."""
    N = c.sequence_length(stage)
    x = stream(N, c.D)
    fc = normal(1, (c.F, c.D), c.D**-0.5, "float32")
    proj = normal(2, (c.F, c.D), c.F**-0.5, "float32")

    def run(script, c, x, fc, proj):
        return script.mlp(x, 0, {"mlp": {0: (fc, proj)}}, c)

    forward = (E4, E4) if fp8 else (BF16, BF16)
    backward = (E5, E4) if fp8 == 2 else (BF16, BF16)
    shapes = [(N, c.F, c.D), (N, c.D, c.F)]
    products = [(*shape, *forward) for shape in shapes]
    products += [(*shape, *backward) for shape in [*shapes, *[(c.F, c.D, N)] * 2]]
    return Subject(run, {"x": x, "fc": fc, "proj": proj}, products)


def head_subject(c: Config, stage: int, fp8: int = 0) -> Subject:
    """The head and its loss. Random weights alone would make all tokens equally probable, and an
    error in the softmax would be too small to notice. So x points to the row of some token, which
    is the target of every second position, and away from all others. fp8 is --logits_fp8: it
    changes no product."""
    N = c.sequence_length(stage)
    V = train_gpt.padded_vocab(c)
    rows = normal(0, (V, c.D), 1.0, "float32")
    likely, other = jax.random.randint(jax.random.key(1), (2, N), 0, c.vocab)
    x = train_gpt.norm(normal(2, (N, c.D)) + 1.5 * rows[likely] + 1).astype(c.compute)
    targets = jnp.where(jnp.arange(N) % 2 == 0, likely, other)[:, None]

    def run(script, c, x, w):
        return script.head_loss(x, w, targets, jnp.ones(1) / c.batch, None, c)

    n = math.gcd(N, c.head_chunk)
    backward = c.head_backward, c.head_forward
    chunk = [(n, V, c.D, c.head_forward, c.head_forward)]
    chunk += [(n, c.D, V, *backward), (V, c.D, n, *backward)]
    return Subject(run, {"x": x, "w": 0.05 * rows - 0.022}, chunk * (N // n))


def attention_subject(c: Config, stage: int, fp8: int = 0) -> Subject:
    """Attention in two layers, one with paired heads and one with key_offset. fp8 is --qkv_fp8."""
    N = c.sequence_length(stage)
    layers = Layer(SHORT, paired_heads=True), Layer(LONG, key_offset=True)
    c = dataclasses.replace(c, layers=layers, mudd_head=())
    starts = jnp.arange(N)[None] % 400 == 0  # documents have 400 tokens
    pos = train_gpt.positions(starts, c, stage)
    x = stream(N, c.D)
    w = normal(1, (2, 4, c.D, c.D), c.D**-0.5, "float32")

    def run(script, c, x, w):
        c = dataclasses.replace(c, layers=layers, mudd_head=())
        y = 0
        for i, (q, k, v, o) in enumerate(w):
            weights = {"qk": {i: (q, k)}, "vo": {i: (v, o)}, "vo_lambdas": {i: (1.0, 1.0)}}
            y += script.attention(x, [], i, weights, {}, pos, c)
        return y

    forward = (E4, E4) if fp8 else (BF16, BF16)
    backward = (E5, E4) if fp8 == 2 else (BF16, BF16)
    products = [(N, 3 * c.D, c.D, *forward)]
    products += [(*shape, *backward) for shape in [(N, c.D, 3 * c.D), (3 * c.D, c.D, N)]]
    shapes = [(N, c.D, c.D)] * 2 + [(c.D, c.D, N)]
    products += [(*shape, BF16, BF16) for shape in shapes]
    return Subject(run, {"x": x, "w": w}, 2 * products)


class Attempt(NamedTuple):
    """One way to switch on an attempt."""

    subject: Callable[..., Subject]  # of the configuration, a stage, and the values of `fields`
    limits: tuple[float, float]  # of the largest error and of the rms, see errors_of()
    fields: dict[str, Any]  # of the configuration
    xla_has_them: bool = True  # whether XLA computes in these formats as well
    result_limit: float = math.inf  # of the result's largest error, where it is a loss


ATTEMPTS = {  # by what ./run.sh idea takes
    "fused_mlp": Attempt(mlp_subject, (0.02, 0.01), {"mlp_fp8": 0}),
    # XLA rounds twice, to bfloat16 and to FP8: every thirtieth number is another FP8 number.
    "fused_mlp --mlp_fp8 1": Attempt(mlp_subject, (0.2, 0.05), {"mlp_fp8": 1}),
    "fused_mlp --mlp_fp8 2": Attempt(mlp_subject, (0.2, 0.05), {"mlp_fp8": 2}),
    "fused_head": Attempt(head_subject, (0.03, 0.01), {"logits_fp8": 0}, True, 1e-3),
    "fused_head --logits_fp8 1": Attempt(head_subject, (0.2, 0.06), {"logits_fp8": 1}, False, 1e-3),
    "fused_qkv": Attempt(attention_subject, (0.03, 0.015), {"qkv_fp8": 0}),
    "fused_qkv --qkv_fp8 1": Attempt(attention_subject, (0.2, 0.12), {"qkv_fp8": 1}, False),
    "fused_qkv --qkv_fp8 2": Attempt(attention_subject, (0.2, 0.12), {"qkv_fp8": 2}, False),
}


def part_names() -> list[str]:
    """The attempts that are on the shelf, and the last part."""
    shelf = {name for name, patch in idea.shelf().items() if idea.base_of(patch)}
    return [*[name for name in ATTEMPTS if name.split()[0] in shelf], STEPS]


def why_not(devices: list, is_small: bool) -> str:
    """Why these devices cannot run the kernels; "" if they can."""
    least = (0, 12) if is_small else (0, 11, 2)  # the interpreter of 0.11 refuses them
    if jax.__version_info__ < least:
        version = ".".join(map(str, least))
        return (
            f"the kernels need jax {version}, which needs Python 3.12, and this is "
            f"{jax.__version__}"
        )
    if is_small or all(getattr(d, "compute_capability", "") == "9.0" for d in devices):
        return ""
    return (
        "the kernels are for GPUs of compute capability 9 (Hopper: H100, H200); "
        "./run.sh check --kernels --small interprets them on a CPU"
    )


# ---- Running it ----------------------------------------------------------------------------------
def interpret() -> None:
    """From now on, kernels run in Mosaic's interpreter, where a race raises an exception."""
    from jax.experimental.pallas import mosaic_gpu as plgpu  # jax 0.10 has no interpreter

    # With the default of 5 clocks for all copies, a copy that nobody awaits may seem to be ordered.
    options = plgpu.InterpretGPUParams(detect_races=True, num_tma_threads_per_device=64)
    plgpu.set_gpu_interpret_mode(options)


def load(names: list[str], is_small: bool) -> ModuleType:
    """Imports a copy of train_gpt.py with attempts. Small kernels run in three blocks."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "train_gpt.py")
        source = idea.copy_of([name.split()[0] for name in names]).decode()
        if is_small:
            assert source.count("\nSMS = 132 ") == 1
            source = source.replace("\nSMS = 132 ", "\nSMS = 3 ")
        path.write_text(source, encoding="utf-8")
        spec = importlib.util.spec_from_file_location("with_kernels", path)
        script = importlib.util.module_from_spec(spec)
        sys.modules[spec.name] = script  # dataclasses look it up
        spec.loader.exec_module(script)
    return script


def copy_config(script: ModuleType, c: Config, **changes: Any) -> Any:
    """A configuration of train_gpt.py as one of a copy."""
    values = {field.name: getattr(c, field.name) for field in dataclasses.fields(c)}
    values["layers"] = tuple(script.Layer(**vars(layer)) for layer in c.layers)
    values["stages"] = tuple(script.Stage(**vars(stage)) for stage in c.stages)
    return script.Config(**values | changes)


def normal(seed: int, shape: tuple, scale: float = 1.0, dtype: str = BF16) -> Array:
    """Random numbers."""
    return (scale * jax.random.normal(jax.random.key(seed), shape)).astype(dtype)


def compiled(run: Callable, *arrays: Array) -> Callable:
    """A program, with the options of train_gpt.py for the compiler."""
    options = train_gpt.OPTIONS.get(jax.devices()[0].platform)
    return jax.jit(run).lower(*arrays).compile(options)


def milliseconds(program: Callable, arrays: list[Array], is_small: bool) -> float:
    """Of a call: the median of ten rounds of five calls, after the first call."""
    rounds, calls = (1, 1) if is_small else (10, 5)
    jax.block_until_ready(program(*arrays))

    def one_round():
        jax.block_until_ready([program(*arrays) for _ in range(calls)])

    return 1e3 * statistics.median(timeit.repeat(one_round, number=1, repeat=rounds)) / calls


def time_products(products: list[tuple], is_small: bool) -> float:
    """Milliseconds of all products alone, with the precision for which the record asks."""
    total = 0.0
    for (M, N, K, a, b), count in collections.Counter(products).items():
        precision = "highest" if a == E5 else None

        def run(a_MK, b_NK, precision=precision):
            return train_gpt.scaled_matmul(a_MK, b_NK, (1, 1), 1.0, BF16, precision)

        arrays = [normal(0, (M, K), 1.0, a), normal(1, (N, K), 1.0, b)]
        total += count * milliseconds(compiled(run, *arrays), arrays, is_small)
    return total


def with_gradients(subject: Subject, script: ModuleType, c: Any) -> Callable:
    """A function of the gradient with respect to the result, and of the arrays, that returns the
    result and the gradients."""

    def run(dy, *arrays):
        y, gradients = jax.vjp(lambda *arrays: subject.run(script, c, *arrays), *arrays)
        return [y, *gradients(dy)]

    return run


def errors_of(found: Array, right: Array) -> tuple[float, float]:
    """The largest error relative to the largest value, and the root mean square of errors relative
    to that of values; NaN if anything is."""
    found = np.float32(found)
    right = np.float32(right)
    largest = np.abs(found - right).max() / np.abs(right).max()
    rms = np.linalg.norm(found - right) / np.linalg.norm(right)
    return float(largest), float(rms)


def measure(attempt: Attempt, script: ModuleType, c: Config, stage: int, is_small: bool) -> dict:
    """What judged() takes. The kernels are compared with the same formats by XLA, if it has them,
    and timed against the record as it is."""
    subject = attempt.subject(c, stage, *attempt.fields.values())
    record = copy_config(script, c, kernels="xla")
    y = jax.jit(lambda *x: subject.run(script, record, *x))(*subject.arrays.values())
    # With a part that is parallel to y, the radial part of a norm's gradient is large.
    dy = (3e-4 * (y + normal(9, y.shape))).astype(y.dtype)
    arrays = [dy, *subject.arrays.values()]
    programs = []
    xla_fields = attempt.fields if attempt.xla_has_them else {}
    for kernels, fields in ("mosaic", attempt.fields), ("xla", xla_fields), ("xla", {}):
        config = copy_config(script, c, kernels=kernels, **fields)
        programs.append(compiled(with_gradients(subject, script, config), *arrays))
    ours, same_formats, by_xla = programs
    names = ["result", *(f"d{name}" for name in subject.arrays)]
    right = same_formats(*arrays)
    errors = np.zeros((len(names), 2))
    for _ in range(1 if is_small else 5):  # a race need not strike in every call
        errors = np.maximum(errors, list(map(errors_of, ours(*arrays), right)))
    facts = {"limits": attempt.limits, "result_limit": attempt.result_limit}
    facts["errors"] = dict(zip(names, errors.tolist(), strict=True))
    facts["ms"] = milliseconds(ours, arrays, is_small)
    facts["xla_ms"] = milliseconds(by_xla, arrays, is_small)
    facts["cublas_ms"] = time_products(subject.products, is_small)
    facts["tflops"] = 2e-9 * sum(M * N * K for M, N, K, *_ in subject.products) / facts["ms"]
    facts["share"] = 1e12 * facts["tflops"] / PEAKS.get(jax.devices()[0].device_kind, math.nan)
    return facts


def why_xla(script: ModuleType, c: Config, attempt: Attempt, stage: int) -> str:
    """Why a run with this configuration would not use the attempt's kernels on this device; "" if
    it would."""
    try:
        config = script.fit_kernels(jax.devices()[0], copy_config(script, c, **attempt.fields))
    except ValueError as error:
        return str(error)
    if config.kernels != "mosaic":
        return "they need bfloat16, and sizes that are multiples of 256"
    subject = attempt.subject(c, stage, *attempt.fields.values())
    traced = jax.make_jaxpr(lambda *x: subject.run(script, config, *x))(*subject.arrays.values())
    return "" if "mosaic_" in str(traced) else "these sizes take XLA's path"


def check_attempt(name: str, c: Config, stage: int, is_small: bool) -> Iterator[tuple]:
    """A line on whether to use an attempt, in the shapes of a stage on one device."""
    attempt = ATTEMPTS[name]
    try:
        script = load([name], is_small)
        why = "" if is_small else why_xla(script, c, attempt, stage)
        if why:
            why = f"a run with these flags has no kernels of {name}: {why}"
            yield None, name, f"{LEAVE}: {why}", {"verdict": LEAVE, "why": why}
            return
        facts = measure(attempt, script, c, stage, is_small)
    except Exception as error:  # the next attempt may work
        lines = [line for line in str(error).splitlines() if line.strip()] or [""]
        line = lines[-1] if "Traceback" in str(error) else lines[0]  # the cause of a callback's
        why = f"{name} does not compile or run: {type(error).__name__}: {line.strip()}"[:400]
        yield False, name, f"{LEAVE}: {why}", {"verdict": LEAVE, "why": why}
        return
    passes, why = judged(name, facts, is_small)
    word = USE if passes else LEAVE
    yield passes, name, f"{word}: {why}", facts | {"verdict": word, "why": why}


def judged(name: str, facts: dict[str, Any], is_small: bool) -> tuple[bool | None, str]:
    """Whether to use an attempt, and why. None is for one that is slow, which is no fault."""
    errors = facts["errors"]
    limits = facts["limits"]
    expected = f"expected at most {percent(limits[0])} and {percent(limits[1])}"
    wrong = []
    for array, (largest, rms) in errors.items():
        limit = facts["result_limit"] if array == "result" else math.inf
        if not (largest <= min(limit, limits[0]) and rms <= limits[1]):
            wrong.append(f"{array} by {percent(largest)} (rms {percent(rms)})")
    if wrong:
        return False, f"{name} is wrong: {', '.join(wrong)}, {expected}"
    largest, rms = np.max(list(errors.values()), axis=0)
    right = f"largest error {percent(largest)}, rms {percent(rms)}, {expected}"
    if is_small:
        return True, f"{name} is right: {right}; a CPU does not show its speed"
    share = "" if math.isnan(facts["share"]) else f", {facts['share']:.0%} of the bfloat16 peak"
    times = f"{facts['ms']:.3g} ms ({facts['tflops']:.0f} TFLOP/s{share}), by XLA "
    times += f"{facts['xla_ms']:.3g} ms, its products alone by cuBLAS {facts['cublas_ms']:.3g} ms"
    if facts["ms"] < facts["xla_ms"]:
        return True, f"{name} is right and faster: {times}; {right}"
    return None, f"{name} is right, but slower: {times}; {right}"


def percent(fraction: float) -> str:
    """As "0.0028 %", with two digits."""
    return f"{100 * fraction:.2g} %"


# ---- All of them together ------------------------------------------------------------------------
def check_all(flags: list[str], is_small: bool) -> int:
    """Checks every attempt in a process of its own, with the flags of a run, then trains with those
    to use. Returns the exit status."""
    facts = {"failed": []}
    for name in part_names():
        command = [sys.executable, "-m", "lab.check", "--attempt", name, "--use"]
        command += [",".join(to_use(facts)), *["--small"] * is_small, *flags]
        output = ""
        try:
            done = subprocess.run(command, cwd=ROOT, stdout=-1, text=True, timeout=LIMIT)
            if done.returncode == 2:  # there is nothing to check, as it has said
                return 2
            output = done.stdout
            end = f"ended with exit status {done.returncode}"
        except subprocess.TimeoutExpired:
            end = f"hangs: it has not ended within {LIMIT} s"
        shown, found, text = output.partition("CHECK ")
        print(shown, end="", flush=True)
        own = json.loads(text) if found else {name: end, "failed": [name]}
        if not found:
            print(f"FAIL  {name} {end}", flush=True)
        facts |= own | {"failed": facts["failed"] + own["failed"]}
    text = print_facts(facts)
    if not is_small:
        FILE.parent.mkdir(exist_ok=True)
        FILE.write_text(f"{text}\n")
    return 1 if facts["failed"] else 0


def print_facts(facts: dict[str, Any]) -> str:
    """Prints the last line of a check, and returns its JSON."""
    text = json.dumps(facts)
    text = json.dumps(json.loads(text, parse_constant=str))  # NaN is not JSON
    print(f"CHECK {text}", flush=True)
    return text


def to_use(facts: dict[str, Any]) -> list[str]:
    """The attempts to use, by the facts of their parts. Forms with more FP8 are not among them:
    twenty steps do not show what these cost in loss, so a person must choose them."""
    use = []
    for name in ATTEMPTS:
        found = facts.get(name)
        has_flags = " " in name
        if isinstance(found, dict) and found.get("verdict") == USE and not has_flags:
            use.append(name)
    return use


def check_steps(c: Config, use: list[str], is_small: bool, train: Callable) -> Iterator[tuple]:
    """A line on training with attempts and without. train(script, c, steps) returns losses, and the
    mean milliseconds of a step."""
    if not use:
        yield None, STEPS, "no attempt is to be used, so no steps are compared", None
        return
    steps = 2 if is_small else 20
    script = load(use, is_small)
    losses, ms = train(script, copy_config(script, c, kernels="mosaic"), steps)
    right, xla_ms = train(train_gpt, c, steps)
    apart = float(np.abs(losses - right).max())
    text = f"{steps} steps with {', '.join(use)} and without: "
    if not is_small:
        text += f"{ms:.4g} ms each, and {xla_ms:.4g}; "
    text += f"the losses end at {losses[-1]:.4f} and {right[-1]:.4f}, with a largest difference of "
    text += f"{apart:.2g}, expected below {STEPS_APART:g}"
    if apart < STEPS_APART:
        text += f". To train with them:  ./run.sh idea {' '.join(use)}  and then preset and flags"
    facts = {"use": use, "ms": ms, "losses": losses.tolist()}
    facts |= {"xla_ms": xla_ms, "xla_losses": right.tolist()}
    yield apart < STEPS_APART, STEPS, text, facts
