"""Student's t distribution without scipy, so that tests and intervals work in a minimal installation."""

import math
from functools import cache

__all__ = ["p_value", "quantile"]


@cache
def quantile(freedom: int, level: float = 0.95) -> float:
    """Return the two-sided quantile of Student's t: the half-width of an interval in standard errors."""
    if freedom < 1:
        return math.nan
    low, high = 0.0, 1.0
    while p_value(high, freedom) > 1 - level:
        high *= 2
    while high - low > 1e-13 * high:
        middle = (low + high) / 2
        low, high = (middle, high) if p_value(middle, freedom) > 1 - level else (low, middle)
    return (low + high) / 2


def p_value(statistic: float, freedom: int) -> float:
    """Return the two-sided p-value of a t statistic."""
    far = freedom / (freedom + statistic**2)
    if far < (freedom + 2) / (freedom + 5):  # where the continued fraction converges fast
        return _incomplete_beta(far, freedom / 2, 0.5)
    return 1 - _incomplete_beta(statistic**2 / (freedom + statistic**2), 0.5, freedom / 2)


def _incomplete_beta(x: float, a: float, b: float) -> float:
    """Return the regularized incomplete beta function, by its continued fraction (Lentz's method)."""
    if x == 0:
        return 0.0
    factor = math.exp(math.lgamma(a + b) - math.lgamma(a) - math.lgamma(b) + a * math.log(x) + b * math.log1p(-x))
    above, below = 1.0, 1 / (1 - (a + b) * x / (a + 1))
    value = below
    for n in range(1, 200):
        for term in (
            n * (b - n) * x / ((a + 2 * n - 1) * (a + 2 * n)),
            -(a + n) * (a + b + n) * x / ((a + 2 * n) * (a + 2 * n + 1)),
        ):
            below, above = 1 / (1 + term * below), 1 + term / above
            value *= below * above
        if abs(below * above - 1) < 1e-15:
            break
    return factor * value / a
