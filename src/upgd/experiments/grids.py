"""The values that a method tries when nobody says which: a short grid for each, suited to learning online.

A comparison is fair only if every method is given the values it needs. AdamW normalises its gradients and wants a learning
rate about ten times smaller than SGD does; shared learning rates favour one of the two. So each method has a grid of its own,
with six learning rates half a decade apart and, where the method has a second hyperparameter that matters, three or four
values of that one. Plain SGD has only its learning rate to search.
"""

from typing import Any

from upgd.population import METHODS

__all__ = ["SHORT", "needed", "short"]

Values = tuple[Any, ...]

_LR: Values = (0.3, 0.1, 0.03, 0.01, 0.003, 0.001)
_SIGMA: Values = (1.0, 0.1, 0.01, 0.001)
_BETA: Values = (0.0, 0.9, 0.999)

#: The short grid of every method. Settings that are not listed keep the method's default.
SHORT: dict[str, dict[str, Values]] = {
    "sgd": {"lr": _LR},
    "sgdw": {"lr": _LR, "weight_decay": (0.01, 0.001, 0.0001)},
    "adamw": {
        "lr": (0.03, 0.01, 0.003, 0.001, 0.0003, 0.0001),
        "betas": ((0.9, 0.999), (0.0, 0.999), (0.0, 0.9999)),
    },
    "pgd": {"lr": _LR, "sigma": _SIGMA},
    "anti-pgd": {"lr": _LR, "sigma": _SIGMA},
    "shrink-and-perturb": {"lr": _LR, "sigma": _SIGMA, "weight_decay": (0.001,)},
    "upgd": {"lr": _LR, "beta_utility": _BETA, "sigma": (0.001,)},
    "upgd-nonprotecting": {"lr": _LR, "beta_utility": _BETA, "sigma": (0.001,)},
    "ups": {"lr": (1.0,), "sigma": (0.1, 0.01, 0.001, 0.0001, 0.00001), "beta_utility": _BETA},
    "ups-even": {"lr": (1.0,), "sigma": (0.1, 0.01, 0.001, 0.0001, 0.00001)},
}


def short(method: str) -> dict[str, Values]:
    """The method's short grid.

    Example:
        >>> short("adamw")["lr"]
        (0.03, 0.01, 0.003, 0.001, 0.0003, 0.0001)
    """
    return dict(SHORT[method])


def needed(method: str) -> dict[str, Values]:
    """The part of the short grid that the method cannot do without: settings that have no default.

    Example:
        >>> list(needed("pgd"))
        ['lr', 'sigma']
    """
    own = METHODS[method].settings
    return {name: values for name, values in SHORT[method].items() if name == "lr" or own[name] is ...}
