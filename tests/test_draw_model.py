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


def test_record92_has_narrow_heads_and_layers_of_fewer_and_more_parts(tmp_path):
    draw_model.draw(tmp_path / "92.svg", train_gpt.PRESETS["record92"])
    text, arrows = drawn(tmp_path / "92.svg")
    # The word MLP is in nine layers and once in the notes; layer 7 has none, and layer 8 has two.
    assert len(re.findall("^MLP$", text, re.M)) == 10 and "\n2 MLPs\n" in text
    assert len(re.findall("^no attention$", text, re.M)) == 4
    assert "narrow q and k · narrow v · value table 0 · exclusive" in text
    assert "paired heads" in text and "queries and keys have half of a head's channels" in text
    embeddings = {f"x0 to layer {i}" for i in (0, 1, 2, 4, 5, 7)}
    embeddings |= {f"bigram to layer {i}" for i in (1, 4, 5, 9, 10)}
    assert {name for name in arrows if name.startswith(("x0", "bigram"))} == embeddings
