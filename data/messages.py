"""One line where a tool fails, instead of a traceback: what is wrong, where and what to do.

It also replaces characters that a terminal cannot show."""

from __future__ import annotations

import argparse
import contextlib
import difflib
import errno
import os
import pathlib
import select
import sys
import traceback
from collections.abc import Iterator
from typing import NoReturn

NO_THREAD = "can't start new thread"  # Python's RuntimeError
NO_MEMORY = "RESOURCE_EXHAUSTED"  # XLA's, which is a RuntimeError
CURES = {  # what to do about errors of the system; about others, see reason()
    (errno.ENOSPC, errno.EDQUOT, errno.EFBIG): "make room, or choose another disk",
    (errno.EACCES, errno.EPERM): "check the permissions of it and of its folders",
    (errno.EROFS, errno.EIO, errno.ESTALE): "choose another disk, or mount that one again",
    (errno.EISDIR,): "a file belongs there: move the folder away",
    (errno.EMFILE, errno.ENFILE): "allow more open files: ulimit -n 4096",
}


class Parser(argparse.ArgumentParser):
    """Parses a tool's arguments. What it cannot use ends the tool with one line and status 2, which
    names the nearest flag where there is none of this name. Flags cannot be abbreviated."""

    def __init__(self, **options):
        options.setdefault("formatter_class", argparse.RawDescriptionHelpFormatter)
        super().__init__(allow_abbrev=False, **options)

    def error(self, message: str) -> NoReturn:
        """Ends the tool."""
        _, _, words = message.partition("unrecognized arguments: ")
        hint = ""
        if words.startswith("--"):
            known = [name for name in self._option_string_actions if name.startswith("--")]
            flag = words.split()[0].partition("=")[0]
            message = f"there is no flag {flag}"
            hint = nearest(flag, [name[2:] for name in known], "--")
        text = " ".join(f"{message}{hint}".splitlines())
        print(f"{pathlib.Path(self.prog).name}: {text}", file=sys.stderr)
        sys.exit(2)


def nearest(word: str, words: list[str], dashes: str = "") -> str:
    """A question that names the words of which this one is a part, or else the most similar one."""
    part = word.lstrip("-").lower()
    by_lower = {other.lower(): other for other in words}
    found = [other for lower, other in by_lower.items() if part in lower and len(part) > 1]
    if not found:
        found = [by_lower[lower] for lower in difflib.get_close_matches(part, by_lower, n=1)]
    return f": did you mean {' or '.join(dashes + other for other in found[:3])}?" if found else ""


class Fault(Exception):
    """A message for the user: what is wrong, where, and what to do. Where a caller knows the name
    of the file, the text continues a sentence that begins with it."""


def is_of_system(error: Exception) -> bool:
    """Whether reason() knows what to do about an error."""
    no_thread = isinstance(error, RuntimeError) and NO_THREAD in str(error)
    return no_thread or isinstance(error, OSError) or lacks_memory(error)


def lacks_memory(error: Exception) -> bool:
    """Whether Python, NumPy or XLA found too little memory."""
    of_xla = isinstance(error, RuntimeError) and NO_MEMORY in str(error)
    return of_xla or isinstance(error, MemoryError)


def reason(error: OSError | RuntimeError | MemoryError, known: pathlib.Path | None = None) -> str:
    """Where an error of the system happened, unless it was at `known`; what it is; what to do."""
    if lacks_memory(error):
        return "not enough memory: stop other programs, or take a machine that has more"
    if not isinstance(error, OSError):
        return "no new threads: raise ulimit -u"
    name = error.filename2 or error.filename or known or ""
    place = pathlib.Path(os.fsdecode(name))
    for part in (place, *place.parents):
        if os.path.islink(part) and not os.path.exists(part):
            return f"{part} is a link to {os.readlink(part)}, which is not there: mount or mend it"
        if error.errno in (errno.EEXIST, errno.ENOTDIR) and os.path.isfile(part):
            return f"{part} is a file, but a folder belongs there: choose another, or move it away"
    cures = [cure for numbers, cure in CURES.items() if error.errno in numbers]
    where = f"{place}: " if name and place != known else ""
    return f"{where}{error.strerror or error}: {(cures or ['check that path'])[0]}"


@contextlib.contextmanager
def one_line(script: str, status: int = 1, replacement: str = "backslashreplace") -> Iterator[None]:
    """Ends a script with one line and `status` if it raises Fault or an error that reason() knows,
    with 130 if Ctrl-C stops it, and quietly, with the status of SIGPIPE, if nobody reads what it
    prints, as with `| head`. Another error prints its traceback, and has that status, too.
    `replacement` names what replaces characters that a terminal does not know: \\xe9 for é, as on
    stderr, unless a script names another handler of codecs."""
    open_streams(replacement)
    try:
        yield
        sys.stdout.flush()
    except SystemExit:  # as of --help
        flush_or_discard()
        raise
    except KeyboardInterrupt:
        with contextlib.suppress(OSError):  # stderr may be full
            print(f"{script}: stopped by Ctrl-C", file=sys.stderr, flush=True)
        os._exit(130)  # sys.exit would wait for threads that read their shards to the end
    except Exception as error:
        if isinstance(error, BrokenPipeError) and nobody_reads():
            discard_output()
            sys.exit(141)
        flush_or_discard()
        if isinstance(error, Fault):
            message = f"{script}: {' '.join(str(error).splitlines())}"  # names may have newlines
        elif is_of_system(error):
            message = f"{script}: {' '.join(reason(error).splitlines())}"
        else:
            message = traceback.format_exc().rstrip()
        with contextlib.suppress(OSError):
            print(message, file=sys.stderr)
        sys.exit(status)


def open_streams(replacement: str = "backslashreplace") -> None:
    """Makes text reach every terminal: streams that are closed become empty, and characters that an
    encoding does not have are replaced."""
    for name, mode in {"stdin": "r", "stdout": "w", "stderr": "w"}.items():
        if getattr(sys, name) is None:  # closed, as by `>&-`
            setattr(sys, name, open(os.devnull, mode))
    if hasattr(sys.stdout, "reconfigure"):  # a StringIO has no encoding
        sys.stdout.reconfigure(errors=replacement)


def flush_or_discard() -> None:
    """Prints what waits for stdout, or discards it if nobody reads it any more."""
    try:
        sys.stdout.flush()
    except OSError:
        discard_output()


def discard_output() -> None:
    """Discards what Python will flush to a broken stdout when it exits."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)


def nobody_reads() -> bool:
    """Whether stdout is a pipe or a socket whose reader has gone."""
    poll = select.poll()
    poll.register(1, 0)
    return any(event & (select.POLLERR | select.POLLHUP) for _, event in poll.poll(0))


def install_command(packages: str) -> str:
    """What adds packages to this Python's environment: .venv has no pip where uv or a pip from
    outside has installed it."""
    from importlib.util import find_spec  # here, because few need it
    from shutil import which

    if find_spec("pip"):
        return f"{sys.executable} -m pip install {packages}"
    if which("uv"):
        return f"uv pip install --python {sys.executable} {packages}"
    return f"python3 -m pip --python {sys.executable} install {packages}"


def folder_name(text: str) -> pathlib.Path:
    """The folder that an argument of the command line names. "" would be the current folder."""
    if not text:
        raise argparse.ArgumentTypeError("the name of the folder is empty: pass one")
    try:
        return pathlib.Path(text).expanduser()  # the shell leaves the ~ of --out=~/x as it is
    except RuntimeError as error:
        raise argparse.ArgumentTypeError(f"{text}: {error}") from None


def certificate_fault(*variables: str) -> str:
    """Why the certificates that an environment variable names cannot be read, and what to do, or
    "". Of the variables, in the order in which a library looks for them, the first set one counts:
    a file, or a list of folders in SSL_CERT_DIR, or one of both in requests' variables."""
    import ssl  # here, because it takes long and only downloads need it

    for variable in variables:
        value = os.environ.get(variable)
        if not value:
            continue
        why = ""
        may_be_folder = variable != "SSL_CERT_FILE"
        if variable == "SSL_CERT_DIR" or (may_be_folder and os.path.isdir(value)):
            folders = map(pathlib.Path, value.split(os.pathsep))
            if not any([*folder.glob("*.[0-9]")] for folder in folders):
                why = "no file there has the name of a hash, as openssl rehash gives it"
        else:
            try:
                ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_verify_locations(cafile=value)
            except OSError as error:  # ssl.SSLError is one
                why = error.strerror or str(error)
        what = f"{variable} names {value}, which has no certificates that can be read"
        return why and f"{what} ({why}): correct it, or unset it"
    return ""


def refuse(message: str) -> NoReturn:
    """Ends a tool with one line and exit status 2."""
    print(f"{pathlib.Path(sys.argv[0]).name}: {message}", file=sys.stderr)
    sys.exit(2)
