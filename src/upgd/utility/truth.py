"""True utility, the oracle: take one weight or feature away, see what the loss does."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap
from torch.utils._pytree import tree_leaves

from upgd.utility._model import Criterion, Feature, calls, find_features, gated, hooked

__all__ = ["true_features", "true_weights"]

#: What the removals that are computed at once may take, in bytes.
_MEMORY = 1 << 27
#: The number of no item.
_NOTHING = -1


@torch.no_grad()
def true_weights(
    model: nn.Module, criterion: Criterion, x: Tensor, y: Tensor, *, chunk: int | None = None
) -> dict[str, Tensor]:
    """The true utility of every weight and bias: ``L(weights without w) − L(weights)``, on the same sample or batch.

    Every entry is removed by itself, many at a time with ``torch.func.vmap`` where torch can. The weight of a Linear layer
    is removed where it acts, as a change of one pre-activation, so that only what follows the layer is computed again.

    Args:
        model: any module; it is called as ``model(x)``.
        criterion: the loss, called as ``criterion(model(x), y)``; its value is a scalar.
        x: inputs.
        y: targets.
        chunk: how many removals to compute at once; by default as many as fit 128 MiB.

    Returns:
        For each name of ``model.named_parameters()`` a tensor of the parameter's shape. The difference of two losses
        has their rounding errors: use float64 where small utilities matter.

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
    """The true utility of every hidden feature: ``L(h = 0) − L``, on the same sample or batch.

    A feature is a unit after its activation; after a convolution, a channel at all its positions.

    Args:
        model: a module with Linear or convolution layers.
        criterion: the loss, called as ``criterion(model(x), y)``.
        x: inputs.
        y: targets.
        features: names of the modules whose outputs are the features. By default the activations between the layers.
        chunk: how many removals to compute at once; by default as many as fit 128 MiB.

    Returns:
        For each of these modules' names a vector with one entry per unit or channel.
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
    """What the loss rises by without item 0, 1, …, count − 1, a bounded number of them at once.

    The loss with all items is computed in the same way, as the removal of no item: then both have the same rounding
    errors, and what changes nothing (half of the weights of a ReLU network) has a utility of exactly zero, a tie.
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
        return torch.stack([loss_without(item) for item in items])  # recurrent layers go one by one
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
    """The general way: a copy of the parameter with one zero for every removal."""
    places = torch.arange(parameter.numel(), device=parameter.device).view_as(parameter)

    def loss(entry: Tensor) -> Tensor:
        changed = torch.where(places == entry, 0, parameter)
        return criterion(functional_call(model, {name: changed}, (x,)), y)

    return loss


def _loss_without_weight(
    model: nn.Module, criterion: Criterion, x: Tensor, y: Tensor, layer: nn.Linear
) -> Callable[[Tensor], Tensor]:
    """The fast way for ``W[i, j]`` of a Linear layer: its output ``i`` loses ``W[i, j]·input[j]``."""
    units = torch.arange(layer.out_features, device=layer.weight.device)
    weights = layer.weight.flatten()

    def loss(entry: Tensor) -> Tensor:
        row, column = entry // layer.in_features, entry % layer.in_features
        weight_at_unit = torch.where(units == row, weights.index_select(0, entry.clamp(min=0).view(1)), 0)

        def remove(_layer: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> Tensor:
            return output - inputs[0].index_select(-1, column.view(1)) * weight_at_unit

        with hooked([(layer, remove)]):
            return criterion(model(x), y)

    return loss


def _acts_only_in(layer: nn.Linear, name: str, model: nn.Module, criterion: Criterion, x: Tensor, y: Tensor) -> bool:
    """Whether the layer's weight acts through the layer's output alone.

    The weight is replaced by NaN everywhere but in that output; whoever else looks at it (tied weights, a functional
    call) spoils the loss.
    """

    def with_own_weight(_layer: nn.Module, inputs: tuple[Tensor, ...], _output: Any) -> Tensor:
        return nn.functional.linear(inputs[0], weight, bias)

    weight, bias = layer.weight.detach(), layer.bias
    poison = torch.full_like(weight, torch.nan)
    with hooked([(layer, with_own_weight)]):
        probed = criterion(functional_call(model, {name: poison}, (x,)), y)
    return not bool(probed.isnan())
