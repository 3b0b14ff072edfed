"""Spearman's rank correlation with average ranks, batched."""

from collections.abc import Mapping
from typing import Literal

import torch
from torch import Tensor

__all__ = ["average_ranks", "correlation", "spearman"]


def average_ranks(values: Tensor) -> Tensor:
    """Return ranks 1 … n along the last dimension; tied values share the mean of their ranks.

    Example:
        >>> average_ranks(torch.tensor([3.0, 1.0, 1.0, 7.0]))
        tensor([3.0000, 1.5000, 1.5000, 4.0000], dtype=torch.float64)
    """
    count = values.shape[-1]
    ordered, order = values.sort(dim=-1)
    place = torch.arange(count, device=values.device)
    differs = ordered[..., 1:] != ordered[..., :-1]
    edge = differs.new_ones(*values.shape[:-1], min(count, 1))
    # In sorted order, a run of ties has a first and a last index: find them at the ends and propagate them along the run.
    first = torch.where(torch.cat((edge, differs), -1), place, 0).cummax(-1).values
    last = torch.where(torch.cat((differs, edge), -1), place, count).flip(-1).cummin(-1).values.flip(-1)
    shared = (first + last).double() / 2 + 1
    return torch.empty_like(shared).scatter_(-1, order, shared)


def centred_ranks(values: Tensor) -> Tensor:
    """Return average ranks minus their mean."""
    return average_ranks(values) - (values.shape[-1] + 1) / 2


def spearman(a: Tensor, b: Tensor) -> Tensor:
    """Return Spearman's rank correlation along the last dimension: Pearson's correlation of the average ranks.

    Returns:
        float64, with the shape of the leading dimensions. NaN where ``a`` or ``b`` contains NaN, is constant or has fewer
        than two items.

    Example:
        >>> spearman(torch.tensor([1.0, 2.0, 3.0]), torch.tensor([10.0, 20.0, 15.0]))
        tensor(0.5000, dtype=torch.float64)
    """
    if a.shape != b.shape:
        raise ValueError(f"a and b must have the same shape, not {tuple(a.shape)} and {tuple(b.shape)}")
    return torch.where(_undefined(a, b), torch.nan, cosine(centred_ranks(a), centred_ranks(b)))


def correlation(
    approximate: Mapping[str, Tensor],
    true: Mapping[str, Tensor],
    *,
    scope: Literal["global", "local"] = "global",
    of: Literal["weights", "features"] = "weights",
) -> Tensor:
    """Return the rank correlation of an approximate utility with the true utility.

    Args:
        approximate: Names to tensors, from a function of :mod:`upgd.utility`.
        true: The same names, from :func:`true_weights` or :func:`true_features`.
        scope: ``"global"`` ranks all items of the network together; ``"local"`` ranks within each layer and averages
            the layers' correlations, excluding layers where it is undefined.
        of: What the dicts contain. A layer of weights is a module, its weight and bias together; a layer of features is
            one entry of the dict.

    Returns:
        A float64 scalar; NaN where the correlation is undefined, or if a utility is NaN.

    Example:
        >>> true = {"weight": torch.tensor([0.1, 0.2, 0.3])}
        >>> correlation({"weight": torch.tensor([1.0, 3.0, 2.0])}, true)
        tensor(0.5000, dtype=torch.float64)
    """
    if approximate.keys() != true.keys():
        raise ValueError(
            f"approximate and true must have the same names, but one has {sorted(approximate)} and the other"
            f" {sorted(true)}; compute both for the same model, and both for weights or both for features"
        )
    choices = (("scope", scope, ("global", "local")), ("of", of, ("weights", "features")))
    for argument, chosen, allowed in choices:
        if chosen not in allowed:
            raise ValueError(f"{argument} must be {allowed[0]!r} or {allowed[1]!r}, not {chosen!r}")
    layers: dict[str, list[str]] = {}
    for name in true:
        key = {"global": "", "local": name if of == "features" else name.rpartition(".")[0]}[scope]
        layers.setdefault(key, []).append(name)
    pairs = [(_joined(approximate, names), _joined(true, names)) for names in layers.values()]
    mean = torch.stack([spearman(*pair) for pair in pairs]).nanmean()
    return torch.where(torch.stack([_undefined(*pair) for pair in pairs]).any(), torch.nan, mean)


def _undefined(a: Tensor, b: Tensor) -> Tensor:
    """Return whether ``a`` or ``b`` contains NaN, which has no rank, along the last dimension."""
    return (a.isnan() | b.isnan()).any(-1)


def _joined(utilities: Mapping[str, Tensor], names: list[str]) -> Tensor:
    return torch.cat([utilities[name].flatten() for name in names])


def cosine(a: Tensor, b: Tensor) -> Tensor:
    """Return the cosine similarity along the last dimension; for centred vectors, this is their correlation."""
    return (a * b).sum(-1) / ((a * a).sum(-1) * (b * b).sum(-1)).sqrt()
