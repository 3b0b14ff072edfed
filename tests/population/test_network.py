"""Parsing of networks into the description that all backends use."""

import numpy as np
import pytest
import torch
from plain_loop import Counters
from torch import nn

from upgd.networks import MLP, ConvNet, CReLU, Linear
from upgd.population import Learner, Population
from upgd.population.chain import Chain
from upgd.population.network import Activation, Convolution, Dense, Flatten, MaxPool, NotAChain, read

UPGD = Learner(method="upgd", lr=0.01, sigma=0.01, order=2)


def test_our_networks_are_read():
    assert read(Linear(5, 2)).layers == (Dense("layers.0.weight", "layers.0.bias", 5, 2),)
    assert read(MLP((4, 3, 2), "tanh")).layers == (
        Dense("layers.0.weight", "layers.0.bias", 4, 3),
        Activation("layers.1", "tanh", 0.0),
        Dense("layers.2.weight", "layers.2.bias", 3, 2),
    )
    conv = read(ConvNet((28, 28), 10, conv_activation=False))
    assert (conv.image, conv.arranges_inputs) == ((1, 28, 28), True)
    assert conv.layers[:3] == (
        Convolution("layers.0.weight", "layers.0.bias", 1, 6, (5, 5), (1, 1), (0, 0), (1, 1)),
        Activation("layers.1", "identity", 1.0),
        MaxPool("layers.2", (2, 2), (2, 2), (0, 0), (1, 1), False),
    )


def test_names_are_those_of_the_parameters():
    network = nn.Sequential(
        nn.Sequential(nn.Conv2d(2, 3, 3, stride=2, padding=1, bias=False), nn.LeakyReLU(1)),
        nn.MaxPool2d((2, 1), ceil_mode=True),
        nn.Flatten(),
        nn.Linear(9, 5),
    )
    chain = read(network)
    assert (chain.image, chain.arranges_inputs) == (None, False)
    assert chain.layers == (
        Convolution("0.0.weight", None, 2, 3, (3, 3), (2, 2), (1, 1), (1, 1)),
        Activation("0.1", "leaky_relu", 1.0),
        MaxPool("1", (2, 1), (2, 1), (0, 0), (1, 1), True),
        Flatten("2"),
        Dense("3.weight", "3.bias", 9, 5),
    )
    weighted = [layer for layer in chain.layers if isinstance(layer, Dense | Convolution)]
    names = [name for layer in weighted for name in (layer.weight, layer.bias) if name]
    assert names == [name for name, _ in network.named_parameters()]


def tied() -> nn.Module:
    network = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
    network[2].weight = network[0].weight
    return network


class Own(MLP):
    def forward(self, x):
        return -super().forward(x)


@pytest.mark.parametrize(
    ("network", "words"),
    [
        (Own((4, 3, 2)), "Own defines its own forward()"),
        (nn.Sequential(nn.Tanh()), "no Linear or Conv2d layer"),
        (nn.Sequential(nn.Linear(4, 3), nn.ReLU()), "does not end with a Linear layer"),
        (nn.Sequential(nn.Linear(4, 3), nn.GELU(), nn.Linear(3, 2)), "layer '1' is a GELU"),
        (nn.Sequential(nn.Conv2d(2, 2, 3, groups=2), nn.Flatten(), nn.Linear(8, 2)), "convolution '0' has groups"),
        (nn.Sequential(nn.Flatten(2), nn.Linear(4, 3)), "layer '0' is a Flatten"),
        (nn.Sequential(nn.Linear(4, 3), nn.Flatten(), nn.Linear(6, 2)), "Flatten '1' comes after a Linear layer"),
        (nn.Sequential(nn.Linear(4, 4), *[nn.Linear(4, 4)] * 2), "one layer twice"),
        (
            nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.LayerNorm(4), nn.Linear(4, 2)),
            "not directly follow a Linear",
        ),
        (
            nn.Sequential(nn.Linear(4, 4), CReLU(-3), nn.Linear(8, 2)),
            "CReLU '1' with dim=-3 does not directly follow",
        ),
        (tied(), "one parameter in two layers"),
    ],
)
def test_other_networks_are_refused_with_a_reason(network, words):
    with pytest.raises(NotAChain) as reason:
        read(network)
    assert words in str(reason.value)


def test_tied_weights_are_learned_as_one_parameter():
    """The gradient of a parameter in two layers is a sum, which chains do not support."""
    stream, network = Counters((4,), 4, "mse"), tied()
    population = Population(network, [Learner(method="sgd", lr=0.1, seed=3)], dtype=torch.float64)
    for name, value in population.parameters(0).items():
        network.get_parameter(name).data = value.clone()
    network[2].weight = network[0].weight
    population.run(stream, 5)
    for at in range(5):
        chunk = stream.chunk([3], at, 1)
        network.zero_grad()
        nn.functional.mse_loss(network(chunk.dense[0].double()), chunk.targets[0].double()).backward()
        with torch.no_grad():
            for parameter in network.parameters():
                parameter -= 0.1 * parameter.grad
    for name, value in population.parameters(0).items():
        torch.testing.assert_close(value, network.get_parameter(name).data, rtol=0, atol=1e-12)


@pytest.mark.parametrize("backend", ["torch", "kernel"])
def test_neither_shared_activations_nor_nesting_matter(backend):
    relu = nn.ReLU()
    inner = nn.Sequential(nn.Linear(8, 8), relu)
    networks = [
        MLP((6, 8, 8, 3)),
        nn.Sequential(nn.Linear(6, 8), relu, nn.Linear(8, 8), relu, nn.Linear(8, 3)),
        nn.Sequential(nn.Linear(6, 8), nn.ReLU(), inner, nn.Linear(8, 3)),
    ]
    assert all(Chain.unsupported(network) is None for network in networks)
    stream = Counters((6,), 3)
    losses = [Population(network, [UPGD], backend=backend).run(stream, 40).loss for network in networks]
    np.testing.assert_array_equal(losses[0], losses[1])
    np.testing.assert_array_equal(losses[0], losses[2])
