"""The kernel for convolutions, run on the CPU by fibers: every rule, layer and exchange, compared with float64."""

from collections.abc import Iterator

import emulated_chip
import pytest
import torch
from emulated_chip import EmulatedBackend, Kernel
from gpu_cases import CONVOLUTIONS, Problem
from population_on_gpu import clusters_of

from upgd.population import Learner, Population

pytestmark = pytest.mark.skipif(emulated_chip.COMPILER is None, reason="needs a C++ compiler")


UPGD = {"method": "upgd", "lr": 0.02, "sigma": 0.1, "beta_utility": 0.9, "weight_decay": 0.01}
STEPS = 8


@pytest.fixture(autouse=True)
def _few_threads() -> Iterator[None]:
    with emulated_chip.threads(96):
        yield


def state(population: Population) -> dict[str, torch.Tensor]:
    return {name: t for name, t in population.state().items() if name.startswith(("group.", "tally.loss"))}


def run(problem: Problem, learners: list[Learner], backend, *lengths: int, dtype=torch.float32) -> Population:
    population = Population(problem[0], learners, backend=backend, dtype=dtype)
    for length in lengths or (STEPS,):
        population.run(problem[1], length, window=1000)
    return population


def held(cluster: int, **settings: object) -> None:
    """As close to float64 as torch's float32; bitwise the same with other learners, in other blocks, and when the threads take
    turns in another order."""
    problem, learners = CONVOLUTIONS[cluster], [Learner(**settings, seed=seed) for seed in (0, 3, 1)]
    with clusters_of(cluster):
        Kernel.order = 1
        exact, rounded = (state(run(problem, learners, "torch", dtype=t)) for t in (torch.float64, torch.float32))
        there = run(problem, learners, EmulatedBackend)
        Kernel.order = 2
        other = run(problem, learners[1:], EmulatedBackend, 1, 4, STEPS - 5)
    found = state(there)
    assert there._backends[0].size == cluster
    assert found.keys() == exact.keys()
    for name, right in exact.items():
        error, usual = (float((t[name].double() - right).norm()) for t in (found, rounded))
        assert error <= 5e-6 * float(right.norm()) + 5 * usual, name
        if name.startswith("group."):
            assert torch.equal(found[name][1:], other.state()[name]), name


@pytest.mark.parametrize(
    ("cluster", "settings"),
    [
        (3, UPGD),
        (2, {**UPGD, "scaling": "local", "noise": "anticorrelated", "normalize": 0.9}),
        (4, {**UPGD, "order": 2, "gated": "hidden"}),
        (1, {**UPGD, "granularity": "feature", "order": 2, "scaling": "local"}),
        (3, {"method": "adamw", "lr": 0.01, "eps": 1e-2}),
    ],
    ids=lambda case: case if isinstance(case, int) else case["method"],
)
def test_rules_are_right(cluster, settings):
    held(cluster, **settings)
