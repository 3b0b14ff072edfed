"""Reductions of the values returned by ``observe``: a maximum, norm, mean or sum over the learner, a layer or a unit."""

from collections.abc import Mapping

import torch
from torch import Tensor

from upgd import rules
from upgd.methods.method import Reduction

__all__ = ["reduced"]


def reduced(
    reductions: Mapping[str, Reduction], observed: Mapping[str, Mapping[str, Tensor]], learner_dims: int = 0
) -> dict[str, dict[str, Tensor]]:
    """Reduce observed values.

    Args:
        reductions: see :class:`upgd.methods.Method`.
        observed: the values by name, for each parameter tensor (or layer of units) by name.
        learner_dims: number of leading learner dimensions of every tensor.

    Returns:
        The reductions by name, for each tensor of ``observed``, in shapes that broadcast against it.
    """
    results: dict[str, dict[str, Tensor]] = {of: {} for of in observed}
    for name, (operation, over) in reductions.items():
        values = {of: own[name] for of, own in observed.items() if own[name].numel()}
        if over == "learner":
            overall = _over_learner(operation, list(values.values()), learner_dims) if values else None
            for of, value in values.items():
                assert overall is not None
                results[of][name] = _broadcast(overall.to(value), value)
        else:
            for of, value in values.items():
                results[of][name] = _within(operation, over, value, learner_dims)
    return results


def _over_learner(operation: str, values: list[Tensor], learner_dims: int) -> Tensor:
    if operation == "max":
        return rules.largest(values, learner_dims)
    device = values[0].device
    if operation == "norm":
        squares = [(value**2).flatten(learner_dims).sum(-1).to(device) for value in values]
        return torch.stack(squares).sum(0).sqrt()
    sums = torch.stack([value.flatten(learner_dims).sum(-1).to(device) for value in values])
    if operation == "sum":
        return sums.sum(0)
    count = sum(value[(0,) * learner_dims].numel() for value in values)
    return torch.div(sums.sum(0), count)


def _within(operation: str, over: str, value: Tensor, learner_dims: int) -> Tensor:
    """Reduce one tensor, or each unit of it: a row of a Linear weight, a filter, or a whole bias vector."""
    inner = value.ndim - learner_dims
    if inner == 0:
        return value.abs() if operation == "norm" else value
    first = learner_dims + 1 if over == "unit" and inner > 1 else learner_dims
    dims = tuple(range(first, value.ndim))
    if operation == "norm":
        norm: Tensor = torch.linalg.vector_norm(value, dim=dims, keepdim=True)
        return norm
    if operation == "sum":
        return value.sum(dims, keepdim=True)
    return value.amax(dims, keepdim=True) if operation == "max" else value.mean(dims, keepdim=True)


def _broadcast(value: Tensor, like: Tensor) -> Tensor:
    return value.reshape(value.shape + (1,) * (like.ndim - value.ndim))
