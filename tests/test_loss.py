"""evals/loss.py against losses that are computed here, also with faults planted in it."""

import dataclasses
import functools
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from unittest import mock

import jax
import numpy as np
import pytest
import weights

import train_gpt
from tests.test_pointer import formula
from tests.tools import bank_matrices, bigram_rows, write_shard
from train_gpt import Stage

ROOT = Path(train_gpt.__file__).parent
SOURCE = (ROOT / "evals/loss.py").read_text()
# Pairs of text to replace in loss.py; ("", "") is no fault. Others are in lab/faults/evals.toml.
faults = functools.partial(pytest.mark.parametrize, "old, new")


def load(old: str = "", new: str = "") -> ModuleType:
    """loss.py as a module, with one text in it replaced."""
    assert not old or SOURCE.count(old) == 1, old
    module = ModuleType("loss")
    module.__file__ = weights.__file__  # its neighbour
    exec(SOURCE.replace(old, new), module.__dict__)
    return module


@pytest.fixture(scope="module")
def run(trained, tmp_path_factory) -> SimpleNamespace:
    """The weights of a run, and its validation shard of documents of 1 to 100 tokens."""
    folder = tmp_path_factory.mktemp("loss") / "run"
    shutil.copytree(trained, folder)
    tokens = train_gpt.open_shard(folder / "x_val_000000.bin")
    env = os.environ | dict(PYTHONPATH=str(ROOT))

    def start(*argv):
        command = [sys.executable, *map(str, argv)]
        return subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True)

    (path,) = folder.glob("logs/*.npz")
    w = weights.open_weights(path, ROOT / "train_gpt.py")
    hand = functools.cache(functools.partial(by_hand, w.arrays, tokens))
    yield SimpleNamespace(w=w, path=path, folder=folder, tokens=tokens, start=start, hand=hand)


def by_hand(arrays, tokens, c, stage, T, count, S=12, L=30) -> list[np.ndarray]:
    """Losses (count, T), and those without copies, with windows S and L. The frequencies stay those
    of the stage's windows, as in loss.py."""
    frequencies = train_gpt.rope_frequencies(c, stage)
    windows = dataclasses.replace(c.stages[stage], short=S, long=L)
    c = dataclasses.replace(c, stages=(*c.stages[:stage], windows))
    rows = np.int32([tokens[i * T : (i + 1) * T + 1] for i in range(count)])
    whole = {k: jax.numpy.array(x) for k, x in arrays.items()}
    whole |= {k: bank_matrices(k, whole[k], c) for k in ("qk", "vo", "mlp")}

    @jax.jit
    def read(rows):
        inputs = rows[:, :-1]
        return train_gpt.forward(bigram_rows(whole, inputs, c), inputs, c, stage)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(train_gpt, "rope_frequencies", lambda *_: frequencies)
        x = np.float64(read(rows))
    x_BTD = (x / np.sqrt(np.square(x).mean(axis=-1, keepdims=True))).astype("f4")
    both = formula(x_BTD, whole["head"], whole, rows, c)
    targets = rows[:, 1:, None]
    return [-np.take_along_axis(np.asarray(log_p), targets, axis=-1)[..., 0] for log_p in both]


def test_by_hand_is_the_runs_own_validation(run):
    loss = run.hand(run.w.c, 0, 64, 16)[0].mean()
    assert loss == pytest.approx(run.w.result["val_loss"], abs=1e-4)


@faults([
    ("", ""), ("x, tokens,", "x, jnp.roll(tokens, 1, axis=1),"),  # a token predicts itself
    ("(log_p, alone)", "(alone, log_p)"),
    ("short=S, long=L", "short=L, long=S")])  # fmt: skip
def test_losses_are_those_by_hand_and_wrong_ones_are_seen(run, old, new):
    sizes = (4, 8, 8), (6, 8, 40), (0, 9, 50)
    stages = tuple(Stage(steps, 256, short, long, 0, 1.0) for steps, short, long in sizes)
    w = run.w._replace(c=dataclasses.replace(run.w.c, stages=stages), stage=1)
    cases = [(100, 5, 4)]  # T, count, devices
    if not old:
        cases += [(100, 5, 8), (2, 3, 1), (37, 9, 2)]
    for T, count, devices in cases:
        expected, _ = run.hand(w.c, 1, T, count, 4, 60)
        measure = load(old, new).measure
        tokens, losses, _ = measure(w, run.tokens, 4, 60, T, count, devices)
        assert tokens.shape == (count, T + 1)
        right = losses.shape == expected.shape and np.abs(losses - expected).max() < 1e-4
        assert right == (old == "")


def positions_by_hand(inputs, losses) -> list[list[float]]:
    """Rows of by_position(). A loss is in the bin of the smallest power of two that is not less
    than the number of tokens that were read of its document."""
    bins = {}
    for row, nats in zip(inputs, losses, strict=True):
        read = 0
        for token, loss in zip(row, nats, strict=True):
            read = 1 if token == 256 else read + 1
            size = 1
            while size < read:
                size *= 2
            bins.setdefault(size, []).append(loss)
    return [[size // 2 + 1, size, len(x), np.mean(x), np.std(x) / len(x) ** 0.5]
            for size, x in sorted(bins.items())]  # fmt: skip


@faults(
    [
        ("", ""),
        ("index, 0)", "0, 0)"),
        ("index, 0)", "index + 1, 0)"),
        ("[:, :-1] ==", "[:, 1:] =="),
    ]
)
def test_a_position_is_what_was_read_of_the_document(run, old, new):
    tokens = run.tokens[:1281].reshape(3, 427)  # rows 1 and 2 begin within a document
    losses = np.random.default_rng(1).normal(5, 1, (3, 426)).astype("f4")
    rows = load(old, new).by_position(tokens, losses, 256)
    expected = np.array(positions_by_hand(tokens[:, :-1], losses))
    assert (rows.shape == expected.shape and np.allclose(rows, expected)) == (old == "")


@faults([
    ("", ""), ("0 if token == c.eot else len", "len"), ("lengths[targets]", "lengths[tokens]"),
    ("loss * targets.size / np", "loss * size / np")])  # fmt: skip
def test_bits_per_byte(run, tmp_path, monkeypatch, capsys, old, new):
    """Tokens are one to three bytes; of 7 targets one is an end-of-text; the losses are 1 to 7."""
    shard = write_shard(tmp_path / "x.bin", [7, 3, 4, 5, 256, 8, 8, 2, 2])
    loss = load(old, new)
    piece = lambda token: b"xyz"[: token % 3 + 1]
    monkeypatch.setattr(weights, "tokenizer", lambda c: SimpleNamespace(piece=piece))
    losses = np.float32([range(1, 8)])
    loss.measure = lambda w, shard, *_: (np.int32([shard[:8]]), losses, losses + 0.5)
    argv = f"loss.py {run.path} {shard} --T 7 --tokens 13 --out {shard}".split()
    monkeypatch.setattr(sys, "argv", argv)
    loss.main()
    right = f"4.0000 nats per token, {28 / np.log(2) / 15:.4f} bits per byte\n"
    right += "4.5000 nats without copies of earlier tokens\n7 tokens, of which 1 "
    assert capsys.readouterr().out.startswith(right) == (old == "")


def test_a_text_without_bytes_has_no_bits(run, tmp_path, monkeypatch, capsys):
    shard = write_shard(tmp_path / "x.bin", [256] * 9)
    loss = load()
    losses = np.float32([range(1, 8)])
    loss.measure = lambda w, shard, *_: (np.int32([shard[:8]]), losses, losses)
    monkeypatch.setattr(sys, "argv", f"loss.py {run.path} {shard} --T 7 --tokens 7".split())
    loss.main()
    assert capsys.readouterr().out.startswith("4.0000 nats per byte, no bits, because ")


def test_too_little_memory_is_one_line(run, monkeypatch, capsys):
    """XLA's error, and that of NumPy."""
    for error in (
        RuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating 9 bytes."),
        MemoryError(),
    ):
        loss = load()
        loss.measure = mock.Mock(side_effect=error)
        monkeypatch.setattr(sys, "argv", ["loss.py", str(run.path), str(run.folder)])
        with pytest.raises(SystemExit, match="2"):
            loss.main()
        line = "loss.py: --T 64 needs more memory than there is: lower it, because attention's "
        assert capsys.readouterr().err == f"{line}memory grows with its square\n"


def test_from_the_shell(run):
    done = run.start(ROOT / "evals/loss.py", run.path, run.folder, "--S", 5, "--tokens", 700)
    assert (done.returncode, done.stderr) == (0, "")
    inputs = run.tokens[:640].reshape(10, 64)
    losses, alone = run.hand(run.w.c, 0, 64, 10, S=5)
    *printed, picture = done.stdout.splitlines()
    assert picture == f"{run.path.with_suffix('')}_loss.svg: the loss by position"
    assert " nats per byte, " in printed[0] and " nats/byte " in printed[4]
    numbers = [[*map(float, re.findall(r"[\d.]+", line))] for line in printed]
    np.testing.assert_allclose(numbers[0][0], losses.mean(), atol=2e-4)
    np.testing.assert_allclose(numbers[1][0], alone.mean(), atol=2e-4)
    np.testing.assert_allclose(numbers[5:], positions_by_hand(inputs, losses), atol=2e-4)
    assert {path.suffix for path in run.path.parent.glob("*_loss.*")} == {".svg"}


@pytest.mark.parametrize("message, argv", [
    ("1500 tokens, not 1501", "{run} --T 750 --tokens 1500"), ("at least 2 tokens", "{run} --T 1"),
    ("at least 0 tokens", "{run} --L -1"), ("--tokens 63 is less than --T 64", "{run} --tokens 63"),
    ("no *_val_*.bin", "{here}"), ("choose another --out", "{run} --out {here}/none/x"),
    ("not a complete shard", "{here}/cut.bin"),
    ("gpt2.bin has token 50256, but the model knows 257 tokens: name a", "{here}/gpt2.bin"),
    ("no_eot.bin has no token 256, which starts a document: name a", "{here}/no_eot.bin"),
    ("no such file or folder: typo.bin", "typo.bin")])  # fmt: skip
def test_bad_input_is_one_line(run, tmp_path, monkeypatch, capsys, message, argv):
    write_shard(tmp_path / "gpt2.bin", [50256, *range(2000)])
    write_shard(tmp_path / "no_eot.bin", [*range(200)])
    write_shard(tmp_path / "cut.bin", [256, *range(200)], count=300)
    arguments = argv.format(run=run.folder, here=tmp_path).split()
    monkeypatch.setattr(sys, "argv", ["loss.py", str(run.path), *arguments])
    with pytest.raises(SystemExit, match="2"):
        load().main()
    assert re.fullmatch(f".*{re.escape(message)}.*\n", capsys.readouterr().err)
