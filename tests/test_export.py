"""evals/export.py writes every parameter and setting. Other tests take save() from here: random
weights, in the file format of a run."""

import dataclasses
import json
import sys
from pathlib import Path

import export
import numpy as np
import weights
from safetensors.numpy import load_file

import train_gpt
from tests.tools import MINI, ROOT, whole_weights
from train_gpt import Layer

TRAIN = ROOT / "train_gpt.py"
LAST = dataclasses.replace(MINI.layers[-1], paired_heads=True, skip_from=0)


def save(path: Path, c: train_gpt.Config) -> None:
    """Saves random weights, in the file format of a run."""
    whole = whole_weights(c)
    arrays = {}
    for name, param in train_gpt.param_table(c).items():
        x = whole[name]
        if isinstance(x, dict):  # a bank's matrices by layer
            x = [matrix for matrices in x.values() for matrix in matrices]
        arrays[name] = np.asarray(x, "f4")[: param.model_shape[0]].reshape(param.model_shape)
    result = dict(val_loss=1.25, steps=c.total_steps, tokens=999, target=c.target)
    train_gpt.save_weights(path, arrays, c, result | dict(train_time_ms=2e3, devices=1))


def all_log_p(w: weights.Weights, x, whole: dict, tokens):
    """The log-probabilities (B, T, V) of a whole pass, for weights.runner()."""
    arguments = w, whole, x, tokens[:, :-1]
    return weights.predict_all(*arguments, lambda p, _: p.log_p, padding=False)


def test_files_have_every_parameter_and_setting(tmp_path, monkeypatch, capsys):
    layers = (*MINI.layers[:3], Layer(None, skip_from=1, x0=False, ngram=True), LAST)
    c = dataclasses.replace(MINI, layers=layers, mudd_head=(), data="data/words")
    save(tmp_path / "a.npz", c)
    out = tmp_path / "new/out"
    monkeypatch.setattr(sys, "argv", ["export.py", str(tmp_path / "a.npz"), str(out)])
    export.main()
    assert capsys.readouterr().out == f"wrote model.safetensors and config.json to {out}\n"
    arrays = dict(np.load(tmp_path / "a.npz"))
    found = load_file(out / "model.safetensors")
    assert found.keys() == arrays.keys() - {"config", "result", "source"}
    for key, x in found.items():
        np.testing.assert_array_equal(x, arrays[key], strict=True)
    told = json.loads((out / "config.json").read_text())
    config = json.loads(json.dumps(dataclasses.asdict(c) | {"data": "words", "prefixes": ""}))
    config.pop("layers")
    assert told.items() >= config.items() and told["tokenizer"] == "bytes"
    assert told["result"]["val_loss"] == 1.25
    assert told["parameters"] == sum(x.size for x in found.values())
    windows = [16, 64, 16, None, 64]  # of the last stage
    assert [layer["window"] for layer in told["layers"]] == windows
    for name in "qk", "vo", "mlp":
        numbers = [layer["matrices"][name] for layer in told["layers"]]
        assert sorted(sum(numbers, [])) == list(range(len(found[name])))
    assert len(told["rotation"]["frequencies"]) == c.D // c.H // 4
