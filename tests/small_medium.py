"""A narrow model with layers of the preset medium, for tests."""

import dataclasses

import train_gpt
from tests.tools import FLOAT32
from train_gpt import Layer

MEDIUM = train_gpt.PRESETS["medium"]
# The layers by their numbers in the preset. PLACE has the new numbers of those that others name, or
# of a layer in their place, and TABLE those of the value tables.
KEPT = (5, 11, 12, 15)
PLACE = {2: 0, 4: 0, 11: 1, 14: 2}
TABLE = {0: 0, 1: 1, 4: 2}


def renumbered(name: str) -> str:
    """The stream of a small model, by its name in the preset."""
    number = name.removeprefix("layer")
    return f"layer{PLACE[int(number)]}" if number.isdigit() else name


def small_layer(layer: Layer) -> Layer:
    """A layer of the preset, as it is in a model of the layers in KEPT."""
    return dataclasses.replace(
        layer,
        value_table=TABLE.get(layer.value_table),
        attend_to=PLACE.get(layer.attend_to),
        skip_from=PLACE.get(layer.skip_from),
        mudd=tuple(renumbered(name) for name in layer.mudd),
    )


# A narrow model. Windows are those of the longest stage, a 32nd as long.
LONGEST = MEDIUM.stages[-2]
STAGE = dataclasses.replace(
    LONGEST, steps=3, tokens=512, short=LONGEST.short // 32, long=LONGEST.long // 32, max_doc=0
)
SMALL = dataclasses.replace(
    MEDIUM, layers=tuple(small_layer(MEDIUM.layers[i]) for i in KEPT), stages=(STAGE,),
    mudd_head=tuple((renumbered(name), start) for name, start in MEDIUM.mudd_head),
    D=64, H=4, F=128, R=8, vocab=257, eot=256, bigrams=512, adam_every=1, ngram_capacity=1.0,
    head_chunk=64, dc_window=12, attention="band", val_T=64, val_tokens=512, seed=3, **FLOAT32,
)  # fmt: skip
