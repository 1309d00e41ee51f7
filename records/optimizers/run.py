"""Trains the plain model of the optimizer benchmark with a contestant's optimizer.

    ./run.sh optimizers [NAME] [--size tiny | 124m] [--flag value ...]

NAME is one of those below (default: muon), or a file of your own that defines
optimizer(params, total_steps). The file is checked on small inputs, put into train_gpt_simple.py,
and run. Flags, besides the optimizer's numbers:

    --size tiny      a small model of source code, for two CPU cores; the default
    --size 124m      the model of modded-nanogpt's third track, for GPUs and TPUs
    --steps N        of the run
    --seed S         of the first values; default: a random one
    --target LOSS    stops the run at this loss
    --data DIR       a folder with other shards
    --microbatch N   sequences that a device runs at once: fewer need less memory
"""

import argparse
import ast
import dataclasses
import inspect
import math
import os
import subprocess
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
sys.path[:0] = [str(ROOT / folder) for folder in ("records", "data", "run")]
import machine  # noqa: E402
from cache import set_compilation_cache  # noqa: E402
from messages import Fault, one_line  # noqa: E402
from optimizers import contest  # noqa: E402

FLAGS = ("size", "steps", "seed", "target", "data", "microbatch", "help")  # of all contestants
# XLA compiles the check of updates, which runs twice, without what takes it long.
FAST = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}
SHARD_TOKENS = 100_000_000  # in a training shard of FineWeb


# ---- Arguments -----------------------------------------------------------------------------------
def show_list() -> None:
    """Prints what there is, with each contestant's first line and numbers."""
    print(f"{__doc__}\nNames, with their numbers, which are flags, and the defaults:\n")
    for name in machine.optimizer_names(HERE):
        tree = ast.parse((HERE / f"{name}.py").read_text("utf-8"))
        summary = (ast.get_docstring(tree) or "").partition("\n")[0]
        (function,) = (node for node in tree.body if getattr(node, "name", "") == "optimizer")
        numbers = ast.unparse(function.args).removeprefix("params, total_steps, ")
        print(f"    {name:<16} {summary}\n{'':20} {numbers}")


def find(argv: list[str]) -> tuple[Path, list[str]]:
    """The contestant's file, and the arguments of train_gpt_simple.py, where the size comes first
    and is no flag. Raises Fault if there is no such file."""
    reason = machine.unknown_optimizer(argv, HERE)
    if reason:
        raise Fault(reason)
    path = HERE / "muon.py"
    if argv and not argv[0].startswith("-"):
        path = HERE / f"{argv[0]}.py" if argv[0] in machine.optimizer_names(HERE) else Path(argv[0])
        argv = argv[1:]
    cli = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    cli.add_argument("--size", default="tiny")
    args, rest = cli.parse_known_args(argv)
    return path, [args.size, *rest]


# ---- What a contestant does ----------------------------------------------------------------------
def load(path: Path, source: str) -> ModuleType:
    """Writes train_gpt_simple.py with a contestant to program(path), and imports it."""
    file = program(path)
    file.parent.mkdir(parents=True, exist_ok=True)
    part = file.with_suffix(f".{os.getpid()}.part")
    part.write_text(contest.assemble(source), "utf-8")
    part.replace(file)
    module = ModuleType(contest.MODULE)
    module.__file__ = str(file)
    sys.modules[contest.MODULE] = module  # where dataclasses look for it
    code = compile(file.read_text("utf-8"), file, "exec")
    attempt(path, "cannot be imported", exec, code, vars(module))
    return module


def program(path: Path) -> Path:
    """Where train_gpt_simple.py with a contestant is."""
    return Path("logs/optimizers", f"{path.stem}.py")


def attempt(path: Path, what: str, function: Callable, *args, **kwargs) -> Any:
    """Calls a function of a contestant. Raises Fault with the exception and the contestant's line,
    if it raises one."""
    try:
        return function(*args, **kwargs)
    except (Exception, SystemExit) as error:
        frames = traceback.extract_tb(error.__traceback__)
        lines = [frame.lineno for frame in frames if frame.filename == str(program(path))]
        before, _, _ = contest.parts(program(path).read_text("utf-8"))
        where = f"{path}, line {lines[-1] - before.count(chr(10)) - 1}" if lines else path
        why = str(error).strip().splitlines() or [""]
        why = why[-1] if "Traceback" in why[0] else why[0]
        why = f"{type(error).__name__}: {why[:200]}".rstrip(": ")
        raise Fault(f"{where}: {what}: {why}: correct it") from None


def check_numbers(module: ModuleType, path: Path) -> None:
    """Raises Fault for numbers of an optimizer that no flag can give, and for SETTINGS that no run
    would use."""
    arguments = dict(list(inspect.signature(module.optimizer).parameters.items())[2:])
    for name, argument in arguments.items():
        if name in FLAGS:
            raise Fault(f"{path}: --{name} is a flag of all optimizers: rename this argument")
        if type(argument.default) not in (int, float):
            raise Fault(f"{path}: {name} needs a number as its default: {name}=1.0, or 1 for True")
    known = ["steps", "microbatch", *arguments]
    settings = module.SETTINGS
    if not isinstance(settings, dict) or not all(isinstance(x, dict) for x in settings.values()):
        raise Fault(f"{path}: SETTINGS is wrong: write  SETTINGS = {{'tiny': dict(steps=200)}}")
    for size, values in settings.items():
        if size not in module.SIZES:
            raise Fault(f"{path}: SETTINGS has {size!r}: its keys are {' and '.join(module.SIZES)}")
        for name, value in values.items():
            if name not in known:
                near = machine.nearest(name, known) or f": it may have {', '.join(known)}"
                raise Fault(f"{path}: SETTINGS of {size} has an unknown {name!r}{near}")
            is_count = isinstance(value, int) and value > 0
            if type(value) not in (int, float) or (name in known[:2] and not is_count):
                raise Fault(f"{path}: SETTINGS of {size} has {name}={value!r}: write a number")


def check(module: ModuleType, path: Path, size, numbers: dict[str, float]) -> None:
    """Raises Fault if an optimizer does not fit the model of this size, which takes no computing,
    or if its first updates are not finite, on tiny."""
    functions = trace(module, path, size, numbers)
    tiny = module.SIZES["tiny"]
    if size.preset != tiny.preset:
        try:
            functions = trace(module, path, dataclasses.replace(tiny, steps=size.steps), numbers)
        except Fault as reason:
            print(f"its first updates are not looked at, because tiny does not fit: {reason}")
            return
    wrong = attempt(path, "update fails", find_nan, *functions)
    if wrong:
        raise Fault(
            f"{path}: its {wrong[0]} is NaN or infinite, if gradients begin as zeros for all but "
            "the head: keep divisors above 0"
        )


def trace(module: ModuleType, path: Path, size, numbers: dict[str, float]) -> tuple:
    """Returns begin(seed), which makes parameters and state, and update(), which gets all that
    train_step() passes. Raises Fault unless updates are like parameters, states remain what they
    are, and what is validated is like the parameters, by their shapes."""
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:1]), ("devices",))

    def begin(seed):
        params = module.make_params(size, seed)
        return params, tx.init(params)

    def update(grads, state, params):
        sequence = jnp.zeros((1, size.T + 1), jnp.int32)
        loss = lambda params: module.mean_loss(params, sequence, size, mesh)
        value = jnp.float32(math.log(size.vocab))
        tx_update = optax.with_extra_args_support(tx).update
        return tx_update(grads, state, params, value=value, obj_fn=loss)

    shape_of = lambda what, *call: attempt(path, f"{what} fails", jax.eval_shape, *call)
    shapes = shape_of("initial_value", lambda: module.make_params(size, 0))
    wanted = module.parameter_shapes(size)
    wanted = {name: jax.ShapeDtypeStruct(shape, "float32") for name, shape in wanted.items()}
    require_same(f"{path}: initial_value", shapes, wanted)
    tx = attempt(path, "optimizer cannot be made", module.optimizer, shapes, size.steps, **numbers)
    state = shape_of("init", lambda params: tx.init(params), shapes)
    updates, after = shape_of("update", update, shapes, state, shapes)
    require_same(f"{path}: an update", updates, shapes)
    require_same(f"{path}: the state after an update", after, state)
    validated = shape_of("validated_params", module.validated_params, shapes, state)
    require_same(f"{path}: validated_params", validated, shapes)
    return begin, update


def require_same(what: str, found, wanted) -> None:
    """Raises Fault unless two trees have the same structure, shapes and dtypes."""
    arrays = []  # such as "float32 (2, 3)", by place
    for tree in (found, wanted):
        places = jax.tree_util.tree_flatten_with_path(tree)[0]
        arrays.append({jax.tree_util.keystr(at): f"{x.dtype} {x.shape}" for at, x in places})
    for place in sorted(arrays[0] | arrays[1]):
        a, b = (array.get(place, "nothing") for array in arrays)
        if a != b:
            place = f" at {place}" if place else ""
            raise Fault(f"{what} has {a}{place}, not {b}: return the same")
    if jax.tree.structure(found) != jax.tree.structure(wanted):
        raise Fault(f"{what} has another structure than before: return the same")


def find_nan(begin: Callable, update: Callable) -> list[str]:
    """Which of two updates are not finite. The gradients are zeros for all but the head at first,
    because the projections begin with zeros, and then normal noise."""

    def nan_of_update(grads, state, params):
        updates, state = update(grads, state, params)
        return jax.tree.map(lambda x: ~jnp.isfinite(x).all(), updates), state

    options = FAST if jax.default_backend() == "cpu" else None
    params, state = jax.jit(begin, compiler_options=options)(0)
    rng = np.random.default_rng(0)
    noise = {name: 1e-3 * rng.standard_normal(x.shape, "float32") for name, x in params.items()}
    zeros = {name: x if name.startswith("proj.") else 0 * x for name, x in noise.items()}
    step = jax.jit(nan_of_update).lower(noise, state, params).compile(options)
    wrong = []
    for number, grads in enumerate((zeros, noise), 1):
        found, state = step(grads, state, params)
        wrong += [f"update {number} of {name}" for name, is_nan in found.items() if is_nan]
    return wrong


# ---- Run -----------------------------------------------------------------------------------------
def check_run(size, seed: int) -> None:
    """Raises Fault for numbers with which no run could begin."""
    devices = min(len(jax.devices()), size.batch)
    if size.steps < 1 or size.microbatch < 1 or not 0 <= seed < 2**31:
        raise Fault(
            "--steps and --microbatch must be above 0, and --seed from 0 to 2147483647: correct "
            f"{size.steps}, {size.microbatch} or {seed}"
        )
    at_once = min(size.batch, size.microbatch * devices)
    if size.batch % at_once or at_once % devices:
        raise Fault(
            f"{size.batch} sequences cannot be split into microbatches of {size.microbatch} on "
            f"{devices} devices: choose another --microbatch, or fewer devices, as by "
            "CUDA_VISIBLE_DEVICES=0 or JAX_PLATFORMS=cpu"
        )


def fetch_data(size, default: str) -> None:
    """Makes or downloads the shards of a size unless --data names others, and checks them."""
    commands = [["data/check.py", "--quick", "--", size.data]]
    if size.data == default and size.preset == "optimizers-tiny":
        commands.insert(0, ["data/source_code.py"])
    elif size.data == default:
        whole = (SHARD_TOKENS - 1) // (size.batch * size.T)  # batches of a shard, and a last target
        commands.insert(0, ["data/cached_fineweb10B.py", str(math.ceil(size.steps / whole))])
    for command in commands:
        status = subprocess.run([sys.executable, *command]).returncode
        if status:
            sys.exit(status)


def main(argv: list[str]) -> None:
    """Checks a contestant, and trains."""
    if {*argv} & {"-h", "--help"}:
        show_list()
        return
    if machine.several_processes():
        raise Fault(machine.ONE_HOST)
    path, arguments = find(argv)
    source = contest.read(path)
    os.chdir(ROOT)
    module = load(path, source)
    check_numbers(module, path)
    size, args, numbers = module.parse_config(arguments)
    check_run(size, args.seed)
    check(module, path, size, numbers)
    fetch_data(size, module.SIZES[args.size].data)
    print(f"{path.name} is right; with the model and the loop it is {program(path)}", flush=True)
    set_compilation_cache()
    module.main(arguments)


if __name__ == "__main__":
    with one_line("optimizers", status=2):
        main(sys.argv[1:])
