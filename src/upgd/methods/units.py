"""What a method that acts on hidden units sees of a layer."""

from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["Reset", "Units"]


@dataclass(frozen=True)
class Units:
    """The hidden units of one layer, for all learners at once; a unit of a convolution is a channel.

    Attributes:
        activation: ``(learners, units, positions)``, after the activation function; Linear layers have one position.
        gradient: of the loss with respect to ``activation``, same shape.
        gate_gradient: ``(learners, units)``, ∂L/∂gate for a gate, constant 1, that multiplies the unit.
        gate_curvature: the same for the second derivative; ``None`` unless the method uses curvature.
        incoming: ``(learners, units, inputs)``, the weights that enter each unit.
        bias: ``(learners, units)`` or ``None``.
        outgoing: ``(learners, outputs, units, places)``, the weights that leave each unit; places counts the weights from
            one unit to one output of the next layer: 1, the size of a kernel, or the positions that Flatten has joined.
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
