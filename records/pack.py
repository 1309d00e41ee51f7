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
from typing import Any

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
    source, patch = e.folder / "train_gpt.py", ""
    if parent:
        old, new = (f.read_text().splitlines(True) for f in (parent / "train_gpt.py", source))
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


def make(folder: Path, name: str, baseline: Path | None) -> None:
    """Makes a record, or a comparison, whose result.json is of its first arm. It is written beside
    its place and moved there when it is whole; over another record it cannot be moved."""
    import plot  # needs matplotlib, which --tables does not

    is_study = verify.is_plan(folder)
    arms = [*json.loads((folder / "plan.json").read_text())["arms"]] if is_study else [""]
    sets = {arm: verify.collect(folder / arm) for arm in arms}
    this, base = sets[arms[0]], verify.collect(baseline) if baseline else None
    where = verify.infer_track(this)
    if not where or not this.plan:
        sys.exit("pack.py: these runs are of no track, or of no plan")
    track, (last, best) = TRACKS[where], (records_of(where) or [(None, {})])[-1]
    judged = verify.study(folder) if is_study else verify.report(this, base, track, track.target)
    holds, report = judged
    if not holds:
        sys.exit(f"{report}\n\npack.py: nothing is packed: see what fails, above")
    if last and not is_study:
        check_news(this, base, track.metric, last, best)
    notes, date = read_notes(folder), this.runs[0].began[:10]
    kind, parent = "comparison" if is_study else "record", last.name if last else None
    result = dict(kind=kind, track=where, name=name, date=date, number=best.get("number", 0) + 1,
                  parent=parent, **describe(this, track.target))  # fmt: skip
    parents = dict.fromkeys(arms[1:], this.folder) if is_study else {"": last}
    sets |= {"baseline": base} if base else {}
    to = HERE / "tracks" / where / f"{date}_{name}"
    to.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=to.parent, prefix=".") as part:
        place = Path(part, to.name)
        for arm, e in sets.items():
            copy_set(e, place / arm, parents.get(arm), by_patch=is_study)
        if is_study:
            shutil.copy(folder / "plan.json", place)
        (place / "result.json").write_text(json.dumps(result, indent=1) + "\n")
        (place / "README.md").write_text(
            f"# {name}\n\nTrack `{where}`, {date}, {result['machine']}; the last record was then "
            f"{parent or 'none'}.\n\n![validation loss](curves.svg)\n\n{notes}\n\n## Evidence\n\n"
            f"What `records/verify.py` said when this was packed:\n\n{report}\n"
        )
        units = ["steps", "time"] if track.metric == "time" else ["tokens"]
        plot.plot([(arm or name, e) for arm, e in sets.items()], place / "curves", units,
                  None if is_study else track.target, to.name, differences=is_study)  # fmt: skip
        place.rename(to)


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
