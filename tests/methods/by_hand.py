"""Reference loops for methods: autograd, one learner, float64."""

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from upgd.networks import MLP, reset
from upgd.noise import Purpose, uniforms_at, words
from upgd.population import Learner, Population
from upgd.streams import Chunk

STEPS = 60


@dataclass
class Numbers:
    """A stream of noise: normal inputs, random classes or targets, the same for all seeds."""

    input_shape: tuple[int, ...]
    outputs: int
    loss: str = "cross_entropy"
    task_length: int = 100
    name: str = "numbers"

    def chunk(self, seeds: Sequence[int] | Tensor, start: int, length: int, device: str = "cpu") -> Chunk:
        generator = torch.Generator().manual_seed(5)
        inputs = torch.randn(start + length, *self.input_shape, generator=generator)[start:]
        generator = torch.Generator().manual_seed(6)
        targets = torch.randint(self.outputs, (start + length,), generator=generator)[start:]
        if self.loss == "mse":
            targets = F.one_hot(targets, self.outputs).float()
        dense = inputs.expand(len(seeds), *inputs.shape).contiguous()
        return Chunk(start=start, targets=targets.expand(len(seeds), *targets.shape).contiguous(), dense=dense)


#: The small networks and their problems.
PROBLEMS = {
    "classes": (MLP((6, 7, 5, 3)), Numbers((6,), 3)),
    "numbers": (MLP((6, 7, 5, 2), "tanh"), Numbers((6,), 2, loss="mse")),
    "images": (
        nn.Sequential(
            *(nn.Conv2d(2, 4, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(4, 3, 2), nn.ReLU()),
            *(nn.Flatten(), nn.Linear(12, 5), nn.ReLU(), nn.Linear(5, 3)),
        ),
        Numbers((2, 8, 8), 3),
    ),
}

Step = Callable[[nn.Module, int], None]


def learned_by_hand(
    problem: str, seed: int, step: Step, steps: int = STEPS, begin: Callable[[nn.Module], None] = lambda model: None
) -> dict[str, Tensor]:
    """Return the parameters after calls of ``step(model, t)``, t from 1, each after a backward pass."""
    network, stream = PROBLEMS[problem]
    model = reset(copy.deepcopy(network).double(), seed)
    begin(model)
    chunk = stream.chunk([seed], 0, steps)
    for t, (x, y) in enumerate(zip(chunk.inputs()[0].double(), chunk.targets[0], strict=True), start=1):
        outputs = model(x[None])
        model.zero_grad()
        lost = (
            F.cross_entropy(outputs, y[None])
            if stream.loss == "cross_entropy"
            else F.mse_loss(outputs[0], y.double())  # torch 2.6 asks for one dtype
        )
        lost.backward()
        with torch.no_grad():
            step(model, t)
    return {name: p.detach() for name, p in model.named_parameters()}


def population_of(problem: str, method: str, settings: list[dict], steps: int = STEPS) -> Population:
    """Run learners with seeds 0, 1, … and these settings in one population."""
    network, stream = PROBLEMS[problem]
    learners = [Learner(method=method, seed=seed, **own) for seed, own in enumerate(settings)]
    population = Population(network, learners, backend="torch", dtype=torch.float64)
    population.run(stream, steps)
    assert (population.diverged_at < 0).all()
    return population


def assert_learned(population: Population, learner: int, wanted: dict[str, Tensor]) -> None:
    for name, found in population.parameters(learner).items():
        torch.testing.assert_close(
            found, wanted[name], rtol=0, atol=1e-10, msg=lambda text, name=name: f"{name}: {text}"
        )


def fresh(seed: int, step: int, layer: int, shape: torch.Size) -> Tensor:
    """Return the random numbers of a reset at this step for the incoming weights of a hidden layer, counted from 0."""
    keys = words(torch.tensor([seed]), Purpose.RESET, step, 4 * (layer + 1))[:, -4:].to(torch.int32)
    uniform = uniforms_at(keys, torch.arange(shape.numel(), dtype=torch.int32)).double()
    return (2 * uniform - 1).mul(shape[1:].numel() ** -0.5).view(shape)
