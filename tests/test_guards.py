"""A run that cannot work is refused: exit status 2, a line on stderr, no compilation, no log."""

import contextlib
import dataclasses
import hashlib
import importlib.util
import os
import re
import shlex
import sys
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import guard
import jax
import launch
import numpy as np
import pytest

import train_gpt
from tests.tools import MINI32, ROOT, SMALL, write_shard
from train_gpt import LONG, SHORT, Config, Layer, Stage

TINY = f"tiny {shlex.join(SMALL)}"
STAGE = Stage(6, 256, short=8, long=8, max_doc=0, lr=1.0)
NAMES = "x_train_000001.bin", "x_train_000002.bin", "x_val_000000.bin"
TEXT = np.where(np.arange(1100) % 50 == 0, 256, np.arange(1100) % 97)


def set_preset(monkeypatch, name: str, **changes) -> None:
    """Changes a preset, as a user does who edits the file."""
    changed = dataclasses.replace(train_gpt.PRESETS[name], **changes)
    monkeypatch.setitem(train_gpt.PRESETS, name, changed)


@pytest.fixture(autouse=True)
def workplace(tmp_path, monkeypatch):
    """An empty folder, one device, `tiny` with a stage of 6 steps; a test that compiles fails."""

    def no_compiler(*_):
        pytest.fail("something compiled")

    one = jax.devices()[:1]
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(jax, "devices", lambda: one)
    monkeypatch.setattr(train_gpt, "compile_train_step", no_compiler)
    monkeypatch.setattr(train_gpt, "compile_val_step", no_compiler)
    set_preset(monkeypatch, "tiny", stages=(STAGE,), head_chunk=64)


@pytest.fixture
def data(tmp_path) -> Path:
    """A folder of two train shards, with tokens for 4 steps each, and a val shard for 2."""
    folder = tmp_path / "d"
    folder.mkdir()
    for name in NAMES:
        write_shard(folder / name, TEXT)
    return folder


@pytest.fixture
def refusal(capsys):
    """A function that starts a run by the launcher, which must be refused, and returns the line on
    stderr."""

    def run(command: str, *argv: str) -> str:
        with pytest.raises(SystemExit) as stopped:
            launch.train(train_gpt, [*shlex.split(command), *map(str, argv)], "./run.sh")
        shown = capsys.readouterr()
        assert stopped.value.code == 2
        assert re.fullmatch(r"(train_gpt|launch)\.py: .+\n", shown.err)
        assert not any(Path("logs").glob("*")) and shown.out == ""
        return shown.err

    return run


# ---- Flags ---------------------------------------------------------------------------------------
@pytest.mark.parametrize("argv, message", [
    ("huge", "'huge'.*record.*tiny"),
    ("tiny --bogus 1", "--bogus"),
    ("tiny --step 3", "--step "),  # a typo must not become another flag
    ("tiny --layers 3", "--layers"),  # layers are edited in the file
    ("tiny more", "more"),
    ("tiny --steps 1.5", "--steps.*'1.5'"),
    ("tiny --steps", "--steps"),
    ("tiny --steps -1", "--steps is at least 1, and cannot be -1"),
    ("tiny --steps 0", "--steps is at least 1, and cannot be 0; without --steps, the whole"),
    ("record --steps 3", "--steps is at least 4, one for each of 4 stages, and cannot be 3"),
    ("tiny --batch=-2", "--batch is at least 1, and cannot be -2"),
    ("tiny --muon_lr nan", "--muon_lr must be a number from 0 to"),
    ("tiny --val_tokens 0", "--val_tokens is at least 1, and cannot be 0"),
    ("tiny --val_tokens 66560", "--val_tokens 66560 is not a multiple of 8192, a step's"),
    ("tiny --val_T 768", "--val_tokens 65536 is not a multiple of 6144, a step's"),
    ("tiny --head_chunk 48", r"--head_chunk 48 does not divide .*\[1024, 256\] tokens, but 16"),
    ("tiny --batch 3", "stage 0: --batch 3 does not divide 256 tokens"),
    ("tiny --cooldown_start 1", "--cooldown_start is not before --cooldown_end"),
    ("tiny --head_chunk 512", "--head_chunk 512 does not divide .* tokens, but 256"),
    ("tiny --adam_every 3", "--adam_every 3 is not 1 or 2"),
    ("tiny --attention flash", "--attention flash is not one of: cudnn, band"),
    ("tiny --compute float8_e4m3fn", "--compute .* is not one of: bfloat16, float16, float32"),
    ("tiny --pointer 257", "--pointer 257 is more than a sequence, 256 tokens"),
    ("tiny --vocab 256", "--eot 256 is no token of --vocab 256"),
    ("tiny --resume=", "--resume needs the path"),  # of an unset variable
    ("tiny --bigrams 7", r"--bigrams 7: too few for \(2, 3, 4, 5\)"),
    ("tiny --ngram_capacity 0", r"--ngram_capacity 0.0 is not in \(0, 1\]"),
    ("tiny --ngram_capacity 1.1", r"--ngram_capacity 1.1 is not in \(0, 1\]"),
])  # fmt: skip
def test_wrong_flags_are_refused(refusal, argv, message):
    assert re.search(message, refusal(argv))


WRONG = {  # values that a field cannot have, separated by spaces
    "seed": "-7 -2 4294967296 99999999999999999999",
    "steps": "99999999999",
    "compute head_forward head_backward": "fp32 fp8 int8 float64 complex64 a,b",
    "F bigrams": "0 -1 99999999999",
    "vocab bigrams": "2147483647 134217729",
    "vocab": "65537",
    "D H batch val_T pointer_D pointer_band": "0 -2",
    "vocab microbatch head_chunk val_every dc_window": "0 -1",
    "R eot pointer save": "-1",
    "save": "2",
    "eot": "257",
    "pointer": "100000",
    "muon_lr adam_lr lr_floor untie cooldown_end momentum_warmup momentum_cooldown": "nan inf",
    "muon_lr adam_lr lr_floor untie cooldown_start momentum_warmup momentum_cooldown": "-0.1",
    "momentum_low momentum_high": "nan inf -0.1 1 1.5",
    "x_scale w_scale g_scale score_scale": "nan inf 0 -1",
    "score_scale": "0.01",
    "ngram_capacity": "nan inf -1",
    "target": "nan inf",
}


@pytest.mark.parametrize("names", WRONG)
def test_values_that_only_the_program_would_refuse_are_refused_before_it(refusal, names):
    for name in names.split():
        for value in WRONG[names].split():
            assert f"--{name}" in refusal(f"tiny --{name}={value}"), value


def test_values_at_the_end_of_their_ranges_are_right():
    lines = (
        "--seed 0 --pointer 0 --lr_floor 0 --untie 0",
        "--seed 4294967295 --pointer 256 --untie 9",
    )
    lines += "--momentum_low 0 --momentum_warmup 0 --target -1 --R 0", "--compute float16"
    lines += ("--vocab 65536 --bigrams 134217728",)
    for line in lines:
        guard.check_run(train_gpt, dataclasses.replace(CONFIGS["tiny"], **parsed(line)))


def parsed(line: str) -> dict:
    """The fields that these flags set."""
    c = train_gpt.parse_config(["tiny", *line.split()])[1]
    return {name: getattr(c, name) for name in re.findall(r"--(\w+)", line)}


FIELDS = """
    bare: int = 3
    share: float = 0.5          # 10 % of what %s and %(prog)s have
    word: str = "a b"
    betas: tuple = (0.8, 0.95)  # of Adam
"""


@pytest.fixture
def tweaked(tmp_path, monkeypatch):
    """train_gpt.py with more fields in Config, as a user adds them who tries something."""
    end = "    # fmt: on\n\n    def __post_init__"
    assert train_gpt.SOURCE.count(end) == 1
    path = tmp_path / "tweaked.py"
    path.write_text(train_gpt.SOURCE.replace(end, f"{FIELDS}{end}"))
    spec = importlib.util.spec_from_file_location("tweaked", path)
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "tweaked", module)
    spec.loader.exec_module(module)
    return module


def test_a_new_field_is_a_flag_of_its_type(tweaked):
    def parse(*flags: str) -> tuple:
        c = tweaked.parse_config(["tiny", *flags])[1]
        return c.bare, c.share, c.word, c.betas

    assert parse() == (3, 0.5, "a b", (0.8, 0.95))
    flags = parse("--bare", "0", "--share", "1", "--word", "")
    assert flags == (0, 1.0, "", (0.8, 0.95)) and isinstance(flags[1], float)
    for wrong in ["--bare", "0.5"], ["--betas", "(0.9, 0.99)"]:  # tuples are edited in the file
        with pytest.raises(SystemExit):
            parse(*wrong)


def test_help_has_the_values_of_the_preset_with_the_comments_in_the_source(tweaked, capsys):
    """Also the fields that a user has added."""
    launch.print_help(tweaked, ["tiny", "--help"])
    tiny = capsys.readouterr().out
    c = tweaked.PRESETS["tiny"]
    fields = [field for field in dataclasses.fields(c) if field.type in (int, float, str)]
    for field in fields:
        assert len(re.findall(rf"^  [ *] --{field.name} \S+", tiny, re.M)) == 1, field.name
    assert "\n  * --D 160                        model width (record: 768)\n" in tiny
    assert "\n    --save 1                       0: do not save the weights" in tiny
    steps, tokens = c.stages[0].steps, c.stages[0].tokens
    assert f"\n    --steps {steps} " in tiny and "\n  * ngrams (2, 3, 4, 5) " in tiny
    assert "\n        # To shorten a run, pass --steps alone" in tiny
    assert "\n    --bare 3\n" in tiny and "10 % of what %s and %(prog)s have\n" in tiny
    assert "\n    betas (0.8, 0.95)              of Adam\n" in tiny
    assert re.search(rf"^ +{steps} +{tokens} +64 +192 +0 +1 +\(1.0,\) +0$", tiny, re.M)
    assert "layer  3  no attention  adds layer 1" in tiny and "\n    --stall 300 " in tiny
    launch.print_help(tweaked, ["--help"])
    record = capsys.readouterr().out
    assert record.startswith("record: ") and "  * " not in record and "--D 768 " in record


# ---- Tweaks --------------------------------------------------------------------------------------
FIRST = Layer(LONG, value_table=0)
NO_ATTENTION = "layer 1 has no attention: it can only set x0, bigram, skip_from, new_gates"
SILENT = dict(  # what would be wrong in silence: the second layer, changes of Config, the message
    paired_heads=(Layer(None, paired_heads=True), {}, NO_ATTENTION),
    key_offset=(Layer(None, key_offset=True), {}, NO_ATTENTION),
    key_start=(Layer(None, key_start=True), {}, NO_ATTENTION),
    xsa=(Layer(None, xsa=True), {}, NO_ATTENTION),
    head_gate=(Layer(None, head_gate=True), {}, NO_ATTENTION),
    dc=(Layer(None, dc=True), {}, NO_ATTENTION),
    value_table=(Layer(None, value_table=1), {}, NO_ATTENTION),
    attend_to=(Layer(None, attend_to=0), {}, NO_ATTENTION),
    mudd=(Layer(None, mudd=("layer0",), x0=False, bigram=True), {}, NO_ATTENTION),
    mudd_bigram=(
        Layer(LONG, mudd=("input",), x0=False),
        {},
        "layer 1: mudd adds bigram, not x0: set bigram=True, x0=False",
    ),
    mudd_x0=(
        Layer(LONG, mudd=("input",), bigram=True),
        {},
        "layer 1: mudd adds bigram, not x0: set bigram=True, x0=False",
    ),
    tokens=(
        FIRST,
        dict(batch=2, stages=(dataclasses.replace(STAGE, tokens=257),)),
        "stage 0: --batch 2 does not divide 257 tokens",
    ),
    steps=(FIRST, dict(stages=(STAGE, STAGE), steps=1), "--steps 1 is less than 2 stages"),
)


def changed_stage(**changes) -> dict:
    """The field `stages`, with one that is changed."""
    return dict(stages=(dataclasses.replace(STAGE, **changes),))


STREAMS = "there are only ['x0', 'bigram', 'input', 'value0', 'layer0']"
LATER = dict(  # what would fail while it is compiled, which only the launcher refuses
    window=(Layer("middle"), {}, "layer 1: no window 'middle'"),
    attend_to_itself=(Layer(LONG, attend_to=1), {}, "layer 1: attend_to=1 is not an earlier layer"),
    attend_to_later=(Layer(LONG, attend_to=2), {}, "layer 1: attend_to=2 is not an earlier layer"),
    attend_to_last=(Layer(LONG, attend_to=-1), {}, "attend_to=-1 is not an earlier layer"),
    skip_from_itself=(Layer(None, skip_from=1), {}, "layer 1: skip_from=1 is not an earlier layer"),
    skip_from_later=(Layer(None, skip_from=2), {}, "layer 1: skip_from=2 is not an earlier layer"),
    mudd_stream=(
        Layer(LONG, mudd=("layer1",), x0=False, bigram=True),
        {},
        "layer 1: mudd reads 'layer1', " + STREAMS,
    ),
    mudd_table=(
        Layer(LONG, mudd=("value1",), x0=False, bigram=True),
        {},
        "layer 1: mudd reads 'value1', " + STREAMS,
    ),
    mudd_word=(
        Layer(LONG, mudd="input", x0=False, bigram=True),
        {},
        "layer 1: mudd must be a tuple",
    ),
    mudd_head=(FIRST, dict(mudd_head=(("layer3", 0.0),)), "mudd_head reads 'layer3', there are"),
    mudd_list=(Layer(LONG, mudd=["x0"], x0=False, bigram=True), {}, "layer 1: mudd must be a"),
    mudd_head_list=(FIRST, dict(mudd_head=[("x0", 0.0)]), "mudd_head must be a tuple"),
    mudd_head_pair=(FIRST, dict(mudd_head=("x0", 0.0)), "mudd_head has 'x0', which is no pair"),
    mudd_head_nan=(FIRST, dict(mudd_head=(("x0", np.nan),)), "which is no pair (stream, weight)"),
    stages_list=(FIRST, dict(stages=[STAGE]), "stages must be a tuple"),
    ngrams_list=(FIRST, dict(ngrams=[2]), "ngrams must be a tuple"),
    ngrams_length=(FIRST, dict(ngrams=(2, 6)), "ngrams are (2, 6), which must be some of [2, 3, 4"),
    ngrams_none=(FIRST, dict(ngrams=()), "ngrams are (), which must"),
    no_steps=(FIRST, changed_stage(steps=0), "no stage has a step"),
    no_tokens=(FIRST, changed_stage(tokens=0), "stage 0: tokens is at least 1, and cannot be 0"),
    window_below_0=(
        FIRST,
        changed_stage(short=-1),
        "stage 0: short is at least 0, and cannot be -1",
    ),
    window_float=(FIRST, changed_stage(long=8.0), "stage 0: long 8.0 is no whole number"),
    max_doc=(FIRST, changed_stage(max_doc=-1), "stage 0: max_doc is at least 0, and cannot be"),
    rate=(FIRST, changed_stage(lr=np.nan), "stage 0: lr must be a number from 0 to"),
    targets_list=(FIRST, changed_stage(targets=[1.0]), "stage 0: targets must be a tuple"),
    targets_number=(FIRST, changed_stage(targets=1.0), "stage 0: targets must be a tuple"),
    targets_pair=(FIRST, changed_stage(targets=([1.0, 0.5],)), "stage 0: targets must be a tuple"),
    targets_nan=(FIRST, changed_stage(targets=(1.0, np.inf)), "stage 0: targets must be a tuple"),
    targets_next=(FIRST, changed_stage(targets=(0.0, 1.0)), "stage 0: the first of targets has no"),
    gap=(Layer(LONG, value_table=2), {}, "value tables are [0, 2]: leave no gaps"),
    prefix=(
        FIRST,
        dict(stages=(dataclasses.replace(STAGE, prefix=(0.0, 0.1)),)),
        "stage 0: prefix has a weight, but --prefixes names no table",
    ),
    targets=(
        FIRST,
        dict(stages=(STAGE, dataclasses.replace(STAGE, targets=(0.0, (0.0, 0.0))))),
        "stage 1: all weights in targets and prefix are 0",
    ),
)


@pytest.mark.parametrize("name", SILENT)
def test_a_tweak_that_would_be_wrong_in_silence_fails_with_its_reason(name):
    layer, changes, message = SILENT[name]
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(train_gpt.PRESETS["tiny"], layers=(FIRST, layer, FIRST), **changes)


@pytest.mark.parametrize("name", LATER)
def test_a_tweak_that_would_fail_later_is_refused(name, refusal, monkeypatch):
    layer, changes, message = LATER[name]
    set_preset(monkeypatch, "tiny", layers=(FIRST, layer, FIRST), **changes)
    assert message in refusal("tiny")


@pytest.mark.parametrize("layers, message", [([FIRST], "must be a tuple"), ((), "no layers")])
def test_layers_are_a_tuple_of_some(refusal, monkeypatch, layers, message):
    set_preset(monkeypatch, "tiny", layers=layers)
    assert message in refusal("tiny")


def test_a_right_tweak_does_not_fail():
    layers = (
        FIRST,
        Layer(None, skip_from=0, new_gates=True),
        Layer(
            SHORT, attend_to=0, value_table=1, x0=False, bigram=True, mudd=("x0", "input", "value1")
        ),
        Layer(None, bigram=True, x0=False),
        Layer(SHORT, paired_heads=True),
    )
    streams = ("layer2", 0.5), ("value0", 0.0)
    tiny = train_gpt.PRESETS["tiny"]
    guard.check_run(train_gpt, dataclasses.replace(tiny, mudd_head=streams, layers=layers))


def test_a_misspelt_field_of_a_layer_or_a_stage_fails():
    with pytest.raises(TypeError, match="head_gates"):
        Layer(SHORT, head_gates=True)
    with pytest.raises(TypeError, match="prefixes"):
        Stage(6, 256, short=8, long=8, max_doc=0, lr=1.0, prefixes=0.25)


def test_flags_that_do_not_fit_the_stages_are_refused(refusal, monkeypatch):
    set_preset(monkeypatch, "tiny", stages=(STAGE, STAGE, STAGE))
    assert "--steps is at least 3, one for each of 3 stages" in refusal(f"{TINY} --steps 2")


# ---- Devices -------------------------------------------------------------------------------------
def test_the_record_runs_on_a_cpu_only_where_that_is_asked_for(refusal, data, monkeypatch, capsys):
    small = dict(stages=(STAGE,), layers=(FIRST,), mudd_head=(), head_chunk=32, prefixes="")
    set_preset(monkeypatch, "record", **small, vocab=257, eot=256)
    started = []
    monkeypatch.setattr(train_gpt, "run", lambda preset, *_: started.append(preset))
    line = f"record {shlex.join(SMALL)} --data {data}"
    launch.train(train_gpt, shlex.split(line), "./run.sh")
    assert started == ["record"] and capsys.readouterr().err == ""
    with no_platform_chosen():
        wanted = r"launch.py: JAX sees only a CPU, .*: \./run\.sh tiny; JAX_PLATFORMS=cpu .*\n"
        assert re.fullmatch(wanted, refusal(line))


@contextlib.contextmanager
def no_platform_chosen():
    """Lets JAX have a CPU because it has found nothing else."""
    before = jax.config.jax_platforms
    jax.config.update("jax_platforms", None)
    yield
    jax.config.update("jax_platforms", before)


@pytest.mark.parametrize("preset", ["record", "medium"])
def test_large_presets_do_not_start_on_a_cpu_that_was_not_asked_for(preset, capsys):
    with no_platform_chosen(), pytest.raises(SystemExit):
        guard.check_devices(preset, train_gpt.PRESETS[preset], jax.devices())
    assert f"JAX sees only a CPU, but {preset} needs GPUs or TPUs" in capsys.readouterr().err


@pytest.mark.parametrize("count, batch", [(3, 24), (6, 24), (8, 12)])
def test_devices_must_divide_batch_and_groups(refusal, data, monkeypatch, count, batch):
    stages = (dataclasses.replace(STAGE, tokens=240),)
    set_preset(monkeypatch, "tiny", stages=stages, head_chunk=2)
    monkeypatch.setattr(jax, "devices", lambda: jax.local_devices()[:count])
    message = refusal(f"{TINY} --head_chunk 2 --batch {batch} --data {data}")
    assert f"{count} devices do not divide --batch {batch} or 8 matrices: use 1, 2, 4" in message


def test_more_devices_fit_with_the_flags_that_hosts_md_gives(monkeypatch, capsys):
    """16 devices on two hosts do not divide the record's 8 sequences."""
    devices = devices_of("gpu", "H100", "9.0", count=16)
    monkeypatch.setattr(jax, "devices", lambda: devices)
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    with pytest.raises(SystemExit):
        train_gpt.fit_devices(Config())
    assert "run/hosts.md" in capsys.readouterr().err
    page = (ROOT / "run/hosts.md").read_text(encoding="utf-8")
    flags = re.search("16 devices, the flags are `(.*?)`", page)[1]
    _, c = train_gpt.parse_config(flags.split())
    assert train_gpt.fit_devices(c) == (devices, c)


def test_no_more_devices_than_sequences(monkeypatch):
    """Eight GPUs run a batch of two on two."""
    monkeypatch.setattr(jax, "devices", lambda: jax.local_devices() * 8)
    c = dataclasses.replace(train_gpt.PRESETS["tiny"], batch=2)
    assert len(train_gpt.fit_devices(c)[0]) == 2


BEST = "float8_e4m3fn", "float8_e5m2"
BFLOAT16 = "bfloat16", "bfloat16"


def devices_of(platform: str, kind: str, capability: str, count: int = 1) -> list:
    device = SimpleNamespace(platform=platform, device_kind=kind, process_index=0, id=0)
    if capability:
        device.compute_capability = capability
    return [device] * count


@pytest.mark.parametrize("platform, kind, capability, attention, head", [
    ("gpu", "NVIDIA H100 80GB HBM3", "9.0", "cudnn", BEST),
    ("gpu", "NVIDIA GeForce RTX 4090", "8.9", "cudnn", BEST),
    ("gpu", "NVIDIA B200", "10.0", "cudnn", BEST),
    ("gpu", "NVIDIA A100-SXM4-80GB", "8.0", "cudnn", BFLOAT16),
    ("gpu", "Tesla T4", "7.5", "band", BFLOAT16),
    ("gpu", "Tesla P100-PCIE-16GB", "6.0", "band", BFLOAT16),
    ("gpu", "AMD Instinct MI300X", "gfx942", "band", BEST),
    ("tpu", "TPU v5 lite", "", "band", BFLOAT16),
    ("tpu", "TPU v6 lite", "", "band", BFLOAT16),
    ("tpu", "TPU7x", "", "band", BEST),
])  # fmt: skip
def test_formats_and_kernel_fit_the_device(
    monkeypatch, capsys, platform, kind, capability, attention, head
):
    """GPUs without FP8 run the head in bfloat16; NVIDIA's from Ampere on have cuDNN's kernel.
    Names do not decide."""
    devices = devices_of(platform, kind, capability, count=8)
    monkeypatch.setattr(jax, "devices", lambda: devices)
    c = Config()
    formats = dict(head_forward=head[0], head_backward=head[1])
    expected = dataclasses.replace(c, attention=attention, **formats)
    assert train_gpt.fit_devices(c) == (devices, expected)
    wide = dataclasses.replace(c, compute="float32")
    assert train_gpt.fit_devices(wide)[1].attention == "band"  # cuDNN has no float32
    assert capsys.readouterr().err == ""


def test_a_length_that_cudnn_gets_wrong_is_refused(capsys):
    """Its gradient had NaN for some lengths that are no multiple of 128."""
    c = dataclasses.replace(Config(), head_chunk=64, val_T=320)
    devices = devices_of("gpu", "any", "9.0")
    with pytest.raises(SystemExit) as stopped:
        guard.check_devices("record", c, devices)
    assert stopped.value.code == 2
    assert "sequences of [320, 16384, 32768, 49152] tokens: cuDNN" in capsys.readouterr().err
    guard.check_devices("record", dataclasses.replace(c, attention="band"), devices)


# ---- Shards --------------------------------------------------------------------------------------
BROKEN = dict(
    short=3000, long=4000, odd_byte=3225, header_only=1024, cut_header=1023, empty=0,
    magic=dict(magic=1), version=dict(version=2), no_tokens=dict(count=0),
    negative=dict(count=-1100), huge=dict(count=2**31 - 1),
)  # fmt: skip


@pytest.mark.parametrize("fault, name", [
    *((fault, NAMES[0]) for fault in BROKEN), ("short", NAMES[1]), ("short", NAMES[2]),
])  # fmt: skip
def test_broken_shards_are_refused(refusal, data, name, fault):
    if isinstance(BROKEN[fault], int):
        os.truncate(data / name, BROKEN[fault])
    else:
        write_shard(data / name, TEXT, **BROKEN[fault])
    message = refusal(TINY, "--data", data)
    reason = f"{data / name} is not a complete shard: python data/check.py {data} says why"
    assert reason in message


LONG_STAGE = dataclasses.replace(STAGE, tokens=2048)
CUT_STAGE = dataclasses.replace(STAGE, max_doc=9)
TWO_STAGES = dataclasses.replace(STAGE, steps=3), dataclasses.replace(STAGE, steps=3, tokens=1024)


@pytest.mark.parametrize("gone, stages, flags, message", [
    ("*", (STAGE,), "", "train shards hold 0 of 6 batches"),
    ("*_train_000002*", (STAGE,), "", "train shards hold 4 of 6 batches"),
    ("none", (STAGE,), "--steps 9", "train shards hold 8 of 9 batches; .* with fewer --steps"),
    ("none", (LONG_STAGE,), "", "train shards hold 0 of 6 batches"),
    ("none", (CUT_STAGE,), "", "train shards hold 0 of 6 batches"),  # too much is cut off documents
    # A batch of 257 tokens is all that a second shard can hold beside one of 1,025.
    ("none", TWO_STAGES, "", "train shards hold 4 of 6 batches"),
    ("*_val_*", (STAGE,), "", "val shards hold 0 of 2 batches"),
    ("none", (STAGE,), "--val_tokens 1536", "val shards .* with fewer --val_tokens, .*tokenize"),
])  # fmt: skip
def test_too_few_tokens_are_refused(refusal, data, monkeypatch, gone, stages, flags, message):
    set_preset(monkeypatch, "tiny", stages=stages)
    write_shard(data / "x_val_000001.bin", TEXT)  # only the first val shard counts
    for path in data.glob(gone):
        path.unlink()
    for name in ("._x_train_000001.bin", "x_train_000003.bin.part", "x_val.bin"):
        (data / name).write_bytes(b"?")  # these names are no shards
    assert re.search(f"{data}: the {message}", refusal(f"{TINY} {flags}", "--data", data))


def test_a_folder_of_data_that_is_not_there_is_named(refusal, tmp_path):
    assert f"there is no folder {tmp_path / 'x'}, which" in refusal(TINY, "--data", tmp_path / "x")


def test_a_process_of_torchrun_does_not_train_alone(monkeypatch, capsys):
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(SystemExit):
        train_gpt.main(["tiny"])
    assert "WORLD_SIZE is set, as by torchrun: start ./run.sh" in capsys.readouterr().err


def test_the_shards_that_the_schedule_needs_are_read_in_order(data):
    _, c = train_gpt.parse_config([*shlex.split(TINY), "--data", str(data)])
    for steps, count in (4, 1), (5, 2), (8, 2):
        shards = train_gpt.find_data(dataclasses.replace(c, steps=steps))
        assert [Path(shard.filename).name for shard in shards["train"]] == [*NAMES[:count]]
        assert [Path(shard.filename).name for shard in shards["val"]] == [NAMES[2]]


@pytest.mark.parametrize("length", [None, 256, 258])  # int32s in the file; None: no file
@pytest.mark.parametrize("weight, refused", [
    (0.25, True), (0.0, False), ((0.0, 0.1), True), ((0.1, 0.0), True),
])  # fmt: skip
def test_prefixes_that_are_not_there_are_refused(
    refusal, data, tmp_path, monkeypatch, length, weight, refused
):
    """But only where prefixes are targets, with a weight that is not always 0."""
    path = tmp_path / "no_prefixes.bin"
    if length:
        np.zeros(length, "<i4").tofile(path)
    first = dataclasses.replace(STAGE, steps=3, prefix=weight)
    stages = (first, dataclasses.replace(STAGE, steps=3))
    set_preset(monkeypatch, "tiny", stages=stages, prefixes=str(path))
    flags = f"{TINY} --data {data}"
    if refused:
        assert f"{path} does not hold 257 prefixes" in refusal(flags)
    else:
        _, c = train_gpt.parse_config(shlex.split(flags))
        assert len(train_gpt.find_data(c)["train"]) == 2


# ---- Stages --------------------------------------------------------------------------------------
CONFIGS = {**train_gpt.PRESETS, "mini": MINI32}  # before the fixture changes `tiny`


@pytest.mark.parametrize("steps", [1, 2, 3, 4, 5, 20, 100, 1285, 1286, 5000])
@pytest.mark.parametrize("name", CONFIGS)
def test_a_run_of_any_length_goes_through_its_stages(name, steps):
    lengths = [stage.steps for stage in CONFIGS[name].stages]
    trained = {i for i, length in enumerate(lengths) if length}
    if steps < len(trained):
        with pytest.raises(ValueError, match=f"--steps {steps} is less than {len(trained)} stages"):
            dataclasses.replace(CONFIGS[name], steps=steps)
        return
    c = dataclasses.replace(CONFIGS[name], steps=steps)
    stages = [c.stage_at(step) for step in range(steps)]
    used = Counter(stages)
    assert c.total_steps == steps == c.stage_ends[-1]
    assert stages == sorted(stages) and used.keys() == trained
    assert c.stage_at(steps) == len(lengths) - 1
    for i in trained:  # in proportion, but every stage has at least one step
        assert abs(used[i] - lengths[i] * steps / sum(lengths)) <= len(trained)


def test_the_record_has_the_stages_of_upstream():
    c = Config()
    rows = [(s.steps, s.tokens, s.short, s.long, s.max_doc, s.lr) for s in c.stages]
    assert rows == [
        (423, 131072, 128, 384, 896, 1.0),
        (424, 262144, 384, 896, 2048, 1.52),
        (423, 393216, 640, 1408, 2048, 1.73),
        (15, 393216, 768, 1664, 2048, 1.73),
        (0, 393216, 768, 2560, 2048, 1.73),
    ]
    assert [train_gpt.target_weights(stage) for stage in c.stages] == [
        {0: (0.25, 0.25), 1: (1.0, 1.0), 2: (0.5, 0.5), 3: (0.25, 0.0)},
        {0: (0.25, 0.0), 1: (1.0, 1.0), 2: (0.5, 0.0)},
        {1: (1.0, 1.0)},
        {1: (1.0, 1.0)},
        {1: (1.0, 1.0)},
    ]
    assert c.total_steps == 1285 and c.stage_ends.tolist() == [423, 847, 1270, 1285, 1285]
    assert sum(B * T for B, T, _ in train_gpt.batch_shapes("train", c)) == 338_821_120


# ---- What is read from the shards ----------------------------------------------------------------
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("place", [0, 500, -1])  # no batch has the last token
def test_tokens_beyond_the_vocabulary_are_refused(refusal, data, name, place):
    tokens = TEXT.copy()
    tokens[place] = 257
    write_shard(data / name, tokens)
    message = refusal(TINY, "--data", data)
    assert f"{data / name}: largest token is 257 (--vocab 257), " in message


def facts_of(path: Path, tokens) -> dict:
    """What the log has about a shard of these tokens."""
    return train_gpt.shard_facts(train_gpt.open_shard(write_shard(path, tokens)), CONFIGS["tiny"])


CROWD = r"a sequence of \d+ tokens would hold more than 4,095 documents"


@pytest.fixture
def crowded(capsys, tmp_path):
    """A function: whether tokens are refused, as too many documents for a sequence, if they are
    read in these shapes."""

    def is_crowded(tokens, *shapes) -> bool:
        shard = train_gpt.open_shard(write_shard(tmp_path / "a.bin", tokens))
        reads = SimpleNamespace(batch_shapes=lambda split, c: [*shapes])
        try:
            guard.check_documents({"train": [shard]}, reads, CONFIGS["tiny"])
        except SystemExit:
            assert re.search(CROWD, capsys.readouterr().err)
            return True
        return False

    return is_crowded


def test_documents_must_start(tmp_path, capsys):
    """Tokens without --eot come from another vocabulary."""
    with pytest.raises(SystemExit):
        facts_of(tmp_path / "a.bin", np.full(999, 7))
    assert "largest token is 7 (--vocab 257), 0 are --eot" in capsys.readouterr().err


@pytest.mark.parametrize("first", [0, 1, 20_000])  # the first document is no exception
def test_documents_in_a_row_must_be_few_enough_for_the_code(crowded, first):
    """A document code has room for 4,095 documents in a sequence."""
    T = 8192
    tokens = np.full(30_000, 7)
    tokens[9000:first:9000] = 256
    tokens[first : first + 2 * 4095 : 2] = 256
    assert not crowded(tokens, (8, T, 0))
    tokens[first + 2 * 4095] = 256
    assert crowded(tokens, (8, T, 0))
    assert crowded(tokens, (8, T // 2, 0), (8, T, 0), (8, T // 2, 8)), "of each stage"
    assert not crowded(tokens, (8, T - 2, 0))


@pytest.mark.parametrize("before", [0, 5])
def test_documents_that_are_packed_must_be_few_enough_for_the_code(crowded, before):
    """Packing cuts every document to max_doc, so that more of them fit in a sequence."""
    tokens = np.full(before + 4096 * 10, 7)
    tokens[before::10] = 256
    assert not crowded(tokens, (8, 8190, 2)) and crowded(tokens, (8, 8191, 2))
    assert not crowded(tokens, (8, 4095 * 3, 3)) and crowded(tokens, (8, 4095 * 3 + 1, 3))
    assert not crowded(tokens, (8, 8191, 0))
    assert not crowded(tokens[:-10], (8, 8191, 2))  # 4,095 in all


@pytest.mark.parametrize("split", ["train", "val"])
def test_shards_are_checked_for_the_sequences_that_are_read_from_them(
    refusal, data, monkeypatch, split
):
    crowd = np.full(70_000, 7)
    crowd[: 2 * 4096 : 2] = 256
    crowd[8192::90] = 256
    for path in data.iterdir():
        write_shard(path, crowd)
    if split == "train":
        set_preset(monkeypatch, "tiny", stages=(dataclasses.replace(STAGE, tokens=65536),))
        flags = "--steps 1"
    else:
        flags = "--val_T 8192 --val_tokens 65536"
    message = refusal(f"{TINY} {flags} --data {data}")
    assert f"x_{split}_" in message and re.search(CROWD, message)


def test_a_shard_is_read_to_its_end(tmp_path, capsys):
    tokens = np.random.default_rng(0).integers(0, 100, 2 * 2**22 + 999)
    tokens[5 * 10**6 : 5 * 10**6 + 999] = 256
    path = tmp_path / "a.bin"
    assert facts_of(path, tokens) == dict(
        file=path.name, bytes=path.stat().st_size, largest_token=256, tokens=len(tokens),
        sha256=hashlib.sha256(path.read_bytes()).hexdigest(), documents=999,
    )  # fmt: skip
    tokens[-1] = 257
    with pytest.raises(SystemExit):
        facts_of(path, tokens)
    assert "largest token is 257" in capsys.readouterr().err
