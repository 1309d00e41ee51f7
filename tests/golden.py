"""The golden numbers of record #89 and their parameters, under our names.

They come from the original PyTorch modules in float32 (head_small.md explains how). The fixture is
`tests/head_small.npz`, or the file that GOLDEN_HEAD_NPZ names; every size is read from it.
"""

import dataclasses
import functools
import os
import zlib
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax import P

import train_gpt
from tests.tools import FLOAT32, bank_matrices, make_mesh

PATH = os.environ.get("GOLDEN_HEAD_NPZ", Path(__file__).with_name("head_small.npz"))
GOLDEN = np.load(PATH, allow_pickle=False)
META = {}
for key in GOLDEN:
    if key.startswith("meta/") and not GOLDEN[key].shape:
        META[key.removeprefix("meta/")] = GOLDEN[key].item()
BASE = META["base"]  # of the random seeds
V = META["vocab"]  # with padding
VOCAB = META["vocab_real"]
D = META["dim"]
H = META["heads"]
L = META["layers"]
T = META["T"]
K = META["head_dim"]
BLOCK = META["block"]  # tokens in a unit of the windows
ROWS = META["bigram_rows"]
RECORD = train_gpt.PRESETS["record"]


def config() -> train_gpt.Config:
    """The record at the fixture's size."""
    windows = GOLDEN["meta/windows_blocks"].tolist()  # (short, long) of each stage
    stages = []
    for stage, (short, long) in zip(RECORD.stages, windows, strict=True):
        size = {"tokens": T, "short": short * BLOCK, "long": long * BLOCK}
        stages.append(dataclasses.replace(stage, **size))
    return dataclasses.replace(
        RECORD, D=D, H=H, F=4 * D, vocab=VOCAB, eot=META["eot"], ngram_buckets=ROWS, batch=1,
        head_chunk=T // 4, val_T=T, val_tokens=8 * T, stages=tuple(stages), attention="band",
        ngram_capacity=1.0, **FLOAT32,
    )  # fmt: skip


C = config()


# ---- The parameters ------------------------------------------------------------------------------
def random_of(name: str) -> np.random.Generator:
    """The generator of an array, as N in head_small.md has it."""
    return np.random.Generator(np.random.PCG64((zlib.crc32(name.encode()) + BASE) % 2**32))


def normal(name: str, shape: tuple) -> np.ndarray:
    return random_of(name).standard_normal(shape)


def scale_of_rows() -> np.ndarray:
    """(V,): s_v of head_small.md, for each entry of the vocabulary."""
    return 0.005 * 100.0 ** ((np.arange(V) % 16) / 15)


@functools.cache
def parameters() -> dict[str, np.ndarray]:
    """The fixture's parameters, under the names of the original (formulas: head_small.md)."""
    scalars = np.array([0.5, 1.0] * L + [0.4, -0.7])
    # Upstream's initial biases, ten times what they add. MUDD and GATES have the places.
    mudd = np.zeros((2, 14))
    mudd[0, 6:8] = 20  # value
    mudd[0, 8:12] = 10 * 1.1**0.5, 10, 0, 0.5  # attn
    mudd[0, 12:14] = 10 * 1.1**0.5, 10  # mlp
    mudd[1, 1] = -5  # of the head
    gate = np.zeros((2, 41))
    gate[:, 12:18] = 2.5  # head
    gate[0, 19:26:2] = 0.5  # bigram
    gate[1, 19:28:2] = 0.5  # bigram
    gate[1, 28] = 5  # skip
    gate[1, 29:35] = 10  # dc_in
    params = {
        "lm_head.weight": normal("lm_head", (D, V)) * scale_of_rows(),
        "value_embeds": 0.3 * normal("value_embeds", (5 * V, D)),
        "bigram_embed.weight": 0.3 * normal("bigram_embed", (ROWS, D)),
        "ve_gate_bank": 0.5 * normal("ve_gate_bank", (5, H, 12)),
        "smear_gate.weight": 3 * normal("smear_gate", (1, 12)),
        "scalars": scalars + 0.1 * normal("scalars", (24,)),
        "post_lambdas": 1 + 0.1 * normal("post_lambdas", (L, 2)),
        "resid_lambdas": 1.1**0.5 + 0.1 * normal("resid_lambdas", (L, 2)),
        "qk_bank": normal("qk_bank", (60, 2 * K, D)) / D**0.5,
        "vo_bank": normal("vo_bank", (20, D, D)) / D**0.5,
        "mlp_bank": normal("mlp_bank", (12, 2, 4 * D, D)) / D**0.5
        * np.array([1, 0.3])[:, None, None],
        "mudd_w1": normal("mudd_w1", (2, 64, D)) / D**0.5,
        "mudd_w2": 0.1 * normal("mudd_w2", (2, 14, 64)),
        "mudd_b2": mudd + normal("mudd_b2", (2, 14)),
        "mudd_gate_w1": normal("mudd_gate_w1", (2, 64, D)) / D**0.5,
        "mudd_gate_w2": 0.3 * normal("mudd_gate_w2", (2, 41, 64)),
        "mudd_gate_b2": gate + normal("mudd_gate_b2", (2, 41)),
        "_mudd_gate_scale": np.array(0.12),
    }  # fmt: skip
    params["embed.weight"] = params["lm_head.weight"].T
    return {name: array.astype(np.float32) for name, array in params.items()}


# ---- Their names and places ----------------------------------------------------------------------
SIX = np.arange(6)
# For each gate, the fixture's net (0 or 1) and the gate's rows in it.
GATES = {"input.ngram": (0, [19])}  # the row that would be layer 0's, which has none
for i in range(4):
    GATES[f"layer{i}.x0"] = (0, [18 + 2 * i])
    GATES[f"layer{i}.ngram"] = (0, [19 + 2 * i])
for n, i in enumerate((4, 5, 7, 8, 9)):
    GATES[f"layer{i}.x0"] = (1, [18 + 2 * n])
    GATES[f"layer{i}.ngram"] = (1, [19 + 2 * n])
GATES |= {
    "layer6.skip": (1, [28]),
    "layer1.xsa": (0, SIX),
    "layer3.xsa": (0, 6 + SIX),
    "layer3.head": (0, 12 + SIX),
    "layer4.xsa": (1, SIX),
    "layer7.xsa": (1, 6 + SIX),
    "layer10.head": (1, 12 + SIX),
    "layer10.dc_in": (1, 29 + SIX),
    "layer10.dc_out": (1, 35 + SIX),
}
# The first and the end of the rows of each output of layer 10's MUDD net.
MUDD = {"v": (0, 3), "x": (3, 6), "value": (6, 8), "attn": (8, 12), "mlp": (12, 14)}
# For each of our nets, the name of the fixture's arrays and the net's number in them.
NETS = {
    "gates_input": ("mudd_gate", 0),
    "gates4": ("mudd_gate", 1),
    "mudd10": ("mudd", 0),
    "mudd_head": ("mudd", 1),
}
VALUE_LAYERS = [1, 2, 8, 9]  # layers with a gate of their value table
SKIP_LAYER = 6
BANKS = "qk", "vo", "mlp"


def net_rows(net: str) -> np.ndarray:
    """The rows of the fixture's w2 and b2 that our net has, in our order."""
    outputs = train_gpt.nets(C)[net]
    if net == "mudd_head":
        return np.arange(len(outputs["x"]))
    if net == "mudd10":
        return np.concatenate([np.arange(*MUDD[name]) for name in outputs])
    rows = [GATES[name] for name in outputs]
    assert {number for number, _ in rows} == {NETS[net][1]}
    return np.concatenate([places for _, places in rows])


# The original rotates channels 2j and 2j + 1 of a head's first half, we rotate j and j + K/4. This
# is the original's channel of each of ours, for two heads.
HALF = np.r_[0 : K // 2 : 2, 1 : K // 2 : 2, K // 2 : K]
ROPE = np.r_[HALF, K + HALF]


def ours(theirs: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Parameters or gradients under our names, without padding; but head, embed and the value
    tables have the V rows of the fixture."""
    p = theirs
    out = {}
    out["head"] = p["lm_head.weight"].T
    out["embed"] = p["embed.weight"]
    out |= {f"value{i}": table for i, table in enumerate(p["value_embeds"].reshape(5, V, D))}
    out["ngram"] = p["bigram_embed.weight"]
    out["qk"] = p["qk_bank"][:, ROPE]
    out["vo"] = p["vo_bank"]
    out["mlp"] = p["mlp_bank"][:L].reshape(2 * L, 4 * D, D)
    out["vo_lambdas"] = p["scalars"][: 2 * L].reshape(L, 2)
    out["smear_lambda"] = p["scalars"][22:23]
    out["skip_lambdas"] = np.zeros(L, np.float32)
    out["skip_lambdas"][SKIP_LAYER] = p["scalars"][23]
    lambdas = np.stack((p["resid_lambdas"], p["post_lambdas"]), axis=-1)
    out["attn_lambdas"] = lambdas[:, 0]
    out["mlp_lambdas"] = lambdas[:, 1]
    out["value_gates"] = np.zeros((L, H, 12), np.float32)
    out["value_gates"][VALUE_LAYERS] = p["ve_gate_bank"][:4]
    out["smear_gate"] = p["smear_gate.weight"][0]
    out["gate_scale"] = p["_mudd_gate_scale"].reshape(1)
    for net, (kind, number) in NETS.items():
        rows = net_rows(net)
        out[f"{net}.w1"] = p[f"{kind}_w1"][number]
        out[f"{net}.w2"] = p[f"{kind}_w2"][number, rows]
        out[f"{net}.b2"] = p[f"{kind}_b2"][number, rows]
    return out


def theirs(ours: dict[str, np.ndarray], start: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The inverse of ours(). What the original stores and never uses is copied from `start`."""
    o = ours
    p = {name: np.array(array) for name, array in start.items()}
    p["lm_head.weight"] = o["head"].T
    p["embed.weight"] = o["embed"]
    p["value_embeds"] = np.concatenate([o[f"value{i}"] for i in range(5)])
    p["bigram_embed.weight"] = o["ngram"]
    p["qk_bank"] = o["qk"][:, np.argsort(ROPE)]
    p["vo_bank"] = o["vo"]
    p["mlp_bank"][:L] = o["mlp"].reshape(L, 2, 4 * D, D)
    skip = o["skip_lambdas"][SKIP_LAYER : SKIP_LAYER + 1]
    p["scalars"] = np.concatenate((o["vo_lambdas"].ravel(), o["smear_lambda"], skip))
    for i, name in enumerate(("resid_lambdas", "post_lambdas")):
        p[name][:, 0] = o["attn_lambdas"][:, i]
        p[name][:, 1] = o["mlp_lambdas"][:, i]
    p["ve_gate_bank"][:4] = o["value_gates"][VALUE_LAYERS]
    p["smear_gate.weight"] = o["smear_gate"][None]
    for net, (kind, number) in NETS.items():
        rows = net_rows(net)
        p[f"{kind}_w1"][number] = o[f"{net}.w1"]
        p[f"{kind}_w2"][number, rows] = o[f"{net}.w2"]
        p[f"{kind}_b2"][number, rows] = o[f"{net}.b2"]
    p["_mudd_gate_scale"] = o["gate_scale"].reshape(())
    return p


def weights() -> dict:
    """The fixture's parameters as train_gpt.whole_weights() returns them."""
    whole = {name: jnp.asarray(array) for name, array in ours(parameters()).items()}
    return whole | {name: bank_matrices(name, whole[name], C) for name in BANKS}


def unstacked(whole: dict) -> dict[str, np.ndarray]:
    """Gradients of weights(), in the shapes of ours()."""
    whole = whole | {name: np.concatenate([*whole[name].values()]) for name in BANKS}
    return {name: np.asarray(array) for name, array in whole.items()}


# ---- Running and comparing -----------------------------------------------------------------------
def on_one_device(function):
    """The function under shard_map on one device, where the collectives have nothing to do."""
    return jax.jit(
        jax.shard_map(function, mesh=make_mesh(1), in_specs=P(), out_specs=P(), check_vma=False)
    )


@functools.lru_cache(maxsize=64)
def directions(n: int, k: int) -> np.ndarray:
    """P(n, k) of head_small.md."""
    return np.random.Generator(np.random.PCG64(n)).standard_normal((k, n))


def checksum(x: np.ndarray, k: int) -> np.ndarray:
    """(1 + k,): the norm of x, and its products with k random directions."""
    x = np.asarray(x, np.float64).ravel()
    return np.concatenate([[np.linalg.norm(x)], directions(x.size, k) @ x])


def parts(name: str, array: np.ndarray) -> list[np.ndarray]:
    """The matrices of a parameter that have a checksum in the fixture, in its order."""
    if array.size < 5000:
        return [array]
    if name == "mlp_bank":
        return [*array.reshape(-1, *array.shape[2:])]
    if name == "value_embeds":
        return [*array.reshape(5, -1, array.shape[-1])]
    return [*array] if array.ndim == 3 else [array]


def errors(prefix: str, arrays: dict[str, np.ndarray]) -> dict[str, float]:
    """The relative error of every array that the fixture has whole or as checksums; of several
    matrices, the largest error."""
    out = {}
    for name, array in arrays.items():
        whole = f"{prefix}/full/{name}"
        if whole in GOLDEN:
            out[name] = relative(array, GOLDEN[whole])
        sums = f"{prefix}/sum/{name}"
        if sums in GOLDEN:
            pairs = zip(parts(name, array), GOLDEN[sums], strict=True)
            out[name] = max(
                np.abs(checksum(x, len(want) - 1) - want).max() / (want[0] or 1)
                for x, want in pairs
            )
    return out


def relative(a, b) -> float:
    """The norm of a - b, as a share of that of b."""
    return float(np.linalg.norm(np.asarray(a) - b) / (np.linalg.norm(b) or 1))


def patch_fixture(patch) -> None:
    """Gives the model the fixture's random signs and prefixes in place of its own."""
    signs = jnp.asarray(np.sign(normal("bigram_sign_table", (META["sign_rows"], D))), jnp.float32)
    patch.setattr(train_gpt, "random_signs", lambda rows, c: signs[rows % META["sign_rows"]])
    patch.setattr(train_gpt, "prefix_table", lambda c: GOLDEN["prefix_table"])
