"""What train_gpt.py itself refuses, with status 2 and a line: what would be wrong in silence,
broken shards, and devices that do not fit."""

import dataclasses
import os
import re
import shlex
from pathlib import Path
from types import SimpleNamespace

import jax
import numpy as np
import pytest

import train_gpt
from tests.tools import ROOT, SMALL, write_shard
from train_gpt import LONG, Config, Layer, Stage

TINY = f"tiny {shlex.join(SMALL)}"
STAGE = Stage(6, 256, short=8, long=8, max_doc=0, lr=1.0)
NAMES = "x_train_000001.bin", "x_train_000002.bin", "x_val_000000.bin"
TEXT = np.where(np.arange(1100) % 50 == 0, 256, np.arange(1100) % 97)


@pytest.fixture
def data(tmp_path, monkeypatch) -> Path:
    """A folder of two train shards, with tokens for 4 steps each, and a val shard for 2; `tiny` has
    a stage of 6 steps."""
    monkeypatch.chdir(tmp_path)
    tiny = dataclasses.replace(train_gpt.PRESETS["tiny"], stages=(STAGE,), head_chunk=64)
    monkeypatch.setitem(train_gpt.PRESETS, "tiny", tiny)
    one = jax.devices()[:1]
    monkeypatch.setattr(jax, "devices", lambda: one)
    monkeypatch.setattr(train_gpt, "run", lambda *_: pytest.fail("it ran"))
    for name in NAMES:
        write_shard(tmp_path / name, TEXT)
    return tmp_path


@pytest.fixture
def refusal(data, capsys):
    """A function that starts a run, which must be refused, and returns the line on stderr."""

    def refusal(flags: str = "") -> str:
        with pytest.raises(SystemExit) as stopped:
            train_gpt.main([*shlex.split(f"{TINY} {flags}"), "--data", str(data)])
        out, err = capsys.readouterr()
        assert stopped.value.code == 2 and re.fullmatch(r"train_gpt\.py: .+\n", err) and out == ""
        return err

    return refusal


# ---- What would be wrong in silence --------------------------------------------------------------
FIRST = Layer(LONG, value_table=0)
NO_ATTENTION = "layer 1 has no attention: it can only set"
MUDD = "layer 1: mudd adds ngram, not x0: set ngram=True, x0=False"
SILENT = dict(  # the second layer, changes of Config, the message
    key_offset=(Layer(None, key_offset=True), {}, NO_ATTENTION),
    attend_to=(Layer(None, attend_to=0), {}, NO_ATTENTION),
    mudd=(Layer(None, mudd=("layer0",), x0=False, ngram=True), {}, NO_ATTENTION),
    mudd_ngram=(Layer(LONG, mudd=("input",), x0=False), {}, MUDD),
    mudd_x0=(Layer(LONG, mudd=("input",), ngram=True), {}, MUDD),
    tokens=(
        FIRST,
        dict(batch=2, stages=(dataclasses.replace(STAGE, tokens=257),)),
        "stage 0: --batch 2 does not divide 257 tokens",
    ),
    steps=(FIRST, dict(stages=(STAGE, STAGE), steps=1), "--steps 1 is less than 2 stages"),
    heads=(FIRST, dict(H=40), "a head has 4 channels"),  # they hold the document's code alone
    adam_every=(FIRST, dict(adam_every=3), "--adam_every 3 is not 1 or 2"),
)


@pytest.mark.parametrize("name", SILENT)
def test_a_tweak_that_would_be_wrong_in_silence_fails_with_its_reason(name):
    layer, changes, message = SILENT[name]
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(train_gpt.PRESETS["tiny"], layers=(FIRST, layer, FIRST), **changes)


# ---- Devices -------------------------------------------------------------------------------------
def test_devices_must_divide_batch_and_groups(refusal, monkeypatch):
    monkeypatch.setattr(jax, "devices", lambda: jax.local_devices()[:3])
    stages = (dataclasses.replace(STAGE, tokens=240),)
    changed = dataclasses.replace(train_gpt.PRESETS["tiny"], stages=stages)
    monkeypatch.setitem(train_gpt.PRESETS, "tiny", changed)
    message = refusal("--batch 24")
    assert "3 devices do not divide --batch 24 or 8 matrices: use 1, 2, 4" in message


BEST = "float8_e4m3fn", "float8_e5m2"
BFLOAT16 = "bfloat16", "bfloat16"


@pytest.mark.parametrize("platform, kind, capability, attention, head", [
    ("gpu", "NVIDIA H100 80GB HBM3", "9.0", "cudnn", BEST),
    ("gpu", "NVIDIA GeForce RTX 4090", "8.9", "cudnn", BEST),
    ("gpu", "NVIDIA A100-SXM4-80GB", "8.0", "cudnn", BFLOAT16),
    ("gpu", "Tesla T4", "7.5", "band", BFLOAT16),
    ("gpu", "AMD Instinct MI300X", "gfx942", "band", BEST),
    ("tpu", "TPU v6 lite", "", "band", BFLOAT16),
    ("tpu", "TPU7x", "", "band", BEST),
])  # fmt: skip
def test_formats_and_kernel_fit_the_device(
    monkeypatch, platform, kind, capability, attention, head
):
    """Also for 16 devices on two hosts, with the flags that run/hosts.md gives."""
    device = SimpleNamespace(platform=platform, device_kind=kind, process_index=0, id=0)
    if capability:
        device.compute_capability = capability
    monkeypatch.setattr(jax, "devices", lambda: [device] * 16)
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    with pytest.raises(SystemExit):
        train_gpt.fit_devices(Config())
    page = " ".join((ROOT / "run/hosts.md").read_text(encoding="utf-8").split())
    flags = re.search("16 devices, the flags are `(.*?)`", page)[1]
    _, c = train_gpt.parse_config(flags.split())
    formats = dict(head_forward=head[0], head_backward=head[1])
    expected = dataclasses.replace(c, attention=attention, **formats)
    assert train_gpt.fit_devices(c) == ([device] * 16, expected)
    wide = dataclasses.replace(c, compute="float32")
    assert train_gpt.fit_devices(wide)[1].attention == "band"  # cuDNN has no float32


# ---- Shards --------------------------------------------------------------------------------------
def test_broken_shards_are_refused(refusal, data):
    message = f"{data / NAMES[2]} is not a complete shard: "
    for size in 3225, 3000, 1024, 0:
        os.truncate(data / NAMES[2], size)
        assert message in refusal()
    for header in dict(magic=1), dict(version=2), dict(count=0), dict(count=2**31 - 1):
        write_shard(data / NAMES[2], TEXT, **header)
        assert message in refusal()


def test_too_few_tokens_are_refused(refusal, data):
    write_shard(data / "x_val_000001.bin", TEXT)  # only the first val shard counts
    (data / "._x_train_000001.bin").write_bytes(b"?")  # this name is no shard
    assert f"{data}: the val shards hold 2 of 3 batches" in refusal("--val_tokens 1536")
    (data / NAMES[1]).unlink()
    assert f"{data}: the train shards hold 4 of 6 batches" in refusal()


@pytest.mark.parametrize("name", NAMES[1:])
def test_tokens_beyond_the_vocabulary_are_refused(refusal, data, name):
    tokens = TEXT.copy()
    tokens[-1] = 257  # no batch has it
    write_shard(data / name, tokens)
    assert f"{data / name}: largest token is 257 (--vocab 257), " in refusal()
    write_shard(data / name, np.full(1100, 7))  # of another vocabulary
    assert "largest token is 7 (--vocab 257), 0 are --eot" in refusal()


def test_a_process_of_torchrun_does_not_train_alone(refusal, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert "WORLD_SIZE is set, as by torchrun: start ./run.sh" in refusal()
