"""Reads and checks a run's weights, and runs its model, for all tools of evals/."""

import argparse
import dataclasses
import importlib.machinery
import importlib.util
import json
import math
import os
import re
import shlex
import struct
import sys
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, NamedTuple, NoReturn
from zlib import crc32

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, P, lax
from jax.sharding import NamedSharding

ROOT = Path(__file__).resolve().parent.parent
sys.path += [str(ROOT / folder) for folder in ("data", "run", "records")]
import guard  # noqa: E402
import messages  # noqa: E402
import shards  # noqa: E402
from cache import set_compilation_cache  # noqa: E402
from shards import Fault  # noqa: E402

NEEDS = (  # what the tools call of a script
    "Layer Stage param_table rope_frequencies make_mesh whole_weights forward ngram_rows "
    "norm softcap attend attention in_heads block mlp run_net weighted_sum "
    "fit_kernels"
)
LARGEST_TEXT = 2**24  # bytes of JSON in a file
POSITIONS = 64  # whose probabilities of all tokens are computed at once
RUNS_FILE = "name a run's logs/<run>.npz"
HINT = "name the script that trained it with --script"
OTHERS = {  # how files begin that are no archives of arrays: what they are, and what to do about it
    (b"version https://git-lfs",): "a Git LFS pointer: type git lfs pull in the clone it is from",
    (b"PK",): "the beginning of a file that was cut off: get it again",
    (b"\x80",): f"a pickle, which could run programs: {RUNS_FILE}",
    (b"\x93NUMPY",): f"a single array: {RUNS_FILE}",
    (struct.pack("<i", shards.MAGIC),): "a shard of tokens: weights come first, as logs/<run>.npz",
    (b"<",): "HTML or XML, perhaps a server's error message: get it again",
    (bytes(16),): "zeros, which a power cut or a full disk leaves: get it again",
    shards.PACKED: "packed by gzip, bzip2, xz or zstd: unpack it",
}


class Header(NamedTuple):
    """What an archive states of an array before its numbers."""

    shape: tuple[int, ...]
    dtype: np.dtype


class Weights(NamedTuple):
    """A run's weights, and what is needed to run its model."""

    path: Path
    code: ModuleType  # the script that trained them
    script: Path  # its file, or the log that has its source
    c: Any  # its Config with the number formats of validation, and attention for this machine
    devices: list[jax.Device]  # 1, 2, 4 or 8
    stage: int  # the last validation used this stage's windows and rotations
    arrays: dict[str, np.ndarray]  # by name, without padding; float32
    config: dict[str, Any]  # the run's Config as JSON
    result: dict[str, Any]  # the run's RESULT


def refuse(message: object) -> NoReturn:
    """Exits with status 2 and one line that begins with the tool's name."""
    text = " ".join(str(message).splitlines())  # names may have newlines
    print(f"{Path(sys.argv[0]).name}: {text}", file=sys.stderr)
    sys.exit(2)


class Parser(messages.Parser):
    """Parses WEIGHTS, flags, and perhaps one more word. Without WEIGHTS, the newest in logs/ are
    taken."""

    def __init__(self, doc: str, other: dict[str, str]):
        names = " ".join(["[WEIGHTS]", *(f"[{word}]" for word in other.values())])
        super().__init__(description=doc, usage=f"%(prog)s {names} [--flag value ...]")
        self.other = other
        what = "WEIGHTS: logs/<run>.npz; default: the newest in logs/"
        self.add_argument("words", nargs="*", metavar=names, help=what)
        what = "the script that trained the weights; default: the one with the checksum in them"
        self.add_argument("--script", type=Path, help=what)

    def parse_args(self, args: list[str] | None = None) -> argparse.Namespace:
        """The arguments; words and flags may come in any order. Of the words, the first one is
        WEIGHTS if it ends like their files, if it is a file, or if there are more words."""
        parsed = self.parse_intermixed_args(args)
        words = parsed.words
        most = 1 + len(self.other)
        if len(words) > most:
            self.error(f"unexpected words: {' '.join(words[most:])}; put quotes around a text")
        for word in words:
            flag, is_joined, _ = word.partition("=")
            if is_joined and re.fullmatch(r"--\w+", flag):  # a word for argparse, if it has a space
                self.error(f"there is no flag {flag}: write a prompt without one")
        first = words[0] if words else ""
        if "prompt" in self.other and len(words) == 1 and os.path.isdir(first):
            self.error(f"{first} is a folder: name a run's weights in it, *.npz")
        is_file = first.endswith((".npz", ".state")) or os.path.isfile(first)
        if not is_file and len(words) < most:
            parsed.weights = newest()
        elif is_file or os.path.exists(first):
            parsed.weights = Path(words.pop(0))
        else:
            self.error(f"there is no file {first}; a text of several words needs quotes around it")
        for name in self.other:
            setattr(parsed, name, words[0] if words else None)
        return parsed


def parser(doc: str, **other: str) -> Parser:
    """A parser for a tool with this description. prompt="PROMPT" makes another word after WEIGHTS
    the `prompt` of the arguments, None if it is missing."""
    return Parser(doc, other)


def newest() -> Path:
    """The newest weights in logs/, which are named on stderr; exits with status 2 if there are
    none."""
    found = [path for path in (ROOT / "logs").glob("*.npz") if path.is_file()]
    if not found:
        refuse("there are no weights in logs/: train first, ./run.sh")
    path = short(max(found, key=lambda path: path.stat().st_mtime))
    tell(f"takes the newest weights, {path}")
    return path


def tell(message: str) -> None:
    """Prints a line with the tool's name on stderr."""
    print(f"{Path(sys.argv[0]).name}: {' '.join(message.splitlines())}", file=sys.stderr)


def short(path: Path) -> Path:
    """A path relative to the current folder, if it is in it."""
    return path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path


def find_script(path: Path, source: int) -> tuple[Path, str]:
    """The script that trained weights, by the crc32 of its source, and a remark: train_gpt.py,
    another one in its folder, or the log beside the weights, which begins with it; if none has
    this crc32, train_gpt.py. Logs outside of logs/ are not read: they may be somebody else's,
    and a script can run anything."""
    ours = ROOT / "train_gpt.py"
    for script in (ours, *sorted(ROOT.glob("*.py"))):
        if crc32(script.read_bytes()) == source:
            return script, "" if script == ours else f"takes {short(script)}, which trained {path}"
    log = log_of(path)
    is_ours = log.parent.resolve() == (ROOT / "logs").resolve()
    if is_ours and crc32(script_in(log)) == source:
        return log, f"takes the script that trained {path} from {short(log)}"
    return ours, ""


def log_of(path: Path) -> Path:
    """The log of weights, logs/<run>.npz, or of a checkpoint, logs/<run>/<step>.state."""
    return (path.parent if path.suffix == ".state" else path).with_suffix(".txt")


def script_in(log: Path) -> bytes:
    """The source that a log begins with; empty if there is none."""
    if not log.is_file():
        return b""
    source, line, _ = log.read_bytes().partition(b"=" * 100 + b"\n")
    return source if line else b""


def open_script(path: Path) -> ModuleType:
    """Imports a copy of train_gpt.py, or the one that a log begins with; exits with status 2 if it
    is not one."""
    if path.is_dir():
        refuse(f"--script {path} is a folder: name the script that trained the weights")
    with tempfile.TemporaryDirectory() as folder:
        file = path
        if path.suffix == ".txt":
            file = Path(folder) / "train_gpt.py"
            file.write_bytes(script_in(path))
        try:
            # It is Python also where its name does not end in .py.
            loader = importlib.machinery.SourceFileLoader("train_gpt", str(file))
            spec = importlib.util.spec_from_loader("train_gpt", loader)
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
    """The script's Config from JSON, in which tuples are lists, and layers and stages are dicts.
    Raises an error if the script could not train it."""

    def as_tuples(value):
        return tuple(as_tuples(x) for x in value) if isinstance(value, list) else value

    config = {name: as_tuples(value) for name, value in config.items()}
    for name, kind in {"layers": code.Layer, "stages": code.Stage}.items():
        rows = []
        for row in config[name]:
            rows.append(kind(**{key: as_tuples(value) for key, value in row.items()}))
        config[name] = tuple(rows)
    for name, value in config.items():
        default = getattr(code.Config, name, None)
        kinds = (int, float) if isinstance(default, float) else type(default)
        if default is not None and not isinstance(value, kinds):
            raise TypeError(f"{name} is {value!r}")
    c = code.Config(**config)
    for holds, message in guard.rules(code, c):
        if not holds:
            raise ValueError(message)
    return c


def is_of_record_92(config: dict[str, Any]) -> bool:
    """Whether a run's model has parts that only record 92 has, and that these tools do not know."""
    parts = ("averages", "canonical", "mudd_groups", "segment")
    if any(config.get(name) for name in parts):
        return True
    layers = config.get("layers", [])
    return any(layer.get("narrow_qk") or layer.get("mlps", 1) != 1 for layer in layers)


def recognise(start: bytes) -> str:
    """What a file is that is no archive, by its first bytes, and what to do about it."""
    if not start:
        return "empty: get it again"
    for firsts, what in OTHERS.items():
        if start.lstrip().startswith(firsts):
            return what
    if start[8:9] == b"{":
        return "one of safetensors: name the logs/<run>.npz that it was exported from"
    return f"begins with {start[:16]!r}: {RUNS_FILE}"


def read_headers(archive: zipfile.ZipFile) -> dict[str, Header]:
    """The headers of all arrays in an archive, by name. The numbers are not read, because a small
    archive may unpack to more than the memory. Raises Fault."""
    found = {}
    for entry in archive.infolist():
        name = entry.filename.removesuffix(".npy")
        if name == entry.filename:
            raise Fault(f"holds {name}, which is no array of NumPy: {RUNS_FILE}")
        if name in found:
            raise Fault(f"holds {name} twice: {RUNS_FILE}")
        with archive.open(entry) as file:
            if np.lib.format.read_magic(file) != (1, 0):
                raise ValueError(f"its array {name} has another version of NumPy's format")
            shape, _, dtype = np.lib.format.read_array_header_1_0(file)
            size = file.tell() + dtype.itemsize * math.prod(shape)
        if dtype.hasobject:
            raise Fault(f"holds {name} as a pickle, which could run programs: {RUNS_FILE}")
        if entry.file_size != size:
            raise ValueError(f"its array {name} has {entry.file_size} bytes, not {size}")
        found[name] = Header(shape, dtype)
    return found


def read_array(archive: zipfile.ZipFile, name: str) -> np.ndarray:
    """An array of an archive. It is read to its end, where zipfile compares its checksum."""
    with archive.open(f"{name}.npy") as file:
        return np.lib.format.read_array(file, allow_pickle=False)


def read_json(archive: zipfile.ZipFile, headers: dict, name: str, kind: type) -> Any:
    """What an archive states as JSON text. Raises Fault if it is not of this kind."""
    if name not in headers:
        raise Fault(f"has no {name}: another program wrote it, or an older train_gpt.py")
    shape, dtype = headers[name]
    if shape != () or dtype.kind != "U" or dtype.itemsize > LARGEST_TEXT:
        raise Fault(f"has a {name} of {dtype} {shape}, which is no JSON text: {RUNS_FILE}")
    value = json.loads(read_array(archive, name).item())
    if not isinstance(value, kind):
        raise Fault(f"has {json.dumps(value)[:40]} as its {name}: {RUNS_FILE}")
    return value


def about_checkpoint(facts: dict[str, Any]) -> tuple[dict, dict, int]:
    """The config, the result and the source of a checkpoint. See run/guard.py."""
    config = {"data": "", "save": 0}  # the fields that a checkpoint leaves out
    for name, value in facts["identity"].items():
        if name.startswith("--"):
            config[name[2:]] = value
    return config, {"steps": facts["step"]}, facts["identity"]["the source"]


def check_names(found: dict[str, Header], shapes: dict, script: Path) -> None:
    """Raises Fault unless arrays have the names and shapes of a script's parameters."""
    for name in shapes | found:
        if name not in shapes:
            raise Fault(f"has an array {name}, but {script} has none: {HINT}")
        if name not in found:
            raise Fault(f"has no array {name}, but {script} has one: {HINT}")
        shape, dtype = found[name]
        if dtype != np.float32:
            numbers = f"{dtype.name} ({dtype.str})"
            raise Fault(f"has {name} as {numbers}, but a run writes float32: take the run's file")
        if shape != shapes[name]:
            raise Fault(f"has {name} of shape {shape}, but {script} has {shapes[name]}: {HINT}")


def check_finite(name: str, x: np.ndarray) -> None:
    """Raises Fault if values of an array are NaN or infinite."""
    # In pieces, because isfinite() makes an array: the record's largest array has 1.4 GB.
    pieces = np.array_split(x.ravel("K"), 100)
    bad = x.size - sum(np.count_nonzero(np.isfinite(piece)) for piece in pieces)
    if bad:
        raise Fault(
            f"has {bad} of {x.size} values of {name} that are not finite: the run diverged, or "
            "another program has changed the file; name the weights of another run"
        )


def open_weights(path: Path, script: Path | None = None, checkpoints: bool = False) -> Weights:
    """Reads logs/<run>.npz, or a checkpoint if the tool allows it; exits with status 2 if the file
    is damaged, its model is not the script's (None: find_script() finds it), or a number is not
    finite."""
    if path.is_dir():
        names = "*.npz or *.state" if checkpoints else "*.npz"
        refuse(f"{path} is a folder: name a file of weights in it, {names}")
    if path.suffix == ".txt":
        refuse(f"{path} is a log: a run writes its weights, *.npz, when it ends")
    try:
        with shards.open_file(path) as file:
            if not zipfile.is_zipfile(file):
                file.seek(0)
                raise Fault(f"is no file of weights, but {recognise(file.read(512))}")
            with zipfile.ZipFile(file) as archive:
                w = read_weights(archive, path, script, checkpoints)
    except Fault as fault:
        refuse(f"{path} {fault}")
    except (OSError, MemoryError):
        raise
    except Exception as error:  # of zipfile, zlib, NumPy or json
        why = f"{type(error).__name__}: {str(error).split('. ')[0]}"  # its first sentence
        refuse(f"{path} is damaged: get it again ({why})")
    count = max(n for n in (1, 2, 4, 8) if n <= jax.device_count())
    devices = jax.devices()[:count]
    c = w.code.fit_kernels(devices[0], w.c.for_validation())
    arrays = w.code.unpad(w.arrays, w.c)  # those of a checkpoint are padded
    return w._replace(c=c, devices=devices, arrays=arrays)


def read_weights(
    archive: zipfile.ZipFile, path: Path, script: Path | None, checkpoints: bool
) -> Weights:
    """Reads the weights of an archive as they are stored, after it has checked all names and sizes.
    They have no devices yet. Raises Fault."""
    headers = read_headers(archive)
    stored = {}  # the names that the parameters have in the archive
    is_checkpoint = "facts" in headers
    if is_checkpoint:
        facts = read_json(archive, headers, "facts", dict)
        if not checkpoints:
            raise Fault(
                "is a checkpoint, which only sample and loss read; this makes weights: "
                f"{facts['command']} --resume {shlex.quote(str(path))}"
            )
        config, result, source = about_checkpoint(facts)
        for key in headers:
            if key.startswith(".params["):
                stored[key.removeprefix(".params['").removesuffix("']")] = key
    else:
        config = read_json(archive, headers, "config", dict)
        result = read_json(archive, headers, "result", dict)
        source = read_json(archive, headers, "source", int)
        for key in headers:
            if key not in ("config", "result", "source"):
                stored[key] = key
    if "tables" in headers or is_of_record_92(config):
        raise Fault(
            "is of record 92's model, which this tool cannot read: see records/upstream92/README.md"
        )
    remark = ""
    if script is None:
        script, remark = find_script(path, source)
    code = open_script(script)
    script = short(script)
    unshared = {field.name for field in dataclasses.fields(code.Config)} ^ config.keys()
    if unshared:
        raise Fault(f"and {script}: only one of them has the field {min(unshared)}; {HINT}")
    try:
        c = make_config(code, config)
        if result["steps"] not in range(c.total_steps + 1):
            raise ValueError(f"{result['steps']!r} of {c.total_steps} steps")
        stage = c.stage_at(result["steps"])
        table = code.param_table(c)
    except Exception as error:  # for instance a layer with a field that the script lacks
        raise Fault(f"does not have the form that {script} writes: {error!r}; {HINT}") from None
    shapes = {}
    for name, param in table.items():
        shapes[name] = param.shape if is_checkpoint else param.model_shape
    check_names({name: headers[key] for name, key in stored.items()}, shapes, script)
    arrays = {}
    for name, key in stored.items():
        arrays[name] = read_array(archive, key)
        check_finite(name, arrays[name])
    if crc32(code.SOURCE.encode()) != source:
        print(f"warning: {script} has changed since {path}; if its model has changed, {HINT}",
              file=sys.stderr)  # fmt: skip
    elif remark:
        tell(remark)
    return Weights(path, code, script, c, [], stage, arrays, config, result)


def data_folder(w: Weights) -> Path:
    """The folder with the data of the run; exits with status 2 if the weights do not name it."""
    if not w.config["data"]:
        refuse(f"{w.path} does not name its data: pass SHARDS, a *_val_*.bin or its folder")
    return ROOT / w.config["data"]


def val_shard(w: Weights, place: Path, T: int) -> np.memmap:
    """The tokens of a shard, or of the first *_val_*.bin in a folder. Exits with status 2 if it is
    incomplete, or the run's model cannot read it in sequences of T tokens."""
    if not place.exists():
        refuse(f"no such file or folder: {place}")
    path = min(place.glob("[!.]*_val_*.bin"), default=place)
    if not path.is_file():
        refuse(f"{place} is not a token shard, and has no *_val_*.bin: see data/README.md")
    shard = w.code.open_shard(path)
    largest = int(shard.max())
    starts = np.flatnonzero(shard == w.c.eot)
    cure = "name a text in this model's tokens, data/README.md"
    if largest >= w.c.vocab:
        refuse(f"{path} has token {largest}, but the model knows {w.c.vocab} tokens: {cure}")
    if len(starts) == 0:
        refuse(f"{path} has no token {w.c.eot}, which starts a document: {cure}")
    # positions() in train_gpt.py can tell 4,095 documents of a sequence apart.
    if np.any(starts[4095:] - starts[:-4095] < T):
        refuse(f"{path}: a sequence of {T} tokens would hold more than 4,095 documents")
    return shard


class Placed(NamedTuple):
    """Weights on devices."""

    mesh: jax.sharding.Mesh
    arrays: dict[str, Any]  # as forward() takes them, without the rows of n-grams


def place(w: Weights, devices: int | None = None) -> Placed:
    """Puts the weights on the first `devices` devices (None: all), but for the table of n-grams,
    which stays in the host's memory: a device gets the rows that it reads."""
    set_compilation_cache()
    mesh = w.code.make_mesh(w.devices[:devices])
    stored = {}
    specs = {}
    for name, param in w.code.param_table(w.c).items():
        if name == "bigram":
            continue
        padded = np.zeros(param.shape, np.float32)
        is_bank = param.sharding == w.code.BANK
        rows = padded.reshape(-1, *param.shape[2:]) if is_bank else padded  # a view
        rows[: len(w.arrays[name])] = w.arrays[name]
        specs[name] = param.sharding
        stored[name] = jax.device_put(padded, NamedSharding(mesh, param.sharding))
    gather = jit(w, lambda p: w.code.whole_weights(p, w.c), mesh, (specs,), P())
    return Placed(mesh, gather(stored))


def jit(
    w: Weights,
    function: Callable,
    mesh: jax.sharding.Mesh,
    in_specs: Any,
    out_specs: Any,
    **options,
) -> Callable:
    """A program of a function that runs on each device of a mesh. Compiler options are added to
    the script's."""
    function = jax.shard_map(
        function, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False
    )
    compiler = w.code.OPTIONS.get(w.devices[0].platform) or {}
    options["compiler_options"] = compiler | options.get("compiler_options", {})
    return jax.jit(function, **options)


def runner(w: Weights, read: Callable, devices: int | None = None) -> Callable:
    """Returns run(tokens, *more), which runs the model and returns read(x, whole, tokens, *more).

    tokens (B, T + 1): the model reads the first T. x (B, T, D) is its normalised output; `whole`
    has the weights, as forward() takes them. The rows of tokens, of `more` and of the result are
    spread over the first `devices` devices (None: all)."""
    mesh, arrays = place(w, devices)

    def on_device(whole: dict, arguments: tuple[Array, ...]) -> Any:
        tokens, rows, *more = arguments
        weights = whole | {"bigram_rows": rows}
        x = w.code.norm(w.code.forward(weights, tokens[:, :-1], w.c, w.stage))
        return read(x, whole, tokens, *more)

    program = jit(w, on_device, mesh, (P(), P("fsdp")), P("fsdp"))

    def run(tokens, *more):
        tokens = np.asarray(tokens, "int32")
        rows = ngram_rows(w, tokens[:, :-1])
        return check_outputs(w, program(arrays, (tokens, rows, *more)))

    return run


def ngram_rows(w: Weights, tokens_BT: np.ndarray) -> np.ndarray:
    """The rows of the n-gram table that tokens read, (B, N, D): what forward() takes."""
    hashes = jax.jit(w.code.ngram_rows, static_argnames="c")
    return w.arrays["bigram"][np.asarray(hashes(tokens_BT, c=w.c))]


def check_outputs(w: Weights, outputs: Any) -> Any:
    """The outputs of a model as arrays of NumPy. Raises Fault if a number is not finite."""
    outputs = jax.tree.map(np.asarray, outputs)
    if not all(np.isfinite(x).all() for x in jax.tree.leaves(outputs)):
        raise Fault(
            f"{w.path}: the model computes numbers that are not finite in {w.c.compute}: its "
            "weights may be too large; name those of another run"
        )
    return outputs


# ---- Probabilities -------------------------------------------------------------------------------
def has_pointer(c: Any) -> bool:
    """Whether a model has a pointer. Frozen files do not have the field."""
    return bool(getattr(c, "pointer", 0))


class Prediction(NamedTuple):
    """What a model expects after one token of each of B texts. V is the vocabulary."""

    log_p: Array  # (B, V): log-probabilities of the next token
    pointer: Array | None  # (B, T): the pointer's attention to the texts; the rest is the sink's


def predict(w: Weights, whole: dict, x_BD: Array, tokens_BT: Array, t: Array, q_BE: Array | None,
            k_BTE: Array | None, padding: bool = True) -> Prediction:  # fmt: skip
    """What is expected after token t. x is the model's normalised output there, q and k are the
    pointer's, for token t and for all tokens. About padding, see head_log_p()."""
    c = w.c
    alone_BV, slot_B = head_log_p(w, x_BD, whole["head"], padding)
    if not has_pointer(c):
        return Prediction(alone_BV, None)
    labels = w.code.pointer_labels(tokens_BT, c)
    labels_t = lax.dynamic_slice_in_dim(labels, t, 1, axis=1)
    j_1T = jnp.arange(tokens_BT.shape[1])[None]
    first = (t // c.pointer_band - 1) * c.pointer_band  # of the band before that of t
    visible_1T = (first <= j_1T) & (j_1T < t)
    scores_B1T, sink_B1, longest_B1 = w.code.pointer_scores(
        q_BE[:, None], labels_t, k_BTE, labels, visible_1T, whole, c
    )
    weights_BT = jax.nn.softmax(jnp.append(scores_B1T[:, 0], sink_B1, axis=1))[:, :-1]
    votes_BT = jnp.roll(tokens_BT, -1, axis=1)  # the last token has weight 0
    row = jnp.arange(len(x_BD))[:, None]
    right_BV = jnp.zeros_like(alone_BV).at[row, votes_BT].add(weights_BT)
    every_B1 = weights_BT.sum(axis=1, keepdims=True)
    columns = jnp.broadcast_arrays(right_BV, every_B1, whole["pointer_slot"][longest_B1])
    mixed = jax.vmap(w.code.mixed_log_p, in_axes=(1, None, 1), out_axes=1)
    log_p_BV = mixed(alone_BV, slot_B, jnp.stack(columns, axis=-1))
    return Prediction(log_p_BV, weights_BT)


def predict_all(w: Weights, whole: dict, x_BTD: Array, tokens_BT: Array, read: Callable,
                padding: bool = True) -> Any:  # fmt: skip
    """read(Prediction, t) of all tokens, in which (B, ...) becomes (B, T, ...)."""
    q_BTE = k_BTE = None
    if has_pointer(w.c):
        q_BTE, k_BTE = w.code.pointer_qk(x_BTD, whole, w.c)

    def one(t):
        x_BD, q_BE = jax.tree.map(lambda y: y[:, t], (x_BTD, q_BTE))
        return read(predict(w, whole, x_BD, tokens_BT, t, q_BE, k_BTE, padding), t)

    outputs = lax.map(one, jnp.arange(tokens_BT.shape[1]), batch_size=POSITIONS)
    return jax.tree.map(lambda y: jnp.moveaxis(y, 0, 1), outputs)


def target_log_p(w: Weights, whole: dict, x_BTD: Array, tokens_BS: Array, chunk: int,
                 padding: bool = True) -> tuple[Array, Array]:  # fmt: skip
    """The log-probabilities of tokens_BS[:, 1:], (B, T), and the same without [pointer]: those of
    predict_all(), but for much longer texts. The head reads `chunk` tokens at once."""
    targets_BT = tokens_BS[:, 1:]

    def one(position):
        x_D, target = position
        log_p_V, slot = head_log_p(w, x_D, whole["head"], padding)
        return log_p_V[target], slot

    positions = x_BTD.reshape(-1, w.c.D), targets_BT.reshape(-1)
    alone_N, slot_N = lax.map(one, positions, batch_size=chunk)
    log_p_N = alone_N
    if has_pointer(w.c):
        votes = w.code.pointer_votes(x_BTD, tokens_BS, whole, w.c)
        log_p_N = w.code.mixed_log_p(alone_N, slot_N, votes.reshape(len(alone_N), -1))
    return log_p_N.reshape(targets_BT.shape), alone_N.reshape(targets_BT.shape)


def head_log_p(w: Weights, x: Array, head: Array, padding: bool) -> tuple[Array, Array | None]:
    """The log-probabilities (..., V) of the head alone, in float32, and the logit (...) of the
    pointer's slot, if there is one. x is (..., D). The softmax of a model without [pointer]
    includes the head's padding in training, and so it does here with padding=True."""
    vocab = w.c.vocab
    z = w.code.softcap(jnp.einsum("...D,VD->...V", x, head.astype(x.dtype)))
    summed = z if padding and not has_pointer(w.c) else z[..., :vocab]
    log_p = z - jax.nn.logsumexp(summed, axis=-1, keepdims=True)
    return log_p[..., :vocab], log_p[..., vocab] if has_pointer(w.c) else None


def tokenizer(w: Weights) -> SimpleNamespace:
    """shards.coder for a run's tokens; exits with status 2 if there is none."""
    try:
        return shards.coder(w.c.vocab, w.c.eot)
    except shards.Fault as fault:
        refuse(f"{w.path} has {w.c.vocab} tokens and its end-of-text is {w.c.eot}: {fault}")
