"""Our model and optimizers against numbers computed with record 21's original PyTorch modules.

The fixture is `tests/record21_small.npz`, or the file that GOLDEN_NPZ names; every size is read
from it. In float32, so that the comparison is of formulas and not of rounding.
"""

import dataclasses
import os
import re
from pathlib import Path

import jax
import numpy as np
import pytest
from jax import P

import train_gpt
from tests.tools import make_mesh

PATH = os.environ.get("GOLDEN_NPZ", Path(__file__).with_name("record21_small.npz"))
GOLDEN = np.load(PATH, allow_pickle=False)


def config() -> train_gpt.Config:
    meta = {key.removeprefix("meta/"): GOLDEN[key].item() for key in GOLDEN if "meta/" in key}
    F, D = GOLDEN["param/blocks.0.mlp.c_fc.weight"].shape
    assert meta["heads"] * meta["head_dim"] == D
    T = GOLDEN["tokens"].shape[1] - 1
    return dataclasses.replace(
        train_gpt.Config(), D=D, H=meta["heads"], F=F, T=T, batch=1, head_chunk=T // 4,
        vocab=len(GOLDEN["param/embed.weight"]), eot=meta["eot"], steps=meta["schedule_steps"],
        cooldown=meta["cooldown"], compute="float32", head_forward="float32",
        head_backward="float32", attention="xla",
    )  # fmt: skip


C = config()
ATTENDING = [i for i, (window, _, _) in enumerate(C.layers) if window != "-"]
WITH_VALUES = [i for i, (_, table, _) in enumerate(C.layers) if table is not None]


def ours(prefix: str) -> dict[str, np.ndarray]:
    """The fixture's arrays under our names: [matrices, R, C] banks, proj transposed."""
    get = lambda name: GOLDEN[f"{prefix}/{name}"]
    attn = [
        np.concatenate([get(f"blocks.{i}.attn.qkv_w"), get(f"blocks.{i}.attn.c_proj.weight")[None]])
        for i in ATTENDING
    ]
    mlp = [
        np.stack([get(f"blocks.{i}.mlp.c_fc.weight"), get(f"blocks.{i}.mlp.c_proj.weight").T])
        for i in range(len(C.layers))
    ]
    tables = len([key for key in GOLDEN if key.startswith("param/value_embeds")])
    return dict(
        embed=get("embed.weight"),
        values=np.stack([get(f"value_embeds.{k}.weight") for k in range(tables)]),
        attn=np.concatenate(attn),
        mlp=np.concatenate(mlp),
        head=get("lm_head.weight"),
        skip_weights=get("skip_weights"),
        resid_lambdas=np.stack([get(f"blocks.{i}.lambdas")[0] for i in range(len(C.layers))]),
        x0_lambdas=np.stack([get(f"blocks.{i}.lambdas")[1] for i in range(len(C.layers))]),
        v_lambdas=np.stack([get(f"blocks.{i}.attn.lambdas")[0] for i in ATTENDING]),
        ve_lambdas=np.stack([get(f"blocks.{i}.attn.lambdas")[1] for i in WITH_VALUES]),
    )


def padded(params: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    out = {}
    for name, row in train_gpt.param_table(C).items():
        stored = row.stored_shape
        shape = (stored[0] * stored[1], *stored[2:]) if row.optimizer == "muon" else stored
        array = np.zeros(shape, np.float32)
        array[tuple(map(slice, row.shape))] = params[name]
        out[name] = array.reshape(stored)
    return out


def on_one_device(function):
    """Run under shard_map on a mesh of one device, where the collectives have nothing to do."""
    return jax.jit(
        jax.shard_map(function, mesh=make_mesh(1), in_specs=P(), out_specs=P(), check_vma=False)
    )


def relative(a: np.ndarray, b: np.ndarray) -> float:
    return float(np.linalg.norm(a - b) / np.linalg.norm(b))


def of_the_loss(transform, window: int):
    """The loss of the first batch, or its value and gradient."""
    loss = transform(lambda w, tokens: train_gpt.loss_fn(w, tokens, C, window))
    function = on_one_device(lambda params, tokens: loss(train_gpt.gather(params, C), tokens))
    return function(padded(ours("param")), GOLDEN["tokens"][:1])


def test_every_array_of_the_fixture_is_used():
    unused = {layer for layer in ATTENDING if layer not in WITH_VALUES}  # their second lambda
    count = sum(GOLDEN[key].size for key in GOLDEN if key.startswith("param/")) - len(unused)
    assert sum(array.size for array in ours("param").values()) == count
    assert count == sum(int(np.prod(row.shape)) for row in train_gpt.param_table(C).values())


WINDOWS = [int(re.search(r"\d+$", key)[0]) for key in GOLDEN if key.startswith("loss_mean/")]


@pytest.mark.parametrize("blocks", WINDOWS)
def test_loss(blocks):
    loss = of_the_loss(lambda loss: loss, 128 * blocks)
    assert float(loss) == pytest.approx(GOLDEN[f"loss_mean/window_blocks={blocks}"], abs=1e-5)


def test_every_gradient():
    _, grads = of_the_loss(jax.value_and_grad, 128 * GOLDEN["meta/window_blocks"].item())
    errors, rows = {}, train_gpt.param_table(C)
    for name, expected in ours("grad").items():
        got = np.asarray(grads[name])[tuple(map(slice, rows[name].shape))]
        for i, (a, b) in enumerate(zip(got, expected, strict=True)):
            errors[name, i] = relative(a, b) if np.any(b) else float(np.abs(a).max())
    worst = max(errors, key=errors.get)
    assert errors[worst] < 1e-3, (worst, errors[worst])


def test_five_updates():
    window = 128 * GOLDEN["meta/window_blocks"].item()
    function = lambda state, tokens: train_gpt.train_step(state, tokens[None], C, window)
    step = on_one_device(function)
    params = padded(ours("param"))
    state = train_gpt.State(params, train_gpt.optimizer(C).init(params), params["embed"])
    for tokens, expected in zip(
        GOLDEN["tokens"], GOLDEN["trajectory/mean_loss_before_step"], strict=True
    ):
        state, loss = step(state, tokens[None])
        assert float(loss) == pytest.approx(expected, rel=1e-4)
    moved = {}
    for name, ours_ in train_gpt.unpad(state.params, C).items():
        before, after = ours("param")[name], ours("trajectory/final")[name]
        for i in range(len(ours_)):
            assert np.any(after[i] != before[i])
            # against the distance travelled: the weights themselves would hide a lost update
            moved[name, i] = relative(ours_[i] - before[i], after[i] - before[i])
    worst = max(moved, key=moved.get)
    assert moved[worst] < 1e-3, (worst, moved[worst])


@pytest.mark.parametrize("case", ["square", "wide", "tall"])
def test_newton_schulz(case):
    i = ["square", "wide", "tall"].index(case)
    got = train_gpt.orthogonalize(GOLDEN[f"newton_schulz/in{i}"][None], "float32")[0]
    np.testing.assert_allclose(got, GOLDEN[f"newton_schulz/out{i}"], atol=1e-5)
