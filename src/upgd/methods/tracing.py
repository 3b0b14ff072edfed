"""A method's per-entry rule as a list of operations, from which kernels are made.

The rule runs once on symbols instead of tensors (:class:`Symbol`), which record what is done to them. What depends on
settings and the step alone stays one number per learner and step (:class:`upgd.methods._scalars.Scalar`); a kernel reads it
from a table. A rule that does something for which there is no symbol raises :class:`CannotTrace` with the reason.

>>> from upgd.methods import METHODS
>>> rule = traced(METHODS["adamw"]())
>>> rule.state, rule.scalars[0].key
(('first_moment', 'second_moment'), 'beta1')
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

import torch

from upgd.methods._scalars import Scalar, Scalars
from upgd.methods.method import Method, Reduction

__all__ = ["CannotTrace", "Rule", "Symbol", "traced", "traced_parts"]

Node = tuple[Any, ...]


class CannotTrace(Exception):
    """Why a rule cannot become a kernel; a clause that goes on after "because"."""


@dataclass
class _Tape:
    """What a rule does, operation by operation; an operation that is done twice is recorded once."""

    nodes: list[Node] = field(default_factory=list)
    places: dict[Node, int] = field(default_factory=dict)
    scalars: list[Scalar] = field(default_factory=list)

    def record(self, *node: Any) -> "Symbol":
        if node not in self.places:
            self.places[node] = len(self.nodes)
            self.nodes.append(node)
        return Symbol(self, self.places[node])

    def symbol(self, value: Any) -> "Symbol":
        """A symbol for whatever meets one."""
        if isinstance(value, Symbol):
            return value
        if isinstance(value, Scalar):
            keys = [scalar.key for scalar in self.scalars]
            if value.key not in keys:
                self.scalars.append(value)
                keys.append(value.key)
            return self.record("scalar", keys.index(value.key))
        if isinstance(value, bool | int | float):
            return self.record("constant", float(value))
        raise CannotTrace(
            f"its rule uses a {type(value).__name__}, which is neither an entry of a parameter nor a number"
        )


class Symbol:
    """Stands for an entry of a parameter, or for what a rule has computed from it."""

    dtype = torch.float32
    is_symbol = True

    def __init__(self, tape: _Tape, place: int) -> None:
        self.tape, self.place = tape, place

    def _with(self, name: str, *others: Any) -> "Symbol":
        return self.tape.record(name, *(self.tape.symbol(value).place for value in (self, *others)))

    def _after(self, name: str, other: Any) -> "Symbol":
        return self.tape.symbol(other)._with(name, self)

    def __add__(self, other: Any) -> "Symbol":
        return self._with("add", other)

    def __radd__(self, other: Any) -> "Symbol":
        return self._after("add", other)

    def __sub__(self, other: Any) -> "Symbol":
        return self._with("sub", other)

    def __rsub__(self, other: Any) -> "Symbol":
        return self._after("sub", other)

    def __mul__(self, other: Any) -> "Symbol":
        return self._with("mul", other)

    def __rmul__(self, other: Any) -> "Symbol":
        return self._after("mul", other)

    def __truediv__(self, other: Any) -> "Symbol":
        if isinstance(other, Scalar):  # known before the loop
            return self._with("mul", 1 / other)
        return self._with("div", other)

    def __rtruediv__(self, other: Any) -> "Symbol":
        return self._after("div", other)

    def __neg__(self) -> "Symbol":
        return self._with("neg")

    def __abs__(self) -> "Symbol":
        return self._with("abs")

    def __pow__(self, power: Any) -> "Symbol":
        if power == 0.5:
            return self.sqrt()
        if not isinstance(power, int) or not 1 <= power <= 8:
            raise CannotTrace(f"its rule takes a power of {power!r}, and kernels know whole powers from 1 to 8")
        result = self
        for _ in range(power - 1):
            result = result * self
        return result

    def __lt__(self, other: Any) -> "Symbol":
        return self._with("lt", other)

    def __le__(self, other: Any) -> "Symbol":
        return self._with("le", other)

    def __gt__(self, other: Any) -> "Symbol":
        return self._with("gt", other)

    def __ge__(self, other: Any) -> "Symbol":
        return self._with("ge", other)

    def __bool__(self) -> bool:
        raise CannotTrace("its rule branches on the value of an entry; torch.where does not")

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise CannotTrace(f"its rule uses .{name} of a tensor, which kernels do not know")

    def sqrt(self) -> "Symbol":
        return self._with("sqrt")

    def exp(self) -> "Symbol":
        return self._with("exp")

    def abs(self) -> "Symbol":
        return self._with("abs")

    def sign(self) -> "Symbol":
        return self._with("sign")

    def tanh(self) -> "Symbol":
        return self._with("tanh")

    def sigmoid(self) -> "Symbol":
        return 1 / (1 + (-self).exp())

    def square(self) -> "Symbol":
        return self * self

    def reciprocal(self) -> "Symbol":
        return 1 / self

    def rsqrt(self) -> "Symbol":
        return 1 / self.sqrt()

    def div(self, other: Any) -> "Symbol":
        return self.__truediv__(other)

    def mul(self, other: Any) -> "Symbol":
        return self.__mul__(other)

    def add(self, other: Any, alpha: float = 1) -> "Symbol":
        return self.__add__(other if alpha == 1 else alpha * other)

    def maximum(self, other: Any) -> "Symbol":
        return self._with("max", other)

    def minimum(self, other: Any) -> "Symbol":
        return self._with("min", other)

    def clamp(self, min: Any = None, max: Any = None) -> "Symbol":
        low = self if min is None else self.maximum(min)
        return low if max is None else low.minimum(max)

    @classmethod
    def __torch_function__(cls, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> "Symbol":
        tape = next(arg.tape for arg in args if isinstance(arg, Symbol))
        if func is torch.where:
            condition, one, other = (tape.symbol(arg) for arg in args)
            return tape.record("where", condition.place, one.place, other.place)
        method = getattr(cls, func.__name__, None)
        if method is None:
            raise CannotTrace(f"its rule calls torch.{func.__name__}, which kernels do not know")
        result: Symbol = method(tape.symbol(args[0]), *args[1:], **(kwargs or {}))
        return result


@dataclass(frozen=True)
class Rule:
    """A rule as operations on symbols.

    Attributes:
        nodes: the operations in order; arguments are places in this list. Inputs are ``("w",)``, ``("g",)``,
            ``("curvature",)``, ``("noise",)``, ``("bound",)``, ``("state", number)``, ``("reduced", number)``,
            ``("scalar", number)``; and of hidden units ``("gate_gradient",)``, ``("gate_curvature",)``,
            ``("unit_state", number)``, ``("unit_observed", number)``, ``("unit_reduced", number)``.
        state: the names of the state tensors.
        scalars: per-learner expressions.
        reductions: what is reduced, by the number of the reduction.
        observed: where the values to be reduced are, likewise.
        new_state: where the new value of each state tensor is; ``None`` where it does not change.
        new_weight: where the new parameter is.
        unit_state, unit_reductions, unit_observed, new_unit_state: the same of hidden units.
    """

    nodes: tuple[Node, ...]
    state: tuple[str, ...]
    scalars: tuple[Scalar, ...]
    reductions: tuple[Reduction, ...]
    observed: tuple[int, ...]
    new_state: tuple[int | None, ...]
    new_weight: int
    unit_state: tuple[str, ...] = ()
    unit_reductions: tuple[Reduction, ...] = ()
    unit_observed: tuple[int, ...] = ()
    new_unit_state: tuple[int | None, ...] = ()

    def uses(self, name: str) -> bool:
        """Whether an input of that kind occurs."""
        return any(node[0] == name for node in self.nodes)


def traced(method: Method) -> Rule:
    """Run a method's rule on symbols."""
    if method.uses_units:
        raise CannotTrace("it looks at hidden units")
    return _rules(method, True)[0]


def traced_parts(method: Method) -> tuple[Rule, Rule]:
    """A method's rule where it has gates and hidden units, and where it has not: in layers that are not gated, and, if the
    method looks at hidden units, in the output layer. Both have the same operations and scalars, by the same numbers."""
    if method.needs("bound"):
        raise CannotTrace("its rule asks for the bound of the initial distribution")
    if not method.uses_units and "gated" not in method.settings:
        (rule,) = _rules(method, True)
        return rule, rule
    first, second = _rules(method, True, False)
    return first, second


def _rules(method: Method, *gated: bool) -> list[Rule]:
    if hasattr(method, "reset_units"):
        raise CannotTrace("it resets hidden units")
    tape = _Tape()
    rules = [_traced(method, tape, with_gates) for with_gates in gated]
    return [replace(rule, nodes=tuple(tape.nodes), scalars=tuple(tape.scalars)) for rule in rules]


def _traced(method: Method, tape: _Tape, gated: bool) -> Rule:
    names, unit_names = tuple(method.state), tuple(method.unit_state)
    h = Scalars(dict.fromkeys(_numbers(method), torch.zeros(1)), _no_tensor)
    w, g = tape.record("w"), tape.record("g")
    state = {name: tape.record("state", number) for number, name in enumerate(names)}
    known: dict[str, Any] = {"w": w, "g": g, "h": h, "t": h.step, "unit": None, "o": None, "r": None}
    known["curvature"] = tape.record("curvature") if method.uses_curvature else None
    known["noise"] = tape.record("noise") if method.needs("noise") else None
    known["bound"] = tape.record("bound") if method.needs("bound") else None
    new: dict[str, Any] = dict(state)
    values: Mapping[str, Any] = {}
    unit_state = {name: tape.record("unit_state", number) for number, name in enumerate(unit_names)}
    new_unit: dict[str, Any] = dict(unit_state)
    unit_values: Mapping[str, Any] = {}
    if method.uses_units and gated:
        new_unit, unit_values = _observed(method, "observe_units", {**known, "units": _Unit(tape, method)}, unit_state)
        seen = {name: tape.record("unit_observed", n) for n, name in enumerate(method.unit_reductions)}
        reduced = {name: tape.record("unit_reduced", n) for n, name in enumerate(method.unit_reductions)}
        known["unit"] = SimpleNamespace(
            o=SimpleNamespace(**seen), r=SimpleNamespace(**reduced), s=SimpleNamespace(**unit_state)
        )
    reductions = dict(method.reductions) if gated else {}
    if hasattr(method, "observe") and gated:
        new, values = _observed(method, "observe", known, state)
        known["o"] = SimpleNamespace(**values)
        known["r"] = SimpleNamespace(**{name: tape.record("reduced", n) for n, name in enumerate(reductions)})
    result = method.call("update", **known, s=SimpleNamespace(**new))
    weight, changed = result if isinstance(result, tuple) else (result, {})
    if isinstance(changed, Mapping):
        new |= changed

    def places(after: Mapping[str, Any], before: Mapping[str, Symbol]) -> tuple[int | None, ...]:
        return tuple(None if after[n] is before[n] else tape.symbol(after[n]).place for n in before)

    return Rule(
        nodes=(),
        state=names,
        scalars=(),
        reductions=tuple(reductions.values()),
        observed=tuple(tape.symbol(values[name]).place for name in reductions),
        new_state=places(new, state),
        new_weight=tape.symbol(weight).place,
        unit_state=unit_names,
        unit_reductions=tuple(method.unit_reductions.values()),
        unit_observed=tuple(tape.symbol(value).place for value in unit_values.values()),
        new_unit_state=places(new_unit, unit_state),
    )


def _observed(
    method: Method, phase: str, known: Mapping[str, Any], state: Mapping[str, Symbol]
) -> tuple[dict[str, Any], Mapping[str, Any]]:
    """What the first phase makes of the state, and the values to be reduced."""
    observation = method.call(phase, **known, s=SimpleNamespace(**state))
    changed, values = observation if isinstance(observation, tuple) else (observation, {})
    new = {**state, **changed}
    if hasattr(method, "measure"):
        values = method.call("measure", **known, s=SimpleNamespace(**new))
    return new, values


class _Unit:
    """What a rule sees of a hidden unit."""

    def __init__(self, tape: _Tape, method: Method) -> None:
        self.ones = tape.symbol(1.0)
        self.gate_gradient = tape.record("gate_gradient")
        self.gate_curvature = tape.record("gate_curvature") if method.uses_curvature else None

    def __getattr__(self, name: str) -> Any:
        raise CannotTrace(f"it asks for units.{name}, which kernels do not know")


def _numbers(method: Method) -> list[str]:
    """The names that the rule finds in ``h``."""
    names = list(method.constants)
    for name, setting in method.settings.items():
        if not setting.is_switch:
            names += setting.pair or (name,)
    return names


def _no_tensor(scalar: Scalar) -> torch.Tensor:
    raise CannotTrace(f"its rule needs {scalar.key} as a tensor")
