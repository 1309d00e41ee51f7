"""Shows how a run is going, from its log alone. The run needs no change and does not notice.

    ./run.sh watch          the log in logs/ that is being written, or else the last one that was;
                            if that run has ended, the next one, too
    ./run.sh watch LOG      this log, of a run that goes on or of one that has ended

On a terminal it refreshes every second until the run ends. Elsewhere, and with --once, it prints
one summary. Python 3.8 is enough, and nothing has to be installed.

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

import argparse
import codecs
import datetime
import json
import math
import os
import re
import shutil
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

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
LOSS = re.compile(r"step:(\d+)/(\d+) (train|val)_loss:(\S+) train_time:(\d+)ms( step_avg:\S+ms)?")
FIRST = re.compile(
    "(data|hosts|versions|resume) "
)  # begins what follows, in this and older versions
FACTS = "config", "devices", "parameters", "resume", "RESULT"
BLOCKS = " ▁▂▃▄▅▆▇█"
IN_ASCII = str.maketrans("▁▂▃▄▅▆▇█░", "__--==##.")


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
    title: str  # preset and devices
    stages: list[Stage]
    losses: list[Loss]
    peak: float  # operations per second of all devices
    config: dict[str, Any]
    end: str  # how the run ended; "": it goes on, or was killed
    age: float  # seconds since the log was last written


def read_run(path: Path) -> Run:
    """Reads a log. Raises OSError, or ValueError if the file is not a log or lacks a fact."""
    _, border, body = path.read_bytes().partition(BORDER)
    if not border:
        raise ValueError(f"{path} is not a log: it has no line of 100 =, which ends the source")
    text = body.decode("utf-8", "replace")
    if text and not FIRST.match(text):
        raise ValueError(
            f"{path} is not a log of train_gpt.py: after its line of 100 = are no facts"
        )
    try:
        return parse(path, text)
    except (ArithmeticError, AttributeError, IndexError, KeyError, TypeError) as error:
        raise ValueError(f"{path}: a fact is missing or has another form: {error!r}") from error


def parse(path: Path, body: str) -> Run:
    """Reads what follows the source in a log. A line that is cut, because it is being written or
    because the log is a part of one, does not count."""
    facts = {}
    losses = []
    steps = 0
    end = ""
    for line in body.split("\n"):
        name, _, value = line.partition(" ")
        match = LOSS.fullmatch(line)
        if match:
            losses.append(Loss(match[3], int(match[1]), float(match[4]), int(match[5]) / 1000))
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
                facts.pop("RESULT", None)
                end = ""
    result = facts.get("RESULT")
    if result:
        end = f"{result['reason']}: validation loss {result['val_loss']:.4f}"
        end += f" after {result['steps']} steps{', resumed' if result.get('resumed') else ''}"
    config = facts.get("config", {})
    devices = facts.get("devices", ["unknown device"])
    return Run(
        path=path,
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
    return "n/a" if math.isnan(seconds) else str(datetime.timedelta(seconds=round(seconds)))


# ---- Text ----------------------------------------------------------------------------------------
def summary(run: Run) -> list[str]:
    """The lines that are shown for a run."""
    start = Loss("train", 0, math.nan, 0.0)
    last = run.losses[-1] if run.losses else start
    steps = run.stages[-1].end
    tokens, _ = work(run, last.step)
    average = speed(run, start, last)
    on_average = f"{show(average.tokens_per_second, ',.0f')} tokens/s on average"
    silence = f"{duration(run.age)} since the log's last line"
    bar = round(40 * last.step / max(1, steps)) * "█"
    lines = [f"{run.title}, {run.path}", f"{bar:░<40} step {last.step} of {steps}"]
    if run.end:
        lines.append(run.end)
        lines.append(
            f"{show(tokens, ',.0f')} tokens in {last.seconds:,.1f} s, {on_average}, "
            f"MFU {show(average.mfu, '.1%')}"
        )
    elif run.losses:
        now = speed(run, run.losses[-11:][0], last)  # over the last ten lines
        left = (work(run, steps)[0] - tokens) / (now.tokens_per_second or math.nan)
        rate = show(now.tokens_per_second, ",.0f")
        lines.append(f"{rate} tokens/s and MFU {show(now.mfu, '.1%')} now, {on_average}")
        lines.append(f"{duration(left)} of training left; {silence}")
    else:
        lines.append(f"programs are compiled before the first loss; {silence}")
    for kind, name in ("train", "training loss"), ("val", "validation loss"):
        found = [f"{x.step}: {x.loss:.4f}" for x in run.losses if x.kind == kind]
        if found:
            lines.append(f"{name:15} by step  " + "  ".join(found[-3:]))
    if run.losses and run.config.get("target"):
        lines[-1] += f"  target {run.config['target']}"
    return lines + curve([x for x in run.losses if x.kind == "train"] or run.losses)


def curve(losses: list[Loss]) -> list[str]:
    """The losses as a picture of at most 68 columns and 5 lines. Where there are more losses than
    columns, a column is the mean over its share of the steps. The first tenth of the columns, where
    losses fall steeply, may be cut off at the top."""
    losses = [x for x in losses if math.isfinite(x.loss)]
    if len(losses) < 2:
        return []
    width = min(68, len(losses))
    start = losses[0].step
    share = (losses[-1].step + 1 - start) / width
    columns = []
    for i in range(width):
        inside = [x.loss for x in losses if i == int((x.step - start) / share)]
        columns.append(sum(inside) / len(inside) if inside else columns[-1])
    low = min(columns)
    high = max(columns[width // 10 :])
    eighths = [1 + round(39 * (column - low) / (high - low or 1)) for column in columns]
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
    stays. Names decide only between equal times, because a resumed run writes into its old log."""
    now = time.time()
    logs = []
    for path in Path("logs").glob("*.txt"):
        if path.is_file():
            changed = path.stat().st_mtime
            bonus = 60 if path == shown else 0
            logs.append((changed + bonus, path, abs(now - changed) < 60))
    last = None
    for _, path, is_recent in sorted(logs, reverse=True):
        if last and not is_recent:
            continue
        try:
            run = read_run(path)
        except (FileNotFoundError, ValueError):  # deleted, another file, or its source is written
            continue
        if is_recent and not run.end:
            return run
        last = last or run
    return last


class Screen:
    """The end of the terminal, where new lines replace those that were shown before."""

    def __init__(self):
        self.height = 0  # lines shown

    def show(self, lines: list[str]) -> None:
        if self.height:
            print(f"\x1b[{self.height}A\x1b[J", end="")  # up, and clear what is below
        print("\n".join(lines), flush=True)
        self.height = len(lines)


def follow(path: Path | None) -> None:
    """Shows a run until it ends. Without a path, it waits for a run that has not ended before."""
    screen = Screen()
    waiting = path is None
    run = None
    while True:
        run = read_run(path) if path else newest_run(run and run.path)
        ended = run is not None and run.end != ""
        if run and not ended:
            waiting = False
        lines = summary(run) if run else []
        if waiting:
            lines.append("Waiting for the log of the next run in logs/; Ctrl-C ends this.")
        elif ended:
            screen.show(lines)
            return
        columns = shutil.get_terminal_size().columns or 80  # 0 in some containers
        screen.show([line[: columns - 1] for line in lines])  # a longer one would wrap
        time.sleep(1)


def in_ascii(error: UnicodeError) -> tuple[str, int]:
    """What replaces characters that the screen does not know; see codecs.register_error."""
    unknown = error.object[error.start : error.end].translate(IN_ASCII)
    return unknown.encode("ascii", "replace").decode(), error.end


def main(argv: list[str]) -> None:
    """Runs the command line."""
    parser = argparse.ArgumentParser(
        prog="./run.sh watch", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("log", nargs="?", type=Path, metavar="LOG")
    parser.add_argument("--once", action="store_true", help="print one summary, do not wait")
    args = parser.parse_args(argv)
    sys.stdout = sys.stdout or open(os.devnull, "w")  # None if it is closed
    codecs.register_error("in_ascii", in_ascii)
    sys.stdout.reconfigure(errors="in_ascii")
    try:
        if sys.stdout.isatty() and not args.once:
            follow(args.log)
            return
        run = read_run(args.log) if args.log else newest_run()
        if run is None:
            what = "log in logs/" if Path("logs").is_dir() else "folder logs/"
            sys.exit(f"watch: there is no {what}; ./run.sh starts a run")
        print("\n".join(summary(run)), flush=True)
    except OSError as error:
        if error.filename:
            sys.exit(f"watch: {error.filename}: {error.strerror}")
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # for Python's last flush
        if not isinstance(error, BrokenPipeError):  # that of `| head`
            sys.exit(f"watch: its output cannot be written: {error.strerror}")
    except ValueError as error:
        sys.exit(f"watch: {error}")
    except KeyboardInterrupt:
        sys.exit(130)


if __name__ == "__main__":
    main(sys.argv[1:])
