"""``reset_units`` traced to operations on one unit, compared with the hook on tensors; and hooks that cannot be traced."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from upgd.methods import METHODS, Method
from upgd.methods._scalars import evaluate
from upgd.methods.reset_tracing import ResetRule, traced_reset
from upgd.methods.tracing import CannotTrace
from upgd.methods.units import Reset, Units

SETTINGS = {
    "continual-backprop": {"replacement_rate": 0.5, "maturity": 2.0, "decay_contribution": 0.9},
    "redo": {"tau": 0.8, "period": 3.0},
    "self-normalized-resets": {"rejection": 0.3, "patience": 2.0},
}
OPERATIONS = {
    "add": np.add,
    "sub": np.subtract,
    "mul": np.multiply,
    "div": np.divide,
    "abs": np.abs,
    "exp": np.exp,
    "pow": np.power,
    "floor": np.floor,
    "gt": np.greater,
    "le": np.less_equal,
    "and": np.logical_and,
    "where": np.where,
}


def evaluated(rule: ResetRule, place: int, inputs: dict, scalars: list[float]) -> np.ndarray:
    """Evaluate a value for all units, including joins; kernels distribute this loop over threads."""

    def value(place: int) -> np.ndarray:
        kind, *arguments = rule.nodes[place]
        if kind == "constant":
            return np.float64(arguments[0])
        if kind == "scalar":
            return np.float64(scalars[arguments[0]])
        if kind == "unit_state":
            return inputs["state"][arguments[0]]
        if kind == "outgoing_sum":
            return value(rule.outgoing[arguments[0]]).sum(0)
        if kind == "joined":
            join = rule.joins[arguments[0]]
            own = np.broadcast_to(value(join.value), inputs["activation"].shape)
            if join.operation != "smallest":
                return {"sum": np.sum, "mean": np.mean, "max": np.max}[join.operation](own)
            ranks = np.empty(len(own))
            ranks[np.argsort(own, kind="stable")] = np.arange(len(own))
            return ranks < value(join.limit)
        return inputs[kind] if kind in inputs else OPERATIONS[kind](*map(value, arguments))

    return value(place)


@pytest.mark.parametrize("name", SETTINGS)
@pytest.mark.parametrize("step", [3, 4])
def test_it_equals_the_hook(name: str, step: int) -> None:
    method, settings = METHODS[name](), SETTINGS[name]
    generator = torch.Generator().manual_seed(step)
    outgoing = torch.randn(1, 4, 6, 1, dtype=torch.float64, generator=generator)
    activation = torch.randn(1, 6, 1, dtype=torch.float64, generator=generator)
    activation[0, ::2] = 0
    state = {
        part: torch.tensor([[1.5]]).double() if begins == "layer" else torch.arange(6.0)[None].double() + 1
        for part, begins in method.unit_state.items()
    }
    nothing = torch.zeros(1, 6, dtype=torch.float64)
    units = Units(activation, activation, nothing, None, nothing[..., None], None, outgoing)
    h = SimpleNamespace(**settings)
    reset, new = method.call("reset_units", units=units, s=SimpleNamespace(**state), h=h, t=torch.tensor(step))

    rule = traced_reset(method)
    assert rule is not None
    known = {key: torch.tensor([value], dtype=torch.float64) for key, value in settings.items()} | {"t": step}
    scalars = [float(evaluate(scalar, known, torch.zeros(1).double())) for scalar in rule.scalars]
    inputs = {
        "state": [value.numpy()[0] for value in state.values()],
        "activation": activation.numpy()[0, :, 0],
        "outgoing": outgoing.numpy()[0, :, :, 0],
    }
    chosen = np.broadcast_to(evaluated(rule, rule.chosen, inputs, scalars).astype(bool), 6)
    assert chosen.tolist() == reset.units[0].tolist()
    assert chosen.any() == (name != "redo" or step == 3)
    for place, expected in zip(rule.new_state, new.values(), strict=True):
        np.testing.assert_allclose(
            np.broadcast_to(evaluated(rule, place, inputs, scalars), expected.shape[1]), expected[0], rtol=1e-12
        )
    assert (rule.moved is None) == (reset.next_bias is None)
    if rule.moved is not None:
        moved = inputs["outgoing"] @ evaluated(rule, rule.moved, inputs, scalars)
        np.testing.assert_allclose(moved, reset.next_bias[0], rtol=1e-12)
    assert rule.zeroes


def hook(function) -> Method:
    made = type(
        "Made", (Method,), {"reset_units": lambda self, units, s: function(units, s), "update": lambda self, w: w}
    )
    made.unit_state = {"age": "zeros"}
    return made()


@pytest.mark.parametrize(
    ("function", "why"),
    [
        (lambda units, s: (Reset(units.bias > 0), {}), r"units\.bias"),
        (lambda units, s: (Reset(s.velocity > 0), {}), r"the state s\.velocity of weights"),
        (lambda units, s: (Reset(s.age.argsort() < 2), {}), "stable=True"),
        (lambda units, s: (Reset(s.age.argsort(stable=True) < 2), {}), "more than choosing"),
        (lambda units, s: (Reset(s.age.argsort(stable=True).argsort() > 2), {}), "more than choosing"),
        (lambda units, s: (Reset(s.age + units.activation > 0), {}), "combines the shapes"),
        (lambda units, s: (Reset((units.outgoing * s.age[:, None, :, None]).sum(1) > 0), {}), "sums more than"),
        (lambda units, s: (Reset(units.outgoing.mean((1, 3)) > 0), {}), "the mean over output"),
        (lambda units, s: (Reset(s.age > 0, units.outgoing.abs().sum((2, 3))), {}), "next_bias is not the sum"),
        (lambda units, s: (Reset(s.age[:, 1:] > 0), {}), "only support : and None"),
        (lambda units, s: (Reset(s.age > 0), {"age": units.activation}), "which kernels do not support"),
        (lambda units, s: (Reset(s.age.cumsum(-1) > 0), {}), "cumsum"),
    ],
)
def test_a_hook_that_cannot_be_traced_is_refused_with_the_reason(function, why: str) -> None:
    with pytest.raises(CannotTrace, match=why):
        traced_reset(hook(function))


def test_equality_is_traced() -> None:
    rule = traced_reset(hook(lambda units, s: (Reset(s.age + 1 == 3), {"age": torch.where(s.age != 2, s.age + 1, 0)})))
    assert rule is not None
    assert rule.nodes[rule.chosen][0] == "eq"
    assert "ne" in {node[0] for node in rule.nodes}


def test_a_state_that_is_not_declared_is_refused() -> None:
    with pytest.raises(ValueError, match="changes the state 'v', which it does not declare"):
        traced_reset(hook(lambda units, s: (Reset(s.age > 0), {"v": s.age})))


def test_a_method_without_the_hook_has_no_resets() -> None:
    assert traced_reset(METHODS["sgd"]()) is None
