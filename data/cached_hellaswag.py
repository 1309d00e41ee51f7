"""Downloads HellaSwag's validation set, which evals/hellaswag.py scores.

    python data/cached_hellaswag.py

The file, 10,042 rows of parquet, comes from a pinned revision of its author's repository on the
hub. Two public sources state the sha256 below; we have not downloaded the file ourselves.
"""

import json
import sys
from collections.abc import Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))  # for PYTHONSAFEPATH=1
import shards
from messages import refuse

REPO, COMMIT = "Rowan/hellaswag", "218ec52e09a7e7462a5400043bb9a69a41d06b76"
NAME = "data/validation-00000-of-00001.parquet"
SHA256 = "899813071e1e95efafec90f856e1987d2150fa4d020fc005df6962c259f660cd"
OUT = Path(__file__).resolve().parent / "hellaswag"


def fetch() -> Path:
    """The path of the file, which is downloaded once. Ends the tool if it is another file."""
    path = OUT / NAME
    if not path.exists():
        from huggingface_hub import hf_hub_download  # here: most calls need no network

        hf_hub_download(REPO, NAME, repo_type="dataset", revision=COMMIT, local_dir=OUT)
    found = shards.sha256(path)
    if found != SHA256:
        refuse(f"{path} has sha256 {found}, not {SHA256}: delete it and run this again")
    return path


def read(path: Path) -> Iterator[tuple[str, list[str], int]]:
    """Yields the context, the four endings and the label of each row of the .parquet or of the
    published .jsonl. Ends the tool at a row that is no example."""
    if path.suffix == ".parquet":
        from pyarrow import parquet

        rows = parquet.read_table(path).to_pylist()
    else:
        rows = map(json.loads, path.read_text(encoding="utf-8-sig").rstrip().split("\n"))
    for number, row in enumerate(rows, 1):
        match row:
            case {"ctx": str(ctx), "endings": [str(), str(), str(), str()] as endings,
                  "label": 0 | 1 | 2 | 3 | "0" | "1" | "2" | "3" as label} if ctx:  # fmt: skip
                yield ctx, endings, int(label)
            case _:
                needs = 'a "ctx", four "endings" and a "label" of 0 to 3'
                refuse(f"{path}:{number} is no example of HellaSwag: it needs {needs}")


if __name__ == "__main__":
    print(fetch())
