"""The networks that the kernels support, convolutions followed by Linear layers, and their memory layout."""

from dataclasses import dataclass
from math import prod

import numpy as np
from torch import nn

from upgd.kernels.machine import Floats, Integers
from upgd.population import network as net
from upgd.population.kernel.layout import Layer, aligned

__all__ = ["Link", "NetworkLayout", "chain", "plan"]


@dataclass
class Link:
    """A layer with weights, and the layers that follow it."""

    layer: net.Dense | net.Convolution
    activation: net.Activation | None = None
    pool: int = 0


@dataclass(frozen=True)
class NetworkLayout:
    """The memory layout of a network."""

    layers: list[Layer]
    table: Integers  #: all fields of the layers but the last, one row per layer
    slopes: Floats  #: the last field
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
    layers, units = _layers(links, parameters, net.read(network).image)
    layers, workspace = _with_workspace(layers)
    return NetworkLayout(
        layers=layers,
        table=np.array([layer[:-1] for layer in layers], np.int64),
        slopes=np.array([layer.slope for layer in layers], np.float32),
        weights=[link.layer.weight for link in links],
        parameters=parameters,
        parameter_count=count,
        rows=sum(layer.rows + 1 for layer in layers),
        units=units,
        workspace=workspace,
    )


def _layers(
    links: list[Link], parameters: dict[str, tuple[int, tuple[int, ...]]], image: tuple[int, int, int] | None
) -> tuple[list[Layer], int]:
    """Return the layers, without their workspace, and the number of units."""
    layers: list[Layer] = []
    inputs = row = 0
    units = prod(image) if image else links[0].layer.inputs
    for link in links:
        weight, (rows, *others) = parameters[link.layer.weight]
        kernel, positions, (channels, height, width) = 0, 1, (0, 0, 0)
        if isinstance(link.layer, net.Convolution):
            assert image
            kernel, (channels, height, width) = link.layer.kernel_size[0], image
            image = rows, height - kernel + 1, width - kernel + 1
            positions = image[1] * image[2]
        layers.append(
            Layer(
                rows=rows,
                columns=prod(others),
                weight=weight,
                bias=parameters[link.layer.bias][0] if link.layer.bias is not None else -1,
                row=row,
                inputs=inputs,
                outputs=units,
                activation=int(link.activation is not None and link.activation.kind == "tanh"),
                positions=positions,
                channels=channels,
                height=height,
                width=width,
                kernel=kernel,
                pool=link.pool,
                patches=0,
                filters=0,
                slope=1.0 if link.activation is None else link.activation.slope,
            )
        )
        row += rows + 1
        inputs, units = units, units + rows * positions
        if link.pool:
            assert image
            image = rows, image[1] // link.pool, image[2] // link.pool
            inputs, units = units, units + prod(image)
    return layers, units


def _with_workspace(layers: list[Layer]) -> tuple[list[Layer], int]:
    """Return the layers with offsets in the workspace, and the size of the workspace."""
    # The derivatives of patches come first; those of the network's inputs are not needed.
    end = aligned(max((layer.columns * layer.positions for layer in layers[1:] if layer.kernel), default=0))
    placed = []
    for layer in layers:
        if layer.kernel:
            patches, filters = end, end + aligned(layer.columns * layer.positions)
            end = filters + aligned(2 * layer.rows * (layer.columns + 1))
            layer = layer._replace(patches=patches, filters=filters)
        placed.append(layer)
    return placed, end
