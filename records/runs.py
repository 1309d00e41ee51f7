"""Reads logs: those of train_gpt.py, and those of modded-nanogpt. Nothing in them is executed.

Both kinds begin with the source and a line of 100 = that ends it. Validations are lines like

    step:1770/1770 val_loss:3.2788 train_time:179828ms step_avg:101.60ms

with further fields in some of upstream's. Our logs add facts, one per line as `name json`, and end
with a line RESULT json. Upstream's add the output of nvidia-smi and a line for every step. Other
lines do not count. After a fact `resume {"step": 15}`, a run went on from step 15, so losses of
later steps above that line do not count. Of the fact `config` only a few fields are interpreted, so
logs of any version can be read, whatever its layers and stages are called. A packed log (pack.py)
has `source sha256` in place of the source. A log whose lines all end in CRLF was converted by git
or an editor, and is read as it was before. This module believes what a log states, so it does not
detect a forged log.

Beside the logs is their source, train_gpt.py, or train_gpt.sha256 with the path of a record that
has the same file.
"""

import codecs
import hashlib
import io
import itertools
import json
import lzma
import math
import os
import re
import sys
import tarfile
from pathlib import Path
from typing import Any, NamedTuple

if sys.version_info < (3, 11):  # noqa: UP036 - an error of Python has the status of a verdict
    print("records/ needs Python 3.11: .venv/bin/python, which ./run.sh makes", file=sys.stderr)
    sys.exit(2)
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "data"))
import messages  # noqa: E402

BORDER = b"=" * 100 + b"\n"
POINTER = "train_gpt.sha256"  # a line of sha256sum, with a path from its folder
# Other fields are read over, as in `val_loss:3.2710 val_ema_loss:3.2716 train_time:1.250s tau:150`.
LOSS = re.compile(
    r"step:(\d{1,12})/(\d{1,12}) (val|train)_loss:(\d{1,12}(?:\.\d+)?|nan|-?inf)(?: \w+:\S+)*?"
    r" train_time:(\d{1,12}(?:\.\d+)?)(m?s)(?: \w+:\S+)*",
    re.ASCII,
)
OURS = re.compile(r"^(data|versions|environment|argv|RESULT) [\[{]", re.M)  # in no log of upstream
STATES_RESULT = re.compile(rb'RESULT\s*\{\s*"')  # the line that prints it has no quote there
MAYBE_LOG = re.compile(r"\.(txt|log)(\.\w+)?$", re.I)
COMPRESSED = ".gz", ".bz2", ".xz", ".zst", ".zip"
FACTS = {  # the forms of what a log states: see require()
    "versions": {str: str},
    "devices": [str],
    "driver": str,
    "environment": {str: str},
    "argv": [str],
    "seed": int,
    "config": {"preset": str, "target": float, "seed": int},
    "data": [{"sha256": str}],
    "parameters": {str: int},
}
RESULT = {"reason": str, "val_loss": float, "tokens": int, "train_time_ms": float}
RESULT |= {"seed": int, "steps": int}
LARGEST = 1e18  # of numbers that a log may state
COMPLETE = "end of schedule", "target reached"  # how a run ends that has a final loss
# How a run ended without a RESULT, by the first word of the line that says so.
BREAKS = {"NON-FINITE:": "not finite", "INTERRUPTED": "interrupted"}


class Unreadable(messages.Fault):
    """A file cannot be read as evidence. The message gives the reason."""


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
    if os.path.lexists(archive):  # a link that leads nowhere is named when it is opened
        return unpack(archive)
    has_place = os.path.lexists(folder / "logs")
    return loose_logs(folder / "logs" if has_place else folder)


def loose_logs(place: Path) -> list[Path]:
    """Returns the logs that lie in a folder, sorted by name. Programs for files leave others, whose
    names begin with a dot."""
    logs = []
    for path in sorted(place.iterdir()):
        is_log = path.suffix == ".txt" and not path.name.startswith(".")
        if is_log and (path.is_file() or not path.exists()):  # it may be a link that leads nowhere
            logs.append(path)
    return logs


def unpack(archive: Path) -> list[ArchivedLog]:
    """Returns the logs in a logs.tar.xz; raises Unreadable if it may have lost some."""
    packed = archive.read_bytes()
    if packed.startswith(b"version https://git-lfs"):
        raise Unreadable(f"{archive} is only a pointer of Git LFS: type git lfs pull")
    xz = lzma.LZMADecompressor(lzma.FORMAT_XZ)
    try:
        content = xz.decompress(packed)
        with tarfile.open(fileobj=io.BytesIO(content), mode="r:") as tar:
            members = tar.getmembers()
            found = logs_of(tar, members, archive)
            rest = content[tar.offset :]
    except (tarfile.TarError, lzma.LZMAError, EOFError) as error:
        why = str(error).partition("\n")[0]  # of several lines, where it is no archive
        raise Unreadable(f"{archive} is damaged: {why}") from error
    # tarfile ends at what is no header, as if nothing followed; tar ends with two blocks of zeros.
    is_whole = len(rest) >= 2 * tarfile.BLOCKSIZE and not any(rest)
    if not xz.eof or xz.unused_data.strip(b"\0") or not is_whole:
        raise Unreadable(f"{archive} is damaged or has something behind its end: pack it anew")
    return sorted(found)


def logs_of(
    tar: tarfile.TarFile, members: list[tarfile.TarInfo], archive: Path
) -> list[ArchivedLog]:
    """Returns the logs among an archive's members; raises Unreadable unless all lie in one folder
    and none is a link."""
    found = {}
    places = set()
    for member in members:
        name = Path(member.name).name
        if member.isdir() or name.startswith("."):
            continue
        if not member.isreg():
            raise Unreadable(f"{archive}: {member.name} is a link or a device: pack the log itself")
        places.add(Path(member.name).parent)
        if name in found or len(places) > 1:
            raise Unreadable(
                f"{archive}: {member.name} is there twice, or in another folder than the others: "
                "pack every log once, in one folder"
            )
        found[name] = ArchivedLog(name, tar.extractfile(member).read())
    return list(found.values())


def left_out(folder: Path) -> list[Path]:
    """Returns files of a folder, and of its logs/, that are logs by their name and content, but are
    not among log_files(). A log that was unpacked beside its archive is among them."""
    read = {log.name: log for log in log_files(folder)}
    found = []
    for path in sorted([*folder.glob("*.*"), *folder.glob("logs/*.*")]):
        if not MAYBE_LOG.search(path.name) or path.name.startswith(".") or not path.is_file():
            continue
        same = read.get(path.name)
        content = path.read_bytes()
        if same and same.read_bytes() == content:
            continue
        if path.suffix in COMPRESSED or BORDER.strip() in content.replace(b"\0", b""):
            found.append(path)
    return found


def states_result(content: bytes) -> bool:
    """Returns whether a log has a RESULT, in whatever encoding and with whatever ends of lines."""
    return bool(STATES_RESULT.search(content.replace(b"\0", b"")))


def source_file(folder: Path) -> Path:
    """Returns the source of a folder's logs: its train_gpt.py (which may be missing), or the file
    that its train_gpt.sha256 names. Raises Unreadable if that file is missing or has changed."""
    source = folder / "train_gpt.py"
    pointer = folder / POINTER
    if not pointer.is_file():
        return source
    if source.is_file():
        raise Unreadable(f"{folder} has a train_gpt.py and a {POINTER}; delete one of them")
    line = re.fullmatch(rb"([0-9a-f]{64})  ([\w./-]+)\n", without_cr(pointer.read_bytes()))
    if not line:
        raise Unreadable(f"{pointer} is not one line of sha256sum")
    sha256, path = line[1].decode(), line[2].decode()
    source = folder / path
    if not source.is_file():
        raise Unreadable(f"{pointer} names {path}, which is missing")
    if source_hash(source) != sha256:
        raise Unreadable(f"{pointer} names {path}, which has another sha256")
    return source


def source_text(folder: Path) -> bytes:
    """Returns the source of a folder's logs, also of a variant in a packed comparison, which has a
    change.patch of the first variant's source. Raises Unreadable if it is missing."""
    file = source_file(folder)
    patch = folder / "change.patch"
    plan = folder.resolve().parent / "plan.json"
    if file.is_file():
        return without_cr(file.read_bytes())
    if not patch.is_file() or not plan.is_file():
        raise Unreadable(f"{file} is missing")
    first = next(iter(read_json(plan, {"arms": {str: str}})["arms"]), "")
    old = source_file(plan.parent / first)
    if not old.is_file():
        raise Unreadable(f"{old} is missing, which {patch} changes")
    return apply_exact(without_cr(old.read_bytes()), without_cr(patch.read_bytes()), patch)


def apply_exact(old: bytes, patch: bytes, name: Path) -> bytes:
    """Returns a source with a unified diff of one file applied, whose lines must be exact, as
    pack.py writes it. Raises Unreadable where it does not fit."""
    lines = old.splitlines(keepends=True)
    new = []
    done = 0  # lines of the old source
    for line in patch.splitlines(keepends=True)[2:]:
        hunk = re.match(rb"@@ -(\d+)(,0)?", line)
        if hunk:
            start = int(hunk[1]) - (0 if hunk[2] else 1)
            new += lines[done:start]
            done = start
        elif line.startswith(b"+"):
            new.append(line[1:])
        elif done < len(lines) and line[:1] in (b" ", b"-") and line[1:] == lines[done]:
            new += [lines[done]] if line.startswith(b" ") else []
            done += 1
        else:
            raise Unreadable(f"{name} does not fit the source that it changes")
    return b"".join(new + lines[done:])


def source_hash(file: Path) -> str:
    """Returns the sha256 of a train_gpt.py, as a log states it."""
    return hashlib.sha256(without_cr(file.read_bytes())).hexdigest()


def without_cr(content: bytes) -> bytes:
    """Returns a text as it was before git or an editor gave CRLF to all its lines. A text of which
    only some lines end in CRLF is returned as it is."""
    if content.count(b"\r\n") == content.count(b"\n"):
        return content.replace(b"\r\n", b"\n")
    return content


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


# ---- JSON ----------------------------------------------------------------------------------------
def parse_json(text: str, form: Any, name: str) -> Any:
    """Returns the value that a text of JSON states for this name. Raises Unreadable unless it has
    this form, and for what programs read in different ways: two values of one name, and NaN."""
    try:
        value = json.loads(text, object_pairs_hook=unambiguous, parse_constant=refuse_constant)
    except RecursionError:
        raise Unreadable(f"{name} is nested too deeply") from None
    except ValueError as error:
        raise Unreadable(f"{name} is broken: {error}") from None
    require(value, form, name)
    return value


def unambiguous(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Makes the object of JSON that has these names and values."""
    value = {}
    for name, part in pairs:
        if name in value:
            raise ValueError(f"{name} is there twice")
        value[name] = part
    return value


def refuse_constant(name: str) -> None:
    """Takes NaN and Infinity, which only some programs read as JSON."""
    raise ValueError(f"{name} is not a number")


def require(value: Any, form: Any, name: str) -> None:
    """Raises Unreadable unless a value of JSON has a form. That is a type; or a list of one form,
    for lists whose parts have it; or {str: form}, for objects whose values have it; or
    {"a": form, "b": form}, for objects that have these values, and maybe others."""
    if isinstance(form, list) and isinstance(value, list):
        for part in value:
            require(part, form[0], f"a part of {name}")
    elif isinstance(form, dict) and isinstance(value, dict):
        for key in value if str in form else form:
            if key not in value:
                raise Unreadable(f"{name} has no {key}")
            require(value[key], form[str] if str in form else form[key], f"{key} of {name}")
    elif not has_type(value, form):
        raise Unreadable(f"{name} cannot be {json.dumps(value)[:40]}")


def has_type(value: Any, form: Any) -> bool:
    """Returns whether a value of JSON has a type. int stands for those that are not negative, and
    float for all numbers; none is beyond LARGEST."""
    if form is int:
        return type(value) is int and 0 <= value <= LARGEST  # isinstance() would take true
    if form is float:
        return type(value) in (int, float) and -LARGEST <= value <= LARGEST
    return type(value) is form


def read_json(file: Path, form: Any) -> Any:
    """Returns the content of a file of JSON; raises Unreadable if it does not have this form."""
    try:
        return parse_json(file.read_text("utf-8"), form, str(file))
    except UnicodeDecodeError:
        raise Unreadable(f"{file} is broken: it is not UTF-8") from None


# ---- Logs ----------------------------------------------------------------------------------------
def split(content: bytes) -> tuple[bytes | None, str, str]:
    """Returns the source (None in a packed log), its sha256, and the text after the source."""
    content = without_cr(content)
    source, border, body = content.partition(b"\n" + BORDER)
    if not border:
        raise Unreadable(why_no_log(content))
    try:
        text = body.decode()
    except UnicodeDecodeError as error:
        number = content.count(b"\n") - body.count(b"\n", error.start) + 1
        raise Unreadable(f"line {number} is not UTF-8") from None
    packed = re.fullmatch(rb"source ([0-9a-f]{64})", source)
    if not packed and re.match(rb"(\xef\xbb\xbf)?\s*source \S{1,64}\s*$", source, re.I):
        raise Unreadable("line 1 is not `source <sha256>`, alone: restore it as pack.py wrote it")
    if packed:
        return None, packed[1].decode(), text
    source += b"\n"
    return source, hashlib.sha256(source).hexdigest(), text


def why_no_log(content: bytes) -> str:
    """Returns why a file cannot be read that has no line of 100 = with the end of a line before and
    after it."""
    missing = "it has no line of 100 =, which ends the source"
    if content.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)) or b"=\0=\0" in content:
        return "it is UTF-16: save it as UTF-8, without a byte-order mark"
    if b"\r" + BORDER.replace(b"\n", b"\r") in content:
        return "its lines end in CR: restore the file as it was written"
    if b"\n" + BORDER.replace(b"\n", b"\r\n") in content:
        return "some of its lines end in CRLF, others do not: restore the file as it was written"
    if re.search(rb"^s:\d+ t[er]l:\d", content, re.M):
        return f"{missing}: it is a log of llm.c"
    if re.search(rb"step:\d+/\d+ val_loss:", content):
        return f"{missing}: it has losses as a terminal shows them"
    return f"{missing}, and no losses"


class Lines:
    """What the lines of a log have stated so far."""

    def __init__(self, ours: bool):
        self.ours = ours  # the log has facts
        self.facts = {}
        self.validations = []
        self.training = []
        self.ended = "incomplete"
        self.resumed = False
        self.since_start = set()  # names of facts that were stated since the last start of the run

    def take(self, line: str) -> None:
        """Takes a line; raises Unreadable."""
        name, _, value = line.partition(" ")
        has_loss = "val_loss:" in line or "train_loss:" in line
        if has_loss or ("RESULT {" in line and name != "RESULT"):
            self.take_loss(line)
        elif self.ours and name in BREAKS:
            self.ended = BREAKS[name]
        elif self.ours and name == "resume":
            self.go_on(parse_json(value, {"step": int}, name)["step"])
        elif self.ours and name in (*FACTS, "RESULT"):
            self.check_end(line)
            if name in self.since_start:
                raise Unreadable(f"{name} is stated twice")
            self.since_start.add(name)
            if name == "RESULT":
                self.take_result(value)
            else:
                self.facts[name] = parse_json(value, FACTS[name], name)

    def check_end(self, line: str) -> None:
        """Raises Unreadable for a line that follows the end of a run."""
        if self.ended in COMPLETE:
            raise Unreadable(f"a log has one run, but this follows its RESULT: {line[:40]!r}")

    def take_loss(self, line: str) -> None:
        """Takes a line with a loss. A log whose losses are out of order is not judged."""
        match = LOSS.fullmatch(line)
        names = re.findall(r"(?:^| )(\w+):", line)
        is_whole = "step_avg" in names or "train_loss" in names
        if not match or not is_whole or len(names) > len({*names}):
            raise Unreadable(
                f"a loss or RESULT has another form, or other text beside it: {line[:60]!r}"
            )
        self.check_end(line)
        step, steps, kind, loss, time, unit = match.groups()
        ms = float(time) * {"ms": 1, "s": 1000}[unit]
        new = Validation(int(step), int(steps), float(loss), ms)
        if new.step > new.steps or new.steps == 0:
            raise Unreadable(f"there is no step {step} of {steps}")
        if kind == "train" and not self.ours:
            return
        found = self.training if kind == "train" else self.validations
        if found:
            last = found[-1]
            in_order = last.step < new.step and last.ms <= new.ms
            if not in_order or last.steps != new.steps:
                raise Unreadable(f"its losses are out of order at step {step}")
        found.append(new)

    def go_on(self, step: int) -> None:
        """Takes the step from which a run went on. It validates that step again, but trained it
        before it stopped."""
        self.resumed = True
        self.ended = "incomplete"
        self.facts.pop("RESULT", None)
        self.since_start.clear()
        self.validations = [loss for loss in self.validations if loss.step < step]
        self.training = [loss for loss in self.training if loss.step <= step]

    def take_result(self, value: str) -> None:
        """Takes the RESULT of a run that came to its end."""
        if self.ended != "incomplete":
            raise Unreadable(f"RESULT follows the line by which the run was {self.ended}")
        result = parse_json(value, RESULT, "RESULT")
        if result["reason"] not in COMPLETE or result["tokens"] == 0:
            raise Unreadable("RESULT has no tokens, or an unknown reason")
        self.facts["RESULT"] = result
        self.ended = result["reason"]


def read_lines(text: str, first: int) -> Lines:
    """Reads the text after the source, whose lines are numbered from `first`. A run that is killed
    may leave its last line incomplete: at the end of the log, or before the run was resumed."""
    lines = Lines(ours=bool(OURS.search(text)))
    pending = None  # the fault of the line before, which does not count if the log ends there
    for number, line in enumerate(text.split("\n"), first):
        if pending and line:
            if not line.startswith("resume "):
                raise pending
            pending = None
        try:
            lines.take(line)
        except Unreadable as error:
            pending = Unreadable(f"line {number}: {error}")
    if pending and text.endswith("\n"):
        raise pending
    return lines


def count_runs(text: str) -> int:
    """Returns how many runs a text has, one after another, all from the same first step."""
    steps = [int(step) for step in re.findall(r"^step:(\d{1,12})/\d+ val_loss:", text, re.M)]
    starts = 1 + sum(a >= b for a, b in itertools.pairwise(steps))
    is_same = starts == steps.count(steps[0]) if steps else False
    return starts if is_same and "\nresume " not in text else 1


def read(path: Path | ArchivedLog) -> Run:
    """Reads a log; raises Unreadable."""
    content = path.read_bytes()
    _, source_sha256, text = split(content)
    if not text.strip():
        raise Unreadable("it ends with the source")
    n = count_runs(text)
    if n > 1:
        raise Unreadable(f"it has {n} runs: split it into logs of one run, all with the source")
    lines = read_lines(text, first=content.count(b"\n") - text.count("\n") + 1)
    if not lines.ours and not lines.validations and not re.search("^Running P", text, re.M):
        raise Unreadable("it is not a log of train_gpt.py or modded-nanogpt")
    last = Validation(step=0, steps=1, loss=math.nan, ms=0.0)  # of an incomplete run
    if lines.validations:
        last = lines.validations[-1]
    facts = our_facts(lines.facts, path.name) if lines.ours else upstream_facts(text)
    ended = lines.ended if lines.ours else "end of schedule"
    if not all(math.isfinite(v.loss) for v in lines.validations):
        ended = "not finite"
    elif ended in COMPLETE and last.step != last.steps:
        ended = "incomplete"
    run = Run(
        path=path,
        log_sha256=hashlib.sha256(text.rstrip().encode()).hexdigest(),
        source_sha256=source_sha256,
        validations=lines.validations,
        training=lines.training,
        steps=last.steps,
        loss=last.loss,
        seconds=last.ms / 1000,
        ours=lines.ours,
        ended=ended,
        resumed=lines.resumed,
        **facts,
    )
    result = lines.facts.get("RESULT")
    return with_result(run, result) if result else run


def with_result(run: Run, result: dict[str, Any]) -> Run:
    """Returns a run with what its RESULT states; raises Unreadable if its lines contradict that."""
    if run.complete:
        last = run.validations[-1]
        loss_differs = not abs(result["val_loss"] - last.loss) <= 6e-5  # the line has four decimals
        time_differs = not abs(result["train_time_ms"] - last.ms) <= 1
        if loss_differs or time_differs or result["steps"] != last.step:
            raise Unreadable("its RESULT does not agree with its last validation")
        count = len(run.devices)
        if result["seed"] != run.seed or result.get("devices", count) != count:
            raise Unreadable("its RESULT does not agree with its seed or its devices")
    return run._replace(
        loss=result["val_loss"],
        seconds=result["train_time_ms"] / 1000,
        tokens=result["tokens"],
        resumed=run.resumed or result.get("resumed", False) is not False,
    )


def upstream_facts(text: str) -> dict[str, Any]:
    """Returns the facts that modded-nanogpt's train_gpt.py writes."""
    driver = re.search(r"Driver Version: (\S+)", text)
    devices = re.findall(r"^\| {1,4}\d{1,3} {1,4}(\S.{0,50}?) +(?:On|Off|N/A) +\|", text, re.M)
    # The third track has no output of nvidia-smi.
    stated = re.search(
        r"^Running .{0,99}(?:device_name=| on )(.{1,50}) with world_size[= ](\d{1,4})$", text, re.M
    )
    if stated and not devices:
        devices = [stated[1]] * int(stated[2])
    return dict(
        versions=dict(re.findall(r"^Running (Python|PyTorch|Triton version) (.*)$", text, re.M)),
        devices=devices,
        driver=driver[1] if driver else None,
    )


def our_facts(stated: dict[str, Any], name: str) -> dict[str, Any]:
    """Returns the facts that the class Log of train_gpt.py writes, in this and in earlier versions.
    name is that of the file, which begins with the time."""
    missing = [key for key in FACTS if key not in stated]
    if missing:
        raise Unreadable(f"it does not state {', '.join(missing)}")
    if stated["config"]["seed"] != stated["seed"]:
        raise Unreadable("its config has another seed")
    facts = {key: stated[key] for key in FACTS}
    facts["config"] = {key: value for key, value in stated["config"].items() if key != "seed"}
    facts["argv"] = without_seed(facts["argv"])
    facts["parameters"] = sum(stated["parameters"].values())
    began = re.match(r"\d{4}-\d\d-\d\dT\d\d-\d\d-\d\d", name)
    facts["began"] = began[0] if began else None
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
