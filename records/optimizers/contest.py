"""Puts a contestant's file into train_gpt_simple.py, and finds what its text has wrong.

It executes nothing, and needs no packages. run.py checks what the functions of a contestant do.
"""

import ast
import itertools
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.append(str(HERE.parents[1] / "data"))
from messages import Fault  # noqa: E402

PLAIN = HERE / "train_gpt_simple.py"
BEGIN = "# ---- Optimizer: begin "
END = "# ---- Optimizer: end "
MODULE = "train_gpt_simple"  # from which a contestant imports what it uses
# What a contestant may define, although train_gpt_simple.py has it.
REPLACEABLE = {"SETTINGS", "optimizer", "initial_value", "validated_params"}
REACHES_OUT = {"globals", "exec", "eval", "modules", "__code__"}  # to what is outside the section


# ---- The assembled file --------------------------------------------------------------------------
def parts(source: str) -> tuple[str, str, str]:
    """A version of train_gpt_simple.py before, in and after its section "Optimizer", whose first
    line is left out. Raises Fault."""
    if source.count(f"\n{BEGIN}") != 1 or source.count(f"\n{END}") != 1:
        raise Fault("there is no section Optimizer, or more than one")
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
    if "SETTINGS" not in bound_names(ast.parse(contestant)):
        section += "\n\n\nSETTINGS = {}"
    return f"{before}{BEGIN.ljust(100, '-')}\n{section}\n\n\n{after}"


def pieces(contestant: str, path: Path = Path("a contestant")) -> tuple[str, dict[str, str]]:
    """A contestant's text, without its imports from train_gpt_simple, whose names are there, and
    from other contestants; and what it borrows from these, as sources by name. Raises Fault."""
    lines = contestant.split("\n")
    borrowed = {}
    for node in ast.parse(contestant).body:
        if isinstance(node, ast.ImportFrom) and is_local(node.module):
            lines[node.lineno - 1 : node.end_lineno] = [""] * (node.end_lineno - node.lineno + 1)
            for alias in node.names if node.module != MODULE else []:
                where = f"{path}, line {node.lineno}"
                borrow(node.module, alias.name, borrowed, where)
    own = "\n".join(lines)
    for name, (line, _) in bound_names(ast.parse(own)).items():
        if name in borrowed:
            raise Fault(f"{path}, line {line}: {name} comes from another contestant: rename this")
    return own, borrowed


def borrow(module: str, name: str, found: dict[str, str], where: str) -> None:
    """Adds to `found` a function or constant of a contestant, and those that it names, as sources
    by name, in the order of their files. Raises Fault."""
    source = (HERE / f"{module}.py").read_text("utf-8")
    nodes = {}  # by the names that they bind, without imports of packages
    for node in ast.parse(source).body:
        if not isinstance(node, (ast.Import, ast.ImportFrom)) or is_local(vars(node).get("module")):
            nodes |= dict.fromkeys(bound_names(ast.Module([node], [])), node)
    if name not in nodes:
        raise Fault(f"{where}: {module}.py defines no {name}: import it from the file that does")
    todo = [name]
    used = set()
    while todo:
        name = todo.pop()
        if name in nodes and name not in used:
            used.add(name)
            todo += [part.id for part in ast.walk(nodes[name]) if isinstance(part, ast.Name)]
    for name, node in nodes.items():
        if name in used and isinstance(node, ast.ImportFrom):
            borrow(node.module, name, found, where)
        elif name in used:
            starts = [node.lineno, *(part.lineno for part in getattr(node, "decorator_list", []))]
            text = "\n".join(source.split("\n")[min(starts) - 1 : node.end_lineno])
            if found.setdefault(name, text) != text:
                raise Fault(f"{where}: this brings a second {name}: leave out one of the imports")


def is_local(module: str | None) -> bool:
    """Whether a module is a file beside this one."""
    return bool(module) and (HERE / f"{module}.py").is_file()


# ---- Checks of the text --------------------------------------------------------------------------
def read(path: Path) -> str:
    """A contestant's source; raises Fault if its text has a fault."""
    try:
        source = path.read_text("utf-8")
    except UnicodeDecodeError:
        raise Fault(f"{path} is not UTF-8: save it as UTF-8") from None
    check_text(source, path)
    return source


def check_text(source: str, path: Path, shared: str = "") -> None:
    """Raises Fault, with the line, for what cannot stand in train_gpt_simple.py. shared is what
    that file has outside its section; default: that of today's file."""
    try:
        tree = ast.parse(source, str(path))
    except SyntaxError as error:
        raise Fault(f"{path}, line {error.lineno}: {error.msg}: correct it") from None
    for number, line in enumerate(source.split("\n"), 1):
        if line.startswith((BEGIN, END)) or line == "=" * 100:
            raise Fault(f"{path}, line {number}: a log ends its source there: change this line")
    for last, node in itertools.pairwise(tree.body):
        if last.end_lineno == node.lineno:
            raise Fault(f"{path}, line {node.lineno}: write one statement on a line")
    for node in tree.body:
        check_statement(node, f"{path}, line {node.lineno}")
    check_names(tree, path, shared or outside(PLAIN.read_text("utf-8")))
    if not any(isinstance(n, ast.FunctionDef) and n.name == "optimizer" for n in tree.body):
        raise Fault(f"{path} has no function optimizer: write  def optimizer(params, total_steps)")
    pieces(source, path)


def check_statement(node: ast.stmt, where: str) -> None:
    """Raises Fault for statements that would not do in the assembled file what they do here."""
    if isinstance(node, ast.ImportFrom) and node.module == "__future__":
        raise Fault(f"{where}: leave out __future__, which must be a file's first import")
    if isinstance(node, ast.If) and "__name__" in ast.unparse(node.test):
        raise Fault(f"{where}: leave this out, because train_gpt_simple.py would run it")
    for part in ast.walk(node):
        is_wrong = False
        if isinstance(part, ast.Import):
            is_wrong = any(is_local(alias.name) for alias in part.names)
        elif isinstance(part, ast.ImportFrom):
            is_renamed = part is not node or any(alias.asname for alias in part.names)
            is_wrong = part.names[0].name == "*" or (is_local(part.module) and is_renamed)
        if is_wrong:
            raise Fault(f"{where}: import names as they are: from {MODULE} import NAME")


def check_names(tree: ast.Module, path: Path, shared: str) -> None:
    """Raises Fault where a name would replace another one of train_gpt_simple.py, or can."""
    taken = bound_names(ast.parse(shared))
    found = list(bound_names(tree).items())
    for node in ast.walk(tree):
        if isinstance(node, ast.Global):
            found += [(name, (node.lineno, "")) for name in node.names]
        name = getattr(node, "id", getattr(node, "attr", ""))
        if name in REACHES_OUT:
            raise Fault(f"{path}, line {node.lineno}: {name} can change the model: leave it out")
    for name, (at, meaning) in found:
        is_same = bool(meaning) and taken.get(name, (0, ""))[1] == meaning
        if name in taken.keys() - REPLACEABLE and not is_same:
            raise Fault(f"{path}, line {at}: {name} would replace that of {PLAIN.name}: rename it")


def bound_names(tree: ast.Module) -> dict[str, tuple[int, str]]:
    """The names that a file binds outside functions, with the line and, for imports, what is
    imported. Names from train_gpt_simple.py are not new, and not among them."""
    found = {}
    todo = list(tree.body)
    while todo:
        node = todo.pop(0)
        line = getattr(node, "lineno", 0)
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            found[node.name] = (line, "")
        elif isinstance(node, ast.Import):
            for alias in node.names:
                bound = alias.asname or alias.name.partition(".")[0]
                found[bound] = (line, alias.name if alias.asname else bound)
        elif isinstance(node, ast.ImportFrom):
            for alias in node.names if node.module != MODULE else []:
                found[alias.asname or alias.name] = (line, f"{node.module}.{alias.name}")
        elif isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load):
            found[node.id] = (line, "")
        elif not isinstance(node, (ast.Lambda, ast.ListComp, ast.DictComp, ast.SetComp)):
            todo += ast.iter_child_nodes(node)
    return found
