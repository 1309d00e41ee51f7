"""basics/gpt2.py: it runs, its checks catch faults, and its model is OpenAI's, in float64."""

import math
import os
import urllib.request
from pathlib import Path

import gpt2
import huggingface_hub
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from safetensors.numpy import load_file, save_file

from tests.tools import basic, write_shard

SMALL = gpt2.Config(L=3, H=2, D=32, T=24, V=61, compute="float32")
QUICK = "--steps", "8", "--val_every", "8", "--val_tokens", "4096"


def test_it_trains_and_samples(tmp_path):
    done = basic(tmp_path, "gpt2", *QUICK, "--accumulate", "2", "--prompt", "def f(")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.count("ok   ") == 3 and "tokens:16384 val_loss:" in done.stdout
    assert "\ndef f(" in done.stdout and len(done.stdout.partition("\ndef f(")[2]) >= 90


FAULTS = {
    ("is_causal=True", "is_causal=False"): "nothing before",
    ('"h.attn.c_attn.bias":   ((L, 3, D)', '"h.attn.c_attn.bias":   ((L, 1, D)'): "parameters",
    ("optimizer(args.lr", "optimizer(-args.lr"): "the loss falls by -",
}


@pytest.mark.parametrize(("plant", "says"), FAULTS.items(), ids=FAULTS.values())
def test_a_planted_fault_is_found(tmp_path, plant, says):
    done = basic(tmp_path, "gpt2", *QUICK, plant=plant)
    assert done.returncode == 1 and done.stderr == ""
    assert done.stdout.splitlines()[-1].startswith("WRONG") and says in done.stdout.splitlines()[-1]


@pytest.mark.parametrize(
    ("size", "says"), [(0, "train_000001.bin is no whole"), (500, "val shard")]
)
def test_bad_input_gets_a_line(tmp_path, size, says):
    """A shard that was cut off, and one alone."""
    shard = write_shard(tmp_path / "a_train_000001.bin", range(500))
    os.truncate(shard, shard.stat().st_size - 500 + size)
    done = basic(tmp_path, "gpt2", "--data", str(tmp_path))
    assert done.returncode == 1 and done.stderr.count("\n") == 1 and says in done.stderr


# ---- OpenAI's model in NumPy, from its file ------------------------------------------------------
def reference(w: dict[str, np.ndarray], tokens: np.ndarray, H: int) -> np.ndarray:
    """Logits (T, V) in float64: one sequence, a loop over layers and heads."""
    w = {name: np.float64(p) for name, p in w.items()}

    def normal(x, name):
        x = (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + 1e-5)
        return x * w[f"{name}.weight"] + w[f"{name}.bias"]

    linear = lambda x, name: x @ w[f"{name}.weight"] + w[f"{name}.bias"]
    T = len(tokens)
    x = w["wte.weight"][tokens] + w["wpe.weight"][:T]
    for h in (f"h.{i}" for i in range(sum(name.endswith("ln_1.bias") for name in w))):
        heads = []
        qkv = linear(normal(x, f"{h}.ln_1"), f"{h}.attn.c_attn")
        for q, k, v in np.stack(np.split(qkv, 3 * H, axis=1)).reshape(3, H, T, -1).swapaxes(0, 1):
            scores = q @ k.T / math.sqrt(q.shape[1])
            scores[np.triu_indices(T, 1)] = -np.inf
            p = np.exp(scores - scores.max(-1, keepdims=True))
            heads.append(p / p.sum(-1, keepdims=True) @ v)
        x = x + linear(np.concatenate(heads, 1), f"{h}.attn.c_proj")
        y = linear(normal(x, f"{h}.ln_2"), f"{h}.mlp.c_fc")
        y = 0.5 * y * (1 + np.tanh(math.sqrt(2 / math.pi) * (y + 0.044715 * y**3)))
        x = x + linear(y, f"{h}.mlp.c_proj")
    return normal(x, "ln_f") @ w["wte.weight"].T


def openai_names(c: gpt2.Config, seed: int) -> dict[str, np.ndarray]:
    """Random weights, none 0 or 1, as OpenAI's file has them; and what it has besides."""
    rng, file = np.random.default_rng(seed), {}
    for name, (shape, *_) in gpt2.table(c).items():
        scale = 0.3 if len(shape) > 2 else 1.0
        values = scale * rng.standard_normal(shape, np.float32)
        layers = values if name.startswith("h.") else [values]
        for i, p in enumerate(layers):
            p = p.reshape(len(p), -1) if p.shape == (c.D, 3, c.D) else p
            file[name.replace("h.", f"h.{i}.", 1)] = p.reshape(-1) if "bias" in name else p
    mask = np.tril(np.ones((1, 1, c.T, c.T), np.float32))
    return file | {f"h.{i}.attn.bias": mask for i in range(c.L)}


def test_openais_file_is_read_and_the_model_is_its_model(tmp_path, monkeypatch):
    file = openai_names(SMALL, 0)
    save_file({name: np.ascontiguousarray(p) for name, p in file.items()}, tmp_path / "model")
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", lambda repo, name: tmp_path / "model")
    params, tokens = gpt2.read_openai(SMALL), np.random.default_rng(1).integers(0, SMALL.V, (2, 24))
    logits = gpt2.forward(jax.device_put(params), tokens, SMALL)
    expected = np.stack([reference(file, row, SMALL.H) for row in tokens])
    assert np.abs(logits - expected).max() < 2e-5 * np.abs(expected).max()


def test_openais_own_weights_continue_a_text():
    """Where the hub can be reached: the same comparison, and a text that is no surprise to them."""
    try:
        urllib.request.urlopen(huggingface_hub.constants.ENDPOINT, timeout=5).close()
    except OSError:
        pytest.skip("no network: OpenAI's weights cannot be fetched")
    c = gpt2.SIZES["openai"]._replace(compute="float32")
    params = gpt2.read_openai(c)
    path = Path(huggingface_hub.hf_hub_download("openai-community/gpt2", "model.safetensors"))
    file = {k: v for k, v in load_file(path).items() if "attn.bias" not in k}
    text = gpt2_tokens("The quick brown fox jumps over the lazy dog. To be, or not to be, that is")
    logits = np.asarray(gpt2.forward(jax.device_put(params), text[None], c)[0])
    expected = reference(file, text, c.H)
    assert np.abs(logits - expected).max() < 1e-3 * np.abs(expected).max()
    assert gpt2_tokens(" the").tolist() == [logits[-1].argmax()]


def gpt2_tokens(text: str) -> np.ndarray:
    import shards

    return np.array(shards.coder(**shards.GPT2).encode(text))


# ---- Meshes --------------------------------------------------------------------------------------
@pytest.mark.parametrize("shape", [(4, 2), (2, 2)])
def test_a_mesh_changes_nothing(shape):
    params = gpt2.initial(SMALL, 0)
    tokens = np.random.default_rng(1).integers(0, SMALL.V, (8, SMALL.T + 1))
    mesh = jax.make_mesh(shape, ("data", "model"), axis_types=(AxisType.Auto,) * 2)
    split = {k: NamedSharding(mesh, spec) for k, (_, spec, *_) in gpt2.table(SMALL).items()}
    step = jax.jit(lambda p, t: jax.value_and_grad(gpt2.loss_fn)(p, t, SMALL))
    batch = jax.device_put(tokens, NamedSharding(mesh, jax.P("data")))
    loss, grads = step(jax.device_put(params, split), batch)
    expected, gradients = step(params, tokens)
    assert abs(loss - expected) < 1e-6
    for name, grad in grads.items():
        np.testing.assert_allclose(grad, gradients[name], atol=1e-6, err_msg=name)


# ---- Exercises -----------------------------------------------------------------------------------
def test_exercise_1_medium_is_a_row_of_sizes():
    medium = gpt2.Config(L=24, H=16, D=1024)
    assert sum(math.prod(shape) for shape, *_ in gpt2.table(medium).values()) == 354_823_168


def test_exercise_2_four_microbatches_are_one_batch():
    tokens = np.random.default_rng(1).integers(0, SMALL.V, (8, SMALL.T + 1))
    ends = []
    for parts in 1, 4:
        params, tx = jax.device_put(gpt2.initial(SMALL, 0)), gpt2.optimizer(0.01, 20, parts)
        state = tx.init(params)
        for _ in range(3):  # the first has rate 0
            for part in np.split(tokens, parts):
                grads = jax.jit(jax.grad(gpt2.loss_fn), static_argnums=2)(params, part, SMALL)
                updates, state = jax.jit(tx.update)(grads, state, params)
                params = {k: params[k] + updates[k] for k in params}
        ends.append(params)
    moved = jax.tree.map(lambda a, b: jnp.abs(a - b).max(), ends[0], gpt2.initial(SMALL, 0))
    differs = jax.tree.map(lambda a, b: jnp.abs(a - b).max(), *ends)
    assert min(moved.values()) > 5e-4 and max(differs.values()) < 1e-4
