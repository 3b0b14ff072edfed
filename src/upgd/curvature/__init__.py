"""Curvature: the HesScale estimator and its rules for layers and losses.

``hesscale`` defines :class:`HesScale`, and ``modules`` defines modules that make branches and gates visible to it.
``layers``, ``activations`` and ``losses`` contain the rules. Register a new layer with :func:`layer`, an activation with
:func:`elementwise`, and a loss with :func:`loss`.
"""

from upgd.curvature._registry import elementwise, layer, loss
from upgd.curvature._sweep import Call
from upgd.curvature.hesscale import HesScale
from upgd.curvature.modules import Add, Fork, Gate, Residual

__all__ = ["Add", "Call", "Fork", "Gate", "HesScale", "Residual", "elementwise", "layer", "loss"]
