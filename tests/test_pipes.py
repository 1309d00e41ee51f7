"""No tool prints a traceback where nobody reads what it prints, as behind `| head` or `| true`."""

import os
import re
import subprocess
import sys

import pytest

from tests.tools import ROOT

RECORD = "records/tracks/tiny-2k/2026-11-25_n_grams_and_copies"
LOG = "records/other/example/2026-11-25T15-13-11_917ae0e6.txt"
TEXT = "README.md data/README.md records/README.md"
# By tool: its arguments, where OUT is an empty folder, and its status. What is written to files
# matters more than what is printed, so a tool that writes shards ends as always.
CHEAP = {
    "data/cached_fineweb10B.py": ("--help", 0),
    "data/check.py": ("nowhere", 141),
    "data/tokenize_text.py": (f"{TEXT} --bytes --out OUT/text", 0),
    "run/machine.py": ("plan", 141),
    "run/watch.py": (LOG, 141),
    "records/other/basics/compare.py": ("", 141),
    "records/pack.py": ("--help", 0),
    "records/plot.py": (f"{RECORD} --out OUT/curves", 141),
    "records/verify.py": (RECORD, 141),
}
ELSEWHERE = {  # tools that take long, need a network, or write into the repository
    "basics/", "data/cached_hellaswag.py", "data/gpt2_prefixes.py", "data/source_code.py",
    "lab/compile_", "lab/faults.py", "run/install.py", "run/launch.py", "lab/profile.py", "evals/",
    "records/optimizers/", "records/upstream92/", "reference.py", "tests/",
    "records/run_ab.py",  # see test_run_ab.py: its runs go on
}  # fmt: skip
VERBS = {"plan": "run/machine.py", "plot": "records/plot.py", "tokenize": "data/tokenize_text.py",
         "verify": "records/verify.py", "watch": "run/watch.py"}  # fmt: skip


@pytest.fixture(scope="module")
def processes(tmp_path_factory) -> dict[str, subprocess.Popen]:
    """All tools at once, in a pipe whose reader is gone."""
    out = str(tmp_path_factory.mktemp("out"))
    env = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    reader, pipe = os.pipe()
    os.close(reader)
    started = {}
    for tool, (arguments, _) in CHEAP.items():
        command = [sys.executable, tool, *arguments.replace("OUT", out).split()]
        started[tool] = subprocess.Popen(
            command, cwd=ROOT, env=env, stdout=pipe, stderr=subprocess.PIPE, text=True
        )
    os.close(pipe)
    return started


@pytest.mark.parametrize("tool", CHEAP)
def test_a_reader_who_leaves_gets_no_traceback(processes, tool):
    _, error = processes[tool].communicate(timeout=300)
    status = processes[tool].returncode
    status = status if status >= 0 else 128 - status  # as a shell states that a signal ended it
    assert (status, error) == (CHEAP[tool][1], "")


def test_every_tool_that_a_page_tells_to_run_is_among_them():
    pages = [ROOT / "README.md"]
    for folder in "basics", "data", "evals", "lab", "records", "run", ".github":
        pages += (ROOT / folder).glob("*.md")
    text = "\n".join(page.read_text(encoding="utf-8") for page in pages)
    tools = set(re.findall(r"\bpython3? ((?!train_gpt)[\w/]+\.py)", text))
    tools |= {VERBS[verb] for verb in re.findall(r"\./run\.sh (\w+)", text) if verb in VERBS}
    known = (*CHEAP, *ELSEWHERE)
    assert len(tools) > 10 and [tool for tool in sorted(tools) if not tool.startswith(known)] == []
