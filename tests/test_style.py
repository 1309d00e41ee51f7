"""train_gpt.py keeps its promises to readers: easy code, one model, imports without effects."""

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

import train_gpt

TRAIN = Path(train_gpt.__file__).resolve()
TREE = ast.parse(train_gpt.SOURCE)
NODES = list(ast.walk(TREE))

TUPLES = 2  # how many assignments of a tuple to a tuple of more than two names are allowed
LINES, NAMES = 55, 30  # of a function, at most


# ---- Reading -------------------------------------------------------------------------------------
def names_in(function: ast.FunctionDef) -> set[str]:
    """The names that a function defines, those of its inner functions included."""
    found = set()
    for node in ast.walk(function):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found.add(node.id)
        if isinstance(node, ast.arg):
            found.add(node.arg)
        if isinstance(node, ast.FunctionDef) and node is not function:
            found.add(node.name)
    return found


def hard_to_read(source: str) -> list[str]:
    """Places that a reader would have to read twice."""
    complaints = []
    wide_tuples = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.NamedExpr):
            complaints.append(f"line {node.lineno}: a walrus")
        if isinstance(node, ast.Lambda) and node.end_lineno > node.lineno:
            complaints.append(f"line {node.lineno}: a lambda over several lines")
        if isinstance(node, ast.FunctionDef):
            if node.end_lineno - node.lineno >= LINES:
                complaints.append(f"line {node.lineno}: {node.name} is too long")
            if len(names_in(node)) > NAMES:
                complaints.append(f"line {node.lineno}: {node.name} has too many names")
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Tuple):
            for target in node.targets:
                if isinstance(target, ast.Tuple) and len(target.elts) > 2:
                    wide_tuples.append(node.lineno)
    if len(wide_tuples) > TUPLES:
        complaints.append(f"lines {wide_tuples}: tuples assigned to more than two names")
    return complaints


def test_it_is_easy_to_read():
    assert hard_to_read(train_gpt.SOURCE) == []


def test_every_function_and_class_has_a_docstring():
    """Inner functions and methods like __init__ need none."""
    bodies = [TREE.body, *(node.body for node in TREE.body if isinstance(node, ast.ClassDef))]
    nodes = [node for body in bodies for node in body]
    nodes = [node for node in nodes if isinstance(node, (ast.FunctionDef, ast.ClassDef))]
    bare = [node.name for node in nodes if not ast.get_docstring(node)]
    assert len(nodes) > 80
    assert [name for name in bare if not name.startswith("__")] == []


def test_capitals_at_the_end_of_a_name_are_a_shape():
    """Their letters are those of the docstring, of bands (W) and of the exchange. Small letters are
    local, and numbers are sizes."""
    letters = "".join(re.findall(r"\b[A-Z]\b", train_gpt.__doc__)) + "WQUACL"
    names = {node.id for node in NODES if isinstance(node, ast.Name)}
    names |= {node.arg for node in NODES if isinstance(node, ast.arg)}
    shapes = [re.fullmatch(r"[a-z0-9_]+_([A-Za-z0-9]*[A-Z]\w*)", name) for name in names]
    shapes = [match[1] for match in shapes if match]
    assert len(shapes) > 50
    assert [shape for shape in shapes if not re.fullmatch(f"[{letters}nijp0-9]+", shape)] == []


def test_every_technique_is_in_the_table_with_its_source():
    """A row of records/techniques.md begins with every `[tag]` of a comment or a docstring."""
    tokens = tokenize.generate_tokens(io.StringIO(train_gpt.SOURCE).readline)
    texts = [token.string for token in tokens if token.type == tokenize.COMMENT]
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef)
    texts += [ast.get_docstring(node) or "" for node in NODES if isinstance(node, kinds)]
    tags = set(re.findall(r"\[([a-z][a-z0-9-]+)\](?!})", "\n".join(texts)))
    page = (TRAIN.parent / "records/techniques.md").read_text(encoding="utf-8")
    rows = dict(re.findall(r"^`\[([a-z0-9-]+)\]` \| [^|]+ \| ([^|\n]+)", page, re.M))
    assert len(tags) > 5 and sorted(rows) == sorted(tags)
    for tag, source in rows.items():
        assert re.search(r"\d|ours", source), tag


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
# Numbers, tuples and strings of Config that leave a technique out. A format does if it is that of
# activations, and the table of n-grams if it has pairs alone. A layer or a stage leaves it out by
# the field's default.
LEFT_OUT = {0, "", (), (2,), train_gpt.Config.compute}


def unlawful(kind: str, parts: dict[str, tuple]) -> list[str]:
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
    presets = train_gpt.PRESETS.items()
    found = unlawful("Config", {name: (c,) for name, c in presets})
    found += unlawful("Layer", {name: c.layers for name, c in presets})
    found += unlawful("Stage", {name: c.stages for name, c in presets})
    new = sorted(set(found) - ALLOWED.keys())
    assert not new, f"neither the record nor medium needs {new}: delete them, or copy the file"
    assert sorted(found) == sorted(ALLOWED)  # or an exception is none


# ---- Importing -----------------------------------------------------------------------------------
AUDIT = """
import os, sys, threading
from jax._src import xla_bridge
IMPORTS
events = []
sys.addaudithook(lambda name, args: events.append((name, args and str(args[0]))))
import train_gpt
events, threads = list(events), threading.enumerate()
opened = {path for name, path in events if name == "open" and not path.endswith(".pyc")}
assert opened == {train_gpt.__file__}, opened
effects = ("os.", "shutil.", "socket.", "subprocess.", "signal.", "tempfile.")
reads = ("os.listdir", "os.scandir")
bad = [e for e in events if e[0].startswith(effects) and e[0] not in reads]
assert not bad, bad
assert threads == [threading.main_thread()], threads
assert not xla_bridge._backends, "JAX has a backend"
"""


def test_importing_it_does_nothing(tmp_path):
    """It takes no device, and starts no thread or process. The only file opened is train_gpt.py,
    and besides the standard library it imports three packages."""
    imports = [node for node in TREE.body if isinstance(node, (ast.Import, ast.ImportFrom))]
    names = [getattr(node, "module", None) or node.names[0].name for node in imports]
    packages = {name.partition(".")[0] for name in names}
    assert packages - sys.stdlib_module_names == {"jax", "numpy", "optax"}
    audit = AUDIT.replace("IMPORTS", "\n".join(map(ast.unparse, imports)))
    env = os.environ | {"PYTHONPATH": str(TRAIN.parent), "PYTHONDONTWRITEBYTECODE": "1"}
    command = [sys.executable, "-c", audit]
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
