"""Reading a network as a chain of Linear layers with activations between them."""

from dataclasses import dataclass

import numpy as np
from torch import nn

from upgd.networks import MLP
from upgd.population.kernel.machine import Floats, Integers

__all__ = ["Plan", "dense_layers", "plan"]


@dataclass(frozen=True)
class Plan:
    """Where everything of a network is; see :class:`upgd.population.kernel.learner.Layer`."""

    layers: Integers  #: one row per layer
    slopes: Floats  #: of the activation behind each layer, below zero
    weights: list[str]  #: their names
    parameters: dict[str, tuple[int, tuple[int, ...]]]  #: where each begins, and its shape
    parameter_count: int
    rows: int
    units: int


def dense_layers(network: nn.Module) -> list[tuple[str, nn.Linear, nn.Module | None]] | str:
    """The name and module of every Linear layer with the activation behind it; or why it cannot be read so."""
    if type(network).forward is MLP.forward:
        prefix, modules = "layers.", list(network.layers.named_children())  # type: ignore[union-attr]
    elif type(network) is nn.Sequential:
        prefix, modules = "", list(network.named_children())
    else:
        return f"it runs an MLP or an nn.Sequential of Linear layers, not a {type(network).__name__}"
    layers: list[tuple[str, nn.Linear, nn.Module | None]] = []
    for name, module in modules:
        if type(module) is nn.Linear:
            layers.append((prefix + name, module, None))
        elif type(module) is nn.Flatten and not layers and (module.start_dim, module.end_dim) == (1, -1):
            continue
        elif _activation(module) is not None and layers and layers[-1][2] is None:
            layers[-1] = (*layers[-1][:2], module)
        else:
            return f"it runs Linear layers with one activation between two of them, and {prefix + name!r} is a {module}"
    if not layers or layers[-1][2] is not None:
        return "it runs networks that end with a Linear layer"
    if len({id(layer) for _, layer, _ in layers}) < len(layers):
        return "the network uses one layer twice"
    return layers


def _activation(module: nn.Module) -> tuple[int, float] | None:
    """Whether it is tanh, and otherwise its slope below zero."""
    slopes = {nn.ReLU: 0.0, nn.Identity: 1.0, nn.Tanh: 0.0}
    if type(module) in slopes:
        return int(type(module) is nn.Tanh), slopes[type(module)]
    if type(module) is nn.LeakyReLU and module.negative_slope >= 0:
        return 0, module.negative_slope
    return None


def plan(network: nn.Module) -> Plan:
    """Lay out a network that :func:`dense_layers` can read."""
    layers = dense_layers(network)
    assert not isinstance(layers, str), layers
    parameters: dict[str, tuple[int, tuple[int, ...]]] = {}
    at = 0
    for name, parameter in network.named_parameters():
        parameters[name] = (at, tuple(parameter.shape))
        at += parameter.numel()
    table, slopes = [], []
    row = unit = 0
    for name, layer, activation in layers:
        tanh, slope = (0, 1.0) if activation is None else _activation(activation) or (0, 1.0)
        weight = parameters[f"{name}.weight"][0]
        bias = parameters[f"{name}.bias"][0] if layer.bias is not None else -1
        table.append((layer.out_features, layer.in_features, weight, bias, row, unit, unit + layer.in_features, tanh))
        slopes.append(slope)
        row += layer.out_features + 1
        unit += layer.in_features
    return Plan(
        layers=np.array(table, np.int64),
        slopes=np.array(slopes, np.float32),
        weights=[f"{name}.weight" for name, _, _ in layers],
        parameters=parameters,
        parameter_count=at,
        rows=row,
        units=unit + layers[-1][1].out_features,
    )
