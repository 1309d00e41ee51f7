"""The pages of compiled programs are of this train_gpt.py and of run/machine.py's table of memory,
and what lab/h100/ counts is what one counts by hand."""

import re

import compile_8xh100
import compile_kernels
import compile_tpu
import jax
import machine
import pytest
from h100 import estimate, hlo, ptx

import train_gpt


@pytest.mark.parametrize("preset", compile_8xh100.PAGES)
def test_every_row_of_fits_was_compiled_and_has_memory_to_spare(preset):
    page = compile_8xh100.PAGES[preset].read_text(encoding="utf-8").partition("## Memory")[2]
    compiled = {}
    for line in page.partition("\n## ")[0].splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if len(cells) == 8 and cells[1].isdigit():
            compiled.setdefault((cells[0], int(cells[1])), []).append(float(cells[6]))
    expected = {}
    for flags, gigabytes in machine.FITS[preset]:
        for devices, GB in zip((1, 2, 4, 8), gigabytes, strict=True):
            expected[flags or "none", devices] = GB
    assert compiled.keys() == expected.keys()
    for key, GB in expected.items():
        assert max(compiled[key]) + compile_8xh100.SPARE_GB <= GB + 0.05, key


@pytest.mark.parametrize("preset", compile_8xh100.PAGES)
def test_the_page_is_of_the_programs_of_this_train_gpt(preset):
    page = compile_8xh100.PAGES[preset].read_text(encoding="utf-8")
    if f"as lowered by jax {jax.__version__}:" not in page:
        pytest.skip(f"the page of {preset} has no digest by jax {jax.__version__}")
    renew = f"python lab/compile_8xh100.py --preset {preset} --write renews it"
    assert compile_8xh100.digest_line(preset) in page, renew


def test_the_shelf_has_the_numbers_of_the_kernels_page():
    page = compile_kernels.PAGE.read_text(encoding="utf-8")
    times = page.partition("## Milliseconds")[2].partition("\n## ")[0]
    shelf = (compile_kernels.ROOT / "records/ideas/README.md").read_text(encoding="utf-8")
    for row in compile_kernels.ROWS:
        names, flags = row.cells()
        (line,) = re.findall(rf"^\| *{names} *\| *{flags} *\|(.*)\|$", times, re.M)
        *ms, GB, seconds = [cell.strip() for cell in line.split("|")]
        names = names if row.names == compile_kernels.ALL else f"`{names}`"
        flags = f"`{flags}`" if flags else ""
        expected = f"| {names} | {flags} | {ms[0]}, {ms[2]} | {GB} | {seconds} |"
        assert expected.replace("|  |", "| |") in shelf.replace("**", ""), expected


def test_the_tpu_page_is_of_the_rows_of_fits_and_without_faults():
    text = compile_tpu.PAGE.read_text(encoding="utf-8")
    missing = [name for name in compile_tpu.CHIPS if compile_tpu.heading(name) not in text]
    assert missing == [] and "FAIL" not in text, "python lab/compile_tpu.py renews it"


def test_a_run_with_an_idea_is_priced_by_the_stages_that_were_compiled():
    page = compile_8xh100.page_costs(compile_8xh100.PAGES["record"].read_text(encoding="utf-8"))
    assert {stage for _, stage in page} == {0, 1, 2, 3} and len(page) == 8
    c = train_gpt.PRESETS["record"]
    run = compile_8xh100.whole_run(c, page, page)
    assert [steps for _, steps in run.values()] == [423, 424, 423, 15]
    assert 92 < compile_8xh100.run_seconds(run) < 94  # lab/README.md: 93 s
    twice = {key: cost._replace(ms=2 * cost.ms) for key, cost in page.items() if key[1] == 2}
    priced = compile_8xh100.whole_run(c, twice, page)
    assert priced == {stage: (pytest.approx(2 * ms), steps) for stage, (ms, steps) in run.items()}


# ---- What is counted -----------------------------------------------------------------------------
def program(entry: str, *bodies: str) -> hlo.Program:
    """HLO from `name: line; line; ...`, entry without a name; the last line is the root."""
    text = "HloModule m\n"
    for computation in (*bodies, f"ENTRY %main:{entry}"):
        name, body = computation.split(":", 1)
        lines = [" ".join(line.split()) for line in body.split(";") if line.strip()]
        lines[-1] = f"ROOT {lines[-1]}"
        text += f"{name} (p: f32[1]) -> f32[1] {{\n"
        text += "".join(f"  {line}\n" for line in lines)
        text += "}\n"
    return hlo.parse(text)


def test_a_fusion_in_a_loop_reads_what_it_needs_as_often_as_the_loop_runs():
    gather = "f: %t = bf16[1000,64] parameter(0); %i = s32[10,1] parameter(1); "
    gather += "%c = f32[1000,64] convert(%t); %g = f32[10,1,64] gather(%c, %i)"
    fused = "b: %a0 = bf16[1000,64] parameter(0); %a1 = s32[10,1] parameter(1);"
    fused += "%r = f32[9] fusion(%a0, %a1), kind=kLoop, calls=%f"
    loop = "%l = (f32[9]) parameter(0); %loop = (f32[9]) while(%l), body=%b"
    loop += ', backend_config={"known_trip_count":{"n":"7"}}'
    costs = estimate.cost_by_cause(program(loop, gather, fused)).values()
    assert sum(cost.bytes for cost in costs) == 7 * (1280 + 40 + 2560)


def test_a_transfer_is_hidden_by_the_work_scheduled_beside_it():
    start = "%e = bf16[1572,768] parameter(0); %x = bf16[8192,4096] parameter(1);"
    start += "%y = bf16[4096,2048] parameter(2);"
    start += "%s = ((bf16[1572,768]), bf16[12576,768]) all-gather-start(%e);"
    done = "%d = bf16[12576,768] all-gather-done(%s);"
    (bare,) = estimate.transfers(program(start + done))
    assert bare.exposed == bare.seconds == bare.bytes / estimate.LINKS
    assert bare.bytes == 7 * 1572 * 768 * 2
    fused = "%g = bf16[8192,2048] fusion(%x, %y), kind=kCustom, calls=%f;"
    gemm = "f: %x = bf16[8192,4096] parameter(0); %y = bf16[4096,2048] parameter(1);"
    gemm += "%g = (bf16[8192,2048], s8[9]) custom-call(%x, %y), "
    gemm += 'custom_call_target="__cublas$lt$matmul", {"lhs_contracting_dimensions":["1"]}'
    (hidden,) = estimate.transfers(program(start + fused + done, gemm))
    work = 2 * 8192 * 4096 * 2048 / estimate.BFLOAT16 + estimate.LAUNCH
    assert hidden.hidden == pytest.approx(work) and hidden.exposed == 0


def test_instructions_count_for_all_threads_as_often_as_their_loop_runs(tmp_path):
    code = "mov.b32 %r1, 0;\nld.param.b64 %rd1, [a];\n$L__BB0_1:\nadd.s32 %r1, %r1, 8;\n"
    code += "setp.lt.u32 %p1, %r1, 96;\n@%p1 bra $L__BB0_1;\nst.global.b32 [%rd1], %r1;\nret;"
    a_thread = 2 + 12 * 3 + 2
    assert ptx.count_instructions(code.splitlines()) == a_thread
    entry = f".visible .entry fusion_1(\n\t.param .u64 a\n)\n.reqntid 128, 1, 1\n{{\n{code}\n}}\n"
    (tmp_path / "m.1.ptx").write_text(f".version 9.4\n{entry}")
    name = 'thunk_metadata { thunk_info { profile_annotation: "fusion.1"\n thunk_id: 7 } }\n'
    (tmp_path / "m.thunk_metadata.txt").write_text(name)
    launch = "007: kCustomKernel [source] fusion_1 grid: [3, 2, 1] threads: [128, 1, 1] shared: 0\n"
    (tmp_path / "m.thunk_sequence.txt").write_text(launch)
    assert ptx.read_dump(tmp_path) == {"fusion.1": 3 * 2 * 128 * a_thread}
