"""Train a GPT-2-small-class model to 3.28 validation loss on FineWeb: one file, JAX, 8xH100.

Run     ./run.sh, or python train_gpt.py [record | tiny] [--field value ...]: see --help
Dims    B sequence  T position  D model  E output  H head  K head channel  F hidden  V row of table
        N token, matrix, microbatch  G group of 8 matrices  R row  C column; x residual stream
Source  record 89 of modded-nanogpt; README.md says where we differ, and what was measured where
"""

import argparse
import ast
import collections
import dataclasses
import functools
import hashlib
import inspect
import itertools
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
from types import SimpleNamespace
from typing import Any, NamedTuple
from zlib import crc32

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import Array, P, lax
from jax.sharding import AxisType, Mesh, NamedSharding

SOURCE = Path(__file__).read_bytes().decode()  # now: the file may be edited while a run goes on
KINDS = "even", "odd"  # of training steps: Adam waits for the odd ones
Layer = collections.namedtuple("Layer", "window marks table reads skip")  # a word of Config.plan
Stage = collections.namedtuple("Stage", "steps T S L document rate shares")  # a row of its stages
GROUP = 8  # matrices in a group of a bank, and sequences in a validation step
PLAN_WORD = r"([LS]|-(?=n?(?:<|$)))([pkqxgdbnm]*)(?:v(\d+))?(?:@(\d+))?(?:<(\d+))?"
OPTIONS = dict(  # of the compiler, by platform; they overrule XLA_FLAGS
    # cuBLAS adds the residual stream and reads weights in place; each gradient leaves when made;
    # and no rounding is left out, which would keep the residual stream in float32.
    gpu=dict(
        xla_gpu_enable_triton_gemm=False,
        xla_gpu_reduce_scatter_combine_threshold_bytes=0,
        xla_allow_excess_precision=False,
    ),
    # In jax 0.10 YNN's kernels are slower than those that they replace, since 0.11 faster.
    cpu=dict(xla_cpu_experimental_ynn_fusion_type="") if jax.__version_info__ < (0, 11) else {},
)


# ---- Config --------------------------------------------------------------------------------------
@dataclasses.dataclass(frozen=True)
class Config:
    # fmt: off
    plan: str = "Sp Sxbv0 Spbv1 Lkxgb Snxb Spb -<3 Sxb Sbv2@7 Spbv3@7 Lkgdmv4@7"
    # A word a layer. L long or S short window, - no attention; p pairs heads, k offsets keys, q has
    # them begin as queries, x may take out of y what lies along v, g gates heads, d composes heads,
    # b adds token pairs, n renews the gates from here on, m mixes earlier streams. vN mixes value
    # table N into v, @N attends to layer N's output instead of the stream, <N adds it to that.
    D: int = 768                # model width
    H: int = 6                  # attention heads
    F: int = 3072               # MLP hidden width
    E: int = 64                 # hidden width of the nets behind gates; 0: same for every token
    vocab: int = 50257          # tokens; the tables are padded to a multiple of 128
    bigrams: int = 377280       # rows of the table of token pairs
    eot: int = 50256            # token that starts every document
    # A row a stage: steps, tokens a step, windows S and L, longest document (its rest is dropped;
    # 0: it goes on in the next sequence), rate, shares of the next token's prefix and of targets 1,
    # 2 .. tokens ahead (a:b moves from a to b). Without steps: of the last validation only.
    stages: str = (
        "423 131072 128  384  896 1.00 .25,1,.5,.25:0 / 424 262144 384 896 2048 1.52 .25:0,1,.5:0 /"
        "423 393216 640 1408 2048 1.73 0,1 / 15 393216 768 1664 2048 1.73 0,1 /"
        "  0 393216 768 2560 2048 1.73 0,1"
    )
    steps: int = 1285           # of the run; other than those of the stages, they stretch them
    batch: int = 8              # sequences in a step, on all devices together
    microbatch: int = 1         # sequences that a device runs at once, at most (memory)
    head_chunk: int = 8192      # tokens whose logits exist at once (memory); divides T and val_T
    dc_window: int = 112        # keys that composed heads see, tokens
    compute: str = "bfloat16"              # format of activations and gathered weights
    mlp_forward: str = "bfloat16"          # format of the MLP's products in training, forward
    head_forward: str = "float8_e4m3fn"    # format of the head's operands
    head_backward: str = "float8_e5m2"     # format of the logits' gradient
    # What a tensor is multiplied by before its cast to FP8, and divided by after the product, so
    # that it fills the format's range; powers of two lose nothing. [fp8-head] says what is cast.
    x_scale: float = 4.0        # of what was normalised: a channel is about 1, below D**.5
    w_scale: float = 256.0      # of a weight: some hundredths, below 1.7
    g_scale: float = 512.0      # of the logits' gradient, times batch: below 2
    attention: str = "cudnn"    # kernel of jax.nn.dot_product_attention; xla off NVIDIA GPUs
    # The next five count steps as the stages do: in a shorter run, they come sooner.
    flat: int = 508             # steps before rates begin to fall
    fallen: int = 1270          # steps after which they stay at 0.15
    momentum_steps: int = 300   # steps over which Muon's momentum rises from 0.85 to 0.95
    momentum_fall: int = 50     # steps, the last ones, over which it falls again
    untie: int = 847            # last step whose update keeps embedding and head one table
    muon_lr: float = 0.023      # rate of the matrices in the layers
    adam_lr: float = 0.008      # rate of everything else, times a factor in the table
    prefixes: str = "data/gpt2_prefixes.bin"  # each token's longest proper prefix, int32; "": none
    data: str = "data/fineweb10B"  # folder with the *_train_*.bin and *_val_*.bin shards
    val_every: int = 250        # steps between validations
    val_T: int = 262144         # tokens in a validation sequence
    val_tokens: int = 10485760  # fixed by the rules: the same text whatever the machine
    target: float = 3.28        # stop at the first validation loss that reaches it; 0: never
    save: int = 1               # 0: do not keep the weights (2.6 GB for the record)
    seed: int = -1              # of the initial weights; -1: a fresh one from the system
    # fmt: on

    @functools.cached_property
    def layers(self) -> list["Layer"]:  # the words of plan
        words = (re.fullmatch(PLAN_WORD, word).groups() for word in self.plan.split())
        return [Layer(*word[:2], *(n and int(n) for n in word[2:])) for word in words]

    @functools.cached_property
    def rows(self) -> list["Stage"]:  # of stages
        rows = []
        for *whole, rate, shares in map(str.split, self.stages.split("/")):
            steps, tokens, S, L, document = map(int, whole)
            ramps = [(2 * [*map(float, ramp.split(":"))])[:2] for ramp in shares.split(",")]
            rows.append(Stage(steps, tokens // self.batch, S, L, document, float(rate), ramps))
        return rows

    @functools.cached_property
    def ends(self) -> np.ndarray:
        """Of each stage, in steps of the run: in proportion, but none is skipped that has steps."""
        lengths = np.array([row.steps for row in self.rows])
        count = np.cumsum(lengths > 0)
        more = np.round(np.cumsum(lengths) * self.steps / lengths.sum()) - count
        return count + np.maximum.accumulate(np.clip(more, 0, self.steps - count[-1]))

    def again(self, why: str) -> list[int]:  # layers whose outputs are read so: "reads" or "skip"
        return sorted({getattr(layer, why) for layer in self.layers} - {None})

    def stage_at(self, step: int) -> int:  # after the last step, the last row
        return min(np.count_nonzero(step >= self.ends), len(self.rows) - 1)

    def fills(self, split: str) -> list[tuple[int, int, int]]:
        """Of each step: sequences, tokens in each, longest document."""
        if split == "val":
            return [(GROUP, self.val_T, 0)] * (self.val_tokens // (GROUP * self.val_T))
        rows = (self.rows[self.stage_at(step)] for step in range(self.steps))
        return [(self.batch, row.T, row.document) for row in rows]

    def validates(self, step: int) -> bool:
        return step % self.val_every == 0 or step == self.steps

    def for_validation(self) -> "Config":
        """As many tokens at once as in training, or one sequence; no FP8."""
        at_once = max(1, self.microbatch * max(row.T for row in self.rows) // self.val_T)
        return dataclasses.replace(self.without_fp8(), microbatch=at_once)

    def without_fp8(self) -> "Config":
        formats = dict.fromkeys(("mlp_forward", "head_forward", "head_backward"), self.compute)
        return dataclasses.replace(self, **formats)


PRESETS = dict(record=Config(), tiny=Config(
    plan="Sbv0 Lkqb Spb -<1 Sbv1@2 Lkqv2@2", D=128, H=2, F=512, E=0, vocab=257, eot=256,
    bigrams=16384, stages="368 1024 64 192 0 1 0,1", steps=368, batch=4, microbatch=4,
    head_chunk=256, dc_window=56, adam_lr=0.012, flat=147, fallen=368, untie=245, val_T=1024,
    val_tokens=65536, val_every=92, prefixes="", data="data/source_code", target=1.38,
))  # fmt: skip


# ---- Parameters ----------------------------------------------------------------------------------
class Param(NamedTuple):
    """All there is to know about one parameter; padding is stored but is no part of the model."""

    shape: tuple[int, ...]  # without padding; a bank's is [N, R, C]
    stored_shape: tuple[int, ...]  # of the float32 master copy; a bank's is [G, 8, R, C]
    spec: P  # sharding of the master copy and of its optimizer state
    init: Callable  # (key, stored shape) -> array
    optimizer: str  # "muon" for banks, or a rule of optimizer()
    lr: Any  # learning rate; in a bank one for each matrix, [G, 8, 1, 1]
    decay: Any = 0.0  # of the weights, see train_step()
    layers: list[bool] = []  # whether a layer owns an equal part of it; []: no layer does


def param_table(c: Config) -> dict[str, Param]:
    """One row per parameter. A new technique adds its row here and its line in the model."""
    D, F, H, V, L = c.D, c.F, c.H, -(-c.vocab // 128) * 128, c.layers
    a, m, b, tall = c.adam_lr, c.muon_lr, 0.5 * (3 / D) ** 0.5, max(1, F / D) ** 0.5
    marked = lambda mark: [mark in layer.marks for layer in L]
    every, attends, mixes = [True for _ in L], [layer.window != "-" for layer in L], marked("m")
    tables, skips = ([layer[i] is not None for layer in L] for i in (2, 4))
    unmixed = lambda on: [x and not mix for x, mix in zip(on, mixes, strict=True)]
    adds, stays, gated = unmixed(attends), unmixed(every), unmixed(tables)
    keep_add, slow, normal = [1.1**0.5, 1.0], "adam 0.9 0.95", jax.nn.initializers.normal
    reads, skipped = len(c.again("reads")), len(c.again("skip"))
    head = [0.0, *[-0.5] * reads, 0.0, *[0.0] * (any(tables) + skipped)] * any(mixes)
    within = lambda key, shape: D**-0.5 * jax.random.uniform(key, shape, minval=-1.0)
    gate, mudd = (functools.partial(said, c, a / n) for n in (10, 4))
    lookup = lambda n, *rest: Param((n, D), (-(-n // 128) * 128, D), P("fsdp"), *rest)  # n rows
    # fmt: off
    return dict(
        embed  = lookup(V, normal(0.005), "adam 0.5 0.95", a, 0.75 * a),
        head   = lookup(V, normal(0.005), "adam 0.5 0.95", a, 0.75 * a),
        bigram = lookup(c.bigrams, normal(0.0), "adam 0.75 0.95", 75 * a, 1.875 * a),
        **{f"values{i}": lookup(c.vocab, normal(0.01), "adam 0.75 0.95", 75 * a, 1.875 * a)
           for i in range(len({layer.table for layer in L} - {None}))},
        qk     = bank(2 * D // H, D, attends, (b,) * H, (m,) * H, 1.2 * m),  # two heads in each
        vo     = bank(D, D, attends, (b, b), (m, m), 1.2 * m),
        mlp    = bank(F, D, every, (b, 0), (m * tall, 2 * m * tall), 1.2 * m),  # fc, proj^T
        vo_lambdas   = small((sum(attends), 2), [0.5, 1.0], 5 * a, layers=attends),
        attn_lambdas = small((sum(adds), 2), keep_add, np.float32([5 * a, a]), slow, layers=adds),
        mlp_lambdas  = small((sum(stays), 2), keep_add, np.float32([5 * a, a]), slow, layers=stays),
        skip_lambdas = small((sum(skips),), -1.5, 5 * a, layers=skips),
        value_gates  = small((sum(gated), H, 12), 0.0, a, decay=0.005 * a, layers=gated),
        smear_gate   = small((12,), 0.0, 0.01 * a),
        smear_lambda = small((1,), 0.0, 5 * a),
        gate_in      = small((1 + sum(marked("n")), c.E, D), within, a / 10, decay=0.005 * a / 10),
        gate_scale   = small((1,), 0.1, 0.1 * a),
        gate_start   = gate([0.05]),
        gate_x0      = gate([0.0], adds),
        gate_bigram  = gate([0.05], unmixed(marked("b"))),
        gate_skip    = gate([0.5], skips),
        gate_xsa     = gate([0.0] * H, marked("x")),
        gate_heads   = gate([0.25] * H, marked("g")),
        gate_dc_from = gate([1.0] * H, marked("d")),
        gate_dc_to   = gate([0.0] * H, marked("d")),
        mudd_in      = small((sum(mixes) + any(mixes), c.E, D), within, a / 4, decay=0.005 * a / 4),
        mudd_v       = mudd([0.0] * (2 + reads), mixes),
        mudd_x       = mudd([0.0] * (2 + reads), mixes),
        mudd_values  = mudd([2.0, 2.0], mixes),
        mudd_attn    = mudd([*keep_add, 0.0, 0.05], mixes),
        mudd_mlp     = mudd(keep_add, mixes),
        mudd_head    = mudd(head),
    )  # fmt: on


def bank(R: int, C: int, layers: list[bool], bounds: tuple, lrs: tuple, decay: float) -> Param:
    """(R, C) matrices, as many to a layer as there are rates, each uniform within its bound. In
    groups of 8, of which every device holds equally many whole ones: Muon communicates nothing."""
    N = len(lrs) * sum(layers)
    per_matrix = np.zeros((2, -(-N // GROUP) * GROUP), np.float32)  # padding: zeros that never move
    per_matrix[:, :N] = np.tile((bounds, lrs), sum(layers))
    bound, lr = per_matrix.reshape(2, -1, GROUP, 1, 1)
    init = lambda key, shape: bound * jax.random.uniform(key, shape, minval=-1.0)
    return Param((N, R, C), (*lr.shape[:2], R, C), P(None, "fsdp"), init, "muon", lr, decay, layers)


def small(shape: tuple[int, ...], init: Any, lr: float, rule: str = "adam 0.9 0.99",
          decay: Any = 0.0, layers: list[bool] = ()) -> Param:  # fmt: skip
    """One that every device holds whole; init is a function or the first value."""
    init = init if callable(init) else jax.nn.initializers.constant(np.float32(init))
    return Param(shape, shape, P(), init, rule, lr, decay, [*layers])


def said(c: Config, lr: float, first: list[float], layers: list[bool] = ()) -> Param:
    """What a net says of each token, at first the same of all: E weights and a bias for each of
    these numbers, in each of the layers. Biases do not decay."""
    shape = (sum(layers), len(first), c.E + 1)[0 if layers else 1 :]
    init = lambda key, shape: jnp.zeros(shape).at[..., -1].set(np.float32(first) / np.float32(0.1))
    decay = 0.005 * lr * np.append(np.ones(c.E, "f4"), 0)
    return small(shape, init, lr, decay=decay, layers=layers)


def gather(params: dict[str, Array], c: Config) -> dict[str, Any]:
    """[fsdp] Whole weights by all-gather, a table or a group of matrices at a time, kept for the
    backward pass; the transpose reduce-scatters each gradient to its owner. Sent in c.compute, and
    float32 before and after, so that microbatches add up in float32. ZeRO-2, arXiv:1910.02054."""
    send = lambda shard: lax.all_gather(shard.astype(c.compute), "fsdp", tiled=True)
    weights = {}
    for name, row in param_table(c).items():
        if row.spec == P():  # whole already; the transpose is a psum
            weights[name] = lax.pcast(params[name], "fsdp", to="varying")
        elif row.spec == P("fsdp"):
            weights[name] = send(params[name]).astype(jnp.float32)
        else:  # a bank: its matrices, without padding
            groups = (send(group).astype(jnp.float32) for group in params[name])
            weights[name] = [matrix for group in groups for matrix in group][: row.shape[0]]
    return weights


def deal(weights: dict[str, Any], c: Config) -> list[NamedTuple]:
    """What each layer owns of the rows, under their names: its matrices, or its one scalar."""
    rows = {name: row.layers for name, row in param_table(c).items() if row.layers}
    Owned, dealt = collections.namedtuple("Owned", rows), []
    for name, layers in rows.items():
        stack, n = iter(weights[name]), len(weights[name]) // max(1, sum(layers))
        parts = [[next(stack) for _ in range(n * owns)] for owns in layers]
        dealt.append([part[0] if len(part) == 1 else part for part in parts])
        if left := len([*stack]):
            raise ValueError(f"{left} of {name} are left when {sum(layers)} layers have {n} each")
    return [Owned(*parts) for parts in zip(*dealt, strict=True)]


def unpad(params: dict[str, Array], c: Config) -> dict[str, np.ndarray]:
    """The model alone, in float32: banks as [N, R, C], and no padding."""
    shapes = {name: row.shape for name, row in param_table(c).items()}
    whole = lambda p, shape: p.reshape(-1, *p.shape[2:]) if p.ndim > len(shape) else p
    return {k: whole(np.asarray(params[k]), shape)[: shape[0]] for k, shape in shapes.items()}


# ---- Model ---------------------------------------------------------------------------------------
def loss_fn(weights: dict, tokens_BT: Array, shares: dict, c: Config, stage: int) -> Array:
    """Sum over this microbatch of the losses to several targets, nats, each times its share: 1 is
    the next token, 2 the one after it .., 0 the longest prefix of the next token. weights as from
    gather; tokens_BT has one token more than the model reads."""
    inputs = tokens_BT[:, :-1]
    x0, pairs, values = look_up(weights, inputs, c)
    # [gates] Small nets, by which each token sets the gates of the layers after it. Their hidden
    # layers are here, the outputs are each gate's own: say(). Records 81 and 85.
    net = lambda x, w: gelu(jnp.einsum("BTD,ED->BTE", x, w.astype(x.dtype)))
    gate_nets, mudd_nets = iter(weights["gate_in"]), iter(weights["mudd_in"])
    gates, scale = net(x0, next(gate_nets)), weights["gate_scale"]
    says = say(gates, weights, "gate_start", scale)
    x = start = weighted_sum((1.0, x0), (says["gate_start"], pairs))
    # What a layer may read beside the residual stream x; all but pos and stage are (B, T, D).
    seen = SimpleNamespace(x0=x0, pairs=pairs, values=values, start=start, outputs=[],
        pos=positions(inputs == c.eot, c, stage), stage=c.rows[stage])  # fmt: skip
    for layer, w in zip(c.layers, deal(weights, c), strict=True):
        if "n" in layer.marks:
            gates = net(x, next(gate_nets))
        w = w._replace(**say(gates, w._asdict(), "gate_", scale))
        if "m" in layer.marks:
            says = say(net(x, next(mudd_nets)), w._asdict(), "mudd_", 0.1)
            entry, w = x, w._replace(**says)
        x = block(x, layer, w, seen, c)
        seen.outputs.append(x)
    if "m" in c.plan:  # the head, too, reads what earlier layers made
        reads, skip = ([seen.outputs[i] for i in c.again(why)] for why in ("reads", "skip"))
        says, again = say(net(x, next(mudd_nets)), weights, "mudd_head", 0.1), [entry, *values[:1]]
        x = weighted_sum((1.0, x), *each(says["mudd_head"], [start, *reads, *again, *skip]))
    # [mtp] Early in training later tokens are targets as well; arXiv:2404.19737, record 53.
    # [prefix] And so is the longest token that the next token begins with; record 88.
    later = jnp.pad(tokens_BT, ((0, 0), (0, max(shares))), constant_values=-1)
    prefix, T = lambda tokens: jnp.take(prefix_table(c), tokens, axis=0), x.shape[1]
    targets = [later[:, k:][:, :T] if k else prefix(tokens_BT[:, 1:]) for k in shares]
    targets_NK = jnp.stack(targets, axis=-1).reshape(-1, len(shares))
    shares_K = jnp.stack([jnp.float32(share) for share in shares.values()])
    return head_loss(norm(x).reshape(-1, c.D), weights["head"], targets_NK, shares_K, c)


def look_up(weights: dict[str, Any], tokens_BT: Array, c: Config) -> tuple:
    """Of each token: its normalised embedding, that of its pair, its row of each value table."""
    read = lambda table, rows: table.at[rows].get(mode="promise_in_bounds").astype(c.compute)
    names = sorted(name for name in weights if name.startswith("values"))
    embed, *values = (read(weights[name], tokens_BT) for name in ("embed", *names))
    # [smear] An embedding may take in some of the one before it. modded-nanogpt record 34.
    gate = jax.nn.sigmoid(embed[..., :12].astype(jnp.float32) @ weights["smear_gate"])
    last = jnp.pad(embed[:, :-1], ((0, 0), (1, 0), (0, 0)))
    x0 = norm(weighted_sum((1.0, embed), (weights["smear_lambda"] * gate[..., None], last)))
    # [bigram] A table of hashed token pairs, with signs that tell some apart. Records 62 and 83.
    rows, sign_rows = hash_pairs(tokens_BT, c)
    return x0, read(weights["bigram"], rows) * signs(sign_rows, c), values


def block(x: Array, layer: Layer, w: NamedTuple, seen: SimpleNamespace, c: Config) -> Array:
    # [u-net] A late layer may add the output of an early one. Records 11, 45 and 55.
    if layer.skip is not None:
        share = jax.nn.sigmoid(w.skip_lambdas) * w.gate_skip
        x = weighted_sum((1.0, x), (share, seen.outputs[layer.skip]))
    # [saved-source] Late layers may attend to an early output instead of the stream. Record 77.
    source, extra = x if layer.reads is None else seen.outputs[layer.reads], []
    if "m" in layer.marks:
        return mixed_block(x, source, layer, w, seen, c)
    if layer.table is not None:
        # [value-embed] v also reads a token table of its own, as much as each head wants. Zhou et
        # al. 2024, arXiv:2410.17897; gates: record 55.
        values = seen.values[layer.table]
        looks = jnp.concatenate((norm(source)[..., :6], values[..., :6]), axis=-1)
        gate = 2 * jax.nn.sigmoid(looks.astype(jnp.float32) @ w.value_gates.T)
        extra = [(jnp.repeat(gate, c.D // c.H, axis=-1), values)]
    if layer.window != "-":
        y = attention(source, extra, layer, w, seen, c)
        # [x0] Each layer may fade the residual stream and read the embeddings again. Record 9.
        pairs = [(w.gate_bigram, seen.pairs)] if "b" in layer.marks else []
        kept = (w.attn_lambdas[0], x), (w.attn_lambdas[1], y), (w.gate_x0, seen.x0)
        x = weighted_sum(*kept, *pairs)
    return weighted_sum((w.mlp_lambdas[0], x), (w.mlp_lambdas[1], mlp(x, w, c)))


def mixed_block(
    x: Array, source: Array, layer: Layer, w: NamedTuple, seen: SimpleNamespace, c: Config
):
    """[mudd] A block whose values, input and sums are mixed of the stream at several depths, anew
    for each token. Xiao et al. 2025, arXiv:2502.12170; record 81."""
    kept = [seen.start, *(seen.outputs[i] for i in c.again("reads")), x]
    extra = each(w.mudd_v, kept)
    if layer.table is not None:
        gate = jnp.repeat(w.mudd_values, x.shape[-1] // 2, axis=-1)  # one for each half of heads
        extra.append((gate, seen.values[layer.table]))
    y = attention(source, extra, layer, w, seen, c)
    x = weighted_sum((1.0, x), *each(w.mudd_x, kept))
    x = weighted_sum(*each(w.mudd_attn, [x, y, seen.start, seen.pairs]))
    return weighted_sum(*each(w.mudd_mlp, [x, mlp(x, w, c)]))


def attention(
    x: Array, extra: list, layer: Layer, w: NamedTuple, seen: SimpleNamespace, c: Config
) -> Array:
    """extra are the terms that v is given beside its product with x."""
    (B, T, D), pos, (w_v, w_o) = x.shape, seen.pos, w.vo
    # The lambdas of v and y scale weights, D x D: fewer bytes than T x D, for gradients as well.
    w_qkv = jnp.concatenate((*w.qk, w.vo_lambdas[0] * w_v)).astype(x.dtype)
    qkv = norm_linear(x, w_qkv, "input", c.compute, c)
    q, k, v = (part.reshape(B, T, c.H, D // c.H) for part in jnp.split(qkv, 3, axis=-1))
    # [qk-norm] Henry et al. 2020, arXiv:2010.04245: scores stay bounded, so the rate can be high.
    cos, sin = pos.angles["p" in layer.marks]
    q = norm_rotate(q, cos, sin, pos.code_q, False)
    # [key-offset] Half of a key is that of the token before: induction in one layer. Record 49.
    k = norm_rotate(k, cos, sin, pos.code_k, "k" in layer.marks)
    v = weighted_sum((1.0, v.reshape(x.shape)), *extra).reshape(v.shape)
    # [paired-heads] Twice as many positions for half as many heads: of a pair of heads, each sees
    # the other's keys. Record 58.
    shape = (B, 2 * T, c.H // 2, D // c.H) if "p" in layer.marks else v.shape
    qkv, window = (a.reshape(shape) for a in (q, k, v)), getattr(seen.stage, layer.window)
    y = attend(*qkv, window, pos.scale, c).reshape(v.shape)
    if "d" in layer.marks:
        y = y + compose(q, k, v, w.gate_dc_from, w.gate_dc_to, pos.scale, c)
    if "x" in layer.marks:
        # [xsa] Each head may take out of y what lies along its own v. Records 82 and 86.
        dot = lambda a, b: (a.astype(jnp.float32) * b).sum(axis=-1)
        share = jnp.tanh(w.gate_xsa) * dot(y, v) / jnp.maximum(dot(v, v), 1e-8)
        y = weighted_sum((1.0, y), (-share[..., None], v))
    if "g" in layer.marks:
        y = weighted_sum((w.gate_heads[..., None], y))  # [head-gate] Records 28 and 85.
    return jnp.einsum("BTD,ED->BTE", y.reshape(B, T, D), (w.vo_lambdas[1] * w_o).astype(x.dtype))


def attend(q: Array, k: Array, v: Array, window: int, scale: float, c: Config) -> Array:
    # [window] Each query sees itself and `window` keys before it. Both arguments, always: without
    # is_causal, cuDNN leaves the right side of a window open and sees the future.
    reach = dict(is_causal=True, local_window_size=(window, 0), implementation=c.attention)
    return jax.nn.dot_product_attention(q, k, v, scale=scale, **reach)


def compose(q: Array, k: Array, v: Array, source: Array, target: Array, scale: float, c: Config):
    """[dc] Every head also reads by one mixture of all heads' attention to the nearest keys, with
    weights (B, T, H) of the heads in it and of it in each head. In bands of positions: no T x T
    array exists. Xiao et al. 2024, arXiv:2405.08553; record 85."""
    (B, T, *_), window = q.shape, c.dc_window
    W = next((W for W in range(window, T) if T % W == 0), T)  # width of a band
    band = lambda x: x.reshape(B, T // W, W, *x.shape[2:])
    two = lambda x: jnp.concatenate((jnp.roll(x, 1, axis=1), x), axis=2)  # the one before, itself
    n, i, j = jnp.ogrid[: T // W, :W, : 2 * W]  # band, query, key
    seen = (0 <= i + W - j) & (i + W - j < window) & ((j >= W) | (n > 0))
    einsum = functools.partial(jnp.einsum, preferred_element_type=jnp.float32)
    scores = scale * einsum("BNIHK,BNJHK->BNHIJ", band(q), two(band(k)))
    attends = jax.nn.softmax(jnp.where(seen[:, None], scores, -jnp.inf), axis=-1)
    source = source * lax.rsqrt(jnp.square(source).mean(axis=-1, keepdims=True) + 1e-6)
    mixed = jnp.einsum("BNHIJ,BNIH->BNIJ", attends, band(source)).astype(v.dtype)
    y = jnp.einsum("BNIJ,BNJHK->BNIHK", mixed, two(band(v))).reshape(q.shape)
    return (target[..., None] * y).astype(v.dtype)


def mlp(x: Array, w: NamedTuple, c: Config) -> Array:
    fc, proj = (matrix.astype(x.dtype) for matrix in w.mlp)
    # [relu2] So et al. 2021, arXiv:2109.08668.
    hidden = jnp.square(jax.nn.relu(norm_linear(x, fc, "output", c.mlp_forward, c)))
    return project(hidden, proj, c)


def say(hidden_BTE: Array, rows: dict[str, Array], kind: str, scale: Any) -> dict[str, Array]:
    """The outputs (B, T, n) of that net, in float32, by those of the rows whose names begin so and
    that are there: [n, E + 1] are weights and a bias."""
    rows = {name: row for name, row in rows.items() if name.startswith(kind) and len(row)}
    w = jnp.concatenate([jnp.zeros((0, hidden_BTE.shape[-1] + 1)), *rows.values()])
    said = jnp.einsum("BTE,NE->BTN", hidden_BTE, w[:, :-1].astype(hidden_BTE.dtype))
    said = scale * (said.astype(jnp.float32) + w[:, -1])
    ends = np.cumsum([len(row) for row in rows.values()])[:-1]
    return dict(zip(rows, jnp.split(said, ends, axis=-1), strict=False))


def each(weights_BTN: Array, arrays: list[Array]) -> list[tuple[Array, Array]]:
    """Terms of a weighted sum in which every token has its own weights."""
    return [*zip(jnp.split(weights_BTN, len(arrays), axis=-1), arrays, strict=True)]


def weighted_sum(*terms: tuple[Any, Array]) -> Array:
    """In float32 and rounded once: in bfloat16, sums would wear the residual stream away."""
    return sum(weight * x.astype(jnp.float32) for weight, x in terms).astype(terms[0][1].dtype)


def inverse_rms(x: Array) -> Array:
    return lax.rsqrt(jnp.mean(jnp.square(x.astype(jnp.float32)), axis=-1, keepdims=True) + 2.0**-23)


def norm(x: Array) -> Array:
    return (x * inverse_rms(x)).astype(x.dtype)


def hash_pairs(tokens_BT: Array, c: Config) -> tuple[Array, Array]:
    """Of each token and the one before it: row of the bigram table, and number of its signs."""
    last, token, pad, rows = tokens_BT[:, :-1], tokens_BT[:, 1:], ((0, 0), (1, 0)), c.bigrams - 1
    # Upstream overwrites element 0 before it hashes element 1, and so do we.
    row = ((36313 * token) ^ (27191 * last.at[:, 0].set(rows))) % rows
    return jnp.pad(row, pad, constant_values=rows), jnp.pad((token ^ last) % 8192, pad)


def signs(number_BT: Array, c: Config) -> Array:
    """(B, T, D) of -1 and 1, the same for a number in every run: no table of them is kept."""
    bits = (number_BT[..., None] * c.D + jnp.arange(c.D)).astype(jnp.uint32) * np.uint32(0x9E3779B1)
    return 1 - 2 * ((bits ^ bits >> 15) * np.uint32(0x85EBCA77) >> 31).astype(c.compute)


def positions(starts_BT: Array, c: Config, stage: int) -> SimpleNamespace:
    """Of tokens, some of which start documents: angles, cos and sin (T, 1 or H, K / 4) for layers
    with paired heads (True) and others; code_q and code_k (B, T, 1, 4); scale of the scores."""
    (speed, scale), t, angles = rotation(c, stage), jnp.arange(starts_BT.shape[1])[:, None], {}
    for paired, at in (False, t), (True, 2 * t + jnp.arange(c.H) % 2):
        angle = at[:, :, None].astype(jnp.float32) * speed.astype(np.float32)
        angles[paired] = jnp.cos(angle), jnp.sin(angle)
    # [document-mask] Four channels whose product is 256 * (document of k - document of q): 0 within
    # one, to earlier ones a score lower by 25.6 or more: enough for K <= 128. Exact for < 4,096.
    document = jnp.cumsum(starts_BT, axis=1, dtype=jnp.int32)[:, :, None]
    high, low, one = document // 16, document % 16, jnp.ones_like(document)
    code_q = jnp.stack((-4096 * high, -256 * low, 4096 * one, 256 * one), axis=-1).astype(c.compute)
    code_k = jnp.stack((one, one, high, low), axis=-1).astype(c.compute)
    return SimpleNamespace(angles=angles, code_q=code_q, code_k=code_k, scale=scale)


def rotation(c: Config, stage: int) -> tuple[np.ndarray, float]:
    """[half-rope] Speeds of the channel pairs that rotate; half of the channels do not. Record 17.
    [yarn] Where windows grow, slow pairs slow down, and the scale of scores grows. Peng et al.
    2023, arXiv:2309.00071; record 31."""
    speed, scale = (1 / 1024) ** np.linspace(0, 1, c.D // c.H // 4), 0.1
    for a, b in itertools.pairwise(row.L for row in c.rows[: stage + 1] if row.steps):
        stays = np.clip((a * speed / (2 * np.pi) - 1) / 31, 0, 1)
        speed, scale = speed * (a / b + stays * (1 - a / b)), scale * (1 + 0.2 * np.log(b / a))
    return speed, float(scale)


def prefix_table(c: Config) -> np.ndarray:
    """Of each token, the longest other one that its bytes begin with; -1: none."""
    none = np.full(0 if c.prefixes else c.vocab, -1, np.int32)
    return np.fromfile(c.prefixes, "<i4") if Path(c.prefixes).is_file() else none


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


def head_loss_forward(x_ND: Array, w_VD: Array, targets_NK: Array, shares_K: Array, c: Config):
    """[fp8-head] Softcapped cross-entropy over all V columns to K targets (-1: none), each times
    its share, summed over N tokens; arXiv:2209.05433, record 19. In chunks of tokens, so that
    [N, V] logits never exist; both gradients are computed while a chunk's are at hand."""
    # [softcap] Logits between 0 and 23: Gemma 2, arXiv:2408.00118; records 18 and 54.
    softcap = lambda z: 23 * jax.nn.sigmoid((z.astype(jnp.float32) + 5) / 7.5)
    w8_VD, g_scale = quantize(w_VD, c.w_scale, c.head_forward), c.g_scale * c.batch
    w8_DV = w8_VD.T  # once, for all chunks: a float8 product wants the summed axis last

    def one_chunk(dw, chunk):
        x, targets = chunk
        shares = jnp.where(targets < 0, 0, shares_K)
        x8 = quantize(x, c.x_scale, c.head_forward)
        z = matmul(x8, w8_VD, (1, 1), c.x_scale * c.w_scale, c.compute, None)
        total = jnp.exp(softcap(z)).sum(axis=1, keepdims=True)  # bounded: no maximum to subtract
        picked = jnp.take_along_axis(z, jnp.maximum(targets, 0), axis=1, mode="promise_in_bounds")
        loss = (shares * (jnp.log(total) - softcap(picked))).sum()
        # Without the barrier XLA keeps exp in float32 from the sum to its second use here.
        z, total = lax.optimization_barrier((z, total))
        # Of -log softmax(s) at a target: dL/ds = softmax(s) - hit; ds/dz = s (23 - s) / (23 * 7.5).
        s, column = softcap(z), lax.broadcasted_iota(jnp.int32, z.shape, 1)
        pairs = zip(targets.T[..., None], shares.T[..., None], strict=True)
        hit = sum(jnp.where(column == target, share, 0) for target, share in pairs)
        ds = shares.sum(axis=1, keepdims=True) * jnp.exp(s) / total - hit
        dz = ds * s * (23 - s) / (23 * 7.5)
        g8 = quantize(dz, g_scale, c.head_backward)
        dx = matmul(g8, w8_DV, (1, 1), g_scale * c.w_scale, c.compute, "highest")
        return dw + matmul(g8, x8, (0, 0), g_scale * c.x_scale, "float32", "highest"), (loss, dx)

    chunks = (a.reshape(-1, c.head_chunk, a.shape[1]) for a in (x_ND, targets_NK))
    dw_VD, (losses, dx) = lax.scan(one_chunk, jnp.zeros_like(w_VD, jnp.float32), (*chunks,))
    return losses.sum(), (dx.reshape(x_ND.shape), dw_VD)


# ---- Gradients by hand ---------------------------------------------------------------------------
def by_hand(forward: Callable, backward: Callable, static: tuple[int, ...] = ()) -> Callable:
    """The function of value forward(...)[0] and gradients backward(forward(...)[1], g)."""
    function = jax.custom_vjp(lambda *arguments: forward(*arguments)[0], nondiff_argnums=static)
    function.defvjp(forward, backward)
    return function


def product(x_BTC: Array, w_RC: Array, dtype: str, c: Config) -> Array:
    """y = x w^T with operands in dtype. [fp8-mlp] In FP8 forward only; records 84 and 89."""
    if not dtype.startswith("float8"):
        return jnp.einsum("BTC,RC->BTR", x_BTC, w_RC)
    x8 = quantize(x_BTC.reshape(-1, x_BTC.shape[-1]), c.x_scale, dtype)
    y = matmul(x8, quantize(w_RC, c.w_scale, dtype), (1, 1), c.x_scale * c.w_scale, c.compute, None)
    return y.reshape(*x_BTC.shape[:-1], -1)


# JAX's own gradients of norms move more bytes. For h = x / rms(x), of D channels, and its gradient,
#     dx = (dh - h sum(dh h) / D) / rms(x):    what of dh lies along h would change x's length only.
def norm_linear_forward(x_BTD: Array, w_ED: Array, project_by: str, dtype: str, c: Config) -> tuple:
    """y = norm(x) w^T"""
    inverse = inverse_rms(x_BTD)
    # Without the barrier XLA makes h again in the backward pass, from all that x was made of.
    h, inverse = lax.optimization_barrier(((x_BTD * inverse).astype(x_BTD.dtype), inverse))
    y = product(h, w_ED, dtype, c)
    return y, (h, inverse, w_ED, y)


def norm_linear_backward(project_by: str, dtype: str, c: Config, kept: tuple, dy: Array) -> tuple:
    """dh = dy w, dw = dy^T h. sum(dh h) = sum(dy y), which by "output" is free if the kernel that
    makes dy reads y anyway, as that of an elementwise function does; else by "input"."""
    h, inverse, w_ED, y = kept
    dh = jnp.einsum("BTE,ED->BTD", dy, w_ED)
    a, b = dict(output=(dy, y), input=(dh, h))[project_by]
    along = (a.astype(jnp.float32) * b).sum(axis=-1, keepdims=True) / h.shape[-1]
    return ((dh - h * along) * inverse).astype(h.dtype), jnp.einsum("BTE,BTD->ED", dy, h)


def norm_rotate_forward(x_BTHK: Array, cos: Array, sin: Array, code: Array, offset: bool) -> tuple:
    """y = norm(x), channel pairs (j, j + K/4) rotated, the document code last; by offset the
    half that does not rotate is of the position before (the first keeps its own)."""
    inverse = inverse_rms(x_BTHK)
    a, b, still = jnp.split(x_BTHK * inverse, [cos.shape[-1], 2 * cos.shape[-1]], axis=-1)
    still = jnp.concatenate((still[:, :1], still[:, :-1]), axis=1) if offset else still
    code = jnp.broadcast_to(code, (*x_BTHK.shape[:-1], 4))
    parts = a * cos + b * sin, b * cos - a * sin, still[..., :-4], code
    y = jnp.concatenate([part.astype(x_BTHK.dtype) for part in parts], axis=-1)
    return lax.optimization_barrier(y), (x_BTHK, inverse, cos, sin)


def norm_rotate_backward(offset: bool, kept: tuple, dy: Array) -> tuple:
    """dh = dy rotated back and moved back, and 0 under the code."""
    x, inverse, cos, sin = kept
    a, b, still = jnp.split(dy.astype(jnp.float32), [cos.shape[-1], 2 * cos.shape[-1]], axis=-1)
    still = jnp.pad(still[..., :-4], [(0, 0)] * 3 + [(0, 4)])
    if offset:
        twice = still[:, :1] + still[:, 1:2]  # the first key is its own and that of the second
        still = jnp.concatenate((twice, still[:, 2:], jnp.zeros_like(twice)), axis=1)
    dh, h = jnp.concatenate((a * cos - b * sin, b * cos + a * sin, still), axis=-1), x * inverse
    along = (dh * h).sum(axis=-1, keepdims=True) / h.shape[-1]
    return ((dh - h * along) * inverse).astype(x.dtype), None, None, None


head_loss = by_hand(head_loss_forward, lambda c, kept, g: (
    (kept[0] * g).astype(kept[0].dtype), kept[1] * g, None, None), static=(4,))  # fmt: skip
norm_linear = by_hand(norm_linear_forward, norm_linear_backward, static=(2, 3, 4))
norm_rotate = by_hand(norm_rotate_forward, norm_rotate_backward, static=(4,))
# Exact. In jax 0.12, erf in float32 cannot be differentiated inside of shard_map.
gelu = by_hand(lambda x: (jax.nn.gelu(x, approximate=False), x), lambda x, dy: (
    dy * (lax.erfc(-x / 2**0.5) / 2 + x * jnp.exp(-x * x / 2) / math.tau**0.5),))  # fmt: skip
# JAX's own dw of y = x w is dy^T x, transposed: XLA makes one product of that, a slow one on CPUs.
project = by_hand(lambda x, w, c: (product(x, w.T, c.mlp_forward, c), (x, w)), lambda c, kept, dy: (
    jnp.einsum("BTD,FD->BTF", dy, kept[1]), jnp.einsum("BTF,BTD->FD", kept[0], dy)),
    static=(2,))  # fmt: skip


# ---- Optimizer -----------------------------------------------------------------------------------
POLAR = (  # coefficients of five quintics, each the best for what the one before it leaves
    (8.156554524902461, -22.48329292557795, 15.878769915207462),
    (4.042929935166739, -2.808917465908714, 0.5000178451051316),
    (3.8916678022926607, -2.772484153217685, 0.5060648178503393),
    (3.285753657755655, -2.3681294933425376, 0.46449024233003106),
    (2.3465413258596377, -1.7097828382687081, 0.42323551169305323),
)


def schedule(c: Config) -> dict[str, np.ndarray]:
    """Every number that moves during the run, a row for each step."""
    steps, lengths = np.arange(c.steps), np.array([row.steps for row in c.rows])
    stage, begun = np.array([c.stage_at(step) for step in steps]), np.cumsum(lengths) - lengths
    now = np.interp(steps, [0, *c.ends], [*begun, sum(lengths)])  # in the stages' own steps
    fall = np.clip((now - c.flat) / (c.fallen - c.flat), 0, 1)
    late = np.clip((now - (sum(lengths) - c.momentum_fall)) / c.momentum_fall, 0, 1)
    return dict(
        rate=np.array([row.rate for row in c.rows])[stage] * (1 - fall) + 0.15 * fall,
        momentum=0.85 + 0.1 * np.minimum(now / c.momentum_steps, 1) - 0.1 * late,
        way=(now - begun[stage]) / lengths[stage],  # through the stage, below 1
        tied=now <= c.untie,
    )


def orthogonalize(G_NRC: Array, dtype: str) -> Array:
    """[muon] Five steps push every singular value of each matrix to about 1. Jordan et al. 2024,
    kellerjordan.github.io/posts/muon; [polar-express] by the quintics of Amsel et al. 2025,
    arXiv:2505.16932, record 38."""
    X = G_NRC.mT if (tall := G_NRC.shape[-2] > G_NRC.shape[-1]) else G_NRC
    X = (X / (1.02 * jnp.linalg.norm(X, axis=(-2, -1), keepdims=True) + 1e-6)).astype(dtype)
    for a, b, c in POLAR:
        A = X @ X.mT
        X = a * X + (b * A + c * A @ A) @ X
    return (X.mT if tall else X).astype(jnp.float32)


def normuon(c: Config, momentum: Any = 0.0) -> optax.GradientTransformation:
    """Nesterov momentum, orthogonalization, and [normuon]: rows of like size over time (columns, of
    wide matrices). Li et al. 2025, arXiv:2510.05491; record 41. Of arrays of whole matrices."""
    along = lambda x: -1 if x.shape[-2] >= x.shape[-1] else -2
    size = lambda x: jnp.linalg.norm(x, axis=(-2, -1), keepdims=True)

    def init(params):
        squares = lambda p: jnp.zeros_like(p).mean(axis=along(p), keepdims=True)
        return optax.tree.zeros_like(params), jax.tree.map(squares, params)

    def even_out(X, square):
        Y = X * lax.rsqrt(jnp.maximum(square, 1e-10))
        return Y * (size(X) / jnp.maximum(size(Y), 1e-10))  # of padding, both are 0

    def update(grads, state, params=None):
        buffer, squares = state
        buffer = jax.tree.map(lambda b, g: b + (1 - momentum) * (g - b), buffer, grads)
        nesterov = jax.tree.map(lambda b, g: g + momentum * (b - g), buffer, grads)
        X = jax.tree.map(lambda u: orthogonalize(u, c.compute), nesterov)
        mean = lambda v, x: v + 0.1 * (jnp.square(x).mean(axis=along(x), keepdims=True) - v)
        squares = jax.tree.map(mean, squares, X)
        return jax.tree.map(even_out, X, squares), (buffer, squares)

    return optax.GradientTransformation(init, update)


def optimizer(c: Config, momentum: Any = 0.0) -> optax.GradientTransformation:
    """Each row by its own rule: by element, or on whole matrices."""
    labels = {name: row.optimizer for name, row in param_table(c).items()}
    adam = lambda name, *betas: optax.scale_by_adam(*map(float, betas), eps=1e-10)
    rules = {rule: adam(*rule.split()) for rule in labels.values() if rule.startswith("adam ")}
    return optax.partition(rules | dict(muon=normuon(c, momentum)), labels)


# ---- Step ----------------------------------------------------------------------------------------
class State(NamedTuple):
    step: Array
    params: dict[str, Array]
    optimizer: Any
    held: dict[str, Array]  # Adam's gradients of an even step
    tables: dict[str, Array]  # those that tokens look up and the head, whole, as gather sends them


def initial_state(seed: Array, c: Config) -> State:
    key, params, rows = jax.random.key(seed), {}, param_table(c)
    for name, row in rows.items():  # by name: one row less does not re-seed the others
        params[name] = row.init(jax.random.fold_in(key, crc32(name.encode())), row.stored_shape)
    params["embed"] = params["head"]  # [tie] With one gradient, too, one table. Records 51, 53.
    # [key-start] Marked keys begin as queries, so that from the first step on a token finds its
    # like, and where keys are offset what came after them. Our own.
    half, marks = c.H // 2, [layer.marks for layer in c.layers if layer.window != "-"]
    q = np.array([n * c.H + i for n, m in enumerate(marks) if "q" in m for i in range(half)], int)
    flat = params["qk"].reshape(-1, *params["qk"].shape[2:])
    params["qk"] = flat.at[q + half].set(flat[q]).reshape(params["qk"].shape)
    held = {k: jnp.zeros_like(p) for k, p in params.items() if rows[k].optimizer != "muon"}
    tables = {k: jnp.array(p, c.compute) for k, p in params.items() if rows[k].spec == P("fsdp")}
    return State(jnp.int32(0), params, optimizer(c).init(params), held, tables)


def state_shapes(c: Config, mesh: Mesh) -> State:
    """Shape and sharding of each leaf: its parameter's row is found by the name on its path."""
    rows = param_table(c)

    def leaf(path, x):
        names = [getattr(key, "key", None) for key in path if path[0].name != "tables"]
        spec = next((rows[name].spec for name in names if name in rows), P())
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(mesh, spec))

    return jax.tree.map_with_path(leaf, jax.eval_shape(lambda: initial_state(np.uint32(0), c)))


def make_state(c: Config, mesh: Mesh) -> State:
    """Freshly initialised from c.seed: the same numbers on any number of devices."""
    shardings = jax.tree.map(lambda x: x.sharding, state_shapes(c, mesh))
    return jax.jit(initial_state, static_argnums=1, out_shardings=shardings)(np.uint32(c.seed), c)


def train_step(state: State, tokens_NBT: Array, c: Config, stage: int, odd: bool) -> tuple:
    """One update, from this device's N microbatches, and the batch's loss, all targets together."""
    rows, row = param_table(c), c.rows[stage]
    now = {name: jnp.asarray(x, jnp.float32)[state.step] for name, x in schedule(c).items()}
    ramp = lambda first, last: (first + (last - first) * now["way"]) / c.batch
    shares = {k: ramp(*ends) for k, ends in enumerate(row.shares) if any(ends)}
    weights, reduce_scatter = jax.vjp(functools.partial(gather, c=c), state.params)
    whole = lambda table: lax.pcast(table, "fsdp", to="varying").astype(jnp.float32)
    weights |= jax.tree.map(whole, state.tables)
    part = functools.partial(jax.value_and_grad(loss_fn), weights, shares=shares, c=c, stage=stage)
    accumulate = lambda total, tokens: (jax.tree.map(jnp.add, total, part(tokens)), None)
    zero = jnp.zeros_like(tokens_NBT[0, 0, 0], jnp.float32), jax.tree.map(jnp.zeros_like, weights)
    (loss, grads), _ = lax.scan(accumulate, zero, tokens_NBT)
    (grads,) = reduce_scatter(grads)
    held, old = {name: grads[name] for name in state.held}, state.optimizer
    if odd:  # [two-cadences] Adam's steps are half as many, of two steps' gradients. Record 39.
        held = jax.tree.map(jnp.add, state.held, held)
        both = held["embed"] + held["head"]
        tied = {name: jnp.where(now["tied"] > 0, both, held[name]) for name in ("embed", "head")}
        grads |= held | tied
    updates, new = optimizer(c, now["momentum"]).update(grads, old)
    if not odd:
        new = old._replace(inner_states=old.inner_states | dict(muon=new.inner_states["muon"]))
        updates = {name: u for name, u in updates.items() if name not in held}
    params, tables = dict(state.params), state.tables
    for name, update in updates.items():
        # [cautious-decay] Decay joins updates that shrink a weight. arXiv:2510.12402, record 43.
        p, (*_, lr, decay, _), rate = params[name], rows[name], now["rate"]
        if name not in held:  # a bank: of each group as many matrices as the device owns
            own = update.shape[1]
            lr = lax.dynamic_slice_in_dim(lr, lax.axis_index("fsdp") * own, own, axis=1)
        params[name] = p - rate * lr * (update + rate * decay * jnp.where(update * p > 0, p, 0))
    if odd:  # XLA may round the twins' updates differently; what is sent arrives while Muon works
        params["embed"] = jnp.where(now["tied"] > 0, params["head"], params["embed"])
        send = functools.partial(lax.all_gather, axis_name="fsdp", tiled=True, to="invarying")
        tables = {name: send(params[name].astype(c.compute)) for name in tables}
    return State(state.step + 1, params, new, held, tables), lax.psum(loss, "fsdp") / row.T


def val_step(params: dict[str, Array], tokens_NBT: Array, c: Config, stage: int) -> Array:
    """Mean next-token loss of a batch; c as from Config.for_validation."""
    weights = gather(params, c)
    losses = lax.map(lambda tokens: loss_fn(weights, tokens, {1: 1.0}, c, stage), tokens_NBT)
    return lax.psum(losses.sum(), "fsdp") / (GROUP * c.val_T)


def compile_stage(kind: str, stage: int, c: Config, mesh: Mesh) -> jax.stages.Compiled:
    """The program of "even", "odd" or "val" steps, from shapes: no batch is spent."""
    train, arg, data = kind != "val", state_shapes(c, mesh), P("fsdp")
    B, T = (c.batch, c.rows[stage].T) if train else (GROUP, c.val_T)
    step = functools.partial(train_step, odd=kind == "odd") if train else val_step
    arg, c = (arg, c) if train else (arg.params, c.for_validation())
    specs = jax.tree.map(lambda x: x.sharding.spec, arg)
    outs = (specs, P()) if train else P()
    b = math.gcd(c.microbatch, B // mesh.size)
    on_device = lambda arg, tokens: step(arg, tokens.reshape(-1, b, T + 1), c=c, stage=stage)
    program = jax.shard_map(on_device, mesh=mesh, in_specs=(specs, data), out_specs=outs)
    tokens = jax.ShapeDtypeStruct((B, T + 1), "int32", sharding=NamedSharding(mesh, data))
    program = jax.jit(program, donate_argnums=0 if train else (), keep_unused=True)
    return program.lower(arg, tokens).compile(OPTIONS.get(mesh.devices.flat[0].platform))


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
    form = r"\s*(\d+\s+){5}[\d.]+\s+[\d.:,]*[1-9][\d.:,]*\s*"
    if bad := [row for row in c.stages.split("/") if not re.fullmatch(form, row)]:
        refuse(f"--stages: {bad[0]!r} is no stage; --help says what one is")
    if bad := [T for T in (c.val_T, *(row.T for row in c.rows)) if T % c.head_chunk]:
        refuse(f"--head_chunk {c.head_chunk} does not divide sequences of {bad} tokens: --batch")
    if c.val_tokens < 1 or c.val_tokens % (GROUP * c.val_T):
        refuse(f"--val_tokens {c.val_tokens} is no multiple of 8 sequences of --val_T {c.val_T}")
    return preset, dataclasses.replace(c, seed=secrets.randbits(31)) if c.seed < 0 else c


def fit_devices(preset: str, c: Config) -> tuple[list[jax.Device], Config]:
    """The devices of this machine, and the configuration in formats that they can run."""
    devices = jax.devices()[: c.batch]  # a sequence each, at least
    if preset == "record" and devices[0].platform == "cpu":
        lacks = "JAX sees only a CPU, the record needs GPUs: ./run.sh installs it with CUDA"
        print(f"warning: {lacks}; without GPUs: ./run.sh tiny", file=sys.stderr)
    if GROUP % (n := len(devices)) or c.batch % n:
        refuse(f"{n} devices do not divide --batch {c.batch} or 8 matrices: use 1, 2, 4 or 8")
    gpu = devices[0].platform == "gpu" and "NVIDIA" in devices[0].device_kind
    if not gpu or c.compute != "bfloat16":  # cuDNN has no float32
        c = dataclasses.replace(c, attention="xla")
    if gpu and float(devices[0].compute_capability) < 8.9:  # no FP8
        c = c.without_fp8()
    return devices, c


# ---- Data ----------------------------------------------------------------------------------------
def open_shard(path: Path) -> np.memmap:
    """The tokens of a file in llm.c's format: 256 int32 (magic, version, count), then uint16."""
    magic, version, count = [*np.fromfile(path, "<i4", 3).tolist(), 0, 0, 0][:3]
    if (magic, version, path.stat().st_size) != (20240520, 1, 1024 + 2 * max(1, count)):
        refuse(f"{path} is no whole shard of tokens: python data/check.py {path.parent} says why")
    return np.memmap(path, "<u2", "r", offset=1024, shape=(count,))


def layout(shard: np.ndarray, fills: list[tuple], c: Config) -> Iterator[list[list[tuple]]]:
    """[packing] The steps that a shard holds: of each sequence, start and end of its pieces, T + 1
    tokens. It takes whole documents in order, each cut to the longest, the last one to fit; what is
    cut is dropped, and so is a shard's tail; records 26, 29. Longest 0: one text, without gaps."""
    starts = np.flatnonzero(shard == c.eot) if any(longest for *_, longest in fills) else []
    starts, at, n = [*map(int, starts), len(shard)], 0, 0
    for sequences, T, longest in fills:
        step = []
        for _ in range(sequences):
            pieces, room = [], T + 1
            while room and longest:
                while starts[n] < at:
                    n += 1
                if starts[n] == len(shard):
                    return
                size = min(room, longest, starts[n + 1] - starts[n])
                pieces.append((starts[n], starts[n] + size))
                at, room = starts[n + 1], room - size
            if not longest:
                pieces, at = [(at, at + T + 1)], at + T
            step.append(pieces)
        if at + (not longest) > len(shard):
            return
        yield step


def find_data(c: Config) -> list[np.memmap]:
    """The shards that the run reads, validation last. ./run.sh checks more, by data/check.py."""
    folder, shards = Path(c.data).absolute(), []
    if any(any(row.shares[0]) for row in c.rows) and len(prefix_table(c)) != c.vocab:
        refuse(f"{c.prefixes} holds no prefixes of {c.vocab} tokens; see data/README.md, or add "
               "--prefixes ''")  # fmt: skip
    for split in "train", "val":
        fills, found = c.fills(split), 0
        paths = sorted(folder.glob(f"[!.]*_{split}_*.bin"))
        for path in paths if split == "train" else paths[:1]:
            if found < len(fills):
                shards.append(open_shard(path))
                found += sum(1 for _ in layout(shards[-1], fills[found:], c))
        if found < len(fills):
            less = dict(train="fewer --steps", val=f"--val_tokens {found * GROUP * c.val_T}")
            refuse(f"{folder}: {split} shards hold {found} of {len(fills)} steps; get more "
                   f"(data/README.md), or run with {less[split]}")  # fmt: skip
    return shards


def check_tokens(shard: np.memmap, fills: list[tuple], c: Config) -> dict[str, Any]:
    """One pass over all bytes: facts for the log. Exits 2 where the run would learn nonsense."""
    path, largest, starts = Path(shard.filename), 0, []
    sha = hashlib.sha256(np.fromfile(path, np.uint8, 1024))
    for start in range(0, len(shard), 2**22):
        tokens = np.array(shard[start : start + 2**22])
        starts.append(start + np.flatnonzero(tokens == c.eot))
        largest = max(largest, int(tokens.max()))
        sha.update(tokens)
    sizes, crowd = np.diff(np.concatenate(starts), append=len(shard)), False
    for T, longest in {fill[1:] for fill in fills}:
        at = np.cumsum(read := np.minimum(sizes, longest or len(shard))) - read
        crowd |= np.any(at[4095:] - at[:-4095] < T)  # more documents than the code tells apart
    if largest >= c.vocab or not len(sizes) or crowd:
        refuse(f"{path}: its largest token is {largest} (--vocab {c.vocab}), {len(sizes)} are "
               f"--eot {c.eot}, more than 4095 in a sequence: {bool(crowd)}")  # fmt: skip
    return dict(file=path.name, bytes=path.stat().st_size, sha256=sha.hexdigest(),
                tokens=len(shard), documents=len(sizes), largest_token=largest)  # fmt: skip


def stream(shards: list[np.ndarray], fills: list[tuple], c: Config) -> Iterator[np.ndarray]:
    """The steps of a run, over the shards in order: (sequences, T + 1) of int32."""
    done = 0
    for shard in shards:
        for step in layout(shard, fills[done:], c):
            parts = [np.concatenate([shard[a:b] for a, b in pieces]) for pieces in step]
            yield np.stack(parts).astype(np.int32)
            done += 1


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
        env = re.compile("(?!.*(TOKEN|KEY|SECRET|PASS))(JAX|XLA|(LIB)?TPU|CUD|NVI|NCCL|TF_CPP|GLI)")
        home, ask = str(Path.home()), subprocess.getoutput
        packages = {module.__name__: module.__version__ for module in (jax, np, optax)}
        self.facts(
            versions=dict(packages, python=sys.version, backend=devices[0].client.platform_version),
            devices=[device.device_kind for device in devices],
            driver=ask("nvidia-smi --query-gpu=driver_version --format=csv,noheader 2>/dev/null"),
            environment={k: v.replace(home, "~") for k, v in os.environ.items() if env.match(k)},
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
    mask = (j <= i) & (i - j <= W) & (document[:, None] == document)
    pos = positions(np.diff(document, prepend=0)[None], c, 0)
    put = lambda x, code: x.at[..., -4:].set(jnp.broadcast_to(code, (*x.shape[:-1], 4)))
    kernel = lambda q, k, v: attend(put(q, pos.code_q), put(k, pos.code_k), v, W, pos.scale, c)

    def exact(q, k, v):
        q, k, v = q.at[..., -4:].set(0).astype("float32"), k.astype("float32"), v.astype("float32")
        scale = dict(scale=pos.scale, implementation="xla")
        return jax.nn.dot_product_attention(q, k, v, mask=mask, **scale)

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
    stages = dict.fromkeys((KINDS[s % 2], c.stage_at(s)) for s in range(c.steps))
    stages |= dict.fromkeys(("val", c.stage_at(s)) for s in range(c.steps + 1) if c.validates(s))
    print(f"compiling {len(stages)} programs, reading {len(shards)} shards ...", flush=True)
    began, cache = time.perf_counter(), collections.Counter()
    jax.monitoring.register_event_listener(lambda event, **_: cache.update([event.split("/")[-1]]))
    jobs = [functools.partial(compile_stage, *stage, c, mesh) for stage in stages]
    with ThreadPoolExecutor(8) as pool:
        first = pool.submit(jobs[0])  # alone: it fills the cache of tuned kernels, undisturbed
        fills = [c.fills("train")] * (len(shards) - 1) + [c.fills("val")]
        log.facts(data=[*pool.map(check_tokens, shards, fills, [c] * len(shards))])
        programs = [first.result(), *pool.map(lambda job: job(), jobs[1:])]
    programs, state = dict(zip(stages, programs, strict=True)), make_state(c, mesh)
    for (kind, _), program in programs.items():
        tokens = next(on_devices([np.zeros(program.args_info[0][1].shape, np.int32)], mesh))
        out = jax.block_until_ready(program(state.params if kind == "val" else state, tokens))
        state = state if kind == "val" else out[0]
    log.facts(prefixes=hashlib.sha256(prefix_table(c)).hexdigest())
    log.facts(compile=dict(seconds=time.perf_counter() - began, **cache))
    return programs


def train(c: Config, mesh: Mesh, programs: dict, shards: list, log: Log) -> tuple[dict, dict]:
    """The run, from fresh weights: trained ones, and facts."""
    state, clock = jax.block_until_ready(make_state(c, mesh)), Clock(c.steps, log.line)
    batches = on_devices(stream(shards[:-1], c.fills("train"), c), mesh)
    for step in range(c.steps + 1):
        if c.validates(step):
            clock.stop(state)
            program, ms = programs["val", c.stage_at(step)], 1e3 * clock.seconds
            val_batches = on_devices(stream(shards[-1:], c.fills("val"), c), mesh)
            val_loss = float(np.mean([float(program(state.params, b)) for b in val_batches]))
            log.line(f"step:{step}/{c.steps} val_loss:{val_loss:.4f} train_time:{ms:.0f}ms "
                     f"step_avg:{ms / max(step, 1):.2f}ms")  # fmt: skip
            if not math.isfinite(val_loss):
                log.line("NON-FINITE: the loss is no number, the run is void; lower the rates")
                sys.exit(3)
            if val_loss <= c.target or step == c.steps:
                break
            clock.started = time.perf_counter()
        state, loss = programs[KINDS[step % 2], c.stage_at(step)](state, next(batches))
        clock.show((step + 1, loss))
    memory = [(d.memory_stats() or {}).get("peak_bytes_in_use", 0) for d in mesh.devices.flat]
    return state.params, dict(
        reason="target reached" if val_loss <= c.target else "end of schedule", val_loss=val_loss,
        target=c.target, steps=step, tokens=sum(B * T for B, T, _ in c.fills("train")[:step]),
        seed=c.seed, devices=len(memory), train_time_ms=ms, peak_memory_bytes=max(memory),
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
        refuse(f"not enough memory on {machine} while {doing}: twice --batch is the same step "
               "in less, of shorter sequences; see Memory in README.md")  # fmt: skip
    try:
        if c.save:
            path = log.path.with_suffix(".npz")  # numbers under the names of the table
            np.savez(path, config=json.dumps(dataclasses.asdict(c)), **unpad(params, c))
            result["weights"] = path.name
    finally:  # neither a full disk nor Ctrl-C costs the result of a run that came to its end
        log.line(f"RESULT {json.dumps(result)}")


if __name__ == "__main__":
    main(sys.argv[1:])
