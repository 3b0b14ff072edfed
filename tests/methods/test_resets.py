"""Methods that reset hidden units, compared with loops over units written from the papers.

Fresh weights come from the same counters.
"""

import math
from types import SimpleNamespace

import pytest
import torch
from by_hand import PROBLEMS, assert_learned, fresh, learned_by_hand, population_of
from torch import Tensor, nn

import upgd
from upgd.activations import CReLU
from upgd.methods.resets import ContinualBackprop
from upgd.methods.units import Units
from upgd.optim.unit_method import UnitMethodOptimizer
from upgd.population import Learner, Population
from upgd.population.graphed import GraphedBackend

STEPS = 90

SETTINGS: dict[str, list[dict]] = {
    "continual-backprop": [
        {"lr": 0.05, "replacement_rate": 0.03, "maturity": 5, "decay_contribution": 0.9},
        {"lr": 0.02, "replacement_rate": 0.3, "maturity": 10},
    ],
    "redo": [{"lr": 0.2, "tau": 0.9, "period": 20}, {"lr": 0.05, "tau": 0.7, "period": 7}],
    "self-normalized-resets": [
        {"lr": 0.2, "rejection": 0.05, "patience": 5},
        {"lr": 0.05, "rejection": 0.01, "patience": 3},
    ],
}
CASES = [(method, optimizer) for method in SETTINGS for optimizer in ("sgd", "adam")]


def settings_of(method: str, optimizer: str) -> list[dict]:
    both = SETTINGS[method]
    return both if optimizer == "sgd" else [{**own, "lr": own["lr"] / 10, "optimizer": "adam"} for own in both]


class ByHand:
    """Layers with weights, in order; the state of weights and units is in lists and dictionaries."""

    def __init__(self, method: str, settings: dict, seed: int) -> None:
        self.method, self.settings, self.seed = method, settings, seed
        self.outputs: list[Tensor] = []
        self.adam: dict[str, list[Tensor]] = {}
        self.units: list[list[dict]] = []
        self.counters = [0.0] * 10
        self.resets = 0

    def watch(self, model: nn.Module) -> None:
        """Record the output of every activation."""
        layers = [module for module in model.modules() if isinstance(module, nn.Linear | nn.Conv2d)]
        active = [module for module in model.modules() if isinstance(module, nn.ReLU | nn.Tanh)]
        for number, module in enumerate(active):
            module.register_forward_hook(lambda _, __, out, number=number: self.seen(number, out))
        self.layers = layers
        self.units = [[{"age": 0} for _ in layer.weight] for layer in layers[:-1]]

    def seen(self, number: int, out: Tensor) -> None:
        self.outputs[number:] = [out.detach()[0].flatten(1) if out.ndim > 2 else out.detach()[0][:, None]]

    def __call__(self, model: nn.Module, t: int) -> None:
        for name, w in model.named_parameters():
            self.optimizer_step(name, w)
        for number, layer in enumerate(self.layers[:-1]):
            units = self.units[number]
            for unit, out in zip(units, self.outputs[number], strict=True):
                unit["age"] += 1
                unit["out"] = out
            for chosen in getattr(self, self.method.replace("-", "_"))(number, units, t):
                self.reset(model, number, layer, chosen, t)

    def optimizer_step(self, name: str, w: Tensor) -> None:
        lr = self.settings["lr"]
        if self.settings.get("optimizer", "sgd") == "sgd":
            w -= lr * w.grad
            return
        m, v, count = self.adam.setdefault(name, [torch.zeros_like(w) for _ in range(3)])
        count += 1
        m.mul_(0.9).add_(0.1 * w.grad)
        v.mul_(0.999).add_(0.001 * w.grad**2)
        w -= lr * (m / (1 - 0.9**count)) / ((v / (1 - 0.999**count)).sqrt() + 1e-8)

    def leaving(self, number: int, unit: int) -> tuple[Tensor, ...]:
        """The columns of the next weight that belong to a unit."""
        weight = self.layers[number + 1].weight
        each = weight.shape[1] // len(self.units[number])  # Flatten turns every position into a column
        return weight, slice(unit * each, (unit + 1) * each)

    def continual_backprop(self, number: int, units: list[dict], t: int) -> list[int]:
        eta = self.settings.get("decay_contribution", 0.99)
        for i, unit in enumerate(units):
            weight, columns = self.leaving(number, i)
            contribution = float(unit["out"].abs().mean() * weight[:, columns].abs().sum())
            unit["u"] = eta * unit.get("u", 0) + (1 - eta) * contribution
            unit["f"] = eta * unit.get("f", 0) + (1 - eta) * float(unit["out"].mean())
        mature = [i for i, unit in enumerate(units) if unit["age"] > self.settings["maturity"]]
        self.counters[number] += self.settings["replacement_rate"] * len(mature)
        chosen = []
        while self.counters[number] >= 1:
            left = [i for i in mature if i not in chosen]
            chosen.append(min(left, key=lambda i: units[i]["u"] / (1 - eta ** units[i]["age"])))
            self.counters[number] -= 1
        for i in chosen:
            weight, columns = self.leaving(number, i)
            mean = units[i]["f"] / (1 - eta ** units[i]["age"])
            self.layers[number + 1].bias += mean * weight[:, columns].flatten(1).sum(1)
        return sorted(chosen)

    def redo(self, number: int, units: list[dict], t: int) -> list[int]:
        for unit in units:
            unit.setdefault("sizes", []).append(float(unit["out"].abs().mean()))
        if t % self.settings["period"]:
            return []
        means = [sum(unit.pop("sizes")) / self.settings["period"] for unit in units]
        return [i for i, mean in enumerate(means) if mean <= self.settings["tau"] * sum(means) / len(means)]

    def self_normalized_resets(self, number: int, units: list[dict], t: int) -> list[int]:
        chosen = []
        for i, unit in enumerate(units):
            if bool((unit["out"] > 0).any()):
                unit.setdefault("intervals", []).append(unit.pop("silence", 0) + 1)
                continue
            unit["silence"] = unit.get("silence", 0) + 1
            intervals = [self.settings["patience"], *unit.get("intervals", [])]
            mean = sum(intervals) / len(intervals)
            if unit["silence"] * math.log(1 - 1 / mean) <= math.log(self.settings["rejection"]):
                chosen.append(i)
        return chosen

    def reset(self, model: nn.Module, number: int, layer: nn.Module, unit: int, t: int) -> None:
        self.resets += 1
        weight, columns = self.leaving(number, unit)
        layer.weight[unit] = fresh(self.seed, t, number, layer.weight.shape)[unit]
        layer.bias[unit] = 0
        weight[:, columns] = 0
        self.units[number][unit] = {"age": 0}
        names = {id(p): name for name, p in model.named_parameters()}
        for kept in self.adam.get(names[id(layer.weight)], ()):
            kept[unit] = 0
        for kept in self.adam.get(names[id(layer.bias)], ()):
            kept[unit] = 0
        for kept in self.adam.get(names[id(weight)], ()):
            kept[:, columns] = 0


def learned(problem: str, method: str, settings: dict, seed: int) -> tuple[dict[str, Tensor], int]:
    hand = ByHand(method, settings, seed)
    return learned_by_hand(problem, seed, hand, STEPS, hand.watch), hand.resets


@pytest.mark.parametrize("problem", PROBLEMS)
@pytest.mark.parametrize(("method", "optimizer"), CASES)
def test_the_method_is_its_formula(method: str, optimizer: str, problem: str) -> None:
    settings = settings_of(method, optimizer)
    population = population_of(problem, method, settings, STEPS)
    resets = []
    for seed, own in enumerate(settings):
        wanted, count = learned(problem, method, own, seed)
        assert_learned(population, seed, wanted)
        resets.append(count)
    assert min(resets) > 3, "hardly anything was reset"


@pytest.mark.parametrize(("method", "optimizer"), CASES)
def test_results_are_independent_of_other_learners_and_pieces(method: str, optimizer: str) -> None:
    network, stream = PROBLEMS["images"]
    settings = settings_of(method, optimizer)
    together = population_of("images", method, settings, STEPS)
    for seed, own in enumerate(settings):
        alone = Population(network, [Learner(method=method, seed=seed, **own)], backend="torch", dtype=torch.float64)
        alone.run(stream, 41)
        again = Population(network, alone.learners, backend="torch", dtype=torch.float64)
        again.restore(alone.state())
        again.run(stream, STEPS - 41)
        for name, parameter in again.parameters(0).items():
            assert torch.equal(parameter, together.parameters(seed)[name]), name


@pytest.mark.parametrize(("method", "optimizer"), CASES)
def test_on_a_gpu_the_steps_are_the_same(monkeypatch, method: str, optimizer: str) -> None:
    """The backend for GPUs; on the CPU, it runs without a graph."""
    plain = population_of("classes", method, settings_of(method, optimizer), STEPS)
    monkeypatch.setattr("upgd.population.choose._torch", lambda device: GraphedBackend)
    graphed = population_of("classes", method, settings_of(method, optimizer), STEPS)
    for seed in range(2):
        torch.testing.assert_close(graphed.parameters(seed), plain.parameters(seed), rtol=0, atol=1e-9)


def test_a_replacement_preserves_the_mean_output_of_the_next_layer() -> None:
    """With constant inputs, the output of a unit equals its mean, and the bias replaces it."""
    generator = torch.Generator().manual_seed(0)
    activation, outgoing = torch.rand(1, 5, 4, generator=generator), torch.randn(1, 3, 5, 2, generator=generator)
    units = Units(activation, activation, activation[..., 0], None, activation, None, outgoing)
    method = ContinualBackprop()
    state = {name: torch.zeros(1, 1 if kind == "layer" else 5) for name, kind in method.unit_state.items()}
    numbers = {"replacement_rate": 0.2, "maturity": 2.0, "decay_contribution": 0.9}
    for _ in range(3):
        reset, changes = method.reset_units(units, SimpleNamespace(**state), SimpleNamespace(**numbers))
        state |= changes
    assert reset.units.sum() == 1
    gone = int(reset.units.nonzero()[0, 1])
    wanted = activation[0, gone].mean() * outgoing[0, :, gone].sum(-1)
    torch.testing.assert_close(reset.next_bias[0], wanted)


DOUBLED = nn.Sequential(
    *(nn.Conv2d(2, 4, 3), CReLU(-3), nn.MaxPool2d(2), nn.Conv2d(8, 3, 2), CReLU(-3)),
    *(nn.Flatten(), nn.Linear(24, 5), nn.LayerNorm(5), CReLU(), nn.Linear(10, 3)),
)


@pytest.mark.parametrize("problem", ["images", "doubled"])
@pytest.mark.parametrize(("method", "optimizer"), CASES)
def test_the_optimizer_equals_the_population(method, optimizer, problem, monkeypatch):
    """With convolutions, LayerNorm and CReLU; new weights come from the same counters."""
    monkeypatch.setitem(PROBLEMS, "doubled", (DOUBLED, PROBLEMS["images"][1]))
    settings = settings_of(method, optimizer)[0]
    resets = []

    def step(model: nn.Module, t: int) -> None:
        weights = [param for param in model.parameters() if param.ndim > 1]

        def uniform(_: object, weight: Tensor) -> Tensor:
            layer = next(number for number, own in enumerate(weights) if own is weight)
            return (fresh(0, t, layer, weight.shape) * weight[0].numel() ** 0.5 + 1) / 2

        monkeypatch.setattr(UnitMethodOptimizer, "_uniform", uniform)
        resets[0].step()

    def begin(model: nn.Module) -> None:
        resets.append(upgd.methods.optimizer(method, model, **settings))

    assert_learned(
        population_of(problem, method, [settings], STEPS), 0, learned_by_hand(problem, 0, step, STEPS, begin)
    )
