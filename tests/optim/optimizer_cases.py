"""Every optimizer of the package in every variant, as functions from a model and options to an optimizer."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import upgd

Build = Callable[..., torch.optim.Optimizer]


def _weightwise(cls: Callable[..., torch.optim.Optimizer], **fixed: Any) -> Build:
    def build(model: nn.Module, **options: Any) -> torch.optim.Optimizer:
        return cls(model.parameters(), **{**fixed, **options})

    return build


def _featurewise(cls: Callable[..., torch.optim.Optimizer], **fixed: Any) -> Build:
    def build(model: nn.Module, **options: Any) -> torch.optim.Optimizer:
        return cls(model, **{**fixed, **options})

    return build


#: name → build(model, **options)
OPTIMIZERS: dict[str, Build] = {
    "UPGD": _weightwise(upgd.UPGD, lr=0.01, sigma=0.01),
    "UPGD-W": _weightwise(upgd.UPGD, lr=0.01, sigma=0.01, weight_decay=0.1),
    "UPGD-local": _weightwise(upgd.UPGD, lr=0.01, sigma=0.01, scaling="local"),
    "UPGD-nonprotecting": _weightwise(upgd.UPGD, lr=0.01, sigma=0.01, protect_gradient=False),
    "UPGD-anticorrelated": _weightwise(upgd.UPGD, lr=0.01, sigma=0.01, noise="anticorrelated"),
    "AdaUPGD": _weightwise(upgd.AdaUPGD, lr=0.003, sigma=0.01),
    "AdaUPGD-W-local-anticorrelated": _weightwise(
        upgd.AdaUPGD, lr=0.003, sigma=0.01, weight_decay=0.1, scaling="local", noise="anticorrelated"
    ),
    "UPS": _weightwise(upgd.UPS, lr=1.0, sigma=0.01),
    "PGD": _weightwise(upgd.PGD, lr=0.01, sigma=0.01),
    "Anti-PGD": _weightwise(upgd.PGD, lr=0.01, sigma=0.01, noise="anticorrelated"),
    "FeatureUPGD": _featurewise(upgd.FeatureUPGD, lr=0.01, sigma=0.01),
    "FeatureUPGD-W-local": _featurewise(upgd.FeatureUPGD, lr=0.01, sigma=0.01, weight_decay=0.1, scaling="local"),
    "FeatureUPGD-anticorrelated": _featurewise(upgd.FeatureUPGD, lr=0.01, sigma=0.01, noise="anticorrelated"),
    "FeatureUPS": _featurewise(upgd.FeatureUPS, lr=0.1, sigma=0.01),
    "ShrinkAndPerturb": _weightwise(upgd.ShrinkAndPerturb, lr=0.01, sigma=0.01, weight_decay=0.1),
}

#: Those that descend a gradient, so that they must find a minimum.
DESCENDING = [name for name in OPTIMIZERS if "UPS" not in name]


def network(dtype: torch.dtype = torch.float32, seed: int = 0) -> nn.Sequential:
    """A small classifier of the kinds of layers that people use."""
    torch.manual_seed(seed)
    return nn.Sequential(nn.Conv2d(1, 3, 3), nn.ReLU(), nn.Flatten(), nn.Linear(48, 8), nn.Tanh(), nn.Linear(8, 4)).to(
        dtype
    )


def batch(dtype: torch.dtype = torch.float32, seed: int = 1) -> tuple[Tensor, Tensor]:
    torch.manual_seed(seed)
    return torch.randn(5, 1, 6, 6, dtype=dtype), torch.randint(0, 4, (5,))


def backward(model: nn.Module, seed: int = 1) -> Tensor:
    """One ordinary forward and backward; returns the loss."""
    dtype = next(model.parameters()).dtype
    x, y = batch(dtype, seed)
    loss = nn.functional.cross_entropy(model(x), y)
    loss.backward()
    return loss.detach()


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int, first: int = 0) -> list[float]:
    """An ordinary training loop on a different batch at each step; returns the losses."""
    losses = []
    for step in range(first, first + steps):
        optimizer.zero_grad()
        losses.append(float(backward(model, seed=step)))
        optimizer.step()
    return losses


def parameters(model: nn.Module) -> list[Tensor]:
    return [param.detach().clone() for param in model.parameters()]
