"""Student's t, the tests that rest on it, and their power: for verify.py, which needs no packages.

Statistics of samples are in their own units (nats, seconds, tokens); p is a probability.
"""

import math
from collections.abc import Sequence
from statistics import NormalDist, fmean, stdev
from typing import NamedTuple


class Result(NamedTuple):
    """Of a t-test: the statistic, its degrees of freedom, the probability (NaN: undefined)."""

    t: float
    df: float
    p: float


UNDEFINED = Result(math.nan, math.nan, math.nan)  # fewer than two values, or all of them equal


def incomplete_beta(x: float, y: float, a: float, b: float) -> float:
    """I_x(a, b), regularized, for y = 1 - x: the continued fraction of DLMF 8.17.22, evaluated by
    Lentz's method, on the side where it converges fast."""
    if x > (a + 1) / (a + b + 2):
        return 1 - incomplete_beta(y, x, b, a)
    if x <= 0:
        return 0.0
    value, c, d = 1.0, 1.0, 0.0
    for i in range(1, 10_000):
        m = i // 2
        if i % 2:
            term = -(a + m) * (a + b + m) * x / ((a + 2 * m) * (a + 2 * m + 1))
        else:
            term = m * (b - m) * x / ((a + 2 * m - 1) * (a + 2 * m))
        d = 1 / (1 + term * d)
        c = 1 + term / c
        value *= c * d
        if abs(c * d - 1) < 1e-16:
            break
    log = a * math.log(x) + b * math.log(y) + math.lgamma(a + b) - math.lgamma(a) - math.lgamma(b)
    return math.exp(log) / (a * value)


def t_cdf(t: float, df: float) -> float:
    """P(T <= t) of Student's t with df degrees of freedom, accurate in the tails, too."""
    if math.isinf(t):
        return float(t > 0)
    lower = incomplete_beta(df / (df + t * t), t * t / (df + t * t), df / 2, 0.5) / 2
    return lower if t < 0 else 1 - lower


def below(values: Sequence[float], target: float) -> Result:
    """Is the mean below the target? One sample, one-sided."""
    if len(values) < 2 or not (sd := stdev(values)):
        return UNDEFINED
    t = (fmean(values) - target) / (sd / math.sqrt(len(values)))
    return Result(t, len(values) - 1, t_cdf(t, len(values) - 1))


def welch(a: Sequence[float], b: Sequence[float]) -> Result:
    """Is the mean of a below that of b? One-sided, variances may differ (Welch 1947)."""
    if min(len(a), len(b)) < 2 or not stdev(a) + stdev(b):
        return UNDEFINED
    u, v = stdev(a) ** 2 / len(a), stdev(b) ** 2 / len(b)
    t = (fmean(a) - fmean(b)) / math.sqrt(u + v)
    df = (u + v) ** 2 / (u**2 / (len(a) - 1) + v**2 / (len(b) - 1))
    return Result(t, df, t_cdf(t, df))


def paired(a: Sequence[float], b: Sequence[float]) -> Result:
    """Do a and b, pair by pair, have another mean? Two-sided."""
    differences = [x - y for x, y in zip(a, b, strict=True)]
    t, df, p = below(differences, 0.0)
    return Result(t, df, p if math.isnan(p) else 2 * t_cdf(-abs(t), df))


def critical(alpha: float, df: float) -> float:
    """t with P(T > t) = alpha, for alpha < 1/2, by bisection."""
    low, high = 0.0, 1.0
    while t_cdf(-high, df) > alpha:
        high *= 2
    for _ in range(100):
        middle = (low + high) / 2
        low, high = (middle, high) if t_cdf(-middle, df) > alpha else (low, middle)
    return high


def power(effect: float, n: int, alpha: float = 0.01) -> float:
    """Chance that n runs whose mean is truly `effect` standard deviations below the target pass at
    alpha: the noncentral t distribution, as an integral over the sample's standard deviation."""
    df = n - 1
    limit, shift = critical(alpha, df), effect * math.sqrt(n)
    constant = math.log(2) + df / 2 * math.log(df / 2) - math.lgamma(df / 2)
    start, stop = max(0.0, 1 - 10 / math.sqrt(2 * df)), 1 + 10 / math.sqrt(2 * df)
    total, pieces, normal = 0.0, 2000, NormalDist()
    for i in range(pieces):  # midpoints: at 0 the density may have a logarithm of infinity
        u = start + (stop - start) * (i + 0.5) / pieces
        density = math.exp(constant + (df - 1) * math.log(u) - df * u * u / 2)
        total += density * normal.cdf(shift - limit * u)
    return total * (stop - start) / pieces


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
