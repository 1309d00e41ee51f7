"""Downloads FineWeb as GPT-2 tokens, so that nobody has to tokenize it for an hour.

    python data/cached_fineweb10B.py [N] [--edu | --100B] [--revision R] [--out DIR]

fetches the validation shard and the first N training shards (200 MB, 100,000,000 tokens each) of
a data set on huggingface.co; without N, as many as the record reads. A file counts once its size
and sha256 are those that the hub states, whether it has just come or was there before; only then
it gets its name and its entry in MANIFEST.json. After an interruption, run this again.
"""

import argparse
import os
import pathlib
import shutil
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor, as_completed
from typing import Any

import shards

# huggingface_hub reads these when it is imported.
os.environ.setdefault("HF_HUB_DISABLE_XET", "1")  # plain HTTP is the path that our tests cover
os.environ.setdefault("HF_HUB_VERBOSITY", "error")
from huggingface_hub import HfApi, constants, errors, get_session, get_token, hf_hub_download

HERE = pathlib.Path(__file__).resolve().parent
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
EOT = shards.GPT2["eot"]
RECORD_SHARDS = 7  # of 100 million tokens; 339 million are trained on, more are read
THREADS = 4  # files on their way at once
PAUSES = 1, 2, 4  # seconds before a request is made again that failed for a passing reason
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
    """Whether it may help to try again: not after a refusal, nor if it is the disk (errno)."""
    error, status = cause(error)
    return status in (408, 429) or status >= 500 if status else not getattr(error, "errno", None)


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
    if status == 401:
        return f"{hub} refuses the token: set HF_TOKEN to a valid one, or unset it ({why})"
    if status:
        return f"{hub} answers with status {status}: try again later ({why})"
    if type(error) is OSError or getattr(error, "errno", None):  # by us, or of the disk
        return why
    return f"{hub} is not to be had: check network, proxy, HF_ENDPOINT, HF_HUB_OFFLINE ({why})"


# ---- Files ---------------------------------------------------------------------------------------
def read_files(out: pathlib.Path, repo: str) -> dict[str, dict]:
    """The files of MANIFEST.json; exits if it is broken, or of another data set."""
    try:
        about = shards.read_manifest(out)
    except shards.Fault as fault:
        refuse(f"{out} {fault}")
    if about and about["source"] != repo:
        refuse(f"{out} holds another data set, {printable(about['source'])}: pass another --out")
    return about.get("files", {})


def those_right(found: Iterable[tuple[str, dict]], stated: dict[str, dict]) -> dict[str, dict]:
    """The files in which was found what is stated of them."""
    return {
        name: facts
        for name, facts in found
        if all(facts.get(key) == stated[name][key] for key in ("size", "sha256"))
    }


# ---- Hub -----------------------------------------------------------------------------------------
def ask(repo: str, names: list[str], revision: str) -> dict[str, dict]:
    """Size, sha256 and commit of every file, as the hub states them; exits if it does not."""
    api, timeout, stated = HfApi(), constants.HF_HUB_DOWNLOAD_TIMEOUT, {}
    try:
        token = get_token() or ""
        if not token.isascii() or not token.isprintable():
            refuse("HF_TOKEN holds characters that no token has: set it anew, or unset it")
        info = persistently(api.dataset_info, repo, revision=revision, timeout=timeout)
        about = dict(repo_type="dataset", revision=info.sha)
        for at in range(0, len(names), PATHS):
            get_session().timeout = timeout  # get_paths_info has no such parameter, waits forever
            for file in persistently(api.get_paths_info, repo, names[at : at + PATHS], **about):
                lfs = getattr(file, "lfs", None)  # a folder has no such attribute
                if lfs:
                    found = dict(size=file.size, sha256=lfs.sha256, revision=info.sha)
                    stated[file.path] = found
    except Exception as error:
        refuse(explain(error, repo, revision))
    for name in names:
        if name not in stated:
            where = f"{repo} at revision {printable(revision)}"
            refuse(f"{where} has no {name}, or no sha256 of it: pass another --revision")
    return {name: stated[name] for name in names}


def fetch(repo: str, name: str, stated: dict, part: pathlib.Path, out: pathlib.Path) -> dict:
    """Puts a file in its place once it is right; raises what keeps it from that."""
    folder = tempfile.mkdtemp(dir=part)
    about = dict(repo_type="dataset", revision=stated["revision"], local_dir=folder)
    try:
        # Forced, or it would copy what lies in its cache, however broken.
        path = pathlib.Path(hf_hub_download(repo, name, force_download=True, **about))
        ((_, found),) = shards.examine(path.parent, [name], EOT)
        if not those_right([(name, found)], {name: stated}):
            of = "{size} bytes of sha256 {sha256}".format
            why = found.get("fault") or f"has {of(**found)} where {of(**stated)} are stated"
            raise OSError(f"it {why}")
        with path.open("rb+") as file:
            os.fsync(file.fileno())  # the name must not outlive a power cut without the bytes
        os.replace(path, out / name)
        return found
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def fetch_all(
    repo: str, stated: dict, part: pathlib.Path, out: pathlib.Path, keep: Callable
) -> dict[str, Exception]:
    """Fetches several files at once and calls `keep` with each that is in its place, and what was
    found in it; returns what has gone wrong with others."""
    total, wrong = sum(entry["size"] for entry in stated.values()), {}
    free = shutil.disk_usage(out).free
    if free < total + MARGIN:
        has = f"needs {(total + MARGIN) / 1e9:.1f} GB, {out} has {free / 1e9:.1f} GB free"
        refuse(f"{has}: make room or pass another --out")
    print(f"fetching {len(stated)} files, {total / 1e9:.1f} GB, to {out} ...", flush=True)
    pool = ThreadPoolExecutor(THREADS)
    running = {
        pool.submit(persistently, fetch, repo, name, entry, part, out): name
        for name, entry in stated.items()
    }
    for done, future in enumerate(as_completed(running), 1):
        try:
            keep({running[future]: future.result()})
            print(f"{running[future]} is there and right ({done} of {len(stated)})", flush=True)
        except Exception as error:
            wrong[running[future]] = error
        if len(wrong) >= THREADS:  # it is hardly the files
            break
    pool.shutdown(cancel_futures=True)
    return wrong


# ---- Run -----------------------------------------------------------------------------------------
def download(
    repo: str, names: list[str], revision: str | None, out: pathlib.Path
) -> tuple[dict[str, dict], int]:
    """Sees to it that all files are there and right, or exits. Returns the files of MANIFEST.json,
    and how many were fetched."""
    pinned = PINNED if repo == VARIANTS[""][0] else {}

    def right(stated: dict[str, dict]) -> dict[str, dict]:
        return those_right(shards.examine(out, stated, EOT), stated)

    def keep(found: dict[str, dict]) -> None:
        shards.stamp(out, found)
        files.update((name, stated[name]) for name in found)
        shards.write_manifest(out, repo, **shards.GPT2, files=files)

    files = read_files(out, repo)
    known = {name: files[name] for name in names if name in files}
    if len(right(known)) == len(names) and all(
        revision in (None, entry["revision"])
        and entry["sha256"] == pinned.get(name, entry["sha256"])
        for name, entry in known.items()
    ):
        return files, 0
    with shards.workplace(out) as part:
        files = read_files(out, repo)  # another process may have worked
        commits = {entry["revision"] for entry in files.values()}
        stated = ask(repo, names, revision or (commits.pop() if len(commits) == 1 else "main"))
        for name, entry in stated.items():
            sha256 = pinned.get(name, entry["sha256"])
            if sha256 != entry["sha256"]:
                other = f"{name} has sha256 {entry['sha256']} at the hub, not {sha256}"
                refuse(f"{other}: these are not the bytes that records are run on")
        there = right(stated)
        if there:
            keep(there)
        lacking = {name: entry for name, entry in stated.items() if name not in there}
        wrong = fetch_all(repo, lacking, part, out, keep) if lacking else {}
        if wrong:
            why = explain(next(iter(wrong.values())), repo, stated[names[0]]["revision"])
            refuse(f"could not fetch {', '.join(wrong)}: {why}; run this again to go on")
    return files, len(lacking)


def arguments() -> tuple[str, list[str], str | None, pathlib.Path]:
    """Repository, names of the files, revision and folder."""
    cli = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    help = "training shards; default: %(default)s, which the record reads"
    cli.add_argument("n", type=int, nargs="?", metavar="N", default=RECORD_SHARDS, help=help)
    which = cli.add_mutually_exclusive_group()
    const = dict(dest="flag", action="store_const")
    which.add_argument("--edu", const="edu", default="", help="FineWeb-Edu, 10B tokens", **const)
    which.add_argument("--100B", const="100B", help="FineWeb, 100B tokens", **const)
    cli.add_argument("--revision", help="commit or branch; default: MANIFEST.json's, or main")
    cli.add_argument("--out", type=pathlib.Path, help="folder; default: one for the data set here")
    args = cli.parse_args()
    (repo, prefix, count), n = VARIANTS[args.flag], args.n
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
    what = f"{len(names)} files, {size:.1f} GB, revision {commits}, are there and right"
    print(f"{out}: {what}, {fetched} of them fetched now")


if __name__ == "__main__":
    main()
