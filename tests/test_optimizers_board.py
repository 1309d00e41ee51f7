"""The board of optimizers is what the packed runs show, and tuning takes as many runs for all."""

import ast
import itertools
import math
import random
from pathlib import Path

import pytest
import scipy.stats
from optimizers import board, tune

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
    assert board.filled(page) == page
    assert "(adamw.py) |" in page and "Spearman" in page
    assert page.count(" | 8 | ") >= 16


def test_every_contestant_has_a_grid_of_the_same_size_around_its_defaults():
    for name, grid in tune.GRIDS.items():
        source = ast.parse((OPTIMIZERS / f"{name}.py").read_text("utf-8"))
        function = next(node for node in source.body if getattr(node, "name", "") == "optimizer")
        names = [argument.arg for argument in function.args.args][2:]
        defaults = [ast.literal_eval(node) for node in function.args.defaults]
        assert list(grid) == names
        assert [len(values) for values in grid.values()] == [5, 2, 2]
        rate, *others = grid.values()
        assert math.isclose(rate[2], defaults[0])
        for values, default in zip(others, defaults[1:], strict=True):
            assert default not in values


def test_tuning_is_eleven_runs_and_finds_the_best_numbers_and_steps(tmp_path, monkeypatch):
    runs = []

    def run(name, steps, seed, numbers):
        """A loss with its lowest value at lr 0.04, decay 0.0125, momentum 0.95, that is a straight
        line over log steps."""
        runs.append(numbers)
        cost = abs(math.log(numbers.get("lr", 0.02) / 0.04))
        cost += numbers.get("decay", 0.05) + abs(numbers.get("momentum", 0.95) - 0.95)
        return 2.0 + cost - 0.3 * math.log(steps / 750)

    monkeypatch.setattr(tune, "run", run)
    search = tune.Search(tmp_path / "search.tsv", seed=1)
    numbers, loss = tune.best_numbers("muon", search)
    assert len(runs) == 9
    assert numbers == {"lr": 0.04, "decay": 0.0125}
    steps = tune.steps_to(1.8, "muon", numbers, loss, search)
    assert len(runs) == 11
    exact = 750 * math.exp((2.0 + 0.0125 - 1.8) / 0.3)
    assert exact <= steps <= exact + 10
    tune.best_numbers("muon", tune.Search(tmp_path / "search.tsv", seed=1))
    assert len(runs) == 11  # all are in the file


def test_the_page_shows_a_contestant_as_it_is():
    page = (OPTIMIZERS / "README.md").read_text("utf-8")
    shown = page.partition("```python\n")[2].partition("```")[0]
    assert "def optimizer(" in shown
    assert (OPTIMIZERS / "lion.py").read_text("utf-8").endswith(shown)
