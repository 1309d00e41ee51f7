"""Reads every shard of a folder and reports whether they can be trained on.

    python data/check.py [DIR ...] [--quick]

It checks that headers and sizes are right, that names are numbered without a gap, and that no two
shards are equal. If there is a MANIFEST.json, it also checks that exactly the listed shards are
there with the listed sha256, that tokens are below the vocabulary, and that every shard has the
start of a document. --quick, which run.sh passes, reads only files whose size or time of change
differs from when they were last read, and goes on where nobody reads what it prints, because a run
follows. Without DIR, every folder of shards beside this script is checked. Exit status: 0 if all is
right, 1 if not, 2 for bad arguments.
"""

import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent))  # for PYTHONSAFEPATH=1
import shards
from messages import Parser, discard_output

HERE = pathlib.Path(__file__).resolve().parent


def check(folder: pathlib.Path, quick: bool) -> list[str]:
    """Prints a table of the shards of a folder, or with `quick` one line. Returns a line for each
    thing that is wrong."""
    start = f"checking {folder} ... " if quick else f"{folder}:"
    say(start, quick, end="")
    try:
        about, names = shards.read_folder(folder)
    except shards.Fault as fault:
        say("", quick)
        return [f"{folder} {fault}"]
    if not quick:
        if about:
            print(f" vocabulary {about['vocab']}, EOT {about['eot']}, from {about['source']}")
        else:
            print(" no MANIFEST.json, so sha256 and vocabulary are not checked")
        print(f"{'file':30} {'tokens':>13} {'documents':>10} {'mean':>8}  verdict")
    faults = []
    all_tokens = 0
    all_documents = 0
    for name, found, fault in shards.check(folder, about, names, quick):
        tokens = found.get("tokens", 0)
        documents = found.get("documents", 0)
        all_tokens += tokens
        all_documents += documents
        if fault:
            faults.append(f"{folder / name} {fault}")
        if not quick:
            mean = f"{tokens / documents:,.0f}" if documents else "-"
            numbers = f"{tokens:13,} {documents:10,} {mean:>8}"
            print(f"{name:30} {numbers}  {fault or 'ok'}", flush=True)
    summary = f"{len(names)} shards, {all_tokens:,} tokens, {all_documents:,} documents"
    say(f"{summary}, {len(faults) or 'nothing'} wrong", quick)
    return faults


def say(text: str, quick: bool, end: str = "\n") -> None:
    """Prints a text. With `quick` it is lost if nobody reads it."""
    try:
        print(text, end=end, flush=True)
    except BrokenPipeError:
        if not quick:
            raise
        discard_output()


@shards.one_line("check.py")
def main():
    cli = Parser(description=__doc__)
    cli.add_argument("folders", type=shards.folder_name, nargs="*", metavar="DIR")
    cli.add_argument("--quick", action="store_true", help="read only what is new or changed")
    args = cli.parse_args()
    folders = args.folders or sorted({path.parent for path in HERE.glob("*/*.bin")})
    if not folders:
        sys.exit("check.py: there are no shards in data/: data/README.md says how to get some")
    faults = [fault for folder in folders for fault in check(folder, args.quick)]
    if faults:
        sys.exit("\n".join(f"check.py: {fault}" for fault in faults))


if __name__ == "__main__":
    main()
