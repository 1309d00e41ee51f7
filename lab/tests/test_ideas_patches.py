"""The patches of records/ideas/: each applies to train_gpt.py as it is, is short, trains alike on
one device and on eight, and does what it claims. The claims are in ideas_*_checks.py."""

import ast
import dataclasses
import functools
import importlib
import itertools
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import idea
import jax
import numpy as np
import pytest

import train_gpt
from lab.tests.tools import import_source, train
from tests.tools import FLOAT32, ROOT

PATCHES = idea.shelf()
README = (idea.SHELF / "README.md").read_text(encoding="utf-8")
MOST_LINES = 80  # added and removed
MOST_LINES_OF_KERNELS = 300


@functools.cache
def changed(name: str) -> bytes:
    """train_gpt.py with one patch."""
    return idea.apply(idea.TRAINER.read_bytes(), [PATCHES[name]])


@functools.cache
def load(name: str) -> ModuleType:
    """Imports train_gpt.py with a patch."""
    return import_source(changed(name).decode(), f"with_{name}")


@pytest.mark.parametrize("name", PATCHES)
def test_a_patch_applies_is_short_and_says_what_it_is(name, tmp_path):
    ast.parse(changed(name))
    text = PATCHES[name].read_text(encoding="utf-8")
    lines = re.findall(r"^[+-](?!\+\+ |-- ).*", text, re.M)
    most = MOST_LINES_OF_KERNELS if idea.base_of(PATCHES[name]) else MOST_LINES
    assert len(lines) <= most, f"{name} changes {len(lines)} lines"
    assert 1 <= len(idea.description(PATCHES[name])) <= 3
    assert name not in train_gpt.PRESETS and name.isidentifier()
    path = tmp_path / "train_gpt.py"
    path.write_bytes(changed(name))
    settings = ["--no-cache", "--config", ROOT / "pyproject.toml", path]
    for command in (["check", *settings], ["format", "--diff", *settings]):
        done = subprocess.run([sys.executable, "-m", "ruff", *command], capture_output=True)
        assert not done.returncode, f"{name}: {done.stdout.decode()}"


def test_the_page_has_a_row_for_every_patch_and_states_which_pairs_do_not_combine():
    rows = re.findall(r"^\| `(\w+)`[:| ]", README.partition("## Kernels")[0], re.M)
    assert sorted(rows) == sorted(PATCHES)
    conflicts = []
    base = idea.TRAINER.read_bytes()
    for first, second in itertools.combinations(PATCHES, 2):
        both = idea.merge(changed(first), base, changed(second))
        if both is None:
            conflicts.append((first, second))
        else:
            ast.parse(both)
    assert sorted(re.findall(r"^- `(\w+)` and `(\w+)`", README, re.M)) == sorted(conflicts)


# ---- What a patch computes -----------------------------------------------------------------------
LAYERS = (
    "(Layer(SHORT, paired_heads=True, value_table=0),"
    " Layer(LONG, key_offset=True, head_gate=True, ngram=True, attend_to=0, new_gates=True))"
)
STAGES = "(Stage(3, 512, short=8, long=24, max_doc=0, lr=1.0, targets=(1.0, (0.5, 0.0))),)"
SMALL = FLOAT32 | dict(D=32, H=2, F=64, R=8, vocab=257, eot=256, ngram_buckets=512, batch=8)
SMALL |= dict(microbatch=8, head_chunk=32, dc_window=12, val_T=64, val_tokens=512, prefixes="")
SMALL |= dict(ngram_capacity=1.0, attention="band", seed=5, adam_every=1)


def small(module: ModuleType, **changes):
    """A module's preset record, small and in float32. The layers are a patch's, if it has others
    than the record."""
    layers = eval(LAYERS, vars(module))
    mudd_head = (("input", 0.0), ("layer0", -0.5))
    if repr(module.RECORD_LAYERS) != repr(train_gpt.RECORD_LAYERS):
        layers = module.RECORD_LAYERS
        mudd_head = module.PRESETS["record"].mudd_head
    own = dict(layers=layers, mudd_head=mudd_head, stages=eval(STAGES, vars(module)))
    c = dataclasses.replace(module.PRESETS["record"], **SMALL | own | changes)
    return module.fit_kernels(jax.devices()[0], c)


@pytest.mark.parametrize("name", PATCHES)
def test_a_patch_trains_alike_on_1_and_8_devices(name):
    module = load(name)
    c = small(module, adam_every=module.PRESETS["record"].adam_every)
    losses, _ = train(module, c)
    assert len(losses) == 3 and losses[2] < losses[0], losses
    np.testing.assert_allclose(train(module, c, devices=8)[0], losses, rtol=1e-5)


def checks() -> dict:
    """The functions check_NAME(module, c) of the files ideas_*_checks.py, by NAME."""
    found = {}
    for path in sorted(Path(__file__).parent.glob("ideas_*_checks.py")):
        module = importlib.import_module(f"lab.tests.{path.stem}")
        for name, function in vars(module).items():
            if name.startswith("check_"):
                found[name.removeprefix("check_")] = function
    return found


CHECKS = checks()


@pytest.mark.parametrize("name", PATCHES)
def test_a_patch_does_what_it_claims(name):
    module = load(name)
    CHECKS[name](module, small(module))
