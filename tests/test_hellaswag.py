"""evals/hellaswag.py: losses against rows computed one at a time, planted faults, bad files, and
the download of the examples."""

import dataclasses
import hashlib
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import cached_hellaswag
import hellaswag
import jax
import numpy as np
import pyarrow
import pytest
import shards
import weights
from hub import Hub
from pyarrow import parquet
from shards import Fault

import train_gpt
from tests.test_tokenize import gpt2  # noqa: F401, a fixture
from tests.tools import PHRASE, bank_matrices, bigram_rows

TRAIN = Path(train_gpt.__file__).resolve()
SCRIPT = Path(hellaswag.__file__)
SOURCE = SCRIPT.read_text()
ENCODE = shards.coder(257, 256).encode
read = lambda path: [*hellaswag.tokenize(cached_hellaswag.read(path), ENCODE)]
CONTEXT = PHRASE[-7:] + PHRASE[:7]  # of all examples
ON = "sat on a mat, the cat " * 3  # the likeliest ending
EXAMPLES = [  # endings, label, and whether the answer is right by acc and by acc_norm
    ([ON[:20], "dog ran to the sea x", "qqq", "zzz"], 0, 1, 1),
    (["zzz", "qqq", ON[:20], "the the the the the "], 2, 1, 1),
    (["szt on a mzt, the czt", "Q", "q", "z"], 0, 0, 1),  # likelier per byte, but longer
    (["saQ", "szt" + ON[3:47] + "czt", "zzz", "QQQ"], 0, 1, 0),  # shorter, but less likely per byte
    ([ON[:51], "Q", "z", "zzz"], 3, 0, 0),
    ([ON[:51], "Qqq", "zzz", "éx"], 0, 1, 1),
    (["Q", "z", "q", "szt xn z mzt, thq czt"], 3, 0, 1),
]
ROWS = [dict(ind=7, ctx=CONTEXT, endings=e[0], label=e[1], split="val") for e in EXAMPLES]
FOUND = np.array([e[2:] for e in EXAMPLES], bool).T


def start(*argv, cwd=None, **env):
    """Runs a Python command in a process."""
    env = dict(os.environ, JAX_PLATFORMS="cpu", JAX_DISABLE_MOST_OPTIMIZATIONS="1") | env
    return subprocess.run([sys.executable, *argv], env=env, cwd=cwd, text=True, capture_output=True)


@pytest.fixture(scope="module")
def its(trained, tmp_path_factory):
    """A file of EXAMPLES, weights that know the phrase, and the endings' sums of losses, which are
    computed one row at a time, without padding."""
    folder = tmp_path_factory.mktemp("hellaswag")
    (folder / "val.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    (path,) = trained.glob("logs/*.npz")
    w = weights.open_weights(path, TRAIN)
    w = w._replace(c=dataclasses.replace(w.c, pointer=0))  # so that the head's padding counts
    whole = {k: jax.device_put(x) for k, x in w.arrays.items()}
    whole |= {k: bank_matrices(k, whole[k], w.c) for k in ("qk", "vo", "mlp")}
    head = w.arrays["head"]  # with 127 rows of padding

    @jax.jit
    def stream(tokens):
        inputs = tokens[:, :-1]
        rows = bigram_rows(whole, inputs, w.c)
        return train_gpt.norm(train_gpt.forward(rows, inputs, w.c, w.stage))

    def loss(ending):
        row = f"{CONTEXT} {ending}".encode()
        begin = len(CONTEXT)
        z = np.asarray(stream(np.array([[*row]], np.int32))[0], "f8") @ head[:257].T
        z = 23 / (1 + np.exp(-(z + 5) / 7.5))[begin - 1 :]  # logits of the ending
        log_p = z - np.log(np.exp(z).sum(axis=1, keepdims=True))
        return -sum(log_p[i, token] for i, token in enumerate(row[begin:]))

    # Replaces weights.runner, so that the model is compiled once for all tests.
    runner = lambda _, read: lambda x, *of: jax.jit(read)(stream(x), whole, x, *of)
    sums = np.array([[loss(ending) for ending in e[0]] for e in EXAMPLES])
    return SimpleNamespace(file=folder / "val.jsonl", w=w, sums=sums, runner=runner)


def load(source=SOURCE):
    """A source as a module; its batches are so small that the examples make several."""
    tool = ModuleType("tool")
    tool.__file__ = weights.__file__  # its neighbour
    exec(compile(source, "mutant", "exec"), vars(tool))
    tool.TOKENS = 1024
    tool.CHUNK = 128
    return tool


def fault_of(path):
    """The message of the fault that a bad file raises."""
    with pytest.raises(Fault) as fault:
        read(path)
    assert "\n" not in str(fault.value)
    return str(fault.value)


def test_losses_are_those_of_a_row_at_a_time_and_the_answers_are_known(its, capsys):
    # A row of 65 tokens has T = 64, longer ones are padded to T = 128.
    assert sorted(max(map(len, e[0])) for e in read(its.file))[-3:] == [65, 66, 66]
    tool = load()
    tool.tqdm = lambda **of: hellaswag.tqdm(**of | dict(disable=False, mininterval=0, miniters=1))
    sums, right = tool.score(its.w, read(its.file))
    np.testing.assert_allclose(sums, its.sums, rtol=0, atol=1e-4)
    np.testing.assert_array_equal(right, FOUND)
    bar = re.findall(r"([267])/7 [^]]*?acc (.*?), acc_norm (.*?)]", capsys.readouterr().err)
    assert bar == [("2", "50.00%", "50.00%"), ("6", "50.00%", "66.67%"), ("7", "57.14%", "71.43%")]


# Text of the tool, and what a fault puts in its place. Other faults are in lab/faults/evals.toml.
FAULTS = {
    "": [""], "np.argmin": ["np.argmax"], "[sums, sums / counts]": ["[sums, sums]"],
    "spans[:, :1] <= index": ["spans[:, :1] < index"],
    "index < spans[:, 1:]": ["index <= spans[:, 1:]"],
    "x, tokens, CHUNK": ["x, jnp.roll(tokens, 1, axis=1), CHUNK"], '" " + ending': ["ending"],
}  # fmt: skip


@pytest.mark.parametrize("old, new", [(old, new) for old in FAULTS for new in FAULTS[old]])
def test_a_planted_fault_shows(old, new, its, monkeypatch):
    assert not old or SOURCE.count(old) == 1
    monkeypatch.setattr(weights, "runner", its.runner)
    tool = load(SOURCE.replace(old, new))
    sums, right = tool.score(its.w, [*tool.tokenize(cached_hellaswag.read(its.file), ENCODE)])
    is_right = np.allclose(sums, its.sums, 0, 1e-4) and np.array_equal(right, FOUND)
    assert is_right == (old == "")


def test_a_run_tells_scores(its):
    first, *rest = start(SCRIPT, its.w.path, "--file", its.file).stdout.splitlines()
    assert re.fullmatch(rf"HellaSwag of {its.w.path}: 7 examples in \d+\.\d s", first)
    assert rest == ["acc      57.14% +- 18.70% (standard error), 4 of 7",
                    "acc_norm 71.43% +- 17.07% (standard error), 5 of 7",
                    "tokens are bytes, so no other figures can be compared with these"]  # fmt: skip


def test_a_file_without_examples_gets_a_line(its, tmp_path, monkeypatch, capsys):
    empty = tmp_path / "empty.jsonl"
    monkeypatch.setattr(sys, "argv", ["hellaswag.py", str(its.w.path), "--file", str(empty)])
    with pytest.raises(SystemExit, match="2"):
        hellaswag.main()
    assert capsys.readouterr().err == f"hellaswag.py: no such file: {empty}\n"
    empty.touch()
    with pytest.raises(SystemExit, match="2"):
        hellaswag.main()
    assert capsys.readouterr().err == f"hellaswag.py: {empty} is empty\n"


def test_gpt2s_tokens_and_figures(its, tmp_path, monkeypatch, capsys, gpt2):  # noqa: F811
    row = dict(ctx="A man", endings=["sits", "thrée", "<|endoftext|>", ""], label="2")
    file = tmp_path / "x.jsonl"
    file.write_text(json.dumps(row))
    w = its.w._replace(c=SimpleNamespace(vocab=50257, eot=50256))
    calls = []

    def run(tokens, spans):
        calls.append((tokens, spans))
        return np.ones(256, "f4")

    monkeypatch.setattr(weights, "open_weights", lambda *_: w)
    monkeypatch.setattr(weights, "runner", lambda *_: run)
    monkeypatch.setattr(sys, "argv", ["hellaswag.py", "x.npz", "--file", str(file)])
    hellaswag.main()
    out = capsys.readouterr().out
    assert "acc 28.59%, acc_norm 29.55% (stated by llm.c, not" in out
    assert "\nties: in 1, several endings have the lowest sum, and acc takes the first\n" in out
    for ending, tokens, span in zip(row["endings"], *calls[0], strict=False):
        wanted = gpt2.encode_ordinary("A man") + gpt2.encode_ordinary(f" {ending}")
        assert [*tokens] == wanted + [0] * (65 - len(wanted)) and [*span] == [2, len(wanted)]


def test_parquet_is_read_and_what_is_bad_is_named(its, tmp_path, monkeypatch):
    changes = [dict(endings=["a", "b", "c"]), dict(endings=["a", "b", "c", 4]), dict(label=4)]
    changes += [dict(label=""), *(dict(ctx=ctx) for ctx in ("", None, "\ud800", "a" * 2029))]
    bad = [json.dumps(ROWS[0] | change).encode() for change in changes]
    good = json.dumps(ROWS[0]).encode()
    for line in (b"{", b"[1]", b"\n" + good, good + b"\xe9", b"[" * 99_999, *bad):
        file = tmp_path / "x"
        file.write_bytes(good + b"\n" + line + b"\n")
        messages = f"{file}:2 is no example of HellaSwag: ", "row 2 has 2050 tokens, more than 2049"
        assert fault_of(file).startswith(messages)
    file.write_bytes(b"\xef\xbb\xbf" + good + b"\r\n\n")  # an editor's mark, and an empty last line
    assert len(read(file)) == 1
    file.write_text(good.decode(), encoding="utf-16")
    assert f"{file}:1 is no example of HellaSwag: 'utf-8' codec can't" in fault_of(file)
    with pytest.raises(FileNotFoundError):  # which one_line() explains
        read(tmp_path / "none.jsonl")
    good, bad, other = (tmp_path / f"{name}.parquet" for name in ("x", "y", "z"))
    rows = [row | dict(label=str(row["label"])) for row in ROWS]  # as the hub has it
    parquet.write_table(pyarrow.Table.from_pylist(rows), good)
    assert read(good) == read(its.file)
    bad.write_bytes(b"PAR1 no")
    parquet.write_table(pyarrow.table(dict(text=["a"])), other)
    for path, message in (bad, f"{bad} is no"), (other, f"{other}:1 is no"):
        assert message in fault_of(path)
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    assert "./run.sh hellaswag has it" in fault_of(good)


def test_the_validation_set_is_fetched_once_and_checked(its, tmp_path):
    of = cached_hellaswag
    content = b"the bytes of a parquet file"
    commits = {"0" * 40: b"later", of.COMMIT: content}  # the first is main
    hub = Hub(of.REPO, {commit: {of.NAME: it} for commit, it in commits.items()})
    digest = hashlib.sha256(content).hexdigest()
    file = tmp_path / of.NAME
    code = "import cached_hellaswag as it\n"
    code += f"it.OUT, it.SHA256 = it.pathlib.Path({str(tmp_path)!r}), {digest!r}\n"
    score = "import sys, weights, hellaswag\n"  # they import jax, which takes a second
    score += f"sys.argv = ['hellaswag.py', {str(its.w.path)!r}]\nhellaswag.main()"
    begins = f"downloading HellaSwag to {tmp_path} ...\n"
    env = dict(
        HF_ENDPOINT=hub.endpoint,
        HF_HOME=str(tmp_path),
        PYTHONPATH=f"{SCRIPT.parent}:{Path(of.__file__).parent}",
    )
    env |= dict(HF_TOKEN="good", NO_PROXY="*")
    done = start("-c", code + "print(it.fetch())", **env)
    assert (done.stdout, done.stderr) == (f"{file}\n", begins) and hub.asked("cdn") == [of.NAME]
    hub.close()
    again = start("-c", code + "print(it.fetch())", **env)  # no network
    assert (again.stdout, again.stderr) == (done.stdout, "")
    file.write_bytes(content[:-1])
    done = start("-c", code + score, **env)
    assert done.returncode == 2 and f", not {digest}: delete it" in done.stderr
    file.unlink()
    done = start("-c", code + score, **env, HF_HUB_OFFLINE="1")
    assert done.returncode == 2 and re.fullmatch(f"{begins}hellas.*network.*jsonl\n", done.stderr)
    done = start(of.__file__, **env, HF_HUB_OFFLINE="1")
    assert done.returncode == 1 and re.fullmatch("downl.*\ncached_hellas.*network.*\n", done.stderr)
