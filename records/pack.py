"""Packs attempts into folders that can be published: see records/README.md.

    ./run.sh pack ATTEMPT     packs a folder of logs/attempts/ into records/tracks/
    ./run.sh pack             adds what is missing to records/SHA256SUMS

Your notes are in notes.md in that folder. What is packed never changes: records/SHA256SUMS has the
hashes, and a test compares them.
"""

import argparse
import hashlib
import io
import json
import shutil
import sys
import tarfile
import tempfile
from collections.abc import Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))  # for PYTHONSAFEPATH=1
import idea
import runs
import verify
from messages import one_line, refuse
from verify import Evidence

HERE = Path(__file__).resolve().parent
STAGES = "pilot", "length", "certification"


def copy_logs(e: Evidence, to: Path) -> None:
    """Writes the logs of a set of runs, without their source, and its plan. The same logs make the
    same bytes."""
    to.mkdir(parents=True, exist_ok=True)
    with tarfile.open(to / "logs.tar.xz", "w:xz", preset=9) as tar:
        for run in e.runs:
            sha256, text = runs.split(run.path.read_bytes())
            content = f"source {sha256}\n".encode() + runs.BORDER + text.encode()
            member = tarfile.TarInfo(f"logs/{run.name}")  # with no time and no owner
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))
    (to / "plan.json").write_text(json.dumps(e.plan, indent=1) + "\n")


def make(attempt: Path, to: Path | None = None) -> Path:
    """Packs an attempt that has its verdict, however it ended, by default into records/tracks/. It
    is written to a temporary folder and moved when complete. Returns its folder."""
    import plot  # here, because the rest needs no matplotlib

    rule = json.loads((attempt / "rule.json").read_text("utf-8"))
    name = attempt.name
    stages = {}
    for stage in STAGES:
        if (attempt / stage / "plan.json").is_file():
            stages[stage] = verify.variants_of(attempt / stage)
    baseline = (attempt / "pilot/baseline/train_gpt.py").read_bytes()
    pilot = list(stages["pilot"].values())
    track = verify.infer_track(pilot[0]) if pilot else None
    target = verify.TRACKS[track].target if track else None
    result = dict(kind="attempt", track=track, name=name, date=rule["created"][:10])
    if not to:
        to = HERE / "tracks" / (track or "none") / f"{result['date']}_{name}"
        if to.exists():
            undo = f"rm -r {to}; git checkout records/SHA256SUMS"
            refuse(f"{to} is there already: undo it by  {undo}")
    to.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=to.parent, prefix=".") as part:
        place = Path(part, to.name)
        parts = [f"# {name}", (attempt / "verdict.txt").read_text("utf-8").replace("\n", "\n\n")]
        for unfinished in attempt.glob("*/*/unfinished"):
            shutil.copytree(unfinished, place / unfinished.relative_to(attempt))
        for stage, sets in stages.items():
            for variant, evidence in sets.items():
                copy_logs(evidence, place / stage / variant)
                source = (evidence.folder / "train_gpt.py").read_bytes()
                file, content = "change.patch", idea.difference(baseline, source)
                if source == baseline:
                    file, content = "train_gpt.py", source
                    if stage != "pilot":  # one copy is enough
                        path = f"../../pilot/baseline/{file}"
                        line = f"{hashlib.sha256(source).hexdigest()}  {path}\n"
                        file, content = runs.POINTER, line.encode()
                (place / stage / variant / file).write_bytes(content)
            curves = {variant: evidence.ended for variant, evidence in sets.items()}
            if any(curves.values()):
                shutil.copy(attempt / stage / "plan.json", place / stage)
                plot.plot(curves, place / stage / "curves.svg", target)
                report = verify.study(attempt / stage)[1]
                parts += [f"## {stage}", f"![losses]({stage}/curves.svg)", report]
        if (attempt / "notes.md").is_file():
            parts.insert(2, (attempt / "notes.md").read_text("utf-8"))
        parts += ["## The rule, as it was written before the first run", f"`{rule['command']}`"]
        parts.append("\n".join(f"- {line}" for line in rule["rule"]))
        place.mkdir(exist_ok=True)
        for file in ("rule.json", "ledger.jsonl", "verdict.txt", "notes.md"):
            if (attempt / file).is_file():
                shutil.copy(attempt / file, place)
        (place / "README.md").write_text("\n\n".join(parts) + "\n", "utf-8")
        (place / "result.json").write_text(json.dumps(result, indent=1) + "\n")
        shutil.rmtree(to, ignore_errors=True)
        place.rename(to)
    return to


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
    """Adds to SHA256SUMS what has been packed since."""
    listed = HERE / "SHA256SUMS"
    known = listed.read_text("utf-8") if listed.is_file() else ""
    for file in sorted(HERE.glob("tracks/*/*/result.json")):
        if f"  {file.relative_to(HERE).as_posix()}\n" not in known:
            known += "".join(sums(file.parent))
    listed.write_text(known, "utf-8")


def main(argv: list[str]) -> None:
    """Packs the attempt that the command line names, if any, and adds to the hashes."""
    form = argparse.RawDescriptionHelpFormatter
    cli = argparse.ArgumentParser(prog="./run.sh pack", description=__doc__, formatter_class=form)
    cli.error = refuse
    cli.add_argument("attempt", type=Path, nargs="?", help="folder of an attempt with a verdict")
    args = cli.parse_args(argv)
    if args.attempt:
        print(f"packed {make(args.attempt)}")
    renew()


if __name__ == "__main__":
    with one_line("pack.py"):
        main(sys.argv[1:])
