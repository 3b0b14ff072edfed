"""Approximate utilities, of weights and of features, at the cost of one backward pass at most."""

from collections.abc import Callable, Mapping, Sequence
from typing import Literal

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad

from upgd import rules
from upgd.curvature import HesScale
from upgd.utility._derivatives import hessian_diagonal
from upgd.utility._model import Criterion, Feature, calls, check_repeatable, find_features, gated

__all__ = ["first_order", "magnitude", "random", "second_order", "squared_gradient"]

Of = Literal["weights", "features"]
Loss = Callable[[dict[str, Tensor]], Tensor]


def first_order(
    model: nn.Module,
    criterion: Criterion,
    x: Tensor,
    y: Tensor,
    *,
    of: Of = "weights",
    features: Sequence[str] | None = None,
) -> dict[str, Tensor]:
    """The first-order approximation of the true utility: ``−g·w`` of a weight, ``−∂L/∂m`` of a feature with gate m = 1.

    Args:
        model: any module; it is called as ``model(x)``.
        criterion: the loss, called as ``criterion(model(x), y)``.
        x: inputs.
        y: targets.
        of: ``"weights"`` (and biases), or ``"features"``: hidden units after their activation, channels of convolutions.
        features: names of the modules whose outputs are the features. By default the activations between the layers.

    Returns:
        Names of parameters (or of the modules that put out features) to tensors.

    Example:
        >>> model = nn.Linear(2, 1, bias=False)
        >>> _ = nn.init.ones_(model.weight)
        >>> first_order(model, nn.MSELoss(), torch.tensor([[1.0, 2.0]]), torch.tensor([[2.0]]))
        {'weight': tensor([[-2., -4.]])}
    """
    loss, items = _loss_of(model, criterion, x, y, of, features)
    gradients = grad(loss)(items)
    return {name: rules.utility(items[name], gradients[name]) for name in items}


def second_order(
    model: nn.Module,
    criterion: Criterion,
    x: Tensor,
    y: Tensor,
    *,
    of: Of = "weights",
    features: Sequence[str] | None = None,
    curvature: Literal["hesscale", "exact"] = "hesscale",
) -> dict[str, Tensor]:
    """The second-order approximation: ``½·h·w² − g·w`` of a weight, ``½·∂²L/∂m² − ∂L/∂m`` of a feature with gate m = 1.

    Args:
        model: as for :func:`first_order`.
        criterion: as for :func:`first_order`; for ``"hesscale"`` a loss module that :class:`upgd.HesScale` knows.
        x: inputs.
        y: targets.
        of: as for :func:`first_order`.
        features: as for :func:`first_order`.
        curvature: ``"hesscale"`` estimates the second derivatives in one backward sweep; ``"exact"`` computes them, with
            one pass for every single item: for small networks, to see what the estimate costs. HesScale rides on an
            ordinary backward pass, which hooks of your own, another HesScale among them, will see.

    Returns:
        Names of parameters (or of the modules that put out features) to tensors.
    """
    if curvature not in ("hesscale", "exact"):
        raise ValueError(f"curvature must be 'hesscale' or 'exact', not {curvature!r}")
    loss, items = _loss_of(model, criterion, x, y, of, features)
    gradients = grad(loss)(items)
    if curvature == "exact":
        diagonals = {name: _exact_diagonal(loss, items, name) for name in items}
    else:
        diagonals = _hesscale_diagonals(model, criterion, x, y, of, features)
    return {name: rules.utility(items[name], gradients[name], diagonals[name]) for name in items}


def squared_gradient(
    model: nn.Module,
    criterion: Criterion,
    x: Tensor,
    y: Tensor,
    *,
    of: Of = "weights",
    features: Sequence[str] | None = None,
) -> dict[str, Tensor]:
    """The squared gradient: ``g²`` of a weight, ``(∂L/∂m)²`` of a feature with gate m = 1. Arguments as for
    :func:`first_order`."""
    loss, items = _loss_of(model, criterion, x, y, of, features)
    return {name: gradient**2 for name, gradient in grad(loss)(items).items()}


@torch.no_grad()
def magnitude(
    model: nn.Module,
    criterion: Criterion,
    x: Tensor,
    y: Tensor,
    *,
    of: Of = "weights",
    features: Sequence[str] | None = None,
) -> dict[str, Tensor]:
    """The magnitude: ``|w|`` of a weight; of a feature, the mean of ``|h|`` over the batch (and a channel's positions).
    Arguments as for :func:`first_order`."""
    if _checked(of) == "weights":
        return {name: parameter.detach().abs() for name, parameter in model.named_parameters()}
    found = find_features(model, x, features)
    outputs = {call.name: call.output for call in calls(model, x)}
    return {feature.name: _mean_magnitude(outputs[feature.name], feature) for feature in found}


@torch.no_grad()
def random(
    model: nn.Module,
    criterion: Criterion,
    x: Tensor,
    y: Tensor,
    *,
    of: Of = "weights",
    features: Sequence[str] | None = None,
    generator: torch.Generator | None = None,
) -> dict[str, Tensor]:
    """Standard normals, the control that knows nothing. Arguments as for :func:`first_order`; ``generator`` as torch's."""
    _, items = _loss_of(model, criterion, x, y, of, features)
    return {name: torch.empty_like(item).normal_(generator=generator) for name, item in items.items()}


def _loss_of(
    model: nn.Module, criterion: Criterion, x: Tensor, y: Tensor, of: Of, names: Sequence[str] | None
) -> tuple[Loss, dict[str, Tensor]]:
    """The loss as a function of the things whose utility is asked for, and their values: weights, or gates of 1."""
    check_repeatable(model)
    weights = {name: parameter.detach() for name, parameter in model.named_parameters()}
    if _checked(of) == "weights":
        return lambda changed: criterion(functional_call(model, changed, (x,)), y), weights
    found = find_features(model, x, names)

    def gated_loss(gates: dict[str, Tensor]) -> Tensor:
        with gated(found, gates):
            return criterion(functional_call(model, weights, (x,)), y)

    return gated_loss, {feature.name: feature.open for feature in found}


def _exact_diagonal(loss: Loss, items: Mapping[str, Tensor], name: str) -> Tensor:
    return hessian_diagonal(lambda changed: loss({**items, name: changed}), items[name])


def _hesscale_diagonals(
    model: nn.Module, criterion: Criterion, x: Tensor, y: Tensor, of: Of, names: Sequence[str] | None
) -> dict[str, Tensor]:
    if not isinstance(criterion, nn.Module):
        raise TypeError(
            f"criterion must be a loss module such as nn.MSELoss() for curvature='hesscale', not {criterion!r}"
        )
    parameters = dict(model.named_parameters())
    found = find_features(model, x, names) if of == "features" else []
    watched = [feature.module for feature in found]
    before = {name: (parameter.grad, parameter.requires_grad) for name, parameter in parameters.items()}
    try:
        for parameter in parameters.values():
            parameter.grad = None
            parameter.requires_grad_(True)  # what is frozen has a utility, too
        with torch.enable_grad(), HesScale(model, criterion, features=watched) as curvature:
            criterion(model(x), y).backward()
            if of == "weights":
                return {name: curvature.diagonal(parameter) for name, parameter in parameters.items()}
            return {feature.name: curvature.feature_diagonal(feature.module) for feature in found}
    finally:
        for name, parameter in parameters.items():
            parameter.grad, parameter.requires_grad = before[name]


def _mean_magnitude(output: Tensor, feature: Feature) -> Tensor:
    by_feature = output.abs().movedim(feature.dim, 0)
    return by_feature.flatten(1).mean(1) if by_feature.ndim > 1 else by_feature


def _checked(of: str) -> str:
    if of not in ("weights", "features"):
        raise ValueError(f"of must be 'weights' or 'features', not {of!r}")
    return of
