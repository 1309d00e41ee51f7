"""basics/gpt2.py: it trains, its model and training are those of transformers and PyTorch, and
another model is not read as if it were GPT-2."""

import itertools
import json
import re
import sys
from pathlib import Path

import gpt2
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from safetensors.numpy import load_file, save_file

from tests.tools import basic, text, write_shard

SMALL = gpt2.Config(L=3, H=2, D=32, T=24, V=61, compute="float32")
SAVED = Path(__file__).with_name("gpt2_by_transformers")  # losses.json has its versions
FEWER = "L=6, H=2, D=128, T=256", "L=2, H=2, D=64, T=64"  # a smaller model


def saved() -> tuple[gpt2.Config, dict[str, np.ndarray]]:
    """The model that transformers saved, in float32."""
    c, weights = gpt2.read_folder(SAVED)
    return c._replace(compute="float32"), weights


def refused(capsys, function, *arguments) -> str:
    """What a function prints when it refuses these arguments."""
    with pytest.raises(SystemExit, match="2"):
        function(*arguments)
    return capsys.readouterr().err


# ---- Training ------------------------------------------------------------------------------------
def test_it_trains_saves_and_samples(tmp_path):
    flags = "--steps 4 --val_every 4 --val_tokens 1024 --accumulate 2 --batch 1 --save new/folder"
    done = basic(tmp_path, "gpt2", *flags.split(), plant=FEWER)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.count("ok   ") == 2
    assert re.search(r"\nstep:4/4 tokens:512 val_loss:\S+ saved time", done.stdout)
    assert gpt2.read_folder(tmp_path / "new/folder")[0].D == 64


@pytest.fixture
def tune(tmp_path, monkeypatch):
    """Runs main() with the saved weights, a text of 300 tokens to validate on, and flags."""
    write_shard(tmp_path / "a_train_000001.bin", text(500))
    write_shard(tmp_path / "a_val_000000.bin", text(500)[:300])
    manifest = dict(source="test", vocab=257, eot=256, files={})
    (tmp_path / "MANIFEST.json").write_text(json.dumps(manifest))
    monkeypatch.setattr(gpt2.jax.config, "update", lambda *_: None)  # JAX has its devices already
    monkeypatch.setattr(gpt2, "sample", lambda *_: [])

    def run(flags):
        argv = ["gpt2.py", "--from", str(SAVED), "--data", str(tmp_path), *flags.split()]
        monkeypatch.setattr(sys, "argv", [*argv, "--context", "16"])
        gpt2.main()

    return run


def test_it_trains_loaded_weights_and_saves_the_best(tune, tmp_path, capsys):
    tune(f"--steps 20 --val_every 10 --lr 0.02 --save {tmp_path}/mine")
    losses = [float(x) for x in re.findall(r" val_loss:(\S+)", capsys.readouterr().out)]
    assert len(losses) == 3 and min(losses) < losses[0] - 1
    assert gpt2.read_folder(tmp_path / "mine")[0] == gpt2.read_folder(SAVED)[0]  # all positions
    c, weights = saved()
    rows = np.stack([text(500)[start : start + 17] for start in range(0, 288, 16)])
    for params, loss in (weights, losses[0]), (gpt2.read_folder(tmp_path / "mine")[1], min(losses)):
        assert abs(gpt2.loss_fn(jax.device_put(params), rows, c) - loss) < 1e-4
    before = (tmp_path / "mine/model.safetensors").read_bytes()
    assert "is there already" in refused(capsys, tune, f"--steps 0 --save {tmp_path}/mine")
    assert (tmp_path / "mine/model.safetensors").read_bytes() == before


def test_a_text_that_would_be_read_wrong_is_refused(tune, tmp_path, capsys):
    """Around its end, so that its first tokens count twice; or tokens of another tokenizer."""
    message = "has 300 tokens to validate on, fewer than a microbatch"
    assert message in refused(capsys, tune, "--batch 19 --steps 0")
    for other in [256, 300], [1, 2]:
        write_shard(tmp_path / "a_val_000000.bin", other * 150)
        assert "has tokens beyond 257, or no 256" in refused(capsys, tune, "--steps 0")
    manifest = dict(source="test", vocab=400, eot=1, files={})
    (tmp_path / "MANIFEST.json").write_text(json.dumps(manifest))
    assert "has 400 different tokens, and" in refused(capsys, tune, "--steps 0")


def test_training_it_goes_as_in_pytorch():
    """transformers' loss of the weights that it saved, and the loss before each of 11 more steps of
    AdamW by torch: gradients, also of the table that is embedding and head, clipping, decay, rates,
    and no dropout."""
    theirs = json.loads((SAVED / "losses.json").read_text())
    c, weights = saved()
    params = jax.device_put(weights)
    tx = gpt2.optimizer(0.01, 12, 1)
    state = tx.init(params)
    losses = []

    @jax.jit
    def step(params, state, tokens):
        loss, grads = jax.value_and_grad(gpt2.loss_fn)(params, tokens, c)
        updates, state = tx.update(grads, state, params)
        return {name: params[name] + updates[name] for name in params}, state, loss

    for tokens in itertools.islice(gpt2.batches(np.array(theirs["text"]), 4, 32), 12):
        params, state, loss = step(params, state, tokens)
        losses.append(loss)
    assert losses[0] - losses[-1] > 0.5
    np.testing.assert_allclose(losses, theirs["losses"], atol=1e-4)


def test_a_mesh_changes_nothing():
    params = gpt2.initial(SMALL, 0)
    tokens = np.random.default_rng(1).integers(0, SMALL.V, (8, SMALL.T + 1))
    mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
    split = {k: NamedSharding(mesh, spec) for k, (_, spec, *_) in gpt2.table(SMALL).items()}
    step = jax.jit(lambda p, t: jax.value_and_grad(gpt2.loss_fn)(p, t, SMALL))
    batch = jax.device_put(tokens, NamedSharding(mesh, jax.P("data")))
    loss, grads = step(jax.device_put(params, split), batch)
    expected, gradients = step(params, tokens)
    assert abs(loss - expected) < 1e-6
    for name, grad in grads.items():
        np.testing.assert_allclose(grad, gradients[name], atol=1e-6, err_msg=name)


# ---- Files ---------------------------------------------------------------------------------------
def test_what_it_saves_is_what_transformers_saved(tmp_path):
    c, weights = gpt2.read_folder(SAVED)
    gpt2.save(tmp_path, weights, c)
    ours = load_file(tmp_path / "model.safetensors")
    theirs = load_file(SAVED / "model.safetensors")
    assert {f"transformer.{name}" for name in ours} == theirs.keys()
    for name, p in ours.items():
        np.testing.assert_array_equal(p, theirs[f"transformer.{name}"], strict=True)
    about = json.loads((SAVED / "config.json").read_text())
    assert json.loads((tmp_path / "config.json").read_text()).items() <= about.items()
    bytes_of_C_order = (tmp_path / "model.safetensors").read_bytes()
    gpt2.save(tmp_path, {name: np.asfortranarray(p) for name, p in weights.items()}, c)
    assert (tmp_path / "model.safetensors").read_bytes() == bytes_of_C_order
    again, read = gpt2.read_folder(tmp_path)  # names without "transformer."
    assert again == c and all(np.array_equal(read[name], weights[name]) for name in weights)


@pytest.fixture
def folder(tmp_path):
    """A folder with changed keys of config.json and changed arrays."""

    def write(keys=None, arrays=None):
        about = json.loads((SAVED / "config.json").read_text())
        (tmp_path / "config.json").write_text(json.dumps(about | (keys or {})))
        file = load_file(SAVED / "model.safetensors") | (arrays or {})
        save_file(file, tmp_path / "model.safetensors", {"format": "pt"})
        return tmp_path

    return write


def test_keys_that_change_the_model_are_refused_by_name(folder, capsys):
    for key, value in {
        "activation_function": "relu",
        "layer_norm_epsilon": 0.1,
        "scale_attn_weights": False,
        "scale_attn_by_inverse_layer_idx": True,
        "is_causal": False,
        "tie_word_embeddings": False,
        "num_attention_heads": 4,
        "model_type": "llama",
        "auto_map": {"AutoModelForCausalLM": "modeling.Other"},
    }.items():
        message = refused(capsys, gpt2.read_folder, folder({key: value}))
        assert f"config.json has {key} {value}, and this file computes" in message


def test_arrays_that_are_not_a_gpt2s_are_refused_by_name(folder, capsys):
    for name, change, message in (
        ("lm_head.weight", np.ones((257, 16)), "has an lm_head.weight that is not wte.weight"),
        ("lm_head.bias", np.ones(257), "arrays that GPT-2 has not, as lm_head.bias"),
        ("transformer.h.2.ln_1.weight", np.ones(16), "has not, as transformer.h.2.ln_1.weight"),
        ("transformer.ln_f.bias", np.full(16, np.nan), "NaN or infinity in transformer.ln_f.bias"),
        ("transformer.wpe.weight", np.ones((64, 16)), "not in float32 and (32, 16)"),
    ):
        changed = folder(arrays={name: np.float32(change)})
        assert message in refused(capsys, gpt2.read_folder, changed)
    half = folder(arrays={"transformer.wpe.weight": np.ones((32, 16), np.float16)})
    assert "has transformer.wpe.weight as {'dtype': 'F16', " in refused(
        capsys, gpt2.read_folder, half
    )


def test_a_sample_is_of_the_likeliest_tokens_and_ends_with_the_text(monkeypatch):
    top_k = jax.lax.top_k
    monkeypatch.setattr(jax.lax, "top_k", lambda x, k: top_k(x, 1))
    c, weights = saved()
    params = jax.device_put(weights)
    tokens = [7, *gpt2.sample(params, [7, 3, 5], 6, c, 0)]
    best = gpt2.forward(params, np.array([tokens]), c)[0].argmax(-1).tolist()
    assert best[2 : len(tokens) - 1] == tokens[3:]
    assert len(tokens) == 9 or best[-1] == 7


# ---- Exercises -----------------------------------------------------------------------------------
def test_exercise_1_four_microbatches_are_one_batch():
    tokens = np.random.default_rng(1).integers(0, SMALL.V, (8, SMALL.T + 1))
    gradient = jax.jit(jax.grad(lambda p, tokens: gpt2.loss_fn(p, tokens, SMALL)))
    ends = []
    for parts in 1, 4:
        params = jax.device_put(gpt2.initial(SMALL, 0))
        tx = gpt2.optimizer(0.01, 20, parts)
        state = tx.init(params)
        update = jax.jit(tx.update)
        for _ in range(3):  # the first has rate 0
            for part in np.split(tokens, parts):
                updates, state = update(gradient(params, part), state, params)
                params = {k: params[k] + updates[k] for k in params}
        ends.append(params)
    moved = jax.tree.map(lambda a, b: jnp.abs(a - b).max(), ends[0], gpt2.initial(SMALL, 0))
    differs = jax.tree.map(lambda a, b: jnp.abs(a - b).max(), *ends)
    assert min(moved.values()) > 5e-4 and max(differs.values()) < 1e-4
