"""The golden numbers of record #89 and their parameters, under our names.

They come from the original PyTorch modules in float32 (head_small.md says how). The fixture is
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
from tests.tools import FLOAT32, make_mesh

PATH = os.environ.get("GOLDEN_HEAD_NPZ", Path(__file__).with_name("head_small.npz"))
GOLDEN = np.load(PATH, allow_pickle=False)
META = {
    key[5:]: GOLDEN[key].item() for key in GOLDEN if key[:5] == "meta/" and not GOLDEN[key].shape
}
BASE, V, VOCAB, D, H, L, T = (
    META[k] for k in ("base", "vocab", "vocab_real", "dim", "heads", "layers", "T")
)
K, BLOCK, ROWS = META["head_dim"], META["block"], META["bigram_rows"]
RECORD = train_gpt.PRESETS["record"]


def config(windows=None, **changes) -> train_gpt.Config:
    """The record at the size of the fixture; windows, in blocks, of each stage."""
    windows = GOLDEN["meta/windows_blocks"].tolist() if windows is None else windows
    rows = []
    for row, (short, long) in zip(RECORD.stages.split("/"), windows, strict=True):
        steps, _, _, _, *rest = row.split()
        rows.append(f"{steps} {T} {short * BLOCK} {long * BLOCK} {' '.join(rest)}")
    small = dict(
        D=D, H=H, F=4 * D, vocab=VOCAB, eot=META["eot"], bigrams=ROWS, batch=1, head_chunk=T // 4,
        stages=" / ".join(rows), attention="xla", prefixes="", **FLOAT32,
    )  # fmt: skip
    return dataclasses.replace(RECORD, **small | changes)


C = config()


# ---- The parameters ------------------------------------------------------------------------------
def random_of(name: str) -> np.random.Generator:
    return np.random.Generator(np.random.PCG64((zlib.crc32(name.encode()) + BASE) % 2**32))


def normal(name: str, shape: tuple) -> np.ndarray:
    return random_of(name).standard_normal(shape)


def scale_of_rows() -> np.ndarray:
    return 0.005 * 100.0 ** ((np.arange(V) % 16) / 15)


@functools.cache
def parameters() -> dict[str, np.ndarray]:
    """Under the names of the original."""
    scalars = np.array([0.5, 1.0] * L + [0.4, -0.7])
    mudd, gate = np.zeros((2, 14)), np.zeros((2, 41))
    mudd[0, [6, 7, 8, 9, 11, 12, 13]] = 20, 20, 10 * 1.1**0.5, 10, 0.5, 10 * 1.1**0.5, 10
    mudd[1, 1] = -5
    gate[:, 12:18], gate[0, 19:26:2], gate[1, 19:28:2], gate[1, 28] = 2.5, 0.5, 0.5, 5
    gate[1, 29:35] = 10
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


def untied() -> np.ndarray:
    return np.float32(normal("embed_untied", (V, D)) * scale_of_rows()[:, None])


# ---- Their names and places ----------------------------------------------------------------------
LAYERS = C.layers
ATTENDS = [i for i, layer in enumerate(LAYERS) if layer.window != "-"]
ADDS = [i for i in ATTENDS if "m" not in LAYERS[i].marks]
NOT_MIXED = [i for i, layer in enumerate(LAYERS) if "m" not in layer.marks]
PRE, POST = (0, 1, 2, 3), (4, 5, 7, 8, 9)  # layers with shares of x0 and pairs, by the net
SIX = np.arange(6)
GATES = dict(  # rows of the two nets of gates: (net, rows) of each layer, in order
    gate_x0=[(0, [18 + 2 * i]) for i in range(4)] + [(1, [18 + 2 * i]) for i in range(5)],
    gate_bigram=[(0, [19 + 2 * i]) for i in range(1, 4)] + [(1, [19 + 2 * i]) for i in range(5)],
    gate_skip=[(1, [28])],
    gate_xsa=[(0, SIX), (0, 6 + SIX), (1, SIX), (1, 6 + SIX)],
    gate_heads=[(0, 12 + SIX), (1, 12 + SIX)],
    gate_dc_from=[(1, 29 + SIX)],
    gate_dc_to=[(1, 35 + SIX)],
)
MUDD = dict(mudd_v=(0, 3), mudd_x=(3, 6), mudd_values=(6, 8), mudd_attn=(8, 12), mudd_mlp=(12, 14))
# Interleaved channel pairs of the half that rotates, as pairs (j, j + K/4), for two heads.
HALF = np.r_[0 : K // 2 : 2, 1 : K // 2 : 2, K // 2 : K]
ROPE = np.r_[HALF, K + HALF]


def ours(theirs: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Arrays of parameters or gradients under our names, without padding. But for head and embed:
    the fixture has them V rows long, and so have we."""
    p, out = theirs, {}
    out["head"], out["embed"] = p["lm_head.weight"].T, p["embed.weight"]
    out |= {f"values{i}": table for i, table in enumerate(p["value_embeds"].reshape(5, V, D))}
    out["bigram"] = p["bigram_embed.weight"]
    out["qk"], out["vo"] = p["qk_bank"][:, ROPE], p["vo_bank"]
    out["mlp"] = p["mlp_bank"][:L].reshape(2 * L, 4 * D, D)
    out["vo_lambdas"] = p["scalars"][: 2 * L].reshape(L, 2)[ATTENDS]
    out["smear_lambda"], out["skip_lambdas"] = p["scalars"][22:23], p["scalars"][23:]
    lambdas = np.stack((p["resid_lambdas"], p["post_lambdas"]), axis=-1)
    out["attn_lambdas"], out["mlp_lambdas"] = lambdas[ADDS, 0], lambdas[NOT_MIXED, 1]
    out["value_gates"], out["smear_gate"] = p["ve_gate_bank"][:4], p["smear_gate.weight"][0]
    out["gate_in"], out["mudd_in"] = p["mudd_gate_w1"], p["mudd_w1"]
    gate = np.concatenate((p["mudd_gate_w2"], p["mudd_gate_b2"][..., None]), axis=-1)
    mudd = np.concatenate((p["mudd_w2"], p["mudd_b2"][..., None]), axis=-1)
    for name, places in GATES.items():
        out[name] = np.stack([gate[net][rows] for net, rows in places])
    out["gate_start"], out["gate_scale"] = gate[0, 19:20], p["_mudd_gate_scale"].reshape(1)
    out |= {name: mudd[:1, a:b] for name, (a, b) in MUDD.items()}
    out["mudd_head"] = mudd[1, :5]
    return out


def theirs(own: dict[str, np.ndarray], start: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The way back; what is stored there and never used is as in start."""
    o, p = own, {name: np.array(array) for name, array in start.items()}
    p["lm_head.weight"], p["embed.weight"] = o["head"].T, o["embed"]
    p["value_embeds"] = np.concatenate([o[f"values{i}"] for i in range(5)])
    p["bigram_embed.weight"] = o["bigram"]
    p["qk_bank"], p["vo_bank"] = o["qk"][:, np.argsort(ROPE)], o["vo"]
    p["mlp_bank"][:L] = o["mlp"].reshape(L, 2, 4 * D, D)
    pairs = p["scalars"][: 2 * L].reshape(L, 2)
    pairs[ATTENDS] = o["vo_lambdas"]
    p["scalars"] = np.concatenate((pairs.ravel(), o["smear_lambda"], o["skip_lambdas"]))
    for i, name in enumerate(("resid_lambdas", "post_lambdas")):
        p[name][ADDS, 0], p[name][NOT_MIXED, 1] = o["attn_lambdas"][:, i], o["mlp_lambdas"][:, i]
    p["ve_gate_bank"][:4], p["smear_gate.weight"] = o["value_gates"], o["smear_gate"][None]
    p["mudd_gate_w1"], p["mudd_w1"] = o["gate_in"], o["mudd_in"]
    places = [*GATES.items(), ("gate_start", [(0, [19])])]
    for name, spots in places:
        for (net, rows), array in zip(spots, o[name].reshape(len(spots), -1, 65), strict=True):
            p["mudd_gate_w2"][net, rows], p["mudd_gate_b2"][net, rows] = array[:, :-1], array[:, -1]
    for (a, b), array in [(MUDD[name], o[name][0]) for name in MUDD]:
        p["mudd_w2"][0, a:b], p["mudd_b2"][0, a:b] = array[:, :-1], array[:, -1]
    p["mudd_w2"][1, :5], p["mudd_b2"][1, :5] = o["mudd_head"][:, :-1], o["mudd_head"][:, -1]
    p["_mudd_gate_scale"] = o["gate_scale"].reshape(())
    return p


def stored(own: dict[str, np.ndarray], c: train_gpt.Config = C) -> dict[str, np.ndarray]:
    """As a state holds them, padded; but the fixture's tables are V rows long, all of them real."""
    out = {}
    for name, row in train_gpt.param_table(c).items():
        shape = row.stored_shape
        if row.optimizer == "muon":
            shape = (shape[0] * shape[1], *shape[2:])
        array = np.zeros(shape, np.float32)
        array[tuple(slice(n) for n in own[name].shape)] = own[name]
        out[name] = array.reshape(row.stored_shape)
    return out


def unstacked(params: dict, c: train_gpt.Config = C) -> dict[str, np.ndarray]:
    """Stored parameters, or gradients of gathered weights, as ours() gives them."""
    out = {}
    for name, row in train_gpt.param_table(c).items():
        array = params[name]
        array = (
            np.stack([*map(np.asarray, array)]) if isinstance(array, list) else np.asarray(array)
        )
        if row.optimizer == "muon":
            array = array.reshape(-1, *row.shape[1:])[: row.shape[0]]
        out[name] = array[: len(array) if name != "bigram" else ROWS]
    return out


# ---- Running and comparing -----------------------------------------------------------------------
def on_one_device(function):
    """Run under shard_map on a mesh of one device, where the collectives have nothing to do."""
    return jax.jit(
        jax.shard_map(function, mesh=make_mesh(1), in_specs=P(), out_specs=P(), check_vma=False)
    )


@functools.lru_cache(maxsize=64)
def directions(n: int, k: int) -> np.ndarray:
    return np.random.Generator(np.random.PCG64(n)).standard_normal((k, n))


def checksum(x: np.ndarray, k: int) -> np.ndarray:
    x = np.asarray(x, np.float64).ravel()
    return np.concatenate([[np.linalg.norm(x)], directions(x.size, k) @ x])


def parts(name: str, array: np.ndarray) -> list[np.ndarray]:
    """What the fixture has one checksum each of."""
    if array.size < 5000:
        return [array]
    if name == "mlp_bank":
        return [*array.reshape(-1, *array.shape[2:])]
    if name == "value_embeds":
        return [*array.reshape(5, -1, array.shape[-1])]
    return [*array] if array.ndim == 3 else [array]


def errors(prefix: str, arrays: dict[str, np.ndarray]) -> dict[str, float]:
    """Relative, of each tensor that the fixture tells of, by the worst of its matrices."""
    out = {}
    for name, array in arrays.items():
        if (key := f"{prefix}/full/{name}") in GOLDEN:
            out[name] = relative(array, GOLDEN[key])
        if (key := f"{prefix}/sum/{name}") in GOLDEN:
            pairs = zip(parts(name, array), GOLDEN[key], strict=True)
            out[name] = max(
                np.abs(checksum(x, len(want) - 1) - want).max() / (want[0] or 1)
                for x, want in pairs
            )
    return out


def relative(a, b) -> float:
    return float(np.linalg.norm(np.asarray(a) - b) / (np.linalg.norm(b) or 1))


def patch_fixture(patch) -> None:
    """The fixture's own random signs and prefixes."""
    signs = jnp.asarray(np.sign(normal("bigram_sign_table", (META["sign_rows"], D))), jnp.float32)
    patch.setattr(train_gpt, "signs", lambda rows, c: signs[rows % META["sign_rows"]])
    patch.setattr(train_gpt, "prefix_table", lambda c: GOLDEN["prefix_table"])
