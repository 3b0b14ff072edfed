"""Requirements of every registered method, in every variant."""

import copy
import functools
import itertools
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import upgd
import upgd.noise
from upgd.methods import METHODS
from upgd.networks import MLP, reset
from upgd.noise import Purpose, learner_normals
from upgd.optim._base import BaseOptimizer
from upgd.optim.unit_method import UnitMethodOptimizer
from upgd.population import Learner, Population
from upgd.streams import make

STREAM = make("output-permuted-digits", task_length=10)
NETWORK = MLP((64, 7, 6, 10), "leaky_relu")
#: Not supported by the compiled loops: two outputs per unit, and weights that do not belong to a unit.
OTHER_NETWORK = MLP((64, 7, 6, 10), "crelu", layer_norm=True)
STEPS = 16
#: Values for settings that would otherwise have almost no effect within so few steps.
VALUES = {"lr": 0.02, "sigma": 0.05, "weight_decay": 0.1, "beta_utility": 0.8, "betas": (0.5, 0.9)}


def variants() -> dict[str, dict[str, Any]]:
    """Every combination of the choices of every method; and inputs that are normalized and layers without gates."""
    found = {}
    for name, method in METHODS.items():
        if not method.__module__.startswith("upgd."):
            continue
        choices = {key: setting.choices for key, setting in method.settings.items() if setting.choices}
        combined = [dict(zip(choices, chosen, strict=True)) for chosen in itertools.product(*choices.values())]
        combined.append({"normalize": 0.9})
        if "gated" in method.settings:
            combined += [{"gated": "output"}, {"gated": "hidden"}]
        for chosen in combined:
            found[" ".join([name, *(f"{key}={value}" for key, value in chosen.items())])] = {"method": name, **chosen}
    return found


def learner_of(settings: dict[str, Any], **others: Any) -> Learner:
    own = METHODS[settings["method"]].settings
    needed = {name: setting.example for name, setting in own.items() if setting.default is ...}
    return Learner(**{**needed, **{name: value for name, value in VALUES.items() if name in own}, **settings, **others})


#: Each has its own seed, so that they cannot be confused.
LEARNERS = {name: learner_of(settings, seed=seed) for seed, (name, settings) in enumerate(variants().items())}
every_variant = pytest.mark.parametrize("name", LEARNERS)


@functools.cache
def crowd(dtype: torch.dtype, steps: int = STEPS) -> Population:
    """Return the result of all learners in one population."""
    population = Population(NETWORK, list(LEARNERS.values()), backend="torch", dtype=dtype)
    population.run(STREAM, steps, window=1)
    return population


def place(name: str) -> int:
    return list(LEARNERS).index(name)


def assert_same(one: dict[str, Tensor], other: dict[str, Tensor], **tolerance: float) -> None:
    assert one.keys() == other.keys()
    for name, value in one.items():
        torch.testing.assert_close(value, other[name], **(tolerance or {"rtol": 0, "atol": 0}), equal_nan=True)


# --------------------------------------------------------------------------------------------------------- a plain loop


class EvenFeatureSearch:
    """The control of feature-wise search by hand: noise for hidden layers, gradient descent for all others.

    With the authors' profile, noise for all layers.
    """

    def __init__(self, model: nn.Module, learner: Learner) -> None:
        *hidden, output = (layer for layer in model.layers if isinstance(layer, nn.Linear))
        searched = [*hidden, output] if learner.profile == "authors" else hidden
        self.searched = [param for layer in searched for param in layer.parameters()]
        others = [param for param in model.parameters() if all(param is not own for own in self.searched)]
        anticorrelated = learner.noise == "anticorrelated"
        noise = "anticorrelated" if anticorrelated else "white"
        self.search = upgd.PGD(self.searched, learner.lr, sigma=learner.sigma, noise=noise)
        self.descent = torch.optim.SGD(others, learner.lr) if others else None

    def step(self) -> None:
        for param in self.searched:
            param.grad = torch.zeros_like(param)
        self.search.step()
        if self.descent is not None:
            self.descent.step()


def optimizer_of(model: nn.Module, criterion: nn.Module, learner: Learner) -> Any:
    settings = {name: value for name, value in learner.values if name not in ("normalize", "gated")}
    curvature = upgd.HesScale(model, criterion) if settings.pop("order", 1) == 2 else None
    if settings.get("granularity") == "feature":
        if learner.method == "ups-even":
            return EvenFeatureSearch(model, learner)
        if settings.get("profile") == "authors":
            return upgd.methods.optimizer(learner.method, model, curvature=curvature, **settings)
        del settings["granularity"]
        settings.pop("profile", None)
        if learner.method == "ups":
            return upgd.FeatureUPS(model, curvature=curvature, **settings)
        return upgd.FeatureUPGD(model, protect_gradient=learner.method == "upgd", curvature=curvature, **settings)
    method = METHODS[learner.method]
    if hasattr(method, "reset_units") or method.needs("bound"):
        return upgd.methods.optimizer(learner.method, model, **settings)
    output = list(model.layers[-1].parameters())
    hidden = [param for name, param in model.named_parameters() if all(param is not other for other in output)]
    groups = [{"params": hidden}, {"params": output}]
    if learner.gated in ("hidden", "output"):
        groups[0]["gated"], groups[1]["gated"] = learner.gated == "hidden", learner.gated == "output"
    return upgd.methods.optimizer(learner.method, groups, curvature=curvature, **settings)


def plain(
    patch: pytest.MonkeyPatch, learner: Learner, network: nn.Module = NETWORK
) -> tuple[list[float], dict[str, Tensor]]:
    """Return losses and final parameters of a learner in a plain loop, in float64."""
    model = reset(copy.deepcopy(network).double(), learner.seed)
    criterion = nn.CrossEntropyLoss()
    optimizer = optimizer_of(model, criterion, learner)
    norm = upgd.OnlineNorm(STREAM.input_shape, learner.normalize).double() if learner.normalize else nn.Identity()
    sizes = [param.numel() for param in model.parameters()]
    normals = learner_normals(learner.seed, torch.arange(1, STEPS + 1), sum(sizes), dtype=torch.float64)

    def draw(_: object, param: Tensor) -> Tensor:
        """Return the learner's noise for a parameter at this step, independent of the order of calls."""
        pieces = zip(model.parameters(), normals[step - 1].split(sizes), strict=True)
        return next(piece for own, piece in pieces if own is param).view_as(param)

    patch.setattr(BaseOptimizer, "_draw", draw)
    weights = [param for param in model.parameters() if param.ndim > 1]

    def fresh(_: object, weight: Tensor) -> Tensor:
        """Return the population's random numbers for the incoming weights of reset units."""
        layer = next(number for number, own in enumerate(weights) if own is weight)
        keys = upgd.noise.words(torch.tensor([learner.seed]), Purpose.RESET, step, 4 * (layer + 1))[:, -4:]
        index = torch.arange(weight.numel(), dtype=torch.int32)
        return upgd.noise.uniforms_at(keys.to(torch.int32), index).double().view_as(weight)

    patch.setattr(UnitMethodOptimizer, "_uniform", fresh)
    chunk = STREAM.chunk([learner.seed], 0, STEPS)
    losses = []
    for step, (x, y) in enumerate(zip(chunk.inputs()[0].double(), chunk.targets[0], strict=True), start=1):  # noqa: B007
        model.zero_grad()
        getattr(optimizer, "zero_grad", model.zero_grad)()
        loss = criterion(model(norm(x[None])), y[None])
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, {name: param.detach() for name, param in model.named_parameters()}


@every_variant
def test_equals_a_plain_loop_in_float64(name, monkeypatch):
    learner = LEARNERS[name]
    losses, parameters = plain(monkeypatch, learner)
    population = crowd(torch.float64)
    np.testing.assert_allclose(population.result().loss[:, place(name)], losses, rtol=1e-10, atol=1e-10)
    assert_same(population.parameters(place(name)), parameters, rtol=1e-10, atol=1e-10)


SIMPLE = {
    name: learner
    for name, learner in LEARNERS.items()
    if not learner.normalize
    and (learner.gated or "all") == "all"
    and (learner.profile or "paper") == "paper"
    and (learner.scaling or "global") == "global"
    and (learner.noise or "white") == "white"
}


@functools.cache
def other_crowd(dtype: torch.dtype) -> Population:
    population = Population(OTHER_NETWORK, list(SIMPLE.values()), backend="torch", dtype=dtype)
    population.run(STREAM, STEPS, window=1)
    return population


@pytest.mark.parametrize("name", SIMPLE)
def test_equals_a_plain_loop_with_layer_norm_and_crelu(name, monkeypatch):
    losses, parameters = plain(monkeypatch, SIMPLE[name], OTHER_NETWORK)
    population, at = other_crowd(torch.float64), list(SIMPLE).index(name)
    np.testing.assert_allclose(population.result().loss[:, at], losses, rtol=1e-9, atol=1e-9)
    assert_same(population.parameters(at), parameters, rtol=1e-9, atol=1e-9)
    alone = Population(OTHER_NETWORK, [SIMPLE[name]], backend="torch")
    alone.run(STREAM, STEPS, window=1)
    assert_same(alone.parameters(0), other_crowd(torch.float32).parameters(at))


# ----------------------------------------------------------------------------------------------- guarantees of backends


@every_variant
def test_results_are_independent_of_other_learners(name):
    alone = Population(NETWORK, [LEARNERS[name]], backend="torch")
    alone.run(STREAM, 10, window=1)
    assert_same(alone.parameters(0), crowd(torch.float32, 10).parameters(place(name)))


def test_results_do_not_depend_on_chunks():
    parts = Population(NETWORK, list(LEARNERS.values()), backend="torch")
    parts._pace.STEPS = parts._pace.steps = 7
    for steps in (1, 13, STEPS - 14):
        parts.run(STREAM, steps, window=1)
    for i in range(len(LEARNERS)):
        assert_same(parts.parameters(i), crowd(torch.float32).parameters(i))


def test_a_saved_state_can_be_resumed():
    learners = list(LEARNERS.values())
    first = Population(NETWORK, learners, backend="torch")
    first.run(STREAM, 11, window=1)
    second = Population(NETWORK, learners, backend="torch")
    second.restore(first.state())
    second.run(STREAM, STEPS - 11, window=1)
    for i in range(len(LEARNERS)):
        assert_same(second.parameters(i), crowd(torch.float32).parameters(i))


def test_a_diverged_learner_freezes_without_affecting_others():
    """Every second learner starts with infinite weights in the output layer."""
    learners = [learner for learner in LEARNERS.values() for _ in range(2)]
    initial = upgd.networks.initial_parameters(NETWORK, [learner.seed for learner in learners])
    initial["layers.4.weight"][1::2] = float("inf")
    population = Population(NETWORK, learners, backend="torch", parameters=initial)
    population.run(STREAM, STEPS, window=1)
    assert (population.diverged_at[0::2] == -1).all()
    assert (population.diverged_at[1::2] == 0).all()
    for i in range(len(LEARNERS)):
        assert_same(population.parameters(2 * i), crowd(torch.float32).parameters(i))
        assert_same(population.parameters(2 * i + 1), {name: p[2 * i + 1] for name, p in initial.items()})


@pytest.mark.parametrize("name", dict.fromkeys(learner.method for learner in LEARNERS.values()))
def test_every_method_describes_itself(name):
    method = METHODS[name]
    assert method.label
    assert method.__doc__
    for key, setting in method.settings.items():
        assert setting.check(key, setting.example) is not None
        for value in setting.grid:
            setting.check(key, value)
