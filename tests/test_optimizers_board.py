"""The page of the optimizers has the board of the packed runs, and a contestant as it is."""

from pathlib import Path

import scipy.stats
from optimizers import board

ROOT = Path(__file__).resolve().parents[1]
OPTIMIZERS = ROOT / "records/optimizers"
PAGE = (OPTIMIZERS / "README.md").read_text("utf-8")


def test_the_page_has_the_board_of_the_packed_runs():
    rows = board.read_rows()
    assert board.board(rows) in PAGE
    assert len(rows) == 20 and all(len(row.losses) == 8 for row in rows)
    both = [row for row in rows if row.name in board.UPSTREAM]
    ours = [board.comparable_steps(row) for row in both]
    theirs = [board.UPSTREAM[row.name] for row in both]
    rho, p = scipy.stats.spearmanr(ours, theirs, alternative="greater")
    assert f"ρ = {rho:.2f} over {len(both)} optimizers (one-sided p = {p:.2f})" in PAGE


def test_the_page_shows_a_contestant_as_it_is():
    shown = PAGE.partition("```python\n")[2].partition("```")[0]
    assert "def optimizer(" in shown
    assert (OPTIMIZERS / "lion.py").read_text("utf-8").endswith(shown)
