"""Trace a method's per-entry rule into a list of operations, from which kernels are generated.

The rule runs once on symbols instead of tensors (:class:`Symbol`), which record the operations. Expressions that depend only
on settings and the step remain one number per learner and step (:class:`upgd.methods._scalars.Scalar`); kernels read them
from a table. A rule with an unsupported operation raises :class:`CannotTrace` with the reason.

>>> from upgd.methods import METHODS
>>> rule = traced(METHODS["adamw"]())
>>> rule.state, rule.scalars[0].key
(('first_moment', 'second_moment'), 'beta1')
"""

import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

import torch

from upgd.methods._scalars import Scalar, Scalars
from upgd.methods.method import Method, Reduction, State, results_of

__all__ = [
    "CannotTrace",
    "Rule",
    "Symbol",
    "Tape",
    "called",
    "check_changed",
    "no_tensor",
    "numbers_of",
    "observes_units",
    "traced",
    "traced_parts",
]

Node = tuple[Any, ...]
_Operator = Callable[["Symbol", Any], "Symbol"]

#: Operations whose result is true or false.
_COMPARISONS = ("lt", "le", "gt", "ge", "eq", "ne")
_LOGICAL = ("and", "or", "not")


class CannotTrace(Exception):
    """A rule cannot be compiled to a kernel. The message is a clause that follows "because"."""


@dataclass
class Tape:
    """Records the operations of a rule; repeated operations are recorded once."""

    nodes: list[Node] = field(default_factory=list)
    places: dict[Node, int] = field(default_factory=dict)
    scalars: list[Scalar] = field(default_factory=list)

    def record(self, *node: Any) -> "Symbol":
        if node not in self.places:
            self.places[node] = len(self.nodes)
            self.nodes.append(node)
        return Symbol(self, self.places[node])

    def symbol(self, value: Any) -> "Symbol":
        """Return a symbol for a value that is combined with one."""
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

    def number(self, value: Any) -> "Symbol":
        """Return a symbol for a number; a truth value becomes 0 or 1, as in torch."""
        symbol = self.symbol(value)
        if not self.is_truth(symbol):
            return symbol
        return self.record("where", symbol.place, self.symbol(1.0).place, self.symbol(0.0).place)

    def truth(self, value: Any) -> "Symbol":
        """Return a symbol for a truth value."""
        symbol = self.symbol(value)
        if self.is_truth(symbol):
            return symbol
        if isinstance(value, Scalar | bool):  # which kernels read from a table of numbers
            return self.record("ne", symbol.place, self.symbol(0.0).place)
        raise CannotTrace("its rule uses a number where torch needs true or false")

    def is_truth(self, symbol: "Symbol") -> bool:
        return self.nodes[symbol.place][0] in _COMPARISONS + _LOGICAL


def _operators(name: str) -> tuple[_Operator, _Operator]:
    """Return an operator of :class:`Symbol`, and its reflection, whose first operand is the other object."""

    def operation(self: "Symbol", other: Any) -> "Symbol":
        return self._with(name, other)

    def reflected(self: "Symbol", other: Any) -> "Symbol":
        return self._after(name, other)

    return operation, reflected


class Symbol:
    """Represents an entry of a parameter, or a value computed from it."""

    dtype = torch.float32
    is_symbol = True
    __hash__ = None  # type: ignore[assignment]  # __eq__ returns a symbol

    def __init__(self, tape: Tape, place: int) -> None:
        self.tape, self.place = tape, place

    def _with(self, name: str, *others: Any) -> "Symbol":
        tape, values = self.tape, (self, *others)
        if name in _LOGICAL:
            return tape.record(name, *(tape.truth(value).place for value in values))
        if name not in _COMPARISONS and all(tape.is_truth(tape.symbol(value)) for value in values):
            raise CannotTrace("its rule does arithmetic on truth values alone, which kernels do not support")
        return tape.record(name, *(tape.number(value).place for value in values))

    def _after(self, name: str, other: Any) -> "Symbol":
        first = self.tape.truth(other) if name in _LOGICAL else self.tape.symbol(other)
        return first._with(name, self)

    __add__, __radd__ = _operators("add")
    __sub__, __rsub__ = _operators("sub")
    __mul__, __rmul__ = _operators("mul")
    __rtruediv__ = _operators("div")[1]
    __and__, __rand__ = _operators("and")
    __or__, __ror__ = _operators("or")
    # Python reflects comparisons itself: 2 < x asks for x > 2.
    __lt__ = _operators("lt")[0]
    __le__ = _operators("le")[0]
    __gt__ = _operators("gt")[0]
    __ge__ = _operators("ge")[0]
    __eq__ = _operators("eq")[0]  # type: ignore[assignment]
    __ne__ = _operators("ne")[0]  # type: ignore[assignment]

    def __truediv__(self, other: Any) -> "Symbol":
        if isinstance(other, Scalar):  # the reciprocal is computed before the loop
            return self._with("mul", 1 / other)
        return self._with("div", other)

    def __neg__(self) -> "Symbol":
        return self._with("neg")

    def __pos__(self) -> "Symbol":
        return self

    def __abs__(self) -> "Symbol":
        return self._with("abs")

    def __pow__(self, power: Any) -> "Symbol":
        if isinstance(power, float) and power == 0.5:
            return self.sqrt()
        if not isinstance(power, int) or not 1 <= power <= 8:
            raise CannotTrace(f"its rule uses the power {power!r}, but kernels support integer powers from 1 to 8 only")
        result = self
        for _ in range(power - 1):
            result = result * self
        return result

    def __rpow__(self, base: Any) -> "Symbol":
        # The logarithm is computed before the loop. The summand, which no other base notices, makes that of 0 finite: 0⁰ = 1.
        above_zero = base + 1e-300
        return (self * (torch.log(above_zero) if isinstance(base, Scalar) else math.log(above_zero))).exp()

    def __invert__(self) -> "Symbol":
        return self._with("not")

    def __bool__(self) -> bool:
        raise CannotTrace("its rule branches on the value of an entry; use torch.where")

    def __getitem__(self, index: Any) -> "Symbol":
        raise CannotTrace("its rule takes a part of a tensor, which kernels do not support")

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise CannotTrace(f"its rule uses .{name} of a tensor, which kernels do not support")

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

    def add(self, other: Any, alpha: Any = 1) -> "Symbol":
        return self.__add__(other if isinstance(alpha, int | float) and alpha == 1 else alpha * other)

    def maximum(self, other: Any) -> "Symbol":
        return self._with("max", other)

    def minimum(self, other: Any) -> "Symbol":
        return self._with("min", other)

    def clamp(self, min: Any = None, max: Any = None) -> "Symbol":
        low = self if min is None else self.maximum(min)
        return low if max is None else low.minimum(max)

    @classmethod
    def __torch_function__(cls, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> "Symbol":
        tape = next((arg.tape for arg in (*args, *(kwargs or {}).values()) if isinstance(arg, Symbol)), None)
        if tape is None:
            raise CannotTrace(
                f"its rule calls torch.{func.__name__} with a list of tensors, which kernels do not support"
            )
        if func is torch.where:
            condition, one, other = args
            if tape.is_truth(tape.symbol(one)) and tape.is_truth(tape.symbol(other)):
                raise CannotTrace("its rule chooses between truth values")
            return tape.record(
                "where", *(tape.truth(condition).place, tape.number(one).place, tape.number(other).place)
            )
        method = getattr(cls, func.__name__, None)
        if method is None:
            raise CannotTrace(f"its rule calls torch.{func.__name__}, which kernels do not support")
        result: Symbol = method(tape.symbol(args[0]), *args[1:], **(kwargs or {}))
        return result


@dataclass(frozen=True, eq=False)
class Rule:
    """A rule as a list of operations on symbols.

    Attributes:
        nodes: the operations in order; arguments are indices into this list. Inputs are ``("w",)``, ``("g",)``,
            ``("curvature",)``, ``("noise",)``, ``("bound",)``, ``("state", number)``, ``("reduced", number)``,
            ``("scalar", number)``; and for hidden units ``("gate_gradient",)``, ``("gate_curvature",)``,
            ``("unit_state", number)``, ``("unit_observed", number)``, ``("unit_reduced", number)``.
        state: the names of the state tensors.
        scalars: per-learner expressions.
        reductions: the reductions, by number.
        observed: the indices of the values to reduce, by number.
        new_state: the index of the new value of each state tensor; ``None`` if it does not change.
        new_weight: the index of the new parameter.
        stored_state: the index of the value of each state tensor that the first phase stores, so that ``observed`` and all
            that follows begin with it; ``None`` if it stores nothing, and ``new_state`` has it all.
        unit_state, unit_reductions, unit_observed, new_unit_state: the same for hidden units.
    """

    nodes: tuple[Node, ...]
    state: tuple[str, ...]
    scalars: tuple[Scalar, ...]
    reductions: tuple[Reduction, ...]
    observed: tuple[int, ...]
    new_state: tuple[int | None, ...]
    new_weight: int
    stored_state: tuple[int | None, ...] = ()
    unit_state: tuple[str, ...] = ()
    unit_reductions: tuple[Reduction, ...] = ()
    unit_observed: tuple[int, ...] = ()
    new_unit_state: tuple[int | None, ...] = ()

    def uses(self, name: str) -> bool:
        """Return whether the rule uses an input of that kind."""
        return any(node[0] == name for node in self.nodes)


def observes_units(method: Method) -> bool:
    """Return whether this variant looks at hidden units before the update."""
    return method.uses_units and hasattr(method, "observe_units")


def traced(method: Method, *, gated: bool = True, resets: bool = False) -> Rule:
    """Trace a method's rule, or that of layers without gates if ``gated`` is false.

    With ``resets``, the method may reset hidden units, which :mod:`.reset_tracing` traces.
    """
    if observes_units(method) if resets else method.uses_units:
        raise CannotTrace("it uses hidden units")
    return _rules(method, gated)[0]


def traced_parts(method: Method) -> tuple[Rule, Rule]:
    """Trace a method's rule with gates and hidden units, and without them, as used in layers without gates and, if the method
    observes hidden units, in the output layer. Both rules share the list of operations and scalars, with the same numbers.
    The first phase stores its state if the values to reduce follow from it alone. :mod:`.reset_tracing` traces resets."""
    if not method.uses_units and "gated" not in method.settings:
        (rule,) = _rules(method, True, stores=True)
        return rule, rule
    first, second = _rules(method, True, False, stores=True)
    return first, second


def _rules(method: Method, *gated: bool, stores: bool = False) -> list[Rule]:
    tape = Tape()
    rules = [_traced(method, tape, with_gates, stores) for with_gates in gated]
    return [replace(rule, nodes=tuple(tape.nodes), scalars=tuple(tape.scalars)) for rule in rules]


def _traced(method: Method, tape: Tape, gated: bool, stores: bool) -> Rule:
    names, unit_names = tuple(method.state), tuple(method.unit_state)
    h = Scalars(dict.fromkeys(numbers_of(method), torch.zeros(1)), no_tensor)
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
    if gated and observes_units(method):
        new_unit, unit_values = _observed(method, "observe_units", {**known, "units": _Unit(tape, method)}, unit_state)
        seen = {name: tape.record("unit_observed", n) for n, name in enumerate(method.unit_reductions)}
        reduced = {name: tape.record("unit_reduced", n) for n, name in enumerate(method.unit_reductions)}
        known["unit"] = SimpleNamespace(
            o=SimpleNamespace(**seen), r=SimpleNamespace(**reduced), s=SimpleNamespace(**unit_state)
        )
    reductions = dict(method.reductions) if gated else {}
    stored = state
    if hasattr(method, "observe") and gated:
        new, values = _observed(method, "observe", known, state)
        if stores and reductions and hasattr(method, "measure"):
            stored, new = new, dict(state)
            values = called(method, "measure", **known, s=SimpleNamespace(**state))
        known["o"] = SimpleNamespace(**values)
        known["r"] = SimpleNamespace(**{name: tape.record("reduced", n) for n, name in enumerate(reductions)})
    weight, changed = results_of(method, "update", called(method, "update", **known, s=State(**new)))
    check_changed(method, changed, names)
    new |= changed

    def places(after: Mapping[str, Any], before: Mapping[str, Symbol]) -> tuple[int | None, ...]:
        return tuple(None if after[n] is before[n] else tape.number(after[n]).place for n in before)

    return Rule(
        nodes=(),
        state=names,
        scalars=(),
        reductions=tuple(reductions.values()),
        observed=tuple(tape.number(values[name]).place for name in reductions),
        new_state=places(new, state),
        new_weight=tape.number(weight).place,
        stored_state=places(stored, state),
        unit_state=unit_names,
        unit_reductions=tuple(method.unit_reductions.values()),
        unit_observed=tuple(tape.number(value).place for value in unit_values.values()),
        new_unit_state=places(new_unit, unit_state),
    )


def _observed(
    method: Method, phase: str, known: Mapping[str, Any], state: Mapping[str, Symbol]
) -> tuple[dict[str, Any], Mapping[str, Any]]:
    """Return the state after the first phase, and the values to reduce."""
    changed, values = results_of(method, phase, called(method, phase, **known, s=State(**state)))
    check_changed(method, changed, state)
    new = {**state, **changed}
    if hasattr(method, "measure"):
        values = called(method, "measure", **known, s=SimpleNamespace(**new))
    return new, values


def called(method: Method, phase: str, **arguments: Any) -> Any:
    """Run a phase of the rule on symbols. What they do not support must not stop a rule that runs on tensors, and an error of
    the rule itself is raised again when it does."""
    try:
        return method.call(phase, **arguments)
    except CannotTrace:
        raise
    except Exception as error:
        what = str(error).partition("\n")[0]
        raise CannotTrace(f"its rule raises {type(error).__name__} for symbols in place of tensors: {what}") from error


def check_changed(method: Method, changed: Mapping[str, Any], own: Collection[str]) -> None:
    """Raise the error of the torch backend if a phase changes a state that the method does not declare."""
    for name in changed:
        if name not in method.state and name not in method.unit_state:
            raise ValueError(f"{method.name} changes the state {name!r}, which it does not declare")
        if name not in own:
            raise CannotTrace(f"its rule changes the state {name!r} outside of the phase of that state")


class _Unit:
    """A hidden unit in a rule."""

    def __init__(self, tape: Tape, method: Method) -> None:
        self.ones = tape.symbol(1.0)
        self.gate_gradient = tape.record("gate_gradient")
        self.gate_curvature = tape.record("gate_curvature") if method.uses_curvature else None

    def __getattr__(self, name: str) -> Any:
        raise CannotTrace(f"it uses units.{name}, which kernels do not support")


def numbers_of(method: Method) -> list[str]:
    """Return the names of the numbers in ``h``."""
    names = list(method.constants)
    for name, setting in method.settings.items():
        if not setting.is_switch:
            names += setting.pair or (name,)
    return names


def no_tensor(scalar: Scalar) -> torch.Tensor:
    raise CannotTrace(f"its rule needs {scalar.key} as a tensor")
