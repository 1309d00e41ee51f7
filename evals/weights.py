"""What the tools of evals/ share: the weights of a run, checked, and the model that they are of."""

import argparse
import dataclasses
import functools
import hashlib
import importlib.util
import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple, NoReturn

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, P
from jax.sharding import NamedSharding

ROOT = Path(__file__).resolve().parent.parent
NEEDS = "Config param_table gather forward read_pairs softcap norm make_mesh fit_devices".split()


class Weights(NamedTuple):
    path: Path
    code: ModuleType  # the train_gpt.py whose model they are of
    c: Any  # its Config, in the formats of validation
    stage: int  # whose windows and rotation the last validation had
    arrays: dict[str, np.ndarray]  # by name, float32, without padding
    config: dict[str, Any]  # as the run had it
    result: dict[str, Any]  # its RESULT


def refuse(message: str) -> NoReturn:
    print(f"{Path(sys.argv[0]).name}: {' '.join(message.split())}", file=sys.stderr)
    sys.exit(2)


def parser(doc: str) -> argparse.ArgumentParser:
    """Of a tool whose first argument is WEIGHTS; it, too, refuses in one line."""
    cli = argparse.ArgumentParser(
        description=doc, allow_abbrev=False, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    cli.error = refuse
    cli.add_argument("weights", type=Path, metavar="WEIGHTS", help="logs/<run>.npz")
    cli.add_argument("--script", type=Path, default=ROOT / "train_gpt.py", help="that trained them")
    return cli


def open_script(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location("train_gpt", path)
    code = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(code)
    except Exception as error:
        refuse(f"{path} is no script like train_gpt.py: {error!r}")
    if lacks := [name for name in NEEDS if not hasattr(code, name)]:
        refuse(f"{path} has no {lacks[0]}: it is older than evals/, take the tools of its time")
    return code


def open_weights(path: Path, script: Path) -> Weights:
    """Exits 2 where the file is not whole, or not of the script's model."""
    try:
        with np.load(path) as file:
            if broken := file.zip.testzip():  # np.load checks only what it reads to the end
                raise ValueError(f"{broken} has a wrong checksum")
            arrays = dict(file)
        config, result, source = (
            json.loads(arrays.pop(name).item()) for name in ("config", "result", "source")
        )
    except KeyError as error:
        refuse(f"{path} holds no {error}: it is not what a run of this train_gpt.py leaves")
    except Exception as error:
        refuse(f"{path} is no whole file of weights: {error}")
    code = open_script(script)
    hint = "name the script that trained it by --script"
    names = {field.name for field in dataclasses.fields(code.Config)}
    if differ := sorted(names ^ config.keys()):
        whose = "only the script" if differ[0] in names else "only its own"
        refuse(f"{path}: {whose} has --{differ[0]}; {hint}")
    c = code.Config(**config)
    shapes = {name: row.shape for name, row in code.param_table(c).items()}
    found = {name: x.shape for name, x in arrays.items() if x.dtype == np.float32}
    if differ := [name for name in shapes | arrays if shapes.get(name) != found.get(name)]:
        name = differ[0]
        told = f"in the file {found.get(name)}, in the script {shapes.get(name)}"
        refuse(f"{path}: {name} has another shape, {told}; {hint}")
    if source != hashlib.sha256(code.SOURCE.encode()).hexdigest():
        print(f"warning: {script} has changed since {path} was trained; if its model did, {hint}",
              file=sys.stderr)  # fmt: skip
    return Weights(path, code, c.for_validation(), c.stage_at(result["steps"]), arrays, config,
                   result)  # fmt: skip


def runner(w: Weights, read: Callable, devices: int | None = None) -> Callable:
    """run(tokens, *more) of read(x, head, tokens, *more): x (B, T, D) is normalised, head (V, D)
    as loss_fn takes it. tokens (B, T + 1) have one more than the model reads; rows, as those of
    `more` and of what comes back, are spread over the devices."""
    cache = jax.config.jax_compilation_cache_dir or str(ROOT / ".cache/jax")
    jax.config.update("jax_compilation_cache_dir", cache)
    found, c = w.code.fit_devices("", dataclasses.replace(w.c, batch=8))
    mesh = w.code.make_mesh(found[:devices])
    stored, specs = {}, {}
    for name, row in w.code.param_table(c).items():
        whole, specs[name] = np.zeros(row.stored_shape, np.float32), row.spec
        flat = whole.reshape(-1, *row.shape[1:]) if whole.ndim > len(row.shape) else whole
        flat[: row.shape[0]] = w.arrays[name]
        stored[name] = jax.device_put(whole, NamedSharding(mesh, row.spec))
    on_mesh = functools.partial(jax.shard_map, mesh=mesh, check_vma=False)
    gather = on_mesh(lambda p: w.code.gather(p, c), in_specs=(specs,), out_specs=P())
    whole = jax.jit(gather)(stored)

    def on_device(whole: dict, tokens: Array, *more: Array) -> Any:
        pairs = w.code.read_pairs(whole, tokens, c)
        x = w.code.norm(w.code.forward(pairs, tokens[:, :-1], c, w.stage))
        return read(x, whole["head"][: c.vocab], tokens, *more)

    def program(whole: dict, tokens: Array, *more: Array) -> Any:
        specs = (P(), *[P("fsdp")] * (1 + len(more)))
        return on_mesh(on_device, in_specs=specs, out_specs=P("fsdp"))(whole, tokens, *more)

    options = w.code.OPTIONS.get(mesh.devices.flat[0].platform)
    program = jax.jit(program, compiler_options=options)
    return lambda tokens, *more: program(whole, jnp.asarray(tokens, "int32"), *more)


def logits(w: Weights, x: Array, head: Array) -> Array:
    """(..., V) in float32, of x (..., D)."""
    return w.code.softcap(jnp.einsum("...D,VD->...V", x, head.astype(x.dtype)))


class Bytes:
    """The vocabulary of `tiny`: the bytes of UTF-8."""

    def encode(self, text: str) -> list[int]:
        return [*text.encode()]

    def piece(self, token: int) -> bytes:
        return bytes([token])


class GPT2:
    def __init__(self):
        try:
            import tiktoken

            encoding = tiktoken.get_encoding("gpt2")
        except Exception as error:  # of the network, of the cache, of files that are not its own
            get = "python -c 'import tiktoken; tiktoken.get_encoding(\"gpt2\")'"
            refuse(f"tiktoken cannot load GPT-2's vocabulary ({type(error).__name__}): with a "
                   f"network, run TIKTOKEN_CACHE_DIR=gpt2 {get}, copy the folder gpt2 here and set "
                   "TIKTOKEN_CACHE_DIR to it")  # fmt: skip
        self.encode, self.piece = encoding.encode_ordinary, encoding.decode_single_token_bytes


def tokenizer(c: Any) -> Bytes | GPT2:
    """encode(text) -> tokens, piece(token) -> bytes."""
    kinds = {(257, 256): Bytes, (50257, 50256): GPT2}
    if (c.vocab, c.eot) not in kinds:
        refuse(f"there is a tokenizer for bytes and for GPT-2's tokens, none for {c.vocab} tokens")
    return kinds[c.vocab, c.eot]()
