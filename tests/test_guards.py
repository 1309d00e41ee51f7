"""What cannot work is refused: exit code 2, one line on stderr, nothing compiled, no log."""

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

import jax
import numpy as np
import pytest

import train_gpt
from tests.tools import MINI32, SMALL, write_shard

TRAIN = Path(train_gpt.__file__).resolve()
STAGES = "--stages '6 256 8 8 0 1 0,1'"
MINI = f"tiny {' '.join(SMALL)} --steps 6 {STAGES}"
NAMES = "x_train_000001.bin", "x_train_000002.bin", "x_val_000000.bin"
TEXT = np.where(np.arange(1100) % 50 == 0, 256, np.arange(1100) % 97)
COMPILE_STAGE = train_gpt.compile_stage


@pytest.fixture(autouse=True)
def workplace(tmp_path, monkeypatch):
    """An empty folder, one device, and nothing to compile."""
    one = jax.devices()[:1]
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(jax, "devices", lambda: one)
    monkeypatch.setattr(train_gpt, "compile_stage", lambda *_: pytest.fail("something compiled"))


@pytest.fixture
def data(tmp_path) -> Path:
    """Two train shards of 4 steps each, and a val shard of 2."""
    folder = tmp_path / "d"
    folder.mkdir()
    for name in NAMES:
        write_shard(folder / name, TEXT)
    return folder


@pytest.fixture
def refusal(capsys):
    """Runs, and returns the one line by which the run was refused."""

    def run(command: str, *argv: str) -> str:
        with pytest.raises(SystemExit) as stopped:
            train_gpt.main([*shlex.split(command), *map(str, argv)])
        said = capsys.readouterr()
        assert stopped.value.code == 2
        assert re.fullmatch(r"train_gpt\.py: .+\n", said.err)
        assert not Path("logs").exists() and said.out == ""
        return said.err

    return run


# ---- Flags ---------------------------------------------------------------------------------------
@pytest.mark.parametrize("argv, says", [
    ("huge", "there is no preset 'huge', only record, tiny"),
    ("tiny --bogus 1", "--bogus"),
    ("tiny --step 3", "--step "),  # a typo must not become another flag
    ("tiny more", "more"),
    ("tiny --steps 1.5", "--steps.*'1.5'"),
    ("tiny --steps", "--steps"),
    ("tiny --plan X", "--plan: 'X' is no layer; write one word a layer"),
    ("tiny --plan L<1v0", "'L<1v0' is no layer"),
    ("tiny --plan=-v0", "'-v0' is no layer"),  # values where nothing attends
    ("tiny --plan=-b", "'-b' is no layer"),  # nor is anything added there
    ("tiny --plan LS", "'LS' is no layer"),
    ("tiny --val_tokens 0", "--val_tokens 0 is no multiple of 8 sequences of --val_T 1024"),
    ("tiny --val_tokens 66560", "--val_tokens 66560 is no multiple of 8 .* --val_T 1024"),
    ("tiny --val_T 768", "--val_tokens 65536 is no multiple of 8 sequences of --val_T 768"),
])  # fmt: skip
def test_unknown_presets_flags_values_and_layers_are_refused(refusal, argv, says):
    assert re.search(says, refusal(argv))


FIELDS = """
    bare: int = 3
    share: float = 0.5          # 10 % of what %s and %(prog)s have
    floor: float = 1.0          # may be 0
    flag: bool = True           # whether to
    betas: tuple = (0.8, 0.95)  # of Adam
"""


@pytest.fixture
def tweaked(tmp_path, monkeypatch):
    """A copy of the file with more fields, as of somebody who tries something."""
    assert train_gpt.SOURCE.count("\n    # fmt: on\n\n    @functools") == 1
    path = tmp_path / "tweaked.py"
    path.write_text(train_gpt.SOURCE.replace("\n    # fmt: on\n", f"{FIELDS}    # fmt: on\n", 1))
    spec = importlib.util.spec_from_file_location("tweaked", path)
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "tweaked", module)
    spec.loader.exec_module(module)
    return module


def test_a_new_field_is_a_flag_of_its_type(tweaked):
    def parse(flags: str) -> dict:
        c = tweaked.parse_config(["tiny", *flags.split()])[1]
        return {name: getattr(c, name) for name in ("bare", "share", "floor", "flag", "betas")}

    start = parse("")
    assert start == dict(bare=3, share=0.5, floor=1.0, flag=True, betas=(0.8, 0.95))
    assert parse("--bare 0 --share 1 --floor 0") == start | dict(bare=0, share=1.0, floor=0.0)
    for word, value in ("False", False), ("0", False), ("True", True), ("1", True):
        assert parse(f"--flag {word}")["flag"] is value
    assert parse("--betas (0.9,.99)") == start | dict(betas=(0.9, 0.99))
    for wrong in "--flag perhaps", "--betas 0.9":
        with pytest.raises(SystemExit):
            parse(wrong)


@pytest.mark.parametrize("flags", ["--help", "tiny --steps 3 -h", "record --bogus --help"])
def test_help_is_the_class_as_it_stands_in_the_source(tweaked, capsys, flags):
    """With the fields of whoever changed it."""
    with pytest.raises(SystemExit) as stopped:
        tweaked.parse_config(flags.split())
    usage, shown = capsys.readouterr().out.split("\n\n", 1)
    assert not stopped.value.code and usage == tweaked.parse_config.__doc__
    start, end = map(tweaked.SOURCE.index, ("@dataclasses.dataclass(", "\n\n\nPRESETS"))
    assert shown.strip() == tweaked.SOURCE[start:end] and FIELDS in shown


# ---- Devices -------------------------------------------------------------------------------------
def test_the_record_runs_on_a_cpu_with_a_warning(data, capsys, monkeypatch):
    monkeypatch.setattr(train_gpt, "compile_stage", COMPILE_STAGE)
    jax.config.update("jax_disable_most_optimizations", True)
    flags = f"{MINI.replace('tiny', 'record')} --vocab 257 --eot 256 --prefixes '' --steps 1"
    train_gpt.main([*shlex.split(flags), "--plan", "Lv0 -<0", "--data", str(data)])
    jax.config.update("jax_disable_most_optimizations", False)
    out, err = capsys.readouterr()
    assert re.fullmatch(r"warning: JAX sees only a CPU, .*; without GPUs: \./run\.sh tiny\n", err)
    assert out.startswith("record on 1 x cpu, head in float8_e4m3fn") and '"steps": 1,' in out


@pytest.mark.parametrize("count, batch", [(3, 24), (6, 24), (8, 12)])
def test_devices_must_divide_batch_and_groups(refusal, data, monkeypatch, count, batch):
    monkeypatch.setattr(jax, "devices", lambda: jax.local_devices()[:count])
    message = refusal(f"{MINI} --head_chunk 1", "--data", data, "--batch", batch)
    assert f"{count} devices do not divide --batch {batch} or 8 matrices: use 1, 2, 4" in message


def test_no_more_devices_than_sequences(monkeypatch):
    """Eight GPUs run `tiny`, whose batch is 4, on four."""
    monkeypatch.setattr(jax, "devices", lambda: jax.local_devices() * 8)
    assert len(train_gpt.fit_devices("tiny", train_gpt.PRESETS["tiny"])[0]) == 4


BEST = "float8_e4m3fn", "float8_e5m2"


@pytest.mark.parametrize("platform, kind, capability, attention, head", [
    ("gpu", "NVIDIA H100 80GB HBM3", "9.0", "cudnn", BEST),
    ("gpu", "NVIDIA GeForce RTX 4090", "8.9", "cudnn", BEST),
    ("gpu", "NVIDIA A100-SXM4-80GB", "8.0", "cudnn", ("bfloat16", "bfloat16")),
    ("gpu", "AMD Instinct MI300X", "gfx942", "xla", BEST),
    ("tpu", "TPU v5 lite", "", "xla", BEST),
])  # fmt: skip
def test_formats_and_kernel_fit_the_device(
    monkeypatch, capsys, platform, kind, capability, attention, head
):
    """A GPU without FP8 takes head and MLP in bfloat16; only NVIDIA's have cuDNN."""
    device = SimpleNamespace(platform=platform, device_kind=kind, compute_capability=capability,
                             process_index=0, id=0)  # fmt: skip
    monkeypatch.setattr(jax, "devices", lambda: [device] * 8)
    c = dataclasses.replace(train_gpt.Config(), mlp_forward=BEST[0])
    same = dict(mlp_forward=head[0], head_forward=head[0], head_backward=head[1])
    expected = dataclasses.replace(c, attention=attention, **same)
    assert train_gpt.fit_devices("record", c) == ([device] * 8, expected)
    wide = dataclasses.replace(c, compute="float32")
    assert train_gpt.fit_devices("record", wide)[1].attention == "xla"  # cuDNN's has no float32
    assert capsys.readouterr().err == ""


# ---- Shards --------------------------------------------------------------------------------------
BROKEN = dict(
    short=3000, long=4000, odd_byte=3225, header_only=1024, cut_header=1023, empty=0,
    magic=dict(magic=1), version=dict(version=2), no_tokens=dict(count=0),
    negative=dict(count=-1100), huge=dict(count=2**31 - 1),
)  # fmt: skip


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("fault", BROKEN)
def test_broken_shards_are_refused(refusal, data, name, fault):
    if isinstance(BROKEN[fault], int):
        os.truncate(data / name, BROKEN[fault])
    else:
        write_shard(data / name, TEXT, **BROKEN[fault])
    message = refusal(MINI, "--data", data)
    assert f"{data / name} is no whole shard of tokens: python data/check.py {data} s" in message


@pytest.mark.parametrize("gone, flags, says", [
    ("*", "", "train shards hold 0 of 6 steps"),
    ("*_train_000002*", "", "train shards hold 4 of 6 steps"),
    ("none", "--steps 9", "train shards hold 8 of 9 steps"),
    ("none", "--stages '6 2048 8 8 0 1 0,1'", "train shards hold 0 of 6 steps"),
    ("none", "--stages '6 256 8 8 9 1 0,1'", "train shards hold 0 of 6 steps"),  # too much is cut
    # A step of 257 tokens is all that a second shard can hold beside one of 1,025.
    ("none", "--stages '3 256 8 8 0 1 0,1 / 3 1024 8 8 0 1 0,1'", "train shards hold 4 of 6 steps"),
    ("*_val_*", "", "val shards hold 0 of 2 steps"),
    ("none", "--val_tokens 1536", "val shards hold 2 of 3 steps; .* --val_tokens 1024"),
])  # fmt: skip
def test_too_few_tokens_are_refused(refusal, data, gone, flags, says):
    write_shard(data / "x_val_000001.bin", TEXT)  # a second is no part of the rules' text
    for path in data.glob(gone):
        path.unlink()
    for name in ("._x_train_000001.bin", "x_train_000003.bin.part", "x_val.bin"):
        (data / name).write_bytes(b"?")  # nothing that counts
    message = refusal(f"{MINI} {flags}", "--data", data)
    assert re.search(f"{data}: {says}", message)


def test_the_refusal_of_too_few_tokens_asks_for_nothing_that_is_refused(refusal, data):
    """Fewer steps are fewer of each stage: those that fit are not those that were found."""
    stages = "--stages '4 256 8 8 0 1 0,1 / 4 1024 8 8 0 1 0,1'"
    message = refusal(f"{MINI} {stages} --steps 8", "--data", data)
    assert "train shards hold 5 of 8 steps" in message and "--steps" in message
    for steps in re.findall(r"--steps (\d+)", message):
        argv = shlex.split(f"{MINI} {stages} --steps {steps} --data {data}")
        train_gpt.find_data(train_gpt.parse_config(argv)[1])


def test_the_shards_that_the_schedule_needs_are_read_in_order(data):
    _, c = train_gpt.parse_config([*shlex.split(MINI), "--data", str(data)])
    for steps, n in (4, 1), (5, 2), (8, 2):
        shards = train_gpt.find_data(dataclasses.replace(c, steps=steps))
        assert [Path(shard.filename).name for shard in shards] == [*NAMES[:n], NAMES[2]]


@pytest.mark.parametrize("length", [None, 256, 258])  # int32s in the file; None: there is none
@pytest.mark.parametrize("weight, refused", [(".25", 1), ("0", 0), ("0:.1", 1), (".1:0", 1)])
def test_prefixes_that_are_not_there_are_refused(refusal, data, tmp_path, length, weight, refused):
    """Where they are targets: of other tokens they would be nonsense."""
    path = tmp_path / "no_prefixes.bin"
    if length:
        np.zeros(length, "<i4").tofile(path)
    stages = f"--stages '3 256 8 8 0 1 {weight},1 / 3 256 8 8 0 1 0,1'"
    flags = f"{MINI} {stages} --prefixes {path} --data {data}"
    if refused:
        assert str(path) in refusal(flags)
    else:
        assert len(train_gpt.find_data(train_gpt.parse_config(shlex.split(flags))[1])) == 3


# ---- Stages --------------------------------------------------------------------------------------
@pytest.mark.parametrize("steps", [1, 2, 3, 4, 5, 20, 100, 1285, 1286, 5000])
@pytest.mark.parametrize("c", [*train_gpt.PRESETS.values(), MINI32])
def test_a_run_of_any_length_goes_through_its_stages(c, steps):
    c, each = dataclasses.replace(c, steps=steps), [row.steps for row in c.rows]
    stages, total = [c.stage_at(step) for step in range(steps)], sum(each)
    used, some = Counter(stages), {i for i, n in enumerate(each) if n}
    assert stages == sorted(stages) and c.ends[-1] == steps
    assert used.keys() == some if steps >= len(some) else used.keys() < some
    assert stages[-1] == max(some) and c.stage_at(steps) == len(each) - 1
    for i in some:  # in proportion, but for what it costs that none is left out
        assert abs(used[i] - each[i] * steps / total) <= len(some)


def test_the_record_has_the_stages_of_upstream():
    c = train_gpt.Config()
    rows = [
        (423, 16384, 128, 384, 896),
        (424, 32768, 384, 896, 2048),
        (423, 49152, 640, 1408, 2048),
        (15, 49152, 768, 1664, 2048),
        (0, 49152, 768, 2560, 2048),
    ]
    assert [row[:5] for row in c.rows] == rows  # steps, T, S, L, document
    assert [row.rate for row in c.rows] == [1, 1.52, 1.73, 1.73, 1.73]
    moves = [[0.25, 1, 0.5, 0.25], [0.25, 1, 0.5], [0, 1], [0, 1], [0, 1]]
    ends = [[0.25, 1, 0.5, 0], [0, 1, 0], [0, 1], [0, 1], [0, 1]]
    assert [[a for a, _ in row.shares] for row in c.rows] == moves
    assert [[b for _, b in row.shares] for row in c.rows] == ends
    assert c.ends.tolist() == [423, 847, 1270, 1285, 1285]
    assert sum(B * T for B, T, _ in c.fills("train")) == 338_821_120


# ---- The pass over the bytes ---------------------------------------------------------------------
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("at", [0, 500, -1])  # the last: in the tail, which is not trained on
def test_tokens_beyond_the_vocabulary_are_refused(refusal, data, name, at):
    tokens = TEXT.copy()
    tokens[at] = 257
    write_shard(data / name, tokens)
    message = refusal(MINI, "--data", data)
    assert f"{data / name}: its largest token is 257 (--vocab 257), " in message


def check(path: Path, tokens, *fills: tuple[int, int, int]) -> dict:
    shard = train_gpt.open_shard(write_shard(path, tokens))
    return train_gpt.check_tokens(shard, [*fills], train_gpt.PRESETS["tiny"])


@pytest.fixture
def crowded(capsys, tmp_path):
    """Whether documents are refused as too many in a sequence."""

    def check_crowd(tokens, *fills) -> bool:
        try:
            documents = check(tmp_path / "a.bin", tokens, *fills)["documents"]
            assert documents == np.sum(tokens == 256)
            return False
        except SystemExit:
            assert "more than 4095 in a sequence: True" in capsys.readouterr().err
            return True

    return check_crowd


def test_documents_must_start(tmp_path, capsys):
    with pytest.raises(SystemExit):  # of a vocabulary with another --eot
        check(tmp_path / "a.bin", np.full(999, 7), (8, 64, 0))
    assert "largest token is 7 (--vocab 257), 0 are --eot 256" in capsys.readouterr().err


@pytest.mark.parametrize("first", [0, 1, 20_000])  # the first document is no exception
def test_documents_that_join_must_be_few_enough_for_the_code(crowded, first):
    T, tokens = 8192, np.full(30_000, 7)
    tokens[9000:first:9000] = 256
    tokens[first : first + 2 * 4095 : 2] = 256
    assert not crowded(tokens, (8, T, 0))
    tokens[first + 2 * 4095] = 256
    assert crowded(tokens, (8, T, 0))
    assert crowded(tokens, (8, T // 2, 0), (8, T, 0), (8, T // 2, 8)), "of each stage"
    assert not crowded(tokens, (8, T - 2, 0))


@pytest.mark.parametrize("before", [0, 5])
def test_documents_that_are_packed_must_be_few_enough_for_the_code(crowded, before):
    """So many can be in one sequence when each is cut, however far apart they are."""
    tokens = np.full(before + 4096 * 10, 7)
    tokens[before::10] = 256
    assert not crowded(tokens, (8, 8190, 2)) and crowded(tokens, (8, 8191, 2))
    assert not crowded(tokens, (8, 4095 * 3, 3)) and crowded(tokens, (8, 4095 * 3 + 1, 3))
    assert not crowded(tokens, (8, 8191, 0))
    assert not crowded(tokens[:-10], (8, 8191, 2))  # 4,095 in all


@pytest.mark.parametrize("split", ["train", "val"])
def test_shards_are_checked_for_the_sequences_that_they_are_read_in(refusal, data, split):
    crowd = np.full(70_000, 7)
    crowd[: 2 * 4096 : 2] = crowd[8192::90] = 256
    for path in data.iterdir():
        write_shard(path, crowd)
    long = dict(
        train="--steps 1 --stages '1 65536 8 8 0 1 0,1'", val="--val_T 8192 --val_tokens 65536"
    )
    message = refusal(f"{MINI} {long[split]} --data {data}")
    assert f"x_{split}_" in message and "more than 4095 in a sequence: True" in message


def test_a_shard_is_read_to_its_end(tmp_path, capsys):
    """In pieces, of which this one has three."""
    T = 24_576
    tokens = np.random.default_rng(0).integers(0, 100, 2 * 2**22 + T + 999)
    tokens[5 * 10**6 : 5 * 10**6 + 999] = 256
    path = tmp_path / "a.bin"
    assert check(path, tokens, (8, T, 0)) == dict(
        file=path.name, bytes=path.stat().st_size, largest_token=256, tokens=len(tokens),
        sha256=hashlib.sha256(path.read_bytes()).hexdigest(), documents=999,
    )  # fmt: skip
    for side, crowd in (2000, False), (2100, True):  # where the second piece begins
        tokens[2**22 - side : 2**22 + side] = 256
        if crowd:
            with pytest.raises(SystemExit):
                check(path, tokens, (8, T, 0))
            assert "more than 4095 in a sequence: True" in capsys.readouterr().err
        else:
            assert check(path, tokens, (8, T, 0))["documents"] == 999 + 2 * side
    tokens[2**22 - 2100 : 2**22 + 2100], tokens[-1] = 0, 257
    with pytest.raises(SystemExit):
        check(path, tokens, (8, T, 0))
    assert "its largest token is 257" in capsys.readouterr().err
