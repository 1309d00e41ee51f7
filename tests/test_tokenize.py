"""data/tokenize_text.py: the tokens are the right ones, and nothing half is ever there."""

import collections
import contextlib
import gzip
import hashlib
import itertools
import json
import lzma
import math
import multiprocessing
import os
import pathlib
import pty
import random
import signal
import subprocess
import sys
import termios
import time
import types
import unicodedata
import weakref

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
import tiktoken
import zstandard

import train_gpt

HERE = pathlib.Path(__file__).resolve().parent
SCRIPT = HERE.parent / "data" / "tokenize_text.py"
sys.path.insert(0, str(SCRIPT.parent))

import shards  # noqa: E402
import tokenize_text  # noqa: E402

EOT = 50256
linux = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")


# ---- What the tests lean on ----------------------------------------------------------------------
def vocabulary(merges: str) -> dict[str, int]:
    """GPT-2's encoder.json out of its merges: first the 256 bytes, as characters that can be seen
    (the others moved to 256 and up), then what each merge makes, then <|endoftext|>."""
    seen = [*range(33, 127), *range(161, 173), *range(174, 256)]
    characters = [chr(byte) for byte in seen] + [chr(256 + i) for i in range(256 - len(seen))]
    pairs = merges.splitlines()[1:]
    tokens = characters + [pair.replace(" ", "") for pair in pairs] + ["<|endoftext|>"]
    return {token: number for number, token in enumerate(tokens)}


@pytest.fixture(scope="session")
def merges():
    """OpenAI's vocab.bpe of GPT-2 (github.com/openai/gpt-2, modified MIT licence)."""
    return lzma.decompress((HERE / "gpt2_vocab.bpe.xz").read_bytes()).decode()


@pytest.fixture(scope="session", autouse=True)
def cache(merges, tmp_path_factory):
    """tiktoken's cache, its files named by the sha1 of their addresses; it checks their sha256."""
    folder = tmp_path_factory.mktemp("tiktoken")
    (folder / "6d1cbeee0f20b3d9449abfede4726ed8212e3aee").write_text(merges, encoding="utf-8")
    encoder = json.dumps(vocabulary(merges))
    (folder / "6c7ea1a7e38e3a7f062df639a5b80947f075ffe6").write_text(encoder, encoding="utf-8")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TIKTOKEN_CACHE_DIR", str(folder))
        yield folder


@pytest.fixture(scope="session")
def gpt2(cache):
    return tiktoken.get_encoding("gpt2")


@pytest.fixture
def tokenize(tmp_path, monkeypatch):
    """Runs the script in this process; returns the tokens of all its shards, validation first."""

    def run(*argv, name="text"):
        argv = ["tokenize_text.py", *argv, "--out", tmp_path / "out", "--workers", "1"]
        monkeypatch.setattr(sys, "argv", list(map(str, argv)))
        tokenize_text.main()
        return np.concatenate(read_shards(tmp_path / "out", name))

    return run


@pytest.fixture
def refusal(tokenize, tmp_path):
    """The one line with which the script exits; nothing has been written then."""

    def run(*argv):
        with pytest.raises(SystemExit) as stopped:
            tokenize(*argv)
        message = stopped.value.code
        assert isinstance(message, str) and message.startswith("tokenize_text.py: ")
        assert "\n" not in message and message.count(": ") >= 2  # what is wrong: what to do
        assert left_in(tmp_path / "out") == []
        return message

    return run


def read_shards(out, name="text"):
    """What train_gpt.py reads in all shards, validation first."""
    paths = [out / f"{name}_val_000000.bin", *sorted(out.glob(f"{name}_train_*.bin"))]
    found = [train_gpt.open_shard(path) for path in paths]
    assert not [shard for shard in found if isinstance(shard, str)]
    numbers = [path.stem[-6:] for path in paths]
    assert numbers == [f"{i:06}" for i in range(len(paths))] and len(paths) > 1
    return found


def left_in(out):
    """What a folder holds beside the lock."""
    return sorted({path.name for path in out.glob("*")} - {".lock"})


def expected(documents, gpt2=None):
    """The straightforward way: every document as a whole, EOT in front."""
    parts = []
    for document in documents:
        tokens = gpt2.encode_ordinary(document) if gpt2 else list(document.encode())
        parts += [[EOT if gpt2 else 256], tokens]
    return np.concatenate(parts)


def prose(size, seed=0):
    """About so many characters of invented words."""
    draw, text, length = random.Random(seed), [], 0
    syllables = "ba ker to mi lun da fre gos pi she".split()
    while length < size:
        word = "".join(draw.choices(syllables, k=draw.randint(1, 4)))
        text.append(word + draw.choice([" ", " ", " ", " ", ", ", ". ", ".\n", "'s ", " 17 "]))
        length += len(text[-1])
    return "".join(text)


def command(*argv):
    return [sys.executable, str(SCRIPT), *map(str, argv)]


def script(*argv, timeout=60, **options):
    return subprocess.run(
        command(*argv), capture_output=True, text=True, timeout=timeout, **options
    )


DOCUMENTS = [prose(100, seed) for seed in range(20)]


def as_jsonl(documents):
    return "".join(json.dumps({"n": 1, "text": text}) + "\n" for text in documents).encode()


def write_parquet(path, texts, **options):
    pyarrow.parquet.write_table(
        pyarrow.table({"n": range(len(texts)), "text": texts}), path, **options
    )


PACK = {"": bytes, ".gz": gzip.compress, ".zst": zstandard.compress}


# ---- Tokens --------------------------------------------------------------------------------------
def test_ids_looked_up_by_hand(tokenize, merges, tmp_path, gpt2):
    """The ids are those of the vocabulary's entries, in which a space is written as \\u0120, a
    newline as \\u010a, and the two bytes of an i with diaeresis as \\u00c3\\u00af. Words take the
    space before them along; 's stands alone; <|endoftext|> is text, in seven tokens."""
    known = [
        ("Hello world", {"Hello": 15496, "\u0120world": 995}),
        ("It's 7.\n", {"It": 1026, "'s": 338, "\u01207": 767, ".": 13, "\u010a": 198}),
        ("<|endoftext|> na\u00efve", {"<": 27, "|": 91, "end": 437, "of": 1659, "text": 5239,
                                      "| again": 91, ">": 29, "\u0120na\u00c3\u00afve": 41492}),
    ]  # fmt: skip
    entries, ids = vocabulary(merges), []
    assert entries["<|endoftext|>"] == EOT
    for text, tokens in known:
        for token, number in tokens.items():
            assert entries[token.removesuffix(" again")] == number
        ids += [EOT, *tokens.values()]
        spelled = "".join(token.removesuffix(" again") for token in tokens)
        back = spelled.replace("\u0120", " ").replace("\u010a", "\n")
        assert back.replace("\u00c3\u00af", "\u00ef") == text
    (tmp_path / "in.jsonl").write_bytes(as_jsonl([text for text, _ in known] + DOCUMENTS))
    found = tokenize(tmp_path / "in.jsonl")
    assert found[: len(ids)].tolist() == ids
    assert found.tolist() == expected([text for text, _ in known] + DOCUMENTS, gpt2).tolist()


def test_bytes(tokenize, tmp_path):
    (tmp_path / "in.txt").write_bytes(
        "<|endoftext|> na\u00efve \u4e2d\r\n".encode() + bytes(range(128))
    )
    found = tokenize(tmp_path / "in.txt", "--bytes")
    assert found.tolist() == [256, *(tmp_path / "in.txt").read_bytes()]
    (val, train), manifest = read_shards(tmp_path / "out"), manifest_of(tmp_path / "out")
    assert (manifest["vocab"], manifest["eot"]) == (257, 256)
    assert len(val) == len(found) // 10 and len(train) == len(found) - len(val)


@pytest.mark.parametrize("by_bytes", [False, True])
def test_byte_order_mark_goes_and_newlines_stay(tokenize, tmp_path, gpt2, monkeypatch, by_bytes):
    monkeypatch.setattr(tokenize_text, "CHUNK", 2)  # not even the mark comes in one piece
    text = "one\r\ntwo\rthree\n\ufefffour\u2028five\x0b\x1c\x85" + DOCUMENTS[0]
    (tmp_path / "a.txt").write_bytes(b"\xef\xbb\xbf" + text.encode())
    (tmp_path / "b.jsonl").write_bytes(b"\xef\xbb\xbf" + as_jsonl(["\ufeffx" + text]))
    found = tokenize(tmp_path / "a.txt", tmp_path / "b.jsonl", *["--bytes"] * by_bytes)
    assert found.tolist() == expected([text, "\ufeffx" + text], None if by_bytes else gpt2).tolist()


@pytest.mark.parametrize("by_bytes", [False, True])
def test_half_a_surrogate_pair(tokenize, tmp_path, gpt2, by_bytes):
    lines = (
        r'{"text": "a \ud83d b \uDE00 \ud83d\ude00 \ude00\ud83d"}' + "\n" + r'{"text": "\ud83d"}'
    )
    (tmp_path / "in.jsonl").write_text(lines + "\n" + as_jsonl(DOCUMENTS).decode())
    found = tokenize(tmp_path / "in.jsonl", *["--bytes"] * by_bytes)
    texts = ["a \ufffd b \ufffd \U0001f600 \ufffd\ufffd", "\ufffd", *DOCUMENTS]
    assert found.tolist() == expected(texts, None if by_bytes else gpt2).tolist()
    if not by_bytes:  # as tiktoken does by itself
        raw = json.loads(lines.splitlines()[0])["text"]
        assert gpt2.encode_ordinary(raw) == gpt2.encode_ordinary(texts[0])


# ---- Cutting documents ---------------------------------------------------------------------------
HARD = [" ", " ", "  ", "\n", "\r\n", "\t", "\u00a0", "\u3000", "\u2028", "\x1c", "\x85", "a", "B",
        "\u00e9", "e\u0301", "\u0301", "'s", "'ll", "'", "'S", "\u4e2d", "\u6587\u5b57", "\u3002",
        "\U0001f600", "\U0001f468\u200d\U0001f469", "1", "23", "\u00b2", "\u2167", "\u0663", "!",
        "--", "_", "the", " the", "\ufffd", "\u0378", "\u1c89", "\u0e01\u0e34", "\u05d0",
        "<|endoftext|>"]  # fmt: skip


def cut(text, piece, monkeypatch, parts=None):
    monkeypatch.setattr(tokenize_text, "PIECE", piece)
    counts = collections.Counter()
    found = list(tokenize_text.pieces(iter([*(parts or [text]), None]), counts))
    assert "".join(part for _, part in found) == text
    assert [begins for begins, _ in found] == [True] + [False] * (len(found) - 1)
    assert max(len(part) for _, part in found) <= 2 * piece
    return [part for _, part in found], counts["cuts"]


def test_cuts_do_not_change_tokens(gpt2, monkeypatch):
    draw, exact, many = random.Random(1), 0, 0
    for _ in range(4000):
        text = "".join(draw.choices(draw.sample(HARD, 6) if draw.random() < 0.5 else HARD, k=60))
        parts, cuts = cut(text, draw.choice([2, 5, 9, 20]), monkeypatch)
        if cuts == 0:
            exact, many = exact + 1, many + len(parts)
            pieces = [token for part in parts for token in gpt2.encode_ordinary(part)]
            assert pieces == gpt2.encode_ordinary(text), parts
    assert exact > 1000 and many > 5000


def test_every_pair_of_characters(gpt2):
    """Wherever `boundary` sees one, the tokens of both sides are those of the whole."""
    seen = 0
    for a, b in itertools.product(HARD, repeat=2):
        for left, right in itertools.product(
            ["", " ", "x", "'", "\n "], ["", " ", "s", "ll", "\n"]
        ):
            text = left + a + b + right
            for end in range(1, len(text)):
                if tokenize_text.boundary(text, end - 1, end + 1) != end:
                    continue
                seen += 1
                both = gpt2.encode_ordinary(text[:end]) + gpt2.encode_ordinary(text[end:])
                assert both == gpt2.encode_ordinary(text), (text[:end], text[end:])
    assert seen > 10_000


def test_what_is_no_letter_yet_is_no_boundary():
    """tiktoken may know more of Unicode than this Python."""
    unassigned = next(c for c in map(chr, range(0x1C8A, 2**16)) if unicodedata.category(c) == "Cn")
    assert tokenize_text.boundary(f"a{unassigned}b", 0, 3) is None
    for other in ".1_'\u0301\ufffd\U0001f600":
        assert tokenize_text.boundary(f"a{other}b", 0, 3) == 1
    assert tokenize_text.boundary("\u00b2.b", 0, 3) is None  # a digit to Python, no letter


def test_words_are_cut_at_white_space_rather(monkeypatch):
    assert cut("ab.cd ef.gh ij.kl", 4, monkeypatch) == (["ab.cd", " ef.gh", " ij.kl"], 0)
    assert cut("ab.cd.ef.gh.ij.kl", 4, monkeypatch) == (["ab.cd", ".ef.gh", ".ij.kl"], 0)


def test_cuts_depend_on_the_document_alone(monkeypatch):
    draw = random.Random(2)
    for _ in range(200):
        text = "".join(draw.choices(HARD, k=100))
        at = sorted(draw.choices(range(len(text)), k=draw.choice([1, 5, 50])))
        parts = [text[a:b] for a, b in itertools.pairwise([0, *at, len(text)])]
        piece = draw.choice([3, 10, 30])
        assert cut(text, piece, monkeypatch, parts) == cut(text, piece, monkeypatch)


def test_many_short_parts_take_no_longer():
    """Appending is linear; to copy what there is each time would take a quarter of a minute."""
    counts, started = collections.Counter(), time.monotonic()
    assert len(list(tokenize_text.pieces(itertools.repeat("a b ", 1_500_000), counts))) > 5
    assert time.monotonic() - started < 5


def test_what_follows_a_long_document(tokenize, tmp_path, gpt2):
    texts = [prose(700_000), *DOCUMENTS[:2], prose(700_000, 1), ""]
    (tmp_path / "in.jsonl").write_bytes(as_jsonl(texts))
    assert tokenize(tmp_path / "in.jsonl").tolist() == expected(texts[:-1], gpt2).tolist()


def test_a_long_document(tokenize, tmp_path, gpt2, capsys):
    """At the true size of pieces: prose, then 900,000 characters in a row without white space."""
    text = prose(900_000) + "".join(prose(900_000, 1).split()) + " \n" * 200_000 + prose(300_000)
    (tmp_path / "in.txt").write_text(text)
    assert tokenize(tmp_path / "in.txt").tolist() == expected([text], gpt2).tolist()
    assert "cuts within" not in capsys.readouterr().out


RUNS = [
    "a" * 600_000,
    " " * 1_100_000 + "x",
    "\n" * 600_000 + "x",
    "!" * 600_000,
    "\u4e2d" * 600_000,
]


def test_endless_runs_are_cut_and_told(tokenize, tmp_path, gpt2, capsys):
    """tiktoken panics at a million spaces."""
    for number, run in enumerate(RUNS):
        (tmp_path / f"{number}.txt").write_text("x " * 100_000 + run + " y" * 200_000)
    paths = sorted(tmp_path.glob("*.txt"))
    found = tokenize(*paths)
    texts = gpt2.decode(found.tolist()).split("<|endoftext|>")[1:]
    assert texts == [path.read_text() for path in paths]
    told = capsys.readouterr().out
    assert all(f"{path}: " in told for path in paths) and "1 cuts within runs" in told


def test_bytes_have_no_cuts_to_tell(tokenize, tmp_path, capsys):
    (tmp_path / "in.txt").write_text(RUNS[0])
    assert tokenize(tmp_path / "in.txt", "--bytes").tolist() == [256] + [97] * 600_000
    assert "cuts within" not in capsys.readouterr().out


# ---- Files ---------------------------------------------------------------------------------------
@pytest.mark.parametrize("kind", [".txt", ".md", ".jsonl", ".TXT"])
@pytest.mark.parametrize("how", PACK)
def test_formats(tokenize, tmp_path, gpt2, kind, how):
    data = as_jsonl(DOCUMENTS) if kind == ".jsonl" else "".join(DOCUMENTS).encode()
    path = tmp_path / f"in{kind}{how}"
    path.write_bytes(PACK[how](data))
    documents = DOCUMENTS if kind == ".jsonl" else ["".join(DOCUMENTS)]
    assert tokenize(path).tolist() == expected(documents, gpt2).tolist()


@pytest.mark.parametrize("how", [".gz", ".zst"])
@pytest.mark.parametrize("chunk", [128, 2**20])
def test_archives_of_many_members(tokenize, tmp_path, monkeypatch, how, chunk):
    """As pigz, pzstd and `cat a.gz b.gz` make them; also read one byte at a time."""
    monkeypatch.setattr(tokenize_text, "CHUNK", chunk)
    halves = "".join(DOCUMENTS[:10]), "".join(DOCUMENTS[10:])
    (tmp_path / f"in.md{how}").write_bytes(b"".join(PACK[how](half.encode()) for half in halves))
    found = tokenize(tmp_path / f"in.md{how}", "--bytes")
    assert found.tolist() == expected(["".join(halves)]).tolist()


def test_zstd_of_the_standard_library(tokenize, tmp_path, monkeypatch):
    """Since Python 3.14; its decompressor ends with its frame."""

    class ZstdDecompressor:
        def __init__(self):
            self.inner = zstandard.ZstdDecompressor().decompressobj()

        def decompress(self, data):
            assert not self.eof
            return self.inner.decompress(data)

        eof = property(lambda self: self.inner.eof)
        unused_data = property(lambda self: self.inner.unused_data)

    module = types.ModuleType("compression.zstd")
    module.ZstdDecompressor = ZstdDecompressor
    monkeypatch.setitem(sys.modules, "compression", types.ModuleType("compression"))
    monkeypatch.setitem(sys.modules, "compression.zstd", module)
    monkeypatch.setitem(sys.modules, "zstandard", None)
    test_archives_of_many_members(tokenize, tmp_path, monkeypatch, ".zst", 2**20)


def test_parquet(tokenize, tmp_path, gpt2):
    write_parquet(tmp_path / "in.parquet", DOCUMENTS * 10, row_group_size=70)
    assert pyarrow.parquet.ParquetFile(tmp_path / "in.parquet").num_row_groups == 3
    found = tokenize(tmp_path / "in.parquet")
    assert found.tolist() == expected(DOCUMENTS * 10, gpt2).tolist()


def test_order_of_a_folder(tokenize, tmp_path, capsys):
    folder = tmp_path / "in"
    names = [f"{kind}/{number}.txt" for kind in "ab" for number in range(20)] + ["c.md"]
    for name in [*names, ".git/x.txt", "a/.x.txt", "a/x.py", "LICENSE", "a/x.txt.bz2"]:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(f"{name} \n")
    found = tokenize(folder, "--bytes")
    order = sorted(names, key=lambda name: hashlib.sha256(name.encode()).hexdigest())
    assert found.tolist() == expected([f"{name} \n" for name in order]).tolist()
    assert "ignored 3 files" in capsys.readouterr().out
    halves = ["".join(name[0] for name in half) for half in (order[:20], order[20:])]
    assert all(half.count("a") > 4 and half.count("b") > 4 for half in halves)


def test_named_files_keep_their_order(tokenize, tmp_path, capsys):
    for name in ("z.txt", "a.md", "sub/m.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(name * 10)
    found = tokenize(tmp_path / "z.txt", tmp_path / "sub", tmp_path / "a.md", "--bytes")
    names = "z.txt", "sub/m.txt", "a.md"
    assert found.tolist() == expected([name * 10 for name in names]).tolist()
    assert "ignored" not in capsys.readouterr().out


@pytest.mark.parametrize("argv, said", [
    (["nowhere.txt"], "nowhere.txt does not exist"),
    (["in.py"], "in.py is or holds no file of .txt"),
    (["empty"], "empty is or holds no file of .txt"),
    (["in.txt", "in.txt"], "in.txt would be read 2 times"),
    (["in.txt", "."], "in.txt would be read 2 times"),
    (["link.txt", "in.txt"], "in.txt would be read 2 times"),
    (["dangling"], "x.txt is no file"),
])  # fmt: skip
def test_unusable_paths(refusal, tmp_path, monkeypatch, argv, said):
    monkeypatch.chdir(tmp_path)
    for name in ("in.txt", "in.py", "empty/in.py", "empty/.hidden.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("text " * 10)
    (tmp_path / "link.txt").symlink_to("in.txt")
    (tmp_path / "dangling").mkdir()
    (tmp_path / "dangling" / "x.txt").symlink_to("nowhere")
    if argv == ["in.txt", "."]:
        (tmp_path / "link.txt").unlink()
        (tmp_path / "dangling" / "x.txt").unlink()
    assert said in refusal(*argv)
    assert not (tmp_path / "out").exists()


def test_a_linked_folder_is_not_passed_over_in_silence(refusal, tmp_path):
    for name in ("in", "elsewhere"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "a.txt").write_text(name)
    (tmp_path / "in" / "more").symlink_to(tmp_path / "elsewhere")
    assert "in/more is a link, not followed: give its target as PATH" in refusal(tmp_path / "in")


def test_folder_that_may_not_be_read(refusal, tmp_path, monkeypatch):
    def walk(folder, onerror):
        onerror(PermissionError(13, "Permission denied", f"{folder}/secret"))

    (tmp_path / "in").mkdir()
    monkeypatch.setattr(os, "walk", walk)
    assert "in/secret" in refusal(tmp_path / "in")


def test_separator(tokenize, tmp_path, gpt2):
    for name, text in {
        "a.txt": "one\n\ntwo\n<|endoftext|>\nthree\n<|endoftext|> \n <|endoftext|>\n"
                 "x<|endoftext|>\n<|endoftext|>\r\n<|endoftext|>\nfour",
        "b.md": "\ufeff<|endoftext|>\nfive\n<|endoftext|>\n",
        "c.txt": "six\n<|endoftext|>",
        "d.jsonl": json.dumps(dict(text="seven\n<|endoftext|>\neight")),
        "e.txt": "",
        "f.txt": "nine\n" + "long line " * 20,
    }.items():  # fmt: skip
        (tmp_path / name).write_text(text, newline="")
    found = tokenize(*sorted(tmp_path.glob("*.*")), "--separator", "<|endoftext|>")
    documents = [
        "one\n\ntwo\n", "three\n<|endoftext|> \n <|endoftext|>\nx<|endoftext|>\n", "four", "five\n",
        "six\n", "seven\n<|endoftext|>\neight", "nine\n" + "long line " * 20,
    ]  # fmt: skip
    assert found.tolist() == expected(documents, gpt2).tolist()


def test_blank_line_as_separator(tokenize, tmp_path, monkeypatch):
    monkeypatch.setattr(tokenize_text, "CHUNK", 3)
    (tmp_path / "in.txt").write_text("one\ntwo two\n\nthree three three\n\n\nfour four four")
    found = tokenize(tmp_path / "in.txt", "--bytes", "--separator", "")
    documents = ["one\ntwo two\n", "three three three\n", "four four four"]
    assert found.tolist() == expected(documents).tolist()


def test_empty_documents_are_skipped_and_told(tokenize, tmp_path, capsys):
    (tmp_path / "a.jsonl").write_bytes(as_jsonl(["", *DOCUMENTS, " ", ""]) + b"\n  \n\r\n")
    (tmp_path / "b.txt").write_text("")
    (tmp_path / "c.txt").write_bytes(b"\xef\xbb\xbf")
    (tmp_path / "d.txt").write_text("x\n\n\n\ny")
    found = tokenize(*sorted(tmp_path.glob("*.*")), "--bytes", "--separator", "")
    assert found.tolist() == expected([*DOCUMENTS, " ", "x\n", "y"]).tolist()
    assert "of 23 documents (6 empty ones skipped)" in capsys.readouterr().out
    assert "23 documents" in manifest_of(tmp_path / "out")["source"]


# ---- What cannot be read -------------------------------------------------------------------------
@pytest.mark.parametrize("how", PACK)
@pytest.mark.parametrize("chunk", [128, 2**20])
@pytest.mark.parametrize(
    "bad, at", [(b"\xff", 0), (b"\xe4\xb8x", 0), (b"\xed\xa0\x80", 0), (b"\xe4\xb8", 0)]
)
def test_not_utf8(refusal, tmp_path, monkeypatch, how, chunk, bad, at):
    monkeypatch.setattr(tokenize_text, "CHUNK", chunk)
    good = b"\xef\xbb\xbf" + "na\u00efve \u4e2d ".encode() * 100
    tail = b"" if bad == b"\xe4\xb8" else b" more"  # also a character that the file's end cuts off
    (tmp_path / f"in.txt{how}").write_bytes(PACK[how](good + bad + tail))
    assert f"in.txt{how} cannot be read: no UTF-8 at byte {len(good) + at}:" in refusal(
        tmp_path / f"in.txt{how}", "--bytes"
    )


def test_not_utf8_in_jsonl(refusal, tmp_path):
    (tmp_path / "in.jsonl").write_bytes(as_jsonl(["x" * 10]) + b'{"text": "\xff"}\n')
    at = len(as_jsonl(["x" * 10])) + len('{"text": "')
    assert f"in.jsonl cannot be read: no UTF-8 at byte {at}:" in refusal(tmp_path / "in.jsonl")


@pytest.mark.parametrize("line, said", [
    (b"{", "no JSON"), (b'{"text": "a"} x', "no JSON"), (b"[" * 200_000, "no JSON"),
    (b"[]", 'no string "text"'), (b'"text"', 'no string "text"'), (b"{}", 'no string "text"'),
    (b'{"text": null}', 'no string "text"'), (b'{"text": ["a"]}', 'no string "text"'),
    (b'{"Text": "a"}', 'no string "text"'),
])  # fmt: skip
def test_bad_lines_of_jsonl(refusal, tmp_path, line, said):
    (tmp_path / "in.jsonl").write_bytes(
        as_jsonl(DOCUMENTS[:2]) + b"\n" + line + b"\n" + as_jsonl(["a"])
    )
    message = refusal(tmp_path / "in.jsonl")
    assert "in.jsonl cannot be read: line 4 " in message and said in message


@pytest.mark.parametrize("argv", [[], ["--separator", "x"]])
def test_lines_that_are_too_long(refusal, tokenize, tmp_path, monkeypatch, argv):
    monkeypatch.setattr(tokenize_text, "MAX_LINE", 1000)
    monkeypatch.setattr(tokenize_text, "CHUNK", 100)
    path = tmp_path / ("in.txt" if argv else "in.jsonl")
    line = as_jsonl(["x" * 900])
    path.write_bytes(line + line.replace(b"x", b"x" * 5))
    assert f"{path} cannot be read: line 2 has more than 1000" in refusal(path, "--bytes", *argv)
    path.write_bytes(line * 10)
    assert len(tokenize(path, "--bytes", *argv)) > 9000


@pytest.mark.parametrize("how", [".gz", ".zst"])
@pytest.mark.parametrize(
    "fault", ["short", "shorter", "empty", "corrupt", "other", "garbage after"]
)
def test_broken_archives(refusal, tmp_path, how, fault):
    data = PACK[how](random.Random(0).randbytes(9000).hex().encode() * 20)
    broken = {
        "short": data[:-1], "shorter": data[: len(data) // 2], "empty": b"", "other": b"text " * 10,
        "corrupt": data[:3000] + bytes([data[3000] ^ 255]) + data[3001:],
        "garbage after": data + b"garbage " * 10,
    }[fault]  # fmt: skip
    if fault == "corrupt" and how == ".zst":  # whose frames have no checksum unless asked for one
        compressor = zstandard.ZstdCompressor(write_checksum=True)
        data = compressor.compress(random.Random(0).randbytes(9000).hex().encode() * 20)
        broken = data[:3000] + bytes([data[3000] ^ 255]) + data[3001:]
    (tmp_path / f"in.txt{how}").write_bytes(broken)
    assert f"in.txt{how} cannot be read: " in refusal(tmp_path / f"in.txt{how}", "--bytes")


def test_broken_parquet(refusal, tmp_path):
    path = tmp_path / "in.parquet"
    for column in ([*DOCUMENTS, None], [*DOCUMENTS, None][::-1]):
        write_parquet(path, column)
        assert f"{path} cannot be read: row {column.index(None) + 1} has no" in refusal(path)
    write_parquet(path, [1, 2, 3])
    assert f"{path} cannot be read: row 1 has no string" in refusal(path)
    pyarrow.parquet.write_table(pyarrow.table({"content": DOCUMENTS}), path)
    assert f'{path} cannot be read: it has no column "text"' in refusal(path)
    write_parquet(path, DOCUMENTS)
    whole = path.read_bytes()
    for broken in (
        whole[:-1],
        whole[:100],
        b"",
        b"PAR1" + whole[4:100] + b"\xff" * 300 + whole[400:],
    ):
        path.write_bytes(broken)
        assert f"{path} cannot be read: " in refusal(path)


@pytest.mark.parametrize("name, package", [
    ("in.txt.zst", "zstandard"), ("in.jsonl.zst", "zstandard"), ("in.parquet", "pyarrow"),
])  # fmt: skip
def test_missing_packages(refusal, tmp_path, monkeypatch, name, package):
    for module in ("compression.zstd", "zstandard", "pyarrow", "pyarrow.parquet"):
        monkeypatch.setitem(sys.modules, module, None)
    (tmp_path / name).write_bytes(b"never read")
    (tmp_path / "before.txt").write_bytes(b"\xff")
    message = refusal(tmp_path / "before.txt", tmp_path / name)
    assert f"{name} needs the package {package}: " in message
    assert message.endswith(f"-m pip install {package}")


@pytest.mark.parametrize("have", [0, 1, 2])
def test_no_vocabulary_and_no_network(tmp_path, cache, have):
    """Before anything is read. With both files in the cache, it needs no network."""
    folder = tmp_path / "cache"
    folder.mkdir()
    for path in sorted(cache.iterdir())[:have]:
        (folder / path.name).write_bytes(path.read_bytes())
    (tmp_path / "in.txt").write_bytes(prose(1000).encode() + b"\xff" * (have < 2))
    closed = dict.fromkeys(["http_proxy", "https_proxy", "HTTPS_PROXY"], "http://127.0.0.1:9")
    env = {k: v for k, v in os.environ.items() if k.lower() != "no_proxy"}
    env |= {"TIKTOKEN_CACHE_DIR": str(folder), **closed}
    done = script(tmp_path / "in.txt", "--out", tmp_path / "out", "--workers", "1", env=env)
    if have == 2:
        assert done.returncode == 0, done.stderr
        return
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (1, "", 1)
    for said in ("GPT-2's vocabulary (ProxyError)", "TIKTOKEN_CACHE_DIR=gpt2", "--bytes",
                 """python -c 'import tiktoken; tiktoken.get_encoding("gpt2")'"""):  # fmt: skip
        assert said in done.stderr
    assert not (tmp_path / "out").exists()


# ---- Shards --------------------------------------------------------------------------------------
def manifest_of(out):
    return json.loads((out / "MANIFEST.json").read_bytes())


def test_manifest_and_report(tokenize, tmp_path, capsys):
    (tmp_path / "a.jsonl").write_bytes(as_jsonl(DOCUMENTS))
    (tmp_path / "b.txt.gz").write_bytes(gzip.compress(prose(5000).encode()))
    paths, out = [tmp_path / "a.jsonl", tmp_path / "b.txt.gz"], tmp_path / "out"
    found = tokenize(*paths, "--shard_tokens", "900")
    said, manifest = capsys.readouterr().out, manifest_of(out)
    size = sum(path.stat().st_size for path in paths)
    assert manifest["source"] == (
        f"GPT-2 BPE by tiktoken {tiktoken.__version__} of 2 files, 21 documents, {size} bytes"
    )
    assert (manifest["vocab"], manifest["eot"]) == (50257, EOT)
    assert sorted([*manifest["files"], "MANIFEST.json"]) == left_in(out)
    for shard in read_shards(out):
        name, row = (
            pathlib.Path(shard.filename).name,
            manifest["files"][os.path.basename(shard.filename)],
        )
        data = (out / name).read_bytes()
        digest, documents = hashlib.sha256(data).hexdigest(), int((np.asarray(shard) == EOT).sum())
        assert row == dict(size=len(data), sha256=digest, documents=documents)
        assert f"{name} tokens:{len(shard)} documents:{documents} sha256:{digest[:16]}" in said
    assert f"{len(found)} tokens of 21 documents; train on it" in said
    argv = said.splitlines()[-1].split()
    assert argv[0] == "./run.sh"
    preset, c = train_gpt.parse_config(argv[1:])
    assert (preset, c.data, c.vocab, c.eot) == ("tiny", str(out), 50257, EOT)


def test_shards_have_the_sizes_asked_for(tokenize, tmp_path, gpt2):
    (tmp_path / "in.jsonl").write_bytes(as_jsonl(DOCUMENTS))
    found = tokenize(tmp_path / "in.jsonl", "--shard_tokens", 100, "--val_tokens", 57)
    whole = expected(DOCUMENTS, gpt2)
    assert found.tolist() == whole.tolist()
    sizes = list(map(len, read_shards(tmp_path / "out")))
    assert sizes == [57] + [100] * ((len(whole) - 57) // 100) + [(len(whole) - 57) % 100]
    assert len(sizes) > 5 and sizes[-1] > 1


@pytest.mark.parametrize("argv, size, sizes, dropped", [
    ([], 39, [4, 36], 0),                                                 # a tenth
    ([], 2999, [210, 2790], 0),                                           # but no more than the cap
    (["--val_tokens", 1000], 2999, [1000, 2000], 0),
    (["--val_tokens", 2998], 2999, [2998, 2], 0),
    (["--val_tokens", 2], 3, [2, 2], 0),
    ([], 3, [2, 2], 0),
    (["--shard_tokens", 1000, "--val_tokens", 1000], 2999, [1000] * 3, 0),
    (["--shard_tokens", 1000, "--val_tokens", 999], 2999, [999, 1000, 1000], 1),
    (["--shard_tokens", 1000, "--val_tokens", 998], 2999, [998, 1000, 1000, 2], 0),
    (["--shard_tokens", 2, "--val_tokens", 2], 10, [2] * 5, 1),
])  # fmt: skip
def test_sizes(tokenize, tmp_path, monkeypatch, capsys, argv, size, sizes, dropped):
    monkeypatch.setattr(tokenize_text, "VAL_TOKENS", 210)
    text = prose(size)[:size]
    (tmp_path / "in.txt").write_text(text)
    found = tokenize(tmp_path / "in.txt", "--bytes", *argv)
    assert found.tolist() == expected([text]).tolist()[: sum(sizes)]
    assert (
        list(map(len, read_shards(tmp_path / "out"))) == sizes and size + 1 == sum(sizes) + dropped
    )
    assert ("dropped the last token" in capsys.readouterr().out) == bool(dropped)


@pytest.mark.parametrize("argv, size", [
    ([], 0), ([], 1), ([], 2), (["--val_tokens", 2], 2), (["--val_tokens", 999], 999),
    (["--val_tokens", 1000], 999), (["--val_tokens", 5000], 999),
])  # fmt: skip
def test_too_little_text(refusal, tmp_path, argv, size):
    (tmp_path / "in.txt").write_text("x" * size)
    message = refusal(tmp_path / "in.txt", "--bytes", *argv)
    assert f"{size + (size > 0)} tokens are too few for {argv[1] if argv else 2} of" in message


def test_no_more_is_held_than_ten_times_the_validation_set(monkeypatch):
    monkeypatch.setattr(tokenize_text, "VAL_TOKENS", 100)
    made = []

    def source():
        for _ in range(100):
            array = np.arange(300, dtype="<u2")
            made.append(weakref.ref(array))
            yield array
            del array

    def alive():
        return sum(ref() is not None for ref in made)

    count, arrays = tokenize_text.validation_size(source())
    assert count == 100 and len(made) == 4 == alive()
    for number, _ in enumerate(arrays, 1):
        assert alive() <= max(2, 5 - number)  # what has been used goes
    assert number == 100


def test_the_whole_of_the_records_validation_is_the_default():
    c = train_gpt.PRESETS["record"]
    whole = range(tokenize_text.VAL_TOKENS)
    assert train_gpt.steps_in(whole, *c.batch("val")) == c.val_steps
    assert train_gpt.steps_in(whole[1:], *c.batch("val")) == c.val_steps - 1
    defaults = dict(shard_tokens=10**8, val_tokens=None, separator=None, name="text", bytes=False)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["tokenize_text.py", "in.txt", "--out", "out"])
        args = vars(tokenize_text.parse())
        sys.argv.append("--bytes")
        assert tokenize_text.parse().workers == 1  # whatever there is
    assert {name: args[name] for name in defaults} == defaults
    assert args["workers"] == len(os.sched_getaffinity(0)) if sys.platform == "linux" else True


@pytest.mark.parametrize("argv", [
    ["in.txt"], ["--out", "out"], ["in.txt", "--out", "out", "--shard_tokens", "1"],
    ["in.txt", "--out", "out", "--val_tokens", "1"], ["in.txt", "--out", "out", "--workers", "0"],
    ["in.txt", "--out", "out", "--shard_tokens", "2147483648"],
    ["in.txt", "--out", "out", "--val_tokens", "many"],
    ["in.txt", "--out", "out", "--name", "a/b"], ["in.txt", "--out", "out", "--name", ".a"],
    ["in.txt", "--out", "out", "--name", ""], ["in.txt", "--out", "out", "--name", "a_val"],
    ["in.txt", "--out", "out", "--name", "a_train_b"],
    ["in.txt", "--out", "out", "--separator", "a\nb"],
])  # fmt: skip
def test_bad_command_lines(monkeypatch, tmp_path, capsys, argv):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "in.txt").write_text("text " * 100)
    monkeypatch.setattr(sys, "argv", ["tokenize_text.py", *argv])
    with pytest.raises(SystemExit) as stopped:
        tokenize_text.main()
    assert stopped.value.code == 2 and "error: " in capsys.readouterr().err
    assert left_in(tmp_path) == ["in.txt"]


def test_name(tokenize, tmp_path, gpt2):
    (tmp_path / "in.txt").write_text(DOCUMENTS[0])
    found = tokenize(tmp_path / "in.txt", "--name", "my_own-1.0", name="my_own-1.0")
    assert found.tolist() == expected(DOCUMENTS[:1], gpt2).tolist()


# ---- All or nothing ------------------------------------------------------------------------------
@pytest.mark.parametrize("name", ["x_val_000000.bin", "other.bin", "MANIFEST.json"])
def test_a_used_folder_is_refused(tokenize, tmp_path, monkeypatch, name):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / name).write_bytes(b"kept")
    monkeypatch.setattr(tokenize_text, "find", lambda paths: pytest.fail("looked for input first"))
    with pytest.raises(SystemExit, match=f"{name} is there already: delete it, or"):
        tokenize(tmp_path / "nowhere.txt")
    assert left_in(tmp_path / "out") == [name] and (tmp_path / "out" / name).read_bytes() == b"kept"


def test_a_folder_that_fills_meanwhile_is_refused(tokenize, tmp_path, monkeypatch):
    (tmp_path / "in.txt").write_text(DOCUMENTS[0])

    def write(*args):
        (tmp_path / "out" / "other.bin").write_bytes(b"kept")

    monkeypatch.setattr(shards, "write_manifest", write)
    with pytest.raises(SystemExit, match="other.bin is there already"):
        tokenize(tmp_path / "in.txt")
    assert left_in(tmp_path / "out") == ["other.bin"]


def test_two_at_once_make_one_set(tmp_path):
    (tmp_path / "in.txt").write_text(prose(2_000_000))
    argv = command(tmp_path / "in.txt", "--out", tmp_path / "out", "--bytes", "--val_tokens", 9)
    both = [subprocess.Popen(argv, stderr=subprocess.PIPE, text=True) for _ in range(2)]
    said = [process.communicate(timeout=60)[1] for process in both]
    assert sorted(process.returncode for process in both) == [0, 1]
    assert "".join(said).count("is there already") == 1 == "".join(said).count("\n")
    assert list(map(len, read_shards(tmp_path / "out"))) == [
        9,
        2_000_000 - 8 + len(prose(2_000_000)) - 2_000_000,
    ]


def test_validation_comes_last_and_a_failure_takes_all_back(tokenize, tmp_path, monkeypatch):
    (tmp_path / "in.txt").write_text(DOCUMENTS[0])
    moved, replace = [], os.replace

    def fails_late(source, target):
        if pathlib.Path(target).parent == tmp_path / "out":
            moved.append(pathlib.Path(target).name)
            if len(moved) == fails_at:
                raise KeyboardInterrupt if fails_at < 4 else OSError(5, "broken", str(target))
        replace(source, target)

    monkeypatch.setattr(os, "replace", fails_late)
    for fails_at, error in (3, KeyboardInterrupt), (4, SystemExit), (9, None):
        moved.clear()
        with pytest.raises(error) if error else contextlib.nullcontext():
            tokenize(tmp_path / "in.txt", "--bytes", "--shard_tokens", "50")
        if error:
            assert left_in(tmp_path / "out") == [] and len(moved) == fails_at
    trains = [f"text_train_{number:06}.bin" for number in (1, 2)]
    assert moved == [*trains, "MANIFEST.json", "text_val_000000.bin"]


def test_a_late_failure_leaves_nothing(refusal, tmp_path):
    (tmp_path / "a.txt").write_text(prose(3_000_000))
    (tmp_path / "b.txt").write_bytes(b"\xff")
    argv = ["--bytes", "--val_tokens", 10, "--shard_tokens", 100_000]
    refusal(tmp_path / "a.txt", tmp_path / "b.txt", *argv)
    assert left_in(tmp_path / "out") == []


@pytest.mark.parametrize("blocks", [0, 1, 300])
def test_disk_full(tmp_path, blocks):
    """A limit on the size of a file fails as a full disk does: at the first shard, or later."""
    (tmp_path / "in.txt").write_text(prose(1_000_000))
    argv = command(
        tmp_path / "in.txt", "--out", tmp_path / "out", "--bytes", "--val_tokens", "1000"
    )
    full = ["bash", "-c", f'ulimit -f {blocks}; exec "$@"', "-", *argv]
    done = subprocess.run(full, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (1, "", 1)
    assert done.stderr.startswith(
        f"tokenize_text.py: {tmp_path / 'out'}: File too large: see to room"
    )
    assert left_in(tmp_path / "out") == []


def test_out_that_is_a_file(tmp_path, tokenize):
    (tmp_path / "in.txt").write_text(DOCUMENTS[0])
    (tmp_path / "out").write_text("a file")
    with pytest.raises(SystemExit, match="tokenize_text.py: .*out: File exists: "):
        tokenize(tmp_path / "in.txt")


# ---- Processes -----------------------------------------------------------------------------------
@pytest.fixture(scope="module")
def large(tmp_path_factory):
    """Text that takes some seconds."""
    path = tmp_path_factory.mktemp("large") / "in.txt"
    path.write_text(prose(1_000_000) * 60)
    return path


@contextlib.contextmanager
def running(out, *argv, until):
    """The script at work with two workers, as soon as a glob of its unfinished files matches."""
    # A shell makes its background jobs ignore Ctrl-C, and these tests may run in one.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    process = subprocess.Popen(
        command(*argv, "--out", out, "--workers", "2"), stdout=subprocess.PIPE,
        stderr=subprocess.PIPE, text=True, start_new_session=True,
    )  # fmt: skip
    signal.signal(signal.SIGINT, before)
    try:
        deadline = time.monotonic() + 30
        while not list(out.glob(until)):
            assert process.poll() is None and time.monotonic() < deadline
            time.sleep(0.01)
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def session(leader):
    """The processes that the script has started, by their process group."""
    found = []
    for folder in pathlib.Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            state, _, group = (folder / "stat").read_text().rpartition(")")[2].split()[:3]
            if int(group) == leader and state != "Z":
                found.append(int(folder.name))
    return sorted(found)


def workers(leader):
    found = []
    for pid in session(leader):
        with contextlib.suppress(OSError):
            if b"spawn_main" in pathlib.Path(f"/proc/{pid}/cmdline").read_bytes():
                found.append(pid)
    return found


def gone(leader, seconds=10):
    deadline = time.monotonic() + seconds
    while session(leader) and time.monotonic() < deadline:
        time.sleep(0.01)
    return session(leader) == []


STEPS = ["--val_tokens", 1000, "--shard_tokens", 200_000]


@linux
@pytest.mark.parametrize("until", [".part-*", ".part-*/text_train_000003.bin"])
@pytest.mark.parametrize("kill", [os.killpg, os.kill])
def test_ctrl_c(tmp_path, large, until, kill):
    """A terminal interrupts all processes, `kill -INT` the main one; early, workers only begin."""
    with running(tmp_path / "out", large, *STEPS, until=until) as process:
        started = time.monotonic()
        kill(process.pid, signal.SIGINT)
        said = process.communicate(timeout=30)
        assert time.monotonic() - started < 15  # on a busy machine; 1 where there is nothing else
        assert (process.returncode, said[0]) == (130, "")
        assert said[1] == "tokenize_text.py: stopped by Ctrl-C: run it again for the shards\n"
        assert gone(process.pid)
    assert left_in(tmp_path / "out") == []


@linux
def test_workers_do_not_mind_ctrl_c(tmp_path, large):
    """Not even while they start: it is the main process that ends them."""
    (tmp_path / "in.txt").write_text(large.read_text()[:20_000_000])
    with running(tmp_path / "out", tmp_path / "in.txt", until=".lock") as process:
        sent = 0
        while process.poll() is None:
            for pid in workers(process.pid):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGINT)
                    sent += 1
            time.sleep(0.005)
        assert (process.returncode, process.stderr.read()) == (0, "") and sent > 20


@linux
def test_kill_9_leaves_no_shard_and_no_process(tmp_path, large, tokenize):
    with running(tmp_path / "out", large, *STEPS, until=".part-*/text_train_000002.bin") as process:
        assert len(workers(process.pid)) == 2
        process.kill()
        process.wait()
        assert gone(process.pid)
    (left,) = left_in(tmp_path / "out")
    assert left.startswith(".part-")
    (tmp_path / "in.txt").write_text(DOCUMENTS[0])
    assert len(tokenize(tmp_path / "in.txt", "--bytes")) == len(DOCUMENTS[0]) + 1
    names = ["MANIFEST.json", "text_train_000001.bin", "text_val_000000.bin"]
    assert left_in(tmp_path / "out") == names


@linux
def test_a_dead_worker_is_one_line(tmp_path, large):
    until = ".part-*/text_train_000002.bin"
    with running(tmp_path / "out", large, *STEPS, until=until) as process:
        os.kill(workers(process.pid)[0], signal.SIGKILL)
        said = process.communicate(timeout=30)
        assert (process.returncode, said[0], said[1].count("\n")) == (1, "", 1), said
        assert "a worker has died, perhaps for want of memory: use fewer --workers" in said[1]
        assert gone(process.pid)
    assert left_in(tmp_path / "out") == []


def test_any_number_of_workers_makes_the_same_files(tmp_path, gpt2):
    long = prose(1_500_000)
    (tmp_path / "a.txt").write_text(long)
    (tmp_path / "b.jsonl").write_bytes(as_jsonl(prose(300, seed) for seed in range(2000)))
    found = {}
    for count in (1, 3):
        out = tmp_path / f"out{count}"
        done = script(tmp_path / "a.txt", tmp_path / "b.jsonl", "--out", out, "--workers", count,
                      "--shard_tokens", 100_000)  # fmt: skip
        assert done.returncode == 0 and done.stderr == "", done.stderr
        found[count] = {path.name: path.read_bytes() for path in out.glob("[!.]*")}
    assert found[1] == found[3] and len(found[1]) > 4
    documents = [long, *(prose(300, seed) for seed in range(2000))]
    whole = np.concatenate(read_shards(tmp_path / "out3"))
    assert np.array_equal(whole, expected(documents, gpt2))


def test_results_come_in_order_and_few_wait():
    pulled, found = [], []

    def tasks():
        for number in range(200):
            pulled.append(5000 * (number % 3) + number)
            yield pulled[-1]

    over = tokenize_text.in_order(2, math.factorial, tasks())
    for result in over:
        found.append(result)
        assert len(pulled) < len(found) + 2 * tokenize_text.QUEUE
    assert found == list(map(math.factorial, pulled)) and len(found) == 200
    assert signal.SIGINT not in signal.pthread_sigmask(signal.SIG_BLOCK, [])
    deadline = time.monotonic() + 10
    while multiprocessing.active_children():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_tasks_that_wait_are_given_up():
    over = tokenize_text.in_order(2, time.sleep, itertools.chain([0], itertools.repeat(1)))
    assert next(over) is None
    started = time.monotonic()
    over.close()
    assert time.monotonic() - started < 3  # two sleep, fourteen wait


def test_an_error_in_a_worker_is_one_line(gpt2):
    """Also a panic of Rust, which is no Exception and cannot be sent."""
    panic = r"a worker failed: called `Result::unwrap\(\)` on an `Err` value"
    with pytest.raises(SystemExit, match=panic):
        list(tokenize_text.in_order(2, gpt2.encode_ordinary, [" " * 1_100_000 + "x"]))
    with pytest.raises(SystemExit, match="tokenize_text.py: a worker failed: Expecting value"):
        list(tokenize_text.in_order(2, json.loads, ["1", "2", "x"]))
    with pytest.raises(SystemExit, match="tokenize_text.py: a worker has died, .*: use fewer --w"):
        list(tokenize_text.in_order(2, os._exit, [0, 0, 0]))
    with pytest.raises(SystemExit, match="^the line$"):
        list(tokenize_text.in_order(2, sys.exit, ["the line"]))


def test_bundles():
    """Some 256 KiB: small pieces together, and none too long."""
    pieces = [(True, "x" * size) for size in [10] * 100_000 + [tokenize_text.PIECE * 2] * 3 + [1]]
    found = list(tokenize_text.bundles(pieces))
    assert [piece for bundle in found for piece in bundle] == pieces
    sizes = [sum(len(text) for _, text in bundle) for bundle in found]
    assert min(sizes[:-1]) >= 2**18 and max(sizes) < 2**20


def test_a_worker_imports_little():
    """Each one imports the script; tiktoken comes with the first text."""
    code = "import sys, tokenize_text; print(sorted({m.split('.')[0] for m in sys.modules}))"
    env = os.environ | {"PYTHONPATH": str(SCRIPT.parent)}
    argv = [sys.executable, "-c", code]
    done = subprocess.run(argv, env=env, capture_output=True, text=True, timeout=60)
    heavy = {"jax", "pyarrow", "zstandard", "tqdm", "tiktoken", "requests", "huggingface_hub"}
    assert done.returncode == 0 and not set(eval(done.stdout)) & heavy


PEAK = """
import os, re, runpy, sys
sys.argv = sys.argv[1:]
sys.path[0] = os.path.dirname(sys.argv[0])
runpy.run_path(sys.argv[0], run_name="__main__")
print("peak", re.search(r"VmHWM:\\s+(\\d+)", open("/proc/self/status").read())[1])
"""


def peak(tmp_path, text, *argv):
    """Megabytes of the one process that --bytes needs."""
    (tmp_path / "in.txt").write_text(text)
    out = tmp_path / "-".join(map(str, [len(text), *argv]))
    argv = [SCRIPT, tmp_path / "in.txt", "--out", out, "--bytes", *argv]
    argv = [sys.executable, "-c", PEAK, *map(str, argv)]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=60)
    return int(done.stdout.split()[-1]) / 1024


@linux
def test_memory_of_one_process(tmp_path):
    """It does not grow with the input; there is one shard in it, once."""
    text = prose(1_000_000)[: 10**6]
    small = peak(tmp_path, text * 8, *STEPS)
    assert peak(tmp_path, text * 64, *STEPS) < small + 10
    shards = peak(tmp_path, text * 64, "--val_tokens", 1000, "--shard_tokens", 30_000_000)
    assert 40 < shards - small < 80


@linux
def test_memory_of_all_processes_does_not_grow(tmp_path, large):
    peaks, text = [], large.read_text()
    for megabytes in (6, 60):
        (tmp_path / "in.txt").write_text(text[: 10**6 * megabytes])
        most, out = {}, tmp_path / str(megabytes)
        with running(out, tmp_path / "in.txt", *STEPS, until=".lock") as process:
            while process.poll() is None:
                for pid in session(process.pid):
                    with contextlib.suppress(OSError, IndexError):
                        status = pathlib.Path(f"/proc/{pid}/status").read_text()
                        most[pid] = int(status.partition("VmHWM:")[2].split()[0]) / 1024
                time.sleep(0.02)
            assert process.returncode == 0 and len(most) == 4  # with Python's resource tracker
        peaks.append(sum(most.values()))
    assert peaks[1] < peaks[0] + 25, peaks


@linux
def test_the_bar_is_for_terminals(tmp_path):
    (tmp_path / "in.txt").write_text(prose(1_000_000)[: 10**6] * 20)
    main, end = pty.openpty()
    termios.tcsetwinsize(end, (24, 120))  # of (0, 0), tqdm shows nothing
    argv = command(tmp_path / "in.txt", "--out", tmp_path / "out", "--bytes", "--val_tokens", "9")
    env = os.environ | {"TQDM_MININTERVAL": "0"}
    with subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=end, env=env) as process:
        os.close(end)
        shown = b""
        with contextlib.suppress(OSError):  # the end of a terminal
            while data := os.read(main, 4096):
                shown += data
        assert process.wait() == 0
    os.close(main)
    assert b"B/s" in shown and b" tokens" in shown and b"/20.0M" in shown
