"""What a population on a GPU owes; plain functions, so that a machine with torch and numpy alone can run them.

``make test-gpu`` runs all of them. The truth is the torch backend on the CPU, in float64.
"""

import multiprocessing
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from torch import Tensor, nn

from upgd.networks import MLP, Linear
from upgd.noise import Purpose, learner_normals, normals, words
from upgd.population import Learner, Population
from upgd.population.cuda.backend import _plans, _text
from upgd.population.cuda.compiler import compiled
from upgd.population.cuda.network import dense_layers
from upgd.population.cuda.planner import fastest
from upgd.streams import Chunk

CHECKS: dict[str, Callable[[], str]] = {}
NOISES: tuple[dict[str, object] | None, ...] = (None, {"sigma": 0.1}, {"sigma": 0.1, "noise": "anticorrelated"})


def check(function: Callable[[], str]) -> Callable[[], str]:
    CHECKS[function.__name__] = function
    return function


@dataclass
class Samples:
    """Inputs and targets from counters; images with permuted pixels, or dense vectors."""

    inputs: int
    outputs: int
    loss: str = "cross_entropy"
    images: bool = False
    task_length: int = 30
    name: str = "samples"

    @property
    def input_shape(self) -> tuple[int, ...]:
        return (self.inputs,)

    def chunk(self, seeds: Sequence[int] | Tensor, start: int, length: int, device: str = "cpu") -> Chunk:
        seeds = torch.as_tensor(seeds)[:, None]
        steps = torch.arange(start, start + length)
        if self.loss == "mse":
            targets = normals(seeds, Purpose.TASK, steps, self.outputs).float()
        else:
            targets = words(seeds, Purpose.TASK, steps, 1).squeeze(-1) % self.outputs
        targets = targets.to(device)
        if not self.images:
            dense = 0.5 * normals(seeds, Purpose.INPUTS, steps, self.inputs).float()
            return Chunk(start=start, targets=targets, dense=dense.to(device))
        source = (words(0, Purpose.INPUTS, torch.arange(50), self.inputs) >> 24).to(torch.uint8)
        first = start // self.task_length
        tasks = torch.arange(first, (start + length - 1) // self.task_length + 1)
        order = words(seeds, Purpose.SAMPLE_ORDER, tasks, self.inputs).argsort(dim=-1, stable=True)
        index = words(seeds, Purpose.INPUTS, steps, 2)[..., 1] % len(source)
        return Chunk(
            start=start,
            targets=targets,
            source=source.to(device),
            index=index.to(device),
            permutation=order.to(device),
            task=(steps // self.task_length - first).to(device),
        )


NETWORKS: dict[str, tuple[nn.Module, Samples]] = {
    "784-300-150-10": (MLP((784, 300, 150, 10)), Samples(784, 10, images=True)),
    "784-300-150-47": (MLP((784, 300, 150, 47)), Samples(784, 47, images=True)),
    "16-300-150-1": (MLP((16, 300, 150, 1), "identity"), Samples(16, 1, "mse")),
    "5-50-50-1": (MLP((5, 50, 50, 1), "tanh"), Samples(5, 1, "mse")),
    "five layers": (MLP((33, 21, 18, 7, 9, 4), "leaky_relu"), Samples(33, 4, images=True)),
    "two layers": (MLP((100, 64, 40)), Samples(100, 40)),
    "one layer": (Linear(30, 3), Samples(30, 3)),
    "no bias": (
        nn.Sequential(nn.Linear(20, 31, bias=False), nn.Tanh(), nn.Linear(31, 6, bias=False)),
        Samples(20, 6, "mse"),
    ),
}


def rule_learners(noise: dict[str, object] | None) -> list[Learner]:
    """Every rule that the kernel knows, learners with different settings side by side."""
    perturbed = {"sigma": 0.0} if noise is None else noise
    learners = []
    for scaling in ("global", "local"):
        for method in ("upgd", "upgd-nonprotecting", "ups"):
            for seed, (lr, beta, decay) in enumerate([(0.01, 0.999, 0.01), (0.03, 0.9, 0.0), (0.002, 0.0, 0.1)]):
                more = {} if method == "ups" else {"weight_decay": decay}
                settings = {"lr": lr, "beta_utility": beta, "scaling": scaling, "seed": seed, **more, **perturbed}
                learners.append(Learner(method=method, **settings))
    plain = [("sgd", {}), ("sgdw", {"weight_decay": 0.1})]
    if noise is not None:
        size = noise["sigma"]
        plain = [("pgd", {"sigma": size}), ("shrink-and-perturb", {"sigma": size, "weight_decay": 0.1})]
        plain = [("anti-pgd", {"sigma": size})] if noise.get("noise") == "anticorrelated" else plain
    learners += [Learner(method=m, lr=lr, seed=3, **more) for m, more in plain for lr in (0.01, 0.03)]
    return learners


def both(network: nn.Module, stream: Samples, learners: list[Learner], steps: int, backend: str = "kernel"):
    """The same run on the CPU in float64 (the truth) and in float32 (what rounding does), and on the GPU."""
    truth = Population(network, learners, backend="torch", dtype=torch.float64)
    rounded = Population(network, learners, backend="torch")
    there = Population(network, learners, device="cuda", backend=backend)
    return [(population, population.run(stream, steps, window=steps)) for population in (truth, rounded, there)]


def flat(population: Population, part: str) -> dict[str, Tensor]:
    state = population.state()
    return {name: tensor.double() for name, tensor in state.items() if f".{part}." in name}


def distance(truth: Population, there: Population, part: str) -> float:
    """The largest relative distance of any learner's tensor."""
    right, found = flat(truth, part), flat(there, part)
    worst = 0.0
    for name, tensor in right.items():
        error = (tensor - found[name]).flatten(1).norm(dim=1) / tensor.flatten(1).norm(dim=1).clamp(min=1e-12)
        worst = max(worst, error.nan_to_num(nan=1e9).max().item())
    return worst


#: Where noise is looked at, too: compiling takes its time.
NOISY = ("784-300-150-10", "16-300-150-1", "five layers")


@check
def kernels_compile() -> str:
    """Compile what the other checks will need, on all cores at once."""
    device = torch.device("cuda", torch.cuda.current_device())
    texts = set()
    for name, (network, stream) in NETWORKS.items():
        layers = tuple(dense_layers(network))
        for noise in NOISES if name in NOISY else (None,):
            for kind in {learner.kind for learner in rule_learners(noise)}:
                chosen = fastest(_plans(layers, kind, device))
                texts.add(_text(chosen, stream.loss, stream.images))
    major, minor = torch.cuda.get_device_capability()
    compile_one = partial(compiled, architecture=f"sm_{major}{minor}")
    with ProcessPoolExecutor(mp_context=multiprocessing.get_context("spawn")) as pool:
        return f"{len(list(pool.map(compile_one, sorted(texts))))} kernels"


@check
def same_answers_without_noise() -> str:
    """100 steps, every rule, every network: weights, utilities, loss, hits."""
    return "\n".join(f"{name}: {_compared(*both(*case, rule_learners(None), 100))}" for name, case in NETWORKS.items())


@check
def same_answers_with_noise() -> str:
    """The same noise: white and anticorrelated, 10 steps."""
    return "\n".join(
        f"{name}, {noise}: {_compared(*both(*NETWORKS[name], rule_learners(noise), 10))}"
        for name in NOISY
        for noise in NOISES[1:]
    )


def _compared(truth, rounded, there) -> str:
    """The GPU is as near to the truth as float32 is on the CPU, up to a factor; in words."""
    words = []
    for part in ("parameters", "utility"):
        usual, found = (distance(truth[0], other[0], part) for other in (rounded, there))
        words.append(f"{part} {found:.1e} ({usual:.1e} on the CPU)")
        assert found < 5e-6 + 5 * usual, words
    loss = abs(there[1].loss / truth[1].loss - 1).max()
    words.append(f"loss {loss:.1e}")
    assert loss < 1e-4, words
    if np.isfinite(truth[1].accuracy).all():
        assert abs(there[1].accuracy - truth[1].accuracy).max() < 0.011, words
    return ", ".join(words)


@check
def noise_value_by_value() -> str:
    """One step with and without noise: the difference is lr·σ·ζ."""
    network, stream = NETWORKS["784-300-150-10"]
    drawn = []
    for more in ({"method": "sgd"}, {"method": "pgd", "sigma": 1.0}):
        population = Population(network, [Learner(lr=1.0, seed=s, **more) for s in range(8)], device="cuda")
        population.run(stream, 1)
        parameters = flat(population, "parameters").values()
        drawn.append(torch.cat([tensor.flatten(1) for tensor in parameters], 1))
    found = drawn[0] - drawn[1]
    right = learner_normals(torch.arange(8), 1, found.shape[1], dtype=torch.float64)
    error = (found - right).abs().max().item()
    assert error < 1e-4, error
    assert (found - right).abs().mean() < 1e-6
    return f"{found.numel():,} values, largest error {error:.1e}"


def _bits(population: Population) -> list[Tensor]:
    return [tensor for name, tensor in sorted(population.state().items()) if name != "window"]


@check
def reruns_and_blocks_agree_in_every_bit() -> str:
    """Twice the same; in blocks of other lengths; alone and among others."""
    network, stream = NETWORKS["784-300-150-10"]
    settings = {"lr": 0.01, "sigma": 0.1, "beta_utility": 0.99, "weight_decay": 0.01}
    learners = [Learner(method="upgd", seed=seed, **settings) for seed in range(23)]

    def run(which: list[Learner], *lengths: int) -> Population:
        population = Population(network, which, device="cuda")
        for length in lengths:
            population.run(stream, length, window=1000)
        return population

    once, again, blocks = run(learners, 150), run(learners, 150), run(learners, 1, 7, 92, 50)
    for other in (again, blocks):
        assert all(torch.equal(a, b) for a, b in zip(_bits(once), _bits(other), strict=True))
    alone = run(learners[17:18], 150)
    for (name, p), q in zip(once.parameters(17).items(), alone.parameters(0).values(), strict=True):
        assert torch.equal(p, q), name
    return "23 learners, 150 steps"


@check
def state_goes_on() -> str:
    """Saved at a 100th step and restored, bit for bit; and from the CPU's state."""
    network, stream = NETWORKS["five layers"]
    learners = rule_learners({"sigma": 0.01})
    whole = Population(network, learners, device="cuda")
    whole.run(stream, 100, window=1000)
    other = Population(network, learners, device="cuda")
    other.restore(whole.state())
    for population in (whole, other):
        population.run(stream, 57, window=1000)
    assert all(torch.equal(a, b) for a, b in zip(_bits(whole), _bits(other), strict=True))
    return "bit for bit"


@check
def a_diverged_learner_stays_alone() -> str:
    """It is frozen where it diverged, at the same step as on the CPU, and its neighbours do not notice."""
    network, stream = NETWORKS["16-300-150-1"]
    good = [Learner(method="sgd", lr=1e-4, seed=seed) for seed in range(4)]
    bad = Learner(method="sgd", lr=3.0, seed=9)
    mixed = [good[0], bad, *good[1:], bad]
    truth = Population(network, mixed, backend="torch").run(stream, 40)
    population = Population(network, mixed, device="cuda")
    result = population.run(stream, 40)
    without = Population(network, good, device="cuda")
    calm = without.run(stream, 40)
    assert result.diverged_at.tolist() == truth.diverged_at.tolist()
    assert (result.diverged_at[[1, 5]] >= 0).all()
    places = [0, 2, 3, 4]
    assert (result.loss[:, places] == calm.loss).all()
    for place, own in enumerate(places):
        for p, q in zip(population.parameters(own).values(), without.parameters(place).values(), strict=True):
            assert torch.equal(p, q)
    return f"diverged at {result.diverged_at[1]}"


UTILITY = {"lr": 0.02, "sigma": 0.05, "beta_utility": 0.9}
GENERAL = {
    "sgd": [{"method": "sgd", "lr": 0.05}, {"method": "sgdw", "lr": 0.02, "weight_decay": 0.1}],
    "adamw": [{"method": "adamw", "lr": 0.01}, {"method": "adamw", "lr": 0.001, "betas": (0.0, 0.9), "eps": 1e-4}],
    "upgd": [{"method": "upgd", **UTILITY}, {"method": "ups", **UTILITY}],
    "second order": [{"method": "upgd", "order": 2, "scaling": "local", **UTILITY}],
    "feature": [{"method": "upgd", "wise": "feature", "noise": "anticorrelated", **UTILITY}],
    "feature, second order": [{"method": "upgd", "wise": "feature", "order": 2, **UTILITY}],
}


def _general(names: Sequence[str], compiled: bool) -> str:
    network, stream = NETWORKS["five layers"]
    lines = []
    os.environ["UPGD_COMPILE"] = str(int(compiled))
    try:
        for name in names:
            learners = [Learner(seed=seed, **settings) for seed in range(3) for settings in GENERAL[name]]
            runs = both(network, stream, learners, 60, backend="torch")
            lines.append(f"{name}: {_compared(*runs)}")
            again = Population(network, learners, device="cuda", backend="torch")
            for length in (7, 53):
                again.run(stream, length, window=60)
            assert all(torch.equal(a, b) for a, b in zip(_bits(runs[2][0]), _bits(again), strict=True)), name
    finally:
        del os.environ["UPGD_COMPILE"]
    return "\n".join(lines)


@check
def graphs_take_the_same_steps() -> str:
    """The general layer under CUDA graphs: same answers, reruns and blocks bit for bit."""
    return _general(list(GENERAL), compiled=False)


@check
def compiled_graphs_take_the_same_steps() -> str:
    """... and through torch.compile."""
    return _general(["upgd"], compiled=True)
