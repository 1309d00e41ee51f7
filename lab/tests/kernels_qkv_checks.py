"""What the kernels of fused_qkv must compute, and faults that must be noticed."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np

from lab.tests.interpreted import (
    SUMS_OF_FP8,
    as_float32,
    compare,
    errors,
    interpreter,
    load,
    normal,
    spread,
)

H = 2
D = 128 * H
# Half as large again as measured with jax 0.12.0.1.
LIMITS = {"q": (2.3e-3, 1.8e-3), "k": (2.6e-3, 1.8e-3), "v": (4.7e-3, 2.6e-3)}
LIMITS |= {"dx": (8.1e-3, 4.8e-3), "dw": (4.5e-3, 3.6e-3)}
CONFIG = dict(D=D, H=H, attention="band", kernels="mosaic", batch=1)
CONFIG |= dict(w_scale=256.0, g_scale=16.0)  # dy is about 1 here


# ---- The kernels ---------------------------------------------------------------------------------
class Case:
    """Operands of fused_qkv() for B sequences of T tokens, and what it must compute of them."""

    def __init__(self, B: int, T: int, angles: int):
        position = angles * np.arange(T)[:, None] + np.arange(angles)
        angle = position[:, :, None] * (1 / 1024) ** np.linspace(0, 1, 32)
        self.rope = jnp.cos(angle).astype("float32"), jnp.sin(angle).astype("float32")
        codes = np.random.default_rng(0).integers(-9, 9, (2, B, T, 1, 4))
        self.docs = tuple(jnp.asarray(codes, "bfloat16"))
        self.x = (normal(0, (B * T, D)) * spread(B * T)).astype("bfloat16")
        self.w = normal(1, (3 * D, D), D**-0.5)
        with jax.default_matmul_precision("highest"):
            plain = functools.partial(self.plain, (B, T, H, 128))
            y, vjp = jax.vjp(plain, *as_float32(self.x, self.w))
            # y is a part of dy, or the radial part would be near 0.
            noise = [normal(seed, (B * T, D), 1.0, "float32") for seed in (2, 3, 4)]
            self.dy = [(a + b).astype("bfloat16") for a, b in zip(noise, y, strict=True)]
            self.want = [*y, *vjp(as_float32(*self.dy))]

    def plain(self, shape: tuple, x_ND, w_ED) -> list:
        """q, k and v by the functions that other devices run."""
        module = load("fused_qkv")
        qkv = module.norm_linear(x_ND.reshape(*shape[:2], D), w_ED, radial_from="x")
        q, k, v = (part.reshape(shape) for part in jnp.split(qkv, 3, axis=-1))
        docs = as_float32(*self.docs)
        q = module.norm_rotate(q, *self.rope, docs[0])
        k = module.norm_rotate(k, *self.rope, docs[1])
        return [array.reshape(x_ND.shape) for array in (q, k, v)]

    def forward(self, module, qkv_fp8: int) -> tuple:
        """q, k, v by the kernel, and what the gradient needs."""
        c = dataclasses.replace(module.PRESETS["record"], **CONFIG, qkv_fp8=qkv_fp8)
        with interpreter():
            arrays = module.fused_qkv_fwd(self.x, self.w, *self.rope, self.docs, c)
            return jax.block_until_ready(arrays)

    def backward(self, module, residuals: tuple, qkv_fp8: int) -> tuple:
        """dx and dw by the kernel."""
        c = dataclasses.replace(module.PRESETS["record"], **CONFIG, qkv_fp8=qkv_fp8)
        with interpreter():
            dx, dw, *_ = jax.block_until_ready(module.fused_qkv_bwd(c, residuals, self.dy))
            return dx, dw


@functools.cache
def case_of(B: int, T: int, angles: int, qkv_fp8: int) -> tuple[Case, tuple]:
    """A case, and what its gradient needs."""
    case = Case(B, T, angles)
    return case, case.forward(load("fused_qkv"), qkv_fp8)[1]


# A pair of tiles takes four steps, and there are three slots, so each slot is used more than once.
# The second case has two pairs for each block, two sequences, and the two angles of a paired layer.
FIRST = (1, 128, 1)
SECOND = (2, 128, 2)


def check_forward(T, shape=SECOND, qkv_fp8=0) -> None:
    """q, k and v, and what the gradient needs."""
    case, residuals = case_of(*shape, qkv_fp8)
    found, others = case.forward(T, qkv_fp8)
    for name, got, want in zip("qkv", found, case.want[:3], strict=True):
        compare(name, got, want, SUMS_OF_FP8 if qkv_fp8 else LIMITS[name])
    for got, want in zip(others[5:7], residuals[5:7], strict=True):
        assert max(errors(got, want)) < 1e-2, "what the gradient needs is wrong"


def check_backward(T, shape=SECOND, qkv_fp8=0) -> None:
    """The gradients."""
    case, residuals = case_of(*shape, qkv_fp8)
    dx, dw = case.backward(T, residuals, qkv_fp8)
    # It goes as 1 / rms(x), so tokens with a small rms would hide the others.
    rms = spread(len(dx))
    compare("dx", dx * rms, case.want[3] * rms, SUMS_OF_FP8 if qkv_fp8 else LIMITS["dx"])
    compare("dw", dw, case.want[4], SUMS_OF_FP8 if qkv_fp8 else LIMITS["dw"])


def check_one_angle(T) -> None:
    """One sequence, in a layer whose heads are not paired."""
    check_forward(T, FIRST)
    check_backward(T, FIRST)


def check_fp8(T) -> None:
    """With FP8 in the forward pass, and in both."""
    for qkv_fp8 in 1, 2:
        check_forward(T, FIRST, qkv_fp8)
        check_backward(T, FIRST, qkv_fp8)


# ---- Attention -----------------------------------------------------------------------------------
def attention(module, i: int, kernels: str, compute: str) -> list:
    """y, dx, dqk and dvo of layer i of the record, which is less wide."""
    c = dataclasses.replace(
        module.PRESETS["record"], D=D, H=H, attention="band", kernels=kernels, compute=compute
    )
    B, T = 1, 128
    x = normal(i, (B, T, D), 1.5).astype(compute)
    qk = normal(i + 20, (2, D, D), D**-0.5, "float32")
    vo = normal(i + 40, (2, D, D), D**-0.5, "float32")
    table = normal(i + 60, (B, T, H, 128)).astype(compute)
    dy = normal(i + 80, x.shape, 1e-3).astype(compute)
    starts = jnp.zeros((B, T), bool).at[:, jnp.array([0, 50, 95])].set(True)
    pos = module.positions(starts, c, 0)
    factors = {"dc_in": 1.1, "dc_out": 0.2, "xsa": 0.3, "head": 0.7}
    names = module.layer_gates(c.layers[i], H)
    gate = {name: jnp.full((B, T, H), factors[name]) for name in names if name in factors}
    v_terms = [] if c.layers[i].value_table is None else [(0.5, table)]

    def run(x, qk, vo):
        w = {"qk": {i: tuple(qk)}, "vo": {i: tuple(vo)}, "vo_lambdas": jnp.full((11, 2), 0.9)}
        return module.attention(x, v_terms, i, w, dict(gate), pos, c, 0.8)

    with interpreter(), jax.default_matmul_precision("highest"):
        y, vjp = jax.vjp(run, x, qk, vo)
        return jax.block_until_ready([y, *vjp(dy)])


def check_attention(T) -> None:
    """With kernels, attention is as exact as without. Layer 2 is paired and has a value table, 3
    has key_offset, xsa and head_gate, 10 has dc as well."""
    for i in 2, 3, 10:
        exact = attention(T, i, "xla", "float32")
        others = attention(T, i, "xla", "bfloat16")
        kernels = attention(T, i, "mosaic", "bfloat16")
        for name, ours, plain, want in zip(
            "y dx dqk dvo".split(), kernels, others, exact, strict=True
        ):
            largest, rms = errors(plain, want)
            compare(f"layer {i}, {name}", ours, want, (1.3 * largest, 1.1 * rms))


CHECKS = [check_forward, check_backward, check_one_angle, check_fp8, check_attention]
