"""Train a GPT-2-small-class model to 3.28 validation loss on FineWeb: one file, JAX, 8xH100.

Run     ./run.sh, or python train_gpt.py [record | tiny] [--field value ...]: see --help
Dims    B sequence  T position  D model  E output  H head  K head channel  F hidden  V row of table
        N token, matrix, microbatch  G group of 8 matrices  R row  C column; x residual stream
Source  record 21 of modded-nanogpt; README.md says where we differ, and what was measured where
"""

import argparse
import ast
import collections
import dataclasses
import functools
import hashlib
import inspect
import json
import math
import os
import re
import secrets
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple
from zlib import crc32

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import Array, P, lax
from jax.sharding import AxisType, Mesh, NamedSharding

SOURCE = Path(__file__).read_bytes().decode()  # now: the file may be edited while a run goes on
GROUP = 8  # matrices in a group of a bank, and sequences in a validation step
PLAN_WORD = r"([LS]|-(?!v))(?:v(\d+))?(?:<(\d+))?"
OPTIONS = dict(  # of the compiler, by platform; they overrule XLA_FLAGS
    # cuBLAS adds the residual stream and reads weights in place; each gradient leaves when made.
    gpu=dict(xla_gpu_enable_triton_gemm=False, xla_gpu_reduce_scatter_combine_threshold_bytes=0),
    # YNN's kernels are slower than those that they replace, until jax 0.11.
    cpu=dict(xla_cpu_experimental_ynn_fusion_type="") if jax.__version_info__ < (0, 11) else {},
)


# ---- Config --------------------------------------------------------------------------------------
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
    batch: int = 8              # sequences in a step, on all devices together
    microbatch: int = 1         # sequences that a device runs at once, at most (memory)
    head_chunk: int = 8192      # tokens whose logits exist at once (memory); divides T and val_T
    window: int = 1728          # long attention window at the last step, tokens
    window_block: int = 128     # tokens that windows are rounded up to; a short one is half a long
    compute: str = "bfloat16"              # format of activations and gathered weights
    head_forward: str = "float8_e4m3fn"    # format of the head's operands
    head_backward: str = "float8_e5m2"     # format of the logits' gradient
    # What a tensor is multiplied by before its cast to FP8, and divided by after the product, so
    # that it fills the format's range; powers of two lose nothing. [fp8-head] says what is cast.
    x_scale: float = 2.0        # of the head's input: normalised, a channel is about 1, below D**.5
    w_scale: float = 512.0      # of the head's weight: from 0 to some hundredths
    g_scale: float = 4194304.0  # of the logits' gradient: at most 1 / (batch * T)
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
    save: int = 1               # 0: do not keep the weights (1.1 GB for the record)
    seed: int = -1              # of the initial weights; -1: a fresh one from the system
    # fmt: on

    @property
    def layers(self) -> list[tuple[str, int | None, int | None]]:
        """Of each layer: window (L, S or -), value table, earlier layer whose output it adds."""
        words = [re.fullmatch(PLAN_WORD, word).groups() for word in self.plan.split()]
        return [(window, *(n and int(n) for n in numbers)) for window, *numbers in words]

    def window_at(self, step: int) -> int:
        """Long window in tokens: linear in the step, rounded up to blocks."""
        blocks = -(-self.window * step // (self.steps * self.window_block))
        return self.window_block * max(1, blocks)

    def validates(self, step: int) -> bool:
        return step % self.val_every == 0 or step == self.steps

    def for_validation(self) -> "Config":
        """All of val_tokens; at once as many as in training, or one sequence; no FP8."""
        at_once = max(1, self.microbatch * self.T // self.val_T)
        new = dict(T=self.val_T, batch=GROUP, steps=self.val_tokens // (GROUP * self.val_T))
        new |= dict(microbatch=at_once, head_forward=self.compute, head_backward=self.compute)
        return dataclasses.replace(self, **new)


PRESETS = dict(record=Config(), tiny=Config(
    plan="Lv0 S L S<2 -<1 Lv0<0", D=128, H=2, F=512, vocab=257, eot=256, T=256, microbatch=8,
    val_T=1024, head_chunk=256, window=192, window_block=64, steps=500, cooldown=0.7, val_every=50,
    muon_lr=0.02, embed_lr=0.3, data="data/source_code", val_tokens=65536, target=1.37,
))  # fmt: skip


# ---- Parameters ----------------------------------------------------------------------------------
class Param(NamedTuple):
    """All there is to know about one parameter; padding is stored but is no part of the model."""

    shape: tuple[int, ...]  # without padding; a bank's is [N, R, C]
    stored_shape: tuple[int, ...]  # of the float32 master copy; a bank's is [G, 8, R, C]
    spec: P  # sharding of the master copy and of its optimizer state
    init: Callable  # (key, stored shape) -> array
    optimizer: str  # a rule of optimizer(): "muon" for banks, "adam"
    lr: Any  # learning rate; in a bank one for each matrix, [G, 8, 1, 1]
    layers: list[bool] = []  # whether a layer owns an equal part of it; []: no layer does


def param_table(c: Config) -> dict[str, Param]:
    """One row per parameter. A new technique adds its row here and its line in the model."""
    D, F, V, full = c.D, c.F, -(-c.vocab // 128) * 128, jax.nn.initializers.constant
    windows, tables, skips = zip(*c.layers, strict=True)
    every, attends = [True for _ in windows], [window != "-" for window in windows]
    mixes, skips = [i is not None for i in tables], [i is not None for i in skips]
    normal, n = jax.nn.initializers.normal(1.0), len({*tables} - {None})
    b, m, tall = 0.5 * (3 / D) ** 0.5, c.muon_lr, max(1, F / D) ** 0.5
    scalars = lambda on, x: Param((sum(on),), (sum(on),), P(), full(x), "adam", c.scalar_lr, on)
    # fmt: off
    return dict(
        embed  = Param((c.vocab, D), (V, D), P("fsdp"), normal, "adam", c.embed_lr),
        values = Param((n, c.vocab, D), (n, V, D), P(None, "fsdp"), normal, "adam", c.embed_lr),
        attn   = bank(D, D, attends, (b, b, b, 0), (m, m, m, m)),  # q, k, v, o
        mlp    = bank(F, D, every, (b, 0), (m * tall, m)),         # fc, and proj transposed
        head   = Param((V, D), (V, D), P("fsdp"), full(0.0), "adam", c.head_lr),
        skip_weights  = scalars(skips, 1.0),
        resid_lambdas = scalars(every, 1.0),
        x0_lambdas    = scalars(every, 0.0),
        v_lambdas     = scalars(attends, 0.5),
        ve_lambdas    = scalars(mixes, 0.5),
    )  # fmt: on


def bank(R: int, C: int, layers: list[bool], bounds: tuple, lrs: tuple) -> Param:
    """(R, C) matrices, as many to a layer as there are rates, each uniform within its bound. In
    groups of 8, of which every device holds equally many whole ones: Muon communicates nothing."""
    N = len(lrs) * sum(layers)
    per_matrix = np.zeros((2, -(-N // GROUP) * GROUP), np.float32)  # padding: zeros that never move
    per_matrix[:, :N] = np.tile((bounds, lrs), sum(layers))
    bound, lr = per_matrix.reshape(2, -1, GROUP, 1, 1)
    init = lambda key, shape: bound * jax.random.uniform(key, shape, minval=-1.0)
    return Param((N, R, C), (*lr.shape[:2], R, C), P(None, "fsdp"), init, "muon", lr, layers)


def gather(params: dict[str, Array], c: Config) -> dict[str, Any]:
    """[fsdp] Whole weights by all-gather, a table or a group of matrices at a time, kept for the
    backward pass; the transpose reduce-scatters each gradient to its owner. Sent in c.compute, and
    float32 before and after, so that microbatches add up in float32. ZeRO-2, arXiv:1910.02054."""

    def whole(shard: Array, spec: P) -> Any:
        if spec == P():
            return lax.pcast(shard, "fsdp", to="varying")  # whole already; its transpose is a psum
        if spec[0] is None:
            return [whole(part, P("fsdp")) for part in shard]
        return lax.all_gather(shard.astype(c.compute), "fsdp", tiled=True).astype(jnp.float32)

    weights = {}
    for name, row in param_table(c).items():
        weights[name] = whole(params[name], row.spec)
        if len(row.stored_shape) > len(row.shape):  # a bank: its matrices, without padding
            weights[name] = [m for group in weights[name] for m in group][: row.shape[0]]
    return weights


def deal(weights: dict[str, Any], c: Config) -> list[NamedTuple]:
    """What each layer owns of the rows, under their names: its matrices, or its one scalar."""
    rows = {name: row.layers for name, row in param_table(c).items() if row.layers}
    Layer, dealt = collections.namedtuple("Layer", rows), []
    for name, layers in rows.items():
        stack, n = iter(weights[name]), len(weights[name]) // max(1, sum(layers))
        parts = [[next(stack) for _ in range(n * owns)] for owns in layers]
        dealt.append([part[0] if len(part) == 1 else part for part in parts])
        if left := len([*stack]):
            raise ValueError(f"{left} of {name} are left when {sum(layers)} layers have {n} each")
    return [Layer(*parts) for parts in zip(*dealt, strict=True)]


def unpad(params: dict[str, Array], c: Config) -> dict[str, np.ndarray]:
    """The model alone, in float32: from the stored shapes of the table to its shapes."""
    model = {}
    for name, (shape, stored, *_) in param_table(c).items():
        stacked = np.asarray(params[name]).reshape(-1, *stored[1 + len(stored) - len(shape) :])
        model[name] = stacked[tuple(map(slice, shape))]
    return model


# ---- Model ---------------------------------------------------------------------------------------
def loss_fn(weights: dict[str, Any], tokens_BT: Array, c: Config, window: int) -> Array:
    """This microbatch's part of the batch's mean next-token loss, nats: all parts add up to it.
    weights as from gather, tokens_BT one longer than c.T, window the long one, in tokens."""
    inputs, targets = tokens_BT[:, :-1], tokens_BT[:, 1:]
    tables = (weights["embed"], *weights["values"])  # check_tokens promised: all tokens are in them
    embed, *values = (t.at[inputs].get(mode="promise_in_bounds").astype(c.compute) for t in tables)
    short = c.window_block * max(1, window // c.window_block // 2)
    windows, pos, outputs = {"L": window, "S": short, "-": 0}, positions(inputs == c.eot, c), []
    x = x0 = norm(embed)
    for (reach, table, skip), w in zip(c.layers, deal(weights, c), strict=True):
        # [u-net] Late layers add the output of early ones. modded-nanogpt record 11.
        if skip is not None:
            x = weighted_sum((1.0, x), (w.skip_weights, outputs[skip]))
        x = block(x, x0, None if table is None else values[table], w, windows[reach], pos, c)
        outputs.append(x)
    return head_loss(norm(x).reshape(-1, c.D), weights["head"], targets.reshape(-1), c)


def block(x: Array, x0: Array, ve: Any, w: NamedTuple, window: int, pos: tuple, c: Config) -> Array:
    # [x0] Each layer may fade the residual stream and read the embedding again. Record 9.
    x = weighted_sum((w.resid_lambdas, x), (w.x0_lambdas, x0))
    if window:
        x = x + attention(x, ve, w, window, pos, c)
    return x + mlp(x, w)


def attention(x: Array, ve: Any, w: NamedTuple, window: int, pos: tuple, c: Config) -> Array:
    (B, T, D), (cos, sin, code_q, code_k) = x.shape, pos
    w_q, w_k, w_v, w_o = (matrix.astype(x.dtype) for matrix in w.attn)
    # v's lambda scales its weight, D x D, and not v, T x D: fewer bytes, for its gradient as well.
    w_v = (w.v_lambdas * w_v).astype(w_v.dtype)
    qkv = norm_linear(x, jnp.concatenate((w_q, w_k, w_v)), "input")
    q, k, v = (part.reshape(B, T, c.H, D // c.H) for part in jnp.split(qkv, 3, axis=-1))
    # [qk-norm] Henry et al. 2020, arXiv:2010.04245: scores stay bounded, so the rate can be high.
    q, k = norm_rotate(q, cos, sin, code_q), norm_rotate(k, cos, sin, code_k)
    # [value-embed] v also reads a token table of its own. Zhou et al. 2024, arXiv:2410.17897.
    if ve is not None:
        v = weighted_sum((1.0, v), (w.ve_lambdas, ve.reshape(v.shape)))
    y_BTD = attend(q, k, v, window, c.attention).reshape(B, T, D)
    return jnp.einsum("BTD,ED->BTE", y_BTD, w_o)


def attend(q: Array, k: Array, v: Array, window: int, kernel: str) -> Array:
    # [window] Each query sees `window` keys, itself included. Both arguments, always: without
    # is_causal, cuDNN leaves the right side of a window open and sees the future.
    reach = dict(is_causal=True, local_window_size=(window - 1, 0))
    return jax.nn.dot_product_attention(q, k, v, scale=0.12, implementation=kernel, **reach)


def mlp(x: Array, w: NamedTuple) -> Array:
    fc, proj = (matrix.astype(x.dtype) for matrix in w.mlp)
    # [relu2] So et al. 2021, arXiv:2109.08668.
    hidden = jnp.square(jax.nn.relu(norm_linear(x, fc, "output")))
    return project(hidden, proj)


def inverse_rms(x: Array) -> Array:
    return lax.rsqrt(jnp.mean(jnp.square(x.astype(jnp.float32)), axis=-1, keepdims=True) + 2.0**-23)


def norm(x: Array) -> Array:
    return (x * inverse_rms(x)).astype(x.dtype)


def weighted_sum(*terms: tuple[Any, Array]) -> Array:
    """In float32 and rounded once: in bfloat16, sums would wear the residual stream away."""
    return sum(weight * x.astype(jnp.float32) for weight, x in terms).astype(terms[0][1].dtype)


def positions(starts_BT: Array, c: Config) -> tuple[Array, Array, Array, Array]:
    """Of tokens, which may start documents: cos and sin (T, 1, K / 4), codes (B, T, 1, 4)."""
    # [half-rope] Half of the channels do not rotate; base 1024. modded-nanogpt record 17.
    speed = (1 / 1024) ** jnp.linspace(0, 1, c.D // c.H // 4)
    angle = jnp.arange(starts_BT.shape[1])[:, None, None] * speed
    # [document-mask] Four channels whose product is 256 * (document of k - document of q): 0 within
    # one, to earlier ones a score lower by 30.7 or more: enough for K <= 128. Exact for < 4,096.
    document = jnp.cumsum(starts_BT, axis=1, dtype=jnp.int32)[:, :, None]
    high, low, one = document // 16, document % 16, jnp.ones_like(document)
    code_q = jnp.stack((-4096 * high, -256 * low, 4096 * one, 256 * one), axis=-1)
    code_k = jnp.stack((one, one, high, low), axis=-1)
    return jnp.cos(angle), jnp.sin(angle), code_q.astype(c.compute), code_k.astype(c.compute)


def rotate(x_BTHK: Array, cos: Array, sin: Array, code_BT14: Array) -> Array:
    """Rotates channel pairs (j, j + K/2), and puts the document code into the last four."""
    a, still_a, b, still_b = jnp.split(x_BTHK, 4, axis=-1)
    code = jnp.broadcast_to(code_BT14, (*x_BTHK.shape[:-1], 4))
    parts = a * cos + b * sin, still_a, b * cos - a * sin, still_b[..., :-4], code
    return jnp.concatenate([part.astype(code.dtype) for part in parts], axis=-1)


# ---- Head ----------------------------------------------------------------------------------------
def quantize(x: Array, scale: float, dtype: str) -> Array:
    """Clip first: a float8 cast overflows to NaN or inf where generated GPU code saturates."""
    limit = float(jnp.finfo(dtype).max)
    return jnp.clip(x.astype(jnp.float32) * scale, -limit, limit).astype(dtype)


def matmul(a: Array, b: Array, axes: tuple, scale: float, dtype: str, precision: Any) -> Array:
    """Product over an axis of each, divided by scale; float8 sums keep all bits at "highest"."""
    dims = ((axes[:1], axes[1:]), ((), ()))
    out = lax.dot_general(a, b, dims, precision, preferred_element_type=dtype)
    return out * jnp.asarray(1 / scale, dtype)


def softcap(z: Array) -> Array:
    """[softcap] Logits between 0 and 30: Gemma 2, arXiv:2408.00118; records 18 and 19."""
    return 30 * jax.nn.sigmoid(z.astype(jnp.float32) / 7.5)


def head_loss_forward(x_ND: Array, w_VD: Array, targets_N: Array, c: Config) -> tuple:
    """[fp8-head] Softcapped cross-entropy over all V columns, summed over N tokens and divided by
    those of a batch; arXiv:2209.05433, record 19. In chunks of tokens, so that [N, V] logits never
    exist, with both gradients computed while a chunk's logits z are at hand (the compiler drops
    them where nobody asks)."""
    w8_VD = quantize(w_VD, c.w_scale, c.head_forward)
    w8_DV = w8_VD.T  # once, for all chunks: a float8 product wants the summed axis last

    def one_chunk(dw, chunk):
        x, targets = chunk
        x8 = quantize(x, c.x_scale, c.head_forward)
        z = matmul(x8, w8_VD, (1, 1), c.x_scale * c.w_scale, c.compute, None)
        total = jnp.exp(softcap(z)).sum(axis=1, keepdims=True)  # bounded: no maximum to subtract
        picked = jnp.take_along_axis(z, targets[:, None], axis=1, mode="promise_in_bounds")
        loss = (jnp.log(total) - softcap(picked)).sum() / (c.batch * c.T)
        # Without the barrier XLA keeps exp in float32 from the sum to its second use here.
        z, total = lax.optimization_barrier((z, total))
        # Of -log softmax(s)[target]: dL/ds = softmax(s) - hit; ds/dz = s (30 - s) / (30 * 7.5).
        s, hit = softcap(z), lax.broadcasted_iota(jnp.int32, z.shape, 1) == targets[:, None]
        dz = (jnp.exp(s) / total - hit) * s * (30 - s) / (30 * 7.5 * c.batch * c.T)
        g8 = quantize(dz, c.g_scale, c.head_backward)
        dx = matmul(g8, w8_DV, (1, 1), c.g_scale * c.w_scale, c.compute, "highest")
        return dw + matmul(g8, x8, (0, 0), c.g_scale * c.x_scale, "float32", "highest"), (loss, dx)

    chunks = x_ND.reshape(-1, c.head_chunk, c.D), targets_N.reshape(-1, c.head_chunk)
    dw_VD, (losses, dx) = lax.scan(one_chunk, jnp.zeros_like(w_VD, jnp.float32), chunks)
    return losses.sum(), (dx.reshape(x_ND.shape), dw_VD)


# ---- Gradients by hand ---------------------------------------------------------------------------
def by_hand(forward: Callable, backward: Callable, static: tuple[int, ...] = ()) -> Callable:
    """The function of value forward(...)[0] and gradients backward(forward(...)[1], g)."""
    function = jax.custom_vjp(lambda *arguments: forward(*arguments)[0], nondiff_argnums=static)
    function.defvjp(forward, backward)
    return function


# JAX's own gradients of norms move more bytes. For h = x / rms(x), of D channels, and its gradient,
#     dx = (dh - h sum(dh h) / D) / rms(x):    what of dh lies along h would change x's length only.
def norm_linear_forward(x_BTD: Array, w_ED: Array, project_by: str) -> tuple:
    """y = norm(x) w^T"""
    inverse = inverse_rms(x_BTD)
    # Without the barrier XLA makes h again in the backward pass, from all that x was made of.
    h, inverse = lax.optimization_barrier(((x_BTD * inverse).astype(x_BTD.dtype), inverse))
    y = jnp.einsum("BTD,ED->BTE", h, w_ED)
    return y, (h, inverse, w_ED, y)


def norm_linear_backward(project_by: str, kept: tuple, dy: Array) -> tuple:
    """dh = dy w, dw = dy^T h. sum(dh h) = sum(dy y), which by "output" is free if the kernel that
    makes dy reads y anyway, as that of an elementwise function does; else by "input"."""
    h, inverse, w_ED, y = kept
    dh = jnp.einsum("BTE,ED->BTD", dy, w_ED)
    a, b = dict(output=(dy, y), input=(dh, h))[project_by]
    along = (a.astype(jnp.float32) * b).sum(axis=-1, keepdims=True) / h.shape[-1]
    return ((dh - h * along) * inverse).astype(h.dtype), jnp.einsum("BTE,BTD->ED", dy, h)


def norm_rotate_forward(x_BTHK: Array, cos: Array, sin: Array, code_BT14: Array) -> tuple:
    """y = rotate(norm(x))"""
    inverse = inverse_rms(x_BTHK)
    y = lax.optimization_barrier(rotate(x_BTHK * inverse, cos, sin, code_BT14))
    return y, (x_BTHK, inverse, cos, sin, y)


def norm_rotate_backward(kept: tuple, dy: Array) -> tuple:
    """dh = dy rotated back, and 0 under the code. Rotation keeps inner products, so sum(dh h) is
    sum(dy y) over the channels that hold no code."""
    x, inverse, cos, sin, y = kept
    dy, K = dy.astype(jnp.float32), dy.shape[-1]
    along = jnp.where(jnp.arange(K) < K - 4, dy * y, 0).sum(axis=-1, keepdims=True) / K
    dh = rotate(dy, cos, -sin, jnp.zeros((1, 1, 1, 4)))
    return ((dh - x * inverse * along) * inverse).astype(x.dtype), None, None, None


head_loss = by_hand(head_loss_forward, lambda c, kept, g: (
    (kept[0] * g).astype(kept[0].dtype), kept[1] * g, None), static=(3,))  # fmt: skip
norm_linear = by_hand(norm_linear_forward, norm_linear_backward, static=(2,))
norm_rotate = by_hand(norm_rotate_forward, norm_rotate_backward)
# JAX's own dw of y = x w is dy^T x, transposed: XLA makes one product of that, a slow one on CPUs.
project = by_hand(lambda x, w: (jnp.einsum("BTF,FD->BTD", x, w), (x, w)), lambda kept, dy: (
    jnp.einsum("BTD,FD->BTF", dy, kept[1]), jnp.einsum("BTF,BTD->FD", kept[0], dy)))  # fmt: skip


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
    """Nesterov momentum, then orthogonalization, of arrays of whole matrices [..., R, C]."""
    decay_at = optax.linear_schedule(0.85, 0.95, max(1, c.momentum_steps))

    def update(grads, state, params=None):
        count, momentum = state
        decay = decay_at(count)
        momentum = jax.tree.map(lambda b, g: b + (1 - decay) * (g - b), momentum, grads)
        nesterov = jax.tree.map(lambda b, g: g + decay * (b - g), momentum, grads)
        updates = jax.tree.map(lambda u: orthogonalize(u, c.compute), nesterov)
        return updates, (count + 1, momentum)

    start = lambda params: (jnp.zeros([], jnp.int32), optax.tree.zeros_like(params))
    return optax.GradientTransformation(start, update)


def optimizer(c: Config) -> optax.GradientTransformation:
    """Each row by its own rule (by element, or on whole matrices) and rate, under one schedule."""
    rows = param_table(c)
    if parts := [k for k, r in rows.items() if r.optimizer == "muon" and len(r.stored_shape) < 4]:
        refuse(f"param_table: {parts} are no banks, and muon needs whole matrices on a device")
    rules = dict(adam=optax.scale_by_adam(0.8, 0.95, eps=1e-10), muon=scale_by_muon(c))
    schedule = optax.linear_schedule(1.0, 0.1, c.cooldown * c.steps, (1 - c.cooldown) * c.steps)

    def lr(row: Param, update: Array) -> Any:
        if np.ndim(row.lr) == 0:
            return row.lr
        own = update.shape[1]  # as many matrices of each group as the device owns
        return lax.dynamic_slice_in_dim(row.lr, lax.axis_index("fsdp") * own, own, axis=1)

    return optax.chain(
        optax.partition(rules, {name: row.optimizer for name, row in rows.items()}),
        optax.stateless(lambda updates, _: {k: lr(rows[k], u) * u for k, u in updates.items()}),
        optax.scale_by_learning_rate(schedule),
    )


# ---- Step ----------------------------------------------------------------------------------------
class State(NamedTuple):
    params: dict[str, Array]
    optimizer: Any
    embed: Array  # prefetched: params["embed"] as gather's all-gather sends it, for the next step


def initial_state(seed: Array, c: Config) -> State:
    key, params = jax.random.key(seed), {}
    for name, row in param_table(c).items():  # by name: one row less does not re-seed the others
        params[name] = row.init(jax.random.fold_in(key, crc32(name.encode())), row.stored_shape)
    embed = jnp.array(params["embed"], c.compute)  # a copy even in float32: both are donated
    return State(params, optimizer(c).init(params), embed)


def state_shapes(c: Config, mesh: Mesh) -> State:
    """Shape and sharding of each leaf: its parameter's row is found by the name on its path."""

    def leaf(path, x):
        rows = param_table(c)
        spec = next((rows[key.key].spec for key in path if getattr(key, "key", None) in rows), P())
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(mesh, spec))

    return jax.tree.map_with_path(leaf, jax.eval_shape(lambda: initial_state(np.uint32(0), c)))


def make_state(c: Config, mesh: Mesh) -> State:
    """Freshly initialised from c.seed: the same numbers on any number of devices."""
    shardings = jax.tree.map(lambda x: x.sharding, state_shapes(c, mesh))
    return jax.jit(initial_state, static_argnums=1, out_shardings=shardings)(np.uint32(c.seed), c)


def train_step(state: State, tokens_NBT: Array, c: Config, window: int) -> tuple[State, Array]:
    """One update, from this device's N microbatches, and the loss of the batch of all devices."""
    weights, reduce_scatter = jax.vjp(functools.partial(gather, c=c), state.params)
    weights["embed"] = lax.pcast(state.embed, "fsdp", to="varying").astype(jnp.float32)
    part = functools.partial(jax.value_and_grad(loss_fn), weights, c=c, window=window)
    accumulate = lambda total, tokens: (jax.tree.map(jnp.add, total, part(tokens)), None)
    zero = jnp.zeros_like(tokens_NBT[0, 0, 0], jnp.float32), jax.tree.map(jnp.zeros_like, weights)
    (loss, grads), _ = lax.scan(accumulate, zero, tokens_NBT)
    updates, opt = optimizer(c).update(*reduce_scatter(grads), state.optimizer, state.params)
    params = optax.apply_updates(state.params, updates)
    # All layers wait for the token table. Sent here, it arrives while Muon works.
    embed = lax.all_gather(params["embed"].astype(c.compute), "fsdp", tiled=True, to="invarying")
    return State(params, opt, embed), lax.psum(loss, "fsdp")


def val_step(params: dict[str, Array], tokens_NBT: Array, c: Config, window: int) -> Array:
    """Mean loss of a batch; c as from Config.for_validation."""
    weights = gather(params, c)
    losses = lax.map(lambda tokens: loss_fn(weights, tokens, c, window), tokens_NBT)
    return lax.psum(losses.sum(), "fsdp")


def compile_stage(kind: str, window: int, c: Config, mesh: Mesh) -> jax.stages.Compiled:
    """The program of a "train" or "val" stage, from shapes: no batch is spent, no state touched."""
    train, state, data = kind == "train", state_shapes(c, mesh), P("fsdp")
    step, arg, c = (train_step, state, c) if train else (val_step, state.params, c.for_validation())
    specs = jax.tree.map(lambda x: x.sharding.spec, arg)
    outs = (specs, P()) if train else P()
    b = math.gcd(c.microbatch, c.batch // mesh.size)
    on_device = lambda arg, tokens: step(arg, tokens.reshape(-1, b, c.T + 1), c, window)
    program = jax.shard_map(on_device, mesh=mesh, in_specs=(specs, data), out_specs=outs)
    tokens = jax.ShapeDtypeStruct((c.batch, c.T + 1), "int32", sharding=NamedSharding(mesh, data))
    program = jax.jit(program, donate_argnums=0 if train else ()).lower(arg, tokens)
    return program.compile(OPTIONS.get(mesh.devices.flat[0].platform))


# ---- Command line --------------------------------------------------------------------------------
def refuse(message: str) -> None:
    print(f"train_gpt.py: {message}", file=sys.stderr)
    sys.exit(2)


def parse_config(argv: list[str]) -> tuple[str, Config]:
    """train_gpt.py [record | tiny] [--field value ...]: the fields of Config are the flags."""
    if {"-h", "--help"} & {*argv}:
        sys.exit(print(parse_config.__doc__, inspect.getsource(Config), sep="\n\n"))
    preset, *argv = argv if argv and argv[0][:1] != "-" else ["record", *argv]
    c = PRESETS.get(preset) or refuse(f"there is no preset {preset!r}, only {', '.join(PRESETS)}")
    cli = argparse.ArgumentParser(argument_default=argparse.SUPPRESS, allow_abbrev=False)
    cli.error = refuse
    for field in dataclasses.fields(Config):
        kind = field.type  # bool("False") is true, and so are tuples of characters: read as Python
        literal = lambda text, kind=kind: kind(ast.literal_eval(text))
        cli.add_argument(f"--{field.name}", type=kind if kind in (int, float, str) else literal)
    c = dataclasses.replace(c, **vars(cli.parse_args(argv)))
    if bad := [word for word in c.plan.split() or [""] if not re.fullmatch(PLAN_WORD, word)]:
        refuse(f"--plan: {bad[0]!r} is no layer; write one word a layer, like L, Sv0, S<3 or -")
    if c.val_tokens < 1 or c.val_tokens % (GROUP * c.val_T):
        refuse(f"--val_tokens {c.val_tokens} is no multiple of 8 sequences of --val_T {c.val_T}")
    return preset, dataclasses.replace(c, seed=secrets.randbits(31)) if c.seed < 0 else c


def fit_devices(preset: str, c: Config) -> tuple[list[jax.Device], Config]:
    """The devices of this machine, and the configuration in formats that they can run."""
    devices = jax.devices()
    if preset == "record" and devices[0].platform == "cpu":
        lacks = "JAX sees only a CPU, the record needs GPUs: ./run.sh installs it with CUDA"
        print(f"warning: {lacks}; without GPUs: ./run.sh tiny", file=sys.stderr)
    if GROUP % (n := len(devices)) or c.batch % n:
        refuse(f"{n} devices do not divide --batch {c.batch} or 8 matrices: use 1, 2, 4 or 8")
    gpu = devices[0].platform == "gpu" and "NVIDIA" in devices[0].device_kind
    if not gpu or c.compute != "bfloat16":  # cuDNN has no float32
        c = dataclasses.replace(c, attention="xla")
    if gpu and float(devices[0].compute_capability) < 8.9:  # no FP8
        c = dataclasses.replace(c, head_forward=c.compute, head_backward=c.compute)
    return devices, c


# ---- Data ----------------------------------------------------------------------------------------
def open_shard(path: Path) -> np.memmap:
    """The tokens of a file in llm.c's format: 256 int32 (magic, version, count), then uint16."""
    magic, version, count = [*np.fromfile(path, "<i4", 3).tolist(), 0, 0, 0][:3]
    if (magic, version, path.stat().st_size) != (20240520, 1, 1024 + 2 * max(1, count)):
        refuse(f"{path} is no whole shard of tokens: python data/check.py {path.parent} says why")
    return np.memmap(path, "<u2", "r", offset=1024, shape=(count,))


def steps_in(shard: np.ndarray, c: Config) -> int:
    """Whole batches; as upstream, a shard's tail is dropped."""
    return max(0, (len(shard) - 2) // (c.batch * c.T))


def find_data(c: Config) -> list[np.memmap]:
    """The shards that the run reads, validation last. ./run.sh checks more, by data/check.py."""
    folder, shards, unit = Path(c.data).absolute(), [], GROUP * c.val_T
    kinds = dict(train=(c, "steps", 1), val=(c.for_validation(), "val_tokens", unit))
    for split, (each, flag, unit) in kinds.items():
        paths, found = sorted(folder.glob(f"[!.]*_{split}_*.bin")), 0
        for path in paths if split == "train" else paths[:1]:
            if found < each.steps:
                shards.append(open_shard(path))
                found += steps_in(shards[-1], each)
        if found < each.steps:
            refuse(f"{folder}: {split} shards hold {found} of {each.steps} steps; get more "
                   f"(data/README.md), or add --{flag} {found * unit} to what you ran")  # fmt: skip
    return shards


def check_tokens(shard: np.memmap, c: Config) -> dict[str, Any]:
    """One pass over all bytes: facts for the log. Exits 2 where the run would learn nonsense."""
    path, largest, documents, crowd = Path(shard.filename), 0, 0, 0
    sha, piece = hashlib.sha256(np.fromfile(path, np.uint8, 1024)), c.T * -(-(2**22) // c.T)
    for start in range(0, len(shard), piece):
        tokens = np.array(shard[start : start + piece])
        sequences = np.flatnonzero(tokens == c.eot) // c.T
        crowd = max(crowd, np.bincount(sequences, minlength=1).max())
        largest, documents = max(largest, int(tokens.max())), documents + len(sequences)
        sha.update(tokens)
    if largest >= c.vocab or not documents or crowd >= 4096:
        refuse(f"{path}: its largest token is {largest} (--vocab {c.vocab}), {documents} are --eot "
               f"{c.eot}, up to {crowd} in {c.T} tokens (4095 can be told apart)")  # fmt: skip
    return dict(file=path.name, bytes=path.stat().st_size, sha256=sha.hexdigest(),
                tokens=len(shard), documents=documents, largest_token=largest)  # fmt: skip


def stream(shards: list[np.ndarray], c: Config) -> Iterator[np.ndarray]:
    """c.steps consecutive batches (batch, T + 1) of int32, over the shards in order."""
    tokens = c.batch * c.T
    starts = ((shard, i * tokens) for shard in shards for i in range(steps_in(shard, c)))
    for _, (shard, start) in zip(range(c.steps), starts, strict=False):
        batch = shard[start : start + tokens + 1].astype(np.int32)
        yield np.lib.stride_tricks.sliding_window_view(batch, c.T + 1)[:: c.T]


def on_devices(batches: Iterable[np.ndarray], mesh: Mesh, prefetch: int = 2) -> Iterator[Array]:
    """Copies some batches early: device_put returns at once, so the copy hides behind a step."""
    sharding, queue = NamedSharding(mesh, P("fsdp")), collections.deque()
    for batch in batches:
        queue.append(jax.device_put(batch, sharding))
        if len(queue) > prefetch:
            yield queue.popleft()
    yield from queue


# ---- Log -----------------------------------------------------------------------------------------
class Log:
    """logs/<run>.txt, written line by line: the source, a line of 100 =, facts as `name json`
    (what it takes to run it again, no secrets), losses in upstream's grammar, RESULT json."""

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
            git=ask("git describe --always --dirty --abbrev=40 2>/dev/null"),
            argv=argv, seed=c.seed, config=dict(preset=preset, **dataclasses.asdict(c)),
            parameters={name: math.prod(row.shape) for name, row in param_table(c).items()},
        )  # fmt: skip

    def line(self, text: str) -> None:
        print(text, flush=True)
        self.file.write(text + "\n")

    def facts(self, **facts: Any) -> None:
        self.file.writelines(f"{name} {json.dumps(value)}\n" for name, value in facts.items())


class Clock:
    """Seconds of training. Tells every tenth loss once it is there: only stop() waits for it."""

    def __init__(self, steps: int, tell: Callable):
        self.steps, self.tell, self.pending = steps, tell, collections.deque()
        self.seconds, self.started = 0.0, time.perf_counter()

    def stop(self, state: Any) -> None:
        while len(self.pending) > 2:
            time.sleep(0.01)
            self.show()
        jax.block_until_ready(state)  # so that queued work counts
        self.show()
        self.seconds += time.perf_counter() - self.started

    def show(self, *pending: tuple[int, Array]) -> None:
        """Adds (step, loss) to what is pending, tells what is done."""
        self.pending.extend(pending)
        while self.pending and self.pending[0][1].is_ready():
            step, loss = self.pending.popleft()
            if step % 10 == 0:
                ms = 1e3 * (self.seconds + time.perf_counter() - self.started)
                self.tell(f"step:{step}/{self.steps} train_loss:{loss:.4f} train_time:{ms:.0f}ms")


# ---- Run -----------------------------------------------------------------------------------------
def check_attention(c: Config, log: Log) -> None:
    """On GPUs, where cuDNN's faults are silent: the worst token of y, dq, dk, dv against XLA's
    kernel in float32 with a mask, of documents whose numbers change every bit of the code."""
    T, W, (i, j) = 512, 16, np.indices((512, 512))  # shorter than a document: 22 tokens
    document = np.repeat(sorted({2**bit - less for bit in range(13) for less in (0, 1)}), 22)[:T]
    mask = (j <= i) & (i - j < W) & (document[:, None] == document)
    *_, code_q, code_k = positions(np.diff(document, prepend=0)[None], c)

    def kernel(q, k, v):
        return attend(rotate(q, 1.0, 0.0, code_q), rotate(k, 1.0, 0.0, code_k), v, W, c.attention)

    def exact(q, k, v):
        q, k, v = q.at[..., -4:].set(0).astype("float32"), k.astype("float32"), v.astype("float32")
        return jax.nn.dot_product_attention(q, k, v, scale=0.12, mask=mask, implementation="xla")

    *qkv, dy = jax.random.normal(jax.random.key(0), (4, 1, T, c.H, c.D // c.H), c.compute)
    (y, pull), (y_exact, pull_exact) = jax.vjp(kernel, *qkv), jax.vjp(exact, *qkv)
    pairs = zip((y, *pull(dy)), (y_exact, *pull_exact(dy.astype("float32"))), strict=True)
    size = lambda x: np.square(np.float32(x)).sum(axis=-1)
    errors = [float(size(a - b).max() / size(b).mean()) ** 0.5 for a, b in pairs]
    log.facts(attention=dict(zip(("y", "dq", "dk", "dv"), errors, strict=True)))
    if not all(error < 0.1 for error in errors):  # nor NaN
        refuse(f"attention by {c.attention} is wrong on this machine, errors {errors}; install the "
               "versions in requirements.txt, or another driver")  # fmt: skip


def prepare(c: Config, mesh: Mesh, shards: list[np.memmap], log: Log) -> dict[tuple, Callable]:
    """Compiles every stage, while every byte of the data is read; then runs each program once, on
    a state and tokens that are thrown away: a first call loads it and connects the devices."""
    stages = dict.fromkeys(("train", c.window_at(s)) for s in range(c.steps))
    stages |= dict.fromkeys(("val", c.window_at(s)) for s in range(c.steps + 1) if c.validates(s))
    print(f"compiling {len(stages)} programs, reading {len(shards)} shards ...", flush=True)
    began, cache = time.perf_counter(), collections.Counter()
    jax.monitoring.register_event_listener(lambda event, **_: cache.update([event.split("/")[-1]]))
    jobs = [functools.partial(compile_stage, *stage, c, mesh) for stage in stages]
    with ThreadPoolExecutor(8) as pool:
        first = pool.submit(jobs[0])  # alone: it fills the cache of tuned kernels, undisturbed
        configs = [c] * (len(shards) - 1) + [c.for_validation()]
        log.facts(data=[*pool.map(check_tokens, shards, configs)])
        programs = [first.result(), *pool.map(lambda job: job(), jobs[1:])]
    programs, state = dict(zip(stages, programs, strict=True)), make_state(c, mesh)
    for (kind, _), program in programs.items():
        arg, each = (state, c) if kind == "train" else (state.params, c.for_validation())
        tokens = next(on_devices([np.zeros((each.batch, each.T + 1), np.int32)], mesh))
        out = jax.block_until_ready(program(arg, tokens))
        state = out[0] if kind == "train" else state
    log.facts(compile=dict(seconds=time.perf_counter() - began, **cache))
    return programs


def train(c: Config, mesh: Mesh, programs: dict, shards: list, log: Log) -> tuple[dict, dict]:
    """The run, from fresh weights: trained ones, and facts."""
    state, clock = jax.block_until_ready(make_state(c, mesh)), Clock(c.steps, log.line)
    batches = on_devices(stream(shards[:-1], c), mesh)
    for step in range(c.steps + 1):
        if c.validates(step):
            clock.stop(state)
            program, ms = programs["val", c.window_at(step)], 1e3 * clock.seconds
            val_batches = on_devices(stream(shards[-1:], c.for_validation()), mesh)
            val_loss = float(np.mean([float(program(state.params, b)) for b in val_batches]))
            log.line(f"step:{step}/{c.steps} val_loss:{val_loss:.4f} train_time:{ms:.0f}ms "
                     f"step_avg:{ms / max(step, 1):.2f}ms")  # fmt: skip
            if not math.isfinite(val_loss):
                log.line("NON-FINITE: the loss is no number, the run is void; lower the rates")
                sys.exit(3)
            if val_loss <= c.target or step == c.steps:
                break
            clock.started = time.perf_counter()
        state, loss = programs["train", c.window_at(step)](state, next(batches))
        clock.show((step + 1, loss))
    memory = [(d.memory_stats() or {}).get("peak_bytes_in_use", 0) for d in mesh.devices.flat]
    return state.params, dict(
        reason="target reached" if val_loss <= c.target else "end of schedule", val_loss=val_loss,
        target=c.target, steps=step, tokens=step * c.batch * c.T, seed=c.seed,
        devices=len(memory), train_time_ms=ms, peak_memory_bytes=max(memory),
    )  # fmt: skip


def main(argv: list[str]) -> None:
    preset, c = parse_config(argv)
    if not jax.config.jax_compilation_cache_dir:
        jax.config.update("jax_compilation_cache_dir", ".cache/jax")
    devices, c = fit_devices(preset, c)
    shards, doing = find_data(c), "compiling"
    log = Log(preset, c, devices, argv)
    mesh = Mesh(np.array(devices), ("fsdp",), axis_types=(AxisType.Auto,))
    machine = f"{len(devices)} x {devices[0].device_kind}"
    print(f"{preset} on {machine}, head in {c.head_forward}, log in {log.path}")
    try:
        if c.attention == "cudnn":
            check_attention(c, log)
        programs = prepare(c, mesh, shards, log)
        doing = "training"
        params, result = train(c, mesh, programs, shards, log)
    except KeyboardInterrupt:
        log.line("INTERRUPTED")
        sys.exit(130)
    except jax.errors.JaxRuntimeError as error:
        if not re.search("RESOURCE_EXHAUSTED|OUT_OF_MEMORY|out of memory|ALLOC_FAILED", str(error)):
            raise
        log.line(f"OUT OF MEMORY while {doing}: {str(error).splitlines()[0]}")
        refuse(f"not enough memory on {machine} while {doing}: half of --T and twice --batch is "
               "the same step in less; see Memory in README.md")  # fmt: skip
    try:
        if c.save:
            path = log.path.with_suffix(".npz")  # numbers under the names of the table
            np.savez(path, config=json.dumps(dataclasses.asdict(c)), **unpad(params, c))
            result["weights"] = path.name
    finally:  # neither a full disk nor Ctrl-C costs the result of a run that came to its end
        log.line(f"RESULT {json.dumps(result)}")


if __name__ == "__main__":
    main(sys.argv[1:])
