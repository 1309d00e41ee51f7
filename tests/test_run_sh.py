"""run.sh among fake Pythons and a fake nvidia-smi: what it picks and what it runs."""

import os
import pathlib
import shutil
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).resolve().parent.parent
BASH = shutil.which("bash")

# A Python of any version: answers `-c` truly but for its version, makes a .venv of itself, and
# only notes what else it is asked to run.
FAKE_PYTHON = """#!{real} -S
import os, shutil, sys
argv = sys.argv[1:]
if argv[0] == "-c":
    sys.version_info = {version}
    for missing in {missing}:
        sys.modules[missing] = None
    exec(argv[1])
    sys.exit()
with open({log!r}, "a") as log:
    print("{name}", *argv, file=log)
if argv[:2] == ["-m", "venv"]:
    own_text = open(__file__).read()
    shutil.rmtree(".venv", ignore_errors=True)
    os.makedirs(".venv/bin")
    for name in ("python", "pip"):
        open(".venv/bin/" + name, "w").write(own_text)
        os.chmod(".venv/bin/" + name, 0o755)
elif argv[:2] == ["-m", "pip"] and os.path.exists("no_network"):
    sys.exit("no network")
"""


class Machine:
    """A folder with run.sh and a PATH on which there is nothing but the fakes."""

    def __init__(self, tmp_path):
        self.root, self.bin, self.log = tmp_path / "repo", tmp_path / "bin", tmp_path / "log"
        self.bin.mkdir()
        (self.root / "tests").mkdir(parents=True)
        shutil.copy(ROOT / "run.sh", self.root)
        for name in ("requirements.txt", "tests/requirements.txt"):
            shutil.copy(ROOT / name, self.root / name)
        for tool in ("cat", "cp", "dirname"):
            (self.bin / tool).symlink_to(shutil.which(tool))

    def script(self, name, text):
        path = self.bin / name
        path.write_text(text)
        path.chmod(0o755)
        return path

    def python(self, minor, name=None, missing=()):
        name = name or f"python3.{minor}"
        parts = dict(real=sys.executable, log=str(self.log), name=name)
        parts |= dict(version=(3, minor, 0), missing=tuple(missing))
        return self.script(name, FAKE_PYTHON.format(**parts))

    def driver(self, version):
        """A line per GPU."""
        self.script("nvidia-smi", f"#!{BASH}\necho {version}\necho {version}\n")

    def run(self, *argv, **env):
        """Its output, and what the fakes were asked to do since the last call."""
        self.log.write_text("")
        env = {"PATH": str(self.bin), **env}
        command = [BASH, self.root / "run.sh", *argv]
        self.done = subprocess.run(
            command, env=env, cwd="/", capture_output=True, text=True, timeout=60
        )
        return self.log.read_text().splitlines()

    def refusal(self, *argv, **env):
        asked = self.run(*argv, **env)
        assert self.done.returncode == 1 and self.done.stderr.count("\n") == 1
        assert asked == [] and not (self.root / ".venv").exists()
        return self.done.stderr


PIP = "-m pip install --quiet --disable-pip-version-check -r"


@pytest.fixture
def machine(tmp_path):
    return Machine(tmp_path)


def test_first_run_without_gpu_installs_and_runs_tiny(machine):
    machine.python(12)
    assert machine.run() == [
        "python3.12 -m venv --clear .venv",
        f"python3.12 {PIP} requirements.txt",
        "python3.12 data/source_code.py",
        "python3.12 train_gpt.py tiny",
    ]
    assert machine.done.returncode == 0
    assert 'no NVIDIA GPU: running "tiny"' in machine.done.stdout
    assert "Installing" in machine.done.stdout


def test_second_run_installs_nothing(machine):
    machine.python(12)
    machine.run()
    assert machine.run() == ["python3.12 data/source_code.py", "python3.12 train_gpt.py tiny"]
    assert "Installing" not in machine.done.stdout


def test_changed_requirements_are_installed(machine):
    machine.python(12)
    machine.run()
    with open(machine.root / "requirements.txt", "a") as file:
        file.write("more==1\n")
    assert f"python3.12 {PIP} requirements.txt" in machine.run()


def test_failed_install_stops_the_run_and_is_repeated(machine):
    machine.python(12)
    (machine.root / "no_network").touch()
    assert machine.run()[-1] == f"python3.12 {PIP} requirements.txt"
    assert machine.done.returncode == 1
    assert "no network" in machine.done.stderr and "pip could not install" in machine.done.stderr
    (machine.root / "no_network").unlink()
    assert machine.run()[0] == f"python3.12 {PIP} requirements.txt"


def test_newest_python_that_works_is_taken(machine):
    machine.script("python3.14", f"#!{BASH}\necho pyenv: not found >&2\nexit 127\n")
    machine.python(13, missing=["ensurepip"])
    machine.python(12)
    machine.python(11)
    assert machine.run()[0] == "python3.12 -m venv --clear .venv"
    assert machine.done.stderr == ""


def test_plain_python3_is_taken_last(machine):
    machine.python(12, name="python3")
    assert machine.run()[0] == "python3 -m venv --clear .venv"


def test_too_old_or_no_python_is_refused(machine):
    assert "found no Python 3.11 or newer" in machine.refusal()
    machine.python(10, name="python3")
    assert "found no Python 3.11 or newer" in machine.refusal()


def test_variable_python_overrules(machine):
    machine.python(12)
    other = machine.python(11, name="other")
    assert machine.run(PYTHON=str(other))[0] == "other -m venv --clear .venv"


def test_variable_python_that_does_not_work_is_refused(machine):
    machine.python(12)
    old = machine.python(10, name="old")
    assert f"PYTHON={old} does not work" in machine.refusal(PYTHON=str(old))
    assert "PYTHON=absent does not work" in machine.refusal(PYTHON="absent")


def test_venv_keeps_its_python_until_another_is_asked_for(machine):
    machine.python(11)
    machine.run()
    newer = machine.python(12)
    assert machine.run()[0] == "python3.11 data/source_code.py"
    assert machine.run(PYTHON=str(newer))[0] == "python3.12 -m venv --clear .venv"


def test_broken_venv_is_made_anew(machine):
    machine.python(12)
    machine.run()
    (machine.root / ".venv" / "bin" / "python").unlink()
    assert machine.run()[0] == "python3.12 -m venv --clear .venv"
    (machine.root / ".venv" / "bin" / "pip").unlink()  # as an interrupted venv leaves it
    assert machine.run()[0] == "python3.12 -m venv --clear .venv"


@pytest.mark.parametrize(
    "version, cuda", [("580.65.06", "cuda13"), ("1000.1", "cuda13"), ("550.54.15", "cuda12")]
)
def test_gpu_gets_the_cuda_of_its_driver_and_the_record(machine, version, cuda):
    machine.driver(version)
    machine.python(12)
    assert machine.run() == [
        "python3.12 -m venv --clear .venv",
        f"python3.12 {PIP} requirements.txt jax[{cuda}]",
        "python3.12 data/cached_fineweb10B.py",
        "python3.12 train_gpt.py record",
    ]
    assert 'an NVIDIA GPU: running "record"' in machine.done.stdout
    assert len(machine.run()) == 2


def test_other_cuda_gets_a_fresh_venv(machine):
    machine.driver("550.54.15")
    machine.python(12)
    machine.run()
    machine.driver("580.65.06")
    assert machine.run()[:2] == [
        "python3.12 -m venv --clear .venv",
        f"python3.12 {PIP} requirements.txt jax[cuda13]",
    ]


def test_gpu_refuses_python_311(machine):
    machine.driver("580.65.06")
    machine.python(11)
    message = machine.refusal()
    assert "Python 3.12" in message and "GPUs need jax >= 0.11.2" in message


@pytest.mark.parametrize("answer", ["exit 9", "echo No devices were found"])
def test_driver_that_does_not_answer_is_no_gpu(machine, answer):
    machine.script("nvidia-smi", f"#!{BASH}\n{answer}\n")
    machine.python(12)
    assert machine.run()[-1] == "python3.12 train_gpt.py tiny"


@pytest.mark.parametrize(
    "argv, expected",
    [
        (["--steps", "3"], ["data/source_code.py", "train_gpt.py tiny --steps 3"]),
        (["tiny", "--seed", "1"], ["data/source_code.py", "train_gpt.py tiny --seed 1"]),
        (["tiny", "--data", "my text"], ["train_gpt.py tiny --data my text"]),
        (["tiny", "--data=mine"], ["train_gpt.py tiny --data=mine"]),
        (["--help"], ["train_gpt.py tiny --help"]),
        (["record"], ["train_gpt.py record"]),  # without GPUs, which train_gpt.py explains
        (["huge", "--x", "1"], ["train_gpt.py huge --x 1"]),
    ],
)
def test_arguments_reach_the_trainer(machine, argv, expected):
    machine.python(12)
    machine.run()
    assert machine.run(*argv) == [f"python3.12 {line}" for line in expected]


def test_failure_of_the_data_script_stops_the_run(machine):
    machine.python(12)
    machine.run()
    python = machine.root / ".venv" / "bin" / "python"
    text = python.read_text() + 'if argv[0].startswith("data/"): sys.exit(1)\n'
    python.write_text(text)
    assert machine.run() == ["python3.12 data/source_code.py"]
    assert machine.done.returncode == 1


def test_test_lints_and_runs_pytest(machine):
    machine.python(12)
    expected = [
        f"python3.12 {PIP} tests/requirements.txt",
        "python3.12 -m ruff check .",
        "python3.12 -m ruff format --check .",
        "python3.12 -m pytest -q -k data",
    ]
    assert machine.run("test", "-k", "data")[2:] == expected
    assert machine.run("test", "-k", "data") == expected[1:]


def test_scripts_are_executable():
    assert os.access(ROOT / "run.sh", os.X_OK) and os.access(ROOT / ".ci" / "run", os.X_OK)
