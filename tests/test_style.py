"""train_gpt.py keeps its promises to readers: easy code, one model, three packages."""

import ast
import dataclasses
import inspect
import io
import re
import sys
import tokenize
from pathlib import Path

import train_gpt

TRAIN = Path(train_gpt.__file__).resolve()
TREE = ast.parse(train_gpt.SOURCE)
NODES = list(ast.walk(TREE))

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


def test_it_is_easy_to_read():
    """No walrus, no lambda over several lines, no function that is too long or has too many names;
    and a docstring for each, but for inner functions and methods like __init__."""
    bodies = [TREE.body, *(node.body for node in TREE.body if isinstance(node, ast.ClassDef))]
    documented = [node for body in bodies for node in body]
    hard = []
    for node in NODES:
        if isinstance(node, ast.NamedExpr):
            hard.append((node.lineno, "a walrus"))
        if isinstance(node, ast.Lambda) and node.end_lineno > node.lineno:
            hard.append((node.lineno, "a lambda over several lines"))
        if isinstance(node, ast.FunctionDef):
            if node.end_lineno - node.lineno >= LINES or len(names_in(node)) > NAMES:
                hard.append((node.lineno, "too long, or too many names"))
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)) and node in documented:
            if not ast.get_docstring(node) and not node.name.startswith("__"):
                hard.append((node.lineno, "no docstring"))
    assert hard == [] and len(documented) > 80


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
def test_every_field_is_a_flag_or_a_tuple_is_read_somewhere_and_has_a_comment():
    """Numbers and strings are flags; a bool would be one that is always true. A comment is on the
    field's line, or before it; layers and stages are explained by their classes."""
    reads = {node.attr for node in NODES if isinstance(node, ast.Attribute)}
    for field in dataclasses.fields(train_gpt.Config):
        kind = getattr(field.type, "__origin__", field.type)
        assert kind in (int, float, str, tuple) and isinstance(field.default, kind), field.name
    for cls in (train_gpt.Config, train_gpt.Layer, train_gpt.Stage):
        source, first = inspect.getsourcelines(cls)
        for field in dataclasses.fields(cls):
            (i,) = [i for i, line in enumerate(source) if line.startswith(f"    {field.name}: ")]
            comment = source[i - 1].startswith("    # ") or re.search("  # .{5}", source[i])
            assert comment or field.name in ("layers", "stages"), (field.name, first + i)
            assert field.name in reads, (field.name, first + i)


# The file has the techniques of one model: each field of Config, Layer and Stage is used by the
# record or by medium. These may stay all the same:
ALLOWED = {
    "pointer": "tiny trains on little text, which repeats itself",
    "key_start": "small models find induction late",
    "ngrams": "a vocabulary of bytes needs longer n-grams than pairs",
    "steps": "a shorter run",
    "compute": "float32, in which tests compare formulas",
}
# What leaves a technique out in Config: a format does if it is that of activations, and the table
# of n-grams if it has pairs alone. A layer or a stage leaves it out by the field's default.
LEFT_OUT = {0, "", (), (2,), train_gpt.Config.compute}


def test_every_field_serves_the_record():
    used, fields = set(), set()
    for preset in "record", "medium":
        c = train_gpt.PRESETS[preset]
        for part in (c, *c.layers, *c.stages):
            for field in dataclasses.fields(part):
                left_out = LEFT_OUT if part is c else {field.default}
                fields.add((type(part), field.name))
                if getattr(part, field.name) not in left_out:
                    used.add((type(part), field.name))
    assert sorted(name for _, name in fields - used) == sorted(ALLOWED)


def test_it_imports_three_packages_besides_the_standard_library():
    imports = [node for node in TREE.body if isinstance(node, (ast.Import, ast.ImportFrom))]
    names = [getattr(node, "module", None) or node.names[0].name for node in imports]
    packages = {name.partition(".")[0] for name in names}
    assert packages - sys.stdlib_module_names == {"jax", "numpy", "optax"}
