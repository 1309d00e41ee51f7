"""Writes a run's model as others read it: model.safetensors, its parameters in float32 under their
names in train_gpt.py, and config.json, the run's configuration and what each layer does.

    ./run.sh export [logs/<run>.npz] OUT
    .venv/bin/hf upload me/my-gpt OUT        puts the folder on the Hugging Face Hub

No library knows the model: the script that trained it is what runs it."""

import dataclasses
import json
import sys
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

sys.path.insert(0, str(Path(__file__).resolve().parent))  # for PYTHONSAFEPATH=1
import weights

# isort: split
from messages import one_line, refuse

TOKENIZERS = {257: "bytes", 50257: "gpt2"}  # by the size of the vocabulary


def describe(w: weights.Weights) -> dict:
    """config.json: the run's Config and RESULT, and what each layer does, as in the last
    validation. Windows are in positions, of which paired heads have two a token."""
    c = w.c
    stage = c.stages[w.stage]
    windows = {w.code.SHORT: stage.short, w.code.LONG: stage.long, None: None}
    banks = {name: param.layers for name, param in w.code.param_table(c).items() if param.layers}
    frequencies, scale = w.code.rope_frequencies(c, w.stage)
    layers = []
    for i, layer in enumerate(c.layers):
        entry = dataclasses.asdict(layer)
        entry["window"] = windows[layer.window]
        entry["matrices"] = {
            name: [n for n, owner in enumerate(owners) if owner == i]
            for name, owners in banks.items()
        }
        layers.append(entry)
    nets = {}
    for net, outputs in w.code.nets(c).items():
        nets[net] = [(output, len(start)) for output, start in outputs.items()]
    # Only the names, because the paths of this machine are of no use elsewhere.
    names = {key: Path(w.config[key]).name for key in ("data", "prefixes")}
    more = {
        "model_type": "jnanogpt",
        "layers": layers,
        "nets": nets,
        "rotation": {"frequencies": [*map(float, frequencies)], "score_scale": float(scale)},
        "tokenizer": TOKENIZERS.get(c.vocab),
        "parameters": sum(x.size for x in w.arrays.values()),
        "result": w.result,
    }
    return w.config | names | more


def export(w: weights.Weights, out: Path) -> None:
    """Writes the two files into OUT, which it makes."""
    out.mkdir(parents=True, exist_ok=True)
    arrays = {name: np.ascontiguousarray(x, "<f4") for name, x in w.arrays.items()}
    about = {"run": w.path.stem, "result": json.dumps(w.result)}
    save_file(arrays, out / "model.safetensors", about)
    (out / "config.json").write_text(json.dumps(describe(w), indent=1) + "\n")


@one_line("export.py")
def main() -> None:
    """Exports the weights of the command line."""
    args = weights.parse(weights.parser(__doc__), has_word=True)
    if not args.word:
        refuse("name a folder for the model, after the weights if there are any")
    export(weights.open_weights(args.weights, args.script), Path(args.word))
    print(f"wrote model.safetensors and config.json to {args.word}")


if __name__ == "__main__":
    main()
