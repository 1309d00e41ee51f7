"""What run.sh asks a Python before and after it installs into .venv.

    python run/install.py kind             prints for which Python and processor its packages are
    python run/install.py make MINOR       makes .venv, and prints its kind; or prints why this
                                           Python cannot (status 1), or why none can (status 2)
    python run/install.py make MINOR outside
                                           the same, also where only a pip outside .venv can install
    python run/install.py state MINOR [WHEELS ...]
                                           prints the kind of .venv; or what is wrong with it: an
                                           older Python, one of these wheels, a damaged package
    python run/install.py check            imports the packages, and prints why it could not
    python run/install.py pip              prints lines for a shell, with which pip keeps the user's
                                           mirrors, proxies and certificates, and no other setting
    python run/install.py uv               the same for uv, which gets pip's settings, too

Where something is wrong, the status is not 0. Python 3.6 is enough. Every start of run.sh asks for
the state, so that modules which only the others need are imported there.
"""

import glob
import importlib
import os
import sys
from importlib.util import find_spec

PACKAGES = "numpy jax.numpy optax tiktoken huggingface_hub.hf_api".split()
# Parts of Python that these import. Some are missing where a library was not there when Python was
# built, or where a distribution has split Python. _bz2, _lzma and _sqlite3 are not needed.
MODULES = "_ctypes zlib _ssl _csv _datetime _random _socket mmap select unicodedata".split()
OUTSIDE_PIP = (22, 3)  # the first that has --python
# Settings of pip that say where packages come from. What is installed, and where to, is for run.sh
# to say: a target, a constraint or --user would break .venv.
SOURCES = (
    "index-url pypi-url extra-index-url no-index find-links trusted-host cert client-cert proxy "
    "timeout default-timeout retries resume-retries keyring-provider cache-dir no-cache-dir"
).split()
# Words of other settings that are about certificates.
FEATURES = {"use-feature": "truststore", "use-deprecated": "legacy-certs"}
# uv's variables that say the same. It has no settings for what is left out here.
UV_SOURCES = (
    "DEFAULT_INDEX INDEX INDEX_URL EXTRA_INDEX_URL FIND_LINKS CACHE_DIR NO_CACHE OFFLINE "
    "NATIVE_TLS SYSTEM_CERTS INSECURE_HOST HTTP_TIMEOUT HTTP_RETRIES LINK_MODE KEYRING_PROVIDER"
).split()
# Settings of pip, and uv's flag for every word of them, or its variable.
UV_FLAGS = {
    "index-url": "--index-url",
    "pypi-url": "--index-url",
    "extra-index-url": "--extra-index-url",
    "find-links": "--find-links",
    "trusted-host": "--allow-insecure-host",
}
UV_VARIABLES = {
    "cert": "SSL_CERT_FILE",
    "client-cert": "SSL_CLIENT_CERT",
    "proxy": "ALL_PROXY",
    "timeout": "UV_HTTP_TIMEOUT",
    "default-timeout": "UV_HTTP_TIMEOUT",
    "retries": "UV_HTTP_RETRIES",
}
# Folders of pip's settings for all users: of macOS, of Linux.
SHARED = ["/Library/Application Support/pip", "/etc"]
# These change what importing a package does, and a wrong value is no damage.
VARIABLES = ("JAX_", "XLA_", "HF_", "HUGGINGFACE_", "NPY_", "NUMPY_")
NOEXEC = "this disk is mounted noexec, so that Python cannot load numpy: move the folder to another"
NO_LINKS = "this disk has no symbolic links, which .venv needs: move the folder to another"


# ---- Before --------------------------------------------------------------------------------------
def unfit(minor: int, outside: bool) -> str:
    """Why this Python cannot make .venv; "" if it can. Colab's Python, and Debian's without
    python3-venv, have no ensurepip, and a pip outside .venv installs into it then."""
    if sys.version_info < (3, minor):
        return f"is 3.{sys.version_info[1]}"
    if sys.implementation.name != "cpython":
        return "is " + sys.implementation.name
    if sys.maxsize < 2**32:
        return "has 32 bits"
    if os.path.realpath(sys.prefix) == os.path.realpath(".venv"):
        return "is of .venv itself"
    missing = [name.lstrip("_") for name in MODULES if not can_import(name)]
    missing += [name for name in ("venv", "ensurepip") if not find_spec(name)]
    if outside and missing == ["ensurepip"] and has_outside_pip():
        return ""
    return "lacks " + ", ".join(missing) if missing else ""


def can_import(name: str) -> bool:
    """Whether a part of Python is there and works."""
    try:
        importlib.import_module(name)
    except ImportError:
        return False
    return True


def has_outside_pip() -> bool:
    """Whether this Python's pip can install into .venv."""
    if not can_import("pip"):
        return False
    version = sys.modules["pip"].__version__.split(".")
    return tuple(map(int, version[:2])) >= OUTSIDE_PIP


def is_noexec(folder: str) -> bool:
    """Whether nothing on the disk of a folder may be executed. macOS does not tell."""
    return bool(os.statvfs(folder).f_flag & getattr(os, "ST_NOEXEC", 0))


def make() -> str:
    """Makes .venv anew, without pip. Returns why it could not, which is not Python's fault."""
    import shutil
    import subprocess

    if is_noexec("."):
        return NOEXEC
    try:
        if os.path.islink(".venv"):
            os.unlink(".venv")
        os.makedirs(".venv", exist_ok=True)
        with open(".venv/made-by-run.sh", "w"):  # stays, also where this is interrupted
            pass
        for path in glob.glob(".venv/*"):
            if os.path.isdir(path) and not os.path.islink(path):
                shutil.rmtree(path)
            elif path not in (".venv/made-by-run.sh", ".venv/pip.conf"):
                os.unlink(path)
    except OSError as error:
        where = f"cannot make .venv in {os.getcwd()}: {error.strerror}"
        return f"{where}: use a folder and a disk that you can write to"
    command = [sys.executable, "-m", "venv", "--without-pip", ".venv"]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    if done.returncode == 0:
        return ""
    try:
        os.symlink("made-by-run.sh", ".venv/link")
    except OSError:
        return NO_LINKS
    output = done.stdout.decode(errors="replace").strip().splitlines() or ["it says nothing"]
    return f"{' '.join(command)} failed: {output[-1]}"


# ---- After ---------------------------------------------------------------------------------------
def kind() -> str:
    """What compiled packages depend on."""
    major, minor = sys.version_info[:2]
    return f"Python {major}.{minor}{sys.abiflags} on {os.uname().machine}"


def wrong(minor: int, other_wheels: list) -> str:
    """What is wrong with .venv, whose Python this is; "" if nothing is."""
    if sys.version_info < (3, minor):
        return f"is of Python 3.{sys.version_info[1]}"
    is_ours = os.path.exists(".venv/made-by-run.sh")
    if is_ours and sys.prefix == sys.base_prefix:
        return "is no virtual environment any more"
    for name in other_wheels:
        if os.path.exists(".venv/installed-" + name):
            return f"has the wheels of {name}"
    pins = ""
    for stamp in glob.glob(".venv/installed-*"):
        with open(stamp) as lines:
            text = lines.read()
        first = text.partition("\n")[0]
        if first.startswith("Python ") and first != kind():
            return f"was installed for {first}, and its Python is now {kind()}"
        pins += text
    folder = f".venv/lib/python3.{sys.version_info[1]}/site-packages"
    if os.path.isdir(folder + "/pip") and not glob.glob(folder + "/pip-*.dist-info"):
        return "has only a part of pip"  # Ctrl-C stopped ensurepip
    # What others have made may find packages outside of .venv.
    return (lacking(folder, pins) if is_ours else "") or damage(folder)


def lacking(folder: str, pins: str) -> str:
    """Which of PACKAGES is not there in the version that was installed."""
    import re

    for package in PACKAGES:
        name = package.partition(".")[0]
        versions = re.findall(f"^{name}==([0-9.]+)", pins, re.MULTILINE)
        paths = [f"{folder}/{name}-{version}.dist-info" for version in versions]
        if versions and not any(map(os.path.exists, paths)):
            return f"lacks {name} {' or '.join(dict.fromkeys(versions))}"
    return ""


def damage(folder: str) -> str:
    """Which file of the packages in a folder is missing or empty. If one has another size than
    their lists say, somebody may have edited it, so the import decides. This reads only the lists:
    5,000 files take 20 ms."""
    edited = False
    path = ""
    try:
        for info in glob.glob(folder + "/*.dist-info"):
            path = info + "/RECORD"
            with open(path, encoding="utf-8", errors="replace") as lines:
                rows = [line.strip().rsplit(",", 2) for line in lines]
            if not rows:
                return f"has a damaged package ({path} is empty)"
            for path, _, size in rows:
                if not size or path.endswith(".pyc"):
                    continue
                found = os.stat(os.path.join(folder, path.strip('"'))).st_size
                if not found and int(size):
                    return f"has a damaged package ({path} is empty)"
                edited = edited or found != int(size)
    except OSError as error:
        return f"has a damaged package ({path}: {error.strerror})"
    except ValueError:  # a list of packages in another format
        return failure()
    return failure() if edited else ""


def failure() -> str:
    """Why PACKAGES cannot be imported, in one line; "" if they can."""
    for variable in [*os.environ]:
        if variable.startswith(VARIABLES):
            del os.environ[variable]
    for name in PACKAGES:
        try:
            importlib.import_module(name)
        except Exception as error:
            while error.__cause__ or error.__context__:
                error = error.__cause__ or error.__context__
            text = " ".join(str(error).split())
            cause = NOEXEC if is_noexec(".venv") else f"{type(error).__name__}: {text}"
            return f"cannot import {name}: {cause}"
    return ""


# ---- pip -----------------------------------------------------------------------------------------
def config_files() -> list:
    """pip's files of settings, as in its documentation, "Configuration files"; later ones count
    more."""
    named = os.environ.get("PIP_CONFIG_FILE", "")
    if named == os.devnull:
        return []
    home = os.path.expanduser("~")
    xdg = (os.environ.get("XDG_CONFIG_DIRS") or "/etc/xdg").split(":")
    folders = [folder + "/pip" for folder in xdg] + SHARED
    if not os.path.exists(named):
        folders.append(home + "/.pip")
        folders.append((os.environ.get("XDG_CONFIG_HOME") or home + "/.config") + "/pip")
        folders.append(home + SHARED[0])
    folders.append(sys.prefix)
    return [folder + "/pip.conf" for folder in folders] + [named]


def sources() -> dict:
    """The user's settings of pip that are SOURCES or FEATURES, from files and variables."""
    import configparser

    sections = {"global": {}, "install": {}, "environment": {}}
    for path in config_files():
        parser = configparser.RawConfigParser(strict=False)
        try:
            parser.read(path, encoding="utf-8")
        except (UnicodeError, configparser.Error) as error:
            line = " ".join(str(error).split())
            print(f"run.sh: warning: {path} is not read: {line}", file=sys.stderr)
        for section in parser.sections():
            sections.setdefault(section, {}).update(parser.items(section))
    for variable, value in os.environ.items():
        if variable.startswith("PIP_"):
            sections["environment"][variable[4:]] = value
    found = {}
    for section in ("global", "install", "environment"):
        for name, value in sections[section].items():
            name = name.lower().replace("_", "-").lstrip("-")
            words = value.split()
            if name in FEATURES and FEATURES[name] in words:
                found[name] = FEATURES[name]
            elif name in SOURCES and words:
                found[name] = value
    return found


def for_shell() -> str:
    """Lines that leave pip nothing of the user's settings but the sources."""
    import shlex

    lines = []
    for variable in os.environ:
        if variable.startswith("PIP_") and variable.isidentifier():
            lines.append("unset " + variable)
    lines.append("export PIP_CONFIG_FILE=" + os.devnull)
    for name, value in sources().items():
        variable = "PIP_" + name.upper().replace("-", "_")
        lines.append(f"export {variable}={shlex.quote(value)}")
    return "\n".join(lines)


def for_uv() -> str:
    """Lines that leave uv nothing of the user's settings but where packages come from, which is
    also what pip's settings say. uv_flags are its flags, as words without spaces."""
    import re
    import shlex

    lines = ["export UV_NO_CONFIG=1"]
    for variable in os.environ:
        is_password = re.fullmatch(r"UV_INDEX_\w+_(USERNAME|PASSWORD)", variable)
        if variable.startswith("UV_") and variable[3:] not in UV_SOURCES and not is_password:
            lines.append("unset " + variable)
    flags = ["--index-strategy unsafe-best-match"]  # of all indices the newest that fits, as pip
    for name, value in sources().items():
        if name in UV_FLAGS:
            flags += [UV_FLAGS[name] + "=" + word for word in value.split()]
        elif name in UV_VARIABLES:
            lines.append(f"export {UV_VARIABLES[name]}={shlex.quote(value)}")
        elif name in ("no-index", "no-cache-dir") and value.lower() in ("1", "true", "yes", "on"):
            flags.append("--no-index" if name == "no-index" else "--no-cache")
        elif value == "truststore":
            flags.append("--native-tls")
    lines.append(f"uv_flags={shlex.quote(' '.join(flags))}")
    return "\n".join(lines)


def main(question: str, *words: str) -> int:
    """Prints the answer, and returns the status of the process."""
    reason = ""
    status = 1
    try:
        if question == "make":
            reason = unfit(int(words[0]), "outside" in words)
            if not reason:
                status = 2
                reason = make()
        elif question == "state":
            reason = wrong(int(words[0]), words[1:])
        elif question == "check":
            reason = failure()
    except Exception as error:
        reason = f"cannot be examined ({type(error).__name__}: {error})"
    answers = {"pip": for_shell, "uv": for_uv}
    answer = answers.get(question, kind)()
    sys.stdout.buffer.write(os.fsencode(f"{reason or answer}\n"))
    return status if reason else 0


if __name__ == "__main__":
    del sys.path[0]  # files of this folder have names that modules of Python have, too
    sys.exit(main(*sys.argv[1:]))
