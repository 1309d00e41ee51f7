"""Train a GPT-2-small-class model to 3.28 validation loss on FineWeb: one file, JAX, 8xH100.

Run     ./run.sh, or python train_gpt.py [record | tiny] [--field value ...]: see --help
Dims    B sequence  T position  D model  E output  H head  K head channel  F hidden  V row of table
        N token, matrix, microbatch  G group of 8 matrices  R row  C column; x residual stream
Source  record 89 of modded-nanogpt; README.md says where we differ, and what was measured where
"""

import argparse
import ast
import collections
import contextlib
import dataclasses
import faulthandler
import functools
import hashlib
import inspect
import itertools
import json
import math
import os
import re
import secrets
import select
import signal
import subprocess
import sys
import threading
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
from jax.experimental.multihost_utils import process_allgather
from jax.sharding import AxisType, Mesh, NamedSharding

SOURCE = Path(__file__).read_bytes().decode()  # now: the file may be edited while a run goes on
KINDS = "even", "odd"  # of training steps: Adam waits for the odd ones
Layer = collections.namedtuple("Layer", "window marks table reads skip")  # a word of Config.plan
Stage = collections.namedtuple("Stage", "steps T S L document rate shares")  # a row of its stages
GROUP = 8  # matrices in a group of a bank, and sequences in a validation step
PLAN_WORD = r"([LS]|-(?=n?(?:<|$)))([pkqxgdbnm]*)(?:v(\d+))?(?:@(\d+))?(?:<(\d+))?"
OPTIONS = dict(  # of the compiler, by platform; they overrule XLA_FLAGS
    # cuBLAS adds what a product is added to; no product is in a fusion with slices, where it would
    # not be tuned; each gradient leaves when made; and no rounding is left out, which would keep
    # the residual stream in float32.
    gpu=dict(xla_gpu_enable_triton_gemm=False, xla_gpu_enable_dynamic_slice_fusion=False,
             xla_gpu_reduce_scatter_combine_threshold_bytes=0, xla_allow_excess_precision=False),
    # In jax 0.10 YNN's kernels are slower than those that they replace, since 0.11 faster.
    cpu=dict(xla_cpu_experimental_ynn_fusion_type="") if jax.__version_info__ < (0, 11) else {},
)  # fmt: skip


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
    head_chunk: int = 16384     # tokens whose logits exist at once (memory); divides T and val_T
    dc_window: int = 112        # keys that composed heads see, tokens
    compute: str = "bfloat16"              # format of activations and gathered weights
    mlp_forward: str = "bfloat16"          # format of the MLP's products in training, forward
    head_forward: str = "float8_e4m3fn"    # format of the head's operands
    head_backward: str = "float8_e5m2"     # format of the logits' gradient
    # Powers of two before a cast to FP8, divided out after it, that fill its range: see [fp8-head].
    x_scale: float = 4.0        # of what was normalised: a channel is about 1, below D**.5
    w_scale: float = 256.0      # of a weight, times its lambda: some hundredths, below 1.7
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
    save_every: int = 0         # steps between checkpoints; 0: only when the run is told to stop
    resume: str = ""            # checkpoint to go on from, or a folder: the newest one in it
    force: int = 0              # 1: go on although source, flags or data are not the same
    stall: int = 300            # seconds without a step after which the run ends; 0: it waits
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


def make_mesh(devices: list[jax.Device]) -> Mesh:
    """("fsdp",); beyond 8 devices ("nodes", "fsdp"): every node of 8 has all weights."""
    names = ("nodes", "fsdp")[len(devices) <= GROUP :]
    grid = np.array(devices).reshape((-1, GROUP)[: len(names)])
    return Mesh(grid, names, axis_types=(AxisType.Auto,) * len(names))


def axes() -> tuple[str, ...]:
    """The mesh's, in a program: tokens are spread over all of them, weights over the last."""
    return jax.sharding.get_abstract_mesh().axis_names


def gather(params: dict[str, Array], c: Config) -> dict[str, Any]:
    """[fsdp] Whole weights by all-gather, a table or a group of matrices at a time, kept for the
    backward pass; the transpose reduce-scatters each gradient to its owner. Sent in c.compute, and
    float32 before and after, so that microbatches add up in float32. ZeRO-2, arXiv:1910.02054."""
    vary = lambda x, over: lax.pcast(x, over, to="varying")  # the transpose adds up
    send = lambda x: lax.all_gather(vary(x.astype(c.compute), axes()[:-1]), "fsdp", tiled=True)
    weights, rows = {}, param_table(c)
    for name, p in params.items():
        row = rows[name]
        if row.spec == P():  # whole already; the transpose is a psum
            weights[name] = vary(p, axes())
        elif row.spec == P("fsdp"):
            weights[name] = send(p).astype(jnp.float32)
        else:  # a bank: its matrices, without padding
            groups = (send(group).astype(jnp.float32) for group in p)
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
    rows, every = param_table(c), functools.partial(process_allgather, tiled=True)
    whole = lambda p, shape: p.reshape(-1, *p.shape[2:]) if p.ndim > len(shape) else p
    return {k: whole(every(params[k]), row.shape)[: row.shape[0]] for k, row in rows.items()}


# ---- Model ---------------------------------------------------------------------------------------
def loss_fn(weights: dict, tokens_BT: Array, shares: dict, c: Config, stage: int) -> Array:
    """Sum over this microbatch of the losses to several targets, nats, each times its share: 1 is
    the next token, 2 the one after it .., 0 the longest prefix of the next token. weights as from
    gather and read_pairs; tokens_BT has one token more than the model reads."""
    x = forward(weights, tokens_BT[:, :-1], c, stage)
    # [mtp] Early in training later tokens are targets as well; arXiv:2404.19737, record 53.
    # [prefix] And so is the longest token that the next token begins with; record 88.
    later = jnp.pad(tokens_BT, ((0, 0), (0, max(shares))), constant_values=-1)
    prefix, T = lambda tokens: jnp.take(prefix_table(c), tokens, axis=0), x.shape[1]
    targets = [later[:, k:][:, :T] if k else prefix(tokens_BT[:, 1:]) for k in shares]
    targets_NK = jnp.stack(targets, axis=-1).reshape(-1, len(shares))
    shares_K = jnp.stack([jnp.float32(share) for share in shares.values()])
    return head_loss(norm(x).reshape(-1, c.D), weights["head"], targets_NK, shares_K, c)


def forward(weights: dict, inputs: Array, c: Config, stage: int) -> Array:
    """The last stream x, (B, T, D), of tokens (B, T): logits are softcap(norm(x) @ head.T)."""
    x0, pairs, values = look_up(weights, inputs, c)
    # [gates] Small nets, by which each token sets the gates of the layers after it, until the next
    # one. Hidden layers are here, the outputs are the gates' own: say(). Records 81 and 85.
    net = lambda x, w: gelu(jnp.einsum("BTD,ED->BTE", x, w.astype(x.dtype)))
    rows_of = lambda w, kind: {k: row for k, row in w._asdict().items() if k.startswith(kind)}
    gate_nets, mudd_nets, own = iter(weights["gate_in"]), iter(weights["mudd_in"]), deal(weights, c)
    gated = [dict(gate_start=weights["gate_start"]), *(rows_of(w, "gate_") for w in own)]
    new = [n for n, layer in enumerate(c.layers, 1) if "n" in layer.marks]

    def gates(x, n):  # one product for all of them
        until = min([i for i in new if i > n], default=len(gated))
        rows = {(i, k): row for i in range(n, until) for k, row in gated[i].items()}
        return say(net(x, next(gate_nets)), rows, weights["gate_scale"])

    says = gates(x0, 0)
    x = start = weighted_sum((1.0, x0), (says[0, "gate_start"], pairs))
    # What a layer may read beside the residual stream x; all but pos and stage are (B, T, D).
    seen = SimpleNamespace(x0=x0, pairs=pairs, values=values, start=start, outputs=[],
        pos=positions(inputs == c.eot, c, stage), stage=c.rows[stage])  # fmt: skip
    for n, (layer, w) in enumerate(zip(c.layers, own, strict=True), 1):
        says = gates(x, n) if n in new else says
        w = w._replace(**{k: gate for (i, k), gate in says.items() if i == n})
        if "m" in layer.marks:
            entry, w = x, w._replace(**say(net(x, next(mudd_nets)), rows_of(w, "mudd_"), 0.1))
        x = block(x, layer, w, seen, c)
        seen.outputs.append(x)
    if "m" in c.plan:  # the head, too, reads what earlier layers made
        reads, skip = ([seen.outputs[i] for i in c.again(why)] for why in ("reads", "skip"))
        says = say(net(x, next(mudd_nets)), dict(mudd_head=weights["mudd_head"]), 0.1)
        again = [start, *reads, entry, *values[:1], *skip]
        x = weighted_sum((1.0, x), *each(says["mudd_head"], again))
    return x


def read(table: Array, rows: Array) -> Array:
    return table.at[rows].get(mode="promise_in_bounds")


def read_pairs(weights: dict, tokens_BT: Array, c: Config) -> dict:
    """[bigram] Instead of the table of hashed token pairs the rows (B, T, D) that the model reads:
    few have a gradient. Records 62 and 71."""
    return weights | dict(bigram=read(weights["bigram"], hash_pairs(tokens_BT[:, :-1], c)[0]))


def look_up(weights: dict[str, Any], tokens_BT: Array, c: Config) -> tuple:
    """Of each token: its normalised embedding, that of its pair, its row of each value table."""
    names = sorted(name for name in weights if name.startswith("values"))
    rows = (read(weights[name], tokens_BT) for name in ("embed", *names))
    embed, *values, pairs = (x.astype(c.compute) for x in (*rows, weights["bigram"]))
    # [smear] An embedding may take in some of the one before it. modded-nanogpt record 34.
    gate = jax.nn.sigmoid(embed[..., :12].astype(jnp.float32) @ weights["smear_gate"])
    last = jnp.pad(embed[:, :-1], ((0, 0), (1, 0), (0, 0)))
    x0 = norm(weighted_sum((1.0, embed), (weights["smear_lambda"] * gate[..., None], last)))
    # Signs tell apart pairs of one row. Record 83.
    return x0, pairs * signs(hash_pairs(tokens_BT, c)[1], c), values


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
        y = attention(source, extra, layer, w, seen, c, w.attn_lambdas[1])
        # [x0] Each layer may fade the residual stream and read the embeddings again. Record 9.
        pairs = [(w.gate_bigram, seen.pairs)] if "b" in layer.marks else []
        kept = (w.attn_lambdas[0], x), (1.0, y), (w.gate_x0, seen.x0)
        x = weighted_sum(*kept, *pairs)
    return weighted_sum((w.mlp_lambdas[0], x), (1.0, mlp(x, w, c, w.mlp_lambdas[1])))


def mixed_block(x: Array, source: Array, layer: Layer, w: NamedTuple, seen: SimpleNamespace,
                c: Config) -> Array:  # fmt: skip
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


def attention(x: Array, extra: list, layer: Layer, w: NamedTuple, seen: SimpleNamespace,
              c: Config, scale: Any = 1.0) -> Array:  # fmt: skip
    """extra are the terms that v is given beside its product with x; scale is of the output."""
    (B, T, D), pos, (w_v, w_o) = x.shape, seen.pos, w.vo
    # Lambdas scale weights, D x D: fewer bytes than T x D, for gradients as well.
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
    w_o = (scale * w.vo_lambdas[1] * w_o).astype(x.dtype)
    return jnp.einsum("BTD,ED->BTE", y.reshape(B, T, D), w_o)


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
    scores = scale * band_scores(band(q), two(band(k)))
    attends = jax.nn.softmax(jnp.where(seen[:, None], scores, -jnp.inf), axis=-1)
    source = source * lax.rsqrt(jnp.square(source).mean(axis=-1, keepdims=True) + 1e-6)
    mixed = jnp.einsum("BNHIJ,BNIH->BNIJ", attends, band(source)).astype(v.dtype)
    y = jnp.einsum("BNIJ,BNJHK->BNIHK", mixed, two(band(v))).reshape(q.shape)
    return (target[..., None] * y).astype(v.dtype)


def mlp(x: Array, w: NamedTuple, c: Config, scale: Any = 1.0) -> Array:
    fc, proj = w.mlp
    fc, proj = fc.astype(x.dtype), (scale * proj).astype(x.dtype)
    # [relu2] So et al. 2021, arXiv:2109.08668.
    hidden = jnp.square(jax.nn.relu(norm_linear(x, fc, "output", c.mlp_forward, c)))
    return project(hidden, proj, c)


def say(hidden_BTE: Array, rows: dict[Any, Array], scale: Any) -> dict[Any, Array]:
    """The outputs (B, T, n) of that net, in float32, by the rows that are there: [n, E + 1] are
    weights and a bias."""
    rows = {name: row for name, row in rows.items() if len(row)}
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
    """Of tokens, some of which start documents: angles, cos and sin (T, 1 or 2, K / 4) for layers
    with paired heads (True) and others; code_q and code_k (B, T, 1, 4); scale of the scores."""
    (speed, scale), t, angles = rotation(c, stage), jnp.arange(starts_BT.shape[1])[:, None], {}
    for paired, at in (False, t), (True, 2 * t + jnp.arange(2)):
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
    [yarn] Where windows grow, slow pairs slow down and scores grow; arXiv:2309.00071, record 31."""
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


# [softcap] Logits between 0 and 23: Gemma 2, arXiv:2408.00118; records 18 and 54.
softcap = lambda z: 23 * jax.nn.sigmoid((z.astype(jnp.float32) + 5) / 7.5)


def head_loss_forward(x_ND: Array, w_VD: Array, targets_NK: Array, shares_K: Array, c: Config):
    """[fp8-head] Softcapped cross-entropy over all V columns to K targets (-1: none), each times
    its share, summed over N tokens; arXiv:2209.05433, record 19. In chunks of tokens, so that
    [N, V] logits never exist; both gradients are computed while a chunk's are at hand."""
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
        # Of -log softmax(s) at a target: dL/ds = softmax(s) - hit; ds/dz = s (23 - s) / (23 * 7.5).
        hits = g_scale / (23 * 7.5) * shares
        # Barriers: XLA would keep exp in float32 from the sum to its second use, and compute all of
        # g8 once more, for its transpose.
        z, share = lax.optimization_barrier((z, hits.sum(axis=1, keepdims=True) / total))
        s, column = softcap(z), lax.broadcasted_iota(jnp.int32, z.shape, 1)
        pairs = zip(targets.T[..., None], hits.T[..., None], strict=True)
        ds = share * jnp.exp(s) - sum(jnp.where(column == target, hit, 0) for target, hit in pairs)
        g8 = lax.optimization_barrier(quantize(ds * s * (23 - s), 1, c.head_backward))
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


def product(x_BTC: Array, w_RC: Array, dtype: str, c: Config, scale_BT1: Any = 1.0) -> Array:
    """y = scale x w^T, operands in dtype. [fp8-mlp] In FP8 forward only; records 84 and 89."""
    if not dtype.startswith("float8"):  # scaled last: that is part of what reads y
        return (jnp.einsum("BTC,RC->BTR", x_BTC, w_RC) * scale_BT1).astype(x_BTC.dtype)
    x8 = quantize((x_BTC * scale_BT1).reshape(-1, x_BTC.shape[-1]), c.x_scale, dtype)
    y = matmul(x8, quantize(w_RC, c.w_scale, dtype), (1, 1), c.x_scale * c.w_scale, c.compute, None)
    return y.reshape(*x_BTC.shape[:-1], -1)


# JAX's own gradients of norms move more bytes. For h = x / rms(x), of D channels, and its gradient,
#     dx = (dh - h sum(dh h) / D) / rms(x):    what of dh lies along h would change x's length only.
def norm_linear_forward(x_BTD: Array, w_ED: Array, project_by: str, dtype: str, c: Config) -> tuple:
    """y = norm(x) w^T, as x w^T / rms(x): norm(x) is never written."""
    inverse = lax.optimization_barrier(inverse_rms(x_BTD))  # or XLA makes x twice, of its terms
    y = product(x_BTD, w_ED, dtype, c, inverse)
    return y, (x_BTD, inverse, w_ED, y)


def norm_linear_backward(project_by: str, dtype: str, c: Config, kept: tuple, dy: Array) -> tuple:
    """dh / rms(x) = dz w, dw = dz^T x. sum(dh h) = sum(dy y), which by "output" is free if the
    kernel that makes dy reads y anyway, as an elementwise function's does; else by "input"."""
    x, inverse, w_ED, y = kept
    dz = (dy * inverse).astype(x.dtype)
    dx = jnp.einsum("BTE,ED->BTD", dz, w_ED)
    a, b = dict(output=(dy, y), input=(dx, x))[project_by]
    along = (a.astype(jnp.float32) * b).sum(axis=-1, keepdims=True) / x.shape[-1]
    return (dx - x * (along * inverse**2)).astype(x.dtype), jnp.einsum("BTE,BTD->ED", dz, x)


def turn(h_BTHK: Array, cos: Array, sin: Array, offset: bool) -> Array:
    """Linear: channel pairs (j, j + K/4), j < K/4, rotated by angles (T, 1 or 2, K/4), of which all
    or every second head has one; by offset the half that does not rotate is of the position before
    (the first keeps its own); 0 in the last four. No branches, in which threads would wait."""
    (B, T, _, K), t = h_BTHK.shape, jnp.arange(h_BTHK.shape[1])[:, None, None]
    channel, h = jnp.arange(K), h_BTHK.reshape(B, T, -1, cos.shape[1], 4, K // 4)
    swapped = h.reshape(*h.shape[:4], 2, 2, K // 4)[..., ::-1, :].reshape(h.shape)
    cos, sin, quarter = cos[:, None, :, None], sin[:, None, :, None], jnp.arange(4)[:, None]
    sin = jnp.where(quarter == 0, sin, jnp.where(quarter == 1, -sin, 0))
    y = (h * jnp.where(quarter < 2, cos, 1) + swapped * sin).reshape(h_BTHK.shape)
    if offset:
        before = lax.pad(h_BTHK, np.float32(0), [(0, 0, 0), (1, -1, 0), (0, 0, 0), (0, 0, 0)])
        y = jnp.where((channel < K // 2) | (t == 0), y, before)
    return jnp.where(channel < K - 4, y, 0)


def norm_rotate_forward(x_BTHK: Array, cos: Array, sin: Array, code: Array, offset: bool) -> tuple:
    """y = turn(norm(x)), the document code in its last four channels."""
    inverse, K = inverse_rms(x_BTHK), x_BTHK.shape[-1]
    y = turn(x_BTHK * inverse, cos, sin, offset)
    y = jnp.where(jnp.arange(K) < K - 4, y, jnp.tile(code, K // 4)).astype(x_BTHK.dtype)
    return lax.optimization_barrier(y), (x_BTHK, inverse, cos, sin)


def norm_rotate_backward(offset: bool, kept: tuple, dy: Array) -> tuple:
    x, inverse, cos, sin = kept
    h = x * inverse
    back = jax.linear_transpose(functools.partial(turn, cos=cos, sin=sin, offset=offset), h)
    (dh,) = back(dy.astype(jnp.float32))
    along = (dh * h).sum(axis=-1, keepdims=True) / h.shape[-1]
    return ((dh - h * along) * inverse).astype(x.dtype), None, None, None


head_loss = by_hand(head_loss_forward, lambda c, kept, g: (
    (kept[0] * g).astype(kept[0].dtype), kept[1] * g, None, None), static=(4,))  # fmt: skip
norm_linear = by_hand(norm_linear_forward, norm_linear_backward, static=(2, 3, 4))
norm_rotate = by_hand(norm_rotate_forward, norm_rotate_backward, static=(4,))
# In float32, but not their gradient: products of that would be in float32, too.
band_scores = by_hand(lambda q, k: (
    jnp.einsum("BNIHK,BNJHK->BNHIJ", q, k, preferred_element_type=jnp.float32), (q, k)),
    lambda kept, g: (jnp.einsum("BNHIJ,BNJHK->BNIHK", g.astype(kept[1].dtype), kept[1]),
    jnp.einsum("BNHIJ,BNIHK->BNJHK", g.astype(kept[0].dtype), kept[0])))  # fmt: skip
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
    if any(marked := ["q" in layer.marks for layer in c.layers if layer.window != "-"]):
        matrices, N = params["qk"].reshape(-1, *params["qk"].shape[2:]), rows["qk"].shape[0]
        owned, at = matrices[:N].reshape(-1, 2, c.D, c.D), np.flatnonzero(marked)  # queries, keys
        owned = owned.at[at, 1].set(owned[at, 0]).reshape(N, *matrices.shape[1:])
        params["qk"] = matrices.at[:N].set(owned).reshape(params["qk"].shape)
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
    dense = {name: p for name, p in state.params.items() if name != "bigram"}
    weights, reduce_scatter = jax.vjp(functools.partial(gather, c=c), dense)
    whole = {name: lax.pcast(t, axes(), to="varying") for name, t in state.tables.items()}
    table = whole.pop("bigram")
    weights |= jax.tree.map(lambda rows: rows.astype(jnp.float32), whole)
    part = jax.value_and_grad(functools.partial(loss_fn, shares=shares, c=c, stage=stage))

    def accumulate(total, tokens):
        loss, grads = part(read_pairs(weights | dict(bigram=table), tokens, c), tokens)
        pairs = hash_pairs(tokens[:, :-1], c)[0], grads.pop("bigram")
        return jax.tree.map(jnp.add, total, (loss, grads)), pairs

    zero = jnp.zeros_like(tokens_NBT[0, 0, 0], jnp.float32), jax.tree.map(jnp.zeros_like, weights)
    (loss, grads), pairs = lax.scan(accumulate, zero, tokens_NBT)
    (grads,) = reduce_scatter(grads)
    # [sparse-grads] Of the table of pairs devices exchange the gradients of the rows that tokens
    # read, and each adds up its own: a device's whole gradient would be mostly zeros. Record 71.
    owned = state.params["bigram"]
    at, pairs = (lax.all_gather(x, axes(), tiled=True, to="invarying") for x in pairs)
    at = (at - lax.axis_index("fsdp") * len(owned)).astype(jnp.uint32)  # other devices': too large
    grads["bigram"] = jnp.zeros_like(owned).at[at].add(pairs.astype(jnp.float32), mode="drop")
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
    return State(state.step + 1, params, new, held, tables), lax.psum(loss, axes()) / row.T


def val_step(params: dict[str, Array], tokens_NBT: Array, c: Config, stage: int) -> Array:
    """Mean next-token loss of a batch; c as from Config.for_validation."""
    weights = gather(params, c)
    loss = lambda tokens: loss_fn(read_pairs(weights, tokens, c), tokens, {1: 1.0}, c, stage)
    losses = lax.map(loss, tokens_NBT)
    nodes = lax.psum(1, axes()[:-1])  # each of them has the same sequences
    return lax.psum(losses.sum(), axes()) / (nodes * GROUP * c.val_T)


def compile_stage(kind: str, stage: int, c: Config, mesh: Mesh) -> jax.stages.Compiled:
    """The program of "even", "odd" or "val" steps, from shapes: no batch is spent."""
    train, arg = kind != "val", state_shapes(c, mesh)
    data, share = (P(mesh.axis_names), mesh.size) if train else (P("fsdp"), mesh.shape["fsdp"])
    B, T = (c.batch, c.rows[stage].T) if train else (GROUP, c.val_T)
    step = functools.partial(train_step, odd=kind == "odd") if train else val_step
    arg, c = (arg, c) if train else (arg.params, c.for_validation())
    specs = jax.tree.map(lambda x: x.sharding.spec, arg)
    outs = (specs, P()) if train else P()
    b = math.gcd(c.microbatch, B // share)
    on_device = lambda arg, tokens: step(arg, tokens.reshape(-1, b, T + 1), c=c, stage=stage)
    program = jax.shard_map(on_device, mesh=mesh, in_specs=(specs, data), out_specs=outs)
    tokens = jax.ShapeDtypeStruct((B, T + 1), "int32", sharding=NamedSharding(mesh, data))
    program = jax.jit(program, donate_argnums=0 if train else (), keep_unused=True)
    return program.lower(arg, tokens).compile(OPTIONS.get(mesh.devices.flat[0].platform))


# ---- Command line --------------------------------------------------------------------------------
def refuse(message: str) -> None:
    print(f"train_gpt.py: {message}", file=sys.stderr)
    # With other hosts, sys.exit would wait for them and lose the code.
    (os._exit if jax.distributed.is_initialized() else sys.exit)(2)


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
        refuse(f"--head_chunk {c.head_chunk} does not divide sequences of {bad}, but "
               f"{math.gcd(c.head_chunk, *bad)} does; see --batch")  # fmt: skip
    if c.val_tokens < 1 or c.val_tokens % (GROUP * c.val_T):
        refuse(f"--val_tokens {c.val_tokens} is no multiple of 8 sequences of --val_T {c.val_T}")
    return preset, c


def fit_devices(preset: str, c: Config) -> tuple[list[jax.Device], Config]:
    """The devices of all hosts, and the configuration in formats that they can run."""
    devices = sorted(jax.devices(), key=lambda device: (device.process_index, device.id))
    devices = devices[: c.batch if jax.process_count() == 1 else None]  # a sequence each, at least
    if preset == "record" and devices[0].platform == "cpu":
        lacks = "JAX sees only a CPU, the record needs GPUs: ./run.sh installs it with CUDA"
        print(f"warning: {lacks}; without GPUs: ./run.sh tiny", file=sys.stderr)
    if GROUP % (n := len(devices)) and n % GROUP or c.batch % n:
        more, also = math.lcm(n, c.batch), ""
        T, left = zip(*(divmod(row.T * c.batch, more) for row in c.rows), strict=True)
        if n % GROUP == 0 and not any(left):
            also = f"; or another stream, no record, in whose stages are {more} x {[*T]} tokens: "
            also += f"--batch {more} --head_chunk {math.gcd(c.head_chunk, c.val_T, *T)}"
        refuse(f"{n} devices do not divide --batch {c.batch} or 8 matrices: use 1, 2, 4 or 8{also}")
    gpu = devices[0].platform == "gpu" and "NVIDIA" in devices[0].device_kind
    if not gpu or c.compute != "bfloat16":  # cuDNN has no float32
        c = dataclasses.replace(c, attention="xla")
    if gpu and float(devices[0].compute_capability) < 8.9:  # no FP8
        c = c.without_fp8()
    return devices, c


# ---- Hosts ---------------------------------------------------------------------------------------
def join() -> None:
    """One run of all processes that srun, mpirun, torchrun's like or a TPU pod has started, or that
    JNANO_COORDINATOR=host:port JNANO_PROCESSES=2 JNANO_PROCESS=0 name: dev/hosts.md."""
    told = lambda names: next(filter(None, map(os.environ.get, names.split())), "")
    count = told("JNANO_PROCESSES WORLD_SIZE SLURM_STEP_NUM_TASKS OMPI_COMM_WORLD_SIZE")
    rank = told("JNANO_PROCESS RANK SLURM_PROCID OMPI_COMM_WORLD_RANK")
    tasks = told("LOCAL_WORLD_SIZE SLURM_STEP_TASKS_PER_NODE OMPI_COMM_WORLD_LOCAL_SIZE")
    tpu = Path("/dev/accel0"), Path("/dev/vfio/0"), Path(jax.__file__).parents[1] / "libtpu"
    if int(count or 1) < 2 and [path.exists() for path in tpu].count(True) < 2:
        return
    where, wait = told("JNANO_COORDINATOR"), int(told("JNANO_WAIT") or 300)
    if not where and told("MASTER_ADDR"):  # at its port torchrun itself listens
        where = f"{told('MASTER_ADDR')}:{int(told('MASTER_PORT') or 29500) + 1}"
    # Several tasks on a host take a GPU each, unless each sees but one; else one takes all.
    share = not re.match(r"(1\b|$)", tasks) and "," in os.environ.get("CUDA_VISIBLE_DEVICES", ",")
    local = [int(told("LOCAL_RANK SLURM_LOCALID OMPI_COMM_WORLD_LOCAL_RANK"))] if share else []

    def count_missing():  # just before JAX gives up, which does not count
        own = {os.readlink(fd) for fd in Path("/proc/self/fd").iterdir() if fd.is_symlink()}
        rows = (row.split() for file in Path("/proc/net").glob("tcp*") for row in file.open())
        came = sum(row[3] == "01" and f"socket:[{row[9]}]" in own for row in rows) - 1
        refuse(f"{int(count) - came} of {count} processes did not come in {wait} s (JNANO_WAIT)")

    def fail(kind, *error):  # else JAX waits for the others, and they for this one
        sys.__excepthook__(kind, *error)
        time.sleep(35 * issubclass(kind, jax.errors.JaxRuntimeError))  # JAX will say who was lost
        os._exit(130 if kind is KeyboardInterrupt else 1)

    timer = threading.Timer(wait - 1, count_missing if rank == "0" else str)
    timer.daemon = True
    timer.start()
    jax.config.update("jax_enable_preemption_service", False)  # it swallows SIGTERM
    sys.excepthook, heard = fail, signal.signal(signal.SIGINT, signal.SIG_DFL)  # by C++ not at all
    try:
        who = (where, int(count), int(rank)) if where else 3 * [None]
        jax.distributed.initialize(*who, local, "deactivate" if where else None, wait, 30)
    except ValueError as error:
        refuse(f"{count} processes cannot join: {error} Set JNANO_COORDINATOR: dev/hosts.md")
    timer.cancel()
    signal.signal(signal.SIGINT, heard)


def agree(c: Config, shards: list[np.memmap]) -> tuple[Config, dict, dict]:
    """What makes a run's numbers, source, flags, tokens, is the same on all hosts and in a run that
    goes on, or is refused by name. Returns the seed, facts and arrays of the checkpoint."""
    then, arrays = load(Path(c.resume)) if c.resume else ({}, {})
    c = dataclasses.replace(c, seed=then["same"]["--seed"]) if then and c.seed < 0 else c
    same = {f"train_gpt.py:{n}": line for n, line in enumerate(SOURCE.splitlines(), 1)}
    same |= {f"--{name}": value for name, value in dataclasses.asdict(c).items()}
    same["--prefixes"] = hashlib.sha256(prefix_table(c)).hexdigest()
    fills = [c.fills("train")] * (len(shards) - 1) + [c.fills("val")]
    with ThreadPoolExecutor(8) as pool:
        data = [*pool.map(check_tokens, shards, fills, [c] * len(shards))]
    same |= {shard["file"]: shard["sha256"] for shard in data}
    has = f"{len(at := jax.local_devices())} x {at[0].device_kind}"
    same |= {module.__name__: module.__version__ for module in (jax, np, optax)}
    same |= dict(machine=[jax.process_count(), has], step=then.get("step"))
    differ = lambda a, b, free: "; ".join([f"{x} is {b.get(x)!r}, was {a.get(x)!r}"
        for x in a | b if x not in free.split() and a.get(x) != b.get(x)][:3])  # fmt: skip
    was, free = then.get("same", same), "--data --resume --force --save --save_every --stall step"
    changed = differ(was, same, free + " machine jax numpy optax")
    if changed and not c.force or then.get("step", 0) > c.steps:
        refuse(f"--resume {c.resume}: {changed}{'; add --force 1 to go on' * (not c.force)}")
    if (told := differ(was, same, free)) != changed:
        print(f"warning: {told}: equal within rounding, not bit by bit", file=sys.stderr)
    mine = f"{os.uname().nodename}: {has}", secrets.randbits(31), same
    texts = process_allgather(np.frombuffer(json.dumps(mine).encode().ljust(2**18), np.uint8))
    hosts = [json.loads(text.tobytes()) for text in texts]
    for host, _, other in hosts:
        if told := differ(hosts[0][2], other, "--data --resume"):
            time.sleep(0 if jax.process_index() else 2)  # without process 0 JAX ends the others
            refuse(f"{host}: {told} on {hosts[0][0]}")
    same["--seed"] = hosts[0][1] if c.seed < 0 else c.seed
    if then:
        then["resume"] = dict(step=then["step"], seconds=then["seconds"], changed=changed)
    if changed:  # another run, with its own log and files
        del then["log"]
    then |= dict(same=same, hosts=[host for host, *_ in hosts], data=data)
    return dataclasses.replace(c, seed=same["--seed"]), then, arrays


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
    for start in range(0, len(shard), 2**22):
        tokens = np.array(shard[start : start + 2**22])
        starts.append(start + np.flatnonzero(tokens == c.eot))
        largest = max(largest, int(tokens.max()))
    sizes, crowd = np.diff(np.concatenate(starts), append=len(shard)), False
    for T, longest in {fill[1:] for fill in fills}:
        at = np.cumsum(read := np.minimum(sizes, longest or len(shard))) - read
        crowd |= np.any(at[4095:] - at[:-4095] < T)  # more documents than the code tells apart
    if largest >= c.vocab or not len(sizes) or crowd:
        refuse(f"{path}: its largest token is {largest} (--vocab {c.vocab}), {len(sizes)} are "
               f"--eot {c.eot}, more than 4095 in a sequence: {bool(crowd)}")  # fmt: skip
    sha256 = hashlib.sha256(np.memmap(path, np.uint8, "r")).hexdigest()
    return dict(file=path.name, bytes=path.stat().st_size, sha256=sha256,
                tokens=len(shard), documents=len(sizes), largest_token=largest)  # fmt: skip


def stream(shards: list[np.ndarray], fills: list[tuple], c: Config,
           part: int = 0, parts: int = 1) -> Iterator[np.ndarray]:  # fmt: skip
    """The steps of a run, over the shards in order; of each a host's part of the sequences,
    (sequences, T + 1) of int32."""
    done = 0
    for shard in shards:
        for step in layout(shard, fills[done:], c):
            own = step[len(step) * part // parts : len(step) * (part + 1) // parts]
            rows = [np.concatenate([shard[a:b] for a, b in pieces]) for pieces in own]
            yield np.stack(rows).astype(np.int32)
            done += 1


def on_devices(batches: Iterable[np.ndarray], mesh: Mesh, over: tuple[str, ...] = ("fsdp",),
               prefetch: int = 2) -> Iterator[Array]:  # fmt: skip
    """Copies some batches early, a host its rows: it returns at once, so it hides behind a step."""
    sharding, queue = NamedSharding(mesh, P(over)), collections.deque()
    for batch in batches:
        queue.append(jax.make_array_from_process_local_data(sharding, batch))
        if len(queue) > prefetch:
            yield queue.popleft()
    yield from queue


# ---- Checkpoints ---------------------------------------------------------------------------------
def save(state: State, facts: dict[str, Any], path: Path) -> None:
    """One file of raw arrays, but the tables, which are parameters, rounded. Two files are kept."""
    leaves = jax.tree.leaves_with_path(state._replace(tables={}))
    arrays = {jax.tree_util.keystr(at): process_allgather(x, tiled=True) for at, x in leaves}
    if jax.process_index():
        return
    path.parent.mkdir(exist_ok=True)
    part = path.with_name("next.part")
    try:
        with part.open("wb") as file:
            np.savez(file, facts=json.dumps(facts), **arrays)
            file.flush()
            os.fsync(file.fileno())
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)
    for old in sorted(path.parent.glob("*.state"), key=os.path.getmtime)[:-2]:
        old.unlink()


def load(place: Path) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """Facts and arrays of a checkpoint; of a folder, of the newest whole one in it."""
    paths = [place] if place.is_file() else sorted(place.rglob("*.state"), key=os.path.getmtime)
    for path in reversed(paths):
        try:
            with np.load(path) as file:
                if file.zip.testzip():  # np.load compares checksums only of what it reads whole
                    raise ValueError("a checksum is wrong")
                arrays = dict(file)
            return json.loads(arrays.pop("facts").item()), arrays
        except Exception as error:
            print(f"warning: {path} is no whole checkpoint: {error!r}", file=sys.stderr)
    refuse(f"--resume {place}: there is no whole checkpoint")


def restore(arrays: dict[str, np.ndarray], c: Config, mesh: Mesh) -> State:
    """The state that was saved, on these devices."""
    of = lambda k, x: arrays[jax.tree_util.keystr(k).replace(".tables", ".params")].astype(x.dtype)
    put = lambda k, x: jax.make_array_from_callback(x.shape, x.sharding, of(k, x).__getitem__)
    return jax.tree.map_with_path(put, state_shapes(c, mesh))


# ---- Log -----------------------------------------------------------------------------------------
class Log:
    """logs/<run>.txt, written line by line: the source, a line of 100 =, facts as `name json`
    (what it takes to run it again, no secrets), losses in upstream's grammar, GOODPUT, RESULT json.
    A run that goes on does so in its log. Of several processes only the first one writes."""

    def __init__(self, preset: str, c: Config, devices: list[jax.Device], argv: list[str],
                 then: dict[str, Any], began: tuple[float, float]):  # fmt: skip
        name = time.strftime("%Y-%m-%dT%H-%M-%S_", time.gmtime()) + secrets.token_hex(4)
        self.path = Path(then.get("log", f"logs/{name}.txt"))
        self.path.parent.mkdir(exist_ok=True)
        self.file = open(os.devnull if jax.process_index() else self.path, "a", encoding="utf-8")
        sys.stdout = self.file if jax.process_index() else sys.stdout
        self.line("" if self.file.tell() else SOURCE + "=" * 100, show=False)
        self.since, self.began, imported = time.perf_counter(), *began
        self.spent = collections.Counter({"import": imported})
        env = re.compile("(?!.*(TOKEN|KEY|SECRET|PASS))(JAX|XLA|(LIB)?TPU|CUD|NVI|NCCL|TF_CPP|GLI)")
        home, ask = str(Path.home()), subprocess.getoutput
        packages = {module.__name__: module.__version__ for module in (jax, np, optax)}
        self.facts(
            **{name: then[name] for name in ("resume", "hosts", "data") if name in then},
            versions=dict(packages, python=sys.version, backend=devices[0].client.platform_version),
            devices=[device.device_kind for device in devices],
            driver=ask("nvidia-smi --query-gpu=driver_version --format=csv,noheader 2>/dev/null"),
            environment={k: v.replace(home, "~") for k, v in os.environ.items() if env.match(k)},
            git=ask("git describe --always --dirty --abbrev=40 2>/dev/null"),
            argv=argv, seed=c.seed, config=dict(preset=preset, **dataclasses.asdict(c)),
            prefixes=hashlib.sha256(prefix_table(c)).hexdigest(),
            parameters={name: math.prod(row.shape) for name, row in param_table(c).items()},
        )  # fmt: skip

    def line(self, text: str, show: bool = True) -> None:
        for file in (sys.stdout, self.file)[not show :]:
            try:
                print(text, file=file, flush=True)
            except OSError as error:  # the run is worth more than its log
                with contextlib.suppress(OSError):
                    print(f"warning: {file.name} has gaps: {error}", file=sys.stderr)

    def facts(self, **facts: Any) -> None:
        for name, value in facts.items():
            self.line(f"{name} {json.dumps(value)}", show=False)

    def lap(self, name: str) -> None:
        """What the time since the last lap went into."""
        self.since, since = time.perf_counter(), self.since
        self.spent[name] += self.since - since

    def end(self, text: str) -> None:
        wall = self.spent["import"] + time.perf_counter() - self.began
        self.spent["other"] = wall - sum(self.spent.values())
        parts = " + ".join(f"{name} {seconds:.1f}" for name, seconds in self.spent.items())
        self.line(f"GOODPUT {self.spent['train'] / wall:.0%}: {wall:.1f} s = {parts}\n{text}")


class Clock:
    """Seconds of training. Tells every tenth loss once it is there: only stop() waits for it. Ends
    the run by a signal, after a step, a second one at once, and where it stands still."""

    def __init__(self, c: Config, log: Log, then: dict[str, Any]):
        self.steps, self.log, self.signal = c.steps, log, 0
        self.pending, self.seconds = collections.deque(), then.get("seconds", 0.0)
        self.finite = then.get("step", 0)  # the last step whose loss is known to be a number
        self.started = self.moved = time.perf_counter()
        reader, writer = os.pipe()
        os.set_blocking(writer, False)
        signal.set_wakeup_fd(writer)  # no handler in Python runs while XLA hangs
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, lambda *_: None)
        threading.Thread(target=self.watch, args=[c.stall, reader], daemon=True).start()

    def watch(self, seconds: int, reader: int) -> None:
        while self.moved > time.perf_counter() - (seconds or math.inf):
            if select.select([reader], [], [], 0.2)[0]:
                number = os.read(reader, 1)[0]
                if not self.signal:
                    self.signal, told = number, time.perf_counter()
                elif time.perf_counter() > told + 0.3:  # mpirun, timeout send it twice
                    os._exit(128 + number)
        self.log.line(f"STALLED: no step in {seconds} s (--stall); the stacks of all threads:")
        for file in (self.log.file, sys.stderr):
            faulthandler.dump_traceback(file)
        os._exit(4)

    def stop(self, state: Any) -> None:
        while len(self.pending) > 2:
            time.sleep(0.01)
            self.show()
        jax.block_until_ready(state)  # so that queued work counts
        while self.pending:  # a loss may be there a moment later
            self.show()
        self.seconds += time.perf_counter() - self.started
        self.moved = math.inf  # what comes now may take its time
        self.log.lap("train")

    def show(self, *pending: tuple[int, Array]) -> None:
        """Adds (step, loss) to what is pending, tells what is done."""
        self.pending.extend(pending)
        while self.pending and self.pending[0][1].is_ready():
            (step, loss), self.moved = self.pending.popleft(), time.perf_counter()
            if step % 10 == 0:
                self.finite = step if math.isfinite(loss) else self.finite
                ms, at = 1e3 * (self.seconds + self.moved - self.started), f"{step}/{self.steps}"
                self.log.line(f"step:{at} train_loss:{loss:.4f} train_time:{ms:.0f}ms")

    def save(self, state: State, facts: dict, number: int) -> None:
        """Off the clock. The number of a signal ends the run, -1 ends it as void."""
        self.stop(state)
        step, folder, age = int(state.step), self.log.path.with_suffix(""), os.path.getmtime
        finite = lambda x: np.isfinite(process_allgather(x, tiled=True)).all()
        parts = state.params | dict(optimizer=state.optimizer, held=state.held)
        bad = [name for name, part in parts.items() if not all(map(finite, jax.tree.leaves(part)))]
        number = -1 if bad else number
        try:
            if number >= 0:
                now = dict(step=step, seconds=self.seconds, log=str(self.log.path))
                save(state, facts | now, folder / f"{step:07}.state")
        except OSError as error:  # the run is worth more
            self.log.line(f"warning: no checkpoint of step {step}: {error}")
        process_allgather(np.int32(0))  # hosts wait for the one that writes
        self.log.lap("save")
        why = f"NON-FINITE: {bad or 'the loss'}, since a step from {self.finite + 1} to {step}"
        if number > 0:
            why = f"INTERRUPTED by {signal.Signals(number).name} after step {step}"
        if number:
            last = max(folder.glob("*.state"), key=age, default="needs a checkpoint")
            self.log.end(f"{why}; to go on: --resume {last}")
            sys.exit(128 + number if number > 0 else 3)
        self.started = self.moved = time.perf_counter()


# ---- Run -----------------------------------------------------------------------------------------
def check_attention(c: Config, log: Log) -> None:
    """On GPUs, where cuDNN's faults are silent: the worst token of y, dq, dk, dv against XLA's
    kernel in float32 with a mask, of documents whose numbers change every bit of the code."""
    T, W, (i, j) = 512, 16, np.indices((512, 512))  # shorter than a document: 22 tokens
    document = np.repeat(sorted({2**bit - less for bit in range(13) for less in (0, 1)}), 22)[:T]
    mask = (j <= i) & (i - j <= W) & (document[:, None] == document)
    pos = positions(np.diff(document, prepend=0)[None], c, 0)
    attention = jax.nn.dot_product_attention
    put = lambda x, code: x.at[..., -4:].set(jnp.broadcast_to(code, (*x.shape[:-1], 4)))
    kernel = lambda q, k, v: attend(put(q, pos.code_q), put(k, pos.code_k), v, W, pos.scale, c)

    def exact(q, k, v):
        q, k, v = q.at[..., -4:].set(0).astype("float32"), k.astype("float32"), v.astype("float32")
        return attention(q, k, v, mask=mask, scale=pos.scale, implementation="xla")

    *qkv, dy = jax.random.normal(jax.random.key(0), (4, 1, T, c.H, c.D // c.H), c.compute)
    (y, pull), (y_exact, pull_exact) = jax.vjp(kernel, *qkv), jax.vjp(exact, *qkv)
    pairs = zip((y, *pull(dy)), (y_exact, *pull_exact(dy.astype("float32"))), strict=True)
    size = lambda x: np.square(np.float32(x)).sum(axis=-1)
    errors = [float(size(a - b).max() / size(b).mean()) ** 0.5 for a, b in pairs]
    log.facts(attention=dict(zip(("y", "dq", "dk", "dv"), errors, strict=True)))
    if not all(error < 0.1 for error in errors):  # nor NaN
        refuse(f"attention by {c.attention} is wrong on this machine, errors {errors}; install the "
               "versions in requirements.txt, or another driver")  # fmt: skip


def prepare(c: Config, mesh: Mesh, log: Log) -> dict[tuple, Callable]:
    """Compiles every stage, then runs each program once, on a state and tokens that are thrown
    away: a first call loads it and connects the devices."""
    stages = dict.fromkeys((KINDS[s % 2], c.stage_at(s)) for s in range(c.steps))
    stages |= dict.fromkeys(("val", c.stage_at(s)) for s in range(c.steps + 1) if c.validates(s))
    print(f"compiling {len(stages)} programs ...", flush=True)
    began, cache = time.perf_counter(), collections.Counter()
    jax.monitoring.register_event_listener(lambda event, **_: cache.update([event.split("/")[-1]]))
    jobs = [functools.partial(compile_stage, *stage, c, mesh) for stage in stages]
    pool = ThreadPoolExecutor(8)  # Ctrl-C does not wait for it
    first = pool.submit(jobs[0])  # alone: it fills the cache of tuned kernels, undisturbed
    programs = [first.result(), *pool.map(lambda job: job(), jobs[1:])]
    log.lap(f"compile ({cache['cache_hits']} cached, {cache['cache_misses']} not)")
    programs, state = dict(zip(stages, programs, strict=True)), make_state(c, mesh)
    for (kind, _), program in programs.items():
        like, place = program.args_info[0][1], program.input_shardings[0][1]
        tokens = jax.device_put(np.zeros(like.shape, np.int32), place)
        out = jax.block_until_ready(program(state.params if kind == "val" else state, tokens))
        state = state if kind == "val" else out[0]
    log.facts(compile=dict(seconds=time.perf_counter() - began, **cache))
    log.lap("warm-up")
    return programs


def train(c: Config, mesh: Mesh, programs: dict, shards: list, log: Log, facts: dict,
          arrays: dict) -> tuple[dict, dict]:  # fmt: skip
    """The run, from fresh weights or a checkpoint's: trained ones, and facts."""
    state = jax.block_until_ready(restore(arrays, c, mesh) if arrays else make_state(c, mesh))
    clock, fills = Clock(c, log, facts), c.fills("train")
    first, host, hosts = facts.get("step", 0), jax.process_index(), jax.process_count()
    rows = itertools.islice(stream(shards[:-1], fills, c, host, hosts), first, None)
    batches = on_devices(rows, mesh, mesh.axis_names)
    hosts = max(1, hosts * mesh.shape["fsdp"] // mesh.size)  # of a node
    for step in range(first, c.steps + 1):
        if c.validates(step):
            clock.stop(state)
            program, ms = programs["val", c.stage_at(step)], 1e3 * clock.seconds
            rows = stream(shards[-1:], c.fills("val"), c, host % hosts, hosts)
            val_loss = np.mean([float(program(state.params, x)) for x in on_devices(rows, mesh)])
            log.line(f"step:{step}/{c.steps} val_loss:{val_loss:.4f} train_time:{ms:.0f}ms "
                     f"step_avg:{ms / max(step, 1):.2f}ms")  # fmt: skip
            log.lap("validate")
            if not math.isfinite(val_loss):
                clock.save(state, facts, -1)
            if val_loss <= c.target or step == c.steps:
                break
            clock.started = clock.moved = time.perf_counter()
        number = clock.signal
        if jax.process_count() > 1:  # hosts end after the same step: every tenth they tell
            number = 0 if step % 10 else int(process_allgather(np.int32(number)).max())
        if number or c.save_every and step > first and step % c.save_every == 0:
            clock.save(state, facts, number)
        state, loss = programs[KINDS[step % 2], c.stage_at(step)](state, next(batches))
        clock.show((step + 1, loss))
    memory = [(d.memory_stats() or {}).get("peak_bytes_in_use", 0) for d in mesh.local_devices]
    return state.params, dict(
        reason="target reached" if val_loss <= c.target else "end of schedule", seed=c.seed,
        val_loss=float(val_loss), target=c.target, steps=step, devices=mesh.size, train_time_ms=ms,
        tokens=sum(B * T for B, T, _ in fills[:step]), peak_memory_bytes=max(memory),
        resumed=bool(arrays),
    )  # fmt: skip


def main(argv: list[str]) -> None:
    began = time.perf_counter(), time.process_time()  # the second: of imports
    join()
    preset, c = parse_config(argv)
    if not jax.config.jax_compilation_cache_dir:
        jax.config.update("jax_compilation_cache_dir", ".cache/jax")
    shards, doing = find_data(c), "compiling"
    c, facts, arrays = agree(c, shards)
    devices, c = fit_devices(preset, c)
    mesh = make_mesh(devices)
    log = Log(preset, c, devices, argv, facts, began)
    machine = f"{len(devices)} x {devices[0].device_kind}"
    print(f"{preset} on {machine}, head in {c.head_forward}, log in {log.path}")
    try:
        if c.attention == "cudnn":
            check_attention(c, log)
        programs = prepare(c, mesh, log)
        doing = "training"
        params, result = train(c, mesh, programs, shards, log, facts, arrays)
    except KeyboardInterrupt:
        log.line("INTERRUPTED")
        os._exit(130)
    except jax.errors.JaxRuntimeError as error:
        if not re.search("RESOURCE_EXHAUSTED|OUT_OF_MEMORY|out of memory|ALLOC_FAILED", str(error)):
            raise
        log.line(f"OUT OF MEMORY while {doing}: {str(error).splitlines()[0]}")
        refuse(f"not enough memory on {machine} while {doing}: twice --batch is the same step "
               "in less, of shorter sequences; see Memory in README.md")  # fmt: skip
    try:
        weights = unpad(params, c) if c.save else {}
        if weights and not jax.process_index():
            path = log.path.with_suffix(".npz")  # numbers under the names of the table
            of = dict(config=dataclasses.asdict(c), result=result, source=crc32(SOURCE.encode()))
            np.savez(path, **{k: json.dumps(v) for k, v in of.items()}, **weights)
            result["weights"] = path.name
    finally:  # neither a full disk nor Ctrl-C costs the result of a run that came to its end
        log.lap("save")
        log.end(f"RESULT {json.dumps(result)}")
    if "weights" in result:
        print(f"next: ./run.sh sample {path} '{'def ' if c.vocab == 257 else 'The'}'")


if __name__ == "__main__":
    main(sys.argv[1:])
