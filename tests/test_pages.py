"""README's promises have a test each, and what pages name or count is there."""

import json
import re
from pathlib import Path
from statistics import fmean, stdev

import pytest
import verify

import train_gpt

ROOT = Path(train_gpt.__file__).resolve().parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
RECORD = "records/tracks/tiny-2k/2026-11-27_pointer"
PAGES = [
    path.relative_to(ROOT).as_posix()
    for path in [*ROOT.glob("*.md"), *ROOT.glob("[!.]*/**/*.md"), *ROOT.glob(".github/*.md")]
    if not path.is_relative_to(ROOT / "records/tracks")
]

# Words of README.md, and the test that shows what they say.
PROMISES = {
    "installs into .venv": "run_sh::test_the_first_start_installs_and_the_second_only_runs",
    "`./run.sh look` writes this page of your run": "look::test_the_text_is_escaped_and_complete",
    "fitted to the [memory]": "launch::test_the_run_and_its_command",
    "[one run on all of them]": "hosts::test_two_hosts_train_as_one_with_the_seed_of_the_first",
    "the line that trains on it": "tokenize::test_every_printed_command_can_run",
    "`./run.sh optimizers muon`": "optimizers::test_a_contestant_is_trained",
    "`./run.sh plan` says": "machine::test_the_plan_has_three_lines",
    "eight runs end at 1.3698 ± 0.0046": "pages::test_the_figure_of_tiny_is_that_of_its_logs",
    "`export` take a run's weights": "export::test_files_have_every_parameter_and_setting",
    "Ctrl-C, SIGTERM": "resume::test_ctrl_c_saves_the_run_when_the_screen_is_gone",
    "bit by bit": "resume::test_a_run_that_goes_on_is_the_run_in_one_go",
    "the newest intact one": "resume::test_damaged_checkpoints_are_passed_over",
    "A run that diverges": "resume::test_a_run_is_void_where_a_number_is_not_finite",
    "or stalls ends": "resume::test_a_run_that_hangs",
    "A full disk costs it": "resume::test_a_checkpoint_that_finds_no_room_does_not_end_the_run",
    "its record 89, which `record` reproduces": "golden::test_every_gradient",
    "NorMuon updates the matrices": "golden::test_eight_steps_of_the_optimizers",
    "gathers the weights": "devices::test_each_weight_is_sent_once_and_none_is_all_reduced",
    "# pairs of runs with the same seeds": "attempt::test_a_gain_is_shown_in_fewer_steps",
    "`verify` judges runs": "records::test_a_record_holds",
    "the law of this house": "house::test_a_room_is_no_longer_than_the_law_allows",
}


def prose(text: str) -> str:
    """A page with every white space as one space."""
    return " ".join(text.split())


@pytest.mark.parametrize("sentence", PROMISES)
def test_a_promise_has_a_test(sentence):
    file, name = PROMISES[sentence].split("::")
    assert sentence in prose(README)
    assert re.search(rf"^def {name}", (ROOT / f"tests/test_{file}.py").read_text(), re.M)


def test_the_figure_of_tiny_is_that_of_its_logs():
    losses = verify.collect(ROOT / RECORD).losses
    assert f"{len(losses)}" == "8"
    assert f"end at {fmean(losses):.4f} ± {stdev(losses):.4f} nats per byte" in prose(README)
    p = json.loads((ROOT / RECORD / "result.json").read_text())["p"]
    assert f"p = {p:.0e}".replace("e-0", "e-") in prose(README)


def test_what_readme_quotes_is_in_the_files_that_it_names():
    """The end of a run, a sample, and the race with nanoGPT."""
    (path,) = re.findall(r"ends like this \(\[log\]\((\S+)\)\)", README)
    lines = re.findall(r"^step:\d+/187 val_loss:.*$", README, re.M)
    assert len(lines) == 2
    assert all(f"\n{line}\n" in (ROOT / path).read_text() for line in lines)
    path, block = re.search(r"\[more\]\((\S+)\)\):\n\n```python\n(.*?)```", README, re.S).groups()
    assert block in (ROOT / path).read_text(encoding="utf-8")
    quoted = re.search(r"`tiny` takes (\d+) s, nanoGPT (\d+) and nanodo (\d+)", prose(README))
    page = (ROOT / "records/other/peers/README.md").read_text(encoding="utf-8").replace("*", "")
    for name, seconds in zip(
        ("`tiny, issue 73`", "nanoGPT", "nanodo"), quoted.groups(), strict=True
    ):
        assert re.search(rf"\| {name} \| \w+ \| \d+ \| {seconds}, ", page)
    ours, theirs = re.search(r"alone, (\d+) CPU seconds against (\d+)", prose(README)).groups()
    race = prose((ROOT / "records/other/nanogpt/README.md").read_text(encoding="utf-8"))
    race = race.replace("*", "")
    assert f"after {theirs} CPU seconds" in race and re.search(rf"passes \S+ after {ours} ", race)


def test_every_link_and_picture_is_there():
    for page in PAGES:
        for target in re.findall(r"\]\(([^)\s]+)\)", (ROOT / page).read_text(encoding="utf-8")):
            if target.startswith(("https://", "../blob")):
                continue
            path, _, title = target.partition("#")
            file = (ROOT / page).parent / path if path else ROOT / page
            assert file.exists(), (page, target)
            if title:
                heads = re.findall("^#+ (.*)$", file.read_text(encoding="utf-8"), re.M)
                slugs = {re.sub(r"[^\w -]", "", head.lower()).replace(" ", "-") for head in heads}
                assert title in slugs, (page, target)
