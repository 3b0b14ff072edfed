"""Approximate utilities, of weights and of features, at the cost of one backward pass at most."""

import copy
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad
from torch.utils._pytree import tree_leaves

from upgd import rules
from upgd.curvature import HesScale
from upgd.utility._derivatives import hessian_diagonal
from upgd.utility._model import Criterion, Feature, calls, check_repeatable, find_features, gated

__all__ = ["first_order", "magnitude", "random", "second_order", "squared_gradient"]

Of = Literal["weights", "features"]
At = Literal["output", "input"]
Loss = Callable[[dict[str, Tensor]], Tensor]
#: Where a module keeps its hooks.
_HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")


def first_order(
    model: nn.Module,
    criterion: Criterion,
    x: Tensor,
    y: Tensor,
    *,
    of: Of = "weights",
    features: Sequence[str] | None = None,
    at: At = "output",
) -> dict[str, Tensor]:
    """Return the first-order approximation of utility: ``−g·w`` of a weight, ``−∂L/∂m`` of a feature with gate m = 1.

    Args:
        model: Any module, called as ``model(x)``.
        criterion: The loss, called as ``criterion(model(x), y)``.
        x: The inputs.
        y: The targets.
        of: ``"weights"`` (and biases), or ``"features"``: hidden units after their activation, or channels of convolutions.
        features: Names of the modules whose outputs are the features. Default: the activations between the layers.
        at: Where the gate of a feature is. ``"output"``: behind the activation, ``m·φ(a)``. ``"input"``: before it,
            ``φ(m·a)``, which for a single sample gives ``−a·∂L/∂a + ½·a²·∂²L/∂a²``, the form of section 3.2 of the paper.
            Both agree where ``φ(m·a) = m·φ(a)`` for m > 0, as for ReLU, leaky ReLU and the identity, and not for tanh.

    Returns:
        A dict that maps names of parameters, or of the modules that output features, to tensors.

    Example:
        >>> model = nn.Linear(2, 1, bias=False)
        >>> _ = nn.init.ones_(model.weight)
        >>> first_order(model, nn.MSELoss(), torch.tensor([[1.0, 2.0]]), torch.tensor([[2.0]]))
        {'weight': tensor([[-2., -4.]])}
    """
    loss, items = _loss_of(model, criterion, x, y, of, features, at)
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
    at: At = "output",
) -> dict[str, Tensor]:
    """Return the second-order approximation: ``½·h·w² − g·w`` of a weight, ``½·∂²L/∂m² − ∂L/∂m`` of a feature, gate m = 1.

    Args:
        model: See :func:`first_order`.
        criterion: See :func:`first_order`; for ``"hesscale"``, a loss module that :class:`upgd.HesScale` supports.
        x: The inputs.
        y: The targets.
        of: See :func:`first_order`.
        features: See :func:`first_order`.
        curvature: ``"hesscale"`` estimates the second derivatives in one backward sweep. ``"exact"`` computes them with one
            pass per entry, which is suitable for small networks, to evaluate the estimate. HesScale runs an ordinary
            backward pass through a copy of the model, which also calls your own hooks on modules.
        at: See :func:`first_order`; ``"input"`` needs ``curvature="exact"``.

    Returns:
        A dict that maps names of parameters, or of the modules that output features, to tensors.

    Example:
        >>> model = nn.Linear(2, 1, bias=False)
        >>> _ = nn.init.ones_(model.weight)
        >>> second_order(model, nn.MSELoss(), torch.tensor([[1.0, 2.0]]), torch.tensor([[2.0]]))
        {'weight': tensor([[-1.,  0.]])}
    """
    if curvature not in ("hesscale", "exact"):
        raise ValueError(f"curvature must be 'hesscale' or 'exact', not {curvature!r}")
    if at == "input" and curvature != "exact":
        raise ValueError(
            "at='input' needs curvature='exact'; HesScale estimates the curvature of gates behind activations"
        )
    loss, items = _loss_of(model, criterion, x, y, of, features, at)
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
    """Return the squared gradient: ``g²`` of a weight, ``(∂L/∂m)²`` of a feature with gate m = 1.

    Args:
        model, criterion, x, y, of, features: See :func:`first_order`.

    Returns:
        A dict that maps names of parameters, or of the modules that output features, to tensors.

    Example:
        >>> model = nn.Linear(2, 1, bias=False)
        >>> _ = nn.init.ones_(model.weight)
        >>> squared_gradient(model, nn.MSELoss(), torch.tensor([[1.0, 2.0]]), torch.tensor([[2.0]]))
        {'weight': tensor([[ 4., 16.]])}
    """
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
    """Return the magnitude: ``|w|`` of a weight; of a feature, the mean of ``|h|`` over the batch.

    For a channel, the mean is also over positions.

    Args:
        model, criterion, x, y, of, features: See :func:`first_order`.

    Returns:
        A dict that maps names of parameters, or of the modules that output features, to tensors.

    Example:
        >>> model = nn.Linear(2, 1, bias=False)
        >>> _ = nn.init.constant_(model.weight, -3.0)
        >>> magnitude(model, nn.MSELoss(), torch.ones(1, 2), torch.zeros(1, 1))
        {'weight': tensor([[3., 3.]])}
    """
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
    """Return standard normals, an uninformed baseline.

    Args:
        model, criterion, x, y, of, features: See :func:`first_order`.
        generator: Source of the random numbers. Default: torch's global generator.

    Returns:
        A dict that maps names of parameters, or of the modules that output features, to tensors.

    Example:
        >>> random(nn.Linear(2, 3), nn.MSELoss(), torch.ones(1, 2), torch.zeros(1, 3))["weight"].shape
        torch.Size([3, 2])
    """
    _, items = _loss_of(model, criterion, x, y, of, features)
    return {name: torch.empty_like(item).normal_(generator=generator) for name, item in items.items()}


def _loss_of(
    model: nn.Module,
    criterion: Criterion,
    x: Tensor,
    y: Tensor,
    of: Of,
    names: Sequence[str] | None,
    at: At = "output",
) -> tuple[Loss, dict[str, Tensor]]:
    """Return the loss as a function of the weights, or of gates on the features, and their values (gates are 1)."""
    check_repeatable(model)
    if at not in ("output", "input"):
        raise ValueError(f"at must be 'output' or 'input', not {at!r}")
    weights = {name: parameter.detach() for name, parameter in model.named_parameters()}
    if _checked(of) == "weights":
        return lambda changed: criterion(functional_call(model, changed, (x,)), y), weights
    found = find_features(model, x, names)

    def gated_loss(gates: dict[str, Tensor]) -> Tensor:
        with gated(found, gates, at):
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
    found = find_features(model, x, names) if of == "features" else []
    # A backward pass through the model itself would run the hooks of optimizers, monitors and another HesScale.
    model, criterion = _copied(model, criterion)
    for parameter in model.parameters():
        parameter.requires_grad_(True)  # frozen parameters have a utility as well
    with torch.enable_grad(), HesScale(model, criterion, features=[feature.name for feature in found]) as curvature:
        criterion(model(x), y).backward()
        if of == "weights":
            return {name: curvature.diagonal(parameter) for name, parameter in model.named_parameters()}
        return {feature.name: curvature.feature_diagonal(model.get_submodule(feature.name)) for feature in found}


def _copied(model: nn.Module, criterion: nn.Module) -> tuple[nn.Module, nn.Module]:
    """Return copies that share the user's hooks, and attributes that cannot be copied, with the originals."""
    known: dict[int, Any] = {}
    for module in (*model.modules(), *criterion.modules()):
        for registry in _HOOKS:
            hooks = vars(module)[registry]
            own = {number: hook for number, hook in hooks.items() if not type(hook).__module__.startswith("upgd.")}
            known[id(hooks)] = OrderedDict(own)
        for value in tree_leaves({name: value for name, value in vars(module).items() if name not in _HOOKS}):
            if isinstance(value, Tensor) and not value.is_leaf:  # a result of the last forward pass
                known[id(value)] = value.detach().clone()
            elif not isinstance(value, Tensor | nn.Module | int | float | str | None) and not _can_be_copied(value):
                known[id(value)] = value
    return copy.deepcopy((model, criterion), known)


def _can_be_copied(value: Any) -> bool:
    try:
        copy.deepcopy(value)
    except Exception:
        return False
    return True


def _mean_magnitude(output: Tensor, feature: Feature) -> Tensor:
    by_feature = output.abs().movedim(feature.dim, 0)
    return by_feature.flatten(1).mean(1) if by_feature.ndim > 1 else by_feature


def _checked(of: str) -> str:
    if of not in ("weights", "features"):
        raise ValueError(f"of must be 'weights' or 'features', not {of!r}")
    return of
