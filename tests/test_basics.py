"""What all files of basics/ have in common: they run and find no fault, need no other file, and
README.md lists them."""

import ast
import re
import sys
from pathlib import Path

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
    "attention": 12, "data_parallel": 5, "fsdp": 9, "tensor_parallel": 11, "pipeline_parallel": 19,
    "context_parallel": 6, "cluster": 5, "muon": 5, "fp8": 11,
}.items())  # fmt: skip
def test_it_runs(name, checks, tmp_path, monkeypatch):
    """As its readers start it, one also with its picture in a notebook."""
    monkeypatch.setenv("MPLBACKEND", "module://matplotlib_inline.backend_inline")
    draw = ["--draw", "picture.svg"] if name == "pipeline_parallel" else []
    run = basic(tmp_path, name, *draw)
    assert (run.returncode, run.stderr) == (0, ""), run.stderr
    assert run.stdout.count("ok   ") == checks and "WRONG" not in run.stdout
    assert not draw or (tmp_path / "picture.svg").stat().st_size < 80_000


@pytest.mark.parametrize("name", ORDER)
def test_a_file_needs_no_other(name):
    text = (BASICS / f"{name}.py").read_text(encoding="utf-8")
    nodes = [*ast.walk(ast.parse(text))]
    imported = {
        alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names
    }
    imported |= {node.module for node in nodes if isinstance(node, ast.ImportFrom)}
    assert {name.split(".")[0] for name in imported} - sys.stdlib_module_names <= ALLOWED


@pytest.mark.parametrize("name", [name for name in ORDER if name not in ("gpt2", "kernel")])
def test_it_draws_alike_everywhere(name):
    """Also in a notebook, whose backend cannot be imported, and with settings of a user."""
    text = (BASICS / f"{name}.py").read_text(encoding="utf-8")
    before = text.partition("    import matplotlib.pyplot as plt\n")[0].splitlines()[-1]
    assert 'os.environ.update(MPLBACKEND="agg", MATPLOTLIBRC=os.devnull)' in before
    assert 'plt.style.use(["default", ' in text
    assert '"--draw", type=FileType("ab")' in text  # an old picture stays


@pytest.mark.parametrize("name", ORDER)
def test_what_it_says_of_train_gpt_names_what_is_there(name):
    tree = ast.parse((BASICS / f"{name}.py").read_text(encoding="utf-8"))
    heads = re.findall(r"^(Run|Look|Source|In train_gpt\.py) +\S", ast.get_docstring(tree), re.M)
    assert [*dict.fromkeys(heads)] == ["Run", "Look", "Source", "In train_gpt.py"]
    names = re.findall(r"`([^`]+)`", ast.get_docstring(tree).partition("\nIn train_gpt.py")[2])
    functions = {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}
    fields = train_gpt.Config.__dataclass_fields__
    of_train_gpt = [name for name in names if hasattr(train_gpt, name) or name in fields]
    assert of_train_gpt
    assert set(names) <= {*of_train_gpt, *functions}


@pytest.mark.parametrize("name", ORDER)
def test_its_section_has_a_picture_and_exercises_that_are_answered(name):
    section = re.search(rf"^## {name}\.py: .*?(?=^## |\Z)", README, re.M | re.S)[0]
    assert "](pictures/" in section or name == "kernel"  # its picture is made of words
    named = re.findall(r"`(test_exercise_\w+)`", section)
    folder = "lab/tests" if name == "kernel" else "tests"  # which needs a later JAX
    answers = (BASICS.parent / folder / f"test_basics_{name}.py").read_text(encoding="utf-8")
    assert len(named) in (1, 2)
    assert named == re.findall(r"^def (test_exercise_\w+)\(", answers, re.M)


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
    for search, name, rates in ("brief_rate", "brief_seed", 4), ("rate", "long", 6):
        losses = compare.searched(search)
        assert len(losses) == rates
        best = min(losses, key=lambda rate: min(losses[rate]))
        flags, _ = compare.read(compare.logs(name)[0])
        assert flags["lr"] == best
