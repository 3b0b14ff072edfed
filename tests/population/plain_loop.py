"""The reference for populations: one learner at a time, with autograd and an optimizer."""

import copy
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.utils import parameters_to_vector

import upgd.noise
from upgd.curvature import HesScale
from upgd.networks import ConvNet, reset
from upgd.noise import Purpose, learner_normals, normals, words
from upgd.optim import PGD, UPGD, UPS, FeatureUPGD, FeatureUPS, ShrinkAndPerturb
from upgd.population import Learner
from upgd.streams import Chunk

PLAIN = [
    {"method": "sgd", "lr": 0.05},
    {"method": "sgdw", "lr": 0.05, "weight_decay": 0.1},
    {"method": "adamw", "lr": 0.01},
    {"method": "adamw", "lr": 0.001, "betas": (0.0, 0.9), "eps": 1e-4, "weight_decay": 0.5},
    {"method": "pgd", "lr": 0.05, "sigma": 0.1},
    {"method": "anti-pgd", "lr": 0.05, "sigma": 0.1},
    {"method": "shrink-and-perturb", "lr": 0.02, "sigma": 0.2, "weight_decay": 0.1},
]


@dataclass
class Counters:
    """A stream of noise of any shape: inputs and targets from counters."""

    input_shape: tuple[int, ...]
    outputs: int
    loss: str = "cross_entropy"
    task_length: int = 100
    scale: float = 1.0
    name: str = "counters"

    def chunk(self, seeds: Sequence[int] | Tensor, start: int, length: int, device: str = "cpu") -> Chunk:
        seeds = torch.as_tensor(seeds)[:, None]
        steps = torch.arange(start, start + length)
        size = torch.Size(self.input_shape).numel()
        inputs = self.scale * normals(seeds, Purpose.INPUTS, steps, size).float()
        if self.loss == "mse":
            targets = normals(seeds, Purpose.TASK, steps, self.outputs).float()
        else:
            targets = words(seeds, Purpose.TASK, steps, 1).squeeze(-1) % self.outputs
        dense = inputs.view(len(seeds), length, *self.input_shape)
        return Chunk(start=start, targets=targets.to(device), dense=dense.to(device))


class SmallConvNet(ConvNet):
    """A small version of the paper's network: 2@3×3, pool 2, 3@3×3, pool 2, 5, 4, outputs."""

    CHANNELS = (2, 3)
    KERNEL = 3
    HIDDEN = (5, 4)


class Residual(nn.Module):
    """A network that is not a chain, so only ``torch.func`` can run it."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.first = nn.Linear(inputs, inputs)
        self.last = nn.Linear(inputs, outputs)
        self.register_buffer("gain", torch.tensor(0.5))

    def forward(self, x: Tensor) -> Tensor:
        return self.last(x + self.gain * torch.nn.functional.silu(self.first(x)))


class CounterNoise:
    """Stands in for :func:`upgd.noise.white_`: a learner's noise from its counters, parameter by parameter."""

    def __init__(self, seed: int, steps: int, model: nn.Module) -> None:
        count = sum(p.numel() for p in model.parameters())
        self.steps = learner_normals(seed, torch.arange(1, steps + 1), count, dtype=torch.float64)

    def begin(self, step: int) -> None:
        self.left = self.steps[step - 1]

    def __call__(self, out: Tensor, generator: torch.Generator | None = None) -> Tensor:
        drawn, self.left = self.left[: out.numel()], self.left[out.numel() :]
        return out.copy_(drawn.view_as(out))


def plain_loop(monkeypatch, network: nn.Module, learner: Learner, stream, steps: int) -> tuple[Tensor, Tensor, Tensor]:
    """Train a single learner in float64.

    Returns:
        The loss before every update, whether the prediction was right, and the final parameters as one vector.
    """
    model = reset(copy.deepcopy(network).double(), learner.seed)
    criterion = nn.CrossEntropyLoss() if stream.loss == "cross_entropy" else nn.MSELoss()
    noise = CounterNoise(learner.seed, steps, model)
    optimizer = optimizer_of(model, criterion, learner)
    chunk = stream.chunk([learner.seed], 0, steps)
    losses, right = [], []
    with monkeypatch.context() as patch:
        patch.setattr(upgd.noise, "white_", noise)
        for step, (x, y) in enumerate(zip(chunk.inputs()[0].double(), chunk.targets[0], strict=True), start=1):
            noise.begin(step)
            outputs = model(x[None])
            loss = criterion(outputs, y[None].double() if stream.loss == "mse" else y[None])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.detach())
            right.append(outputs.argmax() == y if stream.loss == "cross_entropy" else torch.tensor(False))
    return torch.stack(losses), torch.stack(right), parameters_to_vector(model.parameters()).detach()


def optimizer_of(model: nn.Module, criterion: nn.Module, learner: Learner) -> torch.optim.Optimizer:
    params = list(model.parameters())
    decay = {"weight_decay": learner.weight_decay or 0.0}
    match learner.method:
        case "sgd":
            return torch.optim.SGD(params, learner.lr)
        case "adamw":
            return torch.optim.AdamW(params, learner.lr, betas=learner.betas, eps=learner.eps, **decay)
        case "sgdw":
            return PGD(params, learner.lr, sigma=0.0, **decay)
        case "pgd":
            return PGD(params, learner.lr, sigma=learner.sigma)
        case "anti-pgd":
            return PGD(params, learner.lr, sigma=learner.sigma, noise="anticorrelated")
        case "shrink-and-perturb":
            return ShrinkAndPerturb(params, learner.lr, sigma=learner.sigma, **decay)
    options = {"beta_utility": learner.beta_utility, "sigma": learner.sigma, "scaling": learner.scaling}
    options |= {"noise": learner.noise, "curvature": HesScale(model, criterion) if learner.order == 2 else None}
    if learner.method != "ups":
        options |= {"protect_gradient": learner.method == "upgd", **decay}
    if learner.granularity == "feature":
        return (FeatureUPS if learner.method == "ups" else FeatureUPGD)(model, learner.lr, **options)
    return (UPS if learner.method == "ups" else UPGD)(params, learner.lr, **options)
