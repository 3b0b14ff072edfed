"""Records with curves that are easy to predict, without any learning."""

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

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
    network: str = "100-50",
    diverged_at: int | None = None,
    regression: bool = False,
    **rest: Any,
) -> Record:
    """A learner whose accuracy rises in a straight line to ``level`` plus a hundredth for each seed."""
    steps = windows * window if steps is None else steps
    given = {"lr": 0.1, **(settings or {})}
    if method in METHODS:
        needed = {name: 0.1 for name, value in METHODS[method].settings.items() if value is ...}
        given = Learner(method=method, **{**needed, **given}).settings()
    curve = np.linspace(level / 2, level, windows) + seed / 100
    if diverged_at is not None:
        curve[diverged_at // window :] = np.nan
    key = Key(problem=problem, network=network, method=method, settings=given, seed=seed, steps=steps)
    accuracy = None if regression else curve
    return Record(key, window=window, loss=1 - curve, accuracy=accuracy, diverged_at=diverged_at, seconds=1.5, **rest)


def seeds(count: int, *arguments: Any, **options: Any) -> Iterable[Record]:
    """The same learner with several seeds."""
    return [record(*arguments, seed=seed, **options) for seed in range(count)]
