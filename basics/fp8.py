"""FP8: what eight bits hold, and a head that multiplies them.

Run     ./run.sh basics/fp8.py [--draw FILE.svg]
Look    at `quantize`: scale, clip, cast; at `backward`; at the scales between which errors are flat
Source  Micikevicius et al. 2022, arXiv:2209.05433
In train_gpt.py  `quantize` and `softcap` are these, `scaled_matmul` rounds logits and dx to
        bfloat16; `head_loss_fwd` makes gradients, by chunks; `x_scale`, `w_scale`, `g_scale`
"""

import sys
from argparse import ArgumentParser, RawDescriptionHelpFormatter

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import Array

E4M3, E5M2 = "float8_e4m3fn", "float8_e5m2"
FP8 = E4M3, E5M2, True  # how to compute: format of operands, of the gradient; whether to clip
SIZE = 128  # tokens, channels, vocabulary: a wrong axis fits, and only the numbers can tell
TOKENS = 2**17  # of a batch, over which the loss is a mean: these are SIZE of them
SCALES = dict(x=4.0, w=256.0, g=512.0 * TOKENS)  # powers of two: they round nothing themselves
SWEEP = 2.0 ** np.arange(-10, 15)
softcap = lambda z: 23 * jax.nn.sigmoid((z + 5) / 7.5)
cross_entropy = optax.softmax_cross_entropy_with_integer_labels
loss_fn = lambda z_NV, targets_N: cross_entropy(softcap(z_NV), targets_N).sum() / TOKENS
error = lambda a, b: np.linalg.norm(np.float64(a) - b) / np.linalg.norm(b)


def quantize(x: Array, scale: float, dtype: str, clip: bool) -> Array:
    """Small numbers are scaled out of the subnormals; large ones become the largest, not NaN."""
    scaled, limit = x.astype(jnp.float32) * scale, float(jnp.finfo(dtype).max)
    return (jnp.clip(scaled, -limit, limit) if clip else scaled).astype(dtype)


def matmul(a: Array, b: Array, i: int, j: int) -> Array:
    """Over axis i of a and j of b; sums in float32, for in FP8 they soon would take in no more."""
    return jax.lax.dot_general(a, b, (((i,), (j,)), ((), ())), preferred_element_type=jnp.float32)


def forward(x_ND: Array, w_VD: Array, targets_N: Array, scales: dict, how: tuple) -> tuple:
    x8, w8 = (quantize(a, scales[k], how[0], how[2]) for a, k in ((x_ND, "x"), (w_VD, "w")))
    z_NV = matmul(x8, w8, 1, 1) / (scales["x"] * scales["w"])
    return (loss_fn(z_NV, targets_N), z_NV), (x8, w8, z_NV, targets_N, scales)


def backward(how: tuple, kept: tuple, gradients: tuple) -> tuple:
    x8, w8, z_NV, targets_N, scales = kept
    s, hit = softcap(z_NV), jax.nn.one_hot(targets_N, SIZE)
    dz_NV = (jax.nn.softmax(s) - hit) * s * (23 - s) / (23 * 7.5) / TOKENS  # softcap's ds/dz
    g8 = quantize(gradients[0] * dz_NV, scales["g"], *how[1:])
    dx_ND = matmul(g8, w8, 1, 0) / (scales["g"] * scales["w"])  # sums over the vocabulary
    dw_VD = matmul(g8, x8, 0, 0) / (scales["g"] * scales["x"])  # sums over tokens
    return dx_ND, dw_VD, None, None


head = jax.custom_vjp(lambda *arguments: forward(*arguments)[0], nondiff_argnums=(4,))
head.defvjp(forward, backward)
run = jax.jit(jax.value_and_grad(head, (0, 1), has_aux=True), static_argnums=4)


def formats() -> dict[str, np.ndarray]:
    """The numbers of all 256 patterns of bits: sign, exponent, fraction."""
    found, bits = {}, np.arange(256)
    print("of 256 patterns  largest    normal subnormal  step at 1      inf      NaN")
    for dtype, F, bias, given in (E4M3, 3, 7, (464, 465, 1e6)), (E5M2, 2, 15, (61439, 61440, 1e6)):
        exponent, fraction, info = bits % 128 >> F, bits % 2**F / 2**F, jnp.finfo(dtype)
        size = (fraction + (exponent > 0)) * 2.0 ** (np.maximum(exponent, 1) - bias)
        # Of its last exponent e5m2 makes inf and NaN; e4m3fn has numbers there, and only one NaN.
        special = exponent == 31 if dtype == E5M2 else bits % 128 == 127
        size = np.where(special, np.where(fraction == 0, np.inf, np.nan), size)
        v = found[dtype] = np.where(bits < 128, size, -size)
        row = v[np.isfinite(v)].max(), v[2**F], v[1], v[[*v].index(1) + 1] - 1
        print(f"{dtype:14}", *(f"{x:9.4g}" for x in (*row, np.isinf(v).sum(), np.isnan(v).sum())))
        told = [float(x) for x in (info.max, info.tiny, info.smallest_subnormal, info.eps)]
        same = np.array_equal(v, np.uint8(bits).view(info.dtype).astype(float), equal_nan=True)
        check("patterns as in ml_dtypes, ends as in finfo", same and [*row] == told)
        cast = np.asarray(jnp.float32(given).astype(dtype), float)
        check(f"a cast of {given} makes {cast}", [*np.isfinite(cast)] == [True, False, False])
    return found


def sweep(given: tuple, true: list[Array]) -> dict[str, np.ndarray]:
    """Errors of logits by the scale of x, in three ways, and of dw by that of the gradient."""
    rows, found = {"logits": ("x", 1, FP8), "not clipped": ("x", 1, (E4M3, E5M2, False)),
                   "e5m2": ("x", 1, (E5M2, *FP8[1:])), "dloss/dw": ("g", 3, FP8)}, {}  # fmt: skip
    print("scale        ", *(f"  2^{n:<3}" for n in range(-10, 15, 2)))
    for name, (of, i, how) in rows.items():
        runs = (run(*given, SCALES | {of: scale}, how) for scale in SWEEP)
        found[name] = np.array([error(jax.tree.leaves(got)[i], true[i]) for got in runs])
        print(f"{name:13}", *(f"{x:7.3f}" for x in found[name][::2]))
    beyond, nan = np.abs(given[0]).max() * SWEEP > 464, np.isnan(found["not clipped"])
    check("not clipped: NaN where x reaches beyond 464, and only there", (nan == beyond).all())
    check(f"logits: flat at {found['logits'][12]:.4f}", np.ptp(found["logits"][6:17]) < 1e-3)
    return found


def draw(path: str, values: dict[str, np.ndarray], found: dict[str, np.ndarray]) -> None:
    import matplotlib.pyplot as plt

    plt.rcParams.update({"svg.hashsalt": "jNanoGPT", "font.size": 9})
    figure, (left, right) = plt.subplots(1, 2, figsize=(7, 3.5), layout="constrained")
    for dtype, v in values.items():
        up = v[np.isfinite(v) & (v > 0)]
        left.loglog(up[:-1], np.diff(up) / up[:-1], label=dtype)
    right.loglog(SWEEP, np.transpose([*found.values()]), label=[*found])
    left.set(xlabel="number", ylabel="step to the next number, of its size", ylim=(0.05, 2))
    right.set(xlabel="scale of x; of the logits' gradient", ylabel="error", ylim=(0.03, 12))
    left.legend(), right.legend(loc="upper left")
    figure.savefig(path, metadata={"Date": None})


def check(what: str, right: bool) -> None:
    print("ok   " if right else "WRONG", what)
    if not right:
        sys.exit(1)


def main() -> None:
    jax.config.update("jax_platforms", "cpu")  # with 8 TPUs or GPUs, delete these two lines
    jax.config.update("jax_num_cpu_devices", 8)
    cli = ArgumentParser(description=__doc__, formatter_class=RawDescriptionHelpFormatter)
    cli.add_argument("--draw", metavar="FILE.svg")
    path, values, rng = cli.parse_args().draw, formats(), np.random.default_rng(0)
    x, w = rng.normal(size=(2, SIZE, SIZE)).astype("f4")
    given, ones = (x, 0.02 * w, rng.integers(SIZE, size=SIZE)), dict(x=1.0, w=1.0, g=1.0)
    plain = lambda x, w: (loss_fn(x @ w.T, given[2]), x @ w.T)  # no cast, JAX's own gradients
    with jax.enable_x64(True):
        exact = jax.value_and_grad(plain, (0, 1), has_aux=True)(*map(np.float64, given[:2]))
        true = jax.tree.leaves(jax.device_get(exact))
    print("error of                  loss   logits       dx       dw   against float64")
    for name, scales, how, most in (
        ("float32", ones, ("float32", "float32", True), 1e-6),
        ("bfloat16", ones, ("bfloat16", "bfloat16", True), 5e-3),
        ("FP8, no scales", ones, FP8, 1.1), ("FP8", SCALES, FP8, (3e-3, 0.045, 0.1, 0.1)),
    ):  # fmt: skip
        row = [*map(error, jax.tree.leaves(got := run(*given, scales, how)), true)]
        right = np.less(row, most).all() and (row[2] > 0.9) == (name == "FP8, no scales")
        check(f"{name:15}" + " ".join(f"{e:8.1e}" for e in row), right)
    found, x[0, 0] = sweep(given, true), 1000
    (cast, _), (clipped, z) = (run(*given, SCALES, (*FP8[:2], clip))[0] for clip in (False, True))
    right = np.isnan(cast) and np.isfinite(clipped) and np.array_equal(z[1:], got[0][1][1:])
    check(f"one x of 1000: loss {cast}; clipped {clipped:.5f}, other logits the same", right)
    if path:
        draw(path, values, found)


if __name__ == "__main__":
    main()
