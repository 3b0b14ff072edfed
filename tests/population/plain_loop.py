"""One learner at a time, the plain way: autograd and an optimizer. What a population is compared with."""

import copy
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.utils import parameters_to_vector

import upgd.noise
from upgd import rules
from upgd.curvature import HesScale
from upgd.networks import ConvNet, reset
from upgd.noise import Purpose, learner_normals, normals, words
from upgd.optim import PGD, UPGD, UPS, ShrinkAndPerturb
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
    """A stream of numbers that have nothing to learn, of any shape: inputs and targets from counters."""

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
    """The paper's network, made small: 2@3×3, pool 2, 3@3×3, pool 2, 5, 4, outputs."""

    CHANNELS = (2, 3)
    KERNEL = 3
    HIDDEN = (5, 4)


class Residual(nn.Module):
    """A network that only ``torch.func`` can run: it is no chain."""

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
    """Learn alone, in float64.

    Returns:
        The loss before every update, whether the prediction was right, and the final parameters as one vector.
    """
    model = reset(copy.deepcopy(network).double(), learner.seed)
    criterion = nn.CrossEntropyLoss() if stream.loss == "cross_entropy" else nn.MSELoss()
    noise = CounterNoise(learner.seed, steps, model)
    optimizer = (
        FeatureWise(model, criterion, learner) if learner.wise == "feature" else weight_wise(model, criterion, learner)
    )
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


def weight_wise(model: nn.Module, criterion: nn.Module, learner: Learner) -> torch.optim.Optimizer:
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
    if learner.method == "ups":
        return UPS(params, learner.lr, **options)
    return UPGD(params, learner.lr, protect_gradient=learner.method == "upgd", **decay, **options)


class FeatureWise:
    """The feature-wise rule for one chain of layers, its gates found by hooks on the layers that follow the weighted ones."""

    def __init__(self, model: nn.Module, criterion: nn.Module, learner: Learner) -> None:
        layers = [m for m in model.modules() if not list(m.children())]
        weighted = [m for m in layers if isinstance(m, nn.Linear | nn.Conv2d)]
        self.model, self.learner, self.step_count = model, learner, 0
        self.hidden, self.last = weighted[:-1], weighted[-1]
        self.seen = [layers[layers.index(layer) + 1] for layer in self.hidden]
        self.hesscale = HesScale(model, criterion, features=self.seen) if learner.order == 2 else None
        self.gradient: dict[nn.Module, Tensor] = {}
        for module in self.seen:
            module.register_forward_hook(self._look)
        units = {layer: len(layer.weight) for layer in self.hidden}
        self.traces = {layer: torch.zeros(units[layer], dtype=torch.float64) for layer in self.hidden}
        self.previous = {p: torch.zeros_like(p) for p in model.parameters()}

    def _look(self, module: nn.Module, _: tuple[Tensor, ...], output: Tensor) -> None:
        def remember(gradient: Tensor) -> None:
            products = (gradient * output.detach())[0]
            self.gradient[module] = products.flatten(1).sum(1) if products.ndim > 1 else products

        output.register_hook(remember)

    def zero_grad(self) -> None:
        self.model.zero_grad()

    @torch.no_grad()
    def step(self) -> None:
        own = self.learner
        self.step_count += 1
        unbiased = []
        for layer, seen in zip(self.hidden, self.seen, strict=True):
            utility = -self.gradient[seen]
            if self.hesscale is not None:
                utility = utility + 0.5 * self.hesscale.feature_diagonal(seen)
            self.traces[layer] = own.beta_utility * self.traces[layer] + (1 - own.beta_utility) * utility
            unbiased.append(self.traces[layer] / (1 - own.beta_utility**self.step_count))
        largest = rules.global_scale(unbiased)
        gates = {
            layer: torch.sigmoid(u / (largest if own.scaling == "global" else rules.local_scale(u)))
            for layer, u in zip(self.hidden, unbiased, strict=True)
        }
        for layer in [*self.hidden, self.last]:
            for p in layer.parameters(recurse=False):
                white = upgd.noise.white_(torch.empty_like(p))
                xi = white - self.previous[p] if own.noise == "anticorrelated" else white
                self.previous[p] = white
                kept = (1 - own.lr * (own.weight_decay or 0.0)) * p
                if layer is self.last:
                    p.copy_(kept - own.lr * p.grad)
                    continue
                gate = gates[layer].view(-1, *[1] * (p.ndim - 1))
                descent = 0 if own.method == "ups" else p.grad * (1 - gate if own.method == "upgd" else 1)
                p.copy_(kept - own.lr * (descent + own.sigma * xi * (1 - gate)))
