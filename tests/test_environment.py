"""Scripts start whatever Python's environment variables are: every script by its source, two for
real."""

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.tools import write_shard

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = [ROOT / name for name in ("basics", "data", "evals", "lab", "records", "run")]
SCRIPTS = [path for folder in FOLDERS for path in sorted(folder.glob("*.py"))
           if '__name__ == "__main__"' in path.read_text("utf-8")]  # fmt: skip
OURS = {path.stem for folder in FOLDERS for path in folder.glob("*.py")} | {
    "lab",
    "run",
    "train_gpt",
}


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.name)
def test_a_script_finds_its_neighbours_and_does_without_docstrings(path):
    """With PYTHONSAFEPATH, Python does not put the script's folder on its path; with
    PYTHONOPTIMIZE=2, __doc__ is None."""
    tree = ast.parse(path.read_text("utf-8"))
    has_path = False
    for node in tree.body:
        has_path |= isinstance(node, ast.Expr | ast.Assign | ast.AugAssign) and (
            "sys.path" in ast.unparse(node)
        )
        names = [alias.name for alias in getattr(node, "names", [])]
        if isinstance(node, ast.ImportFrom):
            names = [node.module]
        ours = {name.partition(".")[0] for name in names} & OURS
        assert has_path or not ours, f"line {node.lineno} imports {ours}"
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute | ast.Subscript):
            assert ast.unparse(node.value) != "__doc__", f"line {node.lineno}: {node.attr}"


@pytest.mark.parametrize("script, status, says", [
    ("data/check.py", 1, "has 3222 bytes where"),  # checks must not be asserts
    ("records/verify.py", 2, "verify.py: "),
])  # fmt: skip
def test_an_odd_environment_and_no_jax(tmp_path, script, status, says):
    (tmp_path / "jax.py").write_text("raise ImportError")
    folder = tmp_path / "\xe9\u4e2d"
    folder.mkdir()
    for name in ("x_train_000001.bin", "x_val_000000.bin"):
        os.truncate(write_shard(folder / name, [256] * 1100), 3222)
    odd = dict(PYTHONSAFEPATH="1", PYTHONOPTIMIZE="2", PYTHONIOENCODING="ascii", PYTHONUTF8="0")
    odd |= dict(LC_ALL="C", PYTHONCOERCECLOCALE="0", PYTHONWARNINGS="error", PYTHONPATH=tmp_path)
    command = [sys.executable, ROOT / script, folder]
    done = subprocess.run(
        command, env=os.environ | odd, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == status and says in done.stderr and "Traceback" not in done.stderr
