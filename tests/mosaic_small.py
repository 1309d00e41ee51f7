"""Compiles a small Mosaic kernel for an H100, and prints what compile_8xh100.py finds out of it.

test_compile_8xh100.py runs this file in a process of its own, because it changes what JAX knows of
the GPU."""

import json
import shutil

import compile_8xh100
import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.sharding import Mesh, NamedSharding, PartitionSpec

SIZE = 64  # of a tile, which is a block's


def mosaic_product(a_g, b_g, out_g):
    """a b^T of (M, SIZE) and (N, SIZE)."""
    rows = pl.ds(SIZE * jax.lax.axis_index("row"), SIZE)
    columns = pl.ds(SIZE * jax.lax.axis_index("column"), SIZE)

    def run(a_s, b_s, loaded):
        plgpu.copy_gmem_to_smem(a_g.at[rows], a_s, loaded)
        plgpu.copy_gmem_to_smem(b_g.at[columns], b_s, loaded)
        plgpu.barrier_wait(loaded)

        def multiply(acc):
            plgpu.wgmma(acc, a_s, b_s.transpose((1, 0)))
            return acc[...]

        numbers = pl.run_scoped(multiply, plgpu.ACC((SIZE, SIZE), jnp.float32))
        a_s[...] = numbers.astype(jnp.bfloat16)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(a_s, out_g.at[rows, columns])
        plgpu.wait_smem_to_gmem(0)

    layout = plgpu.TilingTransform((8, SIZE)), plgpu.SwizzleTransform(2 * SIZE)
    tile = plgpu.SMEM((SIZE, SIZE), jnp.bfloat16, transforms=layout)
    pl.run_scoped(run, tile, tile, plgpu.Barrier(num_arrivals=2))


def compile_product(M: int, N: int, mesh: Mesh):
    """Compiles the product of (M, SIZE) and (N, SIZE)."""
    everywhere = PartitionSpec()
    sharding = NamedSharding(mesh, everywhere)
    a_M = jax.ShapeDtypeStruct((M, SIZE), jnp.bfloat16, sharding=sharding)
    b_N = jax.ShapeDtypeStruct((N, SIZE), jnp.bfloat16, sharding=sharding)
    product = plgpu.kernel(
        mosaic_product,
        out_type=jax.ShapeDtypeStruct((M, N), jnp.bfloat16),
        grid=(M // SIZE, N // SIZE),
        grid_names=("row", "column"),
    )
    specs = dict(in_specs=everywhere, out_specs=everywhere, check_vma=False)
    return jax.jit(jax.shard_map(product, mesh=mesh, **specs)).lower(a_M, b_N).compile()


if __name__ == "__main__":
    compile_8xh100.prepare("record")
    found = []
    for M in (128, 192, 128):  # the last one has been compiled by then
        compiled = compile_8xh100.compile_for_h100(compile_product, M, 256, devices=1)
        (call,) = compile_8xh100.mosaic.calls(compiled.program)
        kernel = compile_8xh100.KERNELS[call.instruction.kernel_hash()]
        found.append(kernel._asdict() | kernel.counts._asdict())
    shutil.rmtree(compile_8xh100.DUMP)
    print(json.dumps(found))
