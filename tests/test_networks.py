"""Networks: outputs, descriptions, and initial weights as a function of the seed."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats
from torch import nn
from torch.nn import functional as F

from upgd import networks
from upgd.networks import ACTIVATIONS, MLP, ConvNet, Linear, initial_parameters, reset
from upgd.noise import Purpose, uniforms

SHAPES = st.lists(st.integers(1, 7), min_size=2, max_size=4)
SEEDS = st.integers(0, 2**63 - 1)


# Outputs


@pytest.mark.parametrize(
    ("activation", "by_hand"),
    [("relu", F.relu), ("leaky_relu", F.leaky_relu), ("tanh", torch.tanh), ("identity", lambda x: x)],
)
def test_an_mlp_is_linear_layers_with_activations_between(activation, by_hand) -> None:
    network = MLP((4, 5, 3, 2), activation, seed=1)
    first, second, last = (m for m in network.modules() if isinstance(m, nn.Linear))
    x = torch.randn(6, 4)
    assert torch.equal(network(x), last(by_hand(second(by_hand(first(x))))))
    pairs = list(network.layers)
    assert [type(m) for m in pairs[1::2]] == [ACTIVATIONS[activation]] * 2
    assert (network.sizes, network.activation) == ((4, 5, 3, 2), activation)


def test_an_mlp_takes_images_batches_and_single_samples() -> None:
    network, images = MLP((3 * 4 * 4, 8, 2)), torch.randn(5, 3, 4, 4)
    expected = network(images.reshape(5, 48))
    assert torch.equal(network(images), expected)
    assert torch.allclose(network(images[0]), expected[0], atol=1e-6)
    assert torch.allclose(network(images[0].flatten()), expected[0], atol=1e-6)
    assert network(torch.randn(2, 7, 48)).shape == (2, 7, 2)


def test_linear_is_one_layer() -> None:
    network, x = Linear(16, 1, seed=3), torch.randn(2, 16)
    weight, bias = network.parameters()
    assert torch.allclose(network(x), x @ weight.T + bias)
    assert network.sizes == (16, 1)


@pytest.mark.parametrize("conv_activation", [True, False])
def test_the_convolutional_network_of_the_paper(conv_activation: bool) -> None:
    network, x = ConvNet(seed=2, conv_activation=conv_activation), torch.randn(3, 3, 32, 32)
    w1, b1, w2, b2, w3, b3, w4, b4, w5, b5 = network.parameters()
    after_convolution = F.relu if conv_activation else (lambda h: h)
    h = F.max_pool2d(after_convolution(F.conv2d(x, w1, b1)), 2)
    h = F.max_pool2d(after_convolution(F.conv2d(h, w2, b2)), 2).flatten(1)
    h = F.relu(F.linear(F.relu(F.linear(h, w3, b3)), w4, b4))
    assert torch.allclose(network(x), F.linear(h, w5, b5), atol=1e-6)
    assert [tuple(w.shape) for w in (w1, w2, w3, w4, w5)] == [
        (6, 3, 5, 5),
        (16, 6, 5, 5),
        (120, 400),
        (84, 120),
        (10, 84),
    ]
    assert torch.allclose(network(x[0]), network(x)[0], atol=1e-6)


def test_the_convolutional_network_accepts_grey_images() -> None:
    network = ConvNet((28, 28), 47)
    assert network(torch.randn(2, 28, 28)).shape == (2, 47)
    assert network.sizes == (16 * 4 * 4, 120, 84, 47)
    assert ConvNet((16, 16), 2)(torch.randn(16, 16)).shape == (2,)


def test_networks_describe_themselves() -> None:
    assert MLP((784, 300, 150, 10)).describe() == "MLP 784-300-150-10, relu, 282,160 parameters"
    assert Linear(16, 1).describe() == "Linear 16-1, 17 parameters"
    assert ConvNet().describe() == "ConvNet 3×32×32-6@5×5-16@5×5-120-84-10, relu, 62,006 parameters"
    assert "relu (none after convolutions)" in ConvNet(conv_activation=False).describe()


# Initial weights


@given(sizes=SHAPES, seeds=st.lists(SEEDS, min_size=1, max_size=4))
def test_a_population_is_bitwise_equal_to_its_members(sizes, seeds) -> None:
    stacked = initial_parameters(MLP(sizes), seeds)
    for row, seed in enumerate(seeds):
        for name, parameter in MLP(sizes, seed=seed).named_parameters():
            assert torch.equal(stacked[name][row], parameter)


def test_drawing_a_large_population_in_blocks_changes_nothing(monkeypatch) -> None:
    network = ConvNet()
    at_once = initial_parameters(network, range(7))
    monkeypatch.setattr("upgd.networks._WORDS_AT_ONCE", {"cpu": 100_000})
    in_blocks = initial_parameters(network, torch.arange(7))
    assert all(torch.equal(at_once[name], in_blocks[name]) for name in at_once)


def test_weights_come_from_the_counters_in_the_order_of_parameters() -> None:
    for number, (name, parameter) in enumerate(MLP((6, 5, 4), seed=9).named_parameters()):
        bound = 1 / math.sqrt({"0": 6, "2": 5}[name.split(".")[1]])
        uniform = uniforms(9, Purpose.INITIAL_WEIGHTS, number, parameter.numel()).view(parameter.shape)
        assert torch.allclose(parameter.double(), -bound + 2 * bound * uniform, rtol=0, atol=1e-7)


@pytest.mark.parametrize(
    "layer",
    [
        nn.Linear(300, 200),
        nn.Conv1d(8, 64, 3),
        nn.Conv2d(16, 32, 5, groups=4),
        nn.Conv3d(4, 32, 3),
        nn.ConvTranspose2d(16, 32, 5),
        nn.Linear(100, 400, bias=False),
    ],
    ids=repr,
)
def test_the_distribution_is_that_of_torch(layer) -> None:
    torch.manual_seed(0)
    layer.reset_parameters()
    theirs = {name: parameter.detach().clone() for name, parameter in layer.named_parameters()}
    reset(layer, seed=5)
    for name, parameter in layer.named_parameters():
        ours = parameter.detach().flatten().numpy()
        assert stats.ks_2samp(ours, theirs[name].flatten().numpy()).pvalue > 1e-3
        fan_in, _ = nn.init._calculate_fan_in_and_fan_out(layer.weight)
        assert abs(ours).max() <= 1 / math.sqrt(fan_in)
        assert abs(ours).max() > 0.9 / math.sqrt(fan_in)


def test_only_the_seed_matters() -> None:
    torch.manual_seed(0)
    first = MLP((5, 4, 3), seed=11)
    torch.manual_seed(1)
    again = MLP((5, 4, 3)).reset(11)
    other = MLP((5, 4, 3), seed=12)
    for a, b, c in zip(first.parameters(), again.parameters(), other.parameters(), strict=True):
        assert torch.equal(a, b)
        assert (a == c).sum() == 0
    values = torch.cat([p.flatten() for p in MLP((100, 100, 100), seed=0).parameters()])
    assert len(values.unique()) > 0.99 * len(values)


def test_parameters_keep_their_type_and_need_gradients() -> None:
    network = reset(MLP((4, 3)).double(), 7)
    assert all(p.dtype == torch.float64 and p.requires_grad and p.is_leaf for p in network.parameters())
    assert torch.equal(network.layers[0].weight.float(), MLP((4, 3), seed=7).layers[0].weight)
    stacked = initial_parameters(network, [7])
    assert stacked["layers.0.weight"].dtype == torch.float64


def test_shared_parameters_are_one() -> None:
    shared = nn.Linear(4, 4)
    stacked = initial_parameters(nn.Sequential(shared, nn.ReLU(), shared, nn.Linear(4, 2)), [0])
    assert list(stacked) == ["0.weight", "0.bias", "3.weight", "3.bias"]


def test_networks_of_shapes_alone() -> None:
    with torch.device("meta"):
        network = MLP((784, 300, 10))
    assert network.layers[0].weight.is_meta
    stacked = initial_parameters(network, [4])
    assert torch.equal(stacked["layers.0.weight"][0], MLP((784, 300, 10), seed=4).layers[0].weight)


# Errors


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: MLP((784,)), "sizes must be two or more positive integers"),
        (lambda: MLP((784, 0, 10)), "sizes"),
        (lambda: MLP((784, 2.5)), "sizes"),
        (lambda: MLP((4, 2), "gelu"), "activation must be one of relu, leaky_relu, tanh, identity, crelu, not 'gelu'"),
        (lambda: ConvNet((8, 8), 10), "at least 16 pixels"),
        (lambda: ConvNet((1, 2, 32, 32), 10), "input_shape"),
        (lambda: ConvNet(outputs=0), "sizes"),
        (lambda: MLP((784, 10))(torch.zeros(5, 30, 30)), r"784 inputs got a tensor of shape \(5, 30, 30\)"),
        (lambda: ConvNet()(torch.zeros(5, 1, 32, 32)), r"\(3, 32, 32\) got \(5, 1, 32, 32\)"),
    ],
)
def test_mistakes_are_named(make, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


class Scaled(nn.Module):
    """A layer with its own parameter, and its own initialization of all its parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.scale = nn.Linear(3, 2), nn.Parameter(torch.empty(2))

    def reset_parameters(self) -> None:
        nn.init.orthogonal_(self.linear.weight)
        nn.init.zeros_(self.linear.bias)
        nn.init.normal_(self.scale)

    def forward(self, x):
        return self.linear(x) * self.scale


def test_other_modules_initialise_themselves_under_the_learners_seed() -> None:
    network = nn.Sequential(nn.Linear(4, 3), nn.LayerNorm(3), Scaled())
    torch.manual_seed(5)
    stacked = initial_parameters(network, [7, 0, 7])
    drawn = torch.rand(1)
    torch.manual_seed(5)
    assert torch.equal(drawn, torch.rand(1))  # the caller's generator is unchanged
    for parameter in stacked.values():
        assert torch.equal(parameter[0], parameter[2])
    assert not torch.equal(stacked["2.scale"][0], stacked["2.scale"][1])
    assert torch.equal(stacked["1.weight"], torch.ones(3, 3))
    torch.manual_seed(0)
    alone = Scaled().double()
    torch.manual_seed(0)
    alone.reset_parameters()
    assert torch.equal(stacked["2.scale"][1], alone.scale.float())
    assert torch.equal(stacked["2.linear.weight"][1], alone.linear.weight.float())
    plain = initial_parameters(nn.Sequential(nn.Linear(4, 3)), [7, 0, 7])
    assert torch.equal(stacked["0.weight"], plain["0.weight"])  # Linear layers keep their distribution


def test_initial_weights_of_any_module_are_independent_of_other_seeds() -> None:
    network = nn.Sequential(nn.Linear(4, 3), nn.LayerNorm(3), Scaled())
    stacked = initial_parameters(network, [1, 2])
    reset(network, 2)
    assert all(torch.equal(stacked[name][1], parameter) for name, parameter in network.named_parameters())


def test_crelu_doubles_the_inputs_of_the_next_layer() -> None:
    network = MLP((4, 5, 6, 2), "crelu")
    assert [layer.in_features for layer in network.layers if isinstance(layer, nn.Linear)] == [4, 10, 12]
    x = torch.randn(3, 4)
    first = network.layers[0](x)
    assert torch.equal(network.layers[1](first), torch.cat([first.clamp(min=0), (-first).clamp(min=0)], 1))
    assert ConvNet((1, 28, 28), 10, "crelu")(torch.zeros(2, 1, 28, 28)).shape == (2, 10)


def test_layer_norm_precedes_each_activation() -> None:
    network = MLP((4, 5, 6, 2), "tanh", layer_norm=True)
    assert [type(layer) for layer in network.layers] == [nn.Linear, nn.LayerNorm, nn.Tanh] * 2 + [nn.Linear]
    assert network.describe() == "MLP 4-5-6-2, tanh, LayerNorm, 97 parameters"


def test_uninitialized_parameters_are_named() -> None:
    class Gain(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gain = nn.Parameter(torch.ones(2))

    with pytest.raises(TypeError, match=r"the layer '1', a Gain, has parameters but no reset_parameters\(\)"):
        reset(nn.Sequential(nn.Linear(2, 2), Gain()), 0)

    class Forgets(Scaled):
        def reset_parameters(self) -> None:
            nn.init.zeros_(self.scale)

    with pytest.raises(ValueError, match=r"initial values of the parameter 'linear\.weight' are not all set"):
        reset(Forgets(), 0)


def test_a_registered_network_may_bring_its_own_initial_weights(monkeypatch) -> None:
    monkeypatch.setattr(networks, "_REGISTERED", {})

    def init(module, seed) -> None:
        for parameter in module.parameters():
            nn.init.constant_(parameter, seed + torch.rand(()).item())

    @networks.register("constant", init=init)
    def constant(stream):
        return nn.Linear(3, stream)

    network = networks.registered("constant")(2)
    weights = initial_parameters(network, [0, 1, 0])["weight"]
    assert torch.equal(weights[0], weights[2])
    assert 0 < weights[0, 0, 0] < 1 < weights[1, 0, 0] < 2
    assert networks.registered("constants") is None
    with pytest.raises(ValueError, match="'conv' is not a valid name"):
        networks.register("conv")
    with pytest.raises(ValueError, match="a network named 'constant' already exists"):
        networks.register("constant", init=init)(lambda stream: None)
