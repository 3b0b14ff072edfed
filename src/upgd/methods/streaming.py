"""Streaming regularizers against forgetting.

They need no task boundaries. The forms are those of Elsayed and Mahmood (2024).
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import upgd
from upgd.methods.method import Method, Setting
from upgd.methods.registry import register

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["Consolidation", "StreamingEWC", "StreamingMAS", "StreamingRWalk", "StreamingSI"]

Changes = dict[str, "Tensor"]


class Consolidation(Method):
    """A pull towards the average of recent weights, proportional to the importance of each weight::

        w̄ ← β_w·w̄ + (1−β_w)·w,    Ω ← β_i·Ω + (1−β_i)·ω        both divided by 1 − βᵗ for bias correction
        w ← w − lr·[g + κ·Ω·(w − w̄)]

    The methods differ in ω. The average includes the weight before the update.
    """

    state: Mapping[str, str] = MappingProxyType({"average": "zeros", "importance": "zeros"})

    kappa: Any = Setting(
        symbol="κ",
        least=0,
        off=0,
        grid=(10.0, 1.0, 0.1, 0.01),
        help="Strength of the pull towards the average weights.",
    )
    beta_importance: Any = Setting(0.999, symbol="β_i", least=0, below=1, help="Decay rate of the average importance.")
    beta_weights: Any = Setting(0.999, symbol="β_w", least=0, below=1, help="Decay rate of the average weights.")

    def averaged(self, w: "Tensor", s: Any, h: Any, t: Any) -> tuple["Tensor", Changes]:
        """Return the average weight and the changed state."""
        average = upgd.rules.trace(s.average, w, h.beta_weights)
        return upgd.rules.unbiased(average, h.beta_weights, t), {"average": average}

    def traced(self, name: str, instant: "Tensor", s: Any, h: Any, t: Any, changes: Changes) -> "Tensor":
        """Update a running average that the importance depends on, and return it with bias correction."""
        changes[name] = upgd.rules.trace(getattr(s, name), instant, h.beta_importance)
        return upgd.rules.unbiased(changes[name], h.beta_importance, t)


@register
class StreamingEWC(Consolidation):
    """Streaming elastic weight consolidation (Kirkpatrick et al., 2017; Elsayed and Mahmood, 2024): ``ω = g²``,
    ``w ← w − lr·[g + κ·Ω·(w − w̄)]`` with running averages Ω of ω and w̄ of w."""

    name, label = "s-ewc", "S-EWC"
    colour, dark_colour = "#008080", "#4fd0d0"

    def update(self, w: "Tensor", g: "Tensor", s: Any, h: Any, t: Any) -> tuple["Tensor", Changes]:
        average, changes = self.averaged(w, s, h, t)
        importance = self.traced("importance", g**2, s, h, t, changes)
        return w - h.lr * (g + h.kappa * importance * (w - average)), changes


@register
class StreamingMAS(Consolidation):
    """Streaming memory-aware synapses (Aljundi et al., 2018; Elsayed and Mahmood, 2024): ``ω = |g|``,
    ``w ← w − lr·[g + κ·Ω·(w − w̄)]`` with running averages Ω of ω and w̄ of w.

    Aljundi et al. use the gradient of the squared norm of the outputs. The streaming form uses the gradient of the loss, as
    the public code of Elsayed and Mahmood does, so it needs no second backward pass.
    """

    name, label = "s-mas", "S-MAS"
    colour, dark_colour = "#BC8F8F", "#e3c4c4"

    def update(self, w: "Tensor", g: "Tensor", s: Any, h: Any, t: Any) -> tuple["Tensor", Changes]:
        average, changes = self.averaged(w, s, h, t)
        importance = self.traced("importance", g.abs(), s, h, t, changes)
        return w - h.lr * (g + h.kappa * importance * (w - average)), changes


class Path(Consolidation):
    """Consolidation based on the last step, ``Δ = w_{t−1} − w_t``, and its effect on the loss, ``g·Δ``, with the gradient
    after the step; ``Δ = 0`` at the first step."""

    damping: Any = Setting(
        1e-3, symbol="ζ", least=0, help="Damping: limits the importance of weights that hardly move."
    )


@register
class StreamingSI(Path):
    """Streaming synaptic intelligence (Zenke et al., 2017; Elsayed and Mahmood, 2024):
    ``Ω = max(0, avg(g·Δ)/(avg(Δ)² + ζ))``, ``w ← w − lr·[g + κ·Ω·(w − w̄)]`` with running averages and the last step
    ``Δ = w_{t−1} − w_t``.

    The gradient in g·Δ is that after the step. A negative importance, which would push the weight away from its average,
    is set to zero, as in the code of Zenke et al.
    """

    name, label = "s-si", "S-SI"
    colour, dark_colour = "#556B2F", "#b3c98a"
    state: Mapping[str, str] = MappingProxyType(
        {"average": "zeros", "progress": "zeros", "distance": "zeros", "previous": "parameter"}
    )

    def update(self, w: "Tensor", g: "Tensor", s: Any, h: Any, t: Any) -> tuple["Tensor", Changes]:
        average, changes = self.averaged(w, s, h, t)
        moved = s.previous - w
        progress = self.traced("progress", g * moved, s, h, t, changes)
        distance = self.traced("distance", moved, s, h, t, changes)
        importance = (progress / (distance**2 + h.damping)).clamp(min=0)
        return w - h.lr * (g + h.kappa * importance * (w - average)), {**changes, "previous": w}


@register
class StreamingRWalk(Path):
    """Streaming Riemannian walk (Chaudhry et al., 2018; Elsayed and Mahmood, 2024):
    ``Ω = F + avg(max(0, g·Δ)/(½·F·Δ² + ζ))`` with the Fisher information ``F = avg(g²)``,
    ``w ← w − lr·[g + κ·Ω·(w − w̄)]`` with running averages and the last step ``Δ = w_{t−1} − w_t``.

    The gradient in g·Δ is that after the step. The public code of Elsayed and Mahmood averages w² instead of g² and does not
    keep the second term between steps; this method implements the formula.
    """

    name, label = "s-rwalk", "S-RWalk"
    colour, dark_colour = "#CD5C5C", "#ff9d9d"
    state: Mapping[str, str] = MappingProxyType(
        {"average": "zeros", "fisher": "zeros", "score": "zeros", "previous": "parameter"}
    )

    def update(self, w: "Tensor", g: "Tensor", s: Any, h: Any, t: Any) -> tuple["Tensor", Changes]:
        average, changes = self.averaged(w, s, h, t)
        moved = s.previous - w
        fisher = self.traced("fisher", g**2, s, h, t, changes)
        instant = (g * moved).clamp(min=0) / (0.5 * fisher * moved**2 + h.damping)
        importance = fisher + self.traced("score", instant, s, h, t, changes)
        return w - h.lr * (g + h.kappa * importance * (w - average)), {**changes, "previous": w}
