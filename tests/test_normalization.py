"""Online normalization of inputs, alone and in front of a model."""

import copy

import numpy as np
import pytest
import torch
from torch import nn

import upgd
from upgd.networks import MLP, reset
from upgd.population import Learner, Population
from upgd.streams import make


def test_by_hand():
    """Rate ½: a is 0, ½, ½."""
    norm = upgd.OnlineNorm(1, rate=0.5).double()
    first = norm(torch.tensor([[4.0]], dtype=torch.float64))
    assert (first.item(), norm.mean.item(), norm.variance.item()) == (0.0, 4.0, 0.0)
    second = norm(torch.tensor([[8.0]], dtype=torch.float64))
    assert (norm.mean.item(), norm.variance.item()) == (6.0, 0.5 * 4 * 2)
    assert second.item() == pytest.approx(2 / (4 + 1e-4) ** 0.5, rel=1e-15)
    third = norm(torch.tensor([[1006.0]], dtype=torch.float64))
    assert (norm.mean.item(), norm.variance.item()) == (506.0, 2 + 0.5 * 1000 * 500)
    assert third.item() == pytest.approx(500 / (250_002 + 1e-4) ** 0.5, rel=1e-15)


def test_starts_as_a_plain_average():
    x = torch.randn(50, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    norm = upgd.OnlineNorm(3, rate=0.99).double()
    norm(x)
    torch.testing.assert_close(norm.mean, x.mean(0), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(norm.variance, x.var(0, correction=0), rtol=1e-12, atol=1e-12)


def test_outliers_are_clipped():
    norm = upgd.OnlineNorm(1)
    norm(torch.zeros(50, 1))
    assert norm(torch.tensor([[1e6]])).item() == 5.0
    assert norm(torch.tensor([[-1e9]])).item() == -5.0


@pytest.mark.parametrize("name", ["input-permuted-digits", "toy-changing-inputs"])
def test_a_loop_gives_the_losses_of_a_learner(name):
    stream, steps = make(name, task_length=50), 120
    network = MLP((torch.Size(stream.input_shape).numel(), 9, stream.outputs), "tanh")
    learner = Learner(method="sgd", lr=0.05, normalize=0.99, seed=3)
    population = Population(network, [learner], backend="torch", dtype=torch.float64)
    expected = population.run(stream, steps, window=1).loss[:, 0]

    model = nn.Sequential(upgd.OnlineNorm(stream.input_shape, 0.99), reset(copy.deepcopy(network).double(), 3)).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    criterion = nn.CrossEntropyLoss() if stream.loss == "cross_entropy" else nn.MSELoss()
    chunk = stream.chunk([3], 0, steps)
    losses = []
    for x, y in zip(chunk.inputs()[0].double(), chunk.targets[0], strict=True):
        loss = criterion(model(x[None]), y[None].double() if stream.loss == "mse" else y[None])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    np.testing.assert_allclose(losses, expected, rtol=1e-12, atol=1e-12)


def test_a_batch_is_its_samples_in_order():
    x = torch.randn(7, 2, 3)
    whole, one_by_one = upgd.OnlineNorm((2, 3)), upgd.OnlineNorm((2, 3))
    assert torch.equal(whole(x), torch.cat([one_by_one(sample[None]) for sample in x]))
    assert whole(x[:0]).shape == (0, 2, 3)
    assert whole.steps == 7


def test_resumes_from_a_state_dict():
    norm, again = upgd.OnlineNorm(4), upgd.OnlineNorm(4)
    norm(torch.randn(20, 4))
    again.load_state_dict(norm.state_dict())
    x = torch.randn(5, 4)
    assert torch.equal(norm(x), again(x))
    assert again.steps == 25


def test_in_evaluation_mode_nothing_changes():
    norm = upgd.OnlineNorm(4)
    norm(torch.randn(20, 4))
    before = copy.deepcopy(norm.state_dict())
    norm.eval()
    x = torch.randn(5, 4)
    expected = ((x - norm.mean) / (norm.variance + 1e-4).sqrt()).clamp(-5, 5)
    torch.testing.assert_close(norm(x), expected)
    assert torch.equal(norm(x), torch.cat([norm(sample[None]) for sample in x]))
    for name, value in norm.state_dict().items():
        assert torch.equal(value, before[name]), name


@pytest.mark.parametrize("rate", [0, 1, -0.5, float("nan"), "0.99", True])
def test_a_rate_must_be_between_0_and_1(rate):
    with pytest.raises(ValueError, match=r"rate must be a number between 0 and 1, not .*; try 0\.99"):
        upgd.OnlineNorm(4, rate=rate)


@pytest.mark.parametrize("shape", [(4,), (1, 5), (2, 1, 4)])
def test_unbatched_inputs_are_refused(shape):
    with pytest.raises(ValueError, match=r"samples of shape \(4,\), not a tensor of shape .*x\.unsqueeze\(0\)"):
        upgd.OnlineNorm(4)(torch.zeros(shape))
