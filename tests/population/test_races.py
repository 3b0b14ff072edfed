"""Races in the shared memory of the kernels, detected on the CPU (emulated_races.h): whatever the order of the threads."""

import shutil
from collections.abc import Iterator
from unittest.mock import patch

import emulated_chip
import pytest
from emulated_chip import races
from gpu_cases import CONVOLUTIONS, NOISES, Problem, Samples, rule_learners
from population_on_gpu import CONVOLUTIONAL, GENERATED, generated_learners

from upgd.networks import MLP, Linear
from upgd.population import Learner
from upgd.population.cuda import backend as on_chip

pytestmark = pytest.mark.skipif(
    emulated_chip.COMPILER is None or shutil.which("addr2line") is None, reason="needs a C++ compiler and addr2line"
)

MLPS: dict[str, tuple[int, Problem]] = {
    "one layer, fewer outputs than CTAs": (4, (Linear(10, 3), Samples((10,), 3))),
    "three layers, fewer outputs than CTAs": (4, (MLP((9, 14, 11, 3)), Samples((9,), 3))),
    "three layers, fewer units than CTAs": (4, (MLP((9, 5, 6, 4)), Samples((9,), 4))),
    "four layers": (2, (MLP((9, 14, 11, 7, 3), "tanh"), Samples((9,), 3, images=True, task_length=2))),
    "alone": (1, (MLP((6, 18, 10, 2), "tanh"), Samples((6,), 2, "mse"))),
}


def three(name: str) -> list[Learner]:
    """As many learners that one follows another on one of the two clusters."""
    learners = generated_learners([name])
    return [*learners, learners[0].but(seed=2)]


@pytest.fixture(autouse=True)
def _few_threads() -> Iterator[None]:
    with emulated_chip.threads(64):
        yield


@pytest.mark.parametrize("place", [2, 4, 7], ids=["forward", "gradients of inputs", "gradients of weights"])
def test_a_missing_barrier_is_detected(place):
    parts = dict(on_chip.parts())
    pieces = parts["convolution.cuh"].split("__syncthreads();")
    parts["convolution.cuh"] = ";".join("__syncthreads();".join(some) for some in (pieces[:place], pieces[place:]))
    with patch.object(on_chip, "parts", lambda: parts):
        found = races(CONVOLUTIONS[3], generated_learners(["utility"])[:1], 3, steps=2)
    assert any("convolution.cuh" in race for race in found)


@pytest.mark.parametrize(("cluster", "name"), [(2, "second order, local"), (3, "two numbers")])
def test_some_convolutions_have_no_races(cluster, name):
    assert not races(CONVOLUTIONS[cluster], generated_learners([name])[:1], cluster)


def test_clusters_with_few_outputs_have_no_races():
    """All CTAs take part in the exchange of outputs, even those without any."""
    for cluster, problem in list(MLPS.values())[:2]:
        assert not races(problem, generated_learners(["utility"])[:1], cluster)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("problem", "cluster", "name"),
    [
        pytest.param(problem, size, name, id=f"{size}-{name}")
        for problem, names, size in CONVOLUTIONAL
        if size is not None
        for name in names
    ],
)
def test_convolutions_have_no_races(problem, cluster, name):
    assert not races(problem, three(name), cluster)


@pytest.mark.slow
@pytest.mark.parametrize("network", MLPS)
@pytest.mark.parametrize("name", GENERATED)
def test_generated_rules_have_no_races(network, name):
    cluster, problem = MLPS[network]
    assert not races(problem, three(name), cluster)


@pytest.mark.slow
@pytest.mark.parametrize("network", MLPS)
@pytest.mark.parametrize("noise", NOISES, ids=["no noise", "white noise", "anticorrelated noise"])
def test_rules_by_hand_have_no_races(network, noise):
    cluster, problem = MLPS[network]
    assert not races(problem, rule_learners(noise), cluster)
