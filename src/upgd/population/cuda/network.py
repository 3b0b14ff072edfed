"""Reading a network as the planner wants it: Linear layers with an activation between them."""

from torch import nn

from upgd.networks import MLP
from upgd.population.cuda.planner import Dense

__all__ = ["dense_layers"]


def dense_layers(network: nn.Module) -> list[Dense] | str:
    """The layers in order; or why the network cannot be read so, to go on after "because"."""
    if type(network).forward is MLP.forward:
        modules = network.layers
    elif type(network) is nn.Sequential:
        modules = network
    else:
        return f"it runs an MLP or an nn.Sequential of Linear layers, not a {type(network).__name__}"
    assert isinstance(modules, nn.Sequential)
    layers: list[Dense] = []
    behind_linear = False
    for module in modules:  # and not children(), which leaves out a module that comes again
        if type(module) is nn.Linear:
            layers.append(Dense(module.in_features, module.out_features, module.bias is not None, "IDENTITY"))
            behind_linear = True
        elif type(module) is nn.Flatten and not layers and (module.start_dim, module.end_dim) == (1, -1):
            continue
        elif behind_linear and (activation := _activation(module)):
            name, slope = activation
            layers[-1] = layers[-1]._replace(activation=name, slope=slope)
            behind_linear = False
        else:
            return f"it runs Linear layers with one activation between two of them, and the network has a {module}"
    if not behind_linear:
        return "it runs networks that end with a Linear layer"
    if len({module for module in modules if type(module) is nn.Linear}) < len(layers):
        return "the network uses one layer twice"
    return layers


def _activation(module: nn.Module) -> tuple[str, float] | None:
    names = {nn.ReLU: "RELU", nn.Tanh: "TANH", nn.Identity: "IDENTITY"}
    if type(module) in names:
        return names[type(module)], 0.0
    if type(module) is nn.LeakyReLU and module.negative_slope > 0:
        return "LEAKY", float(module.negative_slope)
    return None
