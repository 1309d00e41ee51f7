"""Reads every shard of a folder and says whether it can be trained on.

    python data/check.py [DIR ...] [--vocab N] [--eot N]

Checks what train_gpt.py checks before it trains, with its reader, and in all shards there are:
header, exact size, names without a gap, tokens below the vocabulary, a document start, sha256 as
in MANIFEST.json, every file there that it lists, none there twice. (How many documents may start
in a sequence depends on the --T of a run, and is left to it.) Without DIR it checks every folder
of shards beside this script. Exit status: 0 if all is right, 1 if not, 2 for bad arguments.
"""

import argparse
import collections
import concurrent.futures
import os
import pathlib
import sys

HERE = pathlib.Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))

import train_gpt  # noqa: E402

RECORD = train_gpt.PRESETS["record"]


def check(path: pathlib.Path, about: dict, vocab: int, eot: int) -> tuple[dict, str | None]:
    """What is in a shard, as far as it can be read, and what is wrong with it."""
    shard = train_gpt.open_shard(path)
    if isinstance(shard, str):
        return {}, shard
    found = train_gpt.inspect(shard, RECORD.T, eot)
    return found, train_gpt.wrong(found, about, vocab, eot)


def check_all(folder: pathlib.Path, vocab: int | None, eot: int | None) -> list[str]:
    """Prints a table of the shards of a folder; returns what is wrong, a line each."""
    if isinstance(known := train_gpt.read_folder(folder), str):
        return [f"{folder} {known}"]
    about, splits = known
    vocab = about.get("vocab", RECORD.vocab) if vocab is None else vocab
    eot = about.get("eot", RECORD.eot) if eot is None else eot
    names = {p: train_gpt.misnamed(row, i) for row in splits.values() for i, p in enumerate(row)}
    faults = [f"{folder} has no {split} shard" for split in splits if not splits[split]]
    first_of, total = {}, collections.Counter()
    print(f"{folder}: --vocab {vocab} --eot {eot}{'' if about else ', no MANIFEST.json'}")
    print(f"{'file':30} {'tokens':>13} {'documents':>10} {'mean':>8}  verdict")
    with concurrent.futures.ThreadPoolExecutor() as pool:
        checks = pool.map(lambda path: check(path, about, vocab, eot), names)
        for (path, misnamed), (found, fault) in zip(names.items(), checks, strict=True):
            twin = first_of.setdefault(found.get("sha256", path), path)
            fault = misnamed or fault or (twin != path and f"has the bytes of {twin.name}") or None
            faults += [f"{path}: {fault}"] if fault else []
            tokens, documents = (found.get(key, 0) for key in ("tokens", "documents"))
            total.update(tokens=tokens, documents=documents)
            mean = f"{tokens / documents:,.0f}" if documents else "-"
            numbers = f"{tokens:13,} {documents:10,} {mean:>8}"
            print(f"{path.name:30} {numbers}  {fault or 'ok'}", flush=True)
    print(f"{len(names)} shards, {total['tokens']:,} tokens, {total['documents']:,} documents")
    return faults


def main():
    cli = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    cli.add_argument("folders", type=pathlib.Path, nargs="*", metavar="DIR")
    cli.add_argument("--vocab", type=int, help="default: as MANIFEST.json says, or GPT-2's")
    cli.add_argument("--eot", type=int, help="default: as MANIFEST.json says, or GPT-2's")
    args = cli.parse_args()
    folders = args.folders or sorted({path.parent for path in HERE.glob("*/*.bin")})
    if not folders:
        sys.exit("check.py: there are no shards in data/; data/README.md says how to get some")
    try:
        faults = [fault for f in folders for fault in check_all(f, args.vocab, args.eot)]
    except KeyboardInterrupt:
        print("check.py: stopped by Ctrl-C", file=sys.stderr, flush=True)
        os._exit(130)  # the threads would go on to the end of their shards
    if faults:
        sys.exit("\n".join(f"check.py: {fault}" for fault in faults))


if __name__ == "__main__":
    main()
