"""dev/colab.ipynb: it is valid, its commands exist; on a CPU it trains, samples and resumes."""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import types
from pathlib import Path

import nbformat
import pytest

import train_gpt
from dev import check_gpu
from dev.launch import split_flags
from tests.tools import ROOT, SMALL, text, write_shard

NOTEBOOK = ROOT / "dev/colab.ipynb"
CELLS = nbformat.read(NOTEBOOK, as_version=4).cells
CODE = [cell.source for cell in CELLS if cell.cell_type == "code"]
COPIED = "run.sh requirements.txt train_gpt.py dev evals".split()
COPIED += "data/check.py data/shards.py data/messages.py".split()


def with_setting(source: str, name: str, value: str) -> str:
    """A cell with another value of a variable, which must be set in it once."""
    changed, count = re.subn(f"^{name} = .*$", f"{name} = {value!r}", source, flags=re.M)
    assert count == 1
    return changed


class Shell:
    """Runs cells as IPython does: lines of Python, of `!` and of `%cd`, with $NAME of Python's
    variables, but stops at a command that fails. A PATH with fakes finds no GPU and no network."""

    def __init__(self, monkeypatch):
        self.monkeypatch = monkeypatch
        self.variables = {"shell": self.shell, "cd": self.cd}
        self.output = ""

    def run(self, source: str) -> None:
        source = re.sub(r"^( *)!(.*)$", lambda m: f"{m[1]}shell({m[2]!r})", source, flags=re.M)
        source = re.sub(r"^( *)%cd (.*)$", lambda m: f"{m[1]}cd({m[2]!r})", source, flags=re.M)
        exec(source, self.variables)

    def expand(self, line: str) -> str:
        """Replaces $NAME where Python has this variable; the rest is the shell's."""
        return re.sub(r"\$(\w+)", lambda m: str(self.variables.get(m[1], m[0])), line)

    def cd(self, folder: str) -> None:
        self.monkeypatch.chdir(self.expand(folder))

    def shell(self, line: str) -> None:
        command = ["bash", "-c", self.expand(line)]
        done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        self.output += done.stdout
        assert done.returncode == 0, f"{line}\n{done.stdout}"


# ---- Without running it --------------------------------------------------------------------------
def test_it_is_valid_and_has_no_output():
    nbformat.validate(nbformat.read(NOTEBOOK, as_version=4))
    assert len(CODE) <= 6
    assert [cell for cell in CELLS if cell.get("outputs") or cell.get("execution_count")] == []


def test_the_address_stands_once():
    assert len(re.findall("https?://", NOTEBOOK.read_text())) == 1
    assert 'URL = "https://' in CODE[0] and "$URL" in CODE[1]


def test_what_it_types_exists():
    values = dict(re.findall('^(FLAGS|RESUME) = "(.*?)"', CODE[0], re.M))
    (after_disconnect,) = re.findall('^RESUME .*after a disconnect: "(.*)"$', CODE[0], re.M)
    options, flags = split_flags(shlex.split(f"{values['FLAGS']} {after_disconnect}"))
    assert options.save_every > 0 and options.resume == "logs" and not values["RESUME"]
    assert train_gpt.parse_config(flags)[0] == "record"
    (other_flags,) = re.findall('^FLAGS .*; "(.*)" is the small model$', CODE[0], re.M)
    options, flags = split_flags(shlex.split(other_flags))
    assert options.save_every > 0 and train_gpt.parse_config(flags)[0] == "tiny"
    usage = re.findall(r"^#   \./run\.sh (.*)$", (ROOT / "run.sh").read_text(), re.M)
    verbs = {word for line in usage for word in re.findall(r"[\w$]+", line)}
    parts = re.findall(r"run\.sh check --only ([\w,]+)", NOTEBOOK.read_text())
    assert check_gpu.parse_arguments(["--only", *parts]).parts == ["machine", "tiny"]
    typed = re.findall(r"^!\./run\.sh (\S+)", "\n".join(CODE), re.M)
    assert typed == ["check", "$FLAGS", "sample"] and {"check", "sample"} <= verbs


def test_where_things_stay_depends_on_the_machine(monkeypatch):
    mounted = []
    colab = types.ModuleType("google.colab")
    colab.drive = types.SimpleNamespace(mount=mounted.append)
    monkeypatch.setitem(sys.modules, "google", types.ModuleType("google"))
    monkeypatch.setitem(sys.modules, "google.colab", colab)
    folders = {
        "/kaggle/working": ("/tmp", "/kaggle/working"),
        "/content": ("/content", "/content/drive"),
    }
    for folder, (place, keep) in folders.items():
        monkeypatch.setattr(os.path, "isdir", lambda path, folder=folder: path == folder)
        variables = {}
        exec(CODE[0], variables)
        assert variables["PLACE"] == place and variables["KEEP"].startswith(f"{keep}/")
    assert mounted == ["/content/drive"]  # on Colab alone


# ---- Running it ----------------------------------------------------------------------------------
def fake_machine(tmp_path, monkeypatch) -> Path:
    """A repository to clone, made of the files here, and an empty home folder. Its `.venv` runs the
    Python of the tests. Fakes on the PATH: no GPU, and nothing to install."""
    repository = tmp_path / "repository"
    for name in COPIED:
        target = repository / name
        target.parent.mkdir(parents=True, exist_ok=True)
        copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
        copy(ROOT / name, target)
    (repository / ".venv/bin").mkdir(parents=True)
    shutil.copy(ROOT / "requirements.txt", repository / ".venv/installed-cpu")
    scripts = {
        repository / ".venv/bin/python": f'exec {shlex.quote(sys.executable)} "$@"',
        tmp_path / "bin/nvidia-smi": "exit 9",
        tmp_path / "bin/pip": "exit 0",
        tmp_path / "bin/uv": "exit 0",
    }
    for path, line in scripts.items():
        path.parent.mkdir(exist_ok=True)
        path.write_text(f"#!/bin/sh\n{line}\n")
        path.chmod(0o755)
    git = "git -c user.name=x -c user.email=x@x.x"
    commit = f"git init -q && git add -Af && {git} commit -qm x"
    subprocess.run(commit, shell=True, cwd=repository, check=True)
    monkeypatch.setenv("PATH", f"{tmp_path}/bin:{os.environ['PATH']}")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("JNANO_PCI", str(tmp_path / "no-devices"))
    (tmp_path / "home").mkdir()
    return repository


@pytest.mark.slow
def test_it_trains_samples_and_resumes_on_a_cpu(tmp_path, monkeypatch):
    repository = fake_machine(tmp_path, monkeypatch)
    (tmp_path / "data").mkdir()
    write_shard(tmp_path / "data/x_val_000000.bin", text(4096))
    write_shard(tmp_path / "data/x_train_000001.bin", text(20_000))
    flags = ["tiny", *SMALL, "--data", str(tmp_path / "data"), "--steps", "3", "--save_every", "2"]
    settings = with_setting(CODE[0], "URL", str(repository))
    settings = with_setting(settings, "FLAGS", shlex.join(flags))

    shell = Shell(monkeypatch)
    for source in (settings, *CODE[1:]):
        shell.run(source.replace("run.sh check", "run.sh check --small --only machine"))
    kept = tmp_path / "home/jnanogpt-kept/logs"
    (log,) = kept.glob("*.txt")
    assert (log.with_suffix("") / "0000002.state").exists() and log.with_suffix(".npz").exists()
    assert "PASS machine" in shell.output and "[1 x " in shell.output  # the check and the sample

    shutil.rmtree(tmp_path / "home/jnanogpt")  # the machine is gone, before the end of the run
    log.write_text(log.read_text().rpartition("RESULT ")[0])
    shell = Shell(monkeypatch)
    settings = with_setting(settings, "RESUME", "--resume logs")
    for source in (settings, CODE[1], CODE[3]):
        shell.run(source)
    result = json.loads(log.read_text().rpartition("RESULT ")[2])
    assert result["resumed"] and result["steps"] == 3
