"""Reads every shard of a folder and reports whether they can be trained on.

    python data/check.py DIR...

It checks headers and sizes, that names are numbered without a gap, and that no two shards are
equal; with a MANIFEST.json, also that exactly the listed shards are there with the listed sha256.
The exit status is 0 if all is right, and 1 if not. A run also compares tokens with its vocabulary.
"""

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))  # for PYTHONSAFEPATH=1
import shards
from messages import one_line, refuse


def check(folder: Path) -> int:
    """Prints a verdict on each shard of a folder. Returns how many things are wrong."""
    try:
        about, names = shards.read_folder(folder)
    except ValueError as error:
        print(f"{folder}: {error}")
        return 1
    print(f"{folder}: from {about.get('source', '? It has no MANIFEST.json to compare with')}")
    first_names = {}  # by sha256, to find copies
    wrong = 0
    for name in names:
        try:
            tokens = shards.load(folder / name)
            sha256 = shards.sha256(folder / name)
            if first_names.setdefault(sha256, name) != name:
                raise ValueError(f"has the bytes of {first_names[sha256]}: get it again")
            if about and about["files"].get(name, {}).get("sha256") != sha256:
                raise ValueError("has not the sha256 of MANIFEST.json: get it again")
            verdict = f"ok, {len(tokens):,} tokens"
        except (OSError, ValueError) as error:
            verdict = str(error)
            wrong += 1
        print(f"{name} {verdict}", flush=True)
    return wrong


@one_line("check.py")
def main() -> None:
    cli = argparse.ArgumentParser(description="Reads every shard, and says what is wrong.")
    cli.error = refuse
    cli.add_argument("folders", type=Path, nargs="+", metavar="DIR")
    wrong = sum(check(folder) for folder in cli.parse_args().folders)
    print(f"{wrong or 'nothing'} wrong")
    sys.exit(wrong > 0)


if __name__ == "__main__":
    main()
