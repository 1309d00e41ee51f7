"""data/tokenize_text.py: the tokens are the right ones, and nothing half is ever there."""

import collections
import contextlib
import gzip
import hashlib
import itertools
import json
import lzma
import math
import os
import pathlib
import random
import signal
import subprocess
import sys
import time
import unicodedata

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
import shards
import tiktoken
import tokenize_text
import zstandard

import train_gpt

HERE = pathlib.Path(__file__).resolve().parent
EOT = 50256


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

    def run(*argv):
        argv = ["tokenize_text.py", *argv, "--out", tmp_path / "out"]
        monkeypatch.setattr(sys, "argv", list(map(str, argv)))
        tokenize_text.main()
        return np.concatenate(read_shards(tmp_path / "out"))

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


def read_shards(out):
    """The tokens of all shards, validation first; the folder is right."""
    about, (*train, val) = shards.read_folder(out)
    assert not any(fault for *_, fault in shards.check(out, about, [*train, val]))
    return [np.fromfile(out / name, "<u2", offset=1024) for name in (val, *train)]


def left_in(out):
    """What a folder holds beside the lock, and what read_shards notes."""
    return sorted({path.name for path in out.glob("*")} - {".lock", shards.STAMP})


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
    return [sys.executable, tokenize_text.__file__, *map(str, argv)]


DOCUMENTS = [prose(100, seed) for seed in range(20)]


def as_jsonl(documents):
    return "".join(json.dumps({"n": 1, "text": text}) + "\n" for text in documents).encode()


def write_parquet(path, texts, **options):
    pyarrow.parquet.write_table(
        pyarrow.table({"n": range(len(texts)), "text": texts}), path, **options
    )


PACK = {"": bytes, ".gz": gzip.compress, ".zst": zstandard.compress}


# ---- Tokens --------------------------------------------------------------------------------------
def test_ids_looked_up_by_hand(tokenize, tmp_path, gpt2):
    """In OpenAI's encoder.json; <|endoftext|> is text, in seven tokens."""
    known = {"Hello world": [15496, 995], "It's 7.\n": [1026, 338, 767, 13, 198],
             "<|endoftext|> na\u00efve": [27, 91, 437, 1659, 5239, 91, 29, 41492]}  # fmt: skip
    (tmp_path / "in.jsonl").write_bytes(as_jsonl([*known, *DOCUMENTS]))
    ids = [number for tokens in known.values() for number in (EOT, *tokens)]
    found = tokenize(tmp_path / "in.jsonl").tolist()
    assert found[: len(ids)] == ids and found == expected([*known, *DOCUMENTS], gpt2).tolist()


@pytest.mark.parametrize("by_bytes", [False, True])
def test_byte_order_mark_goes_and_newlines_stay(tokenize, tmp_path, gpt2, monkeypatch, by_bytes):
    monkeypatch.setattr(tokenize_text, "CHUNK", 2)  # not even the mark comes in one piece
    text = "one\r\ntwo\rthree\n\ufefffour\u2028five\x0b\x1c\x85\x00\u4e2d<|endoftext|>"
    text += DOCUMENTS[0]
    (tmp_path / "a.txt").write_bytes(b"\xef\xbb\xbf" + text.encode())
    (tmp_path / "b.jsonl").write_bytes(b"\xef\xbb\xbf" + as_jsonl(["\ufeffx" + text]))
    found = tokenize(tmp_path / "a.txt", tmp_path / "b.jsonl", *["--bytes"] * by_bytes)
    assert found.tolist() == expected([text, "\ufeffx" + text], None if by_bytes else gpt2).tolist()


@pytest.mark.parametrize("by_bytes", [False, True])
def test_half_a_surrogate_pair(tokenize, tmp_path, gpt2, by_bytes):
    """Becomes U+FFFD, as in tiktoken."""
    lines = r'{"text": "a \ud83d b \uDE00 \ud83d\ude00 \ude00\ud83d"}' + "\n" r'{"text": "\ud83d"}'
    (tmp_path / "in.jsonl").write_text(lines + "\n" + as_jsonl(DOCUMENTS).decode())
    found = tokenize(tmp_path / "in.jsonl", *["--bytes"] * by_bytes)
    texts = ["a \ufffd b \ufffd \U0001f600 \ufffd\ufffd", "\ufffd", *DOCUMENTS]
    assert found.tolist() == expected(texts, None if by_bytes else gpt2).tolist()


def test_any_number_of_threads_makes_the_same_files(tokenize, tmp_path, gpt2):
    documents = [prose(600_000), *(prose(300, seed) for seed in range(500))]
    (tmp_path / "in.jsonl").write_bytes(as_jsonl(documents))
    found = []
    for count in (1, 3):
        argv = "--workers", count, "--shard_tokens", 50_000
        assert np.array_equal(tokenize(tmp_path / "in.jsonl", *argv), expected(documents, gpt2))
        out = tmp_path / "out"
        found.append({path.name: path.read_bytes() for path in out.glob("[!.]*")})
        out.rename(tmp_path / str(count))
    assert found[0] == found[1] and len(found[0]) > 4


def test_results_come_in_order_few_wait_and_a_failure_ends_all():
    pulled, found = [], []

    def tasks():
        for number in range(200):
            pulled.append(5000 * (number % 3) + number)
            yield pulled[-1]

    for result in tokenize_text.in_order(2, math.factorial, tasks()):
        found.append(result)
        assert len(pulled) < len(found) + 2 * tokenize_text.QUEUE
    assert found == list(map(math.factorial, pulled)) and len(found) == 200
    with pytest.raises(json.JSONDecodeError):
        list(tokenize_text.in_order(2, json.loads, ["1", "x", *["2"] * 99]))
    over = tokenize_text.in_order(2, time.sleep, itertools.chain([0], itertools.repeat(0.5)))
    assert next(over) is None
    started = time.monotonic()
    over.close()
    assert time.monotonic() - started < 2  # two sleep, fourteen wait


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


def test_what_is_no_letter_yet_is_no_boundary():
    """tiktoken may know more of Unicode than this Python."""
    unassigned = next(c for c in map(chr, range(0x1C8A, 2**16)) if unicodedata.category(c) == "Cn")
    assert tokenize_text.boundary(f"a{unassigned}b", 0, 3) is None
    assert tokenize_text.boundary("a.b", 0, 3) == 1
    assert tokenize_text.boundary("\u00b2.b", 0, 3) is None  # a digit to Python, no letter


def test_cuts_depend_on_the_document_alone(monkeypatch):
    draw = random.Random(2)
    for _ in range(200):
        text = "".join(draw.choices(HARD, k=100))
        at = sorted(draw.choices(range(len(text)), k=draw.choice([1, 5, 50])))
        parts = [text[a:b] for a, b in itertools.pairwise([0, *at, len(text)])]
        piece = draw.choice([3, 10, 30])
        assert cut(text, piece, monkeypatch, parts) == cut(text, piece, monkeypatch)


RUNS = ["a" * 600_000, " " * 1_100_000 + "x", "\n" * 600_000 + "x", "\u4e2d" * 600_000]


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


# ---- Files ---------------------------------------------------------------------------------------
@pytest.mark.parametrize("kind", [".txt", ".jsonl", ".MD"])
@pytest.mark.parametrize("how", PACK)
@pytest.mark.parametrize("chunk", [128, 2**20])
def test_formats(tokenize, tmp_path, monkeypatch, kind, how, chunk):
    """Archives of two members, as pigz and `cat a.gz b.gz` make them; also read byte by byte."""
    monkeypatch.setattr(tokenize_text, "CHUNK", chunk)
    data = as_jsonl(DOCUMENTS) if kind == ".jsonl" else "".join(DOCUMENTS).encode()
    path = tmp_path / f"in{kind}{how}"
    path.write_bytes(PACK[how](data[:999]) + PACK[how](data[999:]))
    documents = DOCUMENTS if kind == ".jsonl" else ["".join(DOCUMENTS)]
    assert tokenize(path, "--bytes").tolist() == expected(documents).tolist()


def test_parquet(tokenize, refusal, tmp_path):
    path = tmp_path / "in.parquet"
    write_parquet(path, [*DOCUMENTS, None])
    assert f"{path} cannot be read: row 21 has no string" in refusal(path)
    pyarrow.parquet.write_table(pyarrow.table({"content": DOCUMENTS}), path)
    assert f'{path} cannot be read: it has no column "text"' in refusal(path)
    write_parquet(path, DOCUMENTS)
    whole = path.read_bytes()
    for broken in (whole[:-1], b"", b"PAR1" + whole[4:100] + b"\xff" * 300 + whole[400:]):
        path.write_bytes(broken)
        assert f"{path} cannot be read: " in refusal(path)
    write_parquet(path, DOCUMENTS * 10, row_group_size=70)
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
    assert "ignored 3 files" in capsys.readouterr().out
    halves = ["".join(name[0] for name in half) for half in (order[:20], order[20:])]
    assert all(half.count("a") > 4 and half.count("b") > 4 for half in halves)


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


def test_empty_documents_are_skipped_and_told(tokenize, tmp_path, capsys):
    (tmp_path / "a.jsonl").write_bytes(as_jsonl(["", *DOCUMENTS, " ", ""]) + b"\n  \n\r\n")
    (tmp_path / "b.txt").write_text("")
    (tmp_path / "c.txt").write_bytes(b"\xef\xbb\xbf")
    (tmp_path / "d.txt").write_text("x\n\n\n\ny")
    found = tokenize(*sorted(tmp_path.glob("*.*")), "--bytes", "--separator", "")
    assert found.tolist() == expected([*DOCUMENTS, " ", "x\n", "y"]).tolist()
    assert "23 documents, 6 empty ones skipped" in capsys.readouterr().out
    assert "23 documents" in manifest_of(tmp_path / "out")["source"]


# ---- What cannot be read -------------------------------------------------------------------------
@pytest.mark.parametrize("how", PACK)
@pytest.mark.parametrize("bad", [b"\xff", b"\xe4\xb8x", b"\xed\xa0\x80", b"\xe4\xb8"])
def test_not_utf8(refusal, tmp_path, monkeypatch, how, bad):
    """Also a character that the end of the file cuts off."""
    monkeypatch.setattr(tokenize_text, "CHUNK", 128)
    path = tmp_path / f"in.txt{how}"
    path.write_bytes(PACK[how]("na\u00efve \u4e2d ".encode() * 100 + bad))
    assert f"{path} cannot be read: it is no UTF-8: " in refusal(path, "--bytes")


@pytest.mark.parametrize("how", [".gz", ".zst"])
@pytest.mark.parametrize("fault", ["short", "half", "corrupt", "other", "garbage after"])
def test_broken_archives(refusal, tmp_path, how, fault):
    text = random.Random(0).randbytes(9000).hex().encode() * 20
    pack = zstandard.ZstdCompressor(write_checksum=True).compress if how == ".zst" else PACK[how]
    data, path = pack(text), tmp_path / f"in.txt{how}"
    broken = {
        "short": data[:-1], "half": data[: len(data) // 2], "other": b"text " * 10,
        "corrupt": data[:3000] + bytes([data[3000] ^ 255]) + data[3001:],
        "garbage after": data + b"garbage " * 10,
    }[fault]  # fmt: skip
    path.write_bytes(broken)
    assert f"{path} cannot be read: " in refusal(path, "--bytes")


@pytest.mark.parametrize("line, said", [
    (b"{", "no JSON"), (b'{"text": "a"} x', "no JSON"), (b"[" * 200_000, "no JSON"),
    (b'"text"', 'no string "text"'), (b'{"text": null}', 'no string "text"'),
])  # fmt: skip
def test_bad_lines_of_jsonl(refusal, tmp_path, line, said):
    lines = [as_jsonl(DOCUMENTS[:2]), line, as_jsonl(["a"])]
    (tmp_path / "in.jsonl").write_bytes(b"\n".join(lines))
    message = refusal(tmp_path / "in.jsonl")
    assert "in.jsonl cannot be read: line 4 " in message and said in message


@pytest.mark.parametrize("name, package", [
    ("in.txt.zst", "zstandard"), ("in.parquet", "pyarrow"),
])  # fmt: skip
def test_missing_packages(refusal, tmp_path, monkeypatch, name, package):
    for module in ("zstandard", "pyarrow", "pyarrow.parquet"):
        monkeypatch.setitem(sys.modules, module, None)
    (tmp_path / name).write_bytes(b"never read")
    (tmp_path / "before.txt").write_bytes(b"\xff")
    message = refusal(tmp_path / "before.txt", tmp_path / name)
    assert f"{name} needs the package {package}: " in message
    assert message.endswith(f"-m pip install {package}")


def test_no_vocabulary_and_no_network(tmp_path):
    """It is looked for before anything is read."""
    (tmp_path / "in.txt").write_bytes(b"\xff")
    closed = dict.fromkeys(["http_proxy", "https_proxy", "HTTPS_PROXY"], "http://127.0.0.1:9")
    env = {k: v for k, v in os.environ.items() if k.lower() != "no_proxy"}
    env |= {"TIKTOKEN_CACHE_DIR": str(tmp_path / "cache"), **closed}
    argv = command(tmp_path / "in.txt", "--out", tmp_path / "out")
    done = subprocess.run(argv, capture_output=True, text=True, timeout=60, env=env)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (1, "", 1)
    assert all(said in done.stderr for said in ("GPT-2's vocabulary (ProxyError)", "--bytes"))
    assert not (tmp_path / "out").exists()


# ---- Shards --------------------------------------------------------------------------------------
def manifest_of(out):
    return json.loads((out / "MANIFEST.json").read_bytes())


def test_manifest_and_report(tokenize, tmp_path, capsys):
    (tmp_path / "a.jsonl").write_bytes(as_jsonl(DOCUMENTS))
    (tmp_path / "b.txt.gz").write_bytes(gzip.compress(prose(5000).encode()))
    paths, out = [tmp_path / "a.jsonl", tmp_path / "b.txt.gz"], tmp_path / "out"
    tokenize(*paths, "--shard_tokens", "900")
    said, manifest = capsys.readouterr().out, manifest_of(out)
    size = sum(path.stat().st_size for path in paths)
    assert manifest["source"] == (
        f"GPT-2 BPE by tiktoken {tiktoken.__version__} of 2 files, 21 documents, {size} bytes"
    )
    assert (manifest["vocab"], manifest["eot"]) == (50257, EOT)
    assert sorted([*manifest["files"], "MANIFEST.json"]) == left_in(out)
    for name, row in manifest["files"].items():
        shard = shards.inspect(out / name, EOT)
        assert row == {key: shard[key] for key in ("size", "sha256", "documents")}
        counts = f"tokens:{shard['tokens']} documents:{shard['documents']}"
        assert f"{name} {counts} sha256:{shard['sha256'][:16]}" in said
    assert "21 documents; train on them:" in said
    argv = said.splitlines()[-1].split()
    assert argv[0] == "./run.sh"
    preset, c = train_gpt.parse_config(argv[1:])
    assert (preset, c.data, c.vocab, c.eot) == ("tiny", str(out), 50257, EOT)


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
    assert list(map(len, read_shards(tmp_path / "out"))) == sizes
    assert size + 1 == sum(sizes) + dropped
    assert ("dropped the last token" in capsys.readouterr().out) == bool(dropped)


def test_the_whole_of_the_records_validation_is_the_default(monkeypatch):
    """And two more: one for the last target, one since a step is taken only while more are left."""
    assert tokenize_text.VAL_TOKENS == train_gpt.PRESETS["record"].val_tokens + 2
    monkeypatch.setattr(sys, "argv", ["tokenize_text.py", "in.txt", "--out", "out"])
    args = tokenize_text.parse()
    assert (args.shard_tokens, args.val_tokens, args.bytes) == (10**8, None, False)


@pytest.mark.parametrize("argv, size", [
    ([], 0), ([], 2), (["--val_tokens", 999], 999), (["--val_tokens", 1000], 999),
])  # fmt: skip
def test_too_little_text(refusal, tmp_path, argv, size):
    (tmp_path / "in.txt").write_text("x" * size)
    message = refusal(tmp_path / "in.txt", "--bytes", *argv)
    assert f"{size + (size > 0)} tokens are too few for {argv[1] if argv else 2} of" in message


@pytest.mark.parametrize("argv", [
    [], ["--val_tokens", "1"], ["--shard_tokens", "2147483648"], ["--workers", "0"],
    ["--separator", "a\nb"],
])  # fmt: skip
def test_bad_command_lines(monkeypatch, tmp_path, capsys, argv):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "in.txt").write_text("text " * 100)
    out = ["--out", "out"] if argv else []
    monkeypatch.setattr(sys, "argv", ["tokenize_text.py", "in.txt", *out, *argv])
    with pytest.raises(SystemExit) as stopped:
        tokenize_text.main()
    assert stopped.value.code == 2 and "error: " in capsys.readouterr().err
    assert left_in(tmp_path) == ["in.txt"]


# ---- All or nothing ------------------------------------------------------------------------------
@pytest.mark.parametrize("name", ["x_val_000000.bin", "other.bin", "MANIFEST.json"])
def test_a_used_folder_is_refused(tokenize, tmp_path, monkeypatch, name):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / name).write_bytes(b"kept")
    monkeypatch.setattr(tokenize_text, "find", lambda paths: pytest.fail("looked for input first"))
    with pytest.raises(SystemExit, match=f"{name} is there already: delete it, or"):
        tokenize(tmp_path / "nowhere.txt")
    assert left_in(tmp_path / "out") == [name] and (tmp_path / "out" / name).read_bytes() == b"kept"


def test_two_at_once_make_one_set(tmp_path):
    (tmp_path / "in.txt").write_text("text " * 1_000_000)
    argv = command(tmp_path / "in.txt", "--out", tmp_path / "out", "--bytes", "--val_tokens", 9)
    both = [subprocess.Popen(argv, stderr=subprocess.PIPE, text=True) for _ in range(2)]
    said = [process.communicate(timeout=60)[1] for process in both]
    assert sorted(process.returncode for process in both) == [0, 1]
    assert "".join(said).count("is there already") == 1 == "".join(said).count("\n")
    assert list(map(len, read_shards(tmp_path / "out"))) == [9, 5_000_001 - 9]


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
    assert moved[:4] == [*trains, "MANIFEST.json", "text_val_000000.bin"]


STEPS = ["--bytes", "--val_tokens", 10, "--shard_tokens", 100_000]


def test_disk_full(tmp_path):
    """A limit on the size of a file fails as a full disk does: at the second shard."""
    (tmp_path / "in.txt").write_text("text " * 100_000)
    argv = command(tmp_path / "in.txt", "--out", tmp_path / "out", *STEPS)
    full = ["bash", "-c", 'ulimit -f 100; exec "$@"', "-", *argv]
    done = subprocess.run(full, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (1, "", 1)
    assert done.stderr.startswith(f"tokenize_text.py: {tmp_path / 'out'}: File too large: see to")
    assert left_in(tmp_path / "out") == []


@pytest.mark.parametrize("by_bytes", [True, False])
@pytest.mark.parametrize("kill", [signal.SIGINT, signal.SIGKILL])
def test_it_is_stopped(tmp_path, tokenize, kill, by_bytes):
    (tmp_path / "in.txt").write_text("text " * 10**7)
    # A shell makes its background jobs ignore Ctrl-C, and these tests may run in one.
    before, out = signal.signal(signal.SIGINT, signal.default_int_handler), tmp_path / "out"
    argv = command(tmp_path / "in.txt", "--out", out, *STEPS[not by_bytes :])
    process = subprocess.Popen(argv, stdout=-1, stderr=-1, text=True)
    signal.signal(signal.SIGINT, before)
    deadline = time.monotonic() + 30
    while not list(out.glob(".part-*/text_train_000003.bin")):
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.01)
    process.send_signal(kill)
    started, said = time.monotonic(), process.communicate(timeout=30)
    assert time.monotonic() - started < 5
    if kill == signal.SIGINT:
        line = "tokenize_text.py: stopped by Ctrl-C: run it again for the shards\n"
        assert (process.returncode, *said) == (130, "", line) and left_in(out) == []
    (tmp_path / "in.txt").write_text(DOCUMENTS[0])  # what was left is no hindrance
    assert len(tokenize(tmp_path / "in.txt", "--bytes")) == len(DOCUMENTS[0]) + 1
    assert left_in(out) == ["MANIFEST.json", "text_train_000001.bin", "text_val_000000.bin"]
