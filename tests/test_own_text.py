"""From a text to a model: tokenize_text.py, check.py and train_gpt.py, one after the other."""

import dataclasses
import json
import re
import sys
from pathlib import Path

import check
import tokenize_text

import train_gpt
from train_gpt import LONG, SHORT, Layer, Stage

FLAGS = "--D 32 --H 2 --F 64 --R 8 --bigrams 512 --head_chunk 64 --dc_window 12 --val_T 64"
FLAGS += " --val_tokens 1024 --val_every 20 --target 0 --seed 1 --stall 0"
LAYERS = (Layer(LONG, value_table=0), Layer(SHORT))
STAGES = (Stage(20, 512, short=64, long=64, max_doc=0, lr=1.0),)


def test_a_text_becomes_a_model(tmp_path, monkeypatch, capsys):
    """With the command that tokenize_text.py prints; and one hash of a shard everywhere."""
    monkeypatch.chdir(tmp_path)
    for i in range(40):  # one rule, which a model finds: digits that count
        text = " ".join(str(n) for n in range(100 * i, 100 * i + 250))
        (tmp_path / f"{i}.txt").write_text(text)
    argv = ["tokenize_text.py", str(tmp_path), "--out", "my data", "--bytes"]
    monkeypatch.setattr(sys, "argv", argv)
    tokenize_text.main()
    command = capsys.readouterr().out.splitlines()[-1]
    assert command == "./run.sh tiny --data 'my data' --vocab 257 --eot 256"
    monkeypatch.setattr(sys, "argv", ["check.py", "my data"])
    check.main()
    assert "check.py" not in capsys.readouterr().err
    tiny = train_gpt.PRESETS["tiny"]
    tiny = dataclasses.replace(tiny, layers=LAYERS, stages=STAGES, head_chunk=64)
    monkeypatch.setitem(train_gpt.PRESETS, "tiny", tiny)
    flags = ["tiny", "--data", "my data", "--vocab", "257", "--eot", "256", *FLAGS.split()]
    train_gpt.main(flags)
    (log,) = Path("logs").glob("*.txt")
    losses = re.findall(r"^step:\d+/20 val_loss:(\S+)", log.read_text(), re.M)
    first, last = map(float, losses)
    assert first > 5 and last < 3.5  # 5.9 and about 2.5
    listed = json.loads(Path("my data", "MANIFEST.json").read_text())["files"]
    (line,) = re.findall("^data (.*)$", log.read_text(), re.M)
    logged = {shard["file"]: shard["sha256"] for shard in json.loads(line)}
    assert logged == {name: file["sha256"] for name, file in listed.items()}
