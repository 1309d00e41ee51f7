"""run/colab.ipynb: it is valid, its commands exist; its cells run on a CPU, with small models."""

import dataclasses
import json
import math
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
from run import fits, machine, plan
from run.launch import split_flags
from tests.tools import ROOT, SMALL, text, write_shard

NOTEBOOK = ROOT / "run/colab.ipynb"
CELLS = nbformat.read(NOTEBOOK, as_version=4).cells
CODE = [cell.source for cell in CELLS if cell.cell_type == "code"]
TITLES = re.findall("^## (.*)$", "\n".join(cell.source for cell in CELLS), re.M)
BY_TITLE = dict(zip(TITLES, CODE, strict=True))
SETTINGS = BY_TITLE["Settings"]
CLONE = BY_TITLE["Clone"]
COPIED = "run.sh requirements.txt train_gpt.py run data evals records/optimizers".split()
COPIED += [f"records/{name}.py" for name in "plot runs stats verify".split()]
COPIED += [f"data/{name}.py" for name in "check shards messages readers tokenize_text".split()]
SMALL_RUN = [*SMALL, "--steps", "3", "--val_every", "3"]


def with_setting(source: str, name: str, value: str | bool) -> str:
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
    assert [cell for cell in CELLS if cell.get("outputs") or cell.get("execution_count")] == []


def test_the_address_stands_once():
    assert len(re.findall("https?://", NOTEBOOK.read_text())) == 1
    assert 'URL = "https://' in SETTINGS and "$URL" in CLONE


def test_by_default_it_trains_samples_and_looks():
    """Every other cell begins with a setting that turns it off."""
    off = {cell: source for cell, source in BY_TITLE.items() if re.search("^if ", source, re.M)}
    assert [*off] == ["Settings", "Clone", "Look", "Your own text", "Check", "The record", "Share"]
    shell = Shell(None)
    commands = []
    shell.variables["shell"] = commands.append
    for title in "Your own text", "Check", "The record", "Share":
        shell.run("from pathlib import Path\n" + BY_TITLE[title])
    assert commands == []
    assert BY_TITLE["Train"] == "!./run.sh tiny" and "LOOK = True" in BY_TITLE["Look"]


@pytest.mark.parametrize("text", ["print('$HOME')", 'a "word" `date`'])
def test_any_prompt_reaches_the_sample_as_it_is(text, tmp_path, monkeypatch):
    (tmp_path / "run.sh").write_text('#!/bin/sh\nprintf "%s|" "$@"\n')
    (tmp_path / "run.sh").chmod(0o755)
    monkeypatch.chdir(tmp_path)
    shell = Shell(monkeypatch)
    shell.run("import shlex\n" + with_setting(BY_TITLE["Sample"], "PROMPT", text))
    assert shell.output == f"sample|{text}|"


def test_what_it_types_exists():
    source = BY_TITLE["The record"]
    values = dict(re.findall('^(FLAGS|RESUME) = "(.*?)"', source, re.M))
    (after_disconnect,) = re.findall('^RESUME .*after a disconnect: "(.*)"$', source, re.M)
    options, flags = split_flags(shlex.split(f"{values['FLAGS']} {after_disconnect}"))
    assert options.save_every > 0 and options.resume == "logs" and not values["RESUME"]
    assert train_gpt.parse_config(["record", *flags])[0] == "record"
    typed = re.findall(r"\./run\.sh (\w+)", "\n".join(CODE))
    assert {"tiny", "sample", "look", "tokenize", "check", "record", "share"} == {*typed}
    assert {*typed} <= {*machine.VERBS, *train_gpt.PRESETS}


def test_its_gigabytes_are_those_of_the_weights():
    """What the last row of FITS changes is the n-gram table."""
    record = train_gpt.PRESETS["record"]
    smaller = dataclasses.replace(record, **fits.FITS[-1][0])
    sizes = []
    for c in record, smaller:
        numbers = sum(math.prod(p.model_shape) for p in train_gpt.param_table(c).values())
        sizes.append(f"{4 * numbers / 1e9:.1f}")
    assert f"Weights take {sizes[0]} and {sizes[1]} GB" in NOTEBOOK.read_text()
    assert plan.NEEDS["record"].weights == float(sizes[0])
    assert f"takes {plan.NEEDS['record'].checkpoint} GB for the record" in NOTEBOOK.read_text()


@pytest.fixture
def nowhere(tmp_path, monkeypatch):
    """A current folder that is in no clone."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("JAX_PLATFORMS", "")
    return tmp_path


def test_without_an_address_it_stops_at_once(nowhere, monkeypatch):
    with pytest.raises(SystemExit, match="^Put this repository's address into the line with URL"):
        exec(SETTINGS, {})
    monkeypatch.chdir(NOTEBOOK.parent)  # but a clone that it lies in needs none
    variables = {}
    exec(SETTINGS, variables)
    assert variables["CLONE"] == ROOT and os.environ["JAX_PLATFORMS"] == "cpu"


def test_where_things_stay_depends_on_the_machine(nowhere, monkeypatch):
    mounted = []
    colab = types.ModuleType("google.colab")
    colab.drive = types.SimpleNamespace(mount=mounted.append)
    monkeypatch.setitem(sys.modules, "google", types.ModuleType("google"))
    monkeypatch.setitem(sys.modules, "google.colab", colab)
    settings = with_setting(SETTINGS, "URL", "an address")
    with_drive = with_setting(settings, "DRIVE", True)
    kept = "/content/drive/MyDrive/jnanogpt"
    for folder, source, place, keep in (
        ("/kaggle/working", settings, "/tmp", "/kaggle/working/jnanogpt"),
        ("/kaggle/working", with_drive, "/tmp", "/kaggle/working/jnanogpt"),
        ("/content", settings, "/content", ""),
        ("/content", with_drive, "/content", kept),
    ):
        monkeypatch.setattr(os.path, "isdir", lambda path, folder=folder: path == folder)
        variables = {}
        exec(source, variables)
        assert (variables["PLACE"], variables["KEEP"]) == (place, keep)
        assert mounted == (["/content/drive"] if keep == kept else [])


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
    kind = subprocess.check_output([sys.executable, "run/install.py", "kind"], cwd=ROOT, text=True)
    for name, path in {"cpu": "requirements.txt", "evals": "evals/requirements.txt"}.items():
        pins = kind + (ROOT / path).read_text()
        (repository / f".venv/installed-{name}").write_text(pins)
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


def shown_by(monkeypatch) -> list[str]:
    """What cells display, with a module in place of IPython's."""
    shown = []
    display = types.ModuleType("IPython.display")
    display.HTML = str
    display.SVG = lambda filename: Path(filename).name
    display.display = shown.append
    monkeypatch.setitem(sys.modules, "IPython", types.ModuleType("IPython"))
    monkeypatch.setitem(sys.modules, "IPython.display", display)
    return shown


@pytest.mark.slow
def test_its_cells_run_on_a_cpu(tmp_path, monkeypatch):
    repository = fake_machine(tmp_path, monkeypatch)
    (tmp_path / "data").mkdir()
    write_shard(tmp_path / "data/x_val_000000.bin", text(8400))
    write_shard(tmp_path / "data/x_train_000001.bin", text(20_000))
    monkeypatch.setenv("JAX_PLATFORMS", "")
    monkeypatch.setenv("JAX_NUM_CPU_DEVICES", "1")
    monkeypatch.chdir(tmp_path / "home")
    shown = shown_by(monkeypatch)
    small = shlex.join(SMALL_RUN)
    data = f"--data {tmp_path / 'data'}"
    kept = tmp_path / "kept"

    def run(titles: str, **settings: str | bool) -> Shell:
        """Runs cells as on a machine that keeps things elsewhere, with flags for small models."""
        shell = Shell(monkeypatch)
        sources = {}
        for title in ["Settings", "Clone", *titles.split(", ")]:
            sources[title] = BY_TITLE[title].replace("/tmp/", f"{tmp_path}/")
        sources["Settings"] = with_setting(sources["Settings"], "URL", str(repository))
        sources["Settings"] = with_setting(sources["Settings"], "KEEP", str(kept))
        for source in sources.values():
            for name, value in settings.items():
                if re.search(f"^{name} = ", source, re.M):
                    source = with_setting(source, name, value)
            source = source.replace("run.sh tiny", f"run.sh tiny {small} {data}")
            source = source.replace("run.sh record", f"run.sh tiny {small} {data}")
            source = source.replace("/tokens)", f"/tokens) {small}")
            source = source.replace("run.sh check", "run.sh check --small --only machine")
            shell.run(source)
        return shell

    shell = run("Train, Sample, Look")
    (log,) = kept.glob("logs/*.txt")
    assert log.with_suffix(".npz").exists() and "def main(" in shell.output
    assert "loss.svg" in shown and Path(".cache/jax").resolve() == kept / "jax"
    pages = [item for item in shown if item.startswith("<iframe")]
    assert len(pages) == 1 and "&lt;!doctype html&gt;" in pages[0]

    own = "It was a dark and stormy night; the rain fell in torrents. " * 60
    shell = run("Your own text", FILE=str(tmp_path / "own.txt"), BEGINNING="It was")
    assert "own.txt" in shell.output and "RESULT" not in shell.output  # there is no such file
    (tmp_path / "own.txt").write_text(own)
    shell = run("Your own text", FILE=str(tmp_path / "own.txt"), BEGINNING="It was")
    assert "RESULT" in shell.output and "It was" in shell.output

    assert "INFO  nvidia-smi lists no GPU" in run("Check", CHECK=True).output

    for old in kept.glob("logs/*"):
        shutil.rmtree(old) if old.is_dir() else old.unlink()
    run("The record", RECORD=True, FLAGS="--save_every 2")
    shutil.rmtree(tmp_path / "home/jnanogpt")  # the machine is gone, before the end of the run
    monkeypatch.chdir(tmp_path / "home")
    (log,) = kept.glob("logs/*.txt")
    log.write_text(log.read_text().rpartition("RESULT ")[0])
    run("The record", RECORD=True, FLAGS="--save_every 2", RESUME="--resume logs")
    result = json.loads(log.read_text().rpartition("RESULT ")[2])
    assert result["resumed"] and result["steps"] == 3
