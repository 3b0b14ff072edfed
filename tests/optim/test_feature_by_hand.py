"""The feature-wise methods against a reference: float64, plain Python loops over single numbers, 200 steps."""

import functools
import itertools
import math
import sys
from typing import Any

import pytest
import torch
from torch import nn

import upgd
from upgd import noise

SIZES = (3, 4, 3, 2)
BATCH = 2
STEPS = 200


class Supplied:
    """Precomputed initial weights, samples, targets and noise for every step."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(0)

        def random(*shape: int) -> torch.Tensor:
            return torch.randn(*shape, generator=generator, dtype=torch.float64)

        shapes = [s for i, o in itertools.pairwise(SIZES) for s in ((o, i), (o,))]
        self.start = [random(*shape) for shape in shapes]
        self.inputs, self.targets = random(STEPS, BATCH, SIZES[0]), random(STEPS, BATCH, SIZES[-1])
        self.noises = [[random(*shape) for shape in shapes[:-2]] for _ in range(STEPS)]


SUPPLIED = Supplied()
Layer = dict[str, Any]


def derivatives(layers: list[Layer], x: list[float], target: list[float]) -> None:
    """Add one sample's gradients to the layers, and for hidden ones gradient ``dm`` and curvature ``ddm`` of the gates."""
    inputs, hidden = [], x
    for number, layer in enumerate(layers):
        inputs.append(hidden)
        a = [
            sum(w * v for w, v in zip(row, hidden, strict=True)) + b
            for row, b in zip(layer["w"], layer["b"], strict=True)
        ]
        hidden = [math.tanh(v) for v in a] if number < len(layers) - 1 else a
        layer["h"] = hidden
    count = BATCH * SIZES[-1]
    g = [2 * (y - t) / count for y, t in zip(hidden, target, strict=True)]
    s = [2 / count] * len(g)
    for number in reversed(range(len(layers))):
        layer, below = layers[number], inputs[number]
        for i in range(len(g)):
            layer["gb"][i] += g[i]
            for j in range(len(below)):
                layer["gw"][i][j] += g[i] * below[j]
        if number == 0:
            return
        w, under = layer["w"], layers[number - 1]
        g_hidden = [sum(g[k] * w[k][i] for k in range(len(g))) for i in range(len(below))]
        s_hidden = [sum(s[k] * w[k][i] ** 2 for k in range(len(s))) for i in range(len(below))]
        for i, h in enumerate(below):
            under["dm"][i] += g_hidden[i] * h
            under["ddm"][i] += s_hidden[i] * h**2
        slope = [1 - h**2 for h in below]
        bend = [-2 * h * (1 - h**2) for h in below]
        s = [s_hidden[i] * slope[i] ** 2 + g_hidden[i] * bend[i] for i in range(len(below))]
        g = [g_hidden[i] * slope[i] for i in range(len(below))]


@functools.cache
def by_hand(
    *, lr: float, beta: float, sigma: float, wd: float, c: float, p: float, local: bool, second: bool, anti: bool
) -> list[Any]:
    start = [tensor.tolist() for tensor in SUPPLIED.start]
    layers: list[Layer] = [{"w": w, "b": b, "u": [0.0] * len(b)} for w, b in zip(start[::2], start[1::2], strict=True)]
    last = [torch.zeros_like(draw).tolist() for draw in SUPPLIED.noises[0]]
    for t in range(1, STEPS + 1):
        for layer in layers:
            units = len(layer["b"])
            layer.update(gb=[0.0] * units, gw=[[0.0] * len(layer["w"][0]) for _ in range(units)])
            layer.update(dm=[0.0] * units, ddm=[0.0] * units)
        for x, target in zip(SUPPLIED.inputs[t - 1].tolist(), SUPPLIED.targets[t - 1].tolist(), strict=True):
            derivatives(layers, x, target)
        for layer in layers[:-1]:
            for i in range(len(layer["u"])):
                m = -layer["dm"][i] + (0.5 * layer["ddm"][i] if second else 0.0)
                layer["u"][i] = beta * layer["u"][i] + (1 - beta) * m
            layer["unbiased"] = [u / (1 - beta**t) for u in layer["u"]]
        # If no utility is positive, negative utilities get the gate 0.
        eta = max([sys.float_info.min, *(max(layer["unbiased"]) for layer in layers[:-1])])
        draws = [draw.tolist() for draw in SUPPLIED.noises[t - 1]]
        for number, layer in enumerate(layers[:-1]):
            scale = math.sqrt(sum(u**2 for u in layer["unbiased"])) if local else eta
            for i, u in enumerate(layer["unbiased"]):
                gate = 1 / (1 + math.exp(-u / scale)) if u / scale > -700 else 0.0

                def updated(w: float, g: float, draw: float, before: float, gate: float = gate) -> float:
                    xi = draw - before if anti else draw
                    return (1 - lr * wd) * w - lr * (c * g * (1 - p * gate) + sigma * xi * (1 - gate))

                row = zip(layer["w"][i], layer["gw"][i], draws[2 * number][i], last[2 * number][i], strict=True)
                layer["w"][i] = [updated(*entry) for entry in row]
                layer["b"][i] = updated(
                    layer["b"][i], layer["gb"][i], draws[2 * number + 1][i], last[2 * number + 1][i]
                )
        last = draws
        top = layers[-1]  # plain gradient descent
        for i in range(len(top["b"])):
            top["b"][i] = (1 - lr * wd) * top["b"][i] - lr * top["gb"][i]
            top["w"][i] = [(1 - lr * wd) * w - lr * g for w, g in zip(top["w"][i], top["gw"][i], strict=True)]
    return [layer[key] for layer in layers for key in ("w", "b")]


def run(monkeypatch: pytest.MonkeyPatch, build: Any, second: bool) -> list[torch.Tensor]:
    layers = [m for i, o in itertools.pairwise(SIZES) for m in (nn.Linear(i, o), nn.Tanh())]
    model, criterion = nn.Sequential(*layers[:-1]).double(), nn.MSELoss()
    for param, value in zip(model.parameters(), SUPPLIED.start, strict=True):
        param.data = value.clone()
    options = {"curvature": upgd.HesScale(model, criterion)} if second else {}
    optimizer = build(model, **options)
    for t in range(STEPS):
        draws = iter(SUPPLIED.noises[t])
        monkeypatch.setattr(noise, "white_", lambda out, generator, draws=draws: out.copy_(next(draws)))
        optimizer.zero_grad()
        criterion(model(SUPPLIED.inputs[t]), SUPPLIED.targets[t]).backward()
        optimizer.step()
    return [param.detach() for param in model.parameters()]


def check(result: list[torch.Tensor], expected: list[Any]) -> None:
    for ours, theirs in zip(result, expected, strict=True):
        torch.testing.assert_close(ours, torch.tensor(theirs, dtype=torch.float64), rtol=1e-10, atol=1e-12)


# The difference of foreach=False is tested for every optimizer in test_interface.py.
@pytest.mark.parametrize(
    ("local", "second", "anti", "protect", "foreach"),
    [
        *itertools.product([False, True], [False, True], [False, True], [False, True], [None]),
        *itertools.product([False, True], [True], [True], [True], [False]),
    ],
)
def test_feature_upgd(
    monkeypatch: pytest.MonkeyPatch, local: bool, second: bool, anti: bool, protect: bool, foreach: bool | None
) -> None:
    def build(model: nn.Module, **kwargs: Any) -> torch.optim.Optimizer:
        return upgd.FeatureUPGD(
            model,
            lr=0.05,
            beta_utility=0.97,
            sigma=0.3,
            weight_decay=0.05,
            scaling="local" if local else "global",
            noise="anticorrelated" if anti else "white",
            protect_gradient=protect,
            foreach=foreach,
            **kwargs,
        )

    rule = {"lr": 0.05, "beta": 0.97, "sigma": 0.3, "wd": 0.05, "c": 1.0, "p": float(protect)}
    check(run(monkeypatch, build, second), by_hand(**rule, local=local, second=second, anti=anti))


@pytest.mark.parametrize(("local", "second", "anti"), list(itertools.product([False, True], repeat=3)))
def test_feature_ups(monkeypatch: pytest.MonkeyPatch, local: bool, second: bool, anti: bool) -> None:
    def build(model: nn.Module, **kwargs: Any) -> torch.optim.Optimizer:
        return upgd.FeatureUPS(
            model,
            lr=0.1,
            beta_utility=0.9,
            sigma=0.2,
            scaling="local" if local else "global",
            noise="anticorrelated" if anti else "white",
            **kwargs,
        )

    rule = {"lr": 0.1, "beta": 0.9, "sigma": 0.2, "wd": 0.0, "c": 0.0, "p": 0.0}
    check(run(monkeypatch, build, second), by_hand(**rule, local=local, second=second, anti=anti))
