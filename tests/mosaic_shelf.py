"""Compiles the kernels of records/ideas/ for an H100, at the record's shapes, and prints what
compile_8xh100.py finds out of each. test_compile_8xh100.py runs this file in a process of its own.
"""

import dataclasses
import json
import shutil

import compile_8xh100
import idea
import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

ATTEMPTS = ["fused_mlp", "fused_head", "fused_qkv"]
N = 49152  # tokens of a sequence in the longest stage
EVERYWHERE = PartitionSpec()


def functions(c) -> dict:
    """Functions that run the kernels of every attempt, and the shapes of their arguments."""
    train_gpt = compile_8xh100.train_gpt
    layers = [train_gpt.Layer(train_gpt.LONG), train_gpt.Layer(train_gpt.SHORT, paired_heads=True)]
    J = 4  # targets in stage 0, for which registers just suffice
    targets = jnp.zeros((c.head_chunk, J), jnp.int32)
    weights = jnp.ones(J)

    def mlp(x, fc, proj):
        return train_gpt.mlp(x, 0, {"mlp": {0: (fc, proj)}}, c)

    def head(x, w):
        return train_gpt.head_loss(x, w, targets, weights, None, c)

    def attention(x, qk, vo):
        two = dataclasses.replace(c, layers=tuple(layers), mudd_head=())
        pos = train_gpt.positions(jnp.zeros((1, N), bool), two, 0)
        w = {"qk": [tuple(qk)] * 2, "vo": [tuple(vo)] * 2, "vo_lambdas": jnp.ones((2, 2))}
        y = 0
        for i in range(2):
            y += train_gpt.attention(x, [], i, w, {}, pos, two)
        return y

    stream = (1, N, c.D)
    return {
        mlp: [stream, (c.F, c.D), (c.F, c.D)],
        head: [(c.head_chunk, c.D), (train_gpt.padded_vocab(c), c.D)],
        attention: [stream, (2, c.D, c.D), (2, c.D, c.D)],
    }


def compile_gradient(function, shapes: list[tuple], mesh: Mesh):
    """Compiles a function and its gradient."""

    def run(*arrays):
        y, vjp = jax.vjp(function, *arrays)
        return y, vjp(jnp.ones_like(y))

    sharding = NamedSharding(mesh, EVERYWHERE)
    arrays = [jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=sharding) for shape in shapes]
    specs = dict(in_specs=EVERYWHERE, out_specs=EVERYWHERE, check_vma=False)
    return jax.jit(jax.shard_map(run, mesh=mesh, **specs)).lower(*arrays).compile()


if __name__ == "__main__":
    compile_8xh100.use(idea.copy_of(ATTEMPTS).decode())
    record = compile_8xh100.prepare("record")
    for fp8 in 0, 1, 2:
        c = dataclasses.replace(record, mlp_fp8=fp8, qkv_fp8=fp8, logits_fp8=int(fp8 == 2))
        for function, shapes in functions(c).items():
            compile_8xh100.compile_for_h100(compile_gradient, function, shapes, devices=1)
    shutil.rmtree(compile_8xh100.DUMP)
    print(json.dumps([kernel._asdict() for kernel in compile_8xh100.KERNELS.values()]))
