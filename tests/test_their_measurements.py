"""examples/their_measurements.py: the authors' average pooling, true utility after the update, tasks and windows."""

import runpy
import sys
from pathlib import Path
from unittest import mock

import pytest
import torch
from torch import nn

import upgd.curvature._registry as curvature
from upgd import HesScale
from upgd.experiments.paper import utility_quality

EXAMPLE = Path(__file__).parents[1] / "examples" / "their_measurements.py"


@pytest.fixture
def example():
    with mock.patch.dict(curvature.LAYERS):
        yield runpy.run_path(str(EXAMPLE))


def test_their_average_pooling_is_n_times_the_exact_curvature(example):
    """The curvature of (Σ v·mean(w·x) − 1)² in w, for one output and windows of four inputs."""
    found = {}
    for pool in (nn.AvgPool2d, example["TheirAvgPool2d"]):
        torch.manual_seed(0)
        scale = nn.Conv2d(1, 3, 1, bias=False).double()  # one weight per channel
        model = nn.Sequential(nn.Conv2d(1, 1, 1).double(), scale, pool(2), nn.Flatten(), nn.Linear(3, 1).double())
        criterion = nn.MSELoss()
        diagonal = HesScale(model, criterion)
        x = torch.randn(1, 1, 2, 2, dtype=torch.float64)
        criterion(model(x), torch.ones(1, 1, dtype=torch.float64)).backward()
        found[pool] = diagonal.diagonal(scale.weight).flatten()
    entering = model[0](x).detach().flatten()
    of_mean = 2 * model[-1].weight.detach()[0] ** 2
    each = of_mean * (entering**2).sum() / 16  # each of the four inputs of a window has a weight of 1/4
    torch.testing.assert_close(found[nn.AvgPool2d], each)
    torch.testing.assert_close(found[example["TheirAvgPool2d"]], 4 * each)


def test_before_the_update_it_equals_the_study(example):
    study = utility_quality.run("weight", activations=["relu"], seeds=[3], steps=30)
    (wanted,) = study.means("relu", "global", "second order")
    before, after = example["correlations"](3, 30)
    assert before == pytest.approx(float(wanted), abs=1e-4)  # where utilities are zero up to rounding, ranks may differ
    assert abs(after - before) > 5e-4


def test_their_first_window_is_one_step_and_their_last_one_is_missing(example):
    correct = torch.tensor([1.0, 0, 0, 1, 1, 0, 0])
    assert example["mean_of_their_windows"](correct[:6], 2) == pytest.approx((1 + 0 + 1) / 3)  # not the last step
    assert example["mean_of_their_windows"](correct, 3) == pytest.approx((1 + 1 / 3 + 1 / 3) / 3)


def test_methods_with_the_same_tasks_see_the_same_samples(example):
    own, same, other = (example["correct"](0, 30, tasks=tasks, lr=0.01).tolist() for tasks in (0, 0, 1))
    assert own == same != other


def test_the_script_prints_twelve_numbers(example, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["their_measurements.py", "--seeds", "2", "--steps", "5"])
    example["main"]()
    assert capsys.readouterr().out.count("±") == 12
