"""Default values to try: a short grid for each method, suited to online learning.

A comparison is fair only if every method gets suitable values. AdamW normalizes its gradients and needs a learning rate about
ten times smaller than SGD; shared learning rates favour one of the two. Every method therefore defines its own grid
(:attr:`upgd.methods.Setting.grid`).
"""

from typing import Any

from upgd.methods import METHODS

__all__ = ["needed", "short"]

Values = tuple[Any, ...]


def short(method: str) -> dict[str, Values]:
    """Return the method's short grid. Other settings keep their defaults.

    Example:
        >>> short("adamw")["lr"]
        (0.03, 0.01, 0.003, 0.001, 0.0003, 0.0001)
    """
    return {name: setting.grid for name, setting in METHODS[method].settings.items() if setting.grid}


def needed(method: str) -> dict[str, Values]:
    """Return the part of the short grid for the method's required settings.

    Example:
        >>> list(needed("pgd"))
        ['lr', 'sigma']
    """
    return {
        name: setting.grid or (setting.example,)
        for name, setting in METHODS[method].settings.items()
        if setting.default is ...
    }
