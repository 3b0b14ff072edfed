"""Parameter groups without gates equal a population's layers without gates."""

import copy

import pytest
import torch
from torch import nn

import upgd
from upgd.networks import MLP, reset
from upgd.population import Learner, Population
from upgd.streams import make

STREAM = make("output-permuted-digits", task_length=30)
NETWORK = MLP((64, 8, 6, 10))
STEPS = 60
CLASSES = {
    "upgd": (upgd.UPGD, {}),
    "upgd-nonprotecting": (upgd.UPGD, {"protect_gradient": False}),
    "adaupgd": (upgd.AdaUPGD, {}),
    "ups": (upgd.UPS, {}),
}


def groups(model: nn.Module, gated: str) -> list[dict]:
    """Return the parameters of layers with gates, and those of layers without."""
    output = list(model.layers[-1].parameters())
    hidden = [param for param in model.parameters() if all(param is not other for other in output)]
    return [
        {"params": hidden, "gated": gated == "hidden"},
        {"params": output, "gated": gated == "output"},
    ]


def losses_of_a_loop(model: nn.Module, optimizer: torch.optim.Optimizer, seed: int) -> torch.Tensor:
    chunk = STREAM.chunk([seed], 0, STEPS)
    losses = []
    for x, y in zip(chunk.inputs()[0].double(), chunk.targets[0], strict=True):
        loss = nn.functional.cross_entropy(model(x[None]), y[None])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return torch.stack(losses)


@pytest.mark.parametrize("gated", ["hidden", "output"])
@pytest.mark.parametrize("scaling", ["global", "local"])
@pytest.mark.parametrize("foreach", [False, True])
@pytest.mark.parametrize("method", ["upgd", "upgd-nonprotecting", "adaupgd"])
def test_equals_the_population(method, foreach, scaling, gated):
    settings = {"lr": 0.05, "beta_utility": 0.9, "sigma": 0.0, "scaling": scaling, "weight_decay": 0.01}
    learner = Learner(method=method, gated=gated, seed=4, **settings)
    population = Population(NETWORK, [learner], backend="torch", dtype=torch.float64)
    expected = torch.from_numpy(population.run(STREAM, STEPS, window=1).loss[:, 0])
    model = reset(copy.deepcopy(NETWORK).double(), 4)
    cls, options = CLASSES[method]
    optimizer = cls(groups(model, gated), foreach=foreach, **settings, **options)
    torch.testing.assert_close(losses_of_a_loop(model, optimizer, 4), expected, rtol=1e-12, atol=1e-12)
    for name, value in population.parameters(0).items():
        torch.testing.assert_close(model.get_parameter(name).detach(), value, rtol=1e-12, atol=1e-12)
    assert len(optimizer.gates()) == (4 if gated == "hidden" else 2)


@pytest.mark.parametrize("foreach", [False, True])
def test_search_without_gates_perturbs_evenly(foreach):
    gated, ungated = (nn.Parameter(torch.ones(500, dtype=torch.float64)) for _ in range(2))
    optimizer = upgd.UPS(
        [{"params": [gated]}, {"params": [ungated], "gated": False}],
        lr=0.5,
        sigma=0.1,
        foreach=foreach,
        generator=torch.Generator().manual_seed(1),
    )
    gated.grad, ungated.grad = -torch.ones_like(gated), -torch.ones_like(gated)
    optimizer.step()
    generator = torch.Generator().manual_seed(1)
    first, second = (torch.randn(500, dtype=torch.float64, generator=generator) for _ in range(2))
    useful = 1 / (1 + torch.exp(torch.tensor(-1.0, dtype=torch.float64)))
    torch.testing.assert_close(gated.detach(), 1 - 0.05 * first * (1 - useful), rtol=1e-12, atol=0)
    torch.testing.assert_close(ungated.detach(), 1 - 0.05 * second, rtol=1e-12, atol=0)


@pytest.mark.parametrize("cls", [upgd.UPGD, upgd.UPS, upgd.AdaUPGD])
def test_a_group_without_gates_is_excluded_from_the_maximum_and_keeps_no_utility(cls):
    small, large = nn.Parameter(torch.full((3,), 0.1)), nn.Parameter(torch.full((3,), 100.0))
    optimizer = cls([{"params": [small]}, {"params": [large], "gated": False}], sigma=0.0)
    small.grad = large.grad = -torch.ones(3)
    optimizer.step()
    assert optimizer.gates().keys() == {small}
    torch.testing.assert_close(optimizer.gates()[small], torch.full((3,), 1 / (1 + torch.e**-1)))
    assert "utility" not in optimizer.state.get(large, {})


@pytest.mark.parametrize("cls", [upgd.UPGD, upgd.AdaUPGD])
def test_gates_may_be_switched_on_later(cls):
    params = [nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(2))]
    optimizer = cls([{"params": [params[0]]}, {"params": [params[1]], "gated": False}], sigma=0.0)
    for step in range(4):
        for param in params:
            param.grad = -torch.ones_like(param)
        optimizer.step()
        optimizer.param_groups[1]["gated"] = step >= 1
    assert optimizer.gates().keys() == set(params)


@pytest.mark.parametrize("cls", [upgd.UPGD, upgd.UPS, upgd.AdaUPGD])
def test_gated_must_be_true_or_false(cls):
    with pytest.raises(ValueError, match=r"gated must be True or False, but it is 'hidden'; .*gated=False"):
        cls([{"params": [nn.Parameter(torch.ones(2))], "gated": "hidden"}])


@pytest.mark.parametrize("cls", [upgd.UPGD, upgd.UPS, upgd.AdaUPGD])
def test_old_checkpoints_have_gates_everywhere(cls):
    param = nn.Parameter(torch.ones(2))
    optimizer = cls([param])
    old = optimizer.state_dict()
    for group in old["param_groups"]:
        del group["gated"]
    optimizer.load_state_dict(old)
    param.grad = torch.ones(2)
    optimizer.step()
    assert optimizer.gates().keys() == {param}
