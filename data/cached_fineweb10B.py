"""Downloads FineWeb10B as GPT-2 tokens, so that nobody has to tokenize it for an hour.

    python data/cached_fineweb10B.py [N]

fetches the validation shard and the first N of 103 training shards (200 MB each) from the data
set kjj0/fineweb10B-gpt2. A training shard holds 100,000,000 tokens, 254 steps of the record.
"""

import argparse
import pathlib
import sys

from huggingface_hub import hf_hub_download

REPO = "kjj0/fineweb10B-gpt2"
FOLDER = pathlib.Path(__file__).resolve().parent / "fineweb10B"
ALL = 103
RECORD = 7  # 1770 steps of 393,216 tokens are 6.96 shards
MAGIC = 20240520  # llm.c's dev/data/data_common.py


def whole(path: pathlib.Path) -> bool:
    """Whether all the tokens are there that the header of 256 int32 promises."""
    if not path.is_file():
        return False
    with path.open("rb") as file:
        header = file.read(1024)
    magic, count = (int.from_bytes(header[at : at + 4], "little") for at in (0, 8))
    return magic == MAGIC and path.stat().st_size == 1024 + 2 * count


def fetch(name: str):
    path = FOLDER / name
    if whole(path):
        return
    try:
        # `force_download` where a file is there but broken: the hub might take it for the real one.
        hf_hub_download(
            REPO, name, repo_type="dataset", local_dir=FOLDER, force_download=path.exists()
        )
    except Exception as error:  # of the network, the disk, the hub: each one has its own classes
        reason = " ".join(str(error).split()) or type(error).__name__
        sys.exit(f"cached_fineweb10B.py: {name} could not be fetched: {reason}")
    if not whole(path):
        sys.exit(f"cached_fineweb10B.py: {name} came incomplete; please run this again")


def main():
    cli = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    cli.add_argument("n", type=int, nargs="?", default=RECORD, help=f"1 to {ALL}, default {RECORD}")
    n = cli.parse_args().n
    if not 1 <= n <= ALL:
        cli.error(f"there are {ALL} training shards; {n} is not from 1 to {ALL}")
    fetch("fineweb_val_000000.bin")
    for shard in range(1, n + 1):
        fetch(f"fineweb_train_{shard:06d}.bin")
    print(f"{FOLDER}: the validation shard and {n} training shards are there")


if __name__ == "__main__":
    main()
