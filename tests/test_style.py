"""train_gpt.py keeps its promises to readers: easy code, three packages."""

import ast
import sys

import train_gpt

TREE = ast.parse(train_gpt.SOURCE)
NODES = list(ast.walk(TREE))

LINES, NAMES = 55, 30  # of a function, at most


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


def test_it_imports_three_packages_besides_the_standard_library():
    imports = [node for node in TREE.body if isinstance(node, (ast.Import, ast.ImportFrom))]
    names = [getattr(node, "module", None) or node.names[0].name for node in imports]
    packages = {name.partition(".")[0] for name in names}
    assert packages - sys.stdlib_module_names == {"jax", "numpy", "optax"}
