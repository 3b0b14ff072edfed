"""Each weight-wise method against a reference: float64, plain Python loops over single numbers, 200 steps."""

import functools
import itertools
import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import upgd
from upgd import noise

SHAPES = [(3, 4), (3,), (2, 3, 2, 2), ()]
STEPS = 200


class Supplied:
    """Precomputed gradients, curvature and noise for every step."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(0)

        def series() -> list[list[torch.Tensor]]:
            return [[torch.randn(s, generator=generator, dtype=torch.float64) for s in SHAPES] for _ in range(STEPS)]

        self.start = [torch.randn(s, generator=generator, dtype=torch.float64) for s in SHAPES]
        self.gradients, self.curvatures, self.noises = series(), series(), series()


SUPPLIED = Supplied()


def units(shape: tuple[int, ...]) -> list[list[int]]:
    """The flat indices of the weights that enter the same unit."""
    size = math.prod(shape)
    if len(shape) < 2:
        return [list(range(size))]
    row = size // shape[0]
    return [list(range(i * row, (i + 1) * row)) for i in range(shape[0])]


@functools.cache
def by_hand(
    *,
    lr: float,
    beta: float,
    sigma: float,
    wd: float,
    c: float,
    p: float,
    q: float,
    local: bool,
    second: bool,
    anti: bool,
    betas: tuple[float, float] | None = None,
    eps: float = 0.0,
) -> list[list[float]]:
    weights = [w.flatten().tolist() for w in SUPPLIED.start]
    traces = [[0.0] * len(w) for w in weights]
    last = [[0.0] * len(w) for w in weights]
    firsts = [[0.0] * len(w) for w in weights]
    seconds = [[0.0] * len(w) for w in weights]
    for t in range(1, STEPS + 1):
        gradients, curvatures, draws = (
            [x.flatten().tolist() for x in series[t - 1]]
            for series in (SUPPLIED.gradients, SUPPLIED.curvatures, SUPPLIED.noises)
        )
        corrected = [[0.0] * len(w) for w in weights]
        for k, i in indices(weights):
            m = -gradients[k][i] * weights[k][i]
            if second:
                m += 0.5 * curvatures[k][i] * weights[k][i] ** 2
            traces[k][i] = beta * traces[k][i] + (1 - beta) * m
            corrected[k][i] = traces[k][i] / (1 - beta**t)
        eta = max(max(u) for u in corrected)
        for k, shape in enumerate(SHAPES):
            for unit in units(shape):
                norm = math.sqrt(sum(corrected[k][i] ** 2 for i in unit))
                for i in unit:
                    scaled = corrected[k][i] / (norm if local else eta)
                    gate = 1 / (1 + math.exp(-scaled))
                    xi = draws[k][i] - (last[k][i] if anti else 0.0)
                    descent = gradients[k][i]
                    if betas is not None:
                        firsts[k][i] = betas[0] * firsts[k][i] + (1 - betas[0]) * descent
                        seconds[k][i] = betas[1] * seconds[k][i] + (1 - betas[1]) * descent**2
                        size = math.sqrt(seconds[k][i] / (1 - betas[1] ** t)) + eps
                        descent = firsts[k][i] / (1 - betas[0] ** t) / size
                    step = c * descent * (1 - p * gate) + sigma * xi * (1 - q * gate)
                    weights[k][i] = (1 - lr * wd) * weights[k][i] - lr * step
                    last[k][i] = draws[k][i]
    return weights


def indices(weights: list[list[float]]) -> Iterator[tuple[int, int]]:
    return ((k, i) for k, w in enumerate(weights) for i in range(len(w)))


class GivenCurvature:
    def __init__(self, params: list[torch.nn.Parameter]) -> None:
        self.params, self.step = params, 0

    def diagonal(self, param: torch.Tensor) -> torch.Tensor:
        number = next(k for k, own in enumerate(self.params) if own is param)
        return SUPPLIED.curvatures[self.step][number]


def run(monkeypatch: pytest.MonkeyPatch, build: Any, second: bool) -> list[list[float]]:
    params = [torch.nn.Parameter(w.clone()) for w in SUPPLIED.start]
    curvature = GivenCurvature(params)
    optimizer = build(params, curvature=curvature) if second else build(params)
    for t in range(STEPS):
        curvature.step = t
        draws = iter(SUPPLIED.noises[t])
        monkeypatch.setattr(noise, "white_", lambda out, generator, draws=draws: out.copy_(next(draws)))
        for param, gradient in zip(params, SUPPLIED.gradients[t], strict=True):
            param.grad = gradient.clone()
        optimizer.step()
    return [param.detach().flatten().tolist() for param in params]


def check(result: list[list[float]], expected: list[list[float]]) -> None:
    for ours, theirs in zip(result, expected, strict=True):
        torch.testing.assert_close(torch.tensor(ours), torch.tensor(theirs), rtol=1e-10, atol=1e-12)


VARIANTS = list(itertools.product([False, True], repeat=4))


@pytest.mark.parametrize("foreach", [False, True])
@pytest.mark.parametrize(("local", "second", "anti", "protect"), VARIANTS)
def test_upgd(
    monkeypatch: pytest.MonkeyPatch, local: bool, second: bool, anti: bool, protect: bool, foreach: bool
) -> None:
    def build(params: Any, **kwargs: Any) -> torch.optim.Optimizer:
        return upgd.UPGD(
            params,
            lr=0.02,
            beta_utility=0.97,
            sigma=0.3,
            weight_decay=0.05,
            scaling="local" if local else "global",
            noise="anticorrelated" if anti else "white",
            protect_gradient=protect,
            foreach=foreach,
            **kwargs,
        )

    rule = {"lr": 0.02, "beta": 0.97, "sigma": 0.3, "wd": 0.05, "c": 1.0, "p": float(protect), "q": 1.0}
    expected = by_hand(**rule, local=local, second=second, anti=anti)
    check(run(monkeypatch, build, second), expected)


@pytest.mark.parametrize("foreach", [False, True])
@pytest.mark.parametrize(("local", "second", "anti", "protect"), VARIANTS)
def test_ada_upgd(
    monkeypatch: pytest.MonkeyPatch, local: bool, second: bool, anti: bool, protect: bool, foreach: bool
) -> None:
    def build(params: Any, **kwargs: Any) -> torch.optim.Optimizer:
        return upgd.AdaUPGD(
            params,
            lr=0.02,
            betas=(0.8, 0.99),
            eps=0.01,
            beta_utility=0.97,
            sigma=0.3,
            weight_decay=0.05,
            scaling="local" if local else "global",
            noise="anticorrelated" if anti else "white",
            protect_gradient=protect,
            foreach=foreach,
            **kwargs,
        )

    rule = {"lr": 0.02, "beta": 0.97, "sigma": 0.3, "wd": 0.05, "c": 1.0, "p": float(protect), "q": 1.0}
    expected = by_hand(**rule, local=local, second=second, anti=anti, betas=(0.8, 0.99), eps=0.01)
    check(run(monkeypatch, build, second), expected)


@pytest.mark.parametrize("foreach", [False, True])
@pytest.mark.parametrize(("local", "second", "anti"), list(itertools.product([False, True], repeat=3)))
def test_ups(monkeypatch: pytest.MonkeyPatch, local: bool, second: bool, anti: bool, foreach: bool) -> None:
    def build(params: Any, **kwargs: Any) -> torch.optim.Optimizer:
        return upgd.UPS(
            params,
            lr=1.0,
            beta_utility=0.9,
            sigma=0.05,
            scaling="local" if local else "global",
            noise="anticorrelated" if anti else "white",
            foreach=foreach,
            **kwargs,
        )

    rule = {"lr": 1.0, "beta": 0.9, "sigma": 0.05, "wd": 0.0, "c": 0.0, "p": 0.0, "q": 1.0}
    expected = by_hand(**rule, local=local, second=second, anti=anti)
    check(run(monkeypatch, build, second), expected)


@pytest.mark.parametrize("foreach", [False, True])
@pytest.mark.parametrize(("wd", "anti"), [(0.0, False), (0.0, True), (0.1, False)])
def test_pgd_and_shrink_and_perturb(monkeypatch: pytest.MonkeyPatch, wd: float, anti: bool, foreach: bool) -> None:
    def build(params: Any) -> torch.optim.Optimizer:
        if wd:
            return upgd.ShrinkAndPerturb(params, 0.03, sigma=0.2, weight_decay=wd, foreach=foreach)
        return upgd.PGD(params, 0.03, sigma=0.2, noise="anticorrelated" if anti else "white", foreach=foreach)

    rule = {"lr": 0.03, "beta": 0.5, "sigma": 0.2, "wd": wd, "c": 1.0, "p": 0.0, "q": 0.0}
    check(run(monkeypatch, build, False), by_hand(**rule, local=False, second=False, anti=anti))
