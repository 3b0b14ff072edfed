"""Curves of several seeds as a mean and a band around it."""

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from upgd.experiments.compare import Entry, Metric

__all__ = ["band", "interval", "of_seeds", "student"]

Floats = NDArray[np.float64]

#: The 97.5 % quantile of Student's t for 1, 2, … 30 degrees of freedom.
_STUDENT = (
    *(12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228),
    *(2.201, 2.179, 2.160, 2.145, 2.131, 2.120, 2.110, 2.101, 2.093, 2.086),
    *(2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042),
)

#: How many times a bootstrap draws the seeds again.
_RESAMPLES = 2_000


def student(seeds: int) -> float:
    """How many standard errors a 95 % confidence interval of a mean over so many seeds reaches to either side."""
    freedom = seeds - 1
    if freedom < 1:
        return float("nan")
    # The first terms of the expansion in 1/freedom are right to three digits from 30 on.
    return _STUDENT[freedom - 1] if freedom <= len(_STUDENT) else 1.95996 + 2.3722 / freedom + 2.82 / freedom**2


def band(values: Floats) -> tuple[Floats, Floats]:
    """The mean over seeds, and how far its 95 % confidence interval reaches to either side; 0 for a single seed.

    Args:
        values: ``(seeds, points)``.
    """
    mean: Floats = values.mean(0)
    if len(values) < 2:
        return mean, np.zeros_like(mean)
    return mean, student(len(values)) * values.std(0, ddof=1) / np.sqrt(len(values))


def interval(values: Floats, metric: Metric) -> tuple[Floats, Floats, Floats]:
    """The mean over seeds and both ends of its 95 % confidence interval, which never leaves the range of the metric.

    For accuracies this is Student's t interval, cut off at 0 and 1. Losses are skewed, and a symmetric interval around their
    mean would reach below zero. They get the percentile bootstrap, expanded for few seeds as Hesterberg (2015, "What
    teachers should know about the bootstrap") proposes; it stays between the smallest and the largest seed.

    Args:
        values: ``(seeds, points)``.
        metric: what the values are.
    """
    mean, reach = band(values)
    if metric == "accuracy":
        return mean, np.maximum(mean - reach, 0), np.minimum(mean + reach, 1)
    seeds = len(values)
    if seeds < 2:
        return mean, mean, mean
    tail = math.erfc(student(seeds) * math.sqrt(seeds / (seeds - 1) / 2)) / 2
    # A fixed generator: the same results give the same picture.
    drawn = np.random.default_rng(0).multinomial(seeds, np.full(seeds, 1 / seeds), _RESAMPLES) / seeds
    low, high = np.quantile(drawn @ values, (tail, 1 - tail), axis=0)
    return mean, low, high


def of_seeds(entry: Entry, metric: str, points: int) -> tuple[NDArray[Any], Floats]:
    """Where windows end, and the learners' means: ``(points,)`` and ``(seeds, points)``; without those that diverged.

    Where there are more windows than ``points``, neighbours are joined; each step counts the same.
    """
    alive = [record for record in entry.records.values() if record.diverged_at is None]
    if not alive:
        return np.empty(0), np.empty((0, 0))
    values = np.array([record.accuracy if metric == "accuracy" else record.loss for record in alive], np.float64)
    ends, lengths = alive[0].ends, alive[0].lengths
    together = -(-len(ends) // points)
    first = np.arange(0, len(ends), together)
    joined = np.add.reduceat(values * lengths, first, axis=1) / np.add.reduceat(lengths, first)
    return ends[np.minimum(first + together, len(ends)) - 1], joined
