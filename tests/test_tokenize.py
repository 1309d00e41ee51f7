"""data/tokenize_text.py: the tokens are the right ones, and nothing half is ever there."""

import bz2
import dataclasses
import gzip
import hashlib
import io
import json
import lzma
import os
import random
import re
import shlex
import shutil
import subprocess
import sys
import tarfile
import zipfile
import zlib
from pathlib import Path

import numpy as np
import pyarrow.parquet
import pytest
import readers
import shards
import tiktoken
import tokenize_text
import zstandard

import train_gpt

HERE = Path(__file__).resolve().parent
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
    """Runs the script in this process, in a folder of its own, with --out out."""
    monkeypatch.chdir(tmp_path)

    def run(*argv):
        monkeypatch.setattr(sys, "argv", ["tokenize_text.py", "--out", "out", *map(str, argv)])
        tokenize_text.main()

    return run


@pytest.fixture
def tokenize(script, monkeypatch):
    """Runs the script without writing shards, and returns the tokens of all documents."""
    found = []

    def record(folder, stream, args):
        found.append(np.fromfile(stream, "<u2").tolist())
        return {"text_val_000000.bin": {"size": 1024}}

    monkeypatch.setattr(tokenize_text, "write_shards", record)
    monkeypatch.setattr(tokenize_text, "training_flags", lambda *_: {})

    def run(*argv):
        script(*argv)
        shutil.rmtree("out")
        return found[-1]

    return run


@pytest.fixture
def refusal(script, capsys):
    """The one line with which the script refuses its input; nothing has been written then."""

    def run(*argv):
        with pytest.raises(SystemExit, match="2"):
            script(*argv)
        assert not [name for name in os.listdir() if name.startswith((".part", "out"))]
        error = capsys.readouterr().err
        assert error.startswith("tokenize_text.py: ") and error.count("\n") == 1
        return error

    return run


def expected(documents, gpt2=None):
    """The straightforward way: every document as a whole, EOT in front."""
    encode = gpt2.encode_ordinary if gpt2 else lambda text: list(text.encode())
    return [token for text in documents for token in [EOT if gpt2 else 256, *encode(text)]]


def prose(size):
    """So many characters."""
    return "".join(random.Random(0).choices("etaoinshr  \n", k=size))


def as_jsonl(documents):
    return "".join(json.dumps({"n": 1, "text": text}) + "\n" for text in documents)


def as_parquet(documents):
    sink = pyarrow.BufferOutputStream()
    pyarrow.parquet.write_table(pyarrow.table({"n": documents, "text": documents}), sink)
    return sink.getvalue().to_pybytes()


TEXT = prose(9000)
PACK = {"": bytes, ".gz": gzip.compress, ".zst": zstandard.compress}
PACK |= {".bz2": bz2.compress, ".xz": lzma.compress}


def test_the_prefixes_that_lie_in_the_repository_are_those_of_gpt2(gpt2):
    """The longest other token that each token's bytes begin with; -1 for none, and for the last,
    end-of-text, which is not among the ranks. Upstream builds this table on the clock."""
    ranks = gpt2._mergeable_ranks
    made = np.full(50257, -1, "<i4")
    for token, number in ranks.items():
        for end in range(1, len(token)):
            if token[:end] in ranks:
                made[number] = ranks[token[:end]]  # a longer prefix replaces a shorter one
    assert made.tobytes() == (HERE.parent / "data" / "gpt2_prefixes.bin").read_bytes()
    text = gpt2.decode_single_token_bytes
    assert text(11248).startswith(text(made[11248])) and made[11248] != 11248
    assert made[50256] == made[0] == -1


# ---- Tokens --------------------------------------------------------------------------------------
@pytest.mark.parametrize("by_bytes", [False, True])
def test_what_becomes_of_odd_characters(tokenize, gpt2, monkeypatch, by_bytes):
    """A byte order mark goes, newlines stay, half a surrogate pair becomes U+FFFD."""
    monkeypatch.setattr(readers, "CHUNK", 2)  # not even the mark comes in one piece
    text = "one\r\ntwo\rthree\n\ufefffour\u2028five\x0b\x1c\x85\x00\u4e2d<|endoftext|>"
    text += "\x1b[31mred\x1b[0m a\x08a \x01\u00e9t\u00e9 \u0627\u0644 \U0001f600" + TEXT
    halves = r'{"text": "a \ud83d b \uDE00 \ud83d\ude00 \ude00\ud83d"}' "\n" r'{"text": "\ud83d"}'
    Path("a.txt").write_bytes(b"\xef\xbb\xbf" + text.encode())
    Path("b.jsonl").write_bytes(b"\xef\xbb\xbf" + as_jsonl(["\ufeffx"]).encode() + halves.encode())
    found = tokenize("a.txt", "b.jsonl", *["--bytes"] * by_bytes)
    texts = [text, "\ufeffx", "a \ufffd b \ufffd \U0001f600 \ufffd\ufffd", "\ufffd"]
    assert found == expected(texts, None if by_bytes else gpt2)


def test_cuts_do_not_change_tokens(gpt2, monkeypatch):
    hard = " |  |\n|\r\n|\t|\u00a0|\u3000|\x85|a|B|e\u0301|'s|'|\u4e2d|\u3002|1|\u00b2|!| the"
    draw, many = random.Random(1), 0
    for _ in range(1000):
        text = "".join(draw.choices(hard.split("|"), k=60))
        monkeypatch.setattr(tokenize_text, "PIECE", draw.choice([0, 2, 5, 9, 20]))
        place = draw.randrange(len(text))
        begins, parts = zip(*tokenize_text.pieces([text[:place], text[place:], None]), strict=True)
        assert "".join(parts) == text and begins == (True, *[False] * (len(parts) - 1))
        many += len(parts)
        tokens = [token for part in parts for token in gpt2.encode_ordinary(part)]
        assert tokens == gpt2.encode_ordinary(text), parts
    assert many > 3000


# ---- Files ---------------------------------------------------------------------------------------
@pytest.mark.parametrize("how", PACK)
def test_formats(tokenize, monkeypatch, how):
    """Archives have two members, as of `cat a.gz b.gz`, and lines many chunks. What
    is cut off, or has other bytes behind it, is not taken for the whole."""
    monkeypatch.setattr(readers, "CHUNK", 128)
    for kind, text in ("txt", TEXT), ("PY", TEXT), ("jsonl", as_jsonl([TEXT])):
        path = Path(f"in.{kind}{how}")
        half = PACK[how](text.encode()[:999])
        whole = half + PACK[how](text.encode()[999:])
        path.write_bytes(whole)
        assert tokenize(path, "--bytes") == expected([TEXT])
        for damaged in [whole[:-1], half + b"other bytes"] * bool(how):
            path.write_bytes(damaged)
            with pytest.raises(
                (EOFError, OSError, lzma.LZMAError, zlib.error, zstandard.ZstdError)
            ):
                tokenize(path, "--bytes")


ROWS = as_jsonl([TEXT]) + '{"text": "raw \t and \x01"}\n'


@pytest.mark.parametrize("name, data", [
    ("pages.ndjson", ROWS), ("wiki_00", ROWS), ("a.txt", "\ufeff\n" + ROWS), ("b.csv", ROWS),
    ("half.txt", "t\"}\n" + ROWS * 100), ("RC.zst", zstandard.compress(ROWS.encode())),
    ("rows.txt", as_parquet([TEXT, "raw \t and \x01"])), ("a.jsonl", bz2.compress(ROWS.encode())),
])  # fmt: skip
def test_what_a_file_is_its_bytes_say_and_not_its_name(tokenize, name, data):
    """JSON lines in a file of any name would be learned with braces and names of fields."""
    Path(name).write_bytes(data if isinstance(data, bytes) else data.encode())
    found = tokenize(name, "--bytes", "--column", "text")
    assert found == expected([TEXT, "raw \t and \x01"] * (100 if name == "half.txt" else 1))


def arrow(new):
    table = pyarrow.table({"text": [TEXT]})
    sink = pyarrow.BufferOutputStream()
    with new(sink, table.schema) as writer:
        writer.write_table(table)
    return sink.getvalue().to_pybytes()


def archive(module, open_, *mode):
    """An archive with a text."""
    file = io.BytesIO()
    Path("x").write_text(TEXT)
    with open_(file, *mode) if module is zipfile else open_(fileobj=file, mode="w") as made:
        (made.write if module is zipfile else made.add)("x")
    return file.getvalue()


CSV = '\ufeffid,"text"\r\n1,"one, ""two""\nthree"\r\n2,four\r\n'


@pytest.mark.parametrize("name, data, command", [
    ("a.csv", "id,story\n1,a\n", "csv.DictReader"), ("a", CSV, "csv.DictReader"),
    ("a.txt", "'text'\tn\na\t1\n", "csv.DictReader"), ("a.txt", "text\n'a'\n", "csv.DictReader"),
    ("a", '["a"]', "jq -c '.[] | objects // {text: .}'"), ("a.md", '{\n "a": 1}', "jq -c . FILE"),
    ("a.zip", lambda: archive(zipfile, zipfile.ZipFile, "w"), "unzip FILE"),
    ("a.md", lambda: archive(tarfile, tarfile.open), "tar -xf FILE"),
    ("a.tgz", lambda: gzip.compress(archive(tarfile, tarfile.open)), "tar -xf FILE"),
    ("a", lambda: arrow(pyarrow.ipc.new_file), 'feather.read_table("FILE"), "NEW.parquet")'),
    ("a", lambda: arrow(pyarrow.ipc.new_stream), 'ipc.open_stream("FILE").read_all(), "NEW.par'),
    ("a", "WARC/1.0\r\n", "is a web archive"), ("a", r'"a\n\"b"' "\n" * 3, "jq -c '{text: .}'"),
    ("a.xml", "<mediawiki xmlns=", "wikiextractor --json"), ("a", "%PDF-1.7\n", "pdftotext FILE"),
    ("a", '\x1e{"text": "a"}\n', "1 of 1 rows have no text"),
    ("a.txt.gz", "\n<!DOCTYPE html>\n<p>404</p>", "is a web page"), ("a", r"{\rtf1 a}", "unrtf"),
])  # fmt: skip
def test_containers_are_refused_with_the_command_that_unpacks_them(
    refusal, tokenize, name, data, command
):
    """The commands that need Python alone are run."""
    data = data if isinstance(data, str) else data()
    Path(name).write_bytes(data.encode() if isinstance(data, str) else data)
    message = refusal(name, "--bytes")
    assert command in message
    if data == CSV or "NEW.parquet" in command:
        line = message.partition(":  ")[2].partition(" (Dict")[0].replace("FILE", name)
        python = shlex.quote(sys.executable)
        subprocess.run(line.replace("python", python, 1), shell=True, check=True)
        (new,) = Path().glob("NEW.*")
        texts = ['one, "two"\nthree', "four"] if data == CSV else [TEXT]
        assert tokenize(new, "--bytes") == expected(texts)


@pytest.mark.parametrize("bad", ['{"text": null}', '{"cut', '{"text": "\udcff"}', "[" * 2000])
def test_a_bad_row_is_skipped_and_told_but_not_more_than_one_in_a_hundred(
    tokenize, refusal, capsys, bad
):
    """Wherever they are: a run of hours would end, or a file of other rows would vanish."""
    rows = as_jsonl(["a"] * 99)
    Path("a.jsonl").write_text(rows + bad + "\n", errors="surrogateescape")
    Path("b.jsonl").write_text(rows)
    assert tokenize("a.jsonl", "b.jsonl", "--bytes") == expected(["a"] * 198)
    assert "1 of 199 rows have no text; the first: a.jsonl: line 100 " in capsys.readouterr().out
    Path("b.jsonl").write_text(f"{bad}\n{rows}{bad}\n", errors="surrogateescape")
    assert "3 of 201 rows have no text; the first: a.jsonl: line 100 " in refusal(
        "a.jsonl", "b.jsonl", "--bytes"
    )


def test_a_column_within_a_column(tokenize, refusal):
    rows = [{"data": {"text": "a", "n": 1}, "a.b": "b"}]
    Path("a.jsonl").write_text(json.dumps(rows[0]))
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), "a.parquet")
    Path("a.txt").write_text(TEXT)
    for name in "a.jsonl", "a.parquet":
        assert tokenize(name, "--bytes", "--column", "data.text") == expected("a")
        assert tokenize(name, "--bytes", "--column", "a.b") == expected("b")
        assert "data" in refusal(name, "--bytes", "--column", "data")
    assert "no file has rows" in refusal("a.txt", "--bytes", "--column", "data")


def test_what_is_not_on_this_machine(refusal):
    assert "hf download OWNER/NAME --repo-type" in refusal("https://example.org/a", "--bytes")


def test_memory_does_not_grow_with_a_file(tmp_path):
    """One row group, as pandas writes it."""
    peaks = []
    for rows in 500, 12_000:
        texts = [os.urandom(4000).hex() for _ in range(rows)]
        (tmp_path / "in.parquet").write_bytes(as_parquet(texts))
        code = "import tokenize_text as tool\ntool.main()\nprint(open('/proc/self/status').read())"
        env = os.environ | dict(PYTHONPATH=str(HERE.parent / "data"))
        command = [sys.executable, "-c", code, "in.parquet", "--bytes", "--out", f"{rows}"]
        done = subprocess.run(command, env=env, cwd=tmp_path, capture_output=True, check=True)
        peaks.append(int(re.search(rb"VmHWM:\s*(\d+) kB", done.stdout)[1]))
    assert peaks[1] - peaks[0] < 60_000, peaks  # kB, of which the second text has 96,000


def test_a_folder(tokenize, refusal, capsys):
    """Its files are in the order of a hash, each once, without hidden ones. What is not read is
    told."""
    names = [*(f"{kind}/{i}.txt" for kind in "ab" for i in range(9)), "c.md", "d.parquet"]
    for name in [*names, ".git/x.txt", "a/.x.txt", "a/x.py", "LICENSE", "a/x.txt.lz4"]:
        Path("in", name).parent.mkdir(parents=True, exist_ok=True)
        Path("in", name).write_text(f"{name} \n")
    Path("in/d.parquet").write_bytes(as_parquet(["d.parquet \n"]))
    Path("in/b/link.txt").symlink_to("0.txt")  # as in a hub's cache
    order = sorted(names, key=lambda name: hashlib.sha256(name.encode()).hexdigest())
    found = tokenize("in", "in/c.md", "--bytes")
    assert found == expected(f"{name} \n" for name in order)
    assert "in: 3 files of other kinds are not read; --also .py adds" in capsys.readouterr().out
    assert len(tokenize("in", "--bytes", "--also", "py")) == len(found) + len("a/x.py \n") + 1
    Path("in/linked").symlink_to("/tmp")
    capsys.readouterr()
    assert "in/linked is a link to a folder: give its target" in refusal("in", "--bytes")


@pytest.mark.parametrize("line", ["---", ""])
def test_separators(tokenize, refusal, line):
    """Spaces around it do not count. One that is nowhere would make one document of a file."""
    text = "\ufeff=\none\n=\n = \ntwo=\n=\r\n=\nthree".replace("=", line)
    Path("a.txt").write_text(text, newline="")
    Path("b.jsonl").write_text(as_jsonl([f"four\n{line}\nfive"]) + "  \n\r\n" + as_jsonl([""]))
    Path("c.txt").touch()
    found = tokenize("a.txt", "b.jsonl", "c.txt", f"--separator={line}", "--bytes")
    assert found == expected(["one\n", f"two{line}\n", "three", f"four\n{line}\nfive"])
    assert "no line equals --separator '##'" in refusal("a.txt", "--bytes", "--separator", "##")


def test_a_separator_within_lines(tokenize, capsys):
    Path("in.txt").write_text("one\n<|endoftext|>two<|endoftext|> \nthree\r\n<|endoftext|>\r\nfour")
    found = tokenize("in.txt", "--bytes", "--separator", "<|endoftext|>")
    assert found == expected(["one\n", "two", "three\r\n", "four"])
    tokenize("in.txt", "--bytes")
    assert "--separator '<|endoftext|>' makes it end documents" in capsys.readouterr().out


LFS = b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 9\n"


@pytest.mark.parametrize("name, data, said", [
    ("a.txt", TEXT.encode("utf-16-le"), "byte 1 and others are NUL: UTF-16"),  # row 3
    ("a.txt", TEXT.encode() + bytes(20), "byte 9000 and others are NUL"),
    ("a.txt.zst", zstandard.compress(b"a\n" * 99_999 + bytes(20)), "byte 199998 and"),  # row 4
    ("a.jsonl", as_jsonl(["a\0" * 99]).encode(), "line 1 has NUL characters in place of text"),
    ("a.parquet", as_parquet(["a", "\0" * 20]), "row 2 has NUL characters in place of text"),
    ("a.md", LFS, "is a pointer:  git lfs pull"),  # row 5
    ("a.txt", b"a\nb\nc \x92 d", "byte 6 is no UTF-8"),
    ("a.jsonl", b'{"n": 1, "body": "a"}', 'line 1 has no string "text", but n, body; --column a.b'),
])  # fmt: skip
def test_what_a_run_would_learn_in_silence_is_refused_with_its_place(refusal, name, data, said):
    Path(name).write_bytes(data)
    message = refusal(name, "--bytes")
    assert f": {name}" in message and said in message


# ---- Shards --------------------------------------------------------------------------------------
def test_sizes_and_the_manifest(script, monkeypatch):
    """Validation has a tenth of one document, within limits. Every training shard begins inside it,
    with an EOT in front."""
    monkeypatch.setattr(tokenize_text, "VAL_TOKENS", 210)
    monkeypatch.setattr(tokenize_text, "SMALLEST", 2)
    monkeypatch.setattr(tokenize_text, "training_flags", lambda *_: {})
    Path("in.txt").write_text(prose(2999))
    script("in.txt", "--bytes", "--shard_tokens", 1100)
    about, (*train, val) = shards.read_folder(Path("out"))
    found = [shards.load(Path("out", name)) for name in (val, *train)]
    assert [len(shard) for shard in found] == [210, 1101, 1101, 591]
    assert {shard[0] for shard in found} == {256}
    assert [token for shard in found for token in shard[1:]] == [*prose(2999).encode()]
    assert about["source"] == "UTF-8 bytes of 1 files, 1 documents" and about["vocab"] == 257
    shards.check(Path("out"), shards.sums(Path("out")))


SIZES = [2050, 4864, 10_300, 71_809 + 1025, 655_371]


@pytest.mark.parametrize("argv, sizes", [
    (["--bytes"], SIZES), ([], [20_000, 600_000]), (["--bytes", "--shard_tokens", 5000], SIZES[2:]),
])  # fmt: skip
def test_every_printed_command_can_run(script, capsys, argv, sizes):
    """train_gpt.py takes its flags and its tokens, and there are none for one step more."""
    tiny = train_gpt.PRESETS["tiny"]
    shapes = train_gpt.batch_shapes("train", tiny)
    assert len(shapes) == tokenize_text.TINY_STEPS
    assert {rows * T for rows, T, _ in shapes} == {tokenize_text.TINY_BATCH}
    assert (tiny.val_tokens, tiny.val_T) == (tokenize_text.TINY_VAL, tokenize_text.VAL_LENGTHS[0])
    assert train_gpt.VAL_SEQUENCES == tokenize_text.VAL_SEQUENCES
    for size in sizes:
        Path("in.txt").write_text((TEXT * 99)[: size - 1])  # and an EOT
        script("in.txt", *argv)
        command = shlex.split(capsys.readouterr().out.splitlines()[-1])
        assert command[:4] == ["./run.sh", "tiny", "--data", "out"]
        _, c = train_gpt.parse_config(command[1:])
        eot = 256 if "--bytes" in argv else EOT
        assert (c.vocab, c.eot, c.target) == (eot + 1, eot, 0)
        found = train_gpt.find_data(c)
        assert all(train_gpt.shard_facts(shard, c) for split in found for shard in found[split])
        assert c.val_T % 128 == 0 and c.total_steps <= tiny.total_steps
        if c.total_steps < tiny.total_steps:
            with pytest.raises(SystemExit, match="2"):
                train_gpt.find_data(dataclasses.replace(c, steps=c.total_steps + 1))
        shutil.rmtree("out")


# ---- All or nothing ------------------------------------------------------------------------------
@pytest.mark.parametrize("fails, status", [
    ("raise KeyboardInterrupt", 130), ("os.kill(os.getpid(), 9)", -9),
])  # fmt: skip
def test_a_tokenize_that_failed_leaves_nothing_that_looks_whole(tmp_path, script, fails, status):
    """While it writes shards. A killed one leaves a hidden folder, and no hindrance."""
    Path("in.txt").write_text(TEXT)
    code = f"import os, tokenize_text as tool\ndef fail(path, parts): {fails}\n"
    code += "tool.shards.write = fail\ntool.main()"
    env = os.environ | dict(PYTHONPATH=str(HERE.parent / "data"))
    command = [sys.executable, "-c", code, "in.txt", "--bytes", "--out", "new/out"]
    done = subprocess.run(command, env=env, capture_output=True)
    assert done.returncode == status and [*tmp_path.glob("new/[!.]*")] == []
    assert (done.stderr == b"tokenize_text.py: stopped by Ctrl-C\n") == (status == 130)
    script("in.txt", "--bytes", "--out", "new/out")
    shards.check(Path("new/out"), shards.sums(Path("new/out")))
