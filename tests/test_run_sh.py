"""run.sh, with fake Pythons and a fake nvidia-smi: which of them it takes and what it runs."""

import os
import pathlib
import shutil
import signal
import subprocess
import sys
import time

import pytest

ROOT = pathlib.Path(__file__).resolve().parent.parent
BASH = shutil.which("bash")

# A fake Python. It executes `-c`, with the version and without the modules that a test wants. `-m
# venv` makes a .venv that has this fake. All other commands are only written into the log.
FAKE_PYTHON = """#!{real} -S
import os, shutil, sys, types
argv = sys.argv[1:]
here = os.path.dirname(__file__)
if argv[0] == "-c":
    sys.version_info = {version}
    sys.modules["pip"] = types.ModuleType("pip") if os.path.exists(here + "/pip") else None
    for missing in {missing}:
        sys.modules[missing] = None
    exec(argv[1])
    sys.exit()
with open({log!r}, "a") as log:
    print("{name}", *argv, file=log)
if argv[:2] == ["-m", "venv"]:
    os.makedirs(".venv/bin")
    for name in ("python", "pip"):
        shutil.copy(__file__, ".venv/bin/" + name)
elif argv == ["-m", "ensurepip"]:
    sys.exit({ensurepip})
elif argv[:2] == ["-m", "pip"] and os.path.exists("no_network"):
    sys.exit("no network")
elif argv[0] == "dev/launch.py":
    print("pages", os.environ.get("GLIBC_TUNABLES"))
"""


class Machine:
    """A folder with run.sh, and a PATH that has the fakes and a few tools of the shell."""

    def __init__(self, tmp_path):
        self.root = tmp_path / "repo"
        self.bin = tmp_path / "bin"
        self.log = tmp_path / "log"
        self.started = []
        self.bin.mkdir()
        (self.root / "tests").mkdir(parents=True)
        for name in ("run.sh", "requirements.txt", "tests/requirements.txt"):
            shutil.copy(ROOT / name, self.root / name)
        for tool in "cat cp dirname ln mkdir rm rmdir readlink".split():
            (self.bin / tool).symlink_to(shutil.which(tool))
        self.script("sleep", f"#!{BASH}\nexec {shutil.which('sleep')} 0.1\n")
        self.system("Linux", "x86_64")

    def system(self, name, machine):
        self.script("uname", f'#!{BASH}\n[ "$1" = -m ] && echo {machine} || echo {name}\n')

    def script(self, name, text):
        path = self.bin / name
        path.write_text(text)
        path.chmod(0o755)
        return path

    def python(self, minor, name=None, missing=()):
        name = name or f"python3.{minor}"
        parts = dict(real=sys.executable, log=str(self.log), name=name, version=(3, minor, 0))
        text = FAKE_PYTHON.format(**parts, missing=missing, ensurepip=int("ensurepip" in missing))
        return self.script(name, text)

    def foreign_venv(self, minor, missing=()):
        """A .venv that run.sh did not make: without pip, as uv makes it, and with a user's file."""
        precious = self.root / ".venv" / "bin" / "precious"
        precious.parent.mkdir(parents=True)
        precious.touch()
        self.python(minor, "foreign", missing).rename(precious.with_name("python"))
        return precious

    def driver(self, version):
        """A fake nvidia-smi of two GPUs with this driver."""
        self.script("nvidia-smi", f"#!{BASH}\necho {version}\necho {version}\n")

    def start(self, *argv, before=None, **env):
        # Where SIGINT is ignored, as in a background job, children would inherit that.
        signal.signal(signal.SIGINT, signal.default_int_handler)
        env = {"PATH": str(self.bin), **env}
        command = [BASH, self.root / "run.sh", *argv]
        pipes = dict(stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        process = subprocess.Popen(command, env=env, cwd="/", start_new_session=True,
                                   preexec_fn=before, **pipes)  # fmt: skip
        self.started.append(process)
        return process

    def run(self, *argv, **env):
        """Runs run.sh to its end; the lines that the fake Pythons wrote into the log."""
        self.log.write_text("")
        process = self.start(*argv, **env)
        output = process.communicate(timeout=60)
        self.done = subprocess.CompletedProcess(process.args, process.returncode, *output)
        return self.log.read_text().splitlines()

    def locks(self):
        return [path.name for path in self.root.glob(".lock*")]

    def refusal(self, *argv, **env):
        """The line on stderr of a run.sh that must refuse, before it runs anything."""
        assert self.run(*argv, **env) == [] and not (self.root / ".venv").exists()
        assert self.done.returncode == 1 and self.done.stderr.count("\n") == 1
        return self.done.stderr


@pytest.fixture
def machine(tmp_path):
    machine = Machine(tmp_path)
    yield machine
    for process in machine.started:
        process.kill()


VENV = "-m venv .venv"
PIP = "-m pip install --quiet --disable-pip-version-check -r"
CHECK = "data/check.py --quick --"
TRAIN = "dev/launch.py train_gpt.py"
TINY = ["data/source_code.py", f"{CHECK} data/source_code", f"{TRAIN} tiny"]


def calls(*lines, name="python3.12"):
    """The log's lines of a fake Python that was called with these arguments."""
    return [f"{name} {line}" for line in lines]


def test_first_run_without_gpu_installs_and_runs_tiny_and_the_second_only_runs(machine):
    machine.python(12)
    machine.script("nvidia-smi", f"#!{BASH}\necho No devices were found\nexit 9\n")
    machine.system("Darwin", "arm64")  # Macs with an Intel processor are refused
    everything = calls(VENV, f"{PIP} requirements.txt", *TINY)
    assert machine.run() == everything
    assert (machine.done.returncode, machine.done.stderr) == (0, "")
    assert all(s in machine.done.stdout for s in ("Installing", 'no NVIDIA GPU: running "tiny"'))
    assert machine.run() == everything[2:] and "Installing" not in machine.done.stdout


def test_without_gpu_memory_comes_in_huge_pages_unless_the_user_says_otherwise(machine):
    machine.python(12)
    machine.run()
    assert "pages glibc.malloc.hugetlb=1" in machine.done.stdout
    machine.run(GLIBC_TUNABLES="glibc.malloc.hugetlb=0")
    assert "pages glibc.malloc.hugetlb=0" in machine.done.stdout
    machine.driver("580.1")
    machine.run()
    assert "pages None" in machine.done.stdout


def test_check_installs_and_reads_no_data(machine):
    machine.python(12)
    assert machine.run("check", "--small")[1:] == calls(
        f"{PIP} requirements.txt", "-m dev.check_gpu --small"
    )
    machine.driver("580.1")
    assert machine.run("check")[-1] == "python3.12 -m dev.check_gpu"


def test_tools_for_weights_get_their_arguments_and_packages_and_read_no_data(machine):
    machine.python(12)
    assert machine.run("sample", "logs/x y.npz", "a  b")[1:] == calls(
        f"{PIP} requirements.txt", "evals/sample.py logs/x y.npz a  b"
    )
    assert machine.run("export", "x", "--out", "y") == calls("evals/export.py x --out y")
    tests = f"{PIP} tests/requirements.txt"
    assert machine.run("look", "x") == calls(tests, "evals/look.py x")
    for tool in "hellaswag", "loss":
        assert machine.run(tool, "x") == calls(f"evals/{tool}.py x")
        machine.root.joinpath(".venv/installed-tests").unlink()
        assert machine.run(tool, "x") == calls(tests, f"evals/{tool}.py x")


def test_basics_get_their_arguments_and_matplotlib_where_they_draw(machine):
    machine.python(12)
    assert machine.run("basics/gpt2.py", "--prompt", "a  b")[1:] == calls(
        f"{PIP} requirements.txt", "basics/gpt2.py --prompt a  b"
    )
    draws = calls(f"{PIP} tests/requirements.txt", "basics/fsdp.py --draw x.svg")
    assert machine.run("basics/fsdp.py", "--draw", "x.svg") == draws


def test_a_failed_or_changed_install_is_repeated(machine):
    machine.python(12)
    install = calls(f"{PIP} requirements.txt")
    (machine.root / "no_network").touch()
    assert machine.run()[1:] == install and machine.done.returncode == 1
    assert "no network" in machine.done.stderr and "pip could not install" in machine.done.stderr
    assert machine.locks() == []
    (machine.root / "no_network").unlink()
    assert machine.run()[:1] == install
    (machine.root / "requirements.txt").write_text("more==1\n")
    assert machine.run()[:1] == install


# ---- Pythons -------------------------------------------------------------------------------------
def test_newest_python_that_works_is_taken(machine):
    machine.script("python3.14", f"#!{BASH}\necho pyenv: not found >&2\nexit 127\n")
    machine.python(13, missing=["ensurepip"])
    machine.python(12)
    machine.python(11)
    assert machine.run()[0] == f"python3.12 {VENV}" and machine.done.stderr == ""


def test_too_old_or_no_python_is_refused_and_plain_python3_taken_last(machine):
    assert "found no Python 3.11 or newer" in machine.refusal()
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
    assert machine.run()[:2] == calls("-m ensurepip", f"{PIP} requirements.txt")


def test_a_venv_of_others_is_used(machine):
    precious = machine.foreign_venv(12)
    expected = calls("-m ensurepip", f"{PIP} requirements.txt", *TINY, name="foreign")
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
    assert machine.run(**env) == ["foreign -m ensurepip"] * len(missing) and precious.exists()
    assert machine.done.returncode == 1 and machine.done.stderr.count("\n") == 1
    assert command in machine.done.stderr


# ---- Machines ------------------------------------------------------------------------------------
def test_gpu_gets_the_cuda_of_its_driver_in_a_fresh_venv_and_the_record(machine):
    machine.python(12)
    record = "data/cached_fineweb10B.py", f"{CHECK} data/fineweb10B", f"{TRAIN} record"
    for version, cuda in ("525.1", 12), ("580.65.06", 13), ("579.9", 12), ("1000.1", 13):
        machine.driver(version)
        assert machine.run() == calls(VENV, f"{PIP} requirements.txt jax[cuda{cuda}]", *record)
    assert machine.run() == calls(*record)
    assert 'an NVIDIA GPU: running "record"' in machine.done.stdout


def test_unfit_drivers_pythons_and_systems_are_refused(machine):
    machine.python(11)
    machine.driver("580.65.06")
    message = machine.refusal()
    assert "no Python 3.12 or newer with" in message and "GPUs need jax >= 0.11.2" in message
    machine.driver("524.99")
    assert "the NVIDIA driver, 524, is too old: jax needs 525 or newer" in machine.refusal()
    for name, hint in ("MINGW64_NT-10.0", "WSL2"), ("MSYS_NT-10.0", "WSL2"), ("Darwin", "Intel"):
        machine.system(name, "x86_64")
        assert hint in machine.refusal("test")


# ---- Tokens and arguments ------------------------------------------------------------------------
@pytest.mark.parametrize("argv, expected", [
    (["tiny", "--seed", "1"], [*TINY[:2], f"{TRAIN} tiny --seed 1"]),
    (["my_idea.py", "tiny", "--seed", "1"], [*TINY[:2], "dev/launch.py my_idea.py tiny --seed 1"]),
    (["sub dir/my.py", "--seed=1"], [*TINY[:2], "dev/launch.py sub dir/my.py tiny --seed=1"]),
    (["tiny", "--data", "my text"], [f"{CHECK} my text", f"{TRAIN} tiny --data my text"]),
    (["--data", "a", "--data=b"], [f"{CHECK} b", f"{TRAIN} tiny --data a --data=b"]),
    (["--help"], [f"{TRAIN} tiny --help"]),
    (["record"], [f"{TRAIN} record"]),  # there is no GPU, but train_gpt.py runs and explains that
    (["record", "--data", "x"], [f"{CHECK} x", f"{TRAIN} record --data x"]),
    (["huge", "--x", "1"], [f"{TRAIN} huge --x 1"]),
])  # fmt: skip
def test_tokens_are_checked_and_arguments_reach_the_trainer(machine, argv, expected):
    machine.python(12)
    assert machine.run(*argv)[2:] == calls(*expected)


@pytest.mark.parametrize("name, count", [("data/source_code.py", 1), ("data/check.py", 2)])
def test_failure_of_a_data_script_stops_the_run(machine, name, count):
    python = machine.python(12)
    python.write_text(python.read_text() + f"if argv[0] == {name!r}: sys.exit(1)\n")
    assert machine.run()[2:] == calls(*TINY[:count]) and machine.done.returncode == 1


def test_test_lints_and_runs_pytest_and_scripts_are_executable(machine):
    machine.python(12)
    lines = f"{PIP} tests/requirements.txt", "-m ruff check .", "-m ruff format --check ."
    *checks, suite = machine.run("test", "-k", "data")[2:]
    assert checks == calls(*lines)
    assert " -m pytest " in suite and suite.endswith(" -k data")
    assert machine.run("test", "-k", "data") == [*checks[1:], suite]  # installed already
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
        out, err = process.communicate(timeout=60)
        assert (process.returncode, err) == (0, "") and out.count("Waiting") <= 1
    lines = machine.log.read_text().splitlines()
    expected = calls(VENV, f"{PIP} requirements.txt", *TINY * 4)
    assert lines[:3] == expected[:3] and sorted(lines) == sorted(expected)
    assert machine.locks() == []


@pytest.mark.parametrize("argv, locked, unlocked", [
    ([], "-m -m data/source_code.py", "data/check.py dev/launch.py"),
    (["check"], "-m -m", "-m"),
    (["loss", "x"], "-m -m -m", "evals/loss.py"),
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
    out, err = process.communicate(timeout=60)
    assert (process.returncode, err) == (0, "") and "Waiting" not in out


def test_a_container_that_is_started_again_has_the_number_of_the_one_that_was_killed(machine):
    machine.python(12)
    lock = machine.root / ".lock"
    process = machine.start(before=lambda: lock.symlink_to(f"Linux {os.getpid()}"))
    out, _ = process.communicate(timeout=60)
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
    assert process.wait(timeout=10) != 0 and machine.locks() == left
    (machine.root / "go").touch()
    assert machine.run() == calls(f"{PIP} requirements.txt", *TINY)
    assert "Waiting" not in machine.done.stdout and machine.locks() == []


def test_run_sh_alone_that_is_told_to_stop_waits_for_its_install(machine):
    process = hanging(machine)
    process.terminate()
    time.sleep(0.3)
    assert process.poll() is None and machine.locks() == [".lock"]
    (machine.root / "go").touch()
    assert process.wait(timeout=10) == 143 and machine.locks() == []
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
