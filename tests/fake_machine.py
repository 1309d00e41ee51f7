"""Machines for run.sh: fake Pythons, a fake nvidia-smi, fake PCI devices, and kinds of machines.

    python tests/fake_machine.py      writes run/machines.md

That page has what `./run.sh plan` prints on each kind; a test compares it.
"""

import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "run" / "machines.md"
BASH = shutil.which("bash")

# A fake Python. It executes `-c` and what run.sh asks before it installs, with the version
# and without the modules that a test wants. `-m venv` makes a .venv that has this fake, and `-m
# ensurepip` gives it a pip. All other commands are only written into the log. Where there is a file
# `no_import`, what pip has installed cannot be imported, and the file says why.
FAKE_PYTHON = """#!{real} -S
import os, sys
argv = sys.argv[1:]
here = os.path.dirname(__file__)
if argv[0] in ("-c", "run/install.py"):
    sys.version_info = {version}
    sys.executable = __file__
    if here.endswith(".venv/bin"):
        sys.prefix = os.path.abspath(os.path.dirname(here))
    sys.modules["pip"] = pip = type(sys)("pip")
    pip.__version__ = "25.0"
    if not os.path.exists(here + "/pip"):
        pip.__version__ = {pip!r}
        if here.endswith(".venv/bin") or not {pip!r}:
            sys.modules["pip"] = None
    for missing in {missing}:
        sys.modules[missing] = None
if argv[0] == "-c":
    exec(argv[1])
    sys.exit()
if argv == ["run/install.py", "check"]:
    if os.path.exists("no_import"):
        print(open("no_import").read().strip())
        sys.exit(1)
    sys.exit()
if argv[0] == "run/install.py":
    sys.argv = argv
    sys.path.insert(0, "run")
    exec(open(argv[0]).read(), dict(__name__="__main__"))
if argv[0] in ("run/machine.py", "run/plan.py", "records/idea.py"):
    sys.argv = argv
    sys.path[0] = os.path.dirname(argv[0])
    exec(open(argv[0]).read(), dict(__name__="__main__", __file__=os.path.abspath(argv[0])))
    sys.exit()
with open({log!r}, "a") as log:
    print("{name}", *argv, file=log)
if argv[:2] == ["-m", "venv"]:
    import shutil
    os.makedirs(".venv/bin")
    shutil.copy(__file__, ".venv/bin/python")
elif argv[:2] == ["-m", "ensurepip"]:
    if {ensurepip}:
        sys.exit("No module named ensurepip")
    open(here + "/pip", "w").close()
elif argv[:2] == ["-m", "pip"]:
    with open({log!r} + ".pip", "w") as file:
        for name, value in os.environ.items():
            print(name + "=" + value, file=file)
    if os.path.exists("no_network"):
        sys.exit("no network")
    import re
    folder = ".venv/lib/python3." + str({version}[1]) + "/site-packages/"
    for name, number in re.findall("(?m)^([a-z_]+)==([0-9.]+)", open("requirements.txt").read()):
        os.makedirs(folder + name + "-" + number + ".dist-info", exist_ok=True)
        with open(folder + name + "-" + number + ".dist-info/RECORD", "w") as file:
            file.write("a,,\\n")
elif argv[0] == "run/launch.py":
    for name in "GLIBC_TUNABLES", "JAX_PLATFORMS", "XLA_CLIENT_MEM_FRACTION", "XLA_FLAGS":
        print(name, os.environ.get(name))
"""

# Answers the two questions of run/machine.py, and no other.
FAKE_NVIDIA_SMI = """#!{bash}
[ "$2" = --format=csv,noheader,nounits ] || exit 2
case $1 in
  --query-gpu=driver_version) echo "{drivers}" ;;
  --query-gpu=index,uuid,name,compute_cap,memory.total) echo "{gpus}" ;;
  *) exit 2 ;;
esac
"""

GVNIC = "0x0042"  # Google's network card has the vendor of its TPUs
V5E, V6E = "0x0063", "0x006f"


class Gpu(NamedTuple):
    """A line of nvidia-smi."""

    name: str = "NVIDIA H100 80GB HBM3"
    capability: str = "9.0"
    mib: str = "81559"


class Kind(NamedTuple):
    """A kind of machine."""

    gpus: tuple[Gpu, ...] = ()
    driver: str = "580.65.06"
    pci: tuple[str, ...] = ()  # device numbers, all of Google
    system: str = "Linux x86_64"


KINDS = {
    "8×H100": Kind(gpus=8 * (Gpu(),)),
    "1×H100": Kind(gpus=(Gpu(),)),
    "A100, 40 GB": Kind((Gpu("NVIDIA A100-SXM4-40GB", "8.0", "40960"),), driver="550.54.15"),
    "RTX 4090": Kind((Gpu("NVIDIA GeForce RTX 4090", "8.9", "24564"),)),
    "16 GB: RTX 4080": Kind((Gpu("NVIDIA GeForce RTX 4080", "8.9", "16376"),)),
    "T4, on Colab": Kind((Gpu("Tesla T4", "7.5", "15360"),), driver="550.54.15", pci=(GVNIC,)),
    "P100, on Kaggle": Kind((Gpu("Tesla P100-PCIE-16GB", "6.0", "16384"),), pci=(GVNIC,)),
    "TPU v5e-8, on Kaggle": Kind(pci=(GVNIC, *8 * (V5E,))),
    "TPU v5e-1, on Colab": Kind(pci=(GVNIC, V5E)),
    "TPU v6e-1, on Colab": Kind(pci=(GVNIC, V6E)),
    "a Mac": Kind(system="Darwin arm64"),
    "a laptop": Kind(),
}


class Machine:
    """A folder with run.sh, and a PATH that has the fakes and a few tools of the shell."""

    def __init__(self, folder: Path):
        self.root = folder / "repo"
        self.bin = folder / "bin"
        self.log = folder / "log"
        self.pci = folder / "pci"
        self.started = []
        self.bin.mkdir()
        copied = "run.sh requirements.txt evals/requirements.txt tests/requirements.txt "
        copied += "run/install.py run/machine.py run/plan.py records/idea.py run/fits.py "
        copied += "run/flags.py data/messages.py"
        for name in copied.split():
            (self.root / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, self.root / name)
        shutil.copytree(ROOT / "run/constraints", self.root / "run/constraints")
        for tool in "cat cp dirname ln mkdir rm rmdir readlink".split():
            (self.bin / tool).symlink_to(shutil.which(tool))
        self.script("sleep", f"#!{BASH}\nexec {shutil.which('sleep')} 0.1\n")
        self.system("Linux", "x86_64")

    def become(self, kind: Kind):
        """Shows what a machine of this kind would show."""
        self.system(*kind.system.split())
        (self.bin / "nvidia-smi").unlink(missing_ok=True)
        if kind.gpus:
            self.gpus(kind.driver, *kind.gpus)
        shutil.rmtree(self.pci, ignore_errors=True)
        for i, device in enumerate(kind.pci):
            folder = self.pci / f"0000:00:{i:02x}.0"
            folder.mkdir(parents=True)
            (folder / "vendor").write_text("0x1ae0\n")
            (folder / "device").write_text(f"{device}\n")

    def system(self, name: str, machine: str):
        self.script("uname", f'#!{BASH}\n[ "$1" = -m ] && echo {machine} || echo {name}\n')

    def gpus(self, driver: str, *gpus: Gpu):
        """Puts a nvidia-smi on the PATH, which shows these."""
        rows = [", ".join((str(i), f"GPU-{i}f", *gpu)) for i, gpu in enumerate(gpus)]
        drivers = "\n".join([driver] * len(gpus))
        text = FAKE_NVIDIA_SMI.format(bash=BASH, drivers=drivers, gpus="\n".join(rows))
        self.script("nvidia-smi", text)

    def script(self, name: str, text: str) -> Path:
        path = self.bin / name
        path.write_text(text)
        path.chmod(0o755)
        return path

    def python(self, minor: int, name: str = "", missing=(), pip: str = "") -> Path:
        """Puts one on the PATH; `pip` is the version of its pip, "" for none."""
        name = name or f"python3.{minor}"
        parts = dict(real=sys.executable, log=str(self.log), name=name, version=(3, minor, 0))
        parts |= dict(missing=missing, ensurepip="ensurepip" in missing, pip=pip)
        return self.script(name, FAKE_PYTHON.format(**parts))

    def foreign_venv(self, minor: int, missing=()) -> Path:
        """A .venv that run.sh did not make: without pip, as uv makes it, and with a user's file."""
        precious = self.root / ".venv" / "bin" / "precious"
        precious.parent.mkdir(parents=True)
        precious.touch()
        self.python(minor, "foreign", missing).rename(precious.with_name("python"))
        return precious

    def start(self, *argv, before=None, shell=(BASH,), **env) -> subprocess.Popen:
        # Where SIGINT is ignored, as in a background job, children would inherit that.
        signal.signal(signal.SIGINT, signal.default_int_handler)
        env = {"PATH": str(self.bin), "JNANO_PCI": str(self.pci), **env}
        command = [*shell, self.root / "run.sh", *argv]
        pipes = dict(stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        process = subprocess.Popen(command, env=env, cwd="/", start_new_session=True,
                                   preexec_fn=before, **pipes)  # fmt: skip
        self.started.append(process)
        return process

    def run(self, *argv, **env) -> list[str]:
        """Runs run.sh to its end; the lines that the fake Pythons wrote into the log."""
        self.log.write_text("")
        process = self.start(*argv, **env)
        output = process.communicate(timeout=300)
        self.done = subprocess.CompletedProcess(process.args, process.returncode, *output)
        return self.log.read_text().splitlines()

    def locks(self) -> list[str]:
        return [path.name for path in self.root.glob(".lock*")]

    def files(self) -> set[Path]:
        """All that is there."""
        return {path for path in self.root.rglob("*") if "__pycache__" not in path.parts}

    def refusal(self, *argv, status: int = 1, **env) -> str:
        """The line on stderr of a run.sh that must refuse, before it runs anything."""
        assert self.run(*argv, **env) == [] and not (self.root / ".venv").exists()
        assert self.done.returncode == status and self.done.stderr.count("\n") == 1
        return self.done.stderr


INTRODUCTION = """# What `./run.sh` does on which machine

`./run.sh plan` prints this for the machine that it is started on, and installs nothing. It takes
the name of another preset, and what an hour costs. [`machine.py`](machine.py) decides by driver,
compute capability, memory and PCI devices, never by a name, and [`run.sh`](../run.sh) asks it, so
that a plan and a run cannot differ. The flags are those of [`fits.py`](fits.py); when a run starts,
[`launch.py`](launch.py) asks JAX for the memory. The minutes of the record are estimates: none of
these machines has run it. [`plan.py`](plan.py) has their tables. `python tests/fake_machine.py`,
which fakes what a machine shows, wrote this page.
"""
# Kinds by title, and other arguments with which the page has their plan.
PRICED = {
    "8×H100": ("record --price 20", "record92 --price 20", "medium --price 20"),
    "1×H100": ("medium --price 2.5",),
    "RTX 4090": ("small",),
    "a laptop": ("record",),
}


def plan(machine: Machine, kind: Kind, *argv: str) -> str:
    """What ./run.sh plan prints there."""
    machine.become(kind)
    machine.run("plan", *argv)
    assert machine.done.returncode == 0, machine.done.stderr
    return machine.done.stdout


def sections(machine: Machine) -> list[str]:
    """The page's sections: every kind of machine, with its other plans below."""
    texts = []
    for title, kind in KINDS.items():
        texts.append(f"## {title}\n\n```text\n{plan(machine, kind)}```\n")
        for line in PRICED.get(title, ()):
            shown = plan(machine, kind, *line.split())
            texts.append(f"### {title}: ./run.sh plan {line}\n\n```text\n{shown}```\n")
    return texts


def page() -> str:
    """run/machines.md as it should be."""
    with tempfile.TemporaryDirectory() as folder:
        machine = Machine(Path(folder))
        machine.python(12)
        return "\n".join([INTRODUCTION, *sections(machine)])


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
