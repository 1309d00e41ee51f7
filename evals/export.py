"""Weights as a folder that stands alone: safetensors, config.json, a model card, reference.py."""

import dataclasses
import json
import re
from pathlib import Path

import numpy as np
import reference
import weights
from weights import ROOT, refuse

FILES = {"reference.py", "config.json", "model.safetensors", "README.md"}


def describe(w: weights.Weights) -> dict:
    """config.json: the run's Config, and what each layer does as in the last validation."""
    c, stage = w.c, w.c.stages[w.stage]
    windows = {w.code.SHORT: stage.short, w.code.LONG: stage.long, None: None}
    table = w.code.param_table(c)
    banks = {name: param.layers for name, param in table.items() if param.layers}
    layers = []
    for i, layer in enumerate(c.layers):
        about = dataclasses.asdict(layer) | {"window": windows[layer.window]}
        about["matrices"] = {  # window: in positions, of paired heads two a token
            name: [n for n, owner in enumerate(owners) if owner == i]
            for name, owners in banks.items()
        }
        layers.append(about)
    nets = {
        net: [(output, len(start)) for output, start in outputs.items()]
        for net, outputs in w.code.nets(c).items()
    }
    frequencies, scale = w.code.rope_frequencies(c, w.stage)
    kinds = {(257, 256): "bytes", (50257, 50256): "gpt2"}
    names = {k: Path(w.config[k]).name for k in ("data", "prefixes", "resume")}  # no paths of ours
    return (
        w.config
        | names
        | {
            "model_type": "jnanogpt",
            "format_version": 2,
            "layers": layers,
            "nets": nets,
            "rotation": {"frequencies": [*frequencies], "score_scale": scale},
            "tokenizer": kinds.get((c.vocab, c.eot)),
            "parameters": sum(x.size for x in w.arrays.values()),
        }
    )


def write_safetensors(path: Path, arrays: dict[str, np.ndarray], about: dict[str, str]) -> None:
    header, at = {"__metadata__": about}, 0
    for name, x in arrays.items():
        header[name] = dict(dtype="F32", shape=x.shape, data_offsets=[at, at + x.nbytes])
        at += x.nbytes
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for x in arrays.values():  # one by one: the record's are 2.5 GB
            file.write(np.ascontiguousarray(x, "<f4"))


def main() -> None:
    cli = weights.parser(__doc__)
    cli.add_argument("out", type=Path, metavar="OUT", help="folder: new, empty or of an export")
    args = cli.parse_args()
    weights.jax.config.update("jax_platforms", "cpu")  # float32, not a GPU's TF32
    w, out = weights.open_weights(args.weights, args.script), args.out
    log, found = w.path.with_suffix(".txt"), {path.name for path in out.glob("[!_]*")}
    if out.is_file() or found and not {"reference.py"} <= found <= FILES:
        refuse(f"{out} is neither empty nor an export, to be replaced: name a new folder")
    try:
        text = log.read_text(encoding="utf-8") if log.exists() else ""
        if text and json.dumps(w.result)[1:-1] not in text:
            refuse(f"{log} is not the log of {w.path}: put the right one there, or none")
        out.mkdir(parents=True, exist_ok=True)  # reference.py first: by it an export is known
        (out / "reference.py").write_bytes(Path(reference.__file__).read_bytes())
        config, about = describe(w), dict(run=w.path.stem, result=json.dumps(w.result))
        (out / "config.json").write_text(json.dumps(config, indent=1) + "\n")
        write_safetensors(out / "model.safetensors", w.arrays, about)
        # Whether that is the model: the script may have been changed, and reference.py not.
        tokens = np.resize([w.c.eot, *range(99)], 257)
        exact = w._replace(c=dataclasses.replace(w.c, compute="float32").without_fp8())
        z = weights.runner(exact, lambda x, head, _: weights.logits(w, x, head), 1)(tokens[None])[0]
        gap = np.abs(reference.logits(tokens[:-1], *reference.load(out)) - z[:, : w.c.vocab]).max()
        if not gap < 0.01:
            refuse(f"evals/reference.py does not compute {args.script}'s model: change it, too")
        facts = re.findall(r'^(?:versions|devices|driver|git|seed|data) [\[{"\d].*', text, re.M)
        more = dict(facts="\n".join(facts) or "There was no log.", gap=float(gap))
        card = (ROOT / "evals/card.md").read_text() + (ROOT / "LICENSE").read_text()
        (out / "README.md").write_text(card.format(**config | w.result | about | more))
    except Exception as error:  # of a disk, a log, or a model that reference.py does not know
        refuse(f"{out} is not whole: {type(error).__name__}: {error}")
    print(f"{out}: {', '.join(sorted(FILES))}\nnext: .venv/bin/python '{out}/reference.py' 'The'")


if __name__ == "__main__":
    main()
