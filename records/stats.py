"""Student's t, the tests that rest on it, and their power: for verify.py, which needs no packages.

Statistics of samples are in their own units (nats, seconds, tokens); p is a probability.
"""

import math
from collections.abc import Sequence
from statistics import fmean, stdev
from typing import NamedTuple


class Result(NamedTuple):
    """Of a t-test: the statistic, its degrees of freedom, the probability (NaN: undefined)."""

    t: float
    df: float
    p: float


UNDEFINED = Result(math.nan, math.nan, math.nan)  # fewer than two values, or all of them equal


def tail(t: float, df: float, shift: float = 0.0) -> float:
    """P(T > t) of Student's t, with a shift of the noncentral one: the density of u, a sample's
    standard deviation by the true one, times P(normal > t u - shift), summed over log u. There
    both ends fall off so fast that equal steps leave no error but of rounding."""
    width = 1 / math.sqrt(2 * df)  # of the density
    constant = math.log(2) + df / 2 * math.log(df / 2) - math.lgamma(df / 2)
    start = -math.log1p(t * t / df) / 2 - 9 * width - 40 / df  # far tails are of small u
    total, step = 0.0, min(width, 1 / (1 + abs(shift))) / 4
    for i in range(math.ceil((9 * width - start) / step)):
        x = start + i * step
        u = math.exp(x)
        density = math.exp(constant + df * (x - u * u / 2))
        total += density * math.erfc((t * u - shift) / math.sqrt(2)) / 2
    return total * step


def below(values: Sequence[float], target: float) -> Result:
    """Is the mean below the target? One sample, one-sided."""
    sd = stdev(values) if len(values) > 1 else 0.0
    if not sd:
        return UNDEFINED
    t = (fmean(values) - target) / (sd / math.sqrt(len(values)))
    return Result(t, len(values) - 1, tail(-t, len(values) - 1))


def welch(a: Sequence[float], b: Sequence[float]) -> Result:
    """Is the mean of a below that of b? One-sided, variances may differ (Welch 1947)."""
    if min(len(a), len(b)) < 2 or not stdev(a) + stdev(b):
        return UNDEFINED
    u, v = stdev(a) ** 2 / len(a), stdev(b) ** 2 / len(b)
    t = (fmean(a) - fmean(b)) / math.sqrt(u + v)
    df = (u + v) ** 2 / (u**2 / (len(a) - 1) + v**2 / (len(b) - 1))
    return Result(t, df, tail(-t, df))


def paired(differences: Sequence[float]) -> Result:
    """Of pairs: is their mean another than zero? Two-sided."""
    t, df, p = below(differences, 0.0)
    return Result(t, df, p if math.isnan(p) else 2 * tail(abs(t), df))


def critical(alpha: float, df: float) -> float:
    """t with P(T > t) = alpha, for alpha < 1/2, by bisection."""
    low, high = 0.0, 1.0
    while tail(high, df) > alpha:
        high *= 2
    for _ in range(50):
        middle = (low + high) / 2
        low, high = (middle, high) if tail(middle, df) > alpha else (low, middle)
    return high


def power(effect: float, n: int, alpha: float = 0.01) -> float:
    """Chance that n runs whose mean is truly `effect` standard deviations below the target pass."""
    return tail(critical(alpha, n - 1), n - 1, effect * math.sqrt(n))


def runs_needed(effect: float, chance: float = 0.8, alpha: float = 0.01) -> int | None:
    """The fewest runs that pass at alpha with that chance; None where it takes over 10,000."""
    if not effect > 0.03:
        return None
    low, high = 1, 2
    while power(effect, high, alpha) < chance:
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if power(effect, middle, alpha) >= chance else (middle, high)
    return high if high <= 10_000 else None
