"""Reads the weights of a run and runs its model, for all tools of evals/."""

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, NamedTuple
from zlib import crc32

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, P, lax
from jax.sharding import NamedSharding

ROOT = Path(__file__).resolve().parent.parent
sys.path += [str(ROOT / folder) for folder in ("data", "run", "records")]
import launch  # noqa: E402
import shards  # noqa: E402
from messages import refuse  # noqa: E402

ABOUT = "config", "result", "source"  # JSON in a file of weights; see save_weights()
POSITIONS = 64  # whose probabilities of all tokens are computed at once
BORDER = b"=" * 100 + b"\n"  # in a log, it ends the source
MAX_DOCUMENTS = 4095  # of a sequence: positions() in train_gpt.py cannot tell more apart


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


# ---- The command line ----------------------------------------------------------------------------
def parser(doc: str) -> argparse.ArgumentParser:
    """A parser for a tool with this description, for parse()."""
    cli = argparse.ArgumentParser(description=doc, allow_abbrev=False)
    cli.formatter_class = argparse.RawDescriptionHelpFormatter
    cli.error = refuse
    what = "first logs/<run>.npz; default: the newest in logs/"
    cli.add_argument("words", nargs="*", metavar="WEIGHTS", help=what)
    what = "the script that trained the weights; default: the one with the checksum in them"
    cli.add_argument("--script", type=Path, help=what)
    return cli


def parse(cli: argparse.ArgumentParser, has_word: bool = False) -> argparse.Namespace:
    """The arguments, with `weights`, and with `word`, one more word if the tool has one, or else
    None. The first word is WEIGHTS if it ends in .npz or names a file, or if there are two."""
    args = cli.parse_intermixed_args()
    words = args.words
    most = 2 if has_word else 1
    if len(words) > most:
        refuse(f"unexpected words: {' '.join(words[most:])}; put quotes around a text")
    is_file = words and (words[0].endswith(".npz") or os.path.isfile(words[0]))
    if len(words) == most or (is_file and not words[0].endswith(".bin")):  # a shard is a text
        args.weights = Path(words.pop(0))
    else:
        args.weights = newest()
    args.word = words[0] if words else None
    return args


def newest() -> Path:
    """The newest weights in logs/, which are named on stderr; exits with status 2 if there are
    none."""
    found = sorted((ROOT / "logs").glob("*.npz"), key=lambda path: path.stat().st_mtime)
    if not found:
        refuse("there are no weights in logs/: train first, ./run.sh")
    tell(f"takes the newest weights, {short(found[-1])}")
    return short(found[-1])


def tell(message: str) -> None:
    """Prints a line with the tool's name on stderr."""
    print(f"{Path(sys.argv[0]).name}: {message}", file=sys.stderr)


def short(path: Path) -> Path:
    """A path relative to the current folder, if it is in it."""
    return path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path


# ---- Reading -------------------------------------------------------------------------------------
def open_weights(path: Path, script: Path | None = None) -> Weights:
    """Reads logs/<run>.npz. Exits with status 2 if the file is damaged or not of a run, if its
    model is not the script's (None: find_script() finds it), or if a number is not finite. Warns
    if the script is not the one that trained the weights."""
    if not path.is_file():
        refuse(f"there is no file {path}")
    try:
        with np.load(path) as archive:  # it compares the checksums of all arrays
            arrays = {name: archive[name] for name in archive}
        config, result, source = (json.loads(arrays.pop(name).item()) for name in ABOUT)
    except Exception as error:  # of zipfile, zlib, NumPy or json
        refuse(f"{path} is damaged, or no weights of a run, logs/<run>.npz ({error!r})")
    script = script or find_script(path, source)
    code = open_script(script)
    script = short(script)
    hint = "name the script that trained it with --script"
    try:
        c = make_config(code, config)
    except (KeyError, TypeError, ValueError) as error:
        refuse(f"{path} does not have the configuration of {script} ({error}): {hint}")
    shapes = {name: param.model_shape for name, param in code.param_table(c).items()}
    for name in sorted(shapes.keys() | arrays.keys()):
        found = arrays[name].shape if name in arrays else "not there"
        wanted = shapes.get(name, "not there")
        if found != wanted:
            refuse(f"{path}: the shape of {name} is {found}, but in {script} {wanted}: {hint}")
        if not np.isfinite(arrays[name]).all():
            refuse(f"{path} has numbers in {name} that are not finite: name another run's weights")
    if crc32(code.SOURCE.encode()) != source:
        print(f"warning: {script} has changed since {path}; if its model has changed, {hint}",
              file=sys.stderr)  # fmt: skip
    elif script != short(ROOT / "train_gpt.py"):
        tell(f"takes the script that trained {path}, {script}")
    count = max(n for n in (1, 2, 4, 8) if n <= jax.device_count())
    devices = jax.devices()[:count]
    stage = c.stage_at(result["steps"])
    c = code.fit_kernels(devices[0], c.for_validation())
    return Weights(path, code, script, c, devices, stage, arrays, config, result)


def find_script(path: Path, source: int) -> Path:
    """The script that trained weights, by the crc32 of its source: train_gpt.py, another one in its
    folder, or the log beside the weights, which begins with it; if none has this crc32,
    train_gpt.py. Logs outside of logs/ are not read: they may be somebody else's, and a script can
    run anything."""
    ours = ROOT / "train_gpt.py"
    for script in (ours, *sorted(ROOT.glob("*.py"))):
        if crc32(script.read_bytes()) == source:
            return script
    log = path.with_suffix(".txt")
    is_ours = log.is_file() and log.resolve().parent == (ROOT / "logs").resolve()
    if is_ours and crc32(log.read_bytes().partition(BORDER)[0]) == source:
        return log
    return ours


def open_script(path: Path) -> ModuleType:
    """Imports a copy of train_gpt.py, or the one that a log begins with."""
    if path.suffix != ".txt":
        return launch.load_script(path)
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder, "train_gpt.py")
        script.write_bytes(path.read_bytes().partition(BORDER)[0])
        return launch.load_script(script)


def make_config(code: ModuleType, config: dict[str, Any]) -> Any:
    """The script's Config from JSON, in which tuples are lists, and layers and stages are dicts.
    Raises an error if the script has other fields, or could not train it."""

    # A field that one of them lacks would get a default, with which the model is another.
    unshared = code.Config.__dataclass_fields__.keys() ^ config.keys()
    if unshared:
        raise ValueError(f"only one of them has the field {min(unshared)}")
    config = as_tuples(config)
    for name, kind in {"layers": code.Layer, "stages": code.Stage}.items():
        config[name] = tuple(kind(**row) for row in config[name])
    return code.Config(**config)


def as_tuples(value: Any) -> Any:
    """JSON with tuples in the place of lists."""
    if isinstance(value, dict):
        return {key: as_tuples(x) for key, x in value.items()}
    return tuple(map(as_tuples, value)) if isinstance(value, list) else value


def val_shard(w: Weights, place: Path | None, T: int) -> np.memmap:
    """The tokens of a shard, or of the first *_val_*.bin in a folder (None: the run's). Exits with
    status 2 if it is not there, or if the run's model would read it wrong in sequences of T
    tokens."""
    if place is None:
        place = ROOT / w.config["data"]
    path = min(place.glob("[!.]*_val_*.bin"), default=place)
    if not path.is_file():
        refuse(f"{place} is no token shard, and has no *_val_*.bin: see data/README.md")
    shard = w.code.open_shard(path)
    starts = np.flatnonzero(shard == w.c.eot)
    if shard.max() >= w.c.vocab or len(starts) == 0:
        refuse(f"{path} has token {shard.max()} and {len(starts)} documents, but the model knows "
               f"{w.c.vocab} tokens, of which {w.c.eot} starts a document")  # fmt: skip
    if np.any(starts[MAX_DOCUMENTS:] - starts[:-MAX_DOCUMENTS] < T):
        refuse(f"{path}: a sequence of {T} tokens would hold more than {MAX_DOCUMENTS} documents")
    return shard


def tokenizer(w: Weights) -> SimpleNamespace:
    """The encode() and piece() of the run's tokens; see shards.coder()."""
    return shards.coder(w.c.vocab, w.c.eot)


# ---- Running the model ---------------------------------------------------------------------------
def place(w: Weights, devices: int | None = None) -> tuple[jax.sharding.Mesh, dict[str, Any]]:
    """Puts the weights on the first `devices` devices (None: all): their mesh, and the weights as
    forward() takes them, but for the table of n-grams. It stays in the host's memory, and a device
    gets the rows that it reads."""
    launch.set_compilation_cache()
    mesh = w.code.make_mesh(w.devices[:devices])
    stored = {}
    specs = {}
    for name, param in w.code.param_table(w.c).items():
        if name == "ngram":
            continue
        padded = np.zeros(param.shape, np.float32)
        # A view; of a bank, one of its matrices.
        rows = padded.reshape(-1, *param.shape[2:]) if param.layers else padded
        rows[: len(w.arrays[name])] = w.arrays[name]
        specs[name] = param.sharding
        stored[name] = jax.device_put(padded, NamedSharding(mesh, param.sharding))
    gather = jit(w, lambda p: w.code.whole_weights(p, w.c), mesh, (specs,), P())
    return mesh, gather(stored)


def jit(w: Weights, function: Callable, mesh: jax.sharding.Mesh, in_specs: Any, out_specs: Any,
        **options) -> Callable:  # fmt: skip
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
        weights = whole | {"ngram_rows": rows}
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
    return w.arrays["ngram"][np.asarray(hashes(tokens_BT, c=w.c))]


def check_outputs(w: Weights, outputs: Any) -> Any:
    """The outputs of a model as arrays of NumPy. Exits with status 2 if a number is not finite: it
    would become a score, because the lowest of losses that are NaN is the first."""
    outputs = jax.tree.map(np.asarray, outputs)
    if not all(np.isfinite(x).all() for x in jax.tree.leaves(outputs)):
        refuse(f"{w.path}: the model computes numbers that are not finite in {w.c.compute}")
    return outputs


# ---- Probabilities -------------------------------------------------------------------------------
class Prediction(NamedTuple):
    """What a model expects after one token of each of B texts. V is the vocabulary."""

    log_p: Array  # (B, V): log-probabilities of the next token
    pointer: Array | None  # (B, T): the pointer's attention to the texts; the sentinel has the rest


def predict(w: Weights, whole: dict, x_BD: Array, tokens_BT: Array, t: Array, q_BE: Array | None,
            k_BTE: Array | None, padding: bool = True) -> Prediction:  # fmt: skip
    """What is expected after token t. x is the model's normalised output there, q and k are the
    pointer's, for token t and for all tokens. About padding, see head_log_p()."""
    c = w.c
    alone_BV, share_logit_B = head_log_p(w, x_BD, whole["head"], padding)
    if not c.pointer:
        return Prediction(alone_BV, None)
    labels = w.code.pointer_labels(tokens_BT, c)
    labels_t = lax.dynamic_slice_in_dim(labels, t, 1, axis=1)
    j_1T = jnp.arange(tokens_BT.shape[1])[None]
    first = (t // c.pointer_band - 1) * c.pointer_band  # of the band before that of t
    visible_1T = (first <= j_1T) & (j_1T < t)
    scores_B1T, sentinel_B1, longest_B1 = w.code.pointer_scores(
        q_BE[:, None], labels_t, k_BTE, labels, visible_1T, whole, c
    )
    weights_BT = jax.nn.softmax(jnp.append(scores_B1T[:, 0], sentinel_B1, axis=1))[:, :-1]
    successors_BT = jnp.roll(tokens_BT, -1, axis=1)  # the last token has weight 0
    row = jnp.arange(len(x_BD))[:, None]
    right_BV = jnp.zeros_like(alone_BV).at[row, successors_BT].add(weights_BT)
    every_B1 = weights_BT.sum(axis=1, keepdims=True)
    columns = jnp.broadcast_arrays(right_BV, every_B1, whole["pointer_share"][longest_B1])
    mixed = jax.vmap(w.code.mixed_log_p, in_axes=(1, None, 1), out_axes=1)
    log_p_BV = mixed(alone_BV, share_logit_B, jnp.stack(columns, axis=-1))
    return Prediction(log_p_BV, weights_BT)


def predict_all(w: Weights, whole: dict, x_BTD: Array, tokens_BT: Array, read: Callable,
                padding: bool = True) -> Any:  # fmt: skip
    """read(Prediction, t) of all tokens, in which (B, ...) becomes (B, T, ...)."""
    q_BTE = k_BTE = None
    if w.c.pointer:
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
        log_p_V, share_logit = head_log_p(w, x_D, whole["head"], padding)
        return log_p_V[target], share_logit

    positions = x_BTD.reshape(-1, w.c.D), targets_BT.reshape(-1)
    alone_N, share_logit_N = lax.map(one, positions, batch_size=chunk)
    log_p_N = alone_N
    if w.c.pointer:
        copies = w.code.pointer_copies(x_BTD, tokens_BS, whole, w.c)
        copies_N3 = copies.reshape(len(alone_N), -1)
        log_p_N = w.code.mixed_log_p(alone_N, share_logit_N, copies_N3)
    return log_p_N.reshape(targets_BT.shape), alone_N.reshape(targets_BT.shape)


def head_log_p(w: Weights, x: Array, head: Array, padding: bool) -> tuple[Array, Array | None]:
    """The log-probabilities (..., V) of the head alone, in float32, and the logit (...) of the
    copies' share, if the model has a pointer. x is (..., D). The softmax of a model without
    [pointer] includes the head's padding in training, and so it does here with padding=True."""
    vocab = w.c.vocab
    z = w.code.softcap(jnp.einsum("...D,VD->...V", x, head.astype(x.dtype)))
    summed = z if padding and not w.c.pointer else z[..., :vocab]
    log_p = z - jax.nn.logsumexp(summed, axis=-1, keepdims=True)
    return log_p[..., :vocab], log_p[..., vocab] if w.c.pointer else None
