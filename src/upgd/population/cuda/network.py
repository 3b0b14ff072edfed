"""The networks that the planner supports: Linear layers with one activation between two of them."""

from torch import nn

from upgd.population import network as net
from upgd.population.cuda.planner import Dense
from upgd.population.torch_backend import gated_parameters

__all__ = ["dense_layers"]

_ACTIVATIONS = {"relu": "RELU", "leaky_relu": "LEAKY", "tanh": "TANH", "identity": "IDENTITY"}


def dense_layers(network: nn.Module, gated: str = "all") -> list[Dense] | str:
    """Return the layers in order; or why the network is not supported, worded to follow "because".

    Args:
        network: the network.
        gated: the layers with gates; see :func:`upgd.population.torch_backend.gated_parameters`.
    """
    try:
        chain = net.read(network)
    except net.NotAChain as reason:
        return str(reason)
    layers: list[Dense] = []
    with_gates = gated_parameters(network, gated)
    behind_dense = False
    for layer in chain.layers:
        if isinstance(layer, net.Dense):
            layers.append(
                Dense(layer.inputs, layer.outputs, layer.bias is not None, "IDENTITY", 0.0, layer.weight in with_gates)
            )
            behind_dense = True
        elif isinstance(layer, net.Activation) and behind_dense and (layer.kind != "leaky_relu" or layer.slope > 0):
            slope = layer.slope if layer.kind == "leaky_relu" else 0.0
            layers[-1] = layers[-1]._replace(activation=_ACTIVATIONS[layer.kind], slope=slope)
            behind_dense = False
        elif not isinstance(layer, net.Flatten):
            return (
                "it supports Linear layers with one activation between two of them, but "
                f"the network's layer {layer.name!r} is a {net.torch_name(layer)}"
            )
    return layers
