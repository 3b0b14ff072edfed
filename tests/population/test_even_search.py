"""UPS's control perturbs everything evenly: its result does not depend on the samples."""

import pytest
import torch

from upgd.networks import MLP
from upgd.noise import learner_normals
from upgd.population import Learner, Population
from upgd.streams import make

STEPS, LR, SIGMA, SEED = 5, 0.5, 0.1, 7


@pytest.mark.parametrize("backend", ["torch", "auto"])
@pytest.mark.parametrize("wise", ["weight", "feature"])
def test_weights_follow_a_random_walk(wise, backend):
    """w₅ = w₀ − lr·σ·Σ ζ_t for everything; feature-wise, the output layer learns by gradients instead."""
    network = MLP((64, 9, 10))
    learner = Learner(method="ups-even", lr=LR, sigma=SIGMA, wise=wise, seed=SEED)
    population = Population(network, [learner], "cpu", backend)
    before = {name: values.clone() for name, values in population.parameters(0).items()}
    population.run(make("output-permuted-digits"), STEPS)
    after = population.parameters(0)
    count = sum(values.numel() for values in before.values())
    noise = sum(learner_normals(torch.tensor([SEED]), step, count)[0].double() for step in range(1, STEPS + 1))
    walked = {}
    for name, values in before.items():
        own, noise = noise[: values.numel()], noise[values.numel() :]
        expected = values.double() - LR * SIGMA * own.view_as(values)
        walked[name] = torch.allclose(after[name].double(), expected, atol=1e-5)
    last = list(before)[-2:]
    assert walked == {name: wise == "weight" or name not in last for name in before}
