"""Writes a folder that works without this repository: the weights as safetensors, config.json, a
model card, and reference.py, the model in NumPy. If a copy of train_gpt.py has parts that
reference.py does not know, the folder has no reference.py."""

import argparse
import contextlib
import dataclasses
import json
import math
import re
import shlex
import shutil
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent))  # for PYTHONSAFEPATH=1
import reference
import weights
from weights import ROOT, refuse, shards

try:
    with contextlib.redirect_stdout(None):  # it would print the error, and with it a password
        from huggingface_hub import EvalResult, HfApi, ModelCardData  # noqa: F401 - HfApi: share.py
except ValueError:
    refuse("huggingface_hub cannot read HF_ENDPOINT, or a number in an HF_HUB_... variable: "
           "correct it, or unset it")  # fmt: skip

# By the first or the second, an export that was interrupted is recognized and replaced.
FILES = "reference.py", "config.json", "model.safetensors", "README.md"


class Text(NamedTuple):
    """What the card says about a training text."""

    name: str
    dataset: str | None = None  # on the Hub
    language: str | None = None  # as the Hub calls it
    prompt: str = "The"


TEXTS = {  # by the name of the folder, as the scripts of data/ choose it
    "source_code": Text("Python source of optax and huggingface_hub", None, "code", "def "),
    "fineweb10B": Text("FineWeb", "kjj0/fineweb10B-gpt2", "en"),
    "finewebedu10B": Text("FineWeb-Edu", "kjj0/finewebedu10B-gpt2", "en"),
    "fineweb100B": Text("FineWeb", "kjj0/fineweb100B-gpt2", "en"),
}
TOKENS = {  # by the tokenizer in config.json
    "bytes": dict(unit="byte", token="a byte of UTF-8", packages="NumPy"),
    "gpt2": dict(unit="token", token="one of GPT-2's", packages="NumPy and tiktoken"),
    None: dict(unit="token", token="a number of a vocabulary unknown to us", packages="NumPy"),
}


def as_utf8(name: str) -> str:
    """The name of a file with ? for those of its bytes that are not UTF-8."""
    return name.encode("utf-8", "replace").decode()


def training_text(config: dict) -> Text:
    """The entry of TEXTS, or one with the folder's name."""
    return TEXTS.get(config["data"], Text(config["data"] or "a text without a name"))


def describe(w: weights.Weights) -> dict:
    """config.json: the run's Config, and what each layer does, as in the last validation. Windows
    are in positions, of which paired heads have two a token."""
    c = w.c
    stage = c.stages[w.stage]
    windows = {w.code.SHORT: stage.short, w.code.LONG: stage.long, None: None}
    banks = {name: param.layers for name, param in w.code.param_table(c).items() if param.layers}
    layers = []
    for i, layer in enumerate(c.layers):
        entry = dataclasses.asdict(layer)
        entry["window"] = windows[layer.window]
        frequencies, scale = w.code.rope_frequencies(c, w.stage)
        entry["rotation"] = {"frequencies": [*frequencies], "score_scale": scale}
        entry["matrices"] = {
            name: [n for n, owner in enumerate(owners) if owner == i]
            for name, owners in banks.items()
        }
        layers.append(entry)
    nets = {
        net: [(output, len(start)) for output, start in outputs.items()]
        for net, outputs in w.code.nets(c).items()
    }
    tokenizers = {(257, 256): "bytes", (50257, 50256): "gpt2"}
    # Only the names, because the paths of this machine are of no use elsewhere.
    names = {key: as_utf8(Path(w.config[key]).name) for key in ("data", "prefixes")}
    return (
        w.config
        | names
        | {
            "model_type": "jnanogpt",
            "format_version": 3,
            "layers": layers,
            "nets": nets,
            "tokenizer": tokenizers.get((c.vocab, c.eot)),
            "parameters": sum(x.size for x in w.arrays.values()),
        }
    )


def write_safetensors(path: Path, arrays: dict[str, np.ndarray], about: dict[str, str]) -> None:
    """Writes arrays of float32, with `about` as metadata. The format: the header's length as
    uint64, the header as JSON, the arrays; all little-endian."""
    header = {"__metadata__": about}
    start = 0
    for name, x in arrays.items():
        stop = start + x.nbytes
        header[name] = dict(dtype="F32", shape=x.shape, data_offsets=[start, stop])
        start = stop
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)  # the arrays are aligned to 8 bytes
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for x in arrays.values():  # one by one: the record's are 2.5 GB
            file.write(np.ascontiguousarray(x, "<f4"))


def largest_gap(w: weights.Weights, out: Path) -> float:
    """By how much the log-probabilities of reference.py, for the weights in `out`, and those of
    the script differ at most: in float32, over 256 tokens."""
    # Half of each document repeats the other half, for [pointer]. The last token is not read.
    tokens = np.resize([w.c.eot, *range(50), *range(49)], 257)
    exact = w._replace(c=dataclasses.replace(w.c, compute="float32").without_fp8())

    def log_p_of(x, whole, tokens):
        arguments = exact, whole, x, tokens[:, :-1]
        return weights.predict_all(*arguments, lambda p, _: p.log_p, padding=False)

    log_p_TV = weights.runner(exact, log_p_of, 1)(tokens[None])[0]
    return float(np.abs(reference.log_p(tokens[:-1], *reference.load(out)) - log_p_TV).max())


def write_card(config: dict, w: weights.Weights, log: str, gap: float | None) -> str:
    """The model card: the Hub's metadata as YAML, evals/card.md with its blanks filled, and the
    license. `log` is the run's log or "", `gap` that of reference.py, if the export has it."""
    text = training_text(config)
    tokens = TOKENS[config["tokenizer"]]
    val_loss = EvalResult(
        task_type="text-generation",
        dataset_type=text.dataset or text.name,
        dataset_name=text.name,
        dataset_split="validation",
        metric_type="loss",
        metric_name=f"validation loss, nats per {tokens['unit']}",
        metric_value=round(w.result["val_loss"], 4),
    )
    header = ModelCardData(
        license="mit",
        # Without a library, the Hub would take one with a config.json for a model of transformers.
        library_name="jnanogpt",
        pipeline_tag="text-generation",
        tags=["jax", "numpy", "nanogpt", "speedrun"],
        language=text.language,
        datasets=text.dataset,
        metrics=["loss"],
        model_name=as_utf8(w.path.stem),
        eval_results=[val_loss],
    )
    facts = re.findall(r'^(?:versions|devices|driver|git|seed|data) [\[{"\d].*', log, re.M)
    blanks = dict(
        run=as_utf8(w.path.stem),
        text=text.name,
        prompt=text.prompt,
        result=json.dumps(w.result),
        facts="\n".join(facts) or "There was no log.",
        gap=gap,
    )
    card = (ROOT / "evals/card.md").read_text("utf-8")
    wanted = "[with reference.py]\n"
    unwanted = "[without reference.py]\n"
    if gap is None:
        wanted, unwanted = unwanted, wanted
    card = re.sub(rf"{re.escape(unwanted)}.*?\[end\]\n", "", card, flags=re.S)
    body = card.replace(wanted, "").replace("[end]\n", "") + (ROOT / "LICENSE").read_text("utf-8")
    filled = body.format(**config | w.result | tokens | blanks)
    return f"---\n{header.to_yaml()}\n---\n\n{filled}"


def export(w: weights.Weights, out: Path) -> None:
    """Writes FILES, moves them into `out` once all are there, and prints the command that tries
    them. Leaves out reference.py, and states why, if it does not compute the script's model. Exits
    with status 2 if `out` is not empty and not an export."""
    for name in ("val_loss", "tokens"):
        value = w.result.get(name)
        if not isinstance(value, (int, float)) or not math.isfinite(value):
            refuse(
                f"{w.path} has {value} as {name} in its RESULT: export a run that came to its end"
            )
    if not may_write(out):
        refuse(f"{out} is neither empty nor an export: name a new folder")
    log = read_log(w)
    out.mkdir(parents=True, exist_ok=True)
    for killed in out.glob("_unfinished_*"):
        shutil.rmtree(killed)
    with tempfile.TemporaryDirectory(prefix="_unfinished_", dir=out) as folder:
        part = Path(folder)
        (part / "reference.py").write_bytes(Path(reference.__file__).read_bytes())
        config = describe(w)
        (part / "config.json").write_text(json.dumps(config, indent=1) + "\n")
        about = dict(run=as_utf8(w.path.stem), result=json.dumps(w.result))
        write_safetensors(part / "model.safetensors", w.arrays, about)
        gap, why = compare(w, part)
        if why:
            (part / "reference.py").unlink()
            (out / "reference.py").unlink(missing_ok=True)
        (part / "README.md").write_text(write_card(config, w, log, gap), encoding="utf-8")
        written = [name for name in FILES if (part / name).exists()]
        for name in written:
            (part / name).replace(out / name)
    print(f"wrote {', '.join(sorted(written))} to {out}")
    if why:
        weights.tell(f"left out reference.py, the model in NumPy: {why}. To have it, change "
                     f"evals/reference.py like {w.script}, and export again")  # fmt: skip
        return
    prompt = training_text(config).prompt
    print(f"next: {shlex.join(['.venv/bin/python', f'{out}/reference.py', prompt])}")


def may_write(out: Path) -> bool:
    """Whether a folder is not there, empty, or an export."""
    if out.is_file():
        return False
    present = {path.name for path in out.glob("[!_]*")}  # without __pycache__
    if not present <= {*FILES} or not all((out / name).is_file() for name in present):
        return False
    config = out / "config.json"
    is_ours = config.is_file() and '"model_type": "jnanogpt"' in config.read_text(
        "utf-8", "replace"
    )
    return not present or "reference.py" in present or is_ours


def compare(w: weights.Weights, out: Path) -> tuple[float | None, str]:
    """largest_gap(), or None and the reason why reference.py is of no use for these weights."""
    try:
        gap = largest_gap(w, out)  # not 0 if the script was changed and reference.py was not
    except (AttributeError, LookupError, TypeError, ValueError) as error:
        return None, f"it does not know a part of {w.script}'s model ({error})"
    if not gap < 0.01:  # also if it is NaN
        return None, f"its log-probabilities differ from {w.script}'s by up to {gap:.2g}"
    return gap, ""


def read_log(w: weights.Weights) -> str:
    """The run's log, or "" if it is not beside the weights. Exits with status 2 if it is not of
    this run."""
    path = w.path.with_suffix(".txt")
    text = path.read_text(encoding="utf-8", errors="replace") if path.exists() else ""
    fields = json.dumps(w.result)[1:-1]  # without braces, because RESULT in the log has more fields
    if text and fields not in text:
        refuse(f"{path} is not the log of {w.path}: put the right one there, or none")
    return text


def open_on_cpu(path: Path, script: Path | None) -> weights.Weights:
    """weights.open_weights on a CPU, because a GPU would multiply float32 matrices in TF32."""
    weights.jax.config.update("jax_platforms", "cpu")
    return weights.open_weights(path, script)


@shards.one_line("export.py", status=2)
def main() -> None:
    """Exports the weights of the command line."""
    cli = weights.parser(__doc__, out="OUT")
    args = cli.parse_args()
    if args.out is None:
        cli.error("name a folder after the weights: a new or empty one, or an old export")
    try:
        out = shards.folder_name(args.out)
    except argparse.ArgumentTypeError as error:
        cli.error(f"argument OUT: {error}")
    export(open_on_cpu(args.weights, args.script), out)


if __name__ == "__main__":
    main()
