"""Hand-written loss, gradient and curvature of a chain of layers, for many learners at once.

Every tensor has a leading learner dimension: each learner has its own weights and its own sample. The backward sweep combines
backpropagation and HesScale. With features ``h = f(a)``, ``a = W·h' + b`` and S for curvature, in every layer::

    ∂L/∂h' = Wᵀ·∂L/∂a                     S(h') = (W∘W)ᵀ·S(a)
    ∂L/∂a  = f'(a)∘∂L/∂h                  S(a)  = f'(a)²∘S(h) + f''(a)∘∂L/∂h
    ∂L/∂W  = ∂L/∂a ⊗ h'                   S(W)  = S(a) ⊗ h'²
    ∂L/∂gate = ∂L/∂h∘h                    S(gate) = S(h)∘h²        for a gate of constant value 1 after every hidden feature

A convolution is the same with one product per position, summed over positions. Sums are arranged so that a learner's results
are bitwise independent of the number of learners (on the CPU) and bitwise reproducible: values are gathered, never
scattered with atomic additions in an arbitrary order.
"""

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from upgd.curvature.layers import through_normalization
from upgd.methods.units import Units, by_unit, outgoing
from upgd.population import network as net
from upgd.population.backend import Loss

__all__ = ["Chain", "Derivatives", "judge"]

Parameters = Mapping[str, Tensor]
Memory = tuple[Tensor, ...]


@dataclass
class Derivatives:
    """Derivatives for one sample per learner. Gradients and curvatures are keyed by parameter, those of gates by the incoming
    weight of the gated features: ``(learners, features)``."""

    loss: Tensor  #: (learners,)
    correct: Tensor  #: (learners,) bool
    gradient: dict[str, Tensor] = field(default_factory=dict)
    curvature: dict[str, Tensor] = field(default_factory=dict)
    gate_gradient: dict[str, Tensor] = field(default_factory=dict)
    gate_curvature: dict[str, Tensor] = field(default_factory=dict)
    #: By incoming weight: the values of the features and the loss's gradient, ``(learners, features, positions)``.
    features: dict[str, Tensor] = field(default_factory=dict)
    feature_gradient: dict[str, Tensor] = field(default_factory=dict)


class Back(NamedTuple):
    """Derivatives propagated backward: with respect to a layer's output, then its input."""

    gradient: Tensor
    curvature: Tensor | None  #: None if not requested


class _Layer(Protocol):
    """One layer of the chain. ``forward`` returns the output and the memory that ``backward`` needs."""

    def forward(self, parameters: Parameters, x: Tensor) -> tuple[Tensor, Memory]: ...

    def backward(self, parameters: Parameters, memory: Memory, back: Back, into: Derivatives) -> Back: ...


class Chain:
    """A network that is a chain of Linear, Conv2d, LayerNorm, activation, MaxPool2d and Flatten layers.

    Args:
        network: :class:`upgd.networks.MLP`, :class:`upgd.networks.ConvNet`, or an ``nn.Sequential`` of such layers.
        curvature: whether to compute curvature.
        features: whether to compute the derivatives of gates.
    """

    def __init__(self, network: nn.Module, *, curvature: bool = False, features: bool = False) -> None:
        self._curvature = curvature
        self._features = features
        read = net.read(network)
        self._layers = _layers(read.layers)
        self._arranges_inputs = read.arranges_inputs
        #: For each weight, the layer whose output holds its features: the activation before the next weights, if any.
        self._gates: dict[int, str] = {}
        self._owners: dict[str | None, str] = {}
        self._outputs_per_unit: dict[str, int] = {}
        for at, layer in enumerate(self._layers):
            if isinstance(layer, _Dense | _Convolution):
                seen = _activation_of(at, self._layers)
                self._gates[seen] = layer.weight
                self._outputs_per_unit[layer.weight] = 2 if isinstance(self._layers[seen], _Doubling) else 1
                self._owners |= {layer.weight: layer.weight, layer.bias: layer.weight}
        self._gates.pop(max(self._gates))  # the output layer has no hidden features
        weighted = [layer for layer in self._layers if isinstance(layer, _Dense | _Convolution)]
        self._next = {one.weight: other for one, other in pairwise(weighted)}
        self._biases = {layer.weight: layer.bias for layer in weighted}

    @staticmethod
    def unsupported(network: nn.Module) -> str | None:
        """Return the reason why the network is not such a chain, or ``None`` if it is."""
        try:
            net.read(network)
        except net.NotAChain as reason:
            return str(reason)
        return None

    def features(self) -> tuple[str, ...]:
        """The incoming weights of hidden features, first layer first."""
        return tuple(self._gates.values())

    def owner(self, parameter: str) -> str | None:
        """Return the weight of the layer that the parameter (the weight or the bias) belongs to; None for normalization."""
        return self._owners.get(parameter)

    def units(self, weight: str, parameters: Parameters, found: Derivatives) -> Units:
        """Return the hidden units with the given incoming weight."""
        bias, activation = self._biases[weight], found.features[weight]
        return Units(
            activation=activation,
            gradient=found.feature_gradient[weight],
            gate_gradient=found.gate_gradient[weight],
            gate_curvature=found.gate_curvature.get(weight),
            incoming=parameters[weight].flatten(2),
            bias=None if bias is None else parameters[bias],
            outgoing=outgoing(
                parameters[self._next[weight].weight], activation.shape[1], self._outputs_per_unit[weight]
            ),
        )

    def outputs_per_unit(self, weight: str) -> int:
        """Return the number of outputs per unit with the given incoming weight: 2 with CReLU, otherwise 1."""
        return self._outputs_per_unit[weight]

    def around(self, weight: str) -> tuple[str | None, str, str | None]:
        """Return the bias of the units with the given incoming weight, and the weight and bias of the next layer."""
        following = self._next[weight]
        return self._biases[weight], following.weight, following.bias

    def outputs(self, parameters: Parameters, x: Tensor) -> Tensor:
        """Return the network's outputs for one sample per learner; arguments as for :meth:`derivatives`."""
        h = self._arranged(x)
        for layer in self._layers:
            h, _ = layer.forward(parameters, h)
        return h

    def derivatives(self, parameters: Parameters, x: Tensor, target: Tensor, loss: Loss) -> Derivatives:
        """Return the derivatives for one sample per learner.

        Args:
            parameters: ``{name: (learners, *shape)}``.
            x: ``(learners, *input_shape)``.
            target: ``(learners,)`` classes or ``(learners, outputs)`` numbers.
            loss: the loss function.
        """
        h = self._arranged(x)
        memories, outputs = [], []
        for layer in self._layers:
            h, memory = layer.forward(parameters, h)
            memories.append(memory)
            outputs.append(h)

        found, back = judge(h, target, loss, self._curvature)
        for at in reversed(range(len(self._layers))):
            layer = self._layers[at]
            if self._features and at in self._gates:
                weight = self._gates[at]
                self._look_at_gates(weight, parameters[weight].shape[1], outputs[at], back, found)
            back = layer.backward(parameters, memories[at], back, found)
            if isinstance(layer, _Dense | _Convolution) and layer.first:
                break  # the layers before only reshape the inputs
        return found

    def _arranged(self, x: Tensor) -> Tensor:
        """Return the sample in the shape of the first layer: our networks flatten images, or add a channel to grey ones."""
        if not self._arranges_inputs:
            return x
        return x.flatten(1) if isinstance(self._layers[0], _Dense) else x.unsqueeze(1) if x.ndim == 3 else x

    def _look_at_gates(self, weight: str, features: int, h: Tensor, back: Back, into: Derivatives) -> None:
        if (each := self._outputs_per_unit[weight]) > 1:  # counted as positions
            h, *others = (by_unit(one, features, each) for one in (h, back.gradient, back.curvature) if one is not None)
            back = Back(others[0], others[1] if len(others) > 1 else None)
        into.features[weight] = h.reshape(len(h), features, -1)
        into.feature_gradient[weight] = back.gradient.reshape(len(h), features, -1)
        into.gate_gradient[weight] = _over_positions(back.gradient * h, features)
        if back.curvature is not None:
            into.gate_curvature[weight] = _over_positions(back.curvature * h**2, features)


def judge(outputs: Tensor, target: Tensor, loss: Loss, curvature: bool) -> tuple[Derivatives, Back]:
    """Return the loss of every learner's outputs, and its derivatives with respect to them."""
    if loss == "mse":
        error = outputs - target
        found = Derivatives((error**2).mean(-1), torch.zeros_like(outputs[:, 0], dtype=torch.bool))
        each = 2 / outputs.shape[-1]
        return found, Back(each * error, torch.full_like(error, each) if curvature else None)
    log_q = F.log_softmax(outputs, -1)
    q, at_target = log_q.exp(), target.unsqueeze(-1)
    found = Derivatives(-log_q.gather(-1, at_target).squeeze(-1), outputs.argmax(-1) == target)
    gradient = q.scatter_add(-1, at_target, torch.full_like(at_target, -1, dtype=q.dtype))
    return found, Back(gradient, q - q**2 if curvature else None)


# ------------------------------------------------------------------------------------------------------------ the layers


@dataclass(frozen=True)
class _Dense:
    weight: str
    bias: str | None
    first: bool  #: derivatives with respect to the network's inputs are not needed

    def forward(self, parameters: Parameters, x: Tensor) -> tuple[Tensor, Memory]:
        # A product and a sum, not a matrix product, because BLAS orders sums depending on the number of learners.
        out = (parameters[self.weight] * x.unsqueeze(1)).sum(-1)
        return (out if self.bias is None else out + parameters[self.bias]), (x,)

    def backward(self, parameters: Parameters, memory: Memory, back: Back, into: Derivatives) -> Back:
        weight, inputs = parameters[self.weight], memory[0].unsqueeze(1)
        gradient = back.gradient.unsqueeze(-1)
        into.gradient[self.weight] = gradient * inputs
        if self.bias is not None:
            into.gradient[self.bias] = back.gradient
        curvature = None
        if back.curvature is not None:
            curvature = back.curvature.unsqueeze(-1)
            into.curvature[self.weight] = curvature * inputs**2
            if self.bias is not None:
                into.curvature[self.bias] = back.curvature
        if self.first:
            return back
        return Back((weight * gradient).sum(1), None if curvature is None else (weight**2 * curvature).sum(1))


@dataclass(frozen=True)
class _Convolution:
    weight: str
    bias: str | None
    first: bool
    kernel_size: tuple[int, ...]
    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]

    def forward(self, parameters: Parameters, x: Tensor) -> tuple[Tensor, Memory]:
        patches = F.unfold(x, self.kernel_size, self.dilation, self.padding, self.stride)
        out = _products(parameters[self.weight].flatten(2), patches)
        if self.bias is not None:
            out = out + parameters[self.bias].unsqueeze(-1)
        return out.view(*out.shape[:2], *self._positions(x)), (x, patches)

    def backward(self, parameters: Parameters, memory: Memory, back: Back, into: Derivatives) -> Back:
        weight, (x, patches) = parameters[self.weight], memory
        gradient = back.gradient.flatten(2)
        into.gradient[self.weight] = _products(gradient, patches.mT).view_as(weight)
        if self.bias is not None:
            into.gradient[self.bias] = gradient.sum(-1)
        curvature = None
        if back.curvature is not None:
            curvature = back.curvature.flatten(2)
            into.curvature[self.weight] = _products(curvature, (patches**2).mT).view_as(weight)
            if self.bias is not None:
                into.curvature[self.bias] = curvature.sum(-1)
        if self.first:
            return back
        matrix = weight.flatten(2)
        return Back(
            self._folded(_products(matrix.mT, gradient), x),
            None if curvature is None else self._folded(_products((matrix**2).mT, curvature), x),
        )

    def _positions(self, x: Tensor) -> tuple[int, ...]:
        sides = zip(x.shape[2:], self.kernel_size, self.stride, self.padding, self.dilation, strict=True)
        return tuple(
            (side + 2 * pad - spread * (kernel - 1) - 1) // step + 1 for side, kernel, step, pad, spread in sides
        )

    def _folded(self, patches: Tensor, x: Tensor) -> Tensor:
        """Return, for every input, the sum over all patches that contain it."""
        shape = (self.kernel_size, self.stride, self.padding, self.dilation)
        entries = _entries(tuple(x.shape[2:]), self._positions(x), *shape, x.device)
        return _collected(patches.view(*x.shape[:2], -1), entries, 0).sum(-1).view_as(x)


@dataclass(frozen=True)
class _Activation:
    """ReLU and LeakyReLU by their negative slope (identity: 1), or Tanh."""

    slope: float | None  #: None for Tanh

    def forward(self, parameters: Parameters, x: Tensor) -> tuple[Tensor, Memory]:
        if self.slope is None:
            h = torch.tanh(x)
            return h, (h,)
        if self.slope == 1:
            return x, ()
        return (F.relu(x) if self.slope == 0 else F.leaky_relu(x, self.slope)), (x,)

    def backward(self, parameters: Parameters, memory: Memory, back: Back, into: Derivatives) -> Back:
        gradient, curvature = back
        if self.slope == 1:
            return back
        if self.slope is None:
            h = memory[0]
            rise = 1 - h**2
            if curvature is not None:
                curvature = rise**2 * curvature - 2 * h * rise * gradient
            return Back(rise * gradient, curvature)
        below = memory[0] <= 0
        return Back(
            torch.where(below, self.slope * gradient, gradient),
            None if curvature is None else torch.where(below, self.slope**2 * curvature, curvature),
        )


@dataclass(frozen=True)
class _Doubling:
    """CReLU."""

    dim: int

    def forward(self, parameters: Parameters, x: Tensor) -> tuple[Tensor, Memory]:
        return torch.cat([F.relu(x), F.relu(-x)], self.dim), (x,)

    def backward(self, parameters: Parameters, memory: Memory, back: Back, into: Derivatives) -> Back:
        (x,) = memory
        positive, negative = back.gradient.chunk(2, self.dim)
        gradient = torch.where(x > 0, positive, 0) - torch.where(x < 0, negative, 0)
        curvature = None
        if back.curvature is not None:
            positive, negative = back.curvature.chunk(2, self.dim)
            curvature = torch.where(x > 0, positive, 0) + torch.where(x < 0, negative, 0)
        return Back(gradient, curvature)


@dataclass(frozen=True)
class _Norm:
    """LayerNorm over the units of a Linear layer: ``x̂·w + b`` with ``x̂ = (x − mean)/s``."""

    weight: str | None
    bias: str | None
    eps: float

    def forward(self, parameters: Parameters, x: Tensor) -> tuple[Tensor, Memory]:
        centred = x - x.mean(-1, keepdim=True)
        inverse = ((centred**2).mean(-1, keepdim=True) + self.eps).rsqrt()
        normalized = centred * inverse
        out = normalized if self.weight is None else normalized * parameters[self.weight]
        return (out if self.bias is None else out + parameters[self.bias]), (normalized, inverse)

    def backward(self, parameters: Parameters, memory: Memory, back: Back, into: Derivatives) -> Back:
        (x, inverse), (gradient, curvature) = memory, back
        if self.bias is not None:
            into.gradient[self.bias] = gradient
            if curvature is not None:
                into.curvature[self.bias] = curvature
        if self.weight is not None:
            into.gradient[self.weight] = gradient * x
            gradient = gradient * parameters[self.weight]
            if curvature is not None:
                into.curvature[self.weight] = curvature * x**2
                curvature = curvature * parameters[self.weight] ** 2
        if curvature is not None:
            curvature = through_normalization(x, inverse, curvature, gradient, [-1])
        along = x * (gradient * x).mean(-1, keepdim=True)
        return Back((gradient - gradient.mean(-1, keepdim=True) - along) * inverse, curvature)


@dataclass(frozen=True)
class _MaxPool:
    kernel_size: tuple[int, ...]
    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    pool: nn.MaxPool2d  #: the same pooling, which also returns the indices

    def forward(self, parameters: Parameters, x: Tensor) -> tuple[Tensor, Memory]:
        out, index = self.pool(x)
        return out, (x, index)

    def backward(self, parameters: Parameters, memory: Memory, back: Back, into: Derivatives) -> Back:
        x, index = memory
        shape = (self.kernel_size, self.stride, self.padding, self.dilation)
        windows = _windows(tuple(x.shape[2:]), tuple(index.shape[2:]), *shape, x.device)
        pixels = torch.arange(len(windows), device=x.device).unsqueeze(-1)
        largest = _collected(index.flatten(2), windows, -1) == pixels
        return _each(lambda d: (_collected(d.flatten(2), windows, 0) * largest).sum(-1).view_as(x), back)


@dataclass(frozen=True)
class _Flat:
    def forward(self, parameters: Parameters, x: Tensor) -> tuple[Tensor, Memory]:
        return x.flatten(1), (x,)

    def backward(self, parameters: Parameters, memory: Memory, back: Back, into: Derivatives) -> Back:
        return _each(lambda d: d.view_as(memory[0]), back)


def _each(moved: Callable[[Tensor], Tensor], back: Back) -> Back:
    """Apply a function that only rearranges entries to gradient and curvature."""
    return Back(moved(back.gradient), None if back.curvature is None else moved(back.curvature))


def _products(a: Tensor, b: Tensor) -> Tensor:
    """Return matrix products, one per learner. BLAS uses a different algorithm, with different rounding, for a batch of one,
    so a single learner is duplicated."""
    if len(a) == 1:
        return torch.bmm(a.expand(2, -1, -1), b.expand(2, -1, -1))[:1]
    return torch.bmm(a, b)


Sides = tuple[int, ...]


@functools.cache
def _windows(
    sides: Sides, positions: Sides, size: Sides, stride: Sides, padding: Sides, dilation: Sides, device: torch.device
) -> Tensor:
    """Return, for every pixel and every place in a window, the index of the window that has the pixel at that place:
    ``(pixels, places)``; the number of windows if there is none. Computed once, to avoid copies to a GPU during a step."""
    by_side = []
    for side, count, places, step, pad, spread in zip(sides, positions, size, stride, padding, dilation, strict=True):
        begin = torch.arange(side).unsqueeze(1) + pad - spread * torch.arange(places)
        there = (begin % step == 0) & (begin >= 0) & (begin < step * count)
        by_side.append(torch.where(there, begin // step, -1))
    down, across = by_side[0][:, None, :, None], by_side[1][None, :, None, :]
    windows = torch.where((down >= 0) & (across >= 0), down * positions[1] + across, math.prod(positions))
    return windows.reshape(math.prod(sides), math.prod(size)).to(device)


@functools.cache
def _entries(
    sides: Sides, positions: Sides, size: Sides, stride: Sides, padding: Sides, dilation: Sides, device: torch.device
) -> Tensor:
    """Return the same for windows whose places are stored consecutively: ``(places, windows)``, flattened."""
    windows = _windows(sides, positions, size, stride, padding, dilation, device)
    count, places = math.prod(positions), math.prod(size)
    entries = torch.arange(places, device=device) * count + windows
    return torch.where(windows < count, entries, places * count)


def _collected(values: Tensor, entry: Tensor, otherwise: float) -> Tensor:
    """Return ``values[..., entry]``, where the entry past the last one means ``otherwise``."""
    padded = F.pad(values, (0, 1), value=otherwise)
    return padded.index_select(-1, entry.flatten()).view(*values.shape[:-1], *entry.shape)


def _over_positions(x: Tensor, features: int) -> Tensor:
    """Return the sum for each feature; Flatten may have merged the positions of a feature with the features."""
    if x.ndim > 2:
        return x.flatten(2).sum(-1)
    return x if x.shape[1] == features else x.reshape(len(x), features, -1).sum(-1)


def _activation_of(at: int, layers: Sequence[_Layer]) -> int:
    """Return the index of the activation of a weighted layer, possibly after a pooling; the layer itself if it has none."""
    for behind in range(at + 1, len(layers)):
        if isinstance(layers[behind], _Activation | _Doubling):
            return behind
        if isinstance(layers[behind], _Dense | _Convolution):
            break
    return at


def _layers(described: Sequence[net.Layer]) -> list[_Layer]:
    """Create the layers from their descriptions."""
    layers: list[_Layer] = []
    for layer in described:
        first = not any(isinstance(before, _Dense | _Convolution) for before in layers)
        if isinstance(layer, net.Dense):
            layers.append(_Dense(layer.weight, layer.bias, first))
        elif isinstance(layer, net.Convolution):
            geometry = layer.kernel_size, layer.stride, layer.padding, layer.dilation
            layers.append(_Convolution(layer.weight, layer.bias, first, *geometry))
        elif isinstance(layer, net.Activation):
            layers.append(_Activation(None if layer.kind == "tanh" else layer.slope))
        elif isinstance(layer, net.Doubling):
            layers.append(_Doubling(layer.dim))
        elif isinstance(layer, net.Norm):
            layers.append(_Norm(layer.weight, layer.bias, layer.eps))
        elif isinstance(layer, net.MaxPool):
            geometry = layer.kernel_size, layer.stride, layer.padding, layer.dilation
            layers.append(_MaxPool(*geometry, nn.MaxPool2d(*geometry, return_indices=True, ceil_mode=layer.ceil_mode)))
        else:
            layers.append(_Flat())
    return layers
