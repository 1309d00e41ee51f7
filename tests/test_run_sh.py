"""run.sh, with fake Pythons and fake machines: which Python and wheels it takes, what it runs."""

import os
import re
import shutil
import signal
import subprocess
import time
from pathlib import Path

import pytest
from fake_machine import BASH, KINDS, ROOT, Gpu, Kind, Machine
from machine import VERBS


@pytest.fixture
def machine(tmp_path):
    machine = Machine(tmp_path)
    yield machine
    for process in machine.started:
        process.kill()


VENV, ENSURE = "-m venv --without-pip .venv", "-m ensurepip --default-pip"
PIP = "-m pip install --quiet --no-compile --disable-pip-version-check -r"
OUTSIDE = f"{PIP.replace('-m pip', '-m pip --python .venv/bin/python')} requirements.txt"
EVALS = f"{PIP} evals/requirements.txt"
FIRST = VENV, ENSURE, f"{PIP} requirements.txt"  # of a machine without GPUs
CHECK = "data/check.py --quick --"
TRAIN = "run/launch.py train_gpt.py"
TINY = ["data/source_code.py", f"{CHECK} data/source_code", f"{TRAIN} tiny"]
RECORD = ["data/cached_fineweb10B.py", f"{CHECK} data/fineweb10B", f"{TRAIN} record"]
RECORD92 = "run/launch.py records/upstream92/train_gpt.py record92"
H100 = KINDS["1×H100"]


def calls(*lines, name="python3.12"):
    """The log's lines of a fake Python that was called with these arguments."""
    return [f"{name} {line}" for line in lines]


def test_first_run_without_gpu_installs_and_runs_tiny_and_the_second_only_runs(machine):
    machine.python(12)
    machine.script("nvidia-smi", f"#!{BASH}\necho No devices were found\nexit 9\n")
    everything = calls(*FIRST, *TINY)
    assert machine.run() == everything
    assert (machine.done.returncode, machine.done.stderr) == (0, "")
    reason = "nvidia-smi shows no NVIDIA GPU: No devices were found"
    assert f'No preset given: running "tiny", because {reason}\n' in machine.done.stdout
    assert "Installing" in machine.done.stdout
    assert machine.run() == everything[3:] and "Installing" not in machine.done.stdout


def test_help_prints_the_verbs_and_does_nothing(machine):
    for word in "--help", "-h":
        assert machine.run(word) == [] and machine.done.returncode == 0
        assert machine.files() == {path for path in machine.files() if ".venv" not in path.parts}
        for verb in VERBS:
            assert re.search(rf"\./run\.sh .*\b{verb}\b", machine.done.stdout), verb
        assert machine.done.stdout.startswith("Installs into .venv")
        assert "set -euo" not in machine.done.stdout and "#" not in machine.done.stdout


def test_install_installs(machine):
    machine.python(12)
    assert machine.run("install") == calls(*FIRST) and machine.done.returncode == 0
    last = machine.done.stdout.splitlines()[-1]
    assert last.startswith('next: ./run.sh, which trains "tiny", because this machine has no')
    assert machine.run("install") == [] and machine.locks() == []
    machine.become(H100)
    machine.run("install")
    *_, check, last = machine.done.stdout.splitlines()
    assert check.startswith("next: ./run.sh check") and 'trains "record"' in last


def variables(machine):
    """What the trainer found in its environment."""
    lines = [line.split() for line in machine.done.stdout.splitlines()]
    return {name: value for name, value in (line for line in lines if len(line) == 2)}


def test_without_gpu_memory_comes_in_huge_pages_unless_the_user_says_otherwise(machine):
    machine.python(12)
    machine.run()
    assert variables(machine)["GLIBC_TUNABLES"] == "glibc.malloc.hugetlb=1"
    machine.run(GLIBC_TUNABLES="glibc.malloc.hugetlb=0")
    assert variables(machine)["GLIBC_TUNABLES"] == "glibc.malloc.hugetlb=0"
    machine.become(H100)
    machine.run()
    assert variables(machine)["GLIBC_TUNABLES"] == "None"


@pytest.mark.parametrize("minor, flags", [(11, "FLAG="), (12, "None")])
def test_what_is_wrong_in_the_jax_of_an_old_python_is_off(machine, minor, flags):
    machine.python(minor)
    machine.run()
    flag = "--xla_cpu_experimental_ynn_fusion_type"
    assert variables(machine)["XLA_FLAGS"] == flags.replace("FLAG", flag)


def test_check_installs_and_reads_no_data(machine):
    machine.python(12)
    assert machine.run("check", "--small") == calls(*FIRST, "-m lab.check_gpu --small")
    machine.become(H100)
    assert machine.run("check")[-1] == "python3.12 -m lab.check_gpu"


def test_tools_for_weights_get_their_arguments_and_packages_and_read_no_data(machine):
    machine.python(12)
    sample = "sample", "logs/x y.npz", "a  b"
    assert machine.run(*sample) == calls(*FIRST, "evals/sample.py logs/x y.npz a  b")
    assert machine.run("export", "x", "--out", "y") == calls("evals/export.py x --out y")
    evals = f"{PIP} evals/requirements.txt"
    assert machine.run("look", "x") == calls(evals, "evals/look.py x")
    for tool in "hellaswag", "loss":
        assert machine.run(tool, "x") == calls(f"evals/{tool}.py x")
        machine.root.joinpath(".venv/installed-evals").unlink()
        assert machine.run(tool, "x") == calls(evals, f"evals/{tool}.py x")


def test_basics_get_their_arguments_and_matplotlib_where_they_draw(machine):
    machine.python(12)
    (machine.root / "basics").mkdir()
    for name in "gpt2.py", "fsdp.py":
        (machine.root / "basics" / name).touch()
    (machine.root / "basics/README.md").write_text("## fsdp.py: \n")
    for words in ["basics"], ["basics", "--help"]:
        assert machine.run(*words) == [] and machine.done.stdout.split()[-1] == "fsdp"
    gpt2 = "basics/gpt2.py", "--prompt", "a  b"
    assert machine.run(*gpt2) == calls(*FIRST, "basics/gpt2.py --prompt a  b")
    for words in ["basics", "gpt2"], ["basics/gpt2"], ["./basics/gpt2.py"], ["basics", "gpt2.py"]:
        assert machine.run(*words, "--help") == calls("basics/gpt2.py --help")
    draws = calls(f"{PIP} evals/requirements.txt", "basics/fsdp.py --draw x.svg")
    assert machine.run("basics", "fsdp", "--draw", "x.svg") == draws


def test_a_failed_or_changed_install_is_repeated(machine):
    machine.python(12)
    install = calls(f"{PIP} requirements.txt")
    (machine.root / "no_network").touch()
    assert machine.run()[2:] == install and machine.done.returncode == 1
    assert "no network" in machine.done.stderr and "pip could not install" in machine.done.stderr
    assert machine.locks() == []
    (machine.root / "no_network").unlink()
    assert machine.run()[:1] == install
    (machine.root / "requirements.txt").write_text("more==1\n")
    assert machine.run()[:1] == install


UV = "uv pip install --quiet --python .venv/bin/python --index-strategy unsafe-best-match"


def test_uv_installs_where_it_is_and_pip_where_uv_cannot(machine):
    machine.python(12)
    machine.script("uv", f'#!{BASH}\necho uv "$@" >>{machine.log}\n[ ! -e no_uv ]\n')
    machine.become(H100)
    command = f"{UV} --find-links=a* --find-links=b -r requirements.txt jax[cuda13]"
    command += " -c run/constraints/cuda13.txt"
    env = {"PIP_FIND_LINKS": "a* b", "PIP_CONFIG_FILE": "/dev/null", "UV_TARGET": "/other"}
    (machine.root / "a*").touch()
    assert machine.run("install", **env) == [*calls(VENV), command]
    assert (machine.done.returncode, machine.done.stderr) == (0, "")
    shutil.rmtree(machine.root / ".venv")
    (machine.root / "no_uv").touch()
    assert machine.run("install", **env) == [
        *calls(VENV), command, *calls(ENSURE, pip_line("cuda13"))
    ]  # fmt: skip
    assert machine.done.returncode == 0 and "so pip tries" in machine.done.stderr


HOSTILE = {
    "CDPATH": "/tmp:/", "POSIXLY_CORRECT": "1", "SHELLOPTS": "noglob", "GIT_DIR": "/nowhere",
    "BASH_FUNC_mkdir%%": "() { return 1; }", "BASH_FUNC_cat%%": "() { return 1; }",
    "PYTHONPATH": "/other", "PYTHONHOME": "/other", "PYTHONSAFEPATH": "1", "PYTHONOPTIMIZE": "2",
    "PYTHONINSPECT": "1", "PYTHONWARNINGS": "error", "PYTHONHASHSEED": "none",
    "PIP_TARGET": "/other", "PIP_CONSTRAINT": "/other.txt", "PIP_USER": "1", "PIP_PYTHON": "/other",
}  # fmt: skip


@pytest.mark.parametrize("shell", [("sh",), ("bash", "--posix")])
def test_what_others_have_set_for_shell_python_git_and_pip_is_not_used(machine, shell):
    shell = (shutil.which(shell[0]), *shell[1:])
    (machine.bin / "bash").symlink_to(BASH)
    script = machine.script("functions", "readlink() { return 1; }\n")
    machine.python(12)
    env = {**HOSTILE, "BASH_ENV": str(script), "ENV": str(script)}
    kept = {"PIP_CERT": "/my certificate.pem", "PYTHONIOENCODING": "ascii"}
    assert machine.run("install", shell=shell, **env, **kept) == calls(*FIRST)
    assert (machine.done.returncode, machine.done.stderr) == (0, "")
    lines = Path(f"{machine.log}.pip").read_text().splitlines()
    found = dict(line.split("=", 1) for line in lines if "=" in line)
    assert not found.keys() & {name for name in env if "%" not in name}
    assert kept.items() <= found.items() and found["PIP_CONFIG_FILE"] == "/dev/null"


def test_a_lock_that_is_no_link_is_not_waited_for(machine):
    machine.python(12)
    (machine.root / ".lock").write_text("h 1")
    assert (
        machine.refusal()
        == "run.sh: there is a .lock that run.sh has not made: type  rm -r .lock\n"
    )


def test_run_sh_is_not_for_source_nor_for_links(machine):
    link = machine.root / "linked"
    link.symlink_to(machine.root / "run.sh")
    for command in f"{BASH} {link} tiny", f"source {machine.root}/run.sh tiny":
        line = f"{command}; echo status $?"
        done = subprocess.run([BASH, "-c", line], capture_output=True, text=True)
        assert done.stderr.count("\n") == 1 and done.stderr.startswith("run.sh: ")
        assert done.stdout == "status 1\n"


# ---- Pythons -------------------------------------------------------------------------------------
def test_newest_python_that_works_is_taken(machine):
    machine.script("python3.14", f"#!{BASH}\necho pyenv: not found >&2\nexit 127\n")
    machine.python(13, missing=["ensurepip"])
    machine.python(12)
    machine.python(11)
    assert machine.run()[0] == f"python3.12 {VENV}" and machine.done.stderr == ""


def test_a_python_that_lacks_a_part_is_passed_over_or_named(machine):
    machine.python(13, missing=["_ctypes", "zlib"])
    machine.python(12, missing=["_ssl"])
    machine.python(10, name="python3")
    reasons = "(python3.13 lacks ctypes, zlib, python3.12 lacks ssl, python3 is 3.10)"
    assert f"ensurepip or pip 22.3 {reasons}. Install one" in machine.refusal()
    assert "22.3: python3.12 lacks ssl\n" in machine.refusal(PYTHON="python3.12")
    machine.python(11)
    assert machine.run("install") == calls(*FIRST, name="python3.11")


def test_too_old_or_no_python_is_refused_and_plain_python3_taken_last(machine):
    assert "found no Python: install 3.12 or newer (CPUs: 3.11)\n" in machine.refusal()
    machine.python(10, name="python3")
    assert "found no Python 3.11 or newer" in machine.refusal()
    machine.python(12, name="python3")
    assert machine.run()[0] == f"python3 {VENV}"


def test_variable_python_overrules(machine):
    machine.python(12)
    old = machine.python(10, name="old")
    other = machine.python(11)
    assert f"PYTHON={old} does not work" in machine.refusal(PYTHON=str(old))
    assert "PYTHON=absent does not work" in machine.refusal(PYTHON="absent")
    assert machine.run(PYTHON=str(other))[0] == f"python3.11 {VENV}"
    assert machine.run() == calls(*TINY, name="python3.11")  # .venv has it
    assert machine.run(PYTHON="python3.12")[0] == f"python3.12 {VENV}"


# ---- .venv ---------------------------------------------------------------------------------------
def test_broken_venv_is_made_anew_and_its_pip_too(machine):
    machine.python(12)
    machine.run()
    (machine.root / ".venv" / "bin" / "python").unlink()
    assert machine.run()[0] == f"python3.12 {VENV}"
    (machine.root / ".venv" / "bin" / "pip").unlink()  # as an interrupted venv leaves it
    (machine.root / ".venv" / "installed-cpu").unlink()
    assert machine.run()[:2] == calls(*FIRST[1:])


def damage(machine):
    """Deletes a file of a package."""
    record = machine.root / ".venv/lib/python3.12/site-packages/x-1.dist-info/RECORD"
    record.parent.mkdir(parents=True, exist_ok=True)
    record.write_text("x.so,sha256=0,9\n")


def upgrade(machine):
    """Replaces the Python of .venv by a newer one, as the package manager of a system does."""
    machine.python(13).rename(machine.root / ".venv/bin/python")


@pytest.mark.parametrize("fault, why", [
    (damage, "has a damaged package (x.so: No such file or directory)"),
    (upgrade, "was installed for Python 3.12"),
])  # fmt: skip
def test_a_venv_that_is_damaged_or_of_another_python_is_made_anew(machine, fault, why):
    machine.python(12)
    machine.run("install")
    fault(machine)
    assert machine.run("install") == calls(*FIRST) and machine.done.returncode == 0
    assert f"Made .venv anew: the old one {why}" in machine.done.stdout
    (machine.root / ".venv/made-by-run.sh").unlink()
    fault(machine)
    assert machine.run("install") == [] and machine.done.returncode == 1
    assert f"run.sh: .venv, which run.sh has not made, {why}" in machine.done.stderr
    assert machine.done.stderr.endswith(": type  mv .venv .venv-old\n")


def test_packages_that_cannot_be_imported_are_installed_into_a_new_venv_once(machine):
    machine.python(12)
    machine.run("install")
    stamp = machine.root / ".venv/installed-cpu"
    stamp.unlink()
    reason = machine.root / "no_import"
    reason.write_text("cannot import numpy: ImportError: no libstdc++")
    pip = calls(FIRST[2])
    for expected in [*pip, *calls(*FIRST)], pip:  # the second start knows
        assert machine.run("install") == expected and machine.done.returncode == 1
        line = f"run.sh: requirements.txt is installed, but .venv {reason.read_text()}\n"
        assert machine.done.stderr == line and not stamp.exists()
    reason.unlink()
    assert machine.run("install") == pip and stamp.read_text().startswith("Python 3.12 on ")
    reason.touch()  # as where importing ends Python without a word
    stamp.unlink()
    machine.run("install")
    assert "but .venv ends when it imports jax: try  .venv/bin/python" in machine.done.stderr


def test_a_venv_of_others_is_used(machine):
    precious = machine.foreign_venv(12)
    expected = calls(*FIRST[1:], *TINY, name="foreign")
    assert machine.run() == expected and precious.exists()
    assert machine.run() == expected[2:]


@pytest.mark.parametrize("minor, missing, env, command", [
    (10, [], {}, "mv .venv .venv-old"),
    (11, [], {"PYTHON": "python3.12"}, "mv .venv .venv-old"),
    (11, ["ensurepip"], {}, "uv pip install --python .venv/bin/python pip"),
])  # fmt: skip
def test_a_venv_of_others_that_cannot_be_used_is_left_alone(machine, minor, missing, env, command):
    precious = machine.foreign_venv(minor, missing)
    machine.python(12)
    assert machine.run(**env) == [f"foreign {ENSURE}"] * len(missing) and precious.exists()
    assert machine.done.returncode == 1 and machine.done.stderr.count("\n") == 1
    assert command in machine.done.stderr


@pytest.mark.parametrize("missing, pip, taken", [
    (["ensurepip"], "22.3", True), (["ensurepip"], "22.2.9", False), (["ensurepip"], "", False),
    (["venv"], "25.0", False),
])  # fmt: skip
def test_without_ensurepip_as_on_colab_a_newer_pip_installs_from_outside(
    machine, missing, pip, taken
):
    machine.python(12, missing=missing, pip=pip)
    if not taken:
        message = machine.refusal()
        assert "no Python 3.11 or newer with venv, and with ensurepip or pip 22.3" in message
        return
    lines = VENV, OUTSIDE, *TINY
    assert machine.run() == calls(*lines)
    assert machine.run() == calls(*TINY)
    (machine.root / "requirements.txt").write_text("more==1\n")
    assert machine.run() == calls(*lines[1:])
    shutil.rmtree(machine.root / ".venv")
    machine.python(11)
    assert machine.run("install") == calls(*FIRST, name="python3.11")  # which has ensurepip


@pytest.mark.parametrize("pip, lines", [("22.3", (VENV, OUTSIDE)), ("22.2.9", FIRST), ("", FIRST)])
def test_a_pip_from_outside_saves_ensurepip(machine, pip, lines):
    machine.python(12, pip=pip)
    machine.python(11, pip="25.0")  # which may not know Python 3.12
    assert machine.run("install") == calls(*lines)


# ---- Machines ------------------------------------------------------------------------------------
def pip_line(wheels):
    """The install of a kind of wheels."""
    if wheels == "cpu":
        return f"{PIP} requirements.txt"
    extra = wheels.partition("-")[0]
    return f"{PIP} requirements.txt jax[{extra}] -c run/constraints/{wheels}.txt"


@pytest.mark.parametrize("title, wheels, preset, platforms, fraction, why", [
    ("8×H100", "cuda13", "record", "cuda,cpu", "None", "machine has 8 x NVIDIA H100 80GB HBM3"),
    ("1×H100", "cuda13", "record", "cuda,cpu", "None", "machine has 1 x NVIDIA H100 80GB HBM3"),
    ("A100, 40 GB", "cuda12", "record", "cuda,cpu", "0.92", "1 x NVIDIA A100-SXM4-40GB"),
    ("RTX 4090", "cuda13", "record", "cuda,cpu", "0.92", "1 x NVIDIA GeForce RTX 4090"),
    ("16 GB: RTX 4080", "cuda13", "record", "cuda,cpu", "0.92", "1 x NVIDIA GeForce RTX 4080"),
    ("T4, on Colab", "cuda12", "tiny", "cuda,cpu", "0.92",
     "Tesla T4 has compute capability 7.5, and the record needs 8.0"),
    ("P100, on Kaggle", "cuda12-volta", "tiny", "cuda,cpu", "0.92",
     "Tesla P100-PCIE-16GB has compute capability 6.0, and the record needs 8.0"),
    ("TPU v5e-8, on Kaggle", "tpu", "record", "tpu,cpu", "None", "this machine has 8 x TPU v5e"),
    ("TPU v5e-1, on Colab", "tpu", "record", "tpu,cpu", "None", "this machine has 1 x TPU v5e"),
    ("TPU v6e-1, on Colab", "tpu", "record", "tpu,cpu", "None", "this machine has 1 x TPU v6e"),
    ("a Mac", "cpu", "tiny", "None", "None", "jax has no wheels for the GPU of a Mac"),
    ("a laptop", "cpu", "tiny", "None", "None", "this machine has no NVIDIA GPU and no TPU"),
])  # fmt: skip
def test_every_kind_of_machine_gets_its_wheels_preset_and_environment(
    machine, title, wheels, preset, platforms, fraction, why
):
    machine.python(12)
    machine.become(KINDS[title])
    training = RECORD if preset == "record" else TINY
    assert machine.run() == calls(VENV, ENSURE, pip_line(wheels), *training)
    assert (machine.done.returncode, machine.done.stderr) == (0, "")
    (line,) = [line for line in machine.done.stdout.splitlines() if "No preset" in line]
    assert line.startswith(f'No preset given: running "{preset}", because ') and why in line
    found = variables(machine)
    assert (found["JAX_PLATFORMS"], found["XLA_CLIENT_MEM_FRACTION"]) == (platforms, fraction)


def test_all_kinds_of_machines_are_tested():
    (mark,) = [
        mark
        for mark in test_every_kind_of_machine_gets_its_wheels_preset_and_environment.pytestmark
        if mark.name == "parametrize"
    ]
    assert [row[0] for row in mark.args[1]] == [*KINDS]


def test_other_wheels_get_a_fresh_venv_and_those_of_the_cpu_go_with_all(machine):
    machine.python(12)
    for title in "A100, 40 GB", "P100, on Kaggle", "TPU v5e-1, on Colab", "1×H100":
        machine.become(KINDS[title])
        assert machine.run("install")[0] == f"python3.12 {VENV}"
    machine.become(KINDS["a laptop"])
    assert machine.run("install") == calls(pip_line("cpu"))
    machine.become(H100)
    assert machine.run("install") == []


def test_jax_platforms_cpu_keeps_the_wheels_of_the_gpu_that_are_installed(machine):
    machine.python(12)
    machine.become(H100)
    machine.run("install")
    assert machine.run(JAX_PLATFORMS="cpu") == calls(pip_line("cpu"), *TINY)
    assert 'running "tiny", because JAX_PLATFORMS=cpu is set\n' in machine.done.stdout
    assert variables(machine)["JAX_PLATFORMS"] == "cpu"
    assert machine.run() == calls(*RECORD)


def test_changed_constraints_are_installed(machine):
    machine.python(12)
    machine.become(H100)
    machine.run("install")
    pins = machine.root / "run/constraints/cuda13.txt"
    pins.write_text(pins.read_text().replace("9.28", "9.29"))
    assert machine.run("install") == calls(pip_line("cuda13"))
    assert machine.run("install") == []


@pytest.mark.parametrize("driver, wheels", [("580", "cuda13"), ("535", "cuda12")])
def test_the_image_is_built_with_the_wheels_of_its_driver(machine, driver, wheels):
    """The line of run/Dockerfile that installs, with what is copied before it."""
    machine.python(12, name="python3")
    shutil.rmtree(machine.root / "tests")
    for tool in "chmod", "env", "bash":
        (machine.bin / tool).symlink_to(shutil.which(tool))
    text = (ROOT / "run/Dockerfile").read_text().replace("/usr/local/bin", str(machine.bin))
    copied = " ".join(re.findall("^COPY .*", text, re.M)).split()
    for path in machine.root.glob("run/*.py"):
        if f"run/{path.name}" not in copied:
            path.unlink()
    (command,) = re.findall("^RUN (printf .*?)\n\n", text, re.M | re.S)
    env = {"PATH": str(machine.bin), "DRIVER": driver}
    subprocess.run([BASH, "-c", command], env=env, cwd=machine.root, check=True)
    expected = calls(VENV, ENSURE, pip_line(wheels), name="python3")
    assert machine.log.read_text().splitlines() == expected
    assert {path.name for path in machine.root.iterdir() if path.is_file()} == {
        "run.sh", "requirements.txt"
    }  # fmt: skip
    assert not (machine.bin / "nvidia-smi").exists()


def test_what_cannot_train_here_is_refused_before_anything_is_installed(machine):
    machine.python(12)
    machine.become(Kind((Gpu("NVIDIA GeForce RTX 3080", "8.6", "10240"),)))
    reason = "JAX has 9.7 GB of NVIDIA GeForce RTX 3080, and the record needs 14.5"
    assert f"run.sh: the record does not run here: {reason}; type " in machine.refusal(
        "record", status=2
    )
    assert machine.run()[3:] == calls(*TINY)
    assert f'running "tiny", because {reason}\n' in machine.done.stdout
    fit = [*RECORD[:2], f"{TRAIN} record --batch 128"]
    assert machine.run("record", "--batch", "128") == calls(*fit)
    machine.become(Kind(3 * (Gpu(),)))
    assert machine.run() == [] and machine.done.returncode == 2
    assert machine.done.stderr.endswith("type  export CUDA_VISIBLE_DEVICES=0,1\n")
    assert machine.run("plan") == [] and "\nrefused    3 GPUs do not" in machine.done.stdout
    assert machine.run(CUDA_VISIBLE_DEVICES="0,1") == calls(*RECORD)
    assert machine.run("record92", CUDA_VISIBLE_DEVICES="0,1") == calls(*RECORD[:2], RECORD92)
    (machine.root / "my.py").touch()  # a copy of the frozen file
    copy = calls(*RECORD[:2], "run/launch.py my.py record92")
    assert machine.run("my.py", "record92", CUDA_VISIBLE_DEVICES="0,1") == copy
    machine.become(KINDS["T4, on Colab"])
    assert machine.run("record")[3:] == calls(*RECORD)  # slow, but as asked for


def test_unfit_pythons_and_systems_are_refused(machine):
    machine.python(11)
    machine.become(H100)
    message = machine.refusal()
    assert "no Python 3.12 or newer with" in message and "GPUs and TPUs need jax" in message
    machine.become(KINDS["TPU v5e-1, on Colab"])
    assert "no Python 3.12 or newer with" in machine.refusal()
    for name, hint in ("MINGW64_NT-10.0", "WSL2"), ("MSYS_NT-10.0", "WSL2"), ("Darwin", "Intel"):
        machine.system(name, "x86_64")
        assert hint in machine.refusal("test")


def test_with_a_driver_that_is_too_old_for_jax_tiny_runs_on_the_cpu(machine):
    machine.python(11)
    machine.become(Kind((Gpu(),), driver="470.57"))
    assert machine.run() == calls(*FIRST, *TINY, name="python3.11")
    assert "because the NVIDIA driver 470 is too old: jax needs 525\n" in machine.done.stdout
    assert machine.run("plan") == [] and "jax for CPUs" in machine.done.stdout


def test_plan_and_version_need_no_more_than_any_python(machine):
    machine.python(8, name="python3")
    assert machine.run("plan") == [] and machine.done.stdout.startswith("machine    no GPU or TPU")
    assert machine.run("plan", "small", "--price", "1") == []
    assert (
        "preset     small, which you named; ./run.sh alone would train tiny" in machine.done.stdout
    )
    assert "no preset 'smal': did you mean small?" in machine.refusal("plan", "smal", status=2)
    for verb in "clean", "watch":
        assert machine.run(verb, "x  y") == calls(f"run/{verb}.py x  y", name="python3")
    assert machine.run("--version") == [] and not (machine.root / ".venv").exists()
    assert machine.done.stdout.startswith("jNanoGPT no git checkout, ")


# ---- Tokens and arguments ------------------------------------------------------------------------
@pytest.mark.parametrize("argv, expected", [
    (["tiny", "--seed", "1"], [*TINY[:2], f"{TRAIN} tiny --seed 1"]),
    (["my_idea.py", "tiny", "--seed", "1"], [*TINY[:2], "run/launch.py my_idea.py tiny --seed 1"]),
    (["sub dir/my.py", "--seed=1"], [*TINY[:2], "run/launch.py sub dir/my.py tiny --seed=1"]),
    (["tiny", "--data", "my text"], [f"{CHECK} my text", f"{TRAIN} tiny --data my text"]),
    (["--data", "a", "--data=b"], [f"{CHECK} b", f"{TRAIN} tiny --data a --data=b"]),
    (["tiny", "--help"], [f"{TRAIN} tiny --help"]),
    (["my_idea.py", "-h"], ["run/launch.py my_idea.py tiny -h"]),
    (["record92", "--help"], [f"{RECORD92} --help"]),
    (["my.py", "tiny", "--data", "x"], [f"{CHECK} x", "run/launch.py my.py tiny --data x"]),
    (["tokenize", "a b", "--out", "c"], ["data/tokenize_text.py a b --out c"]),
    (["share", "x.npz", "me/x"], ["evals/share.py x.npz me/x"]),
    (["compare", "a", "b=--lr 1", "-n", "2"], ["records/run_ab.py a b=--lr 1 -n 2"]),
    (["verify", "logs"], ["records/verify.py logs"]),
    (["pack", "x", "--name", "y"], [EVALS, "records/pack.py x --name y"]),
    (["plot", "x"], [EVALS, "records/plot.py x"]),
])  # fmt: skip
def test_tokens_are_checked_and_arguments_reach_the_trainer(machine, argv, expected):
    machine.python(12)
    for script in "my_idea.py", "my.py", "sub dir/my.py":
        (machine.root / script).parent.mkdir(exist_ok=True)
        (machine.root / script).touch()
    assert machine.run(*argv)[3:] == calls(*expected)


def test_data_without_a_folder_would_train_on_another_text(machine):
    machine.python(12)
    for argv in ["--data="], ["--data", ""], ["--data"]:
        assert "--data has no folder behind it" in machine.refusal("tiny", *argv, status=2)


def test_small_reads_one_shard_and_is_refused_on_a_cpu_that_was_not_asked_for(machine):
    machine.python(12)
    assert "more than a day on a CPU" in machine.refusal("small", status=2)
    shards = ["data/cached_fineweb10B.py 1", f"{CHECK} data/fineweb10B"]
    found = machine.run("small", JAX_PLATFORMS="cpu")[3:]
    assert found == calls(*shards, f"{TRAIN} small")


def test_medium_reads_24_shards_and_is_refused_without_a_gpu(machine):
    machine.python(12)
    assert "medium does not run here: this machine has no NVIDIA GPU" in machine.refusal(
        "medium", status=2
    )
    machine.become(H100)
    shards = ["data/cached_fineweb10B.py 24", f"{CHECK} data/fineweb10B"]
    assert machine.run("medium")[3:] == calls(*shards, f"{TRAIN} medium")


@pytest.mark.parametrize("name, count", [("data/source_code.py", 1), ("data/check.py", 2)])
def test_failure_of_a_data_script_stops_the_run(machine, name, count):
    python = machine.python(12)
    python.write_text(python.read_text() + f"if argv[0] == {name!r}: sys.exit(1)\n")
    assert machine.run()[3:] == calls(*TINY[:count]) and machine.done.returncode == 1


def test_test_lints_and_runs_pytest_and_scripts_are_executable(machine):
    machine.python(12)
    evals, tests = calls(f"{PIP} evals/requirements.txt", f"{PIP} tests/requirements.txt")
    lint = "-m ruff check --force-exclude", "-m ruff format --check --force-exclude"
    checks = calls(*(f"{command} ." for command in lint))
    *before, suite = machine.run("test", "-k", "data")[3:]
    assert before == [evals, tests, *checks]
    assert " -m pytest " in suite and suite.endswith(" -k data")
    assert machine.run("test", "-k", "data") == [*checks, suite]  # installed already
    for name, install in ("evals", evals), ("tests", tests):
        (machine.root / name / "requirements.txt").write_text("more==1\n")
        assert machine.run("test", "-k", "data") == [install, *checks, suite]
    (machine.bin / "git").symlink_to(shutil.which("git"))
    for name in "b a.py", "gone.py":
        (machine.root / name).touch()
    for command in ["init", "-q"], ["add", "b a.py", "gone.py"]:
        subprocess.run(["git", *command], cwd=machine.root, check=True)
    (machine.root / "gone.py").unlink()
    (machine.root / "my_idea.py").touch()  # a scratch copy, of which git knows nothing
    assert machine.run("test") == calls(*(f"{command} b a.py" for command in lint), suite[11:-8])
    assert os.access(ROOT / "run.sh", os.X_OK) and os.access(ROOT / ".ci" / "run", os.X_OK)


# ---- Many at once --------------------------------------------------------------------------------
BUSY = """
import time
if argv[0] in ("-m", "data/source_code.py"):
    os.mkdir("busy")  # fails if another process is here
    time.sleep(0.3)
    os.rmdir("busy")
"""
HANGS = """
import time
if "pip" in argv:
    print("pip", flush=True)
    while not os.path.exists("go"):
        time.sleep(0.05)
"""
DEAD = 999999999  # no process has this number


@pytest.mark.parametrize("left", [[], [f"Linux {DEAD}"]])
def test_of_many_at_once_one_installs_and_the_others_wait(machine, left):
    """Also if a dead process left its lock: a slow readlink lets all of them read the old lock
    before the first one removes it."""
    python = machine.python(12)
    python.write_text(python.read_text() + BUSY)
    for owner in left:
        (machine.root / ".lock").symlink_to(owner)
        readlink = shutil.which("readlink")
        sleep = shutil.which("sleep")
        (machine.bin / "readlink").unlink()
        machine.script("readlink", f'#!{BASH}\n{readlink} "$@"\n{sleep} 0.3\n')
    processes = [machine.start() for _ in range(4)]
    for process in processes:
        out, err = process.communicate(timeout=300)
        assert (process.returncode, err) == (0, "") and out.count("Waiting") <= 1
    lines = machine.log.read_text().splitlines()
    expected = calls(*FIRST, *TINY * 4)
    assert lines[:4] == expected[:4] and sorted(lines) == sorted(expected)
    assert machine.locks() == []


@pytest.mark.parametrize("argv, locked, unlocked", [
    ([], "-m data/source_code.py", "data/check.py run/launch.py"),
    (["check", "--small"], "-m", "-m"),
    (["loss", "x"], "-m -m", "evals/loss.py"),
    (["test"], "-m -m -m", "-m -m -m"),
])  # fmt: skip
def test_only_what_writes_holds_the_lock(machine, argv, locked, unlocked):
    python = machine.python(12)
    python.write_text(python.read_text() + "print('lock', os.path.lexists('.lock'), argv[0])\n")
    machine.run(*argv)
    lines = [line.split() for line in machine.done.stdout.splitlines()]
    expected = [["lock", "True", name] for name in locked.split()]
    expected += [["lock", "False", name] for name in unlocked.split()]
    assert [line for line in lines if line[0] == "lock"] == expected


@pytest.mark.parametrize("owner", [f"elsewhere {DEAD}", "Linux us", "Linux 1"])
def test_the_lock_of_another_host_or_of_a_live_process_stays_and_is_told_once(machine, owner):
    machine.python(12)
    owner = owner.replace("us", str(os.getpid()))
    (machine.root / ".lock").symlink_to(owner)
    process = machine.start(HOSTNAME="elsewhere")
    host, number = owner.split()
    message = f"Waiting for process {number} on {host}; if it is gone, type  rm -r .lock*\n"
    assert process.stdout.readline() == message
    time.sleep(0.5)
    assert not machine.log.exists() and machine.locks() == [".lock"]
    (machine.root / ".lock").unlink()
    out, err = process.communicate(timeout=300)
    assert (process.returncode, err) == (0, "") and "Waiting" not in out


def test_a_container_that_is_started_again_has_the_number_of_the_one_that_was_killed(machine):
    machine.python(12)
    lock = machine.root / ".lock"
    process = machine.start(before=lambda: lock.symlink_to(f"Linux {os.getpid()}"))
    out, _ = process.communicate(timeout=300)
    assert process.returncode == 0 and "Waiting" not in out and machine.locks() == []


def hanging(machine):
    """run.sh while it installs, which takes until there is a file `go`."""
    python = machine.python(12)
    python.write_text(python.read_text() + HANGS)
    process = machine.start()
    assert [process.stdout.readline()[:10] for _ in range(2)] == ["Installing", "pip\n"]
    assert machine.locks() == [".lock"]
    return process


@pytest.mark.parametrize("number, left", [
    (signal.SIGINT, []), (signal.SIGTERM, []), (signal.SIGKILL, [".lock"]),
])  # fmt: skip
def test_who_is_stopped_leaves_no_lock_or_one_that_is_taken_over(machine, number, left):
    process = hanging(machine)
    os.killpg(process.pid, number)
    assert process.wait(timeout=60) != 0 and machine.locks() == left
    (machine.root / "go").touch()
    assert machine.run() == calls(f"{PIP} requirements.txt", *TINY)
    assert "Waiting" not in machine.done.stdout and machine.locks() == []


def test_run_sh_alone_that_is_told_to_stop_waits_for_its_install(machine):
    process = hanging(machine)
    process.terminate()
    time.sleep(0.3)
    assert process.poll() is None and machine.locks() == [".lock"]
    (machine.root / "go").touch()
    assert process.wait(timeout=60) == 143 and machine.locks() == []
    assert "data/" not in machine.log.read_text()


def test_where_nothing_can_be_written_what_is_installed_runs_without_a_lock(machine):
    machine.python(12)
    machine.run()
    lock = machine.root / ".lock"
    lock.symlink_to("elsewhere 1")
    machine.root.chmod(0o555)
    if os.access(machine.root, os.W_OK):  # root may write anyway: a fake ln fails instead
        lock.unlink()
        (machine.bin / "ln").unlink()
        error = "ln: failed to create symbolic link '.lock': Read-only file system"
        machine.script("ln", f'#!{BASH}\necho "{error}" >&2\nexit 1\n')
    assert machine.run() == calls(*TINY) and machine.done.returncode == 0
    assert machine.done.stderr == "" and "Waiting" not in machine.done.stdout
    machine.root.chmod(0o755)
