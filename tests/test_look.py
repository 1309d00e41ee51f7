"""evals/look.py: the numbers in its pictures, for weights and attention that are known."""

import dataclasses
import json
import re
import runpy
import shutil
import sys
from types import ModuleType
from unittest import mock

import look
import loss
import numpy as np
import plot
import pytest
import runs
import weights
from calls import record_calls

import train_gpt
from tests.test_export import save
from tests.tools import text, write_shard
from train_gpt import LONG, SHORT, Layer, Stage

TRAIN = weights.ROOT / "train_gpt.py"
LOG = weights.ROOT / "records/other/example/2026-11-25T15-13-11_917ae0e6.txt"  # a whole run of tiny
SIZES = dict(D=32, H=4, F=64, bigrams=512, head_chunk=32, val_T=64, val_tokens=1024, batch=8)
STAGES = (Stage(1, 512, short=8, long=24, max_doc=0, lr=1.0),)
MODELS = [
    dataclasses.replace(train_gpt.PRESETS["tiny"], stages=STAGES, **SIZES),
    dataclasses.replace(
        train_gpt.PRESETS["tiny"], stages=STAGES, **SIZES | {"D": 64}, R=8,
        layers=(
            Layer(SHORT, paired_heads=True, xsa=True, bigram=True, value_table=0),
            Layer(LONG, key_offset=True, key_start=True, head_gate=True, new_gates=True),
            Layer(None, skip_from=0, x0=False, bigram=True),
            Layer(LONG, key_offset=True, head_gate=True, dc=True, value_table=1, attend_to=1,
                  x0=False, bigram=True, mudd=("input", "layer1")),
        ),
        mudd_head=(("input", 0.0), ("layer1", 0.0), ("layer2", 0.0), ("value0", 0.0)),
    ),
]  # fmt: skip
# Gates that vary over tokens. Other outputs of nets are constant: only their biases are not 0.
VARY = "gate_head", "value_gates"


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A folder, and for each of two models its random weights and what look.observe() returns."""
    folder = tmp_path_factory.mktemp("look")
    found = []
    for name, n in dict(x_train=6000, x_val=2000, y_val=256, z_val=300).items():
        (folder / name[0]).mkdir(exist_ok=True)
        write_shard(folder / f"{name[0]}/{name}_000000.bin", text(n) + 200 * (name == "z_val"))
    for number, c in enumerate(MODELS):
        save(folder / f"{number}.npz", dataclasses.replace(c, data=str(folder / "x")))
        w = weights.open_weights(folder / f"{number}.npz", TRAIN)
        for net, outputs in w.code.nets(w.c).items():
            names = [name for name, start in outputs.items() for _ in start]
            vary = np.array([name.endswith(".head") for name in names])
            w.arrays[f"{net}.w2"][~vary] = 0
        if number:
            w.arrays["mudd_head.b2"][:] = 0
        w.arrays["mlp_lambdas"][-1] = (3, 0)
        w = w._replace(c=dataclasses.replace(w.c, compute="float32"))
        found.append((w, *look.observe(w, look.text(w, folder / "x"))))
    return folder, *found


@pytest.fixture
def drawn(monkeypatch, tmp_path):
    """Calls a drawing function of look.py, and returns its figure."""

    def draw(function, *given):
        saved = []
        monkeypatch.setattr(look, "save", lambda figure, out: saved.append(figure))
        function(tmp_path, *given)
        return saved[0]

    return draw


def test_reach_of_attention_that_is_known():
    even = np.zeros((1, 32, 1, 8))  # q and k that attend to all keys alike
    t = np.arange(32)
    late = t[None] >= 20
    for far, keys in (late, 17), (t[None] == 4, 5):  # a window that is full, and one that is not
        p = look.attended(even, even, 16, 1.0, far)
        np.testing.assert_allclose(p, [[1 / keys] * keys + [0] * (32 - keys)], rtol=1e-6)
    # Positions, how far back each head attends, the window, the reaches in tokens.
    known = [
        (32, [0, 3, 12], 12, [0, 3, 12]),
        (32, [12], 11, [5.5]),  # the key is outside the window
        (64, [6, 9], 12, [3, 5, 3, 4]),  # positions 2 t and 2 t + 1 are token t of paired heads
    ]
    for P, backs, window, tokens in known:
        q = np.stack([np.eye(P, k=-d) for d in backs], axis=1)[None]
        k = np.broadcast_to(np.eye(P)[:, None], q.shape)
        np.testing.assert_allclose(look.attended(q, k, window, 50.0, late) @ t, tokens, atol=1e-4)


def test_reach_is_of_queries_far_into_documents_and_in_tokens(trained, monkeypatch, drawn):
    folder, _, (w, heads, *_) = trained
    asked = []
    bars = []
    lines = []
    p = np.zeros((4, 64))
    p[:, [2, 5, 10, 30]] = 0.4, 0.2, 0.35, 0.05

    def attended(*given):
        asked.append(given)
        return p

    monkeypatch.setattr(look, "attended", attended)
    for name, calls in ("bar", bars), ("axhline", lines):
        monkeypatch.setattr(look.plt.Axes, name, lambda _, *x, calls=calls, **__: calls.append(x))
    tokens = look.text(w, folder / "x")
    figure = drawn(look.draw_reach, w, tokens, heads)
    assert tokens.shape == (4, 65) and bars == [([0, 1, 3], [4, 24, 24])]
    t = np.arange(64)
    # How much a token has before it, in its sequence and in its document of 50 tokens.
    history = np.minimum(t, (64 * np.arange(4)[:, None] + t) % 50)
    least = int(np.quantile(history, 0.75))
    assert lines == [(least,)] and 20 < least < 49
    known = [(8, 0.1), (24, 0.1), (24, 0.1)]  # windows in positions, scales of scores
    for (window, scale), (_, _, *given, far) in zip(known, asked, strict=True):
        assert given == [window, np.float32(scale)] and np.all(far == (history >= least))
    far = [[*{*map(float, x.get_ydata().round(4))}] for x in figure.axes[0].lines]
    assert far == [[6.8], [5], [10]]  # mean, and within which half and 90 % lie


def dots_and_spans(ax, layer: int) -> tuple[np.ndarray, np.ndarray]:
    """The means that a panel shows for a layer from left to right, and the ends of their lines."""
    points = [line.get_xydata()[0] for line in ax.lines if line.get_marker() == "."]
    segments = [lines.get_segments()[0] for lines in ax.collections]
    means = [y for x, y in points if round(x) == layer]
    ends = [segment[:, 1] for segment in segments if round(segment[0, 0]) == layer]
    assert means, f"{ax.get_title()} has no layer {layer}"
    return np.array(means), np.array(ends).T


def names_in_parentheses(axes) -> dict:
    """Panels by the name in parentheses at the end of their titles."""
    return {re.search(r".+ \((\w+)\)$", ax.get_title())[1]: ax for ax in axes}


def test_of_a_copy_without_mudd_the_other_calls_are_recorded():
    code = ModuleType("copy")
    code.mlp = lambda x: 2 * x
    calls = []
    with record_calls(code, calls):
        code.mlp(3)
    assert [(call.name, call.result) for call in calls] == [("mlp", 6)]


def test_gates_are_the_outputs_of_nets_and_lambdas_as_they_are(trained, drawn):
    for w, _, gates, _ in trained[1:]:
        figure = drawn(look.draw_gates, w, gates)
        panels = names_in_parentheses(figure.axes)
        text = figure.get_supxlabel()
        for net, outputs in w.code.nets(w.c).items():
            scale = 0.1 if net.startswith("mudd") else w.arrays["gate_scale"]
            biases = scale * w.arrays[f"{net}.b2"]
            first = 0
            for output, start in outputs.items():
                name, layer = look.gate_place(net, output, len(w.c.layers) - 1)
                expected = biases[first : first + len(start)]
                first += len(start)
                if name == "gate_skip":  # one number: a line of text in the place of a panel
                    assert f"({name}, layer {layer}): {expected[0]:.3g}" in text
                    assert name not in panels
                    continue
                mean, ends = dots_and_spans(panels[name], layer)
                if name in VARY:
                    assert np.all((ends[0] < mean) & (mean < ends[1])) and len({*mean}) == w.c.H
                else:
                    np.testing.assert_allclose([mean, *ends], [expected] * 3, rtol=1e-5, atol=1e-7)
        for n, layer in enumerate(w.c.layers):
            if not layer.mudd:
                mean, _ = dots_and_spans(panels["mlp_lambdas"], n)
                np.testing.assert_array_equal(mean, w.arrays["mlp_lambdas"][n])
                if layer.window or layer.bigram:
                    mean, _ = dots_and_spans(panels["attn_lambdas"], n)
                    used = 2 if layer.window else 1
                    np.testing.assert_array_equal(mean, w.arrays["attn_lambdas"][n][:used])
            if layer.value_table is not None and not layer.mudd:
                mean, ends = dots_and_spans(panels["value_gates"], n)
                assert np.all((ends[0] < mean) & (mean < ends[1])) and len({*mean}) == w.c.H


def test_panels_name_what_their_numbers_belong_to(trained, drawn):
    """Every kind of gate has a title in words, and as many names as numbers."""
    w, _, gates, _ = trained[2]
    panels = names_in_parentheses(drawn(look.draw_gates, w, gates).axes)
    assert {name for name, _ in gates} <= look.TITLES.keys()
    legends = {}
    for name, ax in panels.items():
        if ax.get_legend():
            legends[name] = " ".join(x.get_text() for x in ax.get_legend().get_texts())
    assert legends == dict(
        attn_lambdas="x attention", mlp_lambdas="x MLP", vo_lambdas="value matrix output matrix",
        mudd_v="input layer1 x", mudd_x="input layer1 x", mudd_attn="x attention input bigram",
        mudd_mlp="x MLP", mudd_value="first half of the heads second half",
        mudd_head="input layer1 layer2 value0",
    )  # fmt: skip


def test_streams_are_all_terms_of_the_last_sums(trained):
    found = [f"{where}: {' '.join(x)}" for *_, sums in trained[1:] for where, x, _ in sums]
    assert " / ".join(found) == (
        "layer 5, v: w_v x value2 / layer 5, stream: layer4 attention x0 / layer 5, stream: x mlp "
        "/ layer 3, v: w_v x input layer1 layer2 value1 / layer 3, stream: "
        "layer2 input layer1 layer2 / layer 3, stream: x attention input bigram / layer 3, stream: "
        "x mlp / head: layer3 input layer1 layer2 value0"
    )  # fmt: skip
    for *_, sums in trained[1:]:
        for _, _, x in sums:
            assert abs(x.sum() - 1) < 1e-4 and len(x) > 1
        *_, (_, _, x) = sums
        np.testing.assert_allclose(x, [1, *[0] * (len(x) - 1)], atol=1e-5)


def test_singular_values_are_in_the_panels_of_their_matrices(trained, drawn):
    w = trained[1][0]
    flat = 3 * np.eye(64, 32)  # its second singular value is as large as the first
    ones = np.ones((64, 32))  # its second singular value is 0
    qk = [*np.split(flat[:32], 2), *np.split(ones[:32], 2)] * 5  # a matrix has half of the heads
    vo = [ones[:32], flat[:32]] * 5
    mlp = [flat, ones] * 6
    arrays = w.arrays | dict(qk=qk, vo=vo, mlp=mlp)
    figure = drawn(look.draw_singular, w._replace(arrays=arrays))
    panels = names_in_parentheses(figure.axes)
    curves = {name: [x.get_ydata() for x in ax.lines] for name, ax in panels.items()}
    second = {name: [round(float(y[1]), 4) for y in ys] for name, ys in curves.items()}
    styles = {(x.get_color(), x.get_marker()) for x in panels["fc"].lines}
    assert len(styles) == 6  # a layer can be told from the others
    assert second == dict(q=[1] * 5, k=[0] * 5, v=[0] * 5, o=[1] * 5, fc=[1] * 6, proj=[0] * 6)


def test_a_layer_without_attention_has_no_singular_values_of_it(trained, drawn):
    figure = drawn(look.draw_singular, trained[2][0])
    curves = {name: len(ax.lines) for name, ax in names_in_parentheses(figure.axes).items()}
    assert curves == dict(q=3, k=3, v=3, o=3, fc=4, proj=4)
    (legend,) = figure.legends
    assert [label.get_text() for label in legend.get_texts()] == ["0", "1", "2", "3"]


def test_a_layer_is_described_by_what_is_not_as_usual():
    first, _, third, last = MODELS[1].layers
    assert look.describe(first).split("\n") == [
        "short", "paired heads", "xsa", "bigram", "value table 0"
    ]  # fmt: skip
    assert look.describe(third).split("\n") == [
        "no attention", "no x0", "bigram", "adds layer 0"
    ]  # fmt: skip
    assert "attends to layer 1\nmudd" in look.describe(last)


def test_pictures_of_a_run_and_of_a_log_alone(trained, tmp_path, monkeypatch, capsys):
    labels = dict(
        loss="training steps", reach="window of the layer",
        gates="weight of the embedding x0 (gate_x0)", streams="head:  input",
        singular="second matrix of the MLP (proj)",
    )  # fmt: skip
    ours = trained[2][0].path
    of_weights = {name: label for name, label in labels.items() if name != "loss"}
    # With the arguments of the real function.
    sample = mock.create_autospec(look.page.sample.continue_text, return_value="a sample")
    monkeypatch.setattr(look.page.sample, "continue_text", sample)
    for path, names in (ours, of_weights), (LOG, ["loss"]):
        monkeypatch.setattr(sys, "argv", ["look.py", str(path), "--out", str(tmp_path / path.stem)])
        look.main()
        out = tmp_path / path.stem
        printed = [f"{out / name}.svg: {look.SHOWS[name]}\n" for name in names]
        files = {f"{name}.svg" for name in names}
        if path == ours:
            printed.append(f"{out}/page.html: {look.SHOWS['page']}\n")
            files.add("page.html")
            assert "a sample</pre>" in (out / "page.html").read_text()
        assert capsys.readouterr().out == "".join(printed)
        assert {file.name for file in out.iterdir()} == files
        for name in names:
            assert f"<!-- {labels[name]} -->" in (out / f"{name}.svg").read_text()


def test_losses_are_those_of_the_log(monkeypatch, tmp_path):
    figures = []
    monkeypatch.setattr(plot, "save", lambda figure, out: figures.append(figure))
    run = runs.read(LOG)
    plot.plot_log(run, tmp_path)
    plot.plot_log(run._replace(config=run.config | {"target": 0}), tmp_path)
    plot.plot_log(run._replace(config=run.config | {"preset": "record92"}), tmp_path)
    (ax,), (without_target,), (record92,) = (figure.axes for figure in figures)
    batches, smoothed, validations, target = ax.lines
    for line, kind in (batches, "train"), (validations, "val"):
        points = re.findall(rf"^step:(\d+)/\d+ {kind}_loss:(\S+)", LOG.read_text(), re.M)
        assert len(points) > 4 and np.array_equal(line.get_xydata(), np.float64(points))
    losses = batches.get_ydata()
    np.testing.assert_allclose(smoothed.get_ydata()[10], np.mean(losses[7:14]))
    assert [*target.get_ydata()] == [1.38, 1.38] and len(without_target.lines) == 3
    assert ax.get_ylabel() == "loss, nats per byte, logarithmic scale"
    assert "training loss, of one batch" == batches.get_label()
    assert "over the candidates" in record92.lines[0].get_label()


def test_a_dollar_in_the_name_of_weights_is_no_formula(tmp_path):
    """In the title of loss.py's picture."""
    rows = np.array([[1, 1, 4, 2.5, 0.1], [2, 2, 4, 2, 0.1]])
    loss.draw(rows, "a$x_{$", "byte", tmp_path / "loss")
    assert "<!-- a$x_{$ -->" in (tmp_path / "loss.svg").read_text()


def test_what_is_bad_or_missing_is_told_in_a_line(trained, monkeypatch, capsys):
    folder, (w, *_), _ = trained
    shutil.copy(w.path, folder / "best")
    shutil.copy(LOG, folder / "cut.txt")
    (folder / "cut.npz").write_bytes(w.path.read_bytes()[:9999])
    with open(folder / "3.state", "wb") as file:
        np.savez(file, facts=json.dumps(dict(command="./run.sh tiny")))
    for argv, message in {
        f"{folder}/cut.npz": "but the beginning of a file that was cut off",
        f"{folder}/3.state": "is a checkpoint, which only sample and loss read; this makes weights",
        f"{folder}/best --data {folder}/none": "no such file or folder: ",
        f"{folder}/x/x_val_000000.bin": "is no log of a run: it has no line of 100 =",
        f"{folder}/none.npz": "there is no file ",
        f"{folder}": "is a folder: name a run's weights in it, *.npz, or its log",
        f"{w.path} --text {folder}/none": "none: No such file or directory",
        f"{w.path} --text {folder}/best --data {folder}/x": "give --data or --text, not both",
        f"{LOG} --text {folder}/best": "beside it, so no model can read ",
        f"{w.path} --data {folder}/none": "no such file or folder: ",
        f"{w.path} --data {folder}/y": "y/y_val_000000.bin has 256 tokens, not 257: name a longer",
        f"{w.path} --data {folder}/z": "z/z_val_000000.bin has token 456, but the model knows 257",
        f"{w.path} --out {w.path}": ".npz is a file, but a folder belongs there: choose another",
    }.items():
        monkeypatch.setattr(sys, "argv", ["look.py", *argv.split()])
        with pytest.raises(SystemExit, match="^2$"):
            runpy.run_path(look.__file__, run_name="__main__")
        out, err = capsys.readouterr()
        assert (out, err[:9], err.count("\n")) == ("", "look.py: ", 1) and message in err
    assert [*folder.glob("*_look")] == []


def test_a_picture_is_reported_before_the_next_one_is_drawn(trained, tmp_path, monkeypatch, capsys):
    shutil.copy(trained[1][0].path, tmp_path / "a.npz")
    shutil.copy(LOG, tmp_path / "a.txt")
    monkeypatch.setattr(look, "observe", lambda *_: [][0])
    monkeypatch.setattr(sys, "argv", ["look.py", str(tmp_path / "a.npz")])
    with pytest.raises(IndexError):
        look.main()
    assert capsys.readouterr().out == f"{tmp_path}/a_look/loss.svg: {look.SHOWS['loss']}\n"
