"""The declaration of an experiment: a problem, a network, methods with values to try, seeds and steps."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import product
from operator import index
from typing import Any, Literal

import numpy as np

from upgd.experiments.spec import architecture, defaults, grids
from upgd.experiments.spec.settings import MOST_LEARNERS, known
from upgd.methods import METHODS
from upgd.methods.registry import canonical
from upgd.population import Learner
from upgd.streams import Stream, make, registry

__all__ = ["Experiment", "Listed", "check_shared", "different", "listed", "placeholders", "stream_of", "which_it_has"]

Values = tuple[Any, ...]
Grid = Mapping[str, Any]


@dataclass(frozen=True, init=False, repr=False)
class Experiment:
    """An experiment: every method with every combination of its values and every seed.

    Args:
        problem: A name known to :func:`upgd.streams.make`.
        methods: Names, or a dict of names and settings; a setting is a value or a list of values to try.
        seeds: Number of seeds (0, 1, …), or a list of seeds. Default: as many as in the paper.
        steps: Number of samples per learner. Default: as in the paper.
        network: See :mod:`upgd.experiments.spec.architecture`. Default: as in the paper.
        options: Options of the problem, such as ``{"task_length": 500}``.
        grid: ``"short"``, each method's short grid (:mod:`upgd.experiments.spec.grids`); ``"paper"``, the paper's values; or
            values for all methods that have the setting. Settings in ``methods`` take precedence. Default for methods given
            by name only: ``"short"``; if ``grid`` lacks a required setting, its values in the short grid are used.

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
        registry.factory(problem)  # reports an unknown problem first
        usual = defaults.defaults(problem)
        values = {
            "problem": problem,
            "methods": _values(problem, methods, grid),
            "seeds": _seeds(usual.seeds if seeds is None else seeds),
            "steps": _steps(usual.steps if steps is None else steps),
            "network": architecture.check(usual.network if network is None else network),
            "options": different(problem, options or {}),
        }
        for name, value in values.items():
            object.__setattr__(self, name, value)
        self._check_size()
        object.__setattr__(self, "_learners", self._made())  # validates the settings

    def _check_size(self) -> None:
        """Raise ValueError if there are too many learners, which would take hours to create."""
        settings = sum(math.prod(len(choices) for choices in values.values()) for values in self.methods.values())
        count = settings * len(self.seeds)
        if count > MOST_LEARNERS:
            raise ValueError(
                f"seeds × settings are {len(self.seeds):,} × {settings:,} = {count:,} learners, more than the limit of "
                f"{MOST_LEARNERS:,} per experiment; use fewer seeds or values, or split the experiment"
            )

    def learners(self) -> tuple[Learner, ...]:
        """Return all learners: by method, setting and seed, without duplicates."""
        made: tuple[Learner, ...] = self._learners  # type: ignore[attr-defined]  # cached: there may be 200,000
        return made

    def _made(self) -> tuple[Learner, ...]:
        settings = dict.fromkeys(
            Learner(method=method, seed=self.seeds[0], **dict(zip(values, chosen, strict=True)))
            for method, values in self.methods.items()
            for chosen in product(*values.values())
        )
        return tuple(learner.but(seed=seed) for learner in settings for seed in self.seeds)

    def stream(self) -> Stream:
        """Return the problem's stream."""
        return stream_of(self.problem, self.options)

    @property
    def learner_steps(self) -> int:
        """The number of learner-steps."""
        return len(self.learners()) * self.steps

    def __repr__(self) -> str:
        return (
            f"<{self.problem}, {self.network}: {', '.join(self.methods)}; {len(self.learners()):,} learners "
            f"× {self.steps:,} steps>"
        )


class Listed(Experiment):
    """An experiment with an explicit list of learners."""

    def __init__(self, problem: str, network: str, steps: int, options: Mapping[str, Any], learners: Iterable[Learner]):
        listed = tuple(dict.fromkeys(learners))
        values = {
            "problem": problem,
            "methods": {learner.method: {} for learner in listed},
            "seeds": tuple(dict.fromkeys(learner.seed for learner in listed)),
            "steps": steps,
            "network": network,
            "options": different(problem, options),
            "_learners": listed,
        }
        for name, value in values.items():
            object.__setattr__(self, name, value)


def stream_of(problem: str, options: Mapping[str, Any]) -> Stream:
    """Return a problem's stream, or raise ValueError for an unknown option."""
    try:
        return make(problem, **options)
    except TypeError as error:
        raise ValueError(str(error)) from error


def different(problem: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of a problem that differ from its defaults, so that equal runs have equal keys in a store.

    Example:
        >>> different("toy-changing-inputs", {"amplitude": 1, "task_length": 500})
        {'task_length': 500}
    """
    defaults = registry.defaults(problem)
    return {name: value for name, value in options.items() if not (name in defaults and _same(value, defaults[name]))}


def _same(value: Any, default: Any) -> bool:
    """Return whether an option has its default value. True and 1 are equal but not the same option."""
    scalar = isinstance(value, str | int | float | np.generic)
    return scalar and isinstance(value, bool) == isinstance(default, bool) and bool(value == default)


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
        check_shared(shared, named)
    values = {}
    for method, own in named.items():
        Learner(method=method, **placeholders(method))  # reports an unknown method first
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
    """Return the settings that the method has; all of them if the method does not exist."""
    renamed = {canonical(name): value for name, value in shared.items()}
    own = METHODS[method].settings if method in METHODS else renamed
    return {name: value for name, value in renamed.items() if name in own}


def check_shared(shared: Grid, methods: Iterable[str]) -> None:
    """Raise ValueError for a setting that none of the methods has."""
    methods = list(methods)
    for name in map(canonical, shared):
        if name not in known():
            raise ValueError(f"there is no setting {name!r}; settings are {', '.join(known())}")
        if name != "lr" and not any(name in METHODS[method].settings for method in methods if method in METHODS):
            raise ValueError(f"none of {', '.join(methods)} has the setting {name!r}; remove it")


def placeholders(method: str) -> dict[str, Any]:
    """Return values for the required settings of a method, for validating other settings."""
    own = METHODS[method].settings if method in METHODS else {}
    return {name: setting.example for name, setting in own.items() if setting.default is ...}


def listed(name: str, choices: Any) -> Values:
    """Return a list or an array of values to try as a tuple. A single value, or two numbers of a setting such as ``betas``,
    is a tuple of one."""
    if isinstance(choices, np.ndarray | np.generic):
        choices = choices.tolist()
    if not isinstance(choices, list | tuple) or (
        name in known() and known()[name].pair and not any(isinstance(c, list | tuple) for c in choices)
    ):
        choices = (choices,)
    if not choices:
        raise ValueError(f"{name} needs at least one value, not an empty list")
    return tuple(tuple(choice) if isinstance(choice, list) else choice for choice in choices)


def _seeds(seeds: int | Iterable[int]) -> tuple[int, ...]:
    if not isinstance(seeds, Iterable):
        count = _whole(seeds) or 0
        if count > MOST_LEARNERS:
            raise ValueError(f"seeds must be at most {MOST_LEARNERS:,}, not {count:,}; use fewer")
        chosen: tuple[int | None, ...] = tuple(range(count))
    else:
        chosen = tuple(dict.fromkeys(map(_whole, seeds)))
    if not chosen or None in chosen:
        raise ValueError(f"seeds must be a number of at least 1, or a list of seeds, not {seeds!r}")
    return tuple(chosen)  # type: ignore[arg-type]  # None was excluded above


def _steps(steps: int) -> int:
    number = _whole(steps)
    if number is None or number < 1:
        raise ValueError(f"steps must be an integer of at least 1, not {steps!r}")
    if number >= 2**63:
        raise ValueError(f"steps must be less than 2⁶³, the limit of a store, not {steps!r}")
    return number


def _whole(number: Any) -> int | None:
    """Convert a Python or NumPy integer to int; return None for anything else."""
    try:
        return None if isinstance(number, bool) else index(number)
    except TypeError:
        return None
