"""Records with curves that are easy to predict, without any learning."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np

from upgd.experiments import Experiment, Results
from upgd.experiments.spec.engine import ENGINE
from upgd.population import METHODS, Learner
from upgd.store import Key, Record


def record(
    method: str = "sgd",
    settings: Mapping[str, Any] | None = None,
    *,
    seed: int = 0,
    level: float = 0.5,
    windows: int = 4,
    window: int = 10,
    steps: int | None = None,
    problem: str = "output-permuted-digits",
    options: Mapping[str, Any] | None = None,
    network: str = "100-50",
    diverged_at: int | None = None,
    regression: bool = False,
    **rest: Any,
) -> Record:
    """A learner whose accuracy rises in a straight line to ``level`` plus a hundredth for each seed."""
    steps = windows * window if steps is None else steps
    given = {"lr": 0.1, **(settings or {})}
    if method in METHODS:
        needed = {name: 0.1 for name, setting in METHODS[method].settings.items() if setting.default is ...}
        given = Learner(method=method, **{**needed, **given}).settings()
    curve = np.linspace(level / 2, level, windows) + seed / 100
    if diverged_at is not None:
        curve[diverged_at // window :] = np.nan
    where = {"problem": problem, "options": options or {}, "network": network, "steps": steps}
    key = Key(**where, method=method, settings=given, seed=seed, engine=ENGINE)
    accuracy = None if regression else curve
    return Record(key, window=window, loss=1 - curve, accuracy=accuracy, diverged_at=diverged_at, seconds=1.5, **rest)


def seeds(count: int, *arguments: Any, **options: Any) -> Iterable[Record]:
    """The same learner with several seeds."""
    return [record(*arguments, seed=seed, **options) for seed in range(count)]


def results(experiment: Experiment, **of: Callable[[Learner], Any]) -> Results:
    """Return synthetic results of an experiment; ``of`` maps each argument of :func:`record` to a function of the learner."""
    where = {"problem": experiment.problem, "options": experiment.options, "network": experiment.network}
    return Results(
        [
            record(
                learner.method,
                learner.settings(),
                seed=learner.seed,
                steps=experiment.steps,
                window=experiment.steps // 4,
                **where,
                **{name: value(learner) for name, value in of.items()},
            )
            for learner in experiment.learners()
        ]
    )
