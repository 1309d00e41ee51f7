"""evals/page.py: the numbers of a run's page, its text, and what a browser shows of them."""

import dataclasses
import html
import json
import re
import shutil
import subprocess
from types import SimpleNamespace

import look
import loss
import numpy as np
import page
import pytest
import runs
import weights

import train_gpt
from tests.test_export import save
from tests.test_look import LOG, MODELS, TRAIN
from tests.tools import write_shard
from train_gpt import LONG, SHORT, Layer

LINE = b'if a <= b: return "</script><b>&amp;{{data}}"\n\t\xff'
TEXT = 3 * LINE + "é€\n".encode()
FOLDER = page.FOLDER
# A model that does not copy, whose tokens are longer than a byte, and whose last heads are paired.
PLAIN = dataclasses.replace(
    MODELS[0], pointer=0, vocab=300, eot=299, layers=(Layer(SHORT), Layer(LONG, paired_heads=True))
)
WORDS = SimpleNamespace(
    encode=lambda text: [len(word) for word in text.split()],
    piece=lambda token: b" w%d" % token if token % 2 else bytes([0xC3]),
)


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A model with random weights, a text's tokens, what page.read() finds in it, and its page."""
    folder = tmp_path_factory.mktemp("page")
    save(folder / "a.npz", MODELS[0])
    w = weights.open_weights(folder / "a.npz", TRAIN)
    w.arrays["head"][w.c.vocab] *= 20  # copying counts
    shard = write_shard(folder / "x_val_000000.bin", [256, *TEXT, 256, *TEXT])
    tokens = look.text(w, shard)[:2]
    reading = page.read(w, tokens)
    out = folder / "page.html"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(page, "read", lambda *_: reading)
        patch.setattr(page.sample, "continue_text", lambda *_, **__: "a </pre>\x1b sample")
        page.write(out, w, runs.read(LOG), tokens, "a <text>")
    return SimpleNamespace(w=w, shard=shard, tokens=tokens, reading=reading, out=out)


@pytest.fixture(scope="module")
def data(made):
    """What page.js reads."""
    return data_of(made.out.read_text())


def data_of(content: str) -> dict:
    """The JSON in a page."""
    return json.loads(re.search(r'<script type="\S+" id="data">(.*)</script>', content)[1])


def test_losses_are_those_that_loss_prints(made, data):
    stage = made.w.c.stages[made.w.stage]
    measure = [weights.val_shard(made.w, made.shard, 64), stage.short, stage.long, 64, 2]
    tokens, losses, alone = loss.measure(made.w, *measure)
    np.testing.assert_array_equal(made.tokens, tokens)
    np.testing.assert_allclose(made.reading.loss, losses, atol=1e-5)
    np.testing.assert_allclose(made.reading.loss_without_copy, alone, atol=1e-5)
    assert abs(made.reading.loss.mean(dtype="f8") - losses.mean(dtype="f8")) < 1e-5
    page_losses = [sequence["loss"] for sequence in data["sequences"]]
    assert abs(np.mean(page_losses) - losses.mean(dtype="f8")) < 1e-5
    assert f"{losses.mean(dtype='f8'):.4f} nats" in made.out.read_text()


def test_a_token_has_one_probability(made, data):
    """Among the likeliest tokens, and from its loss, both computed in bfloat16."""
    for sequence, row in zip(data["sequences"], made.tokens[:, 1:].tolist(), strict=True):
        for t, token in enumerate(row):
            if token in sequence["likely"][t]:
                p = sequence["p"][t][sequence["likely"][t].index(token)]
                assert p == pytest.approx(np.exp(-sequence["loss"][t]), rel=3e-2)


def test_the_page_says_how_its_sample_was_made(made):
    content = made.out.read_text()
    assert "no run of 16 tokens" in content and "the likeliest of 6 candidates" in content
    assert "candidates" not in page.how_made(made.w._replace(c=PLAIN))


def test_without_parts_the_losses_are_those_of_weights_without_them(made):
    w = made.w
    sink = {"pointer_sink_bias": np.array([1e4], np.float32)}  # it takes all of the attention
    outputs, *_ = page.run_model(w._replace(arrays=w.arrays | sink), made.tokens)
    np.testing.assert_allclose(made.reading.loss_without_copy, outputs["loss"], atol=1e-5)
    no_rows = w._replace(arrays=w.arrays | {"bigram": 0 * w.arrays["bigram"]})
    outputs, *_ = page.run_model(no_rows, made.tokens)
    np.testing.assert_allclose(made.reading.loss_without_ngrams, outputs["loss"], atol=1e-5)
    for other in made.reading.loss_without_copy, made.reading.loss_without_ngrams:
        assert np.abs(other - made.reading.loss).max() > 0.1


def test_probabilities_are_of_the_likeliest_tokens(made):
    r = made.reading
    targets = made.tokens[:, 1:]
    assert np.all(np.diff(r.p) <= 0) and np.all(r.p.sum(axis=-1) < 1) and r.p.min() > 0
    is_next = r.likely == targets[..., None]
    is_likely = is_next.any(axis=-1)
    assert is_likely.any() and not is_likely.all()
    np.testing.assert_allclose(r.p[is_next], np.exp(-r.loss[is_likely]), rtol=3e-2)
    assert np.all(np.exp(-r.loss[~is_likely]) <= 1.03 * r.p[~is_likely][:, -1])


def test_attention_reads_what_the_window_shows(made):
    T = made.tokens.shape[1] - 1
    back = np.arange(T)[:, None] - np.arange(T)
    assert made.reading.layer == 5 and np.all(made.reading.reads[:, (back < 0) | (back > 24)] == 0)
    np.testing.assert_allclose(made.reading.reads.sum(axis=-1), 1, rtol=1e-5)


def test_the_copied_place_has_the_most_of_the_attention(made, data):
    """Of the places where the next token followed, if the pointer attends to any."""
    w = made.w

    def attention(x, whole, tokens):
        arguments = w, whole, x, tokens[:, :-1]
        return weights.predict_all(*arguments, lambda prediction, _: prediction.pointer)

    pointer_BTT = weights.runner(w, attention, 1)(made.tokens)
    seen = set()
    for b, sequence in enumerate(data["sequences"]):
        row = made.tokens[b].tolist()
        for t in range(len(row) - 1):
            start = max([0] + [i for i in range(t + 1) if row[i] == w.c.eot])
            places = [j + 1 for j in range(start, t)]
            right = [place for place in places if row[place] == row[t + 1]]
            found = sequence["from"][t]
            seen.add((bool(places), bool(right)))
            if not places:
                assert (found, sequence["length"][t]) == (-1, 0)
                continue
            shares = {place: pointer_BTT[b, t, place - 1] for place in right or places}
            assert found in shares and shares[found] >= max(shares.values()) * (1 - 1e-4)
            assert sequence["share"][t] == pytest.approx(shares[found], rel=1e-2)
            n = 0
            while n < w.c.pointer and found - 1 - n >= start and row[found - 1 - n] == row[t - n]:
                n += 1
            assert sequence["length"][t] == n
            seen.add(n)
    assert {(False, False), (True, False), (True, True), 0, w.c.pointer} <= seen


def test_a_model_that_does_not_copy(tmp_path, monkeypatch):
    save(tmp_path / "b.npz", PLAIN)
    w = weights.open_weights(tmp_path / "b.npz", TRAIN)
    monkeypatch.setattr(weights, "tokenizer", lambda w: WORDS)
    monkeypatch.setattr(page.sample, "continue_text", lambda *_, **__: "")
    (tmp_path / "text").write_text("a bc def " * 99)
    tokens, source = page.own_text(w, tmp_path / "text", 64)
    assert tokens.shape == (2, 65) and source == "the beginning of text"
    page.write(tmp_path / "page.html", w, None, tokens, source)
    content = (tmp_path / "page.html").read_text()
    found = data_of(content)
    assert found["copy"] == 0 and "from" not in found["sequences"][0]
    assert found["names"]["1"] == "\u2423w1" and found["names"]["2"] == "byte C3"
    assert "This model does not copy." in content and "<section hidden>" in content
    shares = np.array([sum(x) for sequence in found["sequences"] for x in sequence["shares"]])
    assert np.all((500 < shares) & (shares < 1005))  # of paired heads, in 1/1,000


def test_the_text_is_escaped_and_complete(made, data):
    content = made.out.read_text()
    assert content.count("</script>") == 2 and "<b>&amp;" not in content and "\x1b" not in content
    assert "a &lt;/pre&gt;\\x1b sample" in content and "a &lt;text&gt;" in content
    span = r'<span role="option" id="(\d)-(\d+)" class="t( l\d)?([^"]*)">([^<]*)'
    spans = re.findall(span, content)
    assert len(spans) == made.tokens.size
    shown = [html.unescape(text) for *_, text in spans]
    expected = ["end-of-text", *LINE[:-1].decode(), "\\xff", "i", "f"]
    assert shown[: len(expected)] == expected
    for sequence, number, color, _, _ in spans:
        if number == "0":  # nothing predicts it
            assert color == ""
        else:
            nats = data["sequences"][int(sequence) - 1]["loss"][int(number) - 1]
            assert int(color[2:]) == sum(nats >= level for level in page.LEVELS)


def test_tokens_that_are_parts_of_characters():
    pieces = [b"a", b"\xe2", b"\x82", b"\xac", b"\xff", b"\n", b" \xc3", b"\xa9x", b"\x00"]
    more = page.MORE
    assert page.token_texts(pieces) == ["a", "€", more, more, "\\xff", "\n", " é", "x", "\\x00"]
    pieces = b" the\n", b"\xe2\x82", b"\xff", b"\x07", b"\xc3\xa9"
    names = [page.token_name(piece) for piece in pieces]
    assert names == ["␣the↵", "bytes E2 82", "byte FF", "\\x07", "é"]
    assert page.visible("\u202eok") == "\\u202eok"


def test_an_own_text(made, tmp_path, capsys):
    path = tmp_path / "text"
    path.write_bytes(100 * b"\xff")
    tokens, source = page.own_text(made.w, path, 64)
    assert tokens.shape == (2, 51) and source == "text"
    assert tokens[0, 0] == 256 and tokens[1, 0] == tokens[0, -1] == 255
    plain = made.w._replace(c=PLAIN)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(weights, "tokenizer", lambda w: WORDS)
        for content, w, message in (
            (b"abc\xff", plain, "is not UTF-8: byte 3 is 0xFF; convert it"),
            (b"a", plain, "has 1 token, but a page needs at least 2: name a longer text"),
            (b"", plain, "has 0 tokens, but"),
        ):
            path.write_bytes(content)
            with pytest.raises(SystemExit):
                page.own_text(w, path, 64)
            assert message in capsys.readouterr().err
        path.write_bytes(b"a " + 3200 * "é".encode())  # cut within a character
        assert page.own_text(plain, path, 64)[0].tolist() == [[299, 1, 3199]]


def test_the_prompt_is_some_lines():
    piece = lambda token: bytes([token])
    of = lambda text: page.first_lines([256, *text], piece, 256)
    assert of(b"a\nb\nc\nd\n" + bytes(99)) == 7  # three lines
    assert of(b"a\nb\n" + bytes(99)) == 5
    assert of(bytes(119)) == 20  # no line ends in the first sixth
    assert of(b"a\n") == 2
    assert page.first_lines([256, 7, 256, *bytes(99)], piece, 256) == 2


def test_the_curve_has_all_losses_and_stages():
    run = runs.read(LOG)
    c = train_gpt.PRESETS["tiny"]
    svg = page.curve(run, SimpleNamespace(c=c, result={"target": 1.38}))
    assert svg.count('class="batch"') == len(run.training)
    assert svg.count('<circle class="validation"') == len(run.validations)
    assert svg.count('class="stage"') == len(c.stages) and svg.count('class="target"') == 1
    heights = [float(y) for y in re.findall(r'<circle class="validation" cx="\S+" cy="(\S+)"', svg)]
    order = np.argsort([v.loss for v in run.validations])
    assert np.all(np.diff(np.array(heights)[order]) < 0)
    assert page.curve(run._replace(training=[], validations=[]), None) == ""
    for low, high in (1.2, 6), (3.2, 11), (1.31, 1.36):
        assert 3 <= len(page.ticks(low, high)) <= 6 and low <= min(page.ticks(low, high))


def test_the_page_is_small_and_needs_nothing_else():
    """With as many tokens as there may be, and long ones."""
    rng = np.random.default_rng(0)
    B, T = 2, 1024
    sizes = dict(likely=(B, T, 5), p=(B, T, 5), reads=(B, T, T))
    arrays = {name: rng.uniform(0, 9, sizes.get(name, (B, T))) for name in page.Reading._fields}
    arrays["likely"] = rng.integers(0, 50000, (B, T, 5))
    arrays["copied"] = rng.integers(0, T, (B, T))
    arrays["length"] = rng.integers(0, 17, (B, T))
    reading = page.Reading(**arrays)._replace(layer=10)
    w = SimpleNamespace(c=dataclasses.replace(MODELS[0], vocab=50257, eot=50256))
    coder = SimpleNamespace(piece=lambda token: b" international")
    tokens = rng.integers(0, 50000, (B, T + 1))
    content = page.to_json(page.page_data(w, coder, tokens, reading))
    content += page.page_text(w, coder, tokens, reading)
    fixed = (FOLDER / "page.html").read_text() + (FOLDER / "page.js").read_text()
    assert len(content) + len(fixed) < 1_500_000
    assert not re.search(r"https?:|src=|url\(|@import|fetch\(|<link", fixed)
    assert (FOLDER / "page.js").read_text().count("\n") <= 150


# Points at a token, moves by keys, closes; then writes what the panel showed into the document.
EVENTS = """<script>
const seen = [];
const note = () => seen.push(
  [panel.className, active?.span.id, panel.innerText, lines.children.length]);
const key = (name) => text.dispatchEvent(new KeyboardEvent("keydown", {key: name, bubbles: true}));
const over = (id) => document.getElementById(id).dispatchEvent(
  new PointerEvent("pointerover", {pointerType: "mouse", bubbles: true}));
note();
over("1-%d"); note();
text.focus(); key("ArrowRight"); note();
over("1-3"); note();
key("Escape"); note();
document.getElementById("2-0").click(); note();
key("ArrowDown"); note();
key("ArrowUp"); note();
document.body.dataset.seen = JSON.stringify(seen);
</script>"""


@pytest.mark.skipif(not shutil.which("chromium"), reason="chromium is not installed")
def test_a_browser_shows_the_numbers(made, data, tmp_path):
    sequence = data["sequences"][0]
    t = int(np.argmax(sequence["length"][:60])) + 1  # a token with a long match
    path = tmp_path / "page.html"
    path.write_text(made.out.read_text() + EVENTS % t)
    flags = "--headless --no-sandbox --disable-gpu --no-first-run --disable-background-networking "
    flags += "--disable-component-update --disable-sync --virtual-time-budget=5000 --dump-dom"
    flags += f" --window-size=1200,900 --user-data-dir={tmp_path}/user {path.as_uri()}"
    command = ["chromium", *flags.split()]
    dom = subprocess.run(command, capture_output=True, text=True, timeout=120).stdout
    seen = json.loads(html.unescape(re.search('data-seen="([^"]*)"', dom)[1]))
    first, pointed, moved, still, closed, beginning, below, above = seen
    assert first[1] == f"1-{data['first']}" and pointed[1] == f"1-{t}"
    assert moved[1] == still[1] == f"1-{t + 1}"  # what a key chose stays
    assert closed[:2] == ["idle", None] and "nothing predicts" in beginning[2]
    assert above[1] == "2-0" and below[1].startswith("2-") and below[1] != "2-0"
    for (_, _, panel, lines), at in (pointed, t - 1), (moved, t):
        rows = re.sub(r"\s+", " ", panel)
        loss = sequence["loss"][at]
        assert f"loss {loss:.3f} nats, {loss / np.log(2):.3f} bits" in rows
        for token, p in zip(sequence["likely"][at], sequence["p"][at], strict=True):
            name = data["names"][str(token)]
            if token == sequence["ids"][at + 1]:
                p = np.exp(-loss)
            assert re.search(rf"{re.escape(name)} {percent(p)} %", rows), (name, rows)
        assert f"no n-grams {percent(np.exp(-sequence['bare'][at]))} %" in rows
        assert f"no copying {percent(np.exp(-sequence['alone'][at]))} %" in rows
        assert f"stood {at + 1 - sequence['from'][at]} tokens earlier" in rows and lines == 3
        index = sequence["reads"][at][0]
        name = data["names"][str(sequence["ids"][index])]
        assert f"{name}{at + 1 - index} back" in rows


def percent(p: float) -> str:
    """A probability as page.js writes it."""
    if 0 < p < 1e-5:
        return "< 0.001"
    return f"{float(f'{100 * p:.{3 if p > 0.1 else 2}g}'):g}"
