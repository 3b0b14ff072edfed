"""Gradient descent with bounded steps."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from upgd.methods.method import Method, Reduction, Setting
from upgd.methods.registry import register

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["ObGD"]


@register
class ObGD(Method):
    """Overshooting-bounded gradient descent (Elsayed, Vasan and Mahmood, 2024): ``w ← w − lr/max(1, lr·κ·‖g‖₁)·g``, with the
    norm over all parameters.

    The paper's rule is for temporal-difference learning: ``M = lr·κ·max(|δ|, 1)·‖z‖₁``, ``w ← w + min(lr, lr/M)·δ·z`` with
    the error δ and the eligibility trace z. For supervised learning, which has neither, δ is 1 and z is −g, the negative
    gradient of the loss.
    """

    name, label = "obgd", "ObGD"
    colour, dark_colour = "#C71585", "#ff7ac8"
    reductions: Mapping[str, Reduction] = MappingProxyType({"size": ("sum", "learner")})

    lr: Any = Method.lr.but(grid=(1.0, 0.3, 0.1, 0.03, 0.01, 0.003))
    overshoot: Any = Setting(
        2.0, symbol="κ", least=0, grid=(1.0, 2.0, 4.0), help="ObGD's κ: larger values bound steps more tightly."
    )

    def observe(self, g: "Tensor") -> tuple[dict[str, "Tensor"], dict[str, "Tensor"]]:
        return {}, {"size": g.abs()}

    def update(self, w: "Tensor", g: "Tensor", h: Any, r: Any) -> "Tensor":
        stepped: Tensor = w - h.lr * g / (h.lr * h.overshoot * r.size).clamp(min=1)
        return stepped
