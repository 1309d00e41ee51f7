"""Makes a record from runs that hold: see records/README.md. Nothing else writes records.

    ./run.sh pack VARIANT --name NAME [--baseline VARIANT]
    ./run.sh pack DIR --name NAME     packs all variants of a plan, as a comparison
    ./run.sh pack --tables            renews the histories and adds to SHA256SUMS

VARIANT is the folder of one variant of ./run.sh compare, and DIR the folder of its plan. Your notes
are in notes.md in that folder. If it is missing, pack.py writes one, with questions to answer. A
record never changes: records/SHA256SUMS has its hashes, and a test compares them.
"""

import difflib
import hashlib
import io
import json
import os
import re
import shutil
import statistics
import sys
import tarfile
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parent))  # for PYTHONSAFEPATH=1
import runs
import stats
import verify
from messages import Fault, Parser, one_line
from verify import TRACKS, Evidence

HERE = Path(__file__).resolve().parent
RESULT = {  # the form of a record's result.json: see runs.require()
    "name": str,
    "date": str,
    "number": int,
    "machine": str,
    "n": int,
    "mean": float,
    "sd": float,
    "p": float,
    "seconds": float,
    "tokens": int,
    "source": str,
}
NOTES = """\
## Idea

<!-- What was changed and why it should help: 3 to 6 sentences, tags, sources. -->

## What did not work

<!-- One line each, with numbers. -->
"""


# ---- What goes into a record ---------------------------------------------------------------------
def read_notes(folder: Path) -> str:
    """Returns the text of notes.md; raises Fault where a question in it is not answered."""
    file = folder / "notes.md"
    if not file.is_file():
        file.write_text(NOTES, "utf-8")
    try:
        text = file.read_text("utf-8")
    except UnicodeDecodeError:
        raise Fault(f"{file} is not UTF-8: save it as UTF-8") from None
    if "<!--" in text:
        raise Fault(f"answer the questions in {file}, then repeat this command")
    return text.strip()


def copy_set(e: Evidence, to: Path, patch: str) -> None:
    """Writes the logs of a set of runs, without their source, its plan, and a patch that is not
    empty."""
    to.mkdir(parents=True)
    logs = {}
    for run in e.runs:
        _, sha256, text = runs.split(run.path.read_bytes())
        logs[run.name] = f"source {sha256}\n".encode() + runs.BORDER + text.encode()
    write_archive(to / "logs.tar.xz", logs)
    if (e.folder / "unfinished").is_dir():
        shutil.copytree(e.folder / "unfinished", to / "unfinished")
    (to / "plan.json").write_text(json.dumps(e.plan, indent=1) + "\n")
    if patch:
        (to / "change.patch").write_text(patch, "utf-8", "surrogateescape")


def read_source(folder: Path) -> bytes:
    """Returns the source of a folder's logs, as they state it; raises Fault if it is missing."""
    file = runs.source_file(folder)
    if not file.is_file():
        raise Fault(f"{file} is missing: put the file there that these logs ran")
    return runs.without_cr(file.read_bytes())


def copy_source(content: bytes, to: Path, packed: Path) -> None:
    """Writes a source into the folder `to`, which will be moved to `packed`: if a record has the
    same file, as a train_gpt.sha256 that names it, else as train_gpt.py."""
    for file in sorted(HERE.glob("tracks/*/*/train_gpt.py")):
        if runs.without_cr(file.read_bytes()) == content:
            sha256 = hashlib.sha256(content).hexdigest()
            path = Path(os.path.relpath(file, packed)).as_posix()
            (to / runs.POINTER).write_text(f"{sha256}  {path}\n")
            return
    (to / "train_gpt.py").write_bytes(content)


def difference(old: Path, new: Path) -> str:
    """Returns the patch that makes the train_gpt.py of a folder from that of another one."""
    a = read_source(old).decode("utf-8", "surrogateescape").splitlines(keepends=True)
    b = read_source(new).decode("utf-8", "surrogateescape").splitlines(keepends=True)
    return "".join(difflib.unified_diff(a, b, "a/train_gpt.py", "b/train_gpt.py"))


def is_rewritten(patch: str, folder: Path) -> bool:
    """Returns whether a patch is longer than half of the train_gpt.py that it makes. It is not
    packed then, because reading both files says more."""
    return len(patch.splitlines()) > len(read_source(folder).splitlines()) / 2


def write_archive(path: Path, logs: dict[str, bytes]) -> None:
    """Packs logs, given by name. The same logs make the same bytes."""
    with tarfile.open(path, "w:xz", preset=9) as tar:
        for name, content in sorted(logs.items()):
            member = tarfile.TarInfo(f"logs/{name}")  # with no time and no owner
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))


def require_better(
    this: Evidence, base: Evidence | None, metric: str, name: str, last: dict
) -> None:
    """Raises Fault unless the runs beat the last record, which has this name and this result.json.
    verify.report compares times with those of the baseline; here it must be the last record."""
    now = {"tokens": this.tokens[0], "steps": this.runs[0].steps}
    if metric in now and now[metric] >= last.get(metric, 0):
        raise Fault(f"not a record, because {name} takes {last.get(metric, 0):,} {metric}")
    is_last_record = base is not None and base.runs[0].source_sha256 == last["source"]
    if not is_last_record or not verify.interleaved(this, base):
        raise Fault(f"a record needs --baseline, with {name} in the same plan")


def describe(e: Evidence, target: float) -> dict[str, Any]:
    """Returns what result.json states of a set of runs."""
    run = e.runs[0]
    machine = f"{len(run.devices)} x {run.devices[0]}"
    for name in ("jax", "python"):
        machine += f", {name} {run.versions.get(name, 'unknown').partition(' ')[0]}"
    return dict(machine=machine, n=len(e.runs), mean=statistics.fmean(e.losses),
                sd=statistics.stdev(e.losses), p=stats.below(e.losses, target).p,
                seconds=statistics.fmean(e.seconds), tokens=run.tokens,
                steps=run.steps, source=run.source_sha256)  # fmt: skip


class Plan(NamedTuple):
    """What is to be packed."""

    # By the folder inside the record: "" (the record itself) and "baseline", or every variant.
    sets: dict[str, Evidence]
    patches: dict[str, str]  # by the same folder: what changes the parent's train_gpt.py, if any
    rewritten: list[str]  # the folders whose patch is left out: see is_rewritten
    is_study: bool  # a comparison of several variants
    result: dict[str, Any]  # the content of result.json
    report: str  # of verify.py
    track: str


def judge(folder: Path, name: str, baseline: Path | None) -> Plan:
    """Collects the runs of a folder, or of every variant of a plan; raises Fault unless they
    hold."""
    is_study = verify.is_plan(folder)
    variants = [""]
    if is_study:
        variants = list(verify.read_plan_file(folder / "plan.json")["arms"])
    sets = {variant: verify.collect(folder / variant) for variant in variants}
    this = sets[variants[0]]
    base = verify.collect(baseline) if baseline else None
    track = verify.infer_track(this)
    if not track or not this.plan:
        raise Fault("these runs do not fit any track, or have no plan")
    if is_study:
        holds, report = verify.study(folder)
    else:
        holds, report = verify.report(this, base, TRACKS[track], TRACKS[track].target)
    if not holds:
        print(report)
        raise Fault("nothing is packed, because the runs fail as shown above")
    number = 1
    parent = None  # the folder of the last record
    earlier = records_of(track)
    if earlier:
        parent, last = earlier[-1]
        number = last["number"] + 1
        if not is_study:
            require_better(this, base, TRACKS[track].metric, parent.name, last)
    result = dict(
        kind="comparison" if is_study else "record",
        track=track,
        name=name,
        date=this.runs[0].began[:10],
        number=number,
        parent=parent.name if parent else None,
        **describe(this, TRACKS[track].target),
    )
    patches = {}
    rewritten = []
    parents = dict.fromkeys(variants[1:], this.folder) if is_study else {"": parent}
    for inside, old in parents.items():
        patch = difference(old, sets[inside].folder) if old else ""
        if is_rewritten(patch, sets[inside].folder):
            rewritten.append(inside)
        else:
            patches[inside] = patch
    if base:
        sets["baseline"] = base
    return Plan(sets, patches, rewritten, is_study, result, report, track)


def make(folder: Path, name: str, baseline: Path | None) -> None:
    """Makes a record, or a comparison, whose result.json is that of its first variant. It is
    written to a temporary folder and moved when complete; it never replaces another record."""
    import plot  # here, because --tables does not need matplotlib

    plan = judge(folder, name, baseline)
    track = TRACKS[plan.track]
    to = HERE / "tracks" / plan.track / f"{plan.result['date']}_{name}"
    if to.exists():
        raise Fault(f"{to} is there already; choose another --name, or remove it")
    notes = read_notes(folder)
    to.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=to.parent, prefix=".") as part:
        place = Path(part, to.name)
        for inside, evidence in plan.sets.items():
            patch = plan.patches.get(inside, "")
            source = read_source(evidence.folder)
            copy_set(evidence, place / inside, patch)
            if not inside:
                # A record has its file, whoever else has it.
                (place / "train_gpt.py").write_bytes(source)
            elif not patch:
                copy_source(source, place / inside, packed=to / inside)
        if plan.is_study:
            shutil.copy(folder / "plan.json", place)
        (place / "result.json").write_text(json.dumps(plan.result, indent=1) + "\n")
        (place / "README.md").write_text(page(plan, notes), "utf-8")
        curves = [(inside or name, evidence) for inside, evidence in plan.sets.items()]
        units = ["steps", "time"] if track.metric == "time" else [track.metric]
        target = None if plan.is_study else track.target
        plot.plot(curves, place / "curves", units, target, to.name, differences=plan.is_study)
        place.rename(to)
    print(f"packed {to}")


def page(plan: Plan, notes: str) -> str:
    """Returns the README.md of a record or a comparison."""
    result = plan.result
    left_out = ""
    if plan.rewritten:
        names = ", ".join(inside or result["name"] for inside in plan.rewritten)
        left_out = (
            f"There is no `change.patch` of {names}, because it would be longer than half of the "
            "file.\n\n"
        )
    return (
        f"# {result['name']}\n\nTrack `{plan.track}`, {result['date']}, {result['machine']}; the "
        f"last record before it: {result['parent'] or 'none'}.\n\n"
        f"![validation loss](curves.svg)\n\n{notes}\n\n{left_out}## Evidence\n\n"
        f"The report of `records/verify.py` when this was packed:\n\n{plan.report}\n"
    )


# ---- Tables and hashes ---------------------------------------------------------------------------
def records_of(track: str) -> list[tuple[Path, dict[str, Any]]]:
    """Returns the records of a track, folder and result.json; the last is the one to beat."""
    paths = HERE.glob(f"tracks/{track}/*/result.json")
    found = []
    for path in paths:
        result = runs.read_json(path, {"kind": str})
        if result["kind"] == "record":
            runs.require(result, RESULT, str(path))
            found.append((path.parent, result))
    return sorted(found, key=lambda entry: entry[1]["number"])


def history(track: str) -> str:
    """Returns the table of a track's records, in the order in which they were made."""
    metric = TRACKS[track].metric
    rows = []
    for folder, result in records_of(track):
        link = f"[{result['name']}](tracks/{track}/{folder.name}/)"
        score = f"{result['seconds']:.2f} s"
        if metric != "time":
            score = f"{result[metric]:,} {metric}"
        loss = f"{result['mean']:.4f} ± {result['sd']:.4f}"
        p = verify.p_value(result["p"])
        rows.append([result["date"], link, score, loss, result["n"], p, result["machine"]])
    title = ["date", "record", metric, "final loss", "n", "p", "machine"]
    return "\n".join(verify.table(title, rows)) if rows else "No record yet.\n"


def fill(text: str) -> str:
    """Returns records/README.md with a new table in every <!-- history TRACK: begin --> ... end."""
    form = r"(<!-- history (\S+): begin -->\n).*?(<!-- history \2: end -->)"

    def renewed(match: re.Match) -> str:
        begin, track, end = match.groups()
        return begin + history(track) + end

    return re.sub(form, renewed, text, flags=re.S)


def sums(folder: Path) -> Iterator[str]:
    """Yields a line of sha256sum for each file of a record, with its path from records/. Instead of
    logs.tar.xz its logs are listed, with the paths that they have when it is unpacked."""
    files = {}
    for path in folder.rglob("*"):
        name = path.relative_to(folder.parents[2]).as_posix()
        if path.name == "logs.tar.xz":
            place = name.removesuffix(".tar.xz")
            files |= {f"{place}/{log.name}": log.content for log in runs.log_files(path.parent)}
        elif path.is_file():
            files[name] = path.read_bytes()
    for name, content in sorted(files.items()):
        yield f"{hashlib.sha256(content).hexdigest()}  {name}\n"


def renew() -> None:
    """Writes what follows from the records: missing lines of SHA256SUMS, and the histories."""
    listed = HERE / "SHA256SUMS"
    readme = HERE / "README.md"
    known = listed.read_text("utf-8") if listed.is_file() else ""
    for file in sorted(HERE.glob("tracks/*/*/result.json")):
        is_listed = f"  {file.relative_to(HERE).as_posix()}\n" in known
        if not is_listed:
            known += "".join(sums(file.parent))
    listed.write_text(known, "utf-8")
    readme.write_text(fill(readme.read_text("utf-8")), "utf-8")


def main(argv: list[str]) -> None:
    """Makes the record that the command line names, if any, and renews the tables."""
    cli = Parser(prog="./run.sh pack", description=__doc__)
    cli.add_argument("folder", type=Path, nargs="?", help="folder of a variant, or of a whole plan")
    cli.add_argument(
        "--name", default="", help="name of the record: small letters, digits, _ and -"
    )
    cli.add_argument("--baseline", type=Path, help="folder of the variant to beat")
    cli.add_argument("--tables", action="store_true", help="only renew the tables")
    args = cli.parse_args(argv)
    if not args.tables:
        if not args.folder or not re.fullmatch("[a-z0-9][a-z0-9_-]*", args.name):
            raise Fault("give a folder, and a --name of small letters, digits, _ and -")
        make(args.folder, args.name, args.baseline)
    renew()


if __name__ == "__main__":
    with one_line("pack.py", status=2):
        main(sys.argv[1:])
