"""Downloads FineWeb as GPT-2 tokens, so that nobody has to tokenize it for an hour.

    python data/cached_fineweb10B.py [N] [--edu | --100B] [--revision R] [--out DIR]

fetches the validation shard and the first N training shards (200 MB, 100,000,000 tokens each) of
a data set on huggingface.co; without N, as many as the record reads. A file counts once its size
and sha256 are those that the hub states, whether it has just come or was there before; only then
it gets its name and its entry in MANIFEST.json. After an interruption, run this again.
"""

import argparse
import contextlib
import errno
import json
import math
import os
import pathlib
import re
import shutil
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Callable
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from typing import Any

import shards

HERE = pathlib.Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))
# huggingface_hub reads these when it is imported.
os.environ.setdefault("HF_HUB_DISABLE_XET", "1")  # plain HTTP is the path that our tests cover
os.environ.setdefault("HF_HUB_VERBOSITY", "error")
os.environ["HF_HUB_DISABLE_PROGRESS_BARS"] = "1"  # a bar for each file; ours is one for all
try:
    from huggingface_hub import HfApi, constants, errors, get_session, get_token, hf_hub_download
    from tqdm import tqdm

    import train_gpt
except KeyboardInterrupt:
    print("cached_fineweb10B.py: interrupted", file=sys.stderr)
    os._exit(130)
except Exception as error:  # not installed, or a variable that should be a number or an address
    sys.exit(f"cached_fineweb10B.py: {error}: pip install -r requirements.txt, or unset HF_* again")

VARIANTS = {  # flag: repository, prefix of its files, training shards in it
    "": ("kjj0/fineweb10B-gpt2", "fineweb", 103),
    "edu": ("kjj0/finewebedu10B-gpt2", "finewebedu", 99),
    "100B": ("kjj0/fineweb100B-gpt2", "fineweb", 1030),
}
# sha256 of what the record reads, as the hub's pages of the first repository state it (we have not
# downloaded the files ourselves). Each was uploaded once, so this holds for every revision.
PINNED = {
    "fineweb_val_000000.bin": "5b95c8e0966f0861685b307b23dc5ae42b228ef74b28cb499784ae021f201640",
    "fineweb_train_000001.bin": "771fa4a99b9fe0946ffb6e848b4ba5c6a9b0fe87860ebf03bc2c1c7e45f8178e",
    "fineweb_train_000002.bin": "d4ba8d2d740905a836a4222d2aff01750560e7d49a51a745a1b3235520aec2cd",
    "fineweb_train_000003.bin": "f70fa272369730fd9e39f1848bfe4daa3289b6e490c1e7762777f00ea8b66246",
    "fineweb_train_000004.bin": "d8d88850f89fe2030e866380e90d544167467d407080403b830b903543925835",
    "fineweb_train_000005.bin": "36cef3fc41863eb6731b41e986edde38e368853ee6deb87b928990bf445a119c",
    "fineweb_train_000006.bin": "d80e5b209983e636655fc738fdf281f0132f0298bf4c0848f7e7a6bea6ca06f0",
    "fineweb_train_000007.bin": "fa9f94dce61686b5467bc6cd3078424203db23ac254d804a6d8d5d440afc1e11",
}
THREADS = 4  # files on their way at once
PAUSES = 1, 2, 4  # seconds before a request is made again that failed for a passing reason
REPORT = 10  # seconds between lines about progress, where no terminal shows a bar
MARGIN = 10**8  # bytes to leave free on the disk
PATHS = 500  # in one request: what huggingface_hub itself dares to ask


def refuse(message: str) -> None:
    sys.exit(f"cached_fineweb10B.py: {message}")


def printable(text: object) -> str:
    """A short line, with nothing that moves a cursor: much of it was written by a server."""
    return " ".join("".join(c if c.isprintable() else " " for c in str(text)).split())[:300]


# ---- Troubles ------------------------------------------------------------------------------------
def cause(error: Exception) -> tuple[Exception, int]:
    """What has happened, which huggingface_hub may hide behind "Force download failed", and the
    status of a server's answer, or 0."""
    error = error.__cause__ if type(error) is ValueError and error.__cause__ else error
    return error, getattr(getattr(error, "response", None), "status_code", 0)


def passes(error: Exception) -> bool:
    """Whether it may help to try again: after troubles of the connection or the server, and wrong
    bytes (an OSError without errno, here as in huggingface_hub). RuntimeError: where a connection
    fails, huggingface_hub closes the client that other threads are using."""
    error, status = cause(error)
    if isinstance(error, (errors.OfflineModeIsEnabled, errors.FileMetadataError)):
        return False
    wrong = isinstance(error, OSError) and error.errno is None
    broken = isinstance(error, errors.HTTPError) or type(error) is RuntimeError
    return status in (408, 429) or status >= 500 if status else wrong or broken


def persistently(call: Callable[..., Any], *args: Any, **keywords: Any) -> Any:
    """What the call returns, or raises after the last of several attempts."""
    for pause in PAUSES:
        try:
            return call(*args, **keywords)
        except Exception as error:
            if not passes(error):
                raise
        time.sleep(pause)
    return call(*args, **keywords)


def explain(error: Exception, repo: str, revision: str) -> str:
    """What has happened and what to do, in one line."""
    error, status = cause(error)
    why, hub = printable(error) or type(error).__name__, printable(constants.ENDPOINT)
    if isinstance(error, errors.RepositoryNotFoundError):
        return f"{repo} does not exist or is private: set HF_TOKEN to a token that may read it"
    if isinstance(error, errors.RevisionNotFoundError):
        return f"{repo} has no revision {printable(revision)}: pass another --revision, as main"
    if isinstance(error, errors.OfflineModeIsEnabled):
        return "HF_HUB_OFFLINE is set: unset it, or copy the files from another machine"
    if status == 401:
        return f"{hub} refuses the token: set HF_TOKEN to a valid one, or unset it ({why})"
    if status:
        return f"{hub} answers with status {status}: try again later ({why})"
    if isinstance(error, errors.HTTPError):
        return f"no connection to {hub}: check network, proxy and HF_ENDPOINT ({why})"
    if isinstance(error, OSError) and not isinstance(error, errors.FileMetadataError):
        return why  # of the disk, or by us
    return f"{hub} does not answer as a hub does: check HF_ENDPOINT and the proxy ({why})"


def check_space(folder: pathlib.Path, need: int) -> None:
    """Raises OSError if so many bytes do not fit."""
    if (free := shutil.disk_usage(folder).free) < need:
        needs = f"needs {need / 1e9:.1f} GB, {folder} has {free / 1e9:.1f} GB free"
        raise OSError(errno.ENOSPC, f"{needs}: make room or pass another --out")


# ---- Files ---------------------------------------------------------------------------------------
def is_stated(entry: object) -> bool:
    """Whether this is a size, a sha256 and a commit: a manifest or a server may say anything."""
    if not isinstance(entry, dict) or type(size := entry.get("size")) is not int:
        return False
    hashes = [h for h in (entry.get("sha256"), entry.get("revision")) if isinstance(h, str)]
    digits = [len(h) for h in hashes if re.fullmatch("[0-9a-f]+", h)]
    return 0 < size < 2**40 and digits == [64, 40]


def read_manifest(out: pathlib.Path, repo: str) -> dict[str, dict] | None:
    """The files of MANIFEST.json; None if it is broken; exits if it is of another data set."""
    try:
        about = json.loads((out / "MANIFEST.json").read_bytes())
        source, files = about["source"], about["files"]
        whole = all(map(is_stated, files.values()))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError):
        return None
    if isinstance(source, str) and source != repo:
        refuse(f"{out} holds another data set, {printable(source)}: pass another --out")
    return files if whole and source == repo else None


def fault(path: pathlib.Path, stated: dict) -> str | None:
    """What is wrong with a file that should be as stated; every byte is read."""
    if not path.is_file():
        return "is missing"
    if (size := path.stat().st_size) != stated["size"]:
        return f"has {size} bytes where {stated['size']} are stated"
    if (sha256 := shards.sha256(path)) != stated["sha256"]:
        return f"has sha256 {sha256} where {stated['sha256']} is stated"
    shard = train_gpt.open_shard(path)
    return shard if isinstance(shard, str) else None


def those_right(out: pathlib.Path, stated: dict[str, dict]) -> set[str]:
    """The names of the files that are as stated."""
    pool = ThreadPoolExecutor(THREADS)  # without `with`, which would keep Ctrl-C waiting
    faults = pool.map(fault, [out / name for name in stated], stated.values())
    return {name for name, wrong in zip(stated, faults, strict=True) if not wrong}


# ---- Hub -----------------------------------------------------------------------------------------
def ask(repo: str, names: list[str], revision: str) -> dict[str, dict]:
    """Size, sha256 and commit of every file, as the hub states them; exits if it does not."""
    api, timeout, stated = HfApi(), constants.HF_HUB_DOWNLOAD_TIMEOUT, {}
    try:
        if not (token := get_token() or "").isascii() or not token.isprintable():
            refuse("HF_TOKEN holds characters that no token has: set it anew, or unset it")
        info = persistently(api.dataset_info, repo, revision=revision, timeout=timeout)
        about = dict(repo_type="dataset", revision=info.sha)
        for at in range(0, len(names), PATHS):
            get_session().timeout = timeout  # get_paths_info has no such parameter, waits forever
            for file in persistently(api.get_paths_info, repo, names[at : at + PATHS], **about):
                if lfs := getattr(file, "lfs", None):  # a folder has no such attribute
                    found = dict(size=file.size, sha256=lfs.sha256, revision=info.sha)
                    stated[file.path] = found
    except Exception as error:
        refuse(explain(error, repo, revision))
    for name in names:
        if not is_stated(stated.get(name)):
            where = f"{repo} at revision {printable(revision)}"
            refuse(f"{where} has no {name}, or no sha256 of it: pass another --revision")
    return {name: stated[name] for name in names}


def fetch(repo: str, name: str, stated: dict, part: pathlib.Path, out: pathlib.Path) -> None:
    """Puts a file in its place once it is right; raises what keeps it from that."""
    check_space(out, stated["size"])
    folder = tempfile.mkdtemp(dir=part)
    about = dict(repo_type="dataset", revision=stated["revision"], local_dir=folder)
    try:
        # Forced, or it would copy what lies in its cache, however broken.
        path = pathlib.Path(hf_hub_download(repo, name, force_download=True, **about))
        if wrong := fault(path, stated):
            raise OSError(f"it {wrong}")
        with path.open("rb+") as file:
            os.fsync(file.fileno())  # the name must not outlive a power cut without the bytes
        os.replace(path, out / name)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def fetch_all(
    repo: str, stated: dict, part: pathlib.Path, out: pathlib.Path, keep: Callable
) -> dict[str, Exception | None]:
    """Fetches several files at once and calls `keep` with the name of each that is in its place;
    returns what has gone wrong with the others, None if they were given up before."""
    total, done, now, wrong = sum(entry["size"] for entry in stated.values()), 0, 0, {}
    check_space(out, total + MARGIN)
    pool, reported = ThreadPoolExecutor(THREADS), time.monotonic()
    running = {
        pool.submit(persistently, fetch, repo, name, entry, part, out): name
        for name, entry in stated.items()
    }
    tqdm.set_lock(threading.RLock())  # its own would be one of processes
    with tqdm(total=total, unit="B", unit_scale=True, disable=None) as bar:
        while running:
            wait(running, 0.2, FIRST_COMPLETED)
            for future in [future for future in running if future.done()]:
                name = running.pop(future)
                if future.cancelled() or future.exception():
                    wrong[name] = None if future.cancelled() else future.exception()
                else:
                    done += stated[name]["size"]
                    keep(name)
            if len(wrong) >= THREADS:  # it is hardly the files
                pool.shutdown(wait=False, cancel_futures=True)
            with contextlib.suppress(OSError):  # files come and go
                now = done + sum(p.stat().st_size for p in part.rglob("*") if p.is_file())
                bar.update(min(now, total) - bar.n)
            if bar.disable and time.monotonic() >= reported + REPORT:
                print(f"{now / total:.0%} of {total / 1e9:.1f} GB", file=sys.stderr, flush=True)
                reported = time.monotonic()
    return wrong


# ---- Run -----------------------------------------------------------------------------------------
def download(
    repo: str, names: list[str], revision: str | None, out: pathlib.Path
) -> tuple[dict[str, dict], int]:
    """Sees to it that all files are there and right, or exits. Returns the files of MANIFEST.json,
    and how many were fetched."""
    pinned = PINNED if repo == VARIANTS[""][0] else {}

    def complete(files: dict[str, dict]) -> bool:
        stated = {name: files[name] for name in names if name in files}
        known = len(stated) == len(names) and all(
            revision in (None, entry["revision"])
            and entry["sha256"] == pinned.get(name, entry["sha256"])
            for name, entry in stated.items()
        )
        return known and len(those_right(out, stated)) == len(names)

    def keep(*names: str) -> None:
        files.update((name, stated[name]) for name in names)
        shards.write_manifest(out, repo, vocab=50257, eot=50256, files=files)

    if complete(files := read_manifest(out, repo) or {}):
        return files, 0
    with shards.workplace(out) as part:
        if (files := read_manifest(out, repo)) is None:  # again: another process may have worked
            print(f"{out / 'MANIFEST.json'} is broken and taken for absent", flush=True)
            files = {}
        if complete(files):
            return files, 0
        commits = {entry["revision"] for entry in files.values()}
        stated = ask(repo, names, revision or (commits.pop() if len(commits) == 1 else "main"))
        for name, entry in stated.items():
            if (sha256 := pinned.get(name, entry["sha256"])) != entry["sha256"]:
                other = f"{name} has sha256 {entry['sha256']} at the hub, not {sha256}"
                refuse(f"{other}: these are not the bytes that records are run on")
        if there := those_right(out, stated):
            keep(*there)
        lacking = {name: entry for name, entry in stated.items() if name not in there}
        if lacking and (wrong := fetch_all(repo, lacking, part, out, keep)):
            some = ", ".join([*wrong][:5]) + ", ..." * (len(wrong) > 5)
            why = explain(next(filter(None, wrong.values())), repo, stated[names[0]]["revision"])
            count = f"{len(wrong)} of {len(names)} files could not be fetched"
            refuse(f"{count} ({some}): {why}; run this again to get them")
    return files, len(lacking)


def arguments() -> tuple[str, list[str], str | None, pathlib.Path]:
    """Repository, names of the files, revision and folder."""
    cli = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    help = "training shards; default: what the record reads"
    cli.add_argument("n", type=int, nargs="?", metavar="N", help=help)
    which = cli.add_mutually_exclusive_group()
    const = dict(dest="flag", action="store_const")
    which.add_argument("--edu", const="edu", default="", help="FineWeb-Edu, 10B tokens", **const)
    which.add_argument("--100B", const="100B", help="FineWeb, 100B tokens", **const)
    cli.add_argument("--revision", help="commit or branch; default: MANIFEST.json's, or main")
    cli.add_argument("--out", type=pathlib.Path, help="folder; default: one for the data set here")
    args = cli.parse_args()
    (repo, prefix, count), n = VARIANTS[args.flag], args.n
    if n is None:
        c = train_gpt.PRESETS["record"]
        rows, T = c.batch("train")
        n = math.ceil(c.steps / train_gpt.steps_in(range(10**8), rows, T))
        print(f"the record reads {c.steps} steps of {rows * T:,} tokens: {n} train shards")
    if not 1 <= n <= count:
        cli.error(f"{repo} has {count} training shards; {n} is not from 1 to {count}")
    names = [f"{prefix}_val_000000.bin", *(f"{prefix}_train_{i:06}.bin" for i in range(1, n + 1))]
    folder = HERE / repo.removeprefix("kjj0/").removesuffix("-gpt2")
    return repo, names, args.revision, args.out or folder


def leave(status: int, message: str) -> None:
    """Ends the process, though threads may hang in a read, and cannot be joined."""
    print(f"cached_fineweb10B.py: {message}", file=sys.stderr)
    sys.stdout.flush()
    os._exit(status)


def main():
    warnings.simplefilter("ignore")  # huggingface_hub's
    repo, names, revision, out = arguments()
    try:
        files, fetched = download(repo, names, revision, out)
    except KeyboardInterrupt:
        leave(130, "interrupted: run this again to go on")
    except OSError as error:  # no space, no permission
        leave(1, f"{out} cannot be used: {printable(error)}")
    commits = ", ".join(sorted({files[name]["revision"][:12] for name in names}))
    size = sum(files[name]["size"] for name in names) / 1e9
    print(f"{len(names)} files are there and right, {fetched} of them fetched now")
    what = f"validation shard and {len(names) - 1} train shards, {size:.1f} GB, revision {commits}"
    print(f"{out}: {what}, all verified (sha256 in MANIFEST.json)")


if __name__ == "__main__":
    main()
