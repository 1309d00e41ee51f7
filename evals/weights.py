"""What the tools of evals/ share: the weights of a run, checked, and the model that they are of."""

import argparse
import dataclasses
import functools
import importlib.util
import json
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
sys.path += [str(ROOT / "data"), str(ROOT / "records")]
import shards  # noqa: E402

NEEDS = "Layer Stage param_table rope_frequencies make_mesh whole_weights forward hash_bigrams "
NEEDS += "take_rows norm softcap attend attention block mlp run_net weighted_sum"


class Weights(NamedTuple):
    path: Path
    code: ModuleType  # the train_gpt.py whose model they are of
    c: Any  # its Config, in formats of validation, with the attention that this machine has
    devices: list[jax.Device]  # 1, 2, 4 or 8
    stage: int  # whose windows and rotation the last validation had
    arrays: dict[str, np.ndarray]  # by name, float32, without padding
    config: dict[str, Any]  # as the run had it
    result: dict[str, Any]  # its RESULT


def refuse(message: str) -> NoReturn:
    print(f"{Path(sys.argv[0]).name}: {message}", file=sys.stderr)
    sys.exit(2)


def parser(doc: str) -> argparse.ArgumentParser:
    """Of a tool whose first argument is WEIGHTS; it, too, refuses in one line."""
    form = argparse.RawDescriptionHelpFormatter
    cli = argparse.ArgumentParser(description=doc, allow_abbrev=False, formatter_class=form)
    cli.error = refuse
    cli.add_argument("weights", type=Path, metavar="WEIGHTS", help="logs/<run>.npz")
    cli.add_argument("--script", type=Path, default=ROOT / "train_gpt.py", help="that trained them")
    return cli


def open_script(path: Path) -> ModuleType:
    try:
        spec = importlib.util.spec_from_file_location("train_gpt", path)
        code = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(code)
    except (Exception, SystemExit) as error:
        refuse(f"--script {path} is no script like train_gpt.py: {error!r}")
    code.refuse = refuse  # by the name of the tool
    lacks = [name for name in NEEDS.split() if not hasattr(code, name)]
    if lacks:
        refuse(f"--script {path} has no {lacks[0]}: it is older than evals/, or no train_gpt.py")
    return code


def make_config(code: ModuleType, config: dict[str, Any]) -> Any:
    """The script's Config from its JSON, in which tuples are lists and layers are dicts."""

    def as_tuples(value):
        return tuple(as_tuples(x) for x in value) if isinstance(value, list) else value

    config = {name: as_tuples(value) for name, value in config.items()}
    for name, kind in ("layers", code.Layer), ("stages", code.Stage):
        rows = [{k: as_tuples(v) for k, v in row.items()} for row in config[name]]
        config[name] = tuple(kind(**row) for row in rows)
    return code.Config(**config)


def open_weights(path: Path, script: Path) -> Weights:
    """Exits 2 where the file is not whole, or not of the script's model."""
    try:
        with np.load(path) as file:
            broken = file.zip.testzip()  # np.load checks only what it reads to the end
            if broken:
                raise ValueError(f"{broken} has a wrong checksum")
            arrays = dict(file)
        config = json.loads(arrays.pop("config").item())
        result = json.loads(arrays.pop("result").item())
        source = json.loads(arrays.pop("source").item())
    except Exception as error:
        why = f"{type(error).__name__}: {str(error).split('. ')[0]}"
        refuse(f"{path} is no whole file of weights, as train_gpt.py now leaves them: {why}")
    code = open_script(script)
    hint = "name the script that trained it by --script"
    differ = {field.name for field in dataclasses.fields(code.Config)} ^ config.keys()
    if differ:
        refuse(f"{path} and {script}: only one of them has the field {min(differ)}; {hint}")
    try:
        c = make_config(code, config)
        stage = c.stage_at(result["steps"])
        table = code.param_table(c)
    except Exception as error:  # layers with fields that it does not know, or alike
        refuse(f"{path} is not of {script}'s form: {error!r}; {hint}")
    found = {name: x.shape for name, x in arrays.items() if x.dtype == np.float32}
    shapes = {name: param.model_shape for name, param in table.items()}
    for name in shapes | arrays:
        there, here = found.get(name), shapes.get(name)
        if there != here:
            refuse(f"{path}: the shape of {name} is {there}, in {script} it is {here}; {hint}")
    if source != crc32(code.SOURCE.encode()):
        print(f"warning: {script} has changed since {path}; if its model has, {hint}",
              file=sys.stderr)  # fmt: skip
    count = max(n for n in (1, 2, 4, 8) if n <= jax.device_count())
    devices = jax.devices()[:count]
    c = code.fit_kernels(devices[0], c.for_validation())
    return Weights(path, code, c, devices, stage, arrays, config, result)


def val_shard(w: Weights, place: Path, T: int) -> np.memmap:
    """The tokens of the file, or of the folder's *_val_*.bin, checked for sequences of T."""
    path = min(place.glob("[!.]*_val_*.bin"), default=place)
    if not path.is_file():
        refuse(f"{place} is no shard of tokens and holds no *_val_*.bin: see data/README.md")
    shard = w.code.open_shard(path)
    w.code.shard_facts(shard, [(1, T, 0)], w.c)
    return shard


def runner(w: Weights, read: Callable, devices: int | None = None) -> Callable:
    """run(tokens, *more) of read(x, head, tokens, *more): x (B, T, D) is normalised, head is
    (V, D), and V more than the vocabulary, as in training. tokens (B, T + 1) have one more than the
    model reads; their rows, and those of `more` and of what comes back, are spread over devices."""
    w.code.set_compilation_cache()
    mesh = w.code.make_mesh(w.devices[:devices])
    c = w.c
    stored = {}
    specs = {}
    for name, param in w.code.param_table(c).items():
        padded = np.zeros(param.shape, np.float32)
        is_bank = param.sharding == w.code.BANK
        flat = padded.reshape(-1, *param.shape[2:]) if is_bank else padded
        flat[: len(w.arrays[name])] = w.arrays[name]
        specs[name] = param.sharding
        stored[name] = jax.device_put(padded, NamedSharding(mesh, param.sharding))
    on_mesh = functools.partial(jax.shard_map, mesh=mesh, check_vma=False)
    gather = on_mesh(lambda p: w.code.whole_weights(p, c), in_specs=(specs,), out_specs=P())
    whole = jax.jit(gather)(stored)

    def on_device(whole: dict, given: tuple[Array, ...]) -> Any:
        tokens, *more = given
        row, _ = w.code.hash_bigrams(tokens[:, :-1], c)
        weights = whole | {"bigram_rows": w.code.take_rows(whole["bigram"], row)}
        x = w.code.norm(w.code.forward(weights, tokens[:, :-1], c, w.stage))
        return read(x, whole["head"], tokens, *more)

    program = on_mesh(on_device, in_specs=(P(), P("fsdp")), out_specs=P("fsdp"))
    program = jax.jit(program, compiler_options=w.code.OPTIONS.get(w.devices[0].platform))
    return lambda tokens, *more: program(whole, (jnp.asarray(tokens, "int32"), *more))


def logits(w: Weights, x: Array, head: Array) -> Array:
    """(..., V) in float32, of x (..., D)."""
    return w.code.softcap(jnp.einsum("...D,VD->...V", x, head.astype(x.dtype)))


def tokenizer(c: Any) -> SimpleNamespace:
    try:
        return shards.coder(c.vocab, c.eot)
    except shards.Fault as fault:
        refuse(fault)
