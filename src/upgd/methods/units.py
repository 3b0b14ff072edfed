"""Access to the hidden units of a layer, for methods that act on them."""

from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["Reset", "Units", "by_unit", "leaves", "outgoing"]


@dataclass(frozen=True)
class Units:
    """The hidden units of one layer, for all learners at once; the units of a convolution are its channels.

    Attributes:
        activation: ``(learners, units, positions)``, after the activation function; Linear layers have one position. The two
            outputs of a unit with CReLU count as two positions.
        gradient: the gradient of the loss with respect to ``activation``, same shape.
        gate_gradient: ``(learners, units)``, ∂L/∂gate for a gate of constant value 1 that multiplies the unit.
        gate_curvature: the second derivative, same shape; ``None`` unless the method uses curvature.
        incoming: ``(learners, units, inputs)``, the incoming weights of each unit.
        bias: ``(learners, units)`` or ``None``.
        outgoing: ``(learners, outputs, units, places)``, the outgoing weights of each unit. ``places`` counts the weights
            from one unit to one output of the next layer: 1, the size of a kernel, or the positions merged by Flatten; twice
            as many after CReLU.
    """

    activation: Tensor
    gradient: Tensor
    gate_gradient: Tensor
    gate_curvature: Tensor | None
    incoming: Tensor
    bias: Tensor | None
    outgoing: Tensor

    @property
    def ones(self) -> Tensor:
        """The gates, which are all 1."""
        return torch.ones_like(self.gate_gradient)


@dataclass(frozen=True)
class Reset:
    """The result of ``reset_units``. Selected units get new incoming weights from the initial distribution, bias 0 and
    outgoing weights 0; the method's state of these weights and of the unit is reset.

    Attributes:
        units: ``(learners, units)`` bool, the selected units.
        next_bias: ``(learners, outputs)``, added to the bias of the next layer, if it has one; ``None`` for no change.
        outgoing: whether to zero the outgoing weights.
    """

    units: Tensor
    next_bias: Tensor | None = None
    outgoing: bool = True


def by_unit(outputs: Tensor, units: int, each: int) -> Tensor:
    """Reshape the outputs of units from ``(learners, each · units · positions)``, in any number of dimensions, to
    ``(learners, units, …)``. The first outputs of all units precede the second ones."""
    return outputs.reshape(len(outputs), each, units, -1).transpose(1, 2).flatten(2)


def outgoing(weight: Tensor, units: int, each: int) -> Tensor:
    """Group the weights of the next layer, ``(learners, outputs, …)``, by the unit that they leave; see :class:`Units`."""
    if each == 1:
        return weight.reshape(*weight.shape[:2], units, -1)
    return weight.reshape(*weight.shape[:2], each, units, -1).transpose(2, 3).flatten(3)


def leaves(mask: Tensor, weight: Tensor, each: int) -> Tensor:
    """Return a mask, broadcastable to ``weight``, of the outgoing weights of the units in ``mask``, ``(learners, units)``."""
    mask = mask.repeat(1, each)
    where = mask.unsqueeze(1).repeat_interleave(weight.shape[2] // mask.shape[1], 2)
    return where.view(*where.shape, *(1,) * (weight.ndim - 3))
