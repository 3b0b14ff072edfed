"""The rules of examples/their_rules.py, compared with loops written from the pseudo-code and the authors' public code."""

import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from unittest import mock

import pytest
import torch
from by_hand import assert_learned, learned_by_hand, population_of
from torch import Tensor, nn

from upgd import plugins
from upgd.methods import registry

EXAMPLE = Path(__file__).parents[2] / "examples" / "their_rules.py"
SETTINGS = [{"lr": 0.05, "beta_utility": 0.9, "sigma": 0.0}, {"lr": 0.02, "beta_utility": 0.5, "sigma": 0.0}]


@pytest.fixture(autouse=True)
def registered(monkeypatch) -> Iterator[None]:
    """The methods of the example, which no other test sees."""
    monkeypatch.syspath_prepend(EXAMPLE.parent)
    with ExitStack() as stack:
        for changed in (registry._REGISTERED, plugins._ORIGINS, plugins._LOADED):
            stack.enter_context(mock.patch.dict(changed))
        plugins.load("their_rules")
        yield
        del sys.modules["their_rules"]


def gate(utility: Tensor, largest: Tensor) -> Tensor:
    return torch.sigmoid(utility / largest)


def test_a_maximum_that_grows() -> None:
    for seed, own in enumerate(SETTINGS):
        beta, lr, utility, largest = own["beta_utility"], own["lr"], {}, [torch.tensor(-torch.inf)]

        def step(model: nn.Module, t: int, beta=beta, lr=lr, utility=utility, largest=largest) -> None:
            for name, w in model.named_parameters():
                utility[name] = beta * utility.get(name, 0) - (1 - beta) * w.grad * w
                largest.append(torch.maximum(largest[-1], utility[name].max() / (1 - beta**t)))
            for name, w in model.named_parameters():
                w -= lr * w.grad * (1 - gate(utility[name] / (1 - beta**t), largest[-1]))

        by_hand = learned_by_hand("classes", seed, step)
        assert_learned(population_of("classes", "upgd-growing-maximum", SETTINGS), seed, by_hand)


class Hidden:
    """The hidden units and their derivatives, of the first, second or both orders, for MLP((6, 7, 5, 3))."""

    def __init__(self, model: nn.Module) -> None:
        self.outputs: list[Tensor] = []
        for at in (1, 3):
            model.layers[at].register_forward_hook(self._keep)

    def _keep(self, module: nn.Module, inputs: tuple[Tensor], output: Tensor) -> None:
        output.retain_grad()
        self.outputs.append(output)

    def gates(self) -> list[Tensor]:
        """∂L/∂gate of the first and the second hidden layer, of the last forward pass."""
        return [(h.grad * h)[0].detach() for h in self.outputs[-2:]]


def test_gates_on_the_weights_that_leave_a_feature() -> None:
    for seed, own in enumerate(SETTINGS):
        beta, lr, hidden, trace = own["beta_utility"], own["lr"], [], [0, 0]

        def step(model: nn.Module, t: int, beta=beta, lr=lr, hidden=hidden, trace=trace) -> None:
            for at, of_gate in enumerate(hidden[0].gates()):
                trace[at] = beta * trace[at] - (1 - beta) * of_gate
            largest = torch.stack([u.max() for u in trace]).max()
            for w in model.parameters():
                kept = torch.ones_like(w)
                if w.ndim == 2 and w.shape[1] != 6:  # columns of the second and the third layer
                    kept = 1 - gate(trace[0 if w.shape[1] == 7 else 1], largest).expand_as(w)
                w -= lr * w.grad * kept

        by_hand = learned_by_hand(
            "classes", seed, step, begin=lambda model, hidden=hidden: hidden.append(Hidden(model))
        )
        gated = [one | {"gated": "layers.2+layers.4"} for one in SETTINGS]
        assert_learned(population_of("classes", "upgd-outgoing-gates", gated), seed, by_hand)


def test_curvature_summed_over_the_units_of_a_layer() -> None:
    for seed, own in enumerate(SETTINGS):
        beta, lr, hidden, trace = own["beta_utility"], own["lr"], [], [0, 0]

        def step(model: nn.Module, t: int, beta=beta, lr=lr, hidden=hidden, trace=trace) -> None:
            first, second = (h[0] for h in hidden[0].outputs[-2:])
            outputs = model.layers[4](second)
            q = outputs.softmax(-1)
            at_second = (q - q**2) @ model.layers[4].weight ** 2  # HesScale, layer by layer
            at_first = (at_second * (second > 0)) @ model.layers[2].weight ** 2
            curvatures = [(at_first * first**2).sum(), (at_second * second**2).sum()]
            for at, (of_gate, curvature) in enumerate(zip(hidden[0].gates(), curvatures, strict=True)):
                trace[at] = beta * trace[at] + (1 - beta) * (curvature / 2 - of_gate)
            largest = torch.stack([u.max() for u in trace]).max()
            for at, layer in enumerate((model.layers[0], model.layers[2])):
                kept = 1 - gate(trace[at], largest)
                layer.weight -= lr * layer.weight.grad * kept[:, None]
                layer.bias -= lr * layer.bias.grad * kept
            for w in model.layers[4].parameters():
                w -= lr * w.grad

        by_hand = learned_by_hand(
            "classes", seed, step, begin=lambda model, hidden=hidden: hidden.append(Hidden(model))
        )
        assert_learned(population_of("classes", "upgd-summed-curvature", SETTINGS), seed, by_hand)


def test_the_commands_of_the_page_run(upgd, tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(EXAMPLE.parent)
    code, out, err = upgd(
        *("run", "output-permuted-digits", "--plugin", "their_rules", "--method", "upgd-growing-maximum"),
        *("--lr", "0.03", "--seeds", "2", "--steps", "20", "--store", str(tmp_path / "s.db"), "--quiet"),
    )
    assert code == 0, err
    assert "upgd-growing-maximum" in out
