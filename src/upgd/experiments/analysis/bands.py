"""Means and confidence bands of curves over seeds."""

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from upgd.experiments.analysis.compare import Entry
from upgd.experiments.analysis.metrics import METRICS, Metric, Series, series
from upgd.experiments.analysis.student import quantile

__all__ = ["band", "interval", "of_seeds"]

Floats = NDArray[np.float64]

#: Number of bootstrap resamples.
_RESAMPLES = 2_000


def band(values: Floats) -> tuple[Floats, Floats]:
    """Return the mean over seeds, and the half-width of its 95% confidence interval; 0 for a single seed.

    Args:
        values: ``(seeds, points)``.
    """
    mean: Floats = values.mean(0)
    if len(values) < 2:
        return mean, np.zeros_like(mean)
    return mean, quantile(len(values) - 1) * values.std(0, ddof=1) / np.sqrt(len(values))


def interval(values: Floats, metric: Metric) -> tuple[Floats, Floats, Floats]:
    """Return the mean over seeds and the ends of its 95% confidence interval, which stays within the range of the metric.

    For all metrics but losses, this is Student's t interval, clipped to the range of the metric. Losses are skewed, and a
    symmetric interval around their mean could extend below zero. They get a percentile bootstrap, expanded for few seeds as
    proposed by Hesterberg (2015, "What teachers should know about the bootstrap"); it stays between the smallest and the
    largest seed.

    Args:
        values: ``(seeds, points)``.
        metric: the metric of the values.
    """
    mean, reach = band(values)
    if metric != "loss":
        least, most = METRICS[metric].bounds
        return mean, np.maximum(mean - reach, least), np.minimum(mean + reach, most)
    seeds = len(values)
    if seeds < 2:
        return mean, mean, mean
    tail = math.erfc(quantile(seeds - 1) * math.sqrt(seeds / (seeds - 1) / 2)) / 2
    # A fixed generator, so that the same results give the same figure.
    drawn = np.random.default_rng(0).multinomial(seeds, np.full(seeds, 1 / seeds), _RESAMPLES) / seeds
    low, high = np.quantile(drawn @ values, (tail, 1 - tail), axis=0)
    return mean, low, high


def _at(found: Series, ends: NDArray[np.int64]) -> Floats:
    """Return the means over windows with these ends, which must be among those of the series."""
    if len(ends) == len(found.ends):
        return found.values
    first = np.searchsorted(found.ends, ends[:-1], side="right")
    return _merged(found.values, found.lengths, np.concatenate([[0], first]))


def _merged(values: Floats, lengths: NDArray[np.int64], starts: NDArray[np.int64]) -> Floats:
    """Return the means of neighbouring windows; each group of them begins at one of ``starts``."""
    merged: Floats = np.add.reduceat(values * lengths, starts, axis=-1) / np.add.reduceat(lengths, starts)
    return merged


def of_seeds(entry: Entry, metric: Metric, points: int) -> tuple[NDArray[Any], Floats]:
    """Return the ends of windows, ``(points,)``, and the learners' means, ``(seeds, points)``, without diverged learners.

    If there are more windows than ``points``, neighbours are merged, weighted by their number of steps.
    """
    found = [one for record in entry.records.values() if (one := series(record, metric)) is not None]
    if not found:
        return np.empty(0), np.empty((0, 0))
    # Some learners may have been stored with fewer windows. Diagnostics at other steps are skipped.
    ends, lengths, _ = min(found, key=lambda one: len(one.ends))
    values = np.array([_at(one, ends) for one in found if np.isin(ends, one.ends).all()])
    together = -(-len(ends) // points)
    first = np.arange(0, len(ends), together)
    return ends[np.minimum(first + together, len(ends)) - 1], _merged(values, lengths, first)
