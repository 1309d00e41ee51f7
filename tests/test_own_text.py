"""From a text to a model that has learned it, with the command that tokenize_text.py prints."""

import dataclasses
import json
import re
import shlex
import sys
from pathlib import Path

import tokenize_text

import train_gpt
from train_gpt import LONG, SHORT, Layer

SMALL = "--D 32 --H 2 --F 64 --bigrams 512 --seed 1 --steps 20"


def test_a_text_becomes_a_model(tmp_path, monkeypatch, capsys):
    """The loss of a text whose numbers count falls, and the log has the hashes of MANIFEST.json. The
    text is one file, so the training shard begins inside a document."""
    monkeypatch.chdir(tmp_path)
    Path("text.txt").write_text(" ".join(map(str, range(10_000, 20_000))))
    monkeypatch.setattr(sys, "argv", ["tokenize", "text.txt", "--out", "my data", "--bytes"])
    tokenize_text.main()
    command = capsys.readouterr().out.splitlines()[-1]
    printed = "--target 0 --steps 140 --val_tokens 4096 --val_T 256"
    assert command == f"./run.sh tiny --data 'my data' {printed}"
    layers = (Layer(LONG, value_table=0), Layer(SHORT))
    tiny = dataclasses.replace(train_gpt.PRESETS["tiny"], layers=layers)
    monkeypatch.setitem(train_gpt.PRESETS, "tiny", tiny)
    train_gpt.main([*shlex.split(command)[1:], *SMALL.split()])
    (path,) = Path("logs").glob("*.txt")
    log = path.read_text()
    result = json.loads(re.search("^RESULT (.*)$", log, re.M)[1])
    first = float(re.search("^step:0/.* val_loss:([0-9.]+)", log, re.M)[1])
    assert result["reason"] == "end of schedule" and result["val_loss"] < first - 2
    listed = json.loads(Path("my data", "MANIFEST.json").read_text())["files"]
    logged = json.loads(re.search("^data (.*)$", log, re.M)[1])
    hashes = {name: file["sha256"] for name, file in listed.items()}
    assert {shard["file"]: shard["sha256"] for shard in logged} == hashes
