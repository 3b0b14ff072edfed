"""The paper's experiments from start to finish: screening, search, shortlist, final runs.

The search tries all settings with few seeds; an optional screening first excludes settings outside the paper's grid that are
bad in short runs. The best few of each curve are run again on fresh seeds to choose among them,
because the score on a single seed is biased in favour of the setting that it selects. The final runs use other seeds again.
All results go through a store: learners in the store are not computed again, so an interrupted reproduction can be resumed.
The search may use shorter runs than the later stages, but the best setting early need not be the best late.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from upgd.experiments.analysis.compare import Best, Comparison, Entry, Row, best, comparisons, ranked, rows
from upgd.experiments.analysis.results import Results
from upgd.experiments.execution.jobs import whole
from upgd.experiments.paper.catalogue import Arm, Panel
from upgd.experiments.paper.plans import Plan, plan
from upgd.experiments.spec.declare import Experiment, Listed
from upgd.store import Record, Store

__all__ = ["PAPERS", "Finding", "Plan", "Reproduction", "plan", "reproduce", "stored"]

#: Computes the missing learners of an experiment and returns its results, which may be incomplete.
Compute = Callable[[Experiment], Results]

#: The end of the name of a row about the best setting in the paper's grid.
PAPERS = ", paper's grid"


@dataclass(frozen=True)
class Finding:
    """The result of one curve.

    Attributes:
        arm: the curve.
        comparison: its problem, network and steps.
        best: the chosen setting, with its results in the search.
        tried: number of settings that it was chosen from, including those that were dropped after the screening.
        entry: the final runs; None if there are none yet.
        papers: the same for the best setting in the paper's grid, if a larger grid was searched and has a better one.
        screened: the results of the chosen setting in the screening; None if it was not screened.
    """

    arm: Arm
    comparison: Comparison
    best: Best
    tried: int
    entry: Entry | None
    papers: "Finding | None" = None
    screened: Best | None = None

    @property
    def settings(self) -> dict[str, Any]:
        """The chosen setting."""
        return _settings(self.best.entry)


@dataclass(frozen=True)
class Reproduction:
    """The results of a plan.

    Attributes:
        plan: the plan.
        findings: the results of each curve that has any.
        records: of all stages.
        unsearched: number of missing learners of the search.
        candidates: the settings of each curve's shortlist.
        unscreened: number of missing learners of the screening.
    """

    plan: Plan
    findings: Mapping[Arm, Finding]
    records: Sequence[Record]
    unsearched: int = 0
    candidates: Mapping[Arm, Sequence[Mapping[str, Any]]] = field(default_factory=dict)
    unscreened: int = 0

    @property
    def missing(self) -> int:
        """The number of missing final runs."""
        return sum(wanted - there for there, wanted in map(self.final_runs, self.plan.arms()))

    @property
    def unlisted(self) -> int:
        """The number of missing runs of the shortlist, of curves that have been searched completely."""
        plan = self.plan
        searched = {arm: own for arm, own in self.candidates.items() if self.searched(arm)}
        wanted = {digest for experiment in plan.again(searched) for digest in whole(experiment).digests}
        return len(wanted - {record.key.digest for record in self.records}) if plan.shortlist else 0

    def final_runs(self, arm: Arm) -> tuple[int, int]:
        """Return the number of final runs of a curve, and how many there should be."""
        finding, wanted = self.findings.get(arm), len(self.plan.seeds(arm))
        if finding is None:
            return 0, wanted
        ones = [one for one in (finding, finding.papers) if one is not None]
        return sum(len(one.entry.records) if one.entry else 0 for one in ones), wanted * len(ones)

    def searched(self, arm: Arm) -> bool:
        """Return whether all settings of a curve have been tried, in the search or in the screening."""
        return arm in self.findings and self.findings[arm].tried == len(self.plan.settings(arm))

    def panel(self, panel: Panel) -> tuple[Comparison | None, list[Finding]]:
        """Return the contents of a panel; None if there are none, or only curves that all panels of the study share."""
        found = [self.findings[arm] for arm in panel.arms if arm in self.findings and self.findings[arm].entry]
        if not any(finding.arm in self.plan.own(panel) for finding in found):
            found = []
        entries = tuple(finding.entry for finding in found if finding.entry)
        return (replace(found[0].comparison, entries=entries) if found else None), found

    def rows(self, panel: Panel) -> list[tuple[str, Row]]:
        """Return a panel's table: its curves by name, best first. The best setting in the paper's grid has a separate row if
        another setting is better."""
        comparison, found = self.panel(panel)
        if comparison is None:
            return []
        names = {id(finding.entry): finding.arm.name for finding in found}
        entries = list(comparison.entries)
        for finding in found:
            if finding.papers is not None and finding.papers.entry is not None:
                names[id(finding.papers.entry)] = f"{finding.arm.name}{PAPERS}"
                entries.append(finding.papers.entry)
        return [(names[id(row.entry)], row) for row in rows(comparison, entries)]


def reproduce(plan: Plan, compute: Compute, say: Callable[[str], None] = lambda text: None) -> Reproduction:
    """Carry out a plan.

    Args:
        plan: see :func:`plan`.
        compute: computes experiments, such as ``functools.partial(upgd.experiments.run, store="upgd.db")``.
        say: called with a description of the next stage.
    """
    screened = _computed(plan.screening(), compute, say, "screening")
    screenings = _complete_screenings(plan, screened)
    unscreened = sum(len(experiment.learners()) for experiment in plan.screening()) - len(screened)
    plan = plan.after_screening(
        {arm: [_settings(entry) for entry in ranked(one, arm.method)] for arm, one in screenings.items()}
    )
    swept = _computed(plan.sweep(), compute, say, "search")
    further: Plan | None = plan
    while further is not None:
        plan = further
        compared = {arm: _compared(plan.sweep([arm]), swept) for arm in plan.arms()}
        searches = {arm: found for arm, found in compared.items() if found is not None}
        settings = {arm: _settings(best(found, arm.method).entry) for arm, found in searches.items()}
        unsearched = sum(len(experiment.learners()) for experiment in plan.expected().sweep()) - len(swept)
        further = plan.climbed(settings) if not unsearched else None
        if further is not None:
            swept += _computed(_untried(further, plan), compute, say, "search around the best so far")
    pools = {arm: _pools(plan, arm, found) for arm, found in searches.items()}
    candidates = {arm: _distinct(one for pool in own for one in pool[: plan.shortlist]) for arm, own in pools.items()}
    retried: list[Record] = []
    if plan.shortlist:
        retried = _computed(plan.again(candidates), compute, say, "best settings on fresh seeds")
    chosen: dict[Arm, list[Settings]] = {}
    for arm, pools_of_arm in pools.items():
        # The best of all is chosen from both shortlists, since the settings of the paper's were tried, too.
        shortlists = [candidates[arm], *(pool[: plan.shortlist] for pool in pools_of_arm[1:])]
        both = zip(pools_of_arm, shortlists, strict=True)
        chosen[arm] = _distinct(_chosen(plan, arm, pool, listed, retried) for pool, listed in both)
    final = _computed(plan.final(chosen), compute, say, "final runs")
    findings = {}
    for arm, own in chosen.items():
        every, *papers = map(len, pools[arm])
        tried = [every + plan.dropped(arm), *papers]
        findings[arm] = _finding(plan, arm, searches[arm], own, tried, final, screenings.get(arm))
    records = {record.key.digest: record for record in [*screened, *swept, *retried, *final]}
    return Reproduction(plan, findings, list(records.values()), unsearched, candidates, unscreened)


Settings = dict[str, Any]


def _complete_screenings(plan: Plan, records: Sequence[Record]) -> dict[Arm, Comparison]:
    """Return the results of each curve's screening; nothing is chosen from a part of it."""
    found = {}
    for arm in plan.arms():
        for experiment in plan.screening([arm]):
            one = _compared([experiment], records)
            if one is not None and sum(len(entry.records) for entry in one.entries) == len(experiment.learners()):
                found[arm] = one
    return found


def _pools(plan: Plan, arm: Arm, search: Comparison) -> list[list[Settings]]:
    """Return the pools that a setting is chosen from, best first: all that was tried, and the part in the paper's grid."""
    tried = [_settings(entry) for entry in ranked(search, arm.method)]
    papers = plan.papers(arm)
    inside = [one for one in tried if any(all(one[n] == value for n, value in own.items()) for own in papers)]
    return [tried, inside] if inside else [tried]


def _chosen(
    plan: Plan, arm: Arm, pool: Sequence[Settings], shortlist: Sequence[Settings], retried: Sequence[Record]
) -> Settings:
    """Return the best of a pool: by the runs of the shortlist once there are some, before that by the search."""
    again = _compared(plan.again({arm: shortlist}), retried) if plan.shortlist else None
    return pool[0] if again is None else _settings(best(again, arm.method).entry)


def _distinct(settings: Iterable[Settings]) -> list[Settings]:
    found: list[Settings] = []
    for one in settings:
        if one not in found:
            found.append(one)
    return found


def _finding(
    plan: Plan,
    arm: Arm,
    search: Comparison,
    chosen: Sequence[Settings],
    tried: Sequence[int],
    final: Sequence[Record],
    screening: Comparison | None,
) -> Finding:
    """Return the result of the best setting and, if it differs, of the best one in the paper's grid."""
    first, *others = chosen
    runs = _compared(plan.final({arm: [first]}), final)
    stored = next(entry.settings for entry in search.of(arm.method) if _settings(entry) == first)
    screened = None
    if screening is not None and any(entry.settings == stored for entry in screening.of(arm.method)):
        screened = best(screening, arm.method, stored)
    return Finding(
        arm,
        runs or search,
        best(search, arm.method, stored),
        tried[0],
        runs.entries[0] if runs else None,
        _finding(plan, arm, search, others, tried[1:], final, screening) if others else None,
        screened,
    )


def _untried(further: Plan, plan: Plan) -> list[Experiment]:
    """Return the experiments of a plan's search that are not in another's."""
    tried = {digest for experiment in plan.sweep() for digest in whole(experiment).digests}
    left = ((experiment, whole(experiment).without(tried).learners) for experiment in further.sweep())
    return [Listed(e.problem, e.network, e.steps, e.options, learners) for e, learners in left if learners]


def _computed(
    experiments: Sequence[Experiment], compute: Compute, say: Callable[[str], None], what: str
) -> list[Record]:
    records: list[Record] = []
    for experiment in experiments:
        count = len(experiment.learners())
        if not count:  # all of it is still being screened
            continue
        say(
            f"{what}: {experiment.problem}, network {experiment.network}, {count:,} learners × {experiment.steps:,} steps"
        )
        records += compute(experiment).records
    return records


def _compared(experiments: Sequence[Experiment], records: Sequence[Record]) -> Comparison | None:
    """Return the records of one arm's experiment as a comparison; None if there are none."""
    (experiment,) = experiments
    wanted = whole(experiment).digests
    own = [record for record in records if record.key.digest in wanted]
    return comparisons(own)[0] if own else None


def _settings(entry: Entry) -> dict[str, Any]:
    return {name: tuple(value) if isinstance(value, list) else value for name, value in entry.settings.items()}


def stored(store: Store) -> Compute:
    """Return a function that computes nothing and returns the results in a store."""

    def compute(experiment: Experiment) -> Results:
        return Results(store.records(problem=experiment.problem, digests=whole(experiment).digests))

    return compute
