"""The values that a method tries when nobody says which: a short grid for each, suited to learning online.

A comparison is fair only if every method is given the values it needs. AdamW normalizes its gradients and wants a learning
rate about ten times smaller than SGD does; shared learning rates favour one of the two. So every method brings a grid of its
own (:attr:`upgd.methods.Setting.grid`).
"""

from typing import Any

from upgd.methods import METHODS

__all__ = ["needed", "short"]

Values = tuple[Any, ...]


def short(method: str) -> dict[str, Values]:
    """The method's short grid. Settings that are not in it keep their default.

    Example:
        >>> short("adamw")["lr"]
        (0.03, 0.01, 0.003, 0.001, 0.0003, 0.0001)
    """
    return {name: setting.grid for name, setting in METHODS[method].settings.items() if setting.grid}


def needed(method: str) -> dict[str, Values]:
    """The part of the short grid that the method cannot do without: settings that have no default.

    Example:
        >>> list(needed("pgd"))
        ['lr', 'sigma']
    """
    return {
        name: setting.grid or (setting.example,)
        for name, setting in METHODS[method].settings.items()
        if setting.default is ...
    }
