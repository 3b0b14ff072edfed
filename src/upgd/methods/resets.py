"""Methods that reset hidden units.

They run on top of SGD or Adam. The units of a convolution are its channels. A reset draws new incoming weights from the
initial distribution and sets the bias and the outgoing weights to 0. The state that the method and the optimizer keep for the
unit is reset as well.
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import upgd
from upgd.methods.adamw import Optimized
from upgd.methods.method import Setting
from upgd.methods.registry import register

if TYPE_CHECKING:
    from torch import Tensor

    from upgd.methods.units import Reset, Units

__all__ = ["ContinualBackprop", "ReDo", "Resetting", "SelfNormalizedResets"]

Changes = dict[str, "Tensor"]


class Resetting(Optimized):
    """Base class of methods that reset units: SGD, or Adam with a separate step count for every weight.

    After a reset, Adam's averages of a weight restart at zero, and so must their bias correction.
    """

    @property
    def state(self) -> Mapping[str, str]:  # type: ignore[override]
        return {} if self.optimizer == "sgd" else {**super().state, "count": "zeros"}

    def update(self, w: "Tensor", g: "Tensor", s: Any, h: Any) -> tuple["Tensor", Changes]:
        if self.optimizer == "sgd":
            return self.stepped(w, g, s, h, None)
        count = s.count + 1
        stepped, changes = self.stepped(w, g, s, h, count)
        return stepped, {**changes, "count": count}


@register
class ContinualBackprop(Resetting):
    """Continual Backprop (Dohare et al., 2024): in every hidden layer, replaces a fraction ρ per step of the units older than
    m steps, those with the smallest contribution.

    ::

        u ← η·u + (1−η)·|h|·Σ|w_out|,   û = u/(1 − ηᵃ)   contribution of a unit of age a
        f ← η·f + (1−η)·h,              f̂ = f/(1 − ηᵃ)   its mean output
        c ← c + ρ·(number of units with a > m)           per layer

    While c ≥ 1, the unit with the smallest û among those with a > m is replaced, and c decreases by 1.

    The average output of a replaced unit moves to the next layer, whose biases grow by ``w_out·f̂``. Contributions use the
    weights after the update and the outputs before it. In a convolution, h and |h| are means over positions.
    """

    name, label = "continual-backprop", "Continual Backprop"
    colour, dark_colour = "#B22222", "#ff6f61"
    unit_state: Mapping[str, str] = MappingProxyType(
        {"contribution": "zeros", "mean_output": "zeros", "age": "zeros", "due": "layer"}
    )

    replacement_rate: Any = Setting(
        1e-4,
        symbol="ρ",
        least=0,
        below=1,
        off=0,
        grid=(1e-3, 1e-4, 1e-5),
        help="Fraction of mature units replaced per step.",
    )
    maturity: Any = Setting(100.0, symbol="m", least=0, help="Steps before a new unit may be replaced.")
    decay_contribution: Any = Setting(
        0.99, symbol="η", least=0, below=1, help="Decay rate of a unit's average contribution and output."
    )

    def reset_units(self, units: "Units", s: Any, h: Any) -> tuple["Reset", Changes]:
        import torch

        from upgd.methods.units import Reset

        age = s.age + 1
        size = units.activation.abs().mean(-1) * units.outgoing.abs().sum((1, 3))
        contribution = upgd.rules.trace(s.contribution, size, h.decay_contribution)
        output = upgd.rules.trace(s.mean_output, units.activation.mean(-1), h.decay_contribution)
        mature = age > h.maturity
        due = s.due + h.replacement_rate * mature.sum(-1, keepdim=True).to(age)
        ranked = torch.where(mature, upgd.rules.unbiased(contribution, h.decay_contribution, age), torch.inf)
        rank = ranked.argsort(dim=-1, stable=True).argsort(dim=-1)
        chosen = (rank < due.floor()) & mature
        lost = torch.where(chosen, upgd.rules.unbiased(output, h.decay_contribution, age), 0)
        moved = (units.outgoing * lost[:, None, :, None]).sum((2, 3))
        due = due - chosen.sum(-1, keepdim=True).to(due)
        changes = {"contribution": contribution, "mean_output": output, "age": age, "due": due}
        return Reset(chosen, next_bias=moved), changes


@register
class ReDo(Resetting):
    """ReDo (Sokar et al., 2023): every N steps, resets the τ-dormant units, those whose mean ``|h|`` is at most τ times the
    mean of their layer.

    The mean is over the last N steps, whereas the paper uses a batch. In a convolution, it is also over positions.
    """

    name, label = "redo", "ReDo"
    colour, dark_colour = "#7B68EE", "#b3a6ff"
    unit_state: Mapping[str, str] = MappingProxyType({"activity": "zeros"})

    tau: Any = Setting(
        0.1,
        symbol="τ",
        least=0,
        below=1,
        grid=(0.1, 0.03, 0.01),
        help="Dormancy threshold: largest activity of a dormant unit, relative to its layer's mean.",
    )
    period: Any = Setting(1000.0, symbol="N", least=1, help="Steps between resets of dormant units.")

    def reset_units(self, units: "Units", s: Any, h: Any, t: Any) -> tuple["Reset", Changes]:
        import torch

        from upgd.methods.units import Reset

        activity = s.activity + units.activation.abs().mean(-1)
        dormant = activity <= h.tau * activity.mean(-1, keepdim=True)
        now = t % h.period == 0
        chosen = torch.where(now, dormant, torch.zeros_like(dormant))
        return Reset(chosen), {"activity": torch.where(now, torch.zeros_like(activity), activity)}


@register
class SelfNormalizedResets(Resetting):
    """Self-normalized resets (Farias and Jozefiak, 2024): resets a unit that has been inactive for longer than its own
    inter-firing times make plausible, ``P(A > a) ≤ η``.

    A unit fires when its output is above zero, in a convolution at any position. The paper compares the time a since a unit
    last fired with a quantile of the inter-firing times A in a window of batches. Here, every sample counts, and A is
    geometric with mean M, the mean of the unit's inter-firing times since its last reset and one prior observation of m::

        M = (m + steps until it last fired)/(1 + how often it fired),     P(A > a) = (1 − 1/M)ᵃ

    A unit that never fires is therefore reset after about ``m·ln(1/η)`` steps.
    """

    name, label = "self-normalized-resets", "Self-Normalized Resets"
    colour, dark_colour = "#C9A227", "#f5d76e"
    unit_state: Mapping[str, str] = MappingProxyType({"age": "zeros", "silence": "zeros", "firings": "zeros"})

    rejection: Any = Setting(
        1e-3,
        symbol="η",
        least=0,
        below=1,
        grid=(1e-2, 1e-3, 1e-4),
        help="Rejection threshold: reset a unit if the probability of its inactivity is at most this.",
    )
    patience: Any = Setting(100.0, symbol="m", least=1, help="Assumed inter-firing time of a new unit.")

    def reset_units(self, units: "Units", s: Any, h: Any) -> tuple["Reset", Changes]:
        import torch

        from upgd.methods.units import Reset

        fires = (units.activation > 0).any(-1)
        age = s.age + 1
        silence = torch.where(fires, 0, s.silence + 1)
        firings = s.firings + fires.to(age)
        between = (h.patience + (age - silence)) / (1 + firings)
        plausible = (1 - 1 / between) ** silence
        chosen = (silence > 0) & (plausible <= h.rejection)
        return Reset(chosen), {"age": age, "silence": silence, "firings": firings}
