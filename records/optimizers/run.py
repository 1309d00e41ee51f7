"""Trains the plain model of the optimizer benchmark with a contestant's optimizer.

    ./run.sh optimizers [NAME] [--size tiny | 124m] [--flag value ...]

NAME is one of those below (default: muon), or a file of your own with optimizer(params,
total_steps), which is put into train_gpt_simple.py. Flags, besides the optimizer's numbers:

    --size tiny      a small model of source code, for two CPU cores; the default
    --size 124m      the model of modded-nanogpt's third track, for GPUs and TPUs
    --steps N        of the run
    --seed S         of the first values; default: a random one
    --target LOSS    stops the run at this loss
    --data DIR       a folder with other shards
    --microbatch N   sequences that a device runs at once: fewer need less memory
"""

import argparse
import inspect
import math
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import jax

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
sys.path[:0] = [str(ROOT / folder) for folder in ("records", "data", "run")]
import shards  # noqa: E402
from launch import set_compilation_cache  # noqa: E402
from messages import one_line, refuse  # noqa: E402
from optimizers import contest  # noqa: E402

SHARD_TOKENS = 100_000_000  # in a training shard of FineWeb


# ---- Arguments -----------------------------------------------------------------------------------
def show_list() -> None:
    """Prints what there is, with each contestant's first line and numbers."""
    print(f"{__doc__}\nNames, with their numbers, which are flags, and the defaults:\n")
    for name in contest.names():
        _, docstring, _ = (HERE / f"{name}.py").read_text("utf-8").split('"""', 2)
        numbers = ", ".join(f"{name}={value}" for name, value in contest.defaults(name).items())
        print(f"    {name:<16} {docstring.splitlines()[0]}\n{'':20} {numbers}")


def find(argv: list[str]) -> tuple[Path, list[str]]:
    """The contestant's file, and the arguments of train_gpt_simple.py: the size is first."""
    name = "muon"
    if argv and not argv[0].startswith("-"):
        name, *argv = argv
    path = HERE / f"{name}.py" if name in contest.names() else Path(name)
    if not path.is_file():
        refuse(f"there is no optimizer and no file {name}: see ./run.sh optimizers --help")
    cli = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    cli.add_argument("--size", default="tiny")
    args, rest = cli.parse_known_args(argv)
    return path, [args.size, *rest]


# ---- What a contestant defines -------------------------------------------------------------------
def load(path: Path) -> ModuleType:
    """Writes train_gpt_simple.py with a contestant to logs/optimizers, and imports it."""
    file = Path("logs/optimizers", f"{path.stem}.py")
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(contest.assemble(contest.read(path)), "utf-8")
    module = ModuleType(contest.MODULE)
    module.__file__ = str(file)
    sys.modules[contest.MODULE] = module  # where dataclasses look for it
    exec(compile(file.read_text("utf-8"), file, "exec"), vars(module))
    return module


def check_numbers(module: ModuleType, path: Path) -> None:
    """Refuses numbers of an optimizer that no flag can give, and SETTINGS that no run would use."""
    arguments = dict(list(inspect.signature(module.optimizer).parameters.items())[2:])
    for name, argument in arguments.items():
        if type(argument.default) not in (int, float):  # bool("False") is True
            refuse(f"{path}: {name} needs a number as its default: {name}=1.0, or 1 for True")
    for size, values in module.SETTINGS.items():
        unknown = values.keys() - {"steps", "microbatch", *arguments}
        if size not in module.SIZES or unknown:
            refuse(f"{path}: no run would use SETTINGS of {size}: {', '.join(unknown) or size}")


def check(module: ModuleType, path: Path, size, numbers: dict[str, float]) -> None:
    """Refuses a contestant that would train or validate another model of this size: by first values
    or validated parameters of other shapes or dtypes. It takes no computing."""
    params = jax.eval_shape(lambda: module.make_params(size, 0))
    wanted = module.parameter_shapes(size)
    wanted = {name: jax.ShapeDtypeStruct(shape, "float32") for name, shape in wanted.items()}
    require_same(f"{path}: initial_value", params, wanted)
    state = jax.eval_shape(module.optimizer(params, size.steps, **numbers).init, params)
    validated = jax.eval_shape(module.validated_params, params, state)
    require_same(f"{path}: validated_params", validated, params)


def require_same(what: str, found, wanted) -> None:
    """Refuses two trees that differ in their structure, shapes or dtypes."""
    found, wanted = (
        {jax.tree_util.keystr(at): f"{x.dtype} {x.shape}" for at, x in jax.tree.leaves_with_path(x)}
        for x in (found, wanted)
    )
    for place in sorted(found | wanted):
        a, b = (arrays.get(place, "nothing") for arrays in (found, wanted))
        if a != b:
            refuse(f"{what} has {a} at {place or 'its only place'}, not {b}: return the same")


# ---- Run -----------------------------------------------------------------------------------------
def fetch_data(size, default: str) -> None:
    """Makes or downloads the shards of a size unless --data names others, and checks them."""
    if size.data == default:
        whole = (SHARD_TOKENS - 1) // (size.batch * size.T)  # batches of a shard, and a last target
        command = ["data/cached_fineweb10B.py", str(math.ceil(size.steps / whole))]
        if size.preset == "optimizers-tiny":
            command = ["data/source_code.py"]
        status = subprocess.run([sys.executable, *command]).returncode
        if status:
            sys.exit(status)
    shards.check(Path(size.data), shards.sums(Path(size.data)))


def main(argv: list[str]) -> None:
    """Checks a contestant, and trains."""
    if {*argv} & {"-h", "--help"}:
        show_list()
        return
    path, arguments = find(argv)
    path = path.resolve()
    os.chdir(ROOT)
    module = load(path)
    check_numbers(module, path)
    size, args, numbers = module.parse_config(arguments)
    check(module, path, size, numbers)
    fetch_data(size, module.SIZES[args.size].data)
    print(f"{path.name} is right; with the model and the loop it is {module.__file__}", flush=True)
    set_compilation_cache()
    module.main(arguments)


if __name__ == "__main__":
    with one_line("optimizers"):
        main(sys.argv[1:])
