"""Reads every shard of a folder and says whether it can be trained on.

    python data/check.py [DIR ...] [--quick]

Checks header, exact size, names without a gap, and that no shard stands there twice; and, where a
MANIFEST.json says what they should be, sha256, that all files are there and no others, tokens below
the vocabulary, a document start. --quick, as run.sh calls it, reads only what has another size or
time of change than when it was last read. Without DIR it checks every folder of shards beside this
script. Exit status: 0 if all is right, 1 if not, 2 for bad arguments.
"""

import argparse
import collections
import os
import pathlib
import sys

import shards

HERE = pathlib.Path(__file__).resolve().parent


def check(folder: pathlib.Path, quick: bool) -> list[str]:
    """Prints a table of the shards of a folder, or a line; returns what is wrong, a line each."""
    print(f"checking {folder} ... " if quick else f"{folder}:", end="", flush=True)
    try:
        about, names = shards.read_folder(folder)
    except shards.Fault as fault:
        print()
        return [f"{folder} {fault}"]
    if not quick:
        facts = "vocabulary {vocab}, EOT {eot}, from {source}".format
        print(f" {facts(**about)}" if about else " no MANIFEST.json, so the bytes may be any")
        print(f"{'file':30} {'tokens':>13} {'documents':>10} {'mean':>8}  verdict")
    faults, total = [], collections.Counter(tokens=0, documents=0)
    for name, found, fault in shards.check(folder, about, names, quick):
        tokens, documents = found.get("tokens", 0), found.get("documents", 0)
        total.update(tokens=tokens, documents=documents)
        faults += [f"{folder / name} {fault}"] if fault else []
        if not quick:
            mean = f"{tokens / documents:,.0f}" if documents else "-"
            numbers = f"{tokens:13,} {documents:10,} {mean:>8}"
            print(f"{name:30} {numbers}  {fault or 'ok'}", flush=True)
    summary = f"{len(names)} shards, {total['tokens']:,} tokens, {total['documents']:,} documents"
    print(f"{summary}, {len(faults) or 'nothing'} wrong")
    return faults


def main():
    cli = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    cli.add_argument("folders", type=pathlib.Path, nargs="*", metavar="DIR")
    cli.add_argument("--quick", action="store_true", help="read only what is new or changed")
    args = cli.parse_args()
    folders = args.folders or sorted({path.parent for path in HERE.glob("*/*.bin")})
    if not folders:
        sys.exit("check.py: there are no shards in data/: data/README.md says how to get some")
    try:
        faults = [fault for folder in folders for fault in check(folder, args.quick)]
    except KeyboardInterrupt:
        print("check.py: stopped by Ctrl-C", file=sys.stderr, flush=True)
        os._exit(130)  # the threads would go on to the end of their shards
    if faults:
        sys.exit("\n".join(f"check.py: {fault}" for fault in faults))


if __name__ == "__main__":
    main()
