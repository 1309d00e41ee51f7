"""One line where a script of data/ fails, instead of a traceback: what is wrong, where, and what to
do about it."""

import argparse
import contextlib
import errno
import os
import pathlib
import select
import ssl
import sys
from collections.abc import Iterator

NO_THREAD = "can't start new thread"  # Python's RuntimeError
CURES = {  # what to do about errors of the system; about others, see reason()
    (errno.ENOSPC, errno.EDQUOT, errno.EFBIG): "make room, or choose another disk",
    (errno.EACCES, errno.EPERM): "check the permissions of it and of its folders",
    (errno.EROFS, errno.EIO, errno.ESTALE): "choose another disk, or mount that one again",
    (errno.EISDIR,): "a file belongs there: move the folder away",
    (errno.EMFILE, errno.ENFILE): "allow more open files: ulimit -n 4096",
}


class Fault(Exception):
    """What is wrong with a file or a folder. The text continues a sentence that begins with its
    name."""


def is_of_system(error: Exception) -> bool:
    """Whether reason() knows what to do about an error."""
    no_thread = isinstance(error, RuntimeError) and NO_THREAD in str(error)
    return no_thread or isinstance(error, OSError)


def reason(error: OSError | RuntimeError, known: pathlib.Path | None = None) -> str:
    """Where an error of the system happened, unless it was at `known`; what it is; what to do."""
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
def one_line(script: str, status: int = 1) -> Iterator[None]:
    """Ends a script with one line if it raises Fault or an error that reason() knows, or is stopped
    by Ctrl-C, and quietly, with the status of SIGPIPE, if nobody reads what it prints, as with
    `| head`."""
    if hasattr(sys.stdout, "reconfigure"):  # not if it is closed
        sys.stdout.reconfigure(errors="backslashreplace")  # \xe9 where é cannot be shown, as stderr
    try:
        yield
        if sys.stdout:
            sys.stdout.flush()
    except (OSError, RuntimeError, Fault) as error:
        if isinstance(error, BrokenPipeError) and nobody_reads():
            # Python flushes stdout once more at its end.
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
            sys.exit(141)
        if not isinstance(error, Fault) and not is_of_system(error):
            raise
        line = f"{script}: {error if isinstance(error, Fault) else reason(error)}"
        if status == 1:
            sys.exit(line)
        print(line, file=sys.stderr)
        sys.exit(status)
    except KeyboardInterrupt:
        print(f"{script}: stopped by Ctrl-C", file=sys.stderr, flush=True)
        os._exit(130)  # sys.exit would wait for threads that read their shards to the end


def nobody_reads() -> bool:
    """Whether stdout is a pipe or a socket whose reader has gone."""
    poll = select.poll()
    poll.register(1, 0)
    return any(event & (select.POLLERR | select.POLLHUP) for _, event in poll.poll(0))


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
