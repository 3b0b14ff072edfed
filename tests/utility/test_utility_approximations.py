"""Approximate utilities, against hand-computed numbers and exact derivatives."""

import copy
import threading

import pytest
import torch
from torch import nn

import upgd
from upgd import utility
from upgd.networks import MLP, ConvNet

MEASURES = ["first_order", "second_order", "magnitude", "squared_gradient", "random"]


@pytest.fixture
def by_hand():
    """One input, one ReLU unit, one output: L = (v·relu(w·x) − y)² with w = 3, x = 2, v = 0.5, y = 1."""
    model = nn.Sequential(nn.Linear(1, 1, bias=False), nn.ReLU(), nn.Linear(1, 1, bias=False)).double()
    with torch.no_grad():
        model[0].weight.fill_(3)
        model[2].weight.fill_(0.5)
    return model, nn.MSELoss(), torch.tensor([[2.0]]).double(), torch.tensor([[1.0]]).double()


# h = 6, output 3, error 2; ∂L/∂v = 2·2·6 = 24, ∂²L/∂v² = 72; ∂L/∂w = 2·2·½·2 = 4, ∂²L/∂w² = 2·(½·2)² = 2;
# for the gate m of the feature: ∂L/∂m = 2·2·3 = 12, ∂²L/∂m² = 18. Without w, v or h the loss is 1 rather than 4: −3.
@pytest.mark.parametrize(
    ("measure", "of", "expected"),
    [
        ("first_order", "weights", {"0.weight": -12, "2.weight": -12}),
        ("second_order", "weights", {"0.weight": -12 + 9, "2.weight": -12 + 9}),
        ("magnitude", "weights", {"0.weight": 3, "2.weight": 0.5}),
        ("squared_gradient", "weights", {"0.weight": 16, "2.weight": 576}),
        ("true_weights", None, {"0.weight": -3, "2.weight": -3}),
        ("first_order", "features", {"1": -12}),
        ("second_order", "features", {"1": -12 + 9}),
        ("magnitude", "features", {"1": 6}),
        ("squared_gradient", "features", {"1": 144}),
        ("true_features", None, {"1": -3}),
    ],
)
def test_numbers_by_hand(by_hand, measure, of, expected):
    options = {} if of is None else {"of": of}
    utilities = getattr(utility, measure)(*by_hand, **options)
    assert {name: u.item() for name, u in utilities.items()} == pytest.approx(expected)


def test_exact_second_order_is_the_taylor_polynomial():
    model = MLP((4, 5, 3, 2), "tanh").double()
    criterion, x, y = nn.CrossEntropyLoss(), torch.randn(3, 4).double(), torch.tensor([0, 1, 1])
    exact = utility.second_order(model, criterion, x, y, curvature="exact")
    parameters = {name: p.detach() for name, p in model.named_parameters()}

    def loss(changed):
        return criterion(torch.func.functional_call(model, changed, (x,)), y)

    gradient, hessian = torch.func.grad(loss)(parameters), torch.func.hessian(loss)(parameters)
    for name, w in parameters.items():
        diagonal = hessian[name][name].reshape(w.numel(), w.numel()).diagonal().view_as(w)
        torch.testing.assert_close(exact[name], -gradient[name] * w + diagonal * w**2 / 2)


def test_exact_second_order_of_features_is_the_taylor_polynomial():
    model = MLP((4, 5, 2), "tanh").double()
    criterion, x, y = nn.MSELoss(), torch.randn(3, 4).double(), torch.randn(3, 2).double()
    exact = utility.second_order(model, criterion, x, y, of="features", curvature="exact")

    def loss(gates):
        return criterion(model.layers[2](gates * torch.tanh(model.layers[0](x))), y)

    gates = torch.ones(5).double()
    gradient = torch.func.grad(loss)(gates)
    diagonal = torch.func.hessian(loss)(gates).diagonal()
    torch.testing.assert_close(exact, {"layers.1": (-gradient + diagonal / 2).detach()})


@pytest.mark.parametrize("of", ["weights", "features"])
def test_frozen_parameters_have_utility_too(of):
    model = MLP((4, 5, 3, 2), "tanh").double()
    sample = nn.CrossEntropyLoss(), torch.randn(3, 4).double(), torch.tensor([0, 1, 1])
    expected = utility.second_order(model, *sample, of=of)
    frozen = [parameter.requires_grad_(False) for parameter in model.layers[0].parameters()]
    torch.testing.assert_close(utility.second_order(model, *sample, of=of), expected)
    model.requires_grad_(False)
    torch.testing.assert_close(utility.second_order(model, *sample, of=of), expected)
    model.requires_grad_(True)
    for parameter in frozen:
        parameter.requires_grad_(False)
    utility.second_order(model, *sample, of=of)
    assert [p.requires_grad for p in model.parameters()] == [False, False, True, True, True, True]


def test_hesscale_is_exact_in_the_last_layer_and_for_the_last_features():
    model = MLP((4, 5, 3, 1), "tanh").double()
    sample = nn.MSELoss(), torch.randn(3, 4).double(), torch.randn(3, 1).double()
    estimate, exact = utility.second_order(*(model, *sample)), utility.second_order(model, *sample, curvature="exact")
    for name in ("layers.4.weight", "layers.4.bias"):
        torch.testing.assert_close(estimate[name], exact[name])
    assert not torch.allclose(estimate["layers.0.weight"], exact["layers.0.weight"], rtol=1e-6)
    estimate, exact = (utility.second_order(model, *sample, of="features", curvature=c) for c in ("hesscale", "exact"))
    torch.testing.assert_close(estimate["layers.3"], exact["layers.3"])


def test_in_a_network_linear_in_each_weight_second_order_is_the_truth():
    """Mean squared error of a network with identity activations is quadratic in any single weight."""
    model = MLP((4, 5, 3, 1), "identity").double()
    sample = nn.MSELoss(), torch.randn(3, 4).double(), torch.randn(3, 1).double()
    true = utility.true_weights(model, *sample)
    second = utility.second_order(model, *sample, curvature="exact")
    for name in true:
        torch.testing.assert_close(second[name], true[name], rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("of", ["weights", "features"])
@pytest.mark.parametrize("measure", MEASURES)
def test_all_measures_have_one_structure_and_leave_no_trace(measure, of):
    model = ConvNet((1, 16, 16), 3)
    sample = nn.CrossEntropyLoss(), torch.randn(2, 1, 16, 16), torch.tensor([0, 2])
    true = (utility.true_weights if of == "weights" else utility.true_features)(model, *sample)
    sample[0](model(sample[1]), sample[2]).backward()
    before = copy.deepcopy(model.state_dict()), [p.grad.clone() for p in model.parameters()]
    utilities = getattr(utility, measure)(model, *sample, of=of)
    assert {name: (u.shape, u.dtype) for name, u in utilities.items()} == {
        n: (u.shape, u.dtype) for n, u in true.items()
    }
    assert not any(u.requires_grad for u in utilities.values())
    torch.testing.assert_close((model.state_dict(), [p.grad for p in model.parameters()]), before, rtol=0, atol=0)
    assert not any(module._forward_hooks for module in model.modules())


def test_without_gradients_none_appear():
    model = MLP((4, 5, 1))
    utility.second_order(model, nn.MSELoss(), torch.ones(1, 4), torch.ones(1, 1))
    assert all(p.grad is None for p in model.parameters())


def test_works_with_gradients_disabled():
    model = MLP((4, 5, 1))
    sample = nn.MSELoss(), torch.ones(1, 4), torch.ones(1, 1)
    expected = utility.second_order(model, *sample)
    with torch.no_grad():
        torch.testing.assert_close(utility.second_order(model, *sample), expected)


def test_magnitude_of_a_channel_is_the_mean_over_batch_and_positions():
    model = nn.Sequential(nn.Conv2d(1, 2, 3), nn.Tanh(), nn.Flatten(), nn.Linear(8, 1))
    x = torch.randn(3, 1, 4, 4)
    utilities = utility.magnitude(model, nn.MSELoss(), x, torch.zeros(3, 1), of="features")
    expected = torch.tanh(model[0](x)).abs().mean((0, 2, 3)).detach()
    torch.testing.assert_close(utilities, {"1": expected})


def test_random_can_be_repeated():
    model = MLP((4, 5, 1))
    sample = nn.MSELoss(), torch.ones(1, 4), torch.ones(1, 1)
    one, two = (utility.random(model, *sample, generator=torch.Generator().manual_seed(7)) for _ in range(2))
    torch.testing.assert_close(one, two, rtol=0, atol=0)


@pytest.mark.parametrize(
    ("call", "error", "says"),
    [
        (
            lambda *a: utility.first_order(*a, of="weight"),
            ValueError,
            "of must be 'weights' or 'features', not 'weight'",
        ),
        (lambda *a: utility.magnitude(*a, of="units"), ValueError, "not 'units'"),
        (lambda *a: utility.second_order(*a, curvature="gauss"), ValueError, "'hesscale' or 'exact', not 'gauss'"),
        (lambda m, c, x, y: utility.second_order(m, nn.functional.mse_loss, x, y), TypeError, "loss module"),
    ],
)
def test_mistakes_are_explained(call, error, says):
    with pytest.raises(error, match=says):
        call(MLP((4, 5, 1)), nn.MSELoss(), torch.ones(1, 4), torch.ones(1, 1))


@pytest.mark.parametrize("of", ["weights", "features"])
def test_second_order_leaves_the_state_of_training_as_it_was(of):
    torch.manual_seed(0)
    model, criterion = MLP((4, 5, 3, 2)), nn.CrossEntropyLoss()
    curvature, monitor = upgd.HesScale(model, criterion), upgd.Monitor(model)
    optimizer = upgd.FeatureUPGD(model, sigma=0.0, curvature=curvature)
    resetting = upgd.methods.optimizer("continual-backprop", model, lr=0.01)
    x, y = torch.randn(6, 4), torch.randint(2, (6,))
    criterion(model(x), y).backward()

    def state():
        return copy.deepcopy(
            {
                "diagonals": [curvature.diagonal(p) for p in model.parameters()],
                "of features": [curvature.feature_diagonal(feature.module) for feature in optimizer.features],
                "gates": [feature.grad for feature in optimizer.features],
                "outputs": [[one for one, _ in feature._outputs] for feature in resetting.features],
                "gradients": [p.grad for p in model.parameters()],
                "monitored": monitor.snapshot(),
            }
        )

    before = state()
    assert all(before.values())
    utility.second_order(model, criterion, torch.randn(3, 4), torch.randint(2, (3,)), of=of)
    torch.testing.assert_close(state(), before, rtol=0, atol=0)


def test_second_order_takes_no_part_of_a_step():
    """… as hooks on parameters may do."""
    model, criterion = MLP((4, 5, 2)), nn.CrossEntropyLoss()
    seen = []
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(seen.append)
    utility.second_order(model, criterion, torch.randn(3, 4), torch.randint(2, (3,)))
    assert not seen
    assert all(parameter.grad is None for parameter in model.parameters())


def test_second_order_of_a_module_that_keeps_what_it_computed():
    class Keeping(nn.Module):
        def __init__(self):
            super().__init__()
            self.body, self.act, self.head = nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)
            self.register_buffer("mean", torch.zeros(4))
            self.kept = {}

        def forward(self, x):
            self.hidden = self.act(self.body(x))
            self.kept = {"all": [self.hidden]}
            return self.head(self.hidden)

    torch.manual_seed(0)
    model, sample = Keeping(), (nn.CrossEntropyLoss(), torch.randn(3, 3), torch.tensor([0, 1, 1]))
    plain = nn.Sequential(model.body, model.act, model.head)
    model(sample[1])
    kept = model.hidden
    assert not kept.is_leaf
    ours, theirs = utility.second_order(model, *sample), utility.second_order(plain, *sample)
    for one, other in zip(ours.values(), theirs.values(), strict=True):
        assert torch.equal(one, other)
    assert utility.second_order(model, *sample, of="features").keys() == {"act"}


class Locked:
    """An object that cannot be copied."""

    def __init__(self):
        self.lock, self.seen = threading.Lock(), []

    def keep(self, module, inputs, output):
        self.seen.append(output)


def test_second_order_shares_what_cannot_be_copied():
    torch.manual_seed(0)
    sample = nn.CrossEntropyLoss(), torch.randn(3, 4), torch.tensor([0, 1, 1])
    model = MLP((4, 5, 2))
    before = utility.second_order(model, *sample)
    locked = Locked()
    model.lock, model.history = threading.Lock(), locked
    model.register_forward_hook(locked.keep)
    model(sample[1])
    after = utility.second_order(model, *sample)
    assert len(locked.seen) > 1  # as in any other forward pass
    assert all(torch.equal(after[name], before[name]) for name in before)
