"""compile_8xh100.py: the pages are of this train_gpt.py, and it counts as we count by hand."""

import dataclasses
import json
import os
import subprocess
import sys
from collections import Counter

import compile_8xh100
import fits
import jax
import pytest
from h100 import checks, estimate, hlo, mosaic, ptx, report
from messages import Fault

import train_gpt
from tests.tools import MINI, ROOT


def program(entry: str, *bodies: str, head: str = "", aliases: str = "") -> hlo.Program:
    """HLO from `name: line; line; ...`, entry without a name; the last line is the root."""
    text = f"HloModule m{aliases}\n{head}\n"
    for computation in (*bodies, f"ENTRY %main:{entry}"):
        name, body = computation.split(":", 1)
        lines = [" ".join(line.split()) for line in body.split(";") if line.strip()]
        lines[-1] = f"ROOT {lines[-1]}"
        text += f"{name} (p: f32[1]) -> f32[1] {{\n"
        text += "".join(f"  {line}\n" for line in lines)
        text += "}\n"
    return hlo.parse(text)


def total(p: hlo.Program) -> int:
    """Bytes of all kernels that XLA generates."""
    return sum(cost.bytes for cost in estimate.cost_by_cause(p).values())


@pytest.mark.parametrize("preset", fits.ROWS)
def test_every_row_of_fits_was_compiled_and_has_memory_to_spare(preset):
    """The table of the page, by flags and devices, against run/fits.py."""
    frozen = compile_8xh100.ROOT / "records/upstream92/h100_compile.md"
    path = frozen if preset == "record92" else compile_8xh100.PAGES[preset]
    page = path.read_text(encoding="utf-8").partition("## Memory")[2]
    compiled = {}
    for line in page.partition("\n## ")[0].splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if len(cells) == 8 and cells[1].isdigit():
            compiled.setdefault((cells[0], int(cells[1])), []).append(float(cells[6]))
    expected = {}
    for flags, gigabytes in fits.ROWS[preset]:
        text = fits.command_line(flags) or "none"
        expected |= {(text, devices): GB for devices, GB in gigabytes.items()}
    assert compiled.keys() == expected.keys()
    for key, GB in expected.items():
        assert max(compiled[key]) + compile_8xh100.SPARE_GB <= GB + 0.05, key


# ---- Whether the page is of this train_gpt.py ----------------------------------------------------
@pytest.mark.parametrize("preset", compile_8xh100.PAGES)
def test_the_page_is_of_the_programs_of_this_train_gpt(preset):
    page = compile_8xh100.PAGES[preset].read_text()
    version = f"as lowered by jax {jax.__version__}:"
    if version not in page:
        pytest.skip(f"the page of {preset} has no digest {version}")
    renew = f"python lab/compile_8xh100.py --preset {preset} --write renews it"
    assert compile_8xh100.digest_line(preset) in page, renew


ONE_LAYER = dataclasses.replace(MINI, layers=MINI.layers[:1], mudd_head=())


@pytest.fixture
def mini(monkeypatch):
    """Digests of a small model."""
    monkeypatch.setattr(compile_8xh100, "record_config", lambda preset, attention: ONE_LAYER)
    monkeypatch.setitem(compile_8xh100.LOWERED, "record", (("first", 1),))


def digest_of(c, monkeypatch):
    """The digest, were c the record."""
    monkeypatch.setattr(compile_8xh100, "record_config", lambda preset, attention: c)
    return compile_8xh100.lowered_digest("record")


def test_a_digest_is_of_what_is_compiled(mini, monkeypatch):
    digest = compile_8xh100.lowered_digest("record")
    others = dataclasses.replace(ONE_LAYER, adam_lr=0.1, steps=7, untie=0.1, target=1.0)
    assert digest_of(others, monkeypatch) == digest, "programs depend on none of these"
    stages = (dataclasses.replace(MINI.stages[0], tokens=1024), *MINI.stages[1:])
    other = dataclasses.replace(ONE_LAYER, stages=stages)
    assert digest_of(other, monkeypatch) != digest, "although another stage is lowered"
    assert digest_of(ONE_LAYER, monkeypatch) == digest
    monkeypatch.setattr(train_gpt, "SOFTCAP", 24)
    jax.clear_caches()
    changed = compile_8xh100.lowered_digest("record")
    assert changed != digest
    option = {"gpu": {"xla_allow_excess_precision": True}}
    monkeypatch.setattr(train_gpt, "OPTIONS", train_gpt.OPTIONS | option)
    assert compile_8xh100.lowered_digest("record") not in (digest, changed)
    jax.clear_caches()  # of what was traced with another SOFTCAP


def test_a_digest_is_added_only_while_the_source_is_that_which_was_compiled(monkeypatch, tmp_path):
    page = tmp_path / "page.md"
    monkeypatch.setattr(compile_8xh100, "ROOT", tmp_path)
    monkeypatch.setitem(compile_8xh100.PAGES, "record", page)
    monkeypatch.setattr(compile_8xh100, "lowered_digest", lambda preset: "abc")
    page.write_text("- crc32 of train_gpt.py when it was compiled: 1\n")
    assert compile_8xh100.check_lowered("record", write=True) == 1
    page.write_text(f"# Title\n{compile_8xh100.source_line()}\n- another line\n")
    assert compile_8xh100.check_lowered("record", write=False) == 1
    assert "abc" not in page.read_text()
    assert compile_8xh100.check_lowered("record", write=True) == 0
    expected = (
        f"# Title\n{compile_8xh100.source_line()}\n{compile_8xh100.digest_line()}\n- another line\n"
    )
    assert page.read_text() == expected
    assert compile_8xh100.check_lowered("record", write=False) == 0
    monkeypatch.setattr(compile_8xh100, "lowered_digest", lambda preset: "def")
    assert compile_8xh100.check_lowered("record", write=True) == 0
    assert page.read_text() == expected.replace("abc", "def")


def test_without_a_plugin_the_script_names_it(monkeypatch, capsys):
    monkeypatch.setattr(compile_8xh100, "cudnn_version", lambda: None)
    assert compile_8xh100.main([]) == 2 and compile_8xh100.MISSING in capsys.readouterr().err


# ---- Traffic and time ----------------------------------------------------------------------------
A, ROW, INDEX = "f32[8,100]{1,0}", "f32[1,100]{1,0}", "%i = s32[] parameter(2);"
TABLE, ROWS, SUM = "bf16[1000,64]", "s32[10,1]", "f32[10,1,64]"
FUSIONS = dict(  # the shapes of the operands, the fused computation, bytes
    once=((A,), f"%p = {A} parameter(0); %n = {A} negate(%p); %s = bf16[8,100] add(%p, %n); "
          f"%m = {A} multiply(%s, %p); %t = (bf16[8,100], {A}) tuple(%s, %m)", 3200 + 1600 + 3200),
    slice=((A, ROW, "s32[]"), f"%p = {A} parameter(0); {INDEX} %c = bf16[8,100] convert(%p); "
           "%s = bf16[1,100] dynamic-slice(%c, %i, %i)", 400 + 4 + 200),
    gather=((TABLE, ROWS), f"%t = {TABLE} parameter(0); %i = {ROWS} parameter(1); %c = "
            f"f32[1000,64] convert(%t); %g = {SUM} gather(%c, %i)", 1280 + 40 + 2560),
    update=((A, ROW, "s32[]"), f"%p = {A} parameter(0); %u = {ROW} parameter(1); {INDEX} %d = {A} "
            f"dynamic-update-slice(%p, %u, %i, %i); %b = {A} bitcast(%d)", 400 + 4 + 400),
    scatter=((TABLE, ROWS, SUM), f"%p = {TABLE} parameter(0); %i = {ROWS} parameter(1); "  # it adds
             f"%u = {SUM} parameter(2); %s = {TABLE} scatter(%p, %i, %u)", 40 + 2560 + 2 * 1280),
)  # fmt: skip
LOOP = "%l = (f32[9]) parameter(0); %loop = (f32[9]) while(%l), body=%b"
LOOP += ', backend_config={{"known_trip_count":{{"n":"{}"}}}}'


@pytest.mark.parametrize("shapes, body, expected", FUSIONS.values(), ids=FUSIONS)
def test_a_fusion_reads_what_it_needs_and_writes_its_results(shapes, body, expected):
    entry = "".join(f"%a{i} = {shape} parameter({i});" for i, shape in enumerate(shapes))
    args = ", ".join(f"%a{i}" for i in range(len(shapes)))
    body, called = f"f: {body}", f"({args}), kind=kLoop, calls=%f"
    fused, loop = f"{entry} %r = f32[9] fusion{called}", LOOP.format(7)
    assert total(program(fused, body)) == expected
    assert total(program(loop, body, f"b: {fused}")) == 7 * expected
    pair = f"{entry} %s = (({A}), f32[9], u32[]) fusion-start{called}; %r = f32[9] fusion-done(%s)"
    assert total(program(pair, body)) == expected


FRAMES = """
FileNames;1 "/a/train_gpt.py";2 "/a/optax.py";
FunctionNames;1 "train_step";2 "update";3 "norm";4 "loss_fn.<locals>.<genexpr>";
FileLocations;1 {file_name_id=1 function_name_id=1 line=9};2 {file_name_id=2 function_name_id=2}
3 {file_name_id=1 function_name_id=3 line=9};4 {file_name_id=1 function_name_id=4 line=9};
StackFrames;1 {file_location_id=1 parent_frame_id=1};2 {file_location_id=2 parent_frame_id=2}
3 {file_location_id=4 parent_frame_id=2};4 {file_location_id=3 parent_frame_id=4};
""".replace(";", "\n")


def test_traffic_has_a_pass_and_a_function():
    copy = '; %{} = f32[10] copy(%a), metadata={{op_name="jit(f)/{}/mul" stack_frame_id={}}}'
    passes = map(copy.format, "bcd", ("jvp()", "transpose(jvp())", "add"), (4, 3, 2))
    copies = "%a = f32[10] parameter(0); %e = f32[20] copy(%a)" + "".join(passes)
    causes = estimate.cost_by_cause(program(copies, head=FRAMES)).items()
    assert {cause: (cost.bytes, cost.kernels) for cause, cost in causes} == {
        ("any", "not named"): (120, 1), ("forward", "norm"): (80, 1),
        ("backward", "loss_fn"): (80, 1), ("update", "train_step"): (80, 1),
    }  # fmt: skip


TABLE_OF_8 = """%e = bf16[1572,768] parameter(0), metadata={op_name="state.params[\\'embed\\']"};
    %x = bf16[8192,4096] parameter(1); %y = bf16[4096,2048] parameter(2);"""
START = "%s{0} = ((bf16[1572,768]), bf16[12576,768]) all-gather-start(%e);"
DONE = "%d{0} = bf16[12576,768] all-gather-done(%s{0});"
GEMM = 'custom_call_target="__cublas$lt$matmul{}", {{"lhs_contracting_dimensions":["1"]}}'


def test_a_transfer_is_hidden_by_the_work_scheduled_beside_it():
    start, done = TABLE_OF_8 + START.format(1), DONE.format(1)
    (bare,) = estimate.transfers(program(start + done))
    assert bare[:3] == ("all-gather embed", "bf16[1572,768]", 7 * 1572 * 768 * 2)
    assert bare.exposed == bare.seconds == bare.bytes / estimate.LINKS
    fused = "%g = bf16[8192,2048] fusion(%x, %y), kind=kCustom, calls=%f;"
    f = "f: %x = bf16[8192,4096] parameter(0); %y = bf16[4096,2048] parameter(1);"
    f += "%g = (bf16[8192,2048], s8[9]) custom-call(%x, %y), " + GEMM.format("")
    p = program(start + fused + done, f)
    (hidden,) = estimate.transfers(p)
    assert hidden.hidden == pytest.approx(
        2 * 8192 * 4096 * 2048 / estimate.BFLOAT16 + estimate.LAUNCH
    )
    assert (hidden.exposed, hidden.bytes, total(p)) == (0, bare.bytes, 0)
    assert estimate.exposed_ms([hidden]) == 0
    assert estimate.exposed_ms([bare, bare]) == 2e3 * bare.exposed
    twice = TABLE_OF_8 + START.format(1) + START.format(2) + DONE.format(2) + DONE.format(1)
    second, first = estimate.transfers(program(twice))  # they share the links
    assert second.exposed == pytest.approx(2 * second.seconds) and first.exposed == 0


SCATTERED = "%g = f32[80] parameter(0); %s = ((f32[80]), f32[10]) reduce-scatter-start(%g);"
SCATTERED += "%d = f32[10] reduce-scatter-done(%s);"
STATE = """%m = f32[10] parameter(1), metadata={op_name="arg.opt_state[\\'head\\'].mu"};
    %h = f32[10] parameter(2), metadata={op_name="arg.lookups[\\'embed\\']"};"""


@pytest.mark.parametrize("text, names", [
    ("%n = f32[10] negate(%d); %a = f32[10] add(%n, %m)", "head"),
    ("%a = f32[10] fusion(%d, %m, %h), kind=kLoop, calls=%f", "embed/head"),
    ("%n = f32[10] negate(%d); %t = (f32[10], f32[10], f32[10]) tuple(%m, %n, %h)", "embed"),
    ("%n = f32[10] negate(%d); %t = (f32[10], f32[10], f32[10]) tuple(%m, %h, %n)", "?"),
])  # fmt: skip
def test_a_gradient_is_named_after_the_state_that_it_meets_or_replaces(text, names):
    aliases = ", input_output_alias={ {0}: (1, {}, may-alias), {1}: (2, {}, may-alias) }"
    fused = "f: %x = f32[10] parameter(0); %n = f32[10] negate(%x)"
    (transfer,) = estimate.transfers(program(SCATTERED + STATE + text, fused, aliases=aliases))
    assert (transfer.name, transfer.bytes) == (f"reduce-scatter {names}", 280)


def test_lookups_are_gathered_by_second_steps_alone():
    c = train_gpt.PRESETS["record"]
    kinds = "first", "second", "val"
    first, second, val = (checks.expected_program(kind, 2, c, 8) for kind in kinds)
    assert second.gathered == second.scattered == val.gathered
    assert first.scattered == second.scattered and val.scattered == val.reduced == 0
    assert second.gathered - first.gathered == 7 * 50304 * 768
    # 7,865 slots in every eighth of the n-gram table: numbers of rows, rows, and their gradients.
    assert first.exchanged == second.exchanged == 8 * 7865 * (1 + 768 + 768)
    assert val.exchanged == 8 * 41944 * (1 + 768)
    assert second.chunks == 3 and val.microbatches == 1 and second.attention_layers == 10


def test_every_step_of_the_record_has_a_kind_and_a_program():
    c = train_gpt.PRESETS["record"]
    steps = compile_8xh100.steps_of_programs(c)
    assert steps.total() == c.total_steps and len(steps) == 8
    assert (steps["first", 0], steps["second", 0]) == (212, 211)
    validations = [stage for kind, stage in compile_8xh100.record_programs(c) if kind == "val"]
    assert validations == [0, 1, 2, 4]


WANTED = checks.Expected(True, 8, 1, 1, 64 * 6 * 16, (32, 384, 32), 2, 800, 800, 47, 0, 1560)
VAL = WANTED._replace(train=False)
WEIGHTS = """%a = bf16[100] parameter(0); %g = bf16[800] parameter(1);
    %p = bf16[400,100] parameter(2); %f = f32[48] parameter(3);
    %s = ((f32[48]), f32[48]) all-reduce-start(%f); %w = ((bf16[100]), bf16[800])
    all-gather-start(%a); %r = ((bf16[800]), bf16[100]) reduce-scatter-start(%g)"""


@pytest.mark.parametrize("text, other, fault", [
    ("%a", "%a", ""),
    ("all-reduce-start(%f)", "all-reduce-start(%p)", "s all-reduces 40000 elements"),
    ("all-gather-start", "all-gather", ""),  # one may wait
    ("reduce-scatter-start(%g)", "reduce-scatter-start(%a)", "reduce-scatter of 100 elements in"),
    ("all-reduce-start(%f)", "all-to-all-start(%f)", "all-to-all of 48 elements in all, expected"),
    ("all-reduce-start(%f)", "ragged-all-to-all(%f)", "s is ragged-all-to-all: nothing here needs"),
])  # fmt: skip
def test_collectives(text, other, fault):
    found = checks.check_collectives(program(WEIGHTS.replace(text, other)), WANTED)
    assert [f[: len(fault)] for f in found] == [fault] * bool(fault)


@pytest.mark.parametrize("kind, waits", [
    ("all-gather(%a)", True), ('all-gather-start(%a), {"is_sync":true}', True),
    ("all-gather-start(%a)", False),
])  # fmt: skip
def test_all_gathers_but_one_are_asynchronous(kind, waits):
    halves = f"%w = ((bf16[50]), bf16[400]) {kind}; %v = ((bf16[50]), bf16[400]) {kind}"
    whole = "%w = ((bf16[100]), bf16[800])\n    all-gather-start(%a)"
    text = WEIGHTS.replace("%a = bf16[100]", "%a = bf16[50]").replace(whole, halves)
    found = [*checks.check_collectives(program(text), WANTED)]
    assert found == ["w v are synchronous all-gathers: only 1 may be"] * waits


X = "%x = bf16[1,6,64,16] parameter(1); %k = bf16[1,64,6,16] parameter(0); %q = bf16[1,64,6,16]"
FMHA = "; %y = bf16[1,6,64,16] custom-call(%q, %k, %k), "
FMHA += 'custom_call_target="__cudnn$fmhaSoftmax", {"sliding_window_length": 7}'
CLEAN = X + " bitcast(%x)" + FMHA
MOVES = "moves: %p = bf16[1,6,64,16] parameter(0); %t = bf16[1,64,6,16] transpose(%p)"
COMPUTES = MOVES.replace("moves", "computes").replace("; ", "; %n = f32[9] negate(%p); ")


@pytest.mark.parametrize("text, wanted, fault", [
    (CLEAN, VAL, ""),
    (CLEAN, VAL._replace(microbatches=8), "cuDNN fmhaSoftmax has calls that run [1] times, ex"),
    (CLEAN, WANTED, "cuDNN fmhaSoftmaxBackward has calls that run [] times, expected 1 c"),
    (X + " bitcast(%t); %t = bf16[1,64,6,16] transpose(%x)" + FMHA, VAL, "t changes only the lay"),
    (X + " fusion(%x), kind=kInput, calls=%moves" + FMHA, VAL, "q changes only the layout, bes"),
    (X + " fusion(%x), kind=kInput, calls=%computes" + FMHA, VAL, ""),
    (CLEAN + "; %o = bf16[6144] bitcast(%y); %c = bf16[6144] copy(%o)", VAL, "c changes only the"),
    (CLEAN + "; %c = bf16[9] copy(%y)", VAL, ""),
])  # fmt: skip
def test_attention(text, wanted, fault):
    found = checks.check_attention(program(text, MOVES, COMPUTES), wanted)
    assert [f[: len(fault)] for f in found] == [fault] * bool(fault)


XS, W, G = "f8e4m3fn[32,32]", "f8e4m3fn[384,32]", "f8e5m2[32,384]"
HEAD = (
    f"%x = {XS} parameter(0); %w = {W} parameter(1); %g = {G} parameter(2)",
    "%z = (bf16[32,384], s8[9]) custom-call(%x, %w), " + GEMM.format("$f8"),
    "%dx = bf16[32,32] dot(%g, %w), lhs_contracting_dims={1}, rhs_contracting_dims={0}",
    "%dw = (f32[384,32], s8[9]) custom-call(%g, %x), " + GEMM.format("$f8"),
)


@pytest.mark.parametrize("wanted, lines, times, fault", [
    (WANTED, HEAD, 2, False), (VAL, HEAD[:1], 2, False), (VAL, HEAD, 2, True),
    (WANTED, HEAD, 3, True), (WANTED, HEAD[:-1], 2, True), (WANTED, HEAD[:2] + HEAD[3:], 2, True),
])  # fmt: skip
def test_the_head_is_three_gemms_in_fp8_and_in_validation_none(wanted, lines, times, fault):
    p = program(LOOP.format(times), "b: " + ";".join(lines))
    assert len([*checks.check_head(p, wanted)]) == fault


def test_products_in_fp8_that_are_not_the_heads_are_of_no_account_in_training():
    """FRAMES has the function norm as number 4."""
    other = HEAD[1].replace("%z", "%h") + ', metadata={op_name="f" stack_frame_id=4}'
    lines = ";".join((*HEAD, other))
    p = program(LOOP.format(2), f"b: {lines}", head=FRAMES)
    assert not [*checks.check_head(p, WANTED)]
    of_head = program(LOOP.format(2), f"b: {lines}", head=FRAMES.replace("norm", "head_loss_fwd"))
    assert [*checks.check_head(of_head, WANTED)]
    alone = program(LOOP.format(2), f"b: {HEAD[0]};{other}", head=FRAMES)
    assert [*checks.check_head(alone, VAL)]


def test_products_take_their_time():
    large = ";".join(HEAD[:2]).replace("32", "32000").replace("384", "38400")
    mixed = large.replace("%z", "%y").replace("%w)", "%g)")  # of f8e5m2
    exact = large.replace("f8e4m3fn", "f32")
    texts = CLEAN, CLEAN.replace("max", "maxBackward"), ";".join(HEAD[:2]), large, mixed, exact
    found = [
        estimate.seconds(p, [*hlo.kernels(p)][-1]) - estimate.LAUNCH for p in map(program, texts)
    ]
    keys = 6144 * (7 + estimate.MORE_KEYS) / estimate.ATTENTION
    moved = 32 * 32 + 384 * 32 + 2 * 32 * 384 + 9  # so few bytes take longer than the product
    flops = 2 * 32000 * 38400 * 32000
    products = [flops / rate for rate in (estimate.FP8, estimate.FP8_MIXED, estimate.FLOAT32)]
    assert found == pytest.approx([4 * keys, 10 * keys, moved / estimate.MEMORY, *products])


# A thread of it: 2 before the loop, 3 in each of its rounds, 2 after it.
COUNTED = """mov.b32 %r1, {first};
ld.param.b64 %rd1, [a];
$L__BB0_1:
add.s32 %r{next}, %r1, {step};
{more}setp.{compare} %p1, %r{next}, {last};
@{sign}%p1 bra $L__BB0_1;
st.global.b32 [%rd1], %r1;
ret;""".format
LOOPS = dict(  # rounds
    up=(dict(first=0, step=8, next=1, compare="lt.u32", last=96), 12),
    signed=(dict(first=-32, step=32, next=1, compare="lt.s32", last=736), 24),
    until=(dict(first=0, step=1, next=1, compare="ge.s32", last=5, sign="!"), 5),
    wraps=(dict(first=-6, step=6, next=2, compare="lt.u32", last="%r1", more="mov.b32 %r3, %r1;\n"
                "mov.b32 %r1, %r2;\n", ), 1),
    endless=(dict(first=0, step=0, next=1, compare="lt.s32", last=5), 1),  # as if it ran once
)  # fmt: skip


@pytest.mark.parametrize("loop, rounds", LOOPS.values(), ids=LOOPS)
def test_instructions_of_a_loop_count_as_often_as_it_runs(loop, rounds):
    text = COUNTED(**dict(sign="", more="") | loop)
    inside = 3 + loop.get("more", "").count("\n")
    assert ptx.count_instructions(text.splitlines()) == 2 + rounds * inside + 2


def test_instructions_of_a_kernel_are_those_of_all_its_threads(tmp_path):
    loop, _ = LOOPS["up"]
    code = COUNTED(sign="", more="", **loop)
    entry = f".visible .entry fusion_1(\n\t.param .u64 a\n)\n.reqntid 128, 1, 1\n{{\n{code}\n}}\n"
    (tmp_path / "m.1.ptx").write_text(f".version 9.4\n{entry}")
    one = 'thunk_metadata {{ thunk_info {{ profile_annotation: "{}"\n thunk_id: {} }} }}\n'
    names = one.format("fusion.1", 7) + one.format("fusion.clone", 12)
    (tmp_path / "m.thunk_metadata.txt").write_text(names)
    launch = "{}: kCustomKernel [source] fusion_1 grid: [{}, 2, 1] threads: [128, 1, 1] shared: 0\n"
    order = launch.format("007", 3) + "  " + launch.format("012", 1)  # one code, two kernels
    (tmp_path / "m.thunk_sequence.txt").write_text(order)
    a_thread = 2 + 12 * 3 + 2
    expected = {"fusion.1": 3 * 2 * 128 * a_thread, "fusion.clone": 2 * 128 * a_thread}
    assert ptx.read_dump(tmp_path) == expected


def test_a_kernel_takes_the_time_of_its_bytes_or_of_its_instructions():
    p = program("%a = f32[1000] parameter(0); %b = f32[1000] copy(%a)")
    (kernel,) = hlo.kernels(p)
    assert estimate.seconds(p, kernel) == pytest.approx(8000 / estimate.MEMORY + estimate.LAUNCH)
    p = p._replace(issued={"b": 1e9})
    assert estimate.seconds(p, kernel) == pytest.approx(1e9 / estimate.ISSUE + estimate.LAUNCH)


def result(p: hlo.Program, **changes) -> checks.Result:
    """What a program turned out to be; nothing of it is above a limit."""
    r = checks.Result(
        kind="second",
        stage=2,
        expected=WANTED,
        compile_s=1,
        temporaries_GB=1,
        arguments_GB=1,
        program=p,
        costs={},
        transfers=[],
        sent_ratio=1,
        parts=dict.fromkeys(estimate.PARTS, 5.0),
    )
    return dataclasses.replace(r, **changes)


def test_the_time_of_a_stage_is_the_mean_of_its_steps_beside_upstreams():
    results = []
    for stage in range(4):
        for kind, gemm in (("first", 5.0), ("second", 15.0)):
            r = result(program("%a = f32[1] parameter(0)"), kind=kind, stage=stage)
            results.append(dataclasses.replace(r, parts=r.parts | dict(gemm=gemm)))
    steps = Counter({(r.kind, r.stage): 100 for r in results})
    beside = report.time_table(results, steps, report.UPSTREAM_MS["record"])
    (line,) = [x for x in beside.splitlines() if "31 to 32" in x]
    assert [x.strip() for x in line.split("|")][-5:-1] == ["", "35.0", "31 to 32", "1.11"]
    steps["second", 3] = 300  # of 40 ms, beside 100 of 30 ms
    *_, line, together = report.time_table(results, steps, {}).splitlines()
    assert [x.strip() for x in line.split("|")][-5:-1] == ["", "37.5", "400", "15.0"]
    assert [x.strip() for x in together.split("|")][-3:-1] == ["1000", "36.0"]


def test_limits():
    without_trips = LOOP.split(", backend")[0]
    slow = estimate.Transfer("all-gather", "", 1, 1, 0, 0.005)
    r = result(
        program(WEIGHTS + ";" + without_trips, "b: %p = f32[1] parameter(0)"),
        expected=WANTED._replace(attention_layers=0),
        compile_s=99,
        temporaries_GB=98,
        costs={("update", "f"): estimate.Cost(bytes=197 * 10**9)},
        transfers=[slow],
        sent_ratio=2,
    )
    limits = checks.LIMITS["record"]
    found = " ".join(checks.check(r, limits))
    for fault in ("loop is a", "GEMMs in", "99 s", "99.00 GB", "197.00 GB", "2.00 t", "5.00 ms"):
        assert fault in found
    assert "99 s" not in " ".join(checks.check(r, limits, timed=False))


def test_kernels_without_ptx_have_a_limit():
    copies = program("%a = f32[25000000] parameter(0); %b = f32[25000000] copy(%a)")  # 0.2 GB
    costs = {("update", "f"): estimate.Cost(bytes=9 * 10**9)}
    unknown = result(copies, costs=costs)
    known = result(copies._replace(issued={"b": 1}), costs=costs)
    assert "without PTX" in " ".join(checks.check(unknown, checks.LIMITS["record"]))
    assert "without PTX" not in " ".join(checks.check(known, checks.LIMITS["record"]))


# ---- Mosaic kernels ------------------------------------------------------------------------------
CALL = """%{name} = ({result}, f32[8]) custom-call({operands}), custom_call_target="mosaic_gpu_v2",
    metadata={{op_name="jit(f)/transpose(jvp())/{body}/mpmd_map" stack_frame_id=4}},
    backend_config={{kernel_hash = "{code}", module = "{module}"}}""".format
PRODUCT = dict(name="y", result="bf16[8192,512]", operands="%a, %b, %a", body="mosaic_product",
               code="\\C5\\22)a", module="\\00wgmma_wait")  # fmt: skip
ROWS_A_B = "%a = bf16[8192,4096] parameter(0); %b = bf16[512,4096] parameter(1);"
OTHER = dict(PRODUCT, body="mosaic_dqkv", code="b", module="tanh")


def test_a_mosaic_kernel_that_multiplies_is_a_product_and_then_its_epilogue():
    p = program(ROWS_A_B + CALL(**PRODUCT), head=FRAMES)
    (kernel,) = hlo.kernels(p)
    assert kernel.kind == "gemm" and estimate.cause(p, kernel) == ("backward", "mosaic_product")
    assert total(p) == checks.traffic_without_ptx(p) == 0
    product = 2 * 8192 * 4096 * 512 / estimate.BFLOAT16 + estimate.LAUNCH
    assert estimate.seconds(p, kernel) == pytest.approx(product)
    p = p._replace(issued={"y": 1e9})
    assert estimate.seconds(p, kernel) == pytest.approx(product + 1e9 / estimate.ISSUE)
    small = program(ROWS_A_B.replace("512,", "8,") + CALL(**PRODUCT))
    (kernel,) = hlo.kernels(small)  # which reads %a twice
    moved = 2 * (2 * 8192 * 4096 + 8 * 4096 + 8192 * 512) + 4 * 8
    bytes_take = moved / estimate.MEMORY + estimate.LAUNCH
    assert estimate.seconds(small, kernel) == pytest.approx(bytes_take)


def test_another_mosaic_kernel_takes_the_time_of_its_bytes_or_of_its_instructions():
    p = program(ROWS_A_B + CALL(**OTHER), head=FRAMES)
    moved = 2 * (8192 * 4096 + 512 * 4096 + 8192 * 512) + 4 * 8
    assert total(p) == moved and checks.traffic_without_ptx(p) == moved / 1e9
    p = p._replace(issued={"y": 1e10})
    assert checks.traffic_without_ptx(p) == 0
    costs = estimate.cost_by_cause(p)
    seconds = 1e10 / estimate.ISSUE + estimate.LAUNCH
    expected = estimate.Cost(moved, 1, 1e10, pytest.approx(seconds))
    assert costs == {("backward", "mosaic_dqkv"): expected}


@pytest.mark.parametrize("kind, operands, result", [
    ("mov.u32", [7], 7), ("add.s32", [2**32 - 1, 3], 2), ("sub.s32", [2, 3], 2**32 - 1),
    ("mul.lo.s32", [2**31, 2], 0), ("mul.hi.u32", [2**31, 4], 2), ("mad.lo.s32", [3, 4, 5], 17),
    ("mul.wide.s32", [2**32 - 1, 3], 2**64 - 3), ("mul.wide.u16", [2**15, 4], 2**17),
    ("shr.s32", [2**32 - 8, 1], 2**32 - 4), ("shr.u32", [2**32 - 8, 1], 2**31 - 4),
    ("shl.b32", [3, 31], 2**31), ("not.b32", [0], 2**32 - 1), ("xor.b32", [6, 3], 5),
    ("cvt.u16.u32", [2**16 + 1], 1), ("cvt.s64.s32", [2**32 - 2], 2**64 - 2),
    ("max.s32", [2**32 - 1, 1], 1), ("max.u32", [2**32 - 1, 1], 2**32 - 1),
    ("setp.lt.s32", [2**32 - 1, 1], 1), ("setp.lt.u32", [2**64 - 1, 1], 0),
    ("setp.eq.and.b32", [1, 1, 0], 0), ("selp.b32", [5, 6, 1], 5), ("selp.b32", [5, 6, 0], 6),
    ("shfl.sync.idx.b32", [5, 0, 31, 2**64 - 1], 5), ("and.pred", [1, 0], 0),
])  # fmt: skip
def test_arithmetic_is_that_of_ptx(kind, operands, result):
    assert mosaic.is_interpreted(kind) and mosaic.compute(kind, operands) == result


def test_what_is_not_of_integers_is_not_interpreted():
    kinds = "add.f32", "cvt.rn.f32.s32", "max.NaN.f32", "ld.shared.b32", "cvt.rn.bf16x2.f32"
    assert not any(map(mosaic.is_interpreted, kinds)) and not mosaic.is_interpreted("ret")


# Two warpgroups: the first one multiplies tiles, each in two steps, and the second one only waits.
# An even block has 3 tiles, an odd one 4.
WGMMA = "{ .reg .pred p; wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 {%f1}, %rd1; }"
PTX = f"""
.visible .entry mosaic_product_mosaic_gpu_kernel(
.param .align 64 .b8 p[384]
)
.maxntid 256, 1, 1
{{
.reg .b32 %r<9>;
mov.u32 %r1, %tid.x;
shr.u32 %r2, %r1, 7;
shfl.sync.idx.b32 %r3, %r2, 0, 31, -1;
setp.ne.b32 %p1, %r3, 0;
@%p1 bra $L__BB0_4;
mov.u32 %r4, %ctaid.x;
and.b32 %r5, %r4, 1;
mov.b32 %r6, -2;
$L__BB0_1:
mov.b32 %r7, 0;
mov.f32 %f1, 0f00000000;
$L__BB0_2:
// begin inline asm
{WGMMA}
wgmma.wait_group.sync.aligned 1;
// end inline asm
add.s32 %r7, %r7, 1;
setp.eq.b32 %p2, %r7, 2;
@!%p2 bra $L__BB0_2;
wgmma.wait_group.sync.aligned 0;
mul.f32 %f2, %f1, %f1;
elect.sync %r8|%p4, -1;
@%p4 st.shared.b32 [%rd1], %f2;
add.s32 %r6, %r6, 1;
setp.le.s32 %p3, %r6, %r5;
@%p3 bra $L__BB0_1;
ret;
$L__BB0_4:
bar.sync 1, 128;
ret;
}}
"""
BEFORE, BEFORE_TILE, EPILOGUE = 8, 2, 6  # instructions


def test_the_epilogue_is_what_threads_issue_while_nothing_is_multiplied():
    code = mosaic.read_code(PTX)
    thread = mosaic.follow(code, {"%tid.x": 0, "%ctaid.x": 0})
    tiles, flops = 3, 2 * 64 * 128 * 16
    # Of a product's instructions, the first counts, because nothing is multiplied before it.
    instructions = BEFORE + tiles * (BEFORE_TILE + 1 + EPILOGUE) + 1
    assert thread == mosaic.Counts(instructions, tiles * 2 * flops, 0)
    odd = mosaic.follow(code, {"%tid.x": 0, "%ctaid.x": 1})
    assert odd.flops == 4 * 2 * flops
    waiting = mosaic.follow(code, {"%tid.x": 128, "%ctaid.x": 0})
    assert waiting == mosaic.Counts(5 + 2, 0, 0)
    both = mosaic.count_all(code, [2, 1, 1], 256)
    assert both == mosaic.Counts(128 * (thread.instructions + odd.instructions), 14 * flops, 0)
    many = mosaic.count_all(code, [2, 50, 3], 256)
    assert many.flops == pytest.approx(150 * both.flops, rel=0.02)
    without = mosaic.read_code(PTX.replace(WGMMA, "mov.b32 %r7, %r7;"))
    assert mosaic.count_all(without, [1, 1, 1], 256).instructions > 128 * (instructions + 7)


def test_a_jump_that_depends_on_memory_is_not_taken_but_counted():
    unknown = PTX.replace("mov.u32 %r4, %ctaid.x", "ld.shared.b32 %r4, [%rd1]")
    counts = mosaic.follow(mosaic.read_code(unknown), {"%tid.x": 0})
    assert counts == mosaic.Counts(BEFORE + BEFORE_TILE + 1 + EPILOGUE + 1, 2 * 262144, 1)
    endless = PTX.replace("ret;", "bra.uni $L__BB0_4;")
    with pytest.raises(ValueError, match="has not come to its end"):
        mosaic.follow(mosaic.read_code(endless), {"%tid.x": 0, "%ctaid.x": 0})


PASSES = """#loc = loc("mpmd_map")
%map_3 = arith.constant 2 : index loc(#loc1)
%map_4 = arith.constant 256 : index loc(#loc1)
%c1 = arith.constant 1 : index loc(#loc1)
%map_5 = arith.constant 213040 : i32 loc(#loc1)
%9 = gpu.launch async [%8] blocks(%a, %b, %c) in (%d = %map_3, %e = %c1, %f = %c1) \
threads(%g, %h, %i) in (%j = %map_4, %k = %c1, %l = %c1) dynamic_shared_memory_size %map_5 {
"""  # a backslash joins two lines
PTXAS = """ptxas info    : Compiling entry function 'mosaic_product_mosaic_gpu_kernel' for 'sm_90a'
ptxas         .     96 bytes stack frame, 88 bytes spill stores, 80 bytes spill loads
ptxas info    : Used 168 registers, used 16 barriers, 17 bytes smem
"""


def dump(folder, name: str) -> None:
    """Writes what Mosaic dumps of a kernel."""
    ptx_text = PTX.replace("mosaic_product", name.rpartition("_")[0])
    for ending, text in ((".ptx", ptx_text), (".ptxas", PTXAS), (".mlir-passes.log", PASSES)):
        (folder / f"{name}{ending}").write_text(text)


A_B = "%a = bf16[448,64] parameter(0); %b = bf16[64,64] parameter(1);"  # as much work as PTX does
CALLS = dict(PRODUCT), dict(PRODUCT, name="z", code="c"), dict(PRODUCT, name="w")


def test_dumped_kernels_are_found_by_the_hash_of_their_code(tmp_path):
    p = program(A_B + ";".join(CALL(**call) for call in CALLS))
    dump(tmp_path, "mosaic_product_9")
    known = {}
    with pytest.raises(ValueError, match="wrote 1 kernels, but 2 are new"):
        mosaic.read_dump(tmp_path, p, known)
    dump(tmp_path, "mosaic_product_10")
    mosaic.read_dump(tmp_path, p, known)
    kernel = known[PRODUCT["code"]]
    assert kernel[:-1] == ("mosaic_product", 168, 88, 213040, 2, 256)
    assert known == {PRODUCT["code"]: kernel, "c": kernel}
    assert mosaic.issued(p, known) == dict.fromkeys("yzw", kernel.counts.instructions)


@pytest.mark.parametrize("change", [dict(body="mosaic_qkv"), dict(operands="%b, %b")])
def test_a_dump_of_another_kernel_is_refused(change, tmp_path):
    p = program(A_B + CALL(**PRODUCT | change))
    dump(tmp_path, "mosaic_product_9")
    with pytest.raises(ValueError, match="mosaic_product_9.ptx, of .* operations, is not mosaic_"):
        mosaic.read_dump(tmp_path, p, {})


def test_the_table_has_a_row_for_every_code():
    counts = mosaic.Counts(instructions=3 * 448 * 64, flops=1, unknown=0)
    kernel = mosaic.MosaicKernel("mosaic_product", 168, 88, 213040, 2, 256, counts)
    p = program(A_B + ";".join(CALL(**call) for call in CALLS), head=FRAMES)
    known = {PRODUCT["code"]: kernel, "c": kernel._replace(counts=counts._replace(unknown=1))}
    p.issued.update(mosaic.issued(p, known))
    text, table = report.mosaic_section({3: p}, known)
    assert "Of mosaic_product, some jumps are not followed" in text
    lines = [line.strip("| ").split("|") for line in table.splitlines()]
    head, _, twice, once = [[cell.strip() for cell in line] for line in lines]
    row = dict(zip(head, twice, strict=True))
    assert row.pop("ms a run") == f"{1e3 * estimate.seconds(p, next(mosaic.calls(p))):.3f}"
    assert row == {
        "kernel": "mosaic_product", "pass": "backward", "stage": "3", "runs": "2",
        "operands": "bf16[448,64] bf16[64,64]", "blocks": "2", "threads": "256",
        "registers": "168", "spilled B": "88", "KB": "208", "PTX an element": "3.0",
    }  # fmt: skip
    assert once[3] == "1"
    assert report.mosaic_section({0: program("%a = f32[1] parameter(0)")}, known) == []


compiles_mosaic = pytest.mark.skipif(
    compile_8xh100.cudnn_version() is None or jax.__version_info__ < (0, 11),
    reason="needs JAX's CUDA plugin, and a Mosaic of 2026",
)


@compiles_mosaic
def test_a_small_kernel_is_compiled_for_an_h100(tmp_path):
    """The numbers of operations are exact; those of registers and instructions depend on ptxas."""
    env = os.environ | {
        "PYTHONPATH": os.pathsep.join(str(ROOT / name) for name in ("lab", "records", "run")),
        "TMPDIR": str(tmp_path),
    }
    command = [sys.executable, str(ROOT / "tests/mosaic_small.py")]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    first, second, third = json.loads(done.stdout)
    assert first == third
    for kernel, M in ((first, 128), (second, 192)):
        assert kernel["name"] == "mosaic_product" and kernel["flops"] == 2 * M * 256 * 64
        assert (kernel["blocks"], kernel["threads"]) == (M // 64 * 4, 128)
        assert 16 < kernel["registers"] < 168 and kernel["spilled"] == kernel["unknown"] == 0
        assert 2 * 64 * 64 * 2 < kernel["shared"] < 2 * 64 * 64 * 2 + 1024
        assert 1 < kernel["instructions"] / (M * 256) < 10


@pytest.mark.slow
@compiles_mosaic
def test_no_kernel_of_the_shelf_spills_a_register(tmp_path):
    """And a block has room on an SM."""
    env = os.environ | {
        "PYTHONPATH": os.pathsep.join(str(ROOT / name) for name in ("lab", "records", "run")),
        "TMPDIR": str(tmp_path),
    }
    command = [sys.executable, str(ROOT / "tests/mosaic_shelf.py")]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr
    kernels = json.loads(done.stdout)
    names = {kernel["name"] for kernel in kernels}
    assert names >= {"mosaic_product", "mosaic_sum_of_exp", "mosaic_gradient", "mosaic_qkv"}
    assert names >= {"mosaic_logits", "mosaic_transpose"}
    for kernel in kernels:
        assert kernel["spilled"] == 0 and kernel["shared"] <= 227 * 1024, kernel
        assert kernel["registers"] * kernel["threads"] <= 65536, kernel


# ---- Copies with ideas ---------------------------------------------------------------------------
def test_a_run_with_an_idea_is_priced_by_the_stages_that_were_compiled():
    page = compile_8xh100.page_costs(compile_8xh100.PAGES["record"].read_text(encoding="utf-8"))
    assert {stage for _, stage in page} == {0, 1, 2, 3} and len(page) == 8
    c = train_gpt.PRESETS["record"]
    run = compile_8xh100.whole_run(c, page, page)
    assert [steps for _, steps in run.values()] == [423, 424, 423, 15]
    assert 92 < compile_8xh100.run_seconds(run) < 94  # run/README.md: 93 s
    twice = {key: cost._replace(ms=2 * cost.ms) for key, cost in page.items() if key[1] == 2}
    priced = compile_8xh100.whole_run(c, twice, page)
    assert priced == {stage: (pytest.approx(2 * ms), steps) for stage, (ms, steps) in run.items()}
    every = dataclasses.replace(c, adam_every=1)
    second = {key: cost for key, cost in page.items() if key[0] == "second" and key[1] in (0, 2)}
    priced = compile_8xh100.whole_run(every, second, page)
    for stage, (ms, _) in priced.items():
        assert ms == pytest.approx(page["second", stage].ms)


def test_a_copy_takes_the_place_of_train_gpt_and_leaves_it(monkeypatch):
    monkeypatch.setattr(compile_8xh100, "train_gpt", train_gpt)
    compile_8xh100.use(train_gpt.SOURCE.replace("SOFTCAP = 23 ", "SOFTCAP = 29 "))
    assert compile_8xh100.train_gpt.SOFTCAP == 29 and train_gpt.SOFTCAP == 23
    assert compile_8xh100.record_config("record", "band").attention == "band"


def test_stages_that_are_not_there_are_refused():
    c = train_gpt.PRESETS["record"]
    assert compile_8xh100.read_stages("", c) == [0, 1, 2, 3]
    assert compile_8xh100.read_stages("2,0", c) == [2, 0]
    for text in "0,7", "two":
        with pytest.raises(Fault, match="the record's stages are 0, 1, 2, 3"):
            compile_8xh100.read_stages(text, c)


def test_fields_of_a_copy_can_be_set():
    c = train_gpt.PRESETS["record"]
    changed = compile_8xh100.set_fields(c, ["D=1024", "adam_lr=0.5", "compute=float32", "H=8"])
    assert changed == dataclasses.replace(c, D=1024, adam_lr=0.5, compute="float32", H=8)
    assert compile_8xh100.set_fields(c, []) == c
    for wrong in "nothing=1", "layers=1", "total_steps=3":
        with pytest.raises(Fault, match=f"--set {wrong}: Config has no number or string of this"):
            compile_8xh100.set_fields(c, [wrong])
    for wrong in "D=wide", "D":
        with pytest.raises(Fault, match=f"--set {wrong}: D is of type int"):
            compile_8xh100.set_fields(c, [wrong])
    with pytest.raises(Fault, match="--set H=7: --H 7 must be even"):
        compile_8xh100.set_fields(c, ["H=7"])
