"""evals/export.py: what its folder has, and that the NumPy code in it computes the model."""

import contextlib
import dataclasses
import functools
import io
import json
import os
import re
import runpy
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from unittest import mock

import export
import numpy as np
import pytest
import reference
import weights
from huggingface_hub import ModelCard
from safetensors.numpy import load_file

import train_gpt
from tests.small_medium import SMALL as SMALL_MEDIUM
from tests.tools import MINI, sequences, whole_weights
from train_gpt import Layer, Stage

ROOT = Path(train_gpt.__file__).resolve().parent
TRAIN = ROOT / "train_gpt.py"
SOURCE = (ROOT / "evals/reference.py").read_text()
T = 256  # the length that export.py compares; longer than the windows here
replace = dataclasses.replace
LAST = replace(MINI.layers[-1], paired_heads=True, skip_from=0)
LAYERS = (*MINI.layers[:3], Layer(None, skip_from=1, x0=False, bigram=True), MINI.layers[4], LAST)
THREE = tuple(Stage(1, 512, short, long, 0, 1.0) for short, long in ((4, 12), (6, 20), (8, 40)))
MODELS = {  # the first two have several stages, so that YaRN has changed their frequencies
    "every technique": replace(MINI, layers=LAYERS),
    "record": replace(
        train_gpt.Config(), D=64, H=4, F=128, R=8, bigrams=80000, dc_window=12, head_chunk=64,
        stages=THREE),
    "medium": SMALL_MEDIUM,
    "tiny": replace(train_gpt.PRESETS["tiny"], D=32, F=64, bigrams=512),
}  # fmt: skip


def save(path: Path, c: train_gpt.Config) -> None:
    """Saves random weights, in the file format of a run."""
    whole = whole_weights(c)
    arrays = {}
    for name, param in train_gpt.param_table(c).items():
        x = whole[name]
        if isinstance(x, dict):  # a bank's matrices by layer
            x = [matrix for matrices in x.values() for matrix in matrices]
        arrays[name] = np.asarray(x, "f4")[: param.model_shape[0]].reshape(param.model_shape)
    about = dict(config=dataclasses.asdict(c), source=train_gpt.crc32(train_gpt.SOURCE.encode()))
    about |= dict(result=dict(val_loss=1.25, steps=c.total_steps, tokens=999))
    np.savez(path, **{k: json.dumps(v) for k, v in about.items()}, **arrays)


def start(*command, **how) -> subprocess.CompletedProcess:
    """Runs a Python command in a process."""
    how = dict(env=os.environ.copy(), text=True) | how
    return subprocess.run([sys.executable, *map(str, command)], capture_output=True, **how)


def call(tool: ModuleType, *argv) -> None:
    """Runs a tool in this process."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", [f"{tool.__name__}.py", *map(str, argv)])
        tool.main()


def all_log_p(w: weights.Weights, x, whole: dict, tokens):
    """The log-probabilities (B, T, V) of a whole pass, for weights.runner()."""
    arguments = w, whole, x, tokens[:, :-1]
    return weights.predict_all(*arguments, lambda p, _: p.log_p, padding=False)


@pytest.fixture(scope="module")
def exports(tmp_path_factory):
    """For each of MODELS: its weights (path), its export (out), what export.py printed, tokens, and
    the log-probabilities (log_p) that train_gpt.py computes in float32."""
    folder = tmp_path_factory.mktemp("exports")
    made = {}
    runner = weights.runner
    with pytest.MonkeyPatch.context() as patch:
        for name, c in MODELS.items():
            path = folder / f"{name}.npz"
            out = folder / name
            tokens = sequences(c, T, count=1)
            save(path, c)
            w = weights.open_weights(path, TRAIN)
            w = w._replace(c=replace(w.c, compute="float32").without_fp8())
            run = runner(w, functools.partial(all_log_p, w), 1)
            patch.setattr(weights, "runner", lambda *_, run=run: run)  # it compiles once
            with contextlib.redirect_stdout(io.StringIO()) as printed:
                call(export, path, out)
            log_p = lambda x, run=run: np.asarray(run(x))[0]
            about = dict(path=path, out=out, printed=printed.getvalue(), tokens=tokens)
            made[name] = SimpleNamespace(**about, run=log_p, log_p=log_p(tokens))
        yield made


def distance(code, made: SimpleNamespace) -> float:
    """The largest difference of log-probabilities between a reference.py and train_gpt.py."""
    log_p = code.log_p(made.tokens[0, :T], *reference.load(made.out))
    assert log_p.dtype == np.float32 and log_p.shape == made.log_p.shape
    return np.abs(log_p - made.log_p).max()


@pytest.mark.parametrize("name", MODELS)
def test_the_reference_is_the_model(exports, name):
    assert distance(reference, exports[name]) < 1e-3
    assert exports[name].log_p.std(axis=0).min() > 0.1


# Faults to plant in reference.py; others are in lab/faults/evals.toml.
MUTATIONS = """
np.float32(layer.rotation.frequencies) -> np.float32(1024 ** -np.linspace(0, 1, K // 4))
tokens_T[t - n + 1 : t + 1][::-1] -> tokens_T[t - n + 1 : t + 1]
+ terms[lengths] ->
lengths.max(initial=0) -> 0
max(0, (t // band - 1) * band) -> 0
np.append(scores, sinks[t]) -> np.append(scores, -99)
back <= window -> back < window
np.arange(H) % pair -> np.arange(H) // (H // pair)
x if layer.attend_to is None else -> x if True else
& (document[:, None] == document) ->
norm(source)[:, :6] -> source[:, :6]
/ 7.5 -> / 7.6
c.dc_window - 1 -> c.dc_window
< K - 4, rotated -> < K, rotated
if layer.window is not None or embeddings: -> if layer.window is not None:
for name in ("x0", "bigram") if name in gate -> for name in ("x0",) if name in gate
"""


@pytest.mark.parametrize("mutation", MUTATIONS.strip("\n").split("\n"))
def test_a_fault_in_the_reference_is_noticed(exports, mutation):
    old, new = f"{mutation} ".split(" -> ")
    mutant = ModuleType("mutant")
    assert old in SOURCE
    exec(SOURCE.replace(old, new.strip()), vars(mutant))
    # Some faults show only with the record's four heads or its large tables.
    names = "every technique", "record"
    assert any(distance(mutant, exports[name]) > 1e-3 for name in names)


TIKTOKEN = """import types
get_encoding = dict(gpt2=types.SimpleNamespace(encode_ordinary=lambda text: [*text.encode()],
                    decode_single_token_bytes=lambda n: b"%d;" % n)).__getitem__"""


@pytest.mark.parametrize("name, piece", [("every technique", b"%c"), ("record", b"%d;")])
def test_the_folder_alone_continues_a_prompt(exports, tmp_path, name, piece):
    """Neither our modules nor jax can be imported. A fake tiktoken has 256 tokens."""
    for other in "jax", "jaxlib", "train_gpt", "weights":
        (tmp_path / f"{other}.py").write_text("raise ImportError")
    (tmp_path / "tiktoken.py").write_text(TIKTOKEN)
    made = exports[name]
    prompt = "a + b"
    tokens = [MODELS[name].eot, *prompt.encode()]
    how = dict(PYTHONPATH=str(tmp_path))
    for n in range(len(prompt), 16):
        tokens.append(int(made.run(np.resize(tokens, (1, T + 1)))[n].argmax()))
    continuation = tokens[1 + len(prompt) :]
    text = prompt.encode() + b"".join(piece % n for n in continuation) + b"\n"
    argv = prompt, "--tokens", str(len(continuation)), "--temperature", "0"
    done = start("reference.py", *argv, cwd=made.out, env=how, text=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, text, b"") and len({*tokens}) > 8


def test_the_end_of_a_document_ends_a_text(exports, monkeypatch, capfd):
    coming = [*"é!".encode(), 256, 0]
    monkeypatch.setattr(reference, "__file__", exports["tiny"].out / "reference.py")
    monkeypatch.setattr(reference, "log_p", lambda *_: 99 * np.eye(257)[[coming.pop(0)]])
    call(reference, "h\udcc3\udca9")  # as Python reads bytes that its locale does not know
    assert (capfd.readouterr().out, coming) == ("héé!\n", [0])


def test_a_text_is_a_sample_at_the_temperature(exports, monkeypatch, capfd):
    """Of A, B and C with probabilities 0.7, 0.2 and 0.1; temperature 2 takes their square roots."""
    p = np.array([0.7, 0.2, 0.1])
    z_V = np.full(257, -99.0)
    z_V[[*b"ABC"]] = np.log(p)
    monkeypatch.setattr(reference, "__file__", exports["tiny"].out / "reference.py")
    monkeypatch.setattr(reference, "log_p", lambda *_: z_V[None])
    texts = []
    for temperature, seed in (1, 5), (1, 5), (2, 5), (2, 6):
        call(reference, ".", "--tokens", 4000, "--temperature", temperature, "--seed", seed)
        texts.append(capfd.readouterr().out.strip(".\n"))
        share = np.array([texts[-1].count(letter) for letter in "ABC"]) / 4000
        expected = p ** (1 / temperature)
        assert np.abs(share - expected / expected.sum()).max() < 0.03  # 4 sd or more
    assert texts[0] == texts[1] and texts[2] != texts[3]


@pytest.mark.parametrize("name, tokenizer", [("record", "gpt2"), ("tiny", "bytes")])
def test_files_have_every_parameter_and_setting(exports, name, tokenizer):
    made = exports[name]
    arrays = dict(np.load(made.path))
    found = load_file(made.out / "model.safetensors")
    assert found.keys() == arrays.keys() - {"config", "result", "source"}
    for key, x in found.items():
        np.testing.assert_array_equal(x, arrays[key], strict=True)
    assert (found["gates_input.w1"].size == 0) == (name == "tiny")
    size = int.from_bytes((made.out / "model.safetensors").read_bytes()[:8], "little")
    c = json.loads((made.out / "config.json").read_text())
    assert size % 8 == 0 and c["tokenizer"] == tokenizer
    names = "data", "prefixes"
    paths = {k: getattr(MODELS[name], k).removeprefix("data/") for k in names}
    config = json.loads(json.dumps(dataclasses.asdict(MODELS[name]))) | paths
    layers = config.pop("layers")
    exported = c.pop("layers")
    assert c.items() >= config.items()
    for layer, more in zip(layers, exported, strict=True):
        assert more.items() >= {k: v for k, v in layer.items() if k != "window"}.items()
        assert (more["window"] is None) == (layer["window"] is None)


def test_the_card_of_a_trained_model(trained, tmp_path):
    """The card has the error that export.py measured, and the facts of the log."""
    (path,) = trained.glob("logs/*.npz")
    done = start(ROOT / "evals/export.py", path, "out", cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert "next: .venv/bin/python out/ref" in done.stdout
    card = (tmp_path / "out/README.md").read_text()
    log = path.with_suffix(".txt").read_text()
    assert float(re.search(r"within (\S+) of", card)[1]) < 1e-4
    facts = re.findall("^(?:versions|devices|driver|git|seed|data) .*", log, re.M)
    assert len(facts) == 6 and all(f"\n{fact}\n" in card for fact in facts)
    assert log.splitlines()[-1].partition(', "weights')[0] in card  # the last line: RESULT
    assert "`transformers` library cannot load it" in card
    assert (ROOT / "LICENSE").read_text() in card
    assert "- Training text: a text without a name\n" in card and "nats per byte" in card
    assert ModelCard(card).data.eval_results[0].dataset_name == "a text without a name"


@pytest.mark.parametrize("name, dataset, language, prompt", [
    ("record", "kjj0/fineweb10B-gpt2", "en", "The"), ("tiny", None, "code", "def "),
])  # fmt: skip
def test_the_card_names_a_known_text_and_how_to_try_the_model(
    exports, name, dataset, language, prompt
):
    made = exports[name]
    card = ModelCard((made.out / "README.md").read_text())
    header = card.data
    (result,) = header.eval_results
    assert (header.license, header.library_name) == ("mit", "jnanogpt")
    assert (header.pipeline_tag, header.metrics) == ("text-generation", ["loss"])
    assert (header.datasets, header.language) == (dataset, language)
    assert (result.metric_type, result.metric_value) == ("loss", 1.25)
    assert result.metric_name.endswith("per byte" if name == "tiny" else "per token")
    assert f'python reference.py "{prompt}"\n' in card.text
    command = made.printed.partition("next: ")[2]
    assert shlex.split(command) == [".venv/bin/python", f"{made.out}/reference.py", prompt]


def test_names_that_are_not_utf8_are_written_with_question_marks(exports):
    w = weights.open_weights(exports["tiny"].path, TRAIN)
    w = w._replace(path=Path("a\udcff.npz"), config=w.config | dict(data="b\udcff"))
    config = export.describe(w)
    card = export.write_card(config, w, "", 0.0)
    assert config["data"] == "b?" and "# jNanoGPT: a?\n" in card and card.encode()


@pytest.mark.parametrize("name, value", [("val_loss", np.nan), ("val_loss", None), ("tokens", "9")])
def test_a_run_without_a_loss_is_not_exported(exports, tmp_path, capsys, name, value):
    w = weights.open_weights(exports["tiny"].path, TRAIN)
    with pytest.raises(SystemExit, match="2"):
        export.export(w._replace(result=w.result | {name: value}), tmp_path / "new")
    assert f"has {value} as {name} in its RESULT: export" in capsys.readouterr().err
    assert not (tmp_path / "new").exists()


def test_an_export_that_fails_leaves_nothing_and_the_old_one(exports, tmp_path, monkeypatch):
    made = exports["tiny"]
    shutil.copytree(made.out, tmp_path / "old")
    (tmp_path / "old/README.md").write_text("older")
    monkeypatch.setattr(export, "write_card", lambda *_: export.refuse("no card"))
    for folder, left in ("old", {*export.FILES}), ("new", set()):
        with pytest.raises(SystemExit, match="2"):
            call(export, made.path, tmp_path / folder)
        assert {path.name for path in (tmp_path / folder).iterdir()} == left
    assert (tmp_path / "old/README.md").read_text() == "older"


def unknown(*_):
    """As matrices of another MLP are, to reference.py."""
    raise ValueError("too many values to unpack")


@pytest.mark.parametrize("log_p, why", [
    (unknown, "it does not know a part of train_gpt.py's model (too many values to unpack)"),
    (lambda tokens, c, _: np.full((len(tokens), c.vocab), np.nan), "its log-probabilities differ"),
])  # fmt: skip
def test_what_the_reference_does_not_know_is_exported_without_it(
    log_p, why, exports, tmp_path, monkeypatch, capsys
):
    made = exports["tiny"]
    shutil.copytree(made.out, tmp_path / "out")  # an older export, which has a reference.py
    monkeypatch.setattr(reference, "log_p", log_p)
    for _ in range(2):  # the second replaces an export without
        call(export, made.path, tmp_path / "out")
        out, err = capsys.readouterr()
        assert out == f"wrote README.md, config.json, model.safetensors to {tmp_path / 'out'}\n"
        assert err.startswith(f"export.py: left out reference.py, the model in NumPy: {why}")
    card = (tmp_path / "out/README.md").read_text()
    assert {path.name for path in (tmp_path / "out").iterdir()} == {*export.FILES[1:]}
    assert "this folder has no\nprogram" in card and "python reference.py" not in card
    both = card + (made.out / "README.md").read_text()
    assert "reference.py]" not in both and "[end]" not in both


@pytest.mark.parametrize("error, status, message", [
    (BrokenPipeError(32, "Broken pipe"), 141, ""),
    (KeyboardInterrupt(), 130, ""),
    (OSError(28, "No space left"), 2, "reference.py: OSError: [Errno 28] No space left\n"),
])  # fmt: skip
def test_a_text_that_cannot_be_printed(exports, monkeypatch, capsys, error, status, message):
    """Nobody reads it, Ctrl-C ends it, or the disk is full."""
    made = exports["tiny"]
    monkeypatch.setattr(reference, "__file__", made.out / "reference.py")
    screen = mock.Mock(write=mock.Mock(side_effect=error))
    monkeypatch.setattr(reference, "open", lambda *_, **__: screen, raising=False)
    with pytest.raises(SystemExit) as stopped:
        call(reference, "x")
    assert (stopped.value.code, capsys.readouterr().err) == (status, message)


def test_a_variable_that_huggingface_hub_cannot_read_gets_a_line(monkeypatch, capsys):
    monkeypatch.setenv("HF_HUB_ETAG_TIMEOUT", "10s")
    for name in [*sys.modules]:  # it reads its variables when it is imported
        if name.partition(".")[0] == "huggingface_hub":
            monkeypatch.delitem(sys.modules, name)
    with pytest.raises(SystemExit, match="^2$"):
        runpy.run_path(export.__file__)
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1) and "cannot read HF_ENDPOINT, or a number in an" in err


# The last column begins with the tool that is called.
@pytest.mark.parametrize("before, argv, message", [
    ("rm -r out; touch out", "w.npz out", "export.py: out is neither empty nor an export"),
    ("touch out/mine", "w.npz out", "export.py: out is neither empty nor an export"),
    ("cd out; rm model.*; mkdir model.safetensors", "w.npz out",
     "export.py: out is neither empty nor an export"),
    ("cd out; rm reference.py; echo {} > config.json", "w.npz out",
     "export.py: out is neither empty nor an export"),
    ("head -c 9999 w.npz >x; mv x w.npz", "w.npz out", "export.py: w.npz is no file of weights"),
    ("echo x > w.txt", "w.npz out", "export.py: w.txt is not the log of w.npz: put the right"),
    ("true", "w.npz", "export.py: name a folder after the weights: a new or empty one"),
    ("true", "w.npz w.npz/x", "export.py: w.npz is a file, but a folder belongs there"),
    ("true", "w.npz ''", "export.py: argument OUT: the name of the folder is empty: pass one"),
    ("cd out; head -c 9999 model.* >x; mv x model.*", "x", "reference.py: ValueError"),
    ("sed -i s/F32/F16/ out/model.*", "x", "reference.py: ValueError: embed is F16, and only F32"),
    ("cd out; truncate -s -4 model.*; printf '\\0\\0\\300\\177' >>model.safetensors", "x",
     "reference.py: ValueError: gates_input.b2 has numbers that are not finite"),
    ("true", "x --seed -1", "reference.py: --tokens begins at 1, --seed at 0"),
    ("true", "x --temperature nan", "reference.py: --temperature is from 0 to 1e6"),
    ("true", "x --temperature 1e308", "reference.py: --temperature is from 0 to 1e6"),
    ("rm out/config.json", "x", "reference.py: FileNotFoundError"),
    ("true", "", "reference.py: the following arguments are required: prompt"),
])  # fmt: skip
def test_bad_input_is_refused_in_a_line(
    exports, tmp_path, monkeypatch, capsys, before, argv, message
):
    shutil.copy(exports["tiny"].path, tmp_path / "w.npz")
    shutil.copytree(exports["tiny"].out, tmp_path / "out")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(reference, "__file__", tmp_path / "out/reference.py")
    subprocess.run(before, shell=True, check=True)
    with pytest.raises(SystemExit) as stopped:
        call(sys.modules[message.partition(".")[0]], *shlex.split(argv))
    err = capsys.readouterr().err
    assert (stopped.value.code, err.count("\n")) == (2, 1) and err.startswith(message)
