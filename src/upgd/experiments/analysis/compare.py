"""Fair comparison of methods: the best settings, the flatness of the optimum, and the significance of differences.

**Score.** The area under a learner's online curve: the mean over all steps of the accuracy (for regression, of the loss) of
predictions made before the update. Settings are chosen by score. Tables and figures can show another metric of the chosen
settings; see :mod:`upgd.experiments.analysis.metrics`.

**Divergence.** Settings with fewer diverged learners rank first, whatever their scores; the score of a setting is the mean
over its learners that did not diverge.

**Ties** are resolved in favour of the smaller lr, then the smaller value of the other settings in alphabetical order.

**Seeds.** Settings of a method are compared on the seeds that all of them have, so 20 more seeds of the best setting do not
change which one is best. If there is no such seed, the settings that have the most common seed are compared, and the others
are counted.

**Fresh seeds.** The seeds of a search chose the setting, so its score on them is biased upward. A seed is fresh if it was not
used for the choice: the settings were not compared on it, and at most half of them have it. If the best setting has fresh
seeds, tables and figures show only these; seeds of the search and fresh seeds are never pooled.

**Tests.** Paired two-sided t-tests over common seeds. Which method is best depends on the results, so comparisons with the
best method are corrected as tests of all pairs of methods, by Holm's procedure; comparisons with a reference that was chosen
beforehand are corrected for their own number only.
"""

import math
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import combinations
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from upgd.experiments.analysis.metrics import METRICS, Metric, area, check, quarter, usual
from upgd.experiments.analysis.student import p_value, quantile
from upgd.experiments.analysis.wording import plural
from upgd.experiments.spec.engine import ENGINE
from upgd.store import Record

__all__ = [
    "Best",
    "Comparison",
    "Entry",
    "Pair",
    "Row",
    "best",
    "comparisons",
    "edges",
    "holm",
    "pairs",
    "ranked",
    "rows",
]

#: The seeds of a line of a table: fresh ones, or those that chose the settings; None if nothing was chosen.
Evaluation = Literal["fresh", "search"] | None
#: The backend of results recorded by a user's own loop, which cannot be run again here.
OWN_LOOP = "own loop"
#: A setting is as good as the best if its score is worse by at most this fraction.
FLAT = 0.01


@dataclass(frozen=True)
class Entry:
    """A method with its settings, and its learners by seed."""

    method: str
    settings: Mapping[str, Any]
    records: Mapping[int, Record] = field(repr=False)
    source: str = ""  #: the store of the learners, if several are compared

    def on(self, seeds: Iterable[int]) -> "Entry":
        """Return the entry with only these seeds."""
        return replace(self, records={seed: self.records[seed] for seed in seeds if seed in self.records})


@dataclass(frozen=True)
class Comparison:
    """Entries that can be compared: the same problem, network, number of steps and version of the engine."""

    problem: str
    options: Mapping[str, Any]
    network: str
    steps: int
    metric: Metric  #: the metric shown
    entries: tuple[Entry, ...] = field(repr=False)
    engine: int = ENGINE

    def of(self, method: str) -> list[Entry]:
        """Return the method's settings."""
        return [entry for entry in self.entries if entry.method == method]

    @property
    def chosen_by(self) -> Metric:
        """The online metric by which settings are chosen, regardless of the metric shown."""
        if self.metric in ("accuracy", "loss"):
            return self.metric
        return next(usual(record) for entry in self.entries for record in entry.records.values())

    @property
    def noun(self) -> str:
        """The name of the metric in axes and captions."""
        regression = all(record.accuracy is None for entry in self.entries for record in entry.records.values())
        return "online squared error" if self.metric == "loss" and regression else METRICS[self.metric].noun

    @property
    def title(self) -> str:
        options = "".join(f", {name} {value}" for name, value in self.options.items())
        return (
            f"{self.problem}{options}, network {self.network}, {plural(self.steps, 'step')}{engine_text(self.engine)}"
        )


@dataclass(frozen=True)
class Best:
    """The best setting of a method.

    Attributes:
        entry: the setting.
        score: its area under the curve, the mean over ``seeds``; NaN if all of its learners diverged.
        seeds: the seeds on which the settings were compared.
        diverged: number of its learners that diverged.
        tried: number of settings compared; ``diverged_settings`` of them had a diverged learner.
        left_out: number of settings that could not be compared because they share no seed with the others.
        flat: fraction of the settings whose score is within 1% of the best.
        neighbours: for each hyperparameter with several values, the scores of the settings adjacent to the best one that
            differ from it only in this hyperparameter, by value.
        edges: hyperparameters whose best value is the smallest or largest tried; a wider grid may be better.
        search_seeds: the seeds of the search; empty if only one setting was tried.
        fresh_seeds: the setting's seeds that were not used to choose it; empty if only one setting was tried.
    """

    entry: Entry
    score: float
    seeds: tuple[int, ...]
    diverged: int
    tried: int
    left_out: int
    diverged_settings: int
    flat: float
    neighbours: Mapping[str, Mapping[Any, float]]
    edges: tuple[str, ...]
    search_seeds: tuple[int, ...] = ()
    fresh_seeds: tuple[int, ...] = ()

    @property
    def shown(self) -> Entry:
        """The setting with only its fresh seeds, or with all of its seeds if none is fresh."""
        return self.entry.on(self.fresh_seeds) if self.fresh_seeds else self.entry


@dataclass(frozen=True)
class Row:
    """One line of a table: means over the seeds that did not diverge, and their standard errors."""

    entry: Entry
    seeds: int
    diverged: int
    mean: float
    error: float
    first_quarter: float
    last_quarter: float
    learner_steps: int
    difference: float | None  #: from the best method, or from the reference; over common seeds
    p: float | None  #: of a paired t-test of that difference; None if there is no test
    p_holm: float | None = None  #: the same, corrected for the number of tests
    evaluation: Evaluation = None


@dataclass(frozen=True)
class Pair:
    """A comparison of two methods over the seeds that both have and on which neither diverged.

    Attributes:
        first, second: the two methods.
        seeds: number of seeds compared.
        difference: mean of the first minus mean of the second; None if they share no seed.
        reach: half-width of the 95% interval of this difference; None if there is no test.
        p: p-value of a paired t-test of the difference; None if there is no test.
        p_holm: the same, corrected for the number of pairs.
    """

    first: Entry
    second: Entry
    seeds: int
    difference: float | None
    p: float | None
    p_holm: float | None = None
    reach: float | None = None


def engine_text(engine: int) -> str:
    """Return the part of a title that names an older version of the engine."""
    return "" if engine == ENGINE else f", engine version {engine}"


def comparisons(records: Iterable[Record], metric: Metric | None = None) -> list[Comparison]:
    """Group records into comparisons, with the given metric or the default of each problem."""
    groups: dict[str, list[Record]] = {}
    for record in records:
        key = record.key
        groups.setdefault(
            repr((key.problem, sorted(key.options.items()), key.network, key.steps, key.engine)), []
        ).append(record)
    return [_comparison(group, metric) for group in groups.values()]


def best(comparison: Comparison, method: str, settings: Mapping[str, Any] | None = None) -> Best:
    """Return the best setting of a method, by the rules at the top of this module; or the same information about the given
    ``settings``, which were chosen by other means."""
    all_of_method = comparison.of(method)
    entries, seeds = _on_common_seeds(all_of_method)
    metric = comparison.chosen_by
    scores = [_score(entry, seeds, metric) for entry in entries]
    diverged = [_diverged(entry, seeds) for entry in entries]
    first = next((i for i, entry in enumerate(entries) if entry.settings == settings), None)
    if first is None:
        first = min(range(len(entries)), key=lambda i: _rank(entries[i], seeds, metric))
    within = [not diverged[i] and _as_good(scores[i], scores[first], metric) for i in range(len(entries))]
    chosen, tried = entries[first].settings, [entry.settings for entry in entries]
    search = _search_seeds(entries, seeds)
    return Best(
        entry=entries[first],
        score=scores[first],
        seeds=seeds,
        diverged=diverged[first],
        tried=len(entries),
        left_out=len(all_of_method) - len(entries),
        diverged_settings=sum(count > 0 for count in diverged),
        flat=sum(within) / len(entries),
        neighbours=_neighbours(chosen, tried, scores),
        edges=edges(chosen, tried),
        search_seeds=search,
        fresh_seeds=tuple(sorted(set(entries[first].records) - set(search))) if search else (),
    )


def ranked(comparison: Comparison, method: str) -> list[Entry]:
    """Return the settings of a method that share seeds, best first."""
    entries, seeds = _on_common_seeds(comparison.of(method))
    return sorted(entries, key=lambda entry: _rank(entry, seeds, comparison.chosen_by))


def rows(
    comparison: Comparison,
    entries: Sequence[Entry],
    *,
    reference: Entry | None = None,
    evaluation: Evaluation = None,
    corrected: bool = True,
) -> list[Row]:
    """Return a table's lines, best first. Fewer diverged learners rank first, whatever the scores of the others.

    Args:
        comparison: the comparison that the entries belong to.
        entries: one line for each.
        reference: the entry to compare the others with. Default: the best.
        evaluation: the kind of seeds of the entries.
        corrected: whether to correct p for the number of tests; for many settings, that is slow and of little use.
    """
    if not entries:
        return []
    metric = comparison.metric
    sign = -1 if METRICS[metric].higher else 1

    def rank(entry: Entry) -> tuple[float, bool, float]:
        mean = _score(entry, entry.records, metric)
        return _diverged(entry, entry.records) / len(entry.records), math.isnan(mean), sign * mean

    ordered = sorted(entries, key=rank)
    if corrected and reference is None:
        # The best entry is the first in every pair that it is part of.
        tests = [pair for pair in pairs(comparison, ordered) if pair.first is ordered[0]]
    else:
        to = reference or ordered[0]
        tests = [_pair(to, entry, metric) for entry in ordered if entry is not to]
        tests = _corrected(tests) if corrected else tests
    by_entry = {id(test.second): test for test in tests}
    return [_table_row(entry, by_entry.get(id(entry)), metric, evaluation) for entry in ordered]


def pairs(comparison: Comparison, entries: Sequence[Entry]) -> list[Pair]:
    """Compare every entry with every other, with p corrected for the number of pairs."""
    return _corrected([_pair(first, second, comparison.metric) for first, second in combinations(entries, 2)])


def _corrected(tests: Sequence[Pair]) -> list[Pair]:
    return [replace(test, p_holm=p) for test, p in zip(tests, holm([test.p for test in tests]), strict=True)]


def holm(chances: Sequence[float | None]) -> list[float | None]:
    """Return p-values corrected by Holm's step-down procedure, in the same order; None stands for no test.

    The probability that any true null hypothesis gets a corrected p below α is at most α, even if the tests are dependent.

    Example:
        >>> holm([0.01, None, 0.04, 0.03])
        [0.03, None, 0.06, 0.06]
    """
    order = sorted((p, i) for i, p in enumerate(chances) if p is not None)
    corrected: list[float | None] = [None] * len(chances)
    largest = 0.0
    for rank, (p, i) in enumerate(order):
        largest = max(largest, min(1.0, (len(order) - rank) * p))
        corrected[i] = largest
    return corrected


def _comparison(records: list[Record], metric: Metric | None) -> Comparison:
    key = records[0].key
    entries: dict[str, tuple[str, Mapping[str, Any], dict[int, Record], str]] = {}
    for record in records:
        name = repr((record.key.method, sorted(record.key.settings.items()), record.source))
        own = entries.setdefault(name, (record.key.method, record.key.settings, {}, record.source))
        own[2][record.key.seed] = record
    found = tuple(Entry(*entry) for entry in entries.values())
    comparison = Comparison(
        key.problem, key.options, key.network, key.steps, metric or usual(records[0]), found, key.engine
    )
    if metric is not None:
        check(metric, records, comparison.title)
    return comparison


def _score(entry: Entry, seeds: Iterable[int], metric: Metric) -> float:
    return _mean_of(area(entry.records[seed], metric) for seed in seeds)


def _mean_of(values: Iterable[float]) -> float:
    finite = _finite(values)
    return float(finite.mean()) if len(finite) else math.nan


def _finite(values: Iterable[float]) -> NDArray[np.float64]:
    array = np.array(list(values), np.float64)
    return array[~np.isnan(array)]


def _on_common_seeds(entries: Sequence[Entry]) -> tuple[list[Entry], tuple[int, ...]]:
    """Return the settings that have the most common seed, and all seeds that these settings share."""
    having = Counter(seed for entry in entries for seed in entry.records)
    most_common = min(having, key=lambda seed: (-having[seed], seed))
    chosen = [entry for entry in entries if most_common in entry.records]
    return chosen, tuple(sorted(set.intersection(*(set(entry.records) for entry in chosen))))


def _search_seeds(entries: Sequence[Entry], compared: Sequence[int]) -> tuple[int, ...]:
    """Return the seeds on which settings were compared, and those that most settings have: if a setting lacks a seed, as
    during a sweep, that seed is not fresh."""
    if len(entries) < 2:
        return ()
    having = Counter(seed for entry in entries for seed in entry.records)
    return tuple(sorted({*compared, *(seed for seed, count in having.items() if count > len(entries) / 2)}))


def _diverged(entry: Entry, seeds: Iterable[int]) -> int:
    return sum(entry.records[seed].diverged_at is not None for seed in seeds)


def _rank(entry: Entry, seeds: Sequence[int], metric: Metric) -> tuple[Any, ...]:
    """Return a sort key, smallest for the best entry."""
    score = _score(entry, seeds, metric)
    score = -score if METRICS[metric].higher else score
    return (_diverged(entry, seeds), math.inf if math.isnan(score) else score, *_tie_break(entry.settings))


def _tie_break(settings: Mapping[str, Any]) -> tuple[Any, ...]:
    return tuple(_sortable(value) for _, value in sorted(settings.items(), key=_lr_first))


def _sortable(value: Any) -> tuple[int, Any]:
    """Return a sort key for settings of any type: numbers before lists, strings and missing values."""
    if isinstance(value, int | float):
        return (0, value)
    return (1, [_sortable(part) for part in value]) if isinstance(value, list | tuple) else (2, str(value))


def _lr_first(item: tuple[str, Any]) -> tuple[bool, str]:
    return (item[0] != "lr", item[0])


def _as_good(score: float, best_score: float, metric: Metric) -> bool:
    slack = FLAT * abs(best_score)
    return score >= best_score - slack if METRICS[metric].higher else score <= best_score + slack


def edges(chosen: Mapping[str, Any], tried: Sequence[Mapping[str, Any]]) -> tuple[str, ...]:
    """Return the hyperparameters whose chosen value is the smallest or largest tried; a wider grid may be better."""
    everywhere = {name: {_hashable(settings[name]) for settings in tried if name in settings} for name in chosen}
    return tuple(name for name, value in chosen.items() if _at_edge(_hashable(value), everywhere[name]))


def _at_edge(value: Any, tried: Collection[Any]) -> bool:
    """Return whether a number, or one number of a pair, is the smallest or largest tried; 0 has no smaller neighbour."""
    if isinstance(value, tuple):
        pairs = [one for one in tried if isinstance(one, tuple)]
        return any(_at_edge(part, set(parts)) for part, parts in zip(value, zip(*pairs, strict=False), strict=False))
    numbers = [one for one in tried if isinstance(one, int | float)]
    return len(numbers) > 1 and isinstance(value, float) and value != 0 and value in (min(numbers), max(numbers))


def _neighbours(
    chosen: Mapping[str, Any], tried: Sequence[Mapping[str, Any]], scores: Sequence[float]
) -> dict[str, dict[Any, float]]:
    """Return the scores of the neighbours in the grid."""
    neighbours: dict[str, dict[Any, float]] = {}
    for name in chosen:
        line = {
            _hashable(settings[name]): score
            for settings, score in zip(tried, scores, strict=True)
            if settings.keys() == chosen.keys()
            and all(settings[other] == chosen[other] for other in chosen if other != name)
        }
        if len(line) < 2:
            continue
        values = sorted(line, key=_sortable)
        at = values.index(_hashable(chosen[name]))
        neighbours[name] = {values[i]: line[values[i]] for i in (at - 1, at + 1) if 0 <= i < len(values)}
    return neighbours


def _hashable(value: Any) -> Any:
    return tuple(map(_hashable, value)) if isinstance(value, list | tuple) else value


def _table_row(entry: Entry, test: Pair | None, metric: Metric, evaluation: Evaluation) -> Row:
    learners = list(entry.records.values())
    areas = _finite(area(record, metric) for record in learners)
    difference = None if test is None or test.difference is None else -test.difference  # this entry minus the reference
    return Row(
        entry=entry,
        seeds=len(learners),
        diverged=_diverged(entry, entry.records),
        mean=_mean_of(areas),
        error=float(areas.std(ddof=1) / math.sqrt(len(areas))) if len(areas) > 1 else math.nan,
        first_quarter=_mean_of(quarter(record, metric, "first") for record in learners),
        last_quarter=_mean_of(quarter(record, metric, "last") for record in learners),
        learner_steps=sum(record.steps_taken for record in learners),
        difference=difference,
        p=None if test is None else test.p,
        p_holm=None if test is None else test.p_holm,
        evaluation=evaluation,
    )


def _pair(first: Entry, second: Entry, metric: Metric) -> Pair:
    """Return the mean difference over common seeds on which neither diverged, and its test."""
    common = sorted(set(first.records) & set(second.records))
    differences = _finite(area(first.records[seed], metric) - area(second.records[seed], metric) for seed in common)
    mean = float(differences.mean()) if len(differences) else None
    seeds = len(differences)
    reach = quantile(seeds - 1) * float(differences.std(ddof=1)) / math.sqrt(seeds) if seeds > 1 else None
    return Pair(first, second, seeds, mean, _paired_t(differences), reach=reach)


def _paired_t(differences: NDArray[np.float64]) -> float | None:
    if len(differences) < 2:
        return None
    if not differences.any():
        return 1.0
    spread = differences.std(ddof=1)
    if spread == 0:
        return 0.0
    return p_value(float(differences.mean()) / (spread / math.sqrt(len(differences))), len(differences) - 1)
