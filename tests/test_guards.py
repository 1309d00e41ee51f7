"""What cannot work is refused: exit code 2, one line on stderr, nothing compiled, no log."""

import ast
import dataclasses
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import jax
import numpy as np
import pytest

import train_gpt

TRAIN = Path(train_gpt.__file__).resolve()
MINI = "tiny --D 32 --H 2 --F 64 --T 32 --head_chunk 32 --steps 6 --val_T 64 --val_tokens 1024"
FIELDS = {field.name: field.type for field in dataclasses.fields(train_gpt.Config)}
NUMBERS = {name: kind for name, kind in FIELDS.items() if kind is not str}


class Passed(Exception):
    """Raised where a run goes on after its guards."""


def write_shard(path: Path, tokens, magic: int = 20240520, version: int = 1, count=None) -> Path:
    header = np.zeros(256, "<i4")
    header[:3] = magic, version, len(tokens) if count is None else count
    path.write_bytes(header.tobytes() + np.asarray(tokens, "<u2").tobytes())
    return path


def text(n: int, first: int = 0) -> np.ndarray:
    tokens = np.arange(first, first + n) % 97
    tokens[::50] = 256
    return tokens


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
    write_shard(folder / "x_train_000001.bin", text(1100))
    write_shard(folder / "x_train_000002.bin", text(1100, 1))
    write_shard(folder / "x_val_000000.bin", text(1100, 2))
    return folder


@pytest.fixture
def refusal(capsys):
    """Runs, and returns the one line by which the run was refused."""

    def run(*argv: str) -> str:
        with pytest.raises(SystemExit) as stopped:
            train_gpt.main(list(argv))
        said = capsys.readouterr()
        assert stopped.value.code == 2
        assert re.fullmatch(r"train_gpt\.py: .+\n", said.err)
        assert said.out == "" and not Path("logs").exists()
        return said.err

    return run


def test_refuse_is_three_lines_and_only_six_functions_call_it():
    tree = ast.parse(train_gpt.SOURCE)
    functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
    (refuse,) = [function for function in functions if function.name == "refuse"]
    assert refuse.end_lineno - refuse.lineno + 1 == 3
    named = [node for node in ast.walk(tree) if isinstance(node, ast.Name) and node.id == "refuse"]
    callers = set()
    for function in functions:
        for node in ast.walk(function):
            if isinstance(node, ast.Call) and getattr(node.func, "id", None) == "refuse":
                callers.add(function.name)
                named.remove(node.func)
    checks = {"find_data", "check_contents", "check_attention"}
    assert callers == {"parse_config", "fit_devices", "main"} | checks
    (assigned,) = [node for node in ast.walk(tree) if getattr(node, "value", None) in named]
    assert ast.unparse(assigned) == "cli.error = refuse" and len(named) == 1


# ---- Flags ---------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    "argv, says",
    [
        (["tiny", "--bogus", "1"], "--bogus"),
        (
            ["tiny", "--step", "3"],
            "--step ",
        ),  # no abbreviations: a typo must not become another flag
        (["huge"], "'huge'.*record.*tiny"),
        (["tiny", "more"], "more"),
        (["tiny", "--steps", "many"], "--steps.*'many'"),
        (["tiny", "--steps", "1.5"], "--steps.*'1.5'"),
        (["tiny", "--steps"], "--steps"),
    ],
)
def test_unknown_flags_presets_and_values_are_refused(refusal, argv, says):
    assert re.search(says, refusal(*argv))


FAULTS = [
    ("--plan", "L X", "'X' is no layer; write one word a layer"),
    ("--plan", "L<1v0 L", "'L<1v0' is no layer"),
    ("--plan", "L -v0", "'-v0' is no layer"),  # a value table where nothing attends
    ("--plan", "", "'' is no layer"),
    ("--plan", "L<0 L", "layer 0 adds the output of layer 0, which is not before it"),
    ("--plan", "L S<2 L", "layer 1 adds the output of layer 2, which is not before it"),
    ("--plan", "Lv1", "the value tables are [1]; number them from 0"),
    ("--plan", "Lv0 Sv2", "the value tables are [0, 2]; number them from 0"),
    ("--x_scale", "3", "--x_scale 3.0 must be a power of two"),
    ("--w_scale", "0.3", "--w_scale 0.3 must be a power of two"),
    ("--g_scale", "inf", "--g_scale inf must be positive, and finite"),
    ("--target", "inf", "--target at least 0"),
    ("--muon_lr", "inf", "--muon_lr inf must be positive, and finite"),
    ("--compute", "float16", "--compute float16 must be one of float32, bfloat16"),
    ("--compute", "float8_e5m2", "--compute float8_e5m2 must be one of float32, bfloat16"),
    ("--head_forward", "int8", "--head_forward int8 must be one of float32, bfloat16, float8_e4m3"),
    ("--head_backward", "", "--head_backward  must be one of float32, bfloat16, float8_e4m3"),
    ("--attention", "flash", "--attention flash must be one of cudnn, xla"),
    ("--sequences", "12", "--sequences 12 must be a multiple of 8"),
    ("--head_chunk", "24", "--head_chunk 24 must divide --T 32"),
    ("--val_T", "48", "--head_chunk 32 must divide --val_T 48"),
    ("--D", "33", "--D 33 must be --H 2 heads of 16, 24, 32 ... channels"),
    ("--D", "40", "--D 40 must be --H 2 heads"),
    ("--D", "16", "--D 16 must be --H 2 heads"),
    ("--vocab", "65537", "--vocab 65537 must fit 16 bits"),
    ("--eot", "257", "--vocab 257 must fit 16 bits and hold --eot 257"),
    ("--eot", "-1", "--vocab 257 must fit 16 bits and hold --eot -1"),
    ("--val_tokens", "1000", "--val_tokens 1000 must be a multiple of 8 sequences of --val_T 64"),
    ("--cooldown", "1.5", "--cooldown must be at most 1"),
    ("--target", "-1", "--target at least 0"),
    ("--target", "nan", "--target at least 0"),
    ("--seed", "-2", "--seed -1 or below 2**32"),
    ("--seed", str(2**32), "--seed -1 or below 2**32"),
]


@pytest.mark.parametrize("flag, value, says", FAULTS)
def test_faults_of_a_configuration_are_refused(refusal, data, flag, value, says):
    assert says in refusal(*MINI.split(), "--data", str(data), flag, value)


@pytest.mark.parametrize("name", sorted(NUMBERS.keys() - {"seed", "target", "eot"}))
def test_numbers_must_be_positive(refusal, data, name):
    for value in ["0", "-1"] + ["nan"] * (NUMBERS[name] is float):
        message = refusal(*MINI.split(), "--data", str(data), f"--{name}", value)
        assert re.search(rf"--{name} {float(value):g}(\.0)? must be positive", message)


@pytest.mark.parametrize("in_flight", ["1", "2", "4", "8"])
def test_sequences_of_any_length_share_a_device(data, monkeypatch, in_flight):
    """Also of three to one: what passes the guards must compile."""
    monkeypatch.setattr(train_gpt, "gather", lambda params, c: {})
    monkeypatch.setattr(train_gpt, "loss_fn", lambda w, tokens, c, window: 1.0 * tokens.sum())
    monkeypatch.setattr(train_gpt.lax, "psum", lambda x, axis: x)
    flags = f"{MINI} --T 96 --val_T 32 --in_flight {in_flight}".split()
    _, c = train_gpt.parse_config(flags)
    assert train_gpt.val_step({}, np.ones((8, 33), np.int32), c, window=8) == 33


# ---- Devices -------------------------------------------------------------------------------------
def test_record_without_an_accelerator_says_what_to_install_and_names_tiny(refusal):
    message = refusal()
    assert "only a CPU" in message
    assert "./run.sh tiny" in message and "pip install 'jax[cuda13]'" in message


@pytest.mark.parametrize("count", [3, 6])
def test_devices_must_divide_the_sequences(refusal, data, monkeypatch, count):
    monkeypatch.setattr(jax, "devices", lambda: jax.local_devices()[:count])
    message = refusal(*MINI.split(), "--data", str(data))
    assert f"do not divide among {count} devices; show JAX 1, 2, 4 or 8" in message


def test_no_device_is_refused_in_the_words_of_jax(refusal, data, monkeypatch):
    def devices():
        raise RuntimeError("Unable to initialize backend 'cuda'")

    monkeypatch.setattr(jax, "devices", devices)
    message = refusal(*MINI.split(), "--data", str(data))
    assert "JAX finds no device" in message and "Unable to initialize backend 'cuda'" in message


@pytest.mark.parametrize(
    "variables, argv, says",
    [
        ({}, ["record"], "sees only a CPU"),
        ({"JAX_ENABLE_X64": "1"}, ["tiny"], "JAX_ENABLE_X64 is set"),
        ({"XLA_FLAGS": "--xla_force_host_platform_device_count=3"}, ["tiny"], "3 devices"),
    ],
)
def test_a_refused_process_exits_with_2_and_one_line(tmp_path, variables, argv, says):
    env = os.environ | {"JAX_PLATFORMS": "cpu"} | variables
    command = [sys.executable, TRAIN, *argv]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (2, "")
    assert re.fullmatch(rf"train_gpt\.py: .*{says}.*\n", done.stderr)
    assert not list(tmp_path.iterdir())


# ---- Shards --------------------------------------------------------------------------------------
def test_good_data_passes(data, monkeypatch):
    """So that what the other tests break is what is refused."""

    def prepare(*_):
        raise Passed

    monkeypatch.setattr(train_gpt, "prepare", prepare)
    with pytest.raises(Passed):
        train_gpt.main([*MINI.split(), "--data", str(data)])


@pytest.mark.parametrize(
    "gone, says",
    [
        ("*", "train shards hold 0 of 6 steps; get more (data/README.md)"),
        ("*_train_*", "train shards hold 0 of 6 steps; get more (data/README.md)"),
        (
            "*_train_000002*",
            "train shards hold 4 of 6 steps; get more (data/README.md), or add "
            "--steps 4 to what you ran",
        ),
        ("*_val_*", "val shards hold 0 of 2 steps; get more (data/README.md)"),
    ],
)
def test_missing_shards_are_named(refusal, data, gone, says):
    for path in data.glob(gone):
        path.unlink()
    assert f"{data}: {says}\n" in refusal(*MINI.split(), "--data", str(data))


@pytest.mark.parametrize(
    "folder, command",
    [("source_code", "source_code.py"), ("fineweb10B", "cached_fineweb10B.py 1")],
)
def test_our_own_data_sets_are_named_with_the_command_that_gets_them(refusal, folder, command):
    message = refusal(*MINI.split(), "--data", f"data/{folder}/")
    expected = f"data/{folder}: train shards hold 0 of 6 steps; run python data/{command}\n"
    assert message.endswith(expected)


@pytest.mark.parametrize(
    "old, new, says",
    [
        ("x_train_000002.bin", "x_train_000003.bin", "x_train_000002.bin is missing, x_train_0000"),
        ("x_train_000002.bin", "x_train_000002 (1).bin", "x_train_000002.bin is missing"),
        ("x_train_000001.bin", "x_train_000003.bin", "x_train_000001.bin is missing, x_train_0000"),
        ("x_train_000001.bin", "x_train_1.bin", "x_train_000001.bin is missing, x_train_0000"),
        (
            "x_train_000001.bin",
            "x_train_000001_old.bin",
            "x_train_000001.bin is missing, x_train_0000",
        ),
        ("x_val_000000.bin", "x_val_last.bin", "a name like _000001.bin is missing, x_val_last.bi"),
    ],
)
def test_gaps_and_foreign_names_are_refused(refusal, data, old, new, says):
    (data / old).rename(data / new)
    assert f"{data}: {says}" in refusal(*MINI.split(), "--data", str(data))


def size(n: int):
    return lambda path: os.truncate(path, n)


def header(**fields):
    return lambda path: write_shard(path, text(1100), **fields)


FORMAT = "is no token shard (llm.c's 20240520, version 1): its header says"
BROKEN = dict(
    short=(size(3000), "has 3000 bytes where its header promises 3224"),
    long=(size(4000), "has 4000 bytes where its header promises 3224"),
    odd_byte=(size(3225), "has 3225 bytes where its header promises 3224"),
    header_only=(size(1024), "has 1024 bytes where its header promises 3224"),
    cut_header=(size(1023), "is no token shard: 1023 bytes hold no header"),
    empty=(size(0), "is no token shard: 0 bytes hold no header"),
    magic=(header(magic=1), f"{FORMAT} magic 1, version 1, 1100 tokens"),
    version=(header(version=2), f"{FORMAT} magic 20240520, version 2, 1100 tokens"),
    no_tokens=(header(count=0), f"{FORMAT} magic 20240520, version 1, 0 tokens"),
    negative_count=(header(count=-1100), f"{FORMAT} magic 20240520, version 1, -1100 tokens"),
    huge_count=(header(count=2**31 - 1), "has 3224 bytes where its header promises 4294968318"),
)


@pytest.mark.parametrize("name", ["x_train_000001", "x_train_000002", "x_val_000000"])
@pytest.mark.parametrize("fault", BROKEN)
def test_broken_shards_are_refused(refusal, data, name, fault):
    change, says = BROKEN[fault]
    change(data / f"{name}.bin")
    message = refusal(*MINI.split(), "--data", str(data))
    assert f"{data / name}.bin {says}" in message and message.endswith("; get it again\n")


def test_a_folder_or_a_hanging_link_is_no_shard(refusal, data):
    path = data / "x_train_000002.bin"
    path.unlink()
    path.mkdir()
    assert f"{path} is no file" in refusal(*MINI.split(), "--data", str(data))
    path.rmdir()
    path.symlink_to("nowhere")
    assert f"{path} is no file" in refusal(*MINI.split(), "--data", str(data))
    path.unlink()
    os.mkfifo(path)  # opening it would wait for ever
    assert f"{path} is no file" in refusal(*MINI.split(), "--data", str(data))


def test_a_shard_that_cannot_be_read_is_refused(refusal, data, monkeypatch):
    def fromfile(*_):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(np, "fromfile", fromfile)
    message = refusal(*MINI.split(), "--data", str(data))
    assert "x_train_000001.bin cannot be read: Permission denied" in message


def test_hidden_and_unfinished_files_are_passed_over(data, monkeypatch):
    for name in ("._x_train_000001.bin", "x_train_000003.bin.part", ".part-1", "x_val.bin"):
        (data / name).write_bytes(b"?")
    monkeypatch.setattr(train_gpt, "prepare", lambda c, mesh, shards, log: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        train_gpt.main([*MINI.split(), "--data", str(data)])


def test_too_few_tokens_are_refused(refusal, data):
    Path("data").mkdir()
    data.rename("data/fineweb10B")
    message = refusal(*MINI.split(), "--data", "data/fineweb10B", "--steps", "9")
    assert "train shards hold 8 of 9 steps; run python data/cached_fineweb10B.py 3\n" in message


def test_a_short_val_shard_is_refused(refusal, data):
    message = refusal(*MINI.split(), "--data", str(data), "--val_tokens", "1536")
    expected = "2 of 3 steps; get more (data/README.md), or add --val_tokens 1024 to what you ran\n"
    assert message.endswith(expected)


def test_the_record_needs_seven_shards():
    shard, c = np.broadcast_to(np.uint16(0), 100_000_000), train_gpt.PRESETS["record"]
    assert train_gpt.steps_in(shard, 8, c.T) == 254
    assert 6 * 254 < c.steps == 1770 <= 7 * 254


@pytest.mark.parametrize("there", [0, 1, 3, 6])
def test_the_message_says_that_seven_are_needed(refusal, there):
    data = Path("data/fineweb10B")
    data.mkdir(parents=True)
    for i in range(there):
        path = write_shard(data / f"fineweb_train_{i + 1:06}.bin", [], count=100_000_000)
        os.truncate(path, 1024 + 200_000_000)  # a hole: takes no room on the disk
    flags = ["--T", "49152", "--head_chunk", "64", "--steps", "1770", "--data", str(data)]
    message = refusal(*MINI.split(), *flags)
    assert f"{there * 254} of 1770 steps; run python data/cached_fineweb10B.py 7\n" in message


# ---- MANIFEST.json ------------------------------------------------------------------------------
def write_manifest(data: Path, **changes) -> dict:
    files = {p.name: dict(size=p.stat().st_size, sha256=sha(p)) for p in data.glob("*.bin")}
    about = dict(source="a test", vocab=257, eot=256, files=files) | changes
    (data / "MANIFEST.json").write_text(json.dumps(about))
    return about


def sha(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


@pytest.mark.parametrize(
    "manifest",
    ["", "{", "[]", "null", '"files"', "{}", "[" * 100_000, '{"vocab": 257, "eot": 256}']
    + [
        json.dumps(dict(vocab=257, eot=256, files={}) | change)
        for change in (
            dict(vocab="257"),
            dict(vocab=True, eot=False),
            dict(vocab=256),  # eot is 256
            dict(eot=-1),
            dict(vocab=65537),
            dict(eot=None),
            dict(files=[]),
            dict(files={"x_train_000001.bin": 1}),
            dict(files={"x_train_000001.bin": {}}),
            dict(files={"x_train_000001.bin": dict(sha256=7)}),
            dict(files={"x_train_000001.bin": dict(sha256="abc")}),
            dict(files={"../x_train_000001.bin": dict(sha256="0" * 64)}),
        )
    ],
)
def test_a_broken_manifest_is_refused(refusal, data, manifest):
    (data / "MANIFEST.json").write_text(manifest)
    message = refusal(*MINI.split(), "--data", str(data))
    assert f"{data} has a broken MANIFEST.json; get the data again\n" in message


def test_a_manifest_that_cannot_be_read_is_refused(refusal, data):
    (data / "MANIFEST.json").mkdir()
    message = refusal(*MINI.split(), "--data", str(data))
    assert f"{data} cannot be read: [Errno 21] Is a directory: '{data}/MANIFEST.json'\n" in message
    (data / "MANIFEST.json").rmdir()
    (data / "MANIFEST.json").write_bytes(b"\xff")
    assert "has a broken MANIFEST.json" in refusal(*MINI.split(), "--data", str(data))


def test_a_file_is_no_folder(refusal, data):
    path = data / "x_val_000000.bin"
    assert f"{path} cannot be read: [Errno 20] Not a" in refusal("tiny", "--data", str(path))


@pytest.mark.parametrize(
    "name", ["y_train_000001.bin", "y_val_000000.bin", "a_val_b_train_000001.bin"]
)
def test_a_folder_with_shards_of_another_set_is_refused(refusal, data, name):
    """Also with some that the run would not read: or those of the other set might be read."""
    shutil.copy(data / "x_val_000000.bin", data / name)
    message = refusal(*MINI.split(), "--data", str(data))
    assert f"{data} has shards of several sets: " in message and "its own folder\n" in message


@pytest.mark.parametrize("change", [dict(vocab=258), dict(eot=255), dict(eot=0)])
def test_tokens_of_another_vocabulary_are_refused_with_the_flags(refusal, data, change):
    about = write_manifest(data, **change)
    message = refusal(*MINI.split(), "--data", str(data))
    assert f"its tokens need --vocab {about['vocab']} --eot {about['eot']}\n" in message


@pytest.mark.parametrize("lost", ["x_train_000001", "x_train_000002", "x_val_000000"])
def test_a_shard_that_the_manifest_lists_must_be_there(refusal, data, lost):
    write_manifest(data)
    (data / f"{lost}.bin").unlink()
    assert f"{lost}.bin is missing; get it again" in refusal(*MINI.split(), "--data", str(data))


def test_a_lost_first_shard_does_not_shift_the_stream(refusal, data):
    """Also where counting begins at 0, so that 000001 might pass for the first."""
    (data / "x_train_000001.bin").rename(data / "x_train_000000.bin")
    (data / "x_train_000002.bin").rename(data / "x_train_000001.bin")
    write_manifest(data)
    (data / "x_train_000000.bin").unlink()
    assert "x_train_000000.bin is missing" in refusal(*MINI.split(), "--data", str(data))


# ---- The pass over the bytes, while stages compile -----------------------------------------------
@pytest.fixture
def outcome(data, monkeypatch, capsys):
    """Runs to the end of the pass over the data: what it was refused by, or None."""

    def make_state(*_):
        raise Passed

    def run(*argv: str) -> str | None:
        shutil.rmtree("logs", ignore_errors=True)
        with pytest.raises((SystemExit, Passed)) as stopped:
            train_gpt.main([*MINI.split(), "--data", str(data), *argv])
        (log,) = Path("logs").iterdir()
        said = capsys.readouterr()
        assert "step:" not in said.out and not re.search("^(step:|RESULT)", log.read_text(), re.M)
        if stopped.type is Passed:
            return None
        assert stopped.value.code == 2 and re.fullmatch(r"train_gpt\.py: .+\n", said.err)
        return said.err

    monkeypatch.setattr(train_gpt, "compile_stage", lambda *_: None)
    monkeypatch.setattr(train_gpt, "make_state", make_state)
    return run


@pytest.mark.parametrize("name", ["x_train_000001.bin", "x_train_000002.bin", "x_val_000000.bin"])
@pytest.mark.parametrize("at", [0, 500, -1])  # the last: in the tail, which is not trained on
def test_tokens_beyond_the_vocabulary_are_refused(data, outcome, name, at):
    tokens = text(1100, first=3)
    tokens[at] = 256
    write_shard(data / name, tokens)
    assert outcome() is None
    tokens[at] = 257
    write_shard(data / name, tokens)
    assert f"{name} has token 257; --vocab is 257" in outcome()


@pytest.mark.parametrize("split", ["train_000001", "val_000000"])
def test_documents_that_a_code_cannot_tell_apart_are_refused(data, outcome, split):
    T = 8192
    flags = f"--T {T} --head_chunk {T} --val_T {T} --val_tokens {8 * T} --steps 1".split()
    for i, name in enumerate(("train_000001", "val_000000")):
        write_shard(data / f"x_{name}.bin", text(8 * T + 2, first=i))
    tokens = text(8 * T + 2, first=2)
    tokens[T : 3 * T] = 7
    tokens[T + 2 : 2 * T : 2] = 256  # 4,095 documents start in the second sequence
    tokens[2 * T : 3 * T - 2 : 2] = 256  # and in the third
    write_shard(data / f"x_{split}.bin", tokens)
    assert outcome(*flags) is None
    tokens[3 * T - 1] = 256
    write_shard(data / f"x_{split}.bin", tokens)
    assert f"x_{split}.bin: 4096 documents start in one sequence" in outcome(*flags)


@pytest.mark.parametrize("copy", ["x_train_000002.bin", "x_val_000000.bin"])
def test_the_same_bytes_twice_are_refused(data, outcome, copy):
    shutil.copy(data / "x_train_000001.bin", data / copy)
    assert "is there twice, under another name" in outcome()


@pytest.mark.parametrize("name", ["x_train_000001.bin", "x_train_000002.bin", "x_val_000000.bin"])
@pytest.mark.parametrize("at", [20, 1024, 2000, 3223])  # of the header, of the tokens; to the last
def test_a_changed_byte_is_refused_by_its_hash(data, outcome, name, at):
    about = write_manifest(data)
    assert outcome() is None
    assert outcome("--vocab", "300") is None  # a smaller vocabulary than --vocab is no fault
    raw = bytearray((data / name).read_bytes())
    raw[at] ^= 1
    (data / name).write_bytes(raw)
    old, new = about["files"][name]["sha256"], sha(data / name)
    says = f"{data / name} has sha256 {new}, but in MANIFEST.json {old}; get it again\n"
    assert outcome().endswith(says)


def test_a_shard_that_the_manifest_does_not_list_is_refused(data, outcome):
    about = write_manifest(data)
    del about["files"]["x_train_000002.bin"]
    write_manifest(data, files=about["files"])
    assert "x_train_000002.bin is not in MANIFEST.json" in outcome()


def test_validation_tokens_under_a_training_name_are_refused(data, outcome):
    write_manifest(data)
    shutil.copy(data / "x_val_000000.bin", data / "x_train_000002.bin")
    write_shard(data / "x_val_000000.bin", text(1100, 5))
    assert re.search("x_train_000002.bin has sha256 .*, but in MANIFEST.json", outcome())


@pytest.mark.parametrize("name", ["x_train_000002.bin", "x_val_000000.bin"])
def test_a_shard_in_which_no_document_starts_is_refused(data, outcome, name):
    """The tokens may be of a vocabulary with another --eot, and every one below --vocab."""
    write_shard(data / name, np.arange(1100) % 250)
    assert f"{data / name} has no token 256, which starts a document; is --eot right?" in outcome()
    about = write_manifest(data)
    assert f"{name} has no token 256" in outcome()  # as a hub's: nobody counted documents
    about["files"][name]["documents"] = 1
    write_manifest(data, files=about["files"])
    assert f"{name} has no token 256" in outcome()
    about["files"][name]["documents"] = 0  # the middle of a long document, as tokenize_text.py says
    write_manifest(data, files=about["files"])
    assert outcome() is None


def test_a_shard_is_inspected_to_its_end(tmp_path):
    """It is read in pieces, of which this one has three."""
    T = 24_576
    tokens = np.random.default_rng(0).integers(0, 257, 2 * (2**22 // T * T) + 999)
    tokens[-1], tokens[-2_000_000:-1_500_000:3] = 400, 256
    path = write_shard(tmp_path / "x_train_000001.bin", tokens)
    starts = np.bincount(np.flatnonzero(tokens == 256) // T)
    assert starts.argmax() > 2**22 // T
    assert train_gpt.inspect(train_gpt.open_shard(path), T, 256) == dict(
        file=path.name, bytes=path.stat().st_size, largest_token=400, tokens=len(tokens),
        sha256=hashlib.sha256(path.read_bytes()).hexdigest(), documents=starts.sum(),
        documents_in_sequence=starts.max(),
    )  # fmt: skip


def test_a_good_log_names_what_was_read(data, outcome, monkeypatch):
    """The facts about the data are in the log before anything trains."""
    assert outcome() is None
    (log,) = Path("logs").iterdir()
    (line,) = re.findall("^data (.*)$", log.read_text(), re.M)
    assert [shard["file"] for shard in json.loads(line)] == sorted(p.name for p in data.iterdir())


@pytest.mark.parametrize(
    "platform, kind, capability, attention, head",
    [
        ("gpu", "NVIDIA H100 80GB HBM3", "9.0", "cudnn", ("float8_e4m3fn", "float8_e5m2")),
        ("gpu", "NVIDIA GeForce RTX 4090", "8.9", "cudnn", ("float8_e4m3fn", "float8_e5m2")),
        ("gpu", "NVIDIA A100-SXM4-80GB", "8.0", "cudnn", ("bfloat16", "bfloat16")),
        ("gpu", "AMD Instinct MI300X", "gfx942", "xla", ("float8_e4m3fn", "float8_e5m2")),
        ("tpu", "TPU v5 lite", "", "xla", ("float8_e4m3fn", "float8_e5m2")),
    ],
)
def test_formats_and_kernel_fit_the_device(
    platform, kind, capability, attention, head, monkeypatch
):
    """A GPU without FP8 takes the head in bfloat16; only NVIDIA's have cuDNN."""
    device = SimpleNamespace(platform=platform, device_kind=kind, compute_capability=capability)
    monkeypatch.setattr(jax, "devices", lambda: [device] * 8)
    devices, c = train_gpt.fit_devices("record", train_gpt.Config())
    assert devices == [device] * 8
    assert (c.attention, (c.head_forward, c.head_backward)) == (attention, head)
    same = dict(attention=attention, head_forward=head[0], head_backward=head[1])
    assert c == dataclasses.replace(train_gpt.Config(), **same)
    wide = dataclasses.replace(train_gpt.Config(), compute="float32")
    assert train_gpt.fit_devices("record", wide)[1].attention == "xla"  # cuDNN's has no float32
