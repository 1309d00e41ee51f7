"""The README's figures, commands, names and links are right, and so are the workflow and the image
that run it elsewhere."""

import os
import re
import shlex
import subprocess
from pathlib import Path
from statistics import fmean, stdev

import launch
import pytest
import stats
import verify
import yaml

import train_gpt

ROOT = Path(train_gpt.__file__).resolve().parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
TECHNIQUES = (ROOT / "records/techniques.md").read_text(encoding="utf-8")
PAGES = (
    "README.md records/techniques.md records/README.md records/LOG.md run/README.md records/medium.md "
    "records/changes/README.md "
    "run/hosts.md run/machines.md data/README.md evals/README.md basics/README.md "
    "records/other/basics/README.md records/upstream92/README.md records/ideas/README.md"
).split()
RECORD = "records/tracks/tiny-2k/2026-11-27_pointer"
ABLATIONS = [
    f"records/tracks/tiny-2k/2026-11-25_{name}" for name in ("ablations", "more_ablations")
]


NUMBERS = "zero one two three four five six seven eight nine ten".split()


def section(title: str, page: str = README) -> str:
    """The text of a page under a title."""
    return re.search(rf"^## {title}\n(.*?)(?=^## |\Z)", page, re.M | re.S)[1]


def test_the_figure_of_tiny_is_that_of_its_logs():
    losses = verify.collect(ROOT / RECORD).losses
    text = f"{fmean(losses):.4f} ± {stdev(losses):.4f} nats per byte"
    assert f"{text} after 71,808 tokens ([n = {len(losses)}]({RECORD}/))" in " ".join(
        README.split()
    )


def test_the_end_of_a_run_is_that_of_its_log():
    (path,) = re.findall(r"ends like this \(\[log\]\((\S+)\)\)", README)
    log = (ROOT / path).read_text()
    lines = re.findall(r"^step:\d+/187 val_loss:.*$", section("What you see"), re.M)
    assert len(lines) == 2 and [line for line in lines if f"\n{line}\n" not in log] == []


def test_the_sample_is_one_of_those_that_are_stored():
    block = re.search(r"tiny_samples.txt\)\):\n\n```python\n(.*?)```", README, re.S)[1]
    assert block in (ROOT / "tests/tiny_samples.txt").read_text(encoding="utf-8")


def test_every_worth_is_that_of_the_arm_whose_patch_it_links():
    changes = {}
    for comparison in ABLATIONS:
        first = verify.collect(ROOT / comparison / "baseline")
        for path in (ROOT / comparison).glob("*/change.patch"):
            arm = str(path.relative_to(ROOT).parent)
            changes[arm] = verify.changes(verify.collect(path.parent), first)
    link = r"\.\./(records/\S+)/change\.patch"
    found = re.findall(rf"\[(\S+)±(\S+)\]\({link}\), ([^\s;]+)", TECHNIQUES)
    assert TECHNIQUES.count("±") == len(found)
    assert sorted(found) == sorted(
        (f"{fmean(x):+.3f}", f"{stdev(x):.3f}", name, f"{stats.paired(x).p:.2g}")
        for name, x in changes.items()
    )


def test_every_command_names_a_file_that_is_there():
    blocks = "".join(re.findall(r"^```bash\n(.*?)^```", README, re.M | re.S))
    commands = [line.partition(" #")[0].strip() for line in blocks.splitlines()]
    commands += re.findall(r"`(\./run\.sh[^`\n]*)`", README)
    parts = [part for command in commands for part in command.split()]
    scripts = [part for part in parts if part.endswith(".py")]
    assert len(commands) > 10 and scripts
    for script in set(scripts) - {"my_idea.py"}:  # the reader makes this copy
        assert (ROOT / script).exists(), script


def test_every_flag_is_one():
    codes = re.findall("`(.+?)`", README)
    commands = [code for code in codes if code.startswith("--") and " " in code]
    commands += [c.removeprefix("./run.sh ") for c in codes if c.startswith("./run.sh tiny")]
    assert len(commands) > 5
    for command in commands:
        _, argv = launch.split_flags(shlex.split(command))
        train_gpt.parse_config(argv)


def test_the_map_of_the_file_has_its_sections_in_order_and_names_what_is_there():
    text = section("The file", TECHNIQUES)
    titles = re.findall(r"^# -{4} (.+?) -{4,}$", train_gpt.SOURCE, re.M)
    assert re.findall(r"^- \*\*(.+?)\*\*", text, re.M) == titles and len(titles) > 10
    entries = re.split(r"^- ", text, flags=re.M)[1:]
    sources = re.split(r"^# -{4} .+? -{4,}$", train_gpt.SOURCE, flags=re.M)[1:]
    for title, entry, source in zip(titles, entries, sources, strict=True):
        names = re.findall(r"`(\w+)`", entry)
        missing = [n for n in names if not re.search(rf"^((def|class) {n}\b|{n} =)", source, re.M)]
        assert names and not missing, (title, missing)


@pytest.mark.parametrize("page", PAGES)
def test_every_link_and_picture_is_there(page):
    targets = re.findall(r"\]\(([^)\s]+)\)", (ROOT / page).read_text(encoding="utf-8"))
    assert targets
    for target in targets:
        if target.startswith("https://"):
            continue
        path, _, title = target.partition("#")
        file = (ROOT / page).parent / path if path else ROOT / page
        assert file.exists(), target
        if title:
            heads = re.findall("^#+ (.*)$", file.read_text(encoding="utf-8"), re.M)
            slugs = {re.sub(r"[^\w -]", "", head.lower()).replace(" ", "-") for head in heads}
            assert title in slugs, target


def test_numbers_that_stand_on_two_pages_are_the_same():
    pages = {page: (ROOT / page).read_text(encoding="utf-8") for page in PAGES}
    pages["contributing"] = (ROOT / ".github/CONTRIBUTING.md").read_text(encoding="utf-8")
    pages = {page: " ".join(text.split()) for page, text in pages.items()}
    for pattern in (
        r"(\d+ to \d+) minutes\S* on two idle cores",  # of the suite
        r"has about ([\d,]+) lines",  # of train_gpt.py
        r"(\d+ techniques) with their sources",
    ):
        found = {page: re.findall(pattern, text) for page, text in pages.items()}
        values = {value.split("]")[0] for values in found.values() for value in values}
        assert len(values) == 1, (pattern, found)
    race = " ".join((ROOT / "records/other/nanogpt/README.md").read_text("utf-8").split())
    pattern = (
        r"reached \*\*(\S+)\*\* nats per byte after \*\*(\d+) CPU seconds\*\* of training; `tiny` "
        r"passes \S+ after \*\*(\d+)\*\*.*?it is (\d+) s against (\d+)"
    )
    loss, nanogpt, tiny, all_nanogpt, all_tiny = re.search(pattern, race).groups()
    sentences = (
        f"reached {loss} nats per byte after {nanogpt} CPU seconds of training; `tiny` passes that",
        f"after {tiny}. From the start of the process, with compilation, it is {all_tiny} s",
        f"against {all_nanogpt} ",
    )
    assert " ".join(sentences) in pages["README.md"]
    plan = pages["run/machines.md"].partition("### 8×H100: ./run.sh plan record --price 20")[2]
    pattern = r"about (\S+) to (\S+) at \S+ an hour \(estimate\): (.+?) of"
    low, high, minutes = re.search(pattern, plan).groups()
    cost = f"about {low} to {high}](run/machines.md#8h100) (estimate): {minutes} of"
    assert cost in pages["README.md"]
    (lines,) = re.findall(r"has about ([\d,]+) lines", pages["README.md"])
    assert abs(int(lines.replace(",", "")) - train_gpt.SOURCE.count("\n")) <= 50
    tags = re.findall(r"^`\[[\w-]+\]` \|", TECHNIQUES, re.M)
    assert f"lists all {len(tags)} techniques" in pages["README.md"]


def test_what_tiny_predicts_is_counted_in_the_table_of_techniques():
    """A technique of the record agrees with upstream if the loss rises without it."""
    rows = re.findall(r"^`\[([\w-]+)\]` \|(.*)", TECHNIQUES, re.M)
    other_way = ("costs", "adding all five", "no longer window")  # cells about something added
    agrees = []
    for tag, row in rows:
        worth = re.search(r"\[([+-][\d.]+)±", row)
        if worth and tag not in ("key-start", "pointer"):  # these are not the record's
            is_worth = not any(words in row for words in other_way)
            agrees.append((tag, is_worth and float(worth[1]) > 0))
    count = sum(rises for _, rises in agrees)
    text = " ".join(README.split())
    assert f"techniques, {len(agrees)} were [measured" in text
    assert f"For {count} of them the loss rises" in text
    assert f"For {NUMBERS[len(agrees) - count]} it does not" in text


def test_the_workflow_runs_what_ci_runs():
    jobs = yaml.safe_load((ROOT / ".github/workflows/ci.yml").read_text())["jobs"]
    job = jobs["checks"]
    assert [step["run"] for step in job["steps"] if "run" in step] == [".ci/run"]
    assert job["strategy"]["matrix"]["python"] == ["3.11", "3.12"] and job["timeout-minutes"] > 15
    assert job["env"]["PYTHON"] == "python${{ matrix.python }}"
    assert os.access(ROOT / ".ci/run", os.X_OK)
    build, *_ = (step["run"] for step in jobs["image"]["steps"] if "run" in step)
    assert build in (ROOT / "run/Dockerfile").read_text()


def test_the_image_copies_and_starts_what_is_there():
    text = (ROOT / "run/Dockerfile").read_text()
    copied = [path for line in re.findall("^COPY (.*) \\S+$", text, re.M) for path in line.split()]
    (entry,) = re.findall('^ENTRYPOINT \\["(.*)"\\]$', text, re.M)
    assert "." in copied and [path for path in (*copied, entry) if not (ROOT / path).exists()] == []
    # These patterns would leave out the scripts of data/, or its table of prefixes.
    ignored = (ROOT / "run/Dockerfile.dockerignore").read_text().splitlines()
    assert not {"data/*", "data/*/", "*.bin", "**/*.bin"} & {*ignored}


@pytest.mark.slow
def test_the_commands_of_the_readme_run_in_a_clone(tmp_path):
    """As a newcomer types them, but with a smaller model and .venv from here."""
    clone = tmp_path / "clone"
    subprocess.run(["git", "clone", "-q", ROOT, clone], check=True)
    (clone / ".venv").symlink_to(ROOT / ".venv")
    (clone / "my_text").mkdir()
    (clone / "my_text/pages.txt").write_text(README * 60)
    blocks = "".join(re.findall(r"^```bash\n(.*?)^```", README, re.M | re.S))
    commands = [line.partition(" #")[0].strip() for line in blocks.splitlines()]
    assert commands[0].startswith("git clone ") and len(commands) >= 6
    small = "--D 32 --H 2 --F 64 --bigrams 512 --steps 4 --val_every 4 --val_tokens 8192"
    for command in [*commands[1:], "./run.sh watch", "./run.sh plan", "./run.sh --help"]:
        words = command.split()
        trains = words[1:2] in ([], ["tiny"], ["my_idea.py"])
        line = f"{command} {small}" if trains else command
        done = subprocess.run(line, shell=True, cwd=clone, capture_output=True, text=True)
        assert done.returncode == 0, (line, done.stderr)
        if trains:
            assert "RESULT {" in done.stdout
            sample = done.stdout.splitlines()[-1].removeprefix("next: ")
            done = subprocess.run(f"{sample} --tokens 3", shell=True, cwd=clone)
            assert done.returncode == 0, sample
        if "tokenize" in words:  # its last line is the next one of the page
            flags = done.stdout.splitlines()[-1].removeprefix("./run.sh ")
            assert flags == "tiny --data data/mine --target 0"
