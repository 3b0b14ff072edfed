"""Methods that keep weights close to their initial values or distribution."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import upgd
from upgd.methods.adamw import Optimized
from upgd.methods.descent import Descent
from upgd.methods.method import Setting
from upgd.methods.registry import register

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["L2Init", "ShrinkAndPerturbInit", "WeightClipping"]

Changes = dict[str, "Tensor"]


@register
class L2Init(Optimized):
    """Regenerative regularization, L2 Init (Kumar et al., 2023): a pull towards the initial weights w₀, SGD or Adam along
    ``g + λ·(w − w₀)``.

    The paper adds ``λ·‖w − w₀‖²`` to the loss, so its λ is half of this one. As in the paper, the pull is part of the
    gradient that Adam normalizes.
    """

    name, label = "l2-init", "L2 Init"
    colour, dark_colour = "#B8860B", "#d9b04c"

    regularization: Any = Setting(
        1e-2,
        symbol="λ",
        least=0,
        off=0,
        grid=(1e-1, 1e-2, 1e-3),
        help="Strength of the pull towards the initial weights.",
    )

    @property
    def state(self) -> Mapping[str, str]:  # type: ignore[override]
        return {"initial": "parameter", **super().state}

    def update(self, w: "Tensor", g: "Tensor", s: Any, h: Any, t: Any) -> tuple["Tensor", Changes]:
        return self.stepped(w, g + h.regularization * (w - s.initial), s, h, t)


@register
class ShrinkAndPerturbInit(Descent):
    """Shrink and perturb towards the initial distribution (Ash and Adams, 2020, at every step):
    ``w ← w − lr·(g + σ·s₀·ξ + λ·w)``, where s₀ is the standard deviation of the layer's initial weights.

    Initial weights and biases are uniform on [−b, b] with ``b = 1/√fan-in``, so ``s₀ = b/√3``. The noise ξ is normal.
    Normalization layers are initialized to a constant and receive no noise.
    """

    name, label = "shrink-and-perturb-init", "Shrink & Perturb, initial scale"
    colour, dark_colour = "#A0522D", "#e09a6c"
    weight_decay: Any = Descent.weight_decay.but(grid=(0.001,))

    def update(self, w: "Tensor", g: "Tensor", h: Any, noise: Any, bound: float | None) -> "Tensor":  # type: ignore[override]
        scaled = 0.0 if bound is None else noise * (bound / 3**0.5)
        return upgd.rules.update(w, g, 0.0, scaled, lr=h.lr, sigma=h.sigma, weight_decay=h.weight_decay, p=0.0, q=0.0)


@register
class WeightClipping(Optimized):
    """Weight clipping (Elsayed et al., 2024): a step of SGD or Adam, then ``w ← clip(w, −κ·b, κ·b)``, where b is the bound
    of the layer's initial distribution, ``1/√fan-in``.

    Weights and biases of all layers are clipped, except those of normalization layers, which are initialized to a constant.
    """

    name, label = "weight-clipping", "Weight clipping"
    colour, dark_colour = "#4B0082", "#b58cff"

    clip: Any = Setting(
        2.0,
        symbol="κ",
        least=0,
        grid=(1.0, 2.0, 4.0),
        help="Largest weight, as a multiple of the largest initial weight.",
    )

    def update(self, w: "Tensor", g: "Tensor", s: Any, h: Any, t: Any, bound: float | None) -> tuple["Tensor", Changes]:
        stepped, changes = self.stepped(w, g, s, h, t)
        if bound is None:
            return stepped, changes
        limit = h.clip * bound
        return stepped.clamp(-limit, limit), changes
