"""Reading a network as a chain of layers that the kernels can run: convolutions, then Linear layers."""

from dataclasses import dataclass

import numpy as np
from torch import nn

from upgd.networks import MLP, ConvNet
from upgd.population.kernel.machine import Floats, Integers

__all__ = ["Link", "Plan", "chain", "plan"]


@dataclass
class Link:
    """A layer with weights, and what follows it."""

    name: str
    layer: nn.Linear | nn.Conv2d
    activation: nn.Module | None = None
    pool: int = 0


@dataclass(frozen=True)
class Plan:
    """Where everything of a network is; see :class:`upgd.population.kernel.layout.Layer`."""

    layers: Integers  #: one row per layer
    slopes: Floats  #: of the activation behind each layer, below zero
    weights: list[str]  #: their names
    parameters: dict[str, tuple[int, tuple[int, ...]]]  #: where each begins, and its shape
    parameter_count: int
    rows: int
    units: int
    workspace: int


def chain(network: nn.Module) -> list[Link] | str:
    """The layers with weights, in order; or why the network cannot be read so, to be read after "because"."""
    if type(network).forward in (MLP.forward, ConvNet.forward):
        prefix, modules = "layers.", network.layers
    elif type(network) is nn.Sequential:
        prefix, modules = "", network
    else:
        return f"it runs an MLP, a ConvNet or an nn.Sequential of Linear layers, not a {type(network).__name__}"
    assert isinstance(modules, nn.Sequential)
    links: list[Link] = []
    # Not named_children(), which leaves out a module that comes again.
    for name, module in zip(modules._modules, modules, strict=True):
        last = links[-1] if links else None
        if type(module) is nn.Linear or (isinstance(network, ConvNet) and type(module) is nn.Conv2d and _plain(module)):
            links.append(Link(prefix + name, module))
        elif type(module) is nn.Flatten and not (last and isinstance(last.layer, nn.Linear)):
            continue  # units lie in one vector as they are; behind a Linear layer there would have been several
        elif last and last.activation is None and not last.pool and _activation(module) is not None:
            last.activation = module
        elif last and isinstance(last.layer, nn.Conv2d) and not last.pool and _pool(module):
            last.pool = _pool(module)
        else:
            return f"it runs Linear layers with one activation between two of them, and {prefix + name!r} is a {module}"
    if not links or links[-1].activation is not None or not isinstance(links[-1].layer, nn.Linear):
        return "it runs networks that end with a Linear layer"
    if len({id(link.layer) for link in links}) < len(links):
        return "the network uses one layer twice"
    return links


def _plain(layer: nn.Conv2d) -> bool:
    square = layer.kernel_size[0] == layer.kernel_size[1]
    return square and (layer.stride, layer.padding, layer.dilation, layer.groups) == ((1, 1), (0, 0), (1, 1), 1)


def _pool(module: nn.Module) -> int:
    """The size of a max pooling of squares that touch; 0 for anything else."""
    if type(module) is not nn.MaxPool2d or not isinstance(module.kernel_size, int):
        return 0
    usual = (module.stride, module.padding, module.dilation, module.ceil_mode) == (module.kernel_size, 0, 1, False)
    return module.kernel_size if usual else 0


def _activation(module: nn.Module) -> tuple[int, float] | None:
    """Whether it is tanh, and otherwise its slope below zero."""
    slopes: dict[type, float] = {nn.ReLU: 0.0, nn.Identity: 1.0, nn.Tanh: 0.0}
    if type(module) in slopes:
        return int(type(module) is nn.Tanh), slopes[type(module)]
    if type(module) is nn.LeakyReLU and module.negative_slope >= 0:
        return 0, module.negative_slope
    return None


def plan(network: nn.Module) -> Plan:
    """Lay out a network that :func:`chain` can read."""
    links = chain(network)
    assert not isinstance(links, str), links
    parameters: dict[str, tuple[int, tuple[int, ...]]] = {}
    count = 0
    for name, parameter in network.named_parameters():
        parameters[name] = (count, tuple(parameter.shape))
        count += parameter.numel()

    image = (1, *network.input_shape)[-3:] if isinstance(network, ConvNet) else (0, 0, 0)
    table, slopes = [], []
    inputs = row = 0
    units = int(np.prod(image)) or links[0].layer.weight.shape[1]
    patches = [0]
    for link in links:
        rows, columns = link.layer.weight.shape[0], link.layer.weight[0].numel()
        tanh, slope = _activation(link.activation or nn.Identity()) or (0, 1.0)
        weight = parameters[f"{link.name}.weight"][0]
        bias = parameters[f"{link.name}.bias"][0] if link.layer.bias is not None else -1
        geometry: tuple[int, ...] = (0, 0, 0, 0, 0)
        positions, outputs = 1, units
        if isinstance(link.layer, nn.Conv2d):
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
    workspace = max(patches[2:], default=0)  # the derivatives of the first convolution's inputs are never needed
    for layer in table:
        rows, columns, positions, kernel = layer[0], layer[1], layer[8], layer[12]
        if kernel:
            layer[14], layer[15] = workspace, workspace + columns * positions
            workspace = layer[15] + 2 * rows * (columns + 1)
    return Plan(
        layers=np.array(table, np.int64),
        slopes=np.array(slopes, np.float32),
        weights=[f"{link.name}.weight" for link in links],
        parameters=parameters,
        parameter_count=count,
        rows=row,
        units=units,
        workspace=workspace,
    )
