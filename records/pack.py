"""Make a record of runs that hold: see records/README.md. Nothing else writes records.

    python records/pack.py ARM --name NAME [--baseline ARM] [--track TRACK]
    python records/pack.py DIR --name NAME     all arms of a plan, as a comparison
    python records/pack.py --tables            tables in READMEs, missing lines of SHA256SUMS

ARM is a folder of run_ab.py, DIR that of its plan. What you have to say is in notes.md beside the
logs; without one, pack.py writes the questions there. A record is not changed any more:
records/SHA256SUMS holds its hashes, a test compares them.
"""

import argparse
import difflib
import hashlib
import json
import re
import shlex
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NoReturn

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


def refuse(message: str) -> NoReturn:
    print(f"pack.py: {verify.printable(message)}", file=sys.stderr)
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
        if not evidence.source:
            refuse(f"{evidence.folder} has no train_gpt.py, nor have its logs")
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
    """The records of a track in their order, with result.json; the last is the one to beat."""
    found = []
    for file in (HERE / track).glob("*/result.json"):
        result = json.loads(file.read_text())
        if result.get("kind") == "record":
            found.append((file.parent, result))
    return sorted(found, key=lambda entry: entry[1]["number"])


def score(track: Track, result: dict[str, Any]) -> str:
    if track.metric == "time":
        return f"{result['seconds']:.2f} s"
    return f"{result['tokens']:,} tokens"


def machine_of(evidence: Evidence) -> str:
    run = evidence.runs[0]
    versions = {name: str(version).partition(" ")[0] for name, version in run.versions.items()}
    kept = ", ".join(f"{name} {versions[name]}" for name in ("jax", "python") if name in versions)
    return verify.plain(f"{len(run.devices)} x {run.devices[0]}, {kept}", 200)


# ---- Records -------------------------------------------------------------------------------------
def check_news(
    this: Evidence, base: Evidence | None, track: Track, known: list[tuple[Path, dict[str, Any]]]
) -> None:
    """Whether these are runs of their own, and beat the record that is there; else exits 2."""
    logs = [path for folder, _ in known for path in (folder / "logs").glob("*.txt")]
    if {run.sha256 for run in this.runs} & {runs.read(path).sha256 for path in logs}:
        refuse("no record: some of these runs are in a record already")
    if not known:
        return
    folder, best = known[-1]
    if track.metric == "tokens" and this.ended[0].tokens >= best["tokens"]:
        refuse(f"no record: {folder.name} takes {best['tokens']:,} tokens")
    if track.metric == "time" and not (
        base and base.runs[0].source == best["source"] and verify.interleaved(this, base)
    ):
        refuse(f"no record: it takes --baseline, {folder.name} in the same plan of run_ab.py")


def pack_record(args: argparse.Namespace, this: Evidence, to: Path) -> None:
    """The folder of a record: one set of runs, and its baseline's if there is one."""
    base = verify.collect(args.baseline) if args.baseline else None
    track = TRACKS[args.track]
    holds, text = verify.report(this, base, args.track, track.target)
    if not holds or not this.plan:
        print(text)
        refuse("no record: see what fails, above")
    known = records_of(args.track)
    check_news(this, base, track, known)
    notes = read_notes(args.folder)
    copy_set(this, to, with_source=True)
    write_plan(this, to)
    if base:
        copy_set(base, to / "baseline", with_source=True)
        write_plan(base, to / "baseline")
    result = dict(kind="record", track=args.track, name=args.name, date=args.date,
                  number=len(known) + 1, parent=known[-1][0].name if known else None,
                  machine=machine_of(this), **verify.numbers(this, track.target))  # fmt: skip
    if base:
        result["baseline"] = verify.numbers(base, track.target)
    write_json(to / "result.json", result)
    arms = [(args.name, this)] + ([("baseline", base)] if base else [])
    units = ["tokens"] if track.metric == "tokens" else ["steps", "time"]
    draw(arms, to, units, f"{args.track}: {args.name}", track.target,
         with_upstream=track.metric == "time")  # fmt: skip
    change = diff(known[-1][0] / "train_gpt.py", to / "train_gpt.py") if known else []
    if change:
        (to / "change.patch").write_text("".join(change))
    (to / "README.md").write_text(record_readme(track, result, notes, change, text))


def draw(arms: list, to: Path, units: list[str], title: str, target: float | None, **words) -> None:
    import plot  # needs matplotlib, which --tables does not

    plot.plot(arms, to / "curves", units, target, title, **words)


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
    old = [f"{where}/baseline"] if "baseline" in result else []
    arms = [f"baseline={folder}" for folder in old] + [f"{result['name']}={where}"]
    lines += ["", "## Evidence", "", "What `records/verify.py` said when this was packed:", "",
              report.replace("## ", "### ", 1), "", "## Reproduce", "", "```bash",
              shlex.join(["python", "records/verify.py", where, *old]),
              shlex.join(["python", "records/run_ab.py", *arms, "-n", str(result["n"]), "--",
                          track.preset]), "```", ""]  # fmt: skip
    return "\n".join(lines)


# ---- Comparisons ---------------------------------------------------------------------------------
def pack_study(args: argparse.Namespace, first: Evidence, to: Path) -> None:
    """The folder of a comparison: all arms of a plan, patches of the first one."""
    holds, text = verify.study(args.folder)
    if not holds:
        print(text)
        refuse("no comparison: see what fails, below the table")
    plan = verify.read_plan(args.folder / "plan.json")
    arms = {name: verify.collect(args.folder / name) for name in plan["arms"]}
    notes, words = read_notes(args.folder), plan["arguments"]
    for name, arm in arms.items():
        is_patch = name != first.arm and (arm.folder / "change.patch").is_file()
        copy_set(arm, to / name, with_source=not is_patch)
    shutil.copy(args.folder / "plan.json", to)
    result = dict(kind="comparison", track=args.track, name=args.name, date=args.date,
                  machine=machine_of(first), n=plan["n"], arguments=words,
                  arms={name: verify.compared(arm, arms[first.arm])
                        for name, arm in arms.items()})  # fmt: skip
    write_json(to / "result.json", result)
    draw(list(arms.items()), to, ["tokens"], f"{args.track}: {args.name}", None, differences=True)
    where = f"records/{args.track}/{args.date}_{args.name}"
    sources = [f"{name}={where}/{name}" + "/change.patch" * (to / name / "change.patch").is_file()
               for name in arms]  # fmt: skip
    again = ["python", "records/run_ab.py", *sources, "-n", str(plan["n"]), "--", *words[:-2]]
    lines = [
        f"# {args.name}: {len(arms)} versions of `{args.track}`, n = {plan['n']} each", "",
        f"{args.date}, {result['machine']}, `train_gpt.py {shlex.join(words)}`. Every seed was run "
        f"by every arm. Differences are to `{first.arm}`, of runs with equal seeds; p is that of a "
        "two-sided paired t-test.", "", text, "",
        "![validation loss, and differences at the end](curves.svg)", "", notes, "",
        "## Reproduce", "", "```bash", f"python records/verify.py {where}", shlex.join(again),
        "```", "",
    ]  # fmt: skip
    (to / "README.md").write_text("\n".join(lines))


# ---- Tables --------------------------------------------------------------------------------------
def history(track: str) -> str:
    """All records of a track, in the order in which they were made."""
    lines = [row("date", "record", TRACKS[track].metric, "final loss", "n", "p", "machine"),
             row("---", "---", "---", "---", "---", "---", "---")]  # fmt: skip
    for folder, result in records_of(track):
        link = f"[{result['name']}]({track}/{folder.name}/)"
        loss = f"{result['mean']:.4f} ± {result['sd']:.4f}"
        lines.append(row(result["date"], link, score(TRACKS[track], result), loss, result["n"],
                         verify.p_value(result["p"]), result["machine"]))  # fmt: skip
    return "\n".join(lines) if len(lines) > 2 else "No record yet."


def comparison(folder: Path) -> str:
    """The arms of a comparison, the most useful first; every seed is shown, by its difference."""
    result = json.loads((folder / "result.json").read_text())
    (first, base), *others = result["arms"].items()
    lines = [row("arm", "final loss", "difference", "of each seed", "p"), row(*5 * ["---"]),
             row(f"({first})", f"{base['mean']:.4f} ± {base['sd']:.4f}", "", "", "")]  # fmt: skip
    baseline = verify.collect(folder / first)
    for name, arm in sorted(others, key=lambda entry: -entry[1]["difference"]):
        pairs = zip(*verify.by_seed(verify.collect(folder / name), baseline), strict=True)
        lines.append(row(name.replace("_", " "), f"{arm['mean']:.4f} ± {arm['sd']:.4f}",
                         f"{arm['difference']:+.4f} ± {arm['difference_sd']:.4f}",
                         " ".join(f"{a - b:+.3f}" for a, b in pairs),
                         verify.p_value(arm["p"])))  # fmt: skip
    return "\n".join(lines)


def fill(text: str) -> str:
    """A README with what stands between <!-- NAME: begin --> and <!-- NAME: end --> made anew."""

    def made(match: re.Match) -> str:
        kind, _, where = match[1].partition(" ")
        if not (where in TRACKS if kind == "history" else (HERE / where / "result.json").is_file()):
            refuse(f"a README has a table of {match[1]}, and there is no such thing")
        table = history(where) if kind == "history" else comparison(HERE / where)
        return f"<!-- {match[1]}: begin -->\n{table}\n<!-- {match[1]}: end -->"

    form = r"<!-- ((?:history|comparison) \S+): begin -->\n.*?<!-- \1: end -->"
    return re.sub(form, made, text, flags=re.S)


# ---- Hashes --------------------------------------------------------------------------------------
def sums(folder: Path) -> Iterator[str]:
    """A line of sha256sum for each file of a record, as seen from records/."""
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        name = path.relative_to(folder.parents[1]).as_posix()
        yield f"{hashlib.sha256(path.read_bytes()).hexdigest()}  {name}\n"


def renew() -> None:
    """What follows from the records: lines of SHA256SUMS that are missing, tables in READMEs."""
    known = (HERE / SUMS).read_text() if (HERE / SUMS).is_file() else ""
    with (HERE / SUMS).open("a") as file:
        for result in sorted(HERE.glob("*/*/result.json")):
            name = result.parent.relative_to(HERE).as_posix()
            if f"  {name}/result.json\n" not in known:
                file.writelines(sums(result.parent))
    for file in (HERE / "README.md", HERE.parent / "README.md"):
        if (new := fill(file.read_text())) != file.read_text():
            file.write_text(new)


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
        return renew()
    if not args.folder or not re.fullmatch("[a-z0-9][a-z0-9_-]{0,40}", args.name or ""):
        refuse("give a folder and --name, of small letters, digits, _ and -")
    try:
        make(args)
    except verify.Unusable as error:
        refuse(str(error))


def make(args: argparse.Namespace) -> None:
    """Writes the record beside its place and moves it there when it is whole."""
    is_plan = (args.folder / "plan.json").is_file() and not (args.folder / "logs").is_dir()
    arm = next(iter(verify.read_plan(args.folder / "plan.json")["arms"])) if is_plan else ""
    first = verify.collect(args.folder / arm)
    track = verify.infer_track(first)
    args.track = args.track or track
    if args.track != track and (is_plan or not args.track):
        refuse(f"these runs are not of track {args.track}" if args.track else "add --track")
    began = [run.began for run in first.runs if run.began]
    if not began:
        refuse("the names of the logs do not say when their runs began")
    args.date = min(began).strftime("%Y-%m-%d")
    to = HERE / args.track / f"{args.date}_{args.name}"
    if to.exists():
        refuse(f"{to} is there already, and records are not changed")
    to.parent.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(dir=to.parent, prefix=".") as part:
        place = Path(part, to.name)
        place.mkdir()
        (pack_study if is_plan else pack_record)(args, first, place)
        place.rename(to)
    renew()
    print(f"packed {to}; README.md and records/README.md have it in their tables; commit all")


if __name__ == "__main__":
    main(sys.argv[1:])
