"""Statistics of a panel: comparisons of all pairs of methods, the resolution of the grid, and survival curves."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

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
    "might bring to the worse method. This improvement is estimated for each hyperparameter, and the estimates are added: "
    "the height of a parabola through the scores of the chosen setting and of its two neighbours in the search, on a "
    "logarithmic axis; an eighth of the difference from its only neighbour, if the other one does not exist or diverged; and "
    "at least the lead of a neighbour that is better. The estimate is generous, above all if the only neighbour is much "
    "worse, and a finer grid may improve the better method, too. Level therefore does not mean equal, but that these runs "
    "cannot tell which method is better. The estimate depends on the settings that were tried and covers only those between "
    "them."
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


def resolution(best: Best, screened: Best | None = None, *, higher: bool = True) -> float:
    """Return how much better a setting between those that were tried may be.

    For each hyperparameter, a parabola through the scores of the best setting and of its two neighbours has a maximum, whose
    height above the best setting is the estimate. The axis is logarithmic, and neighbours may be at different distances:
    for a learning rate of 0.001, 0.003 is nearer than 0.0001. For β, it is that of 1 − β. With one neighbour alone, because
    the value is at an edge or the other neighbour diverged, the estimate is an eighth of the distance to its score, which is
    the maximum for equal distances if the missing neighbour is as good as the best. If a neighbour is better, as may happen
    if the setting was chosen on other seeds or from a smaller grid, the estimate is at least its lead. The estimates for all
    hyperparameters are added.

    Args:
        best: the setting and its neighbours in the search.
        screened: the same in the screening, where a setting also has the neighbours that the search lacks. Of the two
            estimates for a hyperparameter, the larger counts.
        higher: whether higher scores are better.
    """
    stages = [best] if screened is None else [best, screened]
    names = dict.fromkeys(name for one in stages for name in one.neighbours)
    return sum((max(_promise(one, name, higher) for one in stages) for name in names), 0.0)


def _promise(best: Best, name: str, higher: bool) -> float:
    """Return the estimate of :func:`resolution` for one hyperparameter."""
    tried = {value: score for value, score in best.neighbours.get(name, {}).items() if not math.isnan(score)}
    drops = [best.score - score if higher else score - best.score for score in tried.values()]
    lead = max([0.0, *(-drop for drop in drops)])
    if len(drops) < 2:
        return max(lead, sum(drops) / 8)
    (a, b), (s, t) = drops, _distances(name, best.entry.settings[name], *tried)
    # The parabola with y(−s) = −a, y(0) = 0 and y(t) = −b is bent downward by `bend`, with its slope at 0 given by `slope`.
    bend, slope = a * t + b * s, a * t**2 - b * s**2
    inside = bend > 0 and -s <= slope / (2 * bend) <= t
    return max(lead, slope**2 / (4 * s * t * (s + t) * bend)) if inside else lead


def _distances(name: str, chosen: Any, first: Any, second: Any) -> tuple[float, float]:
    """Return the distances of two values of a hyperparameter from the chosen one, equal where there is no logarithm."""
    try:
        at, one, other = (math.log(1 - x if name == "beta_utility" else x) for x in (chosen, first, second))
    except (TypeError, ValueError):  # a pair, such as AdamW's β₁ and β₂, or zero
        return 1.0, 1.0
    return abs(one - at), abs(other - at)


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
    higher = METRICS[metric].higher
    ahead = (pair.difference > 0) == higher
    behind: Entry = pair.second if ahead else pair.first
    chosen = searched[id(behind)]
    return abs(pair.difference) <= resolution(chosen.best, chosen.screened, higher=higher)


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
