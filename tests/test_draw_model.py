"""dev/draw_model.py draws every layer as it is, and the picture in the repository is of today."""

import re
from pathlib import Path

import draw_model

import train_gpt

# Layer 0 to 10 of the record, as train_gpt.py describes them.
RECORD = """\
layer 0: attention, short window: 384 tokens: paired heads
layer 1: attention, short window: 768 tokens: value table 0 · exclusive
layer 2: attention, short window: 384 tokens: paired heads · value table 1
layer 3: attention, long window: 2,560 tokens: key offset · exclusive · head gates
layer 4: attention, short window: 768 tokens: exclusive · new gates
layer 5: attention, short window: 384 tokens: paired heads
layer 6: no attention:
layer 7: attention, short window: 768 tokens: exclusive
layer 8: attention, short window: 768 tokens: value table 2
layer 9: attention, short window: 384 tokens: paired heads · value table 3
layer 10: attention, long window: 2,560 tokens: key offset · value table 4 · head gates · \
dynamic composition · MUDD"""


def drawn(file: Path) -> tuple[str, set[str]]:
    """The texts of a picture, a line each, and the names of its arrows."""
    svg = file.read_text()
    texts = re.findall(r"<text[^>]*>(.*?)</text>", svg)
    return "\n".join(texts).replace("&#x27;", "'"), set(
        re.findall(r'<g id="([^"]* layer \d+)"', svg)
    )


def test_the_picture_in_the_repository_has_every_layer_of_the_record():
    text, arrows = drawn(draw_model.ROOT / "dev/pictures/model.svg")
    layers = re.findall(r"^(layer \d+)\n(attention, .*|no attention)\n(?!MLP)?(.*)$", text, re.M)
    found = [": ".join(layer).replace(": MLP", ":") for layer in layers]
    assert "\n".join(found) == RECORD
    expected = {f"from layer {i}" for i in range(11)}
    expected |= {f"x0 to layer {i}" for i in (0, 1, 2, 3, 4, 5, 7, 8, 9)}
    expected |= {f"bigram to layer {i}" for i in (1, 2, 3, 4, 5, 7, 8, 9, 10)}
    expected |= {f"layer 7 to layer {i}" for i in (8, 9, 10)} | {"layer 3 to layer 6"}
    assert arrows == expected
    assert "input, layer 7, layer 9, value table 0, layer 3" in text
    assert "each token mixes the input and layer 7 into" in text


def test_it_is_what_the_layers_of_today_give(tmp_path):
    record, tiny = tmp_path / "record.svg", tmp_path / "tiny.svg"
    draw_model.draw(record, train_gpt.PRESETS["record"])
    assert drawn(record) == drawn(draw_model.ROOT / "dev/pictures/model.svg")
    draw_model.draw(tiny, train_gpt.PRESETS["tiny"])
    text, arrows = drawn(tiny)
    assert "key start" in text and "MUDD" not in text and "own mix" not in text
    assert {"layer 1 to layer 3", "layer 2 to layer 4", "layer 2 to layer 5"} <= arrows
