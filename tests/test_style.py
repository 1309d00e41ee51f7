"""train_gpt.py keeps its promises to readers: easy code, one code path, imports without effects."""

import ast
import dataclasses
import inspect
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
TREE = ast.parse(train_gpt.SOURCE)
NODES = list(ast.walk(TREE))

TUPLES = 2  # how many assignments of a tuple to a tuple of more than two names are allowed


# ---- Reading -------------------------------------------------------------------------------------
def comments(source: str) -> dict[int, str]:
    """Comments by line number."""
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    return {t.start[0]: t.string for t in tokens if t.type == tokenize.COMMENT}


def hard_to_read(source: str) -> list[str]:
    """Places that a reader would have to read twice."""
    tree = ast.parse(source)
    complaints = []
    wide_tuples = []
    for node in ast.walk(tree):
        if isinstance(node, ast.NamedExpr):
            complaints.append(f"line {node.lineno}: a walrus")
        if isinstance(node, ast.Lambda) and node.end_lineno > node.lineno:
            complaints.append(f"line {node.lineno}: a lambda over several lines")
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Tuple):
            for target in node.targets:
                if isinstance(target, ast.Tuple) and len(target.elts) > 2:
                    wide_tuples.append(node.lineno)
    if len(wide_tuples) > TUPLES:
        complaints.append(f"lines {wide_tuples}: tuples assigned to more than two names")
    return complaints


def test_it_is_easy_to_read():
    assert hard_to_read(train_gpt.SOURCE) == []


@pytest.mark.parametrize("change, complaint", [
    ("if (n := len([])):\n    pass", "a walrus"),
    ("f = lambda x: (\n    x)", "a lambda over several lines"),
    ("a, b, c = 1, 2, 3\n" * (TUPLES + 1), "[1, 2, 3]: tuples assigned"),
])  # fmt: skip
def test_what_is_hard_to_read_is_found(change, complaint):
    assert complaint in "\n".join(hard_to_read(change))


def test_every_function_and_class_has_a_docstring():
    """Inner functions and methods like __init__ need none."""
    bodies = [TREE.body, *(node.body for node in TREE.body if isinstance(node, ast.ClassDef))]
    nodes = [node for body in bodies for node in body]
    nodes = [node for node in nodes if isinstance(node, (ast.FunctionDef, ast.ClassDef))]
    bare = [node.name for node in nodes if not ast.get_docstring(node)]
    assert len(nodes) > 80
    assert [name for name in bare if not name.startswith("__")] == []


def test_it_reads_from_the_top_down():
    """The model first, from the whole to its parts; then what trains it."""
    defined = [node.name for node in TREE.body if isinstance(node, ast.FunctionDef)]
    order = "loss_fn forward block attention mlp run_net norm norm_linear hash_ngrams head_loss "
    order += "param_table normuon train_step main"
    assert [name for name in defined if name in order.split()] == order.split()


# ---- Config --------------------------------------------------------------------------------------
def test_every_field_is_a_number_a_string_or_a_tuple():
    """Numbers and strings are flags. A bool would be a flag that is always true."""
    for field in dataclasses.fields(train_gpt.Config):
        kind = getattr(field.type, "__origin__", field.type)
        assert kind in (int, float, str, tuple) and isinstance(field.default, kind), field.name


def test_every_field_is_read_somewhere_and_has_a_comment():
    """On its line, or on the one before it; layers and stages are explained by their classes."""
    reads = {node.attr for node in NODES if isinstance(node, ast.Attribute)}
    for cls in (train_gpt.Config, train_gpt.Layer, train_gpt.Stage):
        source, first = inspect.getsourcelines(cls)
        for field in dataclasses.fields(cls):
            (i,) = [i for i, line in enumerate(source) if line.startswith(f"    {field.name}: ")]
            comment = source[i - 1].startswith("    # ") or re.search("  # .{5}", source[i])
            assert comment or field.name in ("layers", "stages"), (field.name, first + i)
            assert field.name in reads, (field.name, first + i)


# ---- The law -------------------------------------------------------------------------------------
# The file has the techniques of one model. A field of Layer, Stage or Config needs a preset that
# uses it, and this must be the record or medium: what only a smaller model uses is not of the
# record, and what no preset uses is a branch that no run takes. These may stay all the same:
ALLOWED = {
    "pointer": "tiny trains on little text, which repeats itself",
    "key_start": "small models find induction late",
    "ngrams": "a vocabulary of bytes needs longer n-grams than pairs",
    "steps": "a shorter run",
    "data": "another text",
    "compute": "float32, in which tests compare formulas",
    "attention": "fit_devices() chooses",
}
LARGE = {"record", "medium"}
PARTS = {
    "Config": {name: [c] for name, c in train_gpt.PRESETS.items()},
    "Layer": {name: c.layers for name, c in train_gpt.PRESETS.items()},
    "Stage": {name: c.stages for name, c in train_gpt.PRESETS.items()},
}
# Numbers, tuples and strings of Config that leave a technique out. A format does if it is that of
# activations, and the table of n-grams if it has pairs alone. A layer or a stage leaves it out by
# the field's default.
LEFT_OUT = {0, "", (), (2,), train_gpt.Config.compute}


def unlawful(kind: str, parts: dict[str, list]) -> list[str]:
    """The fields without a preset that they may stay for; parts: the layers or stages of every
    preset, or its one Config. A string that no preset leaves out is a switch that none turns."""
    found = []
    for field in dataclasses.fields(parts["record"][0]):
        left_out = LEFT_OUT if kind == "Config" else {field.default}
        users = set()
        for preset, some in parts.items():
            if {getattr(part, field.name) for part in some} - left_out:
                users.add(preset)
        never_turned = kind == "Config" and field.type is str and users == parts.keys()
        if never_turned or not users & LARGE:
            found.append(field.name)
    return found


def test_every_field_serves_the_record():
    found = [name for kind, parts in PARTS.items() for name in unlawful(kind, parts)]
    new = sorted(set(found) - ALLOWED.keys())
    assert not new, f"neither the record nor medium needs {new}: delete them, or copy the file"
    assert sorted(found) == sorted(ALLOWED)  # or an exception is none


def with_field(part, name: str, default, value):
    """A layer, a stage or a Config with one more field."""
    field = (name, type(default), dataclasses.field(default=default))
    cls = dataclasses.make_dataclass("Planted", [field], bases=(type(part),), frozen=True)
    values = {field.name: getattr(part, field.name) for field in dataclasses.fields(part)}
    return cls(**values, **{name: value})


@pytest.mark.parametrize("kind, default, values, lawful", [
    ("Config", 0, {"tiny": 1}, False),
    ("Config", 0.0, {"medium": 0.5}, True),
    ("Config", "normuon", {}, False),
    ("Config", "normuon", {"tiny": "muon"}, False),
    ("Config", "bfloat16", {}, False),
    ("Config", "bfloat16", {"record": "float8_e4m3fn"}, True),
    ("Layer", False, {"small": True}, False),
    ("Layer", False, {"record": True, "small": True}, True),
    ("Stage", 0, {}, False),
    ("Stage", 0, {"record": 1}, True),
])  # fmt: skip
def test_a_field_that_serves_no_large_preset_is_found(kind, default, values, lawful):
    parts = {}
    for preset, some in PARTS[kind].items():
        value = values.get(preset, default)
        parts[preset] = [with_field(part, "planted", default, value) for part in some]
    assert ("planted" in unlawful(kind, parts)) is not lawful


# ---- Importing -----------------------------------------------------------------------------------
def imported() -> set[str]:
    """Top-level packages that the file imports."""
    names = [a.name for node in NODES if isinstance(node, ast.Import) for a in node.names]
    names += [node.module for node in NODES if isinstance(node, ast.ImportFrom)]
    return {name.split(".")[0] for name in names}


def test_only_jax_optax_numpy_and_the_standard_library_are_imported():
    assert imported() - sys.stdlib_module_names == {"jax", "numpy", "optax"}


def test_top_level_statements_only_define():
    """Besides definitions there are the docstring, constants, f.defvjp(...) and the last line."""
    first, *body, last = TREE.body
    assert ast.unparse(first.value) == repr(train_gpt.__doc__)
    assert ast.unparse(last.test) == "__name__ == '__main__'"
    definitions = (ast.Import, ast.ImportFrom, ast.FunctionDef, ast.ClassDef)
    makers = {"Config", "Layer", "P", "Stage", "dict"}
    for node in body:
        if isinstance(node, ast.Expr):
            assert re.fullmatch(r"\w+\.defvjp\(\w+, \w+\)", ast.unparse(node)), node.lineno
        elif not isinstance(node, definitions):
            assert isinstance(node, (ast.Assign, ast.AnnAssign)), node.lineno
            calls = [n.func for n in ast.walk(node.value) if isinstance(n, ast.Call)]
            called = {ast.unparse(call) for call in calls}
            reads_itself = ast.unparse(node.value) == "Path(__file__).read_bytes().decode()"
            assert reads_itself or called <= makers, node.lineno
    decorators = [d for node in NODES for d in getattr(node, "decorator_list", [])]
    called = {ast.unparse(d.func) for d in decorators if isinstance(d, ast.Call)}
    assert called <= {"dataclasses.dataclass", "functools.partial"}


AUDIT = """
import os, sys, threading
from jax._src import xla_bridge
IMPORTS
events = []
sys.addaudithook(lambda name, args: events.append((name, args and str(args[0]))))
import train_gpt
events, threads, argv = list(events), threading.enumerate(), sys.argv
opened = {path for name, path in events if name == "open" and not path.endswith(".pyc")}
assert opened == {train_gpt.__file__}, opened
effects = ("os.", "shutil.", "socket.", "subprocess.", "signal.", "tempfile.")
reads = ("os.listdir", "os.scandir")
bad = [e for e in events if e[0].startswith(effects) and e[0] not in reads]
assert not bad, bad
assert threads == [threading.main_thread()], threads
assert not xla_bridge._backends, "JAX has a backend"
assert sorted(os.listdir()) == ["audit.py"]
xla_bridge.get_backend("cpu")
assert xla_bridge._backends, "the test looks for backends in a wrong place"
"""


def test_importing_it_does_nothing(tmp_path):
    """It takes no device, and starts no thread or process. The only file opened is train_gpt.py."""
    imports = [node for node in TREE.body if isinstance(node, (ast.Import, ast.ImportFrom))]
    audit = AUDIT.replace("IMPORTS", "\n".join(map(ast.unparse, imports)))
    (tmp_path / "audit.py").write_text(audit)
    env = os.environ | {"PYTHONPATH": str(TRAIN.parent), "PYTHONDONTWRITEBYTECODE": "1"}
    command = [sys.executable, "audit.py"]
    done = subprocess.run(
        command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=300
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_nothing_is_run_or_unpacked_that_came_from_outside():
    names = {node.id for node in NODES if isinstance(node, ast.Name)}
    assert not names & {"eval", "exec", "compile", "__import__"}
    assert not imported() & {"pickle", "marshal", "shelve", "ctypes"}
    assert train_gpt.SOURCE.count("importlib") == train_gpt.SOURCE.count("importlib.metadata")
    attributes = {node.attr for node in NODES if isinstance(node, ast.Attribute)}
    assert not attributes & {"system", "popen", "import_module", "load"}
    keywords = {node.arg for node in NODES if isinstance(node, ast.keyword)}
    assert not keywords & {"shell", "allow_pickle"}


# ---- Techniques ----------------------------------------------------------------------------------
def test_every_technique_is_in_the_table():
    """A row of records/techniques.md begins with every `[tag]` of a comment or a docstring."""
    texts = list(comments(train_gpt.SOURCE).values())
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef)
    texts += [ast.get_docstring(node) or "" for node in NODES if isinstance(node, kinds)]
    tags = set(re.findall(r"\[([a-z][a-z0-9-]+)\](?!})", "\n".join(texts)))
    page = (TRAIN.parent / "records/techniques.md").read_text(encoding="utf-8")
    rows = re.findall(r"^`\[([a-z0-9-]+)\]` \| ", page, re.M)
    assert len(tags) > 5 and sorted(rows) == sorted(tags)
