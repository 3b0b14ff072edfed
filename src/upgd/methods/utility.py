"""Utility-based perturbed gradient descent and search."""

import sys
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import upgd
from upgd.methods.method import Method, Reduction, Setting
from upgd.methods.registry import register

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["UPGD", "UPS", "EvenSearch", "NonprotectingUPGD", "Utility", "UtilityDescent", "gate_of"]

Changes = dict[str, "Tensor"]


class Utility(Method):
    """Base class of methods with utility: the utility trace and the gate computed from it.

    ::

        m  = ½·h·w² − g·w                    utility of a weight on this sample (h = 0 in first order)
        u ← β·u + (1−β)·m,  û = u/(1 − βᵗ)   running average, bias-corrected
        ū  = sigmoid(û / scale)              gate: utility relative to the other weights

    Feature-wise, the same holds for a gate of constant value 1 after every hidden unit; the unit's ū then applies to all of
    its incoming weights and its bias.
    """

    beta_utility: Any = Setting(
        0.99, symbol="β", least=0, below=1, grid=(0.0, 0.9, 0.99, 0.999), help="Decay rate of the utility trace, β."
    )
    granularity: Any = Setting(
        "weight",
        choices=("weight", "feature"),
        off="weight",
        words={"feature": "feature-wise"},
        help="Utility per weight or per feature.",
    )
    scaling: Any = Setting(
        "global",
        choices=("global", "local"),
        off="global",
        words={"local": "local"},
        help="Normalize utility globally or per unit.",
    )
    order: Any = Setting(
        1,
        choices=(1, 2),
        off=1,
        words={2: "2nd order"},
        help="1 for first-order utility, 2 for utility with HesScale's curvature.",
    )

    gated: Any = Setting(
        "all",
        text=True,
        off="all",
        quiet=True,
        help="Layers with gates: all, hidden, output, or layer names joined by +. Other layers use the ungated rule.",
    )

    profile: Any = Setting(
        "paper",
        choices=("paper", "authors"),
        off="paper",
        quiet=True,
        words={"authors": "authors' code"},
        help="Gates as in the paper, or as in the authors' public code.",
    )

    #: The gate function; a backend may replace it with a faster one.
    gate: Callable[["Tensor", "Tensor"], "Tensor"] = staticmethod(
        lambda utility, scale: upgd.rules.gate(utility, scale)
    )

    @property
    def by_weight(self) -> bool:
        """Whether utility belongs to weights, rather than features."""
        return bool(self.granularity == "weight")

    @property
    def uses_curvature(self) -> bool:
        return bool(self.order == 2)

    @property
    def uses_units(self) -> bool:
        return not self.by_weight

    def measure(self, s: Any, h: Any, t: Any) -> Changes:
        """Return the unbiased utility, which is reduced."""
        return {"scale": upgd.rules.unbiased(s.utility, h.beta_utility, t)} if hasattr(s, "utility") else {}

    def gate_of_weight(self, o: Any, r: Any, unit: Any, h: Any, t: Any) -> Any:
        """Return the gate ū of each entry of a parameter; 0 in layers without gates."""
        observed, reduced = (o, r) if self.by_weight or unit is None else (unit.o, unit.r)
        if reduced is None:
            return 0.0
        return gate_of(self, observed.scale, self.scale_of(observed.scale, reduced.scale, h, t))

    def scale_of(self, unbiased: "Tensor", reduced: "Tensor", h: Any, t: Any) -> "Tensor":
        """Return the scale of the utilities.

        With ``profile="authors"``, the scale is that of the authors' public code. Global: the largest utility without bias
        correction, although the utilities are corrected. Local: the norm over the last dimension, which is one row of a
        kernel for a convolution.
        """
        if self.profile == "paper":
            return reduced
        if self.scaling == "local":
            return (unbiased**2).sum(-1, keepdim=True).sqrt() if self.by_weight else reduced
        uncorrected: Tensor = reduced * (1 - h.beta_utility**t)
        return uncorrected


def gate_of(method: Utility, unbiased: "Tensor", reduced: "Tensor") -> "Tensor":
    """Return the gate for unbiased utilities and their scale."""
    tiny = _tiny(unbiased)
    return method.gate(unbiased, reduced.clamp(min=tiny if method.scaling == "global" else tiny**0.5))


def _tiny(tensor: "Tensor") -> float:
    torch = sys.modules["torch"]  # imported already, because there is a tensor
    return float(torch.finfo(tensor.dtype).tiny)


class UtilityDescent(Utility):
    """``w ← w − lr·[c·g·(1 − p·ū) + σ·ξ·(1 − q·ū) + λ·w]``: the rule of :mod:`upgd.rules`, with its switches c, p, q.

    Feature-wise, the output layer is trained by plain gradient descent.
    """

    rule = "utility"

    sigma: Any = Setting(
        1e-3, symbol="σ", least=0, off=0, grid=(0.001,), help="Standard deviation of the perturbation."
    )
    noise: Any = Setting(
        "white",
        choices=("white", "anticorrelated"),
        off="white",
        words={"anticorrelated": "anticorrelated"},
        help="White or anticorrelated perturbations.",
    )
    weight_decay: Any = Setting(0.0, symbol="wd", least=0, off=0, help="Decoupled weight decay.")
    c: Any = Setting(help="Whether to follow the gradient.")
    p: Any = Setting(help="Whether utility protects weights from the gradient.")
    q: Any = Setting(help="Whether utility protects weights from the noise.")

    @property
    def state(self) -> Mapping[str, str]:  # type: ignore[override]
        return {"utility": "zeros"} if self.by_weight else {}

    @property
    def unit_state(self) -> Mapping[str, str]:  # type: ignore[override]
        return {} if self.by_weight else {"utility": "zeros"}

    @property
    def reductions(self) -> Mapping[str, Reduction]:  # type: ignore[override]
        scale: Reduction = ("max", "learner") if self.scaling == "global" else ("norm", "unit")
        return {"scale": scale} if self.by_weight else {}

    @property
    def unit_reductions(self) -> Mapping[str, Reduction]:  # type: ignore[override]
        scale: Reduction = ("max", "learner") if self.scaling == "global" else ("norm", "layer")
        return {} if self.by_weight else {"scale": scale}

    def observe(self, w: "Tensor", g: "Tensor", s: Any, h: Any, curvature: "Tensor | None") -> Changes:
        if not self.by_weight:
            return {}
        return {"utility": upgd.rules.trace(s.utility, upgd.rules.utility(w, g, curvature), h.beta_utility)}

    def observe_units(self, units: Any, s: Any, h: Any) -> Changes:
        instant = upgd.rules.utility(units.ones, units.gate_gradient, units.gate_curvature)
        return {"utility": upgd.rules.trace(s.utility, instant, h.beta_utility)}

    def update(self, w: "Tensor", g: "Tensor", h: Any, t: Any, o: Any, r: Any, noise: Any, unit: Any) -> "Tensor":
        if not self.by_weight and unit is None:
            if self.profile == "paper":
                return upgd.rules.update(w, g, lr=h.lr, weight_decay=h.weight_decay)
            learns = h.c + (1 - h.c) * h.q  # 0 for the control of UPS alone
            sigma = h.sigma * (1 - learns)
            return upgd.rules.update(w, g, noise=noise, lr=h.lr, sigma=sigma, weight_decay=h.weight_decay, c=learns)
        gate = self.gate_of_weight(o, r, unit, h, t)
        return upgd.rules.update(
            w, g, gate, noise, lr=h.lr, sigma=h.sigma, weight_decay=h.weight_decay, c=h.c, p=h.p, q=h.q
        )


@register
class UPGD(UtilityDescent):
    """Utility-based perturbed gradient descent (Elsayed and Mahmood, 2023): protects useful weights and perturbs useless
    ones, ``w ← w − lr·[(g + σ·ξ)·(1 − ū) + λ·w]``.

    ``profile="authors"`` scales utilities as the authors' public code does: globally by the largest utility before bias
    correction, locally over the last dimension of a tensor. If no utility is positive, the paper's rule applies, whereas the
    authors' code flips signs or returns NaN.
    """

    name, label = "upgd", "UPGD"
    colour, dark_colour = "#0072B2", "#3d9be0"
    c, p, q = 1.0, 1.0, 1.0


@register
class NonprotectingUPGD(UtilityDescent):
    """UPGD that gates only the noise: ``w ← w − lr·[g + σ·ξ·(1 − ū) + λ·w]``."""

    name, label = "upgd-nonprotecting", "UPGD, non-protecting"
    colour, dark_colour = "#56B4E9", "#a6d8f5"
    c, p, q = 1.0, 0.0, 1.0


@register
class UPS(UtilityDescent):
    """Utility-based perturbed search: noise without a gradient step, less on useful weights, ``w ← w − lr·σ·ξ·(1 − ū)``."""

    name, label = "ups", "UPS"
    colour, dark_colour = "#332288", "#9d8ff0"
    c, p, q = 0.0, 0.0, 1.0
    lr: Any = Method.lr.but(grid=(1.0,))
    sigma: Any = UtilityDescent.sigma.but(grid=(0.1, 0.01, 0.001, 0.0001, 0.00001))
    weight_decay = 0.0
    profile = "paper"


@register
class EvenSearch(UPS):
    """The control for UPS: a search that perturbs all weights equally, ``w ← w − lr·σ·ξ``.

    Feature-wise, the output layer learns by its gradient, as that of UPS does. With ``profile="authors"`` it is perturbed
    like the rest, as in the authors' public code, which never resets the noise of its gates.
    """

    name, label = "ups-even", "even search"
    colour, dark_colour = "#777777", "#cfcfcf"
    q = 0.0
    beta_utility = 0.0
    scaling = "global"
    order = 1
    profile: Any = Utility.profile
