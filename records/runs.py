"""Reads logs: those of train_gpt.py, and those of modded-nanogpt. Nothing in them is executed.

Both begin with the source, end it with a line of 100 =, and have validations as

    step:1770/1770 val_loss:3.2788 train_time:179828ms step_avg:101.60ms

Ours add facts, `name json` a line, and a last line RESULT json; upstream's the output of nvidia-smi
and of every step. After a fact `resume {"step": 15}` a run goes on from step 15: earlier losses of
later steps do not count. Of the fact `config` only `preset`, `target`, `val_tokens` and `seed` have
a meaning here, so that the layers and stages of any version can be read. A packed log (pack.py) has
`source sha256` in place of the source. What a log states is believed: whoever wants to forge one
can.
"""

import hashlib
import json
import lzma
import math
import re
import tarfile
from pathlib import Path
from typing import Any, NamedTuple

BORDER = b"=" * 100 + b"\n"
VALIDATION = re.compile(
    r"^step:(\d+)/(\d+) val_loss:(\S+) train_time:(\d+(?:\.\d+)?)(m?s) step_avg:\S+ms$", re.M
)
TRAINING = re.compile(r"^step:(\d+)/(\d+) train_loss:(\S+) train_time:(\d+)(ms)$", re.M)
FACTS = "versions", "devices", "driver", "environment", "argv", "seed", "config", "data"
ENDED = "end of schedule", "target reached"
ENDS = {"NON-FINITE:": "not finite", "INTERRUPTED": "interrupted"}  # by the last line's first word


class Unreadable(Exception):
    """No log, or a part of one; its text tells why."""


class ArchivedLog(NamedTuple):
    """A log in logs.tar.xz, which is read like a file."""

    name: str
    content: bytes

    def read_bytes(self) -> bytes:
        """The log as it was packed."""
        return self.content

    def read_text(self, encoding: str = "utf-8") -> str:
        """The same as text."""
        return self.content.decode(encoding)


def log_files(folder: Path) -> list[Path | ArchivedLog]:
    """The logs of a folder, by name: those in its logs.tar.xz, in its logs/, or beside each other
    in the folder itself. Raises Unreadable for a damaged archive."""
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


class Validation(NamedTuple):
    """A line with a loss."""

    step: int
    steps: int  # of the schedule
    loss: float  # nats
    ms: float  # of training


class Run(NamedTuple):
    """One log. Facts that it does not state are None."""

    path: Path | ArchivedLog
    sha256: str  # of all that follows the source
    source: str  # its sha256
    validations: list[Validation]
    training: list[Validation]  # losses of batches, in logs that have them: of every tenth step
    steps: int  # of the schedule
    loss: float  # at the end, in nats: of ours with all digits, of upstream's with four
    seconds: float  # of training
    ours: bool  # by train_gpt.py; else by upstream's
    ended: str  # "end of schedule", "target reached", "incomplete", "interrupted", "not finite"
    versions: dict[str, str]
    devices: list[str]
    driver: str | None
    tokens: int | None = None  # that it was trained on
    began: str | None = None  # 2026-11-21T13-00-00, UTC
    seed: int | None = None
    environment: dict[str, str] | None = None
    argv: list[str] | None = None  # without the seed
    config: dict[str, Any] | None = None  # without the seed
    data: list[dict[str, Any]] | None = None
    resumed: bool = False  # from a checkpoint

    @property
    def name(self) -> str:
        """The name of the log's file."""
        return self.path.name

    @property
    def complete(self) -> bool:
        """Whether the run came to its end."""
        return self.ended in ENDED


def split(content: bytes) -> tuple[bytes | None, str, str]:
    """Source (None if packed), its sha256, and what the run wrote."""
    source, border, body = content.partition(b"\n" + BORDER)
    if not border:
        raise Unreadable("it has no line of 100 =, which ends the source")
    packed = re.fullmatch(rb"source ([0-9a-f]{64})", source)
    if packed:
        return None, packed[1].decode(), body.decode()
    return source + b"\n", hashlib.sha256(source + b"\n").hexdigest(), body.decode()


def losses(form: re.Pattern, text: str) -> list[Validation]:
    """All losses that count, in the order of their steps."""
    found = []
    milliseconds = {"ms": 1, "s": 1000}
    for number, part in enumerate(text.split("\nresume ")):
        if number > 0:  # the part begins with its fact, then with the validation of that step
            first_step = json.loads(part.partition("\n")[0])["step"]
            if form is TRAINING:  # the training loss of that step is from before
                first_step += 1
            found = [loss for loss in found if loss.step < first_step]
        for step, steps, loss, time, unit in form.findall(part):
            ms = float(time) * milliseconds[unit]
            found.append(Validation(int(step), int(steps), float(loss), ms))
    for a, b in zip(found, found[1:], strict=False):  # of two runs in one file neither is judged
        if not (a.step < b.step and a.steps == b.steps and a.ms <= b.ms):
            raise Unreadable(f"its validations are out of order at step {b.step}")
    return found


def read(path: Path | ArchivedLog) -> Run:
    """The run that a log tells of; raises Unreadable."""
    content = path.read_bytes()
    try:
        _, source, text = split(content)
        validations = losses(VALIDATION, text)
        last = validations[-1] if validations else Validation(0, 1, math.nan, 0.0)
        is_ours = re.search("^(versions|config|RESULT) {", text, re.M)
        if not is_ours and not validations and not re.search("^Running P", text, re.M):
            raise Unreadable("it is no log of train_gpt.py, nor of modded-nanogpt's")
        facts = our_facts(text, path.name) if is_ours else upstream_facts(text)
        if not all(math.isfinite(v.loss) for v in validations):
            facts["ended"] = "not finite"
        elif facts["ended"] in ENDED and last.step != last.steps:
            facts["ended"] = "incomplete"
        numbers = dict(steps=last.steps, loss=last.loss, seconds=last.ms / 1000)
        apart = [abs(facts.get(name, x) - x) for name, x in numbers.items()]
        if facts["ended"] in ENDED and (max(apart) > 1e-3 or facts.get("tokens", 1) < 1):
            raise Unreadable("its RESULT is not that of its last validation")
        sha256 = hashlib.sha256(text.encode()).hexdigest()
        training = losses(TRAINING, text)
        return Run(path, sha256, source, validations, training, **numbers | facts)
    except (KeyError, TypeError, ValueError) as error:
        raise Unreadable(f"a fact is missing or cut off: {error!r}") from error


def upstream_facts(text: str) -> dict[str, Any]:
    """As modded-nanogpt's train_gpt.py writes them."""
    driver = re.search(r"Driver Version: (\S+)", text)
    return dict(
        ours=False,
        ended="end of schedule",
        versions=dict(re.findall(r"^Running (Python|PyTorch|Triton version) (.*)$", text, re.M)),
        devices=re.findall(r"^\| {1,4}\d{1,3} {1,4}(\S.{0,50}?) +(?:On|Off|N/A) +\|", text, re.M),
        driver=driver and driver[1],
    )


def our_facts(text: str, name: str) -> dict[str, Any]:
    """As our train_gpt.py writes them: its class Log, in this version and in earlier ones."""
    lines = [line.partition(" ") for line in text.removesuffix("\n").split("\n")]
    facts = {word: json.loads(value) for word, _, value in lines if word in FACTS}
    facts["config"].pop("seed")  # by it alone runs differ
    facts = {name: facts[name] for name in FACTS}  # KeyError: one is missing
    words = facts["argv"]
    facts["argv"] = [word for word, before in zip(words, ["", *words], strict=False)
                     if "--seed" not in (before, word.partition("=")[0])]  # fmt: skip
    began = re.match(r"\d{4}-\d\d-\d\dT\d\d-\d\d-\d\d", name)
    facts["resumed"] = bool(re.search('^(resume {|RESULT .*"resumed": true)', text, re.M))
    last, _, value = lines[-1]
    facts |= dict(ours=True, began=began and began[0], ended=ENDS.get(last, "incomplete"))
    if last == "RESULT":
        result = json.loads(value)
        facts |= dict(ended=result["reason"], loss=result["val_loss"], tokens=result["tokens"])
        facts |= dict(seconds=result["train_time_ms"] / 1000)
    return facts
