"""Tests by Student's t, for verify.py and attempt.py.

Samples and targets are in one unit (nats, seconds, tokens); p is a probability.
"""

import math
from collections.abc import Sequence
from statistics import fmean, stdev
from typing import NamedTuple

import scipy  # which jax brings; it loads scipy.special, half a second, when that is used


class Result(NamedTuple):
    """The result of a t-test; all three are NaN where it is undefined."""

    t: float
    df: float  # degrees of freedom
    p: float


UNDEFINED = Result(math.nan, math.nan, math.nan)  # fewer than two values, or all of them equal


def below(values: Sequence[float], target: float) -> Result:
    """Tests whether the mean is below the target: one sample, one-sided."""
    n = len(values)
    sd = stdev(values) if n > 1 else 0.0
    if sd == 0:
        return UNDEFINED
    t = (fmean(values) - target) / (sd / math.sqrt(n))
    return Result(t, n - 1, float(scipy.special.stdtr(n - 1, t)))


def welch(a: Sequence[float], b: Sequence[float]) -> Result:
    """Tests whether the mean of a is below that of b: one-sided, variances may differ (Welch)."""
    if min(len(a), len(b)) < 2 or max(stdev(a), stdev(b)) == 0:
        return UNDEFINED
    var_a = stdev(a) ** 2 / len(a)  # of the mean
    var_b = stdev(b) ** 2 / len(b)
    t = (fmean(a) - fmean(b)) / math.sqrt(var_a + var_b)
    df = (var_a + var_b) ** 2 / (var_a**2 / (len(a) - 1) + var_b**2 / (len(b) - 1))
    return Result(t, df, float(scipy.special.stdtr(df, t)))


def paired(differences: Sequence[float]) -> Result:
    """Tests whether the mean difference of pairs is not zero: two-sided."""
    test = below(differences, 0.0)
    if math.isnan(test.p):
        return test
    return test._replace(p=2 * float(scipy.special.stdtr(test.df, -abs(test.t))))


def quantile(p: float, df: float) -> float:
    """The t that Student's t exceeds with this probability."""
    return -float(scipy.special.stdtrit(df, p))


def shown(sd: float, n: int, p: float = 0.01, power: float = 0.8) -> float:
    """The mean difference that n pairs of this standard deviation show at p, one-sided, with a
    chance of `power` (about: both quantiles are those of Student's t)."""
    return (quantile(p, n - 1) + quantile(1 - power, n - 1)) * sd / math.sqrt(n)


def pairs_needed(mean: float, sd: float, most: int = 10_000) -> int:
    """The fewest pairs that show such a mean difference; `most` where it takes more."""
    low, high = 1, most
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if shown(sd, middle) <= mean else (middle, high)
    return high
