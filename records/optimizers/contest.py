"""Puts a contestant's file into train_gpt_simple.py, in place of its section "Optimizer"."""

import ast
import re
import symtable
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.append(str(HERE.parents[1] / "data"))
from messages import refuse  # noqa: E402

PLAIN = HERE / "train_gpt_simple.py"
BEGIN = "# ---- Optimizer: begin "
END = "# ---- Optimizer: end "
MODULE = "train_gpt_simple"  # from which a contestant imports what it uses
IMPORTS = (ast.Import, ast.ImportFrom)
REPLACEABLE = {"SETTINGS", "optimizer", "initial_value", "validated_params"}  # by a contestant


def is_contestant(source: str) -> bool:
    """Whether a source has optimizer() and no main()."""
    functions = re.findall(r"^def (\w+)\(", source, re.M)
    return "optimizer" in functions and "main" not in functions


def names() -> list[str]:
    """The contestants beside this file, without .py."""
    return [path.stem for path in sorted(HERE.glob("*.py")) if is_contestant(path.read_text())]


def defaults(name: str) -> dict[str, float]:
    """The defaults of a contestant's numbers."""
    tree = ast.parse((HERE / f"{name}.py").read_text("utf-8"))
    (function,) = (node for node in tree.body if getattr(node, "name", "") == "optimizer")
    arguments = [argument.arg for argument in function.args.args][2:]
    return dict(zip(arguments, map(ast.literal_eval, function.args.defaults), strict=True))


# ---- The assembled file --------------------------------------------------------------------------
def parts(source: str) -> tuple[str, str, str]:
    """A version of train_gpt_simple.py before, in and after its section "Optimizer", whose first
    line is left out. Raises ValueError unless there is one."""
    before, rest = source.split(f"\n{BEGIN}")
    section, after = rest.split(f"\n{END}")
    return f"{before}\n", section.partition("\n")[2] + "\n", f"{END}{after}"


def outside(source: str) -> str:
    """What all contestants share: the source without its section "Optimizer"."""
    before, _, after = parts(source)
    return before + after


def assemble(contestant: str) -> str:
    """Returns the source of train_gpt_simple.py with a contestant's source as its optimizer, which
    begins in the line after BEGIN."""
    before, _, after = parts(PLAIN.read_text("utf-8"))
    own, borrowed = pieces(contestant)
    section = "\n\n\n".join([own.rstrip(), *borrowed.values()])
    if "SETTINGS" not in bound_names(own):
        section += "\n\n\nSETTINGS = {}"
    return f"{before}{BEGIN.ljust(100, '-')}\n{section}\n\n\n{after}"


def pieces(contestant: str) -> tuple[str, dict[str, str]]:
    """A contestant's text, without its imports from train_gpt_simple, whose names are there, and
    from other contestants; and what it borrows from these, as sources by name."""
    lines = contestant.split("\n")
    found = {}
    for node in ast.parse(contestant).body:
        if is_local(node):
            lines[node.lineno - 1 : node.end_lineno] = [""] * (node.end_lineno - node.lineno + 1)
            for alias in node.names:
                borrow(node.module, alias.name, found)
    return "\n".join(lines), {name: text for name, (_, text) in found.items() if text}


def borrow(module: str, name: str, found: dict[str, tuple[str, str]]) -> None:
    """Adds to `found` a function or constant of a contestant: by name, the file and the source.
    Those of the file that it names come before it."""
    if module == MODULE:  # its names are there
        return
    source = (HERE / f"{module}.py").read_text("utf-8")
    for node in ast.parse(source).body:
        if name not in bound_names(ast.unparse(node)):
            continue
        if is_local(node):
            borrow(node.module, name, found)
        elif isinstance(node, IMPORTS):
            continue
        elif name in found:
            if found[name][0] != module:
                refuse(f"{name} comes from two contestants: leave out one of the imports")
        else:
            found[name] = (module, "")  # it may name itself
            for part in ast.walk(node):
                if isinstance(part, ast.Name):
                    borrow(module, part.id, found)
            starts = [node.lineno, *(part.lineno for part in getattr(node, "decorator_list", []))]
            text = "\n".join(source.split("\n")[min(starts) - 1 : node.end_lineno])
            del found[name]
            found[name] = (module, text)


def is_local(node: ast.stmt) -> bool:
    """Whether a statement imports from a file beside this one."""
    return isinstance(node, ast.ImportFrom) and (HERE / f"{node.module}.py").is_file()


# ---- What would change the benchmark -------------------------------------------------------------
def read(path: Path) -> str:
    """A contestant's source. Refuses one that would replace a part of train_gpt_simple.py, because
    its result would be that of another model; one that counts outside of its state, because jit
    runs a step of Python only once; and one after which nobody could read the log."""
    source = path.read_text("utf-8")
    if re.search(f"^({BEGIN}|{END}|={{100}}$)", source, re.M):
        refuse(f"{path} has a line at which a log would end its source: change that line")
    plain = outside(PLAIN.read_text("utf-8"))
    imports = {ast.unparse(node) for node in ast.parse(plain).body if isinstance(node, IMPORTS)}
    own, borrowed = pieces(source)
    statements = [ast.unparse(node) for node in ast.parse(own).body]
    found = bound_names("\n".join(text for text in statements if text not in imports))
    taken = bound_names(plain) - REPLACEABLE
    for name in sorted(((found | borrowed.keys()) & taken) | (found & borrowed.keys())):
        refuse(f"{path}: {name} would replace that of {PLAIN.name} or a contestant: rename it")
    for node in ast.walk(ast.parse(own)):
        text = ast.unparse(node)
        counts = isinstance(node, ast.AugAssign) and not isinstance(node.target, ast.Name)
        is_host = isinstance(node, IMPORTS) and text.split()[1] in ("time", "random", "datetime")
        if counts or is_host or isinstance(node, ast.Nonlocal):
            refuse(f"{path}: {text} would be run once, and not in each step: use the state")
    return source


def bound_names(source: str) -> set[str]:
    """The names that a source binds outside functions, or in functions by `global`. Refuses
    `import *`, which may bind any."""
    found = set()
    tables = [symtable.symtable(source, "a contestant", "exec")]
    while tables:
        table = tables.pop()
        tables += table.get_children()
        for symbol in table.get_symbols():
            binds = symbol.is_assigned() or symbol.is_imported()
            if symbol.is_declared_global() or (binds and table.get_type() == "module"):
                found.add(symbol.get_name())
    if re.search(r"^\s*from \S+ import \*", source, re.M):
        refuse("import names as they are, not by import *")
    return found
