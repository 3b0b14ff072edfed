"""Variants of UPGD from the paper's pseudo-code and the authors' public code, where the package follows the text instead.

Each method changes one thing; ``docs/differences.md`` reports its effect. In this folder::

    upgd run output-permuted-digits --plugin their_rules --method upgd-growing-maximum --lr 0.03
"""

from typing import ClassVar

import torch

import upgd
from upgd.methods import register
from upgd.methods.utility import UPGD


@register
class GrowingMaximum(UPGD):
    """Algorithm 1: the maximum η never decreases, whereas the text takes the maximum of every step."""

    name = label = "upgd-growing-maximum"
    granularity, scaling, order, gated, profile = "weight", "global", 1, "all", "paper"
    state: ClassVar = {"utility": "zeros", "largest": "zeros"}  # η, once per weight

    def update(self, w, g, s, h, o, r, noise):
        largest = torch.maximum(s.largest, r.scale)
        gate = upgd.rules.gate(o.scale, largest.clamp(min=torch.finfo(w.dtype).tiny))
        new = upgd.rules.update(w, g, gate, noise, lr=h.lr, sigma=h.sigma, weight_decay=h.weight_decay)
        return new, {"largest": largest}


@register
class OutgoingGates(UPGD):
    """Algorithm 2 as printed, 1ūᵀ: the gate of a feature applies to its outgoing weights, not to its incoming ones.

    ∂L/∂gate of a feature is the sum of g·w over these weights, so its utility is the sum of theirs. Biases and the first
    layer, whose inputs are not features, take plain gradient steps; name the other layers: ``--gated layers.2+layers.4``.
    """

    name = label = "upgd-outgoing-gates"
    granularity, scaling, order, profile = "weight", "global", 1, "paper"

    def observe(self, w, g, s, h):
        instant = (-g * w).sum(-2, keepdim=True).expand_as(w) if _is_matrix(w) else torch.zeros_like(w)
        return {"utility": upgd.rules.trace(s.utility, instant, h.beta_utility)}

    def update(self, w, g, h, t, o, r, noise, unit):
        if o is None or not _is_matrix(w):
            return upgd.rules.update(w, g, lr=h.lr, weight_decay=h.weight_decay)
        return super().update(w, g, h, t, o, r, noise, unit)


@register
class SummedCurvature(UPGD):
    """Second-order utility of features with the curvature of all gates of a layer added up, as in the authors' code."""

    name = label = "upgd-summed-curvature"
    granularity, order, profile = "feature", 2, "paper"

    def observe_units(self, units, s, h):
        curvature = units.gate_curvature.sum(-1, keepdim=True)
        instant = upgd.rules.utility(units.ones, units.gate_gradient, curvature)
        return {"utility": upgd.rules.trace(s.utility, instant, h.beta_utility)}


def _is_matrix(w):
    """Whether these are weights and not biases; the first dimension is that of the learners."""
    return w.ndim == 3
