"""Reads and checks a run's weights, and runs its model, for all tools of evals/."""

import argparse
import dataclasses
import functools
import importlib.util
import json
import shlex
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, NamedTuple, NoReturn
from zlib import crc32

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, P
from jax.sharding import NamedSharding

ROOT = Path(__file__).resolve().parent.parent
sys.path += [str(ROOT / folder) for folder in ("data", "dev", "records")]
import shards  # noqa: E402
from cache import set_compilation_cache  # noqa: E402

NEEDS = (  # what the tools call of a script
    "Layer Stage param_table rope_frequencies make_mesh whole_weights forward ngram_rows "
    "norm softcap attend attention in_heads block mlp run_net weighted_sum "
    "fit_kernels copied_term"
)


class Weights(NamedTuple):
    """A run's weights, and what is needed to run its model."""

    path: Path
    code: ModuleType  # train_gpt.py, or the --script
    c: Any  # its Config with the number formats of validation, and attention for this machine
    devices: list[jax.Device]  # 1, 2, 4 or 8
    stage: int  # the last validation used this stage's windows and rotations
    arrays: dict[str, np.ndarray]  # by name, without padding; float32
    config: dict[str, Any]  # the run's Config as JSON
    result: dict[str, Any]  # the run's RESULT


def refuse(message: object) -> NoReturn:
    """Exits with status 2 and one line that begins with the tool's name."""
    print(f"{Path(sys.argv[0]).name}: {message}", file=sys.stderr)
    sys.exit(2)


def parser(doc: str) -> argparse.ArgumentParser:
    """A parser for a tool whose first argument is WEIGHTS. It reports bad arguments by refuse()."""
    form = argparse.RawDescriptionHelpFormatter
    cli = argparse.ArgumentParser(description=doc, allow_abbrev=False, formatter_class=form)
    cli.error = refuse
    cli.add_argument("weights", type=Path, metavar="WEIGHTS", help="logs/<run>.npz")
    cli.add_argument(
        "--script", type=Path, default=ROOT / "train_gpt.py", help="the script that trained them"
    )
    return cli


def open_script(path: Path) -> ModuleType:
    """Imports a copy of train_gpt.py; exits with status 2 if it is not one."""
    try:
        spec = importlib.util.spec_from_file_location("train_gpt", path)
        code = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(code)
    except (Exception, SystemExit) as error:
        refuse(f"--script {path} is not a script like train_gpt.py: {error!r}")
    code.refuse = refuse  # so that its messages begin with the tool's name
    missing = [name for name in NEEDS.split() if not hasattr(code, name)]
    if missing:
        refuse(
            f"--script {path} has no {missing[0]}: it is older than evals/, or not a train_gpt.py"
        )
    return code


def make_config(code: ModuleType, config: dict[str, Any]) -> Any:
    """The script's Config from JSON, in which tuples are lists, and layers and stages are dicts."""

    def as_tuples(value):
        return tuple(as_tuples(x) for x in value) if isinstance(value, list) else value

    config = {name: as_tuples(value) for name, value in config.items()}
    for name, kind in {"layers": code.Layer, "stages": code.Stage}.items():
        rows = []
        for row in config[name]:
            rows.append(kind(**{key: as_tuples(value) for key, value in row.items()}))
        config[name] = tuple(rows)
    return code.Config(**config)


def is_of_record_92(config: dict[str, Any]) -> bool:
    """Whether a run's model has parts that only record 92 has, and that these tools do not know."""
    parts = ("averages", "canonical", "mudd_groups", "segment")
    if any(config.get(name) for name in parts):
        return True
    layers = config.get("layers", [])
    return any(layer.get("narrow_qk") or layer.get("mlps", 1) != 1 for layer in layers)


def as_weights(facts: dict[str, Any], state: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The facts and arrays of a checkpoint in the form of a file of weights, except that parameters
    are padded. See dev/guard.py, and save_weights() in train_gpt.py."""
    config = {"data": "", "save": 0}  # the fields that a checkpoint leaves out
    for name, value in facts["identity"].items():
        if name.startswith("--"):
            config[name[2:]] = value
    about = {"config": config, "result": {"steps": facts["step"]}}
    about["source"] = facts["identity"]["the source"]
    arrays = {name: np.array(json.dumps(value)) for name, value in about.items()}
    for name, array in state.items():
        if name.startswith(".params["):
            arrays[name.removeprefix(".params['").removesuffix("']")] = array
    return arrays


def open_weights(path: Path, script: Path, checkpoints: bool = False) -> Weights:
    """Reads logs/<run>.npz, or a checkpoint if the tool allows it; exits with status 2 if the file
    is damaged, or its model is not the script's."""
    if path.is_dir():
        names = "*.npz or *.state" if checkpoints else "*.npz"
        refuse(f"{path} is a folder: name a file of weights in it, {names}")
    if not path.is_file():
        refuse(f"no such file: {path}")
    if path.suffix == ".txt":
        refuse(f"{path} is a log: a run writes its weights, *.npz, when it ends")
    try:
        with np.load(path) as file:
            broken = file.zip.testzip()  # np.load checks only what it reads to the end
            if broken:
                raise ValueError(f"{broken} has a wrong checksum")
            arrays = dict(file)
        padded = "facts" in arrays
        if padded:
            facts = json.loads(arrays["facts"].item())
            if not checkpoints:
                refuse(
                    f"{path} is a checkpoint, which only sample and loss read; this makes weights: "
                    f"{facts['command']} --resume {shlex.quote(str(path))}"
                )
            arrays = as_weights(facts, arrays)
        config = json.loads(arrays.pop("config").item())
        result = json.loads(arrays.pop("result").item())
        source = json.loads(arrays.pop("source").item())
    except Exception as error:
        why = f"{type(error).__name__}: {str(error).split('. ')[0]}"  # its first sentence
        refuse(f"{path} is not a complete file of weights from this train_gpt.py: {why}")
    if "tables" in arrays or is_of_record_92(config):
        refuse(
            f"{path} is of record 92's model, which this tool cannot read: see "
            "records/upstream92/README.md"
        )
    code = open_script(script)
    hint = "name the script that trained it with --script"
    unshared = {field.name for field in dataclasses.fields(code.Config)} ^ config.keys()
    if unshared:
        refuse(f"{path} and {script}: only one of them has the field {min(unshared)}; {hint}")
    try:
        c = make_config(code, config)
        stage = c.stage_at(result["steps"])
        table = code.param_table(c)
        if padded:
            arrays |= code.unpad(arrays, c)
    except Exception as error:  # for instance a layer with a field that the script lacks
        refuse(f"{path} does not have the form that {script} writes: {error!r}; {hint}")
    found = {name: x.shape for name, x in arrays.items() if x.dtype == np.float32}
    shapes = {name: param.model_shape for name, param in table.items()}
    for name in shapes | arrays:
        shape = found.get(name)
        expected = shapes.get(name)
        if shape != expected:
            refuse(f"{path}: the shape of {name} is {shape}, but {script} has {expected}; {hint}")
    if source != crc32(code.SOURCE.encode()):
        print(f"warning: {script} has changed since {path}; if its model has changed, {hint}",
              file=sys.stderr)  # fmt: skip
    count = max(n for n in (1, 2, 4, 8) if n <= jax.device_count())
    devices = jax.devices()[:count]
    c = code.fit_kernels(devices[0], c.for_validation())
    return Weights(path, code, c, devices, stage, arrays, config, result)


def val_shard(w: Weights, place: Path, T: int) -> np.memmap:
    """The tokens of a shard, or of the first *_val_*.bin in a folder. Exits with status 2 if it is
    incomplete, or the run's model cannot read it in sequences of T tokens."""
    path = min(place.glob("[!.]*_val_*.bin"), default=place)
    if not path.is_file():
        refuse(f"{place} is not a token shard, and has no *_val_*.bin: see data/README.md")
    shard = w.code.open_shard(path)
    largest = int(shard.max())
    starts = np.flatnonzero(shard == w.c.eot)
    if largest >= w.c.vocab or len(starts) == 0:
        refuse(f"{path}: largest token is {largest} (--vocab {w.c.vocab}), {len(starts)} are --eot")
    # positions() in train_gpt.py can tell 4,095 documents of a sequence apart.
    if np.any(starts[4095:] - starts[:-4095] < T):
        refuse(f"{path}: a sequence of {T} tokens would hold more than 4,095 documents")
    return shard


def runner(w: Weights, read: Callable, devices: int | None = None) -> Callable:
    """Returns run(tokens, *more), which runs the model and returns read(x, head, tokens, *more).

    tokens (B, T + 1): the model reads the first T. x (B, T, D) is its normalised output; head
    (V, D) has padding beyond the vocabulary, as in training. The rows of tokens, of `more` and of
    the result are spread over the first `devices` devices (None: all)."""
    set_compilation_cache()
    mesh = w.code.make_mesh(w.devices[:devices])
    c = w.c
    stored = {}
    specs = {}
    table = w.arrays["bigram"]  # it stays in the host's memory: a device gets the rows it reads
    for name, param in w.code.param_table(c).items():
        if name == "bigram":
            continue
        padded = np.zeros(param.shape, np.float32)
        is_bank = param.sharding == w.code.BANK
        rows = padded.reshape(-1, *param.shape[2:]) if is_bank else padded  # a view
        rows[: len(w.arrays[name])] = w.arrays[name]
        specs[name] = param.sharding
        stored[name] = jax.device_put(padded, NamedSharding(mesh, param.sharding))
    on_mesh = functools.partial(jax.shard_map, mesh=mesh, check_vma=False)
    gather = on_mesh(lambda p: w.code.whole_weights(p, c), in_specs=(specs,), out_specs=P())
    whole = jax.jit(gather)(stored)

    def on_device(whole: dict, arguments: tuple[Array, ...]) -> Any:
        tokens, rows, *more = arguments
        weights = whole | {"bigram_rows": rows}
        x = w.code.norm(w.code.forward(weights, tokens[:, :-1], c, w.stage))
        return read(x, whole["head"], tokens, *more)

    program = on_mesh(on_device, in_specs=(P(), P("fsdp")), out_specs=P("fsdp"))
    program = jax.jit(program, compiler_options=w.code.OPTIONS.get(w.devices[0].platform))
    ngram_rows = jax.jit(functools.partial(w.code.ngram_rows, c=c))

    def run(tokens, *more):
        tokens = jnp.asarray(tokens, "int32")
        rows = table[np.asarray(ngram_rows(tokens[:, :-1]))]
        return program(whole, (tokens, jnp.asarray(rows), *more))

    return run


def logits(w: Weights, x: Array, head: Array) -> Array:
    """The model's logits (..., V) in float32, after the softcap, for x (..., D), head (V, D)."""
    return w.code.softcap(jnp.einsum("...D,VD->...V", x, head.astype(x.dtype)))


def tokenizer(c: Any) -> SimpleNamespace:
    """shards.coder for a Config; exits with status 2 if it has none."""
    try:
        return shards.coder(c.vocab, c.eot)
    except shards.Fault as fault:
        refuse(fault)
