"""Optimizers derived from methods."""

import pytest
import torch
from optimizer_cases import Example, backward, network, train
from torch import nn

import upgd
from upgd.methods import METHODS, Method, Setting
from upgd.optim.from_method import MethodOptimizer
from upgd.optim.unit_method import UnitMethodOptimizer

PUBLIC = {
    "sgd": (upgd.PGD, {}),
    "sgdw": (upgd.PGD, {"weight_decay": 0.1}),
    "pgd": (upgd.PGD, {"sigma": 0.1}),
    "anti-pgd": (upgd.PGD, {"sigma": 0.1}),
    "shrink-and-perturb": (upgd.ShrinkAndPerturb, {"sigma": 0.1, "weight_decay": 0.1}),
    "upgd": (upgd.UPGD, {"sigma": 0.1, "weight_decay": 0.1}),
    "upgd-nonprotecting": (upgd.UPGD, {"sigma": 0.1, "noise": "anticorrelated", "scaling": "local"}),
    "ups": (upgd.UPS, {"sigma": 0.1, "beta_utility": 0.5}),
    "adamw": (torch.optim.AdamW, {"betas": (0.5, 0.9), "eps": 1e-4, "weight_decay": 0.1}),
    "adaupgd": (upgd.AdaUPGD, {"sigma": 0.1, "betas": (0.5, 0.9), "scaling": "local"}),
}


class Plain(Method):
    """Without state, reductions or step count."""

    name = "example-plain"

    def update(self, w, g, h):
        return w - h.lr * g


class LargestGradient(Method):
    """Steps that are relative to the largest gradient of all parameters."""

    name = "example-largest-gradient"
    reductions = {"largest": ("max", "learner")}  # noqa: RUF012

    def observe(self, g):
        return {}, {"largest": g.abs()}

    def update(self, w, g, h, r):
        return w - h.lr * g / r.largest


class LastTwo(Method):
    """Returns one state as another."""

    name = "example-last-two"
    state = {"last": "zeros", "before": "zeros"}  # noqa: RUF012

    def update(self, w, g, s, h):
        return w - h.lr * (g + s.last + s.before), {"last": g, "before": s.last}


class Newton(Method):
    name = "example-newton"

    def update(self, w, g, h, curvature):
        return w - h.lr * g / (curvature.abs() + 1)


class Resetting(Method):
    name = "example-resetting"

    def update(self, w, g, h):
        return w - h.lr * g

    def reset_units(self, units, s, h, t, draw):
        raise AssertionError


def test_every_public_class_is_returned() -> None:
    assert {name for name in METHODS if METHODS[name].__module__.startswith("upgd.")} >= PUBLIC.keys()
    for name, (cls, settings) in PUBLIC.items():
        optimizer = upgd.methods.optimizer(name, network().parameters(), lr=0.1, **settings)
        assert type(optimizer) is cls
        assert {key: optimizer.defaults[key] for key in settings} == settings


@pytest.mark.parametrize("maximize", [False, True])
@pytest.mark.parametrize("name", PUBLIC)
def test_the_rule_gives_what_the_public_class_gives(name: str, maximize: bool) -> None:
    """With noise: both draw it in the same order."""
    models = network(torch.float64), network(torch.float64)
    settings = {"lr": 0.02, "maximize": maximize, **PUBLIC[name][1]}
    public = upgd.methods.optimizer(name, models[0].parameters(), **settings)
    derived = MethodOptimizer(models[1].parameters(), METHODS[name], **settings)
    for model, optimizer in zip(models, (public, derived), strict=True):
        for step in range(10):
            optimizer.zero_grad()
            backward(model, seed=step)
            torch.manual_seed(step)
            optimizer.step()
    for a, b in zip(*(model.parameters() for model in models), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-14)
    if hasattr(public, "gates"):
        ours = derived.gates()
        for (_, gate), param in zip(public.gates().items(), models[1].parameters(), strict=False):
            torch.testing.assert_close(ours[param], gate, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("name", ["upgd", "adaupgd", "upgd-nonprotecting"])
def test_second_order(name: str) -> None:
    models = network(torch.float64), network(torch.float64)
    criteria = nn.CrossEntropyLoss(), nn.CrossEntropyLoss()
    curvatures = [upgd.HesScale(model, criterion) for model, criterion in zip(models, criteria, strict=True)]
    public = upgd.methods.optimizer(name, models[0].parameters(), lr=0.1, sigma=0.0, curvature=curvatures[0])
    derived = MethodOptimizer(
        models[1].parameters(), METHODS[name], lr=0.1, sigma=0.0, order=2, curvature=curvatures[1]
    )
    generator = torch.Generator().manual_seed(0)
    for _ in range(5):
        x, y = torch.randn(3, 1, 6, 6, generator=generator, dtype=torch.float64), torch.tensor([0, 1, 3])
        for model, criterion, optimizer in zip(models, criteria, (public, derived), strict=True):
            optimizer.zero_grad()
            criterion(model(x), y).backward()
            optimizer.step()
    for a, b in zip(*(model.parameters() for model in models), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-14)


def test_groups_have_their_own_settings_and_one_reduction() -> None:
    params = [nn.Parameter(torch.zeros(2, dtype=torch.float64)), nn.Parameter(torch.zeros(3))]
    optimizer = MethodOptimizer(
        [{"params": params[:1], "lr": 1.0}, {"params": params[1:], "lr": 10.0}], LargestGradient
    )
    params[0].grad, params[1].grad = torch.ones(2, dtype=torch.float64), torch.tensor([4.0, 2.0, -1.0])
    optimizer.step()
    assert params[0].tolist() == [-0.25, -0.25]
    assert params[1].tolist() == [-10.0, -5.0, 2.5]


def test_groups_choose_variants() -> None:
    """A unit's norm in one group, that of all parameters in the other."""
    params = [nn.Parameter(torch.zeros(1, 2, dtype=torch.float64)) for _ in range(2)]
    options = {"lr": 1.0, "betas": (0.0, 0.5), "strength": 0.0}
    optimizer = MethodOptimizer(
        [{"params": params[:1]}, {"params": params[1:], "scaling": "local"}], Example, **options
    )
    for param in params:
        param.grad = torch.tensor([[3.0, 4.0]], dtype=torch.float64)
    optimizer.step()
    for param, norm in zip(params, (50**0.5, 5.0), strict=True):
        expected = -(3 + 0.5 * 3 / (1 + norm + 4))
        assert param[0, 0].item() == pytest.approx(expected, rel=1e-14)


def test_a_group_without_gates() -> None:
    models = network(torch.float64), network(torch.float64)

    def groups(model: nn.Module) -> list[dict]:
        first, *others = model.parameters()
        return [{"params": [first], "gated": False}, {"params": others}]

    public = upgd.AdaUPGD(groups(models[0]), lr=0.01, sigma=0.0)
    derived = MethodOptimizer(groups(models[1]), METHODS["adaupgd"], lr=0.01, sigma=0.0)
    train(models[0], public, 5)
    train(models[1], derived, 5)
    for a, b in zip(*(model.parameters() for model in models), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-14)
    assert len(derived.gates()) == len(public.gates()) == 5
    with pytest.raises(ValueError, match="gated must be True or False, but it is 'hidden'"):
        MethodOptimizer([{"params": models[0].parameters(), "gated": "hidden"}], METHODS["upgd"], lr=0.1)


def test_a_state_handed_on_is_not_overwritten_before() -> None:
    param = nn.Parameter(torch.zeros(1))
    optimizer = MethodOptimizer([param], LastTwo, lr=1.0)
    for gradient in (1.0, 10.0, 100.0):
        param.grad = torch.tensor([gradient])
        optimizer.step()
    assert param.item() == -(1 + 11 + 111)
    assert (optimizer.state[param]["last"].item(), optimizer.state[param]["before"].item()) == (100.0, 10.0)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_state_of_16_bit_parameters_has_32(dtype: torch.dtype) -> None:
    model = network(dtype)
    optimizer = MethodOptimizer(model.parameters(), Example, lr=0.01)
    train(model, optimizer, 2)
    again = MethodOptimizer(model.parameters(), Example, lr=0.01)
    again.load_state_dict(optimizer.state_dict())
    for param in model.parameters():
        for name in ("momentum", "start"):
            assert again.state[param][name].dtype == torch.float32
            assert torch.equal(again.state[param][name], optimizer.state[param][name])


def test_a_method_without_state_keeps_none() -> None:
    model = network()
    optimizer = MethodOptimizer(model.parameters(), Plain, lr=0.1)
    train(model, optimizer, 2)
    assert not optimizer.state
    assert optimizer.gates() == {}


def test_a_tensor_lr_may_be_changed_in_place_and_have_a_dimension() -> None:
    model, untouched = network(), network()
    lr = torch.tensor([0.5])
    optimizer = MethodOptimizer(model.parameters(), Example, lr=lr)
    lr.zero_()
    train(model, optimizer, 2)
    for a, b in zip(model.parameters(), untouched.parameters(), strict=True):
        assert torch.equal(a, b)


def test_curvature_reaches_a_rule_that_names_it() -> None:
    model = nn.Sequential(nn.Linear(3, 2)).double()
    criterion = nn.MSELoss()
    curvature = upgd.HesScale(model, criterion)
    optimizer = MethodOptimizer(model.parameters(), Newton, lr=0.1, curvature=curvature)
    before = model[0].weight.detach().clone()
    criterion(model(torch.ones(1, 3, dtype=torch.float64)), torch.zeros(1, 2, dtype=torch.float64)).backward()
    expected = before - 0.1 * model[0].weight.grad / (curvature.diagonal(model[0].weight).abs() + 1)
    optimizer.step()
    torch.testing.assert_close(model[0].weight.detach(), expected, rtol=1e-14, atol=0)


def test_repr_names_the_method() -> None:
    assert repr(MethodOptimizer(network().parameters(), Plain, lr=0.1)).startswith("MethodOptimizer (example-plain")


@pytest.mark.parametrize(
    ("name", "settings", "sentence"),
    [
        ("upgdd", {}, r"there is no method 'upgdd'; did you mean 'upgd'\?"),
        ("sgd", {"sigma": 0.1}, r"sigma=0\.1 does not apply to method='sgd', which takes lr; leave it out"),
        ("sgdw", {"lr": 0.1}, r"method='sgdw' needs weight_decay; give it a value, such as weight_decay=0\.01"),
        ("upgd", {"normalize": 0.99}, r"put upgd\.OnlineNorm\(shape, rate\) in front of the model"),
        ("upgd", {"gated": "hidden"}, r"gated='hidden' names layers.*\"gated\": False"),
        ("upgd", {"granularity": "feature"}, r"works on hidden units, so it needs the model.*optimizer\('upgd', model"),
        ("upgd", {"order": 2}, r"order=2 needs curvature; pass curvature=upgd\.HesScale"),
        ("sgd", {"lr": 0.1, "curvature": upgd.HesScale(network(), nn.CrossEntropyLoss())}, "does not use curvature"),
        (
            "adamw",
            {"generator": torch.Generator()},
            "generator is not an option of AdamW, the optimizer of method='adamw'",
        ),
        ("ups-even", {}, r"method='ups-even' needs lr; give it a value, such as lr=1\.0"),
        ("ups-even", {"lr": 1.0, "granularity": "feature"}, "works on hidden units, so it needs the model"),
        ("redo", {"lr": 1.0}, r"use upgd\.methods\.optimizer\('redo', model"),
        ("weight-clipping", {"lr": 1.0}, r'pass the model instead of its parameters, or groups.*"bound": 0\.05'),
        ("weight-clipping", {"lr": 1.0, "bound": 0}, "bound must be a positive number, or None"),
        ("sgd", {"lr": 1.0, "bound": 0.1}, r"bound=0\.1 does not apply to method='sgd'"),
        ("sgd", {"lr": 1.0, "features": {}}, "features is not an option of PGD"),
        ("ups-even", {"lr": 1.0, "foreach": True}, "foreach is not an option of an optimizer for method='ups-even'"),
    ],
)
def test_mistakes(name: str, settings: dict, sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence) as error:
        upgd.methods.optimizer(name, network().parameters(), **settings)
    assert "\n" not in str(error.value)


def test_methods_that_an_optimizer_cannot_run() -> None:
    params = list(network().parameters())
    with pytest.raises(ValueError, match="works on hidden units, so it needs the model"):
        MethodOptimizer(params, Resetting, lr=0.1)
    with pytest.raises(ValueError, match=r"needs curvature; pass curvature=upgd\.HesScale"):
        MethodOptimizer(params, Newton, lr=0.1)

    class Counting(Method):
        name = "example-counting"
        state = {"step": "zeros"}  # noqa: RUF012

        def update(self, w, g, h):
            return w

    with pytest.raises(ValueError, match="has a state named 'step', which optimizers use; give it another name"):
        MethodOptimizer(params, Counting, lr=0.1)

    class Undeclared(Method):
        name = "example-undeclared"
        speed = Setting(0.1)

        def update(self, w, g, h):
            return w, {"momentum": g}

    optimizer = MethodOptimizer(params, Undeclared, lr=0.1)
    params[0].grad = torch.zeros_like(params[0])
    with pytest.raises(ValueError, match="changes a state 'momentum' that it does not declare"):
        optimizer.step()


def test_a_rule_that_loses_its_state_is_refused() -> None:
    def assigning(self, w, g, s, h):
        s.v = s.v + g
        return w - h.lr * s.v

    for update, message in (
        (assigning, "a rule cannot assign to s.v; return the changed state instead, as {'v': value}"),
        (lambda self, w, g, s: (w, s.v + g), "must return the new parameter, or "),
    ):
        losing = type("Losing", (Method,), {"name": "losing", "state": {"v": "zeros"}, "update": update})
        param = nn.Parameter(torch.ones(2))
        param.grad = torch.ones(2)
        with pytest.raises(ValueError, match=message):
            MethodOptimizer([param], losing, lr=0.1).step()


@pytest.mark.parametrize(
    ("update", "what"),
    [
        (lambda self, w, g, h: w - torch.sqrt(h.lr) * g, r"torch\.sqrt with a float"),
        (lambda self, w, g, h, t: torch.where(t % 2 == 0, w, w - h.lr * g), r"torch\.where with a bool"),
        (lambda self, w, g, h, t: w - h.lr * torch.clamp(t / 20, max=1.0) * g, r"torch\.clamp with a float"),
    ],
)
def test_functions_of_torch_do_not_take_plain_numbers(update, what: str) -> None:
    param = nn.Parameter(torch.ones(2))
    optimizer = MethodOptimizer([param], type("Numbers", (Method,), {"name": "numbers", "update": update}), lr=0.1)
    param.grad = torch.ones(2)
    with pytest.raises(
        TypeError,
        match=f"method='numbers' calls {what} in place of a tensor; h and t are plain numbers.*use arithmetic",
    ):
        optimizer.step()


def test_other_type_errors_of_a_rule_are_raised() -> None:
    param = nn.Parameter(torch.ones(2))
    made = type("Wrong", (Method,), {"name": "wrong", "update": lambda self, w, g, h: w + "text"})
    param.grad = torch.ones(2)
    with pytest.raises(TypeError, match="unsupported operand"):
        MethodOptimizer([param], made, lr=0.1).step()


def test_a_checkpoint_of_another_shape_is_refused() -> None:
    small, large = nn.Linear(2, 2), nn.Linear(3, 2)
    optimizer = MethodOptimizer(small.parameters(), Example, lr=0.1)
    small(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    with pytest.raises(ValueError, match=r"of shape \(2, 2\) for a parameter of shape \(2, 3\).*same model"):
        MethodOptimizer(large.parameters(), Example, lr=0.1).load_state_dict(optimizer.state_dict())


# ------------------------------------------------------------------------------------------ methods that need the model


def test_the_bound_is_that_of_the_model_or_of_a_group() -> None:
    model = nn.Sequential(nn.Linear(4, 3), nn.LayerNorm(3), nn.ReLU(), nn.Linear(3, 2))
    optimizer = upgd.methods.optimizer("weight-clipping", model, lr=1.0, clip=0.5)
    assert sorted((group["bound"] or 0, len(group["params"])) for group in optimizer.param_groups) == [
        (0, 2),  # LayerNorm is initialized to a constant, and not clipped
        (0.5, 2),
        (pytest.approx(3**-0.5), 2),
    ]
    for param in model.parameters():
        param.grad = torch.full_like(param, -10.0)
    optimizer.step()
    assert model[0].weight.unique().item() == model[0].bias.unique().item() == 0.25
    assert model[3].weight.unique().item() == pytest.approx(0.5 * 3**-0.5)
    assert model[1].weight.unique().item() == 11
    again = upgd.methods.optimizer("weight-clipping", model, lr=1.0, clip=0.5)
    again.load_state_dict(optimizer.state_dict())

    table = nn.Embedding(5, 2)
    with pytest.raises(ValueError, match=r"of 'weight', of a Embedding, has no known bound.*\"bound\": 0\.05"):
        upgd.methods.optimizer("weight-clipping", table, lr=0.1)
    optimizer = upgd.methods.optimizer("weight-clipping", [{"params": table.parameters(), "bound": 0.1}], lr=1.0)
    table.weight.grad = torch.ones(5, 2) * 10
    optimizer.step()
    assert torch.equal(table.weight, torch.full((5, 2), -0.2))


def test_noise_at_the_scale_of_the_initial_distribution() -> None:
    model = nn.Sequential(nn.Linear(100, 100), nn.LayerNorm(100))
    optimizer = upgd.methods.optimizer("shrink-and-perturb-init", model, lr=1.0, sigma=1.0, weight_decay=1.0)
    for param in model.parameters():
        param.grad = torch.zeros_like(param)
    optimizer.step()  # only the noise is left
    assert model[0].weight.std().item() == pytest.approx(0.1 / 3**0.5, rel=0.05)
    assert not model[1].weight.any()


@pytest.mark.parametrize("scaling", ["global", "local"])
@pytest.mark.parametrize("name", ["upgd", "ups"])
def test_units_by_the_rule_are_those_of_the_public_class(name: str, scaling: str) -> None:
    """Batches of several samples, with noise."""
    models = network(torch.float64), network(torch.float64)
    settings = {"lr": 0.1, "sigma": 0.1, "scaling": scaling, "beta_utility": 0.9}
    public = upgd.methods.optimizer(name, models[0], granularity="feature", **settings)
    assert type(public) is (upgd.FeatureUPS if name == "ups" else upgd.FeatureUPGD)
    derived = UnitMethodOptimizer(models[1], METHODS[name], granularity="feature", **settings)
    for model, optimizer in zip(models, (public, derived), strict=True):
        for step in range(5):
            optimizer.zero_grad()
            backward(model, seed=step)
            torch.manual_seed(step)
            optimizer.step()
    for a, b in zip(*(model.parameters() for model in models), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-14)
    ours = [derived.gates()[feature.params[0]] for feature in derived.features]
    for one, other in zip(ours, public.gates().values(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-14)


def test_gates_of_the_authors_are_those_of_the_step() -> None:
    """w = −2 + lr·(1 − ū) for a gradient of −1, with ū compared with a maximum that has no bias correction."""
    param = nn.Parameter(torch.tensor([[-2.0, 1.0]], dtype=torch.float64))
    optimizer = upgd.methods.optimizer("upgd", [param], lr=1.0, sigma=0.0, beta_utility=0.9, profile="authors")
    for step in (1, 2):
        before = param.detach().clone()
        param.grad = torch.tensor([[-1.0, -1.0]], dtype=torch.float64)
        optimizer.step()
        (gate,) = optimizer.gates().values()
        torch.testing.assert_close(before + 1 - gate, param.detach(), rtol=0, atol=1e-12, msg=f"step {step}")


def test_state_of_units_survives_a_checkpoint_and_16_bits() -> None:
    model = network(torch.bfloat16)
    settings = {"lr": 0.1, "replacement_rate": 0.5, "maturity": 2}
    optimizer = upgd.methods.optimizer("continual-backprop", model, **settings)
    train(model, optimizer, 2)
    resumed = upgd.methods.optimizer("continual-backprop", model, **settings)
    resumed.load_state_dict(optimizer.state_dict())
    for feature in resumed.features:
        own, saved = (one.state[feature.params[0]] for one in (resumed, optimizer))
        assert own["age"].unique().item() == 2
        assert own["contribution"].dtype == torch.float32
        assert torch.equal(own["contribution"], saved["contribution"])
        assert own["due"].shape == (1,)
    train(model, resumed, 2)
    assert any((resumed.state[feature.params[0]]["age"] == 0).any() for feature in resumed.features)


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.last = nn.Linear(3, 4), nn.Linear(4, 4), nn.Linear(4, 2)
        self.act1, self.act2 = nn.ReLU(), nn.ReLU()

    def forward(self, x):
        h = self.act1(self.first(x))
        return self.last(h + self.act2(self.second(h)))


def test_units_that_enter_several_layers_are_refused_unless_left_out() -> None:
    model = Residual()
    optimizer = upgd.methods.optimizer("redo", model, lr=0.1)
    model(torch.ones(2, 3)).sum().backward()
    with pytest.raises(RuntimeError, match=r"outgoing weights of the features of 'first'.*2 layers take them"):
        optimizer.step()
    optimizer = upgd.methods.optimizer("redo", model, lr=0.1, features={"second": "act2"})
    model(torch.ones(2, 3)).sum().backward()
    optimizer.step()


def test_a_step_without_activations_is_refused() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))
    optimizer = upgd.methods.optimizer("redo", model, lr=0.1)
    optimizer.step()  # nothing to do
    for param in model.parameters():
        param.grad = torch.ones_like(param)
    with pytest.raises(RuntimeError, match="no hidden units were seen since the last step"):
        optimizer.step()
