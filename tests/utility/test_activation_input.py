"""Utility of features from the input of their activation, against autograd written out for one hidden layer."""

import pytest
import torch
from torch import nn

from upgd.utility import first_order, second_order


def _network(activation):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), activation, nn.Linear(6, 3)).double()
    return model, torch.randn(1, 4, dtype=torch.float64), torch.tensor([2])


def _by_autograd(model, x, y):
    """−a·∂L/∂a and ½·a²·∂²L/∂a² of each hidden unit."""
    a = model[0](x).detach().requires_grad_()
    loss = nn.functional.cross_entropy(model[2](model[1](a)), y)
    (gradient,) = torch.autograd.grad(loss, a, create_graph=True)
    second = torch.stack([torch.autograd.grad(gradient[0, i], a, retain_graph=True)[0][0, i] for i in range(6)])
    return (-a * gradient)[0].detach(), (a[0] ** 2 * second / 2).detach()


@pytest.mark.parametrize("activation", [nn.Tanh(), nn.ReLU(), nn.LeakyReLU(), nn.Identity(), nn.SiLU()], ids=str)
def test_it_is_the_form_of_section_3_2(activation):
    model, x, y = _network(activation)
    first, curved = _by_autograd(model, x, y)
    found = first_order(model, nn.CrossEntropyLoss(), x, y, of="features", at="input")["1"]
    torch.testing.assert_close(found, first)
    found = second_order(model, nn.CrossEntropyLoss(), x, y, of="features", at="input", curvature="exact")["1"]
    torch.testing.assert_close(found, first + curved)


@pytest.mark.parametrize(
    ("activation", "agree"),
    [(nn.ReLU(), True), (nn.LeakyReLU(), True), (nn.Identity(), True), (nn.Tanh(), False), (nn.SiLU(), False)],
    ids=str,
)
def test_it_agrees_with_the_gate_where_the_activation_is_homogeneous(activation, agree):
    """φ(m·a) = m·φ(a) for m > 0."""
    model, x, y = _network(activation)
    for measure, more in ((first_order, {}), (second_order, {"curvature": "exact"})):
        inside, behind = (
            measure(model, nn.CrossEntropyLoss(), x, y, of="features", at=at, **more)["1"] for at in ("input", "output")
        )
        assert torch.allclose(inside, behind, rtol=1e-9, atol=1e-12) == agree


def test_mistakes_get_a_sentence():
    model, x, y = _network(nn.Tanh())
    with pytest.raises(ValueError, match="at must be 'output' or 'input', not 'middle'"):
        first_order(model, nn.CrossEntropyLoss(), x, y, of="features", at="middle")
    with pytest.raises(ValueError, match="at='input' needs curvature='exact'"):
        second_order(model, nn.CrossEntropyLoss(), x, y, of="features", at="input")
