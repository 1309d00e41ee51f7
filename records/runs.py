"""Reads logs: those of train_gpt.py, and those of modded-nanogpt. Nothing in them is executed.

Both kinds begin with the source and a line of 100 = that ends it. Validations are lines like

    step:1770/1770 val_loss:3.2788 train_time:179828ms step_avg:101.60ms

Our logs add facts, one per line as `name json`, and end with a line RESULT json. Upstream's add the
output of nvidia-smi and a line for every step. After a fact `resume {"step": 15}`, a run went on
from step 15, so losses of later steps above that line do not count. Of the fact `config` only
`preset`, `target` and `val_tokens` are interpreted: logs of any version can be read, whatever its
layers and stages are called. A packed log (pack.py) has `source sha256` in place of the source.
This module believes what a log states, so it does not detect a forged log.

Beside the logs is their source, train_gpt.py, or train_gpt.sha256 with the path of a record that
has the same file.
"""

import hashlib
import itertools
import json
import lzma
import math
import re
import tarfile
from pathlib import Path
from typing import Any, NamedTuple

BORDER = b"=" * 100 + b"\n"
POINTER = "train_gpt.sha256"  # a line of sha256sum, with a path from its folder
VALIDATION = re.compile(
    r"^step:(\d+)/(\d+) val_loss:(\S+) train_time:(\d+(?:\.\d+)?)(m?s) step_avg:\S+ms$", re.M
)
TRAINING = re.compile(r"^step:(\d+)/(\d+) train_loss:(\S+) train_time:(\d+)(ms)$", re.M)
FACTS = "versions", "devices", "driver", "environment", "argv", "seed", "config", "data"
COMPLETE = "end of schedule", "target reached"  # how a run ends that has a final loss
# How a run ended without a RESULT, by the first word of the line that says so.
BREAKS = {"NON-FINITE:": "not finite", "INTERRUPTED": "interrupted"}


class Unreadable(Exception):
    """A file is not a log, or only a part of one. The message gives the reason."""


class ArchivedLog(NamedTuple):
    """A log in logs.tar.xz, which is read like a file."""

    name: str
    content: bytes

    def read_bytes(self) -> bytes:
        """Returns the log as it was packed."""
        return self.content

    def read_text(self, encoding: str = "utf-8") -> str:
        """Returns the log as text."""
        return self.content.decode(encoding)


def log_files(folder: Path) -> list[Path | ArchivedLog]:
    """Returns the logs of a folder, sorted by name: those in its logs.tar.xz, else those in its
    logs/, else those in the folder itself. Raises Unreadable if the archive is damaged."""
    archive = folder / "logs.tar.xz"
    if not archive.is_file():
        place = folder / "logs" if (folder / "logs").is_dir() else folder
        return sorted(place.glob("*.txt"))
    found = []
    try:
        with tarfile.open(archive) as tar:
            for member in tar.getmembers():
                if member.isfile():
                    content = tar.extractfile(member).read()
                    found.append(ArchivedLog(Path(member.name).name, content))
    except (tarfile.TarError, lzma.LZMAError, EOFError) as error:
        raise Unreadable(f"{archive} is damaged: {error}") from error
    return sorted(found)


def source_file(folder: Path) -> Path:
    """Returns the source of a folder's logs: its train_gpt.py (which may be missing), or the file
    that its train_gpt.sha256 names. Raises Unreadable if that file is missing or has changed."""
    source = folder / "train_gpt.py"
    pointer = folder / POINTER
    if not pointer.is_file():
        return source
    if source.is_file():
        raise Unreadable(f"{folder} has a train_gpt.py and a {POINTER}; delete one of them")
    line = re.fullmatch(rb"([0-9a-f]{64})  ([\w./-]+)\n", pointer.read_bytes())
    if not line:
        raise Unreadable(f"{pointer} is not one line of sha256sum")
    sha256, path = line[1].decode(), line[2].decode()
    source = folder / path
    if not source.is_file():
        raise Unreadable(f"{pointer} names {path}, which is missing")
    if hashlib.sha256(source.read_bytes()).hexdigest() != sha256:
        raise Unreadable(f"{pointer} names {path}, which has another sha256")
    return source


class Validation(NamedTuple):
    """A line with a loss."""

    step: int
    steps: int  # of the schedule
    loss: float  # nats
    ms: float  # of training


class Run(NamedTuple):
    """What a log states. A fact that it does not state is None."""

    path: Path | ArchivedLog
    log_sha256: str  # of the log without its source
    source_sha256: str
    validations: list[Validation]
    training: list[Validation]  # losses of batches, every tenth step, in logs that have them
    steps: int  # of the schedule
    loss: float  # the final loss in nats: all digits in our logs, four decimals in upstream's
    seconds: float  # of training
    ours: bool  # written by train_gpt.py, not by modded-nanogpt
    ended: str  # one of COMPLETE, a value of BREAKS, or "incomplete"
    versions: dict[str, str]
    devices: list[str]
    driver: str | None
    tokens: int | None = None  # of training
    began: str | None = None  # 2026-11-21T13-00-00, UTC
    seed: int | None = None
    environment: dict[str, str] | None = None
    argv: list[str] | None = None  # without the seed
    config: dict[str, Any] | None = None  # without the seed
    data: list[dict[str, Any]] | None = None
    resumed: bool = False  # from a checkpoint
    parameters: int | None = None  # of the model, with padding of the vocabulary

    @property
    def name(self) -> str:
        """The name of the log's file."""
        return self.path.name

    @property
    def complete(self) -> bool:
        """Whether the run came to its end."""
        return self.ended in COMPLETE


def split(content: bytes) -> tuple[bytes | None, str, str]:
    """Returns the source (None in a packed log), its sha256, and the text after the source."""
    source, border, body = content.partition(b"\n" + BORDER)
    if not border:
        raise Unreadable("it has no line of 100 =, which ends the source")
    packed = re.fullmatch(rb"source ([0-9a-f]{64})", source)
    if packed:
        return None, packed[1].decode(), body.decode()
    source += b"\n"
    return source, hashlib.sha256(source).hexdigest(), body.decode()


def losses(form: re.Pattern, text: str) -> list[Validation]:
    """Returns the losses that count, in the order of their steps; form is VALIDATION or TRAINING.
    Raises Unreadable where the order is wrong: with two runs in a log, neither is judged."""
    found = []
    milliseconds = {"ms": 1, "s": 1000}
    for number, part in enumerate(text.split("\nresume ")):
        if number > 0:
            first_step = json.loads(part.partition("\n")[0])["step"]
            # A resumed run validates its first step again, but trained it before it stopped.
            if form is TRAINING:
                first_step += 1
            found = [loss for loss in found if loss.step < first_step]
        for step, steps, loss, time, unit in form.findall(part):
            ms = float(time) * milliseconds[unit]
            found.append(Validation(int(step), int(steps), float(loss), ms))
    for a, b in itertools.pairwise(found):
        in_order = a.step < b.step and a.ms <= b.ms
        if not in_order or a.steps != b.steps:
            raise Unreadable(f"its validations are out of order at step {b.step}")
    return found


def read(path: Path | ArchivedLog) -> Run:
    """Reads a log; raises Unreadable."""
    content = path.read_bytes()
    try:
        _, source_sha256, text = split(content)
        validations = losses(VALIDATION, text)
        last = Validation(step=0, steps=1, loss=math.nan, ms=0.0)  # of an incomplete run
        if validations:
            last = validations[-1]
        is_ours = re.search("^(versions|config|RESULT) {", text, re.M)
        if not is_ours and not validations and not re.search("^Running P", text, re.M):
            raise Unreadable("it is not a log of train_gpt.py or modded-nanogpt")
        facts = our_facts(text, path.name) if is_ours else upstream_facts(text)
        if not all(math.isfinite(v.loss) for v in validations):
            facts["ended"] = "not finite"
        elif facts["ended"] in COMPLETE and last.step != last.steps:
            facts["ended"] = "incomplete"
        facts.setdefault("loss", last.loss)
        facts.setdefault("seconds", last.ms / 1000)
        loss_differs = abs(facts["loss"] - last.loss) > 1e-3
        time_differs = abs(facts["seconds"] - last.ms / 1000) > 1e-3
        if facts["ended"] in COMPLETE:
            if loss_differs or time_differs or facts.get("tokens", 1) < 1:
                raise Unreadable("its RESULT does not agree with its last validation")
        return Run(
            path=path,
            log_sha256=hashlib.sha256(text.encode()).hexdigest(),
            source_sha256=source_sha256,
            validations=validations,
            training=losses(TRAINING, text),
            steps=last.steps,
            **facts,
        )
    except (KeyError, TypeError, ValueError) as error:
        raise Unreadable(f"a fact is missing or cut off: {error!r}") from error


def upstream_facts(text: str) -> dict[str, Any]:
    """Returns the facts that modded-nanogpt's train_gpt.py writes."""
    driver = re.search(r"Driver Version: (\S+)", text)
    return dict(
        ours=False,
        ended="end of schedule",
        versions=dict(re.findall(r"^Running (Python|PyTorch|Triton version) (.*)$", text, re.M)),
        devices=re.findall(r"^\| {1,4}\d{1,3} {1,4}(\S.{0,50}?) +(?:On|Off|N/A) +\|", text, re.M),
        driver=driver[1] if driver else None,
    )


def our_facts(text: str, name: str) -> dict[str, Any]:
    """Returns the facts that the class Log of train_gpt.py writes, in this and in earlier versions;
    raises KeyError where one is missing. name is that of the file, which begins with the time."""
    lines = [line.partition(" ") for line in text.removesuffix("\n").split("\n")]
    wanted = *FACTS, "parameters"
    stated = {key: json.loads(value) for key, _, value in lines if key in wanted}
    stated["config"].pop("seed")  # else no two runs would have the same configuration
    facts = {key: stated[key] for key in FACTS}
    facts["argv"] = without_seed(facts["argv"])
    facts["ours"] = True
    facts["parameters"] = sum(stated["parameters"].values())
    began = re.match(r"\d{4}-\d\d-\d\dT\d\d-\d\d-\d\d", name)
    facts["began"] = began[0] if began else None
    facts["resumed"] = bool(re.search('^(resume {|RESULT .*"resumed": true)', text, re.M))
    if lines[-1][0] in ("to", "there"):  # how to resume, below NON-FINITE
        lines.pop()
    last, _, value = lines[-1]
    facts["ended"] = BREAKS.get(last, "incomplete")
    if last == "RESULT":
        result = json.loads(value)
        facts["ended"] = result["reason"]
        facts["loss"] = result["val_loss"]
        facts["tokens"] = result["tokens"]
        facts["seconds"] = result["train_time_ms"] / 1000
    return facts


def without_seed(argv: list[str]) -> list[str]:
    """Returns the arguments without --seed N and --seed=N, the only ones in which runs differ."""
    rest = []
    previous = ""
    for argument in argv:
        if previous != "--seed" and argument.partition("=")[0] != "--seed":
            rest.append(argument)
        previous = argument
    return rest
