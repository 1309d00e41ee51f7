"""From a text to a model that continues it, with the command that tokenize_text.py prints."""

import dataclasses
import json
import re
import shlex
import sys
from pathlib import Path

import check
import pytest
import sample
import tokenize_text

import train_gpt
from tests.test_tokenize import gpt2  # noqa: F401  a fixture: tiktoken's vocabulary
from train_gpt import LONG, SHORT, Layer

LAYERS = (Layer(LONG, value_table=0), Layer(SHORT))
SMALL = "--D 32 --H 2 --F 64 --bigrams 512 --seed 1"


def counting(size: int) -> str:
    """A text of `size` characters with one rule, which a model finds: its numbers count."""
    return " ".join(map(str, range(10_000, 10_000 + size // 6 + 1)))[:size]


@pytest.mark.parametrize("size, options, printed, more, falls", [
    (60_000, "--bytes", "--target 0 --val_tokens 4096 --val_T 256",
     "--steps 20", 2),
    # A CPU needs seconds for a step with GPT-2's vocabulary.
    pytest.param(60_000, "--passes 1", "--vocab 50257 --eot 50256 --target 0 --steps 47 "
                 "--val_every 12 --val_tokens 1024 --val_T 128", "", 0.7,
                 marks=pytest.mark.slow),
])  # fmt: skip
def test_a_text_becomes_a_model(tmp_path, monkeypatch, capsys, size, options, printed, more, falls):
    """Its loss falls, every tool reports the same hash of a shard, and sample.py continues it. The
    text is one file, so the training shard begins inside a document."""

    def call(main, *argv):
        monkeypatch.setattr(sys, "argv", ["script", *argv])
        main()
        return capsys.readouterr().out.splitlines()

    monkeypatch.chdir(tmp_path)
    Path("text.txt").write_text(counting(size))
    *_, command = call(tokenize_text.main, "text.txt", "--out", "my data", *options.split())
    assert command == f"./run.sh tiny --data 'my data' {printed}"
    call(check.main, "my data")
    tiny = dataclasses.replace(train_gpt.PRESETS["tiny"], layers=LAYERS)
    monkeypatch.setitem(train_gpt.PRESETS, "tiny", tiny)
    train_gpt.main([*shlex.split(command)[1:], *SMALL.split(), *more.split()])
    (path,) = Path("logs").glob("*.txt")
    log = path.read_text()
    result = json.loads(re.search("^RESULT (.*)$", log, re.M)[1])
    first = float(re.search("^step:0/.* val_loss:([0-9.]+)", log, re.M)[1])
    assert result["reason"] == "end of schedule" and result["val_loss"] < first - falls
    listed = json.loads(Path("my data", "MANIFEST.json").read_text())["files"]
    logged = json.loads(re.search("^data (.*)$", log, re.M)[1])
    assert {shard["file"]: shard["sha256"] for shard in logged} == {
        name: file["sha256"] for name, file in listed.items()
    }
    monkeypatch.setattr(sample.signal, "signal", lambda *_: None)
    capsys.readouterr()
    text = "\n".join(call(sample.main, str(path.with_suffix(".npz")), "10 ", "--tokens", "5"))
    assert text.startswith("10 ") and len(text) > 3
