"""What a log states of the machine and of the repository, without secrets."""

import os
import re
import subprocess
from pathlib import Path

SECRET = re.compile("TOKEN|KEY|SECRET|PASS")
RELEVANT = re.compile("JAX|XLA|(LIB)?TPU|CUD|NVI|NCCL|TF_CPP|GLI")


def machine_facts(folder: Path) -> dict:
    """The driver of each NVIDIA GPU, the commit of the repository whose top this folder is, and the
    environment variables that may change what JAX does."""
    drivers = output_of("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
    # Not the repository of a folder above, where this one may be without one of its own.
    git = "git", f"--git-dir={folder / '.git'}", f"--work-tree={folder}"
    home = re.compile(rf"(?<![\w./-]){re.escape(os.path.expanduser('~'))}(?![\w.-])")
    environment = {}
    for name, value in os.environ.items():
        if RELEVANT.match(name) and not SECRET.search(name):
            environment[name] = home.sub("~", value)
    return {
        "driver": "\n".join(re.findall(r"^\d[\d.]*$", drivers, re.MULTILINE)),
        "git": output_of(*git, "describe", "--always", "--dirty", "--abbrev=40"),
        "environment": environment,
    }


def output_of(*command: str) -> str:
    """What a command writes to stdout within a minute; "" if it cannot. It is not killed, because
    a driver that hangs may keep a process that was killed, which would be waited for."""
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
    try:
        output, _ = subprocess.Popen(command, **pipes).communicate(timeout=60)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return output.decode(errors="replace").strip()
