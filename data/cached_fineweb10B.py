"""Downloads FineWeb as GPT-2 tokens, which saves an hour of tokenizing.

    python data/cached_fineweb10B.py [N] [--edu | --100B] [--revision R] [--out DIR]

It downloads the validation shard and the first N training shards (200 MB, 100,000,000 tokens each)
of a data set on huggingface.co. Without N, it downloads as many as the record reads. A file gets
its name and its entry in MANIFEST.json only if it has the sha256 that the hub states. After an
interruption, run this again: it keeps the files that were complete. If all files are there and
right, it does not need the network, also if they were copied by hand and are those of the record.
"""

import os
import pathlib
import shutil
import signal
import sys
from typing import NoReturn

try:
    from huggingface_hub import HfApi, constants, errors, snapshot_download
    from huggingface_hub.utils import tqdm
except ValueError as error:  # of a time limit
    what = f"HF_HUB_DOWNLOAD_TIMEOUT or HF_HUB_ETAG_TIMEOUT is no whole number ({error})"
    sys.exit(f"cached_fineweb10B.py: {what}: correct it, or unset it")

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent))  # for PYTHONSAFEPATH=1
import shards
from messages import Parser

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
MARGIN = 10**8  # bytes to leave free on the disk


def pins(repo: str) -> dict[str, str]:
    """{name: sha256} of the files whose bytes are pinned. FineWeb 100B has other files of the same
    names, which are not."""
    return PINNED if repo == VARIANTS[""][0] else {}


def refuse(message: str) -> NoReturn:
    """Exits with status 1 and one line."""
    sys.exit(f"cached_fineweb10B.py: {message}")


def explain(error: Exception, repo: str, revision: str) -> str:
    """What went wrong in a call of huggingface_hub and what to do about it, in one line."""
    if isinstance(error, errors.LocalEntryNotFoundError):  # it only says that no copy is here
        error = error.__cause__ or error
    why = " ".join(str(error).split())[:300].rstrip(".") or type(error).__name__
    hub = constants.ENDPOINT
    if isinstance(error, errors.RepositoryNotFoundError):
        return f"{repo} does not exist or is private: set HF_TOKEN to a token that may read it"
    if isinstance(error, errors.RevisionNotFoundError):
        return f"{repo} has no revision {revision}: pass another --revision, such as main"
    if isinstance(error, errors.HfHubHTTPError):
        if error.response.status_code == 401:
            return f"{hub} refuses the token: set HF_TOKEN to a valid one, or unset it ({why})"
        return f"{hub} answers with an error, so try again later: {why}"
    if isinstance(error, UnicodeEncodeError):  # where a header of HTTP gets the token
        return "HF_TOKEN has a character that no token has: correct it, or unset it"
    fault = shards.certificate_fault("SSL_CERT_FILE", "SSL_CERT_DIR")
    if fault:
        return fault
    if shards.is_of_system(error) and not isinstance(error, ConnectionError):
        return shards.reason(error)  # the disk, a file that was cut, or threads
    return f"cannot reach {hub}: {why}. Check the network, the proxy, HF_ENDPOINT, HF_HUB_OFFLINE"


def find_faults(folder: pathlib.Path, stated: dict[str, dict]) -> dict[str, str]:
    """{name: what is wrong} of the stated files that a folder lacks, that are not shards, or that
    have another sha256. A file is read only if it has changed since shards.py read it last."""
    faults = {}
    for name, found in shards.examine(folder, stated, EOT):
        sha256 = stated[name]["sha256"]
        if "fault" in found:
            faults[name] = found["fault"]
        elif found["sha256"] != sha256:
            faults[name] = f"has other bytes: sha256 {found['sha256']}, not {sha256}"
    return faults


def read_files(out: pathlib.Path, repo: str) -> dict[str, dict]:
    """The `files` of MANIFEST.json. Exits if it is broken or belongs to another data set."""
    try:
        about = shards.read_manifest(out)
    except shards.Fault as fault:
        refuse(f"{out} {fault}")
    if about and about["source"] != repo:
        refuse(f"{out} has another data set, {about['source']}: pass another --out")
    return about.get("files", {})


def needed(out: pathlib.Path, faults: dict[str, str]) -> str:
    """Why the hub is asked for files, and what to do without it."""
    first = [*faults][0]
    for path in (*out.glob(f"[!.]*/{first}"), *out.glob(f"[!.]*/[!.]*/{first}")):
        return f"{path} is there: move such files to {out}, or pass --out {path.parent}"
    what = []
    for name, fault in faults.items():
        fault = fault.partition(":")[0] if (out / name).exists() else "is missing"
        what.append(f"{name} {fault}")
    if len(what) > 8:
        what[8:] = [f"and {len(what) - 8} more"]
    way = f"copy right files to {out}, or train on those there by ./run.sh PRESET --data {out}"
    return f"The hub is needed because {'; '.join(what)}. Without a network, {way}"


def add_to_manifest(out: pathlib.Path, repo: str, files: dict, known: dict[str, dict]) -> None:
    """Adds `known` files, which are there and right, to `files` and to MANIFEST.json."""
    listed = {**files}
    for name, entry in known.items():
        files[name] = dict(size=(out / name).stat().st_size) | entry
    if files == listed:
        return
    try:
        with shards.workplace(out):  # for its lock
            files.update(read_files(out, repo) | files)  # another process may have added some
            shards.write_manifest(out, repo, **shards.GPT2, files=files)
    except OSError as error:  # the folder may be read-only
        print(f"all files are right, but MANIFEST.json is not written: {shards.reason(error)}")


def ask(repo: str, names: list[str], revision: str) -> dict[str, dict]:
    """{name: size, sha256 and revision} of the files, as the hub states them. Raises shards.Fault
    if the hub cannot be asked. Exits if it does not have a file, or states another sha256 than the
    pinned one."""
    timeout = constants.HF_HUB_DOWNLOAD_TIMEOUT
    try:
        info = HfApi().dataset_info(repo, revision=revision, files_metadata=True, timeout=timeout)
    except Exception as error:
        raise shards.Fault(explain(error, repo, revision)) from None
    lfs = {file.rfilename: file.lfs for file in info.siblings}
    stated = {}
    for name in names:
        if not lfs.get(name):
            where = f"{repo} at revision {revision}"
            refuse(f"{where} has no {name}, or no sha256 of it: pass another --revision")
        sha256 = lfs[name].sha256
        if sha256 != pins(repo).get(name, sha256):
            other = f"{name} has sha256 {sha256} at the hub, not {PINNED[name]}"
            refuse(f"{other}: these are not the bytes that records are run on")
        stated[name] = dict(size=lfs[name].size, sha256=sha256, revision=info.sha)
    return stated


def fetch(repo: str, stated: dict[str, dict], out: pathlib.Path) -> dict[str, str]:
    """Downloads files of one revision, and moves those to `out` that are right. Returns
    {name: what is wrong} of the others. Exits if the disk is too small or the download fails."""
    part = out / ".download"  # stays after an interruption, with the files that are complete
    if part.is_symlink():
        refuse(f"{part} is a link to {os.readlink(part)}: remove it, and a folder is made there")
    for abandoned in part.rglob("*.incomplete"):  # huggingface_hub does not continue these
        abandoned.unlink()
    needed = sum(entry["size"] for name, entry in stated.items() if not (part / name).exists())
    free = shutil.disk_usage(out).free
    if free < needed + MARGIN:
        sizes = f"needs {(needed + MARGIN) / 1e9:.1f} GB, but {out} has {free / 1e9:.1f} GB free"
        refuse(f"{sizes}: make room or pass another --out")
    print(f"downloading {needed / 1e9:.2f} GB to {out} ...", flush=True)
    (revision,) = {entry["revision"] for entry in stated.values()}
    about = dict(repo_type="dataset", revision=revision, allow_patterns=[*stated])
    try:
        snapshot_download(repo, local_dir=part, **about)
    except Exception as error:
        refuse(f"{explain(error, repo, revision)}. Run this again to go on")
    finally:
        for bar in [*tqdm._instances]:  # the next line would be printed over open bars
            bar.close()
    faults = find_faults(part, stated)
    shards.stamp(out, shards.read_stamp(part))  # check.py need not read the files again
    for name in stated:
        if name in faults:
            (part / name).unlink(missing_ok=True)  # otherwise it would count as complete
        else:
            with (part / name).open("rb+") as file:
                os.fsync(file.fileno())  # a power cut must not leave the name without the bytes
            os.replace(part / name, out / name)
    if not faults:
        shutil.rmtree(part)
    return faults


def download(
    repo: str, names: list[str], revision: str | None, out: pathlib.Path
) -> tuple[dict[str, dict], int]:
    """Downloads the files that are missing or wrong. Returns the `files` of MANIFEST.json, and how
    many were downloaded. Exits if not all files are there and right in the end."""
    files = read_files(out, repo)
    faults = {}
    known = {}
    for name in names:
        pin = pins(repo).get(name)
        entry = files.get(name)
        if pin and (entry is None or entry["sha256"] != pin):
            entry = dict(sha256=pin)  # it may have been copied by hand
        if entry and revision in (None, entry.get("revision")):
            known[name] = entry
        else:
            faults[name] = "has no sha256 in MANIFEST.json"
    faults |= find_faults(out, known)
    if not faults:
        add_to_manifest(out, repo, files, known)
        return files, 0
    with shards.workplace(out):  # for its lock
        files = read_files(out, repo)  # another process may have added some
        if revision is None:  # all files should be of one commit
            commits = {entry["revision"] for entry in files.values() if "revision" in entry}
            revision = commits.pop() if len(commits) == 1 else "main"
        try:
            stated = ask(repo, names, revision)
        except shards.Fault as fault:
            refuse(f"{fault}. {needed(out, faults)}")
        missing = {name: stated[name] for name in find_faults(out, stated)}
        faults = fetch(repo, missing, out) if missing else {}
        files |= {name: entry for name, entry in stated.items() if name not in faults}
        shards.write_manifest(out, repo, **shards.GPT2, files=files)
    if faults:
        what = "; ".join(f"{name} {fault}" for name, fault in faults.items())
        refuse(f"downloaded wrong files and deleted them, so run this again: {what}")
    return files, len(missing)


def arguments() -> tuple[str, list[str], str | None, pathlib.Path]:
    """From the command line: repository, names of the files, revision and folder."""
    cli = Parser(description=__doc__)
    help = "training shards; default: %(default)s, which the record reads"
    cli.add_argument("n", type=int, nargs="?", metavar="N", default=RECORD_SHARDS, help=help)
    which = cli.add_mutually_exclusive_group()
    const = dict(dest="flag", action="store_const")
    which.add_argument("--edu", const="edu", default="", help="FineWeb-Edu, 10B tokens", **const)
    which.add_argument("--100B", const="100B", help="FineWeb, 100B tokens", **const)
    cli.add_argument("--revision", help="commit or branch; default: MANIFEST.json's, or main")
    cli.add_argument("--out", type=shards.folder_name, help="folder; default: data/<data set>")
    args = cli.parse_args()
    repo, prefix, count = VARIANTS[args.flag]
    if not 1 <= args.n <= count:
        cli.error(f"{repo} has {count} training shards; {args.n} is not from 1 to {count}")
    names = [f"{prefix}_val_000000.bin"]
    names += [f"{prefix}_train_{i:06}.bin" for i in range(1, args.n + 1)]
    folder = HERE / repo.removeprefix("kjj0/").removesuffix("-gpt2")
    return repo, names, args.revision, args.out or folder


def stop(*_: object) -> NoReturn:
    """Ends the process at Ctrl-C. KeyboardInterrupt would first wait for all running downloads."""
    print("\ncached_fineweb10B.py: interrupted: run this again to go on", file=sys.stderr)
    sys.stdout.flush()
    os._exit(130)


@shards.one_line("cached_fineweb10B.py")
def main():
    signal.signal(signal.SIGINT, stop)
    repo, names, revision, out = arguments()
    files, fetched = download(repo, names, revision, out)
    commits = ", ".join(sorted({files[name].get("revision", "unknown")[:12] for name in names}))
    size = sum(files[name]["size"] for name in names) / 1e9
    what = f"{len(names)} files, {size:.1f} GB, revision {commits}, are there and right"
    print(f"{out}: {what}; {fetched} of them were downloaded now")


if __name__ == "__main__":
    main()
