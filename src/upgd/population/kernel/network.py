"""The networks that the kernels support, convolutions followed by Linear layers, and their memory layout."""

from dataclasses import dataclass

import numpy as np
from torch import nn

from upgd.kernels.machine import Floats, Integers
from upgd.population import network as net
from upgd.population.kernel.layout import aligned

__all__ = ["Link", "NetworkLayout", "chain", "plan"]


@dataclass
class Link:
    """A layer with weights, and the layers that follow it."""

    layer: net.Dense | net.Convolution
    activation: net.Activation | None = None
    pool: int = 0


@dataclass(frozen=True)
class NetworkLayout:
    """The memory layout of a network; see :class:`upgd.population.kernel.layout.Layer`."""

    layers: Integers  #: one row per layer
    slopes: Floats  #: negative slope of the activation after each layer
    weights: list[str]  #: their names
    parameters: dict[str, tuple[int, tuple[int, ...]]]  #: offset and shape of each
    parameter_count: int
    rows: int
    units: int
    workspace: int


def chain(network: nn.Module) -> list[Link] | str:
    """Return the layers with weights, in order; or why the kernels cannot run them, worded to follow "because"."""
    try:
        read = net.read(network)
    except net.NotAChain as reason:
        return str(reason)
    links: list[Link] = []
    for layer in read.layers:
        last = links[-1] if links else None
        if isinstance(layer, net.Dense) or (isinstance(layer, net.Convolution) and read.image and _plain(layer)):
            links.append(Link(layer))
        elif isinstance(layer, net.Flatten):
            continue  # units are stored in one vector anyway
        elif isinstance(layer, net.Activation) and last and not last.activation and not last.pool and layer.slope >= 0:
            last.activation = layer
        elif isinstance(layer, net.MaxPool) and last and not last.pool and _pool(layer):
            last.pool = _pool(layer)
        else:
            return (
                "it supports Linear layers, and the convolutions of a ConvNet, with one activation between two of them, but "
                f"the network's layer {layer.name!r} is a {net.torch_name(layer)}"
            )
    return links


def _plain(layer: net.Convolution) -> bool:
    square = layer.kernel_size[0] == layer.kernel_size[1]
    return square and (layer.stride, layer.padding, layer.dilation) == ((1, 1), (0, 0), (1, 1))


def _pool(layer: net.MaxPool) -> int:
    """Return the size of a max pooling of adjacent square windows; 0 for anything else."""
    size = layer.kernel_size[0]
    usual = layer.kernel_size == layer.stride == (size, size)
    return size if usual and (layer.padding, layer.dilation, layer.ceil_mode) == ((0, 0), (1, 1), False) else 0


def plan(network: nn.Module) -> NetworkLayout:
    """Return the layout of a network that :func:`chain` accepts."""
    links = chain(network)
    assert not isinstance(links, str), links
    parameters: dict[str, tuple[int, tuple[int, ...]]] = {}
    count = 0
    for name, parameter in network.named_parameters():
        parameters[name] = (count, tuple(parameter.shape))
        count += parameter.numel()

    image = net.read(network).image or (0, 0, 0)
    table, slopes = [], []
    inputs = row = 0
    units = int(np.prod(image)) or links[0].layer.inputs
    patches = [0]
    for link in links:
        weight, shape = parameters[link.layer.weight]
        rows, columns = shape[0], int(np.prod(shape[1:]))
        bias = parameters[link.layer.bias][0] if link.layer.bias is not None else -1
        tanh = int(link.activation is not None and link.activation.kind == "tanh")
        slope = 1.0 if link.activation is None else link.activation.slope
        geometry: tuple[int, ...] = (0, 0, 0, 0, 0)
        positions, outputs = 1, units
        if isinstance(link.layer, net.Convolution):
            kernel = link.layer.kernel_size[0]
            height, width = image[1] - kernel + 1, image[2] - kernel + 1
            geometry, positions = (*image, kernel, link.pool), height * width
            image = (rows, height, width)
            patches.append(columns * positions)
        units += rows * positions
        following = outputs
        if link.pool:
            following = units
            image = (rows, image[1] // link.pool, image[2] // link.pool)
            units += int(np.prod(image))
        table.append([rows, columns, weight, bias, row, inputs, outputs, tanh, positions, *geometry, 0, 0])
        slopes.append(slope)
        row += rows + 1
        inputs = following
    workspace = aligned(max(patches[2:], default=0))  # derivatives with respect to the network's inputs are not needed
    for layer in table:
        rows, columns, positions, kernel = layer[0], layer[1], layer[8], layer[12]
        if kernel:
            layer[14], layer[15] = workspace, workspace + aligned(columns * positions)
            workspace = layer[15] + aligned(2 * rows * (columns + 1))
    return NetworkLayout(
        layers=np.array(table, np.int64),
        slopes=np.array(slopes, np.float32),
        weights=[link.layer.weight for link in links],
        parameters=parameters,
        parameter_count=count,
        rows=row,
        units=units,
        workspace=workspace,
    )
