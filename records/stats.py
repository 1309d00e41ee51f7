"""Student's t and the tests that rest on it, for verify.py, which needs no packages.

Samples and targets are in one unit (nats, seconds, tokens); p is a probability.
"""

import math
from collections.abc import Sequence
from statistics import fmean, stdev
from typing import NamedTuple


class Result(NamedTuple):
    """The result of a t-test; all three are NaN where it is undefined."""

    t: float
    df: float  # degrees of freedom
    p: float


UNDEFINED = Result(math.nan, math.nan, math.nan)  # fewer than two values, or all of them equal


def tail(t: float, df: float) -> float:
    """Returns P(T > t) of Student's t with df degrees of freedom.

    T > t where a normal variable exceeds t u; u is the sample's standard deviation divided by the
    true one. So P(T > t) is the integral of u's density times that normal tail. It is summed
    over log u in equal steps: both ends fall off so fast that only rounding errors remain."""
    width = 1 / math.sqrt(2 * df)  # about the standard deviation of log u
    constant = math.log(2) + df / 2 * math.log(df / 2) - math.lgamma(df / 2)
    # Where t is large, the integrand has its peak at a small u, about 1 / sqrt(1 + t^2 / df).
    start = -math.log1p(t * t / df) / 2 - 9 * width - 40 / df
    step = min(width, 1) / 4
    total = 0.0
    for i in range(math.ceil((9 * width - start) / step)):
        log_u = start + i * step
        u = math.exp(log_u)
        density = math.exp(constant + df * (log_u - u * u / 2))
        total += density * math.erfc(t * u / math.sqrt(2)) / 2
    return total * step


def below(values: Sequence[float], target: float) -> Result:
    """Tests whether the mean is below the target: one sample, one-sided."""
    n = len(values)
    sd = stdev(values) if n > 1 else 0.0
    if sd == 0:
        return UNDEFINED
    t = (fmean(values) - target) / (sd / math.sqrt(n))
    return Result(t, n - 1, tail(-t, n - 1))


def welch(a: Sequence[float], b: Sequence[float]) -> Result:
    """Tests whether the mean of a is below that of b: one-sided, variances may differ (Welch)."""
    if min(len(a), len(b)) < 2 or max(stdev(a), stdev(b)) == 0:
        return UNDEFINED
    var_a = stdev(a) ** 2 / len(a)  # of the mean
    var_b = stdev(b) ** 2 / len(b)
    t = (fmean(a) - fmean(b)) / math.sqrt(var_a + var_b)
    df = (var_a + var_b) ** 2 / (var_a**2 / (len(a) - 1) + var_b**2 / (len(b) - 1))
    return Result(t, df, tail(-t, df))


def paired(differences: Sequence[float]) -> Result:
    """Tests whether the mean difference of pairs is not zero: two-sided."""
    test = below(differences, 0.0)
    if math.isnan(test.p):
        return test
    return test._replace(p=2 * tail(abs(test.t), test.df))


def quantile(p: float, df: float) -> float:
    """The t that Student's t exceeds with this probability, at most one half; by bisection."""
    low, high = 0.0, 1e6
    while high - low > 1e-6 * high:
        middle = (low + high) / 2
        low, high = (middle, high) if tail(middle, df) > p else (low, middle)
    return high


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
