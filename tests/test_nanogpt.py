"""records/other/nanogpt/race.py: its page, and when a curve passes a loss."""

import json

import pytest

from records.other.nanogpt import race

LOG = [
    dict(who="head", date="2026-01-01", cores=1, torch="2", jax="0.10", processor="x",
         nanogpt="a" * 40, load=0.5),  # fmt: skip
    dict(who="nanogpt", step=2000, train_cpu=120.0, wall=130.0, val_loss=1.7,
         val_loss_with_context=1.6),  # fmt: skip
    dict(who="tiny", step=0, train_cpu=0.0, wall=20.0, val_loss=5.5),
    dict(who="tiny", step=10, train_cpu=10.0, wall=31.0, val_loss=1.8),
    dict(who="tiny", step=20, train_cpu=20.0, wall=42.0, val_loss=1.4),
]  # fmt: skip


def test_the_page_has_the_seconds_at_which_tiny_passes_nanogpts_last_loss():
    assert race.crossing(LOG[2:], 1.7, "train_cpu") == pytest.approx(12.5)


def test_a_trial_does_not_replace_the_log_of_the_race(tmp_path, monkeypatch):
    log = tmp_path / "race.txt"
    log.write_text("evidence")
    monkeypatch.setattr(race, "LOG", log)
    monkeypatch.setattr(race.tempfile, "tempdir", str(tmp_path))
    trial = race.write_log("trial", is_trial=True)
    assert (log.read_text(), trial.read_text()) == ("evidence", "trial")
    assert race.write_log("whole", is_trial=False) == log and log.read_text() == "whole"


def test_the_page_is_that_of_the_log():
    readme = (race.HERE / "README.md").read_text(encoding="utf-8")
    entries = [json.loads(line) for line in race.LOG.read_text(encoding="utf-8").splitlines()]
    assert f"race: begin -->\n{race.page(entries)}<!-- race: end" in readme
