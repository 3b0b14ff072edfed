"""Requirements of the general layer on a GPU, and of both layers together; plain functions, as in population_on_gpu.py."""

from collections.abc import Sequence
from itertools import product
from typing import Any
from unittest.mock import patch

import long_runs
import numpy as np
import torch
from gpu_cases import (
    NETWORKS,
    Problem,
    Run,
    Samples,
    Settings,
    assert_same_bits,
    assert_same_learner,
    bits,
    both,
    check,
    check_with_kernels,
    compared,
    compiling,
    of_learner,
    on_the_device,
)
from torch import Tensor, nn

from upgd.methods import Method, registry
from upgd.networks import MLP, ConvNet
from upgd.population import Learner, Population, graphed
from upgd.population.result import Result

STEPS = 24


class Residual(nn.Module):
    """Not a chain of layers; it also has a buffer."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.first = nn.Linear(inputs, inputs)
        self.last = nn.Linear(inputs, outputs)
        self.register_buffer("gain", torch.tensor(0.5))

    def forward(self, x: Tensor) -> Tensor:
        return self.last(x + self.gain * nn.functional.silu(self.first(x)))


NOISES: tuple[Settings, ...] = ({"sigma": 0.0}, {"sigma": 0.05}, {"sigma": 0.05, "noise": "anticorrelated"})
PROBLEMS: dict[str, Problem] = {
    "MLP": NETWORKS["five layers"],
    "MLP, tanh, regression": (MLP((6, 13, 11, 2), "tanh"), Samples((6,), 2, "mse")),
    "ConvNet": (ConvNet((16, 16), 5), Samples((16, 16), 5, images=True)),
    "no chain": (Residual(12, 4), Samples((12,), 4)),
}


def utility_learners(wise: str, order: int) -> list[Learner]:
    """All methods with utility, scalings and noises; those of a kind have different settings."""
    return [
        Learner(method=method, lr=lr, beta_utility=beta, seed=seed, wise=wise, order=order, scaling=scaling, **noise)
        for scaling, noise in product(("global", "local"), NOISES)
        for method in ("upgd", "upgd-nonprotecting", "ups")
        for seed, (lr, beta) in enumerate([(0.02, 0.9), (0.01, 0.999)])
    ]


#: AdamW divides by the gradient's own size, and so a gradient that is next to zero makes a whole step of its rounding
#: error, unless ε is larger.
ADAMW = [
    Learner(method="adamw", lr=lr, betas=betas, eps=eps, weight_decay=decay, seed=seed)
    for eps, seed in product((1e-8, 1e-3, 1e-1), range(3))
    for lr, betas, decay in [(0.01, (0.9, 0.999), 0.01), (0.001, (0.0, 0.9), 0.5)]
]
PLAIN = [
    Learner(method=method, lr=0.03, seed=seed, **settings)
    for method, settings in (
        ("sgd", {}),
        ("sgdw", {"weight_decay": 0.1}),
        ("pgd", {"sigma": 0.1}),
        ("anti-pgd", {"sigma": 0.1}),
        ("shrink-and-perturb", {"sigma": 0.2, "weight_decay": 0.1}),
        ("ups-even", {"sigma": 0.1}),
    )
    for seed in (0, 1)
]
LEARNERS: dict[str, list[Learner]] = {
    "plain": PLAIN,
    "AdamW": ADAMW,
    **{
        f"{wise}s, order {order}": utility_learners(wise, order)
        for wise, order in product(("weight", "feature"), (1, 2))
    },
}
ANY_NETWORK = ("plain", "AdamW", "weights, order 1")


def _held(problem: Problem, learners: Sequence[Learner], device: str) -> str:
    """The results of the CPU; and bitwise the same in other blocks."""
    runs = both(problem, learners, STEPS, device, "torch")
    there = runs[2].population
    once = bits(there)
    there.restore(runs[2].before)
    for length in (7, 1, STEPS - 8):
        there.run(problem[1], length, window=10_000)
    assert_same_bits(once, bits(there), "in blocks")
    return compared(*runs)


# --------------------------------------------------------------------------------------------------- with torch.compile


def _long_runs(names: Sequence[str], device: str) -> str:
    """Some steps exactly, and 8 seeds × 50 000 steps in the mean."""
    network, stream, known = long_runs.NETWORK, long_runs.STREAM, {**long_runs.ON_CHIP, **long_runs.GENERAL}
    learners = [learner for name in names for learner in long_runs.learners_of(known[name])]
    begin = long_runs.beginnings(learners)
    with compiling(True):
        populations = [
            Population(network, learners, backend="torch", dtype=torch.float64, parameters=begin),
            Population(network, learners, backend="torch", parameters=begin),
            Population(network, learners, device=device, backend="torch", parameters=begin),
        ]
        exact = compared(*(Run.of(population, stream, STEPS) for population in populations))
        result = populations[2].run(stream, long_runs.STEPS - STEPS, window=10_000)
    return f"{exact}\n{long_runs.compared(long_runs.reference()[0], long_runs.numbers(result, names))}"


@check
def long_runs_of_weights(device: str) -> str:
    """First order, the case of the paper, and second order."""
    return _long_runs(["upgd", "upgd, second order"], device)


@check
def long_runs_of_moments_and_features(device: str) -> str:
    """AdamW, and UPGD by features."""
    return _long_runs(["adamw", "upgd, feature-wise"], device)


@check
def compiled_steps_of_a_convnet(device: str) -> str:
    """White noise, global scaling, first order, with convolutions; and bitwise the same when it is compiled again."""
    learners = [learner for learner in utility_learners("weight", 1) if learner.kind[2:5] == ("global", 1, "white")]
    with compiling(True):
        words = _held(PROBLEMS["ConvNet"], learners, device)
        once, again = (on_the_device(PROBLEMS["ConvNet"], learners, 8, device, "torch").population for _ in range(2))
    assert_same_bits(bits(once), bits(again), "again")
    return words


# -------------------------------------------------------------------------------------------------------- every variant


def _every_variant(name: str, device: str) -> str:
    """Every method in every variant; under CUDA graphs."""
    with compiling(False):
        return "\n".join(
            f"{variant}, {len(learners)} learners: {_held(PROBLEMS[name], learners, device)}"
            for variant, learners in LEARNERS.items()
            if name != "no chain" or variant in ANY_NETWORK
        )


@check
def every_variant_of_an_mlp(device: str) -> str:
    """{weight, feature} × {global, local} × {order 1, 2} × noise, for each method."""
    return _every_variant("MLP", device)


@check
def every_variant_in_a_regression(device: str) -> str:
    """The same with the squared error."""
    return _every_variant("MLP, tanh, regression", device)


@check
def every_variant_of_a_convnet(device: str) -> str:
    """The same with convolutions."""
    return _every_variant("ConvNet", device)


@check
def every_variant_of_any_module(device: str) -> str:
    """A network that is not a chain of layers supports weight-wise first-order methods."""
    return _every_variant("no chain", device)


@check
def stretches_as_short_as_a_graph(device: str) -> str:
    """If samples take much memory, only the stretch of one graph is stored."""
    learners = utility_learners("weight", 1)[:6]
    with compiling(False):
        usual = on_the_device(PROBLEMS["ConvNet"], learners, STEPS, device, "torch").population
        with patch.object(graphed, "_BYTES", 0):
            short = on_the_device(PROBLEMS["ConvNet"], learners, STEPS, device, "torch").population
    assert_same_bits(bits(usual), bits(short), "stretches")
    return f"{STEPS} steps in stretches of {graphed._UNROLLED} and of {graphed._STRETCH}: the same bits"


@check
def first_steps_of_adamw(device: str) -> str:
    """After one step the moments are (1 − β₁)·g and (1 − β₂)·g², whatever ε: the gradients are right to the last digits."""
    with compiling(False):
        lines = [f"{name}: {compared(*both(p, ADAMW, 1, device, 'torch'))}" for name, p in PROBLEMS.items()]
    return "\n".join(lines)


# --------------------------------------------------------------------------------------------------------- side by side


MIXED = [
    Learner(method=method, lr=0.01, seed=seed, **settings)
    for seed in (5, 2)
    for method, settings in (
        ("sgd", {}),
        ("adamw", {}),
        ("upgd", {"sigma": 0.1}),
        ("upgd", {"sigma": 0.1, "order": 2, "scaling": "local"}),
        ("pgd", {"sigma": 0.1}),
        ("ups", {"sigma": 0.1, "scaling": "local", "noise": "anticorrelated"}),
        ("upgd-nonprotecting", {"sigma": 0.1, "wise": "feature", "weight_decay": 0.01}),
        ("upgd", {"wise": "feature", "sigma": 0.0, "scaling": "local"}),
        ("adamw", {"eps": 1e-3, "weight_decay": 0.1}),
        ("upgd", {"sigma": 0.05, "beta_utility": 0.9}),
        ("redo", {}),
        ("weight-clipping", {}),
    )
]


class Arctangent(Method):
    """No kernel can be generated for it, because kernels have no arctangent."""

    name = label = "arctangent"

    def update(self, w: Tensor, g: Tensor, h: Any) -> Tensor:
        return w - h.lr * torch.arctan(g)


@check_with_kernels
def kinds_side_by_side(device: str) -> str:
    """Learners of both layers in one population: bitwise the same as each kind alone, and reproducible."""
    with patch.dict(registry._REGISTERED), compiling(False):
        registry.register(Arctangent)
        return _side_by_side([*MIXED, *(Learner(method="arctangent", lr=0.01, seed=seed) for seed in (5, 2))], device)


def _side_by_side(learners: Sequence[Learner], device: str) -> str:
    network, stream = NETWORKS["five layers"]

    def run(some: Sequence[Learner], *lengths: int) -> Population:
        population = Population(network, some, device=device)
        for length in lengths:
            population.run(stream, length, window=100)
        return population

    lengths = (100, 33, 217) if device == "cuda" else (10, 3, 17)
    mixed = run(learners, sum(lengths))
    if device == "cuda":
        assert set(mixed.backends) == {"kernel", "torch"}, mixed.backends
    assert (mixed.result().diverged_at < 0).all()
    assert_same_bits(bits(mixed), bits(run(learners, sum(lengths))), "again")
    assert_same_bits(bits(mixed), bits(run(learners, *lengths)), "in blocks")
    kinds = list(dict.fromkeys(learner.kind for learner in learners))
    for kind in kinds:
        places = [place for place, learner in enumerate(learners) if learner.kind == kind]
        alone = run([learners[place] for place in places], sum(lengths))
        for own, place in enumerate(places):
            assert_same_learner(of_learner(alone, own), of_learner(mixed, place), learners[place])
    return f"{len(learners)} learners of {len(kinds)} kinds"


@check_with_kernels
def a_diverged_learner_stays_alone(device: str) -> str:
    """It is frozen at the step of divergence, the same as on the CPU, and other learners are not affected."""
    network, stream = NETWORKS["16-300-150-1"]
    kinds: list[tuple[str, str, Settings]] = [
        ("kernel", "sgd", {"lr": 3.0}),
        ("kernel", "upgd", {"lr": 30.0, "sigma": 0.0}),
        ("kernel", "momentum", {"lr": 3.0}),
        ("kernel", "upgd", {"lr": 30.0, "sigma": 0.0, "order": 2}),
        ("torch", "sgd", {"lr": 3.0}),
        ("torch", "upgd", {"lr": 30.0, "sigma": 0.0, "order": 2}),
        ("torch", "adamw", {"lr": 1e13}),
    ]
    lines = []
    for backend, method, settings in kinds:
        calm = [Learner(method=method, seed=seed, **{**settings, "lr": 1e-4}) for seed in (0, 9, 1, 2, 3, 9)]
        wild = Learner(method=method, seed=9, **settings)
        mixed = [wild if learner.seed == 9 else learner for learner in calm]
        with compiling(False):
            truth = Population(network, mixed, backend="torch").run(stream, 60)
            with_wild, without = (Population(network, who, device=device, backend=backend) for who in (mixed, calm))
            _check_frozen(with_wild, stream, truth)
            without.run(stream, 60)
        for place in (0, 2, 3, 4):
            assert_same_learner(of_learner(with_wild, place), of_learner(without, place), mixed[place])
        lines.append(f"{backend}, {method}: diverged at {truth.diverged_at[1]}")
    return "\n".join(lines)


def _check_frozen(population: Population, stream: Samples, truth: Result) -> None:
    """It diverges at the expected step, and does not change afterwards."""
    population.run(stream, 45)
    diverged_at = population.result().diverged_at
    assert diverged_at.tolist() == truth.diverged_at.tolist(), (diverged_at, truth.diverged_at)
    assert ((diverged_at >= 0) == [False, True, False, False, False, True]).all(), diverged_at
    frozen = population.parameters(1)
    result = population.run(stream, 15)
    assert all(bool((frozen[name] == p).all()) for name, p in population.parameters(1).items())
    assert np.isnan(result.loss[-1, [1, 5]]).all()
    assert np.isfinite(result.loss[:, [0, 2, 3, 4]]).all()
