"""Makes a record from runs that hold: see records/README.md. Nothing else writes records.

    ./run.sh pack VARIANT --name NAME [--baseline VARIANT]
    ./run.sh pack DIR --name NAME     packs all variants of a plan, as a comparison
    ./run.sh pack --tables            renews the histories and adds to SHA256SUMS

VARIANT is the folder of one variant of ./run.sh compare, and DIR the folder of its plan. Your notes
are in notes.md in that folder. A record never changes: records/SHA256SUMS has its hashes, and a
test compares them.
"""

import argparse
import hashlib
import io
import json
import re
import shutil
import statistics
import sys
import tarfile
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))  # for PYTHONSAFEPATH=1
import idea
import runs
import stats
import verify
from messages import one_line, refuse
from verify import TRACKS, Evidence

HERE = Path(__file__).resolve().parent


# ---- What goes into a record ---------------------------------------------------------------------
def copy_logs(e: Evidence, to: Path) -> None:
    """Writes the logs of a set of runs, without their source, and its plan. The same logs make the
    same bytes."""
    to.mkdir(parents=True)
    with tarfile.open(to / "logs.tar.xz", "w:xz", preset=9) as tar:
        for run in e.runs:
            sha256, text = runs.split(run.path.read_bytes())
            content = f"source {sha256}\n".encode() + runs.BORDER + text.encode()
            member = tarfile.TarInfo(f"logs/{run.name}")  # with no time and no owner
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))
    if (e.folder / "unfinished").is_dir():
        shutil.copytree(e.folder / "unfinished", to / "unfinished")
    (to / "plan.json").write_text(json.dumps(e.plan, indent=1) + "\n")


def difference(old: Path, new: Path) -> bytes:
    """Returns the patch that makes the train_gpt.py of a folder from that of another one."""
    return idea.difference(*(runs.source_file(folder).read_bytes() for folder in (old, new)))


def require_better(
    this: Evidence, base: Evidence | None, metric: str, name: str, last: dict
) -> None:
    """Refuses runs that do not beat the last record, which has this name and this result.json.
    verify.report compares times with those of the baseline; here it must be the last record."""
    now = {"tokens": this.runs[0].tokens, "steps": this.runs[0].steps}
    if metric in now and now[metric] >= last[metric]:
        refuse(f"not a record, because {name} takes {last[metric]:,} {metric}")
    is_last_record = base is not None and base.runs[0].source_sha256 == last["source"]
    if not is_last_record or not verify.interleaved(this, base):
        refuse(f"a record needs --baseline, with {name} in the same plan")


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


def make(folder: Path, name: str, baseline: Path | None = None) -> Path:
    """Makes a record, or a comparison, whose result.json is that of its first variant. It is
    written to a temporary folder and moved when complete; it never replaces another record. Returns
    its folder."""
    import plot  # here, because --tables does not need matplotlib

    holds, report = verify.judge(folder, baseline)
    if not holds:
        print(report)
        refuse("nothing is packed, because the runs fail as shown above")
    if verify.is_plan(folder):
        sets = verify.variants_of(folder)
    else:  # by their folders in the record
        sets = {"": verify.collect(folder)}
        if baseline:
            sets["baseline"] = verify.collect(baseline)
    this = list(sets.values())[0]
    track_name = verify.infer_track(this)
    track = TRACKS[track_name]
    is_record = "" in sets
    earlier = records_of(track_name)
    parent, last = earlier[-1] if earlier else (None, {"number": 0})
    if is_record and parent:
        require_better(this, sets.get("baseline"), track.metric, parent.name, last)
    result = dict(
        kind="record" if is_record else "comparison",
        track=track_name,
        name=name,
        date=this.runs[0].began[:10],
        number=last["number"] + 1,
        parent=parent.name if parent else None,
        **describe(this, track.target),
    )
    to = HERE / "tracks" / track_name / f"{result['date']}_{name}"
    if to.exists():
        refuse(f"{to} is there already; choose another --name, or remove it")
    notes = folder / "notes.md"
    if not notes.is_file():
        refuse(f"write {notes}: the idea in 3 to 6 sentences, with sources, and what did not work")
    to.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=to.parent, prefix=".") as part:
        place = Path(part, to.name)
        for inside, evidence in sets.items():
            copy_logs(evidence, place / inside)
            old = parent if is_record else this.folder
            patch = difference(old, evidence.folder) if old and inside != "baseline" else b""
            if patch:
                (place / inside / "change.patch").write_bytes(patch)
            if is_record or not patch:
                shutil.copy(runs.source_file(evidence.folder), place / inside / "train_gpt.py")
        if not is_record:
            shutil.copy(folder / "plan.json", place)
        (place / "result.json").write_text(json.dumps(result, indent=1) + "\n")
        (place / "README.md").write_text(page(result, notes.read_text("utf-8"), report), "utf-8")
        curves = [(inside or name, evidence) for inside, evidence in sets.items()]
        units = ["steps", "time"] if track.metric == "time" else [track.metric]
        target = track.target if is_record else None
        plot.plot(curves, place / "curves", units, target, to.name)
        place.rename(to)
    return to


def page(result: dict[str, Any], notes: str, report: str) -> str:
    """Returns the README.md of a record or a comparison."""
    return (
        f"# {result['name']}\n\nTrack `{result['track']}`, {result['date']}, {result['machine']}; "
        f"the last record before it: {result['parent'] or 'none'}.\n\n"
        f"![validation loss](curves.svg)\n\n{notes}\n\n## Evidence\n\n"
        f"The report of `records/verify.py` when this was packed:\n\n{report}\n"
    )


# ---- Tables and hashes ---------------------------------------------------------------------------
def records_of(track: str) -> list[tuple[Path, dict[str, Any]]]:
    """Returns the records of a track, folder and result.json; the last is the one to beat."""
    found = []
    for path in HERE.glob(f"tracks/{track}/*/result.json"):
        result = json.loads(path.read_text("utf-8"))
        if result["kind"] == "record":
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
    return re.sub(form, lambda match: match[1] + history(match[2]) + match[3], text, flags=re.S)


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
        if f"  {file.relative_to(HERE).as_posix()}\n" not in known:
            known += "".join(sums(file.parent))
    listed.write_text(known, "utf-8")
    readme.write_text(fill(readme.read_text("utf-8")), "utf-8")


def main(argv: list[str]) -> None:
    """Makes the record that the command line names, if any, and renews the tables."""
    form = argparse.RawDescriptionHelpFormatter
    cli = argparse.ArgumentParser(prog="./run.sh pack", description=__doc__, formatter_class=form)
    cli.error = refuse
    cli.add_argument("folder", type=Path, nargs="?", help="folder of a variant, or of a whole plan")
    cli.add_argument("--name", default="", help="of the record: small letters, digits, _ and -")
    cli.add_argument("--baseline", type=Path, help="folder of the variant to beat")
    cli.add_argument("--tables", action="store_true", help="only renew the tables")
    args = cli.parse_args(argv)
    if not args.tables:
        if not args.folder or not re.fullmatch("[a-z0-9][a-z0-9_-]*", args.name):
            refuse("give a folder, and a --name of small letters, digits, _ and -")
        print(f"packed {make(args.folder, args.name, args.baseline)}")
    renew()


if __name__ == "__main__":
    with one_line("pack.py"):
        main(sys.argv[1:])
