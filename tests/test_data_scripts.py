"""The scripts of data/: the text is the committed one, and a failure is one clear line."""

import hashlib
import importlib.util
import os
import pathlib
import subprocess
import sys

import numpy as np
import pytest

DATA = pathlib.Path(__file__).resolve().parent.parent / "data"


def load(name):
    spec = importlib.util.spec_from_file_location(name, DATA / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


source_code = load("source_code")


def run(module, monkeypatch, *argv):
    monkeypatch.setattr(sys, "argv", [module.__name__, *map(str, argv)])
    module.main()


# ---- source_code.py ------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """Made by two processes at once, as on a machine where two runs start together."""
    out = tmp_path_factory.mktemp("source_code")
    command = [sys.executable, DATA / "source_code.py", "--out", out]
    both = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    printed = [process.communicate(timeout=60)[0] for process in both]
    assert [process.returncode for process in both] == [0, 0]
    return out, printed


@pytest.fixture(scope="module")
def shards(built):
    raw = {name: (built[0] / name).read_bytes() for name in source_code.SHARDS}
    header = {name: np.frombuffer(data[:1024], "<i4") for name, data in raw.items()}
    tokens = {name: np.frombuffer(data[1024:], "<u2") for name, data in raw.items()}
    return header, tokens


def documents(tokens):
    starts = np.flatnonzero(tokens == source_code.EOT)
    return [part[1:].astype(np.uint8).tobytes() for part in np.split(tokens, starts)[1:]]


def test_shards_are_the_committed_ones(built):
    out, printed = built
    assert sorted(path.name for path in out.iterdir()) == sorted(source_code.SHARDS)
    for name, expected in source_code.SHARDS.items():
        assert hashlib.sha256((out / name).read_bytes()).hexdigest() == expected
    assert any(all(sha in text for sha in source_code.SHARDS.values()) for text in printed)


def test_format_is_that_of_llm_c(shards):
    for header, tokens in zip(*(part.values() for part in shards), strict=True):
        assert header[:3].tolist() == [20240520, 1, len(tokens)]
        assert not header[3:].any()
        assert tokens[0] == source_code.EOT and tokens.max() == source_code.EOT


def test_there_is_enough_of_it(shards):
    first, second, val = shards[1].values()
    used = 500 * 8 * 256  # by tiny: it crosses to the second shard, and no epoch ends
    assert len(first) + 8 * 256 < used < len(first) + len(second) - 8 * 256
    assert len(val) >= 131_073  # what the evaluation reads, and one token more for the last target


def test_no_document_stands_twice(shards):
    first, second, val = map(documents, shards[1].values())
    everything = first + second + val
    assert len(set(everything)) == len(everything)


def test_no_validation_file_is_in_training(shards):
    first, second, _ = map(documents, shards[1].values())
    train = set(first + second)
    files = source_code.read_files()
    val_files = source_code.held_out(files)
    assert 0.08 < len(val_files) / len(files) < 0.1
    for path in val_files:
        assert not train & set(source_code.documents(files[path]))


def test_few_validation_lines_stand_in_training(shards):
    first, second, val = (
        [line.strip() for line in b"\n".join(documents(tokens)).split(b"\n")]
        for tokens in shards[1].values()
    )
    train = set(first + second)
    long_lines = [line for line in val if len(line) > source_code.LONG_LINE]
    assert sum(line in train for line in long_lines) / len(long_lines) < 0.05


def test_a_file_is_cut_at_its_definitions():
    pieces = [
        b"import os\n",
        b"# Says why.\n@cache\ndef f():\n    def g():\n        pass\n",
        b"X = 1\n",
        b"class A:\n    y = 2\n",
        b"    # Of the method.\n    async def m(self):\n        return '\x0c'\n",
        b"    z = 3\n",
        b"f()\n",
    ]
    assert source_code.documents(b"\n\n".join(pieces)) == pieces
    assert source_code.documents(b"\n \n") == []


def test_second_run_does_nothing(built, monkeypatch, capsys):
    out, _ = built
    before = {path: path.stat().st_mtime_ns for path in out.iterdir()}
    monkeypatch.setattr(source_code, "build", lambda: pytest.fail("built again"))
    run(source_code, monkeypatch, "--out", out)
    said = capsys.readouterr().out
    assert all(f"{name} sha256:{sha} is there" in said for name, sha in source_code.SHARDS.items())
    assert {path: path.stat().st_mtime_ns for path in out.iterdir()} == before


def test_broken_shard_is_made_anew(built, monkeypatch):
    path = built[0] / "source_val_000000.bin"
    path.write_bytes(path.read_bytes()[:-2])
    run(source_code, monkeypatch, "--out", built[0])
    expected = source_code.SHARDS[path.name]
    assert hashlib.sha256(path.read_bytes()).hexdigest() == expected


def test_other_version_is_named_and_writes_nothing(tmp_path):
    fakes, out = tmp_path / "fakes", tmp_path / "out"
    (fakes / "optax").mkdir(parents=True)
    (fakes / "optax" / "__init__.py").write_text("def other(): pass\n")
    (fakes / "optax-0.2.7.dist-info").mkdir()
    metadata = "Metadata-Version: 2.1\nName: optax\nVersion: 0.2.7\n"
    (fakes / "optax-0.2.7.dist-info" / "METADATA").write_text(metadata)
    command = [sys.executable, DATA / "source_code.py", "--out", out]
    env = os.environ | {"PYTHONPATH": str(fakes)}
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    assert done.stderr.count("\n") == 1
    assert "optax 0.2.7" in done.stderr and "optax==0.2.8" in done.stderr
    assert not out.exists()


def test_changed_file_of_the_right_version_asks_for_a_reinstall(tmp_path, monkeypatch):
    changed = source_code.read_files() | {"optax/extra.py": b"def extra(): pass\n"}
    monkeypatch.setattr(source_code, "read_files", lambda: changed)
    with pytest.raises(SystemExit, match="--force-reinstall --no-deps optax==0.2.8"):
        run(source_code, monkeypatch, "--out", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_missing_package_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr(source_code.importlib.util, "find_spec", lambda package: None)
    with pytest.raises(SystemExit, match="optax is missing"):
        run(source_code, monkeypatch, "--out", tmp_path / "out")


# ---- cached_fineweb10B.py ------------------------------------------------------------------------


class Hub:
    """Stands in for hf_hub_download: writes small shards, notes what it was asked for."""

    def __init__(self, cut=0, error=None):
        self.asked, self.cut, self.error = [], cut, error

    def __call__(self, repo_id, filename, *, repo_type, local_dir, force_download):
        assert (repo_id, repo_type) == ("kjj0/fineweb10B-gpt2", "dataset")
        self.asked.append((filename, force_download))
        if self.error:
            raise self.error
        local_dir.mkdir(exist_ok=True)
        header = np.zeros(256, "<i4")
        header[:3] = 20240520, 1, 5
        (local_dir / filename).write_bytes(header.tobytes() + bytes(10 - self.cut))


@pytest.fixture
def fineweb(tmp_path, monkeypatch):
    module = load("cached_fineweb10B")
    monkeypatch.setattr(module, "FOLDER", tmp_path / "fineweb10B")
    monkeypatch.setattr(module, "hf_hub_download", Hub())
    return module


def names(count):
    return ["fineweb_val_000000.bin"] + [f"fineweb_train_{i:06d}.bin" for i in range(1, count + 1)]


@pytest.mark.parametrize("argv, count", [([], 7), ([1], 1), ([103], 103)])
def test_the_first_n_shards_are_fetched(fineweb, monkeypatch, argv, count):
    run(fineweb, monkeypatch, *argv)
    assert fineweb.hf_hub_download.asked == [(name, False) for name in names(count)]


@pytest.mark.parametrize("n", ["0", "104", "-1", "many"])
def test_bad_n_is_refused(fineweb, monkeypatch, capsys, n):
    with pytest.raises(SystemExit) as stopped:
        run(fineweb, monkeypatch, n)
    assert stopped.value.code == 2 and n in capsys.readouterr().err
    assert fineweb.hf_hub_download.asked == []


@pytest.mark.parametrize("broken", [b"", b"x", bytes(1034)])
def test_whole_shards_are_kept_and_broken_ones_fetched_anew(fineweb, monkeypatch, broken):
    run(fineweb, monkeypatch, 3)
    (fineweb.FOLDER / names(3)[2]).write_bytes(broken)
    (fineweb.FOLDER / names(3)[3]).unlink()
    fineweb.hf_hub_download.asked.clear()
    run(fineweb, monkeypatch, 3)
    assert fineweb.hf_hub_download.asked == [(names(3)[2], True), (names(3)[3], False)]


def test_failure_is_one_line(fineweb, monkeypatch):
    monkeypatch.setattr(fineweb, "hf_hub_download", Hub(error=OSError("no route\nto host")))
    with pytest.raises(SystemExit) as stopped:
        run(fineweb, monkeypatch, 1)
    assert stopped.value.code == (
        "cached_fineweb10B.py: fineweb_val_000000.bin could not be fetched: no route to host"
    )


def test_incomplete_download_fails(fineweb, monkeypatch):
    monkeypatch.setattr(fineweb, "hf_hub_download", Hub(cut=2))
    with pytest.raises(SystemExit, match="fineweb_val_000000.bin came incomplete"):
        run(fineweb, monkeypatch, 1)
