"""The best settings known from public sources: starting points of a search, not results of this package."""

from typing import Any

__all__ = ["BEST_KNOWN", "FEATURES", "PUBLISHED", "known", "published", "values_known"]

Values = tuple[Any, ...]

_UPGD_MNIST = {"lr": 0.01, "sigma": 0.1, "beta_utility": 0.9999, "weight_decay": 0.01}

#: Best settings known from public sources: a starting point, not a result of this package. If a source gives σ as a range,
#: for half the noise, the larger value is used.
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

#: Public sources cover weights only. If their best setting is a poor starting point for features, a setting found by searches
#: of 100,000 steps with this package is used.
FEATURES: dict[str, dict[str, dict[str, Any]]] = {
    "output-permuted-emnist": {
        "upgd": {"lr": 0.01, "sigma": 0.001, "beta_utility": 0.9999, "weight_decay": 0.001},
    },
}

#: The settings published with Elsayed and Mahmood (2024, arXiv 2404.00781), for the problems in this package.
PUBLISHED: dict[str, dict[str, dict[str, Any]]] = {
    "input-permuted-mnist": {
        "upgd": _UPGD_MNIST,
        "shrink-and-perturb": {"lr": 0.001, "sigma": 0.1, "weight_decay": 0.01},
        "adamw": {"lr": 0.0001, "betas": (0.0, 0.99), "weight_decay": 0.0},
        "s-ewc": {"lr": 0.001, "beta_importance": 0.9999, "beta_weights": 0.99, "kappa": 0.001},
        "s-mas": {"lr": 0.001, "beta_importance": 0.9999, "beta_weights": 0.999, "kappa": 0.1},
    },
    "output-permuted-emnist": {
        "upgd": {"lr": 0.01, "sigma": 0.001, "beta_utility": 0.9, "weight_decay": 0.0},
        "shrink-and-perturb": {"lr": 0.01, "sigma": 0.01, "weight_decay": 0.001},
        "adamw": {"lr": 0.0001, "betas": (0.0, 0.9999), "weight_decay": 0.1},
        "s-ewc": {"lr": 0.01, "beta_importance": 0.999, "beta_weights": 0.999, "kappa": 1.0},
        "s-mas": {"lr": 0.01, "beta_importance": 0.999, "beta_weights": 0.999, "kappa": 1.0},
    },
    "output-permuted-cifar10": {
        "upgd": {"lr": 0.01, "sigma": 0.0, "beta_utility": 0.999, "weight_decay": 0.0001},
        "shrink-and-perturb": {"lr": 0.01, "sigma": 0.01, "weight_decay": 0.001},
        "adamw": {"lr": 0.001, "betas": (0.0, 0.9999), "weight_decay": 0.01},
        "s-ewc": {"lr": 0.01, "beta_importance": 0.9999, "beta_weights": 0.999, "kappa": 10.0},
        "s-mas": {"lr": 0.01, "beta_importance": 0.9999, "beta_weights": 0.999, "kappa": 10.0},
    },
}


def published(problem: str, method: str) -> dict[str, Any]:
    """Return the published setting of a method on a problem, or raise ValueError with the available ones.

    Example:
        >>> published("output-permuted-emnist", "s-ewc")["kappa"]
        1.0
    """
    if problem not in PUBLISHED:
        raise ValueError(f"no setting is published for {problem}; there are some for {', '.join(PUBLISHED)}")
    if method not in PUBLISHED[problem]:
        raise ValueError(
            f"no setting of method={method!r} is published for {problem}; there is one of {', '.join(PUBLISHED[problem])}"
        )
    return PUBLISHED[problem][method]


def known(problem: str, method: str, granularity: str | None = None) -> list[dict[str, Any]]:
    """Return the settings to search around, if any: the best known one, and possibly another one for features.

    Example:
        >>> [settings["beta_utility"] for settings in known("output-permuted-emnist", "upgd", "feature")]
        [0.9, 0.9999]
    """
    tables = (BEST_KNOWN, FEATURES) if granularity == "feature" else (BEST_KNOWN,)
    return [table[problem][method] for table in tables if method in table.get(problem, {})]


def values_known(problem: str) -> dict[str, Values]:
    """Return β and σ of all best known settings, which the paper's grid may lack; all methods get the same values.

    Example:
        >>> values_known("output-permuted-emnist")["sigma"]
        (0.001, 0.01)
    """
    settings = [one for table in (BEST_KNOWN, FEATURES) for one in table.get(problem, {}).values()]
    return {name: tuple(sorted({one[name] for one in settings if name in one})) for name in ("beta_utility", "sigma")}
