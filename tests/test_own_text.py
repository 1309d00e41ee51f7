"""From a text to a model: tokenize_text.py, check.py and train_gpt.py, one after the other."""

import json
import re
import sys
from pathlib import Path

import check
import tokenize_text

import train_gpt

FLAGS = "--D 32 --H 2 --F 64 --E 8 --bigrams 512 --head_chunk 64 --dc_window 12 --val_T 64"
FLAGS += " --val_tokens 1024 --steps 30 --val_every 30 --target 0 --seed 1"
PLAN = "--plan", "Lv0 S", "--stages", "30 512 64 64 0 1 0,1"


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
    train_gpt.main(
        ["tiny", "--data", "my data", "--vocab", "257", "--eot", "256", *FLAGS.split(), *PLAN]
    )
    (log,) = Path("logs").glob("*.txt")
    losses = re.findall(r"^step:\d+/30 val_loss:(\S+)", log.read_text(), re.M)
    first, last = map(float, losses)
    assert first > 5 and last < 3.5  # 5.9 and about 2.5
    listed = json.loads(Path("my data", "MANIFEST.json").read_text())["files"]
    (line,) = re.findall("^data (.*)$", log.read_text(), re.M)
    logged = {shard["file"]: shard["sha256"] for shard in json.loads(line)}
    assert logged == {name: file["sha256"] for name, file in listed.items()}
