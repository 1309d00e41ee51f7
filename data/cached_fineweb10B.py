"""Downloads FineWeb as GPT-2 tokens, which saves an hour of tokenizing.

    python data/cached_fineweb10B.py [N] [--edu | --100B] [--out DIR]

It downloads the validation shard and the first N training shards (200 MB, 100,000,000 tokens each)
of a data set on huggingface.co. Without N, it downloads as many as the record reads. Every start
compares the sha256 of the files with what is pinned below, or else with MANIFEST.json, which has
what the hub stated; it downloads what is missing or different. If all are right, it does not need
the network, also if they were copied by hand and are those of the record.
"""

import argparse
import functools
import shutil
import signal
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))  # for PYTHONSAFEPATH=1
import shards
from messages import one_line, refuse

HERE = Path(__file__).resolve().parent
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


def wrong(out: Path, names: list[str], files: dict[str, dict]) -> list[str]:
    """Those of the named files that a folder lacks, or that do not have their sha256 in `files`."""
    with ThreadPoolExecutor(8) as pool:
        found = pool.map(lambda name: shards.sha256(out / name), names)
        pairs = zip(names, found, strict=True)
        return [name for name, sha256 in pairs if sha256 != files.get(name, {}).get("sha256")]


def fetch(repo: str, names: list[str], out: Path, files: dict[str, dict], pinned: dict) -> None:
    """Downloads those of the named files that have another sha256 than the hub states, or than is
    pinned, and enters all into `files`, for MANIFEST.json. Ends the tool if that fails."""
    from huggingface_hub import HfApi, snapshot_download  # here: most starts need no network

    try:
        info = HfApi().dataset_info(repo, revision="main", files_metadata=True)
        stated = {file.rfilename: file.lfs for file in info.siblings}
        for name in names:
            sha256 = pinned.get(name, stated[name].sha256)
            files[name] = dict(sha256=sha256, revision=info.sha)
        missing = wrong(out, names, files)
        print(f"downloading {len(missing)} files to {out} ...", flush=True)
        for name in missing:
            (out / name).unlink(missing_ok=True)  # huggingface_hub may take it for the right one
        about = dict(repo_type="dataset", revision=info.sha, allow_patterns=missing)
        snapshot_download(repo, local_dir=out, **about)
    except Exception as error:  # of the network, the hub, the disk
        refuse(f"{repo} is not all here and cannot be downloaded; run this again ({error!r})")
    broken = wrong(out, missing, files)
    for name in broken:
        (out / name).unlink(missing_ok=True)
    if broken:
        refuse(f"{', '.join(broken)}: downloaded with another sha256 and deleted; run this again")
    shutil.rmtree(out / ".cache", ignore_errors=True)  # what huggingface_hub notes of downloads


@one_line("cached_fineweb10B.py")
def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # otherwise it would wait for all downloads
    args = arguments()
    repo = f"kjj0/{args.set}-gpt2"
    pinned = PINNED if args.set == "fineweb10B" else {}  # 100B has other files of these names
    prefix = "finewebedu" if args.set == "finewebedu10B" else "fineweb"
    names = [f"{prefix}_val_000000.bin"]
    names += [f"{prefix}_train_{i:06}.bin" for i in range(1, args.n + 1)]
    out = args.out or HERE / args.set
    about = shards.read_manifest(out)
    if about and about["source"] != repo:
        refuse(f"{out} has another data set, {about['source']}: pass another --out")
    files = about.get("files", {})
    for name in pinned.keys() & names:
        files[name] = files.get(name, {}) | dict(sha256=pinned[name])
    missing = wrong(out, names, files)
    if missing:
        fetch(repo, missing, out, files, pinned)
    shards.write_manifest(out, repo, **shards.GPT2, files=files)
    print(f"{out}: {len(names)} files are there and right")


def arguments() -> argparse.Namespace:
    """The command line's arguments."""
    cli = argparse.ArgumentParser(description="Downloads FineWeb as GPT-2 tokens.")
    cli.error = refuse
    help = "training shards; default: %(default)s, which the record reads"
    cli.add_argument("n", type=int, nargs="?", metavar="N", default=len(PINNED) - 1, help=help)
    which = cli.add_mutually_exclusive_group()
    add = functools.partial(which.add_argument, action="store_const", dest="set")
    add("--edu", const="finewebedu10B", default="fineweb10B", help="FineWeb-Edu, 10B tokens")
    add("--100B", const="fineweb100B", help="FineWeb, 100B tokens")
    cli.add_argument("--out", type=Path, help="folder; default: data/<data set>")
    return cli.parse_args()


if __name__ == "__main__":
    main()
