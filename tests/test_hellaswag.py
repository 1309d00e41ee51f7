"""evals/hellaswag.py: losses against rows computed one at a time."""

import dataclasses
import json
import re
import sys
from types import SimpleNamespace

import cached_hellaswag
import hellaswag
import jax
import numpy as np
import pytest
import shards
import weights

import train_gpt
from tests.test_export import TRAIN
from tests.tools import PHRASE, bank_matrices, ngram_rows

ENCODE = shards.coder(257, 256).encode
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


@pytest.fixture(scope="module")
def its(trained, tmp_path_factory):
    """A file of EXAMPLES, and weights that know the phrase. Batches are small."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(hellaswag, "TOKENS", 1024)  # so that the examples make several batches
        patch.setattr(hellaswag, "CHUNK", 128)
        file = tmp_path_factory.mktemp("hellaswag") / "val.jsonl"
        file.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
        (path,) = trained.glob("logs/*.npz")
        w = weights.open_weights(path, TRAIN)
        w = w._replace(c=dataclasses.replace(w.c, pointer=0))  # so that the head's padding counts
        yield SimpleNamespace(file=file, w=w)


def sums_by_hand(w: weights.Weights) -> list[list[float]]:
    """The endings' sums of losses, computed one row at a time, without padding of the head."""
    whole = {k: jax.device_put(x) for k, x in w.arrays.items()}
    whole |= {k: bank_matrices(k, whole[k], w.c) for k in ("qk", "vo", "mlp")}

    @jax.jit
    def stream(inputs):
        rows = ngram_rows(whole, inputs, w.c)
        return train_gpt.norm(train_gpt.forward(rows, inputs, w.c, w.stage))

    def loss(ending):
        row = f"{CONTEXT} {ending}".encode()
        begin = len(CONTEXT)
        inputs = np.zeros((1, 128), np.int32)  # what follows a row has no effect on it
        inputs[0, : len(row)] = [*row]
        z = np.asarray(stream(inputs))[0, : len(row) - 1].astype("f8") @ w.arrays["head"][:257].T
        z = 23 / (1 + np.exp(-(z + 5) / 7.5))[begin - 1 :]  # logits of the ending
        log_p = z - np.log(np.exp(z).sum(axis=1, keepdims=True))
        return -sum(log_p[i, token] for i, token in enumerate(row[begin:]))

    return [[loss(ending) for ending in e[0]] for e in EXAMPLES]


def test_losses_are_those_of_a_row_at_a_time_and_the_answers_are_known(its):
    examples = [*hellaswag.tokenize(cached_hellaswag.read(its.file), ENCODE)]
    # A row of 65 tokens has T = 64, longer ones are padded to T = 128.
    assert sorted(max(map(len, e[0])) for e in examples)[-3:] == [65, 66, 66]
    sums, right = hellaswag.score(its.w, examples)
    np.testing.assert_allclose(sums, sums_by_hand(its.w), rtol=0, atol=1e-4)
    np.testing.assert_array_equal(right, FOUND)


def call(monkeypatch, w, file):
    """Runs the tool with these opened weights."""
    monkeypatch.setattr(weights, "open_weights", lambda *_: w)
    monkeypatch.setattr(sys, "argv", ["hellaswag.py", "x.npz", "--file", str(file)])
    hellaswag.main()


def test_a_run_tells_scores(its, monkeypatch, capsys):
    monkeypatch.setattr(hellaswag, "score", lambda *_: (np.zeros((7, 4)), FOUND))
    call(monkeypatch, its.w, its.file)
    first, *rest = capsys.readouterr().out.splitlines()
    assert re.fullmatch(rf"HellaSwag of {its.w.path}: 7 examples in \d+\.\d s", first)
    assert rest == ["acc      57.14% +- 18.70% (standard error), 4 of 7",
                    "acc_norm 71.43% +- 17.07% (standard error), 5 of 7",
                    "tokens are bytes, so no other figures can be compared with these"]  # fmt: skip


def test_weights_with_nan_get_no_score(its, monkeypatch, capsys):
    """Where all losses are NaN, the first ending would be taken, and its share be called acc."""
    w = its.w._replace(arrays=its.w.arrays | {"head": its.w.arrays["head"].copy()})
    w.arrays["head"][5] = np.nan
    with pytest.raises(SystemExit, match="2"):
        call(monkeypatch, w, its.file)
    assert "computes numbers that are not finite" in capsys.readouterr().err
