"""The paper's experiments, from the first step to the page: search with few seeds, best setting of each curve, final runs.

Everything is computed through a store: what is there is not computed again, so an interrupted reproduction goes on where it
was. The final runs have seeds that the search has not seen. The search may be shorter than they are; what is best early
need not be best late.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from operator import index
from typing import Any, NamedTuple

from upgd.experiments.analysis.compare import Best, Comparison, Entry, Row, best, comparisons, rows
from upgd.experiments.analysis.results import Results
from upgd.experiments.execution.jobs import Job, whole
from upgd.experiments.execution.running import pending
from upgd.experiments.paper.catalogue import GRIDS, SCALES, STUDIES, Arm, GridName, Panel, Scale, Study, settings_of
from upgd.experiments.spec.declare import Experiment, Listed
from upgd.experiments.spec.settings import MOST_LEARNERS
from upgd.population import Learner
from upgd.store import Record, Store

__all__ = ["Finding", "Place", "Plan", "Reproduction", "left", "plan", "reproduce", "stored", "study_named"]

#: Computes what an experiment lacks and gives its results; some may be missing.
Compute = Callable[[Experiment], Results]

#: The hyperparameters of which a search can be told to try only some values.
_NUMBERS = ("lr", "beta_utility", "sigma", "weight_decay", "eps")


class Place(NamedTuple):
    """Where learners run: what they can be compared in."""

    problem: str
    network: str
    steps: int


@dataclass(frozen=True)
class Plan:
    """A study at a scale.

    Attributes:
        study, scale: what, and how much of it.
        panels: which of the study's panels.
        grid: which settings are tried.
        only: of these hyperparameters only these values.
        sweep_seeds, final_seeds: how many learners for each setting that is tried, and for each best one.
        steps: how long each learner runs; None: as the scale says.
        sweep_steps: how long the learners of a problem run in the search, if that is less; as long where nothing is said.
        data: data sets that stand in for others.
        centres: where a climb has come to, by curve.
    """

    study: Study
    scale: Scale
    panels: tuple[Panel, ...]
    grid: GridName
    only: Mapping[str, tuple[float, ...]]
    sweep_seeds: int
    final_seeds: int | None
    steps: int | None
    sweep_steps: Mapping[str, int]
    data: Mapping[str, str]
    centres: Mapping[Arm, tuple[Mapping[str, Any], ...]] = field(default_factory=dict)

    def arms(self) -> list[Arm]:
        """All curves, none twice."""
        return self.study.arms(panel.key for panel in self.panels)

    def settings(self, arm: Arm) -> list[dict[str, Any]]:
        """The settings to try for an arm."""
        tried = settings_of(arm, self.grid, self.centres.get(arm, ()))
        wanted = [
            settings
            for settings in tried
            if all(settings[name] in values for name, values in self.only.items() if name in settings)
        ]
        if not wanted:
            values = {name: sorted({settings[name] for settings in tried}) for name in self.only if name in tried[0]}
            raise ValueError(f"only={dict(self.only)} leaves nothing to try of {arm.name}, which has {values}")
        return wanted

    def sweep(self, arms: Iterable[Arm] | None = None) -> list[Experiment]:
        """The search, of all curves or of some."""
        return self._experiments(
            {
                arm: [
                    Learner(method=arm.method, seed=seed, **settings)
                    for settings in self.settings(arm)
                    for seed in range(self.sweep_seeds)
                ]
                for arm in (self.arms() if arms is None else arms)
            },
            searching=True,
        )

    def climbed(self, best: Mapping[Arm, Mapping[str, Any]]) -> "Plan | None":
        """The plan that also looks around the best settings so far; None if there is nothing that has not been tried."""
        if self.grid != "climb":
            return None
        around = {arm: (*self.centres.get(arm, ()), settings) for arm, settings in best.items()}
        further = replace(self, centres={**self.centres, **around})
        return further if any(len(further.settings(arm)) > len(self.settings(arm)) for arm in best) else None

    def final(self, chosen: Mapping[Arm, Mapping[str, Any]]) -> list[Experiment]:
        """The runs of the best settings."""
        return self._experiments(
            {
                arm: [Learner(method=arm.method, seed=seed, **settings) for seed in self.seeds(arm)]
                for arm, settings in chosen.items()
            }
        )

    def seeds(self, arm: Arm) -> range:
        """The seeds of an arm's final runs: none that the search has seen."""
        from upgd.experiments.spec import defaults

        count = self.final_seeds or defaults.defaults(arm.problem).seeds
        return range(self.sweep_seeds, self.sweep_seeds + count)

    def place(self, arm: Arm, *, searching: bool = False) -> Place:
        """Where an arm runs, in the end or in the search."""
        problem, network = arm.problem, arm.network
        kind, _, data = problem.rpartition("-")
        stand_ins = {**self.scale.data, **self.data}
        if data in stand_ins:
            problem = f"{kind}-{stand_ins[data]}"
        if self.scale.network is not None and network != "linear":
            _, colon, activation = network.partition(":")
            network = self.scale.network + colon + activation
        steps = self.steps or self.scale.length(arm.problem)
        if searching:
            steps = min(steps, self.sweep_steps.get(arm.problem, steps))
        return Place(problem, network, steps)

    def _experiments(self, learners: Mapping[Arm, Sequence[Learner]], *, searching: bool = False) -> list[Experiment]:
        """Arms that run on the same problem and network together: a device is used well when it is full."""
        together: dict[Place, list[Learner]] = {}
        for arm, own in learners.items():
            together.setdefault(self.place(arm, searching=searching), []).extend(own)
        return [Listed(*place, self.scale.options, own) for place, own in together.items()]


@dataclass(frozen=True)
class Finding:
    """What came out for one curve.

    Attributes:
        arm: the curve.
        comparison: its problem, network and steps.
        best: what the search chose.
        entry: the final runs; None if there are none yet.
    """

    arm: Arm
    comparison: Comparison
    best: Best
    entry: Entry | None


@dataclass(frozen=True)
class Reproduction:
    """What a plan has found.

    Attributes:
        plan: what was to be done.
        findings: what came out for each curve that has something.
        records: of the search and of the final runs.
        unsearched: how many learners of the search there should be but are not.
    """

    plan: Plan
    findings: Mapping[Arm, Finding]
    records: Sequence[Record]
    unsearched: int = 0

    @property
    def missing(self) -> int:
        """How many final runs there should be but are not."""
        there = sum(len(finding.entry.records) for finding in self.findings.values() if finding.entry)
        return sum(len(self.plan.seeds(arm)) for arm in self.plan.arms()) - there

    def panel(self, panel: Panel) -> tuple[Comparison | None, list[Finding]]:
        """What a panel shows; None if there is nothing."""
        found = [self.findings[arm] for arm in panel.arms if arm in self.findings and self.findings[arm].entry]
        entries = tuple(finding.entry for finding in found if finding.entry)
        return (replace(found[0].comparison, entries=entries) if found else None), found

    def rows(self, panel: Panel) -> list[tuple[str, Row]]:
        """A panel's table: its curves by name, the best first."""
        comparison, found = self.panel(panel)
        names = {id(finding.entry): finding.arm.name for finding in found}
        return [(names[id(row.entry)], row) for row in rows(comparison, comparison.entries)] if comparison else []


def study_named(name: str) -> Study:
    """A study of the catalogue."""
    if name not in STUDIES:
        near = get_close_matches(name, STUDIES, n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"choose one of {', '.join(STUDIES)}"
        raise ValueError(f"there is no study {name!r}; {hint}")
    return STUDIES[name]


def plan(
    name: str,
    scale: str = "paper",
    *,
    panels: Sequence[str] = (),
    grid: str | None = None,
    only: Mapping[str, Sequence[float]] | None = None,
    sweep_seeds: int | None = None,
    final_seeds: int | None = None,
    steps: int | None = None,
    sweep_steps: int | Mapping[str, int] | None = None,
    data: Mapping[str, str] | None = None,
) -> Plan:
    """What to do for a study; whatever is not given is the scale's.

    ``sweep_steps`` is a number for all problems of the study, or numbers for some of them by name:
    ``{"output-permuted-cifar10": 300_000}``. A problem keeps its name where other data stand in for its own.

    Example:
        >>> [len(experiment.learners()) for experiment in plan("toy-changing-inputs", "smoke").sweep()]
        [38, 2]
    """
    study = study_named(name)
    if not study.panels:
        sweeps = [other.name for other in STUDIES.values() if other.panels]
        raise ValueError(f"there is no search in the study {name!r}; choose one of {', '.join(sweeps)}")
    if scale not in SCALES:
        raise ValueError(f"scale must be one of {', '.join(SCALES)}, not {scale!r}")
    if grid is not None and grid not in GRIDS:
        raise ValueError(f"grid must be one of {', '.join(GRIDS)}, not {grid!r}")
    for hyperparameter in only or {}:
        if hyperparameter not in _NUMBERS:
            raise ValueError(f"only must be about {', '.join(_NUMBERS)}, not {hyperparameter!r}")
    given = {"sweep_seeds": sweep_seeds, "final_seeds": final_seeds, "steps": steps}
    numbers = {what: _number(what, number) for what, number in given.items() if number is not None}
    size = SCALES[scale]
    known = {panel.key: panel for panel in study.panels}
    for key in panels:
        if key not in known:
            raise ValueError(f"{name} has no panel {key!r}; choose among {', '.join(known)}")
    return Plan(
        study=study,
        scale=size,
        panels=tuple(known[key] for key in panels or known),
        grid=grid or size.grid,
        only={hyperparameter: tuple(values) for hyperparameter, values in (only or {}).items()},
        sweep_seeds=numbers.get("sweep_seeds", size.sweep_seeds),
        final_seeds=numbers.get("final_seeds", size.final_seeds),
        steps=numbers.get("steps"),
        sweep_steps=_search_lengths(study, sweep_steps),
        data=dict(data or {}),
    )


def _search_lengths(study: Study, sweep_steps: int | Mapping[str, int] | None) -> dict[str, int]:
    if sweep_steps is None:
        return {}
    problems = study.problems()
    lengths = sweep_steps if isinstance(sweep_steps, Mapping) else dict.fromkeys(problems, sweep_steps)
    for problem in lengths:
        if problem not in problems:
            raise ValueError(
                f"sweep_steps: {study.name} has no problem {problem!r}; choose among {', '.join(problems)}"
            )
    return {problem: _number("sweep_steps", steps) for problem, steps in lengths.items()}


def _number(what: str, given: int) -> int:
    try:
        number = index(given)
    except TypeError:
        number = 0
    if number < 1:
        raise ValueError(f"{what} must be an integer of at least 1, not {given!r}")
    if number > (most := MOST_LEARNERS if what.endswith("seeds") else 2**63 - 1):
        raise ValueError(f"{what} must be {most:,} at most, not {given!r}; use fewer")
    return number


def reproduce(plan: Plan, compute: Compute, say: Callable[[str], None] = lambda text: None) -> Reproduction:
    """Carry out a plan.

    Args:
        plan: see :func:`plan`.
        compute: who computes, such as ``functools.partial(upgd.experiments.run, store="upgd.db")``.
        say: told what comes next.
    """
    swept = _computed(plan.sweep(), compute, say, "search")
    further: Plan | None = plan
    while further is not None:
        plan = further
        searches = {arm: _compared(plan.sweep([arm]), swept) for arm in plan.arms()}
        chosen = {arm: best(found, arm.method) for arm, found in searches.items() if found is not None}
        settings = {arm: _settings(one.entry) for arm, one in chosen.items()}
        unsearched = sum(len(experiment.learners()) for experiment in plan.sweep()) - len(swept)
        further = plan.climbed(settings) if not unsearched else None
        if further is not None:
            swept += _computed(_untried(further, plan), compute, say, "search around the best so far")
    final = _computed(plan.final(settings), compute, say, "final runs")
    findings = {}
    for arm, one in chosen.items():
        runs = _compared(plan.final({arm: settings[arm]}), final)
        comparison = runs or searches[arm]
        assert comparison is not None
        findings[arm] = Finding(arm, comparison, one, runs.entries[0] if runs else None)
    records = {record.key.digest: record for record in [*swept, *final]}
    return Reproduction(plan, findings, list(records.values()), unsearched)


def _untried(further: Plan, plan: Plan) -> list[Experiment]:
    """What a plan's search has and another's has not."""
    tried = {digest for experiment in plan.sweep() for digest in whole(experiment).digests}
    left = ((experiment, whole(experiment).without(tried).learners) for experiment in further.sweep())
    return [Listed(e.problem, e.network, e.steps, e.options, learners) for e, learners in left if learners]


def _computed(
    experiments: Sequence[Experiment], compute: Compute, say: Callable[[str], None], what: str
) -> list[Record]:
    records: list[Record] = []
    for experiment in experiments:
        count = len(experiment.learners())
        say(
            f"{what}: {experiment.problem}, network {experiment.network}, {count:,} learners × {experiment.steps:,} steps"
        )
        records += compute(experiment).records
    return records


def _compared(experiments: Sequence[Experiment], records: Sequence[Record]) -> Comparison | None:
    """Those of the records that are of one arm's experiment; None if there are none."""
    (experiment,) = experiments
    wanted = whole(experiment).digests
    own = [record for record in records if record.key.digest in wanted]
    return comparisons(own)[0] if own else None


def _settings(entry: Entry) -> dict[str, Any]:
    return {name: tuple(value) if isinstance(value, list) else value for name, value in entry.settings.items()}


def stored(store: Store) -> Compute:
    """Computes nothing: gives what a store has."""

    def compute(experiment: Experiment) -> Results:
        return Results(store.records(problem=experiment.problem, digests=whole(experiment).digests))

    return compute


def left(plan: Plan, store: Store, workers: int, device: str) -> tuple[list[Job], list[Job]]:
    """What a store lacks: the jobs of the search, and of the final runs. As long as the search is not finished, the first
    setting that it tries stands in for the best one: that takes as long."""

    def lacking(experiments: Iterable[Experiment]) -> list[Job]:
        return [job for experiment in experiments for job in pending(experiment, store, workers, device)]

    found = reproduce(plan, stored(store))
    search = lacking(found.plan.sweep())
    if search:
        chosen = {arm: plan.settings(arm)[0] for arm in plan.arms()}
    else:
        chosen = {arm: _settings(finding.best.entry) for arm, finding in found.findings.items()}
    return search, lacking(plan.final(chosen))
