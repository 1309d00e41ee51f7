"""Shows how a run is going, from its log alone. The run needs no change and does not notice.

    ./run.sh watch          the log in logs/ that is being written, or else the last one that was;
                            if that run has ended, the next one, too
    ./run.sh watch LOG      this log, of a run that goes on or of one that has ended

On a terminal it refreshes every second until the run ends, and waits where a log is being copied.
Elsewhere, and with --once, it prints one summary. Of several runs in one log, it shows the last.
Python 3.8 is enough, and nothing has to be installed.

Rates are those of training: the clock in a log stands still during validation. "Now" means over
the last ten lines with a loss. The time left is that of the tokens that are left, at the rate of
now, so it allows for longer steps in later stages. It does not allow for validation, for costlier
attention in later stages, or for a run that reaches its target early.

MFU, the model's FLOP utilization, divides the operations that the model needs by those that the
devices could do in bfloat16. A token needs 6 operations per weight of the layers' matrices and of
the head, or of its rows for a stage's candidates, and 12 per channel and key in the windows of
attention; see PaLM, arXiv:2204.02311, appendix B. Other parts are not counted: tables, gates,
small nets, the optimizer, and whatever is computed twice. The head counts as bfloat16, although it
may run in FP8. MFU is n/a for CPUs, for devices that are not in PEAKS, and for logs of older
versions.
"""

from __future__ import annotations

import codecs
import contextlib
import json
import math
import re
import shutil
import sys
import time
import unicodedata
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

sys.path.append(str(Path(__file__).resolve().parent.parent / "data"))
from messages import Fault, Parser, one_line  # noqa: E402

# Dense bfloat16 operations per second, in 1e12, by the name that JAX gives to a device. Other
# variants, such as laptop GPUs and MIG slices, have other rates and are left out.
# NVIDIA's data sheets; where those assume sparsity, half of that, as in torchtitan/tools/utils.py
# of pytorch/torchtitan. RTX: the appendices of NVIDIA's whitepapers on GA102, Ada and RTX
# Blackwell, with FP32 accumulation. TPU: docs.cloud.google.com/tpu/docs/v4, v5e, v5p and v6e.
PEAKS = {
    "NVIDIA B200": 2250, "NVIDIA H200": 989, "NVIDIA H100 80GB HBM3": 989,
    "NVIDIA H100 NVL": 835, "NVIDIA H100 PCIe": 756,
    "NVIDIA A100-SXM4-80GB": 312, "NVIDIA A100-SXM4-40GB": 312,
    "NVIDIA A100 80GB PCIe": 312, "NVIDIA A100-PCIE-40GB": 312,
    "NVIDIA L40S": 362, "NVIDIA L4": 121, "NVIDIA A40": 150, "NVIDIA A10": 125,
    "NVIDIA RTX 6000 Ada Generation": 364, "NVIDIA RTX A6000": 155,
    "NVIDIA GeForce RTX 5090": 209.5, "NVIDIA GeForce RTX 4090": 165,
    "NVIDIA GeForce RTX 3090 Ti": 80, "NVIDIA GeForce RTX 3090": 71,
    "TPU v4": 275, "TPU v5 lite": 197, "TPU v5": 459, "TPU v6 lite": 918,
}  # fmt: skip
BORDER = b"\n" + 100 * b"=" + b"\n"  # ends the source in a log
# Facts follow it, in this and older versions, unless they are not written yet.
START = re.compile(BORDER + rb"(?=(?:data|hosts|versions|resume) |\Z)")
COLOR = re.compile(rb"\x1b\[[\d;]*[A-Za-z]")  # what a terminal interprets, as in the output of grep
# The border under the number of a task, as by srun --label.
LABEL = re.compile(rb"^ *\d+: " + BORDER[1:], re.MULTILINE)
# A line may have more fields, of scripts that were changed.
LOSS = re.compile(r"step:(\d+)/(\d+) (train|val)_loss:(\S+) (?:.* )?train_time:(\d+)ms(?: .*)?")
OF_ANOTHER_FORM = (  # what reading a fact raises; RecursionError is that of JSON
    ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError
)  # fmt: skip
FACTS = "config", "devices", "parameters", "resume", "RESULT"
BLOCKS = " ▁▂▃▄▅▆▇█"
IN_ASCII = str.maketrans("▁▂▃▄▅▆▇█░", "__--==##.")
# Hints, and shorter forms of them for narrow terminals.
NEXT_RUN = (
    "Waiting for the log of the next run in logs/; Ctrl-C ends this.",
    "Waiting for the next run; Ctrl-C ends this.",
    "Ctrl-C ends this.",
    "Ctrl-C",
)
INCOMPLETE = ("Waiting until the log can be read; Ctrl-C ends this.", *NEXT_RUN[2:])


# ---- Logs ----------------------------------------------------------------------------------------
class Loss(NamedTuple):
    """A line with a loss."""

    kind: str  # train or val
    step: int
    loss: float  # nats
    seconds: float  # of training until then


class Stage(NamedTuple):
    """Steps of one shape. Numbers that a log does not state are NaN, and print as n/a."""

    end: int  # the first step after it
    tokens: float  # in a step, on all devices together
    flops: float  # of a token: the operations that MFU counts


class Run(NamedTuple):
    """What a log states so far."""

    path: Path
    count: int  # runs in the log, of which this is the last
    mixed: bool  # lines of several runs are mixed, so that no number is right
    title: str  # preset and devices
    stages: list[Stage]
    losses: list[Loss]
    peak: float  # operations per second of all devices
    config: dict[str, Any]
    end: str  # how the run ended; "": it goes on, or was killed
    age: float  # seconds since the log was last written


def read_run(path: Path) -> Run:
    """Reads the last run of a log. Raises OSError, or Fault if the file is not a log or lacks a
    fact."""
    if path.is_dir():
        raise Fault(f"{path} is a folder: name a log in it")
    if path.exists() and not path.is_file():
        raise Fault(f"{path} is not a regular file: write the log to a file, and name that")
    content = COLOR.sub(b"", path.read_bytes().replace(b"\r\n", b"\n"))
    starts = [match.end() for match in START.finditer(content)]
    if not starts and LABEL.search(content):
        remedy = "remove it, as by sed 's/^ *0: //'"
        raise Fault(f"{path}: its lines begin with the number of a task, as by srun -l: {remedy}")
    if not starts and BORDER in content:
        raise Fault(f"{path} is not a log of train_gpt.py: after its line of 100 = are no facts")
    if not starts:
        raise Fault(f"{path} is not a log: it has no line of 100 =, which ends the source")
    text = content[starts[-1] :].decode("utf-8", "replace")
    try:
        run = parse(path, text, len(starts))
        summary(run)  # uses every fact, so those of another form are refused here
    except OF_ANOTHER_FORM as error:
        why = repr(error)[:200]
        raise Fault(f"{path}: a fact is missing or has another form: {why}") from error
    return run


def parse(path: Path, body: str, count: int = 1) -> Run:
    """Reads what follows the source in a log. A line that is cut, because it is being written or
    because the log is a part of one, does not count, nor does one that repeats the line before it.
    Where steps begin anew, so does another run: it is the one that is shown. Where they go back,
    but not to the first, two runs write into the log."""
    facts = {}
    losses = []
    first = {}  # the step of the first loss, by its kind
    latest = {}  # and of the latest
    mixed = False
    previous = ""
    steps = 0
    end = ""
    lines = body.split("\n")
    for line in lines:
        name, _, value = line.partition(" ")
        match = LOSS.fullmatch(line)
        if match:
            if line == previous:
                continue
            previous = line
            kind = match[3]
            step = int(match[1])
            if step <= latest.get(kind, -1):
                count += 1
                mixed = mixed or step > first[kind]
                losses = []
                latest = {}
                facts.pop("RESULT", None)
                end = ""
            first.setdefault(kind, step)
            latest[kind] = step
            losses.append(Loss(kind, step, float(match[4]), int(match[5]) / 1000))
            steps = int(match[2])
        elif name in ("INTERRUPTED", "NON-FINITE:"):
            end = line
        elif name in FACTS:
            try:
                facts[name] = json.loads(value)
            except ValueError:
                continue
            if name == "resume":
                losses = before_resume(losses, facts["resume"]["step"])
                latest = {}
                previous = ""
                facts.pop("RESULT", None)
                end = ""
    unread = [line for line in lines[:-1] if "_loss:" in line and not LOSS.fullmatch(line)]
    if unread and not losses:
        raise ValueError(f"no loss can be read, as in the line {unread[0][:60]!r}")
    if "RESULT" in facts:
        result = facts["RESULT"]
        end = f"{result['reason']}: validation loss {result['val_loss']:.4f}"
        end += f" after {result['steps']} steps{', resumed' if result.get('resumed') else ''}"
    config = facts.get("config", {})
    devices = facts.get("devices", ["unknown device"])
    if not isinstance(devices, list) or not isinstance(devices[0], str):
        raise TypeError(f"devices are not a list of names: {devices!r}")
    return Run(
        path=path,
        count=count,
        mixed=mixed,
        title=f"{config.get('preset', 'a run')} on {len(devices)} x {devices[0]}",
        stages=read_stages(facts, steps),
        losses=losses,
        peak=len(devices) * peak(devices[0]),
        config=config,
        end=end,
        age=max(0.0, time.time() - path.stat().st_mtime),  # clocks differ
    )


def before_resume(losses: list[Loss], step: int) -> list[Loss]:
    """The losses that are not computed once more by a run which resumes after so many steps. Such a
    run begins with the validation after them."""
    remaining = []
    for loss in losses:
        repeated = loss.step >= step if loss.kind == "val" else loss.step > step
        if not repeated:
            remaining.append(loss)
    return remaining


def read_stages(facts: dict[str, Any], steps: int) -> list[Stage]:
    """The stages of a run. Logs of older versions do not state tokens before their RESULT, and
    their steps are those of the lines with losses."""
    config = facts.get("config", {})
    rows = config.get("stages")
    if not isinstance(rows, list):
        result = facts.get("RESULT", {"tokens": math.nan, "steps": 1})
        return [Stage(steps, result["tokens"] / max(1, result["steps"]), math.nan)]
    lengths = [row["steps"] for row in rows]
    total = config["steps"] or sum(lengths)
    stages = []
    end = 0
    for i, row in enumerate(rows):
        # `--steps` stretches all stages in proportion, but each that has steps keeps at least one:
        # see Config.stage_ends in train_gpt.py.
        ideal = round(sum(lengths[: i + 1]) * total / sum(lengths))
        later = sum(length > 0 for length in lengths[i + 1 :])
        end = min(max(ideal, end + (lengths[i] > 0)), total - later)
        known = "parameters" in facts
        flops = flops_per_token(config, facts["parameters"], row) if known else math.nan
        stages.append(Stage(end, row["tokens"], flops))
    return stages


def flops_per_token(config: dict[str, Any], parameters: dict[str, int], stage: dict) -> float:
    """The operations of a token that MFU counts. `parameters` are sizes by name."""
    weights = sum(parameters[name] for name in ("qk", "vo", "mlp", "head"))
    candidates = stage.get("candidates")  # only logs of record 92 have some
    if candidates:
        weights += config["D"] * candidates - parameters["head"]
    windows = {"short": stage["short"], "long": stage["long"], None: 0}
    keys = sum(windows[layer["window"]] for layer in config["layers"])
    return 6 * weights + 12 * config["D"] * keys


def peak(device: str) -> float:
    """Operations per second of a device in bfloat16, NaN if it is not in PEAKS."""
    return 1e12 * PEAKS.get(device, math.nan)


# ---- Numbers -------------------------------------------------------------------------------------
class Speed(NamedTuple):
    """How fast a run is."""

    tokens_per_second: float
    mfu: float  # a fraction


def work(run: Run, step: int) -> tuple[float, float]:
    """Tokens of all steps before this one, and their operations."""
    tokens = 0.0
    flops = 0.0
    start = 0
    for stage in run.stages:
        new = stage.tokens * (min(step, stage.end) - min(step, start))
        tokens += new
        flops += new * stage.flops
        start = stage.end
    return tokens, flops


def speed(run: Run, first: Loss, last: Loss) -> Speed:
    """The speed from one line to another."""
    tokens, flops = work(run, last.step)
    tokens_before, flops_before = work(run, first.step)
    seconds = last.seconds - first.seconds or math.nan
    return Speed((tokens - tokens_before) / seconds, (flops - flops_before) / seconds / run.peak)


def show(number: float, form: str) -> str:
    """A number in a format, or n/a."""
    return "n/a" if math.isnan(number) else format(number, form)


def duration(seconds: float) -> str:
    """Hours, minutes and seconds, or n/a."""
    if math.isnan(seconds):
        return "n/a"
    minutes, second = divmod(round(seconds), 60)
    hour, minute = divmod(minutes, 60)
    return f"{hour}:{minute:02}:{second:02}"


# ---- Text ----------------------------------------------------------------------------------------
class Line(NamedTuple):
    """A line of a summary."""

    rank: int  # lines of the highest rank are left out first, where the terminal is too low
    text: str
    whole: bool = False  # it may be copied, so the terminal wraps it: it is not cut


def summary(run: Run, columns: int = 10**6, rows: int = 10**6, hint: str = "") -> list[str]:
    """The lines that are shown for a run on a terminal of this size. Only the path of the log and
    how the run ended, which may name a command, may be wider than that."""
    start = Loss("train", 0, math.nan, 0.0)
    last = run.losses[-1] if run.losses else start
    steps = run.stages[-1].end
    tokens, _ = work(run, last.step)
    average = speed(run, start, last)
    on_average = f"{show(average.tokens_per_second, ',.0f')} tokens/s on average"
    silence = f"{duration(run.age)} since the log's last line"
    several = run.count > 1 and not run.mixed
    place = f"the last of {run.count} runs in {run.path}" if several else run.path
    lines = [
        Line(8, f"{run.title}, {place}", whole=True),
        Line(0, progress(last.step, steps, columns)),
    ]
    if run.mixed:
        lines.append(Line(3, "lines of several runs are mixed: no number here is right"))
    if run.end:
        lines.append(Line(2, run.end, whole=True))
        text = f"{show(tokens, ',.0f')} tokens in {last.seconds:,.1f} s, {on_average}, "
        lines.append(Line(6, f"{text}MFU {show(average.mfu, '.1%')}"))
    elif run.losses:
        now = speed(run, run.losses[-11:][0], last)  # over the last ten lines
        left = (work(run, steps)[0] - tokens) / (now.tokens_per_second or math.nan)
        rate = show(now.tokens_per_second, ",.0f")
        lines.append(Line(7, f"{rate} tokens/s and MFU {show(now.mfu, '.1%')} now, {on_average}"))
        lines.append(Line(6, f"{duration(left)} of training left; {silence}"))
    else:
        lines.append(Line(6, f"programs are compiled before the first loss; {silence}"))
    target = f"  target {run.config['target']}" if run.config.get("target") else ""
    train = [loss for loss in run.losses if loss.kind == "train"]
    val = [loss for loss in run.losses if loss.kind == "val"]
    if train:
        suffix = "" if val else target
        lines.append(Line(4, newest("training loss", train, suffix, columns)))
    if val:
        lines.append(Line(5, newest("validation loss", val, target, columns)))
    lines += [Line(9, text) for text in curve(train or run.losses, columns)]
    if hint:
        lines.append(Line(1, hint))
    while sum(height(line.text, columns) if line.whole else 1 for line in lines) > rows:
        highest = max(line.rank for line in lines)
        lines = [line for line in lines if line.rank < highest]
    texts = []
    for line in lines:
        texts.append(cut_at_number(line.text, 10**6 if line.whole else columns))
    return texts


def progress(step: int, steps: int, columns: int) -> str:
    """A bar of at most 40 columns, and the step."""
    text = f"step {step} of {steps}"
    width = max(0, min(40, columns - len(text) - 1))
    filled = round(width * min(1.0, step / max(1, steps))) * "█"
    return f"{filled.ljust(width, '░')} {text}".lstrip()


def newest(name: str, losses: list[Loss], suffix: str, columns: int) -> str:
    """A line with the last three losses, or with fewer where the terminal is too narrow."""
    points = [f"{loss.step}: {loss.loss:.4f}" for loss in losses[-3:]]
    forms = []
    for i in range(len(points)):
        forms.append(f"{name:15} by step  {'  '.join(points[i:])}{suffix}")
    last = points[-1]
    forms += [f"{name:15} by step  {last}", f"{name} {last}", last, f"{losses[-1].loss:.4f}"]
    return first_that_fits(forms, columns)


def first_that_fits(forms: Sequence[str], columns: int) -> str:
    """The first of these texts that is not too wide, or else the last."""
    for form in forms:
        if cut(form, columns) == form:
            return form
    return forms[-1]


def cut_at_number(text: str, columns: int) -> str:
    """The beginning of a text, as by cut(), but without a part of a number, which would read as
    another number."""
    part = cut(text, columns)
    start = text.rfind(" ", 0, len(part) + 1) + 1
    word = text[start:].partition(" ")[0]
    is_cut = len(part) < start + len(word)
    if is_cut and re.search(r"\d", word):
        return part[:start].rstrip(" ,")
    return part


def cut(text: str, columns: int) -> str:
    """The beginning of a text that has room in so many columns, without control characters. Wide
    characters, such as those of Chinese, take two columns, and accents that combine take none."""
    text = "".join(letter if letter.isprintable() else "?" for letter in text)
    width = 0
    for i, letter in enumerate(text):
        if unicodedata.category(letter) not in ("Mn", "Me"):
            width += 2 if unicodedata.east_asian_width(letter) in "FW" else 1
        if width > columns:
            return text[:i]
    return text


def height(text: str, columns: int) -> int:
    """How many lines of a terminal a text takes."""
    rest = cut(text, 10**6)
    lines = 1
    while cut(rest, columns) != rest:
        rest = rest[max(1, len(cut(rest, columns))) :]
        lines += 1
    return lines


def curve(losses: list[Loss], columns: int = 10**6) -> list[str]:
    """The losses as a picture of at most 68 columns and 5 lines. Where there are more losses than
    columns, a column is the mean over its share of the steps. The first tenth of the columns, where
    losses fall steeply, may be cut off at the top."""
    losses = [x for x in losses if math.isfinite(x.loss)]
    if len(losses) < 2 or columns < 30:
        return []
    width = min(68, len(losses), columns - 9)  # the numbers at the left take 9
    start = losses[0].step
    share = (losses[-1].step + 1 - start) / width
    means = []
    for i in range(width):
        inside = [x.loss for x in losses if i == int((x.step - start) / share)]
        means.append(sum(inside) / len(inside) if inside else means[-1])
    low = min(means)
    high = max(means[width // 10 :])
    eighths = [1 + round(39 * (mean - low) / (high - low or 1)) for mean in means]
    lines = []
    for row in (4, 3, 2, 1, 0):
        label = {4: f"{high:8.3f}", 0: f"{low:8.3f}"}.get(row, "")
        blocks = [BLOCKS[min(max(eighth - 8 * row, 0), 8)] for eighth in eighths]
        lines.append(f"{label:8} {''.join(blocks)}".rstrip())
    return [*lines, f"{'':8} steps {start} to {losses[-1].step}"]


# ---- Watching ------------------------------------------------------------------------------------
def newest_run(shown: Path | None = None) -> Run | None:
    """The run in logs/ whose log is being written: it goes on, and has a line of the last minute.
    Without one, the run whose log was written last. Where two runs go on, the one that is shown
    stays. While its log is written anew, as by scp, it is None. Names decide only between equal
    times, because a resumed run writes into its old log."""
    logs = []
    for path in Path("logs").glob("*.txt"):
        with contextlib.suppress(OSError):  # a link to nothing, or deleted
            bonus = 60 if path == shown else 0
            logs.append((path.stat().st_mtime + bonus, path))
    last = None
    for _, path in sorted(logs, reverse=True):
        try:
            is_recent = was_written(path)
            if not path.is_file() or (last and not is_recent):
                continue
            run = read_run(path)
        except OSError:  # deleted or unreadable
            continue
        except Fault:  # another file, or its source is written
            if path == shown and is_recent:
                return None
            continue
        if is_recent and not run.end:
            return run
        last = last or run
    return last


def was_written(path: Path) -> bool:
    """Whether a file was written in the last minute. Clocks of two machines may differ."""
    return abs(time.time() - path.stat().st_mtime) < 60


class Screen:
    """The end of the terminal, where new lines replace those that were shown before."""

    def __init__(self):
        self.height = 0  # lines shown

    def show(self, lines: list[str], columns: int) -> None:
        if self.height:
            print(f"\x1b[{self.height}A\x1b[J", end="")  # up, and clear what is below
        print("".join(f"{line}\n" for line in lines), end="", flush=True)
        self.height = sum(height(line, columns) for line in lines)


def follow(path: Path | None) -> None:
    """Shows a run until it ends. Without a path, it waits for a run that has not ended before."""
    screen = Screen()
    waiting = path is None
    run = None
    while True:
        found = find_run(path, run)
        run = found or run
        ended = found is not None and found.end != ""
        if found and not ended:
            waiting = False
        size = shutil.get_terminal_size()
        columns = (size.columns or 80) - 1  # 0 in some containers
        rows = (size.lines or 24) - 1  # the cursor is below the last line
        hint = ""
        if waiting:
            hint = first_that_fits(NEXT_RUN, columns)
        elif not found:
            hint = first_that_fits(INCOMPLETE, columns)
        lines = summary(run, columns, rows, hint) if run else [cut(hint, columns)][:rows]
        screen.show(lines, columns + 1)
        if ended and not waiting:
            end = cut(run.end, 10**6)
            if end not in lines:
                print(end)  # on as many lines as it takes: it may name a command
            return
        time.sleep(1)


def find_run(path: Path | None, shown: Run | None) -> Run | None:
    """The run to show, or None while no log can be read: it may be a copy that is being made. A
    file that nobody writes raises Fault, unless it was a log before."""
    if path is None:
        return newest_run(shown and shown.path)
    try:
        return read_run(path)
    except Fault:
        if not path.is_file() or not (shown or was_written(path)):
            raise
        return None


def in_ascii(error: UnicodeError) -> tuple[str, int]:
    """What replaces characters that the screen does not know; see codecs.register_error."""
    unknown = error.object[error.start : error.end].translate(IN_ASCII)
    return unknown.encode("ascii", "replace").decode(), error.end


def main(argv: list[str]) -> None:
    """Runs the command line."""
    parser = Parser(prog="./run.sh watch", description=__doc__)
    parser.add_argument("log", nargs="?", type=Path, metavar="LOG")
    parser.add_argument("--once", action="store_true", help="print one summary, do not wait")
    args = parser.parse_args(argv)
    try:
        if sys.stdout.isatty() and not args.once:
            follow(args.log)
            return
    except KeyboardInterrupt:  # the usual end, which needs no message
        sys.exit(130)
    run = read_run(args.log) if args.log else newest_run()
    if run is None:
        what = "log in logs/" if Path("logs").is_dir() else "folder logs/"
        raise Fault(f"there is no {what}; ./run.sh starts a run")
    print("\n".join(summary(run)))


if __name__ == "__main__":
    codecs.register_error("in_ascii", in_ascii)
    with one_line("watch", status=1, replacement="in_ascii"):
        main(sys.argv[1:])
