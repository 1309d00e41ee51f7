"""compile_tpu.py: what it compiles follows FITS, and its checks find what they are there for."""

import dataclasses

import compile_tpu
import fits
import jax
import jax.numpy as jnp
import pytest

import train_gpt
from tests.tools import MINI, make_mesh

COMPILED = compile_tpu.Compiled(text="", arguments_GB=1.0, temporaries_GB=2.0, seconds=60)


# ---- What is compiled ----------------------------------------------------------------------------
def test_the_configuration_is_what_a_run_on_that_chip_gets(monkeypatch):
    rows = (
        ({}, {1: 33.0, 8: 33.0}),
        ({"batch": 16, "head_chunk": 8192}, {1: 17.0, 8: 16.0}),
        ({"batch": 64, "head_chunk": 2048, "val_T": 32768}, {1: 16.0, 8: 8.0}),
    )
    monkeypatch.setitem(fits.ROWS, "record", rows)
    batches = {"v5e-8": 16, "v5e-1": 64, "v6e-8": 8, "v6e-1": 8}
    for name, chip in compile_tpu.CHIPS.items():
        c = compile_tpu.fitted_config(chip)
        assert c.batch == batches[name]
        assert (c.attention, c.head_forward, c.head_backward) == ("band", "bfloat16", "bfloat16")


def test_of_v5e_8_a_whole_run_is_compiled_and_of_others_what_needs_the_most_memory():
    run = {(p.kind, p.stage) for p in compile_tpu.programs("v5e-8")}
    steps = {(kind, stage) for kind in ("first", "second") for stage in range(4)}
    assert run == steps | {("val", stage) for stage in (0, 1, 2, 4)}
    for name in ("v5e-1", "v6e-8", "v6e-1"):
        kinds = [(p.kind, p.stage) for p in compile_tpu.programs(name)]
        assert kinds == [("second", 3), ("val", 4)]


# ---- Checks --------------------------------------------------------------------------------------
def all_pairs(q, k, v, window, scale, c):
    """train_gpt.attend() with a score for every pair of positions."""
    T = q.shape[1]
    distance = jnp.arange(T)[:, None] - jnp.arange(T)
    scores = scale * jnp.einsum("BiHK,BjHK->BHij", q, k)
    scores = jnp.where((0 <= distance) & (distance <= window), scores, -jnp.inf)
    return jnp.einsum("BHij,BjHK->BiHK", jax.nn.softmax(scores).astype(v.dtype), v)


@pytest.mark.parametrize("attend, found", [(train_gpt.attend, False), (all_pairs, True)])
def test_scores_of_all_pairs_are_found_in_what_is_compiled(attend, found, monkeypatch):
    monkeypatch.setattr(train_gpt, "attend", attend)
    c = dataclasses.replace(MINI, microbatch=1, val_T=256)
    text = train_gpt.compile_val_step(0, c, make_mesh(1)).as_text()
    assert bool(compile_tpu.pairs_of_positions(text, c.val_T, c)) == found


@pytest.mark.parametrize("axes, found", [
    ("1,6,4096,4096", True),
    ("24576,4096", True),
    ("16777216", True),
    ("6,32,128,4096", True),      # positions of queries are cut into bands, those of keys are not
    ("6,32,128,256", False),      # and now both
    ("4096,50304", False),        # logits
    ("377344,768", False),        # the bigram table
    ("32,4096,3072", False),      # activations of the MLP
])  # fmt: skip
def test_arrays_with_channels_or_the_vocabulary_are_no_scores(axes, found):
    c = compile_tpu.fitted_config(compile_tpu.CHIPS["v5e-8"])
    text = f"%a = bf16[{axes}]{{1,0:T(8,128)}} fusion(%b), calls=%c"
    assert compile_tpu.pairs_of_positions(text, 4096, c) == [axes] * found


def faults(name, text="", GB=0.0):
    """Faults of a chip's first program, were this its text and its memory."""
    c = compile_tpu.fitted_config(compile_tpu.CHIPS[name])
    return " ".join(compile_tpu.faults(compile_tpu.programs(name)[0], c, text, GB))


def test_memory_and_collectives_and_formats_of_the_head_have_limits():
    head = "%z = bf16[8,50304] convolution(%x, %w)\n%x = {0}[8,768] a(\n%w = {0}[50304,768] b(\n"
    assert faults("v5e-1", head.format("bf16") * 3) == ""
    assert "the head multiplies [('f8e4m3fn'" in faults("v5e-1", head.format("f8e4m3fn") * 3)
    assert "more than 0.9 of 16.9 GB" in faults("v5e-1", GB=15.3)
    gather = "%g = bf16[16] all-gather(%a), channel_id=1\n"
    assert "on a single chip" in faults("v5e-1", gather)
    found = faults("v5e-8", gather)
    for fault in ("1 arrays of 16 are gathered", "are reduce-scattered", "all-reduces []"):
        assert fault in found


# ---- The page ------------------------------------------------------------------------------------
def test_the_page_is_of_the_rows_of_fits_and_without_faults():
    text = compile_tpu.PAGE.read_text()
    missing = [name for name in compile_tpu.CHIPS if compile_tpu.heading(name) not in text]
    assert missing == [] and "FAIL" not in text, "python lab/compile_tpu.py renews it"


@pytest.fixture
def fake_compiler(monkeypatch, tmp_path):
    """No compiler is needed; returns the programs that it was asked for. The second one fails."""
    asked = []

    def compile_for_tpu(program, c, mesh):
        asked.append(program)
        if len(asked) == 2:
            raise KeyboardInterrupt
        return COMPILED

    chips = {name: compile_tpu.CHIPS[name] for name in ("v5e-1", "v6e-1")}
    monkeypatch.setattr(compile_tpu, "CHIPS", chips)
    monkeypatch.setattr(compile_tpu, "PAGE", tmp_path / "page.txt")
    monkeypatch.setattr(compile_tpu, "distributions", lambda name: [name])
    monkeypatch.setattr(compile_tpu, "version", lambda name: "0")
    monkeypatch.setattr(compile_tpu, "digest_line", lambda: "- sha256: 1")
    monkeypatch.setattr(compile_tpu, "make_mesh", lambda chip: make_mesh(chip.devices))
    monkeypatch.setattr(compile_tpu, "compile_for_tpu", compile_for_tpu)
    monkeypatch.setattr(train_gpt, "prefix_table", train_gpt.prefix_table)  # main() replaces it
    return asked


def test_an_interrupted_run_keeps_its_rows_and_the_next_one_compiles_the_rest(fake_compiler):
    with pytest.raises(KeyboardInterrupt):
        compile_tpu.main([])
    text = compile_tpu.PAGE.read_text()
    assert text.count("not compiled") == 3 and "v5e-1  second 3   6144         60" in text
    assert compile_tpu.main(["--only", "v6e-1"]) == 1  # an empty program fails the checks
    assert compile_tpu.main([]) == 1
    assert compile_tpu.PAGE.read_text().count("not compiled") == 0
    first, interrupted, *others = fake_compiler
    assert sorted(others) == sorted([interrupted, *compile_tpu.programs("v6e-1")])
    assert first not in others


def test_rows_of_other_programs_are_not_kept(fake_compiler, monkeypatch):
    program = compile_tpu.programs("v5e-1")[0]
    text = compile_tpu.page("- sha256: 1", {program: f"{compile_tpu.title(program)} ok"})
    assert list(compile_tpu.finished_rows(text, "- sha256: 1")) == [program]
    assert compile_tpu.finished_rows(text, "- sha256: 2") == {}
    monkeypatch.setitem(fits.ROWS, "record", (({"batch": 16, "head_chunk": 8192}, {1: 1.0}),))
    assert compile_tpu.finished_rows(text, "- sha256: 1") == {}


def test_without_a_compiler_the_script_names_it(monkeypatch, capsys):
    monkeypatch.setattr(compile_tpu, "distributions", lambda name: [])
    assert compile_tpu.main([]) == 2 and compile_tpu.MISSING in capsys.readouterr().err
