"""Plans of the paper's experiments: which learners each stage of a reproduction runs."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from functools import partial
from math import ceil
from operator import index
from typing import Any, NamedTuple

from upgd.experiments.paper.catalogue import GRIDS, SCALES, STUDIES, Arm, GridName, Panel, Scale, Study, settings_of
from upgd.experiments.spec import defaults
from upgd.experiments.spec.declare import Experiment, Listed
from upgd.experiments.spec.settings import MOST_LEARNERS
from upgd.population import Learner

__all__ = ["Place", "Plan", "plan", "study_named"]

#: Hyperparameters whose values can be restricted in a search.
_NUMBERS = ("lr", "beta_utility", "sigma", "weight_decay", "eps")
#: The fraction of screened settings that the search runs, if it is not given.
_KEEP = 0.25


class Place(NamedTuple):
    """The problem, network and length of learners, which must agree for a comparison."""

    problem: str
    network: str
    steps: int


@dataclass(frozen=True)
class Plan:
    """A study at a scale.

    Attributes:
        study, scale: the study and its scale.
        panels: the panels of the study.
        grid: the settings to try.
        only: restricts these hyperparameters to these values.
        sweep_seeds, final_seeds: number of seeds per setting in the search, and per best setting.
        shortlist, shortlist_seeds: number of best settings to run again, and of seeds for each; 0 for none.
        steps: number of steps per learner; None for that of the scale.
        sweep_steps: number of steps in the search by problem, if fewer than ``steps``.
        data: substitutes for data sets.
        methods: restricts the study to these methods; empty for all.
        centres: the centres of a climb so far, by curve.
        screen: number of steps by problem for which settings outside the paper's grid run before the search.
        keep: the fraction of them, by curve, that the search then runs.
        kept: these settings, of curves whose screening is complete.
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
    shortlist: int
    shortlist_seeds: int
    methods: tuple[str, ...] = ()
    centres: Mapping[Arm, tuple[Mapping[str, Any], ...]] = field(default_factory=dict)
    screen: Mapping[str, int] = field(default_factory=dict)
    keep: float = _KEEP
    kept: Mapping[Arm, tuple[Mapping[str, Any], ...]] = field(default_factory=dict)

    def arms(self) -> list[Arm]:
        """All curves, without duplicates."""
        arms = self.study.arms(panel.key for panel in self.panels)
        return [arm for arm in arms if not self.methods or arm.method in self.methods]

    def own(self, panel: Panel) -> list[Arm]:
        """Return the curves of a panel that are not in all panels of the study, or all if there are no such curves."""
        arms = [arm for arm in self.arms() if arm in panel.arms]
        return [arm for arm in arms if not all(arm in other.arms for other in self.study.panels)] or arms

    def problems(self) -> list[str]:
        """The problems of the learners, without duplicates."""
        return list(dict.fromkeys(self.place(arm).problem for arm in self.arms()))

    def settings(self, arm: Arm) -> list[dict[str, Any]]:
        """Return the settings to try for an arm."""
        tried = settings_of(arm, self.grid, self.centres.get(arm, ()))
        wanted = self._limited(tried)
        if not wanted:
            raise ValueError(self._no_setting(arm, tried))
        return wanted

    def _limited(self, tried: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
        """Return the settings that ``only`` does not exclude."""
        limits = self.only.items()
        return [one for one in tried if all(one[name] in values for name, values in limits if name in one)]

    def _no_setting(self, arm: Arm, tried: Sequence[Mapping[str, Any]]) -> str:
        """Return the message of an error: ``only`` excludes all settings of a curve."""
        grid = {name: sorted({settings[name] for settings in tried}) for name in self.only if name in tried[0]}
        enough = {
            name: (*given, *([] if {*own} & {*given} else [min(own, key=lambda value: abs(value - given[0]))]))
            for name, own, given in ((name, own, self.only[name]) for name, own in grid.items())
        }
        return (
            f"only {_assigned(self.only)} leaves no setting of {arm.name!r}, which tries {_assigned(grid)}; name values of "
            f"every curve, such as {_assigned({**self.only, **enough})}"
        )

    def screened(self, arm: Arm) -> list[dict[str, Any]]:
        """Return the settings to try that are screened before the search; none if it would keep all of them."""
        if arm.problem not in self.screen:
            return []
        papers = self.papers(arm)
        others = [one for one in self.settings(arm) if one not in papers]
        return others if self._passing(others) < len(others) else []

    def _passing(self, screened: Sequence[Any]) -> int:
        """Return how many of the screened settings of a curve the search runs."""
        # Rounded because 0.07 × 100 is a little more than 7.
        return max(ceil(round(self.keep * len(screened), 9)), self.shortlist, 1)

    def after_screening(self, ranked: Mapping[Arm, Sequence[Mapping[str, Any]]]) -> "Plan":
        """Return the plan whose search includes the best of the screened settings.

        Args:
            ranked: the screened settings of curves whose screening is complete, best first.
        """
        return replace(
            self, kept={**self.kept, **{arm: tuple(own[: self._passing(own)]) for arm, own in ranked.items()}}
        )

    def expected(self) -> "Plan":
        """Return the plan with a search as large as after the screening: of curves whose screening is not complete, the
        first settings stand for the best ones."""
        screened = {arm: self.screened(arm) for arm in self.arms() if arm not in self.kept}
        return self.after_screening({arm: own for arm, own in screened.items() if own})

    def dropped(self, arm: Arm) -> int:
        """Return the number of settings that the screening has excluded from the search."""
        return len(self.screened(arm)) - len(self.kept[arm]) if arm in self.kept else 0

    def swept(self, arm: Arm) -> list[Mapping[str, Any]]:
        """Return the settings of the search: without those that are dropped, or may be dropped while the screening is not
        complete."""
        screened = self.screened(arm)
        return [*(one for one in self.settings(arm) if one not in screened), *self.kept.get(arm, ())]

    def screening(self, arms: Iterable[Arm] | None = None) -> list[Experiment]:
        """Return the screening of all curves or of some; nothing of curves without screening."""
        settings = {arm: self.screened(arm) for arm in (self.arms() if arms is None else arms)}
        return self._experiments(
            self._on_seeds_of_the_search({arm: own for arm, own in settings.items() if own}),
            lambda arm: self.place(arm)._replace(steps=self.screen[arm.problem]),
        )

    def sweep(self, arms: Iterable[Arm] | None = None) -> list[Experiment]:
        """Return the search of all curves or of some."""
        settings = {arm: self.swept(arm) for arm in (self.arms() if arms is None else arms)}
        return self._experiments(self._on_seeds_of_the_search(settings), partial(self.place, searching=True))

    def _on_seeds_of_the_search(self, settings: Mapping[Arm, Sequence[Mapping[str, Any]]]) -> dict[Arm, list[Learner]]:
        return {
            arm: [Learner(method=arm.method, seed=seed, **one) for one in own for seed in range(self.sweep_seeds)]
            for arm, own in settings.items()
        }

    def climbed(self, best: Mapping[Arm, Mapping[str, Any]]) -> "Plan | None":
        """Return the plan that also searches around the best settings so far; None if all of that has been tried."""
        if self.grid != "climb":
            return None
        around = {arm: (*self.centres.get(arm, ()), settings) for arm, settings in best.items()}
        further = replace(self, centres={**self.centres, **around})
        return further if any(len(further.settings(arm)) > len(self.settings(arm)) for arm in best) else None

    def papers(self, arm: Arm) -> list[dict[str, Any]]:
        """Return the settings to try that are in the paper's grid, if this grid is larger; otherwise none."""
        return self._limited(settings_of(arm, "paper")) if self.grid == "extended" else []

    def again(self, candidates: Mapping[Arm, Sequence[Mapping[str, Any]]]) -> list[Experiment]:
        """Return the runs of the shortlist, on seeds that the search did not use."""
        seeds = range(self.sweep_seeds, self.sweep_seeds + self.shortlist_seeds)
        return self._experiments(
            {
                arm: [Learner(method=arm.method, seed=seed, **settings) for settings in own for seed in seeds]
                for arm, own in candidates.items()
            }
        )

    def final(self, chosen: Mapping[Arm, Sequence[Mapping[str, Any]]]) -> list[Experiment]:
        """Return the runs of the best settings."""
        return self._experiments(
            {
                arm: [Learner(method=arm.method, seed=seed, **one) for one in settings for seed in self.seeds(arm)]
                for arm, settings in chosen.items()
            }
        )

    def seeds(self, arm: Arm) -> range:
        """Return the seeds of an arm's final runs, which neither the search nor the shortlist uses."""
        count = self.final_seeds or defaults.defaults(arm.problem).seeds
        first = self.sweep_seeds + (self.shortlist_seeds if self.shortlist else 0)
        return range(first, first + count)

    def place(self, arm: Arm, *, searching: bool = False) -> Place:
        """Return the place of an arm in the final runs or in the search."""
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

    def _experiments(
        self, learners: Mapping[Arm, Sequence[Learner]], place: Callable[[Arm], Place] | None = None
    ) -> list[Experiment]:
        """Group arms with the same place, by default that of the final runs, into experiments, which fills devices better."""
        together: dict[Place, list[Learner]] = {}
        for arm, own in learners.items():
            together.setdefault((place or self.place)(arm), []).extend(own)
        options = {**self.study.options, **self.scale.options}
        return [Listed(*place, options, own) for place, own in together.items()]


def _assigned(values: Mapping[str, Iterable[float]]) -> str:
    """Return values as ``--only`` takes them."""
    return " ".join(f"{name}={','.join(f'{value:g}' for value in own)}" for name, own in values.items())


def study_named(name: str) -> Study:
    """Return a study of the catalogue."""
    if name not in STUDIES:
        near = get_close_matches(name, STUDIES, n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"choose one of {', '.join(STUDIES)}"
        raise ValueError(f"there is no experiment {name!r}; {hint}")
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
    shortlist: int | None = None,
    shortlist_seeds: int | None = None,
    steps: int | None = None,
    sweep_steps: int | Mapping[str, int] | None = None,
    data: Mapping[str, str] | None = None,
    methods: Sequence[str] = (),
    screen: int | Mapping[str, int] | None = None,
    keep: float | None = None,
) -> Plan:
    """Return the plan of a study; omitted arguments have the values of the scale.

    ``sweep_steps`` is a number for all problems of the study, or numbers for some of them by name:
    ``{"output-permuted-cifar10": 300_000}``. A problem keeps its name if another data set is substituted for its own.

    With ``screen``, a number of steps like ``sweep_steps``, settings of an extended grid that are not in the paper's run for
    only so many steps. The search then tries the best of them: of each curve the fraction ``keep`` (default: 0.25), but at
    least as many as the shortlist has.

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
            raise ValueError(f"only must name one of {', '.join(_NUMBERS)}, not {hyperparameter!r}")
    given = {
        "sweep_seeds": sweep_seeds,
        "final_seeds": final_seeds,
        "shortlist_seeds": shortlist_seeds,
        "steps": steps,
        "shortlist": shortlist or None,
    }
    numbers = {what: _number(what, number) for what, number in given.items() if number is not None}
    size = SCALES[scale]
    chosen = Plan(
        study=study,
        scale=size,
        panels=_panels(study, panels, methods),
        grid=grid or size.grid,
        only={hyperparameter: tuple(values) for hyperparameter, values in (only or {}).items()},
        sweep_seeds=numbers.get("sweep_seeds", size.sweep_seeds),
        final_seeds=numbers.get("final_seeds", size.final_seeds),
        steps=numbers.get("steps"),
        sweep_steps=_lengths("sweep_steps", study, sweep_steps),
        data=dict(data or {}),
        shortlist=0 if shortlist == 0 else numbers.get("shortlist", size.shortlist),
        shortlist_seeds=numbers.get("shortlist_seeds", size.shortlist_seeds),
        methods=tuple(methods),
        screen=_lengths("screen", study, screen),
        keep=_KEEP if keep is None else _fraction(keep),
    )
    if screen is None and keep is not None:
        raise ValueError(
            f"keep={keep!r} applies to screened settings only; remove it, or set screen to a number of steps"
        )
    _check_screening(chosen)
    return chosen


def _check_screening(plan: Plan) -> None:
    """Raise ValueError if the screening of a plan is not possible."""
    if plan.screen and plan.grid != "extended":
        raise ValueError(
            f"screen applies to the grid 'extended' only, not to {plan.grid!r}; choose that grid, or leave screen out"
        )
    for arm in plan.arms():
        length, steps = plan.place(arm, searching=True).steps, plan.screen.get(arm.problem, 0)
        if steps >= length:
            raise ValueError(
                f"screen must be less than the {length:,} steps of the search on {arm.problem}, not {steps:,}; use fewer"
            )


def _panels(study: Study, keys: Sequence[str], methods: Sequence[str]) -> tuple[Panel, ...]:
    """Return some panels of a study, or all, after checking that they have these methods."""
    known = {panel.key: panel for panel in study.panels}
    for key in keys:
        if key not in known:
            raise ValueError(f"{study.name} has no panel {key!r}; choose among {', '.join(known)}")
    chosen = tuple(known[key] for key in keys or known)
    shown = dict.fromkeys(arm.method for panel in chosen for arm in panel.arms)
    for method in methods:
        if method not in shown:
            raise ValueError(f"{study.name} has no method {method!r}; choose among {', '.join(shown)}")
    return chosen


def _lengths(what: str, study: Study, given: int | Mapping[str, int] | None) -> dict[str, int]:
    """Return numbers of steps by problem."""
    if given is None:
        return {}
    problems = study.problems()
    lengths = given if isinstance(given, Mapping) else dict.fromkeys(problems, given)
    for problem in lengths:
        if problem not in problems:
            raise ValueError(f"{what}: {study.name} has no problem {problem!r}; choose among {', '.join(problems)}")
    return {problem: _number(what, steps) for problem, steps in lengths.items()}


def _fraction(keep: Any) -> float:
    if not (isinstance(keep, int | float) and 0 < keep <= 1):
        raise ValueError(f"keep must be a number above 0 and at most 1, not {keep!r}; use 0.25 for a quarter")
    return float(keep)


def _number(what: str, given: int) -> int:
    try:
        number = index(given)
    except TypeError:
        number = 0
    if number < 1:
        raise ValueError(f"{what} must be an integer of at least 1, not {given!r}")
    if number > (most := MOST_LEARNERS if what.endswith("seeds") else 2**63 - 1):
        raise ValueError(f"{what} must be at most {most:,}, not {given!r}; use fewer")
    return number
