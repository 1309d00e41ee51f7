#!/usr/bin/env bash
# to_json of Hugging Face datasets writes ten decimals: 1e-12 becomes 0.0, 6.02e-11 becomes 1e-10,
# and log-probabilities lose six digits. to_csv and to_parquet keep every bit. It is pandas's
# double_precision=10; to_json(double_precision=15) still rounds.
# Hurts: who stores losses, probabilities or quality scores in JSON lines.
# Seen on 2026-11-28 with datasets 5.2.0 and pandas 3.1.1. pandas-dev/pandas issue 23328.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3}" -m venv "$folder"
"$folder/bin/pip" install --quiet datasets==5.2.0 pandas==3.1.1
export FOLDER=$folder
"$folder/bin/python" - <<'END'
import json
import os

import datasets
import pandas

datasets.disable_progress_bars()
os.chdir(os.environ["FOLDER"])
numbers = [0.12345678901234566, -3.2807123456789012, 6.02e-11, 1e-12]
table = datasets.Dataset.from_dict({"x": numbers})
table.to_json("x.jsonl")
table.to_json("precise.jsonl", double_precision=15)
table.to_csv("x.csv")
table.to_parquet("x.parquet")
seen = {}
for name in "x.jsonl", "precise.jsonl":
    with open(name) as lines:
        seen[name] = [json.loads(line)["x"] for line in lines]
with open("x.csv") as lines:
    seen["csv is exact"] = [float(line) for line in list(lines)[1:]] == numbers
read = datasets.Dataset.from_parquet("x.parquet", cache_dir="cache")
seen["parquet is exact"] = list(read["x"]) == numbers
expected = {
    "x.jsonl": [0.123456789, -3.2807123457, 1e-10, 0.0],
    "precise.jsonl": [0.123456789012346, -3.280712345678901, 6.02e-11, 1e-12],
    "csv is exact": True,
    "parquet is exact": True,
}
print("datasets", datasets.__version__, "pandas", pandas.__version__, seen)
if seen != expected:
    raise SystemExit(f"changed: it was {expected}")
END
