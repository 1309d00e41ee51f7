"""compile_8xh100.py: that its record is of this train_gpt.py, and that it counts and checks right,
on small HLO texts whose bytes were counted by hand."""

import re
import subprocess
import sys

import compile_8xh100 as h100
import pytest


def program(entry: str, *bodies: str, head: str = "") -> h100.Program:
    """Lines of HLO; each body is `name: line; line; ...`, and its last line is its root."""

    def lines(text):
        *most, last = (line.strip() for line in text.split(";") if line.strip())
        return "".join(f"  {line}\n" for line in (*most, f"ROOT {last}"))

    named = (body.split(":", 1) for body in bodies)
    texts = [f"%{name.strip()} (p: f32[1]) -> f32[1] {{\n{lines(text)}}}\n" for name, text in named]
    texts.append(f"ENTRY %main (p: f32[1]) -> f32[1] {{\n{lines(entry)}}}\n")
    return h100.parse("\n".join(("HloModule m", head, *texts)))


def total(p: h100.Program) -> int:
    return sum(n for n, _ in h100.traffic_by_cause(p).values())


# ---- Record --------------------------------------------------------------------------------------
def test_the_record_is_of_this_train_gpt():
    assert h100.DIGEST in h100.RECORD.read_text(encoding="utf-8"), (
        f"records/{h100.RECORD.name} is not of this train_gpt.py (sha256 {h100.DIGEST}); renew it "
        "with `python dev/compile_8xh100.py --write`, on an idle machine with jax[cuda12] or "
        "jax[cuda13], no GPU"
    )


def test_the_program_compiles_for_h100s_or_the_script_says_what_is_missing():
    command = [sys.executable, h100.__file__, "--untimed"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=1800)
    missing = 2, f"compile_8xh100.py: {h100.MISSING}\n"
    compiled = done.returncode == 0 and h100.cudnn_version()
    assert compiled or (done.returncode, done.stderr) == missing, done.stdout + done.stderr


# ---- Traffic -------------------------------------------------------------------------------------
A, ROW, INDEX = "f32[8,100]{1,0}", "f32[1,100]{1,0}", "%i = s32[] parameter(2);"
TABLE, ROWS, SUM = "bf16[1000,64]{1,0}", "s32[10,1]{1,0}", "f32[10,1,64]{2,1,0}"
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
LOOP = "%l = (f32[9]{{0}}) parameter(0); %loop = (f32[9]{{0}}) while(%l), body=%b{}"
KNOWN = ', backend_config={{"known_trip_count":{{"n":"{}"}}}}'


@pytest.mark.parametrize("name", FUSIONS)
def test_a_fusion_reads_what_it_needs_and_writes_its_results(name):
    shapes, body, expected = FUSIONS[name]
    entry = "".join(f"%a{i} = {shape} parameter({i});" for i, shape in enumerate(shapes))
    args = ", ".join(f"%a{i}" for i in range(len(shapes)))
    fused = entry + f"%r = f32[9]{{0}} fusion({args}), kind=kLoop, calls=%f"
    assert total(program(fused, "f: " + body)) == expected
    assert total(program(LOOP.format(KNOWN.format(7)), "f: " + body, "b: " + fused)) == 7 * expected
    pair = f"%s = (({A}), f32[9]{{0}}, u32[]) fusion-start({args}), kind=kLoop, calls=%f;"
    pair = entry + pair + "%r = f32[9]{0} fusion-done(%s)"
    assert total(program(pair, "f: " + body)) == expected


FRAMES = """
FileNames;1 "/a/train_gpt.py";2 "/a/optax.py";
FunctionNames;1 "train_step";2 "update";3 "norm";4 "loss_fn.<locals>.<genexpr>";
FileLocations;1 {file_name_id=1 function_name_id=1 line=9};2 {file_name_id=2 function_name_id=2}
3 {file_name_id=1 function_name_id=3 line=9};4 {file_name_id=1 function_name_id=4 line=9};
StackFrames;1 {file_location_id=1 parent_frame_id=1};2 {file_location_id=2 parent_frame_id=2}
3 {file_location_id=4 parent_frame_id=2};4 {file_location_id=3 parent_frame_id=4};
""".replace(";", "\n")


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
    %x = bf16[8192,4096]{1,0} parameter(1); %y = bf16[4096,16384]{1,0} parameter(2);
    %s = ((bf16[12576,768]{1,0}), bf16[100608,768]{1,0}) all-gather-start(%e);"""
GATHER, DONE = GATHER.replace("\n", " "), "%d = bf16[100608,768]{1,0} all-gather-done(%s)"
GEMM = 'custom_call_target="__cublas$lt$matmul{}", backend_config={{"gemm_backend_config":{{'
GEMM += '"dot_dimension_numbers":{{"lhs_contracting_dimensions":["1"]}}}}}}'
MATMUL = "%g = (bf16[8192,16384]{1,0}, s8[9]{0}) custom-call(%x, %y), " + GEMM.format("") + ";"


def test_a_transfer_is_hidden_by_the_work_scheduled_beside_it():
    (bare,) = h100.communication(program(GATHER + DONE), 8)
    assert bare.what == "all-gather embed" and bare.arrays == "bf16[12576,768]"
    assert bare.bytes == 7 * 12576 * 768 * 2
    assert bare.exposed == bare.transfer == bare.bytes / h100.LINKS
    fused = "%g = bf16[8192,16384]{1,0} fusion(%x, %y), kind=kCustom, calls=%f;"
    f = "f: %x = bf16[8192,4096]{1,0} parameter(0); %y = bf16[4096,16384]{1,0} parameter(1);"
    p = program(GATHER + fused + DONE, f + MATMUL)
    (hidden,) = h100.communication(p, 8)
    assert hidden.hidden == pytest.approx(2 * 8192 * 4096 * 16384 / h100.GEMM_FLOPS)
    assert (hidden.exposed, hidden.bytes, total(p)) == (0, bare.bytes, 0)
    assert h100.embed_exposed([hidden]) == 0 and h100.embed_exposed([bare]) == 1e3 * bare.exposed
    assert h100.embed_exposed([]) > 1e9


def test_two_transfers_share_the_links():
    again = GATHER[GATHER.index("%s =") :].replace("%s", "%s2")
    again += "%d2 = bf16[100608,768]{1,0} all-gather-done(%s2);"
    first, second = h100.communication(program(GATHER + again + DONE), 8)
    assert first.exposed == pytest.approx(2 * first.transfer) and second.exposed == 0


def test_a_scattered_gradient_is_named_after_the_state_that_it_meets():
    entry = """%g = f32[80] parameter(0); %s = ((f32[80]), f32[10]) reduce-scatter-start(%g);
        %m = f32[10] parameter(1), metadata={op_name="state.optimizer[0].mu[\\'head\\']"};
        %d = f32[10] reduce-scatter-done(%s); %n = f32[10] negate(%d); %a = f32[10] add(%n, %m)"""
    (transfer,) = h100.communication(program(entry.replace("\n", " ")), 8)
    assert (transfer.what, transfer.bytes) == ("reduce-scatter head", 280)


# ---- Checks --------------------------------------------------------------------------------------
WANTED = h100.Wanted(True, 8, 1, 1, 64 * 6 * 16, (32, 384, 32), 2, 800, 780)
VAL = WANTED._replace(train=False)
WEIGHTS = """%a = bf16[100]{0} parameter(0); %g = bf16[800]{0} parameter(1);
    %p = bf16[400,100]{1,0} parameter(2); %s = ((f32[48]{0}), f32[48]{0}) all-reduce-start(%f);
    %f = f32[48]{0} parameter(3); %w = ((bf16[100]{0}), bf16[800]{0}) all-gather-start(%a);
    %r = ((bf16[800]{0}), bf16[100]{0}) reduce-scatter-start(%g)""".replace("\n", " ")


@pytest.mark.parametrize("text, other, fault", [
    ("", "", ""),
    ("all-reduce-start(%f)", "all-reduce-start(%p)", "s all-reduces 80000 bytes"),
    ("all-gather-start", "all-gather", "w is a synchronous all-gather"),
    ("all-gather-start(%a)", 'all-gather-start(%a), {"is_sync":true}', "w is a synchronous all-ga"),
    ("reduce-scatter-start(%g)", "reduce-scatter-start(%a)", "reduce-scatter of 100 elements in"),
    ("all-gather-start(%a)", "all-gather-start(%g)", "all-gather of 800 elements in all, not 100"),
    ("all-reduce-start(%f)", "all-to-all-start(%f)", "s is all-to-all: nothing here needs one"),
])  # fmt: skip
def test_collectives(text, other, fault):
    p = program(WEIGHTS.replace(text, other) if text else WEIGHTS)
    assert [f[: len(fault)] for f in h100.check_collectives(p, WANTED)] == [fault] * bool(fault)


X = "%x = bf16[1,6,64,16] parameter(1); %k = bf16[1,64,6,16] parameter(0);"
FMHA = "%y = bf16[1,6,64,16] custom-call(%q, %k, %k), "
FMHA += 'custom_call_target="__cudnn$fmhaSoftmax"'
CLEAN = X + "%q = bf16[1,64,6,16] bitcast(%x);" + FMHA


def test_attention_calls_are_counted():
    def found(w):
        return list(h100.check_attention(program(CLEAN), w))

    assert found(VAL) == []
    assert "fmhaSoftmax run [1] times, not 2 of them 1 times" in found(VAL._replace(attending=2))[0]
    assert "fmhaSoftmax run [1] times, not 1 of them 8 times" in found(VAL._replace(turns=8))[0]
    assert "fmhaSoftmaxBackward run [] times, not 1 of them" in found(WANTED)[0]


@pytest.mark.parametrize("text, name", [
    (X + "%t = bf16[1,64,6,16] transpose(%x); %q = bf16[1,64,6,16] bitcast(%t);" + FMHA, "t"),
    (X + "%q = bf16[1,64,6,16] fusion(%x), kind=kInput, calls=%moves;" + FMHA, "q"),
    (X + "%q = bf16[1,64,6,16] fusion(%x), kind=kInput, calls=%computes;" + FMHA, None),
    (CLEAN + "; %o = bf16[64,96] bitcast(%y); %c = bf16[64,96]{0,1} copy(%o)", "c"),
])  # fmt: skip
def test_a_transpose_before_or_after_attention_is_reported(text, name):
    moves = "moves: %p = bf16[1,6,64,16] parameter(0); %t = bf16[1,64,6,16] transpose(%p)"
    computes = moves.replace("moves", "computes").replace("; ", "; %n = f32[9] negate(%p); ")
    faults = list(h100.check_attention(program(text, moves, computes), VAL))
    assert faults == [f"{name} changes only the layout, beside y"] * bool(name)


XS, W, G = "f8e4m3fn[32,32]{1,0}", "f8e4m3fn[384,32]{1,0}", "f8e5m2[32,384]{1,0}"
HEAD = (
    f"%p = ({XS}, {W}, {G}) parameter(0); %x = {XS} get-tuple-element(%p); %w = {W} "
    f"get-tuple-element(%p); %g = {G} get-tuple-element(%p)",
    "%z = (bf16[32,384]{1,0}, s8[9]{0}) custom-call(%x, %w), " + GEMM.format("$f8"),
    "%dx = bf16[32,32]{1,0} dot(%g, %w), lhs_contracting_dims={1}, rhs_contracting_dims={0}",
    "%dw = (f32[384,32]{1,0}, s8[9]{0}) custom-call(%g, %x), " + GEMM.format("$f8"),
)


def test_the_head_is_three_gemms_in_fp8_and_in_validation_none():
    def found(lines, w, times=2):
        p = program(LOOP.format(KNOWN.format(times)), "b: " + ";".join(lines))
        return len([*h100.check_head(p, w)])

    assert found(HEAD, WANTED) == found(HEAD[:1], VAL) == 0
    assert found(HEAD, VAL) == found(HEAD, WANTED, times=3) == 1
    assert [found([*HEAD[:i], *HEAD[i + 1 :]], WANTED) for i in (1, 2, 3)] == [1, 1, 1]


def test_limits():
    p = program(WEIGHTS + ";" + LOOP.format(""), "b: %p = f32[1] parameter(0)")
    r = h100.Result("train", 128, WANTED._replace(attending=0), 99, 99, 1, p, {}, 99, [], 2)
    limits = ["99.00 s", "99.00 GB", "2.00 times", "99.00 GB", "inf ms"]
    found = [re.match(r"[\w.]+ \w+", fault)[0] for fault in h100.faults(r)]
    assert found == ["loop is", "GEMMs in", *limits]
    assert len([*h100.faults(r, timed=False)]) == 6
