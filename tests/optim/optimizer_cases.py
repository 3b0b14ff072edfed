"""Every optimizer of the package in every variant, as functions from a model and options to an optimizer."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import upgd
from upgd.methods import METHODS, Method, Setting
from upgd.optim.from_method import MethodOptimizer

Build = Callable[..., torch.optim.Optimizer]


class Example(Method):
    """A third-party method that uses all features: state of both kinds, reductions of several
    kinds, noise, the step count, and a pair of settings."""

    name = "example-anchored-momentum"
    sigma = Setting(0.0, least=0)
    noise = Setting("white", choices=("white", "anticorrelated"))
    scaling = Setting("global", choices=("global", "local"))
    betas = Setting((0.9, 0.99), pair=("beta1", "beta2"), least=0, below=1)
    strength = Setting(0.01, least=0)
    state = {"momentum": "zeros", "start": "parameter"}  # noqa: RUF012  # as users write it

    @property
    def reductions(self):
        return {"size": ("norm", "learner" if self.scaling == "global" else "unit"), "largest": ("max", "layer")}

    def observe(self, w, g, s, h, t):
        momentum = h.beta1 * s.momentum + (1 - h.beta1) * g
        unbiased = momentum / (1 - h.beta1**t)
        return {"momentum": momentum}, {"size": unbiased, "largest": unbiased.abs()}

    def update(self, w, g, s, h, o, r, noise):
        direction = g + h.beta2 * o.size / (1 + r.size + r.largest)
        return w - h.lr * (direction + h.sigma * noise + h.strength * (w - s.start))


def _of_method(method: type[Method], **fixed: Any) -> Build:
    def build(model: nn.Module, **options: Any) -> torch.optim.Optimizer:
        return MethodOptimizer(model.parameters(), method, **{**fixed, **options})

    return build


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
    "MethodOptimizer": _of_method(Example, lr=0.01, sigma=0.01),
    "MethodOptimizer-local-anticorrelated": _of_method(
        Example, lr=0.01, sigma=0.01, scaling="local", noise="anticorrelated"
    ),
    "MethodOptimizer of AdaUPGD": _of_method(METHODS["adaupgd"], lr=0.003, sigma=0.01, weight_decay=0.1),
    "MethodOptimizer of Shrink & Perturb": _of_method(
        METHODS["shrink-and-perturb"], lr=0.01, sigma=0.01, weight_decay=0.1
    ),
    "ShrinkAndPerturb": _weightwise(upgd.ShrinkAndPerturb, lr=0.01, sigma=0.01, weight_decay=0.1),
}

#: Those that follow a gradient and must find a minimum.
DESCENDING = [name for name in OPTIMIZERS if "UPS" not in name]


def network(dtype: torch.dtype = torch.float32, seed: int = 0) -> nn.Sequential:
    """Return a small classifier with common kinds of layers."""
    torch.manual_seed(seed)
    return nn.Sequential(nn.Conv2d(1, 3, 3), nn.ReLU(), nn.Flatten(), nn.Linear(48, 8), nn.Tanh(), nn.Linear(8, 4)).to(
        dtype
    )


def batch(dtype: torch.dtype = torch.float32, seed: int = 1) -> tuple[Tensor, Tensor]:
    torch.manual_seed(seed)
    return torch.randn(5, 1, 6, 6, dtype=dtype), torch.randint(0, 4, (5,))


def backward(model: nn.Module, seed: int = 1) -> Tensor:
    """Run one forward and backward pass and return the loss."""
    dtype = next(model.parameters()).dtype
    x, y = batch(dtype, seed)
    loss = nn.functional.cross_entropy(model(x), y)
    loss.backward()
    return loss.detach()


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int, first: int = 0) -> list[float]:
    """Run a training loop with a different batch at each step, and return the losses."""
    losses = []
    for step in range(first, first + steps):
        optimizer.zero_grad()
        losses.append(float(backward(model, seed=step)))
        optimizer.step()
    return losses


def parameters(model: nn.Module) -> list[Tensor]:
    return [param.detach().clone() for param in model.parameters()]
