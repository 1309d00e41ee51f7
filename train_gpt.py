"""Train a GPT-2-small-class model to 3.28 validation loss on FineWeb: one file, JAX, 8xH100.

    ./run.sh     or   python train_gpt.py [PRESET] [--field value ...]

PRESET is record, medium, small or tiny. The model; every stream is (B, T, D):
    x0 = norm(embedding + some of the previous token's embedding)               [smear]
    x  = x0 + gate * ngram                                                      [ngram]
    for every layer:
        x = x + gate * an early layer's output         only with skip_from      [u-net]
        x = a x + b attention(x or a saved stream) + gate * x0 + gate * ngram   [x0]
        x = a x + b mlp(x)
    x  = x + a weighted sum of earlier streams, with weights for each token     [mudd]
    logits = softcap(norm(x) @ head.T)
    p  = softmax(logits), mixed with copies of
         earlier tokens of the document                only with pointer        [pointer]
Attention and MLP normalize the stream that they read. a and b are learned, a pair for each
sublayer; small nets compute the gates of each token [gates]. In a layer with mudd, a net computes
the weights of all sums. NorMuon updates the matrices, and Adam the rest: see train_step().

A name that ends in capitals has its array's shape: x_BTD is (B, T, D). B sequences, T positions,
S = T + 1 tokens (a sequence and its last target), D model width, H heads, K channels of a head, F
width of the MLP, R width of the gate nets, V rows of a table, J targets of a token, M microbatches,
N tokens of a flat batch, G groups of 8 matrices, E any width. Lower-case letters are local, and the
exchange of n-grams has letters of its own. The preset record is record 89 of the modded-nanogpt
speedrun, rewritten in JAX; the exchange, and n-grams of more than two tokens, are record 92's. The
pointer is that of upstream's pull request 379, with terms of ours. records/techniques.md explains
the tags in brackets, and tests/differences.md lists what differs from upstream.
"""

import argparse
import collections
import dataclasses
import enum
import functools
import hashlib
import itertools
import json
import math
import os
import re
import secrets
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
from jax.experimental.multihost_utils import broadcast_one_to_all, process_allgather
from jax.sharding import AxisType, Mesh, NamedSharding

SOURCE = Path(__file__).read_bytes().decode()  # for the log: the file may be edited during the run


# ---- Hyperparameters -----------------------------------------------------------------------------
# fmt: off
SHORT, LONG = "short", "long"  # attention windows; each Stage says how long they are
VAL_SEQUENCES = 8  # sequences in a validation step


@dataclasses.dataclass(frozen=True)
class Layer:
    """One block: attention (unless window is None), then an MLP. Layers are numbered from 0."""

    window: str | None              # SHORT, LONG, or None: this layer has no attention
    paired_heads: bool = False      # [paired-heads] two heads see each other's keys
    key_offset: bool = False        # [key-offset] half of a key is the previous token's
    key_start: bool = False         # [key-start] key weights start as copies of the query weights
    xsa: bool = False               # [xsa] exclusive: a head may remove what is parallel to its v
    head_gate: bool = False         # [head-gate] each token scales each head's output
    dc: bool = False                # [dc] dynamic composition: add a map that mixes all heads' maps
    x0: bool = True                 # [x0] add the tokens' embedding after attention
    ngram: bool = False             # [ngram] add the n-grams' embedding after attention
    value_table: int | None = None  # [value-embed] add this table's row to v
    attend_to: int | None = None    # [saved-source] q, k, v read that layer's output instead of x
    mudd: tuple[str, ...] = ()      # [mudd] dynamic dense: tokens weigh these streams for v and x
    skip_from: int | None = None    # [u-net] add that layer's output to x first
    new_gates: bool = False         # [gates] from here on, gates come from a new net that reads x


@dataclasses.dataclass(frozen=True)
class Stage:
    """Steps of one shape. A loss weight (a, b) moves linearly from a to b over the stage."""

    steps: int      # 0: only the last validation uses this stage's windows
    tokens: int     # in a step, on all devices together; T = tokens // Config.batch
    short: int      # earlier positions that SHORT layers see: half as many tokens if paired_heads
    long: int       # window of LONG layers; [yarn] rescales rotary frequencies when it grows
    max_doc: int    # documents are cut to this many tokens; 0: sequences are joined text
    lr: float       # factor on every learning rate, before the cooldown
    targets: tuple = (1.0,)                     # [mtp] loss weights of the tokens 1, 2, ... ahead
    # [prefix] loss weight of the longest token that is a proper prefix of the next token
    prefix: float | tuple[float, float] = 0.0


RECORD_LAYERS = (
    Layer(SHORT, paired_heads=True),
    Layer(SHORT, xsa=True, ngram=True, value_table=0),
    Layer(SHORT, paired_heads=True, ngram=True, value_table=1),
    Layer(LONG, key_offset=True, xsa=True, head_gate=True, ngram=True),
    Layer(SHORT, xsa=True, ngram=True, new_gates=True),
    Layer(SHORT, paired_heads=True, ngram=True),
    Layer(None, skip_from=3, x0=False),
    Layer(SHORT, xsa=True, ngram=True),
    Layer(SHORT, attend_to=7, ngram=True, value_table=2),
    Layer(SHORT, attend_to=7, paired_heads=True, ngram=True, value_table=3),
    Layer(LONG, attend_to=7, key_offset=True, head_gate=True, dc=True, value_table=4,
          x0=False, ngram=True, mudd=("input", "layer7")),
)
RECORD_STAGES = (
    Stage(423, 8 * 16384, short=128, long=384, max_doc=896, lr=1.00,
          targets=(1.0, 0.5, (0.25, 0.0)), prefix=0.25),
    Stage(424, 16 * 16384, short=384, long=896, max_doc=2048, lr=1.52,
          targets=(1.0, (0.5, 0.0)), prefix=(0.25, 0.0)),
    Stage(423, 24 * 16384, short=640, long=1408, max_doc=2048, lr=1.73),
    Stage(15, 24 * 16384, short=768, long=1664, max_doc=2048, lr=1.73),
    Stage(0, 24 * 16384, short=768, long=2560, max_doc=2048, lr=1.73),
)

# A model of the basic parts, which trains in seconds on two CPU cores.
TINY_LAYERS = (
    Layer(SHORT, ngram=True, value_table=0),
    Layer(LONG, key_offset=True, key_start=True, ngram=True),
    Layer(SHORT, paired_heads=True, ngram=True),
    Layer(None, skip_from=1, x0=False),
    Layer(SHORT, attend_to=2, ngram=True, value_table=1),
    Layer(LONG, attend_to=2, key_offset=True, key_start=True, value_table=2),
)
TINY_STAGES = (
    Stage(187, 384, short=64, long=192, max_doc=0, lr=1.0),
    Stage(0, 384, short=64, long=384, max_doc=0, lr=1.0),
)

# Between the record and tiny in size, for one GPU of 16 GB or a TPU. Nobody has run it on FineWeb.
SMALL_LAYERS = (
    Layer(SHORT, ngram=True, value_table=0),
    Layer(SHORT, ngram=True),
    Layer(LONG, key_offset=True, key_start=True, ngram=True),
    Layer(SHORT, paired_heads=True, ngram=True),
    Layer(None, skip_from=2, x0=False),
    Layer(SHORT, attend_to=3, paired_heads=True, ngram=True),
    Layer(SHORT, attend_to=3, ngram=True),
    Layer(LONG, attend_to=3, key_offset=True, key_start=True, value_table=0),
)
SMALL_STAGES = (
    Stage(500, 8 * 8192, short=128, long=384, max_doc=0, lr=1.0, targets=(1.0, (0.5, 0.0))),
    Stage(1000, 8 * 8192, short=256, long=768, max_doc=0, lr=1.0),
)

# A model of GPT-2 medium's class, for modded-nanogpt's second track: records/medium.md.
MEDIUM_LAYERS = (
    Layer(LONG, key_offset=True, head_gate=True, ngram=True, value_table=0),
    Layer(SHORT, xsa=True, ngram=True, value_table=1),
    Layer(SHORT, xsa=True, ngram=True, value_table=2),
    Layer(SHORT, xsa=True, ngram=True, value_table=3),
    Layer(LONG, key_offset=True, xsa=True, head_gate=True, ngram=True, value_table=4),
    Layer(SHORT, xsa=True, ngram=True, new_gates=True),
    Layer(SHORT, xsa=True, ngram=True),
    Layer(SHORT, xsa=True, ngram=True),
    Layer(SHORT, xsa=True, ngram=True),
    Layer(SHORT, skip_from=6, xsa=True, ngram=True),
    Layer(SHORT, skip_from=4, xsa=True, ngram=True),
    Layer(LONG, skip_from=2, key_offset=True, xsa=True, head_gate=True, ngram=True, value_table=0),
    Layer(SHORT, attend_to=11, ngram=True, value_table=1),
    Layer(SHORT, attend_to=11, ngram=True, value_table=2),
    Layer(SHORT, attend_to=11, ngram=True, value_table=3),
    Layer(LONG, attend_to=11, key_offset=True, head_gate=True, dc=True, value_table=4,
          x0=False, ngram=True, mudd=("input", "layer11")),
)
MEDIUM_STAGES = (
    Stage(392, 8 * 16384, short=128, long=384, max_doc=4096, lr=1.00,
          targets=(1.0, 0.5, (0.25, 0.0))),
    Stage(392, 16 * 16384, short=384, long=896, max_doc=4096, lr=1.52, targets=(1.0, (0.5, 0.0))),
    Stage(391, 24 * 16384, short=640, long=1408, max_doc=4096, lr=1.73),
    Stage(392, 32 * 16384, short=768, long=1664, max_doc=4096, lr=2.00),
    Stage(392, 32 * 16384, short=896, long=1920, max_doc=4096, lr=2.00),
    Stage(391, 32 * 16384, short=1024, long=2176, max_doc=4096, lr=2.00),
    Stage(392, 32 * 16384, short=1152, long=2432, max_doc=4096, lr=2.00),
    Stage(392, 32 * 16384, short=1280, long=2688, max_doc=4096, lr=2.00),
    Stage(1606, 32 * 16384, short=1408, long=2944, max_doc=4096, lr=2.00),
    Stage(0, 32 * 16384, short=1408, long=3456, max_doc=4096, lr=2.00),
)


@dataclasses.dataclass(frozen=True)
class Config:
    """Defaults are the record's. Numbers and strings are also flags; tuples are changed here."""

    layers: tuple[Layer, ...] = RECORD_LAYERS
    stages: tuple[Stage, ...] = RECORD_STAGES
    # The streams that are added to x before the head, with their first weights; (): none.
    mudd_head: tuple[tuple[str, float], ...] = (
        ("input", 0.0), ("layer7", -0.5), ("layer9", 0.0), ("value0", 0.0), ("layer3", 0.0))
    # To shorten a run, pass --steps alone: all stages shrink in proportion, and the schedule below
    # is in fractions of the run.
    steps: int = 0              # of the run; 0, the default: the sum over its stages
    cooldown_start: float = 508 / 1285     # fraction of the run where learning rates begin to fall
    cooldown_end: float = 1270 / 1285      # fraction where they stop; the fall is linear
    lr_floor: float = 0.15                 # factor on the rates after the cooldown
    momentum_warmup: float = 300 / 1285    # fraction, from the start, in which momentum rises
    momentum_cooldown: float = 50 / 1285   # fraction, before the end, in which it falls again
    momentum_low: float = 0.85             # Muon's momentum at the start and at the end
    momentum_high: float = 0.95            # momentum in between
    untie: float = 847 / 1285   # fraction of the run in which embedding and head are one table
    muon_lr: float = 0.023      # learning rate of the matrices in the layers
    adam_lr: float = 0.008      # learning rate of everything else, times a factor in param_table()
    adam_every: int = 2         # 2: Adam updates in every second step; 1: in every step
    D: int = 768                # model width
    H: int = 6                  # attention heads
    F: int = 3072               # width of the MLP
    R: int = 64                 # width of the gate nets; 0: gates are the same for every token
    vocab: int = 50257          # tokens; the tables are padded to a multiple of 128
    ngram_buckets: int = 377280  # rows of the n-gram table, which hashes choose
    ngrams: tuple[int, ...] = (2,)  # lengths of n-grams; each has an equal part of the table
    # [ngram-table] The table lies on the devices in 8 parts. From each, a sequence reads at most
    # ngram_capacity * T different rows per length. N-grams beyond that are lost: they read zeros,
    # and the log counts them. 1: none is lost. Real text needs about 0.08.
    ngram_capacity: float = 0.16
    # [pointer] The last 1, 2, ... up to so many tokens at two places score if they are equal.
    pointer: int = 0            # 0: no pointer
    pointer_D: int = 128        # width of its queries and keys
    pointer_band: int = 2048    # positions in a band: a token sees its own and the one before
    eot: int = 50256            # the token that starts every document
    batch: int = 8              # sequences in a step, on all devices together
    microbatch: int = 1         # sequences that a device runs at once, at most (memory)
    head_chunk: int = 16384     # tokens whose logits exist at once, at most (memory)
    dc_window: int = 112        # keys that the mixed attention of [dc] sees, its token's included
    compute: str = "bfloat16"   # dtype of activations and gathered weights
    head_forward: str = "float8_e4m3fn"  # dtype of the head's operands
    head_backward: str = "float8_e5m2"   # dtype of the logits' gradient
    # x, w and g are multiplied by these powers of two before the cast to FP8, to fill its range,
    # and the matmul's result is divided by them: see [fp8-head].
    x_scale: float = 4.0        # normalized activations are about 1, and below D**.5
    w_scale: float = 256.0      # weights are a few hundredths, and below 1.7
    g_scale: float = 512.0      # gradients of the logits, times batch, are below 2
    score_scale: float = 0.1    # q.k is multiplied by this in the first stage, see [yarn]
    attention: str = "cudnn"    # or band, in plain JAX: fit_devices() chooses
    prefixes: str = "data/gpt2_prefixes.bin"  # each token's longest proper prefix, int32; "": none
    data: str = "data/fineweb10B"  # folder with the *_train_*.bin and *_val_*.bin shards
    val_every: int = 250        # steps between validations
    val_T: int = 262144         # tokens in a validation sequence
    val_tokens: int = 10485760  # fixed by the rules: the same text whatever the machine
    target: float = 3.28        # stop at the first validation loss that reaches it; 0: never
    save: int = 1               # 0: do not save the weights (record: 2.5 GB)
    seed: int = -1              # of the initial weights; -1: a fresh one
    # fmt: on

    def __post_init__(self):
        check_config(self)

    @property
    def total_steps(self) -> int:
        """Steps of the run."""
        return self.steps or sum(stage.steps for stage in self.stages)

    @functools.cached_property
    def stage_ends(self) -> np.ndarray:
        """First step after each stage. If `steps` is not the sum over the stages, they are
        stretched in proportion, but each that has steps keeps at least one: the record's stages
        with steps=100 end at 33, 66, 99, 100, 100."""
        lengths = [stage.steps for stage in self.stages]
        ends = np.round(np.cumsum(lengths) * self.total_steps / sum(lengths)).astype(int)
        earliest = np.cumsum(np.minimum(lengths, 1))  # with one step for each stage that has steps
        for i in range(1, len(ends)):  # pushed apart
            ends[i] = max(ends[i], ends[i - 1] + min(lengths[i], 1))
        return np.clip(ends, earliest, earliest + self.total_steps - earliest[-1])

    def stage_at(self, step: int) -> int:
        """The stage of a step; the validation after the last step has the last stage."""
        return min(np.count_nonzero(step >= self.stage_ends), len(self.stages) - 1)

    def sequence_length(self, stage: int) -> int:
        """T of a stage's training sequences."""
        return self.stages[stage].tokens // self.batch

    def val_stage(self, step: int) -> int:
        """The stage whose program validates before a step. Where attention is in bands, a last
        stage without steps has none: the program of the stage before it has its windows, too."""
        stage = self.stage_at(step)
        has_program = self.stages[stage].steps > 0 or self.attention != "band"
        return stage if has_program else stage - 1

    def is_adam_step(self, step: int) -> bool:
        """[adam-every] Whether a step updates all parameters, not only the matrices. Record 39."""
        return (step + 1) % self.adam_every == 0

    def ngram_slots(self, T: int) -> int:
        """Rows of each eighth of the n-gram table that a sequence of T tokens may read."""
        return math.ceil(self.ngram_capacity * len(self.ngrams) * T)

    def validates_before(self, step: int) -> bool:
        """Whether the run validates before this step: it does not before the first."""
        return (step > 0 and step % self.val_every == 0) or step == self.total_steps

    def value_tables(self) -> list[int]:
        """Numbers of the value tables."""
        return sorted({layer.value_table for layer in self.layers} - {None})

    def attention_layers(self) -> list[int]:
        """Numbers of the layers with attention."""
        return [i for i, layer in enumerate(self.layers) if layer.window]

    def for_validation(self) -> "Config":
        """Returns the configuration of validation: no FP8, and one sequence at a time."""
        return dataclasses.replace(self.without_fp8(), microbatch=1)

    def without_fp8(self) -> "Config":
        """Returns the configuration with all matmuls in the dtype of activations."""
        return dataclasses.replace(self, head_forward=self.compute, head_backward=self.compute)


def check_config(c: Config) -> None:
    """Raises ValueError for layers and sizes with which a run would be wrong in silence."""
    K = c.D // c.H
    stages = sum(stage.steps > 0 for stage in c.stages)
    val_tokens = VAL_SEQUENCES * c.val_T
    fits_val = c.val_tokens > 0 and c.val_tokens % val_tokens == 0
    rules = [
        (c.H % 2 == 0 and c.D % c.H == 0, f"--H {c.H} must be even and divide --D {c.D}"),
        (K in range(8, 129, 4), f"a head has {K} channels, not a multiple of 4 from 8 to 128"),
        (stages <= c.total_steps, f"--steps {c.total_steps} is less than {stages} stages"),
        (c.adam_every in (1, 2), f"--adam_every {c.adam_every} is not 1 or 2"),
        (c.cooldown_start < c.cooldown_end, "--cooldown_start is not before --cooldown_end"),
        (fits_val, f"--val_tokens {c.val_tokens} is not a multiple of {val_tokens}, a step's"),
    ]
    for i, stage in enumerate(c.stages):
        even = stage.tokens % c.batch == 0
        rules.append((even, f"stage {i}: --batch {c.batch} does not divide {stage.tokens} tokens"))
    for i, layer in enumerate(c.layers):
        # The only fields that have an effect without attention.
        names = ("x0", "ngram", "skip_from", "new_gates")
        bare = Layer(None, **{name: getattr(layer, name) for name in names})
        is_used = layer.window is not None or layer == bare
        rules.append((is_used, f"layer {i} has no attention: it can only set {', '.join(names)}"))
        adds = not layer.mudd or (layer.ngram and not layer.x0)
        rules.append((adds, f"layer {i}: mudd adds ngram, not x0: set ngram=True, x0=False"))
    for holds, message in rules:
        if not holds:
            raise ValueError(message)


PRESETS = {  # fields that a preset does not name have Config's defaults
    "record": Config(),
    "medium": Config(
        layers=MEDIUM_LAYERS, stages=MEDIUM_STAGES, D=1024, H=8, F=4096, mudd_head=(
            ("input", 0.0), ("layer11", -0.5), ("layer14", 0.0), ("value0", 0.0), ("layer4", 0.0)),
        muon_lr=0.015, adam_lr=0.004, cooldown_start=1410 / 4740, cooldown_end=4700 / 4740,
        lr_floor=0.1, momentum_warmup=300 / 4740, momentum_cooldown=50 / 4740, untie=785 / 4740,
        ngram_buckets=251520, target=2.92,
    ),
    "small": Config(
        layers=SMALL_LAYERS, stages=SMALL_STAGES, mudd_head=(), D=256, H=2, F=1024, R=0,
        microbatch=4, ngram_buckets=32768, head_chunk=8192, prefixes="",
        head_forward="bfloat16", head_backward="bfloat16",
        cooldown_start=600 / 1500, cooldown_end=1.0, untie=1000 / 1500, momentum_warmup=300 / 1500,
        momentum_cooldown=50 / 1500, val_T=8192, val_tokens=1048576, target=0.0,
    ),
    "tiny": Config(
        layers=TINY_LAYERS, stages=TINY_STAGES, mudd_head=(), D=160, H=2, F=256, R=0, vocab=257,
        ngram_buckets=22528, ngrams=(2, 3, 4, 5), ngram_capacity=1.0, pointer=16, eot=256, batch=1,
        microbatch=4, head_chunk=128, dc_window=56, prefixes="", head_forward="bfloat16",
        head_backward="bfloat16", muon_lr=0.018, adam_lr=0.012, adam_every=1, cooldown_start=0.15,
        cooldown_end=1.0, untie=0.67, momentum_warmup=0.8, momentum_cooldown=0.14,
        data="data/source_code", val_every=94, val_T=1024, val_tokens=65536, target=1.38,
    ),
}  # fmt: skip


# ---- Model ---------------------------------------------------------------------------------------
PREFIX = 0  # the number of the target [prefix]; the tokens ahead are 1, 2, ...


def loss_fn(w, tokens_BS, loss_weights: dict, c: Config, stage: int, last=None) -> Array:
    """Cross-entropy in nats, summed over tokens and targets. loss_weights has the weight of each
    target by its number: k for the token k ahead, or PREFIX."""
    x_BTD = forward(w, tokens_BS[:, :-1], c, stage, last)
    T = x_BTD.shape[1]
    numbers = sorted(loss_weights)
    if c.pointer:  # column 0 must be the next token: head_loss() mixes it with the copies
        numbers = [1, *(k for k in numbers if k != 1)]
    # [mtp] Early in training, later tokens are targets as well. arXiv:2404.19737, record 53.
    # [prefix] So is the longest token that the next token begins with. Record 88.
    ahead = max(numbers)
    padded_BS = jnp.pad(tokens_BS, ((0, 0), (0, ahead)), constant_values=-1)  # -1: no target
    targets = {k: padded_BS[:, k : k + T] for k in numbers}
    if PREFIX in targets:  # a lookup replaces the slice; the table becomes part of the program
        targets[PREFIX] = jnp.take(prefix_table(c), tokens_BS[:, 1:], axis=0)
    targets_NJ = jnp.stack([targets[k] for k in numbers], axis=-1).reshape(-1, len(numbers))
    weights_J = jnp.stack([jnp.float32(loss_weights[k]) for k in numbers])
    x_BTD = norm(x_BTD)
    copies_N3 = None
    if c.pointer:
        copies_N3 = pointer_copies(x_BTD, tokens_BS, w, c).reshape(-1, 3)
    return head_loss(x_BTD.reshape(-1, c.D), w["head"], targets_NJ, weights_J, copies_N3, c)


def forward(w: dict[str, Any], tokens_BT, c: Config, stage: int, last=None) -> Array:
    """The last residual stream, (B, T, D); logits are softcap(norm(x) @ head.T).

    w has the weights of param_table() by name. w["mlp"][i], w["qk"][i] and w["vo"][i] list layer
    i's matrices; w["skip_lambdas"][i] is layer i's row, as in all others with a row for each
    layer. Instead of the n-gram table, w has "ngram_rows", (B, T * len(c.ngrams), D), the rows of
    ngram_rows().

    saved has the streams "x0", "ngram", "input", "value0", ..., "layer0", ...; gates has
    "input.ngram", "layer3.x0", ...; layer 3 gets the latter as "x0".
    """
    pos = positions(tokens_BT == c.eot, c, stage, last)
    saved = embed_tokens(w, tokens_BT, c)  # the streams that later layers may read, (B, T, D) each
    # [gates] Small nets compute the gates of the next layers for each token. Records 81 and 85.
    gates = run_net("gates_input", saved["x0"], w, c, w["gate_scale"])
    # weighted_sum adds up weight * array in float32, and rounds once.
    x = weighted_sum((1.0, saved["x0"]), (gates["input.ngram"], saved["ngram"]))
    saved["input"] = x
    for i, layer in enumerate(c.layers):
        if layer.new_gates:
            gates |= run_net(f"gates{i}", x, w, c, w["gate_scale"])
        gate = {name: gates[f"layer{i}.{name}"] for name in layer_gates(layer, c.H)}
        if layer.skip_from is not None:
            # [u-net] A late layer may begin with an early one's output. Records 11, 45 and 55.
            weight = jax.nn.sigmoid(w["skip_lambdas"][i]) * gate.pop("skip")
            x = weighted_sum((1.0, x), (weight, saved[f"layer{layer.skip_from}"]))
        if layer.mudd:
            x = mudd_block(x, i, w, gate, saved, pos, c)
        else:
            x = block(x, i, w, gate, saved, pos, c)
        if gate:  # what reads a gate takes it out of the dict
            raise ValueError(f"layer {i} has gates that nothing reads: {', '.join(gate)}")
        saved[f"layer{i}"] = x
    if c.mudd_head:
        # [mudd] The head weighs earlier streams, for each token. Record 81.
        weights_BTn = run_net("mudd_head", x, w, c)["x"]
        streams = [saved[name] for name, _ in c.mudd_head]
        x = weighted_sum((1.0, x), *per_token_terms(weights_BTn, streams))
    return x


def embed_tokens(w, tokens_BT, c: Config) -> dict[str, Array]:
    """The token's embedding "x0", the embedding of the n-grams that end with it, "ngram", and its
    row of every value table, "value0", "value1", ...; (B, T, D) each."""
    saved = {}
    for n in c.value_tables():
        saved[f"value{n}"] = take_rows(w[f"value{n}"], tokens_BT).astype(c.compute)
    # [ngram] Random signs tell apart n-grams that share a row. train_step() has looked up the
    # rows, so only the signs are needed here. Records 62 and 83.
    signed = []
    rows_of_lengths = jnp.split(w["ngram_rows"], len(c.ngrams), axis=1)
    for rows_BTD, (_, seed_BT) in zip(rows_of_lengths, hash_ngrams(tokens_BT, c), strict=True):
        signed.append(rows_BTD.astype(c.compute) * random_signs(seed_BT, c))
    saved["ngram"] = functools.reduce(jnp.add, signed)
    # [smear] An embedding may take in some of the previous token's; 12 channels decide. Record 34.
    embed = take_rows(w["embed"], tokens_BT).astype(c.compute)
    previous = jnp.pad(embed[:, :-1], ((0, 0), (1, 0), (0, 0)))
    gate_BT = jax.nn.sigmoid(embed[..., :12].astype(jnp.float32) @ w["smear_gate"])
    smear_BT1 = w["smear_lambda"] * gate_BT[..., None]
    saved["x0"] = norm(weighted_sum((1.0, embed), (smear_BT1, previous)))
    return saved


def block(x_BTD, i: int, w, gate, saved, pos: "Positions", c: Config) -> Array:
    """Layer i: adds attention and MLP to x, (B, T, D). `gate` has this layer's gates by name,
    (B, T, 1) or (B, T, H); `saved` has the streams so far."""
    layer = c.layers[i]
    x = x_BTD
    terms = []  # of the sum after attention
    if layer.window is not None:
        # [saved-source] Late layers may attend to an early output instead of x. Record 77.
        source = x if layer.attend_to is None else saved[f"layer{layer.attend_to}"]
        v_terms = []
        if layer.value_table is not None:
            # [value-embed] v also reads a token table. For each head, 6 channels of the source and
            # 6 of the table decide how much. arXiv:2410.17897; gates: record 55.
            value = saved[f"value{layer.value_table}"]
            gate_input = jnp.concatenate((norm(source)[..., :6], value[..., :6]), axis=-1)
            logits_BTH = gate_input.astype(jnp.float32) @ w["value_gates"][i].T
            weight_BTH1 = 2 * jax.nn.sigmoid(logits_BTH)[..., None]
            v_terms.append((weight_BTH1, in_heads(value, c)))
        y = attention(source, v_terms, i, w, gate, pos, c, out_scale=w["attn_lambdas"][i, 1])
        terms.append((1.0, y))
    # [x0] Each layer may scale x down and read the embeddings again. Record 9.
    terms += [(gate.pop(name), saved[name]) for name in ("x0", "ngram") if name in gate]
    if terms:
        x = weighted_sum((w["attn_lambdas"][i, 0], x), *terms)
    keep, add = w["mlp_lambdas"][i]
    return weighted_sum((keep, x), (1.0, mlp(x, i, w, c, out_scale=add)))


def mudd_block(x_BTD, i: int, w, gate, saved, pos: "Positions", c: Config) -> Array:
    """[mudd] Like block(), but a net reads x and computes the weights of every sum, for each token;
    v and x mix several streams. Xiao et al. 2025, arXiv:2502.12170; record 81."""
    layer = c.layers[i]
    mix = run_net(f"mudd{i}", x_BTD, w, c)
    source = x_BTD if layer.attend_to is None else saved[f"layer{layer.attend_to}"]
    streams = [*(saved[name] for name in layer.mudd), x_BTD]
    weights_BT1n = mix["v"][..., None, :]  # all heads have the same
    v_terms = per_token_terms(weights_BT1n, [in_heads(x, c) for x in streams])
    if layer.value_table is not None:
        weight_BTH = jnp.repeat(mix["value"], c.H // 2, axis=-1)  # half of the heads share one
        v_terms.append((weight_BTH[..., None], in_heads(saved[f"value{layer.value_table}"], c)))
    y = attention(source, v_terms, i, w, gate, pos, c)
    x = weighted_sum((1.0, x_BTD), *per_token_terms(mix["x"], streams))
    x = weighted_sum(*per_token_terms(mix["attn"], [x, y, saved["input"], saved["ngram"]]))
    return weighted_sum(*per_token_terms(mix["mlp"], [x, mlp(x, i, w, c)]))


def attention(x_BTD, v_terms, i: int, w, gate, pos: "Positions", c: Config, out_scale=1.0):
    """Layer i's attention on norm(x), (B, T, D). v_terms are pairs of a weight and an array, both
    broadcast to (B, T, H, K), that are added to v; `gate` has this layer's gates by name, (B, T, 1)
    or (B, T, H). out_scale, a factor of the output, and the lambdas are multiplied into weights,
    D x D, and not into activations, T x D: fewer bytes, in gradients as well."""
    layer = c.layers[i]
    B, T = x_BTD.shape[:2]
    w_v, w_o = w["vo"][i]
    v_lambda, o_lambda = w["vo_lambdas"][i]
    w_qkv = jnp.concatenate((*w["qk"][i], v_lambda * w_v)).astype(x_BTD.dtype)
    # norm(x) @ w_qkv.T. From x, the radial part of its gradient is cheaper: see norm_linear().
    qkv = norm_linear(x_BTD, w_qkv, radial_from="x")
    q, k, v = (in_heads(part, c) for part in jnp.split(qkv, 3, axis=-1))
    cos, sin = pos.rope[layer.paired_heads]
    # [qk-norm] Scores stay bounded, so the rate can be high. Henry et al. 2020, arXiv:2010.04245.
    q = norm_rotate(q, cos, sin, pos.doc_q)
    k = norm_rotate(k, cos, sin, pos.doc_k)
    if layer.key_offset:
        # [key-offset] Half of a key is the previous token's: one layer can do induction. Record 49.
        k = offset_keys(k)
    v = weighted_sum((1.0, v), *v_terms)
    window = pos.windows[layer.window]
    if layer.paired_heads:
        # [paired-heads] Heads h and h + H / 2 become one head of twice the length: at token t they
        # are its positions 2 t and 2 t + 1. So both see the keys of both, and a window of n
        # positions covers n / 2 tokens. The angle of head h is that of position 2 t + h % 2, which
        # is not always its place: with H = 6, head 1 is at 2 t and has the angle of 2 t + 1. This
        # looks like a bug, but upstream does the same, and ours must give its numbers. Record 58.
        q2, k2, v2 = (a.reshape(B, 2 * T, c.H // 2, -1) for a in (q, k, v))
        y = attend(q2, k2, v2, window, pos.score_scale, c).reshape(v.shape)
    else:
        y = attend(q, k, v, window, pos.score_scale, c)
    if layer.dc:
        y = y + dc_attention(q, k, v, gate.pop("dc_in"), gate.pop("dc_out"), pos.score_scale, c)
    if layer.xsa:
        y = without_own_value(y, v, gate.pop("xsa"))
    if layer.head_gate:
        # [head-gate] Each token scales each head's output. Records 28 and 85.
        y = weighted_sum((gate.pop("head")[..., None], y))
    w_o = (out_scale * o_lambda * w_o).astype(x_BTD.dtype)
    return jnp.einsum("BTE,DE->BTD", y.reshape(B, T, -1), w_o)


def without_own_value(y_BTHK, v_BTHK, gate_BTH) -> Array:
    """[xsa] Each head may take out of y what is parallel to its own v. Records 82 and 86."""
    v = v_BTHK.astype(jnp.float32)
    y_dot_v = (y_BTHK.astype(jnp.float32) * v).sum(axis=-1)
    v_dot_v = jnp.maximum((v * v).sum(axis=-1), 1e-8)
    removed_BTH = jnp.tanh(gate_BTH) * y_dot_v / v_dot_v
    return weighted_sum((1.0, y_BTHK), (-removed_BTH[..., None], v_BTHK))


def in_heads(x_BTD, c: Config) -> Array:
    """The channels of every head, (B, T, H, K)."""
    return x_BTD.reshape(*x_BTD.shape[:2], c.H, -1)


def attend(q_BTHK, k_BTHK, v_BTHK, window: int | tuple, scale: float, c: Config) -> Array:
    """[window] Each query attends to its position and to the `window` before it; scores are q.k
    times scale. Returns (B, T, H, K). The window may be one of two: (0 or 1, first, second)."""
    if isinstance(window, tuple):
        number, *windows = window
        branches = [functools.partial(band_attention, window=n, scale=scale) for n in windows]
        return lax.switch(number, branches, q_BTHK, k_BTHK, v_BTHK)
    if c.attention == "band":
        return band_attention(q_BTHK, k_BTHK, v_BTHK, window, scale)
    # Both is_causal and a window: without is_causal, cuDNN leaves the right side of the window
    # open, and queries see the future.
    options = {"is_causal": True, "local_window_size": (window, 0), "implementation": "cudnn"}
    return jax.nn.dot_product_attention(q_BTHK, k_BTHK, v_BTHK, scale=scale, **options)


def band_attention(q_BTHK, k_BTHK, v_BTHK, window: int, scale: float) -> Array:
    """attend() in plain JAX, for devices without cuDNN's kernel. Positions are cut into n bands; W
    is the window, or half of T if that is less. The queries i of a band see the keys j of their
    band and of the one before. Bands are computed one after the other, and again in the backward
    pass, so that only the scores of one band exist at a time: W * 2 W for each head, not T * T."""
    B, T, H, K = q_BTHK.shape
    W = min(max(window, 1), -(-T // 2))
    q_BnWHK = in_bands(q_BTHK, W)
    bands = jnp.arange(q_BnWHK.shape[1])

    @jax.checkpoint
    def one_band(band, q, k, v):
        scores = scale * jnp.einsum("BiHK,BjHK->BHij", q, k, preferred_element_type=jnp.float32)
        scores = jnp.where(band_mask(band, W, window), scores, -jnp.inf)
        return jnp.einsum("BHij,BjHK->BiHK", jax.nn.softmax(scores).astype(v.dtype), v)

    arrays = (q_BnWHK, in_two_bands(k_BTHK, W), in_two_bands(v_BTHK, W))
    arrays = [jnp.moveaxis(x, 1, 0) for x in arrays]
    y_nBWHK = lax.map(lambda args: one_band(*args), (bands, *arrays))
    return jnp.moveaxis(y_nBWHK, 0, 1).reshape(B, -1, H, K)[:, :T]


def in_bands(x_BT: Array, W: int) -> Array:
    """Cuts the positions of (B, T, ..) into bands, (B, n, W, ..); zeros fill up the last one."""
    B, T, *rest = x_BT.shape
    n = -(-T // W)
    x_BT = jnp.pad(x_BT, [(0, 0), (0, n * W - T), *[(0, 0)] * len(rest)])
    return x_BT.reshape(B, n, W, *rest)


def in_two_bands(x_BT: Array, W: int) -> Array:
    """Each band behind the one before it, (B, n, 2 W, ..); zeros are before the first."""
    x_BnW = in_bands(x_BT, W)
    before = jnp.pad(x_BnW[:, :-1], [(0, 0), (1, 0), *[(0, 0)] * (x_BnW.ndim - 2)])
    return jnp.concatenate((before, x_BnW), axis=2)


def band_mask(band: Array, W: int, window: int, nearest: int = 0) -> Array:
    """(W, 2 W) for a band, counted from 0: whether its query i sees key j of two bands, which must
    be from `nearest` to `window` positions before it. Key j = W + i is at the position of query i.
    For bands (n, 1, 1), the mask is (n, W, 2 W)."""
    query, key = jnp.ogrid[:W, : 2 * W]
    distance = query + W - key
    return (nearest <= distance) & (distance <= window) & ((key >= W) | (band > 0))


def dc_attention(q_BTHK, k_BTHK, v_BTHK, w_in_BTH, w_out_BTH, scale: float, c: Config) -> Array:
    """[dc] Adds up the attention maps of all heads, with weights for each token, and every head
    applies the sum to its v; (B, T, H, K). Xiao et al. 2024, arXiv:2405.08553; record 85:

        map = sum over h of w_in[h] softmax(scores[h])     w_in is scaled to rms 1 over the heads
        y[h] = w_out[h] (map @ v[h])

    Queries see only the nearest dc_window keys, so positions are cut into bands as in
    band_attention(), and no T x T array exists.
    """
    B, T, H, K = q_BTHK.shape
    # A power of two, which fills the tiles of tensor cores; a short sequence is cut in two.
    W = min(1 << (c.dc_window - 1).bit_length(), -(-T // 2))
    q_BniHK, k_BnjHK = in_bands(q_BTHK, W), in_two_bands(k_BTHK, W)
    scores = scale * contract("BniHK,BnjHK->BnHij", jnp.float32, q_BniHK, k_BnjHK)
    bands_n11 = jnp.arange(scores.shape[1])[:, None, None]
    mask_nij = band_mask(bands_n11, W, c.dc_window - 1)
    maps_BnHij = jax.nn.softmax(jnp.where(mask_nij[:, None], scores, -jnp.inf), axis=-1)
    w_in = w_in_BTH * lax.rsqrt(jnp.square(w_in_BTH).mean(axis=-1, keepdims=True) + 1e-6)
    mixed = jnp.einsum("BnHij,BniH->Bnij", maps_BnHij, in_bands(w_in, W)).astype(v_BTHK.dtype)
    y = jnp.einsum("Bnij,BnjHK->BniHK", mixed, in_two_bands(v_BTHK, W))
    y = y.reshape(B, -1, H, K)[:, :T]
    return (w_out_BTH[..., None] * y).astype(v_BTHK.dtype)


def mlp(x_BTD, i: int, w, c: Config, out_scale=1.0) -> Array:
    """[relu2] relu(norm(x) fc^T)^2 proj, (B, T, D). So et al. 2021, arXiv:2109.08668."""
    fc_FD, proj_FD = w["mlp"][i]  # see bank(): all have one shape, so proj is transposed
    hidden = norm_linear(x_BTD, fc_FD.astype(x_BTD.dtype), radial_from="y")
    hidden = jnp.square(jax.nn.relu(hidden))
    proj_FD = (out_scale * proj_FD).astype(x_BTD.dtype)
    return contract("BTF,FD->BTD", x_BTD.dtype, hidden, proj_FD)


# ---- Gates and MUDD ------------------------------------------------------------------------------
GATE_SCALE = 0.1  # factor of a MUDD net's output, and first value of the gates' learned factor
KEEP_ADD = [1.1**0.5, 1.0]  # first a and b of a sublayer: a layer's two scale x by 1.1


def nets(c: Config) -> dict[str, dict[str, list[float]]]:
    """The nets that compute coefficients for each token: initial values of every output, by name.

    [gates] "gates_input" reads x0, "gates4" reads x before layer 4; each serves the layers up to
    the next such net. [mudd] "mudd10" reads x before layer 10, "mudd_head" the last x.
    """
    current = "gates_input"
    table = {current: {"input.ngram": [0.05]}}
    for i, layer in enumerate(c.layers):
        if layer.new_gates:
            current = f"gates{i}"
            table[current] = {}
        for name, start in layer_gates(layer, c.H).items():
            table[current][f"layer{i}.{name}"] = start
        if layer.mudd:
            streams = [0.0] * (len(layer.mudd) + 1)  # the named ones, and x
            mix = {"v": streams, "x": streams, "value": [2.0, 2.0]}
            table[f"mudd{i}"] = mix | {"attn": [*KEEP_ADD, 0.0, 0.05], "mlp": KEEP_ADD}
    if c.mudd_head:
        table["mudd_head"] = {"x": [start for _, start in c.mudd_head]}
    return table


def layer_gates(layer: Layer, H: int) -> dict[str, list[float]]:
    """A layer's gates and their initial values: one for a token, or one for each of its H heads."""
    gates = {}
    if layer.x0:
        gates["x0"] = [0.0]
    if layer.ngram and not layer.mudd:  # with mudd, its net weighs the ngram
        gates["ngram"] = [0.05]
    if layer.skip_from is not None:
        gates["skip"] = [0.5]
    if layer.xsa:
        gates["xsa"] = [0.0] * H
    if layer.head_gate:
        gates["head"] = [0.25] * H
    if layer.dc:
        gates["dc_in"] = [1.0] * H
        gates["dc_out"] = [0.0] * H
    return gates


def run_net(name: str, x_BTD, w, c: Config, scale=GATE_SCALE) -> dict[str, Array]:
    """Runs a net on x: scale * (w2 gelu(w1 x) + b2), where only b2 remains if R is 0. Returns its
    outputs by name, (B, T, n) each, in float32; one matmul serves all of them."""
    w1, w2 = (w[f"{name}.{matrix}"].astype(x_BTD.dtype) for matrix in ("w1", "w2"))
    hidden_BTR = gelu(jnp.einsum("BTD,RD->BTR", x_BTD, w1))
    y = jnp.einsum("BTR,nR->BTn", hidden_BTR, w2).astype(jnp.float32)
    y = scale * (y + w[f"{name}.b2"])
    starts = nets(c)[name]
    ends = np.cumsum([len(start) for start in starts.values()])
    return dict(zip(starts, jnp.split(y, ends[:-1], axis=-1), strict=True))


def per_token_terms(weights_BTn, streams: list[Array]) -> list[tuple[Array, Array]]:
    """Terms of a weighted_sum in which every token has its own weight for each of n streams."""
    return list(zip(jnp.split(weights_BTn, len(streams), axis=-1), streams, strict=True))


# ---- Building blocks -----------------------------------------------------------------------------
def weighted_sum(*terms: tuple[Any, Array]) -> Array:
    """The sum of weight * array, in float32 and rounded once: rounding every term to bfloat16 would
    degrade the residual stream."""
    total = sum(weight * x.astype(jnp.float32) for weight, x in terms)
    return total.astype(terms[0][1].dtype)


def inverse_rms(x: Array) -> Array:
    """1 / rms over the last axis, which becomes 1, in float32. Like torch's, it adds epsilon."""
    return lax.rsqrt(jnp.mean(jnp.square(x.astype(jnp.float32)), axis=-1, keepdims=True) + 2.0**-23)


def norm(x: Array) -> Array:
    """RMSNorm over the last axis, without weights."""
    return (x * inverse_rms(x)).astype(x.dtype)


def take_rows(table_VD, index_BT) -> Array:
    """Rows of a table, (B, T, D). Every index must be inside the table."""
    return table_VD.at[index_BT].get(mode="promise_in_bounds")


class Positions(NamedTuple):
    """What attention needs to know of positions, documents and the stage."""

    rope: dict[bool, tuple[Array, Array]]  # cos and sin, (T, 1 or 2, K / 4), by paired_heads
    score_scale: float  # of q.k
    doc_q: Array  # (B, T, 1, 4): the last four channels of every q, see positions()
    doc_k: Array  # (B, T, 1, 4): the last four channels of every k
    windows: dict[str, int | tuple]  # of SHORT and LONG layers, for attend()


def positions(starts_BT, c: Config, stage: int, last=None) -> Positions:
    """Angles, document codes and windows; starts_BT: whether a token starts a document. A program
    with `last`, 0 or 1, has the windows of the last validation, too: see Config.val_stage()."""
    t_T1 = jnp.arange(starts_BT.shape[1])[:, None]
    frequency, score_scale = rope_frequencies(c, stage)
    rope = {}
    for paired in {layer.paired_heads for layer in c.layers if layer.window}:
        # The angle of a paired head h is that of position 2 t + h % 2: see attention().
        position = 2 * t_T1 + jnp.arange(2) if paired else t_T1
        angle = position[:, :, None].astype(jnp.float32) * frequency.astype(np.float32)
        rope[paired] = (jnp.cos(angle), jnp.sin(angle))
    # [document-mask] cuDNN's kernel with a window takes no mask of documents. So the last four
    # channels of q and k, which norm_rotate() overwrites, add
    #     4096 (high_k - high_q) + 256 (low_k - low_q) = 256 (document_k - document_q)
    # to q.k: 0 within a document, -256 or less for an earlier one; the other channels add between
    # -K and K, at most 128. The scale of scores is at least 0.1: of two keys with equal other
    # channels, an earlier document's has less than exp(-25) of the weight (up to 4,095 documents).
    document = jnp.cumsum(starts_BT, axis=1, dtype=jnp.int32)[:, :, None]
    one = jnp.ones_like(document)
    high, low = document // 16, document % 16
    doc_q = jnp.stack((-4096 * high, -256 * low, 4096 * one, 256 * one), axis=-1).astype(c.compute)
    doc_k = jnp.stack((one, one, high, low), axis=-1).astype(c.compute)
    windows = {SHORT: c.stages[stage].short, LONG: c.stages[stage].long}
    if last is not None and stage == c.val_stage(c.total_steps):
        for name, length in {SHORT: c.stages[-1].short, LONG: c.stages[-1].long}.items():
            if length != windows[name]:
                windows[name] = (last, windows[name], length)
    return Positions(rope, score_scale, doc_q, doc_k, windows)


def rope_frequencies(c: Config, stage: int) -> tuple[np.ndarray, float]:
    """Frequencies, (K / 4,), of the channel pairs that rotate, and the scale of the scores.

    [half-rope] Half of the channels do not rotate. Record 17.
    [yarn] Where the long window grows from one stage with steps to the next, low frequencies fall
    and scores grow. arXiv:2309.00071, record 31.
    """
    frequency = (1 / 1024) ** np.linspace(0, 1, c.D // c.H // 4)
    scale = c.score_scale
    windows = [s.long for s in c.stages[: stage + 1] if s.steps]
    for old, new in itertools.pairwise(windows):
        turns = old * frequency / (2 * np.pi)  # in the old window
        keep = np.clip((turns - 1) / 31, 0, 1)  # YaRN's alpha = 1, beta = 32
        frequency = frequency * (old / new + keep * (1 - old / new))
        scale = scale * (1 + 0.2 * np.log(new / old))  # upstream's; YaRN's has 0.1
    return frequency, float(scale)


# ---- Pointer -------------------------------------------------------------------------------------
def pointer_copies(x_BTD, tokens_BS, w, c: Config) -> Array:
    """[pointer] What head_loss() mixes into the prediction of each token, (B, T, 3), in float32:
        right  attention on tokens whose successor is the target
        every  attention on all earlier tokens; the sentinel has the rest
        bias   added to the logit of the copies' share
    The pointer is an attention head over the last x. It attends to earlier tokens of the document
    and to a sentinel, and its map is read as a distribution of copies: token j stands for its
    successor, j + 1. Token t sees keys j < t only, so the successor, token j + 1 <= t, has been
    read. Merity et al. 2016, arXiv:1609.07843; pull request 379. Not in upstream: scores have a
    learned term for each n, added if the last n tokens at t and at j are equal, and the share
    depends on the longest such match. A token sees its own band of positions and the one before,
    so there is no (T, T) array."""
    targets_BT = tokens_BS[:, 1:]  # the successor of each token
    T = targets_BT.shape[1]
    # A short sequence is cut in two, so that a token sees all earlier ones.
    W = min(c.pointer_band, -(-T // 2))
    q, k = pointer_qk(x_BTD, w, c)
    labels = pointer_labels(tokens_BS[:, :-1], c)

    @jax.checkpoint
    def one_band(band, q, labels_q, target, k, labels_k, successor):
        visible = band_mask(band, W, 2 * W, nearest=1)  # of both bands, but not the token itself
        scores, sentinel, longest = pointer_scores(q, labels_q, k, labels_k, visible, w, c)
        top = lax.stop_gradient(jnp.maximum(scores.max(axis=-1), sentinel))
        weights = jnp.exp(scores - top[..., None])
        every = weights.sum(axis=-1)
        right = jnp.where(successor[:, None] == target[..., None], weights, 0).sum(axis=-1)
        total = every + jnp.exp(sentinel - top)
        return jnp.stack((right / total, every / total, w["pointer_share"][longest]), axis=-1)

    arrays = [in_bands(x, W) for x in (q, labels, targets_BT)]
    arrays += [in_two_bands(x, W) for x in (k, labels, targets_BT)]
    arrays = [jnp.moveaxis(x, 1, 0) for x in arrays]
    bands = jnp.arange(len(arrays[0]))
    # Eight bands at once: one alone may be too little work for a device, and all too much memory.
    copies_nBW3 = lax.map(lambda args: one_band(*args), (bands, *arrays), batch_size=8)
    return jnp.moveaxis(copies_nBW3, 0, 1).reshape(-1, len(arrays[0]) * W, 3)[:, :T]


def pointer_qk(x_BTD, w, c: Config) -> tuple[Array, Array]:
    """The pointer's queries and keys, (B, T, pointer_D) each. A key also reads the token before."""
    w_q, w_k, w_previous = w["pointer_qk"].astype(x_BTD.dtype)
    previous = jnp.pad(x_BTD[:, :-1], ((0, 0), (1, 0), (0, 0)))
    q = w["pointer_gain"] * norm(jnp.einsum("BTD,ED->BTE", x_BTD, w_q))
    k = jnp.einsum("BTD,ED->BTE", x_BTD, w_k) + jnp.einsum("BTD,ED->BTE", previous, w_previous)
    return q.astype(x_BTD.dtype), norm(k)


def pointer_labels(tokens_BT, c: Config) -> Array:
    """What makes tokens match, (B, T, 1 + pointer): the number of the document, and hashes of the
    last 1, 2, ... tokens. Equal hashes mean equal tokens, but for about one pair in 2^32."""

    def longer(label_BT, _):
        before = jnp.pad(label_BT[:, :-1], ((0, 0), (1, 0)))  # that of the token before
        label_BT = before * np.int32(1664525) + tokens_BT + 1  # wraps around
        return label_BT, label_BT

    document_BT = jnp.cumsum(tokens_BT == c.eot, axis=1)
    _, labels_nBT = lax.scan(longer, jnp.zeros_like(tokens_BT), length=c.pointer)
    return jnp.moveaxis(jnp.concatenate((document_BT[None], labels_nBT)), 0, -1)


def pointer_scores(q_BiE, labels_q, k_BjE, labels_k, visible, w, c: Config) -> tuple:
    """Scores of queries i for keys j, (B, i, j), -inf if not visible or of another document; of
    the sentinel, (B, i); in float32. And the length of the longest match, (B, i)."""
    scale = c.pointer_D**-0.5
    scores = scale * jnp.einsum("BiE,BjE->Bij", q_BiE, k_BjE, preferred_element_type="float32")
    sentinel = scale * (jnp.float32(q_BiE) @ w["pointer_sentinel"]) + w["pointer_sentinel_bias"]
    visible = visible & (labels_q[:, :, None, 0] == labels_k[:, None, :, 0])
    # A match of n tokens is one of n - 1, too, so the number of equal hashes is its length, and
    # the terms of all lengths up to it are added.
    length = (labels_q[:, :, None, 1:] == labels_k[:, None, :, 1:]).sum(axis=-1)
    length = jnp.where(visible, length, 0)
    is_as_long = length[..., None] > jnp.arange(c.pointer)
    scores += jnp.where(is_as_long, w["pointer_match"], 0).sum(axis=-1)
    return jnp.where(visible, scores, -jnp.inf), sentinel, length.max(axis=-1)


# ---- Custom gradients ----------------------------------------------------------------------------
# JAX's own gradients of norms read and write more memory than they must. For h = x / rms(x),
#     dx = (dh - h mean(dh h)) / rms(x), with the mean over the D channels.
# The second term removes the radial part of dh, which is parallel to h: it would only change the
# length of x, which the norm takes away.
@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def norm_linear(x_BTD, w_ED, radial_from: str) -> Array:
    """norm(x) w^T, (B, T, E); norm(x) is never written to memory.

    The backward pass computes the radial part from "x", or from "y", the result. From y it is
    cheaper if an elementwise function follows, such as relu, whose gradient reads y anyway.
    """
    return norm_linear_fwd(x_BTD, w_ED, radial_from)[0]


def norm_linear_fwd(x_BTD, w_ED, radial_from: str) -> tuple[Array, tuple]:
    """x w^T / rms(x)."""
    inverse = lax.optimization_barrier(inverse_rms(x_BTD))  # or XLA computes x a second time
    # Scaling after the matmul is free: XLA fuses it into whatever reads y.
    y = (jnp.einsum("BTD,ED->BTE", x_BTD, w_ED) * inverse).astype(x_BTD.dtype)
    return y, (x_BTD, inverse, w_ED, y)


def norm_linear_bwd(radial_from: str, residuals: tuple, dy) -> tuple:
    """With h = norm(x) and dz = dy / rms(x):

        dw = dz^T x
        dh / rms(x) = dz w
        dx = dh / rms(x) - x sum(dh h) / (D rms(x)^2)

    sum(dh h) equals sum(dy y): radial_from says which one is computed.
    """
    x, inverse, w_ED, y = residuals
    dz = (dy * inverse).astype(x.dtype)
    dh_over_rms = jnp.einsum("BTE,ED->BTD", dz, w_ED)
    a, b = (dy, y) if radial_from == "y" else (dh_over_rms, x)
    radial = (a.astype(jnp.float32) * b).sum(axis=-1, keepdims=True) / x.shape[-1]
    dw_ED = jnp.einsum("BTE,BTD->ED", dz, x)
    return (dh_over_rms - x * (radial * inverse**2)).astype(x.dtype), dw_ED


norm_linear.defvjp(norm_linear_fwd, norm_linear_bwd)


@jax.custom_vjp
def norm_rotate(x_BTHK, cos, sin, doc) -> Array:
    """rotate(norm(x)), (B, T, H, K), whose last four channels are overwritten by the document code,
    (B, T, 1, 4)."""
    return norm_rotate_fwd(x_BTHK, cos, sin, doc)[0]


def norm_rotate_fwd(x_BTHK, cos, sin, doc) -> tuple[Array, tuple]:
    """The result, y, and what the backward pass needs: not x, because attention stores y anyway."""
    K = x_BTHK.shape[-1]
    inverse = inverse_rms(x_BTHK)
    rotated = rotate(x_BTHK * inverse, cos, sin).astype(x_BTHK.dtype)
    # Of the copies of the code, only the last one is used.
    y = jnp.where(jnp.arange(K) < K - 4, rotated, jnp.tile(doc, K // 4))
    y, overwritten = lax.optimization_barrier((y, rotated[..., -4:]))
    return y, (y, overwritten, inverse, cos, sin)


def norm_rotate_bwd(residuals: tuple, dy_BTHK) -> tuple:
    """The gradient of y = R norm(x). A rotation R keeps inner products, so it is
    R^T (dy - y mean(dy y)) / rms(x)."""
    y, overwritten, inverse, cos, sin = residuals
    K = y.shape[-1]
    dy = dy_BTHK.astype(jnp.float32)
    # The code has no gradient. With a mask instead of a slice, XLA would merge the sums of several
    # layers into one slow kernel.
    radial = (dy[..., :-4] * y[..., :-4]).sum(axis=-1, keepdims=True) / K
    has_code = jnp.arange(K) >= K - 4
    y = jnp.where(has_code, jnp.tile(overwritten, K // 4), y)
    dy = jnp.where(has_code, 0, dy)
    dx = rotate(dy - y * radial, cos, -sin) * inverse
    return dx.astype(dy_BTHK.dtype), None, None, None


norm_rotate.defvjp(norm_rotate_fwd, norm_rotate_bwd)


def rotate(h_BTHK, cos, sin) -> Array:
    """Rotates the channel pairs (a, b) of every head by the angle of its position:

        [ a: K/4 | b: K/4 | rest: K/2 ]  ->  [ a cos + b sin | b cos - a sin | rest ]

    cos and sin are (T, 1 or 2, K / 4); with two angles, head h takes number h % 2. The function has
    no slices and concatenations, because the threads of a GPU would diverge in them.
    """
    B, T, H, K = h_BTHK.shape
    _, angles, quarter = cos.shape
    parts = h_BTHK.reshape(B, T, H // angles, angles, 4, quarter)  # a, b, rest, rest
    pairs = parts.reshape(B, T, H // angles, angles, 2, 2, quarter)
    partners = pairs[..., ::-1, :].reshape(parts.shape)  # b, a, rest, rest
    cos, sin = cos[:, None, :, None], sin[:, None, :, None]
    part = jnp.arange(4)[:, None]
    sin = jnp.where(part == 0, sin, jnp.where(part == 1, -sin, 0))
    return (parts * jnp.where(part < 2, cos, 1) + partners * sin).reshape(h_BTHK.shape)


def offset_keys(k_BTHK) -> Array:
    """(B, T, H, K): channels K / 2 to K - 5 of every key become those of the previous position's
    key. The key of the first position does not change."""
    _, T, _, K = k_BTHK.shape
    no_pad = (0, 0, 0)
    previous = lax.pad(k_BTHK, k_BTHK.dtype.type(0), [no_pad, (1, -1, 0), no_pad, no_pad])
    channel = jnp.arange(K)
    is_first = jnp.arange(T)[:, None, None] == 0
    unchanged = (channel < K // 2) | (channel >= K - 4) | is_first
    return jnp.where(unchanged, k_BTHK, previous)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def contract(subscripts: str, dtype: Any, a, b) -> Array:
    """An einsum, in dtype; the matmuls of its gradient are in the dtype of a. For x w, JAX would
    compute dw as (dy^T x)^T, which jax 0.12 sums slowly, and in bfloat16, on CPUs."""
    return jnp.einsum(subscripts, a, b, preferred_element_type=dtype)


def contract_fwd(subscripts: str, dtype: Any, a, b) -> tuple[Array, tuple]:
    """The result, and its operands."""
    return contract(subscripts, dtype, a, b), (a, b)


def contract_bwd(subscripts: str, dtype: Any, residuals: tuple, dy) -> tuple:
    """For "x,w->y", da is "y,w->x" of dy and b, and db is "y,x->w" of dy and a."""
    a, b = residuals
    dy = dy.astype(a.dtype)
    of_a, of_b, of_y = re.split(",|->", subscripts)
    da = jnp.einsum(f"{of_y},{of_b}->{of_a}", dy, b)
    return da, jnp.einsum(f"{of_y},{of_a}->{of_b}", dy, a)


contract.defvjp(contract_fwd, contract_bwd)


@jax.custom_vjp
def gelu(x: Array) -> Array:
    """Exact GELU. In jax 0.12, erf in float32 cannot be differentiated inside shard_map."""
    return jax.nn.gelu(x, approximate=False)


def gelu_fwd(x: Array) -> tuple[Array, Array]:
    """The value, and x."""
    return gelu(x), x


def gelu_bwd(x: Array, dy: Array) -> tuple[Array]:
    """dx = dy (cdf(x) + x density(x)), both of the normal distribution."""
    density = jnp.exp(-x * x / 2) / math.tau**0.5
    return (dy * (lax.erfc(-x / 2**0.5) / 2 + x * density),)


gelu.defvjp(gelu_fwd, gelu_bwd)


# ---- N-grams -------------------------------------------------------------------------------------
# Factors by the length of an n-gram: for its last token, the one before it, and so on. The first
# tuple is for the row, the second for the signs. Those of 2 and 3 are record 92's, the others ours.
NGRAM_FACTORS = {
    2: ((36313, 27191), (48271, 30011)),
    3: ((17351, 60961, 45259), (58699, 39779, 26801)),
    4: ((52361, 31847, 64901, 22541), (33769, 61403, 24877, 50101)),
    5: ((41077, 57413, 19609, 35251, 62989), (55057, 28019, 63841, 37123, 44651)),
}


def hash_ngrams(tokens_BT, c: Config) -> list[tuple[Array, Array]]:
    """Hashes each token with the n - 1 before it, for every length n in c.ngrams: indices into the
    n-gram table and seeds for random signs, (B, T) each. Every length has an equal part of the
    table. The first n - 1 tokens of a sequence have the last index of the part and seed 0. Like
    upstream's, n-grams do not end at documents."""
    part = c.ngram_buckets // len(c.ngrams)
    last_row = part - 1
    T = tokens_BT.shape[1]
    hashes = []
    for number, n in enumerate(c.ngrams):
        row_factors, sign_factors = NGRAM_FACTORS[n]
        if len(c.ngrams) == 1:  # record 89, with pairs alone, has no factors for its signs
            sign_factors = (1,) * n
        # Tokens t, t - 1, ..., and zeros where there is none. Products of int32 may wrap around.
        ngram = [jnp.pad(tokens_BT, ((0, 0), (k, 0)))[:, :T] for k in range(n)]
        products = [factor * token for factor, token in zip(sign_factors, ngram, strict=True)]
        seed = functools.reduce(jnp.bitwise_xor, products) % 8192
        if n == 2:  # as upstream: in the pair of token 1, last_row stands in for token 0
            ngram[1] = ngram[1].at[:, 1:2].set(last_row)
        products = [factor * token for factor, token in zip(row_factors, ngram, strict=True)]
        row = functools.reduce(jnp.bitwise_xor, products) % last_row
        is_whole = jnp.arange(T) >= n - 1
        index_BT = number * part + jnp.where(is_whole, row, last_row)
        hashes.append((index_BT, jnp.where(is_whole, seed, 0)))
    return hashes


def ngram_rows(tokens_BT, c: Config) -> Array:
    """The rows of the ngram table that tokens read, (B, N): T for each length of n-grams."""
    return jnp.concatenate([row_BT for row_BT, _ in hash_ngrams(tokens_BT, c)], axis=1)


def random_signs(seed_BT, c: Config) -> Array:
    """(B, T, D) of -1 and 1, the same for a seed in every run: a hash instead of a table."""
    bits = (seed_BT[..., None] * c.D + jnp.arange(c.D)).astype(jnp.uint32)
    bits = bits * np.uint32(0x9E3779B1)
    bits = (bits ^ (bits >> 15)) * np.uint32(0x85EBCA77)
    return 1 - 2 * (bits >> 31).astype(c.compute)


# [ngram-table] The table of n-grams is too large to be gathered, so devices send each other only
# the rows that their tokens read, and the gradients of these rows: all-to-all, with shapes that do
# not depend on the text. A row is sent once for each sequence, however often the sequence reads it.
# Record 92.
#
# Letters of the exchange: B sequences of a microbatch on this device, and Q on all devices of the
# node; U n-grams of a sequence; A rows of an eighth of the table; p of the 8 eighths on this
# device; C slots in which a sequence has the rows that it reads of an eighth; L gradients of rows.
class Request(NamedTuple):
    """The rows that a microbatch reads."""

    slot_BU: Array  # slot of each n-gram's row, of the 8 C of its sequence; 8 C: it is lost
    wanted_QpC: Array  # row in each slot of this device's eighths; A: the slot is empty


class RowGradients(NamedTuple):
    """Gradients of rows in this device's eighths. A row may occur more than once."""

    rows: Array  # (p, L), numbers of rows in an eighth; A: none
    gradients: Array  # (p, L, D)


def request_rows(tokens_BT, table_ApD, c: Config) -> Request:
    """Sends the owners of the n-gram table what this device's tokens read."""
    slots = functools.partial(assign_slots, C=c.ngram_slots(tokens_BT.shape[1]), A=len(table_ApD))
    slot_BU, wanted_B8C = jax.vmap(slots)(ngram_rows(tokens_BT, c))
    wanted_QpC = lax.all_to_all(wanted_B8C, "fsdp", split_axis=1, concat_axis=0, tiled=True)
    return Request(slot_BU, wanted_QpC)


def assign_slots(rows_U, C: int, A: int) -> tuple[Array, Array]:
    """Gives every row that occurs in rows_U one of C slots in its eighth. If there are too few, the
    highest rows have none. Returns the slot of each row, (U,), 8 C for none, and the rows in the
    slots, (8, C), counted in their eighth; A: none.

    Row r is row r // 8 of eighth r % 8. With rows_U = [8, 3, 24, 8, 16] and C = 2, eighth 0 has
    three different rows, 1, 2 and 3, of which the third is lost: the slots are [0, 6, 16, 0, 1],
    and the rows in them [1, 2] in eighth 0, [0, A] in eighth 3, and [A, A] elsewhere."""
    place = rows_U % GROUP * A + rows_U // GROUP  # as if the eighths followed each other
    order = jnp.argsort(place)
    place_sorted = place[order]  # eighth by eighth, and equal rows are neighbors
    is_first_sorted = jnp.concatenate((jnp.ones(1, bool), place_sorted[1:] != place_sorted[:-1]))
    eighth_sorted = place_sorted // A
    distinct_8 = jnp.zeros(GROUP, jnp.int32).at[eighth_sorted].add(is_first_sorted)
    rank_sorted = jnp.cumsum(is_first_sorted) - 1  # of a row among all different rows
    before_8 = jnp.cumsum(distinct_8) - distinct_8  # how many the earlier eighths have
    column_sorted = rank_sorted - before_8[eighth_sorted]  # place in the list of its eighth
    slot_sorted = jnp.where(column_sorted < C, eighth_sorted * C + column_sorted, GROUP * C)
    wanted = jnp.full(GROUP * C, A, jnp.int32).at[slot_sorted].set(place_sorted % A, mode="drop")
    slot_U = jnp.zeros_like(slot_sorted).at[order].set(slot_sorted)
    return slot_U, wanted.reshape(GROUP, C)


def pull_rows(table_ApD, request: Request, c: Config) -> Array:
    """The rows that were requested, (B, U, D); zeros for those that are lost."""
    eighth = jnp.arange(table_ApD.shape[1])[:, None]
    # An empty slot gets some row, which nothing reads.
    rows_QpCD = table_ApD.at[request.wanted_QpC, eighth].get(mode="clip").astype(c.compute)
    rows_B8CD = lax.all_to_all(rows_QpCD, "fsdp", split_axis=0, concat_axis=1, tiled=True)
    B = len(rows_B8CD)
    slots = rows_B8CD.reshape(B, -1, c.D)
    sequence = jnp.arange(B)[:, None]
    return slots.at[sequence, request.slot_BU].get(mode="fill", fill_value=0)


def push_gradients(gradients_BUD, request: Request, c: Config) -> RowGradients:
    """[sparse-grads] Sends the owners the gradients of the rows that were requested, summed within
    a sequence: a gradient of the whole table would be mostly zeros. Record 71."""
    B, U, D = gradients_BUD.shape
    C = request.wanted_QpC.shape[-1]
    sequence = jnp.arange(B)[:, None]
    sums = jnp.zeros((B, GROUP * C, D), jnp.float32)
    sums = sums.at[sequence, request.slot_BU].add(gradients_BUD.astype(jnp.float32), mode="drop")
    if lax.axis_size("fsdp") > 1:  # on one device nothing is sent, so nothing is rounded
        sums = sums.astype(c.compute)
    sums_B8CD = sums.reshape(B, GROUP, C, D)
    sums_QpCD = lax.all_to_all(sums_B8CD, "fsdp", split_axis=1, concat_axis=0, tiled=True)
    received = (request.wanted_QpC, sums_QpCD)
    if node_axes():
        received = [lax.all_gather(x, node_axes(), tiled=True, to="invarying") for x in received]
    return RowGradients(*(join_sequences(x) for x in received))


def join_sequences(x_QpC: Array) -> Array:
    """(Q, p, C, ..) to (p, Q C, ..): joins the first axis and the third."""
    Q, p, C, *rest = x_QpC.shape
    return jnp.moveaxis(x_QpC, 0, 1).reshape(p, Q * C, *rest)


def lost_ngrams(request: Request) -> Array:
    """How many n-grams of this device have no slot."""
    return jnp.sum(request.slot_BU == GROUP * request.wanted_QpC.shape[-1])


def table_gradient(rows: RowGradients, table_ApD) -> Array:
    """The gradient of this device's eighths of the table. Gradients of equal rows are added."""
    eighth = jnp.arange(table_ApD.shape[1])[:, None]
    zeros = jnp.zeros_like(table_ApD)
    return zeros.at[rows.rows, eighth].add(rows.gradients.astype(jnp.float32), mode="drop")


# ---- Loss ----------------------------------------------------------------------------------------
def target_weights(stage: Stage) -> dict[int, tuple[float, float]]:
    """Loss weights at the beginning and the end of a stage, by target: k is the token k ahead,
    PREFIX the longest proper prefix of the next token. Targets without weight are left out."""
    weights = {}
    for k, weight in enumerate((stage.prefix, *stage.targets)):
        start, end = weight if isinstance(weight, tuple) else (weight, weight)
        if start or end:
            weights[k] = (start, end)
    return weights


def prefix_table(c: Config) -> np.ndarray:
    """For each token, the longest other token that its bytes begin with, (vocab,); -1: none."""
    return np.fromfile(c.prefixes, "<i4")


SOFTCAP = 23  # softcapped logits are SOFTCAP * sigmoid((z + SOFTCAP_SHIFT) / SOFTCAP_WIDTH)
SOFTCAP_SHIFT = 5
SOFTCAP_WIDTH = 7.5


def softcap(z: Array) -> Array:
    """[softcap] Bounded logits, in float32. Gemma 2, arXiv:2408.00118; records 18 and 54."""
    return SOFTCAP * jax.nn.sigmoid((z.astype(jnp.float32) + SOFTCAP_SHIFT) / SOFTCAP_WIDTH)


def quantize(x: Array, scale: float, dtype: str) -> Array:
    """x * scale in dtype, clipped to its range: beyond it, a cast to float8 makes NaN or inf on one
    platform and the largest number on another."""
    limit = float(jnp.finfo(dtype).max)
    return jnp.clip(x.astype(jnp.float32) * scale, -limit, limit).astype(dtype)


def scaled_matmul(a, b, axes: tuple, scale: float, dtype: str, precision=None) -> Array:
    """The product of two matrices, contracted over axes[0] of a and axes[1] of b, divided by scale,
    in dtype. With precision "highest", tensor cores keep all bits while they sum up float8."""
    contracted = (((axes[0],), (axes[1],)), ((), ()))
    out = lax.dot_general(a, b, contracted, precision, preferred_element_type=dtype)
    return out * jnp.asarray(1 / scale, dtype)


@functools.partial(jax.custom_vjp, nondiff_argnums=(5,))
def head_loss(x_ND, w_VD, targets_NJ, weights_J, copies_N3, c: Config) -> Array:
    """[fp8-head] Softcapped cross-entropy to J targets (-1: none) with weights, summed over N
    tokens. It works on chunks of tokens, so that the (N, V) logits never exist; the forward pass
    computes the gradients as well, while a chunk's logits are at hand. arXiv:2209.05433, record
    19. With [pointer], the first target is the next token; copies_N3 is pointer_copies()."""
    return head_loss_fwd(x_ND, w_VD, targets_NJ, weights_J, copies_N3, c)[0]


def exp_of_tokens(s_NV, c: Config) -> Array:
    """exp(s), the summands of the softmax. With [pointer], only tokens have one: it is 0 for the
    share row and the rest of the padding."""
    exp_NV = jnp.exp(s_NV)
    if c.pointer:
        column = lax.broadcasted_iota(jnp.int32, s_NV.shape, 1)
        exp_NV = jnp.where(column < c.vocab, exp_NV, 0)
    return exp_NV


def mixed_log_p(log_p, share_logit, copies_N3) -> Array:
    """[pointer] The log-probability of the next token, (N,), with
        p = p_lm (1 - share * every) + share * right.
    log_p is log p_lm, the head's alone; share_logit is that of the share row less the logarithm of
    the softmax's sum. The 1e-9 keeps the result finite; with GPT-2's vocabulary, probabilities then
    sum to 1.00005."""
    right, every, bias = copies_N3[:, 0], copies_N3[:, 1], copies_N3[:, 2]
    share = jax.nn.sigmoid(share_logit + bias)
    return jnp.log(jnp.exp(log_p) * (1 - share * every) + share * right + 1e-9)


def loss_of_logits(z_NV, targets_NJ, weights_NJ, copies_N3, c: Config) -> tuple:
    """The loss, summed over tokens, and what its gradient is made of. Let s = softcap(z), and total
    the sum of exp(s). The log-probability of k is s[k] - log(total), and its gradient for s is
    one_hot(k) - softmax(s). So the gradient of the loss for s is
        sum over targets k of weight_k * (softmax(s) - one_hot(k)).
    Returns the loss, the gradient for copies_N3, total (N, 1), and these targets and weights.
    Without [pointer], they are the ones given. With it, the loss of the next token is a function f
    of log_p and share_logit, which are s - log(total) of two rows. So the weight of the next token
    is -df/dlog_p, and the share row is an extra target, with the weight -df/dshare_logit."""
    # Softcapped logits are bounded, so there is no maximum to subtract.
    total = exp_of_tokens(softcap(z_NV), c).sum(axis=1, keepdims=True)
    tokens_NJ = jnp.maximum(targets_NJ, 0)
    z_target = jnp.take_along_axis(z_NV, tokens_NJ, axis=1, mode="promise_in_bounds")
    log_total = jnp.log(total)
    losses = log_total - softcap(z_target)
    if not c.pointer:
        return (weights_NJ * losses).sum(), None, total, targets_NJ, weights_NJ
    share_logit = softcap(z_NV[:, c.vocab]) - log_total[:, 0]

    def f(log_p, share_logit, copies):
        return -(weights_NJ[:, 0] * mixed_log_p(log_p, share_logit, copies)).sum()

    gradient = jax.value_and_grad(f, (0, 1, 2))
    loss, (dlog_p, dshare_logit, dcopies) = gradient(-losses[:, 0], share_logit, copies_N3)
    loss += (weights_NJ[:, 1:] * losses[:, 1:]).sum()
    next_token_weight = -dlog_p[:, None]
    extra_weight = -dshare_logit[:, None]
    weights = jnp.concatenate((next_token_weight, weights_NJ[:, 1:], extra_weight), axis=1)
    with_extra_target = jnp.pad(targets_NJ, ((0, 0), (0, 1)), constant_values=c.vocab)
    return loss, dcopies, total, with_extra_target, weights


def gradient_of_logits(z_NV, total, targets, weights, scale: float, c: Config) -> Array:
    """The gradient of the loss for the logits z, times scale, (N, V) in float8: that for the
    softcapped logits s, which loss_of_logits() explains, times
        ds_dz = s (SOFTCAP - s) / (SOFTCAP * SOFTCAP_WIDTH)."""
    # The constants and the scale of float8 are multiplied into the weights beforehand.
    scaled_weights = scale / (SOFTCAP * SOFTCAP_WIDTH) * weights
    softmax_weight = scaled_weights.sum(axis=1, keepdims=True) / total
    # The barriers keep XLA from storing exp in float32 between its two uses, and from computing all
    # of the result a second time for its transpose.
    z_NV, softmax_weight = lax.optimization_barrier((z_NV, softmax_weight))
    s = softcap(z_NV)
    column = lax.broadcasted_iota(jnp.int32, s.shape, 1)
    dloss_ds = softmax_weight * exp_of_tokens(s, c)
    for j in range(targets.shape[1]):
        dloss_ds -= jnp.where(column == targets[:, j, None], scaled_weights[:, j, None], 0)
    return lax.optimization_barrier(quantize(dloss_ds * s * (SOFTCAP - s), 1, c.head_backward))


def head_loss_fwd(x_ND, w_VD, targets_NJ, weights_J, copies_N3, c: Config) -> tuple[Array, tuple]:
    """The loss, and its gradients for x, w and copies_N3."""
    # train_step() divides the loss by the batch. Undone here, so that gradients fill FP8's range.
    grad_scale = c.g_scale * c.batch
    w8_VD = quantize(w_VD, c.w_scale, c.head_forward)
    w8_DV = w8_VD.T  # once for all chunks: a float8 product wants the summed axis last

    def one_chunk(dw_VD, chunk):
        x, targets, copies = chunk
        weights = jnp.where(targets < 0, 0, weights_J)
        x8 = quantize(x, c.x_scale, c.head_forward)
        z = scaled_matmul(x8, w8_VD, (1, 1), c.x_scale * c.w_scale, c.compute)
        loss, dcopies, *parts = loss_of_logits(z, targets, weights, copies, c)
        g8 = gradient_of_logits(z, *parts, grad_scale, c)
        dx = scaled_matmul(g8, w8_DV, (1, 1), grad_scale * c.w_scale, c.compute, "highest")
        dw = scaled_matmul(g8, x8, (0, 0), grad_scale * c.x_scale, "float32", "highest")
        return dw_VD + dw, (loss, dx, dcopies)

    N = len(x_ND)
    size = math.gcd(N, c.head_chunk)
    arrays = (x_ND, targets_NJ, copies_N3)
    chunks = jax.tree.map(lambda x: x.reshape(-1, size, x.shape[1]), arrays)
    dw_VD, (losses, dx, dcopies) = lax.scan(one_chunk, jnp.zeros_like(w_VD, jnp.float32), chunks)
    loss = losses.sum()
    dx, dcopies = jax.tree.map(lambda x: x.reshape(N, -1), (dx, dcopies))
    return loss, (dx, dw_VD, dcopies)


def head_loss_bwd(c: Config, gradients: tuple, g: Array) -> tuple:
    """The gradients that the forward pass has computed, times g."""
    dx_ND, dw_VD, dcopies_N3 = jax.tree.map(lambda x: (x * g).astype(x.dtype), gradients)
    return dx_ND, dw_VD, None, None, dcopies_N3


head_loss.defvjp(head_loss_fwd, head_loss_bwd)


# ---- Parameters ----------------------------------------------------------------------------------
Kind = enum.Enum("Kind", ["BANK", "LOOKUP", "EXCHANGED", "REPLICATED"])  # of a parameter: see Param
BANK, LOOKUP, EXCHANGED, REPLICATED = Kind
SHARDINGS = {BANK: P(None, "fsdp"), LOOKUP: P("fsdp"), EXCHANGED: P(None, "fsdp"), REPLICATED: P()}
GROUP = 8  # matrices in a group of a bank, and eighths of an exchanged table


class Param(NamedTuple):
    """How a parameter starts, is stored, sent and updated. A node has n devices.

    kind        stored               each device owns    sent in Config.compute
    BANK        [G, 8, rows, cols]   whole matrices      all-gathered every step
    LOOKUP      [rows, D]            some rows           all-gathered after its updates
    EXCHANGED   [rows / 8, 8, D]     8 / n eighths       the rows that tokens read, every step
    REPLICATED  any shape            all of it           never
    """

    shape: tuple[int, ...]  # of the master copy, padding included
    init: Callable  # (key, shape) -> array
    lr: Any  # factor on the base rate; of a bank one for each matrix, [G, 8, 1, 1]
    weight_decay: float  # a decaying weight w shrinks by base_rate**2 * lr * weight_decay * w
    # An optax transform without rate or minus sign, which apply_update() adds. It gets one array,
    # the shard of the parameter that a device owns; the arrays of its state are sharded likewise.
    optimizer: optax.GradientTransformation
    kind: Kind = REPLICATED
    every_step: bool = False  # updated in every step, or only where Config.is_adam_step()
    base_lr: str = "adam_lr"  # the base rate: adam_lr or muon_lr
    layers: tuple[int, ...] = ()  # of a bank: the layer that uses each matrix, without padding
    rows: int = 0  # of a table: rows without padding

    @property
    def sharding(self) -> P:
        """How its axes are sharded."""
        return SHARDINGS[self.kind]

    @property
    def model_shape(self) -> tuple[int, ...]:
        """The shape without padding; of a bank, [matrices, rows, cols]."""
        if self.kind == BANK:
            return (len(self.layers), *self.shape[2:])
        return (self.rows, self.shape[-1]) if self.rows else self.shape


def param_table(c: Config) -> dict[str, Param]:
    """One row per parameter. A new technique adds its row here, and its line in the model."""
    D, H = c.D, c.H
    n_layers = len(c.layers)
    with_attention = c.attention_layers()
    vocab = padded_vocab(c)
    bound = 0.5 * (3 / D) ** 0.5  # uniform between -bound and bound has std 0.5 / sqrt(D)
    tall = max(1, c.F / D) ** 0.5  # the MLP's are taller than wide, and take larger steps
    muon = normuon(c)
    mlp_rates = [5, 1]  # of a and b
    if not any(start for _, start in c.mudd_head):
        # In the last layer, a only scales x, which the norm before the head takes away. So at first
        # its gradient is a rounding error, of which Adam would make a whole step.
        mlp_rates = [[5, 1] for _ in c.layers]
        mlp_rates[-1] = [0, 1]
    # fmt: off
    table = {
        # rows, D, std of the initial values, factors on the rate and on the decay, optimizer.
        # [tie] Until c.untie, embedding and head are one table, so these two rows must be equal.
        # Their padding belongs to the model: the softmax includes it.
        "embed":  lookup(vocab, D, 0.005, 1, 150, adam(0.5, 0.95)),
        "head":   lookup(vocab, D, 0.005, 1, 150, adam(0.5, 0.95)),
        "ngram":  ngram_table(c),
        **{f"value{n}": lookup(c.vocab, D, 0.01, 75, 5, adam(0.75, 0.95))
           for n in c.value_tables()},
        # rows, cols, layers, (bound of the initial values, factor on the rate) of each matrix,
        # optimizer. A layer has H matrices in "qk", of two heads each: half of them for q, then
        # half for k; w_v and w_o in "vo"; fc and proj^T in "mlp".
        "qk":  bank(2 * D // H, D, with_attention, [(bound, 1)] * H, muon),
        "vo":  bank(D, D, with_attention, [(bound, 1)] * 2, muon),
        "mlp": bank(c.F, D, range(n_layers), [(bound, tall), (0, 2 * tall)], muon),
        # shape, initial values, factor on the rate. Row i is layer i's; unused rows do not change.
        "vo_lambdas":   replicated((n_layers, 2), [0.5, 1.0], 5),
        "attn_lambdas": replicated((n_layers, 2), KEEP_ADD, [5, 1], b2=0.95),
        "mlp_lambdas":  replicated((n_layers, 2), KEEP_ADD, mlp_rates, b2=0.95),
        "skip_lambdas": replicated((n_layers,), -1.5, 5),
        "value_gates":  replicated((n_layers, H, 12), 0.0, 1, decay=1),
        "smear_gate":   replicated((12,), 0.0, 0.01),
        "smear_lambda": replicated((1,), 0.0, 5),
        **(pointer_params(c) if c.pointer else {}),
        "gate_scale":   replicated((1,), GATE_SCALE, 0.1),
    }
    # fmt: on
    for net, outputs in nets(c).items():
        lr = 0.25 if net.startswith("mudd") else 0.1
        # run_net() multiplies by the scale.
        starts = np.float32(np.concatenate(list(outputs.values()))) / np.float32(GATE_SCALE)
        table[f"{net}.w1"] = replicated((c.R, D), uniform(D**-0.5), lr, decay=1)
        table[f"{net}.w2"] = replicated((len(starts), c.R), 0.0, lr, decay=1)
        table[f"{net}.b2"] = replicated(starts.shape, starts, lr)
    return table


def pointer_params(c: Config) -> dict[str, Param]:
    """[pointer] Queries and keys are at first the same projection of x, so a token finds those
    whose continuations are alike: a neural cache (Grave et al. 2016, arXiv:1612.04426). The
    matrices are w_q, w_k and that of the token before. The first biases of sentinel and share
    were tuned on `tiny`."""

    def start(key, shape):
        rotation = jax.nn.initializers.orthogonal(0.5)(key, shape[1:])
        return jnp.stack((rotation, rotation, jnp.zeros_like(rotation)))

    return {
        "pointer_qk": replicated((3, c.pointer_D, c.D), start, 0.1),
        "pointer_gain": replicated((1,), 1.0, 1),
        "pointer_sentinel": replicated((c.pointer_D,), 0.0, 0.1),
        "pointer_sentinel_bias": replicated((1,), 4.0, 5),
        "pointer_share": replicated((c.pointer + 1,), [-2.0] + [0.0] * c.pointer, 5),
        "pointer_match": replicated((c.pointer,), 0.5, 5),
    }


ADAM_DECAY = 0.005  # upstream's adam_wd: a row's weight_decay is this * lr_mul * wd_mul


def padded_vocab(c: Config) -> int:
    """Rows of the embedding and the head, V. The softmax includes the padding, so it is trained,
    too. With [pointer], the softmax leaves the padding out, and the first row of it is the share
    row: its logit sets the share of the copies."""
    rows = c.vocab + 1 if c.pointer else c.vocab
    return -(-rows // 128) * 128


def lookup(rows: int, D: int, std: float, lr: float, decay: float, optimizer: Any) -> Param:
    """A table that tokens are looked up in, padded to a multiple of 128 rows; initialized from a
    normal distribution. lr and decay are upstream's lr_mul and wd_mul."""
    shape = (-(-rows // 128) * 128, D)
    init = jax.nn.initializers.normal(std)
    return Param(shape, init, lr, ADAM_DECAY * lr * decay, optimizer, LOOKUP, rows=rows)


def ngram_table(c: Config) -> Param:
    """[ngram-table] The table of n-grams, zeros at first. Row r is in eighth r % 8, which spreads
    n-grams of every length over all devices."""
    shape = (-(-c.ngram_buckets // 128) * (128 // GROUP), GROUP, c.D)
    lr = 75
    decay = ADAM_DECAY * lr * 5  # apply_update() multiplies it by lr once more, as upstream does
    zeros = jax.nn.initializers.zeros
    return Param(shape, zeros, lr, decay, adam(0.75, 0.95), EXCHANGED, rows=c.ngram_buckets)


def bank(rows: int, cols: int, layers: Iterable[int], matrices: list, optimizer: Any) -> Param:
    """A bank: matrices of one shape, one for each layer and each pair (bound, rate) in `matrices`,
    padded with zeros to groups of 8. Each of n devices owns 8 / n whole matrices of every group.
    The optimizer gets them as an array [G, 8 / n, rows, cols], and communicates nothing."""
    layer_of = tuple(layer for layer in layers for _ in matrices)
    padding = [(0, 0)] * (-len(layer_of) % GROUP)
    pairs = np.float32(matrices * (len(layer_of) // len(matrices)) + padding).reshape(-1, 2)
    bounds = pairs[:, 0].reshape(-1, GROUP, 1, 1)
    rates = pairs[:, 1].reshape(-1, GROUP, 1, 1)
    shape = (len(bounds), GROUP, rows, cols)
    return Param(
        shape, init=uniform(bounds), lr=rates, weight_decay=1.2, optimizer=optimizer,
        kind=BANK, every_step=True, base_lr="muon_lr", layers=layer_of,
    )  # fmt: skip


def replicated(shape: tuple, init: Any, lr: Any, decay: float = 0.0, b2: float = 0.99) -> Param:
    """A small parameter that every device has. init is an initializer or the values; lr and
    decay are upstream's lr_mul and wd_mul, b2 is Adam's."""
    init = init if callable(init) else jax.nn.initializers.constant(np.float32(init))
    weight_decay = ADAM_DECAY * decay * np.float32(lr)
    return Param(tuple(shape), init, np.float32(lr), weight_decay, adam(0.9, b2))


def uniform(bound: Any) -> Callable:
    """An initializer: uniform between -bound and bound."""
    return lambda key, shape: bound * jax.random.uniform(key, shape, minval=-1.0)


def start_keys_as_queries(qk: Array, c: Config) -> Array:
    """[key-start] In layers with key_start, key weights start as copies of query weights, so that
    a token first attends to tokens like itself and, with key_offset, to what followed them. Not in
    upstream."""
    matrices = qk.reshape(-1, *qk.shape[2:])
    for n, i in enumerate(c.attention_layers()):
        if c.layers[i].key_start:  # of a layer's H matrices, half are for q, and half for k
            first = n * c.H
            half = c.H // 2
            queries = matrices[first : first + half]
            matrices = matrices.at[first + half : first + c.H].set(queries)
    return matrices.reshape(qk.shape)


# ---- Sharding ------------------------------------------------------------------------------------
def make_mesh(devices: list[jax.Device]) -> Mesh:
    """Axis "fsdp", over which weights are sharded; with more than 8 devices also "nodes", each of
    which has all weights."""
    if len(devices) <= 8:
        return Mesh(np.array(devices), ("fsdp",), axis_types=(AxisType.Auto,))
    nodes = np.array(devices).reshape(-1, 8)
    return Mesh(nodes, ("nodes", "fsdp"), axis_types=(AxisType.Auto, AxisType.Auto))


def mesh_axes() -> tuple[str, ...]:
    """("fsdp",) or ("nodes", "fsdp"), inside a program; tokens are spread over all of them."""
    return jax.sharding.get_abstract_mesh().axis_names


def node_axes() -> tuple[str, ...]:
    """() or ("nodes",): the axes over which whole weights are repeated."""
    return mesh_axes()[:-1]


def varying(x: Array, axes: tuple[str, ...]) -> Array:
    """Marks x, which is replicated, as varying over axes: its vjp sums the gradient over them."""
    return lax.pcast(x, axes, to="varying")


def all_gather(x: Array, c: Config) -> Array:
    """Gathers the first axis over "fsdp", sent in c.compute; the gradient is reduce-scattered. The
    result is float32, so that gradients of microbatches add up in float32; XLA fuses the casts."""
    x = varying(x.astype(c.compute), node_axes())
    return lax.all_gather(x, "fsdp", tiled=True).astype(jnp.float32)


def reduce_scatter(grad_VD, c: Config) -> Array:
    """The rows that this device owns, summed over all devices and sent in c.compute."""
    grad = lax.psum_scatter(grad_VD.astype(c.compute), "fsdp", tiled=True)
    return lax.psum(grad, node_axes()).astype(jnp.float32)


def whole_weights(owned: dict[str, Array], c: Config) -> dict[str, Any]:
    """[fsdp] All-gathers whole weights from the parts that devices own; a bank becomes {layer: its
    matrices}. jax.vjp of this function sends every gradient to its owner. ZeRO-2,
    arXiv:1910.02054."""
    table = param_table(c)
    weights = {}
    for name, x in owned.items():
        if table[name].kind == BANK:
            matrices = [matrix for group in x for matrix in all_gather(group, c)]
            weights[name] = {layer: [] for layer in table[name].layers}
            for layer, matrix in zip(table[name].layers, matrices, strict=False):  # drops padding
                weights[name][layer].append(matrix)
        elif table[name].kind == LOOKUP:
            weights[name] = all_gather(x, c)
        else:
            weights[name] = varying(x, mesh_axes())
    return weights


# ---- Optimizer -----------------------------------------------------------------------------------
POLAR_EXPRESS = (  # coefficients of five quintics, each optimal for what the one before leaves
    (8.156554524902461, -22.48329292557795, 15.878769915207462),
    (4.042929935166739, -2.808917465908714, 0.5000178451051316),
    (3.8916678022926607, -2.772484153217685, 0.5060648178503393),
    (3.285753657755655, -2.3681294933425376, 0.46449024233003106),
    (2.3465413258596377, -1.7097828382687081, 0.42323551169305323),
)


def orthogonalize(update: Array, dtype: str) -> Array:
    """[muon] Pushes all singular values of matrices [.., rows, cols] to about 1. Jordan et al.
    2024, kellerjordan.github.io/posts/muon. [polar-express] By the quintics of Amsel et al. 2025,
    arXiv:2505.16932, record 38."""
    tall = update.shape[-2] > update.shape[-1]
    X = update.mT if tall else update
    X = (X / (1.02 * frobenius_norm(X) + 1e-6)).astype(dtype)
    for c1, c3, c5 in POLAR_EXPRESS:
        A = X @ X.mT
        X = c1 * X + (c3 * A + c5 * A @ A) @ X
    X = X.mT if tall else X
    return X.astype(jnp.float32)


def normuon(c: Config) -> optax.GradientTransformationExtraArgs:
    """NorMuon, for matrices [.., rows, cols]: Nesterov momentum, orthogonalization, then updates of
    equal size for all rows."""

    def init(params):
        return jnp.zeros_like(params), mean_square(jnp.zeros_like(params))

    def update(grad, state, params=None, *, momentum, layers, **_):
        buffer, squares = state
        buffer = buffer + (1 - momentum) * (grad - buffer)
        nesterov = grad + momentum * (buffer - grad)
        stack = nesterov.reshape(-1, *grad.shape[-2:])
        # The device that owns the whole bank leaves out its padding. Each of several devices owns
        # fewer matrices than there are layers, so this keeps all of them.
        X = orthogonalize(stack[: len(layers)], c.compute)
        X = jnp.pad(X, ((0, len(stack) - len(X)), (0, 0), (0, 0))).reshape(grad.shape)
        Y, squares = equalize(X, squares)
        return Y, (buffer, squares)

    return optax.GradientTransformationExtraArgs(init, update)


def equalize(X: Array, squares: Array) -> tuple[Array, Array]:
    """[normuon] Scales each row of updates [.., rows, cols] by 1 / rms of its recent ones, so that
    updates of all rows have equal rms (of wide matrices, columns). Returns them and the new running
    average of squares. Li et al. 2025, arXiv:2510.05491; record 41."""
    squares = squares + (1 - 0.9) * (mean_square(X) - squares)
    Y = X * lax.rsqrt(jnp.maximum(squares, 1e-10))
    Y = Y * (frobenius_norm(X) / jnp.maximum(frobenius_norm(Y), 1e-10))  # padding stays 0
    return Y, squares


def mean_square(X: Array) -> Array:
    """The mean square of every row of matrices [.., rows, cols] or, if they are wide, of every
    column; the other axis becomes 1."""
    axis = -1 if X.shape[-2] >= X.shape[-1] else -2
    return jnp.square(X).mean(axis=axis, keepdims=True)


def frobenius_norm(x: Array) -> Array:
    """The norm of matrices [.., rows, cols]; both axes become 1."""
    return jnp.linalg.norm(x, axis=(-2, -1), keepdims=True)


def adam(b1: float, b2: float) -> optax.GradientTransformation:
    """Adam without a rate. optax adds epsilon after the bias correction, upstream before it."""
    return optax.scale_by_adam(b1, b2, eps=1e-10)


def apply_update(p: Array, update: Array, rate: Array, lr: Any, weight_decay: float) -> Array:
    """One step of a parameter. [cautious-decay] A weight decays only where the update also shrinks
    it. As upstream, the decay is proportional to rate**2. arXiv:2510.12402, record 43."""
    decay = rate * weight_decay * jnp.where(update * p > 0, p, 0)
    return p - rate * lr * (update + decay)


# ---- Step and its programs -----------------------------------------------------------------------
class State(NamedTuple):
    """Everything that a step changes."""

    params: dict[str, Array]  # master copies
    opt_state: dict[str, Any]  # of each parameter's optimizer
    waiting_grads: dict[str, Array]  # of parameters whose update comes only in the next step
    lookups: dict[str, Array]  # whole LOOKUPs in c.compute, from the last all-gather
    lost_ngrams: Array  # n-grams that were read as zeros so far, because there was no slot


def initial_state(seed: Array, c: Config) -> State:
    """The state before the first step. Random keys are made from the parameters' names, so that a
    new row of param_table() does not change the initial values of the others."""
    table = param_table(c)
    params = {}
    for name, param in table.items():
        key = jax.random.fold_in(jax.random.key(seed), crc32(name.encode()))
        params[name] = param.init(key, param.shape)
    params["embed"] = params["head"]  # [tie] They are one table at first. Records 51 and 53.
    params["qk"] = start_keys_as_queries(params["qk"], c)
    opt_state = {name: table[name].optimizer.init(p) for name, p in params.items()}
    waiting = {}
    if c.adam_every > 1:
        rare = [name for name in params if not table[name].every_step]
        waiting = {name: jnp.zeros_like(params[name]) for name in rare}
    tables = {name: p for name, p in params.items() if table[name].kind == LOOKUP}
    lookups = {name: jnp.array(p, c.compute) for name, p in tables.items()}
    return State(params, opt_state, waiting, lookups, jnp.zeros((), jnp.int32))


def state_shapes(c: Config, mesh: Mesh) -> State:
    """Shape and sharding of every array. Gradients and optimizer states are sharded like their
    parameters; scalars and whole lookups are replicated."""
    table = param_table(c)
    state = jax.eval_shape(lambda: initial_state(np.uint32(0), c))

    def sharded(arrays):
        return {name: shapes_on(mesh, table[name].sharding, x) for name, x in arrays.items()}

    return State(
        params=sharded(state.params),
        opt_state=sharded(state.opt_state),
        waiting_grads=sharded(state.waiting_grads),
        lookups=shapes_on(mesh, P(), state.lookups),
        lost_ngrams=shapes_on(mesh, P(), state.lost_ngrams),
    )


def make_state(c: Config, mesh: Mesh, old: State | None = None) -> State:
    """The state at the start of a run; the same numbers on any number of devices. A seed of -1,
    which every run has replaced, counts as 0. The memory of an old state is used again, because a
    program's first call with new addresses is slow, and would be on the clock."""
    shardings = jax.tree.map(lambda x: x.sharding, state_shapes(c, mesh))
    options = {"donate_argnums": 0, "keep_unused": True, "out_shardings": shardings}
    program = jax.jit(lambda old, seed: initial_state(seed, c), **options)
    return program(old, np.uint32(max(0, c.seed)))


def train_step(state: State, tokens_MBS, row, c: Config, stage: int, adam_step: bool):
    """Takes one step from this device's M microbatches, inside shard_map; `row` is the step's
    ScheduleRow. Returns the new state and the loss per token, summed over targets. Unless it is an
    Adam step, only the matrices are updated, and the other gradients wait for the next step.

    collective       what                             axis   dtype     when
    all-gather       banks                            fsdp   compute   every step
    reduce-scatter   gradients of banks, lookups      fsdp   compute   every step
    all-reduce       the same, beyond 8 devices       nodes  compute   every step
    all-to-all       which rows of ngram are read     fsdp   int32     every step
    all-to-all       these rows, and their gradients  fsdp   compute   every step
    all-gather       gradients of rows, beyond 8      nodes  compute   every step
    all-reduce       gradients of replicated; loss    all    float32   every step
    all-gather       lookups                          fsdp   compute   Adam steps
    """
    table = param_table(c)
    # All-gather the weights; the gather's vjp will reduce-scatter their gradients. Lookups were
    # gathered when they were updated. varying() is not differentiated here, so it sums nothing:
    # reduce_scatter() below sums their gradients.
    owned = {name: p for name, p in state.params.items() if table[name].kind in (BANK, REPLICATED)}
    weights, send_to_owners = jax.vjp(functools.partial(whole_weights, c=c), owned)
    lookups = {name: varying(x, mesh_axes()) for name, x in state.lookups.items()}
    weights |= {name: x.astype(jnp.float32) for name, x in lookups.items()}

    # Gradients, added up over microbatches. The loss is a mean over the batch's sequences and a sum
    # over their positions: Muon and Adam do not see a factor. It is divided by T for the log.
    numbers = sorted(target_weights(c.stages[stage]))
    loss_weights = {k: row.loss_weights[j] / c.batch for j, k in enumerate(numbers)}

    def microbatch(total, tokens_BS):
        request = request_rows(tokens_BS[:, :-1], state.params["ngram"], c)
        w = weights | {"ngram_rows": pull_rows(state.params["ngram"], request, c)}
        loss, grads = jax.value_and_grad(loss_fn)(w, tokens_BS, loss_weights, c, stage)
        row_grads = push_gradients(grads.pop("ngram_rows"), request, c)
        total = jax.tree.map(jnp.add, total, (loss, grads))
        return total, (row_grads, lost_ngrams(request))

    zero = varying(jnp.zeros(()), mesh_axes()), jax.tree.map(jnp.zeros_like, weights)
    total, (row_grads, lost) = lax.scan(microbatch, zero, tokens_MBS)
    loss, grads = total

    # Every owner gets its gradients, summed over all devices.
    lookup_grads = {name: reduce_scatter(grads.pop(name), c) for name in lookups}
    (grads,) = send_to_owners(grads)
    grads |= lookup_grads
    row_grads = RowGradients(*(join_sequences(x) for x in row_grads))
    grads["ngram"] = table_gradient(row_grads, state.params["ngram"])
    state = state._replace(lost_ngrams=state.lost_ngrams + lax.psum(lost.sum(), mesh_axes()))
    state = update_parameters(state, grads, row, c, adam_step)
    return state, lax.psum(loss, mesh_axes()) / c.sequence_length(stage)


def update_parameters(state: State, grads: dict, row, c: Config, adam_step: bool) -> State:
    """Returns the state after an update of this device's parts of the parameters: of all in an Adam
    step, otherwise of the matrices. grads has the gradient of every parameter, by name and shaped
    like the part, summed over all devices."""
    table = param_table(c)
    waiting = state.waiting_grads
    if adam_step:
        # [adam-every] The waiting gradients of the step before are added. They need not be cleared:
        # the next step is not an Adam step, and overwrites them.
        grads = grads | {name: waiting[name] + grads[name] for name in waiting}
        # [tie] With one gradient, embedding and head stay one table.
        both = grads["embed"] + grads["head"]
        grads |= {name: jnp.where(row.tied, both, grads[name]) for name in ("embed", "head")}
    else:
        waiting = {name: grads[name] for name in waiting}

    params, opt_state = dict(state.params), dict(state.opt_state)
    for name, param in table.items():
        if not (adam_step or param.every_step):
            continue
        optimizer = optax.with_extra_args_support(param.optimizer)
        update, opt_state[name] = optimizer.update(
            grads[name], opt_state[name], params[name], momentum=row.momentum, layers=param.layers
        )
        lr = param.lr
        if param.kind == BANK:  # of each group, the matrices that this device owns
            n = update.shape[1]
            lr = lax.dynamic_slice_in_dim(lr, lax.axis_index("fsdp") * n, n, axis=1)
        rate = getattr(row, param.base_lr)
        params[name] = apply_update(params[name], update, rate, lr, param.weight_decay)

    lookups = dict(state.lookups)
    if adam_step:
        # A copy, because XLA may round the two updates differently.
        params["embed"] = jnp.where(row.tied, params["head"], params["embed"])
        for name in lookups:  # gathered here and not in the next step, to overlap with Muon
            x = params[name].astype(c.compute)
            lookups[name] = lax.all_gather(x, "fsdp", tiled=True, to="invarying")
    return state._replace(
        params=params, opt_state=opt_state, waiting_grads=waiting, lookups=lookups
    )


def val_step(params: dict[str, Array], tokens_MBS, last, c: Config, stage: int) -> tuple:
    """Mean next-token loss of a validation batch, and how many n-grams were read as zeros; under
    shard_map. `last` is 1 in the last validation; c is from for_validation(). All-gathers banks and
    lookups, exchanges the rows of n-grams, all-reduces the results."""
    params = dict(params)
    ngram = params.pop("ngram")
    weights = whole_weights(params, c)

    def microbatch(tokens_BS):
        request = request_rows(tokens_BS[:, :-1], ngram, c)
        w = weights | {"ngram_rows": pull_rows(ngram, request, c)}
        return loss_fn(w, tokens_BS, {1: 1.0}, c, stage, last), lost_ngrams(request)

    loss, lost = jax.tree.map(jnp.sum, lax.map(microbatch, tokens_MBS))
    nodes = lax.psum(1, node_axes())  # all validate the same sequences
    loss = lax.psum(loss, mesh_axes()) / (nodes * VAL_SEQUENCES * c.val_T)
    return loss, lax.psum(lost, "fsdp")


OPTIONS = {  # of the compiler, by platform; they override XLA_FLAGS
    "gpu": {
        "xla_gpu_enable_triton_gemm": False,  # cuBLAS accumulates into an array in the same kernel
        "xla_gpu_enable_dynamic_slice_fusion": False,  # matmuls in such fusions are not autotuned
        "xla_gpu_reduce_scatter_combine_threshold_bytes": 0,  # gradients are sent at once
        "xla_allow_excess_precision": False,  # or the residual stream would stay in float32
        "xla_gpu_enable_latency_hiding_scheduler": True,  # XLA's default on Hopper alone
        "xla_gpu_executable_terminate_timeout_seconds": 600,  # the first call may load for long
    },
    # In jax 0.10, YNNPACK's kernels are slower than others, and some are wrong: jax issue 39103.
    "cpu": {"xla_cpu_experimental_ynn_fusion_type": ""} if jax.__version_info__ < (0, 11) else {},
}


def compile_train_step(stage: int, adam_step: bool, c: Config, mesh: Mesh) -> jax.stages.Compiled:
    """The program (state, tokens, schedule row) -> (state, loss), compiled from shapes."""
    T = c.sequence_length(stage)
    at_once = math.gcd(c.microbatch, c.batch // mesh.size)  # divides the device's sequences

    def step(state, tokens, row):
        return train_step(state, tokens.reshape(-1, at_once, T + 1), row, c, stage, adam_step)

    weights = np.zeros(len(target_weights(c.stages[stage])), np.float32)
    row = shapes_on(mesh, P(), schedule(c)[0]._replace(loss_weights=weights))
    tokens = shapes_on(mesh, P(mesh.axis_names), np.zeros((c.batch, T + 1), np.int32))
    return compile_program(step, mesh, (state_shapes(c, mesh), tokens, row), c, trains=True)


def compile_val_step(stage: int, c: Config, mesh: Mesh) -> jax.stages.Compiled:
    """The program (params, tokens, whether it is the last validation) -> (loss, lost n-grams),
    with the windows of a stage, compiled from shapes."""
    params = state_shapes(c, mesh).params
    c = c.for_validation()

    def step(params, tokens, last):
        return val_step(params, tokens.reshape(-1, c.microbatch, c.val_T + 1), last, c, stage)

    tokens = shapes_on(mesh, P("fsdp"), np.zeros((VAL_SEQUENCES, c.val_T + 1), np.int32))
    last = shapes_on(mesh, P(), np.int32(0))
    return compile_program(step, mesh, (params, tokens, last), c, trains=False)


def shapes_on(mesh: Mesh, spec: P, arrays: Any) -> Any:
    """Shapes of arrays that are sharded by spec; scalars are replicated."""

    def shape_of(x):
        sharding = NamedSharding(mesh, spec if x.ndim > 0 else P())
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)

    return jax.tree.map(shape_of, arrays)


def compile_program(step: Callable, mesh: Mesh, arguments: tuple, c: Config, trains: bool) -> Any:
    """Compiles a step from the shapes of its arguments. A training step gives the memory of the
    state, its first argument, to the new state."""
    specs = jax.tree.map(lambda x: x.sharding.spec, arguments)
    out_specs = (specs[0], P()) if trains else (P(), P())
    program = jax.shard_map(step, mesh=mesh, in_specs=specs, out_specs=out_specs)
    # keep_unused: warm_up() expects the shapes of all arguments.
    program = jax.jit(program, donate_argnums=0 if trains else (), keep_unused=True)
    precision = jax.config.jax_default_matmul_precision
    if c.compute == "float32":  # else GPUs would multiply in TF32, and TPUs in bfloat16
        precision = "highest"
    with jax.default_matmul_precision(precision):
        return program.lower(*arguments).compile(OPTIONS.get(mesh.devices.flat[0].platform))


def compile_all(c: Config, mesh: Mesh, log: "Log") -> dict[tuple, Callable]:
    """Compiles every program of the run, by (stage, kind). kind is "val" for validation, else
    whether it is an Adam step. On CPUs, validate() compiles its own, for an earlier first loss."""
    start = time.perf_counter()
    keys = [(c.stage_at(step), c.is_adam_step(step)) for step in range(c.total_steps)]
    if mesh.devices.flat[0].platform != "cpu":
        keys += [(c.val_stage(i), "val") for i in range(c.total_steps + 1) if c.validates_before(i)]
    keys = list(dict.fromkeys(keys))  # without repetitions: for training, then for validation
    print(f"compiling programs: {len(keys)} ...", flush=True)

    def compile_one(key):
        stage, kind = key
        if kind == "val":
            return compile_val_step(stage, c, mesh)
        return compile_train_step(stage, kind, c, mesh)

    # Two at once: on a GPU, each one measures kernels in memory of its own.
    with ThreadPoolExecutor(2) as pool:
        programs = dict(zip(keys, pool.map(compile_one, keys), strict=True))
    log.facts({"compile": {"seconds": time.perf_counter() - start}})
    return programs


def warm_up(programs: dict, c: Config, mesh: Mesh) -> State:
    """Runs every program once, on zeros, because the first call loads it and sets up the
    communication between devices. Returns a state of which only the memory is used again."""
    shapes = state_shapes(c, mesh)
    shardings = jax.tree.map(lambda x: x.sharding, shapes)
    state = jax.jit(lambda: jax.tree.map(jnp.zeros_like, shapes), out_shardings=shardings)()
    for (_, kind), program in programs.items():
        # Zeros for all arguments but the first, the state or its parameters.
        shapes, shardings = program.args_info[0][1:], program.input_shardings[0][1:]
        zeros = jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), shapes)
        zeros = jax.device_put(zeros, shardings)
        if kind == "val":
            jax.block_until_ready(program(state.params, *zeros))
        else:
            state, _ = jax.block_until_ready(program(state, *zeros))
    return state


# ---- Schedule and data ---------------------------------------------------------------------------
class ScheduleRow(NamedTuple):
    """The numbers that change from step to step. They are arguments of a step's program, so it is
    the same program with other rates or another number of steps."""

    adam_lr: Any  # base rate of parameters with base_lr="adam_lr"
    muon_lr: Any  # base rate of parameters with base_lr="muon_lr"
    momentum: Any  # Muon's
    tied: Any  # whether embedding and head are one table
    loss_weights: Any  # (J,): of the targets, in the order of their numbers


def schedule(c: Config) -> list[ScheduleRow]:
    """A row for each step of the run."""
    steps = np.arange(c.total_steps)
    lengths = np.array([stage.steps for stage in c.stages])
    starts = np.cumsum(lengths) - lengths
    stage_of = np.array([c.stage_at(step) for step in steps])
    # planned_step[i]: where step i would be in a run with all steps of the stages (--steps 0).
    planned_step = np.interp(steps, [0, *c.stage_ends], [*starts, sum(lengths)])
    stage_progress = (planned_step - starts[stage_of]) / lengths[stage_of]  # 0 to 1
    progress = planned_step / sum(lengths)  # of the run, 0 to 1

    cooldown = np.clip((progress - c.cooldown_start) / (c.cooldown_end - c.cooldown_start), 0, 1)
    stage_lr = np.array([stage.lr for stage in c.stages])
    lr = stage_lr[stage_of] * (1 - cooldown) + c.lr_floor * cooldown
    rise = np.clip(progress / max(c.momentum_warmup, 1e-9), 0, 1)
    fall = np.clip((progress - 1) / max(c.momentum_cooldown, 1e-9) + 1, 0, 1)
    momentum = c.momentum_low + (c.momentum_high - c.momentum_low) * (rise - fall)
    rows = []
    for step in steps:
        stage = c.stages[stage_of[step]]
        ramps = target_weights(stage)
        weights = [a + (b - a) * stage_progress[step] for _, (a, b) in sorted(ramps.items())]
        row = ScheduleRow(
            adam_lr=np.float32(c.adam_lr * lr[step]),
            muon_lr=np.float32(c.muon_lr * lr[step]),
            momentum=np.float32(momentum[step]),
            tied=np.bool_(progress[step] <= c.untie),
            loss_weights=np.float32(weights),
        )
        rows.append(row)
    return rows


def train_batches(c: Config, mesh: Mesh, shards: dict, start: int) -> Iterator[tuple]:
    """(tokens, schedule row) of every step from `start` on; a process reads its own sequences."""
    shapes = batch_shapes("train", c)
    part, parts = jax.process_index(), jax.process_count()
    batches = read_batches(shards["train"], shapes, c, part, parts, start)
    rows = schedule(c)
    everywhere = NamedSharding(mesh, P())
    shardings = NamedSharding(mesh, P(mesh.axis_names)), jax.tree.map(lambda _: everywhere, rows[0])
    return prefetch(zip(batches, rows[start:], strict=True), shardings)


def prefetch(batches: Iterable[Any], shardings: Any, ahead: int = 2) -> Iterator[Any]:
    """Copies arrays to the devices some steps early; each process passes its sequences. The
    transfer is asynchronous, so it overlaps with a step."""
    queue = collections.deque()
    for batch in batches:
        queue.append(jax.tree.map(jax.make_array_from_process_local_data, shardings, batch))
        if len(queue) > ahead:
            yield queue.popleft()
    yield from queue


def read_batches(
    shards: list, shapes: list, c: Config, part: int = 0, parts: int = 1, start: int = 0
) -> Iterator[np.ndarray]:
    """Yields the batches of the shards, in order, from number `start` on, (B, T + 1) int32. With
    several parts, only the sequences of this part (from 0) of every batch."""
    done = 0
    for shard in shards:
        for batch in pack_documents(shard, shapes[done:], c):
            done += 1
            if done <= start:
                continue
            mine = batch[len(batch) * part // parts : len(batch) * (part + 1) // parts]
            sequences = [np.concatenate([shard[a:b] for a, b in pieces]) for pieces in mine]
            yield np.stack(sequences).astype(np.int32)


def batch_shapes(split: str, c: Config) -> list[tuple[int, int, int]]:
    """(sequences, T, max_doc) of every batch of the run, "train", or of a validation, "val"."""
    if split == "val":
        return [(VAL_SEQUENCES, c.val_T, 0)] * (c.val_tokens // (VAL_SEQUENCES * c.val_T))
    stages = [c.stage_at(step) for step in range(c.total_steps)]
    return [(c.batch, c.sequence_length(i), c.stages[i].max_doc) for i in stages]


def pack_documents(shard: np.ndarray, shapes: list[tuple], c: Config) -> Iterator[list[list]]:
    """[packing] The batches that a shard holds; of each sequence, (start, end) of its pieces, T + 1
    tokens in all. Records 26 and 29.

    Documents are taken in order, each cut to max_doc tokens, and the last one to what is missing.
    What is cut off is dropped. For T + 1 = 6, max_doc = 4 and documents of 3, 9 and 5 tokens, the
    sequences are [(0, 3), (3, 6)], [(12, 16), ...]. With max_doc 0, a sequence is one piece, which
    begins with the last target of the one before. What is left of a shard at its end is dropped.
    """
    documents = find_documents(shard, c)
    start, end = -1, 0  # of the document that comes next
    cursor = 0  # all tokens before this one are taken or dropped
    for sequences, T, max_doc in shapes:
        batch = []
        for _ in range(sequences):
            pieces = []
            room = T + 1  # tokens that the sequence still needs
            if max_doc == 0:
                pieces.append((cursor, cursor + T + 1))
                cursor += T  # the last token is only a target here: the next sequence reads it
                room = 0
            while room:
                while start < cursor:
                    start, end = next(documents, (len(shard), len(shard)))
                if start == len(shard):
                    return
                size = min(room, max_doc, end - start)
                pieces.append((start, start + size))
                cursor = end
                room -= size
            batch.append(pieces)
        if batch[-1][-1][1] > len(shard):
            return
        yield batch


def find_documents(shard: np.ndarray, c: Config) -> Iterator[tuple[int, int]]:
    """(start, end) of every document of a shard. It reads a million tokens at a time, because the
    first batch is found on the clock."""

    def starts_and_end():
        for first in range(0, len(shard), 1_000_000):
            offsets = np.flatnonzero(shard[first : first + 1_000_000] == c.eot)
            yield from (first + offsets).tolist()
        yield len(shard)

    return itertools.pairwise(starts_and_end())


def find_data(c: Config) -> dict[str, list[np.memmap]]:
    """The shards that the run reads, by split; exits with status 2 if they hold too little."""
    needs_prefixes = any(PREFIX in target_weights(stage) for stage in c.stages)
    if needs_prefixes and (not Path(c.prefixes).is_file() or len(prefix_table(c)) != c.vocab):
        refuse(f"{c.prefixes} does not hold {c.vocab} prefixes: see data/README.md")
    folder = Path(c.data).absolute()
    shards = {"train": [], "val": []}
    for split, flag in ("train", "--steps"), ("val", "--val_tokens"):
        shapes = batch_shapes(split, c)
        found = 0
        paths = sorted(folder.glob(f"[!.]*_{split}_*.bin"))
        if split == "val":
            paths = paths[:1]  # the rules allow one
        for path in paths:
            if found < len(shapes):
                shards[split].append(open_shard(path))
                found += sum(1 for _ in pack_documents(shards[split][-1], shapes[found:], c))
        if found < len(shapes):
            held = f"the {split} shards hold {found} of {len(shapes)} batches"
            refuse(f"{folder}: {held}; get more (data/README.md), or run with fewer {flag}")
    return shards


def open_shard(path: Path) -> np.memmap:
    """The tokens of a file in llm.c's format: 256 int32 (magic, version, count), then uint16."""
    header = np.fromfile(path, "<i4", 3).tolist()
    count = header[2] if header[:2] == [20240520, 1] and len(header) == 3 else 0
    if count < 1 or path.stat().st_size != 1024 + 2 * count:
        refuse(f"{path} is not a complete shard: see data/README.md, and get it again")
    return np.memmap(path, "<u2", "r", offset=1024, shape=(count,))


def refuse(message: str) -> None:
    """Ends a run before it begins, with one line and exit status 2."""
    print(f"{Path(__file__).name}: {message}", file=sys.stderr)
    sys.exit(2)


def data_facts(shards: dict[str, list], c: Config) -> list[dict[str, Any]]:
    """The facts of all shards; reads all of each."""
    with ThreadPoolExecutor(8) as pool:
        return list(pool.map(lambda shard: shard_facts(shard, c), sum(shards.values(), [])))


def shard_facts(shard: np.memmap, c: Config) -> dict[str, Any]:
    """A shard's facts for the log; exits with status 2 if its tokens do not fit the run."""
    path = Path(shard.filename)
    largest = int(shard.max())
    starts = int(np.count_nonzero(shard == c.eot))
    if largest >= c.vocab or starts == 0:
        refuse(f"{path}: largest token is {largest} (--vocab {c.vocab}), {starts} are --eot")
    with path.open("rb") as file:
        sha256 = hashlib.file_digest(file, "sha256").hexdigest()
    counts = {"tokens": len(shard), "documents": starts, "largest_token": largest}
    return {"file": path.name, "bytes": path.stat().st_size, "sha256": sha256, **counts}


# ---- Command line --------------------------------------------------------------------------------
def parse_config(argv: list[str]) -> tuple[str, Config]:
    """train_gpt.py [PRESET] [--field value ...]: numbers and strings are flags."""
    parser = argparse.ArgumentParser(argument_default=argparse.SUPPRESS, allow_abbrev=False)
    parser.error = refuse
    parser.add_argument("preset", nargs="?", choices=PRESETS, default="record")
    for field in dataclasses.fields(Config):
        if field.type in (int, float, str):
            parser.add_argument(f"--{field.name}", type=field.type)
    flags = vars(parser.parse_args(argv))
    preset = flags.pop("preset")
    try:
        return preset, dataclasses.replace(PRESETS[preset], **flags)
    except ValueError as error:
        refuse(str(error))


def fit_devices(c: Config) -> tuple[list[jax.Device], Config]:
    """The devices of all hosts, and the configuration with the kernels that they support."""
    devices = sorted(jax.devices(), key=lambda device: (device.process_index, device.id))
    if jax.process_count() == 1:  # devices beyond one for each sequence are left alone
        devices = devices[: c.batch]
    n = len(devices)
    if (n not in (1, 2, 4) and n % 8) or c.batch % n:
        why = f"{n} devices do not divide --batch {c.batch} or 8 matrices"
        refuse(f"{why}: use 1, 2, 4 or 8; for more, run/hosts.md says which flags to choose")
    return devices, fit_kernels(devices[0], c)


def fit_kernels(device: jax.Device, c: Config) -> Config:
    """Returns the configuration with the attention kernel that a device has, and without FP8 on
    NVIDIA GPUs and TPUs that refuse or emulate it."""
    # Only NVIDIA's compute capabilities are numbers: AMD's are like gfx942, others have none.
    capability = getattr(device, "compute_capability", "")
    capability = float(capability) if re.fullmatch(r"\d+\.\d+", capability) else 0.0
    if capability < 8.0 or c.compute != "bfloat16":
        c = dataclasses.replace(c, attention="band")
    generation = re.search(r"\d+", device.device_kind) if device.platform == "tpu" else None
    if 0 < capability < 8.9 or (generation and int(generation[0]) < 7):
        c = c.without_fp8()
    return c


# ---- Log -----------------------------------------------------------------------------------------
class Log:
    """logs/<run>.txt: the source, a line of 100 =, facts as `name json`, losses in the format
    of modded-nanogpt, RESULT json. A resumed run appends to its log. Only process 0 writes."""

    def __init__(self, path: str = ""):
        # All processes take the name that process 0 makes.
        seconds, number = broadcast_one_to_all(np.uint32([time.time(), secrets.randbits(32)]))
        name = time.strftime("%Y-%m-%dT%H-%M-%S", time.gmtime(int(seconds)))
        self.path = Path(path or f"logs/{name}_{number:08x}.txt")
        self.weights = self.path.with_suffix(".npz")
        self.path.parent.mkdir(exist_ok=True)
        writes = jax.process_index() == 0
        self.file = open(self.path if writes else os.devnull, "a", encoding="utf-8")
        self.line("" if self.file.tell() else SOURCE + "=" * 100, show=False)

    def line(self, text: str, show: bool = True) -> None:
        """Writes and shows a line."""
        for file in [self.file, sys.stdout] if show else [self.file]:
            print(text, file=file, flush=True)

    def facts(self, facts: dict[str, Any]) -> None:
        """Writes a line for each fact."""
        for name, value in facts.items():
            self.line(f"{name} {json.dumps(value)}", show=False)


def run_facts(preset: str, c: Config, devices: list[jax.Device], argv: list[str]) -> dict[str, Any]:
    """Returns what it takes to run this again. ./run.sh adds what the machine is: run/launch.py."""
    versions = {module.__name__: module.__version__ for module in (jax, np, optax)}
    versions |= {"python": sys.version, "backend": devices[0].client.platform_version}
    return {
        "hosts": jax.process_count(),
        "versions": versions,
        "devices": [device.device_kind for device in devices],
        "argv": argv,
        "seed": c.seed,
        "config": {"preset": preset, **dataclasses.asdict(c)},
        "prefixes": crc32(prefix_table(c).tobytes()) if c.prefixes else 0,
        "parameters": {n: math.prod(param.model_shape) for n, param in param_table(c).items()},
    }


# ---- Run -----------------------------------------------------------------------------------------
def main(argv: list[str]) -> Path | None:
    """Trains in one process without a guard. Returns the path of the weights, if they are saved."""
    if os.environ.get("WORLD_SIZE", "1") != "1":  # each process would train alone
        refuse("WORLD_SIZE is set, as by torchrun: start ./run.sh instead, or unset it")
    preset, c = parse_config(argv)
    devices, c = fit_devices(c)
    shards = find_data(c)
    if c.seed < 0:
        c = dataclasses.replace(c, seed=secrets.randbits(31))
    return run(preset, c, devices, shards, data_facts(shards, c), argv)


def run(
    preset: str, c: Config, devices: list, shards: dict, data: list, argv: list, guard: Any = None
) -> Path | None:
    """Trains on these devices and shards, whose facts are for the log. Returns the path of the
    weights, if they are saved. ./run.sh passes a guard, which saves checkpoints and resumes them:
    run/guard.py."""
    mesh = make_mesh(devices)
    log = Log(guard.log_path if guard else "")
    log.facts((guard.facts if guard else {}) | {"data": data} | run_facts(preset, c, devices, argv))
    hardware = f"{len(devices)} x {devices[0].device_kind}"
    print(f"{preset} on {hardware}, head in {c.head_forward}, log in {log.path}")
    programs = compile_all(c, mesh, log)
    state = make_state(c, mesh, warm_up(programs, c, mesh))
    if guard:
        state = guard.begin(state, c, mesh, log)  # that of a checkpoint, if the run is resumed
    weights, result = train(state, c, mesh, programs, shards, log, guard)
    log.line(f"RESULT {json.dumps(result)}")
    return save_weights(log.weights, unpad(weights, c), c, result) if c.save else None


STEPS_AHEAD = 4  # steps queued on the devices: enough to keep them busy; Ctrl-C waits for them
NON_FINITE = 3  # exit status of a run whose loss is NaN or inf


def train(state: State, c: Config, mesh: Mesh, programs: dict, shards: dict, log: Log, guard: Any):
    """Trains from a state. Returns the trained weights and the RESULT. A guard has the step to
    begin with, and may save the state between two steps: run/guard.py."""
    start = guard.start if guard else 0
    batches = train_batches(c, mesh, shards, start)
    pending = collections.deque()  # (step, loss) of steps that the devices may still be running
    jax.block_until_ready(state)
    started = time.perf_counter() - (guard.seconds if guard else 0.0)

    def show_losses(wait=False):
        """Logs every tenth loss, as soon as the devices have computed it."""
        while pending and (wait or pending[0][1].is_ready()):
            done, loss = pending.popleft()
            if guard:
                guard.step_ended(loss)
            if done % 10 == 0:
                loss = float(loss)
                ms = 1e3 * (time.perf_counter() - started)
                log.line(f"step:{done}/{c.total_steps} train_loss:{loss:.4f} train_time:{ms:.0f}ms")
                if jax.process_count() == 1:  # or the guard ends all processes at the same step
                    end_if_not_finite(loss, done, log)

    for step in range(start, c.total_steps + 1):
        saves = bool(guard and guard.wants(step))
        if c.validates_before(step) or saves:
            show_losses(wait=True)
            jax.block_until_ready(state)
            seconds = time.perf_counter() - started  # of training, so far
            ms = 1e3 * seconds
            if saves:
                guard.save(state, step, seconds)  # or ends the run, after a signal
            if step == c.total_steps and c.save:  # the last validation cannot cost the weights
                save_weights(log.weights, unpad(state.params, c), c, {"steps": step})
            if c.validates_before(step):
                val_loss, lost = validate(state.params, step, c, mesh, programs, shards)
                lost += int(state.lost_ngrams)
                if lost:
                    log.line(f"warning: {lost} n-grams were read as zeros: raise --ngram_capacity")
                log.line(
                    f"step:{step}/{c.total_steps} val_loss:{val_loss:.4f} "
                    f"train_time:{ms:.0f}ms step_avg:{ms / max(step, 1):.2f}ms"
                )
                end_if_not_finite(val_loss, step, log)
                if val_loss <= c.target or step == c.total_steps:
                    break
            started = time.perf_counter() - seconds  # the clock stood still
        tokens, row = next(batches)
        state, loss = programs[c.stage_at(step), c.is_adam_step(step)](state, tokens, row)
        pending.append((step + 1, loss))
        if len(pending) > STEPS_AHEAD:
            jax.block_until_ready(pending[0][1])
        show_losses()

    more = {"train_time_ms": ms, "resumed": start > 0, "lost_ngrams": lost}
    return state.params, result_facts(val_loss, step, c, mesh) | more


def end_if_not_finite(loss: float, step: int, log: Log) -> None:
    """Ends the run if a loss is NaN or inf: nothing is trained or reported after it."""
    if not math.isfinite(loss):
        log.line(f"NON-FINITE: the loss, by step {step}")
        sys.exit(NON_FINITE)


def validate(weights: dict, step: int, c: Config, mesh: Mesh, programs: dict, shards: dict):
    """Mean loss over the validation tokens, nats a token, and how many n-grams were lost."""
    hosts = max(1, jax.process_count() * mesh.shape["fsdp"] // mesh.size)  # of one node
    shapes = batch_shapes("val", c)
    tokens = read_batches(shards["val"], shapes, c, jax.process_index() % hosts, hosts)
    batches = prefetch(tokens, NamedSharding(mesh, P("fsdp")))
    stage = c.val_stage(step)
    if (stage, "val") not in programs:  # on CPUs, the first time
        programs[stage, "val"] = compile_val_step(stage, c, mesh)
    last = np.int32(step == c.total_steps)
    program = programs[stage, "val"]
    results = [jax.tree.map(float, program(weights, batch, last)) for batch in batches]
    losses, lost = zip(*results, strict=True)
    return float(np.mean(losses)), int(sum(lost))


def result_facts(val_loss: float, step: int, c: Config, mesh: Mesh) -> dict[str, Any]:
    """Returns what the RESULT line states beyond times."""
    memory = [device.memory_stats() or {} for device in mesh.local_devices]
    return {
        "val_loss": val_loss,
        "steps": step,
        "reason": "target reached" if val_loss <= c.target else "end of schedule",
        "target": c.target,
        "tokens": sum(B * T for B, T, _ in batch_shapes("train", c)[:step]),
        "seed": c.seed,
        "devices": mesh.size,
        "peak_memory_bytes": max(stats.get("peak_bytes_in_use", 0) for stats in memory),
    }


def unpad(params: dict[str, Array], c: Config) -> dict[str, np.ndarray]:
    """Whole parameters in their model_shape."""
    whole = {}
    for name, param in param_table(c).items():
        array = process_allgather(params[name], tiled=True)
        if param.kind in (BANK, EXCHANGED):
            array = array.reshape(-1, *param.model_shape[1:])
        whole[name] = array[: param.model_shape[0]]
    return whole


def save_weights(path: Path, weights: dict, c: Config, result: dict) -> Path:
    """Writes weights by name, and what evals/ need to know of them, as JSON. Returns the path."""
    about = {"config": dataclasses.asdict(c), "result": result, "source": crc32(SOURCE.encode())}
    about = {name: json.dumps(value) for name, value in about.items()}
    if jax.process_index() == 0:
        try:
            np.savez(path, **about, **weights)
        except OSError as error:  # it must not cost the result
            print(f"warning: {path} is not whole: {error}", file=sys.stderr)
    return path


if __name__ == "__main__":
    main(sys.argv[1:])
