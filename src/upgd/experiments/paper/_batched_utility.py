"""Utilities of many small networks at once, one per seed; :mod:`upgd.utility` computes the same for a single network.

The networks are fully connected, of the same shape, with mean squared error and one sample each. A layer is one tensor
``V`` (seeds, units, inputs + 1) of weights and biases; a bias is the weight of a constant input 1. Items are ordered by layer
and, within a layer, as the entries of ``V``.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from upgd.networks import MLP, initial_parameters


class Activation(NamedTuple):
    """A function with its first and second derivatives."""

    function: Callable[[Tensor], Tensor]
    slope: Callable[[Tensor], Tensor]
    bend: Callable[[Tensor], Tensor]


def _tanh_slope(a: Tensor) -> Tensor:
    return 1 - torch.tanh(a) ** 2


ACTIVATIONS = {
    "relu": Activation(torch.relu, lambda a: (a > 0).to(a.dtype), torch.zeros_like),
    "leaky_relu": Activation(
        nn.functional.leaky_relu, lambda a: torch.where(a > 0, 1.0, a.new_tensor(0.01)), torch.zeros_like
    ),
    "tanh": Activation(torch.tanh, _tanh_slope, lambda a: -2 * torch.tanh(a) * _tanh_slope(a)),
}
#: Display names of the activations.
TITLES = {"relu": "ReLU", "leaky_relu": "LeakyReLU", "tanh": "Tanh"}


def initial_layers(sizes: Sequence[int], seeds: Sequence[int]) -> list[Tensor]:
    """Return the initial weights of one network per seed, those of ``MLP(sizes, seed=seed)``, in float64."""
    tensors = list(initial_parameters(MLP(sizes), seeds).values())
    return [torch.cat((w, b.unsqueeze(-1)), -1).double() for w, b in zip(tensors[::2], tensors[1::2], strict=True)]


class Pass:
    """A forward and backward pass, including second derivatives, of all networks, each on its own sample.

    Args:
        layers: one tensor ``V`` (seeds, units, inputs + 1) per layer.
        x: inputs (seeds, inputs).
        y: targets (seeds, outputs).
        activation: a name in ``ACTIVATIONS``.
    """

    def __init__(self, layers: Sequence[Tensor], x: Tensor, y: Tensor, activation: str) -> None:
        self.layers = layers
        self.activation = ACTIVATIONS[activation]
        self.inputs: list[Tensor] = []  # of each layer, with the constant 1
        self.preactivations: list[Tensor] = []
        hidden = x
        for layer in layers:
            self.inputs.append(torch.cat((hidden, torch.ones_like(hidden[:, :1])), -1))
            self.preactivations.append((layer @ self.inputs[-1].unsqueeze(-1)).squeeze(-1))
            hidden = self.activation.function(self.preactivations[-1])
        self.error = self.preactivations[-1] - y
        self._backward()

    def _backward(self) -> None:
        outputs = self.error.shape[-1]
        delta, curvature = 2 * self.error / outputs, torch.full_like(self.error, 2 / outputs)
        self.deltas, self.curvatures = [delta], [curvature]  # ∂L/∂a and HesScale's ∂²L/∂a² of each layer
        self.feature_gradients: list[Tensor] = []  # ∂L/∂h of each hidden layer
        self.feature_curvatures: list[Tensor] = []
        for layer, a in zip(reversed(self.layers[1:]), reversed(self.preactivations[:-1]), strict=True):
            weight = layer[..., :-1]
            gradient = (delta.unsqueeze(-2) @ weight).squeeze(-2)
            second = (curvature.unsqueeze(-2) @ weight**2).squeeze(-2)
            slope = self.activation.slope(a)
            delta, curvature = gradient * slope, second * slope**2 + gradient * self.activation.bend(a)
            self.deltas.insert(0, delta)
            self.curvatures.insert(0, curvature)
            self.feature_gradients.insert(0, gradient)
            self.feature_curvatures.insert(0, second)

    def loss(self) -> Tensor:
        """Return the mean squared error of each network (seeds,)."""
        return (self.error**2).mean(-1)

    def descend(self, lr: float) -> list[Tensor]:
        """Return the layers after a step of SGD."""
        return [layer - lr * gradient for layer, gradient in zip(self.layers, self._gradients(), strict=True)]

    def of_weights(self) -> dict[str, list[Tensor]]:
        """Return measure → layers of utilities (seeds, items), including the measure ``true``."""
        contributions = [layer * h.unsqueeze(-2) for layer, h in zip(self.layers, self.inputs, strict=True)]
        gradients = self._gradients()
        first = [-delta.unsqueeze(-1) * c for delta, c in zip(self.deltas, contributions, strict=True)]
        terms = zip(first, self.curvatures, contributions, strict=True)
        measures = {
            "true": [self._without_weights(place, c) for place, c in enumerate(contributions)],
            "first order": first,
            "second order": [f + curvature.unsqueeze(-1) * c**2 / 2 for f, curvature, c in terms],
            "magnitude": [layer.abs() for layer in self.layers],
            "squared gradient": [gradient**2 for gradient in gradients],
        }
        return {name: [u.flatten(1) for u in layers] for name, layers in measures.items()}

    def of_features(self) -> dict[str, list[Tensor]]:
        """Return measure → hidden layers of utilities (seeds, units), including the measure ``true``."""
        hidden = [h[..., :-1] for h in self.inputs[1:]]
        gates = [gradient * h for gradient, h in zip(self.feature_gradients, hidden, strict=True)]
        terms = zip(gates, self.feature_curvatures, hidden, strict=True)
        return {
            "true": [self._rise(place, -h.unsqueeze(-1)).squeeze(-1) for place, h in enumerate(hidden)],
            "first order": [-gate for gate in gates],
            "second order": [curvature * h**2 / 2 - gate for gate, curvature, h in terms],
            "magnitude": [h.abs() for h in hidden],
            "squared gradient": [gate**2 for gate in gates],
        }

    def _gradients(self) -> list[Tensor]:
        return [delta.unsqueeze(-1) * h.unsqueeze(-2) for delta, h in zip(self.deltas, self.inputs, strict=True)]

    def _without_weights(self, place: int, contributions: Tensor) -> Tensor:
        if place == len(self.layers) - 1:
            error = self.error.unsqueeze(-1)
            return contributions * (contributions - 2 * error) / error.shape[-2]
        a = self.preactivations[place].unsqueeze(-1)
        return self._rise(place, self.activation.function(a - contributions) - self.activation.function(a))

    def _rise(self, place: int, change: Tensor) -> Tensor:
        """Return the increase of the loss when one unit of a hidden layer changes.

        Changes are propagated rather than values. This avoids cancellation, and an ineffective change gives exactly 0.

        Args:
            place: the hidden layer.
            change: (seeds, units, alternatives), changes of each unit, each applied separately.

        Returns:
            The increases, of the shape of ``change``.
        """
        weight = self.layers[place + 1][..., :-1]
        # (seeds, units, alternatives, units of the next layer)
        change = change.unsqueeze(-1) * weight.transpose(-1, -2).unsqueeze(-2)
        for layer, a in zip(self.layers[place + 2 :], self.preactivations[place + 1 :], strict=False):
            a = a[:, None, None]
            change = self.activation.function(a + change) - self.activation.function(a)
            change = change @ layer[:, None, :, :-1].transpose(-1, -2)
        return (change * (change + 2 * self.error[:, None, None])).mean(-1)
