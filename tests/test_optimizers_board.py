"""The board of optimizers is what the packed runs show, and tuning takes as many runs for all."""

import itertools
import math
import random
from pathlib import Path

import pytest
import scipy.stats
from optimizers import board, contest, tune

ROOT = Path(__file__).resolve().parents[1]
OPTIMIZERS = ROOT / "records/optimizers"


def test_rank_correlation_is_that_of_scipy():
    rng = random.Random(0)
    for n in (4, 6):
        a = [rng.randrange(6) for _ in range(n)]  # with equal values
        b = [rng.random() for _ in range(n)]
        rho, p = board.spearman(a, b)
        assert rho == pytest.approx(scipy.stats.spearmanr(a, b).statistic)
        as_large = [
            scipy.stats.spearmanr(a, other).statistic >= rho - 1e-9
            for other in itertools.permutations(b)
        ]
        assert p == pytest.approx(sum(as_large) / len(as_large), abs=0.01)


def test_the_page_has_the_board_of_the_packed_runs():
    page = (OPTIMIZERS / "README.md").read_text("utf-8")
    rows = board.read_rows()
    assert board.board(rows) in page and board.correlation(rows) in page
    assert len(rows) >= 16 and all(len(row.losses) == 8 for row in rows)


def test_every_contestant_has_a_grid_of_the_same_size_around_its_defaults():
    for name in tune.OTHERS:
        rates, *others = tune.grid(name).values()
        rate, *defaults = contest.defaults(name).values()
        assert list(tune.grid(name)) == list(contest.defaults(name))
        assert math.isclose(rates[2], rate)
        for values, default in zip(others, defaults, strict=True):
            assert len(values) == 2 and default not in values


def test_tuning_is_eleven_runs_and_finds_the_best_numbers_and_steps(tmp_path, monkeypatch):
    runs = []

    def run(name, steps, numbers):
        """A loss with its lowest value at lr 0.04, decay 0.0125, momentum 0.95, that is a straight
        line over log steps."""
        runs.append(numbers)
        cost = abs(math.log(numbers.get("lr", 0.02) / 0.04))
        cost += numbers.get("decay", 0.05) + abs(numbers.get("momentum", 0.95) - 0.95)
        return 2.0 + cost - 0.3 * math.log(steps / 750)

    monkeypatch.setattr(tune, "run", run)
    out = tmp_path / "search.tsv"
    numbers, loss = tune.best_numbers("muon", out)
    assert len(runs) == 9
    assert numbers == {"lr": 0.04, "decay": 0.0125}
    steps = tune.steps_to(1.8, "muon", numbers, loss, out)
    assert len(runs) == 11
    exact = 750 * math.exp((2.0 + 0.0125 - 1.8) / 0.3)
    assert exact <= steps <= exact + 10
    tune.best_numbers("muon", out)
    assert len(runs) == 11  # all are in the file


def test_the_page_shows_a_contestant_as_it_is():
    page = (OPTIMIZERS / "README.md").read_text("utf-8")
    shown = page.partition("```python\n")[2].partition("```")[0]
    assert "def optimizer(" in shown
    assert (OPTIMIZERS / "lion.py").read_text("utf-8").endswith(shown)
