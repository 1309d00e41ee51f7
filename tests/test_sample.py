"""evals/weights.py reads the weights of a run, or refuses them; evals/sample.py streams text.
evals/incremental.py is in test_incremental.py."""

import argparse
import dataclasses
import json
import os
import re
import shutil
import sys
from pathlib import Path
from zlib import crc32

import incremental
import numpy as np
import pytest
import sample
import weights

import train_gpt
from tests.test_export import TRAIN
from tests.tools import ALPHABET, ROOT
from train_gpt import Stage

GREEDY = "ABC", "--temperature", "0"


@pytest.fixture(scope="module")
def run(trained):
    """The folder and the weights of a run that has learned the alphabet by heart."""
    (path,) = trained.glob("logs/*.npz")
    return argparse.Namespace(folder=trained, path=path, readers=[])


@pytest.fixture
def call(run, monkeypatch, capsys):
    """Runs sample.py in this process: its exit status, stdout and stderr."""
    new_reader = incremental.Reader

    def reader_of(w):
        """One for all, because each traces its program. Whether chunks can be read is another
        test's question."""
        if not run.readers:
            run.readers.append(new_reader(w))
            run.readers[0].can_read_chunks = True
        return run.readers[0]

    def start(*argv, path=run.path):
        monkeypatch.setattr(sys, "argv", ["sample.py", *([str(path)] if path else []), *argv])
        monkeypatch.setattr(incremental, "Reader", reader_of)
        try:
            sample.main()
            status = 0
        except SystemExit as error:
            status = error.code
        return (status, *capsys.readouterr())

    return start


# ---- Text ----------------------------------------------------------------------------------------
def test_text_goes_on_as_it_was_learned_and_stops_where_the_document_ends(call):
    status, out, err = call(*GREEDY)
    assert (status, out) == (0, ALPHABET + "\n")
    assert re.fullmatch(r"\[14 tokens, \d+\.\d a second\]\n", err)
    assert call("--temperature", "0", "--tokens", "4", "ABC")[1] == "ABCDEFG\n"  # any order
    hot = lambda *argv: call("AB", "--temperature", "3", "--tokens", "20", "--best", "1", *argv)[1]
    assert hot("--seed", "1") == hot("--seed", "1") != hot("--seed", "2")


@pytest.mark.parametrize("change, p", [
    (dict(temperature=0.5), np.square([0.1, 0.5, 0.05, 0.35])),
    (dict(temperature=0.0), [0, 1, 0, 0]),
    (dict(top_k=2), [0, 0.5, 0, 0.35]),
    (dict(top_p=0.9), [0.1, 0.5, 0, 0.35]),
])  # fmt: skip
def test_tokens_are_drawn_by_their_probability(change, p):
    how = argparse.Namespace(**dict(temperature=1.0, top_k=0, top_p=1.0) | change)
    rng = np.random.default_rng(1)
    log_p = np.log(np.float32([0.1, 0.5, 0.05, 0.35]))
    drawn = [sample.draw(log_p, how, rng) for _ in range(4000)]
    p = np.array(p) / np.sum(p)
    share = np.bincount(drawn, minlength=4) / 4000
    assert np.all(np.abs(share - p) <= 4 * np.sqrt(p * (1 - p) / 4000))


# ---- Weights -------------------------------------------------------------------------------------
def edited(run, tmp_path, **change) -> Path:
    """The weights with some JSON fields or arrays changed; None removes one, or a field."""
    parts = dict(np.load(run.path))
    for name, value in change.items():
        if isinstance(value, dict):
            fields = json.loads(parts[name].item()) | value
            value = json.dumps({field: x for field, x in fields.items() if x is not None})
        parts[name] = value
    np.savez(tmp_path / "x.npz", **{k: v for k, v in parts.items() if v is not None})
    return tmp_path / "x.npz"


def content(run, tmp_path, change) -> Path:
    """A copy of the file with changed bytes."""
    (tmp_path / "x.npz").write_bytes(change(run.path.read_bytes()))
    return tmp_path / "x.npz"


BAD = {
    "no file": (lambda *_: Path("none.npz"), "there is no file none.npz"),
    "cut off": (lambda *x: content(*x, lambda data: data[:50_000]), "x.npz is damaged, or no"),
    "flipped bits": (lambda *x: content(*x, lambda data: data.replace(b"?", b">")), "is damaged"),
    "another's": (lambda *x: edited(*x, config=None), "no weights of a run, logs/<run>.npz (KeyE"),
    "nan": (lambda *x: edited(*x, vo=np.full((4, 32, 32), np.nan)), "numbers in vo that are not"),
    "one less": (lambda *x: edited(*x, qk=None), "qk is not there, but in train_gpt.py (4, "),
    "a field more": (lambda *x: edited(*x, config=dict(more=1)), "one of them has the field more"),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD)
def test_other_files_are_refused_in_a_line(case, run, tmp_path, call, monkeypatch):
    monkeypatch.chdir(ROOT)
    make, message = BAD[case]
    status, out, err = call("x", "--script", str(TRAIN), path=make(run, tmp_path))
    assert (status, out, err.count("\n")) == (2, "", 1)
    assert err.startswith("sample.py: ") and message in err


def test_the_stage_is_that_of_the_last_validation(run, tmp_path):
    """A run that reached its target early was validated with the windows of an earlier stage."""
    for steps, stage in (3, 0), (9, 1):
        stages = Stage(4, 256, 8, 16, 0, 1.0), Stage(6, 256, 8, 32, 0, 1.0)
        stages = [dataclasses.asdict(stage) for stage in stages]
        path = edited(run, tmp_path, result=dict(steps=steps), config=dict(stages=stages))
        assert weights.open_weights(path, TRAIN).stage == stage


def test_weights_of_another_script_are_told(run, tmp_path, capsys):
    other = tmp_path / "other.py"
    other.write_text(f"{train_gpt.SOURCE}\nOTHER = 1\n")
    assert weights.open_weights(run.path, other).code.OTHER
    err = capsys.readouterr().err
    assert err.startswith("warning: ") and "other.py has changed since" in err


def test_the_newest_weights_are_taken_and_the_script_that_trained_them(
    run, tmp_path, monkeypatch, call
):
    """Where train_gpt.py has changed since: a copy of it, or the log beside the weights."""
    (tmp_path / "train_gpt.py").write_text(f"# another\n{train_gpt.SOURCE}")
    (tmp_path / "logs").mkdir()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(weights, "ROOT", tmp_path)
    line = "sample.py: there are no weights in logs/: train first, ./run.sh\n"
    assert call("ABC", path=None) == (2, "", line)
    for name, time in ("old", 1e9), ("new", 2e9), ("middle", 1.5e9):
        shutil.copy(run.path, f"logs/{name}.npz")
        os.utime(f"logs/{name}.npz", (time, time))
    shutil.copy(TRAIN, "my_idea.py")
    status, out, err = call(*GREEDY, path=None)
    newest, script, rate = err.splitlines()
    assert (status, out) == (0, ALPHABET + "\n")
    assert newest == "sample.py: takes the newest weights, logs/new.npz"
    assert script == "sample.py: takes the script that trained logs/new.npz, my_idea.py"
    Path("my_idea.py").unlink()
    source = crc32(train_gpt.SOURCE.encode())
    for folder in "logs", ".":  # a log elsewhere is somebody else's, and could run anything
        log = Path(folder, "new.txt")
        log.write_text(f"{train_gpt.SOURCE}{'=' * 100}\nfacts\n")
        found = weights.find_script(log.with_suffix(".npz"), source)
        assert (found == log) == (folder == "logs")
