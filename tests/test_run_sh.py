"""run.sh in a folder of its own, with a Python, uv and nvidia-smi that write down their words."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
TOOLS = "bash cat dirname env flock grep sed sleep uname mkdir cp touch".split()
# `-m venv` and uv make a .venv whose Python is this script again. run/machine.py is executed.
PYTHON = f"""#!{shutil.which("bash")}
case "$*" in
  run/machine.py*) exec {sys.executable} "$@" ;;
  -c*) exit 0 ;;
esac
name=${{0##*/}}
echo "$name $*" >>log
env >environment
case "$*" in
  "-m venv"* | "venv -q -p"*) mkdir -p .venv/bin .venv/lib/$VENV && cp $0 .venv/bin/python ;;
  *pip*) [ ! -e no_network ] && sleep 0.2 ;;
esac
"""
PIP = "python -m pip install --quiet --disable-pip-version-check --no-compile -r"
UV = "uv pip install --quiet --python .venv/bin/python -r"
TRAIN = "python run/launch.py train_gpt.py"
# What is typed, and the Python programs that run then.
TABLE = """
tiny --steps 1              | data/source_code.py; run/launch.py train_gpt.py tiny --steps 1
                            | data/source_code.py; run/launch.py train_gpt.py tiny
--seed 1                    | data/source_code.py; run/launch.py train_gpt.py tiny --seed 1
tiny --help                 | run/launch.py train_gpt.py tiny --help
tiny --data x               | run/launch.py train_gpt.py tiny --data x
small                       | data/cached_fineweb10B.py 1; run/launch.py train_gpt.py small
copy.py tiny                | data/source_code.py; run/launch.py copy.py tiny
sample x                    | evals/sample.py x
verify x                    | records/verify.py x
check --full                | -m lab.check --full
loss                        | pip evals/requirements.txt; evals/loss.py
basics fsdp --x 1           | basics/fsdp.py --x 1
"""


class Folder:
    """A copy of what run.sh reads, and the PATH for it."""

    def __init__(self, root: Path):
        self.root = root
        (root / "bin").mkdir()
        (root / "clones" / root.name).mkdir(parents=True)
        for name in TOOLS:
            (root / "bin" / name).symlink_to(shutil.which(name))
        for name in "run.sh requirements.txt evals/requirements.txt tests/requirements.txt".split():
            (root / name).parent.mkdir(exist_ok=True)
            shutil.copy(ROOT / name, root / name)
        shutil.copytree(ROOT / "run" / "wheels", root / "run" / "wheels")
        shutil.copy(ROOT / "run" / "machine.py", root / "run")
        self.script("python3.12")

    def script(self, name: str, text: str = PYTHON) -> None:
        (self.root / "bin" / name).write_text(text)
        (self.root / "bin" / name).chmod(0o755)

    def start(self, *argv: str, **env: str) -> subprocess.Popen:
        """Types folder/run.sh where CDPATH has another folder of this name."""
        env = {"PATH": str(self.root / "bin"), "VENV": "python3.12"} | env
        env["CDPATH"] = str(self.root / "clones")
        pipes = dict(stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        command = [f"{self.root.name}/run.sh", *argv]
        return subprocess.Popen(command, cwd=self.root.parent, env=env, **pipes)

    def run(self, words: str = "", status: int = 0, **env: str) -> list[str]:
        """The lines that the fakes have written."""
        (self.root / "log").write_text("")
        (self.root / "environment").touch()
        process = self.start(*words.split(), **env)
        self.output, self.errors = process.communicate()
        assert process.returncode == status, self.errors
        environment = (self.root / "environment").read_text()
        self.environment = dict(re.findall("(?m)^(.+?)=(.*)$", environment))
        return (self.root / "log").read_text().splitlines()


@pytest.fixture
def folder(tmp_path):
    return Folder(tmp_path)


@pytest.mark.parametrize("tool", ["uv", "pip"])
def test_the_first_start_installs_and_the_second_only_runs(folder, tool):
    pip, first = PIP, ["python3.12 -m venv .venv"]
    if tool == "uv":
        folder.script("uv")
        pip, first = UV, ["uv venv -q -p >=3.12,<3.15"]
    (folder.root / "no_network").touch()
    assert folder.run("tiny", status=1) == [*first, f"{pip} run/wheels/cpu.txt"]
    (folder.root / "no_network").unlink()
    train = ["python data/source_code.py", f"{TRAIN} tiny"]
    assert folder.run("tiny") == [f"{pip} run/wheels/cpu.txt", *train]
    assert folder.run("tiny") == train  # source_code.py also checks what is there
    (folder.root / "requirements.txt").write_text("more==1\n")
    assert folder.run("tiny") == [f"{pip} run/wheels/cpu.txt", *train]


def test_of_several_starts_one_installs(folder):
    processes = [folder.start("sample") for _ in range(4)]
    assert [process.wait() for process in processes] == [0] * 4
    lines = (folder.root / "log").read_text().splitlines()
    installs = [line for line in lines if "sample" not in line]
    assert installs == ["python3.12 -m venv .venv", f"{PIP} run/wheels/cpu.txt"]


def test_every_word_runs_its_program(folder):
    folder.run("sample")
    for line in TABLE.strip().splitlines():
        words, _, programs = line.partition("|")
        expected = [f"python {program}" for program in programs.strip().split("; ")]
        expected = [text.replace("python pip", PIP) for text in expected]
        assert folder.run(words) == expected, words


@pytest.mark.parametrize("version", ["python3.11", "python3.12"])
def test_the_environment_of_a_run(folder, version):
    """jax 0.10.2, for Python 3.11, computes wrong sums on CPUs in silence; JAX goes on with the CPU
    in silence where it cannot use a GPU."""
    folder.run("tiny", VENV=version)
    found = folder.environment
    wrong = "--xla_cpu_experimental_ynn_fusion_type="
    assert found.get("XLA_FLAGS") == (wrong if version == "python3.11" else None)
    assert found["GLIBC_TUNABLES"] == "glibc.malloc.hugetlb=1" and "JAX_PLATFORMS" not in found
    row = "0, GPU-0, NVIDIA GeForce RTX 4090, 8.9, 580.65.06, 24564"
    folder.script("nvidia-smi", f"#!{shutil.which('bash')}\necho {row}\n")
    if version == "python3.11":
        assert folder.run(status=2) == [] and "need Python 3.12" in folder.errors
        return
    wheels, fetch = f"{PIP} run/wheels/cuda13.txt", "python data/cached_fineweb10B.py"
    assert folder.run(PYTHONPATH="/other") == [wheels, fetch, f"{TRAIN} record"]
    found = folder.environment
    assert (found["JAX_PLATFORMS"], found["XLA_CLIENT_MEM_FRACTION"]) == ("cuda,cpu", "0.92")
    assert not found.keys() & {"PYTHONPATH", "GLIBC_TUNABLES"}
    folder.run(JAX_PLATFORMS="cuda", XLA_CLIENT_MEM_FRACTION="0.5")
    found = folder.environment
    assert (found["JAX_PLATFORMS"], found["XLA_CLIENT_MEM_FRACTION"]) == ("cuda", "0.5")
    assert folder.run(JAX_PLATFORMS="cpu")[-1] == f"{TRAIN} tiny"
