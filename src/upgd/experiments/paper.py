"""The paper's experiments: networks, lengths, grids, and the best settings known from public sources.

Every method gets the same values of a hyperparameter that it shares with others, and only hyperparameters that it has.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from upgd.methods import METHODS

__all__ = ["BEST_KNOWN", "FEATURES", "PROBLEMS", "Defaults", "defaults", "grid", "known", "values_known"]

Values = tuple[Any, ...]

#: The toy problems and stationary MNIST. The paper lists weight decay for the methods that have it; 0 is plain UPGD.
_STATIONARY = {
    "lr": (0.1, 0.01, 0.001, 0.0001),
    "beta_utility": (0.0, 0.9, 0.99, 0.999),
    "sigma": (1.0, 0.1, 0.01, 0.001, 0.0001),
    "weight_decay": (0.0, 0.1, 0.01, 0.001),
}
_PERMUTED = {
    "lr": (0.01, 0.001, 0.0001),
    "beta_utility": (0.999, 0.9999),
    "sigma": (0.01, 0.1, 1.0),
    "weight_decay": (0.0, 0.1, 0.01, 0.001, 0.0001),
}
#: Not the paper's: the embedded digits are small and quick, so the grid is finer where it matters.
_DIGITS = {
    "lr": (0.1, 0.03, 0.01, 0.003, 0.001),
    "beta_utility": (0.9, 0.99, 0.999),
    "sigma": (0.1, 0.01, 0.001),
    "weight_decay": (0.0, 0.01, 0.001, 0.0001),
}
_ADAMW = {
    "betas": tuple((beta1, beta2) for beta1 in (0.0, 0.9) for beta2 in (0.99, 0.999, 0.9999)),
    "eps": (1e-4, 1e-8, 1e-16),
}
_UPS = {
    "lr": (1.0,),
    "sigma": (0.1, 0.01, 0.001, 0.0001, 0.00001),
    "beta_utility": (0.0, 0.9, 0.99, 0.999, 0.9999),
}


@dataclass(frozen=True)
class Defaults:
    """What the paper uses for a problem.

    Attributes:
        network: see :mod:`upgd.experiments.architecture`.
        steps: how long a run is.
        seeds: how many runs.
        grid: values for every hyperparameter that a method may have.
    """

    network: str
    steps: int
    seeds: int
    grid: Mapping[str, Values]


PROBLEMS: dict[str, Defaults] = {
    "toy-changing-inputs": Defaults("300-150:identity", 1_000_000, 20, _STATIONARY),
    "toy-changing-outputs": Defaults("300-150:identity", 1_000_000, 20, _STATIONARY),
    "stationary-mnist": Defaults("300-150", 1_000_000, 20, _STATIONARY),
    "input-permuted-mnist": Defaults("300-150", 1_000_000, 20, _PERMUTED),
    "output-permuted-emnist": Defaults("300-150", 1_000_000, 20, _PERMUTED),
    "output-permuted-cifar10": Defaults("conv", 1_000_000, 10, _PERMUTED),
    "stationary-digits": Defaults("100-50", 30_000, 20, _DIGITS),
    "input-permuted-digits": Defaults("100-50", 30_000, 20, _DIGITS),
    "output-permuted-digits": Defaults("100-50", 30_000, 20, _DIGITS),
}

_UPGD_MNIST = {"lr": 0.01, "sigma": 0.1, "beta_utility": 0.9999, "weight_decay": 0.01}

#: Best settings known from public sources: a place to start, not a result of this package. Where a source gives σ as a
#: range, for half the noise, the larger value is here.
BEST_KNOWN: dict[str, dict[str, dict[str, Any]]] = {
    "input-permuted-mnist": {
        "sgdw": {"lr": 0.001, "weight_decay": 0.001},
        "pgd": {"lr": 0.001, "sigma": 0.1},
        "shrink-and-perturb": {"lr": 0.001, "sigma": 0.1, "weight_decay": 0.01},
        "adamw": {"lr": 0.0001, "betas": (0.0, 0.99), "weight_decay": 0.0},
        "upgd": _UPGD_MNIST,
        "upgd-nonprotecting": {"lr": 0.001, "sigma": 0.1, "beta_utility": 0.9, "weight_decay": 0.01},
    },
    "output-permuted-emnist": {
        "sgdw": {"lr": 0.01, "weight_decay": 0.0001},
        "pgd": {"lr": 0.01, "sigma": 0.01},
        "shrink-and-perturb": {"lr": 0.01, "sigma": 0.01, "weight_decay": 0.001},
        "adamw": {"lr": 0.0001, "betas": (0.0, 0.9999), "weight_decay": 0.1},
        "upgd": {"lr": 0.01, "sigma": 0.001, "beta_utility": 0.9, "weight_decay": 0.0},
        "upgd-nonprotecting": {"lr": 0.01, "sigma": 0.01, "beta_utility": 0.9999, "weight_decay": 0.001},
    },
    "output-permuted-cifar10": {
        "sgdw": {"lr": 0.01, "weight_decay": 0.001},
        "pgd": {"lr": 0.001, "sigma": 0.01},
        "shrink-and-perturb": {"lr": 0.01, "sigma": 0.01, "weight_decay": 0.001},
        "adamw": {"lr": 0.001, "betas": (0.0, 0.9999), "weight_decay": 0.01},
        "upgd": {"lr": 0.01, "sigma": 0.001, "beta_utility": 0.999, "weight_decay": 0.0},
        "upgd-nonprotecting": {"lr": 0.01, "sigma": 0.01, "beta_utility": 0.99, "weight_decay": 0.001},
    },
}

#: Public sources tell of weights only. Where their best is a bad place to start for features, one that searches of 100 000
#: steps with this package found.
FEATURES: dict[str, dict[str, dict[str, Any]]] = {
    "output-permuted-emnist": {
        "upgd": {"lr": 0.01, "sigma": 0.001, "beta_utility": 0.9999, "weight_decay": 0.001},
    },
}


def known(problem: str, method: str, wise: str | None = None) -> list[dict[str, Any]]:
    """The settings to search around, if there are any: the best that is known, and another for features where there is one.

    Example:
        >>> [settings["beta_utility"] for settings in known("output-permuted-emnist", "upgd", "feature")]
        [0.9, 0.9999]
    """
    tables = (BEST_KNOWN, FEATURES) if wise == "feature" else (BEST_KNOWN,)
    return [table[problem][method] for table in tables if method in table.get(problem, {})]


def values_known(problem: str) -> dict[str, Values]:
    """The β and σ of all best known settings, which the paper's grid may lack: what one method is given, all are.

    Example:
        >>> values_known("output-permuted-emnist")["sigma"]
        (0.001, 0.01)
    """
    settings = [one for table in (BEST_KNOWN, FEATURES) for one in table.get(problem, {}).values()]
    return {name: tuple(sorted({one[name] for one in settings if name in one})) for name in ("beta_utility", "sigma")}


def defaults(problem: str) -> Defaults:
    """What the paper uses for this problem; for other problems, what it uses for the permuted ones."""
    return PROBLEMS.get(problem, PROBLEMS["input-permuted-mnist"])


def grid(problem: str, method: str) -> dict[str, Values]:
    """The values to try of every hyperparameter that the method has.

    Example:
        >>> grid("toy-changing-outputs", "sgdw")
        {'lr': (0.1, 0.01, 0.001, 0.0001), 'weight_decay': (0.1, 0.01, 0.001)}
    """
    own = METHODS[method].settings
    if method in ("ups", "ups-even"):
        return {name: choices for name, choices in _UPS.items() if name in own}
    shared = defaults(problem).grid
    values = {
        name: setting.grid
        for name, setting in own.items()
        if setting.grid and name not in shared and name not in _ADAMW
    }
    values = {name: choices for name, choices in shared.items() if name in own} | values
    if "weight_decay" in values and METHODS[method].rule != "utility" and shared is _STATIONARY:
        values["weight_decay"] = tuple(decay for decay in shared["weight_decay"] if decay)
    return values | {name: choices for name, choices in _ADAMW.items() if name in own}
