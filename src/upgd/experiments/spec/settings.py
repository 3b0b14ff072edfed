"""Settings by name, across all methods: their order, symbols and defaults in tables, options and files.

A store may contain results of methods that are not loaded; their settings are known by name only.
"""

import re
from collections.abc import Iterable
from typing import Any

from upgd.methods import METHODS, Setting

__all__ = [
    "MOST_LEARNERS",
    "hyperparameters",
    "is_usual",
    "known",
    "of_methods",
    "ordered",
    "symbol",
    "words",
]

#: Maximum number of learners, and therefore seeds, of one experiment; listing and planning these takes half a minute.
MOST_LEARNERS = 200_000
#: Maximum length of an axis label.
_LONGEST = 50
#: The first settings in tables; other settings follow.
_FIRST = ("lr", "beta_utility", "sigma", "weight_decay", "granularity", "scaling", "order", "noise", "betas", "eps")


def known() -> dict[str, Setting]:
    """Return all settings of all methods, in the order of tables."""
    found: dict[str, Setting] = {}
    for method in METHODS.values():
        for name, setting in method.settings.items():
            found.setdefault(name, setting)
    return {name: found[name] for name in (*_FIRST, *(name for name in found if name not in _FIRST))}


def of_methods(name: str) -> list[Setting]:
    """Return the settings of that name of all methods; those of plugins may differ from ours."""
    return [method.settings[name] for method in METHODS.values() if name in method.settings]


def ordered(names: Iterable[str]) -> list[str]:
    """Return names of settings in the order of tables; those that no loaded method has come last."""
    order = {name: place for place, name in enumerate(known())}
    return sorted(names, key=lambda name: order.get(name, len(order)))


def symbol(name: str) -> str:
    """Return the symbol of a setting in tables."""
    setting = known().get(name)
    return setting.symbol or name if setting is not None else name


def words(name: str) -> str:
    """Return the label of a setting in charts: the first clause of its help, with the symbol if it is not a word.

    Example:
        >>> words("lr"), words("sigma"), words("eps"), words("of_another_plugin")
        ('Learning rate', 'Standard deviation of the perturbation (σ)', "Adam's ε", 'of another plugin')
    """
    setting = known().get(name)
    clause = re.split(r"[.,:;]", setting.help)[0] if setting is not None else ""
    if not clause or len(clause) > _LONGEST:
        return name.replace("_", " ") if symbol(name) == name else symbol(name)
    sign = symbol(name)
    return clause if sign.isascii() or sign[0] in clause else f"{clause} ({sign})"


def is_usual(name: str, value: Any) -> bool:
    """Return whether the value is the variant's default, which tables omit."""
    setting = known().get(name)
    return setting is not None and setting.is_switch and value == setting.default


def hyperparameters(settings: Iterable[str]) -> list[str]:
    """Return the settings that are searched, in the order of tables, without those that select a variant of the method."""
    every = known()
    return [name for name in ordered(settings) if not (name in every and every[name].is_switch)]
