"""The diagnostics, against numbers derived by hand, and the monitor in ordinary training loops."""

import copy
import math
import pickle
import runpy
import warnings
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import upgd
from upgd import monitor, utility
from upgd.monitor import Monitor
from upgd.networks import MLP


def stacked(function, *batches):
    """Compute for one learner at a time."""
    return torch.stack([function(*learner) for learner in zip(*batches, strict=True)])


def test_sample_plasticity():
    before = torch.tensor([2.0, 1.0, 1.0, 0.0, 0.0])
    after = torch.tensor([0.5, 0.0, 3.0, 0.0, 1.0])
    # A loss of zero counts as entirely removed if it stays zero, and as not removed if it increases.
    assert monitor.sample_plasticity(before, after).tolist() == [0.75, 1, 0, 1, 0]


def test_windowed_means_keep_the_last_window():
    values = torch.tensor([[1.0, 3.0, 5.0, 7.0, 100.0], [0.0, 0.0, 2.0, 4.0, 8.0]])
    assert monitor.windowed_means(values, 2).tolist() == [[2, 6, 100], [0, 3, 8]]
    torch.testing.assert_close(monitor.windowed_means(values, 7), values.mean(-1, keepdim=True))
    with pytest.raises(ValueError, match="window must be at least 1, not 0"):
        monitor.windowed_means(values, 0)


def test_loss_of_plasticity_and_forgetting():
    curves = torch.tensor([[0.75, 0.5, 0.25], [0.25, 0.5, 1.0]])
    assert monitor.loss_of_plasticity(curves).tolist() == [0.5, -0.75]
    assert monitor.forgetting(curves).tolist() == [[0.25, 0.25], [-0.25, -0.5]]


def test_dormant_units():
    # Mean magnitudes 0, 1, 3, 4: the layer's mean is 2.
    h = torch.tensor([[0.0, -1.0, 2.0, 4.0], [0.0, 1.0, -4.0, 4.0]])
    assert monitor.dormant_share(h, tau=0).item() == 0.25
    assert monitor.dormant_share(h, tau=0.4).item() == 0.25
    assert monitor.dormant_share(h, tau=0.5).item() == 0.5
    assert monitor.dormant_share(h, tau=2.0).item() == 1
    assert monitor.dormant_share(torch.zeros(2, 4)).item() == 1


def test_zero_activations():
    assert monitor.zero_share(torch.tensor([[0.0, 1.0], [-1.0, 2.0]])).item() == 0.25


def test_norms():
    values = torch.tensor([[3.0, 0.0], [0.0, -4.0]])
    assert monitor.l1_norm(values).item() == 7
    assert monitor.l2_norm(values).item() == 5
    assert monitor.l0_share(values).item() == 0.5
    assert monitor.l1_norm(values, learner_dims=1).tolist() == [3, 4]
    assert monitor.l2_norm(values, learner_dims=1).tolist() == [3, 4]
    assert monitor.l0_share(values, learner_dims=1).tolist() == [0.5, 0.5]
    assert [f(torch.tensor(-2.0)).item() for f in (monitor.l1_norm, monitor.l2_norm, monitor.l0_share)] == [2, 2, 1]


def test_ranks():
    # Singular values 3 and 1: p = ¾, ¼.
    matrix = torch.tensor([[0.0, 3.0, 0.0], [-1.0, 0.0, 0.0]])
    entropy = -(0.75 * math.log(0.75) + 0.25 * math.log(0.25))
    assert monitor.effective_rank(matrix).item() == pytest.approx(math.exp(entropy))
    assert monitor.stable_rank(matrix).item() == pytest.approx((9 + 1) / 9)
    assert monitor.effective_rank(torch.eye(4)).item() == pytest.approx(4)
    assert monitor.stable_rank(torch.eye(4)).item() == pytest.approx(4)
    one = torch.outer(torch.tensor([1.0, 2.0]), torch.tensor([3.0, -1.0, 1.0]))
    assert monitor.effective_rank(one).item() == pytest.approx(1, abs=1e-5)
    assert monitor.effective_rank(torch.zeros(2, 3)).item() == 0
    assert monitor.stable_rank(torch.zeros(2, 3)).item() == 0


def test_ranks_of_large_and_small_numbers():
    matrix = torch.tensor([[0.0, 3.0], [-1.0, 0.0]])
    for factor in (1e-30, 1e30):  # squares are out of range in 32 bits
        assert monitor.stable_rank(matrix * factor).item() == pytest.approx(10 / 9)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.int64])
def test_ranks_of_matrices_that_lapack_does_not_take(dtype):
    matrix = torch.tensor([[0, 3], [-1, 0]], dtype=dtype)
    assert monitor.effective_rank(matrix).item() == pytest.approx(monitor.effective_rank(matrix.float()).item())
    assert monitor.stable_rank(matrix).item() == pytest.approx(10 / 9)


@pytest.mark.parametrize("rank", [monitor.effective_rank, monitor.stable_rank])
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_non_finite_matrices_have_no_rank(rank, bad, capfd):
    matrices = torch.eye(3).repeat(3, 1, 1)
    matrices[1, 2, 0] = bad
    assert rank(matrices).tolist() == pytest.approx([3, math.nan, 3], nan_ok=True)
    assert math.isnan(rank(matrices[1]))
    assert capfd.readouterr() == ("", "")


def test_gate_histogram():
    gates = torch.tensor([[0.0, 0.05, 0.1, 1.0], [0.5, 0.5, 0.5, 0.999]])
    assert monitor.gate_histogram(gates, 10).tolist() == pytest.approx([0.25, 0.125, 0, 0, 0, 0.375, 0, 0, 0, 0.25])
    assert monitor.gate_histogram(gates, 2, learner_dims=1).tolist() == [[0.75, 0.25], [0, 1]]


def test_gates_that_are_not_numbers_do_not_count():
    nan = math.nan
    assert monitor.gate_histogram(torch.tensor([nan, 0.5]), 4).tolist() == [0, 0, 1, 0]
    gates = torch.tensor([[nan, 0.1, 0.2, 0.9], [nan, nan, nan, nan]])
    expected = [[2 / 3, 1 / 3], [nan, nan]]
    for found, shares in zip(monitor.gate_histogram(gates, 2, learner_dims=1).tolist(), expected, strict=True):
        assert found == pytest.approx(shares, nan_ok=True)


def test_many_gates_of_half_precision_are_counted():
    gates = torch.cat([torch.zeros(3000), torch.ones(1000)])
    for dtype in (torch.bfloat16, torch.float16):
        assert monitor.gate_histogram(gates.to(dtype), 2).tolist() == [0.75, 0.25]


@pytest.mark.parametrize(
    "function",
    [
        lambda h: monitor.dormant_share(h, 0.7),
        monitor.zero_share,
        monitor.effective_rank,
        monitor.stable_rank,
    ],
)
def test_learner_dimensions_come_first(function):
    h = torch.relu(torch.randn(4, 6, 5, generator=torch.Generator().manual_seed(0)))
    torch.testing.assert_close(function(h), stacked(function, h))


@pytest.fixture
def by_hand():
    """Two inputs, two ReLU units, one output, no biases."""
    model = nn.Sequential(nn.Linear(2, 2, bias=False), nn.ReLU(), nn.Linear(2, 1, bias=False))
    with torch.no_grad():
        model[0].weight.copy_(torch.tensor([[3.0, 0.0], [0.0, -1.0]]))
        model[2].weight.copy_(torch.tensor([[1.0, 2.0]]))
    return model


def test_a_snapshot_by_hand(by_hand):
    with Monitor(by_hand, tau=0.5) as looking:
        by_hand(torch.tensor([[1.0, 1.0], [1.0, -1.0]])).sum().backward()
        figures = looking.snapshot()
    # Hidden: (3, 0) and (3, 1). Gradients: of the first layer, rows (1·(1 + 1), 1·(1 − 1)) and (2·1, 2·(−1)); of the
    # second (6, 1).
    hidden = torch.tensor([[3.0, 0.0], [3.0, 1.0]])
    expected = {
        "dormant_share/1": 0.5,  # mean magnitudes 3 and ½, the layer's is 1¾
        "zero_share/1": 0.25,
        "effective_rank/1": monitor.effective_rank(hidden).item(),
        "weight_l1/0.weight": 4,
        "weight_l1/2.weight": 3,
        "weight_l1": 7,
        "weight_l2/0.weight": math.sqrt(10),
        "weight_l2/2.weight": math.sqrt(5),
        "weight_l2": math.sqrt(15),
        "gradient_l1/0.weight": 6,
        "gradient_l1/2.weight": 7,
        "gradient_l1": 13,
        "gradient_l2/0.weight": math.sqrt(12),
        "gradient_l2/2.weight": math.sqrt(37),
        "gradient_l2": math.sqrt(49),
        "gradient_l0_share/0.weight": 0.75,
        "gradient_l0_share/2.weight": 1,
        "gradient_l0_share": 5 / 6,
        "effective_rank/0.weight": monitor.effective_rank(by_hand[0].weight).item(),
        "effective_rank/2.weight": 1,
        "stable_rank/0.weight": 10 / 9,
        "stable_rank/2.weight": 1,
    }
    assert figures == pytest.approx(expected)


def test_a_snapshot_of_selected_figures(by_hand, monkeypatch):
    looking = Monitor(by_hand)
    by_hand(torch.tensor([[1.0, 1.0], [1.0, -1.0]])).sum().backward()
    everything = looking.snapshot()
    names = sorted({name.partition("/")[0] for name in everything})
    for name in names:
        assert looking.snapshot(name) == {one: everything[one] for one in everything if one.partition("/")[0] == name}
    assert looking.snapshot(select=names) == everything
    with monkeypatch.context() as patched:  # ranks are expensive and not computed needlessly
        patched.setattr(torch.linalg, "svdvals", None)
        cheap = looking.snapshot(select={"dormant_share", "weight_l2"})
    assert {name.partition("/")[0] for name in cheap} == {"dormant_share", "weight_l2"}
    with pytest.raises(ValueError, match=r"select contains \['norm'\]; choose from dormant_share, "):
        looking.snapshot(["norm"])


def test_plasticity_waits_for_a_snapshot_that_selects_it():
    looking = Monitor(nn.Linear(1, 1))
    looking.plasticity(torch.tensor(1.0), lambda: torch.tensor(0.25))
    assert "sample_plasticity" not in looking.snapshot("weight_l2")
    assert looking.snapshot("sample_plasticity") == {"sample_plasticity": 0.75}
    assert looking.snapshot("sample_plasticity") == {}


def test_only_the_last_samples_count(by_hand):
    looking = Monitor(by_hand, samples=2)
    by_hand(torch.tensor([[-1.0, 1.0]] * 5))  # all zero
    by_hand(torch.tensor([[1.0, -1.0]]))
    assert looking.snapshot()["zero_share/1"] == 0.5
    by_hand(torch.tensor([[1.0, -1.0]]))
    assert looking.snapshot()["zero_share/1"] == 0
    by_hand(torch.tensor([[1.0, -1.0], [1.0, -1.0], [-1.0, 1.0], [1.0, -1.0]]))
    assert looking.snapshot()["zero_share/1"] == 0.5


def test_recorded_samples_are_bounded(by_hand):
    looking = Monitor(by_hand, samples=10)
    for _ in range(100):
        by_hand(torch.ones(3, 2))
    window = looking._windows["1", 2, False]
    assert sum(len(means) for means, _ in window._passes) == window._kept == 12


def test_evaluation_is_not_recorded(by_hand):
    looking = Monitor(by_hand)
    with torch.no_grad():
        by_hand(torch.ones(1, 2))
    assert "zero_share/1" not in looking.snapshot()


def test_measuring_utility_is_not_recorded(by_hand):
    looking = Monitor(by_hand)
    sample = nn.MSELoss(), torch.ones(1, 2), torch.ones(1, 1)
    utility.true_weights(by_hand, *sample)
    utility.true_features(by_hand, *sample)
    for of in ("weights", "features"):
        utility.first_order(by_hand, *sample, of=of)
        utility.second_order(by_hand, *sample, of=of, curvature="exact")
    assert "zero_share/1" not in looking.snapshot()


def test_remove_removes_the_hooks(by_hand):
    with Monitor(by_hand):
        assert by_hand[1]._forward_hooks
    assert not by_hand[1]._forward_hooks


def test_channels_are_units():
    model = nn.Sequential(nn.Conv2d(1, 2, 1, bias=False), nn.ReLU(), nn.Flatten(), nn.Linear(8, 1))
    with torch.no_grad():
        model[0].weight.copy_(torch.tensor([1.0, -1.0]).view(2, 1, 1, 1))
    looking = Monitor(model, tau=0)
    model(torch.tensor([[[[1.0, 2.0], [0.0, 1.0]]]]))
    figures = looking.snapshot()
    assert figures["dormant_share/1"] == 0.5
    assert figures["zero_share/1"] == pytest.approx(5 / 8)
    assert "effective_rank/1" not in figures
    assert figures["stable_rank/0.weight"] == 1


def test_a_channel_may_have_one_position():
    model = nn.Sequential(nn.Conv2d(1, 4, 1, bias=False), nn.ReLU(), nn.Flatten(), nn.Linear(4, 1))
    with torch.no_grad():
        model[0].weight.copy_(torch.tensor([1.0, 2.0, 3.0, -1.0]).view(4, 1, 1, 1))
    with Monitor(model, tau=0) as looking:
        model(torch.tensor([2.0, 3.0]).view(2, 1, 1, 1))
    figures = looking.snapshot()
    assert figures["dormant_share/1"] == figures["zero_share/1"] == 0.25


class InAnotherOrder(nn.Module):
    """A small network for images whose modules are defined in another order than they are called in."""

    def __init__(self):
        super().__init__()
        self.conv, self.fc, self.act = nn.Conv2d(1, 4, 1), nn.Linear(4 * 9, 2), nn.ReLU()
        with torch.no_grad():
            self.conv.weight.copy_(torch.tensor([1.0, 2.0, 0.0, 0.0]).view(4, 1, 1, 1))
            self.conv.bias.zero_()

    def forward(self, x):
        return self.fc(self.act(self.conv(x)).flatten(1))


def test_modules_may_be_defined_in_any_order():
    model = InAnotherOrder()
    with Monitor(model) as looking:
        model(torch.ones(2, 1, 3, 3))
    assert looking.snapshot()["dormant_share/act"] == 0.5  # two channels of four


@pytest.mark.parametrize("kind", [1, 2, 3])
def test_units_of_a_flattened_convolution_lie_last(kind):
    convolution = (nn.Conv1d, nn.Conv2d, nn.Conv3d)[kind - 1](1, 4, 1, bias=False)
    pool = (nn.AdaptiveAvgPool1d, nn.AdaptiveAvgPool2d, nn.AdaptiveAvgPool3d)[kind - 1](1)
    with torch.no_grad():
        convolution.weight.copy_(torch.tensor([1.0, 2.0, 3.0, -1.0]).view_as(convolution.weight))
    model = nn.Sequential(convolution, pool, nn.Flatten(), nn.ReLU(), nn.Linear(4, 2))
    with Monitor(model) as looking:
        model(torch.ones(5, 1, *[3] * kind))
    figures = looking.snapshot()
    assert figures["dormant_share/3"] == figures["zero_share/3"] == 0.25
    assert figures["effective_rank/3"] == pytest.approx(1, abs=1e-4)


def test_a_layer_on_the_side_does_not_hide_the_channels():
    """Squeeze and excitation: Linear layers make a factor for each channel."""

    class Squeeze(InAnotherOrder):
        def __init__(self):
            super().__init__()
            self.side = nn.Linear(4, 4)

        def forward(self, x):
            h = self.conv(x)
            factors = self.side(h.mean((2, 3))).exp()[..., None, None]
            return self.fc(self.act(h * factors).flatten(1))

    model = Squeeze()
    with Monitor(model, tau=0) as looking:
        model(torch.ones(2, 1, 3, 3))
    assert looking.snapshot()["dormant_share/act"] == 0.5


def test_every_pass_is_seen_from_its_own_beginning():
    """An activation before all layers has no channels, although the pass before has ended with a convolution."""
    model = nn.Sequential(nn.ReLU(), nn.Conv2d(2, 4, 1))
    with Monitor(model) as looking:
        for _ in range(2):
            model(torch.ones(1, 2, 3, 3))
    assert looking._windows.keys() == {("0", 3, False)}


def test_an_activation_module_that_serves_channels_and_units_of_the_same_number():
    class Shared(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv, self.fc, self.last = nn.Conv1d(1, 3, 1), nn.Linear(6, 3), nn.Linear(3, 1)
            self.act = nn.ReLU()

        def forward(self, x):
            return self.last(self.act(self.fc(self.act(self.conv(x)).flatten(1))))

    model = Shared()
    with Monitor(model) as looking:
        model(torch.ones(1, 1, 2))
    shares = {name for name in looking.snapshot() if name.startswith("zero_share")}
    assert shares == {"zero_share/act[3 channels]", "zero_share/act[3]"}


def test_units_of_a_linear_layer_are_in_the_last_dimension():
    model = nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 1))
    x = torch.randn(4, 5, 2)
    figures = []
    for inputs in (x, x.flatten(0, 1)):
        with Monitor(model) as looking:
            model(inputs)
            figures.append(looking.snapshot())
    assert figures[0] == pytest.approx(figures[1])


class Functional(nn.Module):
    """Layers and a function of the output of each."""

    def __init__(self, *layers, between=torch.relu, at_the_end=torch.Tensor.clone):
        super().__init__()
        self.layers, self.between, self.at_the_end = nn.ModuleList(layers), between, at_the_end

    def forward(self, x):
        for layer in self.layers[:-1]:
            x = self.between(layer(x))
        return self.at_the_end(self.layers[-1](x))


def two_layers(**functions):
    return Functional(nn.Linear(2, 3), nn.Linear(3, 1), **functions)


def warnings_of(model, x=None, **options):
    """Return the monitor's warnings after two passes and two snapshots."""
    with Monitor(model, **options) as looking, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            model(torch.randn(5, 2) if x is None else x).sum().backward()
            looking.snapshot()
    assert not any(module._forward_pre_hooks or module._forward_hooks for module in model.modules())
    return [str(warning.message) for warning in caught]


def test_a_model_without_activation_modules():
    model = two_layers()
    looking = Monitor(model)
    model(torch.tensor([[1.0, 2.0]]))
    with pytest.warns(
        UserWarning, match=r"for example the output of the layer 'layers.0' before its relu; use .* nn.ReLU"
    ) as caught:
        assert "zero_share/layers.0" in looking.snapshot()
    assert caught[0].filename == __file__


FUNCTIONS = [
    *(F.relu, F.relu6, F.leaky_relu, F.rrelu, F.elu, F.celu, F.selu, F.gelu, F.silu, F.mish, F.softplus, F.hardtanh),
    *(F.hardswish, F.hardsigmoid, torch.tanh, torch.sigmoid),
]


@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda function: function.__name__)
def test_functional_activations_warn_once(function):
    assert len(warnings_of(two_layers(between=function))) == 1


@pytest.mark.parametrize("bias", [True, False])
def test_functions_are_found_behind_pooling_normalisation_and_dropout(bias):
    def pooled(x):
        return F.relu(F.max_pool2d(F.dropout(norm(x)), 2)).flatten(1)

    norm = nn.BatchNorm2d(3)
    model = Functional(nn.Conv2d(1, 3, 3, bias=bias), nn.Linear(12, 2, bias=bias), between=pooled)
    model.norm = norm
    (sentence,) = warnings_of(model, torch.randn(4, 1, 6, 6))
    assert "the output of the layer 'layers.0' before its relu" in sentence


class Recurrent(nn.Module):
    """Has gates between two layers that are not activations."""

    def __init__(self):
        super().__init__()
        self.first, self.memory, self.last = nn.Linear(2, 3), nn.LSTM(3, 3), nn.Linear(3, 1)

    def forward(self, x):
        return self.last(self.memory(self.first(x))[0])


@pytest.mark.parametrize(
    "model",
    [
        MLP((2, 3, 3, 1)),
        MLP((2, 3, 3, 1), "identity"),
        nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 3, bias=False), nn.Linear(3, 1)),
        two_layers(between=lambda x: x * 2),
        two_layers(between=nn.ReLU()),
        two_layers(between=nn.Identity(), at_the_end=torch.sigmoid),
        two_layers(between=lambda x: F.relu(x, inplace=True)),  # the output after it is recorded
        nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3), nn.Dropout(), nn.Linear(3, 1)),
        nn.Linear(2, 1),
        Recurrent(),
    ],
)
def test_no_false_alarms(model):
    assert warnings_of(model) == []


def test_named_layers_cause_no_warning():
    assert warnings_of(two_layers(), layers=["layers.0"]) == []


def pickled(thing):
    return pickle.loads(pickle.dumps(thing))


def with_modules():
    return nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 1))


@pytest.mark.parametrize("copied", [copy.deepcopy, pickled])
@pytest.mark.parametrize("make", [with_modules, two_layers])
def test_a_copy_of_a_model_is_not_monitored(make, copied):
    model, x = make(), torch.ones(4, 2)
    with Monitor(model) as looking:
        another = copied(model)
        torch.testing.assert_close(another(x), model(x))
        (window,) = looking._windows.values()
        assert window._kept == 4
        looking._windows.clear()
        another(x)
        assert not looking._windows


@pytest.mark.parametrize("copied", [copy.deepcopy, pickled])
@pytest.mark.parametrize("make", [with_modules, two_layers])
@pytest.mark.parametrize("model_first", [True, False])
@pytest.mark.filterwarnings("ignore:the model has no activation modules")
def test_a_monitor_copied_with_its_model_follows_the_copy(make, copied, model_first):
    model, x = make(), torch.ones(4, 2)
    looking = Monitor(model)
    if model_first:
        another, looking_too = copied((model, looking))
    else:
        looking_too, another = copied((looking, model))
    assert looking_too.model is another
    another(x)
    assert not looking._windows
    expected = looking_too.snapshot()
    model(x)
    assert looking.snapshot() == expected
    looking_too.remove()
    assert not any(module._forward_pre_hooks or module._forward_hooks for module in another.modules())
    model(x)
    (window,) = looking._windows.values()
    assert window._kept == 8


@pytest.mark.parametrize("copied", [copy.deepcopy, pickled])
def test_a_model_may_own_its_monitor(by_hand, copied):
    by_hand.looking = Monitor(by_hand)
    another = copied(by_hand)
    assert another.looking.model is another
    another(torch.ones(4, 2))
    assert another.looking._windows
    assert not by_hand.looking._windows


def test_later_functional_activations_also_warn():
    """The first pass may be one without gradients, or through other layers."""
    model = two_layers()
    with Monitor(model) as looking:
        with torch.no_grad():
            model(torch.ones(1, 2))
        looking.snapshot()
        model(torch.ones(1, 2))
        with pytest.warns(UserWarning, match="before its relu"):
            looking.snapshot()


def test_an_activation_module_that_serves_two_widths():
    class Shared(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList([nn.Linear(2, 3), nn.Linear(3, 4), nn.Linear(4, 1)])
            self.act = nn.ReLU()

        def forward(self, x):
            return self.layers[2](self.act(self.layers[1](self.act(self.layers[0](x)))))

    model = Shared()
    looking = Monitor(model)
    model(torch.ones(1, 2))
    shares = {name for name in looking.snapshot() if name.startswith("zero_share")}
    assert shares == {"zero_share/act[3]", "zero_share/act[4]"}


def test_layers_can_be_named(by_hand):
    looking = Monitor(by_hand, layers=["0"])
    by_hand(torch.ones(1, 2))
    assert {name for name in looking.snapshot() if name.startswith("zero_share")} == {"zero_share/0"}
    with pytest.raises(ValueError, match=r"layers contains \['7'\]"):
        Monitor(by_hand, layers=["7"])


def test_plasticity_is_measured_and_averaged():
    model = nn.Linear(1, 1, bias=False)
    nn.init.constant_(model.weight, 2.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.25)
    looking = Monitor(model, optimizer)
    x, y = torch.ones(1, 1), torch.zeros(1, 1)
    loss = nn.functional.mse_loss(model(x), y)
    loss.backward()
    optimizer.step()  # w: 2 → 2 − ¼·4 = 1, the loss: 4 → 1
    assert looking.plasticity(loss, lambda: nn.functional.mse_loss(model(x), y)).item() == 0.75
    looking.plasticity(torch.tensor(1.0), lambda: torch.tensor(0.75))
    assert looking.snapshot()["sample_plasticity"] == 0.5
    assert "sample_plasticity" not in looking.snapshot()


def test_plasticities_between_snapshots_are_many_or_of_many_samples():
    with Monitor(nn.Linear(1, 1)) as looking:
        after = torch.rand(300, generator=torch.Generator().manual_seed(0))
        for loss in after:
            looking.plasticity(torch.tensor(1.0), lambda loss=loss: loss)
        size = len(pickle.dumps(looking))
        assert looking.snapshot()["sample_plasticity"] == pytest.approx((1 - after).mean().item())
        looking.plasticity(torch.ones(300), lambda: after)
        assert abs(len(pickle.dumps(looking)) - size) < 100  # memory does not grow
        assert looking.snapshot()["sample_plasticity"] == pytest.approx((1 - after).mean().item())


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_diverged_network_can_be_monitored(by_hand, bad, capfd):
    optimizer = upgd.UPGD(by_hand.parameters(), lr=0.1)
    with Monitor(by_hand, optimizer) as looking:
        by_hand(torch.ones(2, 2)).sum().backward()
        optimizer.step()
        by_hand[0].weight.data[0, 0] = bad
        by_hand(torch.ones(2, 2)).sum().backward()
        optimizer.step()
        figures = looking.snapshot()
    assert math.isnan(figures["effective_rank/0.weight"])
    assert math.isnan(figures["stable_rank/0.weight"])
    assert math.isnan(figures["effective_rank/1"])
    assert "gate_histogram/0.weight" in figures
    assert capfd.readouterr() == ("", "")


def test_gates_of_an_optimizer():
    model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 1))
    optimizer = upgd.UPGD(model.parameters(), lr=0.1)
    looking = Monitor(model, optimizer)
    assert not any(name.startswith("gate") for name in looking.snapshot())
    model(torch.ones(2, 3)).sum().backward()
    optimizer.step()
    figures = looking.snapshot()
    for name, parameter in model.named_parameters():
        histogram = figures[f"gate_histogram/{name}"]
        assert histogram == monitor.gate_histogram(optimizer.gates()[parameter]).tolist()
        assert sum(histogram) == pytest.approx(1)


def test_nothing_about_gates_of_other_optimizers():
    model = nn.Linear(2, 1)
    figures = Monitor(model, torch.optim.SGD(model.parameters(), lr=0.1)).snapshot()
    assert "weight_l2/weight" in figures
    assert not any(name.startswith("gate") for name in figures)


def test_half_precision():
    model = nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 1)).bfloat16()
    looking = Monitor(model)
    model(torch.ones(3, 2, dtype=torch.bfloat16)).sum().backward()
    assert all(math.isfinite(value) for value in looking.snapshot().values())


def test_samples_must_be_positive():
    with pytest.raises(ValueError, match="samples must be at least 1, not 0"):
        Monitor(nn.Linear(1, 1), samples=0)


@pytest.mark.parametrize(
    ("model", "tau", "error", "sentence"),
    [
        (3, 0.1, TypeError, "model must be a torch.nn.Module, not 3"),
        (nn.Linear(1, 1), -0.1, ValueError, "tau must be a number of at least 0, not -0.1"),
        (nn.Linear(1, 1), math.nan, ValueError, "tau must be a number of at least 0, not nan"),
    ],
)
def test_mistakes_get_one_sentence(model, tau, error, sentence):
    with pytest.raises(error, match=sentence):
        Monitor(model, tau=tau)


def test_the_example_runs(capsys):
    example = runpy.run_path(str(Path(__file__).parents[1] / "examples" / "look_inside.py"))
    example["main"](tasks=1)
    header, *lines = capsys.readouterr().out.splitlines()
    assert header.startswith("task learner")
    assert [line.split()[:2] for line in lines] == [["1", "UPGD"], ["1", "SGD"]]


def test_invalid_optimizers_are_refused():
    with pytest.raises(TypeError, match="optimizer must be a torch optimizer, not 'adam'"):
        Monitor(nn.Linear(2, 1), "adam")


def test_plasticity_takes_a_plain_number():
    assert Monitor(nn.Linear(2, 1)).plasticity(1.0, lambda: torch.tensor(0.25)) == 0.75


# ------------------------------------------------------------------------------------------------------------ summaries


class Gates:
    """An optimizer with given gates."""

    def __init__(self, gates, beta=0.999):
        self.param_groups = [{"params": list(gates), "beta_utility": beta}]
        self.gates = lambda: gates


def gated(values, gradient=None, beta=0.999):
    """Return a layer of weights with these gates, and its monitor."""
    model = nn.Linear(len(values), 1, bias=False)
    if gradient is not None:
        model.weight.grad = torch.tensor([gradient])
    return model, Monitor(model, Gates({model.weight: torch.tensor([values])}, beta))


def test_the_summary_reports_ineffective_gates():
    model, looking = gated([0.5] * 99 + [0.9], [1.0] * 99 + [0.0])
    words = "gates: 99% between 0.45 and 0.55, so most weights learn as without gates at half the step size"
    assert (
        looking.summary() == f"{words}; together, the gates change the step by 0%; try beta_utility smaller than 0.999"
    )
    model.zero_grad()
    assert looking.summary() == f"{words}; try beta_utility smaller than 0.999"
    _, none_smaller = gated([0.5] * 100, beta=0.0)
    assert none_smaller.summary() == words.replace("99%", "100%")


def test_a_summary_weighs_gates_by_the_gradient():
    """One gate in a hundred is not near ½, but it is where half of the squared gradient is: (2·0.9 − 1)·√½."""
    _, looking = gated([0.5] * 99 + [0.9], [1.0] * 99 + [99**0.5])
    assert looking.summary().endswith(f"change the step by {80 * 0.5**0.5:.3g}%")
    _, apart = gated([0.1, 0.9], [3.0, 4.0])
    assert apart.summary() == "gates: 0% between 0.45 and 0.55; together, the gates change the step by 80%"


@pytest.mark.parametrize("cls", [upgd.UPGD, upgd.FeatureUPGD])
def test_a_summary_of_a_network(cls):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 2))
    optimizer = cls(model if cls is upgd.FeatureUPGD else model.parameters())
    with Monitor(model, optimizer) as looking:
        assert looking.summary() == "nothing to report: the monitor has recorded no forward pass"
        model(torch.randn(3, 4)).square().sum().backward()
        optimizer.step()
        gates, layer = looking.summary().splitlines()
    assert "% between 0.45 and 0.55" in gates
    assert "together, the gates change the step by" in gates
    assert layer.startswith("layer '1': 6 units, ")


def test_sparse_gradients_count_as_dense_ones():
    figures = []
    for sparse in (False, True):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Embedding(5, 3, sparse=sparse), nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))
        watching = Monitor(model)
        model(torch.tensor([1, 3, 3])).sum().backward()
        assert model[0].weight.grad.is_sparse == sparse
        figures.append(watching.snapshot())
        figures[-1]["change"] = monitor._change_of_step({model[0].weight: torch.linspace(0, 1, 15).view(5, 3)})
    torch.testing.assert_close(figures[1], figures[0], equal_nan=True)
