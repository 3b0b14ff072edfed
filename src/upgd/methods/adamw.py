"""Adam, RMSProp, and UPGD along Adam's direction."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import upgd
from upgd.methods.method import Method, Setting
from upgd.methods.registry import register
from upgd.methods.utility import Changes, UtilityDescent

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["AdaUPGD", "Adam", "AdamW", "Adaptive", "Optimized", "RMSProp"]


class Adaptive(Method):
    """Adam's averages of the gradient and of its square::

    a ← β₁·a + (1−β₁)·g,    v ← β₂·v + (1−β₂)·g²,    direction = a/(1 − β₁ᵗ) / (√(v/(1 − β₂ᵗ)) + ε)
    """

    betas: Any = Setting(
        (0.9, 0.999),
        symbol="β₁β₂",
        least=0,
        below=1,
        pair=("beta1", "beta2"),
        grid=((0.9, 0.999), (0.9, 0.9999), (0.0, 0.999), (0.0, 0.9999)),
        help="Adam's β₁ and β₂, joined by a slash: 0.9/0.999.",
    )
    eps: Any = Setting(1e-8, symbol="ε", least=0, help="Adam's ε.")

    def moments(self, g: "Tensor", s: Any, h: Any) -> Changes:
        """Return the new averages."""
        return {
            "first_moment": upgd.rules.trace(s.first_moment, g, h.beta1),
            "second_moment": upgd.rules.trace(s.second_moment, g**2, h.beta2),
        }

    def direction(self, moments: Changes, h: Any, t: Any) -> "Tensor":
        """Return the direction of Adam's step."""
        size = upgd.rules.unbiased(moments["second_moment"], h.beta2, t).sqrt() + h.eps
        return upgd.rules.unbiased(moments["first_moment"], h.beta1, t).div(size)


@register
class AdamW(Adaptive):
    """Adam with decoupled weight decay (Loshchilov and Hutter, 2019), as :class:`torch.optim.AdamW`."""

    name, label = "adamw", "AdamW"
    colour, dark_colour = "#009E73", "#14b287"
    state: Mapping[str, str] = MappingProxyType({"first_moment": "zeros", "second_moment": "zeros"})

    lr: Any = Method.lr.but(grid=(0.03, 0.01, 0.003, 0.001, 0.0003, 0.0001))
    weight_decay: Any = Setting(0.01, symbol="wd", least=0, off=0, help="Decoupled weight decay.")

    def update(self, w: "Tensor", g: "Tensor", s: Any, h: Any, t: Any) -> tuple["Tensor", Changes]:
        moments = self.moments(g, s, h)
        # torch multiplies the weight by 1 − lr·wd, which rounds to 1 in float32 if lr·wd is small; see rules.update.
        return w - h.lr * (self.direction(moments, h, t) + h.weight_decay * w), moments


@register
class Adam(AdamW):
    """Adam (Kingma and Ba, 2015): AdamW without weight decay."""

    name, label = "adam", "Adam"
    colour, dark_colour = "#6B8E23", "#a9c934"
    weight_decay = 0.0


@register
class RMSProp(Method):
    """RMSProp (Tieleman and Hinton, 2012), as :class:`torch.optim.RMSprop`: ``v ← β₂·v + (1−β₂)·g²``,
    ``w ← w − lr·g/(√v + ε)``."""

    name, label = "rmsprop", "RMSProp"
    colour, dark_colour = "#2F4F4F", "#7fb5b5"
    state: Mapping[str, str] = MappingProxyType({"second_moment": "zeros"})

    lr: Any = AdamW.settings["lr"]
    beta_square: Any = Setting(
        0.99, symbol="β₂", least=0, below=1, grid=(0.9, 0.99, 0.999), help="Decay rate of the average of g²."
    )
    eps: Any = Adaptive.eps

    def update(self, w: "Tensor", g: "Tensor", s: Any, h: Any) -> tuple["Tensor", Changes]:
        second_moment = upgd.rules.trace(s.second_moment, g**2, h.beta_square)
        return w - h.lr * g / (second_moment.sqrt() + h.eps), {"second_moment": second_moment}


class Optimized(Adaptive):
    """A method on top of a base optimizer, ``optimizer="sgd"`` or ``"adam"``."""

    optimizer: Any = Setting(
        "sgd",
        choices=("sgd", "adam"),
        off="sgd",
        words={"adam": "with Adam"},
        help="The base optimizer.",
    )
    # Only used with Adam; tables omit them while they have their defaults.
    betas: Any = Adaptive.betas.but(quiet=True, grid=())
    eps: Any = Adaptive.eps.but(quiet=True)

    @property
    def state(self) -> Mapping[str, str]:  # type: ignore[override]
        return {} if self.optimizer == "sgd" else {"first_moment": "zeros", "second_moment": "zeros"}

    def stepped(self, w: "Tensor", g: "Tensor", s: Any, h: Any, t: Any) -> tuple["Tensor", Changes]:
        """Return the result of the optimizer's step along a gradient."""
        if self.optimizer == "sgd":
            return w - h.lr * g, {}
        moments = self.moments(g, s, h)
        return w - h.lr * self.direction(moments, h, t), moments


@register
class AdaUPGD(UtilityDescent, Adaptive):
    """UPGD along Adam's direction (Elsayed and Mahmood, 2024, Algorithm 5): the utility uses the raw gradient,
    ``w ← w − lr·[(direction + σ·ξ)·(1 − ū) + λ·w]``.

    The step size is ``lr``, as in the paper; the authors' published code uses ``2·lr``.
    """

    name, label, rule = "adaupgd", "AdaUPGD", "adaupgd"
    colour, dark_colour = "#117733", "#5fc27e"
    c, p, q = 1.0, 1.0, 1.0
    granularity = "weight"
    profile = "paper"
    lr: Any = AdamW.settings["lr"]

    @property
    def state(self) -> Mapping[str, str]:  # type: ignore[override]
        return {"utility": "zeros", "first_moment": "zeros", "second_moment": "zeros"}

    def update(  # type: ignore[override]
        self, w: "Tensor", g: "Tensor", s: Any, h: Any, t: Any, o: Any, r: Any, noise: Any
    ) -> tuple["Tensor", Changes]:
        moments = self.moments(g, s, h)
        stepped = super().update(w, self.direction(moments, h, t), h, t, o, r, noise, None)
        return stepped, moments
