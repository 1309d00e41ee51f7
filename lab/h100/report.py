"""The tables of records/gpu/h100_compile.txt and h100_compile_medium.txt."""

import math
from collections import Counter, defaultdict
from collections.abc import Iterable

from h100 import estimate
from h100.checks import SECOND, Result, fp8_products
from h100.estimate import PARTS, Cost, cause, exposed_ms, issued, moved, seconds, traffic
from h100.hlo import Kernel, Program, kernels
from h100.mosaic import MosaicKernel, calls

# Lowest and highest milliseconds of a step in upstream's logs of a preset's shapes, by stage.
UPSTREAM_MS = {"record": {0: (31, 32), 1: (57, 58), 2: (82.6, 84), 3: (83, 84)}}
TWO_STEPS = "Every second step updates all parameters, the first of two only the matrices."
LONGEST_KERNELS = 40
SMALL_TRAFFIC = 5e6  # bytes; causes below it share a row


def table(*rows: Iterable) -> str:
    """A table in Markdown, whose first row is the head. A column is aligned left if its last cell
    begins with a letter, else right."""
    texts = [[str(cell) for cell in row] for row in rows]
    columns = []
    for head, *cells in zip(*texts, strict=True):
        width = max(len(cell) for cell in (head, *cells))
        if cells[-1][:1].isalpha():
            rule = ":" + "-" * (width - 1)
            columns.append([cell.ljust(width) for cell in (head, rule, *cells)])
        else:
            rule = "-" * (width - 1) + ":"
            columns.append([cell.rjust(width) for cell in (head, rule, *cells)])
    return "\n".join(f"| {' | '.join(row)} |" for row in zip(*columns, strict=True))


def program_table(results: list[Result]) -> str:
    """A row for every program; programs that differ only in stage and seconds share a row."""
    groups = defaultdict(list)
    for result in results:
        launched = Counter(kernel.kind for kernel in kernels(result.program))
        numbers = (
            f"{result.temporaries_GB:.2f}",
            f"{result.arguments_GB:.2f}",
            launched["attention"],
            len(list(fp8_products(result.program))),
            launched["gemm"],
            f"{result.traffic_GB():.1f}",
            f"{result.sent_GB():.3f}",
            f"{result.sent_ratio:.3f}",
        )
        groups[result.kind, result.expected.devices, numbers].append(result)
    rows = []
    for (kind, devices, numbers), group in groups.items():
        stages = ", ".join(str(result.stage) for result in group)
        slowest = max(result.compile_s for result in group)
        rows.append((kind, devices, stages, f"{slowest:.1f}", *numbers))
    return table(
        (
            "program",
            "devices",
            "stages",
            "compile s",
            "temporaries GB",
            "arguments GB",
            "cuDNN calls",
            "FP8 GEMMs",
            "GEMMs",
            "traffic GB",
            "sent GB",
            "of ideal",
        ),
        *rows,
    )


def time_table(results: list[Result], steps: Counter, upstream: dict) -> str:
    """Estimated milliseconds of the steps of every stage on 8 devices, beside upstream's. If there
    are none, with the steps of a run, by kind and stage, and their seconds."""
    trained = [r for r in results if r.expected.train and r.expected.devices == 8]
    beside = ("upstream", "ratio") if upstream else ("steps", "seconds")
    rows = [("stage", "step", *PARTS, "ms", *beside)]
    blanks = [""] * len(PARTS)
    for stage in dict.fromkeys(result.stage for result in trained):
        of_stage = [result for result in trained if result.stage == stage]
        for result in of_stage:
            parts = [f"{ms:.1f}" for ms in result.parts.values()]
            rows.append((stage, result.kind, *parts, f"{result.ms():.1f}", "", ""))
        runs = sum(steps[result.kind, stage] for result in of_stage)
        all_ms = sum(steps[result.kind, stage] * result.ms() for result in of_stage)
        mean = all_ms / runs
        beside = (runs, f"{all_ms / 1e3:.1f}")
        if upstream:
            low, high = upstream[stage]
            beside = (f"{low} to {high}", f"{2 * mean / (low + high):.2f}")
        rows.append((stage, "mean", *blanks, f"{mean:.1f}", *beside))
    if not upstream:
        all_ms = sum(steps[result.kind, result.stage] * result.ms() for result in trained)
        rows.append(("all", "together", *blanks, "", steps.total(), f"{all_ms / 1e3:.1f}"))
    return table(*rows)


def traffic_table(result: Result) -> str:
    """Traffic, instructions and milliseconds by pass and function."""
    large = {key: cost for key, cost in result.costs.items() if cost.bytes >= SMALL_TRAFFIC}
    small = Cost()
    everything = Cost()
    for key, cost in result.costs.items():
        everything = everything.plus(cost)
        if key not in large:
            small = small.plus(cost)
    rows = [("pass", "function", "GB", "kernels", "PTX, 1e9", "ms")]
    for (pass_, function), cost in [
        *large.items(),
        (("rest", "less each"), small),
        (("all", "together"), everything),
    ]:
        GB = f"{cost.bytes / 1e9:.2f}"
        ptx = f"{cost.instructions / 1e9:.1f}"
        rows.append((pass_, function, GB, cost.kernels, ptx, f"{1e3 * cost.seconds:.2f}"))
    return table(*rows)


def kernel_table(result: Result) -> str:
    """The kernels generated by XLA that take longest, and whether their bytes or their instructions
    do."""
    program = result.program
    generated = [kernel for kernel in kernels(program) if kernel.kind == "other"]
    generated.sort(key=lambda kernel: -seconds(program, kernel))
    rows = [("kernel", "pass", "function", "runs", "GB", "PTX an element", "bound by", "ms")]
    for kernel in generated[:LONGEST_KERNELS]:
        n = traffic(program, kernel)
        ptx = issued(program, kernel)
        elements = kernel.runs * moved(program, kernel).largest
        by_instructions = ptx / estimate.ISSUE > n / estimate.MEMORY
        row = (
            kernel.instruction.name,
            *cause(program, kernel),
            kernel.runs,
            f"{n / 1e9:.2f}",
            f"{ptx / max(1, elements):.0f}",
            "instructions" if by_instructions else "bytes",
            f"{1e3 * seconds(program, kernel):.2f}",
        )
        rows.append(row)
    return table(*rows)


MOSAIC = """Mosaic kernels, with their first two operands. PTX is that of a product's epilogue,
for an element of the product; or else for an element of the largest array. KB are those of shared
memory in a block.""".replace("\n", " ")


def mosaic_section(programs: dict[int, Program], known: dict[str, MosaicKernel]) -> list[str]:
    """A table of the Mosaic kernels in some programs, by their stages, and what its columns
    are; nothing, if there are none."""
    head = ("kernel", "pass", "stage", "runs", "operands", "blocks", "threads", "registers")
    rows = [(*head, "spilled B", "KB", "PTX an element", "ms a run")]
    unknown = set()
    for stage, program in programs.items():
        of_code = defaultdict(list)
        for call in calls(program):
            of_code[call.instruction.kernel_hash()].append(call)
        for code, equal_calls in of_code.items():
            rows.append(mosaic_row(program, stage, equal_calls, known[code]))
            if known[code].counts.unknown:
                unknown.add(known[code].name)
    if len(rows) == 1:
        return []
    more = [f"Of {name}, some jumps are not followed, so PTX may be more." for name in unknown]
    return [" ".join((MOSAIC, *more)), table(*rows)]


def mosaic_row(
    program: Program, stage: int, equal_calls: list[Kernel], kernel: MosaicKernel
) -> tuple:
    """The row of calls that run the same code."""
    call = equal_calls[0]
    operands = [call.computation[name] for name in call.instruction.operands]
    if call.instruction.product():
        elements = operands[0].dims()[0] * operands[1].dims()[0]
    else:
        shapes = [shape for array in (call.instruction, *operands) for shape in array.shapes]
        elements = max(math.prod(dims) for _, dims in shapes)
    runs = sum(call.runs for call in equal_calls)
    return (
        kernel.name,
        cause(program, call)[0],
        stage,
        runs,
        " ".join(operand.array() for operand in operands[:2]),
        kernel.blocks,
        kernel.threads,
        kernel.registers,
        kernel.spilled,
        f"{kernel.shared / 1024:.0f}",
        f"{kernel.counts.instructions / elements:.1f}",
        f"{1e3 * seconds(program, call) / call.runs:.3f}",
    )


def transfer_table(result: Result) -> str:
    """Every collective, and their sums."""
    rows = [("collective", "operands", "sent MB", "transfer ms", "work ms", "exposed ms")]
    sums = [0, 0.0, 0.0, 0.0]
    for transfer in result.transfers:
        numbers = transfer.bytes, transfer.seconds, transfer.hidden, transfer.exposed
        sums = [a + b for a, b in zip(sums, numbers, strict=True)]
        rows.append((transfer.name, transfer.arrays, *transfer_cells(*numbers)))
    rows.append(("all", "together", *transfer_cells(*sums)))
    return table(*rows)


def transfer_cells(n: int, *seconds: float) -> list[str]:
    """Bytes in MB, and seconds in ms, as text."""
    return [f"{n / 1e6:.1f}", *(f"{1e3 * s:.3f}" for s in seconds)]


def assumptions(record_21_ms: float, upstream: dict) -> str:
    """The paragraph on the rates."""
    T = 1e12
    sources = ""
    if upstream:
        sources = (
            "Upstream's milliseconds are from its logs of these shapes; it has no log of record 89 "
            "as merged. "
        )
    return (
        f"**Estimates: no GPU has run this.** Rates: products {estimate.BFLOAT16 / T:.0f} Tflop/s "
        f"in bfloat16, {estimate.FLOAT32 / T:.0f} in float32, {estimate.FP8 / T:.0f} in FP8 "
        f"({estimate.FP8_MIXED / T:.0f} of two formats); memory {estimate.MEMORY / T} TB/s; "
        f"{estimate.ISSUE / T:.0f}e12 PTX instructions a second; attention "
        f"{estimate.ATTENTION / T:.0f} Tflop/s, as if windows were {estimate.MORE_KEYS} keys "
        f"longer; {1e6 * estimate.LAUNCH} µs a kernel; links {estimate.LINKS / 1e9:.0f} GB/s; and "
        f"communication takes {T * estimate.STOLEN:.0f} ms a GB from kernels. "
        f"They were fixed on record 21's file, which takes {record_21_ms:.1f} ms by them (108 ± 5 "
        f"by another calculation; PyTorch's took 102). {sources}"
        "Tuned products, cuDNN and NCCL may be faster or slower. The column `other` is of the "
        "kernels that XLA generates."
    )


def memory_section(memory_table: str) -> list[str]:
    """The paragraphs on memory by the rows of FITS."""
    return [
        "## Memory of each GPU, by the rows of FITS",
        "State is what lives between steps; training and validation are the temporaries of a "
        "second step and of a validation, in the stage of the longest sequences. Workspaces of "
        "cuDNN and cuBLAS come on top, so FITS asks for more: it is the memory that JAX must have, "
        "which is three quarters of a GPU's, or the fraction in `XLA_CLIENT_MEM_FRACTION`.",
        memory_table,
    ]


def page(
    preset: str,
    facts: str,
    results: list[Result],
    steps: Counter,
    memory_table: str,
    record_21_ms: float,
    timed: bool,
) -> str:
    """The text of a preset's page. `facts` are its lines with versions and digests, `steps` the
    number of steps that each training program runs."""
    second = [r for r in results if r.kind == SECOND and r.expected.devices == 8]
    last = max(second, key=Result.ms)
    step = f"a second step on 8 devices, stage {last.stage}"
    cores = "The programs were compiled on two CPU cores."
    if not timed:
        cores += " These did other work as well."
    flags = "" if preset == "record" else f"--preset {preset} "
    upstream = UPSTREAM_MS.get(preset, {})
    paragraphs = [
        f"# The {preset} preset, compiled for H100s on a machine without a GPU",
        "No GPU has run them. `lab/h100/estimate.py` begins with how traffic, sent and ideal bytes "
        f"are counted. `python lab/compile_8xh100.py {flags}--write` renews this file; `--lowered` "
        "finds out in seconds whether that is necessary.",
        facts,
        "## Milliseconds of a step, estimated",
        TWO_STEPS,
        assumptions(record_21_ms, upstream),
        time_table(results, steps, upstream),
        "## Programs",
        cores,
        program_table(results),
        *memory_section(memory_table),
        f"## Non-GEMM traffic of {step}, by cause",
        traffic_table(last),
        f"## The longest kernels generated by XLA in {step}",
        kernel_table(last),
        f"## Communication of {step}, in the order in which it ends",
        "By the same rates, one collective at a time. Work is what is scheduled between start and "
        f"done. {exposed_ms(last.transfers):.2f} ms are exposed.",
        transfer_table(last),
    ]
    return "\n\n".join(paragraphs) + "\n"
