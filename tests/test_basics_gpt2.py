"""basics/gpt2.py: it runs, its checks catch faults, and its model is OpenAI's, in float64."""

import contextlib
import itertools
import json
import math
import re
import sys
from pathlib import Path

import gpt2
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from safetensors import safe_open
from safetensors.numpy import load_file, save_file

from tests.tools import basic, text, write_shard

SMALL = gpt2.Config(L=3, H=2, D=32, T=24, V=61, compute="float32")
QUICK = "--steps", "4", "--val_every", "4", "--val_tokens", "1024"
SAVED = Path(__file__).with_name("gpt2_by_transformers")  # made by gpt2_fixture.py
FEWER = "L=6, H=2, D=128, T=256", "L=2, H=2, D=64, T=64"  # a smaller model


def test_it_trains_saves_and_samples(tmp_path):
    """The samples of the file's own model would take most of the time."""
    flags = "--accumulate", "2", "--batch", "1", "--save", "new/folder"
    done = basic(tmp_path, "gpt2", *QUICK, *flags, plant=FEWER)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.count("ok   ") == 4
    assert re.search(r"\nstep:4/4 tokens:512 val_loss:\S+ saved time", done.stdout)
    assert "\nnew/folder is for GPT2LMHeadModel.from_pretrained" in done.stdout
    assert gpt2.read_folder(tmp_path / "new/folder")[0].D == 64


def test_it_trains_weights_that_transformers_saved(tmp_path, monkeypatch):
    """Its first loss is that of transformers' weights, its last one lower, and what it saves is the
    best it had. The terminal lacks some characters of the prompt."""
    monkeypatch.setenv("PYTHONIOENCODING", "ascii")
    tokens = text(2000)
    write_shard(tmp_path / "a_train_000001.bin", tokens)
    write_shard(tmp_path / "a_val_000000.bin", tokens[:300])
    manifest = dict(source="test", vocab=257, eot=256, files={})
    (tmp_path / "MANIFEST.json").write_text(json.dumps(manifest))
    flags = "--from", str(SAVED), "--data", ".", "--prompt", "\N{SQUARE ROOT}2 = f("
    flags += "--steps", "20", "--val_every", "15", "--lr", "0.02", "--context", "16"
    done = basic(tmp_path, "gpt2", *flags, "--save", "mine")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.count("\n\\u221a2 = f(") == 2  # before and after
    losses = [float(loss) for loss in re.findall("val_loss:(\\S+)", done.stdout)]
    c, params = gpt2.read_folder(SAVED)
    _, saved = gpt2.read_folder(tmp_path / "mine")
    assert c == gpt2.read_folder(tmp_path / "mine")[0]  # all positions, though it trained on 16
    c = c._replace(compute="float32")
    rows = np.stack([tokens[start : start + 17] for start in range(0, 288, 16)])
    for weights, loss in ((params, losses[0]), (saved, min(losses))):
        assert abs(gpt2.loss_fn(jax.device_put(weights), rows, c) - loss) < 1e-4
    assert len(losses) == 3 and min(losses) < losses[0] - 1
    assert re.search(r"\nthe loss falls by \S+, and is lowest at step (15|20)\n", done.stdout)


@pytest.fixture
def tune(tmp_path, monkeypatch, capsys):
    """Runs main() with the saved weights, a text of 500 tokens and flags; returns the tokens and
    what it prints."""
    tokens = text(500)
    write_shard(tmp_path / "a_train_000001.bin", tokens)
    write_shard(tmp_path / "a_val_000000.bin", tokens[:300])
    manifest = dict(source="test", vocab=257, eot=256, files={})
    (tmp_path / "MANIFEST.json").write_text(json.dumps(manifest))
    monkeypatch.setattr(gpt2.jax.config, "update", lambda *_: None)  # JAX has its devices already
    monkeypatch.setattr(gpt2, "sample", lambda *_: [])

    def run(flags, refusal=""):
        argv = ["gpt2.py", "--from", str(SAVED), "--data", str(tmp_path), *flags.split()]
        monkeypatch.setattr(sys, "argv", argv)
        with pytest.raises(SystemExit, match="2") if refusal else contextlib.nullcontext():
            gpt2.main()
        printed = capsys.readouterr()
        assert refusal in printed.err
        return tokens, printed.out

    return run


def loss_of_saved(tokens, starts):
    """The loss of the saved weights in rows of 16 tokens and the last target, in float32."""
    c, weights = gpt2.read_folder(SAVED)
    rows = np.stack([tokens[start : start + 17] for start in starts])
    return gpt2.loss_fn(jax.device_put(weights), rows, c._replace(compute="float32"))


def test_with_0_steps_it_prints_the_loss_of_the_loaded_weights(tune):
    tokens, out = tune("--steps 0 --context 16")
    loss = loss_of_saved(tokens, range(0, 288, 16))
    (printed,) = re.findall(r"\nstep:0/0 tokens:0 val_loss:(\S+) time", out)
    assert abs(float(printed) - loss) < 1e-4 and "the loss falls" not in out


def test_a_training_loss_is_the_mean_since_the_last_line(tune):
    """The validation at step 15 is such a line. At this rate the weights stay as they are."""
    tokens, out = tune("--steps 25 --val_every 15 --context 16 --lr 1e-12")
    loss = loss_of_saved(tokens, range(240, 320, 16))
    (printed,) = re.findall(r"\nstep:20/25 tokens:320 train_loss:(\S+)", out)
    assert abs(float(printed) - loss) < 1e-4


def test_a_validation_text_that_is_shorter_than_a_microbatch_is_refused(tune):
    """It would be read around its end, and its first tokens counted twice."""
    message = "has 300 tokens to validate on, and a microbatch of 19 x 16 needs 305"
    tune("--context 16 --batch 19 --steps 0", message)


def test_tokens_beyond_the_vocabulary_are_refused(tune, tmp_path):
    write_shard(tmp_path / "a_val_000000.bin", [300] * 300)
    tune("--context 16 --steps 0", "has token 300, but a vocabulary of 257")


def test_a_folder_that_has_a_model_is_not_replaced(tune, tmp_path):
    """By another run, whose first weights are worse. It is refused before any work."""
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/config.json").write_text("{}")
    tune(f"--steps 0 --save {tmp_path}/mine", "mine has a config.json already: pass another")
    assert (tmp_path / "mine/config.json").read_text() == "{}"


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
    layers = len([name for name in w if name.endswith("ln_1.bias")])
    for h in (f"h.{i}" for i in range(layers)):
        heads = []
        qkv = linear(normal(x, f"{h}.ln_1"), f"{h}.attn.c_attn").reshape(T, 3, H, -1)
        for q, k, v in qkv.transpose(2, 1, 0, 3):  # by head
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
    """Random weights, none 0 or 1, under the names of OpenAI's file, with the masks it has, too."""
    rng = np.random.default_rng(seed)
    file = {}
    for name, (shape, *_) in gpt2.table(c).items():
        scale = 0.3 if len(shape) > 2 else 1.0
        values = scale * rng.standard_normal(shape, np.float32)
        layers = values if name.startswith("h.") else [values]
        for i, p in enumerate(layers):
            p = p.reshape(len(p), -1) if p.shape == (c.D, 3, c.D) else p
            file[name.replace("h.", f"h.{i}.", 1)] = p.reshape(-1) if "bias" in name else p
    mask = np.tril(np.ones((1, 1, c.T, c.T), np.float32))
    # Token 0 at position 0 has small numbers, so that the epsilon of LayerNorm counts.
    file["wte.weight"][0] *= 1e-3
    file["wpe.weight"][0] = 0
    return file | {f"h.{i}.attn.bias": mask for i in range(c.L)}


def test_openais_file_is_read_and_the_model_is_its_model(tmp_path, monkeypatch):
    file = openai_names(SMALL, 0)
    save_file({name: np.ascontiguousarray(p) for name, p in file.items()}, tmp_path / "model")
    params = jax.device_put(gpt2.read(tmp_path / "model", SMALL))
    tokens = np.random.default_rng(1).integers(0, SMALL.V, (2, 25))
    tokens[:, 0] = 0
    logits = gpt2.forward(params, tokens[:, :-1], SMALL)
    expected = np.stack([reference(file, row[:-1], SMALL.H) for row in tokens])
    assert np.abs(logits - expected).max() < 2e-5 * np.abs(expected).max()
    log_p = expected - np.log(np.exp(expected).sum(-1, keepdims=True))
    loss = -np.take_along_axis(log_p, tokens[:, 1:, None], -1).mean()
    assert abs(gpt2.loss_fn(params, tokens, SMALL) - loss) < 1e-4
    # With k = 1 the sample takes the likeliest token after all tokens so far.
    top_k = jax.lax.top_k
    monkeypatch.setattr(jax.lax, "top_k", lambda x, k: top_k(x, 1))
    text = [7, *gpt2.sample(params, [7, 3, 5], 6, SMALL, 0)]
    for n in range(3, len(text)):
        assert text[n] == reference(file, np.array(text[:n]), SMALL.H)[-1].argmax()
    assert len(text) == 9 or reference(file, np.array(text), SMALL.H)[-1].argmax() == 7


def test_a_saved_folder_is_like_openais_on_the_hub(tmp_path):
    """Weights that were read from a file like OpenAI's are saved with its names, shapes and
    numbers, with a config.json that transformers has loaded (records/other/transformers.txt)."""
    file = openai_names(SMALL, 0)
    save_file({name: np.ascontiguousarray(p) for name, p in file.items()}, tmp_path / "model")
    mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
    split = {k: NamedSharding(mesh, spec) for k, (_, spec, *_) in gpt2.table(SMALL).items()}
    gpt2.save(tmp_path, jax.device_put(gpt2.read(tmp_path / "model", SMALL), split), SMALL)
    found = load_file(tmp_path / "model.safetensors")
    masks = {name for name in file if name.endswith(".attn.bias")}  # constants, which need no file
    assert len(masks) == SMALL.L and found.keys() == file.keys() - masks
    for name, p in found.items():
        np.testing.assert_array_equal(p, file[name], err_msg=name, strict=True)
    with safe_open(tmp_path / "model.safetensors", "np") as opened:
        assert opened.metadata() == {"format": "pt"}
    about = json.loads((tmp_path / "config.json").read_text())
    expected = dict(model_type="gpt2", architectures=["GPT2LMHeadModel"], dtype="float32")
    expected |= dict(n_layer=3, n_head=2, n_embd=32, n_positions=24, vocab_size=61)
    assert about == expected | dict(bos_token_id=60, eos_token_id=60)
    c, params = gpt2.read_folder(tmp_path)
    assert c == SMALL._replace(compute="bfloat16") and params.keys() == gpt2.table(c).keys()


# ---- Folders of strangers ------------------------------------------------------------------------
@pytest.fixture
def folder(tmp_path):
    """A folder as they are on the hub."""
    write_folder(tmp_path, openai_names(SMALL, 0))
    return tmp_path


def write_folder(folder, file, **keys):
    """`keys` go into config.json, which has only what a GPT-2 of other sizes needs."""
    sizes = dict(n_layer=SMALL.L, n_head=SMALL.H, n_embd=SMALL.D, n_positions=SMALL.T)
    sizes |= dict(vocab_size=SMALL.V, model_type="gpt2", architectures=["GPT2LMHeadModel"])
    (folder / "config.json").write_text(json.dumps(sizes | keys))
    file = {name: np.ascontiguousarray(p) for name, p in file.items()}
    save_file(file, folder / "model.safetensors", {"format": "pt"})


OTHER_MODELS = {
    "activation_function": "relu",
    "layer_norm_epsilon": 0.1,
    "scale_attn_weights": False,
    "scale_attn_by_inverse_layer_idx": True,
    "is_causal": False,
    "tie_word_embeddings": False,
    "num_attention_heads": 4,
    "model_type": "llama",
    "architectures": ["GPT2CustomLMHeadModel"],
    "auto_map": {"AutoModelForCausalLM": "modeling.Other"},
    "tokenizer_class": "PreTrainedTokenizerFast",
}
NO_CHANGES = dict(activation_function="gelu_pytorch_tanh", n_inner=4 * SMALL.D, n_ctx=8, dtype=None)
NO_CHANGES |= dict(reorder_and_upcast_attn=True, attn_pdrop=0.5, hidden_act="relu", task="none")


def refused(capsys, function, *arguments) -> str:
    """What a function prints when it refuses these arguments."""
    with pytest.raises(SystemExit, match="2"):
        function(*arguments)
    return capsys.readouterr().err


def test_keys_that_change_the_model_are_refused_by_name(folder, capsys):
    about = json.loads((folder / "config.json").read_text())
    for key, value in OTHER_MODELS.items():
        (folder / "config.json").write_text(json.dumps(about | {key: value}))
        assert f"config.json has {key} {value}, and this file" in refused(
            capsys, gpt2.read_folder, folder
        )


def test_what_transformers_saves_is_the_same_model(folder):
    """Other names, masks of older versions, a copy of the head, and keys that change nothing."""
    _, expected = gpt2.read_folder(folder)
    file = {f"transformer.{name}": p for name, p in openai_names(SMALL, 0).items()}
    file["transformer.h.1.attn.masked_bias"] = np.float32([-1e4])
    file["lm_head.weight"] = file["transformer.wte.weight"]
    write_folder(folder, file, **NO_CHANGES)
    (folder / "config.json").write_bytes(b"\n" + (folder / "config.json").read_bytes())
    c, params = gpt2.read_folder(folder)
    assert c == SMALL._replace(compute="bfloat16") and params.keys() == expected.keys()
    for name, p in params.items():
        np.testing.assert_array_equal(p, expected[name])


def test_arrays_that_are_not_a_gpt2s_are_refused_by_name(folder, capsys):
    head = np.ones((61, 32), np.float32)
    for name, change, message in (
        ("lm_head.weight", head, "has an lm_head.weight that is not wte.weight"),
        ("lm_head.bias", np.ones(61, np.float32), "arrays that GPT-2 has not, as lm_head.bias"),
        ("h.3.ln_1.weight", np.ones(32, np.float32), "GPT-2 has not, as h.3.ln_1.weight"),
        ("h.1.attn.c_attn.lora_A", np.ones((4, 32), np.float32), "GPT-2 has not, as h.1.attn.c_at"),
        ("wpe.weight", np.ones((24, 32), np.float16), "has wpe.weight as {'dtype': 'F16', "),
        ("wpe.weight", np.ones((48, 32), np.float32), "not in float32 and (24, 32)"),
        ("ln_f.bias", np.full(32, np.nan, np.float32), "has NaN or infinity in ln_f.bias"),
    ):
        write_folder(folder, openai_names(SMALL, 0) | {name: change})
        assert message in refused(capsys, gpt2.read_folder, folder)


def test_a_file_that_is_cut_off_is_not_read(folder):
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-4])
    with pytest.raises(ValueError):
        gpt2.read_folder(folder)
    path.unlink()
    with pytest.raises(SystemExit, match="2"):
        gpt2.read_folder(folder)


def test_a_folder_of_other_tokens_is_refused(folder, capsys):
    """With the ids of some of GPT-2's tokens it is read, in both ways of writing them."""
    ids = {"the": 262, "world": 995, "language": 3303}
    vocab = {f"\N{LATIN CAPITAL LETTER G WITH DOT ABOVE}{word}": n for word, n in ids.items()}
    (folder / "vocab.json").write_text(json.dumps(vocab, separators=(",", " : ")))
    text = json.dumps(dict(model=dict(vocab=vocab)), ensure_ascii=False, indent=1)
    (folder / "tokenizer.json").write_text(text, encoding="utf-8")
    gpt2.check_tokens(folder)
    (folder / "tokenizer.json").write_text(text.replace("3303", "33030"), encoding="utf-8")
    message = refused(capsys, gpt2.check_tokens, folder)
    assert "has a tokenizer.json of other tokens than GPT-2's" in message
    (folder / "tokenizer.json").unlink()
    (folder / "vocab.txt").touch()
    assert "has a vocab.txt, so its tokens are not GPT" in refused(
        capsys, gpt2.check_tokens, folder
    )


def test_bad_arguments_are_refused_before_the_work(monkeypatch, capsys):
    for argv, message in (
        ("--from a --size small", "pass --size or --from"),
        ("--data a --lr nan", "--lr nan is not at least 0"),
        ("--data a --steps -1", "--steps -1 is not at least 0"),
        ("--from a --steps 9", "--steps needs --data: there is no text to train on"),
        ("--load a", "unrecognized arguments: --load"),
    ):
        monkeypatch.setattr(sys, "argv", ["gpt2.py", *argv.split()])
        assert message in refused(capsys, gpt2.main)


# ---- What transformers saved ---------------------------------------------------------------------
THEIRS = json.loads((SAVED / "losses.json").read_text())


def test_training_it_goes_as_in_pytorch():
    """transformers' loss of the weights that it saved, and the loss before each of 11 more steps of
    AdamW by torch: gradients, also of the table that is embedding and head, clipping, decay, rates,
    and no dropout."""
    c, weights = gpt2.read_folder(SAVED)
    c = c._replace(compute="float32")
    params = jax.device_put(weights)
    tx = gpt2.optimizer(0.01, 12, 1)
    state = tx.init(params)
    losses = []

    @jax.jit
    def step(params, state, tokens):
        loss, grads = jax.value_and_grad(gpt2.loss_fn)(params, tokens, c)
        updates, state = tx.update(grads, state, params)
        return {name: params[name] + updates[name] for name in params}, state, loss

    for tokens in itertools.islice(gpt2.batches(np.array(THEIRS["text"]), 4, 32), 12):
        params, state, loss = step(params, state, tokens)
        losses.append(loss)
    assert losses[0] - losses[-1] > 0.5
    np.testing.assert_allclose(losses, THEIRS["losses"], atol=1e-4)


def test_what_it_saves_is_what_transformers_saved(tmp_path):
    gpt2.save(tmp_path, gpt2.read_folder(SAVED)[1], gpt2.read_folder(SAVED)[0])
    ours = load_file(tmp_path / "model.safetensors")
    theirs = load_file(SAVED / "model.safetensors")
    assert {f"transformer.{name}" for name in ours} == theirs.keys()
    for name, p in ours.items():
        np.testing.assert_array_equal(p, theirs[f"transformer.{name}"], strict=True)
    about = json.loads((SAVED / "config.json").read_text())
    assert json.loads((tmp_path / "config.json").read_text()).items() <= about.items()


# ---- Training ------------------------------------------------------------------------------------
def test_batches_are_the_text_in_order_and_then_again():
    batches = gpt2.batches(np.arange(10), 2, 3)
    assert np.array_equal(next(batches), [[0, 1, 2, 3], [3, 4, 5, 6]])
    assert np.array_equal(next(batches), [[6, 7, 8, 9], [9, 0, 1, 2]])


def test_the_optimizer_clips_warms_up_decays_matrices_and_falls_by_a_cosine():
    """40 steps: two of warm-up from 0, and a cosine down to a tenth."""
    rng = np.random.default_rng(0)
    p = {"h.mlp.c_fc.weight": rng.normal(size=(2, 3)), "h.mlp.c_fc.bias": rng.normal(size=3)}
    p["ln_f.weight"] = rng.normal(size=3)
    tx = gpt2.optimizer(0.1, 40, 1)
    params = jax.tree.map(jnp.float32, p)
    m = dict.fromkeys(p, 0.0)
    v = dict.fromkeys(p, 0.0)
    state = tx.init(params)
    update = jax.jit(tx.update)
    for n in range(40):
        g = {name: rng.normal(size=x.shape) * 3 ** (n % 3 - 1) for name, x in p.items()}
        updates, state = update(jax.tree.map(np.float32, g), state, params)
        params = {name: params[name] + updates[name] for name in params}
        norm = math.sqrt(sum(np.square(x).sum() for x in g.values()))
        rate = 0.1 * n / 2 if n < 2 else 0.01 + 0.09 * (1 + math.cos(math.pi * (n - 2) / 38)) / 2
        for name, x in g.items():
            x = x / max(1, norm)
            m[name] = 0.9 * m[name] + 0.1 * x
            v[name] = 0.95 * v[name] + 0.05 * x * x
            mean = m[name] / (1 - 0.9 ** (n + 1))
            mean_square = v[name] / (1 - 0.95 ** (n + 1))
            decay = 0.1 * p[name] if name == "h.mlp.c_fc.weight" else 0
            p[name] = p[name] - rate * (mean / (np.sqrt(mean_square) + 1e-8) + decay)
            np.testing.assert_allclose(params[name], p[name], atol=2e-5, err_msg=f"{name} {n}")


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
