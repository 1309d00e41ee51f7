"""Compiles the record with the attempts of records/ideas/ that have kernels for Hopper, without a
GPU, and estimates what they save.

    python lab/compile_kernels.py [--write]    takes about half an hour on two idle cores
    python lab/compile_kernels.py --traced     finds out in a minute whether the page is old

With --write, the first writes records/gpu/h100_kernels.txt. It needs jax[cuda13], and the page of
the record as it is (compile_8xh100.py --write). --traced runs with the version of JAX that has
written the page, on any machine. It looks in the page for a digest of every copy of train_gpt.py.
This is of the second step of stage 2, as JAX traces it, because the text of a lowered kernel
contains paths. The other programs run the same kernels in other shapes.
"""

import argparse
import hashlib
import re
import sys
from pathlib import Path
from typing import NamedTuple
from unittest import mock

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / name) for name in ("", "data", "lab", "records", "run")]

import compile_8xh100  # noqa: E402
import idea  # noqa: E402
import jax  # noqa: E402
from compile_8xh100 import Costs, Program8  # noqa: E402
from h100 import estimate, mosaic, report  # noqa: E402
from h100.checks import SECOND, VAL  # noqa: E402
from messages import one_line, refuse  # noqa: E402

PAGE = ROOT / "records/gpu/h100_kernels.txt"
STAGES = [0, 2]  # that are compiled
DIGEST_OF = (SECOND, 2)  # kind and stage of the program that a digest is of
ALL = ("fused_mlp", "fused_head", "fused_qkv")
# Preset, kind, stage and devices of other programs that are compiled with all attempts.
OTHERS = (("medium", SECOND, 8, 8), ("record", SECOND, 3, 1), ("record", VAL, 4, 8))


class Row(NamedTuple):
    """Attempts together, and fields of Config that they set."""

    names: tuple[str, ...]
    fields: tuple[str, ...] = ()

    def cells(self) -> tuple[str, str]:
        """The names, and the fields as flags of run.sh."""
        flags = " ".join("--" + field.replace("=", " ") for field in self.fields)
        names = "all three" if self.names == ALL else " ".join(self.names)
        return names, flags

    def source(self) -> str:
        """train_gpt.py with the attempts."""
        return idea.copy_of(list(self.names)).decode()


ROWS = (
    Row(("fused_mlp",)),
    Row(("fused_mlp",), ("mlp_fp8=1",)),
    Row(("fused_mlp",), ("mlp_fp8=2",)),
    Row(("fused_head",)),
    Row(("fused_head",), ("logits_fp8=1",)),
    Row(("fused_qkv",)),
    Row(("fused_qkv",), ("qkv_fp8=2",)),
    Row(ALL),
    Row(ALL, ("mlp_fp8=1", "qkv_fp8=1")),
    Row(ALL, ("mlp_fp8=2", "qkv_fp8=2")),
    Row(ALL, ("mlp_fp8=2", "qkv_fp8=2", "logits_fp8=1")),
)


# ---- Whether the page describes these programs ---------------------------------------------------
def traced_digest(source: str, fields: tuple[str, ...]) -> str:
    """sha256 of a program of a copy of train_gpt.py, as JAX traces it for 8 devices."""
    as_it_is = compile_8xh100.train_gpt.SOURCE
    texts = []

    def store_text(traced: jax.stages.Traced) -> mock.Mock:
        """Stands in for lowering, whose result is then compiled."""
        texts.append(str(traced.jaxpr))
        return mock.Mock()

    try:
        compile_8xh100.use(source)
        train_gpt = compile_8xh100.train_gpt
        c = compile_8xh100.set_fields(compile_8xh100.record_config("record", "band"), fields)
        mesh = train_gpt.make_mesh(jax.devices()[:8])
        with (
            mock.patch.object(train_gpt, "prefix_table", compile_8xh100.any_prefixes),
            mock.patch.object(jax.stages.Traced, "lower", store_text),
        ):
            compile_8xh100.compile_step(*DIGEST_OF, c, mesh)
    finally:
        compile_8xh100.use(as_it_is)
    (text,) = texts
    text = re.sub("0x[0-9a-f]+", "", text)  # addresses of functions
    return hashlib.sha256(text.encode()).hexdigest()


def digest_table(rows: tuple[Row, ...]) -> str:
    """The digests of some rows."""
    cells = [(*row.cells(), traced_digest(row.source(), row.fields)) for row in rows]
    return report.table(("attempts", "flags", "sha256"), *cells)


def is_current(rows: tuple[Row, ...] = ROWS) -> bool:
    """Whether the page has the digests of these rows. Refuses another version of JAX."""
    page = PAGE.read_text(encoding="utf-8")
    version = re.search(r"^- jax (\S+),", page, re.M)[1]
    if version != jax.__version__:
        refuse(f"{PAGE.name} is of jax {version}, and jax {jax.__version__} traces otherwise")
    digests = {line.split("|")[-2].strip() for line in digest_table(rows).splitlines()[2:]}
    return all(digest in page for digest in digests)


# ---- What the attempts save ----------------------------------------------------------------------
class Work(NamedTuple):
    """Seconds of the Mosaic kernels of a program."""

    products: float = 0.0
    epilogues: float = 0.0  # of products
    others: float = 0.0  # kernels without a product


def work_of(cost: Program8) -> Work:
    """What a program's Mosaic kernels take."""
    products = 0.0
    epilogues = 0.0
    others = 0.0
    for call in mosaic.calls(cost.program):
        seconds = estimate.seconds(cost.program, call)
        if call.instruction.product():
            epilogue = estimate.issued(cost.program, call) / estimate.ISSUE
            products += seconds - epilogue
            epilogues += epilogue
        else:
            others += seconds
    return Work(products, epilogues, others)


def break_even(work: Work, saved: float) -> float:
    """At which share of the assumed rate an attempt saves nothing. The rate is that of its products
    or, if it has none, of its other kernels. `saved` is in seconds."""
    depends = work.products or work.others
    return depends / (depends + saved)


def time_table(base: Costs, copies: dict[Row, Costs], page: Costs) -> str:
    """Milliseconds of a mean step by stage, and seconds of the run."""
    c = compile_8xh100.train_gpt.PRESETS["record"]
    stages = sorted({stage for _, stage in page})
    rows = [("attempts", "flags", *(f"stage {stage}" for stage in stages), "GB", "run, s")]
    for name, costs in [(("none", ""), base), *((row.cells(), copies[row]) for row in copies)]:
        run = compile_8xh100.whole_run(c, costs, page)
        GB = max(cost.GB for cost in costs.values())
        ms = [f"{run[stage][0]:.1f}" for stage in stages]
        rows.append((*name, *ms, f"{GB:.1f}", f"{compile_8xh100.run_seconds(run):.1f}"))
    return report.table(*rows)


def saving_table(base: Costs, copies: dict[Row, Costs]) -> str:
    """Before and after in the steps that update all parameters, and when an attempt loses."""
    head = ("attempts", "flags", "stage", "before", "after", "products", "epilogues", "others")
    rows = [(*head, "loses below")]
    for row, costs in copies.items():
        for stage in STAGES:
            before = base[SECOND, stage].ms
            after = costs[SECOND, stage].ms
            work = work_of(costs[SECOND, stage])
            share = break_even(work, (before - after) / 1e3)
            numbers = before, after, *(1e3 * seconds for seconds in work)
            cells = [f"{ms:.1f}" for ms in numbers]
            rows.append((*row.cells(), stage, *cells, f"{100 * share:.0f} %"))
    return report.table(*rows)


def other_table() -> str:
    """Milliseconds and GB of OTHERS."""
    rows = [("preset", "step", "stage", "devices", "ms", "GB")]
    for preset, kind, stage, devices in OTHERS:
        c = compile_8xh100.prepare(preset)
        step = (kind, stage, c)
        done = compile_8xh100.compile_for_h100(compile_8xh100.compile_step, *step, devices=devices)
        ms = sum(estimate.step_ms(done.program, estimate.transfers(done.program)).values())
        GB = (done.memory.temp_size_in_bytes + done.memory.argument_size_in_bytes) / 1e9
        rows.append((preset, kind, stage, devices, f"{ms:.1f}", f"{GB:.1f}"))
        print(*rows[-1], flush=True)
    return report.table(*rows)


def page_text(base: Costs, copies: dict[Row, Costs], page: Costs, others: str) -> str:
    """The page."""
    kernels = []
    for row in copies:
        if row.names == ALL:
            programs = {stage: copies[row][SECOND, stage].program for stage in STAGES}
            described, table = report.mosaic_section(programs, compile_8xh100.KERNELS)
            kernels += [f"**{' '.join(row.cells()).strip()}.** {described}", table]
    versions = f"- jax {jax.__version__}, cuDNN {compile_8xh100.cudnn_version()}"
    paragraphs = [
        "# Kernels for Hopper in the record, compiled on a machine without a GPU",
        "No GPU has run them. records/ideas/ has the attempts. "
        "`python lab/compile_kernels.py --write` renews this file; `--traced` finds out "
        "in a minute whether that is necessary.",
        versions,
        "## Milliseconds of a mean step, estimated",
        "Stages 0 and 2 were compiled, and 1 and 3 are in proportion. Rates are those of "
        "h100_compile.txt. A kernel that multiplies is assumed to take as long as cuBLAS, "
        "and then as long as the instructions that end it, with which nothing overlaps. "
        "GB are the most that each of 8 GPUs needs.",
        time_table(base, copies, page),
        "## When an attempt loses",
        "Milliseconds of a step that updates all parameters, before and after, and those of the "
        "Mosaic kernels in it. The last column is the share of cuBLAS's assumed rate at which the "
        "products of these kernels are so slow that nothing is saved. Without `--logits_fp8 1`, "
        "`fused_head` has no product: its share is that of the rates of memory and instructions.",
        saving_table(base, copies),
        "## Kernels",
        *kernels,
        "## Other programs, with all three in bfloat16",
        others,
        "## Programs",
        f"sha256 of the {DIGEST_OF[0]} step of stage {DIGEST_OF[1]} as traced for 8 devices.",
        digest_table(tuple(copies)),
    ]
    return "\n\n".join(paragraphs) + "\n"


def compile_rows(rows: tuple[Row, ...]) -> str:
    """Compiles all rows, and returns the page. Exits with status 2 if the record's page is old."""
    compile_8xh100.prepare("record")  # before JAX starts, which reads its flags once
    record_page = compile_8xh100.PAGES["record"].read_text(encoding="utf-8")
    if f"- jax {jax.__version__}," not in record_page:
        refuse("h100_compile.txt is of another version of JAX: renew it before")
    if compile_8xh100.digest_line() not in record_page.splitlines():
        refuse("h100_compile.txt is of other programs: renew it before")
    page = compile_8xh100.page_costs(record_page)
    base = {key: cost for key, cost in page.items() if key[1] in STAGES}
    as_it_is = compile_8xh100.train_gpt.SOURCE
    copies = {}
    for row in rows:
        compile_8xh100.use(row.source())
        name = " ".join(row.cells()).strip()
        copies[row] = compile_8xh100.compiled_costs(STAGES, name, row.fields)
    compile_8xh100.use(Row(ALL).source())
    others = other_table()
    compile_8xh100.use(as_it_is)
    return page_text(base, copies, page, others)


def main(argv: list[str]) -> int:
    """Runs the command line and returns the exit status."""
    cli = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    cli.add_argument("--write", action="store_true", help="write the page")
    cli.add_argument("--traced", action="store_true", help="only compare the programs' text")
    arguments = cli.parse_args(argv)
    jax.config.update("jax_num_cpu_devices", 8)
    jax.config.update("jax_enable_compilation_cache", False)
    if arguments.traced:
        current = is_current()
        print(f"{PAGE.name} {'has' if current else 'does not have'} the digests of these programs")
        return 0 if current else 1
    if compile_8xh100.cudnn_version() is None:
        refuse(compile_8xh100.MISSING)
    text = compile_rows(ROWS)
    print(f"\n{text}")
    if arguments.write:
        PAGE.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    with one_line("compile_kernels.py"):
        status = main(sys.argv[1:])
    sys.exit(status)
