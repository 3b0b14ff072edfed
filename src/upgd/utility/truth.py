"""True utility: the change of the loss when a weight or feature is removed."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap
from torch.utils._pytree import tree_leaves

from upgd.utility._model import Criterion, Feature, calls, find_features, gated, hooked

__all__ = ["true_features", "true_weights"]

#: Memory limit, in bytes, for removals that are computed at once.
_MEMORY = 1 << 27
#: The index that stands for no removal.
_NOTHING = -1


@torch.no_grad()
def true_weights(
    model: nn.Module, criterion: Criterion, x: Tensor, y: Tensor, *, chunk: int | None = None
) -> dict[str, Tensor]:
    """Return the true utility of every weight and bias: ``L(weights without w) − L(weights)``, on the same sample or batch.

    Each entry is removed separately, many at a time with ``torch.func.vmap`` where torch supports it. Removing a weight of
    a Linear layer changes one pre-activation, so only the modules after the layer are recomputed.

    Args:
        model: Any module, called as ``model(x)``.
        criterion: The loss, called as ``criterion(model(x), y)``; it must return a scalar.
        x: The inputs.
        y: The targets.
        chunk: Number of removals to compute at once. Default: as many as fit in 128 MiB.

    Returns:
        A tensor of the parameter's shape for each name of ``model.named_parameters()``. The difference of two losses
        contains their rounding errors; use float64 if small utilities matter.

    Example:
        >>> model = nn.Linear(2, 1, bias=False)
        >>> _ = nn.init.ones_(model.weight)
        >>> true_weights(model, nn.MSELoss(), torch.tensor([[1.0, 2.0]]), torch.tensor([[3.0]]))
        {'weight': tensor([[1., 4.]])}
    """
    layers = {module.weight: module for module in model.modules() if type(module) is nn.Linear}
    activations = _activation_bytes(model, x)
    utilities = {}
    for name, parameter in model.named_parameters():
        layer = layers.get(parameter)
        if layer is not None and _acts_only_in(layer, name, model, criterion, x, y):
            without, size = _loss_without_weight(model, criterion, x, y, layer), activations
        else:
            without = _loss_without_entry(model, criterion, x, y, name, parameter)
            size = activations + 2 * parameter.numel() * parameter.element_size()
        utilities[name] = _rises(without, parameter.numel(), chunk, size, x.device).view_as(parameter)
    return utilities


@torch.no_grad()
def true_features(
    model: nn.Module,
    criterion: Criterion,
    x: Tensor,
    y: Tensor,
    *,
    features: Sequence[str] | None = None,
    chunk: int | None = None,
) -> dict[str, Tensor]:
    """Return the true utility of every hidden feature: ``L(h = 0) − L``, on the same sample or batch.

    A feature is a unit after its activation; after a convolution, it is a channel at all its positions.

    Args:
        model: A module with Linear or convolution layers.
        criterion: The loss, called as ``criterion(model(x), y)``.
        x: The inputs.
        y: The targets.
        features: Names of the modules whose outputs are the features. Default: the activations between the layers.
        chunk: Number of removals to compute at once. Default: as many as fit in 128 MiB.

    Returns:
        A vector with one entry per unit or channel for each of these modules' names.

    Example:
        >>> model = nn.Sequential(nn.Linear(1, 1), nn.Identity(), nn.Linear(1, 1))
        >>> for parameter in model.parameters():
        ...     _ = nn.init.ones_(parameter)
        >>> true_features(model, nn.MSELoss(), torch.ones(1, 1), torch.ones(1, 1))  # 3 with the unit, 1 without
        {'1': tensor([-4.])}
    """
    activations = _activation_bytes(model, x)
    utilities = {}
    for feature in find_features(model, x, features):
        without = partial(_loss_without_feature, model, criterion, x, y, feature)
        utilities[feature.name] = _rises(without, len(feature.open), chunk, activations, x.device)
    return utilities


def _rises(
    loss_without: Callable[[Tensor], Tensor], count: int, chunk: int | None, size: int, device: torch.device
) -> Tensor:
    """Return the increase of the loss without each of the items 0 … count − 1, a bounded number of them at once.

    The full loss is computed in the same way, as the removal of no item. Both then have the same rounding errors, and items
    without effect (half of the weights of a ReLU network) have a utility of exactly zero, which makes them ties.
    """
    if chunk is not None and chunk < 1:
        raise ValueError(f"chunk must be at least 1, not {chunk}")
    at_once = chunk or max(1, _MEMORY // max(1, size))
    losses_without = partial(_losses_without, loss_without)
    rises = []
    intact = torch.empty(0)
    for items in torch.split(torch.arange(count, device=device), at_once):
        if len(intact) != len(items):
            intact = losses_without(torch.full_like(items, _NOTHING))
        rises.append(losses_without(items) - intact)
    return torch.cat(rises)


def _losses_without(loss_without: Callable[[Tensor], Tensor], items: Tensor) -> Tensor:
    try:
        losses: Tensor = vmap(loss_without)(items)
    except RuntimeError as error:
        if "Batching rule not implemented" not in str(error):
            raise
        return torch.stack([loss_without(item) for item in items])  # recurrent layers do not support vmap
    return losses


def _activation_bytes(model: nn.Module, x: Tensor) -> int:
    outputs = [tensor for call in calls(model, x) for tensor in tree_leaves(call.output) if isinstance(tensor, Tensor)]
    return 2 * sum(output.numel() * output.element_size() for output in outputs)


def _loss_without_feature(
    model: nn.Module, criterion: Criterion, x: Tensor, y: Tensor, feature: Feature, unit: Tensor
) -> Tensor:
    places = torch.arange(len(feature.open), device=unit.device)
    with gated([feature], {feature.name: torch.where(places == unit, 0, feature.open)}):
        return criterion(model(x), y)


def _loss_without_entry(
    model: nn.Module, criterion: Criterion, x: Tensor, y: Tensor, name: str, parameter: Tensor
) -> Callable[[Tensor], Tensor]:
    """Return the loss without an entry, in the general case: copies the parameter and sets one entry to zero."""
    places = torch.arange(parameter.numel(), device=parameter.device).view_as(parameter)

    def loss(entry: Tensor) -> Tensor:
        changed = torch.where(places == entry, 0, parameter)
        return criterion(functional_call(model, {name: changed}, (x,)), y)

    return loss


def _loss_without_weight(
    model: nn.Module, criterion: Criterion, x: Tensor, y: Tensor, layer: nn.Linear
) -> Callable[[Tensor], Tensor]:
    """Return the loss without ``W[i, j]`` of a Linear layer: subtracts ``W[i, j]·input[j]`` from its output ``i``."""
    units = torch.arange(layer.out_features, device=layer.weight.device)
    weights = layer.weight.flatten()

    def loss(entry: Tensor) -> Tensor:
        row, column = entry // layer.in_features, entry % layer.in_features
        weight_at_unit = torch.where(units == row, weights.index_select(0, entry.clamp(min=0).view(1)), 0)

        def remove(_layer: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> Tensor:
            return output - inputs[0].index_select(-1, column.view(1)) * weight_at_unit

        with hooked([(layer.register_forward_hook, remove)]):
            return criterion(model(x), y)

    return loss


def _acts_only_in(layer: nn.Linear, name: str, model: nn.Module, criterion: Criterion, x: Tensor, y: Tensor) -> bool:
    """Return whether the layer's weight affects the loss only through the layer's output.

    The weight is replaced by NaN except in that output, so any other use of it (tied weights, a functional call) makes the
    loss NaN.
    """

    def with_own_weight(_layer: nn.Module, inputs: tuple[Tensor, ...], _output: Any) -> Tensor:
        return nn.functional.linear(inputs[0], weight, bias)

    weight, bias = layer.weight.detach(), layer.bias
    poison = torch.full_like(weight, torch.nan)
    with hooked([(layer.register_forward_hook, with_own_weight)]):
        probed = criterion(functional_call(model, {name: poison}, (x,)), y)
    return not bool(probed.isnan())
