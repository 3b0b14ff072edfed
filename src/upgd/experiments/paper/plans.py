"""Plans of the paper's experiments: which learners each stage of a reproduction runs."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
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

    def sweep(self, arms: Iterable[Arm] | None = None) -> list[Experiment]:
        """Return the search of all curves or of some."""
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

    def _experiments(self, learners: Mapping[Arm, Sequence[Learner]], *, searching: bool = False) -> list[Experiment]:
        """Group arms with the same problem and network into experiments, which fills devices better."""
        together: dict[Place, list[Learner]] = {}
        for arm, own in learners.items():
            together.setdefault(self.place(arm, searching=searching), []).extend(own)
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
) -> Plan:
    """Return the plan of a study; omitted arguments have the values of the scale.

    ``sweep_steps`` is a number for all problems of the study, or numbers for some of them by name:
    ``{"output-permuted-cifar10": 300_000}``. A problem keeps its name if another data set is substituted for its own.

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
    return Plan(
        study=study,
        scale=size,
        panels=_panels(study, panels, methods),
        grid=grid or size.grid,
        only={hyperparameter: tuple(values) for hyperparameter, values in (only or {}).items()},
        sweep_seeds=numbers.get("sweep_seeds", size.sweep_seeds),
        final_seeds=numbers.get("final_seeds", size.final_seeds),
        steps=numbers.get("steps"),
        sweep_steps=_search_lengths(study, sweep_steps),
        data=dict(data or {}),
        shortlist=0 if shortlist == 0 else numbers.get("shortlist", size.shortlist),
        shortlist_seeds=numbers.get("shortlist_seeds", size.shortlist_seeds),
        methods=tuple(methods),
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
        raise ValueError(f"{what} must be at most {most:,}, not {given!r}; use fewer")
    return number
