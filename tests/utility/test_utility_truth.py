"""True utility, compared with removing one item at a time by hand."""

import copy

import pytest
import torch
from torch import nn

from upgd import utility
from upgd.networks import MLP, ConvNet


def naive_weights(model, criterion, x, y):
    """Set each entry to zero in a copy of the model."""
    utilities = {}
    with torch.no_grad():
        intact = criterion(model(x), y)
        for name, parameter in model.named_parameters():
            of_entries = torch.zeros(parameter.numel(), dtype=parameter.dtype)
            for entry in range(parameter.numel()):
                without = copy.deepcopy(model)
                dict(without.named_parameters())[name].view(-1)[entry] = 0
                of_entries[entry] = criterion(without(x), y) - intact
            utilities[name] = of_entries.view_as(parameter)
    return utilities


def assert_same(ours, expected):
    assert ours.keys() == expected.keys()
    for name in expected:
        torch.testing.assert_close(ours[name], expected[name], rtol=1e-9, atol=1e-12, msg=lambda m, n=name: f"{n}: {m}")


def regression(samples=1, inputs=5, outputs=1, seed=0):
    generator = torch.Generator().manual_seed(seed)
    draw = lambda n: torch.randn(samples, n, generator=generator, dtype=torch.float64)  # noqa: E731
    return nn.MSELoss(), draw(inputs), draw(outputs)


class Tied(nn.Module):
    """The decoder is the encoder transposed, by a functional call; the same layer runs twice."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.encode, self.again = nn.Linear(3, 4), nn.Linear(4, 4)

    def forward(self, x):
        hidden = self.again(torch.tanh(self.again(self.encode(x))))
        return nn.functional.linear(torch.tanh(hidden), self.encode.weight.t())


@pytest.mark.parametrize("activation", ["relu", "leaky_relu", "tanh", "identity"])
@pytest.mark.parametrize("samples", [1, 4])
def test_weights_of_an_mlp(activation, samples):
    model = MLP((5, 6, 4, 2), activation).double()
    sample = regression(samples, outputs=2)
    assert_same(utility.true_weights(model, *sample), naive_weights(model, *sample))


def test_weights_of_a_convolutional_network():
    model = nn.Sequential(
        nn.Conv2d(1, 2, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(8, 5), nn.Tanh(), nn.Linear(5, 3)
    ).double()
    x, y = torch.randn(2, 1, 6, 6, dtype=torch.float64), torch.tensor([0, 2])
    assert_same(
        utility.true_weights(model, nn.CrossEntropyLoss(), x, y), naive_weights(model, nn.CrossEntropyLoss(), x, y)
    )


def test_weights_that_are_used_twice_are_removed_in_both_places():
    model = Tied().double()
    sample = regression(inputs=3, outputs=3)
    assert_same(utility.true_weights(model, *sample), naive_weights(model, *sample))


def test_any_chunk_gives_the_same():
    model = MLP((5, 6, 1), "tanh").double()
    sample = regression()
    whole = utility.true_weights(model, *sample)
    for chunk in (1, 7, 10_000):
        assert_same(utility.true_weights(model, *sample, chunk=chunk), whole)


def test_weights_of_dead_units_have_zero_utility():
    """Rounding must not break ties between weights without effect."""
    model = MLP((5, 50, 1), "relu")
    criterion, x, y = nn.MSELoss(), torch.linspace(-0.5, 0.4, 5)[None], torch.tensor([[0.3]])
    dead = model.layers[0](x)[0] < 0
    assert 5 < dead.sum() < 45
    # Incoming weights of a dead unit may matter if it becomes active; its outgoing weights cannot.
    utilities = utility.true_weights(model, criterion, x, y)
    assert (utilities["layers.2.weight"][0, dead] == 0).all()
    assert (utilities["layers.2.weight"][0, ~dead] != 0).all()
    assert (utility.true_features(model, criterion, x, y)["layers.1"][dead] == 0).all()


def test_features_of_an_mlp():
    model = MLP((5, 6, 4, 2), "tanh").double()
    criterion, x, y = regression(3, outputs=2)
    utilities = utility.true_features(model, criterion, x, y)
    assert {name: u.shape for name, u in utilities.items()} == {"layers.1": (6,), "layers.3": (4,)}
    with torch.no_grad():
        first = torch.tanh(model.layers[0](x))
        first[:, 2] = 0
        expected = criterion(model.layers[2:](first), y) - criterion(model(x), y)
        assert utilities["layers.1"][2].item() == pytest.approx(expected.item(), abs=1e-12)
        second = torch.tanh(model.layers[2](torch.tanh(model.layers[0](x))))
        second[:, 3] = 0
        expected = criterion(model.layers[4](second), y) - criterion(model(x), y)
        assert utilities["layers.3"][3].item() == pytest.approx(expected.item(), abs=1e-12)


@pytest.mark.parametrize("conv_activation", [True, False])
def test_a_feature_of_a_convolution_is_a_channel(conv_activation):
    model = ConvNet((1, 16, 16), 3, conv_activation=conv_activation).double()
    criterion, x, y = nn.CrossEntropyLoss(), torch.randn(2, 1, 16, 16, dtype=torch.float64), torch.tensor([0, 2])
    utilities = utility.true_features(model, criterion, x, y)
    assert [len(u) for u in utilities.values()] == [6, 16, 120, 84]
    with torch.no_grad():
        maps = model.layers[:2](x)
        maps[:, 4] = 0
        expected = criterion(model.layers[2:](maps), y) - criterion(model(x), y)
    assert utilities["layers.1"][4].item() == pytest.approx(expected.item(), abs=1e-12)


@pytest.mark.parametrize(
    ("body", "shape"),
    [
        ([nn.Conv2d(1, 4, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten()], (4, 1, 5, 5)),
        ([nn.Conv1d(1, 4, 3), nn.AdaptiveAvgPool1d(1), nn.Flatten()], (4, 1, 5)),
        ([nn.Conv2d(1, 4, 2), nn.Flatten(2)], (4, 1, 3, 3)),
    ],
    ids=["pooled in two dimensions", "pooled in one", "positions flattened"],
)
def test_channels_that_were_flattened_are_still_channels(body, shape):
    torch.manual_seed(0)
    x, y, criterion = torch.randn(shape, dtype=torch.float64), torch.tensor([0, 1, 1, 0]), nn.CrossEntropyLoss()
    before = nn.Sequential(*body, nn.Tanh()).double()
    hidden = before(x).detach()
    after = nn.Sequential(nn.Flatten(), nn.Linear(hidden[0].numel(), 2)).double()
    name = f"0.{len(body)}"
    utilities = utility.true_features(nn.Sequential(before, after), criterion, x, y)
    assert {key: u.shape for key, u in utilities.items()} == {name: (4,)}
    for channel in range(4):
        without = hidden.clone()
        without[:, channel] = 0
        expected = criterion(after(without), y) - criterion(after(hidden), y)
        assert utilities[name][channel].item() == pytest.approx(expected.item(), abs=1e-12)
    first = utility.first_order(nn.Sequential(before, after), criterion, x, y, of="features")
    gates = torch.ones(4, dtype=torch.float64)
    shaped = [1, 4] + [1] * (hidden.ndim - 2)
    gradient = torch.func.grad(lambda m: criterion(after(hidden * m.view(shaped)), y))(gates)
    torch.testing.assert_close(first[name], -gradient)


def test_indistinguishable_channels_are_refused():
    model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.Flatten(), nn.ReLU(), nn.Linear(36, 2))
    with pytest.raises(ValueError, match=r"the 4 channels of '0', because the module '2' outputs the shape \(2, 36\)"):
        utility.true_features(model, nn.CrossEntropyLoss(), torch.randn(2, 1, 5, 5), torch.tensor([0, 1]))


def test_parametrized_layers_have_features_like_others():
    model = nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 4), nn.Tanh(), nn.Linear(4, 2)).double()
    sample = regression(3, outputs=2)
    expected = utility.true_features(model, *sample)
    nn.utils.parametrizations.weight_norm(model[0])
    assert_same(utility.true_features(model, *sample), expected)


def test_a_single_sample_without_a_batch_dimension():
    model = MLP((5, 6, 1)).double()
    criterion, x, y = regression()
    assert_same(utility.true_features(model, criterion, x[0], y[0]), utility.true_features(model, criterion, x, y))
    assert_same(utility.true_weights(model, criterion, x[0], y[0]), utility.true_weights(model, criterion, x, y))


def test_features_can_be_named():
    model = MLP((5, 6, 4, 2)).double()
    sample = regression(outputs=2)
    only = utility.true_features(model, *sample, features=["layers.3"])
    assert_same(only, {"layers.3": utility.true_features(model, *sample)["layers.3"]})
    with pytest.raises(ValueError, match=r"\['layers.9'\]"):
        utility.true_features(model, *sample, features=["layers.9"])


def test_an_identity_counts_as_an_activation_only_without_another():
    model = nn.Sequential(nn.Linear(5, 3), nn.Identity(), nn.ReLU(), nn.Linear(3, 2), nn.Identity(), nn.Linear(2, 1))
    assert list(utility.true_features(model.double(), *regression())) == ["2", "4"]


class Functional(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(5, 3), nn.Linear(3, 1)

    def forward(self, x):
        return self.last(torch.relu(self.first(x)))


class Shared(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(5, 3), nn.Linear(3, 3), nn.Linear(3, 1)])
        self.act = nn.ReLU()

    def forward(self, x):
        return self.layers[2](self.act(self.layers[1](self.act(self.layers[0](x)))))


@pytest.mark.parametrize(
    ("model", "says"),
    [
        (Functional(), "no activation module follows the layer 'first'"),
        (Shared(), "'act' is called more than once"),
        (nn.Linear(5, 1), "no hidden features"),
        (nn.Sequential(nn.Linear(5, 3), nn.ReLU(), nn.Dropout(), nn.Linear(3, 1)), r"Dropout '2' in training mode"),
        (nn.Sequential(nn.Linear(5, 3), nn.BatchNorm1d(3), nn.ReLU(), nn.Linear(3, 1)), r"call model.eval\(\) first"),
    ],
)
def test_models_whose_features_are_unclear_are_refused(model, says):
    with pytest.raises(ValueError, match=says):
        utility.true_features(model.double(), *regression())


def test_dropout_in_eval_mode_is_fine():
    model = nn.Sequential(nn.Linear(5, 3), nn.ReLU(), nn.Dropout(), nn.Linear(3, 1)).double().eval()
    sample = regression()
    assert_same(utility.true_weights(model, *sample), naive_weights(model, *sample))


def test_the_model_is_not_modified():
    model = MLP((5, 6, 1)).double()
    criterion, x, y = regression()
    criterion(model(x), y).backward()
    before = copy.deepcopy(model.state_dict()), [p.grad.clone() for p in model.parameters()]
    utility.true_weights(model, criterion, x, y)
    utility.true_features(model, criterion, x, y)
    after = model.state_dict(), [p.grad for p in model.parameters()]
    torch.testing.assert_close(after, before, rtol=0, atol=0)
    assert not any(module._forward_hooks for module in model.modules())


def test_a_chunk_of_nothing_is_refused():
    with pytest.raises(ValueError, match="chunk must be at least 1, not 0"):
        utility.true_weights(MLP((5, 3, 1)).double(), *regression(), chunk=0)


@pytest.mark.slow
def test_all_weights_of_the_mnist_network():
    model = MLP((784, 300, 150, 10)).double()
    x, y = torch.randn(1, 784, dtype=torch.float64), torch.tensor([3])
    utilities = utility.true_weights(model, nn.CrossEntropyLoss(), x, y)
    with torch.no_grad():
        intact = nn.functional.cross_entropy(model(x), y)
        for name, place in [("layers.0.weight", (7, 500)), ("layers.2.weight", (149, 299)), ("layers.4.bias", (3,))]:
            without = copy.deepcopy(model)
            dict(without.named_parameters())[name][place] = 0
            rise = nn.functional.cross_entropy(without(x), y) - intact
            assert utilities[name][place].item() == pytest.approx(rise.item(), abs=1e-12)


class Recurrent(nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.memory, self.out = kind(3, 2, batch_first=True), nn.Linear(2, 1)

    def forward(self, x):
        return self.out(self.memory(x)[0][:, -1])


@pytest.mark.parametrize("kind", [nn.GRU, nn.LSTM])
def test_weights_of_recurrent_layers(kind):
    torch.manual_seed(0)
    model, x, y = Recurrent(kind).double(), torch.randn(2, 4, 3, dtype=torch.float64), torch.zeros(2, 1).double()
    assert_same(utility.true_weights(model, nn.MSELoss(), x, y), naive_weights(model, nn.MSELoss(), x, y))


def test_impossible_names_of_features_are_distinguished():
    model, sample = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 1)), (torch.ones(1, 3), torch.ones(1, 1))
    with pytest.raises(ValueError, match=r"features contains \['0'\], but the modules between two layers are \['1'\]"):
        utility.true_features(model, nn.MSELoss(), *sample, features=["0"])
    with pytest.raises(ValueError, match="there is no module between two layers"):
        utility.true_features(nn.Sequential(model[0], model[2]), nn.MSELoss(), *sample, features=["0"])


@pytest.mark.parametrize("norm", [nn.BatchNorm1d(4), nn.InstanceNorm1d(4, track_running_stats=True)])
@pytest.mark.parametrize("measure", [utility.magnitude, utility.first_order, utility.random])
def test_changes_of_the_models_buffers_are_refused(measure, norm):
    model = nn.Sequential(nn.Conv1d(2, 4, 3), norm, nn.ReLU(), nn.Flatten(), nn.Linear(12, 1))
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(ValueError, match=r"Norm1d '1' in training mode"):
        measure(model, nn.MSELoss(), torch.randn(5, 2, 5), torch.zeros(5, 1), of="features")
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
