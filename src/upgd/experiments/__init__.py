"""Experiments: declare, run, resume and compare them.

>>> import upgd.experiments as ex
>>> methods = {"upgd": {"lr": 0.03}, "sgd": {"lr": [0.1, 0.03]}}
>>> result = ex.run("output-permuted-digits", methods, seeds=2, steps=100, backend="torch")
>>> len(result), [best.entry.method for best in result.best()]
(6, ['upgd', 'sgd'])

``paper`` contains the paper's experiments and ``demo`` the demonstration; ``execution`` runs experiments, ``analysis``
compares results, and ``spec`` declares experiments. Each imports only those after it.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from upgd.experiments.analysis.results import Results
    from upgd.experiments.execution.confirming import confirm
    from upgd.experiments.execution.running import run
    from upgd.experiments.spec.declare import Experiment
    from upgd.experiments.spec.files import load

__all__ = ["Experiment", "Results", "confirm", "load", "run"]

# Reading results does not need torch, so names are resolved on first use.
_HOMES = {
    "Experiment": "spec.declare",
    "Results": "analysis.results",
    "confirm": "execution.confirming",
    "load": "spec.files",
    "run": "execution.running",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'upgd.experiments' has no attribute {name!r}")
    globals()[name] = value = getattr(import_module(f"upgd.experiments.{_HOMES[name]}"), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
