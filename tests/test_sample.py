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
from types import SimpleNamespace
from zlib import crc32

import incremental
import jax
import numpy as np
import pytest
import sample
import weights

import train_gpt
from tests.test_export import TRAIN
from tests.tools import ALPHABET
from train_gpt import Stage

ROOT = TRAIN.parent
HOW = dict(tokens=9, samples=1, seed=0, temperature=0.0, top_k=0, top_p=1.0, best=1, no_repeat=0)
HOW |= dict(go_on=False, eot=256, white_V=np.zeros(257, bool))
GREEDY = "ABC", "--temperature", "0"


@pytest.fixture(scope="module")
def run(trained):
    """The folder and the weights of a run that has learned the alphabet by heart."""
    (path,) = trained.glob("logs/*.npz")
    return argparse.Namespace(folder=trained, path=path, readers={})


@pytest.fixture(scope="module")
def w(run):
    """The weights in float32."""
    w = weights.open_weights(run.path, TRAIN)
    return w._replace(c=dataclasses.replace(w.c, compute="float32"))


@pytest.fixture
def call(run, monkeypatch, capsys):
    """Runs sample.py in this process: its exit status, stdout and stderr."""
    new_reader = incremental.Reader

    def reader_of(w):
        """One for all that are equal, because each traces its program. Whether chunks can be read
        is another test's question."""
        key = w.script, crc32(w.arrays["head"].tobytes())
        if key not in run.readers:
            run.readers[key] = new_reader(w)
            run.readers[key].can_read_chunks = True
        return run.readers[key]

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
    assert re.fullmatch(r"\[1 x 14 tokens, \d+\.\d a second\]\n", err)
    assert call("--temperature", "0", "--tokens", "4", "ABC")[1] == "ABCDEFG\n"  # any order
    out = call("F", "--temperature", "0", "--samples", "2")[1]
    heading = "=" * 20
    assert out == f"{heading} 1\n{ALPHABET[5:]}\n{heading} 2\n{ALPHABET[5:]}\n"
    hot = lambda *argv: call("AB", "--temperature", "3", "--tokens", "20", "--best", "1", *argv)[1]
    assert hot("--seed", "1") == hot("--seed", "1") != hot("--seed", "2")


def test_of_several_lines_the_likeliest_is_taken_if_it_is_new_and_its_brackets_close():
    likely = {b"xyx\n": 0.6, b"zzz\n": 0.5, b"(aa\n": 0.9, b"b)c\n": 0.8, b"   \n": 0.95,
              b"old\n": 0.9}  # fmt: skip
    prompt = [256, *b"old\n"]
    text = np.array([[*prompt, *b"old\n"]])
    coder = SimpleNamespace(piece=lambda token: bytes([token]))

    def log_p_after(rows):
        """Row i goes on with the line number i, each of whose tokens has its probability."""
        n = rows.shape[1] - text.shape[1]
        p = np.full((len(likely), 257), 1e-9)
        for row, (line, share) in zip(p, likely.items(), strict=True):
            row[line[min(n, len(line) - 1)]] = share
        return np.log(p)

    order = []
    while likely:
        how = argparse.Namespace(**HOW | dict(best=len(likely)))
        line = sample.best_line(log_p_after, text, len(prompt), 9, how, None, coder)
        order.append(bytes(line[0].tolist()))
        del likely[order[-1]]
    assert order[:4] == [b"xyx\n", b"zzz\n", b"(aa\n", b"b)c\n"]
    assert set(order[4:]) == {b"   \n", b"old\n"}


def test_what_is_not_allowed():
    """A run that was made before, more white space, and with --go_on the end of the document."""
    white = np.isin(np.arange(9), [0, 1])
    how = argparse.Namespace(**HOW | dict(no_repeat=3, white_V=white, eot=8))
    banned = lambda made: np.flatnonzero(
        np.isinf(sample.allowed(np.zeros(9), np.array(made, int), how))
    ).tolist()
    assert banned([]) == banned([2, 3]) == banned([4, 2, 3]) == []
    assert banned([2, 3, 4, 5, 2, 3]) == [4] == banned([2, 0, 3, 4, 5, 1, 2, 3, 0])
    assert banned([2, 3, 4, 2, 3, 5, 2, 3]) == [4, 5]
    assert banned([2] + 16 * [0]) == [] and banned([2] + 16 * [0] + [1]) == [0, 1]
    how.go_on = True
    assert banned([2, 3, 4, 5, 2, 3]) == [4, 8]


def test_the_window_moves_when_the_context_is_full(capsys):
    """Its older half is forgotten, and every token is made from what the model reads."""
    seen = []
    how = argparse.Namespace(**HOW | dict(tokens=700, samples=2))
    text = [[256] + 253 * [1] for _ in range(2)]

    def read(rows, most):
        assert most == 600 and np.array_equal(rows, np.array(text)[:, -rows.shape[1] :])
        seen.append(rows.shape[1])
        for row, token in zip(text, ([len(seen) % 7, 7]), strict=True):
            row.append(token)
        return np.eye(257)[[len(seen) % 7, 7]]

    assert len([*sample.generate(read, text[0][:], how, 600, None)]) == 700
    assert seen == [*range(254, 601), *range(300, 601), *range(300, 352)]
    assert capsys.readouterr().err.count("goes on from the last half") == 1


@pytest.mark.parametrize("change, p", [
    (dict(temperature=0.5), np.square([0.1, 0.5, 0.05, 0.35])),
    (dict(temperature=0.0), [0, 1, 0, 0]),
    (dict(temperature=1.0, top_k=2), [0, 0.5, 0, 0.35]),
    (dict(temperature=1.0, top_p=0.51), [0, 0.5, 0, 0.35]),
    (dict(temperature=1.0, top_p=0.9), [0.1, 0.5, 0, 0.35]),
])  # fmt: skip
def test_tokens_are_drawn_by_their_probability(change, p):
    how = argparse.Namespace(**HOW | change)
    rng = np.random.default_rng(1)
    log_p = np.log(np.float32([0.1, 0.5, 0.05, 0.35]))
    drawn = [sample.draw(log_p, how, rng) for _ in range(4000)]
    p = np.array(p) / np.sum(p)
    share = np.bincount(drawn, minlength=4) / 4000
    assert np.all(np.abs(share - p) <= 4 * np.sqrt(p * (1 - p) / 4000))


def test_a_character_is_shown_once_it_is_complete_and_nothing_after_the_end():
    text = sample.Sample(256, SimpleNamespace(piece=lambda token: bytes([token])))
    tokens = [*"é€".encode(), 0xFF, *b"!", 256, *b"x"]
    shown = ["", "é", "", "", "€", "\ufffd", "!", "", ""]
    assert [text.add(token) for token in tokens] == shown and text.ended


@pytest.mark.parametrize("argv, message", [
    (["x", "y"], "unexpected words: y; put quotes around a text"),
    (["--topp", "1"], "unrecognized arguments: --topp"), (["--tokens", "0"], "begin at 1"),
    (["--temperature", "nan"], "begin at 0"), (["--top_p", "0"], "--top_p 0.0 is not"),
    (["--best", "2", "--samples", "2"], "leave out --samples"),
])  # fmt: skip
def test_bad_arguments_are_refused_in_a_line(argv, message, call):
    status, out, err = call(*argv)
    assert (status, out, err.count("\n")) == (2, "", 1) and message in err


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
    "another width": (
        lambda *x: edited(*x, config=dict(D=64)), ", 32), but in train_gpt.py ("),
    "one more": (lambda *x: edited(*x, gain=np.ones(3, "f4")), "gain is (3,), but in"),
    "one less": (lambda *x: edited(*x, qk=None), "qk is not there, but in train_gpt.py (4, "),
    "a field more": (lambda *x: edited(*x, config=dict(more=1)), "one of them has the field more"),
    "a field less": (lambda *x: edited(*x, config=dict(xsa=1)), "one of them has the field xsa"),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD)
def test_other_files_are_refused_in_a_line(case, run, tmp_path, call, monkeypatch):
    monkeypatch.chdir(ROOT)
    make, message = BAD[case]
    status, out, err = call("x", "--script", str(TRAIN), path=make(run, tmp_path))
    assert (status, out, err.count("\n")) == (2, "", 1)
    assert err.startswith("sample.py: ") and message in err


def test_weights_from_gpus_are_read_without_on_as_many_devices_as_divide_8(
    run, tmp_path, monkeypatch
):
    on_gpus = dict(attention="cudnn", microbatch=1, compute="bfloat16")
    on_gpus |= dict(head_forward="float8_e4m3fn", head_backward="float8_e5m2")
    monkeypatch.setattr(jax, "device_count", lambda: 3)
    w = weights.open_weights(edited(run, tmp_path, config=on_gpus), TRAIN)
    assert w.c.attention == "band" and w.c.head_forward == "bfloat16" and len(w.devices) == 2


def test_the_stage_is_that_of_the_last_validation(run, tmp_path):
    """A run that reached its target early was validated with the windows of an earlier stage."""
    for steps, stage in (3, 0), (9, 1):
        stages = Stage(4, 256, 8, 16, 0, 1.0), Stage(6, 256, 8, 32, 0, 1.0)
        stages = [dataclasses.asdict(stage) for stage in stages]
        path = edited(run, tmp_path, result=dict(steps=steps), config=dict(stages=stages))
        assert weights.open_weights(path, TRAIN).stage == stage


def test_weights_of_another_script_are_told(run, tmp_path, call):
    def script(old, new):
        assert train_gpt.SOURCE.count(old) == 1
        (tmp_path / "other.py").write_text(train_gpt.SOURCE.replace(old, new))
        return "--script", str(tmp_path / "other.py")

    changed = script("return SOFTCAP * jax.nn.sigmoid(", "return -SOFTCAP * jax.nn.sigmoid(")
    status, out, err = call(*GREEDY, *changed)
    assert status == 0 and not out.startswith("ABCD")
    assert err.startswith("warning: ") and "other.py has changed since" in err


@pytest.fixture
def clone(run, tmp_path, monkeypatch):
    """A repository with logs/, in which the train_gpt.py has changed since the run."""
    (tmp_path / "train_gpt.py").write_text(f"# another\n{train_gpt.SOURCE}")
    (tmp_path / "logs").mkdir()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(weights, "ROOT", tmp_path)
    return tmp_path


def test_the_newest_weights_are_taken_and_the_script_that_trained_them(clone, run, call):
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
    assert "has changed since logs/old.npz" in call("--tokens", "1", path="logs/old.npz")[2]


def test_the_script_that_trained_weights_is_in_their_log(clone, run):
    source = crc32(train_gpt.SOURCE.encode())
    for folder in "logs", ".":  # a log elsewhere is somebody else's, and could run anything
        log = Path(folder, "x.txt")
        log.write_text(f"{train_gpt.SOURCE}{'=' * 100}\nfacts\n")
        found = weights.find_script(log.with_suffix(".npz"), source)
        assert found == (log if folder == "logs" else clone / "train_gpt.py")
        assert weights.find_script(Path(folder, "x.npz"), 1) == clone / "train_gpt.py"
    assert weights.open_script(Path("logs/x.txt")).SOURCE == train_gpt.SOURCE
