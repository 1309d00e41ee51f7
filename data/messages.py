"""How every tool ends in one line: where it refuses its input, at Ctrl-C, and before `| head`."""

import contextlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NoReturn


def refuse(message: str) -> NoReturn:
    """Ends a tool with one line and exit status 2."""
    print(f"{Path(sys.argv[0]).name}: {' '.join(message.splitlines())}", file=sys.stderr)
    sys.exit(2)


@contextlib.contextmanager
def one_line(script: str) -> Iterator[None]:
    """Ends a script with one line and status 130 at Ctrl-C, and silently with status 141 where
    nobody reads what it prints any more, as with `| head`. All else ends as Python ends it."""
    try:
        try:
            yield
        finally:
            print(end="", flush=True)
    except KeyboardInterrupt:
        print(f"{script}: stopped by Ctrl-C", file=sys.stderr, flush=True)
        os._exit(130)  # sys.exit would wait for threads that read their shards to the end
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # Python flushes what is left when it exits
        sys.exit(141)
