"""Per-learner numbers inside a rule: hyperparameters, the step count, and arithmetic on them.

A rule is written once and runs for one learner (hyperparameters are plain numbers) or for a whole population
(hyperparameters are vectors with one entry per learner). In a population, ``h.beta`` is a :class:`Scalar`: an expression
that is evaluated in float64 and only then rounded to the type of the tensor it meets. So ``1 - h.beta`` keeps all bits of
``1 - 0.9999`` in float32 too, and every expression is evaluated once per step, not once per weight.
"""

import operator
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

__all__ = ["Scalar", "Scalars", "evaluate"]

_ARITHMETIC = {
    operator.add: "add",
    operator.sub: "sub",
    operator.mul: "mul",
    operator.truediv: "div",
    operator.pow: "pow",
    operator.mod: "mod",
    operator.eq: "eq",
    operator.lt: "lt",
    operator.le: "le",
    operator.gt: "gt",
    operator.ge: "ge",
}


#: What torch calls where a tensor is divided by something else.
_DIVISIONS = (torch.Tensor.div, torch.Tensor.__truediv__, torch.div, torch.true_divide)


class Scalar:
    """An expression of hyperparameters and the step count, one value per learner.

    Args:
        owner: decides which tensor stands for the expression when it meets one.
        key: identifies the expression; equal keys are equal expressions.
        compute: evaluates the expression, given the values of the names in it.
        changes: whether it depends on the step.
    """

    __slots__ = ("changes", "compute", "key", "owner")

    def __init__(
        self, owner: "Scalars", key: str, compute: Callable[[Mapping[str, Any]], Any], changes: bool = False
    ) -> None:
        self.owner, self.key, self.compute, self.changes = owner, key, compute, changes

    def __repr__(self) -> str:
        return f"<per learner: {self.key}>"

    def __add__(self, other: Any) -> Any:
        return _binary(operator.add, self, other)

    def __radd__(self, other: Any) -> Any:
        return _binary(operator.add, other, self)

    def __sub__(self, other: Any) -> Any:
        return _binary(operator.sub, self, other)

    def __rsub__(self, other: Any) -> Any:
        return _binary(operator.sub, other, self)

    def __mul__(self, other: Any) -> Any:
        return _binary(operator.mul, self, other)

    def __rmul__(self, other: Any) -> Any:
        return _binary(operator.mul, other, self)

    def __truediv__(self, other: Any) -> Any:
        return _binary(operator.truediv, self, other)

    def __rtruediv__(self, other: Any) -> Any:
        return _binary(operator.truediv, other, self)

    def __pow__(self, other: Any) -> Any:
        return _binary(operator.pow, self, other)

    def __rpow__(self, other: Any) -> Any:
        return _binary(operator.pow, other, self)

    def __mod__(self, other: Any) -> Any:
        return _binary(operator.mod, self, other)

    def __eq__(self, other: object) -> Any:
        return _binary(operator.eq, self, other)

    def __lt__(self, other: Any) -> Any:
        return _binary(operator.lt, self, other)

    def __le__(self, other: Any) -> Any:
        return _binary(operator.le, self, other)

    def __gt__(self, other: Any) -> Any:
        return _binary(operator.gt, self, other)

    def __ge__(self, other: Any) -> Any:
        return _binary(operator.ge, self, other)

    __hash__ = None  # type: ignore[assignment]  # equality is an expression, too

    def __neg__(self) -> "Scalar":
        return self.owner.expression("neg", operator.neg, (self,))

    def __bool__(self) -> bool:
        raise TypeError(
            f"{self.key} has one value per learner, so a rule cannot branch on it; use torch.where, or declare the setting "
            "with choices"
        )

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Iterable[type], args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        tensors = [arg for arg in args if isinstance(arg, Tensor)]
        if not tensors:
            first = next(arg for arg in args if isinstance(arg, Scalar))
            return first.owner.expression(func.__name__, _of_tensors(func), args)
        like = max(tensors, key=lambda tensor: tensor.ndim)
        if func in _DIVISIONS and len(args) == 2 and isinstance(args[1], Scalar) and args[1].owner.by_reciprocal:
            return args[0] * _met(1 / args[1], like)
        return func(*(_met(arg, like) for arg in args), **(kwargs or {}))


class Scalars:
    """The hyperparameters of a group of learners, by name: what a rule receives as ``h``.

    Args:
        values: ``{name: (learners,) float64}``.
        resolve: gives the ``(learners,)`` tensor that stands for an expression.
        by_reciprocal: whether a tensor is divided by a scalar through a product with 1/scalar, which is faster where the
            reciprocal is known beforehand and may differ in the last bit.
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
        """The number of the step, from 1."""
        return Scalar(self, "t", operator.itemgetter("t"), changes=True)

    def expression(self, name: str, function: Callable[..., Any], args: tuple[Any, ...]) -> Scalar:
        """A function of scalars and numbers."""
        key = f"{name}({', '.join(arg.key if isinstance(arg, Scalar) else repr(arg) for arg in args)})"

        def compute(values: Mapping[str, Any]) -> Any:
            return function(*(arg.compute(values) if isinstance(arg, Scalar) else arg for arg in args))

        return Scalar(self, key, compute, any(isinstance(arg, Scalar) and arg.changes for arg in args))

    def resolve(self, scalar: Scalar) -> Tensor:
        """One value per learner, ``(learners,)``."""
        return self._resolve(scalar)


def evaluate(scalar: Scalar, values: Mapping[str, Any], like: Tensor) -> Tensor:
    """The expression's values in float64, whatever it is made of; ``like`` has one entry per learner."""
    value = torch.as_tensor(scalar.compute(values), device=like.device)
    value = value if value.dtype == torch.bool else value.to(torch.float64)
    return value.expand_as(value * like)  # also where the values are of several steps


def _binary(function: Callable[[Any, Any], Any], one: Any, other: Any) -> Any:
    for mine, theirs in ((one, other), (other, one)):
        if getattr(theirs, "is_symbol", False):  # a symbol, see upgd.methods.tracing: it knows how to go on
            return NotImplemented
        if isinstance(mine, Scalar) and isinstance(theirs, Tensor):
            return function(_met(one, theirs), _met(other, theirs))
    scalar = one if isinstance(one, Scalar) else other
    return scalar.owner.expression(_ARITHMETIC[function], function, (one, other))


def _of_tensors(func: Callable[..., Any]) -> Callable[..., Any]:
    """A function of torch's for numbers, too."""

    def function(*args: Any) -> Any:
        device = next((arg.device for arg in args if isinstance(arg, Tensor)), None)
        return func(
            *(arg if isinstance(arg, Tensor) else torch.tensor(arg, dtype=torch.float64, device=device) for arg in args)
        )

    return function


def _met(value: Any, like: Tensor) -> Any:
    """What stands for a value when it meets a tensor that begins with the learner dimension."""
    if not isinstance(value, Scalar):
        return value
    resolved = value.owner.resolve(value)
    resolved = resolved.reshape(resolved.shape + (1,) * (like.ndim - resolved.ndim))
    return resolved.to(like.dtype) if like.is_floating_point() and resolved.is_floating_point() else resolved
