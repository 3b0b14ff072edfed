"""What a method that acts on hidden units sees of a layer."""

from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["Reset", "Units", "by_unit", "leaves", "outgoing"]


@dataclass(frozen=True)
class Units:
    """The hidden units of one layer, for all learners at once; a unit of a convolution is a channel.

    Attributes:
        activation: ``(learners, units, positions)``, after the activation function; Linear layers have one position. The two
            outputs that CReLU gives a unit count like two positions.
        gradient: of the loss with respect to ``activation``, same shape.
        gate_gradient: ``(learners, units)``, ∂L/∂gate for a gate, constant 1, that multiplies the unit.
        gate_curvature: the same for the second derivative; ``None`` unless the method uses curvature.
        incoming: ``(learners, units, inputs)``, the weights that enter each unit.
        bias: ``(learners, units)`` or ``None``.
        outgoing: ``(learners, outputs, units, places)``, the weights that leave each unit; places counts the weights from
            one unit to one output of the next layer: 1, the size of a kernel, or the positions that Flatten has joined; twice
            as many behind CReLU.
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
        """The gates themselves."""
        return torch.ones_like(self.gate_gradient)


@dataclass(frozen=True)
class Reset:
    """What ``reset_units`` wants done: selected units get fresh incoming weights from the initial distribution, bias 0,
    outgoing weights 0, and the initial state of the method for all these weights and for the unit.

    Attributes:
        units: ``(learners, units)`` bool, which units.
        next_bias: ``(learners, outputs)``, added to the bias of the next layer, if there is one; ``None``: nothing.
        outgoing: whether to zero the outgoing weights.
    """

    units: Tensor
    next_bias: Tensor | None = None
    outgoing: bool = True


def by_unit(outputs: Tensor, units: int, each: int) -> Tensor:
    """What units put out, ``(learners, each · units · positions)`` in any number of dimensions, as ``(learners, units, …)``;
    the first outputs of all units lie before the second ones."""
    return outputs.reshape(len(outputs), each, units, -1).transpose(1, 2).flatten(2)


def outgoing(weight: Tensor, units: int, each: int) -> Tensor:
    """The weights of the next layer, ``(learners, outputs, …)``, by the unit that they leave; see :class:`Units`."""
    if each == 1:
        return weight.reshape(*weight.shape[:2], units, -1)
    return weight.reshape(*weight.shape[:2], each, units, -1).transpose(2, 3).flatten(3)


def leaves(mask: Tensor, weight: Tensor, each: int) -> Tensor:
    """Which weights of the next layer leave the selected units, in a shape that meets them; mask is ``(learners, units)``."""
    mask = mask.repeat(1, each)
    where = mask.unsqueeze(1).repeat_interleave(weight.shape[2] // mask.shape[1], 2)
    return where.view(*where.shape, *(1,) * (weight.ndim - 3))
