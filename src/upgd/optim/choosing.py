"""Choose the torch optimizer of a method: the public class where there is one, otherwise one that runs the method's rule."""

import inspect
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer, ParamsT

from upgd.methods import Method, Setting
from upgd.methods.deriving import TorchMethod
from upgd.optim.ada_upgd import AdaUPGD
from upgd.optim.feature_upgd import FeatureUPGD, FeatureUPS
from upgd.optim.from_method import BOUND, MethodOptimizer, groups_of, needs_model
from upgd.optim.pgd import PGD, ShrinkAndPerturb
from upgd.optim.unit_method import UnitMethodOptimizer
from upgd.optim.upgd import UPGD
from upgd.optim.ups import UPS

__all__ = ["optimizer"]

#: Methods with a public optimizer class, and the options that select the method.
_PUBLIC: dict[str, tuple[type[Optimizer], dict[str, Any]]] = {
    "sgd": (PGD, {"sigma": 0.0}),
    "sgdw": (PGD, {"sigma": 0.0}),
    "pgd": (PGD, {}),
    "anti-pgd": (PGD, {"noise": "anticorrelated"}),
    "shrink-and-perturb": (ShrinkAndPerturb, {}),
    "upgd": (UPGD, {}),
    "upgd-nonprotecting": (UPGD, {"protect_gradient": False}),
    "ups": (UPS, {}),
    "adamw": (torch.optim.AdamW, {}),
    "adaupgd": (AdaUPGD, {}),
}
#: The same for features.
_FEATURE_WISE: dict[type[Optimizer], type[Optimizer]] = {UPGD: FeatureUPGD, UPS: FeatureUPS}
#: Options of optimizers in addition to the settings of a method.
_OPTIONS = (
    "maximize",
    "foreach",
    "fused",
    "capturable",
    "curvature",
    "generator",
    "seed",
    "state_dtype",
    "stochastic_rounding",
    "process_group",
)
#: Additional options of methods that act on hidden units.
_OF_UNITS = ("features", "scaler")


def optimizer(method: type[Method], params: ParamsT | nn.Module, **settings: Any) -> Optimizer:
    """See :func:`upgd.methods.optimizer`."""
    model = params if isinstance(params, nn.Module) else None
    cls, fixed = _PUBLIC.get(method.name, (None, {}))
    settings = _for_optimizer(method, settings)
    switches = {name: value for name, value in settings.items() if name in method.settings}
    works_on_units = method(**switches).uses_units
    if works_on_units and model is None:
        raise ValueError(needs_model(method))
    given: Any = params if model is None else groups_of(model, method, **settings)
    given = given if isinstance(given, Tensor) else list(given)
    for name, setting in method.settings.items():
        if setting.default is ... and name not in settings and not (cls is not None and name == "lr"):
            _check_groups_set(method, name, setting, given)
    if issubclass(method, TorchMethod):
        return _adapted(method, given, settings)
    if cls is None or settings.get("profile", "paper") != "paper":
        if not works_on_units:
            return MethodOptimizer(given, method, **settings)
        assert model is not None
        return UnitMethodOptimizer(model, method, **settings)
    if works_on_units:
        cls, given = _FEATURE_WISE[cls], model
    # A public class has `curvature` instead of the order, and there is another class for features.
    settings = {name: value for name, value in settings.items() if name not in ("granularity", "order", "profile")}
    known = inspect.signature(cls).parameters
    for name in [name for name in (*_OPTIONS, *_OF_UNITS) if name in settings and name not in known]:
        if settings.pop(name) is not None:
            raise ValueError(
                f"{name} is not an option of {cls.__name__}, the optimizer of method={method.name!r}; leave it out"
            )
    return cls(given, **fixed, **settings)


def _for_optimizer(method: type[Method], settings: dict[str, Any]) -> dict[str, Any]:
    """Return the settings without those that the model or parameter groups define; raise ValueError for invalid ones."""
    settings = {name: value for name, value in settings.items() if value is not None}
    options = (*_OPTIONS, *((BOUND,) if method.needs("bound") else ()), *_OF_UNITS)
    for name, value in settings.items():
        if name not in method.settings and name not in options:
            takes = ", ".join(own for own in method.settings if own not in ("normalize", "gated"))
            raise ValueError(
                f"{name}={value!r} does not apply to method={method.name!r}, which takes {takes}; leave it out"
            )
    if settings.pop("normalize", 0) != 0:
        raise ValueError(
            "normalize is for the inputs of a model; put upgd.OnlineNorm(shape, rate) in front of the model"
        )
    if (gated := settings.pop("gated", "all")) != "all":
        raise ValueError(
            f"gated={gated!r} names layers, but an optimizer only has parameters; put those of the other layers into a group "
            '{"params": …, "gated": False}'
        )
    if settings.get("curvature") is not None:
        if "order" in method.settings:
            settings.setdefault("order", 2)
        if not method(**settings).uses_curvature:
            raise ValueError(f"method={method.name!r} with these settings does not use curvature; leave curvature out")
    elif settings.get("order") == 2:
        raise ValueError("order=2 needs curvature; pass curvature=upgd.HesScale(model, criterion)")
    return settings


def _adapted(method: type[TorchMethod], params: ParamsT, settings: dict[str, Any]) -> Optimizer:
    """The optimizer that the method was made of."""
    options = {name: value for name, value in settings.items() if name not in method.settings}
    for name, setting in method.settings.items():
        value = settings.get(name, setting.default)
        if name != "normalize" and value is not ...:
            checked = value if isinstance(value, Tensor) else setting.check(name, value)
            options[name] = method.whole(name, checked) if isinstance(checked, float) else checked
    made: Optimizer = method.optimizer_class(params, **options)
    return made


def _check_groups_set(method: type[Method], name: str, setting: Setting, params: Any) -> None:
    if not isinstance(params, list) or not params or not all(isinstance(g, dict) and name in g for g in params):
        raise ValueError(f"method={method.name!r} needs {name}; give it a value, such as {name}={setting.example!r}")
