"""basics/tensor_parallel.py runs, finds faults that people make, and its exercises' answers."""

import jax
import jax.numpy as jnp
import numpy as np
import tensor_parallel as tp
from jax import P

from tests.tools import basic


def test_it_runs(tmp_path):
    ran = basic(tmp_path, "tensor_parallel")
    assert (ran.returncode, ran.stderr) == (0, "")
    assert ran.stdout.count("ok   ") == 11 and "WRONG" not in ran.stdout
    rows = [line.split()[-3:] for line in ran.stdout.splitlines()[-4:]]
    # By arithmetic: on a ring of p devices each sends (p - 1) / p, and twice that in an all-reduce.
    assert rows[0] == ["196.6", "344.1", "0.0"]
    assert rows[2] == ["49.2", "49.2", "196.6"]
    assert rows[3] == ["49.2", "49.2", "641.3"]


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


def test_exercise_2_qkv_as_one_matrix(monkeypatch):
    def block(w, x):
        q, k, v = jnp.split(tp.norm(x) @ w["qkv"], 3, axis=-1)
        heads = lambda a: a.reshape(tp.B, tp.T, tp.H, tp.D // tp.H)
        y = jax.nn.dot_product_attention(heads(q), heads(k), heads(v), is_causal=True)
        x = x + jnp.einsum("BTHK,HKD->BTD", y, w["out"])
        return x + jnp.square(jax.nn.relu(tp.norm(x) @ w["up"])) @ w["down"]

    w, x, target = arguments()
    whole = (tp.D, 3 * tp.D)
    loss, (dw, dx) = jax.device_get(jax.jit(tp.step)(w, x, target))  # of the file's own block
    expected = loss, (dw | dict(qkv=dw["qkv"].reshape(whole)), dx)
    loss_fn = lambda w, x, target: jnp.square(block(w, x) - target).mean()
    monkeypatch.setattr(tp, "loss_fn", loss_fn)
    monkeypatch.setattr(tp, "step", jax.value_and_grad(loss_fn, argnums=(0, 1)))
    args = w | dict(qkv=w["qkv"].reshape(whole)), x, target
    _, forward, both = tp.run(2, tp.SPLIT | dict(qkv=P(None, "model")), args, expected)
    for found, backward in (forward, False), (both, True):
        assert set(tp.theory(2, backward)) <= set(found)
        # Other collectives bring the parts of each head together.
        assert any("all-reduce" not in collective for collective, _ in found)
