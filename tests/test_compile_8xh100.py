"""compile_8xh100.py: that its record is of this train_gpt.py, and that it counts and checks right,
on small HLO texts whose bytes were counted by hand."""

import math
import subprocess
import sys
from pathlib import Path

import compile_8xh100 as h100
import pytest
from tools import MINI

import train_gpt

ROWS = train_gpt.table(MINI).values()
WHOLE = sum(math.prod(row.shape) for row in ROWS if row.spec != train_gpt.P())


def program(entry: str, *bodies: str, head: str = "") -> h100.Program:
    """Lines of HLO; each body is `name: line; line; ...`, and its last line is its root."""

    def lines(text):
        *most, last = (line.strip() for line in text.split(";") if line.strip())
        return "".join(f"  {line}\n" for line in (*most, f"ROOT {last}"))

    named = (body.split(":", 1) for body in bodies)
    texts = [f"%{name.strip()} (p: f32[1]) -> f32[1] {{\n{lines(text)}}}\n" for name, text in named]
    texts.append(f"ENTRY %main (p: f32[1]) -> f32[1] {{\n{lines(entry)}}}\n")
    return h100.parse("\n".join(("HloModule m, is_scheduled=true", head, *texts)))


def total(p: h100.Program) -> int:
    return sum(n for n, _ in h100.traffic_by_cause(p).values())


# ---- Record --------------------------------------------------------------------------------------
def test_the_record_is_of_this_train_gpt():
    told = h100.RECORD.read_text(encoding="utf-8") if h100.RECORD.exists() else ""
    assert h100.digest() in told, (
        f"records/{h100.RECORD.name} is not of this train_gpt.py (sha256 {h100.digest()}); renew "
        f"it with `{h100.COMMAND}`, on an idle machine with jax[cuda12] or jax[cuda13], no GPU"
    )
    assert len(told.splitlines()) <= 100


def test_the_program_compiles_for_h100s_or_the_script_says_what_is_missing():
    done = subprocess.run(
        [sys.executable, h100.__file__, "--untimed"], capture_output=True, text=True, timeout=1800
    )
    if h100.plugin():
        assert done.returncode == 0, done.stdout + done.stderr
    else:
        assert (done.returncode, done.stdout) == (2, "")
        assert done.stderr == f"compile_8xh100.py: {h100.MISSING}\n"
        assert "jax[cuda12]" in done.stderr and "jax[cuda13]" in done.stderr


def test_the_target_is_an_h100():
    text = Path(h100.TARGET).read_text()
    assert "H100" in text and "core_count: 132" in text


# ---- Traffic -------------------------------------------------------------------------------------
FUSE = "%r = {} fusion({}), kind=kLoop, calls=%f"


def test_a_fusion_reads_whole_operands():
    f = "f: %p = f32[100]{0} parameter(0); %c = bf16[100]{0} convert(%p)"
    p = program("%a = f32[100]{0} parameter(0);" + FUSE.format("bf16[100]{0}", "%a"), f)
    assert total(p) == 400 + 200


def test_an_operand_counts_once_however_often_a_fusion_uses_it():
    f = "f: %p = f32[100]{0} parameter(0); %n = f32[100]{0} negate(%p);"
    f += "%s = f32[100]{0} add(%p, %n); %m = f32[100]{0} multiply(%s, %p);"
    f += "%t = (f32[100]{0}, f32[100]{0}) tuple(%s, %m)"
    line = FUSE.format("(f32[100]{0}, f32[100]{0})", "%a")
    assert total(program("%a = f32[100]{0} parameter(0);" + line, f)) == 400 + 2 * 400


def test_a_slice_in_a_fusion_counts_the_slice():
    f = "f: %p = f32[8,100]{1,0} parameter(0); %s = f32[1,100]{1,0} slice(%p), slice={[2:3]};"
    f += "%b = f32[100]{0} bitcast(%s); %c = bf16[100]{0} convert(%b)"
    entry = "%a = f32[8,100]{1,0} parameter(0);" + FUSE.format("bf16[100]{0}", "%a")
    assert total(program(entry, f)) == 400 + 200


def test_a_slice_of_a_value_computed_in_the_fusion_counts_the_slice():
    f = "f: %p = f32[8,100]{1,0} parameter(0); %i = s32[] parameter(1); %z = s32[] constant(0);"
    f += "%c = bf16[8,100]{1,0} convert(%p); %s = bf16[1,100]{1,0} dynamic-slice(%c, %i, %z)"
    entry = "%a = f32[8,100]{1,0} parameter(0); %i = s32[] parameter(1);"
    assert total(program(entry + FUSE.format("bf16[1,100]{1,0}", "%a, %i"), f)) == 400 + 4 + 200


def test_a_gather_reads_its_rows():
    f = "f: %t = bf16[1000,64]{1,0} parameter(0); %i = s32[10,1]{1,0} parameter(1);"
    f += "%c = f32[1000,64]{1,0} convert(%t); %g = f32[10,1,64]{2,1,0} gather(%c, %i)"
    entry = "%a = bf16[1000,64]{1,0} parameter(0); %i = s32[10,1]{1,0} parameter(1);"
    p = program(entry + FUSE.format("f32[10,1,64]{2,1,0}", "%a, %i"), f)
    assert total(p) == 10 * 64 * 2 + 40 + 10 * 64 * 4


UPDATE = """f: %p = f32[6,100]{{1,0}} parameter(0); %u = f32[1,100]{{1,0}} parameter(1);
    %i = s32[] parameter(2); %z = s32[] constant(0); %n = f32[6,100]{{1,0}} negate(%p);
    %d = f32[6,100]{{1,0}} dynamic-update-slice({}, %u, %i, %z)"""
UPDATED = """%a = f32[6,100]{1,0} parameter(0); %u = f32[1,100]{1,0} parameter(1);
    %i = s32[] parameter(2);"""


def test_an_update_in_place_counts_the_update():
    entry = UPDATED + FUSE.format("f32[6,100]{1,0}", "%a, %u, %i")
    assert total(program(entry, UPDATE.format("%p"))) == 400 + 4 + 400
    rest = 5 * 400  # of the operand, when all of it is computed anew
    assert total(program(entry, UPDATE.format("%n"))) == rest + 400 + 4 + 2400


def test_a_scatter_reads_and_writes_what_it_adds_to():
    f = "f: %p = f32[50,10]{1,0} parameter(0); %i = s32[3,1]{1,0} parameter(1);"
    f += "%u = bf16[3,1,10]{2,1,0} parameter(2); %c = f32[3,1,10]{2,1,0} convert(%u);"
    f += "%s = f32[50,10]{1,0} scatter(%p, %i, %c), to_apply=%add"
    entry = "%a = f32[50,10]{1,0} parameter(0); %i = s32[3,1]{1,0} parameter(1);"
    entry += "%u = bf16[3,1,10]{2,1,0} parameter(2);"
    p = program(entry + FUSE.format("f32[50,10]{1,0}", "%a, %i, %u"), f)
    assert total(p) == 12 + 60 + 2 * 120


def test_a_loop_multiplies():
    body = "b: %p = (f32[100]{0}) parameter(0); %g = f32[100]{0} get-tuple-element(%p), index=0;"
    body += "%c = f32[100]{0} copy(%g); %t = (f32[100]{0}) tuple(%c)"
    loop = "%a = (f32[100]{{0}}) parameter(0); %w = (f32[100]{{0}}) while(%a), body=%b{}"
    known = ', backend_config={"known_trip_count":{"n":"7"}}'
    assert total(p := program(loop.format(known), body)) == 7 * 800
    assert list(h100.check_form(p)) == []
    (fault,) = h100.check_form(program(loop.format(""), body))
    assert "w is a loop without a known trip count" in fault


def test_a_custom_call_is_traffic_but_for_its_scratch_memory():
    entry = "%a = f32[100]{0} parameter(0); %s = (f32[100]{0}, u8[5000]{0}) custom-call(%a), "
    assert total(program(entry + 'custom_call_target="__cub$DeviceRadixSort"')) == 800


GEMM = 'custom_call_target="__cublas$lt$matmul{}", backend_config={{"gemm_backend_config":{{'
GEMM += '"dot_dimension_numbers":{{"lhs_contracting_dimensions":["1"]}}}}}}'


def test_cublas_in_a_fusion_is_a_gemm_and_no_traffic():
    f = "f: %p = bf16[8,64,32]{2,1,0} parameter(0); %x = bf16[100,32]{1,0} parameter(1);"
    f += "%s = bf16[1,64,32]{2,1,0} slice(%p), slice={[0:1]}; %b = bf16[64,32]{1,0} bitcast(%s);"
    f += "%g = (bf16[100,64]{1,0}, s8[33554432]{0}) custom-call(%x, %b), " + GEMM.format("")
    entry = "%w = bf16[8,64,32]{2,1,0} parameter(0); %x = bf16[100,32]{1,0} parameter(1);"
    p = program(entry + FUSE.format("(bf16[100,64]{1,0}, s8[33554432]{0})", "%w, %x"), f)
    (kernel,) = h100.kernels(p)
    assert (kernel.kind, total(p)) == ("gemm", 0)
    assert h100.seconds(p, kernel) == pytest.approx(2 * 100 * 64 * 32 / h100.GEMM_FLOPS)


def test_asynchronous_pairs_count_once():
    pair = "(({0}, {1}, s32[]), {0}, u32[])".format("f32[6,100]{1,0}", "f32[1,100]{1,0}")
    entry = UPDATED + f"%s = {pair} fusion-start(%a, %u, %i), kind=kLoop, calls=%f;"
    entry += "%d = f32[6,100]{1,0} fusion-done(%s)"
    assert total(program(entry, UPDATE.format("%p"))) == 400 + 4 + 400
    entry = "%a = f32[9]{0} parameter(0); %s = (f32[9]{0}, f32[9]{0}, u32[]) copy-start(%a);"
    assert total(program(entry + "%d = f32[9]{0} copy-done(%s)")) == 72


# ---- Cause ---------------------------------------------------------------------------------------
FRAMES = """
FileNames
1 "/somewhere/train_gpt.py"
2 "/somewhere/optax.py"

FunctionNames
1 "train_step"
2 "update"
3 "norm"
4 "loss_fn.<locals>.<genexpr>"

FileLocations
1 {file_name_id=1 function_name_id=1 line=9 end_line=9 column=1 end_column=2}
2 {file_name_id=2 function_name_id=2 line=9 end_line=9 column=1 end_column=2}
3 {file_name_id=1 function_name_id=3 line=9 end_line=9 column=1 end_column=2}
4 {file_name_id=1 function_name_id=4 line=9 end_line=9 column=1 end_column=2}

StackFrames
1 {file_location_id=1 parent_frame_id=1}
2 {file_location_id=2 parent_frame_id=2}
3 {file_location_id=4 parent_frame_id=2}
4 {file_location_id=3 parent_frame_id=4}

"""


def test_traffic_has_a_pass_and_a_function():
    copies = "%a = f32[10]{0} parameter(0); %b = f32[10]{0} copy(%a), metadata={"
    copies += 'op_name="jit(f)/jvp()/mul" stack_frame_id=4}; %c = f32[10]{0} copy(%a), metadata={'
    copies += 'op_name="jit(f)/transpose(jvp())/mul" stack_frame_id=3}; %d = f32[10]{0} copy(%a), '
    copies += 'metadata={op_name="jit(f)/add" stack_frame_id=2}; %e = f32[20]{0} copy(%b)'
    assert h100.traffic_by_cause(program(copies, head=FRAMES)) == {
        ("any", "not named"): (120, 1), ("forward", "norm"): (80, 1),
        ("backward", "loss_fn"): (80, 1), ("update", "train_step"): (80, 1),
    }  # fmt: skip


# ---- Communication -------------------------------------------------------------------------------
GATHER = """%e = bf16[12576,768]{1,0} parameter(0), metadata={op_name="state.params[\\'embed\\']"};
    %x = bf16[8192,8192]{1,0} parameter(1); %s = ((bf16[12576,768]{1,0}), bf16[100608,768]{1,0})
    all-gather-start(%e);""".replace("\n", " ")
MATMUL = (
    "%g = bf16[8192,8192]{1,0} dot(%x, %x), lhs_contracting_dims={1}, rhs_contracting_dims={0};"
)
DONE = "%d = bf16[100608,768]{1,0} all-gather-done(%s)"


def test_a_transfer_is_hidden_by_the_work_scheduled_beside_it():
    (bare,) = h100.communication(program(GATHER + DONE), 8)
    assert bare.what == "all-gather embed" and bare.arrays == "bf16[12576,768]"
    assert bare.bytes == 7 * 12576 * 768 * 2
    assert bare.exposed == bare.transfer == bare.bytes / h100.LINKS
    (hidden,) = h100.communication(program(GATHER + MATMUL + DONE), 8)
    assert hidden.hidden == pytest.approx(2 * 8192**3 / h100.GEMM_FLOPS)
    assert hidden.exposed == 0 and hidden.bytes == bare.bytes
    assert list(h100.check_exposed([hidden])) == []
    assert "0.39 ms" in next(h100.check_exposed([bare]))
    assert "0 gathers" in next(h100.check_exposed([]))


def test_two_transfers_share_the_links():
    again = "%s2 = ((bf16[12576,768]{1,0}), bf16[100608,768]{1,0}) all-gather-start(%e);"
    again += "%d2 = bf16[100608,768]{1,0} all-gather-done(%s2);"
    first, second = h100.communication(program(GATHER + again + DONE), 8)
    assert first.exposed == pytest.approx(2 * first.transfer) and second.exposed == 0


def test_a_scattered_gradient_is_named_after_the_state_that_it_meets():
    entry = """%g = f32[80]{0} parameter(0); %m = f32[10]{0} parameter(1), metadata={
        op_name="state.optimizer[0].mu[\\'head\\']"}; %s = ((f32[80]{0}), f32[10]{0})
        reduce-scatter-start(%g); %d = f32[10]{0} reduce-scatter-done(%s);
        %n = f32[10]{0} negate(%d); %a = f32[10]{0} add(%n, %m)""".replace("\n", " ")
    (transfer,) = h100.communication(program(entry), 8)
    assert (transfer.what, transfer.bytes) == ("reduce-scatter head", 280)


def collectives(*lines: str, gather: str = "all-gather-start") -> list[str]:
    entry = f"""%a = bf16[{WHOLE // 8}]{{0}} parameter(0); %g = bf16[{WHOLE}]{{0}} parameter(1);
        %w = ((bf16[{WHOLE // 8}]{{0}}), bf16[{WHOLE}]{{0}}) {gather}(%a);
        %r = ((bf16[{WHOLE}]{{0}}), bf16[{WHOLE // 8}]{{0}}) reduce-scatter-start(%g);
        {";".join(lines)}""".replace("\n", " ")
    return list(h100.check_collectives(program(entry), True, MINI))


def test_collectives_as_they_should_be():
    small = "%s = ((f32[48]{0}), f32[48]{0}) all-reduce-start(%p)"
    assert collectives("%p = f32[48]{0} parameter(2)", small) == []


def test_a_large_all_reduce_is_reported():
    (fault,) = collectives("%p = bf16[768,768]{1,0} parameter(2)",
                           "%s = bf16[768,768]{1,0} all-reduce(%p)")  # fmt: skip
    assert "s all-reduces 1179648 bytes" in fault


def test_a_synchronous_all_gather_is_reported():
    (fault,) = collectives(gather="all-gather")
    assert fault == "w is a synchronous all-gather"


def test_gradients_that_are_not_scattered_are_reported():
    p = program(
        f"%a = bf16[{WHOLE // 8}]{{0}} parameter(0); %w = bf16[8]{{0}} all-gather-start(%a)"
    )
    (fault,) = h100.check_collectives(p, True, MINI)
    assert fault.startswith("0 elements are reduce-scattered")
    assert list(h100.check_collectives(p, False, MINI)) == []


# ---- Kernels -------------------------------------------------------------------------------------
FMHA = "%k = bf16[1,64,6,16]{3,2,1,0} parameter(0); %y = bf16[1,6,64,16]{3,1,2,0} "
FMHA += 'custom-call(%q, %k, %k), custom_call_target="__cudnn$fmhaSoftmax"'


def test_a_transpose_before_or_after_attention_is_reported():
    x = "%x = bf16[1,6,64,16]{3,2,1,0} parameter(1);"
    clean = "%q = bf16[1,64,6,16]{3,2,1,0} bitcast(%x);"
    before = (
        "%t = bf16[1,64,6,16]{3,2,1,0} transpose(%x); %q = bf16[1,64,6,16]{3,2,1,0} bitcast(%t);"
    )
    fused = "%q = bf16[1,64,6,16]{3,2,1,0} fusion(%x), kind=kInput, calls=%f;"
    after = "; %o = bf16[64,96]{1,0} bitcast(%y); %c = bf16[64,96]{0,1} copy(%o)"
    f = "f: %p = bf16[1,6,64,16]{3,2,1,0} parameter(0); %t = bf16[1,64,6,16]{3,2,1,0} transpose(%p)"
    size = 64 * 6 * 16
    assert list(h100.check_layout(program(x + clean + FMHA), size)) == []
    for text, name in (before + FMHA, "t"), (fused + FMHA, "q"), (clean + FMHA + after, "c"):
        (fault,) = h100.check_layout(program(x + text, f), size)
        assert fault == f"{name} changes only the layout, beside y"
    computes = f.replace("transpose(%p)", "transpose(%n)").replace(
        "; %t", "; %n = bf16[9] negate(%p); %t"
    )
    assert list(h100.check_layout(program(x + fused + FMHA, computes), size)) == []


def test_attention_calls_are_counted():
    p = program("%q = bf16[1,64,6,16]{3,2,1,0} parameter(1);" + FMHA)
    assert list(h100.check_attention(p, False, 1, 1)) == []
    (fault,) = h100.check_attention(p, False, 2, 1)
    assert "1 calls of cuDNN fmhaSoftmax" in fault
    (fault,) = h100.check_attention(p, True, 1, 1)
    assert "0 calls of cuDNN fmhaSoftmaxBackward" in fault
    (fault,) = h100.check_attention(p, False, 1, 8)
    assert "run 1 times, not 1 that run 8 times" in fault


X, W, G = "f8e4m3fn[32,32]{1,0}", "f8e4m3fn[384,32]{1,0}", "f8e5m2[32,384]{1,0}"
HEAD = (
    f"%p = ({X}, {W}, {G}) parameter(0); %x = {X} get-tuple-element(%p); %w = {W} "
    f"get-tuple-element(%p); %g = {G} get-tuple-element(%p)",
    "%z = (bf16[32,384]{1,0}, s8[9]{0}) custom-call(%x, %w), " + GEMM.format("$f8"),
    "%dx = bf16[32,32]{1,0} dot(%g, %w), lhs_contracting_dims={1}, rhs_contracting_dims={0}",
    "%dw = (f32[384,32]{1,0}, s8[9]{0}) custom-call(%g, %x), " + GEMM.format("$f8"),
)


def head_faults(*lines: str, train: bool = True) -> list[str]:
    loop = "%a = f32[1]{0} parameter(0); %l = f32[1]{0} while(%a), body=%b, "
    loop += 'backend_config={"known_trip_count":{"n":"2"}}'  # 64 tokens, 32 in a chunk
    return list(h100.check_head(program(loop, "b: " + ";".join(lines)), train, MINI, 8))


def test_the_fp8_head_is_three_gemms():
    assert head_faults(*HEAD) == []
    assert head_faults(HEAD[0], train=False) == []


@pytest.mark.parametrize("missing, name", [(1, "forward"), (2, "dx"), (3, "dw")])
def test_a_missing_fp8_gemm_is_reported(missing, name):
    (fault,) = head_faults(*HEAD[:missing], *HEAD[missing + 1 :])
    assert fault == f"the head's {name} runs 0 times as an FP8 GEMM, not 2"


def test_fp8_in_validation_is_reported():
    assert len(head_faults(*HEAD, train=False)) == 3


def test_limits():
    assert list(h100.check_resources(1, 10**9)) == []
    assert "compiled in 99.0 s" in next(h100.check_resources(99, 0))
    assert "temporaries of 99.0 GB" in next(h100.check_resources(1, 99 * 10**9))
    assert list(h100.check_sent(1.0)) == list(h100.check_traffic(10**9)) == []
    assert "sends 2.000 times" in next(h100.check_sent(2.0))
    assert "999.0 GB" in next(h100.check_traffic(999 * 10**9))
    unscheduled = program("%a = f32[1]{0} parameter(0)")._replace(scheduled=False)
    assert "not scheduled" in next(h100.check_form(unscheduled))


def test_the_first_middle_and_last_window_are_compiled_unless_all_are_wanted():
    c = train_gpt.PRESETS["record"]
    windows = [128 * n for n in range(1, 15)]
    assert h100.stages(c, False) == [("train", w) for w in (128, 1024, 1792)] + [("val", 1792)]
    assert [w for kind, w in h100.stages(c, True) if kind == "train"] == windows
    assert {w for kind, w in h100.stages(c, True) if kind == "val"} <= {*windows}
