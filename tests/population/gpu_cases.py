"""Shared parts of the GPU checks: problems, learners, and comparisons.

Every check takes the device to hold to the CPU, so that the checks themselves are tested where there is no GPU.
"""

import logging
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from upgd.networks import MLP, ConvNet, Linear
from upgd.noise import Purpose, normals, words
from upgd.population import Learner, Population
from upgd.population.result import Result
from upgd.population.spec import groups
from upgd.streams import Chunk

Settings = dict[str, Any]


class Check(NamedTuple):
    """Raises an AssertionError, or returns a description of the result."""

    run: Callable[[str], str]
    needs_kernels: bool  #: those of kernels_compile


CHECKS: dict[str, Check] = {}
NOISES: tuple[Settings | None, ...] = (None, {"sigma": 0.1}, {"sigma": 0.1, "noise": "anticorrelated"})


def check(function: Callable[[str], str], *, needs_kernels: bool = False) -> Callable[[str], str]:
    """Register a function as a check."""
    CHECKS[function.__name__] = Check(function, needs_kernels)
    return function


check_with_kernels = partial(check, needs_kernels=True)


@dataclass
class Samples:
    """Inputs and targets from counters; images with permuted pixels, or dense inputs."""

    input_shape: tuple[int, ...]
    outputs: int
    loss: str = "cross_entropy"
    images: bool = False
    task_length: int = 30
    name: str = "samples"

    def chunk(self, seeds: Sequence[int] | Tensor, start: int, length: int, device: str = "cpu") -> Chunk:
        seeds = torch.as_tensor(seeds)[:, None]
        steps = torch.arange(start, start + length)
        size = torch.Size(self.input_shape).numel()
        if self.loss == "mse":
            targets = normals(seeds, Purpose.TASK, steps, self.outputs).float()
        else:
            targets = words(seeds, Purpose.TASK, steps, 1).squeeze(-1) % self.outputs
        targets = targets.to(device)
        if not self.images:
            dense = 0.5 * normals(seeds, Purpose.INPUTS, steps, size).float()
            return Chunk(
                start=start, targets=targets, dense=dense.view(len(seeds), length, *self.input_shape).to(device)
            )
        source = (words(0, Purpose.INPUTS, torch.arange(50), size) >> 24).to(torch.uint8).view(50, *self.input_shape)
        first = start // self.task_length
        tasks = torch.arange(first, (start + length - 1) // self.task_length + 1)
        order = words(seeds, Purpose.SAMPLE_ORDER, tasks, size).argsort(dim=-1, stable=True)
        index = words(seeds, Purpose.INPUTS, steps, 2)[..., 1] % len(source)
        return Chunk(
            start=start,
            targets=targets,
            source=source.to(device),
            index=index.to(device),
            permutation=order.to(device),
            task=(steps // self.task_length - first).to(device),
        )


Problem = tuple[nn.Module, Samples]
NETWORKS: dict[str, Problem] = {
    "784-300-150-10": (MLP((784, 300, 150, 10)), Samples((784,), 10, images=True)),
    "784-300-150-47": (MLP((784, 300, 150, 47)), Samples((784,), 47, images=True)),
    "16-300-150-1": (MLP((16, 300, 150, 1), "identity"), Samples((16,), 1, "mse")),
    "5-50-50-1": (MLP((5, 50, 50, 1), "tanh"), Samples((5,), 1, "mse")),
    "five layers": (MLP((33, 21, 18, 7, 9, 4), "leaky_relu"), Samples((33,), 4, images=True)),
    "two layers": (MLP((100, 64, 40)), Samples((100,), 40)),
    "one layer": (Linear(30, 3), Samples((30,), 3)),
    "no bias": (
        nn.Sequential(nn.Linear(20, 31, bias=False), nn.Tanh(), nn.Linear(31, 6, bias=False)),
        Samples((20,), 6, "mse"),
    ),
}


class SmallConvNet(ConvNet):
    CHANNELS = (4, 5)
    KERNEL = 3
    HIDDEN = (9, 8)


class PaddedConvNet(SmallConvNet):
    """Strides, zeros around the images, windows that overlap, a pooling before its activation, a layer without biases."""

    def __init__(self) -> None:
        super().__init__((2, 12, 10), 3)
        self.layers = nn.Sequential(
            nn.Conv2d(2, 5, (3, 2), padding=(1, 1)),
            nn.MaxPool2d(3, stride=2),
            nn.LeakyReLU(0.1),
            nn.Conv2d(5, 4, 2, stride=(1, 2), padding=(0, 1), bias=False),
            nn.Tanh(),
            nn.Conv2d(4, 6, 1),
            nn.Flatten(-3),
            nn.Linear(72, 7),
            nn.ReLU(),
            nn.Linear(7, 3),
        )


#: Networks that begin with convolutions, small enough for any number of steps; by the size of the clusters.
CONVOLUTIONS: dict[int, Problem] = {
    1: (SmallConvNet((12, 12), 3, "tanh"), Samples((12, 12), 3)),
    2: (PaddedConvNet(), Samples((2, 12, 10), 3, images=True, task_length=5)),
    3: (SmallConvNet((3, 14, 12), 5), Samples((3, 14, 12), 5, images=True, task_length=5)),
    4: (SmallConvNet((2, 12, 12), 2, conv_activation=False), Samples((2, 12, 12), 2, "mse")),
}
PAPERS_CONVNET: dict[bool, Problem] = {
    active: (ConvNet((3, 32, 32), 10, conv_activation=active), Samples((3, 32, 32), 10, images=True, task_length=5))
    for active in (True, False)
}


def rule_learners(noise: Settings | None) -> list[Learner]:
    """Every rule that the kernel supports, with different settings in one batch."""
    perturbed = {"sigma": 0.0} if noise is None else noise
    learners = []
    for scaling in ("global", "local"):
        for method in ("upgd", "upgd-nonprotecting", "ups"):
            for seed, (lr, beta, decay) in enumerate([(0.01, 0.999, 0.01), (0.03, 0.9, 0.0), (0.002, 0.0, 0.1)]):
                more = {} if method == "ups" else {"weight_decay": decay}
                settings = {"lr": lr, "beta_utility": beta, "scaling": scaling, "seed": seed, **more, **perturbed}
                learners.append(Learner(method=method, **settings))
    plain: list[tuple[str, Settings]] = [("sgd", {}), ("sgdw", {"weight_decay": 0.1})]
    if noise is not None:
        size = noise["sigma"]
        plain = [("pgd", {"sigma": size}), ("shrink-and-perturb", {"sigma": size, "weight_decay": 0.1})]
        plain = [("anti-pgd", {"sigma": size})] if noise.get("noise") == "anticorrelated" else plain
    learners += [Learner(method=m, lr=lr, seed=3, **more) for m, more in plain for lr in (0.01, 0.03)]
    return learners


@contextmanager
def compiling(wanted: bool) -> Iterator[None]:
    """Set whether the general layer uses ``torch.compile``, the default, which takes time.

    If it fails, the layer continues without it and logs a message; this is a failure here if Triton is available.
    """
    log, told = logging.getLogger("upgd.population"), logging.Handler()
    failures: list[str] = []
    told.emit = lambda record: failures.append(record.getMessage()) if "torch.compile" in str(record.msg) else None
    before, level = os.environ.get("UPGD_COMPILE"), log.level
    os.environ["UPGD_COMPILE"] = str(int(wanted))
    log.addHandler(told)
    log.setLevel(logging.INFO)
    try:
        yield
    finally:
        log.removeHandler(told)
        log.setLevel(level)
        del os.environ["UPGD_COMPILE"]
        if before is not None:
            os.environ["UPGD_COMPILE"] = before
    assert not failures or find_spec("triton") is None, failures


# ---------------------------------------------------------------------------------------------------------------- equal


@dataclass
class Run:
    """A population before and after some steps."""

    population: Population
    before: dict[str, Tensor]
    result: Result

    @classmethod
    def of(cls, population: Population, stream: Samples, steps: int) -> "Run":
        before = population.state()
        return cls(population, before, population.run(stream, steps, window=10_000))


def both(problem: Problem, learners: Sequence[Learner], steps: int, device: str, backend: str) -> tuple[Run, Run, Run]:
    """The same run on the CPU in float64 (the truth) and in float32 (what rounding does), and on the device."""
    return *on_the_cpu(problem, learners, steps), on_the_device(problem, learners, steps, device, backend)


def on_the_cpu(problem: Problem, learners: Sequence[Learner], steps: int) -> tuple[Run, Run]:
    network, stream = problem
    truth, rounded = (Population(network, learners, backend="torch", dtype=t) for t in (torch.float64, torch.float32))
    return Run.of(truth, stream, steps), Run.of(rounded, stream, steps)


def on_the_device(problem: Problem, learners: Sequence[Learner], steps: int, device: str, backend: str) -> Run:
    network, stream = problem
    population = Population(network, learners, device=device, backend=backend)
    assert set(population.backends) == {backend}
    return Run.of(population, stream, steps)


#: Allowed error of a part, even if the CPU's float32 is exact: the kernel's noise uses hardware functions (see docs/gpu.md).
_GRANTED = 5e-6
_GRANTED_MOVES = 3e-5


def parts(run: Run) -> dict[str, dict[int, list[Tensor]]]:
    """Return the state of the learners: by part, and for each learner that has the part, its tensors; and
    how much the parameters have ``moved``."""
    population, now = run.population, run.population.state()
    found: dict[str, dict[int, list[Tensor]]] = {}
    for number, (group, own) in enumerate(groups(population.learners, [0] * len(population.learners))):
        for part in ("parameters", *group.method.state, *group.method.unit_state):
            names = [name for name in now if name.startswith(f"group.{number}.{part}.")]
            assert names or part in group.method.unit_state, f"no {part} of {group.kind}"
            for row, learner in enumerate(own):
                found.setdefault(part, {})[learner] = [now[name][row].double() for name in names]
                if part == "parameters":
                    moves = [now[name][row].double() - run.before[name][row].double() for name in names]
                    found.setdefault("moved", {})[learner] = moves
    return found


def distances(truth: Run, other: Run) -> dict[str, dict[int, float]]:
    """By part and learner, the largest relative distance of a tensor."""
    right, found = parts(truth), parts(other)
    assert right.keys() == found.keys()
    return {
        part: {learner: _distance(tensors, found[part][learner]) for learner, tensors in of_learners.items()}
        for part, of_learners in right.items()
    }


def _distance(right: list[Tensor], found: list[Tensor]) -> float:
    errors = [float((a - b).norm() / a.norm().clamp(min=1e-12)) for a, b in zip(right, found, strict=True)]
    return max((error if error == error else float("inf") for error in errors), default=0.0)


def compared(truth: Run, rounded: Run, there: Run) -> str:
    """Check that the device is as close to float64 as float32 is on the CPU, up to a factor; return a description.

    Every learner is held to the CPU's worst; and of the learners of each method and kind, the one in the middle to the
    CPU's in the middle, so that a mistake in one method cannot hide behind another one's rounding. Where the network has
    kinks, rounding may push an input of a unit over one, and this shows: one learner in twenty is then let off the first.
    """
    learners = truth.population.learners
    exempt = 1 + len(learners) // 20 if _has_kinks(truth.population.network(0)) else 0
    usual, found = distances(truth, rounded), distances(truth, there)
    words, wrong = [], []
    for part, of_learners in found.items():
        granted = _GRANTED_MOVES if part == "moved" else _GRANTED
        worst, cpu = sorted(of_learners.values(), reverse=True), sorted(usual[part].values(), reverse=True)
        counted = min(exempt, len(worst) - 1)
        words.append(f"{part} {worst[0]:.1e} ({cpu[0]:.1e} on the CPU)")
        # A learner that is let off must still be one of them; the CPU's own float32 may go over the same kink.
        sane = max(0.01 if part == "parameters" else 1, 2 * cpu[0])
        if not worst[counted] < granted + 5 * cpu[counted] or not worst[0] < sane:
            wrong.append(f"{part} {worst[: counted + 1]}, but {cpu[: counted + 1]} on the CPU")
        if not cpu[counted] < 0.01:
            wrong.append(f"{part}: no measure, since the CPU's own float32 is off by {cpu[counted]:.1e}")
        for label in {_label(learners[i]) for i in of_learners}:
            own = [i for i in of_learners if _label(learners[i]) == label]
            middle, expected = (_middle([table[part][i] for i in own]) for table in (found, usual))
            if not middle < granted + 5 * expected:
                wrong.append(f"{part} of {label}: {middle:.1e} ({expected:.1e} on the CPU)")
    loss, usual_loss = (abs(run.result.loss / truth.result.loss - 1).max() for run in (there, rounded))
    words.append(f"loss {loss:.1e}")
    assert not wrong, f"{wrong}: {words}"
    assert loss < 1e-4 + 5 * usual_loss < 1e-2, words
    assert there.result.diverged_at.tolist() == truth.result.diverged_at.tolist(), there.result.diverged_at
    if np.isfinite(truth.result.accuracy).any():  # not a regression
        hits = abs(there.result.accuracy - truth.result.accuracy) * there.result.lengths[:, None]
        words.append(f"{hits.sum():.0f} hits differ")
        assert hits.max() < 1.5, words
    return ", ".join(words)


def _has_kinks(network: nn.Module) -> bool:
    return any(isinstance(module, nn.ReLU | nn.LeakyReLU | nn.MaxPool2d) for module in network.modules())


def _label(learner: Learner) -> tuple[object, ...]:
    return (learner.method, *learner.kind, learner.eps, learner.betas)


def _middle(values: list[float]) -> float:
    return sorted(values)[(len(values) - 1) // 2]


def bits(population: Population) -> dict[str, Tensor]:
    """Return everything in a population, as bits."""
    return {name: tensor.contiguous().flatten().view(torch.uint8) for name, tensor in population.state().items()}


def assert_same_bits(first: dict[str, Tensor], second: dict[str, Tensor], what: str) -> None:
    assert first.keys() == second.keys(), what
    differing = [name for name in first if not torch.equal(first[name], second[name])]
    assert not differing, f"{what}: {differing}"


def of_learner(population: Population, learner: int) -> dict[str, Tensor]:
    """Return the state and results of one learner, regardless of its index in the population."""
    result = population.result()
    seen = {"loss": result.loss[:, learner], "accuracy": result.accuracy[:, learner]}
    seen["diverged_at"] = result.diverged_at[learner : learner + 1]
    for number, (_, own) in enumerate(groups(population.learners, [0] * len(population.learners))):
        if learner in own:
            state = population.state()
            mine = {n.removeprefix(f"group.{number}."): t for n, t in state.items() if n.startswith(f"group.{number}.")}
            tensors = {name: tensor[own.index(learner)] for name, tensor in mine.items()}
    return {**tensors, **{name: torch.from_numpy(values.copy()) for name, values in seen.items()}}


def assert_same_learner(one: dict[str, Tensor], other: dict[str, Tensor], what: object) -> None:
    assert one.keys() == other.keys(), what
    for name, tensor in one.items():
        same = torch.equal(*(t.contiguous().flatten().view(torch.uint8) for t in (tensor, other[name])))
        assert same, f"{name} of {what}"
