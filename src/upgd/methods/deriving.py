"""Conversion of methods to torch optimizers and of torch optimizers to methods."""

import importlib
import inspect
import sys
from collections.abc import Mapping
from numbers import Real
from typing import TYPE_CHECKING, Any, ClassVar

from upgd.methods.method import Method, Setting
from upgd.methods.registry import get, register

if TYPE_CHECKING:
    from torch.nn import Module
    from torch.optim import Optimizer
    from torch.optim.optimizer import ParamsT

__all__ = ["TorchMethod", "from_torch", "optimizer"]


def optimizer(name: str, params: "ParamsT | Module", **settings: Any) -> "Optimizer":
    """Create a torch optimizer for a method.

    Methods with a public optimizer class, such as ``upgd``, return an instance of it. All others return an optimizer that
    runs the method's rule. It supports parameter groups, closures, schedulers, tensor learning rates, ``state_dict``,
    ``GradScaler`` and ``torch.compile``. In a group with ``"gated": False``, methods with gates do not use them.

    Args:
        name: One of :data:`upgd.methods.METHODS`.
        params: Parameters, named parameters or parameter groups, as for every torch optimizer; or the model. Methods that
            act on hidden units require the model and find the units as :class:`upgd.FeatureUPGD` does;
            ``optimizer.features`` lists them. Methods whose rule uses ``bound``, such as weight clipping, also require the
            model, unless every group sets it: ``{"params": …, "bound": 0.05}``.
        settings: The method's settings by name, and ``maximize``, ``capturable``, ``generator`` and ``curvature`` as for
            :class:`upgd.UPGD`. For methods that act on hidden units, also ``features`` and ``scaler`` as for
            :class:`upgd.FeatureUPGD`.

    Example:
        >>> model = torch.nn.Linear(4, 2)
        >>> upgd.methods.optimizer("upgd", model.parameters(), lr=0.01).__class__
        <class 'upgd.optim.upgd.UPGD'>
        >>> optimizer = upgd.methods.optimizer("ups-even", model.parameters(), lr=1.0, sigma=0.01)
        >>> model(torch.ones(1, 4)).sum().backward()
        >>> optimizer.step()
        >>> model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2))
        >>> upgd.methods.optimizer("continual-backprop", model, lr=0.01).features
        [Feature(8 units of Linear '0', output of ReLU '1')]
    """
    # Imported late, because the optimizers are built on the methods.
    made: Optimizer = importlib.import_module("upgd.optim.choosing").optimizer(get(name), params, **settings)
    return made


class TorchMethod(Method):
    """A method whose steps are computed by a ``torch.optim.Optimizer``; created by :func:`from_torch`."""

    optimizer_class: ClassVar[Any] = None

    def make(self, params: "ParamsT", numbers: Mapping[str, float]) -> "Optimizer":
        """Return the optimizer of one learner, given its numeric settings."""
        options: dict[str, Any] = {}
        for name, setting in self.settings.items():
            if setting.is_switch:
                options[name] = getattr(self, name)
            elif setting.pair:
                options[name] = tuple(numbers[part] for part in setting.pair)
            elif name != "normalize":
                options[name] = self.whole(name, numbers[name])
        made: Optimizer = self.optimizer_class(params, **options)
        return made

    @classmethod
    def whole(cls, name: str, value: float) -> float | int:
        """Return the value, converted to an integer if the setting's default is one."""
        return int(value) if isinstance(cls.settings[name].default, int) and value == int(value) else value


def from_torch(
    optimizer: "type[Optimizer]",
    name: str,
    label: str = "",
    settings: Mapping[str, Any] | None = None,
    **attributes: Any,
) -> type[Method]:
    """Register any ``torch.optim.Optimizer`` class as a method.

    Each learner runs its own module and its own optimizer. This is slow, but works for every optimizer that does not need a
    closure.

    Args:
        optimizer: The class.
        name: The name of the method.
        label: The name in tables and figures. Default: ``name``.
        settings: The optimizer's options that become settings of the method, each a :class:`Setting` or a default value.
            ``lr`` is always a setting; all other options keep the optimizer's defaults.
        attributes: Other attributes of the method, such as ``colour="#117733"``.

    Returns:
        The method's class, already registered.

    Example:
        >>> method = upgd.methods.from_torch(  # doctest: +SKIP
        ...     torch.optim.RMSprop, "rmsprop-torch", "RMSprop", settings={"alpha": 0.99, "centered": False}
        ... )
        >>> learner = upgd.population.Learner(method="rmsprop-torch", lr=0.01, alpha=0.9)  # doctest: +SKIP
    """
    known = _options(optimizer)
    own: dict[str, Any] = {option: _setting(option, value) for option, value in (settings or {}).items()}
    for option in ("lr", *own):
        if known is not None and option not in known:
            raise ValueError(f"{optimizer.__name__} has no option {option!r}; it has {', '.join(known)}")
    parts = {
        "__module__": sys._getframe(1).f_globals.get("__name__", __name__),
        "__qualname__": name,
        "__doc__": f":class:`{optimizer.__module__}.{optimizer.__qualname__}`, one per learner.",
        "name": name,
        "label": label or name,
        "rule": name,
        "optimizer_class": optimizer,
    }
    return register(type(name, (TorchMethod,), {**parts, **own, **attributes}))


def _options(optimizer: Any) -> list[str] | None:
    """Return the options of an optimizer class; None if it accepts any."""
    base = importlib.import_module("torch").optim.Optimizer
    if base not in getattr(optimizer, "__mro__", ()):
        raise TypeError(f"optimizer must be a subclass of torch.optim.Optimizer, not {optimizer!r}")
    closure = inspect.signature(optimizer.step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        raise ValueError(
            f"{optimizer.__name__} needs a closure for every step, so it cannot be used for online learning; use another one"
        )
    parameters = list(inspect.signature(optimizer).parameters.values())[1:]
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        return None
    return [parameter.name for parameter in parameters]


def _setting(option: str, value: Any) -> Setting:
    """Create a setting for an option from its default value."""
    if isinstance(value, Setting):
        return value
    if isinstance(value, bool):
        return Setting(value, choices=(False, True))
    if isinstance(value, str) and value:
        return Setting(value, text=True)
    if isinstance(value, Real):
        return Setting(value)
    if isinstance(value, tuple) and len(value) == 2 and all(isinstance(part, Real) for part in value):
        return Setting(value, pair=(f"{option}_1", f"{option}_2"))
    raise TypeError(
        f"settings[{option!r}] must be a number, two numbers, a string, True or False, or a Setting, not {value!r}"
    )
