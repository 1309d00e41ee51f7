"""FP8: the numbers of eight bits, and a head that computes with them.

Run     ./run.sh basics/fp8.py [--draw FILE.svg]
Look    at `quantize`: scale, clip, cast; at `backward`; and at the scales that do not change errors
Dims    N token  V vocabulary  D channel; x the head's input, w its weights, z logits
Source  Micikevicius et al. 2022, arXiv:2209.05433
In train_gpt.py  `quantize` and `softcap` are as here. `scaled_matmul` rounds logits and dx to
        bfloat16. `head_loss_fwd` computes gradients already in the forward pass, a chunk of tokens
        at a time. The scales are `x_scale`, `w_scale` and `g_scale`
"""

import os
import sys
from argparse import ArgumentParser, FileType, RawDescriptionHelpFormatter
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import Array

E4M3 = "float8_e4m3fn"
E5M2 = "float8_e5m2"
LAYOUT = {E4M3: (3, 7), E5M2: (2, 15)}  # bits of the fraction, bias of the exponent
SIZE = 128  # N, V and D, all equal: a wrong axis raises no error, only the numbers show it
TOKENS = 2**17  # of a whole batch: the loss is their mean, but this file has only SIZE of them
SCALES = dict(x=4.0, w=256.0, g=512.0 * TOKENS)  # powers of two, by which nothing is rounded
SWEEP = 2.0 ** np.arange(-10, 15)  # other scales to try


class Formats(NamedTuple):
    """How to cast."""

    operands: str = E4M3  # x and w
    gradient: str = E5M2  # of the logits
    clip: bool = True


FP8 = Formats()


# ---- A head in FP8 -------------------------------------------------------------------------------
def softcap(z: Array) -> Array:
    return 23 * jax.nn.sigmoid((z + 5) / 7.5)


def loss_fn(z_NV: Array, targets_N: Array) -> Array:
    losses = optax.softmax_cross_entropy_with_integer_labels(softcap(z_NV), targets_N)
    return losses.sum() / TOKENS


def quantize(x: Array, scale: float, dtype: str, clip: bool) -> Array:
    """Casts; scales before, so that none becomes subnormal, and clips, so that none becomes NaN."""
    scaled = x.astype(jnp.float32) * scale
    limit = float(jnp.finfo(dtype).max)
    return (jnp.clip(scaled, -limit, limit) if clip else scaled).astype(dtype)


def matmul(a: Array, b: Array, i: int, j: int) -> Array:
    """Sums over axis i of a and axis j of b, in float32: an FP8 sum would soon stop growing."""
    return jax.lax.dot_general(a, b, (((i,), (j,)), ((), ())), preferred_element_type=jnp.float32)


def forward(x_ND: Array, w_VD: Array, targets_N: Array, scales: dict, how: Formats) -> tuple:
    """(loss, logits), and the residuals for the backward pass."""
    x8 = quantize(x_ND, scales["x"], how.operands, how.clip)
    w8 = quantize(w_VD, scales["w"], how.operands, how.clip)
    z_NV = matmul(x8, w8, 1, 1) / (scales["x"] * scales["w"])
    return (loss_fn(z_NV, targets_N), z_NV), (x8, w8, z_NV, targets_N, scales)


def backward(how: Formats, residuals: tuple, gradients: tuple) -> tuple:
    """Gradients of x and w, by products of the same FP8 operands. gradients: of loss and logits."""
    x8, w8, z_NV, targets_N, scales = residuals
    s = softcap(z_NV)
    ds_NV = (jax.nn.softmax(s) - jax.nn.one_hot(targets_N, SIZE)) / TOKENS
    dz_NV = ds_NV * s * (23 - s) / (23 * 7.5)  # the derivative of the softcap
    g8 = quantize(gradients[0] * dz_NV, scales["g"], how.gradient, how.clip)
    dx_ND = matmul(g8, w8, 1, 0) / (scales["g"] * scales["w"])  # sums over the vocabulary
    dw_VD = matmul(g8, x8, 0, 0) / (scales["g"] * scales["x"])  # sums over tokens
    return dx_ND, dw_VD, None, None  # targets and scales have no gradients


def head_loss(x_ND: Array, w_VD: Array, targets_N: Array, scales: dict, how: Formats) -> tuple:
    """(loss, logits), differentiated by `backward`."""
    result, _ = forward(x_ND, w_VD, targets_N, scales, how)
    return result


head = jax.custom_vjp(head_loss, nondiff_argnums=(4,))
head.defvjp(forward, backward)
# Returns ((loss, logits), (dx, dw)).
run = jax.jit(jax.value_and_grad(head, (0, 1), has_aux=True), static_argnums=4)


def error(a: Array, b: Array) -> float:
    """The distance of a from b, as a share of the norm of b."""
    return np.linalg.norm(np.float64(a) - b) / np.linalg.norm(b)


# ---- The numbers of eight bits -------------------------------------------------------------------
def decode(dtype: str) -> np.ndarray:
    """The numbers of all 256 patterns of bits: sign, exponent, fraction."""
    bits = np.arange(256)
    fraction_bits, bias = LAYOUT[dtype]
    unsigned = bits % 128
    exponent = unsigned >> fraction_bits
    fraction = unsigned % 2**fraction_bits / 2**fraction_bits
    # Before the point is a 1, but a 0 where the exponent is 0: those are the subnormals.
    significand = np.where(exponent > 0, 1 + fraction, fraction)
    size = significand * 2.0 ** (np.maximum(exponent, 1) - bias)
    if dtype == E5M2:  # the last exponent is for inf and NaN
        size = np.where(exponent == 31, np.where(fraction == 0, np.inf, np.nan), size)
    else:  # the last exponent has numbers, too, and only the last pattern is NaN
        size = np.where(unsigned == 127, np.nan, size)
    return np.where(bits < 128, size, -size)


def show_formats() -> dict[str, np.ndarray]:
    """Prints and checks both formats; returns their numbers."""
    numbers = {}
    print("256 patterns: largest, smallest normal and subnormal, step at 1, how many inf and NaN")
    for dtype, casts in {E4M3: (464, 465, 1e6), E5M2: (61439, 61440, 1e6)}.items():
        values = decode(dtype)
        numbers[dtype] = values
        fraction_bits, _ = LAYOUT[dtype]
        largest = values[np.isfinite(values)].max()
        normal = values[2**fraction_bits]
        subnormal = values[1]
        step = values[list(values).index(1) + 1] - 1
        limits = [largest, normal, subnormal, step]
        counts = [np.isinf(values).sum(), np.isnan(values).sum()]
        print(f"{dtype:14}", *(f"{x:9.4g}" for x in limits + counts))
        info = jnp.finfo(dtype)
        finfo = [float(x) for x in (info.max, info.tiny, info.smallest_subnormal, info.eps)]
        library = np.uint8(np.arange(256)).view(info.dtype).astype(float)
        same = np.array_equal(values, library, equal_nan=True)
        check("all numbers are those of ml_dtypes, limits those of finfo", same and limits == finfo)
        cast = np.asarray(jnp.float32(casts).astype(dtype), float)
        check(f"a cast of {casts} makes {cast}", np.isfinite(cast).tolist() == [True, False, False])
    return numbers


# ---- What a scale does ---------------------------------------------------------------------------
def by_name(result: tuple) -> dict[str, Array]:
    """What `run` returns, with names."""
    (loss, logits), (dx, dw) = result
    return dict(loss=loss, logits=logits, dx=dx, dw=dw)


def compare_formats(arguments: tuple, exact: dict[str, Array]) -> Array:
    """Errors of loss, logits, dx and dw in four formats; returns the logits in FP8."""
    ones = dict(x=1.0, w=1.0, g=1.0)
    print("error from float64        loss   logits       dx       dw")
    for name, scales, how, limits in (
        ("float32", ones, Formats("float32", "float32"), 1e-6),
        ("bfloat16", ones, Formats("bfloat16", "bfloat16"), 5e-3),
        ("FP8, no scales", ones, FP8, 1.1),
        ("FP8", SCALES, FP8, (3e-3, 0.045, 0.1, 0.1)),
    ):
        result = by_name(run(*arguments, scales, how))
        errors = {key: error(result[key], exact[key]) for key in exact}
        right = np.less([*errors.values()], limits).all()
        lost = errors["dx"] > 0.9
        expected_lost = name == "FP8, no scales"
        row = " ".join(f"{e:8.1e}" for e in errors.values())
        check(f"{name:15}{row}", right and lost == expected_lost)
    return result["logits"]


def sweep(arguments: tuple, exact: dict[str, Array]) -> dict[str, np.ndarray]:
    """Errors of logits by the scale of x, in three ways, and of dw by that of the gradient."""
    print("errors of logits, by the scale of x, and of dloss/dw, by the scale of the gradient")
    print("scale        ", *(f"  2^{n:<3}" for n in range(-10, 15, 2)))
    errors = {}
    for name, scaled, output, how in (
        ("logits", "x", "logits", FP8),
        ("not clipped", "x", "logits", FP8._replace(clip=False)),
        ("e5m2", "x", "logits", FP8._replace(operands=E5M2)),
        ("dloss/dw", "g", "dw", FP8),
    ):
        row = []
        for scale in SWEEP:
            result = by_name(run(*arguments, SCALES | {scaled: scale}, how))
            row.append(error(result[output], exact[output]))
        errors[name] = np.array(row)
        print(f"{name:13}", *(f"{x:7.3f}" for x in errors[name][::2]))
    beyond = np.abs(arguments[0]).max() * SWEEP > 464
    right = (np.isnan(errors["not clipped"]) == beyond).all()
    check("not clipped: NaN where the scaled x exceeds 464, and only there", right)
    flat = errors["logits"][6:17]  # those of scales 2^-4 to 2^6
    check(f"logits: error {flat[6]:.4f} at scale 2^2, as at 2^-4 .. 2^6", np.ptp(flat) < 1e-3)
    return errors


def one_large_number(arguments: tuple, logits: Array) -> None:
    """One outlier makes the loss NaN if it is cast unclipped; clipped, it costs its token alone."""
    x, w, targets = arguments
    x = x.copy()
    x[0, 0] = 1000
    (cast, _), _ = run(x, w, targets, SCALES, FP8._replace(clip=False))
    (clipped, z), _ = run(x, w, targets, SCALES, FP8)
    right = np.isnan(cast) and np.isfinite(clipped) and np.array_equal(z[1:], logits[1:])
    text = f"one x of 1000: loss {cast}; clipped, {clipped:.5f}, and other tokens' logits the same"
    check(text, right)


# ---- Plumbing ------------------------------------------------------------------------------------
def draw(path: str, numbers: dict[str, np.ndarray], errors: dict[str, np.ndarray]) -> None:
    os.environ.update(MPLBACKEND="agg", MATPLOTLIBRC=os.devnull)  # not a notebook's
    import matplotlib.pyplot as plt

    plt.style.use(["default", {"svg.hashsalt": "jNanoGPT", "font.size": 9}])
    figure, (left, right) = plt.subplots(1, 2, figsize=(7, 3.5), layout="constrained")
    for dtype, values in numbers.items():
        positive = values[np.isfinite(values) & (values > 0)]
        left.loglog(positive[:-1], np.diff(positive) / positive[:-1], label=dtype)
    right.loglog(SWEEP, np.transpose([*errors.values()]), label=[*errors])
    left.set(xlabel="number", ylabel="step to the next number, of its size", ylim=(0.05, 2))
    right.set(xlabel="scale of x; of the logits' gradient", ylabel="error", ylim=(0.03, 12))
    left.legend()
    right.legend(loc="upper left")
    figure.savefig(path, metadata={"Date": None})


def check(what: str, right: bool) -> None:
    print("ok   " if right else "WRONG", what)
    if not right:
        sys.exit(1)


def main() -> None:
    jax.config.update("jax_platforms", "cpu")  # with 8 TPUs or GPUs, delete these two lines
    jax.config.update("jax_num_cpu_devices", 8)
    cli = ArgumentParser(description=__doc__, formatter_class=RawDescriptionHelpFormatter)
    cli.add_argument("--draw", type=FileType("ab"), metavar="FILE.svg", help="also draw a picture")
    flags = cli.parse_args()
    numbers = show_formats()
    rng = np.random.default_rng(0)
    x, w = rng.normal(size=(2, SIZE, SIZE)).astype(np.float32)
    arguments = x, 0.02 * w, rng.integers(SIZE, size=SIZE)

    def plain(x, w):
        """The head without casts, of which JAX computes the gradients."""
        z = x @ w.T
        return loss_fn(z, arguments[2]), z

    with jax.enable_x64(True):
        plain_and_grad = jax.value_and_grad(plain, (0, 1), has_aux=True)
        result = plain_and_grad(np.float64(arguments[0]), np.float64(arguments[1]))
        exact = by_name(jax.device_get(result))
    logits = compare_formats(arguments, exact)
    errors = sweep(arguments, exact)
    one_large_number(arguments, logits)
    if flags.draw:
        draw(flags.draw.name, numbers, errors)


if __name__ == "__main__":
    main()
