"""What all files of basics/ have in common: they run and find no fault, need no other file, and
README.md lists them."""

import ast
import importlib
import re
import sys
from pathlib import Path

import jax
import pytest

import train_gpt
from records.other.basics import compare
from tests.tools import basic

BASICS = Path(train_gpt.__file__).resolve().parent / "basics"
README = (BASICS / "README.md").read_text(encoding="utf-8")
ORDER = ("gpt2 attention data_parallel fsdp tensor_parallel pipeline_parallel context_parallel "
         "cluster muon fp8 kernel").split()  # fmt: skip
ALLOWED = {"jax", "numpy", "optax", "matplotlib"}
ALLOWED |= {"messages", "shards", "source_code"}  # data/


def test_the_readme_has_every_file_in_reading_order():
    assert sorted(ORDER) == sorted(path.stem for path in BASICS.glob("*.py"))
    assert re.findall(r"^## (\w+)\.py: ", README, re.M) == ORDER


@pytest.mark.parametrize("name, checks", {
    "attention": 12, "data_parallel": 5, "fsdp": 9, "tensor_parallel": 11, "context_parallel": 6,
    "muon": 5, "fp8": 11,
}.items())  # fmt: skip
def test_it_runs(name, checks, monkeypatch, capsys):
    monkeypatch.setattr(jax.config, "update", lambda *_: None)  # this process has 8 devices
    monkeypatch.setattr(sys, "argv", [name])
    importlib.import_module(name).main()
    printed = capsys.readouterr().out
    assert printed.count("ok   ") == checks and "WRONG" not in printed


@pytest.mark.parametrize("name, checks, flags", [
    ("pipeline_parallel", 19, ["--draw", "picture.svg"]), ("cluster", 5, []),
])  # fmt: skip
def test_it_runs_as_its_readers_start_it(name, checks, flags, tmp_path, monkeypatch):
    """One with its picture, in a notebook."""
    monkeypatch.setenv("MPLBACKEND", "module://matplotlib_inline.backend_inline")
    run = basic(tmp_path, name, *flags)
    assert (run.returncode, run.stderr) == (0, ""), run.stderr
    assert run.stdout.count("ok   ") == checks and "WRONG" not in run.stdout
    assert not flags or (tmp_path / "picture.svg").stat().st_size < 80_000


@pytest.mark.parametrize("name", ORDER)
def test_a_file_needs_no_other_and_says_what_is_there(name):
    """It names parts of train_gpt.py; README.md has its picture and exercises, and tests answer
    them."""
    tree = ast.parse((BASICS / f"{name}.py").read_text(encoding="utf-8"))
    nodes = [*ast.walk(tree)]
    imported = {a.name for node in nodes if isinstance(node, ast.Import) for a in node.names}
    imported |= {node.module for node in nodes if isinstance(node, ast.ImportFrom)}
    assert {name.split(".")[0] for name in imported} - sys.stdlib_module_names <= ALLOWED
    names = re.findall(r"`([^`]+)`", ast.get_docstring(tree).partition("\nIn train_gpt.py")[2])
    functions = {node.name for node in nodes if isinstance(node, ast.FunctionDef)}
    there = {*dir(train_gpt), *train_gpt.Config.__dataclass_fields__}
    assert there & {*names} and {*names} <= there | functions
    section = re.search(rf"^## {name}\.py: .*?(?=^## |\Z)", README, re.M | re.S)[0]
    assert "](pictures/" in section or name == "kernel"  # its picture is made of words
    answered = re.findall(r"`(test_exercise_\w+)`", section)
    folder = "lab/tests" if name == "kernel" else "tests"  # which needs a later JAX
    if name != "cluster":  # no exercise
        answers = (BASICS.parent / folder / f"test_basics_{name}.py").read_text(encoding="utf-8")
        assert answered == re.findall(r"^def (test_exercise_\w+)\(", answers, re.M)


def test_the_last_table_is_what_the_logs_say():
    table = compare.table()
    text = README.partition("## What eight years")[2]
    rows = [line for line in text.splitlines() if line.startswith("|")]
    assert rows == [line for line in table if line]
    # | tokens to 2.8790 | 92,160 | 4,500 ± 100 (n = 4) |
    fewer = []
    for row in table[5:8]:
        _, _, gpt2, tiny, _ = row.split("|")
        tokens_of_tiny = tiny.partition("±")[0]
        fewer.append(int(gpt2.replace(",", "")) / int(tokens_of_tiny.replace(",", "")))
    times = f"with {fewer[0]:.0f}, {fewer[1]:.0f} and {fewer[2]:.0f} times fewer tokens"
    assert times in " ".join(README.split())
