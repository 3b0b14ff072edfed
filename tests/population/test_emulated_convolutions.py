"""The kernel for convolutions, run on the CPU by fibers: every rule, layer and exchange, compared with float64."""

from collections.abc import Iterator

import emulated_chip
import pytest
import torch
from emulated_chip import EmulatedBackend, assert_right, run, state
from gpu_cases import CONVOLUTIONS, PAPERS_CONVNET
from population_on_gpu import clusters_of

from upgd.population import Learner, Population
from upgd.population.cuda import convolutional

pytestmark = pytest.mark.skipif(emulated_chip.COMPILER is None, reason="needs a C++ compiler")


UPGD = {"method": "upgd", "lr": 0.02, "sigma": 0.1, "beta_utility": 0.9, "weight_decay": 0.01}
STEPS = 8
THREADS = convolutional.THREADS  # before the tests change it


@pytest.fixture(autouse=True)
def _few_threads() -> Iterator[None]:
    with emulated_chip.threads(96):
        yield


def held(cluster: int, **settings: object) -> None:
    assert_right(CONVOLUTIONS[cluster], cluster, STEPS, **settings)


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


@pytest.mark.slow
@pytest.mark.parametrize(
    ("cluster", "settings"),
    [
        (2, UPGD),
        (4, {**UPGD, "noise": "anticorrelated"}),
        (3, {**UPGD, "gated": "layers.3+layers.7", "scaling": "local"}),
        (1, {**UPGD, "order": 2, "scaling": "local", "normalize": 0.9}),
        (3, {**UPGD, "granularity": "feature"}),
        (2, {**UPGD, "granularity": "feature", "order": 2}),
        (4, {**UPGD, "granularity": "feature", "scaling": "local"}),
        (3, {**UPGD, "profile": "authors"}),
        (1, {"method": "sgd", "lr": 0.02}),
        (2, {"method": "pgd", "lr": 0.02, "sigma": 0.1}),
        (3, {"method": "adaupgd", "lr": 0.01, "sigma": 0.1, "eps": 1e-2, "scaling": "local"}),
        (1, {"method": "rmsprop", "lr": 0.01, "eps": 1e-2}),
        (4, {"method": "momentum", "lr": 0.02}),
        (2, {"method": "obgd", "lr": 0.5}),
        (3, {"method": "l2-init", "lr": 0.01, "optimizer": "adam", "eps": 1e-2}),
        (2, {"method": "s-ewc", "lr": 0.02, "kappa": 1.0}),
        (4, {"method": "s-mas", "lr": 0.02, "kappa": 1.0}),
        (1, {"method": "s-si", "lr": 0.02, "kappa": 0.1}),
        (3, {"method": "s-rwalk", "lr": 0.02, "kappa": 0.1}),
        (2, {"method": "weight-clipping", "lr": 0.05, "clip": 0.8}),
        (4, {"method": "shrink-and-perturb-init", "lr": 0.02, "sigma": 0.5, "weight_decay": 0.1}),
    ],
    ids=lambda case: case if isinstance(case, int) else case["method"],
)
def test_more_rules_are_right(cluster, settings):
    held(cluster, **settings)


@pytest.mark.slow
def test_the_papers_convnet():
    """Its layers have other shapes: fours of weights, filters that are read in fours, threads that share channels."""
    with emulated_chip.threads(THREADS), clusters_of(3):
        problem, learners = PAPERS_CONVNET[True], [Learner(**UPGD, seed=seed) for seed in (0, 1)]
        exact, rounded = (state(run(problem, learners, "torch", 4, dtype=t)) for t in (torch.float64, torch.float32))
        found = state(run(problem, learners, EmulatedBackend, 4))
    for name, right in exact.items():
        error, usual = (float((t[name].double() - right).norm()) for t in (found, rounded))
        assert error <= 5e-6 * float(right.norm()) + 5 * usual, name


def test_a_saved_state_resumes_bit_for_bit():
    problem = CONVOLUTIONS[2]
    learners = [Learner(**UPGD, granularity="feature", normalize=0.9, seed=seed) for seed in (0, 1)]
    with clusters_of(2):
        whole, begun = run(problem, learners, EmulatedBackend, STEPS), run(problem, learners, EmulatedBackend, 3)
        other = Population(problem[0], learners, backend=EmulatedBackend)
        other.restore(begun.state())
        other.run(problem[1], STEPS - 3, window=1000)
    assert any("normalizer" in name for name in state(whole))
    for name, tensor in state(whole).items():
        assert torch.equal(tensor, other.state()[name]), name


def test_a_diverged_learner_stops_without_affecting_the_other():
    problem = CONVOLUTIONS[3]
    wild, calm = (Learner(method="momentum", lr=lr, seed=4) for lr in (1e30, 0.01))
    with clusters_of(3):
        both, alone = (run(problem, own, EmulatedBackend, 4, 4) for own in ([wild, calm], [calm]))
    truth = run(problem, [wild], "torch", STEPS)
    assert both.diverged_at.tolist() == [truth.diverged_at[0], -1]
    assert both.diverged_at[0] >= 0
    for name, tensor in both.parameters(1).items():
        assert torch.equal(tensor, alone.parameters(0)[name])
