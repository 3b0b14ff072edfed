"""Statistics of a panel: comparisons of all pairs of methods, the resolution of the grid, and survival curves."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from upgd.experiments.analysis.compare import Best, Entry, Pair, pairs
from upgd.experiments.analysis.metrics import METRICS, Metric
from upgd.experiments.execution.jobs import whole
from upgd.experiments.paper.catalogue import Arm, Panel
from upgd.experiments.paper.reproduce import Finding, Reproduction

__all__ = ["LEVEL", "SCREENED", "Against", "against_all", "resolution", "survival", "survivors"]

#: The explanation of :func:`resolution` on pages.
LEVEL = (
    "Two methods are level (=) if the difference is not significant, or no larger than the improvement that a finer grid "
    "might bring to the worse method, estimated by parabolas through its best setting and the neighbouring settings of the "
    "search. The estimate covers only settings between those tried. A value with an asterisk is the smallest or largest "
    "tried; values outside the grid may be better."
)
#: Added to it if settings were screened.
SCREENED = (
    "Neighbours may have run in the screening only; if the chosen setting was screened, the larger of the estimates from the "
    "search and from the screening counts."
)
_SIGNIFICANT = 0.05


@dataclass(frozen=True)
class Against:
    """Two curves of a panel.

    Attributes:
        first, second: their names; the first is not below the second in the table.
        pair: the paired difference, its interval and the corrected p.
        level: see :data:`LEVEL`.
    """

    first: str
    second: str
    pair: Pair
    level: bool


def resolution(best: Best, screened: Best | None = None) -> float:
    """Return how much better a setting between those that were tried may be.

    For each hyperparameter with steps *a* and *b* from the best score down to those of its neighbours, a parabola through the
    three is higher than the best of them by (a − b)² / 8(a + b). With one neighbour alone, because the value is at an edge or
    the other neighbour diverged, it is at most *a* / 8. These heights are added.

    Args:
        best: the setting and its neighbours in the search.
        screened: the same in the screening, where a setting also has the neighbours that the search lacks. Of the two heights
            for a hyperparameter, the larger counts.
    """
    stages = [best] if screened is None else [best, screened]
    names = dict.fromkeys(name for one in stages for name in one.neighbours)
    near = {name: [_promise(one.score, one.neighbours.get(name, {}).values()) for one in stages] for name in names}
    return sum(map(max, near.values()), 0.0)


def _promise(score: float, neighbours: Iterable[float]) -> float:
    steps = [abs(score - other) for other in neighbours if not math.isnan(other)]
    if len(steps) == 2 and sum(steps) > 0:
        return (steps[0] - steps[1]) ** 2 / (8 * sum(steps))
    return sum(steps) / 8


def against_all(found: Reproduction, panel: Panel) -> list[Against]:
    """Compare every row of a panel's table with every row below it; p is corrected for all pairs (Holm)."""
    comparison, findings = found.panel(panel)
    if comparison is None:
        return []
    rows = found.rows(panel)
    searched = {id(one.entry): one for finding in findings for one in (finding, finding.papers) if one is not None}
    names = {id(row.entry): name for name, row in rows}
    return [
        Against(
            names[id(pair.first)],
            names[id(pair.second)],
            pair,
            _level(pair, comparison.metric, searched),
        )
        for pair in pairs(comparison, [row.entry for _, row in rows])
    ]


def _level(pair: Pair, metric: Metric, searched: Mapping[int, Finding]) -> bool:
    if pair.difference is None or pair.p_holm is None or pair.p_holm >= _SIGNIFICANT:
        return True
    ahead = (pair.difference > 0) == METRICS[metric].higher
    behind: Entry = pair.second if ahead else pair.first
    chosen = searched[id(behind)]
    return abs(pair.difference) <= resolution(chosen.best, chosen.screened)


def survivors(found: Reproduction, arm: Arm) -> NDArray[np.int64]:
    """Return the step at which each run of an arm's search diverged; −1 if it did not."""
    digests = {digest for experiment in found.plan.sweep([arm]) for digest in whole(experiment).digests}
    own = (record.diverged_at for record in found.records if record.key.digest in digests)
    return np.array([-1 if step is None else step for step in own], np.int64)


def survival(diverged_at: NDArray[np.int64], steps: int) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """Return steps and the fraction of runs that had not diverged by then: the corners of a survival curve.

    Example:
        >>> at, share = survival(np.array([-1, 5, 5, 20]), 100)
        >>> at.tolist(), share.tolist()
        ([0, 5, 20, 100], [1.0, 0.5, 0.25, 0.25])
    """
    at, count = np.unique(diverged_at[diverged_at >= 0], return_counts=True)
    share = 1 - np.cumsum(count) / len(diverged_at)
    last = share[-1:] if len(share) else np.ones(1)
    return np.concatenate([[0], at, [steps]]), np.concatenate([[1.0], share, last])
