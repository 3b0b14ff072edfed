"""What an experiment is: a problem, a network, methods with the values to try, seeds and steps."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import product
from operator import index
from typing import Any, Literal

import numpy as np

from upgd.experiments.spec import architecture, defaults, grids
from upgd.experiments.spec.settings import MOST_LEARNERS, canonical, known
from upgd.methods import METHODS
from upgd.population import Learner
from upgd.streams import Stream, make

__all__ = ["Experiment", "Listed", "listed", "placeholders", "which_it_has"]

Values = tuple[Any, ...]
Grid = Mapping[str, Any]


@dataclass(frozen=True, init=False, repr=False)
class Experiment:
    """Every method with every combination of its values, every seed.

    Args:
        problem: a name that :func:`upgd.streams.make` knows.
        methods: names, or for each name its settings: a value, or a list of values to try.
        seeds: how many (0, 1, …), or which; by default as many as the paper has.
        steps: how many samples each learner sees; by default as in the paper.
        network: see :mod:`upgd.experiments.spec.architecture`; by default as in the paper.
        options: the problem's options, such as ``{"task_length": 500}``.
        grid: ``"short"``, each method's own short grid (:mod:`upgd.experiments.spec.grids`); ``"paper"``, the paper's values;
            or values for all methods that have the setting. Settings in ``methods`` take precedence. Methods given by name
            alone use ``"short"`` by default, and the part of it that has no default where ``grid`` leaves that out.

    Example:
        >>> experiment = Experiment("output-permuted-digits", ["sgd", "upgd"], grid={"lr": [0.1, 0.01]}, seeds=3, steps=1000)
        >>> len(experiment.learners())
        12
    """

    problem: str
    methods: Mapping[str, Mapping[str, Values]]
    seeds: tuple[int, ...]
    steps: int
    network: str
    options: Mapping[str, Any]

    def __init__(
        self,
        problem: str,
        methods: str | Iterable[str] | Mapping[str, Grid],
        *,
        seeds: int | Iterable[int] | None = None,
        steps: int | None = None,
        network: str | None = None,
        options: Mapping[str, Any] | None = None,
        grid: Literal["paper", "short"] | Grid | None = None,
    ) -> None:
        usual = defaults.defaults(problem)
        values = {
            "problem": problem,
            "methods": _values(problem, methods, grid),
            "seeds": _seeds(usual.seeds if seeds is None else seeds),
            "steps": _steps(usual.steps if steps is None else steps),
            "network": architecture.check(usual.network if network is None else network),
            "options": dict(options or {}),
        }
        for name, value in values.items():
            object.__setattr__(self, name, value)
        self._check_size()
        object.__setattr__(self, "_learners", self._made())  # says what is wrong with the settings, if something is

    def _check_size(self) -> None:
        """To make the learners of a number with a digit too many takes hours."""
        settings = sum(math.prod(len(choices) for choices in values.values()) for values in self.methods.values())
        count = settings * len(self.seeds)
        if count > MOST_LEARNERS:
            raise ValueError(
                f"seeds × settings are {len(self.seeds):,} × {settings:,} = {count:,} learners, more than the "
                f"{MOST_LEARNERS:,} that one experiment can have; use fewer seeds or values, or divide it into several"
            )

    def learners(self) -> tuple[Learner, ...]:
        """All learners: method by method, setting by setting, seed by seed; none twice."""
        made: tuple[Learner, ...] = self._learners  # type: ignore[attr-defined]  # made once: there may be 200,000
        return made

    def _made(self) -> tuple[Learner, ...]:
        settings = dict.fromkeys(
            Learner(method=method, seed=self.seeds[0], **dict(zip(values, chosen, strict=True)))
            for method, values in self.methods.items()
            for chosen in product(*values.values())
        )
        return tuple(learner.but(seed=seed) for learner in settings for seed in self.seeds)

    def stream(self) -> Stream:
        """The problem."""
        try:
            return make(self.problem, **self.options)
        except TypeError as error:  # an option that the problem does not have
            raise ValueError(str(error)) from error

    @property
    def learner_steps(self) -> int:
        """How much work it is."""
        return len(self.learners()) * self.steps

    def __repr__(self) -> str:
        return (
            f"<{self.problem}, {self.network}: {', '.join(self.methods)}; {len(self.learners()):,} learners "
            f"× {self.steps:,} steps>"
        )


class Listed(Experiment):
    """An experiment whose learners are listed one by one."""

    def __init__(self, problem: str, network: str, steps: int, options: Mapping[str, Any], learners: Iterable[Learner]):
        listed = tuple(dict.fromkeys(learners))
        values = {
            "problem": problem,
            "methods": {learner.method: {} for learner in listed},
            "seeds": tuple(dict.fromkeys(learner.seed for learner in listed)),
            "steps": steps,
            "network": network,
            "options": dict(options),
            "_learners": listed,
        }
        for name, value in values.items():
            object.__setattr__(self, name, value)


def _values(
    problem: str, methods: str | Iterable[str] | Mapping[str, Grid], shared: Literal["paper", "short"] | Grid | None
) -> dict[str, dict[str, Values]]:
    if isinstance(methods, str):
        methods = [methods]
    by_name = not isinstance(methods, Mapping)
    named: Mapping[str, Grid] = methods if isinstance(methods, Mapping) else {method: {} for method in methods}
    if shared is None and by_name:
        shared = "short"
    if not named:
        raise ValueError(f"methods must be one or more of {', '.join(METHODS)}")
    for method, own in named.items():
        if not isinstance(own, Mapping):
            raise TypeError(f"methods must give {method!r} settings by name, such as {{'lr': 0.01}}, not {own!r}")
    if shared not in (None, "paper", "short") and not isinstance(shared, Mapping):
        raise ValueError(
            f"grid must be 'short', 'paper', or values for each setting such as {{'lr': [0.1, 0.01]}}, not {shared!r}"
        )
    if isinstance(shared, Mapping):
        _check_shared(shared, named)
    values = {}
    for method, own in named.items():
        Learner(method=method, **placeholders(method))  # a word about an unknown method before all else
        if shared == "paper":
            common = defaults.grid(problem, method)
        elif shared == "short":
            common = grids.short(method)
        else:
            assert not isinstance(shared, str)
            common = (grids.needed(method) if by_name else {}) | which_it_has(method, shared or {})
        own = {canonical(name): choices for name, choices in own.items()}
        values[method] = {name: listed(name, choices) for name, choices in {**common, **own}.items()}
        for name in values[method]:
            if name not in known():
                raise ValueError(f"there is no setting {name!r} (of {method}); settings are {', '.join(known())}")
        if "lr" not in values[method]:
            raise ValueError(f"method {method!r} needs lr: one value, such as 0.01, or several to try")
    return values


def which_it_has(method: str, shared: Grid) -> dict[str, Any]:
    """Those of the settings that the method has; all of them for a method that does not exist."""
    renamed = {canonical(name): value for name, value in shared.items()}
    own = METHODS[method].settings if method in METHODS else renamed
    return {name: value for name, value in renamed.items() if name in own}


def _check_shared(shared: Grid, methods: Mapping[str, Any]) -> None:
    for name in map(canonical, shared):
        if name not in known():
            raise ValueError(f"there is no setting {name!r}; settings are {', '.join(known())}")
        if name != "lr" and not any(name in METHODS[method].settings for method in methods if method in METHODS):
            raise ValueError(f"none of {', '.join(methods)} has the setting {name!r}; leave it out")


def placeholders(method: str) -> dict[str, Any]:
    """Values for what a method needs, to try out others."""
    own = METHODS[method].settings if method in METHODS else {}
    return {name: setting.example for name, setting in own.items() if setting.default is ...}


def listed(name: str, choices: Any) -> Values:
    """A list or an array of values to try; a single value is a list of one, and so are two numbers of a setting such as
    ``betas``."""
    if isinstance(choices, np.ndarray | np.generic):
        choices = choices.tolist()
    if not isinstance(choices, list | tuple) or (
        name in known() and known()[name].pair and not any(isinstance(c, list | tuple) for c in choices)
    ):
        choices = (choices,)
    if not choices:
        raise ValueError(f"{name} needs one value or more, not an empty list")
    return tuple(tuple(choice) if isinstance(choice, list) else choice for choice in choices)


def _seeds(seeds: int | Iterable[int]) -> tuple[int, ...]:
    if not isinstance(seeds, Iterable):
        count = _whole(seeds) or 0
        if count > MOST_LEARNERS:
            raise ValueError(f"seeds must be {MOST_LEARNERS:,} at most, not {count:,}; use fewer")
        seeds = range(count)
    chosen = tuple(dict.fromkeys(map(_whole, seeds)))
    if not chosen or None in chosen:
        raise ValueError(f"seeds must be a number of at least 1, or a list of seeds, not {seeds!r}")
    return tuple(chosen)  # type: ignore[arg-type]  # none of them is None


def _steps(steps: int) -> int:
    number = _whole(steps)
    if number is None or number < 1:
        raise ValueError(f"steps must be an integer of at least 1, not {steps!r}")
    if number >= 2**63:
        raise ValueError(f"steps must be less than 2⁶³, which is as far as a store can count, not {steps!r}")
    return number


def _whole(number: Any) -> int | None:
    """An integer of Python's or NumPy's as an int; None for anything else."""
    try:
        return None if isinstance(number, bool) else index(number)
    except TypeError:
        return None
