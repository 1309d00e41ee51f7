"""evals/weights.py finds and reads the weights of a run, or refuses them; evals/sample.py streams
text. evals/incremental.py is in test_incremental.py."""

import argparse
import contextlib
import dataclasses
import errno
import io
import json
import os
import re
import shutil
import subprocess
import sys
import tokenize
import warnings
import zipfile
from pathlib import Path
from types import SimpleNamespace
from zlib import crc32

import incremental
import jax
import jax.numpy as jnp
import messages
import numpy as np
import pytest
import sample
import weights

import train_gpt
from run import guard
from tests.record92 import PATH, frozen
from tests.tools import ALPHABET, PHRASE, write_shard
from train_gpt import Stage

ROOT = Path(train_gpt.__file__).resolve().parent
TRAIN = ROOT / "train_gpt.py"
NUMBERS = ["never", "once", "twice", "three times"]
HOW = dict(tokens=9, samples=1, seed=0, temperature=0.0, top_k=0, top_p=1.0, interactive=False)
HOW |= dict(best=1, no_repeat=0, go_on=False, rule=False, eot=256, white_V=np.zeros(257, bool))


@pytest.fixture(scope="module")
def run(trained):
    """The folder and the weights of a run that has learned the alphabet by heart."""
    (path,) = trained.glob("logs/*.npz")
    return argparse.Namespace(folder=trained, path=path)


@pytest.fixture(scope="module")
def w(run):
    """The weights in float32."""
    w = weights.open_weights(run.path, TRAIN)
    return w._replace(c=dataclasses.replace(w.c, compute="float32"))


Reader = incremental.Reader
readers = {}


@pytest.fixture
def call(run, monkeypatch, capsys):
    """Runs sample.py in this process: its exit status, stdout and stderr."""

    def reader_of(w):
        """One for all that are equal, because each traces its program. Whether chunks can be read
        is another test's question, but for the frozen file, which cannot."""
        key = w.path, w.script, w.path.stat().st_mtime_ns
        if key not in readers:
            readers[key] = Reader(w)
            if w.script.resolve() != PATH:
                readers[key].can_read_chunks = True
        return readers[key]

    def start(*argv, path=run.path):
        monkeypatch.setattr(sys, "argv", ["sample.py", *([str(path)] if path else []), *argv])
        monkeypatch.setattr(sample.signal, "signal", lambda *_: None)
        monkeypatch.setattr(incremental, "Reader", reader_of)
        try:
            sample.main()
            status = 0
        except SystemExit as error:
            status = error.code
        return (status, *capsys.readouterr())

    return start


def test_the_weights_of_a_run_are_sampled(run):
    command = [sys.executable, ROOT / "evals" / "sample.py", run.path, "--tokens", "3"]
    done = subprocess.run(command, cwd=run.folder, capture_output=True)
    assert done.returncode == 0 and len(done.stdout) > 1  # the beginning of a document
    assert re.fullmatch(rb"\[1 x \d tokens, \d+\.\d a second\]\n", done.stderr)


def test_text_goes_on_as_it_was_learned_and_stops_where_the_document_ends(call):
    status, out, err = call("ABC", "--temperature", "0")
    assert (status, out) == (0, ALPHABET + "\n") and err.startswith("[1 x 14 tokens, ")
    assert call("--temperature", "0", "--tokens", "4", "ABC")[1] == "ABCDEFG\n"  # any order
    out = call("F", "--temperature", "0", "--samples", "2")[1]
    heading = "=" * 20
    assert out == f"{heading} 1\n{ALPHABET[5:]}\n{heading} 2\n{ALPHABET[5:]}\n"


def test_weights_from_gpus_are_read_without(run, tmp_path, call):
    on_gpus = dict(attention="cudnn", microbatch=1, compute="bfloat16")
    on_gpus |= dict(head_forward="float8_e4m3fn", head_backward="float8_e5m2")
    path = edited(run, tmp_path, config=on_gpus)
    _, out, _ = call("ABC", "--temperature", "0", path=path)
    assert out == ALPHABET + "\n"


def test_the_same_seed_makes_the_same_text_and_another_one_another(call):
    hot = lambda *argv: call("AB", "--temperature", "3", "--tokens", "20", *argv)[1]
    assert hot("--seed", "1") == hot("--seed", "1") != hot("--seed", "2")
    one, *texts = hot("--samples", "3").split("=" * 20)[1:]
    assert len({one[3:], *(text[3:] for text in texts)}) == 3


# ---- The choice of lines ------------------------------------------------------------------------
def rule(text: str) -> tuple[int, int, float]:
    """Of a sample: lines that are not blank, how often the most frequent one is there, and the
    share of lines that Python's tokenizer accepts."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    accepted = 0
    for line in lines:
        with contextlib.suppress(tokenize.TokenError, SyntaxError):
            accepted += bool([*tokenize.generate_tokens(io.StringIO(line + "\n").readline)])
    return len(lines), max(map(lines.count, lines)), accepted / len(lines)


def test_samples_of_tiny_are_code_that_one_would_show():
    """Those of eight models, with seeds 0 to 7, made by ./run.sh sample WEIGHTS --go_on. The page
    has their numbers."""
    samples = (ROOT / "tests/tiny_samples.txt").read_text(encoding="utf-8").split(sample.RULE)[1:]
    assert len(samples) == 8
    rules = [rule(text.partition("\x0c")[0]) for text in samples]
    lines, most, accepted = zip(*rules, strict=True)
    assert min(lines) >= 12 and max(most) <= 3 and min(accepted) >= 0.7  # Python 3.12 is stricter
    page = " ".join((ROOT / "evals/README.md").read_text(encoding="utf-8").split())
    assert (
        f"at least {min(lines)} lines of text, none more than {NUMBERS[max(most)]}, and Python's "
        "tokenizer accepts at least seven in ten of them"
    ) in page


@pytest.mark.slow
def test_a_run_of_tiny_ends_with_code_that_one_would_show(tmp_path):
    """All of what ./run.sh does without a GPU, once it is installed."""
    env = os.environ | {"XLA_FLAGS": "", "JNANO_SAMPLE": "0"}
    data = str(ROOT / "data/source_code")
    subprocess.run([sys.executable, ROOT / "data/source_code.py", "--out", data], check=True)
    launch = [sys.executable, ROOT / "run/launch.py", TRAIN, "tiny", "--data", data]
    done = subprocess.run(launch, cwd=tmp_path, env=env, capture_output=True, text=True)
    result = json.loads(re.search("^RESULT (.*)$", done.stdout, re.M)[1])
    assert result["steps"] == 187 and result["reason"] == "target reached"
    command = [sys.executable, ROOT / "evals/sample.py", f"logs/{result['weights']}", "--go_on"]
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True)
    lines, most, accepted = rule(done.stdout.split(sample.RULE)[1])
    assert lines >= 12 and most <= 3 and accepted >= 0.5, done.stdout


def test_of_several_lines_the_likeliest_is_taken_if_it_is_new_and_its_brackets_close():
    likely = {
        b"xyx\n": 0.6,
        b"zzz\n": 0.5,
        b"(aa\n": 0.9,
        b"b)c\n": 0.8,
        b"   \n": 0.95,
        b"old\n": 0.9,
    }
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
    how.no_repeat = 0
    assert banned([2, 3, 4, 5, 2, 3]) == [8]


def test_without_a_prompt_it_goes_on_from_text_that_the_model_has_not_seen(w, tmp_path):
    coder = weights.tokenizer(w)
    w = w._replace(config=w.config | {"data": str(tmp_path)})
    assert sample.unseen(w, coder) == ""
    documents = [b"a b\n" * 100, b"one\ntwo\n", b"word " * 70, b"\n".join([b"x" * 9] * 50)]
    tokens = []
    for document in documents:
        tokens += [256, *document]
    write_shard(tmp_path / "a_val_000000.bin", [*tokens, *[256] * 300])
    assert sample.unseen(w, coder) == "a b\n" * 75
    write_shard(tmp_path / "a_val_000000.bin", [256, *documents[1], *tokens[401:], *[256] * 300])
    assert sample.unseen(w, coder) == ("x" * 9 + "\n") * 30
    write_shard(tmp_path / "a_val_000000.bin", [256, *b"word " * 300])
    assert sample.unseen(w, coder) == ("word " * 60)[:-1]


def test_a_line_marks_where_the_text_of_the_model_begins(w, capsys):
    read = lambda rows, most: np.eye(257)[np.full(len(rows), 65)]
    for prompt, shown in ("x\n", "x\n"), ("x", "x\n"):
        how = argparse.Namespace(**HOW | dict(rule=True, tokens=2, samples=2))
        sample.print_samples(prompt, read, w, weights.tokenizer(w), how)
        text = f"{shown}{sample.RULE}\nAA\n"
        assert capsys.readouterr().out == "{0} 1\n{1}{0} 2\n{1}".format("=" * 20, text)


def test_the_rate_is_that_of_all_lines_but_the_first(w, capsys, monkeypatch):
    clock = iter([10.0, 14.0])
    monkeypatch.setattr(sample.time, "perf_counter", lambda: next(clock))
    blocks = iter([np.full((1, 3), 65), np.full((1, 8), 66)])
    monkeypatch.setattr(sample, "generate", lambda *_: blocks)
    how = argparse.Namespace(**HOW | dict(best=2))
    sample.print_samples("", None, w, weights.tokenizer(w), how)
    out, err = capsys.readouterr()
    assert (out, err) == ("AAABBBBBBBB\n", "[1 x 11 tokens, 2.0 a second]\n")


# ---- Length --------------------------------------------------------------------------------------
def test_the_stage_is_that_of_the_last_validation(run, tmp_path):
    """A run that reached its target early was validated with the windows of an earlier stage."""
    for steps, stage in (3, 0), (9, 1):
        stages = Stage(4, 256, 8, 16, 0, 1.0), Stage(6, 256, 8, 32, 0, 1.0)
        stages = [dataclasses.asdict(stage) for stage in stages]
        path = edited(run, tmp_path, result=dict(steps=steps), config=dict(stages=stages))
        assert weights.open_weights(path, TRAIN).stage == stage


def test_the_window_moves_when_the_context_is_full():
    """Its older half is forgotten, and every token is made from what the model reads."""
    seen = []
    how = argparse.Namespace(**HOW | dict(tokens=700, samples=2))
    text = [[256] + 253 * [1]] * 2

    def read(rows, most):
        assert most == 600 and np.array_equal(rows, np.array(text)[:, -rows.shape[1] :])
        seen.append(rows.shape[1])
        for row, token in zip(text, ([len(seen) % 7, 7]), strict=True):
            row.append(token)
        return np.eye(257)[[len(seen) % 7, 7]]

    text = [[*row] for row in text]
    assert len([*sample.generate(read, text[0][:], how, 600, 0, None)]) == 700
    assert seen == [*range(254, 601), *range(300, 601), *range(300, 352)]


def test_of_three_devices_two_are_used(run, monkeypatch):
    """The number of devices must divide 8 matrices."""
    monkeypatch.setattr(jax, "device_count", lambda: 3)
    assert len(weights.open_weights(run.path, TRAIN).devices) == 2


def test_every_prompt_of_a_session_has_its_own_randomness():
    read = lambda rows, most: np.zeros((1, 257))
    how = argparse.Namespace(**HOW | dict(temperature=1.0))
    texts = []
    for number in (0, 0, 1):
        steps = [*sample.generate(read, [256], how, 99, number, None)]
        texts.append(np.concatenate(steps, axis=1).tolist())
    first, repeated, second = texts
    assert len(first[0]) == 9 and first == repeated != second


# ---- Drawing -------------------------------------------------------------------------------------
@pytest.mark.parametrize("change, p", [
    (dict(temperature=1.0), [0.1, 0.5, 0.05, 0.35]),
    (dict(temperature=0.5), np.square([0.1, 0.5, 0.05, 0.35])),
    (dict(temperature=0.0), [0, 1, 0, 0]),
    (dict(temperature=1.0, top_k=2), [0, 0.5, 0, 0.35]),
    (dict(temperature=1.0, top_p=0.49), [0, 1, 0, 0]),
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


def test_text_is_shown_before_the_next_token_is_made(w, monkeypatch):
    """A character of several bytes is shown once it is complete, an invalid byte as U+FFFD."""
    coming = [*"é€".encode(), 0xFF, *b"!", 256]  # the next tokens
    out = io.StringIO()
    # What has been shown before each of them.
    shown = ["> ", "> ", "> é", "> é", "> é", "> é€", "> é€\ufffd", "> é€\ufffd!"]

    def read(rows, most):
        assert out.getvalue() == shown.pop(0)
        return np.eye(257)[[coming.pop(0)]]

    monkeypatch.setattr(sys, "stdout", out)
    how = argparse.Namespace(**HOW | dict(tokens=99))
    sample.print_samples("> ", read, w, weights.tokenizer(w), how)
    assert (out.getvalue(), coming, shown) == ("> é€\ufffd!\n", [], [])


def test_a_sample_that_has_ended_says_no_more(w, capsys):
    coming = [*zip([*b"abc"], [256, *b"de"], strict=True), (256, 256)]

    def read(rows, most):
        assert [*rows[0, :3]] == [256, *b"> "]  # a prompt begins a document
        return np.eye(257)[[*coming.pop(0)]]

    how = argparse.Namespace(**HOW | dict(samples=2))
    sample.print_samples("> ", read, w, weights.tokenizer(w), how)
    assert capsys.readouterr().out == "{0} 1\n> abc\n{0} 2\n> \n".format("=" * 20)


@pytest.mark.parametrize("wanted, token, told", [(3, 65, 0), (99, 256, 0), (4, 65, 1)])
def test_a_window_that_moved_is_told_once(wanted, token, told, w, capsys):
    read = lambda rows, most: np.eye(257)[[token]]
    how = argparse.Namespace(**HOW | dict(tokens=wanted))
    sample.print_samples("x" * 253, read, w, weights.tokenizer(w), how)
    _, err = capsys.readouterr()
    *lines, rate = err.splitlines()
    assert rate.startswith(f"[1 x {1 if token == 256 else wanted} tokens, ")
    assert len(lines) == told and all(
        "the model reads 256 tokens: the text" in line for line in lines
    )


def test_a_text_for_other_tools(w):
    """It ends with the document, and a long prompt is no fault."""
    coder = weights.tokenizer(w)
    text = sample.continue_text(w, coder, 15 * PHRASE + "ABC", 30, 1, temperature=0)
    assert len(text) == 13 and sample.continue_text(w, coder, "ABC", temperature=0) == ALPHABET[3:]


def test_without_streams_it_ends_as_at_the_end_of_the_input(call, monkeypatch):
    for name in ("stdin", "stdout"):  # closed, as by <&- and >&-
        monkeypatch.setattr(sys, name, None)
    assert call("--interactive") == (0, "", "")


class Full(io.StringIO):
    """A screen on a full disk."""

    def write(self, text):
        raise OSError(errno.ENOSPC, "No space left on device")


def test_a_full_disk_is_one_line(call, monkeypatch):
    monkeypatch.setattr(messages, "discard_output", lambda: None)  # it would close pytest's
    monkeypatch.setattr(sys, "stdout", Full())
    status, _, err = call("ABC")
    assert (status, err.count("\n")) == (2, 1)
    assert err.startswith("sample.py: No space left on device: make room")
    monkeypatch.setattr(sys, "stderr", Full())
    assert call("ABC")[0] == 2


def test_prompts_in_a_row(call, monkeypatch):
    prompts = iter(["ABC", "", "N"])

    def ask(_):
        try:
            return next(prompts)
        except StopIteration:
            raise EOFError from None

    monkeypatch.setattr("builtins.input", ask)
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO()))
    status, out, err = call("--interactive", "--temperature", "0", "--tokens", "2")
    assert status == 0 and out.startswith("ABCDE\n\n") and out.endswith("\nNOP\n")
    assert err.count("[1 x 2 tokens, ") == 3


# ---- Refusals ------------------------------------------------------------------------------------
def edited(run, tmp_path, **change) -> Path:
    """A copy of the weights with other config=, result= or arrays; None removes one, or a field."""
    parts = dict(np.load(run.path))
    for name, value in change.items():
        if isinstance(value, dict):
            fields = json.loads(parts[name].item()) | value
            value = json.dumps({field: x for field, x in fields.items() if x is not None})
        parts[name] = value
    np.savez(tmp_path / "x.npz", **{k: v for k, v in parts.items() if v is not None})
    return tmp_path / "x.npz"


def checkpoint(run, tmp_path, **more) -> Path:
    """The run's parameters as a checkpoint has them, padded, and more of them."""
    w = weights.open_weights(run.path, TRAIN)
    params = more
    for name, param in train_gpt.param_table(w.c).items():
        padded = np.zeros(param.shape, "f4")
        banked = param.sharding in (train_gpt.BANK, train_gpt.EXCHANGED)
        rows = padded.reshape(-1, *param.model_shape[1:]) if banked else padded
        rows[: len(w.arrays[name])] = w.arrays[name]
        params[name] = padded
    state = train_gpt.State(params, {}, {}, {}, np.int32(0))
    facts = {"step": 80, "command": "./run.sh tiny", "identity": guard.identity(train_gpt, w.c, [])}
    assert guard.save_checkpoint(state, facts, tmp_path / "0000080.state")
    return tmp_path / "0000080.state"


def test_a_checkpoint_is_sampled(run, tmp_path, call, capsys):
    path = checkpoint(run, tmp_path)
    status, out, err = call("ABC", "--temperature", "0", path=path)
    assert (status, out) == (0, ALPHABET + "\n") and err.startswith("[1 x 14 tokens, ")
    more = checkpoint(run, tmp_path, gain=np.ones(3, "f4"))
    status, out, err = call("ABC", path=more)
    assert (status, out) == (2, "") and "has an array gain, but" in err
    with pytest.raises(SystemExit):  # as other tools do
        weights.open_weights(path, TRAIN)
    assert f"this makes weights: ./run.sh tiny --resume {path}\n" in capsys.readouterr().err


def cut(run, tmp_path, size: int) -> Path:
    """A copy of the first bytes."""
    (tmp_path / "x.npz").write_bytes(run.path.read_bytes()[:size])
    return tmp_path / "x.npz"


def flipped(run, tmp_path) -> Path:
    """A copy with a wrong bit in an array."""
    data = bytearray(run.path.read_bytes())
    data[data.find(b"head.npy") + 999] ^= 1
    (tmp_path / "x.npz").write_bytes(data)
    return tmp_path / "x.npz"


def content(tmp_path, data: bytes) -> Path:
    """A file of other content."""
    (tmp_path / "x.npz").write_bytes(data)
    return tmp_path / "x.npz"


def archive(run, tmp_path, name: str, data: bytes) -> Path:
    """A copy of the weights with one more entry."""
    path = content(tmp_path, run.path.read_bytes())
    with warnings.catch_warnings(action="ignore"), zipfile.ZipFile(path, "a") as file:
        file.writestr(name, data)
    return path


def with_value(run, tmp_path, name: str, value: float) -> Path:
    """A copy of the weights in which one number of an array is another."""
    array = np.load(run.path)[name]
    array.flat[5] = value
    return edited(run, tmp_path, **{name: array})


def npy(x: np.ndarray) -> bytes:
    """The file that np.save writes."""
    file = io.BytesIO()
    np.save(file, x)
    return file.getvalue()


HEAD = np.ones((384, 32), "f4")
OF_92 = "x.npz is of record 92's model, which this tool cannot read: see records/upstream92/"
BAD = {
    "averages": (lambda *x: edited(*x, config=dict(averages=[1])), OF_92),
    "narrow heads": (lambda *x: edited(*x, config=dict(layers=[dict(narrow_qk=True)])), OF_92),
    "no MLP": (lambda *x: edited(*x, config=dict(layers=[dict(mlps=0)])), OF_92),
    "a large table": (lambda *x: edited(*x, tables=np.array("{}")), OF_92),
    "no file": (lambda *_: Path("none.npz"), "none.npz: No such file or directory"),
    "a log": (lambda run, _: run.path.with_suffix(".txt"), "is a log: a run writes its weights"),
    "a folder": (lambda _, tmp_path: tmp_path, "is a folder: name a file of weights in it"),
    "a device": (lambda *_: Path("/dev/null"), "/dev/null: It is a pipe or a device"),
    "nothing": (lambda *x: cut(*x, 0), "is no file of weights, but empty: get it again"),
    "two lines": (lambda _, x: content(x, b"").rename(x / "a\nb"), "a b is no file of weights"),
    "truncated": (lambda *x: cut(*x, 50_000), "but the beginning of a file that was cut off"),
    "a pointer": (lambda _, x: content(x, b"version https://git-lfs.github.com/"), "git lfs pull"),
    "a page": (lambda _, x: content(x, b"\n<!DOCTYPE html>"), "but HTML or XML, perhaps a"),
    "a pickle": (lambda _, x: content(x, b"\x80\4."), "but a pickle, which could run programs"),
    "an export": (lambda _, x: content(x, bytes(8) + b'{"head"'), "but one of safetensors: name"),
    "PyTorch's": (lambda *x: archive(*x, "x/data.pkl", b""), "holds x/data.pkl, which is no array"),
    "twice": (lambda *x: archive(*x, "head.npy", b""), "holds head twice"),
    "a size that lies": (
        lambda *x: archive(*x, "a.npy", npy(np.ones(3)) + bytes(2)), "a has 154 bytes, not 152"),
    "objects": (lambda *x: edited(*x, head=np.array([{}])), "holds head as a pickle"),
    "a flipped bit": (flipped, "is damaged: get it again (BadZipFile: Bad CRC-32 for file"),
    "another's": (lambda *x: edited(*x, config=None), "has no config: another program wrote it"),
    "older": (lambda *x: edited(*x, result=None), "has no result: another program wrote it"),
    "no config": (lambda *x: edited(*x, config="null"), "x.npz has null as its config: name a"),
    "no result": (lambda *x: edited(*x, result="[]"), "x.npz has [] as its result: name a"),
    "no text": (lambda *x: edited(*x, config=HEAD), "has a config of float32 (384, 32), which"),
    "half": (
        lambda *x: edited(*x, head=HEAD.astype("f2")),
        "x.npz has head as float16 (<f2), but a run writes float32: take the run's file"),
    "big-endian": (lambda *x: edited(*x, head=HEAD.astype(">f4")), "head as float32 (>f4), but a"),
    "nan": (lambda *x: with_value(*x, "vo", np.nan), "has 1 of 4096 values of vo that"),
    "inf": (lambda *x: with_value(*x, "head", -np.inf), "has 1 of 12288 values of head that"),
    "another width": (
        lambda *x: edited(*x, config=dict(D=64)), "has embed of shape (384, 32), but"),
    "one more": (lambda *x: edited(*x, gain=np.ones(3, "f4")), "has an array gain, but"),
    "one less": (lambda *x: edited(*x, qk=None), "has no array qk, but"),
    "another layer": (
        lambda *x: edited(*x, config=dict(layers=[dict(window="long", z=1)])), "the form that"),
    "another type": (
        lambda *x: edited(*x, config=dict(head_chunk="1")), "TypeError(\"head_chunk is '1'\")"),
    "no such window": (lambda *x: edited(*x, config=dict(dc_window=0)), "--dc_window is at least"),
    "no steps": (lambda *x: edited(*x, result=dict(steps=None)), "KeyError('steps')"),
    "steps in quotes": (lambda *x: edited(*x, result=dict(steps="60")), "'60' of 80 steps"),
    "NaN steps": (lambda *x: edited(*x, result=dict(steps=np.nan)), "'nan of 80 steps'"),
    "a field more": (
        lambda *x: edited(*x, config=dict(more=1)), "only one of them has the field more"),
    "another vocabulary": (
        lambda *x: edited(*x, config=dict(vocab=258), value0=np.zeros((258, 32), "f4")),
        "x.npz has 258 tokens and its end-of-text is 256: there is a tokenizer for bytes and"),
    "another end of text": (lambda *x: edited(*x, config=dict(eot=3)), "its end-of-text is 3: "),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD)
def test_other_files_are_refused_in_a_line(case, run, tmp_path, call):
    make, message = BAD[case]
    status, out, err = call("x", path=make(run, tmp_path))
    assert (status, out, err.count("\n")) == (2, "", 1)
    assert err.startswith("sample.py: ") and message in err


def test_outputs_that_are_not_finite_are_refused(w):
    """They would become a score: the lowest of losses that are NaN is the first."""
    outputs = [np.ones(2), {"loss": jnp.zeros(3)}]
    assert weights.check_outputs(w, outputs)[1]["loss"].tolist() == [0, 0, 0]
    outputs[1]["loss"] = jnp.array([0, jnp.nan, 0])
    with pytest.raises(messages.Fault, match="the model computes numbers that are not"):
        weights.check_outputs(w, outputs)


def test_no_array_is_read_before_all_names_and_sizes_are_right(run, tmp_path, call, monkeypatch):
    """A small file may unpack to more than the memory."""
    names = []
    read = weights.read_array

    def read_array(archive, name):
        names.append(name)
        return read(archive, name)

    monkeypatch.setattr(weights, "read_array", read_array)
    call("x", path=edited(run, tmp_path, gain=np.ones(3, "f4")))
    assert names == ["config", "result", "source"]


@pytest.mark.parametrize("argv, message", [
    (["x", "--interactive"], "give a prompt or --interactive"),
    (["x", "y"], "unexpected words: y; put quotes around a text"),
    (["x", "--temp", "1"], "there is no flag --temp: did you mean --temperature?"),
    (["--prompt=def main("], "there is no flag --prompt: write a prompt without one"),
    (["x", "--tokens", "0"], "begin at 1"),
    (["x", "--samples", "1000000000000"], "--samples is at most 10,000"),
    (["x", "--temperature", "-1"], "begins at 0"),
    (["x", "--temperature", "nan"], "begins at 0"),
    (["x", "--top_p", "0"], "--top_p is above 0"),
    (["x", "--top_p", "nan"], "--top_p is above 0"),
    (["x", "--topk", "3"], "there is no flag --topk: did you mean --top_k?"),
    (["x", "--script", "none.py"], "--script none.py is not a script like train_gpt.py"),
    (["x", "--script", "."], "--script . is a folder: name the script"),
])  # fmt: skip
def test_bad_arguments_are_refused_in_a_line(argv, message, call):
    status, out, err = call(*argv)
    assert (status, out, err.count("\n")) == (2, "", 1) and message in err


def test_without_gpt2s_vocabulary_a_line_says_how_to_get_it(monkeypatch, capsys):
    monkeypatch.setattr("tiktoken.get_encoding", lambda _: [][0])
    with pytest.raises(SystemExit) as error:
        weights.tokenizer(argparse.Namespace(path="x.npz", c=train_gpt.PRESETS["record"]))
    err = capsys.readouterr().err
    assert error.value.code == 2 and err.count("\n") == 1
    assert "(IndexError)" in err and "set TIKTOKEN_CACHE_DIR to it" in err


def test_weights_of_another_script_need_it_and_an_older_one_is_refused(run, tmp_path, call):
    def script(old, new):
        assert train_gpt.SOURCE.count(old) == 1
        (tmp_path / "other").write_text(train_gpt.SOURCE.replace(old, new))  # any name will do
        return "--script", str(tmp_path / "other")

    greedy = "ABC", "--temperature", "0"
    row = '        "smear_lambda": replicated((1,), 0.0, 5),\n'
    one_more = script(row, f'{row}        "gain": replicated((3,), 2.0, 1),\n')
    path = edited(run, tmp_path, gain=np.ones(3, "f4"))
    status, out, err = call(*greedy, *one_more, path=path)
    assert (status, out) == (0, ALPHABET + "\n") and "other has changed since" in err
    changed = script("return SOFTCAP * jax.nn.sigmoid(", "return -SOFTCAP * jax.nn.sigmoid(")
    status, out, err = call(*greedy, *changed)
    assert status == 0 and not out.startswith("ABCD") and err.startswith("warning: ")
    status, out, err = call(*greedy, *script("def forward(", "def backward("))
    assert (status, out, err.count("\n")) == (2, "", 1)
    assert "other has no forward: it is older than evals/" in err


@pytest.mark.slow
def test_weights_of_the_frozen_file_need_it(run, tmp_path, call):
    """Of a model that both files have: without copies and without a pointer."""
    ours = {field.name for field in dataclasses.fields(train_gpt.Config)}
    theirs = dataclasses.asdict(frozen.PRESETS["tiny"]) | {"copy": 0}
    more = {field: x for field, x in theirs.items() if field not in ours}
    more |= dict.fromkeys(ours - theirs.keys())
    with np.load(run.path) as parts:
        pointer = [name for name in parts if name.startswith("pointer")]
    path = edited(run, tmp_path, config=more, **dict.fromkeys(pointer))
    greedy = "ABC", "--temperature", "0"
    status, out, err = call(*greedy, path=path)
    assert (status, out) == (2, "") and "only one of them has the field averages; name the" in err
    status, out, err = call(*greedy, "--script", str(PATH), path=path)
    assert (status, out) == (0, ALPHABET + "\n") and "has changed since" in err


# ---- Finding weights and scripts -----------------------------------------------------------------
@pytest.fixture
def clone(run, tmp_path, monkeypatch):
    """A repository with logs/, in which the train_gpt.py has changed since the run."""
    (tmp_path / "train_gpt.py").write_text(f"# another\n{train_gpt.SOURCE}")
    (tmp_path / "logs").mkdir()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(weights, "ROOT", tmp_path)
    return tmp_path


def test_without_weights_the_newest_are_taken(clone, run, call):
    assert call("ABC", path=None) == (
        2, "", "sample.py: there are no weights in logs/: train first, ./run.sh\n")  # fmt: skip
    for name, time in ("old", 1e9), ("new", 2e9), ("middle", 1.5e9):
        shutil.copy(run.path, f"logs/{name}.npz")
        os.utime(f"logs/{name}.npz", (time, time))
    shutil.copy(TRAIN, "my_idea.py")
    status, out, err = call("ABC", "--temperature", "0", path=None)
    newest, script, rate = err.splitlines()
    assert (status, out) == (0, ALPHABET + "\n")
    assert newest == "sample.py: takes the newest weights, logs/new.npz"
    assert script == "sample.py: takes my_idea.py, which trained logs/new.npz"
    Path("my_idea.py").unlink()
    assert "has changed since logs/old.npz" in call("--tokens", "1", path="logs/old.npz")[2]


def test_the_script_that_trained_weights_is_in_their_log(clone, run):
    source = crc32(train_gpt.SOURCE.encode())
    for folder, is_found in ("logs", True), (".", False):  # somebody else's could run anything
        log = Path(folder, "x.txt")
        log.write_text(f"{train_gpt.SOURCE}{'=' * 100}\nfacts\n")
        for name in "x.npz", "x/7.state":
            path = Path(folder, name)
            script, remark = weights.find_script(path, source)
            assert script == (log if is_found else clone / "train_gpt.py")
            assert remark == (f"takes the script that trained {path} from {log}" * is_found)
            assert weights.find_script(path, source + 1) == (clone / "train_gpt.py", "")
    assert weights.open_script(Path("logs/x.txt")).SOURCE == train_gpt.SOURCE


@pytest.mark.parametrize("words, path, prompt", [
    (["none.npz"], "none.npz", None), (["7.state", "a b"], "7.state", "a b"),
    (["a b"], "logs/x.npz", "a b"), ([], "logs/x.npz", None), (["here"], "here", None),
    (["x" * 9999], "logs/x.npz", "x" * 9999), (["--script", "s", "here", "here"], "here", "here"),
])  # fmt: skip
def test_a_word_is_weights_if_it_names_a_file(words, path, prompt, clone):
    for name in "here", "logs/x.npz":
        Path(name).touch()
    args = weights.parser("", prompt="PROMPT").parse_args(words)
    assert (args.weights, args.prompt) == (Path(path), prompt)
