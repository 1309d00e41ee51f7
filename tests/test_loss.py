"""evals/loss.py against losses that are computed here, and a run's own validation."""

import dataclasses
import re
import sys
from types import SimpleNamespace

import jax
import loss
import numpy as np
import pytest
import weights

import train_gpt
from tests.test_export import TRAIN
from tests.test_pointer import formula
from tests.tools import FLOAT32, bank_matrices, ngram_rows, noise, write_shard
from train_gpt import Stage


@pytest.fixture(scope="module")
def run(trained) -> SimpleNamespace:
    """The weights of a run, and its validation shard of documents of 1 to 100 tokens."""
    (path,) = trained.glob("logs/*.npz")
    w = weights.open_weights(path, TRAIN)
    tokens = train_gpt.open_shard(trained / "x_val_000000.bin")
    return SimpleNamespace(w=w, path=path, folder=trained, tokens=tokens)


T = 64


def by_hand(run, c, stage, S=12, L=30) -> list[np.ndarray]:
    """Losses (16, T), and those without copies, with windows S and L. The frequencies stay those of
    the stage's windows, as in loss.py."""
    frequencies = train_gpt.rope_frequencies(c, stage)
    windows = dataclasses.replace(c.stages[stage], short=S, long=L)
    c = dataclasses.replace(c, stages=(*c.stages[:stage], windows))
    rows = np.int32([run.tokens[i * T : (i + 1) * T + 1] for i in range(16)])
    whole = {k: jax.numpy.array(x) for k, x in run.w.arrays.items()}
    whole |= {k: bank_matrices(k, whole[k], c) for k in ("qk", "vo", "mlp")}

    @jax.jit
    def read(rows):
        inputs = rows[:, :-1]
        return train_gpt.forward(ngram_rows(whole, inputs, c), inputs, c, stage)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(train_gpt, "rope_frequencies", lambda *_: frequencies)
        x = np.float64(read(rows))
    x_BTD = (x / np.sqrt(np.square(x).mean(axis=-1, keepdims=True))).astype("f4")
    both = formula(x_BTD, whole["head"], whole, rows, c)
    targets = rows[:, 1:, None]
    return [-np.take_along_axis(np.asarray(log_p), targets, axis=-1)[..., 0] for log_p in both]


def test_losses_are_those_by_hand_and_of_the_runs_own_validation(run):
    validation, _ = by_hand(run, run.w.c, 0)
    assert validation.mean() == pytest.approx(run.w.result["val_loss"], abs=1e-4)
    sizes = (4, 8, 8), (6, 8, 40), (0, 9, 50)
    stages = tuple(Stage(steps, 256, short, long, 0, 1.0) for steps, short, long in sizes)
    w = run.w._replace(c=dataclasses.replace(run.w.c, stages=stages), stage=1)
    expected = by_hand(run, w.c, 1, 4, 60)
    tokens, *found = loss.measure(w, run.tokens, 4, 60, T, 5, 2)  # the last step is half empty
    assert tokens.shape == (5, T + 1)
    np.testing.assert_allclose(found, [x[:5] for x in expected], rtol=0, atol=1e-4)


def test_without_a_pointer_the_padding_is_part_of_the_softmax_as_in_training():
    """train_gpt.head_loss() is the loss that training prints."""
    c = dataclasses.replace(
        train_gpt.PRESETS["tiny"], D=16, H=2, pointer=0, head_chunk=8, g_scale=1.0, **FLOAT32
    )
    x_BTD = train_gpt.norm(noise("x", (1, 8, 16)))
    head = noise("head", (train_gpt.padded_vocab(c), 16))
    tokens = np.arange(9, dtype=np.int32)[None]
    model = SimpleNamespace(code=train_gpt, c=c)
    log_p, alone = weights.target_log_p(model, {"head": head}, x_BTD, tokens, chunk=7)
    ones = np.ones(1, "f4")
    summed = train_gpt.head_loss(x_BTD[0], jax.numpy.array(head), tokens.T[1:], ones, None, c)
    assert -log_p.sum() == pytest.approx(float(summed), rel=1e-3)
    np.testing.assert_array_equal(log_p, alone)


def positions_by_hand(inputs, losses) -> list[list[float]]:
    """Rows of by_position(). A loss is in the bin of the smallest power of two that is not less
    than the number of tokens that were read of its document."""
    bins = {}
    for row, nats in zip(inputs, losses, strict=True):
        read = 0
        for token, nat in zip(row, nats, strict=True):
            read = 1 if token == 256 else read + 1
            bins.setdefault(1 << (read - 1).bit_length(), []).append(nat)
    return [[size // 2 + 1, size, len(x), np.mean(x), np.std(x) / len(x) ** 0.5]
            for size, x in sorted(bins.items())]  # fmt: skip


@pytest.fixture
def call(run, monkeypatch, capsys):
    """Runs loss.py in this process, and returns what it prints."""

    def call(*argv):
        monkeypatch.setattr(sys, "argv", ["loss.py", str(run.path), *map(str, argv)])
        loss.main()
        return capsys.readouterr().out

    return call


def test_what_it_prints(run, monkeypatch, call):
    tokens = np.int32([run.tokens[i * T : (i + 1) * T + 1] for i in range(10)])
    losses, alone = np.random.default_rng(0).random((2, 10, T), "f4")
    measure = lambda w, shard, *sizes: sizes == (5, 30, T, 10) and (tokens, losses, alone)
    monkeypatch.setattr(loss, "measure", measure)
    printed = call(run.folder, "--S", 5, "--tokens", 700).splitlines()
    inputs = tokens[:, :-1]
    assert " nats per byte, " in printed[0] and " nats/byte " in printed[4]
    numbers = [[*map(float, re.findall(r"[\d.]+", line))] for line in printed]
    np.testing.assert_allclose(numbers[0][0], losses.mean(), atol=2e-4)
    np.testing.assert_allclose(numbers[1][0], alone.mean(), atol=2e-4)
    np.testing.assert_allclose(numbers[5:], positions_by_hand(inputs, losses), atol=2e-4)


def test_bits_are_per_byte_of_the_text(run, monkeypatch, call):
    """For tokens of 0 to 4 bytes, and an end-of-text, which has none."""
    pieces = SimpleNamespace(piece=lambda token: b"bytes"[: token % 5])
    monkeypatch.setattr(weights, "tokenizer", lambda w: pieces)
    tokens = np.int32([[256, 1, 2, 3, 4, 256, 3, 4]])
    losses = np.float32([range(1, 8)])
    monkeypatch.setattr(loss, "measure", lambda *_: (tokens, losses, losses + 0.5))
    printed = call(run.folder)
    bits = 28 / np.log(2) / 17
    assert printed.startswith(f"4.0000 nats per token, {bits:.4f} bits per byte\n4.5000 nats with")
    assert "\n7 tokens, of which 1 are end-of-text and have no bytes; 17 bytes\n" in printed


@pytest.mark.parametrize("message, argv", [
    ("1500 tokens, not 1501", "{run} --T 750 --tokens 1500"), ("--T at 2", "{run} --T 1"),
    ("not a complete shard", "{here}/cut.bin"),
    ("has token 50256 and 2 documents, but the model knows 257 tokens", "{here}/gpt2.bin"),
    ("has token 199 and 0 documents", "{here}/no_eot.bin"),
    ("more than 4095 documents", "{here}/ends.bin --T 5000 --tokens 5000")])  # fmt: skip
def test_what_the_model_would_read_wrong_is_one_line(run, tmp_path, call, capsys, message, argv):
    write_shard(tmp_path / "gpt2.bin", [256, 50256, *range(2000)])
    write_shard(tmp_path / "no_eot.bin", [*range(200)])
    write_shard(tmp_path / "cut.bin", [256, *range(200)], count=300)
    write_shard(tmp_path / "ends.bin", [256] * 6000)
    with pytest.raises(SystemExit, match="2"):
        call(*argv.format(run=run.folder, here=tmp_path).split())
    assert re.fullmatch(f".*{re.escape(message)}.*\n", capsys.readouterr().err)
