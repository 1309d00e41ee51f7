"""data/tokenize_text.py: the tokens are the right ones, and nothing half is ever there."""

import collections
import dataclasses
import gzip
import hashlib
import itertools
import json
import lzma
import math
import os
import pathlib
import random
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
import unicodedata

import cached_fineweb10B
import gpt2_prefixes
import guard
import numpy as np
import pyarrow.parquet
import pytest
import readers
import shards
import tiktoken
import tokenize_text
import zstandard

import train_gpt

HERE = pathlib.Path(__file__).resolve().parent
EOT = 50256


# ---- What the tests lean on ----------------------------------------------------------------------
@pytest.fixture(scope="session", autouse=True)
def gpt2(tmp_path_factory):
    """tiktoken's, by a cache with files named by the sha1 of their addresses; it checks the sha256.
    vocab.bpe is OpenAI's (github.com/openai/gpt-2, modified MIT licence); encoder.json follows: the
    256 bytes, as characters that can be seen (the others moved to 256 and up), what each merge
    makes, <|endoftext|>."""
    merges = lzma.decompress((HERE / "gpt2_vocab.bpe.xz").read_bytes()).decode()
    seen = [*range(33, 127), *range(161, 173), *range(174, 256)]
    tokens = [chr(byte) for byte in seen] + [chr(256 + i) for i in range(256 - len(seen))]
    tokens += [pair.replace(" ", "") for pair in merges.splitlines()[1:]] + ["<|endoftext|>"]
    encoder = json.dumps({token: number for number, token in enumerate(tokens)})
    folder = tmp_path_factory.mktemp("tiktoken")
    (folder / "6d1cbeee0f20b3d9449abfede4726ed8212e3aee").write_text(merges, encoding="utf-8")
    (folder / "6c7ea1a7e38e3a7f062df639a5b80947f075ffe6").write_text(encoder, encoding="utf-8")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TIKTOKEN_CACHE_DIR", str(folder))
        yield tiktoken.get_encoding("gpt2")


@pytest.fixture
def script(tmp_path, monkeypatch):
    """Runs the script in this process."""

    def run(*argv):
        argv = ["tokenize_text.py", "--out", tmp_path / "out", *argv]
        monkeypatch.setattr(sys, "argv", list(map(str, argv)))
        tokenize_text.main()

    return run


@pytest.fixture
def tokenize(script, tmp_path, monkeypatch):
    """Runs the script, also on texts that are too short for training, and writes them once. Returns
    the tokens of all documents, after it has compared them with the shards."""
    split = tokenize_text.split
    stream = []

    def record(arrays, *more):
        return split((stream.append(array) or array for array in arrays), *more)

    monkeypatch.setattr(tokenize_text, "SMALLEST", 2)
    monkeypatch.setattr(tokenize_text, "choose_passes", lambda tokens, args: 1)
    monkeypatch.setattr(tokenize_text, "report", lambda *_: None)
    monkeypatch.setattr(tokenize_text, "split", record)

    def run(*argv):
        stream.clear()
        script(*argv)
        tokens = np.concatenate(stream)
        compare(read_shards(tmp_path / "out"), tokens)
        return tokens

    return run


def compare(arrays, tokens):
    """Shards hold the tokens. Each begins with EOT, which is added if it continues a document."""
    place = 0
    for shard in arrays:
        assert shard[0] == tokens[0]
        if tokens[place] != tokens[0]:
            shard = shard[1:]
        assert np.array_equal(shard, tokens[place : place + len(shard)])
        place += len(shard)
    assert place == len(tokens)


@pytest.fixture
def refusal(tokenize, tmp_path):
    """The one line with which the script exits; nothing has been written then."""

    def run(*argv):
        with pytest.raises(SystemExit) as stopped:
            tokenize(*argv)
        assert re.fullmatch("tokenize_text.py: .+: .+", stopped.value.code)  # what is wrong: to do
        assert not (tmp_path / "out").exists()
        return stopped.value.code

    return run


def read_shards(out):
    """The tokens of all shards, validation first; the folder is right."""
    about, (*train, val) = shards.read_folder(out)
    assert not any(fault for *_, fault in shards.check(out, about, [*train, val]))
    return [np.fromfile(out / name, "<u2", offset=1024) for name in (val, *train)]


def left_in(out):
    """What a folder holds beside what read_shards notes."""
    return sorted({path.name for path in out.glob("*")} - {shards.STAMP})


def expected(documents, gpt2=None):
    """The straightforward way: every document as a whole, EOT in front."""
    encode = gpt2.encode_ordinary if gpt2 else lambda text: list(text.encode())
    return np.concatenate([[EOT if gpt2 else 256, *encode(text)] for text in documents])


def prose(size, seed=0):
    """So many characters of invented words."""
    draw, syllables = random.Random(seed), "ba ker to mi lun da fre gos pi she".split()
    ends = [" ", " ", " ", " ", ", ", ". ", ".\n", "'s ", " 17 "]
    word = lambda: "".join(draw.choices(syllables, k=draw.randint(1, 4))) + draw.choice(ends)
    return "".join(word() for _ in range(1 + size // 3))[:size]


COMMAND = [sys.executable, tokenize_text.__file__]
STEPS = ["--bytes", "--val_tokens", "1025", "--shard_tokens", "100000"]
DOCUMENTS = [prose(100, seed) for seed in range(20)]


def as_jsonl(documents):
    return "".join(json.dumps({"n": 1, "text": text}) + "\n" for text in documents).encode()


PACK = {"": bytes, ".gz": gzip.compress, ".zst": zstandard.compress}


def test_the_prefixes_that_lie_in_the_repository_are_those_of_gpt2(gpt2):
    made = gpt2_prefixes.prefixes(gpt2._mergeable_ranks)
    assert made.tobytes() == (HERE.parent / "data" / "gpt2_prefixes.bin").read_bytes()
    text = lambda number: gpt2.decode_single_token_bytes(number)
    for number in (262, 50255, 11248):
        assert text(number).startswith(text(made[number])) and made[number] != number
    assert made[50256] == made[0] == -1 and len(made) == 50257


# ---- Tokens --------------------------------------------------------------------------------------
@pytest.mark.parametrize("by_bytes", [False, True])
def test_what_becomes_of_odd_characters(tokenize, tmp_path, gpt2, monkeypatch, by_bytes):
    """A byte order mark goes, newlines stay, half a surrogate pair becomes U+FFFD."""
    monkeypatch.setattr(readers, "CHUNK", 2)  # not even the mark comes in one piece
    monkeypatch.setattr(readers, "BLOCK", 2)
    text = "one\r\ntwo\rthree\n\ufefffour\u2028five\x0b\x1c\x85\x00\u4e2d<|endoftext|>"
    text += DOCUMENTS[0]
    halves = r'{"text": "a \ud83d b \uDE00 \ud83d\ude00 \ude00\ud83d"}' "\n" r'{"text": "\ud83d"}'
    (tmp_path / "a.txt").write_bytes(b"\xef\xbb\xbf" + text.encode())
    (tmp_path / "b.jsonl").write_bytes(b"\xef\xbb\xbf" + as_jsonl(["\ufeffx"]) + halves.encode())
    found = tokenize(tmp_path / "a.txt", tmp_path / "b.jsonl", *["--bytes"] * by_bytes)
    texts = [text, "\ufeffx", "a \ufffd b \ufffd \U0001f600 \ufffd\ufffd", "\ufffd"]
    assert found.tolist() == expected(texts, None if by_bytes else gpt2).tolist()


def test_any_number_of_threads_makes_the_same_files(tokenize, tmp_path, gpt2):
    documents = [prose(600_000), *(prose(300, seed) for seed in range(500))]
    (tmp_path / "in.jsonl").write_bytes(as_jsonl(documents))
    found = []
    for count in (1, 3):
        argv = "--workers", count, "--shard_tokens", 50_000
        assert np.array_equal(tokenize(tmp_path / "in.jsonl", *argv), expected(documents, gpt2))
        found.append({p.name: p.read_bytes() for p in (tmp_path / "out").glob("[!.]*")})
        (tmp_path / "out").rename(tmp_path / str(count))
    assert found[0] == found[1] and len(found[0]) > 4


def test_results_come_in_order_few_wait_and_a_failure_ends_all():
    pulled, found = [], []
    tasks = (pulled.append(5000 * (i % 3) + i) or pulled[-1] for i in range(200))
    for result in tokenize_text.in_order(2, math.factorial, tasks):
        found.append(result)
        assert len(pulled) < len(found) + 2 * tokenize_text.QUEUE
    assert found == list(map(math.factorial, pulled)) and len(found) == 200
    with pytest.raises(json.JSONDecodeError):
        list(tokenize_text.in_order(2, json.loads, ["1", "x", *["2"] * 99]))
    over = tokenize_text.in_order(2, time.sleep, itertools.chain([0], itertools.repeat(0.5)))
    assert next(over) is None
    started = time.monotonic()
    over.close()
    assert time.monotonic() - started < 3  # two sleep, fourteen wait


# ---- Cutting documents ---------------------------------------------------------------------------
HARD = [" ", " ", "  ", "\n", "\r\n", "\t", "\u00a0", "\u3000", "\u2028", "\x1c", "\x85", "a", "B",
        "\u00e9", "e\u0301", "\u0301", "'s", "'ll", "'", "'S", "\u4e2d", "\u6587\u5b57", "\u3002",
        "\U0001f600", "\U0001f468\u200d\U0001f469", "1", "23", "\u00b2", "\u2167", "\u0663", "!",
        "--", "_", "the", " the", "\ufffd", "\u0378", "\u1c89", "\u0e01\u0e34", "\u05d0",
        "<|endoftext|>"]  # fmt: skip


def cut(text, at, piece, monkeypatch):
    """The pieces of a document that comes in parts, cut at the places `at`."""
    monkeypatch.setattr(tokenize_text, "PIECE", piece)
    counts, ends = collections.Counter(), [0, *sorted(at), len(text)]
    parts = [text[a:b] for a, b in itertools.pairwise(ends)]
    begins, found = zip(*tokenize_text.pieces(iter([*parts, None]), counts), strict=True)
    assert "".join(found) == text and max(map(len, found)) <= 2 * piece
    assert begins == (True, *[False] * (len(found) - 1))
    return found, counts["cuts"]


def test_cuts_do_not_change_tokens_and_depend_on_the_document_alone(gpt2, monkeypatch):
    draw, exact, many = random.Random(1), 0, 0
    for _ in range(4000):
        text = "".join(draw.choices(draw.sample(HARD, 6) if draw.random() < 0.5 else HARD, k=60))
        piece, at = draw.choice([2, 5, 9, 20]), draw.choices(range(60), k=draw.choice([1, 5, 50]))
        parts, cuts = cut(text, [], piece, monkeypatch)
        assert cut(text, at, piece, monkeypatch) == (parts, cuts)
        if cuts == 0:
            exact, many = exact + 1, many + len(parts)
            pieces = [token for part in parts for token in gpt2.encode_ordinary(part)]
            assert pieces == gpt2.encode_ordinary(text), parts
    assert exact > 1000 and many > 5000


def test_what_is_no_letter_yet_is_no_boundary():
    """tiktoken may know more of Unicode than this Python."""
    unassigned = next(c for c in map(chr, range(0x1C8A, 2**16)) if unicodedata.category(c) == "Cn")
    assert tokenize_text.boundary(f"a{unassigned}b", 0, 3) is None
    assert tokenize_text.boundary("a.b", 0, 3) == 1
    assert tokenize_text.boundary("\u00b2.b", 0, 3) is None  # a digit to Python, no letter


RUNS = ["a" * 600_000, " " * 1_100_000 + "x", "\n" * 600_000 + "x", "\u4e2d" * 600_000]


def test_endless_runs_are_cut_and_reported(tokenize, tmp_path, gpt2, capsys):
    """tiktoken panics at a million spaces."""
    paths = [tmp_path / f"{number}.txt" for number in range(len(RUNS))]
    for path, run in zip(paths, RUNS, strict=True):
        path.write_text("x " * 100_000 + run + " y" * 200_000)
    texts = gpt2.decode(tokenize(*paths).tolist()).split("<|endoftext|>")[1:]
    assert texts == [path.read_text() for path in paths]
    assert "4 files cut inside runs of more than 262144 characters" in capsys.readouterr().out


# ---- Files ---------------------------------------------------------------------------------------
@pytest.mark.parametrize("kind", [".txt", ".jsonl", ".MD"])
@pytest.mark.parametrize("how", PACK)
def test_formats(tokenize, tmp_path, monkeypatch, kind, how):
    """Archives of two members, as pigz and `cat a.gz b.gz` make them, read byte by byte."""
    monkeypatch.setattr(readers, "CHUNK", 128)
    documents, path = ["".join(DOCUMENTS)], tmp_path / f"in{kind}{how}"
    data = as_jsonl(documents) if kind == ".jsonl" else documents[0].encode()
    path.write_bytes(PACK[how](data[:999]) + PACK[how](data[999:]))
    assert tokenize(path, "--bytes").tolist() == expected(documents).tolist()


def test_parquet(tokenize, refusal, tmp_path):
    path = tmp_path / "in.parquet"
    write = lambda column, name="text", **options: pyarrow.parquet.write_table(
        pyarrow.table({"n": range(len(column)), name: column}), path, **options
    )
    write([*DOCUMENTS, None])
    assert f"{path} cannot be read: row 21 has no string" in refusal(path)
    write(DOCUMENTS, "content")
    message = f'{path} cannot be read: it has no "text", but n, content: name the one to read with'
    assert message in refusal(path)
    found = tokenize(path, "--bytes", "--column", "content")
    assert found.tolist() == expected(DOCUMENTS).tolist()
    shutil.rmtree(tmp_path / "out")
    write([DOCUMENTS[0], "\0" * 20])
    assert f"{path} cannot be read: row 2 has zero bytes" in refusal(path)
    path.write_bytes(path.read_bytes()[:-1])
    assert f"{path} cannot be read: " in refusal(path)
    write(DOCUMENTS * 10, row_group_size=70)
    assert tokenize(path, "--bytes").tolist() == expected(DOCUMENTS * 10).tolist()


def test_order_of_a_folder(tokenize, tmp_path, capsys):
    folder = tmp_path / "in"
    names = [f"{kind}/{number}.txt" for kind in "ab" for number in range(20)] + ["c.md"]
    for name in [*names, ".git/x.txt", "a/.x.txt", "a/x.py", "LICENSE", "a/x.txt.bz2"]:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(f"{name} \n")
    found = tokenize(folder, "--bytes")
    order = sorted(names, key=lambda name: hashlib.sha256(name.encode()).hexdigest())
    assert found.tolist() == expected([f"{name} \n" for name in order]).tolist()
    printed = capsys.readouterr().out
    assert "3 files ignored for the suffix; 1 ." in printed
    assert ": to read them as text, add --also ." in printed and "or name the files, as " in printed
    assert "1 .py" in printed and "1 .bz2" in printed and "1 without a suffix" in printed


def test_any_text_is_read_if_it_is_named(tokenize, tmp_path, monkeypatch):
    """As .txt is, also packed, and in folders with --also."""
    monkeypatch.chdir(tmp_path)
    names = "x.py", "LICENSE", "json", "y.rst.gz"
    for name in names:
        data = f"of {name}".encode()
        pathlib.Path(name).write_bytes(gzip.compress(data) if name.endswith(".gz") else data)
    found = tokenize("x.py", "LICENSE", "json", "y.rst.gz", "--bytes")
    assert found.tolist() == expected([f"of {name}" for name in names]).tolist()
    shutil.rmtree("out")
    pathlib.Path("in").mkdir()
    pathlib.Path("x.py").rename("in/x.PY")
    for suffix in "py", ".py":
        assert len(tokenize("in", "--also", suffix, "--bytes")) == 1 + len("of x.py")
        shutil.rmtree("out")


@pytest.mark.parametrize("argv, said", [
    (["nowhere.txt"], "nowhere.txt does not exist in /"),
    (["empty"], "empty: found no .txt"),
    (["empty"], ".parquet, but 1 .py: to read them as text, add --also .py, or name the files"),
    (["in.zip"], "in.zip cannot be read: it is a zip archive"),
    (["new/in.zip", "--out", "new/a/b"], "new/in.zip cannot be read: it is a zip archive"),
    (["dangling"], "x.txt is a link to no, which does not exist"),
    (["pipe"], "pipe/in.txt is a pipe"),
    (["in.txt", "--out", "in.txt"], "in.txt is a file, but a folder belongs there: choose another"),
    (["in.txt", "--out", "dangling/x.txt"], "x.txt is a link to no, which is not there"),
    (["linked"], "linked/more is a link: give its target as PATH instead"),
    (["in.txt", "--out", "busy"], "busy cannot be used: "),
])  # fmt: skip
def test_unusable_paths(refusal, tmp_path, monkeypatch, argv, said):
    monkeypatch.chdir(tmp_path)
    for name in ("in.txt", "empty/in.py", "empty/.hidden.txt", "linked/a.txt", "dangling/a.txt"):
        pathlib.Path(name).parent.mkdir(exist_ok=True)
        pathlib.Path(name).write_text("text " * 10)
    pathlib.Path("new").mkdir()
    for name in "in.zip", "new/in.zip":
        pathlib.Path(name).write_bytes(b"PK\x03\x04")
    for link, to in ("dangling/x.txt", "no"), ("linked/more", "../empty"):
        pathlib.Path(link).symlink_to(to)
    pathlib.Path("pipe").mkdir()
    os.mkfifo("pipe/in.txt")
    pathlib.Path("busy").mkdir()
    os.mkfifo("busy/.lock")
    assert said in refusal("--bytes", *argv)
    assert not (tmp_path / "out").exists() and not (tmp_path / "new/a").exists()


@pytest.mark.parametrize("line", ["---", ""])
def test_separator_and_empty_documents(tokenize, tmp_path, capsys, line):
    for name, text in {
        "a.txt": "one\n=\nthree\n= \n =\nx=\n=\r\n=\nfour",
        "b.md": "\ufeff=\nfive\n=\n",
        "c.txt": "six\n=",
        "d.jsonl": '{"text": "seven\\n=\\neight"}\n  \n\r\n{"text": " "}\n{"text": ""}\n',
        "e.txt": "",
        "f.txt": "\ufeff",
    }.items():
        (tmp_path / name).write_text(text.replace("=", line), newline="")
    found = tokenize(*sorted(tmp_path.glob("*.*")), "--separator", line, "--bytes")
    texts = "one\n", "three\n= \n =\nx=\n", "four", "five\n", "six\n", "seven\n=\neight", " "
    assert found.tolist() == expected([text.replace("=", line) for text in texts]).tolist()
    printed = capsys.readouterr().out
    assert "7 documents, 5 empty ones skipped" in printed
    assert "1 file with lines that have spaces beside the separator, which do not" in printed


def test_the_mark_divides_lines_and_is_pointed_out(tokenize, tmp_path, capsys):
    path, flag = tmp_path / "in.txt", ["--separator", "<|endoftext|>"]
    path.write_text("one\n<|endoftext|>two<|endoftext|> \nthree\r\n<|endoftext|>\r\nfour")
    found = tokenize(path, "--bytes", *flag)
    assert found.tolist() == expected(["one\n", "two", "three\r\n", "four"]).tolist()
    shutil.rmtree(tmp_path / "out")
    capsys.readouterr()
    tokenize(path, "--bytes")
    assert f"; {shlex.join(flag)} makes it divide documents: {path}\n" in capsys.readouterr().out
    shutil.rmtree(tmp_path / "out")
    (tmp_path / "other.txt").write_text("text")
    tokenize(path, tmp_path / "other.txt", "--bytes", *flag)
    assert "1 file without the separator '<|endoftext|>': " in capsys.readouterr().out


@pytest.mark.parametrize("separator, line, said", [
    ("---", "--- ", "almost does: --separator '--- ' matches that"),
    ("End", "END", "almost does: --separator END matches that"),
    ("==", "==\r\r", "almost does: --separator $'==\\x0d' matches that"),
    ("<br>", "&lt;br&gt;", "almost does: --separator '&lt;br&gt;' matches that"),
    ("", "  ", "almost does: --separator '  ' matches that"),
    ("--", "--\u200b", "almost does: --separator $'--\\xe2\\x80\\x8b' matches that"),
    ("--", "--\U000e0067", "almost does: --separator $'--\\xf3\\xa0\\x81\\xa7' matches that"),
    ("==", "\uff1d\uff1d", "almost does: --separator '\uff1d\uff1d' matches that"),
    ("<|endoftext", "a <|endoftext|> b", "a <|endoftext|> b\\n': --separator '<|endoftext|>'"),
    ("end", "The END", "look at what divides the documents, or leave the flag out"),
    ("##", "## 1", "line 2 of in.txt has it as a part, '## 1\\n': put it on lines of its own"),
    ("##", "a\r##\rb", "tr '\\r' '\\n' < FILE"),
    ("##", "<|endoftext|>", "but <|endoftext|> is there: --separator '<|endoftext|>'"),
    ("<|EndOfText|>", "<|endoftext|>", "--separator '<|endoftext|>' matches that"),
    ("##", "--", "look at what divides the documents, or leave the flag out"),
])  # fmt: skip
def test_a_separator_that_is_nowhere(refusal, tmp_path, monkeypatch, separator, line, said):
    monkeypatch.chdir(tmp_path)
    pathlib.Path("in.txt").write_text(f"one\n{line}\ntwo\n", newline="")
    message = refusal("in.txt", "--bytes", "--separator", separator)
    assert f"no line equals --separator {shlex.quote(separator)}" in message and said in message


@pytest.mark.parametrize("bad", [b"\xff", b"\xe4\xb8x", b"\xed\xa0\x80", b"\xe4\xb8"])
def test_not_utf8(refusal, tmp_path, bad):
    """Also a character that the end of the file cuts off."""
    path = tmp_path / "in.txt.gz"
    path.write_bytes(gzip.compress("na\u00efve \u4e2d ".encode() * 100 + bad))
    assert f"{path} cannot be read: line 1 is not UTF-8 at byte 1100, 0x" in refusal(
        path, "--bytes"
    )


@pytest.mark.parametrize("how", [".gz", ".zst"])
@pytest.mark.parametrize("fault", [
    lambda data: data[:-1], lambda data: data[: len(data) // 2], lambda data: b"text " * 10,
    lambda data: data[:3000] + bytes([data[3000] ^ 255]) + data[3001:],
    lambda data: data + b"garbage " * 10,
])  # fmt: skip
def test_broken_archives(refusal, tmp_path, how, fault):
    text, path = random.Random(0).randbytes(9000).hex().encode() * 20, tmp_path / f"in.txt{how}"
    pack = zstandard.ZstdCompressor(write_checksum=True).compress if how == ".zst" else PACK[how]
    path.write_bytes(fault(pack(text)))
    assert f"{path} cannot be read: " in refusal(path, "--bytes")


@pytest.mark.parametrize("line, said", [
    (b'{"text": "a"} x', "is not JSON"), (b"[" * 200_000, "is not JSON"),
    (json.dumps({"text": "a\0" * 99}).encode(), "of text: correct that row, or leave it out"),
    (b'"text"', 'has no string "text"'), (b'{"text": null}', 'has no string "text"'),
    (b'{"n": 1, "body": "a"}', 'has no "text", but n, body: name the one to read with --column'),
], ids=itertools.count())  # fmt: skip
def test_bad_lines_of_jsonl(refusal, tmp_path, line, said):
    lines = [as_jsonl(DOCUMENTS[:2]), line, as_jsonl(["a"])]
    (tmp_path / "in.jsonl").write_bytes(b"\n".join(lines))
    message = refusal(tmp_path / "in.jsonl")
    assert "in.jsonl cannot be read: line 4 " in message and said in message


TEXT = prose(9000)
HTML = b"<!DOCTYPE html><title>404"
LFS = b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 9\n"
TAR = b"in.txt".ljust(257, b"\0") + b"ustar".ljust(255, b"\0") + TEXT.encode()


@pytest.mark.parametrize("name, data, said", [
    ("a.txt", TEXT.encode("utf-16-le"), "it is UTF-16LE: iconv -f UTF-16LE -t UTF-8"),
    ("a.jsonl", TEXT.encode("utf-16"), "it is UTF-16: iconv -f UTF-16 -t UTF-8"),
    ("a.txt", "\u4e2d\u6587\u5b57\n".encode("utf-16-be") * 99, "it is UTF-16BE: iconv -f UTF-16BE"),
    ("a.txt.gz", gzip.compress(TEXT.encode("utf-32-le")), "it is UTF-32LE: iconv"),
    ("a.txt", TEXT.encode() + bytes(20), "from byte 9000 on, it has zero bytes"),
    ("a.txt", TEXT.encode() * 200 + bytes(512) + TEXT.encode(), "from byte 1800000 on, it has"),
    ("a.txt.zst", zstandard.compress(TEXT.encode() + bytes(512)), "from byte 9000 on, it has"),
    ("a.jsonl", as_jsonl(DOCUMENTS) + bytes(3000), "on, it has zero bytes"),
    ("a.txt", random.Random(0).randbytes(9000), "it has binary data"),
    ("a.txt", bytes(random.Random(0).choices(range(1, 128), k=9000)), "it has binary data"),
    ("a.txt", pathlib.Path(sys.executable).read_bytes()[:9000], "from byte 4 on, it has binary"),
    ("a.txt", TEXT.encode() + TEXT.encode("utf-16-le"), "is UTF-16LE: convert that part alone"),
    ("a.txt.gz", gzip.compress(TEXT.encode("utf-16")), "FILE > NEW, where FILE is unpacked"),
    ("a.txt", b"".join(b"./file%d\0" % i for i in range(2000)), "tr '\\000' '\\n' < FILE"),
    ("a.txt", "\u65e5\u672c\n".encode("iso2022_jp") * 99, "it is ISO-2022-JP: iconv"),
    ("a.txt", "\ud55c\uae00\n".encode("iso2022_kr") * 99, "it is ISO-2022-KR: iconv"),
    ("a.txt", "\u043c\u0438\u0440\n".encode("cp1251") * 99, "CP1251 (Russian)"),
    ("a.txt", "\u4e2d\u6587".encode() * 99 + b"\xc0\x80" + TEXT.encode(), "iconv -c -f UTF-8 -t"),
    ("a.md", b"\xef\xbb\xbf{\\rtf1 " + TEXT.encode(), "it is RTF: save it as text"),
    ("a.txt", b"/annex/objects/SHA256E-s9--0.txt\n", "it is a git-annex pointer: type  git annex"),
    ("a.md", LFS, "it is a Git LFS pointer: type  git lfs pull"),
    ("a.parquet", LFS, "it is a Git LFS pointer"),
    ("a.parquet", HTML, "it is HTML or XML, perhaps a server's error message: get it again"),
    ("a.jsonl.gz", HTML, "it is HTML"), ("a.jsonl.zst", zstandard.compress(HTML), "it is HTML"),
    ("a.txt.gz", gzip.compress(TAR), "it is a tar archive"), ("a.txt", TAR, "it is a tar archive"),
    ("a.txt", gzip.compress(LFS), "it is gzip data: unpack it"),
    ("a.txt.gz", gzip.compress(gzip.compress(LFS)), "it is gzip data: unpack it"),
    ("a.txt.gz", zstandard.compress(LFS), "it is zstd data: unpack it"),
    ("a.txt.gz", TEXT.encode(), "it is no gzip data"), ("a.txt.zst", b"", "it is empty: get it"),
    ("a.json", b'[{"text": "a"}]', "it is a JSON array: jq -c '.[]' FILE > NEW.jsonl"),
    ("a.json", b'{\n "text": "a"\n}', "line 1 is not JSON: there must be one JSON object a line"),
    ("a.txt", b"a\nb\nc \x92 d", "line 3 is not UTF-8 at byte 6, 0x92 (invalid start byte)"),
], ids=itertools.count())  # fmt: skip
def test_bytes_that_are_no_text(refusal, tmp_path, name, data, said):
    """By what they are, wherever in a file they are, also if they would pass for UTF-8."""
    (tmp_path / name).write_bytes(data)
    message = refusal(tmp_path / name)
    assert f"{name} cannot be read: " in message and said in message


def test_odd_texts_are_texts(tokenize, tmp_path):
    """Also a zstd file with a window of 2 GiB, and JSON lines in .json, with marks and ^Z."""
    line = TEXT[:500]
    texts = [
        line + "\0" + line, "\x1b[31mred\x1b[0m " * 99, line.replace(" ", "\x0b"),
        line.replace("\n", "\r\n\f") + "\x1a", line + "\ufeff" + line, "a\x08a" * 999,
        line.replace(" ", "\x01"), "\u00e9t\u00e9 \u4e2d \u0627\u0644 \U0001f600 " * 99,
        "\x1b]0;shell\x07$ ls\n" * 99, HTML.decode() * 99, TEXT[:4096] + "\x02\x03",
    ]  # fmt: skip
    paths = [tmp_path / f"{number}.txt" for number in range(len(texts))]
    for path, text in zip(paths, texts, strict=True):
        path.write_bytes(text.encode())
    frame = b"\x28\xb5\x2f\xfd\x00\xa8" + (8 * len(line) + 1).to_bytes(3, "little") + line.encode()
    rows = as_jsonl([DOCUMENTS[0], "a\0b\0"])
    for name, data in {
        "a.txt.zst": frame,
        "b.json.gz": gzip.compress(rows),
        "c.json": rows + b"\xef\xbb\xbf" + as_jsonl(["last"]) + b"\x1a",
    }.items():
        paths.append(tmp_path / name)
        paths[-1].write_bytes(data)
    texts += [line, DOCUMENTS[0], "a\0b\0", DOCUMENTS[0], "a\0b\0", "last"]
    assert tokenize(*paths, "--bytes").tolist() == expected(texts).tolist()


def test_what_is_left_out_of_a_folder_is_told(tokenize, tmp_path, monkeypatch, capsys):
    """A first line of JSON counts as a whole, also if it comes in many chunks."""
    monkeypatch.setattr(readers, "CHUNK", 128)  # zstd yields b"" for a single byte
    folder = tmp_path / "in"
    folder.mkdir()
    (folder / "a.txt").write_text("text")
    (folder / "b.txt").symlink_to("a.txt")
    (folder / "g.txt").hardlink_to(folder / "a.txt")
    (folder / "c.txt").touch()
    (folder / "d.json").write_text('{\n "version": 1\n}')
    (folder / "e.json").write_text('{"features": {"text": {"dtype": "string"}}}')
    (folder / "h.json.zst").write_bytes(zstandard.compress(b"\n" + as_jsonl([TEXT])))
    found = tokenize(folder, "--bytes").tolist()
    assert sorted(found) == sorted(expected(["text", TEXT]).tolist())
    printed = capsys.readouterr().out
    assert "2 files read only once, as another name of the same file, as " in printed
    assert '2 files ignored for lack of JSON lines with "text", as ' in printed
    assert f"1 file without any text: {folder / 'c.txt'}" in printed


def test_a_line_in_many_parts_takes_linear_time():
    """A quadratic way copies a hundred gigabytes."""
    started = time.monotonic()
    (line,) = readers.lines(["x" * 8000] * 5000)
    assert len(line) == 40_000_000 and time.monotonic() - started < 15


@pytest.mark.parametrize("name, package", [("a.txt.zst", "zstandard"), ("a.parquet", "pyarrow")])
def test_missing_packages(refusal, tmp_path, monkeypatch, name, package):
    for module in ("zstandard", "pyarrow", "pyarrow.parquet"):
        monkeypatch.setitem(sys.modules, module, None)
    (tmp_path / name).write_bytes(b"never read")
    (tmp_path / "before.txt").write_bytes(b"\xff")
    message = f"{name} needs the package {package}: {readers.install_command(package)}"
    assert message in refusal(tmp_path / "before.txt", tmp_path / name)


def test_no_vocabulary_and_no_network(tmp_path):
    """It is looked for before anything is read."""
    (tmp_path / "in.txt").write_bytes(b"\xff")
    env = os.environ | dict(TIKTOKEN_CACHE_DIR=str(tmp_path), no_proxy="", NO_PROXY="")
    env |= dict(https_proxy="http://127.0.0.1:9")
    argv = [*COMMAND, tmp_path / "in.txt", "--out", tmp_path / "out"]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=300, env=env)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (1, "", 1)
    assert "GPT-2's vocabulary" in done.stderr and "--bytes" in done.stderr


# ---- Shards --------------------------------------------------------------------------------------
def test_manifest_and_report(script, tmp_path, capsys):
    (tmp_path / "a.jsonl").write_bytes(as_jsonl(DOCUMENTS))
    (tmp_path / "b.txt.gz").write_bytes(gzip.compress(prose(12_000).encode()))
    paths, out = [tmp_path / "a.jsonl", tmp_path / "b.txt.gz"], tmp_path / "out"
    script(*paths, "--shard_tokens", "1100")
    printed, manifest = capsys.readouterr().out, shards.read_manifest(out)
    size, of = sum(path.stat().st_size for path in paths), "of 2 files, 21 documents"
    source = f"GPT-2 BPE by tiktoken {tiktoken.__version__} {of}, {size} bytes"
    assert [manifest[key] for key in ("source", "vocab", "eot")] == [source, 50257, EOT]
    assert sorted([*manifest["files"], "MANIFEST.json"]) == left_in(out)
    for name, row in manifest["files"].items():
        shard = shards.inspect(out / name, EOT)
        assert row == {key: shard[key] for key in ("size", "sha256", "documents")}
        counts = f"tokens:{shard['tokens']} documents:{shard['documents']}"
        assert f"{name} {counts} sha256:{shard['sha256'][:16]}" in printed
    assert f"21 documents, in {out}\n" in printed and len(manifest["files"]) > 3


@pytest.mark.parametrize("argv, size, sizes", [
    ([], 39, [4, 37]),                                                 # a tenth
    ([], 2999, [210, 2791]),                                           # but no more than the cap
    ([], 3, [2, 3]),                                                   # and no less than SMALLEST
    (["--val_tokens", 2998], 2999, [2998, 3]),
    (["--shard_tokens", 1000, "--val_tokens", 1002], 2999, [1002, 1000, 1000]),
    (["--shard_tokens", 1000, "--val_tokens", 1001], 2999, [1001, 1000, 1000, 2]),
])  # fmt: skip
def test_sizes(tokenize, tmp_path, monkeypatch, argv, size, sizes):
    """One document: every training shard begins inside it, with an EOT that counts."""
    monkeypatch.setattr(tokenize_text, "VAL_TOKENS", 210)
    (tmp_path / "in.txt").write_text(prose(size))
    found = tokenize(tmp_path / "in.txt", "--bytes", *argv)
    assert found.tolist() == expected([prose(size)]).tolist()
    assert list(map(len, read_shards(tmp_path / "out"))) == sizes


@pytest.mark.parametrize("argv, size, val", [
    ([], 0, 1025), ([], 2047, 1025), (["--val_tokens", 1500], 1400, 1500),
    (["--val_tokens", 1500], 2522, 1500),
])  # fmt: skip
def test_too_little_text(refusal, tmp_path, monkeypatch, argv, size, val):
    monkeypatch.setattr(tokenize_text, "SMALLEST", 1025)
    (tmp_path / "in.txt").write_text("x" * size)
    message = refusal(tmp_path / "in.txt", "--bytes", *argv)
    assert f" tokens are too few for {val} of validation and 1025 of training: give" in message


@pytest.mark.parametrize("size, argv, times", [
    (20_000, [], 4), (60_000, [], 2),  # 187 steps of tiny read 71,809 tokens
    (5_000, [], 4), (1_000_000, [], 1),
    (5_000, ["--passes", "12"], 12), (1_000_000, ["--passes", "2"], 2),
    (30_000, ["--shard_tokens", "60000"], 2),  # what one shard holds
])  # fmt: skip
def test_a_short_text_is_there_several_times(script, tmp_path, capsys, size, argv, times):
    """Each time after an EOT, because the validation set ends inside the document."""
    (tmp_path / "in.txt").write_text(prose(size))
    script(tmp_path / "in.txt", "--bytes", *argv)
    val, train = read_shards(tmp_path / "out")
    rest = prose(size)[len(val) - 1 :]
    assert train.tolist() == expected([rest] * times).tolist()
    printed = capsys.readouterr().out
    assert printed.startswith("1 document, in ")
    assert (f"holds its text {times} times; " in printed) == (times > 1)
    assert ("has begun to memorize the text: pass a smaller --steps" in printed) == (times > 1)
    steps = (len(train) - 1) // 384
    assert (f"one with --steps {steps} all of them" in printed) == (187 < 0.9 * steps)
    source = shards.read_manifest(tmp_path / "out")["source"]
    assert source.endswith(f"the training text is there {times} times") == (times > 1)


def test_equal_shards_are_refused(refusal, tmp_path):
    """data/check.py takes them for copies, and so the run would not start."""
    (tmp_path / "in.txt").write_text("a" * 999)
    message = refusal(tmp_path / "in.txt", "--bytes", "--shard_tokens", "100", "--val_tokens", "50")
    assert "text_train_000001.bin and text_train_000002.bin would be equal" in message


def test_passes_must_fit_into_one_shard(refusal, tmp_path, monkeypatch):
    monkeypatch.undo()  # of what lets the fixture write every text once
    monkeypatch.chdir(tmp_path)
    (tmp_path / "in.txt").write_text(prose(60_000))
    assert "--passes 3 over at least" in refusal("in.txt", "--bytes", "--passes", 3,
                                                 "--shard_tokens", 110_000)  # fmt: skip


# ---- The command that trains ---------------------------------------------------------------------
def test_the_presets_are_those_of_train_gpt():
    for name, preset in tokenize_text.PRESETS.items():
        c = train_gpt.PRESETS[name]
        assert (c.total_steps, {stage.tokens for stage in c.stages}) == (
            preset.steps, {preset.step_tokens})  # fmt: skip
        for field in ("val_every", "val_tokens", "val_T", "head_chunk"):
            assert getattr(c, field) == getattr(preset, field), (name, field)
    assert tokenize_text.VAL_SEQUENCES == train_gpt.VAL_SEQUENCES
    assert train_gpt.PRESETS["tiny"].eot == 256


def stream(tokens, eot, document):
    """So many tokens in documents of `document` tokens; 0: in one. No two shards are equal."""
    array = np.random.default_rng(0).integers(0, 200, tokens, "<u2")
    array[:: document or tokens] = eot
    return array


SIZES = [2049, 2050, 3072, 9000, 10_300, 20_480, 20_490, 61_450, 71_809 + 1025, 93_000, 180_000,
         655_371, 1_000_000]  # fmt: skip


@pytest.mark.parametrize("argv, document, sizes", [
    (["--bytes"], 0, SIZES), (["--bytes"], 2, SIZES), ([], 0, SIZES), ([], 7, SIZES),
    (["--passes", "1"], 0, SIZES), (["--passes", "30"], 50, SIZES),
    (["--shard_tokens", "5000"], 0, SIZES[2:]), (["--val_tokens", "1030"], 0, SIZES[2:]),
    ([], 1000, [10_922_000, 10_925_000, 12_000_000]), (["--val_tokens", "66000"], 0, [9_900_000]),
    ([], 2, [11_000_000]),  # 4,096 documents are too many for a sequence
    (["--bytes"], 0, [12_000_000]),
])  # fmt: skip
def test_every_printed_command_can_run(tmp_path, monkeypatch, capsys, argv, document, sizes):
    """train_gpt.py takes its flags and its tokens, and there are none for one step more."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["tokenize_text.py", "in.txt", "--out", "out", *argv])
    args = tokenize_text.parse()
    for size in sizes:
        args.out = pathlib.Path(f"-out {size}")
        args.out.mkdir()
        tokens = stream(size, args.about["eot"], document)
        tokenize_text.report(*tokenize_text.write(args.out, iter([tokens]), args), args)
        command = shlex.split(capsys.readouterr().out.splitlines()[-1])
        name, own = command[1], tokenize_text.PRESETS[command[1]]
        assert command[0] == "./run.sh"
        is_long = not args.bytes and size > 10_923_000 or size == 9_900_000
        assert (name == "small") == (is_long and document != 2)
        _, c = train_gpt.parse_config(command[1:])
        assert (c.vocab, c.eot, c.target) == (*args.about.values(), 0)
        guard.check_run(train_gpt, c)
        found = train_gpt.find_data(c)
        for split in found:
            for shard in found[split]:
                train_gpt.shard_facts(shard, c)
        guard.check_documents(found, train_gpt, c)
        assert all(length % 128 == 0 for length in (c.val_T, c.sequence_length(0)))  # for cuDNN
        assert c.total_steps <= own.steps
        validations = sum(map(c.validates_before, range(c.total_steps + 1)))
        assert validations >= min(4, c.total_steps + 1)
        too_many = {}
        if c.total_steps < own.steps:
            too_many["steps"] = c.total_steps + 1
        if c.val_tokens < own.val_tokens:
            too_many["val_tokens"] = c.val_tokens + 8 * c.val_T
        for field, value in too_many.items():
            with pytest.raises(SystemExit, match="2"):
                train_gpt.find_data(dataclasses.replace(c, **{field: value}))
        shutil.rmtree(args.out)


def test_command_lines(monkeypatch, capsys):
    """The default is the whole of the record's validation and two more: one for the last target,
    one since a step is taken only while more are left."""
    argv = ["tokenize_text.py", "in.txt", "--out", "out"]
    monkeypatch.setattr(sys, "argv", argv)
    args = tokenize_text.parse()
    assert (args.shard_tokens, args.val_tokens, args.bytes) == (10**8, None, False)
    assert tokenize_text.VAL_TOKENS == train_gpt.PRESETS["record"].val_tokens + 2
    for value in "--", "---", "--bytes", "", "|", " a":
        for words in ["--separator", value], [f"--separator={value}"]:
            monkeypatch.setattr(sys, "argv", [*argv, *words, "more.txt"])
            args = tokenize_text.parse()
            assert (args.separator, list(map(str, args.paths))) == (value, ["in.txt", "more.txt"])
    monkeypatch.setattr(sys, "argv", [*argv[:1], "--out=~/out", "--", "-in.txt"])
    args = tokenize_text.parse()
    assert (args.out, args.paths) == (pathlib.Path.home() / "out", [pathlib.Path("-in.txt")])
    bad = "--val_tokens 1024", "--shard_tokens 2147483648", "--workers 0", "--passes 0", "--also ."
    for more in *bad, "--separator a\nb":
        monkeypatch.setattr(sys, "argv", argv + more.split(" "))
        with pytest.raises(SystemExit, match="2"):
            tokenize_text.parse()
        assert re.fullmatch("run.sh tokenize: --.+\n", capsys.readouterr().err)


def test_the_numbers_of_the_page():
    page = (HERE.parent / "data/README.md").read_text(encoding="utf-8")
    text = " ".join(page.split())
    tokens = {}
    for name, c in train_gpt.PRESETS.items():
        tokens[name] = sum(B * T for B, T, _ in train_gpt.batch_shapes("train", c))
    for part in (
        f"The record trains on {tokens['record'] / 1e6:.1f} million",
        f"`medium` trains on {tokens['medium'] / 1e6:,.0f} million tokens",
        f"`tiny`'s 187 steps read {tokens['tiny']:,} tokens",
        f"reads the first {train_gpt.PRESETS['record'].val_tokens:,} tokens",
        f"at least {tokenize_text.SMALLEST:,} and at most {tokenize_text.VAL_TOKENS:,}",
        f"tokens for {tokenize_text.SMALL_STEPS} steps of it",
        f"more than {tokenize_text.MOST_DOCUMENTS:,} documents",
        f"holds it up to {tokenize_text.MOST_PASSES} times",
    ):
        assert part in text, part
    for training in cached_fineweb10B.RECORD_SHARDS, 24:  # of 200 MB each, and one of validation
        size = f"{training} of training and one of validation, {(training + 1) / 5:.1f} GB"
        assert size in text, size


# ---- All or nothing ------------------------------------------------------------------------------
@pytest.mark.parametrize("name", ["x_val_000000.bin", "MANIFEST.json"])
def test_a_used_folder_is_refused(tokenize, tmp_path, monkeypatch, name):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / name).write_bytes(b"kept")
    monkeypatch.setattr(readers, "find", lambda *_: pytest.fail("looked for input first"))
    with pytest.raises(SystemExit, match=f"out has {name} already: remove the folder, or"):
        tokenize(tmp_path / "nowhere.txt")
    assert left_in(tmp_path / "out") == [name] and (tmp_path / "out" / name).read_bytes() == b"kept"


def test_two_at_once_make_one_set(tmp_path):
    (tmp_path / "in.txt").write_text(prose(400_000))
    argv = [*COMMAND, tmp_path / "in.txt", "--out", tmp_path / "out", *STEPS]
    both = [subprocess.Popen(argv, stderr=subprocess.PIPE, text=True) for _ in range(2)]
    said = [process.communicate(timeout=300)[1] for process in both]
    assert sorted(process.returncode for process in both) == [0, 1]
    assert "".join(said).count(" already: remove") == 1 == "".join(said).count("\n")
    compare(read_shards(tmp_path / "out"), expected([prose(400_000)]))


def test_validation_comes_last_and_a_failure_takes_all_back(tokenize, tmp_path, monkeypatch):
    (tmp_path / "in.txt").write_text(DOCUMENTS[0])
    moved, out, replace = [], tmp_path / "out", os.replace

    def move(source, target):
        if pathlib.Path(target).parent == out:
            moved.append(pathlib.Path(target).name)
            if len(moved) == 4:
                raise KeyboardInterrupt
        replace(source, target)

    monkeypatch.setattr(os, "replace", move)
    with pytest.raises(KeyboardInterrupt):
        tokenize(tmp_path / "in.txt", "--bytes", "--shard_tokens", "50")
    assert moved[2:] == ["MANIFEST.json", "text_val_000000.bin"] and left_in(out) == []


@pytest.mark.parametrize("place, error, said", [
    ((readers, "documents"), MemoryError, "in.txt cannot be read: it needs more memory than"),
    ((tokenize_text, "encode"), MemoryError, "there is too little memory: pass a"),
    ((tokenize_text.ThreadPoolExecutor, "submit"), RuntimeError("no thread"), "no thread: pass a"),
])  # fmt: skip
def test_memory_and_threads_run_out(refusal, tmp_path, monkeypatch, place, error, said):
    def fall_short(*_):
        raise error

    monkeypatch.setattr(*place, fall_short)
    (tmp_path / "in.txt").write_text("text")
    assert said in refusal(tmp_path / "in.txt", "--bytes")


def test_the_shards_are_complete_if_the_screen_is_full(tokenize, tmp_path, monkeypatch):
    def fall_short(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(tokenize_text, "report", fall_short)
    (tmp_path / "in.txt").write_text("text")
    with pytest.raises(SystemExit, match="out has all its shards, but"):
        tokenize(tmp_path / "in.txt", "--bytes")
    assert len(read_shards(tmp_path / "out")) == 2


def test_disk_full(tmp_path):
    """A limit on the size of a file fails as a full disk does: at the second shard."""
    (tmp_path / "in.txt").write_text("text " * 100_000)
    argv = [*COMMAND, tmp_path / "in.txt", "--out", tmp_path / "out", *STEPS]
    full = ["bash", "-c", 'ulimit -f 100; exec "$@"', "-", *argv]
    done = subprocess.run(full, capture_output=True, text=True, timeout=300)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (1, "", 1)
    assert done.stderr.startswith(f"tokenize_text.py: {tmp_path / 'out'}")
    assert "text_train_000001.bin: File too large: make room, or choose" in done.stderr
    assert left_in(tmp_path / "out") == []


def test_odd_environments(tmp_path):
    """No path of the script, no docstrings, a screen without accents, and a pipe without a reader,
    which costs lines and not shards."""
    (tmp_path / "in.txt").write_text(prose(9000))
    env = os.environ | dict(PYTHONSAFEPATH="1", PYTHONOPTIMIZE="2", PYTHONIOENCODING="ascii")
    argv = [*COMMAND, tmp_path / "in.txt", "--bytes", "--out", tmp_path / "\u00e9"]
    printed = subprocess.run(argv, capture_output=True, text=True, timeout=300, env=env)
    assert printed.returncode == 0 and printed.stdout.splitlines()[-1].startswith("./run.sh tiny")
    assert "\\xe9" in printed.stdout and printed.stderr == ""
    argv = ["bash", "-c", '"$@" | true; exit ${PIPESTATUS[0]}', "-", *argv[:-1], tmp_path / "out"]
    piped = subprocess.run(argv, capture_output=True, text=True, timeout=300)
    assert (piped.returncode, piped.stderr) == (0, "") and len(read_shards(tmp_path / "out")) == 2


@pytest.mark.parametrize("kill, by_bytes", [(signal.SIGINT, False), (signal.SIGKILL, True)])
def test_it_is_stopped(tmp_path, tokenize, kill, by_bytes):
    (tmp_path / "in.txt").write_text(random.Random(0).randbytes(10**7).hex(" ", 4))
    # A shell makes its background jobs ignore Ctrl-C, and these tests may run in one.
    before, out = signal.signal(signal.SIGINT, signal.default_int_handler), tmp_path / "out"
    argv = [*COMMAND, tmp_path / "in.txt", "--out", out, *STEPS[not by_bytes :]]
    process = subprocess.Popen(argv, stdout=-1, stderr=-1, text=True)
    signal.signal(signal.SIGINT, before)
    while not list(out.glob(".part-*/text_train_000003.bin")):
        assert process.poll() is None
        time.sleep(0.01)
    process.send_signal(kill)
    said = process.communicate(timeout=300)
    if kill == signal.SIGINT:
        line = "tokenize_text.py: stopped by Ctrl-C: run it again for shards\n"
        assert (process.returncode, *said) == (130, "", line) and left_in(out) == []
    (tmp_path / "in.txt").write_text(DOCUMENTS[0])  # what was left is no hindrance
    assert len(tokenize(tmp_path / "in.txt", "--bytes")) == len(DOCUMENTS[0]) + 1
    assert left_in(out) == ["MANIFEST.json", "text_train_000001.bin", "text_val_000000.bin"]
