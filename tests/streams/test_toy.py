"""The toy problems, against numbers derived by hand."""

import pytest
import torch
from scipy import stats

from upgd.streams import ToyChangingInputs, ToyChangingOutputs, UtilityQuality


def test_the_pair_shifts_by_two_and_wraps() -> None:
    chunk = ToyChangingInputs().chunk([0, 5], 0, 9 * 200)
    x, y = chunk.dense, chunk.targets[..., 0]
    for task, (i, j) in enumerate([(1, 2), (3, 4), (5, 6), (7, 8), (9, 10), (11, 12), (13, 14), (15, 16), (1, 2)]):
        steps = slice(200 * task, 200 * (task + 1))
        assert torch.equal(y[:, steps], x[:, steps, i - 1] + x[:, steps, j - 1])


def test_the_sign_flips() -> None:
    chunk = ToyChangingOutputs().chunk([0], 0, 600)
    total = chunk.dense[..., :2].sum(-1, keepdim=True)
    assert torch.equal(chunk.targets, torch.cat((total[:, :200], -total[:, 200:400], total[:, 400:]), 1))


@pytest.mark.parametrize("problem", [ToyChangingInputs, ToyChangingOutputs])
def test_amplitude_scales_the_target_alone(problem) -> None:
    one, half = (problem(amplitude=a, task_length=10).chunk([1], 5, 30) for a in (1.0, 0.5))
    assert torch.equal(one.dense, half.dense)
    assert torch.equal(one.targets / 2, half.targets)


def test_toy_inputs_are_standard_normal_and_the_same_for_both_problems() -> None:
    x = ToyChangingInputs().chunk(range(20), 0, 500).dense
    assert stats.kstest(x.flatten().numpy(), "norm").pvalue > 1e-3
    assert torch.equal(x, ToyChangingOutputs().chunk(range(20), 0, 500).dense)
    correlations = torch.corrcoef(x.reshape(-1, 16).T) - torch.eye(16)
    assert correlations.abs().max() < 5 / 10_000**0.5


def test_utility_quality_adds_two_of_five_uniform_inputs() -> None:
    stream = UtilityQuality()
    seeds = range(2000)
    pairs = stream.relevant_inputs(seeds)
    chunk = stream.chunk(seeds, 0, 20)
    for seed in (0, 1, 1999):
        i, j = pairs[seed].tolist()
        assert i != j
        assert torch.equal(chunk.targets[seed, :, 0], chunk.dense[seed, :, i] + chunk.dense[seed, :, j])
    assert stats.kstest(chunk.dense.flatten().numpy(), "uniform", (-0.5, 1)).pvalue > 1e-3
    counts = torch.bincount(5 * pairs.amin(1) + pairs.amax(1), minlength=25)
    assert stats.chisquare(counts[counts > 0].numpy()).pvalue > 1e-3
    assert (counts > 0).sum() == 10


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: ToyChangingInputs(amplitude=float("inf")), "amplitude must be a finite number"),
        (lambda: ToyChangingOutputs(task_length=0), "task_length must be a positive number of steps, not 0"),
        (lambda: UtilityQuality(task_length=1.5), "task_length"),
    ],
)
def test_mistakes_are_named(make, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()
