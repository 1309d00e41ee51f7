"""The exercises of basics/tensor_parallel.py have these answers."""

import jax
import numpy as np
import tensor_parallel as tp
from jax import P


def arguments():
    rng = np.random.default_rng(1)
    noise = lambda *shape: rng.normal(size=shape).astype("f4")
    w = {name: noise(*shape) / 8 for name, shape in tp.SHAPES.items()}
    return w, noise(tp.B, tp.T, tp.D), noise(tp.B, tp.T, tp.D)


def test_exercise_1_attention_whole_on_every_device():
    args = arguments()
    split = tp.SPLIT | dict(qkv=P(), out=P())
    _, forward, both = tp.run(2, split, args, jax.device_get(jax.jit(tp.step)(*args)))
    sums = [("all-reduce over model", tp.B // 4 * tp.T * tp.D)]  # the MLP's, no more
    assert [exchange for exchange in forward if "model" in exchange[0]] == sums
    assert [exchange for exchange in both if "model" in exchange[0]] == 2 * sums
