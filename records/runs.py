"""Reads logs of train_gpt.py. Nothing in them is executed.

A log begins with the source and a line of 100 = that ends it. Then come facts, one per line as
`name json`, and losses, which are lines like

    step:1770/1770 val_loss:3.2788 train_time:179828ms step_avg:101.60ms

The last line is RESULT json. Lines of another form do not count, so a log that was damaged or cut
off lacks what they stated, and is incomplete. After a fact `resume {"step": 15}`, a run went on
from step 15, so losses of later steps above that line do not count. Of the fact `config` only a few
fields are interpreted, so logs of any version can be read, whatever its layers and stages are
called. A packed log (pack.py) has `source sha256` in place of the source. This module believes what
a log states, so it does not detect a forged log.

Beside the logs is their source, train_gpt.py, or train_gpt.sha256 with the path of a record that
has the same file.
"""

import hashlib
import io
import json
import lzma
import math
import re
import tarfile
from pathlib import Path
from typing import Any, NamedTuple

BORDER = b"=" * 100 + b"\n"
POINTER = "train_gpt.sha256"  # a line of sha256sum, with a path from its folder
LOSS = re.compile(
    r"step:(\d+)/(\d+) val_loss:(\d+\.\d+|nan|-?inf) train_time:(\d+)ms( step_avg:\S+)?"
)
# What a log states before its first loss. The last three are missing without ./run.sh.
FACTS = ("versions", "devices", "argv", "seed", "config", "data", "parameters")
FACTS += ("driver", "environment", "wheels")
RESULT = {"reason", "val_loss", "tokens", "train_time_ms", "seed", "steps"}
COMPLETE = "end of schedule", "target reached"  # how a run ends that has a final loss


class Unreadable(ValueError):
    """A file cannot be read as evidence. The message gives the reason."""


# ---- Files ---------------------------------------------------------------------------------------
class ArchivedLog(NamedTuple):
    """A log in logs.tar.xz, which is read like a file."""

    name: str
    content: bytes

    def read_bytes(self) -> bytes:
        """Returns the log as it was packed."""
        return self.content


def log_files(folder: Path) -> list[Path | ArchivedLog]:
    """Returns the logs of a folder, sorted by name: those in its logs.tar.xz, else those in its
    logs/, else those in the folder itself."""
    archive = folder / "logs.tar.xz"
    if archive.exists():
        return unpack(archive)
    place = folder / "logs" if (folder / "logs").is_dir() else folder
    return sorted(path for path in place.glob("*.txt") if not path.name.startswith("."))


def unpack(archive: Path) -> list[ArchivedLog]:
    """Returns the logs in a logs.tar.xz; raises lzma.LZMAError if it is cut off or damaged."""
    content = lzma.decompress(archive.read_bytes())
    found = []
    with tarfile.open(fileobj=io.BytesIO(content)) as tar:
        for member in tar.getmembers():
            if member.isfile():
                log = tar.extractfile(member).read()
                found.append(ArchivedLog(Path(member.name).name, log))
    return sorted(found)


def has_final_loss(log: Path | ArchivedLog) -> bool:
    """Returns whether a log has the loss of its last step, even if read() does not take it."""
    return bool(re.search(rb"\nstep:(\d+)/\1 val_loss:.* train_time:", log.read_bytes()))


def source_file(folder: Path) -> Path:
    """Returns the source of a folder's logs: its train_gpt.py (which may be missing), or the file
    that its train_gpt.sha256 names. Raises Unreadable if that file has changed."""
    pointer = folder / POINTER
    if not pointer.is_file():
        return folder / "train_gpt.py"
    sha256, _, path = pointer.read_text().strip().partition("  ")
    source = folder / path
    if source_hash(source) != sha256:
        raise Unreadable(f"{pointer} names {path}, which has another sha256")
    return source


def source_hash(file: Path) -> str:
    """Returns the sha256 of a train_gpt.py, as a log states it."""
    return hashlib.sha256(file.read_bytes()).hexdigest()


# ---- What a log states ---------------------------------------------------------------------------
class Validation(NamedTuple):
    """A line with a loss."""

    step: int
    steps: int  # of the schedule
    loss: float  # nats
    ms: float  # of training


class Run(NamedTuple):
    """What a log states. A fact that it does not state is None."""

    path: Path | ArchivedLog
    log_sha256: str  # of the log without its source and without blank lines at its end
    source_sha256: str
    validations: list[Validation]
    steps: int  # of the schedule
    loss: float  # the final loss in nats, with all its digits
    seconds: float  # of training
    ended: str  # one of COMPLETE, "not finite", or "incomplete"
    resumed: bool  # from a checkpoint
    versions: dict[str, str]
    devices: list[str]
    driver: str | None
    environment: dict[str, str] | None
    began: str | None  # 2026-11-21T13-00-00, UTC
    seed: int
    argv: list[str]  # without the seed
    config: dict[str, Any]  # without the seed
    data: list[dict[str, Any]]
    parameters: int  # of the model, with padding of the vocabulary
    tokens: int | None = None  # of training; None without RESULT

    @property
    def name(self) -> str:
        """The name of the log's file."""
        return self.path.name

    @property
    def complete(self) -> bool:
        """Whether the run came to its end."""
        return self.ended in COMPLETE


def split(content: bytes) -> tuple[str, str]:
    """Returns the sha256 of a log's source, and the text after the source; raises Unreadable."""
    source, border, body = content.partition(b"\n" + BORDER)
    if not border:
        raise Unreadable("it has no line of 100 =, which ends the source")
    text = body.decode(errors="replace")  # a damaged line does not count
    packed = re.fullmatch(rb"source ([0-9a-f]{64})", source)
    if packed:
        return packed[1].decode(), text
    return hashlib.sha256(source + b"\n").hexdigest(), text


class Lines:
    """What the lines of a log have stated so far."""

    def __init__(self, text: str):
        self.facts = {}
        self.validations = []
        self.ended = "incomplete"
        self.resumed = False
        for line in text.split("\n"):
            self.take(line)

    def take(self, line: str) -> None:
        """Takes a line; raises Unreadable where losses are out of order, as those of two runs."""
        name, _, value = line.partition(" ")
        loss = LOSS.fullmatch(line)
        if loss:
            self.validations.append(in_order(self.validations, loss))
        elif name == "NON-FINITE:":
            self.ended = "not finite"
        elif name in (*FACTS, "resume", "RESULT"):
            try:
                stated = json.loads(value)
            except ValueError:  # a line that was cut off, or that another program printed
                return
            if name == "RESULT" and not stated.keys() >= RESULT:
                return
            self.facts[name] = stated
            if name == "resume":
                self.go_on(stated["step"])
            elif name == "RESULT":
                self.ended = stated["reason"]

    def go_on(self, step: int) -> None:
        """Takes the step from which a run went on. It validates that step again."""
        self.resumed = True
        self.ended = "incomplete"
        self.facts.pop("RESULT", None)
        self.validations = [loss for loss in self.validations if loss.step < step]


def in_order(before: list[Validation], match: re.Match) -> Validation:
    """Returns the loss that a line states; raises Unreadable if it cannot follow those before."""
    step, steps, loss, ms, _ = match.groups()
    new = Validation(int(step), int(steps), float(loss), float(ms))
    last = before[-1] if before else Validation(-1, new.steps, 0.0, 0.0)
    follows = last.step < new.step and last.steps == new.steps and last.ms <= new.ms
    if not follows or new.step > new.steps:
        raise Unreadable(f"its losses are out of order at step {step}: a log has one run")
    return new


def read(path: Path | ArchivedLog) -> Run:
    """Reads a log; raises Unreadable."""
    source_sha256, text = split(path.read_bytes())
    lines = Lines(text)
    last = Validation(step=0, steps=1, loss=math.nan, ms=0.0)  # of an incomplete run
    if lines.validations:
        last = lines.validations[-1]
    ended = lines.ended
    if not all(math.isfinite(v.loss) for v in lines.validations):
        ended = "not finite"
    elif ended in COMPLETE and last.step != last.steps:
        ended = "incomplete"
    run = Run(
        path=path,
        log_sha256=hashlib.sha256(text.rstrip().encode()).hexdigest(),
        source_sha256=source_sha256,
        validations=lines.validations,
        steps=last.steps,
        loss=last.loss,
        seconds=last.ms / 1000,
        ended=ended,
        resumed=lines.resumed,
        **facts_of_run(lines.facts, path.name),
    )
    return with_result(run, lines.facts["RESULT"]) if "RESULT" in lines.facts else run


def with_result(run: Run, result: dict[str, Any]) -> Run:
    """Returns a run with what its RESULT states; raises Unreadable if its lines contradict that."""
    if run.complete:
        last = run.validations[-1]
        loss_differs = not abs(result["val_loss"] - last.loss) <= 6e-5  # the line has four decimals
        time_differs = not abs(result["train_time_ms"] - last.ms) <= 1
        if loss_differs or time_differs or result["steps"] != last.step:
            raise Unreadable("its RESULT does not agree with its last validation")
        if result["seed"] != run.seed:
            raise Unreadable("its RESULT does not agree with its seed")
    return run._replace(
        loss=result["val_loss"],
        seconds=result["train_time_ms"] / 1000,
        tokens=result["tokens"],
        resumed=run.resumed or result.get("resumed", False) is not False,
    )


def facts_of_run(stated: dict[str, Any], name: str) -> dict[str, Any]:
    """Returns the facts that the class Log of train_gpt.py writes, in this and in earlier versions.
    name is that of the file, which begins with the time. Raises Unreadable if one is missing."""
    missing = [key for key in FACTS[:-3] if key not in stated]
    if missing:
        raise Unreadable(f"it does not state {', '.join(missing)}")
    if stated["config"]["seed"] != stated["seed"]:
        raise Unreadable("its config has another seed")
    facts = {key: stated.get(key) for key in FACTS}
    facts["versions"] = facts["versions"] | (facts.pop("wheels") or {})
    facts["config"] = {key: value for key, value in stated["config"].items() if key != "seed"}
    facts["argv"] = without_seed(facts["argv"])
    facts["parameters"] = sum(stated["parameters"].values())
    began = re.match(r"\d{4}-\d\d-\d\dT\d\d-\d\d-\d\d", name)
    facts["began"] = began[0] if began else None
    return facts


def without_seed(argv: list[str]) -> list[str]:
    """Returns the arguments without --seed N, the only ones in which the runs of a plan differ."""
    if "--seed" not in argv:
        return argv
    start = argv.index("--seed")
    return argv[:start] + argv[start + 2 :]
