"""The best settings known from public sources: places to start a search, not results of this package."""

from typing import Any

__all__ = ["BEST_KNOWN", "FEATURES", "known", "values_known"]

Values = tuple[Any, ...]

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


def known(problem: str, method: str, granularity: str | None = None) -> list[dict[str, Any]]:
    """The settings to search around, if there are any: the best that is known, and another for features where there is one.

    Example:
        >>> [settings["beta_utility"] for settings in known("output-permuted-emnist", "upgd", "feature")]
        [0.9, 0.9999]
    """
    tables = (BEST_KNOWN, FEATURES) if granularity == "feature" else (BEST_KNOWN,)
    return [table[problem][method] for table in tables if method in table.get(problem, {})]


def values_known(problem: str) -> dict[str, Values]:
    """The β and σ of all best known settings, which the paper's grid may lack: what one method is given, all are.

    Example:
        >>> values_known("output-permuted-emnist")["sigma"]
        (0.001, 0.01)
    """
    settings = [one for table in (BEST_KNOWN, FEATURES) for one in table.get(problem, {}).values()]
    return {name: tuple(sorted({one[name] for one in settings if name in one})) for name in ("beta_utility", "sigma")}
