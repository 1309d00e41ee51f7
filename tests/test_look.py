"""evals/look.py: the numbers of a run's page, and its text."""

import dataclasses
import html
import json
import re
from types import SimpleNamespace

import look
import loss
import numpy as np
import pytest
import runs
import weights

import train_gpt
from tests.test_export import TRAIN, save
from tests.tools import write_shard
from train_gpt import LONG, SHORT, Layer, Stage

LOG = weights.ROOT / "records/other/example/2026-11-25T15-13-11_917ae0e6.txt"  # a whole run of tiny
LINE = b"<b>&amp;\xffif (a)\n\tx = [1, 2]</script>\x1b\n"
C = dataclasses.replace(
    train_gpt.PRESETS["tiny"], stages=(Stage(1, 512, short=8, long=24, max_doc=0, lr=1.0),),
    D=32, H=4, F=64, ngram_buckets=512, head_chunk=32, val_T=64, val_tokens=1024, batch=8,
    layers=(Layer(SHORT, ngram=True), Layer(LONG, paired_heads=True)),
)  # fmt: skip


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A model with random weights, a text's tokens, what look.read() finds in it, its page, and the
    JSON in it, which page.js reads."""
    folder = tmp_path_factory.mktemp("page")
    save(folder / "a.npz", C)
    w = weights.open_weights(folder / "a.npz", TRAIN)
    w.arrays["head"][w.c.vocab] *= 20  # copying counts
    shard = write_shard(folder / "x_val_000000.bin", [256, *LINE * 3, 256, *LINE * 3])
    tokens = next(w.code.read_batches([w.code.open_shard(shard)], [(2, 64, 0)], w.c))
    reading = look.read(w, tokens)
    out = folder / "page.html"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(look, "read", lambda *_: reading)
        patch.setattr(look.sample, "continue_text", lambda *_: "a </pre>\x1b sample")
        look.write(out, w, runs.read(LOG), tokens, "a <text>")
    page = out.read_text()
    data = json.loads(re.search(r'<script type="\S+" id="data">(.*)</script>', page)[1])
    return SimpleNamespace(w=w, shard=shard, tokens=tokens, reading=reading, page=page, data=data)


def test_losses_are_those_that_loss_prints(made):
    """And without n-grams, those of weights that have none; probabilities agree with them."""
    w, r = made.w, made.reading
    stage = w.c.stages[w.stage]
    shard = weights.val_shard(w, made.shard, 64)
    tokens, losses, alone = loss.measure(w, shard, stage.short, stage.long, 64, 2)
    np.testing.assert_array_equal(made.tokens, tokens)
    np.testing.assert_allclose(r.loss, losses, atol=1e-5)
    np.testing.assert_allclose(r.loss_without_copy, alone, atol=1e-5)
    page_losses = [sequence["loss"] for sequence in made.data["sequences"]]
    assert abs(np.mean(page_losses) - losses.mean(dtype="f8")) < 1e-5
    assert f"{losses.mean(dtype='f8'):.4f} nats" in made.page
    no_rows = w._replace(arrays=w.arrays | {"ngram": 0 * w.arrays["ngram"]})
    outputs, *_ = look.run_model(no_rows, made.tokens)
    np.testing.assert_allclose(r.loss_without_ngrams, outputs["loss"], atol=1e-5)
    for other in r.loss_without_copy, r.loss_without_ngrams:
        assert np.abs(other - r.loss).max() > 0.1
    is_next = r.likely == made.tokens[:, 1:, None]
    is_likely = is_next.any(axis=-1)
    assert np.all(np.diff(r.p) <= 0) and np.all(r.p.sum(axis=-1) < 1) and r.p.min() > 0
    np.testing.assert_allclose(r.p[is_next], np.exp(-r.loss[is_likely]), rtol=3e-2)
    assert np.all(np.exp(-r.loss[~is_likely]) <= 1.03 * r.p[~is_likely][:, -1])


def test_attention_is_that_of_tokens_within_the_window(made):
    """Positions 2 t and 2 t + 1 are token t of paired heads."""
    T = 64
    back = np.arange(T)[:, None] - np.arange(T)
    assert np.all(made.reading.reads[:, (back < 0) | (back > 24)] == 0)
    np.testing.assert_allclose(made.reading.reads.sum(axis=-1), 1, rtol=1e-5)
    q = np.stack([np.eye(2 * T, k=-d) for d in (6, 9)], axis=1)  # how far back each head attends
    k = np.broadcast_to(np.eye(2 * T)[:, None], q.shape)
    found = look.mean_attention(q, k, 12, 50.0, T)[20:] * back[20:]
    np.testing.assert_allclose(found.sum(axis=1), np.mean([3, 5, 3, 4]), atol=1e-4)


def test_the_copied_place_has_the_most_of_the_attention(made):
    """Of the places where the next token followed, if the pointer attends to any."""
    w = made.w

    def attention(x, whole, tokens):
        arguments = w, whole, x, tokens[:, :-1]
        return weights.predict_all(*arguments, lambda prediction, _: prediction.pointer)

    pointer_BTT = weights.runner(w, attention, 1)(made.tokens)
    seen = set()
    for b, sequence in enumerate(made.data["sequences"]):
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
    assert {(False, False), (True, False), (True, True)} <= seen


def test_the_text_is_escaped_and_complete(made):
    page = made.page
    assert page.count("</script>") == 2 and "<b>&amp;" not in page and "\x1b" not in page
    assert "a &lt;/pre&gt;\\x1b sample" in page and "a &lt;text&gt;" in page
    span = r'<span role="option" id="(\d)-(\d+)" class="t( l\d)?([^"]*)">([^<]*)'
    spans = re.findall(span, page)
    assert len(spans) == made.tokens.size
    shown = [html.unescape(text) for *_, text in spans]
    assert shown[:12] == ["end-of-text", *"<b>&amp;", "\\xff", "i", "f"]
    for sequence, number, color, _, _ in spans:
        if number != "0":  # nothing predicts the first
            nats = made.data["sequences"][int(sequence) - 1]["loss"][int(number) - 1]
            assert int(color[2:]) == sum(nats >= level for level in look.LEVELS)
    pieces = [b"a", b"\xe2", b"\x82", b"\xac", b"\xff", b"\n", b" \xc3", b"\xa9x", b"\x00"]
    assert look.token_texts(pieces) == ["a", "€", "⁺", "⁺", "\\xff", "\n", " é", "x", "\\x00"]
