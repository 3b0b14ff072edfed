"""Experiments from TOML files.

.. code-block:: toml

    problem = "output-permuted-digits"
    steps = 30_000
    seeds = 20                  # the number of seeds, or a list: [0, 1, 5]
    network = "100-50"

    [options]                   # of the problem
    task_length = 500

    [grid]                      # for every method that has the setting; or grid = "short", "paper"
    lr = [0.1, 0.03, 0.01]

    [methods.sgd]
    [methods.upgd]
    beta_utility = 0.9
    sigma = [0.01, 0.001]
"""

import os
import tomllib
from collections.abc import Callable
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from upgd.experiments.spec import architecture
from upgd.experiments.spec.declare import Experiment, listed, placeholders
from upgd.experiments.spec.settings import known
from upgd.methods import METHODS
from upgd.methods.registry import ALIASES, canonical
from upgd.population import Learner
from upgd.streams import make

__all__ = ["load"]


def load(path: str | os.PathLike[str]) -> Experiment:
    """Read an experiment from a TOML file.

    Args:
        path: The file.

    Raises:
        ValueError: If the file is not a valid experiment; the message names the file, the key, the value and what is
            allowed.

    Returns:
        The experiment, for :func:`upgd.experiments.run`.

    Example:
        >>> experiment = load("experiment.toml")  # doctest: +SKIP
        >>> upgd.experiments.run(experiment, store="upgd.db").table()  # doctest: +SKIP
    """
    path = Path(path)
    if path.exists() and not path.is_file():  # reading from a named pipe would block forever
        raise ValueError(f"{path} is not a regular file; give a TOML file")
    try:
        content = tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ValueError(f"there is no file {path}; check the path, or name a problem") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is not valid TOML: {error}") from error
    try:
        _check_keys("", content, _KEYS)
        for key, value in content.items():
            _KEYS[key](key, value)
        for key in ("problem", "methods"):
            if key not in content:
                raise ValueError(f"{key} is missing")
        _check_options(content["problem"], content.get("options", {}))
        _check_methods(content["methods"], content.get("grid", {}))
        return Experiment(content.pop("problem"), content.pop("methods"), **content)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error


def _check_keys(where: str, table: dict[str, Any], allowed: Any) -> None:
    for key in table:
        if key not in allowed:
            near = get_close_matches(key, allowed, n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"allowed are {', '.join(allowed)}"
            raise ValueError(f"there is no key {where + key!r} (= {table[key]!r}); {hint}")


def _text(key: str, value: Any) -> None:
    if not isinstance(value, str):
        raise ValueError(f"{key} must be a string in quotes, not {value!r}")


def _network(key: str, value: Any) -> None:
    _text(key, value)
    architecture.check(value)


def _steps(key: str, value: Any) -> None:
    if not _is_count(value) or value < 1:
        raise ValueError(f"{key} must be an integer of at least 1, not {value!r}")


def _seeds(key: str, value: Any) -> None:
    good = (
        all(_is_count(seed) for seed in value) if isinstance(value, list) and value else _is_count(value) and value >= 1
    )
    if not good:
        raise ValueError(f"{key} must be a number of seeds (20) or a list of seeds ([0, 1, 5]), not {value!r}")


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _options(key: str, value: Any) -> None:
    if not isinstance(value, dict):
        raise ValueError(f"{key} must be a table, such as [options] task_length = 500, not {value!r}")


def _grid(key: str, value: Any) -> None:
    if value not in ("short", "paper") and not isinstance(value, dict):
        raise ValueError(f'{key} must be "short", "paper" or a table such as [grid] lr = [0.1, 0.01], not {value!r}')


def _methods(key: str, value: Any) -> None:
    names = value if isinstance(value, list | dict) else []
    if not names or not all(isinstance(name, str) for name in names):
        raise ValueError(f"{key} must be a list of names, or tables such as [methods.upgd], not {value!r}")
    _check_keys("methods.", names if isinstance(names, dict) else dict.fromkeys(names), METHODS)
    for name in names:
        if isinstance(value, dict) and not isinstance(value[name], dict):
            raise ValueError(f"{key}.{name} must be a table of settings, not {value[name]!r}")


_KEYS: dict[str, Callable[[str, Any], None]] = {
    "problem": _text,
    "methods": _methods,
    "grid": _grid,
    "seeds": _seeds,
    "steps": _steps,
    "network": _network,
    "options": _options,
}


def _check_options(problem: str, options: dict[str, Any]) -> None:
    try:
        make(problem, **options)
    except (TypeError, ValueError) as error:
        raise ValueError(f"problem = {problem!r}, options = {options!r}: {error}") from error


def _check_methods(methods: dict[str, dict[str, Any]] | list[str], grid: dict[str, Any] | str) -> None:
    own = methods if isinstance(methods, dict) else {}
    for method, settings in own.items():
        _check_keys(f"methods.{method}.", settings, (*METHODS[method].settings, *ALIASES))
        for name, value in settings.items():
            _check_values(f"methods.{method}.{name}", method, name, value)
    if isinstance(grid, dict):
        _check_keys("grid.", grid, (*known(), *ALIASES))
        for name, value in grid.items():
            for method in methods:
                if canonical(name) in METHODS[method].settings:
                    _check_values(f"grid.{name}", method, name, value)


def _check_values(key: str, method: str, name: str, value: Any) -> None:
    for one in listed(name, value):
        try:
            Learner(**{"method": method, **placeholders(method), name: one})
        except (ValueError, TypeError) as error:
            raise ValueError(f"{key} = {value!r}: {error}") from error
