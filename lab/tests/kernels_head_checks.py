"""What the kernels of fused_head must compute, and faults that must be noticed. They are compared
with formulas in float64, and head_loss() with kernels and without."""

import dataclasses

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from lab.tests.interpreted import errors, interpreter, load

HEAD = dict(D=128, H=2, vocab=1200, head_chunk=64, batch=8, kernels="mosaic")
HEAD |= dict(head_forward="float8_e4m3fn", head_backward="float8_e5m2", compute="bfloat16")
N = 128  # tokens: two blocks, or two chunks of one
V = 1280  # columns: ten tiles go through four slots of shared memory
RECORD = 23, 5, 7.5  # the softcap


def config(module, **changes):
    """The record's head, with fewer channels and tokens."""
    return dataclasses.replace(module.PRESETS["record"], **HEAD | changes)


def normal(seed: int, shape: tuple, scale: float = 1.0) -> np.ndarray:
    """Random numbers in bfloat16."""
    x = scale * np.random.default_rng(seed).normal(size=shape)
    return x.astype(ml_dtypes.bfloat16)


def some_targets(J: int, tokens: int = N) -> np.ndarray:
    """(tokens, J): some are -1, which is none, and some tokens have a target twice."""
    targets = np.random.default_rng(1).integers(0, HEAD["vocab"], (tokens, J)).astype(np.int32)
    targets[::5, -1] = -1
    targets[3::7, -1] = targets[3::7, 0]
    return targets


def close(got, want, tolerance: float) -> None:
    """Fails unless the largest error, relative to the largest value, is within the tolerance."""
    got, want = np.asarray(got, "f8"), np.asarray(want, "f8")
    assert got.shape == want.shape and np.isfinite(got).all()
    error = np.abs(got - want).max() / np.abs(want).max()
    assert error <= tolerance, f"{error:.1e}, at most {tolerance:.1e}"


# ---- The kernels ---------------------------------------------------------------------------------
def capped(z, softcap=RECORD) -> np.ndarray:
    """The logits in float64, after the softcap."""
    cap, shift, width = softcap
    return cap / (1 + np.exp(-(np.asarray(z, "f8") + shift) / width))


def sums(s, pointer: int) -> np.ndarray:
    """exp(s) and its sum over the tokens of the vocabulary; with a pointer, others are 0."""
    exp = np.exp(s)
    if pointer:
        exp[:, HEAD["vocab"] :] = 0
    return exp, exp.sum(axis=1)


def check_sums(module, pointer: int, columns: int = V, softcap=RECORD) -> None:
    """sum_of_exp() is the formula."""
    z = normal(0, (N, columns), 9.0)
    with interpreter():
        got = np.asarray(module.sum_of_exp(jnp.asarray(z), config(module, pointer=pointer)))
    assert got.dtype == np.float32
    close(got, sums(capped(z, softcap), pointer)[1], 2e-6)


def check_logits(module, pointer: int, tokens: int, columns: int, D: int) -> None:
    """The 8 bits of logits_in_fp8() are the formula, rounded, of which a few round to a neighbor.
    The sums are not rounded."""
    x = normal(7, (tokens, D), 16.0).astype(ml_dtypes.float8_e4m3fn)
    w = normal(8, (columns, D), 64 * 9 * D**-0.5).astype(ml_dtypes.float8_e4m3fn)
    with interpreter():
        c = config(module, pointer=pointer, logits_fp8=1)
        padded = jnp.pad(jnp.asarray(w), ((0, -columns % 256), (0, 0)))
        arrays = module.logits_in_fp8(jnp.asarray(x), padded, columns, c)
        got, total = (np.asarray(array) for array in arrays)
    s = capped(x.astype("f8") @ w.astype("f8").T / 1024)
    want = np.float32(s - 20).astype(got.dtype)
    assert s.min() < 1 and s.max() > 22 and got.dtype == ml_dtypes.float8_e4m3fn
    close(got, want, 2**-4)
    assert (got == want).mean() > 0.999
    close(total[:, 0], sums(s, pointer)[1], 5e-6)


def check_gradient(module, pointer: int, J: int, columns: int = V, logits_fp8: int = 0) -> None:
    """gradient_in_fp8() is the formula, rounded, and clipped where it is too large for FP8. A few
    numbers round to a neighbor. With a pointer, there is one more target."""
    z = normal(2, (N, columns), 9.0)
    s = capped(z)
    if logits_fp8:
        z = np.float32(s - 20).astype(ml_dtypes.float8_e4m3fn)
        s = z.astype("f8") + 20
    targets = some_targets(J)
    weights = 40 * np.random.default_rng(3).normal(size=(N, J)).astype("f4")  # of both signs
    if pointer:
        targets[:, 0] = HEAD["vocab"]  # the slot
    weights[7, 0] = 3e5
    exp, total = sums(s, pointer)
    softmax_weight = np.float32(weights.sum(axis=1) / total)[:, None]
    with interpreter():
        c = config(module, pointer=pointer, logits_fp8=logits_fp8)
        arrays = [jnp.asarray(x) for x in (z, softmax_weight, targets, weights)]
        got, transposed = (np.asarray(x) for x in module.gradient_in_fp8(*arrays, c))
    dloss_ds = softmax_weight * exp
    for j in range(J):
        dloss_ds -= weights[:, j, None] * (np.arange(columns) == targets[:, j, None])
    limit = float(ml_dtypes.finfo(got.dtype).max)
    want = np.clip(dloss_ds * s * (23 - s), -limit, limit).astype("f4")
    assert np.abs(want).max() == limit and got.dtype == ml_dtypes.float8_e5m2
    close(got, want, 2**-3)
    assert (got == want.astype(got.dtype)).mean() > 0.999
    np.testing.assert_array_equal(got.T, transposed)


def check_other_sizes(module) -> None:
    """Logits of sizes that do not fit are refused."""
    for tokens, columns in (96, 1280), (128, 1200):
        z = jnp.zeros((tokens, columns), jnp.bfloat16)
        message = f"no kernel for logits of {tokens} tokens x {columns}: choose --kernels xla"
        with pytest.raises(ValueError, match=message), interpreter():
            module.sum_of_exp(z, config(module))


# ---- The loss ------------------------------------------------------------------------------------
def formula(x, w, targets, weights_J, votes, pointer: int):
    """The loss in float32, with the mixture of arXiv:1609.07843 if there is a pointer."""
    s = 23 * jax.nn.sigmoid((jnp.dot(x, w.T, precision="highest") + 5) / 7.5)
    tokens = HEAD["vocab"] if pointer else V
    log_total = jax.nn.logsumexp(s[:, :tokens], axis=1, keepdims=True)
    log_p = jnp.take_along_axis(s, jnp.maximum(targets, 0), axis=1) - log_total
    if pointer:
        right, every, bias = votes.T
        share = jax.nn.sigmoid(s[:, HEAD["vocab"]] - log_total[:, 0] + bias)
        mixed = jnp.exp(log_p[:, 0]) * (1 - share * every) + share * right
        log_p = log_p.at[:, 0].set(jnp.log(mixed))
    return -(jnp.where(targets < 0, 0, weights_J) * log_p).sum()


def loss_and_gradients(module, c, kinds: list[dict], tokens: int = N) -> list[list]:
    """The loss, dx, dw and with a pointer the gradient of votes, by head_loss() for every kind of
    changes of c, and then by the formula."""
    x = jnp.asarray(normal(4, (tokens, c.D)))
    w = normal(5, (V, c.D), 0.3).astype("f4")
    targets = jnp.asarray(some_targets(3, tokens))
    weights_J = jnp.float32([1.0, 0.5, 0.25])
    votes = np.random.default_rng(6).uniform(0, 0.5, (tokens, 3)).cumsum(axis=1).astype("f4")
    variables = (0, 1, 4) if c.pointer else (0, 1)
    found = []
    for changes in kinds:
        run = jax.jit(jax.value_and_grad(module.head_loss, variables), static_argnums=5)
        with interpreter():
            changed = dataclasses.replace(c, **changes)
            arrays = run(x, w, targets, weights_J, votes, changed)
            found.append(jax.block_until_ready(jax.tree.leaves(arrays)))
    value = jax.value_and_grad(formula, variables)
    exact = value(x.astype("f4"), w, targets, weights_J, votes, c.pointer)
    return [*found, jax.tree.leaves(exact)]


def check_loss(module, pointer: int, **changes) -> None:
    """Loss, dx, dw and the gradient of votes are those of the formula, to the precision of FP8, and
    those without kernels to that of float32 sums in another order."""
    c = config(module, pointer=pointer, **changes)
    results = loss_and_gradients(module, c, [{}, {"kernels": "xla"}])
    tolerances = (2e-3, 0.13, 0.13, 0.02)[: len(results[0])]  # of the formats
    for got, plain, want, tolerance in zip(*results, tolerances, strict=True):
        close(got, want, tolerance)
        close(got, plain, 1e-3)


def check_loss_of_8_bits(module, pointer: int) -> None:
    """With 8 bits of the logits, loss and gradient of votes are what they were. Those of x and w
    have other errors, but these are hardly larger. There are two chunks."""
    c = config(module, pointer=pointer, D=256, head_chunk=128)
    results = loss_and_gradients(module, c, [{"logits_fp8": 1}, {}], tokens=256)
    limits = (3e-5, 0.05, 0.05, 3e-3)[: len(results[0])]
    for eight, sixteen, exact, limit in zip(*results, limits, strict=True):
        change = errors(eight, sixteen)[1]
        assert change < limit, f"{change:.1e}, at most {limit:.1e}"
        noise, before = errors(eight, exact)[1], errors(sixteen, exact)[1]
        assert noise < 1.03 * before, f"{noise:.4f}, with 16 bits {before:.4f}"


def check_sum(T) -> None:
    """With and without a pointer, at two sizes, and with another softcap."""
    for pointer, columns in (4, V), (0, V), (0, 1152):
        check_sums(T, pointer, columns)
    if T is load("fused_head"):
        check_sums(load("fused_head symmetric_softcap"), 0, softcap=(30, 0, 7.5))


def check_gradients(T) -> None:
    """With and without a pointer, at two sizes, with one target and several."""
    for pointer, J, columns in (4, 3, V), (0, 3, V), (0, 1, 1152):
        check_gradient(T, pointer, J, columns)
    check_gradient(T, 0, 2, logits_fp8=1)


def check_losses(T) -> None:
    """The loss with a pointer, without, and without FP8."""
    check_loss(T, 4)
    check_loss(T, 0)
    check_loss(T, 0, head_forward="bfloat16", head_backward="bfloat16")


def check_logits_in_fp8(T) -> None:
    """At two shapes, which use every slot of the three blocks again: with a pointer, and with a
    tile of padding."""
    check_logits(T, 4, 256, V, 384)
    check_logits(T, 0, 128, 1152, 640)


def check_losses_of_8_bits(T) -> None:
    """With a pointer and without."""
    check_loss_of_8_bits(T, 4)
    check_loss_of_8_bits(T, 0)


CHECKS = [check_sum, check_gradients, check_losses, check_other_sizes, check_logits_in_fp8]
CHECKS += [check_losses_of_8_bits]
