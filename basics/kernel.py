"""A kernel for Hopper GPUs: a product whose threads also compute the relu^2 that follows it.

Run     ./run.sh basics/kernel.py [--forget WAIT]
Look    at `kernel_body`, and for every wait: what would be read or overwritten too early without it
Dims    y = relu(a b^T)^2, (M, N), sums over K; _g is in global memory, the GPU's, _s in shared
Source  Writing Mosaic GPU kernels with Pallas, in the documentation of JAX
In train_gpt.py  `mlp` leaves both to XLA; records/ideas/fused_mlp.patch adds kernels

A block, 128 threads on one SM of the GPU, computes a tile of y in steps of 64 of K. For every step,
TMA copies the operands from global to shared memory, and tensor cores add their product to
registers. Both work beside the threads, which must wait. On a laptop, an interpreter finds races.
"""

import functools
import linecache
import logging
import re
import sys
from argparse import ArgumentParser, RawDescriptionHelpFormatter

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

M, N = 128, 256  # of y
TILE_M, TILE_N = 64, 128  # of y, in a block
K, STEP = 256, 64  # of both operands, and in a step
WAITS = ("barrier_wait", "commit_smem")  # that can be forgotten


def relu2_product(a_MK: Array, b_NK: Array) -> Array:
    """What XLA makes two kernels of: one writes the product to memory, the other one reads it."""
    return jnp.square(jax.nn.relu(a_MK @ b_NK.T))


# ---- The same in one kernel ----------------------------------------------------------------------
def kernel_body(a_g, b_g, y_g, a_s, b_s, y_s, copied, forget: str) -> None:
    """What the threads of a block run together."""
    rows = pl.ds(lax.axis_index("m") * TILE_M, TILE_M)
    columns = pl.ds(lax.axis_index("n") * TILE_N, TILE_N)

    def multiply(acc):
        def multiply_step(k, _):
            step = pl.ds(k * STEP, STEP)
            plgpu.copy_gmem_to_smem(a_g.at[rows, step], a_s, copied)
            plgpu.copy_gmem_to_smem(b_g.at[columns, step], b_s, copied)
            if forget != "barrier_wait":
                plgpu.barrier_wait(copied)  # both copies have arrived
            plgpu.wgmma(acc, a_s, b_s.transpose((1, 0)))
            plgpu.wgmma_wait(0)  # all of it: a_s and b_s have been read, and may be overwritten

        lax.fori_loop(0, K // STEP, multiply_step, None)
        return acc[...]

    z = pl.run_scoped(multiply, plgpu.ACC((TILE_M, TILE_N), jnp.float32))
    y_s[...] = jnp.square(jnp.maximum(z, 0)).astype(y_s.dtype)
    if forget != "commit_smem":
        plgpu.commit_smem()  # all threads have written their part of y_s, where TMA can read it
    plgpu.copy_smem_to_gmem(y_s, y_g.at[rows, columns])
    plgpu.wait_smem_to_gmem(0)  # y_s has left, so the block may end


def fused_relu2_product(a_MK: Array, b_NK: Array, forget: str = "") -> Array:
    """`relu2_product` by the kernel, without one of its waits."""

    def shared(*shape: int):
        """Shared memory, with rows in pieces that are swapped (swizzled) as TMA and wgmma want."""
        swizzle = plgpu.find_swizzle(16 * shape[-1])  # from the bits of a row
        layout = plgpu.TilingTransform((8, swizzle // 2)), plgpu.SwizzleTransform(swizzle)
        return plgpu.SMEM(shape, jnp.bfloat16, transforms=layout)

    tiles = dict(a_s=shared(TILE_M, STEP), b_s=shared(TILE_N, STEP), y_s=shared(TILE_M, TILE_N))
    run = plgpu.kernel(
        functools.partial(kernel_body, forget=forget),
        out_type=jax.ShapeDtypeStruct((M, N), jnp.bfloat16),
        grid=(M // TILE_M, N // TILE_N),
        grid_names=("m", "n"),
        scratch_types=tiles | {"copied": plgpu.Barrier(num_arrivals=2)},  # opens after two copies
    )
    return run(a_MK, b_NK)


# ---- Plumbing ------------------------------------------------------------------------------------
def check(what: str, right: bool) -> None:
    print("ok   " if right else "WRONG", what)
    if not right:
        sys.exit(1)


def main() -> None:
    jax.config.update("jax_platforms", "cpu")
    cli = ArgumentParser(description=__doc__, formatter_class=RawDescriptionHelpFormatter)
    cli.add_argument("--forget", choices=WAITS, default=WAITS[0], help="leave out this wait")
    forget = cli.parse_args().forget
    if jax.__version_info__ < (0, 12):
        sys.exit(f"kernel.py needs jax 0.12, and so Python 3.12; this is jax {jax.__version__}")
    logging.disable()  # the traceback of a race
    rng = np.random.default_rng(0)
    a, b = (jnp.asarray(rng.normal(size=(rows, K)), jnp.bfloat16) for rows in (M, N))
    exact = relu2_product(np.float64(a), np.float64(b))
    options = plgpu.InterpretGPUParams(detect_races=True, num_tma_threads_per_device=64)
    with plgpu.force_gpu_interpret_mode(options):
        for name, function in ("XLA", relu2_product), ("the kernel", fused_relu2_product):
            error = np.abs(np.float64(function(a, b)) - exact).max() / exact.max()
            check(f"by {name}: error {error:.1e} of the largest number", error < 0.005)
        try:
            fused_relu2_product(a, b, forget).block_until_ready()
            found = []
        except jax.errors.JaxRuntimeError as error:
            found = re.findall(r"(read|write) of .*kernel\.py:(\d+)", str(error))
    check(f"without {forget}, two accesses to the same memory race:", len(found) == 2)
    for kind, line in found:
        print(f"     {kind:5} by line {line}: {linecache.getline(__file__, int(line)).strip()}")


if __name__ == "__main__":
    main()
