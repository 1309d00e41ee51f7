"""Make a record of runs that hold: see records/README.md. Nothing else writes records.

    python records/pack.py ARM --name NAME [--baseline ARM]
    python records/pack.py DIR --name NAME     all arms of a plan, as a comparison
    python records/pack.py --tables            histories in README.md, missing lines of SHA256SUMS

ARM is a folder of run_ab.py, DIR that of its plan. What you have to say is in notes.md beside the
logs; without one, pack.py writes the questions there. A record is not changed any more:
records/SHA256SUMS holds its hashes, a test compares them.
"""

import argparse
import difflib
import hashlib
import io
import json
import re
import shutil
import sys
import tarfile
import tempfile
from collections.abc import Iterator
from pathlib import Path
from statistics import fmean, stdev
from typing import Any, NamedTuple

import runs
import stats
import verify
from verify import TRACKS, Evidence

HERE = Path(__file__).resolve().parent
NOTES = """\
## Idea

<!-- What was changed and why it should help: 3 to 6 sentences, tags, sources. -->

## What did not work

<!-- One line each, with numbers. -->
"""


# ---- What goes into a record ---------------------------------------------------------------------
def read_notes(folder: Path) -> str:
    """The text of notes.md; exits where its questions are not answered."""
    file = folder / "notes.md"
    if not file.is_file():
        file.write_text(NOTES)
    text = file.read_text()
    if "<!--" in text:
        sys.exit(f"pack.py: answer the questions in {file}, then run this again")
    return text.strip()


def copy_set(e: Evidence, to: Path, parent: Path | None, by_patch: bool) -> None:
    """Logs, plan, and the source: once instead of in each log, or only as a patch of a parent's."""
    to.mkdir(parents=True)
    logs = {}
    for run in e.runs:
        _, sha256, text = runs.split(run.path.read_bytes())
        logs[run.name] = f"source {sha256}\n".encode() + runs.BORDER + text.encode()
    write_archive(to / "logs.tar.xz", logs)
    if (e.folder / "unfinished").is_dir():
        shutil.copytree(e.folder / "unfinished", to / "unfinished")
    (to / "plan.json").write_text(json.dumps(e.plan, indent=1) + "\n")
    source = e.folder / "train_gpt.py"
    patch = ""
    if parent:
        old = (parent / "train_gpt.py").read_text().splitlines(keepends=True)
        new = source.read_text().splitlines(keepends=True)
        patch = "".join(difflib.unified_diff(old, new, "a/train_gpt.py", "b/train_gpt.py"))
    if patch:
        (to / "change.patch").write_text(patch)
    if not (patch and by_patch):
        shutil.copy(source, to)


def write_archive(path: Path, logs: dict[str, bytes]) -> None:
    """Packs logs by name; the same bytes for the same logs."""
    with tarfile.open(path, "w:xz", preset=9) as tar:
        for name, content in sorted(logs.items()):
            member = tarfile.TarInfo(f"logs/{name}")  # its time and owner are 0
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))


def check_news(this: Evidence, base: Evidence | None, metric: str, last: Path, best: dict) -> None:
    """Exits unless they beat the last record of the track."""
    if metric == "tokens" and this.tokens[0] >= best["tokens"]:
        sys.exit(f"pack.py: no record: {last.name} takes {best['tokens']:,} tokens")
    beside = base and base.runs[0].source == best["source"] and verify.interleaved(this, base)
    if metric == "time" and not beside:
        sys.exit(f"pack.py: no record: it takes --baseline, {last.name} in the same plan")


def describe(e: Evidence, target: float) -> dict[str, Any]:
    """What result.json states of a set of runs."""
    run = e.runs[0]
    versions = [f"{name} {run.versions[name].split()[0]}" for name in ("jax", "python")]
    machine = ", ".join([f"{len(run.devices)} x {run.devices[0]}", *versions])
    return dict(machine=machine, n=len(e.runs), mean=fmean(e.losses), sd=stdev(e.losses),
                p=stats.below(e.losses, target).p, seconds=fmean(e.seconds), tokens=run.tokens,
                steps=run.steps, source=run.source)  # fmt: skip


class Plan(NamedTuple):
    """What is to be packed."""

    sets: dict[str, Evidence]  # by arm; "" for the runs of a record, "baseline" for its baseline
    parents: dict[str, Path | None]  # arm -> the folder that its patch is against
    is_study: bool  # a comparison of several arms
    result: dict[str, Any]  # the content of result.json
    report: str  # the judge's
    track: str


def judge(folder: Path, name: str, baseline: Path | None) -> Plan:
    """Collects the runs of a folder, or of every arm of a plan, and exits unless they hold."""
    is_study = verify.is_plan(folder)
    arms = [""]
    if is_study:
        arms = list(json.loads((folder / "plan.json").read_text())["arms"])
    sets = {arm: verify.collect(folder / arm) for arm in arms}
    this = sets[arms[0]]
    base = verify.collect(baseline) if baseline else None
    track = verify.infer_track(this)
    if not track or not this.plan:
        sys.exit("pack.py: these runs are of no track, or of no plan")
    if is_study:
        holds, report = verify.study(folder)
    else:
        holds, report = verify.report(this, base, TRACKS[track], TRACKS[track].target)
    if not holds:
        sys.exit(f"{report}\n\npack.py: nothing is packed: see what fails, above")
    last, number = None, 0
    earlier = records_of(track)
    if earlier:
        last, best = earlier[-1]
        number = best["number"]
        if not is_study:
            check_news(this, base, TRACKS[track].metric, last, best)
    result = dict(
        kind="comparison" if is_study else "record",
        track=track,
        name=name,
        date=this.runs[0].began[:10],
        number=number + 1,
        parent=last.name if last else None,
        **describe(this, TRACKS[track].target),
    )
    parents = dict.fromkeys(arms[1:], this.folder) if is_study else {"": last}
    if base:
        sets["baseline"] = base
    return Plan(sets, parents, is_study, result, report, track)


def make(folder: Path, name: str, baseline: Path | None) -> None:
    """Makes a record, or a comparison, whose result.json is of its first arm. It is written beside
    its place and moved there when it is whole; over another record it cannot be moved."""
    import plot  # needs matplotlib, which --tables does not

    plan = judge(folder, name, baseline)
    notes = read_notes(folder)
    track = TRACKS[plan.track]
    to = HERE / "tracks" / plan.track / f"{plan.result['date']}_{name}"
    to.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=to.parent, prefix=".") as part:
        place = Path(part, to.name)
        for arm, evidence in plan.sets.items():
            copy_set(evidence, place / arm, plan.parents.get(arm), by_patch=plan.is_study)
        if plan.is_study:
            shutil.copy(folder / "plan.json", place)
        (place / "result.json").write_text(json.dumps(plan.result, indent=1) + "\n")
        (place / "README.md").write_text(page(plan, notes))
        curves = [(arm or name, evidence) for arm, evidence in plan.sets.items()]
        units = ["steps", "time"] if track.metric == "time" else ["tokens"]
        target = None if plan.is_study else track.target
        plot.plot(curves, place / "curves", units, target, to.name, differences=plan.is_study)
        place.rename(to)


def page(plan: Plan, notes: str) -> str:
    """The README.md of a record or a comparison."""
    result = plan.result
    return (
        f"# {result['name']}\n\nTrack `{plan.track}`, {result['date']}, {result['machine']}; the "
        f"last record was then {result['parent'] or 'none'}.\n\n"
        f"![validation loss](curves.svg)\n\n{notes}\n\n## Evidence\n\n"
        f"The report of `records/verify.py` when this was packed:\n\n{plan.report}\n"
    )


# ---- Tables and hashes ---------------------------------------------------------------------------
def records_of(track: str) -> list[tuple[Path, dict[str, Any]]]:
    """The records of a track in their order, with result.json; the last is the one to beat."""
    paths = HERE.glob(f"tracks/{track}/*/result.json")
    found = [(path.parent, json.loads(path.read_text())) for path in paths]
    records = [entry for entry in found if entry[1]["kind"] == "record"]
    return sorted(records, key=lambda entry: entry[1]["number"])


def history(track: str) -> str:
    """All records of a track, in the order in which they were made."""
    metric, rows = TRACKS[track].metric, []
    for folder, r in records_of(track):
        score = f"{r['seconds']:.2f} s" if metric == "time" else f"{r['tokens']:,} tokens"
        rows.append((r["date"], f"[{r['name']}](tracks/{track}/{folder.name}/)", score,
                     f"{r['mean']:.4f} ± {r['sd']:.4f}", r["n"], verify.p_value(r["p"]),
                     r["machine"]))  # fmt: skip
    title = "date", "record", metric, "final loss", "n", "p", "machine"
    return "\n".join(verify.table(title, rows)) if rows else "No record yet.\n"


def fill(text: str) -> str:
    """records/README.md with new histories between <!-- history TRACK: begin --> and end."""
    form = r"(<!-- history (\S+): begin -->\n).*?(<!-- history \2: end -->)"
    return re.sub(form, lambda m: m[1] + history(m[2]) + m[3], text, flags=re.S)


def sums(folder: Path) -> Iterator[str]:
    """A line of sha256sum for each file of a record, as seen from records/. Instead of logs.tar.xz
    its logs are listed, as they are called when it is unpacked."""
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
    """What follows from the records: lines of SHA256SUMS that are missing, histories."""
    listed, readme = HERE / "SHA256SUMS", HERE / "README.md"
    known = listed.read_text() if listed.is_file() else ""
    for file in sorted(HERE.glob("tracks/*/*/result.json")):
        if f"  {file.relative_to(HERE).as_posix()}\n" not in known:
            known += "".join(sums(file.parent))
    listed.write_text(known)
    readme.write_text(fill(readme.read_text()))


def main(argv: list[str]) -> None:
    """Makes what the command line names, and renews the tables."""
    cli = argparse.ArgumentParser(description=__doc__, allow_abbrev=False,
                                  formatter_class=argparse.RawDescriptionHelpFormatter)  # fmt: skip
    cli.add_argument("folder", type=Path, nargs="?")
    cli.add_argument("--name", default="")
    cli.add_argument("--baseline", type=Path)
    cli.add_argument("--tables", action="store_true")
    args = cli.parse_args(argv)
    if not args.tables:
        if not args.folder or not re.fullmatch("[a-z0-9][a-z0-9_-]*", args.name):
            sys.exit("pack.py: give a folder and --name, of small letters, digits, _ and -")
        try:
            make(args.folder, args.name, args.baseline)
        except (OSError, runs.Unreadable) as error:  # as where a record is there already
            sys.exit(f"pack.py: {error}")
    renew()


if __name__ == "__main__":
    main(sys.argv[1:])
