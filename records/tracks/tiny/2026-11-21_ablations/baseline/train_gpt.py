"""Train a GPT-2-small-class model to 3.28 validation loss on FineWeb: one file, JAX, 8xH100.

Run     ./run.sh, or python train_gpt.py [record | tiny] [--field value ...]: see --help
Dims    B sequence  T position  D model  H head  K head channel  F hidden  V row of a table
        N token or matrix  G group of 8 matrices  R row  C column; x is the residual stream
Source  record 21 of modded-nanogpt; README.md says where we differ, and what was measured where
"""

import argparse
import collections
import dataclasses
import functools
import hashlib
import json
import math
import os
import re
import resource
import secrets
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import Array, P, lax
from jax.sharding import AxisType, Mesh, NamedSharding

SOURCE = Path(__file__).read_bytes().decode()  # now: the file may be edited while a run goes on
SHARES = 8  # of a batch and of a group of matrices, dealt to 1, 2, 4 or 8 devices
HEADER = 1024  # bytes: 256 int32, of which the first three are magic, version and token count
LAYER = r"([LS]|-(?!v))(?:v(\d+))?(?:<(\d+))?"  # a word of Config.plan
FORMATS = ("float32", "bfloat16", "float8_e4m3fn", "float8_e5m2")
CHOICES = dict(compute=FORMATS[:2], head_forward=FORMATS, head_backward=FORMATS,
               attention=("cudnn", "xla"))  # fmt: skip
GPU_OPTIONS = dict(  # of the compiler; they overrule XLA_FLAGS
    # By cuBLAS a matrix product adds the residual stream, and reads a weight where it lies in its
    # gathered group; XLA's own products, in Triton, leave both to other kernels.
    xla_gpu_enable_triton_gemm=False,
    # Gradients leave one by one, while others are computed; put together they would be late.
    xla_gpu_reduce_scatter_combine_threshold_bytes=0,
)


# ---- Config --------------------------------------------------------------------------------------
def refuse(message: str) -> None:
    print(f"train_gpt.py: {message}", file=sys.stderr)
    sys.exit(2)


@dataclasses.dataclass(frozen=True)
class Config:
    # fmt: off
    plan: str = "Lv0 Sv1 Sv2 S L S S<5 -<4 S<3 Sv0<2 Sv1<1 Lv2<0"  # a word a layer: L long or S
    # short window, - no attention; vN mixes value table N into v; <N adds the output of layer N
    D: int = 768                # model width
    H: int = 6                  # attention heads
    F: int = 3072               # MLP hidden width
    vocab: int = 50257          # tokens; the tables are padded to a multiple of 128
    eot: int = 50256            # token that starts every document
    T: int = 49152              # tokens in a sequence
    sequences: int = 8          # in a step, on any number of devices: a multiple of 8
    in_flight: int = 1          # sequences a device runs at once, at most (memory)
    head_chunk: int = 8192      # tokens whose logits exist at once (memory); divides T and val_T
    window: int = 1728          # long attention window at the last step, tokens
    window_block: int = 128     # tokens that windows are rounded up to; a short one is half a long
    compute: str = "bfloat16"              # format of activations and gathered weights
    head_forward: str = "float8_e4m3fn"    # format of the head's operands
    head_backward: str = "float8_e5m2"     # format of the logits' gradient
    x_scale: float = 2.0        # power of two that spreads the head's input over its format
    w_scale: float = 512.0      # the same for the head's weight
    g_scale: float = 524288.0   # the same for the logits' gradient
    attention: str = "cudnn"    # kernel of jax.nn.dot_product_attention; xla off NVIDIA GPUs
    steps: int = 1770           # length of the schedule
    cooldown: float = 0.4       # share of the run, at its end, over which rates fall to a tenth
    muon_lr: float = 0.05       # rate of the matrices in the layers
    embed_lr: float = 0.6       # rate of the token and value tables
    head_lr: float = 0.008      # rate of the head
    scalar_lr: float = 0.04     # rate of the scalars
    momentum_steps: int = 300   # steps over which Muon's momentum rises from 0.85 to 0.95
    data: str = "data/fineweb10B"  # folder with the *_train_*.bin and *_val_*.bin shards
    val_every: int = 125        # steps between validations
    val_T: int = 262144         # tokens in a validation sequence
    val_tokens: int = 10485760  # fixed by the rules: the same text whatever the machine
    target: float = 3.28        # stop at the first validation loss that reaches it; 0: never
    seed: int = -1              # of the initial weights; -1: a fresh one from the system
    # fmt: on

    @property
    def layers(self) -> list[tuple[str, int | None, int | None]]:
        """Of each layer: window (L, S or -), value table, earlier layer whose output it adds."""
        words = [re.fullmatch(LAYER, word).groups() for word in self.plan.split()]
        return [(w, *(int(n) if n else None for n in numbers)) for w, *numbers in words]

    def window_at(self, step: int) -> int:
        """Long window in tokens: linear in the step, rounded up to blocks."""
        blocks = -(-self.window * step // (self.steps * self.window_block))
        return self.window_block * max(1, blocks)

    @property
    def val_steps(self) -> int:
        return self.val_tokens // (SHARES * self.val_T)

    def batch(self, kind: str) -> tuple[int, int]:
        """Sequences, and tokens in each, of a "train" or "val" step."""
        return (self.sequences, self.T) if kind == "train" else (SHARES, self.val_T)

    def validates(self, step: int) -> bool:
        return step % self.val_every == 0 or step == self.steps


PRESETS = dict(record=Config(), tiny=Config(
    plan="Lv0 S L S<2 -<1 Lv0<0", D=128, H=2, F=512, vocab=257, eot=256, T=256, val_T=1024,
    in_flight=8, head_chunk=256, window=192, window_block=64, steps=500, cooldown=0.7, muon_lr=0.02,
    embed_lr=0.3, data="data/source_code", val_every=125, val_tokens=65536, target=1.49,
))  # fmt: skip


def parse_config(argv: list[str]) -> tuple[str, Config]:
    """`train_gpt.py [preset] [--field value ...]`: the fields of Config are the flags."""
    preset, *argv = argv if argv and argv[0][:1] != "-" else ["record", *argv]
    c = PRESETS.get(preset) or refuse(f"there is no preset {preset!r}, only {', '.join(PRESETS)}")
    cli = argparse.ArgumentParser(argument_default=argparse.SUPPRESS, allow_abbrev=False)
    cli.usage = f"train_gpt.py [{' | '.join(PRESETS)}] [--field value ...]"
    cli.error = refuse
    for field in dataclasses.fields(Config):
        comment = re.search(rf"^    {field.name}: .*?  # (.*(\n    #.*)*)", SOURCE, re.M)[1]
        text = f"{comment.replace('    # ', '')} (record: {field.default})"
        cli.add_argument(f"--{field.name}", type=field.type, metavar="", help=text)
    c = dataclasses.replace(c, **vars(cli.parse_args(argv)))
    for fault in faults(c):
        refuse(fault)
    return preset, dataclasses.replace(c, seed=secrets.randbits(31)) if c.seed == -1 else c


def faults(c: Config) -> Iterator[str]:
    """What cannot work in a configuration, a line each, naming the flag."""
    for word in c.plan.split() or [""]:
        if not re.fullmatch(LAYER, word):
            yield f"--plan: {word!r} is no layer; write one word a layer, like L, Sv0, S<3 or -"
    for i, (_, _, skip) in enumerate(c.layers):
        if skip is not None and skip >= i:
            yield f"--plan: layer {i} adds the output of layer {skip}, which is not before it"
    tables = {table for _, table, _ in c.layers} - {None}
    if tables != set(range(len(tables))):
        yield f"--plan: the value tables are {sorted(tables)}; number them from 0"
    for name, value in dataclasses.asdict(c).items():
        bounded = type(value) is not str and name not in ("seed", "target", "eot")
        if bounded and not 0 < value < math.inf:
            yield f"--{name} {value} must be positive, and finite"
        if name.endswith("_scale") and math.frexp(value)[0] != 0.5:
            yield f"--{name} {value} must be a power of two, so that scaling is exact"
        if name in CHOICES and value not in CHOICES[name]:
            yield f"--{name} {value} must be one of {', '.join(map(str, CHOICES[name]))}"
        if name in ("T", "val_T") and c.head_chunk > 0 and value % c.head_chunk:
            yield f"--head_chunk {c.head_chunk} must divide --{name} {value}"
    if c.D % c.H or c.D // c.H < 16 or c.D // c.H % 8:
        yield f"--D {c.D} must be --H {c.H} heads of 16, 24, 32 ... channels"
    if not 0 <= c.eot < c.vocab <= 65536:
        yield f"--vocab {c.vocab} must fit 16 bits and hold --eot {c.eot}"
    if c.sequences % SHARES:
        yield f"--sequences {c.sequences} must be a multiple of 8"
    if c.val_tokens % (SHARES * c.val_T):
        yield f"--val_tokens {c.val_tokens} must be a multiple of 8 sequences of --val_T {c.val_T}"
    if c.cooldown > 1 or not 0 <= c.target < math.inf or not -1 <= c.seed < 2**32:
        yield "--cooldown must be at most 1, --target at least 0, --seed -1 or below 2**32"


def fit_devices(preset: str, c: Config) -> tuple[list[jax.Device], Config]:
    """The devices of this machine, and the configuration in formats that they can run."""
    try:
        devices = jax.devices()
    except (RuntimeError, AssertionError) as error:
        refuse(f"JAX finds no device of JAX_PLATFORMS={os.environ.get('JAX_PLATFORMS')}: {error!r}")
    gpu, n = devices[0].platform == "gpu" and "NVIDIA" in devices[0].device_kind, len(devices)
    if preset == "record" and devices[0].platform == "cpu":
        refuse("the record needs GPUs and JAX sees only a CPU. With GPUs: ./run.sh, or pip install "
               "'jax[cuda13]' (driver < 580: 'jax[cuda12]'); without: ./run.sh tiny")  # fmt: skip
    if n not in (1, 2, 4, 8):
        refuse(f"the 8 shares of a step do not divide among {n} devices; show JAX 1, 2, 4 or 8")
    if jax.config.jax_enable_x64:
        refuse("JAX_ENABLE_X64 is set, which makes another run of this; unset it")
    kernel = c.attention if gpu and c.compute == "bfloat16" else "xla"  # cuDNN's has no float32
    c = dataclasses.replace(c, attention=kernel)
    if gpu and float(devices[0].compute_capability) < 8.9:  # no FP8
        c = dataclasses.replace(c, head_forward=c.compute, head_backward=c.compute)
    return devices, c


# ---- Parameters ----------------------------------------------------------------------------------
class Leaf(NamedTuple):
    """All there is to know about one parameter; padding is stored but is no part of the model."""

    real: tuple[int, ...]  # shape without padding; a bank's is [matrices, R, C]
    shape: tuple[int, ...]  # shape of the float32 master copy; a bank's is [G, 8, R, C]
    spec: P  # sharding of the master copy and of its optimizer state
    init: Callable  # (key, shape) -> array
    optimizer: str  # "adam" or "muon"
    rate: Any  # learning rate; in a bank one for each matrix, [G, 8, 1, 1]


def bank(R: int, C: int, layers: int, bounds: tuple[float, ...], rates: tuple[float, ...]) -> Leaf:
    """(R, C) matrices, len(rates) to a layer, in groups of 8, of which every device holds the same
    share of whole ones: Muon needs no communication. Each is uniform within its bound."""
    n = len(rates) * layers
    columns = np.zeros((2, -(-n // SHARES) * SHARES), np.float32)
    columns[:, :n] = np.tile((bounds, rates), layers)
    bound, rate = columns.reshape(2, -1, SHARES, 1, 1)
    return Leaf((n, R, C), (*rate.shape[:2], R, C), P(None, "fsdp"),
                lambda key, shape: bound * jax.random.uniform(key, shape, minval=-1.0),
                "muon", rate)  # fmt: skip


def table(c: Config) -> dict[str, Leaf]:
    """One row per parameter. A new technique adds its row here and its line in the model."""
    D, F, V, L = c.D, c.F, -(-c.vocab // 128) * 128, len(c.layers)
    attends, mixes, skips = L - c.plan.count("-"), c.plan.count("v"), c.plan.count("<")
    tables = len({number for _, number, _ in c.layers} - {None})
    normal, full = jax.nn.initializers.normal(1.0), jax.nn.initializers.constant
    b, m, tall = 0.5 * (3 / D) ** 0.5, c.muon_lr, max(1, F / D) ** 0.5
    # fmt: off
    return dict(
        embed  = Leaf((c.vocab, D), (V, D), P("fsdp"), normal, "adam", c.embed_lr),
        values = Leaf((tables, c.vocab, D), (tables, V, D), P(None, "fsdp"), normal, "adam",
                      c.embed_lr),
        attn   = bank(D, D, attends, (b, b, b, 0), (m, m, m, m)),  # q, k, v, o of each layer
        mlp    = bank(F, D, L, (b, 0), (m * tall, m)),             # fc, and proj transposed
        head   = Leaf((V, D), (V, D), P("fsdp"), full(0.0), "adam", c.head_lr),
        skip   = Leaf((skips,), (skips,), P(), full(1.0), "adam", c.scalar_lr),
        mix    = Leaf((L, 2), (L, 2), P(), full(np.float32([1, 0])), "adam", c.scalar_lr),
        v_mix  = Leaf((attends,), (attends,), P(), full(0.5), "adam", c.scalar_lr),
        ve_mix = Leaf((mixes,), (mixes,), P(), full(0.5), "adam", c.scalar_lr),
    )  # fmt: on


def unpad(params: dict[str, Array], c: Config) -> dict[str, np.ndarray]:
    """The model alone, in float32: banks become [matrices, R, C], and padding goes."""
    model = {}
    for name, (real, shape, *_) in table(c).items():
        stacked = np.asarray(params[name]).reshape(-1, *shape[len(shape) - len(real) + 1 :])
        model[name] = stacked[tuple(map(slice, real))]
    return model


def gather(params: dict[str, Array], c: Config) -> dict[str, Any]:
    """[zero-2] Whole weights from every device's share, a group of a bank at a time; kept for the
    backward pass. Its transpose sends each gradient, summed, to its owner. They travel in c.compute
    and are float32 before and after, so that several turns add up in float32. arXiv:1910.02054."""

    def whole(share: Array, spec: P) -> Any:
        if spec == P():
            return lax.pcast(share, "fsdp", to="varying")
        if spec[0] is None:
            return [whole(group, P("fsdp")) for group in share]
        return lax.all_gather(share.astype(c.compute), "fsdp", tiled=True).astype(jnp.float32)

    return {name: whole(params[name], row.spec) for name, row in table(c).items()}


# ---- Model ---------------------------------------------------------------------------------------
def place(first_BT: Array, K: int, dtype: str) -> tuple[Array, Array, Array, Array]:
    """Where tokens stand, for rotate: cos and sin (T, 1, K / 4), codes of q and k (B, T, 1, 4)."""
    # [half-rope] A half of the channels stays still; base 1024. modded-nanogpt record 17.
    speed = (1 / 1024) ** jnp.linspace(0, 1, K // 4)
    angle = jnp.arange(first_BT.shape[1])[:, None, None] * speed
    # [document-mask] Four channels whose product is 256 * (document of k - document of q): 0 within
    # one, to an earlier one below any score; no kernel needs a mask. Exact for < 4,096 documents.
    document = jnp.cumsum(first_BT, axis=1, dtype=jnp.int32)[:, :, None]
    high, low, one = document // 16, document % 16, jnp.ones_like(document)
    code_q = jnp.stack((-4096 * high, -256 * low, 4096 * one, 256 * one), axis=-1)
    code_k = jnp.stack((one, one, high, low), axis=-1)
    return jnp.cos(angle), jnp.sin(angle), code_q.astype(dtype), code_k.astype(dtype)


def inverse_rms(x: Array) -> Array:
    return lax.rsqrt(jnp.mean(jnp.square(x.astype(jnp.float32)), axis=-1, keepdims=True) + 2.0**-23)


def norm(x: Array) -> Array:
    return (x * inverse_rms(x)).astype(x.dtype)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def norm_linear(x_BTD: Array, w_ED: Array, feeds_elementwise: bool) -> Array:
    """norm(x) w^T, with a backward pass that moves fewer bytes than the one JAX derives. norm's
    gradient leaves out what lies along h = norm(x), by sum(dh h). sum(dy y) is the same, and free
    if the kernel that makes dy reads y anyway, as that of an elementwise function does."""
    return jnp.einsum("BTD,ED->BTE", norm(x_BTD), w_ED)


def norm_linear_forward(x_BTD: Array, w_ED: Array, feeds_elementwise: bool) -> tuple:
    inverse = inverse_rms(x_BTD)
    # Without the barrier XLA makes h again in the backward pass, from all that x was made of.
    h, inverse = lax.optimization_barrier(((x_BTD * inverse).astype(x_BTD.dtype), inverse))
    y = jnp.einsum("BTD,ED->BTE", h, w_ED)
    return y, (h, inverse, w_ED, y)


def norm_linear_backward(feeds_elementwise: bool, kept: tuple, dy: Array) -> tuple:
    h, inverse, w_ED, y = kept
    dh = jnp.einsum("BTE,ED->BTD", dy, w_ED)
    a, b = (dy, y) if feeds_elementwise else (dh, h)
    along = (a.astype(jnp.float32) * b).sum(axis=-1, keepdims=True) / h.shape[-1]
    return ((dh - h * along) * inverse).astype(h.dtype), jnp.einsum("BTE,BTD->ED", dy, h)


norm_linear.defvjp(norm_linear_forward, norm_linear_backward)


def blend(*terms: tuple[Any, Array]) -> Array:
    """Weighted sum of arrays, computed in float32 and rounded once."""
    total = sum(weight * x.astype(jnp.float32) for weight, x in terms)
    return total.astype(terms[0][1].dtype)


def rotate(x_BTHK: Array, cos: Array, sin: Array, code_BT14: Array) -> Array:
    """Rotate channel pairs (j, j + K/2), and put the document code into the last four."""
    a, still_a, b, still_b = jnp.split(x_BTHK, 4, axis=-1)
    code = jnp.broadcast_to(code_BT14, (*x_BTHK.shape[:-1], 4))
    parts = a * cos + b * sin, still_a, b * cos - a * sin, still_b[..., :-4], code
    return jnp.concatenate([part.astype(code.dtype) for part in parts], axis=-1)


@jax.custom_vjp
def norm_rotate(x_BTHK: Array, cos: Array, sin: Array, code_BT14: Array) -> Array:
    """rotate(norm(x)), with a shorter backward pass, as norm_linear. Rotation keeps inner products:
    norm's gradient needs sum(dy y), over the channels that hold no code."""
    return rotate(x_BTHK * inverse_rms(x_BTHK), cos, sin, code_BT14)


def norm_rotate_forward(x: Array, cos: Array, sin: Array, code: Array) -> tuple:
    inverse = inverse_rms(x)
    y = lax.optimization_barrier(rotate(x * inverse, cos, sin, code))
    return y, (x, inverse, cos, sin, y)


def norm_rotate_backward(kept: tuple, g: Array) -> tuple:
    x, inverse, cos, sin, y = kept
    g, K = g.astype(jnp.float32), g.shape[-1]
    along = jnp.where(jnp.arange(K) < K - 4, g * y, 0).sum(axis=-1, keepdims=True) / K
    back = rotate(g, cos, -sin, jnp.zeros((1, 1, 1, 4)))
    return ((back - x * inverse * along) * inverse).astype(x.dtype), None, None, None


norm_rotate.defvjp(norm_rotate_forward, norm_rotate_backward)


def attention(
    x: Array, w_4DD: Array, v_mix: Array, ve: list, window: int, at: tuple, c: Config
) -> Array:
    (B, T, D), (cos, sin, code_q, code_k) = x.shape, at
    # v's share is in its weight, where the sum for the gradient is short: over D x D, not T x D.
    w_v = (v_mix * w_4DD[2]).astype(w_4DD.dtype)
    qkv = norm_linear(x, jnp.concatenate((w_4DD[0], w_4DD[1], w_v)), False)
    q, k, v = (part.reshape(B, T, c.H, D // c.H) for part in jnp.split(qkv, 3, axis=-1))
    # [qk-norm] Henry et al. 2020, arXiv:2010.04245: scores stay bounded, so the rate can be high.
    q, k = norm_rotate(q, cos, sin, code_q), norm_rotate(k, cos, sin, code_k)
    # [value-embed] v also reads a token table of its own. Zhou et al. 2024, arXiv:2410.17897.
    v = blend((1.0, v), *ve) if ve else v
    y = attend(q, k, v, window, c.attention)
    return jnp.einsum("BTD,ED->BTE", y.reshape(B, T, D), w_4DD[3])


def attend(q: Array, k: Array, v: Array, window: int, kernel: str) -> Array:
    # [window] Each query sees `window` keys, itself included. Both arguments, always: without
    # is_causal, cuDNN leaves the right side of a window open and sees the future.
    return jax.nn.dot_product_attention(
        q, k, v, scale=0.12, is_causal=True, local_window_size=(window - 1, 0),
        implementation=kernel,
    )  # fmt: skip


def mlp(x: Array, w_2FD: Array) -> Array:
    # [relu2] So et al. 2021, arXiv:2109.08668.
    hidden = jnp.square(jax.nn.relu(norm_linear(x, w_2FD[0], True)))
    return jnp.einsum("BTF,FD->BTD", hidden, w_2FD[1])


def matrices(groups: list[Array], count: int, dtype: str) -> Iterator[Array]:
    """A gathered bank as the layers take it: `count` matrices at a time, in order."""
    for group in groups:
        yield from group.astype(dtype).reshape(-1, count, *group.shape[1:])


def loss_fn(w: dict[str, Any], tokens_BT: Array, c: Config, window: int) -> Array:
    """Sum over the sequences of their mean next-token loss, nats; w holds gathered weights,
    tokens_BT is one longer than the model's T, window is the long one."""
    inputs, targets, dtype = tokens_BT[:, :-1], tokens_BT[:, 1:], c.compute
    (B, T), K = inputs.shape, c.D // c.H
    at = place(inputs == c.eot, K, dtype)
    windows = dict(L=window, S=c.window_block * max(1, window // c.window_block // 2))
    attn_w, mlp_w = matrices(w["attn"], 4, dtype), matrices(w["mlp"], 2, dtype)
    skip_w, v_mix, ve_mix = iter(w["skip"]), iter(w["v_mix"]), iter(w["ve_mix"])
    tables = (w["embed"], *w["values"])  # check_contents promised that the tokens are within them
    embed, *values = (t.at[inputs].get(mode="promise_in_bounds").astype(dtype) for t in tables)
    x = x0 = norm(embed)
    outputs = []
    for (reach, table, skip), (fade, reread) in zip(c.layers, w["mix"], strict=True):
        # [u-net] Late layers add the output of early ones. modded-nanogpt record 11.
        if skip is not None:
            x = blend((1.0, x), (next(skip_w), outputs[skip]))
        # [x0] Each layer may fade the stream and read the embedding again. Record 9.
        x = blend((fade, x), (reread, x0))
        if reach != "-":
            ve = [] if table is None else [(next(ve_mix), values[table].reshape(B, T, c.H, K))]
            x = x + attention(x, next(attn_w), next(v_mix), ve, windows[reach], at, c)
        x = x + mlp(x, next(mlp_w))
        outputs.append(x)
    return head_loss(norm(x).reshape(B * T, c.D), w["head"], targets.reshape(B * T), c, T)


# ---- Head ----------------------------------------------------------------------------------------
def quantize(x: Array, scale: float, dtype: str) -> Array:
    """Clip first: a float8 cast overflows to NaN or inf where generated GPU code saturates."""
    limit = float(jnp.finfo(dtype).max)
    return jnp.clip(x.astype(jnp.float32) * scale, -limit, limit).astype(dtype)


def matmul(a: Array, b: Array, axes: tuple, scale: float, dtype: str, precision: Any) -> Array:
    """Product over an axis of each, divided by scale; float8 sums keep all bits at "highest"."""
    dims = (((axes[0],), (axes[1],)), ((), ()))
    out = lax.dot_general(a, b, dims, precision, preferred_element_type=dtype)
    return out * jnp.asarray(1 / scale, dtype)


def softcap(z: Array) -> Array:
    """[softcap] Logits between 0 and 30: Gemma 2, arXiv:2408.00118; records 18 and 19."""
    return 30 * jax.nn.sigmoid(z.astype(jnp.float32) / 7.5)


@functools.partial(jax.custom_vjp, nondiff_argnums=(3, 4))
def head_loss(x_ND: Array, w_VD: Array, targets_N: Array, c: Config, T: int) -> Array:
    """[fp8-head] Softcapped cross-entropy over all V columns, summed over N tokens, divided by T;
    arXiv:2209.05433, record 19. In chunks of tokens, so that [N, V] logits never exist, with both
    gradients computed while logits are at hand; the compiler drops them where nobody asks."""
    return head_loss_forward(x_ND, w_VD, targets_N, c, T)[0]


def head_loss_forward(x_ND: Array, w_VD: Array, targets_N: Array, c: Config, T: int) -> tuple:
    w8_VD = quantize(w_VD, c.w_scale, c.head_forward)
    w8_DV = w8_VD.T  # once, for all chunks: a float8 product wants the summed axis last

    def one_chunk(dw, chunk):
        x, targets = chunk
        x8 = quantize(x, c.x_scale, c.head_forward)
        z = matmul(x8, w8_VD, (1, 1), c.x_scale * c.w_scale, c.compute, None)
        total = jnp.exp(softcap(z)).sum(axis=1, keepdims=True)  # bounded: no maximum to subtract
        picked = jnp.take_along_axis(z, targets[:, None], axis=1, mode="promise_in_bounds")
        loss = (jnp.log(total) - softcap(picked)).sum() / T
        # Without the barrier XLA keeps exp in float32 from the sum to its second use here.
        z, total = lax.optimization_barrier((z, total))
        s, hit = softcap(z), lax.broadcasted_iota(jnp.int32, z.shape, 1) == targets[:, None]
        dz = (jnp.exp(s) / total - hit) * s * (30 - s) / (30 * 7.5 * T)
        g8 = quantize(dz, c.g_scale, c.head_backward)
        dx = matmul(g8, w8_DV, (1, 1), c.g_scale * c.w_scale, c.compute, "highest")
        return dw + matmul(g8, x8, (0, 0), c.g_scale * c.x_scale, "float32", "highest"), (loss, dx)

    chunks = x_ND.reshape(-1, c.head_chunk, c.D), targets_N.reshape(-1, c.head_chunk)
    dw_VD, (losses, dx) = lax.scan(one_chunk, jnp.zeros_like(w_VD, jnp.float32), chunks)
    return losses.sum(), (dx.reshape(x_ND.shape), dw_VD)


head_loss.defvjp(
    head_loss_forward,
    lambda c, T, grads, g: ((grads[0] * g).astype(grads[0].dtype), grads[1] * g, None),
)


# ---- Optimizer -----------------------------------------------------------------------------------
def orthogonalize(G_NRC: Array, dtype: str) -> Array:
    """[muon] Newton-Schulz: five steps push every singular value of each matrix to about 1.
    Quintic of Jordan et al. 2024, kellerjordan.github.io/posts/muon."""
    X = G_NRC.mT if (tall := G_NRC.shape[-2] > G_NRC.shape[-1]) else G_NRC
    X = (X / (jnp.linalg.norm(X, axis=(-2, -1), keepdims=True) + 1e-7)).astype(dtype)
    for _ in range(5):
        A = X @ X.mT
        X = 3.4445 * X + (-4.7750 * A + 2.0315 * A @ A) @ X
    return (X.mT if tall else X).astype(jnp.float32)


def scale_by_muon(c: Config) -> optax.GradientTransformation:
    """Nesterov momentum, then orthogonalization, of banks of whole matrices [G, k, R, C]."""
    decay_at = optax.linear_schedule(0.85, 0.95, c.momentum_steps)

    def update(grads, state, params=None):
        count, momentum = state
        decay = decay_at(count)
        momentum = jax.tree.map(lambda b, g: b + (1 - decay) * (g - b), momentum, grads)
        nesterov = jax.tree.map(lambda b, g: g + decay * (b - g), momentum, grads)
        updates = jax.tree.map(lambda u: orthogonalize(u, c.compute), nesterov)
        return updates, (count + 1, momentum)

    return optax.GradientTransformation(
        lambda params: (jnp.zeros([], jnp.int32), optax.tree.zeros_like(params)), update
    )


def optimizer(c: Config) -> optax.GradientTransformation:
    """Each row of the table by its own rule and at its own rate, under one schedule."""
    rows = table(c)
    rules = dict(adam=optax.scale_by_adam(0.8, 0.95, eps=1e-10), muon=scale_by_muon(c))
    schedule = optax.linear_schedule(1.0, 0.1, c.cooldown * c.steps, (1 - c.cooldown) * c.steps)

    def rate(row: Leaf, update: Array) -> Any:
        if row.optimizer == "adam":
            return row.rate
        start = lax.axis_index("fsdp") * update.shape[1]  # of the matrices that this device owns
        return lax.dynamic_slice_in_dim(row.rate, start, update.shape[1], axis=1)

    return optax.chain(
        optax.partition(rules, {name: row.optimizer for name, row in rows.items()}),
        optax.stateless(lambda updates, _: {k: rate(rows[k], u) * u for k, u in updates.items()}),
        optax.scale_by_learning_rate(schedule),
    )


# ---- Step ----------------------------------------------------------------------------------------
class State(NamedTuple):
    params: dict[str, Array]
    optimizer: Any
    ahead: Array  # params["embed"], whole and in c.compute, for the next step: replace both or none


def begin(params: dict[str, Array], c: Config) -> State:
    ahead = jnp.array(params["embed"], c.compute)  # a copy even in float32: both are donated
    return State(params, optimizer(c).init(params), ahead)


def initial_state(seed: Array, c: Config) -> State:
    key, rows = jax.random.key(seed), enumerate(table(c).items())
    params = {name: row.init(jax.random.fold_in(key, i), row.shape) for i, (name, row) in rows}
    return begin(params, c)


def state_shapes(c: Config, mesh: Mesh) -> State:
    """Shape and sharding of each leaf: its parameter's row is found by the name on its path."""
    rows, state = table(c), jax.eval_shape(functools.partial(initial_state, c=c), np.uint32(0))

    def leaf(path, x):
        spec = next((rows[key.key].spec for key in path if getattr(key, "key", None) in rows), P())
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(mesh, spec))

    return jax.tree.map_with_path(leaf, state)


def make_state(c: Config, mesh: Mesh) -> State:
    """Freshly initialised from c.seed: the same numbers on any number of devices."""
    shardings = jax.tree.map(lambda x: x.sharding, state_shapes(c, mesh))
    return jax.jit(initial_state, static_argnums=1, out_shardings=shardings)(np.uint32(c.seed), c)


def at_once(most: int, rows: int) -> int:
    """Of the rows of a device, as many as divide them into equal turns, at most `most`."""
    return max(n for n in range(1, min(most, rows) + 1) if rows % n == 0)


def train_step(state: State, tokens_BT: Array, c: Config, window: int) -> tuple[State, Array]:
    """One update, from this device's share of the sequences; the loss is the mean of all."""
    w, scatter = jax.vjp(functools.partial(gather, c=c), state.params)
    w["embed"] = lax.pcast(state.ahead, "fsdp", to="varying").astype(jnp.float32)
    turn = functools.partial(jax.value_and_grad(loss_fn), w, c=c, window=window)
    turns = tokens_BT.reshape(-1, at_once(c.in_flight, len(tokens_BT)), c.T + 1)
    zero = jnp.zeros_like(tokens_BT[0, 0], jnp.float32), jax.tree.map(jnp.zeros_like, w)
    (loss, grads), _ = lax.scan(lambda a, t: (jax.tree.map(jnp.add, a, turn(t)), None), zero, turns)
    (grads,) = scatter(jax.tree.map(lambda g: g / c.sequences, grads))
    updates, opt = optimizer(c).update(grads, state.optimizer, state.params)
    params = optax.apply_updates(state.params, updates)
    embed = params["embed"].astype(c.compute)  # travels while Muon works
    ahead = lax.all_gather(embed, "fsdp", tiled=True, to="invarying")
    return State(params, opt, ahead), lax.psum(loss, "fsdp") / c.sequences


def val_step(params: dict[str, Array], tokens_BT: Array, c: Config, window: int) -> Array:
    """Mean loss of 8 sequences, with as many tokens at once as in training and no FP8."""
    c = dataclasses.replace(c, head_forward=c.compute, head_backward=c.compute)
    count = at_once(max(1, c.in_flight * c.T // c.val_T), len(tokens_BT))
    w, turns = gather(params, c), tokens_BT.reshape(-1, count, c.val_T + 1)
    losses = lax.map(lambda tokens: loss_fn(w, tokens, c, window), turns)
    return lax.psum(losses.sum(), "fsdp") / SHARES


def compile_stage(kind: str, window: int, c: Config, mesh: Mesh) -> jax.stages.Compiled:
    """The program of a "train" or "val" stage, from shapes: no batch is spent, no state touched."""
    train, state, data = kind == "train", state_shapes(c, mesh), P("fsdp")
    step, first = (train_step, state) if train else (val_step, state.params)
    rows, T = c.batch(kind)
    step = functools.partial(step, c=c, window=window)
    specs = jax.tree.map(lambda x: x.sharding.spec, first)
    outs = (specs, P()) if train else P()
    step = jax.shard_map(step, mesh=mesh, in_specs=(specs, data), out_specs=outs)
    tokens = jax.ShapeDtypeStruct((rows, T + 1), "int32", sharding=NamedSharding(mesh, data))
    program = jax.jit(step, donate_argnums=0 if train else ()).lower(first, tokens)
    return program.compile(GPU_OPTIONS if mesh.devices.flat[0].platform == "gpu" else None)


# ---- Data ----------------------------------------------------------------------------------------
def open_shard(path: Path) -> np.memmap | str:
    """The tokens of a file in llm.c's format (256 int32: magic, version, count; then uint16, all
    little-endian), or what is wrong with its header or size."""
    try:
        if not path.is_file():
            return "is no file" if os.path.lexists(path) else "is missing"
        if (size := path.stat().st_size) < HEADER:
            return f"is no token shard: {size} bytes hold no header"
        magic, version, count = np.fromfile(path, "<i4", 3).tolist()
        if (magic, version) != (20240520, 1) or count <= 0:
            found = f"magic {magic}, version {version}, {count} tokens"
            return f"is no token shard (llm.c's 20240520, version 1): its header says {found}"
        if size != HEADER + 2 * count:
            return f"has {size} bytes where its header promises {HEADER + 2 * count}"
        return np.memmap(path, "<u2", "r", offset=HEADER, shape=(count,))
    except OSError as error:
        return f"cannot be read: {error.strerror}"


def read_folder(folder: Path) -> tuple[dict[str, Any], dict[str, list[Path]]] | str:
    """What MANIFEST.json says, which the scripts of data/ write (vocab, eot and, of every file, its
    sha256; {} if there is none), and the shards of each split in order: those there are and those
    it says there are. Or what is wrong with the folder."""
    about, names = {}, set()
    try:
        names |= {path.name for path in folder.iterdir()} if folder.exists() else set()
        if "MANIFEST.json" in names:
            about = json.loads((folder / "MANIFEST.json").read_bytes())
            vocab, eot = about["vocab"], about["eot"]
            if not (type(vocab) is type(eot) is int and 0 <= eot < vocab <= 65536 and all(
                re.fullmatch("[0-9a-f]{64}", file["sha256"]) and Path(name).name == name
                for name, file in about["files"].items()
            )):  # fmt: skip
                raise ValueError("no such manifest is ours")
            names |= about["files"].keys()
    except OSError as error:
        return f"cannot be read: {error}"
    except Exception:  # it may hold anything
        return "has a broken MANIFEST.json; get the data again"
    found = [re.fullmatch(r"([^.].*)_(train|val)_[^_]*[.]bin", name) for name in sorted(names)]
    if len(sets := {shard[1] for shard in found if shard}) > 1:
        return f"has shards of several sets: {', '.join(sorted(sets))}; give each its own folder"
    return about, {split: [folder / shard[0] for shard in found if shard and shard[2] == split]
                   for split in ("train", "val")}  # fmt: skip


def misnamed(paths: list[Path], i: int) -> str | None:
    """What is wrong with the name of the i-th shard: six digits, from 0 or 1 on, without a gap."""
    row = re.fullmatch(r"(.*_)([0-9]{6})[.]bin", paths[0].name)
    expected = f"{row[1]}{min(int(row[2]), 1) + i:06}.bin" if row else "a name like _000001.bin"
    if paths[i].name != expected:
        return f"{expected} is missing, {paths[i].name} stands in its place"
    return None


def steps_in(shard: np.ndarray, rows: int, T: int) -> int:
    """Whole steps of (rows, T) tokens; as upstream, a shard's tail is dropped."""
    return max(0, (len(shard) - 2) // (rows * T))


def inspect(shard: np.memmap, T: int, eot: int) -> dict[str, Any]:
    """What one pass over every byte of a shard finds."""
    path, largest, documents, most = Path(shard.filename), 0, 0, 0
    sha, piece = hashlib.sha256(np.fromfile(path, np.uint8, HEADER)), T * max(1, 2**22 // T)
    for start in range(0, len(shard), piece):
        tokens = np.array(shard[start : start + piece])
        sha.update(tokens)
        sequences = np.flatnonzero(tokens == eot) // T
        largest = max(largest, int(tokens.max()))
        documents += len(sequences)
        most = max(most, int(np.bincount(sequences, minlength=1).max()))
    return dict(file=path.name, bytes=path.stat().st_size, sha256=sha.hexdigest(),
                tokens=len(shard), documents=documents, largest_token=largest,
                documents_in_sequence=most)  # fmt: skip


def wrong(found: dict[str, Any], about: dict[str, Any], vocab: int, eot: int) -> str | None:
    """What is wrong with a shard in which `found` was found, where MANIFEST.json says `about`."""
    listed, sha, largest = {}, found["sha256"], found["largest_token"]
    if about and not (listed := about["files"].get(found["file"])):
        return "is not in MANIFEST.json"
    if listed and listed["sha256"] != sha:
        return f"has sha256 {sha}, but in MANIFEST.json {listed['sha256']}; get it again"
    if largest >= vocab:
        return f"has token {largest}; --vocab is {vocab}"
    if not found["documents"] and listed.get("documents") != 0:
        return f"has no token {eot}, which starts a document; is --eot right?"
    return None


def find_data(c: Config) -> list[np.memmap]:
    """The shards that the run reads, validation last; exits 2 at the first thing wrong in folder,
    names, headers, sizes: before anything compiles."""
    folder, shards = Path(c.data), []
    if isinstance(known := read_folder(folder), str):
        refuse(f"{folder} {known}")
    about, splits = known
    if about and (about["vocab"] > c.vocab or about["eot"] != c.eot):
        refuse(f"{folder}: its tokens need --vocab {about['vocab']} --eot {about['eot']}")
    for split, need in ("train", c.steps), ("val", c.val_steps):
        paths, found = splits[split], 0
        for i, path in enumerate(paths if split == "train" else paths[:1]):
            fault = misnamed(paths, i)
            shard = open_shard(path)
            if fault or isinstance(shard, str):
                refuse(f"{folder}: {fault}" if fault else f"{path} {shard}; get it again")
            shards.append(shard)
            found += steps_in(shard, *c.batch(split))
            if found >= need:
                break
        if found < need:
            batch = math.prod(c.batch(split))
            each = found / len(paths) if found else max(1, (10**8 - 2) // batch)
            count = math.ceil(need / each) if split == "train" else 1
            fewer = f"--steps {found}" if split == "train" else f"--val_tokens {found * batch}"
            own = "get more (data/README.md)" + f", or add {fewer} to what you ran" * (found > 0)
            ours = {"data/source_code": "run python data/source_code.py",
                    "data/fineweb10B": f"run python data/cached_fineweb10B.py {count}"}  # fmt: skip
            refuse(f"{folder.absolute()}: {split} shards hold {found} of {need} steps; "
                   f"{ours.get(str(folder), own)}")  # fmt: skip
    return shards


def check_contents(c: Config, contents: list[dict]) -> None:
    """Exits 2 at the first thing wrong in what inspect found in the shards of find_data."""
    folder = Path(c.data)
    known = read_folder(folder)
    about = {"files": {}} if isinstance(known, str) else known[0]
    for found in contents:
        name, crowd = found["file"], found["documents_in_sequence"]
        if fault := wrong(found, about, c.vocab, c.eot):
            refuse(f"{folder / name} {fault}")
        if crowd >= 4096:
            refuse(f"{name}: {crowd} documents start in one sequence, of which 4095 can be kept "
                   f"apart; add a smaller {'--val_T' if '_val_' in name else '--T'}")  # fmt: skip
        if sum(found["sha256"] == other["sha256"] for other in contents) > 1:
            refuse(f"{folder}: {name} is there twice, under another name")


def stream(
    shards: list[np.ndarray], rows: int, T: int, steps: int, start: tuple[int, int] = (0, 0)
) -> Iterator[np.ndarray]:
    """Consecutive (rows, T + 1) int32 steps over the shards in order, no shuffle, no repetition,
    from start on: (shard, token); the i-th step of a shard stands at token i * rows * T."""
    batch, (first, token) = rows * T, start
    rest = [shards[first][token:], *shards[first + 1 :]]
    starts = ((shard, i * batch) for shard in rest for i in range(steps_in(shard, rows, T)))
    for _, (shard, at) in zip(range(steps), starts, strict=False):
        tokens = shard[at : at + batch + 1].astype(np.int32)
        yield np.lib.stride_tricks.sliding_window_view(tokens, T + 1)[::T]


def on_devices(steps: Iterable[np.ndarray], mesh: Mesh, ahead: int = 2) -> Iterator[Array]:
    """Copy `ahead` steps early: device_put returns at once, so the copy hides behind a step."""
    sharding, queue = NamedSharding(mesh, P("fsdp")), collections.deque()
    for step in steps:
        queue.append(jax.device_put(step, sharding))
        if len(queue) > ahead:
            yield queue.popleft()
    yield from queue


# ---- Log -----------------------------------------------------------------------------------------
class Log:
    """logs/<run>.txt, written line by line: the source, a line of 100 =, facts as `name json`
    (what it takes to run it again, no secrets), validations in upstream's grammar, RESULT json."""

    def __init__(self, preset: str, c: Config, devices: list[jax.Device], argv: list[str]):
        name = time.strftime("%Y-%m-%dT%H-%M-%S_", time.gmtime()) + secrets.token_hex(4)
        self.path = Path("logs", f"{name}.txt")
        self.path.parent.mkdir(exist_ok=True)
        self.file = self.path.open("x", buffering=1, encoding="utf-8", newline="\n")
        self.file.write(SOURCE + "=" * 100 + "\n")
        steers = re.compile("(?!.*(TOKEN|KEY|SECRET|PASS))(JAX|XLA|LIBTPU|TPU|CUD|NVI|NCCL|TF_CPP)")
        home, ask = str(Path.home()), subprocess.getoutput
        packages = {module.__name__: module.__version__ for module in (jax, np, optax)}
        self.facts(
            versions=dict(packages, python=sys.version, backend=devices[0].client.platform_version),
            devices=[device.device_kind for device in devices],
            driver=ask("nvidia-smi --query-gpu=driver_version --format=csv,noheader 2>/dev/null"),
            environment={k: v.replace(home, "~") for k, v in os.environ.items() if steers.match(k)},
            git=dict(revision=ask("git rev-parse HEAD 2>/dev/null"),
                     changes=ask("git status --short 2>/dev/null")),
            argv=argv, seed=c.seed, config=dict(preset=preset, **dataclasses.asdict(c)),
            parameters={name: math.prod(row.real) for name, row in table(c).items()},
        )  # fmt: skip

    def line(self, text: str) -> None:
        print(text, flush=True)
        self.file.write(text + "\n")

    def facts(self, **facts: Any) -> None:
        self.file.writelines(f"{name} {json.dumps(value)}\n" for name, value in facts.items())


class Clock:
    """Seconds of training, and the live line, on stderr, about the newest step that is done."""

    def __init__(self, c: Config):
        self.c, self.queue = c, collections.deque()
        self.seconds, self.started, self.shown = 0.0, time.perf_counter(), 0.0
        self.every, self.form = (0.2, "{:64}\r") if sys.stderr.isatty() else (10, "{}\n")

    def start(self) -> None:
        self.started = time.perf_counter()

    def stop(self, pending: Any) -> None:
        """Wait for the devices, so that queued work is on the bill; show most of it go by."""
        while len(self.queue) > 2:
            time.sleep(0.01)
            self.show()
        jax.block_until_ready(pending)
        self.queue.clear()
        self.seconds += time.perf_counter() - self.started

    def show(self, *queued: tuple[int, Array]) -> None:
        """Add (step, loss) to what is queued, print what is done; this never waits for a device."""
        self.queue.extend(queued)
        done, now = None, time.perf_counter()
        while self.queue and self.queue[0][1].is_ready():
            done = self.queue.popleft()
        if done is None or now < self.shown + self.every:
            return
        self.shown, (step, loss), seconds = now, done, self.seconds + now - self.started
        left = time.strftime("%H:%M:%S", time.gmtime(seconds / step * (self.c.steps - step)))
        rate = f"{step * math.prod(self.c.batch('train')) / seconds:,.0f} tokens/s"
        text = f"step {step}/{self.c.steps}  loss {loss:.3f}  {rate}  {left} left"
        print(self.form.format(text), end="", file=sys.stderr, flush=True)


# ---- Run -----------------------------------------------------------------------------------------
def attention_errors(c: Config) -> dict[str, float]:
    """Of attention by c.attention, forward and backward, on 512 tokens of some documents: how far
    the worst token of a head is from an explicit mask in float32, against the size of a token."""
    T, W, i = 512, 32, jnp.arange(512)  # a short window: one key too many or too few shows most
    first = jnp.zeros((1, T), bool).at[0, np.array([37, 200, 201, 350])].set(True)
    document, (*_, code_q, code_k) = jnp.cumsum(first), place(first, c.D // c.H, c.compute)
    seen = (i <= i[:, None]) & (i > i[:, None] - W) & (document == document[:, None])

    def kernel(q, k, v):
        q, k = rotate(q, 1.0, 0.0, code_q), rotate(k, 1.0, 0.0, code_k)  # the code, no rotation
        return attend(q, k, v, W, c.attention)

    def mask(q, k, v):
        scores = 0.12 * jnp.einsum("BTHK,BSHK->BHTS", q[..., :-4], k[..., :-4])
        weights = jax.nn.softmax(jnp.where(seen, scores, -jnp.inf))
        return jnp.einsum("BHTS,BSHK->BTHK", weights, v)

    def error(a, b):
        worst, size = jnp.square(a - b).sum(axis=-1).max(), jnp.square(b).sum(axis=-1).mean()
        return jnp.sqrt(worst / size)

    @jax.default_matmul_precision("highest")
    def results(inputs):
        *qkv, g = inputs
        y, pull = jax.vjp(kernel, *qkv)
        exact, pull_exact = jax.vjp(mask, *(x.astype("float32") for x in qkv))
        return jax.tree.map(error, (y, *pull(g)), (exact, *pull_exact(g.astype("float32"))))

    inputs = jax.random.normal(jax.random.key(0), (4, 1, T, c.H, c.D // c.H), c.compute)
    errors = [round(float(error), 4) for error in jax.jit(results)(inputs)]
    return dict(zip(("y", "dq", "dk", "dv"), errors, strict=True))


def check_attention(c: Config, log: Log) -> None:
    """On GPUs, on the first of them, before anything else: cuDNN is silent about known faults."""
    errors = attention_errors(c)
    log.facts(attention=errors)
    if not all(error < 0.1 for error in errors.values()):  # nor NaN
        refuse(f"attention by {c.attention} is wrong on this machine, errors {errors}; install the "
               "versions in requirements.txt, or another driver")  # fmt: skip


def smaller(c: Config, devices: int) -> str:
    """What to try where memory is short: another split of the same tokens."""
    rows = c.sequences // devices
    if (now := at_once(c.in_flight, rows)) > 1:
        return f"--in_flight {at_once(now // 2, rows)}"
    if c.head_chunk >= 4096:
        return f"--head_chunk {c.head_chunk // 4}"
    if c.T % 2 or 32 * c.T < c.val_T:  # from here on validation takes more, whatever T is
        return "more devices"
    chunk = math.gcd(c.head_chunk, c.T // 2)
    other = f" --head_chunk {chunk}" * (chunk != c.head_chunk)
    return f"--T {c.T // 2} --sequences {2 * c.sequences}{other}"


def prepare(c: Config, mesh: Mesh, shards: list[np.memmap], log: Log) -> dict[tuple, Callable]:
    """Compile every stage, while every byte of the data is read; then run each program once, on a
    state and tokens that are thrown away, since a first call loads it and connects the devices."""
    steps = [("train", s) for s in range(c.steps)]
    steps += [("val", s) for s in range(c.steps + 1) if c.validates(s)]
    stages = dict.fromkeys((kind, c.window_at(s)) for kind, s in steps)
    print(f"compiling {len(stages)} programs, reading {len(shards)} shards ...", flush=True)
    began, pool = time.perf_counter(), ThreadPoolExecutor(max(2, (os.cpu_count() or 2) // 2))
    sizes = [c.T] * (len(shards) - 1) + [c.val_T]
    reads = [pool.submit(inspect, shard, T, c.eot) for shard, T in zip(shards, sizes, strict=True)]
    jobs = {stage: pool.submit(compile_stage, *stage, c, mesh) for stage in stages}
    try:
        contents = [read.result() for read in reads]
        check_contents(c, contents)
        programs = {stage: job.result() for stage, job in jobs.items()}
    finally:
        pool.shutdown(cancel_futures=True)
    log.facts(data=contents)
    state = make_state(c, mesh)
    for kind, window in stages:
        rows, T = c.batch(kind)
        (tokens,) = on_devices([np.zeros((rows, T + 1), np.int32)], mesh)
        first = state if kind == "train" else state.params
        out = jax.block_until_ready(programs[kind, window](first, tokens))
        state = out[0] if kind == "train" else state
    log.facts(compile=dict(seconds=time.perf_counter() - began))
    return programs


def train(c: Config, mesh: Mesh, programs: dict, shards: list, log: Log) -> tuple[dict, dict]:
    """The run, from fresh weights: trained ones, and facts. MFU counts the matrix products of both
    passes, but attention's, at the dense bf16 peak; memory is a device's, on CPUs the process's."""
    state, clock = jax.block_until_ready(make_state(c, mesh)), Clock(c)
    batches = on_devices(stream(shards[:-1], *c.batch("train"), c.steps), mesh)
    for step in range(c.steps + 1):
        if c.validates(step):
            clock.stop(state)
            program, ms = programs["val", c.window_at(step)], 1e3 * clock.seconds
            tokens = on_devices(stream(shards[-1:], *c.batch("val"), c.val_steps), mesh)
            val_loss = float(np.mean([float(program(state.params, batch)) for batch in tokens]))
            log.line(f"step:{step}/{c.steps} val_loss:{val_loss:.4f} train_time:{ms:.0f}ms "
                     f"step_avg:{ms / max(step, 1):.2f}ms")  # fmt: skip
            if not math.isfinite(val_loss):
                log.line("NON-FINITE: the loss is no number, the run is void; lower the rates")
                sys.exit(3)
            if val_loss <= c.target or step == c.steps:
                break
            clock.start()
        state, loss = programs["train", c.window_at(step)](state, next(batches))
        clock.show((step + 1, loss))
    tokens, devices = step * math.prod(c.batch("train")), list(mesh.devices.flat)
    peaks = dict(H100=989e12, H200=989e12, A100=312e12)
    peak = next((f for name, f in peaks.items() if name in devices[0].device_kind), None)
    flops = 6 * tokens * sum(math.prod(table(c)[name].real) for name in ("attn", "mlp", "head"))
    memory = max((d.memory_stats() or {}).get("peak_bytes_in_use", 0) for d in devices)
    unit = 1 if sys.platform == "darwin" else 1024  # bytes, of what getrusage counts
    return state.params, dict(
        reason="target reached" if val_loss <= c.target else "end of schedule", val_loss=val_loss,
        target=c.target, steps=step, tokens=tokens, seed=c.seed, devices=len(devices),
        train_time_ms=ms, mfu=peak and flops / clock.seconds / len(devices) / peak,
        peak_memory_bytes=memory or unit * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss,
    )  # fmt: skip


def main(argv: list[str]) -> None:
    preset, c = parse_config(argv)
    if "XLA_PYTHON_CLIENT_MEM_FRACTION" not in os.environ:  # its old name; JAX refuses both
        os.environ.setdefault("XLA_CLIENT_MEM_FRACTION", "0.92")  # of a GPU; JAX takes 0.75
    devices, c = fit_devices(preset, c)
    shards = find_data(c)
    log = Log(preset, c, devices, argv)
    mesh = Mesh(np.array(devices), ("fsdp",), axis_types=(AxisType.Auto,))
    on = f"{preset} on {len(devices)} x {devices[0].device_kind}"
    print(f"{on}, head in {c.head_forward}, log in {log.path}")
    try:
        if c.attention == "cudnn":
            check_attention(c, log)
        programs = prepare(c, mesh, shards, log)
        params, result = train(c, mesh, programs, shards, log)
    except KeyboardInterrupt:
        print(file=sys.stderr)  # leave the live line
        log.line("INTERRUPTED")
        sys.exit(130)
    except jax.errors.JaxRuntimeError as error:
        if not re.search("RESOURCE_EXHAUSTED|OUT_OF_MEMORY|out of memory|ALLOC_FAILED", str(error)):
            raise
        log.line(f"OUT OF MEMORY: {str(error).splitlines()[0]}")
        advice = smaller(c, len(devices))
        refuse(f"not enough memory on {devices[0].device_kind}: add {advice} to what you ran")
    part = log.path.with_suffix(".part")
    try:
        with part.open("wb") as file:  # numbers under the names of the table, no padding
            np.savez(file, config=json.dumps(dataclasses.asdict(c)), **unpad(params, c))
        result["weights"] = part.replace(log.path.with_suffix(".npz")).name
    finally:  # neither a full disk nor Ctrl-C costs the result of a run that came to its end
        log.line(f"RESULT {json.dumps(result)}")


if __name__ == "__main__":
    main(sys.argv[1:])
