"""What the one file promises about itself: its size, its inertness, what it leans on."""

import ast
import dataclasses
import io
import os
import re
import subprocess
import sys
import tokenize
from pathlib import Path

import pytest

import train_gpt

TRAIN = Path(train_gpt.__file__).resolve()
LINES = train_gpt.SOURCE.splitlines()
TREE = ast.parse(train_gpt.SOURCE)
NODES = list(ast.walk(TREE))
FIELDS = dataclasses.fields(train_gpt.Config)


def sections() -> dict[str, int]:
    """Lines under each banner."""
    banners = [(i, line) for i, line in enumerate(LINES) if line.startswith("# ---- ")]
    ends = [i for i, _ in banners[1:]] + [len(LINES)]
    return {line.strip("# -"): end - i for (i, line), end in zip(banners, ends, strict=True)}


def test_the_file_is_short_and_most_of_it_is_machine_learning():
    assert len(LINES) <= 1450 and max(map(len, LINES)) <= 100
    sizes = sections()
    rest = {"Command line", "Hosts", "Data", "Checkpoints", "Log", "Run"}
    assert list(sizes) == [
        *("Config", "Parameters", "Model", "Head", "Gradients by hand", "Optimizer", "Step"),
        *("Command line", "Hosts", "Data", "Checkpoints", "Log", "Run"),
    ]
    around = sum(sizes[name] for name in rest)
    assert around <= 550 and sum(sizes.values()) - around >= 0.58 * len(LINES)
    assert LINES.index(next(line for line in LINES if line.startswith("def loss_fn"))) < 330


def test_every_function_is_short():
    functions = [node for node in NODES if isinstance(node, (ast.FunctionDef, ast.Lambda))]
    assert len(functions) > 50
    assert {f.lineno: n for f in functions if (n := f.end_lineno - f.lineno + 1) > 60} == {}


def test_the_model_reads_from_the_top_down():
    defined = [node.name for node in TREE.body if isinstance(node, ast.FunctionDef)]
    order = ["loss_fn", "look_up", "block", "mixed_block", "attention", "attend", "compose", "mlp",
             "say", "weighted_sum", "norm", "hash_pairs", "signs", "positions",
             "rotation"]  # fmt: skip
    assert [name for name in defined if name in order] == order


def test_the_check_of_attention_stays_small():
    (check,) = [n for n in TREE.body if getattr(n, "name", None) == "check_attention"]
    assert check.end_lineno - check.lineno + 1 <= 25


# ---- Config --------------------------------------------------------------------------------------
def test_no_field_is_a_switch():
    """A technique is in the file or it is not: there are no dead branches to keep alive."""
    for field in FIELDS:
        assert field.type in (int, float, str), field.name
        assert type(field.default) is field.type, field.name


@pytest.mark.parametrize("name", [field.name for field in FIELDS])
def test_every_field_is_read_somewhere_and_has_a_comment(name):
    (at,) = [i for i, line in enumerate(LINES) if line.startswith(f"    {name}: ")]
    before, line, after = LINES[at - 1 : at + 2]
    assert re.search(r"  # .{10}", line) or before[:6] == "    # " or after[:6] == "    # "
    reads = [node for node in NODES if isinstance(node, ast.Attribute) and node.attr == name]
    assert [node for node in reads if getattr(node.value, "id", None) in ("c", "self")]


# ---- Importing -----------------------------------------------------------------------------------
def imported() -> set[str]:
    names = [a.name for node in NODES if isinstance(node, ast.Import) for a in node.names]
    names += [node.module for node in NODES if isinstance(node, ast.ImportFrom)]
    return {name.split(".")[0] for name in names}


def test_only_jax_optax_numpy_and_the_standard_library_are_imported():
    assert imported() - sys.stdlib_module_names == {"jax", "numpy", "optax"}


def test_top_level_statements_only_define():
    kinds = (ast.Import, ast.ImportFrom, ast.FunctionDef, ast.ClassDef)
    rest = [node for node in TREE.body if not isinstance(node, kinds)]
    assigned = [ast.unparse(node.value) for node in rest if isinstance(node, ast.Assign)]
    others = [node for node in rest if not isinstance(node, ast.Assign)]
    assert ast.get_docstring(TREE) == others[0].value.value.strip()
    (main,) = others[1:]
    assert ast.unparse(main.test) == "__name__ == '__main__'"
    for value in assigned:
        body = [n for n in ast.walk(ast.parse(value)) if not isinstance(n, ast.Lambda)]
        calls = [] if "lambda" in value else [n for n in body if isinstance(n, ast.Call)]
        called = {ast.unparse(call.func) for call in calls}
        reads_itself = value == "Path(__file__).read_bytes().decode()"
        makes = {"dict", "Config", "by_hand", "collections.namedtuple"}
        assert reads_itself or called <= makes, value


AUDIT = """
import sys, threading
import jax, numpy, optax
from jax._src import xla_bridge
import argparse, ast, collections, dataclasses, faulthandler, functools, hashlib, inspect, json
import math, os, re, secrets, signal, subprocess, threading, time, zlib
from concurrent.futures import ThreadPoolExecutor
events = []
sys.addaudithook(lambda name, args: events.append((name, args and str(args[0]))))
import train_gpt
seen, threads, argv = list(events), threading.enumerate(), sys.argv
own = lambda path: path.endswith(".pyc") or path == train_gpt.__file__
opened = [path for name, path in seen if name == "open"]
assert train_gpt.__file__ in opened, "the hook sees nothing"
assert all(map(own, opened)), opened
effects = ("os.", "shutil.", "socket.", "subprocess.", "signal.", "tempfile.")
reads = ("os.listdir", "os.scandir")
bad = [e for e in seen if e[0].startswith(effects) and e[0] not in reads]
assert not bad, bad
assert threads == [threading.main_thread()], threads
assert not xla_bridge._backends, "JAX has a backend"
assert sorted(os.listdir()) == ["audit.py"]
xla_bridge.get_backend("cpu")
assert xla_bridge._backends, "the test looks for backends in a wrong place"
"""


def test_importing_it_does_nothing(tmp_path):
    """No device is taken, no thread started, no file but its own opened, no process run."""
    (tmp_path / "audit.py").write_text(AUDIT)
    env = os.environ | {"PYTHONPATH": str(TRAIN.parent), "PYTHONDONTWRITEBYTECODE": "1"}
    command = [sys.executable, "audit.py"]
    done = subprocess.run(
        command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_nothing_is_run_or_unpacked_that_came_from_outside():
    names = {node.id for node in NODES if isinstance(node, ast.Name)}
    assert not names & {"eval", "exec", "compile", "__import__"}
    assert not imported() & {"pickle", "marshal", "shelve", "importlib", "ctypes"}
    attributes = {node.attr for node in NODES if isinstance(node, ast.Attribute)}
    assert not attributes & {"system", "popen", "Popen", "import_module"}
    loads = [node.value for node in NODES if getattr(node, "attr", None) == "load"]
    assert [ast.unparse(module) for module in loads] == ["np"]  # no pickles, below
    keywords = {node.arg for node in NODES if isinstance(node, ast.keyword)}
    assert not keywords & {"shell", "allow_pickle"}


# ---- Techniques ----------------------------------------------------------------------------------
def test_every_technique_is_told_in_the_readme():
    """`[tag]` in a comment or a docstring here, a row of a table there that begins with it."""
    tokens = tokenize.generate_tokens(io.StringIO(train_gpt.SOURCE).readline)
    texts = [token.string for token in tokens if token.type == tokenize.COMMENT]
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef)
    texts += [ast.get_docstring(node) or "" for node in NODES if isinstance(node, kinds)]
    tags = set(re.findall(r"\[([a-z][a-z0-9-]+)\]", "\n".join(texts)))
    readme = (TRAIN.parent / "README.md").read_text(encoding="utf-8")
    told = re.findall(r"^`\[([a-z0-9-]+)\]` \| ", readme, re.M)
    assert len(tags) > 5 and sorted(told) == sorted(tags)
