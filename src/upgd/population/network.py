"""Parse a network into a chain of layer descriptions, which all backends start from.

>>> from upgd.networks import MLP
>>> for layer in read(MLP((4, 3, 2))).layers:
...     print(layer)
Dense(weight='layers.0.weight', bias='layers.0.bias', inputs=4, outputs=3)
Activation(name='layers.1', kind='relu', slope=0.0)
Dense(weight='layers.2.weight', bias='layers.2.bias', inputs=3, outputs=2)

Other networks raise :class:`NotAChain`. Each backend then decides which chains it supports.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, TypeAlias

from torch import nn

from upgd.networks import MLP, ConvNet, CReLU

__all__ = [
    "Activation",
    "Convolution",
    "Dense",
    "Doubling",
    "Flatten",
    "Layer",
    "MaxPool",
    "Network",
    "Norm",
    "NotAChain",
    "read",
    "torch_name",
]

Pair = tuple[int, int]


class NotAChain(Exception):
    """A network is not a chain. The message is a clause that follows "because"."""


@dataclass(frozen=True)
class Dense:
    """A Linear layer."""

    weight: str  #: the parameter's name, as in ``network.named_parameters()``
    bias: str | None
    inputs: int
    outputs: int

    @property
    def name(self) -> str:
        """The layer's name in the network."""
        return self.weight.removesuffix(".weight")


@dataclass(frozen=True)
class Convolution:
    """A two-dimensional convolution without groups, with zero padding."""

    weight: str
    bias: str | None
    inputs: int  #: channels
    outputs: int
    kernel_size: Pair
    stride: Pair
    padding: Pair
    dilation: Pair

    @property
    def name(self) -> str:
        """The layer's name in the network."""
        return self.weight.removesuffix(".weight")


@dataclass(frozen=True)
class Activation:
    """An activation, by its name in :data:`upgd.networks.ACTIVATIONS`."""

    name: str
    kind: Literal["relu", "leaky_relu", "tanh", "identity"]
    slope: float  #: the negative slope; unused for tanh


@dataclass(frozen=True)
class Doubling:
    """CReLU: two outputs per unit; the outputs for positive inputs of all units come first."""

    name: str
    dim: int  #: the dimension of the units


@dataclass(frozen=True)
class Norm:
    """LayerNorm over the units of a Linear layer."""

    name: str
    weight: str | None
    bias: str | None
    eps: float


@dataclass(frozen=True)
class MaxPool:
    """Two-dimensional max pooling."""

    name: str
    kernel_size: Pair
    stride: Pair
    padding: Pair
    dilation: Pair
    ceil_mode: bool


@dataclass(frozen=True)
class Flatten:
    """Flattens a sample."""

    name: str


Layer: TypeAlias = Dense | Convolution | Activation | Doubling | Norm | MaxPool | Flatten


@dataclass(frozen=True)
class Network:
    """A network as a chain of layers, in the order of their calls."""

    layers: tuple[Layer, ...]
    #: Whether it is one of our networks, which reshape a sample for their first layer.
    arranges_inputs: bool
    #: ``(channels, height, width)`` of a sample if the network specifies it, otherwise None.
    image: tuple[int, int, int] | None


def read(network: nn.Module) -> Network:
    """Return the network's layers.

    Args:
        network: :class:`upgd.networks.MLP`, :class:`upgd.networks.ConvNet`, or an ``nn.Sequential`` (of ``nn.Sequential``)
            of Linear, Conv2d, ReLU, LeakyReLU, Tanh, Identity, CReLU, LayerNorm, MaxPool2d and Flatten layers that ends with
            a Linear layer.

    Raises:
        NotAChain: If the network has another form.
    """
    ours = type(network).forward in (MLP.forward, ConvNet.forward)
    prefix, sequential = ("layers.", network.get_submodule("layers")) if ours else ("", network)
    modules = list(_modules(sequential, prefix))
    layers = tuple(_layer(name, module) for name, module in modules)
    if not any(isinstance(layer, Dense | Convolution) for layer in layers):
        raise NotAChain("the network has no Linear or Conv2d layer")
    if not isinstance(layers[-1], Dense):
        raise NotAChain("the network does not end with a Linear layer")
    first_dense = next(at for at, layer in enumerate(layers) if isinstance(layer, Dense))
    for layer in layers[first_dense:]:
        if isinstance(layer, Flatten):
            raise NotAChain(
                f"the network's Flatten {layer.name!r} comes after a Linear layer, which must be for samples of several "
                "vectors"
            )
    for before, layer in zip((None, *layers), layers, strict=False):
        if isinstance(layer, Norm) and not isinstance(before, Dense):
            raise NotAChain(f"the network's LayerNorm {layer.name!r} does not directly follow a Linear layer")
        if isinstance(layer, Doubling) and not isinstance(before, Dense | Norm if layer.dim == -1 else Convolution):
            raise NotAChain(
                f"the network's CReLU {layer.name!r} with dim={layer.dim} does not directly follow a Linear layer, for "
                "dim=-1, or a convolution, for dim=-3"
            )
    # Layers may share an activation, but not a parameter, which would have several names and several gradients.
    parameters = [parameter for _, module in modules for parameter in module.parameters()]
    if len({id(parameter) for parameter in parameters}) < len(parameters):
        raise NotAChain("the network uses one layer twice, or one parameter in two layers")
    image = network._image if ours and isinstance(network, ConvNet) else None
    return Network(layers, ours, image)


def torch_name(layer: Layer) -> str:
    """Return PyTorch's name of the layer, for messages."""
    if isinstance(layer, Activation):
        kinds = {"relu": "ReLU", "leaky_relu": f"LeakyReLU({layer.slope:g})", "tanh": "Tanh", "identity": "Identity"}
        return kinds[layer.kind]
    names: dict[type[Layer], str] = {
        Dense: "Linear",
        Convolution: "Conv2d",
        Doubling: "CReLU",
        Norm: "LayerNorm",
        MaxPool: "MaxPool2d",
        Flatten: "Flatten",
    }
    return names[type(layer)]


def _modules(sequential: nn.Module, prefix: str) -> Iterator[tuple[str, nn.Module]]:
    if type(sequential).forward is not nn.Sequential.forward:
        raise NotAChain(f"{type(sequential).__name__} defines its own forward()")
    # Not named_children(), which omits repeated modules.
    for name, module in sequential._modules.items():
        assert module is not None
        if isinstance(module, nn.Sequential):
            yield from _modules(module, f"{prefix}{name}.")
        else:
            yield prefix + name, module


def _layer(name: str, module: nn.Module) -> Layer:
    # Exact types, because a subclass may compute something else.
    if type(module) is nn.Linear:
        return Dense(f"{name}.weight", _bias(name, module), module.in_features, module.out_features)
    if type(module) is nn.Conv2d:
        if module.groups != 1 or module.padding_mode != "zeros" or isinstance(module.padding, str):
            raise NotAChain(f"the network's convolution {name!r} has groups, or padding other than a number of zeros")
        channels = module.in_channels, module.out_channels
        geometry = module.kernel_size, module.stride, module.padding, module.dilation
        return Convolution(f"{name}.weight", _bias(name, module), *channels, *map(_pair, geometry))
    if type(module) is nn.ReLU:
        return Activation(name, "relu", 0.0)
    if type(module) is nn.LeakyReLU:
        return Activation(name, "leaky_relu", float(module.negative_slope))
    if type(module) is nn.Tanh:
        return Activation(name, "tanh", 0.0)
    if type(module) is nn.Identity:
        return Activation(name, "identity", 1.0)
    if type(module) is CReLU and module.dim in (-1, -3):
        return Doubling(name, module.dim)
    if type(module) is nn.LayerNorm and len(module.normalized_shape) == 1:
        weight, bias = (None if own is None else f"{name}.{part}" for part, own in _affine(module))
        return Norm(name, weight, bias, module.eps)
    if type(module) is nn.MaxPool2d:
        size, stride = _pair(module.kernel_size), _pair(module.stride)
        return MaxPool(name, size, stride, _pair(module.padding), _pair(module.dilation), module.ceil_mode)
    if type(module) is nn.Flatten and module.start_dim in (1, -3) and module.end_dim == -1:
        return Flatten(name)
    raise NotAChain(
        f"the network's layer {name!r} is a {type(module).__name__}, but only Linear, Conv2d, ReLU, LeakyReLU, Tanh, "
        "Identity, CReLU, LayerNorm, MaxPool2d and Flatten are supported"
    )


def _affine(module: nn.LayerNorm) -> Iterator[tuple[str, nn.Parameter | None]]:
    yield "weight", module.weight
    yield "bias", module.bias


def _bias(name: str, module: nn.Linear | nn.Conv2d) -> str | None:
    return None if module.bias is None else f"{name}.bias"


def _pair(value: int | tuple[int, ...]) -> Pair:
    return (value, value) if isinstance(value, int) else (value[0], value[1])
