"""Downloads HellaSwag's validation set, which evals/hellaswag.py scores.

    python data/cached_hellaswag.py

The file, 10,042 rows of parquet, comes from a pinned revision of its author's repository on the
hub. Two public sources state the sha256 below; we have not downloaded the file ourselves.
"""

import argparse
import hashlib
import json
import pathlib
import sys
from collections.abc import Iterator

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent))  # for PYTHONSAFEPATH=1
import shards
from cached_fineweb10B import explain

REPO, COMMIT = "Rowan/hellaswag", "218ec52e09a7e7462a5400043bb9a69a41d06b76"
NAME = "data/validation-00000-of-00001.parquet"
SHA256 = "899813071e1e95efafec90f856e1987d2150fa4d020fc005df6962c259f660cd"
OUT = pathlib.Path(__file__).resolve().parent / "hellaswag"


def fetch() -> pathlib.Path:
    """The path of the file, which is downloaded once; raises shards.Fault."""
    path = OUT / NAME
    if not path.exists():
        print(f"downloading HellaSwag to {OUT} ...", file=sys.stderr)
        # Not at the top: `explain` is of a script that says why this cannot be imported.
        from huggingface_hub import HfApi, hf_hub_download

        try:
            # Without a network this fails at once, where hf_hub_download() tries for 25 seconds.
            HfApi().dataset_info(REPO, revision=COMMIT, timeout=10)
            hf_hub_download(REPO, NAME, repo_type="dataset", revision=COMMIT, local_dir=OUT)
        except Exception as error:
            raise shards.Fault(explain(error, REPO, COMMIT)) from None
    found = hashlib.sha256(path.read_bytes()).hexdigest()
    if found != SHA256:
        raise shards.Fault(f"{path} has sha256 {found}, not {SHA256}: delete it and run this again")
    return path


def read(path: pathlib.Path) -> Iterator[tuple[str, list[str], int]]:
    """Yields the context, the four endings and the label of each row of the .parquet or of the
    published .jsonl; raises shards.Fault."""
    place = path
    try:
        if path.suffix == ".parquet":
            from pyarrow import parquet

            rows = parquet.read_table(path).to_pylist()
        else:
            rows = path.read_bytes().rstrip().splitlines()
        for number, row in enumerate(rows, 1):
            place = f"{path}:{number}"
            if isinstance(row, bytes):
                row = json.loads(row.decode("utf-8-sig"))
            match row:
                case {"ctx": str(ctx), "endings": [str(), str(), str(), str()] as endings,
                      "label": 0 | 1 | 2 | 3 | "0" | "1" | "2" | "3" as label} if ctx:  # fmt: skip
                    # Raises UnicodeEncodeError if the JSON holds half of a surrogate pair.
                    "".join([ctx, *endings]).encode()
                    yield ctx, endings, int(label)
                case _:
                    raise ValueError('it needs a "ctx", four "endings" and a "label" of 0 to 3')
    except ImportError:
        raise shards.Fault(f"{path} needs the package pyarrow: ./run.sh hellaswag has it") from None
    except (OSError, ValueError, RecursionError) as error:
        if isinstance(error, OSError) and error.errno:  # of the system, not of pyarrow
            raise
        raise shards.Fault(f"{place} is no example of HellaSwag: {error}") from None


@shards.one_line("cached_hellaswag.py")
def main():
    form = argparse.RawDescriptionHelpFormatter
    cli = argparse.ArgumentParser(description=__doc__, formatter_class=form)
    cli.parse_args()
    print(fetch())


if __name__ == "__main__":
    main()
