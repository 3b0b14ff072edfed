"""HesScale must rank parameters by curvature better than other estimates of the same cost."""

import pytest
import torch
from scipy.stats import spearmanr
from torch import nn
from torch.func import functional_call, grad, hessian, vmap

from upgd.curvature import HesScale

ACTIVATIONS = {"relu": nn.ReLU, "tanh": nn.Tanh, "leaky_relu": nn.LeakyReLU}


def correlations(activation: type[nn.Module], batch: int, seed: int) -> dict[str, float]:
    """Spearman's correlation with the exact diagonal, of each estimate over all parameters."""
    torch.manual_seed(seed)
    layers = [nn.Linear(6, 8), activation(), nn.Linear(8, 8), activation(), nn.Linear(8, 4)]
    model, criterion = nn.Sequential(*layers).double(), nn.CrossEntropyLoss()
    params = {name: p.detach() for name, p in model.named_parameters()}
    x, y = torch.randn(batch, 6, dtype=torch.float64), torch.randint(4, (batch,))
    with HesScale(model, criterion) as curvature:
        criterion(model(x), y).backward()

    def loss(values, x=x, y=y):
        return criterion(functional_call(model, values, (x,)), y)

    def diagonal(name):
        count = params[name].numel()
        return hessian(lambda v: loss({**params, name: v}))(params[name]).reshape(count, count).diagonal()

    per_sample = vmap(lambda x, y: grad(loss)(params, x[None], y[None]))(x, y)
    truth = flat([diagonal(name) for name in params])
    estimates = {
        "HesScale": [curvature.diagonal(p) for p in model.parameters()],
        "squared gradient": [p.grad.square() for p in model.parameters()],
        "squared gradients of the samples": [g.square().mean(0) for g in per_sample.values()],
        "magnitude": [p.abs() for p in model.parameters()],
    }
    return {name: spearmanr(flat(values), truth).statistic for name, values in estimates.items()}


def flat(values) -> torch.Tensor:
    return torch.cat([v.detach().flatten() for v in values])


@pytest.mark.parametrize("batch", [1, 16])
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_ranks_parameters_by_curvature_better_than_squared_gradients(activation, batch):
    runs = [correlations(ACTIVATIONS[activation], batch, seed) for seed in range(8)]
    mean = {name: sum(run[name] for run in runs) / len(runs) for name in runs[0]}
    ours = mean.pop("HesScale")
    assert ours > 0.95
    assert ours > mean["squared gradient"] + 0.01
    assert ours > mean["magnitude"] + 0.9
    # Squares of each sample's gradient need more than one backward pass gives. On piecewise linear networks, where the
    # Hessian is a Gauss-Newton matrix, they rank as well.
    assert ours > mean["squared gradients of the samples"] + (0.3 if activation == "tanh" else -0.005)
