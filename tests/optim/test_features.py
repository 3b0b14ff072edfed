"""Detection of features, their recorded values, and error messages."""

import copy
import re

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import upgd
from upgd import rules
from upgd.curvature import Gate, Residual
from upgd.networks import MLP, ConvNet


def conv_net(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(
        *(nn.Conv2d(2, 4, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(4, 3, 2), nn.Tanh(), nn.Flatten()),
        *(nn.Linear(3, 5), nn.LeakyReLU(), nn.Linear(5, 2)),
    ).double()


def images(batch: int = 3, seed: int = 1) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(batch, 2, 6, 6, generator=generator, dtype=torch.float64), torch.arange(batch) % 2


def gated(model: nn.Sequential) -> tuple[nn.Sequential, list[Gate]]:
    """Return the same network with actual gates after its activations."""
    modules: list[nn.Module] = []
    for before, module in zip([None, *model], model, strict=False):
        modules.append(module)
        if isinstance(module, nn.ReLU | nn.Tanh | nn.LeakyReLU):
            modules.append(Gate(before.weight.shape[0]).double())
    return nn.Sequential(*modules), [m for m in modules if isinstance(m, Gate)]


@pytest.mark.parametrize("order", [1, 2])
@pytest.mark.parametrize("scaling", ["global", "local"])
def test_units_and_channels_as_with_real_gates(order: int, scaling: str) -> None:
    """Ten steps on a convolutional network, compared with a copy in which gates are parameters."""
    model, (truth, gates) = conv_net(), gated(conv_net())
    hidden = [truth[0], truth[4], truth[8]]
    criteria = nn.CrossEntropyLoss(), nn.CrossEntropyLoss()
    curvature = upgd.HesScale(truth, criteria[1])
    options = {"curvature": upgd.HesScale(model, criteria[0])} if order == 2 else {}
    optimizer = upgd.FeatureUPGD(model, 0.1, beta_utility=0.9, sigma=0.0, weight_decay=0.01, scaling=scaling, **options)
    traces = [torch.zeros_like(gate.weight) for gate in gates]
    for step in range(1, 11):
        x, y = images(seed=step)
        optimizer.zero_grad()
        truth.zero_grad()
        criteria[0](model(x), y).backward()
        criteria[1](truth(x), y).backward()
        for feature, gate in zip(optimizer.features, gates, strict=True):
            torch.testing.assert_close(feature.grad, gate.weight.grad, rtol=1e-11, atol=1e-14)
        optimizer.step()
        with torch.no_grad():
            for number, gate in enumerate(gates):
                utility = -gate.weight.grad
                if order == 2:
                    utility = utility + 0.5 * curvature.diagonal(gate.weight)
                traces[number] = 0.9 * traces[number] + 0.1 * utility
            unbiased = [trace / (1 - 0.9**step) for trace in traces]
            largest = torch.cat(unbiased).max()
            useful = [torch.sigmoid(u / (largest if scaling == "global" else u.norm())) for u in unbiased]
            for layer, gate in zip(hidden, useful, strict=True):
                layer.weight.sub_(
                    0.1 * (layer.weight.grad * (1 - gate.view(-1, *[1] * (layer.weight.ndim - 1))))
                    + 0.001 * layer.weight
                )
                layer.bias.sub_(0.1 * layer.bias.grad * (1 - gate) + 0.001 * layer.bias)
            for param in truth[-1].parameters():
                param.sub_(0.1 * param.grad + 0.001 * param)
        for layer, gate in zip((model[0], model[3], model[6]), useful, strict=True):
            torch.testing.assert_close(optimizer.gates()[layer.weight], gate, rtol=1e-10, atol=1e-13)
    theirs = [p for module in truth if not isinstance(module, Gate) for p in module.parameters()]
    for a, b in zip(model.parameters(), theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-13)


@pytest.mark.parametrize("order", [1, 2])
def test_a_sample_without_a_batch_is_a_batch_of_one(order: int) -> None:
    sample = {
        ConvNet: torch.randn(3, 32, 32, dtype=torch.float64),
        MLP: torch.randn(3, dtype=torch.float64),
    }
    for build in (lambda: MLP((3, 4, 5, 2)).double(), lambda: ConvNet((3, 32, 32), 2).double()):
        models = []
        for batched in (False, True):
            models.append(build())
            x, y = sample[type(models[-1])], torch.tensor(1)
            criterion = nn.CrossEntropyLoss()
            curvature = upgd.HesScale(models[-1], criterion) if order == 2 else None
            optimizer = upgd.FeatureUPGD(models[-1], 0.1, sigma=0.0, curvature=curvature)
            for _ in range(2):
                optimizer.zero_grad()
                outputs = models[-1](x[None] if batched else x)
                criterion(outputs, y[None] if batched else y).backward()
                optimizer.step()
        for single, batch in zip(models[0].parameters(), models[1].parameters(), strict=True):
            torch.testing.assert_close(single, batch)


def test_the_model_is_unaware_of_gates() -> None:
    model = conv_net()
    before = {name: value.shape for name, value in model.state_dict().items()}
    optimizer = upgd.FeatureUPGD(model)
    F.cross_entropy(model(images()[0]), images()[1]).backward()
    optimizer.step()
    assert {name: value.shape for name, value in model.state_dict().items()} == before
    assert [p for group in optimizer.param_groups for p in group["params"]] == list(model.parameters())
    assert optimizer.state_dict()["param_groups"][0]["param_names"] == [name for name, _ in model.named_parameters()]
    assert optimizer.state[model[0].weight]["utility"].shape == (4,)
    optimizer.remove()
    assert not any(module._forward_hooks for module in model.modules())


def test_the_output_layer_gets_plain_gradient_descent_without_noise() -> None:
    for build in (upgd.FeatureUPGD, upgd.FeatureUPS):
        model = conv_net()
        optimizer = build(model, 0.1, sigma=1.0)
        F.cross_entropy(model(images()[0]), images()[1]).backward()
        expected = [p - 0.1 * p.grad for p in model[-1].parameters()]
        hidden = model[0].weight.detach().clone()
        optimizer.step()
        for param, value in zip(model[-1].parameters(), expected, strict=True):
            torch.testing.assert_close(param, value)
        assert not torch.allclose(model[0].weight, hidden, atol=1e-3)


@pytest.mark.parametrize(
    ("body", "shape"),
    [
        ([nn.Conv2d(1, 4, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten()], (4, 1, 5, 5)),
        ([nn.Conv1d(1, 4, 3), nn.AdaptiveAvgPool1d(1), nn.Flatten()], (4, 1, 5)),
        ([nn.Conv2d(1, 4, 2), nn.Flatten(2)], (4, 1, 3, 3)),
    ],
    ids=["pooled in two dimensions", "pooled in one", "positions flattened"],
)
@pytest.mark.parametrize("order", [1, 2])
def test_channels_that_were_flattened_are_still_channels(
    body: list[nn.Module], shape: tuple[int, ...], order: int
) -> None:
    """All sizes are four, so that only the numbers reveal a wrong dimension."""
    torch.manual_seed(0)
    x, y, criterion = torch.randn(shape, dtype=torch.float64), torch.arange(4) % 2, nn.CrossEntropyLoss()
    head = nn.Sequential(nn.Flatten(), nn.Linear(nn.Sequential(*body).double()(x)[0].numel(), 2))
    truth = copy.deepcopy(nn.Sequential(*body, nn.Tanh(), Gate(4), head).double())
    model = copy.deepcopy(nn.Sequential(*(m for m in truth if not isinstance(m, Gate))))
    curvature = upgd.HesScale(model, criterion) if order == 2 else None
    optimizer = upgd.FeatureUPGD(model, 0.1, sigma=0.0, curvature=curvature)
    criterion(truth(x), y).backward()
    criterion(model(x), y).backward()
    torch.testing.assert_close(optimizer.features[0].grad, truth[len(body) + 1].weight.grad)
    optimizer.step()
    assert optimizer.gates()[model[0].weight].shape == (4,)


@pytest.mark.parametrize(
    ("model", "shape"),
    [
        (nn.Sequential(nn.Conv2d(1, 4, 3), nn.Flatten(), nn.ReLU(), nn.Linear(36, 2)), (2, 36)),
        (nn.Sequential(nn.Conv2d(1, 4, 3), nn.Flatten(0), nn.ReLU(), nn.Linear(72, 2)), (72,)),
        (nn.Sequential(nn.Linear(5, 3), nn.Flatten(), nn.ReLU(), nn.Linear(15, 2)), (2, 15)),
    ],
)
def test_indistinguishable_channels_are_refused(model: nn.Module, shape: tuple[int, ...]) -> None:
    _optimizer = upgd.FeatureUPGD(model)
    x = torch.ones(2, 1, 5, 5) if isinstance(model[0], nn.Conv2d) else torch.ones(2, 5, 5)
    with pytest.raises(
        RuntimeError, match=rf"its ReLU returns the shape {re.escape(str(shape))}.*before the module that merges them"
    ):
        model(x)


def test_hooks_on_convolutions_are_taken_off_too() -> None:
    model = conv_net()
    upgd.FeatureUPGD(model).remove()
    assert not any(module._forward_hooks for module in model.modules())


def test_parametrized_layers_are_refused() -> None:
    """Their weights are parameters of another module, and would be silently ignored."""
    norm = nn.utils.parametrizations.weight_norm
    model = nn.Sequential(norm(nn.Linear(3, 4)), nn.ReLU(), nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 2))
    message = r"features of '0' are computed from other parameters.*remove_parametrizations"
    with pytest.raises(TypeError, match=message):
        upgd.FeatureUPGD(model)
    with pytest.raises(TypeError, match=message):
        upgd.FeatureUPGD(model, features={"0": "1"})
    optimizer = upgd.FeatureUPGD(model, features={"2": "3"})
    assert [feature.name for feature in optimizer.features] == ["2"]
    model(torch.ones(2, 3)).sum().backward()
    optimizer.step()
    # The output layer has no hidden features.
    last = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), norm(nn.Linear(4, 2)))
    assert [feature.name for feature in upgd.FeatureUPGD(last).features] == ["0"]


def test_layers_that_share_a_parameter_are_refused() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2))
    model[2].weight = model[0].weight
    with pytest.raises(ValueError, match=r"layers '0' and '2' share a parameter.*leave one of them out"):
        upgd.FeatureUPGD(model)
    upgd.FeatureUPGD(model, features={"0": "1"})


def test_a_step_without_curvature_changes_nothing() -> None:
    class Partial:
        def diagonal(self, param: Tensor) -> Tensor:
            raise NotImplementedError

        def feature_diagonal(self, module: nn.Module) -> Tensor:
            if module is model[3]:
                raise RuntimeError("no diagonal")
            return torch.ones(4)

        def watch(self, *modules: nn.Module) -> None: ...

    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2))
    optimizer = upgd.FeatureUPGD(model, curvature=Partial())
    model(torch.ones(1, 4)).sum().backward()
    with pytest.raises(RuntimeError, match="no diagonal"):
        optimizer.step()
    assert not optimizer.state


@pytest.mark.parametrize("foreach", [False, None])
def test_search_does_not_multiply_infinite_gradients_by_zero(foreach: bool | None) -> None:
    model = nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 2))
    optimizer = upgd.FeatureUPS(model, foreach=foreach)
    model(torch.ones(1, 4)).sum().backward()
    model[0].weight.grad[1, 2] = torch.inf
    optimizer.step()
    assert model[0].weight.isfinite().all()


def test_parameters_outside_features_use_plain_gradient_descent() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4), nn.Tanh(), nn.Linear(4, 2)).double()
    optimizer = upgd.FeatureUPGD(model, 0.1, sigma=1.0, weight_decay=0.5)
    model(torch.ones(2, 3, dtype=torch.float64)).square().sum().backward()
    expected = model[1].weight * (1 - 0.05) - 0.1 * model[1].weight.grad
    optimizer.step()
    torch.testing.assert_close(model[1].weight, expected)
    assert [feature.name for feature in optimizer.features] == ["0"]
    assert optimizer.features[0].module is model[2]


def test_pairs_are_found_in_nested_modules() -> None:
    class Block(nn.Module):
        def __init__(self, inputs: int, outputs: int) -> None:
            super().__init__()
            self.fc, self.norm, self.act = nn.Linear(inputs, outputs), nn.BatchNorm1d(outputs), nn.SiLU()

        def forward(self, x: Tensor) -> Tensor:
            return self.act(self.norm(self.fc(x)))

    model = nn.Sequential(nn.Flatten(), Block(3, 4), nn.Sequential(Block(4, 5), nn.Dropout(0.1)), nn.Linear(5, 2))
    optimizer = upgd.FeatureUPGD(model)
    assert [feature.name for feature in optimizer.features] == ["1.fc", "2.0.fc"]
    model(torch.randn(6, 3)).sum().backward()
    optimizer.step()
    assert optimizer.gates()[model[2][0].fc.weight].shape == (5,)
    for network in (MLP((4, 3, 3, 2), "identity"), ConvNet((1, 16, 16), 2, conv_activation=False), residual()):
        optimizer = upgd.FeatureUPGD(network, curvature=upgd.HesScale(network, criterion := nn.CrossEntropyLoss()))
        x = torch.randn(2, 1, 16, 16) if isinstance(network, ConvNet) else torch.randn(2, 4)
        criterion(network(x), torch.tensor([0, 1])).backward()
        optimizer.step()
        assert all(torch.isfinite(p).all() for p in network.parameters())


def residual() -> nn.Module:
    return nn.Sequential(
        nn.Linear(4, 4), nn.Tanh(), Residual(nn.Sequential(nn.Linear(4, 4), nn.ReLU())), nn.Linear(4, 2)
    )


class Functional(nn.Module):
    """Layers and activations are defined in an order that does not reveal their pairs."""

    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.fc2, self.out = nn.Linear(3, 4), nn.Linear(4, 4), nn.Linear(4, 2)
        self.act1, self.act2 = nn.Tanh(), nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.act2(self.fc2(self.act1(self.fc1(x)))))


def test_pairs_may_be_given() -> None:
    results = []
    torch.manual_seed(0)
    original = Functional()
    for how in ("names", "pairs", "modules", "found"):
        model = copy.deepcopy(original)
        by_name = {"fc1": "act1", "fc2": "act2"}
        by_module = {model.fc1: model.act1, model.fc2: model.act2}
        features = {"names": by_name, "pairs": list(by_name.items()), "modules": by_module, "found": None}[how]
        optimizer = upgd.FeatureUPGD(model, 0.1, sigma=0.0, features=features)
        model(torch.ones(2, 3)).square().sum().backward()
        optimizer.step()
        results.append(list(model.parameters()))
    for other in results[1:]:
        torch.testing.assert_close(results[0], other, rtol=0, atol=0)
    partly = copy.deepcopy(original)
    optimizer = upgd.FeatureUPGD(partly, 0.1, sigma=0.0, features={"fc2": "act2"})
    partly(torch.ones(2, 3)).square().sum().backward()
    expected = partly.fc1.weight - 0.1 * partly.fc1.weight.grad
    optimizer.step()
    torch.testing.assert_close(partly.fc1.weight, expected)


def test_wrong_pairs_are_noticed() -> None:
    model = Functional()
    optimizer = upgd.FeatureUPGD(model, features={"fc1": "act2", "fc2": "act1"})
    model(torch.ones(2, 3)).sum().backward()
    with pytest.raises(
        RuntimeError, match=r"names the ReLU 'act2' for 'fc1', but it is not called with.*features=\{'fc1'"
    ):
        optimizer.step()


@pytest.mark.parametrize(
    ("features", "message"),
    [
        ({"fc1": "act9"}, "features names 'act9', but the model has no such module"),
        ({"nothing": "act1"}, "features names 'nothing'"),
        ({"act1": "fc1"}, "'act1' is a Tanh"),
        ([("fc1", "act1"), ("fc1", "act2")], "the layer 'fc1' twice"),
        ({}, "empty"),
    ],
)
def test_impossible_pairs_are_refused(features: object, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        upgd.FeatureUPGD(Functional(), features=features)


def test_mistakes_are_explained() -> None:
    with pytest.raises(TypeError, match="pass the model instead of its parameters"):
        upgd.FeatureUPGD(Functional().parameters())
    with pytest.raises(ValueError, match=r"this Linear has 1 and so no hidden features; use the weight-wise optimizer"):
        upgd.FeatureUPGD(nn.Linear(3, 2))
    with pytest.raises(TypeError, match=r"feature_diagonal\(module\)"):
        upgd.FeatureUPGD(conv_net(), curvature=lambda param: param)
    model = conv_net()
    F.cross_entropy(model(images()[0]), images()[1]).backward()
    optimizer = upgd.FeatureUPGD(model)
    with pytest.raises(RuntimeError, match="the parameters of '0' have a gradient, but its features have none"):
        optimizer.step()
    model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Dropout(0.5, inplace=True), nn.Linear(4, 2))
    optimizer = upgd.FeatureUPGD(model)
    with pytest.raises(RuntimeError, match=r"features of '0' were changed in place.*inplace=False"):
        model(torch.ones(2, 3)).sum().backward()


@pytest.mark.parametrize("reset", ["optimizer", "optimizer, zeros", "model", "model, zeros"])
def test_gates_accumulate_as_gradients_do(reset: str) -> None:
    model = conv_net()
    optimizer = upgd.FeatureUPGD(model)
    batches = [images(seed=seed) for seed in range(4)]

    def gradients(*some: tuple[Tensor, Tensor]) -> list[Tensor]:
        for x, y in some:
            F.cross_entropy(model(x), y).backward()
        return [feature.grad for feature in optimizer.features]

    separate = []
    for one in batches:
        optimizer.zero_grad()
        separate.append(gradients(one))
    whose = model if reset.startswith("model") else optimizer
    for first, second in ((0, 1), (2, 3)):
        whose.zero_grad(set_to_none=not reset.endswith("zeros"))
        for total, a, b in zip(
            gradients(batches[first], batches[second]), separate[first], separate[second], strict=True
        ):
            torch.testing.assert_close(total, a + b)
    # Two forward passes, one backward pass.
    optimizer.zero_grad()
    (x, y), (x2, y2) = batches[:2]
    with torch.no_grad():
        model(x)
    (F.cross_entropy(model(x), y) + F.cross_entropy(model(x2), y2)).backward()
    for feature, a, b in zip(optimizer.features, *separate[:2], strict=True):
        torch.testing.assert_close(feature.grad, a + b)


def test_a_scaler_is_divided_out_of_the_gates() -> None:
    models = conv_net(), conv_net()
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=2)
    plain = upgd.FeatureUPGD(models[0], 0.1, sigma=0.0, beta_utility=0.9)
    scaled = upgd.FeatureUPGD(models[1], 0.1, sigma=0.0, beta_utility=0.9, scaler=scaler)
    for step in range(6):
        x, y = images(seed=step)
        for model, optimizer, scale in ((models[0], plain, lambda v: v), (models[1], scaled, scaler.scale)):
            optimizer.zero_grad()
            scale(F.cross_entropy(model(x), y)).backward()
        plain.step()
        scaler.step(scaled)
        scaler.update()
    assert scaler.get_scale() == 32.0
    for a, b in zip(*(m.parameters() for m in models), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-12)


def test_frozen_layers_and_biases() -> None:
    x, y = images()
    model = conv_net()
    model[0].weight.requires_grad_(False)
    model[3].requires_grad_(False)
    optimizer = upgd.FeatureUPGD(model, 0.1)
    before = copy.deepcopy(model.state_dict())
    for _ in range(3):
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
    after = model.state_dict()
    for name in before:
        assert torch.equal(before[name], after[name]) == (name in ("0.weight", "3.weight", "3.bias"))
    assert optimizer.state[model[0].bias]["utility"].shape == (4,)
    assert set(optimizer.gates()) == {model[0].weight, model[6].weight}


def test_there_is_no_nan_without_positive_utilities() -> None:
    """Dead units: all utilities are zero, and every gate is one half."""
    model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))
    nn.init.constant_(model[0].bias, -100.0)
    for scaling in ("global", "local"):
        optimizer = upgd.FeatureUPGD(model, 0.1, scaling=scaling)
        optimizer.zero_grad()
        model(torch.ones(1, 3)).sum().backward()
        optimizer.step()
        assert torch.equal(optimizer.gates()[model[0].weight], torch.full((4,), 0.5))
        assert all(torch.isfinite(p).all() for p in model.parameters())
        optimizer.remove()


def test_groups_may_have_settings_of_their_own() -> None:
    model = conv_net()
    optimizer = upgd.FeatureUPGD(model, 0.1, sigma=0.0)
    extra = nn.Parameter(torch.ones(3, dtype=torch.float64))
    optimizer.add_param_group({"params": [("extra", extra)], "lr": 0.5})
    x, y = images()
    (F.cross_entropy(model(x), y) + extra.sum()).backward()
    optimizer.step()
    torch.testing.assert_close(extra, torch.full((3,), 0.5, dtype=torch.float64))


def test_the_gate_of_the_rule() -> None:
    """gates() is the rule's gate of the unbiased trace."""
    model = conv_net()
    optimizer = upgd.FeatureUPGD(model, sigma=0.0, beta_utility=0.5)
    assert optimizer.gates() == {}
    F.cross_entropy(model(images()[0]), images()[1]).backward()
    grads = [feature.grad for feature in optimizer.features]
    optimizer.step()
    scale = rules.global_scale([-grad for grad in grads])
    for layer, grad in zip((model[0], model[3], model[6]), grads, strict=True):
        torch.testing.assert_close(optimizer.gates()[layer.weight], rules.gate(-grad, scale))


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_gradients_accumulate_even_if_one_sample_gives_none(order):
    """With an input of zeros, only the bias has a gradient."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 1)).double()
    samples = torch.stack([torch.zeros(4), torch.randn(4)]).double()
    curvature = upgd.HesScale(model, nn.MSELoss(reduction="sum"), features=[model[1]])
    optimizer = upgd.FeatureUPGD(model, curvature=curvature)
    for at in order:
        curvature.criterion(model(samples[at : at + 1]), torch.ones(1, 1).double()).backward()
    (summed,), diagonal = (feature.grad for feature in optimizer.features), curvature.feature_diagonal(model[1])
    optimizer.zero_grad()
    curvature.criterion(model(samples), torch.ones(2, 1).double()).backward()
    torch.testing.assert_close(summed, optimizer.features[0].grad)
    torch.testing.assert_close(diagonal, curvature.feature_diagonal(model[1]))


class Skipping(nn.Module):
    """May skip its second layer."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.act_a, self.b, self.act_b = nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4), nn.Tanh()
        self.out = nn.Linear(4, 1)

    def forward(self, x: Tensor, skip: bool) -> Tensor:
        x = self.act_a(self.a(x))
        return self.out(x if skip else self.act_b(self.b(x)))


@pytest.mark.parametrize("whose", ["optimizer", "model"])
def test_features_that_a_pass_leaves_out_have_no_utility_in_it(whose):
    torch.manual_seed(0)
    model, x = Skipping(), torch.randn(3, 4)
    optimizer = upgd.FeatureUPGD(model, beta_utility=0.0)

    def utility(skip: bool) -> Tensor:
        {"optimizer": optimizer, "model": model}[whose].zero_grad(set_to_none=False)
        model(x, skip).sum().backward()
        optimizer.step()
        return optimizer.state[model.b.weight]["utility"].clone()

    first = utility(skip=False)
    assert first.any()
    assert not utility(skip=True).any()
    assert utility(skip=False).any()


def test_an_optimizer_that_could_not_be_made_leaves_no_hooks():
    model, other = (nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 1)) for _ in range(2))
    with pytest.raises(ValueError, match="features must be layers of the model"):
        upgd.FeatureUPGD(model, curvature=upgd.HesScale(other, nn.MSELoss()))
    assert not model[1]._forward_hooks


def test_a_head_for_the_next_task_can_be_added():
    model, head = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 1)), nn.Linear(3, 1)
    optimizer = upgd.FeatureUPGD(model, sigma=0.0)
    optimizer.add_param_group({"params": head.parameters(), "lr": 0.5})
    before = head.bias.item()
    head(model[:2](torch.ones(1, 4))).sum().backward()
    optimizer.step()
    assert head.bias.item() == pytest.approx(before - 0.5)
    assert len({name for group in optimizer.param_groups for name in group["param_names"]}) == 6


@pytest.mark.parametrize("kinds", [(upgd.UPGD, upgd.FeatureUPGD), (upgd.FeatureUPGD, upgd.UPGD)])
def test_the_utility_of_weights_is_not_loaded_as_that_of_features(kinds):
    model = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 1))
    one, other = (kind(model if kind is upgd.FeatureUPGD else model.parameters()) for kind in kinds)
    model(torch.ones(1, 4)).sum().backward()
    one.step()
    with pytest.raises(ValueError, match="of the same kind, for weights or for features"):
        other.load_state_dict(one.state_dict())
    assert not other.state


class Block(nn.Module):
    """A residual block as torchvision writes it: one ReLU, called twice."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(inputs, outputs, 3, padding=1, bias=False), nn.BatchNorm2d(outputs)
        self.relu = nn.ReLU(inplace=True)
        self.conv2, self.bn2 = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False), nn.BatchNorm2d(outputs)
        self.downsample = None
        if inputs != outputs:
            self.downsample = nn.Sequential(nn.Conv2d(inputs, outputs, 1, bias=False), nn.BatchNorm2d(outputs))
        self.seen: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        identity = x if self.downsample is None else self.downsample(x)
        out = self.relu(self.bn1(self.conv1(x)))
        self.seen.append(out)
        out = self.bn2(self.conv2(out))
        out += identity
        out = self.relu(out)
        self.seen.append(out)
        return out


def gate_gradient(output: Tensor) -> Tensor:
    """Return the gradient of a gate on each channel from that of the output."""
    return (output * output.grad).sum((0, 2, 3))


def test_a_residual_block_with_one_relu() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(1, 4, 3), nn.ReLU(inplace=True), Block(4, 4), Block(4, 6), nn.Flatten(), nn.Linear(96, 2)
    ).double()
    optimizer = upgd.FeatureUPGD(model, 0.1, sigma=0.0)
    outputs = model(torch.randn(3, 1, 6, 6, dtype=torch.float64))
    for block in model[2:4]:
        for seen in block.seen:
            seen.retain_grad()
    outputs.square().sum().backward()
    found = {feature.name: feature for feature in optimizer.features}
    assert list(found) == ["0", "2.conv1", "2.conv2", "3.conv1", "3.conv2", "3.downsample.0"]
    for number in (2, 3):
        first, second = model[number].seen
        torch.testing.assert_close(found[f"{number}.conv1"].grad, gate_gradient(first))
        torch.testing.assert_close(found[f"{number}.conv2"].grad, gate_gradient(second))
    torch.testing.assert_close(found["3.downsample.0"].grad, found["3.conv2"].grad)
    assert repr(found["2.conv2"]) == "Feature(4 channels of Conv2d '2.conv2', output of ReLU '2.relu')"
    assert repr(found["2.conv2"]) in repr(optimizer)
    optimizer.step()
    assert optimizer.gates().keys() == {feature.layer.weight for feature in found.values()}


class ActorCritic(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 6), nn.Tanh())
        self.policy, self.value = nn.Linear(6, 3), nn.Linear(6, 1)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        hidden = self.body(x)
        return self.policy(hidden), self.value(hidden)


def test_two_heads() -> None:
    torch.manual_seed(0)
    model = ActorCritic()
    optimizer = upgd.FeatureUPGD(model, 0.1, sigma=1.0)
    policy, value = model(torch.randn(5, 4))
    (policy.square().mean() + value.square().mean()).backward()
    assert [feature.name for feature in optimizer.features] == ["body.0", "body.2"]
    expected = [head.weight - 0.1 * head.weight.grad for head in (model.policy, model.value)]
    optimizer.step()
    torch.testing.assert_close([model.policy.weight, model.value.weight], expected)


def test_one_activation_module_for_all_layers() -> None:
    torch.manual_seed(0)
    shared = nn.Tanh()
    one = nn.Sequential(nn.Linear(3, 4), shared, nn.Linear(4, 4), shared, nn.Linear(4, 2))
    many = copy.deepcopy(one)
    many[3] = nn.Tanh()
    optimizers = upgd.FeatureUPGD(one, 0.1, sigma=0.0), upgd.FeatureUPGD(many, 0.1, sigma=0.0)
    for _ in range(3):
        for model, optimizer in zip((one, many), optimizers, strict=True):
            optimizer.zero_grad()
            model(torch.ones(2, 3)).square().sum().backward()
            optimizer.step()
    torch.testing.assert_close(list(one.parameters()), list(many.parameters()), rtol=0, atol=0)
    named = upgd.FeatureUPGD(one, features={"0": "1", "2": "1"})
    one(torch.ones(2, 3)).sum().backward()
    assert all(feature.grad is not None for feature in named.features)
    second_order = upgd.FeatureUPGD(one, curvature=upgd.HesScale(one, criterion := nn.MSELoss()))
    criterion(one(torch.ones(2, 3)), torch.zeros(2, 2)).backward()
    with pytest.raises(RuntimeError, match="because '1' is called more than once; give each layer its own activation"):
        second_order.step()


def test_a_wrong_guess_from_the_order_of_modules_is_corrected() -> None:
    """The order of torch's TransformerEncoderLayer: the activation between the two layers is defined after both."""

    class Feedforward(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear1, self.linear2, self.activation = nn.Linear(3, 5), nn.Linear(5, 3), nn.GELU()

        def forward(self, x: Tensor) -> Tensor:
            return x + self.linear2(self.activation(self.linear1(x)))

    model = nn.Sequential(Feedforward(), Feedforward(), nn.Linear(3, 2))
    optimizer = upgd.FeatureUPGD(model)
    model(torch.ones(2, 3)).sum().backward()
    optimizer.step()
    assert [(f.name, f.module_name) for f in optimizer.features] == [
        ("0.linear1", "0.activation"),
        ("1.linear1", "1.activation"),
    ]


def test_what_mixes_units_ends_the_search_for_an_activation() -> None:
    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.act, self.first = nn.ReLU(), nn.Linear(4, 4)
            self.query, self.key, self.out = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 2)

        def forward(self, x: Tensor) -> Tensor:
            x = self.act(self.first(x))
            return self.out(self.act(self.query(x) @ self.key(x).T))

    model = Mixed()
    optimizer = upgd.FeatureUPGD(model)
    model(torch.ones(4, 4)).sum().backward()
    optimizer.step()
    assert [feature.name for feature in optimizer.features] == ["first"]


def test_functional_activations_cause_a_warning() -> None:
    class Half(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.fc, self.act, self.out = nn.Conv2d(1, 2, 3), nn.Linear(18, 4), nn.ReLU(), nn.Linear(4, 2)

        def forward(self, x: Tensor) -> Tensor:
            return self.out(self.act(self.fc(F.relu(self.conv(x)).flatten(1))))

    model = Half()
    optimizer = upgd.FeatureUPGD(model)
    with pytest.warns(UserWarning, match=r"output of 'conv' goes through relu as a function.*nn\.ReLU\(\) for F\.relu"):
        model(torch.ones(2, 1, 5, 5)).sum().backward()
    optimizer.step()
    assert [feature.name for feature in optimizer.features] == ["fc"]

    class Functions(Half):
        def __init__(self) -> None:
            super().__init__()
            del self.act

    with pytest.raises(ValueError, match=r"model has no activation module, so the features of 'conv'"):
        upgd.FeatureUPGD(Functions())

    class Unused(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.act, self.fc, self.out = nn.ReLU(), nn.Linear(3, 4), nn.Linear(4, 2)

        def forward(self, x: Tensor) -> Tensor:
            return self.out(self.fc(x))

    model = Unused()
    optimizer = upgd.FeatureUPGD(model)
    model(torch.ones(2, 3)).sum().backward()
    with pytest.raises(RuntimeError, match="no activation module was called after any layer"):
        optimizer.step()


def test_the_error_mentions_code_compiled_for_another_model():
    torch._dynamo.reset()
    models = [nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 1)) for _ in range(2)]
    torch.compile(models[0], backend="eager")(torch.ones(1, 4))
    optimizer, monitor = upgd.FeatureUPGD(models[1]), upgd.Monitor(models[1])
    torch.compile(models[1], backend="eager")(torch.ones(1, 4)).sum().backward()
    if optimizer.features[0].grad is not None:
        pytest.skip("this torch compiles a model with other hooks anew")
    with pytest.raises(RuntimeError, match=r"call torch\._dynamo\.reset\(\)"):
        optimizer.step()
    with pytest.warns(UserWarning, match=r"recorded no forward pass.*torch\._dynamo\.reset\(\)"):
        monitor.snapshot()


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"lr": torch.tensor(-1.0)}, "lr must be a number of at least 0"),
        ({"lr": torch.tensor(float("nan"))}, "lr must be a number of at least 0"),
        ({"generator": 3}, "generator must be a torch.Generator"),
    ],
)
def test_arguments_are_checked_before_the_first_step(wrong, says):
    with pytest.raises((ValueError, TypeError), match=says):
        upgd.UPGD(nn.Linear(2, 1).parameters(), **wrong)
