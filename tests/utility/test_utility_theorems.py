"""Utility propagation and conservation, as properties of random networks."""

from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from upgd import utility
from upgd.networks import MLP

#: σ(a) = a·σ'(a): linear on each side of the origin.
HOMOGENEOUS = [nn.ReLU, nn.Identity, nn.LeakyReLU, lambda: nn.LeakyReLU(0.3)]
#: σ(0) = 0, but nonlinear.
BENT = [nn.Tanh, nn.ELU, nn.SiLU, nn.GELU]


@st.composite
def problems(draw, activations, *, bias=True, most_samples=3):
    """A chain of random depth, widths and weights, a loss, inputs and targets."""
    sizes = draw(st.lists(st.integers(1, 6), min_size=3, max_size=5))
    torch.manual_seed(draw(st.integers(0, 2**32)))
    layers = []
    for inputs, outputs in pairwise(sizes):
        activation = draw(st.sampled_from(activations))
        layers += [nn.Linear(inputs, outputs, bias=bias and draw(st.booleans())), activation()]
    count = draw(st.integers(1, most_samples))
    x = torch.randn(count, sizes[0], dtype=torch.float64)
    if draw(st.booleans()):
        criterion, y = nn.MSELoss(), torch.randn(count, sizes[-1], dtype=torch.float64)
    else:
        criterion, y = nn.CrossEntropyLoss(), torch.randint(sizes[-1], (count,))
    return nn.Sequential(*layers[:-1]).double(), criterion, x, y


def assert_close(a, b):
    torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-12)


@settings(max_examples=40)
@given(problems(HOMOGENEOUS + BENT))
def test_propagated_terms_are_those_of_autograd_and_hesscale(problem):
    model = problem[0]
    terms = utility.propagate(*problem)
    first, second = utility.first_order(*problem), utility.second_order(*problem)
    assert list(terms) == [name for name, _ in model.named_parameters()]
    for name, term in terms.items():
        assert_close(term.first, first[name])
        assert_close(term.total(), second[name])


def parameter_sums(utilities, model, place):
    """Return sums over incoming and outgoing weights of the units of Linear layer ``place``, from the definitions."""
    incoming = utilities[f"{place}.weight"].sum(1) + utilities.get(f"{place}.bias", 0)
    return incoming, utilities[f"{place + 2}.weight"].sum(0)


@settings(max_examples=40)
@given(problems(HOMOGENEOUS))
def test_first_order_utility_is_conserved(problem):
    """Exactly, also with biases if they count as incoming weights."""
    model = problem[0]
    balances, first = utility.conservation(*problem), utility.first_order(*problem)
    assert list(balances) == [str(place + 1) for place in range(0, len(model) - 2, 2)]
    for name, balance in balances.items():
        incoming, outgoing = parameter_sums(first, model, int(name) - 1)
        assert_close(incoming, outgoing)
        assert_close(balance.incoming.first, incoming)
        assert_close(balance.outgoing.first, outgoing)


@settings(max_examples=40)
@given(problems(HOMOGENEOUS))
def test_second_order_utility_is_conserved_up_to_the_interaction_of_incoming_weights(problem):
    model = problem[0]
    balances, second = utility.conservation(*problem), utility.second_order(*problem)
    for name, balance in balances.items():
        incoming, outgoing = parameter_sums(second, model, int(name) - 1)
        assert_close(balance.incoming.total(), incoming)
        assert_close(balance.outgoing.total(), outgoing)
        assert_close(incoming + balance.interaction, outgoing)


@settings(max_examples=40)
@given(problems(HOMOGENEOUS, bias=False))
def test_second_order_utility_is_conserved_where_the_theorem_s_assumption_holds(problem):
    """Units with one incoming weight have no off-diagonal second derivatives, so no term is missing."""
    model = problem[0]
    with torch.no_grad():
        for layer in model[:-1:2]:
            keep = torch.arange(layer.out_features) % layer.in_features
            layer.weight *= nn.functional.one_hot(keep, layer.in_features)
    balances, second = utility.conservation(*problem), utility.second_order(*problem)
    for name, balance in balances.items():
        incoming, outgoing = parameter_sums(second, model, int(name) - 1)
        assert_close(balance.interaction, torch.zeros_like(incoming))
        assert_close(incoming, outgoing)


@settings(max_examples=40)
@given(problems(BENT, most_samples=1))
def test_a_bent_activation_conserves_utility_up_to_its_elasticity(problem):
    """Passing the origin is not enough: incoming = a·σ'(a)/σ(a) · outgoing."""
    model, _, x, _ = problem
    for name, balance in utility.conservation(*problem).items():
        a = model[: int(name)](x).detach().requires_grad_()
        h = model[int(name)](a)
        slope = torch.autograd.grad(h.sum(), a)[0]
        assert_close(balance.incoming.first * h.detach()[0], balance.outgoing.first * (a * slope).detach()[0])


@settings(max_examples=40)
@given(problems(HOMOGENEOUS + BENT))
def test_what_leaves_a_unit_is_the_utility_of_the_feature(problem):
    first = utility.first_order(*problem, of="features", features=names(problem[0]))
    second = utility.second_order(*problem, of="features", features=names(problem[0]))
    for name, balance in utility.conservation(*problem).items():
        assert_close(balance.outgoing.first, first[name])
        assert_close(balance.outgoing.total(), second[name])


def names(model):
    return [str(place) for place in range(1, len(model) - 1, 2)]


def test_conservation_with_tanh_does_fail():
    model = MLP((3, 4, 1), "tanh").double()
    balance = utility.conservation(model, nn.MSELoss(), torch.ones(1, 3).double(), torch.ones(1, 1).double())[
        "layers.1"
    ]
    assert not torch.allclose(balance.incoming.first, balance.outgoing.first, rtol=1e-3)


def test_an_undefined_recursion_is_reported():
    """A silent unit that is not dead: all its outgoing utilities are zero, those of its incoming weights are not."""
    model = nn.Sequential(nn.Linear(2, 1, bias=False), nn.Tanh(), nn.Linear(1, 1, bias=False)).double()
    with torch.no_grad():
        model[0].weight.copy_(torch.tensor([[1.0, -1.0]]))
    terms = utility.propagate(model, nn.MSELoss(), torch.ones(1, 2).double(), torch.ones(1, 1).double())
    assert terms["0.weight"].first.isnan().all()
    assert terms["2.weight"].total().item() == 0


def test_dead_units_propagate_zero():
    model = MLP((3, 20, 1), "relu").double()
    sample = nn.MSELoss(), torch.ones(1, 3).double(), torch.ones(1, 1).double()
    terms, first = utility.propagate(model, *sample), utility.first_order(model, *sample)
    dead = model.layers[0](sample[1])[0] < 0
    assert dead.any()
    assert (terms["layers.0.weight"].first[dead] == 0).all()
    assert_close(terms["layers.0.weight"].first, first["layers.0.weight"])


class Skip(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.act, self.last = nn.Linear(3, 3), nn.ReLU(), nn.Linear(3, 1)

    def forward(self, x):
        return self.last(x + self.act(self.first(x)))


@pytest.mark.parametrize("theorem", [utility.propagate, utility.conservation])
@pytest.mark.parametrize(
    ("model", "says"),
    [
        (Skip(), "the output of the module 'act' is not the input of the next one"),
        (nn.Sequential(nn.Linear(3, 3), nn.LayerNorm(3), nn.Linear(3, 1)), "'1' is a LayerNorm"),
        (nn.Sequential(nn.ReLU()), "no Linear layer"),
    ],
)
def test_models_that_are_not_chains_are_refused(theorem, model, says):
    with pytest.raises(ValueError, match=says):
        theorem(model, nn.MSELoss(), torch.ones(1, 3), torch.ones(1, 1))


def test_final_activations_belong_to_the_loss():
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2), nn.Sigmoid()).double()
    sample = nn.MSELoss(), torch.randn(2, 3).double(), torch.rand(2, 2).double()
    for name, term in utility.propagate(model, *sample).items():
        assert_close(term.total(), utility.second_order(model, *sample)[name])


@pytest.mark.parametrize("kind", [nn.LeakyReLU, nn.ELU])
def test_activations_that_work_in_place_change_nothing(kind):
    torch.manual_seed(0)
    apart = nn.Sequential(nn.Linear(3, 4), kind(), nn.Linear(4, 4), kind(), nn.Linear(4, 1)).double()
    in_place = nn.Sequential(apart[0], kind(inplace=True), apart[2], kind(inplace=True), apart[4])
    sample = nn.MSELoss(), torch.randn(1, 3, dtype=torch.float64), torch.zeros(1, 1, dtype=torch.float64)
    for a, b in zip(
        utility.propagate(apart, *sample).values(), utility.propagate(in_place, *sample).values(), strict=True
    ):
        assert_close(a.first, b.first)
        assert_close(a.second, b.second)
    assert_close(
        utility.conservation(apart, *sample)["1"].outgoing.first,
        utility.conservation(in_place, *sample)["1"].outgoing.first,
    )
