"""Gradient descent, with and without weight decay and noise."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import upgd  # not `upgd.rules`, which imports torch: reading results needs only names and colours
from upgd.methods.method import Method, Setting
from upgd.methods.registry import register

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["PGD", "SGD", "SGDW", "AntiPGD", "Descent", "Momentum", "ShrinkAndPerturb"]


class Descent(Method):
    """``w ← w − lr·(g + σ·ξ + λ·w)``: the rule of :mod:`upgd.rules` without utility."""

    rule = "plain"

    sigma: Any = Setting(
        symbol="σ", least=0, off=0, grid=(1.0, 0.1, 0.01, 0.001), help="Standard deviation of the perturbation."
    )
    weight_decay: Any = Setting(symbol="wd", least=0, off=0, grid=(0.01, 0.001, 0.0001), help="Decoupled weight decay.")
    noise: Any = "white"

    def update(self, w: "Tensor", g: "Tensor", h: Any, noise: Any) -> "Tensor":
        return upgd.rules.update(w, g, 0.0, noise, lr=h.lr, sigma=h.sigma, weight_decay=h.weight_decay, p=0.0, q=0.0)


@register
class SGD(Descent):
    """Stochastic gradient descent: ``w ← w − lr·g``."""

    name, label = "sgd", "SGD"
    colour, dark_colour = "#555555", "#8f8f8f"
    sigma = 0.0
    weight_decay = 0.0


@register
class SGDW(Descent):
    """Gradient descent with decoupled weight decay: ``w ← w − lr·(g + λ·w)``."""

    name, label = "sgdw", "SGDW"
    colour, dark_colour = "#D55E00", "#ee6a2c"
    sigma = 0.0


@register
class PGD(Descent):
    """Perturbed gradient descent: ``w ← w − lr·(g + σ·ξ)`` with white noise ξ."""

    name, label = "pgd", "PGD"
    colour, dark_colour = "#CC79A7", "#f0b3d4"
    weight_decay = 0.0


@register
class AntiPGD(PGD):
    """Perturbed gradient descent with anticorrelated noise, ``ξ_t = ζ_t − ζ_{t−1}`` (Orvieto et al., 2022)."""

    name, label = "anti-pgd", "Anti-PGD"
    colour, dark_colour = "#882255", "#d0679a"
    noise = "anticorrelated"


@register
class ShrinkAndPerturb(Descent):
    """Shrink and perturb (Ash and Adams, 2020) at every step: ``w ← w − lr·(g + σ·ξ + λ·w)``."""

    name, label = "shrink-and-perturb", "Shrink & Perturb"
    colour, dark_colour = "#E69F00", "#f2b52e"
    weight_decay: Any = Descent.weight_decay.but(grid=(0.001,))


@register
class Momentum(Method):
    """Gradient descent with momentum (Polyak, 1964), as :class:`torch.optim.SGD`: ``v ← μ·v + g``, ``w ← w − lr·v``."""

    name, label = "momentum", "Momentum"
    colour, dark_colour = "#8C564B", "#c9a299"
    state: Mapping[str, str] = MappingProxyType({"velocity": "zeros"})

    momentum: Any = Setting(
        0.9,
        symbol="μ",
        least=0,
        below=1,
        grid=(0.5, 0.9, 0.99),
        help="Momentum: the fraction of the previous step that is kept.",
    )

    def update(self, w: "Tensor", g: "Tensor", s: Any, h: Any) -> tuple["Tensor", dict[str, "Tensor"]]:
        velocity = h.momentum * s.velocity + g
        return w - h.lr * velocity, {"velocity": velocity}
