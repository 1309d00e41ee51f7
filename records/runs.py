"""Reads logs: those of train_gpt.py, and those of modded-nanogpt. Nothing in them is executed.

Both begin with the source, end it with a line of 100 =, and have validations as

    step:1770/1770 val_loss:3.2788 train_time:179828ms step_avg:101.60ms

Ours add facts, `name json` a line, and a last line RESULT json; upstream's the output of nvidia-smi
and of every step. A packed log (pack.py) has `source sha256` for the source, which is kept once.
"""

import dataclasses
import datetime
import hashlib
import json
import math
import os
import re
import subprocess
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

BORDER = b"=" * 100 + b"\n"
LARGEST = 64 * 2**20  # bytes of a log; upstream's largest are a tenth of it
LONGEST = 2**20  # bytes of a fact, and of the files beside logs
VALIDATION = re.compile(
    r"^step:(\d{1,9})/(\d{1,9}) val_loss:(\S{1,30}) train_time:(\d{1,12}(?:\.\d{1,9})?)(m?s)"
    r" step_avg:\S{1,30}ms$",
    re.ASCII | re.MULTILINE,
)
TRAINING = re.compile(
    r"^step:(\d{1,9})/(\d{1,9}) train_loss:(\S{1,30}) train_time:(\d{1,12})(m)s$",
    re.ASCII | re.MULTILINE,
)
FACTS = dict(versions=dict, devices=list, driver=str, environment=dict, argv=list, seed=int,
             config=dict, data=list, compile=dict)  # fmt: skip
NUMBERS = ("val_loss", "target", "train_time_ms")


class Unreadable(Exception):
    """No log, or one that does not say what a log says; its text tells why."""


class Validation(NamedTuple):
    step: int
    steps: int  # of the schedule
    loss: float  # nats
    ms: float  # of training


@dataclasses.dataclass(frozen=True)
class Run:
    """One log. Facts that it does not state are None."""

    path: Path
    sha256: str  # of all that follows the source
    source: str  # its sha256
    packed: bool  # the source itself is elsewhere
    ours: bool  # by train_gpt.py; else by upstream's
    ended: str  # "end of schedule", "target reached", "incomplete", "interrupted", "not finite"
    validations: list[Validation]
    training: list[Validation]  # losses of batches, in logs that have them: of every tenth step
    versions: dict[str, str]
    devices: list[str]
    driver: str | None
    began: datetime.datetime | None  # UTC
    seed: int | None = None
    environment: dict[str, str] | None = None
    argv: list[str] | None = None  # without the seed
    config: dict[str, Any] | None = None  # without the seed
    data: list[dict[str, Any]] | None = None
    result: dict[str, Any] | None = None

    @property
    def name(self) -> str:
        return self.path.name

    @property
    def loss(self) -> float:
        """At the end, in nats: of ours with all digits, of upstream's with four."""
        return self.result["val_loss"] if self.result else self.validations[-1].loss

    @property
    def seconds(self) -> float:
        """Of training."""
        return (self.result["train_time_ms"] if self.result else self.validations[-1].ms) / 1000

    @property
    def steps(self) -> int:
        return self.validations[-1].steps

    @property
    def tokens(self) -> int | None:
        """That it was trained on."""
        return self.result["tokens"] if self.result else None


def parse_json(text: str, kind: type) -> Any:
    if len(text) > LONGEST:
        raise Unreadable("a fact in it is longer than 1 MiB")
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise Unreadable("a fact in it is no JSON") from error
    if type(value) is not kind:
        raise Unreadable(f"a fact in it is no {kind.__name__}")
    return value


def split(content: bytes) -> tuple[bytes | None, str, str]:
    """Source (None if packed), its sha256, and what the run wrote."""
    source, border, body = content.partition(b"\n" + BORDER)
    if not border:
        raise Unreadable("it has no line of 100 =, which ends the source")
    if b"\0" in content:
        raise Unreadable("it holds zero bytes")
    try:
        text = body.decode()
    except UnicodeDecodeError as error:
        raise Unreadable("it is not UTF-8") from error
    if packed := re.fullmatch(rb"source ([0-9a-f]{64})", source):
        return None, packed[1].decode(), text
    source += b"\n"
    return source, hashlib.sha256(source).hexdigest(), text


def validations(text: str, form: re.Pattern = VALIDATION) -> list[Validation]:
    found = []
    for step, steps, loss, time, unit in form.findall(text):
        try:
            ms = float(time) * (1 if unit.startswith("m") else 1000)
            found.append(Validation(int(step), int(steps), float(loss), ms))
        except ValueError as error:
            raise Unreadable(f"val_loss:{loss} is no number") from error
    for a, b in zip(found, found[1:], strict=False):
        if not (a.step < b.step and a.steps == b.steps and a.ms <= b.ms):
            raise Unreadable(f"its validations are out of order at step {b.step}")
    if found and not 0 < found[-1].steps >= found[-1].step:
        raise Unreadable(f"it validates step {found[-1].step} of {found[-1].steps}")
    return found


def read(path: Path) -> Run:
    """The run that a log tells of; raises Unreadable."""
    try:
        if not path.is_file():
            raise Unreadable("it is no file")
        if path.stat().st_size > LARGEST:
            raise Unreadable("it is larger than 64 MiB")
        content = path.read_bytes()
    except OSError as error:
        raise Unreadable(f"it cannot be read: {error.strerror}") from error
    source, source_sha, text = split(content)
    common = dict(
        path=path,
        sha256=hashlib.sha256(text.encode()).hexdigest(),
        source=source_sha,
        packed=source is None,
        validations=validations(text),
        training=validations(text, TRAINING),
    )
    is_ours = re.search("^(versions|config|RESULT) {", text, re.M)
    return (read_ours if is_ours else read_upstream)(text, common)


def read_upstream(text: str, common: dict[str, Any]) -> Run:
    """As modded-nanogpt's train_gpt.py writes it."""
    seen, last = common["validations"], None
    if seen:
        last = seen[-1]
    elif not re.search("^Running P", text, re.M):
        raise Unreadable("it is no log of train_gpt.py, nor of modded-nanogpt's")
    ended = "end of schedule" if last and last.step == last.steps else "incomplete"
    if not all(math.isfinite(v.loss) for v in seen):
        ended = "not finite"
    versions = dict(re.findall(r"^Running (Python|PyTorch|Triton version) (.*)$", text, re.M))
    driver = re.search(r"Driver Version: (\S+)", text)
    devices = re.findall(r"^\| {1,4}\d{1,3} {1,4}(\S.{0,50}?) +(?:On|Off|N/A) +\|", text, re.M)
    return Run(**common, ours=False, ended=ended, versions=versions, devices=devices, began=None,
               driver=driver and driver[1])  # fmt: skip


def read_ours(text: str, common: dict[str, Any]) -> Run:
    """As our train_gpt.py writes it (its class Log)."""
    facts, lines = {}, text.removesuffix("\n").split("\n")
    for line in lines:
        name, _, value = line.partition(" ")
        if name in FACTS:
            if name in facts:
                raise Unreadable(f"it states {name} twice")
            facts[name] = parse_json(value, FACTS[name])
    if missing := FACTS.keys() - facts.keys() - {"data", "compile"}:
        raise Unreadable(f"it does not state {', '.join(sorted(missing))}")
    facts.pop("compile", None)
    config, argv, seed = facts["config"], facts["argv"], facts["seed"]
    if config.pop("seed", None) != seed:
        raise Unreadable("its configuration has another seed")
    if not all(type(word) is str for word in argv + facts["devices"]):
        raise Unreadable("argv and devices are no words")
    last, ended, result = lines[-1], "incomplete", None
    if last.startswith("RESULT "):
        result = parse_json(last.removeprefix("RESULT "), dict)
        ended = how_it_ended(result, facts, common["validations"])
    elif last.startswith("NON-FINITE"):
        ended = "not finite"
    elif last == "INTERRUPTED":
        ended = "interrupted"
    return Run(**common, **facts | dict(argv=without_seed(argv)), ours=True, ended=ended,
               began=began(common["path"].name), result=result)  # fmt: skip


def without_seed(argv: list[str]) -> list[str]:
    words = [word for word in argv if not word.startswith("--seed=")]
    while "--seed" in words:
        at = words.index("--seed")
        del words[at : at + 2]
    return words


def began(name: str) -> datetime.datetime | None:
    """When a run of ours began, which its log's name says."""
    try:
        return datetime.datetime.strptime(name[:19] + "Z", "%Y-%m-%dT%H-%M-%S%z")
    except ValueError:
        return None


def how_it_ended(result: dict, facts: dict, seen: list[Validation]) -> str:
    """Raises Unreadable where RESULT contradicts what stands above it."""
    if not seen:
        raise Unreadable("it has a RESULT and no validation")
    if not all(type(result.get(key)) in (int, float) for key in NUMBERS):
        raise Unreadable(f"its RESULT lacks one of {', '.join(NUMBERS)}")
    last, config = seen[-1], facts["config"]
    if not all(math.isfinite(v.loss) for v in seen) or math.isnan(result["val_loss"]):
        return "not finite"
    if not all(abs(result[key]) < 1e15 for key in NUMBERS):
        raise Unreadable("its RESULT has a number without bounds")
    claims = dict(steps=last.step, seed=facts["seed"], target=config.get("target"),
                  devices=len(facts["devices"]))  # fmt: skip
    for key, value in claims.items():
        if result.get(key) != value:
            raise Unreadable(f"its RESULT has {key} {result.get(key)!r}, the lines above {value!r}")
    if last.steps != config.get("steps"):
        raise Unreadable(f"it validates {last.steps} steps, its configuration has others")
    if type(result.get("tokens")) is not int or not last.step <= result["tokens"] < 1e15:
        raise Unreadable("its RESULT does not count the tokens")
    if abs(result["val_loss"] - last.loss) > 6e-5 or abs(result["train_time_ms"] - last.ms) > 0.6:
        raise Unreadable("its RESULT has another loss or time than its last validation")
    if result.get("reason") not in ("end of schedule", "target reached"):
        raise Unreadable("its RESULT has no known reason")
    if result["reason"] == "end of schedule" and last.step != last.steps:
        return "incomplete"
    return result["reason"]


def patched(first: bytes, patch: Path) -> bytes:
    """A train_gpt.py with the patch applied, by git; raises ValueError where that cannot be."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "train_gpt.py")
        file.write_bytes(first)
        nowhere = os.environ | {"GIT_CEILING_DIRECTORIES": str(Path(folder).resolve().parent)}
        try:
            done = subprocess.run(["git", "apply", str(patch.resolve())], cwd=folder, env=nowhere,
                                  capture_output=True, text=True, errors="replace")  # fmt: skip
        except OSError as error:
            raise ValueError(f"patches need git: {error.strerror}") from error
        is_file = file.is_file() and not file.is_symlink() and file.stat().st_size < LONGEST
        text = file.read_bytes() if is_file else b""
    if done.returncode or text in (first, b""):
        raise ValueError(f"{patch} does not apply to the first arm: {done.stderr.strip()}")
    return text
