"""Checks of what a method declares, made when its class is defined, so that every part of the package reports it alike."""

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from upgd.methods.method import Method, Setting

__all__ = ["TAKEN", "check_declared", "check_settings"]

#: Names that settings cannot have, by what uses them. Tests compare them with the code, which this module cannot import
#: because most of it needs torch.
TAKEN: dict[str, tuple[str, ...]] = {
    "learners use": ("method", "seed", "values", "settings", "but", "variant", "kind"),
    "commands use": (
        *("problem", "method", "methods", "setting", "grid", "dry_run", "as_json", "json", "plugin", "help", "version"),
        *("seeds", "steps", "network", "option", "settings", "rest", "store", "workers", "ray", "insecure", "device"),
        *("backend", "look_every", "checkpoint_every", "stop_after", "job_size", "quiet"),
    ),
    # The following do not apply to methods whose steps are computed by a torch optimizer.
    "rules already have in h": ("t", "step", "expression", "resolve", "by_reciprocal"),
    "optimizers use": (
        *("params", "model", "method", "curvature", "maximize", "foreach", "fused", "capturable", "generator", "seed"),
        *("state_dtype", "stochastic_rounding", "process_group", "bound", "features", "scaler"),
        *("param_names", "differentiable", "initial_lr"),  # torch's own
    ),
}
_OF_EVERY_METHOD = ("learners use", "commands use")
_NOISES = ("white", "anticorrelated")
#: Names that the engine and optimizers understand, and the settings that they may be.
_UNDERSTOOD: dict[str, "Callable[[type[Method], Setting], bool]"] = {
    "gated": lambda _, setting: setting.text,
    "order": lambda _, setting: bool(setting.choices),
    "noise": lambda cls, setting: (
        not cls.needs("noise") or (bool(setting.choices) and {*setting.choices} <= {*_NOISES})
    ),
}
#: How the state of parameters and of units may begin.
_BEGINNINGS = {"state": ("zeros", "parameter"), "unit_state": ("zeros", "parameter", "layer")}
#: Names of a population's own state.
_OWN_STATE = ("parameters", "normalizer")
_OPERATIONS = ("max", "norm", "mean", "sum")
#: What values of parameters and of units may be reduced over.
_OVER = {"reductions": ("learner", "layer", "unit"), "unit_reductions": ("learner", "layer")}


def check_settings(cls: "type[Method]") -> None:
    """Raise ValueError for a setting whose name has another meaning, or whose default or grid it does not allow."""
    numbers = list(cls.constants)
    for name, setting in cls.settings.items():
        parts = () if setting.is_switch else setting.pair or (name,)
        numbers += parts
        for part in (name, *parts):
            if reason := _taken(cls, part, setting):
                raise ValueError(f"{cls.__name__} has a setting {part!r}, a name that {reason}; give it another name")
        for value in (setting.default, *setting.grid):
            if value is not ...:
                _check_value(cls, name, setting, value)
    if twice := [name for name in numbers if numbers.count(name) > 1]:
        raise ValueError(
            f"{cls.__name__} has two settings with the name h.{twice[0]} in rules; give one of them another name"
        )
    noise = getattr(cls, "noise", _NOISES[0])
    if cls.needs("noise") and isinstance(noise, str) and noise not in _NOISES:
        raise ValueError(f"{cls.__name__}.noise must be {_either(_NOISES)}, not {noise!r}")


def _check_value(cls: "type[Method]", name: str, setting: "Setting", value: Any) -> None:
    try:
        setting.check(name, value)
    except ValueError as error:
        raise ValueError(f"{cls.__name__} has a default or a grid that it does not allow: {error}") from None


def _taken(cls: "type[Method]", name: str, setting: "Setting") -> str:
    """Return why a setting cannot have this name, worded to follow "a name that"; empty if it can."""
    from upgd.methods.method import PHASES, Method, Setting  # which imports this module

    if name.startswith("_"):
        return "begins with an underscore"
    if name in PHASES or (name in vars(Method) and not isinstance(vars(Method)[name], Setting)):
        return "is an attribute of every method"
    of_torch = hasattr(cls, "optimizer_class")
    if name in _UNDERSTOOD and not of_torch and not _UNDERSTOOD[name](cls, setting):
        return "has another meaning in the engine"
    for user, names in TAKEN.items():
        if name in names and (user in _OF_EVERY_METHOD or not of_torch):
            return user
    return ""


def check_declared(method: "Method | type[Method]") -> None:
    """Raise ValueError for a state or reduction that does not exist. What depends on the variant is a property, which only
    an instance has."""
    for table, kinds in _BEGINNINGS.items():
        for place, name, kind in _entries(method, table):
            if name in _OWN_STATE:
                raise ValueError(f"{place} has a name that the engine uses; give it another name")
            if kind not in kinds:
                raise ValueError(f"{place} must be {_either(kinds)}, not {kind!r}")
    for table, over in _OVER.items():
        for place, _, reduction in _entries(method, table):
            pair = isinstance(reduction, tuple | list) and len(reduction) == 2
            if not pair or reduction[0] not in _OPERATIONS or reduction[1] not in over:
                raise ValueError(
                    f"{place} must be {_either(_OPERATIONS)} over {_either(over)}, such as ('max', 'learner'), "
                    f"not {reduction!r}"
                )


def _entries(method: "Method | type[Method]", table: str) -> list[tuple[str, str, Any]]:
    """Return the entries of a table with how messages name them."""
    values = getattr(method, table)
    if isinstance(method, type) and hasattr(values, "__get__"):  # a property
        return []
    owner = method.__name__ if isinstance(method, type) else type(method).__name__
    if not isinstance(values, Mapping):
        raise ValueError(f"{owner}.{table} must be a dictionary, not {values!r}")
    return [(f"{owner}.{table}[{name!r}]", name, value) for name, value in values.items()]


def _either(values: tuple[str, ...]) -> str:
    """Return the allowed values for a message, as :meth:`upgd.methods.Setting.check` has them."""
    return " or ".join(map(repr, values))
