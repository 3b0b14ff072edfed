"""The definition of a method: one class with its name, settings, state and rule."""

import inspect
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from numbers import Real
from types import SimpleNamespace
from typing import Any, ClassVar, Literal

from upgd.methods._declared import check_declared, check_settings

__all__ = ["PHASES", "Method", "Reduction", "Setting", "State", "results_of", "switches_of"]

#: How values are reduced, and over which entries.
Reduction = tuple[Literal["max", "norm", "mean", "sum"], Literal["learner", "layer", "unit"]]
#: The arguments that each phase of a rule may use.
PHASES: dict[str, tuple[str, ...]] = {
    "observe": ("w", "g", "s", "h", "t", "curvature"),
    "measure": ("s", "h", "t"),
    "update": ("w", "g", "s", "h", "t", "o", "r", "noise", "curvature", "unit", "bound"),
    "observe_units": ("units", "s", "h", "t"),
    "reset_units": ("units", "s", "h", "t", "draw"),
}
#: The results of a phase; the second may be left out.
_RESULTS = {
    "update": ("the new parameter", "a dictionary of the changed state"),
    **dict.fromkeys(("observe", "observe_units"), ("a dictionary of the changed state", "one of the values to reduce")),
}
#: Attributes that describe a method and do not take part in the computation.
_DESCRIPTION = ("name", "label", "colour", "dark_colour")
#: Functions that Python 3.14 adds to a class with annotations.
_ANNOTATIONS = ("__annotate__", "__annotate_func__")


@dataclass(frozen=True)
class Setting:
    """One hyperparameter of a method.

    Args:
        default: The default value; ``...`` if the setting is required.
        symbol: Its symbol in tables and charts. Default: its name.
        least: The smallest allowed value.
        below: An exclusive upper bound.
        choices: The allowed values of a setting that selects a variant of the computation, such as ``"global"`` or
            ``"local"``. Rules read it as ``self.NAME``, whereas numeric settings are ``h.NAME``.
        pair: For a setting of two numbers, their names inside the rule: Adam's ``betas`` are ``("beta1", "beta2")``.
        text: Whether it is a string that the method or the engine interprets, such as the name of a layer; ``self.NAME``.
        quiet: Whether tables and stores omit it while it has its default.
        grid: The values that a sweep tries by default. Default: only the default value.
        off: The value that disables the setting. It is accepted, and ignored, by methods without the setting.
        words: The words for a choice in labels, such as ``{"feature": "feature-wise"}``. Default: name and value. An empty
            string omits it.
        help: One sentence for ``--help`` and the documentation.
    """

    default: Any = ...
    symbol: str = ""
    least: float | None = None
    below: float | None = None
    choices: tuple[Any, ...] = ()
    pair: tuple[str, ...] = ()
    text: bool = False
    quiet: bool = False
    grid: tuple[Any, ...] = ()
    off: Any = None
    words: Mapping[Any, str] = field(default_factory=dict, hash=False)
    help: str = ""

    @property
    def is_switch(self) -> bool:
        """Whether the setting selects a variant of the method rather than being a hyperparameter to search."""
        return bool(self.choices) or self.text

    def but(self, **changes: Any) -> "Setting":
        """Return a copy with some changes, for a subclass."""
        return replace(self, **changes)

    def check(self, name: str, value: Any) -> Any:
        """Return the value in its canonical form, or raise ValueError if it is not allowed."""
        if self.choices:
            if value not in self.choices:
                raise ValueError(f"{name} must be {' or '.join(map(repr, self.choices))}, not {value!r}")
            return self.choices[self.choices.index(value)]  # 2 instead of 2.0, which is equal but prints differently
        if self.text:
            if not isinstance(value, str) or not value:
                raise ValueError(f"{name} must be a string, such as {self.example!r}, not {value!r}")
            return value
        if self.pair:
            if not isinstance(value, Sequence) or isinstance(value, str) or len(value) != 2:
                raise ValueError(f"{name} must be two numbers, such as {self.example}, not {value!r}")
            return tuple(self._number(name, part) for part in value)
        return self._number(name, value)

    @property
    def example(self) -> Any:
        """An allowed value."""
        for value in (self.default, *self.grid, *self.choices):
            if value is not ... and value is not None:
                return value
        return (0.9, 0.999) if self.pair else 0.01

    def _number(self, name: str, value: Any) -> float:
        number = isinstance(value, Real) and not isinstance(value, bool)
        low, high = -math.inf if self.least is None else self.least, math.inf if self.below is None else self.below
        if not number or not low <= value < high or not math.isfinite(value):
            raise ValueError(f"{name} must be {self._range()}, not {value!r}; try {self.example}")
        return float(value)

    def _range(self) -> str:
        if self.least is not None and self.below is not None:
            return f"in [{self.least:g}, {self.below:g})"
        if self.least is not None:
            return f"a finite number of at least {self.least:g}"
        return "a finite number" if self.below is None else f"a number below {self.below:g}"


class Method:
    """Base class of all methods. Subclass it, define a name, settings and a rule, and register it.

    A rule has two phases. Both are called with one parameter tensor of all learners at once and are written in plain tensor
    arithmetic, as if for a single learner. A rule receives the arguments that appear in its signature:

    =============  =====================================================================================================
    ``w``, ``g``   the parameter and its gradient
    ``s``          the method's state, such as ``s.momentum``
    ``h``          the numeric settings, such as ``h.lr``
    ``t``          the step count, from 1
    ``o``, ``r``   (update) the result of ``observe`` for this tensor, and its reductions, such as ``r.scale``; both are
                   ``None`` in layers without gates
    ``noise``      (update) standard normal noise, white or anticorrelated
    ``curvature``  the diagonal of the loss's Hessian, estimated by HesScale
    ``unit``       (update) state and reductions of the hidden unit that the weight belongs to; ``None`` in the output layer
    ``bound``      (update) the bound b of the parameter's initial distribution, which is uniform on [−b, b], a number;
                   ``None`` for normalization layers, which are initialized to a constant
    =============  =====================================================================================================

    - ``observe(...)`` returns the changed state (a dict) and the values to reduce (a dict with the names of
      :attr:`reductions`). A method without reductions needs no ``observe``. If the values depend only on the state,
      ``observe`` may return just the state, and ``measure(s, h, t)`` the values; compiled steps then keep one tensor less.
    - ``update(...)`` returns the new parameter, or the new parameter and the changed state (a dict).

    A method that scores, gates or resets hidden units also defines :meth:`observe_units` or :meth:`reset_units`.

    Attributes:
        name: The name that users type.
        label: The name in tables and figures. Default: ``name``.
        colour: The colour of its curves, ``"#rrggbb"``. Default: a colour that no other method uses.
        settings: All settings by name; collected from the class attributes of type :class:`Setting`.
        constants: Numbers that replace settings of a base class; rules read them as ``h.NAME``.
        state: The tensors that the method keeps for each parameter: ``"zeros"``, or ``"parameter"`` for a copy of the
            initial parameter.
        unit_state: The tensors that it keeps for each hidden layer, one entry per unit, with the same values; or ``"layer"``
            for one number per layer, initially zero, which a reset of units does not affect.
        reductions: How the values returned by ``observe`` are reduced: ``{name: (operation, over)}``, where operation is
            ``"max"``, ``"norm"``, ``"mean"`` or ``"sum"``, and over is ``"learner"`` (all parameters), ``"layer"`` (one
            parameter tensor) or ``"unit"`` (a row or filter).
        unit_reductions: The same for the values returned by ``observe_units``, over ``"learner"`` or ``"layer"``.

    Example:
        >>> class Decay(Method):
        ...     name = "example-decay"
        ...     strength = Setting(1e-2, symbol="λ", least=0, grid=(1e-1, 1e-2))
        ...
        ...     def update(self, w, g, h):
        ...         return w - h.lr * (g + h.strength * w)
        >>> Decay.settings["strength"].symbol, Decay.needs("noise")
        ('λ', False)
    """

    name: ClassVar[str] = ""
    label: ClassVar[str] = ""
    colour: ClassVar[str] = ""
    dark_colour: ClassVar[str] = ""
    settings: ClassVar[Mapping[str, Setting]] = {}
    constants: ClassVar[Mapping[str, float]] = {}
    #: The settings that select a variant and that the class replaces with a value, by name.
    _fixed: ClassVar[Mapping[str, Setting]] = {}
    #: The arguments of each phase of the rule, from its signature.
    arguments: ClassVar[Mapping[str, tuple[str, ...]]] = {}
    #: Identifies the computation: methods that differ only in settings and constants share it and run in one batch. Empty
    #: for a class without a name of its own; its subclasses then have their own computation.
    rule: ClassVar[str] = ""
    #: The class that defines the rule, which may be an earlier one of the same name; or the rule, if its name is given.
    _origin: ClassVar[Any] = None

    state: Mapping[str, str] = {}
    unit_state: Mapping[str, str] = {}
    reductions: Mapping[str, Reduction] = {}
    unit_reductions: Mapping[str, Reduction] = {}

    lr: Any = Setting(least=0, symbol="lr", grid=(0.3, 0.1, 0.03, 0.01, 0.003, 0.001), help="Learning rate.")
    normalize: Any = Setting(
        0.0,
        symbol="α",
        least=0,
        below=1,
        off=0,
        quiet=True,
        help="Normalize inputs online by a running mean and variance with this decay rate, such as 0.99; 0 disables it.",
    )

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        shares_rule = _shares_rule(cls)  # before the attributes below are set
        settings: dict[str, Setting] = {}
        constants: dict[str, float] = {}
        fixed: dict[str, Setting] = {}
        for base in reversed(cls.__mro__):
            for name, value in vars(base).items():
                if isinstance(value, Setting):
                    settings[name] = value
                    for part in (name, *value.pair):
                        constants.pop(part, None)
                    fixed.pop(name, None)
                elif name in settings and settings[name].is_switch:  # a value replaces the setting
                    fixed[name] = settings.pop(name)
                elif name in settings or name in constants:
                    pair = settings[name].pair if name in settings else ()
                    settings.pop(name, None)
                    constants |= dict(zip(pair, map(float, value), strict=True)) if pair else {name: float(value)}
        cls.settings, cls.constants, cls._fixed, cls.arguments = settings, constants, fixed, _arguments(cls)
        check_settings(cls)
        check_declared(cls)
        if "rule" in vars(cls):
            cls._origin = cls.rule
        elif not (cls.rule and shares_rule):
            cls.rule, cls._origin = vars(cls).get("name", ""), cls
        if cls.name and "label" not in vars(cls):
            cls.label = cls.name

    def __init__(self, **switches: Any) -> None:
        """Select a variant: one value for each setting that is not a number."""
        for name, setting in self.settings.items():
            if setting.is_switch:
                setattr(self, name, switches.get(name, setting.default))

    @classmethod
    def needs(cls, argument: str) -> bool:
        """Return whether a phase of the rule uses this argument."""
        return any(argument in names for names in cls.arguments.values())

    @property
    def uses_curvature(self) -> bool:
        """Whether this variant needs curvature from HesScale."""
        return self.needs("curvature")

    @property
    def uses_units(self) -> bool:
        """Whether this variant uses hidden units."""
        return hasattr(self, "observe_units") or hasattr(self, "reset_units")

    def noise_of(self, values: Mapping[str, Any]) -> Literal["none", "white", "anticorrelated"]:
        """Return the noise that a learner with these settings needs."""
        if not self.needs("noise") or {**self.constants, **values}.get("sigma", 1.0) == 0:
            return "none"
        kind: Literal["white", "anticorrelated"] = getattr(self, "noise", "white")
        return kind

    def call(self, phase: str, **arguments: Any) -> Any:
        """Run a phase of the rule with the arguments in its signature."""
        names = self.arguments[phase]
        return getattr(self, phase)(**{name: arguments[name] for name in names})


class State(SimpleNamespace):
    """The state of a parameter or of hidden units; passed to rules as ``s``. A rule returns what it changes."""

    def __setattr__(self, name: str, value: Any) -> None:
        raise ValueError(f"a rule cannot assign to s.{name}; return the changed state instead, as {{{name!r}: value}}")


def results_of(method: Method, phase: str, returned: Any) -> tuple[Any, Mapping[str, Any]]:
    """Return the two results of a phase; the second is empty if the rule left it out. Raise ValueError for anything else."""
    results = returned if isinstance(returned, tuple) else (returned, {})
    expected = (object if phase == "update" else Mapping, Mapping)
    if returned is None or len(results) != 2 or not all(map(isinstance, results, expected)):
        one, other = _RESULTS[phase]
        parts = returned if isinstance(returned, tuple) else (returned,)
        kinds = ", ".join("Tensor" if hasattr(part, "is_symbol") else type(part).__name__ for part in parts)
        raise ValueError(f"{method.name}.{phase} must return {one}, or {one} and {other}; it returns {kinds}")
    return results


def switches_of(method: Method) -> dict[str, Any]:
    """Return the values that select a method's variant, whether a user chose them or its class fixes them.

    Quiet settings are left out while they are disabled, so that methods with and without them are computed together.
    """
    switches = {name: setting for name, setting in method.settings.items() if setting.is_switch} | dict(method._fixed)
    values = {name: getattr(method, name) for name in switches}
    return {name: value for name, value in values.items() if not (switches[name].quiet and value == switches[name].off)}


def _shares_rule(cls: type[Method]) -> bool:
    """Return whether a class computes what its base class does.

    Learners of one rule run in one batch, with the class of the first. A class may therefore differ from its base in numbers,
    of which each learner has its own, and in switches, for which there are different batches. Anything else, such as an
    attribute, a helper or the declared state, may change the computation.
    """
    if len(cls.__bases__) > 1:
        return False
    (base,) = cls.__bases__
    return all(_is_harmless(base, name, value) for name, value in vars(cls).items())


def _is_harmless(base: type[Method], name: str, value: Any) -> bool:
    """Return whether a class with this attribute still computes what its base class does."""
    if name in _DESCRIPTION or name in _ANNOTATIONS:
        return True
    if name.startswith("__") and name.endswith("__"):
        return not callable(value)
    if name == "noise" and base.needs("noise"):  # there are different batches for different noise
        return True
    before = base.settings.get(name, base._fixed.get(name))
    if isinstance(value, Setting):
        if before is None:
            plain = not (value.is_switch or value.pair)
            return plain if name in base.constants else not hasattr(base, name)
        shape = ("is_switch", "text", "pair", "quiet", "off")
        same = all(getattr(value, field) == getattr(before, field) for field in shape)
        return same and set(value.choices) <= set(before.choices)
    if before is not None and before.is_switch:
        return isinstance(value, str) if before.text else value in before.choices
    return before is not None or name in base.constants


def _arguments(cls: type[Method]) -> dict[str, tuple[str, ...]]:
    """Return the arguments of each phase of a method's rule."""
    found = {}
    for phase, known in PHASES.items():
        function = getattr(cls, phase, None)
        if function is not None and not isinstance(function, Setting):  # which is refused with the other settings
            names = tuple(inspect.signature(function).parameters)[1:]
            if unknown := [name for name in names if name not in known]:
                raise TypeError(
                    f"{cls.__name__}.{phase} has the argument {unknown[0]!r}, which does not exist; it may use "
                    f"{', '.join(known)}"
                )
            found[phase] = names
    return found
