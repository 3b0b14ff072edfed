"""Per-learner numbers inside a rule: hyperparameters, the step count, and arithmetic on them.

A rule is written once and runs for one learner (hyperparameters are plain numbers) or for a population (hyperparameters are
vectors with one entry per learner). In a population, ``h.beta`` is a :class:`Scalar`: an expression that is evaluated in
float64 and rounded only when it is combined with a tensor, to the type of that tensor. ``1 - h.beta`` therefore keeps full
precision for ``1 - 0.9999`` even in float32, and every expression is evaluated once per step, not once per weight.
"""

import operator
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

__all__ = ["Scalar", "Scalars", "evaluate"]

_Operator = Callable[["Scalar", Any], Any]
_ARITHMETIC = {
    operator.add: "add",
    operator.sub: "sub",
    operator.mul: "mul",
    operator.truediv: "div",
    operator.pow: "pow",
    operator.mod: "mod",
    operator.floordiv: "floordiv",
    operator.and_: "and_",
    operator.or_: "or_",
    operator.eq: "eq",
    operator.ne: "ne",
    operator.lt: "lt",
    operator.le: "le",
    operator.gt: "gt",
    operator.ge: "ge",
}


#: The functions that torch calls to divide a tensor by another object.
_DIVISIONS = (torch.Tensor.div, torch.Tensor.__truediv__, torch.div, torch.true_divide)
#: The functions with a keyword argument that multiplies the second argument, which torch accepts only as one number for all
#: learners.
_FACTORS = {
    **dict.fromkeys((torch.add, torch.sub, torch.Tensor.add, torch.Tensor.sub), "alpha"),
    **dict.fromkeys((torch.addcmul, torch.addcdiv, torch.Tensor.addcmul, torch.Tensor.addcdiv), "value"),
}
#: Functions that accept either tensors or numbers as limits, but not both.
_CLAMPS = (torch.clamp, torch.clip, torch.Tensor.clamp, torch.Tensor.clip)


def _operators(function: Callable[[Any, Any], Any]) -> tuple[_Operator, _Operator]:
    """Return an operator of :class:`Scalar`, and its reflection, whose first operand is the other object."""

    def operation(self: "Scalar", other: Any) -> Any:
        return _binary(function, self, other)

    def reflected(self: "Scalar", other: Any) -> Any:
        return _binary(function, other, self)

    return operation, reflected


class Scalar:
    """An expression of hyperparameters and the step count, one value per learner.

    Args:
        owner: resolves the expression to a tensor when it is combined with one.
        key: identifies the expression; equal keys are equal expressions.
        compute: evaluates the expression from the values of the names in it.
        changes: whether it depends on the step.
    """

    __slots__ = ("changes", "compute", "key", "owner")

    def __init__(
        self, owner: "Scalars", key: str, compute: Callable[[Mapping[str, Any]], Any], changes: bool = False
    ) -> None:
        self.owner, self.key, self.compute, self.changes = owner, key, compute, changes

    def __repr__(self) -> str:
        return f"<per learner: {self.key}>"

    __add__, __radd__ = _operators(operator.add)
    __sub__, __rsub__ = _operators(operator.sub)
    __mul__, __rmul__ = _operators(operator.mul)
    __truediv__, __rtruediv__ = _operators(operator.truediv)
    __pow__, __rpow__ = _operators(operator.pow)
    __mod__, __rmod__ = _operators(operator.mod)
    __floordiv__, __rfloordiv__ = _operators(operator.floordiv)
    __and__, __rand__ = _operators(operator.and_)
    __or__, __ror__ = _operators(operator.or_)
    # Python reflects comparisons itself: 2 < x asks for x > 2.
    __eq__ = _operators(operator.eq)[0]
    __ne__ = _operators(operator.ne)[0]
    __lt__ = _operators(operator.lt)[0]
    __le__ = _operators(operator.le)[0]
    __gt__ = _operators(operator.gt)[0]
    __ge__ = _operators(operator.ge)[0]
    __hash__ = None  # type: ignore[assignment]  # __eq__ returns an expression

    def __neg__(self) -> "Scalar":
        return self.owner.expression("neg", operator.neg, (self,))

    def __pos__(self) -> "Scalar":
        return self

    def __abs__(self) -> "Scalar":
        return self.owner.expression("abs", operator.abs, (self,))

    def __invert__(self) -> "Scalar":
        return self.owner.expression("invert", _inverted, (self,))

    def __bool__(self) -> bool:
        raise TypeError(
            f"{self.key} has one value per learner, so a rule cannot branch on it; use torch.where, or declare the setting "
            "with choices"
        )

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Iterable[type], args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        named = dict(kwargs or {})
        values = (*args, *named.values())
        if any(getattr(value, "is_symbol", False) for value in values):
            return NotImplemented
        first = next((value for value in values if isinstance(value, Scalar)), None)
        if first is None:
            raise TypeError(f"torch.{func.__name__} of a list of settings is not supported; write it with operators")
        factor = _FACTORS.get(func)
        if isinstance(named.get(factor), Scalar) and len(args) > 1:
            args = (args[0], named.pop(factor) * args[1], *args[2:])
            values = (*args, *named.values())
        tensors = [value for value in values if isinstance(value, Tensor)]
        if not tensors:
            return first.owner.expression(func.__name__, _of_tensors(func), args, named)
        like = max(tensors, key=lambda tensor: tensor.ndim)
        if func in _DIVISIONS and len(args) == 2 and isinstance(args[1], Scalar) and args[1].owner.by_reciprocal:
            return args[0] * _met(1 / args[1], like)
        if func in _CLAMPS and any(isinstance(value, Scalar) for value in values):
            args = tuple(_as_tensor(arg, like) for arg in args)
            named = {name: _as_tensor(value, like) for name, value in named.items()}
        try:
            return func(
                *(_met(arg, like) for arg in args), **{name: _met(value, like) for name, value in named.items()}
            )
        except TypeError as error:
            raise TypeError(
                f"torch.{func.__name__} needs a plain number where it is given {first.key}, which has one value per learner; "
                "write the operation with operators, torch.where or torch.clamp"
            ) from error


class Scalars:
    """The hyperparameters of a group of learners, by name; passed to rules as ``h``.

    Args:
        values: ``{name: (learners,) float64}``.
        resolve: returns the ``(learners,)`` tensor for an expression.
        by_reciprocal: whether to divide a tensor by a scalar as a product with 1/scalar. This is faster if the reciprocal
            is computed beforehand, and may differ in the last bit.
    """

    def __init__(
        self, values: Mapping[str, Tensor], resolve: Callable[[Scalar], Tensor], *, by_reciprocal: bool = False
    ) -> None:
        self._values, self._resolve, self.by_reciprocal = values, resolve, by_reciprocal

    def __getattr__(self, name: str) -> Scalar:
        if name.startswith("_") or name not in self._values:
            raise AttributeError(f"the method has no numeric setting {name!r}; it has {', '.join(self._values)}")
        return Scalar(self, name, operator.itemgetter(name))

    @property
    def step(self) -> Scalar:
        """The step count, from 1."""
        return Scalar(self, "t", operator.itemgetter("t"), changes=True)

    def expression(
        self, name: str, function: Callable[..., Any], args: tuple[Any, ...], named: Mapping[str, Any] | None = None
    ) -> Scalar:
        """Return the expression that applies a function to scalars and numbers."""
        named = named or {}
        texts = [_key(arg) for arg in args] + [f"{name}={_key(value)}" for name, value in named.items()]

        def compute(values: Mapping[str, Any]) -> Any:
            return function(
                *(_computed(arg, values) for arg in args),
                **{name: _computed(value, values) for name, value in named.items()},
            )

        changes = any(isinstance(value, Scalar) and value.changes for value in (*args, *named.values()))
        return Scalar(self, f"{name}({', '.join(texts)})", compute, changes)

    def resolve(self, scalar: Scalar) -> Tensor:
        """Return one value per learner, ``(learners,)``."""
        return self._resolve(scalar)


def evaluate(scalar: Scalar, values: Mapping[str, Any], like: Tensor) -> Tensor:
    """Return the values of the expression in float64; ``like`` has one entry per learner."""
    value = scalar.compute(values)
    # Without a dtype, torch would round a float to 32 bits.
    kind = torch.float64 if isinstance(value, int | float) and not isinstance(value, bool) else None
    value = torch.as_tensor(value, dtype=kind, device=like.device)
    value = value if value.dtype == torch.bool else value.to(torch.float64)
    return value.expand_as(value * like)  # also if there are values of several steps


def _binary(function: Callable[[Any, Any], Any], one: Any, other: Any) -> Any:
    for mine, theirs in ((one, other), (other, one)):
        if getattr(theirs, "is_symbol", False):  # a Symbol of upgd.methods.tracing implements the operation
            return NotImplemented
        if isinstance(mine, Scalar) and isinstance(theirs, Tensor):
            return function(_met(one, theirs), _met(other, theirs))
    scalar = one if isinstance(one, Scalar) else other
    return scalar.owner.expression(_ARITHMETIC[function], function, (one, other))


def _key(value: Any) -> str:
    return value.key if isinstance(value, Scalar) else repr(value)


def _computed(value: Any, values: Mapping[str, Any]) -> Any:
    return value.compute(values) if isinstance(value, Scalar) else value


def _inverted(value: Any) -> Any:
    return not value if isinstance(value, bool) else ~value  # ~True is -2


def _of_tensors(func: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a torch function so that it accepts plain numbers and, for several steps, arrays, which it then returns."""

    def function(*args: Any, **named: Any) -> Any:
        values = (*args, *named.values())
        device = next((value.device for value in values if isinstance(value, Tensor)), None)

        def tensor(value: Any) -> Any:
            if value is None or isinstance(value, Tensor | str | torch.dtype):
                return value
            kind = None if _is_array(value) or isinstance(value, bool) else torch.float64
            made = torch.as_tensor(value, dtype=kind, device=device)
            return made if made.dtype == torch.bool else made.to(torch.float64)

        found = func(*map(tensor, args), **{name: tensor(value) for name, value in named.items()})
        return found.numpy() if device is None and any(map(_is_array, values)) else found

    return function


def _is_array(value: Any) -> bool:
    return hasattr(value, "__array__") and not isinstance(value, Tensor)


def _as_tensor(value: Any, like: Tensor) -> Any:
    return like.new_tensor(value) if isinstance(value, int | float) else value


def _met(value: Any, like: Tensor) -> Any:
    """Return the form of a value that broadcasts against a tensor with a leading learner dimension."""
    if not isinstance(value, Scalar):
        return value
    resolved = value.owner.resolve(value)
    resolved = resolved.reshape(resolved.shape + (1,) * (like.ndim - resolved.ndim))
    return resolved.to(like.dtype) if like.is_floating_point() and resolved.is_floating_point() else resolved
