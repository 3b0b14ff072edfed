"""Curvature: HesScale, and the rules by which it follows layers and losses.

``hesscale`` has :class:`HesScale`, ``modules`` what models may contain to help it; ``layers``, ``activations`` and
``losses`` have the rules. Adding a layer is one small function: :func:`layer`, or :func:`elementwise` for an
activation. Adding a loss: :func:`loss`.
"""

from upgd.curvature._registry import elementwise, layer, loss
from upgd.curvature._sweep import Call
from upgd.curvature.hesscale import HesScale
from upgd.curvature.modules import Add, Fork, Gate, Residual

__all__ = ["Add", "Call", "Fork", "Gate", "HesScale", "Residual", "elementwise", "layer", "loss"]
