"""Downloads FineWeb as GPT-2 tokens, which saves an hour of tokenizing.

    python data/cached_fineweb10B.py [N] [--edu | --100B] [--revision R] [--out DIR]

It downloads the validation shard and the first N training shards (200 MB, 100,000,000 tokens each)
of a data set on huggingface.co; without N, as many as the record reads. Every file, whether it came
now or earlier, must have the size and sha256 that the hub states. Only then does it get its name
and its entry in MANIFEST.json. After an interruption, run this again.
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
from typing import Any, NoReturn

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
# The sha256 of the files that the record reads, as the hub's pages of the first repository state
# it; we have not downloaded the files ourselves. It holds for every revision, because each file
# was uploaded only once.
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
RECORD_SHARDS = 7  # of 100 million tokens: 339 million are trained on, but long documents are cut
THREADS = 4  # files that are downloaded at once
PAUSES = 1, 2, 4  # seconds before each retry of a request that failed for a temporary reason
MARGIN = 10**8  # bytes to leave free on the disk
PATHS = 500  # per request, as huggingface_hub itself asks for


def refuse(message: str) -> NoReturn:
    """Exits with status 1 and one line."""
    sys.exit(f"cached_fineweb10B.py: {message}")


def printable(text: object) -> str:
    """One short line without control characters. A server may have written the text."""
    characters = [c if c.isprintable() else " " for c in str(text)]
    return " ".join("".join(characters).split())[:300]


# ---- Errors --------------------------------------------------------------------------------------
def cause(error: Exception) -> tuple[Exception, int]:
    """The error that huggingface_hub may hide behind "Force download failed", and the HTTP status
    of the server's answer, or 0 if there was none."""
    if type(error) is ValueError and error.__cause__:
        error = error.__cause__
    return error, getattr(getattr(error, "response", None), "status_code", 0)


def is_temporary(error: Exception) -> bool:
    """Whether a retry may help: not after a refusal, nor after an error of the disk (errno)."""
    error, status = cause(error)
    if status:
        return status in (408, 429) or status >= 500
    return not getattr(error, "errno", None)


def persistently(call: Callable[..., Any], *args: Any, **keywords: Any) -> Any:
    """Calls a function, and after a temporary error again: at most 1 + len(PAUSES) times. Returns
    what it returns, or raises its last error."""
    for pause in PAUSES:
        try:
            return call(*args, **keywords)
        except Exception as error:
            if not is_temporary(error):
                raise
        time.sleep(pause)
    return call(*args, **keywords)


def explain(error: Exception, repo: str, revision: str) -> str:
    """What happened and what to do, in one line."""
    error, status = cause(error)
    why = printable(error) or type(error).__name__
    hub = printable(constants.ENDPOINT)
    if isinstance(error, errors.RepositoryNotFoundError):
        return f"{repo} does not exist or is private: set HF_TOKEN to a token that may read it"
    if isinstance(error, errors.RevisionNotFoundError):
        return f"{repo} has no revision {printable(revision)}: pass another --revision, as main"
    if status == 401:
        return f"{hub} refuses the token: set HF_TOKEN to a valid one, or unset it ({why})"
    if status:
        return f"{hub} answers with status {status}: try again later ({why})"
    if type(error) is OSError or getattr(error, "errno", None):  # raised by fetch(), or by the disk
        return why
    return f"{hub} cannot be reached: check network, proxy, HF_ENDPOINT, HF_HUB_OFFLINE ({why})"


# ---- Files ---------------------------------------------------------------------------------------
def read_files(out: pathlib.Path, repo: str) -> dict[str, dict]:
    """The `files` of MANIFEST.json; exits if it is broken, or of another data set."""
    try:
        about = shards.read_manifest(out)
    except shards.Fault as fault:
        refuse(f"{out} {fault}")
    if about and about["source"] != repo:
        refuse(f"{out} holds another data set, {printable(about['source'])}: pass another --out")
    return about.get("files", {})


def as_stated(found: Iterable[tuple[str, dict]], stated: dict[str, dict]) -> dict[str, dict]:
    """Those of the files whose size and sha256 are the stated ones."""
    right = {}
    for name, facts in found:
        if all(facts.get(key) == stated[name][key] for key in ("size", "sha256")):
            right[name] = facts
    return right


# ---- Hub -----------------------------------------------------------------------------------------
def ask(repo: str, names: list[str], revision: str) -> dict[str, dict]:
    """{name: size, sha256 and revision} of all files, as the hub states them; exits if it does
    not."""
    api = HfApi()
    timeout = constants.HF_HUB_DOWNLOAD_TIMEOUT
    stated = {}
    try:
        token = get_token() or ""
        if not token.isascii() or not token.isprintable():
            refuse("HF_TOKEN holds characters that no token has: set it anew, or unset it")
        info = persistently(api.dataset_info, repo, revision=revision, timeout=timeout)
        about = dict(repo_type="dataset", revision=info.sha)
        for start in range(0, len(names), PATHS):
            # get_paths_info has no parameter for the timeout, and would wait forever.
            get_session().timeout = timeout
            paths = names[start : start + PATHS]
            for file in persistently(api.get_paths_info, repo, paths, **about):
                lfs = getattr(file, "lfs", None)  # a folder has no such attribute
                if lfs:
                    facts = dict(size=file.size, sha256=lfs.sha256, revision=info.sha)
                    stated[file.path] = facts
    except Exception as error:
        refuse(explain(error, repo, revision))
    for name in names:
        if name not in stated:
            where = f"{repo} at revision {printable(revision)}"
            refuse(f"{where} has no {name}, or no sha256 of it: pass another --revision")
    return {name: stated[name] for name in names}


def fetch(repo: str, name: str, stated: dict, part: pathlib.Path, out: pathlib.Path) -> dict:
    """Downloads a file to a folder in `part`, checks it, and moves it to `out`. Returns what
    shards.inspect() found in it; raises OSError if that is not what is stated."""
    folder = tempfile.mkdtemp(dir=part)
    about = dict(repo_type="dataset", revision=stated["revision"], local_dir=folder)
    try:
        # Forced, because otherwise it would copy a file from its cache even if that is broken.
        path = pathlib.Path(hf_hub_download(repo, name, force_download=True, **about))
        [(_, found)] = shards.examine(path.parent, [name], EOT)
        if "fault" in found:
            raise OSError(f"it {found['fault']}")
        if not as_stated([(name, found)], {name: stated}):
            form = "{size} bytes of sha256 {sha256}"
            raise OSError(f"it has {form.format(**found)} where {form.format(**stated)} are stated")
        with path.open("rb+") as file:
            os.fsync(file.fileno())  # a power cut must not leave the name without the bytes
        os.replace(path, out / name)
        return found
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def fetch_all(
    repo: str, stated: dict, part: pathlib.Path, out: pathlib.Path, add: Callable
) -> dict[str, Exception]:
    """Downloads several files at once. Calls add({name: what fetch() returned}) for every file
    that is complete; returns {name: error} for the others."""
    total = sum(entry["size"] for entry in stated.values())
    free = shutil.disk_usage(out).free
    if free < total + MARGIN:
        sizes = f"needs {(total + MARGIN) / 1e9:.1f} GB, {out} has {free / 1e9:.1f} GB free"
        refuse(f"{sizes}: make room or pass another --out")
    print(f"fetching {len(stated)} files, {total / 1e9:.1f} GB, to {out} ...", flush=True)
    pool = ThreadPoolExecutor(THREADS)
    running = {
        pool.submit(persistently, fetch, repo, name, entry, part, out): name
        for name, entry in stated.items()
    }
    errors = {}
    for done, future in enumerate(as_completed(running), 1):
        name = running[future]
        try:
            add({name: future.result()})
            print(f"{name} is there and right ({done} of {len(stated)})", flush=True)
        except Exception as error:
            errors[name] = error
        if len(errors) >= THREADS:  # the cause is hardly in the files
            break
    pool.shutdown(cancel_futures=True)
    return errors


# ---- Run -----------------------------------------------------------------------------------------
def download(
    repo: str, names: list[str], revision: str | None, out: pathlib.Path
) -> tuple[dict[str, dict], int]:
    """Downloads the files that are missing or wrong; exits if it cannot. Returns the `files` of
    MANIFEST.json, and how many were downloaded."""
    pinned = PINNED if repo == VARIANTS[""][0] else {}

    def present(stated: dict[str, dict]) -> dict[str, dict]:
        return as_stated(shards.examine(out, stated, EOT), stated)

    def is_wanted(name: str, entry: dict) -> bool:
        is_of_revision = revision is None or entry["revision"] == revision
        return is_of_revision and entry["sha256"] == pinned.get(name, entry["sha256"])

    def add(found: dict[str, dict]) -> None:
        shards.stamp(out, found)
        files.update((name, stated[name]) for name in found)
        shards.write_manifest(out, repo, **shards.GPT2, files=files)

    files = read_files(out, repo)
    known = {name: files[name] for name in names if name in files}
    is_complete = len(present(known)) == len(names)
    if is_complete and all(is_wanted(name, entry) for name, entry in known.items()):
        return files, 0
    with shards.workplace(out) as part:
        files = read_files(out, repo)  # another process may have added some
        if revision is None:  # all files should be of one commit
            commits = {entry["revision"] for entry in files.values()}
            revision = commits.pop() if len(commits) == 1 else "main"
        stated = ask(repo, names, revision)
        for name, entry in stated.items():
            sha256 = pinned.get(name, entry["sha256"])
            if sha256 != entry["sha256"]:
                other = f"{name} has sha256 {entry['sha256']} at the hub, not {sha256}"
                refuse(f"{other}: these are not the bytes that records are run on")
        right = present(stated)
        if right:
            add(right)
        missing = {name: entry for name, entry in stated.items() if name not in right}
        errors = fetch_all(repo, missing, part, out, add) if missing else {}
        if errors:
            first_error = [*errors.values()][0]
            why = explain(first_error, repo, stated[names[0]]["revision"])
            refuse(f"could not fetch {', '.join(errors)}: {why}; run this again to go on")
    return files, len(missing)


def arguments() -> tuple[str, list[str], str | None, pathlib.Path]:
    """From the command line: repository, names of the files, revision and folder."""
    cli = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    help = "training shards; default: %(default)s, which the record reads"
    cli.add_argument("n", type=int, nargs="?", metavar="N", default=RECORD_SHARDS, help=help)
    which = cli.add_mutually_exclusive_group()
    const = dict(dest="flag", action="store_const")
    which.add_argument("--edu", const="edu", default="", help="FineWeb-Edu, 10B tokens", **const)
    which.add_argument("--100B", const="100B", help="FineWeb, 100B tokens", **const)
    cli.add_argument("--revision", help="commit or branch; default: MANIFEST.json's, or main")
    cli.add_argument("--out", type=pathlib.Path, help="folder; default: data/<data set>")
    args = cli.parse_args()
    repo, prefix, count = VARIANTS[args.flag]
    if not 1 <= args.n <= count:
        cli.error(f"{repo} has {count} training shards; {args.n} is not from 1 to {count}")
    names = [f"{prefix}_val_000000.bin"]
    names += [f"{prefix}_train_{i:06}.bin" for i in range(1, args.n + 1)]
    folder = HERE / repo.removeprefix("kjj0/").removesuffix("-gpt2")
    return repo, names, args.revision, args.out or folder


def leave(status: int, message: str) -> None:
    """Ends the process at once, because sys.exit would wait for threads that hang in a read."""
    print(f"cached_fineweb10B.py: {message}", file=sys.stderr)
    sys.stdout.flush()
    os._exit(status)


def main():
    warnings.simplefilter("ignore")  # from huggingface_hub
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
