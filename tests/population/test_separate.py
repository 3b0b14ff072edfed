"""Rules that mix the learners of a population are refused, and all others are not."""

from contextlib import nullcontext

import pytest
import torch
from torch.nn import functional

from upgd.methods import Method, register
from upgd.methods.units import Reset
from upgd.networks import MLP
from upgd.population import Learner, Population

NETWORK = MLP((5, 4, 3))


@pytest.fixture
def population(registered):
    """Return a function that creates a population of two learners of a method made of these attributes."""

    def create(**attributes) -> Population:
        register(type("Made", (Method,), {"name": "made", **attributes}))
        return Population(NETWORK, [Learner(method="made", lr=0.1, seed=seed) for seed in (0, 1)], backend="torch")

    return create


MIXING = {
    "norm": lambda self, w, g, h: w - h.lr * g / (1 + g.norm()),
    "norm of a function": lambda self, w, g, h: w - h.lr * g / torch.linalg.vector_norm(torch.log1p(g.abs())),
    "mean over learners": lambda self, w, g, h: w - h.lr * (g - g.mean(0)),
    "normalize over learners": lambda self, w, g, h: w - h.lr * functional.normalize(g, dim=0),
    "flatten": lambda self, w, g, h: w - h.lr * g / (1 + g.flatten().norm()),
    "quantile": lambda self, w, g, h: w - h.lr * g / (1 + g.quantile(0.5).abs()),
    "random numbers": lambda self, w, g, h: w - h.lr * torch.rand_like(g),
}
SEPARATE = {
    "single entries": lambda self, w, g, h: w - h.lr * g,
    "a function without a kernel": lambda self, w, g, h: w - h.lr * torch.log1p(g.abs()),
    "over dimensions": lambda self, w, g, h: w - h.lr * g / (1 + torch.amax(g, dim=-1, keepdim=True).abs()),
}


@pytest.mark.parametrize("rule", MIXING)
def test_rules_that_mix_learners_are_refused(population, rule: str) -> None:
    with pytest.raises(ValueError, match="made cannot run in a population, because its rule computes other results"):
        population(update=MIXING[rule])


@pytest.mark.parametrize("rule", SEPARATE)
def test_other_rules_are_not(population, rule: str) -> None:
    population(update=SEPARATE[rule])


@pytest.mark.parametrize("mixing", [False, True])
def test_units_must_not_mix_learners_either(population, mixing: bool) -> None:
    def observe_units(self, units, s):
        return {"size": units.activation.abs().mean(-1)}, {}

    def update(self, w, g, h, unit):
        if unit is None:
            return w - h.lr * g
        return w - h.lr * g / (1 + (unit.s.size.max() if mixing else unit.s.size))

    refused = pytest.raises(ValueError, match="cannot run in a population") if mixing else nullcontext()
    with refused:
        population(unit_state={"size": "zeros"}, observe_units=observe_units, update=update)


def test_resets_must_not_mix_learners_either(population) -> None:
    def reset_units(self, units, s, h):
        size = 0.9 * s.size + 0.1 * units.activation.abs().mean(-1)
        return Reset(units=size < 0.5 * size.mean(), outgoing=True), {"size": size}

    with pytest.raises(ValueError, match="cannot run in a population"):
        population(unit_state={"size": "zeros"}, reset_units=reset_units, update=SEPARATE["single entries"])


def test_a_rule_with_an_error_raises_it_when_it_runs(population) -> None:
    def update(self, w, g, h):
        raise ArithmeticError("mine")

    assert population(update=update).backends == ("torch", "torch")
