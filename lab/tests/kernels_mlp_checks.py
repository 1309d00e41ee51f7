"""What the kernels of fused_mlp must compute, and faults that must be noticed."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest

from lab.tests.interpreted import (
    SUMS_OF_BF16,
    SUMS_OF_FP8,
    as_float32,
    compare,
    interpreter,
    normal,
    spread,
)

STEP = {"bfloat16": 2.0**-8, "float8_e4m3fn": 2.0**-4, "float8_e5m2": 2.0**-3}  # half of one


# ---- The product ---------------------------------------------------------------------------------
def check_product(T, formats, outputs, M, N, K, with_saved=False) -> None:
    """product() against the same in float32, of the same operands."""
    a = normal(0, (M, K)).astype(formats[0])
    b = normal(1, (N, K), K**-0.5, "float32").astype(formats[1])
    scale = jnp.linspace(0.5, 1.5, M)
    saved = None
    if with_saved:
        saved_dtype = "bfloat16" if outputs[0].dtype == "bfloat16" else "float8_e4m3fn"
        saved = jnp.square(normal(2, (M, N), 1.0, "float32")).astype(saved_dtype)

    def function(values, scale, saved):
        value = jnp.maximum(values, 0.0) ** 2 - 0.25 * values
        value = value if saved is None else value + values * jnp.sqrt(saved)
        return [value * scale[:, None]] * (len(outputs) + 1)

    with interpreter():
        results = T.product(a, b, scale, outputs, function, saved, sums=True)
        *got, sums = jax.block_until_ready(results)
    exact = jnp.dot(*as_float32(a, b.T), precision="highest")
    want = function(exact, scale, None if saved is None else saved.astype("float32"))[0]
    for output, y in zip(outputs, got, strict=True):
        y = y.T if output.transposed else y
        step = STEP[output.dtype]
        compare(f"{output}", y, want, (1.1 * step, step))
        # Another order of the sum may round a number another way, but only a few.
        assert (y == want.astype(output.dtype)).mean() > 0.98, f"{output}: not rounded as float32"
    compare("sums", sums.T, want.reshape(M, -1, T.TILE_N).sum(axis=-1), (1e-5, 1e-5))


def check_bf16_products(T) -> None:
    """With all that the MLP's backward pass needs; and with more steps of K than slots."""
    outputs = [T.Output("bfloat16")]
    check_product(T, ["bfloat16"] * 2, outputs, 256, 512, 384, with_saved=True)
    check_product(T, ["bfloat16"] * 2, outputs, 384, 512, 320)  # 5 steps do not divide by 3 slots


def check_fp8_products(T) -> None:
    """Both layouts of a result, the formats of the gradient, and fewer tiles than blocks."""
    e4, e5 = T.E4, T.E5
    both = [T.Output(e4), T.Output(e4, transposed=True)]
    check_product(T, [e4] * 2, both, 256, 512, 512)
    both = [T.Output(e5), T.Output(e5, transposed=True)]
    check_product(T, [e5, e4], both, 256, 256, 640, with_saved=True)
    check_product(T, [e4] * 2, [T.Output("bfloat16"), T.Output(e4)], 384, 256, 256)


# ---- The residual stream in FP8 ------------------------------------------------------------------
def check_stream(T) -> None:
    """x8 and its transpose are x, rounded and clipped, and 1 / rms(x) is that of x8. Tokens have an
    rms of 0.3 to 100. A stream that is too wide for shared memory is refused."""
    x = (normal(0, (256, 384)) * spread(256)).at[7, 5].set(1e4).astype("bfloat16")
    c = T.PRESETS["record"]
    want = jnp.clip(x / 16, -448, 448).astype(T.E4)
    inverse = jax.lax.rsqrt(jnp.square(want.astype("float32")).mean(axis=1) + 2.0**-23) / 16
    for kernels, transposed in ("mosaic", True), ("mosaic", False), ("xla", True):
        changed = dataclasses.replace(c, kernels=kernels)
        with interpreter():
            x8, got, x8_T = jax.block_until_ready(T.stream_in_fp8(x, transposed, changed))
        assert (x8 == want).all(), kernels
        compare(f"1 / rms of {kernels}", got / inverse, jnp.ones(256), (1e-6, 1e-6))
        assert (x8_T == want.T).all() if transposed else x8_T is None, kernels
    with pytest.raises(ValueError, match="no kernel for 64 tokens x 2048 in FP8"):
        T.inverse_rms_and_transpose(jnp.zeros((64, 2048), T.E4))


# ---- The layer -----------------------------------------------------------------------------------
def plain_mlp(x, fc, proj):
    """The layer in float32."""
    h = x * jax.lax.rsqrt(jnp.square(x).mean(axis=-1, keepdims=True) + 2.0**-23)
    return jnp.square(jax.nn.relu(h @ fc.T)) @ proj


def check_mlp(T, mlp_fp8: int, N: int = 256, D: int = 384, F: int = 1024) -> None:
    """mlp() and its gradients against float32, and against the same in XLA."""
    x = (normal(3, (1, N, D)) * spread(N)).astype("bfloat16")
    fc = normal(5, (F, D), D**-0.5, "float32")
    proj = normal(6, (F, D), F**-0.5, "float32")
    with jax.default_matmul_precision("highest"):
        y, vjp = jax.vjp(plain_mlp, *as_float32(x, fc, proj))
        # With a part that is parallel to y, the radial part of the norm's gradient is large.
        dy = (1e-3 * (y + normal(4, y.shape))).astype("bfloat16")
        exact = y, *vjp(*as_float32(dy))
    results = {}
    for kernels in "mosaic", "xla":
        c = dataclasses.replace(T.PRESETS["record"], D=D, F=F, H=D // 128 * 2, kernels=kernels,
                                mlp_fp8=mlp_fp8)  # fmt: skip

        def run(x, fc, proj, c=c):
            return T.mlp(x, 0, {"mlp": {0: (fc, proj)}}, c)

        with interpreter():
            y, vjp = jax.vjp(run, x, fc, proj)
            results[kernels] = jax.block_until_ready((y, *vjp(dy)))
    to_exact = SUMS_OF_FP8 if mlp_fp8 else SUMS_OF_BF16
    # XLA rounds twice, to bfloat16 and to FP8: every thirtieth number is another FP8 number.
    to_xla = (0.1, 0.035) if mlp_fp8 else SUMS_OF_BF16
    names = "y", "dx", "dfc", "dproj"
    for name, kernel, xla, true in zip(names, *results.values(), exact, strict=True):
        if name == "dx":  # it goes as 1 / rms(x), so tokens with a small rms would hide the others
            kernel, xla, true = (dx * spread(N) for dx in (kernel, xla, true))
        compare(f"{name} of kernels", kernel, true, to_exact)
        compare(f"{name} of XLA", xla, true, to_exact)
        compare(f"{name} of both", kernel, xla, to_xla)


def check_mlp_bf16(T) -> None:
    """The layer in bfloat16, at two shapes."""
    check_mlp(T, 0)
    check_mlp(T, 0, N=384, D=256, F=512)


def check_mlp_fp8_forward(T) -> None:
    """With FP8 in the forward pass."""
    check_mlp(T, 1)


def check_mlp_fp8(T) -> None:
    """With FP8 in both passes."""
    check_mlp(T, 2)


CHECKS = [check_bf16_products, check_fp8_products, check_stream, check_mlp_bf16,
          check_mlp_fp8_forward, check_mlp_fp8]  # fmt: skip
