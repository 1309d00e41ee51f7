"""stats.py agrees with scipy's tests, and has no p-value where nothing varies."""

import itertools
import math
import random

import pytest
import stats
from scipy.stats import t, ttest_1samp, ttest_ind, ttest_rel


def test_tests_are_scipys():
    dice = random.Random(1)
    for n, m, shift, width in itertools.product((2, 8, 40), (2, 22), (-1, 3), (0.1, 2)):
        a = [dice.gauss(3.28, 0.0013) for _ in range(n)]
        b = [dice.gauss(3.28 + shift * 0.0013, width * 0.0013) for _ in range(m)]
        theirs = ttest_1samp(a, 3.2795, alternative="less")
        assert stats.below(a, 3.2795) == pytest.approx((theirs.statistic, theirs.df, theirs.pvalue))
        theirs = ttest_ind(a, b, equal_var=False, alternative="less")
        assert stats.welch(a, b) == pytest.approx((theirs.statistic, theirs.df, theirs.pvalue))
        theirs = ttest_rel(a[: min(n, m)], b[: min(n, m)])
        ours = stats.paired([x - y for x, y in zip(a, b, strict=False)])
        assert ours == pytest.approx((theirs.statistic, theirs.df, theirs.pvalue), abs=1e-9)
        assert stats.quantile(0.025 / m, n - 1) == pytest.approx(t.isf(0.025 / m, n - 1))


def test_values_that_do_not_vary_have_no_p_value():
    for losses in [3.2, 3.2, 3.2], [3.2], []:
        assert math.isnan(stats.below(losses, 3.28).p) and math.isnan(stats.paired(losses).p)
    assert math.isnan(stats.welch([1, 1], [2, 2]).p) and math.isnan(stats.welch([1.0], [2, 3]).p)
