"""Trace ``reset_units`` of a method into operations on one hidden unit, from which kernels are generated.

The hook is written for all units of a layer at once. It runs on symbols that track their axes. Every operation is therefore
either an operation on single units or a *join*, which needs all units: a sum, mean or maximum over the units of the layer, or
the selection of the units with the smallest values. Kernels compute the joins in order; everything between them is arithmetic
on one unit.

>>> from upgd.methods import METHODS
>>> rule = traced_reset(METHODS["continual-backprop"]())
>>> [join.operation for join in rule.joins]
['sum', 'smallest', 'sum']
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch

from upgd.methods._scalars import Scalar, Scalars
from upgd.methods.method import Method
from upgd.methods.tracing import (
    CannotTrace,
    Node,
    Symbol,
    Tape,
    called,
    check_changed,
    no_tensor,
    numbers_of,
    observes_units,
)

__all__ = ["Join", "ResetRule", "traced_reset"]

#: Axes: learners, outputs of the next layer, units, positions (one in an MLP); and an axis of length one.
_LEARNER, _OUTPUT, _UNIT, _PLACE, _ONE = "learner", "output", "unit", "place", "one"
_Axes = tuple[str, ...]


class Join(NamedTuple):
    """A value that depends on all units of a layer."""

    operation: str  #: ``"sum"``, ``"mean"`` or ``"max"``, one number; or ``"smallest"``, a flag for each unit
    value: int  #: the index of the joined value
    limit: int | None = None  #: for ``smallest``, the index of the number of units, one per layer


@dataclass(frozen=True, eq=False)
class ResetRule:
    """``reset_units`` as a list of operations on one unit.

    Attributes:
        nodes: the operations in order; arguments are indices into this list. Inputs are ``("activation",)``, ``("draw",)``,
            ``("unit_state", number)``, ``("outgoing",)`` (one outgoing weight), ``("outgoing_sum", number)``,
            ``("joined", number)``, ``("scalar", number)``.
        scalars: per-learner expressions.
        outgoing: the indices of the values of an outgoing weight that are summed over the outgoing weights of a unit.
        joins: values that depend on all units, in order of computation.
        new_state: the index of the new value of each unit state; ``None`` if it does not change.
        chosen: the index of the flag that selects the unit for a reset.
        moved: the index of the factor of the outgoing weights that is added to the biases of the next layer; or ``None``.
        zeroes: whether outgoing weights become zero.
    """

    nodes: tuple[Node, ...]
    scalars: tuple[Scalar, ...]
    outgoing: tuple[int, ...]
    joins: tuple[Join, ...]
    new_state: tuple[int | None, ...]
    chosen: int
    moved: int | None
    zeroes: bool


def traced_reset(method: Method) -> ResetRule | None:
    """Trace the hook of a method for MLPs; ``None`` if it has none."""
    if not hasattr(method, "reset_units"):
        return None
    if observes_units(method):
        raise CannotTrace("it both observes and resets hidden units")
    if unknown := [begin for begin in method.unit_state.values() if begin not in ("zeros", "layer")]:
        raise CannotTrace(f"the state of its units begins as {unknown[0]!r}, but kernels begin with zeros")
    tape = _Tape()
    h = Scalars(dict.fromkeys(numbers_of(method), torch.zeros(1)), no_tensor)
    state = {
        name: tape.value((_LEARNER, _UNIT if begins_as == "zeros" else _ONE), "unit_state", number)
        for number, (name, begins_as) in enumerate(method.unit_state.items())
    }
    known = {"units": _Units(tape), "s": _Named(**state), "h": h, "t": h.step}
    reset, changed = called(method, "reset_units", **known, draw=lambda: tape.value((_LEARNER, _UNIT), "draw"))
    check_changed(method, changed, state)
    new = {**state, **changed}
    for name, before in state.items():
        axes = _of(new[name])
        if (_UNIT in axes and _UNIT not in before.axes) or _OUTPUT in axes or _PLACE in axes:
            raise CannotTrace(f"the new state {name!r} has the shape ({', '.join(axes)}), which kernels do not support")
    chosen = tape.symbol(reset.units)
    moved = None if reset.next_bias is None else _factor(tape, reset.next_bias)
    return ResetRule(
        nodes=tuple(tape.nodes),
        outgoing=tuple(tape.outgoing),
        joins=tuple(tape.joins),
        new_state=tuple(None if new[n] is state[n] else tape.symbol(new[n]).place for n in state),
        chosen=chosen.place,
        moved=moved,
        zeroes=bool(reset.outgoing),
        scalars=tuple(tape.scalars),
    )


@dataclass
class _Tape(Tape):
    outgoing: list[int] = field(default_factory=list)
    joins: list[Join] = field(default_factory=list)

    def value(self, axes: _Axes, *node: Any) -> "_Value":
        return _Value(self, self.record(*node).place, axes)

    def kind(self, place: int) -> Any:
        return self.nodes[place][0]

    def inputs(self, place: int) -> set[Any]:
        """Return the kinds of inputs that a value is computed from."""
        kind, *arguments = self.nodes[place]
        if kind in ("activation", "draw", "unit_state", "outgoing", "outgoing_sum", "joined", "scalar", "constant"):
            return {kind}
        return set().union(*(self.inputs(argument) for argument in arguments))


class _Value(Symbol):
    """A value of every unit, of the layer, or of every outgoing weight."""

    tape: _Tape

    def __init__(self, tape: _Tape, place: int, axes: _Axes) -> None:
        super().__init__(tape, place)
        self.axes = axes

    def _with(self, name: str, *others: Any) -> "_Value":
        return _combined(self.tape, name, (self, *others))

    def _after(self, name: str, other: Any) -> "_Value":
        return _combined(self.tape, name, (other, self))

    def __pow__(self, power: Any) -> "_Value":
        if isinstance(power, int):
            return super().__pow__(power)  # type: ignore[return-value]
        return self._with("pow", power)

    def __getitem__(self, index: Any) -> "_Value":
        axes = list(self.axes)
        made = []
        for item in index if isinstance(index, tuple) else (index,):
            if item is not None and item != slice(None):
                raise CannotTrace(f"it takes [{item!r}] of the values of units, but kernels only support : and None")
            made.append(_ONE if item is None else axes.pop(0))
        return _Value(self.tape, self.place, (*made, *axes))

    def to(self, *_: Any) -> "_Value":
        return self

    def floor(self) -> "_Value":
        return self._with("floor")

    def zeros_like(self) -> "_Value":
        return _Value(self.tape, self.tape.symbol(0.0).place, self.axes)

    def ones_like(self) -> "_Value":
        return _Value(self.tape, self.tape.symbol(1.0).place, self.axes)

    def sum(self, dim: Any, keepdim: bool = False) -> "_Value":
        return self._reduced("sum", dim, keepdim)

    def mean(self, dim: Any, keepdim: bool = False) -> "_Value":
        return self._reduced("mean", dim, keepdim)

    def amax(self, dim: Any, keepdim: bool = False) -> "_Value":
        return self._reduced("max", dim, keepdim)

    def any(self, dim: Any, keepdim: bool = False) -> "_Value":
        return self._reduced("max", dim, keepdim)

    def argsort(self, dim: int = -1, stable: bool = False) -> "_Value":
        if self.axes[dim] != _UNIT:
            raise CannotTrace("it sorts something else than the units of a layer")
        if self.tape.kind(self.place) == "order":
            return self.tape.value(self.axes, "rank", *self.tape.nodes[self.place][1:])
        if not stable:
            raise CannotTrace("its order of units with equal values is undefined; use stable=True")
        return self.tape.value(self.axes, "order", self.place)

    def _reduced(self, operation: str, dim: Any, keepdim: bool) -> "_Value":
        dims = {axis % len(self.axes) for axis in (dim if isinstance(dim, tuple | list) else (dim,))}
        over = {self.axes[axis] for axis in dims} - {_PLACE, _ONE}
        left = [(_ONE if i in dims else axis) for i, axis in enumerate(self.axes) if keepdim or i not in dims]
        axes, tape = tuple(left), self.tape
        if _is_order(self):
            raise CannotTrace("it reduces the order of units, which kernels do not support")
        if not over:  # there is only one position
            return _Value(tape, self.place, axes)
        if over == {_UNIT} and _OUTPUT not in self.axes:
            tape.joins.append(Join(operation, self.place))
            return tape.value(axes, "joined", len(tape.joins) - 1)
        if operation == "sum" and over == {_OUTPUT}:
            if not tape.inputs(self.place) <= {"outgoing", "scalar", "constant"}:
                raise CannotTrace("it sums more than a function of outgoing weights over the outputs")
            tape.outgoing.append(self.place)
            return tape.value(axes, "outgoing_sum", len(tape.outgoing) - 1)
        if operation == "sum" and over == {_UNIT}:
            return tape.value(axes, "moved", self.place)
        raise CannotTrace(f"it takes the {operation} over {' and '.join(sorted(over))}, which kernels do not support")

    @classmethod
    def __torch_function__(cls, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> "_Value":
        tape = next(arg.tape for arg in args if isinstance(arg, _Value))
        if func is torch.where:
            return _combined(tape, "where", args)
        return super().__torch_function__(func, types, args, kwargs)  # type: ignore[return-value]


class _Units:
    """The units of a layer in the hook; see :class:`upgd.methods.units.Units`."""

    def __init__(self, tape: _Tape) -> None:
        self.activation = tape.value((_LEARNER, _UNIT, _PLACE), "activation")
        self.outgoing = tape.value((_LEARNER, _OUTPUT, _UNIT, _PLACE), "outgoing")

    def __getattr__(self, name: str) -> Any:
        raise CannotTrace(f"it uses units.{name}, which kernels do not support")


class _Named(SimpleNamespace):
    """The state in the hook."""

    def __getattr__(self, name: str) -> Any:
        raise CannotTrace(f"it uses the state s.{name} of weights, which kernels do not support")


def _of(value: Any) -> _Axes:
    return value.axes if isinstance(value, _Value) else ()


def _is_order(value: Any) -> bool:
    return isinstance(value, _Value) and value.tape.kind(value.place) in ("order", "rank", "moved")


def _combined(tape: _Tape, name: str, values: Sequence[Any]) -> _Value:
    axes: _Axes = ()
    for value in values:
        axes = _broadcast(axes, _of(value))
    if any(map(_is_order, values)):
        first, *others = values
        if name != "lt" or tape.kind(first.place) != "rank" or _UNIT in _of(others[0]):
            raise CannotTrace(
                "it uses the order of units for more than choosing a number of those with the smallest values"
            )
        tape.joins.append(Join("smallest", tape.nodes[first.place][1], tape.symbol(others[0]).place))
        return tape.value(axes, "joined", len(tape.joins) - 1)
    return tape.value(axes, name, *(tape.symbol(value).place for value in values))


def _broadcast(one: _Axes, other: _Axes) -> _Axes:
    length = max(len(one), len(other))
    pairs = zip(*((_ONE,) * (length - len(axes)) + axes for axes in (one, other)), strict=True)
    made = []
    for a, b in pairs:
        if a != b and _ONE not in (a, b):
            raise CannotTrace(f"it combines the shapes ({', '.join(one)}) and ({', '.join(other)})")
        made.append(b if a == _ONE else a)
    return tuple(made)


def _factor(tape: _Tape, moved: Any) -> int:
    """Return the index of the factor of outgoing weights whose sum over units is added to the biases of the next layer."""
    if isinstance(moved, _Value) and tape.kind(moved.place) == "moved":
        kind, *arguments = tape.nodes[tape.nodes[moved.place][1]]
        for weight, factor in (arguments, reversed(arguments)) if kind == "mul" else ():
            if tape.kind(weight) == "outgoing" and "outgoing" not in tape.inputs(factor):
                return int(factor)
    raise CannotTrace("next_bias is not the sum over units of their outgoing weights times a number of each unit")
