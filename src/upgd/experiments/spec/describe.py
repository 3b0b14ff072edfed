"""Facts about methods and problems, for ``upgd methods``, ``upgd problems`` and the documentation."""

import inspect
import re
from collections.abc import Mapping
from functools import partial
from typing import Any

from upgd.data.sources import OFFICIAL
from upgd.experiments.spec import defaults
from upgd.experiments.spec.settings import ordered
from upgd.methods.registry import get
from upgd.streams import make, registry

__all__ = ["about_problem", "first_paragraph", "method", "plain", "problem", "task_length"]


def method(name: str) -> dict[str, Any]:
    """Return the name, label, description and settings of a method, ready for JSON. A required setting has no default."""
    cls = get(name)
    return {
        "name": name,
        "label": cls.label,
        "about": first_paragraph(cls),
        "settings": {one: _setting(cls.settings[one]) for one in ordered(cls.settings)},
    }


def _setting(setting: Any) -> dict[str, Any]:
    facts: dict[str, Any] = {"required": True} if setting.default is ... else {"default": setting.default}
    for name in ("choices", "least", "below", "grid"):
        if (value := getattr(setting, name)) not in (None, ()):
            facts[name] = value
    return {**facts, "help": setting.help}


def problem(name: str) -> dict[str, Any]:
    """Return the name, description, options and defaults of a problem, ready for JSON."""
    usual = defaults.defaults(name)
    facts: dict[str, Any] = {"name": name, "about": about_problem(name), "task_length": task_length(name)}
    facts["options"] = {option: _option(name, one) for option, one in _parameters(name).items()}
    if not name.startswith("utility-quality"):
        facts |= {"network": usual.network, "steps": usual.steps, "seeds": usual.seeds}
    return facts


def about_problem(name: str) -> str:
    """Return what changes in a problem, in one sentence."""
    return first_paragraph(_kind(name))


def _parameters(name: str) -> Mapping[str, inspect.Parameter]:
    return inspect.signature(registry.factory(name)).parameters


def _option(problem: str, parameter: inspect.Parameter) -> dict[str, Any]:
    """Return the default of an option; none if it depends on the data set."""
    if parameter.default is parameter.empty:
        return {"required": True}
    default = task_length(problem) if parameter.name == "task_length" else parameter.default
    return {} if default is None else {"default": default}


def task_length(name: str) -> int | None:
    """Return the default task length of a problem; None if the problem has required options."""
    if any(name.endswith(f"-{data}") for data in OFFICIAL) or name == "label-permuted-features":
        return int(_kind(name).default_task_length)
    try:
        return make(name).task_length
    except TypeError:
        return None


def first_paragraph(thing: Any) -> str:
    """Return the first paragraph of a docstring on one line."""
    return " ".join((inspect.getdoc(thing) or "").partition("\n\n")[0].split())


def plain(text: str) -> str:
    """Return text without the markup of docstrings.

    Example:
        >>> plain("like :class:`torch.optim.SGD`: ``w ← w − lr·g``")
        'like torch.optim.SGD: w ← w − lr·g'
    """
    return re.sub(r":\w+:`~?([^`]*)`", r"\1", text.replace("``", ""))


def _kind(name: str) -> Any:
    """Return the class or function that creates a problem."""
    factory = registry.factory(name)
    return factory.func if isinstance(factory, partial) else factory
