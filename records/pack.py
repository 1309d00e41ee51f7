"""Make a record of runs that hold: see records/README.md. Nothing else writes records.

    python records/pack.py ARM --name NAME [--baseline ARM] [--track TRACK]
    python records/pack.py DIR --name NAME --track TRACK     all arms of a plan, as a comparison
    python records/pack.py --tables                          the tables in README.md, from records

ARM is a folder of run_ab.py, DIR that of its plan. What you have to say is in notes.md beside the
logs; without one, pack.py writes the questions there. A record is not changed any more:
records/SHA256SUMS holds its hashes, a test compares them.
"""

import argparse
import difflib
import hashlib
import json
import re
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

import runs  # noqa: E402
import verify  # noqa: E402
from verify import TRACKS, Evidence, Track, row  # noqa: E402

HERE = Path(__file__).resolve().parent
SUMS = "SHA256SUMS"
NOTES = """\
## Idea

<!-- What was changed and why it should help: 3 to 6 sentences, tags, sources. -->

## What did not work

<!-- One line each, with numbers. -->
"""
SHORT = 80  # lines of a diff that README.md shows


def refuse(message: str) -> None:
    print(f"pack.py: {message}", file=sys.stderr)
    sys.exit(2)


# ---- What goes into a record ---------------------------------------------------------------------
def read_notes(folder: Path) -> str:
    file = folder / "notes.md"
    if not file.is_file():
        file.write_text(NOTES)
        refuse(f"answer the questions in {file}, then run this again")
    text = file.read_text()
    if "<!--" in text or not all(title in text for title in re.findall("^## .*$", NOTES, re.M)):
        refuse(f"{file} still has questions, or lacks one of its headings")
    return text.strip()


def copy_set(evidence: Evidence, to: Path, with_source: bool) -> None:
    """Logs, their source once instead of in each, plan and patch."""
    (to / "logs").mkdir(parents=True)
    for run in evidence.runs:
        content = run.path.read_bytes()
        source, sha256, text = runs.split(content)
        if source is not None:
            if with_source:
                (to / "train_gpt.py").write_bytes(source)
            content = f"source {sha256}\n".encode() + runs.BORDER + text.encode()
        (to / "logs" / run.name).write_bytes(content)
    if with_source and not (to / "train_gpt.py").is_file():
        shutil.copy(evidence.folder / "train_gpt.py", to)
    for name in ("change.patch", "unfinished"):
        if (path := evidence.folder / name).is_file():
            shutil.copy(path, to)
        elif path.is_dir():
            shutil.copytree(path, to / name)


def write_json(file: Path, value: dict[str, Any]) -> None:
    file.write_text(json.dumps(value, indent=1, default=str) + "\n")


def write_plan(evidence: Evidence, to: Path) -> None:
    created = evidence.plan["created"].strftime("%Y-%m-%dT%H:%M:%SZ")
    write_json(to / "plan.json", evidence.plan | dict(created=created, arm=evidence.arm))


def diff(parent: Path, child: Path) -> list[str]:
    old, new = (path.read_text().splitlines(keepends=True) for path in (parent, child))
    return list(difflib.unified_diff(old, new, "a/train_gpt.py", "b/train_gpt.py"))


def records_of(track: str) -> list[tuple[Path, dict[str, Any]]]:
    """The records of a track, best last, with their result.json."""
    found = []
    for file in sorted((HERE / track).glob("*/result.json")):
        result = json.loads(file.read_text())
        if result["kind"] == "record":
            found.append((file.parent, result))
    metric = "seconds" if TRACKS[track].metric == "time" else "tokens"
    return sorted(found, key=lambda entry: entry[1][metric], reverse=True)


def score(track: Track, result: dict[str, Any]) -> str:
    if track.metric == "time":
        return f"{result['seconds']:.2f} s"
    return f"{result['tokens']:,} tokens"


def machine_of(evidence: Evidence) -> str:
    run = evidence.runs[0]
    versions = {name: str(version).split()[0] for name, version in run.versions.items()}
    kept = ", ".join(f"{name} {versions[name]}" for name in ("jax", "python") if name in versions)
    return verify.plain(f"{len(run.devices)} x {run.devices[0]}, {kept}", 200)


# ---- Records -------------------------------------------------------------------------------------
def pack_record(args: argparse.Namespace, to: Path) -> None:
    """The folder of a record: one set of runs, and its baseline's if there is one."""
    import plot  # needs matplotlib, which a judge does not

    this = verify.collect(args.folder)
    base = verify.collect(args.baseline) if args.baseline else None
    args.track = args.track or verify.infer_track(this)
    track = TRACKS[args.track]
    holds, text = verify.report(this, base, args.track, track.target)
    if not holds or not this.plan:
        print(text)
        refuse("no record: see what fails, above")
    notes, known = read_notes(args.folder), records_of(args.track)
    copy_set(this, to, with_source=True)
    write_plan(this, to)
    if base:
        copy_set(base, to / "baseline", with_source=True)
        write_plan(base, to / "baseline")
    result = dict(kind="record", track=args.track, name=args.name, date=args.date,
                  parent=known[-1][0].name if known else None, machine=machine_of(this),
                  **verify.statistics(this, track.target))  # fmt: skip
    if base:
        result["baseline"] = verify.statistics(base, track.target)
    write_json(to / "result.json", result)
    arms = [(args.name, this)] + ([("baseline", base)] if base else [])
    units = ["tokens"] if track.metric == "tokens" else ["steps", "time"]
    plot.plot(arms, to / "curves", units, track.target, f"{args.track}: {args.name}",
              with_upstream=track.metric == "time")  # fmt: skip
    change = diff(known[-1][0] / "train_gpt.py", to / "train_gpt.py") if known else []
    if change:
        (to / "change.patch").write_text("".join(change))
    (to / "README.md").write_text(record_readme(track, result, notes, change, text))


def record_readme(
    track: Track, result: dict[str, Any], notes: str, change: list[str], report: str
) -> str:
    parent, where = result["parent"], f"records/{result['track']}/{result['date']}_{result['name']}"
    changed = sum(line[0] in "+-" and line[:3] not in ("+++", "---") for line in change)
    lines = [
        f"# {result['name']}: {score(track, result)}, mean loss {result['mean']:.5f}, "
        f"sd {result['sd']:.5f}, n = {result['n']}, p = {verify.p_value(result['p'])}",
        "",
        f"Track `{result['track']}`, {result['date']}, {result['machine']}. "
        + (f"Parent: `{parent}`." if parent else "The first of its track."),
        "", "![validation loss](curves.svg)", "", notes, "", "## Diff", "",
    ]  # fmt: skip
    if not change:
        lines += [
            "None: `train_gpt.py` is that of the parent." if parent else "There is no parent."
        ]
    else:
        lines += [f"Lines changed against the parent: {changed} ([change.patch](change.patch))."]
        if len(change) <= SHORT:
            lines += ["", "```diff", "".join(change).rstrip("\n"), "```"]
    lines += ["", "## Evidence", "", "What `records/verify.py` said when this was packed:", "",
              report.replace("## ", "### ", 1), "", "## Reproduce", "", "```bash",
              f"python records/verify.py {where}" + (f" {where}/baseline" * ("baseline" in result)),
              f"python records/run_ab.py {result['name']}={where} -n {result['n']} "
              f"-- {track.preset}", "```", ""]  # fmt: skip
    return "\n".join(lines)


# ---- Comparisons ---------------------------------------------------------------------------------
def pack_study(args: argparse.Namespace, to: Path) -> None:
    """The folder of a comparison: all arms of a plan, patches of the first one."""
    import plot

    holds, text = verify.study(args.folder)
    if not holds:
        print(text)
        refuse("no comparison: see what fails, below the table")
    plan = verify.read_plan(args.folder / "plan.json")
    arms = [(name, verify.collect(args.folder / name)) for name in plan["arms"]]
    notes = read_notes(args.folder)
    for i, (name, arm) in enumerate(arms):
        copy_set(arm, to / name, with_source=not i or not (arm.folder / "change.patch").is_file())
    shutil.copy(args.folder / "plan.json", to)
    _, first = arms[0]
    result = dict(kind="comparison", track=args.track, name=args.name, date=args.date,
                  machine=machine_of(first), n=plan["n"], arguments=plan["arguments"],
                  arms={name: verify.compared(arm, first) for name, arm in arms})  # fmt: skip
    write_json(to / "result.json", result)
    plot.plot(arms, to / "curves", ["tokens"], None, f"{args.track}: {args.name}", differences=True)
    where = f"records/{args.track}/{args.date}_{args.name}"
    patches = " ".join(f"{name}={where}/{name}/change.patch" for name in list(plan["arms"])[1:])
    flags = " ".join(plan["arguments"]).replace(" --target 0", "")
    lines = [
        f"# {args.name}: {len(arms)} versions of `{args.track}`, n = {plan['n']} each", "",
        f"{args.date}, {result['machine']}, `train_gpt.py {' '.join(plan['arguments'])}`. Every "
        f"seed was run by every arm. Differences are to `{arms[0][0]}`, of runs with equal seeds; "
        "p is that of a two-sided paired t-test.", "", text, "",
        "![validation loss, and differences at the end](curves.svg)", "", notes, "",
        "## Reproduce", "", "```bash", f"python records/verify.py {where}",
        f"python records/run_ab.py {arms[0][0]}={where}/{arms[0][0]} {patches} -n {plan['n']} "
        f"-- {flags}", "```", "",
    ]  # fmt: skip
    (to / "README.md").write_text("\n".join(lines))


# ---- Tables --------------------------------------------------------------------------------------
def history(track: str) -> str:
    """All records of a track, in the order in which they were made."""
    lines = [row("date", "record", TRACKS[track].metric, "final loss", "n", "p", "machine"),
             row("---", "---", "---", "---", "---", "---", "---")]  # fmt: skip
    for folder, result in sorted(records_of(track), key=lambda entry: entry[1]["date"]):
        link = f"[{result['name']}]({track}/{folder.name}/)"
        loss = f"{result['mean']:.4f} ± {result['sd']:.4f}"
        lines.append(row(result["date"], link, score(TRACKS[track], result), loss, result["n"],
                         verify.p_value(result["p"]), result["machine"]))  # fmt: skip
    return "\n".join(lines) if len(lines) > 2 else "No record yet."


def comparison(folder: Path) -> str:
    """The arms of a comparison, the most useful first."""
    result = json.loads((folder / "result.json").read_text())
    (first, base), *others = result["arms"].items()
    lines = [row("without", "final loss", "difference", "p"), row("---", "---", "---", "---"),
             row(f"({first})", f"{base['mean']:.4f} ± {base['sd']:.4f}", "", "")]  # fmt: skip
    for name, arm in sorted(others, key=lambda entry: -entry[1]["difference"]):
        lines.append(row(name.replace("_", " "), f"{arm['mean']:.4f} ± {arm['sd']:.4f}",
                         f"{arm['difference']:+.4f} ± {arm['difference_sd']:.4f}",
                         verify.p_value(arm["p"])))  # fmt: skip
    return "\n".join(lines)


def fill(text: str) -> str:
    """A README with what stands between <!-- NAME: begin --> and <!-- NAME: end --> made anew."""

    def made(match: re.Match) -> str:
        what, _, where = match[1].partition(" ")
        table = history(where) if what == "history" else comparison(HERE / where)
        return f"<!-- {match[1]}: begin -->\n{table}\n<!-- {match[1]}: end -->"

    form = r"<!-- ((?:history|comparison) \S+): begin -->\n.*?<!-- \1: end -->"
    return re.sub(form, made, text, flags=re.S)


def write_tables() -> None:
    for file in (HERE / "README.md", HERE.parent / "README.md"):
        if (new := fill(file.read_text())) != file.read_text():
            file.write_text(new)


# ---- Hashes --------------------------------------------------------------------------------------
def sums(folder: Path) -> Iterator[str]:
    """A line of sha256sum for each file of a record, as seen from records/."""
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        name = path.relative_to(folder.parents[1]).as_posix()
        yield f"{hashlib.sha256(path.read_bytes()).hexdigest()}  {name}\n"


def main(argv: list[str]) -> None:
    cli = argparse.ArgumentParser(description=__doc__, allow_abbrev=False,
                                  formatter_class=argparse.RawDescriptionHelpFormatter)  # fmt: skip
    cli.error = refuse
    cli.add_argument("folder", type=Path, nargs="?")
    cli.add_argument("--name")
    cli.add_argument("--baseline", type=Path)
    cli.add_argument("--track", choices=TRACKS)
    cli.add_argument("--tables", action="store_true")
    args = cli.parse_args(argv)
    if args.tables:
        return write_tables()
    if not args.folder or not re.fullmatch("[a-z0-9][a-z0-9_-]{0,40}", args.name or ""):
        refuse("give a folder and --name, of small letters, digits, _ and -")
    try:
        make(args)
    except verify.Unusable as error:
        refuse(str(error))


def make(args: argparse.Namespace) -> None:
    """Writes the record beside its place and moves it there when it is whole."""
    is_plan = (args.folder / "plan.json").is_file() and not (args.folder / "logs").is_dir()
    if is_plan and not args.track:
        refuse("a comparison needs --track")
    first = verify.collect(
        args.folder / next(iter(verify.read_plan(args.folder / "plan.json")["arms"]))
        if is_plan else args.folder
    )  # fmt: skip
    args.date = min(run.began for run in first.runs if run.began).strftime("%Y-%m-%d")
    args.track = args.track or verify.infer_track(first)
    to = HERE / args.track / f"{args.date}_{args.name}"
    if to.exists():
        refuse(f"{to} is there already, and records are not changed")
    to.parent.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(dir=to.parent, prefix=".") as part:
        place = Path(part, to.name)
        place.mkdir()
        (pack_study if is_plan else pack_record)(args, place)
        place.rename(to)
    with (HERE / SUMS).open("a") as file:
        file.writelines(sums(to))
    write_tables()
    print(f"packed {to}; README.md and records/README.md have it in their tables; commit all")


if __name__ == "__main__":
    main(sys.argv[1:])
